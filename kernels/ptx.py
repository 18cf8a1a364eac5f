"""Inline PTX for the CUDA kernels: the instructions numba-cuda has no function for, one intrinsic each.

Conventions. A "shared address" is an int32 in the shared window (`shared_address`). One int32 word of an operand holds
four consecutive k as bytes. In a warp, g = lane // 4 and q = lane % 4. Operands lie in memory as *core matrices*: 8
rows of 16 bytes, 128 contiguous bytes; a matrix of K bytes a row is stored [rows / 8][K / 16][8][16] (`core_offset` in
egg_kernels).
"""

from types import SimpleNamespace

from llvmlite import ir
from numba import types
from numba.cuda.extending import intrinsic

I32, I64, F32, VOID = ir.IntType(32), ir.IntType(64), ir.FloatType(), ir.VoidType()


def _asm(text, out, operands, constraints, side_effect=False):
    return ir.InlineAsm(ir.FunctionType(out, operands), text, constraints, side_effect=side_effect)


def _statement(text):
    """An intrinsic without operands that orders memory or threads."""
    @intrinsic
    def emit(ctx):
        def codegen(context, builder, sig, args):
            builder.call(_asm(text, VOID, [], "~{memory}", side_effect=True), [])
            return context.get_dummy_value()
        return types.void(), codegen
    return emit


def _operation(text, result, operands, doc, side_effect=False):
    """An intrinsic on 32- or 64-bit scalars: numba types in, one numba type out. Integer operands are cast by numba."""
    ll = {types.int32: I32, types.uint32: I32, types.int64: I64, types.float32: F32, types.void: VOID}
    letter = {types.int32: "r", types.uint32: "r", types.int64: "l", types.float32: "f"}
    constraints = ([] if result is types.void else ["=" + letter[result]]) + [letter[t] for t in operands]
    if side_effect:
        constraints.append("~{memory}")

    def codegen(context, builder, sig, args):
        r = builder.call(_asm(text, ll[result], [ll[t] for t in operands], ",".join(constraints), side_effect), args)
        return context.get_dummy_value() if result is types.void else r

    sig = result(*operands)
    makers = {
        0: lambda ctx: (sig, codegen), 1: lambda ctx, a: (sig, codegen), 2: lambda ctx, a, b: (sig, codegen),
        3: lambda ctx, a, b, c: (sig, codegen), 4: lambda ctx, a, b, c, d: (sig, codegen), 5: lambda ctx, a, b, c, d,
        e: (sig, codegen),
    }
    f = intrinsic(makers[len(operands)])
    f.__doc__ = doc
    return f


def _pointer(context, builder, array_type, array, index):
    data = context.make_array(array_type)(context, builder, array).data
    return builder.gep(data, [index])


# --- scalars, every supported card -----------------------------------------------------------------------------------

trunc_f32 = _operation("cvt.rzi.s32.f32 $0, $1;", types.int32, (types.float32,),
                       "int32 of a float32, toward zero, saturating.")
add_rz = _operation("add.rz.f32 $0, $1, $2;", types.float32, (types.float32,) * 2, "float32 sum rounded toward zero.")
whole_64ths = _operation("{ .reg .b32 t; shr.s32 t, $1, 31; shr.u32 t, t, 26; add.s32 t, t, $1; and.b32 $0, t, -64; }",
                         types.int32,
                         (types.int32,), "64 * (p / 64 toward zero).")
float_bits = _operation("mov.b32 $0, $1;", types.int32, (types.float32,), "The bits of a float32.")
bits_float = _operation("mov.b32 $0, $1;", types.float32, (types.int32,), "The float32 of these bits.")
here = _operation("mov.b32 $0, $1;", types.int32, (types.int32,),
                  "x, but what is made of it stays in the loop: saves registers.",
                  side_effect=True)
fma_down = _operation("fma.rm.f32 $0, $1, $2, $3;", types.float32, (types.float32,) * 3,
                      "a * b + c, rounded once, downward.")
fma_toward_zero = _operation("fma.rz.f32 $0, $1, $2, $3;", types.float32, (types.float32,) * 3,
                             "a * b + c, rounded once, toward zero.")
with_sign = _operation("copysign.f32 $0, $2, $1;", types.float32, (types.float32,) * 2, "a >= 0 with the sign of b.")
fma_sat = _operation("fma.rn.sat.f32 $0, $1, $2, $3;", types.float32, (types.float32,) * 3,
                     "a * b + c, rounded once, then cut to [0, 1].")
add_down = _operation("add.rm.f32 $0, $1, $2;", types.float32, (types.float32,) * 2, "float32 sum rounded downward.")
half_like = _operation("lop3.b32 $0, $1, 0x80000000, 0x3F000000, 0xEA;", types.float32, (types.float32,),
                       "0.5 with the sign of x.")
mad_wide = _operation("mad.wide.s32 $0, $1, $2, $3;", types.int64, (types.int32, types.int32, types.int64),
                      "a * b + c in 64 bits.")
dp4a = _operation("dp4a.s32.s32 $0, $1, $2, $3;", types.int32, (types.int32,) * 3,
                  "c + the dot product of four int8 pairs of a and b.")
byte_permute = _operation("prmt.b32 $0, $1, $2, $3;", types.int32, (types.int32,) * 3,
                          "Bytes picked by the nibbles of the third operand; nibble + 8 spreads the byte's sign bit.")
trunc_64th = _operation("{ .reg .b32 t; shr.s32 t, $1, 31; shr.u32 t, t, 26; add.s32 t, t, $1; shr.s32 $0, t, 6; }",
                        types.int32,
                        (types.int32,), "p / 64 toward zero.")
warp_sum = _operation("redux.sync.add.s32 $0, $1, 0xffffffff;", types.int32, (types.int32,),
                      "Sum over the warp, cc >= 8.0.",
                      side_effect=True)
warp_max = _operation("redux.sync.max.s32 $0, $1, 0xffffffff;", types.int32, (types.int32,),
                      "Maximum over the warp, cc >= 8.0.",
                      side_effect=True)




# --- two int16 or four bytes in a word, cc 9.0 has an instruction for each -------------------------------------------

add2 = _operation("add.s16x2 $0, $1, $2;", types.int32, (types.int32,) * 2, "Sums of the halves.")
min2 = _operation("min.s16x2 $0, $1, $2;", types.int32, (types.int32,) * 2, "The smaller of the halves.")
max2 = _operation("max.s16x2 $0, $1, $2;", types.int32, (types.int32,) * 2, "The larger of the halves.")
clip2 = _operation("{ .reg .b32 t, u; mov.b32 t, 0x007F007F; min.s16x2 t, $1, t; "
                   "mov.b32 u, 0xFF81FF81; max.s16x2 $0, t, u; }", types.int32, (types.int32,),
                   "The halves, between -127 and 127.")
low2 = _operation("prmt.b32 $0, $1, 0, 0x9180;", types.int32, (types.int32,),
                  "The int8 0 and 1 of a word as two int16.")
high2 = _operation("prmt.b32 $0, $1, 0, 0xB3A2;", types.int32, (types.int32,),
                   "The int8 2 and 3 of a word as two int16.")
bytes4 = _operation("prmt.b32 $0, $1, $2, 0x6420;", types.int32, (types.int32,) * 2,
                    "Four int16, two to a word, as int8.")
minimum = _operation("min.f32 $0, $1, $2;", types.float32, (types.float32,) * 2, "The smaller of two float32.")
maximum = _operation("max.f32 $0, $1, $2;", types.float32, (types.float32,) * 2, "The larger of two float32.")
reciprocal = _operation("rcp.approx.ftz.f32 $0, $1;", types.float32, (types.float32,),
                        "1 / x, within a unit in the last place.")
saturate2 = _operation("cvt.pack.sat.s16.s32 $0, $2, $1;", types.int32, (types.int32,) * 2,
                       "Two int32 clipped to int16, the first low.")
dp2a_low = _operation("dp2a.lo.s32.s32 $0, $1, $2, 0;", types.int32, (types.int32,) * 2,
                      "The two int16 of a times the int8 0 and 1 of b, summed.")
dp2a_high = _operation("dp2a.hi.s32.s32 $0, $1, $2, 0;", types.int32, (types.int32,) * 2,
                       "The two int16 of a times the int8 2 and 3 of b, summed.")
dp2a_low_u8 = _operation("dp2a.lo.s32.u32 $0, $1, $2, 0;", types.int32, (types.int32,) * 2, "The same with uint8.")
dp2a_high_u8 = _operation("dp2a.hi.s32.u32 $0, $1, $2, 0;", types.int32, (types.int32,) * 2, "The same with uint8.")
distance4 = _operation("vabsdiff4.u32.u32.u32.add $0, $1, $2, $3;", types.int32, (types.int32,) * 3,
                       "c + the sum of the distances of four uint8 pairs of a and b.")


def int16_pairs(cc):
    """add2, min2, max2 of two int16 in a word on a card of this compute capability."""
    if cc[0] >= 9:
        return SimpleNamespace(add2=add2, min2=min2, max2=max2)
    both, words = types.int32, (types.int32,) * 2
    return SimpleNamespace(
        add2=_operation("{ .reg .b32 t, u; and.b32 t, $1, 0x7FFF7FFF; and.b32 u, $2, 0x7FFF7FFF; "
                        "add.u32 t, t, u; xor.b32 u, $1, $2; and.b32 u, u, 0x80008000; xor.b32 $0, t, u; }",
                        both, words, add2.__doc__),
        min2=_operation("{ .reg .b32 z; mov.b32 z, 0; vmin2.s32.s32.s32 $0, $1, $2, z; }", both, words, min2.__doc__),
        max2=_operation("{ .reg .b32 z; mov.b32 z, 0; vmax2.s32.s32.s32 $0, $1, $2, z; }", both, words, max2.__doc__))


# --- matrix products, cc >= 8.0 --------------------------------------------------------------------------------------

def _mma(kind):
    @intrinsic
    def emit(ctx, a0, a1, a2, a3, b0, b1, c0, c1, c2, c3):
        sig = types.UniTuple(types.int32, 4)(*[types.int32] * 10)

        def codegen(context, builder, sig, args):
            f = _asm(f"mma.sync.aligned.m16n8k32.row.col.s32.{kind}.s32 "
                     "{$0,$1,$2,$3}, {$4,$5,$6,$7}, {$8,$9}, {$10,$11,$12,$13};",
                     ir.LiteralStructType([I32] * 4), [I32] * 10, ",".join(["=r"] * 4 + ["r"] * 10))
            r = builder.call(f, args)
            return context.make_tuple(builder, sig.return_type, [builder.extract_value(r, i) for i in range(4)])
        return sig, codegen
    return emit


# D[16 x 8] = A[16 x 32] B[32 x 8] + C: mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32, cc >= 8.0.
# a0 = A[g, 4q..], a1 = A[g + 8, 4q..], a2 = A[g, 16 + 4q..], a3 = A[g + 8, 16 + 4q..]; b0 = B[4q.., g], b1 = B[16 +
# 4q.., g]; c0, c1 = C[g, 2q], C[g, 2q + 1]; c2, c3 = the same in row g + 8. Returns the four c.
mma_s8 = _mma("s8.s8")
mma_u8s8 = _mma("u8.s8")     # the same with an unsigned A


def mma_product(columns, steps, shared, keep=False, tiles=1):
    """Intrinsic f(acc, a, b, start): acc = start + 16 * `tiles` rows x `columns` (a multiple of 16) over 32 * `steps`
    of K, of one warp, cc >= 8.0; with `keep` acc + the product.

    start: a local int32 array of 4, all with the same number; ptxas must not know that, or it makes copies for every
    tile. a: a local int32 array of 4 * steps for each 16 rows, as in wgmma_product. acc: a local array of columns / 2
    for each 16 rows: acc[4 j], acc[4 j + 1] = row g, columns 8 j + 2 q and + 1; acc[4 j + 2], acc[4 j + 3] = the same
    in row g + 8. b: core matrices of 32 * steps bytes a row, one row a column of the product: where this lane reads, a
    shared address (int32, with `shared`: that of row lane % 8 of core matrix lane / 8 of four, of which 1 and 3 are 16
    inputs further, 2 and 3 eight columns) or a global one (int64: that of word `lane`)."""
    each, row = columns // 2, 32 * steps
    count = each * tiles

    @intrinsic
    def emit(ctx, acc, a, b, start):
        sig = types.void(acc, a, types.int32 if shared else types.int64, start)

        def codegen(context, builder, sig, args):
            def cells_of(i, n):
                data = context.make_array(sig.args[i])(context, builder, args[i]).data
                return [builder.gep(data, [I64(k)]) for k in range(n)]

            def quad(first):
                return "{" + ",".join(f"${first + i}" for i in range(4)) + "}"

            cells = cells_of(0, count)
            operands = [builder.load(c) for c in cells] if keep else []
            at_a = count + len(operands)
            operands += [builder.load(c) for c in cells_of(1, 4 * steps * tiles)]
            operands += [args[2]] + [builder.load(c) for c in cells_of(3, 4)]
            at_b = at_a + 4 * steps * tiles
            text = ["{ .reg .b32 b0, b1, b2, b3;"]
            for j in range(columns // 16):
                for k in range(steps):
                    at = 16 * row * j + 256 * k
                    if shared:
                        text.append(f"ldmatrix.sync.aligned.m8n8.x4.shared.b16 {{b0,b1,b2,b3}}, [${at_b}+{at}];")
                    else:
                        text += [f"ld.global.nc.b32 b{i}, [${at_b}+{at + more}];"
                                for i, more in enumerate((0, 128, 8 * row, 8 * row + 128))]
                    for tile in range(tiles):
                        for half in range(2):
                            here = each * tile + 8 * j + 4 * half
                            old = quad(here if k else count + here if keep else at_b + 1)
                            text.append("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 "
                                        f"{quad(here)}, {quad(at_a + 4 * (steps * tile + k))}, "
                                        f"{{b{2 * half},b{2 * half + 1}}}, {old};")
            text.append("}")
            constraints = (["=r"] * count + ([str(i) for i in range(count)] if keep else [])
                           + ["r"] * (4 * steps * tiles) + ["r" if shared else "l"] + ["r"] * 4 + ["~{memory}"])
            f = _asm(" ".join(text), ir.LiteralStructType([I32] * count), [v.type for v in operands],
                     ",".join(constraints), side_effect=True)
            r = builder.call(f, operands)
            for i, c in enumerate(cells):
                builder.store(builder.extract_value(r, i), c)
            return context.get_dummy_value()
        return sig, codegen
    return emit


@intrinsic
def load_matrix4(ctx, address):
    """ldmatrix.sync.aligned.m8n8.x4.shared.b16, cc >= 7.5: four core matrices; lane i gives the shared address of row i
    % 8 of matrix i // 8. Returns four int32: word q of row g of each matrix."""
    sig = types.UniTuple(types.int32, 4)(types.int32)

    def codegen(context, builder, sig, args):
        f = _asm("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {$0,$1,$2,$3}, [$4];", ir.LiteralStructType([I32] * 4),
                 [I32],
                 "=r,=r,=r,=r,r,~{memory}", side_effect=True)
        r = builder.call(f, args)
        return context.make_tuple(builder, sig.return_type, [builder.extract_value(r, i) for i in range(4)])
    return sig, codegen


load_shared = _operation("ld.shared.b32 $0, [$1];", types.int32, (types.int32,),
                         "An int32 at a shared address. For tables only: nothing orders it but its address.")


read_shared = _operation("ld.shared.b32 $0, [$1];", types.int32, (types.int32,), "The same, in order with stores.",
                         side_effect=True)


@intrinsic
def load_shared4(ctx, address):
    """Four int32 from a shared address that is a multiple of 16."""
    sig = types.UniTuple(types.int32, 4)(types.int32)

    def codegen(context, builder, sig, args):
        f = _asm("ld.shared.v4.b32 {$0,$1,$2,$3}, [$4];", ir.LiteralStructType([I32] * 4), [I32],
                 "=r,=r,=r,=r,r,~{memory}",
                 side_effect=True)
        r = builder.call(f, args)
        return context.make_tuple(builder, sig.return_type, [builder.extract_value(r, i) for i in range(4)])
    return sig, codegen


@intrinsic
def load4(ctx, array, index):
    """Four int32 from array[index...], global memory, index a multiple of 4."""
    sig = types.UniTuple(types.int32, 4)(array, types.int64)

    def codegen(context, builder, sig, args):
        p = _pointer(context, builder, sig.args[0], *args)
        v = builder.load(builder.bitcast(p, ir.PointerType(ir.VectorType(I32, 4))), align=16)
        return context.make_tuple(builder, sig.return_type, [builder.extract_element(v, I32(i)) for i in range(4)])
    return sig, codegen


@intrinsic
def store4(ctx, array, index, a, b, c, d):
    """array[index...] = a, b, c, d (int32), global memory, index a multiple of 4."""
    sig = types.void(array, types.int64, *[types.int32] * 4)

    def codegen(context, builder, sig, args):
        p = _pointer(context, builder, sig.args[0], *args[:2])
        v = ir.Constant(ir.VectorType(I32, 4), ir.Undefined)
        for i in range(4):
            v = builder.insert_element(v, args[2 + i], I32(i))
        builder.store(v, builder.bitcast(p, ir.PointerType(ir.VectorType(I32, 4))), align=16)
        return context.get_dummy_value()
    return sig, codegen


@intrinsic
def load2(ctx, array, index):
    """Two int32 from array[index...], global memory, index even."""
    sig = types.UniTuple(types.int32, 2)(array, types.int64)

    def codegen(context, builder, sig, args):
        p = _pointer(context, builder, sig.args[0], *args)
        v = builder.load(builder.bitcast(p, ir.PointerType(ir.VectorType(I32, 2))), align=8)
        return context.make_tuple(builder, sig.return_type, [builder.extract_element(v, I32(i)) for i in range(2)])
    return sig, codegen


@intrinsic
def store2(ctx, array, index, a, b):
    """array[index...] = a, b (int32), global memory, index even."""
    sig = types.void(array, types.int64, types.int32, types.int32)

    def codegen(context, builder, sig, args):
        p = _pointer(context, builder, sig.args[0], *args[:2])
        v = ir.Constant(ir.VectorType(I32, 2), ir.Undefined)
        for i in range(2):
            v = builder.insert_element(v, args[2 + i], I32(i))
        builder.store(v, builder.bitcast(p, ir.PointerType(ir.VectorType(I32, 2))), align=8)
        return context.get_dummy_value()
    return sig, codegen


@intrinsic
def global_address(ctx, array, index):
    """Address (int64) of array[index], global memory."""
    sig = types.int64(array, types.int64)

    def codegen(context, builder, sig, args):
        return builder.ptrtoint(_pointer(context, builder, sig.args[0], *args), I64)
    return sig, codegen


@intrinsic
def prefetch(ctx, array, index):
    """Brings the line of array[index], which must exist, into the second-level cache."""
    sig = types.void(array, types.int64)

    def codegen(context, builder, sig, args):
        p = builder.ptrtoint(_pointer(context, builder, sig.args[0], *args), I64)
        builder.call(_asm("prefetch.L2 [$0];", VOID, [I64], "l", side_effect=True), [p])
        return context.get_dummy_value()
    return sig, codegen


store_shared4 = _operation("st.shared.v4.b32 [$0], {$1, $2, $3, $4};", types.void, (types.int32,) * 5,
                           "Four int32 to a shared address that is a multiple of 16.", side_effect=True)


def mma_tile(columns, steps, stride):
    """Intrinsic f(acc, a, b): acc += 16 rows x `columns` over 32 * `steps` of K, a warp, from core matrices in shared
    memory.

    acc: a local int32 array of columns / 2, with w = 0 as in wgmma_s8. a, b: this lane's address as in load_matrix4, of
    the first two groups of 8 rows (a: matrices are rows 0, rows 8, then both 16 bytes of K further; b: columns 0, the
    same 16 bytes further, then columns 8).
    stride: bytes from one group of 8 columns to the next."""
    count = columns // 2

    @intrinsic
    def emit(ctx, acc, a, b):
        sig = types.void(acc, types.int32, types.int32)

        def codegen(context, builder, sig, args):
            data = context.make_array(sig.args[0])(context, builder, args[0]).data
            cells = [builder.gep(data, [I64(i)]) for i in range(count)]
            text = ["{ .reg .b32 a0, a1, a2, a3, b0, b1, b2, b3;"]
            for k in range(steps):
                text.append(f"ldmatrix.sync.aligned.m8n8.x4.shared.b16 {{a0, a1, a2, a3}}, [${2 * count} + {256 * k}];")
                for j in range(columns // 16):
                    at = 256 * k + j * 2 * stride
                    text.append(f"ldmatrix.sync.aligned.m8n8.x4.shared.b16 {{b0, b1, b2, b3}}, "
                                f"[${2 * count + 1} + {at}];")
                    for i in range(2):
                        c = "{" + ", ".join(f"${8 * j + 4 * i + n}" for n in range(4)) + "}"
                        text.append(f"mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {c}, {{a0, a1, a2, a3}}, "
                                    f"{{b{2 * i}, b{2 * i + 1}}}, {c};")
            constraints = ["=r"] * count + [str(i) for i in range(count)] + ["r", "r", "~{memory}"]
            f = _asm(" ".join(text + ["}"]), ir.LiteralStructType([I32] * count), [I32] * (count + 2),
                     ",".join(constraints), side_effect=True)
            r = builder.call(f, [builder.load(c) for c in cells] + list(args[1:]))
            for i, c in enumerate(cells):
                builder.store(builder.extract_value(r, i), c)
            return context.get_dummy_value()
        return sig, codegen
    return emit


store_shared = _operation("st.shared.b32 [$0], $1;", types.void, (types.int32,) * 2, "An int32 to a shared address.",
                          side_effect=True)


# --- shared memory and asynchronous copies, cc >= 8.0 ----------------------------------------------------------------

@intrinsic
def shared_address(ctx, array, index):
    """Shared address (int32) of array[index], `array` a shared array."""
    sig = types.int32(array, types.int64)

    def codegen(context, builder, sig, args):
        p = _pointer(context, builder, sig.args[0], *args)
        if p.type.addrspace == 3:
            return builder.ptrtoint(p, I32)
        f = _asm("{ .reg .u64 t; cvta.to.shared.u64 t, $1; cvt.u32.u64 $0, t; }", I32, [I64], "=r,l")
        return builder.call(f, [builder.ptrtoint(p, I64)])
    return sig, codegen


@intrinsic
def copy_async16(ctx, address, source, index):
    """cp.async.cg.shared.global, 16 bytes from source[index...] (global memory, aligned) to a shared address, cc >=
    8.0."""
    sig = types.void(types.int32, source, types.int64)

    def codegen(context, builder, sig, args):
        p = builder.ptrtoint(_pointer(context, builder, sig.args[1], args[1], args[2]), I64)
        f = _asm("cp.async.cg.shared.global [$0], [$1], 16;", VOID, [I32, I64], "r,l,~{memory}", side_effect=True)
        builder.call(f, [args[0], p])
        return context.get_dummy_value()
    return sig, codegen


copy_commit = _statement("cp.async.commit_group;")
copy_wait_all = _statement("cp.async.wait_group 0;")          # every committed group of this thread has landed
copy_wait_but_one = _statement("cp.async.wait_group 1;")      # all but the newest


# --- barriers in shared memory, cc >= 8.0 -----------------------------------------------------------------------------

barrier_init = _operation("mbarrier.init.shared::cta.b64 [$0], $1;", types.void, (types.int32,) * 2,
                          "Barrier at a shared address (8 bytes) for `count` arrivals.", side_effect=True)
barrier_arrive = _operation("{ .reg .b64 state; mbarrier.arrive.shared::cta.b64 state, [$0]; }", types.void,
                            (types.int32,), "One arrival.",
                            side_effect=True)
barrier_test = _operation("{ .reg .pred p; W: mbarrier.test_wait.parity.shared::cta.b64 p, [$0], $1; "
                          "@p bra D; bra W; D: }", types.void, (types.int32,) * 2,
                          "Wait until the phase of this parity is complete.", side_effect=True)
copy_arrive = _operation("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [$0];", types.void, (types.int32,),
                         "One arrival when the copies that this thread has started have landed.", side_effect=True)
named_barrier = _operation("bar.sync $0, $1;", types.void, (types.int32,) * 2,
                           "Barrier `id` (1 to 15) of `count` threads.",
                           side_effect=True)


def shared_limit(device):
    """Bytes of dynamic shared memory a block of this device can have."""
    from cuda.bindings import driver
    attribute = driver.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN
    return int(driver.cuDeviceGetAttribute(attribute, device.id)[1])


def allow_shared(kernel, signature, nbytes):
    """Compile `kernel` for `signature` and let it use `nbytes` of dynamic shared memory (more than 48 KiB needs
    this)."""
    from numba import cuda
    from numba.cuda.cudadrv.driver import binding, driver
    kernel.compile(signature)
    function = kernel.overloads[signature]._codelibrary.get_cufunc()
    driver.cuKernelSetAttribute(binding.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, nbytes,
                                function.handle,
                                cuda.get_current_device().id)


# --- cc 9.0 only: bulk copies, warpgroup products --------------------------------------------------------------------

# between ordinary stores and wgmma (or a bulk copy) reading them
proxy_fence = _statement("fence.proxy.async.shared::cta;")
barrier_fence = _statement("fence.mbarrier_init.release.cluster;")
barrier_expect = _operation("mbarrier.arrive.expect_tx.shared::cta.b64 _, [$0], $1;", types.void, (types.int32,) * 2,
                            "One arrival that also awaits this many bytes of bulk copies.", side_effect=True)
barrier_wait = _operation("{ .reg .pred p; W: mbarrier.try_wait.parity.shared::cta.b64 p, [$0], $1; "
                          "@p bra D; bra W; D: }", types.void, (types.int32,) * 2,
                          "Wait until the phase of this parity is complete.", side_effect=True)


@intrinsic
def copy_bulk(ctx, address, source, index, nbytes, barrier):
    """cp.async.bulk.shared::cluster.global: nbytes (a multiple of 16) from source[index...] to a shared address;
    completes on the barrier at shared address `barrier`. One thread issues it. cc >= 9.0."""
    sig = types.void(types.int32, source, types.int64, types.int32, types.int32)

    def codegen(context, builder, sig, args):
        p = builder.ptrtoint(_pointer(context, builder, sig.args[1], args[1], args[2]), I64)
        f = _asm("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [$0], [$1], $2, [$3];", VOID,
                 [I32, I64, I32, I32],
                 "r,l,r,r,~{memory}", side_effect=True)
        builder.call(f, [args[0], p, args[3], args[4]])
        return context.get_dummy_value()
    return sig, codegen


# before the first product that reads accumulators just touched
wgmma_fence = _statement("wgmma.fence.sync.aligned;")


def wgmma_descriptor_strides(k_bytes):
    """Upper part of a wgmma descriptor of core matrices whose rows have k_bytes; add (shared address & 0x3FFFF) >>
    4."""
    return (128 >> 4) << 16 | (8 * k_bytes >> 4) << 32


def wgmma_s8(columns):
    """Intrinsic f(acc, a_desc, b_desc, keep): wgmma.mma_async.sync.aligned.m64n{columns}k32.s32.s8.s8, cc 9.0a, one
    warpgroup, both operands K-major in shared memory. acc: a local int32 array of columns / 2, overwritten where keep
    (int32) is 0. With w = warp of the group, acc[4j], acc[4j + 1] = row 16w + g, columns 8j + 2q and + 1; acc[4j + 2],
    acc[4j + 3] = the same in row 16w + g + 8."""
    count = columns // 2

    @intrinsic
    def emit(ctx, acc, a_desc, b_desc, keep):
        sig = types.void(acc, types.int64, types.int64, types.int32)

        def codegen(context, builder, sig, args):
            data = context.make_array(sig.args[0])(context, builder, args[0]).data
            cells = [builder.gep(data, [I64(i)]) for i in range(count)]
            text = ("{ .reg .pred p; setp.ne.s32 p, $%d, 0; "
                    "wgmma.mma_async.sync.aligned.m64n%dk32.s32.s8.s8 {%s}, $%d, $%d, p; }"
                    % (2 * count + 2, columns, ",".join(f"${i}" for i in range(count)), 2 * count, 2 * count + 1))
            constraints = ["=r"] * count + [str(i) for i in range(count)] + ["l", "l", "r"]
            f = _asm(text, ir.LiteralStructType([I32] * count), [I32] * count + [I64] * 2 + [I32],
                     ",".join(constraints),
                     side_effect=True)
            r = builder.call(f, [builder.load(c) for c in cells] + list(args[1:]))
            for i, c in enumerate(cells):
                builder.store(builder.extract_value(r, i), c)
            return context.get_dummy_value()
        return sig, codegen
    return emit


def wgmma_done(columns):
    """Intrinsic f(acc): commit the products issued and wait for them; acc may be read afterwards."""
    count = columns // 2

    @intrinsic
    def emit(ctx, acc):
        sig = types.void(acc)

        def codegen(context, builder, sig, args):
            data = context.make_array(sig.args[0])(context, builder, args[0]).data
            cells = [builder.gep(data, [I64(i)]) for i in range(count)]
            text = "wgmma.commit_group.sync.aligned;\nwgmma.wait_group.sync.aligned 0;"
            f = _asm(text, ir.LiteralStructType([I32] * count), [I32] * count,
                     ",".join(["=r"] * count + [str(i) for i in range(count)] + ["~{memory}"]), side_effect=True)
            r = builder.call(f, [builder.load(c) for c in cells])
            for i, c in enumerate(cells):
                builder.store(builder.extract_value(r, i), c)
            return context.get_dummy_value()
        return sig, codegen
    return emit


def wgmma_product(columns, steps, registers, keep):
    """Intrinsic f(acc, a, b_desc): acc = 64 rows x `columns` over 32 * `steps` of K, complete when it returns; with
    `keep` it is added to acc. One warpgroup, B K-major in shared memory, acc as in wgmma_s8.

    a: a descriptor, or with `registers` a local int32 array of 4 * steps: word 4 i + 0 = row 16 w + g, k = 32 i + 4
    q...; 4 i + 1 = the same in row 16 w + g + 8; 4 i + 2, 4 i + 3 = the same at k = 32 i + 16 + 4 q..."""
    count = columns // 2

    @intrinsic
    def emit(ctx, acc, a, b_desc):
        sig = types.void(acc, a if registers else types.int64, types.int64)

        def codegen(context, builder, sig, args):
            def cells_of(i, n):
                data = context.make_array(sig.args[i])(context, builder, args[i]).data
                return [builder.gep(data, [I64(k)]) for k in range(n)]

            cells, first = cells_of(0, count), count + (count if keep else 0)
            operands = [builder.load(c) for c in cells] if keep else []
            operands += [builder.load(c) for c in cells_of(1, 4 * steps)] if registers else [args[1]]
            n = first + (4 * steps if registers else 1)          # where b_desc is
            operands.append(args[2])
            outs = ",".join(f"${i}" for i in range(count))
            text = [f"{{ .reg .pred p; .reg .b64 a, b; mov.b64 b, ${n}; setp.{'eq' if keep else 'ne'}.s64 p, b, b;",
                    "" if registers else f"mov.b64 a, ${first};", "wgmma.fence.sync.aligned;"]
            for i in range(steps):
                left = "{" + ",".join(f"${first + 4 * i + k}" for k in range(4)) + "}" if registers else "a"
                text.append(f"wgmma.mma_async.sync.aligned.m64n{columns}k32.s32.s8.s8 {{{outs}}}, {left}, b, p;")
                if i == 0:
                    text.append("setp.eq.s64 p, b, b;")
                if i + 1 < steps:
                    text.append("add.s64 b, b, 16;" + ("" if registers else " add.s64 a, a, 16;"))
            text.append("wgmma.commit_group.sync.aligned; wgmma.wait_group.sync.aligned 0; }")
            constraints = ["=r"] * count + ([str(i) for i in range(count)] if keep else [])
            constraints += ["r"] * (4 * steps) if registers else ["l"]
            f = _asm(" ".join(text), ir.LiteralStructType([I32] * count), [v.type for v in operands],
                     ",".join(constraints + ["l", "~{memory}"]), side_effect=True)
            r = builder.call(f, operands)
            for i, c in enumerate(cells):
                builder.store(builder.extract_value(r, i), c)
            return context.get_dummy_value()
        return sig, codegen
    return emit
