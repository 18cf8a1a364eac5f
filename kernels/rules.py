"""The rules of `model.rules` as device functions, with the constants of a configuration frozen (SPEC 2, 4, 7, 14)."""

from numba import cuda, int32, int64, uint32
from numba.cuda import libdevice

from kernels import ptx
from model import integer_tables, parameters, rules

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
    """Device functions of the noise, constants frozen:

    noise(seed, i) -> int32                  SPEC 2; fits int8
    factor(overlay, seed, i) -> float32      SPEC 4; seed: of the stream that is scaled (used in mode 2 only)
    scaled(p, overlay, seed, i) -> int32     trunc(p * factor), p an integer below 2^24 in size
    input_coefficient(n, overlay) -> int32   the noise n of an input as the next ones want it
    input_term(x, c, f) -> int32             a term of sb: trunc(x * noise * factor); c: input_coefficient; f: the
                                             factor (mode 2)
    input_fold(pb, x, c, f) -> int32         the next running integer of a down projection
    table_term(a, factor_a, b, factor_b) -> int32    trunc(a * b * factors), the noise of a column that is looked up
    whole(overlay) -> int32                  1 where the factor is 1 whatever the stream, else 0
    """
    MASK, MODE = cfg.DEVICE_MASK, cfg.ADAPTIVE_NOISE_MODE
    drawn, scale = rules.draw_rules(device, cfg.DEVICE_GAUSSIAN), rules.factor_rules(device, TARGET, MODE)
    hash32 = drawn.hash32
    draw = drawn.draw

    @device
    def noise(seed, i):
        return draw(hash32(seed, i), MASK)

    @device
    def whole(overlay):
        return int32(1) if MODE == 0 or MODE == 1 and overlay >= 64 else int32(0)

    vars(scale).update(noise=noise, whole=whole)
    return scale


@device
def byte_of(k, c):
    """The byte of a coefficient that selects a column of table k of NTT_MODE."""
    return (c >> int32(8 * k + 8)) & 255


def ntt_functions(cfg, causal):
    """(coefficient, place), device functions for NTT_MODE (model.integer_tables), (None, None) without it:

    coefficient(tokens, first, position) -> int32   of a sequence that begins at tokens[first]
    place(k, c, i) -> int64                         where in the weights table k has, for coefficient c, hidden unit i
    """
    if not cfg.NTT_MODE:
        return None, None
    T = cfg.SEQ_LEN
    P = integer_tables.PRIME[cfg.NTT_MODE]
    ROOT = integer_tables.root(cfg.NTT_MODE, T) if P else 1
    first_table = next(t for t in parameters.tensors(cfg) if t.name == "ntt_emb_1")         # alike, evenly spaced
    AT, COLS, SIZE = first_table.weights, first_table.cols, first_table.size

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
    def place(k, c, i):
        return AT + k * SIZE + (i >> 2) * (4 * COLS) + byte_of(k, c) * 4 + (i & 3)

    return coefficient, place
