"""How numba compiles the CPU engine: the decorators, `njit` for what Python calls, `inner`, `leaf` and `inlined` for
what only compiled functions call; and the rules of `model.rules`, compiled.

A switch (noise mode, Gaussian draws, exact loss) is a value at run time here, the first argument of the rule, so that
one compiled set of kernels serves every configuration. Rules are cached on disk only within the kernels that call them.
"""

import ctypes
import functools

import llvmlite.binding
import numba
import numpy as np
from llvmlite import ir
from numba.core import cgutils, codegen, compiler, config
from numba.types import float32, int32, int64

from engine import kernel_cache
from engine.simd import operation
from model import rules

# LLVM prefers registers of 256 bits where it has larger ones. Read when numba compiles its first function.
config.CPU_FEATURES = config.CPU_FEATURES or llvmlite.binding.get_host_cpu_features().flatten() + ",-prefer-256-bit"


class Inner(codegen.JITCodeLibrary):
    """A function that is optimized and becomes machine code only within its callers. numba does both for every function
    too: then all kernels of `laptop` take 31 s of one core to compile and not 18 s, and `evaluate` takes half as long
    again."""

    def finalize(self):
        self._raise_if_finalized()
        for library in dict.fromkeys(self._linking_libraries):
            self._final_module.link_in(library._get_module_for_linking(), preserve=True)
        self._final_module.verify()
        self._finalize_dynamic_globals()
        self._finalized = True

    # numba asks for these so that Python can call the function; a call raises a TypeError
    codegen = property(lambda self: self)

    def set_env(self, name, environment):
        """Nothing: without machine code there is no environment."""

    def get_pointer_to_function(self, name):
        return ctypes.cast(ctypes.pythonapi.PyErr_BadArgument, ctypes.c_void_p).value


class InnerCompiler(compiler.Compiler):
    """Compiles a function into an `Inner`."""

    def compile_extra(self, function):
        self.state.library = Inner(self.state.targetctx.codegen(), function.__qualname__)
        self.state.library.enable_object_caching()
        return super().compile_extra(function)


def njit(function):
    """Like numba.njit(nogil=True, error_model="numpy"), with a CpuCache."""
    compiled = numba.njit(nogil=True, error_model="numpy", no_cfunc_wrapper=True)(function)
    compiled._cache = kernel_cache.CpuCache(function)
    return compiled


inner = functools.partial(numba.njit, nogil=True, error_model="numpy", no_cpython_wrapper=True, no_cfunc_wrapper=True,
                          pipeline_class=InnerCompiler)
# allocates no array and counts no references, because counting takes longer than a short row
leaf = functools.partial(inner, _nrt=False)
# for what is called once a row
inlined = functools.partial(leaf, forceinline=True)


# --- the rules --------------------------------------------------------------------------------------------------------

i32 = np.int32
u32 = np.uint32
f32 = np.float32
f64 = np.float64
_rules = {}


def rule(function):
    """A decorator like `inlined`. A rule that `model.rules` builds alike for several variants is compiled
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


@operation(int32)
def bits(builder, f: float32):
    return builder.bitcast(f, ir.IntType(32))


@operation(float32)
def float_of(builder, n: int32):
    return builder.bitcast(n, ir.FloatType())


@operation(float32)
def rint(builder, f: float32):
    """To the nearest whole number, ties to even."""
    return builder.call(cgutils.get_or_insert_function(builder.module, ir.FunctionType(f.type, [f.type]),
                                                       "llvm.rint.f32"), [f])


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
    div=rule(lambda a, b: f32(a / b)), bits=bits, float_of=float_of,
    nearest=rule(lambda f: i32(rint(max(f32(-2147483648.0), min(f32(2147483520.0), f))))))


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
_units = rules.unit_rules(rule, TARGET)
attention_share = _units.attention_share
share_unit = _units.share_unit
softmax_share = _units.share
dither_of = _units.dither_of
excess = _units.excess
error = _units.error
exponent = _units.exponent
power = _units.power
whole = _units.whole
digit = rules.vote_rules(rule).digit
_updates = rules.update_rules(rule, TARGET)
momentum = _updates.momentum
step = _updates.step
move_digit = _updates.move_digit
_sampling = rules.sampling_rules(rule, TARGET)
score = _sampling.score
share = _sampling.share
