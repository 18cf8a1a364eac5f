"""Muon against a plain reading of its rules, on every engine."""

import numpy as np
from numpy.random import default_rng
from numpy import float32
from pytest import mark

from engine import hardware
from engine.cpu_engine import CpuEngine
from model import parameters, rules
from model.parameters import from_canonical
from units_compared import fma
from fakes import any_fitness
from readings import BASE, equal, votes_on


# --- Muon -------------------------------------------------------------------------------------------------------------

def chains(left, right):
    """float32 [n, m]: left [n, k] . right [k, m], each element one chain of fma over k."""
    out = np.zeros((len(left), right.shape[1]), float32)
    for k in range(len(right)):
        out = fma(left[:, k, None], right[k], out)
    return out


def norm_of(x):
    sums = np.zeros(rules.MUON_PARTS, float32)
    for part in np.pad(x.ravel(), (0, -x.size % sums.size)).reshape(-1, sums.size):
        sums = fma(part, part, sums)
    while len(sums) > 1:
        sums = sums[:len(sums) // 2] + sums[len(sums) // 2:]
    return np.sqrt(sums[0]) + float32(1e-7)


def turned(x, coefficients):
    """A round of Newton-Schulz."""
    a, b, c = map(float32, coefficients)
    square = chains(x, x.T)
    return fma(1, chains(fma(c, chains(square, square), b * square), x), a * x)


def direction_of(m, coefficients):
    """float32, the shape of m: the rule of model.parameters in NumPy."""
    rows, cols = m.shape
    if rows > cols:
        return direction_of(m.T, coefficients).T
    x = m / norm_of(m)
    for _ in range(5):
        x = turned(x, coefficients)
    return x


@mark.parametrize("ns, threads, width", [("quintic", hardware.cores(), 64), ("cubic", 1, 96)])
def test_muon_is_its_plain_reading(ns, threads, width):
    """Two updates, also with sides that fill no tile: the hidden matrices by the rule, bit for bit; everything else as
    AdamW alone does it."""
    plain = BASE.changed(HIDDEN_DIM=width, MUON_NS=ns, MUON_LR_SCALE=1.5, ADAM_WEIGHT_DECAY=0.1,
                         LR_SCHEDULE=((0, 1.2), (1, 0.9)))
    cfg, rng = plain.changed(USE_MUON=1), default_rng(3)
    muon, adam = CpuEngine(cfg, threads=threads), CpuEngine(plain)
    state, moved = muon.state(), 0
    for step in range(2):
        fitness = any_fitness(cfg, rng)
        rate = float32(cfg.learning_rate(step)) * float32(1.5)
        muon.update(fitness)
        adam.update(fitness)
        got, plain = muon.state(), adam.state()
        for t in parameters.tensors(cfg):
            part = t.span
            if not t.hidden:
                equal(got.weights[part], plain.weights[part])
                equal(got.moments[part], plain.moments[part])
                continue
            m = fma(state.moments[part, 0], float32(0.85), -votes_on(cfg, state, t, fitness).astype(float32))
            x = parameters.to_canonical(direction_of(from_canonical(m, t.cols),
                                                     rules.MUON_COEFFICIENTS[ns]))
            size = float32(0.2) * np.sqrt(float32(max(t.rows, t.cols)))
            acc = fma(-rate, fma(state.weights[part], float32(0.1), x * size), state.moments[part, 2])
            change = np.clip(np.trunc(acc), -1, 1).astype(int)
            equal(got.moments[part], np.stack([m, 0 * m, (acc - change).astype(float32)], 1), t)
            equal(got.weights[part], state.weights[part] + change)
            moved += np.count_nonzero(change)
        state = got
    assert moved > 1000


def test_no_votes_no_direction():
    engine = CpuEngine(BASE.changed(USE_MUON=1, ADAM_WEIGHT_DECAY=0.0))
    assert engine.update(bytes(4)) == 0 and not engine.state().moments.any()
