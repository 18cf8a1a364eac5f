"""What becomes of two states of one configuration when islands meet, element by element: the same bits on every machine. NumPy alone.

A weight and its accumulator are one number, w + acc: the accumulator holds what the weight has not yet moved (SPEC 9). Neither is ever taken
without the other. MERGE says what becomes of this number and of the noise-scale overlay:
  "clone"      the other's.
  "recombine"  a mix of both, in integers. The worse state has a part of (1 - RECOMBINE_ALPHA) * better / worse of their fitness, the better
               one the rest: RECOMBINE_ALPHA is the share of the better one where both are equally good, and who is far behind counts less.
OPTIMIZER_MERGE says what becomes of the moments m and v (Muon: its momentum; "sgd" and "ztest" have none): "reset" to 0, "copy" the
other's, "interpolate" a mix with the same parts.

In fixed point w + acc counts units of 2^-24 weight. A mix leaves the better one's weight only by whole weights, as an update does, and
what is less than one goes into the accumulator: a state mixed with itself stays as it is. float32 holds every accumulator up to 1 in
these units exactly. Rounded, to the nearest unit, is what comes in finer: accumulators below a half in size. Accumulators above 1, which
learning rates above 1 can make, may be rounded where they go out, and count as MOST above that. "ztest" moves weights without
accumulators; there the rest of a mix waits for the next merge.
"""

import math

import numpy as np

from model import parameters

UNIT = 24                  # fractional bits of a weight
PART = 16                  # fractional bits of a share
MOST = 1 << 15             # an accumulator is taken for this at most: sums then stay within 64 bits
PIECE = 1 << 16            # weights that are mixed at a time, so that they stay in the cache


def needs_ours(cfg):
    """Whether `merge` needs our own state as well."""
    return cfg.MERGE == "recombine" or cfg.OPTIMIZER_MERGE == "interpolate"


def merge(cfg, ours, theirs, fitness_ours, fitness_theirs):
    """The State that an island goes on with, at the step and under the seed of `ours`; neither argument is changed or kept.

    ours may be None where `needs_ours` says no: step and seed are then those of `theirs`, and the caller's to set. The fitnesses are
    losses of one kind, 0 or more; where they are equal ours counts as the better. Raises ValueError (one line) for a fitness, or a state,
    that no training gives: a state may come from a stranger."""
    part = worse_part(cfg.RECOMBINE_ALPHA, fitness_ours, fitness_theirs)
    for state, whose in ((ours, "our own"), (theirs, "the other")):
        if state is not None:
            _check(state, whose)
    better, worse = (ours, theirs) if fitness_ours <= fitness_theirs else (theirs, ours)
    moments = np.zeros(theirs.moments.shape, np.float32)
    if cfg.OPTIMIZER_MERGE == "copy":
        moments[:, :2] = theirs.moments[:, :2]
    elif cfg.OPTIMIZER_MERGE == "interpolate":
        share = part / (1 << PART)
        for column in range(2):
            here = better.moments[:, column].astype(np.float64)
            moments[:, column] = here + (worse.moments[:, column] - here) * share
    if cfg.MERGE == "clone":
        weights, overlay = np.array(theirs.weights), np.array(theirs.overlay)
        moments[:, 2] = theirs.moments[:, 2]
    else:
        weights = np.empty_like(theirs.weights)
        for at in range(0, weights.size, PIECE):
            some = slice(at, at + PIECE)
            weights[some], moments[some, 2] = _mixed(better, worse, some, part)
        here = better.overlay.astype(np.int64)
        overlay = (here + _nearest((worse.overlay - here) * part)).astype(np.int8)
    own = theirs if ours is None else ours
    return parameters.State(cfg, weights, moments, overlay, own.step, own.seed)


def worse_part(alpha, fitness_ours, fitness_theirs):
    """The worse state's part of a mix, a whole number of 2^-PART; alpha: RECOMBINE_ALPHA. Raises ValueError for a fitness that is none."""
    better, worse = sorted((fitness_ours, fitness_theirs))
    if not (math.isfinite(better) and math.isfinite(worse) and better >= 0):
        raise ValueError(f"a fitness of {fitness_ours} against {fitness_theirs}: wanted are finite losses, 0 or more")
    return round((1 - alpha) * (better / worse if worse else 1.0) * (1 << PART))


def rejuvenate(cfg, state):
    """The State with a push: moments 0, so that the next votes alone say where to, and the noise scales that have become quieter again as
    loud as at the start of a run, ADAPTIVE_NOISE_INIT. Louder ones stay, so it is never quieter than before; that start is what the rest
    of the configuration was chosen for, and more would have to be unlearned at ADAPTIVE_NOISE_DEC a step."""
    moments = np.zeros_like(state.moments)
    moments[:, 2] = state.moments[:, 2]
    overlay = np.array(state.overlay)
    if cfg.ADAPTIVE_NOISE_MODE:
        overlay = np.maximum(overlay, np.int8(cfg.ADAPTIVE_NOISE_INIT))
    return parameters.State(cfg, np.array(state.weights), moments, overlay, state.step, state.seed)


def _check(state, whose):
    """Raises ValueError for a state in which an update would go wrong."""
    if not np.isfinite(state.moments).all():
        raise ValueError(f"{whose} state holds moments that are not finite numbers")
    if (state.moments[:, 1] < 0).any():
        raise ValueError(f"{whose} state holds mean squares below 0")
    if state.weights.min() < -127 or state.overlay.min() < -127:
        raise ValueError(f"{whose} state holds a weight or noise scale of -128")


def _fixed(state, some):
    """int64: w + acc of some weights, in units of 2^-UNIT."""
    acc = np.clip(state.moments[some, 2], -MOST, MOST) * np.float32(1 << UNIT)          # a power of two: exact
    return (state.weights[some].astype(np.int64) << UNIT) + np.rint(acc).astype(np.int64)


def _mixed(better, worse, some, part):
    """(weights int8, accumulators float32) of the mix of two states."""
    mixed = _fixed(better, some)
    mixed += _nearest((_fixed(worse, some) - mixed) * part)
    here = better.weights[some].astype(np.int64)
    rest = mixed - (here << UNIT)
    here = np.clip(here + np.sign(rest) * (np.abs(rest) >> UNIT), -127, 127)
    return here.astype(np.int8), (mixed - (here << UNIT)).astype(np.float32) * np.float32(1 / (1 << UNIT))


def _nearest(x):
    """int64: x without its PART fractional bits, rounded to the nearest, halves toward zero: toward the better one."""
    return np.sign(x) * (np.abs(x) + ((1 << PART - 1) - 1) >> PART)
