"""A worker's connection to its coordinator: blocking, introduced when it is made, with heartbeats."""

import contextlib
import functools
import math
import select
import socket
import ssl
import threading
import time

from cluster import auth, history, wire
from cluster.hub import Inbox, NetError, reason, resolve, tune
from cluster.wire import FrameError, V1, V2
from egg_config import UsageError

CONNECT_TIMEOUT = 10.0     # seconds
SEND_TIMEOUT = 60.0        # seconds
HEARTBEAT_EVERY = 2.0      # seconds between the signs of life of a worker
WHICH_HOST = "give the name or address of the coordinator's machine"


class OldCoordinator(NetError):
    """The coordinator closed on our HELLO: it may speak version 1 alone."""


class RunEnded(NetError):
    """The coordinator has come to the end that was planned."""


class RefusedForGood(NetError, UsageError):
    """The coordinator will not let this caller in, however often it tries."""


def check_address(host, port):
    """Raises NetError where `host` is no name or address."""
    name, _, number = host.rpartition(":")
    advice = f"write {name} --port {number}" if number.isdigit() and ":" not in name else WHICH_HOST
    try:
        resolve(host, port)
    except OSError as error:
        raise NetError(f"{host} cannot be reached: {reason(error)}: {advice}") from None


class Link:
    """Every method raises OSError when the coordinator is gone, NetError when it is none of this program or refuses
    this worker; the constructor raises OldCoordinator where version 1 may help. version: V1 or V2; card: see auth.Card.
    """

    idle = receiving = 0.0     # seconds with nothing to do, and those with a frame on its way

    def __init__(self, cfg, host, port, version=V1, access=auth.Access(), card=None):
        self.name = f"{host}:{port}"
        self.version = version
        self.card = card
        self.frame = functools.partial(wire.frame, version=version)
        self.limits = wire.only(wire.limits(cfg), {version: wire.FROM_COORDINATOR[version]})
        self.inbox = Inbox()
        self.most = wire.HEADER.size + max(wire.OTHER_LIMIT, *(most for _, most in self.limits[version].values()))
        self._lock = threading.Lock()                # of the socket, which `keep_alive` shares
        self._closed = threading.Event()
        self.sock = socket.create_connection((host, port), timeout=CONNECT_TIMEOUT)
        try:
            tune(self.sock)
            if access.tls:
                self._start_tls(access.tls, host)
            if version == V2:
                self._greet(access)
        except BaseException:
            self.sock.close()
            raise

    def _start_tls(self, context, host):
        try:
            self.sock = context.wrap_socket(self.sock, server_hostname=host)
        except ssl.SSLCertVerificationError as error:
            raise RefusedForGood(f"{self.name}: its certificate is not good: {error.verify_message}: give "
                                 "--tls-ca the certificate of this coordinator, made for the name used here") from None
        except ssl.SSLError as error:
            raise RefusedForGood(f"{self.name}: no TLS: {error.reason}: is the coordinator given --tls-cert?") from None

    def _greet(self, access):
        caller = auth.caller(access, self.card)
        answer = next(caller)
        try:
            while True:
                self.say(*answer)
                came = self.any_of(auth.FROM_HOST, CONNECT_TIMEOUT)
                answer = caller.send((came.opcode, came.payload))
        except StopIteration:
            return
        except ConnectionError:
            if answer[0] != wire.HELLO:
                raise
            hint = "" if access.tls else ", and give --tls-ca if it has TLS"
            raise OldCoordinator(f"{self.name} closed the connection during the introduction: check that it is an egg "
                                 f"coordinator of protocol 2{hint}") from None
        except FrameError as error:
            raise RefusedForGood(f"{self.name}: {error}") from None

    def send(self, data):
        with self._lock:
            self.sock.settimeout(SEND_TIMEOUT)
            self.sock.sendall(data)

    def keep_alive(self):
        """Sends heartbeats, and how the time was spent, from a thread of its own from now on: also while this process
        computes, or a judge thinks."""
        def beat():
            with contextlib.suppress(OSError):       # whoever uses this connection learns of it
                while not self._closed.wait(HEARTBEAT_EVERY):
                    self.send(self.frame(wire.HEARTBEAT) + self.frame(wire.SPENT, self.idle, self.receiving))

        if self.version == V2:
            threading.Thread(target=beat, daemon=True).start()

    def say(self, opcode, *fields):
        self.send(self.frame(opcode, *fields))

    def log(self, line):
        """Says a line, cut to what a frame may hold."""
        self.say(wire.LOG_MESSAGE, line.encode("utf-8", "replace")[:wire.LOG_MESSAGE.most])

    def next(self, opcode, timeout=math.inf):
        """The payload of the next frame of this opcode; see `any_of`."""
        return self.any_of((opcode,), timeout).payload

    def any_of(self, opcodes, timeout=math.inf, idle=True):
        """The next of these frames, a wire.Received. Raises TimeoutError after `timeout` seconds. idle: whether this
        worker has nothing else to do."""
        until = time.monotonic() + timeout
        while True:
            try:
                while frame := wire.next_frame(self.inbox, self.limits):
                    if frame.opcode in opcodes:
                        return frame
                    if frame.opcode == wire.ERROR and self.version == V2:
                        code, why = auth.read_error(frame.payload)
                        if code == wire.FULL:
                            raise TimeoutError(why)
                        if code == wire.ENDED:
                            raise RunEnded(f"{self.name}: {why}")
                        kind = NetError if code == wire.BAD_FRAME else RefusedForGood
                        caller = "request" if self.card["role"] == "status" else self.card["role"]
                        raise kind(f"{self.name} refuses this {caller}: {why}")
            except FrameError as error:
                raise NetError(f"{self.name}: {error}") from None
            if (left := until - time.monotonic()) <= 0:
                raise TimeoutError("it does not answer, so it may be another program")
            began, coming = time.monotonic(), bool(self.inbox)
            self.check(min(HEARTBEAT_EVERY, left))
            spent = time.monotonic() - began
            self.idle += spent * idle
            self.receiving += spent * coming

    def fetch_snapshot(self, step, most, bandwidth=0):
        """bytearray: the coordinator's snapshot file of this step, of at most `most` bytes; empty if it is gone.
        bandwidth: bytes a second, 0 for no limit."""
        data, total = bytearray(), 1
        while len(data) < total:
            self.say(wire.SNAPSHOT_REQUEST, step, len(data))
            at_step, total, offset, piece = wire.SNAPSHOT_DATA.unpack(self.next(wire.SNAPSHOT_DATA, SEND_TIMEOUT))
            if (at_step, offset) != (step, len(data)) or total > most or total and not piece:
                raise NetError(f"{self.name}: a piece of a snapshot that was not asked for")
            if not total:
                return bytearray()                           # gone, perhaps in the middle
            data += piece
            time.sleep(len(piece) / bandwidth if bandwidth else 0)
        return data

    def unpack_response(self, payload):
        """The fields of a JOB_RESPONSE."""
        answer = wire.JOB_RESPONSE.unpack(payload)
        if answer.size != len(answer.packed):
            raise NetError(f"{self.name}: JOB_RESPONSE says {answer.size} bytes of fitness and carries "
                           f"{len(answer.packed)}")
        self._checked_step(answer.step)
        return answer

    def unpack_step(self, payload):
        return self._checked_step(wire.REBUILD.unpack(payload).step)

    def _checked_step(self, step):
        if step > history.MOST_STEPS:
            raise NetError(f"{self.name}: step {step} cannot be right")
        return step

    def check(self, seconds=0.0):
        """Receives what arrives within `seconds`, no more than a frame needs."""
        if len(self.inbox) >= self.most:
            return
        waiting = select.poll()
        waiting.register(self.sock, select.POLLIN)
        # no poll reports what TLS has decrypted already
        if getattr(self.sock, "pending", int)() or waiting.poll(1e3 * seconds):
            with self._lock, contextlib.suppress(BlockingIOError, ssl.SSLWantReadError):
                self.sock.settimeout(0)
                data = self.sock.recv(1 << 18)
                if not data:
                    raise ConnectionResetError("the connection was closed")
                self.inbox.add(data)

    def close(self):
        self._closed.set()
        with self._lock:
            self.sock.close()
