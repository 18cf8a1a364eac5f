"""Coordinators in a thread or a process, peers that speak frame by frame, workers in threads."""

import contextlib
import queue
import random
import re
import socket
import subprocess
import sys
import threading
import time
from unittest import mock

import numpy as np
import pytest

import egg_config
import egg_net
from cluster import admission, auth, event_log, history, wire
from cluster.wire import JOB_REQUEST, RESULT, V2
from model import fitness_digits
from fakes import CFG, GOOD, Lines, any_fitness, begin_together, card
from recordings import HERE


class Coordinator(egg_net.Coordinator):
    """A coordinator on this machine with events of its own."""

    def __init__(self, cfg, run, port=0, *, log_dir, console, **options):
        self.own = event_log.Events(cfg, run, log_dir, console)
        try:
            super().__init__(cfg, run, "127.0.0.1", port, console=console, events=self.own, **options)
        except BaseException:
            self.own.close()
            raise

    def close(self):
        super().close()
        self.own.close()


class Server:
    """A coordinator that runs in a thread until it is finished (with `stay`: and still then) or the block is left."""

    def __init__(self, directory, cfg=CFG, port=0, save=False, drain=5, stay=False, **options):
        self.lines, self.drain, self.stay = Lines(), drain, stay
        self.run = history.open_run(cfg, directory if save else None)
        console = egg_net.Console(self.lines)
        self.coordinator = Coordinator(cfg, self.run, port, log_dir=directory, console=console, **options)
        self.port, self.stopping, self.failure = self.coordinator.address[1], False, None
        self.calls = queue.SimpleQueue()
        self.thread = threading.Thread(target=self._serve)

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
        self.thread.join(20)
        self.run.close()
        assert kind or not self.failure, self.failure

    def stop(self):
        self.stopping = True
        self.thread.join(10)

    def status(self):
        """What the coordinator states about itself, read in its own thread: nothing changes meanwhile."""
        answers = queue.SimpleQueue()
        self.calls.put(lambda: answers.put(self.coordinator.status()))
        return answers.get(timeout=60)


class Peer:
    """A worker spoken byte by byte."""

    def __init__(self, port, cfg=CFG):
        self.cfg, self.link = cfg, egg_net.Link(cfg, "127.0.0.1", port)

    def ask(self, step):
        self.link.send(self.link.frame(JOB_REQUEST, 0, step, 0))

    def answer(self, timeout=5):
        """The fields of a JOB_RESPONSE."""
        return self.link.unpack_response(self.link.next(wire.JOB_RESPONSE, timeout))

    def chunk(self, step):
        self.ask(step)
        answer = self.answer()
        assert (answer.step, answer.packed) == (step, b"")
        return answer.first

    def result(self, step, position, packed=None, updates=0, loss=5, size=None):
        packed = fitness_digits.pack_ternary(np.ones(self.cfg.CHUNK_SIZE // 2, np.int8)) if packed is None else packed
        size = len(packed) if size is None else size
        self.link.send(self.link.frame(RESULT, 0, step, position, updates, loss, size, packed))

    def silent(self, seconds=0.15):
        """Nothing comes, and the connection stays."""
        try:
            self.answer(seconds)
        except TimeoutError:
            return True
        return False

    def closed(self):
        self.link.sock.settimeout(5)
        try:
            return self.link.sock.recv(1) == b""
        except ConnectionResetError:
            return True


def free_port():
    """A port of this machine that a server can come back to: connections take none below 32768 as their own end."""
    while True:
        port = random.randrange(10000, 32768)
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port


def until(condition, seconds=60):
    """Waits for what comes at once on a quiet machine; the bound is for one that is not."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.005)


def work_in_thread(port, engine, cfg=CFG, retry=False, lines=None, **options):
    def serve():
        with contextlib.suppress(SystemExit):                    # see Dice
            egg_net.run_worker(cfg, "127.0.0.1", port, engine, retry=retry, console=egg_net.Console(lines or Lines()),
                               **options)

    thread = threading.Thread(target=serve, daemon=retry)
    thread.start()
    return thread


def result_frame(step=0, position=0, updates=0, loss=0, packed=GOOD, size=None):
    size = len(packed) if size is None else size
    return wire.frame(RESULT, 42, step, position, updates, loss, size, packed)


def filled(directory, steps=5, cfg=CFG):
    """[packed fitness] of a run that was written to `directory`."""
    rng, packed = np.random.default_rng(steps), []
    run = history.open_run(cfg, directory)
    for k in range(steps):
        packed.append(fitness_digits.pack_ternary(any_fitness(cfg, rng)))
        run.append(packed[-1], -k * 1000, k)
    run.close()
    return packed


def whole(run):
    return [run.fitness(k) for k in range(run.start.step, run.step)]


def coordinator_process(directory, port=0, cfg=CFG):
    """A coordinator in a process of its own: (process, port)."""
    constants = cfg.constants()
    program = ("import sys, egg_net, egg_config\n"
               f"cfg = egg_config.make(**{constants!r})\n"
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

    def __init__(self, port, cfg=CFG, secret=b"", **values):
        self.cfg = cfg
        self.link = egg_net.Link(cfg, "127.0.0.1", port, V2, auth.Access(secret), card(cfg, **values))

    def ask(self, step, digest=bytes(16)):
        self.link.send(self.link.frame(JOB_REQUEST, 0, step, 0, digest.ljust(wire.DIGEST, b"\0")))

    def next(self, *opcodes, timeout=5):
        return self.link.any_of(opcodes, timeout)[1:]

    def result(self, step, position, packed=GOOD, loss=5):
        self.link.send(self.link.frame(RESULT, 0, step, position, 0, loss, len(packed), packed))


def cluster(directory, engines, steps, cfg=CFG, names=None, **options):
    """Runs these engines, no more than a step has chunks, as workers of one coordinator; the server, after `steps`
    steps."""
    server = Server(directory, cfg, steps=steps, drain=15, **options)
    threads, said = [], [Lines() for _ in engines]
    begin_together(engines)

    def serve(engine, name, lines):
        with contextlib.suppress(egg_config.EggError):
            egg_net.run_worker(cfg, "127.0.0.1", server.port, engine, retry=False, name=name,
                               console=egg_net.Console(lines))

    for i, engine in enumerate(engines):
        threads.append(threading.Thread(target=serve, args=(engine, names[i] if names else f"w{i}", said[i])))
        threads[-1].start()
    with server:
        until(lambda: server.run.step == steps)
    [thread.join(10) for thread in threads]
    return server


def refused_by(call, words):
    with pytest.raises(egg_net.NetError, match=words) as caught:
        call()
    assert "\n" not in str(caught.value)


def caller(host, port, cfg=CFG, kind=Peer2, **values):
    """A peer whose connection comes from another address of this machine."""
    plain = socket.create_connection
    with mock.patch("socket.create_connection", lambda address, timeout=None: plain(address, timeout, (host, 0))):
        return kind(port, cfg, **values)


class Holder:
    def __init__(self, host, name):
        self.author = admission.Author(host, name, name)


def fast(rounds):
    """[(chunks a second, chunks a second of processor time)]: a wait of 50 ms in every chunk would show in the first,
    which depends on what else the machine does."""
    clock, processor = map(max, zip(*rounds))
    return clock > 20 and processor > 50
