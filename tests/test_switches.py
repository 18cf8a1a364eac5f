"""The experimental switches: Muon and the number-theoretic transforms against plain readings of their rules, and every
switch distributed and resumed. The comparison of both engines is in test_gpu.py."""

import functools
import json
import pathlib
import re
import subprocess
import sys

import numpy as np
import pytest
from numba import uint32

import egg_config
from engine import cpu_engine
from engine import cpu_update
from engine import cuda_engine
from cluster import history
from model import fitness_digits
from model import optimizers
from model import parameters
from model import rules
from kernels import muon
from model import transforms
from tools import arch
from tools import train
from tools.debug import Reading
from kit import CARDS, HERE, cluster, loss_of, member_reading, path_of, random_config

SMALL = dict(HIDDEN_DIM=64, HEAD_DIM=32, N_LAYERS=1, SEQ_LEN=8, VOCAB_SIZE=256, CHUNK_SIZE=16, POPULATION_SIZE=32,
             VALIDATE_EVERY=0,
             SAMPLE_EVERY=0, AUDIT_RATE=0.0, SNAPSHOT_EVERY=0)


# --- configuration ---------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("values, says", [
    (dict(USE_MUON=1, OPTIMIZER="sgd"), "USE_MUON = 1: needs OPTIMIZER adamw"),
    (dict(MUON_MOMENTUM=1.0), "MUON_MOMENTUM = 1.0: must be from 0.0 to 0.9999"),
    (dict(MUON_NS="quartic"), "MUON_NS = quartic: must be one of quintic, cubic"),
    (dict(NTT_MODE=4), "NTT_MODE = 4: must be from 0 to 3"),
    (dict(NTT_MODE=1, SEQ_LEN=24), "NTT_MODE = 1: needs a SEQ_LEN that is a power of two, not 24"),
    (dict(RARE_TOKENS=0.1, OPTIMIZER="ztest"), "RARE_TOKENS = 0.1: needs OPTIMIZER adamw or sgd"),
    (dict(SEEN_VOTES=2, OPTIMIZER="ztest"), "SEEN_VOTES = 2: needs OPTIMIZER adamw or sgd"),
    (dict(SEEN_VOTES=0), "SEEN_VOTES = 0: must be from 1 to 127"),
    (dict(SIGMA_SCHEDULE=((5, 16),)), "SIGMA_SCHEDULE = ((5, 16),): shifts must be from 0 to 15"),
    (dict(SIGMA_SCHEDULE=((5, 2), (5, 3))), "SIGMA_SCHEDULE = ((5, 2), (5, 3)): steps must rise, from 0 on"),
    (dict(SIGMA_SCHEDULE=((-5, 2),)), "SIGMA_SCHEDULE = ((-5, 2),): steps must rise, from 0 on"),
    (dict(SIGMA_SCHEDULE=((5, 2.5),)), "SIGMA_SCHEDULE = ((5, 2.5),): must be pairs of a step and a shift"),
    (dict(SOFT_TARGETS=((0, 2),)), "SOFT_TARGETS = ((0, 2),): needs LOSS exact"),
    (dict(SOFT_TARGETS=((0, 8),), LOSS="exact", VOCAB_SIZE=256), "contexts must be from 0 to 7"),
    (dict(SOFT_TARGETS=((0, 4),), LOSS="exact"), "contexts must be from 0 to 3 tokens with VOCAB_SIZE = 8192"),
    (dict(SOFT_TARGETS=((0, 2), (0, 3)), LOSS="exact"), "steps must rise, from 0 on"),
    (dict(SOFT_TARGETS=((0, 2.0),), LOSS="exact"), "must be pairs of a step and a context"),
    (dict(TOKEN_MASK=50, HOST_GAUSSIAN=1), "TOKEN_MASK = 50: must be at most 42 with HOST_GAUSSIAN"),
    (dict(NTT_MODE=2, SEQ_LEN=512), "NTT_MODE = 2: needs SEQ_LEN of 256 at most, not 512")])
def test_combinations_that_cannot_work_are_refused(values, says):
    with pytest.raises(egg_config.ConfigError, match=re.escape(says)):
        egg_config.make(**values)


@pytest.mark.parametrize("values", [
    dict(USE_MUON=1), dict(MUON_MOMENTUM=0.9), dict(MUON_LR_SCALE=2.0), dict(MUON_NS="cubic"), dict(NTT_MODE=1),
    dict(NTT_CAUSAL=0),
    dict(HOST_GAUSSIAN=1), dict(DEVICE_GAUSSIAN=1), dict(HOST_MASK=7), dict(DEVICE_MASK=7),
    dict(ADAPTIVE_NOISE_MODE=2), dict(USE_SAME_DATA=1), dict(OPTIMIZER="sgd"),
    dict(LOSS="exact"), dict(LR_SCHEDULE=((0, 0.5),)), dict(TOKEN_MASK=3), dict(RARE_TOKENS=0.01),
    dict(SIGMA_SCHEDULE=((5, 4),)), dict(SEEN_VOTES=2), dict(SOFT_TARGETS=((5, 0),), LOSS="exact")],
    ids=lambda values: next(iter(values)))
def test_every_switch_is_in_the_fingerprint(values):
    cfg, base = egg_config.make(**values), egg_config.make()
    assert cfg.fingerprint() != base.fingerprint()
    assert list(values)[0] in history.difference(base.saved(), cfg.saved())


def test_the_form_that_sees_its_targets_is_warned_of(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    pathlib.Path("input.bin").write_bytes(bytes(64))
    said = []
    for causal in (1, 0):
        train.open_data(egg_config.make(**SMALL, NTT_MODE=3, NTT_CAUSAL=causal), said.append)
    assert sum("NTT_CAUSAL = 0" in line for line in said) == 1


# --- number-theoretic transforms -------------------------------------------------------------------------------------

def direct(x, mode, k):
    """Coefficient k of x by the definition, term by term, in Python's integers."""
    p = transforms.PRIME[mode]
    if not p:
        return sum(-int(v) if bin(i & k).count("1") % 2 else int(v) for i, v in enumerate(x))
    r = transforms.root(mode, len(x))
    return sum(int(v) * pow(r, i * k, p) for i, v in enumerate(x)) % p


def transform(x, mode):
    """The coefficients of x by the table of the model."""
    c = x @ transforms.table(mode, x.shape[-1]).T
    return c % transforms.PRIME[mode] if transforms.PRIME[mode] else c


def inverse(x, mode):
    """What `transform` made x from, modulo p in modes 2 and 3: the transform again, in another order."""
    p, n = transforms.PRIME[mode], len(x)
    again = transform(x, mode)
    return np.roll(again[::-1], 1) * pow(n, -1, p) % p if p else again // n


@pytest.mark.parametrize("mode, length", [(1, 8), (1, 128), (2, 8), (2, 256), (3, 16), (3, 128)])
def test_transforms(mode, length):
    """Table against definition; round trip; the convolution theorem, for Walsh-Hadamard that of the dyadic
    convolution."""
    rng, p = np.random.default_rng(length), transforms.PRIME[mode]
    x, y = rng.integers(0, p or 262144, (2, length))
    transformed = transform(x, mode)
    assert transformed.tolist() == [direct(x, mode, k) for k in range(length)]
    assert np.array_equal(inverse(transformed, mode), x)
    product = transformed * transform(y, mode)
    i = np.arange(length)
    folded = np.array([sum(int(x[m]) * int(y[n]) for m,
                           n in zip(i, i ^ k if not p else (k - i) % length)) for k in range(length)])
    assert np.array_equal(inverse(product % p if p else product, mode), folded % p if p else folded)
    if p:
        powers = {pow(transforms.root(mode, length), k, p) for k in range(length)}
        assert len(powers) == length and pow(transforms.root(mode, length), length, p) == 1
    assert np.array_equal(transform(np.stack([x, y]), mode)[1], transform(y, mode))


class NttReading(Reading):
    """The plain reading of the SPEC with coefficients from the definition in model.transforms."""

    def coefficients(self, tokens):
        cfg, T = self.cfg, self.cfg.SEQ_LEN
        out = []
        for position in range(len(tokens)):
            block = list(tokens[position // T * T:][:T]) + [0] * T
            seen = position % T + 1 if cfg.NTT_CAUSAL or len(tokens) != T else T
            out.append(direct(block[:seen] + [0] * (T - seen), cfg.NTT_MODE, position % T))
        own = super().coefficients(tokens)
        assert own.tolist() == out
        return own


@pytest.mark.parametrize("seed", range(6))
def test_losses_validation_and_generation_are_those_of_the_plain_reading(seed):
    rng = np.random.default_rng(seed)
    cfg = random_config(rng, NTT_MODE=seed % 3 + 1, NTT_CAUSAL=seed // 3, SEQ_LEN=int(rng.choice([8, 16, 32])),
                        LOSS="deggs")
    tokens = rng.integers(0, cfg.VOCAB_SIZE, 500).astype(np.uint32)
    engine = cpu_engine.CpuEngine(cfg, tokens)
    state = engine.state()
    state.overlay[:] = rng.integers(-127, 128, state.overlay.size)
    state.weights[:] = rng.integers(-127, 128, state.weights.size)
    engine.load(state)
    reading, windows = NttReading(cfg, state), rules.windows(cfg, tokens, 0, 0, 2)
    assert engine.evaluate(0, 4).tolist() == [loss_of(member_reading(cfg, state, p, NttReading), windows[p // 2])
                                              for p in range(4)]
    z = reading.logits(windows[0, :-1]) / cfg.SOFTMAX_EXP_SCALE
    z -= z.max(1, keepdims=True)
    nats = (np.log(np.exp(z).sum(1)) - z[np.arange(cfg.SEQ_LEN), windows[0, 1:]]).sum()
    assert engine.validate(windows[:1])[0] == pytest.approx(nats, rel=1e-9)
    prompt = [5, 17, 250]
    tokens = list(engine.generate(prompt, cfg.SEQ_LEN + 6, seed=1, temp=0, penalty=0))
    assert tokens == reading.logits(prompt + tokens).argmax(1)[len(prompt) - 1:-1].tolist()


def test_a_causal_coefficient_sees_no_later_token():
    cfg = egg_config.make(**SMALL, NTT_MODE=3)
    rng = np.random.default_rng(7)
    one, other = rng.integers(1, 256, (2, 8))
    for position in range(8):
        mixed = np.where(np.arange(8) <= position, one, other)
        causal, whole = transforms.basis(cfg, True)[position], transforms.basis(cfg, False)[position]
        assert causal @ mixed == causal @ one
        assert position == 7 or whole @ mixed != whole @ one


def test_ntt_mode_0_is_the_model_as_it_was_and_the_tables_are_drawn_after_the_embedding():
    base, ntt = egg_config.make(**SMALL), egg_config.make(**SMALL, NTT_MODE=1)
    before = {t.name for t in parameters.tensors(base)}
    assert [t.name for t in parameters.tensors(ntt) if t.name not in before] == ["ntt_emb_1", "ntt_emb_2", "ntt_emb_3"]
    weights = parameters.initial_state(ntt).weights
    drawn = rules.uniform_noise(parameters._xorshift(42, 4 * 64 * 256), 15, 0).reshape(4, 64, 256)
    for matrix, name in zip(drawn, ("embedding", "ntt_emb_1", "ntt_emb_2", "ntt_emb_3")):
        t = next(t for t in parameters.tensors(ntt) if t.name == name)
        assert np.array_equal(weights[t.weights:t.weights + t.size], parameters.to_canonical(matrix))
    assert parameters.products_per_token(ntt) == parameters.products_per_token(base)


# --- Muon ------------------------------------------------------------------------------------------------------------

def fma(a, b, c):
    """float32, rounded once (in extended precision, where the product is exact, first)."""
    return (np.asarray(a, np.longdouble) * b + c).astype(np.float32)


def chains(left, right):
    """float32 [n, m]: left [n, k] . right [k, m], each element one chain of fma over k."""
    out = np.zeros((len(left), right.shape[1]), np.float32)
    for k in range(len(right)):
        out = fma(left[:, k, None], right[k], out)
    return out


def norm_of(x):
    sums = np.zeros(optimizers.MUON_PARTS, np.float32)
    flat = x.ravel()
    for first in range(0, flat.size, sums.size):
        part = flat[first:first + sums.size]
        sums[:part.size] = fma(part, part, sums[:part.size])
    while len(sums) > 1:
        sums = sums[:len(sums) // 2] + sums[len(sums) // 2:]
    return np.sqrt(sums[0]) + np.float32(1e-7)


def direction_of(m, coefficients):
    """float32, the shape of m: the rule of model.parameters in NumPy."""
    x = m.T if m.shape[0] > m.shape[1] else m
    a, b, c = map(np.float32, coefficients)
    x = x / norm_of(np.ascontiguousarray(x))
    for _ in range(5):
        square = chains(x, x.T)
        x = fma(1, chains(fma(c, chains(square, square), b * square), x), a * x)
    return x.T if m.shape[0] > m.shape[1] else x


@pytest.mark.parametrize("ns", ["quintic", "cubic"])
def test_muon_is_its_plain_reading(ns):
    """Two updates: the hidden matrices by the rule, bit for bit; everything else as AdamW alone does it."""
    constants = dict(SMALL, MUON_NS=ns, MUON_LR_SCALE=1.5, ADAM_WEIGHT_DECAY=0.1, LR_SCHEDULE=((0, 1.2), (1, 0.9)))
    cfg, rng = egg_config.make(**constants, USE_MUON=1), np.random.default_rng(3)
    muon, adam = cpu_engine.CpuEngine(cfg), cpu_engine.CpuEngine(egg_config.make(**constants))
    state, reading = muon.state(), Reading(cfg, muon.state())
    moved = 0
    for step in range(2):
        fitness = rng.integers(-1, 2, cfg.N_PAIRS).astype(np.int8)
        seeds, rate = range(muon.seed, muon.seed + cfg.N_PAIRS), np.float32(cfg.learning_rate(step)) * np.float32(1.5)
        muon.update(fitness)
        adam.update(fitness)
        got, plain = muon.state(), adam.state()
        for t in parameters.tensors(cfg):
            part = slice(t.weights, t.weights + t.size)
            if not t.hidden:
                assert np.array_equal(got.weights[part],
                                      plain.weights[part]) and np.array_equal(got.moments[part], plain.moments[part])
                continue
            votes = sum(int(f) * np.outer(reading.noise(s + t.seed_b, np.arange(t.rows)),
                                          reading.noise(s + t.seed_a, np.arange(t.cols)))
                        for s, f in zip(seeds, fitness))
            m = fma(state.moments[part, 0], np.float32(0.85), -parameters.to_canonical(votes).astype(np.float32))
            x = parameters.to_canonical(direction_of(parameters.from_canonical(m, t.rows, t.cols),
                                                     optimizers.MUON_COEFFICIENTS[ns]))
            size = np.float32(0.2) * np.sqrt(np.float32(max(t.rows, t.cols)))
            acc = fma(-rate, fma(state.weights[part], np.float32(0.1), x * size), state.moments[part, 2])
            change = np.where(acc >= 1, 1, np.where(acc <= -1, -1, 0))
            assert np.array_equal(got.moments[part], np.stack([m, 0 * m, (acc - change).astype(np.float32)], 1)), t
            assert np.array_equal(got.weights[part], state.weights[part] + change)
            moved += np.count_nonzero(change)
        state = got
    assert moved > 1000


def test_directions_are_nearly_orthogonal():
    rng = np.random.default_rng(5)
    for ns, low, high in (("quintic", 0.6, 1.25), ("cubic", 0.3, 1.001)):
        cfg = egg_config.make(**SMALL, USE_MUON=1, MUON_NS=ns)
        engine = cpu_engine.CpuEngine(cfg)
        for t in parameters.tensors(cfg):
            if t.name in ("w_up", "w_down"):
                row, o = engine._table[t.param, t.layer], optimizers.constants(cfg, 0.5, t)
                votes = rng.integers(-999, 999, (t.rows, t.cols)).astype(np.int32)
                values = np.linalg.svd(engine._muon_direction(o, t, row, votes), compute_uv=False)
                assert low < values.min() and values.max() < high, (ns, values)


def test_no_votes_no_direction():
    engine = cpu_engine.CpuEngine(egg_config.make(**SMALL, USE_MUON=1, ADAM_WEIGHT_DECAY=0.0))
    assert engine.update(np.zeros(16, np.int8)) == 0 and not engine.state().moments.any()


def muon_digest():
    """Digests after updates with Muon, sides that fill no tile included."""
    cfg = egg_config.make(**{**SMALL, "HIDDEN_DIM": 96}, USE_MUON=1, LR_SCHEDULE=((0, 2.0),))
    engines = [cpu_engine.CpuEngine(cfg, threads=n) for n in {1, cpu_engine.hardware.cores()}]
    digests = set()
    for engine in engines:
        for step in range(2):
            engine.update(np.random.default_rng(step).integers(-1, 2, cfg.N_PAIRS).astype(np.int8))
        digests.add(engine.state().digests())
    assert len(digests) == 1, "threads change the bits"
    return digests.pop()


def test_threads_and_vector_widths_give_the_same_bits():
    code = ("import sys; sys.path.insert(0, 'tests'); import test_switches as t; from engine import simd; "
            "simd.use('portable'); print(t.product_digest())")
    other = subprocess.run([sys.executable, "-c", code], cwd=HERE, env={"PATH": "", "HOME": str(pathlib.Path.home())},
                           capture_output=True, text=True)
    assert other.stdout.split() == [product_digest()], other.stderr
    assert muon_digest()


def product_digest():
    """SHA-256 of both products of Muon on this process's vectors."""
    import hashlib
    rng = np.random.default_rng(9)
    x, square = rng.normal(size=(96, 128)).astype(np.float32), rng.normal(size=(96, 96)).astype(np.float32)
    out = [np.empty((96, 96), np.float32), np.empty((96, 128), np.float32)]
    cpu_update.muon_panels(x, x, True, np.float32(1), np.float32(1), out[0], 0, 3)
    cpu_update.muon_panels(square, x, False, np.float32(3.4445), np.float32(0.7), out[1], 0, 4)
    assert np.array_equal(out[0], chains(x, x.T))
    assert np.array_equal(out[1], fma(np.float32(0.7), chains(square, x), np.float32(3.4445) * x))
    return hashlib.sha256(out[0].tobytes() + out[1].tobytes()).hexdigest()


# --- the CUDA kernels of the switches, without a GPU -----------------------------------------------------------------

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
made = {name: cuda.jit(kernel) for name, (kernel, _) in kernels.muon.build(egg_config.make(USE_MUON=1)).items()}
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
    rng = np.random.default_rng(11)
    votes, moments = rng.integers(-999, 999, 1280).astype(np.int32), np.zeros((1280, 3), np.float32)
    moments[:, 0] = rng.normal(size=1280) * 300
    np.save(tmp_path / "votes.npy", votes)
    np.save(tmp_path / "moments.npy", moments)
    done = subprocess.run([sys.executable, "-c", SIMULATED], cwd=tmp_path, capture_output=True, text=True,
                          env={"NUMBA_ENABLE_CUDASIM": "1", "PYTHONPATH": str(HERE), "PATH": ""})
    assert done.returncode == 0, done.stderr
    m = fma(moments[:, 0], np.float32(0.85), -votes.astype(np.float32))
    a, b, c = map(np.float32, optimizers.MUON_COEFFICIENTS["quintic"])
    for rows, cols in ((80, 16), (16, 80)):
        got, matrix = np.load(tmp_path / f"{rows}.npz"), parameters.from_canonical(m, rows, cols)
        x = np.ascontiguousarray(matrix if rows < cols else matrix.T)
        x = x / norm_of(x)
        assert np.array_equal(got["moments"][:, 0], m) and np.array_equal(got["x"], x.ravel())
    square = chains(x, x.T)
    out = fma(1, chains(fma(c, chains(square, square), b * square), x), a * x)
    assert np.array_equal(np.load(tmp_path / "out.npy"), out.ravel())


def test_the_plan_of_muon_covers_the_hidden_matrices_once():
    cfg = egg_config.make(HIDDEN_DIM=96, HEAD_DIM=32, N_LAYERS=2, SEQ_LEN=8, VOCAB_SIZE=300, NTT_MODE=1, USE_MUON=1)
    plan, tensors = muon.plan(cfg), parameters.tensors(cfg)
    assert [t.name for t,
            at in zip(tensors, plan.directions) if at >= 0] == [t.name for t in tensors if t.name.startswith("w_")]
    for tiles, wide in ((plan.squares, False), (plan.wides, True)):
        for number, (first, rows, cols, short, long, at_x, at_a) in enumerate(plan.matrices):
            seen = np.zeros((short, long if wide else short), int)
            for _, i, j in tiles[tiles[:, 0] == number]:
                seen[i:i + muon.TILE, j:j + muon.TILE] += 1
            assert (seen == 1).all() and {rows, cols} == {short, long} and short <= long
    assert not len(muon.plan(egg_config.make()).matrices)


MUONS = ("muon_start", "muon_gram", "muon_mix", "optimize", "seen")
SWITCHED = dict(USE_MUON=1, ADAPTIVE_NOISE_MODE=2, RARE_TOKENS=0.01, SEEN_VOTES=4)


@pytest.mark.parametrize("names", [
    pytest.param(names, marks=pytest.mark.compiles({**SWITCHED, **more}, cards, names=names), id=f"cc{cards[0][0]}")
    for more, cards, names in (
        (dict(NTT_MODE=1, NTT_CAUSAL=0), [(8, 0)], (*MUONS, "embed")),
        (dict(NTT_MODE=3, NTT_CAUSAL=1), [(9, 0)], (*MUONS, "embed", "token")),
        (dict(NTT_MODE=3, NTT_CAUSAL=1), [cc for cc in CARDS if cc not in ((8, 0), (9, 0))], MUONS))])
def test_their_kernels_compile(names, compiled_kernels):
    """Muon's and that of SEEN_VOTES for every card, the look-ups of evaluation and validation for the oldest one, those
    of generation for cc 9.0."""
    for made in compiled_kernels.values():
        assert sorted(name for name, *_ in made) == sorted(names)
        for name, _, ptx in made:
            assert not re.search(r"\.local\b", ptx), f"{name} uses local memory"
            if name.startswith("muon"):
                used = set(re.findall(r"\b(?:mul|add|sub|fma|div|sqrt|mad|rsqrt|rcp)\.[a-z.]*f32", ptx))
                assert used <= {"mul.rn.f32", "add.rn.f32", "fma.rn.f32", "div.rn.f32", "sqrt.rn.f32"}
                assert "fma.rn.f32" in used


# --- distributed, resumed --------------------------------------------------------------------------------------------

@pytest.mark.parametrize("values", [
    dict(USE_MUON=1, NTT_MODE=3, LOSS="exact"),
    dict(SIGMA_SCHEDULE=((2, 5), (4, 1)), NTT_MODE=2, AUDIT_RATE=1.0),
    dict(SIGMA_SCHEDULE=((2, 5), (4, 1)), MODEL="gru", HEAD_DIM=64, STATE_TOKENS=3, SEEN_VOTES=4, LOSS="exact",
         SOFT_TARGETS=((1, 2), (4, 1))),
    dict(NTT_MODE=1, NTT_CAUSAL=0, USE_SAME_DATA=1, OPTIMIZER="sgd", LR_SCHEDULE=((0, 0.1), (3, 0.02)),
         RARE_TOKENS=0.01),
    dict(USE_MUON=1, MUON_NS="cubic", NTT_MODE=2, HOST_GAUSSIAN=1, HOST_MASK=7, DEVICE_GAUSSIAN=1, DEVICE_MASK=31,
         ADAPTIVE_NOISE_MODE=2,
         RARE_TOKENS=0.02, TOKEN_MASK=1)],
    ids=["muon-ntt3", "falling-noise", "falling-noise-gru", "ntt1-sgd-rare", "muon-cubic-ntt2-gaussian-tails-rare"])
def test_distributed_and_resumed(tmp_path, values):
    """Two workers that compare their digests every step, then a new coordinator that goes on with two new ones: the run
    of one engine."""
    cfg = egg_config.make(**{**SMALL, **values})
    tokens = np.random.default_rng(1).integers(0, 256, 600).astype(np.uint8)
    engine = functools.partial(cpu_engine.CpuEngine, cfg, tokens, threads=1)
    alone, changed = engine(), 0
    for _ in range(6):
        chunks = [fitness_digits.chunk_fitness(alone.evaluate(c * cfg.CHUNK_SIZE, cfg.CHUNK_SIZE),
                                           cfg) for c in range(cfg.N_CHUNKS)]
        changed += alone.update(np.concatenate(chunks))
    for steps in (3, 6):
        workers = [engine(), engine()]
        server = cluster(tmp_path, workers, steps, cfg, save=True)
        assert "not that of others" not in server.lines.text and server.failure is None
        assert ("| Noise: 5 | Net" in server.lines.text) == ("SIGMA_SCHEDULE" in values)
    assert changed > 0 and [w.state().digests() for w in workers] == [alone.state().digests()] * 2
    run = history.open_run(cfg, tmp_path)
    replica = engine()
    history.replay(run, replica)
    run.close()
    assert replica.state().digests() == alone.state().digests()


def test_the_schedule_is_that_of_the_specification_and_data():
    rates = {0: 0.5, 99: 0.5, 100: 0.25, 199: 0.25, 200: 0.125, 10**6: 0.125}
    assert {step: egg_config.make().learning_rate(step) for step in rates} == rates
    cfg = egg_config.load(defines=["LR_SCHEDULE=0:1,7:0.5,9:0"], environ={})
    assert [cfg.learning_rate(step) for step in (6, 7, 8, 9, 100)] == [1.0, 0.5, 0.5, 0.0, 0.0]


@pytest.mark.parametrize("rest", [dict(NTT_MODE=3), dict(MODEL="gru", HEAD_DIM=64)], ids=["transformer", "gru"])
def test_noise_is_as_loud_as_its_schedule_says(rest):
    """The losses of a step are those of SIGMA_SHIFT alone, and of a plain reading of the rules; what is without noise
    does not change."""
    tokens = np.random.default_rng(1).integers(0, 256, 600).astype(np.uint8)
    cfg = egg_config.make(**{**SMALL, **rest}, SIGMA_SCHEDULE=((2, 5), (4, 0)))
    assert [cfg.sigma_shift(step) for step in (0, 1, 2, 3, 4, 999)] == [3, 3, 5, 5, 0, 0]
    assert "SIGMA_SHIFT 3, then 5 from step 2, 0 from step 4\n" in arch.describe(cfg)
    assert "targets" not in arch.describe(cfg)
    engine, found = cpu_engine.CpuEngine(cfg, tokens, threads=1), []
    for step, shift in (3, 5), (1, 3), (9, 0):
        state = engine.state()
        state.step = step
        alone = cpu_engine.CpuEngine(egg_config.make(**{**SMALL, **rest}, SIGMA_SHIFT=shift), tokens, threads=1)
        for one in engine, alone:
            one.load(state)
        found.append(engine.evaluate(0, 8))
        windows = rules.windows(cfg, tokens, step, 0, 4)
        assert np.array_equal(found[-1], alone.evaluate(0, 8)) and engine.validate(windows) == alone.validate(windows)
        if cfg.MODEL == "transformer":
            assert found[-1].tolist() == [loss_of(member_reading(cfg, state, i), windows[i // 2]) for i in range(8)]
    assert not np.array_equal(found[0], found[1]) and not np.array_equal(found[0], found[2])


def test_a_run_without_a_schedule_is_as_before(tmp_path, monkeypatch):
    """It neither stores nor sends the constant, and goes on although egg_config.py now has a schedule."""
    cfg = egg_config.make(**SMALL)
    assert "SIGMA_SCHEDULE" not in {**cfg.shared(), **cfg.saved(), **history.non_default(cfg)}
    history.open_run(cfg, tmp_path).close()
    edited = egg_config.CONSTANTS["SIGMA_SCHEDULE"]._replace(value=((0, 7),))
    monkeypatch.setitem(egg_config.CONSTANTS, "SIGMA_SCHEDULE", edited)
    falling, saved = egg_config.make(**SMALL), history.configuration(tmp_path)
    assert falling.SIGMA_SCHEDULE and "SIGMA_SCHEDULE" in falling.shared()
    assert "SIGMA_SCHEDULE" not in history.non_default(falling)
    again = egg_config.load(environ={}, saved=saved)
    assert again.SIGMA_SCHEDULE == () and history.non_default(again)["SIGMA_SCHEDULE"] == ()
    history.open_run(again, tmp_path).close()
    with pytest.raises(history.HistoryError, match="SIGMA_SCHEDULE = unknown there"):
        history.open_run(falling, tmp_path)
    assert egg_config.load(defines=["SIGMA_SCHEDULE=4:5,9:6"], environ={}).SIGMA_SCHEDULE == ((4, 5), (9, 6))
    assert egg_config.load(defines=["SIGMA_SCHEDULE="], environ={}).SIGMA_SCHEDULE == ()
    with pytest.raises(egg_config.ConfigError, match="'4' is not step:shift,step:shift,..."):
        egg_config.load(defines=["SIGMA_SCHEDULE=4"], environ={})


@pytest.mark.parametrize("preset", egg_config.PRESETS)
def test_presets_are_good_and_those_of_the_recurrent_model_take_the_fast_path(preset):
    cfg = egg_config.load(preset, environ={})
    forward = cuda_engine.kernels(cfg, (9, 0), CARDS[9, 0] * 1024, uint32)[0]
    path = "registers" if cfg.HIDDEN_DIM < 256 else "wgmma"
    assert (path_of(forward) == path) == (cfg.MODEL == "gru")


# --- rates and initial values by token -------------------------------------------------------------------------------

@pytest.mark.parametrize("rest", [dict(), dict(OPTIMIZER="sgd"), dict(USE_MUON=1), dict(MODEL="gru", HEAD_DIM=64)],
                         ids=["adamw", "sgd", "muon", "gru"])
def test_rare_tokens_learn_more_slowly(rest):
    """The first update's accumulators, bit for bit: beside a run without the switch only the columns of rare tokens
    differ, by their factor."""
    tokens = np.repeat(np.arange(200), np.arange(200) ** 2 // 50 + 1).astype(np.uint8)
    tokens = np.concatenate([tokens, np.full(3 * tokens.size, 5, np.uint8)])
    # powers of two, so that nothing is rounded twice
    learning = 2 ** -13 if rest.get("OPTIMIZER") == "sgd" else 0.25
    plain = egg_config.make(**{**SMALL, **rest}, LR_SCHEDULE=((0, learning),))
    cfg = egg_config.make(**{**SMALL, **rest}, LR_SCHEDULE=((0, learning),), RARE_TOKENS=0.004)
    fitness = np.random.default_rng(1).integers(-1, 2, cfg.N_PAIRS).astype(np.int8)
    engines = [cpu_engine.CpuEngine(c, tokens, threads=1) for c in (plain, cfg)]
    for engine in engines:
        engine.update(fitness)
    without, got = (engine.state() for engine in engines)
    share = np.bincount(tokens, minlength=256) / tokens.size
    factor = np.sqrt(np.minimum(1, share / 0.004)).astype(np.float32)
    assert factor[5] == 1 and factor[250] == 0 and 0 < factor[20] < factor[190] < 1
    tables = [t for t in parameters.tensors(cfg) if t.by_token]
    assert [t.name for t in tables] == (["embedding", "head"] if cfg.MODEL == "gru" else ["embedding"])
    for t in parameters.tensors(cfg):
        part = slice(t.weights, t.weights + t.size)
        if t not in tables:
            assert np.array_equal(got.moments[part],
                                  without.moments[part]) and np.array_equal(got.weights[part], without.weights[part])
            continue
        assert np.array_equal(got.moments[part, :2], without.moments[part, :2])
        scale = np.tile(np.repeat(factor, 4), t.rows // 4)
        where = (scale < 1) & (np.abs(without.moments[part, 2]) < 1) & (got.weights[part] == without.weights[part])
        assert where.sum() > t.size // 4
        assert np.array_equal(got.moments[part, 2][where], (without.moments[part, 2] * scale)[where])
        assert not got.moments[part, 2][scale == 0].any() and got.moments[part, 2][scale > 0].any()


@pytest.mark.parametrize("values", [dict(RARE_TOKENS=0.01), dict(SEEN_VOTES=2)], ids=lambda values: next(iter(values)))
def test_what_reads_the_data_needs_them(values):
    engine = cpu_engine.CpuEngine(egg_config.make(**SMALL, **values), None, threads=1)
    with pytest.raises(ValueError, match=f"{next(iter(values))} needs the training data"):
        engine.update(np.ones(16, np.int8))


def seen_by_hand(cfg, state, tokens, t, fitness, often):
    """int64 [rows, cols]: the votes of SPEC 9 for a table by token, in plain NumPy; those on tokens in a pair's window
    count `often` times, the others once."""
    reading, votes = Reading(cfg, state), 0
    windows = rules.windows(cfg, tokens, state.step, 0, cfg.N_PAIRS)[:, cfg.STATE_TOKENS:]
    for q in np.flatnonzero(fitness):
        a, b = (reading.noise(state.seed + int(q) + seed, np.arange(n)).astype(np.int64)
                for seed, n in ((t.seed_a, t.cols), (t.seed_b, t.rows)))
        a, b = (a, b) if cfg.USE_CLT else (np.sign(a), np.sign(b))
        votes = votes + int(fitness[q]) * np.outer(b, a * np.where(np.isin(np.arange(t.cols), windows[q]), often, 1))
    return votes


SEEN = (dict(), dict(USE_CLT=0, DEVICE_GAUSSIAN=1, DEVICE_MASK=31, GROUP_SIZE=4),
        dict(MODEL="gru", HEAD_DIM=64, STATE_TOKENS=3, USE_SAME_DATA=1))


@pytest.mark.parametrize("threads", (1, 2))
@pytest.mark.parametrize("values", SEEN, ids=("transformer", "signs", "gru"))
def test_votes_on_the_tokens_of_a_window_count_more(values, threads):
    """A step of sgd with a rate that rounds nothing, held against plain NumPy. Tokens come more than once in a window,
    and most never come."""
    cfg = egg_config.make(**{**SMALL, "CHUNK_SIZE": 64, "POPULATION_SIZE": 32 * 64, **values}, SEEN_VOTES=5,
                          OPTIMIZER="sgd", LR_SCHEDULE=((0, 2.0 ** -12),))
    rng = np.random.default_rng(5)
    tokens, fitness = rng.integers(0, 40, 500).astype(np.uint32), rng.integers(-1, 2, cfg.N_PAIRS).astype(np.int8)
    engine = cpu_engine.CpuEngine(cfg, tokens, threads=threads)
    before = engine.state()
    engine.update(fitness)
    after = engine.state()
    for t in (t for t in parameters.tensors(cfg) if t.by_token):
        part = slice(t.weights, t.weights + t.size)
        often = 5 if t.name == "embedding" else 1
        votes = parameters.to_canonical(seen_by_hand(cfg, before, tokens, t, fitness, often))
        moved = after.weights[part].astype(np.int64) - before.weights[part] + after.moments[part, 2].astype(np.float64)
        assert np.array_equal(moved, votes * (2.0 ** -12 / 2 ** 5)) and votes.any(), t.name


SIMULATED_SEEN = """
import json, sys
import numpy as np
from numba import cuda
import egg_config
from kernels import update
from model import parameters, rules
cfg = egg_config.make(**json.loads(sys.argv[1]))
tokens, fitness = np.load("tokens.npy"), np.load("fitness.npy")
fit, votes = np.pad(fitness, update.FIT_PAD), np.zeros(parameters.n_weights(cfg), np.int32)
tables = np.array([(t.weights, t.seed_a, t.seed_b) for t in parameters.tensors(cfg) if t.seen], np.int32)
windows = rules.windows(cfg, tokens, 3, 0, cfg.N_PAIRS).ravel()
kernel = cuda.jit(update.seen_kernel(cfg))
kernel[cfg.N_PAIRS * len(tables), update.THREADS](windows, tables, fit, np.array([77], np.uint32), votes)
np.save("votes.npy", votes)
"""


@pytest.mark.parametrize("values", SEEN, ids=("transformer", "signs", "gru"))
def test_the_kernel_of_seen_votes_in_the_simulator(tmp_path, values):
    """Thread by thread in Python: what the tokens of a window count more than once, in every bit."""
    values = {**SMALL, "CHUNK_SIZE": 8, "POPULATION_SIZE": 8, **values, "SEEN_VOTES": 4}
    cfg, rng = egg_config.make(**values), np.random.default_rng(6)
    tokens, fitness = rng.integers(0, 40, 500).astype(np.uint32), np.array([1, 0, -1, 1], np.int8)
    np.save(tmp_path / "tokens.npy", tokens)
    np.save(tmp_path / "fitness.npy", fitness)
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", SIMULATED_SEEN, json.dumps(values)], cwd=tmp_path,
                          capture_output=True, text=True,
                          env={"NUMBA_ENABLE_CUDASIM": "1", "PYTHONPATH": str(HERE), "PATH": ""})
    assert done.returncode == 0, done.stderr
    state, votes = parameters.initial_state(cfg), np.load(tmp_path / "votes.npy")
    state.step, state.seed = 3, 77
    for t in parameters.tensors(cfg):
        want = np.zeros(t.size, np.int64)
        if t.seen:
            once, four = (seen_by_hand(cfg, state, tokens, t, fitness, often) for often in (1, 4))
            want = parameters.to_canonical(four - once)
        assert np.array_equal(votes[t.weights:t.weights + t.size], want) and want.any() == t.seen, t.name


def test_shares_are_of_all_the_data():
    cfg = egg_config.make(RARE_TOKENS=0.5, VOCAB_SIZE=300)
    tokens = np.zeros((1 << 24) + 100, np.uint32)
    tokens[-25:] = 299
    rates = optimizers.token_rates(cfg, tokens)
    assert rates.dtype == np.float32 and rates.shape == (300,) and rates[0] == 1 and not rates[1:299].any()
    assert rates[299] == np.float32(np.sqrt(50 / tokens.size))


@pytest.mark.parametrize("model", ["transformer", "gru"])
def test_initial_values_of_tables_by_token(model):
    rest = dict(SMALL, HEAD_DIM=64, MODEL=model)
    states = {mask: parameters.initial_state(egg_config.make(**rest, HOST_MASK=7, TOKEN_MASK=mask))
              for mask in (-1, 7, 1, 0)}
    assert np.array_equal(states[-1].weights, states[7].weights)
    for t in parameters.tensors(egg_config.make(**rest)):
        parts = {mask: state.weights[t.weights:t.weights + t.size] for mask, state in states.items()}
        if t.by_token:
            assert set(parts[1]) == {-1, 0, 1} and not parts[0].any()
            assert np.array_equal(parts[1], np.sign(parts[7]) * (np.abs(parts[7]) & 1))
        else:
            assert np.array_equal(parts[1], parts[7])
