"""Unit trials (SPEC 21): the credits of a model's units, the weights that they vote on, and the scales of the votes.

A chunk reads its windows once. The head's errors say what each logit should have been. What a small increase of a value
is worth, its credit, goes down through the network: through what is linear as a product with the transposed matrix,
through what is not by a trial, the table of the unit read above and below the value. Credit times input is a vote on a
weight, and a chunk sends the sign of its large votes.
"""

from typing import NamedTuple

import numpy as np

from model import integer_tables, parameters, rules

TRIAL = 4                    # by how much a unit is tried, up and down
FULL = 7                     # the weight of a window's errors that counts in full
LOUD = 64                    # one row of credits in so many may be cut in the operand of a product
EXPONENTS = 100              # exponents of credits lie between - and + this
ROW_BITS, WINDOW_BITS = 7, 13        # of a credit whose exponent belongs to a position, or to a head of a window
TABLE_SHIFTS = -8, 10        # exponents of the votes on a tied embedding as a table

_rules = rules.vote_rules(lambda function: function)


class Kind(NamedTuple):
    """Credits of one name: their number at a position in HIDDEN_DIM; the matrices that they vote on with the inputs of
    these; the bias."""
    name: str
    units: int
    matrices: tuple
    bias: str | None = None


class Vote(NamedTuple):
    """A matrix, the credits that vote on it, (name, layer), or None: the head's errors, and what it multiplies."""
    tensor: parameters.Tensor
    credits: tuple | None
    inputs: str


# in the order of the forward pass: outside the layers, and in each of them
KINDS = {
    "gru": (
        (Kind("embedding", 1, ()),),
        (Kind("gate", 1, (("w_f", "normed_1"), ("u_f", "state")), "b_f"),
         Kind("candidate", 1, (("w_h", "normed_1"), ("u_h", "gated")), "b_h"),
         Kind("up", 4, (("w_up", "normed_2"),)),
         Kind("down", 1, (("w_down", "inner"),)))),
    "transformer": (
        (Kind("embedding", 1, ()),
         Kind("first_up", 4, (("w_emb_mlp_up", "normed_0"),)),
         Kind("first_down", 1, (("w_emb_mlp_down", "inner_0"),))),
        (Kind("query", 1, (("w_q", "normed_1"),)),
         Kind("key", 1, (("w_k", "normed_1"),)),
         Kind("value", 1, (("w_v", "normed_1"),)),
         Kind("output", 1, (("w_o", "attended"),)),
         Kind("up", 4, (("w_up", "normed_2"),)),
         Kind("down", 1, (("w_down", "inner"),)))),
}


def kinds(cfg):
    """[(Kind, layer)] in the order of the forward pass; layer 0 outside the layers."""
    outside, inside = KINDS[cfg.MODEL]
    return [(kind, 0) for kind in outside] + [(kind, layer) for layer in range(cfg.N_LAYERS) for kind in inside]


def votes(cfg):
    """([Vote] on matrices that are multiplied, [(tensor, credits)] of biases, the tensor of the tokens that are
    read)."""
    named, recurrent = {(t.name, t.layer): t for t in parameters.tensors(cfg)}, cfg.MODEL == "gru"
    matrices, biases = [Vote(named["head" if recurrent else "embedding", 0], None, "normed_f")], []
    for kind, layer in kinds(cfg):
        matrices += [Vote(named[matrix, layer], (kind.name, layer), inputs) for matrix, inputs in kind.matrices]
        biases += [(named[kind.bias, layer], (kind.name, layer))] if kind.bias else []
    return matrices, biases, named["embedding", 0]


def trial_tables(cfg):
    """int8 [2, 256], indexed by the byte of a value v: how much more a unit gives at v + TRIAL than at v - TRIAL; one
    that only cuts (gates and candidates), and one inside an MLP."""
    v = np.arange(256, dtype=np.uint8).view(np.int8).astype(np.int64)
    above, below = (np.clip(v + by, -127, 127) for by in (TRIAL, -TRIAL))
    if cfg.MODEL == "gru":
        inner = np.maximum(above, 0) - np.maximum(below, 0) if cfg.MLP_RELU else above - below
    else:
        gelu = integer_tables.gelu_table().astype(np.int64)
        inner = gelu[above & 255] - gelu[below & 255]
    return np.stack([above - below, inner]).astype(np.int8)


def loudest(counts):
    """int: the largest exponent that one row in LOUD reaches, of int [2 EXPONENTS + 1] rows with each exponent from
    -EXPONENTS on; 0 if there is none."""
    live = int(counts.sum())
    reached = np.flatnonzero(np.cumsum(counts[::-1]) >= max(1, -(-live // LOUD)))
    return EXPONENTS - int(reached[0]) if live else 0


def alpha(cfg):
    """float: votes below this share of the mean size count as 0."""
    return float(np.float32(cfg.ADAPTIVE_THRESHOLD_ALPHA)) if cfg.USE_ADAPTIVE_THRESHOLD else 0.0


def least_vote(cfg, t, total):
    """int: the least size of a vote on a tensor that counts; total: the sum of their sizes."""
    return int(_rules.least_vote(total, t.size, alpha(cfg)))
