"""The transformer on the CPU (SPEC 5, 7)."""

from typing import NamedTuple

import numpy as np

from engine.cpu_kernels import (AT_W, GROUP, N_COLS, NO_LAYER, OVER_A, SEED_A, hidden_side, i64, inlined, inner,
                                largest, leaf, member, njit, noise, noised, perturbed, product, project, project_down,
                                score, sides, sign)
from engine.cpu_rules import clip, divide, f32, f64, factor, i32, normed, shift_right, table_term, u32
from engine.simd import PANEL, ROWS, dot, empty, exp_sum, gelu, tile, zeros
from model import integer_tables, parameters, transforms

(EMBEDDING, EMB_BIAS, NTT_1, NTT_2, NTT_3, LN_INIT, LN_INIT_BIAS, W_EMB_UP, EMB_BIAS_UP, W_EMB_DOWN, EMB_BIAS_DOWN,
 LN_1, LN_1_BIAS, W_Q, W_K, W_V, W_O, LN_2, LN_2_BIAS, W_UP, BIAS_UP, W_DOWN, BIAS_DOWN, LN_F,
 LN_F_BIAS) = map(i64, range(len(parameters.TABLE)))
NONE, NO_LOSSES = np.empty(0), np.empty((0, 2), np.int64)
SUMMED = 1 << 16            # positions whose values, times byte limbs of their weights, fit an int32 sum


class Tables(NamedTuple):
    """exp int32 [256]; rope int64 [positions, H / 2], cosine in the lower half, sine in the upper one; ntt int64 [T, T]
    (model.transforms.basis; empty without NTT_MODE)."""
    exp: np.ndarray
    rope: np.ndarray
    ntt: np.ndarray


@inlined
def layer_norm(c, h, r, weight, bias, m, x, o):
    """x[o] uint8 = ln(h[r]) + 128 with the weights and biases of member m."""
    n, total = h.shape[1], i32(0)
    for i in range(n):
        total = i32(total + abs(i32(h[r, i])))
    mean = max(i32(1), divide(total, n))
    for i in range(n):
        x[o, i] = np.uint8(normed(c.mode, h[r, i], weight[m, i], bias[m, i], mean) + i32(128))


@inlined
def amax(v, r, out, o, zero):
    """out[o] = amax of v[r] int32 (SPEC 5) + zero: 0 for int8 rows, 128 for uint8."""
    n, top = out.shape[1], i32(0)
    for i in range(n):
        top = max(top, abs(v[r, i]))
    scale = f32(f32(127) / f32(f32(top) + f32(1e-9)))
    for i in range(n):
        # exactly twice: its truncation shows which side of a half
        twice = i32(f32(f32(v[r, i]) * f32(scale + scale)))
        out[o, i] = i32(i32(i32(twice + i32(1) + i32(twice >> i32(31))) >> i32(1)) + i32(zero))


@inlined
def add_residual(h, r, y, o, s, noise, shift, shift_y, bias, m):
    """h[r] = amax(h[r] + (y[o] with its noise >> shift_y) + the bias of member m); y[o] is overwritten."""
    for i in range(h.shape[1]):
        y[o, i] = i32(i32(i32(h[r, i]) + shift_right(noised(y[o, i], s, noise[i], shift), shift_y)) + bias[m, i])
    amax(y, o, h, r, 0)


@inner
def mlp(c, w, up, bias_up, down, bias_down, ln, ln_bias, layer, S, noisy, rows, per_member, h):
    """h = amax(h + MLP(ln(h))) for all rows, in place: items 2 and the second half of 3 of SPEC 7."""
    H = c.H
    norm_w, norm_b = empty((2, H), i32), empty((2, H), i32)
    bias_u, bias_d = empty((2, 4 * H), i32), empty((2, H), i32)
    perturbed(c, w, ln, layer, S, noisy, norm_w)
    perturbed(c, w, ln_bias, layer, S, noisy, norm_b)
    perturbed(c, w, bias_up, layer, S, noisy, bias_u)
    perturbed(c, w, bias_down, layer, S, noisy, bias_d)
    (up_a, up_b), (down_a, down_b) = sides(c, w, up, layer, S, noisy), sides(c, w, down, layer, S, noisy)
    shift, shift_up, shift_down = i32(c.matrix_shift), i32(c.up), i32(c.down)
    x, u = empty((GROUP, H), np.uint8), empty((GROUP, 4 * H), np.uint8)
    wide, y = empty((GROUP, 4 * H), i32), empty((GROUP, H), i32)
    for first in range(0, rows, GROUP):
        count = min(GROUP, rows - first)
        for r in range(count):
            layer_norm(c, h, first + r, norm_w, norm_b, member(first + r, per_member), x, r)
        product(w, up, layer, x, count, wide)
        for r in range(count):
            m = member(first + r, per_member)
            s = project(c, x, r, up_b, 0, sign(m)) if noisy else i32(0)
            for i in range(4 * H):
                v = shift_right(noised(wide[r, i], s, up_a[i], shift), shift_up)
                u[r, i] = np.uint8(clip(i32(v + bias_u[m, i])))
            gelu(u, r * 4 * H, 4 * H)
        product(w, down, layer, u, count, y)
        for r in range(count):
            m = member(first + r, per_member)
            s = project_down(c, u, r, down_b, 0, sign(m)) if noisy else i32(0)
            add_residual(h, first + r, y, r, s, down_a, shift, shift_down, bias_d, m)


@inlined
def rotate(pairs, r, rope, t, bit):
    """Rotary embedding at position t of row r, in place; pairs int64 [rows, H / 2], two int32 each."""
    half = np.int64(1) << (bit - 1)
    for i in range(pairs.shape[1]):
        both, angle = pairs[r, i], rope[t, i]
        e, o, cos, sin = np.int64(i32(both)), both >> 32, np.int64(i32(angle)), angle >> 32
        even, odd = (e * cos - o * sin + half) >> bit, (e * sin + o * cos + half) >> bit
        pairs[r, i] = (even & 0xFFFFFFFF) | (odd << 32)


@leaf
def pack_head(keys, words, values, first, context, ones, packed_k, packed_v, correction):
    """Fills the panels of one head for `tile` with `context` rows from `first` on: packed_k int32 [columns / PANEL,
    D / 4, PANEL] with the keys as columns, packed_v uint32 [D / PANEL, columns / 4, PANEL] with the values as rows,
    correction int32 [columns]. keys int8 and words int32, the same memory, and values uint8 have a row a position and
    begin with this head; ones uint8 [D]: 128 each."""
    D = ones.size
    for p in range(context):
        correction[p] = i32(-dot(ones, 0, keys[first + p], 0, D))
        four, column = words[first + p], packed_k[p // PANEL, :, p % PANEL]
        for d in range(D // 4):
            column[d] = four[d]
    for p in range(0, context, 4):
        row, last = first + p, first + context - 1                 # positions past the context have no weight
        for panel in range(D // PANEL):
            out, here = packed_v[panel, p // 4], values[:, panel * PANEL:]
            v_0, v_1, v_2, v_3 = here[row], here[min(row + 1, last)], here[min(row + 2, last)], here[min(row + 3, last)]
            for d in range(PANEL):
                out[d] = u32(v_0[d]) | u32(v_1[d]) << u32(8) | u32(v_2[d]) << u32(16) | u32(v_3[d]) << u32(24)


@leaf
def weighted_mean(weighted, r, total, out):
    """out uint8 [D] = clip(weighted[r] / total) + 128, truncated: float64 as in `divide`, exact for these sums."""
    reciprocal = 1.0 / f64(total)
    for d in range(out.size):
        size = i32((abs(weighted[r, d]) + 0.5) * reciprocal)
        out[d] = np.uint8(clip(size if weighted[r, d] >= 0 else i32(-size)) + i32(128))


@inner
def attend(c, tb, q, keys, values, cache_row, first_row, start, n, a):
    """Causal attention of one member: queries q uint8 [rows + ROWS, H] (+ 128) from first_row on stand at positions
    start..start + n - 1; its keys and values int8 [rows, H] begin at cache_row; a uint8 [rows, H] (+ 128) is filled.

    Scores are products with the packed keys; the weights (up to 19 bits) times the values are three exact products of
    byte limbs."""
    D, H = c.D, c.H
    context = start + n
    columns = (context + PANEL - 1) // PANEL * PANEL
    packed_k, packed_v = zeros(columns * D, np.int8), zeros(columns * D, np.int8)
    words_k = packed_k.view(i32).reshape((columns // PANEL, D // 4, PANEL))
    words_v = packed_v.view(u32).reshape((D // PANEL, columns // 4, PANEL))
    key_words, value_bytes = keys.view(i32), values.view(np.uint8)
    correction, ones = zeros(columns, i32), np.full(D, 128, np.uint8)
    nothing = zeros(PANEL, i32)
    scores = empty((ROWS, columns), i32)
    limbs = zeros((3, ROWS, columns), np.uint8)
    sums, weighted = empty((3, ROWS, D), i32), empty((ROWS, D), f64)
    weights = empty(columns, i32)
    totals, exp = empty(ROWS, np.int64), tb.exp
    shift = i32(c.attn)
    for head in range(c.heads):
        base = head * D
        pack_head(keys[:, base:], key_words[:, base // 4:], value_bytes[:, base:], cache_row, context, ones, words_k,
                  words_v, correction)
        for block in range(0, n, ROWS):
            count = min(ROWS, n - block)
            reach = start + block + count                      # positions the last row of the block sees
            for p in range((reach + PANEL - 1) // PANEL):
                tile(q, (first_row + block) * H + base, H, packed_k, p * D * PANEL, correction, p * PANEL, 0, scores,
                     p * PANEL, columns, D // 4)
            wide = (reach + 3) // 4 * 4
            for r in range(count):
                seen = start + block + r + 1
                top = shift_right(largest(scores, r, seen), shift)
                totals[r] = exp_sum(exp, c.short_exp, top, shift, scores, r * columns, seen, weights, 0)
                for p in range(seen, wide):
                    weights[p] = 0
                for p in range(wide):
                    limbs[0, r, p] = np.uint8(weights[p] & i32(255))
                    limbs[1, r, p] = np.uint8(shift_right(weights[p], i32(8)) & i32(255))
                    limbs[2, r, p] = np.uint8(shift_right(weights[p], i32(16)))
            for first in range(0, wide, SUMMED):
                k4 = min(SUMMED, wide - first) // 4
                for limb in range(3):
                    for p in range(D // PANEL):
                        tile(limbs, limb * ROWS * columns + first, columns, packed_v, (p * columns + first) * PANEL,
                             nothing, 0, 0, sums, limb * ROWS * D + p * PANEL, D, k4)
                for r in range(count):
                    for d in range(D):
                        part = f64(sums[0, r, d]) + f64(sums[1, r, d]) * 256.0 + f64(sums[2, r, d]) * 65536.0
                        # exact: below 2^53 for 2^28 positions
                        weighted[r, d] = part + (weighted[r, d] if first else 0.0)
            for r in range(count):
                row = first_row + block + r
                weighted_mean(weighted, r, totals[r], a[row, base:base + D])


@inner
def attention(c, w, tb, layer, S, noisy, members, n, start, h, keys, values):
    """h = amax(h + attention block(h)) in place. keys, values int8 [members * positions, H] are the cache, where this
    call's are put at positions start..start + n - 1 of each member."""
    H, rows, context = c.H, members * n, keys.shape[0] // members
    padded = (rows + ROWS - 1) // ROWS * ROWS
    norm_w, norm_b = empty((2, H), i32), empty((2, H), i32)
    perturbed(c, w, LN_1, layer, S, noisy, norm_w)
    perturbed(c, w, LN_1_BIAS, layer, S, noisy, norm_b)
    x, q, a = zeros((padded, H), np.uint8), zeros((rows + ROWS, H), np.uint8), zeros((padded, H), np.uint8)
    y = empty((padded, H), i32)
    pairs, rope, shift = y.view(np.int64), tb.rope, i32(c.matrix_shift)
    for r in range(rows):
        layer_norm(c, h, r, norm_w, norm_b, member(r, n), x, r)
    for which in range(3):
        param = W_Q + which
        product(w, param, layer, x, rows, y)
        side_a, side_b = sides(c, w, param, layer, S, noisy)
        for m in range(members):
            for t in range(n):
                r, o = m * n + t, m * context + start + t
                if noisy:
                    s = project(c, x, r, side_b, 0, sign(m))
                    for i in range(H):
                        y[r, i] = noised(y[r, i], s, side_a[i], shift)
                if which < 2:
                    rotate(pairs, r, rope, start + t, c.rope_bit)
                if which == 0:
                    amax(y, r, q, r, 128)
                elif which == 1:
                    amax(y, r, keys, o, 0)
                else:
                    amax(y, r, values, o, 0)
    for m in range(members):
        attend(c, tb, q, keys, values, m * context, m * n, start, n, a)
    product(w, W_O, layer, a, rows, y)
    side_a, side_b = sides(c, w, W_O, layer, S, noisy)
    zero, shift_out = zeros((1, H), i32), i32(c.out)
    for r in range(rows):
        s = project(c, a, r, side_b, 0, sign(member(r, n))) if noisy else i32(0)
        add_residual(h, r, y, r, s, side_a, shift, shift_out, zero, 0)


@leaf
def coefficient(c, tb, tokens, position):
    """int64: the transform's coefficient at a position (model.transforms)."""
    T, total = tb.ntt.shape[0], np.int64(0)
    t = position % T
    for i in range(min(T, tokens.size - (position - t))):
        total += np.int64(tokens[position - t + i]) * tb.ntt[t, i]
    return total % c.ntt_prime if c.ntt_prime else total


@inner
def look_up_coefficients(c, w, S, noisy, coefficients, n, out):
    """Adds to out int32 [rows, H] what the tables of bytes add to the embedding; coefficients int64 [rows], n rows a
    member."""
    H, shift = c.H, i32(c.matrix_shift)
    for k in range(3):
        t = w.table[NTT_1 + k, 0]
        seed_a, (unit, scale) = u32(S + t[SEED_A]), hidden_side(c, w, t, S)
        for r in range(out.shape[0]):
            mirrored = sign(member(r, n))
            byte = (coefficients[r] >> (8 * k + 8)) & 255
            own, own_scale = noise(c, seed_a, byte), factor(c.mode, w.overlay[t[OVER_A] + byte], seed_a, byte)
            for i in range(H):
                e = i32(w.weights[t[AT_W] + (i >> 2) * (4 * t[N_COLS]) + byte * 4 + (i & 3)])
                if noisy:
                    p = table_term(own, own_scale, unit[i], scale[i])
                    e = i32(e + shift_right(i32(p * mirrored), shift))
                out[r, i] = i32(out[r, i] + i32(e >> i32(2)))


@inner
def embed(c, w, tb, S, noisy, tokens, n, start, rows, h):
    """h int8 [rows, H]: item 1 of SPEC 7. tokens int32 [>= start + n]; n rows a member, from position `start` on."""
    H = c.H
    t = w.table[EMBEDDING, 0]
    bias = empty((2, H), i32)
    perturbed(c, w, EMB_BIAS, NO_LAYER, S, noisy, bias)
    seed_a, (unit, scale), shift = u32(S + t[SEED_A]), hidden_side(c, w, t, S), i32(c.matrix_shift)
    more = zeros((rows if c.ntt else 1, H), i32)             # one row of zeros serves all without NTT_MODE
    if c.ntt:
        coefficients = empty(rows, np.int64)
        for r in range(rows):
            coefficients[r] = coefficient(c, tb, tokens, start + r - n * member(r, n))
        look_up_coefficients(c, w, S, noisy, coefficients, n, more)
    for r in range(rows):
        m, at = member(r, n), r if c.ntt else 0
        k = i64(tokens[start + r - n * m])
        if noisy:
            own, own_scale = noise(c, seed_a, k), factor(c.mode, w.overlay[t[OVER_A] + k], seed_a, k)
            for i in range(H):
                p = shift_right(i32(table_term(own, own_scale, unit[i], scale[i]) * sign(m)), shift)
                h[r, i] = clip(i32(i32(i32(i32(w.tokens[k, i]) + p) + bias[m, i]) + more[at, i]))
        else:
            for i in range(H):
                h[r, i] = clip(i32(i32(i32(w.tokens[k, i]) + bias[m, i]) + more[at, i]))


@inner
def hidden(c, w, tb, S, noisy, tokens, members, n, start, keys, values, x):
    """x uint8 [>= members * n, H]: ln_f of the last hidden state (+ 128) of every row (items 1 to 4 of SPEC 7).

    tokens int32 [>= start + n]; keys, values int8 [1 or L, members * positions, H]: the caches; one layer's
    worth is enough where nothing follows."""
    rows, H = members * n, c.H
    h = empty((rows, H), np.int8)
    embed(c, w, tb, S, noisy, tokens, n, start, rows, h)
    mlp(c, w, W_EMB_UP, EMB_BIAS_UP, W_EMB_DOWN, EMB_BIAS_DOWN, LN_INIT, LN_INIT_BIAS, NO_LAYER, S, noisy, rows, n, h)
    for layer in range(c.L):
        slot = layer % keys.shape[0]
        attention(c, w, tb, layer, S, noisy, members, n, start, h, keys[slot], values[slot])
        mlp(c, w, W_UP, BIAS_UP, W_DOWN, BIAS_DOWN, LN_2, LN_2_BIAS, layer, S, noisy, rows, n, h)
    norm_w, norm_b = empty((2, H), i32), empty((2, H), i32)
    perturbed(c, w, LN_F, NO_LAYER, S, noisy, norm_w)
    perturbed(c, w, LN_F_BIAS, NO_LAYER, S, noisy, norm_b)
    for r in range(rows):
        layer_norm(c, h, r, norm_w, norm_b, member(r, n), x, r)


@inlined
def logits(c, w, noisy, side_a, side_b, T, first, x, count, z):
    """z int32 [>= count, V padded]: logits (item 4 of SPEC 7) of `count` rows of x, the first of which is row `first`
    of a pair of T positions a member."""
    product(w, EMBEDDING, NO_LAYER, x, count, z)
    shift, shift_logit = i32(c.matrix_shift), i32(c.logit)
    for r in range(count):
        s = project(c, x, r, side_b, 0, sign(member(first + r, T))) if noisy else i32(0)
        for v in range(c.V):
            z[r, v] = shift_right(noised(z[r, v], s, side_a[v], shift), shift_logit)


@njit
def run_windows(c, w, tb, windows, start, keys, values, S, noisy, exp64, unit, losses, nats):
    """Evaluates windows int32 [n, start + T + 1] with `score`, one after the other, from position `start` on; int32
    [GROUP, V padded], whose row (T - 1) % GROUP has the logits after the last token. noisy: window i is read by the two
    members of pair seed S + i, else by the unperturbed model; drawn targets follow it. keys, values int8 [1 or L,
    members * (start + T), H]: the caches, see `hidden`."""
    T, members = (windows.shape[1] - 1 - start) // (c.targets if noisy else 1), 2 if noisy else 1
    x, z = empty((members * T, c.H), np.uint8), empty((GROUP, (c.V + PANEL - 1) // PANEL * PANEL), i32)
    for i in range(windows.shape[0]):
        tokens, seed = windows[i], u32(S + i)
        hidden(c, w, tb, seed, noisy, tokens, members, T, start, keys, values, x)
        side_a, side_b = sides(c, w, EMBEDDING, NO_LAYER, seed, noisy)
        for first in range(0, members * T, GROUP):
            count = min(GROUP, members * T - first)
            logits(c, w, noisy, side_a, side_b, T, first, x[first:first + count], count, z)
            score(c, tb.exp, noisy, z, windows, i, first, count, start, T, exp64, unit, losses, nats)
    return z


class Transformer:
    """The forward pass of a model as the engine wants it; `engine.cpu_gru.Gru` is the other."""

    def __init__(self, cfg, constants, exp):
        self.cfg, self._constants = cfg, constants
        self._tables = Tables(exp, self._rope(cfg.SEQ_LEN), self._basis(cfg.NTT_CAUSAL))
        self.together = 1           # pairs that share work: the engine cuts a job at multiples of it

    def evaluate(self, w, windows, seed, shift, first_pair, losses):
        """Adds the losses of pairs first_pair.. of a step to int64 [pairs, 2]; windows int32, of model.soft_targets;
        seed, shift: of the step and its noise."""
        self._run(w, self._tables, windows, self._cache(1, 2 * self.cfg.SEQ_LEN), seed=seed + first_pair, noisy=1,
                  shift=shift, losses=losses)

    def validate(self, w, windows, exp64, unit, nats):
        """Adds the cross-entropies of windows int32 [n, tokens + 1] to nats float64 [n]; exp64, unit: see `score`."""
        self._run(w, self._tables, windows, self._cache(1, windows.shape[1] - 1), exp64=exp64, unit=unit, nats=nats)

    def _run(self, w, tables, windows, cache, start=0, seed=0, noisy=0, shift=0, exp64=NONE, unit=0.0,
             losses=NO_LOSSES, nats=NONE):
        return run_windows(self._constants._replace(matrix_shift=shift), w, tables, windows, start, *cache,
                           np.int64(seed), noisy, exp64, unit, losses, nats)

    def _cache(self, layers, positions):
        return np.zeros((2, layers, positions, self.cfg.HIDDEN_DIM), np.int8)

    def reader(self, w, total):
        """A function that takes the next tokens of a sequence, `total` tokens at most in all, and gives int32 logits
        [>= V]."""
        cfg, tables = self.cfg, self._tables
        cache = self._cache(cfg.N_LAYERS, 0)                 # grows as it fills
        sequence, start = np.zeros((1, 0), np.int32), 0

        def read(tokens):
            nonlocal cache, sequence, tables, start
            n, room = len(tokens), cache.shape[2]
            if start + n > room:
                room = min(total, max(2 * room, start + n + 64))
                old, cache = cache, self._cache(cfg.N_LAYERS, room)
                cache[:, :, :start] = old[:, :, :start]
                sequence = np.concatenate([sequence, np.zeros((1, room + 1 - sequence.size), np.int32)], 1)
                tables = tables._replace(rope=self._rope(room), ntt=self._basis(True))
            sequence[0, start:start + n] = tokens
            z = self._run(w, tables, sequence[:, :start + n + 1], cache, start)
            start += n
            return z[(n - 1) % GROUP]

        return read

    def _rope(self, positions):
        table = integer_tables.rope_table(self.cfg, positions).view(np.int64)[..., 0]
        return np.tile(table, self.cfg.N_HEADS)

    def _basis(self, causal):
        return transforms.basis(self.cfg, causal) if self.cfg.NTT_MODE else np.empty((0, 0), np.int64)
