"""What both models need on the CPU: the layout of the weights, noise (SPEC 2, 4) and matrix products.

One compiled set of kernels serves every configuration: shapes and switches are values at run time. All matrix products
go through `engine.simd.tile` on weights that are repacked into panels after every update.
"""

import functools
from collections import namedtuple

import numba
import numpy as np

from engine import simd
from engine.cpu_rules import (clip, dithered, divide, draw, excess, f32, factor, hash32, i32, inlined, inner,
                              input_coefficient, input_fold, input_term, leaf, loss, normed, quotient, scaled, share,
                              shift_right, signed, table_term, u32, weighed_excess)
from engine.cpu_rules import score as drawn_score
from engine.simd import PANEL, ROWS, entries, entry_sum, local, noisy_tile, tile
from model import integer_tables, parameters

# a row of Model.table: where a parameter of a layer begins in the arrays of Model and in the overlay, the seeds of its
# two sides, its size
ROW = np.dtype([(name, np.int64) for name in ("weights", "packed", "correction", "columns", "seed_a", "seed_b",
                                              "overlay_a", "overlay_b", "rows", "cols")])
# of a matrix in a Record: where its inputs are kept; the first hash and the amplitude of its outputs' noise (of a table
# that is looked up, too), and the members whose turn it is (model.activations.Phase)
WATCHED = np.dtype([(name, np.int64) for name in ("inputs", "stream", "amplitude", "turn")])
# int64 and not int: numba compiles a function anew for every literal int among its arguments
i64 = np.int64
u8 = np.uint8
# the layer of parameters that belong to none; the noise of an unperturbed model
NO_LAYER = CLEAN = i64(0)
EMBEDDING, EMB_BIAS = i64(0), i64(1)           # of the transformer's table, in which those of NTT_MODE follow
ONE = i64(1)                # row of a member at a position
NO_LOSSES, NO_NATS = np.empty((0, 0), i64), np.empty(0)
TOGETHER = 8                # pairs that go to a kernel together: in the recurrent model their members fill two tiles
GROUP = 32                  # rows that go through products together: their int32 results fit the second-level cache

# Constants of the configuration that the kernels see unchanged
FROM_CONFIG = ("HIDDEN_DIM HEAD_DIM N_HEADS N_LAYERS VOCAB_SIZE DEVICE_MASK DEVICE_GAUSSIAN ADAPTIVE_NOISE_MODE "
               "SIGMA_SHIFT_VECTOR SHIFT_ATTN SHIFT_OUT SHIFT_MLP_UP SHIFT_MLP_DOWN SOFTMAX_SCALE_BIT "
               "ROPE_SCALE_BIT TARGETS USE_CLT NOISE_SHIFT")
# The model as the kernels see it, which they call c. Its configuration, int64: the above and others of `constants`.
# Its tables: exp int32 [256]; exp64[d] = exp(-d * unit) in float64; rope int64 [positions, H / 2], cosine in the lower
# half, sine in the upper one; ntt int64 [T, T]: integer_tables.basis, empty without NTT_MODE. Its weights: weights
# int8 canonical; columns int8 [n, H]: the tables that are looked up, a token or byte a row; packed int8 panels [k4,
# PANEL, 4]; correction int32: -128 times each column's sum, because activations go into products as x + 128; overlay
# int8; table ROW [parameters, layers].
Model = namedtuple("Model", FROM_CONFIG + (
    " exact log_unit ntt_prime gru head ln_f divisor divisor_down lowest logit_shift "
    "exp exp64 unit rope ntt weights columns packed correction overlay table"))
# The part of a Model that draws of votes read: calls with a whole Model take 10 us longer
Draws = namedtuple("Draws", "DEVICE_MASK DEVICE_GAUSSIAN USE_CLT")
# What writes texts: lengths int64 [sequences] of their prompts, seeds uint32 [sequences] of their draws, present uint8
# [sequences, V]: the tokens that they have, those of the prompts from the beginning; penalty, temp float32 and floor
# int64: of rules.Sampling
Writing = namedtuple("Writing", "lengths seeds present penalty temp floor")
# The noise of a matrix for one or more pairs: columns int32 [pairs, cols], trunc(noise(A, c) * f_col(c)); inputs int8
# [pairs, rows], noise(B, r); offset int32 [pairs], 128 times their sum; coefficients int32 and scale float32 [pairs,
# rows] as `input_term` takes them, filled in modes 1 and 2 only.
Sides = namedtuple("Sides", "columns inputs offset coefficients scale")
# A pass with noise on activations (SPEC 21), whose rows are sequences times positions. The first sequences are clean;
# those of members follow, the first of which is number `member` of the step. seed, member_seed: of the first group and
# the first member. watched WATCHED [parameters, layers]. inputs uint8 [n, clean rows]: of matrices, x + 128. noise
# int32 [4 H]: memory. tokens int32 [clean rows], errors int8 [clean rows, V]: the inputs, and the errors of the head.
# weights int8 [clean rows]: that of the window, or 0 where the position does not vote. shares int16 [groups, L, heads,
# T, T]: attention_share of positions in what a query attends to, in the transformer.
Record = namedtuple("Record", "seed member_seed member T watched inputs noise tokens errors weights shares")
FREE = i32(1 << 30)         # a limit that nothing reaches
# (pairs, rows, cols)
new_sides = simd.locals_of(Sides, (numba.int32, (0, 2)), (numba.int8, (0, 1)), (numba.int32, (0,)),
                           (numba.int32, (0, 1)), (numba.float32, (0, 1)))


def constants(cfg):
    """{field of Model: its value} of the configuration and its tables."""
    gru, exp, unit = int(cfg.MODEL == "gru"), integer_tables.exp_table(cfg), 1 / cfg.SOFTMAX_EXP_SCALE
    names = [p.name for p in parameters.table(cfg)]
    return dict(
        **{name: getattr(cfg, name) for name in FROM_CONFIG.split()}, **tables(cfg, cfg.SEQ_LEN, cfg.NTT_CAUSAL),
        exp=exp, exp64=np.exp(-np.arange(8192) * unit), unit=unit, exact=int(cfg.LOSS == "exact"),
        log_unit=integer_tables.log_unit(cfg), ntt_prime=integer_tables.PRIME.get(cfg.NTT_MODE, 0), gru=gru,
        head=names.index("head" if gru else "embedding"), ln_f=names.index("ln_f"),
        # gru: of a product over H or over 4 H inputs; least value inside the MLP; logit_shift: of the head's products
        divisor=parameters.divisor(cfg, cfg.HIDDEN_DIM), divisor_down=parameters.divisor(cfg, 4 * cfg.HIDDEN_DIM),
        lowest=0 if cfg.MLP_RELU else -127, logit_shift=0 if gru else cfg.SHIFT_LOGIT)


def tables(cfg, positions, causal):
    """{field of Model: its value}: what the transformer reads for sequences of this number of positions."""
    rope = integer_tables.rope_table(cfg, positions).view(np.int64)[..., 0]
    return dict(rope=np.tile(rope, cfg.N_HEADS),
                ntt=integer_tables.basis(cfg, causal) if cfg.NTT_MODE else np.empty((0, 0), np.int64))


def no_record(c):
    """The Record of a pass without noise on activations, of which nothing is kept. c: Model."""
    return Record(u32(0), u32(0), 0, 1, np.zeros(c.table.shape, WATCHED), np.empty((0, 0), u8), np.empty(0, i32),
                  np.empty(0, i32), np.empty((0, 0), np.int8), np.empty(0, np.int8), np.empty((0,) * 5, np.int16))


@inlined
def padded(n, to):
    """n, or the next multiple of `to`."""
    return (n + to - 1) // to * to


@inner
def new_logits(c, kind):
    """kind [GROUP + 1, V padded]: memory for the logits of rows that go through products together; simd.entry_sum reads
    a bit of the row beyond. kind: int32 for the transformer, whose logits are still to be shifted by c.logit_shift, or
    int8 for the recurrent model."""
    return np.empty((GROUP + 1, padded(c.VOCAB_SIZE, PANEL)), kind)


@inlined
def copy_row(source, r, out, o):
    """out[o] = source[r], which numba cannot compile in a leaf."""
    for i in range(out.shape[1]):
        out[o, i] = source[r, i]


# --- random numbers and noise (SPEC 2, 4) ----------------------------------------------------------------------------

@inlined
def noise(c, seed, i):
    """int32: the noise of SPEC 2."""
    return draw(c.DEVICE_GAUSSIAN, hash32(seed, i), c.DEVICE_MASK)


@leaf
def vote_draw(c, seed, i):
    """int32: the noise as votes count it. c: Draws."""
    n = noise(c, seed, i)
    return n if c.USE_CLT else i32(i32(n > 0) - i32(n < 0))


@leaf
def keep(record, param, layer, first, count, x):
    """Keeps of x uint8 [count, inputs], what a matrix multiplies in rows first.. of a Record, those of clean ones."""
    kept = record.inputs[record.watched[param, layer].inputs:]
    for r in range(min(count, record.tokens.size - first)):
        for i in range(x.shape[1]):
            kept[i, first + r] = x[r, i]


@inlined
def draw_noise(noise, seed, stream, first, size):
    """noise int32 [n] = size times the signs of n outputs, a multiple of 32, from number `first` on (SPEC 21); seed: of
    the member."""
    for word in range(noise.size // 32):
        signs = hash32(seed, u32(stream + first // 32 + word))
        for i in range(32):
            noise[32 * word + i] = signed(signs, i, size)


@leaf
def disturb(c, record, param, layer, first, count, scale, before, after, out):
    """Adds the noise of the outputs of a matrix, times scale, to those of out [count, units], rows first.. of a Record,
    that belong to members; before and after, they are cut to these limits."""
    watched, units = record.watched[param, layer], out.shape[1]
    noise = record.noise[:units]
    r = max(i64(0), record.tokens.size - first)
    if r >= count or watched.amplitude == 0:
        return
    k, t = divmod(first + r - record.tokens.size, record.T)
    for r in range(r, count):
        if watched.turn < 0 or (record.member + k) % c.N_LAYERS == watched.turn:
            draw_noise(noise, u32(record.member_seed + u32(k)), watched.stream, t * units,
                       i32(scale * watched.amplitude))
            for i in range(units):
                y = i32(min(max(i32(out[r, i]), i32(-before)), before) + noise[i])
                out[r, i] = min(max(y, i32(-after)), after)
        t += 1
        if t == record.T:
            k, t = k + 1, i64(0)


@leaf
def draw_sides(c, param, layer, S, noisy, sides):
    """Fills the Sides of a matrix for pair seeds S..; nothing without noise."""
    t = c.table[param, layer]
    n, cols = t.rows, t.cols
    overlay_a = c.overlay[t.overlay_a:]
    overlay_b = c.overlay[t.overlay_b:]
    for q in range(sides.offset.size if noisy else 0):
        seed_a, seed_b = u32(S + q + t.seed_a), u32(S + q + t.seed_b)
        for i in range(cols):
            sides.columns[q, i] = scaled(c.ADAPTIVE_NOISE_MODE, noise(c, seed_a, i), overlay_a[i], seed_a, i)
        total = i32(0)
        for i in range(n):
            drawn = noise(c, seed_b, i)
            sides.inputs[q, i] = drawn
            total = i32(total + drawn)
        sides.offset[q] = total * 128
        for i in range(n if c.ADAPTIVE_NOISE_MODE else 0):
            sides.coefficients[q, i] = input_coefficient(c.ADAPTIVE_NOISE_MODE, i32(sides.inputs[q, i]), overlay_b[i])
            sides.scale[q, i] = factor(c.ADAPTIVE_NOISE_MODE, overlay_b[i], seed_b, i)


@leaf
def hidden_side(c, t, S, noisy, unit, scale):
    """Fills unit int32 and scale float32 [H] with the noise of the hidden units of a table that is looked up and its
    factors; t: of Model.table. Without noise the units are 0."""
    seed = u32(S + t.seed_b)
    for i in range(c.HIDDEN_DIM):
        unit[i] = noise(c, seed, i) if noisy else i32(0)
    for i in range(c.HIDDEN_DIM):
        scale[i] = factor(c.ADAPTIVE_NOISE_MODE, c.overlay[t.overlay_b + i], seed, i)


@inlined
def look_up(c, t, S, m, k, unit, scale, out):
    """out int32 [H]: column k of a table as member m sees it; unit, scale: `hidden_side`."""
    seed = u32(S + t.seed_a)
    of_column = noise(c, seed, k)
    its_scale = factor(c.ADAPTIVE_NOISE_MODE, c.overlay[t.overlay_a + k], seed, k)
    for i in range(c.HIDDEN_DIM):
        p = table_term(of_column, its_scale, unit[i], scale[i]) * sign(m)
        out[i] = c.columns[t.columns + k, i] + shift_right(p, c.NOISE_SHIFT)


@inlined
def project(c, x, r, sides, q):
    """sb of pair q: the sum over k of trunc(x[r, k] * noise(B, k) * f_row(k)), wrapping int32; x uint8 [rows, K],
    activation + 128. In the transformer's down projections four inputs i + sub * H share one running integer (SPEC
    4)."""
    n, H = sides.inputs.shape[1], c.HIDDEN_DIM
    s = i32(0)
    if c.ADAPTIVE_NOISE_MODE == 0:
        for i in range(n):
            s = i32(s + i32(i32(x[r, i]) * i32(sides.inputs[q, i])))
        return i32(s - sides.offset[q])
    if n > H and not c.gru:
        for i in range(H):
            p = i32(0)
            for sub in range(4):
                j = i + sub * H
                x_j = i32(x[r, j] - 128)
                p = input_fold(c.ADAPTIVE_NOISE_MODE, p, x_j, sides.coefficients[q, j], sides.scale[q, j])
            s = i32(s + p)
    else:
        for i in range(n):
            x_i = i32(x[r, i] - 128)
            s = i32(s + input_term(c.ADAPTIVE_NOISE_MODE, x_i, sides.coefficients[q, i], sides.scale[q, i]))
    return s


@leaf
def perturbed(c, param, layer, S, noisy, out):
    """out int32 [2, width]: a vector parameter as the even and the odd member of a pair see it; gru: clipped."""
    t = c.table[param, layer]
    n = t.cols
    weights, overlay = c.weights[t.weights:], c.overlay[t.overlay_a:]
    seed_a, seed_b = u32(S + t.seed_a), u32(S + t.seed_b)
    shift = i32(c.SIGMA_SHIFT_VECTOR)
    for i in range(n):
        p = i32(noise(c, seed_a, i) * noise(c, seed_b, i)) if noisy else i32(0)
        v, p = i32(weights[i]), scaled(c.ADAPTIVE_NOISE_MODE, p, overlay[i], seed_a, i)
        plus, minus = i32(v + shift_right(p, shift)), i32(v + shift_right(i32(-p), shift))
        out[0, i] = clip(plus) if c.gru else plus
        out[1, i] = clip(minus) if c.gru else minus


@inlined
def member(r, left):
    """0 for the `left` first rows, which belong to the even member of a pair, 1 for those of the odd one."""
    return i64(r >= left)


@inlined
def sign(m):
    """int32: the sign of a member's noise."""
    return i32(1 - 2 * m)


@leaf
def embed(c, S, noisy, tokens, n, start, h, record, at):
    """h int8 [n or 2 n, H]: item 1 of SPEC 7, with the coefficients of SPEC 14, or the embedding of SPEC 13. tokens
    int32 [>= start + n]; n rows a member, from position `start` on. record: it has these rows from `at` on."""
    H, T = c.HIDDEN_DIM, c.ntt.shape[0]
    tables = 4 if T else 1
    bias = local((2, H), i32)
    units, scales = local((4, H), i32), local((4, H), f32)
    total, one = local((1, H), i32), local(H, i32)
    if not c.gru:
        perturbed(c, EMB_BIAS, NO_LAYER, S, noisy, bias)
    for k in range(tables):
        hidden_side(c, c.table[k + 1 if k else EMBEDDING, 0], S, noisy, units[k], scales[k])
    for r in range((1 + noisy) * n):
        m = member(r, n)
        position, number = start + r - n * m, i64(0)
        for i in range(min(T, tokens.size - position + position % T) if T else 0):
            number += i64(tokens[position - position % T + i]) * c.ntt[position % T, i]
        if c.ntt_prime:
            number %= c.ntt_prime
        for i in range(H):
            total[0, i] = i32(0) if c.gru else bias[m, i]
        for k in range(tables):
            column = (number >> (8 * k)) & 255 if k else i64(tokens[position])
            look_up(c, c.table[k + 1 if k else EMBEDDING, 0], S, m, column, units[k], scales[k], one)
            for i in range(H):
                total[0, i] += shift_right(one[i], 2 if k else 0)
        disturb(c, record, EMBEDDING, NO_LAYER, at + r, ONE, i32(1), i32(127), FREE, total)
        for i in range(H):
            h[r, i] = clip(total[0, i])


# --- products (SPEC 4) -----------------------------------------------------------------------------------------------

# Rows are named by array and index. An index that may be below zero to the compiler (offset + i) would keep a loop from
# vectors.

@leaf
def product(c, param, layer, sides, noisy, x, rows, left, out):
    """out int32 [>= rows padded to ROWS, cols padded to PANEL] = x . W with its noise, or int8: divided by c.divisor; x
    uint8 [>= padded rows, K]. The `left` first rows belong to the even member; with the Sides of several pairs, rows
    2 q and 2 q + 1 to pair q."""
    t = c.table[param, layer]
    k4, panels = t.rows // 4, (t.cols + PANEL - 1) // PANEL
    several = i64(sides.offset.size > 1)
    noise = sides.columns
    sums = local(rows + ROWS, i32)
    for r in range(rows if noisy else 0):
        m = r & 1 if several else member(r, left)
        sums[r] = sign(m) * project(c, x, r, sides, several * (r >> 1))
    for p in range(panels):
        weights, correction = t.packed + p * k4 * 4 * PANEL, t.correction + p * PANEL
        for r in range(0, rows, ROWS):
            stride, at = several * noise.shape[1], r * out.shape[1] + p * PANEL
            if noisy:
                noisy_tile(x, r * t.rows, t.rows, c.packed, weights, c.correction, correction, sums, r, noise,
                           (r >> 1) * stride + p * PANEL, stride, c.NOISE_SHIFT, c.divisor, out, at, out.shape[1], k4)
            else:
                tile(x, r * t.rows, t.rows, c.packed, weights, c.correction, correction, 0, c.divisor, out, at,
                     out.shape[1], k4)


@inner
def add_product(x, sums, votes, p):
    """votes int32 [rows padded to ROWS, cols padded to PANEL], panel number p of its columns, += x . sums. x uint8
    [padded rows, n]: moved by 128; sums int8 [n, PANEL at most]: columns of this panel; n a multiple of 4."""
    length, padded = x.shape[1], votes.shape[1]
    words, correction = np.zeros(length // 4 * PANEL, u32), np.zeros(PANEL, i32)
    for k in range(length // 4):
        for j in range(sums.shape[1]):
            word = u32(0)
            for e in range(3, -1, -1):
                word = u32(u32(word << u32(8)) | u32(u8(sums[4 * k + e, j])))
                correction[j] -= 128 * sums[4 * k + e, j]
            words[k * PANEL + j] = word
    panel = words.view(np.int8)
    for r in range(0, votes.shape[0], ROWS):
        at = r * padded + p * PANEL
        for k in range(ROWS):
            for j in range(PANEL):
                votes[r + k, p * PANEL + j] += correction[j]
        tile(x, r * length, length, panel, 0, votes, at, padded, 0, votes, at, padded, length // 4)


# --- normalisation, MLP, the loss of a position (SPEC 5, 7, 13) ------------------------------------------------------

@leaf
def draw_norm(c, param, layer, S, noisy, norm):
    """norm int32 [2, 2, H]: weights and, in the transformer, biases of a layer norm as both members see them."""
    perturbed(c, param, layer, S, noisy, norm[0])
    if not c.gru:
        perturbed(c, param + 1, layer, S, noisy, norm[1])


@leaf
def layer_norm(c, h, count, left, norm, x):
    """x uint8 [>= count, H] = ln(h) + 128 of `count` rows of int8, GROUP at most, the `left` first of which belong to
    the even member; norm: of `draw_norm`."""
    n, sizes = h.shape[1], local(GROUP, i32)
    for r in range(count):
        total = i32(0)
        for i in range(n):
            total = i32(total + abs(i32(h[r, i])))
        sizes[r] = total
    for r in range(count):
        m, mean = member(r, left), max(i32(1), divide(sizes[r], n))
        if c.gru:
            reciprocal = f32(f32(1) / f32(mean))
            for i in range(n):
                x[r, i] = quotient(i32(h[r, i] * norm[0, m, i]), mean, reciprocal) + 128
        else:
            for i in range(n):
                x[r, i] = normed(h[r, i], norm[0, m, i], norm[1, m, i], mean) + 128


@inlined
def divided(y, count, d, lowest, zero, out):
    """out [count, n] = clip(y / d, rounded down), `lowest` at least, + zero: 0 for int8, 128 for uint8."""
    reciprocal = f32(f32(1) / f32(d))
    for r in range(count):
        for i in range(out.shape[1]):
            out[r, i] = max(i32(lowest), quotient(y[r, i], d, reciprocal)) + zero


@inlined
def amax(v, first, count, out):
    """out int8 [>= count, n] = amax of v[first..] int32 (SPEC 5), `count` rows, GROUP at most."""
    n, tops = out.shape[1], local(GROUP, i32)
    for r in range(count):
        top = i32(0)
        for i in range(n):
            top = max(top, abs(v[first + r, i]))
        tops[r] = top
    for r in range(count):
        scale = f32(f32(127) / f32(f32(tops[r]) + f32(1e-9)))
        for i in range(n):
            # exactly twice: its truncation shows which side of a half
            twice = i32(f32(f32(v[first + r, i]) * f32(scale + scale)))
            out[r, i] = i32(twice + i32(1) + i32(twice >> i32(31))) >> i32(1)


@inlined
def add_residual(h, count, left, y, shift, bias):
    """h = amax(h + (y >> shift) + the bias of the members, or None), `count` rows, GROUP at most; y is overwritten."""
    for r in range(count):
        m = member(r, left)
        for i in range(h.shape[1]):
            y[r, i] = h[r, i] + shift_right(y[r, i], shift)
            if bias is not None:
                y[r, i] += bias[m, i]
    amax(y, 0, count, h)


@inlined
def gelu(x):
    """uint8: GELU(x) + 128 (SPEC 6) of an int8 from -127 on: max(x, 0) less a function of |x| that has few steps. All
    numbers have eight bits, so that a vector has many."""
    size = u8(abs(x))
    lost = u8(u8(size >= u8(2)) + u8(size >= u8(4)) + u8(size >= u8(9)))
    lost = u8(lost - u8(u8(size >= u8(17)) + u8(size >= u8(25)) + u8(size >= u8(36))))
    return u8(u8(max(x, np.int8(0))) + u8(128) - lost)


@leaf
def mlp(c, ln, layer, S, noisy, rows, per_member, h, record, at):
    """h = h + MLP(ln(h)) for all rows, in place: items 2 and the second half of 3 of SPEC 7, or the MLP of SPEC 13. ln:
    LN_INIT or LN_2; the parameters of the MLP follow in the table, in the transformer each with its bias. record: it
    has these rows from `at` on."""
    H = c.HIDDEN_DIM
    up, down = ln + (1 if c.gru else 2), ln + (2 if c.gru else 4)
    norm = local((2, 2, H), i32)
    bias_u, bias_d = local((2, 4 * H), i32), local((2, H), i32)
    sides_u, sides_d = new_sides(1, H, 4 * H), new_sides(1, 4 * H, H)
    draw_norm(c, ln, layer, S, noisy, norm)
    if not c.gru:
        perturbed(c, up + 1, layer, S, noisy, bias_u)
        perturbed(c, down + 1, layer, S, noisy, bias_d)
    draw_sides(c, up, layer, S, noisy, sides_u)
    draw_sides(c, down, layer, S, noisy, sides_d)
    x, y = local((GROUP, H), np.uint8), local((GROUP, H), i32)
    u, wide = local((GROUP, 4 * H), np.uint8), local((GROUP, 4 * H), i32)
    scale_u, scale_d = i32(c.divisor if c.gru else i64(1) << c.SHIFT_MLP_UP), i32(c.divisor_down)
    for first in range(0, rows, GROUP):
        count, left = min(GROUP, rows - first), per_member - first
        layer_norm(c, h[first:], count, left, norm, x)
        product(c, up, layer, sides_u, noisy, x, count, left, wide)
        keep(record, up, layer, at + first, count, x)
        disturb(c, record, up, layer, at + first, count, scale_u, i32(127 * scale_u) if c.gru else FREE, FREE, wide)
        if c.gru:
            divided(wide, count, i32(c.divisor), c.lowest, 128, u)
        else:
            for r in range(count):
                m = member(r, left)
                for i in range(4 * H):
                    u[r, i] = clip(i32(shift_right(wide[r, i], c.SHIFT_MLP_UP) + bias_u[m, i]))
                for i in range(4 * H):
                    u[r, i] = gelu(np.int8(u[r, i]))
        product(c, down, layer, sides_d, noisy, u, count, left, y)
        keep(record, down, layer, at + first, count, u)
        if c.gru:
            disturb(c, record, down, layer, at + first, count, scale_d, i32(127 * scale_d), FREE, y)
            divided(y, count, scale_d, -127, 0, y)
            for r in range(count):
                row = first + r
                for i in range(H):
                    h[row, i] = clip(i32(h[row, i] + y[r, i]))
        else:
            add_residual(h[first:], count, left, y, c.SHIFT_MLP_DOWN, bias_d)
            disturb(c, record, down, layer, at + first, count, i32(1), i32(127), i32(127), h[first:])


@inlined
def largest(z, r, n):
    """The largest of the first n of row r."""
    top = z[r, 0]
    for v in range(n):
        top = max(top, z[r, v])
    return top


@functools.partial(leaf, fastmath={"reassoc"})             # in vectors
def exp64_sum(table, top, shift, z, r, n):
    """float64: the sum of the exponentials of the first n logits of row r, whose largest is top."""
    total = 0.0
    for v in range(n):
        total += table[min(u32(table.size - 1), u32(top - shift_right(z[r, v], shift)))]
    return total


@inlined
def target(c, windows, q, start, T, t, j):
    """Target number j of position t of windows[q]: targets begin at token start + 1, the drawn ones follow the
    window."""
    return windows[q, start + T + (c.TARGETS - 1) * t + j if j else start + t + 1]


@inlined
def position_loss(c, z, r, windows, q, start, T, t, top, total):
    """int64: the loss of position t of windows[q], whose logits are row r of z. top: the largest of them; total: the
    sum of their exponentials."""
    wanted = i32(0)
    for j in range(c.TARGETS):
        wanted += shift_right(z[r, target(c, windows, q, start, T, t, j)], c.logit_shift)
    return loss(c.exact, total, top * c.TARGETS, wanted, c.SOFTMAX_SCALE_BIT, c.log_unit, 256 // c.TARGETS)


@leaf
def head_errors(c, z, r, windows, q, start, T, t, top, total, seed, of_window, excesses, errors):
    """errors int8 [V] of position t of windows[q] (SPEC 21), of logits z[r]; top, total: see position_loss; seed: of
    the group; of_window: the weight of its window; excesses int32 [V padded to 64]: overwritten."""
    V, shift = c.VOCAB_SIZE, i32(c.logit_shift)
    of_distance = local(c.exp.size, i32)                     # what `excess` says of tokens that are not wanted
    for d in range(c.exp.size):
        of_distance[d] = weighed_excess(excess(0, 1, c.exp[d], total), of_window)
    entries(of_distance, 0, top, shift, z, r * z.shape[1], V, excesses, 0)
    for v in range(V):
        errors[v] = dithered(z[r, v] if c.gru else i32(0), excesses[v], seed, u32(u32(t * V) + u32(v)))
    for j in range(c.TARGETS):
        v, wanted = target(c, windows, q, start, T, t, j), 0
        for other in range(c.TARGETS):
            wanted += v == target(c, windows, q, start, T, t, other)
        of_target = excess(wanted, c.TARGETS, c.exp[min(c.exp.size - 1, i64(top - shift_right(z[r, v], shift)))],
                           total)
        errors[v] = dithered(z[r, v] if c.gru else i32(0), weighed_excess(of_target, of_window), seed, t * V + v)


@leaf
def logits(c, noisy, norm, sides, h, count, left, x, z):
    """z (new_logits): the logits of `count` rows of h int8, the `left` first of which belong to the even member; norm,
    sides: of ln_f and the head. x uint8 [GROUP, H]: what the head multiplies."""
    layer_norm(c, h, count, left, norm, x)
    product(c, c.head, NO_LAYER, sides, noisy, x, count, left, z)


@leaf
def chosen(c, z, present, penalty, temp, floor, random):
    """The token drawn from logits z int32 [V] (SPEC 10; presence penalty once for each token that is present, as in
    section 11). present uint8 [V]; penalty float32 in logit units; floor int64: smallest d kept; random uint32."""
    V, best = c.VOCAB_SIZE, 0
    scores, weights = local(V, f32), local(V, i32)
    for v in range(V):
        scores[v] = drawn_score(shift_right(z[v], c.logit_shift), present[v], penalty)
        if scores[v] > scores[best]:
            best = v
    if temp == f32(0):
        return best
    total, running = i64(0), i64(0)
    for v in range(V):
        weights[v] = share(c.exp, c.exp.size - 1, scores[v], scores[best], temp, floor)
        total += weights[v]
    threshold = i64(random) % total
    for lane in range(c.HIDDEN_DIM):
        for v in range(lane, V, c.HIDDEN_DIM):
            running += weights[v]
            if running > threshold:
                return v
    return best


@leaf
def write_next(c, writing, q, texts, t, h, z):
    """Puts the token at position t + 1 of texts int32 [n, room], where their prompts have ended; q: the sequence that
    texts[0] is; h int8 [n, H]: their last hidden states at position t."""
    norm, sides = local((2, 2, c.HIDDEN_DIM), i32), new_sides(1, c.HIDDEN_DIM, z.shape[1])
    draw_norm(c, c.ln_f, NO_LAYER, u32(0), CLEAN, norm)
    x = local((GROUP, c.HIDDEN_DIM), np.uint8)
    for first in range(0, texts.shape[0], GROUP):
        count = min(GROUP, texts.shape[0] - first)
        logits(c, CLEAN, norm, sides, h[first:], count, count, x, z)
        for r in range(count):
            text, s = texts[first + r], q + first + r
            writing.present[s, text[t]] = 1
            if t + 1 >= writing.lengths[s]:
                random = hash32(u32(writing.seeds[s] + u32(999 + 555 * t)), u32(0))
                text[t + 1] = chosen(c, z[r], writing.present[s], writing.penalty, writing.temp, writing.floor, random)


@leaf
def score_rows(c, losses, nats, windows, q, S, noisy, start, T, h, rows, z, record, at):
    """Scores h int8 [rows, H], last hidden states that share their noise, T a member or window. noisy: they belong to
    windows[q], else to windows[q], windows[q + 1].. Their losses go to losses int64 [rows], or if that is empty, their
    cross-entropies are added to nats float64 [windows]. z (new_logits): overwritten. record: it has these rows from
    `at` on."""
    norm, sides = local((2, 2, c.HIDDEN_DIM), i32), new_sides(1, c.HIDDEN_DIM, z.shape[1])
    x, excesses = local((GROUP, c.HIDDEN_DIM), np.uint8), local(z.shape[1] + PANEL, i32)
    draw_norm(c, c.ln_f, NO_LAYER, S, noisy, norm)
    draw_sides(c, c.head, NO_LAYER, S, noisy, sides)
    each = GROUP if c.VOCAB_SIZE < 1 << 10 else ROWS         # whose logits fit the second-level cache
    for first in range(0, rows, each):
        count = min(each, rows - first)
        logits(c, noisy, norm, sides, h[first:], count, T - first, x, z)
        keep(record, c.head, NO_LAYER, at + first, count, x)
        for r in range(count):
            row = first + r
            window, t = q if noisy else q + row // T, row % T
            top = shift_right(largest(z, r, c.VOCAB_SIZE), c.logit_shift)
            if losses.size:
                total = entry_sum(c.exp, 0, top, c.logit_shift, z, r * z.shape[1], c.VOCAB_SIZE)
                losses[row] = position_loss(c, z, r, windows, window, start, T, t, top, total)
                if at + row < record.tokens.size and record.weights[at + row]:
                    head_errors(c, z, r, windows, window, start, T, t, top, total, u32(record.seed + u32(window)),
                                i32(record.weights[at + row]), excesses, record.errors[at + row])
            else:
                mass = exp64_sum(c.exp64, i32(top), i32(c.logit_shift), z, r, c.VOCAB_SIZE)
                wanted = shift_right(z[r, target(c, windows, window, start, T, t, 0)], c.logit_shift)
                nats[window] += np.log(mass) + (top - wanted) * c.unit
