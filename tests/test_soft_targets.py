"""Soft targets (SPEC 7): what follows a context, which of it is drawn, and what that makes of the losses."""

import functools
import tracemalloc

import numpy as np
from pytest import mark, raises

import readings
from engine.cpu_engine import CpuEngine
from model import rules, soft_targets, steps
from readings import equal, plain_losses
from tools import prepare

COMPILED = ["compiled", "compiled_gru"]                      # for conftest.py
BASE = readings.BASE.changed(HEAD_DIM=64, LOSS="exact")
GRU = dict(MODEL="gru", STATE_TOKENS=3, GROUP_SIZE=4)
WIDE = dict(VOCAB_SIZE=300, USE_SAME_DATA=1)


def data(cfg):
    """Tokens of few kinds, so that contexts repeat, with the largest among them."""
    kinds = np.array([0, 1, 5, cfg.VOCAB_SIZE - 1], np.uint8 if cfg.VOCAB_SIZE == 256 else np.uint32)
    return kinds[np.random.default_rng(3).integers(0, kinds.size, 400)]


def following(tokens, place, context):
    """What follows, anywhere in the data, the tokens before a place."""
    before = [tokens[place - back] for back in range(context, 0, -1)]
    return sorted(tokens[p] for p in range(tokens.size) if [tokens[p - b] for b in range(context, 0, -1)] == before)


of_every_kind = mark.parametrize("values", (dict(), GRU, WIDE), ids=("transformer", "gru", "tokens"))


@mark.parametrize("context", (1, 2, 3, 6))
@of_every_kind
def test_the_drawn_targets_are_those_of_the_specification(values, context):
    cfg = BASE.changed(**values, SOFT_TARGETS=((0, context),))
    tokens, T, seed = data(cfg), cfg.SEQ_LEN, 2**32 - 3          # seeds of later pairs wrap around
    cut = soft_targets.windows(cfg, tokens, soft_targets.followers(cfg, tokens, context), 61, seed, 4, 6)
    plain = rules.windows(cfg, tokens, 61, 4, 6)
    assert cut.shape == (6, cfg.WINDOW)
    equal(cut[:, :plain.shape[1]], plain)
    for pair, start in enumerate(rules.window_starts(cfg, tokens.size, 61, 4, 6)):
        for t in range(T):
            known = following(tokens, (start + t + 1) % tokens.size, context)
            drawn = [known[steps.hash32(seed + 4 + pair & 0xFFFFFFFF, 2**30 + 7 * t + j) % len(known)]
                     for j in range(7)]
            assert cut[pair, plain.shape[1] + 7 * t:][:7].tolist() == drawn
    again = soft_targets.windows(cfg, tokens, None, 61, seed, 4, 6)[:, plain.shape[1]:]
    equal(again, np.repeat(plain[:, -T:], 7, 1))


@of_every_kind
def test_every_cut_of_a_step_and_every_context_in_turn(values):
    """Each member's loss is that of the plain reading, of whatever slices and threads; context 0 is the loss without
    soft targets; a context that comes back is the same again."""
    cfg = BASE.changed(**values, SOFT_TARGETS=((1, 2), (2, 0), (3, 1), (4, 2)))
    tokens = data(cfg)
    make = functools.partial(CpuEngine, tokens=tokens)
    one, two = make(cfg, threads=1), make(cfg, threads=2)
    plain = make(BASE.changed(**values), threads=1)
    for step in range(5):
        whole = one.evaluate(0, 32)
        equal(np.concatenate([two.evaluate(first, count) for first, count in ((0, 4), (4, 2), (6, 26))]), whole)
        if step == 1:
            cut = soft_targets.windows(cfg, tokens, soft_targets.followers(cfg, tokens, 2), 1, one.seed, 0, 8)
            assert whole[:16].tolist() == plain_losses(cfg, one.state(), cut, 16)
        plain.load(one.state())
        assert np.array_equal(plain.evaluate(0, 32), whole) == (step in (0, 2))
        fitness = steps.pack_digits(np.sign(whole[1::2] - whole[::2]).astype(np.int8))
        assert one.update(fitness) == two.update(fitness)


def test_a_table_that_the_memory_cannot_hold_is_refused():
    cfg = BASE.changed(SOFT_TARGETS=((0, 2),))
    huge = np.lib.stride_tricks.as_strided(np.zeros(1, np.uint8), (1 << 42,), (0,))
    with raises(ValueError, match="SOFT_TARGETS: .* 4,398,046,511,104 tokens .* with -D SOFT_TARGETS=$"):
        soft_targets.Tables(cfg, huge)
    for count, word in (huge.size, "SOFT_TARGETS="), (1000, None):               # `prepare` does not lead there
        assert (word in prepare.training_on("x", False, 8192, False, (count, 99))) == bool(word)


@of_every_kind
@mark.parametrize("context, piece", [(1, 7), (4, 7), (6, 300)])
def test_a_table_is_the_same_in_pieces_of_any_size_and_takes_little_memory(values, context, piece, monkeypatch):
    cfg = BASE.changed(**values)
    tokens = data(cfg)
    whole = soft_targets.followers(cfg, tokens, context)
    monkeypatch.setattr(soft_targets, "PIECE", piece)
    for one, other in zip(whole, soft_targets.followers(cfg, tokens, context)):
        equal(one, other)
        assert one.dtype == other.dtype
    many = np.random.default_rng(1).integers(0, cfg.VOCAB_SIZE, 1 << 20).astype(tokens.dtype)
    monkeypatch.setattr(soft_targets, "PIECE", 1 << 15)
    tracemalloc.start()
    soft_targets.followers(cfg, many, context)
    assert tracemalloc.get_traced_memory()[1] < 20 * many.size + (1 << 22)
    tracemalloc.stop()
