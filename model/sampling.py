"""The settings of generation in the units of the kernels (SPEC 10)."""

from collections import namedtuple

import numpy as np


# temp float32, 0 is greedy; floor int: smallest trunc((z - top) / temp) that is kept; penalty float32: logit units
# taken once from every token seen
Sampling = namedtuple("Sampling", "temp floor penalty")


def settings(cfg, temp=None, min_p=None, penalty=None):
    """Sampling settings in the kernels' units; None: the configuration's. Penalty in nats."""
    temp = cfg.SAMPLING_TEMP if temp is None else temp
    min_p = cfg.SAMPLING_MIN_P if min_p is None else min_p
    penalty = cfg.SAMPLING_PRESENCE_PENALTY if penalty is None else penalty
    unit = np.float32(cfg.SOFTMAX_EXP_SCALE)
    floor = int(np.float32(np.log(np.float32(min_p))) * unit) if min_p > 0 else -(1 << 31)
    return Sampling(np.float32(temp), floor, np.float32(penalty * cfg.SOFTMAX_EXP_SCALE))


def checked_prompt(cfg, prompt):
    """int32 [n]: the tokens of a prompt. Raises ValueError for one that is empty or not of this vocabulary."""
    prompt = np.array(prompt, np.int64).ravel()
    if not prompt.size or prompt.min() < 0 or prompt.max() >= cfg.VOCAB_SIZE:
        raise ValueError(f"a prompt must be one token or more, each below VOCAB_SIZE = {cfg.VOCAB_SIZE}")
    return prompt.astype(np.int32)
