"""Noise on activations (SPEC 21): which outputs have noise, which weights they vote on, and the scales of the votes.

A group is a window and the GROUP_SIZE members that read it. A member's noise is added to the outputs of phases. What
it changes in the loss of a position, its digit, is credited to the noise; credit times the sign of the noise, summed
over the members of a group, times the clean model's inputs, is the group's vote on a weight. A chunk sends the sign of
its large votes.

With rewards (SPEC 22) some chunks of a step vote from texts that the model writes: which do, after which prompts and
with which draws it writes, how much the reward of a text counts, and which windows the texts are.
"""

import math
from typing import NamedTuple

import numpy as np

from model import parameters, rules
from model.steps import hash32

LEVELS = 7                   # largest digit of a position
WORDS_APART = 1 << 20        # hashes between the streams of two phases, at least SEQ_LEN * HIDDEN_DIM / 8
REWARD_UNIT = 1 << 16        # of a reward in fixed point
# first hashes of a group's choice of prompt and of its seed of draws: behind those of noise, before those of targets
PROMPT_STREAM, DRAW_STREAM = 1 << 28, 1 << 29
WHOLE = 8                    # lengths of windows are multiples of it
UNIT = 16                    # of a digit in the credits of the transformer
TIED_TABLE = 64              # weight of the embedding's votes as table beside those as head, where it is both


_rules = rules.activation_rules(lambda function: function)


class Kind(NamedTuple):
    """Phases of one name: units in HIDDEN_DIM; the constant of their amplitude; later: whether they change the losses
    of later positions, too; the matrices that they vote on and their inputs; the bias."""
    name: str
    units: int
    amplitude: str
    later: bool
    matrices: tuple
    bias: str | None = None


class Phase(NamedTuple):
    """Outputs with noise: `units` at each position, of the size `amplitude`; their hashes, one for 32, begin at
    `stream`. turn: members whose number is that modulo N_LAYERS have the noise, -1: all have it. outside: the
    layers. later: see Kind. shift: of its sums."""
    name: str
    layer: int
    units: int
    amplitude: int
    stream: int
    turn: int
    outside: bool
    later: bool
    shift: int

    @property
    def rotated(self):
        """Whether the noise is added behind the rotation, so that its sums are turned back."""
        return self.name in ("query", "key")


class Vote(NamedTuple):
    """A matrix, the Phase that votes on it (None: the head's errors), and what it multiplies."""
    tensor: parameters.Tensor
    phase: Phase | None
    inputs: str


# in the order of the forward pass: phases outside the layers, those of a layer
KINDS = {
    "gru": (
        (Kind("embedding", 1, "NOISE_EMBEDDING", True, ()),),
        (Kind("gate", 1, "NOISE_GATE", True, (("w_f", "normed_1"), ("u_f", "state")), "b_f"),
         Kind("candidate", 1, "NOISE_CANDIDATE", True, (("w_h", "normed_1"), ("u_h", "gated")), "b_h"),
         Kind("up", 4, "NOISE_UP", False, (("w_up", "normed_2"),)),
         Kind("down", 1, "NOISE_DOWN", False, (("w_down", "inner"),)))),
    "transformer": (
        (Kind("embedding", 1, "NOISE_EMBEDDING", False, ()),
         Kind("first_up", 4, "NOISE_UP", False, (("w_emb_mlp_up", "normed_0"),)),
         Kind("first_down", 1, "NOISE_DOWN", False, (("w_emb_mlp_down", "inner_0"),))),
        (Kind("query", 1, "NOISE_ATTENTION", False, (("w_q", "normed_1"),)),
         Kind("key", 1, "NOISE_ATTENTION", True, (("w_k", "normed_1"),)),
         Kind("value", 1, "NOISE_ATTENTION", True, (("w_v", "normed_1"),)),
         Kind("output", 1, "NOISE_OUTPUT", False, (("w_o", "attended"),)),
         Kind("up", 4, "NOISE_UP", False, (("w_up", "normed_2"),)),
         Kind("down", 1, "NOISE_DOWN", False, (("w_down", "inner"),)))),
}


def fraction_bits(cfg):
    """Fraction bits of the credit of later positions in the recurrent model: as many as a byte has room for."""
    return max(bits for bits in range(5) if LEVELS * 16 << bits <= 127 * (16 - cfg.CREDIT))


def kinds(cfg):
    """[(Kind, layer)] in the order of the forward pass; layer: -1 outside the layers."""
    outside, inside = KINDS[cfg.MODEL]
    return [(kind, -1) for kind in outside] + [(kind, layer) for layer in range(cfg.N_LAYERS) for kind in inside]


def phases(cfg):
    """{(name, layer): Phase}, in the order of the forward pass."""
    in_order = {}
    for number, (kind, layer) in enumerate(kinds(cfg)):
        turn = layer if cfg.N_LAYERS > 1 else -1
        # the usual size of a credit, and about that of a sum
        credit = 3 << fraction_bits(cfg) if kind.later else 2
        if cfg.MODEL == "transformer":
            credit = UNIT if kind.later else 2 * UNIT
        members = cfg.GROUP_SIZE if turn < 0 else -(-cfg.GROUP_SIZE // cfg.N_LAYERS)
        shift = max(0, math.isqrt(members * credit ** 2).bit_length() - 6)
        in_order[kind.name, max(0, layer)] = Phase(
            kind.name, max(0, layer), kind.units * cfg.HIDDEN_DIM, getattr(cfg, kind.amplitude), number * WORDS_APART,
            turn, layer < 0, kind.later, shift)
    return in_order


def amplitude_of(cfg, name):
    """int: the amplitude of a phase; 0 where noise is on weights."""
    return phases(cfg)[name, 0].amplitude if cfg.PERTURB == "activations" else 0


def votes(cfg):
    """([Vote] on matrices that are multiplied, [(tensor, Phase)] of biases, (tensor, Phase, weight of its votes) of the
    table of the tokens that are read)."""
    named, phase_of = {(t.name, t.layer): t for t in parameters.tensors(cfg)}, phases(cfg)
    recurrent = cfg.MODEL == "gru"
    matrices, biases = [Vote(named["head" if recurrent else "embedding", 0], None, "normed_f")], []
    for kind, layer in kinds(cfg):
        phase = phase_of[kind.name, max(0, layer)]
        matrices += [Vote(named[matrix, phase.layer], phase, inputs) for matrix, inputs in kind.matrices]
        biases += [(named[kind.bias, phase.layer], phase)] if kind.bias else []
    return matrices, biases, (named["embedding", 0], phase_of["embedding", 0], 1 if recurrent else TIED_TABLE)


def least_differences(total, count):
    """int64 [LEVELS]: rules.least_difference of the sizes of a digit."""
    return np.array([_rules.least_difference(level, total, count) for level in range(1, LEVELS + 1)], np.int64)


def alpha(cfg):
    """float: votes below this share of the mean size count as 0."""
    return float(np.float32(cfg.ADAPTIVE_THRESHOLD_ALPHA)) if cfg.USE_ADAPTIVE_THRESHOLD else 0.0


def voted(cfg, t, sums):
    """int8 [size]: the digits, in canonical order, of the votes `sums` (int [rows, cols] or [cols]) on a tensor."""
    least = int(_rules.least_vote(np.abs(sums).sum(dtype=np.int64), t.size, alpha(cfg)))
    digits = rules.large(sums, least)
    return parameters.to_canonical(digits) if t.matrix else digits.ravel()


def signs(phase, seed, positions):
    """int64 [positions, units]: the signs of the noise of the member with this seed."""
    words = np.arange(phase.stream, phase.stream + positions * phase.units // 32)
    # output 4 a + b of 32 has bit 8 b + a
    bits = hash32(seed, words)[:, None, None] >> (8 * np.arange(4) + np.arange(8)[:, None]) & 1
    return 1 - 2 * bits.astype(np.int64).reshape(positions, phase.units)


def noise(cfg, phase, number, seed, positions):
    """int64 [positions, units]: the noise of the member with this number in the step and this seed."""
    if phase.turn not in (-1, number % cfg.N_LAYERS):
        return np.zeros((positions, phase.units), np.int64)
    return phase.amplitude * signs(phase, seed, positions)


# --- rewards (SPEC 22) ------------------------------------------------------------------------------------------------

def text_chunks(cfg, end):
    """How many of the first `end` chunks of a run vote from its data: TEXT_SHARE of them, spread evenly."""
    return end * round(cfg.TEXT_SHARE * 65536) >> 16


def is_text(cfg, step, chunk):
    """Whether a chunk of a step votes from the data."""
    number = step * cfg.N_CHUNKS + chunk
    return text_chunks(cfg, number) < text_chunks(cfg, number + 1)


def text_loss(cfg, step, loss):
    """int: the loss of a chunk that votes from the data, so that their sum over a step is that of N_CHUNKS chunks."""
    first = step * cfg.N_CHUNKS
    return loss * cfg.N_CHUNKS // (text_chunks(cfg, first + cfg.N_CHUNKS) - text_chunks(cfg, first))


def text_draws(cfg, seed, first, count):
    """(uint32 [count], uint32 [count]): the numbers that choose the prompts of groups first.. of a step, equal for
    OBJECTIVE_TEXTS of them, and the seeds of their draws."""
    groups = first + np.arange(count)
    return (hash32(seed + groups - groups % cfg.OBJECTIVE_TEXTS, PROMPT_STREAM), hash32(seed + groups, DRAW_STREAM))


def advantages(cfg, rewards):
    """int8 [n], -7 to 7: how much more each text of a chunk earns than the others of its prompt do. rewards: [n], float
    or None, where a text is not judged."""
    whole = [None if reward is None else round(reward * REWARD_UNIT) for reward in rewards]
    prompts = [whole[at:at + cfg.OBJECTIVE_TEXTS] for at in range(0, len(whole), cfg.OBJECTIVE_TEXTS)]
    gains = [by for prompt in prompts for by in _more_than_the_mean(prompt)]
    least = least_differences(sum(map(abs, gains)), max(1, sum(by != 0 for by in gains)))
    return np.array([_rules.digit(by, least) for by in gains], np.int8)


def _more_than_the_mean(rewards):
    """[int]: by how much each is more than the mean of those that are not None, halves away from zero."""
    judged = [reward for reward in rewards if reward is not None]
    count, total = len(judged), sum(judged)
    parts = [0 if reward is None else count * reward - total for reward in rewards]
    return [(1 if part > 0 else -1) * ((2 * abs(part) + count) // (2 * max(1, count))) for part in parts]


def text_windows(sequences, written, advantages):
    """(int32 [n, T + 1], int8 [n], bool [n, T]): the texts whose advantage is not 0, as windows, their advantages, and
    the positions that vote. sequences: [int [length]], prompts with the texts and replies behind them; written: [bool
    [length]], which of their tokens the model wrote."""
    chosen = np.flatnonzero(advantages)
    longest = max((len(sequences[number]) for number in chosen), default=1)
    T = -(-max(1, longest - 1) // WHOLE) * WHOLE
    tokens, counted = np.zeros((len(chosen), T + 1), np.int32), np.zeros((len(chosen), T), bool)
    for row, number in enumerate(chosen):
        length = len(sequences[number])
        tokens[row, :length] = sequences[number]
        counted[row, :length - 1] = written[number][1:]
    return tokens, advantages[chosen], counted


def text_reading(cfg, length, temperature):
    """The Config with which windows of `length` positions are read: the losses are exact, at a temperature, of the one
    token that follows."""
    return cfg.changed(SEQ_LEN=length, STATE_TOKENS=0, SOFT_TARGETS=(), LOSS="exact", USE_SAME_DATA=0,
                       SOFTMAX_EXP_SCALE=cfg.SOFTMAX_EXP_SCALE * temperature)
