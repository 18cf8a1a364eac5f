"""Noise on activations on the CPU (SPEC 21): groups read by the recurrent model, and the votes of a chunk.

The sequences that go through the model together are the windows of several groups, read by the unperturbed model, and
then, group by group, those of their members: products want whole tiles of rows.
"""

import numpy as np

from engine import cpu_gru
from engine.cpu_kernels import (AMPLITUDE, NO_LOSSES, NO_NATS, SHIFT, STREAM, UNITS, Seen, add_tiles, draw_noise,
                                njit)
from engine.cpu_rules import credited, digit, i32, settled, u32
from engine.simd import PANEL, ROWS, empty, zeros
from model import activations

ROWS_TOGETHER = 68           # sequences that go through the model together, about: four groups of 17


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
            draw_noise(words, u32(seed + u32(q * members + k)), phase[STREAM], phase[AMPLITUDE])
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
        self.together = max(1, ROWS_TOGETHER // (cfg.GROUP_SIZE + 1))
        self.matrices, self.biases, self.embedding = activations.votes(cfg)
        # {Phase: its row}
        self._phases = {p: np.array([p.units, p.amplitude, p.stream, p.shift], np.int64)
                        for p in activations.phases(cfg)}
        self._spare = []                                     # accumulators that no thread uses

    def read(self, c, windows, seed, first_group):
        """The Seen of windows int32 [groups, WINDOW]."""
        cfg, clean = self.cfg, len(windows)
        L, T, H = cfg.N_LAYERS, cfg.SEQ_LEN, cfg.HIDDEN_DIM
        sequences, words = np.concatenate([windows, windows.repeat(cfg.GROUP_SIZE, 0)]), np.empty(H, np.uint32)
        seen = Seen(clean, np.array([*self._phases.values()]), np.uint32(seed + first_group & 0xFFFFFFFF),
                    np.uint32(seed + first_group * cfg.GROUP_SIZE & 0xFFFFFFFF), words, words.view(np.int8),
                    *(np.empty((L, clean * T, width), np.uint8) for width in (H, H, H, H, 4 * H, H)),
                    np.empty((clean * T, cfg.VOCAB_SIZE), np.int8),
                    windows[:, cfg.STATE_TOKENS:cfg.STATE_TOKENS + T].ravel(),
                    np.empty((len(sequences), T), np.int64))
        cpu_gru.run_windows(c, NO_LOSSES, NO_NATS, sequences, cfg.STATE_TOKENS, T, np.uint32(0), 0, seen)
        return seen

    def add_votes(self, seen, least):
        """Adds the votes of the groups of `seen` to an accumulator."""
        cfg, settled_of = self.cfg, {None: seen.errors}
        sums = self._spare.pop() if self._spare else self._accumulator()
        credit = np.empty((2, seen.clean, cfg.GROUP_SIZE, cfg.SEQ_LEN), np.int8)
        credits(differences(seen), least, activations.fraction_bits(cfg), cfg.CREDIT, credit)
        for phase, row in self._phases.items():
            settled_of[phase] = np.empty((seen.tokens.size, phase.units), np.int8)
            add_credit(credit[int(phase.later)], seen.member_seed, row, settled_of[phase])
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
    return seen.losses[:seen.clean, None] - seen.losses[seen.clean:].reshape(seen.clean, -1, seen.losses.shape[1])
