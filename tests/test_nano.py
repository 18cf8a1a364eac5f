"""examples/nano.py: the method in one file of NumPy is that of the engine, in every bit."""

import os
import pickle
import subprocess
import sys

import numpy as np
import pytest

import egg_config
from engine import cpu_engine
from model import parameters, steps
from recordings import write_decoding

sys.path.append(os.path.join(egg_config.ROOT, "examples"))
import nano                                                  # noqa: E402

COMPILED = ["compiled_units"]                                # for conftest.py
STEPS = 20
LINES = (b"%d times %d is %d.\n\0" % (a, b, a * b) for a in range(40) for b in range(40))
TEXT = np.frombuffer(b"".join(LINES), np.uint8)
SCHEDULE = (0, 0.5), (15, 0.25)                              # changes in these steps
# in a process of its own, as nano sets the threads of products before it imports NumPy
COURSE = """
import itertools, pickle, sys
import nano
text, steps, nano.LR_SCHEDULE = pickle.load(sys.stdin.buffer)
course = list(itertools.islice(nano.train(text), steps))
pickle.dump(([of_step[-1] for of_step in course], course[-1]), sys.stdout.buffer)
assert not any(module.partition(".")[0] in ("numba", "model", "engine", "egg_config") for module in sys.modules)
"""


def configuration():
    """The Config of nano's settings: those of a preset but for the constants that nano has, too, and for Muon."""
    settings = {name: getattr(nano, name) for name in egg_config.CONSTANTS if hasattr(nano, name)}
    assert len(settings) > 14
    return egg_config.make(**{**egg_config.PRESETS["laptop-bytes"], **settings, "USE_MUON": 0,
                               "LR_SCHEDULE": SCHEDULE})


def of_engine(flat, t):
    return parameters.from_canonical(flat[t.span], t.cols) if t.matrix else flat[t.span]


@pytest.fixture(scope="module")
def trained(compiled_units):
    """(CpuEngine, what nano.train yielded last) after STEPS steps."""
    done = subprocess.run([sys.executable, "-c", COURSE], input=pickle.dumps((TEXT, STEPS, SCHEDULE)), check=True,
                          capture_output=True, env={**os.environ, "PYTHONPATH": os.path.dirname(nano.__file__)})
    cfg, (losses, last) = configuration(), pickle.loads(done.stdout)
    engine = cpu_engine.CpuEngine(cfg, TEXT)
    for bits in losses:
        packed, loss = engine.evaluate(0, cfg.CHUNK_SIZE)
        units = cfg.POPULATION_SIZE * cfg.SEQ_LEN * 256 * cfg.SOFTMAX_EXP_SCALE * np.log(2)
        assert bits == pytest.approx(loss / units, rel=1e-3)    # that of the engine is a whole number
        engine.update(steps.join_digits(cfg, [packed]))
    assert len(losses) == STEPS
    return engine, last


def test_weights_and_moments_are_those_of_the_engine(trained):
    engine, (step, seed, weights, moments, _) = trained
    state, begun, names = engine.state(), parameters.initial_state(engine.cfg), set()
    assert (step, seed) == (state.step, state.seed) and step == STEPS
    for t in parameters.tensors(engine.cfg):
        if t.name.startswith("ln"):                          # nano has no weights of norms, as nothing votes on them
            assert (state.weights[t.span] == 16).all()
            continue
        names.add(t.name)
        assert np.array_equal(weights[t.name], of_engine(state.weights, t)), t.name
        assert np.array_equal(np.moveaxis(np.array(moments[t.name]), 0, -1), of_engine(state.moments, t)), t.name
        assert (state.weights[t.span] != begun.weights[t.span]).any(), f"{t.name} has learnt"
    assert names == set(weights)


def test_validation_and_text_are_those_of_the_engine(trained, monkeypatch):
    monkeypatch.setattr(nano, "VALIDATE_TOKENS", 1024)
    engine, (_, _, weights, _, _) = trained
    windows = np.lib.stride_tricks.sliding_window_view(TEXT, nano.SEQ_LEN + 1)[::nano.SEQ_LEN]
    read = min(len(windows), nano.VALIDATE_TOKENS // nano.SEQ_LEN)
    assert read < len(windows), "they are chosen"
    nats, count = engine.validate(windows[np.arange(read) * len(windows) // read])
    assert nano.bits_per_byte(weights, TEXT) == pytest.approx(nats / count / np.log(2), rel=1e-9)
    prompt = b"7 times 8 is "
    assert nano.write(weights, prompt, 60, 5) == prompt + bytes(engine.generate(list(prompt), 60, 5))


@pytest.mark.parametrize("name", ["my.txt", "input.bin"])
def test_it_reads_text_and_tokens_and_writes(name, tmp_path, monkeypatch, capsys):
    words = [b"the ", b"king ", b"and ", b"queen. "]
    chosen = np.random.default_rng(1).integers(0, 4, 3000).astype("<u4")
    text = b"".join(words[k] for k in chosen)
    (tmp_path / "my.txt").write_bytes(text)
    chosen.tofile(tmp_path / "input.bin")
    chosen[:1000].tofile(tmp_path / "val.bin")
    write_decoding(tmp_path / "decoding.bin", words)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(nano, "SECONDS", 0)
    nano.main(name)
    first, last, written = capsys.readouterr().out.split("\n", 2)
    end = len(text) - len(text) // 20
    text, unread = (text[:end], text[end:]) if name == "my.txt" else (text, b"".join(words[k] for k in chosen[:1000]))
    assert first == f"{len(text):,} bytes to learn from for {nano.SECONDS} s, {len(unread):,} for validation"
    assert last.startswith("step 1 ") and last.endswith("bits/byte")
    assert written.encode().startswith(unread[:nano.SEQ_LEN]) and len(written) > 400


@pytest.mark.parametrize("name,content,word", [
    ("missing.txt", None, "No such file"), ("short.txt", b"short", "too short"), ("odd.bin", b"odd", "no tokens")])
def test_what_is_no_text_is_said_in_one_line(tmp_path, name, content, word):
    if content:
        (tmp_path / name).write_bytes(content)
    write_decoding(tmp_path / "decoding.bin", [b"a"])
    done = subprocess.run([sys.executable, nano.__file__, name], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 1 and word in done.stderr and done.stderr.count("\n") == 1
