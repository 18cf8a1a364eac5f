"""The forward pass without noise on a GPU, for both models, which validates and writes texts; and unit trials (SPEC
21): the head's errors, the transposed pass, and votes.

Arrays of activations and credits are row-major: with n positions at a time, row w * n + t is the t-th of sequence w, a
window or a text. Rows are padded with zeros to `wide` bytes, and their number to a multiple of TILE, so that products
have whole tiles. A matrix is packed twice: a row for every output, for the forward pass, and a row for every input, for
the transposed one.

Votes are products over positions, by the kernel of the update with its operand layout (kernels.update.place): an
operand row for every input of a matrix and for every credit.
"""

import math

import numpy as np
from numba import cuda, float32, float64, int32, int64, uint32

from kernels import ptx
from kernels.host import Kernel
from kernels.parts import (A8, A16, A32, A64, AF64, AU32, B1, F1, amax_scale, across, blocks, byte, clip, int32s, pack4,
                           pack_bytes, pack_rounded, rounded)
from kernels.rules import NORMS, TARGET, device, ntt_functions
from kernels.tiles import DEPTH, SHARED, THREADS, TILE, tile_functions
from kernels.transformer import turned_function
from kernels.update import place, products_kernel, vote_index
from model import integer_tables, parameters, rules, steps, units

BLOCK = 128                  # threads of a block whose warps have a row each
WARPS = BLOCK // 32
HEAD_BLOCK = 256             # threads for the logits of a position
HEAD_WARPS = 8
HEAD_ROWS = 1 << 13          # positions whose logits are in memory at once
BINS = 256                   # of a histogram of exponents
TURNS = 8                    # rows of a warp of a block that has a histogram: few blocks add to that of all
# entries of the exponential table of validation, the last 0; its int64 for 1: a sum of 2^18 fits
NATS, NATS_ONE = 4096, 2.0 ** 44

add, sub = TARGET.add, TARGET.sub
mul, div = TARGET.mul, TARGET.div
nearest = TARGET.nearest
RULES = rules.unit_rules(device, TARGET)
share_unit, share = RULES.share_unit, RULES.share
dither_of, error_of, excess = RULES.dither_of, RULES.error, RULES.excess
exponent, power, whole = RULES.exponent, RULES.power, RULES.whole
VOTES = rules.vote_rules(device)
least_vote, vote_digit = VOTES.least_vote, VOTES.digit
quotient, normed = NORMS.quotient, NORMS.normed
ROW_BITS, WINDOW_BITS = units.ROW_BITS, units.WINDOW_BITS
ROW_MOST, WINDOW_MOST = (1 << ROW_BITS) - 1, (1 << WINDOW_BITS) - 1


def wide(n):
    """Bytes of a row of n."""
    return blocks(n, TILE) * TILE


@device
def warp_sum(x):
    """int64 sum over the warp."""
    for d in range(5):
        x += across(x, 16 >> d)
    return x


@device
def top_of(x):
    """float32, of numbers that are not negative: the largest of the warp."""
    return ptx.bits_float(ptx.warp_max(ptx.float_bits(x)))


@device
def row_of_warp():
    return cuda.blockIdx.x * WARPS + (cuda.threadIdx.x >> 5)


@device
def turn4(x):
    """Transposes the bytes of four words."""
    turned = int32s(4)
    for half in range(2):
        low = ptx.byte_permute(x[0], x[1], 0x5140 + 0x2222 * half)
        high = ptx.byte_permute(x[2], x[3], 0x5140 + 0x2222 * half)
        turned[2 * half] = ptx.byte_permute(low, high, 0x5410)
        turned[2 * half + 1] = ptx.byte_permute(low, high, 0x7632)
    return turned


@device
def note(e, top, exponents, at, here):
    """Notes the exponent of a row of credits, one lane of its warp. here: the histogram of the block."""
    if cuda.threadIdx.x & 31 == 0:
        exponents[at] = e
        if top > float32(0):
            cuda.atomic.add(here, e + units.EXPONENTS, 1)


@device
def add_counts(here, counts, first):
    """The histogram of the block is added to that of all, from counts[first] on."""
    cuda.syncthreads()                                       # all warps have noted their rows
    for i in range(cuda.threadIdx.x, BINS, BLOCK):
        if here[i] > 0:
            cuda.atomic.add(counts, first + i, here[i])


@device
def cleared(here):
    for i in range(cuda.threadIdx.x, BINS, BLOCK):
        here[i] = 0
    cuda.syncthreads()                                       # nobody counts before all is 0
    return here


@device
def row_of_turn(turn):
    return (cuda.blockIdx.x * TURNS + turn) * WARPS + (cuda.threadIdx.x >> 5)


def divided_function(divisor):
    """A device function: the quotient of an int32 by a constant."""
    DIVISOR, RECIPROCAL = int(divisor), np.float32(1) / np.float32(divisor)

    @device
    def divided(y):
        return quotient(y, int32(DIVISOR), float32(RECIPROCAL))

    return divided


def build(cfg, wgmma):
    """({name: Kernel} of the forward pass that texts and windows have in common, the same of validation alone, and of
    what else unit trials need: nothing with noise on weights)."""
    gru, trials = cfg.MODEL == "gru", cfg.PERTURB == "units"
    recur, through_states = _recurrent_kernels(cfg) if gru else (None, None)
    reading, others = [*_norm_kernels(cfg), *([] if gru else _attention_kernels(cfg))], []
    if trials:
        others = [*_vote_kernels(cfg), *_credit_kernels(cfg), *_head_kernels(cfg), _loudest_kernel()]
        others += [through_states] if gru else [_attend_kernel(cfg), *_score_kernels(cfg),
                                                _through_attention_kernel(cfg)]
    reading, validation, others = ({function.__name__: Kernel(cuda.jit(function)) for function in some}
                                   for some in (reading, [_nats_kernel(cfg)], others))
    if gru:                                                  # a thread a unit, so up to 1,024 in a block
        reading["recur"] = Kernel(cuda.jit(launch_bounds=cfg.HIDDEN_DIM)(recur))
    for function in _product_kernels(cfg, wgmma):
        reading[function.__name__] = Kernel(cuda.jit(launch_bounds=THREADS)(function), SHARED)
    if trials:
        others["products"] = Kernel(cuda.jit(launch_bounds=THREADS)(products_kernel(wgmma)), SHARED)
    return reading, validation, others


# --- products ---------------------------------------------------------------------------------------------------------

@device
def packed_row(c):
    """Where the row of column c of a product is packed: so that a thread's four sums of 16 columns are neighbours."""
    return c & ~15 | (c & 2) << 2 | c >> 1 & 6 | c & 1


@device
def packed_word(c, j, words):
    """Where word j of the row of column c is packed, of rows of `words`: in core matrices of eight rows by 16 bytes
    (kernels.host.QUADS)."""
    row = packed_row(c)
    return (row >> 3) * (8 * words) + (j >> 2) * 32 + (row & 7) * 4 + (j & 3)


def _product_kernels(cfg, wgmma):
    """out = x . w over rows of x and of w, [rows, out_words]: product as int32, scaled as logits and gates are.
    x_words, w_words: of a row; `deep` stages of a row are multiplied. Grid: [rows of w / TILE, rows of x / TILE]."""
    tile = tile_functions(wgmma)
    TALL, SUMS, APART = tile.TALL, tile.SUMS, tile.APART
    accumulate, corner = tile.accumulate, tile.corner
    GRU, LOGIT, SHORT = cfg.MODEL == "gru", cfg.SHIFT_LOGIT, logit_type(cfg) is A16
    divided = divided_function(parameters.divisor(cfg, cfg.HIDDEN_DIM))

    @device
    def keep(out, at, a, b, c, d):
        ptx.store4(out, at, a, b, c, d)

    @device
    def keep_scaled(out, at, a, b, c, d):
        if GRU:
            out[at >> 2] = pack4(divided(a), divided(b), divided(c), divided(d))
        elif SHORT:
            ptx.store2(out, at >> 1, int32(a >> LOGIT & 0xFFFF | b >> LOGIT << 16),
                       int32(c >> LOGIT & 0xFFFF | d >> LOGIT << 16))
        else:
            ptx.store4(out, at, a >> LOGIT, b >> LOGIT, c >> LOGIT, d >> LOGIT)

    def kernel(name, store):
        """store(out, at, a, b, c, d): four sums of a row, side by side from number `at` on."""
        def multiply(x: A32, x_words, w: A32, w_at, w_words, deep, out: A32, out_words):
            acc = cuda.local.array((TALL, SUMS), int32)
            t = cuda.threadIdx.x
            group, lane_row, lane_word = t >> 5, t & 7, ((t & 31) >> 3) * 4
            for i in range(TALL):
                for j in range(SUMS):
                    acc[i, j] = 0
            x_at = (cuda.blockIdx.y * TILE + group * 8 + lane_row) * x_words + lane_word
            w_here = w_at + (cuda.blockIdx.x * TILE + group * 8) * w_words + (t & 31) * 4
            accumulate(acc, x, x_at, 8 * x_words, DEPTH // 4, w, w_here, 8 * w_words, DEPTH * 2, deep)
            p, s = corner()
            row, col = cuda.blockIdx.y * TILE + p, cuda.blockIdx.x * TILE + (s & ~15) + 2 * (s & 6)
            for i in range(TALL):
                for half in range(2):
                    at = (row + APART * i + 8 * half) * out_words + col
                    for j in range(0, SUMS, 8):
                        k = j + 2 * half
                        store(out, at + 2 * j, acc[i, k], acc[i, k + 1], acc[i, k + 4], acc[i, k + 5])
        multiply.__name__ = name
        return multiply

    return kernel("product", keep), kernel("scaled", keep_scaled)


def logit_type(cfg):
    """The type of an array of logits: int16 where they fit."""
    if cfg.MODEL == "gru":
        return A8
    return A16 if 127 * 127 * cfg.HIDDEN_DIM >> cfg.SHIFT_LOGIT < 1 << 15 else A32


# --- the forward pass -------------------------------------------------------------------------------------------------

def _transform_functions(cfg):
    """(transform, transformed), device functions for NTT_MODE: the coefficient of a position of a sequence, and what it
    adds to hidden unit i. Without NTT_MODE they are 0."""
    NTT = cfg.NTT_MODE != 0
    (of_window, place_of), (of_past, _) = (ntt_functions(cfg, causal) for causal in (False, True))

    @device
    def transform(tokens, first, position, causal):
        c = int32(0)
        if NTT:
            c = of_past(tokens, first, position) if causal else of_window(tokens, first, position)
        return c

    @device
    def transformed(weights, c, i):
        total = int32(0)
        if NTT:
            for k in range(3):
                total += weights[place_of(k, c, i)] >> 2
        return total

    return transform, transformed


def _norm_kernels(cfg):
    """Embedding, norms and the residual stream; a warp a row."""
    H, GRU = cfg.HIDDEN_DIM, cfg.MODEL == "gru"
    WORDS, S = H // 4, wide(H) // 4
    transform, transformed = _transform_functions(cfg)
    divided, divided_wide = (divided_function(parameters.divisor(cfg, n)) for n in (H, 4 * H))
    S4, UP, RELU = wide(4 * H) // 4, cfg.SHIFT_MLP_UP, cfg.MLP_RELU

    def embed(table: A32, at_table, weights: A8, bias, tokens: A32, width, at: A32, n, causal, rows, h: A32):
        """h int8 [rows]: the embedding of position at[0] + r % n of sequence r // n; tokens [.., width]. table: packed,
        a row a token. causal: see kernels.rules.ntt_functions."""
        r, lane = row_of_warp(), cuda.threadIdx.x & 31
        if r < rows:
            first, position, values = r // n * width, at[0] + r % n, int32s(4)
            token, c = tokens[first + position], transform(tokens, first, position, causal)
            for j in range(lane, WORDS, 32):
                word = table[at_table + packed_word(token, j, S)]
                if not GRU:
                    for e in range(4):
                        i = 4 * j + e
                        values[e] = clip(int32(byte(word, e) + weights[bias + i] + transformed(weights, c, i)))
                    word = pack_bytes(values, 0)
                h[r * S + j] = word

    def norm(h: A32, weights: A8, at, bias, rows, n: A32, means: A32):
        """n int8 [rows]: the norm of h, with weights from `at` and biases from `bias` on; means int32 [rows]: the mean
        sizes of h."""
        r, lane = row_of_warp(), cuda.threadIdx.x & 31
        if r < rows:
            total = int32(0)
            for j in range(lane, WORDS, 32):
                word = h[r * S + j]
                total += abs(byte(word, 0)) + abs(byte(word, 1)) + abs(byte(word, 2)) + abs(byte(word, 3))
            mean = int32(max(ptx.warp_sum(int32(total)) // H, 1))
            reciprocal, values = float32(float32(1) / float32(mean)), int32s(4)
            for j in range(lane, WORDS, 32):
                word = h[r * S + j]
                for e in range(4):
                    x, w = byte(word, e), int32(weights[at + 4 * j + e])
                    if GRU:
                        values[e] = quotient(int32(x * w), mean, reciprocal)
                    else:
                        values[e] = normed(x, w, int32(weights[bias + 4 * j + e]), mean)
                n[r * S + j] = pack_bytes(values, 0)
            if lane == 0:
                means[r] = mean

    def residual(y: A32, shift, weights: A8, bias, rows, h: A32, scales: F1):
        """h = amax(h + (y >> shift) + bias), scales float32 [rows]: that of amax; in the recurrent model h = clip(h +
        y divided). bias: where it begins in weights, -1: none. y int32 [rows]."""
        r, lane = row_of_warp(), cuda.threadIdx.x & 31
        if r < rows:
            values, top = int32s(4), int32(0)
            for j in range(lane, WORDS if not GRU else 0, 32):
                word, four = h[r * S + j], ptx.load4(y, (r * S + j) * 4)
                for e in range(4):
                    b = int32(weights[bias + 4 * j + e]) if bias >= 0 else int32(0)
                    top = max(top, abs(int32(byte(word, e) + (four[e] >> shift) + b)))
            scale = float32(1) if GRU else amax_scale(ptx.warp_max(top))
            for j in range(lane, WORDS, 32):
                word, four = h[r * S + j], ptx.load4(y, (r * S + j) * 4)
                for e in range(4):
                    if GRU:
                        v = clip(byte(word, e) + divided_wide(four[e]))
                    else:
                        b = int32(weights[bias + 4 * j + e]) if bias >= 0 else int32(0)
                        v = rounded(int32(byte(word, e) + (four[e] >> shift) + b), scale)
                    values[e] = v
                h[r * S + j] = (pack_bytes(values, 0) if GRU else
                                pack_rounded(values[0], values[1], values[2], values[3]))
            if lane == 0:
                scales[r] = scale

    def inner(y: A32, weights: A8, bias, gelu: A8, rows, before: A32, inside: A32):
        """before, inside int8 [rows, 4 S4]: the values before the inner units of an MLP, from y int32 [rows, 4 S4], and
        after. bias: where it begins in weights. A thread four of them."""
        i = cuda.grid(1)
        r, j = i // H, i % H
        if r < rows:
            at, values, units_ = r * S4 + j, int32s(4), int32s(4)
            four = ptx.load4(y, 4 * at)
            for e in range(4):
                if GRU:
                    v = divided(four[e])
                    units_[e] = max(v, int32(0)) if RELU else v
                else:
                    v = clip(int32((four[e] >> UP) + weights[bias + 4 * j + e]))
                    units_[e] = gelu[v & 255]
                values[e] = v
            before[at], inside[at] = pack_bytes(values, 0), pack_bytes(units_, 0)

    return embed, norm, residual, inner


def _attention_kernels(cfg):
    """Attention of the transformer, forward. Position t of sequence w is row w * room + t of qkv int8 [.., 3 S]:
    queries, keys, values."""
    H, D = cfg.HIDDEN_DIM, cfg.HEAD_DIM
    S, WORDS = wide(H) // 4, H // 4
    SHIFT, DIMENSIONS, NONE = cfg.SHIFT_ATTN, D // 32, -2 ** 31
    turned = turned_function(cfg)

    @device
    def read_four(y, at, part, rope, angle, values):
        """Four neighbours of a head, queries and keys (parts 0 and 1) turned."""
        four = ptx.load4(y, at)
        if part < 2:
            c = ptx.load4(rope, angle)
            values[0], values[1] = turned(four[0], four[1], c[0], c[1])
            values[2], values[3] = turned(four[2], four[3], c[2], c[3])
        else:
            for e in range(4):
                values[e] = four[e]

    def quantise(y: A32, rope: A32, at: A32, n, room, rows, padded, qkv: A32, scales: F1):
        """qkv at positions at[0] + r % n of sequences r // n, of y int32 [rows, 3 S]: queries and keys turned by their
        position, all scaled by amax; scales float32 [3, padded]. Grid: [rows / WARPS, 3]."""
        r, lane, part = row_of_warp(), cuda.threadIdx.x & 31, cuda.blockIdx.y
        if r < rows:
            t, first = at[0] + r % n, (r * 3 + part) * S
            to = ((r // n * room + t) * 3 + part) * S
            top, values = int32(0), int32s(4)
            for j in range(lane, WORDS, 32):
                read_four(y, (first + j) * 4, part, rope, t * D + 4 * j % D, values)
                for e in range(4):
                    top = max(top, abs(values[e]))
            scale = amax_scale(ptx.warp_max(top))
            for j in range(lane, WORDS, 32):
                read_four(y, (first + j) * 4, part, rope, t * D + 4 * j % D, values)
                for e in range(4):
                    values[e] = rounded(values[e], scale)
                qkv[to + j] = pack_rounded(values[0], values[1], values[2], values[3])
            if lane == 0:
                scales[part * padded + r] = scale

    @device
    def score(qkv, query, key):
        total = int32(0)
        for j in range(0, D // 4, 4):
            a, b = ptx.load4(qkv, query + j), ptx.load4(qkv, key + j)
            for e in range(4):
                total = ptx.dp4a(a[e], b[e], total)
        return total >> SHIFT

    def recall(qkv: A32, values: A8, exps: A32, at: A32, n, room, rows, attended: A8):
        """attended int8 [rows]: what position at[0] + r % n of sequence r // n reads. values: the bytes of qkv. Scores
        are made twice, so that a sequence may have any length. Grid: [rows / WARPS, heads]."""
        r, lane, head = row_of_warp(), cuda.threadIdx.x & 31, cuda.blockIdx.y
        if r < rows:
            t, first = at[0] + r % n, r // n * room
            query = (first + t) * (3 * S) + head * (D // 4)
            keys, at_values = query - (t - lane) * (3 * S) + S, (first * 3 + 2) * (4 * S) + head * D + lane
            top, total, reads = int32(NONE), int64(0), cuda.local.array(DIMENSIONS, int64)
            for d in range(DIMENSIONS):
                reads[d] = 0
            for start in range(0, t + 1, 32):
                if start + lane <= t:
                    top = max(top, score(qkv, query, keys + start * (3 * S)))
            top = ptx.warp_max(top)
            for start in range(0, t + 1, 32):
                weight = int32(0)
                if start + lane <= t:
                    weight = exps[min(top - score(qkv, query, keys + start * (3 * S)), 255)]
                total += weight
                for s in range(start, min(start + 32, t + 1), 4):
                    for e in range(4):                       # the last ones may have a weight of 0
                        w = cuda.shfl_sync(0xFFFFFFFF, weight, s - start + e)
                        for d in range(DIMENSIONS):
                            value = int32(values[at_values + min(s + e, t) * (12 * S) + 32 * d])
                            reads[d] = ptx.mad_wide(w, value, reads[d])
            total = warp_sum(total)
            for d in range(DIMENSIONS):
                attended[r * (4 * S) + head * D + 32 * d + lane] = clip(int32(float64(reads[d]) / float64(total)))

    return quantise, recall


def near_function(T):
    """(neighbouring positions that a warp reads together, a device function: their int32 of position s, which lie side
    by side in shared memory from address `at` on)."""
    NEAR = 4 if T <= 512 else 2                  # else shared memory would be too small; T is a multiple of 8

    @device
    def near(at, s, out):
        if NEAR == 4:
            four = ptx.load_shared4(int32(at + 16 * s))
            for i in range(NEAR):
                out[i] = four[i]
        else:
            for i in range(NEAR):
                out[i] = ptx.read_shared(int32(at + 4 * (NEAR * s + i)))

    return NEAR, near


def _attend_kernel(cfg):
    """Attention of whole windows, with the shares that unit trials go back through."""
    T, D, HEADS = cfg.SEQ_LEN, cfg.HEAD_DIM, cfg.N_HEADS
    S, SHIFT = wide(cfg.HIDDEN_DIM) // 4, cfg.SHIFT_ATTN
    DIMENSIONS, NONE = D // 32, -2 ** 31
    NEAR, near = near_function(T)
    READS = NEAR * DIMENSIONS

    def attend(qkv: A32, values: A8, exps: A32, shares: A16, attended: A8):
        """shares int16 [windows, heads, T, T], in 2^-12; attended int8 [rows]: what is read. values: the bytes of qkv.
        Grid: [windows, heads], a warp for every fourth group of NEAR positions, which share what they load."""
        scores = cuda.shared.array((WARPS, T, NEAR), int32, 16)
        lane, warp = cuda.threadIdx.x & 31, cuda.threadIdx.x >> 5
        window, head = cuda.blockIdx.x, cuda.blockIdx.y
        base, ours = window * T, ptx.shared_address(scores, 0) + warp * (T * NEAR * 4)
        tops, sums, totals = int32s(NEAR), int32s(NEAR), cuda.local.array(NEAR, int64)
        weights, reads = int32s(NEAR), cuda.local.array(READS, int64)
        for t in range(warp * NEAR, T, WARPS * NEAR):
            query = (base + t) * 3 * S + head * (D // 4)
            for i in range(NEAR):
                tops[i], totals[i] = NONE, 0
            for s in range(lane, t + NEAR, 32):
                key = (base + s) * 3 * S + S + head * (D // 4)
                for i in range(NEAR):
                    sums[i] = 0
                for j in range(D // 16):
                    b = ptx.load4(qkv, key + 4 * j)
                    for i in range(NEAR):
                        a = ptx.load4(qkv, query + i * 3 * S + 4 * j)
                        for e in range(4):
                            sums[i] = ptx.dp4a(a[e], b[e], sums[i])
                for i in range(NEAR):
                    scores[warp, s, i] = sums[i] >> SHIFT
                    if s <= t + i:
                        tops[i] = max(tops[i], sums[i] >> SHIFT)
            for i in range(NEAR):
                tops[i] = ptx.warp_max(tops[i])
            for s in range(lane, t + NEAR, 32):
                for i in range(NEAR):
                    weight = exps[min(tops[i] - scores[warp, s, i], 255)] if s <= t + i else int32(0)
                    scores[warp, s, i] = weight
                    totals[i] += weight
            for i in range(NEAR):
                totals[i] = warp_sum(totals[i])
            cuda.syncwarp()                                  # the weights of the warp are whole
            first = ((window * HEADS + head) * T + t) * T
            for s in range(lane, t + NEAR, 32):
                for i in range(NEAR):
                    if s <= t + i:
                        # attention_share by a quotient that float64 truncates right
                        twice = float64(2 * totals[i])
                        share_ = int32(float64((int64(scores[warp, s, i]) << 13) + totals[i]) / twice)
                        shares[first + i * T + s] = share_
            for k in range(READS):
                reads[k] = 0
            at = (base * 3 + 2) * (4 * S) + head * D + lane
            for s in range(t + NEAR):
                near(ours, s, weights)
                for d in range(DIMENSIONS):
                    value = int32(values[at + 32 * d])
                    for i in range(NEAR):
                        reads[i * DIMENSIONS + d] = ptx.mad_wide(weights[i], value, reads[i * DIMENSIONS + d])
                at += 12 * S
            for i in range(NEAR):
                for d in range(DIMENSIONS):
                    read = float64(reads[i * DIMENSIONS + d]) / float64(totals[i])
                    attended[(base + t + i) * (4 * S) + head * D + 32 * d + lane] = clip(int32(read))
            cuda.syncwarp()                                  # all lanes have read them

    return attend


def _score_kernels(cfg):
    """Attention of the transformer, back: credits of what is read, and of scores."""
    D, HEADS, T = cfg.HEAD_DIM, cfg.N_HEADS, cfg.SEQ_LEN
    S, OUT = wide(cfg.HIDDEN_DIM) // 4, cfg.SHIFT_OUT
    DIMENSIONS, PAIRS = D // 32, D // 2

    @device
    def read_credit(y, r, i, unit):
        """float32: the credit of what is read, before it is whole."""
        return mul(float32(y[r * (4 * S) + i]), unit)

    def loudest_read(y: A32, exponents: A32, tops: A32):
        """tops int32 [windows, heads], the bits of a float32: the largest size of the credits y int32 [rows], of rows
        with these exponents. Grid: [windows, heads]."""
        lane, warp = cuda.threadIdx.x & 31, cuda.threadIdx.x >> 5
        top = float32(0)
        for t in range(warp, T, WARPS):
            r = cuda.blockIdx.x * T + t
            unit = power(exponents[r] - OUT)
            for d in range(DIMENSIONS):
                top = max(top, abs(read_credit(y, r, cuda.blockIdx.y * D + 32 * d + lane, unit)))
        top = top_of(top)
        if lane == 0:
            cuda.atomic.max(tops, cuda.blockIdx.x * HEADS + cuda.blockIdx.y, ptx.float_bits(top))

    def try_scores(y: A32, exponents: A32, tops: A32, qkv: A32, attended: A8, shares: A16, read: A16, trials: F1,
                   trial_tops: A32):
        """read int16 [rows, 4 S]: the credits of what is read, of one exponent in a head of a window; trials float32
        [windows, heads, T, T]: the worth of raising a score alone; trial_tops: as tops. Grid: as loudest_read."""
        credits = cuda.shared.array((WARPS, PAIRS), int32)
        lane, warp = cuda.threadIdx.x & 31, cuda.threadIdx.x >> 5
        window, head = cuda.blockIdx.x, cuda.blockIdx.y
        base, top = window * T, float32(0)
        e = exponent(ptx.bits_float(tops[window * HEADS + head]), WINDOW_BITS)
        less = power(-e)
        for t in range(warp, T, WARPS):
            r, own = base + t, int32(0)
            unit = power(exponents[r] - OUT)
            for d in range(DIMENSIONS):
                i = 32 * d + lane
                c = whole(read_credit(y, r, head * D + i, unit), less, WINDOW_MOST)
                read[r * (4 * S) + head * D + i] = c
                own += c * attended[r * (4 * S) + head * D + i]
                other = across(c, 1)
                if lane & 1 == 0:
                    credits[warp, i >> 1] = int32(c & 0xFFFF | other << 16)
            own = ptx.warp_sum(int32(own))
            cuda.syncwarp()                                  # the credits of the warp are whole
            first = ((window * HEADS + head) * T + t) * T
            for s in range(lane, t + 1, 32):
                worth, value = int32(0), (base + s) * 3 * S + 2 * S + head * (D // 4)
                for j in range(0, D // 4, 4):
                    four = ptx.load4(qkv, value + j)
                    for k in range(4):
                        worth += ptx.dp2a_low(credits[warp, 2 * (j + k)], four[k])
                        worth += ptx.dp2a_high(credits[warp, 2 * (j + k) + 1], four[k])
                trial = mul(float32(int32(worth - own)), float32(shares[first + s]))
                trials[first + s] = trial
                top = max(top, abs(trial))
            cuda.syncwarp()                                  # all lanes have read them
        top = top_of(top)
        if lane == 0:
            cuda.atomic.max(trial_tops, window * HEADS + head, ptx.float_bits(top))

    return loudest_read, try_scores


def _through_attention_kernel(cfg):
    """Attention of the transformer, back: credits of queries, keys and values."""
    D, HEADS, T = cfg.HEAD_DIM, cfg.N_HEADS, cfg.SEQ_LEN
    S, SHIFT = wide(cfg.HIDDEN_DIM) // 4, cfg.SHIFT_ATTN
    SCALED = np.float32(1) / np.float32(cfg.SOFTMAX_EXP_SCALE)
    NEAR, near = near_function(T)
    turned = turned_function(cfg)

    def through_attention(tops: A32, qkv: A16, read: A32, shares: A16, trials: F1, trial_tops: A32, rope: A32, out: F1):
        """out float32 [rows, 3 S]: credits of queries and keys, turned back, and of values. qkv: as pairs, read too.
        Grid: as loudest_read; a warp has NEAR positions, which share what they load, a lane two neighbours of each, or
        four."""
        below = cuda.shared.array((WARPS, 32, NEAR), int32, 16)      # trials of 32 scores of these positions,
        above = cuda.shared.array((WARPS, 32, NEAR), int32, 16)      # of 32 later ones with them,
        parts = cuda.shared.array((WARPS, 32, NEAR), int32, 16)      # and the shares of the latter
        lane, warp = cuda.threadIdx.x & 31, cuda.threadIdx.x >> 5
        window, head = cuda.blockIdx.x, cuda.blockIdx.y
        base, offset = window * T, warp * (32 * NEAR * 4)
        at_below, at_above = ptx.shared_address(below, 0) + offset, ptx.shared_address(above, 0) + offset
        at_parts = ptx.shared_address(parts, 0) + offset
        e = exponent(ptx.bits_float(tops[window * HEADS + head]), WINDOW_BITS)
        e_trial = exponent(ptx.bits_float(trial_tops[window * HEADS + head]), WINDOW_BITS)
        less_trial, of_score, of_value = power(-e_trial), power(e + e_trial - 12 - SHIFT), power(e - 12)
        square = (window * HEADS + head) * T * T
        g, share_ = int32s(NEAR), int32s(NEAR)
        q0, q1 = int32s(NEAR), int32s(NEAR)
        k0, k1 = int32s(NEAR), int32s(NEAR)
        v0, v1 = cuda.local.array(NEAR, int64), cuda.local.array(NEAR, int64)
        for t in range(warp * NEAR, T, WARPS * NEAR):
            for pair in range(lane, max(D // 2, 32), 32):
                here = head * (D // 2) + min(pair, D // 2 - 1)
                for i in range(NEAR):
                    q0[i], q1[i] = 0, 0
                    k0[i], k1[i] = 0, 0
                    v0[i], v1[i] = 0, 0
                for start in range(0, T, 32):
                    s = start + lane
                    for i in range(NEAR):
                        earlier, later, part = int32(0), int32(0), int32(0)
                        if s <= t + i:
                            earlier = whole(trials[square + (t + i) * T + s], less_trial, WINDOW_MOST)
                        if s >= t + i and s < T:
                            at = square + s * T + t + i
                            later, part = whole(trials[at], less_trial, WINDOW_MOST), int32(shares[at])
                        below[warp, lane, i], above[warp, lane, i], parts[warp, lane, i] = earlier, later, part
                    cuda.syncwarp()                          # trials and shares of the warp are whole
                    at_key = (base + start) * (6 * S) + 2 * S + here
                    for n in range(min(32, t + NEAR - start)):
                        near(at_below, n, g)
                        two = int32(qkv[at_key])
                        for i in range(NEAR):
                            q0[i], q1[i] = int32(q0[i] + g[i] * byte(two, 0)), int32(q1[i] + g[i] * byte(two, 1))
                        at_key += 6 * S
                    skipped = max(t - start, 0)
                    at_query = (base + start + skipped) * (6 * S) + here
                    at_read = (base + start + skipped) * (2 * S) + here
                    for n in range(skipped, min(32, T - start)):
                        near(at_above, n, g)
                        near(at_parts, n, share_)
                        two, credits = int32(qkv[at_query]), read[at_read]
                        at_query, at_read = at_query + 6 * S, at_read + 2 * S
                        for i in range(NEAR):
                            k0[i], k1[i] = int32(k0[i] + g[i] * byte(two, 0)), int32(k1[i] + g[i] * byte(two, 1))
                            v0[i] = ptx.mad_wide(share_[i], int32(credits << 16) >> 16, v0[i])
                            v1[i] = ptx.mad_wide(share_[i], credits >> 16, v1[i])
                    cuda.syncwarp()                          # all lanes have read them
                if pair < D // 2:
                    for i in range(NEAR):
                        cos, sin = rope[(t + i) * D + 2 * pair], rope[(t + i) * D + 2 * pair + 1]
                        q0[i], q1[i] = turned(q0[i], q1[i], cos, int32(-sin))
                        k0[i], k1[i] = turned(k0[i], k1[i], cos, int32(-sin))
                        at = (base + t + i) * (12 * S) + 2 * here
                        out[at] = mul(mul(float32(q0[i]), of_score), float32(SCALED))
                        out[at + 1] = mul(mul(float32(q1[i]), of_score), float32(SCALED))
                        out[at + 4 * S] = mul(mul(float32(k0[i]), of_score), float32(SCALED))
                        out[at + 4 * S + 1] = mul(mul(float32(k1[i]), of_score), float32(SCALED))
                        out[at + 8 * S] = mul(float32(v0[i]), of_value)
                        out[at + 8 * S + 1] = mul(float32(v1[i]), of_value)

    return through_attention


def _recurrent_kernels(cfg):
    """The recurrence of a layer, forward and back: TOGETHER windows a block, a thread a unit."""
    H, WIDTH = cfg.HIDDEN_DIM, cfg.WINDOW
    S, WORDS, TOGETHER = wide(H), H // 4, 8
    divided = divided_function(parameters.divisor(cfg, H))
    open_gate, gated, next_state = NORMS.gate, NORMS.gated, NORMS.next_state

    @device
    def products(acc, weights, at, vectors):
        """acc: column cuda.threadIdx.x of the matrix at weights[at], in words, times the vectors."""
        for i in range(TOGETHER):
            acc[i] = 0
        for j in range(WORDS):
            w = weights[at + j * H + cuda.threadIdx.x]
            for i in range(TOGETHER):
                acc[i] = ptx.dp4a(w, vectors[i, j], acc[i])

    def recur(of_inputs: A8, weights: A32, biases: A8, u_f, u_h, b_f, b_h, tokens: A32, width, at: A32, n, count,
              states: A8, before: A8, gates: A8, past: A8, candidates: A8, x: A8):
        """The states of a layer through n positions of `count` sequences, from at[0] on; tokens [.., width]. of_inputs
        int8 [rows, 2 S]: W_f n and W_h n; u_f, u_h: where the matrices begin, in words; states int8 [count, H] go on.
        What is kept, int8 [rows, S]: states before a position, gates - 127, gated states, candidates; x = clip(x +
        state). A thread a unit."""
        h_words, past_words = cuda.shared.array((TOGETHER, WORDS), int32), cuda.shared.array((TOGETHER, WORDS), int32)
        i, first = cuda.threadIdx.x, cuda.blockIdx.x * TOGETHER
        acc, h, f = int32s(TOGETHER), int32s(TOGETHER), int32s(TOGETHER)
        for k in range(TOGETHER):
            h[k] = int32(states[(first + k) * H + i]) if first + k < count else int32(0)
        for t in range(n):
            for k in range(TOGETHER):
                if first + k < count:
                    if tokens[(first + k) * width + at[0] + t] == 0:
                        h[k] = 0
                    before[((first + k) * n + t) * S + i] = h[k]
                word = word_of(h[k])
                if i & 3 == 0:
                    h_words[k, i >> 2] = word
            cuda.syncthreads()                               # h_words are whole, and all have read past_words
            products(acc, weights, u_f, h_words)
            for k in range(TOGETHER):
                r = (first + k) * n + t
                gate, p = int32(0), int32(0)
                if first + k < count:
                    gate = open_gate(int32(of_inputs[r * (2 * S) + i]), int32(divided(acc[k]) + biases[b_f + i]))
                    p = gated(gate, h[k])
                    gates[r * S + i], past[r * S + i] = gate - 127, p
                f[k] = gate
                word = word_of(p)
                if i & 3 == 0:
                    past_words[k, i >> 2] = word
            cuda.syncthreads()                               # past_words are whole, and all have read h_words
            products(acc, weights, u_h, past_words)
            for k in range(TOGETHER):
                r = (first + k) * n + t
                if first + k < count:
                    new = clip(int32(of_inputs[r * (2 * S) + S + i]) + divided(acc[k]) + biases[b_h + i])
                    candidates[r * S + i] = new
                    h[k] = next_state(f[k], h[k], new)
                    x[r * S + i] = clip(x[r * S + i] + h[k])
        for k in range(TOGETHER):
            if first + k < count:
                states[(first + k) * H + i] = h[k]

    @device
    def word_of(x):
        """The bytes of four neighbouring lanes as a word, known to all four."""
        x = int32((x & 255) << int32(8 * (cuda.threadIdx.x & 3)))
        x = int32(x | across(x, 1))
        return int32(x | across(x, 2))

    def through_states(c: F1, windows: A32, skip, n, count, before: A8, gates: A8, candidates: A8, cuts: A8, out: F1):
        """out float32 [rows, 2 S]: credits of gates and candidates, from those of a layer's states, c float32 [rows,
        S], which the state carries along. cuts: the trial of what only cuts. A thread a unit of a window."""
        i = cuda.grid(1)
        window, unit = i // H, i % H
        if window < count:
            worth = float32(0)
            for back in range(n):
                t = n - 1 - back
                at = (window * n + t) * S + unit
                worth = add(c[at], worth)
                f, new = int32(gates[at]), int32(candidates[at])
                of_gate = float32(int32((new - before[at]) * cuts[f & 255]))
                out[2 * at - unit] = mul(mul(worth, of_gate), float32(2.0 ** -11))
                out[2 * at - unit + S] = mul(mul(worth, float32(int32((f + 127) * cuts[new & 255]))),
                                             float32(2.0 ** -11))
                left = mul(float32(int32(129 - f)), float32(1 / 256))
                worth = mul(worth, left) if windows[window * WIDTH + skip + t] != 0 else float32(0)

    return recur, through_states


# --- the head ---------------------------------------------------------------------------------------------------------

def _nats_kernel(cfg):
    V, VS, SCALE = cfg.VOCAB_SIZE, wide(cfg.VOCAB_SIZE), float(cfg.SOFTMAX_EXP_SCALE)
    Z, NONE = logit_type(cfg), -2 ** 31

    def nats(z: Z, first, rows, windows: A32, n, exps: A64, out: AF64):
        """out float64 [.., n], of rows from `first` on: the cross-entropy of the tokens that follow the positions of
        windows [.., n + 1], from the logits z [rows, VS]. exps int64 [NATS]: exponentials of distances, so that sums do
        not depend on their order. A warp a row."""
        r, lane = row_of_warp(), cuda.threadIdx.x & 31
        if r < rows:
            top, total = int32(NONE), int64(0)
            for v in range(lane, V, 32):
                top = max(top, int32(z[r * VS + v]))
            top = ptx.warp_max(top)
            for v in range(lane, V, 32):
                total += exps[min(top - z[r * VS + v], NATS - 1)]
            total = warp_sum(total)
            if lane == 0:
                row = first + r
                score = z[r * VS + windows[row // n * (n + 1) + row % n + 1]]
                out[row] = math.log(float64(total) / NATS_ONE) + float64(top - score) / SCALE

    return nats


def _head_kernels(cfg):
    V, VS, GRU = cfg.VOCAB_SIZE, wide(cfg.VOCAB_SIZE), cfg.MODEL == "gru"
    T, TARGETS = cfg.SEQ_LEN, cfg.TARGETS
    WIDTH, SKIP = cfg.WINDOW, cfg.STATE_TOKENS
    BIT, UNIT = cfg.SOFTMAX_SCALE_BIT, integer_tables.log_unit(cfg)
    SHORT, NONE = logit_type(cfg) is A16, -2 ** 31
    QUADS, RAGGED = blocks(V, 4), V % 4 != 0
    loss_of = rules.loss_rule(device, TARGET, cfg.LOSS == "exact")
    FULL_ERROR, STEP = 127 << 16, rules.DITHER_STEP

    @device
    def logits_of(z, row, j):
        """Four logits of a row of words."""
        if GRU:
            word = z[row * (VS // 4) + j]
            return byte(word, 0), byte(word, 1), byte(word, 2), byte(word, 3)
        if SHORT:
            two = ptx.load2(z, row * (VS // 2) + 2 * j)
            return int32(two[0] << 16) >> 16, two[0] >> 16, int32(two[1] << 16) >> 16, two[1] >> 16
        return ptx.load4(z, row * VS + 4 * j)

    @device
    def below(top, logit):
        """Where the table has a logit."""
        return uint32(min(uint32(int32(top - logit)), uint32(255)))

    @device
    def logit_of(z, v):
        four = logits_of(z, cuda.blockIdx.x, v >> 2)
        low = four[0] if v & 1 == 0 else four[1]
        high = four[2] if v & 1 == 0 else four[3]
        return int32(low if v & 2 == 0 else high)

    @device
    def within(logit, error):
        """The error; 0 where a logit is at its limit and cannot follow."""
        if GRU and (logit == 127 and error > 0 or logit == -127 and error < 0):
            return int32(0)
        return error

    def errors(z: A32, first, windows: A32, job: AU32, exps: A32, weights: A8, out: A32, out_bytes: A8, losses: A64):
        """out int8 [rows, VS], also as bytes: the errors of the logits z [.., VS] of rows from `first` on; losses
        int64 [rows]: theirs. weights int8 [rows]: 7 in full. job[0] + job[1]: the seed of window 0. A block a row."""
        tops, sums = cuda.shared.array(HEAD_WARPS, int32), cuda.shared.array(HEAD_WARPS, int64)
        table = cuda.shared.array(256, int32)
        t, lane, warp = cuda.threadIdx.x, cuda.threadIdx.x & 31, cuda.threadIdx.x >> 5
        row, values = first + cuda.blockIdx.x, int32s(4)
        table[t] = exps[t]
        top = int32(NONE)
        for j in range(t, QUADS, HEAD_BLOCK):
            four = logits_of(z, cuda.blockIdx.x, j)
            for e in range(4):
                if not RAGGED or j * 4 + e < V:
                    top = max(top, four[e])
        top = ptx.warp_max(top)
        if lane == 0:
            tops[warp] = top
        cuda.syncthreads()                                   # the largest of each warp are there, and the table
        for k in range(HEAD_WARPS):
            top = max(top, tops[k])
        some, total = int32(0), int64(0)
        for j in range(t, QUADS, HEAD_BLOCK):
            four = logits_of(z, cuda.blockIdx.x, j)
            some = int32(0)
            for e in range(4):
                if not RAGGED or j * 4 + e < V:
                    some = int32(some + table[below(top, four[e])])
            total += some
        total = warp_sum(total)
        if lane == 0:
            sums[warp] = total
        cuda.syncthreads()                                   # the sums of each warp are there
        total = int64(0)
        for k in range(HEAD_WARPS):
            total += sums[k]
        unit, weight = share_unit(total), int32(weights[row])
        table[t] = excess(int32(0), share(exps[t], unit), weight)                # of a distance from the largest logit
        cuda.syncthreads()                                   # the table of errors is whole
        window, position = row // T, row % T
        here = window * WIDTH + SKIP + 1
        drawn = here + T + position * (TARGETS - 1) - 1      # the first target is the token that follows
        dither = dither_of(uint32(job[0] + job[1] + uint32(window)), position)
        for j in range(t, QUADS, HEAD_BLOCK):
            four = logits_of(z, cuda.blockIdx.x, j)
            first_random = uint32(uint32(dither) + uint32(uint32(4 * STEP) * uint32(j)))
            for e in range(4):
                random = uint32(first_random + uint32(STEP * e)) & uint32(0xFFFF)
                error = int32(table[below(top, four[e])] + int32(random)) >> 16      # as rules.error says
                values[e] = within(four[e], error) if not RAGGED or j * 4 + e < V else int32(0)
            out[row * (VS // 4) + j] = pack_bytes(values, 0)
        cuda.syncthreads()                                   # all errors are written: targets change some
        if t < TARGETS:
            v, wanted = windows[here + position] if t == 0 else windows[drawn + t], int32(0)
            wanted += windows[here + position] == v
            for other in range(1, TARGETS):
                wanted += windows[drawn + other] == v
            x, share_ = logit_of(z, v), int32(0)
            share_ = share(exps[min(top - x, 255)], unit)
            error = error_of(int32(wanted * (FULL_ERROR // TARGETS)), share_, weight, dither, v)
            out_bytes[row * VS + v] = within(x, error)
        if t == 0:
            score = logit_of(z, windows[here + position])
            for other in range(1, TARGETS):
                score += logit_of(z, windows[drawn + other])
            losses[row] = loss_of(total, int32(TARGETS * top), score, BIT, UNIT, 256 // TARGETS)

    def add_losses(losses: A64, rows, result: A64):
        """result[0] += all losses. A thread four of them."""
        i, total = 4 * cuda.grid(1), int64(0)
        for k in range(i, min(i + 4, rows)):
            total += losses[k]
        total = warp_sum(total)
        if cuda.threadIdx.x & 31 == 0:
            cuda.atomic.add(result, 0, total)

    return errors, add_losses


# --- credits ----------------------------------------------------------------------------------------------------------

def _credit_kernels(cfg):
    """Rows of credits: int8 with a power of two, `whole`, and their exponents; a warp a row."""
    H = cfg.HIDDEN_DIM
    WORDS, INNER = H // 4, H
    S, S4 = wide(H) // 4, wide(4 * H) // 4

    def descend(y: A32, y_words, parts, exponents: A32, padded, shift, less, weights: A8, at, n: A32, means: A32,
                by: F1, rows, c: A32, out: A32, out_exponents: A32, counts: A32):
        """c float32 [rows, 4 S], as words, = (c + the credits y below a norm) * by. y int32 [rows, y_words]: `parts`
        products side by side, of rows of credits with exponents [parts, padded], times 2^-shift times the float32 of
        bits `less`. at: of the norm's weights; n, means: of `norm`; by float32 [rows]. The new rows go to out int8
        [rows, S], their exponents to out_exponents and counts."""
        here = cleared(cuda.shared.array(BINS, int32))
        for turn in range(TURNS):
            r, lane = row_of_turn(turn), cuda.threadIdx.x & 31
            if r < rows:
                along, square = float32(0), int32(0)
                for j in range(lane, WORDS, 32):
                    word = n[r * S + j]
                    square = ptx.dp4a(word, word, square)
                square = ptx.warp_sum(square)
                for k in range(parts):
                    total = int64(0)
                    for j in range(lane, WORDS, 32):
                        word, four = n[r * S + j], ptx.load4(y, r * y_words + 4 * (k * S + j))
                        for e in range(4):
                            total = ptx.mad_wide(byte(word, e), four[e], total)
                    part = mul(float32(warp_sum(total)), mul(power(exponents[k * padded + r] - shift),
                                                             ptx.bits_float(int32(less))))
                    along = part if k == 0 else add(along, part)
                along = div(along, float32(max(square, int32(1))))
                mean, factor, top = float32(means[r]), by[r], float32(0)
                credits, values = cuda.local.array(4, float32), int32s(4)
                for j in range(lane, WORDS, 32):
                    word, old = n[r * S + j], ptx.load4(c, r * (4 * S) + 4 * j)
                    for k in range(parts):
                        unit = mul(power(exponents[k * padded + r] - shift), ptx.bits_float(int32(less)))
                        four = ptx.load4(y, r * y_words + 4 * (k * S + j))
                        for e in range(4):
                            part = mul(float32(four[e]), unit)
                            credits[e] = part if k == 0 else add(credits[e], part)
                    for e in range(4):
                        credit = sub(credits[e], mul(along, float32(byte(word, e))))
                        credit = mul(credit, div(float32(weights[at + 4 * j + e]), mean))
                        credit = mul(add(ptx.bits_float(old[e]), credit), factor)
                        values[e] = ptx.float_bits(credit)
                        top = max(top, abs(credit))
                    ptx.store4(c, r * (4 * S) + 4 * j, values[0], values[1], values[2], values[3])
                top = top_of(top)
                e_row = exponent(top, ROW_BITS)
                unit = power(-e_row)
                for j in range(lane, WORDS, 32):
                    four = ptx.load4(c, r * (4 * S) + 4 * j)
                    for e in range(4):
                        values[e] = whole(ptx.bits_float(four[e]), unit, ROW_MOST)
                    out[r * S + j] = pack_bytes(values, 0)
                note(e_row, top, out_exponents, r, here)
        add_counts(here, counts, 0)

    @device
    def tried(sum_, unit, trials, word, e):
        return mul(mul(float32(sum_), unit), float32(trials[byte(word, e) & 255]))

    def try_inner(y: A32, exponents: A32, shift, less, before: A32, trials: A8, rows, out: A32, out_exponents: A32,
                  counts: A32):
        """out int8 [rows, 4 S4]: the credits of the inner values of an MLP, from y int32 [rows, 4 S4]; the others: see
        descend."""
        here = cleared(cuda.shared.array(BINS, int32))
        for turn in range(TURNS):
            r, lane = row_of_turn(turn), cuda.threadIdx.x & 31
            if r < rows:
                top, unit = float32(0), mul(power(exponents[r] - shift), ptx.bits_float(int32(less)))
                for j in range(lane, INNER, 32):
                    word, four = before[r * S4 + j], ptx.load4(y, (r * S4 + j) * 4)
                    for e in range(4):
                        top = max(top, abs(tried(four[e], unit, trials, word, e)))
                top = top_of(top)
                e_row, values = exponent(top, ROW_BITS), int32s(4)
                scale = power(-e_row)
                for j in range(lane, INNER, 32):
                    word, four = before[r * S4 + j], ptx.load4(y, (r * S4 + j) * 4)
                    for e in range(4):
                        values[e] = whole(tried(four[e], unit, trials, word, e), scale, ROW_MOST)
                    out[r * S4 + j] = pack_bytes(values, 0)
                note(e_row, top, out_exponents, r, here)
        add_counts(here, counts, 0)

    def as_rows(c: F1, parts, by: F1, padded, rows, out: A32, out_exponents: A32, counts: A32):
        """out int8 [rows, parts S], out_exponents [parts, padded]: credits c float32 [rows, 4 parts S] times by [parts,
        padded]. Grid: [rows / WARPS, parts]."""
        here = cleared(cuda.shared.array(BINS, int32))
        for turn in range(TURNS):
            r, lane, part = row_of_turn(turn), cuda.threadIdx.x & 31, cuda.blockIdx.y
            if r < rows:
                factor, top, first = by[part * padded + r], float32(0), (r * parts + part) * S
                for j in range(lane, WORDS, 32):
                    for e in range(4):
                        top = max(top, abs(mul(c[4 * (first + j) + e], factor)))
                top = top_of(top)
                e_row, values = exponent(top, ROW_BITS), int32s(4)
                unit = power(-e_row)
                for j in range(lane, WORDS, 32):
                    for e in range(4):
                        values[e] = whole(mul(c[4 * (first + j) + e], factor), unit, ROW_MOST)
                    out[first + j] = pack_bytes(values, 0)
                note(e_row, top, out_exponents, part * padded + r, here)
        add_counts(here, counts, cuda.blockIdx.y * BINS)

    return descend, try_inner, as_rows


def _loudest_kernel():
    def loudest(counts: A32, tops: A32):
        """tops[part]: units.loudest of the histogram counts[part], which it clears. Grid: parts, of BINS threads."""
        local, best = cuda.shared.array(BINS, int32), cuda.shared.array(1, int32)
        t, part = cuda.threadIdx.x, cuda.blockIdx.x
        local[t] = counts[part * BINS + t]
        counts[part * BINS + t] = 0
        if t == 0:
            best[0] = -1
        cuda.syncthreads()                                   # the histogram is here, best is -1
        live, reached = int32(0), int32(0)
        for k in range(BINS):
            live += local[k]
            reached += local[k] if k >= t else 0
        if live > 0 and reached >= max((live + (units.LOUD - 1)) // units.LOUD, 1):
            cuda.atomic.max(best, 0, t)
        cuda.syncthreads()                                   # the largest that is reached is known
        if t == 0:
            tops[part] = best[0] - units.EXPONENTS if best[0] >= 0 else 0

    return loudest


# --- votes ------------------------------------------------------------------------------------------------------------

def _vote_kernels(cfg):
    H, T, V = cfg.HIDDEN_DIM, cfg.SEQ_LEN, cfg.VOCAB_SIZE
    WIDTH, SKIP = cfg.WINDOW, cfg.STATE_TOKENS
    S, TIED = wide(H), cfg.MODEL != "gru"
    LEAST, MOST = units.TABLE_SHIFTS
    ALPHA, LEVELS = units.alpha(cfg), cfg.VOTE_LEVELS
    VALUES, EACH = cfg.DIGIT_VALUES, steps.packing(cfg.DIGIT_VALUES).digits

    @device
    def of_chunk(x, unit):
        """A credit as an operand of votes, with the exponent of the chunk; unit: 2^(that of its row, less this)."""
        return whole(float32(x), unit, 127)

    def spread(source: A32, words, first, units_, exponents: A32, at, tops: A32, part, rows, row, operand_rows,
               operand: A32):
        """Operand rows from `row` on of the columns of source int8 [rows, words], `units_` from word `first` on. part:
        the number in `tops` of credits, whose exponents begin at exponents[at]; -1: of inputs, which stay as they are.
        A block 128 columns of 64 positions. Grid: [columns / 128, positions / 64]."""
        turned_words = cuda.shared.array((16, 132), int32)   # core matrices of eight columns, and a gap
        lane, warp = cuda.threadIdx.x & 31, cuda.threadIdx.x >> 5
        quad, n = cuda.blockIdx.x * 32 + lane, cuda.blockIdx.y * 64 + warp * 16
        word_of = int32s(4)
        for q in range(4):
            for e in range(4):
                here = n + 4 * q + e
                word_of[e] = 0
                if here < rows and quad * 4 < units_:
                    word = source[here * words + first + quad]
                    if part >= 0:
                        unit = power(exponents[at + here] - tops[part])
                        word = pack4(of_chunk(byte(word, 0), unit), of_chunk(byte(word, 1), unit),
                                     of_chunk(byte(word, 2), unit), of_chunk(byte(word, 3), unit))
                    word_of[e] = word
            turned = turn4(word_of)
            for e in range(4):
                turned_words[lane >> 1, warp * 32 + (lane & 1) * 16 + e * 4 + q] = turned[e]
        cuda.syncthreads()                                   # what was turned is whole
        for k in range(4):
            group, piece = 4 * k + warp, lane * 4
            to = place(operand_rows, row + cuda.blockIdx.x * 128 + group * 8, cuda.blockIdx.y * 64) + piece
            ptx.store4(operand, to, turned_words[group, piece], turned_words[group, piece + 1],
                       turned_words[group, piece + 2], turned_words[group, piece + 3])

    def token_votes(c: A8, exponents: A32, tops: A32, windows: A32, rows, at, votes: A32):
        """Adds credits c int8 [rows, S] to the votes of the columns of the tokens that were read, canonical from
        votes[at] on; where the table is the head as well, in the unit of its votes. A thread a unit."""
        i = cuda.grid(1)
        r, unit = i // H, i % H
        if r < rows:
            v = of_chunk(int32(c[r * S + unit]), power(exponents[r] - tops[0]))
            if TIED:
                v = nearest(mul(float32(v), power(max(min(tops[0], int32(MOST)), int32(LEAST)))))
            if v != 0:
                token = windows[r // T * WIDTH + SKIP + r % T]
                cuda.atomic.add(votes, at + vote_index(token, unit, True, V), v)

    def bias_votes(c: A8, words, first, exponents: A32, at, tops: A32, part, rows, to, votes: A32):
        """Adds credits c int8 [rows, 4 words], H from byte `first` on, over all rows to votes[to...]. A thread a unit
        of 64 rows."""
        i = cuda.grid(1)
        unit, block, total = i % H, i // H, int32(0)
        for r in range(block * 64, min(block * 64 + 64, rows)):
            total += of_chunk(int32(c[r * (4 * words) + first + unit]), power(exponents[at + r] - tops[part]))
        if total != 0:
            cuda.atomic.add(votes, to + unit, total)

    def vote_sizes(votes: A32, tensors: A64, sizes: A64):
        """sizes[i] += the sizes of the votes on tensor i: tensors int64 [2 i] its first weight, [2 i + 1] its size.
        Grid: [blocks, tensors]."""
        tensor, total = cuda.blockIdx.y, int64(0)
        first, size = tensors[2 * tensor], tensors[2 * tensor + 1]
        for i in range(cuda.blockIdx.x * BLOCK + cuda.threadIdx.x, size, cuda.gridDim.x * BLOCK):
            total += abs(int64(votes[first + i]))
        total = warp_sum(total)
        if cuda.threadIdx.x & 31 == 0:
            cuda.atomic.add(sizes, tensor, total)

    def vote_digits(votes: A32, tensors: A64, sizes: A64, digits: A8):
        """digits int8 [weights]. Grid: as vote_sizes."""
        tensor = cuda.blockIdx.y
        first, size = tensors[2 * tensor], tensors[2 * tensor + 1]
        least = least_vote(sizes[tensor], size, float64(ALPHA))
        for i in range(cuda.blockIdx.x * BLOCK + cuda.threadIdx.x, size, cuda.gridDim.x * BLOCK):
            digits[first + i] = vote_digit(votes[first + i], least, int32(LEVELS))

    def pack_digits(digits: A8, packed: B1):
        """packed uint8 [digits / EACH] (model.steps). One thread per byte."""
        i = cuda.grid(1)
        if i < packed.size:
            byte_ = int32(0)
            for k in range(EACH):
                digit = int32(digits[EACH * i + EACH - 1 - k])
                byte_ = int32(byte_ * int32(VALUES) + (int32(digit + VALUES) if digit < 0 else digit))
            packed[i] = byte_

    return spread, token_votes, bias_votes, vote_sizes, vote_digits, pack_digits
