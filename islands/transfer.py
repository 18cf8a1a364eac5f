"""The snapshot files of islands on their way, beside training and within a bandwidth, in both directions."""

import os
import threading
import time

from cluster import snapshots
from cluster.hub import Budget
from cluster.snapshots import HEAD_SIZE
from cluster.wire import BLOCK, STATE, STATE_HEAD, STATE_REQUEST, STATE_WANTED
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
        """Whether `size` bytes may pass now; if so they are taken."""
        return not self.rate or super().take(size)


class Incoming:
    """A state that is fetched from a peer, as its `standing` offers it. got, total: bytes of its snapshot file that
    have come, and all; upload: its snapshots.Upload, None before the first piece; made: result of `prepare`."""

    def __init__(self, cfg, peer, standing, directory, bucket):
        self.cfg, self.peer, self.standing, self.directory, self.bucket = cfg, peer, standing, directory, bucket
        self.got = self.total = 0
        self.requested, self.preparing, self.upload, self.made = False, False, None, None
        self._since, self._before = time.monotonic(), 0            # when the speed was last looked at, bytes until then

    @property
    def finished(self):
        return self.upload is not None and self.upload.finished

    @property
    def pending(self):
        return self.upload is not None and self.upload.pending

    def request(self):
        """Requests the next piece if the bandwidth allows it."""
        wanted = self.peer.session and not (self.requested or self.finished or self.pending)
        if wanted and self.bucket.take(self.bucket.piece):
            self.requested = True
            piece = STATE_WANTED.pack(self.standing.state, self.got, self.bucket.piece)
            self.peer.session.reply(STATE_REQUEST, piece)

    def expects(self, peer, sha256):
        return self.peer is peer and self.requested and self.standing.state == sha256

    def add(self, total, offset, data):
        """Takes a piece; the first one holds the head of the file. Raises ValueError, OSError as an Upload does."""
        self.requested, self.total = False, total
        if offset != self.got or not data:
            raise ValueError(f"piece of {len(data)} bytes at {offset}, the next one is at {self.got}")
        self.got += len(data)
        if self.upload is None:
            self.upload = snapshots.upload_of_file(self.cfg, data, total, self.standing.state, self.directory)
            offset, data = HEAD_SIZE, data[HEAD_SIZE:]
        if data:
            self.upload.feed(total - HEAD_SIZE, offset - HEAD_SIZE, data)

    def unpack(self):
        """Unpacks for a moment what is pending."""
        until = time.monotonic() + UNPACK_SECONDS
        while self.pending and time.monotonic() < until:
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


class Outgoing:
    """Sends the snapshots of a coordinator to peers."""

    def __init__(self, coordinator, bucket):
        self.coordinator, self.bucket = coordinator, bucket

    def request(self, peer, payload):
        """A peer requests a piece of a state; while it waits for the bandwidth nothing more is read from it."""
        peer.session.role.wanted = STATE_WANTED.unpack(payload)
        peer.session.wait()
        self._send(peer)

    def check(self, peers):
        """Sends what had to wait."""
        for peer in peers:
            if peer.session and peer.session.waits:
                peer.session.hub.guard(peer.session, self._send, peer)

    def _send(self, peer):
        session = peer.session
        sha256, offset, size = session.role.wanted
        size = min(size, self.bucket.piece)
        if self.bucket.take(size):
            session.go_on()
            shelf = self.coordinator.shelf
            step = next((s for s, found in shelf.sha256.items() if found == sha256), None)
            path = None if step is None else os.path.join(shelf.directory, shelf.files[step])
            total, data = shelf.readers.piece(sha256, path, offset, size)
            if total and offset < total == offset + len(data):
                peer.given += 1
            session.reply(STATE, STATE_HEAD.pack(sha256, total, offset), data)
