"""examples/nano.py: the method in one file of NumPy is that of the engine, in every bit."""

import itertools
import os
import subprocess
import sys

import numpy as np
import pytest

import egg_config
from engine import cpu_engine
from model import parameters, seeds

sys.path.append(os.path.join(egg_config.ROOT, "examples"))
import nano                                                  # noqa: E402

COMPILED = ["compiled_activations"]                          # for conftest.py
STEPS = 20
TEXT = np.frombuffer(b"".join(b"%d times %d is %d.\n\0" % (a, b, a * b) for a in range(40) for b in range(40)), np.uint8)


def configuration():
    """The Config of the settings that stand in nano.py: those of a preset but for these."""
    settings = {name: getattr(nano, name) for name in egg_config.CONSTANTS if hasattr(nano, name)}
    return egg_config.make(**{**egg_config.PRESETS["laptop-bytes"], **settings})


def of_engine(flat, t):
    return parameters.from_canonical(flat[t.span], t.cols) if t.matrix else flat[t.span]


@pytest.fixture(scope="module")
def trained(compiled_activations):
    """(CpuEngine, what nano.train yielded last) after STEPS steps, in which both schedules have changed."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(nano, "SOFT_TARGETS", ((0, 2), (12, 3)))
        patch.setattr(nano, "LR_SCHEDULE", ((0, 0.5), (15, 0.25)))
        cfg = configuration()
        engine = cpu_engine.CpuEngine(cfg, TEXT)
        for last in itertools.islice(nano.train(TEXT), STEPS):
            packed, loss = engine.evaluate(0, cfg.CHUNK_SIZE)
            bits = loss / (cfg.POPULATION_SIZE * cfg.SEQ_LEN * 256 * cfg.SOFTMAX_EXP_SCALE * np.log(2))
            assert last[-1] == pytest.approx(bits, rel=1e-12)
            engine.update(packed)
        return engine, last


def test_weights_and_moments_are_those_of_the_engine(trained):
    engine, (step, seed, weights, moments, _) = trained
    state, begun, names = engine.state(), parameters.initial_state(engine.cfg), set()
    assert (step, seed) == (state.step, state.seed) == (STEPS, seed)
    for t in parameters.tensors(engine.cfg):
        if t.name.startswith("ln"):                          # nano has no weights of norms, as nothing votes on them
            assert (state.weights[t.span] == 16).all()
            continue
        names.add(t.name)
        assert np.array_equal(weights[t.name], of_engine(state.weights, t)), t.name
        assert np.array_equal(np.moveaxis(np.array(moments[t.name]), 0, -1), of_engine(state.moments, t)), t.name
        if t.name != "embedding":
            assert (state.weights[t.span] != begun.weights[t.span]).any(), f"{t.name} has learnt"
    assert names == set(weights)


def test_validation_and_text_are_those_of_the_engine(trained):
    engine, (_, _, weights, _, _) = trained
    windows = np.lib.stride_tricks.sliding_window_view(TEXT, nano.SEQ_LEN + 1)[::nano.SEQ_LEN]
    assert len(windows) * nano.SEQ_LEN <= nano.VALIDATE_TOKENS * 2
    there = (TEXT.size - 1) // nano.SEQ_LEN
    wanted = min(there, nano.VALIDATE_TOKENS // nano.SEQ_LEN)
    nats, count = engine.validate(windows[np.arange(wanted) * there // wanted])
    assert nano.bits_per_byte(weights, TEXT) == pytest.approx(nats / count / np.log(2), rel=1e-9)
    prompt = b"7 times 8 is "
    assert nano.write(weights, prompt, 60, 5) == bytes(engine.generate(list(prompt), 60, 5))
