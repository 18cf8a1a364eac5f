"""Coordinators in a thread or a process, peers that speak frame by frame, workers in threads."""

import queue
import random
import re
import socket
import subprocess
import sys
from contextlib import closing, contextmanager, suppress
from threading import Thread
from time import monotonic, sleep

import numpy as np
import pytest

import egg_config
import egg_net
from cluster import auth, event_log, snapshots, status, wire
from cluster.history import open_run, read_run, replay
from cluster.wire import JOB_REQUEST, RESULT, V2
from fakes import CFG, FakeEngine, GOOD, GOOD_STEP, Lines, any_fitness, begin_together, card
from recordings import HERE


class Coordinator(egg_net.Coordinator):
    """A coordinator on this machine with events of its own. probation: chunks of a newcomer that are checked."""

    def __init__(self, cfg, run, port=0, *, console, probation=0, **options):
        self.own = event_log.Events(cfg, run, console)
        try:
            super().__init__(cfg, run, "127.0.0.1", port, console=console, events=self.own, **options)
            self.dispatcher.probation = probation
        except BaseException:
            self.own.close()
            raise

    def close(self):
        super().close()
        self.own.close()


class Server:
    """A coordinator that runs in a thread until it is finished (with `stay`: and still then) or the block is left.
    What it has not itself is that of the Coordinator."""

    def __init__(self, directory, cfg=CFG, port=0, save=False, drain=5, stay=False, mend=None, **options):
        self.lines, self.drain, self.stay = Lines(), drain, stay
        self.run = open_run(cfg, directory if save else None, mend=mend)
        console = egg_net.Console(self.lines, verbose=True)
        self.coordinator = Coordinator(cfg, self.run, port, console=console, **options)
        self.port, self.stopping, self.failure = self.coordinator.address[1], False, None
        self.calls = queue.SimpleQueue()
        self.thread = Thread(target=self._serve)

    def _serve(self):
        try:
            while not self.stopping and (self.stay or not self.coordinator.finished):
                self.coordinator.poll(0.02)
                while not self.calls.empty():
                    self.calls.get()()
            self.coordinator.drain(self.drain if self.coordinator.finished else 0)
        except Exception as error:
            self.failure = error
        self.coordinator.close()

    def __enter__(self):
        self.thread.start()
        return self

    def __exit__(self, kind, *_):
        self.stopping = kind is not None or self.stopping or self.stay or self.coordinator.steps is None
        self.thread.join(60)
        self.run.close()
        assert kind or not self.failure, self.failure

    def __getattr__(self, name):
        return getattr(vars(self)["coordinator"], name)

    @property
    def said(self):
        """What it has printed."""
        return self.lines.text

    @property
    def serves(self):
        return not self.failure and self.thread.is_alive()

    def worker(self, name=""):
        """The worker of this name, or any."""
        return next(worker for worker in self.dispatcher.workers if name in worker.author.name)

    def author(self, name=""):
        return self.worker(name).author

    def connect(self, **options):
        return socket.create_connection(("127.0.0.1", self.port), **options)

    def says(self, words):
        until(lambda: words in self.said)

    def reaches(self, step):
        until(lambda: self.run.step >= step)

    def has_workers(self, count):
        until(lambda: len(self.dispatcher.workers) == count)

    def work(self, engine, **options):
        return work_in_thread(self.port, engine, self.cfg, **options)

    def stop(self):
        self.stopping = True
        self.thread.join(60)

    def fetched(self):
        """Its status, as a client fetches it."""
        return status.fetch_status(self.cfg, "127.0.0.1", self.port)

    def status(self):
        """What the coordinator states about itself, read in its own thread: nothing changes meanwhile."""
        answers = queue.SimpleQueue()
        self.calls.put(lambda: answers.put(self.coordinator.status()))
        return answers.get(timeout=60)


def place(at, cfg):
    """(configuration, host, port) for a worker of a Server, or of a coordinator at a port."""
    return cfg or getattr(at, "cfg", CFG), "127.0.0.1", getattr(at, "port", at)


class Peer:
    """A worker spoken byte by byte."""

    def __init__(self, at, cfg=None):
        self.cfg, *_ = place(at, cfg)
        self.link = egg_net.Link(*place(at, cfg))

    def ask(self, step):
        self.send(JOB_REQUEST, 0, step, 0)

    def answer(self, timeout=60):
        """The fields of a JOB_RESPONSE."""
        return self.link.unpack_response(self.link.next(wire.JOB_RESPONSE, timeout))

    def chunk(self, step):
        self.ask(step)
        answer = self.answer()
        assert (answer.step, answer.packed) == (step, b"")
        return answer.first

    def result(self, step, position, packed=GOOD, updates=0, loss=5):
        self.send(RESULT, 0, step, position, updates, loss, len(packed), packed)

    def send(self, *frame):
        self.link.send(self.link.frame(*frame))

    def close(self):
        self.link.close()

    def works(self, step, chunks=1, **result):
        """Evaluates chunks of a step, one after the other."""
        for _ in range(chunks):
            self.result(step, self.chunk(step), **result)

    def delivers(self, step, *packed):
        """The result of the chunk that it is handed."""
        self.result(step, self.answer().first, *packed)

    def silent(self, seconds=0.15):
        """Nothing comes, and the connection stays."""
        try:
            self.answer(seconds)
        except TimeoutError:
            return True
        return False

    def closed(self):
        self.link.sock.settimeout(60)
        try:
            return self.link.sock.recv(1) == b""
        except ConnectionResetError:
            return True


@contextmanager
def listening(serve):
    """The port of a listener on this machine, in whose thread serve(socket) has every connection in turn."""
    def accept():
        with suppress(OSError):
            while True:
                with listener.accept()[0] as sock:
                    serve(sock)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = Thread(target=accept, daemon=True)
        thread.start()
        yield listener.getsockname()[1]
        listener.shutdown(socket.SHUT_RDWR)
    thread.join(60)


def free_port():
    """A port of this machine that a server can come back to: connections take none below 32768 as their own end."""
    while True:
        port = random.randrange(10000, 32768)
        with suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port


def until(condition, seconds=120):
    """Waits for what comes at once on a quiet machine; the bound is for one that is not."""
    end = monotonic() + seconds
    while not condition():
        assert monotonic() < end, "waited in vain"
        sleep(0.005)


def run_worker(at, engine, cfg=None, retry=False, lines=None, **options):
    """Number of chunks of a worker in this thread; see `place`."""
    return egg_net.run_worker(*place(at, cfg), engine, retry=retry, console=egg_net.Console(lines or Lines()),
                              **options)


def work_in_thread(*arguments, retry=False, **options):
    def serve():
        with suppress(SystemExit):                    # see Dice
            run_worker(*arguments, retry=retry, **options)

    thread = Thread(target=serve, daemon=retry)
    thread.start()
    return thread


def result_frame(step=0, position=0, updates=0, loss=0, packed=GOOD, size=None):
    size = len(packed) if size is None else size
    return wire.frame(RESULT, 42, step, position, updates, loss, size, packed)


def filled(directory, steps=5, cfg=CFG):
    """[packed fitness] of a run that was written to `directory`."""
    rng = np.random.default_rng(steps)
    packed = [any_fitness(cfg, rng) for _ in range(steps)]
    with closing(open_run(cfg, directory)) as run:
        for k, fitness in enumerate(packed):
            run.append(fitness, -k * 1000, k)
    return packed


def whole(run):
    return [run.fitness(k) for k in range(run.start.step, run.step)]


def kept(directory, cfg=CFG):
    """[packed fitness] of the run in a directory."""
    with closing(read_run(cfg, directory)) as run:
        return whole(run)


def replayed(directory, engine):
    """An engine, brought to the end of the run in a directory."""
    with closing(read_run(engine.cfg, directory)) as run:
        replay(run, engine)
    return engine


def coordinator_process(directory, port=0, cfg=CFG, before=""):
    """A coordinator in a process of its own, which runs the program `before` first: (process, port)."""
    program = (f"{before}import sys, egg_net, egg_config\n"
               f"cfg = egg_config.make(**{cfg.constants()!r})\n"
               "try:\n"
               f"    egg_net.run_coordinator(cfg, '127.0.0.1', {port}, save_dir={str(directory)!r})\n"
               "except egg_config.EggError as error:\n"
               "    sys.exit(f'egg: {error}')\n")
    process = subprocess.Popen([sys.executable, "-c", program], cwd=HERE, stdout=subprocess.PIPE,
                               stderr=subprocess.PIPE, text=True)
    first = process.stdout.readline()
    return process, int(re.search(r":(\d+), step", first)[1]) if first else None


class Peer2(Peer):
    """A worker of protocol 2 spoken frame by frame."""

    def __init__(self, at, cfg=None, secret=b"", access=None, **values):
        self.cfg, *_ = place(at, cfg)
        self.link = egg_net.Link(*place(at, cfg), V2, access or auth.Access(secret), card(self.cfg, **values))

    def ask(self, step, digest=bytes(16)):
        self.send(JOB_REQUEST, 0, step, 0, digest.ljust(wire.DIGEST, b"\0"))

    def next(self, *opcodes, timeout=60):
        return self.link.any_of(opcodes, timeout)[1:]


def first_step(server, *peers):
    """Completes step 0; the engine of the next one."""
    engine = FakeEngine(server.cfg)
    for chunk in range(4):
        peer, position = peers[chunk % len(peers)], 32 * chunk
        peer.ask(0, engine.digest())
        assert peer.answer().first == position
        peer.result(0, position)
    server.reaches(1)
    engine.update(GOOD_STEP)
    return engine


def asks(peer, engine, *answers):
    """(opcode, payload) that a peer gets which states the state of an engine."""
    peer.ask(engine.step, engine.digest())
    return peer.next(*answers)


def upload(peer, state):
    """A peer sends its snapshot."""
    body = snapshots.pack(state)
    for at in range(0, len(body), wire.BLOCK):
        peer.send(wire.SNAPSHOT_DATA, state.step, len(body), at, body[at:at + wire.BLOCK])


def cluster(directory, engines, steps, cfg=CFG, caller=auth.Access(), **options):
    """Runs these engines, no more than a step has chunks, as workers w0, w1, ... of one coordinator; the server, after
    `steps` steps. caller: the auth.Access of the workers."""
    server, threads = Server(directory, cfg, steps=steps, **{"drain": 15, **options}), []
    begin_together(engines)

    def serve(engine, name):
        with suppress(egg_config.EggError):
            run_worker(server, engine, name=name, access=caller)

    for i, engine in enumerate(engines):
        threads.append(Thread(target=serve, args=(engine, f"w{i}")))
        threads[-1].start()
    with server:
        server.reaches(steps)
    [thread.join(60) for thread in threads]
    return server


@contextmanager
def refused(words, kind=egg_net.NetError):
    """The block ends with an error of one line, in which these words (a pattern) are."""
    with pytest.raises(kind, match=words) as caught:
        yield caught
    assert "\n" not in str(caught.value)


def turned_away(words, at, cfg=None, **values):
    """A peer of these values is not let in, and is told why."""
    with refused(words):
        Peer2(at, cfg, **values)


def named(server, *names):
    """A peer for each name."""
    return [Peer2(server, name=name) for name in names]
