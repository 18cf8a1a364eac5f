"""A connection that speaks frames (cluster.wire). What the frames mean is up to its role.

A session begins with the role of a greeting (cluster.admission.Arrival, islands.peers.Call). It gets another one when
the peer is let in: worker (cluster.dispatch.RemoteWorker), reader of the status, or island.
"""

import contextlib
import time

from cluster import hub, wire
from cluster.wire import BAD_FRAME, ERROR, FAILED, FrameError, ITSELF, V2, next_frame

FRAME_SECONDS = 30.0       # a peer may take so long for a frame it has begun, or to read an answer before its next one


class Role:
    """What a peer is to this process. Every role has handle(opcode, payload), which takes a frame; where that raises
    FrameError, the session is refused."""

    def __init__(self, session):
        self.session = session

    def begin(self):
        """The connection that was begun here stands."""

    def check(self, now):
        """Enforces deadlines; several times a second."""

    def closed(self):
        """The connection has ended; once."""


class Session(hub.Connection):
    """limits: see wire.limits, of the frames that the present role takes; door: the auth.Door that it came through and
    that reports its refusal; for further arguments see hub.Connection."""

    def __init__(self, loop, sock, address, traffic, door, limits, tls=None, call=None):
        self.door, self.limits, self.role = door, limits, None
        self.version = None                # that of its last frame, V1 or V2
        self.waits = False                 # its request is still to be answered: until then no frame is taken
        self.frame_since = None            # since when it has begun a frame that is not complete
        super().__init__(loop, sock, address, traffic, tls, call)
        self.title = self.address          # with its name, once that is known

    def opened(self):
        if self._call:
            self.role.begin()

    def received(self):
        try:
            while self.open and not self.outbox and not self.waits and (got := next_frame(self.inbox, self.limits)):
                self.frame_since = None
                self.version = got[0]
                self.role.handle(got[1], got[2])
        except FrameError as error:
            self.refuse(str(error), error.code)
        self.frame_since = (self.frame_since or time.monotonic()) if self.inbox else None

    def reply(self, opcode, *parts):
        self.send(wire.frame(opcode, *parts, version=self.version))

    def refuse(self, why, code=BAD_FRAME):
        """Closes the connection with a line in the log, and with an ERROR if the peer understands that."""
        if self.open:
            if code != ITSELF:                 # an island that has called itself is nothing to report
                self.door.report(self.host, self.title, why)
            if self.version == V2 and not self.outbox:
                text = why.encode()[:wire.OTHER_LIMIT - FAILED.size]
                with contextlib.suppress(OSError):
                    self.sock.send(wire.frame(ERROR, FAILED.pack(code), text, version=V2))
            self.close()

    failed = refuse

    def check(self, now):
        self.role.check(now)
        if self.frame_since and now - self.frame_since > FRAME_SECONDS and not self.waits:
            self.refuse("stopped in the middle of a frame")

    def closed(self):
        if not self._call:
            self.door.leave(self.host)
        self.role.closed()
