"""Rewards (SPEC 22): which chunks of a step vote from texts that the model writes, after which prompts and with which
draws it writes, how much the reward of a text counts, and which windows the texts are.
"""

import numpy as np

from model.steps import hash32
from model.units import FULL

UNIT = 1 << 16               # of a reward in fixed point
# first hashes of a window's choice of prompt and of its seed of draws: before those of targets
PROMPT_STREAM, DRAW_STREAM = 1 << 28, 1 << 29
WHOLE = 8                    # lengths of windows are multiples of it


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
    """(uint32 [count], uint32 [count]): the numbers that choose the prompts of windows first.. of a step, equal for
    OBJECTIVE_TEXTS of them, and the seeds of their draws."""
    windows = first + np.arange(count)
    return (hash32(seed + windows - windows % cfg.OBJECTIVE_TEXTS, PROMPT_STREAM), hash32(seed + windows, DRAW_STREAM))


def advantages(cfg, rewards):
    """int8 [n], -7 to 7: how much more each text of a chunk earns than the others of its prompt do. rewards: [n], float
    or None, where a text is not judged."""
    whole = [None if reward is None else round(reward * UNIT) for reward in rewards]
    prompts = [whole[at:at + cfg.OBJECTIVE_TEXTS] for at in range(0, len(whole), cfg.OBJECTIVE_TEXTS)]
    gains = [by for prompt in prompts for by in _more_than_the_mean(prompt)]
    total, count = sum(map(abs, gains)), max(1, sum(by != 0 for by in gains))
    # a gain of the mean size is FULL / 4, rounded
    least = [max(1, -(-(4 * size - 2) * total // (FULL * count))) for size in range(1, FULL + 1)]
    return np.array([(1 if by > 0 else -1) * sum(abs(by) >= level for level in least) for by in gains], np.int8)


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
