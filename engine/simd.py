"""The vector instructions of the CPU engine as numba intrinsics: an exact u8 x s8 -> int32 product tile and dot
product, GELU and a table look-up.

`use` chooses the product, once for a process:
  vnni512   vpdpbusd on 512-bit registers (AVX-512 VNNI)
  vnni256   vpdpbusd on 256-bit registers (AVX-VNNI, or AVX-512 VNNI with VL)
  madd      vpmaddwd on bytes widened to 16 bits (AVX-512 BW or AVX2)
  portable  plain LLVM vectors, any processor
All give the same bits: every product is exact.
"""

import itertools

import llvmlite.binding as llvm
import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic
from numba.np import arrayobj

from model import integer_tables

I8, I16, I32, I64 = (ir.IntType(n) for n in (8, 16, 32, 64))
PANEL = 32                  # columns of a packed weight panel; a tile is ROWS x PANEL
ROWS = 8
_lost = np.maximum(np.arange(-127, 1), 0) - integer_tables.gelu_table()[np.arange(-127, 1)]     # by GELU, of |x|
GELU_STEPS = [(int(x), int(step)) for x, step in enumerate(np.diff(_lost[::-1]), 1) if step]
KINDS = ("vnni512", "vnni256", "madd", "portable")


def available():
    """The kinds this processor can run, fastest first."""
    has = llvm.get_host_cpu_features().get
    return [k for k,
            ok in (("vnni512", has("avx512vnni")), ("vnni256", has("avxvnni") or has("avx512vnni") and has("avx512vl")),
                            ("madd", has("avx2")), ("portable", True)) if ok]


def choose(wanted):
    """The kind to use for cfg.SIMD. Raises ValueError (one line) for one this processor lacks."""
    if wanted == "auto":
        return available()[0]
    if wanted not in available():
        raise ValueError(f"SIMD = {wanted}: this processor has only {', '.join(available())}")
    return wanted


KIND = None                 # set by `use`, as are these:
WIDE = None                 # whether registers have 512 bits
LANES = None                # int32 accumulators of one register
TILE_ROWS = TILE_VECTORS = None            # accumulators kept in registers: 16 of 32, or 8 of 16


def use(wanted="auto"):
    """Chooses the kind for cfg.SIMD when it is first called, because numba compiles for one kind; the kind. Raises
    ValueError (one line) for a kind that this processor lacks, and for another kind than that in use."""
    global KIND, WIDE, LANES, TILE_ROWS, TILE_VECTORS
    if KIND is None:
        has = llvm.get_host_cpu_features().get
        KIND = choose(wanted)
        WIDE = KIND == "vnni512" or KIND == "madd" and bool(has("avx512bw"))
        LANES, TILE_ROWS, TILE_VECTORS = (16, 8, 2) if WIDE else (8, 4, 2)
    elif wanted != "auto" and choose(wanted) != KIND:
        raise ValueError(f"SIMD = {wanted}: this process has compiled for {KIND} already; start another one")
    return KIND


def _vector(kind, n):
    return ir.VectorType(kind, n)


def _function(builder, result, arguments, name):
    return cgutils.get_or_insert_function(builder.module, ir.FunctionType(result, arguments), name)


def _pointer(context, builder, array_type, array, element, at):
    data = context.make_array(array_type)(context, builder, array).data
    return builder.gep(builder.bitcast(data, element.as_pointer()), [at])


def _store(builder, value, pointer):
    builder.store(value, builder.bitcast(pointer, value.type.as_pointer())).align = 1


def _load(builder, pointer, vector):
    value = builder.load(builder.bitcast(pointer, vector.as_pointer()))
    value.align = 1
    return value


def _lanes(builder, vector, which):
    return builder.shuffle_vector(vector, ir.Constant(vector.type, ir.Undefined), ir.Constant(
        _vector(I32, len(which)), list(which)))


def _sum(builder, vector):
    """The sum of a vector's lanes."""
    n = vector.type.count
    while n > 1:
        n //= 2
        vector = builder.add(_lanes(builder, vector, range(n)), _lanes(builder, vector, range(n, 2 * n)))
    return builder.extract_element(vector, I32(0))


def _splat(builder, scalar, n):
    undef = ir.Constant(_vector(scalar.type, n), ir.Undefined)
    return builder.shuffle_vector(builder.insert_element(undef, scalar, I32(0)), undef,
                                  ir.Constant(_vector(I32, n), [0] * n))


def _dot_step(builder, acc, activations, weights):
    """acc [LANES] += sum of 4 products: activations i32 (four u8 of one row), weights <4 LANES x i8>."""
    acc_t, bytes_t = _vector(I32, LANES), _vector(I8, 4 * LANES)
    if KIND.startswith("vnni"):
        f = _function(builder, acc_t, [acc_t, bytes_t, bytes_t], f"llvm.x86.avx512.vpdpbusd.{32 * LANES}")
        return builder.call(f, [acc, builder.bitcast(_splat(builder, activations, LANES), bytes_t), weights])
    words, mask = _vector(I16, 2 * LANES), I32(0x00FF00FF)
    for part, four in zip(weights,
                          (builder.and_(activations, mask), builder.and_(builder.lshr(activations, I32(8)), mask))):
        pair = builder.bitcast(_splat(builder, four, LANES), words)
        if KIND == "madd":
            f = _function(builder, acc_t, [words, words],
                          "llvm.x86.avx512.pmaddw.d.512" if WIDE else "llvm.x86.avx2.pmadd.wd")
            product = builder.call(f, [pair, part])
        else:
            wide = _vector(I32, 2 * LANES)
            p = builder.mul(builder.sext(pair, wide), builder.sext(part, wide))
            undef = ir.Constant(wide, ir.Undefined)
            even, odd = (ir.Constant(acc_t, list(range(o, 2 * LANES, 2))) for o in (0, 1))
            product = builder.add(builder.shuffle_vector(p, undef, even), builder.shuffle_vector(p, undef, odd))
        acc = builder.add(acc, product)
    return acc


def _weights(builder, pointer):
    """One register of packed weights as `_dot_step` wants it: the bytes, or the even and the odd bytes widened to 16
    bits."""
    v = _load(builder, pointer, _vector(I8, 4 * LANES))
    if KIND.startswith("vnni"):
        return v
    words = builder.bitcast(v, _vector(I16, 2 * LANES))
    eight = ir.Constant(words.type, [8] * (2 * LANES))
    return builder.ashr(builder.shl(words, eight), eight), builder.ashr(words, eight)


def _new_array(cleared):
    @intrinsic
    def new(ctx, shape, dtype):
        """np.empty or np.zeros, made in place: numba's are functions that it compiles anew for every type of shape."""
        def codegen(context, builder, sig, args):
            shapes = arrayobj._parse_shape(context, builder, sig.args[0], args[0])
            array = arrayobj._empty_nd_impl(context, builder, sig.return_type, shapes)
            if cleared:
                cgutils.memset(builder, array.data, builder.mul(array.itemsize, array.nitems), 0)
            return array._getvalue()
        return types.Array(dtype.dtype, getattr(shape, "count", 1), "C")(shape, dtype), codegen
    return new


empty, zeros = _new_array(False), _new_array(True)


@intrinsic
def tile(ctx, x, x_at, x_stride, w, w_at, init, init_at, init_stride, out, out_at, out_stride, k4):
    """out[ROWS, PANEL] = init + x[ROWS, 4 k4] . w, exactly.

    x uint8 (row stride in bytes), w int8: one packed panel [k4, PANEL, 4] from byte w_at on; init and out int32 with
    row strides in elements (init_stride 0 repeats one row; init may be out itself)."""
    i = types.int64
    sig = types.void(x, i, i, w, i, init, i, i, out, i, i, i)

    def codegen(context, builder, sig, args):
        xa, x_at, x_stride, wa, w_at, ia, init_at, init_stride, oa, out_at, out_stride, k4 = args
        xp = _pointer(context, builder, sig.args[0], xa, I8, x_at)
        wp = _pointer(context, builder, sig.args[3], wa, I8, w_at)
        ip = _pointer(context, builder, sig.args[5], ia, I32, init_at)
        op = _pointer(context, builder, sig.args[8], oa, I32, out_at)
        acc_t = _vector(I32, LANES)
        for group, column in itertools.product(range(0, ROWS, TILE_ROWS), range(0, PANEL, TILE_VECTORS * LANES)):
            cells = []
            for r in range(group, group + TILE_ROWS):
                row = builder.gep(ip, [builder.add(builder.mul(init_stride, I64(r)), I64(column))])
                # become registers
                cells.append([cgutils.alloca_once(builder, acc_t) for _ in range(TILE_VECTORS)])
                for j, cell in enumerate(cells[-1]):
                    builder.store(_load(builder, builder.gep(row, [I64(LANES * j)]), acc_t), cell)
            with cgutils.for_range(builder, k4, intp=I64) as loop:
                panel = builder.gep(wp, [builder.add(builder.mul(loop.index, I64(4 * PANEL)), I64(4 * column))])
                weights = [_weights(builder, builder.gep(panel, [I64(4 * LANES * j)])) for j in range(TILE_VECTORS)]
                for r in range(TILE_ROWS):
                    at = builder.add(builder.mul(x_stride, I64(group + r)), builder.mul(loop.index, I64(4)))
                    word = _load(builder, builder.gep(xp, [at]), I32)
                    for j in range(TILE_VECTORS):
                        builder.store(_dot_step(builder, builder.load(cells[r][j]), word, weights[j]), cells[r][j])
            for r in range(TILE_ROWS):
                row = builder.gep(op, [builder.add(builder.mul(out_stride, I64(group + r)), I64(column))])
                for j in range(TILE_VECTORS):
                    _store(builder, builder.load(cells[r][j]), builder.gep(row, [I64(LANES * j)]))
        return context.get_dummy_value()
    return sig, codegen


@intrinsic
def chain_tile(ctx, x, x_at, x_stride, w, out, out_at, out_stride, count):
    """out[ROWS, PANEL] = x[ROWS, count] . w[count, PANEL], float32: each element one chain of fma over the count, in
    order, from 0.

    x, out: row strides in elements; w: one contiguous panel."""
    i = types.int64
    sig = types.void(x, i, i, w, out, i, i, i)

    def codegen(context, builder, sig, args):
        xa, x_at, x_stride, wa, oa, out_at, out_stride, count = args
        real, vector = ir.FloatType(), _vector(ir.FloatType(), LANES)
        xp = _pointer(context, builder, sig.args[0], xa, real, x_at)
        wp = _pointer(context, builder, sig.args[3], wa, real, I64(0))
        op = _pointer(context, builder, sig.args[4], oa, real, out_at)
        fma = _function(builder, vector, [vector] * 3, f"llvm.fma.v{LANES}f32")
        for group, column in itertools.product(range(0, ROWS, TILE_ROWS), range(0, PANEL, TILE_VECTORS * LANES)):
            cells = [[cgutils.alloca_once(builder, vector) for _ in range(TILE_VECTORS)] for _ in range(TILE_ROWS)]
            for cell in itertools.chain(*cells):
                builder.store(ir.Constant(vector, [0.0] * LANES), cell)
            with cgutils.for_range(builder, count, intp=I64) as loop:
                row = builder.gep(wp, [builder.add(builder.mul(loop.index, I64(PANEL)), I64(column))])
                parts = [_load(builder, builder.gep(row, [I64(LANES * j)]), vector) for j in range(TILE_VECTORS)]
                for r, line in enumerate(cells):
                    at = builder.add(builder.mul(x_stride, I64(group + r)), loop.index)
                    factor = _splat(builder, builder.load(builder.gep(xp, [at])), LANES)
                    for part, cell in zip(parts, line):
                        builder.store(builder.call(fma, [factor, part, builder.load(cell)]), cell)
            for r, line in enumerate(cells):
                row = builder.gep(op, [builder.add(builder.mul(out_stride, I64(group + r)), I64(column))])
                for j, cell in enumerate(line):
                    _store(builder, builder.load(cell), builder.gep(row, [I64(LANES * j)]))
        return context.get_dummy_value()
    return sig, codegen


@intrinsic
def dot(ctx, x, x_at, w, w_at, count):
    """int32: the sum of x[x_at + i] * w[w_at + i], exactly; x uint8, w int8, count a multiple of 32."""
    i = types.int64
    sig = types.int32(x, i, w, i, i)

    def codegen(context, builder, sig, args):
        xa, x_at, wa, w_at, count = args
        xp = _pointer(context, builder, sig.args[0], xa, I8, x_at)
        wp = _pointer(context, builder, sig.args[2], wa, I8, w_at)
        vector, acc_t = _vector(I8, 32), _vector(I32, 8)
        acc = cgutils.alloca_once(builder, acc_t)
        builder.store(ir.Constant(acc_t, [0] * 8), acc)
        with cgutils.for_range(builder, builder.sdiv(count, I64(32)), intp=I64) as loop:
            at = builder.mul(loop.index, I64(32))
            some, their = (_load(builder, builder.gep(p, [at]), vector) for p in (xp, wp))
            if KIND.startswith("vnni"):
                f = _function(builder, acc_t, [acc_t, vector, vector], "llvm.x86.avx512.vpdpbusd.256")
                builder.store(builder.call(f, [builder.load(acc), some, their]), acc)
            else:
                words, ints = _vector(I16, 32), _vector(I32, 32)
                products = builder.mul(builder.sext(builder.zext(some, words), ints), builder.sext(their, ints))
                for part in range(0, 32, 8):
                    builder.store(builder.add(builder.load(acc), _lanes(builder, products, range(part, part + 8))), acc)
        return _sum(builder, builder.load(acc))
    return sig, codegen


@intrinsic
def gelu(ctx, x, at, count):
    """x[at + i] = GELU(x[at + i]) + 128 in place for `count` bytes of uint8, a multiple of 32, which hold int8 from
    -127 on. GELU(x) is max(x, 0) less a function of |x| that has few steps."""
    i = types.int64
    sig = types.void(x, i, i)

    def codegen(context, builder, sig, args):
        xa, at, count = args
        v = _vector(I8, 32)
        number = lambda n: ir.Constant(v, [n] * 32)
        p = _pointer(context, builder, sig.args[0], xa, I8, at)
        with cgutils.for_range(builder, builder.sdiv(count, I64(32)), intp=I64) as loop:
            here = builder.gep(p, [builder.mul(loop.index, I64(32))])
            value = _load(builder, here, v)
            positive = builder.icmp_signed(">", value, number(0))
            size = builder.select(positive, value, builder.neg(value))
            value = builder.add(builder.select(positive, value, number(0)), number(128))
            for first, step in GELU_STEPS:
                reached = builder.icmp_unsigned(">=", size, number(first))
                value = builder.sub(value, builder.select(reached, number(step), number(0)))
            _store(builder, value, here)
        return context.get_dummy_value()
    return sig, codegen


@intrinsic
def exp_sum(ctx, table, short, top, shift, z, z_at, count, out, out_at):
    """int64: the sum over i of e_i = table[min(255, top - (z[i] >> shift))], and out[i] = e_i where out has elements.

    table int32 [256]; z int32, no z[i] >> shift above top; out int32; z and out reach to the next multiple of 16, as
    far as out is written. `short` (0 or 1): the table is zero from entry 96 on, as it is at the usual scale."""
    i = types.int64
    sig = types.int64(table, i, types.int32, types.int32, z, i, i, out, i)

    def codegen(context, builder, sig, args):
        ta, short, top, shift, za, z_at, count, oa, out_at = args
        tp = _pointer(context, builder, sig.args[0], ta, I32, I64(0))
        zp = _pointer(context, builder, sig.args[4], za, I32, z_at)
        op = _pointer(context, builder, sig.args[7], oa, I32, out_at)
        stored = builder.icmp_signed(">", context.make_array(sig.args[7])(context, builder, oa).nitems, I64(0))
        if KIND != "vnni512":
            total = cgutils.alloca_once(builder, I64)
            builder.store(I64(0), total)
            with cgutils.for_range(builder, count, intp=I64) as loop:
                d = builder.sub(top, builder.ashr(builder.load(builder.gep(zp, [loop.index])), shift))
                d = builder.select(builder.icmp_signed("<", d, I32(255)), d, I32(255))
                e = builder.load(builder.gep(tp, [builder.zext(d, I64)]))
                builder.store(builder.add(builder.load(total), builder.zext(e, I64)), total)
                with builder.if_then(stored):
                    builder.store(e, builder.gep(op, [loop.index]))
            return builder.load(total)
        v, v64 = _vector(I32, 16), _vector(I64, 8)
        number = lambda n: ir.Constant(v, [n] * 16)
        permute = _function(builder, v, [v, v, v], "llvm.x86.avx512.vpermi2var.d.512")
        acc = cgutils.alloca_once(builder, v64)
        builder.store(ir.Constant(v64, [0] * 8), acc)
        top, shift, last = (_splat(builder, n, 16) for n in (top, shift, builder.trunc(count, I32)))
        blocks = builder.sdiv(builder.add(count, I64(15)), I64(16))

        def look_up(pairs):
            """The loop over the blocks with a table of 32 * pairs entries, then zeros, in registers."""
            parts = [_load(builder, builder.gep(tp, [I64(16 * q)]), v) for q in range(2 * pairs)]
            with cgutils.for_range(builder, blocks, intp=I64) as loop:
                at = builder.mul(loop.index, I64(16))
                d = builder.sub(top, builder.ashr(_load(builder, builder.gep(zp, [at]), v), shift))
                lane = builder.add(_splat(builder, builder.trunc(at, I32), 16), ir.Constant(v, list(range(16))))
                valid = builder.icmp_signed("<", lane, last)
                if pairs == 8:
                    d = builder.select(builder.icmp_unsigned("<", d, number(255)), d, number(255))
                else:
                    valid = builder.and_(valid, builder.icmp_unsigned("<", d, number(32 * pairs)))
                # the low five bits of d select within a pair of registers, the others the pair
                values = [builder.call(permute, [parts[2 * q], d, parts[2 * q + 1]]) for q in range(pairs)]
                bit = 32
                while len(values) > 1:
                    high = builder.icmp_signed("!=", builder.and_(d, number(bit)), number(0))
                    values = [builder.select(high, pair[1], pair[0]) if len(pair) > 1 else pair[0]
                              for pair in (values[q:q + 2] for q in range(0, len(values), 2))]
                    bit *= 2
                e = builder.select(valid, values[0], number(0))
                with builder.if_then(stored):
                    _store(builder, e, builder.gep(op, [at]))
                # two 32-bit lanes: add both halves as 64-bit numbers
                wide = builder.bitcast(e, v64)
                both = builder.add(builder.and_(wide, ir.Constant(v64, [0xFFFFFFFF] * 8)),
                                   builder.lshr(wide, ir.Constant(v64, [32] * 8)))
                builder.store(builder.add(builder.load(acc), both), acc)

        with builder.if_else(builder.icmp_signed("!=", short, I64(0))) as (then, otherwise):
            with then:
                look_up(3)
            with otherwise:
                look_up(8)
        return _sum(builder, builder.load(acc))
    return sig, codegen
