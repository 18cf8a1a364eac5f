"""Coordinator and worker: SPEC section 10 and PROTOCOL.md.

One process, one selector, no threads: the coordinator hands out chunks of the population (cluster.leases), gathers their fitness and keeps
it (cluster.history); a worker evaluates chunks on an engine and applies the fitness of every step to its own replica of the model. Fitness
and losses are all that training sends over the network; snapshots (cluster.snapshots) help who joins late. A frame leaves in one send and
without Nagle's delay, because every exchange is a small question and a small answer.
"""

import contextlib
import errno
import hashlib
import json
import math
import os
import random
import re
import resource
import selectors
import signal
import socket
import ssl
import statistics
import sys
import threading
import time
from collections import deque
from typing import NamedTuple

import numpy as np

from cluster import auth
from cluster import history
from tools import live_page
from islands import gossip
from model import data_files
from model import parameters
from cluster import snapshots
from cluster import leases
from cluster import event_log
from cluster import wire
from egg_config import EggError
from cluster.wire import (BAD_FRAME, BANNED, BLOCK, BLOCK_HEAD, BLOCK_REQUEST, CHALLENGE, CHALLENGED, ERROR, FAILED,
                          FULL, FrameError, HEARTBEAT, HELLO, ISLAND, ITSELF, JOB_REQUEST, JOB_RESPONSE, JOIN,
                          LOG_MESSAGE, NONCE, NOTHING, NO_ACCESS, OTHER_CONFIG, OTHER_DATA, PROOF, REBUILD, REQUEST,
                          RESPONSE, RESULT, RESULT_HEAD, SNAPSHOT_DATA, SNAPSHOT_REQUEST, SNAPSHOT_WANTED, STATED,
                          STATUS, STEP, TEXT_LIMIT, V1, V2, VALIDATED, VALIDATION, WELCOME, WELCOMED, frame,
                          next_frame)


class NetError(EggError):
    """About a connection, an address or what a peer sent."""


def tune(sock):
    """No delay for small frames; a peer whose machine vanished is noticed within a minute."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", 20), ("TCP_KEEPINTVL", 10), ("TCP_KEEPCNT", 4), ("TCP_USER_TIMEOUT", 60000)):
        if hasattr(socket, name):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


# --- console --------------------------------------------------------------------------------------------------------------

class Console:
    """Where lines go. On a terminal a progress line may stand below them; colours only there, and not with NO_COLOR."""

    COLOURS = {"bold": "1", "red": "31", "green": "32", "yellow": "33", "blue": "34", "magenta": "35", "cyan": "36", "white": "37", "grey": "90"}
    PROGRESS_EVERY = 0.1       # seconds

    def __init__(self, stream=None, quiet=False):
        self.stream, self.quiet = stream or sys.stdout, quiet
        self.terminal = self.stream.isatty()
        self.coloured = self.terminal and not os.environ.get("NO_COLOR")
        self._progress, self._next = False, 0.0
        self._loss, self._validation = math.inf, None        # of the last step; one that its step's line has still to say

    def tell(self, event, line):
        """A sink of events (cluster.event_log)."""
        if event["event"] == "validation":
            self._validation = event
        elif event["event"] == "step":
            self.line(self._step(event))
        elif line is not None:
            said, newline, text = line.rpartition("\n")          # a sample is one line
            self.line(said + newline + self.sample(text) if event["event"] == "sample" else line)

    def _step(self, event):
        better, self._loss = event["loss"] <= self._loss, event["loss"]
        loss = self.colour(f"{event['loss']:.4f}", "green" if better else "red")
        speed = self.colour(f"{event['tokens_per_second']:.2f}", "blue")
        # tokens: those behind the model whose loss this is
        line = (f"Step {event['step']} | Tokens: {count_text(event['tokens'])} | Loss: {loss} | Time: {1e3 * event['seconds']:.2f} ms | "
                f"Updates: {event['updates']} (n={event['reports']}, max={event['updates']}) | Speed: {speed} tok/s | "
                f"LR: {event['learning_rate']:g} | Net: {(event['sent'] + event['received']) / event['seconds'] / (1 << 20):.2f} MB/s "
                f"(Tx: {_bytes(event['sent'])}, Rx: {_bytes(event['received'])})")
        if said := self._validation:
            self._validation = None
            line += f" | Val: {self.colour(format(said['value'], '.2f'), 'blue')} {said['unit']}"
            line += f" (step {said['step']})" if said["step"] != event["step"] else ""
        return line

    def line(self, text):
        if not self.quiet:
            self._write(("\r\x1b[K" if self._progress else "") + text + "\n")
            self._progress = False

    def progress(self, text):
        if self.terminal and not self.quiet and time.monotonic() >= self._next:
            self._write("\r\x1b[K" + text)
            self._progress, self._next = True, time.monotonic() + self.PROGRESS_EVERY

    def clear(self):
        """Takes the progress line away."""
        if self._progress:
            self._write("\r\x1b[K")
            self._progress = False

    def write(self, text, name=None):
        """Part of a line, at once, in a colour; a terminal gets no characters that would steer it."""
        if self.terminal:
            text = "".join(c for c in text if c.isprintable() or c in "\n\t")
        self._write(self.colour(text, name) if name and text else text)

    def sample(self, text):
        """`text` with the prompt and what the model made of it in different colours, where it is a sample (egg_net.sample)."""
        parts = re.fullmatch(r"( *sample at step \d+: | *)(.*?)( >>> )(.*)", text, re.DOTALL)
        return parts[1] + self.colour(parts[2], "blue") + parts[3] + self.colour(parts[4], "green") if parts else text

    def colour(self, text, name):
        return f"\x1b[{self.COLOURS[name]}m{text}\x1b[0m" if self.coloured else text

    def _write(self, text):
        encoding = self.stream.encoding or "utf-8"
        self.stream.write(text.encode(encoding, "replace").decode(encoding))
        self.stream.flush()


def printable(text):
    """Text of a stranger, safe for a terminal and a log: no control characters, and indented so that no line can pose as ours."""
    lines = ("".join(c for c in line.replace("\t", " ") if c.isprintable()) for line in text.split("\n"))
    return "\n".join("  " + line for line in lines)


def one_line(text, most=2000):
    """The same as part of a line of ours."""
    return printable(text.replace("\n", " ")).strip()[:most]


@contextlib.contextmanager
def stop_signals():
    """Gives a list that is no longer empty after SIGINT or SIGTERM; a second SIGINT interrupts as usual."""
    stopped = []

    def on_signal(number, _):
        if stopped and number == signal.SIGINT:
            raise KeyboardInterrupt
        stopped.append(number)

    if threading.current_thread() is not threading.main_thread():
        yield stopped
        return
    before = [(number, signal.signal(number, on_signal)) for number in (signal.SIGINT, signal.SIGTERM)]
    try:
        yield stopped
    finally:
        for number, handler in before:
            signal.signal(number, handler)


# --- coordinator ----------------------------------------------------------------------------------------------------------

BACKLOG = 1024
AT_ONCE = 2                # chunks one connection may hold: the next may be asked for before the last is done
IN_A_ROW = 16              # held requests that are answered before those are looked at that came in meanwhile
HALF_FRAME_TIMEOUT = 30.0  # seconds a peer may take for a frame it has begun, or to read an answer before its next frame is taken
LOOK_EVERY = 0.05          # seconds between looks at leases and half frames
TICK = 0.25                # seconds the coordinator sleeps at most, to notice signals and the end of its time
HEARTBEAT_EVERY = 2.0      # seconds between the signs of life of a worker that computes or waits
ACTIVE_SECONDS = 8.0       # a worker that was silent for longer is not counted on for an audit
AUDIT_PATIENCE = 5.0       # seconds that an audited chunk waits for a second worker to come back: after a restart one is the first
LEASE_FACTOR, LEASE_LEAST = 4.0, 2.0     # a silent worker's chunk goes to another after so many times a chunk's usual time, in seconds
#                                          at least; one with heartbeats has LEASE_FACTOR times longer
STATES_KEPT = 8            # digests of so many steps are remembered
WORDS, WORDS_A_SECOND = 32, 2.0          # log messages of a connection that are printed in a row, and a second after that
STATUS_WORKERS = 4000      # workers that `status` lists at most, so that it stays below STATUS_LIMIT
STATUS_BANS = 100
PROTOCOL_WITHOUT_A_SECRET = "version 1 peers prove nothing and are not let in where there is a secret or TLS"
PROTOCOL_WITHOUT_SNAPSHOTS = "version 1 peers cannot take snapshots, by which an island goes on from another state: use protocol 2"


class Summary(NamedTuple):
    """What a coordinator did. Validations are (step, figure, unit) or None."""
    first_step: int
    step: int               # completed steps of the run
    tokens: int             # evaluated in the completed steps of this session
    seconds: float          # from the first chunk handed out to the last completed step
    first_validation: object
    last_validation: object
    directory: object       # where the run lies, or None


class Author(NamedTuple):
    """Who stands behind results, through all its connections."""
    host: str
    key: str                # of the process
    name: str
    certificate: str = ""   # SHA-256 of the one that it showed for TLS

    @property
    def identity(self):
        """What a ban holds on to: the certificate, which cannot be made up, where the coordinator asks for one."""
        return f"certificate {self.certificate}" if self.certificate else f"{self.name} at {self.host}"


class Connection:
    """A worker, another island or a stranger, as the coordinator sees it."""

    def __init__(self, sock, address, limits):
        self.sock, self.limits = sock, limits
        self.host, self.address = address[0], f"{address[0]}:{address[1]}"
        self.title = self.address      # with the name, once that is known
        self.inbox, self.outbox, self.event = bytearray(), b"", selectors.EVENT_READ
        self.shaking = isinstance(sock, ssl.SSLSocket)
        self.version = self.hello = self.challenge = self.author = None
        self.joined = self.status = False
        self.device = ""
        self.step = None               # updates it has applied, from its last request
        self.stated = None             # digest of its state then
        self.trusted = True            # its state is that of the others, as far as is known
        self.rebuilt_at = None         # step at which it was told to rebuild
        self.sent_to_start = None      # epoch whose start it was sent to
        self.snapshots = True          # those that it makes are sound
        self.waiting = False           # it asked, and the answer is held
        self.held = {}                 # chunk -> when it was handed out
        self.given = set()             # chunks of this step that it has ever held
        self.pace = None               # seconds it takes for a chunk
        self.chunks = 0                # results that were taken
        self.words = WORDS             # log messages that it may send just now
        self.born = self.heard = self.spoke = time.monotonic()
        self.half = None               # since when the beginning of a frame is here
        self.target = self.peer = None  # the islands.gossip.Target that was called here; the islands.gossip.Peer that it is
        self.welcomed = False          # by the island that was called
        self.owed = None               # what a peer asked for and has to wait for: nothing more is taken from it meanwhile
        self.open = True

    def may_speak(self):
        """Whether one more log message is to be printed."""
        now = time.monotonic()
        self.words, self.spoke = min(WORDS, self.words + (now - self.spoke) * WORDS_A_SECOND) - 1, now
        if self.words < 0:
            self.words = 0.0
            return False
        return True

    def said(self):
        """What `status` tells about it."""
        now = time.monotonic()
        state = ("in doubt" if not self.trusted else "silent" if now - self.heard > ACTIVE_SECONDS and not self.waiting else
                 "computing" if self.held else "waiting" if self.waiting else "catching up")
        return {"name": self.author.name, "address": self.address, "device": self.device, "protocol": self.version, "step": self.step,
                "chunks": self.chunks, "chunk_seconds": self.pace, "last_seen": round(now - self.heard, 3), "state": state}


class Coordinator:
    """Serves workers until `finished`; drive it with `poll`. `run` is an cluster.history.Run, `steps` the number of completed steps at
    which the run ends (None: never), `minutes` the same in time after the first chunk was handed out; peers=False: no lines about workers
    that come and go; access: an cluster.auth.Access; events: an cluster.event_log.Events, by default one for `console` and a coordinator.log in
    `log_dir`; http: an tools.live_page.Where, for a live page; island: the islands.gossip.Terms of an island.

    Raises HistoryError where the state with which an epoch began is not there, IslandError for what an island lacks, NetError where host and
    port cannot be served, AuthError where that would let anybody in, EggError where the log cannot be written."""

    def __init__(self, cfg, run, host=None, port=0, steps=None, minutes=None, log_dir=".", console=None, peers=True,
                 access=auth.Access(), events=None, http=None, island=None):
        self.cfg, self.run, self.steps, self.minutes, self.access = cfg, run, steps, minutes, access
        self.console, self.peers = console or Console(), peers
        self.events, self._own_events = events or event_log.Events(cfg, run, log_dir, self.console), events is None
        self.limits = wire.limits(cfg)
        self.limits_at_first = wire.limits_before_join(self.limits)
        self.most_weights = parameters.n_weights(cfg)
        self.selector = selectors.DefaultSelector()
        self.connections = set()
        self.idle, self.unseen = deque(), 0          # who waits for an answer; how many of them have not been looked at since `wake`
        files, others = resource.getrlimit(resource.RLIMIT_NOFILE)[0], 64 + (live_page.MOST_CLIENTS if http else 0)
        self.door = auth.Door((files if files != resource.RLIM_INFINITY else 1 << 16) - others, cfg.CONNECTIONS_PER_ADDRESS)
        self.bans = auth.Bans(run.directory)
        self.alone, self.usual = False, None         # one author is at work, and for a while; seconds that a chunk takes most workers
        # when there was last more than one; a run that goes on may have had some, who are about to come back
        self.several_at = time.monotonic() if run.step else -math.inf
        self.patience = AUDIT_PATIENCE if peers else 0.0
        self.last_frame = None, b""
        self.states = {}                             # step -> {digest: authors}, of the last STATES_KEPT steps
        self.shelf, self.upload = snapshots.Shelf(cfg, run), None           # upload: (connection, cluster.snapshots.Upload)
        self.shelf.check_start()
        self.disputes = set()
        self.first_step, self.started, self.completed = run.step, None, None
        self.validations, self.last_loss = [], None
        self.speed = 0.0
        self.closing, self.wake, self.look_at = False, False, 0.0
        self.tx = self.rx = 0
        self.page = None
        self.island = gossip.Island(self, island) if island else None
        self.listener = self._listen(auth.listen_host(host, access), port)
        self.address = self.listener.getsockname()[:2]
        self.selector.register(self.listener, selectors.EVENT_READ)
        self._new_step()
        if http:
            self.page = live_page.Page(http, self)

    @property
    def finished(self):
        return (self.steps is not None and self.run.step >= self.steps
                or self.minutes is not None and self.started is not None and time.monotonic() - self.started >= 60 * self.minutes)

    def poll(self, timeout=TICK):
        """Does what there is to do, waiting for it at most `timeout` seconds."""
        for key, mask in self.selector.select(0 if self.unseen or self.wake and self.idle else timeout):
            connection = key.data
            if callable(connection):                 # of the live page
                connection(mask)
            elif connection is None:
                self._accept()
            elif connection.shaking:
                self._shake(connection)
            elif mask & selectors.EVENT_WRITE:
                self._flush(connection)
                self.take_frames(connection)
            else:
                self._read(connection)
        self._answer_waiting()
        now = time.monotonic()
        if now >= self.look_at:
            self.look_at = now + LOOK_EVERY
            self._look(now)
            if self.island and not self.closing:
                self.island.look(now)
            if self.page:
                self.page.look(now)
            self._answer_waiting()

    def drain(self, seconds):
        """Hands out no more work, but lets the connected workers apply what is complete, for at most so long."""
        self.closing = True
        until = time.monotonic() + seconds
        while time.monotonic() < until and any(c.step is not None and c.step < self.run.step for c in self.connections):
            self.poll(0.05)

    def close(self):
        """Can be called more than once."""
        self.closing = True
        for connection in list(self.connections):
            self.drop(connection)
        if self.island:
            self.island.close()
        if self.page:
            self.page.close()
        self.listener.close()
        self.selector.close()
        self.shelf.close()
        if self._own_events:
            self.events.close()

    def summary(self):
        done = self.run.step - self.first_step
        seconds = self.completed - self.started if done else 0.0
        first, last = (self.validations[0], self.validations[-1]) if self.validations else (None, None)
        tokens = done * self.cfg.POPULATION_SIZE * self.cfg.SEQ_LEN
        return Summary(self.first_step, self.run.step, tokens, seconds, first, last, self.run.directory)

    def status(self):
        """What `egg.py status` shows, as a dict for JSON."""
        workers = sorted((c.said() for c in self.connections if c.author), key=lambda w: (w["name"], w["address"]))
        bans = self.bans.all()
        return {"step": self.run.step, "steps": self.steps, "chunks_done": len(self.work.done), "chunks": self.cfg.N_CHUNKS,
                "tokens_per_second": self.speed, "loss": self.last_loss,
                "validation": dict(zip(("step", "figure", "unit"), self.validations[-1])) if self.validations else None,
                "snapshot": self.shelf.newest, "save_dir": str(self.run.directory) if self.run.directory else None,
                "seconds": round(time.monotonic() - self.started, 1) if self.started else 0.0,
                "banned": dict(list(bans.items())[-STATUS_BANS:]), "ban_file": self.bans.path,
                "connected": len(workers), "workers": workers[:STATUS_WORKERS], "island": self.island.status() if self.island else None}

    # connections

    def _listen(self, host, port):
        try:
            family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
            listener = socket.create_server(address, family=family, backlog=BACKLOG)
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise NetError(f"port {port} is in use: stop the coordinator that is there, or choose another with --port") from None
            raise NetError(f"cannot listen on {host} port {port}: {reason(error)}: choose others with --host and --port") from None
        listener.setblocking(False)
        return listener

    def _accept(self):
        with contextlib.suppress(OSError):           # the peer may have gone again, or file descriptors may be used up
            sock, address = self.listener.accept()
            if why := self.door.enter(address[0]):
                self._tell_refused(address[0], f"{address[0]}:{address[1]}", why)
                sock.setblocking(False)
                with sock, contextlib.suppress(OSError):
                    sock.send(frame(ERROR, FAILED.pack(FULL), why.encode(), version=V2))
                return
            try:
                sock.setblocking(False)
                tune(sock)
                if self.access.tls:
                    sock = self.access.tls.wrap_socket(sock, server_side=True, do_handshake_on_connect=False)
                connection = Connection(sock, address, self.limits_at_first)
                self.selector.register(sock, selectors.EVENT_READ, connection)
            except OSError:
                self.door.leave(address[0])
                raise
            self.connections.add(connection)

    def _shake(self, connection):
        """One more step of the TLS handshake."""
        try:
            connection.sock.do_handshake()
            connection.shaking = False
            self._wait_for(connection, selectors.EVENT_READ)
            if connection.target:
                self._greet(connection)
            self._read(connection)
        except ssl.SSLWantReadError:
            self._wait_for(connection, selectors.EVENT_READ)
        except ssl.SSLWantWriteError:
            self._wait_for(connection, selectors.EVENT_WRITE)
        except OSError as error:
            self._refuse(connection, f"no TLS: {getattr(error, 'reason', None) or reason(error)}")

    def call(self, target):
        """Begins to connect to another island; the island is told what comes of it."""
        family, address = target.addresses[0]
        try:
            sock = socket.socket(family, socket.SOCK_STREAM)
        except OSError:                              # file descriptors are used up
            target.failed()
            return
        sock.setblocking(False)
        connection = target.connection = Connection(sock, address, wire.limits_of_call(self.limits))
        connection.target, connection.title, connection.version = target, target.title, V2
        self.connections.add(connection)
        self.selector.register(sock, selectors.EVENT_WRITE, lambda mask: self._called(connection))
        try:
            sock.connect(address)
        except BlockingIOError:
            pass
        except OSError:
            self.drop(connection)

    def _called(self, connection):
        """A connection that was begun here stands, or cannot be made."""
        sock, context = connection.sock, self.island.terms.tls
        if not connection.open:
            return
        if sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            self.drop(connection)
            return
        self.selector.unregister(sock)
        try:
            tune(sock)
            if context:
                connection.sock = context.wrap_socket(sock, server_hostname=connection.target.host, do_handshake_on_connect=False)
                connection.shaking = True
            self.selector.register(connection.sock, connection.event, connection)
        except (OSError, ValueError):
            self.drop(connection)
            return
        if context:
            self._shake(connection)
        else:
            self._greet(connection)

    def drop(self, connection):
        """Closes a connection; what it held goes back to the queue."""
        if not connection.open:
            return
        connection.open = False
        self.connections.discard(connection)
        if not connection.target:
            self.door.leave(connection.host)
        with contextlib.suppress(KeyError, ValueError):      # it may be gone already
            self.selector.unregister(connection.sock)
        connection.sock.close()
        if self.upload and self.upload[0] is connection:
            self._end_upload()
        if self.island and not self.closing:
            self.island.lost(connection)
        if connection.step is not None and not self.closing:
            held = f", its {_chunks(connection.held)} handed out again" if connection.held else ""
            self._tell_of("left", connection, f"worker {connection.title} left{held}")
        self._give_back(connection, list(connection.held))
        if connection.author and not any(c.author == connection.author for c in self.connections):
            for votes in self.states.values():
                for authors in votes.values():
                    authors.discard(connection.author)
        self.wake = True

    def _tell_refused(self, host, title, why):
        """`why` may quote the peer."""
        why = one_line(why)
        if self.door.worth_telling(host, why):
            self.events.tell("refused", f"refused {title}: {why}", address=title, reason=why)

    def _refuse(self, connection, why, code=BAD_FRAME):
        """Closes a connection with a line, and with an ERROR where the peer understands that."""
        if not connection.open:
            return
        self._tell_refused(connection.host, connection.title, why)
        if connection.version == V2:
            with contextlib.suppress(OSError):
                if not connection.outbox:
                    connection.sock.send(frame(ERROR, FAILED.pack(code), why.encode()[:wire.OTHER_LIMIT - FAILED.size], version=V2))
        self.drop(connection)

    def _read(self, connection):
        if not connection.open:
            return
        try:
            data = connection.sock.recv(1 << 16)
            if self.access.tls and data:
                data += connection.sock.recv(connection.sock.pending() or 0)       # no select tells of what TLS has unpacked already
        except (BlockingIOError, ssl.SSLWantReadError):
            return
        except OSError:
            data = b""
        if not data:
            self.drop(connection)
            return
        self.rx += len(data)
        connection.heard = time.monotonic()
        connection.inbox += data
        self.take_frames(connection)

    def take_frames(self, connection):
        """Frames are taken only while nothing waits to be sent: a peer that does not read its answers cannot pile them up."""
        try:
            while connection.open and not connection.outbox and not connection.owed and (got := next_frame(connection.inbox, connection.limits)):
                connection.half = None
                self._handle(connection, *got)
        except FrameError as error:
            self._refuse(connection, str(error))
        connection.half = (connection.half or time.monotonic()) if connection.inbox else None

    def say(self, connection, opcode, *parts):
        self._send(connection, frame(opcode, *parts, version=connection.version))

    def _send(self, connection, data):
        self.tx += len(data)
        connection.outbox = memoryview(bytes(connection.outbox) + data if connection.outbox else data)
        self._flush(connection)

    def _flush(self, connection):
        if not connection.open:
            return
        try:
            connection.outbox = connection.outbox[connection.sock.send(connection.outbox):]
        except (BlockingIOError, ssl.SSLWantWriteError, ssl.SSLWantReadError):
            pass
        except OSError:
            self.drop(connection)
            return
        self._wait_for(connection, selectors.EVENT_WRITE if connection.outbox else selectors.EVENT_READ)

    def _wait_for(self, connection, event):
        if connection.event != event:
            connection.event = event
            self.selector.modify(connection.sock, event, connection)

    def _look(self, now):
        """Leases, deadlines, idle connections, audits that wait for somebody; every LOOK_EVERY seconds."""
        cfg, paces = self.cfg, []
        for connection in list(self.connections):
            silent, pace = now - connection.heard, connection.pace or self.usual
            lease = max(LEASE_LEAST, LEASE_FACTOR * pace) if pace else cfg.STRAGGLER_TIMEOUT
            late = [c for c, since in connection.held.items() if now - max(since, connection.heard) > lease
                    or self.usual and now - since > max(cfg.STRAGGLER_TIMEOUT, LEASE_FACTOR * lease)]
            if late:
                self.events.warn(f"worker {connection.title} silent for {lease:.2g} s, its {_chunks(late)} handed out again")
                self._give_back(connection, late)
            if connection.target and not connection.joined and now - connection.born > auth.HANDSHAKE_SECONDS:
                self.drop(connection)                # it is called again
            elif not connection.joined and now - connection.born > auth.HANDSHAKE_SECONDS:
                self._refuse(connection, f"said nothing useful for {auth.HANDSHAKE_SECONDS:g} s")
            elif connection.half and now - connection.half > HALF_FRAME_TIMEOUT and not connection.owed:
                self._refuse(connection, "stopped in the middle of a frame")
            elif silent > cfg.IDLE_TIMEOUT and not (connection.peer or connection.version == V1 and connection.waiting):
                self._refuse(connection, f"said nothing for {cfg.IDLE_TIMEOUT:g} s")
            elif connection.pace:
                paces.append(connection.pace)
        self.usual = statistics.median(paces) if paces else self.usual
        self._count_authors(now)
        if self.upload and self.run.step >= self.upload[1].step + cfg.SNAPSHOT_EVERY:
            self.upload[0].snapshots = False         # it was asked, and did not care
            self._end_upload()
        for chunk, authors in self.work.disputed():
            if chunk not in self.disputes:
                self.disputes.add(chunk)
                self.events.warn(f"step {self.run.step}: {' and '.join(a.name for a in authors)} disagree about chunk {chunk}; "
                                 "a third worker will decide")
        self.late = self.work.late(now, self.usual) if self.usual and not self.work.queue else []
        self.wake = self.wake or bool(self.late and self.idle)

    def _count_authors(self, now):
        active = {c.author for c in self.connections if c.author and c.trusted and c.step is not None
                  and self.run.step - c.step <= 1 and (c.waiting or now - c.heard < ACTIVE_SECONDS)}
        if len(active) > 1:
            self.several_at = now
        self.alone = len(active) < 2 and now - self.several_at >= self.patience
        if self.alone and len(self.work.results) > len(self.work.done):
            self.work.settle(self.alone)
            self._complete_if_done()

    # who comes in

    def _introduce(self, connection, version, opcode, payload):
        """The frames before a peer is let in."""
        if connection.target:
            self._introduce_us(connection, opcode, payload)
            return
        if version == V1:
            if self.access.secret or self.access.tls or self.island:
                self._refuse(connection, PROTOCOL_WITHOUT_SNAPSHOTS if self.island else PROTOCOL_WITHOUT_A_SECRET)
                return
            author = Author(connection.host, connection.title, "a version 1 peer")
            if why := self._banned(author):
                self._refuse(connection, why)
                return
            self._let_in(connection, V1, author)
            self._handle(connection, version, opcode, payload)
            return
        connection.version = V2
        if opcode == HELLO and connection.hello is None:
            connection.hello, connection.challenge = payload, os.urandom(NONCE.size)
            self.say(connection, CHALLENGE, CHALLENGED.pack(connection.challenge, bool(self.access.secret)))
        elif opcode == JOIN and connection.hello is not None:
            given, text = payload[:PROOF.size], payload[PROOF.size:]
            if not auth.proves(self.access.secret, given, b"worker", connection.hello, connection.challenge, text):
                self._refuse(connection, "wrong secret", NO_ACCESS)
                return
            self._join(connection, text, _card(text))
        else:
            raise FrameError(f"{wire.NAMES.get(opcode, f'opcode {opcode}')} before the introduction is complete")

    def _greet(self, connection):
        """The first words to an island that was called."""
        connection.hello = os.urandom(NONCE.size)
        self.say(connection, HELLO, connection.hello)

    def _introduce_us(self, connection, opcode, payload):
        """What an island that was called answers before it is a peer."""
        if opcode == CHALLENGE and connection.challenge is None:
            connection.challenge, wanted = CHALLENGED.unpack(payload)
            if wanted and not self.access.secret:
                self.island.refused(connection, "it wants a secret: give all islands the same with --secret-file FILE, or in EGG_SECRET")
                return
            connection.card = json.dumps(self.island.card()).encode()
            mine = auth.proof(self.access.secret, b"worker", connection.hello, connection.challenge, connection.card)
            self.say(connection, JOIN, mine, connection.card)
        elif opcode == WELCOME and connection.challenge is not None and not connection.welcomed:
            its = WELCOMED.unpack(payload)[0]
            connection.welcomed = auth.proves(self.access.secret, its, b"coordinator", connection.hello, connection.challenge, connection.card)
            if not connection.welcomed:
                self.island.refused(connection, "it does not know the secret")
        elif opcode == ISLAND and connection.welcomed:
            card = _card(payload)
            if why := self.island.objection(card):
                self.island.refused(connection, why)
                return
            self._let_in_island(connection, card, self._author(connection, card))
        elif opcode == ERROR:
            self._told_error(connection, payload)
        else:
            raise FrameError(f"{wire.NAMES.get(opcode, f'opcode {opcode}')} before the introduction is complete")

    def _told_error(self, connection, payload):
        """Another island ends the connection, and says why."""
        code, why = FAILED.unpack_from(payload)[0], one_line(payload[FAILED.size:].decode("utf-8", "replace"))
        if code == FULL:
            self.drop(connection)
        else:
            self.island.refused(connection, why, code)

    def _let_in_island(self, connection, card, author):
        self._let_in(connection, V2, None)
        connection.limits = wire.limits_of_island(self.limits)
        self.island.joined(connection, card, author.identity)

    def _author(self, connection, card):
        shown = connection.sock.getpeercert(True) if self.access.tls else None
        return Author(connection.host, card["id"], card["name"], hashlib.sha256(shown).hexdigest() if shown else "")

    def _join(self, connection, text, card):
        author = self._author(connection, card)
        if card["role"] == "worker" and (why := self._banned(author)):
            self._refuse(connection, why, BANNED)
            return
        if card["role"] == "worker":
            differ = history.difference(history.kept(self.cfg), card["config"], ("at the coordinator", "at the worker"))
            if differ:
                self._refuse(connection, f"another configuration: {differ}", OTHER_CONFIG)
                return
            if any(card["data"]):
                if any(self.run.data) and card["data"] != self.run.data:
                    self._refuse(connection, "other training data than the first worker of this run had: give every worker the same "
                                 f"INPUT_FILE; to go on with other data, remove {history.DATA_FILE} from the save directory", OTHER_DATA)
                    return
                self.run.keep_data(card["data"])
            connection.device = card["device"]
            connection.title = f"{author.name} ({connection.title}, {card['device']})"
        elif card["role"] == "island":
            if self.island and card["id"] == self.island.id:
                self.say(connection, ERROR, FAILED.pack(ITSELF), b"this is the island itself")
                self.drop(connection)
                return
            why = self.island.objection(card) if self.island else "this coordinator is no island: start it with --island NAME"
            if why:
                self._refuse(connection, f"island {card['name']}: {why}", OTHER_CONFIG)
                return
        self._let_in(connection, V2, author if card["role"] == "worker" else None)
        mine = auth.proof(self.access.secret, b"coordinator", connection.hello, connection.challenge, text)
        self.say(connection, WELCOME, WELCOMED.pack(mine, snapshots.config_digest(self.cfg), self.run.data, self.run.step,
                                                     self.shelf.newest))
        if card["role"] == "status":
            connection.status = True
            self.say(connection, STATUS, json.dumps(self.status()).encode())
        elif card["role"] == "island":
            self.say(connection, ISLAND, json.dumps(self.island.card()).encode())
            self._let_in_island(connection, card, author)

    def _let_in(self, connection, version, author):
        connection.version, connection.author, connection.joined = version, author, True
        connection.limits = wire.limits_of(self.limits, version)

    def _banned(self, author):
        """Why this author may not take part, or None."""
        why = self.bans.all().get(author.identity)
        how = f"remove its line from {self.bans.path}" if self.bans.path else "start the coordinator again"
        return None if why is None else f"banned: {why}; to let {author.identity} in again, {how}"

    # work

    def _new_step(self):
        draws = np.frombuffer(os.urandom(4 * self.cfg.N_CHUNKS), np.uint32)          # nobody can know what will be audited
        self.work = leases.Step(self.cfg, np.flatnonzero(draws < self.cfg.AUDIT_RATE * (1 << 32)).tolist())
        self.updates, self.late = [], []             # late: chunks that an idle worker may take a copy of
        self.disputes.clear()
        self.step_started, self.step_tx, self.step_rx = time.monotonic(), self.tx, self.rx

    def _handle(self, connection, version, opcode, payload):
        if not connection.joined:
            self._introduce(connection, version, opcode, payload)
        elif connection.status:
            raise FrameError("a status was asked for, and nothing else is answered")
        elif connection.peer:
            if opcode == ERROR:
                self._told_error(connection, payload)
            else:
                self.island.handle(connection, opcode, payload)
        elif opcode == JOB_REQUEST:
            stated = STATED.unpack_from(payload, REQUEST.size)[0] if version == V2 else None
            self._request(connection, REQUEST.unpack_from(payload)[1], stated)
        elif opcode == RESULT:
            self._result(connection, payload)
        elif opcode == VALIDATION:
            self._validation(connection, *VALIDATED.unpack(payload))
        elif opcode == LOG_MESSAGE and connection.may_speak():
            text = printable(payload.decode("utf-8", "replace"))
            self.events.message(connection.author.name, text, f"worker {connection.title}:\n{text}" if self.peers else text)
        elif opcode == SNAPSHOT_DATA and version == V2:
            self._take_snapshot(connection, payload)
        elif opcode == SNAPSHOT_REQUEST and version == V2:
            step, offset = BLOCK_REQUEST.unpack(payload)
            total, data = self.shelf.block(step, offset, BLOCK) or (0, b"")
            self.say(connection, SNAPSHOT_DATA, BLOCK_HEAD.pack(step, total, offset), data)

    def _request(self, connection, step, stated):
        first, connection.step, connection.stated = connection.step is None, step, stated
        if first:
            known = sum(c.step is not None for c in self.connections)
            self._tell_of("joined", connection, f"worker {connection.title} joined at step {step} ({known} connected)")
            self._count_authors(time.monotonic())
        if not connection.waiting:
            self._answer(connection)

    def _answer(self, connection):
        """Serves a request: what the worker lacks, a chunk, or later."""
        run, step = self.run, connection.step
        if step > run.step:
            # our worker takes this as the sign to rebuild; others wait until the run has come as far
            self.say(connection, JOB_RESPONSE, RESPONSE.pack(run.seed, run.step, NOTHING, 0))
        elif step < run.start.step or step == run.start.step and self._of_epoch_before(connection):
            self._send_to_start(connection)
        elif connection.stated and not self._agrees(connection):
            return
        elif step < run.step:
            self._send(connection, self._catch_up(step, connection.version))
        elif self.island and self.island.handover:
            if connection.snapshots and self.upload is None:
                self._want_snapshot(connection)
            self._hold(connection)
        elif (chunk := self._next_chunk(connection)) is not None:
            now = time.monotonic()
            if self.started is None:
                self.started = self.step_started = now
            connection.held[chunk] = now
            connection.given.add(chunk)
            if connection.stated and connection.snapshots and self.upload is None and self.shelf.wanted(step):
                self._want_snapshot(connection)
            self.say(connection, JOB_RESPONSE, RESPONSE.pack(run.seed, run.step, chunk * self.cfg.CHUNK_SIZE, 0))
            if self.island:
                self.island.handed_out()
        else:
            self._hold(connection)

    def _catch_up(self, step, version):
        """The frame with the fitness of a step; at the end of a step all workers want the same one, at the same time."""
        key = self.run.step, step, version
        if self.last_frame[0] != key:
            packed = self.run.body(step) if version == V2 else self.run.fitness(step)
            head = RESPONSE.pack(self.run.seed, step + 1, 0, len(packed))
            self.last_frame = key, frame(JOB_RESPONSE, head, packed, version=version)
        return self.last_frame[1]

    def _of_epoch_before(self, connection):
        """Whether a worker that stands where the present epoch begins holds another state: that of the epoch before."""
        origin = self.run.start.origin
        return origin is not None and connection.stated is not None and connection.stated.hex() != origin["digest"]

    def _send_to_start(self, connection):
        """For a worker that has not the state with which the run, or its present epoch, began: no replay leads there, only a snapshot."""
        epoch = self.run.start.epoch
        if connection.version == V1 or connection.sent_to_start == epoch or not self.shelf.newest:
            self._refuse(connection, f"this run began at step {self.run.start.step} from {'another state' if epoch else 'an imported model'}, which "
                                     "only a snapshot brings: the worker must speak protocol 2, and the snapshots must lie in the save directory")
            return
        connection.sent_to_start = epoch
        self.say(connection, REBUILD, STEP.pack(self.shelf.newest))

    def begin_epoch(self, state, origin, body=None):
        """Goes on from another state, of this step and seed, between two steps. origin: see cluster.history.Start; body: of its snapshot, where
        that is made already. Raises OSError, and then nothing has changed."""
        self.shelf.forget(state.step)                # the snapshot of this step is another now
        try:
            sha256 = snapshots.save(self.cfg, state, self.run.directory, body)
            self.run.begin_epoch(history.Start(state.step, state.seed, sha256.hex(), origin))
        except OSError:
            self.shelf.remove(f"snapshot-{state.step:08d}.egg")
            raise
        if self.upload:
            self._end_upload()
        self.shelf.close()
        self.shelf = snapshots.Shelf(self.cfg, self.run)
        self.shelf.arrange()
        self.states.clear()
        self.last_frame = None, b""
        for connection in self.connections:
            connection.rebuilt_at = None
        self._new_step()
        self.wake = True

    def _hold(self, connection):
        connection.waiting = True
        self.idle.append(connection)

    def _next_chunk(self, connection):
        if self.closing or self.finished:
            return None
        now = time.monotonic()
        chunk = self.work.take(connection, connection.author, now)
        if len(connection.held) >= AT_ONCE:
            # a worker that asks again and again without delivering has lost what it was given: it is not left waiting while there is
            # work, but holds no more than AT_ONCE, so that it keeps nobody else waiting either
            if chunk is not None:
                self._give_back(connection, [next(iter(connection.held))])
        elif chunk is None and self.late:
            chunk = self.work.copy(connection, connection.author, now, self.late)
        return chunk

    def _answer_waiting(self):
        """First come, first served, over all requests that are held, where something has happened for them. Not all in one go: when a
        step ends a thousand workers are sent its fitness, and the first of them shall not wait with their next request for the last."""
        if self.wake:
            self.wake, self.unseen = False, len(self.idle)
        for _ in range(min(self.unseen, IN_A_ROW)):
            self.unseen -= 1
            connection = self.idle.popleft()
            connection.waiting = False
            if connection.open:
                self._answer(connection)

    def _give_back(self, connection, chunks):
        for chunk in chunks:
            del connection.held[chunk]
            self.work.give_back(connection, chunk)
            self.wake = True

    def _result(self, connection, payload):
        cfg, run = self.cfg, self.run
        _, step, position, updates, sum_loss, size = RESULT_HEAD.unpack_from(payload)
        packed = payload[RESULT_HEAD.size:]
        if size != len(packed):
            raise FrameError(f"wrong length: RESULT says {size} bytes of fitness and carries {len(packed)}")
        if step < run.step:
            return                                   # too late: the step was completed without it
        if step > run.step:
            raise FrameError(f"wrong step: RESULT for step {step} while step {run.step} is being done")
        chunk, rest = divmod(position, cfg.CHUNK_SIZE)
        if rest or chunk >= cfg.N_CHUNKS:
            raise FrameError(f"wrong chunk: RESULT for member {position}, chunks begin at multiples of {cfg.CHUNK_SIZE} below "
                             f"{cfg.POPULATION_SIZE}")
        try:
            fitness = parameters.unpack_ternary(packed, cfg.CHUNK_SIZE // 2)
        except ValueError as error:
            raise FrameError(f"wrong fitness: {error}") from None
        if abs(sum_loss) > (1 << 62) // cfg.N_CHUNKS or updates > self.most_weights:
            raise FrameError(f"wrong figures: sum of losses {sum_loss}, {updates} weights changed of {self.most_weights}")
        if connection.version == V2 and connection.step != step:
            raise FrameError(f"wrong step: RESULT for step {step} after a request at step {connection.step}")
        if connection.version == V2 and chunk not in connection.given:
            raise FrameError(f"wrong chunk: RESULT for chunk {chunk}, which it was not given")       # two liars could outvote whom they like
        since = connection.held.pop(chunk, None)
        if not connection.trusted:
            self.work.give_back(connection, chunk)   # made with a state that is not that of the others
            self.wake = True
            return
        if since is not None:
            took = time.monotonic() - since
            connection.pace = took if connection.pace is None else 0.7 * connection.pace + 0.3 * took
        if updates:
            self.updates.append(updates)
        if self.started is None:
            self.started = self.step_started
        connection.chunks += 1
        for liar in self.work.result(connection, connection.author, chunk, packed, sum_loss, fitness, self.alone):
            self._ban(liar, f"its result for chunk {chunk} of step {step} is not that of two others")
        self.wake = self.wake or connection.waiting or chunk not in self.work.done
        self.console.progress(f"step {step}: {len(self.work.done)}/{cfg.N_CHUNKS} chunks")
        self._complete_if_done()

    def _complete_if_done(self):
        """Unless workers hold different states of this step and no majority has decided: then nobody's results shall count yet."""
        sizes = sorted((len(authors) for authors in self.states.get(self.run.step, {}).values()), reverse=True)
        if self.work.complete and (len(sizes) < 2 or sizes[0] > sizes[1]):
            self._complete_step()

    def _complete_step(self):
        step, updates, sum_loss = self.run.step, max(self.updates, default=0), self.work.sum_loss
        self.run.append(parameters.pack_ternary(self.work.fitness), sum_loss, updates)
        report = self._report(step, updates, sum_loss)
        for connection in self.connections:
            connection.held.clear()
            connection.given.clear()
        self._new_step()
        self.wake = True
        if self.island:
            self.island.step_done(self.last_loss)
        self._answer_waiting()                       # before anything is written: workers come first
        self.events.tell("step", **report)

    def _validation(self, connection, step, tokens, n_bytes, nats):
        if not tokens or not math.isfinite(nats) or nats < 0:
            raise FrameError(f"wrong validation: {nats} nats over {tokens} tokens")
        first = max(self.run.step - 1, self.run.start.step)
        if not (connection.trusted and first <= step <= self.run.step) or any(v[0] == step for v in self.validations[-2:]):
            return
        del self.validations[1:-2]                   # the first and the last are told
        self.validations.append((step, nats / math.log(2) / (n_bytes or tokens), "bits/byte" if n_bytes else "bits/token"))
        _, value, unit = self.validations[-1]
        self.events.tell("validation", step=step, tokens=step * self.tokens_a_step, value=round(value, 6), unit=unit)
        self.shelf.validated(step, value)
        if self.island:
            self.island.validated(step, value, unit)

    # replicas

    def _agrees(self, connection):
        """Whether the state of this worker is that of the others; if not, it is told to rebuild, or waits for a third to decide."""
        step, digest, author = connection.step, connection.stated, connection.author
        if step <= self.run.step - STATES_KEPT:
            return True                              # it replays the run, and will be compared when it has come nearer
        votes = self.states.setdefault(step, {})
        while len(self.states) > STATES_KEPT:
            del self.states[min(self.states)]
        for stated, authors in list(votes.items()):
            authors.discard(author)
            if not authors:
                del votes[stated]
        votes.setdefault(digest, set()).add(author)
        mine, others = len(votes[digest]), max((len(a) for d, a in votes.items() if d != digest), default=0)
        taken = self.shelf.digests.get(step)
        if taken and len(votes.get(taken, ())) <= max((len(a) for d, a in votes.items() if d != taken), default=0):
            self.shelf.forget(step)                  # nobody shall rebuild from a snapshot that is not what most have
        if mine > others:
            connection.trusted = True
            for wrong in {a for d, authors in votes.items() if d != digest for a in authors}:
                self._distrust(wrong)
            if ("state", step) in self.disputes:     # it is decided: those that wait for that are to be looked at
                self.disputes.discard(("state", step))
                self.wake = True
            self._complete_if_done()                 # it may have waited for that
            return True
        self._distrust(author)
        if connection.rebuilt_at != step:
            connection.rebuilt_at = step
            start = max((s for s in self.shelf.files if s <= step), default=0)
            self.events.warn(f"worker {connection.title}: its state at step {step} is not that of others: it rebuilds from step {start}")
            self.say(connection, REBUILD, STEP.pack(start))
        elif mine < others:
            self._ban(author, f"its state at step {step} is not that of others, and was not after it was rebuilt")
        else:
            if ("state", step) not in self.disputes:
                self.disputes.add(("state", step))
                self.events.warn(f"step {self.run.step}: workers hold different states of step {step}, as many for one as for another: "
                                 "start another worker, which decides, or stop the wrong one")
            self._hold(connection)
        return False

    def _distrust(self, author):
        doubted = [c for c in self.connections if c.author == author and c.trusted]
        for connection in doubted:
            connection.trusted = False
        if doubted:
            self.work.withdraw(author, self.alone)
            self.wake = True
        if self.upload and self.upload[0] in doubted:
            self._end_upload()

    def _ban(self, author, why):
        """A worker that lied, or whose machine computes wrongly, is out, and so are its results."""
        self.events.tell("banned", f"banned {author.name} at {author.host}: {why}", worker=author.name, address=author.host, reason=why)
        self.bans.add(author.identity, why)
        self._distrust(author)
        for connection in [c for c in self.connections if c.author == author]:
            self._refuse(connection, self._banned(author) or f"banned: {why}", BANNED)

    # snapshots

    def _want_snapshot(self, connection):
        try:
            awaited = bool(self.island and self.island.handover)       # then it is about to be another one, and needs no file
            self.upload = connection, snapshots.Upload(self.cfg, self.run.step, self.run.seed, connection.stated, self.run.directory,
                                                          remember=awaited)
            self.say(connection, SNAPSHOT_WANTED, STEP.pack(self.run.step))
        except OSError as error:
            self._no_snapshots(error)

    def _take_snapshot(self, connection, payload):
        step, total, offset = BLOCK_HEAD.unpack_from(payload)
        if not self.upload or self.upload[0] is not connection or self.upload[1].step != step:
            return                                   # of an upload that was given up
        upload = self.upload[1]
        try:
            upload.add(total, offset, payload[BLOCK_HEAD.size:])
            if upload.finished and upload.remembered:
                self._end_upload()
                self.island.own_state(upload)
            elif upload.finished:
                self.shelf.put(upload)
                self.upload, self.wake = None, True  # a handover may wait for another one
                self.events.tell("snapshot", step=step, bytes=total, overlay=upload.overlay())
                if self.island:
                    self.island.snapshot_taken(step)
        except ValueError as error:
            connection.snapshots = False
            self._end_upload()
            self.events.warn(f"worker {connection.title}: its snapshot of step {step} is not used: {error}")
        except OSError as error:
            self._no_snapshots(error)

    def _end_upload(self):
        self.upload[1].drop()
        self.upload = None
        self.wake = True

    def _no_snapshots(self, error):
        """The run is more than its snapshots: it goes on without them."""
        if self.upload:
            self._end_upload()
        self.shelf.stop()
        self.events.warn(f"{self.run.directory}: no more snapshots, {error.strerror}: start again when this is mended")

    # what people see

    @property
    def tokens_a_step(self):
        return self.cfg.POPULATION_SIZE * self.cfg.SEQ_LEN

    def _report(self, step, updates, sum_loss):
        """The fields of a completed step's event."""
        now = self.completed = time.monotonic()
        seconds = max(now - self.step_started, 1e-6)
        self.last_loss, self.speed = sum_loss / (self.tokens_a_step * 16 * self.cfg.LOSS_SCALE), self.tokens_a_step / seconds
        if len(set(self.updates)) > 1:
            self.events.warn(f"step {step}: workers report different numbers of changed weights, {sorted(set(self.updates))}: "
                             "a replica has drifted; restart the workers")
        return {"step": step, "tokens": step * self.tokens_a_step, "loss": round(self.last_loss, 6), "updates": updates,
                "reports": len(self.updates), "learning_rate": self.cfg.learning_rate(step), "seconds": round(seconds, 6),
                "elapsed": round(now - self.started, 3), "tokens_per_second": round(self.speed, 2),
                "sent": self.tx - self.step_tx, "received": self.rx - self.step_rx}

    def _tell_of(self, kind, connection, line):
        """Of a worker that comes or goes."""
        self.events.tell(kind, line if self.peers else None, worker=connection.author.name, address=connection.address,
                         device=connection.device, step=connection.step)


def run_coordinator(cfg, host=None, port=None, save_dir=None, load_dir=None, steps=None, minutes=None, console=None,
                    access=auth.Access(), http=None, log_json=None, tensorboard=None, island=None):
    """Serves a run until it has `steps` completed steps, `minutes` have passed since the first chunk, or SIGINT or SIGTERM.

    host: default see cluster.auth.listen_host; port: default cfg.PORT; http: an tools.live_page.Where, for a live page; log_json,
    tensorboard: see cluster.event_log.Events; island: the islands.gossip.Terms of an island. Returns a Summary. Raises HistoryError, NetError,
    AuthError, IslandError, WatchError; the completed steps are
    kept whatever happens."""
    console = console or Console()
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (files, files))         # one for every worker
    run = history.open_run(cfg, save_dir, load_dir)
    with contextlib.closing(run), event_log.Events(cfg, run, run.directory or ".", console, log_json, tensorboard) as events:
        for line in run.notices:
            events.warn(line)
        coordinator = Coordinator(cfg, run, host, cfg.PORT if port is None else port, steps, minutes, console=console, access=access,
                                  events=events, http=http, island=island)
        with contextlib.closing(coordinator):
            where = f"kept in {run.directory}" if run.directory else "not kept (--save-dir keeps the run)"
            doors = "with a secret" if access.secret else "open to this machine" if auth.is_loopback(coordinator.address[0]) else \
                "OPEN TO ANYBODY"
            console.line("coordinator on {}:{}, step {}, {}, {}{}".format(*coordinator.address, run.step, where, doors,
                                                                        " and TLS" if access.tls else ""))
            if coordinator.page:
                console.line(coordinator.page.invitation())
            with stop_signals() as stopped:
                while not coordinator.finished and not stopped:
                    coordinator.poll()
            coordinator.drain(0 if stopped else 5)
        events.tell("stop", farewell(run), step=run.step)
        return coordinator.summary()


def farewell(run):
    """Where the run lies and how to go on."""
    if run.directory is None:
        return f"stopped after {run.step} steps; they are not kept (--save-dir keeps them)"
    return f"stopped after {run.step} steps; the run lies in {run.directory}: continue it with --load-dir {run.directory}"


def reason(error):
    """What the system says about an OSError (Python adds addresses to some)."""
    return os.strerror(error.errno) if error.errno and error.errno > 0 else error.strerror or str(error)


def _card(text):
    """What a peer says about itself in JOIN: role, id, name, device, config, data; checked and safe to print. Raises FrameError."""
    try:
        card = json.loads(text)
        role, config = card["role"], card["config"] if card["role"] != "status" else {}
        data = bytes.fromhex(card.get("data", "")) or bytes(32)
        if role not in ("worker", "status", "island") or len(data) != 32 or type(config) is not dict:
            raise ValueError
        id_, name, device = (one_line(str(card.get(k, "")), 64) for k in ("id", "name", "device"))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise FrameError("JOIN does not say who it is") from None
    return {"role": role, "id": id_, "name": name or "nameless", "device": device or "device not told", "config": config, "data": data}


def _chunks(chunks):
    return f"chunk {', '.join(str(c) for c in sorted(chunks))} is"


def count_text(n):
    """Tokens, in millions or billions."""
    return f"{n / 1e9:.2f} B" if n >= 1e9 else f"{n / 1e6:.2f} M"


def _bytes(n):
    return f"{n} B" if n < 1 << 10 else f"{n / (1 << 10):.2f} KB" if n < 1 << 20 else f"{n / (1 << 20):.2f} MB"


# --- worker ------------------------------------------------------------------------------------------------------------------

SLICE_SECONDS = 0.2        # how long a worker computes at most without looking at its socket, roughly
FIRST_SLICE = 64           # members, before its speed is known
CONNECT_TIMEOUT = 10.0     # seconds
SEND_TIMEOUT = 60.0        # seconds
BACK_OFF = (0.1, 5.0)      # seconds between attempts to connect: the first, the longest
LINEAGE = 5                # epochs that `status` tells of at most
POLL_SECONDS = 0.1         # a C++ coordinator with nothing to hand out is asked again so often


class OldCoordinator(Exception):
    """The coordinator closed on our HELLO: it may speak version 1 alone."""


class Link:
    """A worker's connection, introduced. Every method raises OSError when the coordinator is gone, NetError when it is no coordinator of
    ours or does not let us in; making one raises OldCoordinator where version 1 may help. version: V1 or V2; card: what JOIN says."""

    def __init__(self, cfg, host, port, version=V1, access=auth.Access(), card=None):
        self.name, self.limits, self.inbox = f"{host}:{port}", wire.limits(cfg), bytearray()
        self.version, self.limits = version, {version: self.limits[version]}
        self.beaten, self.snapshot = time.monotonic(), 0
        self.sock = socket.create_connection((host, port), timeout=CONNECT_TIMEOUT)
        try:
            tune(self.sock)
            if access.tls:
                self.sock = self._tls(access.tls, host)
            if version == V2:
                self._introduce(cfg, access, card)
        except BaseException:
            self.sock.close()
            raise

    def _tls(self, context, host):
        try:
            return context.wrap_socket(self.sock, server_hostname=host)
        except ssl.SSLCertVerificationError as error:
            raise NetError(f"{self.name}: its certificate is not good: {error.verify_message}: give --tls-ca the certificate of this "
                           "coordinator, made for the name used here") from None
        except ssl.SSLError as error:
            raise NetError(f"{self.name}: no TLS: {error.reason}: is the coordinator given --tls-cert?") from None

    def _introduce(self, cfg, access, card):
        hello, text = os.urandom(NONCE.size), json.dumps(card).encode()
        self.send(self.frame(HELLO, hello))
        try:
            challenge, wanted = CHALLENGED.unpack(self.next(CHALLENGE, CONNECT_TIMEOUT))
        except ConnectionError:
            raise OldCoordinator from None
        if wanted and not access.secret:
            raise NetError(f"{self.name} wants a secret: give the coordinator's with --secret-file FILE, or in EGG_SECRET")
        self.send(self.frame(JOIN, auth.proof(access.secret, b"worker", hello, challenge, text), text))
        proof, config, _, _, self.snapshot = WELCOMED.unpack(self.next(WELCOME, CONNECT_TIMEOUT))
        if not auth.proves(access.secret, proof, b"coordinator", hello, challenge, text):
            raise NetError(f"{self.name} does not know the secret: is it the right coordinator?")
        if card["role"] == "worker" and config != snapshots.config_digest(cfg):
            raise NetError(f"{self.name}: it let us in with another configuration: is it of the same version of egg?")

    def frame(self, opcode, *parts):
        return frame(opcode, *parts, version=self.version)

    def send(self, data):
        self.sock.settimeout(SEND_TIMEOUT)
        self.sock.sendall(data)
        self.beaten = time.monotonic()

    def beat(self):
        """A sign of life where one is due."""
        if self.version == V2 and time.monotonic() - self.beaten >= HEARTBEAT_EVERY:
            self.send(self.frame(HEARTBEAT))

    def next(self, *wanted):
        """Payload of the next frame; see `any_of`."""
        return self.any_of((wanted[0],), *wanted[1:])[1]

    def any_of(self, opcodes, timeout=None):
        """(opcode, payload) of the next frame with one of these opcodes, others are passed over; heartbeats go out meanwhile. Raises
        TimeoutError after `timeout` seconds."""
        until = None if timeout is None else time.monotonic() + timeout
        while True:
            try:
                while got := next_frame(self.inbox, self.limits):
                    if got[1] in opcodes:
                        return got[1:]
                    if got[1] == ERROR and self.version == V2:
                        code, why = FAILED.unpack_from(got[2])[0], one_line(got[2][FAILED.size:].decode("utf-8", "replace"))
                        if code == FULL:
                            raise TimeoutError(why)
                        raise NetError(f"{self.name} refuses this worker: {why}")
            except FrameError as error:
                raise NetError(f"{self.name}: {error}") from None
            if until is not None and time.monotonic() >= until:
                raise TimeoutError(f"{self.name} does not answer")
            self._receive(HEARTBEAT_EVERY if until is None else min(HEARTBEAT_EVERY, max(until - time.monotonic(), 0.001)))
            self.beat()

    def response(self, timeout=None):
        """(seed, step, first member, fitness as it came) of the next JOB_RESPONSE."""
        return self.unpack_response(self.next(JOB_RESPONSE, timeout))

    def unpack_response(self, payload):
        seed, step, position, size = RESPONSE.unpack_from(payload)
        if size != len(payload) - RESPONSE.size:
            raise NetError(f"{self.name}: wrong length: JOB_RESPONSE says {size} bytes of fitness and carries "
                           f"{len(payload) - RESPONSE.size}")
        return seed, step, position, payload[RESPONSE.size:]

    def check(self, seconds=0.0):
        """Looks whether the coordinator is still there, for so long."""
        self._receive(seconds)
        self.beat()

    def _receive(self, seconds):
        """Takes in what comes within so many seconds."""
        self.sock.settimeout(seconds)
        try:
            data = self.sock.recv(1 << 16)
        except (BlockingIOError, TimeoutError, ssl.SSLWantReadError):
            return
        if not data:
            raise ConnectionResetError("the connection was closed")
        self.inbox += data

    def close(self):
        self.sock.close()


class Worker:
    """A replica of the model and what it needs to serve; see `run_worker`."""

    def __init__(self, cfg, engine, tokens, validation, decoding, validate_first, console):
        self.cfg, self.engine, self.console = cfg, engine, console
        self.tokens, self.validation, self.decoding = tokens, validation, decoding
        self.changed = 0                   # weights changed by the last update, until reported
        self.rebuilt = False               # since the last chunk
        self.validate_next = validate_first
        self.told_step = -1                # the last step that was validated and sampled
        self.speed = None                  # members a second
        self.slice = FIRST_SLICE
        self.chunks = 0
        self.stated = None                 # (step, digest of the state then)

    def serve(self, link, heard):
        """Asks for work and does it until the coordinator is gone (OSError). `heard` is called with every answer."""
        engine = self.engine
        if link.snapshot > engine.step:
            self._load(link, link.snapshot)
        while True:
            link.send(link.frame(JOB_REQUEST, REQUEST.pack(engine.seed, engine.step, 0), self._state(link)))
            opcode, payload = link.any_of((JOB_RESPONSE, REBUILD, SNAPSHOT_WANTED) if link.version == V2 else (JOB_RESPONSE,))
            while opcode == SNAPSHOT_WANTED:
                self._send_snapshot(link, *STEP.unpack(payload))
                opcode, payload = link.any_of((JOB_RESPONSE, REBUILD, SNAPSHOT_WANTED))
            heard()
            if opcode == REBUILD:
                start = STEP.unpack(payload)[0]
                self.console.line(f"worker: at step {engine.step}, told to go on from the state of step {start}")
                if not start or not self._load(link, start):
                    self._begin_again()
                continue
            seed, step, position, packed = link.unpack_response(payload)
            if packed:
                self._catch_up(link, step, packed)
            elif position == NOTHING:
                # a seed of 0 says nothing: a C++ coordinator may leave these fields empty here
                if step < engine.step and seed not in (0, engine.seed):
                    self._rebuild(link, seed, step)
                else:
                    link.check(POLL_SECONDS)
            elif (seed, step) != (engine.seed, engine.step):
                self._rebuild(link, seed, step)
            elif position % self.cfg.CHUNK_SIZE or position >= self.cfg.POPULATION_SIZE:
                raise NetError(f"{link.name}: it hands out member {position}, chunks here begin at multiples of {self.cfg.CHUNK_SIZE} "
                               f"below {self.cfg.POPULATION_SIZE}: set CHUNK_SIZE and POPULATION_SIZE as there")
            else:
                self._work(link, position)

    def _catch_up(self, link, step, packed):
        if step != self.engine.step + 1:
            self._rebuild(link, None, step)
            return
        try:
            if link.version == V2:
                packed = history.unzip(packed, parameters.packed_size(self.cfg.N_PAIRS))
            fitness = parameters.unpack_ternary(packed, self.cfg.N_PAIRS)
        except ValueError as error:
            raise NetError(f"{link.name}: the fitness of step {step - 1} cannot be right ({error}): "
                           "set POPULATION_SIZE as there") from None
        self.changed = self.engine.update(fitness)

    def _rebuild(self, link, seed, step):
        """This replica and the coordinator's run have parted: begin again and replay the run, once."""
        if self.rebuilt:
            raise NetError(f"{link.name}: its run does not fit this worker: it answers for step {step}"
                           + (f" with seed {seed}" if seed is not None else "")
                           + f", here is step {self.engine.step} with seed {self.engine.seed}; "
                           "is the configuration the same on both sides, and does it still hold the history of the run?")
        self.rebuilt = True
        self.console.line(f"worker: at step {self.engine.step}, the coordinator at step {step}: rebuilding from the beginning")
        self._begin_again()

    def _begin_again(self, state=None):
        self.engine.load(state or parameters.initial_state(self.cfg))
        self.changed, self.told_step, self.stated = 0, -1, None

    def _state(self, link):
        """The digest of this step's state, which goes with every request; b"" with version 1."""
        if link.version == V1:
            return b""
        if self.stated is None or self.stated[0] != self.engine.step:
            self.stated = self.engine.step, self.engine.digest()
        return STATED.pack(self.stated[1])

    def _load(self, link, step):
        """Takes over the coordinator's snapshot of this step; whether it was good. Without it the run is replayed as far."""
        data, total = bytearray(), 1
        while len(data) < total:
            link.send(link.frame(SNAPSHOT_REQUEST, BLOCK_REQUEST.pack(step, len(data))))
            payload = link.next(SNAPSHOT_DATA)
            its_step, total, offset = BLOCK_HEAD.unpack_from(payload)
            if (its_step, offset) != (step, len(data)) or total > snapshots.most_bytes(self.cfg) or len(payload) == BLOCK_HEAD.size and total:
                raise NetError(f"{link.name}: a piece of a snapshot that was not asked for")
            data += payload[BLOCK_HEAD.size:]
        try:
            state = snapshots.unpack(self.cfg, data)
        except ValueError as error:
            self.console.line(f"worker: {error}; replaying the run instead")
            return False
        self._begin_again(state)
        self.console.line(f"worker: at step {step} by a snapshot")
        return True

    def _send_snapshot(self, link, step):
        """The state of this step, in pieces."""
        if step != self.engine.step:
            raise NetError(f"{link.name}: it wants a snapshot of step {step}, here is step {self.engine.step}")
        body = snapshots.pack(self.engine.state())
        for offset in range(0, len(body), BLOCK):
            link.send(link.frame(SNAPSHOT_DATA, BLOCK_HEAD.pack(step, len(body), offset), body[offset:offset + BLOCK]))

    def _work(self, link, first):
        if first == 0 and self.engine.step != self.told_step:
            self._tell(link)
            self.told_step = self.engine.step
        losses = np.empty(self.cfg.CHUNK_SIZE, np.int64)
        done = 0
        while done < losses.size:
            count = self._slice_size(losses.size - done)
            started = time.perf_counter()
            losses[done:done + count] = self.engine.evaluate(first + done, count)
            self._measure(count, time.perf_counter() - started)
            done += count
            link.check()
        packed = parameters.pack_ternary(parameters.chunk_fitness(losses, self.cfg))
        head = RESULT_HEAD.pack(self.engine.seed, self.engine.step, first, self.changed, int(losses.sum()), len(packed))
        link.send(link.frame(RESULT, head, packed))
        self.changed, self.rebuilt = 0, False
        self.chunks += 1
        self.console.progress(f"step {self.engine.step}: {self.chunks} chunks done, {self.speed * self.cfg.SEQ_LEN:.0f} tok/s")

    def _slice_size(self, left):
        """Even number of members: equal slices of what is left, none expected to take longer than SLICE_SECONDS."""
        slices = -(-left // self.slice)
        return min(left, -(-left // slices) + 1 & ~1)

    def _measure(self, count, seconds):
        self.speed = count / max(seconds, 1e-9)
        # grows by steps: the first slices of a device say little about the speed of large ones
        self.slice = max(2, min(int(self.speed * SLICE_SECONDS), 8 * self.slice) & ~1)

    def _tell(self, link):
        """What the worker of chunk 0 adds to the result: validation and a sample, every so many steps."""
        cfg, step = self.cfg, self.engine.step
        if cfg.DEBUG and self.tokens is not None:
            from tools import debug
            if step % debug.EVERY == 0:
                debug.report(cfg, self.engine, self.tokens, Console(), cfg.DEBUG_FILE)       # here, not at the coordinator
        if self.validation is not None and (self.validate_next or cfg.VALIDATE_EVERY and step % cfg.VALIDATE_EVERY == 0):
            self.validate_next = False
            nats, tokens = self.engine.validate(self.validation.windows)
            n_bytes = self.validation.n_bytes if self.validation.unit == "bits/byte" else 0
            link.send(link.frame(VALIDATION, VALIDATED.pack(step, tokens, n_bytes, nats)))
        if self.tokens is not None and cfg.SAMPLE_EVERY and step % cfg.SAMPLE_EVERY == 0:
            text = sample(cfg, self.engine, self.tokens, self.decoding).replace("\n", "\u23ce")         # one line of the log
            link.send(link.frame(LOG_MESSAGE, f"sample at step {step}: {text}".encode()[:TEXT_LIMIT]))


def sample(cfg, engine, tokens, decoding):
    """str: a piece of the data and how the model goes on from there (SPEC 10)."""
    at = engine.step * cfg.SEQ_LEN % (len(tokens) - cfg.SEQ_LEN)
    prompt = np.asarray(tokens[at:at + cfg.SAMPLE_PROMPT]).astype(np.int64)
    more = list(engine.generate(prompt, cfg.SAMPLE_TOKENS, engine.seed))
    return f"{data_files.text(decoding, prompt)} >>> {data_files.text(decoding, more)}"


WHICH_HOST = "give the name or address of the coordinator's machine"


def check_address(host, port):
    """Raises NetError where `host` is no name or address."""
    try:
        socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        why = reason(error) if isinstance(error, OSError) else "this is no name"
        raise NetError(f"{host} cannot be reached: {why}: {WHICH_HOST}") from None


def run_worker(cfg, host, port, engine, tokens=None, validation=None, decoding=None, *, retry=True, validate_first=False,
               console=None, access=auth.Access(), protocol=0, name=None):
    """Serves the coordinator at host:port with `engine`, through interruptions, for ever; with retry=False until the coordinator
    closes, and returns the number of chunks done. The engine keeps the state it has come to.

    tokens: the training data, for samples; validation: an model.data_files.Validation or None; decoding: an model.data_files.Decoding or None;
    validate_first: with the first chunk 0, whatever the step; access: an cluster.auth.Access; protocol: 1, 2, or 0 for 2 and then 1 where
    the coordinator closes on that (never where there is a secret or TLS); name: in the coordinator's lines, default host and device.
    Raises NetError where no coordinator can be, or one that does not fit or does not let us in."""
    console = console or Console()
    check_address(host, port)
    if protocol == V1 and (access.secret or access.tls):
        raise NetError("protocol 1 has neither secret nor TLS: leave --protocol 1 out, or the secret")
    worker = Worker(cfg, engine, tokens, validation, decoding, validate_first, console)
    card = {"role": "worker", "id": os.urandom(8).hex(), "name": name or f"{socket.gethostname()}/{engine.name}", "device": engine.name,
            "config": history.kept(cfg), "data": snapshots.data_digest(tokens).hex()}
    version = protocol or V2
    pause, known = BACK_OFF[0], False
    say_there = say_gone = True              # attempts that bring no answer are told once

    def heard():
        nonlocal pause, say_there, say_gone
        pause, say_there, say_gone = BACK_OFF[0], True, True

    while True:
        link = None
        try:
            link = Link(cfg, host, port, version, access, card)
            if say_there:
                say_there, say_gone = False, True
                console.line(f"worker: {engine.name}, connected to {host}:{port}" + (" (protocol 1)" if link.version == V1 else ""))
            known = True
            worker.serve(link, heard)
        except OldCoordinator:
            if not (protocol or access.secret or access.tls or version == V1):
                version = V1                 # at once, and for one connection: who closed may also have been stopped just then
                continue
            if not retry:
                raise NetError(f"{host}:{port} closed on our greeting: is it an egg coordinator, with TLS as here, of protocol 2?") from None
            if say_gone:
                console.line("worker: the coordinator closed on our greeting, trying again")
            say_gone = False
        except OSError as error:
            if not known and not isinstance(error, (ConnectionError, TimeoutError)):
                raise NetError(f"{host} cannot be reached: {reason(error)}: {WHICH_HOST}") from None
            if not retry and known:
                return worker.chunks
            if not retry:
                raise NetError(f"no coordinator at {host}:{port}: {reason(error)}") from None
            if say_gone:
                what = "the coordinator is gone" if known else f"no coordinator at {host}:{port} yet"
                console.line(f"worker: {what}, trying again")
            say_gone = False
        finally:
            if link is not None:
                link.close()
        version = protocol or V2
        time.sleep(pause * random.uniform(0.5, 1.0))
        pause = min(2 * pause, BACK_OFF[1])


def fetch_status(cfg, host, port, access=auth.Access()):
    """What the coordinator at host:port tells about its run, as a dict (Coordinator.status). Raises NetError."""
    check_address(host, port)
    card = {"role": "status", "id": os.urandom(8).hex(), "name": socket.gethostname()}
    try:
        link = Link(cfg, host, port, V2, access, card)
        try:
            return json.loads(link.next(STATUS, CONNECT_TIMEOUT))
        finally:
            link.close()
    except OldCoordinator:
        raise NetError(f"{host}:{port} closed on our greeting: is it an egg coordinator, with TLS as here, of protocol 2?") from None
    except OSError as error:
        raise NetError(f"no coordinator at {host}:{port}: {reason(error)}") from None
    except ValueError:
        raise NetError(f"{host}:{port}: a status that cannot be read") from None


def describe_status(told):
    """str: a table of what fetch_status gives."""
    of = f" of {told['steps']}" if told["steps"] else ""
    facts = [f"step {told['step']}{of}, {told['chunks_done']} of {told['chunks']} chunks done, {told['tokens_per_second']:,.0f} tokens/s"]
    if told["loss"] is not None:
        facts[0] += f", loss {told['loss']:.4f}"
    if told["validation"]:
        facts[0] += ", validation {figure:.3f} {unit} at step {step}".format(**told["validation"])
    facts.append(f"kept in {told['save_dir']}" + (f", newest snapshot of step {told['snapshot']}" if told["snapshot"] else "")
                 if told["save_dir"] else "not kept")
    if told["banned"]:
        facts += [f"banned: {who}: {why}" for who, why in told["banned"].items()]
        facts.append(f"to lift a ban remove its line from {told['ban_file']}" if told["ban_file"] else "bans last until the coordinator ends")
    lines = _table(("worker", "device", "address", "state", "step", "chunks", "s/chunk", "last seen"),
                   [(w["name"], w["device"], w["address"], w["state"], str(w["step"]), str(w["chunks"]),
                     f"{w['chunk_seconds']:.3g}" if w["chunk_seconds"] else "", f"{w['last_seen']:.1f} s") for w in told["workers"]], 4)
    lines = facts + ([""] + lines if told["workers"] else ["no workers"]) + _describe_island(told.get("island"))      # none before islands
    return "\n".join(printable(line).removeprefix("  ") for line in lines)


def _describe_island(island):
    """[line] of a coordinator's place among its peers; [] where it is no island."""
    if not island:
        return []
    peers = [{k: one_line(v, 64) if type(v) is str else v for k, v in p.items()} for p in island["peers"]]
    up = sum(p["state"] == "up" for p in peers)
    name, founder = one_line(island["name"], 64), one_line(island["founder"], 64)
    first = f"island {name}, epoch {island['epoch']}, descends from {founder}, {up} of {len(peers)} peers up"
    if island["fitness"] is not None:
        first += f", fitness {island['fitness']:.4f} ({island['kind']})"
    lines = ["", first]
    for told in [told for told in island["lineage"] if told["epoch"]][-LINEAGE:]:
        source = "rejuvenated" if told["peer_step"] is None else f"the state of {one_line(told['from'], 64)} at its step {told['peer_step']}"
        lines.append(f"  epoch {told['epoch']} from step {told['step']}: {source}")
    columns = (("peer", "name", "{}"), ("address", "address", "{}"), ("state", "state", "{}"), ("descends from", "founder", "{}"),
               ("compares", "kind", "{}"), ("fitness", "fitness", "{:.4f}"), ("step", "step", "{}"), ("epoch", "epoch", "{}"), ("given", "given", "{}"), ("taken", "taken", "{}"),
               ("last seen", "last_seen", "{:.1f} s"))
    rows = [["" if p[key] is None else form.format(p[key]) for _, key, form in columns] for p in peers]
    return lines + ([""] + _table([title for title, _, _ in columns], rows, 5) if rows else [])


def _table(head, rows, words):
    """[line]: rows under their head, the first columns, of words, to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(head, *rows)]
    return ["  ".join(cell.ljust(n) if i < words else cell.rjust(n) for i, (cell, n) in enumerate(zip(row, widths))).rstrip()
            for row in (head, *rows)]
