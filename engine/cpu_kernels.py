"""What both models need on the CPU: the layout of the weights, noise (SPEC 2, 4) and matrix products.

One compiled set of kernels serves every configuration: shapes and switches are values at run time. All matrix products
go through `engine.simd.tile` on weights that are repacked into panels after every update.
"""

from typing import NamedTuple

import numpy as np

from engine import kernel_cache
from engine import simd
from engine.cpu_rules import (draw, f32, factor, hash32, i32, input_coefficient, input_fold, input_term, loss,
                              scaled, shift_right, u32)
from engine.simd import PANEL, ROWS, dot, empty, tile, zeros

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
    ntt: int
    ntt_prime: int
    clt: int
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


@inlined
def fill_noise(c, seed, n, out):
    for i in range(n):
        out[i] = noise(c, seed, i)


@leaf
def output_side(c, w, param, layer, S, noisy, out):
    """out int32 [cols]: trunc(noise(A, c) * f_col(c)); 0 without noise."""
    t = w.table[param, layer]
    seed, at = u32(S + t[SEED_A]), t[OVER_A]
    if not noisy:
        out[:] = 0
        return
    fill_noise(c, seed, t[N_COLS], out)
    if c.mode:
        for i in range(t[N_COLS]):
            out[i] = scaled(c.mode, out[i], w.overlay[at + i], seed, i)


class InputSide(NamedTuple):
    """The noise of a product's inputs, of one or more pairs: noise int8 [pairs, rows]; offset int32 [pairs], 128 times
    its sum; coefficients int32 and scale float32 [pairs, rows] as `input_term` takes them, in modes 1 and 2 only."""
    noise: np.ndarray
    offset: np.ndarray
    coefficients: np.ndarray
    scale: np.ndarray


@inner
def input_side(c, w, param, layer, S, noisy, pairs):
    """The InputSide of a matrix for pair seeds S..; without noise it has no values."""
    t = w.table[param, layer]
    at, n = t[OVER_B], t[N_ROWS]
    scaled_rows = n if c.mode else 0
    side = InputSide(empty((pairs, n), np.int8), zeros(pairs, i32), empty((pairs, scaled_rows), i32),
                     empty((pairs, scaled_rows), f32))
    for q in range(pairs if noisy else 0):
        seed = u32(S + q + t[SEED_B])
        for i in range(n):
            side.noise[q, i] = noise(c, seed, i)
        for i in range(n):
            side.offset[q] += i32(side.noise[q, i]) * i32(128)
        for i in range(scaled_rows):
            side.coefficients[q, i] = input_coefficient(c.mode, i32(side.noise[q, i]), w.overlay[at + i])
        if c.mode == 2:
            for i in range(n):
                side.scale[q, i] = factor(c.mode, w.overlay[at + i], seed, i)
    return side


@inlined
def project(c, x, r, side, q, sign):
    """sign * sb of pair q with sb = sum_k trunc(x[r, k] * noise(B, k) * f_row(k)), wrapping int32; x uint8 [rows, K],
    activation + 128."""
    n = side.noise.shape[1]
    if c.mode == 0:
        return i32(sign * i32(dot(x, r * n, side.noise, q * n, n) - side.offset[q]))
    s = i32(0)
    for i in range(n):
        x_i = i32(i32(x[r, i]) - i32(128))
        s = i32(s + input_term(c.mode, x_i, side.coefficients[q, i], side.scale[q, i]))
    return i32(sign * s)


@inlined
def project_down(c, x, r, side, q, sign):
    """The same for a down projection: four inputs i + sub * H share one running integer (SPEC 4)."""
    if c.mode == 0:
        return project(c, x, r, side, q, sign)
    s, H = i32(0), side.noise.shape[1] // 4
    for i in range(H):
        p = i32(0)
        for sub in range(4):
            j = i + sub * H
            x_j = i32(i32(x[r, j]) - i32(128))
            p = input_fold(c.mode, p, x_j, side.coefficients[q, j], side.scale[q, j])
        s = i32(s + p)
    return i32(sign * s)


@leaf
def perturbed(c, w, param, layer, S, noisy, out):
    """out int32 [2, width]: a vector parameter as the even and the odd member of a pair see it."""
    t = w.table[param, layer]
    at, over, n = t[AT_W], t[OVER_A], t[N_COLS]
    seed_a, seed_b = u32(S + t[SEED_A]), u32(S + t[SEED_B])
    shift = i32(c.vector_shift)
    for i in range(n):
        out[0, i] = i32(noise(c, seed_a, i) * noise(c, seed_b, i)) if noisy else i32(0)
    if noisy and c.mode:
        for i in range(n):
            out[0, i] = scaled(c.mode, out[0, i], w.overlay[over + i], seed_a, i)
    for i in range(n):
        v, p = i32(w.weights[at + i]), out[0, i]
        out[0, i] = i32(v + shift_right(p, shift))
        out[1, i] = i32(v + shift_right(i32(-p), shift))


# --- products (SPEC 4) -----------------------------------------------------------------------------------------------

# Rows are named by array and index: a slice would count references, which costs more than a row of a small model.

@leaf
def product(w, param, layer, x, rows, out):
    """out int32 [>= rows padded to ROWS, cols padded to PANEL] = x . W; x uint8 [>= padded rows, K]."""
    t = w.table[param, layer]
    k4, panels = t[N_ROWS] // 4, (t[N_COLS] + PANEL - 1) // PANEL
    stride = out.shape[1]
    for p in range(panels):
        for r in range(0, rows, ROWS):
            tile(x, r * t[N_ROWS], t[N_ROWS], w.packed, t[AT_P] + p * k4 * 4 * PANEL, w.correction,
                 t[AT_C] + p * PANEL, 0,
                 out, r * stride + p * PANEL, stride, k4)


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
def largest(z, r, n):
    """The largest of the first n of row r."""
    top = z[r, 0]
    for v in range(n):
        top = max(top, z[r, v])
    return top


@leaf
def add_losses(c, totals, tops, targets, first, count, n, losses, pair):
    """Adds the losses of `count` rows of a pair, from its row `first` on, to losses int64 [pairs, 2]. totals int64: the
    sums of exponentials, which are overwritten; tops, targets int32: the largest logits and those of the targets; n:
    rows a member."""
    for r in range(count):
        totals[r] = loss(c.exact, totals[r], tops[r], targets[r], c.scale_bit, c.log_unit)
    for r in range(count):
        losses[pair, member(first + r, n)] += totals[r]
