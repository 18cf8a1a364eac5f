"""The rules of `model.rules` as device functions, with the constants of a configuration frozen (SPEC 2, 4, 7); and
parameters as the members of a pair see them: noise of columns and inputs, perturbed vectors and tables.

A row of the plan (kernels.host.Plan) has four entries of a vector (W_...), two of a matrix (M_...) and two of the
input side of a matrix (I_...): where it begins, the seeds of its noise relative to that of the pair, and where its
noise scales begin in the overlay."""

from typing import NamedTuple

from numba import cuda, float32, int32, int64, uint32, uint64
from numba.cuda import libdevice

from kernels import ptx
from model import integer_tables, parameters, rules

W_FIRST, W_SEED_A, W_SEED_B, W_OVERLAY = range(4)
M_SEED, M_OVERLAY = range(2)
I_SEED, I_OVERLAY = range(2)

device = cuda.jit(device=True, inline=True)


@device
def log2_floor(q):
    return int32(63 - cuda.clz(q))


@device
def divide(p, d):
    """p / d toward zero. Divides the absolute values as unsigned numbers, which takes fewer instructions."""
    q = int32(uint32(abs(p)) // uint32(d))
    return q if p >= 0 else int32(-q)


TARGET = rules.Arithmetic(
    trunc=ptx.trunc_f32, trunc_64th=ptx.trunc_64th, divide=divide, log2_floor=log2_floor, sqrt=libdevice.fsqrt_rn,
    fma=libdevice.fmaf_rn, add=libdevice.fadd_rn, sub=libdevice.fsub_rn, mul=libdevice.fmul_rn, div=libdevice.fdiv_rn,
    bits=ptx.float_bits, float_of=ptx.bits_float, nearest=libdevice.float2int_rn)
NORMS = rules.norm_rules(device, TARGET)


def loudest(cfg):
    """Largest size of a noise value."""
    return cfg.DEVICE_MASK * (3 if cfg.DEVICE_GAUSSIAN else 1)


def build_noise(cfg):
    """Device functions of the noise streams, constants frozen.

    hash32(seed, i) -> uint32                SPEC 2; arguments are taken modulo 2^32
    noise(seed, i) -> int32                  fits int8
    factor(overlay, seed, i) -> float32      SPEC 4; seed: of the stream that is scaled (used in mode 2 only)
    scaled(p, overlay, seed, i) -> int32     trunc(p * factor), p an integer below 2^24 in size
    input_coefficient(overlay, seed, i) -> int32    the noise of input i as the next one wants it
    input_term(x, c, f) -> int32             a term of sb: trunc(x * noise * factor); c: input_coefficient; f: the
                                             factor (mode 2)
    input_fold(pb, x, c, f) -> int32         the next running integer of a down projection
    whole(overlay) -> int32                  1 where the factor is 1 whatever the stream, else 0
    """
    MASK, MODE = cfg.DEVICE_MASK, cfg.ADAPTIVE_NOISE_MODE
    drawn, scale = rules.draw_rules(device, cfg.DEVICE_GAUSSIAN), rules.factor_rules(device, TARGET, MODE)
    hash32 = drawn.hash32
    draw = drawn.draw
    coefficient = scale.input_coefficient

    @device
    def noise(seed, i):
        return draw(hash32(seed, i), MASK)

    @device
    def input_coefficient(overlay, seed, i):
        return coefficient(noise(seed, i), overlay)

    @device
    def whole(overlay):
        return int32(1) if MODE == 0 or MODE == 1 and overlay >= 64 else int32(0)

    vars(scale).update(hash32=hash32, noise=noise, input_coefficient=input_coefficient, whole=whole)
    return scale


# --- pairs ------------------------------------------------------------------------------------------------------------

class Source(NamedTuple):
    """What the noise and the vectors of a call are made of, in a running kernel: the arrays, the first entry of its row
    of the plan, and the seed of pair 0."""
    plan: object
    p: int
    weights: object
    overlay: object
    job: object
    seed: int


@device
def source_of(plan, p, weights, overlay, job, offset):
    """The Source whose pair 0 is pair `offset` of the job."""
    return Source(plan, p, weights, overlay, job, uint32(uint32(job[0] + job[1]) + uint32(offset)))


@device
def stream_of(source, at, pair):
    """The noise stream of a pair whose seed, relative to the pair's, is plan[at]."""
    return uint32(uint32(source.seed + uint32(pair)) + uint32(source.plan[source.p + at]))


def pair_functions(cfg, nz):
    """(column, vector), device functions of a Source, with the noise masked by job[2] as int32: -1, or 0.

    column(source, pair, i, at)     noise of column i of the matrix at plan[at]
    vector(source, at, pair, i)     entry i of the vector at plan[at] as the even and the odd member see it
    """
    SHIFT = cfg.SIGMA_SHIFT_VECTOR
    noise = nz.noise
    scaled = nz.scaled

    @device
    def column(source, pair, i, at=0):
        stream, first = stream_of(source, at + M_SEED, pair), source.plan[source.p + at + M_OVERLAY]
        return int32(scaled(noise(stream, i), source.overlay[uint64(first + i)], stream, i) & int32(source.job[2]))

    @device
    def vector(source, at, pair, i):
        plan = source.plan
        at = source.p + at
        seed = uint32(source.seed + uint32(pair))
        one, other = uint32(seed + uint32(plan[at + W_SEED_A])), uint32(seed + uint32(plan[at + W_SEED_B]))
        w = int32(source.weights[uint64(plan[at + W_FIRST] + i)])
        product = int32(noise(one, i) * noise(other, i))
        p = int32(scaled(product, source.overlay[uint64(plan[at + W_OVERLAY] + i)], one, i) & int32(source.job[2]))
        return int32(w + (p >> SHIFT)), int32(w + (int32(-p) >> SHIFT))

    return column, vector


def ntt_functions(cfg, nz, causal):
    """(coefficient, look_up), device functions for NTT_MODE (model.integer_tables), (None, None) without it:

    coefficient(tokens, first, position) -> int32           of a sequence that begins at tokens[first]
    look_up(weights, overlay, seed, mask, c, i) -> (even, odd)   what the tables of bytes add to hidden unit i of the
                                                            members for a coefficient; mask: of the noise, -1 or 0
    """
    if not cfg.NTT_MODE:
        return None, None
    H = cfg.HIDDEN_DIM
    T = cfg.SEQ_LEN
    SHIFT = cfg.NOISE_SHIFT
    P = integer_tables.PRIME[cfg.NTT_MODE]
    ROOT = integer_tables.root(cfg.NTT_MODE, T) if P else 1
    one, two, _ = [t for t in parameters.tensors(cfg) if t.name.startswith("ntt_emb")]     # alike, evenly spaced
    AT = one.weights
    SEED = one.seed_a
    OVER_A = one.overlay_a
    OVER_B = one.overlay_b
    COLS = one.cols
    SIZE = one.size
    SEEDS = two.seed_a - SEED
    OVERS = two.overlay_a - OVER_A
    noise, factor = nz.noise, nz.factor

    @device
    def coefficient(tokens, first, position):
        t = position % T
        first, last = first + position - t, t if causal else T - 1
        c = int64(0)
        if P == 0:
            for i in range(last + 1):
                x = int64(tokens[first + i])
                c += -x if cuda.popc(int32(i & t)) & 1 else x
        else:
            # z = ROOT^t
            z = int64(1)
            power = t
            square = int64(ROOT)
            while power:
                if power & 1:
                    z = z * square % P
                square = square * square % P
                power >>= 1
            for i in range(last, -1, -1):                    # Horner's rule
                c = (c * z + tokens[first + i]) % P
        return int32(c)

    @device
    def look_up(weights, overlay, seed, mask, c, i):
        even, odd = int32(0), int32(0)
        for k in range(3):
            value = int32((c >> int32(8 * k + 8)) & 255)
            w = int32(weights[AT + k * SIZE + (i >> 2) * (4 * COLS) + value * 4 + (i & 3)])
            stream = uint32(seed + uint32(SEED + k * SEEDS))
            other = uint32(stream + uint32(H))
            p = float32(int32((noise(stream, value) * noise(other, i)) & mask))
            p *= factor(overlay[OVER_A + k * OVERS + value], stream, value)
            d = ptx.trunc_f32(p * factor(overlay[OVER_B + k * OVERS + i], other, i))
            even = int32(even + (int32(w + (d >> SHIFT)) >> 2))
            odd = int32(odd + (int32(w + (int32(-d) >> SHIFT)) >> 2))
        return even, odd

    return coefficient, look_up
