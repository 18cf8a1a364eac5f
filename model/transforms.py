"""Number-theoretic transforms of the tokens (NTT_MODE), whose coefficients the model looks up beside the tokens
themselves. NumPy alone.

The transform of x_0 .. x_{T-1}, T a power of two:
  mode 1  Walsh-Hadamard: X_t = sum over n of (-1)^(bits that n and t share) x_n
  modes 2, 3  modulo the Fermat primes p = 257, 65537: X_t = sum over n of r^(n t) x_n mod p, r = 3^((p - 1) / T) a root
  of order T
NTT_CAUSAL: position t of a window gets coefficient t of the window whose tokens after t are zero, c_t = sum over n <=
t; without it X_t, which sees the targets. A sequence longer than T is taken in blocks of T tokens, as the training
windows are, and generation, for which later tokens do not exist yet, always in the causal form. Bytes 1 to 3 of the
coefficient (an int32) select a column of ntt_emb_1 to 3 each; the columns, perturbed like the embedding, are shifted
right by 2 and added to the embedding before its clip.
"""

import numpy as np

PRIME = {1: 0, 2: 257, 3: 65537}
PRIMITIVE = 3               # generates all residues of both primes


def root(mode, order):
    """A root of unity of this order, a divisor of p - 1."""
    return pow(PRIMITIVE, (PRIME[mode] - 1) // order, PRIME[mode])


def transform(x, mode):
    """int64 [..., T]: the transform of integers x [..., T], T a power of two, in T log2 T steps."""
    return _fast(np.asarray(x, np.int64), mode, root(mode, np.shape(x)[-1]) if PRIME[mode] else 1)


def _fast(x, mode, r):
    p, n = PRIME[mode], x.shape[-1]
    if n == 1:
        return x % p if p else x
    if not p:
        first, second = _fast(x[..., :n // 2], mode, r), _fast(x[..., n // 2:], mode, r)
        return np.concatenate([first + second, first - second], -1)
    even, odd = _fast(x[..., ::2], mode, r * r % p), _fast(x[..., 1::2], mode, r * r % p)
    odd = odd * [pow(r, k, p) for k in range(n // 2)] % p
    return np.concatenate([even + odd, even - odd], -1) % p


def basis(cfg, causal):
    """int64 [T, T]: what token n (second index) is multiplied by in the coefficient of position t (first index)."""
    table = transform(np.eye(cfg.SEQ_LEN, dtype=np.int64), cfg.NTT_MODE).T
    return np.ascontiguousarray(np.tril(table) if causal else table)
