"""The constants of the update (SPEC 9) and the rates by token; the rules themselves are in `model.rules`."""

import math
from typing import NamedTuple

import numpy as np

from model import rules

ADAMW, SGD, MUON, ZTEST = range(4)

# Muon (SPEC 9). It has the same bits on every machine, because every sum is one chain of fma in a fixed order.
MUON_ROUNDS, MUON_PARTS, MUON_EPS, MUON_SIZE = 5, 1024, 1e-7, 0.2
MUON_COEFFICIENTS = {"quintic": (3.4445, -4.7750, 2.0315), "cubic": (1.5, -0.5, 0.0)}      # a, b, c of MUON_NS


class Optimizer(NamedTuple):
    """float32 constants of the update; rule: ADAMW, SGD (lr is then the factor of a vote), MUON, or ZTEST (lr is then
    the smallest vote that moves a weight, a whole number)."""
    rule: int
    lr: float
    beta1: float
    one_less_beta1: float
    beta2: float
    one_less_beta2: float
    eps: float
    decay: float
    momentum: float
    size: float


def least_vote(cfg, alpha):
    """int: the size that the votes of about a share `alpha` of the weights exceed by chance: |vote| * 16 >= t *
    isqrt(pairs) * 256; t / 16: normal quantile; 256: variance of a product of two draws (1 for signs)."""
    import statistics
    t = int(16 * -statistics.NormalDist().inv_cdf(alpha / 2))
    return -(-t * math.isqrt(cfg.N_PAIRS) * (256 if cfg.USE_CLT else 1) // 16)


def constants(cfg, lr, t):
    """The Optimizer constants of one Tensor for what cfg.learning_rate gives."""
    rule = MUON if cfg.USE_MUON and t.hidden else {"adamw": ADAMW, "sgd": SGD, "ztest": ZTEST}[cfg.OPTIMIZER]
    scale = cfg.MUON_LR_SCALE if rule == MUON else t.lr_scale
    rate = np.float32(np.float32(lr) * np.float32(scale)) if scale != 1.0 else np.float32(lr)
    if rule == SGD:
        rate = np.float32(float(rate) / cfg.N_PAIRS ** 0.5)
    elif rule == ZTEST:
        rate = np.float32(least_vote(cfg, lr))
    b1, b2 = np.float32(cfg.ADAM_BETA1), np.float32(cfg.ADAM_BETA2)
    one = np.float32(1)
    return Optimizer(rule, rate, b1, one - b1, b2, one - b2, np.float32(cfg.ADAM_EPS),
                     np.float32(cfg.ADAM_WEIGHT_DECAY),
                     np.float32(cfg.MUON_MOMENTUM), np.float32(MUON_SIZE) * np.sqrt(np.float32(max(t.rows, t.cols))))


def reads_data(cfg):
    """The constant for which an update needs the training data, or None."""
    return "RARE_TOKENS" if cfg.RARE_TOKENS else "SEEN_VOTES" if cfg.SEEN_VOTES > 1 else None


def need_data(cfg, tokens):
    if tokens is None:
        raise ValueError(f"{reads_data(cfg)} needs the training data: name them with -D INPUT_FILE=...")


def token_rates(cfg, tokens):
    """float32 [VOCAB_SIZE]: factors on the learning rate of the columns of tables by token, sqrt(share of the token in
    the training data / RARE_TOKENS), at most 1 (0 for a token that does not occur). Every operation is exact or rounded
    correctly: the same bits everywhere. Raises ValueError where there are no data."""
    need_data(cfg, tokens)
    piece = 1 << 24
    counts = sum(np.bincount(tokens[at:at + piece], minlength=cfg.VOCAB_SIZE) for at in range(0, len(tokens), piece))
    return np.sqrt(np.minimum(1.0, counts / (len(tokens) * cfg.RARE_TOKENS))).astype(np.float32)


def seen_windows(cfg, tokens, step):
    """int32 [pairs, SEQ_LEN + 1]: windows of a step, on whose tokens votes count SEEN_VOTES times. Raises ValueError
    where there are no data."""
    need_data(cfg, tokens)
    return rules.windows(cfg, tokens, step, 0, cfg.N_PAIRS)[:, cfg.STATE_TOKENS:]


def muon_coefficients(cfg):
    """float32 a, b, c of the Newton-Schulz iteration."""
    return tuple(map(np.float32, MUON_COEFFICIENTS[cfg.MUON_NS]))
