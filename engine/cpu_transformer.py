"""The transformer on the CPU (SPEC 5, 7)."""

from collections import namedtuple

import numpy as np

from engine.cpu_compiler import inlined, inner, leaf, njit
from engine.cpu_kernels import (GROUP, NO_LAYER, SAME, add_residual, amax, copy_row, draw_norm, draw_sides, embed, i64,
                                largest, layer_norm, mlp, new_logits, new_sides, padded, product, score_rows, write_next)
from engine.cpu_rules import clip, f64, i32, shift_right, u32
from engine.simd import PANEL, ROWS, empty, exp_sum, local, tile
from model import parameters

_numbers = {p.name: i64(number) for number, p in enumerate(parameters.TABLE)}
LN_INIT = _numbers["ln_init"]
LN_1 = _numbers["ln_1"]
W_Q = _numbers["w_q"]
W_K = _numbers["w_k"]
W_V = _numbers["w_v"]
W_O = _numbers["w_o"]
LN_2 = _numbers["ln_2"]
SUMMED = 1 << 16            # positions whose values, times byte limbs of their weights, fit an int32 sum
# Memory for rows of up to two members and `columns` positions of context, both padded; some arrays have two names, for
# two types of element. h int8 [rows, H]: the hidden states; x, q uint8 and y int32 [rows, H]; pairs: y as int64; keys,
# values int8 [1 or L, members * positions, H]: a cache; key_words: keys as int32; value_bytes: values as uint8;
# packed_k, packed_v int8 [columns * D]: panels for `tile`; words_k: packed_k as int32 [columns / PANEL, D / 4, PANEL];
# words_v: packed_v as uint32 [D / PANEL, columns / 4, PANEL]; correction, weights int32 [columns]; scores int32 [ROWS,
# columns]; limbs uint8 [3, ROWS, columns]
Room = namedtuple("Room", ("h x q y pairs keys values key_words value_bytes packed_k packed_v words_k words_v "
                           "correction weights scores limbs"))


@inner
def new_room(c, rows, context, keys, values):
    D = c.HEAD_DIM
    columns = padded(context, PANEL)
    shape = (padded(rows, ROWS) + ROWS, c.HIDDEN_DIM)
    y = empty(shape, i32)
    k, v = empty(columns * D, np.int8), empty(columns * D, np.int8)
    return Room(empty(shape, np.int8), empty(shape, np.uint8), empty(shape, np.uint8), y, y.view(i64), keys, values,
                keys.view(i32), values.view(np.uint8), k, v, k.view(i32).reshape((columns // PANEL, D // 4, PANEL)),
                v.view(u32).reshape((D // PANEL, columns // 4, PANEL)), empty(columns, i32), empty(columns, i32),
                empty((ROWS, columns), i32), empty((3, ROWS, columns), np.uint8))


@inlined
def rotate(pairs, r, rope, t, bit):
    """Rotary embedding at position t of row r, in place; pairs int64 [rows, H / 2], two int32 each."""
    half = i64(1) << (bit - 1)
    for i in range(pairs.shape[1]):
        both, angle = pairs[r, i], rope[t, i]
        e, o = i64(i32(both)), both >> 32
        cos, sin = i64(i32(angle)), angle >> 32
        even, odd = (e * cos - o * sin + half) >> bit, (e * sin + o * cos + half) >> bit
        pairs[r, i] = (even & 0xFFFFFFFF) | (odd << 32)


@leaf
def pack_head(keys, words, values, first, context, packed_k, packed_v, correction):
    """Fills the panels of one head for `tile` with `context` rows from `first` on: packed_k int32 [columns / PANEL,
    D / 4, PANEL] with the keys as columns, packed_v uint32 [D / PANEL, columns / 4, PANEL] with the values as rows,
    correction int32 [columns]. keys int8 and words int32, the same memory, and values uint8 have a row a position and
    begin with this head."""
    D = 4 * packed_k.shape[1]
    for p in range(context):
        key, four = keys[first + p], words[first + p]
        column = packed_k[p // PANEL, :, p % PANEL]
        total = i32(0)
        for d in range(D):
            total = i32(total + key[d])
        correction[p] = -128 * total
        for d in range(D // 4):
            column[d] = four[d]
    for p in range(0, context, 4):
        row, last = first + p, first + context - 1                 # positions past the context have no weight
        for panel in range(D // PANEL):
            out, here = packed_v[panel, p // 4], values[:, panel * PANEL:]
            v_0, v_1 = here[row], here[min(row + 1, last)]
            v_2, v_3 = here[min(row + 2, last)], here[min(row + 3, last)]
            for d in range(PANEL):
                out[d] = u32(v_0[d]) | u32(v_1[d]) << u32(8) | u32(v_2[d]) << u32(16) | u32(v_3[d]) << u32(24)


@leaf
def weighted_mean(weighted, total, out):
    """out uint8 [D] = clip(weighted / total) + 128, truncated: float64 as in `divide`, exact for these sums."""
    reciprocal = 1.0 / f64(total)
    for d in range(out.size):
        size = i32((abs(weighted[d]) + 0.5) * reciprocal)
        out[d] = clip(size if weighted[d] >= 0 else i32(-size)) + 128


@leaf
def attend(c, room, slot, cache_row, first_row, start, n):
    """Causal attention of one member: its queries room.q (+ 128) from first_row on stand at positions start..start + n
    - 1; its keys and values begin at cache_row; room.x (+ 128) is filled.

    Scores are products with the packed keys; the weights (up to 19 bits) times the values are three exact products of
    byte limbs."""
    D, H = c.HEAD_DIM, c.HIDDEN_DIM
    columns, scores = room.correction.size, room.scores
    limbs, weights = room.limbs, room.weights
    sums, weighted = local((3, ROWS, D), i32), local((ROWS, D), f64)
    totals, nothing = local(ROWS, i64), local(PANEL, i32)
    shift = c.SHIFT_ATTN
    for p in range(PANEL):
        nothing[p] = 0
    for head in range(c.N_HEADS):
        base = head * D
        pack_head(room.keys[slot, :, base:], room.key_words[slot, :, base // 4:], room.value_bytes[slot, :, base:],
                  cache_row, start + n, room.words_k, room.words_v, room.correction)
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
                totals[r] = exp_sum(c.exp, 0, c.short_exp, top, shift, scores, r * columns, seen, weights, 0, 1)
                for p in range(seen, wide):
                    weights[p] = 0
                for p in range(wide):
                    limbs[0, r, p] = weights[p]              # its low byte
                    limbs[1, r, p] = shift_right(weights[p], 8)
                    limbs[2, r, p] = shift_right(weights[p], 16)
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
                weighted_mean(weighted[r], totals[r], room.x[first_row + block + r, base:base + D])


@leaf
def attention(c, layer, S, noisy, members, n, start, room):
    """h = amax(h + attention block(h)) in place. This call's keys and values are put at positions start..start + n - 1
    of each member's cache."""
    H, rows = c.HIDDEN_DIM, members * n
    context, slot = room.keys.shape[1] // members, layer % room.keys.shape[0]
    x, y = room.x, room.y
    norm, sides = local((2, 2, H), i32), new_sides(1, H, H)
    draw_norm(c, LN_1, layer, S, noisy, norm)
    for first in range(0, rows, GROUP):
        layer_norm(c, room.h[first:], min(GROUP, rows - first), n - first, norm, x[first:])
    for param in range(W_Q, W_O):
        draw_sides(c, param, layer, S, noisy, sides)
        product(c, param, layer, sides, noisy, x, rows, n, y)
        for m in range(members):
            for t in range(0, n, GROUP):
                count = min(GROUP, n - t)
                first, o = m * n + t, m * context + start + t
                for r in range(count if param != W_V else 0):
                    rotate(room.pairs, first + r, c.rope, start + t + r, c.ROPE_SCALE_BIT)
                if param == W_Q:
                    amax(y, first, count, room.q, first, 128)
                elif param == W_K:
                    amax(y, first, count, room.keys[slot], o, 0)
                else:
                    amax(y, first, count, room.values[slot], o, 0)
    for m in range(members):
        attend(c, room, slot, m * context, m * n, start, n)
    draw_sides(c, W_O, layer, S, noisy, sides)
    product(c, W_O, layer, sides, noisy, x, rows, n, y)
    for first in range(0, rows, GROUP):
        add_residual(room.h[first:], min(GROUP, rows - first), n - first, y[first:], c.SHIFT_OUT, None)


@leaf
def read(c, S, noisy, tokens, apart, n, start, room):
    """Fills room.h with the last hidden states of positions start..start + n - 1 of both members of a pair, or of one
    sequence, as `embed` takes them."""
    members = 1 + noisy
    embed(c, S, noisy, tokens, apart, n, start, members * n, room.h, None, i64(0))
    mlp(c, LN_INIT, NO_LAYER, S, noisy, members * n, n, room.h, None)
    for layer in range(c.N_LAYERS):
        attention(c, layer, S, noisy, members, n, start, room)
        mlp(c, LN_2, layer, S, noisy, members * n, n, room.h, None)


@njit
def run_windows(c, losses, nats, windows, start, T, S, noisy, seen):
    """Evaluates windows int32 [n, >= start + T + 1] with `score_rows`, one after the other, from position `start` on.
    noisy: window i is read by the two members of pair seed S + i, else by the unperturbed model. seen: None."""
    members = 1 + noisy
    size = (1, members * (start + T), c.HIDDEN_DIM)
    room = new_room(c, members * T, start + T, empty(size, np.int8), empty(size, np.int8))
    z = new_logits(c)
    for q in range(windows.shape[0]):
        seed = u32(S + q)
        read(c, seed, noisy, windows[q], SAME, T, start, room)
        score_rows(c, losses[q], nats, windows, q, seed, noisy, start, T, room.h, members * T, z, seen)


@njit
def write_texts(c, writing, texts, start, end, room, cache, S, noisy, seen):
    """Fills texts int32 [sequences, room], or with noise [pairs, 2 * room], behind their prompts, up to position `end`,
    one row after the other; `start` tokens of a single row may be read already. cache int8 [2, L, members * room, H];
    c: with tables for `room` positions. seen: None."""
    members, z = 1 + noisy, new_logits(c)
    last = empty((2, c.HIDDEN_DIM), np.int8)
    for q in range(texts.shape[0]):
        seed, t, first = u32(S + q), start, q * members
        least = start if start else writing.lengths[first:first + members].min()
        memory = new_room(c, members * max(i64(1), least - start), room, cache[0], cache[1])
        while t + 1 < end:
            n = max(i64(1), least - t)
            read(c, seed, noisy, texts[q], room, n, t, memory)
            t += n
            for m in range(members):
                copy_row(memory.h, m * n + n - 1, last, m)
            write_next(c, writing, first, seed, noisy, texts[q], t - 1, room, last, z)


def memory(cfg, members, sequences, room):
    """What `write_texts` keeps from position to position."""
    return np.zeros((2, cfg.N_LAYERS, members * room, cfg.HIDDEN_DIM), np.int8)
