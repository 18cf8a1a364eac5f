"""Daily use, command by command as a user types them: what one command prints is what the next one needs."""

import json
import os
import pathlib
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

import egg
import egg_config
import kit
from cluster import history

CFG = egg_config.make(**{**kit.CFG.constants(), "DEVICE": "cpu", "VALIDATE_TOKENS": 64, "SNAPSHOT_EVERY": 0})
CHANGED = {**egg_config.changed(CFG), "SNAPSHOT_EVERY": 0}
DEFINES = [f"-D{name}={egg_config.text(value)}" for name, value in CHANGED.items()]
TEXT = b"the quick brown fox jumps over the lazy dog. " * 400


def run(*arguments, program=kit.HERE / "egg.py", python=sys.executable, env=None, stdin=None, timeout=120):
    """A finished process of the command line in the current directory."""
    return subprocess.run([python, program, *map(str, arguments)], capture_output=True, text=True, timeout=timeout,
                          stdin=stdin or subprocess.DEVNULL, env={**os.environ, "EGG_DEVICE": "cpu", **(env or {})})


def paste(line, label, **more):
    """Runs the command behind `label` in a printed line as a shell does; the finished process."""
    return subprocess.run(line.removeprefix(label), shell=True, capture_output=True, text=True, timeout=120,
                          stdin=subprocess.DEVNULL, env={**os.environ, "EGG_DEVICE": "cpu"}, **more)


def line_with(label, text):
    found, = [line for line in text.splitlines() if line.startswith(label)]
    return found


def fails(result, status, *words):
    assert result.returncode == status and result.stderr.startswith("egg: ") and result.stderr.count("\n") == 1, result
    assert [word for word in words if word not in result.stderr] == [], result.stderr


@pytest.fixture
def bytes_here(tmp_path, monkeypatch):
    """A directory with data of plain bytes under other names than the default, which is the current one."""
    (tmp_path / "my data").mkdir()
    (tmp_path / "my data" / "train.bin").write_bytes(TEXT)
    (tmp_path / "my data" / "val.bin").write_bytes(TEXT[:500])
    monkeypatch.chdir(tmp_path)
    return [*DEFINES, "-DINPUT_FILE=my data/train.bin", "-DVAL_FILE=my data/val.bin"]


# --- a directory that holds a run ------------------------------------------------------------------------------------

def test_a_run_goes_on_by_its_directory_alone(bytes_here, compiled):
    """train, the printed commands, coordinator, export, import: the constants are named once."""
    first = run("train", "--steps", 2, "--save-dir", "ckpt one", *bytes_here)
    assert first.returncode == 0, first.stderr
    again = line_with("continue it: ", first.stdout)
    assert shlex.split(again)[-3:] == ["train", "--save-dir", "ckpt one"]
    more = paste(again + " --steps 4", "continue it: ")
    assert more.returncode == 0 and "my data/train.bin: 18,000 tokens" in more.stdout, more
    assert "steps 2 to 4: " in more.stdout
    for line in (line_with("try it: ", first.stdout), line_with("try it: ", more.stdout)):
        written = paste(line, "try it: ")
        assert written.returncode == 0 and written.stdout.startswith("The king said"), written
    told = run("eval", "--load-dir", "ckpt one")
    assert told.returncode == 0 and told.stdout.startswith("my data/val.bin: ") and "bigram" in told.stdout, told
    assert run("export", "w.safetensors", "--load-dir", "ckpt one").returncode == 0
    begun = run("import", "w.safetensors", "--save-dir", "new one")
    assert begun.returncode == 0 and shlex.split(begun.stdout.splitlines()[-1])[-2:] == ["--save-dir", "new one"]
    on = paste(line_with("next: ", begun.stdout) + " --steps 5 -D 'INPUT_FILE=my data/train.bin'", "next: ")
    assert on.returncode == 0 and "steps 4 to 5: " in on.stdout, on
    copied = run("train", "--load-dir", "ckpt one", "--save-dir", "copy", "--steps", 5)
    assert copied.returncode == 0 and "steps 4 to 5: " in copied.stdout, copied


def test_a_coordinator_prints_the_command_that_continues_it(bytes_here):
    (pathlib.Path("it's secret")).write_text("0123456789abcdef0123456789abcdef")
    os.chmod("it's secret", 0o600)
    arguments = ["--port", "0", "--save-dir", "ckpt", "--http", "127.0.0.1:0", "--secret-file", "it's secret",
                 "-D", "IDLE_TIMEOUT=99"]
    command = [sys.executable, kit.HERE / "egg.py", "coordinator", "--minutes", "9", *arguments, *DEFINES]
    for _ in range(2):
        with subprocess.Popen(command, shell=isinstance(command, str), stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                              text=True, start_new_session=True) as process:
            assert process.stdout.readline().startswith("coordinator on 0.0.0.0:")
            os.killpg(process.pid, signal.SIGTERM)
            out, err = process.communicate(timeout=20)
        line = line_with("continue it: ", out)
        assert not err and shlex.split(line)[4:] == ["coordinator", *arguments]
        command = "exec " + line.removeprefix("continue it: ")
    assert history.configuration("ckpt")["SEQ_LEN"] == CFG.SEQ_LEN


def test_only_what_is_given_can_conflict_and_is_named(bytes_here):
    history.open_run(CFG, "ckpt").close()
    for command in ("train", "coordinator"):
        for where in ("--save-dir", "--load-dir"):
            fails(run(command, where, "ckpt", "-D", "N_LAYERS=3", "-DVALIDATE_EVERY=5"), 2,
                  "ckpt holds a run of another configuration: -D N_LAYERS: N_LAYERS = 3, there it is 1; leave that out")
    fails(run("train", "--save-dir", "ckpt", env={"EGG_SEQ_LEN": "16"}), 2, "EGG_SEQ_LEN: SEQ_LEN = 16, there it is 8;")
    fails(run("train", "--save-dir", "ckpt", "--preset", "nano-egg"), 2,
          "--preset nano-egg: MODEL = gru, there it is transformer (and ")
    fails(run("generate", "--load-dir", "ckpt", "-D", "HIDDEN_DIM=128"), 2,
          "-D HIDDEN_DIM: HIDDEN_DIM = 128, there it is 64;")
    same = ["-DN_LAYERS=1", "-DPOPULATION_SIZE=128", "-DLR_SCHEDULE=" + egg_config.text(CFG.LR_SCHEDULE)]
    laptop = egg_config.load("laptop", environ={}).saved()
    for environ, defines, saved in ({}, same, CFG.saved()), ({"EGG_PRESET": "laptop"}, [], laptop):
        cfg = egg_config.load(defines=[x[2:] for x in defines], environ=environ, saved=saved, run="ckpt")
        assert cfg.saved() == egg_config.make(**saved).saved()
    eight = egg_config.make(**{**CFG.constants(), "POPULATION_SIZE": 0})
    egg_config.load(defines=["POPULATION_SIZE=0"], environ={}, saved=eight.saved(), run="ckpt")


def test_an_old_run_without_settings_works_as_before(bytes_here):
    history.open_run(egg_config.load(defines=[x[2:] for x in bytes_here], environ={}), "ckpt").close()
    settings = json.loads(pathlib.Path("ckpt/settings.json").read_text())
    assert settings["INPUT_FILE"] == "../my data/train.bin"
    assert settings["VALIDATE_EVERY"] == 2 and settings["SNAPSHOT_EVERY"] == 0
    assert history.configuration("ckpt")["INPUT_FILE"] == "my data/train.bin"
    assert "DECODING_FILE" not in history.configuration("ckpt")                      # it is not there
    os.mkdir("elsewhere")
    os.chdir("elsewhere")
    assert history.configuration("../ckpt")["VAL_FILE"] == "../my data/val.bin"
    for old in (b"", b"[]", b"\xff", b'{"INPUT_FILE": 7}', b'{"LATER": 1}'):
        pathlib.Path("../ckpt/settings.json").write_bytes(old)
        assert history.configuration("../ckpt") == history.kept(CFG)
    os.unlink("../ckpt/settings.json")
    assert history.configuration("../ckpt") == history.kept(CFG)


def test_an_empty_newer_directory_does_not_win(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run = history.open_run(CFG, "ckpt-trained")
    run.append(bytes(13), 1, 1)
    run.close()
    os.utime("ckpt-trained/history.egg", (1, 1))
    history.open_run(CFG, "ckpt-empty").close()
    assert history.newest() == "ckpt-trained"
    shutil.rmtree("ckpt-trained")
    assert history.newest() == "ckpt-empty"
