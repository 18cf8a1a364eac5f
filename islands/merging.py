"""Merges the states of two islands, element by element, with the same bits on every machine (SPEC 19). NumPy alone.

A weight and its accumulator are one number, w + acc. float32 holds every accumulator up to 1 exactly in the units of
the mix, so a state that is mixed with itself does not change; an accumulator above 1, which learning rates above 1 can
cause, may be rounded. "ztest" moves weights without accumulators: there the remainder of a mix waits for the next
merge."""

import math

import numpy as np

from model import parameters

UNIT = 24                  # fractional bits of a weight
SHARE_BITS = 16            # fractional bits of a share
MOST = 1 << 15             # accumulators are clipped to this, so that sums fit 64 bits
PIECE = 1 << 16            # weights that are mixed at a time, so that they stay in the cache


def merge(cfg, ours, theirs, fitness_ours, fitness_theirs):
    """The State with which an island continues, with the step and seed of `ours`. The arguments are neither changed nor
    kept. The fitnesses are of one kind, less is better; if they are equal, ours counts as the better. Raises ValueError
    (one line) for a fitness or a state that no training produces: a state may come from a stranger."""
    share = worse_share(cfg.RECOMBINE_ALPHA, fitness_ours, fitness_theirs)
    for state in ours, theirs:
        parameters.check_state(state)
    better, worse = (ours, theirs) if fitness_ours <= fitness_theirs else (theirs, ours)
    moments = np.zeros(theirs.moments.shape, np.float32)
    if cfg.OPTIMIZER_MERGE == "copy":
        moments[:, :2] = theirs.moments[:, :2]
    elif cfg.OPTIMIZER_MERGE == "interpolate":
        for column in range(2):
            base = better.moments[:, column].astype(np.float64)
            moments[:, column] = base + (worse.moments[:, column] - base) * (share / (1 << SHARE_BITS))
    if cfg.MERGE == "clone":
        weights = np.array(theirs.weights)
        overlay = np.array(theirs.overlay)
        moments[:, 2] = theirs.moments[:, 2]
    else:
        weights = np.empty_like(theirs.weights)
        for at in range(0, weights.size, PIECE):
            piece = slice(at, at + PIECE)
            weights[piece], moments[piece, 2] = _mix(better, worse, piece, share)
        base = better.overlay.astype(np.int64)
        overlay = (base + _round((worse.overlay - base) * share)).astype(np.int8)
    return parameters.State(weights, moments, overlay, ours.step, ours.seed)


def worse_share(alpha, fitness_ours, fitness_theirs):
    """The share of the worse state in a mix, an integer in units of 2^-SHARE_BITS. Raises ValueError."""
    better, worse = sorted((fitness_ours, fitness_theirs))
    if not (math.isfinite(better) and math.isfinite(worse)):
        raise ValueError(f"a fitness of {fitness_ours} against {fitness_theirs}: finite numbers are needed")
    if better < 0:                                   # the negative of a reward
        ratio = max(worse / better, 0.0)
    else:
        ratio = better / worse if worse else 1.0
    return round((1 - alpha) * ratio * (1 << SHARE_BITS))


def rejuvenate(cfg, state):
    """The State with moments of 0, so that only the next votes decide, and with noise scales of at least
    ADAPTIVE_NOISE_INIT, those of the start of a run. Higher ones would fall by only ADAPTIVE_NOISE_DEC a step."""
    moments = np.where([False, False, True], state.moments, np.float32(0))
    overlay = np.array(state.overlay)
    if cfg.ADAPTIVE_NOISE_MODE:
        overlay = np.maximum(overlay, np.int8(cfg.ADAPTIVE_NOISE_INIT))
    return parameters.State(np.array(state.weights), moments, overlay, state.step, state.seed)


def _fixed(state, piece):
    """int64: w + acc of a slice of the weights, in units of 2^-UNIT."""
    acc = np.clip(state.moments[piece, 2], -MOST, MOST) * np.float32(1 << UNIT)          # a power of two: exact
    return (state.weights[piece].astype(np.int64) << UNIT) + np.rint(acc).astype(np.int64)


def _mix(better, worse, piece, share):
    """(weights int8, accumulators float32) of the mix of a slice of two states."""
    mix = _fixed(better, piece)
    mix += _round((_fixed(worse, piece) - mix) * share)
    weights = better.weights[piece].astype(np.int64)
    rest = mix - (weights << UNIT)
    weights = np.clip(weights + np.sign(rest) * (np.abs(rest) >> UNIT), -127, 127)
    return weights.astype(np.int8), (mix - (weights << UNIT)).astype(np.float32) * np.float32(1 / (1 << UNIT))


def _round(x):
    """int64: x without its SHARE_BITS fractional bits, rounded; halves toward zero, which is the better state."""
    return np.sign(x) * (np.abs(x) + ((1 << SHARE_BITS - 1) - 1) >> SHARE_BITS)
