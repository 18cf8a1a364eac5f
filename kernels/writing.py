"""Writing: the logits after the next token of many sequences, with the noise of members or without (SPEC 10, 22).

Rows        A sequence is a row. Rows g and g + 8 of a tile of 16 are the even and the odd member of a pair, so that a
            thread of a product (ptx.mma_s8) has both and needs the noise of a column once. Sequences 2 i and 2 i + 1
            are pair i, also without noise.
Memory      A block has `tiles` tiles of 16 rows. The vectors of their rows lie in shared memory, in regions one after
            the other. The vector of an MLP, four times as long, takes the place of regions 2 to 5.
Noise       The kernel `draw` draws the noise of all pairs once, for all positions. The array `drawn` has a place for
            every entry of the overlay: see `drawn_place`.
Phases      In turn a warp takes a pair (norms, sums of input noise) or two tiles times 32 columns of a product.
"""

import functools
from collections import namedtuple
from typing import NamedTuple

import numpy as np
from numba import cuda, float32, int32, int64, int8, uint32, uint64

from kernels import gru_parts, ptx, transformer
from kernels.gru_parts import (B_F, B_H, DOWN, GATES, INNER, LAYER, NORM_1, NORM_2, RECUR, U_F, U_H, U_INPUT,
                               W_DOWN_INPUT, W_F, W_H, W_UP)
from kernels.host import Kernel
from kernels.pairs import (I_OVERLAY, I_SEED, M_OVERLAY, M_SEED, W_FIRST, W_OVERLAY, W_SEED_A, ntt_functions,
                           source_of)
from kernels.parts import (A2, A32, A8, AU32, BITS, MAGIC, PLAN, across, amax_scale, blocks, byte, called, clip, int32s,
                           pack_bytes, pack_rounded, quotient_function, rounded, unroll)
from kernels.rules import NORMS, build_noise, device
from kernels.transformer import BIAS, INPUT, LN, LN_BIAS, MATRIX, MATRIX_BIAS, NEXT_MATRIX, turned_function
from model import parameters

WARPS = 16
THREADS = 32 * WARPS
LOGIT_WARPS = 8              # of a block of logits; each takes COLUMNS at a time
LOGIT_TWOS = 4               # times that such a block takes two tiles, at most
COLUMNS = 32                 # of a product that a warp makes at a time
# regions of shared memory: activations, what a norm makes of them; then the inner vector of an MLP, or of the recurrent
# model gates, candidates, gated states and states, of the transformer queries
X, N, INSIDE = 0, 1, 2
GATE = 2
CANDIDATE = 3
GATED = 4
STATE = 5
REGIONS = 6
SUMS = 3                     # of input noise that a row has at a time


class Block(NamedTuple):
    """What the phases of a block share."""
    source: object          # whose first row is the plan's: below `at` is a place in the whole plan
    words: object           # shared memory as int32
    vector: object          # shared memory as int8
    packed: object          # matrices, PLAIN (kernels.host)
    drawn: object           # noise, of `draw_kernel`
    tiles: int              # of 16 rows
    stride: int             # words from one row of a region to the next
    first: int              # pair
    units: int              # pairs that have sequences
    count: int              # sequences of all blocks
    shift: int              # of the noise


def stride_words(K, gpu, H):
    """From one row to the next of vectors of K entries in a model of width H. Where they fit, 32 bytes more make it an
    odd multiple of 32 bytes: then the loads of a warp have no bank conflicts."""
    return (K + (32 if H % 64 == 0 and 16 * (REGIONS * (H + 32) + 4 * SUMS) <= gpu.shared else 0)) // 4


def row_bytes(stride):
    """Of shared memory."""
    return 4 * (REGIONS * stride + SUMS)


@device
def block_of(source, packed, drawn, tiles, stride, count, shift):
    """The Block of this thread."""
    words, vector = cuda.shared.array(0, int32, 128), cuda.shared.array(0, int8, 128)
    first = int64(cuda.blockIdx.x) * 8 * tiles
    units = min(8 * tiles, (count + 1) // 2 - first)
    return Block(source, words, vector, packed, drawn, tiles, stride, first, units, count, shift)


@device
def row_of(unit):
    """The even member's row of a pair in its block; the odd member's is 8 further."""
    return (unit >> 3) * 16 + (unit & 7)


@device
def sequence_of(block, row):
    return 2 * (block.first + (row >> 4) * 8 + (row & 7)) + ((row >> 3) & 1)


@device
def word_of(block, region, row):
    """The first word of a row of a region."""
    return (region * (16 * block.tiles) + row) * block.stride


@device
def sum_of(block, number, row):
    """The word of a row's sum of input noise; number: 0 to SUMS - 1."""
    return word_of(block, REGIONS, 0) + number * (16 * block.tiles) + row


@device
def pair_of(block, at, stride):
    """The words of both members that are at word `at` of the even one's row."""
    return block.words[uint64(at)], block.words[uint64(at + 8 * stride)]


@device
def store_pair(block, at, y):
    """Sets these words to the low bytes of y int32 [8]."""
    block.words[uint64(at)], block.words[uint64(at + 8 * block.stride)] = pack_bytes(y, 0), pack_bytes(y, 4)


@device
def of_member(both, odd):
    return both[1] if odd else both[0]


def drawn_place(first, V):
    """Where the noise of a side whose entries begin at `first` of the overlay lies in the int32 of 8 pairs: two entries
    in an int32, and room for one entry more behind every V, because a side of tokens may have an odd number."""
    return 4 * (first + first // V)


def drawn_words(cfg):
    """int32 of `drawn` that 8 pairs have."""
    return drawn_place(parameters.n_overlay(cfg), cfg.VOCAB_SIZE)


def streams_of(cfg):
    """int32 [5, int32 of `drawn` with two entries each]: the seeds of the one or two streams of the two entries (0: one
    stream) relative to that of the pair, the number of the first entry, its place for pair 0 of a group, and how much
    further it is for the next pair. The noise of 8 pairs lies together. Where a product finishes with it (columns,
    biases of products), 8 neighbours are the same entries of 8 pairs, as the lanes of a warp want them. Elsewhere a
    pair's entries are neighbours."""
    streams = []
    for t in parameters.tensors(cfg):
        # of a side: its first entry in the overlay, entries, seeds, whether the pairs are neighbours
        sides = (t.overlay_a, t.cols, t.seed_a, 0, True), (t.overlay_b, t.rows, t.seed_b, 0, False)
        if not t.matrix:
            of_product = t.name.startswith("b_") or t.name.endswith("_bias_up")
            sides = (t.overlay_a, t.cols, t.seed_a, t.seed_b, of_product),
        for first, size, one, second, grouped in sides:
            two, step = np.arange((size + 1) // 2), 1 if grouped else size // 2
            place = drawn_place(first, cfg.VOCAB_SIZE) + (8 if grouped else 1) * two
            streams.append(np.stack(np.broadcast_arrays(one, second, 2 * two, place, step)))
    return np.concatenate(streams, 1).astype(np.int32)


def draw_kernel(cfg):
    """The noise of pairs: drawn int32 [groups of 8 pairs, int32 of a group]. One block per group; streams: from
    `streams_of`."""
    GROUP = drawn_words(cfg)
    noise = build_noise(cfg).noise

    @cuda.jit(launch_bounds=THREADS)
    @unroll
    def draw(streams: A2, job: AU32, drawn: A32):
        seed, words = uint32(uint32(job[0] + job[1]) + uint32(8 * cuda.blockIdx.x)), int32s(8)
        for at in range(cuda.threadIdx.x, streams.shape[1], THREADS):
            one, second, number = streams[0, at], streams[1, at], streams[2, at]
            for g in range(8):
                words[g] = 0
                for e in range(2):
                    value = noise(uint32(seed + uint32(g + one)), number + e)
                    if second:
                        value = int32(value * noise(uint32(seed + uint32(g + second)), number + e))
                    words[g] |= int32((value & int32(job[2]) & 0xFFFF) << (16 * e))
            place, step = int64(cuda.blockIdx.x) * GROUP + streams[3, at], streams[4, at]
            if step == 1:
                ptx.store4(drawn, place, words[0], words[1], words[2], words[3])
                ptx.store4(drawn, place + 4, words[4], words[5], words[6], words[7])
            else:
                for g in range(8):
                    drawn[uint64(place + g * step)] = words[g]

    return Kernel(draw)


Drawn = namedtuple("Drawn", ("noise factor table_term input_fold shift half columns vector term side_of column_side "
                             "vector_side input_side"))


def drawn_functions(cfg):
    """Device functions of kernels.rules.build_noise, and those of a Source whose pair 0 is the first one of `drawn`:

    side_of(source, first, seed, pair, size)
                                        what is the same for all entries of a side whose first entry in the overlay and
                                        seed, relative to the pair's, are known; size: how many, or 2 of a side that has
                                        the entries of 8 pairs together
    column_side, vector_side, input_side (source, at, pair, size)
                                        the same of plan[at]
    half(word, i)                       the noise of entry i in its int32 of drawn
    columns(source, drawn, side, i)     noise of columns i and i + 1, i even
    vector(source, side, words, i)      entry i of a vector as the even and the odd member see it; words: the two of
                                        `drawn` that have it and its neighbours
    term(source, drawn, side, i)        (c, factor) of input i for nz.input_fold
    """
    GROUP = drawn_words(cfg)
    SHIFT = cfg.SIGMA_SHIFT_VECTOR
    V = cfg.VOCAB_SIZE
    nz = build_noise(cfg)
    scaled, coefficient, factor = nz.scaled, nz.coefficient, nz.factor

    @device
    def side_of(source, first, seed, pair, size):
        """(place in `drawn`, as `drawn_place` says it, in the overlay, seed) of entry 0."""
        place = 4 * (first + int32(uint32(first) // uint32(V))) + (int32(pair) & 7) * (size // 2)
        stream = uint32(uint32(source.seed + uint32(pair)) + uint32(seed))
        return int64(pair >> 3) * GROUP + place, first, stream

    def side_function(seed, overlay):
        @device
        def side(source, at, pair, size=2):
            """`side_of`; the place of a vector's weights."""
            plan, at = source.plan, source.p + at
            first, relative, weights = plan[uint64(at + overlay)], plan[uint64(at + seed)], plan[uint64(at + W_FIRST)]
            return side_of(source, first, relative, pair, size) + (weights,)
        return side

    @device
    def half(word, i):
        return int32(word >> 16) if i & 1 else int32(int32(word << 16) >> 16)

    @device
    def column(source, side, n, i):
        return scaled(n, source.overlay[uint64(side[1] + i)], side[2], i)

    @called
    def columns(source, drawn, side, i):
        word = drawn[uint64(side[0] + 4 * i)]
        return column(source, side, half(word, 0), i), column(source, side, half(word, 1), i + 1)

    @called
    def vector(source, side, words, i):
        n = half(of_member(words, i & 2), i)
        w, p = int32(source.weights[uint64(side[3] + i)]), column(source, side, n, i)
        return int32(w + (p >> SHIFT)), int32(w + (int32(-p) >> SHIFT))

    @device
    def term(source, drawn, side, i):
        n, entry = half(drawn[uint64(side[0] + (i >> 1))], i), source.overlay[uint64(side[1] + i)]
        return coefficient(n, entry), factor(entry, side[2], i)

    return Drawn(nz.noise, factor, nz.table_term, nz.input_fold, nz.shift, half, columns, vector, term, side_of,
                 side_function(M_SEED, M_OVERLAY), side_function(W_SEED_A, W_OVERLAY),
                 side_function(I_SEED, I_OVERLAY))


def divided_function(cfg, inputs, lowest=-127):
    """Device function: a result of a product over `inputs`, divided, rounded down and clipped."""
    _, quotient = quotient_function(parameters.divisor(cfg, inputs), MAGIC, False, lowest)

    @device
    def divided(total):
        return quotient(total) - BITS
    return divided


@functools.cache
def multiply_functions(gpu, pairs, K, stride, columns=COLUMNS):
    """(multiply, next_tile), device functions for matrices of K inputs and `columns`, or a multiple of COLUMNS. Lane 4
    g + q takes inputs 8 q... of every 32 as those 4 q... and 16 + 4 q... of ptx.mma_s8: the order of inputs is free,
    and so a load has eight of them."""
    STEPS, AHEAD = K // 32, 3
    TO_ODD, TILE_WORDS = 8 * stride, 16 * stride             # words from a row to that of the odd member, and of a tile
    FIRST, REST, WORDS = min(AHEAD, STEPS), STEPS % AHEAD, 8 * AHEAD
    RAGGED, LAST = columns % COLUMNS != 0, (columns - 1) // 2 * 2
    column_side, columns_of = pairs.column_side, pairs.columns

    @gpu.called
    def fetch(columns, matrix, packed, at):
        for j in range(4):
            first = 8 * matrix + 2 * j
            columns[first], columns[first + 1] = ptx.load2(packed, at + j * (2 * K))

    @gpu.called
    def add_product(acc, words, x, below, columns, matrix):
        for d in range(2):
            first = x + d * below
            even, odd = ptx.load2(words, first), ptx.load2(words, first + TO_ODD)
            for j in range(4):
                at, b = 16 * d + 4 * j, 8 * matrix + 2 * j
                c = (acc[at], acc[at + 1], acc[at + 2], acc[at + 3])
                c = ptx.mma_s8((even[0], odd[0], even[1], odd[1]), columns[b], columns[b + 1], c)
                for half in range(4):
                    acc[at + half] = c[half]

    @gpu.called
    def multiply(acc, noise, words, x, more_tiles, source, at, packed, drawn, pair, first):
        """acc int32 [32] = 16 rows of each of one or two tiles x COLUMNS of the matrix at plan[at], from `first` on;
        noise int32 [16]: of these columns. words[x]: the first word of the first tile, whose first pair is `pair`.
        acc[16 d + 4 j + 2 h + e]: tile d, row g + 8 h, column 8 j + 2 q + e; noise[8 d + 2 j + e]: of its pair."""
        lane = cuda.threadIdx.x & 31
        g, q = lane >> 2, lane & 3
        for d in range(2):                                   # on their way while the warp multiplies
            side = column_side(source, at, pair + 8 * min(d, more_tiles - 1) + g)
            for j in range(4):
                c = first + 8 * j + 2 * q
                if RAGGED:
                    c = min(c, LAST)
                noise[8 * d + 2 * j], noise[8 * d + 2 * j + 1] = columns_of(source, drawn, side, c)
        x, below = x + g * stride + 2 * q, (more_tiles - 1) * TILE_WORDS
        at = source.plan[uint64(source.p + at)] + first * (K // 4) + ((lane & 2) << 4) + g * 4 + (lane & 1) * 2
        columns = cuda.local.array(WORDS, int32)
        for i in range(32):
            acc[i] = 0
        for d in range(FIRST):
            fetch(columns, d, packed, at + 64 * d)
        for step in range(STEPS // AHEAD):                   # columns are on their way for AHEAD steps
            for d in range(AHEAD):
                add_product(acc, words, x, below, columns, d)
                if AHEAD * (step + 1) + d < STEPS:
                    fetch(columns, d, packed, at + 64 * (AHEAD + d))
                x += 8
            at += 64 * AHEAD
        for d in range(REST):
            add_product(acc, words, x + 8 * d, below, columns, d)

    @gpu.device
    def next_tile(acc, noise):
        """Moves those of the second tile to the place of the first."""
        for i in range(16):
            acc[i] = acc[16 + i]
        for i in range(8):
            noise[i] = noise[8 + i]

    return multiply, next_tile


def product_function(gpu, pairs, H, K, columns, finish, bias=None):
    """Device function: the product of vectors of K entries with a matrix, with its noise. finish(block, row, column,
    total, entry, where) takes a result; entry: that of a vector that belongs to the column, as the member of
    the row sees it; bias: from the matrix to this vector in the plan."""
    STRIDE = stride_words(K, gpu, H)
    multiply, next_tile = multiply_functions(gpu, pairs, K, STRIDE)
    vector_side, vector = pairs.vector_side, pairs.vector
    GROUPS = columns // COLUMNS

    @gpu.called
    def product(block, at, x, stream, where):
        """The product of region x with the matrix at plan[at]; stream: number of its sums."""
        source = block.source
        acc, noise, sums = int32s(32), int32s(16), int32s(2)
        t, twos = cuda.threadIdx.x, (block.tiles + 1) // 2
        g, q = (t & 31) >> 2, t & 3
        for task in range(t >> 5, twos * GROUPS, WARPS):
            tile = 2 * int32(uint32(task) % uint32(twos))
            first = int32(uint32(task) // uint32(twos)) * COLUMNS
            more_tiles = min(block.tiles - tile, 2)
            multiply(acc, noise, block.words, word_of(block, x, 0) + tile * (16 * STRIDE), more_tiles, source, at,
                     block.packed, block.drawn, block.first + 8 * tile, first)
            for _ in range(more_tiles):
                row, unit = 16 * tile + g, 8 * tile + g
                for half in range(2):
                    sums[half] = block.words[uint64(sum_of(block, stream, row + 8 * half))]
                if bias is not None:
                    bias_side = vector_side(source, at + bias, block.first + unit)
                for j in range(4):
                    c = first + 8 * j + 2 * q
                    if bias is not None:
                        word = block.drawn[uint64(bias_side[0] + 4 * c)]
                    for e in range(2):
                        entries = (int32(0), int32(0))
                        if bias is not None:
                            entries = vector(source, bias_side, (word, word), c + e)
                        for half in range(2):
                            noisy = int32(sums[half] * noise[2 * j + e]) >> block.shift
                            total = int32(acc[4 * j + 2 * half + e] + noisy)
                            finish(block, row + 8 * half, c + e, total, of_member(entries, half), where)
                tile += 1
                next_tile(acc, noise)
        cuda.syncthreads()
    return product


def sums_function(gpu, cfg, pairs, K, folded=1, matrices=1):
    """Device function: the sums of input noise of a pair over a vector of K entries, for `matrices` whose input sides
    follow one another in the plan. `folded` entries, K / folded apart, share a running integer (SPEC 4); where noise
    has no scale, it is a sum like any other."""
    H = cfg.HIDDEN_DIM
    SCALED = cfg.ADAPTIVE_NOISE_MODE != 0
    EACH, TOTALS = K // folded, 2 * matrices
    TURNS, FULL = blocks(K, 128), K % 128 == 0
    STRIDE = stride_words(K, gpu, H)
    input_side, term, input_fold = pairs.input_side, pairs.term, pairs.input_fold

    @gpu.called
    def add_up(block, at, unit, x, stream):
        """The sums of region x for the matrices from plan[at] on, as sums `stream` and further. Those of the odd member
        have the sign of its noise."""
        source, lane = block.source, cuda.threadIdx.x & 31
        row, pair = row_of(unit), block.first + unit
        here = word_of(block, x, 0) + row * STRIDE
        totals = int32s(TOTALS)
        for n in range(matrices):
            side = input_side(source, at + 2 * n, pair, K)
            totals[2 * n], totals[2 * n + 1] = 0, 0
            if not SCALED:
                for turn in range(TURNS):                       # unrolled, so that no load waits for another
                    w = lane + 32 * turn
                    if FULL or w < K // 4:
                        a, b = pair_of(block, here + w, STRIDE)
                        low, high = ptx.load2(block.drawn, side[0] + 2 * w)
                        totals[2 * n] += ptx.dp2a_low(low, a) + ptx.dp2a_high(high, a)
                        totals[2 * n + 1] += ptx.dp2a_low(low, b) + ptx.dp2a_high(high, b)
            elif source.job[2]:
                for w in range(lane, EACH // 4, 32):
                    for k in range(4):
                        a, b = int32(0), int32(0)
                        for sub in range(folded):
                            i = sub * EACH + 4 * w + k
                            c, f = term(source, block.drawn, side, i)
                            x_even, x_odd = pair_of(block, here + (i >> 2), STRIDE)
                            a, b = input_fold(a, byte(x_even, k), c, f), input_fold(b, byte(x_odd, k), c, f)
                        totals[2 * n] += a
                        totals[2 * n + 1] += b
        for n in range(matrices):
            total, total_odd = ptx.warp_sum(totals[2 * n]), ptx.warp_sum(totals[2 * n + 1])
            if lane == 0:
                at_sum = sum_of(block, stream + n, row)
                block.words[at_sum], block.words[at_sum + 8] = total, int32(-total_odd)
    return add_up


def norm_function(gpu, cfg, pairs):
    """Device function: region N = ln(X) of a pair, by the layer norm of the row of the plan at `at`."""
    H = cfg.HIDDEN_DIM
    TURNS, FULL = blocks(H, 128), H % 128 == 0
    GRU = cfg.MODEL == "gru"
    divided, plain = NORMS.quotient, NORMS.normed
    side, vector = pairs.vector_side, pairs.vector

    @gpu.device
    def normed(x, w, bias, mean):
        """An entry of ln(x); mean: of the |x|."""
        if GRU:
            return divided(int32(x * clip(w)), mean, float32(float32(1) / float32(mean)))
        return plain(x, w, bias, mean)

    @gpu.called
    def norm(block, at, unit):
        source, lane = block.source, cuda.threadIdx.x & 31
        here, to = word_of(block, X, row_of(unit)), word_of(block, N, row_of(unit))
        even, odd = int32(0), int32(0)
        for turn in range(TURNS):
            w = lane + 32 * turn
            if FULL or w < H // 4:
                a, b = pair_of(block, here + w, block.stride)
                for k in range(4):
                    even, odd = int32(even + abs(byte(a, k))), int32(odd + abs(byte(b, k)))
        even = int32(max(uint32(ptx.warp_sum(even)) // uint32(H), 1))
        odd = int32(max(uint32(ptx.warp_sum(odd)) // uint32(H), 1))
        weights, y = side(source, at + LN, block.first + unit, H), int32s(8)
        if not GRU:
            biases = side(source, at + LN_BIAS, block.first + unit, H)
        for turn in range(TURNS):
            w = lane + 32 * turn
            if FULL or w < H // 4:
                a, b = pair_of(block, here + w, block.stride)
                noise = ptx.load2(block.drawn, weights[0] + 2 * w)
                if not GRU:
                    bias_noise = ptx.load2(block.drawn, biases[0] + 2 * w)
                for k in range(4):
                    bias = (0, 0)
                    both = vector(source, weights, noise, 4 * w + k)
                    if not GRU:
                        bias = vector(source, biases, bias_noise, 4 * w + k)
                    y[k] = normed(byte(a, k), both[0], bias[0], even)
                    y[4 + k] = normed(byte(b, k), both[1], bias[1], odd)
                store_pair(block, to + w, y)
    return norm


def embed_function(gpu, cfg, pairs):
    """Device function: region X of a pair, for the tokens at `position` of its sequences of `room` tokens (SPEC 7,
    13)."""
    H = cfg.HIDDEN_DIM
    TURNS, FULL = blocks(H, 128), H % 128 == 0
    GRU, NTT = cfg.MODEL == "gru", cfg.NTT_MODE != 0
    AT_TABLE = gru_parts.TABLE if GRU else transformer.TABLE
    table = gru_parts.tensor(cfg, "embedding")
    SEED_A, SEED_B = table.seed_a, table.seed_b
    OVERLAY_A, OVERLAY_B = table.overlay_a, table.overlay_b
    factor, disturbance = pairs.factor, pairs.table_term
    side_of, noise_of = pairs.side_of, pairs.half
    vector_side, vector = pairs.vector_side, pairs.vector
    coefficient, look_up = ntt_functions(cfg, pairs, True)

    @gpu.device
    def look(block, pair, tokens, first, position):
        """Of a token of the sequence that begins at tokens[first]: noise, factor, word in the table, coefficient."""
        source, token = block.source, tokens[first + position]
        side = side_of(source, OVERLAY_A, SEED_A, pair, 2)
        n = noise_of(block.drawn[uint64(side[0] + 8 * (token >> 1))], token)
        f = factor(source.overlay[side[1] + token], side[2], token)
        c = coefficient(tokens, first, position) if NTT else int32(0)
        return n, f, (token >> 3) * (2 * H) + (token & 7) * 4, c

    @gpu.called
    def embed(block, tokens, position, room, unit):
        lane, source, pair = cuda.threadIdx.x & 31, block.source, block.first + unit
        mask, shift = int32(source.job[2]), block.shift
        units, y = side_of(source, OVERLAY_B, SEED_B, pair, H), int32s(8)
        even = look(block, pair, tokens, 2 * pair * room, position)
        odd = look(block, pair, tokens, min(2 * pair + 1, block.count - 1) * room, position)
        if not GRU:
            biases = vector_side(source, BIAS, pair, H)
        for turn in range(TURNS):
            w = lane + 32 * turn
            if FULL or w < H // 4:
                noise = ptx.load2(block.drawn, units[0] + 2 * w)
                if not GRU:
                    bias_noise = ptx.load2(block.drawn, biases[0] + 2 * w)
                word = source.plan[AT_TABLE] + (w >> 2) * 32 + (w & 3)
                x = block.packed[uint64(word + even[2])], block.packed[uint64(word + odd[2])]
                for k in range(4):
                    h = 4 * w + k
                    n = noise_of(of_member(noise, k > 1), k)
                    f = factor(source.overlay[uint64(units[1] + h)], units[2], h)
                    if not GRU:
                        bias = vector(source, biases, bias_noise, h)
                    for half in range(2):
                        of_token, other, _, c = of_member((even, odd), half)
                        of_token = int32(of_token * (1 - 2 * half))
                        v = int32(byte(of_member(x, half), k) + (disturbance(of_token, other, n, f) >> shift))
                        if not GRU:
                            v = int32(v + of_member(bias, half))
                        if NTT:
                            of_bytes = look_up(source.weights, source.overlay, uint32(source.seed + uint32(pair)),
                                           shift, mask, c, h)
                            v = int32(v + of_member(of_bytes, half))
                        y[4 * half + k] = clip(v)
                store_pair(block, word_of(block, X, row_of(unit)) + w, y)
    return embed


@device
def hand_over(block, out, sums):
    """What the logits of a block's rows are made of."""
    rows = 16 * block.tiles
    first = int64(cuda.blockIdx.x) * rows
    for i in range(cuda.threadIdx.x, rows * block.stride, THREADS):
        out[first * block.stride + i] = block.words[word_of(block, N, 0) + i]
    for row in range(cuda.threadIdx.x, rows, THREADS):
        sums[first + row] = block.words[sum_of(block, 0, row)]


# --- the recurrent model ----------------------------------------------------------------------------------------------

@device
def entry_of(block, region, row, c):
    """Of an entry of a region in block.vector."""
    return uint64(4 * word_of(block, region, row) + c)


def gate_functions(gpu, cfg):
    """What products with the matrices of a layer's gates finish with: gates and candidates of its input, gates and
    gated states, states and X."""
    divided = divided_function(cfg, cfg.HIDDEN_DIM)
    open_gate, gated, next_state = NORMS.gate, NORMS.gated, NORMS.next_state

    @gpu.called
    def keep(block, row, c, total, entry, region):
        block.vector[entry_of(block, region, row, c)] = divided(total)

    @gpu.called
    def open_gates(block, row, c, total, bias, where):
        at, state = entry_of(block, GATE, row, c), entry_of(block, STATE, row, c)
        f = open_gate(int32(block.vector[at]), int32(divided(total) + clip(bias)))
        block.vector[at] = f - 127
        block.vector[entry_of(block, GATED, row, c)] = gated(f, int32(block.vector[state]))

    @gpu.called
    def move_states(block, row, c, total, bias, where):
        new = clip(int32(block.vector[entry_of(block, CANDIDATE, row, c)] + divided(total) + clip(bias)))
        state, x = entry_of(block, STATE, row, c), entry_of(block, X, row, c)
        h = next_state(int32(block.vector[entry_of(block, GATE, row, c)] + 127), int32(block.vector[state]), new)
        block.vector[state] = h
        block.vector[x] = clip(int32(block.vector[x] + h))

    return keep, open_gates, move_states


def recurrent_kernel(cfg, gpu):
    """The hidden states after the tokens at position at[0], as normed for the head: out int32 [tiles of all blocks, 16,
    stride_words], and their sums for its input noise: sums int32 [tiles, 16]. tokens int32 [count, room]; states int8
    [L, count, H]: of the layers, before and after. last: the layer whose states are the last that anybody wants; L:
    out, too."""
    H = cfg.HIDDEN_DIM
    L = cfg.N_LAYERS
    STRIDE, INNER_STRIDE = stride_words(H, gpu, H), 4 * stride_words(4 * H, gpu, H)
    pairs = drawn_functions(cfg)
    job_shift = pairs.shift
    divided, divided_down = divided_function(cfg, H, 0 if cfg.MLP_RELU else -127), divided_function(cfg, 4 * H)

    @gpu.called
    def to_inner(block, row, c, total, entry, where):
        block.vector[entry_of(block, INSIDE, 0, row * INNER_STRIDE + c)] = divided(total)

    @gpu.called
    def add(block, row, c, total, entry, where):
        at = entry_of(block, X, row, c)
        block.vector[at] = clip(int32(block.vector[at] + divided_down(total)))

    to_keep, to_gates, to_states = (product_function(gpu, pairs, H, H, H, finish, bias)
                                    for finish, bias in zip(gate_functions(gpu, cfg), (None, B_F - U_F, B_H - U_H)))
    up, down = product_function(gpu, pairs, H, H, 4 * H, to_inner), product_function(gpu, pairs, H, 4 * H, H, add)
    norm, embed = norm_function(gpu, cfg, pairs), embed_function(gpu, cfg, pairs)
    add_up, add_up_both, add_up_inner = (sums_function(gpu, cfg, pairs, *lengths)
                                         for lengths in ((H,), (H, 1, 2), (4 * H,)))

    @device
    def state_of(block, unit, odd, layer):
        """Of a sequence: (its number, the first word of its state in shared memory, and in the states)."""
        row = row_of(unit) + 8 * odd
        sequence = sequence_of(block, row)
        return sequence, word_of(block, STATE, row), (layer * block.count + sequence) * (H // 4)

    @cuda.jit(launch_bounds=THREADS)
    @gpu.unroll
    def read_recurrent(plan: A32, weights: A8, overlay: A8, packed: A32, job: AU32, drawn: A32, tokens: A32,
                       at: A32, room, count, tiles, last, states: A32, out: A32, sums: A32):
        lane, warp = cuda.threadIdx.x & 31, cuda.threadIdx.x >> 5
        source, position = source_of(plan, 0, weights, overlay, job, 0), at[0]
        block = block_of(source, packed, drawn, tiles, STRIDE, count, job_shift(job))
        words, units = block.words, block.units
        for layer in range(L + 1):
            norm_1 = PLAN * (1 + layer * LAYER + NORM_1)
            gates = norm_1 + PLAN * GATES
            recur = norm_1 + PLAN * RECUR
            norm_2 = norm_1 + PLAN * NORM_2
            inner = norm_1 + PLAN * INNER
            for unit in range(warp, units, WARPS):
                if layer < L:
                    for odd in range(2):                     # on their way while the warp does what follows
                        sequence, here, first = state_of(block, unit, odd, layer)
                        known = sequence < count and position > 0 and tokens[sequence * room + position] != 0
                        for w in range(4 * lane, H // 4, 128):
                            if known:
                                ptx.copy_async16(ptx.shared_address(words, here + w), states, first + w)
                            else:
                                ptx.store4(words, here + w, 0, 0, 0, 0)
                    ptx.copy_commit()
                if layer == 0:
                    embed(block, tokens, position, room, unit)
                norm(block, norm_1, unit)
                if layer == L:
                    add_up(block, norm_1 + gru_parts.INPUTS, unit, N, 0)
                else:
                    add_up_both(block, norm_1 + gru_parts.INPUTS, unit, N, 0)
                    ptx.copy_wait_all()
                    cuda.syncwarp()
                    add_up(block, recur + U_F + U_INPUT, unit, STATE, 2)
            cuda.syncthreads()
            if layer < L:
                to_keep(block, gates + W_F, N, 0, GATE)
                to_keep(block, gates + W_H, N, 1, CANDIDATE)
                to_gates(block, recur + U_F, STATE, 2, 0)
                for unit in range(warp, units, WARPS):
                    add_up(block, recur + U_H + U_INPUT, unit, GATED, 0)
                cuda.syncthreads()
                to_states(block, recur + U_H, GATED, 0, 0)
                for unit in range(warp, units, WARPS):
                    for odd in range(2):
                        sequence, here, first = state_of(block, unit, odd, layer)
                        if sequence < count:
                            for w in range(lane, H // 4, 32):
                                states[uint64(first + w)] = words[uint64(here + w)]
                    norm(block, norm_2, unit)
                    add_up(block, norm_2 + gru_parts.INPUTS, unit, N, 0)
                if layer == last:
                    return
                cuda.syncthreads()
                up(block, inner + W_UP, N, 0, 0)
                for unit in range(warp, units, WARPS):
                    add_up_inner(block, inner + W_DOWN_INPUT, unit, INSIDE, 0)
                cuda.syncthreads()
                down(block, norm_1 + PLAN * DOWN, INSIDE, 0, 0)
        hand_over(block, out, sums)

    return Kernel(read_recurrent, gpu.shared)


# --- the transformer --------------------------------------------------------------------------------------------------

@device
def rounded_word(y, at, scale):
    """Four entries y[at...] as bytes."""
    v = ptx.load4(y, at)
    return pack_rounded(rounded(v[0], scale), rounded(v[1], scale), rounded(v[2], scale), rounded(v[3], scale))


def settle_function(gpu, cfg, pairs):
    """Device function: what follows a product whose row's largest result had to be known."""
    H = cfg.HIDDEN_DIM
    TURNS = blocks(H, 128)
    side, vector = pairs.vector_side, pairs.vector

    @gpu.called
    def settle(block, at, unit, y, first, shift, biased):
        """X = amax(X + (y >> shift) + the bias of the row of the plan at `at`) of a pair."""
        lane, source, v = cuda.threadIdx.x & 31, block.source, int32s(4)
        if biased:
            biases = side(source, at + BIAS, block.first + unit, H)
        for odd in range(2):
            row, top = row_of(unit) + 8 * odd, int32(0)
            here, x = first + row * (3 * H), word_of(block, X, row)
            for w in range(lane, H // 4, 32):
                results, word = ptx.load4(y, here + 4 * w), block.words[uint64(x + w)]
                if biased:
                    noise = ptx.load2(block.drawn, biases[0] + 2 * w)
                for k in range(4):
                    v[k] = int32(byte(word, k) + (results[k] >> shift))
                    if biased:
                        v[k] = int32(v[k] + of_member(vector(source, biases, noise, 4 * w + k), odd))
                    top = max(top, int32(abs(v[k])))
                ptx.store4(y, here + 4 * w, v[0], v[1], v[2], v[3])
            scale = amax_scale(ptx.warp_max(top))
            for turn in range(TURNS):
                w = lane + 32 * turn
                if w < H // 4:
                    block.words[uint64(x + w)] = rounded_word(y, here + 4 * w, scale)
    return settle


def attention_functions(gpu, cfg):
    """(turn, attend), device functions of a row."""
    H = cfg.HIDDEN_DIM
    D = cfg.HEAD_DIM
    SHIFT_ATTN = cfg.SHIFT_ATTN
    W = D // 4                                               # words of a head
    TURNS = blocks(H, 128)
    turned = turned_function(cfg)

    @gpu.device
    def turn(block, row, y, first, rope, position, keys, values, cache):
        """Queries to their region, keys and values of a row to its sequence's, which begin at word `cache`."""
        lane, here = cuda.threadIdx.x & 31, first + row * (3 * H)
        query, cached = word_of(block, INSIDE, row), cache + position * (H // 4)
        for matrix in range(3):
            top = int32(0)
            for w in range(lane, H // 4, 32):
                at = here + matrix * H + 4 * w
                v = ptx.load4(y, at)
                if matrix < 2:
                    r = ptx.load4(rope, int64(position * D + 4 * w % D))
                    v = turned(v[0], v[1], r[0], r[1]) + turned(v[2], v[3], r[2], r[3])
                    ptx.store4(y, at, v[0], v[1], v[2], v[3])
                for k in range(4):
                    top = max(top, int32(abs(v[k])))
            scale = amax_scale(ptx.warp_max(top))
            for turn in range(TURNS):
                w = lane + 32 * turn
                if w < H // 4:
                    word = rounded_word(y, here + matrix * H + 4 * w, scale)
                    if matrix == 0:
                        block.words[uint64(query + w)] = word
                    elif matrix == 1:
                        keys[uint64(cached + w)] = word
                    else:
                        values[uint64(cached + w)] = word

    @gpu.device
    def score(block, keys, at_query, at_key):
        s = int32(0)
        for i in range(W // 4):
            key, query = ptx.load4(keys, at_key + 4 * i), ptx.load4(block.words, at_query + 4 * i)
            for k in range(4):
                s = ptx.dp4a(key[k], query[k], s)
        return s

    @gpu.called
    def attend(block, row, head, position, keys, values, cache, exps):
        """Region N of a head of a row: the mean of the values at `position` and before. A lane has a position's score,
        then a word of the values of every (32 / W)-th position."""
        lane, first = cuda.threadIdx.x & 31, cache + head * W
        query, top = word_of(block, INSIDE, row) + head * W, int32(-2 ** 31)
        for past in range(lane, position + 1, 32):
            top = max(top, score(block, keys, query, first + past * (H // 4)))
        top = ptx.warp_max(top) >> SHIFT_ATTN
        total, sums, part = int64(0), cuda.local.array(4, int64), int32s(4)
        for k in range(4):
            sums[k] = 0
        for start in range(0, position + 1, 32):
            weight = int32(0)
            if start + lane <= position:
                s = score(block, keys, query, first + (start + lane) * (H // 4))
                weight = exps[uint64(min(int32(top - (s >> SHIFT_ATTN)), 255))]
            total += weight
            for k in range(4):                               # 32 weights of 19 bits at most times a byte
                part[k] = 0
            for i in range(min(W, (position - start) // (32 // W) + 1)):
                past = i * (32 // W) + lane // W
                w = cuda.shfl_sync(0xFFFFFFFF, weight, past)
                value = values[uint64(first + min(start + past, position) * (H // 4) + lane % W)]
                for k in range(4):
                    part[k] = int32(part[k] + int32(w * byte(value, k)))
            for k in range(4):
                sums[k] += part[k]
        for d in range(5):
            total += across(total, 1 << d)
            if 1 << d >= W:
                for k in range(4):
                    sums[k] += across(sums[k], 1 << d)
        if lane < W:
            for k in range(4):
                part[k] = clip(int32(float(sums[k]) / float(total)))
            block.words[uint64(word_of(block, N, row) + head * W + lane)] = pack_bytes(part, 0)

    return turn, attend


def transformer_kernel(cfg, gpu):
    """The same for the transformer: out, sums as in `recurrent_kernel`.

    Rows of the plan follow one another as they are read. keys, values: int8 [layers, count, room, H], as words; y int32
    [tiles of all blocks, 16, 3 H]: results of a product before their row's largest is known."""
    H = cfg.HIDDEN_DIM
    L = cfg.N_LAYERS
    HEADS = cfg.N_HEADS
    SHIFT_OUT = cfg.SHIFT_OUT
    SHIFT_UP = cfg.SHIFT_MLP_UP
    SHIFT_DOWN = cfg.SHIFT_MLP_DOWN
    STRIDE, INNER_STRIDE = stride_words(H, gpu, H), 4 * stride_words(4 * H, gpu, H)
    pairs = drawn_functions(cfg)
    job_shift = pairs.shift

    @gpu.called
    def store(block, row, c, total, entry, where):
        """where: (y, the first of this matrix in this block)."""
        where[0][uint64(where[1] + row * (3 * H) + c)] = total

    @gpu.called
    def inner(block, row, c, total, bias, gelu):
        u = gelu[uint64(clip(int32((total >> SHIFT_UP) + bias)) & 255)]
        block.vector[entry_of(block, INSIDE, 0, row * INNER_STRIDE + c)] = u

    to_y, down_to_y = product_function(gpu, pairs, H, H, H, store), product_function(gpu, pairs, H, 4 * H, H, store)
    up = product_function(gpu, pairs, H, H, 4 * H, inner, MATRIX_BIAS - MATRIX)
    settle, (turn, attend) = settle_function(gpu, cfg, pairs), attention_functions(gpu, cfg)
    norm, embed = norm_function(gpu, cfg, pairs), embed_function(gpu, cfg, pairs)
    add_up, add_up_three, add_up_inner = (sums_function(gpu, cfg, pairs, *lengths)
                                          for lengths in ((H,), (H, 1, 3), (4 * H, 4)))

    @device
    def cache_of(block, row, layer, room):
        """Of a row: (its sequence, the first word of its keys and values)."""
        sequence = sequence_of(block, row)
        return sequence, (int64(layer) * block.count + sequence) * room * (H // 4)

    @cuda.jit(launch_bounds=THREADS)
    @gpu.unroll
    def read_transformer(plan: A32, weights: A8, overlay: A8, packed: A32, job: AU32, drawn: A32,
                         tokens: A32, at: A32, room, count, tiles, last, rope: A32, exps: A32, gelu: A8, keys: A32,
                         values: A32, y: A32, out: A32, sums: A32):
        warp, rows = cuda.threadIdx.x >> 5, 16 * tiles
        source, position = source_of(plan, 0, weights, overlay, job, 0), at[0]
        block = block_of(source, packed, drawn, tiles, STRIDE, count, job_shift(job))
        units, own, p = block.units, int64(cuda.blockIdx.x) * rows * (3 * H), 0
        for layer in range(-1, L + 1):
            for unit in range(warp, units, WARPS):
                if layer < 0:
                    embed(block, tokens, position, room, unit)
                else:
                    settle(block, p, unit, y, own, SHIFT_DOWN, True)
                norm(block, p, unit)
                if 0 <= layer < L:
                    add_up_three(block, p + transformer.INPUTS, unit, N, 0)
                else:
                    add_up(block, p + transformer.INPUTS, unit, N, 0)
            cuda.syncthreads()
            if 0 <= layer < L:
                p += PLAN
                for matrix in range(3):
                    to_y(block, p + matrix * NEXT_MATRIX, N, matrix, (y, own + matrix * H))
                for row in range(warp, rows, WARPS):
                    sequence, cache = cache_of(block, row, layer, room)
                    if sequence < count:
                        turn(block, row, y, own, rope, position, keys, values, cache)
                if layer == last:
                    return
                cuda.syncthreads()
                for task in range(warp, rows * HEADS, WARPS):
                    row, head = task // HEADS, task % HEADS
                    sequence, cache = cache_of(block, row, layer, room)
                    if sequence < count:
                        attend(block, row, head, position, keys, values, cache, exps)
                cuda.syncthreads()
                p += PLAN
                for unit in range(warp, units, WARPS):
                    add_up(block, p, unit, N, 0)
                cuda.syncthreads()
                p += PLAN
                to_y(block, p + MATRIX, N, 0, (y, own))
                p += PLAN
                for unit in range(warp, units, WARPS):
                    settle(block, p, unit, y, own, SHIFT_OUT, False)
                    norm(block, p, unit)
                    add_up(block, p + transformer.INPUTS, unit, N, 0)
                cuda.syncthreads()
            if layer < L:
                p += PLAN
                up(block, p + MATRIX, N, 0, gelu)
                for unit in range(warp, units, WARPS):
                    add_up_inner(block, p + INPUT, unit, INSIDE, 0)
                cuda.syncthreads()
                p += PLAN
                down_to_y(block, p + MATRIX, INSIDE, 0, (y, own))
                p += PLAN
        hand_over(block, out, sums)

    return Kernel(read_transformer, gpu.shared)


# --- logits -----------------------------------------------------------------------------------------------------------

def logits_kernel(cfg, gpu):
    """z = logits int32 [16 * every, V] of out, sums of the kernels above, in `every` tiles. Launch [columns of the
    vocabulary / (LOGIT_WARPS * COLUMNS), every / 2 / each], LOGIT_WARPS warps; call: the head's row of the plan."""
    H = cfg.HIDDEN_DIM
    V = cfg.VOCAB_SIZE
    SHIFT = cfg.SHIFT_LOGIT
    GRU = cfg.MODEL == "gru"
    STRIDE = stride_words(H, gpu, H)
    pairs = drawn_functions(cfg)
    job_shift = pairs.shift
    multiply, next_tile = multiply_functions(gpu, pairs, H, STRIDE, V)
    divided = divided_function(cfg, H)

    @gpu.device
    def logit(total):
        return int32(divided(total)) if GRU else int32(total >> SHIFT)

    @cuda.jit(launch_bounds=(32 * LOGIT_WARPS, 2))
    @gpu.unroll
    def logits(call, plan: A32, weights: A8, overlay: A8, packed: A32, job: AU32, drawn: A32, every, each,
               out: A32, sums: A32, z: A32):
        acc, noise, results = int32s(32), int32s(16), int32s(2)
        rows, t = cuda.shared.array(0, int32, 128), cuda.threadIdx.x
        g, q = (t & 31) >> 2, t & 3
        first = (cuda.blockIdx.x * LOGIT_WARPS + (t >> 5)) * COLUMNS
        source, shift = source_of(plan, call * PLAN, weights, overlay, job, 0), job_shift(job)
        for two in range(cuda.blockIdx.y * each, min((every + 1) // 2, (cuda.blockIdx.y + 1) * each)):
            tile = 2 * two
            more_tiles = min(every - tile, 2)
            cuda.syncthreads()
            for i in range(t, 4 * STRIDE * more_tiles, 32 * LOGIT_WARPS):
                ptx.store4(rows, 4 * i, *ptx.load4(out, tile * (16 * STRIDE) + 4 * i))
            cuda.syncthreads()
            if first < V:
                multiply(acc, noise, rows, 0, more_tiles, source, 0, packed, drawn, 8 * tile, first)
                for _ in range(more_tiles):
                    row = 16 * tile + g
                    both, at = (sums[uint64(row)], sums[uint64(row + 8)]), int64(16 * tile + 2 * g) * V + first + 2 * q
                    for j in range(4):
                        for half in range(2):
                            for e in range(2):
                                noisy = int32(of_member(both, half) * noise[2 * j + e]) >> shift
                                results[e] = logit(int32(acc[4 * j + 2 * half + e] + noisy))
                            here, left = at + half * V + 8 * j, V - first - 8 * j - 2 * q
                            if V % COLUMNS == 0:
                                ptx.store2(z, here, results[0], results[1])
                            else:
                                for e in range(min(2, left)):
                                    z[uint64(here + e)] = results[e]
                    tile += 1
                    next_tile(acc, noise)

    return Kernel(logits, 128 * STRIDE)
