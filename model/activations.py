"""Noise on activations (SPEC 21): which outputs have noise, which weights they vote on, and the scales of the votes.

A group is a window and the GROUP_SIZE members that read it. A member's noise is added to the outputs of phases. What
it changes in the loss of a position, its digit, is credited to the noise; credit times noise, summed over the members
of a group, times the clean model's inputs, is the group's vote on a weight. A chunk sends the sign of its large votes.
"""

import math
from typing import NamedTuple

import numpy as np

from model import fitness_digits, parameters, rules
from model.seeds import hash32

LEVELS = 7                   # largest digit of a position
WORDS_APART = 1 << 20        # hashes between the streams of two phases, at least SEQ_LEN * HIDDEN_DIM


_rules = rules.activation_rules(lambda function: function)


class Phase(NamedTuple):
    """Outputs with noise: `units` at each position, of a size of at most `amplitude`; the hashes of four draws each
    begin at `stream`. later: whether it is credited with later positions, too. shift: of its sums."""
    name: str
    layer: int
    units: int
    amplitude: int
    stream: int
    later: bool
    shift: int


class Vote(NamedTuple):
    """A matrix, the Phase that votes on it (None: the head's errors), and what it multiplies."""
    tensor: parameters.Tensor
    phase: Phase | None
    inputs: str


# by name, in the order of the forward pass: units in HIDDEN_DIM; later; the matrices that it votes on and their inputs,
# and the bias
PHASES = {"embedding": (1, True, (), None), "gate": (1, True, (("w_f", "normed_1"), ("u_f", "state")), "b_f"),
          "candidate": (1, True, (("w_h", "normed_1"), ("u_h", "gated")), "b_h"),
          "up": (4, False, (("w_up", "normed_2"),), None), "down": (1, False, (("w_down", "inner"),), None)}


def fraction_bits(cfg):
    """Fraction bits of the credit of later positions: as many as a byte has room for."""
    return max(bits for bits in range(5) if LEVELS * 16 << bits <= 127 * (16 - cfg.CREDIT))


def phases(cfg):
    """{(name, layer): Phase}, in the order of the forward pass."""
    phases_of_layers = {}
    for layer in range(cfg.N_LAYERS):
        for number, (name, (units, later, *_)) in enumerate(PHASES.items()):
            amplitude = amplitude_of(cfg, name)
            credit = 3 << fraction_bits(cfg) if later else 2                 # its usual size
            size = math.isqrt(cfg.GROUP_SIZE * (credit * amplitude) ** 2)    # about that of a sum
            if number or not layer:
                phases_of_layers[name, layer] = Phase(name, layer, units * cfg.HIDDEN_DIM, amplitude,
                                           (5 * layer + number) * WORDS_APART, later, max(0, size.bit_length() - 6))
    return phases_of_layers


def amplitude_of(cfg, name):
    """int: the amplitude of a phase; 0 where noise is on weights."""
    return getattr(cfg, "NOISE_" + name.upper()) if cfg.PERTURB == "activations" else 0


def votes(cfg):
    """([Vote] on matrices that are multiplied, [(tensor, Phase)] of biases, (tensor, Phase) of the embedding)."""
    named, phase_of = {(t.name, t.layer): t for t in parameters.tensors(cfg)}, phases(cfg)
    matrices, biases = [Vote(named["head", 0], None, "normed_f")], []
    for (name, layer), phase in phase_of.items():
        inputs, bias = PHASES[name][2:]
        matrices += [Vote(named[matrix, layer], phase, inputs_of) for matrix, inputs_of in inputs]
        biases += [(named[bias, layer], phase)] if bias else []
    return matrices, biases, (named["embedding", 0], phase_of["embedding", 0])


def least_differences(total, count):
    """int64 [LEVELS]: rules.least_difference of the sizes of a digit."""
    return np.array([_rules.least_difference(level, total, count) for level in range(1, LEVELS + 1)], np.int64)


def alpha(cfg):
    """float: votes below this share of the mean size count as 0."""
    return float(np.float32(cfg.ADAPTIVE_THRESHOLD_ALPHA)) if cfg.USE_ADAPTIVE_THRESHOLD else 0.0


def voted(cfg, t, sums):
    """int8 [size]: the digits, in canonical order, of the votes `sums` (int [rows, cols] or [cols]) on a tensor."""
    sums = parameters.to_canonical(sums) if t.matrix else sums.ravel()
    least = int(_rules.least_vote(np.abs(sums.astype(np.int64)).sum(), t.size, alpha(cfg)))
    return fitness_digits.large(sums, least)


def noise(phase, seed, positions):
    """int64 [positions, units]: the noise of the member with this seed."""
    words = np.arange(phase.stream, phase.stream + positions * phase.units // 4)
    drawn = hash32(seed, words).astype("<u4").view(np.uint8).astype(np.int64)
    size = drawn & phase.amplitude
    return np.where(drawn & 128, -size, size).reshape(positions, phase.units)
