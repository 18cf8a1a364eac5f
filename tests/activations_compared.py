"""Noise on activations in random configurations: the plain reading, its update included, in the place of an engine."""

import functools
import hashlib
import math
from collections import namedtuple
from unittest import mock

import numpy as np

import egg_config
from engine import hardware
from model import activations, integer_tables, parameters, rules, soft_targets, steps
from model.reading import Reading, clip, divide

GPU_KINDS = "wgmma", "mma"


def random_configuration(seed, widest=128):
    """(Config, training tokens) drawn by a seed, every third one with the recurrent model: few enough sequences for the
    plain reading."""
    rng = np.random.default_rng(seed)

    def one_of(*values):
        return values[rng.integers(len(values))]

    widths = [H for H in (64, 64, 96, 128, 160, 192, 256, 320, 512, 768, 1024) if H <= widest]
    H, loss = one_of(*widths), one_of("exact", "exact", "deggs")
    members, groups = one_of((2, 1), (2, 5), (4, 3), (6, 2), (8, 3), (10, 2), (16, 2), (34, 1))
    if H > 320:
        members, groups = min(members, 6), min(groups, 2)
    layers = one_of(1, 1, 2, 3, 4) if H <= 320 else one_of(1, 2)
    if seed % 3:
        of_model = dict(
            MODEL="transformer", SEQ_LEN=8 * int(rng.integers(1, 6)), HEAD_DIM=one_of(*(D for D in (32, 64, 128)
                                                                                       if H % D == 0)),
            SHIFT_MLP_UP=one_of(7, 8, 6), SHIFT_MLP_DOWN=one_of(7, 9), SHIFT_OUT=one_of(7, 8), SHIFT_ATTN=one_of(7, 8),
            SHIFT_LOGIT=one_of(8, 6), NOISE_ATTENTION=one_of(0, 8, 8, 21), NOISE_OUTPUT=one_of(0, 4, 4, 9))
    else:
        of_model = dict(
            MODEL="gru", SEQ_LEN=int(rng.integers(8, 40)), STATE_TOKENS=one_of(0, 0, 5, 17), MLP_RELU=one_of(0, 1),
            FIXED_POINT=one_of(4, 4, 3), NOISE_GATE=one_of(7, 15, 63),
            NOISE_CANDIDATE=one_of(0, 1, 7), CREDIT=int(rng.integers(0, 16)))
    cfg = egg_config.make(
        PERTURB="activations", HIDDEN_DIM=H, N_LAYERS=layers, VOCAB_SIZE=one_of(256, 256, 257, 301, 1000), **of_model,
        GROUP_SIZE=members, CHUNK_SIZE=members * groups, POPULATION_SIZE=one_of(1, 2, 3) * members * groups, LOSS=loss,
        HOST_GAUSSIAN=1, HOST_MASK=one_of(7, 15, 42), ADAPTIVE_NOISE_MODE=0, SOFTMAX_EXP_SCALE=one_of(6.0, 12.0, 23.0),
        NOISE_EMBEDDING=one_of(0, 1, 3), NOISE_UP=one_of(3, 7, 31), NOISE_DOWN=one_of(0, 1, 3),
        ADAPTIVE_THRESHOLD_ALPHA=one_of(0.77, 0.1, 1.5), USE_ADAPTIVE_THRESHOLD=one_of(1, 1, 0),
        LR_SCHEDULE=((0, 1.5), (1, one_of(0.3, 1.0))), ADAM_BETA1=one_of(0.5, 0.9), ADAM_WEIGHT_DECAY=one_of(0.0, 0.01),
        NOISE_REUSE=one_of(1, 1, 2), USE_SAME_DATA=one_of(0, 0, 1),
        SOFT_TARGETS=one_of((), ((0, 1),), ((0, 2),)) if loss == "exact" else ())
    tokens = rng.integers(0, 5, 400) * 50 % cfg.VOCAB_SIZE
    return cfg, tokens.astype(np.uint8 if cfg.VOCAB_SIZE == 256 else np.uint32)


def step_of(engine):
    """([(packed digits, loss) of a chunk], weights changed): a whole step of an engine."""
    cfg = engine.cfg
    found = [engine.evaluate(first, cfg.CHUNK_SIZE) for first in range(0, cfg.POPULATION_SIZE, cfg.CHUNK_SIZE)]
    return found, engine.update(b"".join(packed for packed, _ in found))


def fma(a, b, c):
    """float32, rounded once (in extended precision, where the product is exact, first)."""
    return (np.asarray(a, np.longdouble) * b + c).astype(np.float32)


# the votes of a chunk (SPEC 21), from plain readings of the model

# what multiplies a matrix: the part that a Reading sees
SEEN_AS = {"normed_1": "LN1", "state": "Before", "gated": "Gated", "attended": "Attended", "normed_2": "LN2",
           "inner": "MLP_Exp", "normed_f": "LN_F", "normed_0": "LN_Init", "inner_0": "InitMLP_Exp"}
OUTSIDE = "normed_f", "normed_0", "inner_0"                  # the layers

# A window read by the unperturbed model and by the members of a group. seed: the group's; parts {(name, layer): what
# the unperturbed model saw}; losses [positions]: its own; members [(number in the step, seed)]; differences [members,
# positions]: by how much smaller their losses are, times the number of members, less the sum over these.
Group = namedtuple("Group", "seed inputs targets parts losses members differences")


def chunk_votes(cfg, state, tokens, known, first):
    """(int8 [weights], int): the digits of the chunk that begins with member `first`, and its loss. tokens: the data;
    known: their soft_targets.Followers, or None."""
    first_group, groups = first // cfg.GROUP_SIZE, cfg.CHUNK_SIZE // cfg.GROUP_SIZE
    windows = soft_targets.windows(cfg, tokens, known, state.step, state.seed, first_group, groups)
    return votes_of_windows(cfg, state, windows, first_group, np.full(groups, 7), np.ones((groups, cfg.SEQ_LEN), int))


def votes_of_windows(cfg, state, windows, first_group, weights, counted):
    """The same of windows that groups from number first_group on read. weights int [n]; counted int [n, SEQ_LEN]: 1 for
    positions that vote, else 0 (SPEC 22)."""
    groups = [read_group(cfg, state, window, number) for number, window in enumerate(windows, first_group)]
    groups = [group._replace(differences=group.differences * votes) for group, votes in zip(groups, counted)]
    total = sum(int(np.abs(group.differences).sum()) for group in groups)
    count = 7 * cfg.GROUP_SIZE * int(counted.sum())
    least = [max(1, -((2 * level - 1) * -2 * total // count)) for level in range(1, activations.LEVELS + 1)]
    votes = [group_votes(cfg, group, least, int(weight), of_group)
             for group, weight, of_group in zip(groups, weights, counted)]
    digits = np.zeros(cfg.CHUNK_DIGITS, np.int8)
    for tensor in votes[0]:
        voted = large(cfg, sum(of_group[tensor] for of_group in votes))
        digits[tensor.span] = parameters.to_canonical(voted) if tensor.matrix else voted
    return digits, cfg.GROUP_SIZE * sum(int(group.losses.sum()) for group in groups)


def large(cfg, votes):
    """The signs of votes (int64) that are not small, else 0."""
    alpha = float(np.float32(cfg.ADAPTIVE_THRESHOLD_ALPHA)) if cfg.USE_ADAPTIVE_THRESHOLD else 0
    return np.sign(votes) * (np.abs(votes) >= max(1, math.ceil(np.abs(votes).sum() / votes.size * alpha)))


def read_group(cfg, state, window, number):
    """The Group of this number in the step."""
    T, before, parts = cfg.SEQ_LEN, cfg.STATE_TOKENS, {}
    inputs, drawn = window[before:before + T], window[before + T + 1:]
    targets = np.column_stack([window[before + 1:before + T + 1], drawn.reshape(T, -1)])
    clean = Reading(cfg, state, see=lambda layer, name, values: parts.update({(name, layer): values}))
    if before:
        clean.hidden(window[:before])
    carried = clean.carried.copy()
    losses = np.array(clean.losses(inputs, targets), np.int64)
    numbers = range(number * cfg.GROUP_SIZE, (number + 1) * cfg.GROUP_SIZE)
    members, differences = [(p, state.seed + p) for p in numbers], []
    for _, seed in members:
        member = Reading(cfg, state, seed, disturbed=True)
        member.carried = carried.copy()
        differences.append(losses - member.losses(inputs, targets))
    differences = cfg.GROUP_SIZE * np.array(differences) - np.sum(differences, 0)
    return Group(state.seed + number, inputs, targets, parts, losses, members, differences)


def group_votes(cfg, group, least, weight, counted):
    """{tensor: int64 votes of a group}; least: the least sizes of differences for the digits of the chunk; weight: of
    its window; counted int [positions]: which vote."""
    matrices, biases, embedding = activations.votes(cfg)
    settled = {None: head_errors(cfg, group.seed, group.parts["Logits", -1], group.targets, weight * counted[:, None])}
    digits = np.sign(group.differences) * (np.abs(group.differences)[:, :, None] >= least).sum(2)
    credits = [(credits_of_gru if cfg.MODEL == "gru" else credits_of_transformer)(cfg, digit, group.parts)
               for digit in digits]
    for phase in activations.phases(cfg).values():
        total = np.zeros((cfg.SEQ_LEN, phase.units), np.int64)
        for (number, seed), of_member in zip(group.members, credits):
            if phase.turn in (-1, number % cfg.N_LAYERS):
                total += of_member(phase) * activations.signs(phase, seed, cfg.SEQ_LEN)
        if phase.rotated:
            total = turned_back(cfg, total)
        size = (2 * np.abs(weight * total) + (7 << phase.shift)) // (14 << phase.shift)
        settled[phase] = clip(np.sign(weight * total) * size) * (phase.amplitude > 0)
    votes = {tensor: settled[phase].sum(0) for tensor, phase in biases}
    for tensor, phase, inputs in matrices:
        of_layer = -1 if inputs in OUTSIDE[:1] else 0 if inputs in OUTSIDE else phase.layer
        votes[tensor] = group.parts[SEEN_AS[inputs], of_layer].T @ settled[phase]
    table, phase, weight = embedding
    votes.setdefault(table, np.zeros((table.rows, table.cols), np.int64))
    np.add.at(votes[table].T, group.inputs, weight * settled[phase])
    return votes | {t: np.zeros((t.rows, t.cols) if t.matrix else t.cols, np.int64)
                    for t in parameters.tensors(cfg) if t not in votes}


def halves_away(total, shift):
    """total / 2^shift, rounded, halves away from zero."""
    return np.sign(total) * (np.abs(total) + (1 << shift >> 1) >> shift)


def turned_back(cfg, x):
    """The rotation of SPEC 7 by the opposite angle."""
    even, odd = np.moveaxis(x.reshape(len(x), -1, cfg.HEAD_DIM // 2, 2), -1, 0)
    cos, sin = np.moveaxis(integer_tables.rope_table(cfg, len(x)).astype(np.int64)[:, None], -1, 0)
    turned = np.stack([even * cos + odd * sin, odd * cos - even * sin], -1)
    return (turned + (1 << cfg.ROPE_SCALE_BIT - 1) >> cfg.ROPE_SCALE_BIT).reshape(x.shape)


def credits_of_gru(cfg, digit, parts):
    """credit(phase) of a member: int64 [positions, 1]."""
    later = credit(cfg, digit)
    return lambda phase: (later if phase.later else digit)[:, None]


def credits_of_transformer(cfg, digit, parts):
    """credit(phase) of a member: int64 [positions, 1 or HIDDEN_DIM]."""
    T, direct, attended, due = cfg.SEQ_LEN, {}, {}, 16 * digit
    for layer in reversed(range(cfg.N_LAYERS)):
        share = np.zeros((cfg.N_HEADS, T, T), np.int64)      # of position s in what t attends to
        for of_head, weights in zip(share, parts["Weights", layer]):
            for t, w in enumerate(weights):
                of_head[t, :t + 1] = (8192 * w + w.sum()) // (2 * w.sum())
        sums = np.einsum("t,hts->sh", due, share)
        direct[layer] = due[:, None]
        attended[layer] = clip(halves_away(sums, 12)).repeat(cfg.HEAD_DIM, 1)
        total = 3 * (16 * cfg.N_HEADS * due + halves_away(sums, 8).sum(1))
        due = clip(np.sign(total) * ((np.abs(total) + 32 * cfg.N_HEADS) // (64 * cfg.N_HEADS)))
    first = due[:, None]

    def credit_of(phase):
        if phase.outside:
            return first
        return (attended if phase.later else direct)[phase.layer]
    return credit_of


def credit(cfg, digit):
    """int64 [positions]: the digits of a position and, fading, of later ones, with activations.fraction_bits."""
    credits, later = np.zeros_like(digit), 0
    for t in reversed(range(len(digit))):
        later = credits[t] = (digit[t] << activations.fraction_bits(cfg)) + divide(later * cfg.CREDIT, 16)
    return credits


def head_errors(cfg, seed, z, targets, weight):
    """int64 [positions, VOCAB_SIZE]: 127 times what is wanted less the softmax, times weight [positions, 1] / 7,
    rounded down after a hashed dither; 0 where a logit is at its limit and cannot follow."""
    exp = integer_tables.exp_table(cfg).astype(np.int64)
    weights = exp[np.minimum(len(exp) - 1, z.max(1, keepdims=True) - z)]
    wanted = (targets[:, :, None] == np.arange(cfg.VOCAB_SIZE)).sum(1)
    words = steps.hash32(seed, np.arange(rules.DITHER_STREAM, rules.DITHER_STREAM + -(-z.size // 2)))
    random = words.astype("<u4").view("<u2")[:z.size].reshape(z.shape).astype(np.int64)
    whole = weights.sum(1, keepdims=True) * targets.shape[1]
    parts = wanted * weights.sum(1, keepdims=True) - targets.shape[1] * weights
    errors = (parts * (127 << 16) // whole * weight // 7 + random) >> 16
    stuck = (np.abs(z) == 127) & (np.sign(z) == np.sign(errors)) & (cfg.MODEL == "gru")
    return np.where(stuck, 0, errors)


class PlainEngine:
    """The plain reading of SPEC 9 (AdamW) and 21, with the verbs of an engine."""

    def __init__(self, cfg, tokens):
        self.cfg, self.tokens, self.whole = cfg, tokens, parameters.initial_state(cfg)
        self._followers = soft_targets.Tables(cfg, tokens)

    def evaluate(self, first, count):
        state, read = self.whole, Reading.stored

        @functools.cache                                     # a member would read them anew at every position
        def stored(t):
            return read(Reading(self.cfg, state), t).astype(np.float64 if t.product else np.int64)

        with mock.patch.object(Reading, "stored", lambda _, t: stored(t)):
            digits, loss = chunk_votes(self.cfg, state, self.tokens, self._followers.at_step(state.step), first)
        return steps.pack_digits(digits), loss

    def update(self, fitness):
        cfg, state, changed = self.cfg, self.whole, 0
        digits = rules.unpacked_digits(fitness, cfg.STEP_DIGITS)
        votes = digits.reshape(cfg.N_CHUNKS, -1).sum(0, dtype=np.int32)
        f, rate = np.float32, np.float32(cfg.learning_rate(state.step))
        b1, b2 = f(cfg.ADAM_BETA1), f(cfg.ADAM_BETA2)
        for t in parameters.tensors(cfg):
            g, w = -votes[t.span].astype(f), state.weights[t.span].astype(np.int32)
            m, v, acc = state.moments[t.span].T
            m = fma(m, b1, g * (f(1) - b1))
            v = fma(g * g, f(1) - b2, v * b2)
            u = fma(w.astype(f), f(cfg.ADAM_WEIGHT_DECAY) if t.matrix else f(0), m / (np.sqrt(v) + f(cfg.ADAM_EPS)))
            acc = fma(-rate, u, acc)
            moved = np.clip(w + (acc >= 1).astype(np.int32) - (acc <= -1), -127, 127)
            state.weights[t.span] = moved
            acc = np.where(moved != w, acc - (moved - w).astype(f), np.clip(acc, f(-1), f(1)))
            state.moments[t.span] = np.stack([m, v, acc], 1)
            changed += np.count_nonzero(moved != w)
        state.seed, state.step = steps.next_seed(state.seed, state.step, cfg.NOISE_REUSE), state.step + 1
        return changed

    def digest(self):
        return parameters.digest_of(self.whole)


def course(engine, steps=3):
    """[what each step gave]: of every chunk a hash of its digits and its loss; weights changed; digest of the state."""
    told = []
    for _ in range(steps):
        found, changed = step_of(engine)
        told.append([[hashlib.sha256(packed).hexdigest()[:16], int(loss)] for packed, loss in found]
                    + [int(changed), engine.digest().hex()])
    return told


def engine_of(kind, seed):
    """kind: "plain", or an instruction set."""
    cfg, tokens = random_configuration(seed, 1024)
    if kind == "plain":
        return PlainEngine(cfg, tokens)
    if kind in GPU_KINDS:
        from engine import cuda_engine
        return cuda_engine.CudaEngine(cfg.changed(TENSOR_CORES=kind), tokens)
    from engine import cpu_engine
    return cpu_engine.CpuEngine(cfg.changed(SIMD=kind), tokens, threads=1 + seed % min(2, hardware.cores()))
