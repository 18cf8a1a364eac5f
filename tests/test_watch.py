"""Events and where they go: JSON logs, TensorBoard, curves, plots, the live page and /metrics."""

import base64
import contextlib
import gzip
import io
import itertools
import json
import os
import re
import signal
import socket
import ssl
import struct
import subprocess
import sys
import time
from http import HTTPStatus

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st

import egg
import egg_config
from cluster import admission
from cluster import auth
from cluster import status as cluster_status
from cluster.hub import split_address
from model import data_files
from cluster import history
from tools.curves import Merge, Thinned, read_curve
from tools import live_page
import egg_net
from tools import plot
from tools import train
from cluster import event_log
from cluster import wire
from cluster.progress import Progress
from cluster.wire import LOG_MESSAGE, VALIDATION
from kit import (CFG, HERE, SECRET, FakeEngine, Lines, Peer, Server, changed, cluster, until, work_in_thread)

EVERYBODY = live_page.Where("127.0.0.1", 0, "", None)
PASSWORD = auth.page_password(SECRET).encode()
MASTER = live_page.Where("127.0.0.1", 0, PASSWORD.decode(), None)


def events(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def of_kind(kind, told):
    return [event for event in told if event["event"] == kind]


# --- events and logs --------------------------------------------------------------------------------------------------

FIELDS = {"start": {"step", "directory", "config"}, "joined": {"worker", "address", "device", "step"},
          "validation": {"step", "tokens", "value", "unit"}, "sample": {"worker", "step", "prompt", "text"},
          "step": {"step", "tokens", "loss", "unit", "updates", "reports", "learning_rate", "seconds", "elapsed",
                   "tokens_per_second", "sent", "received"},
          "snapshot": {"step", "bytes", "overlay"}, "left": {"worker", "address", "device", "step"}}


def test_a_run_keeps_its_events(tmp_path):
    cfg = changed(SNAPSHOT_EVERY=2)
    tokens = np.frombuffer(b"ab\nd" * 20, np.uint8)
    validation = data_files.Validation(np.zeros((3, 9), np.int32), 12, "bits/byte")
    engine = FakeEngine(cfg)
    with Server(tmp_path, cfg, steps=5, save=True) as server:
        other = Peer(server.port, cfg)
        other.chunk(0)
        other.link.close()
        # of two workers both would have to state a validation
        until(lambda: of_kind("left", events(tmp_path / history.EVENTS)))
        thread = work_in_thread(server.port, engine, cfg, tokens=tokens, validation=validation,
                                decoding=data_files.load_decoding(cfg))
    thread.join(10)
    told = events(tmp_path / history.EVENTS)
    assert {event["event"] for event in told} == set(FIELDS)
    for event in told:
        assert set(event) - {"time", "event"} == FIELDS[event["event"]] and abs(event["time"] - time.time()) < 60, event
    steps = of_kind("step", told)
    a_step = cfg.POPULATION_SIZE * cfg.SEQ_LEN
    assert [(e["step"], e["tokens"]) for e in steps] == [(k, k * a_step) for k in range(5)]
    run = history.open_run(cfg, tmp_path)
    bits, unit = egg_config.loss_unit(cfg.constants())
    assert [(e["loss"], e["unit"], e["updates"]) for e in steps] == [
        (pytest.approx(run.record(k)[0] / a_step / 16 * bits, abs=1e-6), unit, run.record(k)[1]) for k in range(5)]
    log = [line.split(",") for line in (tmp_path / "coordinator.log").read_text().splitlines() if line[0].isdigit()]
    assert [row[2] for row in log] == [f"{run.record(k)[0] / a_step / 16:.6f}" for k in range(5)]       # of d-eggs
    run.close()
    assert [(e["step"], e["value"], e["unit"]) for e in of_kind("validation", told)] == \
        [(k, pytest.approx((k + 1) / np.log(2) / 12, abs=1e-6), "bits/byte") for k in (0, 2, 4)]
    assert of_kind("sample", told)[0]["prompt"] == "ab\nd"
    assert [e["text"] for e in of_kind("sample", told)] == ["AAA", "CCC", "EEE"]
    assert [(s["step"], s["text"]) for s in read_curve(tmp_path).samples] == [(0, "AAA"), (2, "CCC"), (4, "EEE")]
    assert {e["worker"] for e in of_kind("joined", told)} == {"a version 1 peer", of_kind("sample", told)[0]["worker"]}
    overlay = engine.state().overlay
    assert of_kind("snapshot", told)[0]["overlay"] == {"mean": round(float(overlay.mean()), 4), "min": overlay.min(),
                                                       "max": overlay.max()}
    assert of_kind("start", told)[0]["config"]["CHUNK_SIZE"] == 32


def test_without_an_overlay_none_is_told(tmp_path):
    cfg = changed(SNAPSHOT_EVERY=2, ADAPTIVE_NOISE_MODE=0)
    server = cluster(tmp_path, [FakeEngine(cfg, 0.002)], 4, cfg, save=True)
    assert [e["overlay"] for e in of_kind("snapshot", events(tmp_path / history.EVENTS))] in ([None], [None, None])
    assert server


def test_an_error_and_what_happens_to_strangers_is_told(tmp_path):
    lines, run = Lines(), history.open_run(CFG, tmp_path / "a")
    with pytest.raises(egg_net.NetError), event_log.Events(CFG, run, tmp_path, egg_net.Console(lines)) as told:
        told.warn("a line")
        raise egg_net.NetError("in the end")
    run.close()
    told = events(tmp_path / "a" / history.EVENTS)
    assert [e["event"] for e in told] == ["start", "warning", "error"]
    assert [e["text"] for e in told[1:]] == ["a line", "in the end"]
    assert lines.text == "a line\n"                                      # the error is for egg.py to say, once
    with Server(tmp_path / "b", save=True) as server:
        stranger = socket.create_connection(("127.0.0.1", server.port))
        stranger.sendall(b"GET / HTTP/1.1\r\n\r\n")
        assert stranger.recv(1) == b""
        server.coordinator.ban(admission.Author("10.0.0.9", "key", "liar"), "it lied")
    told = events(tmp_path / "b" / history.EVENTS)
    assert "wrong magic" in of_kind("refused", told)[0]["reason"]
    assert of_kind("banned", told)[0] | {"time": 0} == {
        "time": 0, "event": "banned", "worker": "liar", "address": "10.0.0.9", "reason": "it lied"}


def test_a_log_goes_on_behind_a_torn_line_and_the_last_word_counts(tmp_path):
    path = tmp_path / "log"

    def step(k, loss, seconds=2.0):
        return json.dumps({"event": "step", "step": k, "tokens": 10 * k, "loss": loss, "seconds": seconds})

    path.write_text("\n".join([step(0, 5.0), step(1, 4.0), step(2, 3.0), '{"event": "step", "step": 3, "tok']))
    log = event_log.JsonLog(path, "", print)
    log.emit(json.loads(step(2, 3.5)), None)
    log.emit({"event": "validation", "step": 3, "tokens": 30, "value": 7.0, "unit": "bits/byte"}, None)
    log.close()
    with open(path, "ab") as file:
        file.write(b'\xff\xfe\n[1]\n{"event": "step"}\n'
                   b'{"event": "step", "step": 9, "tokens": NaN, "loss": 1, "seconds": 1}\n' + b"[" * 100000 + b"\n"
                   b'{"event": "references", "values": 3}\n{"event": "references", "values": {"uniform": 8}}\n7\n')
    curve = read_curve(path)
    assert curve.loss == [(0, 0, 2, 5), (1, 10, 4, 4), (2, 20, 6, 3.5)]
    assert (curve.validation, curve.unit, curve.references) == ([(3, 30, 6, 7)], "bits/byte", {"uniform": 8})


def test_losses_of_logs_from_before_they_had_a_unit(tmp_path):
    """They are in the unit of d-eggs, which depends on the run; a run that went on with this version has both."""
    bits = 16 / 6 / np.log(2)
    for vocabulary, unit in ((256, "bits/byte"), (8192, "bits/token")):
        path = tmp_path / str(vocabulary)
        old = [{"event": "start", "config": {"SOFTMAX_EXP_SCALE": 6.0, "VOCAB_SIZE": vocabulary, "RECOMBINE_ALPHA": 1}},
               {"event": "step", "step": 0, "tokens": 0, "loss": 2.0, "seconds": 1}]
        new = [{"event": "step", "step": 1, "tokens": 10, "loss": 7.0, "unit": unit, "seconds": 1}]
        for told in (old, old + new):
            path.write_text("".join(json.dumps(event) + "\n" for event in told))
            curve = read_curve(path)
            assert [point.value for point in curve.loss] == [pytest.approx(2 * bits), 7.0][:len(told) - 1]
            assert curve.loss_unit == unit
    text = plot.terminal(*charts([path]), Stream(), 80)
    assert "training loss, bits/token\n" in text


def test_a_label_stands_where_no_curve_is(tmp_path):
    """A curve that ends on a reference: its label is left of it, whole."""
    path = tmp_path / "log"
    with open(path, "w") as file:
        print(json.dumps({"event": "references", "values": {"unigram": 4.6, "bigram": 3.5}}), file=file)
        for k in range(100):
            value = 3.5 + 4 * 0.9 ** k
            for event in ("validation", "step"):
                print(json.dumps({"event": event, "step": k, "tokens": k, "value": value, "loss": 1, "seconds": 1,
                                  "unit": "bits/byte"}), file=file)
    for width in (60, 80, 160):
        text = plot.terminal(*charts([path]), Stream(), width)
        assert " unigram 4.60" in text and re.search("[ \u2502\u2524]bigram 3.50(?=[ \n])", text), text
        assert "bigram 3.50" not in plot.terminal(*charts([path]), Stream(), 20)


def test_a_resumed_run_has_one_curve(tmp_path):
    for steps in (3, 6):
        with Server(tmp_path, steps=steps, save=True, http=EVERYBODY, stay=True) as server:
            thread = work_in_thread(server.port, FakeEngine(pause=0.01))
            until(lambda: server.coordinator.page.figures.step.get("step") == steps - 1)
            state = json.loads(ask(server, "/state.json")[2])
            tokens = server.coordinator.progress.tokens_a_step
            assert [point[0] for point in state["curves"]["loss"]] == [tokens * step for step in range(steps)]
        thread.join(10)
    curve = read_curve(tmp_path)
    assert [point.step for point in curve.loss] == list(range(6))
    assert len(of_kind("start", events(tmp_path / history.EVENTS))) == 2
    seconds = [point.seconds for point in curve.loss]
    assert seconds == sorted(seconds) and curve.name == tmp_path.name
    history.open_run(CFG, tmp_path / "elsewhere", tmp_path).close()                # and takes it along
    assert {**vars(read_curve(tmp_path / "elsewhere")), "name": curve.name} == vars(curve)


def test_a_full_disk_is_said_once_and_training_goes_on(tmp_path):
    lines = Lines()
    run = history.open_run(CFG)
    with event_log.Events(CFG, run, tmp_path, egg_net.Console(lines), log_json="/dev/full") as told:
        for _ in range(3):
            told.warn("something")
    run.close()
    assert lines.text.count("/dev/full: No space left on device: events are missing in it from now on") == 1
    assert lines.text.count("something") == 3


def test_a_pipe_that_nobody_reads_holds_nothing_up(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    reader = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    said = []
    log = event_log.JsonLog(tmp_path / "pipe", "", said.append)
    for _ in range(100):
        log.emit({"text": "x" * 4000}, None)
    assert len(said) == 1 and "Resource temporarily unavailable" in said[0]
    log.close(), os.close(reader)


@pytest.mark.parametrize("path, reason", [("/nonexistent/log", "No such file"), (".", "Is a directory")])
def test_a_log_that_cannot_be_written_is_one_line_at_the_start(tmp_path, monkeypatch, capsys, path, reason):
    monkeypatch.chdir(tmp_path)
    assert egg.main(["coordinator", "--port", "0", "--log-json", path, "--steps", "1"]) == 1
    assert re.fullmatch(rf"egg: {re.escape(path)}: .*({reason}).*: give --log-json a file that can be written\n",
                        capsys.readouterr().err)


# --- TensorBoard ------------------------------------------------------------------------------------------------------

def records(directory):
    from tensorboardX.proto.event_pb2 import Event
    for name in sorted(os.listdir(directory)):
        data = (directory / name).read_bytes()
        while data:
            size = struct.unpack("<Q", data[:8])[0]
            yield Event.FromString(data[12:12 + size])
            data = data[16 + size:]


def test_tensorboard_gets_figures_and_samples(tmp_path):
    run = history.open_run(CFG)
    with event_log.Events(CFG, run, tmp_path, egg_net.Console(Lines()), tensorboard=tmp_path / "tb") as told:
        told.emit("step", step=7, tokens=70, loss=1.5, unit="bits/byte", updates=3, reports=1, learning_rate=0.25,
                  seconds=1.0, elapsed=8.0, tokens_per_second=10.0, sent=1, received=2)
        told.emit("validation", step=7, tokens=70, value=3.5, unit="bits/byte")
        told.emit("snapshot", step=8, bytes=1, overlay={"mean": 1.5, "min": -3, "max": 9})
        told.emit("snapshot", step=9, bytes=1, overlay=None)
        told.emit("sample", worker="w", step=9, prompt="To be,", text="or\nnot")
    run.close()
    got = {}
    for record in records(tmp_path / "tb"):
        for value in record.summary.value:
            got[value.tag] = (record.step,
                              value.tensor.string_val[0].decode() if value.HasField("tensor") else value.simple_value)
    assert got == {"loss/bits_per_byte": (7, 1.5), "updates": (7, 3.0), "tokens_per_second": (7, 10.0),
                   "learning_rate": (7, 0.25), "validation/bits_per_byte": (7, 3.5),
                   "overlay/mean": (8, 1.5), "overlay/min": (8, -3.0), "overlay/max": (8, 9.0),
                   "sample/text_summary": (9, "    To be, >>> or\n    not")}


def test_tensorboard_that_cannot_be_written_is_said_once(tmp_path, monkeypatch):
    lines, run = Lines(), history.open_run(CFG)
    (tmp_path / "file").write_text("")
    with pytest.raises(event_log.WatchError, match="File exists: give a directory"):
        event_log.Events(CFG, run, tmp_path, egg_net.Console(lines), tensorboard=tmp_path / "file")
    with event_log.Events(CFG, run, tmp_path, egg_net.Console(lines), tensorboard=tmp_path / "tb") as told:
        def full(_):
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(told.files[-1]._writer, "write_event", full)
        for step in range(3):
            told.emit("validation", step=step, tokens=0, value=1.0, unit="bits/byte")
    run.close()
    assert lines.text.count("No space left on device: nothing more is written there") == 1


def test_missing_libraries_are_named(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for name in ("tensorboardX", "matplotlib.figure", "torch", "safetensors.numpy"):
        monkeypatch.setitem(sys.modules, name, None)
    assert egg.main(["coordinator", "--port", "0", "--tensorboard", "tb"]) == 1
    advice = f"{egg.pip()} install tensorboardX"
    assert capsys.readouterr().err == f"egg: --tensorboard needs tensorboardX: {advice}\n"
    example(tmp_path / "log")
    assert egg.main(["plot", "log", "--out", "a.png"]) == 1
    assert f"egg: --out needs matplotlib: {egg.pip()} install matplotlib" in capsys.readouterr().err
    assert egg.main(["backprop", "--log-json", "b.jsonl"]) == 1
    assert capsys.readouterr().err == f"egg: PyTorch is missing: {egg.pip()} install torch\n"
    assert egg.main(["import", "w", "--save-dir", "new"]) == 1
    advice = f"{egg.pip()} install -r {egg.from_here(HERE / 'requirements' / 'export.txt')}"
    assert capsys.readouterr().err == f"egg: export and import need safetensors: `{advice}`\n"
    assert not (tmp_path / "a.png").exists() and not (tmp_path / "b.jsonl").exists()


# --- curves and plots -------------------------------------------------------------------------------------------------

def example(path, steps=300, loss=2.0, unit="bits/byte"):
    with open(path, "w") as file:
        for k in range(steps):
            if k % 50 == 0:
                print(json.dumps({"event": "validation", "step": k, "tokens": k * 10000, "value": 4 * loss * 0.99 ** k,
                                  "unit": unit}), file=file)
            print(json.dumps({"event": "step", "step": k, "tokens": k * 10000, "loss": loss * 0.99 ** k,
                              "seconds": 0.5}), file=file)


def test_a_thinned_curve_is_the_mean_of_the_whole():
    for n in (0, 1, 7, 8, 9, 1000, 1001):
        curve = Thinned(8)
        for k in range(n):
            curve.add(k, 2.0 * k)
        points = curve.all()
        assert len(points) <= 9 and all(y == 2 * x for x, y in points)
        assert [x for x, _ in points] == sorted(x for x, _ in points)
        sizes = [curve.every] * len(curve.points) + [n - curve.every * len(curve.points)]
        assert sum(s * x for s, (x, _) in zip(sizes, points)) == pytest.approx(n * (n - 1) / 2, rel=1e-4)


class Stream(io.StringIO):
    encoding = "utf-8"

    def __init__(self, encoding="utf-8", terminal=False):
        super().__init__()
        self.coding, self.isatty = encoding, lambda: terminal

    encoding = property(lambda self: self.coding)


def charts(paths, x="tokens", log=False):
    curves = [read_curve(p) for p in paths]
    made = [plot.Chart("validation", curves, x, log), plot.Chart("loss", curves, x, log)]
    return made, [c.name for c in curves], plot.Tree(curves, made[0])


def test_a_terminal_plot_of_any_width(tmp_path):
    example(tmp_path / "one"), example(tmp_path / "two", steps=150, loss=1.5)
    for x, log in itertools.product(("tokens", "time", "steps"), (False, True)):
        for encoding in ("utf-8", "ascii", "latin-1"):
            for width in (1, 13, 20, 40, 79, 80, 200):
                text = plot.terminal(*charts([tmp_path / "one", tmp_path / "two"], x, log), Stream(encoding), width)
                body = text.split("\n\n")[:2]
                assert all(len(line) <= max(width, plot.LABEL + 4) for part in body
                           for line in part.splitlines()[1:-1]), (x, width)
                text.encode(encoding)
    text = plot.terminal(*charts([tmp_path / "one"]), Stream(), 60)
    assert "validation, bits/byte\n" in text and "million tokens\n" in text and re.search("[\u2801-\u28ff]", text)
    assert "\x1b" not in text
    assert text.endswith("* one: validation 0.6485, training loss 0.09907")
    both = plot.terminal(*charts([tmp_path / "one", tmp_path / "two"]), Stream(terminal=True), 60)
    assert "\x1b[33m" in both and "\x1b[36m" in both


def test_a_terminal_plot_puts_figures_where_its_axes_say(tmp_path):
    path = tmp_path / "line"
    with open(path, "w") as file:          # a straight line from (0, 10) to (100 steps, 0)
        for k in range(101):
            print(json.dumps({"event": "step", "step": k, "tokens": k, "loss": 10 - k / 10, "seconds": 1}), file=file)
    made, names, tree = charts([path], "steps")
    rows = plot.terminal(made[1:], names, tree, Stream("ascii"), 59).splitlines()[1:1 + plot.ROWS]
    assert [row.rindex("a") - 9 if k else row.index("a") - 9 for k, row in enumerate(rows)][::plot.ROWS - 1] == [0, 49]
    for row in rows:
        label, _, drawn = row.partition("+" if "+" in row else "|")
        if label.strip():
            columns = [i for i, c in enumerate(drawn) if c == "a"]
            assert abs(10 - sum(columns) / len(columns) / 49 * 10 - float(label)) < 0.5, row


def test_a_logarithmic_axis_has_equal_room_for_equal_ratios(tmp_path):
    path = tmp_path / "line"
    with open(path, "w") as file:          # a straight line from (1 s, 3) to (1,000 s, 0); what is at 0 s has no place
        for k, seconds in enumerate((0, 1, 10, 100, 1000)):
            print(json.dumps({"event": "validation", "step": k, "tokens": k, "seconds": seconds, "unit": "bits/byte",
                              "value": 4 - k}), file=file)
    (chart, _), names, tree = charts([path], "time", True)
    assert [(x, round(y)) for _, line in chart.lines for x, y in line] == [(1, 3), (10, 2), (100, 1), (1000, 0)]
    assert [chart.across(x) for x in (1, 10, 100, 1000)] == pytest.approx([0, 1 / 3, 2 / 3, 1])
    assert [text for _, text in chart.x_ticks(4)] == ["1", "10", "100", "1000"]
    assert [text for _, text in chart.x_ticks(9)] == ["1", "2", "5", "10", "20", "50", "100", "200", "500", "1000"]
    text = plot.terminal([chart], names, tree, Stream("ascii"), 70)
    below = text.splitlines()[plot.ROWS + 2].split()
    assert below == ["1", "10", "100", "1000"] and "time of training, s\n" in text
    assert egg.main(["plot", str(path), "--x", "time", "--log", "--out", str(tmp_path / "a.svg")]) == 0
    assert "<svg" in (tmp_path / "a.svg").read_text()


def test_runs_of_the_same_name_and_runs_with_one_point(tmp_path, capsys):
    for name in ("a", "b"):
        (tmp_path / name / "ckpt").mkdir(parents=True)
        example(tmp_path / name / "ckpt" / history.EVENTS, steps=1, unit="bits/token" if name == "a" else "bits/byte")
    runs = [str(tmp_path / name / "ckpt") for name in ("a", "b")]
    assert egg.main(["plot", *runs]) == 0
    out = capsys.readouterr().out
    assert f"a {runs[0]}: " in out and f"b {runs[1]}: " in out and "validation, bits/byte or bits/token\n" in out


def test_a_picture(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    example("one"), example("two", steps=100)
    assert egg.main(["plot", "one", "two", "--x", "time", "--out", "a.png"]) == 0
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG\r\n")
    assert egg.main(["plot", "one", "--out", "a.svg"]) == 0 and "<svg" in (tmp_path / "a.svg").read_text()
    for out, line in (("no/a.png", "No such file or directory"), ("a.what", "Format 'what' is not supported")):
        assert egg.main(["plot", "one", "--out", out]) == 1
        err = capsys.readouterr().err
        assert line in err and err.count("\n") == 1


def test_runs_without_data_are_named(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").write_text("")
    (tmp_path / "dir").mkdir()
    (tmp_path / "binary").write_bytes(os.urandom(1 << 20))
    for run, line in (("empty", "empty holds no step of a run"), ("dir", "dir: contains no run of egg"),
                      ("none", "none: No such file"),
                      ("binary", "binary holds no step of a run"),
                      (str(HERE / "tests" / "golden"), "contains no run of egg")):
        assert egg.main(["plot", run]) == 1
        err = capsys.readouterr().err
        assert line in err and err.count("\n") == 1 and "name a --save-dir, or a file of --log-json" in err


def test_training_shows_and_keeps_its_course(small, tmp_path, compiled, capsys):
    lines = Lines()
    train.train(small, steps=4, save_dir="run", threads=1, console=egg_net.Console(lines), http=EVERYBODY,
                log_json="log")
    assert re.search(r"^live page: http://127.0.0.1:\d+/$", lines.text, re.M)
    told = events(tmp_path / "log")
    assert [e["event"] for e in told] == [e["event"] for e in events(tmp_path / "run" / history.EVENTS)]
    assert [e["event"] for e in told[-3:]] == ["validation", "sample", "stop"] and told[-1]["step"] == 4
    assert set(of_kind("references", told)[0]["values"]) == {"uniform", "unigram", "bigram"}
    curve = read_curve("run")
    assert len(curve.loss) == 4 and [point.step for point in curve.validation] == [0, 2, 4]
    assert egg.main(["plot", "run", "log", "--x", "steps"]) == 0
    assert "training loss" in capsys.readouterr().out


# --- islands ----------------------------------------------------------------------------------------------------------

def an_island(path, name, steps, merges=(), pushes=(), alpha=0.5):
    """A log as an island writes it. merges: {step: (peer, its step, kind, ours, theirs, digest of theirs, digest of the
    result)}."""
    def line(event, **fields):
        print(json.dumps({"event": event, **fields}), file=file)

    with open(path, "w") as file:
        line("start", time=0, step=0, directory=None, config={"RECOMBINE_ALPHA": alpha})
        line("island", time=0, name=name, peers=[])
        for k in range(steps):
            for peer, peer_step, kind, ours, theirs, parent, digest in [merges[k]] if k in merges else ():
                line("merge", time=k + 0.5, step=k, peer=peer, peer_step=peer_step, kind=kind, ours=ours, theirs=theirs,
                     digest=digest,
                     parent_ours="", parent_theirs=parent, seconds=0.1, epoch=1)
            if k in pushes:
                line("rejuvenated", time=k + 0.5, step=k, epoch=1, digest="")
            if k % 10 == 0:
                line("validation", time=k, step=k, tokens=100 * k, value=8 - k / 50, unit="bits/byte")
            line("step", time=k + 1, step=k, tokens=100 * k, loss=2 - k / 200, seconds=0.5)


def archipelago(directory, hostile="$\\frac{\x1b[31m\n" + "x" * 300):
    """[path] of three islands' logs: b takes all of a, c a part of b, which is a's by then, and all of one whose log is
    not here."""
    an_island(directory / "a", "a", 100, pushes=(70,))
    an_island(directory / "b", "b", 90, {30: ("a", 20, "clone", 7.5, 7.0, "a20", "b30")})
    an_island(directory / "c", "c", 100, {50: ("b", 40, "recombine", 8.0, 6.0, "b40", "c50"),
                                          60: (hostile, 10, "recombine", 4.0, 4.0, "h10", "c60")}, alpha=0.75)
    return [directory / name for name in "abc"]


def test_a_curve_knows_what_an_island_took_in(tmp_path):
    paths = archipelago(tmp_path)
    a, b, c = map(read_curve, paths)
    assert (a.island, a.merges, a.rejuvenations, a.steps) == ("a", [], [(70,)], 100)
    assert b.merges == [Merge(30, 30.5, "a", 20, 1.0, "a20", "b30")] and b.at(30)[:3] == (30, 3000, 15.0)
    assert b.at(0)[:3] == (0, 0, 0)
    # our own wins a tie
    assert [m.share for m in c.merges] == [pytest.approx(1 - 0.25 * 6 / 8, abs=1e-4), pytest.approx(0.25, abs=1e-4)]
    with open(paths[2], "a") as file:
        for what in ({"event": "merge"}, {"event": "merge", "step": 1, "time": 1, "peer": "x", "peer_step": "NaN",
                                          "kind": "clone"}, {"event": "island"},
                     {"event": "merge", "step": 99, "time": 1, "peer": "x", "peer_step": 1, "kind": "recombine",
                      "ours": None, "theirs": 1},
                     {"event": "start", "config": 3}, {"event": "rejuvenated", "step": []}):
            print(json.dumps(what), file=file)
        assert read_curve(paths[2]).merges == c.merges
        # went on from before the second
        print(json.dumps({"event": "step", "step": 50, "tokens": 0, "loss": 1, "seconds": 1}), file=file)
    assert read_curve(paths[2]).merges == c.merges[:1] and read_curve(tmp_path / "a").merges == []


def test_the_family_of_islands(tmp_path):
    paths = archipelago(tmp_path, "far")
    tree = charts(paths)[2]
    assert list(tree.numbers.items()) == [("a", 0), ("b", 1), ("c", 2), ("far", 3)]
    assert list(tree.runs) == ["a", "b", "c"]
    assert tree.descent("a") == tree.descent("b") == [("a", 1.0)]
    part = 1 - 0.25 * 6 / 8
    assert dict(tree.descent("c")) == {"a": pytest.approx(part * 0.75, abs=1e-4),
                                       "c": pytest.approx((1 - part) * 0.75, abs=1e-4),
                                       "far": pytest.approx(0.25, abs=1e-4)}
    assert [(gift.giver, gift.taker) for gift in tree.gifts] == [("a", "b"), ("b", "c"), ("far", "c")]
    # thousand tokens
    assert [pytest.approx((gift.given_at, gift.taken_at), abs=1e-9) for gift in tree.gifts] == [(2, 3), (4, 5), (6, 6)]
    assert tree.lanes["b"][0] == (0, 3, {"b": 1.0}) and tree.lanes["b"][1].shares == {"a": 1.0}
    assert tree.rejuvenations == [("a", 7)]
    assert tree.living() == "lines that live on 3 islands: a on 3, c on 1, far on 1; gone: b"
    # at step 30 of b there are two states: the digest says which one was given
    for digest, descent in (("b30", {"a": 1.0}), ("the one before", {"b": 1.0})):
        an_island(tmp_path / "d", "d", 100, {80: ("b", 30, "clone", 9.0, 8.0, digest, "d80")})
        assert dict(charts([*paths, tmp_path / "d"])[2].descent("d")) == descent
    # what was taken can be given up again: back to a state of its own from before
    an_island(tmp_path / "d", "d", 100,
              {50: ("b", 20, "clone", 9.0, 8.0, "b20", "d50"), 60: ("d", 40, "undo", 9.5, None, None, "d60")})
    tree = charts([*paths, tmp_path / "d"])[2]
    assert dict(tree.descent("d")) == {"d": 1.0}
    assert [piece.shares for piece in tree.lanes["d"]] == [{"d": 1.0}, {"b": 1.0}, {"d": 1.0}]
    # of two logs of one island the longer counts, and a run that is no island has no lane
    example(tmp_path / "alone"), an_island(tmp_path / "again", "b", 20)
    tree = charts([tmp_path / "alone", tmp_path / "again", *paths])[2]
    assert tree.numbers == {"a": 2, "b": 3, "c": 4, "far": 5} and tree.descent("b") == [("a", 1.0)]
    assert not charts([tmp_path / "alone"])[2].lanes


def test_islands_in_the_terminal(tmp_path):
    paths = archipelago(tmp_path)
    for terminal in (False, True):
        for encoding in ("utf-8", "ascii"):
            for width in (1, 20, 60, 200):
                text = plot.terminal(*charts(paths), Stream(encoding, terminal), width)
                assert "\x1b[31mx" not in text and "x" * 33 not in text
                lanes = re.sub("\x1b\\[[0-9]+m", "",
                               text).split("in capitals where it was taken in\n")[1].splitlines()[:4]
                assert all(len(line) <= max(width, plot.LABEL + 4) for line in lanes)
    text = plot.terminal(*charts(paths), Stream(), 109)
    lanes = [line.partition("\u2502")[::2] for line in text.split("was taken in\n")[1].splitlines()[:4]]
    assert [name.strip() for name, _ in lanes] == ["a", "b", "c", "$\\frac{"]
    # a hundred columns are a hundred steps
    assert lanes[0][1] == "a" * 70 + "!" + "a" * 29 and lanes[1][1] == "b" * 30 + "A" + "a" * 60
    assert lanes[2][1] == "c" * 50 + "B" + "a" * 9 + "D" + "a" * 39 and lanes[3][1] == "d" * 61
    assert "c c: validation 6.2, training loss 1.505; island c, of 61% a, 25% $\\frac{" in text
    assert "; gone: b" in text


def test_islands_in_a_picture(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    archipelago(tmp_path)
    assert egg.main(["plot", "a", "b", "c", "--x", "time", "--out", "islands.svg"]) == 0
    drawn = (tmp_path / "islands.svg").read_text()
    assert "$\\frac{" in drawn and "lines that live on 3 islands" in drawn           # as it is, no formula
    assert egg.main(["plot", "a", "--out", "one.png"]) == 0
    assert egg.main(["plot", "c", "a", "--x", "steps", "--out", "two.png"]) == 0


# islands.gossip lets none such in; what is shown does not rely on it
BAD_NAME = "<img src=x onerror=alert(1)>\x1b[2J\n"
ISLAND = {"name": "north", "epoch": 3, "fitness": 3.8125, "kind": "validation", "founder": "south", "peers": [
    {"name": "south", "address": "10.0.0.2:12345", "state": "up", "fitness": 3.75, "kind": "validation", "step": 300,
     "epoch": 1, "founder": "south",
     "last_seen": 0.4, "given": 2, "taken": 1},
    {"name": BAD_NAME, "address": "10.0.0.3:12345", "state": "distrusted", "fitness": 1.5, "kind": "loss", "step": 0,
     "epoch": 0, "founder": BAD_NAME,
     "last_seen": 12.5, "given": 0, "taken": 3},
    {"name": "west", "address": "10.0.0.4:12345", "state": "down", "fitness": None, "kind": None, "step": None,
     "epoch": None, "founder": None,
     "last_seen": 7.0, "given": 0, "taken": 0}],
    "lineage": [{"epoch": 0, "step": 0, "from": "north", "peer_step": None, "digest": None},
                {"epoch": 1, "step": 90, "from": "south", "peer_step": 80, "digest": "aa"},
                {"epoch": 2, "step": 120, "from": BAD_NAME, "peer_step": 70, "digest": "bb"},
                {"epoch": 3, "step": 130, "from": "north", "peer_step": None, "digest": "cc"}]}


def merged(step, peer="south", **fields):
    return {"step": step, "peer": peer, "peer_step": 80, "kind": "recombine", "ours": 4.0, "theirs": 3.0,
            "digest": "aa", "parent_ours": "",
            "parent_theirs": "", "seconds": 0.1, "epoch": 1} | fields


def test_the_page_shows_an_island(tmp_path, monkeypatch):
    status = egg_net.Coordinator.status
    for told in (None, ISLAND):
        monkeypatch.setattr(egg_net.Coordinator, "status", lambda self: {**status(self), "island": told})
        with Server(tmp_path / str(told is None), steps=3, stay=True, save=True, http=EVERYBODY) as server:
            html = ask(server)[2].decode()
            assert not re.search("innerHTML|outerHTML|insertAdjacent|document.write|eval", html)
            work_in_thread(server.port, FakeEngine())
            until(lambda: server.coordinator.page.figures.step.get("step") == 2)        # workers are answered before
            events = server.coordinator.events
            if told:
                events.emit("merge", "another line", **merged(3))
                events.emit("merge", "back",
                            **merged(3, "north", peer_step=1, kind="undo", theirs=None, parent_theirs=None))
                events.emit("peer", f"peer {BAD_NAME}", peer=BAD_NAME, address="10.0.0.3:1", state="up")
                events.emit("gossip", None, peer="south", ours=1.0, theirs=2.0, kind="loss", outcome="offer")
                events.emit("rejuvenated", "a line", step=3, epoch=2, digest="")
            state = json.loads(ask(server, "/state.json")[2])
            values = parse_metrics(ask(server, "/metrics")[2].decode())
            if not told:
                assert state["island"] is None and state["merges"] == []
                assert not [name for name in values if name.startswith("egg_island")]
                continue
            assert state["island"] == {**{k: v for k, v in ISLAND.items() if k != "lineage"}, "n_peers": 3}
            assert state["merges"] == [{"step": 3, "tokens": 3 * server.coordinator.progress.tokens_a_step,
                                        "seconds": pytest.approx(state["seconds"], abs=1e-3),
                                        "peer": peer, "peer_step": peer_step, "part": part} for peer, peer_step,
                                        part in (("south", 80, 0.625), ("north", 1, 1))]
            lines = [line["text"] for line in state["lines"][:4]]
            assert lines == ["a line", f"peer {BAD_NAME}", "back", "another line"]
            assert values["egg_island_epoch"] == 3 and values['egg_island_fitness{kind="validation"}'] == 3.8125
            assert (values["egg_island_peers"], values["egg_island_peers_up"],
                    values['egg_events_total{event="merge"}']) == (3, 1, 2)
            assert values['egg_island_peer_fitness{name="south",kind="validation"}'] == 3.75
            assert [v for k, v in values.items() if k.startswith("egg_island_taken_total")] == [1, 3, 0]
            assert not [k for k in values if k.startswith(("egg_island_peer_step", "egg_island_peer_fitness"))
                        and "west" in k]
    with Server(tmp_path / "False", steps=3, stay=True, save=True, http=EVERYBODY) as server:          # a restart
        again = json.loads(ask(server, "/state.json")[2])["merges"]
        assert [m | {"seconds": pytest.approx(m["seconds"], abs=1e-3)} for m in again] == state["merges"]


def test_status_tells_of_an_island(tmp_path):
    with Server(tmp_path) as server:
        told = server.status()
    # a coordinator of before there were any
    plain = cluster_status.describe_status({k: v for k, v in told.items() if k != "island"})
    assert plain == cluster_status.describe_status({**told, "island": None}) and "island" not in plain
    text = cluster_status.describe_status({**told, "island": ISLAND})
    assert text.startswith(plain) and "\x1b" not in text
    assert text[len(plain):].splitlines()[1:] == [
        "", "island north, epoch 3, descends from south, 1 of 3 peers up, fitness 3.8125 (validation)",
        "  epoch 1 from step 90: the state of south at its step 80",
        "  epoch 2 from step 120: the state of <img src=x onerror=alert(1)>[2J at its step 70",
        "  epoch 3 from step 130: rejuvenated", "",
        "peer                             address         state       descends from                    compares    "
        "fitness  step  epoch  given  taken  last seen",
        "south                            10.0.0.2:12345  up          south                            validation  "
        " 3.7500   300      1      2      1      0.4 s",
        "<img src=x onerror=alert(1)>[2J  10.0.0.3:12345  distrusted  <img src=x onerror=alert(1)>[2J  loss        "
        " 1.5000     0      0      0      3     12.5 s",
        "west                             10.0.0.4:12345  down                                                     "
        "                          0      0      7.0 s"]
    alone = {**ISLAND, "peers": [], "lineage": [], "fitness": None}
    text = cluster_status.describe_status({**told, "island": alone})
    assert text.endswith("\nisland north, epoch 3, descends from south, 0 of 0 peers up")


def test_a_status_of_more_than_a_frame_holds(tmp_path, monkeypatch):
    """Thousands of workers, bans and islands with the longest names: the first of them are told, and how many more."""
    name = "\U0001f95a" * 64
    worker = dict(name=name, device=name, address="10.0.0.1:1", protocol=2, step=0, chunks=0, chunk_seconds=None,
                  last_seen=0.5, state="working")
    status = egg_net.Coordinator.status
    for island in (None, {**ISLAND, "peers": ISLAND["peers"] * 3000}):
        banned = {f"{name} {k}": name for k in range(100)}
        more = dict(workers=[worker] * 4000, connected=4000, island=island, banned=banned)
        monkeypatch.setattr(egg_net.Coordinator, "status", lambda self: {**status(self), **more})
        with Server(tmp_path) as server:
            told = cluster_status.fetch_status(CFG, "127.0.0.1", server.port)
        shown = len(told["workers"])
        assert 500 < shown < 4000 and told["connected"] == 4000 and len(told["banned"]) == 100
        assert len(json.dumps(told).encode()) <= wire.STATUS.most
        text = cluster_status.describe_status(told)
        assert text.count("working") == shown and f"\nand {4000 - shown} more" in text


@pytest.mark.parametrize("lie", [-(1 << 59), 1 << 59, 0, -1])
def test_a_lie_does_not_move_the_loss(lie, tmp_path):
    """Of four chunks one states what cannot be: the mean of the others is hardly changed."""
    run = history.open_run(CFG)
    with event_log.Events(CFG, run, tmp_path, egg_net.Console(Lines())) as told:
        honest, liar = Progress(CFG, run, told), Progress(CFG, run, told)
        for progress, last in ((honest, 40_000), (liar, lie)):
            progress.begin_step()
            progress.chunk_handed_out()
            progress.complete_step(0, [40_000, 41_000, 42_000, last])
    run.close()
    assert liar.loss == pytest.approx(honest.loss, rel=0.3)


# --- the live page ----------------------------------------------------------------------------------------------------

def page_port(server):
    return server.coordinator.page.address[1]


def connect(server, timeout=5):
    return socket.create_connection(("127.0.0.1", page_port(server)), timeout=timeout)


def receive(sock):
    """(status, fields, body) of a response, as a browser understands it; (0, {}, b"") where the connection ends
    before."""
    data = b""
    while b"\r\n\r\n" not in data:
        more = sock.recv(1 << 16)
        if not more:
            return 0, {}, b""
        data += more
    head, _, body = data.partition(b"\r\n\r\n")
    lines = head.decode().split("\r\n")
    fields = dict(line.lower().split(": ", 1) for line in lines[1:])
    while len(body) < int(fields["content-length"]):
        body += sock.recv(1 << 16)
    return int(lines[0].split()[1]), fields, body


def ask(server, path="/", method="GET", host="localhost", **fields):
    with connect(server) as sock:
        sock.sendall(request(path, method, host, **fields))
        if method == "HEAD":
            data = b""
            while more := sock.recv(1 << 16):
                data += more
            head, _, body = data.partition(b"\r\n\r\n")
            return int(head.split()[1]), {}, body
        return receive(sock)


def request(path="/", method="GET", host="localhost", close=True, **fields):
    lines = [f"{method} {path} HTTP/1.1", f"Host: {host}", *(f"{k.replace('_', '-')}: {v}" for k, v in fields.items())]
    return "\r\n".join(lines + ["Connection: close"] * close).encode() + b"\r\n\r\n"


def basic(password, name=b"me"):
    return "Basic " + base64.b64encode(name + b":" + password).decode()


def test_the_page_its_state_and_metrics(tmp_path):
    cfg = changed(SNAPSHOT_EVERY=2)
    with Server(tmp_path, cfg, steps=3, stay=True, save=True, http=EVERYBODY) as server:
        status, fields, html = ask(server)
        assert status == 200 and fields["content-type"] == "text/html; charset=utf-8" and b"<script>" in html
        assert "default-src 'none'" in fields["content-security-policy"]
        assert not re.search(rb'(src|href)="(?!state.json|metrics|data:)', html)
        peer = Peer(server.port, cfg)
        peer.link.send(wire.frame(LOG_MESSAGE, "sample at step 0: a<script>\u23ceb >>> <img src=x>".encode()))
        for position in (0, 32, 64, 96):
            assert peer.chunk(0) == position
            if position == 0:
                peer.link.send(wire.frame(VALIDATION, 0, 100, 300, 300 * np.log(2)))
            peer.result(0, position, loss=4096, updates=5)
        until(lambda: server.coordinator.page.figures.step.get("step") == 0)         # after its report
        status, fields, body = ask(server, "/state.json?x=1")
        state = json.loads(body)
        assert (status, fields["content-type"]) == (200, "application/json") and len(state["workers"]) == 1
        assert (state["step"], state["steps"], state["chunks"], state["chunks_done"]) == (1, 3, 4, 0)
        bits = egg_config.loss_unit(cfg.constants())[0]
        assert (state["loss"], state["loss_unit"]) == (pytest.approx(bits, abs=1e-6), "bits/byte")
        assert state["curves"]["loss"] == [[0, pytest.approx(state["seconds"], abs=1e-3), pytest.approx(bits, 1e-4)]]
        assert state["finished"] is False
        assert state["name"] == tmp_path.name
        assert state["curves"]["validation"][0][2] == 1.0
        assert state["best"] == {"step": 0, "value": 1.0, "unit": "bits/byte"}
        assert state["samples"] == [{"step": 0, "worker": "a version 1 peer", "prompt": "a<script>\nb",
                                     "text": "<img src=x>"}]
        assert [line["kind"] for line in state["lines"]] == ["joined"]
        packed = ask(server, "/state.json", accept_encoding="gzip, br")
        assert packed[1]["content-encoding"] == "gzip" and json.loads(gzip.decompress(packed[2]))["step"] == 1
        assert "content-encoding" not in ask(server, "/state.json", accept_encoding="gzip;q=0, br")[1]

        status, fields, body = ask(server, "/metrics")
        assert status == 200 and fields["content-type"].startswith("text/plain; version=0.0.4")
        values = parse_metrics(body.decode())
        assert values["egg_steps_total"] == 1 and values["egg_tokens_total"] == 128 * 8
        assert values['egg_loss{unit="bits/byte"}'] == pytest.approx(bits, abs=1e-6)
        assert values['egg_validation{unit="bits/byte"}'] == 1 and values["egg_workers"] == 1
        assert values["egg_sigma_shift"] == state["sigma_shift"] == cfg.SIGMA_SHIFT
        assert values['egg_events_total{event="joined"}'] == 1
        assert [v for k, v in values.items()
                if k.startswith('egg_worker_chunks_total{name="a version 1 peer",address="127.0.0.1:')] == [4]
        assert ask(server, "/", "HEAD")[::2] == (200, b"") and ask(server, "/nothing")[0] == 404
        peer.link.close()


def test_the_page_tells_of_the_end(tmp_path):
    """While somebody looks, the end is served for a moment; else the coordinator leaves at once."""
    for looks in (True, False):
        command = [sys.executable, HERE / "egg.py", "coordinator", "--port", "0", "--http", "0"]
        with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, text=True) as process:
            process.stdout.readline()
            port = int(re.search(r":(\d+)/", process.stdout.readline())[1])
            states = [fetch(port)] if looks else []
            process.send_signal(signal.SIGINT)
            started = time.monotonic()
            while looks and (state := fetch(port)):
                states.append(state)
                time.sleep(0.3)
            assert process.wait(60) == 0
            took = time.monotonic() - started
        assert [state["finished"] for state in states[:1] + states[-1:]] == [False, True][:2 * looks]
        assert (took >= live_page.FAREWELL_SECONDS - 0.5) == looks and took < live_page.FAREWELL_SECONDS + 2


def fetch(port):
    """The state of a page, None where nobody serves it."""
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=5) as sock:
            sock.sendall(request("/state.json"))
            return json.loads(receive(sock)[2] or "null")
    except OSError:
        return None


def parse_metrics(text):
    """{name with labels: value}, every line held against the text form of Prometheus."""
    values, types, families = {}, {}, []
    assert text.endswith("\n")
    for line in text.splitlines():
        if line.startswith("# "):
            _, word, name, rest = line.split(" ", 3)
            assert word in ("HELP", "TYPE") and re.fullmatch("egg_[a-z_]+", name)
            if word == "TYPE":
                assert rest in ("counter", "gauge") and name not in types
                assert (rest == "counter") == name.endswith("_total")
                types[name] = rest
                families.append(name)
            continue
        match = re.fullmatch(r'((egg_[a-z_]+)(?:\{(?:[a-z]+="(?:[^"\\\n]|\\[\\"n])*",?)+\})?) (-?[\d.e+-]+)', line)
        assert match and match[2] == families[-1] and match[1] not in values, line
        values[match[1]] = float(match[3])
    return values


def test_labels_are_escaped():
    assert live_page.quoted('a"b\\c\nd') == r'"a\"b\\c\nd"'


BAD = {
    b"\r\n\r\n": 400, b"GET\r\n\r\n": 400, b"GET / HTTP/1.1\r\n\r\n": 400, b"GET / HTTP/2.0\r\n\r\n": 505,
    b"GET  / HTTP/1.1\r\nHost: localhost\r\n\r\n": 400,
    b"GET / HTTP/1.1\r\nHost: localhost\r\nHost: localhost\r\n\r\n": 400,
    b"GET / HTTP/1.1\r\nHost : localhost\r\n\r\n": 400,
    b"GET / HTTP/1.1\r\nHost: localhost\r\n folded\r\n\r\n": 400,
    b"GET / HTTP/1.1\r\nHost: localhost\r\nno colon\r\n\r\n": 400,
    b"GET / HTTP/1.1\r\nHost: localhost\r\nX: a\0b\r\n\r\n": 400,
    b"GET / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 5\r\n\r\nhello": 413,
    b"GET / HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n": 413,
    b"\x16\x03\x01\x02\x00\x01\x00\r\n\r\n": 400,
    b"POST / HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n": 405,
    b"BREW / HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n": 405,
    b"GET / HTTP/1.0\r\n\r\n": 403, b"GET / HTTP/1.0\r\nHost: localhost\r\n\r\n": 200,
    b"GET /%00 HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n": 404,
    b"GET /../etc/passwd HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n": 404, b"X" * 9000: 431,
    b"GET / HTTP/1.1\r\nX: " + b"y" * 100000: 431,
    b"GET / HTTP/1.1\r\nHost: localhost\r\n" + b"A: b\r\n" * 1500 + b"\r\n": 431,
}


def test_requests_that_cannot_be_served(tmp_path):
    with Server(tmp_path, http=EVERYBODY) as server:
        for data, status in BAD.items():
            with connect(server) as sock:
                sock.sendall(data)
                got = receive(sock)
                assert got[0] == status, (data[:60], got)
                assert sock.recv(1) == b"", data[:60]                     # and the connection ends
        for host in ("evil.example", "evil.example:80", "127.0.0.1.evil.example", "127.0.0.1%x.evil.example",
                     "[::1%x.evil.example]:80", "127.0.0.1%25x.evil.example", "localhost:80.evil.example", "10.0.0.1",
                     "localhost.evil",
                     "[::2]:80", ""):
            assert ask(server, host=host)[0] == 403, host                 # a name that a stranger had resolved to here
        for host in ("localhost", "LOCALHOST:8080", "127.0.0.1", f"127.0.0.1:{page_port(server)}", "[::1]:80"):
            assert ask(server, host=host)[0] == 200, host
        assert Peer(server.port).chunk(0) == 0 and server.failure is None


def test_one_connection_for_many_requests_also_in_pieces(tmp_path):
    with Server(tmp_path, http=EVERYBODY) as server, connect(server) as sock:
        for _ in range(3):
            for byte in request("/metrics", close=False):
                sock.sendall(bytes([byte]))
            assert receive(sock)[0] == 200
        sock.sendall(request("/nothing", close=False) * 200 + request("/nothing"))  # one behind the other, read late
        data = b""
        while more := sock.recv(1 << 16):
            data += more
        assert data.count(b"HTTP/1.1 404 ") == 201


def test_clients_that_take_their_time_are_closed(tmp_path, monkeypatch):
    for name in ("REQUEST_SECONDS", "IDLE_SECONDS", "SEND_SECONDS", "LINGER_SECONDS"):
        monkeypatch.setattr(live_page, name, 0.3)
    with Server(tmp_path, http=EVERYBODY) as server:
        silent, trickling, idle, deaf, lingering = (connect(server) for _ in range(5))
        idle.sendall(request("/metrics", close=False))
        assert receive(idle)[0] == 200
        lingering.sendall(b"\r\n\r\n")
        assert receive(lingering)[0] == 400
        deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        with contextlib.suppress(OSError):
            deaf.settimeout(0.2)
            deaf.sendall(request("/", close=False) * 1000)  # more answers than the buffers hold, none of them read
        began = time.monotonic()
        with pytest.raises(OSError):
            for byte in request("/" + "x" * 4000):
                trickling.sendall(bytes([byte]))
                time.sleep(0.01)
        assert time.monotonic() - began < 3
        for sock in (silent, idle, lingering):
            assert sock.recv(1) == b""
        until(lambda: not (server.coordinator.page.newcomers or server.coordinator.page.served))
        assert ask(server, "/metrics")[0] == 200 and Peer(server.port).chunk(0) == 0


def test_who_holds_connections_keeps_no_browser_out(tmp_path, monkeypatch):
    monkeypatch.setattr(live_page, "MOST_CLIENTS", 16)
    with Server(tmp_path, http=EVERYBODY) as server:
        page = server.coordinator.page
        browser = connect(server)
        browser.sendall(request("/metrics", close=False))
        assert receive(browser)[0] == 200
        held = [connect(server) for _ in range(30)]
        assert all(ask(server, "/metrics")[0] == 200 for _ in range(3))
        browser.sendall(request("/metrics", close=False))
        assert receive(browser)[0] == 200                                  # its connection was kept
        for sock in held:
            with contextlib.suppress(OSError):
                sock.sendall(request("/metrics", close=False))
        until(lambda: len(page.served) > 1)
        assert len(page.newcomers) <= 8 and len(page.served) <= 8 and ask(server, "/metrics")[0] == 200
        [sock.close() for sock in held]


def test_the_password_is_asked_for_and_is_not_the_secret(tmp_path):
    with Server(tmp_path, http=MASTER) as server:
        for path in ("/", "/state.json", "/metrics", "/nothing"):
            status, fields, body = ask(server, path)
            assert status == 401 and fields["www-authenticate"].startswith("basic realm=") and b"egg_" not in body
        for wrong in (b"", SECRET, PASSWORD[:-1], PASSWORD + b"e", PASSWORD.upper() + b"!", b"\xff" * 21):
            assert ask(server, authorization=basic(wrong))[0] == 401
        for wrong in ("Basic", "Basic !!!", "Basic " + base64.b64encode(PASSWORD).decode(),
                      "Bearer " + PASSWORD.decode(),
                      "Basic \xe9"):
            assert ask(server, authorization=wrong)[0] == 401
        for name in (b"me", b"", b"egg"):
            assert ask(server, "/metrics", authorization=basic(PASSWORD, name))[0] == 200
        assert ask(server, "/metrics", host="evil.example", authorization=basic(PASSWORD))[0] == 403
        second = f"Authorization: {basic(b'x')}\r\nConnection".encode()
        twice = request("/", authorization=basic(PASSWORD)).replace(b"Connection", second)
        with connect(server) as sock:
            sock.sendall(twice)
            assert receive(sock)[0] == 400


def test_the_page_under_tls(tmp_path, certificates):
    cert, key = certificates
    where = live_page.Where("127.0.0.1", 0, PASSWORD.decode(), auth.server_tls(cert, key))
    with Server(tmp_path, http=where) as server:
        assert server.coordinator.page.invitation().startswith("live page: https://127.0.0.1:")
        context = ssl.create_default_context(cafile=cert)
        with connect(server) as sock, context.wrap_socket(sock, server_hostname="localhost") as secure:
            for _ in range(2):
                secure.sendall(request("/", close=False, authorization=basic(PASSWORD)))
                assert receive(secure)[0] == 200
            # more than one TLS record
            secure.sendall(request("/nothing", close=False, authorization=basic(PASSWORD)) * 300)
            assert all(receive_small(secure).startswith(b"HTTP/1.1 404") for _ in range(300))
        with connect(server) as plain:
            plain.sendall(request())
            with contextlib.suppress(ConnectionResetError):
                assert b"HTTP" not in plain.recv(100)
        assert Peer(server.port).chunk(0) == 0


def receive_small(sock):
    """One response with a short body, byte by byte, so that the next one stays where it is."""
    data = b""
    while b"\r\n\r\n" not in data:
        data += sock.recv(1)
    left = int(re.search(rb"Content-Length: (\d+)", data)[1])
    while left:
        more = sock.recv(left)
        left -= len(more)
    return data


PIECES = [b"GET ", b"/", b" HTTP/1.1", b" HTTP/1.0", b"\r\n", b"\r\nHost: a", b"Content-Length: 0", b"Authorization:",
          b":", b" ", b"\0", b"\xff", b"a"]


@hypothesis.given(st.binary(max_size=200) | st.lists(st.sampled_from(PIECES)).map(b"".join)
                  | st.lists(st.sampled_from(PIECES)).map(lambda rest: b"GET / HTTP/1.1\r\nHost: a" + b"".join(rest)))
def test_any_head_is_parsed_or_refused(data):
    try:
        request = live_page.parse(data)
        assert request.method and request.target and request.version.startswith("HTTP/1.")
        assert all(name == name.lower() for name in request.fields)
    except ValueError as error:
        status, reason = error.args
        assert HTTPStatus(status) and "\n" not in reason


def test_noise_does_no_harm(tmp_path):
    import random
    rng = random.Random(7)
    with Server(tmp_path, http=MASTER) as server:
        for _ in range(150):
            with connect(server) as sock, contextlib.suppress(OSError):
                whole = request("/metrics", authorization=basic(PASSWORD))
                kind = rng.randrange(4)
                if kind == 0:
                    sock.sendall(rng.randbytes(rng.randrange(20000)))
                elif kind == 1:
                    sock.sendall(whole[:rng.randrange(len(whole))])
                elif kind == 2:
                    at = rng.randrange(len(whole))
                    sock.sendall(whole[:at] + rng.randbytes(1) + whole[at + 1:])
                else:
                    sock.sendall(whole)
                    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # ends with a reset
        assert ask(server, "/metrics", authorization=basic(PASSWORD))[0] == 200 and Peer(server.port).chunk(0) == 0


def test_many_clients_share_what_is_made_once(tmp_path, monkeypatch):
    made = []
    monkeypatch.setattr(live_page.Figures, "state", lambda self: made.append(1) or {})
    monkeypatch.setattr(live_page, "MADE_EVERY", 3600)
    with Server(tmp_path, http=EVERYBODY) as server:
        socks = [connect(server) for _ in range(50)]
        for sock in socks:
            sock.sendall(request("/state.json", close=False))
        assert all(receive(sock)[0] == 200 for sock in socks) and len(made) == 1


def test_where_the_page_may_be_served():
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    access = auth.Access
    assert live_page.where(("127.0.0.1", 80), access()) == ("127.0.0.1", 80, "", None)
    # no TLS on the way to oneself
    assert live_page.where(("localhost", 80), access(SECRET, tls)) == ("localhost", 80, PASSWORD.decode(), None)
    assert live_page.where(("10.0.0.1", 80), access(SECRET, tls)) == ("10.0.0.1", 80, PASSWORD.decode(), tls)
    assert live_page.where(("0.0.0.0", 80), access(b"", None, True)).password == ""
    with pytest.raises(auth.AuthError, match="show the run to anybody"):
        live_page.where(("0.0.0.0", 80), access())
    with pytest.raises(auth.AuthError, match="password over the network in the clear"):
        live_page.where(("0.0.0.0", 80), access(SECRET))
    assert live_page.where(("", 80), access()).host == "127.0.0.1"
    for text, got in (("80", ("", 80)), ("[::1]:80", ("::1", 80)), ("a.b:0", ("a.b", 0))):
        assert split_address(text) == got
    for text in ("", "a", "1:2:3", "99999", "-1", ":80", "a b:80", "80 "):
        with pytest.raises(ValueError):
            split_address(text)


def test_a_busy_port_is_one_line(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert egg.main(["coordinator", "--port", "0", "--http", str(port)]) == 1
        assert capsys.readouterr().err == f"egg: --http 127.0.0.1:{port}: this port is in use: choose another\n"
    assert egg.main(["coordinator", "--port", "0", "--http", "0.0.0.0:0"]) == 2
    err = capsys.readouterr().err
    assert err.startswith("egg: --http 0.0.0.0:0 would show the run to anybody") and err.count("\n") == 1
    with pytest.raises(SystemExit) as ended:
        egg.main(["coordinator", "--http", "what"])
    assert ended.value.code == 2 and capsys.readouterr().err.count("\n") == 1


def test_the_coordinator_with_a_page_needs_neither_numba_nor_threads(tmp_path):
    program = ("import sys, threading, egg_net, egg_config\n"
               "from cluster import auth, event_log, history; from tools import live_page\n"
               "cfg, console = egg_config.make(), egg_net.Console(quiet=True)\n"
               "where = live_page.where(('127.0.0.1', 0), auth.Access())\n"
               "run = history.open_run(cfg)\n"
               f"events = event_log.Events(cfg, run, {str(tmp_path)!r}, console)\n"
               "coordinator = egg_net.Coordinator(cfg, run, '127.0.0.1', 0, console=console, events=events,"
               " http=where)\n"
               "coordinator.poll(0)\n"
               "heavy = ('numba', 'llvmlite', 'tensorboardX', 'matplotlib')\n"
               "print({m for m in sys.modules if m.split('.')[0] in heavy}, threading.active_count())")
    done = subprocess.run([sys.executable, "-c", program], cwd=HERE, capture_output=True, text=True)
    assert done.stdout == "set() 1\n"
