"""Muon against a plain reading of its rules, on every engine."""


import numpy as np
from numpy.random import default_rng
from numpy import float32
from pytest import mark

from egg_config import make
from engine import hardware
from engine.cpu_engine import CpuEngine
from kernels import muon
from model import parameters, rules
from model.parameters import from_canonical
from activations_compared import fma
from fakes import any_fitness
from readings import BASE, equal, votes_on
from recordings import simulated


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


# --- its CUDA kernels, without a GPU ----------------------------------------------------------------------------------

SIMULATED = """
import types
import numpy as np
from numba import cuda
import egg_config, kernels.muon
f = np.float32
kernels.muon.libdevice = types.SimpleNamespace(
    fmaf_rn=lambda a, b, c: f(np.longdouble(a) * np.longdouble(b) + np.longdouble(c)), fadd_rn=lambda a, b: f(a) + f(b),
    fmul_rn=lambda a, b: f(a) * f(b), fdiv_rn=lambda a, b: f(a) / f(b), fsqrt_rn=lambda a: np.sqrt(f(a)),
    int2float_rn=f)
made = {kernel.__name__: cuda.jit(kernel) for kernel in kernels.muon.build(egg_config.make(USE_MUON=1))}
a, b, c = map(f, (3.4445, -4.7750, 2.0315))
votes = np.load("votes.npy")
short, long = 16, 80
for rows, cols in ((long, short), (short, long)):
    matrices = np.array([[0, rows, cols, short, long, 0, 0]], np.int32)
    moments, x = np.load("moments.npy"), np.zeros(votes.size, f)
    made["muon_start"][1, 1024](matrices, votes, moments, x)
    np.savez(f"{rows}.npz", moments=moments, x=x)
square, poly, out = np.zeros(short * short, f), np.zeros(short * short, f), np.zeros_like(x)
one, two = np.array([[0, 0, 0]], np.int32), np.array([[0, 0, 0], [0, 0, 64]], np.int32)
made["muon_gram"][1, 256](one, matrices, 0, a, a, x, x, square)
made["muon_mix"][1, 256](one, matrices, 0, b, c, square, square, poly)
made["muon_mix"][2, 256](two, matrices, 1, a, f(1), poly, x, out)
np.save("out.npy", out)
"""


def test_muons_kernels_in_the_simulator(tmp_path):
    """The CUDA kernels run thread by thread in Python, on matrices that do not fill their tiles: the same bits. The
    products do not see the orientation of a matrix."""
    rng = default_rng(11)
    votes, moments = rng.integers(-999, 999, 1280).astype(np.int32), np.zeros((1280, 3), float32)
    moments[:, 0] = rng.normal(size=1280) * 300
    np.save(tmp_path / "votes.npy", votes)
    np.save(tmp_path / "moments.npy", moments)
    simulated(SIMULATED, cwd=tmp_path)
    m = fma(moments[:, 0], float32(0.85), -votes.astype(float32))
    for rows, cols in ((80, 16), (16, 80)):
        got, matrix = np.load(tmp_path / f"{rows}.npz"), from_canonical(m, cols)
        x = matrix if rows < cols else matrix.T
        x = x / norm_of(x)
        equal(got["moments"][:, 0], m)
        equal(got["x"], x.ravel())
    equal(np.load(tmp_path / "out.npy"), turned(x, rules.MUON_COEFFICIENTS["quintic"]).ravel())


def test_the_plan_of_muon_covers_the_hidden_matrices_once():
    cfg = BASE.changed(HIDDEN_DIM=96, N_LAYERS=2, VOCAB_SIZE=300, NTT_MODE=1, USE_MUON=1)
    plan = muon.work(cfg)
    for t, at in zip(parameters.tensors(cfg), plan.directions, strict=True):
        assert (at >= 0) == t.name.startswith("w_"), t.name
    for tiles, wide in ((plan.squares, False), (plan.wides, True)):
        for number, (first, rows, cols, short, long, at_x, at_a) in enumerate(plan.matrices):
            seen = np.zeros((short, long if wide else short), int)
            for _, i, j in tiles[tiles[:, 0] == number]:
                seen[i:i + muon.TILE, j:j + muon.TILE] += 1
            assert (seen == 1).all() and {rows, cols} == {short, long} and short <= long
    assert not len(muon.work(make()).matrices)
