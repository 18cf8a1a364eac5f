"""Work that is begun before it is asked for: it is used where it is right and leaves nothing behind where it is not."""

import math

import numpy as np
from numpy import int8
from numpy.random import default_rng
from pytest import mark

import egg_config
from egg_net import ChunkPredictor, NO_CHUNK, SURE_AFTER, Worker
from model import rules, steps
from coordinators import cluster
from engines_compared import begun_ahead
from fakes import CFG, FakeEngine, UNITS, changed, expected
from readings import as_data, equal

STEPS = 30


class Ahead(FakeEngine):
    """Notes what is begun: of evaluations (step, first, count), those that were there when they were asked for, and
    the steps of updates. None may be undone."""

    def __init__(self, cfg=CFG):
        super().__init__(cfg)
        self.begun, self.ready, self.work, self.updates, self.fitness = set(), set(), [], [], None

    def begin(self, first, count):
        if (first, count) not in self.begun:
            self.begun.add((first, count))
            self.work.append((self.step + (self.fitness is not None), first, count))

    def begin_update(self, fitness):
        assert self.fitness in (None, fitness)
        if self.fitness is None:
            self.updates.append(self.step)
            self.fitness, self.begun = fitness, set()
        return True

    def update(self, fitness):
        self.begin_update(fitness)
        self.fitness = None
        return super().update(fitness)

    def evaluate(self, first, count):
        assert self.fitness is None
        if (first, count) in self.begun and first % CFG.CHUNK_SIZE == 0:
            self.ready.add((self.step, first))
        self.begin(first, count)
        self.begun.remove((first, count))
        return super().evaluate(first, count)


# --- the worker -------------------------------------------------------------------------------------------------------

@mark.parametrize("slice_size", [64, 10])
def test_a_worker_alone_waits_for_nobody(tmp_path, monkeypatch, slice_size):
    """It begins every update and, once it is sure, the first slice of every chunk before the coordinator answers.
    Nothing is evaluated twice, and nothing that is begun changes the run."""
    monkeypatch.setattr(Worker, "slice", slice_size)
    monkeypatch.setattr(Worker, "_measure", lambda self, count, seconds: setattr(self, "speed", 1.0))
    engine = Ahead()
    assert cluster(tmp_path, [engine], STEPS).run.step == STEPS and engine.updates == [*range(STEPS)]
    assert engine.digest() == expected(STEPS)[1] and len(set(engine.work)) == len(engine.work)
    least = STEPS * CFG.N_CHUNKS - 2 * SURE_AFTER - 1
    assert len(engine.ready) >= least, "unsure: first chunks of steps, others, the first"


def test_workers_that_share_a_step_begin_no_update(tmp_path, monkeypatch):
    """Before the answer, that is; one that has done all chunks of a step, and only that, may."""
    engines, done, result = [Ahead(), Ahead()], [], Worker._result

    def noted(self, *chunk):
        frame = result(self, *chunk)
        if self.engine.fitness is not None:
            done.append({first for step, first, _ in self.engine.evaluated if step == self.engine.step})
        return frame

    monkeypatch.setattr(Worker, "_result", noted)
    cluster(tmp_path, engines, 12)
    assert {engine.digest() for engine in engines if engine.step == 12} == {expected(12)[1]}
    assert len(done) < 12 and all(len(firsts) == CFG.N_CHUNKS for firsts in done)


def test_with_local_steps_every_update_is_begun_as_it_will_be_cooled(tmp_path, monkeypatch):
    """None is undone, though the rate falls in most steps."""
    monkeypatch.undo()
    cfg = UNITS.changed(LOCAL_STEPS=2, VOTE_LEVELS=7)
    engine = Ahead(cfg)
    assert cluster(tmp_path, [engine], 20, cfg).run.step == 20 and engine.updates == [*range(20)]


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
        ahead.begin(0, 40)
        assert ahead.update(fitness) == plain.update(fitness)
        assert not ahead._begun, "begun before the update"
