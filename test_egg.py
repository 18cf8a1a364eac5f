"""The CPU engine and the model, held against recordings of the C++ system (tests/golden/) and against model.reading, a
plain reading of the SPEC, in every configuration tried.
"""

import numpy as np
import pytest

import egg_config
from engine import cpu_engine, cpu_rules
from model import integer_tables, parameters, steps
from model.reading import Reading
from readings import (TINY, callable_by_python, drawn, equal, hold_against_the_reading, random_config, random_gru,
                      votes_on)
from recordings import (PART_OF_E, digest_of_part, digests, golden, hold_against_recording, in_part,
                        recorded_generation, recorded_updates)

COMPILED = ["compiled", "compiled_gru"]                      # for tests/conftest.py


# --- recordings, and the plain reading --------------------------------------------------------------------------------

@pytest.mark.parametrize("name", "ABD")
def test_recorded_runs(name):
    hold_against_recording(cpu_engine.CpuEngine, name)


def test_recorded_default_configuration():
    """Golden E: losses of step 0, what the C++ system wrote before the updates, and three updates of a tenth of all
    weights (in_part). An update of all takes a CPU 16 s; the deep run has five of them, and the GPU."""
    cfg, tokens, z = golden("E")
    engine = cpu_engine.CpuEngine(cfg, tokens)
    for chunk in range(cfg.N_CHUNKS):
        equal(engine.evaluate(chunk * cfg.CHUNK_SIZE, 64), z["loss_head"][chunk, :64])
    hold_against_recorded_generation(engine, 0)
    engine._tensors, found = [*filter(in_part, engine._tensors)], []
    recorded_updates(engine, 3, lambda state, k: found.append(digest_of_part(cfg, state)))
    assert tuple(found) == PART_OF_E[:3]


@pytest.mark.deep
def test_recorded_updates_of_the_default_configuration():
    """Every weight in five updates of golden E, and what the C++ system wrote after them. Its presence penalty (SPEC
    11) is emulated: 51 units off the logit for every occurrence."""
    cfg, tokens, _ = golden("E")
    hold_against_recorded_generation(cpu_engine.CpuEngine(cfg, tokens), 5)


def hold_against_recorded_generation(engine, step):
    """By the logits of the plain reading, less the penalty of the C++ system. The engine draws by the same logits."""
    cfg, (recorded, prompt) = engine.cfg, recorded_generation(engine, step)
    z, settings = Reading(cfg, engine.state()).logits(recorded), dict(temp=cfg.SAMPLING_TEMP, min_p=cfg.SAMPLING_MIN_P,
                                                                      penalty=0.0)

    def draw(t):
        return drawn(cfg, z[t], (), t, engine.seed, **settings)

    for t in range(prompt - 1, len(recorded) - 1):
        assert next(engine.generate(recorded[:t + 1], 1, engine.seed, **settings)) == draw(t), t
        np.subtract.at(z[t], recorded[:t + 1], 51)
        assert draw(t) == recorded[t + 1], t


@pytest.mark.parametrize("seed", range(9))
@pytest.mark.parametrize("draw", [random_config, random_gru])
def test_the_engine_does_what_the_plain_reading_does(draw, seed):
    rng = np.random.default_rng(seed)
    cfg = draw(rng, ADAPTIVE_NOISE_MODE=seed % 3)
    tokens = rng.integers(0, 8 if seed % 2 else cfg.VOCAB_SIZE, 500).astype(np.uint32)
    hold_against_the_reading(cpu_engine.CpuEngine(cfg, tokens, threads=1 + seed % 2), rng)


def test_exact_loss_in_fixed_point():
    """Integer log2 against float64 over the whole range of Q, and no overflow at its ends."""
    cfg = egg_config.make(LOSS="exact")
    unit, rng, loss = integer_tables.log_unit(cfg), np.random.default_rng(5), callable_by_python(cpu_rules.loss)
    for q in [1 << 18, (1 << 18) + 1, (1 << 36) - 1, 1 << 36, *(int(2 ** e) for e in rng.uniform(18, 36, 300))]:
        exact = 256 * 6 * np.log(q / 2 ** 18)
        assert -1.01 <= loss(1, q, 0, 0, 18, unit, 256) - exact <= 0.01, q
    assert loss(1, 1 << 36, 1 << 23, -(1 << 23), 18, unit, 256) > 1 << 32


def test_divisions_by_a_reciprocal_are_exact():
    """What the CPU engine multiplies by in place of the divisions of SPEC 5 and of the recurrent model."""
    rng = np.random.default_rng(9)
    divide, quotient = callable_by_python(cpu_rules.divide), callable_by_python(cpu_rules.quotient)
    for p, d in zip(rng.integers(-127 * 381, 127 * 381 + 1, 3000).tolist(), rng.integers(1, 128, 3000).tolist()):
        p = p // d * d + int(rng.integers(-1, 2)) if p % 2 else p                     # half of them beside a multiple
        assert divide(np.int32(p), np.int32(d)) == int(p / d), (p, d)
        assert quotient(np.int32(p), np.int32(d), np.float32(1) / np.float32(d)) == np.clip(p // d, -127, 127), (p, d)


def test_sgd_accumulates_votes():
    cfg = egg_config.make(**TINY, VOCAB_SIZE=256, CHUNK_SIZE=8, POPULATION_SIZE=8, OPTIMIZER="sgd",
                          LR_SCHEDULE=((0, 0.01),))
    engine = cpu_engine.CpuEngine(cfg)
    before, fitness = engine.state(), steps.pack_digits(np.array([1, -1, 0, 1], np.int8))
    changed, after = engine.update(fitness), engine.state()
    votes, rate = np.zeros((2, before.weights.size), np.float32)
    for t in parameters.tensors(cfg):
        votes[t.span] = votes_on(cfg, before, t, fitness)
        rate[t.span] = np.float32(np.float32(0.01) * np.float32(t.lr_scale) / 2)
    acc = rate * votes
    step = np.where(acc >= 1, 1, np.where(acc <= -1, -1, 0))
    assert changed == np.count_nonzero(step) > 100
    equal(after.weights, before.weights + step)
    equal(after.moments[:, 2], acc - step)
    assert not after.moments[:, :2].any()


# --- what the model is made of ----------------------------------------------------------------------------------------

def test_tensors_cover_the_flat_arrays_once():
    for cfg in (egg_config.make(), egg_config.make(HIDDEN_DIM=96, HEAD_DIM=32, N_LAYERS=3, VOCAB_SIZE=300)):
        weights, overlay = np.zeros(parameters.n_weights(cfg), int), np.zeros(parameters.n_overlay(cfg), int)
        for t in parameters.tensors(cfg):
            weights[t.span] += 1
            overlay[t.overlay_a:t.overlay_a + t.cols] += 1
            if t.matrix:
                overlay[t.overlay_b:t.overlay_b + t.rows] += 1
        assert (weights == 1).all() and (overlay == 1).all()


def test_initial_model_of_the_default_configuration():
    cfg, _, z = golden("E")
    assert digests(parameters.initial_state(cfg))[0] == str(z["init_model_sha256"])
    assert parameters.products_per_token(cfg) == 5767168
