"""A worker whose engine begins an evaluation before it is asked for it: the same results, and never a stale one."""

import numpy as np
import pytest

import egg_config
from egg_net import SURE_AFTER, ChunkPredictor, Worker
from kit import CFG, FakeEngine, cluster, expected
from model import fitness_digits, parameters

STEPS = 12


class Beginning(FakeEngine):
    """Evaluates and updates at once what the worker begins, as a GPU does, and uses that if it is asked for it. ahead:
    {(step, first, count)} of what was begun before the request; wasted: number of evaluations that were not used."""

    def __init__(self, cfg=CFG):
        self.begun, self.fitness, self.ahead, self.wasted = {}, None, set(), 0
        super().__init__(cfg)

    def load(self, state):
        self.begun, self.fitness = {}, None
        super().load(state)

    def now(self):
        return self.weights, self.seed, self.step

    def begin_update(self, fitness):
        if self.fitness is None or not np.array_equal(self.fitness, fitness):
            before, self.fitness = self.now(), fitness
            super().update(fitness)
            self.after, (self.weights, self.seed, self.step) = self.now(), before
        return True

    def begin(self, first, count):
        before = self.now()
        if self.fitness is not None:
            self.weights, self.seed, self.step = self.after
        if (key := (self.step, first, count)) not in self.begun:
            self.begun[key] = super().evaluate(first, count)
        self.weights, self.seed, self.step = before

    def evaluate(self, first, count):
        assert self.fitness is None
        losses = self.begun.pop((self.step, first, count), None)
        self.ahead.update(self.begun)
        return super().evaluate(first, count) if losses is None else losses

    def update(self, fitness):
        assert self.fitness is not None and np.array_equal(self.fitness, fitness)
        self.fitness, (self.weights, self.seed, self.step) = None, self.after
        self.wasted += sum(step < self.step for step, _, _ in self.begun)
        self.begun = {key: losses for key, losses in self.begun.items() if key[0] == self.step}
        self.ahead.update(self.begun)
        return 100 + self.step


@pytest.mark.parametrize("slice_size", [64, 10])
def test_a_worker_alone_predicts_every_chunk(tmp_path, monkeypatch, slice_size):
    """It begins with the first slice of each; audits go nowhere without a second worker."""
    monkeypatch.setattr(Worker, "slice", slice_size)
    monkeypatch.setattr(Worker, "_measure", lambda self, count, seconds: setattr(self, "speed", 1.0))
    engine = Beginning()
    server = cluster(tmp_path, [engine], STEPS)
    packed, digests = expected(STEPS)
    assert engine.state().digests() == digests and server.run.step == STEPS
    assert engine.evaluated == sorted(engine.evaluated) and len(set(engine.evaluated)) == len(engine.evaluated)
    assert sum(count for _, _, count in engine.evaluated) <= (STEPS + 1) * CFG.POPULATION_SIZE
    unsure = SURE_AFTER + 1                          # of the first chunk there is no guess
    chunks = {(step, first) for step, first, _ in engine.ahead}
    assert all(first % CFG.CHUNK_SIZE == 0 for _, first in chunks)
    assert len(chunks) == len(engine.ahead) >= STEPS * CFG.N_CHUNKS - unsure and engine.wasted == 0


def test_several_workers_waste_little(tmp_path):
    """Three workers, which steal chunks from each other: a step of each has the fitness that it has without them."""
    cfg = CFG.changed(POPULATION_SIZE=8 * CFG.CHUNK_SIZE, AUDIT_RATE=0.2)
    engines = [Beginning(cfg) for _ in range(3)]
    cluster(tmp_path, engines, 40, cfg)
    _, digests = expected(40, cfg)
    assert {engine.state().digests() for engine in engines if engine.step == 40} == {digests}
    for engine in engines:
        assert engine.wasted <= 1 + len(engine.evaluated) / SURE_AFTER


def test_certainty_is_lost_with_a_mistake():
    predictor, size = ChunkPredictor(CFG), CFG.CHUNK_SIZE
    chunks = iter([(k // CFG.N_CHUNKS, k % CFG.N_CHUNKS * size) for k in range(1000)])

    def until_sure():
        for count in range(1, 1000):
            step, first = next(chunks)
            predictor.handed_out(step, first)
            if predictor.following(step) >= 0:
                assert predictor.following(step) == (first + size) % CFG.POPULATION_SIZE
                assert predictor.following(step + 1) == -1, "nothing was handed out in that step"
                return count

    assert until_sure() == SURE_AFTER + 1
    next(chunks)                                             # another worker gets it
    assert until_sure() == 2 * SURE_AFTER + 1
    next(chunks)
    assert until_sure() == 4 * SURE_AFTER + 1


@pytest.mark.parametrize("changes", [{}, dict(CHUNK_MEAN_FILTER=0), dict(USE_ADAPTIVE_THRESHOLD=0),
                                     dict(ADAPTIVE_THRESHOLD_ALPHA=0.0), dict(FAST_FITNESS=1), dict(LOSS="exact")])
def test_fitness_is_that_of_the_plain_rule(changes):
    """Element by element in Python's integers and floats (SPEC 8), through packing and back."""
    cfg = CFG.changed(**{"CHUNK_SIZE": 1234, "POPULATION_SIZE": 1234, **changes})
    rng = np.random.default_rng(len(str(changes)))
    for losses in rng.integers(0, 1000, 1234), rng.integers(1 << 40, (1 << 40) + 9, 1234), np.full(1234, 7):
        d = [int(odd) - int(even) for even, odd in zip(losses[::2], losses[1::2])]
        if cfg.CHUNK_MEAN_FILTER and not cfg.FAST_FITNESS and sum(d):
            mean = sum(d) / len(d) / cfg.LOSS_SCALE
            d = [x + int((1 if mean > 0 else -1) * abs(mean) ** cfg.CHUNK_MEAN_EXPONENT * cfg.LOSS_SCALE) for x in d]
        if cfg.USE_ADAPTIVE_THRESHOLD and not cfg.FAST_FITNESS:
            least = sum(map(abs, d)) / len(d) * float(np.float32(cfg.ADAPTIVE_THRESHOLD_ALPHA))
            wanted = [0 if abs(x) < least else 1 if x > 0 else -1 for x in d]
        else:
            wanted = [(x > 0) - (x < 0) for x in d]
        got = fitness_digits.chunk_fitness(losses, cfg)
        assert got.dtype == np.int8 and got.tolist() == wanted
        packed = fitness_digits.pack_ternary(got)
        digits = [{-1: 2}.get(x, x) for x in wanted] + [0] * 3
        assert packed == bytes(sum(digits[k + i] * 3 ** i for i in range(5)) for k in range(0, 617, 5))
        assert (fitness_digits.unpack_ternary(packed, got.size) == got).all()


@pytest.mark.parametrize("constants", [dict(LOSS="exact"), dict(MODEL="gru", N_LAYERS=1, VOCAB_SIZE=256)], ids=str)
def test_the_cpu_engine_begins_ahead(constants):
    """Right and wrong predictions, in a step, across an update and a load: the same losses, changes and digests as
    without."""
    from engine import cpu_engine
    cfg = egg_config.make(**constants, HIDDEN_DIM=64, CHUNK_SIZE=64, POPULATION_SIZE=128, SEQ_LEN=16)
    tokens = np.random.default_rng(5).integers(0, cfg.VOCAB_SIZE, 1000).astype(
        np.uint8 if cfg.VOCAB_SIZE == 256 else np.uint32)
    plain, ahead = cpu_engine.CpuEngine(cfg, tokens, 1), cpu_engine.CpuEngine(cfg, tokens)
    for step in range(3):
        for first, count, following in ((0, 40, (40, 24)), (40, 24, (64, 64)), (0, 64, (64, 64)), (64, 64, (0, 64)),
                                        (2, 30, None), (64, 64, None)):
            ahead.begin(first, count)
            if following:
                ahead.begin(*following)
            losses = ahead.evaluate(first, count)
            assert np.array_equal(losses, plain.evaluate(first, count)), (step, first)
            assert (first, count) not in ahead._begun and (following is None or following in ahead._begun)
        assert len(np.unique(losses)) > 2
        fitness = np.random.default_rng(step).integers(-1, 2, cfg.N_PAIRS).astype(np.int8)
        assert not ahead.begin_update(fitness)
        ahead.begin(0, 40)
        assert ahead.update(fitness) == plain.update(fitness) and ahead.digest() == plain.digest()
        assert not ahead._begun, "begun before the update"
    ahead.begin(0, 40)
    for engine in (plain, ahead):
        engine.load(parameters.initial_state(cfg))
    assert np.array_equal(ahead.evaluate(0, 40), plain.evaluate(0, 40)), "what was begun before a load is stale"
