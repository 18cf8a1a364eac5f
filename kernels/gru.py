"""The recurrent model (engine.cpu_gru) on CUDA, with the same bits as the CPU.

A layer reads the whole window before the next begins. Then only two of its six products follow the positions one by
one; the others are plain products over all members times positions. So a layer is: a norm, W_f and W_h ("gates" and
"candidates"), the recurrence, a norm, up ("inner") and down; at the end a norm, the logits and their losses. Products
are those of kernels.product: 64 rows a warpgroup, with wgmma or mma.sync.

Rows     Two members, those of a pair, share everything but the sign of their noise. With P = pair * n + position, row
         P / 8 * 16 + P % 8 is the even member's, 8 further the odd member's: what a thread holds of a tile (rows g and
         g + 8, see Fragment in kernels.product) has one position and one noise.
         Two pairs of windows of 8 positions, for example: rows 0 to 7 are the even member of pair 0 at positions 0 to
         7, rows 8 to 15 its odd member, rows 16 to 23 and 24 to 31 those of pair 1. A warp takes rows 0 to 15; its
         lanes with g = 3 hold rows 3 and 11: both members of pair 0 at position 3. They have one noise, which the odd
         member subtracts.
Columns  Rows of x, gates and candidates lie in the order in which threads hold them: column 32 b + 16 i + 4 q + e is
         byte 32 b + 8 q + 4 i + e. x is kept as x + 128. What is multiplied next (n, u) lies as core matrices (ptx).

"""

from types import SimpleNamespace
from typing import NamedTuple

from numba import cuda, int32, int64, types

from kernels import gru_parts, noise, ptx
from kernels.gru_parts import norm_kernel, row_of, rows_of_places
from kernels.head import head_kernel
from kernels.host import PLAIN, QUADS, ROWS, Kernel, ranges
from kernels.noise import input_words
from kernels.parts import A32, blocks, byte, called, clip, int32s, quad_sum, quotient_function, unroll, unrolled
from kernels.product import (GROUPS, THREADS, accumulator_of, begin_functions, begin_tile_function, full_shape,
                             members_of, place_function, product_functions, shapes, wide_shape)
from kernels.rules import build_noise, device
from model import parameters


# --- device functions -------------------------------------------------------------------------------------------------

def early_noise_quotients(cfg, inputs, lowest=-127):
    """(row, column, begin, ZERO, pairs) of a product over `inputs` whose accumulators begin with their noise:

    row(s), column(n)           a signed sb and a column noise as `begin` wants them
    begin(s, n, ZERO)           the accumulator before the product
    pairs(acc, i)               four columns from acc[i] on as two words of two int16: the quotients, rounded down and
                                clipped
    """
    noisy = begin_functions(cfg, inputs)
    ZERO, divided = quotient_function(parameters.divisor(cfg, inputs), gru_parts.FLOAT_BASE, noisy.BASE, lowest)

    @device
    def two(acc, i):
        return ptx.byte_permute(divided(acc[i]), divided(acc[i + 1]), 0xD591)

    @called
    def pairs(acc, i):
        return two(acc, i), two(acc, i + 4)

    return noisy.row, noisy.column, noisy.begin, ZERO, pairs


# --- products over all positions --------------------------------------------------------------------------------------

def _shapes(cfg, gpu):
    """{kind: Shape} of the products over all positions, with and without noise. Each has also its `kind`; `outputs`,
    its columns; the `least` value of an output; `slots`, the pairs that the 64 rows of a warpgroup can touch; `table`,
    words of a pair's tables for 128 columns: column noise and, of "inner", the input noise of w_down."""
    H = cfg.HIDDEN_DIM
    slots = members_of(32, cfg.SEQ_LEN)
    out = {}
    for kind in "gates", "inner", "down":
        columns, table, least = H, 128, -127
        if kind == "inner":
            columns, table = 4 * H, 128 + gru_parts.input_bytes(cfg, 128) // 4
            least = 0 if cfg.MLP_RELU else -127
        budget = gpu.shared - 4 * GROUPS * 2 * slots * table - 1024
        if kind == "down":
            out[kind] = full_shape(budget, 4 * H, H, 32)
        else:
            out[kind] = wide_shape(budget, H, columns)
        vars(out[kind]).update(kind=kind, outputs=columns, slots=slots, table=table, least=least)
    return out


def _store_function(cfg, gpu, shape, pieces, pairs, add):
    """Device function that stores both rows: rows of H from word beyond on, 32 columns a time, in the order of the
    threads; of "inner" core matrices of `pieces` columns, and sums + what they add to sb. pairs: of
    early_noise_quotients; add: of input_functions."""
    H = cfg.HIDDEN_DIM
    N, COLUMNS = shape.N, shape.outputs
    RAGGED, DOWN = shape.columns != COLUMNS, shape.kind == "down"
    _, added = gru_parts.int16_functions(gpu.cc)

    @gpu.device
    def store_rows(acc, out, row, beyond, col, q, at_noise, sums):
        for j in unrolled(range(N // 32)):
            if not RAGGED or col + 32 * j < COLUMNS:
                for half in range(2):
                    at, new = row * (H // 4) + beyond + half * (2 * H) + (col + 32 * j) // 4 + q * 2, int32s(2)
                    if DOWN:
                        old = ptx.load2(out, at)
                    for g in unrolled(range(2)):
                        y, z = pairs(acc, 16 * j + 2 * half + 8 * g)
                        new[g] = added(old[g], y, z) if DOWN else ptx.bytes4(y, z)
                    ptx.store2(out, at, new[0], new[1])

    @device
    @(unroll if cfg.ADAPTIVE_NOISE_MODE == 2 else gpu.unroll)    # no compiler unrolls bodies with scaled noise
    def store_inner(acc, out, row, beyond, col, q, at_noise, sums):
        to = (row >> 6) * (64 * H) + ((row >> 3) & 7) * (2 * pieces) + (row & 7) * 4 + q
        for j in unrolled(range(N // 16)):
            if not RAGGED or col + 16 * j < COLUMNS:
                c = col + 16 * j
                for d in unrolled(range(2)):
                    y, z = pairs(acc, 8 * j + 2 * d)
                    word = ptx.bytes4(y, z)
                    out[to + d * (2 * pieces) + c // pieces * (16 * pieces) + c % pieces // 16 * 32] = word
                    sums[d] = add(word, at_noise, j, q, sums[d])

    return store_inner if shape.kind == "inner" else store_rows


def _prepare_function(gpu, shape, as_column, fill_input):
    """Device function: tables, from word `at` on, of the pairs that this warpgroup's rows touch, for column c of 128.
    Without a branch, which would make the products wait for each other."""
    COLUMNS = shape.outputs
    SLOTS, TABLE = shape.slots, shape.table
    INNER = shape.kind == "inner"

    @gpu.device
    def prepare(words, bytes_, at, c, column, unit, drawn, first, each):
        for slot in range(SLOTS):
            here, i = at + slot * TABLE, first + (unit + slot) * each + min(column + c, COLUMNS - 1)
            words[here + c] = as_column(drawn[i])
            if INNER:
                fill_input(words, bytes_, 4 * (here + 128), c, drawn, i + COLUMNS, COLUMNS)

    return prepare


def _product_kernel(cfg, nz, gpu, shape, pieces):
    """A product over all positions of all pairs, divided and clipped. "gates": out, of the second matrix `beyond` words
    further, rows of H. "inner": out = u, 4 H columns, MLP_RELU: [64 rows][pieces of `pieces`
    columns][core matrices], and its sums with the input noise of w_down. "down": from u, out = clip(out + q), rows of
    H.

    Launch [blocks] of 512 threads; a block takes every gridDim-th tile of 64 RG rows ("gates": of matrix blockIdx % 2).
    drawn: columns of each matrix; of "inner" then the inputs of w_down. sb: [3][stride], 0 and 1 of the inputs, 2 of
    u."""
    N = shape.N
    RG = shape.RG
    CG = shape.CG
    PASSES = shape.passes
    INNER = shape.kind == "inner"
    MATRICES = 2 if shape.kind == "gates" else 1
    K = shape.K
    SLOTS = shape.slots
    TABLE = shape.table
    OUTPUTS = shape.outputs
    ACC = N // 2
    PIECES = K // shape.KP
    MATRIX_WORDS = shape.columns * K // 4
    AT_TABLES = shape.bytes // 4
    BUFFER = SLOTS * TABLE
    SB_AT = 2 if shape.kind == "down" else 0
    open_ring, wait_rows, multiply, finish = product_functions(gpu, shape)
    fill_input, add = gru_parts.input_functions(cfg, nz, 128)
    as_row, as_column, begin, ZERO, pairs = early_noise_quotients(cfg, K, shape.least)
    begin_tile = begin_tile_function(gpu, begin, ZERO, columns=N)
    place_of = place_function(cfg, RG, True)
    store = _store_function(cfg, gpu, shape, pieces, pairs, add)
    prepare = _prepare_function(gpu, shape, as_column, fill_input)

    @cuda.jit(launch_bounds=THREADS)
    @gpu.unroll
    def product(drawn: A32, each, packed: A32, at, units, n, stride, x: A32, sb: A32, out: A32, beyond):
        places = units * n
        words, bytes_ = cuda.shared.array(0, int32, 128), cuda.shared.array(0, types.int8, 128)
        matrix = cuda.blockIdx.x % MATRICES
        begun = cuda.blockIdx.x // MATRICES
        every = cuda.gridDim.x // MATRICES
        first = matrix * OUTPUTS
        at = at + matrix * MATRIX_WORDS
        tiles = (2 * places - 1) // (64 * RG) + 1
        count = (tiles - 1 - begun) // every + 1 if begun < tiles else 0
        ring = open_ring(count * (PASSES * PIECES), begun, every, x, packed, at)
        t, base = ring.t, ring.base
        group = t >> 7
        lane = t & 31
        c = t & 127
        q = lane & 3
        side = group % CG
        tables = AT_TABLES + group * (2 * BUFFER)
        acc, s, sums = int32s(ACC), int32s(2), int32s(2)
        for i in unrolled(range(ACC)):
            acc[i] = 0
        step, odd = 0, 0
        prepare(words, bytes_, tables, c, side * N, place_of(begun, t, n).first, drawn, first, each)
        ptx.named_barrier(1 + group, 128)
        for turn in range(count):
            tile = begun + turn * every
            row, unit, slot, _ = place_of(tile, t, n)
            number = (row >> 4) * 8 + (lane >> 2)
            s[0] = as_row(sb[(SB_AT + matrix) * stride + row])
            s[1] = as_row(int32(-sb[(SB_AT + matrix) * stride + row + 8]))
            sums[0], sums[1] = 0, 0
            wait_rows(ring, turn)
            for ahead in range(PASSES):
                here = tables + odd * BUFFER + slot * TABLE
                begin_tile(acc, int32(base + 4 * here + q * 16), s)
                step = multiply(acc, ring, step)
                last = ahead == PASSES - 1                   # while the tensor cores work: the tables of the next pass
                coming = place_of(min(tile + every, tiles - 1), t, n).first if last else unit
                prepare(words, bytes_, tables + (1 - odd) * BUFFER, c, ((0 if last else ahead + 1) * CG + side) * N,
                        coming, drawn, first, each)
                ptx.named_barrier(1 + group, 128)
                step = finish(acc, ring, step, last, turn + 1 < count, turn, tile + every)
                col = (ahead * CG + side) * N
                if ptx.keep_in_loop(int32(number)) < places:  # the branch stays out of the loop of products
                    store(acc, out, int64(row), matrix * beyond, col, q, int32(base + 4 * here + 512), sums)
                odd = 1 - odd
                if INNER:
                    ptx.named_barrier(1 + group, 128)        # the tables just read are the next to be overwritten
            if INNER:
                for half in range(2):
                    total = quad_sum(sums[half])
                    if q == 0 and number < places:
                        cuda.atomic.add(sb, 2 * stride + row + 8 * half, total)

    return Kernel(product, 4 * (AT_TABLES + GROUPS * 2 * BUFFER))


# --- the recurrence ---------------------------------------------------------------------------------------------------

class Thread(NamedTuple):
    """What a thread has in a running recurrence: rows g and g + 8 are the members of a pair."""
    ring: object
    tables: object
    drawn: object
    first: int              # the pair's first word of the call
    at_word: int            # shared address of the first word of its states
    works: bool             # whether it has rows
    acc: object             # local arrays: accumulators, gates, sums of what both rows' new vectors add to sb
    f: object
    sums: object
    gates: object
    candidates: object
    x: object


def _recurrence(cfg, gpu):
    """The Shape of the recurrence, whose passes are those of both matrices. It has also `rows` of a block; `each` and
    `all`, how many 16 columns a thread has in a pass and in a matrix; whether their tables are in `shared` memory;
    `at_past`, where the gated states begin, behind the states."""
    H = cfg.HIDDEN_DIM
    passes = 1 if H <= 512 else blocks(H, 256)               # of a matrix; few registers hold what a pass leaves
    N = blocks(H, 128 * passes) * 32
    ways = []
    for rows in 64, 32:
        for shared in True, False:
            states = 2 * rows * H
            budget = gpu.shared - 2816 - states - (N * passes * 1024 if shared else 0)
            for shape in shapes(budget + 64 * H, H, GROUPS, N, 2 * passes, True):
                if not shape.stream:
                    vars(shape).update(at_ring=states, bytes=shape.bytes - 64 * H + states, rows=rows, shared=shared,
                                       each=N // 16, all=N // 16 * passes, at_past=rows * H)
                    ways.append(shape)
    # a deep ring; then the first way to cut rows and tables; then the widest pieces
    return min(ways, key=lambda shape: (shape.shallow, -shape.rows, not shape.shared, -shape.KP))


def _column_function(shape):
    """Device function: the first column of a thread's 16 columns k."""
    EACH, N = shape.each, shape.N

    @device
    def column_of(k, t):
        return (k // EACH) * (GROUPS * N) + (t >> 7) * N + (k % EACH) * 16 + (t & 3) * 4
    return column_of


def _table_functions(cfg, nz, shape):
    """Device functions of the tables of a thread: load_table(thread, matrix, k); store_table(thread, matrix, k, w);
    make_table(thread, matrix, k), the four words of 16 columns; column_noises(thread, matrix, k), of four of these;
    add_inputs(thread, total, word, noises, matrix, column), total + what four inputs add to sb."""
    H = cfg.HIDDEN_DIM
    SHARED, ALL = shape.shared, shape.all
    # of a matrix of the call
    COLUMN, INPUT, EACH = 2 * H, 3 * H, 3 * H + input_words(cfg, H)
    AT_OWN = shape.bytes
    MODE = cfg.ADAPTIVE_NOISE_MODE
    input_term = nz.input_term
    column_of = _column_function(shape)

    @device
    def place_of(thread, matrix, k):
        if SHARED:
            return int32(thread.ring.base + AT_OWN + (matrix * ALL + k) * (THREADS * 16) + thread.ring.t * 16)
        return ((int64(cuda.blockIdx.x) * 2 + matrix) * ALL + k) * (THREADS * 4) + thread.ring.t * 4

    @called
    def load_table(thread, matrix, k):
        at = place_of(thread, matrix, k)
        return ptx.load_shared4(at) if SHARED else ptx.load4(thread.tables, at)

    @device
    def store_table(thread, matrix, k, w):
        if SHARED:
            ptx.store_shared4(place_of(thread, matrix, k), w[0], w[1], w[2], w[3])
        else:
            ptx.store4(thread.tables, place_of(thread, matrix, k), w[0], w[1], w[2], w[3])

    @device
    def make_table(thread, matrix, k):
        at = thread.first + min(column_of(k, thread.ring.t), H - 4)
        mine = at + matrix * EACH
        even, odd = ptx.load4(thread.drawn, mine), ptx.load4(thread.drawn, mine + H)
        n = ptx.load4(thread.drawn, mine + COLUMN)
        other = ptx.load4(thread.drawn, at + (1 - matrix) * EACH + INPUT)
        added = int32(127 * (1 - matrix))                    # b_f + 127, without a sign
        w0 = int32(0)
        w1 = int32(0)
        w2 = int32(0)
        w3 = int32(0)
        for e in range(4):
            shift = int32(8 * e)
            w0 = int32(w0 | ((n[e] & 255) << shift))
            w1 = int32(w1 | (((clip(even[e]) + added) & 255) << shift))
            w2 = int32(w2 | (((clip(odd[e]) + added) & 255) << shift))
            w3 = int32(w3 | ((other[e] & 255) << shift))
        return w0, w1, w2, w3

    @device
    def column_noises(thread, matrix, k):
        if MODE == 2:                                        # does not fit a byte
            column = min(column_of(k, thread.ring.t), H - 4)
            return ptx.load4(thread.drawn, thread.first + matrix * EACH + COLUMN + column)
        word = load_table(thread, matrix, k)[0]
        return byte(word, 0), byte(word, 1), byte(word, 2), byte(word, 3)

    @called
    def add_inputs(thread, total, word, noises, matrix, column):
        if MODE == 0:
            return ptx.dp4a(word, noises, total)
        at = thread.first + matrix * EACH + INPUT + column
        c = f = ptx.load4(thread.drawn, at)
        if MODE == 2:
            f = ptx.load4(thread.drawn, at + H)
        for e in range(4):
            total = int32(total + input_term(byte(word, e), c[e], ptx.bits_float(f[e])))
        return total

    return load_table, store_table, make_table, column_noises, add_inputs


@device
def store_sums(parts, vector, row, side, sums, q):
    s0, s1 = quad_sum(sums[0]), quad_sum(sums[1])
    if q == 0:
        parts[(vector * 64 + row) * GROUPS + side], parts[(vector * 64 + row + 8) * GROUPS + side] = s0, s1

@device
def whole_sum(address, vector, row):
    s = ptx.load_shared4(address + (vector * 64 + row) * (4 * GROUPS))
    return int32(s[0] + s[1] + (s[2] + s[3]))


def _state_functions(cfg, gpu, shape, pairs, load_table, add_inputs):
    """Device functions of a pass: gate, f and the gated states of both rows to shared memory; advance, the new states
    of both rows, and x."""
    H = cfg.HIDDEN_DIM
    KS, RAGGED, AT_PAST = shape.each, shape.columns != 2 * H, shape.at_past
    gated, next_state, opened, candidates_of = gru_parts.state_functions(gpu.cc)
    _, added = gru_parts.int16_functions(gpu.cc)
    column_of = _column_function(shape)
    registers = unroll if cfg.ADAPTIVE_NOISE_MODE > 0 else gpu.unroll        # of bodies with scaled noise, likewise

    @device
    @registers
    def gate(thread, ahead, row0):
        q = thread.ring.t & 3
        for j in unrolled(range(KS // 2)):
            column = column_of(ahead * KS + 2 * j, thread.ring.t)
            if not RAGGED or column < H:
                at_row = row0 * (H // 4) + (column - q * 4) // 4 + q * 2
                old0, old1 = ptx.load2(thread.gates, at_row), ptx.load2(thread.gates, at_row + 2 * H)
                for g in unrolled(range(2)):
                    i = 2 * j + g
                    w = load_table(thread, 0, ahead * KS + i)
                    at_h = int32(thread.at_word + (column - q * 4 + g * 16) * 8)
                    for d in unrolled(range(2)):
                        y, z = pairs(thread.acc, 8 * i + 2 * d)
                        word, bias = (old0[g], w[1]) if d == 0 else (old1[g], w[2])
                        y, z = opened(y, z, word, ptx.byte_permute(bias, 0, 0x4140), ptx.byte_permute(bias, 0, 0x4342))
                        thread.f[2 * (ahead * KS + i) + d] = ptx.bytes4(y, z)
                        past = gated(y, z, ptx.read_shared(at_h + d * (8 * H)))
                        if thread.works:
                            ptx.store_shared(at_h + AT_PAST + d * (8 * H), past)
                        thread.sums[d] = add_inputs(thread, thread.sums[d], past, w[3], 1, column + g * 16)

    @device
    @registers
    def advance(thread, ahead, row0, live, goes_on):
        q = thread.ring.t & 3
        for j in unrolled(range(KS // 2)):
            column = column_of(ahead * KS + 2 * j, thread.ring.t)
            if not RAGGED or column < H:
                at_row = row0 * (H // 4) + (column - q * 4) // 4 + q * 2
                w0, w1 = load_table(thread, 1, ahead * KS + 2 * j), load_table(thread, 1, ahead * KS + 2 * j + 1)
                for d in unrolled(range(2)):
                    at, out = at_row + d * (2 * H), int32s(2)
                    old, both_x = ptx.load2(thread.candidates, at), ptx.load2(thread.x, at)
                    for g in unrolled(range(2)):
                        i = 2 * j + g
                        w = w0 if g == 0 else w1
                        bias = w[1] if d == 0 else w[2]
                        at_h = int32(thread.at_word + (column - q * 4 + g * 16) * 8 + d * (8 * H))
                        y, z = pairs(thread.acc, 8 * i + 2 * d)
                        y, z = candidates_of(y, z, old[g], ptx.low2(bias), ptx.high2(bias))
                        y, z = next_state(thread.f[2 * (ahead * KS + i) + d], ptx.read_shared(at_h), y, z)
                        h, out[g] = ptx.bytes4(y, z), added(both_x[g], y, z)
                        h = h if goes_on else int32(0)
                        if thread.works:
                            ptx.store_shared(at_h, h)
                        thread.sums[d] = add_inputs(thread, thread.sums[d], h, w[3], 0, column + g * 16)
                    if live:
                        ptx.store2(thread.x, at, out[0], out[1])

    return gate, advance


def _passes_function(cfg, gpu, shape, as_column, begin, ZERO, ring, column_noises, pairs, load_table, add_inputs):
    """Device function: all passes of a matrix. as_column, begin, ZERO, pairs: of early_noise_quotients; ring: multiply
    and finish of product_functions."""
    H = cfg.HIDDEN_DIM
    KS = shape.each
    PAST = shape.rows * H // (8 * shape.KP)
    PER, PIECES = shape.passes // 2, shape.pieces
    multiply, finish = ring
    gate, advance = _state_functions(cfg, gpu, shape, pairs, load_table, add_inputs)

    @gpu.device
    def product(thread, ahead, matrix, step, s0, s1):
        """acc = the product of a pass, with its noise."""
        acc, ring = thread.acc, thread.ring
        for j in unrolled(range(KS)):
            noises = column_noises(thread, matrix, ahead * KS + j)
            for g in unrolled(range(4)):
                i, n = accumulator_of(j, 0, g), as_column(noises[g])
                acc[i], acc[i + 2] = begin(s0, n, int32(ZERO)), begin(s1, n, int32(ZERO))
        finish(acc, ring, multiply(acc, ring, step, matrix * PAST), False, False, 0, 0)

    @device
    @unroll
    def columns(thread, matrix, step, s0, s1, row0, live, goes_on):
        for d in unrolled(range(PER)):
            product(thread, d, matrix, step + d * PIECES, s0, s1)
            if matrix == 0:
                gate(thread, d, row0)
            else:
                advance(thread, d, row0, live, goes_on)

    return columns


def recur_kernel(cfg, nz, gpu, shape):
    """The state of a layer through n positions: x = clip(x + h) in place. Launch [blocks] of 512 threads. A warp has
    eight pairs, a warpgroup N columns of each of its passes. A thread finds the constants of its columns in `tables`,
    16 bytes [matrix][16 columns][thread]: column noise, biases of both members, input noise of the other matrix, as
    bytes. What noise modes make larger it takes from `drawn`.

    drawn: of each matrix its bias, columns and inputs. at: packed word of U_f; U_h follows. Position p of pair i is
    tokens[i * width + skip + p]. states words of int8 [pairs, H]: where `begin`, pairs begin with them."""
    H = cfg.HIDDEN_DIM
    BULK = gpu.wgmma
    ROWS, RAGGED = shape.rows, shape.columns != 2 * H
    ALL = shape.all
    STEPS = shape.steps // 2                                 # of a matrix
    ACC = shape.N // 2
    WORDS = 2 * ALL
    SUMS = 2 * 64 * GROUPS
    open_ring, _, multiply, finish = product_functions(gpu, shape, matrices=2, own_rows=True)
    as_row, as_column, begin, ZERO, pairs = early_noise_quotients(cfg, H)
    column_of = _column_function(shape)
    load_table, store_table, make_table, column_noises, add_inputs = _table_functions(cfg, nz, shape)
    columns = _passes_function(cfg, gpu, shape, as_column, begin, ZERO, (multiply, finish), column_noises, pairs,
                               load_table, add_inputs)

    @cuda.jit(launch_bounds=THREADS)
    @gpu.unroll
    def recur(drawn: A32, each, packed: A32, at, tokens: A32, width, skip, n, units, gates: A32, candidates: A32,
              x: A32, states: A32, tables: A32, begin):
        parts = cuda.shared.array(SUMS, int32, 128)          # [of h, of past][row][warpgroup]
        ring = open_ring(n * (2 * STEPS), 0, 1, packed, packed, at)
        t = ring.t
        group = t >> 7
        lane = t & 31
        warp = (t & 127) >> 5
        q = t & 3
        row, at_parts = warp * 16 + (lane >> 2), ptx.shared_address(parts, 0)
        pair, works = cuda.blockIdx.x * (ROWS // 2) + warp * 8 + (lane >> 2), warp * 16 < ROWS
        live = int32(1) if works and pair < units else int32(0)
        pair = min(pair, units - 1)
        at_token = int64(pair) * width + skip
        at_word = int32(ring.base + warp * (16 * H) + (lane >> 2) * 16 + q * 4)
        acc, f, sums = int32s(ACC), int32s(WORDS), int32s(2)
        sums[0] = 0
        sums[1] = 0
        thread = Thread(ring, tables, drawn, pair * each, at_word, works, acc, f, sums, gates, candidates, x)
        for k in range(ALL):
            column = column_of(k, t)
            for matrix in range(2):
                w = make_table(thread, matrix, k)
                store_table(thread, matrix, k, w)
                if matrix == 1 and works and (not RAGGED or column < H):
                    at_h, state = int32(at_word + (column - q * 4) * 8), int32(0)
                    if begin and tokens[at_token] != 0:
                        state = states[int64(pair) * (H // 4) + column // 4]
                    ptx.store_shared(at_h, state)
                    ptx.store_shared(at_h + 8 * H, state)
                    sums[0] = add_inputs(thread, sums[0], state, w[3], 0, column)
        sums[1] = sums[0]
        store_sums(parts, 0, row, group, sums, q)
        if BULK:
            ptx.proxy_fence()
        cuda.syncthreads()                                   # the sums of the first product are whole
        for position in range(n):
            row0, writes = row_of(pair, position, n), ptx.keep_in_loop(live) != 0
            goes_on = tokens[at_token + min(position + 1, n - 1)] != 0
            for matrix in range(2):
                s0 = as_row(whole_sum(at_parts, matrix, row))
                s1 = as_row(int32(-whole_sum(at_parts, matrix, row + 8)))
                sums[0], sums[1] = 0, 0
                columns(thread, matrix, (2 * position + matrix) * STEPS, s0, s1, row0, writes, goes_on)
                store_sums(parts, 1 - matrix, row, group, sums, q)
                if BULK:
                    ptx.proxy_fence()
                cuda.syncthreads()  # so are the next; two places take turns, so one barrier is enough

    return Kernel(recur, shape.bytes + (2 * ALL * THREADS * 16 if shape.shared else 0), shape)


# --- all of them ------------------------------------------------------------------------------------------------------

class Plan(noise.Plan):
    """The calls of a forward pass in order: where the noise of each begins."""

    def __init__(self, cfg):
        super().__init__(cfg)
        self.layers = []
        for i in range(cfg.N_LAYERS):
            embeds = () if i else (self.inputs("embedding"), self.looked_up("embedding"))
            self.layers.append(SimpleNamespace(
                ln_1=self.add(self.vector("ln_1", i), self.inputs("w_f", i), self.inputs("w_h", i), *embeds),
                gates=self.add(self.columns("w_f", i), self.columns("w_h", i)),
                recur=self.add(self.vector("b_f", i), self.columns("u_f", i), self.inputs("u_f", i),
                               self.vector("b_h", i), self.columns("u_h", i), self.inputs("u_h", i)),
                ln_2=self.add(self.vector("ln_2", i), self.inputs("w_up", i)),
                inner=self.add(self.columns("w_up", i), self.inputs("w_down", i)),
                down=self.add(self.columns("w_down", i))))
        self.ln_f = self.add(self.vector("ln_f"), self.inputs("head"))
        self.head = self.add(self.columns("head"))


class Kernels:
    """The kernels of the recurrent model, for every width: `all` of them; `matrices`, the words at which packed
    matrices begin."""

    def __init__(self, cfg, packing, gpu):
        self.cfg, self.plan = cfg, Plan(cfg)
        tensors = parameters.tensors(cfg)
        named = {t.name: t for t in tensors}
        self.rows_at = packing.add(named["embedding"], ROWS, cfg.VOCAB_SIZE, cfg.HIDDEN_DIM)
        nz, self.shapes = build_noise(cfg), _shapes(cfg, gpu)
        self.norms = [norm_kernel(cfg, nz, gpu.cc, 2, embeds) for embeds in (True, False)[:cfg.N_LAYERS]]
        pieces = self.shapes["down"].KP
        self.products = {kind: _product_kernel(cfg, nz, gpu, cut, pieces) for kind, cut in self.shapes.items()}
        shape = _recurrence(cfg, gpu)
        self.recur = recur_kernel(cfg, nz, gpu, shape)
        # in this order: the matrices of a kernel lie together, w_h behind w_f, u_h behind u_f, whose columns are of one
        # shape
        gates, inner, down = self.shapes.values()
        cuts = dict(w_f=gates, w_h=gates, u_f=shape, u_h=shape, w_up=inner, w_down=down)
        self.matrices = {}
        for t in sorted((t for t in tensors if t.name in cuts), key=lambda t: (t.layer, [*cuts].index(t.name))):
            cut = cuts[t.name]
            columns = cut.columns // 2 if cut is shape else cut.columns
            self.matrices[t.name, t.layer] = packing.add(t, QUADS, columns, cut.KP)
        self.norm_f = norm_kernel(cfg, nz, gpu.cc, 1)
        self.head, self.draw = head_kernel(cfg, gpu), noise.draw_kernel(cfg)
        self.all = [self.draw, *self.norms, *self.products.values(), self.recur, self.norm_f, self.head]
        head = named["head"]
        self.at_tiles = packing.add(head, PLAIN, self.head.shape.columns, self.head.shape.KP)
        self.at_columns = packing.add(head, ROWS, head.cols, head.rows)

    def layout(self, units, n):
        """({name: (first byte, end)} of the scratch arrays, bytes of all). The inner values of the MLP take the place
        of gates and candidates."""
        rows = rows_of_places(units * n)
        size, shape = rows * self.cfg.HIDDEN_DIM, self.recur.shape
        tables = 4 if shape.shared else blocks(units, shape.rows // 2) * shape.columns * 128
        out, end = ranges(dict(drawn=4 * self.plan.room(units), x=size, gates=size, candidates=size, more=2 * size,
                               normed=size, sb=12 * rows, tables=tables))
        return out | dict(u=(out["gates"][0], out["more"][1])), end
