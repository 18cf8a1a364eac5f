"""The arithmetic of merges, against plain Python fractions."""

from fractions import Fraction

import numpy as np
from hypothesis import given
from hypothesis.strategies import booleans, floats, integers, lists, sampled_from, tuples
from numpy import float32, int8
from pytest import mark, raises

import egg_config
from cluster import snapshots
from islands import merging
from islands.merging import worse_share
from model import parameters
from model.parameters import State, n_overlay, n_weights
from recordings import digests, python
from readings import TINY, equal
from coordinators import refused

SHAPE = dict(**TINY, VOCAB_SIZE=256, CHUNK_SIZE=32)


def config(merge="recombine", optimizer="interpolate", alpha=0.5, **values):
    return egg_config.make(**{**SHAPE, **values}, MERGE=merge, OPTIMIZER_MERGE=optimizer, RECOMBINE_ALPHA=alpha)


def state(cfg, seed, step=7, widest=1.0):
    """A random State; `widest` its largest accumulator. What decides a rounding is in it often."""
    rng, n = np.random.default_rng(seed), n_weights(cfg)
    acc = rng.uniform(-widest, widest, n)
    at = rng.integers(0, 4, n)
    acc = np.where(at == 0, np.round(acc * 4) / 4, np.where(at == 1, acc * 2.0 ** -rng.integers(0, 40, n), acc))
    weights = np.where(rng.integers(0, 4, n) == 0, rng.choice([-127, -126, 126, 127], n),
                       rng.integers(-127, 128, n)).astype(int8)
    moments = np.stack([rng.normal(0, 1e3, n), rng.exponential(1e5, n), acc], 1).astype(float32)
    return State(weights, moments, rng.integers(-127, 128, n_overlay(cfg)).astype(int8), step, seed)


def ours_and_theirs(cfg, step=7):
    return state(cfg, 1), state(cfg, 2, step)


# --- plain readings of the rules --------------------------------------------------------------------------------------

def toward_zero(x, away=Fraction(0)):
    """x rounded to a whole number toward zero, or from `away` on away from it."""
    whole, rest = divmod(abs(x), 1)
    return (1 if x > 0 else -1) * (whole + (rest > away > 0))


def nearest(x):
    """Halves toward zero."""
    return toward_zero(x, Fraction(1, 2))


def fixed(weight, acc):
    """w + acc as the Fraction that counts whole units of 2^-24; Python rounds halves to even, as NumPy does."""
    return int(weight) + Fraction(round(Fraction(min(max(float(acc), -32768.0), 32768.0)) * 2**24), 2**24)


def mixed(better, worse, part):
    """(weight, accumulator as a Fraction, their sum as the rule wants it) of (weight, accumulator) of two states."""
    a, b = fixed(*better), fixed(*worse)
    total = a + Fraction(nearest((b - a) * part * 2**24), 2**24)
    weight = min(max(int(better[0]) + toward_zero(total - int(better[0])), -127), 127)
    return weight, total - weight, total


ELEMENT = tuples(integers(-127, 127) | sampled_from([-127, 126, 127]),
                 floats(-1, 1, width=32) | floats(-2.0**20, 2.0**20, width=32)
                 | sampled_from([-1.0, -0.5, 0.0, 0.5, 1.0]))


@given(lists(tuples(ELEMENT, ELEMENT), min_size=1, max_size=30), integers(0, 1 << 16), booleans())
def test_a_mix_is_that_of_fractions_and_loses_nothing(pairs, part, float_holds):
    if float_holds:                                  # accumulators as the usual learning rates make them
        pairs = [tuple((w, max(-1.0, min(1.0, acc))) for w, acc in pair) for pair in pairs]

    def of(side):
        weights, acc = zip(*(pair[side] for pair in pairs))
        moments = np.zeros((len(pairs), 3), float32)
        moments[:, 2] = acc
        return State(np.array(weights, int8), moments, None)

    weights, acc = merging._mix(of(0), of(1), slice(None), part)
    assert (weights.dtype, acc.dtype) == (int8, float32)
    for got, rest, (better, worse) in zip(weights, acc, pairs):
        weight, exact, total = mixed(better, worse, Fraction(part, 1 << 16))
        assert got == weight and rest == float32(float(exact))
        if float_holds:
            assert int(got) + Fraction(float(rest)) == total and abs(rest) <= 1
            ends = sorted((fixed(*better), fixed(*worse)))
            assert ends[0] <= total <= ends[1] and (abs(got) == 127 or abs(rest) < 1)


@mark.parametrize("alpha, ours, theirs, share", [
    (0.0, 3.0, 3.0, 65536), (0.5, 3.0, 4.0, 24576), (0.5, 4.0, 3.0, 24576), (0.75, 3.0, 300.0, 164),
    (0.5, 0.0, 0.0, 32768), (0.5, 0.0, 1.0, 0), (1.0, 3.0, 4.0, 0),
    (0.5, -4.0, -3.0, 24576), (0.5, -3.0, 0.0, 0), (0.5, -0.1, 1.0, 0)])            # of rewards of 4 and 3, ...
def test_the_worse_ones_part(alpha, ours, theirs, share):
    assert worse_share(alpha, ours, theirs) == share
    for wrong in float("nan"), float("inf"), float("-inf"):
        with raises(ValueError, match="^a fitness of .* against .*: finite numbers are needed$"):
            worse_share(alpha, ours, wrong)


# --- whole states -----------------------------------------------------------------------------------------------------

@mark.parametrize("part, place, value, said", [
    ("moments", (3, 2), -np.inf, "moments that are not finite"),
    ("moments", (3, 1), -1.0, "mean squares below 0"),
    ("weights", 3, -128, "-128"),
    ("overlay", 3, -128, "-128")])
def test_a_state_that_no_training_gives_is_refused(part, place, value, said, tmp_path):
    """Also where a worker would load it from a snapshot."""
    cfg = config()
    ours, theirs = ours_and_theirs(cfg)
    getattr(theirs, part)[place] = value
    for pair in ((ours, theirs), (theirs, ours)):
        with refused(f"^it holds .*{said}", ValueError):
            merging.merge(cfg, *pair, 2.0, 1.0)
    snapshots.save(cfg, theirs, tmp_path)
    with refused("it holds", ValueError):
        snapshots.read(cfg, tmp_path / f"snapshot-{theirs.step:08d}.egg")


def test_rejuvenation():
    for mode in (0, 1, 2):
        cfg = config(ADAPTIVE_NOISE_MODE=mode, ADAPTIVE_NOISE_INIT=40)
        old = state(cfg, 1)
        before = digests(old)
        new = merging.rejuvenate(cfg, old)
        assert digests(old) == before and (new.step, new.seed) == (old.step, old.seed)
        equal(new.moments, old.moments * (0, 0, 1))
        equal(new.weights, old.weights)
        equal(new.overlay, np.maximum(old.overlay, 40) if mode else old.overlay)


# digests of merges with a state of fitness 3, recorded when a plain reading of every rule gave the same
RECORDED = {
    ("recombine", "interpolate", 3.25): "f0cd4628edf17652588830c234f0db53",
    ("recombine", "interpolate", 2.5): "a2640aeca2792ac1b6da806638dbf7dd",
    ("recombine", "copy", 3.0): "723fb9aea7206626a803211ae0ce8e99",
    ("recombine", "reset", 3.25): "f3dee2591370cfeabb6725f77901cbb1",
    ("clone", "copy", 2.5): "de913111557642506e47f967d6e41705",
    ("clone", "reset", 3.25): "a22ed6dd79ed1bccf1999da943312d31",
    ("clone", "interpolate", 3.25): "fd4f5147ac6daccab6a9657af6378f19",
}


@mark.parametrize("merge, optimizer, fitness", RECORDED)
def test_the_same_bits_everywhere(merge, optimizer, fitness, monkeypatch):
    """What another machine, another NumPy or another version of egg must give too, in pieces of any size."""
    monkeypatch.setattr(merging, "PIECE", 1000)
    cfg = config(merge, optimizer, 0.6)
    n, k = n_weights(cfg), n_overlay(cfg)

    def made(factor):                                # from integers alone, without a random generator that may change
        x = np.arange(1, n + 1, dtype=np.int64) * factor
        moments = np.stack([x % 1009 - 504, x % 100003, (x % 1999 - 999) / 1000], 1).astype(float32)
        return State((x % 255 - 127).astype(int8), moments, (x[:k] % 255 - 127).astype(int8),
                     factor, factor)

    ours, theirs = made(7919), made(104729)
    before = digests(ours), digests(theirs)
    got = merging.merge(cfg, ours, theirs, fitness, 3.0)
    assert parameters.digest_of(got).hex() == RECORDED[merge, optimizer, fitness]
    assert before == (digests(ours), digests(theirs))


def test_a_merge_needs_no_numba():
    assert python("-c", "import sys; from islands import merging; print('numba' in sys.modules)") == "False\n"
