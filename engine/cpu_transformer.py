"""The transformer on the CPU (SPEC 5, 7)."""

from collections import namedtuple

import numpy as np

from engine.cpu_credits import (handed, kept_rows, note, note_embedding, nothing_below, scale_credit, scales_of, size_of,
                                through_mlp, through_norm)
from engine.cpu_kernels import (CLEAN, GROUP, NO_LAYER, NORMED_1, ONE, SLOT, add_below, add_residual, amax, copy_row,
                                draw_norm, draw_sides, embed, i64, keep, keep_scales, largest, layer_norm, mlp,
                                new_logits, new_sides, padded, product, score_rows, write_next)
from engine.cpu_rules import (attention_share, clip, exponent, f32, f64, float_of, i32, inlined, inner, leaf, njit,
                              power, shift_right, u32, whole)
from engine.simd import PANEL, ROWS, entries, local
from model import parameters, units

_numbers = {p.name: i64(number) for number, p in enumerate(parameters.TABLE)}
LN_INIT = _numbers["ln_init"]
LN_1 = _numbers["ln_1"]
W_Q = _numbers["w_q"]
W_K = _numbers["w_k"]
W_V = _numbers["w_v"]
W_O = _numbers["w_o"]
LN_2 = _numbers["ln_2"]
QUERY, KEY, VALUE, ATTENDED, OF_QUERY, OF_OUTPUT = (
    SLOT[name] for name in ("query", "key", "value", "attended", "of_query", "of_output"))
WINDOW_BITS, WINDOW_MOST = i32(units.WINDOW_BITS), i32((1 << units.WINDOW_BITS) - 1)
SHARE_BITS = 12             # of `attention_share`
SUMMED = 32                 # positions whose values times their weights, of 19 bits, have an int32 sum
# Memory for rows of up to two members. h and q int8, x uint8, y int32 [rows, H], and y as int64: pairs; keys and values
# int8 [1 or L, members, positions, H]: a cache; scores int32 [1, positions] and weights int32 [positions]: of a query
Room = namedtuple("Room", "h x q y pairs keys values scores weights")


@inner
def new_room(c, rows, cache):
    """cache: int8 [2, 1 or L, members, positions, H], positions a multiple of PANEL."""
    shape, positions = (padded(rows, ROWS) + ROWS, c.HIDDEN_DIM), cache.shape[3]
    y = np.empty(shape, i32)
    return Room(np.empty(shape, np.int8), np.empty(shape, np.uint8), np.empty(shape, np.int8), y, y.view(i64), cache[0],
                cache[1], np.empty((1, positions + PANEL), i32), np.empty(positions + PANEL, i32))


@inlined
def rotate(pairs, r, rope, t, bit, turn):
    """Rotary embedding at position t of row r, in place; pairs int64 [rows, H / 2], two int32 each. turn: 1, or -1 to
    turn back."""
    half = i64(1) << (bit - 1)
    for i in range(pairs.shape[1]):
        both, angle = pairs[r, i], rope[t, i]
        e, o = i64(i32(both)), both >> 32
        cos, sin = i64(i32(angle)), turn * (angle >> 32)
        even, odd = (e * cos - o * sin + half) >> bit, (e * sin + o * cos + half) >> bit
        pairs[r, i] = (even & 0xFFFFFFFF) | (odd << 32)


@leaf
def attend(c, room, layer, m, first_row, start, n, kept):
    """Causal attention of member m: its queries room.q from first_row on stand at positions start..start + n - 1;
    room.x (+ 128) is filled."""
    D, slot = c.HEAD_DIM, layer % room.keys.shape[0]
    keys, values = room.keys[slot, m], room.values[slot, m]
    scores, weights = room.scores, room.weights
    part, sums = local(D, i32), local(D, f64)
    for head in range(c.N_HEADS):
        base = head * D
        for t in range(n):
            row, visible = first_row + t, start + t + 1
            for d in range(D):
                sums[d] = 0.0
            for p in range(visible):
                score = i32(0)
                for d in range(D):
                    score = i32(score + i32(i32(room.q[row, base + d]) * i32(keys[p, base + d])))
                scores[0, p] = score
            top = shift_right(largest(scores, 0, visible), c.SHIFT_ATTN)
            total = entries(c.exp, 0, top, c.SHIFT_ATTN, scores, 0, visible, weights, 0)
            for p in range(visible if kept.shares.size else 0):
                kept.shares[layer, head, t, p] = attention_share(weights[p], total)
            for first in range(0, visible, SUMMED):
                for d in range(D):
                    part[d] = 0
                for p in range(first, min(visible, first + SUMMED)):
                    for d in range(D):
                        part[d] = i32(part[d] + i32(weights[p] * i32(values[p, base + d])))
                for d in range(D):                           # exact: below 2^53 for 2^28 positions
                    sums[d] += f64(part[d])
            reciprocal = 1.0 / f64(total)
            for d in range(D):                               # truncated as in `divide`, exact for these sums
                size = i32((abs(sums[d]) + 0.5) * reciprocal)
                room.x[row, base + d] = clip(size if sums[d] >= 0 else i32(-size)) + 128


@leaf
def attention(c, layer, S, noisy, members, n, start, room, kept):
    """h = amax(h + attention block(h)) in place. This call's keys and values are put at positions start..start + n - 1
    of each member's cache."""
    H, rows = c.HIDDEN_DIM, members * n
    slot = layer % room.keys.shape[0]
    x, y = room.x, room.y
    norm, sides, one = local((2, 2, H), i32), new_sides(1, H, H), local((GROUP, H), np.int8)
    scales = local(GROUP, f32)
    draw_norm(c, LN_1, layer, S, noisy, norm)
    for first in range(0, rows, GROUP):
        count = min(GROUP, rows - first)
        layer_norm(c, room.h[first:], count, n - first, norm, x[first:], scales)
        keep_scales(kept, LN_1, layer, first, count, scales)
    keep(kept, NORMED_1, layer, i64(0), ONE, rows, x)
    for param in range(W_Q, W_O):
        draw_sides(c, param, layer, S, noisy, sides)
        product(c, param, layer, sides, noisy, x, rows, n, y)
        for m in range(members):
            for t in range(0, n, GROUP):
                count, first = min(GROUP, n - t), m * n + t
                for r in range(count if param != W_V else 0):
                    rotate(room.pairs, first + r, c.rope, start + t + r, c.ROPE_SCALE_BIT, i64(1))
                amax(y, first, count, one, scales)
                keep(kept, QUERY + param - W_Q, layer, first, ONE, count, one)
                keep_scales(kept, param, layer, first, count, scales)
                for r in range(count):
                    for i in range(H):
                        if param == W_Q:
                            room.q[first + r, i] = one[r, i]
                        elif param == W_K:
                            room.keys[slot, m, start + t + r, i] = one[r, i]
                        else:
                            room.values[slot, m, start + t + r, i] = one[r, i]
    for m in range(members):
        attend(c, room, layer, m, m * n, start, n, kept)
    keep(kept, ATTENDED, layer, i64(0), ONE, rows, x)
    draw_sides(c, W_O, layer, S, noisy, sides)
    product(c, W_O, layer, sides, noisy, x, rows, n, y)
    for first in range(0, rows, GROUP):
        count = min(GROUP, rows - first)
        add_residual(room.h[first:], count, n - first, y[first:], c.SHIFT_OUT, None, scales)
        keep_scales(kept, W_O, layer, first, count, scales)


@leaf
def read(c, S, noisy, tokens, n, start, room, kept):
    """Fills room.h with the last hidden states of positions start..start + n - 1 of both members of a pair, or of one
    sequence, as `embed` takes them."""
    members = 1 + noisy
    embed(c, S, noisy, tokens, n, start, room.h)
    mlp(c, LN_INIT, NO_LAYER, S, noisy, members * n, n, room.h, kept, c.N_LAYERS)
    for layer in range(c.N_LAYERS):
        attention(c, layer, S, noisy, members, n, start, room, kept)
        mlp(c, LN_2, layer, S, noisy, members * n, n, room.h, kept, i64(layer))


@njit
def run_windows(c, losses, nats, windows, start, T, S, noisy, kept):
    """Evaluates windows int32 [n, >= start + T + 1] with `score_rows`, one after the other, from position `start` on.
    noisy: window i is read by the two members of pair seed S + i, else by the unperturbed model. kept: filled by one
    window."""
    members = 1 + noisy
    room = new_room(c, members * T, np.empty((2, 1, members, padded(start + T, PANEL), c.HIDDEN_DIM), np.int8))
    z = new_logits(c, i32)
    for q in range(windows.shape[0]):
        seed = u32(S + q)
        read(c, seed, noisy, windows[q], T, start, room, kept)
        score_rows(c, losses[q], nats, windows, q, seed, noisy, start, T, room.h, members * T, z, kept)


@njit
def write_texts(c, writing, texts, start, end, cache, kept):
    """Fills texts int32 [sequences, room] behind their prompts, up to position `end`, one after the other; `start`
    tokens of a single one may be read already. cache: of `memory`; c: with tables for `room` positions. kept: an
    empty one."""
    z, last = new_logits(c, i32), np.empty((1, c.HIDDEN_DIM), np.int8)
    for q in range(texts.shape[0]):
        t, least = start, start if start else writing.lengths[q]
        memory = new_room(c, max(i64(1), least - start), cache)
        while t + 1 < end:
            n = max(i64(1), least - t)
            read(c, u32(0), CLEAN, texts[q], n, t, memory, kept)
            t += n
            copy_row(memory.h, n - 1, last, 0)
            write_next(c, writing, q, texts[q:q + 1], t - 1, last, z)


def memory(cfg, sequences, room):
    """What `write_texts` keeps from position to position."""
    return np.zeros((2, cfg.N_LAYERS, 1, -(-room // PANEL) * PANEL, cfg.HIDDEN_DIM), np.int8)


# --- unit trials (SPEC 21) --------------------------------------------------------------------------------------------

# Memory for one window: credits float32 [3, T, H]: of queries (those of what is read, first), keys and values; sums int32
# [2, T, H] and as int64: pairs; of one head q, k, v, y and whole int32 [T, D], worth float32 [T, T] and trials int32 [T,
# T] of scores
Below = namedtuple("Below", "credits sums pairs q k v y whole worth trials")


@inner
def new_below(c, T):
    H, D = c.HIDDEN_DIM, c.HEAD_DIM
    sums = np.empty((2, T, H), i32)
    return Below(np.empty((3, T, H), f32), sums, sums.view(i64), np.empty((T, D), i32), np.empty((T, D), i32),
                 np.empty((T, D), i32), np.empty((T, D), i32), np.empty((T, D), i32), np.empty((T, T), f32),
                 np.empty((T, T), i32))


@inlined
def of_head(kept, name, layer, base, moved, out):
    """out int32 [T, D]: what was kept of a head; moved: 128 where it is + 128, or 0."""
    place = kept.places[name, layer] + base
    for t in range(out.shape[0]):
        row = kept.bytes[t, place:]
        for d in range(out.shape[1]):
            out[t, d] = i32(row[d]) - moved if moved else i32(np.int8(row[d]))


@inlined
def rounded(credits, rows, first, cols, triangle, out):
    """out int32 [rows, cols]: credits float32 [rows, first + cols], from column `first` on, as whole numbers, and their
    exponent. triangle: of row t only the first t + 1 columns."""
    top = i32(0)
    for t in range(rows):
        row = credits[t:, first:]
        top = max(top, size_of(row, 0, t + 1 if triangle else cols))
    e = exponent(float_of(top), WINDOW_BITS)
    unit = power(i32(-e))
    for t in range(rows):
        row = credits[t, first:]
        for d in range(t + 1 if triangle else cols):
            out[t, d] = whole(row[d], unit, WINDOW_MOST)
    return e


@leaf
def through_scores(c, kept, layer, b, head):
    """From the credits b.credits[0] of what a head reads to those of its values, and sums of its queries and keys, still
    turned; the exponent of those."""
    T, D, shares = b.worth.shape[0], c.HEAD_DIM, kept.shares[layer, head]
    base, sums = head * D, local(D, f64)
    of_head(kept, QUERY, layer, base, i32(0), b.q)
    of_head(kept, KEY, layer, base, i32(0), b.k)
    of_head(kept, VALUE, layer, base, i32(0), b.v)
    of_head(kept, ATTENDED, layer, base, i32(128), b.y)
    e = rounded(b.credits[0], T, base, D, False, b.whole)
    for t in range(T):
        # a score tried alone: more of one position, less of what is read now
        for s in range(t + 1):
            worth = i32(0)
            for d in range(D):
                worth += i32(b.whole[t, d] * i32(b.v[s, d] - b.y[t, d]))
            b.worth[t, s] = f32(f32(worth) * f32(shares[t, s]))
    of_trials = rounded(b.worth, T, i64(0), T, True, b.trials)
    for t in range(T):
        of_query, of_key, of_value = b.sums[0, t, base:], b.sums[1, t, base:], b.credits[2, t, base:]
        for d in range(D):
            of_query[d], of_key[d], sums[d] = 0, 0, 0.0
        for s in range(t + 1):
            for d in range(D):
                of_query[d] += i32(b.trials[t, s] * b.k[s, d])
        for later in range(t, T):
            for d in range(D):
                of_key[d] += i32(b.trials[later, t] * b.q[later, d])
            for d in range(D):                               # exact: below 2^53
                sums[d] += f64(i32(i32(shares[later, t]) * b.whole[later, d]))
        for d in range(D):
            of_value[d] = f32(f32(sums[d]) * power(i32(e - SHARE_BITS)))
    return i32(e + of_trials)


@leaf
def through_attention(c, kept, layer, b):
    """The residual stream's credits below attention, in place."""
    H, T, D = c.HIDDEN_DIM, b.worth.shape[0], c.HEAD_DIM
    x, n, y, below = local((GROUP, H), np.uint8), local((GROUP, H), np.uint8), local((GROUP, H), i32), local((GROUP, H), f32)
    along, scales, exponents = local(GROUP, f32), local(GROUP, f32), local(GROUP, i32)
    unit = local(c.N_HEADS, f32)
    for first in range(0, T, GROUP):
        count = min(GROUP, T - first)
        scale_credit(kept, W_O, layer, first, count)
        note(kept, OF_OUTPUT, layer, first, count, kept.credit[first:], x, exponents)
        handed(c, W_O, layer, x, exponents, count, c.SHIFT_OUT, i64(1), y, scales)
        for r in range(count):
            row = b.credits[0, first + r]
            for i in range(H):
                row[i] = f32(f32(y[r, i]) * scales[r])
    for head in range(c.N_HEADS):
        unit[head] = power(i32(through_scores(c, kept, layer, b, head) - i32(SHARE_BITS + c.SHIFT_ATTN)))
    for part in range(2):
        for t in range(T):
            rotate(b.pairs[part], t, c.rope, t, c.ROPE_SCALE_BIT, i64(-1))
            for head in range(c.N_HEADS):
                row, turned = b.credits[part, t, head * D:], b.sums[part, t, head * D:]
                for d in range(D):
                    row[d] = f32(f32(f32(turned[d]) * unit[head]) * c.per_nat)
    for first in range(0, T, GROUP):
        count = min(GROUP, T - first)
        kept_rows(kept, NORMED_1, layer, first, count, n)
        nothing_below(below, along)
        for part in range(3):
            credits = b.credits[part, first:]
            scales_of(kept, W_Q + part, layer, first, count, scales)
            for r in range(count):
                for i in range(H):
                    credits[r, i] = f32(credits[r, i] * scales[r])
            note(kept, OF_QUERY + part, layer, first, count, credits, x, exponents)
            handed(c, W_Q + part, layer, x, exponents, count, i64(0), i64(1), y, scales)
            add_below(y, count, scales, n, below, along)
        through_norm(c, kept, LN_1, layer, first, count, below, along, n)


@njit
def hand_down(c, kept, tokens):
    """From the credits that `score_rows` put into a Kept to those of all units; tokens int32 [1, T]."""
    T = tokens.shape[1]
    b = new_below(c, T)
    for layer in range(c.N_LAYERS - 1, -1, -1):
        through_mlp(c, kept, LN_2, layer, layer, T)
        through_attention(c, kept, layer, b)
    through_mlp(c, kept, LN_INIT, NO_LAYER, c.N_LAYERS, T)
    note_embedding(c, kept, T)
