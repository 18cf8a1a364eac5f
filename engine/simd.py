"""The vector instructions of the CPU engine as numba intrinsics: an exact u8 x s8 -> int32 product tile and two table
look-ups.

`use` chooses the product, once for a process:
  vnni512   vpdpbusd on 512-bit registers (AVX-512 VNNI)
  vnni256   vpdpbusd on 256-bit registers (AVX-VNNI, or AVX-512 VNNI with VL)
  madd      vpmaddwd on bytes widened to 16 bits (AVX-512 BW or AVX2)
  portable  plain LLVM vectors, any processor
All give the same bits: every product is exact.
"""

import itertools

import llvmlite.binding as llvm
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic
from numba.np import arrayobj

I8, I16, I32, I64 = (ir.IntType(n) for n in (8, 16, 32, 64))
PANEL = 32                  # columns of a packed weight panel; a tile is ROWS x PANEL
ROWS = 8
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
WIDE = VBMI = None          # whether registers have 512 bits, and whether bytes of two of them can be permuted
LANES = None                # int32 accumulators of one register
TILE_ROWS = TILE_VECTORS = None            # accumulators kept in registers: 16 of 32, or 8 of 16


def use(wanted="auto"):
    """Chooses the kind for cfg.SIMD when it is first called, because numba compiles for one kind; the kind. Raises
    ValueError (one line) for a kind that this processor lacks, and for another kind than that in use."""
    global KIND, WIDE, LANES, TILE_ROWS, TILE_VECTORS, VBMI
    if KIND is None:
        has = llvm.get_host_cpu_features().get
        KIND = choose(wanted)
        WIDE = KIND == "vnni512" or KIND == "madd" and bool(has("avx512bw"))
        LANES, TILE_ROWS, TILE_VECTORS = (16, 8, 2) if WIDE else (8, 4, 2)
        VBMI = KIND == "vnni512" and bool(has("avx512vbmi"))
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
def look_up_bytes(ctx, table, index, index_at, out, out_at, count):
    """out[i] = table[index[i]] for `count` bytes: table uint8 [256], index and out uint8 (buffers readable and writable
    up to the next multiple of 64)."""
    i = types.int64
    sig = types.void(table, index, i, out, i, i)

    def codegen(context, builder, sig, args):
        ta, xa, x_at, oa, o_at, count = args
        tp = _pointer(context, builder, sig.args[0], ta, I8, I64(0))
        xp = _pointer(context, builder, sig.args[1], xa, I8, x_at)
        op = _pointer(context, builder, sig.args[3], oa, I8, o_at)
        if VBMI:
            v = _vector(I8, 64)
            quarters = [_load(builder, builder.gep(tp, [I64(64 * q)]), v) for q in range(4)]
            permute = _function(builder, v, [v, v, v], "llvm.x86.avx512.vpermi2var.qi.512")
            blocks = builder.sdiv(builder.add(count, I64(63)), I64(64))
            with cgutils.for_range(builder, blocks, intp=I64) as loop:
                at = builder.mul(loop.index, I64(64))
                x = _load(builder, builder.gep(xp, [at]), v)
                low = builder.call(permute, [quarters[0], x, quarters[1]])
                high = builder.call(permute, [quarters[2], x, quarters[3]])
                negative = builder.icmp_signed("<", x, ir.Constant(v, [0] * 64))
                _store(builder, builder.select(negative, high, low), builder.gep(op, [at]))
        else:
            with cgutils.for_range(builder, count, intp=I64) as loop:
                x = builder.zext(builder.load(builder.gep(xp, [loop.index])), I64)
                builder.store(builder.load(builder.gep(tp, [x])), builder.gep(op, [loop.index]))
        return context.get_dummy_value()
    return sig, codegen


@intrinsic
def exp_sum(ctx, table, short, top, z, z_at, count):
    """sum over i of table[min(255, top - z[i])] as int64: table int32 [256]; z int32, every z[i] <= top. `short` (0 or
    1) says that the table is zero from entry 96 on, as it is at the usual scale: such a table fits six registers."""
    i = types.int64
    sig = types.int64(table, i, i, z, i, i)

    def codegen(context, builder, sig, args):
        ta, short, top, za, z_at, count = args
        tp = _pointer(context, builder, sig.args[0], ta, I32, I64(0))
        zp = _pointer(context, builder, sig.args[3], za, I32, z_at)
        top = builder.trunc(top, I32)
        total = cgutils.alloca_once_value(builder, I64(0))
        builder.store(I64(0), total)
        tail = cgutils.alloca_once_value(builder, I64(0))
        builder.store(I64(0), tail)
        if KIND == "vnni512":
            v, v64 = _vector(I32, 16), _vector(I64, 8)
            parts = [_load(builder, builder.gep(tp, [I64(16 * q)]), v) for q in range(6)]
            permute = _function(builder, v, [v, v, v], "llvm.x86.avx512.vpermi2var.d.512")
            acc = cgutils.alloca_once_value(builder, ir.Constant(v64, [0] * 8))
            builder.store(ir.Constant(v64, [0] * 8), acc)
            splat_top = _splat(builder, top, 16)
            bound = lambda n: ir.Constant(v, [n] * 16)
            blocks = builder.mul(short, builder.sdiv(count, I64(16)))
            with cgutils.for_range(builder, blocks, intp=I64) as loop:
                d = builder.sub(splat_top, _load(builder, builder.gep(zp, [builder.mul(loop.index, I64(16))]), v))
                # low five bits of d select
                values = [builder.call(permute, [parts[2 * q], d, parts[2 * q + 1]]) for q in range(3)]
                e = builder.select(builder.icmp_signed("<", d, bound(32)), values[0],
                                   builder.select(builder.icmp_signed("<", d, bound(64)), values[1],
                                                  builder.select(builder.icmp_signed("<", d, bound(96)), values[2],
                                                                 bound(0))))
                # two 32-bit lanes: add both halves as 64-bit numbers
                wide = builder.bitcast(e, v64)
                both = builder.add(builder.and_(wide, ir.Constant(v64, [0xFFFFFFFF] * 8)),
                                   builder.lshr(wide, ir.Constant(v64, [32] * 8)))
                builder.store(builder.add(builder.load(acc), both), acc)
            final = builder.load(acc)
            for lane in range(8):
                builder.store(builder.add(builder.load(total), builder.extract_element(final, I32(lane))), total)
            builder.store(builder.mul(blocks, I64(16)), tail)
        rest = builder.sub(count, builder.load(tail))
        with cgutils.for_range(builder, rest, intp=I64) as loop:
            at = builder.add(builder.load(tail), loop.index)
            d = builder.sub(top, builder.load(builder.gep(zp, [at])))
            d = builder.select(builder.icmp_signed("<", d, I32(255)), d, I32(255))
            e = builder.zext(builder.load(builder.gep(tp, [builder.zext(d, I64)])), I64)
            builder.store(builder.add(builder.load(total), e), total)
        return builder.load(total)
    return sig, codegen
