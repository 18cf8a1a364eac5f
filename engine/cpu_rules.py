"""The rules of `model.rules` compiled for the CPU.

A switch (noise mode, Gaussian draws, exact loss) is a value at run time here, the first argument of the rule, so that
one compiled set of kernels serves every configuration. Rules are cached on disk only within the kernels that call them.
"""

import numpy as np
from llvmlite import ir
from numba.types import float32, int32, int64

from engine.cpu_compiler import inlined
from engine.simd import operation
from model import rules

i32 = np.int32
u32 = np.uint32
f32 = np.float32
f64 = np.float64
_rules = {}


def rule(function):
    """A decorator like `cpu_compiler.inlined`. A rule that `model.rules` builds alike for several variants is compiled
    once."""
    key = function.__code__, *(cell.cell_contents for cell in function.__closure__ or ())
    return _rules.setdefault(key, inlined(function))


@operation(float32)
def fma(builder, a: float32, b: float32, c: float32):
    """a * b + c, rounded once."""
    return builder.fma(a, b, c)


@operation(int32)
def shift_right(builder, a: int32, n: int32):
    """a >> n, n below 32. The shift of numba has 64 bits, which takes three vector instructions more."""
    return builder.ashr(a, n)


@operation(int64)
def log2_floor(builder, q: int64):
    return builder.sub(q.type(63), builder.ctlz(q, ir.IntType(1)(1)))


@rule
def trunc(f):
    inside = i32(max(f32(-2147483648.0), min(f32(2147483520.0), f)))
    return inside if f < f32(2147483648.0) else i32(2147483647)


@rule
def trunc_64th(p):
    return i32(i32(p + i32(i32(p >> i32(31)) & i32(63))) >> i32(6))


@rule
def divide(p, d):
    # half a unit off the integers, the product by the reciprocal truncates exactly like the division, and is vectorised
    q = i32((abs(f64(p)) + 0.5) * (1.0 / d))
    return q if p >= 0 else i32(-q)


TARGET = rules.Arithmetic(
    trunc, trunc_64th, divide, log2_floor, sqrt=rule(lambda a: f32(np.sqrt(a))), fma=fma,
    add=rule(lambda a, b: f32(a + b)), sub=rule(lambda a, b: f32(a - b)), mul=rule(lambda a, b: f32(a * b)),
    div=rule(lambda a, b: f32(a / b)))


def _switched(*variants):
    """A rule whose first argument is the number of the variant, of two or three, that it calls."""
    zero, one = variants[:2]
    two = variants[-1]

    @rule
    def switched(switch, *arguments):
        if switch == 0:
            return zero(*arguments)
        if switch == 1:
            return one(*arguments)
        return two(*arguments)
    return switched


def _by_mode(name):
    return _switched(*(getattr(rules.factor_rules(rule, TARGET, mode), name) for mode in range(3)))


_draws = [rules.draw_rules(rule, gaussian) for gaussian in range(2)]
hash32 = _draws[0].hash32
# draw(gaussian, r, mask)
draw = _switched(*(variant.draw for variant in _draws))
# each (mode, ...)
factor = _by_mode("factor")
scaled = _by_mode("scaled")
input_coefficient = _by_mode("input_coefficient")
input_term = _by_mode("input_term")
input_fold = _by_mode("input_fold")
table_term = rules.factor_rules(rule, TARGET, 2).table_term
# loss(exact, ...)
loss = _switched(*(rules.loss_rule(rule, TARGET, exact) for exact in range(2)))
# `quotient` truncates small numbers only
_norms = rules.norm_rules(rule, TARGET._replace(trunc=rule(lambda f: i32(f))))
clip = _norms.clip
quotient = _norms.quotient
gate = _norms.gate
gated = _norms.gated
next_state = _norms.next_state
normed = _norms.normed
_activations = rules.activation_rules(rule)
signed = _activations.signed
digit = _activations.digit
credited = _activations.credited
rounded = _activations.rounded
settled = _activations.settled
weighed = _activations.weighed
attention_share = _activations.attention_share
handed_down = _activations.handed_down
excess = _activations.excess
weighed_excess = _activations.weighed_excess
dithered = _activations.dithered
_updates = rules.update_rules(rule, TARGET)
adamw = _updates.adamw
sgd = _updates.sgd
muon = _updates.muon
whole_step = _updates.whole_step
ztest = _updates.ztest
_sampling = rules.sampling_rules(rule, TARGET)
score = _sampling.score
share = _sampling.share
