"""The transformer on the CPU (SPEC 5, 7)."""

from collections import namedtuple

import numpy as np

from engine.cpu_kernels import (CLEAN, GROUP, NO_LAYER, add_residual, amax, copy_row, disturb, draw_norm, draw_sides,
                                embed, i64, keep, largest, layer_norm, mlp, new_logits, new_sides, padded, product,
                                score_rows, write_next)
from engine.cpu_rules import attention_share, clip, f64, i32, inlined, inner, leaf, njit, shift_right, u32
from engine.simd import PANEL, ROWS, entries, local
from model import parameters

_numbers = {p.name: i64(number) for number, p in enumerate(parameters.TABLE)}
LN_INIT = _numbers["ln_init"]
LN_1 = _numbers["ln_1"]
W_Q = _numbers["w_q"]
W_K = _numbers["w_k"]
W_V = _numbers["w_v"]
W_O = _numbers["w_o"]
LN_2 = _numbers["ln_2"]
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
def attend(c, room, layer, m, first_row, start, n, record, at):
    """Causal attention of member m: its queries room.q from first_row on stand at positions start..start + n - 1;
    room.x (+ 128) is filled. record: it has these queries from row `at` on."""
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
            if at < record.tokens.size:
                for p in range(visible):
                    record.shares[at // record.T, layer, head, t, p] = attention_share(weights[p], total)
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
def attention(c, layer, S, noisy, members, n, start, room, record, at):
    """h = amax(h + attention block(h)) in place. This call's keys and values are put at positions start..start + n - 1
    of each member's cache. record: as `read` takes it."""
    H, rows = c.HIDDEN_DIM, members * n
    slot = layer % room.keys.shape[0]
    x, y = room.x, room.y
    norm, sides, one = local((2, 2, H), i32), new_sides(1, H, H), local((GROUP, H), np.int8)
    draw_norm(c, LN_1, layer, S, noisy, norm)
    for first in range(0, rows, GROUP):
        layer_norm(c, room.h[first:], min(GROUP, rows - first), n - first, norm, x[first:])
    keep(record, W_Q, layer, at, rows, x)
    for param in range(W_Q, W_O):
        draw_sides(c, param, layer, S, noisy, sides)
        product(c, param, layer, sides, noisy, x, rows, n, y)
        for m in range(members):
            for t in range(0, n, GROUP):
                count, first = min(GROUP, n - t), m * n + t
                for r in range(count if param != W_V else 0):
                    rotate(room.pairs, first + r, c.rope, start + t + r, c.ROPE_SCALE_BIT)
                amax(y, first, count, one)
                disturb(c, record, param, layer, at + first, count, i32(1), i32(127), i32(127), one)
                for r in range(count):
                    for i in range(H):
                        if param == W_Q:
                            room.q[first + r, i] = one[r, i]
                        elif param == W_K:
                            room.keys[slot, m, start + t + r, i] = one[r, i]
                        else:
                            room.values[slot, m, start + t + r, i] = one[r, i]
    for m in range(members):
        attend(c, room, layer, m, m * n, start, n, record, at)
    keep(record, W_O, layer, at, rows, x)
    draw_sides(c, W_O, layer, S, noisy, sides)
    product(c, W_O, layer, sides, noisy, x, rows, n, y)
    for first in range(0, rows, GROUP):
        add_residual(room.h[first:], min(GROUP, rows - first), n - first, y[first:], c.SHIFT_OUT, None)
    disturb(c, record, W_O, layer, at, rows, i32(1), i32(127), i32(127), room.h)


@leaf
def read(c, S, noisy, tokens, n, start, room, record, at):
    """Fills room.h with the last hidden states of positions start..start + n - 1 of both members of a pair, or of one
    sequence, as `embed` takes them. record: it has the sequence from row `at` on."""
    members = 1 + noisy
    embed(c, S, noisy, tokens, n, start, room.h, record, at)
    mlp(c, LN_INIT, NO_LAYER, S, noisy, members * n, n, room.h, record, at)
    for layer in range(c.N_LAYERS):
        attention(c, layer, S, noisy, members, n, start, room, record, at)
        mlp(c, LN_2, layer, S, noisy, members * n, n, room.h, record, at)


@njit
def run_windows(c, losses, nats, windows, start, T, S, noisy, record):
    """Evaluates windows int32 [n, >= start + T + 1] with `score_rows`, one after the other, from position `start` on.
    noisy: window i is read by the two members of pair seed S + i, else by the unperturbed model. record: these
    sequences fill it."""
    members = 1 + noisy
    room = new_room(c, members * T, np.empty((2, 1, members, padded(start + T, PANEL), c.HIDDEN_DIM), np.int8))
    z = new_logits(c, i32)
    for q in range(windows.shape[0]):
        seed = u32(S + q)
        read(c, seed, noisy, windows[q], T, start, room, record, q * T)
        score_rows(c, losses[q], nats, windows, q, seed, noisy, start, T, room.h, members * T, z, record, q * T)


@njit
def write_texts(c, writing, texts, start, end, cache, record):
    """Fills texts int32 [sequences, room] behind their prompts, up to position `end`, one after the other; `start`
    tokens of a single one may be read already. cache: of `memory`; c: with tables for `room` positions. record:
    an empty one."""
    z, last = new_logits(c, i32), np.empty((1, c.HIDDEN_DIM), np.int8)
    for q in range(texts.shape[0]):
        t, least = start, start if start else writing.lengths[q]
        memory = new_room(c, max(i64(1), least - start), cache)
        while t + 1 < end:
            n = max(i64(1), least - t)
            read(c, u32(0), CLEAN, texts[q], n, t, memory, record, i64(0))
            t += n
            copy_row(memory.h, n - 1, last, 0)
            write_next(c, writing, q, texts[q:q + 1], t - 1, last, z)


def memory(cfg, sequences, room):
    """What `write_texts` keeps from position to position."""
    return np.zeros((2, cfg.N_LAYERS, 1, -(-room // PANEL) * PANEL, cfg.HIDDEN_DIM), np.int8)
