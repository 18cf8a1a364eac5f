"""The event loop: non-blocking sockets, TLS, bytes in and out. No threads, and no knowledge of what the bytes mean.

A Hub listens, accepts and calls. A Connection holds the bytes of one peer; a subclass gives them a meaning: frames
(cluster.session.Session) or HTTP (tools.live_page.Client).
"""

import contextlib
import errno
import os
import selectors
import socket
import ssl
import time

from egg_config import EggError

READ, WRITE = selectors.EVENT_READ, selectors.EVENT_WRITE


class NetError(EggError):
    """About a connection, an address or what a peer sent."""


def reason(error):
    """The system's text for an OSError (Python adds addresses to some)."""
    return os.strerror(error.errno) if error.errno and error.errno > 0 else error.strerror or str(error)


def tune(sock):
    """No delay for small frames; a peer whose machine vanished is noticed within a minute."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", 20), ("TCP_KEEPINTVL", 10), ("TCP_KEEPCNT", 4), ("TCP_USER_TIMEOUT", 60000)):
        if hasattr(socket, name):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


class Hub:
    """The sockets of a process. connections: all that are open. `poll` waits and serves; `check` enforces deadlines."""

    def __init__(self):
        self.selector, self.connections, self._listeners = selectors.DefaultSelector(), set(), []

    def listen(self, host, port, accept, backlog):
        """Listens; accept(sock, address) is called for each peer and makes a Connection, or closes the socket. Returns
        the (host, port) that is listened on. Raises OSError."""
        try:
            family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM,
                                                          flags=socket.AI_PASSIVE)[0]
        except UnicodeError:
            raise socket.gaierror(socket.EAI_NONAME, "this is not a name") from None
        listener = socket.create_server(address, family=family, backlog=backlog)
        listener.setblocking(False)

        def on_event(_):
            # the peer may have gone again, or file descriptors may be used up
            with contextlib.suppress(OSError):
                sock, peer = listener.accept()
                sock.setblocking(False)
                accept(sock, peer)

        self._listeners.append(listener)
        self.selector.register(listener, READ, on_event)
        return listener.getsockname()[:2]

    def poll(self, timeout):
        """Serves what is ready, after waiting for it at most `timeout` seconds."""
        for key, mask in self.selector.select(timeout):
            key.data(mask)

    def check(self, now):
        """Lets every connection enforce its deadlines; called several times a second."""
        for connection in list(self.connections):
            connection.check(now)

    def close(self):
        for connection in list(self.connections):
            connection.close()
        for listener in self._listeners:
            listener.close()
        self.selector.close()


class Traffic:
    """Bytes that a group of connections has sent and received."""

    def __init__(self):
        self.sent = self.received = 0


class Connection:
    """The bytes of one peer: `inbox` has come and is not used yet, `outbox` waits to be sent. Nothing is read while
    something waits to be sent, so a peer that does not read its answers cannot make them pile up.

    sock: non-blocking, accepted (as Hub.listen gives it) or new; tls: an ssl.SSLContext or None; call: for a new
    socket, the host name that `address` stands for: the connection is begun to there. Raises OSError.

    A subclass overrides what happens: `opened`, once (a peer that called may send at once); `received`, when bytes have
    come or all are sent; `check`, several times a second; `failed`, when TLS cannot be agreed on; `closed`, once."""

    PIECE = 1 << 16            # bytes that are read at a time

    def __init__(self, hub, sock, address, traffic, tls=None, call=None):
        self.hub, self.sock, self.traffic, self._tls, self._call = hub, sock, traffic, tls, call
        self.host, self.address = address[0], f"{address[0]}:{address[1]}"
        self.inbox, self.outbox, self.open = bytearray(), b"", True
        self.born = self.heard = time.monotonic()        # heard: when bytes came last
        if call:
            sock.setblocking(False)
            self._error = sock.connect_ex(address)
            self._register(self._connected, WRITE)
        else:
            self._begin()
        hub.connections.add(self)

    @property
    def certificate(self):
        """The peer's certificate for TLS (bytes), None where it has shown none."""
        return self.sock.getpeercert(True) if self._tls else None

    def send(self, data):
        self.traffic.sent += len(data)
        self.outbox = memoryview(bytes(self.outbox) + data if self.outbox else data)
        self._flush()

    def end(self):
        """No more will be sent; the peer may still."""
        with contextlib.suppress(OSError):
            self.sock.shutdown(socket.SHUT_WR)

    def again(self):
        """Calls `received` in the next round, after the other connections."""
        if self.open:
            self._wait_for(WRITE)

    def close(self):
        """Can be called more than once."""
        if self.open:
            self.open = False
            self.hub.connections.discard(self)
            with contextlib.suppress(KeyError, ValueError):
                self.hub.selector.unregister(self.sock)
            self.sock.close()
            self.closed()

    def opened(self):
        pass

    def received(self):
        pass

    def check(self, now):
        pass

    def failed(self, why):
        self.close()

    def closed(self):
        pass

    # the stages of a connection: each is called with the event that it waits for

    def _connected(self, _):
        """The connection that was begun here stands, or cannot be made."""
        if not self.open:
            return
        if self._error not in (0, errno.EINPROGRESS) or self.sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            self.close()
            return
        self.hub.selector.unregister(self.sock)
        try:
            self._begin()
        except (OSError, ValueError):
            self.close()
            return
        if not self._tls:
            self.opened()

    def _begin(self):
        tune(self.sock)
        if self._tls:
            self.sock = self._tls.wrap_socket(self.sock, server_side=not self._call, server_hostname=self._call,
                                              do_handshake_on_connect=False)
        self._register(self._handshake if self._tls else self._transfer, READ)
        if self._tls and self._call:
            self._handshake(READ)                        # who calls speaks first

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
            self.hub.selector.unregister(self.sock)
            self._register(self._transfer, READ)
            self.opened()
            self._read()

    def _transfer(self, mask):
        if mask & WRITE:
            self._flush()
            if self.open and not self.outbox:
                self.received()
        else:
            self._read()

    def _read(self):
        if not self.open:
            return
        try:
            data = self.sock.recv(self.PIECE)
            if self._tls and (pending := self.sock.pending()):
                data += self.sock.recv(pending)          # no selector reports what TLS has decrypted already
        except (BlockingIOError, ssl.SSLWantReadError):
            return
        except OSError:
            data = b""
        if not data:
            self.close()
            return
        self.traffic.received += len(data)
        self.heard = time.monotonic()
        self.inbox += data
        self.received()

    def _flush(self):
        if not self.open:
            return
        try:
            if self.outbox:
                self.outbox = self.outbox[self.sock.send(self.outbox):]
        except (BlockingIOError, ssl.SSLWantWriteError, ssl.SSLWantReadError):
            pass
        except OSError:
            self.close()
            return
        self._wait_for(WRITE if self.outbox else READ)

    def _register(self, stage, event):
        self._stage, self._event = stage, event
        self.hub.selector.register(self.sock, event, stage)

    def _wait_for(self, event):
        if self._event != event:
            self._event = event
            self.hub.selector.modify(self.sock, event, self._stage)
