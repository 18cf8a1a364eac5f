"""Soft targets (SPEC 7): a position is scored against the token that follows it and against tokens that follow the same
context elsewhere in the training data. Most of the noise in a pair's loss difference is which token happened to
follow. NumPy, without devices or sockets."""

from typing import NamedTuple

import numpy as np

from model import rules


class Followers(NamedTuple):
    """What follows every context in the data. The tokens after the context of the token at place p are
    tokens[first[p]:first[p] + size[p]], in ascending order."""
    first: np.ndarray       # uint32 [n]
    size: np.ndarray        # uint32 [n], at least 1
    tokens: np.ndarray      # as the data [n]


def followers(cfg, tokens, context):
    """The Followers of `context` tokens before every place of the data (the end of which comes before its
    beginning)."""
    bits = max(1, (cfg.VOCAB_SIZE - 1).bit_length())
    key = np.zeros(len(tokens), np.uint64)                  # the context, then the token
    for back in range(context, -1, -1):
        key = key << np.uint64(bits) | np.roll(tokens, back)
    places = np.arange(key.size)
    for shift in range(0, bits * (context + 1), 16):         # sorting 16 bits is quick, and equal keys are alike
        places = places[np.argsort((key[places] >> np.uint64(shift)).astype(np.uint16), kind="stable")]
    key = key[places]
    before = key >> np.uint64(bits)
    starts = np.flatnonzero(np.append(True, before[1:] != before[:-1]))
    sizes = np.diff(starts, append=key.size)
    first, size = np.empty((2, key.size), np.uint32)
    first[places], size[places] = np.repeat(starts, sizes), np.repeat(sizes, sizes)
    return Followers(first, size, (key & np.uint64((1 << bits) - 1)).astype(tokens.dtype))


def windows(cfg, tokens, known, step, seed, first_pair, pairs):
    """int32 [pairs, cfg.WINDOW]: model.rules.windows, and with SOFT_TARGETS the drawn targets of every position. known:
    Followers, None: they are the token that follows. seed: of the step."""
    cut = rules.windows(cfg, tokens, step, first_pair, pairs)
    drawn, T = cfg.TARGETS - 1, cfg.SEQ_LEN
    if not drawn:
        return cut
    if known is None:
        return np.concatenate([cut, np.repeat(cut[:, -T:], drawn, 1)], 1)
    at = rules.window_starts(cfg, len(tokens), step, first_pair, pairs)[:, None] + np.arange(1, T + 1)
    at %= len(tokens)
    seeds = (np.arange(first_pair, first_pair + pairs) + seed).astype(np.uint32)[:, None]
    random = rules.hash32(seeds, np.arange(rules.TARGET_STREAM, rules.TARGET_STREAM + T * drawn, dtype=np.uint32))
    which = random.reshape(pairs, T, drawn) % known.size[at][..., None] + known.first[at][..., None]
    return np.concatenate([cut, known.tokens[which].reshape(pairs, -1).astype(np.int32)], 1)
