"""What both models need on the CPU: the layout of the weights, noise (SPEC 2, 4) and matrix products.

One compiled set of kernels serves every configuration: shapes and switches are values at run time. All matrix products
go through `engine.simd.tile` on weights that are repacked into panels after every update.
"""

import functools
from collections import namedtuple

import numba
import numpy as np

from engine import simd
from engine.cpu_rules import (clip, divide, dither_of, draw, error, excess, f32, factor, hash32, i32, inlined, inner,
                              input_coefficient, input_fold, input_term, leaf, loss, normed, quotient, scaled, share,
                              share_unit, shift_right, softmax_share, table_term, u32)
from engine.cpu_rules import score as drawn_score
from engine.simd import PANEL, ROWS, add_row, entry_sum, local, noisy_tile, rounded, tile
from model import integer_tables, parameters, units
from model.rules import DITHER_STEP

# a row of Model.table: where a parameter of a layer begins in the arrays of Model and in the overlay, the seeds of its
# two sides, its size
ROW = np.dtype([(name, np.int64) for name in ("weights", "packed", "correction", "columns", "seed_a", "seed_b",
                                              "overlay_a", "overlay_b", "rows", "cols")])
# int64 and not int: numba compiles a function anew for every literal int among its arguments
i64 = np.int64
u8 = np.uint8
# the layer of parameters that belong to none; the noise of an unperturbed model
NO_LAYER = CLEAN = i64(0)
EMBEDDING, EMB_BIAS = i64(0), i64(1)           # of the transformer's table, in which those of NTT_MODE follow
ONE = i64(1)
NO_LOSSES, NO_NATS = np.empty((0, 0), i64), np.empty(0)
TOGETHER = 8                # pairs that go to a kernel together: in the recurrent model their members fill two tiles
SMALL = i64(1 << 12)        # up to which an error, in 2^-16, is looked up only where its dither can make it more than 0
GROUP = 32                  # rows that go through products together: their int32 results fit the second-level cache

# Constants of the configuration that the kernels see unchanged
FROM_CONFIG = ("HIDDEN_DIM HEAD_DIM N_HEADS N_LAYERS VOCAB_SIZE DEVICE_MASK DEVICE_GAUSSIAN ADAPTIVE_NOISE_MODE "
               "SIGMA_SHIFT_VECTOR SHIFT_ATTN SHIFT_OUT SHIFT_MLP_UP SHIFT_MLP_DOWN SOFTMAX_SCALE_BIT "
               "ROPE_SCALE_BIT TARGETS USE_CLT NOISE_SHIFT")
# The model as the kernels see it, which they call c. Its configuration, int64: the above and others of `constants`.
# Its tables: exp int32 [256]; exp64[d] = exp(-d * unit) in float64; rope int64 [positions, H / 2], cosine in the lower
# half, sine in the upper one; ntt int64 [T, T]: integer_tables.basis, empty without NTT_MODE; trials int8 [2, 256]:
# units.trial_tables, indexed by value + 128. Its weights: weights int8 canonical; columns int8 [n, H]: the tables that
# are looked up, a token or byte a row, with unit trials the head too; packed int8 panels [k4, PANEL, 4]; correction
# int32: -128 times each column's sum, because activations go into products as x + 128; overlay int8; table ROW
# [parameters, layers], then again as many of the transposed matrices.
Model = namedtuple("Model", FROM_CONFIG + (
    " exact log_unit ntt_prime gru head ln_f divisor divisor_down relu logit_shift "
    "exp exp64 unit per_nat rope ntt trials weights columns packed correction overlay table"))
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
# What unit trials keep of a pass (SPEC 21), whose rows are windows times positions. bytes uint8 [rows, width]: values
# and, as int8 + 128, credits, side by side as `places` int64 [names, L + 1] says; inputs of matrices are + 128, too,
# the others as they are. exponents int8 [rows, names, L + 1]: of credits, DEAD where all are 0. scales float32 [rows,
# parameters, L]: means of norms, factors of amax. credit float32 [rows, H]: of the residual stream. shares int16 [L,
# heads, T, T]: attention_share, of one window. votes int32 [V, H]: on the head. weights int8 [rows]: of the errors.
# seed: of the first window.
Kept = namedtuple("Kept", "bytes exponents scales places credit shares votes weights seed")
# Names of what is kept; layer number L is outside the layers
VALUES = {"gru": "normed_2 before inner normed_1 state gate gated candidate".split(),
          "transformer": "normed_2 before inner normed_1 query key value attended".split()}
CREDITS = {"gru": "of_up of_down of_embedding of_gate of_candidate".split(),
           "transformer": "of_up of_down of_embedding of_query of_key of_value of_output".split()}
NAMES = [*dict.fromkeys(sum([*VALUES.values(), *CREDITS.values()], []))]
SLOT = {name: i64(number) for number, name in enumerate(NAMES)}
NORMED_1, NORMED_2, BEFORE = (SLOT[name] for name in ("normed_1", "normed_2", "before"))
INNER = SLOT["inner"]
DEAD = -units.EXPONENTS - 1
# Rows of credits on their way down. x uint8 [rows, n], + 128, and exponents int32 [rows]: what goes through a product;
# y int32 [rows, n] times scales float32 [rows]: what came through one; below float32 [rows, n] and along float32
# [rows]: sums of that below a norm, whose outputs are uint8 [rows, n], + 128
Rows = namedtuple("Rows", "x exponents y scales below along outputs")
# (rows, n, any number)
new_rows = simd.locals_of(Rows, (numba.uint8, (0, 1)), (numba.int32, (0,)), (numba.int32, (0, 1)),
                          (numba.float32, (0,)), (numba.float32, (0, 1)), (numba.float32, (0,)), (numba.uint8, (0, 1)))
# (pairs, rows, cols)
new_sides = simd.locals_of(Sides, (numba.int32, (0, 2)), (numba.int8, (0, 1)), (numba.int32, (0,)),
                           (numba.int32, (0, 1)), (numba.float32, (0, 1)))


def constants(cfg):
    """{field of Model: its value} of the configuration and its tables."""
    gru, exp, unit = int(cfg.MODEL == "gru"), integer_tables.exp_table(cfg), 1 / cfg.SOFTMAX_EXP_SCALE
    names = [p.name for p in parameters.table(cfg)]
    return dict(
        **{name: getattr(cfg, name) for name in FROM_CONFIG.split()}, **tables(cfg, cfg.SEQ_LEN, cfg.NTT_CAUSAL),
        exp=exp, exp64=np.exp(-np.arange(8192) * unit), unit=unit,
        per_nat=f32(1) / f32(cfg.SOFTMAX_EXP_SCALE), exact=int(cfg.LOSS == "exact"),
        log_unit=integer_tables.log_unit(cfg), ntt_prime=integer_tables.PRIME.get(cfg.NTT_MODE, 0), gru=gru,
        head=names.index("head" if gru else "embedding"), ln_f=names.index("ln_f"),
        # gru: of a product over H or over 4 H inputs; logit_shift: of the head's products
        divisor=parameters.divisor(cfg, cfg.HIDDEN_DIM), divisor_down=parameters.divisor(cfg, 4 * cfg.HIDDEN_DIM),
        relu=cfg.MLP_RELU, logit_shift=0 if gru else cfg.SHIFT_LOGIT, trials=np.roll(units.trial_tables(cfg), 128, 1))


def tables(cfg, positions, causal):
    """{field of Model: its value}: what the transformer reads for sequences of this number of positions."""
    rope = integer_tables.rope_table(cfg, positions).view(np.int64)[..., 0]
    return dict(rope=np.tile(rope, cfg.N_HEADS),
                ntt=integer_tables.basis(cfg, causal) if cfg.NTT_MODE else np.empty((0, 0), np.int64))


def new_kept(c, places, width, rows, T, votes, weights):
    """A Kept to be filled. c: Model; rows: a multiple of 4; T: positions of a window of the transformer; width: of
    `bytes`; others: fields of it."""
    parameters, layers = c.table.shape[0] // 2, c.N_LAYERS
    return Kept(np.empty((rows, width), u8), np.full((rows, len(NAMES), layers + 1), DEAD, np.int8),
                np.empty((rows, parameters, layers), f32), places, np.zeros((rows, c.HIDDEN_DIM), f32),
                np.empty((layers, c.N_HEADS, T, T), np.int16), votes, weights, u32(0))


def nothing_kept(c):
    """The Kept of a pass of which nothing is kept. c: Model."""
    places = np.zeros((len(NAMES), c.N_LAYERS + 1), i64)
    return new_kept(c, places, 0, 0, 0, np.empty((0, 0), i32), np.empty(0, np.int8))


def layout(cfg):
    """(places, width) of a Kept."""
    places, width = np.zeros((len(NAMES), cfg.N_LAYERS + 1), i64), 0
    names = VALUES[cfg.MODEL] + CREDITS[cfg.MODEL]
    for layer in range(cfg.N_LAYERS + 1):
        for name in names if layer < cfg.N_LAYERS else ("normed_2", "before", "inner", "of_up", "of_down"):
            places[SLOT[name], layer] = width
            width += cfg.HIDDEN_DIM * (4 if name in ("before", "inner", "of_up") else 1)
    return places, width


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
def keep(kept, name, layer, first, step, count, x):
    """Keeps x [count, n], bytes, in every step-th row of a Kept from `first` on."""
    place = kept.places[name, layer]
    for r in range(count if kept.bytes.size else 0):
        row = kept.bytes[first + r * step, place:]
        for i in range(x.shape[1]):
            row[i] = x[r, i]


@inlined
def keep_scales(kept, param, layer, first, count, scales):
    for r in range(count if kept.scales.size else 0):
        kept.scales[first + r, param, layer] = scales[r]


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
def embed(c, S, noisy, tokens, n, start, h):
    """h int8 [n or 2 n, H]: item 1 of SPEC 7, with the coefficients of SPEC 14, or the embedding of SPEC 13. tokens
    int32 [>= start + n]; n rows a member, from position `start` on."""
    H, T = c.HIDDEN_DIM, c.ntt.shape[0]
    tables = 4 if T else 1
    bias = local((2, H), i32)
    units, scales = local((4, H), i32), local((4, H), f32)
    total, one = local(H, i32), local(H, i32)
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
            total[i] = i32(0) if c.gru else bias[m, i]
        for k in range(tables):
            column = (number >> (8 * k)) & 255 if k else i64(tokens[position])
            look_up(c, c.table[k + 1 if k else EMBEDDING, 0], S, m, column, units[k], scales[k], one)
            for i in range(H):
                total[i] += shift_right(one[i], 2 if k else 0)
        for i in range(H):
            h[r, i] = clip(total[i])


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
                noisy_tile(x, r * t.rows, t.rows, 4, c.packed, weights, c.correction, correction, sums, r, noise,
                           (r >> 1) * stride + p * PANEL, stride, c.NOISE_SHIFT, c.divisor, out, at, out.shape[1], k4)
            else:
                tile(x, r * t.rows, t.rows, 4, c.packed, weights, c.correction, correction, 0, c.divisor, out, at,
                     out.shape[1], k4)


@inner
def add_product(x, stride, step, sums, votes, p):
    """votes int32 [rows padded to ROWS, cols padded to PANEL], panel number p of its columns, += x . sums. x uint8
    [padded rows, n], moved by 128, with the strides of a row and of four elements of it; sums int8 [n, PANEL at most]:
    columns of this panel; n a multiple of 4."""
    length, padded = sums.shape[0], votes.shape[1]
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
        tile(x, r * stride, stride, step, panel, 0, votes, at, padded, 0, votes, at, padded, length // 4)


# --- normalisation, MLP, the loss of a position (SPEC 5, 7, 13) ------------------------------------------------------

@leaf
def draw_norm(c, param, layer, S, noisy, norm):
    """norm int32 [2, 2, H]: weights and, in the transformer, biases of a layer norm as both members see them."""
    perturbed(c, param, layer, S, noisy, norm[0])
    if not c.gru:
        perturbed(c, param + 1, layer, S, noisy, norm[1])


@leaf
def layer_norm(c, h, count, left, norm, x, means):
    """x uint8 [>= count, H] = ln(h) + 128 of `count` rows of int8, GROUP at most, the `left` first of which belong to
    the even member; norm: of `draw_norm`; means float32 [GROUP]: overwritten with what the rows are divided by."""
    n, sizes = h.shape[1], local(GROUP, i32)
    for r in range(count):
        total = i32(0)
        for i in range(n):
            total = i32(total + abs(i32(h[r, i])))
        sizes[r] = total
    for r in range(count):
        m, mean = member(r, left), max(i32(1), divide(sizes[r], n))
        means[r] = mean
        if c.gru:
            reciprocal = f32(f32(1) / f32(mean))
            for i in range(n):
                x[r, i] = quotient(i32(h[r, i] * norm[0, m, i]), mean, reciprocal) + 128
        else:
            for i in range(n):
                x[r, i] = normed(h[r, i], norm[0, m, i], norm[1, m, i], mean) + 128


@inlined
def divided(y, count, d, zero, out):
    """out [count, n] = clip(y / d, rounded down) + zero: 0 for int8, 128 for uint8."""
    reciprocal = f32(f32(1) / f32(d))
    for r in range(count):
        for i in range(out.shape[1]):
            out[r, i] = quotient(y[r, i], d, reciprocal) + zero


@inlined
def amax(v, first, count, out, scales):
    """out int8 [>= count, n] = amax of v[first..] int32 (SPEC 5), `count` rows, GROUP at most; scales float32 [GROUP]:
    overwritten with their factors."""
    n, tops = out.shape[1], local(GROUP, i32)
    for r in range(count):
        top = i32(0)
        for i in range(n):
            top = max(top, abs(v[first + r, i]))
        tops[r] = top
    for r in range(count):
        scales[r] = scale = f32(f32(127) / f32(f32(tops[r]) + f32(1e-9)))
        for i in range(n):
            # exactly twice: its truncation shows which side of a half
            twice = i32(f32(f32(v[first + r, i]) * f32(scale + scale)))
            out[r, i] = i32(twice + i32(1) + i32(twice >> i32(31))) >> i32(1)


@inlined
def add_residual(h, count, left, y, shift, bias, scales):
    """h = amax(h + (y >> shift) + the bias of the members, or None), `count` rows, GROUP at most; y is overwritten;
    scales: see `amax`."""
    for r in range(count):
        m = member(r, left)
        for i in range(h.shape[1]):
            y[r, i] = h[r, i] + shift_right(y[r, i], shift)
            if bias is not None:
                y[r, i] += bias[m, i]
    amax(y, 0, count, h, scales)


@inlined
def gelu(x):
    """uint8: GELU(x) + 128 (SPEC 6) of an int8 from -127 on: max(x, 0) less a function of |x| that has few steps. All
    numbers have eight bits, so that a vector has many."""
    size = u8(abs(x))
    lost = u8(u8(size >= u8(2)) + u8(size >= u8(4)) + u8(size >= u8(9)))
    lost = u8(lost - u8(u8(size >= u8(17)) + u8(size >= u8(25)) + u8(size >= u8(36))))
    return u8(u8(max(x, np.int8(0))) + u8(128) - lost)


@leaf
def mlp(c, ln, layer, S, noisy, rows, per_member, h, kept, slot):
    """h = h + MLP(ln(h)) for all rows, in place: items 2 and the second half of 3 of SPEC 7, or the MLP of SPEC 13. ln:
    LN_INIT or LN_2; the parameters of the MLP follow in the table, in the transformer each with its bias. slot: its
    layer in `kept`."""
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
    u, wide, scales = local((GROUP, 4 * H), np.uint8), local((GROUP, 4 * H), i32), local(GROUP, f32)
    for first in range(0, rows, GROUP):
        count, left = min(GROUP, rows - first), per_member - first
        layer_norm(c, h[first:], count, left, norm, x, scales)
        keep(kept, NORMED_2, slot, first, ONE, count, x)
        keep_scales(kept, ln, layer, first, count, scales)
        product(c, up, layer, sides_u, noisy, x, count, left, wide)
        if c.gru:
            divided(wide, count, i32(c.divisor), 128, u)
        else:
            for r in range(count):
                m = member(r, left)
                for i in range(4 * H):
                    u[r, i] = clip(i32(shift_right(wide[r, i], c.SHIFT_MLP_UP) + bias_u[m, i])) + 128
        keep(kept, BEFORE, slot, first, ONE, count, u)
        if not c.gru:
            for r in range(count):
                for i in range(4 * H):
                    u[r, i] = gelu(np.int8(u8(u[r, i] ^ u8(128))))
        elif c.relu:
            for r in range(count):
                for i in range(4 * H):
                    u[r, i] = max(u[r, i], u8(128))
        keep(kept, INNER, slot, first, ONE, count, u)
        product(c, down, layer, sides_d, noisy, u, count, left, y)
        if c.gru:
            divided(y, count, i32(c.divisor_down), 0, y)
            for r in range(count):
                row = first + r
                for i in range(H):
                    h[row, i] = clip(i32(h[row, i] + y[r, i]))
        else:
            add_residual(h[first:], count, left, y, c.SHIFT_MLP_DOWN, bias_d, scales)
            keep_scales(kept, down, layer, first, count, scales)


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


@inlined
def head_errors(c, z, r, windows, q, start, T, t, top, total, seed, weight, places, values):
    """How many errors of position t of windows[q] (SPEC 21) may be other than 0, of logits z[r]; their tokens go to
    places int32 [V + TARGETS + 1], they to values int8, as large. top, total: see position_loss; seed: of the window;
    weight: of its errors."""
    of_distance, unit, dither = local(c.exp.size, i32), share_unit(total), dither_of(seed, t)
    near = i64(0)
    for d in range(c.exp.size):                              # of tokens that are not wanted
        of_distance[d] = excess(i32(0), softmax_share(c.exp[d], unit), weight)
        near = d if abs(of_distance[d]) > SMALL else near
    count = rounded(of_distance, 0, near, SMALL * (weight < 0), SMALL, top, c.logit_shift, z, r * z.shape[1],
                    c.VOCAB_SIZE, dither, DITHER_STEP, places, 0, values, 0)
    tokens = local(c.TARGETS, i64)
    for j in range(c.TARGETS):
        tokens[j] = target(c, windows, q, start, T, t, j)
    for j in range(c.TARGETS):
        v, wanted = tokens[j], 0
        if v < 0:                                            # it is counted already
            continue
        for other in range(j, c.TARGETS):
            if tokens[other] == v:
                wanted, tokens[other] = wanted + 1, -1
        its = softmax_share(c.exp[min(c.exp.size - 1, i64(top - shift_right(z[r, v], c.logit_shift)))], unit)
        k = i64(0) if error(i32(0), its, weight, dither, v) else count
        while k < count and places[k] != v:
            k += 1
        values[k] = error(i32((wanted * (127 << 16)) // c.TARGETS), its, weight, dither, v)
        places[k], count = v, max(count, k + 1)
    return count


@inlined
def learn_head(c, z, r, count, places, values, x, sums, votes):
    """From the errors of `head_errors`: votes on the head int32 [V, H] += its input x[r] times them, and sums int32 [H]
    = the head times them."""
    H = c.HIDDEN_DIM
    head, last = c.table[c.head, 0].columns * H, i32(0)
    part, times_last = local(H, i32), local(H, i32)          # sum of the head where the error was `last`
    for i in range(H):
        sums[i] = part[i] = times_last[i] = 0
    for k in range(count):
        v, e = i64(places[k]), i32(values[k])
        if c.gru and (z[r, v] == 127 and e > 0 or z[r, v] == -127 and e < 0):          # it cannot follow
            continue
        if e != last:                                        # most are -1: nothing is multiplied
            for i in range(H):
                sums[i] += i32(last * part[i])
                part[i], times_last[i] = 0, e * i32(x[r, i] - 128)
            last = e
        add_row(c.columns, head + v * H, part, 0, H)
        add_row(times_last, 0, votes, v * H, H)
    for i in range(H):
        sums[i] += i32(last * part[i])


# --- credits below a norm (SPEC 21) -----------------------------------------------------------------------------------

@inlined
def nothing_below(b):
    for r in range(b.below.shape[0]):
        b.along[r] = f32(0)
        for i in range(b.below.shape[1]):
            b.below[r, i] = f32(0)


@inlined
def add_below(b, count):
    """Adds what came through a product to the sums of `count` Rows."""
    for r in range(count):
        total = i64(0)
        for i in range(b.y.shape[1]):
            total += i64(b.y[r, i]) * i64(i32(b.outputs[r, i]) - 128)
            b.below[r, i] = f32(b.below[r, i] + f32(f32(b.y[r, i]) * b.scales[r]))
        b.along[r] = f32(b.along[r] + f32(f32(total) * b.scales[r]))


@inlined
def through_norm(b, count, norm, means, credit):
    """credit float32 [count, n] += the sums below a norm, less what only makes a row longer; norm int32 [n]: its
    weights; means float32 [count]: see layer_norm."""
    for r in range(count):
        size = i32(0)
        for i in range(norm.size):
            n = i32(b.outputs[r, i]) - i32(128)
            size += i32(n * n)
        longer = f32(b.along[r] / f32(max(i32(1), size)))
        for i in range(norm.size):
            across = f32(b.below[r, i] - f32(longer * f32(i32(b.outputs[r, i]) - i32(128))))
            credit[r, i] = f32(credit[r, i] + f32(across * f32(f32(norm[i]) / means[r])))


@leaf
def logits(c, noisy, norm, sides, h, count, left, x, z, means):
    """z (new_logits): the logits of `count` rows of h int8, the `left` first of which belong to the even member; norm,
    sides: of ln_f and the head. x uint8 [GROUP, H]: what the head multiplies; means: see layer_norm."""
    layer_norm(c, h, count, left, norm, x, means)
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
    x, means = local((GROUP, c.HIDDEN_DIM), np.uint8), local(GROUP, f32)
    for first in range(0, texts.shape[0], GROUP):
        count = min(GROUP, texts.shape[0] - first)
        logits(c, CLEAN, norm, sides, h[first:], count, count, x, z, means)
        for r in range(count):
            text, s = texts[first + r], q + first + r
            writing.present[s, text[t]] = 1
            if t + 1 >= writing.lengths[s]:
                random = hash32(u32(writing.seeds[s] + u32(999 + 555 * t)), u32(0))
                text[t + 1] = chosen(c, z[r], writing.present[s], writing.penalty, writing.temp, writing.floor, random)


@leaf
def score_rows(c, losses, nats, windows, q, S, noisy, start, T, h, rows, z, kept):
    """Scores h int8 [rows, H], last hidden states that share their noise, T a member or window. noisy: they belong to
    windows[q], else to windows[q], windows[q + 1].. Their losses go to losses int64 [rows], or if that is empty, their
    cross-entropies are added to nats float64 [windows]. z (new_logits): overwritten. kept: if it is not empty, it gets
    the credits of h."""
    H = c.HIDDEN_DIM
    norm, sides = local((2, 2, H), i32), new_sides(1, H, z.shape[1])
    means, b = local(GROUP, f32), new_rows(GROUP, H, H)
    places, values = local(c.VOCAB_SIZE + c.TARGETS + 1, i32), local(c.VOCAB_SIZE + c.TARGETS + 1, np.int8)
    draw_norm(c, c.ln_f, NO_LAYER, S, noisy, norm)
    draw_sides(c, c.head, NO_LAYER, S, noisy, sides)
    each = GROUP if c.VOCAB_SIZE < 1 << 10 else ROWS         # whose logits fit the second-level cache
    for first in range(0, rows, each):
        count = min(each, rows - first)
        logits(c, noisy, norm, sides, h[first:], count, T - first, b.outputs, z, means)
        for r in range(count):
            row = first + r
            window, t = q if noisy else q + row // T, row % T
            top = shift_right(largest(z, r, c.VOCAB_SIZE), c.logit_shift)
            if losses.size:
                total = entry_sum(c.exp, 0, top, c.logit_shift, z, r * z.shape[1], c.VOCAB_SIZE)
                losses[row] = position_loss(c, z, r, windows, window, start, T, t, top, total)
                if kept.credit.size:
                    found = head_errors(c, z, r, windows, window, start, T, t, top, total,
                                        u32(kept.seed + u32(window)), i32(kept.weights[row]), places, values)
                    learn_head(c, z, r, found, places, values, b.outputs, b.y[r], kept.votes)
            else:
                mass = exp64_sum(c.exp64, i32(top), i32(c.logit_shift), z, r, c.VOCAB_SIZE)
                wanted = shift_right(z[r, target(c, windows, window, start, T, t, 0)], c.logit_shift)
                nats[window] += np.log(mass) + (top - wanted) * c.unit
        if kept.credit.size:
            nothing_below(b)
            for r in range(count):
                b.scales[r] = f32(1)
            add_below(b, count)
            through_norm(b, count, norm[0, 0], means, kept.credit[first:])
