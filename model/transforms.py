"""Transforms of the tokens (NTT_MODE, SPEC 14), whose coefficients the model looks up too. NumPy alone."""

import numpy as np

PRIME = {1: 0, 2: 257, 3: 65537}
PRIMITIVE = 3               # generates all residues of both primes


def root(mode, order):
    """A root of unity of this order, a divisor of p - 1."""
    return pow(PRIMITIVE, (PRIME[mode] - 1) // order, PRIME[mode])


def table(mode, order):
    """int64 [order, order]: the factors of token n (second index) in coefficient t of a window of `order` tokens."""
    if PRIME[mode]:
        r, n = root(mode, order), np.arange(order)
        return np.array([pow(r, k, PRIME[mode]) for k in range(order)])[np.outer(n, n) % order]
    signs = np.ones((1, 1), np.int64)
    while len(signs) < order:
        signs = np.block([[signs, signs], [signs, -signs]])
    return signs


def basis(cfg, causal):
    """int64 [T, T]: `table` for this configuration; causal: without the tokens after a position."""
    whole = table(cfg.NTT_MODE, cfg.SEQ_LEN)
    return np.tril(whole) if causal else whole
