"""The snapshot file of another island on its way here, beside training and within a bandwidth."""

import threading
import time

from cluster import snapshots
from cluster.hub import Budget
from cluster.snapshots import HEAD_SIZE
from cluster.wire import BLOCK, STATE_REQUEST
from islands import merging

# A transfer is given up if STALLED seconds bring nothing or fewer bytes per second than LEAST_RATE, or, of a small
# state, than it needs to end within DEADLINE. The peer may reconnect meanwhile.
STALLED, LEAST_RATE, DEADLINE = 60.0, 8192.0, 600.0
LEAST_PIECE = 1 << 10      # least bytes of a state in one frame, however small the bandwidth
UNPACK_SECONDS = 0.005     # in which a state is decompressed before other work


class Bucket(Budget):
    """Bytes of states per second, `rate`, 0 for no limit. piece: bytes of a state in one frame."""

    def __init__(self, rate):
        self.piece = int(max(LEAST_PIECE, min(BLOCK, rate / 4))) if rate else BLOCK
        super().__init__(rate, max(2 * self.piece, rate / 2))

    def take(self, size):
        return not self.rate or super().take(size)


class Incoming:
    """A state that is fetched from a peer, as its `standing` offers it. got, total: bytes of its snapshot file that
    have come, and all; upload: its snapshots.Upload, None before the first piece; made: result of `prepare`."""

    requested = preparing = False
    upload = made = None

    def __init__(self, cfg, peer, standing, directory, bucket):
        self.cfg, self.peer, self.standing, self.directory, self.bucket = cfg, peer, standing, directory, bucket
        self.got = self.total = 0
        self._since, self._before = time.monotonic(), 0            # when the speed was last looked at, bytes until then

    @property
    def finished(self):
        return self.upload is not None and self.upload.finished

    def request(self):
        """Requests the next piece if the bandwidth allows it."""
        busy = self.requested or self.upload and (self.upload.finished or self.upload.pending)
        if not busy and self.peer.session and self.bucket.take(self.bucket.piece):
            self.requested = True
            self.peer.session.reply(STATE_REQUEST, self.standing.state, self.got, self.bucket.piece)

    def add(self, total, offset, data):
        """Takes a piece; the first one holds the head of the file. Raises ValueError, OSError as an Upload does."""
        self.requested, self.total = False, total
        if self.upload:
            self.upload.feed(total - HEAD_SIZE, offset - HEAD_SIZE, data)
        else:
            step, seed, stated, _, _, size = snapshots.read_head(data)
            if offset or stated != self.standing.state or size + HEAD_SIZE != total:
                raise ValueError("it is not the state that was stated")
            self.upload = snapshots.Upload(self.cfg, step, seed, None, self.directory, stated)
            if len(data) > HEAD_SIZE:
                self.upload.feed(size, 0, data[HEAD_SIZE:])
        self.got += len(data)

    def unpack(self):
        until = time.monotonic() + UNPACK_SECONDS
        while self.upload and self.upload.pending and time.monotonic() < until:
            self.upload.unpack()

    def drop(self):
        if self.upload is not None:
            self.upload.drop()

    def too_slow(self, now):
        """Why the transfer is to be given up, None while it goes on."""
        if now - self._since <= STALLED or self.finished:
            return None
        came, least = self.got - self._before, min(LEAST_RATE, self.total / DEADLINE)
        least = min(least, self.bucket.rate / 2) if self.bucket.rate else least
        if not came:
            return "nothing more came"
        if came < least * (now - self._since):
            return f"too little came, {came} bytes in {now - self._since:.0f} s,"
        self._since, self._before = now, self.got
        return None

    def prepare(self, fitness):
        """Does what does not need the own state in a thread: no worker has to wait. fitness: the own one."""
        def work():
            try:
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
        """(State of the next epoch, its body as a snapshot or None). Raises OSError, ValueError."""
        if isinstance(self.made, Exception):
            raise self.made
        state, body = self.made
        return (state, body) if body else (merging.merge(self.cfg, ours, state, fitness, self.standing.fitness), None)
