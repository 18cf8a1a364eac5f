"""Noise on activations on the CPU (SPEC 21): groups read by either model, and the votes of a chunk.

The sequences that go through the model together are the windows of several groups, read by the unperturbed model, and
then, group by group, those of their members: products want whole tiles of rows.
"""

from collections import namedtuple

import numpy as np

from engine import cpu_gru, cpu_transformer
from engine.cpu_compiler import njit
from engine.cpu_kernels import NO_NATS, WATCHED, Record, add_product, draw_noise
from engine.cpu_rules import credited, digit, handed_down, i32, rounded, settled, u32, weighed
from engine.simd import PANEL, ROWS, local
from model import activations, fitness_digits, integer_tables, parameters

ROWS_TOGETHER = 68           # sequences that go through the model together, about: four groups of 17
# What was read of groups: their Record; losses int64 [groups, T]: of the unperturbed model; differences int64 [groups,
# members, T]: by how much smaller those of the members are, times their number, less the sum over them, 0 where a
# position does not vote; advantages int8 [groups]: the weights of the windows; count: of differences that vote
Reading = namedtuple("Reading", "record losses differences advantages count")


@njit
def recurrent_credits(differences, least, bits, credit, out):
    """out int8 [2, 1, groups, members, T]: the digits of positions, and the credit of those with later ones."""
    groups, members, T = differences.shape
    for q in range(groups):
        for k in range(members):
            after = i32(0)
            for t in range(T - 1, -1, -1):
                e = digit(differences[q, k, t], least)
                after = credited(e, after, bits, credit)
                out[0, 0, q, k, t], out[1, 0, q, k, t] = e, after


@njit
def attention_credits(differences, least, unit, shares, direct, attended):
    """direct int8 [L + 1, 1, groups, members, T]: the credit of outputs below layer 0 and in every layer; attended int8
    [L, heads, groups, members, T]: that of keys and values. shares: of the Record; unit: of a digit."""
    groups, members, T = differences.shape
    layers, heads = attended.shape[:2]
    sums, total = np.empty(T, i32), np.empty(T, i32)
    for q in range(groups):
        for k in range(members):
            for t in range(T):
                direct[layers, 0, q, k, t] = unit * digit(differences[q, k, t], least)
            for layer in range(layers - 1, -1, -1):
                total[:] = 0
                for head in range(heads):
                    sums[:] = 0
                    for t in range(T):
                        due = i32(direct[layer + 1, 0, q, k, t])
                        if due != 0:
                            for s in range(t + 1):
                                sums[s] = i32(sums[s] + i32(due * shares[q, layer, head, t, s]))
                    for s in range(T):
                        attended[layer, head, q, k, s] = settled(sums[s], 12)
                        total[s] = i32(total[s] + rounded(sums[s], 8))
                for s in range(T):
                    direct[layer, 0, q, k, s] = handed_down(i32(direct[layer + 1, 0, q, k, s]), total[s], heads)


@njit
def add_credit(credit, seed, number, layers, turn, stream, shift, weights, rope, bit, out):
    """out int8 [>= groups * T, units]: the settled sums over members, the first of which has this seed and this number
    in the step, of credit int8 [1 or heads, groups, members, T] times the signs of their noise. turn, stream,
    shift: of the Phase; weights int8 [groups]: of the windows; rope: empty, or what turns sums back, with
    ROPE_SCALE_BIT."""
    parts, groups, members, T = credit.shape
    units = out.shape[1]
    width = units // parts
    totals, noise = np.empty((T, units), i32), local(width, i32)
    pairs = totals.view(np.int64)
    for q in range(groups):
        totals[:] = 0
        for k in range(q * members, (q + 1) * members):
            for t in range(T if turn < 0 or (number + k) % layers == turn else 0):
                for part in range(parts):
                    factor, at = i32(credit[part, q, k - q * members, t]), part * width
                    if factor != 0:
                        draw_noise(noise, u32(seed + u32(k)), stream, t * units + at, factor)
                        for i in range(width):
                            totals[t, at + i] = i32(totals[t, at + i] + noise[i])
        for t in range(T):
            if rope.size:
                cpu_transformer.rotate(pairs, t, rope, t, bit)
            for i in range(units):
                out[q * T + t, i] = weighed(totals[t, i], i32(weights[q]), shift)


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
        self._watched = np.zeros((len(parameters.table(cfg)), cfg.N_LAYERS), WATCHED)
        self._inputs, places = 0, {}
        # a tied embedding is the head as well
        looked_up = *self._embedding[:2], "normed_f" if self._embedding[0].product else ""
        for tensor, phase, inputs in [*self._matrices, looked_up]:
            if (inputs, tensor.layer) not in places:
                places[inputs, tensor.layer] = self._inputs
                self._inputs += tensor.rows
            noise = (phase.stream, phase.amplitude, phase.turn) if phase else (0, 0, 0)
            self._watched[tensor.param, tensor.layer] = places[inputs, tensor.layer], *noise
        # of sequences without noise, of which nothing is kept: with None the model would be compiled once more
        self.nothing = self._record(np.empty((0, cfg.WINDOW), np.int32), 0, 0, np.empty(0, np.int8))._replace(
            watched=np.zeros_like(self._watched))
        back = integer_tables.rope_table(cfg, cfg.SEQ_LEN) * np.int32([1, -1])
        self._rope = np.tile(back.view(np.int64)[..., 0], cfg.N_HEADS)

    def _record(self, windows, seed, first_group, weights):
        """The Record that the windows of groups are to fill; weights: int8, of their positions."""
        cfg, T, member = self.cfg, self.cfg.SEQ_LEN, first_group * self.cfg.GROUP_SIZE
        rows = -(-len(windows) * T // 4) * 4
        return Record(u32(seed + first_group & 0xFFFFFFFF), u32(seed + member & 0xFFFFFFFF), member, T, self._watched,
                      np.zeros((self._inputs, rows), np.uint8), np.empty(4 * cfg.HIDDEN_DIM, np.int32),
                      windows[:, cfg.STATE_TOKENS:cfg.STATE_TOKENS + T].ravel(),
                      np.zeros((rows, cfg.VOCAB_SIZE), np.int8), weights,
                      np.zeros((len(windows), cfg.N_LAYERS, cfg.N_HEADS, T, T), np.int16))

    def read(self, c, windows, seed, first_group, advantages=None, counted=None):
        """A Reading of windows int32 [groups, WINDOW]. advantages int8 [groups], counted bool [groups, T]: their
        weights and the positions that vote, all alike in a chunk of text."""
        cfg, groups, T = self.cfg, len(windows), self.cfg.SEQ_LEN
        sequences = np.concatenate([windows, windows.repeat(cfg.GROUP_SIZE, 0)])
        if advantages is None:
            advantages, counted = np.full(groups, activations.LEVELS, np.int8), np.ones((groups, T), bool)
        record = self._record(windows, seed, first_group, (advantages[:, None] * counted).ravel())
        losses = np.empty((len(sequences), T), np.int64)
        forward, shape = (cpu_gru, (1, -1)) if cfg.MODEL == "gru" else (cpu_transformer, losses.shape)
        forward.run_windows(c, losses.reshape(shape), NO_NATS, sequences, cfg.STATE_TOKENS, T, u32(0), 0, record)
        smaller = losses[:groups, None] - losses[groups:].reshape(groups, -1, T)
        better = (cfg.GROUP_SIZE * smaller - smaller.sum(1, keepdims=True)) * counted[:, None]
        return Reading(record, losses[:groups], better, advantages, cfg.GROUP_SIZE * int(counted.sum()))

    def _credit_of(self, record, differences, least):
        """A function of a Phase: int8 [1 or heads, groups, members, T]."""
        cfg, shape = self.cfg, differences.shape
        if cfg.MODEL == "gru":
            both = np.empty((2, 1, *shape), np.int8)
            recurrent_credits(differences, least, activations.fraction_bits(cfg), cfg.CREDIT, both)
            return lambda phase: both[int(phase.later)]
        direct = np.empty((cfg.N_LAYERS + 1, 1, *shape), np.int8)
        attended = np.empty((cfg.N_LAYERS, cfg.N_HEADS, *shape), np.int8)
        attention_credits(differences, least, activations.UNIT, record.shares, direct, attended)
        return lambda phase: (attended[phase.layer] if phase.later else
                              direct[0 if phase.outside else phase.layer + 1])

    def votes(self, read, least):
        """{tensor: int32 votes [rows padded to ROWS, cols padded to PANEL]} of what was read."""
        cfg = self.cfg
        sums = {t: np.zeros((-(-t.rows // ROWS) * ROWS, -(-t.cols // PANEL) * PANEL), np.int32)
                for t in self._tensors}
        for record, _, differences, advantages, _ in read:
            credit_of, settled_of = self._credit_of(record, differences, least), {None: record.errors}
            for phase in self._phases:
                settled_of[phase] = np.zeros((len(record.errors), phase.units), np.int8)
                if phase.amplitude:
                    rope = self._rope if phase.rotated else self._rope[:0]
                    add_credit(credit_of(phase), record.member_seed, record.member, cfg.N_LAYERS, phase.turn,
                               phase.stream, phase.shift, advantages, rope, cfg.ROPE_SCALE_BIT, settled_of[phase])
            for tensor, phase, _ in self._matrices:
                first = self._watched[tensor.param, tensor.layer]["inputs"]
                add_products(record.inputs[first:first + tensor.rows], settled_of[phase], sums[tensor])
            for tensor, phase in self._biases:
                sums[tensor][0, :tensor.cols] += settled_of[phase].sum(0, dtype=np.int32)
            tensor, phase, weight = self._embedding
            if phase.amplitude:
                settled_at = settled_of[phase][:record.tokens.size].astype(np.int32)
                np.add.at(sums[tensor].T, record.tokens, weight * settled_at)
        return sums

    def vote_on_nothing(self):
        """Compiles what `votes` calls, or loads it from the cache."""
        differences = np.empty((0, self.cfg.GROUP_SIZE, self.cfg.SEQ_LEN), np.int64)
        nothing = Reading(self.nothing, None, differences, np.empty(0, np.int8), 0)
        self.votes([nothing], activations.least_differences(1, 1))

    def chunk(self, read, each, job):
        """(bytes, int): the packed digits and the loss of a chunk, of which these Readings are. job: CpuEngine._job,
        where a thread sums the votes of `each` of them."""
        cfg, digits = self.cfg, np.zeros(self.cfg.CHUNK_DIGITS, np.int8)
        total = sum(int(np.abs(part.differences).sum()) for part in read)
        least = activations.least_differences(total, sum(part.count for part in read))
        votes = job([(read[at:at + each], least) for at in range(0, len(read), each)], self.votes).finish()
        for t in votes[0]:
            digits[t.span] = activations.voted(cfg, t, sum(part[t] for part in votes)[:t.rows, :t.cols])
        loss = cfg.GROUP_SIZE * sum(int(part.losses.sum()) for part in read)
        return fitness_digits.pack_ternary(digits), loss
