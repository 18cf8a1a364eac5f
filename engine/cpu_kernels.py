"""What both models need on the CPU: the layout of the weights, noise (SPEC 2, 4) and matrix products.

One compiled set of kernels serves every configuration: shapes and switches are values at run time. All matrix products
go through `engine.simd.tile` on weights that are repacked into panels after every update.
"""

from typing import NamedTuple

import numba
import numpy as np

from engine import kernel_cache, simd
from engine.cpu_rules import (clip, divide, draw, factor, hash32, i32, input_coefficient, input_fold, input_term, loss,
                              scaled, shift_right, u32)
from engine.simd import PANEL, ROWS, dot, exp_sum, local, tile

njit, inner, leaf, inlined = kernel_cache.njit(simd.use), kernel_cache.inner, kernel_cache.leaf, kernel_cache.inlined

# columns of Weights.table: one row a parameter and layer
FIELDS = ("weights", "packed", "correction", "seed_a", "seed_b", "overlay_a", "overlay_b", "rows", "cols")
AT_W, AT_P, AT_C, SEED_A, SEED_B, OVER_A, OVER_B, N_ROWS, N_COLS = range(len(FIELDS))
# int64 and not int, because numba compiles a function anew for every literal int among its arguments
i64 = np.int64
# the layer of what is in none, a model without noise
NO_LAYER = CLEAN = i64(0)
NO_INTS = np.empty(0, np.int32)
GROUP = 32                  # rows that go through products together: their int32 results fit the second-level cache


class Constants(NamedTuple):
    """The configuration as the kernels see it, all int64."""
    H: int
    D: int
    heads: int
    L: int
    V: int
    mask: int
    gaussian: int
    mode: int
    scaled: int         # whether noise has factors: modes 1 and 2
    matrix_shift: int
    vector_shift: int
    attn: int
    out: int
    logit: int
    up: int
    down: int
    scale_bit: int
    rope_bit: int
    short_exp: int
    exact: int
    log_unit: int
    targets: int        # of a position
    ntt: int
    ntt_prime: int
    clt: int
    gru: int            # whether this is the recurrent model
    divisor: int        # gru: of a product over H inputs,
    divisor_down: int   # ... over 4 H inputs
    lowest: int         # gru: least value inside the MLP


class Weights(NamedTuple):
    """weights int8 canonical; packed int8 panels [k4, PANEL, 4]; correction int32: -128 times each column's sum,
    because activations go into products as x + 128; tokens int8 [V, H], the embedding a token a row; overlay int8;
    table int64 [parameters, layers, FIELDS]."""
    weights: np.ndarray
    tokens: np.ndarray
    packed: np.ndarray
    correction: np.ndarray
    overlay: np.ndarray
    table: np.ndarray


# --- random numbers and noise (SPEC 2, 4) ----------------------------------------------------------------------------

@inlined
def noise(c, seed, i):
    """int32: the noise of SPEC 2."""
    return draw(c.gaussian, hash32(seed, i), c.mask)


@leaf
def vote_draw(c, seed, i):
    """int32: the noise as votes count it."""
    n = noise(c, seed, i)
    return n if c.clt else i32(i32(n > 0) - i32(n < 0))


class Sides(NamedTuple):
    """The noise of a matrix for one or more pairs: columns int32 [pairs, cols], trunc(noise(A, c) * f_col(c)); inputs
    int8 [pairs, rows], noise(B, r); offset int32 [pairs], 128 times their sum; coefficients int32 and scale float32
    [pairs, rows] as `input_term` takes them, in modes 1 and 2 only."""
    columns: np.ndarray
    inputs: np.ndarray
    offset: np.ndarray
    coefficients: np.ndarray
    scale: np.ndarray


# (pairs, rows, cols, rows in modes 1 and 2, else 0)
new_sides = simd.locals_of(Sides, (numba.int32, (0, 2)), (numba.int8, (0, 1)), (numba.int32, (0,)),
                           (numba.int32, (0, 3)), (numba.float32, (0, 3)))


@leaf
def draw_sides(c, w, param, layer, S, noisy, sides):
    """Fills the Sides of a matrix for pair seeds S..; without noise only the columns, with 0."""
    t = w.table[param, layer]
    n, cols, overlay_a, overlay_b = t[N_ROWS], t[N_COLS], w.overlay[t[OVER_A]:], w.overlay[t[OVER_B]:]
    for q in range(sides.offset.size):
        seed_a, seed_b = u32(S + q + t[SEED_A]), u32(S + q + t[SEED_B])
        if not noisy:
            for i in range(cols):
                sides.columns[q, i] = 0
            continue
        for i in range(cols):
            sides.columns[q, i] = noise(c, seed_a, i)
        if c.mode:
            for i in range(cols):
                sides.columns[q, i] = scaled(c.mode, sides.columns[q, i], overlay_a[i], seed_a, i)
        total = i32(0)
        for i in range(n):
            drawn = noise(c, seed_b, i)
            sides.inputs[q, i] = drawn
            total = i32(total + drawn)
        sides.offset[q] = i32(total * i32(128))
        for i in range(sides.coefficients.shape[1]):
            sides.coefficients[q, i] = input_coefficient(c.mode, i32(sides.inputs[q, i]), overlay_b[i])
        if c.mode == 2:
            for i in range(n):
                sides.scale[q, i] = factor(c.mode, overlay_b[i], seed_b, i)


@leaf
def hidden_side(c, w, t, S, unit, scale):
    """Fills unit int32 and scale float32 [H] with the noise of the hidden units of a table that is looked up and its
    factors; t: of Weights.table."""
    seed = u32(S + t[SEED_B])
    for i in range(c.H):
        unit[i] = noise(c, seed, i)
    for i in range(c.H):
        scale[i] = factor(c.mode, w.overlay[t[OVER_B] + i], seed, i)


@inlined
def project(c, x, r, sides, q, sign):
    """sign * sb of pair q with sb = sum_k trunc(x[r, k] * noise(B, k) * f_row(k)), wrapping int32; x uint8 [rows, K],
    activation + 128."""
    n = sides.inputs.shape[1]
    if c.mode == 0:
        return i32(sign * i32(dot(x, r * n, sides.inputs, q * n, n) - sides.offset[q]))
    s = i32(0)
    for i in range(n):
        x_i = i32(i32(x[r, i]) - i32(128))
        s = i32(s + input_term(c.mode, x_i, sides.coefficients[q, i], sides.scale[q, i]))
    return i32(sign * s)


@inlined
def project_down(c, x, r, sides, q, sign):
    """The same for a down projection: four inputs i + sub * H share one running integer (SPEC 4)."""
    if c.mode == 0:
        return project(c, x, r, sides, q, sign)
    s, H = i32(0), sides.inputs.shape[1] // 4
    for i in range(H):
        p = i32(0)
        for sub in range(4):
            j = i + sub * H
            x_j = i32(i32(x[r, j]) - i32(128))
            p = input_fold(c.mode, p, x_j, sides.coefficients[q, j], sides.scale[q, j])
        s = i32(s + p)
    return i32(sign * s)


@leaf
def perturbed(c, w, param, layer, S, noisy, out):
    """out int32 [2, width]: a vector parameter as the even and the odd member of a pair see it; gru: clipped."""
    t = w.table[param, layer]
    n = t[N_COLS]
    weights, overlay = w.weights[t[AT_W]:], w.overlay[t[OVER_A]:]
    seed_a, seed_b = u32(S + t[SEED_A]), u32(S + t[SEED_B])
    shift = i32(c.vector_shift)
    for i in range(n):
        out[0, i] = i32(noise(c, seed_a, i) * noise(c, seed_b, i)) if noisy else i32(0)
    if noisy and c.mode:
        for i in range(n):
            out[0, i] = scaled(c.mode, out[0, i], overlay[i], seed_a, i)
    for i in range(n):
        v, p = i32(weights[i]), out[0, i]
        plus, minus = i32(v + shift_right(p, shift)), i32(v + shift_right(i32(-p), shift))
        out[0, i] = clip(plus) if c.gru else plus
        out[1, i] = clip(minus) if c.gru else minus


# --- products (SPEC 4) -----------------------------------------------------------------------------------------------

# Rows are named by array and index. An index that may be below zero to the compiler (offset + i) would keep a loop from
# vectors.

@leaf
def product(w, param, layer, x, rows, out):
    """out int32 [>= rows padded to ROWS, cols padded to PANEL] = x . W; x uint8 [>= padded rows, K]."""
    t = w.table[param, layer]
    k4, panels = t[N_ROWS] // 4, (t[N_COLS] + PANEL - 1) // PANEL
    stride = out.shape[1]
    for p in range(panels):
        for r in range(0, rows, ROWS):
            tile(x, r * t[N_ROWS], t[N_ROWS], w.packed, t[AT_P] + p * k4 * 4 * PANEL, w.correction,
                 t[AT_C] + p * PANEL, 0, out, r * stride + p * PANEL, stride, k4)


@inlined
def member(r, n):
    """0 for the rows of the even member, which has n, 1 for those of the odd one."""
    return i64(r >= n)


@inlined
def sign(m):
    """int32: the sign of a member's noise."""
    return i32(1 - 2 * m)


@inlined
def noised(y, s, noise, shift):
    """int32: the element y of a product with its noise: y + ((sign * sb * noise(A, c)) >> shift); s is sign * sb (a
    product wraps either way alike)."""
    return i32(y + shift_right(i32(s * noise), shift))


@inlined
def mean_sizes(x, first, count, means):
    """means int32 [count]: the mean |x| of rows first.. of x int8, rounded down, at least 1."""
    n = x.shape[1]
    for r in range(count):
        total = i32(0)
        for i in range(n):
            total = i32(total + abs(i32(x[first + r, i])))
        means[r] = total
    for r in range(count):
        means[r] = max(i32(1), divide(means[r], n))


@inlined
def largest(z, r, n):
    """The largest of the first n of row r."""
    top = z[r, 0]
    for v in range(n):
        top = max(top, z[r, v])
    return top


@leaf
def score(c, exp, noisy, z, windows, q, first, count, start, T, exp64, unit, losses, nats):
    """Scores rows first.. of those that share their noise, `count` rows of logits z int32. noisy: they belong to
    windows[q], T rows a member, and their losses are added to losses int64 [pairs, 2]; else to windows[q], windows[q +
    1].., and nats float64, if it is not empty, gets the cross-entropies of softmax(logits * unit), with exp64[d] =
    exp(-d * unit). Targets begin at token start + 1 of a window; further ones of a position follow the window."""
    totals, tops, targets, drawn = local(GROUP, np.int64), local(GROUP, i32), local(GROUP, i32), c.targets - 1
    for r in range(count):
        window, position = q if noisy else q + (first + r) // T, start + (first + r) % T
        tops[r], targets[r] = largest(z, r, c.V), z[r, windows[window, position + 1]]
        if noisy:
            totals[r] = exp_sum(exp, c.short_exp, tops[r], i32(0), z, r * z.shape[1], c.V, NO_INTS, 0)
            at = start + T + 1 + drawn * ((first + r) % T)
            for k in range(at, at + drawn):
                targets[r] += z[r, windows[window, k]]
            tops[r] = i32(tops[r] * c.targets)
        elif nats.size:
            total = 0.0
            for v in range(c.V):
                total += exp64[min(exp64.size - 1, tops[r] - z[r, v])]
            nats[window] += np.log(total) + (tops[r] - targets[r]) * unit
    if noisy:
        for r in range(count):
            totals[r] = loss(c.exact, totals[r], tops[r], targets[r], c.scale_bit, c.log_unit, 256 // c.targets)
        for r in range(count):
            losses[q, member(first + r, T)] += totals[r]
