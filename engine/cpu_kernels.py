"""What both models need on the CPU: the layout of the weights, noise (SPEC 2, 4) and matrix products.

One compiled set of kernels serves every configuration: shapes and switches are values at run time. All matrix products
go through `engine.simd.tile` on weights that are repacked into panels after every update.
"""

from collections import namedtuple

import numba
import numpy as np

from engine import kernel_cache, simd
from engine.kernel_cache import inlined, inner, leaf
from engine.cpu_rules import (clip, divide, draw, f32, factor, hash32, i32, input_coefficient, input_fold, input_term,
                              loss, normed, quotient, scaled, share, shift_right, table_term, u32)
from engine.cpu_rules import score as drawn_score
from engine.simd import PANEL, ROWS, dot, empty, exp_sum, gelu, local, noisy_tile, tile
from model import integer_tables, parameters, transforms

njit = kernel_cache.njit(simd.use)

# columns of Weights.table, which has a row for every parameter and layer: where the parameter begins in the arrays of
# Weights and in the overlay, the seeds of its two sides, its size
AT_WEIGHTS = 0
AT_PACKED = 1
AT_CORRECTION = 2
AT_COLUMN = 3
SEED_A = 4
SEED_B = 5
OVERLAY_A = 6
OVERLAY_B = 7
N_ROWS = 8
N_COLS = 9
N_FIELDS = 10
# int64 and not int: numba compiles a function anew for every literal int among its arguments
i64 = np.int64
# the layer of parameters that belong to none; the noise of an unperturbed model
NO_LAYER = CLEAN = i64(0)
EMBEDDING, EMB_BIAS = i64(0), i64(1)           # of the transformer's table, in which those of NTT_MODE follow
SAME = i64(0)               # distance of the tokens of a pair's members where both read the same
GROUP = 32                  # rows that go through products together: their int32 results fit the second-level cache

# Constants of the configuration that the kernels see unchanged
FROM_CONFIG = ("HIDDEN_DIM HEAD_DIM N_HEADS N_LAYERS VOCAB_SIZE DEVICE_MASK DEVICE_GAUSSIAN ADAPTIVE_NOISE_MODE "
               "SIGMA_SHIFT_VECTOR SHIFT_ATTN SHIFT_OUT SHIFT_LOGIT SHIFT_MLP_UP SHIFT_MLP_DOWN SOFTMAX_SCALE_BIT "
               "ROPE_SCALE_BIT TARGETS USE_CLT")
# The configuration as the kernels see it, all int64: `constants`.
Constants = namedtuple("Constants", FROM_CONFIG + (
    " matrix_shift short_exp exact log_unit ntt ntt_prime gru head ln_f divisor divisor_down lowest per_group"))
# weights int8 canonical; columns int8 [n, H]: the tables that are looked up, a token or byte a row; packed int8 panels
# [k4, PANEL, 4]; correction int32: -128 times each column's sum, because activations go into products as x + 128;
# overlay int8; table int64 [parameters, layers, N_FIELDS]
Weights = namedtuple("Weights", "weights columns packed correction overlay table")
# What `score` adds to: losses int64 [pairs, 2]; nats float64 [windows] or [0], the cross-entropies of softmax(logits *
# unit), for which there is exp64[d] = exp(-d * unit).
Scoring = namedtuple("Scoring", "losses nats exp64 unit")
# What writes texts: lengths int64 [sequences] of their prompts, seeds uint32 [sequences] of their draws, seen uint8
# [sequences, V]: the tokens that they have; penalty, temp float32 and floor int64: of model.sampling.Sampling
Writing = namedtuple("Writing", "lengths seeds seen penalty temp floor")
# The noise of a matrix for one or more pairs: columns int32 [pairs, cols], trunc(noise(A, c) * f_col(c)); inputs int8
# [pairs, rows], noise(B, r); offset int32 [pairs], 128 times their sum; coefficients int32 and scale float32 [pairs,
# rows] as `input_term` takes them, filled in modes 1 and 2 only.
Sides = namedtuple("Sides", "columns inputs offset coefficients scale")
# Noise on the activations of an MLP (SPEC 21): up, down int8 [rows, units]; inner uint8 takes what w_down multiplies in
# the first T of every `each` rows
Disturbance = namedtuple("Disturbance", "up down inner each T")
# (pairs, rows, cols)
new_sides = simd.locals_of(Sides, (numba.int32, (0, 2)), (numba.int8, (0, 1)), (numba.int32, (0,)),
                           (numba.int32, (0, 1)), (numba.float32, (0, 1)))


def constants(cfg, exp):
    """The Constants of a configuration; matrix_shift, the noise shift of a step, is 0. exp: int32 [256]."""
    gru = int(cfg.MODEL == "gru")
    names = [p.name for p in parameters.table(cfg)]
    return Constants(
        **{name: getattr(cfg, name) for name in FROM_CONFIG.split()},
        matrix_shift=0, short_exp=int(not exp[95:].any()), exact=int(cfg.LOSS == "exact"),
        log_unit=integer_tables.log_unit(cfg), ntt=int(cfg.NTT_MODE != 0),
        ntt_prime=transforms.PRIME.get(cfg.NTT_MODE, 0), gru=gru,
        head=names.index("head" if gru else "embedding"), ln_f=names.index("ln_f"),
        # gru: of a product over H or over 4 H inputs; least value inside the MLP; pairs that read one window
        divisor=parameters.divisor(cfg, cfg.HIDDEN_DIM), divisor_down=parameters.divisor(cfg, 4 * cfg.HIDDEN_DIM),
        lowest=0 if cfg.MLP_RELU else -127, per_group=cfg.GROUP_SIZE // 2)


@inlined
def padded(n, to):
    """n, or the next multiple of `to`."""
    return (n + to - 1) // to * to


@inner
def new_logits(c):
    """int32 [GROUP, V padded]: memory for the logits of rows that go through products together."""
    return empty((GROUP, padded(c.VOCAB_SIZE, PANEL)), i32)


@inlined
def copy_row(source, r, out, o):
    """out[o] = source[r]; a leaf cannot say it so."""
    for i in range(out.shape[1]):
        out[o, i] = source[r, i]


# --- random numbers and noise (SPEC 2, 4) ----------------------------------------------------------------------------

@inlined
def noise(c, seed, i):
    """int32: the noise of SPEC 2."""
    return draw(c.DEVICE_GAUSSIAN, hash32(seed, i), c.DEVICE_MASK)


@leaf
def vote_draw(c, seed, i):
    """int32: the noise as votes count it."""
    n = noise(c, seed, i)
    return n if c.USE_CLT else i32(i32(n > 0) - i32(n < 0))


@leaf
def draw_sides(c, w, param, layer, S, noisy, sides):
    """Fills the Sides of a matrix for pair seeds S..; without noise only the columns, with 0."""
    t = w.table[param, layer]
    n, cols = t[N_ROWS], t[N_COLS]
    overlay_a = w.overlay[t[OVERLAY_A]:]
    overlay_b = w.overlay[t[OVERLAY_B]:]
    for q in range(sides.offset.size):
        seed_a, seed_b = u32(S + q + t[SEED_A]), u32(S + q + t[SEED_B])
        if not noisy:
            for i in range(cols):
                sides.columns[q, i] = 0
            continue
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
def hidden_side(c, w, t, S, noisy, unit, scale):
    """Fills unit int32 and scale float32 [H] with the noise of the hidden units of a table that is looked up and its
    factors; t: of Weights.table. Without noise the units are 0."""
    seed = u32(S + t[SEED_B])
    for i in range(c.HIDDEN_DIM):
        unit[i] = noise(c, seed, i) if noisy else i32(0)
    for i in range(c.HIDDEN_DIM):
        scale[i] = factor(c.ADAPTIVE_NOISE_MODE, w.overlay[t[OVERLAY_B] + i], seed, i)


@inlined
def look_up(c, w, t, S, m, k, unit, scale, out):
    """out int32 [H]: column k of a table as member m sees it; unit, scale: `hidden_side`."""
    seed = u32(S + t[SEED_A])
    of_column = noise(c, seed, k)
    its_scale = factor(c.ADAPTIVE_NOISE_MODE, w.overlay[t[OVERLAY_A] + k], seed, k)
    for i in range(c.HIDDEN_DIM):
        p = table_term(of_column, its_scale, unit[i], scale[i]) * sign(m)
        out[i] = w.columns[t[AT_COLUMN] + k, i] + shift_right(p, c.matrix_shift)


@inlined
def project(c, x, r, sides, q):
    """sb of pair q: the sum over k of trunc(x[r, k] * noise(B, k) * f_row(k)), wrapping int32; x uint8 [rows, K],
    activation + 128. In the transformer's down projections four inputs i + sub * H share one running integer (SPEC
    4)."""
    n, H = sides.inputs.shape[1], c.HIDDEN_DIM
    s = i32(0)
    if c.ADAPTIVE_NOISE_MODE == 0:
        return i32(dot(x, r * n, sides.inputs, q * n, n) - sides.offset[q])
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
def perturbed(c, w, param, layer, S, noisy, out):
    """out int32 [2, width]: a vector parameter as the even and the odd member of a pair see it; gru: clipped."""
    t = w.table[param, layer]
    n = t[N_COLS]
    weights, overlay = w.weights[t[AT_WEIGHTS]:], w.overlay[t[OVERLAY_A]:]
    seed_a, seed_b = u32(S + t[SEED_A]), u32(S + t[SEED_B])
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
def embed(c, w, ntt, S, noisy, tokens, apart, n, start, rows, h):
    """h int8 [rows, H]: item 1 of SPEC 7, with the coefficients of SPEC 14, or the embedding of SPEC 13. tokens int32
    [>= start + n], those of the odd member `apart` behind; n rows a member, from position `start` on; ntt int64 [T, T]:
    model.transforms.basis."""
    H, T = c.HIDDEN_DIM, ntt.shape[0]
    tables = 4 if c.ntt else 1
    bias = local((2, H), i32)
    units, scales = local((4, H), i32), local((4, H), f32)
    total, one = local(H, i32), local(H, i32)
    if c.gru:
        for i in range(H):
            bias[0, i] = bias[1, i] = 0
    else:
        perturbed(c, w, EMB_BIAS, NO_LAYER, S, noisy, bias)
    for k in range(tables):
        hidden_side(c, w, w.table[k + 1 if k else EMBEDDING, 0], S, noisy, units[k], scales[k])
    for r in range(rows):
        m = member(r, n)
        position, own, number = start + r - n * m, apart * m, i64(0)
        for i in range(min(T, tokens.size - own - position + position % T) if c.ntt else 0):
            number += i64(tokens[own + position - position % T + i]) * ntt[position % T, i]
        if c.ntt_prime:
            number %= c.ntt_prime
        for i in range(H):
            total[i] = bias[m, i]
        for k in range(tables):
            column = (number >> (8 * k)) & 255 if k else i64(tokens[own + position])
            look_up(c, w, w.table[k + 1 if k else EMBEDDING, 0], S, m, column, units[k], scales[k], one)
            for i in range(H):
                total[i] += shift_right(one[i], 2 if k else 0)
        for i in range(H):
            h[r, i] = clip(total[i])


# --- products (SPEC 4) -----------------------------------------------------------------------------------------------

# Rows are named by array and index. An index that may be below zero to the compiler (offset + i) would keep a loop from
# vectors.

@leaf
def product(c, w, param, layer, sides, noisy, x, rows, left, out):
    """out int32 [>= rows padded to ROWS, cols padded to PANEL] = x . W with its noise; x uint8 [>= padded rows, K].
    The `left` first rows belong to the even member; with the Sides of several pairs, rows 2 q and 2 q + 1 to pair
    q."""
    t = w.table[param, layer]
    k4, panels = t[N_ROWS] // 4, (t[N_COLS] + PANEL - 1) // PANEL
    several = i64(sides.offset.size > 1)
    noise = sides.columns
    sums = local(rows + ROWS, i32)
    for r in range(rows + ROWS):
        sums[r] = 0
    for r in range(rows if noisy else 0):
        m = r & 1 if several else member(r, left)
        sums[r] = sign(m) * project(c, x, r, sides, several * (r >> 1))
    for p in range(panels):
        for r in range(0, rows, ROWS):
            stride = several * noise.shape[1]
            noisy_tile(x, r * t[N_ROWS], t[N_ROWS], w.packed, t[AT_PACKED] + p * k4 * 4 * PANEL, w.correction,
                       t[AT_CORRECTION] + p * PANEL, sums, r, noise, (r >> 1) * stride + p * PANEL, stride,
                       c.matrix_shift, out, r * out.shape[1] + p * PANEL, out.shape[1], k4)


@leaf
def add_tiles(x, panel, correction, votes, p):
    """votes int32 [rows padded to ROWS, cols padded to PANEL], panel number p of its columns, += x . panel +
    correction. x uint8 [padded rows, 4 k4]; panel int8 [k4 * PANEL * 4]; correction int32 [PANEL]."""
    length, padded = x.shape[1], votes.shape[1]
    for r in range(0, votes.shape[0], ROWS):
        at = r * padded + p * PANEL
        for k in range(ROWS):
            for j in range(PANEL):
                votes[r + k, p * PANEL + j] += correction[j]
        tile(x, r * length, length, panel, 0, votes, at, padded, votes, at, padded, length // 4)


# --- normalisation, MLP, the loss of a position (SPEC 5, 7, 13) ------------------------------------------------------

@leaf
def draw_norm(c, w, param, layer, S, noisy, norm):
    """norm int32 [2, 2, H]: weights and, in the transformer, biases of a layer norm as both members see them."""
    perturbed(c, w, param, layer, S, noisy, norm[0])
    if not c.gru:
        perturbed(c, w, param + 1, layer, S, noisy, norm[1])


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
                x[r, i] = normed(c.ADAPTIVE_NOISE_MODE, h[r, i], norm[0, m, i], norm[1, m, i], mean) + 128


@inlined
def divided(y, count, d, lowest, zero, out):
    """out [count, n] = clip(y / d, rounded down), `lowest` at least, + zero: 0 for int8, 128 for uint8."""
    reciprocal = f32(f32(1) / f32(d))
    for r in range(count):
        for i in range(out.shape[1]):
            out[r, i] = max(i32(lowest), quotient(y[r, i], d, reciprocal)) + zero


@inlined
def amax(v, first, count, out, o, zero):
    """out[o..] = amax of v[first..] int32 (SPEC 5) + zero, `count` rows, GROUP at most; zero: 0 for int8 rows, 128 for
    uint8."""
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
            out[o + r, i] = i32(i32(twice + i32(1) + i32(twice >> i32(31))) >> i32(1)) + zero


@inlined
def add_residual(h, count, left, y, shift, bias):
    """h = amax(h + (y >> shift) + the bias of the members), `count` rows, GROUP at most; y is overwritten."""
    for r in range(count):
        m = member(r, left)
        for i in range(h.shape[1]):
            y[r, i] = h[r, i] + shift_right(y[r, i], shift) + bias[m, i]
    amax(y, 0, count, h, 0, 0)


@leaf
def mlp(c, w, ln, layer, S, noisy, rows, per_member, h, disturbance):
    """h = h + MLP(ln(h)) for all rows, in place: items 2 and the second half of 3 of SPEC 7, or the MLP of SPEC 13. ln:
    LN_INIT or LN_2; the parameters of the MLP follow in the table, in the transformer each with its bias.
    disturbance: a Disturbance, or None."""
    H = c.HIDDEN_DIM
    up, down = ln + (1 if c.gru else 2), ln + (2 if c.gru else 4)
    norm = local((2, 2, H), i32)
    bias_u, bias_d = local((2, 4 * H), i32), local((2, H), i32)
    sides_u, sides_d = new_sides(1, H, 4 * H), new_sides(1, 4 * H, H)
    draw_norm(c, w, ln, layer, S, noisy, norm)
    if not c.gru:
        perturbed(c, w, up + 1, layer, S, noisy, bias_u)
        perturbed(c, w, down + 1, layer, S, noisy, bias_d)
    draw_sides(c, w, up, layer, S, noisy, sides_u)
    draw_sides(c, w, down, layer, S, noisy, sides_d)
    x, y = local((GROUP, H), np.uint8), local((GROUP, H), i32)
    u, wide = local((GROUP, 4 * H), np.uint8), local((GROUP, 4 * H), i32)
    for first in range(0, rows, GROUP):
        count, left = min(GROUP, rows - first), per_member - first
        layer_norm(c, h[first:], count, left, norm, x)
        product(c, w, up, layer, sides_u, noisy, x, count, left, wide)
        if disturbance is not None:
            divided(wide, count, i32(c.divisor), -127, 0, wide)
            for r in range(count):
                at = first + r
                for i in range(4 * H):
                    u[r, i] = max(i32(c.lowest), clip(i32(wide[r, i] + disturbance.up[at, i]))) + 128
                if at % disturbance.each < disturbance.T:
                    copy_row(u, r, disturbance.inner, at // disturbance.each * disturbance.T + at % disturbance.each)
        elif c.gru:
            divided(wide, count, i32(c.divisor), c.lowest, 128, u)
        else:
            for r in range(count):
                m = member(r, left)
                for i in range(4 * H):
                    u[r, i] = clip(i32(shift_right(wide[r, i], c.SHIFT_MLP_UP) + bias_u[m, i]))
            gelu(u, 0, count * 4 * H)
        product(c, w, down, layer, sides_d, noisy, u, count, left, y)
        if c.gru:
            divided(y, count, i32(c.divisor_down), -127, 0, y)
            for r in range(count):
                at = first + r
                if disturbance is not None:
                    for i in range(H):
                        y[r, i] = clip(i32(y[r, i] + disturbance.down[at, i]))
                for i in range(H):
                    h[at, i] = clip(i32(h[at, i] + y[r, i]))
        else:
            add_residual(h[first:], count, left, y, c.SHIFT_MLP_DOWN, bias_d)


@inlined
def largest(z, r, n):
    """The largest of the first n of row r."""
    top = z[r, 0]
    for v in range(n):
        top = max(top, z[r, v])
    return top


@inlined
def target(c, windows, q, start, T, t, j):
    """Target number j of position t of windows[q]: targets begin at token start + 1, the drawn ones follow the
    window."""
    return windows[q, start + T + (c.TARGETS - 1) * t + j if j else start + t + 1]


@inlined
def score(c, exp, scoring, noisy, z, windows, q, first, count, start, T):
    """Scores rows first.. of those that share their noise, `count` rows of logits z int32. noisy: they belong to
    windows[q], T rows a member, and their losses are added up; else to windows[q], windows[q + 1].., and their
    cross-entropies are."""
    totals = local(GROUP, i64)
    tops, targets = local(GROUP, i32), local(GROUP, i32)
    for r in range(count):
        window, t = q if noisy else q + (first + r) // T, (first + r) % T
        tops[r], targets[r] = largest(z, r, c.VOCAB_SIZE), z[r, target(c, windows, window, start, T, t, 0)]
        if noisy:
            totals[r] = exp_sum(exp, 0, c.short_exp, tops[r], 0, z, r * z.shape[1], c.VOCAB_SIZE, z, 0, 0)
            for j in range(1, c.TARGETS):
                targets[r] += z[r, target(c, windows, window, start, T, t, j)]
            tops[r] *= c.TARGETS
        elif scoring.nats.size:
            total = 0.0
            for v in range(c.VOCAB_SIZE):
                total += scoring.exp64[min(scoring.exp64.size - 1, tops[r] - z[r, v])]
            scoring.nats[window] += np.log(total) + (tops[r] - targets[r]) * scoring.unit
    if noisy:
        for r in range(count):
            totals[r] = loss(c.exact, totals[r], tops[r], targets[r], c.SOFTMAX_SCALE_BIT, c.log_unit, 256 // c.TARGETS)
        for r in range(count):
            scoring.losses[q, member(first + r, T)] += totals[r]


@leaf
def logits(c, w, noisy, norm, sides, h, count, left, z):
    """z int32 [>= count, V padded]: the logits of `count` rows of h int8, the `left` first of which belong to the even
    member; norm, sides: of ln_f and the head."""
    x = local((GROUP, c.HIDDEN_DIM), np.uint8)
    layer_norm(c, h, count, left, norm, x)
    product(c, w, c.head, NO_LAYER, sides, noisy, x, count, left, z)
    if c.gru:
        divided(z, count, i32(c.divisor), -127, 0, z)
    else:
        for r in range(count):
            for v in range(c.VOCAB_SIZE):
                z[r, v] = shift_right(z[r, v], c.SHIFT_LOGIT)


@leaf
def chosen(c, exp, z, seen, penalty, temp, floor, random):
    """The token drawn from logits z int32 [V] (SPEC 10; presence penalty once for each token seen, as in section 11).
    seen uint8 [V]; exp int32 [256]; penalty float32 in logit units; floor int64: smallest d kept; random uint32."""
    V, best = c.VOCAB_SIZE, 0
    scores, weights = local(V, f32), local(V, i32)
    for v in range(V):
        scores[v] = drawn_score(z[v], seen[v], penalty)
        if scores[v] > scores[best]:
            best = v
    if temp == f32(0):
        return best
    total, running = i64(0), i64(0)
    for v in range(V):
        weights[v] = share(exp, exp.size - 1, scores[v], scores[best], temp, floor)
        total += weights[v]
    threshold = i64(random) % total
    for lane in range(c.HIDDEN_DIM):
        for v in range(lane, V, c.HIDDEN_DIM):
            running += weights[v]
            if running > threshold:
                return v
    return best


@leaf
def write_next(c, w, exp, writing, q, S, noisy, texts, t, room, h, z):
    """Puts the token at position t + 1 of the sequences that share their noise, where their prompts have ended: texts
    int32 [sequences * room], flat, the first of which is sequence q; h int8: their last hidden states at position
    t."""
    norm, sides = local((2, 2, c.HIDDEN_DIM), i32), new_sides(1, c.HIDDEN_DIM, z.shape[1])
    draw_norm(c, w, c.ln_f, NO_LAYER, S, noisy, norm)
    draw_sides(c, w, c.head, NO_LAYER, S, noisy, sides)
    sequences = texts.size // room
    for first in range(0, sequences, GROUP):
        count = min(GROUP, sequences - first)
        logits(c, w, noisy, norm, sides, h[first:], count, 1 - first if noisy else count, z)
        for r in range(count):
            s, at = q + first + r, (first + r) * room + t
            writing.seen[s, texts[at]] = 1
            if t + 1 >= writing.lengths[s]:
                random = hash32(u32(writing.seeds[s] + u32(999 + 555 * t)), u32(0))
                texts[at + 1] = chosen(c, exp, z[r], writing.seen[s], writing.penalty, writing.temp, writing.floor,
                                       random)


@leaf
def score_rows(c, w, exp, scoring, windows, q, S, noisy, start, T, h, rows, z):
    """`score` from the last hidden state on: h int8 [rows, H], rows that share their noise. z int32 [GROUP, V padded]
    has the logits of the last rows then."""
    norm, sides = local((2, 2, c.HIDDEN_DIM), i32), new_sides(1, c.HIDDEN_DIM, z.shape[1])
    draw_norm(c, w, c.ln_f, NO_LAYER, S, noisy, norm)
    draw_sides(c, w, c.head, NO_LAYER, S, noisy, sides)
    for first in range(0, rows, GROUP):
        count = min(GROUP, rows - first)
        logits(c, w, noisy, norm, sides, h[first:], count, T - first, z)
        score(c, exp, scoring, noisy, z, windows, q, first, count, start, T)


class CpuModel:
    """A model as the engine uses it. run_windows: its kernel; tables: what the kernel reads besides the weights. A
    subclass has `together`, the number of pairs that share work: the engine divides a job at multiples of it; _memory,
    what run_windows keeps from position to position; and _writing, the tables and memory of write_texts."""

    def __init__(self, cfg, constants, tables, run_windows, write_texts):
        self.cfg = cfg
        self._constants = constants
        self._tables = tables
        self._run_windows, self._write_texts = run_windows, write_texts

    def write(self, w, texts, lengths, seeds, s, seed=None, shift=0):
        """Fills texts int32 [sequences, room] behind their prompts of `lengths` tokens: int64, at least 1, below room.
        seeds uint32 [sequences]: of the draws; s: sampling.Sampling. seed: of the pair whose members the first two
        sequences are; sequences go on with the following pairs. None: all are the unperturbed model's."""
        noisy, (sequences, room) = int(seed is not None), texts.shape
        tables, memory = self._writing(1 + noisy, sequences, room)
        self._write_texts(self._constants._replace(matrix_shift=shift), w, tables, self._of(lengths, seeds, s),
                          texts.reshape(-1, (1 + noisy) * room), 0, room, room, memory,
                          np.uint32((seed or 0) & 0xFFFFFFFF), noisy)

    def generate(self, w, prompt, count, seed, s):
        """Yields `count` tokens that continue prompt int32 [n]: what `write` writes, one by one."""
        text, memory, total = prompt[None], np.zeros(0, np.int8), prompt.size + count
        writing = self._of(np.array([prompt.size]), np.array([seed & 0xFFFFFFFF], np.uint32), s)
        for end in range(prompt.size + 1, total + 1):
            if end > text.size or not memory.size:           # room for twice as much
                known, text = text, np.zeros((1, min(total, 2 * end + 64)), np.int32)
                text[:, :known.size] = known
                known, (tables, memory) = memory, self._writing(1, 1, text.size)
                if known.size:
                    memory[tuple(map(slice, known.shape))] = known
            start = end - 2 if end > prompt.size + 1 else 0
            self._write_texts(self._constants, w, tables, writing, text, start, end, text.size, memory, np.uint32(0), 0)
            yield int(text[0, end - 1])

    def _of(self, lengths, seeds, s):
        return Writing(lengths, seeds, np.zeros((lengths.size, self.cfg.VOCAB_SIZE), np.uint8), s.penalty, s.temp,
                       np.int64(s.floor))

    def run(self, w, windows, start=0, seed=0, noisy=0, first_pair=0, shift=0,
            losses=np.empty((0, 2), i64), nats=np.empty(0), exp64=np.empty(0), unit=0.0):
        """Adds up what Scoring says. noisy: windows int32 are those of model.soft_targets for pairs first_pair.. of a
        step with this seed and noise shift."""
        positions = (windows.shape[1] - 1 - start) // (self.cfg.TARGETS if noisy else 1)
        memory = self._memory(2 if noisy else 1, len(windows), positions)
        self._run_windows(self._constants._replace(matrix_shift=shift), w, self._tables,
                          Scoring(losses, nats, exp64, unit), windows, start, memory,
                          np.uint32(seed + first_pair & 0xFFFFFFFF), noisy, first_pair)
