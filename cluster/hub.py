"""The event loop: non-blocking sockets, TLS, bytes in and out, and no knowledge of what the bytes mean. A Hub listens,
accepts and calls. A Connection holds the bytes of one peer; cluster.admission.Session gives them a meaning. Beside has
the only thread, for what waits for the disk."""

import collections
import contextlib
import os
import re
import selectors
import socket
import ssl
import threading
import time

from egg_config import EggError

READ, WRITE = selectors.EVENT_READ, selectors.EVENT_WRITE
ACCEPTED_A_TURN = 16       # connections


class NetError(EggError):
    """About a connection, an address or what a peer sent."""


def reason(error):
    """The system's text for an OSError (Python adds addresses to some)."""
    return os.strerror(error.errno) if error.errno and error.errno > 0 else error.strerror or str(error)


def split_address(text):
    """(host, port) of PORT, HOST:PORT or [IPV6]:PORT; host is "" where there is none. Raises ValueError."""
    match = re.fullmatch(r"(?:(\[[^\s\[\]/]+\]|[^\s:\[\]/]+):)?([0-9]{1,5})", text)
    if not match or int(match[2]) > 65535:
        raise ValueError(text)
    return (match[1] or "").strip("[]"), int(match[2])


def resolve(host, port, flags=0):
    """The result of socket.getaddrinfo for TCP. Raises OSError, also for what cannot be a name."""
    try:
        return socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=flags)
    except UnicodeError:
        raise socket.gaierror(socket.EAI_NONAME, "this is no name") from None


def address_text(host, port):
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def tune(sock):
    """No delay for small frames; a peer whose machine vanished is noticed within a minute."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", 20), ("TCP_KEEPINTVL", 10), ("TCP_KEEPCNT", 4), ("TCP_USER_TIMEOUT", 60000)):
        if hasattr(socket, name):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def nothing(*_):
    """Does nothing: a method that a subclass may override."""


class Beside:
    """What waits for the disk, in a thread beside the loop. A task is a generator that runs in the loop; what it yields
    is called in the thread, and an error of that is raised where it was yielded. One task follows the other."""

    _thread = _error = None

    def __init__(self):
        self._tasks = collections.deque()

    def begin(self, task):
        self._tasks.append(task)

    def turn(self):
        """Goes on with a task, in the loop. Returns whether there was anything to do."""
        if not self._tasks or self._thread and self._thread.is_alive():
            return False
        error, self._error = self._error, None
        task = self._tasks.popleft()                     # it may call `drop`
        try:
            work = task.throw(error) if error else next(task)
        except StopIteration:
            return True
        self._tasks.appendleft(task)
        self._thread = threading.Thread(target=self._call, args=(work,), daemon=True)
        self._thread.start()
        return True

    def _call(self, work):
        try:
            work()
        except Exception as error:
            self._error = error

    def finish(self):
        """Waits for all tasks."""
        while self._tasks:
            self._wait()
            self.turn()

    def drop(self):
        """Ends all tasks where they are."""
        self._wait()
        while self._tasks:
            self._tasks.popleft().close()
        self._error = None

    def _wait(self):
        if self._thread:
            self._thread.join()


class Budget:
    """A token bucket: `rate` a second, and at most `most` saved up."""

    def __init__(self, rate, most):
        self.rate = rate
        self.most = most
        self._credit = most
        self._at = time.monotonic()

    def take(self, cost=1):
        """Whether `cost` may be spent now; if so it is."""
        now = time.monotonic()
        self._credit = min(self.most, self._credit + (now - self._at) * self.rate)
        self._at = now
        if self._credit < cost:
            return False
        self._credit -= cost
        return True


class Newest(dict):
    """Remembers the `most` newest entries, so that peers cannot fill the memory."""

    def __init__(self, most):
        self.most = most

    def __setitem__(self, key, value):
        self.pop(key, None)
        super().__setitem__(key, value)
        if len(self) > self.most:
            del self[next(iter(self))]


class Inbox(bytearray):
    """Bytes that have come. lacks: how many are to come, as far as that is known; the pieces of these are joined when
    all are there, since a buffer that grows copies what it has."""

    lacks = 0

    def __init__(self):
        super().__init__()
        self._pieces = []

    def add(self, piece):
        if self.lacks > 0:
            self._pieces.append(piece)
            if (lacks := self.lacks - len(piece)) > 0:
                self.lacks = lacks
                return
            piece, self._pieces, self.lacks = b"".join(self._pieces), [], 0
        self += piece


class Listener:
    """A socket that listens; accept(sock, address) makes a Connection of each peer."""

    open = True
    broken = nothing

    def __init__(self, sock, accept):
        self.sock = sock
        self._accept = accept

    def turn(self, _):
        # the peer may have gone again, or file descriptors may be used up
        with contextlib.suppress(OSError):
            for _ in range(ACCEPTED_A_TURN):
                sock, peer = self.sock.accept()
                sock.setblocking(False)
                self._accept(sock, peer)


class Hub:
    """The sockets of a process. connections: all that are open. In one turn of the loop every peer is served once."""

    def __init__(self):
        self.selector = selectors.DefaultSelector()
        self.connections = set()
        self._listeners = []

    def listen(self, host, port, accept, backlog):
        """Listens, see Listener. Returns the (host, port) that is listened on. Raises OSError."""
        family, *_, address = resolve(host, port, socket.AI_PASSIVE)[0]
        sock = socket.create_server(address, family=family, backlog=backlog)
        sock.setblocking(False)
        listener = Listener(sock, accept)
        self._listeners.append(listener)
        self.selector.register(sock, READ, listener)
        return sock.getsockname()[:2]

    def poll(self, timeout):
        """Serves what is ready, after waiting for it at most `timeout` seconds."""
        for key, mask in self.selector.select(timeout):
            self.guard(key.data, key.data.turn, mask)

    def guard(self, connection, call, *arguments):
        """Calls something on behalf of a peer. Any error but an EggError ends only this connection."""
        if connection.open:
            try:
                call(*arguments)
            except EggError:
                raise
            except Exception as error:
                connection.broken(error)

    def check(self, now):
        for connection in list(self.connections):
            self.guard(connection, connection.check, now)

    def close(self):
        for connection in list(self.connections):
            connection.close()
        for listener in self._listeners:
            listener.sock.close()
        self.selector.close()


class Connection:
    """The bytes of one accepted peer: `inbox` has come and is not used yet, `outbox` ([memoryview]) waits to be sent.
    Nothing is read while something waits to be sent, so that answers cannot pile up. sock: non-blocking; tls: an
    ssl.SSLContext or None. Raises OSError. A subclass overrides what happens: `received`, when bytes have come or all
    are sent; `check`, several times a second; `failed`, when TLS cannot be agreed on; `broken`, when a method raised an
    error; `closed`, once."""

    PIECE = 1 << 18            # bytes that are read at a time
    open = True
    _event = 0                 # that the selector waits for

    def __init__(self, hub, sock, address, traffic, tls=None):
        self.hub = hub
        self.sock = sock
        self.traffic = traffic
        self.address = address_text(*address[:2])
        self.inbox = Inbox()
        self.outbox = collections.deque()
        self.moved = [0, 0]                              # bytes that have come, and gone
        self.born = self.heard = time.monotonic()        # heard: when bytes came last
        tune(sock)
        self._tls = tls
        if tls:
            self.sock = tls.wrap_socket(sock, server_side=True, do_handshake_on_connect=False)
        # what the event of the selector is for; it takes the event
        self.turn = self._handshake if tls else self._transfer
        self._wait_for(READ)
        hub.connections.add(self)

    def send(self, *parts):
        """Sends bytes, of which no copy is made: a long answer may be on its way to many."""
        size = sum(map(len, parts))
        self.moved[1] += size
        self.traffic.sent += size
        self.outbox.extend(memoryview(part) for part in parts if part)
        self._flush()

    def close(self):
        if self.open:
            self.open = False
            self.hub.connections.discard(self)
            with contextlib.suppress(KeyError, ValueError):
                self.hub.selector.unregister(self.sock)
            self.sock.close()
            self.closed()

    received = check = closed = nothing

    def failed(self, why):
        self.close()

    broken = failed

    def _handshake(self, _):
        try:
            self.sock.do_handshake()
        except ssl.SSLWantReadError:
            self._wait_for(READ)
        except ssl.SSLWantWriteError:
            self._wait_for(WRITE)
        except OSError as error:
            self.failed(f"no TLS: {getattr(error, 'reason', None) or reason(error)}")
        else:
            self.turn = self._transfer
            self._wait_for(READ)
            self._read()

    def _transfer(self, mask):
        if mask & WRITE:
            self._flush()
        if not self.outbox:
            if mask & READ:
                self._read()
            else:
                self.received()

    def _read(self):
        try:
            data = self.sock.recv(self.PIECE)
            if data and self._tls and (pending := self.sock.pending()):
                data += self.sock.recv(pending)          # no selector reports what TLS has decrypted already
        except (BlockingIOError, ssl.SSLWantReadError):
            return
        except OSError:
            data = b""
        if data:
            self.moved[0] += len(data)
            self.traffic.received += len(data)
            self.heard = time.monotonic()
            self.inbox.add(data)
            self.received()
        else:
            self.close()

    def _flush(self):
        if not self.open:
            return
        try:
            while self.outbox:
                part = self.outbox[0]
                if (sent := self.sock.send(part)) < len(part):
                    self.outbox[0] = part[sent:]
                    break
                self.outbox.popleft()
        except (BlockingIOError, ssl.SSLWantWriteError, ssl.SSLWantReadError):
            pass
        except OSError:
            return self.close()
        self._wait_for(WRITE if self.outbox else READ)

    def _wait_for(self, event):
        if self._event != event:
            (self.hub.selector.modify if self._event else self.hub.selector.register)(self.sock, event, self)
            self._event = event
