"""The recurrent model (engine.cpu_gru) on CUDA, with the interface of egg_kernels.Forward and the same bits as the CPU.

A layer reads the whole window before the next begins. Then only two of its six products follow the positions one by
one; the others are plain products over all members times positions. So a layer is: a norm, W_f and W_h ("gates" and
"candidates"), the recurrence, a norm, up ("inner") and down; at the end a norm, the logits and their losses. Products
are those of kernels.transformer (Shape, product_functions): 64 rows a warpgroup, with wgmma or mma.sync.

Rows     Two members, those of a pair, share everything but the sign of their noise. With P = pair * n + position, row
         P / 8 * 16 + P % 8 is the even member's, 8 further the odd member's: what a thread holds of a tile (rows g and
         g + 8, see Fragment in kernels.transformer) has one position and one noise.
Columns  Rows of x, gates and candidates lie in the order in which threads hold them: column 32 b + 16 i + 4 q + e is
         byte 32 b + 8 q + 4 i + e. x is kept as x + 128. What is multiplied next (n, u) lies as core matrices (ptx).

Where the weights of each kernel fit shared memory, rows stay in registers (class Fused, kernels.gru_narrow).

Validation, and the states before the windows of members, are the same pass with the noise masked out, and a window
instead of a pair, whose members are the same then."""

import numpy as np
from numba import cuda, float32, int32, int64, types, uint32
from numba.cuda.cudadrv import driver

from kernels import gru_narrow
from kernels import gru_parts
from kernels import products
from kernels import ptx
from kernels import transformer
from kernels.gru_parts import (DOWN, GATES, INNER, LAYER, NORM_1, NORM_2, RECUR, norm_kernel, padded_rows, row_of,
                               source_of, stream_of)
from kernels.parts import (A32, A8, PLAN, SIGNS, aligned, blocks, byte, clip, pack_rounded, quad_sum,
                           quotient_function, unrolled, written_out)
from kernels.products import PLAIN, QUADS, ROWS, Kernel, block_sum, matrix_vector, ranges
from kernels.rules import NORMS, build_noise, device
from kernels.transformer import CLEAN_HEAD, GROUPS, THREADS, head_kernel, members_of
from model import parameters

quotient, open_gate, gated, next_state = NORMS.quotient, NORMS.gate, NORMS.gated, NORMS.next_state


# --- device functions -------------------------------------------------------------------------------------------------

def divide_function(d):
    """Device function: clip(y / d rounded down) for a constant d; a shift where d is a power of two."""
    SHIFT, RECIPROCAL = d.bit_length() - 1, float(np.float32(1) / np.float32(d))

    if d == 1 << SHIFT:
        @device
        def divide(y):
            return clip(int32(y >> int32(SHIFT)))
    else:
        @device
        def divide(y):
            return quotient(y, int32(d), float32(RECIPROCAL))
    return divide


def _registers(card, long=False):
    """Decorator of device functions with loops over registers. Every compiler leaves those with `long` bodies, as noise
    of mode 2 makes them; of the others no compiler leaves the inner ones, over d and g."""
    if long:
        return lambda function: device(written_out(function))
    return device if card.unrolls else lambda function: device(written_out(function, {"i", "j"}))


def quotient_functions(cfg, nz, inputs, lowest=-127):
    """Device functions, in this order, of a product over `inputs` whose accumulators begin with their noise:

    row(s, shift), column(n)    a signed sb and a column noise as `begin` wants them; shift: nz.shift
    begin(s, n, shift)          the accumulator before the product
    word(acc, i)                four columns from acc[i] on as bytes: the quotients, rounded down and clipped
    pairs(acc, i)               the same as two words of two int16
    """
    row, column, begun, FLOATS = transformer.begin_functions(cfg, nz, inputs)
    BASE, divided = quotient_function(parameters.divisor(cfg, inputs), gru_parts.BASE, FLOATS, lowest)

    @device
    def begin(s, n, shift):
        return begun(s, n, int32(BASE), shift)

    @device
    def word(acc, i):
        return pack_rounded(divided(acc[i]), divided(acc[i + 1]), divided(acc[i + 4]), divided(acc[i + 5]))

    @device
    def pairs(acc, i):
        return (ptx.byte_permute(divided(acc[i]), divided(acc[i + 1]), 0xD591),
                ptx.byte_permute(divided(acc[i + 4]), divided(acc[i + 5]), 0xD591))

    return row, column, begin, word, pairs


# --- products over all positions --------------------------------------------------------------------------------------

def _shapes(cfg, card):
    """{kind: Shape} of the products over all positions, with and without noise. Each has also `outputs`, its columns;
    `slots`, the pairs that the 64 rows of a warpgroup can touch; `table`, words of a pair's tables for 128 columns:
    column noise and, of "inner", the input noise of w_down."""
    H, slots, out = cfg.HIDDEN_DIM, members_of(32, cfg.SEQ_LEN), {}
    for kind in "gates", "inner", "down":
        columns, table = H, 128
        if kind == "inner":
            columns, table = 4 * H, 128 + gru_parts.input_bytes(cfg, 128, 4) // 4
        budget = card.shared - 4 * GROUPS * 2 * slots * table - 1024
        out[kind] = (transformer.full_shape(budget, 4 * H, H, 32) if kind == "down"
                     else transformer.wide_shape(budget, H, columns))
        vars(out[kind]).update(outputs=columns, slots=slots, table=table)
    return out


def _product_kernel(cfg, nz, card, cc, kind, shape, pieces):
    """A product over all positions of all pairs, divided and clipped. "gates": out, of the second
    matrix `beyond` words further, rows of H. "inner": out = u, 4 H columns, MLP_RELU: [64 rows][pieces of so many
    columns][core matrices], and its sums with the input noise of w_down. "down": from u, out = clip(out + q), rows of
    H.

    Launch [blocks] of 512 threads; a block takes every gridDim-th tile of 64 RG rows ("gates": of matrix blockIdx % 2).
    plan, 4 entries a matrix: 0 packed words, 1 seed A, 2 overlay A; "inner": 4 seed B, 5 overlay B of w_down. sb:
    [3][stride], 0 and 1 of the inputs, 2 of u."""
    H, N, RG, CG, PASSES = cfg.HIDDEN_DIM, shape.N, shape.RG, shape.CG, shape.passes
    GATES, INNER, DOWN = (kind == name for name in ("gates", "inner", "down"))
    MATRICES, COLUMNS, K = 2 if GATES else 1, shape.outputs, shape.K
    SLOTS, TABLE, ACC, PIECES = shape.slots, shape.table, N // 2, K // shape.KP
    RAGGED, MATRIX_WORDS = shape.columns() != COLUMNS, shape.columns() * K // 4
    AT_TABLES, BUFFER, SB_AT = shape.bytes // 4, SLOTS * TABLE, 2 if DOWN else 0
    open_ring, wait_rows, multiply, finish = transformer.product_functions(card, shape)
    job_shift, (noise_of, _), (fill_input, add) = (nz.shift, transformer.pair_functions(cfg, nz),
                                                   gru_parts.input_functions(cfg, nz, 128, 4))
    as_row, as_column, begin, quotients, pairs = quotient_functions(
        cfg, nz, K, 0 if INNER and cfg.MLP_RELU else -127)
    added, registers = gru_parts.added_function(cc), _registers(card, cfg.ADAPTIVE_NOISE_MODE == 2)

    @card.device
    def prepare(words, bytes_, at, c, column, unit, source, p):
        """Tables, from word `at` on, of the pairs that this warpgroup's rows touch, for column c of 128. Without a
        branch, which would make the products wait for each other."""
        col = min(column + c, COLUMNS - 1)
        for slot in range(SLOTS):
            here = at + slot * TABLE
            words[here + c] = as_column(noise_of(source, unit + slot, col, p))
            if INNER:
                fill_input(words, bytes_, 4 * (here + 128), c, source, p + 4, unit + slot, col)

    @card.device
    def begin_tile(acc, at, s0, s1, shift):
        """Accumulators before the product, from the noise of their columns at a shared address."""
        for j in range(N // 16):
            n = ptx.load_shared4(int32(at + j * 64))
            for k in range(4):
                i = 8 * j + (k >> 1) * 4 + (k & 1)
                acc[i], acc[i + 2] = begin(s0, n[k], shift), begin(s1, n[k], shift)

    @card.device
    def store_rows(acc, out, to, col, q):
        """32 columns a time of both rows, in the order of the threads."""
        for j in range(N // 32):
            if not RAGGED or col + 32 * j < COLUMNS:
                for half in range(2):
                    at, i = to + half * (2 * H) + (col + 32 * j) // 4 + q * 2, 16 * j + 2 * half
                    if DOWN:
                        old = ptx.load2(out, at)
                        (y, z), (v, w) = pairs(acc, i), pairs(acc, i + 8)
                        ptx.store2(out, at, added(old[0], y, z), added(old[1], v, w))
                    else:
                        ptx.store2(out, at, quotients(acc, i), quotients(acc, i + 8))

    @registers
    def store_inner(acc, out, row, col, q, at_noise, sums):
        """Both rows as core matrices of `pieces` columns; sums + what they add to sb."""
        to = (row >> 6) * (64 * H) + ((row >> 3) & 7) * (2 * pieces) + (row & 7) * 4 + q
        for j in range(N // 16):
            if not RAGGED or col + 16 * j < COLUMNS:
                c = col + 16 * j
                for d in range(2):
                    word = quotients(acc, 8 * j + 2 * d)
                    out[to + d * (2 * pieces) + c // pieces * (16 * pieces) + c % pieces // 16 * 32] = word
                    sums[d] = add(word, at_noise, j, q, sums[d])

    @cuda.jit(launch_bounds=THREADS)
    @card.written
    def product(call, at, plan, weights, packed, overlay, job, offset, units, n, stride, x, sb, out, beyond):
        places = units * n
        words, bytes_ = cuda.shared.array(0, int32, 128), cuda.shared.array(0, types.int8, 128)
        which, begun, every = cuda.blockIdx.x % MATRICES, cuda.blockIdx.x // MATRICES, cuda.gridDim.x // MATRICES
        p, at, tiles = call * PLAN + which * 4, at + which * MATRIX_WORDS, (2 * places - 1) // (64 * RG) + 1
        count = (tiles - 1 - begun) // every + 1 if begun < tiles else 0
        ring = open_ring(count * (PASSES * PIECES), begun, every, x, packed, at)
        t, base = ring.t, ring.base
        group, lane, c = t >> 7, t & 31, t & 127
        q, side, rg = lane & 3, group % CG, group // CG
        source = source_of(plan, weights, overlay, job, offset)
        tables, shift = AT_TABLES + group * (2 * BUFFER), job_shift(job)
        acc, sums = cuda.local.array(ACC, int32), cuda.local.array(2, int32)
        for i in range(ACC):
            acc[i] = 0
        step, odd, unit = 0, 0, int32(uint32((begun * RG + rg) * 32) // uint32(n))
        prepare(words, bytes_, tables, c, side * N, unit, source, p)
        ptx.named_barrier(1 + group, 128)
        for turn in range(count):
            tile = begun + turn * every
            row = (tile * RG + rg) * 64 + (c >> 5) * 16 + (lane >> 2)
            place = (row >> 4) * 8 + (lane >> 2)
            unit = int32(uint32((tile * RG + rg) * 32) // uint32(n))
            # where windows are shorter than SEQ_LEN there is no noise: all tables are the same
            slot = min(int32(int32(uint32(place) // uint32(n)) - unit), int32(SLOTS - 1))
            s0 = as_row(sb[(SB_AT + which) * stride + row], shift)
            s1 = as_row(int32(-sb[(SB_AT + which) * stride + row + 8]), shift)
            sums[0], sums[1] = 0, 0
            wait_rows(ring, turn)
            for ahead in range(PASSES):
                here = tables + odd * BUFFER + slot * TABLE
                begin_tile(acc, int32(base + 4 * here + q * 16), s0, s1, shift)
                step = multiply(acc, ring, step)
                last = ahead == PASSES - 1                   # while the tensor cores work: the tables of the next pass
                coming = int32(uint32(((tile + every) * RG + rg) * 32) // uint32(n)) if last else unit
                prepare(words, bytes_, tables + (1 - odd) * BUFFER, c, ((0 if last else ahead + 1) * CG + side) * N,
                        coming, source, p)
                ptx.named_barrier(1 + group, 128)
                step = finish(acc, ring, step, last, turn + 1 < count, turn, tile + every)
                col = (ahead * CG + side) * N
                if ptx.keep_in_loop(int32(place)) < places:  # the branch stays out of the loop of products
                    if INNER:
                        store_inner(acc, out, int64(row), col, q, int32(base + 4 * here + 512), sums)
                    else:
                        store_rows(acc, out, int64(row) * (H // 4) + which * beyond, col, q)
                odd = 1 - odd
                if INNER:
                    ptx.named_barrier(1 + group, 128)        # the tables just read are the next to be overwritten
            if INNER:
                for half in range(2):
                    total = quad_sum(sums[half])
                    if q == 0 and place < places:
                        cuda.atomic.add(sb, 2 * stride + row + 8 * half, total)

    return product, 4 * (AT_TABLES + GROUPS * 2 * BUFFER)


# --- the recurrence ---------------------------------------------------------------------------------------------------

def _recurrence(cfg, card):
    """(Shape, rows of a block, whether its tables stay in shared memory) of the recurrence. Those of noise mode 2 are
    too large for that."""
    H = cfg.HIDDEN_DIM
    passes = 1 if H <= 512 else blocks(H, 256)               # of a matrix; few registers hold what a pass leaves
    N = blocks(H, 128 * passes) * 32
    ways = []
    for rows in 64, 32:
        for resident in (False,) if cfg.ADAPTIVE_NOISE_MODE == 2 else (True, False):
            states = 2 * rows * H
            budget = card.shared - 2816 - states - (N * passes * 1024 if resident else 0)
            for rank, shape in transformer._shapes(budget + 64 * H, H, GROUPS, N, 2 * passes, True):
                if not shape.stream:
                    shape.at_ring, shape.bytes = states, shape.bytes - 64 * H + states
                    ways.append((rank, shape, rows, resident))
    rank = min(way[0] for way in ways)
    rows, resident = next(way[2:] for way in ways if way[0] == rank)
    best = max((way[1] for way in ways if way[0] == rank and way[2:] == (rows, resident)), key=lambda s: s.KP)
    return best, rows, resident


def _tables(cfg):
    """Tables of 16 bytes that a thread of the recurrence has for 16 columns."""
    return 4 if cfg.ADAPTIVE_NOISE_MODE == 2 else 2


def _recur_kernel(cfg, nz, card, cc):
    """One layer's state through n positions, some pairs a block: x = clip(x + h) in place. Launch [blocks] of 512
    threads. A warp has eight pairs, a warpgroup N columns of each of its passes; what a thread needs of its columns it
    finds in `own`, 16 bytes [matrix][16 columns][thread]: column noise, biases of both members, input noise of the
    other matrix. In noise mode 2, where a factor is a hash and a root, the scaled column noise of both matrices
    follows.

    call: the layer's first row of the plan; that of the recurrence: 0 b_f, 4 b_h (vector_function); 8, 13: packed
    words, seed A, overlay A, seed B, overlay B of U_f and U_h. at: packed word of U_f; U_h follows. Position p of pair
    i is tokens[i * width + skip + p]. states words of int8 [pairs, H]: where `begin`, pairs begin with them; where
    `keep`, states go there in the end."""
    H, MODE, BULK = cfg.HIDDEN_DIM, cfg.ADAPTIVE_NOISE_MODE, card.wgmma
    shape, ROWS, RESIDENT = _recurrence(cfg, card)
    N, PER, PIECES = shape.N, shape.passes // 2, H // shape.KP
    KS, ACC, PAST, RAGGED = N // 16, N // 2, ROWS * H // (8 * shape.KP), GROUPS * N * PER != H
    ALL, AT_PAST, AT_OWN, SCALED = KS * PER, ROWS * H, shape.bytes, MODE == 2
    TABLES = _tables(cfg)
    OWN, WORDS, SUMS = ALL * THREADS * 16, 2 * ALL, 2 * 64 * GROUPS
    open_ring, _, multiply, finish = transformer.product_functions(card, shape, matrices=2, own_rows=True)
    noise, scaled, (_, vector) = nz.noise, nz.scaled, transformer.pair_functions(cfg, nz)
    factor, input_coefficient, input_term, job_shift = nz.factor, nz.input_coefficient, nz.input_term, nz.shift
    as_row, as_column, begin_acc, _, pairs = quotient_functions(cfg, nz, H)
    gated2, next2, opened, candidates_of = gru_parts.state_functions(cc)
    added, registers = gru_parts.added_function(cc), _registers(card)

    @device
    def place_of(base, which, k, t):
        if RESIDENT:
            return int32(base + AT_OWN + (which * ALL + k) * (THREADS * 16) + t * 16)
        return ((int64(cuda.blockIdx.x) * TABLES + which) * ALL + k) * (THREADS * 4) + t * 4

    @device
    def load_own(base, own, which, k, t):
        at = place_of(base, which, k, t)
        return ptx.load_shared4(at) if RESIDENT else ptx.load4(own, at)

    @device
    def store_own(base, own, which, k, t, a, b, c, d):
        if RESIDENT:
            ptx.store_shared4(place_of(base, which, k, t), a, b, c, d)
        else:
            ptx.store4(own, place_of(base, which, k, t), a, b, c, d)

    @device
    def column_of(k, t):
        """First column of the thread's 16 columns k."""
        return (k // KS) * (GROUPS * N) + (t >> 7) * N + (k % KS) * 16 + (t & 3) * 4

    @device
    def make_own(source, p, pair, which, k, t):
        """The four words of 16 columns."""
        a, b = stream_of(source, p + 9 + 5 * which, pair), stream_of(source, p + 16 - 5 * which, pair)
        column = min(column_of(k, t), H - 4)
        w0, w1, w2, w3 = int32(0), int32(0), int32(0), int32(0)
        for e in range(4):
            even, odd = vector(source, p + 4 * which, pair, column + e)
            more, shift = int32(127 * (1 - which)), int32(8 * e)     # b_f + 127, without a sign
            n = int32(noise(a, column + e) & int32(source.job[2]))
            w0 = int32(w0 | int32(int32(n + 128) << shift))
            w1 = int32(w1 | int32(int32(int32(clip(even) + more) & int32(255)) << shift))
            w2 = int32(w2 | int32(int32(int32(clip(odd) + more) & int32(255)) << shift))
            w3 = int32(w3 | int32(int32(noise(b, column + e) & int32(255)) << shift))
        return w0, w1, w2, w3

    @device
    def column_noise(word, e, source, p, pair, column):
        """Of a column of the matrix that begins at plan[p], as begin_acc wants it."""
        if MODE == 0:
            return as_column(int32(byte(int32(word ^ int32(SIGNS)), e)))
        return as_column(scaled(byte(int32(word ^ int32(SIGNS)), e), source.overlay[source.plan[p + 2] + column + e],
                                stream_of(source, p + 1, pair), column + e))

    @device
    def add_inputs(total, word, noises, source, p, pair, column):
        """total + what four inputs of the matrix that begins at plan[p] add to sb."""
        if MODE == 0:
            return ptx.dp4a(word, noises, total)
        stream = stream_of(source, p + 3, pair)
        for e in range(4):
            entry, i = source.overlay[source.plan[p + 4] + column + e], column + e
            f = factor(entry, stream, i) if MODE == 2 else float32(0)
            total = int32(total + input_term(byte(word, e), input_coefficient(entry, stream, i), f))
        return total

    @device
    def store_sums(sums, which, row, side, s0, s1, q):
        s0, s1 = quad_sum(s0), quad_sum(s1)
        if q == 0:
            sums[(which * 64 + row) * GROUPS + side], sums[(which * 64 + row + 8) * GROUPS + side] = s0, s1

    @device
    def whole_sum(address, which, row):
        s = ptx.load_shared4(int32(address + (which * 64 + row) * (4 * GROUPS)))
        return int32(int32(s[0] + s[1]) + int32(s[2] + s[3]))

    @registers
    def product(ahead, acc, which, ring, step, s0, s1, shift, own, source, p, pair):
        """acc = the product of a pass, with its noise."""
        for j in range(KS):
            column = min(column_of(ahead * KS + j, ring.t), H - 4)
            noises = load_own(ring.base, own, which + TABLES - 2, ahead * KS + j, ring.t)
            for g in range(4):
                i = 8 * j + (g >> 1) * 4 + (g & 1)
                n = noises[g] if SCALED else column_noise(noises[0], g, source, p + 8 + 5 * which, pair, column)
                acc[i], acc[i + 2] = begin_acc(s0, n, shift), begin_acc(s1, n, shift)
        finish(acc, ring, multiply(acc, ring, step, which * PAST), False, False, 0, 0)

    @registers
    def gate(ahead, acc, f, sums, base, own, source, p, pair, t, gates, row0, at_word, works):
        """f, and the gated states of both rows to shared memory."""
        q = t & 3
        for j in range(KS // 2):
            column = column_of(ahead * KS + 2 * j, t)
            if not RAGGED or column < H:
                at_row = row0 * (H // 4) + (column - q * 4) // 4 + q * 2
                old0, old1 = ptx.load2(gates, at_row), ptx.load2(gates, at_row + 2 * H)
                for g in range(2):
                    i = 2 * j + g
                    w = load_own(base, own, 0, ahead * KS + i, t)
                    at_h = int32(at_word + (column - q * 4 + g * 16) * 8)
                    for d in range(2):
                        y, z = pairs(acc, 8 * i + 2 * d)
                        word, bias = (old0[g], w[1]) if d == 0 else (old1[g], w[2])
                        y, z = opened(y, z, word, ptx.byte_permute(bias, 0, 0x4140), ptx.byte_permute(bias, 0, 0x4342))
                        f[2 * (ahead * KS + i) + d] = ptx.bytes4(y, z)
                        past = gated2(y, z, ptx.read_shared(int32(at_h + d * (8 * H))))
                        if works:
                            ptx.store_shared(int32(at_h + AT_PAST + d * (8 * H)), past)
                        if not SCALED:
                            sums[d] = add_inputs(sums[d], past, w[3], source, p + 13, pair, column + g * 16)

    @registers
    def advance(ahead, acc, f, sums, base, own, source, p, pair, t, candidates, x, row0, at_word, works, live, keeps):
        """The new states of both rows, and x."""
        q = t & 3
        for j in range(KS // 2):
            column = column_of(ahead * KS + 2 * j, t)
            if not RAGGED or column < H:
                at_row = row0 * (H // 4) + (column - q * 4) // 4 + q * 2
                w0 = load_own(base, own, 1, ahead * KS + 2 * j, t)
                w1 = load_own(base, own, 1, ahead * KS + 2 * j + 1, t)
                for d in range(2):
                    old, both_x = ptx.load2(candidates, at_row + d * (2 * H)), ptx.load2(x, at_row + d * (2 * H))
                    out = cuda.local.array(2, int32)
                    for g in range(2):
                        i, bias, noises = 2 * j + g, w0[1] if d == 0 else w0[2], w0[3]
                        if g == 1:
                            bias, noises = w1[1] if d == 0 else w1[2], w1[3]
                        at_h = int32(at_word + (column - q * 4 + g * 16) * 8 + d * (8 * H))
                        y, z = pairs(acc, 8 * i + 2 * d)
                        y, z = candidates_of(y, z, old[g], ptx.low2(bias), ptx.high2(bias))
                        y, z = next2(f[2 * (ahead * KS + i) + d], ptx.read_shared(at_h), y, z)
                        h, out[g] = ptx.bytes4(y, z), added(both_x[g], y, z)
                        h = h if keeps else int32(0)
                        if works:
                            ptx.store_shared(at_h, h)
                        if not SCALED:
                            sums[d] = add_inputs(sums[d], h, noises, source, p + 8, pair, column + g * 16)
                    if live:
                        ptx.store2(x, at_row + d * (2 * H), out[0], out[1])

    @unrolled
    def columns(which, acc, f, sums, ring, step, s0, s1, shift, own, source, p, pair, gates, candidates, x, row0,
                at_word, works, live, keeps):
        """All passes of a matrix."""
        base, t = ring.base, ring.t
        for d in range(PER):
            product(d, acc, which, ring, step + d * PIECES, s0, s1, shift, own, source, p, pair)
            if which == 0:
                gate(d, acc, f, sums, base, own, source, p, pair, t, gates, row0, at_word, works)
            else:
                advance(d, acc, f, sums, base, own, source, p, pair, t, candidates, x, row0, at_word, works, live,
                        keeps)

    @cuda.jit(launch_bounds=THREADS)
    @card.written
    def recur(call, at, plan, weights, packed, overlay, tokens, width, skip, n, units, job, offset, gates, candidates,
              x, states, own, begin, keep):
        parts = cuda.shared.array(SUMS, int32, 128)          # [of h, of past][row][warpgroup]
        ring = open_ring(n * (2 * PER * PIECES), 0, 1, packed, packed, at)
        base, t, p = ring.base, ring.t, (call + RECUR) * PLAN
        group, lane, warp, q = t >> 7, t & 31, (t & 127) >> 5, t & 3
        row, at_parts = warp * 16 + (lane >> 2), ptx.shared_address(parts, 0)
        pair, works = cuda.blockIdx.x * (ROWS // 2) + warp * 8 + (lane >> 2), warp * 16 < ROWS
        live = int32(1) if works and pair < units else int32(0)
        pair = min(pair, units - 1)
        source, at_token = source_of(plan, weights, overlay, job, offset), int64(pair) * width + skip
        at_word = int32(base + warp * (16 * H) + (lane >> 2) * 16 + q * 4)
        acc, f, sums = cuda.local.array(ACC, int32), cuda.local.array(WORDS, int32), cuda.local.array(2, int32)
        sums[0], sums[1], shift = 0, 0, job_shift(job)
        for k in range(ALL):
            column = column_of(k, t)
            for which in range(2):
                w0, w1, w2, w3 = make_own(source, p, pair, which, k, t)
                store_own(base, own, which, k, t, w0, w1, w2, w3)
                if SCALED:
                    at_matrix, first = p + 8 + 5 * which, min(column, H - 4)
                    store_own(base, own, which + 2, k, t, column_noise(w0, 0, source, at_matrix, pair, first),
                              column_noise(w0, 1, source, at_matrix, pair, first),
                              column_noise(w0, 2, source, at_matrix, pair, first),
                              column_noise(w0, 3, source, at_matrix, pair, first))
                if which == 1 and works and (not RAGGED or column < H):
                    at_h, state = int32(at_word + (column - q * 4) * 8), int32(0)
                    if begin and tokens[at_token] != 0:
                        state = states[int64(pair) * (H // 4) + column // 4]
                    ptx.store_shared(at_h, state)
                    ptx.store_shared(int32(at_h + 8 * H), state)
                    sums[0] = add_inputs(sums[0], state, w3, source, p + 8, pair, column)
        sums[1] = sums[0]
        store_sums(parts, 0, row, group, sums[0], sums[1], q)
        if BULK:
            ptx.proxy_fence()
        cuda.syncthreads()
        for position in range(n):
            row0, writes = row_of(pair, position, n), ptx.keep_in_loop(live) != 0
            # what follows the window says nothing to its last state
            keeps = position + 1 == n or tokens[at_token + min(position + 1, n - 1)] != 0
            for which in range(2):
                s0 = as_row(whole_sum(at_parts, which, row), shift)
                s1 = as_row(int32(-whole_sum(at_parts, which, row + 8)), shift)
                sums[0], sums[1] = 0, 0
                columns(which, acc, f, sums, ring, (2 * position + which) * (PER * PIECES), s0, s1, shift, own, source,
                        p, pair, gates, candidates, x, row0, at_word, works, writes, keeps)
                if SCALED and works:                         # once, not in every pass: it is long
                    other = p + 13 - 5 * which
                    for k in range(ALL):
                        column = column_of(k, t)
                        if not RAGGED or column < H:
                            at_h = int32(at_word + (column - q * 4) * 8 + (1 - which) * AT_PAST)
                            w3 = load_own(base, own, which, k, t)[3]
                            sums[0] = add_inputs(sums[0], ptx.read_shared(at_h), w3, source, other, pair, column)
                            sums[1] = add_inputs(sums[1], ptx.read_shared(int32(at_h + 8 * H)), w3, source, other, pair,
                                                 column)
                store_sums(parts, 1 - which, row, group, sums[0], sums[1], q)
                if BULK:
                    ptx.proxy_fence()
                cuda.syncthreads()
        if keep and live != 0:
            for k in range(ALL):
                column = column_of(k, t)
                if not RAGGED or column < H:
                    states[int64(pair) * (H // 4) + column // 4] = ptx.read_shared(
                        int32(at_word + (column - q * 4) * 8))

    return recur, AT_OWN + (2 * OWN if RESIDENT else 0)


# --- one token at a time, without noise -------------------------------------------------------------------------------

def _token_kernel(cfg):
    """ln_f of the last layer's output after one more token: out int8 [H]. One block of 1024 threads; a thread is a
    channel. states int8 [L, H] go on."""
    H, L, LOWEST = cfg.HIDDEN_DIM, cfg.N_LAYERS, 0 if cfg.MLP_RELU else -127
    from_h, from_4h = matrix_vector(H), matrix_vector(4 * H)
    divide, divide_down = divide_function(parameters.divisor(cfg, H)), divide_function(parameters.divisor(cfg, 4 * H))
    H4 = 4 * H

    @device
    def normed(x, weights, at, part, t):
        """Entry t of ln(x), x the thread's own channel."""
        mean = int32(max(block_sum(int32(abs(x)), part, t) // int32(H), 1))
        if t >= H:
            return int32(0)
        return quotient(int32(x * int32(weights[at + t])), mean, float32(float32(1) / float32(mean)))

    @cuda.jit(launch_bounds=1024)
    def token(plan, weights, packed, tokens, at, states, out):
        # three vectors of H bytes, or one of 4 H after one
        words, vector = cuda.shared.array(0, int32), cuda.shared.array(0, types.int8)
        y = cuda.shared.array(H4, int32)
        part = cuda.shared.array(32, int32)
        t, id_ = cuda.threadIdx.x, tokens[at[0]]
        x = int32(0)
        if t < H:
            x = byte(packed[plan[0] + (id_ >> 3) * (2 * H) + (t >> 4) * 32 + (id_ & 7) * 4
                            + ((t >> 2) & 3)], t & 3)
        for layer in range(L):
            first = 1 + layer * LAYER
            gates, recur, inner = (first + GATES) * PLAN, (first + RECUR) * PLAN, (first + INNER) * PLAN
            n, h = normed(x, weights, plan[(first + NORM_1) * PLAN], part, t), int32(0)
            if t < H:
                if at[0] > 0 and id_ != 0:
                    h = int32(states[layer * H + t])
                vector[t], vector[H + t] = n, h
            cuda.syncthreads()
            from_h(words, 0, packed, plan[gates], H, y, 0, t)
            from_h(words, 0, packed, plan[gates + 4], H, y, H, t)
            from_h(words, H // 4, packed, plan[recur + 8], H, y, 2 * H, t)
            cuda.syncthreads()
            f, c = int32(0), int32(0)
            if t < H:
                f = open_gate(int32(divide(y[t]) + divide(y[2 * H + t])), int32(weights[plan[recur] + t]))
                c = divide(y[H + t])
                vector[2 * H + t] = gated(f, h)
            cuda.syncthreads()
            from_h(words, H // 2, packed, plan[recur + 13], H, y, 0, t)
            cuda.syncthreads()
            if t < H:
                c = clip(int32(int32(c + divide(y[t])) + int32(weights[plan[recur + 4] + t])))
                h = next_state(f, h, c)
                states[layer * H + t] = h
                x = clip(int32(x + h))
            n = normed(x, weights, plan[(first + NORM_2) * PLAN], part, t)
            if t < H:
                vector[t] = n
            cuda.syncthreads()
            from_h(words, 0, packed, plan[inner], H4, y, 0, t)
            cuda.syncthreads()
            for i in range(t, H4, 1024):
                vector[H + i] = int32(max(divide(y[i]), int32(LOWEST)))
            cuda.syncthreads()
            from_4h(words, H // 4, packed, plan[(first + DOWN) * PLAN], H, y, 0, t)
            cuda.syncthreads()
            if t < H:
                x = clip(int32(x + divide_down(y[t])))
        n = normed(x, weights, plan[(1 + L * LAYER) * PLAN], part, t)
        if t < H:
            out[t] = n

    return token


# --- the forward pass -------------------------------------------------------------------------------------------------

class _Plan(products.Plan):
    """The calls of a forward pass, in the order that kernels.gru_parts names."""

    def __init__(self, cfg, packing):
        super().__init__(cfg, packing)
        e = self._tensors["embedding", 0]
        self._add([packing.at["embedding", 0] // 4, e.seed_a, e.seed_b, e.overlay_a, e.overlay_b])
        for i in range(cfg.N_LAYERS):
            self._add(self._normed("ln_1", i, "w_f", "w_h"))
            self._add(self._matrix("w_f", i) + [0] + self._matrix("w_h", i))
            self._add(self._vector("b_f", i) + self._vector("b_h", i) + self._matrix("u_f", i) + self._input("u_f", i)
                      + self._matrix("u_h", i) + self._input("u_h", i))
            self._add(self._normed("ln_2", i, "w_up"))
            self._add(self._matrix("w_up", i) + [0] + self._input("w_down", i))
            self._add(self._matrix("w_down", i))
        self._add(self._normed("ln_f", 0, "head"))
        self._add(self._matrix("head", 0))

    def _normed(self, ln, layer, *streams):
        return sum((self._input(name, layer) for name in streams), self._vector(ln, layer))


class _Pass(products.Pass):
    """A pass over pairs or, without noise, windows. layout(units, n)[-1]: bytes of scratch memory for so many of n
    positions; layer(given, call, i) enqueues layer i, whose rows of the plan begin at `call`."""

    def __init__(self, cfg, packing):
        super().__init__(cfg)
        self.rows_at = packing.add(gru_parts.tensor(cfg, "embedding"), ROWS, cfg.VOCAB_SIZE, cfg.HIDDEN_DIM)

    def add_heads(self, nz, cc, card, packing, own_head=None):
        """What follows the layers: the last norm and the head of kernels.transformer, for validation with the packing
        for look-ups; for members own_head, if there is one, instead."""
        cfg, t, layers = self.cfg, gru_parts.tensor(self.cfg, "head"), list(self.kernels)
        self.norm_f = Kernel(norm_kernel(cfg, nz, cc, 1))
        self.clean_head = Kernel(head_kernel(cfg, build_noise(cfg, True), card, True), **CLEAN_HEAD)
        self.clean_kernels = [*layers, self.norm_f, self.clean_head]
        self.own_head, self.heads = own_head, [self.clean_head]
        if own_head:
            self.kernels.append(own_head)
            self.at_head = packing.add(t, QUADS, t.cols, t.rows)
        else:
            self.kernels.append(self.norm_f)
            self.heads.insert(0, self.add(head_kernel(cfg, nz, card)))
        self.at_tiles = [packing.add(t, PLAIN, head.shape.columns(), head.shape.KP) for head in self.heads]
        self.at_columns = packing.add(t, ROWS, t.cols, t.rows)

    def launch(self, tables, units, scratch, clean=False, **given):
        """Enqueues it. given: arguments of kernels by name, among them `n` positions from `skip` on of rows of `width`
        tokens, losses (None: no head), states int8 [L, units, H], and begin, keep (_recur_kernel). clean: without
        noise, which the job masks out, losses float64 [units, n]."""
        cfg, n = self.cfg, given["n"]
        given = self.arguments(given, tables, self.layout(units, n)[0], scratch, units=units, count=units,
                               stride=padded_rows(units * n), rows_at=self.rows_at)
        states = given["states"].view(np.int32) if given["begin"] or given["keep"] else given["plan"]
        size = states.size // cfg.N_LAYERS if states is not given["plan"] else 0
        for i in range(cfg.N_LAYERS):
            self.layer(given | dict(states=states[i * size:(i + 1) * size] if size else states), 1 + i * LAYER, i)
        if given["losses"] is not None:
            self.score(tables, given, 1 + cfg.N_LAYERS * LAYER, clean)

    def score(self, tables, given, call, clean):
        """Norm and head. Nobody needs gates and candidates any more: the rows of ln_f and their sums lie there."""
        units, n = given["units"], given["n"]
        if self.own_head and not clean:
            self.own_head(*self.grid("head", units), given, call=call, at=self.at_head)
            return
        which, normed, sb = -1 if clean else 0, given["gates"], given["candidates"]
        self.norm_f((units, blocks(n, 64)), 256, given, call=call, out=normed, sb=sb)
        if not clean:                                        # the head adds to them
            driver.device_memset(given["losses"], 0, given["losses"].nbytes, given["stream"])
        head = self.heads[which]
        head(blocks(units * n, 32 * head.shape.RG), THREADS, given, call=call + 1, x=normed, sb=sb, length=n,
             windows=given["tokens"], exps=tables.clean_exps if clean else tables.exps,
             at_tiles=self.at_tiles[which], at_columns=self.at_columns)


class Rows(_Pass):
    """The pass for every width."""

    def __init__(self, cfg, cc, card, packing, silent):
        super().__init__(cfg, packing)
        nz, add, L = build_noise(cfg, silent), self.add, cfg.N_LAYERS
        self.shapes, (shape, self.state_rows, self.resident) = _shapes(cfg, card), _recurrence(cfg, card)
        self.own_bytes = shape.columns() * 64 * _tables(cfg)             # 16 a thread, table and 16 columns
        self.norms_1 = [add(norm_kernel(cfg, nz, cc, 2, embeds)) for embeds in (True, False)[:L]]
        self.products = {kind: add(_product_kernel(cfg, nz, card, cc, kind, of, self.shapes["down"].KP))
                         for kind, of in self.shapes.items()}
        self.recur, self.at = add(_recur_kernel(cfg, nz, card, cc)), {}
        of = dict(w_up=self.shapes["inner"], w_down=self.shapes["down"], w_f=self.shapes["gates"],
                  w_h=self.shapes["gates"])
        for t in gru_parts.matrices(cfg):
            columns, width = ((of[t.name].columns(), of[t.name].KP) if t.name in of
                              else (shape.columns() // 2, shape.KP))
            self.at[t.name, t.layer] = packing.add(t, QUADS, columns, width)
        self.add_heads(nz, cc, card, packing)

    def layout(self, units, n):
        """({name: (first byte, end)} of the scratch arrays, bytes of all). The inner values of the MLP take the place
        of gates and candidates."""
        rows = padded_rows(units * n)
        size, tables = rows * self.cfg.HIDDEN_DIM, blocks(units, self.state_rows // 2) * self.own_bytes
        out, end = ranges(dict(x=size, gates=size, candidates=size, more=2 * size, normed=size, sb=12 * rows,
                               own=4 if self.resident else tables))
        return out | dict(u=(out["gates"][0], out["more"][1])), end

    def layer(self, given, call, i):
        units, n, normed = given["units"], given["n"], given["normed"]
        processors = cuda.get_current_device().MULTIPROCESSOR_COUNT

        def norm(kernel, row):
            kernel((units, blocks(n, 64)), 256, given, call=call + row, out=normed)

        def product(kind, row, name, x, out):
            matrices, tiles = 1 + (kind == "gates"), blocks(2 * units * n, 64 * self.shapes[kind].RG)
            self.products[kind](min(tiles, processors // matrices) * matrices, THREADS, given, call=call + row,
                                at=self.at[name, i], x=x, out=out, beyond=given["gates"].size)

        norm(self.norms_1[min(i, 1)], NORM_1)
        product("gates", GATES, "w_f", normed, given["u"])
        self.recur(blocks(units, self.state_rows // 2), THREADS, given, call=call, at=self.at["u_f", i])
        norm(self.norm_f, NORM_2)
        product("inner", INNER, "w_up", normed, given["u"])
        product("down", DOWN, "w_down", given["u"], given["x"])


class Fused(_Pass):
    """The pass whose activations stay in registers from a norm to the end of its products: all of kernels.gru_narrow,
    or with wgmma its MLP for that and the general recurrence."""

    def __init__(self, cfg, cc, card, packing, silent, wgmma):
        super().__init__(cfg, packing)
        depth = 128 if wgmma else 32                         # inputs of a piece of w_down
        self.at = {(t.name, t.layer): packing.add(t, QUADS, t.cols, depth if t.name == "w_down" else t.rows)
                   for t in gru_parts.matrices(cfg)}
        nz, sizes, add = build_noise(cfg, silent), gru_narrow.sizes(cfg, card.shared, wgmma), self.add
        self.wgmma, self.sizes = wgmma, sizes
        self.gates = [add(gru_narrow.gates_kernel(cfg, nz, cc, sizes["gates"], first))
                      for first in (True, False)[:cfg.N_LAYERS]]
        if wgmma:
            self.recur, self.mlp = add(_recur_kernel(cfg, nz, card, cc)), add(gru_narrow.wgmma_mlp_kernel(cfg, nz))
            self.state_rows = _recurrence(cfg, card)[1]
        else:
            self.recur = add(gru_narrow.recur_kernel(cfg, nz, cc, sizes["recur"]))
            self.mlp = add(gru_narrow.mlp_kernel(cfg, nz, cc, sizes["mlp"]))
        own_head = Kernel(gru_narrow.head_kernel(cfg, nz, cc, sizes["head"])) if "head" in sizes else None
        self.add_heads(nz, cc, card, packing, own_head)

    def layout(self, units, n):
        """({name: (first byte, end)} of the scratch arrays, bytes of all)."""
        size = padded_rows(units * n) * self.cfg.HIDDEN_DIM
        return ranges(dict(x=size, gates=size, candidates=size, own=4))

    def grid(self, name, work):
        """(blocks, threads) of a kernel whose warps share out so much work."""
        warps = self.sizes[name].warps
        return min(cuda.get_current_device().MULTIPROCESSOR_COUNT, blocks(work, warps)), 32 * warps

    def layer(self, given, call, i):
        units = given["units"]
        given = given | dict(call=call)
        if self.wgmma:
            tiles, groups = blocks(units * 2 * given["n"], gru_narrow.TILE), gru_narrow.GROUPS
            each = blocks(tiles, groups * cuda.get_current_device().MULTIPROCESSOR_COUNT)
            given |= dict(tiles=tiles, each=each)
            recur, mlp = (blocks(units, self.state_rows // 2), THREADS), (blocks(tiles, groups * each), 128 * groups)
        else:
            recur, mlp = self.grid("recur", blocks(units, 8)), self.grid("mlp", units)
        self.gates[min(i, 1)](*self.grid("gates", units), given, at=self.at["w_f", i])
        self.recur(*recur, given, at=self.at["u_f", i])
        self.mlp(*mlp, given, at=self.at["w_up", i])


class Forward(products.Forward):
    """What the CUDA engine uses: see the top of egg_kernels."""

    def __init__(self, cfg, cc, shared_limit, silent=False):
        token = Kernel((_token_kernel(cfg), 5 * cfg.HIDDEN_DIM), at=A32, states=A8, out=A8)
        super().__init__(cfg, cc, token, divide_function(parameters.divisor(cfg, cfg.HIDDEN_DIM)), "head")
        self._plan = _Plan(cfg, self._packing)
        card = transformer.Card(tuple(cc) == (9, 0) and cfg.TENSOR_CORES != "mma", shared_limit, cc[0] < 10)
        wgmma = gru_narrow.wgmma_fits(cfg, cc, shared_limit)
        if wgmma or gru_narrow.fits(cfg, shared_limit):
            self._noisy = Fused(cfg, cc, card, self._packing, silent, wgmma)
        else:
            self._noisy = Rows(cfg, cc, card, self._packing, silent)
        self._serve()

    def _parts(self, pairs):
        """Bytes of the states with which pairs begin, and of the scratch of both passes."""
        cfg = self.cfg
        return (aligned(pairs * cfg.N_LAYERS * cfg.HIDDEN_DIM) if cfg.STATE_TOKENS else 0,
                max(self._noisy.layout(pairs, n)[-1] for n in (cfg.SEQ_LEN, cfg.STATE_TOKENS)))

    def scratch_bytes(self, pairs):
        return sum(self._parts(pairs)) if pairs else 0

    def clean_scratch_bytes(self, windows, length):
        return self._noisy.layout(windows, length)[-1] if windows else 0

    def evaluate(self, stream, weights, packed, overlay, windows, job, offset, pairs, scratch, losses):
        cfg, tables, end = self.cfg, self._tables, self._parts(pairs)[0]
        before, states, work = cfg.STATE_TOKENS, scratch[:pairs * cfg.N_LAYERS * cfg.HIDDEN_DIM], scratch[end:]
        given = dict(stream=stream, weights=weights, packed=packed, overlay=overlay, tokens=windows, width=cfg.WINDOW,
                     states=states)
        if before:
            self._noisy.launch(tables, pairs, work, True, **given, job=tables.no_job, offset=0, skip=0, n=before,
                               begin=0, keep=1, losses=None)
        self._noisy.launch(tables, pairs, work, **given, job=job, offset=offset, skip=before, n=cfg.SEQ_LEN,
                           begin=int(before > 0), keep=0, losses=losses)

    def validate(self, stream, weights, packed, windows, count, length, scratch, nats):
        self._noisy.launch(self._tables, count, scratch, True, stream=stream, weights=weights, packed=packed,
                           overlay=weights, job=self._tables.no_job, offset=0, tokens=windows,
                           width=length + 1, skip=0, n=length, begin=0, keep=0, losses=nats)

    def cache_bytes(self, positions):
        return self.cfg.N_LAYERS * self.cfg.HIDDEN_DIM

    def _cache(self, cache, positions):
        return dict(states=cache)
