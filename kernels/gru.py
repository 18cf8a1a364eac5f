"""The recurrent model (engine.cpu_gru) on CUDA, with the interface of egg_kernels.Forward and the same bits as the CPU.

A layer reads the whole window before the next begins. Then only two of its six products follow the positions one by
one; the others are plain products over all members times positions. So a layer is: a norm, W_f and W_h ("gates" and
"candidates"), the recurrence, a norm, up ("inner") and down; at the end a norm, the logits and their losses. Products
are those of kernels.transformer (Shape, product_functions): 64 rows a warpgroup, with wgmma or mma.sync.

Rows     Two members share everything but the sign of their noise: those of a pair, or, without noise, two windows. With
         P = pair * n + position, row P / 8 * 16 + P % 8 is the even member's, 8 further the odd member's: what a thread
         holds of a tile (rows g and g + 8, see Fragment in kernels.transformer) has one position and one noise.
Columns  Rows of x, gates and candidates lie in the order in which threads hold them: column 32 b + 16 i + 4 q + e is
         byte 32 b + 8 q + 4 i + e. x is kept as x + 128. What is multiplied next (n, u) lies as core matrices (ptx).

Where rows fit registers, the noisy pass keeps them there (class Fused, kernels.gru_narrow, kernels.gru_hopper)."""

from types import SimpleNamespace

import numpy as np
from numba import cuda, float32, int32, int64, types, uint32

from kernels import gru_hopper
from kernels import gru_narrow
from kernels import gru_parts
from kernels import products
from kernels import ptx
from kernels import transformer
from kernels.gru_parts import padded_rows, row_of
from kernels.parts import (A32, A64, A8, AF64, PLAN, SIGNS, aligned, blocks, byte, clip, pack4, pack_rounded, quad_sum,
                           quotient_function, unrolled, vector_function, written_out)
from kernels.products import QUADS, ROWS, Kernel, block_sum, matrix_vector, ranges
from kernels.rules import NORMS, build_noise, device
from kernels.transformer import GROUPS, THREADS, members_of
from model import parameters

# bytes of activations that pass from a product to the next; the pass is cut into slices of so many
SLICE = 1 << 28

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
    BASE, divided = quotient_function(parameters.divisor(cfg, inputs), gru_parts.BASE, FLOATS or nz.silent, lowest)

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


# --- embedding and norm -----------------------------------------------------------------------------------------------

def _gather_kernel():
    """The tokens from which the state of every group is made. Launch blocks of 256 over streams * n; stream g is the
    g-th group that the pairs from job[1] + offset on belong to (the last ones may repeat a pair)."""
    @cuda.jit(launch_bounds=256)
    def gather(windows, width, n, pairs, per_group, streams, job, offset, tokens):
        i = cuda.grid(1)
        if i < streams * n:
            stream, first = i // n, (int64(job[1]) + offset) % per_group
            pair = min(max(stream * per_group - first, 0), pairs - 1)
            tokens[i] = windows[pair * width + i - stream * n]
    return gather


def _embed_kernel(cfg, nz, clean):
    """x = the embedding. Launch [units, ceil(n / 64)], 256 threads; four lanes have both members at a position.

    plan: 0 packed, 1 and 2 seeds, 3 and 4 overlays of the token's and of the hidden side. Position p of window i is
    tokens[i * width + skip + p]. clean: a unit is two windows, else a pair."""
    H, MODE, SILENT = cfg.HIDDEN_DIM, cfg.ADAPTIVE_NOISE_MODE, nz.silent
    noise, factor, job_shift, WORDS = nz.noise, nz.factor, nz.shift, 2 * H if MODE else H

    @device
    def disturbed(v, other, f, own, own_factor, sign, shift):
        """An element v of the embedding with its noise."""
        d = int32(own * other)
        if MODE:
            d = ptx.trunc_f32(float32(float32(float32(d) * own_factor) * ptx.bits_float(f)))
        return clip(int32(v + int32(int32(d * sign) >> shift)))

    @device
    def four(word, at, own, own_factor, sign, shift):
        """A word of x; the noise of its columns is at a shared address."""
        if SILENT:
            return int32(word ^ int32(SIGNS))
        n = ptx.load_shared4(int32(at))
        f = ptx.load_shared4(int32(at + 4 * H)) if MODE else n
        a = disturbed(byte(word, 0), n[0], f[0], own, own_factor, sign, shift)
        b = disturbed(byte(word, 1), n[1], f[1], own, own_factor, sign, shift)
        c = disturbed(byte(word, 2), n[2], f[2], own, own_factor, sign, shift)
        d = disturbed(byte(word, 3), n[3], f[3], own, own_factor, sign, shift)
        return int32(pack4(a, b, c, d) ^ int32(SIGNS))

    @cuda.jit(launch_bounds=256)
    def embed(call, plan, packed, overlay, tokens, width, skip, n, count, job, offset, x, losses):
        noises = cuda.shared.array(WORDS, int32, 16)         # and factors
        t, unit, p = cuda.threadIdx.x, cuda.blockIdx.x, call * PLAN
        position, q, base = cuda.blockIdx.y * 64 + (t >> 2), t & 3, ptx.shared_address(noises, 0)
        shift = job_shift(job)
        seed = uint32(uint32(job[0] + job[1]) + uint32(offset + unit))
        if not SILENT:
            stream = uint32(seed + uint32(plan[p + 2]))
            for i in range(t, H, 256):
                noises[i] = noise(stream, i)
                if MODE:
                    noises[H + i] = ptx.float_bits(factor(overlay[plan[p + 4] + i], stream, i))
        if not clean and cuda.blockIdx.y == 0 and t < 2:
            losses[2 * unit + t] = 0
        cuda.syncthreads()
        if position < n:
            row, window = row_of(unit, position, n) * (H // 4) + q * 2, 2 * unit if clean else unit
            token = tokens[window * width + skip + position]
            own, own_factor = int32(0), float32(0)
            if not SILENT:
                stream = uint32(seed + uint32(plan[p + 1]))
                own, own_factor = noise(stream, token), factor(overlay[plan[p + 3] + token], stream, token)
            at = plan[p] + int64(token >> 3) * (2 * H) + (token & 7) * 4 + q
            at_odd = at
            if clean:
                token = tokens[min(window + 1, count - 1) * width + skip + position]
                at_odd = plan[p] + int64(token >> 3) * (2 * H) + (token & 7) * 4 + q
            for b in range(H // 32):
                at_n = base + b * 128 + q * 16
                ptx.store2(x, row + b * 8, four(packed[at + b * 64], at_n, own, own_factor, int32(1), shift),
                           four(packed[at + b * 64 + 32], at_n + 64, own, own_factor, int32(1), shift))
                ptx.store2(x, row + 2 * H + b * 8,
                           four(packed[at_odd + b * 64], at_n, own, own_factor, int32(-1), shift),
                           four(packed[at_odd + b * 64 + 32], at_n + 64, own, own_factor, int32(-1), shift))

    return embed


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
    """A product over all positions of some pairs from `first` on, divided and clipped. "gates": out, of the second
    matrix `beyond` words further, rows of H. "inner": out = u, 4 H columns, MLP_RELU: [64 rows][pieces of so many
    columns][core matrices], and its sums with the input noise of w_down. "down": from u, out = clip(out + q), rows of
    H.

    Launch [blocks] of 512 threads; a block takes every gridDim-th tile of 64 RG rows ("gates": of matrix blockIdx % 2).
    plan, 4 entries a matrix: 0 packed words, 1 seed A, 2 overlay A; call_sums: 0 seed B, 1 overlay B of w_down. sb:
    [3][stride], 0 and 1 of the inputs, 2 of u. places: pairs times positions."""
    H, N, RG, CG, PASSES = cfg.HIDDEN_DIM, shape.N, shape.RG, shape.CG, shape.passes
    GATES, INNER, DOWN = (kind == name for name in ("gates", "inner", "down"))
    MATRICES, COLUMNS, K = 2 if GATES else 1, shape.outputs, shape.K
    SLOTS, TABLE, SILENT, ACC, PIECES = shape.slots, shape.table, nz.silent, N // 2, K // shape.KP
    RAGGED, MATRIX_WORDS = shape.columns() != COLUMNS, shape.columns() * K // 4
    AT_TABLES, BUFFER, SB_AT = shape.bytes // 4, SLOTS * TABLE, 2 if DOWN else 0
    open_ring, wait_rows, multiply, finish = transformer.product_functions(card, shape)
    noise, scaled, job_shift = nz.noise, nz.scaled, nz.shift
    fill_input, add = gru_parts.input_functions(cfg, nz, 128, 4)
    as_row, as_column, begin, quotients, pairs = quotient_functions(
        cfg, nz, K, 0 if INNER and cfg.MLP_RELU else -127)
    added, registers = gru_parts.added_function(cc), _registers(card, cfg.ADAPTIVE_NOISE_MODE == 2)

    @card.device
    def prepare(words, bytes_, at, c, column, unit, call_sums, plan, p, overlay, seed):
        """Tables, from word `at` on, of the pairs that this warpgroup's rows touch, for column c of 128. Without a
        branch, which would make the products wait for each other."""
        col = min(column + c, COLUMNS - 1)
        for slot in range(SLOTS):
            mine, here = uint32(seed + uint32(unit + slot)), at + slot * TABLE
            stream = uint32(mine + uint32(plan[p + 1]))
            words[here + c] = as_column(scaled(noise(stream, col), overlay[plan[p + 2] + col], stream, col))
            if INNER:
                fill_input(words, bytes_, 4 * (here + 128), c, overlay, plan[call_sums + 1],
                           gru_parts.stream_of(plan, call_sums, mine), col)

    @card.device
    def begin_tile(acc, at, s0, s1, shift):
        """Accumulators before the product, from the noise of their columns at a shared address."""
        for j in range(N // 16):
            if SILENT:
                n = (int32(0), int32(0), int32(0), int32(0))
            else:
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
                    if not SILENT:
                        sums[d] = add(word, at_noise, j, q, sums[d])

    @cuda.jit(launch_bounds=THREADS)
    @card.written
    def product(call, call_sums, at, plan, packed, overlay, job, offset, first, n, places, stride, x, sb, out, beyond):
        words, bytes_ = cuda.shared.array(0, int32, 128), cuda.shared.array(0, types.int8, 128)
        which, begun, every = cuda.blockIdx.x % MATRICES, cuda.blockIdx.x // MATRICES, cuda.gridDim.x // MATRICES
        p, at, tiles = call * PLAN + which * 4, at + which * MATRIX_WORDS, (2 * places - 1) // (64 * RG) + 1
        count = (tiles - 1 - begun) // every + 1 if begun < tiles else 0
        ring = open_ring(count * (PASSES * PIECES), begun, every, x, packed, at)
        t, base = ring.t, ring.base
        group, lane, c = t >> 7, t & 31, t & 127
        q, side, rg = lane & 3, group % CG, group // CG
        seed = uint32(uint32(job[0] + job[1]) + uint32(offset + first))
        tables, shift = AT_TABLES + group * (2 * BUFFER), job_shift(job)
        acc, sums = cuda.local.array(ACC, int32), cuda.local.array(2, int32)
        for i in range(ACC):
            acc[i] = 0
        step, odd, unit = 0, 0, int32(uint32((begun * RG + rg) * 32) // uint32(n))
        if not SILENT:
            prepare(words, bytes_, tables, c, side * N, unit, call_sums * PLAN, plan, p, overlay, seed)
            ptx.named_barrier(1 + group, 128)
        for turn in range(count):
            tile = begun + turn * every
            row = (tile * RG + rg) * 64 + (c >> 5) * 16 + (lane >> 2)
            place = (row >> 4) * 8 + (lane >> 2)
            slot, s0, s1 = int32(0), int32(0), int32(0)
            if not SILENT:
                unit = int32(uint32((tile * RG + rg) * 32) // uint32(n))
                slot = int32(int32(uint32(place) // uint32(n)) - unit)
                s0 = as_row(sb[(SB_AT + which) * stride + row], shift)
                s1 = as_row(int32(-sb[(SB_AT + which) * stride + row + 8]), shift)
            to, sums[0], sums[1] = row_of(first, place, n), 0, 0
            wait_rows(ring, turn)
            for ahead in range(PASSES):
                here = tables + odd * BUFFER + slot * TABLE
                begin_tile(acc, int32(base + 4 * here + q * 16), s0, s1, shift)
                step = multiply(acc, ring, step)
                if not SILENT:                               # while the tensor cores work: the tables of the next pass
                    last = ahead == PASSES - 1
                    coming = int32(uint32(((tile + every) * RG + rg) * 32) // uint32(n)) if last else unit
                    prepare(words, bytes_, tables + (1 - odd) * BUFFER, c, ((0 if last else ahead + 1) * CG + side) * N,
                            coming, call_sums * PLAN, plan, p, overlay, seed)
                    ptx.named_barrier(1 + group, 128)
                step = finish(acc, ring, step, ahead == PASSES - 1, turn + 1 < count, turn, tile + every)
                col = (ahead * CG + side) * N
                if ptx.keep_in_loop(int32(place)) < places:  # the branch stays out of the loop of products
                    if INNER:
                        store_inner(acc, out, int64(row), col, q, int32(base + 4 * here + 512), sums)
                    else:
                        store_rows(acc, out, to * (H // 4) + which * beyond, col, q)
                odd = 1 - odd
                if INNER and not SILENT:
                    ptx.named_barrier(1 + group, 128)        # the tables just read are the next to be overwritten
            if INNER and not SILENT:
                for half in range(2):
                    total = quad_sum(sums[half])
                    if q == 0 and place < places:
                        cuda.atomic.add(sb, 2 * stride + row + 8 * half, total)

    return product, 4 * (AT_TABLES + (0 if SILENT else GROUPS * 2 * BUFFER))


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


def _recur_kernel(cfg, nz, card, cc, clean):
    """One layer's state through n positions, some pairs a block: x = clip(x + h) in place. Launch [blocks] of 512
    threads. A warp has eight pairs, a warpgroup N columns of each of its passes; what a thread needs of its columns it
    finds in `own`, 16 bytes [matrix][16 columns][thread]: column noise, biases of both members, input noise of the
    other matrix. In noise mode 2, where a factor is a hash and a root, the scaled column noise of both matrices
    follows.

    at: packed word of U_f; U_h follows. plan: 0 b_f, 4 b_h (vector_function); 8, 12: packed words, seed A, overlay A,
    seed B of U_f and U_h; 16, 17 their overlays B. states words of int8 [sequences or groups, H]: where `begin`, a pair
    begins with that of its group (per_group pairs; the first pair is job[1] + offset); where `keep`, states go there in
    the end."""
    H, MODE, SILENT, BULK = cfg.HIDDEN_DIM, cfg.ADAPTIVE_NOISE_MODE, nz.silent, card.wgmma
    shape, ROWS, RESIDENT = _recurrence(cfg, card)
    N, PER, PIECES = shape.N, shape.passes // 2, H // shape.KP
    KS, ACC, PAST, RAGGED = N // 16, N // 2, ROWS * H // (8 * shape.KP), GROUPS * N * PER != H
    ALL, AT_PAST, AT_OWN, SCALED = KS * PER, ROWS * H, shape.bytes, MODE == 2 and not SILENT
    TABLES = _tables(cfg)
    OWN, WORDS, SUMS = ALL * THREADS * 16, 2 * ALL, 2 * 64 * GROUPS
    open_ring, _, multiply, finish = transformer.product_functions(card, shape, matrices=2, own_rows=True)
    noise, scaled, vector = nz.noise, nz.scaled, vector_function(cfg, nz)
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
    def make_own(weights, overlay, plan, p, seed, which, k, t):
        """The four words of 16 columns."""
        a, b = uint32(seed + uint32(plan[p + 9 + 4 * which])), uint32(seed + uint32(plan[p + 15 - 4 * which]))
        column = min(column_of(k, t), H - 4)
        w0, w1, w2, w3 = int32(0), int32(0), int32(0), int32(0)
        for e in range(4):
            even, odd = vector(weights, overlay, plan, p + 4 * which, seed, column + e)
            more, shift = int32(127 * (1 - which)), int32(8 * e)     # b_f + 127, without a sign
            w0 = int32(w0 | int32(int32(noise(a, column + e) + 128) << shift))
            w1 = int32(w1 | int32(int32(int32(clip(even) + more) & int32(255)) << shift))
            w2 = int32(w2 | int32(int32(int32(clip(odd) + more) & int32(255)) << shift))
            w3 = int32(w3 | int32(int32(noise(b, column + e) & int32(255)) << shift))
        return w0, w1, w2, w3

    @device
    def column_noise(word, e, overlay, at_overlay, stream, column):
        if MODE == 0:
            return as_column(int32(byte(int32(word ^ int32(SIGNS)), e)))
        return as_column(scaled(byte(int32(word ^ int32(SIGNS)), e), overlay[at_overlay + column + e], stream,
                                column + e))

    @device
    def add_inputs(total, word, noises, overlay, at_overlay, stream, column):
        """total + what four inputs add to sb."""
        if SILENT:
            return total
        if MODE == 0:
            return ptx.dp4a(word, noises, total)
        for e in range(4):
            entry, i = overlay[at_overlay + column + e], column + e
            f = factor(entry, stream, i) if MODE == 2 else float32(0)
            total = int32(total + input_term(byte(word, e), input_coefficient(entry, stream, i), f))
        return total

    @device
    def store_sums(sums, which, row, side, s0, s1, q):
        if not SILENT:
            s0, s1 = quad_sum(s0), quad_sum(s1)
            if q == 0:
                sums[(which * 64 + row) * GROUPS + side], sums[(which * 64 + row + 8) * GROUPS + side] = s0, s1

    @device
    def whole_sum(address, which, row):
        if SILENT:
            return int32(0)
        s = ptx.load_shared4(int32(address + (which * 64 + row) * (4 * GROUPS)))
        return int32(int32(s[0] + s[1]) + int32(s[2] + s[3]))

    @registers
    def product(ahead, acc, which, ring, step, s0, s1, shift, own, plan, p, overlay, seed):
        """acc = the product of a pass, with its noise."""
        for j in range(KS):
            if SILENT:
                for i in range(8):
                    acc[8 * j + i] = begin_acc(int32(0), int32(0), shift)
            else:
                column, stream = column_of(ahead * KS + j, ring.t), uint32(seed + uint32(plan[p + 9 + 4 * which]))
                noises = load_own(ring.base, own, which + TABLES - 2, ahead * KS + j, ring.t)
                for g in range(4):
                    i = 8 * j + (g >> 1) * 4 + (g & 1)
                    if SCALED:
                        n = noises[g]
                    else:
                        n = column_noise(noises[0], g, overlay, plan[p + 10 + 4 * which], stream, min(column, H - 4))
                    acc[i], acc[i + 2] = begin_acc(s0, n, shift), begin_acc(s1, n, shift)
        finish(acc, ring, multiply(acc, ring, step, which * PAST), False, False, 0, 0)

    @registers
    def gate(ahead, acc, f, sums, base, own, plan, p, overlay, seed, t, gates, row0, at_word, works):
        """f, and the gated states of both rows to shared memory."""
        q, stream = t & 3, uint32(seed + uint32(plan[p + 15]))
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
                            sums[d] = add_inputs(sums[d], past, w[3], overlay, plan[p + 17], stream, column + g * 16)

    @registers
    def advance(ahead, acc, f, sums, base, own, plan, p, overlay, seed, t, candidates, x, row0, at_word, works, live,
                keeps0, keeps1):
        """The new states of both rows, and x."""
        q, stream = t & 3, uint32(seed + uint32(plan[p + 11]))
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
                        h = h if (keeps1 if d else keeps0) else int32(0)
                        if works:
                            ptx.store_shared(at_h, h)
                        if not SCALED:
                            sums[d] = add_inputs(sums[d], h, noises, overlay, plan[p + 16], stream, column + g * 16)
                    if live:
                        ptx.store2(x, at_row + d * (2 * H), out[0], out[1])

    @unrolled
    def columns(which, acc, f, sums, ring, step, s0, s1, shift, own, plan, p, overlay, seed, gates, candidates, x, row0,
                at_word, works, live, keeps0, keeps1):
        """All passes of a matrix."""
        base, t = ring.base, ring.t
        for d in range(PER):
            product(d, acc, which, ring, step + d * PIECES, s0, s1, shift, own, plan, p, overlay, seed)
            if which == 0:
                gate(d, acc, f, sums, base, own, plan, p, overlay, seed, t, gates, row0, at_word, works)
            else:
                advance(d, acc, f, sums, base, own, plan, p, overlay, seed, t, candidates, x, row0, at_word, works,
                        live, keeps0, keeps1)

    @cuda.jit(launch_bounds=THREADS)
    @card.written
    def recur(call, at, plan, weights, packed, overlay, tokens, width, skip, n, units, count, job, offset, gates,
              candidates, x, states, own, per_group, begin, keep):
        parts = cuda.shared.array(SUMS, int32, 128)          # [of h, of past][row][warpgroup]
        ring = open_ring(n * (2 * PER * PIECES), 0, 1, packed, packed, at)
        base, t, p = ring.base, ring.t, call * PLAN
        group, lane, warp, q = t >> 7, t & 31, (t & 127) >> 5, t & 3
        row, at_parts = warp * 16 + (lane >> 2), ptx.shared_address(parts, 0)
        pair, works = cuda.blockIdx.x * (ROWS // 2) + warp * 8 + (lane >> 2), warp * 16 < ROWS
        live = int32(1) if works and pair < units else int32(0)
        pair = min(pair, units - 1)
        seed = uint32(uint32(job[0] + job[1]) + uint32(offset + pair))
        at_token0 = int64(min(2 * pair, count - 1) if clean else pair) * width + skip
        at_token1 = int64(min(2 * pair + 1, count - 1) if clean else pair) * width + skip
        keeps0, keeps1 = tokens[at_token0] != 0, tokens[at_token1] != 0
        at_state = ((int64(job[1]) + offset + pair) // per_group - (int64(job[1]) + offset) // per_group) * (H // 4)
        at_word = int32(base + warp * (16 * H) + (lane >> 2) * 16 + q * 4)
        acc, f, sums = cuda.local.array(ACC, int32), cuda.local.array(WORDS, int32), cuda.local.array(2, int32)
        sums[0], sums[1], shift = 0, 0, job_shift(job)
        stream = uint32(seed + uint32(plan[p + 11]))
        for k in range(ALL):
            column = column_of(k, t)
            for which in range(2):
                w0, w1, w2, w3 = make_own(weights, overlay, plan, p, seed, which, k, t)
                store_own(base, own, which, k, t, w0, w1, w2, w3)
                if SCALED:
                    at_overlay, first = plan[p + 10 + 4 * which], min(column, H - 4)
                    a = uint32(seed + uint32(plan[p + 9 + 4 * which]))
                    store_own(base, own, which + 2, k, t, column_noise(w0, 0, overlay, at_overlay, a, first),
                              column_noise(w0, 1, overlay, at_overlay, a, first),
                              column_noise(w0, 2, overlay, at_overlay, a, first),
                              column_noise(w0, 3, overlay, at_overlay, a, first))
                if which == 1 and works and (not RAGGED or column < H):
                    at_h, state = int32(at_word + (column - q * 4) * 8), int32(0)
                    if begin:
                        state = states[at_state + column // 4]
                    h0, h1 = state if keeps0 else int32(0), state if keeps1 else int32(0)
                    ptx.store_shared(at_h, h0)
                    ptx.store_shared(int32(at_h + 8 * H), h1)
                    sums[0] = add_inputs(sums[0], h0, w3, overlay, plan[p + 16], stream, column)
                    sums[1] = add_inputs(sums[1], h1, w3, overlay, plan[p + 16], stream, column)
        store_sums(parts, 0, row, group, sums[0], sums[1], q)
        if BULK:
            ptx.proxy_fence()
        cuda.syncthreads()
        for position in range(n):
            row0, writes = row_of(pair, position, n), ptx.keep_in_loop(live) != 0
            following = min(position + 1, n - 1)             # what follows the window says nothing to its last state
            keeps0 = position + 1 == n or tokens[at_token0 + following] != 0
            keeps1 = position + 1 == n or tokens[at_token1 + following] != 0
            for which in range(2):
                s0 = as_row(whole_sum(at_parts, which, row), shift)
                s1 = as_row(int32(-whole_sum(at_parts, which, row + 8)), shift)
                sums[0], sums[1] = 0, 0
                columns(which, acc, f, sums, ring, (2 * position + which) * (PER * PIECES), s0, s1, shift, own, plan, p,
                        overlay, seed, gates, candidates, x, row0, at_word, works, writes, keeps0, keeps1)
                if SCALED and works:                         # once, not in every pass: it is long
                    overlay_b, seed_b = plan[p + 17 - which], uint32(seed + uint32(plan[p + 15 - 4 * which]))
                    for k in range(ALL):
                        column = column_of(k, t)
                        if not RAGGED or column < H:
                            at_h = int32(at_word + (column - q * 4) * 8 + (1 - which) * AT_PAST)
                            w3 = load_own(base, own, which, k, t)[3]
                            sums[0] = add_inputs(sums[0], ptx.read_shared(at_h), w3, overlay, overlay_b, seed_b, column)
                            sums[1] = add_inputs(sums[1], ptx.read_shared(int32(at_h + 8 * H)), w3, overlay, overlay_b,
                                                 seed_b, column)
                store_sums(parts, 1 - which, row, group, sums[0], sums[1], q)
                if BULK:
                    ptx.proxy_fence()
                cuda.syncthreads()
        if keep and live != 0:
            for k in range(ALL):
                column = column_of(k, t)
                if not RAGGED or column < H:
                    for half in range(2):
                        states[(2 * int64(pair) + half) * (H // 4) + column // 4] = ptx.read_shared(
                            int32(at_word + (column - q * 4) * 8 + half * (8 * H)))

    return recur, AT_OWN + (2 * OWN if RESIDENT else 0)


# --- one token at a time, without noise -------------------------------------------------------------------------------

def _token_kernel(cfg):
    """ln_f of the last layer's output after one more token: out int8 [H]. One block of 1024 threads; a thread is a
    channel. calls int32: rows of the plan: embed, then for each layer gates, recur, inner, down, then the head's norm;
    norms begin a row of the plan with their weights. states int8 [L, H] go on."""
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
    def token(calls, plan, weights, packed, tokens, at, states, out):
        # three vectors of H bytes, or one of 4 H after one
        words, vector = cuda.shared.array(0, int32), cuda.shared.array(0, types.int8)
        y = cuda.shared.array(H4, int32)
        part = cuda.shared.array(32, int32)
        t, id_ = cuda.threadIdx.x, tokens[at[0]]
        x = int32(0)
        if t < H:
            x = byte(packed[plan[calls[0] * PLAN] + (id_ >> 3) * (2 * H) + (t >> 4) * 32 + (id_ & 7) * 4
                            + ((t >> 2) & 3)], t & 3)
        for layer in range(L):
            gates, recur = calls[1 + 4 * layer] * PLAN, calls[2 + 4 * layer] * PLAN
            inner, down = calls[3 + 4 * layer] * PLAN, calls[4 + 4 * layer] * PLAN
            n, h = normed(x, weights, plan[gates + 16], part, t), int32(0)
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
            from_h(words, H // 2, packed, plan[recur + 12], H, y, 0, t)
            cuda.syncthreads()
            if t < H:
                c = clip(int32(int32(c + divide(y[t])) + int32(weights[plan[recur + 4] + t])))
                h = next_state(f, h, c)
                states[layer * H + t] = h
                x = clip(int32(x + h))
            n = normed(x, weights, plan[inner + 16], part, t)
            if t < H:
                vector[t] = n
            cuda.syncthreads()
            from_h(words, 0, packed, plan[inner], H4, y, 0, t)
            cuda.syncthreads()
            for i in range(t, H4, 1024):
                vector[H + i] = int32(max(divide(y[i]), int32(LOWEST)))
            cuda.syncthreads()
            from_4h(words, H // 4, packed, plan[down], H, y, 0, t)
            cuda.syncthreads()
            if t < H:
                x = clip(int32(x + divide_down(y[t])))
        n = normed(x, weights, plan[calls[4 * L + 1] * PLAN + 16], part, t)
        if t < H:
            out[t] = n

    return token


# --- the forward pass -------------------------------------------------------------------------------------------------

class _Plan(products.Plan):
    """The calls of a forward pass."""

    def __init__(self, cfg, packing):
        super().__init__(cfg, packing)
        e = self._tensors["embedding", 0]
        self.embed = self._add([packing.at["embedding", 0] // 4, e.seed_a, e.seed_b, e.overlay_a, e.overlay_b])
        self.layers = []
        for layer in range(cfg.N_LAYERS):
            u_f, u_h = self._tensors["u_f", layer], self._tensors["u_h", layer]
            self.layers.append(SimpleNamespace(
                norm_1=self._normed("ln_1", layer, "w_f", "w_h"), norm_2=self._normed("ln_2", layer, "w_up"),
                gates=self._products(layer, "ln_1", "w_f", "w_h"), inner=self._products(layer, "ln_2", "w_up"),
                down=self._products(layer, "ln_2", "w_down"), sums=self._add(self._input("w_down", layer)),
                recur=self._add(self._vector("b_f", layer) + self._vector("b_h", layer)
                                + self._matrix("u_f", layer) + [u_f.seed_b] + self._matrix("u_h", layer) + [u_h.seed_b]
                                + [u_f.overlay_b, u_h.overlay_b])))
        self.norm_f, self.head = self._normed("ln_f", 0, "head"), self._products(0, "ln_f", "head")

    def token_calls(self):
        """Rows of the plan in the order of the token kernel."""
        calls = [self.embed]
        for layer in self.layers:
            calls += [layer.gates, layer.recur, layer.inner, layer.down]
        return np.array(calls + [self.head], np.int32)

    def _normed(self, ln, layer, *streams):
        return self._add(sum((self._input(name, layer) for name in streams), self._vector(ln, layer)))

    def _products(self, layer, ln, *names):
        entries = sum((self._matrix(name, layer) + [0] for name in names), [])
        return self._add(entries + [0] * (16 - len(entries)) + [self._tensors[ln, layer].weights])


class Rows(gru_parts.RecurrentPass):
    """The forward pass, with noise or `clean`. Both are given the same packing."""

    def __init__(self, cfg, cc, card, packing, clean, silent=False):
        super().__init__(cfg)
        self.clean, nz, losses, add = clean, build_noise(cfg, clean or silent), AF64 if clean else A64, self.add
        self.shapes, (shape, self.state_rows, self.resident) = _shapes(cfg, card), _recurrence(cfg, card)
        self.own_bytes = shape.columns() * 64 * _tables(cfg)             # 16 a thread, table and 16 columns
        self.embed = add(_embed_kernel(cfg, nz, clean), losses=losses)
        self.add_head(nz, cc, card, packing, row_of, clean)
        self.norm_two = self.norm_f if nz.silent else add(gru_parts.norm_kernel(cfg, nz, cc, 2, row_of))
        self.products = {kind: add(_product_kernel(cfg, nz, card, cc, kind, of, self.shapes["down"].KP))
                         for kind, of in self.shapes.items()}
        self.recur, self.at = add(_recur_kernel(cfg, nz, card, cc, clean)), {}
        of = dict(w_up=self.shapes["inner"], w_down=self.shapes["down"], w_f=self.shapes["gates"],
                  w_h=self.shapes["gates"])
        for t in gru_parts.matrices(cfg):
            columns, width = ((of[t.name].columns(), of[t.name].KP) if t.name in of
                              else (shape.columns() // 2, shape.KP))
            self.at[t.name, t.layer] = packing.add(t, QUADS, columns, width)

    def layout(self, units, n):
        """Byte ranges of the scratch arrays of `units` pairs of n positions, pairs and rows of a slice, and last the
        total of bytes."""
        H, rows = self.cfg.HIDDEN_DIM, padded_rows(units * n)
        some = max(1, min(units, SLICE // (10 * n * H)))
        padded = padded_rows(some * n)
        own = 4 if self.resident else blocks(units, self.state_rows // 2) * self.own_bytes
        out, end = ranges(dict(x=rows * H, gates=rows * H, candidates=rows * H, normed=padded * H, sb=12 * padded,
                               own=own, u=4 * padded * H))
        return out, some, padded, end

    def launch(self, plan, tables, units, scratch, **given):
        n, losses = given["n"], given["losses"]
        processors = cuda.get_current_device().MULTIPROCESSOR_COUNT
        layout, some, stride, _ = self.layout(units, n)
        at, candidates = layout["gates"][0], layout["candidates"]
        given = self.arguments(given, tables, layout, scratch, units=units, stride=stride,
                               beyond=(candidates[0] - at) // 4)
        both_gates, normed = scratch[at:candidates[1]].view(np.int32), given["normed"]
        if self.clean:
            given["exps"] = tables.clean_exps

        slices = [(first, min(some, units - first)) for first in range(0, units, some)]

        def norm(kernel, call, first, pairs):
            kernel((pairs, blocks(n, 64)), 256, given, call=call, first=first, out=normed)

        def product(kind, call, name, layer, first, pairs, x, out, call_sums=0):
            matrices, tiles = 1 + (kind == "gates"), blocks(2 * pairs * n, 64 * self.shapes[kind].RG)
            self.products[kind](min(tiles, processors // matrices) * matrices, THREADS, given, call=call, first=first,
                                call_sums=call_sums, at=self.at[name, layer], places=pairs * n, x=x, out=out)

        self.embed((units, blocks(n, 64)), 256, given, call=plan.embed,
                   losses=(tables.no_floats if self.clean else tables.no_ints) if losses is None else losses)
        for i, layer in enumerate(plan.layers):
            for first, pairs in slices:
                norm(self.norm_two, layer.norm_1, first, pairs)
                product("gates", layer.gates, "w_f", i, first, pairs, normed, both_gates)
            self.recur(blocks(units, self.state_rows // 2), THREADS, given, call=layer.recur, at=self.at["u_f", i],
                       states=self.states(given, i))
            for first, pairs in slices:
                norm(self.norm_f, layer.norm_2, first, pairs)
                product("inner", layer.inner, "w_up", i, first, pairs, normed, given["u"], layer.sums)
                product("down", layer.down, "w_down", i, first, pairs, given["u"], given["x"])
        if losses is not None:
            self.score(plan, given, units)


class Fused(gru_parts.RecurrentPass):
    """The noisy pass whose activations stay in registers from a norm to the end of its products: with wgmma, the
    general recurrence and the MLP of kernels.gru_hopper, or else all of kernels.gru_narrow."""

    def __init__(self, cfg, cc, card, packing, silent, hopper):
        super().__init__(cfg)
        self.own_head = cfg.VOCAB_SIZE == cfg.HIDDEN_DIM if hopper else gru_narrow.own_head(cfg)
        depth, self.together = (128, 1) if hopper else (32, 8)     # inputs of a piece of w_down; pairs side by side
        self.at = {(t.name, t.layer): packing.add(t, QUADS, t.cols, depth if t.name == "w_down" else t.rows)
                   for t in gru_parts.matrices(cfg) + [gru_parts.tensor(cfg, "head")] * self.own_head}
        nz, sizes, add = build_noise(cfg, silent), gru_narrow.sizes(cfg, card.shared, hopper), self.add
        self.rows_at = packing.add(gru_parts.tensor(cfg, "embedding"), ROWS, cfg.VOCAB_SIZE, cfg.HIDDEN_DIM)
        at, firsts = row_of if hopper else gru_narrow.row_of, (True, False) if cfg.N_LAYERS > 1 else (True,)
        self.hopper, self.sizes = hopper, sizes
        self.gates = [add(gru_narrow.gates_kernel(cfg, nz, cc, sizes["gates"], at, first)) for first in firsts]
        if hopper:
            self.recur, self.mlp = add(_recur_kernel(cfg, nz, card, cc, False)), add(gru_hopper.mlp_kernel(cfg, nz))
            self.state_rows = _recurrence(cfg, card)[1]
        else:
            self.recur = add(gru_narrow.recur_kernel(cfg, nz, cc, sizes["recur"]))
            self.mlp = add(gru_narrow.mlp_kernel(cfg, nz, cc, sizes["mlp"]))
        if self.own_head:
            self.head = add(gru_narrow.head_kernel(cfg, nz, cc, sizes["head"], at))
        else:
            self.add_head(nz, cc, card, packing, at)

    def layout(self, units, n):
        """({name: (first byte, end)} of the scratch arrays, bytes of all)."""
        size = padded_rows(blocks(units, self.together) * self.together * n) * self.cfg.HIDDEN_DIM
        return ranges(dict(x=size, gates=size, candidates=size, own=4))

    def launch(self, plan, tables, units, scratch, **given):
        given = self.arguments(given, tables, self.layout(units, given["n"])[0], scratch, units=units)
        processors = cuda.get_current_device().MULTIPROCESSOR_COUNT

        def grid(name, work):
            warps = self.sizes[name].warps
            return min(processors, blocks(work, warps)), 32 * warps

        recur, mlp = grid("recur", blocks(units, 8)), grid("mlp", units)
        if self.hopper:
            tiles, groups = blocks(units * 2 * given["n"], gru_hopper.TILE), gru_hopper.GROUPS
            each = blocks(tiles, groups * processors)
            given |= dict(tiles=tiles, each=each)
            recur, mlp = (blocks(units, self.state_rows // 2), THREADS), (blocks(tiles, groups * each), 128 * groups)
        for i, layer in enumerate(plan.layers):
            self.gates[min(i, 1)](*grid("gates", units), given, call_embed=plan.embed, call_norm=layer.norm_1,
                                  call=layer.gates, at=self.at["w_f", i], rows_at=self.rows_at)
            self.recur(*recur, given, call=layer.recur, at=self.at["u_f", i], states=self.states(given, i))
            self.mlp(*mlp, given, call_norm=layer.norm_2, call_inner=layer.inner, call_down=layer.down,
                     call_sums=layer.sums, at=self.at["w_up", i])
        if self.own_head:
            self.head(*grid("head", units), given, call_norm=plan.norm_f, call=plan.head, at=self.at["head", 0])
        else:
            self.score(plan, given, units)


class Forward(products.Forward):
    """What the CUDA engine uses: see the top of egg_kernels."""

    def __init__(self, cfg, cc, shared_limit, silent=False):
        token = Kernel((_token_kernel(cfg), 5 * cfg.HIDDEN_DIM), calls=A32, at=A32, states=A8, out=A8)
        super().__init__(cfg, cc, token, divide_function(parameters.divisor(cfg, cfg.HIDDEN_DIM)), "head")
        self._plan, self._gather = _Plan(cfg, self._packing), Kernel(_gather_kernel())
        card = transformer.Card(tuple(cc) == (9, 0) and cfg.TENSOR_CORES != "mma", shared_limit, cc[0] < 10)
        hopper = cfg.TENSOR_CORES != "mma" and gru_hopper.fits(cfg, cc, shared_limit)
        if hopper or gru_narrow.fits(cfg, cc, shared_limit):
            self._noisy = Fused(cfg, cc, card, self._packing, silent, hopper)
        else:
            self._noisy = Rows(cfg, cc, card, self._packing, False, silent)
        self._clean = Rows(cfg, cc, card, self._packing, True)
        self._serve([self._gather] + self._clean.kernels if cfg.STATE_TOKENS else [])

    def tables(self):
        super().tables(no_job=np.zeros(4, np.uint32), no_floats=np.zeros(1), no_ints=np.zeros(1, np.int64))

    def _parts(self, pairs):
        """(streams that make states, bytes of: their tokens, their states, the scratch of both passes)."""
        cfg, per_group = self.cfg, self.cfg.GROUP_SIZE // 2
        streams = min(pairs, (pairs - 1) // per_group + 2) if cfg.STATE_TOKENS else 0
        scratch = self._noisy.layout(pairs, cfg.SEQ_LEN)[-1]
        if streams:
            scratch = max(scratch, self._clean.layout(blocks(streams, 2), cfg.STATE_TOKENS)[-1])
        return streams, aligned(4 * streams * cfg.STATE_TOKENS), aligned(2 * blocks(streams, 2) * cfg.N_LAYERS
                                                                         * cfg.HIDDEN_DIM), scratch

    def scratch_bytes(self, pairs):
        return sum(self._parts(pairs)[1:]) if pairs else 0

    def clean_scratch_bytes(self, windows, length):
        return self._clean.layout(blocks(windows, 2), length)[-1] if windows else 0

    def evaluate(self, stream, weights, packed, overlay, windows, job, offset, pairs, scratch, losses):
        cfg, tables, per_group = self.cfg, self._tables, self.cfg.GROUP_SIZE // 2
        before, width = cfg.STATE_TOKENS, cfg.WINDOW
        streams, token_bytes, state_bytes, _ = self._parts(pairs)
        end = token_bytes + state_bytes
        tokens, states, work = scratch[:token_bytes], scratch[token_bytes:end], scratch[end:]
        given = dict(stream=stream, weights=weights, packed=packed, overlay=overlay, job=job, offset=offset,
                     per_group=per_group)
        if streams:
            tokens, units = tokens.view(np.int32), blocks(streams, 2)
            states = states[:2 * units * cfg.N_LAYERS * cfg.HIDDEN_DIM]
            self._gather(blocks(streams * before, 256), 256, given, windows=windows, width=width, n=before, pairs=pairs,
                         streams=streams, tokens=tokens)
            self._clean.launch(self._plan, tables, units, work, **given, tokens=tokens, width=before, skip=0, n=before,
                               count=streams, states=states, begin=0, keep=1, losses=None)
        self._noisy.launch(self._plan, tables, pairs, work, **given, tokens=windows, width=width, skip=before,
                           n=cfg.SEQ_LEN, count=pairs, states=states, begin=int(streams > 0), keep=0, losses=losses)

    def validate(self, stream, weights, packed, windows, count, length, scratch, nats):
        self._clean.launch(self._plan, self._tables, blocks(count, 2), scratch, stream=stream, weights=weights,
                           packed=packed, overlay=weights, job=self._tables.no_job, offset=0, per_group=1,
                           tokens=windows, width=length + 1, skip=0, n=length, count=count, begin=0, keep=0,
                           losses=nats)

    def cache_bytes(self, positions):
        return self.cfg.N_LAYERS * self.cfg.HIDDEN_DIM

    def _cache(self, cache, positions):
        return dict(states=cache)
