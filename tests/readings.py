"""Oracles: plain readings of members, of fitness and of the draw of a token."""

import numpy as np
from numpy import float32, int64
import pytest

import egg_config
from model import integer_tables, parameters, rules, steps
from model.reading import Reading


TINY = dict(HIDDEN_DIM=64, HEAD_DIM=32, N_LAYERS=1, SEQ_LEN=8)


def configured(preset=None, *defines):
    """The Config of a preset and definitions NAME=VALUE, whatever the environment says."""
    return egg_config.load(preset, defines, {})


def equal(found, wanted, what=""):
    """Holds arrays of one shape against each other, value by value; NumPy says where they differ."""
    np.testing.assert_array_equal(found, wanted, str(what))


def as_data(cfg, tokens):
    """Tokens as a file of training data holds them."""
    return tokens.astype(np.uint8 if cfg.VOCAB_SIZE == 256 else np.uint32)


def plain_losses(cfg, state, windows, count, kind=Reading):
    """[int]: the losses of the first members of the State's step, over the windows of their pairs. A window begins with
    the tokens before it, and ends with its soft targets, where the configuration has such."""
    losses = []
    for member in range(count):
        before, window, drawn = np.split(windows[member // 2], np.cumsum([cfg.STATE_TOKENS, cfg.SEQ_LEN + 1]))
        clean, reading = kind(cfg, state), kind(cfg, state, state.seed + member // 2, 1 - 2 * (member % 2))
        if before.size:
            clean.hidden(before)
        reading.carried = clean.carried
        losses.append(reading.loss(window[:-1], np.column_stack([window[1:], drawn.reshape(cfg.SEQ_LEN, -1)])))
    return losses


def plain(values):
    """Numbers of Python in place of NumPy's, as egg_config wants them."""
    return {name: getattr(value, "item", lambda: value)() for name, value in values.items()}


def shaken(engine, rng, step=0):
    """The State at a step that an engine has got: all weights and noise scales drawn."""
    state = engine.state()
    state.overlay[:] = rng.integers(-127, 128, state.overlay.size)
    state.weights[:] = rng.integers(-127, 128, state.weights.size)
    state.step = int(step)
    engine.load(state)
    return state


def votes_on(cfg, state, t, fitness):
    """int64, flat: the votes of SPEC 9 for a tensor, pair by pair. fitness: bytes, packed."""
    digits = rules.unpacked_digits(fitness, cfg.N_PAIRS)
    reading, votes = Reading(cfg, state), np.zeros((t.rows, t.cols) if t.matrix else t.cols, int64)
    for q in np.flatnonzero(digits):
        a, b = (reading.noise(state.seed + int(q) + seed, np.arange(n)).astype(int64)
                for seed, n in ((t.seed_a, t.cols), (t.seed_b, t.rows if t.matrix else t.cols)))
        a, b = (a, b) if cfg.USE_CLT else (np.sign(a), np.sign(b))
        votes += int(digits[q]) * (np.outer(b, a) if t.matrix else a * b)
    return parameters.to_canonical(votes) if t.matrix else votes


def nats(cfg, z, targets):
    """float: what targets [n] cost with logits z [n, V]."""
    z = z / cfg.SOFTMAX_EXP_SCALE
    return (np.log(np.exp(z - z.max(1, keepdims=True)).sum(1)) + z.max(1) - z[np.arange(len(z)), targets]).sum()


def random_config(rng, **more):
    """A small configuration drawn over what validate() admits."""
    head = rng.choice([32, 64, 128])
    mode, gaussian = rng.integers(3), rng.integers(2)
    heads = rng.integers(1 if head > 32 else 2, 4 if head < 128 else 2)
    settings = dict(HIDDEN_DIM=head * heads, HEAD_DIM=head, N_LAYERS=rng.integers(1, 3), SEQ_LEN=8 * rng.integers(1, 6),
                    VOCAB_SIZE=rng.choice([256, 257, 300, 1000]), CHUNK_SIZE=8, POPULATION_SIZE=8,
                    ADAPTIVE_NOISE_MODE=mode, DEVICE_GAUSSIAN=gaussian,
                    DEVICE_MASK=rng.integers(1, 43 if gaussian else 128), HOST_GAUSSIAN=rng.integers(2),
                    HOST_MASK=rng.integers(1, 43), SIGMA_SHIFT=rng.integers(1, 6),
                    SIGMA_SHIFT_VECTOR=rng.integers(2, 6), SHIFT_ATTN=rng.integers(6, 10),
                    SHIFT_LOGIT=rng.integers(6, 10), SOFTMAX_EXP_SCALE=rng.choice([3.0, 6.0, 12.5]),
                    SOFTMAX_LUT_SIZE=rng.choice([40, 128, 256]), LOSS=rng.choice(["deggs", "exact"]),
                    USE_SAME_DATA=rng.integers(2), CHUNK_MEAN_FILTER=rng.integers(2),
                    USE_ADAPTIVE_THRESHOLD=rng.integers(2), OPTIMIZER=rng.choice(["adamw", "sgd"]))
    return egg_config.make(**{**plain(settings), **more})


def random_gru(rng, **more):
    """The same of the recurrent model."""
    gaussian, group = rng.integers(2), rng.choice([2, 4, 8])
    settings = dict(MODEL="gru", HIDDEN_DIM=32 * rng.integers(2, 6), N_LAYERS=rng.integers(1, 3),
                    SEQ_LEN=rng.integers(8, 20), STATE_TOKENS=rng.choice([0, 1, 7, 30]),
                    VOCAB_SIZE=rng.choice([256, 300, 512]), CHUNK_SIZE=8, POPULATION_SIZE=8 * rng.integers(1, 4),
                    GROUP_SIZE=group, MLP_RELU=rng.integers(2), LOSS="exact",
                    ADAPTIVE_NOISE_MODE=rng.choice([0, 1, 2]), DEVICE_GAUSSIAN=gaussian, HOST_GAUSSIAN=1,
                    HOST_MASK=rng.choice([15, 42]), DEVICE_MASK=rng.integers(1, 43 if gaussian else 128),
                    SIGMA_SHIFT=rng.integers(0, 6), SIGMA_SHIFT_VECTOR=rng.integers(4, 9),
                    FIXED_POINT=rng.choice([4, 4, 3, 5]), SOFTMAX_EXP_SCALE=rng.choice([23.0, 16.0]),
                    OPTIMIZER=rng.choice(["ztest", "adamw", "sgd"]), USE_CLT=rng.integers(2),
                    FAST_FITNESS=rng.integers(2), NOISE_REUSE=rng.choice([0, 1, 2]))
    return egg_config.make(**{**plain(settings), **more})


def callable_by_python(inner):
    """A function that only compiled functions of the CPU engine call, for a test."""
    import numba
    return numba.njit(lambda *arguments: inner(*arguments))


def weights_of(cfg, z, seen, temp, min_p, penalty):
    """(int64 [V], float32 [V]): the weights of SPEC 10 for logits z, of which `seen` are penalised once (SPEC 11), and
    the scores that they are made of."""
    scores = z.astype(float32)
    scores[seen] -= float32(penalty * cfg.SOFTMAX_EXP_SCALE)
    if temp == 0:
        return None, scores
    d = np.trunc((scores - scores.max()) / float32(temp)).astype(int64)
    exp = integer_tables.exp_table(cfg).astype(int64)
    floor = np.trunc(float32(np.log(float32(min_p))) * float32(cfg.SOFTMAX_EXP_SCALE)) if min_p else -np.inf
    return np.where(d >= floor, exp[np.minimum(len(exp) - 1, -d)], 0), scores


def drawn(cfg, z, seen, position, seed, **settings):
    """The token after `position`: the walk over v = 0, H, 2 H, ..., 1, H + 1, ... of SPEC 10."""
    weights, scores = weights_of(cfg, z, seen, **settings)
    if weights is None:
        return int(scores.argmax())
    walk = np.argsort(np.arange(z.size) % cfg.HIDDEN_DIM, kind="stable")
    threshold = steps.hash32((seed + 999 + 555 * position) & 0xFFFFFFFF, 0) % int(weights.sum())
    return int(walk[np.searchsorted(np.cumsum(weights[walk]), threshold, side="right")])


def hold_text_against_the_reading(engine, prompt, tokens, seed, kind=Reading, **settings):
    """What an engine wrote behind a prompt, with all settings of the draw."""
    cfg, sequence = engine.cfg, [*prompt, *tokens]
    z = kind(cfg, engine.state()).logits(sequence[:-1])
    for t in range(len(prompt) - 1, len(sequence) - 1):
        assert sequence[t + 1] == drawn(cfg, z[t], np.unique(sequence[:t + 1]), t, seed, **settings), (t, settings)


def settings_of(rng):
    return {name: float(rng.choice(values)) for name, values in
            dict(temp=(0.0, 0.3, 0.6, 1.5), min_p=(0.0, 0.08, 0.5), penalty=(0.0, 0.2, 1.0)).items()}


def hold_against_the_reading(engine, rng, kind=Reading):
    """An engine with drawn weights: losses, a validation, a text beyond SEQ_LEN by drawn settings, and texts that are
    written together, which are those that are written alone."""
    cfg, state = engine.cfg, shaken(engine, rng, rng.integers(9))
    windows = rules.windows(cfg, engine.tokens, state.step, 0, 4)
    assert engine.evaluate(0, 8)[:6].tolist() == plain_losses(cfg, state, windows, 6, kind)
    # of all tokens, and of few, so that the recurrent model is reset
    windows = rng.integers(0, [[cfg.VOCAB_SIZE], [9]], (2, cfg.SEQ_LEN + 1))
    want = sum(nats(cfg, kind(cfg, state).logits(window[:-1]), window[1:]) for window in windows)
    assert engine.validate(windows) == (pytest.approx(want, rel=1e-9), windows[:, 1:].size)
    settings, prompt = settings_of(rng), rng.integers(0, cfg.VOCAB_SIZE, rng.integers(1, 2 * cfg.SEQ_LEN)).tolist()
    text = [*engine.generate(prompt, cfg.SEQ_LEN + 9, 70, **settings)]
    assert len(text) == cfg.SEQ_LEN + 9
    hold_text_against_the_reading(engine, prompt, text, 70, kind, **settings)
    count, room = int(rng.integers(1, 24)), int(rng.integers(9, 14))
    texts, lengths = rng.integers(0, 5, (count, room)).astype(np.int32), rng.integers(1, 8, count)
    numbers = rng.integers(0, 1 << 32, count).astype(np.uint32)
    engine.write(texts, lengths, numbers, rules.sampling_settings(cfg, **settings))
    for text, n, number in zip(texts, lengths, numbers):
        assert text[n:].tolist() == [*engine.generate(text[:n], room - n, int(number), **settings)]


SMALL = dict(TINY, VOCAB_SIZE=256, CHUNK_SIZE=16, POPULATION_SIZE=32, VALIDATE_EVERY=0, SAMPLE_EVERY=0, AUDIT_RATE=0.0,
             SNAPSHOT_EVERY=0)
BASE = egg_config.make(**SMALL)
