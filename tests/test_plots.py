"""Curves and plots of runs and islands; what the page and the status show of islands."""

import contextlib
import itertools
import os
import random
import re

from pytest import approx, mark, raises

import egg_net
from cluster import event_log, history
from cluster.status import WORKERS, describe_status
from tools import curves
from tools.curves import read_curve
from coordinators import Server
from fakes import CFG, FakeEngine, Lines
from fuzzing import EXAMPLES
from pages import EVERYBODY, ask, page_shows, parse_metrics, state_of
from run_logs import drawn, events, example, of_kind, write
from commands import fails, run, succeeds, train_here


WAYS = [*itertools.product(("tokens", "time", "steps"), (False, True))]         # of `plot`: its --x and --log


# --- curves -----------------------------------------------------------------------------------------------------------

def test_a_long_curve_is_thinned_to_means_and_its_course_is_the_same(monkeypatch):
    monkeypatch.setattr(curves, "POINTS", 64)
    curve = curves.Curve()
    for k in range(5000):
        at = dict(step=k, tokens=10 * k)
        curve.add({"event": "step", "loss": k % 2, "elapsed": k + 1, **at})
        curve.add({"event": "validation", "value": 2 * k, **at})
    assert (curve.steps, curve.seconds) == (5000, 5000) and len(curve.loss) <= 64 and len(curve.validation) <= 64
    assert [point.value for point in curve.loss[:20]] == approx([0.5] * 20, abs=0.1)
    few = curves.thinned(curve.validation, 8)
    assert len(few) <= 9 and all(point.value == approx(point.tokens / 5, rel=0.1, abs=200) for point in few)


def test_of_a_long_log_every_nth_step_is_read_and_every_validation(tmp_path, monkeypatch):
    example(tmp_path / "log")
    monkeypatch.setattr(curves, "READ_WHOLE", os.path.getsize(tmp_path / "log") // 4)
    curve = read_curve(tmp_path / "log")
    assert 50 < len(curve.loss) < 80 and len(curve.validation) == 6
    os.rename(tmp_path / "log", tmp_path / "log.1")              # the older part of a log that has become long
    write(tmp_path / "log", {"event": "step", "step": 300, "tokens": 1, "loss": 1, "elapsed": 150.5})
    assert read_curve(tmp_path / "log").steps == 301 and len(read_curve(tmp_path / "log").validation) == 6


def test_what_holds_no_run_is_one_line(here):
    for name in ("pipe", "device", "sparse", "dir"):
        (here / name).mkdir()
    os.mkfifo(here / "pipe" / history.EVENTS)
    os.symlink("/dev/zero", here / "device" / history.EVENTS)
    (here / "sparse" / history.EVENTS).touch()
    os.truncate(here / "sparse" / history.EVENTS, 1 << 28)
    (here / "empty").touch()
    (here / "binary").write_bytes(os.urandom(1 << 20))
    for name, line in {"empty": "empty holds no step of a run", "dir": "dir/events.jsonl: No such file",
                       "none": "none: No such file", "binary": "binary holds no step of a run",
                       "sparse": "holds no step of a run", "pipe": "not a regular file",
                       "device": "not a regular file", f"pipe/{history.EVENTS}": "not a regular file"}.items():
        fails(run("plot", name), 1, line)
    example(here / "long")
    os.symlink("long", "link")                                   # the user's own name of a log may be a link
    assert read_curve("link").steps == 300
    assert "left out: " in succeeds(run("plot", "empty", "long", "dir"))


ODD = [None, True, -1, 0, 3, 1e-320, 1e-9, 1e9, 1e15, 1e308, 10 ** 400, float("nan"), float("inf"), "", "5", "$\\frac{",
       "x" * 5000, "\0\x1b\ud800", [], {}, {"a": "$_"}, {"\0\ud800": 1, "uniform": float("nan")}, [[[]]]]
KINDS = {"step": ["step", "tokens", "loss", "elapsed", "unit"],
         "validation": ["step", "tokens", "value", "unit", "seconds"], "reward": ["step", "tokens", "value"],
         "references": ["values"], "start": ["step", "config"],
         "merge": ["step", "peer", "peer_step", "kind"], "sample": ["step", "worker", "prompt", "text"]}


@mark.parametrize("seed", range(EXAMPLES // 5))
def test_a_forged_log_is_a_curve_or_a_line(tmp_path, seed):
    dice, good = random.Random(seed), {"kind": "clone", "unit": "bits", "values": {"uniform": 2.0}, "peer": "p"}
    for kind in ["step", "merge", *dice.choices([*KINDS], k=40)]:
        event = {name: dice.choice(ODD) if dice.random() < 0.3 else good.get(name, dice.random() * 10)
                 for name in KINDS[kind] if dice.random() < 0.97}
        if kind == "start":
            event["config"] = {name: dice.choice(ODD) for name in ("SOFTMAX_EXP_SCALE", "VOCAB_SIZE")}
        write(tmp_path / "log", dice.choice(ODD) if dice.random() < 0.05 else {"event": kind, **event})
    for way in *(dict(x=x, log=log) for x, log in WAYS), dict(out=str(tmp_path / "x.svg")):
        with contextlib.suppress(event_log.WatchError):
            drawn(tmp_path / "log", **way)


# --- plots ------------------------------------------------------------------------------------------------------------

def test_in_the_terminal_a_curve_is_a_line_of_blocks(here, monkeypatch):
    """All runs have the same axes; where one has ended its line is blank. A logarithmic axis has equal room for equal
    ratios, and none for what is at 0 s."""
    monkeypatch.setenv("COLUMNS", str(curves.WORDS + 8))
    write("first", {"event": "validation", "step": 0, "tokens": 0, "seconds": 0, "value": 7})
    with raises(event_log.WatchError, match="no step has a place on a logarithmic axis yet"):
        drawn("first", log=True)
    for name, losses in ("one", (7, 6, 5, 4, 3, 2, 1, 0)), ("two", (7, 7, 0, 0)):
        write(name, *({"event": "step", "step": k, "tokens": 1e6 * k, "loss": loss, "elapsed": 10 ** k, "unit": "u"}
                      for k, loss in enumerate(losses)))
    assert drawn("one", "two") == ["loss, u, against million tokens", f"{curves.BLOCKS[::-1]} 0  one",
                                   "\u2588\u2588\u2581\u2581     0  two"]
    assert drawn("one", x="time", log=True)[1].split()[0] == curves.BLOCKS[::-1]


def test_pictures(here):
    example("one"), example("two", steps=100)
    write("two", {"event": "reward", "step": 100, "tokens": 1e6, "value": -1}, {"event": "merge", **merged(step=100)})
    assert [point.step for point, event in read_curve("two").merges] == [99]
    for name, head in (("a.png", b"\x89PNG\r\n"), ("a.pdf", b"%PDF"), ("a.svg", b"<?xml")):
        assert run("plot one two --x time --log --out", name).stdout == f"picture: {name}\n"
        assert (here / name).read_bytes().startswith(head)
    for out, line in (("no/a.png", "--out no/a.png: No such file or directory"),
                      ("x", "--out x: name a file that ends with .png, .svg or .pdf")):
        fails(run("plot one --out", out), 1, line)


def test_runs_are_listed_with_the_steps_that_they_have(here):
    """Also where an import has no log of them; what is cut is marked; and `plot` takes the newest."""
    fails(run("runs"), 1, "there is no saved run here (ckpt*)", "or give its directory")
    fails(run("plot"), 1, "there is no saved run here (ckpt*)")
    schedule = tuple((step, 0.5) for step in range(20))
    history.open_directory(CFG, "ckpt", history.Start(7, 1, "00" * 32)).close()
    history.open_directory(CFG.changed(LR_SCHEDULE=schedule), "ckpt-2").close()
    head, first, second = succeeds(run("runs")).splitlines()
    assert first.split()[:2] == ["ckpt", "7"] and second.split()[:2] == ["ckpt-2", "0"] and second.endswith("...")
    assert "LR_SCHEDULE=0:0.5,1:0.5" in second
    example("ckpt/events.jsonl")
    assert succeeds(run("plot")) == succeeds(run("plot ckpt"))


def test_units_and_references_that_hold_for_every_run(here):
    for name, unit, values in (("a", "bits/byte", {"bigram": 3.5}), ("b", "bits/byte", {"bigram": 3.5}),
                               ("c", "bits/token", {})):
        example(name, unit=unit)
        write(name, {"event": "references", "values": values})
    for names, shown in ("a", True), ("ab", True), ("ac", False):
        assert ('the mark to beat, a table of pairs ("bigram"): 3.5' in drawn(*names)) == shown
    assert drawn("a", "c")[0] == "validation, bits/byte, bits/token, against million tokens"


def test_training_shows_and_keeps_its_course(small, tmp_path, compiled):
    lines = Lines()
    train_here(small, 4, lines, http=EVERYBODY, log_json="log")
    assert re.search(r"^live page: http://127.0.0.1:\d+/$", lines.text, re.M)
    told = events(tmp_path / "log")
    assert told == events(tmp_path / "run") and told[-1]["step"] == 4
    assert {event["event"] for event in told[-4:]} == {"validation", "sample", "snapshot", "stop"}
    assert set(of_kind("references", told)[0]["values"]) == {"uniform", "unigram", "bigram"}
    assert "loss, bits/byte, against steps\n" in run("plot run log --x steps").stdout


# --- islands ----------------------------------------------------------------------------------------------------------

def merged(**fields):
    return dict(step=3, peer="south", peer_step=80, kind="recombine", ours=4.0, theirs=3.0, digest="aa",
                parent_ours="", parent_theirs="", seconds=0.1, epoch=1) | fields


# islands.gossip lets none such in; what is shown does not rely on it
BAD_NAME = "<img src=x onerror=alert(1)>\x1b[2J\n"


def table(names, *rows):
    return [dict(zip(names.split(), row)) for row in rows]


ISLAND = {"name": "north", "id": "1", "epoch": 3, "fitness": 3.8125, "kind": "validation", "peers": table(
    "name address state fitness kind step epoch last_seen taken",
    ("south", "10.0.0.2:12345", "up", 3.75, "validation", 300, 1, 0.4, 1),
    (BAD_NAME, "10.0.0.3:12345", "refused", 1.5, "reward", 0, 0, 12.5, 3),
    ("west", "10.0.0.4:12345", "down", None, None, None, None, None, 0)),
    "since": 90, "from": "south"}


def test_the_page_shows_an_island(tmp_path, monkeypatch):
    status = egg_net.Coordinator.status
    monkeypatch.setattr(egg_net.Coordinator, "status", lambda self: {**status(self), "island": ISLAND})
    with Server(tmp_path, steps=3, stay=True, save=True, http=EVERYBODY) as server:
        server.work(FakeEngine())
        page_shows(server, 2)                                               # workers are answered before
        emit = server.events.emit
        emit("merge", "another line", **merged())
        emit("peer", f"peer {BAD_NAME}", peer=BAD_NAME, address="10.0.0.3:1", state="up")
        state = state_of(server)
        values = parse_metrics(ask(server, "/metrics")[2].decode())
        assert (state["island"], state["peers"], state["n_peers"], state["n_up"]) == (ISLAND, ISLAND["peers"], 3, 1)
        (point, merge), = state["merges"]
        assert point[:2] == [2, 2 * server.cfg.STEP_TOKENS] and merge == {**merge, **merged()}
        assert [line["text"] for line in state["lines"][:2]] == [f"peer {BAD_NAME}", "another line"]
        assert values == {**values, "egg_island_epoch": 3, 'egg_island_fitness{kind="validation"}': 3.8125,
                          "egg_island_peers": 3, "egg_island_peers_up": 1, 'egg_events_total{event="merge"}': 1,
                          'egg_island_peer_fitness{name="south",kind="validation"}': 3.75}
    assert [merge for _, merge in read_curve(tmp_path).merges] == [merge]   # which the page of a resumed run shows


def test_status_tells_of_an_island(server):
    told = server.status()
    plain = describe_status({**told, "island": None})
    text = describe_status({**told, "island": ISLAND})
    assert text.startswith(plain) and "\x1b" not in text
    assert text[len(plain):].splitlines()[1:] == [
        "", "island north, epoch 3, 1 of 3 peers up, fitness 3.8125 (validation)",
        "",
        "peer                             address         state    compares    fitness  step  epoch  taken  last seen",
        "south                            10.0.0.2:12345  up       validation   3.7500   300      1      1      0.4 s",
        "<img src=x onerror=alert(1)>[2J  10.0.0.3:12345  refused  reward       1.5000     0      0      3     12.5 s",
        "west                             10.0.0.4:12345  down                                           0"]


def test_the_longest_status_fits_a_frame(tmp_path, monkeypatch):
    """Thousands of workers and bans with the longest names: the first of them are told, and how many more."""
    name = "\U0001f95a" * 64
    worker = dict(name=name, device=name, address="10.0.0.1:1", protocol=2, step=0, chunks=0, chunk_seconds=None,
                  last_seen=0.5, state="working", up=1, down=1, idle=0.5)
    longest = dict(workers=[worker] * WORKERS, connected=4000, banned={f"{name} {k}": name for k in range(100)})
    status = egg_net.Coordinator.status
    monkeypatch.setattr(egg_net.Coordinator, "status", lambda self: {**status(self), **longest})
    with Server(tmp_path) as server:
        text = describe_status(server.fetched())
    assert text.count("working") == WORKERS and f"\nand {4000 - WORKERS} more" in text
