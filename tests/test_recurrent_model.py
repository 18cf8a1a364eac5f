"""The recurrent model: both engines against a plain reading of its rules in NumPy and against each other, the z-test,
groups of members, and whether it learns."""

import math

import numpy as np
from numpy import int32, uint8
from numpy.random import default_rng
from pytest import mark, param, raises

from egg_config import make
import fakes
from engine.cpu_engine import CpuEngine
from model import parameters, rules, steps
from model.parameters import tensors
from compiling import CARDS, kernels_of
from engines_compared import SEED
from fakes import any_fitness, step_alone
from readings import as_data, configured, equal, random_gru, votes_on

COMPILED = ["compiled_gru"]                                  # for conftest.py
SMALL = dict(MODEL="gru", HIDDEN_DIM=64, N_LAYERS=2, SEQ_LEN=12, VOCAB_SIZE=256, CHUNK_SIZE=32, POPULATION_SIZE=64,
             STATE_TOKENS=5, GROUP_SIZE=4, ADAPTIVE_NOISE_MODE=0, DEVICE_GAUSSIAN=1, HOST_GAUSSIAN=1, LOSS="exact",
             SOFTMAX_EXP_SCALE=23.0, FAST_FITNESS=1, OPTIMIZER="ztest", SIGMA_SHIFT=4, SIGMA_SHIFT_VECTOR=8)
BASE = make(**SMALL)
TRANSFORMER = fakes.CFG.changed(DEVICE_GAUSSIAN=1, HOST_GAUSSIAN=1, ADAPTIVE_NOISE_MODE=0)


@mark.parametrize("base, clt", [(BASE, 0), (BASE, 1), (TRANSFORMER, 1)], ids="signs gru transformer".split())
def test_ztest_moves_what_is_significant(base, clt):
    cfg = base.changed(USE_CLT=clt, CHUNK_SIZE=128, POPULATION_SIZE=256, OPTIMIZER="ztest", ZTEST_ALPHA=0.3)
    engine, rng = CpuEngine(cfg), default_rng(1)
    state = engine.state()
    state.weights[rng.integers(0, state.weights.size, 20000)] = 127                  # some cannot move up
    engine.load(state)
    fitness = any_fitness(cfg, rng)
    # the normal quantile of 0.85
    changed, after, t = engine.update(fitness), engine.state(), int(16 * 1.0364333894937898)
    want = np.concatenate([votes_on(cfg, state, t, fitness) for t in tensors(cfg)])
    moves = np.where(abs(want) * 16 >= t * math.isqrt(cfg.N_PAIRS) * (256 if clt else 1), np.sign(want), 0)
    expected = np.clip(state.weights + moves, -127, 127)
    equal(after.weights, expected)
    assert changed == np.count_nonzero(expected != state.weights) > 1000
    assert not after.moments.any()


def test_share_falls_as_nano_egg_has_it():
    cfg = configured("nano-egg", "OPTIMIZER=ztest")
    assert [cfg.learning_rate(k) for k in (0, 1000)] == [1, 1 / 16] and cfg.learning_rate(500) == 1 / 8.5
    # quantiles 0, 1.565 and 1.863 in 16ths; 128 = isqrt(16,384 pairs)
    least = [rules.least_vote_by_chance(cfg, cfg.learning_rate(k)) for k in (0, 500, 1000)]
    assert least == [0, 25 * 128 * 16, 29 * 128 * 16]


def test_groups_read_the_same_tokens_and_follow_a_stream():
    cfg = BASE.changed(GROUP_SIZE=8)
    tokens = np.arange(1000, dtype=np.uint32) % 251
    first, second = rules.windows(cfg, tokens, 0, 0, 32), rules.windows(cfg, tokens, 1, 0, 32)
    assert len(np.unique(first, axis=0)) == 8 and first[4, 5] == 1000 // 8
    equal(first, first[::4].repeat(4, 0))
    equal(second[:, :6], first[:, 12:])
    # the end of the data comes before its beginning
    equal(first[0, :5], tokens[-5:])
    equal(rules.windows(cfg, tokens, 0, 5, 3), first[5:8])


def test_noise_is_kept():
    kept = [steps.INITIAL_SEED]
    for step in range(8):
        kept.append(steps.next_seed(kept[-1], step, 3))
    assert len({*kept}) == 3 and kept[0] == kept[2] != kept[3] == kept[5] != kept[6]
    assert steps.next_seed(42, 6, 0) == 42 != steps.next_seed(42, 6) == steps.hash32(42, 7)


# --- training it ------------------------------------------------------------------------------------------------------

def test_it_learns():
    """A thousand members, a few steps: better than it began, on text it has not seen."""
    cfg = BASE.changed(N_LAYERS=1, SEQ_LEN=16, STATE_TOKENS=0, CHUNK_SIZE=256, POPULATION_SIZE=256, SIGMA_SHIFT=2,
                       SOFTMAX_EXP_SCALE=16 / math.log(2))
    text = np.frombuffer(b"the quick brown fox jumps over the lazy dog. " * 400, uint8)
    engine, window = CpuEngine(cfg, text), text[None, 11:300].astype(int32)
    before = engine.validate(window)[0]
    for _ in range(40):
        step_alone(engine)
    assert engine.validate(window)[0] < 0.75 * before


# --- CUDA -------------------------------------------------------------------------------------------------------------

FAST = dict(SMALL, HIDDEN_DIM=256, SEQ_LEN=100, STATE_TOKENS=9, CHUNK_SIZE=200, POPULATION_SIZE=400, FIXED_POINT=4)


# a head that passes by in tiles
STREAMED = dict(SMALL, VOCAB_SIZE=1100)
WIDE = dict(SMALL, HIDDEN_DIM=288)


def test_wgmma_needs_a_card_that_has_it():
    from egg_kernels import gpu_of
    with raises(ValueError, match="only GPUs of compute capability 9.0"):
        gpu_of(BASE.changed(TENSOR_CORES="wgmma"), (8, 6), CARDS[8, 6] * 1024)


@mark.parametrize("width", sorted({*range(64, 257, 32), *range(64, 1025, 96)}))
def test_quotients_by_a_multiplication_are_exact(width):
    """Every sum whose quotient is not clipped, in
    float32 as the kernels have it."""
    from kernels import gru_parts, parts
    for point in range(8):
        for inputs in (width, 4 * width):
            d = parameters.divisor(make(MODEL="gru", FIXED_POINT=point), inputs)
            y = np.arange(-128 * d, 128 * d + 1, 1 + d // 200, int32)
            for base in (gru_parts.FLOAT_BASE, gru_parts.FLOAT_BASE + 128, parts.MAGIC):
                bits, a, c = parts.floor_constants(d, base)
                sums = int32(bits) + y
                # float64 holds the product exactly; what is rounded off below is far less than 1 / d
                equal(np.floor(sums.view(np.float32).astype(float) * a + c), base + y // d, (d, base))


@mark.parametrize("width", [64, 256, 288, 1024])
def test_kernels_fit_every_card(width):
    from kernels import gru, parts
    cfg = BASE.changed(HIDDEN_DIM=width)
    for cc, limit in CARDS.items():
        assert all(kernel.shared <= limit * 1024 for kernel in kernels_of(cfg, cc, ("step",))), cc
        shape = gru._recurrence(cfg, parts.Gpu(cc, limit * 1024, cc == (9, 0)))
        assert shape.bytes + (shape.columns * 128 if shape.shared else 0) + 2560 <= limit * 1024, cc
        assert shape.stages >= 2 and shape.rows in (32, 64) and shape.columns >= 2 * width, cc


SIZES = dict(CHUNK_SIZE=36, POPULATION_SIZE=144, LR_SCHEDULE=((0, 1.2),))
DRAWN = (
    dict(HIDDEN_DIM=1024, N_LAYERS=1, SEQ_LEN=16),
    dict(HIDDEN_DIM=64, N_LAYERS=1, VOCAB_SIZE=20001),
    dict(HIDDEN_DIM=320, N_LAYERS=1, SEQ_LEN=513, STATE_TOKENS=700, CHUNK_SIZE=4, POPULATION_SIZE=8, GROUP_SIZE=8),
    # rows that end within a tile; loud and quiet noise; a head in several passes
    dict(FAST, MLP_RELU=0, SEQ_LEN=33, N_LAYERS=1, STATE_TOKENS=0, CHUNK_SIZE=66, POPULATION_SIZE=132,
         DEVICE_GAUSSIAN=0, DEVICE_MASK=19, SIGMA_SHIFT=2, LOSS="deggs"),
    dict(SMALL, DEVICE_MASK=15, SIGMA_SHIFT=0),
    dict(STREAMED, DEVICE_MASK=15, SOFT_TARGETS=((0, 2), (1, 0), (2, 1))),
)


@mark.gpu
@mark.parametrize("constants, seed", [
    param(random_gru(default_rng(SEED + i), **{**SIZES, **constants}).constants(), i, id=f"random{i}")
    for i, constants in enumerate(DRAWN)])
def test_random_configurations_against_the_cpu_engine(compared):
    """Six configurations, with every switch between them: losses, three updates, validation, generation."""
    assert compared == ""


@mark.gpu
def test_every_multiprocessor_takes_several_tiles(cpu_compiled):
    """4,096 members, all weights drawn anew, against the CPU engine."""
    from engine import cuda_engine
    cfg, rng = make(**dict(FAST, CHUNK_SIZE=4096, POPULATION_SIZE=4096)), default_rng(8)
    tokens = rng.integers(0, 60, 9000).astype(uint8)
    engines = [cuda_engine.CudaEngine(cfg, tokens), CpuEngine(cfg, tokens)]
    state = engines[0].state()
    state.weights[:] = rng.integers(-127, 128, state.weights.size)
    for engine in engines:
        engine.load(state)
    equal(*(engine.evaluate(0, 4096) for engine in engines))


@mark.gpu
@mark.parametrize("shape", [WIDE, SMALL, STREAMED, FAST], ids=["wide", "small", "streamed head", "fast"])
def test_pieces_and_slices_on_a_gpu(monkeypatch, shape, cpu_compiled):
    """A chunk in pieces, of odd positions in their groups and in small slices, is the same chunk."""
    from engine import cuda_engine
    cfg = make(**dict(shape, CHUNK_SIZE=32, POPULATION_SIZE=64, GROUP_SIZE=8))
    tokens = as_data(cfg, default_rng(5).integers(0, 9, 700))
    gpu, whole = cuda_engine.CudaEngine(cfg, tokens), CpuEngine(cfg, tokens).evaluate(0, 64)
    pieces = ((0, 2), (2, 30), (32, 32))
    equal(np.concatenate([gpu.evaluate(*piece) for piece in pieces]), whole)
    del gpu._members
    monkeypatch.setattr(cuda_engine, "largest", lambda size, most, budget: min(most, 5))
    equal(np.concatenate([gpu.evaluate(*piece) for piece in pieces]), whole)
