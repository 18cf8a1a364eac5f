"""Load on a coordinator, over loopback: `python -m tests.load [WORKERS [SECONDS [SECONDS OF A CHUNK]]]` simulates
workers of protocol 2, without computing, and prints what the coordinator did."""

import os
import pathlib
import random
import re
import sys
import tempfile
import threading
import time

import numpy as np

sys.path[:0] = [str(pathlib.Path(__file__).parent.parent), str(pathlib.Path(__file__).parent)]

from coordinators import Peer2, coordinator_process              # noqa: E402
from fakes import changed                                        # noqa: E402

CFG = changed(POPULATION_SIZE=32 * 8000, SNAPSHOT_EVERY=0)


def measure(directory, workers=1000, seconds=20, chunk_seconds=0.2):
    """dict of results/s, answer times, memory and CPU of a coordinator process; a worker takes chunk_seconds for a
    chunk. An answer time is that from asking for work to having a chunk."""
    process, port = coordinator_process(directory, cfg=CFG)
    try:
        peers = [Peer2(port, CFG, name=f"w{i}") for i in range(int(workers))]
        before, answers, end = cpu_seconds(process.pid), [], time.monotonic() + seconds
        threads = [threading.Thread(target=serve, args=(peer, end, chunk_seconds, answers)) for peer in peers]
        [thread.start() for thread in threads]
        [thread.join() for thread in threads]
        used = cpu_seconds(process.pid) - before
        memory = int(re.search(r"VmHWM:\s+(\d+)", pathlib.Path(f"/proc/{process.pid}/status").read_text())[1]) / 1024
    finally:
        process.kill()
        process.communicate()
    median, slow = (round(1e3 * float(np.quantile(answers, share)), 2) for share in (0.5, 0.99))
    return {"workers": workers, "results/s": round(len(answers) / seconds), "median ms": median, "99% ms": slow,
            "MB": round(memory), "CPU %": round(100 * used / seconds)}


def serve(peer, end, chunk_seconds, answers):
    """Works until the time `end`; `answers` gets seconds."""
    step = 0
    while time.monotonic() < end:
        began = time.perf_counter()
        peer.ask(step)
        answer = peer.answer()
        if answer.packed:                                        # the fitness of a step that has been completed
            step = answer.step
            continue
        answers.append(time.perf_counter() - began)
        time.sleep(chunk_seconds * random.uniform(0.5, 1.5))
        peer.result(step, answer.first)


def cpu_seconds(pid):
    with open(f"/proc/{pid}/stat") as file:
        return sum(map(int, file.read().split()[13:15])) / os.sysconf("SC_CLK_TCK")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as place:
        print(measure(place, *map(float, sys.argv[1:])))
