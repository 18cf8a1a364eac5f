"""Noise on activations on the CPU (SPEC 21): the recurrent model read by the groups of a chunk, and their votes.

A sequence is a window read once: of a group, first by the unperturbed model, then by its members. Rows are sequences
times positions. Several groups go through the model together, because products want whole tiles of rows.
"""

from collections import namedtuple

import numpy as np

from engine import cpu_rules
from engine.cpu_gru import LN_1, LN_2, gates_of, new_states, recur, states_before
from engine.cpu_kernels import (CLEAN, EMBEDDING, GROUP, NO_LAYER, SAME, Disturbance, add_tiles, copy_row, draw_norm,
                                draw_sides, i64, layer_norm, logits, mlp, new_logits, new_sides, njit, padded,
                                position_loss, target)
from engine.cpu_rules import clip, hash32, i32, u32
from engine.kernel_cache import inner, leaf
from engine.simd import PANEL, ROWS, empty, local, zeros
from model import activations

_rules = cpu_rules.activations
draws = _rules.draws
digit = _rules.digit
credited = _rules.credited
settled = _rules.settled
head_error = _rules.head_error
ROWS_TOGETHER = 68           # sequences that go through the model together, about: four groups of 17

# columns of the table of phases, and its rows besides the embedding's, which is the first: those of a layer
UNITS, AMPLITUDE, STREAM, SHIFT = range(4)
GATE, CANDIDATE, UP, DOWN = range(1, 5)
# What the unperturbed model read, uint8 [layers, positions, inputs], x + 128, under the names of model.activations
# (normed_f: in layer 0); its inputs int [positions]; errors int8 [positions, V]; losses int64 [groups, sequences, T]
Seen = namedtuple("Seen", "normed_1 state gated normed_2 normed_f inner tokens errors losses")


@leaf
def draw_noise(words, seed, phase, amplitude):
    """Fills words uint32 with four noise values each; phase: its row of the table."""
    mask = u32(amplitude * 0x01010101)
    for i in range(words.size):
        words[i] = draws(hash32(seed, u32(phase[STREAM] + i)), mask)


@inner
def noise_of(phase, seed, first_group, groups, members, T):
    """int8 [groups * members * T, units]: the noise of a phase, 0 of the first of `members`, the unperturbed model."""
    sequences, count = groups * members, T * phase[UNITS] // 4
    words = empty(sequences * count, np.uint32)
    for s in range(sequences):
        q, k = s // members, s % members
        member = u32(seed + u32((first_group + q) * (members - 1) + k - 1))
        draw_noise(words[s * count:(s + 1) * count], member, phase, phase[AMPLITUDE] if k else 0)
    return words.view(np.int8).reshape((sequences * T, phase[UNITS]))


@leaf
def clean_norm(c, ln, layer, x, each, T, out):
    """out uint8 [groups * T, H] = ln(x) of the unperturbed model, which has the first T of every `each` rows."""
    norm = local((2, 2, c.HIDDEN_DIM), i32)
    draw_norm(c, ln, layer, u32(0), CLEAN, norm)
    for q in range(out.shape[0] // T):
        for first in range(0, T, GROUP):
            count = min(GROUP, T - first)
            layer_norm(c, x[q * each + first:], count, count, norm, out[q * T + first:])


@inner
def head_errors(c, z, r, windows, q, before, T, t, seed, weights, wanted, errors):
    """errors int8 [V] of position t of windows[q], of logits z[r]; weights: its softmax; wanted int32 [V]: 0, before
    and after."""
    total = i64(0)
    for v in range(c.VOCAB_SIZE):
        total += weights[v]
    for j in range(c.TARGETS):
        wanted[target(c, windows, q, before, T, t, j)] += 1
    for v in range(c.VOCAB_SIZE):
        number = t * c.VOCAB_SIZE + v
        word = hash32(seed, u32(activations.DITHER_STREAM + (number >> 1)))
        random = i32(u32(word >> u32(16 * (number & 1))) & u32(0xFFFF))
        errors[v] = head_error(z[r, v], wanted[v], c.TARGETS, weights[v], total, random)
    for j in range(c.TARGETS):
        wanted[target(c, windows, q, before, T, t, j)] = 0


@inner
def score_positions(c, windows, before, members, T, seed, x, seen):
    """Fills losses and errors of what is seen; seed: of the first group."""
    H, V, each = c.HIDDEN_DIM, c.VOCAB_SIZE, members * T
    norm, sides = local((2, 2, H), i32), new_sides(1, H, V)
    z, weights, wanted = new_logits(c), empty(padded(V, 16), i32), zeros(V, i32)
    draw_norm(c, c.ln_f, NO_LAYER, u32(0), CLEAN, norm)
    draw_sides(c, c.head, NO_LAYER, u32(0), CLEAN, sides)
    for first in range(0, x.shape[0], GROUP):
        count = min(GROUP, x.shape[0] - first)
        logits(c, CLEAN, norm, sides, x[first:], count, count, z)
        for r in range(count):
            q, k, t = (first + r) // each, (first + r) % each // T, (first + r) % T
            seen.losses[q, k, t] = position_loss(c, z, r, windows, q, before, T, t, weights, i64(k == 0))
            if k == 0:
                head_errors(c, z, r, windows, q, before, T, t, u32(seed + u32(q)), weights, wanted,
                            seen.errors[q * T + t])


@njit
def read_groups(c, windows, before, members, seed, first_group, phases, seen):
    """Reads windows int32 [groups, WINDOW] by the unperturbed model and `members` - 1 members each. seed: of the step;
    phases: the table."""
    groups, H = windows.shape[0], c.HIDDEN_DIM
    T = (windows.shape[1] - 1 - before) // c.TARGETS
    each, rows = members * T, groups * members * T
    state = new_states(c, groups * members)
    if before:
        states = states_before(c, windows[:, 0:before])
        for layer in range(c.N_LAYERS):
            for s in range(groups * members):
                copy_row(states[layer], s // members, state[layer], s)
    x, noise = empty((rows, H), np.int8), noise_of(phases[0], seed, first_group, groups, members, T)
    for r in range(rows):
        at = c.table[EMBEDDING, 0].columns + windows[r // each, before + r % T]
        for i in range(H):
            x[r, i] = clip(i32(c.columns[at, i] + noise[r, i]))
    gates, candidates = empty((rows, H), np.int16), empty((rows, H), np.int16)
    for layer in range(c.N_LAYERS):
        of_layer = phases[4 * layer:]
        clean_norm(c, LN_1, layer, x, each, T, seen.normed_1[layer])
        gates_of(c, layer, u32(0), CLEAN, rows, rows, x, gates, candidates)
        for phase, sums in (GATE, gates), (CANDIDATE, candidates):
            noise = noise_of(of_layer[phase], seed, first_group, groups, members, T)
            for r in range(rows):
                for i in range(H):
                    sums[r, i] += noise[r, i]
        recur(c, layer, u32(0), CLEAN, windows[:, before:], SAME, members, T, gates, candidates, state[layer], x,
              (seen.state[layer], seen.gated[layer]))
        clean_norm(c, LN_2, layer, x, each, T, seen.normed_2[layer])
        mlp(c, LN_2, layer, u32(0), CLEAN, rows, rows, x, Disturbance(
            noise_of(of_layer[UP], seed, first_group, groups, members, T),
            noise_of(of_layer[DOWN], seed, first_group, groups, members, T), seen.inner[layer], each, T))
    clean_norm(c, c.ln_f, NO_LAYER, x, each, T, seen.normed_f[0])
    score_positions(c, windows, before, members, T, u32(seed + u32(first_group)), x, seen)


@njit
def credits(differences, least, bits, credit, out):
    """out int8 [2, groups, members, T]: the digits of positions, and the credit of those with later ones."""
    groups, members, T = differences.shape
    for q in range(groups):
        for k in range(members):
            after = i32(0)
            for t in range(T - 1, -1, -1):
                e = digit(differences[q, k, t], least)
                after = credited(e, after, bits, credit)
                out[0, q, k, t], out[1, q, k, t] = e, after


@njit
def add_credit(credit, seed, phase, out):
    """out int8 [groups * T, units]: the settled sums over members (of seeds from `seed` on) of credit int8 [groups,
    members, T] times the noise of a phase, a row of the table."""
    groups, members, T = credit.shape
    units = phase[UNITS]
    words, totals = empty(T * units // 4, np.uint32), empty((T, units), i32)
    noise = words.view(np.int8).reshape((T, units))
    for q in range(groups):
        totals[:] = 0
        for k in range(members):
            draw_noise(words, u32(seed + u32(q * members + k)), phase, phase[AMPLITUDE])
            for t in range(T):
                factor = i32(credit[q, k, t])
                if factor != 0:
                    for i in range(units):
                        totals[t, i] = i32(totals[t, i] + i32(factor * noise[t, i]))
        for t in range(T):
            for i in range(units):
                out[q * T + t, i] = settled(totals[t, i], phase[SHIFT])


@njit
def add_products(x, sums, votes):
    """votes int32 [inputs padded to ROWS, units padded to PANEL] += x . sums: x uint8 [n, inputs], moved by 128; sums
    int8 [n, units]."""
    n, inputs = x.shape
    k4 = (n + 3) // 4
    turned = zeros((votes.shape[0], 4 * k4), np.uint8)
    for r in range(n):
        for j in range(inputs):
            turned[j, r] = x[r, j]
    panel, correction = empty(4 * k4 * PANEL, np.int8), empty(PANEL, i32)
    for p in range(votes.shape[1] // PANEL):
        panel[:] = 0
        correction[:] = 0
        for r in range(n):
            for j in range(min(PANEL, sums.shape[1] - p * PANEL)):
                value = sums[r, p * PANEL + j]
                panel[(r >> 2) * (4 * PANEL) + 4 * j + (r & 3)] = value
                correction[j] -= 128 * value
        add_tiles(turned, panel, correction, votes, p)


@njit
def add_columns(tokens, sums, votes):
    """votes int32 [units, tokens] += sums int8 [n, units], each to the column of its token."""
    for t in range(tokens.size):
        for i in range(sums.shape[1]):
            votes[i, tokens[t]] += sums[t, i]


class ActivationVotes:
    """The votes of chunks for CpuEngine: `read`, then `digits` of all that was read."""

    def __init__(self, cfg):
        self.cfg = cfg
        self.members = cfg.GROUP_SIZE + 1
        self.together = max(1, ROWS_TOGETHER // self.members)
        self.matrices, self.biases, self.embedding = activations.votes(cfg)
        # {Phase: its row}
        self._phases = {p: np.array([p.units, p.amplitude, p.stream, p.shift], np.int64)
                        for p in activations.phases(cfg)}
        self._spare = []                                     # accumulators that no thread uses

    def read(self, c, windows, seed, first_group):
        """The Seen of windows int32 [groups, WINDOW]."""
        cfg, G = self.cfg, len(windows)
        L, T, H = cfg.N_LAYERS, cfg.SEQ_LEN, cfg.HIDDEN_DIM
        seen = Seen(*(np.empty((L, G * T, width), np.uint8) for width in (H, H, H, H, H, 4 * H)),
                    tokens=windows[:, cfg.STATE_TOKENS:cfg.STATE_TOKENS + T].ravel(),
                    errors=np.empty((G * T, cfg.VOCAB_SIZE), np.int8), losses=np.empty((G, self.members, T), np.int64))
        read_groups(c, windows, cfg.STATE_TOKENS, self.members, np.uint32(seed), first_group,
                    np.array([*self._phases.values()]), seen)
        return seen

    def add_votes(self, seed, first_group, seen, least):
        """Adds the votes of the groups of `seen` to an accumulator."""
        cfg, settled_of = self.cfg, {None: seen.errors}
        sums = self._spare.pop() if self._spare else self._accumulator()
        credit = np.empty((2, len(seen.losses), cfg.GROUP_SIZE, cfg.SEQ_LEN), np.int8)
        credits(differences(seen), least, activations.fraction_bits(cfg), cfg.CREDIT, credit)
        member = np.uint32(seed + first_group * cfg.GROUP_SIZE & 0xFFFFFFFF)
        for phase, row in self._phases.items():
            settled_of[phase] = np.empty((seen.tokens.size, phase.units), np.int8)
            add_credit(credit[int(phase.later)], member, row, settled_of[phase])
        for tensor, phase, inputs in self.matrices:
            add_products(getattr(seen, inputs)[tensor.layer], settled_of[phase], sums[tensor])
        for tensor, phase in self.biases:
            sums[tensor][0, :tensor.cols] += settled_of[phase].sum(0, dtype=np.int32)
        tensor, phase = self.embedding
        add_columns(seen.tokens, settled_of[phase], sums[tensor])
        self._spare.append(sums)

    def _accumulator(self):
        """{tensor: int32 sums of its votes, padded}."""
        voted = [vote.tensor for vote in self.matrices] + [tensor for tensor, _ in (*self.biases, self.embedding)]
        return {t: np.zeros((-(-t.rows // ROWS) * ROWS, -(-t.cols // PANEL) * PANEL), np.int32) for t in voted}

    def digits(self):
        """int8 [weights]: the digits of the accumulated votes, which are forgotten."""
        digits, parts = np.zeros(self.cfg.CHUNK_DIGITS, np.int8), self._spare
        self._spare = []
        for t in parts[0]:
            digits[t.span] = activations.voted(self.cfg, t, sum(part[t] for part in parts)[:t.rows, :t.cols])
        return digits


def differences(seen):
    """int64 [groups, members, T]: by how much smaller than the clean ones their losses are."""
    return seen.losses[:, :1] - seen.losses[:, 1:]
