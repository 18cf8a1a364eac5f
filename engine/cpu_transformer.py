"""The transformer on the CPU (SPEC 5, 7)."""

from typing import NamedTuple

import numpy as np

from engine.cpu_kernels import (AT_W, GROUP, N_COLS, NO_LAYER, OVER_A, SEED_A, draw_sides, hidden_side, i64, inlined,
                                inner, largest, leaf, mean_sizes, member, new_sides, njit, noise, noised, perturbed,
                                product, project, project_down, score, sign)
from engine.cpu_rules import clip, f32, f64, factor, i32, normed, shift_right, table_term, u32
from engine.simd import PANEL, ROWS, dot, empty, exp_sum, gelu, local, tile
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


class Room(NamedTuple):
    """Memory for rows of up to two members and `columns` positions of context, both padded; some of it has two names,
    for two types of element."""
    h: np.ndarray               # int8 [rows, H]: the hidden states
    x: np.ndarray               # uint8 [rows, H]
    q: np.ndarray               # uint8 [rows, H]
    y: np.ndarray               # int32 [rows, H]
    pairs: np.ndarray           # ... int64 [rows, H / 2]
    keys: np.ndarray            # int8 [1 or L, members * positions, H]: a cache
    values: np.ndarray          # as keys
    key_words: np.ndarray       # keys as int32
    value_bytes: np.ndarray     # values as uint8
    packed_k: np.ndarray        # int8 [columns * D]: panels for `tile`
    packed_v: np.ndarray        # as packed_k
    words_k: np.ndarray         # packed_k as int32 [columns / PANEL, D / 4, PANEL]
    words_v: np.ndarray         # packed_v as uint32 [D / PANEL, columns / 4, PANEL]
    correction: np.ndarray      # int32 [columns]
    weights: np.ndarray         # int32 [columns]
    scores: np.ndarray          # int32 [ROWS, columns]
    limbs: np.ndarray           # uint8 [3, ROWS, columns]


@inner
def new_room(c, rows, context, keys, values):
    padded, columns = (rows + ROWS - 1) // ROWS * ROWS + ROWS, (context + PANEL - 1) // PANEL * PANEL
    y, k, v = empty((padded, c.H), i32), empty(columns * c.D, np.int8), empty(columns * c.D, np.int8)
    return Room(empty((padded, c.H), np.int8), empty((padded, c.H), np.uint8), empty((padded, c.H), np.uint8), y,
                y.view(np.int64), keys, values, keys.view(i32), values.view(np.uint8), k, v,
                k.view(i32).reshape((columns // PANEL, c.D // 4, PANEL)),
                v.view(u32).reshape((c.D // PANEL, columns // 4, PANEL)), empty(columns, i32), empty(columns, i32),
                empty((ROWS, columns), i32), empty((3, ROWS, columns), np.uint8))


@inlined
def layer_norm(c, h, first, count, per_member, weight, bias, x, o):
    """x[o..] uint8 = ln(h[first..]) + 128 of `count` rows, GROUP at most, with the weights and biases of their
    members."""
    n, means = h.shape[1], local(GROUP, i32)
    mean_sizes(h, first, count, means)
    for r in range(count):
        m, mean = member(first + r, per_member), means[r]
        for i in range(n):
            x[o + r, i] = np.uint8(normed(c.mode, h[first + r, i], weight[m, i], bias[m, i], mean) + i32(128))


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
            out[o + r, i] = i32(i32(i32(twice + i32(1) + i32(twice >> i32(31))) >> i32(1)) + i32(zero))


@inlined
def add_residual(h, first, count, per_member, y, o, s, noise, shift, shift_y, bias):
    """h[first..] = amax(h[first..] + (y[o..] with its noise >> shift_y) + the bias of their members); y is
    overwritten. s int32 [count]: of the rows."""
    for r in range(count):
        m = member(first + r, per_member)
        for i in range(h.shape[1]):
            more = shift_right(noised(y[o + r, i], s[r], noise[i], shift), shift_y)
            y[o + r, i] = i32(i32(i32(h[first + r, i]) + more) + bias[m, i])
    amax(y, o, count, h, first, 0)


@leaf
def mlp(c, w, up, bias_up, down, bias_down, ln, ln_bias, layer, S, noisy, rows, per_member, h):
    """h = amax(h + MLP(ln(h))) for all rows, in place: items 2 and the second half of 3 of SPEC 7."""
    H = c.H
    norm_w, norm_b = local((2, H), i32), local((2, H), i32)
    bias_u, bias_d = local((2, 4 * H), i32), local((2, H), i32)
    perturbed(c, w, ln, layer, S, noisy, norm_w)
    perturbed(c, w, ln_bias, layer, S, noisy, norm_b)
    perturbed(c, w, bias_up, layer, S, noisy, bias_u)
    perturbed(c, w, bias_down, layer, S, noisy, bias_d)
    sides_u, sides_d = new_sides(1, H, 4 * H, H * c.scaled), new_sides(1, 4 * H, H, 4 * H * c.scaled)
    draw_sides(c, w, up, layer, S, noisy, sides_u)
    draw_sides(c, w, down, layer, S, noisy, sides_d)
    shift, shift_up, shift_down = i32(c.matrix_shift), i32(c.up), i32(c.down)
    x, u, sums = local((GROUP, H), np.uint8), local((GROUP, 4 * H), np.uint8), local(GROUP, i32)
    wide, y = local((GROUP, 4 * H), i32), local((GROUP, H), i32)
    for first in range(0, rows, GROUP):
        count = min(GROUP, rows - first)
        layer_norm(c, h, first, count, per_member, norm_w, norm_b, x, 0)
        product(w, up, layer, x, count, wide)
        for r in range(count):
            sums[r] = project(c, x, r, sides_u, 0, sign(member(first + r, per_member))) if noisy else i32(0)
        for r in range(count):
            m, s = member(first + r, per_member), sums[r]
            for i in range(4 * H):
                v = shift_right(noised(wide[r, i], s, sides_u.columns[0, i], shift), shift_up)
                u[r, i] = np.uint8(clip(i32(v + bias_u[m, i])))
        gelu(u, 0, count * 4 * H)
        product(w, down, layer, u, count, y)
        for r in range(count):
            sums[r] = project_down(c, u, r, sides_d, 0, sign(member(first + r, per_member))) if noisy else i32(0)
        add_residual(h, first, count, per_member, y, 0, sums, sides_d.columns[0], shift, shift_down, bias_d)


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


@leaf
def attend(c, tb, room, slot, cache_row, first_row, start, n):
    """Causal attention of one member: its queries room.q (+ 128) from first_row on stand at positions start..start + n
    - 1; its keys and values begin at cache_row; room.x (+ 128) is filled.

    Scores are products with the packed keys; the weights (up to 19 bits) times the values are three exact products of
    byte limbs."""
    D, H, columns, scores, limbs, weights = c.D, c.H, room.correction.size, room.scores, room.limbs, room.weights
    ones, nothing = local(D, np.uint8), local(PANEL, i32)
    sums, weighted, totals = local((3, ROWS, D), i32), local((ROWS, D), f64), local(ROWS, np.int64)
    shift, exp = i32(c.attn), tb.exp
    for d in range(D):
        ones[d] = 128
    for p in range(PANEL):
        nothing[p] = 0
    for head in range(c.heads):
        base = head * D
        pack_head(room.keys[slot, :, base:], room.key_words[slot, :, base // 4:], room.value_bytes[slot, :, base:],
                  cache_row, start + n, ones, room.words_k, room.words_v, room.correction)
        for block in range(0, n, ROWS):
            count = min(ROWS, n - block)
            reach = start + block + count                      # positions the last row of the block sees
            for p in range((reach + PANEL - 1) // PANEL):
                tile(room.q, (first_row + block) * H + base, H, room.packed_k, p * D * PANEL, room.correction,
                     p * PANEL, 0, scores, p * PANEL, columns, D // 4)
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
                        tile(limbs, limb * ROWS * columns + first, columns, room.packed_v,
                             (p * columns + first) * PANEL, nothing, 0, 0, sums, limb * ROWS * D + p * PANEL, D, k4)
                for r in range(count):
                    for d in range(D):
                        part = f64(sums[0, r, d]) + f64(sums[1, r, d]) * 256.0 + f64(sums[2, r, d]) * 65536.0
                        # exact: below 2^53 for 2^28 positions
                        weighted[r, d] = part + (weighted[r, d] if first else 0.0)
            for r in range(count):
                row = first_row + block + r
                weighted_mean(weighted, r, totals[r], room.x[row, base:base + D])


@leaf
def attention(c, w, tb, layer, S, noisy, members, n, start, room):
    """h = amax(h + attention block(h)) in place. This call's keys and values are put at positions start..start + n - 1
    of each member's cache."""
    H, rows, slot = c.H, members * n, layer % room.keys.shape[0]
    context, x, y, shift = room.keys.shape[1] // members, room.x, room.y, i32(c.matrix_shift)
    norm_w, norm_b, zero = local((2, H), i32), local((2, H), i32), local((2, H), i32)
    sides, sums = new_sides(1, H, H, H * c.scaled), local(GROUP, i32)
    perturbed(c, w, LN_1, layer, S, noisy, norm_w)
    perturbed(c, w, LN_1_BIAS, layer, S, noisy, norm_b)
    for first in range(0, rows, GROUP):
        layer_norm(c, room.h, first, min(GROUP, rows - first), n, norm_w, norm_b, x, first)
    for which in range(3):
        param = W_Q + which
        product(w, param, layer, x, rows, y)
        draw_sides(c, w, param, layer, S, noisy, sides)
        for m in range(members):
            for t in range(0, n, GROUP):
                count, first, o = min(GROUP, n - t), m * n + t, m * context + start + t
                for r in range(count if noisy else 0):
                    s = project(c, x, first + r, sides, 0, sign(m))
                    for i in range(H):
                        y[first + r, i] = noised(y[first + r, i], s, sides.columns[0, i], shift)
                for r in range(count if which < 2 else 0):
                    rotate(room.pairs, first + r, tb.rope, start + t + r, c.rope_bit)
                if which == 0:
                    amax(y, first, count, room.q, first, 128)
                elif which == 1:
                    amax(y, first, count, room.keys[slot], o, 0)
                else:
                    amax(y, first, count, room.values[slot], o, 0)
    for m in range(members):
        attend(c, tb, room, slot, m * context, m * n, start, n)
    product(w, W_O, layer, x, rows, y)
    draw_sides(c, w, W_O, layer, S, noisy, sides)
    for i in range(H):
        zero[0, i] = zero[1, i] = 0
    for first in range(0, rows, GROUP):
        count = min(GROUP, rows - first)
        for r in range(count):
            sums[r] = project(c, x, first + r, sides, 0, sign(member(first + r, n))) if noisy else i32(0)
        add_residual(room.h, first, count, n, y, first, sums, sides.columns[0], shift, i32(c.out), zero)


@leaf
def coefficient(c, tb, tokens, position):
    """int64: the transform's coefficient at a position (model.transforms)."""
    T, total = tb.ntt.shape[0], np.int64(0)
    t = position % T
    for i in range(min(T, tokens.size - (position - t))):
        total += np.int64(tokens[position - t + i]) * tb.ntt[t, i]
    return total % c.ntt_prime if c.ntt_prime else total


@leaf
def look_up_coefficients(c, w, tb, S, noisy, tokens, rows, n, start, out):
    """out int32 [rows, H] = what the tables of bytes add to the embedding; tokens, n, start: of `embed`."""
    H, shift, units, scales = c.H, i32(c.matrix_shift), local((3, c.H), i32), local((3, c.H), f32)
    for k in range(3):
        hidden_side(c, w, w.table[NTT_1 + k, 0], S, units[k], scales[k])
    for r in range(rows):
        m = member(r, n)
        number = coefficient(c, tb, tokens, start + r - n * m)
        for i in range(H):
            out[r, i] = 0
        for k in range(3):
            t, byte = w.table[NTT_1 + k, 0], (number >> (8 * k + 8)) & 255
            seed_a = u32(S + t[SEED_A])
            own, own_scale = noise(c, seed_a, byte), factor(c.mode, w.overlay[t[OVER_A] + byte], seed_a, byte)
            for i in range(H):
                e = i32(w.weights[t[AT_W] + (i >> 2) * (4 * t[N_COLS]) + byte * 4 + (i & 3)])
                if noisy:
                    p = table_term(own, own_scale, units[k, i], scales[k, i])
                    e = i32(e + shift_right(i32(p * sign(m)), shift))
                out[r, i] = i32(out[r, i] + i32(e >> i32(2)))


@leaf
def embed(c, w, tb, S, noisy, tokens, n, start, rows, more, h):
    """h int8 [rows, H]: item 1 of SPEC 7. tokens int32 [>= start + n]; n rows a member, from position `start` on; more
    int32 [rows, H] is overwritten."""
    H, t, shift = c.H, w.table[EMBEDDING, 0], i32(c.matrix_shift)
    bias, unit, scale, seed_a = local((2, H), i32), local(H, i32), local(H, f32), u32(S + t[SEED_A])
    perturbed(c, w, EMB_BIAS, NO_LAYER, S, noisy, bias)
    hidden_side(c, w, t, S, unit, scale)
    if c.ntt:
        look_up_coefficients(c, w, tb, S, noisy, tokens, rows, n, start, more)
    else:
        for i in range(H):
            more[0, i] = 0                                   # serves all rows
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


@leaf
def hidden(c, w, tb, S, noisy, tokens, members, n, start, room):
    """room.x: ln_f of the last hidden state (+ 128) of every row (items 1 to 4 of SPEC 7). tokens int32 [>= start +
    n]."""
    rows, H, h = members * n, c.H, room.h
    embed(c, w, tb, S, noisy, tokens, n, start, rows, room.y, h)
    mlp(c, w, W_EMB_UP, EMB_BIAS_UP, W_EMB_DOWN, EMB_BIAS_DOWN, LN_INIT, LN_INIT_BIAS, NO_LAYER, S, noisy, rows, n, h)
    for layer in range(c.L):
        attention(c, w, tb, layer, S, noisy, members, n, start, room)
        mlp(c, w, W_UP, BIAS_UP, W_DOWN, BIAS_DOWN, LN_2, LN_2_BIAS, layer, S, noisy, rows, n, h)
    norm_w, norm_b = local((2, H), i32), local((2, H), i32)
    perturbed(c, w, LN_F, NO_LAYER, S, noisy, norm_w)
    perturbed(c, w, LN_F_BIAS, NO_LAYER, S, noisy, norm_b)
    for first in range(0, rows, GROUP):
        layer_norm(c, h, first, min(GROUP, rows - first), n, norm_w, norm_b, room.x, first)


@leaf
def logits(c, w, noisy, sides, T, first, x, count, z):
    """z int32 [>= count, V padded]: logits (item 4 of SPEC 7) of `count` rows of x, the first of which is row `first`
    of a pair of T positions a member; sides: of the embedding."""
    product(w, EMBEDDING, NO_LAYER, x, count, z)
    shift, shift_logit, sums = i32(c.matrix_shift), i32(c.logit), local(GROUP, i32)
    for r in range(count):
        sums[r] = project(c, x, r, sides, 0, sign(member(first + r, T))) if noisy else i32(0)
    for r in range(count):
        for v in range(c.V):
            z[r, v] = shift_right(noised(z[r, v], sums[r], sides.columns[0, v], shift), shift_logit)


@leaf
def run_window(c, w, tb, windows, i, start, T, S, noisy, exp64, unit, losses, nats, room, z):
    """`run_windows` of window i."""
    members, seed = 2 if noisy else 1, u32(S + i)
    hidden(c, w, tb, seed, noisy, windows[i], members, T, start, room)
    sides = new_sides(1, c.H, c.V, c.H * c.scaled)
    draw_sides(c, w, EMBEDDING, NO_LAYER, seed, noisy, sides)
    for first in range(0, members * T, GROUP):
        count = min(GROUP, members * T - first)
        logits(c, w, noisy, sides, T, first, room.x[first:first + count], count, z)
        score(c, tb.exp, noisy, z, windows, i, first, count, start, T, exp64, unit, losses, nats)


@njit
def run_windows(c, w, tb, windows, start, keys, values, S, noisy, exp64, unit, losses, nats):
    """Evaluates windows int32 [n, start + T + 1] with `score`, one after the other, from position `start` on; int32
    [GROUP, V padded], whose row (T - 1) % GROUP has the logits after the last token. noisy: window i is read by the two
    members of pair seed S + i, else by the unperturbed model; drawn targets follow it. keys, values int8 [1 or L,
    members * (start + T), H]: the caches; one layer's worth is enough where nothing follows."""
    T = (windows.shape[1] - 1 - start) // (c.targets if noisy else 1)
    room = new_room(c, 2 * T if noisy else T, start + T, keys, values)
    z = empty((GROUP, (c.V + PANEL - 1) // PANEL * PANEL), i32)
    for i in range(windows.shape[0]):
        run_window(c, w, tb, windows, i, start, T, S, noisy, exp64, unit, losses, nats, room, z)
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
