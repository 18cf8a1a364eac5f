"""A connection that speaks frames (cluster.wire). What the frames mean is up to its role: that of a greeting
(cluster.admission.Arrival) until the peer is let in, and then worker (egg_net.RemoteWorker) or reader of the status."""

import contextlib
import time

from cluster import hub, wire
from cluster.wire import BAD_FRAME, ERROR, FrameError, V1, V2, next_frame

FRAME_SECONDS = 30.0       # the longest time for a frame that has begun, and for reading an answer
FRAMES_A_TURN = 4          # frames of a peer that are taken in one turn of the loop


class Role:
    """What a peer is to this process. handle(opcode, payload) takes a frame, or raises."""

    waiting = False            # its request is held

    def __init__(self, session):
        self.session = session

    # check: deadlines, several times a second. closed: the connection has ended
    check = closed = hub.nothing


class Session(hub.Connection):
    """admission: the admission.Admission that reports its refusal; frames: see `take`; others: see hub.Connection."""

    role = None
    version = None             # that of its last frame, V1 or V2
    idle = None                # seconds for which it may be silent, None for ever
    frame_since = None         # since when it has begun a frame that is not complete
    _whole_frame = False       # one may have come that is not taken yet

    def __init__(self, admission, sock, address, frames, tls=None):
        self.admission = admission
        self.take(frames)
        super().__init__(admission.coordinator.hub, sock, address, admission.coordinator.progress.traffic, tls)
        self.title = self.address          # with its name, once that is known

    def take(self, frames):
        """From now on takes these frames, {version: opcodes}; others are ignored."""
        self.limits = wire.only(self.admission.limits, frames)

    def received(self):
        self._whole_frame = True                         # there may be one, unless none is seen below
        for _ in range(FRAMES_A_TURN):
            if not self.open or self.outbox:
                break
            if not (frame := next_frame(self.inbox, self.limits)):
                self._whole_frame = False
                break
            self.frame_since = None
            self.version = frame.version
            self.role.handle(frame.opcode, frame.payload)
        if self.open:
            if self._whole_frame:
                self.hub.again.add(self)
            self.frame_since = (self.frame_since or time.monotonic()) if self.inbox else None

    def full(self):
        return self._whole_frame

    def reply(self, opcode, *fields):
        self.send(wire.frame(opcode, *fields, version=self.version))

    def refuse(self, why, code=BAD_FRAME):
        """Closes the connection with a line in the log, and with an ERROR if the peer understands that."""
        if self.open:
            self.admission.report(self.title, why)
            if self.version == V2 and not self.outbox:
                text = why.encode("utf-8", "replace")[:ERROR.most]           # `why` may quote the peer
                with contextlib.suppress(OSError):
                    self.sock.send(wire.frame(ERROR, code, text, version=V2))
            self.close()

    failed = refuse

    def broken(self, error):
        place = "" if isinstance(error, FrameError) else f"what it sent cannot be handled: {type(error).__name__}: "
        self.refuse(f"{place}{error}", getattr(error, "code", BAD_FRAME))

    def check(self, now):
        self.role.check(now)
        if self.idle and now - self.heard > self.idle and not (self.version == V1 and self.role.waiting):
            self.refuse(f"said nothing for {self.idle:g} s")
        if self.frame_since and now - self.frame_since > FRAME_SECONDS:
            self.refuse("stopped in the middle of a frame")

    def closed(self):
        self.admission.leave(self)
        if self.role:
            self.role.closed()
