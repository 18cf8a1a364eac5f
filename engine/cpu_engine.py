"""The CPU engine: evaluation, update, validation and generation in numba, bit for bit as in the SPEC. Here are the transformer and what
every model needs; the recurrent model is in `engine.cpu_gru`.

One compiled set of kernels serves every configuration (shapes and switches are run-time values), so it is compiled once a machine.
Work is parallel over antithetic pairs; a pair's activations stay in a core's caches, and all matrix products go through
`engine.simd.tile` on weights repacked into panels after every update.
"""

import concurrent.futures
import functools
import time
from typing import NamedTuple

import numba
import numpy as np

import egg_config
from model import state_digest
from engine import hardware
from engine import kernel_cache
from model import parameters
from model import transforms
from engine import simd
from engine.simd import PANEL, ROWS, chain_tile, exp_sum, look_up_bytes, tile


njit = kernel_cache.njit(simd.use)
i32, u32, f32, f64 = np.int32, np.uint32, np.float32, np.float64

# columns of Weights.table: one row a parameter and layer
FIELDS = ("weights", "packed", "correction", "seed_a", "seed_b", "overlay_a", "overlay_b", "rows", "cols")
AT_W, AT_P, AT_C, SEED_A, SEED_B, OVER_A, OVER_B, N_ROWS, N_COLS = range(len(FIELDS))
(EMBEDDING, EMB_BIAS, NTT_1, NTT_2, NTT_3, LN_INIT, LN_INIT_BIAS, W_EMB_UP, EMB_BIAS_UP, W_EMB_DOWN, EMB_BIAS_DOWN,
 LN_1, LN_1_BIAS, W_Q, W_K, W_V, W_O, LN_2, LN_2_BIAS, W_UP, BIAS_UP, W_DOWN, BIAS_DOWN, LN_F, LN_F_BIAS) = range(len(parameters.TABLE))

SGD, MUON, ZTEST, MUON_PARTS, MUON_EPS = parameters.SGD, parameters.MUON, parameters.ZTEST, parameters.MUON_PARTS, parameters.MUON_EPS
WORTH_A_THREAD = 100_000     # elementary operations, roughly 100 us, below which handing work to a thread costs more than it saves
SUMMED = 1 << 16            # positions whose values, times byte limbs of their weights, fit an int32 sum
GROUP = 32                  # rows that pass through an MLP or the head together: their int32 results fit the second-level cache


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
    """weights int8 canonical; packed int8 panels [k4, PANEL, 4]; correction int32: -128 times each column's sum, because activations
    go into products as x + 128; tokens int8 [V, H], the embedding a token a row; overlay int8; table int64 [parameters, layers, FIELDS]."""
    weights: np.ndarray
    tokens: np.ndarray
    packed: np.ndarray
    correction: np.ndarray
    overlay: np.ndarray
    table: np.ndarray


class Tables(NamedTuple):
    """exp int32 [256], gelu uint8 [256] (byte of x to byte of GELU + 128), rope int64 [positions, D / 2, 2], ntt int64 [T, T]
    (model.transforms.basis; empty without NTT_MODE)."""
    exp: np.ndarray
    gelu: np.ndarray
    rope: np.ndarray
    ntt: np.ndarray


# --- random numbers and noise (SPEC 2, 4) ----------------------------------------------------------------------------------

@njit
def hash_(seed, index):
    x = u32(u32(seed) + u32(u32(index) * u32(0x9E3779B9)))
    x = u32(x ^ u32(x >> u32(16)))
    x = u32(x * u32(0x85EBCA6B))
    x = u32(x ^ u32(x >> u32(13)))
    x = u32(x * u32(0xC2B2AE35))
    return u32(x ^ u32(x >> u32(16)))


@njit
def draw(r, mask, gaussian):
    """int32 noise of SPEC 2 from one hash."""
    m = u32(mask)
    n = i32(u32(r >> u32(1)) & m)
    n = n if r & u32(1) else i32(-n)
    if gaussian:
        a, b = i32(u32(r >> u32(6)) & m), i32(u32(r >> u32(11)) & m)
        n = i32(n + (a if u32(r >> u32(5)) & u32(1) else i32(-a)))
        n = i32(n + (b if u32(r >> u32(10)) & u32(1) else i32(-b)))
    return n


@njit
def to_int(f):
    """trunc of a float32, saturating at int32."""
    inside = i32(max(f32(-2147483648.0), min(f32(2147483520.0), f)))
    return inside if f < f32(2147483648.0) else i32(2147483647)


@njit
def sixty_fourths(p):
    """trunc(p / 64) of an int32."""
    return i32(i32(p + i32(i32(p >> i32(31)) & i32(63))) >> i32(6))


@njit
def weight_64(c, overlay):
    """The noise-scale factor of modes 0 and 1 in 64ths, int32."""
    if c.mode == 0:
        return i32(64)
    return i32(max(i32(0), min(i32(64), i32(overlay))))


@njit
def factor(c, overlay, seed, index):
    """The noise-scale factor of SPEC 4, float32."""
    if c.mode < 2:
        return f32(f32(weight_64(c, overlay)) / f32(64))
    tail = f32(f32(f32(hash_(u32(seed) + u32(100000), index)) + f32(1)) / f32(4294967296.0))
    return f32(f32(f32(i32(overlay) + 127) / f32(255)) / f32(np.sqrt(tail)))


@njit
def vote_draw(c, r):
    """The draw as votes count it."""
    n = draw(r, c.mask, c.gaussian)
    return n if c.clt else i32(i32(n > 0) - i32(n < 0))


@njit
def fill_noise(c, seed, n, out):
    for i in range(n):
        out[i] = draw(hash_(seed, i), c.mask, c.gaussian)


@njit
def output_side(c, w, param, layer, S, out):
    """out int32 [cols]: trunc(noise(A, c) * f_col(c))."""
    t = w.table[param, layer]
    seed, at = u32(S + t[SEED_A]), t[OVER_A]
    fill_noise(c, seed, t[N_COLS], out)
    if c.mode == 1:
        for i in range(t[N_COLS]):
            out[i] = sixty_fourths(i32(out[i] * weight_64(c, w.overlay[at + i])))
    elif c.mode == 2:
        for i in range(t[N_COLS]):
            out[i] = to_int(f32(out[i]) * factor(c, w.overlay[at + i], seed, i))


@njit
def input_side(c, w, param, layer, S, noise, scale):
    """noise int32 [rows], scale float32 [rows] of the input side; modes 0 and 1: noise in 64ths, scale unused."""
    t = w.table[param, layer]
    seed, at = u32(S + t[SEED_B]), t[OVER_B]
    fill_noise(c, seed, t[N_ROWS], noise)
    if c.mode < 2:
        for i in range(t[N_ROWS]):
            noise[i] = i32(noise[i] * weight_64(c, w.overlay[at + i]))
    else:
        for i in range(t[N_ROWS]):
            scale[i] = factor(c, w.overlay[at + i], seed, i)


@njit
def project(c, x, r, noise, scale):
    """sb = sum_k trunc(x[r, k] * noise(B, k) * f_row(k)), wrapping int32; x uint8 [rows, K], activation + 128."""
    s = i32(0)
    if c.mode < 2:
        for i in range(noise.size):
            s = i32(s + sixty_fourths(i32(i32(i32(x[r, i]) - i32(128)) * noise[i])))
    else:
        for i in range(noise.size):
            s = i32(s + to_int(f32(f32(i32(i32(x[r, i]) - i32(128)) * noise[i]) * scale[i])))
    return s


@njit
def project_down(c, x, r, noise, scale):
    """The same for a down projection: four inputs i + sub * H share one running integer (SPEC 4)."""
    s, H = i32(0), noise.size // 4
    if c.mode < 2:
        for i in range(H):
            p = i32(0)
            for sub in range(4):
                j = i + sub * H
                p = sixty_fourths(i32(i32(p * i32(64)) + i32(i32(i32(x[r, j]) - i32(128)) * noise[j])))
            s = i32(s + p)
    else:
        for i in range(H):
            p = i32(0)
            for sub in range(4):
                j = i + sub * H
                p = to_int(fma(f32(i32(i32(x[r, j]) - i32(128)) * noise[j]), scale[j], f32(p)))
            s = i32(s + p)
    return s


@njit
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
        p = i32(draw(hash_(seed_a, i), c.mask, c.gaussian) * draw(hash_(seed_b, i), c.mask, c.gaussian))
        if c.mode == 1:
            p = sixty_fourths(i32(p * weight_64(c, w.overlay[over + i])))
        elif c.mode == 2:
            p = to_int(f32(f32(p) * factor(c, w.overlay[over + i], seed_a, i)))
        v = i32(w.weights[at + i])
        out[0, i] = i32(v + i32(p >> shift))
        out[1, i] = i32(v + i32(i32(-p) >> shift))


# --- building blocks of the forward pass (SPEC 5, 7) -----------------------------------------------------------------------

@njit
def clip(x):
    return max(i32(-127), min(i32(127), x))


# Rows are named by array and index: a slice would count references, which costs more than a row of a small model.

@njit
def layer_norm(h, r, weight, bias, m, x, o):
    """x[o] uint8 = ln(h[r]) + 128 with the weights and biases of member m."""
    n, total = h.shape[1], i32(0)
    for i in range(n):
        total = i32(total + abs(i32(h[r, i])))
    reciprocal = 1.0 / max(1, total // n)
    for i in range(n):
        p = i32(i32(h[r, i]) * weight[m, i])
        # half a unit off the integers, the product by the reciprocal truncates exactly like the division
        q = i32((abs(f64(p)) + 0.5) * reciprocal)
        x[o, i] = np.uint8(clip(i32((q if p >= 0 else i32(-q)) + bias[m, i])) + i32(128))


@njit
def amax(v, r, out, o):
    """out[o] int8 = amax of v[r] int32 (SPEC 5)."""
    n, top = out.shape[1], i32(0)
    for i in range(n):
        top = max(top, abs(v[r, i]))
    scale = f32(f32(127) / f32(f32(top) + f32(1e-9)))
    for i in range(n):
        twice = i32(f32(f32(v[r, i]) * f32(scale + scale)))          # exactly twice: its truncation shows which side of a half
        out[o, i] = i32(i32(twice + i32(1) + i32(twice >> i32(31))) >> i32(1))


@njit
def product(c, w, param, layer, x, rows, out):
    """out int32 [>= rows padded to ROWS, cols padded to PANEL] = x . W; x uint8 [>= padded rows, K]."""
    t = w.table[param, layer]
    k4, panels = t[N_ROWS] // 4, (t[N_COLS] + PANEL - 1) // PANEL
    stride = out.shape[1]
    for p in range(panels):
        for r in range(0, rows, ROWS):
            tile(x, r * t[N_ROWS], t[N_ROWS], w.packed, t[AT_P] + p * k4 * 4 * PANEL, w.correction, t[AT_C] + p * PANEL, 0,
                 out, r * stride + p * PANEL, stride, k4)


@njit
def add_noise(y, r, s, noise, shift):
    """y[r, c] += (sb * noise(A, c) * sign) >> shift; s is sb, already negated for an odd member (a product wraps either way alike)."""
    for i in range(noise.size):
        y[r, i] = i32(y[r, i] + i32(i32(s * noise[i]) >> shift))


@njit
def add_residual(h, r, y, o, shift, bias, m):
    """y[o] = h[r] + (y[o] >> shift) + the bias of member m."""
    for i in range(h.shape[1]):
        y[o, i] = i32(i32(i32(h[r, i]) + i32(y[o, i] >> shift)) + bias[m, i])


@njit
def mlp(c, w, tb, up, bias_up, down, bias_down, ln, ln_bias, layer, S, noisy, rows, per_member, h):
    """h = amax(h + MLP(ln(h))) for all rows, in place: items 2 and the second half of 3 of SPEC 7."""
    H = c.H
    norm_w, norm_b = np.empty((2, H), i32), np.empty((2, H), i32)
    b_up, b_down = np.empty((2, 4 * H), i32), np.empty((2, H), i32)
    perturbed(c, w, ln, layer, S, noisy, norm_w)
    perturbed(c, w, ln_bias, layer, S, noisy, norm_b)
    perturbed(c, w, bias_up, layer, S, noisy, b_up)
    perturbed(c, w, bias_down, layer, S, noisy, b_down)
    up_a, up_b, up_s = np.empty(4 * H, i32), np.empty(H, i32), np.empty(H, f32)
    down_a, down_b, down_s = np.empty(H, i32), np.empty(4 * H, i32), np.empty(4 * H, f32)
    if noisy:
        output_side(c, w, up, layer, S, up_a)
        input_side(c, w, up, layer, S, up_b, up_s)
        output_side(c, w, down, layer, S, down_a)
        input_side(c, w, down, layer, S, down_b, down_s)
    shift, shift_up, shift_down = i32(c.matrix_shift), i32(c.up), i32(c.down)
    x, u = np.empty((GROUP, H), np.uint8), np.empty((GROUP, 4 * H), np.uint8)
    wide, y = np.empty((GROUP, 4 * H), i32), np.empty((GROUP, H), i32)
    for first in range(0, rows, GROUP):
        count = min(GROUP, rows - first)
        for r in range(count):
            layer_norm(h, first + r, norm_w, norm_b, ((first + r) // per_member) & 1, x, r)
        product(c, w, up, layer, x, count, wide)
        for r in range(count):
            m = ((first + r) // per_member) & 1
            if noisy:
                s = project(c, x, r, up_b, up_s)
                add_noise(wide, r, i32(-s) if m else s, up_a, shift)
            for i in range(4 * H):
                u[r, i] = np.uint8(clip(i32(i32(wide[r, i] >> shift_up) + b_up[m, i])))
            look_up_bytes(tb.gelu, u, r * 4 * H, u, r * 4 * H, 4 * H)
        product(c, w, down, layer, u, count, y)
        for r in range(count):
            m = ((first + r) // per_member) & 1
            if noisy:
                s = project_down(c, u, r, down_b, down_s)
                add_noise(y, r, i32(-s) if m else s, down_a, shift)
            add_residual(h, first + r, y, r, shift_down, b_down, m)
            amax(y, r, h, first + r)


@njit
def rotate(y, r, rope, t, D, bit):
    """Rotary embedding of row r of int32 y at position t, in place; rope int64 [positions, D / 2, 2]."""
    half = np.int64(1) << (bit - 1)
    for base in range(0, y.shape[1], D):
        for i in range(D // 2):
            e, o = np.int64(y[r, base + 2 * i]), np.int64(y[r, base + 2 * i + 1])
            cos, sin = rope[t, i, 0], rope[t, i, 1]
            y[r, base + 2 * i] = i32((e * cos - o * sin + half) >> bit)
            y[r, base + 2 * i + 1] = i32((e * sin + o * cos + half) >> bit)


@njit
def attend(c, tb, q, keys, values, cache_row, first_row, start, n, a):
    """Causal attention of one member: queries q int8 [rows, H] from first_row on stand at positions start..start + n - 1; its keys and
    values int8 [rows, H] begin at cache_row; a uint8 [rows, H] (+ 128) is filled.

    Scores are products with the packed keys; the weights (up to 19 bits) times the values are three exact products of byte limbs."""
    D = c.D
    context = start + n
    columns = (context + PANEL - 1) // PANEL * PANEL
    packed_k, packed_v = np.zeros(columns * D, np.int8), np.zeros(columns * D, np.int8)
    correction = np.zeros(columns, i32)
    nothing = np.zeros(PANEL, i32)
    scores = np.empty((ROWS, columns), i32)
    limbs = np.zeros((3, ROWS, columns), np.uint8)
    sums, weighted = np.empty((3, ROWS, D), i32), np.empty((ROWS, D), f64)
    weights = np.empty(columns, i32)
    query = np.zeros((ROWS, D), np.uint8)
    totals = np.empty(ROWS, np.int64)
    shift = i32(c.attn)
    for head in range(c.heads):
        base = head * D
        for p in range(context):
            s = i32(0)
            at = (p // PANEL) * (D * PANEL) + (p % PANEL) * 4
            for d in range(D):
                k = keys[cache_row + p, base + d]
                s = i32(s + i32(k))
                packed_k[at + (d >> 2) * (4 * PANEL) + (d & 3)] = k
            correction[p] = i32(-128 * s)
            at = (p >> 2) * (4 * PANEL) + (p & 3)
            for d in range(D):
                packed_v[(d // PANEL) * (columns * PANEL) + at + (d % PANEL) * 4] = values[cache_row + p, base + d]
        for block in range(0, n, ROWS):
            count = min(ROWS, n - block)
            reach = start + block + count                      # positions the last row of the block sees
            for r in range(count):
                for d in range(D):
                    query[r, d] = np.uint8(i32(q[first_row + block + r, base + d]) + i32(128))
            for p in range((reach + PANEL - 1) // PANEL):
                tile(query, 0, D, packed_k, p * D * PANEL, correction, p * PANEL, 0, scores, p * PANEL, columns, D // 4)
            wide = (reach + 3) // 4 * 4
            for r in range(count):
                seen = start + block + r + 1
                top = scores[r, 0]
                for p in range(1, seen):
                    top = max(top, scores[r, p])
                top = i32(top >> shift)
                total = np.int64(0)
                for p in range(seen):
                    e = tb.exp[min(i32(255), i32(top - i32(scores[r, p] >> shift)))]
                    weights[p] = e
                    total += e
                for p in range(seen, wide):
                    weights[p] = 0
                totals[r] = total
                for p in range(wide):
                    limbs[0, r, p] = np.uint8(weights[p] & i32(255))
                    limbs[1, r, p] = np.uint8(i32(weights[p] >> i32(8)) & i32(255))
                    limbs[2, r, p] = np.uint8(weights[p] >> i32(16))
            for first in range(0, wide, SUMMED):
                k4 = min(SUMMED, wide - first) // 4
                for limb in range(3):
                    for p in range(D // PANEL):
                        tile(limbs, limb * ROWS * columns + first, columns, packed_v, (p * columns + first) * PANEL, nothing, 0, 0,
                             sums, limb * ROWS * D + p * PANEL, D, k4)
                for r in range(count):
                    for d in range(D):
                        part = f64(sums[0, r, d]) + f64(sums[1, r, d]) * 256.0 + f64(sums[2, r, d]) * 65536.0
                        weighted[r, d] = part + (weighted[r, d] if first else 0.0)       # exact: below 2^53 for 2^28 positions
            for r in range(count):
                total_weight = f64(totals[r])
                for d in range(D):
                    a[first_row + block + r, base + d] = np.uint8(clip(i32(weighted[r, d] / total_weight)) + i32(128))


@njit
def attention(c, w, tb, layer, S, noisy, members, n, start, h, keys, values):
    """h = amax(h + attention block(h)) in place. keys, values int8 [members * positions, H] are the cache, where this call's are put at
    positions start..start + n - 1 of each member."""
    H, rows, context = c.H, members * n, keys.shape[0] // members
    padded = (rows + ROWS - 1) // ROWS * ROWS
    norm_w, norm_b = np.empty((2, H), i32), np.empty((2, H), i32)
    perturbed(c, w, LN_1, layer, S, noisy, norm_w)
    perturbed(c, w, LN_1_BIAS, layer, S, noisy, norm_b)
    x, q, a = np.zeros((padded, H), np.uint8), np.empty((rows, H), np.int8), np.zeros((padded, H), np.uint8)
    y = np.empty((padded, H), i32)
    side_a, side_b, side_s = np.empty(H, i32), np.empty(H, i32), np.empty(H, f32)
    shift = i32(c.matrix_shift)
    for r in range(rows):
        layer_norm(h, r, norm_w, norm_b, (r // n) & 1, x, r)
    for which in range(3):
        param = W_Q + which
        product(c, w, param, layer, x, rows, y)
        if noisy:
            output_side(c, w, param, layer, S, side_a)
            input_side(c, w, param, layer, S, side_b, side_s)
        for r in range(rows):
            m, position = r // n, start + r % n
            if noisy:
                s = project(c, x, r, side_b, side_s)
                add_noise(y, r, i32(-s) if m & 1 else s, side_a, shift)
            if which < 2:
                rotate(y, r, tb.rope, position, c.D, c.rope_bit)
            if which == 0:
                amax(y, r, q, r)
            elif which == 1:
                amax(y, r, keys, m * context + position)
            else:
                amax(y, r, values, m * context + position)
    for m in range(members):
        attend(c, tb, q, keys, values, m * context, m * n, start, n, a)
    product(c, w, W_O, layer, a, rows, y)
    if noisy:
        output_side(c, w, W_O, layer, S, side_a)
        input_side(c, w, W_O, layer, S, side_b, side_s)
    zero, shift_out = np.zeros((1, H), i32), i32(c.out)
    for r in range(rows):
        if noisy:
            s = project(c, a, r, side_b, side_s)
            add_noise(y, r, i32(-s) if (r // n) & 1 else s, side_a, shift)
        add_residual(h, r, y, r, shift_out, zero, 0)
        amax(y, r, h, r)


@njit
def coefficient(c, tb, tokens, sequence, position):
    """int64: the transform's coefficient at a position (model.transforms)."""
    T, total = tb.ntt.shape[0], np.int64(0)
    t = position % T
    for i in range(min(T, tokens.shape[1] - (position - t))):
        total += np.int64(tokens[sequence, position - t + i]) * tb.ntt[t, i]
    return total % c.ntt_prime if c.ntt_prime else total


@njit
def look_up_coefficients(c, w, S, noisy, coefficients, n, out):
    """out int32 [rows, H]: what the tables of bytes add to the embedding; coefficients int64 [rows], n rows a member."""
    H, shift = c.H, i32(c.matrix_shift)
    noise, scale = np.empty(H, i32), np.empty(H, f32)
    out[:] = 0
    for k in range(3):
        t = w.table[NTT_1 + k, 0]
        seed_a, seed_b = u32(S + t[SEED_A]), u32(S + t[SEED_B])
        fill_noise(c, seed_b, H, noise)
        for i in range(H):
            scale[i] = factor(c, w.overlay[t[OVER_B] + i], seed_b, i)
        for r in range(out.shape[0]):
            sign = i32(1 - 2 * ((r // n) & 1))
            byte = (coefficients[r] >> (8 * k + 8)) & 255
            own, own_scale = draw(hash_(seed_a, byte), c.mask, c.gaussian), factor(c, w.overlay[t[OVER_A] + byte], seed_a, byte)
            for i in range(H):
                e = i32(w.weights[t[AT_W] + (i >> 2) * (4 * t[N_COLS]) + byte * 4 + (i & 3)])
                if noisy:
                    p = to_int(f32(f32(f32(i32(own * noise[i])) * own_scale) * scale[i]))
                    e = i32(e + i32(i32(p * sign) >> shift))
                out[r, i] = i32(out[r, i] + i32(e >> i32(2)))


@njit
def embed(c, w, tb, S, noisy, tokens, n, start, rows, h):
    """h int8 [rows, H]: item 1 of SPEC 7. tokens int32 [sequences, >= start + n]; row r is position start + r % n of sequence
    min(r // n, last)."""
    H, last = c.H, tokens.shape[0] - 1
    t = w.table[EMBEDDING, 0]
    bias = np.empty((2, H), i32)
    perturbed(c, w, EMB_BIAS, 0, S, noisy, bias)
    seed_a, seed_b = u32(S + t[SEED_A]), u32(S + t[SEED_B])
    noise, scale = np.empty(H, i32), np.empty(H, f32)
    fill_noise(c, seed_b, H, noise)
    for i in range(H):
        scale[i] = factor(c, w.overlay[t[OVER_B] + i], seed_b, i)
    shift = i32(c.matrix_shift)
    more = np.zeros((rows if c.ntt else 1, H), i32)             # one row of zeros serves all without NTT_MODE
    if c.ntt:
        coefficients = np.empty(rows, np.int64)
        for r in range(rows):
            coefficients[r] = coefficient(c, tb, tokens, min(r // n, last), start + r % n)
        look_up_coefficients(c, w, S, noisy, coefficients, n, more)
    for r in range(rows):
        m = (r // n) & 1
        sign, at = i32(1 - 2 * m), r if c.ntt else 0
        k = tokens[min(r // n, last), start + r % n]
        own = draw(hash_(seed_a, k), c.mask, c.gaussian)
        own_scale = factor(c, w.overlay[t[OVER_A] + k], seed_a, k)
        if noisy:
            for i in range(H):
                p = to_int(f32(f32(f32(i32(own * noise[i])) * own_scale) * scale[i]))
                h[r, i] = clip(i32(i32(i32(i32(w.tokens[k, i]) + i32(i32(p * sign) >> shift)) + bias[m, i]) + more[at, i]))
        else:
            for i in range(H):
                h[r, i] = clip(i32(i32(i32(w.tokens[k, i]) + bias[m, i]) + more[at, i]))


@njit
def hidden(c, w, tb, S, noisy, tokens, members, n, start, keys, values, x):
    """x uint8 [>= members * n, H]: ln_f of the last hidden state (+ 128) of every row (items 1 to 4 of SPEC 7).

    tokens int32 [sequences, >= start + n]; keys, values int8 [1 or L, members * positions, H]: the caches; one layer's worth is enough where
    nothing follows."""
    rows, H = members * n, c.H
    h = np.empty((rows, H), np.int8)
    embed(c, w, tb, S, noisy, tokens, n, start, rows, h)
    mlp(c, w, tb, W_EMB_UP, EMB_BIAS_UP, W_EMB_DOWN, EMB_BIAS_DOWN, LN_INIT, LN_INIT_BIAS, 0, S, noisy, rows, n, h)
    for layer in range(c.L):
        slot = layer % keys.shape[0]
        attention(c, w, tb, layer, S, noisy, members, n, start, h, keys[slot], values[slot])
        mlp(c, w, tb, W_UP, BIAS_UP, W_DOWN, BIAS_DOWN, LN_2, LN_2_BIAS, layer, S, noisy, rows, n, h)
    norm_w, norm_b = np.empty((2, H), i32), np.empty((2, H), i32)
    perturbed(c, w, LN_F, 0, S, noisy, norm_w)
    perturbed(c, w, LN_F_BIAS, 0, S, noisy, norm_b)
    for r in range(rows):
        layer_norm(h, r, norm_w, norm_b, (r // n) & 1, x, r)


@njit
def logits(c, w, noisy, side_a, side_b, side_s, T, first, x, count, z):
    """z int32 [>= count, V padded]: logits (item 4 of SPEC 7) of `count` rows of x, the first of which is row `first` of a pair of T
    positions a member."""
    product(c, w, EMBEDDING, 0, x, count, z)
    shift, shift_logit = i32(c.matrix_shift), i32(c.logit)
    for r in range(count):
        if noisy:
            s = project(c, x, r, side_b, side_s)
            s = i32(-s) if (first + r) // T else s
            for v in range(c.V):
                z[r, v] = i32(i32(z[r, v] + i32(i32(s * side_a[v]) >> shift)) >> shift_logit)
        else:
            for v in range(c.V):
                z[r, v] = i32(z[r, v] >> shift_logit)


@njit
def log2_floor(q):
    e = np.int64(0)
    while q > 1:
        q >>= 1
        e += 1
    return e


@njit
def log2_fixed(q):
    """log2 of a positive int64 with 16 fractional bits, by squaring a 32-bit mantissa; integers only, so the same everywhere."""
    e = log2_floor(q)
    m = np.uint64(q) << np.uint64(31 - e) if e <= 31 else np.uint64(q) >> np.uint64(e - 31)
    fraction = np.int64(0)
    for _ in range(16):
        m = (m * m) >> np.uint64(31)
        bit = m >> np.uint64(32)
        m >>= bit
        fraction = 2 * fraction + np.int64(bit)
    return (e << 16) + fraction


@njit
def position_loss(c, q, top, target):
    """Loss of one position (SPEC 7.5, or true cross-entropy in 1/256 logit units) from Q, the largest logit and the target's."""
    if c.exact:
        return (((log2_fixed(q) - (c.scale_bit << 16)) * c.log_unit) >> 32) + (np.int64(top) - np.int64(target)) * 256
    return (((log2_floor(q) - c.scale_bit) * 16) >> 1) + np.int64(top) - np.int64(target)


@njit
def largest(row, n):
    top = row[0]
    for v in range(n):
        top = max(top, row[v])
    return top


@njit
def run_windows(c, w, tb, windows, S, noisy, exp64, unit, losses, nats):
    """Evaluates windows int32 [n, T + 1] one after the other. noisy: window i is read by the two members of pair seed S + i, whose losses
    go into losses int64 [n, 2]; else by the unperturbed model, and nats float64 [n] gets the summed cross-entropy of
    softmax(logits * unit), with exp64[d] = exp(-d * unit)."""
    T, H, V = windows.shape[1] - 1, c.H, c.V
    members = 2 if noisy else 1
    columns = (V + PANEL - 1) // PANEL * PANEL
    keys, values = np.empty((1, members * T, H), np.int8), np.empty((1, members * T, H), np.int8)
    x = np.empty((members * T, H), np.uint8)
    side_a, side_b, side_s = np.empty(V, i32), np.empty(H, i32), np.empty(H, f32)
    z = np.empty((GROUP, columns), i32)
    for i in range(windows.shape[0]):
        tokens, seed = windows[i:i + 1], u32(S + i)
        hidden(c, w, tb, seed, noisy, tokens, members, T, 0, keys, values, x)
        if noisy:
            output_side(c, w, EMBEDDING, 0, seed, side_a)
            input_side(c, w, EMBEDDING, 0, seed, side_b, side_s)
        for first in range(0, members * T, GROUP):
            count = min(GROUP, members * T - first)
            logits(c, w, noisy, side_a, side_b, side_s, T, first, x[first:first + count], count, z)
            for r in range(count):
                top, target = z[r, 0], z[r, tokens[0, (first + r) % T + 1]]
                for v in range(V):
                    top = max(top, z[r, v])
                if noisy:
                    losses[i, (first + r) // T] += position_loss(c, exp_sum(tb.exp, c.short_exp, top, z, r * columns, V), top, target)
                else:
                    q = 0.0
                    for v in range(V):
                        q += exp64[min(exp64.size - 1, top - z[r, v])]
                    nats[i] += np.log(q) + (top - target) * unit


@njit
def choose_token(c, exp, z, seen, penalty, temp, floor, random):
    """The token drawn from logits z int32 [V] (SPEC 10; presence penalty once a token seen, as section 11 asks): seen uint8 [V];
    exp int32 [256]; penalty float32 in logit units; floor int64: smallest d kept; random uint32."""
    V = c.V
    scores = np.empty(V, f32)
    best = 0
    for v in range(V):
        scores[v] = f32(f32(z[v]) - penalty) if seen[v] else f32(z[v])
        if scores[v] > scores[best]:
            best = v
    if temp == f32(0):
        return best
    top = scores[best]
    total = np.int64(0)
    weights = np.empty(V, i32)
    for v in range(V):
        d = np.int64(to_int(f32(f32(scores[v] - top) / temp)))
        weights[v] = exp[min(255, -d)] if d >= floor else 0
        total += weights[v]
    threshold = np.int64(random) % total
    running = np.int64(0)
    for lane in range(c.H):
        for v in range(lane, V, c.H):
            running += weights[v]
            if running > threshold:
                return v
    return best


# --- update (SPEC 9) -------------------------------------------------------------------------------------------------------

@numba.extending.intrinsic
def fma(ctx, a, b, c):
    """a * b + c of float32, rounded once."""
    from llvmlite import ir
    t = numba.types.float32

    def codegen(context, builder, sig, args):
        f = builder.module.declare_intrinsic("llvm.fma", [ir.FloatType()], ir.FunctionType(ir.FloatType(), [ir.FloatType()] * 3))
        return builder.call(f, args)
    return t(t, t, t), codegen


@njit
def pack(w, t, first, end):
    """Copy panels first..end - 1 of one matrix (t int64 [FIELDS]) from the canonical weights, with each column's correction."""
    k4, cols = t[N_ROWS] // 4, t[N_COLS]
    for p in range(first, end):
        count = min(PANEL, cols - p * PANEL)
        sums = np.zeros(PANEL, i32)
        for k in range(k4):
            source, target = t[AT_W] + (k * cols + p * PANEL) * 4, t[AT_P] + (p * k4 + k) * PANEL * 4
            for j in range(4 * count):
                value = w.weights[source + j]
                w.packed[target + j] = value
                sums[j >> 2] += i32(value)
        for j in range(PANEL):
            w.correction[t[AT_C] + p * PANEL + j] = i32(-128 * sums[j])


BLOCK = 2048                # pairs whose noise is made at once for a product over the population


@njit
def input_block(c, t, seeds, signs, x, first, end):
    """x uint8 [rows padded, pairs padded to 4], rows first..end - 1: sign * noise(B, row) + 128 of a block of pairs."""
    n = seeds.size
    for r in range(first, end):
        for q in range(n):
            x[r, q] = np.uint8(i32(vote_draw(c, hash_(u32(seeds[q] + u32(t[SEED_B])), r)) * signs[q]) + i32(128))
        for q in range(n, x.shape[1]):
            x[r, q] = 128


@njit
def panel_votes(c, t, seeds, x, votes, first, end):
    """Adds a block of pairs to panels first..end - 1 of votes int32 [rows padded to ROWS, cols padded to PANEL]: x times noise(A, col),
    made here."""
    n, k4, padded = seeds.size, x.shape[1] // 4, votes.shape[1]
    panel, correction, noise = np.zeros(4 * k4 * PANEL, np.int8), np.zeros(PANEL, i32), np.empty(n, i32)
    for p in range(first, end):
        for j in range(min(PANEL, t[N_COLS] - p * PANEL)):
            s = i32(0)
            for q in range(n):
                noise[q] = vote_draw(c, hash_(u32(seeds[q] + u32(t[SEED_A])), p * PANEL + j))
                s = i32(s + noise[q])
            for q in range(n):
                panel[(q >> 2) * (4 * PANEL) + 4 * j + (q & 3)] = noise[q]
            correction[j] = i32(-128 * s)
        for r in range(0, votes.shape[0], ROWS):
            at = r * padded + p * PANEL
            for k in range(ROWS):
                for j in range(PANEL):
                    votes[r + k, p * PANEL + j] = i32(votes[r + k, p * PANEL + j] + correction[j])
            tile(x, r * 4 * k4, 4 * k4, panel, 0, votes, at, padded, votes, at, padded, k4)


@njit
def vector_votes(c, t, seeds, signs, votes, first, end):
    """votes int32 [width] from first to end - 1: sum over pairs of sign * noise(first stream, i) * noise(second stream, i)."""
    for i in range(first, end):
        s = i32(0)
        for q in range(seeds.size):
            a = vote_draw(c, hash_(u32(seeds[q] + u32(t[SEED_A])), i))
            b = vote_draw(c, hash_(u32(seeds[q] + u32(t[SEED_B])), i))
            s = i32(s + i32(i32(a * b) * signs[q]))
        votes[i] = s


@njit
def muon_start(o, t, votes, moments, x):
    """Muon's momentum after votes int32 [rows, cols], and x float32 [shorter side, longer side]: the momentum of norm 1."""
    rows, cols = t[N_ROWS], t[N_COLS]
    sums = np.zeros(MUON_PARTS, f32)
    for i in range(x.shape[0]):
        for j in range(x.shape[1]):
            r, c = (i, j) if rows <= cols else (j, i)
            at = t[AT_W] + ((r >> 2) * cols + c) * 4 + (r & 3)
            m = fma(moments[at, 0], o.momentum, f32(i32(-votes[r, c])))
            part = (i * x.shape[1] + j) % MUON_PARTS
            sums[part] = fma(m, m, sums[part])
            moments[at, 0] = x[i, j] = m
    half = MUON_PARTS // 2
    while half:
        for part in range(half):
            sums[part] = f32(sums[part] + sums[part + half])
        half //= 2
    norm = f32(f32(np.sqrt(sums[0])) + f32(MUON_EPS))
    for i in range(x.shape[0]):
        for j in range(x.shape[1]):
            x[i, j] = f32(x[i, j] / norm)


@njit
def muon_panels(left, right, gram, alpha, beta, out, first, end):
    """Column panels first..end - 1 of out = left . left^T where `gram`, else fma(beta, left . right, alpha * right); float32, out is
    neither of the others."""
    length = left.shape[1]
    panel = np.empty((length, PANEL), f32)
    for p in range(first, end):
        for k in range(length):
            for j in range(PANEL):
                panel[k, j] = left[p * PANEL + j, k] if gram else right[k, p * PANEL + j]
        for r in range(0, out.shape[0], ROWS):
            chain_tile(left, r * length, length, panel, out, r * out.shape[1] + p * PANEL, out.shape[1], length)
        if not gram:
            for r in range(out.shape[0]):
                for j in range(p * PANEL, (p + 1) * PANEL):
                    out[r, j] = fma(beta, out[r, j], f32(alpha * right[r, j]))


@njit
def move(o, rate, vote, direction, weight, moments):
    """One weight's update: the new weight (int32); moments float32 [3] (m, v, acc) change in place. rate: o.lr, or less of it; direction:
    Muon's."""
    if o.rule == ZTEST:
        if vote == 0 or abs(vote) < i32(rate):
            return weight
        return clip(i32(weight + (i32(1) if vote > 0 else i32(-1))))
    if o.rule == SGD:
        acc = fma(f32(vote), rate, moments[2])
    elif o.rule == MUON:
        acc = fma(f32(-rate), fma(f32(weight), o.decay, f32(direction * o.size)), moments[2])
    else:
        g = f32(-f32(vote))
        moments[0] = fma(moments[0], o.beta1, f32(g * o.one_less_beta1))
        moments[1] = fma(f32(g * g), o.one_less_beta2, f32(moments[1] * o.beta2))
        u = fma(f32(weight), o.decay, f32(moments[0] / f32(f32(np.sqrt(moments[1])) + o.eps)))
        acc = fma(f32(-rate), u, moments[2])
    if acc >= f32(1):
        if weight < 127:
            weight, acc = i32(weight + 1), f32(acc - f32(1))
        else:
            acc = f32(1)
    elif acc <= f32(-1):
        if weight > -127:
            weight, acc = i32(weight - 1), f32(acc + f32(1))
        else:
            acc = f32(-1)
    moments[2] = acc
    return weight


@njit
def apply_votes(o, rates, w, t, group, votes, x, moments, changed_rows, changed_cols, first, end):
    """Moves the weights of rows group * first..group * end - 1 of one stored array by their votes int32 [rows, cols], or by Muon's x
    float32 [shorter side, longer side], and marks the rows and columns of those that changed; their number. rates: float32 [cols] factors on
    the learning rate, or [0]. group: 4 rows of a matrix are stored together, a vector is one row."""
    cols, changed, direction = t[N_COLS], 0, f32(0)
    for block in range(first, end):
        for col in range(cols):
            rate = f32(o.lr * rates[col]) if rates.size else o.lr
            for k in range(group):
                at = t[AT_W] + (block * cols + col) * group + k
                before = i32(w.weights[at])
                if o.rule == MUON:
                    r = block * group + k
                    direction = x[r, col] if t[N_ROWS] <= cols else x[col, r]
                after = move(o, rate, votes[block * group + k, col], direction, before, moments[at])
                if after != before:
                    w.weights[at] = after
                    changed_rows[block * group + k] = 1
                    changed_cols[col] = 1                   # threads only ever write the same 1
                    changed += 1
    return changed


mixed, halves = njit(state_digest.mixed), njit(state_digest.halves)


@njit
def word_sums(words, first):
    """The two sums of model.state_digest over uint64 [n], the first of them being word number `first` (uint64)."""
    a = b = np.uint64(0)
    for i in range(words.size):
        x = mixed(words[i], first + np.uint64(i))
        a += x
        b += halves(x)
    return a, b


# --- the engine ------------------------------------------------------------------------------------------------------------

class Transformer:
    """The forward pass of a model as the engine wants it; `engine.cpu_gru.Gru` is the other."""

    def __init__(self, cfg, constants, exp):
        self.cfg, self._constants = cfg, constants
        self._tables = Tables(exp, parameters.gelu_table().view(np.uint8) ^ 128, parameters.rope_table(cfg, cfg.SEQ_LEN).astype(np.int64),
                              self._basis(cfg.NTT_CAUSAL))
        self.together = 1           # pairs that share work: the engine cuts a job at multiples of it

    def evaluate(self, w, windows, seed, first_pair, losses):
        """Adds the losses of pairs first_pair.. of a step to int64 [pairs, 2]; windows int32, of model.parameters.windows; seed of the step."""
        unused = np.empty(0)
        run_windows(self._constants, w, self._tables, windows, np.int64(seed + first_pair), 1, unused, 0.0, losses, unused)

    def validate(self, w, windows, exp64, unit, nats):
        """Adds the cross-entropies of windows int32 [n, tokens + 1] to nats float64 [n]; exp64, unit: see run_windows."""
        run_windows(self._constants, w, self._tables, windows, np.int64(0), 0, exp64, unit, np.empty((0, 2), np.int64), nats)

    def reader(self, w, total):
        """A function that takes the next tokens of a sequence, `total` tokens at most in all, and gives int32 logits [>= V]."""
        cfg, c, tables = self.cfg, self._constants, self._tables
        cache = np.zeros((2, cfg.N_LAYERS, 0, cfg.HIDDEN_DIM), np.int8)        # keys, values; grows as it fills
        z = np.empty((ROWS, -(-cfg.VOCAB_SIZE // PANEL) * PANEL), np.int32)
        last, no_ints, no_floats = np.zeros((ROWS, cfg.HIDDEN_DIM), np.uint8), np.empty(0, np.int32), np.empty(0, np.float32)
        sequence, start = np.zeros((1, 0), np.int32), 0

        def read(tokens):
            nonlocal cache, sequence, tables, start
            n, room = len(tokens), cache.shape[2]
            if start + n > room:
                room = min(total, max(2 * room, start + n + 64))
                old, cache = cache, np.zeros((2, cfg.N_LAYERS, room, cfg.HIDDEN_DIM), np.int8)
                cache[:, :, :start] = old[:, :, :start]
                sequence = np.concatenate([sequence, np.zeros((1, room - sequence.size), np.int32)], 1)
                tables = tables._replace(rope=parameters.rope_table(cfg, room).astype(np.int64), ntt=self._basis(True))
            sequence[0, start:start + n] = tokens
            x = np.empty((n, cfg.HIDDEN_DIM), np.uint8)
            hidden(c, w, tables, u32(0), 0, sequence, 1, n, start, cache[0], cache[1], x)
            last[0] = x[-1]
            logits(c, w, 0, no_ints, no_ints, no_floats, 1, 0, last, 1, z)
            start += n
            return z[0]

        return read

    def _basis(self, causal):
        return transforms.basis(self.cfg, causal) if self.cfg.NTT_MODE else np.empty((0, 0), np.int64)


class CpuEngine:
    """The verbs of an engine on a State in this process's memory.

    tokens: the training data, uint8 or uint32 [n] (may be memory-mapped), or None where nothing is evaluated. threads: cores to use,
    default all. Raises ValueError (one line) for a product kind this process cannot use."""

    def __init__(self, cfg, tokens=None, threads=None):
        simd.use(cfg.SIMD)
        limit = hardware.cores()
        if threads is not None and not 1 <= threads <= limit:
            raise ValueError(f"{threads} threads: this machine allows 1 to {limit}")
        self.cfg, self.tokens, self.threads = cfg, tokens, threads or limit
        self._pool = concurrent.futures.ThreadPoolExecutor(self.threads)
        self.name = f"cpu {simd.KIND} x{self.threads}"
        exp = parameters.exp_table(cfg)
        self._exp = exp256 = exp[np.minimum(np.arange(256), exp.size - 1)]
        self._constants = Constants(
            cfg.HIDDEN_DIM, cfg.HEAD_DIM, cfg.N_HEADS, cfg.N_LAYERS, cfg.VOCAB_SIZE, cfg.DEVICE_MASK, cfg.DEVICE_GAUSSIAN,
            cfg.ADAPTIVE_NOISE_MODE, cfg.NOISE_SHIFT, cfg.SIGMA_SHIFT_VECTOR, cfg.SHIFT_ATTN, cfg.SHIFT_OUT, cfg.SHIFT_LOGIT,
            cfg.SHIFT_MLP_UP, cfg.SHIFT_MLP_DOWN, cfg.SOFTMAX_SCALE_BIT, cfg.ROPE_SCALE_BIT, int(not exp256[96:].any()),
            int(cfg.LOSS == "exact"), parameters.log_unit(cfg), int(cfg.NTT_MODE != 0), transforms.PRIME.get(cfg.NTT_MODE, 0), cfg.USE_CLT,
            parameters.divisor(cfg, cfg.HIDDEN_DIM), parameters.divisor(cfg, 4 * cfg.HIDDEN_DIM), 0 if cfg.MLP_RELU else -127)
        if cfg.MODEL == "gru":
            from engine import cpu_gru                                   # it builds on this module
        self._model = (cpu_gru.Gru if cfg.MODEL == "gru" else Transformer)(cfg, self._constants, exp256)
        self._layout()
        self.load(parameters.initial_state(cfg))

    def _layout(self):
        """Where each stored array lies in the flat buffers, as the kernels' table."""
        table = np.zeros((len(parameters.table(self.cfg)), self.cfg.N_LAYERS, len(FIELDS)), np.int64)
        packed = corrections = 0
        self._tensors = parameters.tensors(self.cfg)
        for t in self._tensors:
            padded = -(-t.cols // PANEL) * PANEL if t.product else 0
            table[t.param, t.layer] = (t.weights, packed, corrections, t.seed_a, t.seed_b, t.overlay_a, t.overlay_b, t.rows, t.cols)
            packed += t.rows * padded
            corrections += padded
        self._table, self._sizes = table, (packed, corrections)

    def load(self, state):
        """Takes over a State (copied)."""
        packed, corrections = self._sizes
        tokens = np.empty((self.cfg.VOCAB_SIZE, self.cfg.HIDDEN_DIM), np.int8)
        self._w = Weights(state.weights.copy(), tokens, np.zeros(packed, np.int8), np.zeros(corrections, np.int32), state.overlay.copy(), self._table)
        self._moments = state.moments.copy()
        self.step, self.seed = state.step, state.seed
        self._pack()

    def _spread(self, n, work, cost=1 << 30, together=1):
        """Calls work(first, end) over 0..n - 1 on all threads (the kernels leave the interpreter lock); the results. cost: elementary
        operations of the whole, so that what is shorter than a hand-over is done here. together: what is not to be cut apart."""
        step = max(1, -(-n // (4 * self.threads * together))) * together
        if self.threads == 1 or n <= 1 or cost < WORTH_A_THREAD:
            return [work(0, n)]
        return list(self._pool.map(lambda first: work(first, min(n, first + step)), range(0, n, step)))

    def _pack(self):
        """What is derived from the weights."""
        embedding = self._w.weights[:self._w.tokens.size].reshape(-1, self.cfg.VOCAB_SIZE, 4)
        self._w.tokens.reshape(self.cfg.VOCAB_SIZE, -1, 4)[:] = embedding.transpose(1, 0, 2)
        for t in self._tensors:
            if t.product:
                self._spread(-(-t.cols // PANEL), functools.partial(pack, self._w, self._table[t.param, t.layer]), t.size)

    def state(self):
        """A copy of the State."""
        return parameters.State(self.cfg, self._w.weights.copy(), self._moments.copy(), self._w.overlay.copy(), self.step, self.seed)

    def digest(self):
        """bytes [16]: model.state_digest of the State."""
        digest = state_digest.Digest(self.step, self.seed)
        for part in (self._w.weights, self._moments):
            words = part.ravel().view(np.uint64)
            for sums in self._spread(words.size, lambda a, b: word_sums(words[a:b], np.uint64(digest.number + a)), words.size):
                digest.add(*map(int, sums))
            digest.number += words.size
        digest.update(self._w.overlay.data)
        return digest.digest()

    def evaluate(self, first, count):
        """int64 [count]: losses of members first.. (both even) of this step."""
        windows = parameters.windows(self.cfg, self.tokens, self.step, first // 2, count // 2)
        losses = np.zeros((count // 2, 2), np.int64)
        self._spread(count // 2, lambda a, b: self._model.evaluate(self._w, windows[a:b], self.seed, first // 2 + a, losses[a:b]),
                     together=self._model.together)
        return losses.ravel()

    def update(self, fitness):
        """Applies the update of this step (fitness int8 [pairs]) and goes on to the next; number of weights changed."""
        cfg, w = self.cfg, self._w
        voting = np.flatnonzero(fitness)
        seeds = (np.uint64(self.seed) + voting.astype(np.uint64)).astype(np.uint32)
        signs = fitness[voting].astype(np.int32)
        lr, changed = cfg.learning_rate(self.step), 0
        for t in self._tensors:
            row = self._table[t.param, t.layer]
            if t.matrix:
                votes = self._matrix_votes(t, row, seeds, signs)
            else:
                votes = np.empty((1, t.cols), np.int32)
                self._spread(t.cols, functools.partial(vector_votes, self._constants, row, seeds, signs, votes[0]), t.cols * seeds.size)
            changed_rows, changed_cols = np.zeros(t.rows, np.uint8), np.zeros(t.cols, np.uint8)
            group, o = 4 if t.matrix else 1, parameters.optimizer(cfg, lr, t)
            rates = self._token_rates if cfg.RARE_TOKENS and t.by_token else np.empty(0, np.float32)
            x = self._muon_direction(o, t, row, votes) if o.rule == MUON else np.empty((0, 0), np.float32)
            changed += sum(self._spread(t.rows // group, functools.partial(apply_votes, o, rates, w, row, group, votes, x, self._moments,
                                                                           changed_rows, changed_cols), 4 * t.size))
            if cfg.ADAPTIVE_NOISE_MODE:
                self._rescale(t.overlay_a, changed_cols)
                if t.matrix:
                    self._rescale(t.overlay_b, changed_rows)
        self._pack()
        self.seed = parameters.next_seed(self.seed, self.step, cfg.NOISE_REUSE)
        self.step += 1
        return int(changed)

    @functools.cached_property
    def _token_rates(self):
        return parameters.token_rates(self.cfg, self.tokens)

    def _matrix_votes(self, t, row, seeds, signs):
        """int32 [rows padded, cols padded]: sum over pairs of sign * noise(A, col) * noise(B, row), as products over blocks of pairs."""
        votes = np.zeros((-(-t.rows // ROWS) * ROWS, -(-t.cols // PANEL) * PANEL), np.int32)
        for first in range(0, seeds.size, BLOCK):
            some, their = seeds[first:first + BLOCK], signs[first:first + BLOCK]
            x = np.empty((votes.shape[0], -(-some.size // 4) * 4), np.uint8)
            self._spread(votes.shape[0], functools.partial(input_block, self._constants, row, some, their, x), x.size)
            self._spread(votes.shape[1] // PANEL, functools.partial(panel_votes, self._constants, row, some, x, votes),
                         x.size + votes.shape[1] * some.size + votes.size * some.size // 64)
        return votes

    def _muon_direction(self, o, t, row, votes):
        """float32 [shorter side, longer side]: the momentum after these votes, orthogonalised (see model.parameters)."""
        short, long = sorted((t.rows, t.cols))
        x, a, b, c = np.empty((short, long), np.float32), *parameters.muon_coefficients(self.cfg)
        muon_start(o, row, votes, self._moments, x)

        def product(left, right, gram, alpha, beta):
            out = np.empty((short, short if gram else right.shape[1]), np.float32)
            self._spread(out.shape[1] // PANEL, functools.partial(muon_panels, left, right, gram, alpha, beta, out),
                         left.shape[1] * out.size // 16)
            return out

        for _ in range(parameters.MUON_ROUNDS):
            squares = product(x, x, True, a, a)
            x = product(product(squares, squares, False, b, c), x, False, a, np.float32(1))
        return x

    def _rescale(self, at, changed):
        """The overlay rule of SPEC 9 for one row or column array."""
        part = self._w.overlay[at:at + changed.size]
        by = np.where(changed, self.cfg.ADAPTIVE_NOISE_INC, -self.cfg.ADAPTIVE_NOISE_DEC)
        part[:] = np.clip(part + by, -127, 127)

    def validate(self, windows):
        """(nats, tokens): summed cross-entropy of softmax(logits / SOFTMAX_EXP_SCALE), without noise, over int windows
        [n, SEQ_LEN + 1] (gru: of any length)."""
        windows = np.ascontiguousarray(windows, np.int32)
        nats, unit = np.zeros(len(windows)), 1 / self.cfg.SOFTMAX_EXP_SCALE
        exp64 = np.exp(-np.arange(8192) * unit)
        self._spread(len(windows), lambda a, b: self._model.validate(self._w, windows[a:b], exp64, unit, nats[a:b]),
                     together=2 * self._model.together)
        return float(nats.sum()), windows.shape[0] * (windows.shape[1] - 1)

    def generate(self, prompt, count, seed, temp=None, min_p=None, penalty=None):
        """Yields `count` int tokens that continue prompt (int [n >= 1]); None: the setting of the configuration."""
        s = parameters.sampling(self.cfg, temp, min_p, penalty)
        cfg = self.cfg
        new = parameters.checked_prompt(cfg, prompt)
        read, seen, position = self._model.reader(self._w, len(new) + count), np.zeros(cfg.VOCAB_SIZE, np.uint8), len(new) - 1
        for _ in range(count):
            seen[new] = 1
            token = choose_token(self._constants, self._exp, read(new), seen, s.penalty, s.temp, s.floor,
                                 parameters.sampling_random(seed, position))
            yield int(token)
            new, position = np.array([token], np.int32), position + 1


STEP = ("evaluate", "update")                      # the verbs of a training step
VERBS = *STEP, "validate", "digest", "generate"


def warm_up(cfg, say=print, verbs=STEP):
    """Compiles the kernels of some verbs on a tiny model, or loads them from the cache; seconds it took. `say` takes a line
    if anything is compiled."""
    started = time.monotonic()
    kernel_cache.CpuCache.before_next = lambda: say(f"compiling the CPU engine ({simd.use()}) ...")
    small = egg_config.make(HIDDEN_DIM=64, N_LAYERS=1, SEQ_LEN=8, VOCAB_SIZE=256, CHUNK_SIZE=2, POPULATION_SIZE=2,
                            SIMD=cfg.SIMD, MODEL=cfg.MODEL, USE_MUON=cfg.USE_MUON)
    engine = CpuEngine(small, np.arange(64, dtype=np.uint8) % 7)
    arguments = dict(evaluate=(0, 2), update=(np.ones(1, np.int8),), validate=(np.zeros((1, 9), np.int32),), digest=(),
                     generate=([1], 1, 0))
    for verb in verbs:
        done = getattr(engine, verb)(*arguments[verb])
        if verb == "generate":
            list(done)
    kernel_cache.CpuCache.before_next = None
    return time.monotonic() - started
