"""Floods on a coordinator, over loopback: `python tests/attack.py [KIND ...] [--seconds N]`.

A coordinator process serves honest workers that take 2 ms or --chunk-seconds for a chunk.
Another process floods it. Prints for each kind: steps/s and CPU of the coordinator before, during and after; the
longest time that an honest worker was without an answer, and that a worker which arrives meanwhile needs to be let in;
the most memory of the coordinator; what the flood left in the save directory; how many of the snapshots that were due
were kept."""

import argparse
import dataclasses
import itertools
import json
import re
import select
import socket
import sys
import tempfile
from contextlib import closing, suppress
from functools import lru_cache
from pathlib import Path
from random import choice, randbytes, random, uniform
from subprocess import PIPE, Popen
from threading import Thread
from time import monotonic, sleep

HERE = Path(__file__).parent.parent
sys.path[:0] = [str(HERE), str(HERE / "tests")]

from cluster import admission, history, wire                   # noqa: E402
from cluster.link import OldCoordinator                                              # noqa: E402
from cluster.wire import (HEARTBEAT, HELLO, JOB_REQUEST, JOB_RESPONSE,  # noqa: E402
                          LOG_MESSAGE, REBUILD, RESULT, SNAPSHOT_WANTED, V2)
from egg_config import EggError                                                      # noqa: E402
from commands import defines                                                         # noqa: E402
from coordinators import Peer2, upload                                               # noqa: E402
from fakes import GOOD, changed                                                 # noqa: E402
from load import cpu_seconds                                                         # noqa: E402
from model import parameters, seeds, state_digest                                        # noqa: E402

CFG = changed(SNAPSHOT_EVERY=32, VALIDATE_EVERY=0, POPULATION_SIZE=256)
GONE = OSError, EggError, OldCoordinator
NO_STEP = 1 << 40                                                # an answer to which says the present one
SEEDS = [seeds.first_seed(CFG)]
ANSWERS = JOB_RESPONSE, REBUILD, SNAPSHOT_WANTED


@lru_cache(4)
def state(step):
    """What all here say that the state is, which nobody computes."""
    while len(SEEDS) <= step:
        SEEDS.append(seeds.next_seed(SEEDS[-1], len(SEEDS) - 1, CFG.NOISE_REUSE))
    return dataclasses.replace(parameters.initial_state(CFG), step=step, seed=SEEDS[step])


@lru_cache(64)
def digest(step):
    due = step < NO_STEP and step % CFG.SNAPSHOT_EVERY == 0
    return state_digest.of_state(state(step)) if due else step.to_bytes(wire.DIGEST, "little")


# --- floods: each is called again and again, with what it returned, at first with [] ----------------------------------

def connect(port):
    return socket.create_connection(("127.0.0.1", port), timeout=1)


def connections(port, held):
    """Half-open ones: as many as the system allows are held, the oldest go."""
    for _ in range(20):
        sock = connect(port)
        if random() < 0.5:
            sock.send(wire.frame(HELLO, bytes(32), version=V2))
        held.append(sock)
    while len(held) > 400:
        held.pop(0).close()
    return held


def frames(port, held):
    """Frames that cannot be right, before and after the introduction."""
    with connect(port) if random() < 0.5 else Peer2(port, CFG, name="hostile").link.sock as sock:
        sock.settimeout(1)
        body = randbytes(choice((0, 24, 40, 48, 100)))
        kind = choice((0, 1, 3, 16, 32, 34, 37, 40, 41, 77))
        sock.send(wire.frame(wire.Frame(kind), body, version=choice((1, 2, 2, 9))) * 20)
        if random() < 0.1:
            sock.settimeout(0.05)
            sock.recv(1 << 16)


def heartbeats(port, peers):
    """Sixteen peers that are let in and send heartbeats at line rate."""
    return pour(port, peers, wire.frame(HEARTBEAT, version=V2) * 6000, 16)


def blanks(port, peers):
    """The same with log messages of blanks."""
    return pour(port, peers, wire.frame(LOG_MESSAGE, b" " * LOG_MESSAGE.most, version=V2) * 4, 16)


def pour(port, peers, data, count):
    while len(peers) < count:
        peers.append(Peer2(port, CFG, name=f"flood{len(peers)}").link.sock)
        peers[-1].setblocking(False)
    for sock in select.select([], peers, [], 0.05)[1]:
        try:
            sock.send(data)
        except BlockingIOError:
            pass
        except OSError:
            peers.remove(sock)
    return peers


def logs(port, held):
    """Comes in, says as much as it may, asks for work, leaves, comes again."""
    peer = Peer2(port, CFG, name="talker")
    peer.link.send(peer.link.frame(LOG_MESSAGE, b"sample at step 1: x >>> " + b"y" * 16000) * 32)
    with suppress(OSError):
        peer.ask(0)
    peer.close()


def readers(port, held):
    """Connections that ask for the status and do not read it."""
    held.append(Peer2(port, CFG, role="status"))
    while len(held) > 200:
        held.pop(0).close()
    return held


def warnings(port, number):
    """Under one new name after another: a wrong state, which is rebuilt to another wrong one; a wrong chunk; a frame
    that cannot be right. Each makes a warning or a refusal, the first a ban."""
    number = number or itertools.count()
    with suppress(*GONE), closing((peer := Peer2(port, CFG, name=f"{next(number)} liar")).link):
        peer.ask(NO_STEP)
        step, how = peer.answer(0.05).step, choice(("state", "state", "chunk", "frame"))
        if how == "state":
            for _ in range(3):
                peer.ask(step, randbytes(16))
                peer.next(REBUILD, JOB_RESPONSE, timeout=0.05)
        elif how == "chunk":
            peer.ask(step, digest(step))
            peer.result(step, 32)
        else:
            peer.link.send(wire.frame(RESULT, 0, step, 0, 0, 1 << 62, 1, b"x", version=V2))
        peer.silent(0.02)
    return number


def nothing(*_):
    """To compare with: a process that only computes."""
    sum(range(100_000))


FLOODS = {f.__name__: f for f in (nothing, connections, frames, heartbeats, blanks, logs, readers, warnings)}


def flood(kind, port, seconds):
    end, state, count = monotonic() + seconds, [], 0
    while monotonic() < end:
        try:
            state = FLOODS[kind](port, state) or []
            count += 1
        except GONE:
            sleep(0.002)
    print(count)


# --- the honest ------------------------------------------------------------------------------------------------------

class Honest(Thread):
    """A worker that takes `seconds` for a chunk. step: of the run; lost: connections; rebuilt: times that it had to,
    which takes 0.2 s; longest: seconds without an answer since that was 0."""

    seconds = 0.002

    def __init__(self, port, name):
        super().__init__(daemon=True, name=name)
        self.port = port
        self.step = self.lost = self.rebuilt = self.longest = 0
        self.stop, self.heard = False, monotonic()

    def run(self):
        while not self.stop:
            try:
                with closing(Peer2(self.port, CFG, name=self.name)) as peer:
                    self.serve(peer)
            except GONE:
                self.lost += not self.stop

    def serve(self, peer):
        step, out, link = self.step, b"", peer.link
        while not self.stop:
            link.send(out + link.frame(JOB_REQUEST, 0, step, 0, digest(step)))
            while (frame := link.any_of(ANSWERS)).opcode == SNAPSHOT_WANTED:
                upload(peer, state(step))
            if frame.opcode == REBUILD:
                self.rebuilt += 1
                sleep(0.2)
                continue
            answer, now = link.unpack_response(frame.payload), monotonic()
            self.longest, self.heard = max(self.longest, now - self.heard), now
            step, out = answer.step, b""
            self.step = max(step, self.step)
            if not answer.packed and answer.first != wire.NOTHING:
                sleep(self.seconds)
                out = link.frame(RESULT, 0, step, answer.first, 0, 5, len(GOOD), GOOD)


class Newcomer(Thread):
    """Comes and leaves. longest: seconds that it took to be let in."""

    def __init__(self, port):
        super().__init__(daemon=True)
        self.port, self.longest, self.stop = port, 0.0, False

    def run(self):
        while not self.stop:
            began, pause = monotonic(), 0.1
            while not self.stop:
                try:
                    Peer2(self.port, CFG, name="newcomer").close()
                    break
                except GONE:
                    sleep(pause * uniform(0.5, 1))
                    pause = min(2 * pause, 5.0)
            self.longest = max(self.longest, monotonic() - began)
            sleep(0.3)


def snapshots_of(directory):
    """{step} of the snapshots that were kept at some time."""
    lines = (directory / history.EVENTS).read_text().splitlines()
    return {event["step"] for event in map(json.loads, lines) if event["event"] == "snapshot"}


def attack(kind, seconds, workers):
    """dict of what the flood did. workers: number of honest ones."""
    with tempfile.TemporaryDirectory() as place:
        place = Path(place)
        process = Popen([sys.executable, HERE / "egg.py", "coordinator", "--port=0",
                         "--save-dir", place, *defines(CFG, SNAPSHOT_EVERY=CFG.SNAPSHOT_EVERY)],
                        cwd=place, stdout=PIPE, text=True)
        try:
            port = int(re.search(r":(\d+), step", process.stdout.readline())[1])
            Thread(target=process.stdout.read, daemon=True).start()
            honest = [Honest(port, f"honest {k}") for k in range(workers)]
            newcomer = Newcomer(port)
            [one.start() for one in honest]
            sleep(1)
            rates, used, absent = [], [], []
            due = []                                             # steps of snapshots
            for phase in range(3):
                if phase == 1:
                    newcomer.start()
                    flooding = Popen([sys.executable, __file__, "--flood", kind, str(port),
                                      "--seconds", str(seconds)], stdout=PIPE, text=True)
                    sleep(1)                                # it takes a moment to start
                for one in honest:
                    one.longest = 0
                before, began = max(one.step for one in honest), monotonic()
                cpu = cpu_seconds(process.pid)
                sleep(seconds - 1.5 if phase == 1 else seconds / 3)
                now = monotonic()
                took, after = now - began, max(one.step for one in honest)
                due.append({step for step in range(before, after) if step and step % CFG.SNAPSHOT_EVERY == 0})
                rates.append(round((after - before) / took, 1))
                used.append(round(100 * (cpu_seconds(process.pid) - cpu) / took))
                absent.append(round(max(max(one.longest, now - one.heard) for one in honest), 2))
                if phase == 1:
                    did = int(flooding.communicate()[0])
                    newcomer.stop = True
            for one in honest:
                one.stop = True
            status = Path(f"/proc/{process.pid}/status").read_text()
            alive, banned, kept = process.poll() is None, admission.Bans(place).all(), snapshots_of(place)
            written = sum(f.stat().st_size for f in place.iterdir() if f.is_file())
        finally:
            process.kill()
            process.wait()
        return {"kind": kind, "honest": workers, "rounds": did, "steps/s": rates, "CPU %": used, "absent s": absent,
                "let in within s": round(newcomer.longest, 2), "MB": int(re.search(r"VmHWM:\s+(\d+)", status)[1]) >> 10,
                "MB written": round(written / 1e6, 2), "bans written": len(banned),
                "snapshots": [f"{len(of & kept)} of {len(of)}" for of in due],
                "lost": sum(one.lost for one in honest), "rebuilt": sum(one.rebuilt for one in honest), "alive": alive}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kinds", nargs="*", help=f"of {', '.join(FLOODS)} (default: all)")
    parser.add_argument("--seconds", type=float, default=12.0, help="of each flood")
    parser.add_argument("--chunk-seconds", type=float, default=0.002,
                        help="that an honest worker takes (default: 0.002); on a busy machine 0.03, or it is measured")
    parser.add_argument("--honest", type=int, default=2, help="number of honest workers")
    parser.add_argument("--flood", nargs=2, metavar=("KIND", "PORT"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.flood:
        kind, port = args.flood
        flood(kind, int(port), args.seconds)
    else:
        Honest.seconds = args.chunk_seconds
        for kind in args.kinds or FLOODS:
            print(attack(kind, args.seconds, args.honest), flush=True)
