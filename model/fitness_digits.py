"""From losses to fitness digits, and their packed form (SPEC 8)."""

import math

import numpy as np


def chunk_fitness(losses, cfg):
    """int8 [members / 2] in {-1, 0, 1} from the losses (int64 [members], even member first) of one chunk. The mean
    filter raises the mean in logit units to its power; the losses of LOSS = "exact" count 1/256 of these."""
    d = losses[1::2] - losses[0::2]
    if cfg.FAST_FITNESS:
        return np.sign(d).astype(np.int8)
    if cfg.CHUNK_MEAN_FILTER:
        m = _mean(d) / cfg.LOSS_SCALE
        if m != 0:
            m = (1.0 if m > 0 else -1.0) * abs(m) ** cfg.CHUNK_MEAN_EXPONENT
        d = d + int(m * cfg.LOSS_SCALE)
    if not cfg.USE_ADAPTIVE_THRESHOLD:
        return np.sign(d).astype(np.int8)
    threshold = _mean(np.abs(d)) * float(np.float32(cfg.ADAPTIVE_THRESHOLD_ALPHA))
    if threshold > 0:
        least = math.ceil(threshold)                         # integers are compared in half the time
        return (d >= least).view(np.int8) - (d <= -least).view(np.int8)
    return np.where(d > 0, 1, -1).astype(np.int8)


def _mean(x):
    """float: the mean of int64 `x` in float64; by integers, in half the time, where float64 holds every sum of them."""
    if max(-int(x.min()), int(x.max())) * x.size < 1 << 53:
        return int(x.sum()) / x.size
    return float(np.mean(x, dtype=np.float64))


def pack_ternary(fitness):
    """bytes: five values of {-1, 0, 1} a byte, least significant digit first (-1 is digit 2)."""
    digits = np.zeros(packed_size(fitness.size) * 5, np.uint8)
    digits[:fitness.size] = fitness.view(np.uint8)
    digits = ((digits & 3) ^ (digits >> 7)).reshape(-1, 5)   # 255 becomes 2
    packed = digits[:, 4]
    for k in (3, 2, 1, 0):
        packed = packed * np.uint8(3) + digits[:, k]
    return packed.tobytes()


def packed_size(count):
    """Bytes of `count` packed values."""
    return -(-count // 5)


def unpack_ternary(data, count):
    """int8 [count] from packed bytes. Raises ValueError for another size, a wrong byte or a digit beyond `count`."""
    packed = np.frombuffer(data, np.uint8)
    if packed.size != packed_size(count):
        raise ValueError(f"{packed.size} bytes of fitness where {count} values need {packed_size(count)}")
    if packed.size and packed.max() > 242:
        raise ValueError(f"byte {int(packed.max())} is not five ternary digits")
    digits = np.take(_DIGITS, packed, axis=0, mode="clip").reshape(-1)
    if digits[count:].any():
        raise ValueError("digits after the last value")
    return digits[:count]


_DIGITS = np.array([[(0, 1, -1)[b // 3 ** k % 3] for k in range(5)] for b in range(243)], np.int8)
