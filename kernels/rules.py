"""The rules of `model.rules` as device functions, with the constants of a configuration frozen (SPEC 2, 4, 7)."""

from numba import cuda, int32, uint32
from numba.cuda import libdevice

from kernels import ptx
from model import integer_tables, rules

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
    fma=libdevice.fmaf_rn, add=libdevice.fadd_rn, sub=libdevice.fsub_rn, mul=libdevice.fmul_rn, div=libdevice.fdiv_rn)
NORMS = rules.norm_rules(device, TARGET)


def loudest(cfg):
    """Largest size of a noise value."""
    return cfg.DEVICE_MASK * (3 if cfg.DEVICE_GAUSSIAN else 1)


def build_noise(cfg, silent=False):
    """Device functions of the noise streams, constants frozen; silent: all noise is 0 and nothing is hashed, for
    passes without noise on weights.

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
        if silent:
            return int32(0)
        return draw(hash32(seed, i), MASK)

    @device
    def input_coefficient(overlay, seed, i):
        return coefficient(noise(seed, i), overlay)

    @device
    def whole(overlay):
        return int32(1) if MODE == 0 or MODE == 1 and overlay >= 64 else int32(0)

    vars(scale).update(hash32=hash32, noise=noise, input_coefficient=input_coefficient,
                       whole=whole, silent=silent)
    return scale


def loss_function(cfg):
    """Device function: loss (int64) of a position from Q (int64), the largest logit and the target's (SPEC 7); of
    several targets: their number times the largest, and the sum of theirs."""
    BIT = cfg.SOFTMAX_SCALE_BIT
    UNIT = integer_tables.log_unit(cfg)
    UNIT_OF_DISTANCE = 256 // cfg.TARGETS
    rule = rules.loss_rule(device, TARGET, cfg.LOSS == "exact")

    @device
    def loss(total, top, target):
        return rule(total, top, target, BIT, UNIT, UNIT_OF_DISTANCE)

    return loss
