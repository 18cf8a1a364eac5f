"""Inline PTX for the CUDA kernels: the instructions numba-cuda has no function for, one intrinsic each.

Conventions. A "shared address" is an int32 in the shared window (`shared_address`). One int32 word of an operand holds
four consecutive k as bytes. In a warp, g = lane // 4 and q = lane % 4. Operands lie in memory as *core matrices*: 8
rows of 16 bytes, 128 contiguous bytes; a matrix of K bytes a row is stored [rows / 8][K / 16][8][16].
"""

import inspect
import re

from llvmlite import ir
from numba.cuda.extending import intrinsic
from numba.types import UniTuple, float32, int32, int64, void

I32, I64 = ir.IntType(32), ir.IntType(64)
TYPE = {int32: I32, int64: I64, float32: ir.FloatType(), void: ir.VoidType()}
LETTER = {int32: "r", int64: "l", float32: "f"}
POINTER = "pointer"
VOLATILE, MEMORY = "volatile", "memory"


def _parameters(count):
    """A signature for numba: the context and `count` arguments."""
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    return inspect.Signature([inspect.Parameter(f"a{i}", kind) for i in range(count + 1)])


def _pointer(context, builder, array_type, array, index):
    data = context.make_array(array_type)(context, builder, array).data
    return builder.gep(data, [index])


def _instruction(text, result=int32, operands=None, effect="", sets=0):
    """An intrinsic f(*operands) that emits inline PTX. In the text the results come first, from $0 on.

    result: a numba scalar, or int n: a tuple of n int32. An operand is a numba scalar; or POINTER: an array and an
    index, in the text the 64-bit address; or int n: the first n int32 of a local array, or a tuple of n, in the text n
    registers. None: what the text names, float32 where the result is one, else int32.
    effect: VOLATILE (it is neither moved nor dropped) or MEMORY (nor are loads and stores moved across it), which is
    that of an instruction without a result.
    sets: instead of a result, a local array before the operands: its first `sets` int32 are the first operands, and are
    written."""
    count = sets or (result if isinstance(result, int) else 0)
    if operands is None:
        named = len(set(re.findall(r"\$\d", text))) - (count or result is not void)
        operands = [float32 if result is float32 else int32] * named
    if result is void:
        effect = effect or MEMORY

    def emit(ctx, *arguments):
        arguments, wanted = list(arguments), [arguments[0]] if sets else []
        for kind in operands:
            at = len(wanted)
            wanted += [arguments[at], int64] if kind is POINTER else [arguments[at] if isinstance(kind, int) else kind]

        def codegen(context, builder, sig, args):
            def cells(i, n):
                data = context.make_array(sig.args[i])(context, builder, args[i]).data
                return [builder.gep(data, [I64(k)]) for k in range(n)]

            written, at = cells(0, sets) if sets else [], bool(sets)
            values = [builder.load(cell) for cell in written]
            constraints = [str(i) for i in range(len(values))]
            for kind in operands:
                if kind is POINTER:
                    values.append(builder.ptrtoint(_pointer(context, builder, sig.args[at], *args[at:at + 2]), I64))
                elif isinstance(sig.args[at], UniTuple):
                    values += [builder.extract_value(args[at], i) for i in range(kind)]
                elif isinstance(kind, int):
                    values += [builder.load(cell) for cell in cells(at, kind)]
                else:
                    values.append(args[at])
                at += 2 if kind is POINTER else 1
                constraints += ["r"] * kind if isinstance(kind, int) else ["l" if kind is POINTER else LETTER[kind]]
            out = ir.LiteralStructType([I32] * count) if count else TYPE[result]
            outs = ["=r"] * count if count else [] if result is void else ["=" + LETTER[result]]
            clobbered = ["~{memory}"] if effect == MEMORY else []
            assembly = ir.InlineAsm(ir.FunctionType(out, [value.type for value in values]), text,
                                    ",".join(outs + constraints + clobbered), side_effect=bool(effect))
            made = builder.call(assembly, values)
            for i, cell in enumerate(written):
                builder.store(builder.extract_value(made, i), cell)
            if sets or result is void:
                return context.get_dummy_value()
            parts = [builder.extract_value(made, i) for i in range(count)]
            return context.make_tuple(builder, sig.return_type, parts) if count else made

        return (UniTuple(int32, result) if isinstance(result, int) else result)(*wanted), codegen

    emit.__signature__ = _parameters(bool(sets) + sum(2 if kind is POINTER else 1 for kind in operands))
    return intrinsic(emit)


# --- scalars, every supported card -----------------------------------------------------------------------------------

trunc_f32 = _instruction("cvt.rzi.s32.f32 $0, $1;", int32, (float32,))                  # toward zero, saturating
add_down = _instruction("add.rm.f32 $0, $1, $2;", float32)   # rounded downward
fma_down = _instruction("fma.rm.f32 $0, $1, $2, $3;", float32)   # rounded once, downward
fma_toward_zero = _instruction("fma.rz.f32 $0, $1, $2, $3;", float32)
fma_sat = _instruction("fma.rn.sat.f32 $0, $1, $2, $3;", float32)   # rounded, then cut to [0, 1]
float_bits = _instruction("mov.b32 $0, $1;", int32, (float32,))
bits_float = _instruction("mov.b32 $0, $1;", float32, (int32,))
with_sign = _instruction("copysign.f32 $0, $2, $1;", float32)   # a >= 0 with the sign of b
minimum = _instruction("min.f32 $0, $1, $2;", float32)
maximum = _instruction("max.f32 $0, $1, $2;", float32)
reciprocal = _instruction("rcp.approx.ftz.f32 $0, $1;", float32)   # to 1 ulp
mad_wide = _instruction("mad.wide.s32 $0, $1, $2, $3;", int64, (int32, int32, int64))   # a * b + c in 64 bits
# x; computations with it cannot be moved out of the loop, which saves registers
keep_in_loop = _instruction("mov.b32 $0, $1;", effect=MEMORY)
# p / 64 toward zero
trunc_64th = _instruction("{ .reg .b32 t; shr.s32 t, $1, 31; shr.u32 t, t, 26; add.s32 t, t, $1; shr.s32 $0, t, 6; }")
# over the warp, cc >= 8.0
warp_sum = _instruction("redux.sync.add.s32 $0, $1, 0xffffffff;", effect=MEMORY)
warp_max = _instruction("redux.sync.max.s32 $0, $1, 0xffffffff;", effect=MEMORY)


# --- two int16 or four bytes in a word -------------------------------------------------------------------------------

# bytes picked by the nibbles of the third operand; nibble + 8 spreads the byte's sign bit
byte_permute = _instruction("prmt.b32 $0, $1, $2, $3;")
# c + the dot product of four int8 pairs of a and b
dp4a = _instruction("dp4a.s32.s32 $0, $1, $2, $3;")
# the two int16 of a times the int8 (or uint8) 0 and 1, or 2 and 3, of b, summed
dp2a_low = _instruction("dp2a.lo.s32.s32 $0, $1, $2, 0;")
dp2a_high = _instruction("dp2a.hi.s32.s32 $0, $1, $2, 0;")
dp2a_low_u8 = _instruction("dp2a.lo.s32.u32 $0, $1, $2, 0;")
dp2a_high_u8 = _instruction("dp2a.hi.s32.u32 $0, $1, $2, 0;")
# c + the sum of the distances of four uint8 pairs of a and b
distance4 = _instruction("vabsdiff4.u32.u32.u32.add $0, $1, $2, $3;")
# the int8 0 and 1, or 2 and 3, of a word as two int16; four int16, two to a word, as int8
low2 = _instruction("prmt.b32 $0, $1, 0, 0x9180;")
high2 = _instruction("prmt.b32 $0, $1, 0, 0xB3A2;")
bytes4 = _instruction("prmt.b32 $0, $1, $2, 0x6420;")

# of the halves, cc >= 9.0
add2 = _instruction("add.s16x2 $0, $1, $2;")
min2 = _instruction("min.s16x2 $0, $1, $2;")
max2 = _instruction("max.s16x2 $0, $1, $2;")
min2_unsigned = _instruction("min.u16x2 $0, $1, $2;")
max2_unsigned = _instruction("max.u16x2 $0, $1, $2;")


def int16_pairs(cc):
    """(add2, min2, max2) of two int16 in a word on a card of this compute capability."""
    if cc[0] >= 9:
        return add2, min2, max2
    extreme = "{ .reg .b32 z; mov.b32 z, 0; v%s2.s32.s32.s32 $0, $1, $2, z; }"
    return (_instruction("{ .reg .b32 t, u; and.b32 t, $1, 0x7FFF7FFF; and.b32 u, $2, 0x7FFF7FFF; "
                         "add.u32 t, t, u; xor.b32 u, $1, $2; and.b32 u, u, 0x80008000; xor.b32 $0, t, u; }"),
            _instruction(extreme % "min"), _instruction(extreme % "max"))


# --- loads and stores ------------------------------------------------------------------------------------------------

LDMATRIX = "ldmatrix.sync.aligned.m8n8.x4.shared.b16"

# Four core matrices; lane i gives the shared address of row i % 8 of matrix i // 8. 4 int32: word q of row g of each.
load_matrix4 = _instruction(LDMATRIX + " {$0,$1,$2,$3}, [$4];", 4, effect=MEMORY)
# an int32 at a shared address; `load_shared` is for tables only: nothing orders it but its address
load_shared = _instruction("ld.shared.b32 $0, [$1];")
read_shared = _instruction("ld.shared.b32 $0, [$1];", effect=MEMORY)
store_shared = _instruction("st.shared.b32 [$0], $1;", void)
# four int32 at a shared address that is a multiple of 16
load_shared4 = _instruction("ld.shared.v4.b32 {$0,$1,$2,$3}, [$4];", 4, effect=MEMORY)
store_shared4 = _instruction("st.shared.v4.b32 [$0], {$1, $2, $3, $4};", void)


def _load(count):
    """Intrinsic f(array, index): `count` int32 from array[index...], global memory, index a multiple of `count`."""
    @intrinsic
    def load(ctx, array, index):
        def codegen(context, builder, sig, args):
            p = _pointer(context, builder, sig.args[0], *args)
            v = builder.load(builder.bitcast(p, ir.PointerType(ir.VectorType(I32, count))), align=4 * count)
            parts = [builder.extract_element(v, I32(i)) for i in range(count)]
            return context.make_tuple(builder, sig.return_type, parts)
        return UniTuple(int32, count)(array, int64), codegen
    return load


def _store(count):
    """Intrinsic f(array, index, *values): the reverse."""
    def store(ctx, array, *_):
        def codegen(context, builder, sig, args):
            p = _pointer(context, builder, sig.args[0], *args[:2])
            v = ir.Constant(ir.VectorType(I32, count), ir.Undefined)
            for i in range(count):
                v = builder.insert_element(v, args[2 + i], I32(i))
            builder.store(v, builder.bitcast(p, ir.PointerType(ir.VectorType(I32, count))), align=4 * count)
            return context.get_dummy_value()
        return void(array, int64, *[int32] * count), codegen
    store.__signature__ = _parameters(2 + count)
    return intrinsic(store)


load2 = _load(2)
load4 = _load(4)
store2 = _store(2)
store4 = _store(4)


# f(array, index): the address of array[index] in shared memory (int32)
shared_address = _instruction("{ .reg .u64 t; cvta.to.shared.u64 t, $1; cvt.u32.u64 $0, t; }", int32, (POINTER,))


# --- matrix products, cc >= 8.0 --------------------------------------------------------------------------------------

# f(a, b0, b1, c) -> D[16 x 8] = A[16 x 32] B[32 x 8] + C; a, c: tuples or local arrays of 4. a: A[g, 4q..], A[g + 8,
# 4q..], A[g, 16 + 4q..], A[g + 8, 16 + 4q..]; b0, b1: B[4q.., g], B[16 + 4q.., g]; c and D: the two from [g, 2q] on,
# and the two from [g + 8, 2q] on.
MMA = "mma.sync.aligned.m16n8k32.row.col.s32.%s.s8.s32 "
_OPERANDS = MMA + "{$0,$1,$2,$3}, {$4,$5,$6,$7}, {$8,$9}, {$10,$11,$12,$13};"
mma_s8, mma_u8s8 = (_instruction(_OPERANDS % of_a, 4, (4, int32, int32, 4)) for of_a in ("s8", "u8"))
MMA = MMA % "s8"


def _registers(first, count):
    """Operands of the text, in braces."""
    return "{" + ",".join(f"${first + i}" for i in range(count)) + "}"


def mma_tile(columns, steps, stride):
    """Intrinsic f(acc, a, b): acc += 16 rows x `columns` over 32 * `steps` of K, a warp, from core matrices in shared
    memory.

    acc: a local int32 array of columns / 2, with w = 0 as in wgmma_s8. a, b: this lane's address as in load_matrix4, of
    the first two groups of 8 rows (a: matrices are rows 0, rows 8, then both 16 bytes of K further; b: columns 0, the
    same 16 bytes further, then columns 8).
    stride: bytes from one group of 8 columns to the next."""
    count = columns // 2
    text = ["{ .reg .b32 a0, a1, a2, a3, b0, b1, b2, b3;"]
    for k in range(steps):
        text.append(f"{LDMATRIX} {{a0, a1, a2, a3}}, [${2 * count} + {256 * k}];")
        for j in range(columns // 16):
            text.append(f"{LDMATRIX} {{b0, b1, b2, b3}}, [${2 * count + 1} + {256 * k + j * 2 * stride}];")
            for i in range(2):
                c = _registers(8 * j + 4 * i, 4)
                text.append(f"{MMA}{c}, {{a0, a1, a2, a3}}, {{b{2 * i}, b{2 * i + 1}}}, {c};")
    return _instruction(" ".join(text + ["}"]), void, (int32, int32), sets=count)


# --- asynchronous copies and barriers in shared memory, cc >= 8.0 -----------------------------------------------------

# f(address, source, index): 16 bytes from source[index...] (global memory, aligned) to a shared address
copy_async16 = _instruction("cp.async.cg.shared.global [$0], [$1], 16;", void, (int32, POINTER))
copy_commit = _instruction("cp.async.commit_group;", void)
copy_wait_but_one = _instruction("cp.async.wait_group 1;", void)      # all but the newest

# f(address, count): a barrier at a shared address (8 bytes) for `count` arrivals
barrier_init = _instruction("mbarrier.init.shared::cta.b64 [$0], $1;", void)
barrier_arrive = _instruction("{ .reg .b64 state; mbarrier.arrive.shared::cta.b64 state, [$0]; }", void)
# f(address, most): counts at a shared address, after `most` from 0 again; the number before
count_round = _instruction("atom.shared::cta.inc.u32 $0, [$1], $2;", effect=MEMORY)
# one arrival when the copies that this thread has started have landed
copy_arrive = _instruction("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [$0];", void)
# f(address, parity): waits until the phase of this parity is complete; barrier_wait: cc >= 9.0
_WAIT = "{ .reg .pred p; W: mbarrier.%s_wait.parity.shared::cta.b64 p, [$0], $1; @p bra D; bra W; D: }"
barrier_test = _instruction(_WAIT % "test", void)
barrier_wait = _instruction(_WAIT % "try", void)
# f(id, count): barrier 1 to 15 of `count` threads
named_barrier = _instruction("bar.sync $0, $1;", void)


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
                                function.handle, cuda.get_current_device().id)


# --- cc 9.0 only: bulk copies, warpgroup products --------------------------------------------------------------------

# between ordinary stores and wgmma (or a bulk copy) reading them
proxy_fence = _instruction("fence.proxy.async.shared::cta;", void)
barrier_fence = _instruction("fence.mbarrier_init.release.cluster;", void)
# f(address, bytes): one arrival that also awaits this many bytes of bulk copies
barrier_expect = _instruction("mbarrier.arrive.expect_tx.shared::cta.b64 _, [$0], $1;", void)
# f(address, source, index, nbytes, barrier): nbytes (a multiple of 16) from source[index...] to a shared address;
# completes on the barrier at shared address `barrier`. One thread issues it.
copy_bulk = _instruction("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [$0], [$1], $2, [$3];",
                         void, (int32, POINTER, int32, int32))
# before the first product that reads accumulators just touched
wgmma_fence = _instruction("wgmma.fence.sync.aligned;", void)


def wgmma_s8(columns):
    """Intrinsic f(acc, a_desc, b_desc, keep): wgmma.mma_async.sync.aligned.m64n{columns}k32.s32.s8.s8, cc 9.0a, one
    warpgroup, both operands K-major in shared memory. acc: a local int32 array of columns / 2, overwritten where keep
    (int32) is 0. With w = warp of the group, acc[4j], acc[4j + 1] = row 16w + g, columns 8j + 2q and + 1; acc[4j + 2],
    acc[4j + 3] = the same in row 16w + g + 8."""
    count = columns // 2
    text = (f"{{ .reg .pred p; setp.ne.s32 p, ${2 * count + 2}, 0; wgmma.mma_async.sync.aligned.m64n{columns}k32.s32."
            f"s8.s8 {_registers(0, count)}, ${2 * count}, ${2 * count + 1}, p; }}")
    return _instruction(text, void, (int64, int64, int32), VOLATILE, sets=count)


def wgmma_done(columns):
    """Intrinsic f(acc): commit the products issued and wait for them; acc may be read afterwards."""
    return _instruction("wgmma.commit_group.sync.aligned;\nwgmma.wait_group.sync.aligned 0;", void,
                        sets=columns // 2)
