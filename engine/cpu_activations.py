"""Noise on activations on the CPU (SPEC 21): groups read by the recurrent model, and the votes of a chunk.

The sequences that go through the model together are the windows of several groups, read by the unperturbed model, and
then, group by group, those of their members: products want whole tiles of rows.
"""

import numpy as np

from engine import cpu_gru
from engine.cpu_compiler import njit
from engine.cpu_kernels import NO_NATS, Record, add_product, draw_noise
from engine.cpu_rules import credited, digit, i32, settled, u32
from engine.simd import PANEL, ROWS
from model import activations, fitness_digits, parameters

ROWS_TOGETHER = 68           # sequences that go through the model together, about: four groups of 17
# what matrices multiply, by its number in a layer (engine.cpu_kernels.watch)
INPUTS = "normed_1", "state", "gated", "normed_2", "inner"


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
def add_credit(credit, seed, stream, amplitude, shift, out):
    """out int8 [>= groups * T, units]: the settled sums over members (of seeds from `seed` on) of credit int8 [groups,
    members, T] times their noise; stream, amplitude, shift: of the Phase."""
    groups, members, T = credit.shape
    units = out.shape[1]
    words, totals = np.empty(T * units // 4, np.uint32), np.empty((T, units), i32)
    noise = words.view(np.int8).reshape((T, units))
    for q in range(groups):
        totals[:] = 0
        for k in range(members):
            draw_noise(words, u32(seed + u32(q * members + k)), stream, amplitude)
            for t in range(T):
                factor = i32(credit[q, k, t])
                if factor != 0:
                    for i in range(units):
                        totals[t, i] = i32(totals[t, i] + i32(factor * noise[t, i]))
        for t in range(T):
            for i in range(units):
                out[q * T + t, i] = settled(totals[t, i], shift)


@njit
def add_products(x, sums, votes):
    """votes int32 [inputs padded to ROWS, units padded to PANEL] += x . sums: x uint8 [inputs, n], moved by 128; sums
    int8 [n, units]; n a multiple of 4."""
    for p in range(votes.shape[1] // PANEL):
        add_product(x, sums[:, p * PANEL:(p + 1) * PANEL], votes, p)


class ActivationVotes:
    """Reads groups for CpuEngine, and votes."""

    def __init__(self, cfg):
        self.cfg, self._phases, self._tensors = cfg, activations.phases(cfg).values(), parameters.tensors(cfg)
        self.together = max(1, ROWS_TOGETHER // (cfg.GROUP_SIZE + 1))
        self._matrices, self._biases, self._embedding = activations.votes(cfg)
        # of sequences without noise, of which nothing is kept: with None the model would be compiled once more
        self.nothing = self._record(np.empty((0, cfg.WINDOW), np.int32), 0, 0, ())

    def _record(self, windows, seed, first_group, phases):
        """The Record that the windows of groups are to fill; phases: which have noise."""
        cfg = self.cfg
        L, T, H = cfg.N_LAYERS, cfg.SEQ_LEN, cfg.HIDDEN_DIM
        rows, words, amplitudes = -(-len(windows) * T // 4) * 4, np.empty(H, u32), np.zeros(5 * L + 1, int)
        for phase in phases:
            amplitudes[phase.stream // activations.WORDS_APART] = phase.amplitude
        return Record(u32(seed + first_group & 0xFFFFFFFF), u32(seed + first_group * cfg.GROUP_SIZE & 0xFFFFFFFF), T,
                      amplitudes, np.zeros((8 * L * H + H, rows), np.uint8), words, words.view(np.int8),
                      windows[:, cfg.STATE_TOKENS:cfg.STATE_TOKENS + T].ravel(),
                      np.zeros((rows, cfg.VOCAB_SIZE), np.int8))

    def read(self, c, windows, seed, first_group):
        """(Record, losses, differences) of windows int32 [groups, WINDOW]. losses int64 [groups, T]: of the unperturbed
        model; differences int64 [groups, members, T]: by how much smaller those of the members are."""
        cfg, groups, T = self.cfg, len(windows), self.cfg.SEQ_LEN
        sequences = np.concatenate([windows, windows.repeat(cfg.GROUP_SIZE, 0)])
        record, losses = self._record(windows, seed, first_group, self._phases), np.empty((len(sequences), T), np.int64)
        cpu_gru.run_windows(c, losses.reshape(1, -1), NO_NATS, sequences, cfg.STATE_TOKENS, T, u32(0), 0, record)
        return record, losses[:groups], losses[:groups, None] - losses[groups:].reshape(groups, -1, T)

    def votes(self, read, least):
        """{tensor: int32 votes [rows padded to ROWS, cols padded to PANEL]} of what was read."""
        cfg = self.cfg
        sums = {t: np.zeros((-(-t.rows // ROWS) * ROWS, -(-t.cols // PANEL) * PANEL), np.int32)
                for t in self._tensors}
        for record, _, differences in read:
            credit, settled_of = np.empty((2, *differences.shape), np.int8), {None: record.errors}
            credits(differences, least, activations.fraction_bits(cfg), cfg.CREDIT, credit)
            for phase in self._phases:
                settled_of[phase] = np.zeros((len(record.errors), phase.units), np.int8)
                if phase.amplitude:
                    add_credit(credit[int(phase.later)], record.member_seed, phase.stream, phase.amplitude, phase.shift,
                               settled_of[phase])
            for tensor, phase, inputs in self._matrices:
                first = cfg.HIDDEN_DIM * (8 * phase.layer + INPUTS.index(inputs) if phase else 8 * cfg.N_LAYERS)
                add_products(record.inputs[first:first + tensor.rows], settled_of[phase], sums[tensor])
            for tensor, phase in self._biases:
                sums[tensor][0, :tensor.cols] += settled_of[phase].sum(0, dtype=np.int32)
            tensor, phase = self._embedding
            if phase.amplitude:
                np.add.at(sums[tensor].T, record.tokens, settled_of[phase][:record.tokens.size])
        return sums

    def vote_on_nothing(self):
        """Compiles what `votes` calls, or loads it from the cache."""
        differences = np.empty((0, self.cfg.GROUP_SIZE, self.cfg.SEQ_LEN), np.int64)
        self.votes([(self.nothing, None, differences)], activations.least_differences(1, 1))

    def chunk(self, read, each, job):
        """(bytes, int): the packed digits and the loss of a chunk, of which this was read. job: CpuEngine._job, where a
        thread sums the votes of `each` Records."""
        cfg, digits = self.cfg, np.zeros(self.cfg.CHUNK_DIGITS, np.int8)
        total = sum(int(np.abs(differences).sum()) for _, _, differences in read)
        least = activations.least_differences(total, cfg.CHUNK_SIZE * cfg.SEQ_LEN)
        votes = job([(read[at:at + each], least) for at in range(0, len(read), each)], self.votes).finish()
        for t in votes[0]:
            digits[t.span] = activations.voted(cfg, t, sum(part[t] for part in votes)[:t.rows, :t.cols])
        loss = cfg.GROUP_SIZE * sum(int(losses.sum()) for _, losses, _ in read)
        return fitness_digits.pack_ternary(digits), loss
