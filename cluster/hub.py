"""The event loop: non-blocking sockets, TLS, bytes in and out, and no knowledge of what the bytes mean. A Hub listens,
accepts and calls. A Connection holds the bytes of one peer; a subclass gives them a meaning: frames
(cluster.session.Session) or HTTP (tools.live_page.Client). Beside has the only thread, for what waits for the disk."""

import collections
import contextlib
import errno
import ipaddress
import os
import random
import re
import selectors
import socket
import ssl
import threading
import time

from egg_config import EggError

READ, WRITE = selectors.EVENT_READ, selectors.EVENT_WRITE
# Time for peers that have proved nothing and for new connections: share of a processor, seconds in a row
STRANGERS_SHARE, STRANGERS_SECONDS = 0.25, 0.002
YOUNG = 0.1                # seconds that a new connection has before another one may take its place
VERSIONS = 4               # of a long answer in transit at a time; while all are, the newest is sent again


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
    """What socket.getaddrinfo finds for TCP. Raises OSError, also for what cannot be a name."""
    try:
        return socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=flags)
    except UnicodeError:
        raise socket.gaierror(socket.EAI_NONAME, "this is no name") from None


def address_text(host, port):
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def host_of(address):
    """What counts as one host: an IPv4 address, also where it is mapped into IPv6, or the first 64 bits of an IPv6
    address: who has one of these has all."""
    found = ipaddress.ip_address(address)
    if found.version == 6 and not found.ipv4_mapped:
        return str(ipaddress.ip_network((int(found) >> 64 << 64, 64)))
    return str(getattr(found, "ipv4_mapped", found))


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
        self.credit = most
        self._at = time.monotonic()

    def refill(self):
        now = time.monotonic()
        self.credit = min(self.most, self.credit + (now - self._at) * self.rate)
        self._at = now
        return self.credit

    def take(self, cost=1):
        """Whether `cost` may be spent now; if so it is."""
        if self.refill() < cost:
            return False
        self.credit -= cost
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


class Unproven(Newest):
    """{connection: True}: connections whose peers have proved nothing yet, in the order of their arrival, at most
    `most`. When it is full, the oldest connection of the host that has most of them makes room for the next, so that
    they keep nobody out."""

    def room(self):
        """Whether there is room for another one, which may end an older one."""
        if len(self) >= self.most:
            host = collections.Counter(one.host for one in self).most_common(1)[0][0]
            oldest = next(one for one in self if one.host == host)
            if time.monotonic() - oldest.born < YOUNG:
                return False
            oldest.close()
        return True


class Listener:
    """Accepts the connections to a socket that listens; see Hub.listen."""

    known = False
    open = resting = True
    broken = nothing

    def __init__(self, hub, sock, accept, room):
        self.hub = hub
        self.sock = sock
        self._accept = accept
        self._room = room
        self.check()

    def turn(self, _):
        if not self._room():
            self.resting = True
            self.hub.strangers.unregister(self.sock)
            return
        # the peer may have gone again, or file descriptors may be used up
        with contextlib.suppress(OSError):
            sock, peer = self.sock.accept()
            sock.setblocking(False)
            self._accept(sock, peer)
            self.hub.again.add(self)                 # there may be more

    def check(self):
        if self.resting:
            self.resting = False
            self.hub.strangers.register(self.sock, READ, self)


class Hub:
    """The sockets of a process. connections: all that are open. In one turn of the loop every known peer is served
    once; strangers, connections that are not `known` and listeners, in random order, in their share of the time."""

    _hears_strangers = False

    def __init__(self):
        self.selector = selectors.DefaultSelector()
        self.connections = set()
        self._listeners = []
        self.strangers = selectors.DefaultSelector()
        self._share = Budget(STRANGERS_SHARE, STRANGERS_SECONDS)
        self.again = set()                           # those with input that is not handled yet: next in the next turn
        self._dice = random.Random()

    def listen(self, host, port, accept, room, backlog):
        """Listens; accept(sock, address) makes a Connection of each peer. room(): whether another one may come now;
        until then the system holds it. Returns the (host, port) that is listened on. Raises OSError."""
        found = resolve(host, port, socket.AI_PASSIVE)[0]
        listener = socket.create_server(found[-1], family=found[0], backlog=backlog)
        listener.setblocking(False)
        self._listeners.append(Listener(self, listener, accept, room))
        return listener.getsockname()[:2]

    def poll(self, timeout):
        """Serves what is ready, after waiting for it at most `timeout` seconds."""
        again, self.again = self.again, set()
        credit = self._share.refill()
        if self._hears_strangers != (credit > 0):
            self._hears_strangers = credit > 0
            if credit > 0:
                self.selector.register(self.strangers, READ)
            else:
                self.selector.unregister(self.strangers)
        if any(one.known or credit > 0 for one in again):
            timeout = 0
        elif credit <= 0:
            timeout = min(timeout, 0.001 - credit / STRANGERS_SHARE)
        events = dict.fromkeys(again, 0)
        for key, mask in self.selector.select(timeout):
            if key.fileobj is self.strangers:
                events.update((key.data, mask) for key, mask in self.strangers.select(0))
            else:
                events[key.data] = mask
        strangers = [one for one in events if not one.known]
        for one in events:
            if one.known:
                self.guard(one, one.turn, events[one])
        self._dice.shuffle(strangers)
        while strangers and credit > 0:
            one, began = strangers.pop(), time.thread_time()
            self.guard(one, one.turn, events[one])
            self._share.credit -= time.thread_time() - began
            credit = self._share.refill()
        self.again |= again.intersection(strangers)

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
        for listener in self._listeners:
            listener.check()

    def on_the_way(self, answers):
        """[bytes]: those of these answers that a connection still sends a part of."""
        unsent = {id(part.obj) for connection in self.connections for part in connection.outbox}
        return [answer for answer in answers if id(answer) in unsent]

    def close(self):
        for connection in list(self.connections):
            connection.close()
        for listener in self._listeners:
            listener.sock.close()
        self.selector.close()
        self.strangers.close()


class Connection:
    """The bytes of one peer: `inbox` has come and is not used yet, `outbox` ([memoryview]) waits to be sent. Nothing is
    read while something waits to be sent, so that answers cannot pile up, or while `full()` says that enough waits to
    be used. sock: non-blocking, accepted or new; tls: an ssl.SSLContext or None; call: for a new socket, the host name
    that `address` stands for, to which a connection is begun; known: it is no stranger, see Hub. Raises OSError. A
    subclass overrides what happens: `opened`, once; `received`, when bytes have come or all are sent; `check`, several
    times a second; `failed`, when TLS cannot be agreed on; `broken`, when a method raised an error; `closed`, once."""

    PIECE = 1 << 16            # bytes that are read at a time
    known = paused = False
    open = True
    _event = 0                 # that the selector waits for

    def __init__(self, hub, sock, address, traffic, tls=None, call=None):
        self.hub = hub
        self.sock = sock
        self.traffic = traffic
        self._tls = tls
        self._call = call
        self._selector = hub.strangers
        self.host = host_of(address[0])
        self.address = address_text(*address[:2])
        self.inbox = bytearray()
        self.outbox = collections.deque()
        self.born = self.heard = time.monotonic()        # heard: when bytes came last
        if call:
            sock.setblocking(False)
            self._error = sock.connect_ex(address)
            self.turn = self._connected
            self._wait_for(WRITE)
        else:
            self._begin()
        hub.connections.add(self)

    @property
    def certificate(self):
        """The peer's certificate for TLS (bytes), None where it has shown none."""
        return self._tls and self.sock.getpeercert(True)

    def send(self, *parts):
        """Sends bytes, of which no copy is made: a long answer may be on its way to many."""
        self.traffic.sent += sum(map(len, parts))
        self.outbox.extend(memoryview(part) for part in parts if part)
        self._flush()

    def end(self):
        with contextlib.suppress(OSError):
            self.sock.shutdown(socket.SHUT_WR)

    def become_known(self):
        event, self.known = self._event, True
        self._wait_for(0)
        self._selector = self.hub.selector
        self._wait_for(event)

    def pause(self, paused=True):
        """Takes nothing more from the peer until pause(False)."""
        self.paused = paused
        self._flush()
        if not paused:
            self.hub.again.add(self)

    def close(self):
        if self.open:
            self.open = False
            self.hub.connections.discard(self)
            with contextlib.suppress(KeyError, ValueError):
                self._selector.unregister(self.sock)
            self.sock.close()
            self.closed()

    opened = received = check = closed = full = nothing

    def failed(self, why):
        self.close()

    broken = failed

    # the stages of a connection: `turn` is the present one; it takes the event that it waits for, 0 from Hub.again

    def _connected(self, _):
        if self._error not in (0, errno.EINPROGRESS) or self.sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            return self.close()
        self._wait_for(0)
        try:
            self._begin()
        except (OSError, ValueError):
            self.close()
        else:
            if not self._tls:
                self.opened()

    def _begin(self):
        tune(self.sock)
        if self._tls:
            self.sock = self._tls.wrap_socket(self.sock, server_side=not self._call, server_hostname=self._call,
                                              do_handshake_on_connect=False)
        self.turn = self._handshake if self._tls else self._transfer
        self._wait_for(READ)
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
            self.turn = self._transfer
            self._wait_for(READ)
            self.opened()
            self._read()

    def _transfer(self, mask):
        if mask & WRITE:
            self._flush()
        if not self.outbox and not self.paused:
            if mask & READ and not self.full():
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
            self.traffic.received += len(data)
            self.heard = time.monotonic()
            self.inbox += data
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
        self._wait_for(WRITE if self.outbox else 0 if self.paused else READ)

    def _wait_for(self, event):
        if self._event != event:
            if self._event:
                self._selector.unregister(self.sock)
            if event:
                self._selector.register(self.sock, event, self)
            self._event = event
