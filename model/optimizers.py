"""The constants of the update (SPEC 9); the rules themselves are in `model.rules`."""

import math
from collections import namedtuple

import numpy as np

ADAMW = 0
SGD = 1
MUON = 2
ZTEST = 3

# Muon (SPEC 9). It has the same bits on every machine, because every sum is one chain of fma in a fixed order.
MUON_ROUNDS = 5
MUON_PARTS = 1024
MUON_EPS = 1e-7
MUON_SIZE = 0.2
MUON_COEFFICIENTS = {"quintic": (3.4445, -4.7750, 2.0315), "cubic": (1.5, -0.5, 0.0)}      # a, b, c of MUON_NS


# float32 constants of the update; rule: ADAMW, SGD (lr is then the factor of a vote), MUON (size is then the length of
# a step), or ZTEST (lr is then the smallest vote that moves a weight, a whole number)
Optimizer = namedtuple("Optimizer", "rule lr beta1 one_less_beta1 beta2 one_less_beta2 eps decay momentum size")


def least_vote_by_chance(cfg, alpha):
    """int: the size of vote that about a share `alpha` of the weights reaches by chance: |vote| * 16 >= t *
    isqrt(pairs) * 256; t / 16: normal quantile; 256: variance of a product of two draws (1 for signs)."""
    import statistics               # here, because a coordinator starts without it
    t = int(16 * -statistics.NormalDist().inv_cdf(alpha / 2))
    return -(-t * math.isqrt(cfg.N_PAIRS) * (256 if cfg.USE_CLT else 1) // 16)


def constants(cfg, lr, t):
    """The Optimizer constants of one Tensor; lr: cfg.learning_rate of the step."""
    rule = MUON if cfg.USE_MUON and t.hidden else {"adamw": ADAMW, "sgd": SGD, "ztest": ZTEST}[cfg.OPTIMIZER]
    scale = cfg.MUON_LR_SCALE if rule == MUON else t.lr_scale
    rate = np.float32(lr) * np.float32(scale)
    if rule == SGD:
        rate = np.float32(float(rate) / cfg.N_PAIRS ** 0.5)
    elif rule == ZTEST:
        rate = np.float32(least_vote_by_chance(cfg, lr))
    decays = t.matrix or cfg.PERTURB == "weights"       # with noise on activations nothing votes on norms
    beta1 = np.float32(cfg.ADAM_BETA1)
    beta2 = np.float32(cfg.ADAM_BETA2)
    return Optimizer(rule=rule, lr=rate, beta1=beta1, one_less_beta1=np.float32(1) - beta1, beta2=beta2,
                     one_less_beta2=np.float32(1) - beta2, eps=np.float32(cfg.ADAM_EPS),
                     decay=np.float32(cfg.ADAM_WEIGHT_DECAY if decays else 0),
                     momentum=np.float32(cfg.MUON_MOMENTUM),
                     size=np.float32(MUON_SIZE) * np.sqrt(np.float32(max(t.rows, t.cols))))


def muon_coefficients(cfg):
    """float32 a, b, c of the Newton-Schulz iteration."""
    return tuple(map(np.float32, MUON_COEFFICIENTS[cfg.MUON_NS]))
