"""Commands as a user types them, in this process or in their own."""

import contextlib
import io
import os
import shlex
import subprocess
import sys
import types
from unittest import mock

import egg
import egg_config
import egg_net
import fakes
from fakes import differing
from recordings import HERE
from tools import train


def defines(cfg, **more):
    """[word]: what gives a command the constants of cfg, without the local ones, and more."""
    return [f"-D{name}={egg_config.text(value)}" for name, value in {**differing(cfg), **more}.items()]


CFG = fakes.CFG.changed(DEVICE="cpu", VALIDATE_TOKENS=64, SNAPSHOT_EVERY=0)
DEFINES = defines(CFG, SNAPSHOT_EVERY=0)
DEGGS = {"EGG_DEVICE": "cpu", "EGG_PRESET": "deggs"}      # `train` would take another preset
TEXT = b"the quick brown fox jumps over the lazy dog. " * 400


def run(line, *more, preset="deggs", **environ):
    """What a command line does in the current directory, in this process, which has imported the engine already. line:
    as a user types it; more: further words, as they are; preset: what EGG_PRESET says, in an environment with
    `environ`."""
    out, err = (io.TextIOWrapper(io.BytesIO(), "utf-8", write_through=True) for _ in range(2))
    with (mock.patch.dict(os.environ, {**DEGGS, "EGG_PRESET": preset, **environ}), contextlib.redirect_stdout(out),
          mock.patch.object(sys, "argv", [str(HERE / "egg.py")]), contextlib.redirect_stderr(err)):
        try:
            status = egg.main([*shlex.split(line), *map(str, more)])
        except SystemExit as ended:
            status = ended.code
    stdout, stderr = (stream.buffer.getvalue().decode("utf-8", "replace") for stream in (out, err))
    return types.SimpleNamespace(returncode=status, stdout=stdout, stderr=stderr)


def process(line, *more, python=(sys.executable,), program=HERE / "egg.py", env=None, timeout=120, **options):
    """The same as a process of its own, which has ended."""
    return subprocess.run([*python, program, *shlex.split(line), *map(str, more)], capture_output=True, text=True,
                          timeout=timeout, stdin=subprocess.DEVNULL, env={**os.environ, **DEGGS, **(env or {})},
                          **options)


def begin(line, *more, **options):
    """The same while it runs."""
    return subprocess.Popen([sys.executable, HERE / "egg.py", *shlex.split(line), *map(str, more)], text=True,
                            env={**os.environ, "EGG_DEVICE": "cpu"}, **options)


def certificate(directory, name, *arguments):
    """(path, path of its key) of a certificate that openssl makes, by default signed by itself."""
    made, key = directory / name, directory / f"{name}-key"
    subprocess.run(["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes",
                    "-days", "2", *arguments, "-keyout", key, "-out", made], check=True, capture_output=True)
    return made, key


def paste(line, label):
    """What the command behind `label` in a printed line does, which a shell would split into these words."""
    python, program, *words = shlex.split(line.removeprefix(label))
    assert os.access(python, os.X_OK) and os.path.samefile(program, HERE / "egg.py")
    return run("", *words, preset="")


def train_here(cfg, steps, lines, save_dir="run", **options):
    """What tools.train.train returns; `lines` gets what it prints."""
    return train.train(cfg, steps=steps, save_dir=save_dir, threads=1, console=egg_net.Console(lines, verbose=True),
                       **options)


def line_with(label, text):
    found, = [line for line in text.splitlines() if line.startswith(label)]
    return found


def succeeds(result):
    """What a command that ends well has printed."""
    assert result.returncode == 0, result
    return result.stdout


def fails(result, status, *words):
    assert result.returncode == status and result.stderr.startswith("egg: ") and result.stderr.count("\n") == 1, result
    assert [word for word in words if word not in result.stderr] == [], result.stderr


PROSE = ("It was the best of times, it was the worst of times;\n"
         "it was the age of wisdom, it was the age of foolishness.\n"
         "Caf\u00e9 na\u00efve \u2014 \u6625\u7720\u4e0d\u89ba\u6681\n\n\tand 1234567890 more ...\n").encode()
