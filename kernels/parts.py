"""What the kernels of the forward passes share: the GPU that they are made for, the types of their arrays, unrolled
loops, small device functions, and quotients. (The noise of a pair is in kernels.noise.)"""

import ast
import functools
import inspect
import textwrap
from typing import NamedTuple

import numpy as np
from numba import cuda, float32, float64, int8, int16, int32, int64, types, uint8, uint32

from kernels import ptx
from kernels.rules import device
from model import integer_tables

SIGNS = 0x80808080 - (1 << 32)              # of the bytes of a word: x ^ SIGNS is x + 128
# the types of arrays, which annotate parameters of kernels; a parameter without annotation is an int64
A8 = types.Array(int8, 1, "C")
A16 = types.Array(int16, 1, "C")
A32 = types.Array(int32, 1, "C")
AU32 = types.Array(uint32, 1, "C")
A64 = types.Array(int64, 1, "C")
AF64 = types.Array(float64, 1, "C")
B1 = types.Array(uint8, 1, "C")
F1 = types.Array(float32, 1, "C")
F2 = types.Array(float32, 2, "C")
A2 = types.Array(int32, 2, "C")


def blocks(n, size):
    return (n + size - 1) // size


def aligned(n):
    return blocks(n, 256) * 256


# --- loops over registers ---------------------------------------------------------------------------------------------

@device
def unrolled(values):
    """The range of a loop over registers: `unroll` replaces the loop, and other compilers unroll it themselves."""
    return values


def _is_unrolled(node):
    return isinstance(node, ast.For) and isinstance(node.iter, ast.Call) and ast.unparse(node.iter.func) == "unrolled"


@functools.cache
def syntax_of(code):
    """(syntax tree of a function's code, the nodes of it that are the same in every turn of its `unrolled` loops)."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(code)))
    tree.body[0].decorator_list = []
    for parameter in tree.body[0].args.args:
        parameter.annotation = None
    turning = {node.target.id for node in ast.walk(tree) if _is_unrolled(node)}
    return tree, {node for node in ast.walk(tree) if not any(
        _is_unrolled(part) or isinstance(part, ast.Name) and part.id in turning for part in ast.walk(node))}


def unroll(function):
    """The function without its `unrolled` loops, for compilers that leave them loops: registers cannot be indexed, so
    the arrays would lie in local memory."""
    tree, fixed = syntax_of(function.__code__)
    names = {**function.__globals__, **inspect.getclosurevars(function).nonlocals}
    constants = {name: value for name, value in names.items() if isinstance(value, int)}

    def copied(node, known):
        """A copy of a node or a list of nodes, with the values of loop variables, `known`, where they are read. An
        `unrolled` loop becomes its body, once for each value."""
        if isinstance(node, list):
            copies = [copied(one, known) for one in node]
            return [one for some in copies for one in (some if isinstance(some, list) else [some])]
        if not isinstance(node, ast.AST) or node in fixed:
            return node
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load) and node.id in known:
            return ast.copy_location(ast.Constant(known[node.id]), node)
        if _is_unrolled(node):
            values = eval(compile(ast.Expression(node.iter.args[0]), "", "eval"), {"range": range}, constants | known)
            return [one for value in values for one in copied(node.body, {**known, node.target.id: value})]
        return ast.copy_location(type(node)(**{k: copied(v, known) for k, v in ast.iter_fields(node)}), node)

    exec(compile(copied(tree, {}), function.__code__.co_filename, "exec"), names)
    names[function.__name__].__annotations__ = function.__annotations__
    return names[function.__name__]


def called(function):
    """A device function that a large kernel calls more than once: numba compiles it once, and LLVM inlines it."""
    return cuda.jit(device=True, forceinline=True)(function)


class Gpu(NamedTuple):
    """What kernels are made for."""
    cc: tuple               # compute capability, (major, minor)
    shared: int             # bytes of shared memory a block may have
    wgmma: bool             # wgmma and bulk copies; else mma.sync and cp.async

    def unroll(self, function):
        """The function as the compiler for this GPU needs it: from cc 10.0 on loops over registers stay."""
        return function if self.cc[0] < 10 else unroll(function)

    def device(self, function):
        return device(self.unroll(function))

    def called(self, function):
        return called(self.unroll(function))


# --- small device functions ------------------------------------------------------------------------------------------

@device
def thread():
    """The thread's number in its block, of which the compiler knows that all lanes have the same warpgroup, t >> 7:
    then descriptors of wgmma are made once a warp."""
    t = int32(cuda.threadIdx.x)
    return int32((cuda.shfl_sync(0xFFFFFFFF, t >> 7, 0) << 7) | (t & 127))


@device
def across(x, lanes):
    """x of the lane whose number differs in the bits of `lanes`."""
    return cuda.shfl_xor_sync(0xFFFFFFFF, x, lanes)


@device
def int32s(count):
    """A local array, in registers where the compiler knows every index; count: a constant."""
    return cuda.local.array(count, int32)


@device
def clip(x):
    return int32(min(max(int32(x), int32(-127)), int32(127)))


@device
def byte(word, k):
    """Byte k of an int32, sign-extended."""
    return ptx.byte_permute(word, 0, 0x8880 + 0x1111 * k)


@device
def pack4(a, b, c, d):
    return ptx.byte_permute(ptx.byte_permute(a, b, 0x0040), ptx.byte_permute(c, d, 0x0040), 0x5410)


@device
def pack_bytes(x, i):
    """The low bytes of x[i], x[i + 1], x[i + 2], x[i + 3] as one word."""
    return pack4(x[i], x[i + 1], x[i + 2], x[i + 3])


@device
def pack_quad(x):
    """The low bytes of x of four neighbouring lanes as one word, known to all four."""
    x = int32((x & 255) << int32(8 * (cuda.threadIdx.x & 3)))
    x = int32(x | across(x, 1))
    return int32(x | across(x, 2))


@device
def quad_sum(x):
    """int32 sum over the four lanes that share a row."""
    x = int32(x + across(x, 1))
    return int32(x + across(x, 2))


@device
def quad_sum64(x):
    """The same of 64-bit numbers."""
    x += across(x, 1)
    return x + across(x, 2)


@device
def quad_max(x):
    x = int32(max(x, across(x, 1)))
    return int32(max(x, across(x, 2)))


@device
def rounded(v, scale):
    """clip(roundf(v * scale)) in the second byte of the result, without its conversion to an integer, which is slow:
    what lies below 0 goes to the float32 below, so that a half is rounded down there as well; then x + 1/2 rounded down
    to 256ths by the size of the sum.
    Equal for every float32 up to 128."""
    x = float32(v) * scale
    return ptx.float_bits(ptx.add_down(ptx.fma_down(x, 2.0 ** -25, x), 49152.5))


@device
def pack_rounded(a, b, c, d):
    return ptx.byte_permute(ptx.byte_permute(a, b, 0x0051), ptx.byte_permute(c, d, 0x0051), 0x5410)


@device
def amax_scale(top):
    return float32(127) / (float32(top) + float32(1e-9))


def wgmma_descriptor(K):
    """Device function: wgmma descriptor (int64) of core matrices at a shared address, rows of K bytes."""
    STRIDES = (128 >> 4) << 16 | (8 * K >> 4) << 32

    @device
    def descriptor(address):
        return ((int64(address) & int64(0x3FFFF)) >> int64(4)) | int64(STRIDES)
    return descriptor


# --- quotients by the float units ------------------------------------------------------------------------------------
# A quotient rounds toward zero where the divisor is a sum of the run (rules.divide), and down, clipped, where it is a
# constant (quotient_function). Hot loops have other forms with equal results, each for a reason: the norm of the
# transformer (transformer._norm_kernel) and the attention (finish) divide many numbers by one, whose reciprocal they
# know; the recurrent model (gru.early_noise_quotients) puts the noise into the accumulators before the product; its
# norm divides by a sum of the run and rounds down (gru_parts.normed_function; rules.NORMS.quotient, in
# kernels.units).

MAGIC, BITS = 12582912, 0x4B400000          # 1.5 * 2^23 and its bits: MAGIC + k has the bits BITS + k


def floor_constants(d, base):
    """(bits, a, c): for the float m with these bits, floor((m + y) * a + c) = base + floor(y / d) for every whole
    y within 130 d. a, c: float32 values. Raises ValueError where there are none."""
    near, scale = np.float32(1 / d), 1 << 40                 # a and c are multiples of 2^-40
    critical = [(k * d - less, base + k - less) for k in range(-129, 131) for less in (0, 1)]
    for shift in range(max(64, d + 2)):
        for a in (near, np.nextafter(near, np.float32(1)), np.nextafter(near, np.float32(0))):
            middle = np.float32(base - (MAGIC + shift) * float(a) + 0.5 / d)
            for c in (middle, np.nextafter(middle, np.float32(np.inf)), np.nextafter(middle, np.float32(-np.inf))):
                whole_a, whole_c = float(a) * scale, float(c) * scale
                if whole_a % 1 == 0 and whole_c % 1 == 0 and all(
                        ((MAGIC + shift + y) * int(whole_a) + int(whole_c)) // scale == want for y, want in critical):
                    return BITS + shift, float(a), float(c)
    raise ValueError(f"no constants for a divisor of {d}")


def quotient_function(d, base, floats, lowest=-127):
    """(ZERO, quotient), with quotient(v) a device function: the bits of the float base + q, q = (v - ZERO) / d rounded
    down and clipped. ZERO: the v that stands for 0; with `floats` the bits of a float near MAGIC."""
    START, A, C = floor_constants(d, base)
    ZERO = START if floats else 0
    LEAST, MOST = ZERO + lowest * d, ZERO + 127 * d + d - 1

    @device
    def quotient(v):
        v = min(max(int32(v), int32(LEAST)), int32(MOST))
        return ptx.float_bits(ptx.fma_down(ptx.bits_float(v + (START - ZERO)), A, C))
    return ZERO, quotient


# --- the tables of EXP ------------------------------------------------------------------------------------------------

def exp_sizes(cfg):
    """(the first entry of EXP that all further ones equal; how many copies of the table, one a bank, fit: a look-up by
    32 lanes then has no bank conflicts, or few)."""
    exps = integer_tables.exp_table(cfg)[:256]
    most = int(np.flatnonzero(exps != exps[-1])[-1]) + 1 if (exps != exps[-1]).any() else 0
    return most, 32 if most < 96 else 8
