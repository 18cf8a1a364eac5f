"""The integer tables of the models: exponentials, GELU, rotary embedding (SPEC 6, 7), made in double, halves rounded
away from zero; and the transforms of the tokens (NTT_MODE, SPEC 14), whose coefficients the model looks up too."""

import hashlib
import math

import numpy as np

PRIME = {1: 0, 2: 257, 3: 65537}
PRIMITIVE = 3               # generates all residues of both primes


def _round(x):
    """Halves away from zero, in double."""
    return np.trunc(x + np.copysign(0.5, x))


def exp_table(cfg):
    """int32 [256]: EXP of SPEC 6; entries from SOFTMAX_LUT_SIZE on are the last one."""
    distance = np.minimum(np.arange(256), cfg.SOFTMAX_LUT_SIZE - 1)
    y = np.exp(-distance / cfg.SOFTMAX_EXP_SCALE) * 2.0 ** cfg.SOFTMAX_SCALE_BIT
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


def digest(cfg):
    """Hexadecimal: of these tables and of some powers, as for CHUNK_MEAN_FILTER. NumPy and libm may round otherwise on
    another processor, and workers whose tables differ would find each other wrong."""
    made = [exp_table(cfg), gelu_table(), *([rope_table(cfg, cfg.SEQ_LEN)] if cfg.MODEL == "transformer" else []),
            np.array([(k / 7) ** cfg.CHUNK_MEAN_EXPONENT for k in range(1, 1000)])]
    return hashlib.sha256(b"".join(table.tobytes() for table in made)).hexdigest()[:32]


# --- transforms of the tokens -----------------------------------------------------------------------------------------

def root(mode, order):
    """A root of unity of this order, a divisor of p - 1."""
    return pow(PRIMITIVE, (PRIME[mode] - 1) // order, PRIME[mode])


def transform(mode, order):
    """int64 [order, order]: the factors of token n (second index) in coefficient t of a window of `order` tokens."""
    if PRIME[mode]:
        r, n = root(mode, order), np.arange(order)
        return np.array([pow(r, k, PRIME[mode]) for k in range(order)])[np.outer(n, n) % order]
    signs = np.ones((1, 1), np.int64)
    while len(signs) < order:
        signs = np.block([[signs, signs], [signs, -signs]])
    return signs


def basis(cfg, causal):
    """int64 [T, T]: `transform` for this configuration; causal: without the tokens after a position."""
    whole = transform(cfg.NTT_MODE, cfg.SEQ_LEN)
    return np.tril(whole) if causal else whole
