"""Noise on activations on the CPU (SPEC 21): the recurrent model read by the groups of a chunk, and their votes.

A sequence is a window read once: of a group, first by the unperturbed model, then by its members. Rows are sequences
times positions. Several groups go through the model together, because products want whole tiles of rows.
"""

import functools
from collections import namedtuple

import numpy as np

from engine import cpu_rules
from engine.cpu_gru import LN_1, LN_2, W_F, W_H, read, recur
from engine.cpu_kernels import (AT_COLUMN, CLEAN, EMBEDDING, GROUP, NO_LAYER, SAME, divided, draw_norm, draw_sides,
                                i64, largest, layer_norm, new_sides, njit, product)
from engine.cpu_rules import clip, hash32, i32, loss, u32
from engine.kernel_cache import inner, leaf
from engine.simd import PANEL, ROWS, empty, exp_sum, local, tile, zeros
from model import activations, parameters

_rules = cpu_rules.activations
draws = _rules.draws
digit = _rules.digit
credited = _rules.credited
settled = _rules.settled
head_error = _rules.head_error
ROWS_TOGETHER = 64           # sequences that go through the model together, about

# columns of the table of phases, which has five rows a layer; PLACE: units of the phases before
UNITS, AMPLITUDE, STREAM, PLACE = range(4)
GATE, CANDIDATE, UP, DOWN = range(1, 5)
# What the unperturbed model read, and of every sequence the losses: uint8 [positions, inputs] of each layer, x + 128;
# errors int8 [positions, V], losses int64 [sequences, T]
Seen = namedtuple("Seen", "normed_1 state normed_2 inner normed_f errors losses")


@leaf
def draw_noise(words, at, seed, stream, amplitude, count):
    """words[at..] = `count` words of four noise values."""
    mask = u32(amplitude * 0x01010101)
    for i in range(count):
        words[at + i] = draws(hash32(seed, u32(stream + i)), mask)


@leaf
def disturbed_mlp(c, w, layer, noise, at_up, at_down, rows, x):
    """x = clip(x + MLP(ln_2(x))) with noise: int8, flat, of the inner units from at_up on, of the outputs from at_down
    on."""
    H, inside = c.HIDDEN_DIM, 4 * c.HIDDEN_DIM
    norm = local((2, 2, H), i32)
    sides_u, sides_d = new_sides(1, H, inside, 0), new_sides(1, inside, H, 0)
    draw_norm(c, w, LN_2, layer, u32(0), CLEAN, norm)
    draw_sides(c, w, LN_2 + 1, layer, u32(0), CLEAN, sides_u)
    draw_sides(c, w, LN_2 + 2, layer, u32(0), CLEAN, sides_d)
    n, y = local((GROUP, H), np.uint8), local((GROUP, H), i32)
    u, wide = local((GROUP, 4 * H), np.uint8), local((GROUP, 4 * H), i32)
    for first in range(0, rows, GROUP):
        count = min(GROUP, rows - first)
        layer_norm(c, x[first:], count, count, norm, n)
        product(c, w, LN_2 + 1, layer, sides_u, CLEAN, n, count, count, wide)
        divided(wide, count, i32(c.divisor), -127, 0, wide)
        for r in range(count):
            here = at_up + (first + r) * inside
            for i in range(inside):
                u[r, i] = max(i32(c.lowest), clip(i32(wide[r, i] + noise[here + i]))) + 128
        product(c, w, LN_2 + 2, layer, sides_d, CLEAN, u, count, count, y)
        divided(y, count, i32(c.divisor_down), -127, 0, y)
        for r in range(count):
            here = at_down + (first + r) * H
            for i in range(H):
                x[first + r, i] = clip(i32(x[first + r, i] + clip(i32(y[r, i] + noise[here + i]))))


@leaf
def inner_of(c, w, layer, rows, x, normed, inner):
    """normed, inner [rows, ...]: what the matrices of the unperturbed MLP multiply."""
    H = c.HIDDEN_DIM
    norm, wide = local((2, 2, H), i32), local((GROUP, 4 * H), i32)
    sides = new_sides(1, H, 4 * H, 0)
    draw_norm(c, w, LN_2, layer, u32(0), CLEAN, norm)
    draw_sides(c, w, LN_2 + 1, layer, u32(0), CLEAN, sides)
    n = local((GROUP, H), np.uint8)
    for first in range(0, rows, GROUP):
        count = min(GROUP, rows - first)
        layer_norm(c, x[first:], count, count, norm, n)
        product(c, w, LN_2 + 1, layer, sides, CLEAN, n, count, count, wide)
        divided(wide, count, i32(c.divisor), c.lowest, 128, inner[first:first + count])
        for r in range(count):
            for i in range(H):
                normed[first + r, i] = n[r, i]


@leaf
def sums_of(c, w, layer, rows, x, noise, at_gate, at_candidate, normed, each, T, gates, candidates):
    """gates, candidates int16 [rows, H] = W_f n, W_h n with n = ln_1(x), plus noise; normed: n of the first T of every
    `each` rows."""
    H, d = c.HIDDEN_DIM, i32(c.divisor)
    norm = local((2, 2, H), i32)
    n, y = local((GROUP, H), np.uint8), local((GROUP, H), i32)
    sides_f, sides_h = new_sides(1, H, H, 0), new_sides(1, H, H, 0)
    draw_norm(c, w, LN_1, layer, u32(0), CLEAN, norm)
    draw_sides(c, w, W_F, layer, u32(0), CLEAN, sides_f)
    draw_sides(c, w, W_H, layer, u32(0), CLEAN, sides_h)
    for first in range(0, rows, GROUP):
        count = min(GROUP, rows - first)
        layer_norm(c, x[first:], count, count, norm, n)
        product(c, w, W_F, layer, sides_f, CLEAN, n, count, count, y)
        divided(y, count, d, -127, 0, y)
        for r in range(count):
            for i in range(H):
                gates[first + r, i] = y[r, i] + noise[at_gate + (first + r) * H + i]
        product(c, w, W_H, layer, sides_h, CLEAN, n, count, count, y)
        divided(y, count, d, -127, 0, y)
        for r in range(count):
            for i in range(H):
                candidates[first + r, i] = y[r, i] + noise[at_candidate + (first + r) * H + i]
            if (first + r) % each < T:
                for i in range(H):
                    normed[(first + r) // each * T + (first + r) % each, i] = n[r, i]


@inner
def score_positions(c, w, exp, windows, before, members, T, seeds, x, seen):
    """losses of every position, and of the unperturbed model normed_f and errors; seeds uint32 [windows]."""
    H, V, each = c.HIDDEN_DIM, c.VOCAB_SIZE, members * T
    rows, drawn = windows.shape[0] * each, c.TARGETS - 1
    norm, sides = local((2, 2, H), i32), new_sides(1, H, V, 0)
    n, z = local((GROUP, H), np.uint8), empty((GROUP, (V + PANEL - 1) // PANEL * PANEL), i32)
    weights, wanted = empty((V + 15) // 16 * 16, i32), zeros(V, i32)
    draw_norm(c, w, c.ln_f, NO_LAYER, u32(0), CLEAN, norm)
    draw_sides(c, w, c.head, NO_LAYER, u32(0), CLEAN, sides)
    for first in range(0, rows, GROUP):
        count = min(GROUP, rows - first)
        layer_norm(c, x[first:], count, count, norm, n)
        product(c, w, c.head, NO_LAYER, sides, CLEAN, n, count, count, z)
        divided(z, count, i32(c.divisor), -127, 0, z)
        for r in range(count):
            q, t = (first + r) // each, (first + r) % T
            clean = (first + r) % each < T
            top, at = largest(z, r, V), before + T + 1 + drawn * t
            total = exp_sum(exp, 0, c.short_exp, top, 0, z, r * z.shape[1], V, weights, 0, i64(clean))
            target = z[r, windows[q, before + t + 1]]
            for k in range(at, at + drawn):
                target += z[r, windows[q, k]]
            seen.losses[(first + r) // T, t] = loss(c.exact, total, top * c.TARGETS, target, c.SOFTMAX_SCALE_BIT,
                                                    c.log_unit, 256 // c.TARGETS)
            if clean:
                place = q * T + t
                for i in range(H):
                    seen.normed_f[place, i] = n[r, i]
                wanted[windows[q, before + t + 1]] += 1
                for k in range(at, at + drawn):
                    wanted[windows[q, k]] += 1
                for v in range(V):
                    number = t * V + v
                    word = hash32(seeds[q], u32(activations.DITHER_STREAM + (number >> 1)))
                    random = i32(u32(word >> u32(16 * (number & 1))) & u32(0xFFFF))
                    seen.errors[place, v] = head_error(z[r, v], wanted[v], c.TARGETS, weights[v], total,
                                                       random)
                wanted[windows[q, before + t + 1]] = 0
                for k in range(at, at + drawn):
                    wanted[windows[q, k]] = 0


@njit
def read_groups(c, w, exp, windows, before, members, seed, first_group, phases, words, noise, seen):
    """Reads windows int32 [groups, WINDOW] by the unperturbed model and `members` - 1 members each. seed: of the step;
    words uint32, noise: the same memory as int8, of all noise of these rows."""
    groups, H = windows.shape[0], c.HIDDEN_DIM
    T = (windows.shape[1] - 1 - before) // c.TARGETS
    rows = groups * members * T
    for p in range(phases.shape[0]):
        for s in range(groups * members):
            q, k = s // members, s % members
            count = T * phases[p, UNITS] // 4
            at = (rows * phases[p, PLACE] + s * T * phases[p, UNITS]) // 4
            if k:
                member = u32(seed + u32((first_group + q) * (members - 1) + k - 1))
                draw_noise(words, at, member, phases[p, STREAM], phases[p, AMPLITUDE], count)
            else:
                for i in range(count):
                    words[at + i] = 0
    x = empty((rows, H), np.int8)
    state = zeros((c.N_LAYERS, (groups * members + ROWS - 1) // ROWS * ROWS, H), np.int8)
    if before:
        size = (groups * before, H)
        first = empty(size, np.int8)
        gates_before, candidates_before = empty(size, np.int8), empty(size, np.int8)
        states = zeros((c.N_LAYERS, (groups + ROWS - 1) // ROWS * ROWS, H), np.int8)
        read(c, w, u32(0), CLEAN, windows[:, 0:], SAME, before, states, gates_before, candidates_before, first)
        for layer in range(c.N_LAYERS):
            for s in range(groups * members):
                for i in range(H):
                    state[layer, s, i] = states[layer, s // members, i]
    column = w.table[EMBEDDING, 0, AT_COLUMN]
    for r in range(rows):
        at = column + windows[r // (members * T), before + r % T]
        for i in range(H):
            x[r, i] = clip(i32(w.columns[at, i] + noise[r * H + i]))
    gates, candidates = empty((rows, H), np.int16), empty((rows, H), np.int16)
    clean = empty((groups * T, H), np.int8)
    for layer in range(c.N_LAYERS):
        at = phases[5 * layer:, PLACE]
        sums_of(c, w, layer, rows, x, noise, rows * at[GATE], rows * at[CANDIDATE], seen.normed_1[layer], members * T,
                T, gates, candidates)
        recur(c, w, layer, u32(0), CLEAN, windows[:, before:], SAME, members, T, gates, candidates, state[layer], x,
              seen.state[layer])
        for r in range(groups * T):
            for i in range(H):
                clean[r, i] = x[r // T * members * T + r % T, i]
        inner_of(c, w, layer, groups * T, clean, seen.normed_2[layer], seen.inner[layer])
        disturbed_mlp(c, w, layer, noise, rows * at[UP], rows * at[DOWN], rows, x)
    seeds = empty(groups, np.uint32)
    for q in range(groups):
        seeds[q] = u32(seed + u32(first_group + q))
    score_positions(c, w, exp, windows, before, members, T, seeds, x, seen)


@njit
def credits(differences, least, bits, credit, own, later):
    """own, later int8 [members, T]: the digits of positions, and the credit of those with later ones."""
    for k in range(differences.shape[0]):
        after = i32(0)
        for t in range(differences.shape[1] - 1, -1, -1):
            e = digit(differences[k, t], least)
            after = credited(e, after, bits, credit)
            own[k, t], later[k, t] = e, after


@njit
def add_credit(credit, seed, stream, amplitude, shift, words, noise, totals, out):
    """out int8 [T, units]: the settled sum over members (of seeds from `seed` on) of credit int8 [members, T] times
    noise; words: as uint32, noise: as int8 the same memory of T * units values; totals int32 [T, units]:
    overwritten."""
    T, units = out.shape
    totals[:] = 0
    for k in range(credit.shape[0]):
        draw_noise(words, 0, u32(seed + u32(k)), stream, amplitude, words.size)
        for t in range(T):
            factor = i32(credit[k, t])
            if factor != 0:
                at = t * units
                for i in range(units):
                    totals[t, i] = i32(totals[t, i] + i32(factor * noise[at + i]))
    for t in range(T):
        for i in range(units):
            out[t, i] = settled(totals[t, i], shift)


@njit
def add_products(x, sums, votes):
    """votes int32 [inputs padded to ROWS, units padded to PANEL] += x . sums: x uint8 [n, inputs], moved by 128; sums
    int8 [n, units]."""
    n, inputs = x.shape
    k4 = (n + 3) // 4
    turned = zeros(votes.shape[0] * 4 * k4, np.uint8)
    for r in range(n):
        for j in range(inputs):
            turned[j * 4 * k4 + r] = x[r, j]
    panel, correction = empty(4 * k4 * PANEL, np.int8), empty(PANEL, i32)
    for p in range(votes.shape[1] // PANEL):
        count = min(PANEL, sums.shape[1] - p * PANEL)
        panel[:] = 0
        correction[:] = 0
        for r in range(n):
            for j in range(count):
                value = sums[r, p * PANEL + j]
                panel[(r >> 2) * (4 * PANEL) + 4 * j + (r & 3)] = value
                correction[j] -= 128 * value
        for r in range(0, votes.shape[0], ROWS):
            at = r * votes.shape[1] + p * PANEL
            for k in range(ROWS):
                for j in range(PANEL):
                    votes[r + k, p * PANEL + j] += correction[j]
            tile(turned, r * 4 * k4, 4 * k4, panel, 0, votes, at, votes.shape[1], votes, at, votes.shape[1], k4)


@njit
def add_lists(tokens, sums, by_token, by_unit):
    """by_token[token] += sums[t] where it has rows, by_unit += all of them."""
    for t in range(sums.shape[0]):
        for i in range(sums.shape[1]):
            by_unit[i] += sums[t, i]
            if by_token.shape[0]:
                by_token[tokens[t], i] += sums[t, i]


class ActivationVotes:
    """The votes of chunks for CpuEngine: `begin` makes the work of an evaluation, `digits` its result."""

    def __init__(self, cfg, constants, exp):
        self.cfg, self._c, self._exp = cfg, constants, exp
        self.members = cfg.GROUP_SIZE + 1
        self.together = max(1, ROWS_TOGETHER // self.members)
        self.phases = activations.phases(cfg)
        self.matrices, self.biases, self.embedding = activations.votes(cfg)
        rows, place = [], 0
        for phase in self.phases:
            if phase.layer and phase.name == "gate":
                rows.append((0, 0, 0, place))                # no embedding
            rows.append((phase.units, phase.amplitude, phase.stream, place))
            place += phase.units
        self._table, self._width = np.array(rows, np.int64), place
        self._spare = []                                     # accumulators that no thread uses

    def read(self, w, windows, seed, first_group):
        """The Seen of windows int32 [groups, WINDOW], and the inputs int32 [positions]."""
        cfg, G = self.cfg, len(windows)
        L, T, H = cfg.N_LAYERS, cfg.SEQ_LEN, cfg.HIDDEN_DIM
        seen = Seen(np.empty((L, G * T, H), np.uint8), np.empty((L, 2, G * T, H), np.uint8),
                    np.empty((L, G * T, H), np.uint8), np.empty((L, G * T, 4 * H), np.uint8),
                    np.empty((G * T, H), np.uint8), np.empty((G * T, cfg.VOCAB_SIZE), np.int8),
                    np.empty((G * self.members, T), np.int64))
        words = np.empty(G * self.members * T * self._width // 4, np.uint32)
        read_groups(self._c, w, self._exp, windows, cfg.STATE_TOKENS, self.members, np.uint32(seed), first_group,
                    self._table, words, words.view(np.int8), seen)
        return seen, windows[:, cfg.STATE_TOKENS:cfg.STATE_TOKENS + T].ravel()

    def differences(self, seen):
        """int64 [groups, members, T]: by how much smaller than the clean ones their losses are."""
        losses = seen.losses.reshape(-1, self.members, self.cfg.SEQ_LEN)
        return losses[:, :1] - losses[:, 1:]

    def add_votes(self, seed, first_group, seen, inputs, least):
        """Adds the votes of the groups of `seen` to an accumulator; what it was."""
        sums, cfg = self._spare.pop() if self._spare else self._accumulator(), self.cfg
        T, n = cfg.SEQ_LEN, len(inputs)
        differences, credit = self.differences(seen), np.empty((2, cfg.GROUP_SIZE, T), np.int8)
        settled_of = {phase: np.empty((n, phase.units), np.int8) for phase in self.phases}
        words = np.empty(T * cfg.HIDDEN_DIM, np.uint32)
        totals = np.empty(T * 4 * cfg.HIDDEN_DIM, np.int32)
        for group, difference in enumerate(differences):
            credits(difference, least, activations.fraction_bits(cfg), cfg.CREDIT, credit[0], credit[1])
            member = np.uint32(seed + (first_group + group) * cfg.GROUP_SIZE & 0xFFFFFFFF)
            for phase, out in settled_of.items():
                part = words[:T * phase.units // 4]
                add_credit(credit[int(phase.later)], member, phase.stream, phase.amplitude, phase.shift, part,
                           part.view(np.int8), totals[:T * phase.units].reshape(T, -1), out[group * T:(group + 1) * T])
        for vote in self.matrices:
            add_products(self._inputs(seen, vote), seen.errors if vote.phase is None else settled_of[vote.phase],
                         sums[vote.tensor])
        none = np.empty((0, 0), np.int32)
        for tensor, phase in self.biases:
            add_lists(inputs, settled_of[phase], none, sums[tensor])
        tensor, phase = self.embedding
        add_lists(inputs, settled_of[phase], sums[tensor], sums[None])
        self._spare.append(sums)

    def _inputs(self, seen, vote):
        layer = vote.tensor.layer
        if vote.inputs in ("state", "gated"):
            return seen.state[layer, int(vote.inputs == "gated")]
        of_layers = getattr(seen, vote.inputs)
        return of_layers if vote.phase is None else of_layers[layer]

    def _accumulator(self):
        """{tensor: int32 sums of its votes}: of a matrix padded, of the embedding a row a token."""
        sums = {t: np.zeros((-(-t.rows // ROWS) * ROWS, -(-t.cols // PANEL) * PANEL), np.int32)
                for t, _, _ in self.matrices}
        tensor = self.embedding[0]
        return sums | {t: np.zeros(t.cols, np.int32) for t, _ in self.biases} | {
            tensor: np.zeros((tensor.cols, tensor.rows), np.int32), None: np.zeros(tensor.rows, np.int32)}

    def digits(self):
        """int8 [weights]: the digits of the accumulated votes, which are forgotten."""
        digits, parts = np.zeros(self.cfg.CHUNK_DIGITS, np.int8), self._spare
        self._spare = []
        for t in parts[0]:
            if t is not None:
                total = functools.reduce(np.add, (part[t] for part in parts))
                if t is self.embedding[0]:
                    total = total.T
                total = parameters.to_canonical(total[:t.rows, :t.cols]) if t.matrix else total
                digits[t.span] = activations.voted(self.cfg, t, total)
        return digits
