"""From what was read to moved weights, on the CPU (SPEC 9, 21): the votes of pairs with noise on weights, those of
groups with noise on activations, and the moves of the weights.

With noise on activations the sequences that go through the model together are the windows of several groups, read by
the unperturbed model, and then, group by group, those of their members: products want whole tiles of rows.
"""

from collections import namedtuple

import numpy as np

from engine import cpu_gru, cpu_transformer
from engine.cpu_kernels import NO_NATS, WATCHED, Record, add_product, draw_noise, vote_draw
from engine.cpu_rules import (adamw, credited, digit, f32, fma, handed_down, i32, muon, njit, rounded, rule, settled,
                              sgd, u32, weighed, whole_step, ztest)
from engine.simd import PANEL, ROWS, chain_tile, local
from model import activations, integer_tables, parameters, steps
from model.rules import MUON, MUON_EPS, MUON_PARTS, SGD, ZTEST

mixed, halves = rule(parameters.mixed), rule(parameters.halves)
BLOCK = 2048                # pairs whose noise is made at once for a product over the population
ROWS_TOGETHER = 72           # sequences that go through the model together, about: four groups of 17, eight of 9
# What was read of groups: their Record; losses int64 [groups, T]: of the unperturbed model; differences int64 [groups,
# members, T]: by how much smaller those of the members are, times their number, less the sum over them, 0 where a
# position does not vote; advantages int8 [groups]: the weights of the windows; count: of differences that vote
Reading = namedtuple("Reading", "record losses differences advantages count")


# --- votes with noise on weights --------------------------------------------------------------------------------------

@njit
def pack(weights, packed, correction, t, first, end):
    """Copies panels first..end - 1 of one matrix (t: its row of Model.table) from the canonical weights, with each
    column's correction."""
    k4, cols = t.rows // 4, t.cols
    for p in range(first, end):
        count = min(PANEL, cols - p * PANEL)
        sums = np.zeros(PANEL, i32)
        for k in range(k4):
            source = t.weights + (k * cols + p * PANEL) * 4
            target = t.packed + (p * k4 + k) * PANEL * 4
            for j in range(4 * count):
                value = weights[source + j]
                packed[target + j] = value
                sums[j >> 2] += value
        for j in range(PANEL):
            correction[t.correction + p * PANEL + j] = -128 * sums[j]


@njit
def input_block(c, t, seeds, signs, x, first, end):
    """x uint8 [rows padded, pairs padded to 4], rows first..end - 1: sign * noise(B, row) + 128 of a block of pairs."""
    for r in range(first, end):
        for q in range(seeds.size):
            x[r, q] = vote_draw(c, u32(seeds[q] + t.seed_b), r) * signs[q] + 128
        for q in range(seeds.size, x.shape[1]):
            x[r, q] = 128


@njit
def panel_votes(c, t, seeds, x, votes, first, end):
    """Adds a block of pairs to panels first..end - 1 of votes int32 [rows padded to ROWS, cols padded to PANEL]: x
    times noise(A, col), made here."""
    for p in range(first, end):
        noise = np.zeros((x.shape[1], min(PANEL, t.cols - p * PANEL)), np.int8)
        for q in range(seeds.size):
            for j in range(noise.shape[1]):
                noise[q, j] = vote_draw(c, u32(seeds[q] + t.seed_a), p * PANEL + j)
        add_product(x, noise, votes, p)


@njit
def vector_votes(c, t, seeds, signs, votes, first, end):
    """votes int32 [width] from first to end - 1: sum over pairs of sign * noise(first stream, i) * noise(second stream,
    i)."""
    for i in range(first, end):
        s = i32(0)
        for q in range(seeds.size):
            a = vote_draw(c, u32(seeds[q] + t.seed_a), i)
            b = vote_draw(c, u32(seeds[q] + t.seed_b), i)
            s = i32(s + a * b * signs[q])
        votes[i] = s


# --- votes with noise on activations ----------------------------------------------------------------------------------

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

    def vote_on_nothing(self, record):
        """Compiles what `votes` calls, or loads it from the cache. record: an empty one."""
        differences = np.empty((0, self.cfg.GROUP_SIZE, self.cfg.SEQ_LEN), np.int64)
        nothing = Reading(record, None, differences, np.empty(0, np.int8), 0)
        self.votes([nothing], activations.least_differences(1, 1))

    def chunk(self, read, threads, job):
        """(bytes, int): the packed digits and the loss of a chunk, of which these Readings are. job: CpuEngine._job,
        where each of the threads sums the votes of its share of them."""
        cfg, digits = self.cfg, np.zeros(self.cfg.CHUNK_DIGITS, np.int8)
        each = -(-len(read) // threads)
        total = sum(int(np.abs(part.differences).sum()) for part in read)
        least = activations.least_differences(total, sum(part.count for part in read))
        votes = job([(read[at:at + each], least) for at in range(0, len(read), each)], self.votes).finish()
        for t, sums in votes[0].items():
            for part in votes[1:]:
                sums += part[t]
            digits[t.span] = activations.voted(cfg, t, sums[:t.rows, :t.cols])
        loss = cfg.GROUP_SIZE * sum(int(part.losses.sum()) for part in read)
        return steps.pack_digits(digits), loss


# --- moves, digests ---------------------------------------------------------------------------------------------------

@njit
def muon_start(o, t, votes, moments, x):
    """Muon's momentum after votes int32 [rows, cols], and x float32 [shorter side, longer side]: the momentum of norm
    1."""
    rows, cols = t.rows, t.cols
    sums = np.zeros(MUON_PARTS, f32)
    for i in range(x.shape[0]):
        for j in range(x.shape[1]):
            r, c = (i, j) if rows <= cols else (j, i)
            at = t.weights + ((r >> 2) * cols + c) * 4 + (r & 3)
            m = fma(moments[at, 0], o.momentum, f32(i32(-votes[r, c])))
            part = (i * x.shape[1] + j) % MUON_PARTS
            sums[part] = fma(m, m, sums[part])
            moments[at, 0] = x[i, j] = m
    half = MUON_PARTS // 2
    while half:
        for part in range(half):
            sums[part] = f32(sums[part] + sums[part + half])
        half //= 2
    norm = f32(f32(np.sqrt(sums[0])) + f32(MUON_EPS))
    for i in range(x.shape[0]):
        for j in range(x.shape[1]):
            x[i, j] = f32(x[i, j] / norm)


@njit
def muon_panels(left, right, gram, alpha, beta, out, first, end):
    """Column panels first..end - 1 of out = left . left^T where `gram`, else fma(beta, left . right, alpha * right);
    float32, out is neither of the others."""
    length = left.shape[1]
    panel = np.empty((length, PANEL), f32)
    for p in range(first, end):
        for k in range(length):
            for j in range(PANEL):
                panel[k, j] = left[p * PANEL + j, k] if gram else right[k, p * PANEL + j]
        for r in range(0, out.shape[0], ROWS):
            chain_tile(left, r * length, length, panel, 0, out, r * out.shape[1] + p * PANEL, out.shape[1], length)
        if not gram:
            for r in range(out.shape[0]):
                for j in range(p * PANEL, (p + 1) * PANEL):
                    out[r, j] = fma(beta, out[r, j], f32(alpha * right[r, j]))


@njit                       # not `inner`: optimized only within its caller, it takes more than twice the time
def move(o, vote, direction, weight, moments):
    """The move of one weight, int32; moments float32 [3] (m, v, acc) change in place. direction: Muon's."""
    if o.rule == ZTEST:
        least = i32(o.lr)        # few votes are as large, which a processor predicts; half of them are positive
        return ztest(vote, weight, least) if vote >= least or vote <= -least else i32(0)
    if o.rule == SGD:
        acc = sgd(vote, moments[2], o.lr)
    elif o.rule == MUON:
        acc = muon(direction, o.size, weight, moments[2], o.lr, o.decay)
    else:
        moments[0], moments[1], acc = adamw(vote, weight, moments[0], moments[1], moments[2], o.lr, o.beta1,
                                            o.one_less_beta1, o.beta2, o.one_less_beta2, o.eps, o.decay)
    step, moments[2] = whole_step(weight, acc)
    return step


@njit
def apply_votes(o, weights, t, group, votes, x, moments, changed_rows, changed_cols, first, end):
    """Moves the weights of rows group * first..group * end - 1 of one stored array by their votes int32 [rows, cols],
    or by Muon's x float32 [shorter side, longer side], and marks the rows and columns of those that changed; their
    number. group: 4 rows of a matrix are stored together, a vector is one row."""
    cols, changed = t.cols, 0
    direction = f32(0)
    for block in range(first, end):
        for col in range(cols):
            for k in range(group):
                at = t.weights + (block * cols + col) * group + k
                weight = i32(weights[at])
                if o.rule == MUON:
                    r = block * group + k
                    direction = x[r, col] if t.rows <= cols else x[col, r]
                step = move(o, votes[block * group + k, col], direction, weight, moments[at])
                if step:
                    weights[at] = weight + step
                    changed_rows[block * group + k] = 1
                    changed_cols[col] = 1                   # threads only ever write the same 1
                    changed += 1
    return changed


@njit
def word_sums(words, number, first, end):
    """The two sums of model.parameters.Digest over words first..end - 1 of uint64 [n]; number: that of words[0]."""
    a = b = np.uint64(0)
    part, number = words[first:end], np.uint64(number + first)
    for i in range(part.size):
        x = mixed(part[i], number + np.uint64(i))
        a += x
        b += halves(x)
    return a, b
