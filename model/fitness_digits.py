"""From losses to fitness digits, and their packed form (SPEC 8)."""

import numpy as np


def chunk_fitness(losses, cfg):
    """int8 [members / 2] in {-1, 0, 1} from the losses (int64 [members], even member first) of one chunk. The mean
    filter raises the mean in logit units to its power; the losses of LOSS = "exact" count 1/256 of these."""
    d = (losses[1::2].astype(np.int64) - losses[0::2]).astype(np.int64)
    if cfg.FAST_FITNESS:
        return np.sign(d).astype(np.int8)
    if cfg.CHUNK_MEAN_FILTER:
        m = float(np.mean(d, dtype=np.float64)) / cfg.LOSS_SCALE
        if m != 0:
            m = (1.0 if m > 0 else -1.0) * abs(m) ** cfg.CHUNK_MEAN_EXPONENT
        d = d + int(m * cfg.LOSS_SCALE)
    if not cfg.USE_ADAPTIVE_THRESHOLD:
        return np.sign(d).astype(np.int8)
    threshold = float(np.mean(np.abs(d), dtype=np.float64)) * float(np.float32(cfg.ADAPTIVE_THRESHOLD_ALPHA))
    return np.where(np.abs(d) < threshold, 0, np.where(d > 0, 1, -1)).astype(np.int8)


def pack_ternary(fitness):
    """bytes: five values of {-1, 0, 1} a byte, least significant digit first (-1 is digit 2)."""
    digits = np.zeros(packed_size(fitness.size) * 5, np.uint8)
    digits[:fitness.size] = np.where(fitness < 0, 2, fitness)
    return (digits.reshape(-1, 5) @ np.array([1, 3, 9, 27, 81], np.uint8)).astype(np.uint8).tobytes()


def packed_size(count):
    """Bytes of `count` packed values."""
    return -(-count // 5)


def unpack_ternary(data, count):
    """int8 [count] from packed bytes. Raises ValueError for another size, a wrong byte or a digit beyond `count`."""
    packed = np.frombuffer(data, np.uint8)
    if packed.size != packed_size(count):
        raise ValueError(f"{packed.size} bytes of fitness where {count} values need {packed_size(count)}")
    try:
        digits = _DIGITS[packed].reshape(-1)
    except IndexError:
        raise ValueError(f"byte {int(packed.max())} is not five ternary digits") from None
    if digits[count:].any():
        raise ValueError("digits after the last value")
    return digits[:count]


_DIGITS = np.array([[(0, 1, -1)[b // 3 ** k % 3] for k in range(5)] for b in range(243)], np.int8)
