"""A worker's connection to its coordinator: blocking, with heartbeats, introduced when it is made."""

import math
import socket
import ssl
import time

from cluster import auth, greeting, snapshots, wire
from cluster.hub import NetError, reason, tune
from cluster.wire import FrameError, V1, V2
from egg_config import UsageError

CONNECT_TIMEOUT = 10.0     # seconds
SEND_TIMEOUT = 60.0        # seconds
HEARTBEAT_EVERY = 2.0      # seconds between the signs of life of a worker that computes or waits
WHICH_HOST = "give the name or address of the coordinator's machine"


class OldCoordinator(Exception):
    """The coordinator closed on our HELLO: it may speak version 1 alone."""


class RefusedForGood(NetError, UsageError):
    """The coordinator will not let this caller in, however often it tries."""


def check_address(host, port):
    """Raises NetError where `host` is no name or address."""
    try:
        socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        why = reason(error) if isinstance(error, OSError) else "this is no name"
        raise NetError(f"{host} cannot be reached: {why}: {WHICH_HOST}") from None


class Link:
    """Every method raises OSError when the coordinator is gone, NetError when it is none of this program or refuses
    this worker; the constructor raises OldCoordinator where version 1 may help. version: V1 or V2; card: see
    greeting.Card; first, proves_first: see greeting.Caller; snapshot: step of the coordinator's newest one, or 0."""

    def __init__(self, cfg, host, port, version=V1, access=auth.Access(), card=None, first=False):
        self.name, self.version, self.proves_first = f"{host}:{port}", version, first
        self.limits = wire.only(wire.limits(cfg), {version: wire.FROM_COORDINATOR[version]})
        self.inbox = bytearray()
        self.sent_at, self.snapshot = time.monotonic(), 0
        self.caller = "request" if card and card["role"] == "status" else card["role"] if card else "worker"
        self.sock = socket.create_connection((host, port), timeout=CONNECT_TIMEOUT)
        try:
            tune(self.sock)
            if access.tls:
                self._start_tls(access.tls, host)
            if version == V2:
                self._greet(cfg, access, card)
        except BaseException:
            self.sock.close()
            raise

    def _start_tls(self, context, host):
        try:
            self.sock = context.wrap_socket(self.sock, server_hostname=host)
        except ssl.SSLCertVerificationError as error:
            raise NetError(f"{self.name}: its certificate is not good: {error.verify_message}: give --tls-ca the "
                           "certificate of this coordinator, made for the name used here") from None
        except ssl.SSLError as error:
            raise NetError(f"{self.name}: no TLS: {error.reason}: is the coordinator given --tls-cert?") from None

    def _greet(self, cfg, access, card):
        caller = greeting.Caller(access.secret, card, self.proves_first)
        self.send(self.frame(*caller.begin()))
        try:
            challenge = self.next(wire.CHALLENGE, CONNECT_TIMEOUT)
        except ConnectionError:
            raise OldCoordinator from None
        try:
            answer = caller.handle(wire.CHALLENGE, challenge)
            if caller.proves_first:
                self.send(self.frame(*answer))
                answer = caller.handle(wire.PROVED, self.next(wire.PROVED, CONNECT_TIMEOUT))
            self.send(self.frame(*answer))
            caller.handle(wire.WELCOME, self.next(wire.WELCOME, CONNECT_TIMEOUT))
        except greeting.GreetingError as error:
            raise RefusedForGood(f"{self.name}: {error}") from None
        self.proves_first = caller.proves_first
        if card["role"] == "worker" and caller.welcome.config != snapshots.config_digest(cfg):
            raise RefusedForGood(f"{self.name}: its configuration differs from that of this worker: is it the same "
                                 "version of egg?")
        self.snapshot = self._checked_step(caller.welcome.snapshot)

    def frame(self, opcode, *parts):
        return wire.frame(opcode, *parts, version=self.version)

    def send(self, data):
        self.sock.settimeout(SEND_TIMEOUT)
        self.sock.sendall(data)
        self.sent_at = time.monotonic()

    def next(self, opcode, timeout=math.inf):
        return self.any_of((opcode,), timeout)[1]

    def any_of(self, opcodes, timeout=math.inf):
        """(opcode, payload) of the next of these frames; sends heartbeats. Raises TimeoutError after `timeout` s."""
        until = time.monotonic() + timeout
        while True:
            try:
                while got := wire.next_frame(self.inbox, self.limits):
                    if got[1] in opcodes:
                        return got[1:]
                    if got[1] == wire.ERROR and self.version == V2:
                        code, why = greeting.read_error(got[2])
                        if code == wire.FULL:
                            raise TimeoutError(why)
                        kind = NetError if code == wire.BAD_FRAME else RefusedForGood
                        raise kind(f"{self.name} refuses this {self.caller}: {why}")
            except FrameError as error:
                raise NetError(f"{self.name}: {error}") from None
            if (left := until - time.monotonic()) <= 0:
                raise TimeoutError(f"{self.name} does not answer")
            self.check(min(HEARTBEAT_EVERY, left))

    def unpack_response(self, payload):
        """(seed, step, first member, fitness as it came) of a JOB_RESPONSE."""
        seed, step, position, size = wire.RESPONSE.unpack_from(payload)
        if size != len(payload) - wire.RESPONSE.size:
            raise NetError(f"{self.name}: wrong length: JOB_RESPONSE says {size} bytes of fitness and carries "
                           f"{len(payload) - wire.RESPONSE.size}")
        return seed, self._checked_step(step), position, payload[wire.RESPONSE.size:]

    def unpack_step(self, payload):
        return self._checked_step(*wire.STEP.unpack(payload))

    def _checked_step(self, step):
        if step > wire.STEP_LIMIT:
            raise NetError(f"{self.name}: step {step} cannot be right")
        return step

    def check(self, seconds=0.0):
        """Takes in what comes within so many seconds, unless a whole frame is there, and sends a heartbeat if due."""
        try:
            full = wire.whole_frame(self.inbox, self.limits)
        except FrameError as error:
            raise NetError(f"{self.name}: {error}") from None
        if not full:
            self.sock.settimeout(seconds)
            try:
                data = self.sock.recv(1 << 16)
                if not data:
                    raise ConnectionResetError("the connection was closed")
                self.inbox += data
            except (BlockingIOError, TimeoutError, ssl.SSLWantReadError):
                pass
        if self.version == V2 and time.monotonic() - self.sent_at >= HEARTBEAT_EVERY:
            self.send(self.frame(wire.HEARTBEAT))

    def close(self):
        self.sock.close()
