"""Load on a coordinator, over loopback, by workers of protocol 2 that are simulated and compute nothing:

    python -m tests.load [WORKERS [SECONDS [SECONDS OF A CHUNK]]]      noise on weights: small results
    python -m tests.load votes [WORKERS ...]          unit trials of 3.4 M weights, a chunk for each worker
"""

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
from fakes import UNITS, changed                                 # noqa: E402
from model import steps                                          # noqa: E402

CFG = changed(POPULATION_SIZE=32 * 8000, SNAPSHOT_EVERY=0)
# of a chunk, so that two cores do it with all workers on them
VOTES = {1: 0.05, 2: 0.1, 8: 0.5, 32: 2.0, 100: 6.0}


def votes(chunks):
    """The Config of unit trials with 3.4 M weights and so many chunks a step."""
    return UNITS.changed(HIDDEN_DIM=256, N_LAYERS=4, VOCAB_SIZE=512, SNAPSHOT_EVERY=0, CHUNK_SIZE=2,
                         POPULATION_SIZE=2 * chunks)


def measure(directory, workers=1000, seconds=20, chunk_seconds=0.2, cfg=CFG):
    """dict of what a coordinator process did: steps and results a second, answer times, memory, processor time, bytes
    of a worker; a worker takes chunk_seconds for a chunk. An answer time is that from asking for work to having a
    chunk."""
    # a newcomer's chunks are done twice: that is over after a while
    process, port = coordinator_process(directory, cfg=cfg, before="from cluster import dispatch\n"
                                        "dispatch.Dispatcher.probation = 0\n" * (cfg.PERTURB == "units"))
    rng = np.random.default_rng(1)
    packed = [steps.pack_digits(rng.integers(-1, 2, cfg.CHUNK_DIGITS, np.int8)) for _ in range(min(cfg.N_CHUNKS, 100))]
    try:
        peers = [Peer2(port, cfg, name=f"w{i}") for i in range(int(workers))]
        before, end = cpu_seconds(process.pid), time.monotonic() + seconds
        told = [dict(answers=[], step=0, sent=0, received=0) for _ in peers]
        threads = [threading.Thread(target=serve, args=(peer, end, chunk_seconds, packed, told[i]))
                   for i, peer in enumerate(peers)]
        [thread.start() for thread in threads]
        [thread.join() for thread in threads]
        used = cpu_seconds(process.pid) - before
        memory = int(re.search(r"VmHWM:\s+(\d+)", pathlib.Path(f"/proc/{process.pid}/status").read_text())[1]) / 1024
    finally:
        process.kill()
        process.communicate()
    answers, done = sum((its["answers"] for its in told), []), max(its["step"] for its in told)
    median, slow = (round(1e3 * float(np.quantile(answers, share)), 2) for share in (0.5, 0.99))
    up, down = (round(sum(its[way] for its in told) / len(peers) / max(1, done) / 1e6, 3)
                for way in ("sent", "received"))
    return {"workers": int(workers), "results/s": round(len(answers) / seconds, 1), "median ms": median, "99% ms": slow,
            "MB": round(memory), "CPU %": round(100 * used / seconds), "steps/s": round(done / seconds, 3),
            "CPU ms a step": round(1e3 * used / max(1, done), 1),
            "CPU ms a result": round(1e3 * used / len(answers), 2), "MB up a worker and step": up, "MB down": down}


def serve(peer, end, chunk_seconds, packed, told):
    """Works until the time `end`, with the digits `packed` of the chunks; told gets what came of it."""
    while time.monotonic() < end:
        began = time.perf_counter()
        peer.ask(told["step"])
        try:
            answer = peer.answer(timeout=end - time.monotonic())
        except TimeoutError:
            return
        told["received"] += len(answer.packed)
        if answer.packed:                                        # of a step that has been completed
            told["step"] = answer.step
            continue
        told["answers"].append(time.perf_counter() - began)
        time.sleep(chunk_seconds * random.uniform(0.5, 1.5) if chunk_seconds < 0.5 else chunk_seconds)
        digits = packed[answer.first // peer.cfg.CHUNK_SIZE % len(packed)]
        peer.result(told["step"], answer.first, digits)
        told["sent"] += len(digits)


def cpu_seconds(pid):
    with open(f"/proc/{pid}/stat") as file:
        return sum(map(int, file.read().split()[13:15])) / os.sysconf("SC_CLK_TCK")


def main(kind="", *rest):
    with tempfile.TemporaryDirectory() as place:
        def run(*arguments, **options):
            print(measure(tempfile.mkdtemp(dir=place), *arguments, **options), flush=True)

        if kind == "votes":
            for workers in map(int, rest or VOTES):
                run(workers, max(15, 10 * VOTES[workers]), VOTES[workers], votes(workers))
        else:
            run(*map(float, filter(None, (kind, *rest))))


if __name__ == "__main__":
    main(*sys.argv[1:])
