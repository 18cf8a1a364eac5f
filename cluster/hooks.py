"""What can be plugged into a coordinator, which imports none of it. egg.py and tools hand over objects with a method
attach(coordinator) and `descriptors`, the number of files and sockets that are held open at most: islands.gossip.Terms,
whose `attach` returns a Hook, and tools.live_page.Where, whose `attach` returns the page.
"""

from cluster.wire import OTHER_CONFIG, Refused


class Hook:
    """An island that does nothing. The coordinator calls these methods in its own loop."""

    takes_version_1 = True     # a peer of protocol 1 takes no snapshots and cannot follow a change of the state
    awaits_state = False       # a worker shall send the state of this step; until then no chunk is handed out

    def check(self, now):
        """Deadlines and whatever else is due; several times a second."""

    def admit_peer(self, card, author):
        """Raises Refused where the coordinator that calls may not be a peer. card: a greeting.Card of role "island"."""
        raise Refused(f"island {card.name}: this coordinator is no island: start it with --island NAME", OTHER_CONFIG)

    def peer_joined(self, session, card, author):
        """A coordinator that called has been let in; its session needs a role and limits now."""

    def state_received(self, upload):
        """A worker has sent the state that was awaited. upload: a finished snapshots.Upload that is remembered."""

    def chunk_handed_out(self):
        """A worker has begun with a chunk."""

    def step_completed(self, loss):
        """A step is in the history and no chunk of the next one handed out."""

    def validated(self, step, value, unit):
        """A worker has measured the state of this step."""

    def snapshot_kept(self, step):
        """There is a snapshot of this step."""

    def status(self):
        """Its part of `egg.py status`, for JSON."""

    def close(self):
        """The coordinator ends; can be called more than once."""
