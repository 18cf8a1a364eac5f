"""The seed of every step (SPEC 2), with the standard library alone."""

INITIAL_SEED = 42


def hash32(seed, i):
    """`draw_rules` in Python ints, without its casts: to open a history is to hash once a step."""
    x = seed + i * 0x9E3779B9 & 0xFFFFFFFF
    x = (x ^ x >> 16) * 0x85EBCA6B & 0xFFFFFFFF
    x = (x ^ x >> 13) * 0xC2B2AE35 & 0xFFFFFFFF
    return x ^ x >> 16


def first_seed(cfg):
    """Seed of step 0. The hash is one to one: no two islands have the same, with NOISE_REUSE = 1 at any step."""
    return hash32(INITIAL_SEED, cfg.ISLAND_SEED) if cfg.ISLAND_SEED else INITIAL_SEED


def next_seed(seed, step, reuse=1):
    """Seed of step + 1 from the seed of `step`, which is kept for `reuse` steps (0: for ever)."""
    return seed if not reuse or (step + 1) % reuse else hash32(seed, step + 1)
