"""From losses to fitness digits (SPEC 8)."""

import math

import numpy as np

from model import ternary


def chunk_fitness(losses, cfg):
    """int8 [members / 2] in {-1, 0, 1} from the losses (int64 [members], even member first) of one chunk. The mean
    filter raises the mean in logit units to its power; the unit of the losses of LOSS = "exact" is 1/256 of that."""
    d = losses[1::2] - losses[0::2]
    if cfg.FAST_FITNESS:
        return np.sign(d).astype(np.int8)
    if cfg.CHUNK_MEAN_FILTER:
        m = _mean(d) / cfg.LOSS_SCALE
        if m != 0:
            m = math.copysign(abs(m) ** cfg.CHUNK_MEAN_EXPONENT, m)
        d = d + int(m * cfg.LOSS_SCALE)
    if not cfg.USE_ADAPTIVE_THRESHOLD:
        return np.sign(d).astype(np.int8)
    threshold = _mean(np.abs(d)) * float(np.float32(cfg.ADAPTIVE_THRESHOLD_ALPHA))
    if threshold > 0:
        return large(d, math.ceil(threshold))                # integers are compared in half the time
    return np.where(d > 0, 1, -1).astype(np.int8)


def large(x, least):
    """int8: the signs of integers of at least this size, else 0."""
    return (x >= least).view(np.int8) - (x <= -least).view(np.int8)


def _mean(x):
    """float: the mean of int64 `x` in float64; by integers, in half the time, if float64 holds every sum of them."""
    if max(-int(x.min()), int(x.max())) * x.size < 1 << 53:
        return int(x.sum()) / x.size
    return float(np.mean(x, dtype=np.float64))


def pack_ternary(fitness):
    """bytes: the packed form (model.ternary) of int8 values of {-1, 0, 1}."""
    return ternary.pack(fitness.tobytes())


def unpack_ternary(packed, count):
    """int8 [count] from packed bytes. Raises ValueError, see ternary.check."""
    return np.frombuffer(ternary.unpack(packed, count), np.int8)
