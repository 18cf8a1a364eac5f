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
from model import fitness_digits, ternary

EGG = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "egg.py")
CHUNKS = 8000


def measure(directory, workers=1000, seconds=20.0, chunk_seconds=0.2):
    """dict of results/s, answer times, memory and CPU of a coordinator process; a worker takes chunk_seconds for a
    chunk. An answer time is that from sending a result and the next request to having the next chunk. Answers that are
    held back are not counted. Those just after the end of a step, when all workers ask at once, are counted apart."""
    constants = dict(HIDDEN_DIM=64, HEAD_DIM=32, N_LAYERS=1, SEQ_LEN=8, VOCAB_SIZE=256, CHUNK_SIZE=32, AUDIT_RATE=0.0,
                     POPULATION_SIZE=32 * CHUNKS, SNAPSHOT_EVERY=0, CONNECTIONS_PER_ADDRESS=2 * workers)
    cfg = egg_config.make(**constants)
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (files, files))
    command = [sys.executable, EGG, "coordinator", "--port", "0", "--save-dir", str(directory)]
    command += [f"-D{name}={value}" for name, value in constants.items()]
    process = subprocess.Popen(command, cwd=directory, stdout=subprocess.PIPE, text=True)
    try:
        port = int(re.search(r":(\d+), step", process.stdout.readline())[1])
        threading.Thread(target=process.stdout.read, daemon=True).start()
        card = {"role": "worker", "device": "none", "config": cfg.saved(), "data": ""}
        links = [Link(cfg, "127.0.0.1", port, V2, auth.Access(), {**card, "id": str(i), "name": f"w{i}"})
                 for i in range(workers)]
        before = _cpu_seconds(process.pid)
        done, took, times, rush = _serve(cfg, links, seconds, chunk_seconds)
        used = _cpu_seconds(process.pid) - before
        with open(f"/proc/{process.pid}/status") as file:
            memory = int(re.search(r"VmHWM:\s+(\d+)", file.read())[1]) / 1024
    finally:
        process.kill()
        process.wait()
    return {"workers": workers, "results/s": round(done / took), "median ms": _ms(times, 0.5),
            "99% ms": _ms(times, 0.99), "after a step 99% ms": _ms(rush, 0.99), "MB": round(memory),
            "CPU %": round(100 * used / took), "CPU us a result": round(1e6 * used / max(done, 1), 1)}


def _serve(cfg, links, seconds, chunk_seconds):
    """(results, seconds, [answer time], [the same just after a step])."""
    poll, times, rush, due, done = select.epoll(), [], [], [], 0
    dice, asked, after_step, given = random.Random(1), {}, {}, {}
    limits, digits = wire.limits(cfg), ternary.packed_size(cfg.CHUNK_SIZE // 2)
    # ternary digits as often as in a run of the default configuration
    some = [fitness_digits.pack_ternary(np.array(dice.choices((-1, 0, 1), (46, 6, 48), k=cfg.CHUNK_SIZE // 2), np.int8))
            for _ in range(256)]

    def request(step):
        return wire.frame(JOB_REQUEST, 0, step, 0, bytes(wire.DIGEST), version=V2)

    sockets = {link.sock.fileno(): (link.sock, bytearray()) for link in links}
    for sock, _ in sockets.values():
        sock.setblocking(False)
        poll.register(sock, select.EPOLLIN)
        sock.send(request(0))
    started = now = time.perf_counter()
    while now - started < seconds:
        while due and due[0][0] <= now:
            _, number, out = heapq.heappop(due)
            asked[number] = time.perf_counter()
            sockets[number][0].send(out)
        for number, _ in poll.poll(max(0.0, min(0.1, due[0][0] - now)) if due else 0.1):
            sock, inbox = sockets[number]
            inbox += sock.recv(1 << 16)
            if not (got := wire.next_frame(inbox, limits)):
                continue
            (_, step, position, size, _), now = wire.JOB_RESPONSE.unpack(got[2]), time.perf_counter()
            if size:                                 # the fitness of a step that has just been completed
                after_step[number], asked[number] = True, now
                sock.send(request(step))
                continue
            # the first requests are not counted: they all come at once
            if number in asked and position not in given.setdefault(step, set()):
                (rush if after_step.get(number) else times).append(now - asked[number])
                given[step].add(position)
            after_step[number], done = False, done + 1
            fields = 0, step, position, 0, 5, digits, some[position // cfg.CHUNK_SIZE % 256]
            out = wire.frame(RESULT, *fields, version=V2) + request(step)
            heapq.heappush(due, (now + chunk_seconds * dice.uniform(0.5, 1.5), number, out))
        now = time.perf_counter()
    return done, now - started, times, rush


def _cpu_seconds(pid):
    with open(f"/proc/{pid}/stat") as file:
        return sum(map(int, file.read().split()[13:15])) / os.sysconf("SC_CLK_TCK")


def _ms(times, part):
    return round(1e3 * sorted(times)[int(len(times) * part)], 2) if times else None
