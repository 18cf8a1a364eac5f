"""The kernels of the recurrent model in which a warp owns rows: all kernels of models whose weights fit shared memory;
with wgmma on cc 9.0 the gates, the MLP and the head where H = 256.

`kernels.gru` has the general path and chooses between the two; `kernels.gru_parts` has what the kernels are made of.
The general path makes 505 and 752 M tokens/s where this one makes 733 and 1,480 (H 128 and 64, one layer, V 256, T 100,
H200, commit 7e8ec62). A layer is three kernels: gates (the embedding, ln_1, W_f, W_h), the recurrence, and the MLP
(ln_2, up, down); the head ends the pass. Between two products only x, gates and candidates leave the registers. The
weights of a kernel stay in shared memory: reading them from the caches is too slow (on a GPU with 99 KiB of shared
memory the general path makes 142 M tokens/s where H = 256, this path made 41). A warp takes 16 rows at a time: members
0 and 1 of one pair at eight positions, or, in the recurrence, of eight pairs at one position. No warp waits for
another, unless a product is wgmma: then the four warps of a warpgroup go through four pairs side by side.

Rows and columns lie in device memory as in kernels.gru, x as x + 128.
"""

from types import SimpleNamespace
from typing import NamedTuple

from numba import cuda, int8, int32, int64, uint32

from kernels import gru_parts, ptx
from kernels.gru_parts import (B_APART, B_F, DOWN, GATES, HIGHEST, INNER, LOWEST, NORM_1, NORM_2, OFFSET, RECUR,
                               U_APART, U_F, U_INPUT, W_DOWN_INPUT, W_H, added_function, begin_with, both, input_bytes,
                               late_noise_quotients, norm_functions, row_functions, row_of)
from kernels.host import Kernel
from kernels.pairs import pair_functions, source_of
from kernels.parts import A32, A64, A8, AU32, PLAN, across, clip, int32s, quad_sum, thread, unrolled, weight
from kernels.rules import device, loss_function, loudest
from model import parameters

LARGEST_V = 1024                            # logits that a warp keeps


def fits(cfg, shared_limit):
    """Whether this path serves a configuration on a device."""
    return {"gates", "recur", "mlp"} <= sizes(cfg, shared_limit).keys()


# --- shared memory ----------------------------------------------------------------------------------------------------

def sizes(cfg, limit, wgmma=False):
    """{kernel: its size} of the kernels whose weights and tables fit `limit` bytes of shared memory. A size: `weights`,
    bytes of them; `at`, where the tables of the warps begin; `table`, bytes of those of a warp; `warps` of a block;
    `bytes` of all; `columns` of a product; `together`, warps that make one. Without "head" kernels.head serves."""
    H, V = cfg.HIDDEN_DIM, cfg.VOCAB_SIZE
    noise = input_bytes(cfg, H, 4)
    few = 12 if wgmma else 8
    out = {}

    def add(name, weights, table, most, shared=0):
        """most: warps for which there are registers; shared: bytes beside the weights that all warps share."""
        at = weights + shared
        warps = min(most, (limit - 1024 - at) // table) // 4 * 4     # the driver and static arrays take 1024 bytes
        if warps > 0:                                        # the same for each scheduler
            out[name] = SimpleNamespace(weights=weights, table=table, warps=warps, at=at, bytes=at + warps * table,
                                        columns=128 if wgmma else 32, together=4 if wgmma else 1)

    add("gates", 2 * H * H, 24 * H + 2 * noise + H * (8 if cfg.ADAPTIVE_NOISE_MODE else 4), 16 if H <= 128 else few)
    add("recur", 2 * H * H, 128 * H + 2 * input_bytes(cfg, H, 32), 16 if H <= 64 else 12 if H <= 128 else 8)
    add("mlp", 8 * H * H, 36 * H + noise + input_bytes(cfg, 4 * H, 4), 16 if H <= 64 else 12 if H <= 128 else 8)
    if V <= LARGEST_V and V % 32 == 0:
        add("head", H * V, 20 * V + 16 * H + noise, 16 if H <= 128 else few, 256 * 32 * 4)
    return out


class Warp(NamedTuple):
    """What a warp has in a running kernel. Numba finds the types of the fields."""
    words: object           # shared memory, also as bytes, and its shared address
    bytes_: object
    base: int
    mine: int               # first byte of the warp's tables, and their shared address
    table: int
    t: int                  # thread; its lane is 4 g + q
    lane: int
    g: int
    q: int


def enter_function(size):
    """Device function that brings the weights of a kernel, from packed word `first` on, into shared memory, and returns
    the Warp of thread t."""
    WGMMA = size.together > 1
    AT = size.at
    TABLE = size.table
    WEIGHTS = size.weights
    THREADS = 32 * size.warps

    @device
    def enter(packed, first, t):
        words, bytes_ = cuda.shared.array(0, int32), cuda.shared.array(0, int8)
        base = ptx.shared_address(words, 0)
        lane = t & 31
        mine = AT + (t >> 5) * TABLE
        for i in range(t * 16, WEIGHTS, THREADS * 16):
            ptx.copy_async16(int32(base + i), packed, first + i // 4)
        ptx.copy_commit()
        ptx.copy_wait_all()
        if WGMMA:
            ptx.proxy_fence()
        cuda.syncthreads()
        return Warp(words, bytes_, base, mine, int32(base + mine), t, lane, lane >> 2, lane & 3)
    return enter


# --- gates and candidates ---------------------------------------------------------------------------------------------

def gates_kernel(cfg, nz, cc, size, first_layer):
    """gates, candidates = W_f y, W_h y with y = ln_1(x); in the first layer x is the embedding, which is stored. Launch
    [blocks] of size.warps warps; a warp takes eight positions after the other.

    call: the layer's first row of the plan. at: packed word of W_f; W_h follows. rows_at, tokens, width, skip: as of
    gru_parts.norm_kernel."""
    H = cfg.HIDDEN_DIM
    COLUMNS = size.columns
    ACC = size.columns // 2
    TOGETHER = size.together
    WORDS = H // 8
    GROUPS, BITS_OF_GROUP = size.warps // TOGETHER, 7 if TOGETHER > 1 else 5
    AT_LN = 8 * H
    AT_EMBEDDING = 24 * H + 2 * input_bytes(cfg, H, 4)
    job_shift = nz.shift
    column = pair_functions(cfg, nz).column
    fill_norm, norm = norm_functions(cfg, nz, cc, 2)
    fill_columns, of_token, embedded = gru_parts.embedding_functions(cfg, nz, cc)
    load_rows, _ = row_functions(H)
    enter = enter_function(size)
    START, word_of, factor, pairs = late_noise_quotients(cfg, nz, cc, H)
    origin, product = gru_parts.warp_product_functions(COLUMNS, H // 32, wgmma=TOGETHER > 1)

    @unrolled
    def embed(row_x, x, at_x, packed, at_token, at_noise, token_noise, token_factor, shift, q):
        """Both rows of x. Stored behind the loop they would take more registers than there are on cc 9.0."""
        for d in range(H // 32):
            embedded(row_x, 4 * d, packed, at_token + d * 8, int32(at_noise + d * 128), token_noise, token_factor,
                     shift, q)
            for m in range(2):
                ptx.store2(x, at_x + m * (2 * H) + d * 8, row_x[4 * d + m], row_x[4 * d + 2 + m])

    @device
    def multiply(acc, y, at_weights, start, out, row, s0, s1, shift, at_noise, q):
        """out = the quotients of both rows. s0, s1: sums sb."""
        s0, s1 = factor(s0, 0, shift), factor(s1, 1, shift)
        for b in range(H // COLUMNS):
            product(acc, y, at_weights, b * (COLUMNS * H), start)
            for j in range(COLUMNS // 32):
                at = int32(at_noise + b * (4 * COLUMNS) + j * 128)
                noise0, noise1 = ptx.load_shared4(at), ptx.load_shared4(at + 64)
                for m in range(2):
                    s = s1 if m else s0
                    z, w = pairs(acc, 16 * j + 2 * m, s, noise0, shift)
                    u, v = pairs(acc, 16 * j + 8 + 2 * m, s, noise1, shift)
                    ptx.store2(out, (row + 8 * m) * (H // 4) + b * (COLUMNS // 4) + j * 8 + q * 2, ptx.bytes4(z, w),
                               ptx.bytes4(u, v))

    @cuda.jit(launch_bounds=32 * size.warps)
    def gates_and_candidates(call, at, rows_at, plan: A32, weights: A8, packed: A32, overlay: A8, tokens: A32, width,
                             skip, n, job: AU32, offset, units, x: A32, gates: A32, candidates: A32):
        warp, source = enter(packed, at, thread()), source_of(plan, 0, weights, overlay, job, offset)
        q = warp.q
        table = warp.table
        at_weights = origin(warp.base, warp.t)
        shift = job_shift(job)
        acc = int32s(ACC)
        row_x = int32s(WORDS)
        y = int32s(WORDS)
        start = begin_with(START)
        turns = (n - 1) // 8 + 1
        steps = ((units - 1) // TOGETHER + 1) * turns
        each = (steps - 1) // (cuda.gridDim.x * GROUPS) + 1
        begin = (cuda.blockIdx.x * GROUPS + (warp.t >> BITS_OF_GROUP)) * each
        unit, first = min(begin // turns * TOGETHER + (warp.t >> 5) % TOGETHER, units - 1), begin % turns * 8
        for step in range(begin, min(begin + each, steps)):
            if first == 0 or step == begin:
                cuda.syncwarp()                              # no lane reads the tables any more
                for i in range(warp.lane, H, 32):
                    fill_norm(warp.words, warp.bytes_, warp.mine + AT_LN, source, (call + NORM_1) * PLAN, unit, i)
                    for z in range(2):
                        warp.words[warp.mine // 4 + z * H + i] = word_of(
                            column(source, unit, i, (call + GATES) * PLAN + z * W_H))
                    if first_layer:
                        fill_columns(warp.words, (warp.mine + AT_EMBEDDING) // 4, source, unit, i)
                cuda.syncwarp()
            position = min(first + warp.g, n - 1)
            row = row_of(unit, position, n)
            if first_layer:
                token = tokens[int64(unit) * width + skip + position]
                token_noise, token_factor = of_token(source, unit, token, shift)
                embed(row_x, x, row * (H // 4) + q * 2, packed, rows_at + int64(token) * (H // 4),
                      int32(table + AT_EMBEDDING), token_noise, token_factor, shift, q)
            else:
                load_rows(row_x, x, row * (H // 4), q)
            (f0, h0), (f1, h1) = norm(row_x, y, int32(table + AT_LN), q)
            multiply(acc, y, at_weights, start, gates, row, f0, f1, shift, int32(table + q * 16), q)
            multiply(acc, y, at_weights + H * H, start, candidates, row, h0, h1, shift,
                     int32(table + 4 * H + q * 16), q)
            first += 8
            if first >= n:
                unit, first = min(unit + TOGETHER, units - 1), 0

    return Kernel(gates_and_candidates, size.bytes)


# --- the recurrence ---------------------------------------------------------------------------------------------------

def register_recur_kernel(cfg, nz, cc, size):
    """One layer's state through n positions: x = clip(x + h) in place. Launch [blocks] of size.warps warps; a warp
    takes eight pairs after eight others, lane 4 g + q has columns of pair g.

    at: packed word of U_f; U_h follows. call, tokens, states, begin, keep as kernels.gru.recur_kernel."""
    H = cfg.HIDDEN_DIM
    STEPS, WORDS = H // 32, H // 8
    W = size.warps
    # tables of a warp, 16 bytes [16 columns k][lane]: column noise of U_f and U_h, biases [member][pair of columns];
    # then input noise
    KS = H // 16
    A_H = 512 * KS
    BIAS_F, BIAS = 1024 * KS, 512 * KS
    AT_B = 2048 * KS
    OWN_B = input_bytes(cfg, H, 32)
    job_shift = nz.shift
    of_pair = pair_functions(cfg, nz)
    noise_of, vector = of_pair.column, of_pair.vector
    fill_input, add = gru_parts.input_functions(cfg, nz, H, 32)
    enter = enter_function(size)
    START, word_of, factor, pairs = late_noise_quotients(cfg, nz, cc, H)
    origin, product = gru_parts.warp_product_functions(32, STEPS)
    gated, next_state, opened, candidates_of = gru_parts.state_functions(cc)
    load_rows, store_rows = row_functions(H)
    added = added_function(cc)

    @device
    def sums(left, at_noise, lane, shift):
        """What the inputs in both rows add to a product, as `pairs` wants it."""
        s0, s1 = int32(0), int32(0)
        for k in range(KS):
            s0, s1 = add(left[2 * k], at_noise, k, lane, s0), add(left[2 * k + 1], at_noise, k, lane, s1)
        return factor(quad_sum(s0), 0, shift), factor(quad_sum(s1), 1, shift)

    @unrolled
    def columns(which, acc, left, at_weights, start, table, lane, shift, old, h, f, past, x):
        """which = 0: f and the gated states; 1: the new states and x. left: what U_f or U_h multiplies."""
        s0, s1 = sums(left, int32(table + AT_B + which * OWN_B), lane, shift)
        for d in range(STEPS):
            product(acc, left, at_weights, which * (H * H) + d * (32 * H), start)
            for i in range(2):
                k, at = 2 * d + i, int32(table + (2 * d + i) * 512 + lane * 16)
                n, bias = ptx.load_shared4(at + which * A_H), ptx.load_shared4(at + BIAS_F + which * BIAS)
                for m in range(2):
                    row = 2 * k + m
                    y, z = pairs(acc, 8 * i + 2 * m, s1 if m else s0, n, shift)
                    if which == 0:
                        y, z = opened(y, z, old[row], bias[2 * m], bias[2 * m + 1])
                        f[row], past[row] = ptx.bytes4(y, z), gated(y, z, h[row])
                    else:
                        y, z = candidates_of(y, z, old[row], bias[2 * m], bias[2 * m + 1])
                        y, z = next_state(f[row], h[row], y, z)
                        h[row], x[row] = ptx.bytes4(y, z), added(x[row], y, z)

    @cuda.jit(launch_bounds=32 * W)
    def recur(call, at, plan: A32, weights: A8, packed: A32, overlay: A8, tokens: A32, width, skip, n, units, job: AU32,
              offset, gates: A32, candidates: A32, x: A32, states: A32, begin, keep):
        warp, source = enter(packed, at, cuda.threadIdx.x), source_of(plan, 0, weights, overlay, job, offset)
        words = warp.words
        bytes_ = warp.bytes_
        mine = warp.mine
        lane = warp.lane
        q = warp.q
        table = warp.table
        at_weights = origin(warp.base, warp.t)
        p = (call + RECUR) * PLAN
        acc, start = int32s(16), begin_with(START)
        h = int32s(WORDS)
        past = int32s(WORDS)
        f = int32s(WORDS)
        old = int32s(WORDS)
        both_x = int32s(WORDS)
        shift = job_shift(job)
        for eight in range(cuda.blockIdx.x * W + (warp.t >> 5), (units + 7) >> 3, cuda.gridDim.x * W):
            pair = min(eight * 8 + warp.g, units - 1)
            for i in range(4 * KS):                          # a lane has its tables to itself
                k, e = i >> 2, i & 3
                c = k * 16 + q * 4 + e
                for which in range(2):
                    words[(mine + which * A_H + k * 512 + lane * 16) // 4 + e] = word_of(
                        noise_of(source, pair, c, p + U_F + which * U_APART))
                    fill_input(words, bytes_, mine + AT_B + which * OWN_B, (k * 32 + lane) * 4 + e, source,
                               p + U_F + U_INPUT + which * U_APART, pair, c)
                    even, odd = vector(source, p + B_F + which * B_APART, pair, c)
                    more = int32(127 * (1 - which) - OFFSET)     # b_f + 127, and without the offset of the quotients
                    to = mine + BIAS_F + which * BIAS + k * 512 + lane * 16 + e * 2
                    for m in range(2):
                        value = int32(clip(odd if m else even) + more)
                        bytes_[to + 8 * m], bytes_[to + 8 * m + 1] = value, int32(value >> 8)
            at_token = int64(pair) * width + skip
            for k in range(2 * KS):
                h[k] = 0
            if begin and tokens[at_token] != 0:
                for k in range(KS):
                    h[2 * k] = states[int64(pair) * (H // 4) + k * 4 + q]
                    h[2 * k + 1] = h[2 * k]
            for position in range(n):
                at_row = row_of(pair, position, n) * (H // 4)
                load_rows(old, gates, at_row, q)
                following = tokens[at_token + min(position + 1, n - 1)]
                columns(0, acc, h, at_weights, start, table, lane, shift, old, h, f, past, both_x)
                load_rows(old, candidates, at_row, q)
                load_rows(both_x, x, at_row, q)
                columns(1, acc, past, at_weights, start, table, lane, shift, old, h, f, past, both_x)
                store_rows(both_x, x, at_row, q)
                if following == 0 and position + 1 < n:
                    for k in range(2 * KS):
                        h[k] = 0
            if keep:
                for k in range(KS):
                    states[int64(pair) * (H // 4) + k * 4 + q] = h[2 * k]

    return Kernel(recur, size.bytes)


# --- the MLP ----------------------------------------------------------------------------------------------------------

def mlp_functions(cfg, nz, cc, columns, up, down, offset=0):
    """(bytes, fill, norm, inner, finish): bytes of a pair's tables, which are column noise of W_up, norm, column noise
    and input noise of W_down; and device functions of the MLP for 16 rows whose inner values stay in registers,
    `columns` of them at a time. up, down: word, factor and pairs as late_noise_quotients has them; those of down are
    `offset` too large. table: a shared address.

    fill(words, bytes_, at, source, call, pair, first, threads)     the tables at byte `at`, by `threads` threads
    norm(x, y, shift, table, q)                     y = ln(x) of both rows; the factors of their sums
    inner(acc, u, chunk, s, sb, shift, table, q)    u = inner values, s: what norm returned; sb + their sums with noise
    finish(sums, x, sb, shift, table, q)            x + the quotients of W_down
    """
    H = cfg.HIDDEN_DIM
    H4 = 4 * H
    column = pair_functions(cfg, nz).column
    AT_LN = 4 * H4
    AT_DOWN = 4 * H4 + 16 * H + input_bytes(cfg, H, 4)
    KS = columns // 16
    AT_INNER, added = AT_DOWN + 4 * H, added_function(cc, offset)
    fill_norm, normed = norm_functions(cfg, nz, cc, 1)
    fill_inner, add = gru_parts.input_functions(cfg, nz, H4, 4)
    up_word, up_factor, up_pairs = up
    down_word, down_factor, down_pairs = down

    @device
    def fill(words, bytes_, at, source, call, pair, first, threads):
        for i in range(first, H4, threads):
            words[at // 4 + i] = up_word(column(source, pair, i, (call + INNER) * PLAN))
            fill_inner(words, bytes_, at + AT_INNER, i, source, (call + INNER) * PLAN + W_DOWN_INPUT, pair, i)
        for i in range(first, H, threads):
            fill_norm(words, bytes_, at + AT_LN, source, (call + NORM_2) * PLAN, pair, i)
            words[(at + AT_DOWN) // 4 + i] = down_word(column(source, pair, i, (call + DOWN) * PLAN))

    @device
    def norm(x, y, shift, table, q):
        (s0, _), (s1, _) = normed(x, y, int32(table + AT_LN), q)
        return up_factor(s0, 0, shift), up_factor(s1, 1, shift)

    @device
    def inner(acc, u, chunk, s, sb, shift, table, q):
        for i in range(KS):
            k = KS * chunk + i
            n = ptx.load_shared4(table + k * 64 + q * 16)
            for m in range(2):
                y, z = up_pairs(acc, 8 * i + 2 * m, s[1] if m else s[0], n, shift)
                u[2 * i + m] = ptx.bytes4(y, z)
            for m in range(2):
                sb[m] = add(u[2 * i + m], int32(table + AT_INNER), k, q, sb[m])

    @unrolled
    def finish(sums, x, sb, shift, table, q):
        for d in range(2):
            s = down_factor(quad_sum(sb[d]), d, shift)
            for k in range(H // 16):
                n = ptx.load_shared4(table + AT_DOWN + k * 64 + q * 16)
                y, z = down_pairs(sums, 8 * k + 2 * d, s, n, shift)
                x[2 * k + d] = added(x[2 * k + d], y, z)

    return AT_INNER + input_bytes(cfg, H4, 4), fill, norm, inner, finish


def mlp_kernel(cfg, nz, cc, size):
    """x = clip(x + W_down (W_up ln_2(x))) in place, of n positions. Launch [blocks] of size.warps warps; a warp takes
    pair after pair. call: the layer's first row of the plan. at: packed word of W_up; W_down follows in chunks of 32
    inputs."""
    H = cfg.HIDDEN_DIM
    H4 = 4 * H
    W = size.warps
    job_shift = nz.shift
    SUMS, WORDS = H // 2, H // 8
    load_rows, store_rows = row_functions(H)
    enter = enter_function(size)
    UP_START, *of_up = late_noise_quotients(cfg, nz, cc, H, lowest=0 if cfg.MLP_RELU else -127)
    DOWN_START, *of_down = late_noise_quotients(cfg, nz, cc, H4)
    _, fill, norm, inner, finish = mlp_functions(cfg, nz, cc, 32, of_up, of_down, OFFSET)
    origin, up = gru_parts.warp_product_functions(32, H // 32)
    origin_down, down = gru_parts.warp_product_functions(H, 1, True)

    @cuda.jit(launch_bounds=32 * W)
    def mlp(call, at, plan: A32, weights: A8, packed: A32, overlay: A8, job: AU32, offset, units, n, x: A32):
        warp, source = enter(packed, at, cuda.threadIdx.x), source_of(plan, 0, weights, overlay, job, offset)
        table = warp.table
        q = warp.q
        at_weights = origin(warp.base, warp.t)
        at_down = origin_down(int32(warp.base + H4 * H), warp.t)
        acc = int32s(16)
        sums = int32s(SUMS)
        u = int32s(4)
        row_x = int32s(WORDS)
        y = int32s(WORDS)
        start, sb = begin_with(UP_START), int32s(2)
        shift = job_shift(job)
        for unit in range(cuda.blockIdx.x * W + (warp.t >> 5), units, cuda.gridDim.x * W):
            cuda.syncwarp()                                  # no lane reads the tables any more
            fill(warp.words, warp.bytes_, warp.mine, source, call, unit, warp.lane, 32)
            cuda.syncwarp()
            for first in range(0, n, 8):
                row = row_of(unit, min(first + warp.g, n - 1), n) * (H // 4)
                load_rows(row_x, x, row, q)
                s = norm(row_x, y, shift, table, q)
                sb[0], sb[1] = 0, 0
                for i in range(SUMS):
                    sums[i] = DOWN_START
                for chunk in range(H4 // 32):
                    up(acc, y, at_weights, chunk * (32 * H), start)
                    inner(acc, u, chunk, s, sb, shift, table, q)
                    down(sums, u, at_down, chunk * (32 * H), start)
                finish(sums, row_x, sb, shift, table, q)
                cuda.syncwarp()                              # at the end of the window lanes have the same row
                store_rows(row_x, x, row, q)

    return Kernel(mlp, size.bytes)


# --- the MLP on cc 9.0 where H = 256: a wgmma kernel ------------------------------------------------------------------
# With the general products and norms a layer took twice as long (179 against 356 M tokens/s, one layer, V 256, T 100,
# H200, commit e65f980): between up and down 4 H bytes a row would leave the chip.

WGMMA_H, LEAST_SEQ_LEN = 256, 32            # then the 32 positions of a tile belong to two pairs at most
WGMMA_SHARED = 227 * 1024
TILE_ROWS, LINE = 64, 32                         # rows of a warpgroup; words of a line of the cache
GROUPS = 2                                  # warpgroups of a block


def wgmma_fits(cfg, cc, shared_limit):
    """Whether it serves a configuration on a device."""
    return (tuple(cc) == (9, 0) and cfg.TENSOR_CORES != "mma" and shared_limit >= WGMMA_SHARED
            and (cfg.HIDDEN_DIM, cfg.ADAPTIVE_NOISE_MODE) == (WGMMA_H, 0) and cfg.SEQ_LEN >= LEAST_SEQ_LEN
            and parameters.divisor(cfg, WGMMA_H) == 256 and cfg.NOISE_SHIFTS[-1] <= 8
            and WGMMA_H * 127 * ((127 << 8) + (loudest(cfg) ** 2 << 8 - cfg.NOISE_SHIFTS[0])) < 2 ** 31)


def integer_quotients(cfg):
    """For sums of integers (word, factor, pairs) of W_up and of W_down, as late_noise_quotients has them. A quotient
    of W_up is (acc * 2^(16 - D) + s * n * 2^(16 - D - N)) >> 16, for accumulator, sum sb with the member's sign, column
    noise, divisor 2^D = 2^8 and noise shift N: the upper half of a word, and two of them are clipped by one
    instruction. Instead of a shift its pairs are given 256 (of a constant ptxas would make shifts, which the busier
    units take)."""
    DOWN_SHIFT, LOW = parameters.divisor(cfg, 4 * WGMMA_H).bit_length() - 1, 0 if cfg.MLP_RELU else LOWEST

    @device
    def up_factor(total, member, shift):
        return int32(gru_parts.signed(total, member, shift) << int32((8 - shift) & 31))

    @device
    def up_pairs(acc, i, s, n, unit):
        a, b = int32(acc[i] * unit + s * n[0]), int32(acc[i + 1] * unit + s * n[1])
        c, d = int32(acc[i + 4] * unit + s * n[2]), int32(acc[i + 5] * unit + s * n[3])
        a, b = ptx.byte_permute(a, b, 0x7632), ptx.byte_permute(c, d, 0x7632)
        return ptx.max2(ptx.min2(a, HIGHEST), LOW), ptx.max2(ptx.min2(b, HIGHEST), LOW)

    @device
    def quotient(a, s, n, shift):
        return int32(int32(a + ptx.shift_right(int32(s * n), shift)) >> DOWN_SHIFT)

    @device
    def pairs(acc, i, s, n, shift):
        return (ptx.clip2(ptx.saturate2(quotient(acc[i], s, n[0], shift), quotient(acc[i + 1], s, n[1], shift))),
                ptx.clip2(ptx.saturate2(quotient(acc[i + 4], s, n[2], shift), quotient(acc[i + 5], s, n[3], shift))))

    return (gru_parts.unchanged, up_factor, up_pairs), (gru_parts.unchanged, gru_parts.signed, pairs)


def wgmma_mlp_kernel(cfg, nz):
    """mlp_kernel, with W_down in chunks of 128 inputs. Launch [blocks] of GROUPS warpgroups; each takes `each` tiles of
    64 rows in a row. They read the weights as they stream by: for every 128 inner values their columns of W_up and
    their rows of W_down, 32 KB each."""
    H = WGMMA_H
    STAGES = 4
    CHUNKS = 8
    job_shift = nz.shift
    THREADS = 128 * GROUPS
    STEPS = 2 * CHUNKS
    STAGE = 128 * H
    LEFT = 8 * STAGES
    BARRIERS = 2 * STAGES
    # TABLE: of a pair; a warpgroup has an even and an odd one
    TABLE, fill, norm, inner, finish = mlp_functions(cfg, nz, (9, 0), 128, *integer_quotients(cfg))
    AT_LEFT, AT_TABLES = STAGES * STAGE, STAGES * STAGE + GROUPS * TILE_ROWS * H
    load_rows, store_rows = row_functions(H)
    up, down = ptx.wgmma_product(128, H // 32, False), ptx.wgmma_product(256, 4, True)

    @device
    def fetch(base, bar, packed, at, step):
        """Starts the copy of the weights of a step: W_up and W_down in turn."""
        stage, chunk = step % STAGES, int32(step & (STEPS - 1)) >> 1
        ptx.barrier_expect(bar + 8 * stage, STAGE)
        ptx.copy_bulk(base + stage * STAGE, packed, at + ((step & 1) * CHUNKS + chunk) * (STAGE // 4), STAGE,
                      bar + 8 * stage)

    @device
    def weights_of(base, bar, step):
        """Their shared address, when they are there."""
        ptx.barrier_wait(bar + 8 * (step & (STAGES - 1)), step // STAGES & 1)
        return int32(base + (step & (STAGES - 1)) * STAGE)

    @device
    def leave(base, bar, packed, at, step, steps, lane):
        """This warp has done with them; the last warp to leave starts the next copy."""
        at_left = int32(bar + LEFT + 8 * (step & (STAGES - 1)))
        if lane == 0 and ptx.count_round(at_left, 4 * GROUPS - 1) == 4 * GROUPS - 1 and int32(step + STAGES) < steps:
            fetch(base, bar, packed, at, int32(step + STAGES))

    @cuda.jit(launch_bounds=THREADS)
    def mlp(call, at, plan: A32, weights: A8, packed: A32, overlay: A8, job: AU32, offset, n, tiles, each, x: A32):
        words, bytes_ = cuda.shared.array(0, int32), cuda.shared.array(0, int8)
        barriers = cuda.shared.array(BARRIERS, int64)        # of stages, then how many warps left each
        t = thread()
        group = t >> 7
        lane = t & 31
        c = t & 127
        q = lane & 3
        base, bar = ptx.shared_address(words, 0), ptx.shared_address(barriers, 0)
        if t == 0:
            for i in range(STAGES):
                ptx.barrier_init(bar + 8 * i, 1)
                ptx.store_shared(bar + LEFT + 8 * i, 0)
            ptx.barrier_fence()
            for i in range(STAGES):
                fetch(base, bar, packed, at, int32(i))
        cuda.syncthreads()
        mine, at_left = AT_TABLES + group * (2 * TABLE), base + AT_LEFT + group * (TILE_ROWS * H)
        unit, shift = int32(cuda.gridDim.y << 8), job_shift(job)
        source = source_of(plan, 0, weights, overlay, job, offset)
        first, loaded = (cuda.blockIdx.x * GROUPS + group) * each, int32(-1)
        # the last blocks also run beyond the last tile, because the other warpgroup waits for them
        step, steps = int32(0), int32(each * STEPS)
        sums = int32s(128)
        acc = int32s(64)
        u = int32s(16)
        row_x = int32s(64)
        y = int32s(64)
        sb = int32s(2)
        for turn in range(each):
            tile, live = int32(min(first + turn, tiles - 1)), first + turn < tiles
            row = tile * TILE_ROWS + (c >> 5) * 16 + (lane >> 2)
            # the first pair of the tile, the last, and of this row whether it is not the first (where windows are
            # shorter than LEAST_SEQ_LEN there is no noise: all tables are the same)
            low = int32(uint32(tile * 32) // uint32(n))
            before = int32(tile * 32 - low * n)
            high = low + 1 if before + 31 >= n else low
            odd = int32(low + 1 if before + (c >> 5) * 8 + (lane >> 2) >= n else low) & 1
            ptx.named_barrier(1 + group, 128)                # no warp reads y or the tables any more
            if high > loaded:
                for coming in range(max(low, loaded + 1), high + 1):
                    fill(words, bytes_, mine + (coming & 1) * TABLE, source, call, coming, c, 128)
                ptx.named_barrier(1 + group, 128)
                loaded = high
            load_rows(row_x, x, int64(row) * (H // 4), q)
            ptx.prefetch(x, int64(min(tile + 1, tiles - 1)) * (TILE_ROWS * H // 4) + c * LINE)
            table = int32(base + mine + odd * TABLE)
            s = norm(row_x, y, shift, table, q)
            to = int32(at_left + (c >> 5) * (16 * H) + lane * 4)
            for k in range(16):
                for m in range(2):
                    ptx.store_shared(to + k * 128 + m * (8 * H), y[2 * k + m])
            ptx.proxy_fence()
            ptx.named_barrier(1 + group, 128)
            sb[0], sb[1] = 0, 0
            for i in range(128):
                sums[i] = 0
            for chunk in range(CHUNKS):
                up(acc, int32(at_left), weights_of(base, bar, step))
                leave(base, bar, packed, at, step, steps, lane)
                inner(acc, u, chunk, s, sb, unit, table, q)
                down(sums, u, weights_of(base, bar, int32(step + 1)))
                leave(base, bar, packed, at, int32(step + 1), steps, lane)
                step = int32(step + 2)
            load_rows(row_x, x, int64(row) * (H // 4), q)
            finish(sums, row_x, sb, shift, table, q)
            if live:
                store_rows(row_x, x, int64(row) * (H // 4), q)

    return Kernel(mlp, AT_TABLES + GROUPS * 2 * TABLE)


# --- the head ---------------------------------------------------------------------------------------------------------

def register_head_kernel(cfg, nz, cc, size):
    """losses[2 i], [2 i + 1] = the losses of pair i. Launch [blocks] of size.warps warps; a warp takes one pair after
    the other. The logits of a tile stay in shared memory, as z + 128.
    call: the row of the plan of the norm; that of the matrix follows. at: packed word of the matrix."""
    H, T, V = cfg.HIDDEN_DIM, cfg.SEQ_LEN, cfg.VOCAB_SIZE
    WORDS = H // 8
    COLUMNS, ACC = size.columns, size.columns // 2
    W, TARGETS = size.warps, cfg.TARGETS
    AT_EXPS = size.weights                                   # [entry][lane]: a look-up has no bank conflicts
    AT_LN, AT_Z = 4 * V, 4 * V + 16 * H + input_bytes(cfg, H, 4)
    enter, column = enter_function(size), pair_functions(cfg, nz).column
    fill_norm, norm = norm_functions(cfg, nz, cc, 1)
    (load_rows, _), job_shift = row_functions(H), nz.shift
    START, word_of, factor, pairs = late_noise_quotients(cfg, nz, cc, H, add=128)
    origin, product = gru_parts.warp_product_functions(COLUMNS, H // 32, wgmma=size.together > 1)
    position_loss = loss_function(cfg)
    max2, LOWEST = ptx.int16_pairs(cc).max2, both(OFFSET + 1)

    @device
    def logits(acc, z, i, j, m, s, shift, at_noise, top):
        """z[2 i + m] = a word of logits; the larger of them and top, two int16."""
        y, w = pairs(acc, 16 * j + 8 * i + 2 * m, s, ptx.load_shared4(at_noise + i * 64), shift)
        z[2 * i + m] = ptx.bytes4(y, w)
        return max2(max2(top, y), w)

    @device
    def highest(top):
        """The largest logit of a row, + 128."""
        for k in (1, 2):
            top = max2(top, across(top, k))
        return max(int32(top & 0xFFFF), int32(uint32(top) >> uint32(16))) - OFFSET

    @device
    def weigh(word, most, exps, total):
        """total + the exponentials of four logits."""
        d = int32(most - word)
        for e in range(4):
            total = int32(total + weight(d, e, exps))
        return total

    @device
    def shown(warp, member, token):
        """A token's logit, + 128: its byte is in the word of lane 4 g + (token / 4) % 4."""
        at = (int32(AT_Z + warp.mine) + int32(token >> 5) * 512 + (warp.lane & 28) * 16
              + ((token >> 2) & 3) * 16 + ((token >> 4) & 1) * 8)
        return int32(warp.bytes_[at + member * 4 + (token & 3)] & 255)

    @cuda.jit(launch_bounds=32 * W)
    def head(call, at, plan: A32, weights: A8, packed: A32, overlay: A8, tokens: A32, width, skip, job: AU32, offset,
             units, exps: A32, x: A32, losses: A64):
        warp, source = enter(packed, at, cuda.threadIdx.x), source_of(plan, 0, weights, overlay, job, offset)
        words, mine = warp.words, warp.mine
        lane, q = warp.lane, warp.q
        table, at_weights = warp.table, origin(warp.base, warp.t)
        for i in range(warp.t, 256 * 32, 32 * W):
            words[AT_EXPS // 4 + i] = exps[i >> 5]
        cuda.syncthreads()
        at_exps, at_z = int32(warp.base + AT_EXPS + lane * 4), int32(table + AT_Z + lane * 16)
        acc = int32s(ACC)
        z = int32s(4)
        row_x = int32s(WORDS)
        n = int32s(WORDS)
        shift, start = job_shift(job), begin_with(START)
        for begin in range(cuda.blockIdx.x * W, units, cuda.gridDim.x * W):
            unit = min(begin + (warp.t >> 5), units - 1)     # the warps of a product stay together
            cuda.syncwarp()                                  # no lane reads the tables any more
            for i in range(lane, V, 32):
                words[mine // 4 + i] = word_of(column(source, unit, i, (call + 1) * PLAN))
            for i in range(lane, H, 32):
                fill_norm(words, warp.bytes_, mine + AT_LN, source, call * PLAN, unit, i)
            cuda.syncwarp()
            # losses of two tiles are made at once: lanes with q < 2 keep what the first needs, the others the second
            member = q & 1
            loss, total = int64(0), int32(1)
            distance, counted = int32(0), False
            for first in range(0, T, 8):
                position = min(first + warp.g, T - 1)
                load_rows(row_x, x, row_of(unit, position, T) * (H // 4), q)
                (s0, _), (s1, _) = norm(row_x, n, int32(table + AT_LN), q)
                s0, s1 = factor(s0, 0, shift), factor(s1, 1, shift)
                token = tokens[int64(unit) * width + skip + position + 1]
                top0, top1 = int32(LOWEST), int32(LOWEST)
                cuda.syncwarp()                              # no lane looks for the last target any more
                for b in range(V // COLUMNS):
                    product(acc, n, at_weights, b * (COLUMNS * H), start)
                    for j in range(COLUMNS // 32):
                        at_noise = int32(table + b * (4 * COLUMNS) + j * 128 + q * 16)
                        for i in range(2):
                            top0 = logits(acc, z, i, j, 0, s0, shift, at_noise, top0)
                            top1 = logits(acc, z, i, j, 1, s1, shift, at_noise, top1)
                        ptx.store_shared4(at_z + (b * (COLUMNS // 32) + j) * 512, z[0], z[1], z[2], z[3])
                cuda.syncwarp()
                top0, top1 = highest(top0), highest(top1)
                most0, most1 = ptx.byte_permute(top0, 0, 0), ptx.byte_permute(top1, 0, 0)
                total0, total1 = int32(0), int32(0)
                for b in range(V // 32):
                    a = ptx.load_shared4(at_z + b * 512)
                    total0 = weigh(a[2], most0, at_exps, weigh(a[0], most0, at_exps, total0))
                    total1 = weigh(a[3], most1, at_exps, weigh(a[1], most1, at_exps, total1))
                total0, total1 = quad_sum(total0), quad_sum(total1)
                if (q >> 1) == ((first >> 3) & 1):
                    total, top = (total1, top1) if member else (total0, top0)
                    distance = int32(TARGETS * top - shown(warp, member, token))
                    for k in range(TARGETS - 1):
                        drawn = tokens[int64(unit) * width + skip + T + 1 + (TARGETS - 1) * position + k]
                        distance = int32(distance - shown(warp, member, drawn))
                    counted = first + warp.g < T
                if (first >> 3) & 1 or first + 8 >= T:
                    if counted:
                        loss += position_loss(int64(total), distance, 0)
                    counted = False
            for k in (2, 4, 8, 16):
                loss += across(loss, k)
            if lane < 2:
                losses[2 * unit + lane] = loss

    return Kernel(head, size.bytes)
