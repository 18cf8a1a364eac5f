"""Wire format, coordinator and worker: SPEC section 10, protocol version 1.

One process, one selector, no threads: the coordinator hands out chunks of the population, gathers their fitness and keeps it
(egg_history); a worker evaluates chunks on an engine and applies the fitness of every step to its own replica of the model. Nothing
but fitness and losses ever crosses the network. A frame leaves in one send and without Nagle's delay, because every exchange is a
small question and a small answer.
"""

import contextlib
import datetime
import errno
import math
import os
import random
import resource
import select
import selectors
import signal
import socket
import struct
import sys
import threading
import time
from collections import deque
from typing import NamedTuple

import numpy as np

import egg_data
import egg_history
import egg_model
from egg_history import EggError

# --- frames ---------------------------------------------------------------------------------------------------------------

MAGIC, VERSION = b"JOBS", 1
JOB_REQUEST, RESULT, JOB_RESPONSE, LOG_MESSAGE = 0, 1, 2, 3
VALIDATION = 16                          # ours: C++ peers ignore it
HEADER = struct.Struct(">4sBBI")         # magic, version, opcode, bytes of payload
REQUEST = struct.Struct(">QQQ")          # seed, step, 0
RESPONSE = struct.Struct(">QQQI")        # seed, step, first member, bytes of fitness that follow
RESULT_HEAD = struct.Struct(">QQQQqI")   # seed, step, first member, weights changed by the last update, sum of losses, bytes
#                                          of fitness that follow
VALIDATED = struct.Struct(">QQQd")       # step, tokens predicted, bytes they stand for (0: unknown), nats
NOTHING = (1 << 64) - 1                  # first member of a response that hands out nothing
TEXT_LIMIT = 1 << 14                     # bytes of a log message
OTHER_LIMIT = 1 << 12                    # bytes of a frame we do not know: newer peers may send some
NAMES = {JOB_REQUEST: "JOB_REQUEST", RESULT: "RESULT", JOB_RESPONSE: "JOB_RESPONSE", LOG_MESSAGE: "LOG_MESSAGE",
         VALIDATION: "VALIDATION"}


class NetError(EggError):
    """About a connection, an address or what a peer sent."""


class FrameError(Exception):
    """A frame that cannot be meant for us; the connection it came on is closed."""


def frame(opcode, *parts):
    """bytes of a whole frame."""
    payload = b"".join(parts)
    return HEADER.pack(MAGIC, VERSION, opcode, len(payload)) + payload


def frame_limits(cfg):
    """{opcode: (least, most) bytes of payload}."""
    return {JOB_REQUEST: (REQUEST.size, REQUEST.size),
            RESULT: (RESULT_HEAD.size, RESULT_HEAD.size + packed_size(cfg.CHUNK_SIZE // 2)),
            JOB_RESPONSE: (RESPONSE.size, RESPONSE.size + packed_size(cfg.N_PAIRS)),
            LOG_MESSAGE: (0, TEXT_LIMIT),
            VALIDATION: (VALIDATED.size, VALIDATED.size)}


def packed_size(pairs):
    return -(-pairs // 5)


def next_frame(buffer, limits):
    """Takes the first whole frame out of a bytearray: (opcode, payload), or None while it is incomplete. Raises FrameError, as soon
    as the header is there, for one that cannot be right."""
    if len(buffer) < HEADER.size:
        return None
    magic, version, opcode, size = HEADER.unpack_from(buffer)
    if magic != MAGIC:
        raise FrameError(f"wrong magic {magic!r}: not an egg peer")
    if version != VERSION:
        raise FrameError(f"protocol version {version}, here {VERSION}")
    least, most = limits.get(opcode, (0, OTHER_LIMIT))
    if not least <= size <= most:
        allowed = f"{least}" if least == most else f"{least} to {most}"
        hint = " (another CHUNK_SIZE or POPULATION_SIZE there?)" if opcode in (RESULT, JOB_RESPONSE) else ""
        raise FrameError(f"wrong length: {NAMES.get(opcode, f'opcode {opcode}')} of {size} bytes, allowed {allowed}{hint}")
    if len(buffer) < HEADER.size + size:
        return None
    payload = bytes(buffer[HEADER.size:HEADER.size + size])
    del buffer[:HEADER.size + size]
    return opcode, payload


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

    COLOURS = {"green": "32", "red": "31", "blue": "34"}
    PROGRESS_EVERY = 0.1       # seconds

    def __init__(self, stream=None, quiet=False):
        self.stream, self.quiet = stream or sys.stdout, quiet
        self.terminal = self.stream.isatty()
        self.coloured = self.terminal and not os.environ.get("NO_COLOR")
        self._progress, self._next = False, 0.0

    def line(self, text):
        if not self.quiet:
            self._write(("\r\x1b[K" if self._progress else "") + text + "\n")
            self._progress = False

    def progress(self, text):
        if self.terminal and not self.quiet and time.monotonic() >= self._next:
            self._write("\r\x1b[K" + text)
            self._progress, self._next = True, time.monotonic() + self.PROGRESS_EVERY

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
HALF_FRAME_TIMEOUT = 30.0  # seconds a peer may take for a frame it has begun, or to read an answer before its next frame is taken
LOOK_EVERY = 0.05          # seconds between looks at leases and half frames
TICK = 0.25                # seconds the coordinator sleeps at most, to notice signals and the end of its time


class Summary(NamedTuple):
    """What a coordinator did. Validations are (step, figure, unit) or None."""
    first_step: int
    step: int               # completed steps of the run
    tokens: int             # evaluated in the completed steps of this session
    seconds: float          # from the first chunk handed out to the last completed step
    first_validation: object
    last_validation: object
    directory: object       # where the run lies, or None


class Connection:
    """A peer, as the coordinator sees it."""

    def __init__(self, sock, address):
        self.sock = sock
        self.host, self.name = address[0], f"{address[0]}:{address[1]}"
        self.inbox, self.outbox = bytearray(), b""
        self.step = None               # updates it has applied, from its last request
        self.waiting = False           # it asked, and the answer is held
        self.held = {}                 # chunk -> when it was handed out
        self.heard = time.monotonic()
        self.half = None               # since when the beginning of a frame is here
        self.open = True


class Coordinator:
    """Serves workers until `finished`; drive it with `poll`. `run` is an egg_history.Run, `steps` the number of completed steps at
    which the run ends (None: never), `minutes` the same in time after the first chunk was handed out, `log_dir` where
    coordinator.log grows; peers=False: no lines about workers that come and go.

    Raises NetError where host and port cannot be served, EggError where the log cannot be written."""

    def __init__(self, cfg, run, host="0.0.0.0", port=0, steps=None, minutes=None, log_dir=".", console=None, peers=True):
        self.cfg, self.run, self.steps, self.minutes = cfg, run, steps, minutes
        self.console, self.peers = console or Console(), peers
        self.limits = frame_limits(cfg)
        del self.limits[JOB_RESPONSE]                             # nothing that a coordinator reads
        self.most_weights = egg_model.n_weights(cfg)
        self.selector = selectors.DefaultSelector()
        self.connections, self.refused, self.idle = set(), set(), deque()
        files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        self.most_connections = (files if files != resource.RLIM_INFINITY else 1 << 16) - 64
        self.first_step, self.started, self.completed = run.step, None, None
        self.validations, self.unsaid_validation, self.last_loss = [], None, None
        self.closing, self.wake, self.look_at = False, False, 0.0
        self.tx = self.rx = 0
        self.log = self._open_log(log_dir)
        self.listener = self._listen(host, port)
        self.address = self.listener.getsockname()[:2]
        self.selector.register(self.listener, selectors.EVENT_READ)
        self._new_step()

    @property
    def finished(self):
        return (self.steps is not None and self.run.step >= self.steps
                or self.minutes is not None and self.started is not None and time.monotonic() - self.started >= 60 * self.minutes)

    def poll(self, timeout=TICK):
        """Does what there is to do, waiting for it at most `timeout` seconds."""
        for key, mask in self.selector.select(timeout):
            if key.data is None:
                self._accept()
            elif mask & selectors.EVENT_WRITE:
                self._flush(key.data)
                self._take_frames(key.data)
            else:
                self._read(key.data)
            self._answer_waiting()
        now = time.monotonic()
        if now >= self.look_at:
            self.look_at = now + LOOK_EVERY
            self._look_for_silence(now)
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
            self._drop(connection)
        self.listener.close()
        self.selector.close()
        self.log.close()

    def summary(self):
        done = self.run.step - self.first_step
        seconds = self.completed - self.started if done else 0.0
        first, last = (self.validations[0], self.validations[-1]) if self.validations else (None, None)
        tokens = done * self.cfg.POPULATION_SIZE * self.cfg.SEQ_LEN
        return Summary(self.first_step, self.run.step, tokens, seconds, first, last, self.run.directory)

    # connections

    def _listen(self, host, port):
        try:
            family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
            listener = socket.create_server(address, family=family, backlog=BACKLOG)
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise NetError(f"port {port} is in use: stop the coordinator that is there, or choose another with --port") from None
            raise NetError(f"cannot listen on {host} port {port}: {_reason(error)}: choose others with --host and --port") from None
        listener.setblocking(False)
        return listener

    def _accept(self):
        with contextlib.suppress(OSError):           # the peer may have gone again, or file descriptors may be used up
            sock, address = self.listener.accept()
            if len(self.connections) >= self.most_connections:
                sock.close()
                return
            sock.setblocking(False)
            tune(sock)
            connection = Connection(sock, address)
            self.connections.add(connection)
            self.selector.register(sock, selectors.EVENT_READ, connection)

    def _drop(self, connection):
        """Closes a connection; what it held goes back to the queue."""
        if not connection.open:
            return
        connection.open = False
        self.connections.discard(connection)
        self.selector.unregister(connection.sock)
        connection.sock.close()
        if self.peers and connection.step is not None and not self.closing:
            held = f", its {_chunks(connection.held)} handed out again" if connection.held else ""
            self.console.line(f"worker {connection.name} left{held}")
        self._give_back(connection, list(connection.held))

    def _refuse(self, connection, reason):
        # once for a host and a reason: a peer that tries again and again must not fill the log
        if (connection.host, reason) not in self.refused and len(self.refused) < 1000:
            self.refused.add((connection.host, reason))
            self.console.line(f"refused {connection.name}: {reason}")
        self._drop(connection)

    def _read(self, connection):
        if not connection.open:
            return
        try:
            data = connection.sock.recv(1 << 16)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._drop(connection)
            return
        self.rx += len(data)
        connection.heard = time.monotonic()
        connection.inbox += data
        self._take_frames(connection)

    def _take_frames(self, connection):
        """Frames are taken only while nothing waits to be sent: a peer that does not read its answers cannot pile them up."""
        try:
            while connection.open and not connection.outbox and (got := next_frame(connection.inbox, self.limits)):
                connection.half = None
                self._handle(connection, *got)
        except FrameError as error:
            self._refuse(connection, str(error))
        connection.half = (connection.half or time.monotonic()) if connection.inbox else None

    def _send(self, connection, data):
        self.tx += len(data)
        connection.outbox += data
        self._flush(connection)

    def _flush(self, connection):
        if not connection.open:
            return
        try:
            connection.outbox = connection.outbox[connection.sock.send(connection.outbox):]
        except BlockingIOError:
            pass
        except OSError:
            self._drop(connection)
            return
        wanted = selectors.EVENT_WRITE if connection.outbox else selectors.EVENT_READ
        if self.selector.get_key(connection.sock).events != wanted:
            self.selector.modify(connection.sock, wanted, connection)

    def _look_for_silence(self, now):
        limit = self.cfg.STRAGGLER_TIMEOUT
        for connection in list(self.connections):
            late = [c for c, since in connection.held.items() if now - max(since, connection.heard) > limit]
            if late:
                self.console.line(f"worker {connection.name} silent for {limit:g} s, its {_chunks(late)} handed out again")
                self._give_back(connection, late)
            if connection.half and now - connection.half > HALF_FRAME_TIMEOUT:
                self._refuse(connection, "stopped in the middle of a frame")

    # work

    def _new_step(self):
        self.fitness = np.zeros(self.cfg.N_PAIRS, np.int8)
        self.queue, self.done = deque(range(self.cfg.N_CHUNKS)), set()
        self.sum_loss, self.updates = 0, []
        self.holders = {}                            # chunk -> the connection that has it
        self.step_started, self.step_tx, self.step_rx = time.monotonic(), self.tx, self.rx

    def _handle(self, connection, opcode, payload):
        if opcode == JOB_REQUEST:
            self._request(connection, *REQUEST.unpack(payload)[:2])
        elif opcode == RESULT:
            self._result(connection, payload)
        elif opcode == VALIDATION:
            self._validation(*VALIDATED.unpack(payload))
        elif opcode == LOG_MESSAGE:
            text = printable(payload.decode("utf-8", "replace"))
            self.console.line(f"worker {connection.name}:\n{text}" if self.peers else text)

    def _request(self, connection, _, step):
        if connection.step is None and self.peers:
            known = sum(c.step is not None for c in self.connections) + 1
            self.console.line(f"worker {connection.name} joined at step {step} ({known} connected)")
        connection.step = step
        if not connection.waiting:
            self._answer(connection)

    def _answer(self, connection):
        """Serves a request: what the worker lacks, a chunk, or later."""
        run, step = self.run, connection.step
        if step < run.step:
            packed = run.fitness(step)
            self._send(connection, frame(JOB_RESPONSE, RESPONSE.pack(run.seed, step + 1, 0, len(packed)), packed))
        elif step > run.step:
            # our worker takes this as the sign to rebuild; others wait until the run has come as far
            self._send(connection, frame(JOB_RESPONSE, RESPONSE.pack(run.seed, run.step, NOTHING, 0)))
        elif (chunk := self._next_chunk(connection)) is not None:
            now = time.monotonic()
            if self.started is None:
                self.started = self.step_started = now
            connection.held[chunk], self.holders[chunk] = now, connection
            self._send(connection, frame(JOB_RESPONSE, RESPONSE.pack(run.seed, run.step, chunk * self.cfg.CHUNK_SIZE, 0)))
        else:
            connection.waiting = True
            self.idle.append(connection)

    def _next_chunk(self, connection):
        if self.closing or self.finished or len(connection.held) >= AT_ONCE:
            return None
        while self.queue:
            chunk = self.queue.popleft()
            if chunk not in self.done:
                return chunk
        return None

    def _answer_waiting(self):
        """First come, first served, over all requests that are held, where something has happened for them."""
        if not self.wake:
            return
        self.wake = False
        for _ in range(len(self.idle)):
            connection = self.idle.popleft()
            connection.waiting = False
            if connection.open:
                self._answer(connection)

    def _give_back(self, connection, chunks):
        for chunk in chunks:
            del connection.held[chunk], self.holders[chunk]
            self.queue.appendleft(chunk)
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
            fitness = egg_model.unpack_ternary(packed, cfg.CHUNK_SIZE // 2)
        except ValueError as error:
            raise FrameError(f"wrong fitness: {error}") from None
        if abs(sum_loss) > (1 << 62) // cfg.N_CHUNKS or updates > self.most_weights:
            raise FrameError(f"wrong figures: sum of losses {sum_loss}, {updates} weights changed of {self.most_weights}")
        if chunk in self.holders:
            del self.holders.pop(chunk).held[chunk]
        if updates:
            self.updates.append(updates)
        if chunk not in self.done:
            if self.started is None:
                self.started = self.step_started
            self.done.add(chunk)
            pairs = cfg.CHUNK_SIZE // 2
            self.fitness[chunk * pairs:(chunk + 1) * pairs] = fitness
            self.sum_loss += sum_loss
            if len(self.done) == cfg.N_CHUNKS:
                self._complete_step()
            else:
                self.console.progress(f"step {self.run.step}: {len(self.done)}/{cfg.N_CHUNKS} chunks")
        self.wake = self.wake or connection.waiting

    def _complete_step(self):
        step, updates = self.run.step, max(self.updates, default=0)
        self.run.append(egg_model.pack_ternary(self.fitness), self.sum_loss, updates)
        report = self._report(step, updates)
        self._new_step()
        self.wake = True
        self._answer_waiting()                       # before anything is written: workers come first
        self.console.line(report)

    def _validation(self, step, tokens, n_bytes, nats):
        if not tokens or not math.isfinite(nats) or nats < 0:
            raise FrameError(f"wrong validation: {nats} nats over {tokens} tokens")
        if not self.run.step - 1 <= step <= self.run.step or any(v[0] == step for v in self.validations):
            return
        self.validations.append((step, nats / math.log(2) / (n_bytes or tokens), "bits/byte" if n_bytes else "bits/token"))
        self.unsaid_validation = self.validations[-1]

    # what people see

    def _report(self, step, updates):
        """The line of a completed step; its figures also go into coordinator.log."""
        cfg, console = self.cfg, self.console
        now = self.completed = time.monotonic()
        seconds = max(now - self.step_started, 1e-9)
        tokens, rate = cfg.POPULATION_SIZE * cfg.SEQ_LEN, cfg.learning_rate(step)
        loss = self.sum_loss / (cfg.POPULATION_SIZE * cfg.SEQ_LEN * 16 * cfg.LOSS_SCALE)
        better, self.last_loss = self.last_loss is None or loss <= self.last_loss, loss
        tx, rx = self.tx - self.step_tx, self.rx - self.step_rx
        with contextlib.suppress(OSError):           # a convenience: a full disk stops the run where the history is written
            self.log.write(f"{step},{now - self.started:.3f},{loss:.6f},{updates},{rate:g}\n")
            self.log.flush()
        if len(set(self.updates)) > 1:
            console.line(f"step {step}: workers report different numbers of changed weights, {sorted(set(self.updates))}: "
                         "a replica has drifted; restart the workers")
        shown = console.colour(f"{loss:.4f}", "green" if better else "red")
        # tokens: those behind the model whose loss this is
        line = (f"Step {step} | Tokens: {count_text(step * tokens)} | Loss: {shown} | "
                f"Time: {1e3 * seconds:.2f} ms | Updates: {updates} (n={len(self.updates)}, max={updates}) | "
                f"Speed: {console.colour(f'{tokens / seconds:.2f}', 'blue')} tok/s | LR: {rate:g} | "
                f"Net: {(tx + rx) / seconds / (1 << 20):.2f} MB/s (Tx: {_bytes(tx)}, Rx: {_bytes(rx)})")
        if self.unsaid_validation:
            when, figure, unit = self.unsaid_validation
            line += f" | Val: {console.colour(f'{figure:.2f}', 'blue')} {unit}" + (f" (step {when})" if when != step else "")
            self.unsaid_validation = None
        return line

    def _open_log(self, directory):
        path = os.path.join(directory, "coordinator.log")
        try:
            log = open(path, "a", encoding="utf-8")
            log.write(f"# egg, {datetime.datetime.now().astimezone().isoformat(timespec='seconds')}, from step {self.run.step}\n"
                      + "".join(f"# {name} = {value}\n" for name, value in self.cfg.constants().items())
                      + "Step,RelTime,Loss,Updates,LR\n")
            log.flush()
        except OSError as error:
            raise EggError(f"{path}: {error.strerror}: start where files can be written, or give such a --save-dir") from None
        return log


def run_coordinator(cfg, host="0.0.0.0", port=None, save_dir=None, load_dir=None, steps=None, minutes=None, console=None):
    """Serves a run until it has `steps` completed steps, `minutes` have passed since the first chunk, or SIGINT or SIGTERM.

    port: default cfg.PORT. Returns a Summary. Raises HistoryError and NetError; the completed steps are kept whatever happens."""
    console = console or Console()
    run = egg_history.open_run(cfg, save_dir, load_dir)
    try:
        for line in run.said:
            console.line(line)
        coordinator = Coordinator(cfg, run, host, cfg.PORT if port is None else port, steps, minutes, run.directory or ".", console)
        try:
            where = f"kept in {run.directory}" if run.directory else "not kept (--save-dir keeps the run)"
            console.line("coordinator on {}:{}, step {}, {}".format(*coordinator.address, run.step, where))
            with stop_signals() as stopped:
                while not coordinator.finished and not stopped:
                    coordinator.poll()
            coordinator.drain(0 if stopped else 5)
        finally:
            coordinator.close()
        console.line(farewell(run))
        return coordinator.summary()
    finally:
        run.close()


def farewell(run):
    """Where the run lies and how to go on."""
    if run.directory is None:
        return f"stopped after {run.step} steps; they are not kept (--save-dir keeps them)"
    return f"stopped after {run.step} steps; the run lies in {run.directory}: continue it with --load-dir {run.directory}"


def _reason(error):
    """What the system says about an OSError (Python adds addresses to some)."""
    return os.strerror(error.errno) if error.errno and error.errno > 0 else error.strerror or str(error)


def _chunks(chunks):
    return f"chunk {', '.join(str(c) for c in sorted(chunks))} is"


def count_text(n):
    """Tokens, in millions or billions."""
    return f"{n / 1e9:.2f} B" if n >= 1e9 else f"{n / 1e6:.2f} M"


def _bytes(n):
    return f"{n} B" if n < 1 << 10 else f"{n / (1 << 10):.2f} KB" if n < 1 << 20 else f"{n / (1 << 20):.2f} MB"


# --- worker ---------------------------------------------------------------------------------------------------------------

SLICE_SECONDS = 0.2        # how long a worker computes at most without looking at its socket, roughly
FIRST_SLICE = 64           # members, before its speed is known
CONNECT_TIMEOUT = 10.0     # seconds
BACK_OFF = (0.1, 5.0)      # seconds between attempts to connect: the first, the longest
POLL_SECONDS = 0.1         # a C++ coordinator with nothing to hand out is asked again so often


class Link:
    """A worker's connection. Every method raises OSError when the coordinator is gone, NetError when it is no coordinator of ours."""

    def __init__(self, cfg, host, port):
        self.name, self.limits, self.inbox = f"{host}:{port}", frame_limits(cfg), bytearray()
        self.sock = socket.create_connection((host, port), timeout=CONNECT_TIMEOUT)
        self.sock.settimeout(None)
        tune(self.sock)

    def send(self, data):
        self.sock.sendall(data)

    def response(self):
        """(seed, step, first member, packed fitness) of the next JOB_RESPONSE; other frames are passed over."""
        while True:
            try:
                while got := next_frame(self.inbox, self.limits):
                    if got[0] == JOB_RESPONSE:
                        seed, step, position, size = RESPONSE.unpack_from(got[1])
                        if size != len(got[1]) - RESPONSE.size:
                            raise FrameError(f"wrong length: JOB_RESPONSE says {size} bytes of fitness and carries "
                                             f"{len(got[1]) - RESPONSE.size}")
                        return seed, step, position, got[1][RESPONSE.size:]
            except FrameError as error:
                raise NetError(f"{self.name}: {error}") from None
            self._receive()

    def check(self, seconds=0.0):
        """Looks whether the coordinator is still there, for so long."""
        if select.select([self.sock], [], [], seconds)[0]:
            self._receive()

    def _receive(self):
        data = self.sock.recv(1 << 16)
        if not data:
            raise ConnectionResetError
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

    def serve(self, link, heard):
        """Asks for work and does it until the coordinator is gone (OSError). `heard` is called with every answer."""
        engine = self.engine
        while True:
            link.send(frame(JOB_REQUEST, REQUEST.pack(engine.seed, engine.step, 0)))
            seed, step, position, packed = link.response()
            heard()
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
            fitness = egg_model.unpack_ternary(packed, self.cfg.N_PAIRS)
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
        self.engine.load(egg_model.initial_state(self.cfg))
        self.changed, self.told_step = 0, -1

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
        packed = egg_model.pack_ternary(egg_model.chunk_fitness(losses, self.cfg))
        head = RESULT_HEAD.pack(self.engine.seed, self.engine.step, first, self.changed, int(losses.sum()), len(packed))
        link.send(frame(RESULT, head, packed))
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
        if self.validation is not None and (self.validate_next or cfg.VALIDATE_EVERY and step % cfg.VALIDATE_EVERY == 0):
            self.validate_next = False
            nats, tokens = self.engine.validate(self.validation.windows)
            n_bytes = self.validation.n_bytes if self.validation.unit == "bits/byte" else 0
            link.send(frame(VALIDATION, VALIDATED.pack(step, tokens, n_bytes, nats)))
        if self.tokens is not None and cfg.SAMPLE_EVERY and step % cfg.SAMPLE_EVERY == 0:
            text = sample(cfg, self.engine, self.tokens, self.decoding).replace("\n", "\u23ce")         # one line of the log
            link.send(frame(LOG_MESSAGE, f"sample at step {step}: {text}".encode()[:TEXT_LIMIT]))


def sample(cfg, engine, tokens, decoding):
    """str: a piece of the data and how the model goes on from there (SPEC 10)."""
    at = engine.step * cfg.SEQ_LEN % (len(tokens) - cfg.SEQ_LEN)
    prompt = np.asarray(tokens[at:at + cfg.SAMPLE_PROMPT]).astype(np.int64)
    more = list(engine.generate(prompt, cfg.SAMPLE_TOKENS, engine.seed))
    return f"{egg_data.text(decoding, prompt)} >>> {egg_data.text(decoding, more)}"


WHICH_HOST = "give the name or address of the coordinator's machine"


def check_address(host, port):
    """Raises NetError where `host` is no name or address."""
    try:
        socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        reason = _reason(error) if isinstance(error, OSError) else "this is no name"
        raise NetError(f"{host} cannot be reached: {reason}: {WHICH_HOST}") from None


def run_worker(cfg, host, port, engine, tokens=None, validation=None, decoding=None, *, retry=True, validate_first=False,
               console=None):
    """Serves the coordinator at host:port with `engine`, through interruptions, for ever; with retry=False until the coordinator
    closes, and returns the number of chunks done. The engine keeps the state it has come to.

    tokens: the training data, for samples; validation: an egg_data.Validation or None; decoding: an egg_data.Decoding or None;
    validate_first: with the first chunk 0, whatever the step. Raises NetError where no coordinator can be, or one that does not fit."""
    console = console or Console()
    check_address(host, port)
    worker = Worker(cfg, engine, tokens, validation, decoding, validate_first, console)
    pause, known = BACK_OFF[0], False
    say_there = say_gone = True              # attempts that bring no answer are told once

    def heard():
        nonlocal pause, say_there, say_gone
        pause, say_there, say_gone = BACK_OFF[0], True, True

    while True:
        link = None
        try:
            link = Link(cfg, host, port)
            if say_there:
                say_there, say_gone = False, True
                console.line(f"worker: {engine.name}, connected to {host}:{port}")
            known = True
            worker.serve(link, heard)
        except OSError as error:
            if not known and not isinstance(error, (ConnectionError, TimeoutError)):
                raise NetError(f"{host} cannot be reached: {_reason(error)}: {WHICH_HOST}") from None
            if not retry and known:
                return worker.chunks
            if not retry:
                raise NetError(f"no coordinator at {host}:{port}: {_reason(error)}") from None
            if say_gone:
                what = "the coordinator is gone" if known else f"no coordinator at {host}:{port} yet"
                console.line(f"worker: {what}, trying again")
            say_gone = False
        finally:
            if link is not None:
                link.close()
        time.sleep(pause * random.uniform(0.5, 1.0))
        pause = min(2 * pause, BACK_OFF[1])
