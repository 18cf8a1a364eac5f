"""Load on a coordinator: simulated workers of protocol 2 on loopback."""

import heapq
import os
import random
import re
import resource
import select
import subprocess
import sys
import threading
import time

import numpy as np

import egg_config
from cluster import auth, wire
from cluster.link import Link
from cluster.wire import JOB_REQUEST, RESULT, V2
from model import fitness_digits

EGG = os.path.join(egg_config.ROOT, "egg.py")
CHUNKS = 8000


def measure(directory, workers, seconds, chunk_seconds):
    """dict of results/s, answer times, memory and CPU of a coordinator process; a worker takes chunk_seconds for a
    chunk. An answer time is that from sending a result and the next request to having the next chunk. Answers that are
    held back are not counted. Those just after the end of a step, when all workers ask at once, are counted apart."""
    constants = dict(HIDDEN_DIM=64, HEAD_DIM=32, N_LAYERS=1, SEQ_LEN=8, VOCAB_SIZE=256, CHUNK_SIZE=32, AUDIT_RATE=0.0,
                     POPULATION_SIZE=32 * CHUNKS, SNAPSHOT_EVERY=0)
    cfg = egg_config.make(**constants)
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (files, files))
    command = [sys.executable, EGG, "coordinator", "--port", "0", "--save-dir", str(directory)]
    command += [f"-D{name}={value}" for name, value in constants.items()]
    process = subprocess.Popen(command, cwd=directory, stdout=subprocess.PIPE, text=True)
    try:
        port = int(re.search(r":(\d+), step", process.stdout.readline())[1])
        threading.Thread(target=process.stdout.read, daemon=True).start()
        card = {"role": "worker", "device": "none", "config": cfg.agreed(), "data": ""}
        simulated = [SimulatedWorker(cfg, "127.0.0.1", port, V2, auth.Access(),
                                     {**card, "id": str(i), "name": f"w{i}"}) for i in range(workers)]
        before = cpu_seconds(process.pid)
        results, took, answered, after_step = _serve(cfg, simulated, seconds, chunk_seconds)
        used = cpu_seconds(process.pid) - before
        with open(f"/proc/{process.pid}/status") as file:
            memory = int(re.search(r"VmHWM:\s+(\d+)", file.read())[1]) / 1024
    finally:
        process.kill()
        process.wait()
    return {"workers": workers, "results/s": round(results / took),
            "median ms": _ms(answered, 0.5), "99% ms": _ms(answered, 0.99),
            "after a step 99% ms": _ms(after_step, 0.99), "MB": round(memory), "CPU %": round(100 * used / took),
            "CPU us a result": round(1e6 * used / max(results, 1), 1)}


class SimulatedWorker(Link):
    """A connection that waits for nothing."""

    asked = None               # when; the first requests are not counted: they all come at once
    after_step = False         # whether a step has just ended for it

    def ask(self, step, result=b""):
        frames = result + self.request(step)
        self.asked = time.perf_counter()
        self.sock.send(frames)

    def request(self, step):
        return self.frame(JOB_REQUEST, 0, step, 0, bytes(wire.DIGEST))


def _serve(cfg, simulated, seconds, chunk_seconds):
    """Lets the simulated workers work for this time. Returns (number of results, seconds, [seconds] of answers, the
    same of those just after the end of a step)."""
    dice = random.Random(1)
    pairs = cfg.CHUNK_SIZE // 2
    # ternary digits as often as in a run of the default configuration
    fitness = [fitness_digits.pack_ternary(np.array(dice.choices((-1, 0, 1), (46, 6, 48), k=pairs), np.int8))
               for _ in range(256)]
    poll = select.epoll()
    workers = {worker.sock.fileno(): worker for worker in simulated}
    for number, worker in workers.items():
        poll.register(number, select.EPOLLIN)
        worker.sock.setblocking(False)
        worker.sock.send(worker.request(0))
    answered, after_step = [], []
    given = {}                     # step -> first members of the chunks that were handed out
    due = []                       # heap of (time, number of the worker, step, its result)
    results = 0
    started = now = time.perf_counter()
    while now - started < seconds:
        while due and due[0][0] <= now:
            _, number, step, result = heapq.heappop(due)
            workers[number].ask(step, result)
        for number, _ in poll.poll(max(0.0, min(0.1, due[0][0] - now)) if due else 0.1):
            worker = workers[number]
            worker.inbox += worker.sock.recv(1 << 16)
            if not (got := wire.next_frame(worker.inbox, worker.limits)):
                continue
            response = wire.JOB_RESPONSE.unpack(got.payload)
            step, first = response.step, response.first
            now = time.perf_counter()
            if response.size:                               # the fitness of a step that has just been completed
                worker.after_step = True
                worker.ask(step)
                continue
            if worker.asked is not None and first not in given.setdefault(step, set()):
                (after_step if worker.after_step else answered).append(now - worker.asked)
                given[step].add(first)
            worker.after_step = False
            results += 1
            packed = fitness[first // cfg.CHUNK_SIZE % 256]
            result = worker.frame(RESULT, 0, step, first, 0, 5, len(packed), packed)
            heapq.heappush(due, (now + chunk_seconds * dice.uniform(0.5, 1.5), number, step, result))
        now = time.perf_counter()
    return results, now - started, answered, after_step


def cpu_seconds(pid):
    with open(f"/proc/{pid}/stat") as file:
        return sum(map(int, file.read().split()[13:15])) / os.sysconf("SC_CLK_TCK")


def _ms(times, part):
    return round(1e3 * sorted(times)[int(len(times) * part)], 2) if times else None
