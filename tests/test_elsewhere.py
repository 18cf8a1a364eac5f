"""Where others have set the scene: their modules beside ours, their variables, their file systems."""

import os
import shutil
import signal
import subprocess
import sys

from pytest import fixture, mark

from commands import DEFINES, TEXT, process, succeeds
from recordings import HERE, python

COMPILED = ["compiled"]
USE = ("import model, tools, egg_use\nassert model.ours and tools.ours\n"
       f"egg_use.train(steps=1, preset='deggs', quiet=True, save_dir='r', DEVICE='cpu', "
       f"{', '.join(f'{name}={value!r}' for name, value in (word[2:].split('=', 1) for word in DEFINES))})\n"
       "print(model.worth('four'))\n")


@fixture
def place(here):
    """A current directory with data, and with modules that have the names of folders of egg."""
    (here / "input.bin").write_bytes(TEXT)
    (here / "val.bin").write_bytes(TEXT[:2000])
    for name in "model", "engine", "cluster":
        (here / f"{name}.py").write_text("ours = 1\ndef worth(text):\n    return float(len(text))\n")
    (here / "tools").mkdir()
    (here / "tools" / "__init__.py").write_text("ours = 2\n")
    return here


def test_modules_with_the_names_of_our_folders_are_in_nobodys_way(place, compiled):
    """Of a notebook or an unguarded script, imported before; our processes import neither it nor them."""
    (place / "script.py").write_text(USE)
    for arguments in (["script.py"], ["-c", USE]):
        shutil.rmtree("r", True)
        assert python(*arguments, cwd=place, PYTHONPATH=str(HERE)).split() == ["4.0"]
    assert succeeds(process("runs", env={"PYTHONPATH": str(place)}, cwd=place)).startswith("run ")


@mark.parametrize("variable", ["PYTHONSAFEPATH=1", "PYTHONOPTIMIZE=2"])
def test_variables_of_python_change_nothing(place, compiled, variable):
    env = dict([variable.split("=")])
    assert succeeds(process("arch --help", env=env)) == succeeds(process("arch --help"))
    assert "stopped after 1 steps" in succeeds(process("train --steps 1", *DEFINES, env=env, cwd=place))


def test_process_1_ends_by_a_signal(here):
    """As in a container without an init: there Linux has no default for it."""
    os.mkfifo("text")
    code = f"import os, runpy\nos.getpid = lambda: 1\nrunpy.run_path({str(HERE / 'egg.py')!r}, run_name='__main__')"
    waiting = subprocess.Popen([sys.executable, "-c", code, "prepare", "text", "--out", "made"])
    with open("text", "wb"):                                 # once it reads, it is there
        waiting.terminate()
        assert waiting.wait(20) == 128 + signal.SIGTERM
