"""Where others have set the scene: their modules beside ours, their variables, their file systems."""

import concurrent.futures
import json
import os
import shutil
import subprocess
import sys

from pytest import approx, fixture, mark

from commands import DEFINES, TEXT, fails, process, run, succeeds
from recordings import HERE, python
from tools import curves

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
    assert succeeds(process("train --help", env=env)).startswith("usage: egg.py train ")
    assert "stopped after 1 steps" in succeeds(process("train --steps 1", *DEFINES, env=env, cwd=place))


@mark.parametrize("code, words", [
    ("import sys\nsys.modules['llvmlite'] = None\n", "the worker on cpu: ModuleNotFoundError: import of llvmlite"),
    ("import os, sys\nif 'spawn_main' in ' '.join(sys.orig_argv):\n    os._exit(3)\n",
     "the worker on cpu ended with status 3; the 0 completed steps are kept")])
def test_what_ends_a_worker_at_its_start_is_one_line(place, code, words):
    (place / "site").mkdir()
    (place / "site" / "sitecustomize.py").write_text(code)
    fails(process("train --steps 1", *DEFINES, env={"PYTHONPATH": "site"}, cwd=place), 1, words)


def test_process_1_ends_by_a_signal(here):
    """As in a container without an init: there Linux has no default for it."""
    os.mkfifo("text")
    code = f"import os, runpy\nos.getpid = lambda: 1\nrunpy.run_path({str(HERE / 'egg.py')!r}, run_name='__main__')"
    waiting = subprocess.Popen([sys.executable, "-c", code, "prepare", "text", "--out", "made"])
    with open("text", "wb"):                                 # once it reads, it is there
        waiting.terminate()
        assert waiting.wait(20) == 130


LACKING = """
import errno, fcntl, os
def lacks(number):
    def refuse(*arguments, **more):
        raise OSError(number, os.strerror(number))
    return refuse
os.symlink, os.link, os.chmod = lacks(errno.EPERM), lacks(errno.ENOTSUP), lacks(errno.EPERM)
fcntl.flock = lacks(errno.ENOLCK)
"""


def test_a_file_system_without_links_locks_and_modes_keeps_a_run(place, compiled):
    """As exFAT, SMB, or NFS without a lock service; the cache is there, too."""
    (place / "lacking").mkdir()
    (place / "lacking" / "sitecustomize.py").write_text(LACKING)
    env = {"PYTHONPATH": "lacking", "EGG_VALIDATE_EVERY": "2"}
    for steps in 4, 6:
        done = process(f"train --save-dir r --steps {steps}", *DEFINES, "-DSNAPSHOT_EVERY=2", env=env, cwd=place)
        told = succeeds(done)
        assert "r cannot be locked: see that no other run writes into it" in told and "no more" not in told
    assert sorted(name for name in os.listdir("r") if name.startswith("snapshot"))[-1].startswith("snapshot-00000006-")
    assert "best.egg" not in os.listdir("r")
    for more in "", "--best":
        assert succeeds(process(f"generate --load-dir r --prompt a --tokens 2 {more}", env=env, cwd=place))


def test_a_lost_log_of_events_is_made_up_for(place, compiled):
    """By the history and the names of snapshots."""
    succeeds(process("train --save-dir r --steps 4", *DEFINES, "-DSNAPSHOT_EVERY=2", "-DVALIDATE_EVERY=2", cwd=place))
    whole = curves.read_curve("r")
    os.unlink("r/events.jsonl")
    left = curves.read_curve("r")
    assert [(*point[:2], approx(point.value, abs=1e-6)) for point in left.loss] == \
        [(*point[:2], point.value) for point in whole.loss]
    assert left.steps == 4 and left.units["loss"] == whole.units["loss"]
    assert "loss, bits/byte, against million tokens" in succeeds(run("plot r")) and "r    4" in succeeds(run("runs r"))
    shutil.rmtree("r")
    (place / "r").mkdir()
    fails(run("plot r"), 1, "r/events.jsonl: No such file")


def test_a_run_behind_a_symbolic_link_finds_its_data(place, compiled):
    """From anywhere; `runs` does not name what is the same for all."""
    (place / "disk" / "large").mkdir(parents=True)
    (place / "run").symlink_to("disk/large")
    for directory in "run", "other":
        succeeds(process(f"train --save-dir {directory} --steps 1", *DEFINES, cwd=place))
    elsewhere = place / "disk"
    assert "../input.bin: " in succeeds(process("train --save-dir large --steps 2", cwd=elsewhere))
    assert "../input.bin: " in succeeds(process(f"train --save-dir {place}/run --steps 3", cwd=elsewhere))
    # the tree may be moved, whatever the directory was called meanwhile
    assert json.loads((place / "run" / "settings.json").read_text())["INPUT_FILE"] == "../../input.bin"
    assert "_FILE" not in succeeds(process(f"runs {place}/run {place}/other", cwd=elsewhere))
    assert "_FILE" not in succeeds(process("runs run other", cwd=place))


def test_figures_of_another_text_are_not_compared(place, compiled):
    """Neither by the best snapshot nor by `runs`."""
    line = ["train --save-dir r", *DEFINES, "-DSNAPSHOT_EVERY=2", "-DVALIDATE_EVERY=2"]
    other = "validations read another text than before"

    def best():
        return os.readlink("r/best.egg"), min(point.value for point in curves.read_curve("r").validation)

    assert other not in succeeds(run(*line, "--steps", "4"))
    assert other not in succeeds(run(*line, "--steps", "6"))
    assert int(best()[0].split("-")[1]) == 6
    (place / "val.bin").write_bytes(bytes(range(250)) * 8)
    assert other in succeeds(run(*line, "--steps", "8"))
    name, least = best()
    assert {point.step for point in curves.read_curve("r").validation} == {6, 8}
    assert int(name.split("-")[1]) in (6, 8) and f"{least:.4f}" in name
    assert [name for name in os.listdir("r") if name.startswith("snapshot") and name.count("-") < 2] == \
        [name for name in os.listdir("r") if name.startswith("snapshot-00000004.")]
    assert other in succeeds(run(*line, "--steps", "9", "-DVALIDATE_TOKENS=128"))


def test_runs_that_begin_at_once_take_directories_of_their_own(place, compiled):
    """As in a job array; where one cannot begin, its directory is gone again."""
    succeeds(run("train --save-dir r --steps 1", *DEFINES))
    lines = [["train --load-dir r --steps 2", "-DLR_SCHEDULE=0:0.1"], ["train --load-dir r --steps 2"],
             ["train --load-dir r --steps 2"]]
    with concurrent.futures.ThreadPoolExecutor(len(lines)) as pool:
        for done in pool.map(lambda line: process(*line, cwd=place), lines):
            succeeds(done)
    assert sorted(name for name in os.listdir() if name[:2] == "r-") == [f"r-{number}" for number in range(2, 5)]
    assert run("train --load-dir r --log-json /dev/null/x -D LR_SCHEDULE=0:0.1").returncode == 1
    assert not os.path.exists("r-5")
