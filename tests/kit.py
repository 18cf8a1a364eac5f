"""What several test files share: recordings and plain readings of the SPEC, fake engines, a coordinator in a thread,
peers that speak frame by frame, a cluster in which everything goes wrong, and the comparison of both engines. Fixtures
are in conftest.py."""

import contextlib
import fcntl
import gc
import hashlib
import json
import os
import pathlib
import pickle
import queue
import random
import re
import socket
import subprocess
import sys
import threading
import time
import zlib
from unittest import mock

import hypothesis
import numpy as np
import pyzstd

import egg_config
import egg_net
from cluster import auth
from cluster import event_log
from cluster import history
from cluster import wire
from cluster.wire import JOB_REQUEST, RESULT, V2
from model import fitness_digits
from model import integer_tables
from model import parameters
from model import seeds
from model import state_digest
from tools.debug import Reading

HERE = pathlib.Path(__file__).parent.parent


# --- recordings of d-eggs, and the plain reading of the SPEC ---------------------------------------------------------

def golden(name):
    """(configuration, tokens, recording) of golden/<name>.npz."""
    z = np.load(HERE / "tests" / "golden" / f"{name}.npz")
    cfg = egg_config.make(**json.loads(str(z["config"])))
    if name == "E":
        raw = pyzstd.decompress((HERE / "tests" / "golden" / "input_8k.bin.zst").read_bytes())
        return cfg, np.frombuffer(raw, np.uint32), z
    return cfg, z["input_bin"] if cfg.VOCAB_SIZE == 256 else z["input_bin"].view(np.uint32), z


def population_fitness(cfg, losses):
    chunks = np.split(losses, range(cfg.CHUNK_SIZE, losses.size, cfg.CHUNK_SIZE))
    return np.concatenate([fitness_digits.chunk_fitness(chunk, cfg) for chunk in chunks])


def member_reading(cfg, state, member, kind=Reading):
    """The plain reading of a member of the State's step."""
    return kind(cfg, state, state.seed + member // 2, 1 - 2 * (member % 2))


def loss_of(reading, window):
    """The loss of one member over a window int [SEQ_LEN + 1] (SPEC 7.5)."""
    cfg, exp = reading.cfg, [int(e) for e in integer_tables.exp_table(reading.cfg)]
    z = reading.logits(window[:-1])
    total = 0
    for row, target in zip(z, window[1:]):
        q = sum(exp[min(len(exp) - 1, int(row.max() - v))] for v in row)
        above = int(row.max() - row[target])
        if cfg.LOSS == "deggs":
            total += ((q.bit_length() - 1 - cfg.SOFTMAX_SCALE_BIT) * 16 >> 1) + above
        else:
            # 256 times scale * ln(Q / 2^bits) to half a unit, which fixed point must meet within one
            total += 256 * cfg.SOFTMAX_EXP_SCALE * np.log(q / 2 ** cfg.SOFTMAX_SCALE_BIT) + 256 * above
    return total


def random_config(rng, **more):
    """A small configuration drawn over what validate() admits."""
    head = int(rng.choice([32, 64, 128]))
    mode, gaussian = int(rng.integers(3)), int(rng.integers(2))
    heads = int(rng.integers(1 if head > 32 else 2, 4 if head < 128 else 2))
    settings = dict(HIDDEN_DIM=head * heads, HEAD_DIM=head, N_LAYERS=int(rng.integers(1, 3)),
                    SEQ_LEN=8 * int(rng.integers(1, 6)), VOCAB_SIZE=int(rng.choice([256, 257, 300, 1000])),
                    CHUNK_SIZE=8, POPULATION_SIZE=8, ADAPTIVE_NOISE_MODE=mode, DEVICE_GAUSSIAN=gaussian,
                    DEVICE_MASK=int(rng.integers(1, 43 if gaussian else 128)), HOST_GAUSSIAN=int(rng.integers(2)),
                    HOST_MASK=int(rng.integers(1, 43)), SIGMA_SHIFT=int(rng.integers(1, 6)),
                    SIGMA_SHIFT_VECTOR=int(rng.integers(2, 6)), SHIFT_ATTN=int(rng.integers(6, 10)),
                    SHIFT_LOGIT=int(rng.integers(6, 10)), SOFTMAX_EXP_SCALE=float(rng.choice([3.0, 6.0, 12.5])),
                    SOFTMAX_LUT_SIZE=int(rng.choice([40, 128, 256])), LOSS=str(rng.choice(["deggs", "exact"])),
                    USE_SAME_DATA=int(rng.integers(2)), CHUNK_MEAN_FILTER=int(rng.integers(2)),
                    USE_ADAPTIVE_THRESHOLD=int(rng.integers(2)), OPTIMIZER=str(rng.choice(["adamw", "sgd"])))
    return egg_config.make(**{**settings, **more})


def recorded_updates(engine, step, hold):
    """Brings an engine of golden E, which has done `step` updates or fewer, to `step` updates, and calls hold(state, k)
    with the State after update k.

    E.npz has the fitness of step 0 and digests of the others. E_fitness.npz has the fitness of these other steps. It is
    that of our losses, except for single digits that were turned until the digest was the recorded one: in E a few
    losses are not the recorded ones. So the digest is checked here."""
    cfg, tokens, z = golden("E")
    later = np.load(HERE / "tests" / "golden" / "E_fitness.npz")
    for k in range(engine.step, step):
        fitness = fitness_digits.unpack_ternary(later[f"fitness_{k}"].tobytes(), cfg.N_PAIRS) if k else z["fitness_0"]
        assert hashlib.sha256(fitness.astype(np.int32)).hexdigest() == str(z["fitness_sha256"][k])
        engine.update(fitness)
        hold(engine.state(), k)


def hold_against_golden_e(state, k):
    """The whole state is the recorded one after update k."""
    cfg, _, z = golden("E")
    assert state.digests() == tuple(str(z[part][k]) for part in ("model_sha256", "adam_sha256", "scales_sha256")), k
    assert digest_of_part(cfg, state) == PART_OF_E[k]


# SHA-256 of the part of golden E, after each update. Whoever holds the whole state against the recording holds these
# against it, too.
PART_OF_E = (
    "3ffb49e9112eae1732938207eb5355bd53abd966bb5f12b929a9b6879cf8119e",
    "a1d0131b2e27ce3227ff97fe381a1c5301ee1426f517fc07024d42182834bb97",
    "e651516aa6276c95012b5554ecba3e0753971ff33cc44157cb35e4f6f18d7a4e",
    "30d5ca76a2780200191df47952527572b342e4ee57bc4c3328e6bee0cdffec3f",
    "70e36bb447f59804057850ec0bda21661689699917aa3f513ed8a5a47c4f2fc9",
)


def in_part(t):
    """Whether a tensor belongs to the part of golden E that is updated where the whole would take too long: every
    vector, and a matrix of each shape but the embedding's; a tenth of all weights."""
    return not t.matrix or (t.name, t.layer) in (("w_q", 0), ("w_up", 3), ("w_down", 3))


def digest_of_part(cfg, state):
    """SHA-256, in hex, of the weights, moments and noise overlay of the tensors in_part of a State."""
    digest = hashlib.sha256()
    for t in filter(in_part, parameters.tensors(cfg)):
        digest.update(state.weights[t.weights:t.weights + t.size])
        digest.update(state.moments[t.weights:t.weights + t.size])
        digest.update(state.overlay[t.overlay_a:t.overlay_a + t.cols])
        if t.matrix:
            digest.update(state.overlay[t.overlay_b:t.overlay_b + t.rows])
    return digest.hexdigest()


def recorded_generation(engine, step):
    """What d-eggs wrote after `step` updates: (int32 [SEQ_LEN + 1], length of its prompt). See recorded_updates."""
    recorded_updates(engine, step, hold_against_golden_e)
    cfg, tokens, z = golden("E")
    recorded, prompt = z[f"gen_{step}"].astype(np.int32), 32
    start = engine.step * cfg.SEQ_LEN % (len(tokens) - cfg.SEQ_LEN)
    assert np.array_equal(recorded[:prompt], tokens[start:start + prompt])
    return recorded, prompt


# --- protocol 1 ------------------------------------------------------------------------------------------------------

# 16 pairs a chunk: no multiple of 5, so chunks and steps are packed differently
CFG = egg_config.make(HIDDEN_DIM=64, HEAD_DIM=32, N_LAYERS=1, SEQ_LEN=8, VOCAB_SIZE=256, CHUNK_SIZE=32,
                      POPULATION_SIZE=128, VALIDATE_EVERY=2, SAMPLE_EVERY=2, SAMPLE_PROMPT=4, SAMPLE_TOKENS=3,
                      AUDIT_RATE=0.0)


class FakeEngine:
    """Follows the engines' interface; losses depend on seed, member and on all fitness so far."""

    name = "fake"

    def __init__(self, cfg=CFG, pause=0.0):
        self.cfg, self.pause, self.evaluated, self.loads = cfg, pause, [], -1
        self.load(parameters.initial_state(cfg))

    def load(self, state):
        self.whole, self.weights, self.step, self.seed = state, state.weights[:8].copy(), state.step, state.seed
        self.loads += 1

    def state(self):
        weights = np.concatenate([self.weights, self.whole.weights[8:]])
        return parameters.State(weights, self.whole.moments, self.whole.overlay, self.step, self.seed)

    def digest(self):
        return state_digest.of_state(self.state())

    def evaluate(self, first, count):
        assert first % 2 == count % 2 == 0 and count > 0
        self.evaluated.append((self.step, first, count))
        time.sleep(self.pause)
        x = seeds.hash32(self.seed + zlib.crc32(self.weights), np.arange(first, first + count, dtype=np.uint64))
        return (x % 1000).astype(np.int64)

    def begin(self, first, count):
        pass

    def begin_update(self, fitness):
        return False

    def update(self, fitness):
        assert fitness.shape == (self.cfg.N_PAIRS,) and fitness.dtype == np.int8
        digest = zlib.crc32(fitness.tobytes(), zlib.crc32(self.weights))
        self.weights = np.frombuffer(digest.to_bytes(4, "little") * 2, np.int8).copy()
        self.seed, self.step = seeds.next_seed(self.seed, self.step), self.step + 1
        return 100 + self.step

    def validate(self, windows):
        return float(self.step + 1), windows.shape[0] * (windows.shape[1] - 1)

    def generate(self, prompt, count, seed, temp=None, min_p=None, penalty=None):
        yield from [65 + self.step] * count


def expected(steps, cfg=CFG, kind=None):
    """([packed fitness of each step], digests) as one engine, of the class `kind`, without a network does it."""
    engine, packed = (kind or FakeEngine)(cfg), []
    for _ in range(steps):
        losses = [engine.evaluate(c * cfg.CHUNK_SIZE, cfg.CHUNK_SIZE) for c in range(cfg.N_CHUNKS)]
        chunks = [fitness_digits.chunk_fitness(x, cfg) for x in losses]
        packed.append(fitness_digits.pack_ternary(np.concatenate(chunks)))
        engine.update(np.concatenate(chunks))
    return packed, engine.state().digests()


class Lines:
    """A stream that remembers what was printed."""

    encoding = "utf-8"

    def __init__(self):
        self.text = ""

    def isatty(self):
        return False

    def write(self, text):
        self.text += text

    def flush(self):
        pass


def feed(upload, total, offset, data):
    """Gives a snapshots.Upload a piece and unpacks all of it."""
    upload.feed(total, offset, data)
    while upload.pending:
        upload.unpack()


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
        return self.link.unpack_response(self.link.next(wire.JOB_RESPONSE, timeout))

    def chunk(self, step):
        self.ask(step)
        seed, its_step, position, packed = self.answer()
        assert (its_step, packed) == (step, b"")
        return position

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


class Dice(random.Random):
    """In the place of `random` in the cluster's modules. It is not the generator that hypothesis watches while threads
    of a test draw from it. And a worker that would try again after its test is over ends."""

    def uniform(self, low, high):
        if getattr(threading.current_thread(), "over", False):
            sys.exit()
        return super().uniform(low, high)


def work_in_thread(port, engine, cfg=CFG, retry=False, lines=None, **options):
    def serve():
        with contextlib.suppress(SystemExit):                    # see Dice
            egg_net.run_worker(cfg, "127.0.0.1", port, engine, retry=retry, console=egg_net.Console(lines or Lines()),
                               **options)

    thread = threading.Thread(target=serve, daemon=retry)
    thread.start()
    return thread


GOOD = fitness_digits.pack_ternary(np.ones(16, np.int8))


def result_frame(step=0, position=0, updates=0, loss=0, packed=GOOD, size=None):
    size = len(packed) if size is None else size
    return wire.frame(RESULT, 42, step, position, updates, loss, size, packed)


def filled(directory, steps=5, cfg=CFG):
    """[packed fitness] of a run that was written to `directory`."""
    rng, packed = np.random.default_rng(steps), []
    run = history.open_run(cfg, directory)
    for k in range(steps):
        packed.append(fitness_digits.pack_ternary(rng.integers(-1, 2, cfg.N_PAIRS).astype(np.int8)))
        run.append(packed[-1], -k * 1000, k)
    run.close()
    return packed


def whole(run):
    return [run.fitness(k) for k in range(run.step)]


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


# --- protocol 2 ------------------------------------------------------------------------------------------------------

SECRET = b"sixteen bytes or more"


def changed(**constants):
    return CFG.changed(**constants)


def differing(cfg):
    """{name: value}: the constants of cfg, without the local ones, that are not as in egg_config.py."""
    default = egg_config.make()
    return {name: value for name, value in cfg.shared().items() if value != getattr(default, name)}


def card(cfg=CFG, **values):
    return {"role": "worker", "id": os.urandom(4).hex(), "name": "peer", "device": "a pencil",
            "config": cfg.saved(), "data": "", **values}


class Peer2(Peer):
    """A worker of protocol 2 spoken frame by frame."""

    def __init__(self, port, cfg=CFG, secret=b"", **values):
        self.cfg = cfg
        self.link = egg_net.Link(cfg, "127.0.0.1", port, V2, auth.Access(secret), card(cfg, **values))

    def ask(self, step, digest=bytes(16)):
        self.link.send(self.link.frame(JOB_REQUEST, 0, step, 0, digest.ljust(wire.DIGEST, b"\0")))

    def next(self, *opcodes, timeout=5):
        return self.link.any_of(opcodes, timeout)

    def result(self, step, position, packed=GOOD, loss=5):
        self.link.send(self.link.frame(RESULT, 0, step, position, 0, loss, len(packed), packed))


class Liar(FakeEngine):
    """Evaluates wrongly from some step on."""

    def __init__(self, cfg=CFG, start=0, **options):
        super().__init__(cfg, **options)
        self.start = start

    def evaluate(self, first, count):
        losses = super().evaluate(first, count)
        return losses[::-1].copy() if self.step >= self.start else losses


# FUZZ_EXAMPLES=100000 in the environment is a long run, each with other examples
EXAMPLES = int(os.environ.get("FUZZ_EXAMPLES", "120"))
hypothesis.settings.register_profile("egg", max_examples=EXAMPLES, derandomize="FUZZ_EXAMPLES" not in os.environ,
                                     deadline=None, database=None, suppress_health_check=list(hypothesis.HealthCheck))
hypothesis.settings.load_profile("egg")
SLOW = hypothesis.settings(max_examples=EXAMPLES // 3)           # for examples that talk to a coordinator, or take long


class Drifting(FakeEngine):
    """Its weights change by themselves after some step, so many times."""

    def __init__(self, cfg=CFG, after=3, times=1, **options):
        super().__init__(cfg, **options)
        self.after, self.times = after, times

    def update(self, fitness):
        changed = super().update(fitness)
        if self.step >= self.after and self.times:
            self.times -= 1
            self.weights[3] ^= 1
        return changed


def begin_together(engines):
    """The first evaluation of each waits until all have one to do, so that every worker takes part in a short run."""
    all_here = threading.Barrier(len(engines))

    def wait_first(engine):
        def evaluate(*members):
            del engine.evaluate
            all_here.wait(60)
            return engine.evaluate(*members)
        engine.evaluate = evaluate

    for engine in engines:
        wait_first(engine)


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


class Chaos:
    """A cluster in which everything goes wrong that a seed decides: liars, drifting replicas, workers that leave in
    mid-frame, stop, crawl or say everything twice, and a coordinator that is killed.

    cfg: an egg_config.Config. kinds: the classes of the engines that are honest, that drift and that lie."""

    def __init__(self, directory, seed, cfg, kinds, honest=3, kills=4):
        self.directory, self.random, self.cfg, self.kills = directory, random.Random(seed), cfg, kills
        self.stop, self.threads, self.engines = False, [], []
        self.kind, drifting, liar = kinds
        self.process, self.port = coordinator_process(directory, free_port(), cfg)
        self.collect()
        for i in range(honest):
            self.start(self.kind(cfg, 0.001 * (1 + 3 * i)), f"honest{i}")
        self.start(drifting(cfg, after=self.random.randrange(5, 30), pause=0.002), "drifting")
        self.start(liar(cfg, start=self.random.randrange(3, 20), pause=0.002), "liar")
        for i in range(3):
            dice = random.Random(seed * 10 + i)
            thread = threading.Thread(target=self.misbehave, args=(dice, f"rogue{i}"), daemon=True)
            self.threads.append(thread)
            thread.start()

    def collect(self):
        """Reads what the coordinator prints, so that it never waits for us."""
        self.lines = []
        threading.Thread(target=lambda stream=self.process.stdout: self.lines.extend(stream), daemon=True).start()

    def start(self, engine, name):
        self.engines.append(engine)

        def serve():
            lives = 0
            while not self.stop:
                with contextlib.suppress(egg_config.EggError):      # a banned one comes back, under another name
                    egg_net.run_worker(self.cfg, "127.0.0.1", self.port, engine, name=f"{name}.{lives}", retry=False,
                                       console=egg_net.Console(Lines()))
                lives += 1
                time.sleep(0.05)

        thread = threading.Thread(target=serve, daemon=True)
        self.threads.append(thread)
        thread.start()

    def misbehave(self, dice, name):
        while not self.stop:
            with contextlib.suppress(OSError, egg_config.EggError, egg_net.OldCoordinator):
                peer = Peer2(self.port, self.cfg, name=f"{name}.{dice.random()}")
                peer.ask(0, self.kind(self.cfg).digest())
                what, step = dice.randrange(7), peer.answer(1)[1]
                if what == 0:
                    peer.link.send(result_frame()[:dice.randrange(1, 40)])              # leaves in mid-frame
                elif what == 1:
                    peer.result(dice.randrange(200), dice.randrange(4) * 32)            # wrong step
                elif what == 2:
                    peer.ask(200, os.urandom(32))                                       # wrong digest
                elif what == 3:
                    time.sleep(dice.random())                                           # paused
                elif what == 4:
                    peer.link.send(dice.randbytes(dice.randrange(200)))
                elif what == 5:
                    for byte in result_frame():                                         # crawls
                        peer.link.send(bytes([byte]))
                        time.sleep(0.01)
                else:
                    [peer.result(step, 32) for _ in range(3)]                           # not asked for, and thrice
                peer.link.close()
            time.sleep(dice.random() * 0.1)

    def printed(self):
        """How many steps this coordinator has told of."""
        return sum(line.startswith("Step") for line in list(self.lines))

    def run(self, steps):
        """Until the run has `steps` steps: kills the coordinator now and then; returns how often."""
        started, kills, seen = time.monotonic(), 0, 0
        while True:
            time.sleep(self.random.uniform(0.05, 0.8))
            self.process.kill()
            self.process.wait()
            kills += 1
            run = history.open_run(self.cfg, self.directory)
            done, left = run.step, run.notices
            run.close()
            assert done >= seen, f"{seen} steps were there, {done} are left; {left}"
            seen = done
            if done >= steps and kills >= self.kills:
                break
            assert time.monotonic() - started < 60 + 5 * self.kills, f"{done} steps after {kills} kills"
            self.process, _ = coordinator_process(self.directory, self.port, self.cfg)
            self.collect()
            if kills >= self.kills:
                end = time.monotonic() + 30
                while time.monotonic() < end and self.printed() + seen < steps + 2:
                    time.sleep(0.02)
        self.stop = True
        return kills


CHAOS = changed(AUDIT_RATE=1.0, SNAPSHOT_EVERY=10)


def chaos(directory, seed, steps, kills, cfg=CHAOS, kinds=(FakeEngine, Drifting, Liar)):
    """Runs Chaos until it has so many steps and kills, and compares every step with an undisturbed run: (steps, kills)
    done."""
    trouble = Chaos(directory, seed, cfg, kinds, kills=kills)
    try:
        done = trouble.run(steps)
    finally:
        trouble.stop = True
        trouble.process.kill()
        trouble.process.communicate()
    run = history.open_run(cfg, directory)
    try:
        packed, digests = expected(run.step, cfg, kinds[0])
        assert whole(run) == packed
        engine = kinds[0](cfg)
        history.replay(run, engine)
        assert engine.state().digests() == digests
        return run.step, done
    finally:
        run.close()


# --- CUDA kernels, without a GPU -------------------------------------------------------------------------------------

# compute capability -> KiB of shared memory that a block can have
CARDS = {(8, 0): 163, (8, 6): 99, (8, 9): 99, (9, 0): 227, (10, 0): 227, (12, 0): 99}


def path_of(forward):
    """Which kernels the CUDA engine takes for the recurrent model: "general", "registers", or "wgmma" beside these."""
    kernels = forward._kernels
    return "general" if not hasattr(kernels, "wgmma") else "wgmma" if kernels.wgmma else "registers"


def kernels_of(constants, cc):
    """{part: [Kernel]} of engine.cuda_engine.kernels for a configuration on a card: "all", of these the "forward" pass,
    and of it the "noisy" one."""
    from numba import uint32

    from engine import cuda_engine
    forward, own, by_verb = cuda_engine.kernels(egg_config.make(**constants), cc, CARDS[cc] * 1024, uint32)
    every = {(id(kernel.dispatcher), repr(kernel.signature)): kernel for some in by_verb.values() for kernel in some}
    noisy, every = [kernel.dispatcher for kernel in forward.kernels["step"]], list(every.values())
    return {"all": every, "forward": [kernel for kernel in every if kernel.dispatcher not in own.values()],
            "noisy": [kernel for kernel in every if kernel.dispatcher in noisy]}


class Compiler:
    """Compiles CUDA kernels into files of a directory, which the processes of a test run share. Each distinct kernel is
    compiled once: what is the same on several cards, or in several configurations, for one of them."""

    def __init__(self, directory):
        self.directory = directory

    def __call__(self, constants, cards=CARDS, **which):
        """{card: [(name, bytes of shared memory, PTX)]} of the kernels of a configuration; which: see `compile`."""
        return {cc: [(name, shared, (self.directory / file).read_text())
                     for name, shared, file in self.compile(constants, cc, **which)] for cc in cards}

    def compile(self, constants, cc, part="all", names=None, wait=True):
        """[(name, bytes of shared memory, name of its file)] of the kernels of a configuration on a card; names: of
        each name as many kernels as it stands there. Without `wait` kernels that another process is about to compile
        are left to it. The list is kept, so that other processes need not build the kernels."""
        from engine import kernel_cache
        from engine.quick_numba import quick
        listed = self.directory / f"list-{kernel_cache.key({}, constants, cc, part, names)}"
        if listed.exists():
            return json.loads(listed.read_text())
        some, known = kernels_of(constants, cc)[part], {}
        if names is not None:
            some = [kernel for name in dict.fromkeys(names)
                    for kernel in [k for k in some if k.name == name][:names.count(name)]]
        files = [kernel_cache.key(known, kernel.dispatcher, kernel.signature) for kernel in some]
        with quick():
            for kernel, file in zip(some, files):
                self._compile(kernel, self.directory / file, cc, wait)
        made = [(kernel.name, kernel.shared, file) for kernel, file in zip(some, files)]
        if all((self.directory / file).exists() for file in files):
            write_at_once(listed, json.dumps(made))
        return made

    def _compile(self, kernel, file, cc, wait):
        from numba import cuda
        with open(f"{file}.lock", "w") as lock, contextlib.suppress(BlockingIOError):
            fcntl.flock(lock, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
            if not file.exists():
                ptx, _ = cuda.compile_ptx(kernel.dispatcher.py_func, kernel.signature,
                                          cc=(9, 0, "a") if cc == (9, 0) else cc)
                write_at_once(file, ptx)

    def ahead(self, jobs):
        """Starts a process that compiles at low priority what jobs, [arguments of a call], will want."""
        code = "import kit, pickle, sys; kit.compile_ahead(*pickle.load(sys.stdin.buffer))"
        process = subprocess.Popen([sys.executable, "-c", code], cwd=HERE, stdin=subprocess.PIPE,
                                   env={**os.environ, "PYTHONPATH": f"{HERE}{os.pathsep}{HERE / 'tests'}"})
        process.stdin.write(pickle.dumps((self, jobs)))
        process.stdin.close()
        return process


def compile_ahead(compiler, jobs):
    os.nice(10)
    gc.disable()
    for constants, cards, which in jobs:
        for cc in cards:
            compiler.compile(constants, cc, wait=False, **which)


def write_at_once(path, text):
    part = path.with_name(f"{path.name}.{os.getpid()}")
    part.write_text(text)
    part.rename(path)


def hold_against_cards(made):
    """The kernels that a Compiler made are in registers alone and fit the shared memory of the cards."""
    for cc, kernels in made.items():
        for name, shared, ptx in kernels:
            assert re.search(r"\.target sm_\d+a?\b", ptx), name
            assert not re.search(r"\.local\b", ptx), f"{name} for {cc} uses local memory"
            assert shared <= CARDS[cc] * 1024, f"{name} needs {shared} bytes of shared memory"


# --- both engines ----------------------------------------------------------------------------------------------------

SEED = 20240607


# the constants of an engine that is compared beside that of the configuration itself: other instructions, equal bits
OTHER_INSTRUCTIONS = [{"TENSOR_CORES": "mma"}] if "TENSOR_CORES" in egg_config.CONSTANTS else []


def compile_cpu_engine(model, ready):
    """Compiles all of the CPU engine for a model, and says so by a file in the directory `ready`."""
    from engine import cpu_engine
    try:
        cpu_engine.warm_up(egg_config.make(MODEL=model, USE_MUON=1), lambda line: None, cpu_engine.VERBS)
    finally:
        (ready / model).touch()


def course(engine, start, windows, prompt, count, seed, settings):
    """({what: value}, the State at the end): what an engine gives over three steps from the State `start`, a validation
    and a generation. Its own losses make the fitness, so that engines can be compared that do not run side by side."""
    cfg, seen = engine.cfg, {}
    engine.load(start)
    for step in range(3):
        chunks = range(0, cfg.POPULATION_SIZE, cfg.CHUNK_SIZE)
        losses = [engine.evaluate(first, cfg.CHUNK_SIZE) for first in chunks]
        changed = engine.update(np.concatenate([fitness_digits.chunk_fitness(x, cfg) for x in losses]))
        seen[f"losses of step {step}"] = np.concatenate(losses).tolist()
        seen[f"update {step}"] = changed, engine.state().digests(), engine.seed
        seen[f"digest after update {step}"] = engine.digest()
    seen["validation"] = engine.validate(windows)
    seen["tokens"] = list(engine.generate(prompt, count, seed, **settings))
    return seen, engine.state()


def compare(constants, seed, ready):
    """Both engines on one configuration, with numbers drawn by `seed`: (what differs between them, as text that is
    empty if nothing does; {part: seconds}). ready: see compile_cpu_engine."""
    from engine import cpu_engine, cuda_engine
    cuda_engine.COMPILERS = 1                                   # this process is one of many
    rng, seconds = np.random.default_rng(seed), {}
    cfg = egg_config.make(**{"LR_SCHEDULE": ((0, 1.2),), **constants})
    tokens = rng.integers(0, cfg.VOCAB_SIZE, 3 * cfg.SEQ_LEN + 200)
    if cfg.SOFT_TARGETS:                                        # of few kinds, so that contexts come back
        tokens = tokens % 5 * (cfg.VOCAB_SIZE // 5)
    tokens = tokens.astype(np.uint8 if cfg.VOCAB_SIZE == 256 else np.uint32)
    start = parameters.initial_state(cfg)
    start.seed = int(rng.integers(2 ** 32))
    longer = int(rng.integers(40)) if cfg.MODEL == "gru" else 0            # VALIDATE_WINDOW
    windows = rng.integers(0, cfg.VOCAB_SIZE, (3, cfg.SEQ_LEN + longer + 1))
    prompt = rng.integers(0, cfg.VOCAB_SIZE, rng.integers(1, 12))
    settings = {name: float(rng.choice(values)) for name, values in
                dict(temp=(0.0, 0.6, 1.5), min_p=(0.0, 0.08, 0.5), penalty=(0.0, 0.2, 1.0)).items()}
    # often beyond SEQ_LEN
    verbs = dict(start=start, windows=windows, prompt=prompt, count=24 + min(2 * cfg.SEQ_LEN, 100), seed=seed + 1,
                 settings=settings)

    def timed(part, call, *arguments, **more):
        began = time.monotonic()
        result = call(*arguments, **more)
        seconds[part] = time.monotonic() - began
        return result

    gpu = cuda_engine.CudaEngine(cfg, tokens)
    got, end = timed("GPU", course, gpu, **verbs)
    seconds["compiling"] = gpu.compile_seconds
    seconds["GPU"] = max(0.0, seconds["GPU"] - gpu.compile_seconds)
    others, limit, kib = [], cuda_engine.ptx.shared_limit, list(CARDS.values())[seed % len(CARDS)]
    for more in OTHER_INSTRUCTIONS:                              # in the tiles of a card with so much shared memory
        with mock.patch.object(cuda_engine.ptx, "shared_limit", lambda gpu: min(limit(gpu), kib * 1024)):
            other = cuda_engine.CudaEngine(cfg.changed(**more), tokens)
        for state in start, end:                                 # the first and a later state
            other.load(state)
            others.append((more, state, other.evaluate(0, cfg.CHUNK_SIZE).tolist()))
        seconds["compiling, other"] = seconds.get("compiling, other", 0.0) + other.compile_seconds
    timed("waiting for the CPU engine", until, (ready / cfg.MODEL).exists, 400)
    cpu = cpu_engine.CpuEngine(cfg, tokens, threads=1)
    want, _ = timed("CPU", course, cpu, **verbs)
    (nats, count), (nats_gpu, count_gpu) = want.pop("validation"), got.pop("validation")
    wrong = [what for what in want if want[what] != got[what]]
    if count != count_gpu or abs(nats - nats_gpu) > 1e-9 * nats:
        wrong.append(f"validation {nats} {nats_gpu}")
    if "tokens" in wrong:
        wrong.append(f"{want['tokens']} {got['tokens']} with {settings}")
    for more, state, losses in others:
        cpu.load(state)
        if cpu.evaluate(0, cfg.CHUNK_SIZE).tolist() != losses:
            wrong.append(f"losses of step {state.step} with {more} in tiles of {kib} KiB")
    return ", ".join(wrong), seconds


def callable_by_python(inner):
    """A function of the CPU engine that only compiled functions call (engine.kernel_cache.Inner), for a test."""
    import numba
    return numba.njit(lambda *arguments: inner(*arguments))


# --- sampling --------------------------------------------------------------------------------------------------------

def weights_of(cfg, z, seen, temp, min_p, penalty):
    """(int64 [V], float32 [V]): the weights of SPEC 10 for logits z, of which `seen` are penalised once (SPEC 11), and
    the scores that they are made of."""
    scores = z.astype(np.float32)
    scores[seen] -= np.float32(penalty * cfg.SOFTMAX_EXP_SCALE)
    if temp == 0:
        return None, scores
    d = np.trunc((scores - scores.max()) / np.float32(temp)).astype(np.int64)
    exp = integer_tables.exp_table(cfg).astype(np.int64)
    floor = np.trunc(np.float32(np.log(np.float32(min_p))) * np.float32(cfg.SOFTMAX_EXP_SCALE)) if min_p else -np.inf
    return np.where(d >= floor, exp[np.minimum(len(exp) - 1, -d)], 0), scores


def drawn(cfg, z, seen, position, seed, **settings):
    """The token after `position`: the walk over v = 0, H, 2 H, ..., 1, H + 1, ... of SPEC 10."""
    weights, scores = weights_of(cfg, z, seen, **settings)
    if weights is None:
        return int(scores.argmax())
    walk = np.argsort(np.arange(z.size) % cfg.HIDDEN_DIM, kind="stable")
    threshold = seeds.hash32((seed + 999 + 555 * position) & 0xFFFFFFFF, 0) % int(weights.sum())
    return int(walk[np.searchsorted(np.cumsum(weights[walk]), threshold, side="right")])


def settings_of(rng):
    return {name: float(rng.choice(values)) for name, values in
            dict(temp=(0.0, 0.3, 0.6, 1.5), min_p=(0.0, 0.08, 0.5), penalty=(0.0, 0.2, 1.0)).items()}


def hold_draws_against_the_distribution(engine_type):
    """4,000 seeds of a whole generation against the weights of the plain reading: chi-square below its quantile of
    1 - 1e-4."""
    cfg = egg_config.make(HIDDEN_DIM=64, HEAD_DIM=32, N_LAYERS=1, SEQ_LEN=8, VOCAB_SIZE=257, CHUNK_SIZE=2,
                          SOFTMAX_EXP_SCALE=20.0)
    engine, prompt, settings = engine_type(cfg), [3, 200, 256, 3], dict(temp=1.3, min_p=0.02, penalty=0.4)
    weights, _ = weights_of(cfg, Reading(cfg, engine.state()).logits(prompt)[-1], np.unique(prompt), **settings)
    draws = [next(engine.generate(prompt, 1, seed, **settings)) for seed in range(4000)]
    counts = np.bincount(draws, minlength=cfg.VOCAB_SIZE)
    expected = 4000 * weights / weights.sum()
    assert not counts[weights == 0].any()
    common = expected >= 5
    counts, expected = (np.append(x[common], x[~common].sum()) for x in (counts, expected))
    free = len(counts) - 1
    # Wilson and Hilferty: the cube root of chi-square / free is normal; 3.72 deviations are 1e-4
    limit = free * (1 - 2 / (9 * free) + 3.72 * (2 / (9 * free)) ** 0.5) ** 3
    assert free > 10 and ((counts - expected) ** 2 / np.maximum(expected, 1e-9)).sum() < limit
