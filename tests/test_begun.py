"""The host's side of the CUDA engine, without a GPU: what is begun ahead is used where it is right, and leaves nothing
behind where it is not. Arrays on the device are NumPy's, a launch does at once what a kernel would do."""

from types import SimpleNamespace
import zlib

import numpy as np
import pytest

import egg_config
from cluster import history
from model import fitness_digits, parameters, rules, seeds
from egg_net import Worker
from kit import CFG, cluster

TOKENS = 1 << 20
cuda_engine = pytest.importorskip("engine.cuda_engine")


class Array(np.ndarray):
    """A device array, as far as the engine uses one."""

    def copy_to_device(self, source, stream=0):
        self[...] = np.asarray(source).reshape(self.shape)

    def copy_to_host(self, to=None, stream=0):
        if to is None:
            return np.array(self)
        to[...] = self


def device_array(shape, dtype):
    return np.full(np.prod(shape) * np.dtype(dtype).itemsize, 7, np.uint8).view(dtype).reshape(shape).view(Array)


class Kernel:
    """launches[grid...](*arguments) calls a function."""

    def __init__(self, function):
        self.function = function

    def __getitem__(self, _):
        return self.function


class Forward:
    """Losses depend on the packed weights, the overlay, the windows, and all of the job. Packing is a copy."""

    packed_bytes, kernels = 8, {}

    def __init__(self, evaluated):
        self.evaluated = evaluated

    def tables(self):
        pass

    def scratch_bytes(self, pairs):
        return 100 * pairs

    def clean_scratch_bytes(self, windows, length):
        return windows

    def pack(self, stream, weights, packed):
        packed[:] = weights[:8]

    def evaluate(self, stream, weights, packed, overlay, windows, job, offset, pairs, scratch, losses):
        assert losses.size == 2 * pairs and len(scratch) >= 100 * pairs and windows.size % pairs == 0
        self.evaluated.append((int(job[0]), 2 * (int(job[1]) + offset), 2 * pairs))
        seed = zlib.crc32(packed.tobytes() + overlay.tobytes() + job[[0, 2, 3]].tobytes())
        numbers = np.repeat(windows.reshape(pairs, -1).astype(np.int64).sum(1), 2) * 1000 + np.arange(2 * pairs) % 2
        numbers += np.repeat(job[1] + offset + np.arange(pairs), 2)
        losses[:] = seeds.hash32(seed, numbers.astype(np.uint64)) % 1000

    def validate(self, stream, weights, packed, windows, count, length, scratch, nats):
        nats[:] = zlib.crc32(packed.tobytes() + weights.tobytes()) % 1000


class Update:
    def __init__(self, cfg, kernels, budget):
        self.cfg = cfg
        self.fit, self.changed = device_array(cfg.N_PAIRS + 256, np.int8), device_array(1, np.int32)
        self.rates = device_array(len(parameters.tensors(cfg)), np.float32)
        self.windows = device_array(cfg.N_PAIRS * (cfg.SEQ_LEN + 1), np.int32)

    bytes_needed = staticmethod(lambda cfg: 0)

    def launches(self, stream, job, weights, moments, overlay):
        def optimize():
            assert self.changed[0] == 0
            seen = self.windows.tobytes() if self.cfg.SEEN_VOTES > 1 else b""
            digest = zlib.crc32(self.fit.tobytes() + job.tobytes() + weights.tobytes() + moments.tobytes() + seen)
            weights[:4] = np.frombuffer(digest.to_bytes(4, "little"), np.int8)
            moments[0, 0] += self.rates[0]
            overlay[0] += 1
            self.changed[0] = digest % 1000

        return [("optimize", optimize)]


@pytest.fixture
def engine_of(monkeypatch):
    """Makes engines of cfg. free: [bytes that the device has left]; evaluated, of an engine: [(seed, first, count)]."""
    free = [0]

    def kernels(cfg, cc, limit, token_type, silent):
        def cut_windows(tokens, place, job, first, size, followers, length, windows):
            assert place[0] == steps[int(place[0])] * cfg.SEQ_LEN % (tokens.size - cfg.SEQ_LEN)
            n = windows.size // length
            windows[:] = rules.windows(cfg, np.asarray(tokens), steps[int(place[0])], int(place[1]), n).ravel()

        def digest(weights, moments, overlay, out):
            out += np.frombuffer(zlib.crc32(weights.tobytes() + moments.tobytes() + overlay.tobytes())
                                 .to_bytes(4, "little") * 4, np.uint64)

        steps = {step * cfg.SEQ_LEN % (TOKENS - cfg.SEQ_LEN): step for step in range(400)}
        return Forward([]), {"cut_windows": Kernel(cut_windows), "digest": Kernel(digest)}, {"digest": []}

    gpu = SimpleNamespace(name="a GPU", compute_capability=(9, 0))
    event = SimpleNamespace(record=lambda stream: None, synchronize=lambda: None)
    fake = SimpleNamespace(
        select_device=lambda number: None, get_current_device=lambda: gpu, event=lambda timing: event,
        stream=lambda: SimpleNamespace(synchronize=lambda: None), device_array=device_array,
        device_array_like=lambda array: device_array(array.shape, array.dtype), pinned_array=np.zeros,
        to_device=lambda array, stream=0: np.array(array).view(Array),
        current_context=lambda: SimpleNamespace(get_memory_info=lambda: SimpleNamespace(free=free[0])))
    monkeypatch.setattr(cuda_engine, "cuda", fake)
    monkeypatch.setattr(cuda_engine, "kernels", kernels)
    monkeypatch.setattr(cuda_engine.ptx, "shared_limit", lambda gpu: 0)
    monkeypatch.setattr(cuda_engine, "compile_all", lambda *args: 0.0)
    monkeypatch.setattr(cuda_engine.update, "Update", Update)
    monkeypatch.setattr(cuda_engine, "Replay", lambda stream, enqueue: enqueue)
    tokens = np.random.default_rng(3).integers(0, 256, TOKENS).astype(np.uint8)

    def make(cfg=CFG):
        engine = cuda_engine.CudaEngine(cfg, tokens)
        engine.evaluated = engine._forward.evaluated
        return engine

    make.free = free
    free[0] = 1 << 30
    return make


def fitness_of(seed):
    return np.random.default_rng(seed).integers(-1, 2, CFG.N_PAIRS).astype(np.int8)


USES = {"nothing": lambda e: None, "evaluate": lambda e: e.evaluate(32, 16).tolist(), "digest": lambda e: e.digest(),
        "state": lambda e: e.state().digests(), "validate": lambda e: e.validate(np.zeros((3, 9), np.int32)),
        "another update": lambda e: (e.update(fitness_of(9)), e.digest()),
        "load": lambda e: (e.load(parameters.initial_state(e.cfg)), e.digest())}


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("memory", [1 << 30, 1 << 10])
@pytest.mark.parametrize("seen, on_device", [(1, True), (4, True), (4, False)])
def test_an_update_that_is_begun_shows_nowhere(engine_of, use, memory, seen, on_device):
    """Whatever the engine is used for then, it answers like one that has not begun; so it does after the update."""
    cfg = CFG.changed(SEEN_VOTES=seen, SIGMA_SCHEDULE=((1, 2), (4, 3)), LR_SCHEDULE=((0, 0.5), (2, 0.25), (3, 0.125)))
    engine_of.free[0] = 1 << 30 if on_device else 1 << 21    # too little for the tokens
    plain, ahead = engine_of(cfg), engine_of(cfg)
    assert (plain._tokens is not None) == on_device
    for k in range(4):
        assert ahead.evaluate(0, 32).tolist() == plain.evaluate(0, 32).tolist()
        engine_of.free[0] = memory
        ahead.begin(64, 32)                                  # a guess that is wrong
        assert ahead.begin_update(fitness_of(k)) == (memory > 1 << 20)
        ahead.begin(0, 32)
        assert (ahead.step, ahead.seed) == (plain.step, plain.seed)
        assert USES[use](ahead) == USES[use](plain)
        assert ahead.evaluate(32, 32).tolist() == plain.evaluate(32, 32).tolist()
        if ahead.begin_update(fitness_of(k + 10)):
            ahead.begin(0, 32)
            ahead.begin_update(fitness_of(k + 10))
            assert ahead._begun
        assert ahead.update(fitness_of(k + 10)) == plain.update(fitness_of(k + 10))
        assert ahead.digest() == plain.digest() and ahead.state().digests() == plain.state().digests()
        assert (ahead.step, ahead.seed) == (plain.step, plain.seed)


def run(engine, steps):
    """As one engine without a network does it: digests of the state."""
    for _ in range(steps):
        losses = [engine.evaluate(first, CFG.CHUNK_SIZE) for first in range(0, CFG.POPULATION_SIZE, CFG.CHUNK_SIZE)]
        engine.update(np.concatenate([fitness_digits.chunk_fitness(x, CFG) for x in losses]))
    return engine.state().digests()


def test_what_is_begun_is_kept_apart(engine_of):
    """In whatever order evaluations and updates are begun and asked for."""
    plain, ahead, rng = engine_of(), engine_of(), np.random.default_rng(8)
    start = plain.state()

    def members():
        return int(rng.integers(0, 5)) * 8, int(rng.integers(1, 5)) * 4

    for _ in range(600):
        kind = rng.choice(["begin", "begin", "evaluate", "evaluate", "begin update", "update", "digest", "load"],
                          p=[0.2, 0.1, 0.2, 0.1, 0.2, 0.15, 0.04, 0.01])
        if kind == "begin":
            ahead.begin(*members())
            assert len(ahead._begun) < 3
        elif kind == "begin update":
            ahead.begin_update(fitness_of(int(rng.integers(0, 2))))
        elif kind == "evaluate":
            some = members()
            assert ahead.evaluate(*some).tolist() == plain.evaluate(*some).tolist()
        elif kind == "update":
            fitness = fitness_of(int(rng.integers(0, 2)))
            assert ahead.update(fitness) == plain.update(fitness)
        elif kind == "digest":
            assert ahead.digest() == plain.digest()
        else:
            ahead.load(start), plain.load(start)
    assert ahead.state().digests() == plain.state().digests()


def test_a_worker_alone_waits_for_nobody(engine_of, tmp_path):
    """It begins every update and, once it is sure, the evaluation after it before the coordinator answers. Nothing is
    evaluated twice."""
    engine, wanted, begun = engine_of(), run(engine_of(), 12), []
    engine._set_update = lambda fitness: (begun.append(engine.step), type(engine)._set_update(engine, fitness))
    engine._undo_update = lambda: pytest.fail("undone") if engine._fitness is not None else None
    server = cluster(tmp_path, [engine], 12)
    assert server.run.step == 12 and begun == list(range(12))
    del engine._undo_update
    assert engine.state().digests() == wanted
    assert len(set(engine.evaluated)) == len(engine.evaluated)


def test_a_step_that_ends_otherwise_is_undone(engine_of, tmp_path, monkeypatch):
    """The coordinator has another fitness than the worker that has done the whole step: the update is of that."""
    engine, plain = engine_of(), engine_of()
    append = history.Run.append

    def other(self, packed, *rest):
        return append(self, fitness_digits.pack_ternary(fitness_of(5)) if self.step == 3 else packed, *rest)

    monkeypatch.setattr(history.Run, "append", other)
    cluster(tmp_path, [engine], 6)
    run(plain, 3)
    plain.update(fitness_of(5))
    assert engine.state().digests() == run(plain, 2) and engine.step == 6


def test_workers_that_share_a_step_begin_no_update(engine_of, tmp_path, monkeypatch):
    """Before the answer, that is; one that has done all chunks of a step, and only that, may."""
    engines, done, note = [engine_of(), engine_of()], [], Worker._note

    def noted(self, first, fitness):
        note(self, first, fitness)
        if self.engine._fitness is not None:
            done.append({first for seed, first, _ in self.engine.evaluated if seed == self.engine.seed})

    monkeypatch.setattr(Worker, "_note", noted)
    cluster(tmp_path, engines, 12)
    wanted = run(engine_of(), 12)
    assert {engine.state().digests() for engine in engines if engine.step == 12} <= {wanted}
    assert len(done) < 12 and all(len(firsts) == CFG.N_CHUNKS for firsts in done)
