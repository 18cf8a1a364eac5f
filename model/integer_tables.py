"""The integer tables of SPEC 6 and 7: exponentials, GELU, rotary embedding. Made in double, halves rounded away from
zero."""

import math

import numpy as np


def _round(x):
    """Halves away from zero, in double."""
    return np.trunc(x + np.copysign(0.5, x))


def exp_table(cfg):
    """int32 [SOFTMAX_LUT_SIZE]: EXP of SPEC 6."""
    y = np.exp(-np.arange(cfg.SOFTMAX_LUT_SIZE) / cfg.SOFTMAX_EXP_SCALE) * 2.0 ** cfg.SOFTMAX_SCALE_BIT
    return np.where(y >= 1, _round(y), 0).astype(np.int32)


def gelu_table():
    """int8 [256], indexed by the byte of an int8: GELU of SPEC 6."""
    x = np.arange(256, dtype=np.uint8).view(np.int8) / 16.0
    y = 0.5 * x * (1 + np.array([math.erf(v / 1.41421356) for v in x]))
    return np.clip(_round(16 * y), -127, 127).astype(np.int8)


def rope_table(cfg, positions):
    """int32 [positions, HEAD_DIM / 2, 2]: cosine and sine of SPEC 6."""
    half = np.arange(cfg.HEAD_DIM // 2)
    angle = np.arange(positions)[:, None] * np.power(10000.0, -2.0 * half / cfg.HEAD_DIM)
    scale = 2.0 ** cfg.ROPE_SCALE_BIT
    return np.stack([_round(np.cos(angle) * scale), _round(np.sin(angle) * scale)], axis=-1).astype(np.int32)


def log_unit(cfg):
    """Loss units (1/256 logit) in one octave of Q, with 16 fractional bits: the factor of log2 in LOSS = "exact"."""
    return round(cfg.SOFTMAX_EXP_SCALE * np.log(2.0) * 256 * 65536)
