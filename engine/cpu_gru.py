"""The recurrent model on the CPU (SPEC 13), with the products, noise and votes of `engine.cpu_kernels`.

A layer reads the whole window before the next one begins, so that all products but those with the state run over
members times positions; those with the state run over the members of a block, position by position. With noise,
sequences 2 i and 2 i + 1 are the even and the odd member of pair i; without noise a sequence is a window.
"""

import numpy as np

from engine.cpu_credits import handed, kept_rows, note, note_embedding, nothing_below, through_mlp, through_norm
from engine.cpu_kernels import (CLEAN, GROUP, NORMED_1, ONE, SLOT, TOGETHER, add_below, copy_row, divided, draw_norm,
                                draw_sides, embed, i64, keep, keep_scales, layer_norm, mlp, new_logits, new_sides,
                                nothing_kept, perturbed, product, score_rows, write_next)
from engine.cpu_rules import clip, f32, gate, gated, i32, leaf, next_state, njit, u32
from engine.simd import ROWS, local
from model import parameters

_numbers = {p.name: i64(number) for number, p in enumerate(parameters.GRU_TABLE)}
LN_1 = _numbers["ln_1"]
W_F = _numbers["w_f"]
U_F = _numbers["u_f"]
B_F = _numbers["b_f"]
W_H = _numbers["w_h"]
U_H = _numbers["u_h"]
B_H = _numbers["b_h"]
LN_2 = _numbers["ln_2"]
STATE, GATE, GATED, CANDIDATE, OF_GATE, OF_CANDIDATE = (
    SLOT[name] for name in ("state", "gate", "gated", "candidate", "of_gate", "of_candidate"))


@leaf
def recur(c, layer, S, noisy, tokens, members, n, gates, candidates, h, x, kept):
    """The layer's state through n positions: x[s * n + t] = clip(x + h after t), and h int8 [sequences padded to ROWS,
    H] goes on. gates, candidates int8 [sequences * n, H]: W_f n and W_h n."""
    H, d = c.HIDDEN_DIM, i32(c.divisor)
    sequences, padded = tokens.shape[0] * members, h.shape[0]
    pairs = tokens.shape[0] if noisy else 1
    sides_f, sides_h = new_sides(pairs, H, H), new_sides(pairs, H, H)
    bias_f, bias_h = local((pairs, 2, H), i32), local((pairs, 2, H), i32)
    for q in range(pairs):
        perturbed(c, B_F, layer, u32(S + q), noisy, bias_f[q])
        perturbed(c, B_H, layer, u32(S + q), noisy, bias_h[q])
    draw_sides(c, U_F, layer, S, noisy, sides_f)
    draw_sides(c, U_H, layer, S, noisy, sides_h)
    state, past = local((padded, H), np.uint8), local((padded, H), np.uint8)
    open_, y = local((padded, H), i32), local((padded, H), i32)
    for t in range(n):
        for s in range(sequences):
            if tokens[s // members, t] == 0:
                for i in range(H):
                    h[s, i] = 0
            for i in range(H):
                state[s, i] = h[s, i] + 128
        product(c, U_F, layer, sides_f, noisy, state, sequences, ONE, y)
        divided(y, sequences, d, 0, y)
        for s in range(sequences):
            q, m = (s // 2, s & 1) if noisy else (0, 0)
            r = s * n + t
            for i in range(H):
                f = gate(i32(gates[r, i]), i32(y[s, i] + bias_f[q, m, i]))
                open_[s, i] = f
                past[s, i] = gated(f, i32(h[s, i])) + 128
        product(c, U_H, layer, sides_h, noisy, past, sequences, ONE, y)
        divided(y, sequences, d, 0, y)
        for s in range(sequences):
            q, m = (s // 2, s & 1) if noisy else (0, 0)
            r = s * n + t
            for i in range(H):
                new = clip(i32(candidates[r, i] + y[s, i] + bias_h[q, m, i]))
                after = next_state(open_[s, i], i32(h[s, i]), new)
                h[s, i] = after
                x[r, i] = clip(i32(x[r, i] + after))
                y[s, i] = new + 128
        for name, values in ((STATE, state), (GATED, past)):
            keep(kept, name, layer, t, n, sequences, values)
        for name, values in ((GATE, open_), (CANDIDATE, y)):
            keep(kept, name, layer, t, n, sequences, values)


@leaf
def gates_of(c, layer, S, noisy, rows, per_member, x, gates, candidates, kept):
    """gates, candidates = W_f n, W_h n with n = ln_1(x), for the `rows` first rows of x, which belong to one pair (or
    are without noise on weights)."""
    H, d = c.HIDDEN_DIM, i32(c.divisor)
    norm = local((2, 2, H), i32)
    n, y, means = local((GROUP, H), np.uint8), local((GROUP, H), i32), local(GROUP, f32)
    sides_f, sides_h = new_sides(1, H, H), new_sides(1, H, H)
    draw_norm(c, LN_1, layer, S, noisy, norm)
    draw_sides(c, W_F, layer, S, noisy, sides_f)
    draw_sides(c, W_H, layer, S, noisy, sides_h)
    for at in range(0, rows, GROUP):
        count, left = min(GROUP, rows - at), per_member - at
        layer_norm(c, x[at:], count, left, norm, n, means)
        keep(kept, NORMED_1, layer, at, ONE, count, n)
        keep_scales(kept, LN_1, layer, at, count, means)
        product(c, W_F, layer, sides_f, noisy, n, count, left, y)
        divided(y, count, d, 0, gates[at:])
        product(c, W_H, layer, sides_h, noisy, n, count, left, y)
        divided(y, count, d, 0, candidates[at:])


@leaf
def read(c, S, noisy, tokens, n, state, gates, candidates, x, kept):
    """x int8 [sequences * n, H]: the last layer's output for the first n of tokens int32 [sequences, or pairs with
    noise, >= n]; state int8 [L, sequences padded to ROWS, H] goes on; gates and candidates, as large as x, are
    overwritten. S: seed of the first pair."""
    members = 1 + noisy
    units, rows = (tokens.shape[0], 2 * n) if noisy else (1, tokens.shape[0] * n)    # rows that share their noise
    for q in range(tokens.shape[0]):
        embed(c, u32(S + q), noisy, tokens[q], n, 0, x[q * members * n:])
    for layer in range(c.N_LAYERS):
        for q in range(units):
            gates_of(c, layer, u32(S + q), noisy, rows, n, x[q * rows:], gates[q * rows:], candidates[q * rows:], kept)
        recur(c, layer, S, noisy, tokens, members, n, gates, candidates, state[layer], x, kept)
        for q in range(units):
            mlp(c, LN_2, layer, u32(S + q), noisy, rows, n, x[q * rows:], kept, i64(layer))


@njit
def read_before(c, tokens, states, kept):
    """Moves states int8 [L, sequences padded to ROWS, H] by tokens int32 [sequences, n], which the unperturbed model
    reads. kept: an empty one."""
    size = (tokens.size, c.HIDDEN_DIM)
    read(c, u32(0), CLEAN, tokens[:, 0:], tokens.shape[1], states, np.empty(size, np.int8),
         np.empty(size, np.int8), np.empty(size, np.int8), kept)


@njit
def read_windows(c, losses, nats, windows, before, T, states, text_of, S, noisy, kept):
    """The part of `run_windows` after the first tokens. states int8 [L, texts padded to ROWS, H]: after them;
    text_of int64 [n]: which text a window has."""
    members = 1 + noisy
    n = min(TOGETHER, windows.shape[0]) if noisy else windows.shape[0]          # windows that are read together
    size = (n * members * T, c.HIDDEN_DIM)
    x, gates, candidates = np.empty(size, np.int8), np.empty(size, np.int8), np.empty(size, np.int8)
    state = np.zeros((c.N_LAYERS, -(-n * members // ROWS) * ROWS, c.HIDDEN_DIM), np.int8)
    z = new_logits(c, np.int8)
    for first in range(0, windows.shape[0], n):
        part = windows[first:first + n]
        for s in range(part.shape[0] * members):
            for layer in range(c.N_LAYERS):
                copy_row(states[layer], text_of[first + s // members], state[layer], s)
        read(c, u32(S + first), noisy, part[:, before:], T, state, gates, candidates, x, kept)
        units, rows = (part.shape[0], 2 * T) if noisy else (1, n * T)            # rows that share their noise
        for q in range(units):
            score_rows(c, losses[first + q], nats, part, q, u32(S + first + q), noisy, before, T, x[q * rows:], rows,
                       z, kept)


def run_windows(c, losses, nats, windows, before, T, S, noisy, kept):
    """Evaluates windows int32 [n, >= before + T + 1] with `score_rows`; some go through the positions together. noisy:
    window i is read by the two members of pair seed S + i, and its losses are losses[i]; else by the unperturbed model,
    and all are losses[0]. kept: filled by these windows. The unperturbed model reads the first `before` tokens, from
    a state of 0, once of all windows that begin with them."""
    texts, text_of = windows[:1, :0], np.zeros(len(windows), np.int64)
    if before:
        texts, text_of = np.unique(windows[:, :before], axis=0, return_inverse=True)
    states = memory(c, len(texts), before)
    if before:
        read_before(c, texts, states, nothing_kept(c))
    read_windows(c, losses, nats, windows, before, T, states, text_of, S, noisy, kept)


@njit
def write_texts(c, writing, texts, start, end, state, kept):
    """Fills texts int32 [sequences, room] behind their prompts, up to position `end`; `start` of their tokens are read
    already. state int8 [L, sequences padded to ROWS, H] goes on from zeros. kept: an empty one."""
    sequences, t = texts.shape[0], start
    least = start if start else writing.lengths.min()
    size = (sequences * max(i64(1), least - start), c.HIDDEN_DIM)
    x, gates, candidates = np.empty(size, np.int8), np.empty(size, np.int8), np.empty(size, np.int8)
    h, z = np.empty((sequences, c.HIDDEN_DIM), np.int8), new_logits(c, np.int8)
    while t + 1 < end:
        n = max(i64(1), least - t)
        read(c, u32(0), CLEAN, texts[:, t:], n, state, gates, candidates, x, kept)
        t += n
        for s in range(sequences):
            copy_row(x, s * n + n - 1, h, s)
        write_next(c, writing, i64(0), texts, t - 1, h, z)


def memory(c, sequences, room):
    """What `write_texts` keeps from position to position. c: a Model or Config."""
    return np.zeros((c.N_LAYERS, -(-sequences // ROWS) * ROWS, c.HIDDEN_DIM), np.int8)


# --- unit trials (SPEC 21) --------------------------------------------------------------------------------------------

@leaf
def carry_back(c, kept, layer, first, count, tokens, worth, of_gate, of_candidate):
    """The credits of `count` positions from row `first` of a window on, tokens int32 [>= count], last one first: of
    gates and candidates, float32 [>= count, H]. worth float32 [H] goes on: that of the state after them."""
    places = kept.places[:, layer]
    for t in range(count - 1, -1, -1):
        row, alive = kept.bytes[first + t], f32(tokens[t] != 0)
        gates, states, candidates = row[places[GATE]:], row[places[STATE]:], row[places[CANDIDATE]:]
        for i in range(worth.size):
            of_state = f32(kept.credit[first + t, i] + worth[i])
            f, h, new = i32(gates[i]), i32(states[i]) - i32(128), i32(candidates[i]) - i32(128)
            worth[i] = f32(f32(of_state * f32(f32(i32(256) - f) * f32(1 / 256))) * alive)
            by_gate, by_candidate = i32(i32(new - h) * c.trials[0, f + 1]), i32(f * c.trials[0, candidates[i]])
            of_gate[t, i] = f32(f32(of_state * f32(by_gate)) * f32(2 ** -11))
            of_candidate[t, i] = f32(f32(of_state * f32(by_candidate)) * f32(2 ** -11))


@leaf
def through_states(c, kept, layer, tokens):
    """The residual stream's credits below the states of a layer; tokens int32 [windows, T]."""
    H, T = c.HIDDEN_DIM, tokens.shape[1]
    of_gate, of_candidate = local((GROUP, H), f32), local((GROUP, H), f32)
    x, n, y = local((GROUP, H), np.uint8), local((GROUP, H), np.uint8), local((GROUP, H), i32)
    below, worth = local((GROUP, H), f32), local(H, f32)
    along, scales, exponents = local(GROUP, f32), local(GROUP, f32), local(GROUP, i32)
    for s in range(tokens.shape[0]):
        for i in range(H):
            worth[i] = f32(0)
        for end in range(T, 0, -GROUP):
            start = max(i64(0), end - GROUP)
            first, count = s * T + start, end - start
            carry_back(c, kept, layer, first, count, tokens[s, start:], worth, of_gate, of_candidate)
            kept_rows(kept, NORMED_1, layer, first, count, n)
            nothing_below(below, along)
            for part in range(2):
                note(kept, OF_CANDIDATE if part else OF_GATE, layer, first, count, of_candidate if part else of_gate, x,
                     exponents)
                handed(c, W_H if part else W_F, layer, x, exponents, count, i64(0), c.divisor, y, scales)
                add_below(y, count, scales, n, below, along)
            through_norm(c, kept, LN_1, layer, first, count, below, along, n)


@njit
def hand_down(c, kept, tokens):
    """From the credits that `score_rows` put into a Kept to those of all units; tokens int32 [windows, T]."""
    for layer in range(c.N_LAYERS - 1, -1, -1):
        through_mlp(c, kept, LN_2, layer, layer, tokens.size)
        through_states(c, kept, layer, tokens)
    note_embedding(c, kept, tokens.size)
