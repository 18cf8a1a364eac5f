"""`import egg_use`: what a notebook calls, on the CPU."""

import math
import multiprocessing
import os
import pathlib
from unittest import mock

import numpy as np
from pytest import approx, fixture, raises

import egg_config
import egg_use
from cluster.console import Printer
from tools import use
from commands import CFG, TEXT, run, succeeds
from fakes import Lines, differing

VALIDATED = 62 * CFG.SEQ_LEN + 1


@fixture
def trained(tmp_path, monkeypatch, compiled, capsys):
    """(events, directory, what was printed) of a run of four steps in a new current directory."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("EGG_DEVICE", "cpu")
    (tmp_path / "input.bin").write_bytes(TEXT)
    (tmp_path / "val.bin").write_bytes(TEXT[:VALIDATED])
    events, constants = [], {name: egg_config.text(value) for name, value in differing(CFG).items()}
    directory = egg_use.train(events.append, save_dir="ckpt", preset="deggs", steps=4, **constants)
    return events, directory, capsys.readouterr().out


def test_a_notebook_trains_loads_and_writes(trained, capsys):
    events, directory, printed = trained
    assert directory == "ckpt" and [event["step"] for event in events if event["event"] == "step"] == [0, 1, 2, 3]
    assert events[-1]["event"] == "stop"
    assert "step 0  loss " in printed and "\r" not in printed
    model = egg_use.load("ckpt")
    told = succeeds(run("generate --tokens 30 --seed 3 --temp 9 --prompt 'the fox'", preset=""))
    assert "the fox" + model.generate("the fox", 30, 3, temp=9) == told
    stop = next(c for c in told[8:] if c.isascii())
    assert model.generate("the fox", 30, 3, temp=9, stops=[stop.encode()]) == told[7:].partition(stop)[0]
    assert egg_use.load("ckpt@2").engine.step == 2 and model.engine.step == 4
    egg_use.train(save_dir="ckpt", steps=5, quiet=True)
    assert egg_use.load("ckpt").engine.step == 5 and not capsys.readouterr().out


def test_the_score_is_that_of_eval_and_counts_the_rest_of_a_window(trained):
    model = egg_use.load(trained[1])
    nats, _, held_out = use.evaluate(model.cfg, model.engine, "val.bin", 0, Printer(Lines()))
    assert model.score(TEXT[:VALIDATED].decode()) == approx(held_out.bits(nats))
    size = CFG.SEQ_LEN                               # two windows, and the rest
    windows = [np.frombuffer(TEXT[at:at + length + 1], np.uint8).astype(np.int32)[None]
               for at, length in ((0, size), (size, size), (2 * size, 3))]
    bits = sum(model.engine.validate(window)[0] for window in windows) / math.log(2)
    assert model.score(TEXT[:2 * size + 4].decode()) == approx(bits / (2 * size + 3))
    assert math.isnan(model.score("x"))


WRONG = [
    dict(tokens=-1), dict(tokens=2.5), dict(tokens="x"), dict(seed=-1), dict(temp="hot"), dict(temp=-1), dict(min_p=2),
    dict(stops=[""]), dict(stops=5), dict(stops=[5]), dict(stops=""), dict(top_p=1), dict(best=True), dict(prompt=""),
    dict(prompt=5), dict(prompt=None)]


def test_arguments_may_have_any_type_that_says_it_and_wrong_ones_are_errors_to_catch(trained):
    model = egg_use.load(pathlib.Path("ckpt"))
    texts = {model.generate(prompt, np.int64(30), temp=9, stops=stops)
             for prompt in ("the fox", b"the fox") for stops in ("e", b"e", ["e"], (b"e", "e"))}
    assert len(texts) == 1 and model.generate("\ud800", 2, min_p=None)
    for wrong in WRONG:
        with raises(egg_config.UsageError):
            print(wrong, model.generate(**{"prompt": "the", "tokens": 2, **wrong}))
    for wrong, words in (None, "is no text"), (5, "is no text"), (["text"], "is no text"), ("", "to score is empty"):
        with raises(egg_config.UsageError, match=words):
            model.score(wrong)


def test_a_daemonic_process_cannot_train(here):
    (here / "input.bin").write_bytes(TEXT)
    with mock.patch.dict(multiprocessing.current_process()._config, daemon=True):
        with raises(egg_config.EggError, match="it is daemonic, of a Pool or of Celery: call egg from another"):
            egg_use.train(save_dir="new", preset="laptop-bytes", DETOKENIZE=0, steps=1)
    assert not os.path.exists("new")


def test_what_is_wrong_is_an_error_to_catch(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with raises(egg_config.EggError, match="nowhere: No such file"):
        egg_use.load("nowhere")
    with raises(egg_config.EggError, match="N_LAYERS"):
        egg_use.train(N_LAYERS=-1)
    with raises(egg_config.UsageError, match="--stps=3"):
        egg_use.train(stps=3)
    with raises(egg_config.UsageError, match="callback = 5: must be a function"):
        egg_use.train(5)
    with raises(egg_config.UsageError, match="steps"):
        egg_use.train(steps="many", best=False)
    assert not os.listdir()
