"""What both models need on the CPU: the layout of the weights, noise (SPEC 2, 4) and matrix products.

One compiled set of kernels serves every configuration: shapes and switches are values at run time. All matrix products
go through `engine.simd.tile` on weights that are repacked into panels after every update.
"""

from typing import NamedTuple

import numpy as np

from engine import kernel_cache
from engine import simd
from engine.cpu_rules import draw, factor, hash32, i32, input_coefficient, input_fold, input_term, scaled, u32
from engine.simd import PANEL, ROWS, tile

njit, inner = kernel_cache.njit(simd.use), kernel_cache.inner

# columns of Weights.table: one row a parameter and layer
FIELDS = ("weights", "packed", "correction", "seed_a", "seed_b", "overlay_a", "overlay_b", "rows", "cols")
AT_W, AT_P, AT_C, SEED_A, SEED_B, OVER_A, OVER_B, N_ROWS, N_COLS = range(len(FIELDS))
# int64 and not int, because numba compiles a function anew for every literal int among its arguments
i64 = np.int64
# the layer of what is in none, a pair's first member, a model without noise
NO_LAYER = EVEN = CLEAN = i64(0)
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

@inner
def noise(c, seed, i):
    """int32: the noise of SPEC 2."""
    return draw(c.gaussian, hash32(seed, i), c.mask)


@inner
def vote_draw(c, seed, i):
    """int32: the noise as votes count it."""
    n = noise(c, seed, i)
    return n if c.clt else i32(i32(n > 0) - i32(n < 0))


@inner
def fill_noise(c, seed, n, out):
    for i in range(n):
        out[i] = noise(c, seed, i)


@inner
def output_side(c, w, param, layer, S, out):
    """out int32 [cols]: trunc(noise(A, c) * f_col(c))."""
    t = w.table[param, layer]
    seed, at = u32(S + t[SEED_A]), t[OVER_A]
    fill_noise(c, seed, t[N_COLS], out)
    for i in range(t[N_COLS]):
        out[i] = scaled(c.mode, out[i], w.overlay[at + i], seed, i)


@inner
def input_side(c, w, param, layer, S, coefficients, scale):
    """coefficients int32 [rows], scale float32 [rows] of the input side, as `input_term` takes them; scale in mode 2
    only."""
    t = w.table[param, layer]
    seed, at = u32(S + t[SEED_B]), t[OVER_B]
    fill_noise(c, seed, t[N_ROWS], coefficients)
    for i in range(t[N_ROWS]):
        coefficients[i] = input_coefficient(c.mode, coefficients[i], w.overlay[at + i])
    if c.mode == 2:
        for i in range(t[N_ROWS]):
            scale[i] = factor(c.mode, w.overlay[at + i], seed, i)


@inner
def project(c, x, r, coefficients, scale):
    """sb = sum_k trunc(x[r, k] * noise(B, k) * f_row(k)), wrapping int32; x uint8 [rows, K], activation + 128."""
    s = i32(0)
    for i in range(coefficients.size):
        s = i32(s + input_term(c.mode, i32(i32(x[r, i]) - i32(128)), coefficients[i], scale[i]))
    return s


@inner
def project_down(c, x, r, coefficients, scale):
    """The same for a down projection: four inputs i + sub * H share one running integer (SPEC 4)."""
    s, H = i32(0), coefficients.size // 4
    for i in range(H):
        p = i32(0)
        for sub in range(4):
            j = i + sub * H
            p = input_fold(c.mode, p, i32(i32(x[r, j]) - i32(128)), coefficients[j], scale[j])
        s = i32(s + p)
    return s


@inner
def perturbed(c, w, param, layer, S, noisy, out):
    """out int32 [2, width]: a vector parameter as the even and the odd member of a pair see it."""
    t = w.table[param, layer]
    at, over, n = t[AT_W], t[OVER_A], t[N_COLS]
    if not noisy:
        for i in range(n):
            out[0, i] = out[1, i] = w.weights[at + i]
        return
    seed_a, seed_b = u32(S + t[SEED_A]), u32(S + t[SEED_B])
    shift = i32(c.vector_shift)
    for i in range(n):
        p = scaled(c.mode, i32(noise(c, seed_a, i) * noise(c, seed_b, i)), w.overlay[over + i], seed_a, i)
        v = i32(w.weights[at + i])
        out[0, i] = i32(v + i32(p >> shift))
        out[1, i] = i32(v + i32(i32(-p) >> shift))


# --- products (SPEC 4) -----------------------------------------------------------------------------------------------

# Rows are named by array and index: a slice would count references, which costs more than a row of a small model.

@inner
def product(c, w, param, layer, x, rows, out):
    """out int32 [>= rows padded to ROWS, cols padded to PANEL] = x . W; x uint8 [>= padded rows, K]."""
    t = w.table[param, layer]
    k4, panels = t[N_ROWS] // 4, (t[N_COLS] + PANEL - 1) // PANEL
    stride = out.shape[1]
    for p in range(panels):
        for r in range(0, rows, ROWS):
            tile(x, r * t[N_ROWS], t[N_ROWS], w.packed, t[AT_P] + p * k4 * 4 * PANEL, w.correction,
                 t[AT_C] + p * PANEL, 0,
                 out, r * stride + p * PANEL, stride, k4)


@inner
def add_noise(y, r, s, noise, shift):
    """y[r, c] += (sb * noise(A, c) * sign) >> shift; s is sb, already negated for an odd member (a product wraps either
    way alike)."""
    for i in range(noise.size):
        y[r, i] = i32(y[r, i] + i32(i32(s * noise[i]) >> shift))


@inner
def largest(z, r, n):
    """The largest of the first n of row r."""
    top = z[r, 0]
    for v in range(n):
        top = max(top, z[r, v])
    return top
