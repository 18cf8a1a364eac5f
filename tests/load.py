"""Load on a coordinator, over loopback: `python -m tests.load [--workers N]` simulates workers of protocol 2, without
computing, and prints what the coordinator did."""

import argparse
import heapq
import os
import random
import re
import resource
import select
import subprocess
import sys
import tempfile
import threading
import time

import numpy as np

import egg_config
from cluster import auth, wire
from cluster.link import Link
from model import fitness_digits

CHUNKS = 8000


def measure(directory, workers, seconds, chunk_seconds):
    """dict of results/s, answer times, memory and CPU of a coordinator process; a worker takes chunk_seconds for a
    chunk. An answer time is that from sending a result and the next request to having the next chunk. Answers just
    after the end of a step, when all workers ask at once, are not counted."""
    constants = dict(HIDDEN_DIM=64, HEAD_DIM=32, N_LAYERS=1, SEQ_LEN=8, VOCAB_SIZE=256, CHUNK_SIZE=32, AUDIT_RATE=0.0,
                     POPULATION_SIZE=32 * CHUNKS, SNAPSHOT_EVERY=0)
    cfg = egg_config.make(**constants)
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (files, files))
    command = [sys.executable, os.path.join(egg_config.ROOT, "egg.py"), "coordinator", "--port", "0"]
    command += [f"-D{name}={value}" for name, value in constants.items()]
    process = subprocess.Popen(command, cwd=directory, stdout=subprocess.PIPE, text=True)
    try:
        port = int(re.search(r":(\d+), step", process.stdout.readline())[1])
        threading.Thread(target=process.stdout.read, daemon=True).start()
        card = {"role": "worker", "device": "none", "config": cfg.agreed(), "data": ""}
        links = [Link(cfg, "127.0.0.1", port, wire.V2, auth.Access(), {**card, "id": str(i), "name": f"w{i}"})
                 for i in range(workers)]
        before = cpu_seconds(process.pid)
        results, answers = serve(cfg, links, seconds, chunk_seconds)
        used = cpu_seconds(process.pid) - before
        with open(f"/proc/{process.pid}/status") as file:
            memory = int(re.search(r"VmHWM:\s+(\d+)", file.read())[1]) / 1024
    finally:
        process.kill()
        process.wait()
    median, slow = (round(1e3 * float(np.quantile(answers, share)), 2) for share in (0.5, 0.99))
    return {"workers": workers, "results/s": round(results / seconds), "median ms": median, "99% ms": slow,
            "MB": round(memory), "CPU %": round(100 * used / seconds),
            "CPU us a result": round(1e6 * used / results, 1)}


def serve(cfg, links, seconds, chunk_seconds):
    """Lets the simulated workers work for this time. Returns (number of results, [seconds] of answers)."""
    dice = random.Random(1)
    # ternary digits as often as in a run of the default configuration
    digits = [dice.choices((-1, 0, 1), (46, 6, 48), k=cfg.CHUNK_SIZE // 2) for _ in range(256)]
    fitness = [fitness_digits.pack_ternary(np.array(one, np.int8)) for one in digits]
    links = {link.sock.fileno(): link for link in links}
    poll = select.epoll()
    asked = {}                     # {number of a link: when its request was sent, if the answer counts}
    due = []                       # heap of (time, number, step, its result)
    answers = []
    results = 0

    def ask(number, step, result=b""):
        link = links[number]
        link.sock.send(result + link.frame(wire.JOB_REQUEST, 0, step, 0, bytes(wire.DIGEST)))

    for number, link in links.items():
        poll.register(number, select.EPOLLIN)
        link.sock.setblocking(False)
        ask(number, 0)
    now = time.perf_counter()
    end = now + seconds
    while now < end:
        while due and due[0][0] <= now:
            _, number, step, result = heapq.heappop(due)
            asked[number] = time.perf_counter()
            ask(number, step, result)
        for number, _ in poll.poll(max(0.0, min(0.1, due[0][0] - now)) if due else 0.1):
            link = links[number]
            link.inbox += link.sock.recv(1 << 16)
            if not (frame := wire.next_frame(link.inbox, link.limits)):
                continue
            response = wire.JOB_RESPONSE.unpack(frame.payload)
            now = time.perf_counter()
            sent = asked.pop(number, None)
            if response.size:                               # the fitness of a step that has just been completed
                ask(number, response.step)
                continue
            if sent:
                answers.append(now - sent)
            results += 1
            packed = fitness[response.first // cfg.CHUNK_SIZE % 256]
            result = link.frame(wire.RESULT, 0, response.step, response.first, 0, 5, len(packed), packed)
            heapq.heappush(due, (now + chunk_seconds * dice.uniform(0.5, 1.5), number, response.step, result))
        now = time.perf_counter()
    return results, answers


def cpu_seconds(pid):
    with open(f"/proc/{pid}/stat") as file:
        return sum(map(int, file.read().split()[13:15])) / os.sysconf("SC_CLK_TCK")


if __name__ == "__main__":
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--workers", type=int, default=1000)
    options.add_argument("--seconds", type=float, default=20)
    options.add_argument("--chunk-seconds", type=float, default=0.2, help="that a worker takes for a chunk")
    with tempfile.TemporaryDirectory() as place:
        print(measure(place, **vars(options.parse_args())))
