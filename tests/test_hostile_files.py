"""Forged files of a save directory: no code runs, no file outside it is touched, memory is bounded."""

import os
import pathlib
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from contextlib import closing, suppress
from json import dumps
from unittest import mock

from hypothesis import given, settings
from hypothesis.strategies import binary, integers, just, lists, none, one_of, sampled_from, tuples
import numpy as np
from numpy import int8
from pytest import fixture, mark, raises
import pyzstd

import egg_config
from cluster import admission, event_log, history, snapshots
from cluster.history import configuration, HistoryError, open_run, read_run, with_crc
from islands import gossip
from model import parameters
from tools import use
from coordinators import whole
from fakes import CFG, GOOD_STEP
from fuzzing import EXAMPLES
from recordings import HERE
from commands import fails, run


def in_memory(program, *arguments, megabytes=700):
    """Runs a Python program that may have so much memory; its (status, what it prints)."""
    limit = f"import resource; resource.setrlimit(resource.RLIMIT_AS, ({megabytes << 20},) * 2)\n"
    did = subprocess.run([sys.executable, "-c", limit + program, *map(str, arguments)], cwd=HERE, timeout=60,
                         capture_output=True, text=True, env={**os.environ, "OPENBLAS_NUM_THREADS": "1"})
    return did.returncode, did.stdout + did.stderr


OPEN = f"""
import sys, egg_config
from cluster import history
cfg = egg_config.make(**{CFG.constants()!r})
try:
    run = history.read_run(cfg, sys.argv[1])
    for step in range(run.start.step, run.step):
        run.fitness(step)
except history.HistoryError as error:
    print(error)
"""


def record(run, body):
    return with_crc(history.RECORD.pack(len(body), run.step, 0, 0, run.seed)) + with_crc(body)


def headed(text):
    """A history without steps, with this text in its header."""
    return with_crc(history.MAGIC + len(text.encode()).to_bytes(4, "little") + text.encode())


def sparse(path, data, size):
    """Writes a file of this size that begins with the data; the rest is a hole."""
    path.write_bytes(data)
    os.truncate(path, size)


def write_small(path, cfg, names={}):
    """A file of a few tensors, with a configuration that has more."""
    use.write_tensors(path, {"embedding": np.zeros((4, 4), int8)}, {"config": dumps({**cfg.saved(), **names})})


def test_forged_histories_and_checkpoints_take_no_memory(tmp_path):
    with closing(open_run(CFG, tmp_path / "good")) as run:
        bomb = record(run, pyzstd.compress(bytes(1 << 30)))                       # 1 GiB in 32 KB
        small = record(run, pyzstd.compress(bytes(1 << 20), 19))                  # 1 MiB in a body of the right size
    header = (tmp_path / "good" / history.FILE).read_bytes()
    length = (1 << 31).to_bytes(4, "little")
    for number, (name, data, size, words) in enumerate((
            ("checkpoint_00200000000.bin", b"x", 1, "checkpoint_00000001.bin: No such file"),
            (history.FILE, header + bomb, len(header + bomb), "damaged at byte"),
            (history.FILE, header + small, len(header + small), "step 0 cannot be read"),
            (history.FILE, history.MAGIC + length, 1 << 33, "damaged in its header"),
            (history.FILE, header, 1 << 40, "damaged at byte"))):
        directory = tmp_path / str(number)
        directory.mkdir()
        sparse(directory / name, data, size)
        status, said = in_memory(OPEN, directory)
        assert status == 0 and words in said and said.count("\n") == 1, (number, status, said)


def test_a_directory_sets_only_what_a_run_keeps_there_and_no_file_to_write(tmp_path):
    evil = {"AUDIT_RATE": 0.0, "PORT": 1, "DEVICE": "cuda"}
    at = tmp_path / "run"
    open_run(CFG, at).close()
    (at / history.FILE).write_bytes(headed(dumps({"version": 1, "config": {**CFG.saved(), **evil}})))
    (at / history.SETTINGS).write_text(dumps({**CFG.settings(), "SAMPLE_EVERY": 7, "HIDDEN_DIM": 96, **evil}))
    write_small(tmp_path / "model", CFG, evil)
    for saved in use.read_config(tmp_path / "model"), configuration(at):
        cfg = egg_config.load(saved=saved)
        assert not saved.keys() & evil.keys() and cfg.saved() == CFG.saved()
    assert cfg.SAMPLE_EVERY == 7


def test_a_header_that_claims_a_huge_model_takes_no_memory_unless_the_user_says_so(here, monkeypatch):
    cfg = egg_config.make(HIDDEN_DIM=1024, N_LAYERS=8)
    open_run(cfg, here / "run").close()
    write_small(here / "small", cfg)
    for command in "generate --load-dir run", "train --steps 1 --load-dir run", "import --save-dir new small":
        fails(run(command, preset=""), 2, "holds a model of 117,524,480 weights", "add -D HIDDEN_DIM=1024")
    did = in_memory("import sys, egg; sys.exit(egg.main(sys.argv[1:]))", "generate", "--load-dir", f"{here}/run")
    assert did[0] == 2 and "takes 1.5 GB" in did[1] and did[1].count("\n") == 1, did
    monkeypatch.setattr(use, "load", mock.Mock(side_effect=use.UseError("it is loaded")))
    fails(run("generate -DHIDDEN_DIM=1024 --load-dir run", preset=""), 1, "it is loaded")


@mark.parametrize("config", [5, {"A\negg: all is well": 1}, {"NO_SUCH": 1}])
def test_odd_constants_are_one_line(here, config):
    """Of a history and of a model, where a line break would begin a line that seems to be of this program."""
    (here / "run").mkdir()
    (here / "run" / history.FILE).write_bytes(headed(dumps({"version": 1, "config": config})))
    use.write_tensors("model", {"x": np.zeros(1, int8)}, {"config": dumps(config)})
    for command in "generate --load-dir run", "import --save-dir new model":
        result = run(command, preset="")
        fails(result, 1 if result.returncode == 1 else 2)
    assert "\n" not in history.difference({"OBJECTIVE": "\negg: all is well"}, CFG.saved())


def test_links_and_pipes_in_a_save_directory_are_left_alone(tmp_path):
    source, secret = tmp_path / "source", tmp_path / "secret"
    open_run(CFG, source).close()
    secret.write_text("a file of this user")
    os.unlink(source / history.SETTINGS)
    for name in ("elite-000-00000001-validation-1.0000.egg", "history-000.egg", "history-secret",
                 "snapshot-00000002.egg", history.SETTINGS, "banned.txt", history.EVENTS):
        os.symlink(secret, source / name)
    os.mkfifo(source / "snapshot-00000003.egg")
    sparse(source / "snapshot-00000004.egg", b"", 1 << 24)
    open_run(CFG, tmp_path / "target", source).close()
    assert sorted(os.listdir(tmp_path / "target")) == [history.FILE, history.SETTINGS, "snapshot-00000004.egg"]
    with closing(open_run(CFG, source)) as run:
        assert snapshots.Shelf(CFG, run).files == {}
    bans = admission.Bans(source)
    bans.add("w1", "it lied")
    with raises(admission.Refused, match="nobody is let in"):
        bans.message("w1")
    with raises(event_log.WatchError):
        event_log.JsonLog(str(source / history.EVENTS), "", None)
    assert secret.read_text() == "a file of this user"                       # and nothing was written through a link
    with raises(OSError, match="too large"):
        snapshots.read(CFG, source / "snapshot-00000004.egg")
    (source / history.FILE).replace(tmp_path / "moved")
    os.symlink(tmp_path / "moved", source / history.FILE)
    with raises(HistoryError, match="not a regular file"):
        open_run(CFG, source)


# --- at random --------------------------------------------------------------------------------------------------------

NAMES = [history.FILE, "history-000.egg", "snapshot-00000001.egg", "snapshot-00000002-1.5000.egg",
         "snapshot-99999999999999999999.egg", "elite-000-00000001-validation-1.0000.egg", history.SETTINGS,
         history.DATA_FILE, history.EVENTS, "latest.egg", "checkpoint_00000001.bin", "snapshot-x.part"]
KINDS = one_of(
    tuples(just("link"), sampled_from(["/dev/zero", "/etc/hostname", "nowhere", ".", "history.egg", "../x"])),
    tuples(just("pipe"), none()), tuples(just("folder"), none()), tuples(just("bytes"), binary(max_size=200)),
    tuples(just("cut"), integers(0, 3000)), tuples(just("flip"), integers(0, 1 << 20)),
    tuples(just("grown"), integers(0, 1 << 24)))


@fixture(scope="module")
def good_directory(tmp_path_factory):
    """A save directory with a file of every kind."""
    at, state = tmp_path_factory.mktemp("good"), parameters.initial_state(CFG)
    with closing(open_run(CFG, at)) as run:
        for step in (1, 2):
            run.append(GOOD_STEP, 5, 0)
            state.step = step
            snapshots.save(CFG, state, at)
        run.keep("data", b"d" * 32)
    snapshot = (at / "snapshot-00000002.egg").read_bytes()
    for path in [at / name for name in NAMES]:
        if not path.exists():
            path.write_bytes(snapshot if path.suffix == ".egg" else b"x")
    return at


def change(path, kind, value):
    """Puts something else in the place of a file."""
    data = path.read_bytes()
    path.unlink()
    if kind == "link":
        path.symlink_to(value)
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    elif kind == "bytes":
        path.write_bytes(value)
    elif kind == "flip":
        at = value // 8 % len(data)
        path.write_bytes(data[:at] + bytes([data[at] ^ 1 << value % 8]) + data[at + 1:])
    else:
        sparse(path, data, value)


@settings(max_examples=EXAMPLES // 6)
@given(lists(tuples(sampled_from(NAMES), KINDS), min_size=1, max_size=5, unique_by=lambda pair: pair[0]))
def test_any_files_in_a_save_directory_end_in_a_run_or_a_line(good_directory, changes):
    """Links, pipes, folders, cut, changed and grown files: no other error, no waiting, no memory."""
    with tempfile.TemporaryDirectory() as top:
        top, began = pathlib.Path(top), time.process_time()            # not that of a disk under load
        at, copy = top / "run", top / "copy"
        shutil.copytree(good_directory, at)
        for name, (kind, value) in changes:
            change(at / name, kind, value)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        for call in (configuration, history.epochs, lambda _: history.newest(str(top / "r*")),
                     lambda at: read_all(read_run(CFG, at)), lambda at: read_all(open_run(CFG, at)),
                     lambda at: read_all(open_run(CFG, str(copy), at))):
            with suppress(HistoryError):
                call(str(at))
        gossip.Elites(str(at), 3)
        assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 300 << 10, "KiB of memory"
        assert time.process_time() - began < 20
        assert not any(path.is_symlink() and path.name not in ("latest.egg", "best.egg") for path in copy.glob("*"))


def read_all(run):
    with closing(run):
        whole(run)
        shelf = snapshots.Shelf(CFG, run)
        for step in list(shelf.files):
            with suppress(ValueError, OSError):
                shelf.state(step)
        shelf.block(shelf.newest, 0, 100)
