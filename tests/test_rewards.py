"""Rewards as votes on positions (SPEC 22): the rules against a plain writing of them, and votes of texts on both models
against plain readings."""

import numpy as np
import pytest

from activations_compared import random_configuration, votes_of_windows
from engine import cpu_engine
from model import activations, parameters, rules, soft_targets, steps
from readings import equal

COMPILED = ["compiled", "compiled_gru"]                      # for conftest.py


def nearest(x, y):
    """x / y, halves away from zero."""
    return int(np.sign(x)) * ((2 * abs(x) + y) // (2 * y))


def plain_advantages(earned, each):
    more = []
    for at in range(0, len(earned), each):
        known = [round(65536 * x) for x in earned[at:at + each] if x is not None]
        more += [0 if x is None else nearest(round(65536 * x) * len(known) - sum(known), len(known))
                 for x in earned[at:at + each]]
    some = [abs(x) for x in more if x]
    return [int(np.sign(x)) * sum(abs(x) >= max(1, -(-(4 * level - 2) * sum(some) // (7 * len(some))))
                                  for level in range(1, 8)) for x in more]


@pytest.mark.parametrize("seed", range(20))
def test_advantages(seed):
    rng = np.random.default_rng(seed)
    cfg = random_configuration(1000)[0].changed(OBJECTIVE_TEXTS=(each := int(rng.integers(2, 9))))
    earned = (rng.integers(0, 3, 8 * each) * 10.0 ** rng.integers(-4, 5, 8 * each) * rng.choice([1, -1])).tolist()
    for i in rng.integers(0, len(earned), len(earned) // 4 * (seed % 2)):
        earned[i] = None
    earned[:each] = [earned[0]] * each                        # equal rewards
    got = activations.advantages(cfg, earned)
    assert got.tolist() == plain_advantages(earned, each)
    assert not got[:each].any() and set(got) > {0} and abs(got).max() <= 7


def test_one_text_of_eight_that_is_right_weighs_as_much_as_the_others():
    cfg = random_configuration(1000)[0].changed(OBJECTIVE_TEXTS=8)
    assert activations.advantages(cfg, [1.0] + 7 * [0.0] + 8 * [0.5]).tolist() == [7] + 7 * [-1] + 8 * [0]
    assert not activations.advantages(cfg, 16 * [None]).any()
    assert not activations.advantages(cfg, [3.0] + 15 * [None]).any()


@pytest.mark.parametrize("share, chunks", [(0.5, 8), (0.1, 8), (0.5, 1), (0.0, 4), (1.0, 4), (0.35, 3)])
def test_a_share_of_the_chunks_votes_from_the_data(share, chunks):
    cfg = random_configuration(1000)[0]
    cfg = cfg.changed(TEXT_SHARE=share, POPULATION_SIZE=chunks * cfg.CHUNK_SIZE)
    text = [[activations.is_text(cfg, step, chunk) for chunk in range(chunks)] for step in range(400)]
    assert abs(np.mean(text) - share) < 0.01
    assert all(abs(sum(of_step) - share * chunks) < 1 for of_step in text)
    for step, of_step in enumerate(text):
        if any(of_step):
            loss = sum(activations.text_loss(cfg, step, 1000) for _ in range(sum(of_step)))
            assert 1000 * chunks - sum(of_step) < loss <= 1000 * chunks


def test_texts_of_a_prompt_have_its_number_and_draws_of_their_own():
    cfg = random_configuration(1000)[0].changed(OBJECTIVE_TEXTS=4)
    choices, draws = activations.text_draws(cfg, (1 << 32) - 3, 8, 8)
    want = [int(steps.hash32((1 << 32) - 3 + g & 0xFFFFFFFF, 1 << 28)) for g in (8, 12)]
    assert choices.tolist() == 4 * want[:1] + 4 * want[1:]
    assert draws.tolist() == [int(steps.hash32((1 << 32) - 3 + g & 0xFFFFFFFF, 1 << 29)) for g in range(8, 16)]


def some_texts(seed):
    """(Config, training tokens, arguments of an engine's `vote`): texts and advantages drawn by a seed."""
    cfg, data = random_configuration(seed)
    rng, n = np.random.default_rng(seed), cfg.CHUNK_SIZE // cfg.GROUP_SIZE
    texts = [rng.integers(0, cfg.VOCAB_SIZE, rng.integers(3, 15)) for _ in range(n)]
    own = [rng.random(len(text)) < 0.7 for text in texts]
    own[0][-1] = True
    advantages = rng.integers(-7, 8, n).astype(np.int8)
    advantages[0] = rng.choice([-7, -2, 3])
    windows, weights, counted = activations.text_windows(texts, own, advantages)
    assert len(windows) == np.count_nonzero(advantages) and windows.shape[1] % 8 == 1
    return cfg, data, (n, windows, weights, counted, float(rng.choice([0.25, 1.0, 1.5])))


@pytest.mark.parametrize("seed", [1000, 1001, 1002, 1005, 1007])
def test_votes_of_texts_are_those_of_the_plain_reading(seed):
    cfg, data, (first, windows, weights, counted, temperature) = some_texts(seed)
    engine = cpu_engine.CpuEngine(cfg, data, threads=1)
    got = rules.unpacked_digits(engine.vote(first, windows, weights, counted, temperature), cfg.CHUNK_DIGITS)
    reading = activations.text_reading(cfg, counted.shape[1], temperature)
    want, _ = votes_of_windows(reading, parameters.initial_state(cfg), windows, first, weights, counted.astype(int))
    equal(got, want)
    assert len(np.unique(got)) == 3


@pytest.mark.gpu
@pytest.mark.parametrize("seed", range(1000, 1004))
def test_votes_of_texts_on_the_gpu(seed):
    from engine import cuda_engine
    cfg, data, arguments = some_texts(seed)
    gpu, cpu = cuda_engine.CudaEngine(cfg, data), cpu_engine.CpuEngine(cfg, data, threads=1)
    for _ in range(2):                                       # launches, then a graph of them
        assert gpu.vote(*arguments) == cpu.vote(*arguments)
        assert gpu.evaluate(0, cfg.CHUNK_SIZE) == cpu.evaluate(0, cfg.CHUNK_SIZE)


def test_text_is_a_window_of_full_weight():
    cfg, data = random_configuration(1002)
    cfg = activations.text_reading(cfg, cfg.SEQ_LEN, 1.0)
    n = cfg.CHUNK_SIZE // cfg.GROUP_SIZE
    engine = cpu_engine.CpuEngine(cfg, data, threads=1)
    windows = soft_targets.windows(cfg, data, None, 0, engine.seed, 0, n)
    weights, counted = np.full(n, 7, np.int8), np.ones((n, cfg.SEQ_LEN), bool)
    assert engine.vote(0, windows, weights, counted, 1.0) == engine.evaluate(0, cfg.CHUNK_SIZE)[0]
