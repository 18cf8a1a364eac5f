"""Events and where they go: JSON logs, followers, and what strangers cannot write there."""

import contextlib
import json
import os
import re
import sqlite3
import struct
import subprocess
import sys
import time
from types import SimpleNamespace

import numpy as np
from pytest import approx, fixture, mark

import egg_config
import egg_net
from cluster import event_log, history, wire
from cluster.console import printable
from cluster.status import Progress
from cluster.step import Author
from cluster.wire import JOB_REQUEST, LOG_MESSAGE
from model import data_files
from tools.curves import read_curve
from coordinators import Peer, Peer2, Server, named, refused, until
from fakes import CFG, FakeEngine, Lines, UNITS, VALIDATION, changed
from pages import EVERYBODY, page_shows, state_of
from run_logs import A_STEP, events, example, of_kind, told_to, write
from commands import fails, run


# --- hostile lines ----------------------------------------------------------------------------------------------------

def test_coming_again_does_not_fill_the_disk(tmp_path):
    with Server(tmp_path, save=True) as server:
        for _ in range(60):
            peer = Peer2(server)
            for _ in range(40):
                peer.send(LOG_MESSAGE, b"x" * 16000)
            peer.send(JOB_REQUEST, 0, 0, 0, bytes(16))
            peer.close()
        server.has_workers(0)
        size = (tmp_path / history.EVENTS).stat().st_size
        assert size < 2 * event_log.OF_PEERS[1] * event_log.LINE, f"{size} bytes: long lines count as many"
    assert '"event": "step"' not in (tmp_path / history.EVENTS).read_text()


@mark.parametrize("text", [" " * LOG_MESSAGE.most, "\n" * LOG_MESSAGE.most,
                                  "sample at step " + " " * 16000, "sample at step 1: " * 900, " >>>" * 4000])
def test_no_message_takes_long(text, tmp_path):
    with told_to() as events:
        started = time.process_time()
        events.message("w", printable(text))
        assert time.process_time() - started < 0.3


def test_a_sample_that_two_workers_send_is_one_event(tmp_path):
    """Where chunk 0 is evaluated twice, its worker samples twice."""
    with told_to(log_json=tmp_path / "log") as log:
        for worker, text in ("w", "0: p >>> a"), ("v", "0: p >>> a"), ("v", "1: p >>> a"), ("w", "1: p >>> b"):
            log.message(worker, f"sample at step {text}")
    told = of_kind("sample", events(tmp_path / "log"))
    assert [(e["worker"], e["step"], e["text"]) for e in told] == [("w", 0, "a"), ("v", 1, "a"), ("w", 1, "b")]


def test_a_long_log_begins_anew_and_the_older_part_stays(tmp_path, monkeypatch):
    monkeypatch.setattr(event_log, "LOG_BYTES", 5000)
    with told_to(saved=tmp_path) as told:
        for step in range(200):
            told.emit("step", **{**A_STEP, "step": step})
    for name in history.EVENTS, f"{history.EVENTS}.1":
        assert (tmp_path / name).stat().st_size < 10000
    assert events(tmp_path)[-1]["step"] == 199


def test_a_disk_that_is_nearly_full_stops_logs_until_there_is_room(tmp_path, monkeypatch):
    lines, log = Lines(), tmp_path / history.EVENTS
    full = SimpleNamespace(f_bavail=0, f_frsize=1, f_blocks=1 << 40)
    with told_to(lines, saved=tmp_path) as told:
        before = log.stat().st_size
        with monkeypatch.context() as patched:
            patched.setattr(os, "fstatvfs", lambda _: full)
            for step in range(5):
                told.warn(f"w{step}")
        assert log.stat().st_size == before
        assert lines.text.count("the disk is nearly full: events are missing") == 1
        told.warn("again")
        assert "again" in log.read_text()


# --- validations ------------------------------------------------------------------------------------------------------

def test_the_first_validation_of_a_step_counts_and_one_much_worse_is_a_warning(tmp_path):
    with Server(tmp_path, changed(SNAPSHOT_EVERY=0)) as server:
        first, second = named(server, "first", "second")
        for peer, nats in (first, 100.0), (second, 150.0):
            peer.works(0)
            peer.send(wire.VALIDATION, 0, 100, 200, nats)
        second.works(0, 2)
        server.reaches(1)
        first.ask(0)
        first.answer()
        first.works(1, 4)
        server.reaches(2)
        first.send(wire.VALIDATION, 2, 100, 200, 200.0)
        server.says("step 2: the validation has become much worse, 1.4427 bits/byte after 0.7213 at step 0: a worker "
                    "may compute wrongly")
        assert [step for step, *_ in server.progress.validations] == [0, 2]


def progress_of_nobody(cfg=CFG):
    """(Progress, [line that it warns of]) without a coordinator."""
    run, told = SimpleNamespace(step=0, start=SimpleNamespace(step=0), held_out=b"", tokens=int), []
    warn = SimpleNamespace(emit=lambda *_, **__: None, warn=lambda line, peer=False: told.append(line))
    return Progress(cfg, run, warn), told


def test_what_is_advised_for_a_slow_link_can_be_set():
    """Short runs have 90 chunks at most."""
    for cfg in CFG, UNITS, *(UNITS.changed(POPULATION_SIZE=chunks * UNITS.CHUNK_SIZE) for chunks in (90, 91)):
        progress, told = progress_of_nobody(cfg)
        progress.check_link("w", 1e6, 1e6, 0.5)
        advised = re.search(r"a new run with -D (.*) sends less often", told[0])[1].split(" -D ")
        assert cfg.changed(**{name: int(value) for name, _, value in (word.partition("=") for word in advised)})
    assert advised == ["CHUNK_SIZE=320", "POPULATION_SIZE=29120"]


def validates(progress, step, figure):
    progress.run.step = step
    progress.validated(step, figure, "bits/byte")


@mark.parametrize("unigram", [2.5, 2.0])
def test_a_run_that_learns_its_text_by_heart_says_so_once(unigram):
    """Not one that is poorer than a table of single tokens."""
    progress, told = progress_of_nobody()
    progress.unigram = unigram
    for step in range(0, 1200, 100):
        progress.loss = 5 - step / 1000
        validates(progress, step, 2.2 + abs(step - 200) / 3000)
    if unigram == 2.0:
        assert len(told) == 1 and "no better than a table of single tokens" in told[0]
        return
    assert len(told) == 1 and told[0].startswith("step 700: the model learns the text by heart")
    assert "best at step 200, 2.200 bits/byte" in told[0]
    validates(progress, 1200, 4.0)                                   # a jump is something else
    assert len(told) == 2 and "a worker may compute wrongly" in told[1]


def test_a_run_that_is_no_better_than_a_table_of_single_tokens_says_so_once():
    progress, told = progress_of_nobody()
    progress.unigram = 2.5
    for step, figure in (0, 5.0), (200, 2.6), (400, 2.55), (600, 2.52), (800, 2.4):
        validates(progress, step, figure)
    assert len(told) == 1 and told[0].startswith("step 400: the model is no better than a table of single tokens, "
                                                 "2.550 to 2.500 bits/byte: begin again with")


@mark.parametrize("limits, ends, why", [
    (dict(target=2.1), 2, "as the validation has come to 2.0000 bits/byte"),
    (dict(patience=2), 4, "by --patience 2: no validation was better than that of step 2"),
    (dict(patience=3), None, ""), (dict(target=1.9, patience=4), None, "")])
def test_a_good_validation_or_many_without_a_better_one_end_a_run(limits, ends, why):
    progress, _ = progress_of_nobody()
    vars(progress).update(limits)
    for step, figure in enumerate([4.0, 3.0, 2.0, 2.05, 2.0, 1.99]):
        validates(progress, step, figure)
        if ends == step:
            assert why in progress.enough
            return
        assert not progress.enough
    assert ends is None


@mark.parametrize("told", [(1, 1, 1.7e308), (1, 0, 1e300), (100, 200, -1.0), (100, 200, float("nan")), (0, 1, 1.0),
                           (1 << 40, 1, 1e6), (1, 1 << 40, 45.0)])
def test_a_validation_that_cannot_be_right_is_refused(server, told):
    peer = Peer2(server)
    assert peer.chunk(0) == 0
    peer.send(wire.VALIDATION, 0, *told)
    with refused("wrong validation"):
        peer.answer()


# --- events and logs --------------------------------------------------------------------------------------------------

FIELDS = {"start": {"step", "directory", "config"}, "joined": {"worker", "address", "device", "step"},
          "validation": {"step", "tokens", "value", "unit", "of"}, "sample": {"worker", "step", "prompt", "text"},
          "step": A_STEP.keys(),
          "snapshot": {"step", "bytes"}, "left": {"worker", "address", "device", "step"}}


def test_a_run_keeps_its_events(tmp_path):
    cfg = changed(SNAPSHOT_EVERY=2)
    tokens = np.frombuffer(b"ab\nd" * 20, np.uint8)
    with Server(tmp_path, cfg, steps=5, save=True) as server:
        other = Peer(server)
        other.chunk(0)
        other.close()
        until(lambda: of_kind("left", events(tmp_path)))
        thread = server.work(FakeEngine(cfg), tokens=tokens, validation=VALIDATION,
                             decoding=data_files.load_decoding(cfg))
    thread.join(60)
    told = [event for event in events(tmp_path) if event["event"] != "warning"]     # the fake validations get worse
    assert {event["event"] for event in told} == set(FIELDS)
    for event in told:
        assert set(event) - {"time", "event"} == FIELDS[event["event"]] and abs(event["time"] - time.time()) < 60, event
    a_step = cfg.POPULATION_SIZE * cfg.SEQ_LEN
    bits, unit = egg_config.loss_unit(cfg.constants())
    with contextlib.closing(history.open_run(cfg, tmp_path)) as run:
        for k, event in enumerate(of_kind("step", told)):
            record = run.record(k)
            loss = record.sum_loss / a_step / 16                                                        # of d-eggs
            assert event == event | dict(step=k, tokens=k * a_step, loss=approx(loss * bits, abs=1e-6), unit=unit,
                                         updates=record.updates)
    assert k == 4
    assert [(e["step"], e["value"], e["unit"]) for e in of_kind("validation", told)] == \
        [(k, approx((k + 1) / np.log(2) / 12, abs=1e-6), "bits/byte") for k in (0, 2, 4, 5)]
    assert of_kind("sample", told)[0]["prompt"] == "ab\nd"
    assert [(s["step"], s["text"]) for s in read_curve(tmp_path).samples] == [(0, "AAA"), (2, "CCC"), (4, "EEE"),
                                                                                        (5, "FFF")]


def test_an_error_and_what_happens_to_strangers_is_told(tmp_path):
    with refused("in the end"), told_to(lines := Lines(), saved=tmp_path / "a") as told:
        told.warn("a line")
        raise egg_net.NetError("in the end")
    assert [(e["event"], e.get("text")) for e in events(tmp_path / "a")] == [
        ("start", None), ("warning", "a line"), ("error", "in the end")]
    assert lines.text == "a line\n"                                      # the error is for egg.py to say, once
    with Server(tmp_path / "b", save=True) as server:
        stranger = server.connect()
        stranger.sendall(b"GET / HTTP/1.1\r\n\r\n")
        assert stranger.recv(1) == b""
        [server._blame(Author("liar", "liar"), "it lied", again=True) for _ in range(3)]
    told = events(tmp_path / "b")
    assert "wrong magic" in of_kind("refused", told)[0]["reason"]
    assert of_kind("banned", told)[0].items() >= {"worker": "liar", "reason": "it lied"}.items()


def test_a_log_goes_on_behind_a_torn_line_and_the_last_word_counts(tmp_path):
    path = tmp_path / "log"

    def step(k, loss):
        return json.dumps({"event": "step", "step": k, "tokens": 10 * k, "loss": loss, "elapsed": 2.0 * (k + 1)})

    path.write_text("\n".join([step(0, 5.0), step(1, 4.0), step(2, 3.0), '{"event": "step", "step": 3, "tok']))
    with contextlib.closing(event_log.JsonLog(path, "", print)) as log:
        log.emit(json.loads(step(2, 3.5)), None)
        log.emit({"event": "validation", "step": 3, "tokens": 30, "value": 7.0, "unit": "bits/byte"}, None)
    with open(path, "ab") as file:
        file.write(b'\xff\xfe\n[1]\n{"event": "step"}\n' + b"[" * 100000 + b"\n"
                   b'{"event": "references", "values": {"uniform": 8}}\n7\n')
    curve = read_curve(path)
    assert curve.loss == [(0, 0, 2, 5), (1, 10, 4, 4), (2, 20, 6, 3.5)]
    assert (curve.validation, curve.units["validation"]) == ([(3, 30, 6, 7)], "bits/byte")
    assert curve.references == {"uniform": 8}


def test_losses_of_logs_from_before_they_had_a_unit(tmp_path):
    """They are in the unit of d-eggs, which depends on the run; a run that went on with this version has both."""
    step = {"event": "step", "step": 0, "tokens": 0, "loss": 2.0, "elapsed": 1}
    write(tmp_path / "log", {"event": "start", "step": 0, "config": {"SOFTMAX_EXP_SCALE": 6.0, "VOCAB_SIZE": 8192}},
          step, {**step, "step": 1, "loss": 7.0, "unit": "bits/token"})
    curve = read_curve(tmp_path / "log")
    assert [point.value for point in curve.loss] == approx([2 * 16 / 6 / np.log(2), 7.0])
    assert curve.units["loss"] == "bits/token"


def test_a_resumed_run_has_one_curve(tmp_path):
    for steps in (3, 6):
        with Server(tmp_path, steps=steps, save=True, http=EVERYBODY, stay=True) as server:
            thread = server.work(FakeEngine(pause=0.01))
            page_shows(server, steps - 1)
            tokens = server.cfg.STEP_TOKENS
            assert [point[1] for point in state_of(server)["curves"]["loss"]] == [tokens * k for k in range(steps)]
        thread.join(60)
    curve = read_curve(tmp_path)
    assert [point.step for point in curve.loss] == list(range(6))
    seconds = [point.seconds for point in curve.loss]
    assert seconds == sorted(seconds) and len(of_kind("start", events(tmp_path))) == 2
    history.open_run(CFG, tmp_path / "elsewhere", tmp_path).close()                # and takes it along
    assert {**vars(read_curve(tmp_path / "elsewhere")), "name": curve.name} == vars(curve)


def test_what_takes_no_more_is_said_once_and_holds_nothing_up(tmp_path):
    """A pipe that nobody reads, a full disk."""
    os.mkfifo(tmp_path / "pipe")
    reader = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    for path, reason in (tmp_path / "pipe", "Resource temporarily unavailable"), ("/dev/full", "No space left"):
        said = []
        with contextlib.closing(event_log.JsonLog(path, "", said.append)) as log:
            for _ in range(100):
                log.emit({"text": "x" * 4000}, None)
        assert len(said) == 1 and reason in said[0]
    os.close(reader)


@mark.parametrize("path, reason", [("/nonexistent/log", "No such file"), (".", "Is a directory")])
def test_a_log_that_cannot_be_written_is_one_line_at_the_start(here, path, reason):
    fails(run("coordinator --port 0 --steps 1 --log-json", path), 1, f"egg: {path}: ", reason,
          ": give --log-json a file that can be written\n")


# --- followers --------------------------------------------------------------------------------------------------------

def records(directory):
    """{tag: (step, number or text)} of all that TensorBoard would show."""
    from tensorboardX.proto.event_pb2 import Event
    shown = {}
    for path in directory.iterdir():
        data = path.read_bytes()
        while data:
            end = 12 + struct.unpack("<Q", data[:8])[0]
            record, data = Event.FromString(data[12:end]), data[end + 4:]
            for value in record.summary.value:
                text = value.tensor.string_val
                shown[value.tag] = record.step, text[0].decode() if text else value.simple_value
    return shown


def followed(place, *arguments):
    """The ended process of examples/follow.py, in `place`."""
    there = {**os.environ, "WANDB_MODE": "offline", "WANDB_SILENT": "true"}
    path = os.path.join(os.path.dirname(egg_net.__file__), "examples", "follow.py")
    return subprocess.run([sys.executable, path, *arguments], env=there, cwd=place, capture_output=True, text=True,
                          timeout=100)


@fixture
def a_log(tmp_path):
    """The log of a run that ended, in tmp_path."""
    with told_to(log_json=tmp_path / "log") as told:
        told.emit("validation", step=8, tokens=80, value=3.5, unit="bits/byte")
        told.emit("step", **A_STEP)                  # it may come after the validation of the next
        told.emit("reward", step=8, tokens=80, value=0.5, texts=4, numbers={"lowest": 0.25, "logged_mine": 2})
        told.emit("sample", worker="w", step=9, prompt="To be,", text="or\nnot")
        told.emit("stop", step=9)


def test_tensorboard_gets_figures_and_samples(tmp_path, a_log):
    log = (tmp_path / "log").read_text()
    (tmp_path / "log").write_text('{"event": "st\n' + log)                       # a torn line
    done = followed(tmp_path, "tensorboard", "log")
    assert done.returncode == 0, done.stderr
    assert records(tmp_path / "tensorboard") == {
        "loss/bits_per_byte": (7, 1.5), "updates": (7, 3.0), "tokens_per_second": (7, 10.0),
        "learning_rate": (7, 0.25), "validation/bits_per_byte": (8, 3.5),
        "reward": (8, 0.5), "reward_lowest": (8, 0.25), "reward_logged_mine": (8, 2.0),
        "sample/text_summary": (9, "    To be, >>> or\n    not")}


def test_a_follower_says_what_is_wrong(tmp_path):
    done = followed(tmp_path, "tensorboard", "none")
    assert (done.returncode, done.stderr) == (
        1, "none: No such file or directory: name the events.jsonl of a run\n")
    assert followed(tmp_path, "excel", "none").returncode == 2
    (tmp_path / "other").write_text('{"event": "validation"}\n')
    done = followed(tmp_path, "tensorboard", "other")
    assert (done.returncode, done.stderr) == (
        1, "other: not a log of events: name the events.jsonl of a run\n")


@mark.track
def test_wandb_and_mlflow_get_figures(tmp_path, a_log):
    """The libraries themselves, which write files here."""
    for name in "wandb", "mlflow":
        done = followed(tmp_path, name, "log")
        assert done.returncode == 0, done.stderr
    [log] = tmp_path.glob("wandb/offline-run*/*.wandb")
    assert [word for word in (b"loss/bits_per_byte", b"validation/bits_per_byte", b"reward_lowest", b"learning_rate")
            if word not in log.read_bytes()] == []
    with contextlib.closing(sqlite3.connect(tmp_path / "mlflow.db")) as mlflow:
        assert set(mlflow.execute("select key, value, step from metrics")) == {
            ("loss/bits_per_byte", 1.5, 7), ("updates", 3, 7), ("tokens_per_second", 10, 7), ("learning_rate", 0.25, 7),
            ("validation/bits_per_byte", 3.5, 8), ("reward", 0.5, 8), ("reward_lowest", 0.25, 8),
            ("reward_logged_mine", 2, 8)}


def test_missing_libraries_are_named(here, monkeypatch):
    for name in ("matplotlib.figure", "safetensors.numpy", "ray"):
        monkeypatch.setitem(sys.modules, name, None)
    advice = "pip install -r requirements"
    example(here / "log")
    fails(run("plot log --out a.png"), 1, f"egg: --out needs matplotlib: {advice}/watch.txt; without")
    fails(run("import w --save-dir new"), 1,
          f"egg: export and import need safetensors: `{advice}/export.txt`\n")
    fails(run("ray --save-dir x"), 1, f"{advice}/ray.txt\n")
    assert not (here / "a.png").exists()
