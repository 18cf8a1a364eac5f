"""The recurrent model on the CPU (SPEC 13), with the products, noise and votes of `engine.cpu_kernels`.

A layer reads the whole window before the next one begins, so that all products but those with the state run over
members times positions; those with the state run over the members of a block, position by position. Members are
sequences here: 2 i and 2 i + 1 are the even and the odd one of pair i; without noise every sequence is its own.
"""

import numpy as np

from model import parameters
from engine.cpu_kernels import (CLEAN, GROUP, NO_LAYER, OVER_A, SEED_A, draw_sides, hidden_side, i64, inlined, inner,
                                leaf, mean_sizes, member, new_sides, njit, noise, noised, perturbed, product, project,
                                score, sign)
from engine.cpu_rules import (clip, f32, factor, gate, gated, i32, next_state, quotient, shift_right, table_term, u32)
from engine.simd import PANEL, ROWS, empty, local, zeros

(EMBEDDING, HEAD, LN_1, W_F, U_F, B_F, W_H, U_H, B_H, LN_2, W_UP, W_DOWN,
 LN_F) = map(i64, range(len(parameters.GRU_TABLE)))
NONE, NO_LOSSES = np.empty(0), np.empty((0, 2), np.int64)
TOGETHER = 8                # pairs that go through the positions together: their members fill two tiles of rows


@inlined
def outputs(y, count, s, noise, shift, d, lowest, out, o, zero):
    """out[o + r] = clip(y[r] with its noise / d, rounded down), `lowest` at least, + zero: 0 for int8, 128 for uint8;
    `count` rows, s int32 [count] of them."""
    reciprocal = f32(f32(1) / f32(d))
    for r in range(count):
        for i in range(out.shape[1]):
            q = quotient(noised(y[r, i], s[r], noise[i], shift), d, reciprocal)
            out[o + r, i] = i32(max(i32(lowest), q) + i32(zero))


@inlined
def norm(x, first, count, per_member, noisy, weight, n):
    """n uint8 [>= count, H] = ln(x[first..]) + 128, x int8 rows, GROUP at most, with the weights of their members."""
    means = local(GROUP, i32)
    mean_sizes(x, first, count, means)
    for r in range(count):
        m, mean = member(r, per_member) & noisy, means[r]
        reciprocal = f32(f32(1) / f32(mean))
        for i in range(x.shape[1]):
            n[r, i] = np.uint8(i32(quotient(i32(i32(x[first + r, i]) * weight[m, i]), mean, reciprocal) + i32(128)))


@inlined
def projections(c, x, count, sides, noisy, per_member, s):
    """s int32 [count]: `project` of rows of x that belong to one pair."""
    for r in range(count):
        s[r] = project(c, x, r, sides, 0, sign(member(r, per_member))) if noisy else i32(0)


@leaf
def embed(c, w, S, noisy, tokens, members, n, x):
    """x int8 [sequences * n, H]: row s * n + t is token t of sequence s; tokens int32 [sequences / members, >= n]."""
    H, shift, unit, scale = c.H, i32(c.matrix_shift), local(c.H, i32), local(c.H, f32)
    t = w.table[EMBEDDING, NO_LAYER]
    for q in range(tokens.shape[0]):
        seed_a = u32(S + q + t[SEED_A])
        hidden_side(c, w, t, S + q, unit, scale)
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


@leaf
def recur(c, w, layer, S, noisy, tokens, members, n, gates, candidates, h, x):
    """The layer's state through n positions: x[s * n + t] = clip(x + h after t), and h int8 [sequences padded to ROWS,
    H] goes on. gates, candidates int8 [sequences * n, H]: W_f n and W_h n."""
    H, sequences = c.H, tokens.shape[0] * members
    padded, shift, d = h.shape[0], i32(c.matrix_shift), i32(c.divisor)
    reciprocal = f32(f32(1) / f32(d))
    pairs = tokens.shape[0] if noisy else 1
    sides_f, sides_h = new_sides(pairs, H, H, H * c.scaled), new_sides(pairs, H, H, H * c.scaled)
    bias_f, bias_h = local((pairs, 2, H), i32), local((pairs, 2, H), i32)
    for q in range(pairs):
        perturbed(c, w, B_F, layer, u32(S + q), noisy, bias_f[q])
        perturbed(c, w, B_H, layer, u32(S + q), noisy, bias_h[q])
    draw_sides(c, w, U_F, layer, S, noisy, sides_f)
    draw_sides(c, w, U_H, layer, S, noisy, sides_h)
    state, past, sums = local((padded, H), np.uint8), local((padded, H), np.uint8), local(padded, i32)
    open_, y = local((padded, H), i32), local((padded, H), i32)
    for t in range(n):
        for s in range(sequences):
            if tokens[s // members, t] == 0:
                for i in range(H):
                    h[s, i] = 0
            for i in range(H):
                state[s, i] = np.uint8(i32(i32(h[s, i]) + i32(128)))
        product(w, U_F, layer, state, sequences, y)
        for s in range(sequences):
            sums[s] = project(c, state, s, sides_f, s // 2, sign(s & 1)) if noisy else i32(0)
        for s in range(sequences):
            q, m, r = s // 2 if noisy else 0, s & 1 if noisy else 0, s * n + t
            for i in range(H):
                into = quotient(noised(y[s, i], sums[s], sides_f.columns[q, i], shift), d, reciprocal)
                f = gate(i32(gates[r, i]), i32(into + bias_f[q, m, i]))
                open_[s, i] = f
                past[s, i] = np.uint8(i32(gated(f, i32(h[s, i])) + i32(128)))
        product(w, U_H, layer, past, sequences, y)
        for s in range(sequences):
            sums[s] = project(c, past, s, sides_h, s // 2, sign(s & 1)) if noisy else i32(0)
        for s in range(sequences):
            q, m, r = s // 2 if noisy else 0, s & 1 if noisy else 0, s * n + t
            for i in range(H):
                into = quotient(noised(y[s, i], sums[s], sides_h.columns[q, i], shift), d, reciprocal)
                new = clip(i32(i32(candidates[r, i]) + i32(into + bias_h[q, m, i])))
                after = next_state(open_[s, i], i32(h[s, i]), new)
                h[s, i] = after
                x[r, i] = clip(i32(i32(x[r, i]) + after))


@leaf
def gates_of(c, w, layer, S, noisy, rows, per_member, first, x, gates, candidates):
    """gates, candidates = W_f n, W_h n with n = ln_1(x), for rows first.. of x, which belong to one pair (or are
    without noise)."""
    H, shift, d = c.H, i32(c.matrix_shift), i32(c.divisor)
    weight, n, y = local((2, H), i32), local((GROUP, H), np.uint8), local((GROUP, H), i32)
    sides_f, sides_h, s = new_sides(1, H, H, H * c.scaled), new_sides(1, H, H, H * c.scaled), local(GROUP, i32)
    perturbed(c, w, LN_1, layer, S, noisy, weight)
    draw_sides(c, w, W_F, layer, S, noisy, sides_f)
    draw_sides(c, w, W_H, layer, S, noisy, sides_h)
    for at in range(0, rows, GROUP):
        count, left = min(GROUP, rows - at), per_member - at
        norm(x, first + at, count, left, noisy, weight, n)
        product(w, W_F, layer, n, count, y)
        projections(c, n, count, sides_f, noisy, left, s)
        outputs(y, count, s, sides_f.columns[0], shift, d, -127, gates, first + at, 0)
        product(w, W_H, layer, n, count, y)
        projections(c, n, count, sides_h, noisy, left, s)
        outputs(y, count, s, sides_h.columns[0], shift, d, -127, candidates, first + at, 0)


@leaf
def mlp(c, w, layer, S, noisy, rows, per_member, first, x):
    """x = clip(x + W_down (W_up ln_2(x))) for the rows of gates_of, in place."""
    H, shift = c.H, i32(c.matrix_shift)
    sides_u, sides_d = new_sides(1, H, 4 * H, H * c.scaled), new_sides(1, 4 * H, H, 4 * H * c.scaled)
    weight, n, u = local((2, H), i32), local((GROUP, H), np.uint8), local((GROUP, 4 * H), np.uint8)
    wide, y, s = local((GROUP, 4 * H), i32), local((GROUP, H), i32), local(GROUP, i32)
    perturbed(c, w, LN_2, layer, S, noisy, weight)
    draw_sides(c, w, W_UP, layer, S, noisy, sides_u)
    draw_sides(c, w, W_DOWN, layer, S, noisy, sides_d)
    d_down = i32(c.divisor_down)
    r_down = f32(f32(1) / f32(d_down))
    for at in range(0, rows, GROUP):
        count, left = min(GROUP, rows - at), per_member - at
        norm(x, first + at, count, left, noisy, weight, n)
        product(w, W_UP, layer, n, count, wide)
        projections(c, n, count, sides_u, noisy, left, s)
        outputs(wide, count, s, sides_u.columns[0], shift, i32(c.divisor), c.lowest, u, 0, 128)
        product(w, W_DOWN, layer, u, count, y)
        projections(c, u, count, sides_d, noisy, left, s)
        for r in range(count):
            o = first + at + r
            for i in range(H):
                down = quotient(noised(y[r, i], s[r], sides_d.columns[0, i], shift), d_down, r_down)
                x[o, i] = clip(i32(i32(x[o, i]) + down))


@leaf
def read(c, w, S, noisy, tokens, n, state, gates, candidates, x):
    """Reads the first n of tokens int32 [sequences, or pairs with noise, >= n]: x int8 [sequences * n, H], the last
    layer's output; state int8 [L, sequences padded to ROWS, H] goes on; gates and candidates, as large as x, are
    overwritten. S: seed of the first pair."""
    members = 2 if noisy else 1
    embed(c, w, S, noisy, tokens, members, n, x)
    units, rows = (tokens.shape[0], 2 * n) if noisy else (1, tokens.shape[0] * n)    # rows that share their noise
    for layer in range(c.L):
        for q in range(units):
            gates_of(c, w, layer, u32(S + q), noisy, rows, n, q * rows, x, gates, candidates)
        recur(c, w, layer, S, noisy, tokens, members, n, gates, candidates, state[layer], x)
        for q in range(units):
            mlp(c, w, layer, u32(S + q), noisy, rows, n, q * rows, x)


@leaf
def losses_of(c, w, exp, windows, q, rows, S, noisy, before, T, exp64, unit, losses, nats, x, z):
    """`run_windows` from x int8 [rows, H], the last layer's output for rows that share their noise, on; q: their first
    window; z int32 [GROUP, V padded] is overwritten."""
    sides, weight = new_sides(1, c.H, c.V, c.H * c.scaled), local((2, c.H), i32)
    n, s, d, shift = local((GROUP, c.H), np.uint8), local(GROUP, i32), i32(c.divisor), i32(c.matrix_shift)
    reciprocal = f32(f32(1) / f32(d))
    perturbed(c, w, LN_F, NO_LAYER, S, noisy, weight)
    draw_sides(c, w, HEAD, NO_LAYER, S, noisy, sides)
    for at in range(0, rows, GROUP):
        count = min(GROUP, rows - at)
        norm(x, at, count, T - at, noisy, weight, n)
        product(w, HEAD, NO_LAYER, n, count, z)
        projections(c, n, count, sides, noisy, T - at, s)
        for r in range(count):
            for v in range(c.V):
                z[r, v] = quotient(noised(z[r, v], s[r], sides.columns[0, v], shift), d, reciprocal)
        score(c, exp, noisy, z, windows, q, at, count, before, T, exp64, unit, losses, nats)


@inner
def run_together(c, w, exp, windows, before, state, S, noisy, first_pair, per_group, exp64, unit, losses, nats, z):
    """`run_windows` of windows that go through the positions together; z int32 [GROUP, V padded]."""
    n, H, members = windows.shape[0], c.H, 2 if noisy else 1
    T = (windows.shape[1] - 1 - before) // (c.targets if noisy else 1)
    if before:
        first = first_pair // per_group
        groups = (first_pair + n - 1) // per_group - first + 1
        some, size = empty((groups, before), i32), (groups * before, H)
        for i in range(n):
            for t in range(before):
                some[(first_pair + i) // per_group - first, t] = windows[i, t]
        theirs = zeros((c.L, (groups + ROWS - 1) // ROWS * ROWS, H), np.int8)
        read(c, w, u32(0), CLEAN, some, before, theirs, empty(size, np.int8), empty(size, np.int8),
             empty(size, np.int8))
        for layer in range(c.L):
            for s in range(2 * n):
                for i in range(H):
                    state[layer, s, i] = theirs[layer, (first_pair + s // 2) // per_group - first, i]
    tokens, size = empty((n, T + 1), i32), (members * n * T, H)
    for i in range(n):
        for t in range(T + 1):
            tokens[i, t] = windows[i, before + t]
    x = empty(size, np.int8)
    read(c, w, S, noisy, tokens, T, state, empty(size, np.int8), empty(size, np.int8), x)
    units, rows = (n, 2 * T) if noisy else (1, n * T)                            # rows that share their noise
    for q in range(units):
        losses_of(c, w, exp, windows, q, rows, u32(S + q), noisy, before, T, exp64, unit, losses, nats,
                  x[q * rows:(q + 1) * rows], z)


@njit
def run_windows(c, w, exp, windows, before, state, S, noisy, first_pair, per_group, exp64, unit, losses, nats):
    """Evaluates windows int32 [n, before + T + 1] with `score`; int32 [GROUP, V padded], whose row (T - 1) % GROUP has
    the logits after the last token of a single window. noisy: window i is read by the two members of pair seed S + i,
    and `before` tokens make the state with which it begins, by the unperturbed model, once for the pairs of a group of
    per_group (pair i of the step is in group i // per_group). Else it is read by the unperturbed model. state int8 [L,
    members * windows padded to ROWS, H] goes on; of more windows than that has room for, so many go through the
    positions together, each from a state of 0."""
    z = empty((GROUP, (c.V + PANEL - 1) // PANEL * PANEL), i32)
    together = state.shape[1] // (2 if noisy else 1)
    for at in range(0, windows.shape[0], together):
        if at:
            state[:] = 0
        end = min(at + together, windows.shape[0])
        run_together(c, w, exp, windows[at:end], before, state, u32(S + at), noisy, first_pair + at, per_group, exp64,
                     unit, losses[at:end], nats[at:end], z)
    return z


class Gru:
    """The forward pass as `engine.cpu_transformer.Transformer` has it."""

    def __init__(self, cfg, constants, exp):
        self.cfg, self._constants, self._exp = cfg, constants, exp
        self.together = TOGETHER

    def evaluate(self, w, windows, seed, shift, first_pair, losses):
        self._run(w, windows, 2 * min(TOGETHER, len(windows)), before=self.cfg.STATE_TOKENS,
                  seed=seed + first_pair & 0xFFFFFFFF, noisy=1, first_pair=first_pair, shift=shift, losses=losses)

    def validate(self, w, windows, exp64, unit, nats):
        self._run(w, windows, min(2 * TOGETHER, len(windows)), exp64=exp64, unit=unit, nats=nats)

    def _run(self, w, windows, sequences, state=None, before=0, seed=0, noisy=0, first_pair=0, shift=0, exp64=NONE,
             unit=0.0, losses=NO_LOSSES, nats=NONE):
        if state is None:
            state = np.zeros((self.cfg.N_LAYERS, -(-sequences // ROWS) * ROWS, self.cfg.HIDDEN_DIM), np.int8)
        return run_windows(self._constants._replace(matrix_shift=shift), w, self._exp, windows, before, state,
                           np.uint32(seed), noisy, first_pair, self.cfg.GROUP_SIZE // 2, exp64, unit, losses, nats)

    def reader(self, w, total):
        state = np.zeros((self.cfg.N_LAYERS, ROWS, self.cfg.HIDDEN_DIM), np.int8)

        def more(tokens):
            windows = np.append(tokens, 0)[None].astype(np.int32)
            return self._run(w, windows, 1, state)[(len(tokens) - 1) % GROUP]

        return more
