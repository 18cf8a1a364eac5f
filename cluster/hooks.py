"""What can be plugged into a coordinator, which imports none of it. egg.py and tools hand over objects with a method
attach(coordinator): islands.gossip.Terms, whose `attach` returns a Hook, and tools.live_page.Where, whose `attach`
returns the page, and whose `descriptors` is the number of files and sockets that it holds open at most."""

from cluster.hub import nothing
from cluster.wire import OTHER_CONFIG, Refused


class Hook:
    """An island that does nothing. The coordinator calls these methods in its own loop."""

    takes_version_1 = True     # a peer of protocol 1 takes no snapshots and cannot follow a change of the state
    handover = None            # what waits for a worker's state of this step; until then no chunk is handed out

    def admit_peer(self, card, author):
        """Raises Refused where the coordinator that calls may not be a peer. card: a greeting.Card of role "island"."""
        raise Refused(f"island {card.name}: this coordinator is no island: start it with --island NAME", OTHER_CONFIG)

    check = nothing            # (now): deadlines and whatever else is due; several times a second
    peer_joined = nothing      # (session, card, author): a coordinator that called has been let in
    state_received = nothing   # (upload): the state that was awaited, a finished snapshots.Upload that is remembered
    chunk_handed_out = nothing     # (): a worker has begun with a chunk
    step_completed = nothing   # (loss): a step is in the history and no chunk of the next one handed out
    validated = nothing        # (step, value, unit): a worker has measured the state of this step
    snapshot_kept = nothing    # (step): there is a snapshot of this step
    status = nothing           # its part of `egg.py status`, for JSON
    close = nothing            # the coordinator ends; can be called more than once
