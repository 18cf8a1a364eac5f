"""The recurrent model on the CPU (SPEC 13), with the products, noise and votes of `engine.cpu_kernels`.

A layer reads the whole window before the next one begins, so that all products but those with the state run over
members times positions; those with the state run over the members of a block, position by position. Members are
sequences here: 2 i and 2 i + 1 are the even and the odd one of pair i; without noise every sequence is its own.
"""

import numpy as np

from model import parameters
from engine.cpu_kernels import (CLEAN, GROUP, NO_LAYER, OVER_A, SEED_A, hidden_side, i64, inlined, inner, input_side,
                                member, njit, noise, noised, output_side, perturbed, product, project, score, sides,
                                sign)
from engine.cpu_rules import (clip, divide, f32, factor, gate, gated, i32, next_state, quotient, shift_right,
                              table_term, u32)
from engine.simd import PANEL, ROWS, empty, zeros

(EMBEDDING, HEAD, LN_1, W_F, U_F, B_F, W_H, U_H, B_H, LN_2, W_UP, W_DOWN,
 LN_F) = map(i64, range(len(parameters.GRU_TABLE)))
NONE, NO_LOSSES = np.empty(0), np.empty((0, 2), np.int64)
TOGETHER = 8                # pairs that go through the positions together: their members fill two tiles of rows


@inlined
def outputs(y, r, s, noise, shift, d, lowest, out, o, zero):
    """out[o] = clip(y[r] with its noise / d, rounded down), `lowest` at least, + zero: 0 for int8, 128 for uint8."""
    reciprocal = f32(f32(1) / f32(d))
    for i in range(out.shape[1]):
        q = quotient(noised(y[r, i], s, noise[i], shift), d, reciprocal)
        out[o, i] = i32(max(i32(lowest), q) + i32(zero))


@inlined
def norm(x, r, weight, m, n, o):
    """n[o] uint8 = ln(x[r]) + 128, x int8 rows, with the weights of member m."""
    total = i32(0)
    for i in range(x.shape[1]):
        total = i32(total + abs(i32(x[r, i])))
    mean = max(i32(1), divide(total, x.shape[1]))
    reciprocal = f32(f32(1) / f32(mean))
    for i in range(x.shape[1]):
        n[o, i] = np.uint8(i32(quotient(i32(i32(x[r, i]) * weight[m, i]), mean, reciprocal) + i32(128)))


@inner
def embed(c, w, S, noisy, tokens, members, n, x):
    """x int8 [sequences * n, H]: row s * n + t is token t of sequence s; tokens int32 [sequences / members, >= n]."""
    H, shift = c.H, i32(c.matrix_shift)
    t = w.table[EMBEDDING, NO_LAYER]
    for q in range(tokens.shape[0]):
        seed_a, (unit, scale) = u32(S + q + t[SEED_A]), hidden_side(c, w, t, S + q)
        for m in range(members):
            for position in range(n):
                k, r = i64(tokens[q, position]), (q * members + m) * n + position
                if noisy:
                    own, own_scale = noise(c, seed_a, k), factor(c.mode, w.overlay[t[OVER_A] + k], seed_a, k)
                    for i in range(H):
                        p = table_term(own, own_scale, unit[i], scale[i])
                        x[r, i] = clip(i32(i32(w.tokens[k, i]) + shift_right(i32(p * sign(m)), shift)))
                else:
                    for i in range(H):
                        x[r, i] = w.tokens[k, i]


@inner
def recur(c, w, layer, S, noisy, tokens, members, n, gates, candidates, h, x):
    """The layer's state through n positions: x[s * n + t] = clip(x + h after t), and h int8 [sequences padded to ROWS,
    H] goes on. gates, candidates int8 [sequences * n, H]: W_f n and W_h n."""
    H, sequences = c.H, tokens.shape[0] * members
    padded, shift, d = h.shape[0], i32(c.matrix_shift), i32(c.divisor)
    reciprocal = f32(f32(1) / f32(d))
    pairs = tokens.shape[0] if noisy else 1
    a_f, a_h = empty((pairs, H), i32), empty((pairs, H), i32)
    bias_f, bias_h = empty((pairs, 2, H), i32), empty((pairs, 2, H), i32)
    for q in range(pairs):
        seed = u32(S + q)
        perturbed(c, w, B_F, layer, seed, noisy, bias_f[q])
        perturbed(c, w, B_H, layer, seed, noisy, bias_h[q])
        output_side(c, w, U_F, layer, seed, noisy, a_f[q])
        output_side(c, w, U_H, layer, seed, noisy, a_h[q])
    b_f, b_h = input_side(c, w, U_F, layer, S, noisy, pairs), input_side(c, w, U_H, layer, S, noisy, pairs)
    state, past = np.full((padded, H), 128, np.uint8), np.full((padded, H), 128, np.uint8)
    open_, y = empty((padded, H), i32), empty((padded, H), i32)
    for t in range(n):
        for s in range(sequences):
            if tokens[s // members, t] == 0:
                for i in range(H):
                    h[s, i] = 0
            for i in range(H):
                state[s, i] = np.uint8(i32(i32(h[s, i]) + i32(128)))
        product(w, U_F, layer, state, sequences, y)
        for s in range(sequences):
            q, m, r = s // 2 if noisy else 0, s & 1 if noisy else 0, s * n + t
            sb = project(c, state, s, b_f, q, sign(m)) if noisy else i32(0)
            for i in range(H):
                into = quotient(noised(y[s, i], sb, a_f[q, i], shift), d, reciprocal)
                f = gate(i32(gates[r, i]), i32(into + bias_f[q, m, i]))
                open_[s, i] = f
                past[s, i] = np.uint8(i32(gated(f, i32(h[s, i])) + i32(128)))
        product(w, U_H, layer, past, sequences, y)
        for s in range(sequences):
            q, m, r = s // 2 if noisy else 0, s & 1 if noisy else 0, s * n + t
            sb = project(c, past, s, b_h, q, sign(m)) if noisy else i32(0)
            for i in range(H):
                into = quotient(noised(y[s, i], sb, a_h[q, i], shift), d, reciprocal)
                new = clip(i32(i32(candidates[r, i]) + i32(into + bias_h[q, m, i])))
                after = next_state(open_[s, i], i32(h[s, i]), new)
                h[s, i] = after
                x[r, i] = clip(i32(i32(x[r, i]) + after))


@inner
def gates_of(c, w, layer, S, noisy, rows, per_member, first, x, gates, candidates):
    """gates, candidates = W_f n, W_h n with n = ln_1(x), for rows first.. of x, which belong to one pair (or are
    without noise)."""
    H, shift = c.H, i32(c.matrix_shift)
    weight = empty((2, H), i32)
    perturbed(c, w, LN_1, layer, S, noisy, weight)
    n, y = empty((rows + GROUP, H), np.uint8), empty((GROUP, H), i32)
    for r in range(rows):
        norm(x, first + r, weight, member(r, per_member) & noisy, n, r)
    for k in range(2):
        param, out = W_F if k == 0 else W_H, gates if k == 0 else candidates
        a, b = sides(c, w, param, layer, S, noisy)
        for at in range(0, rows, GROUP):
            count, some = min(GROUP, rows - at), n[at:at + GROUP]
            product(w, param, layer, some, count, y)
            for r in range(count):
                s = project(c, some, r, b, 0, sign(member(at + r, per_member))) if noisy else i32(0)
                outputs(y, r, s, a, shift, i32(c.divisor), -127, out, first + at + r, 0)


@inner
def mlp(c, w, layer, S, noisy, rows, per_member, first, x):
    """x = clip(x + W_down (W_up ln_2(x))) for the rows of gates_of, in place."""
    H, shift = c.H, i32(c.matrix_shift)
    weight = empty((2, H), i32)
    perturbed(c, w, LN_2, layer, S, noisy, weight)
    (up_a, up_b), (down_a, down_b) = sides(c, w, W_UP, layer, S, noisy), sides(c, w, W_DOWN, layer, S, noisy)
    n, u = empty((GROUP, H), np.uint8), empty((GROUP, 4 * H), np.uint8)
    wide, y = empty((GROUP, 4 * H), i32), empty((GROUP, H), i32)
    d_up, d_down = i32(c.divisor), i32(c.divisor_down)
    r_down = f32(f32(1) / f32(d_down))
    for at in range(0, rows, GROUP):
        count = min(GROUP, rows - at)
        for r in range(count):
            norm(x, first + at + r, weight, member(at + r, per_member) & noisy, n, r)
        product(w, W_UP, layer, n, count, wide)
        for r in range(count):
            s = project(c, n, r, up_b, 0, sign(member(at + r, per_member))) if noisy else i32(0)
            outputs(wide, r, s, up_a, shift, d_up, c.lowest, u, r, 128)
        product(w, W_DOWN, layer, u, count, y)
        for r in range(count):
            s = project(c, u, r, down_b, 0, sign(member(at + r, per_member))) if noisy else i32(0)
            o = first + at + r
            for i in range(H):
                x[o, i] = clip(i32(i32(x[o, i]) + quotient(noised(y[r, i], s, down_a[i], shift), d_down, r_down)))


@inner
def read(c, w, S, noisy, tokens, n, state, x):
    """Reads the first n of tokens int32 [sequences, or pairs with noise, >= n]: x int8 [sequences * n, H], the last
    layer's output; state int8 [L, sequences padded to ROWS, H] goes on. S: seed of the first pair."""
    members = 2 if noisy else 1
    sequences, H = members * tokens.shape[0], c.H
    embed(c, w, S, noisy, tokens, members, n, x)
    gates, candidates = empty((sequences * n, H), np.int8), empty((sequences * n, H), np.int8)
    units, rows = (tokens.shape[0], 2 * n) if noisy else (1, sequences * n)      # rows that share their noise
    for layer in range(c.L):
        for q in range(units):
            gates_of(c, w, layer, u32(S + q), noisy, rows, n, q * rows, x, gates, candidates)
        recur(c, w, layer, S, noisy, tokens, members, n, gates, candidates, state[layer], x)
        for q in range(units):
            mlp(c, w, layer, u32(S + q), noisy, rows, n, q * rows, x)


@inner
def logits(c, w, weight, side_a, side_b, noisy, rows, per_member, first, x, z):
    """z int32 [>= rows, V padded]: logits of up to GROUP rows of x from row `first` of those that share their noise; x
    begins there. weight: of ln_f; side_a, side_b: noise of the head."""
    n, d, shift = empty((GROUP, c.H), np.uint8), i32(c.divisor), i32(c.matrix_shift)
    reciprocal = f32(f32(1) / f32(d))
    for r in range(rows):
        norm(x, r, weight, member(first + r, per_member) & noisy, n, r)
    product(w, HEAD, NO_LAYER, n, rows, z)
    for r in range(rows):
        s = project(c, n, r, side_b, 0, sign(member(first + r, per_member))) if noisy else i32(0)
        for v in range(c.V):
            z[r, v] = quotient(noised(z[r, v], s, side_a[v], shift), d, reciprocal)


@njit
def run_windows(c, w, exp, windows, before, state, S, noisy, first_pair, per_group, exp64, unit, losses, nats):
    """Evaluates windows int32 [n, before + T + 1] with `score`; int32 [GROUP, V padded], whose row (T - 1) % GROUP has
    the logits after the last token of a single window. noisy: window i is read by the two members of pair seed S + i,
    and `before` tokens make the state with which it begins, by the unperturbed model, once for the pairs of a group of
    per_group (pair i of the step is in group i // per_group). Else it is read by the unperturbed model. state int8 [L,
    members * n padded to ROWS, H] goes on."""
    n, H, members = windows.shape[0], c.H, 2 if noisy else 1
    T = (windows.shape[1] - 1 - before) // (c.targets if noisy else 1)
    tokens, z = empty((n, T + 1), i32), empty((GROUP, (c.V + PANEL - 1) // PANEL * PANEL), i32)
    if before:
        first = first_pair // per_group
        groups = (first_pair + n - 1) // per_group - first + 1
        some = empty((groups, before), i32)
        for i in range(n):
            for t in range(before):
                some[(first_pair + i) // per_group - first, t] = windows[i, t]
        theirs = zeros((c.L, (groups + ROWS - 1) // ROWS * ROWS, H), np.int8)
        read(c, w, u32(0), CLEAN, some, before, theirs, empty((groups * before, H), np.int8))
        for layer in range(c.L):
            for s in range(2 * n):
                for i in range(H):
                    state[layer, s, i] = theirs[layer, (first_pair + s // 2) // per_group - first, i]
    for i in range(n):
        for t in range(T + 1):
            tokens[i, t] = windows[i, before + t]
    x, weight = empty((members * n * T, H), np.int8), empty((2, H), i32)
    read(c, w, S, noisy, tokens, T, state, x)
    units, rows = (n, 2 * T) if noisy else (1, n * T)                            # rows that share their noise
    for q in range(units):
        seed = u32(S + q)
        perturbed(c, w, LN_F, NO_LAYER, seed, noisy, weight)
        side_a, side_b = sides(c, w, HEAD, NO_LAYER, seed, noisy)
        for at in range(0, rows, GROUP):
            count = min(GROUP, rows - at)
            logits(c, w, weight, side_a, side_b, noisy, count, T, at, x[q * rows + at:q * rows + at + count], z)
            score(c, exp, noisy, z, windows, q, at, count, before, T, exp64, unit, losses, nats)
    return z


class Gru:
    """The forward pass as `engine.cpu_transformer.Transformer` has it."""

    def __init__(self, cfg, constants, exp):
        self.cfg, self._constants, self._exp = cfg, constants, exp
        self.together = TOGETHER

    def evaluate(self, w, windows, seed, shift, first_pair, losses):
        for at in range(0, len(windows), TOGETHER):
            some, first = windows[at:at + TOGETHER], first_pair + at
            self._run(w, some, self._state(2 * len(some)), self.cfg.STATE_TOKENS, seed + first & 0xFFFFFFFF, 1, first,
                      shift, losses=losses[at:at + TOGETHER])

    def validate(self, w, windows, exp64, unit, nats):
        for at in range(0, len(windows), 2 * TOGETHER):
            some = windows[at:at + 2 * TOGETHER]
            self._run(w, some, self._state(len(some)), exp64=exp64, unit=unit, nats=nats[at:at + 2 * TOGETHER])

    def _run(self, w, windows, state, before=0, seed=0, noisy=0, first_pair=0, shift=0, exp64=NONE, unit=0.0,
             losses=NO_LOSSES, nats=NONE):
        return run_windows(self._constants._replace(matrix_shift=shift), w, self._exp, windows, before, state,
                           np.uint32(seed), noisy, first_pair, self.cfg.GROUP_SIZE // 2, exp64, unit, losses, nats)

    def _state(self, sequences):
        return np.zeros((self.cfg.N_LAYERS, -(-sequences // ROWS) * ROWS, self.cfg.HIDDEN_DIM), np.int8)

    def reader(self, w, total):
        state = self._state(1)

        def more(tokens):
            return self._run(w, np.append(tokens, 0)[None].astype(np.int32), state)[(len(tokens) - 1) % GROUP]

        return more
