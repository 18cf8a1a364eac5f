"""Work that is begun before it is asked for: it is used where it is right and leaves nothing behind where it is not."""

import math
import zlib
from types import SimpleNamespace

import numpy as np
from numpy import int32, int8, uint64, uint8
from numpy.random import default_rng
from pytest import fail, fixture, importorskip, mark

import egg_config
import no_device
from cluster import history
from egg_net import ChunkPredictor, NO_CHUNK, SURE_AFTER, Worker
from model import parameters, rules, steps
from coordinators import cluster
from no_device import device_array
from fakes import CFG, any_fitness, changed, step_alone
from recordings import digests
from engines_compared import begun_ahead
from readings import as_data, equal

TOKENS = 1 << 20
STEPS = 30
cuda_engine = importorskip("engine.cuda_engine")


class Kernel:
    """launches[grid...](*arguments) calls a function."""

    def __init__(self, function):
        self.function = function

    def __getitem__(self, _):
        return self.function


class Forward:
    """Losses depend on the packed weights, the overlay, the windows, and all of the job. Packing is a copy."""

    packed_bytes, kernels = 8, {}

    def __init__(self, cfg):
        self.cfg, self.evaluated = cfg, []

    def tables(self):
        pass

    def scratch_bytes(self, pairs):
        return 100 * pairs

    votes = None

    def clean_scratch_bytes(self, windows, length):
        return windows

    def pack(self, stream, weights, packed):
        packed[:] = weights[:8]

    def evaluate(self, stream, weights, packed, overlay, windows, job, offset, pairs, scratch, losses):
        assert losses.size == 2 * pairs and len(scratch) >= 100 * pairs and windows.size % pairs == 0
        first, members = int(job[1]) + offset, np.arange(2 * pairs)
        self.evaluated.append((int(job[0]), 2 * first, members.size))
        seed = zlib.crc32(packed.tobytes() + overlay.tobytes() + job[[0, 2]].tobytes())
        sums = windows.reshape(pairs, -1).sum(1, dtype=np.int64)
        numbers = np.repeat(sums, 2) * 1000 + members % 2 + first + members // 2
        losses[:] = steps.hash32(seed, numbers.astype(uint64)) % 1000

    def validate(self, stream, weights, packed, windows, count, length, scratch, nats):
        nats[:] = zlib.crc32(packed.tobytes() + weights.tobytes()) % 1000


class Update:
    def __init__(self, cfg, kernels, budget):
        self.changed = device_array(1, int32)
        self.packed = device_array(steps.packed_size(cfg.STEP_DIGITS), uint8)
        self.rates = device_array(len(parameters.tensors(cfg)), np.float32)

    bytes_needed = staticmethod(lambda cfg: 0)

    def launches(self, stream, job, weights, moments, overlay):
        def optimize():
            assert self.changed[0] == 0
            digest = zlib.crc32(self.packed.tobytes() + job.tobytes() + weights.tobytes() + moments.tobytes())
            weights[:4] = np.frombuffer(digest.to_bytes(4, "little"), int8)
            moments[0, 0] += self.rates[0]
            overlay[0] += 1
            self.changed[0] = digest % 1000

        return [optimize]


@fixture
def engine_of(monkeypatch):
    """Makes engines of cfg. memory: of the device; evaluated, of an engine: [(seed, first, count)]."""
    def kernels(cfg, cc, limit):
        def cut_windows(tokens, place, job, first, size, followers, windows):
            assert place[0] == steps[int(place[0])] * cfg.SEQ_LEN % (tokens.size - cfg.SEQ_LEN)
            n = windows.size // cfg.WINDOW
            windows[:] = rules.windows(cfg, np.asarray(tokens), steps[int(place[0])], int(place[1]), n).ravel()

        def digest(weights, moments, overlay, out):
            out += np.frombuffer(zlib.crc32(weights.tobytes() + moments.tobytes() + overlay.tobytes())
                                 .to_bytes(4, "little") * 4, uint64)

        steps = {step * cfg.SEQ_LEN % (TOKENS - cfg.SEQ_LEN): step for step in range(400)}
        return Forward(cfg), {"cut_windows": Kernel(cut_windows), "digest": Kernel(digest)}, {"digest": []}

    fake, memory = no_device.names()
    monkeypatch.setattr(cuda_engine, "cuda", SimpleNamespace(**fake))
    monkeypatch.setattr(cuda_engine, "kernels", kernels)
    monkeypatch.setattr(cuda_engine.ptx, "shared_limit", lambda gpu: 0)
    monkeypatch.setattr(cuda_engine, "compile_all", lambda *args: 0.0)
    monkeypatch.setattr(cuda_engine.update, "Update", Update)
    monkeypatch.setattr(cuda_engine, "Replay", lambda stream, enqueue: enqueue)
    tokens = default_rng(3).integers(0, 256, TOKENS).astype(uint8)

    def make(cfg=CFG):
        engine = cuda_engine.CudaEngine(cfg, tokens)
        engine.evaluated = engine._forward.evaluated
        return engine

    make.memory = memory
    return make


def fitness_of(seed):
    return any_fitness(CFG, seed)


USES = {"nothing": lambda e: None, "evaluate": lambda e: e.evaluate(32, 16).tolist(), "digest": lambda e: e.digest(),
        "state": lambda e: digests(e.state()), "validate": lambda e: e.validate(np.zeros((3, 9), int32)),
        "another update": lambda e: (e.update(fitness_of(9)), e.digest()),
        "load": lambda e: (e.load(parameters.initial_state(e.cfg)), e.digest())}


# --- the CUDA engine's host side --------------------------------------------------------------------------------------

def run(engine, steps):
    """As one engine without a network does it: digests of the state."""
    for _ in range(steps):
        step_alone(engine)
    return digests(engine.state())


@mark.parametrize("memory", [1 << 30, 1 << 10])
@mark.parametrize("on_device", [True, False])
def test_what_is_begun_shows_nowhere(engine_of, on_device, memory):
    """In whatever order evaluations and updates are begun and asked for, with and without room for them, the engine
    answers like one that begins nothing."""
    cfg = changed(LR_SCHEDULE=((0, 0.5), (2, 0.25), (3, 0.125)))
    engine_of.memory.free = 1 << 30 if on_device else 1 << 21    # too little for the tokens
    plain, ahead, rng = engine_of(cfg), engine_of(cfg), default_rng(8)
    assert (plain._tokens is not None) == on_device
    engine_of.memory.free = memory
    for _ in range(600):
        kind = rng.choice(["begin", "begin update", "evaluate", "update", *USES],
                          p=[0.3, 0.2, 0.28, 0.15, *[0.01] * len(USES)])
        members, fitness = (int(rng.integers(5)) * 8, int(rng.integers(1, 5)) * 4), fitness_of(int(rng.integers(2)))
        if kind == "begin":
            ahead.begin(*members)
            assert len(ahead._begun) < 3
        elif kind == "begin update":
            assert ahead.begin_update(fitness) == (memory > 1 << 20)
        elif kind == "evaluate":
            equal(ahead.evaluate(*members), plain.evaluate(*members))
        elif kind == "update":
            assert ahead.update(fitness) == plain.update(fitness)
        else:
            assert USES[kind](ahead) == USES[kind](plain)
        assert (ahead.step, ahead.seed) == (plain.step, plain.seed)
    assert digests(ahead.state()) == digests(plain.state()) and ahead.digest() == plain.digest()


@mark.parametrize("slice_size", [64, 10])
def test_a_worker_alone_waits_for_nobody(engine_of, tmp_path, monkeypatch, slice_size):
    """It begins every update and, once it is sure, the first slice of every chunk before the coordinator answers.
    Nothing is evaluated twice."""
    monkeypatch.setattr(Worker, "slice", slice_size)
    monkeypatch.setattr(Worker, "_measure", lambda self, count, seconds: setattr(self, "speed", 1.0))
    engine, begun, ready, evaluate = engine_of(), [], set(), cuda_engine.CudaEngine.evaluate

    def watched(self, first, count):
        if (first, count) in self._begun and first % CFG.CHUNK_SIZE == 0:
            ready.add((self.step, first))
        return evaluate(self, first, count)

    monkeypatch.setattr(cuda_engine.CudaEngine, "evaluate", watched)
    engine._set_update = lambda fitness: (begun.append(engine.step), type(engine)._set_update(engine, fitness))
    engine._undo_update = lambda: fail("undone") if engine._fitness is not None else None
    assert cluster(tmp_path, [engine], STEPS).run.step == STEPS and begun == [*range(STEPS)]
    del engine._undo_update
    assert digests(engine.state()) == run(engine_of(), STEPS)
    assert len(set(engine.evaluated)) == len(engine.evaluated)
    assert len(ready) >= STEPS * CFG.N_CHUNKS - 2 * SURE_AFTER - 1, "unsure: first chunks of steps, others, the first"


def test_a_step_that_ends_otherwise_is_undone(engine_of, tmp_path, monkeypatch):
    """The coordinator has another fitness than the worker that has done the whole step: the update is of that."""
    engine, plain = engine_of(), engine_of()
    append = history.Run.append

    def other(self, packed, *rest):
        return append(self, fitness_of(5) if self.step == 3 else packed, *rest)

    monkeypatch.setattr(history.Run, "append", other)
    cluster(tmp_path, [engine], 6)
    run(plain, 3)
    plain.update(fitness_of(5))
    assert digests(engine.state()) == run(plain, 2) and engine.step == 6


def test_workers_that_share_a_step_begin_no_update(engine_of, tmp_path, monkeypatch):
    """Before the answer, that is; one that has done all chunks of a step, and only that, may."""
    engines, done, result = [engine_of(), engine_of()], [], Worker._result

    def noted(self, *chunk):
        frame = result(self, *chunk)
        if self.engine._fitness is not None:
            done.append({first for seed, first, _ in self.engine.evaluated if seed == self.engine.seed})
        return frame

    monkeypatch.setattr(Worker, "_result", noted)
    cluster(tmp_path, engines, 12)
    assert {digests(engine.state()) for engine in engines if engine.step == 12} <= {run(engine_of(), 12)}
    assert len(done) < 12 and all(len(firsts) == CFG.N_CHUNKS for firsts in done)


# --- the worker -------------------------------------------------------------------------------------------------------

def test_certainty_is_lost_with_a_mistake():
    predictor, size = ChunkPredictor(CFG), CFG.CHUNK_SIZE
    chunks = iter([(k // CFG.N_CHUNKS, k % CFG.N_CHUNKS * size) for k in range(1000)])

    def until_sure():
        for count, (step, first) in enumerate(chunks, 1):
            predictor.handed_out(step, first)
            if predictor.following() == first + size:
                return count

    assert until_sure() == SURE_AFTER + 1
    # the guess after the chunk before that one is wrong once more, in the next step
    for times in 2, 4:
        next(chunks)                                         # another worker gets it
        assert 0 <= until_sure() - times * SURE_AFTER <= 2 * CFG.N_CHUNKS


def test_an_audit_leaves_the_first_chunk_of_a_step_certain():
    """Of two workers that share a step one is handed the other's chunk now and then."""
    predictor, first, other = ChunkPredictor(CFG), CFG.CHUNK_SIZE, 2 * CFG.CHUNK_SIZE
    for step in range(200):
        predictor.handed_out(step, first)
        assert predictor.following() == NO_CHUNK
        if step % 20 == 10:
            predictor.handed_out(step, other)
        assert predictor.first_after(step) == (first if step >= SURE_AFTER else NO_CHUNK)
        assert predictor.first_after(step + 1) == NO_CHUNK, "nothing was handed out in that step"
    predictor.handed_out(200, other)
    assert predictor.first_after(200) == NO_CHUNK


@mark.parametrize("changes", [{}, dict(CHUNK_MEAN_FILTER=0), dict(USE_ADAPTIVE_THRESHOLD=0),
                              dict(ADAPTIVE_THRESHOLD_ALPHA=0.0), dict(FAST_FITNESS=1), dict(LOSS="exact")])
def test_fitness_is_that_of_the_plain_rule(changes):
    """Element by element in Python's integers and floats (SPEC 8), through packing and back."""
    cfg = changed(CHUNK_SIZE=1234, POPULATION_SIZE=1234, **changes)
    rng, unit = default_rng(len(str(changes))), 256 if cfg.LOSS == "exact" else 1
    for losses in rng.integers(0, 1000, 1234), rng.integers(1 << 40, (1 << 40) + 9, 1234), np.full(1234, 7):
        d = (losses[1::2] - losses[::2]).tolist()
        if cfg.CHUNK_MEAN_FILTER and not cfg.FAST_FITNESS and sum(d):
            mean = sum(d) / len(d) / unit
            d = [x + int(math.copysign(abs(mean) ** cfg.CHUNK_MEAN_EXPONENT, mean) * unit) for x in d]
        if cfg.USE_ADAPTIVE_THRESHOLD and not cfg.FAST_FITNESS:
            least = sum(map(abs, d)) / len(d) * float(np.float32(cfg.ADAPTIVE_THRESHOLD_ALPHA))
            wanted = [0 if abs(x) < least else 1 if x > 0 else -1 for x in d]
        else:
            wanted = [(x > 0) - (x < 0) for x in d]
        got = rules.chunk_fitness(losses, cfg)
        assert got.dtype == int8 and got.tolist() == wanted
        packed = steps.pack_digits(got)
        digits = [x % 3 for x in wanted] + [0] * 3
        assert packed == bytes(sum(digits[k + i] * 3 ** i for i in range(5)) for k in range(0, 617, 5))
        equal(rules.unpacked_digits(packed, got.size), got)


@mark.parametrize("constants", [dict(LOSS="exact"), dict(MODEL="gru", N_LAYERS=1, VOCAB_SIZE=256)], ids=str)
def test_the_cpu_engine_begins_ahead(constants):
    """Right and wrong predictions, in a step, across an update and a load: the same losses, changes and digests as
    without."""
    from engine.cpu_engine import CpuEngine
    cfg = egg_config.make(**constants, HIDDEN_DIM=64, CHUNK_SIZE=64, POPULATION_SIZE=128, SEQ_LEN=16)
    tokens = as_data(cfg, default_rng(5).integers(0, cfg.VOCAB_SIZE, 1000))
    plain, ahead = CpuEngine(cfg, tokens, 1), CpuEngine(cfg, tokens)
    for _, fitness in begun_ahead(plain, ahead, 40):
        assert not ahead.begin_update(fitness)
        ahead.begin(0, 40)
        assert ahead.update(fitness) == plain.update(fitness)
        assert not ahead._begun, "begun before the update"
