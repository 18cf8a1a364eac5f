"""What can be plugged into a coordinator, which imports none of it. egg.py and tools hand over objects with a method
attach(coordinator) and `descriptors`, the number of files and sockets that are held open at most: islands.gossip.Terms,
whose `attach` returns a Hook, and tools.live_page.Where, whose `attach` returns the page.
"""

from cluster.wire import OTHER_CONFIG, Refused


class Hook:
    """An island that does nothing. The coordinator calls these methods in its own loop."""

    takes_version_1 = True     # a peer of protocol 1 takes no snapshots and cannot follow a change of the state
    handover = None            # what waits for a worker's state of this step; until then no chunk is handed out

    def admit_peer(self, card, author):
        """Raises Refused where the coordinator that calls may not be a peer. card: a greeting.Card of role "island"."""
        raise Refused(f"island {card.name}: this coordinator is no island: start it with --island NAME", OTHER_CONFIG)

    def _nothing(self, *_):
        pass

    check = _nothing           # (now): deadlines and whatever else is due; several times a second
    state_received = _nothing  # (upload): the state that was awaited, a finished snapshots.Upload that is remembered
    chunk_handed_out = step_completed = validated = snapshot_kept = _nothing
    # (): a chunk; (loss): a step is in the history; (step, value, unit); (step)
    status = _nothing          # its part of `egg.py status`, for JSON
    close = _nothing           # the coordinator ends; can be called more than once
