"""The kernel that draws the noise of pairs (kernels.noise), run by Python, against the plain reading of SPEC 4."""

from types import SimpleNamespace

import numpy as np
from pytest import fixture, mark

from egg_config import make
from kernels import gru, noise, transformer
from kernels import rules as device_rules
from model import parameters, rules
from model.reading import Reading, trunc
from readings import equal, random_config, random_gru

OFFSET, FIRST = 2, 5                        # pairs before those that are drawn, in the job and before it
PLAIN = rules.Arithmetic(
    trunc=lambda x: np.int32(np.clip(np.trunc(np.float64(x)), -2 ** 31, 2 ** 31 - 1)), trunc_64th=None, divide=None,
    log2_floor=None, sqrt=np.sqrt, fma=None, add=None, sub=None, mul=None, div=None, bits=None, float_of=None,
    nearest=None)


@fixture
def threads(monkeypatch):
    """Python in place of CUDA, one thread a block: where it is."""
    at = SimpleNamespace(x=0, y=0)
    monkeypatch.setattr(noise, "cuda", SimpleNamespace(
        jit=lambda **_: lambda function: function, blockIdx=at, threadIdx=SimpleNamespace(x=0),
        syncthreads_and=lambda x: x))
    monkeypatch.setattr(noise, "Kernel", lambda function: function)
    monkeypatch.setattr(noise, "THREADS", 1)
    monkeypatch.setattr(noise, "ptx", SimpleNamespace(float_bits=lambda x: np.float32(x).view(np.int32)))
    monkeypatch.setattr(device_rules, "device", lambda function: function)
    monkeypatch.setattr(device_rules, "TARGET", PLAIN)
    return at


def drawn_by(threads, plan, cfg, state):
    """int32 [2, words]: the noise of two pairs."""
    drawn, kernel, job = np.full(2 * plan.words, 99, np.int32), noise.draw_kernel(cfg), (state.seed, FIRST)
    for threads.x in range(2):
        for threads.y in range(len(plan.table())):
            kernel(plan.table(), state.weights, state.overlay, np.array(job, np.uint32), OFFSET, plan.words, drawn)
    return drawn.reshape(2, -1)


@mark.filterwarnings("ignore:overflow encountered")            # as hashes do
@mark.parametrize("seed", range(6))
def test_what_is_drawn_is_the_noise_of_the_plain_reading(seed, threads):
    rng, mode = np.random.default_rng(seed), seed % 3
    cfg = (random_config if seed < 3 else random_gru)(rng, ADAPTIVE_NOISE_MODE=mode, N_LAYERS=2, VOCAB_SIZE=258)
    state, plan, tensors = parameters.initial_state(cfg), noise.Plan(cfg), parameters.tensors(cfg)
    state.seed = 2 ** 32 - 9
    state.weights[:] = rng.integers(-127, 128, state.weights.size)
    state.overlay[:] = rng.integers(-127, 128, state.overlay.size)
    state.overlay[:cfg.HIDDEN_DIM + cfg.VOCAB_SIZE + 4] = 64   # so that the factors of a table are 1 in mode 1
    calls = {t: plan.add(plan.columns(t.name, t.layer), plan.inputs(t.name, t.layer)) if t.matrix
             else plan.add(plan.vector(t.name, t.layer)) for t in tensors}
    table = plan.add(plan.looked_up("embedding"))

    def hold_inputs(words, reading, n, stream, first):
        i, room = np.arange(n), -(-n // 4) * 4
        coefficients = reading.noise(stream, i)
        if mode == 1:
            coefficients = coefficients * np.clip(state.overlay[first + i].astype(int), 0, 64)
        equal(words[:n], coefficients)
        if mode == 2:
            equal(words[room:room + n].view(np.float32), reading.factor(first, stream, i))
        whole = mode == 0 or mode == 1 and (state.overlay[first:first + room] >= 64).all()
        assert words[noise.input_words(cfg, room) - 4] == whole
        return whole

    wholes = set()
    for pair, words in enumerate(drawn_by(threads, plan, cfg, state)):
        even, odd = (Reading(cfg, state, state.seed + FIRST + OFFSET + pair, sign) for sign in (1, -1))
        limit = 127 if cfg.MODEL == "gru" else 10 ** 6         # whose norms and biases are cut to a byte
        for t, at in calls.items():
            if t.matrix:
                loud = even.noise(t.seed_a, np.arange(t.cols)).astype(np.float32)
                equal(words[at:at + t.cols], trunc(loud * even.factor(t.overlay_a, t.seed_a, np.arange(t.cols))), t)
                at += -(-t.cols // 4) * 4
                hold_inputs(words[at:], even, t.rows, t.seed_b, t.overlay_b)
            else:
                for number, reading in enumerate((even, odd)):
                    here = at + number * t.cols
                    equal(np.clip(words[here:here + t.cols], -limit, limit), reading.vector(t.name, t.layer), t)
        t = tensors[0]
        wholes.add(hold_inputs(words[table:], even, t.cols, t.seed_a, t.overlay_a))
    assert wholes == {mode < 2}


@mark.parametrize("model, module", [("transformer", transformer), ("gru", gru)])
def test_the_plan_of_a_model_has_all_its_noise(model, module):
    """Each vector, and both sides of each matrix."""
    cfg = make(MODEL=model, N_LAYERS=2, NTT_MODE=int(model == "transformer"))
    seeds = {seed for row in module.Plan(cfg).table() for seed in (row[noise.SEED_A], row[noise.SEED_B])}
    assert seeds == {0} | {seed for t in parameters.tensors(cfg) for seed in (t.seed_a, t.seed_b)}
