"""The vector instructions of the CPU engine as numba intrinsics: an exact u8 x s8 -> int32 product tile, a float32
product in a fixed order and a table look-up.

`use` chooses the product, once for a process:
  vnni512   vpdpbusd on 512-bit registers (AVX-512 VNNI)
  vnni256   vpdpbusd on 256-bit registers (AVX-VNNI, or AVX-512 VNNI with VL)
  madd      vpmaddwd on bytes widened to 16 bits (AVX-512 BW or AVX2)
  portable  plain LLVM vectors, any processor
All give the same bits: every product is exact.
"""

import contextlib
import functools
import inspect
import itertools

import llvmlite.binding as llvm
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic
from numba.np import arrayobj

I8 = ir.IntType(8)
I16 = ir.IntType(16)
I32 = ir.IntType(32)
I64 = ir.IntType(64)
PANEL = 32                  # columns of a packed weight panel; a tile is ROWS x PANEL
ROWS = 8
KIND = None                 # set by `use`, as is this:
LANES = None                # int32 accumulators of a register; LANES / 2 rows of a tile, two registers each, are kept


def available():
    """{kind: LANES} of the kinds this processor can run, fastest first."""
    has = llvm.get_host_cpu_features().get
    kinds = (("vnni512", has("avx512vnni"), 16),
             ("vnni256", has("avxvnni") or has("avx512vnni") and has("avx512vl"), 8),
             ("madd", has("avx2"), 16 if has("avx512bw") else 8),
             ("portable", True, 8))
    return {kind: lanes for kind, can, lanes in kinds if can}


def use(wanted="auto"):
    """Chooses the kind for cfg.SIMD when it is first called, because numba compiles for one kind; the kind. Raises
    ValueError (one line) for a kind that this processor lacks, and for another kind than that in use."""
    global KIND, LANES
    kinds = available()
    if wanted not in ("auto", *kinds):
        raise ValueError(f"SIMD = {wanted}: this processor has only {', '.join(kinds)}")
    if KIND is None:
        KIND = next(iter(kinds)) if wanted == "auto" else wanted
        LANES = kinds[KIND]
    elif wanted not in ("auto", KIND):
        raise ValueError(f"SIMD = {wanted}: this process has compiled for {KIND} already; start another one")
    return KIND


def _vector(kind, n):
    return ir.VectorType(kind, n)


def _function(builder, result, arguments, name):
    return cgutils.get_or_insert_function(builder.module, ir.FunctionType(result, arguments), name)


def _at(builder, pointer, stride, row, column):
    return builder.gep(pointer, [builder.add(builder.mul(stride, row), column)])


def _opaque(builder, pointer):
    """The pointer, which LLVM will not take apart: else it adds the stride of the rows again in every round."""
    return builder.asm(ir.FunctionType(pointer.type, [pointer.type]), "", "=r,0", [pointer], False)


def _all(vector, n):
    return ir.Constant(vector, [n] * vector.count)


def _store(builder, value, pointer):
    builder.store(value, builder.bitcast(pointer, value.type.as_pointer())).align = 1


def _load(builder, pointer, vector):
    value = builder.load(builder.bitcast(pointer, vector.as_pointer()))
    value.align = 1
    return value


def _lanes(builder, vector, indices):
    return builder.shuffle_vector(vector, ir.Constant(vector.type, ir.Undefined), ir.Constant(
        _vector(I32, len(indices)), list(indices)))


def _splat(builder, scalar, n):
    undef = ir.Constant(_vector(scalar.type, n), ir.Undefined)
    return builder.shuffle_vector(builder.insert_element(undef, scalar, I32(0)), undef, _all(_vector(I32, n), 0))


def _dot_step(builder, acc, activations, weights):
    """acc [n] += sums of 4 products: activations <4 n x i8>, unsigned; weights: of `_weights`."""
    n = acc.type.count
    if KIND.startswith("vnni"):
        name, types_ = f"llvm.x86.avx512.vpdpbusd.{32 * n}", [acc.type, activations.type, weights.type]
        return builder.call(_function(builder, acc.type, types_, name), [acc, activations, weights])
    words, wide = builder.bitcast(activations, _vector(I16, 2 * n)), _vector(I32, 2 * n)
    halves = builder.and_(words, _all(words.type, 255)), builder.lshr(words, _all(words.type, 8))
    for part, half in zip(weights, halves):
        p = builder.mul(builder.sext(half, wide), builder.sext(part, wide))      # vpmaddwd where there is one
        acc = builder.add(acc, builder.add(*(_lanes(builder, p, range(o, 2 * n, 2)) for o in (0, 1))))
    return acc


def _weights(builder, pointer, n):
    """4 n weights as `_dot_step` wants them: the bytes, or the even and the odd bytes widened to 16 bits."""
    v = _load(builder, pointer, _vector(I8, 4 * n))
    if KIND.startswith("vnni"):
        return v
    words = builder.bitcast(v, _vector(I16, 2 * n))
    eight = _all(words.type, 8)
    return builder.ashr(builder.shl(words, eight), eight), builder.ashr(words, eight)


def _on_stack(context, builder, kind, shapes):
    """An array of type `kind` in the stack frame of the function that is being compiled; shapes: int64 values."""
    array, strides = arrayobj.make_array(kind)(context, builder), [I64(kind.dtype.bitwidth // 8)]
    for size in reversed(shapes):
        strides.insert(0, builder.mul(strides[0], size))
    memory = builder.alloca(I8, strides[0])
    memory.align = 64
    arrayobj.populate_array(array, builder.bitcast(memory, array.data.type), shapes, strides[1:], strides[-1], None)
    return array._getvalue()


@intrinsic
def local(ctx, shape, dtype):
    """np.empty(shape, dtype) that ends with the calling function, without malloc and references: for small arrays,
    outside of loops, that are not returned."""
    def codegen(context, builder, sig, args):
        shapes = arrayobj._parse_shape(context, builder, sig.args[0], args[0])
        return _on_stack(context, builder, sig.return_type, shapes)
    return types.Array(dtype.dtype, getattr(shape, "count", 1), "C")(shape, dtype), codegen


def locals_of(record, *arrays):
    """An intrinsic of three sizes that makes a NamedTuple `record` of `local` arrays. arrays: for each of them the
    element type and the indices of its sizes."""
    kinds = [types.Array(dtype, len(sizes), "C") for dtype, sizes in arrays]

    @intrinsic
    def new(ctx, a, b, c):
        def codegen(context, builder, sig, args):
            made = [_on_stack(context, builder, kind, [args[i] for i in sizes])
                    for kind, (_, sizes) in zip(kinds, arrays)]
            return context.make_tuple(builder, sig.return_type, made)
        return types.NamedTuple(kinds, record)(types.int64, types.int64, types.int64), codegen
    return new


def _accumulate(builder, count, begin, left, right, step, out, stride, end=lambda vector: vector):
    """out[ROWS, PANEL] (row stride in elements), in tiles that fit the registers: a vector from column c of row r is
    begin(r, c), then `count` times step(it, left(k, r), right(k, c)), then end(it)."""
    for group, column in itertools.product(range(0, ROWS, LANES // 2), range(0, PANEL, 2 * LANES)):
        cells = {}                                           # become registers
        for r, j in itertools.product(range(LANES // 2), range(2)):
            first = begin(I64(group + r), I64(column + LANES * j))
            cells[r, j] = cgutils.alloca_once(builder, first.type)
            builder.store(first, cells[r, j])
        with cgutils.for_range(builder, count, intp=I64) as loop:
            parts = [right(loop.index, I64(column + LANES * j)) for j in range(2)]
            for r in range(LANES // 2):
                factor = left(loop.index, group + r)
                for j, part in enumerate(parts):
                    builder.store(step(builder.load(cells[r, j]), factor, part), cells[r, j])
        for (r, j), cell in cells.items():
            _store(builder, end(builder.load(cell)), _at(builder, out, stride, I64(group + r), I64(column + LANES * j)))


def operation(result):
    """A decorator that makes an intrinsic of a function that generates its code from a builder and values. A parameter
    that is marked "array" is a pointer; the caller gives an array and the index of the element to which it points.
    The others are int64, or of the type that marks them. result: the type of the returned value."""
    def decorate(generate):
        marks = [p.annotation for p in inspect.signature(generate).parameters.values()][1:]
        count = 1 + len(marks) + marks.count("array")

        def define(ctx, *arguments):
            arguments, kinds = iter(arguments), []
            for mark in marks:
                if mark == "array":
                    kinds.append(next(arguments))
                next(arguments)
                kinds.append(types.int64 if mark in ("array", inspect.Parameter.empty) else mark)

            def codegen(context, builder, sig, args):
                args, values = iter(zip(sig.args, args)), []
                for kind, value in args:
                    if isinstance(kind, types.Array):
                        value = builder.gep(context.make_array(kind)(context, builder, value).data, [next(args)[1]])
                    values.append(value)
                return generate(builder, *values) or context.get_dummy_value()
            return result(*kinds), codegen

        define.__signature__ = inspect.Signature([inspect.Parameter(f"argument_{n}", inspect.Parameter.POSITIONAL_ONLY)
                                                  for n in range(count)])
        return intrinsic(define)
    return decorate


def _quotient(builder, y, divisor):
    """int8: y / divisor, rounded down and clipped: model.rules.norm_rules.quotient, moved by 128 until the end."""
    like = lambda scalar: _splat(builder, scalar, LANES)
    one, half, least = ir.Constant(ir.FloatType(), 1.0), ir.Constant(ir.FloatType(), 0.5), like(divisor)
    most, reciprocal = like(builder.mul(divisor, I32(255))), builder.fdiv(one, builder.sitofp(divisor, one.type))
    y = builder.add(y, like(builder.mul(divisor, I32(128))))
    y = builder.select(builder.icmp_signed("<", y, most), y, most)
    y = builder.sitofp(builder.select(builder.icmp_signed(">", y, least), y, least), _vector(one.type, LANES))
    fma = _function(builder, y.type, [y.type] * 3, f"llvm.fma.v{LANES}f32")
    q = builder.call(fma, [y, like(reciprocal), like(builder.fmul(half, reciprocal))])
    q = builder.trunc(builder.fptosi(q, _vector(I32, LANES)), _vector(I8, LANES))
    return builder.xor(q, _all(q.type, -128))


def _product(builder, begin, x, x_stride, x_step, w, divisor, out, out_stride, k4):
    """out[ROWS, PANEL] = begin(row, column) + x[ROWS, 4 k4] . w, exactly; where out is int8, its quotient. x uint8 (row
    stride, and step from four to the next, in bytes), w int8 [k4, PANEL, 4], contiguous, out int32 or int8 (row stride
    in elements)."""
    rows = [_opaque(builder, builder.gep(x, [builder.mul(x_stride, I64(r))])) for r in range(ROWS)]

    def four(k, r):
        word = _load(builder, builder.gep(rows[r], [builder.mul(k, x_step)]), I32)
        return builder.bitcast(_splat(builder, word, LANES), _vector(I8, 4 * LANES))

    panel = lambda k, c: _weights(builder, _at(builder, w, k, I64(4 * PANEL), builder.mul(c, I64(4))), LANES)
    end = (lambda y: _quotient(builder, y, divisor)) if out.type.pointee == I8 else lambda y: y
    _accumulate(builder, k4, begin, four, panel, functools.partial(_dot_step, builder), out, out_stride, end)


@operation(types.void)
def tile(builder, x: "array", x_stride, x_step, w: "array", init: "array", init_stride, divisor: types.int32,
         out: "array", out_stride, k4):
    """out[ROWS, PANEL] = init + x . w; init int32 (row stride in elements, 0 repeats one row) may be out itself. The
    others: see `_product`."""
    begin = lambda r, c: _load(builder, _at(builder, init, init_stride, r, c), _vector(I32, LANES))
    _product(builder, begin, x, x_stride, x_step, w, divisor, out, out_stride, k4)


@operation(types.void)
def noisy_tile(builder, x: "array", x_stride, x_step, w: "array", init: "array", sums: "array", noise: "array",
               noise_stride, shift: types.int32, divisor: types.int32, out: "array", out_stride, k4):
    """out[ROWS, PANEL] = init + (sums[r] * noise[r // 2] >> shift) + x . w in row r, all int32: init one row, sums
    [ROWS], noise as many rows as its stride, in elements, allows: a stride of 0 repeats one. The others: see
    `_product`."""
    vector, shift = _vector(I32, LANES), _splat(builder, shift, LANES)

    def begin(r, c):
        factor = _splat(builder, builder.load(builder.gep(sums, [r])), LANES)
        part = _load(builder, _at(builder, noise, noise_stride, I64(r.constant // 2), c), vector)
        first = _load(builder, builder.gep(init, [c]), vector)
        return builder.add(first, builder.ashr(builder.mul(factor, part), shift))

    _product(builder, begin, x, x_stride, x_step, w, divisor, out, out_stride, k4)


@operation(types.void)
def chain_tile(builder, x: "array", x_stride, w: "array", out: "array", out_stride, count):
    """out[ROWS, PANEL] = x[ROWS, count] . w[count, PANEL], float32: each element one chain of fma over the count, in
    order, from 0. x, out: row strides in elements; w: one contiguous panel."""
    vector = _vector(ir.FloatType(), LANES)
    fma = _function(builder, vector, [vector] * 3, f"llvm.fma.v{LANES}f32")
    factor = lambda k, r: _splat(builder, builder.load(_at(builder, x, x_stride, I64(r), k)), LANES)
    panel = lambda k, c: _load(builder, _at(builder, w, k, I64(PANEL), c), vector)
    _accumulate(builder, count, lambda r, c: _all(vector, 0.0), factor, panel,
                lambda acc, a, b: builder.call(fma, [a, b, acc]), out, out_stride)


def _permutes():
    return KIND == "vnni512" and llvm.get_host_cpu_features().get("avx512vbmi")


@contextlib.contextmanager
def _blocks(builder, count):
    """A loop over blocks of 64 elements; the first element of a block."""
    with cgutils.for_range(builder, builder.sdiv(builder.add(count, I64(63)), I64(64)), intp=I64) as loop:
        yield builder.mul(loop.index, I64(64))


def _like(builder, scalar, vector):
    return _splat(builder, builder.trunc(scalar, vector.element), vector.count)


def _distances(builder, top, shift, z):
    """<64 x i8>, without a sign: min(255, top - (z >> shift)) of 64 elements."""
    bytes_, words = _vector(I8, 64), _vector(I32, 64)
    if z.type.pointee == I8:                                 # a distance is a byte without a sign
        return builder.sub(_like(builder, top, bytes_), _load(builder, z, bytes_))
    d, most = builder.ashr(_load(builder, z, words), _like(builder, shift, words)), _all(words, 255)
    d = builder.sub(_like(builder, top, words), d)
    return builder.trunc(builder.select(builder.icmp_unsigned("<", d, most), d, most), bytes_)


def _planes(builder, table):
    """The bytes of 256 entries int32, one after the other, in four quarters."""
    bytes_, words = _vector(I8, 64), _vector(I32, 64)
    quarters = [_load(builder, builder.gep(table, [I64(64 * q)]), words) for q in range(4)]
    return [[builder.trunc(builder.lshr(x, _all(words, bits)), bytes_) for x in quarters] for bits in range(0, 32, 8)]


def _entry(builder, plane, d):
    """A byte of the entries d."""
    permute = _function(builder, d.type, [d.type] * 3, "llvm.x86.avx512.vpermi2var.qi.512")
    far = builder.icmp_signed("<", d, _all(d.type, 0))
    return builder.select(far, *(builder.call(permute, [plane[q], d, plane[q + 1]]) for q in (2, 0)))


def _in_block(builder, count, at):
    """int64: how many of `count` elements are in the block that begins with element `at`."""
    left = builder.sub(count, at)
    return builder.select(builder.icmp_signed("<", left, I64(64)), left, I64(64))


def _entry_at(builder, table, distance):
    """int32: the entry of a distance, a pointer to a byte."""
    return builder.load(builder.gep(table, [builder.zext(builder.load(distance), I64)]))


def _look_up_one_by_one(builder, table, top, shift, z, count, out):
    total, d = cgutils.alloca_once_value(builder, I64(0)), cgutils.alloca_once(builder, I8, 64)
    with _blocks(builder, count) as at:
        _store(builder, _distances(builder, top, shift, builder.gep(z, [at])), d)
        with cgutils.for_range(builder, _in_block(builder, count, at), intp=I64) as loop:
            e = _entry_at(builder, table, builder.gep(d, [loop.index]))
            if out is not None:
                builder.store(e, builder.gep(out, [builder.add(at, loop.index)]))
            builder.store(builder.add(builder.load(total), builder.sext(e, I64)), total)
    return builder.load(total)


def _look_up(builder, table, top, shift, z, count, out=None):
    """With AVX512-VBMI 64 elements at a time, the bytes of an entry one after the other."""
    if not _permutes():
        return _look_up_one_by_one(builder, table, top, shift, z, count, out)
    bytes_, words, quarter = _vector(I8, 64), _vector(I32, 64), _vector(I32, 16)
    planes = _planes(builder, table)
    sums = [cgutils.alloca_once_value(builder, _all(quarter, 0)) for _ in range(3)]
    with _blocks(builder, count) as at:
        d = _distances(builder, top, shift, builder.gep(z, [at]))
        left = _in_block(builder, count, at)
        inside = builder.icmp_signed("<", ir.Constant(bytes_, list(range(64))), _like(builder, left, bytes_))
        values = [_entry(builder, plane, d) for plane in planes[:3 if out is None else 4]]
        for e, cell in zip(values, sums):
            e = builder.select(inside, e, _all(bytes_, 0))
            builder.store(_dot_step(builder, builder.load(cell), e, _all(bytes_, 1)), cell)
        if out is not None:
            parts = [builder.shl(builder.zext(e, words), _all(words, 8 * k)) for k, e in enumerate(values)]
            _store(builder, functools.reduce(builder.or_, parts), builder.gep(out, [at]))
    add_up, total = _function(builder, I32, [quarter], "llvm.vector.reduce.add.v16i32"), I64(0)
    for k, cell in enumerate(sums):
        part = builder.zext(builder.call(add_up, [builder.load(cell)]), I64)
        total = builder.add(total, builder.shl(part, I64(8 * k)))
    return total


# table int32 [256]; z int32, or int8 that is not shifted; no z[i] >> shift is above top. z and out, int32, reach to the
# next multiple of 64. count: below 2^24, for the sums of bytes.

@operation(types.int64)
def entry_sum(builder, table: "array", top, shift, z: "array", count):
    """The sum over i of table[min(255, top - (z[i] >> shift))], of a table of numbers from 0 to 2^18."""
    return _look_up(builder, table, top, shift, z, count)


@operation(types.int64)
def entries(builder, table: "array", top, shift, z: "array", count, out: "array"):
    """The same, and out[i] is that entry. A table may have other numbers; the sum is wrong then."""
    return _look_up(builder, table, top, shift, z, count, out)


@operation(types.int64)
def rounded(builder, table: "array", near, small, most, top, shift, z: "array", count, dither, step, places: "array",
            values: "array"):
    """How many numbers e[i] = table[d] + (dither + step * i & 0xFFFF) >> 16 are not 0, where d = min(255, top - (z[i]
    >> shift)); their places int32, in order, and values int8; both reach one beyond. From d = near + 1 on, the entries
    are from small - most to small, and neither end is more than 2^16 from 0. So the other numbers can be other than 0
    only where the 16 bits plus `small`, modulo 2^16, are below `most`: few are looked up."""
    halves = _vector(I16, 64)
    steps = builder.mul(_like(builder, step, halves), ir.Constant(halves, list(range(64))))
    total, left = cgutils.alloca_once_value(builder, I64(0)), cgutils.alloca_once(builder, I64)
    d, zero = cgutils.alloca_once(builder, I8, 64), ir.IntType(1)(0)
    with _blocks(builder, count) as at:
        distances = _distances(builder, top, shift, builder.gep(z, [at]))
        _store(builder, distances, d)
        first = builder.add(dither, builder.mul(step, at))
        random = builder.add(_like(builder, builder.add(first, small), halves), steps)
        may = builder.or_(builder.icmp_unsigned("<=", distances, _like(builder, near, distances.type)),
                          builder.icmp_unsigned("<", random, _like(builder, most, halves)))
        inside = builder.lshr(I64(-1), builder.sub(I64(64), _in_block(builder, count, at)))
        builder.store(builder.and_(builder.bitcast(may, I64), inside), left)
        with cgutils.for_range(builder, builder.ctpop(builder.load(left)), intp=I64):
            bits, number = builder.load(left), builder.load(total)
            k = builder.cttz(bits, zero)
            builder.store(builder.and_(bits, builder.sub(bits, I64(1))), left)
            its = builder.trunc(builder.add(first, builder.mul(step, k)), I16)
            e = builder.add(_entry_at(builder, table, builder.gep(d, [k])), builder.zext(its, I32))
            e = builder.trunc(builder.ashr(e, I32(16)), I8)
            builder.store(builder.trunc(builder.add(at, k), I32), builder.gep(places, [number]))
            builder.store(e, builder.gep(values, [number]))
            found = builder.zext(builder.icmp_signed("!=", e, I8(0)), I64)
            builder.store(builder.add(number, found), total)
    return builder.load(total)


@operation(types.void)
def add_row(builder, x: "array", out: "array", count):
    """out int32 += x, int8 or int32; count: a multiple of 32."""
    with cgutils.for_range(builder, builder.sdiv(count, I64(32)), intp=I64) as loop:
        at, vector = builder.mul(loop.index, I64(32)), _vector(I32, 32)
        more, place = _load(builder, builder.gep(x, [at]), _vector(x.type.pointee, 32)), builder.gep(out, [at])
        more = builder.sext(more, vector) if x.type.pointee == I8 else more
        _store(builder, builder.add(_load(builder, place, vector), more), place)
