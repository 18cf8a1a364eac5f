"""The transfer of another island's snapshot file to this island, during training and within a bandwidth."""

import threading
import time

from cluster import snapshots
from cluster.hub import Budget
from cluster.snapshots import HEAD_SIZE
from cluster.wire import BLOCK, STATE_REQUEST
from islands import merging

# A transfer is given up if STALLED seconds bring nothing, or fewer bytes per second than LEAST_RATE or, for a small
# state, than it needs to end within DEADLINE. The peer may reconnect meanwhile.
STALLED = 60.0
LEAST_RATE = 8192.0
DEADLINE = 600.0
LEAST_PIECE = 1 << 10      # least bytes of a state in one frame, however small the bandwidth


class Bucket(Budget):
    """Bytes of states per second, `rate`, 0 for no limit. piece: bytes of a state in one frame."""

    def __init__(self, rate):
        self.piece = int(max(LEAST_PIECE, min(BLOCK, rate / 4))) if rate else BLOCK
        super().__init__(rate, max(2 * self.piece, rate / 2))

    def take(self, size):
        return not self.rate or super().take(size)


class Incoming:
    """A state that is fetched from a peer, as its `standing` offers it. got, total: bytes of its snapshot file that
    arrived, and all; upload: its snapshots.Upload, None before the first piece; made: what `prepare` has made, or its
    error: (parameters.State, its body as a snapshot, None where the state is not merged yet)."""

    requested = preparing = False
    upload = made = None
    got = total = _before = 0                        # _before: bytes by the last check of the speed

    def __init__(self, cfg, peer, standing, directory, bucket):
        self.cfg = cfg
        self.peer = peer
        self.standing = standing
        self.directory = directory
        self.bucket = bucket
        self._since = time.monotonic()               # of that check

    @property
    def finished(self):
        return self.upload and self.upload.whole

    def request(self):
        """Requests the next piece if the bandwidth allows it."""
        if not (self.requested or self.finished) and self.peer.session and self.bucket.take(self.bucket.piece):
            self.requested = True
            self.peer.session.reply(STATE_REQUEST, self.standing.state, self.got, self.bucket.piece)

    def add(self, total, offset, data):
        """Takes a piece; the first one holds the head of the file. Raises ValueError, OSError as an Upload does."""
        self.requested, self.total = False, total
        if self.upload:
            self.upload.feed(total - HEAD_SIZE, offset - HEAD_SIZE, data)
        else:
            head = snapshots.read_head(data)
            if offset or head.sha256 != self.standing.state or head.size + HEAD_SIZE != total:
                raise ValueError("it is not the state that was stated")
            self.upload = snapshots.Upload(self.cfg, head.step, head.seed, None, self.directory, head.sha256)
            if len(data) > HEAD_SIZE:
                self.upload.feed(head.size, 0, data[HEAD_SIZE:])
        self.got += len(data)

    def drop(self):
        if self.upload:
            self.upload.drop()

    def too_slow(self, now):
        """Why the transfer must be given up, None while it may continue."""
        if now - self._since <= STALLED or self.finished:
            return None
        came = self.got - self._before
        least = min(LEAST_RATE, self.total / DEADLINE, self.bucket.rate / 2 or LEAST_RATE)
        if not came:
            return "nothing more came"
        if came < least * (now - self._since):
            return f"too little came, {came} bytes in {now - self._since:.0f} s,"
        self._since, self._before = now, self.got
        return None

    def prepare(self, fitness):
        """Checks the state and merges, unless our own state is needed, in a thread, so that no worker waits. fitness:
        ours."""
        def work():
            try:
                self.upload.check()
                theirs = self.upload.state()
                if merging.needs_ours(self.cfg):
                    self.made = theirs, None
                else:
                    state = merging.merge(self.cfg, None, theirs, fitness, self.standing.fitness)
                    self.made = state, snapshots.pack(state)
            except (OSError, ValueError) as error:
                self.made = error
        self.preparing = True
        threading.Thread(target=work, daemon=True).start()

    def result(self, ours, fitness):
        """(State of the next epoch, its body as a snapshot, or None). Raises OSError, ValueError."""
        if isinstance(self.made, Exception):
            raise self.made
        state, body = self.made
        return (state, body) if body else (merging.merge(self.cfg, ours, state, fitness, self.standing.fitness), None)
