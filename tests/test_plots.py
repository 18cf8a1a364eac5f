"""Curves and plots of runs and islands."""

import contextlib
import itertools
import json
import os
import random
import re

from pytest import approx, mark

import egg_net
from cluster import event_log, history, wire
from cluster.console import Printer
from cluster.progress import Progress
from cluster.status import describe_status
from tools import curves, plot
from tools.curves import Merge, Thinned, read_curve
from coordinators import Server
from fakes import CFG, FakeEngine, Lines
from fuzzing import EXAMPLES
from pages import EVERYBODY, ask, page_shows, parse_metrics, state_of
from recordings import HERE
from run_logs import Stream, charts, drawn, events, example, of_kind, told_to, write
from commands import fails, run, succeeds, train_here


WAYS = [*itertools.product(("tokens", "time", "steps"), (False, True))]         # of `plot`: its --x and --log


# --- curves and plots -------------------------------------------------------------------------------------------------

def test_a_thinned_curve_is_the_mean_of_the_whole():
    for n in (0, 1, 7, 8, 9, 1000, 1001):
        curve = Thinned(8)
        for k in range(n):
            curve.add(k, 2.0 * k)
        points = curve.all()
        assert len(points) <= 9 and all(y == 2 * x for x, y in points)
        assert [x for x, _ in points] == sorted(x for x, _ in points)
        sizes = [curve.every] * len(curve.points) + [n - curve.every * len(curve.points)]
        assert sum(s * x for s, (x, _) in zip(sizes, points)) == approx(n * (n - 1) / 2, rel=1e-4)


def fits(lines, width):
    return all(len(line) <= max(width, plot.LABEL + 4) for line in lines)


def test_a_terminal_plot_of_any_width(tmp_path):
    both = one, two = tmp_path / "one", tmp_path / "two"
    example(one), example(two, steps=150, loss=1.5)
    for x, log in WAYS:
        made = charts(both, x, log)
        for encoding, width in itertools.product(("utf-8", "ascii", "latin-1"), (1, 13, 20, 40, 79, 80, 200)):
            text = plot.terminal(*made, Printer(Stream(encoding)), width)
            assert all(fits(part.splitlines()[1:-1], width) for part in text.split("\n\n")[:2]), (x, width)
            text.encode(encoding)
    text = drawn([one], 60)
    assert "validation, bits/byte\n" in text and "million tokens\n" in text and re.search("[\u2801-\u28ff]", text)
    assert "\x1b" not in text
    assert text.endswith("* one: validation 0.6485, training loss 0.09907")
    text = drawn(both, 60, terminal=True)
    assert "\x1b[33m" in text and "\x1b[36m" in text


def test_a_terminal_plot_puts_figures_where_its_axes_say(tmp_path):
    # a straight line from (0, 10) to (100 steps, 0)
    write(tmp_path / "line",
          *({"event": "step", "step": k, "tokens": k, "loss": 10 - k / 10, "seconds": 1} for k in range(101)))
    made, names, tree = charts([tmp_path / "line"], "steps")
    rows = plot.terminal(made[1:], names, tree, Printer(Stream("ascii")), 59).splitlines()[1:1 + plot.ROWS]
    assert [row.rindex("a") - 9 if k else row.index("a") - 9 for k, row in enumerate(rows)][::plot.ROWS - 1] == [0, 49]
    for row in rows:
        label, _, drawn = row.partition("+" if "+" in row else "|")
        if label.strip():
            columns = [i for i, c in enumerate(drawn) if c == "a"]
            assert abs(10 - sum(columns) / len(columns) / 49 * 10 - float(label)) < 0.5, row


def test_a_logarithmic_axis_has_equal_room_for_equal_ratios(tmp_path):
    path = tmp_path / "line"
    # a straight line from (1 s, 3) to (1,000 s, 0); what is at 0 s has no place
    for k, seconds in enumerate((0, 1, 10, 100, 1000)):
        write(path, {"event": "validation", "step": k, "tokens": k, "seconds": seconds, "unit": "bits/byte",
                     "value": 4 - k})
    (chart, _), names, tree = charts([path], "time", True)
    assert [(x, round(y)) for _, line in chart.lines for x, y in line] == [(1, 3), (10, 2), (100, 1), (1000, 0)]
    assert [chart.across(x) for x in (1, 10, 100, 1000)] == approx([0, 1 / 3, 2 / 3, 1])
    assert [text for _, text in chart.x_ticks(4)] == ["1", "10", "100", "1000"]
    assert [text for _, text in chart.x_ticks(9)] == ["1", "2", "5", "10", "20", "50", "100", "200", "500", "1000"]
    text = plot.terminal([chart], names, tree, Printer(Stream("ascii")), 70)
    assert text.splitlines()[plot.ROWS + 2].split() == ["1", "10", "100", "1000"] and "time of training, s\n" in text
    succeeds(run("plot --x time --log", path, "--out", tmp_path / "a.svg"))
    assert "<svg" in (tmp_path / "a.svg").read_text()


def test_runs_of_the_same_name_and_runs_with_one_point(tmp_path):
    a, b = tmp_path / "a" / "ckpt", tmp_path / "b" / "ckpt"
    for path, unit in (a, "bits/token"), (b, "bits/byte"):
        path.mkdir(parents=True)
        example(path / history.EVENTS, 1, unit=unit)
    out = run("plot", a, b).stdout
    assert f"a {a}: " in out and f"b {b}: " in out and "validation, bits/byte or bits/token\n" in out


def test_a_picture(here):
    example("one"), example("two", steps=100)
    assert run("plot one two --x time --out a.png").stdout == "picture: a.png\n"
    assert (here / "a.png").read_bytes().startswith(b"\x89PNG\r\n")
    succeeds(run("plot one --out a.svg"))
    assert "<svg" in (here / "a.svg").read_text()
    for out, line in (("no/a.png", "No such file or directory"), ("a.what", "Format 'what' is not supported"),
                      ("x", "--out x: the suffix says what to write: x.png, ")):
        fails(run("plot one --out", out), 1, line)
        assert not (here / "x.png").exists()


def test_references_are_shown_where_they_hold_for_every_run(tmp_path):
    for name, values in (("a", {"uniform": 8.0, "bigram": 3.5}), ("b", {"uniform": 8.0, "bigram": 3.9}), ("c", {})):
        example(tmp_path / name)
        write(tmp_path / name, {"event": "references", "values": values})
    for names, shown in (("a", {"uniform": 8.0, "bigram": 3.5}), ("ab", {"uniform": 8.0}), ("ac", {}), ("ca", {})):
        assert charts([tmp_path / name for name in names])[0][0].references == shown


def test_runs_without_data_are_named(here):
    (here / "empty").touch()
    (here / "dir").mkdir()
    (here / "binary").write_bytes(os.urandom(1 << 20))
    for name, line in {"empty": "empty holds no step of a run", "dir": "dir: contains no run of egg",
                       "none": "none: No such file", "binary": "binary holds no step of a run",
                       HERE / "tests" / "golden": "contains no run of egg"}.items():
        fails(run("plot", name), 1, line, "name a --save-dir, or a file of --log-json")


def test_what_is_no_regular_file_or_too_large_for_a_log_is_one_line(tmp_path, monkeypatch):
    for name in ("pipe", "device", "sparse"):
        (tmp_path / name).mkdir()
    os.mkfifo(tmp_path / "pipe" / history.EVENTS)
    os.symlink("/dev/zero", tmp_path / "device" / history.EVENTS)
    with open(tmp_path / "sparse" / history.EVENTS, "wb") as file:
        file.truncate(20 << 30)
    example(tmp_path / "long")
    os.symlink(tmp_path / "long", tmp_path / "link")             # the user's own name of a log may be a link
    assert read_curve(tmp_path / "link").steps == 300
    for name in "pipe", "device", f"pipe/{history.EVENTS}":
        fails(run("plot", tmp_path / name), 1, "not a regular file")
    fails(run("plot", tmp_path / "sparse"), 1, "more than 1,073,741,824 bytes")
    merge = {"event": "merge", "step": 1, "time": 1, "peer": "p", "peer_step": 1, "kind": "clone", "parent_theirs": "x",
             "digest": "y"}
    write(tmp_path / "long", *[merge, {"event": "rejuvenated", "step": 1}] * 2000)
    monkeypatch.setattr(curves, "POINTS", 64)
    curve = read_curve(tmp_path / "long")
    assert len(curve.loss) < 64 and curve.steps == 300 and len(curve.merges) + len(curve.rejuvenations) == 2048
    losses = [point.value for point in curve.loss]
    assert sorted(losses) == losses[::-1]


ODD = [None, True, -1, 0, 3, 1e-320, 1e-9, 1e9, 1e15, 1e308, 10 ** 400, float("nan"), float("inf"), "", "5", "$\\frac{",
       "x" * 5000, [], {}, {"a": "$_"}, {"uniform": float("nan")}, [[[]]]]
KINDS = {"step": ["step", "tokens", "loss", "seconds", "unit"], "island": ["name"], "rejuvenated": ["step"],
         "validation": ["step", "tokens", "value", "unit", "seconds"], "reward": ["step", "tokens", "value"],
         "references": ["values"], "start": ["config"],
         "merge": ["step", "time", "peer", "peer_step", "kind", "ours", "theirs", "parent_theirs", "digest"],
         "sample": ["step", "worker", "prompt", "text"]}


@mark.parametrize("seed", range(EXAMPLES // 5))
def test_a_forged_log_is_a_curve_or_a_line(tmp_path, seed):
    dice, good = random.Random(seed), {"kind": "clone", "unit": "bits", "values": {"uniform": 2.0}, "peer": "p"}
    for kind in ["island", "step", "merge", *dice.choices([*KINDS], k=40)]:
        event = {name: dice.choice(ODD) if dice.random() < 0.3 else good.get(name, dice.random() * 10)
                 for name in KINDS[kind] if dice.random() < 0.97}
        if kind == "start":
            event["config"] = {name: dice.choice(ODD) for name in ("RECOMBINE_ALPHA", "SOFTMAX_EXP_SCALE",
                                                                   "VOCAB_SIZE")}
        write(tmp_path / "log", dice.choice(ODD) if dice.random() < 0.05 else {"event": kind, **event})
    for way in *(dict(x=x, log=log) for x, log in WAYS), dict(out=str(tmp_path / "x.svg")):
        with contextlib.suppress(event_log.WatchError):
            plot.plot([tmp_path / "log"], Printer(Stream()), **way)


def test_training_shows_and_keeps_its_course(small, tmp_path, compiled):
    lines = Lines()
    train_here(small, 4, lines, http=EVERYBODY, log_json="log")
    assert re.search(r"^live page: http://127.0.0.1:\d+/$", lines.text, re.M)
    told = events(tmp_path / "log")
    assert told == events(tmp_path / "run") and told[-1]["step"] == 4
    assert [event["event"] for event in told[-3:]] == ["validation", "sample", "stop"]
    assert set(of_kind("references", told)[0]["values"]) == {"uniform", "unigram", "bigram"}
    curve = read_curve("run")
    assert len(curve.loss) == 4 and [point.step for point in curve.validation] == [0, 2, 4]
    assert "training loss" in run("plot run log --x steps").stdout


# --- islands ----------------------------------------------------------------------------------------------------------

MERGE = "peer", "peer_step", "kind", "ours", "theirs", "parent_theirs", "digest"


def an_island(path, name, steps, merges=(), pushes=(), alpha=0.5):
    """A log as an island writes it. merges: {step: the fields MERGE}."""
    def line(event, **fields):
        write(path, {"event": event, **fields})

    path.unlink(missing_ok=True)
    line("start", time=0, step=0, directory=None, config={"RECOMBINE_ALPHA": alpha})
    line("island", time=0, name=name, peers=[])
    for k in range(steps):
        if k in merges:
            line("merge", time=k + 0.5, step=k, parent_ours="", seconds=0.1, epoch=1, **dict(zip(MERGE, merges[k])))
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
    assert (a.island, a.merges, [point.step for point in a.rejuvenations], a.steps) == ("a", [], [70], 100)
    assert b.merges == [Merge(30, 30.5, "a", 20, 1.0, "a20", "b30")] and b.at(30)[:3] == (30, 3000, 15.0)
    assert b.at(0)[:3] == (0, 0, 0)
    # our own wins a tie
    assert [m.share for m in c.merges] == [approx(1 - 0.25 * 6 / 8, abs=1e-4), approx(0.25, abs=1e-4)]
    bad = {"event": "merge", "step": 1, "time": 1, "peer": "x", "peer_step": "NaN", "kind": "clone"}
    write(paths[2], {"event": "merge"}, bad, {"event": "island"}, {"event": "start", "config": 3},
          {**bad, "step": 99, "peer_step": 1, "kind": "recombine", "ours": None, "theirs": 1},
          {"event": "rejuvenated", "step": []})
    assert read_curve(paths[2]).merges == c.merges
    # went on from before the second
    write(paths[2], {"event": "step", "step": 50, "tokens": 0, "loss": 1, "seconds": 1})
    assert read_curve(paths[2]).merges == c.merges[:1] and read_curve(tmp_path / "a").merges == []


def test_the_family_of_islands(tmp_path):
    paths = archipelago(tmp_path, "far")
    tree = charts(paths)[2]
    assert [*tree.numbers.items()] == [("a", 0), ("b", 1), ("c", 2), ("far", 3)]
    assert [*tree.runs] == ["a", "b", "c"]
    assert tree.descent("a") == tree.descent("b") == [("a", 1.0)]
    part = 1 - 0.25 * 6 / 8
    assert dict(tree.descent("c")) == {"a": approx(part * 0.75, abs=1e-4),
                                       "c": approx((1 - part) * 0.75, abs=1e-4),
                                       "far": approx(0.25, abs=1e-4)}
    assert [(gift.giver, gift.taker) for gift in tree.gifts] == [("a", "b"), ("b", "c"), ("far", "c")]
    # thousand tokens
    assert [approx((gift.given_at, gift.taken_at), abs=1e-9) for gift in tree.gifts] == [(2, 3), (4, 5), (6, 6)]
    assert tree.lanes["b"][0] == (0, 3, {"b": 1.0}) and tree.lanes["b"][1].shares == {"a": 1.0}
    assert tree.rejuvenations == [("a", 7)]
    assert tree.living() == "lines that live on 3 islands: a on 3, c on 1, far on 1; gone: b"
    # at step 30 of b there are two states: the digest says which one was given
    def with_d(merges):
        an_island(tmp_path / "d", "d", 100, merges)
        return charts([*paths, tmp_path / "d"])[2]

    for digest, descent in (("b30", {"a": 1.0}), ("the one before", {"b": 1.0})):
        assert dict(with_d({80: ("b", 30, "clone", 9.0, 8.0, digest, "d80")}).descent("d")) == descent
    # what was taken can be given up again: back to a state of its own from before
    tree = with_d({50: ("b", 20, "clone", 9.0, 8.0, "b20", "d50"), 60: ("d", 40, "undo", 9.5, None, None, "d60")})
    assert dict(tree.descent("d")) == {"d": 1.0}
    assert [piece.shares for piece in tree.lanes["d"]] == [{"d": 1.0}, {"b": 1.0}, {"d": 1.0}]
    # of two logs of one island the longer counts, and a run that is no island has no lane
    example(tmp_path / "alone"), an_island(tmp_path / "again", "b", 20)
    tree = charts([tmp_path / "alone", tmp_path / "again", *paths])[2]
    assert tree.numbers == {"a": 2, "b": 3, "c": 4, "far": 5} and tree.descent("b") == [("a", 1.0)]
    assert not charts([tmp_path / "alone"])[2].lanes


def test_islands_in_the_terminal(tmp_path):
    paths = archipelago(tmp_path)
    for terminal, encoding, width in itertools.product((False, True), ("utf-8", "ascii"), (1, 20, 60, 200)):
        text = drawn(paths, width, encoding, terminal)
        assert "\x1b[31mx" not in text and "x" * 33 not in text
        lanes = re.sub("\x1b\\[[0-9]+m", "", text).split("in capitals where it was taken in\n")[1]
        assert fits(lanes.splitlines()[:4], width)
    text = drawn(paths, 109)
    lanes = [line.partition("\u2502")[::2] for line in text.split("was taken in\n")[1].splitlines()[:4]]
    assert [name.strip() for name, _ in lanes] == ["a", "b", "c", "$\\frac{"]
    # a hundred columns are a hundred steps
    assert lanes[0][1] == "a" * 70 + "!" + "a" * 29 and lanes[1][1] == "b" * 30 + "A" + "a" * 60
    assert lanes[2][1] == "c" * 50 + "B" + "a" * 9 + "D" + "a" * 39 and lanes[3][1] == "d" * 61
    assert "c c: validation 6.2, training loss 1.505; island c, of 61% a, 25% $\\frac{" in text
    assert "; gone: b" in text


def test_islands_in_a_picture(here):
    archipelago(here)
    succeeds(run("plot a b c --x time --out islands.svg"))
    drawn = (here / "islands.svg").read_text()
    assert "$\\frac{" in drawn and "lines that live on 3 islands" in drawn           # as it is, no formula
    for line in "plot a --out one.png", "plot c a --x steps --out two.png":
        succeeds(run(line))


# islands.gossip lets none such in; what is shown does not rely on it
BAD_NAME = "<img src=x onerror=alert(1)>\x1b[2J\n"


def table(names, *rows):
    return [dict(zip(names.split(), row)) for row in rows]


ISLAND = {"name": "north", "epoch": 3, "fitness": 3.8125, "kind": "validation", "founder": "south", "peers": table(
    "name address state fitness kind step epoch founder last_seen given taken",
    ("south", "10.0.0.2:12345", "up", 3.75, "validation", 300, 1, "south", 0.4, 2, 1),
    (BAD_NAME, "10.0.0.3:12345", "distrusted", 1.5, "loss", 0, 0, BAD_NAME, 12.5, 0, 3),
    ("west", "10.0.0.4:12345", "down", None, None, None, None, None, 7.0, 0, 0)),
    "lineage": table("epoch step from peer_step digest", (0, 0, "north", None, None), (1, 90, "south", 80, "aa"),
                     (2, 120, BAD_NAME, 70, "bb"), (3, 130, "north", None, "cc"))}


def merged(**fields):
    return dict(step=3, peer="south", peer_step=80, kind="recombine", ours=4.0, theirs=3.0, digest="aa",
                parent_ours="", parent_theirs="", seconds=0.1, epoch=1) | fields


def test_the_page_shows_an_island(tmp_path, monkeypatch):
    def server_again():
        return Server(tmp_path, steps=3, stay=True, save=True, http=EVERYBODY)

    status = egg_net.Coordinator.status
    monkeypatch.setattr(egg_net.Coordinator, "status", lambda self: {**status(self), "island": ISLAND})
    with server_again() as server:
        assert not re.search("innerHTML|outerHTML|insertAdjacent|document.write|eval", ask(server)[2].decode())
        server.work(FakeEngine())
        page_shows(server, 2)                                               # workers are answered before
        events = server.events
        events.emit("merge", "another line", **merged())
        events.emit("merge", "back", **merged(peer="north", peer_step=1, kind="undo", theirs=None, parent_theirs=None))
        events.emit("peer", f"peer {BAD_NAME}", peer=BAD_NAME, address="10.0.0.3:1", state="up")
        events.emit("gossip", None, peer="south", ours=1.0, theirs=2.0, kind="loss", outcome="offer")
        events.emit("rejuvenated", "a line", step=3, epoch=2, digest="")
        state = state_of(server)
        values = parse_metrics(ask(server, "/metrics")[2].decode())
        assert state["island"] == {**{k: v for k, v in ISLAND.items() if k != "lineage"}, "n_peers": 3, "n_up": 1}
        both = dict(step=3, tokens=3 * server.progress.tokens_a_step,
                    seconds=approx(state["seconds"], abs=1e-3))
        assert state["merges"] == [{**both, "peer": "south", "peer_step": 80, "part": 0.625},
                                   {**both, "peer": "north", "peer_step": 1, "part": 1}]
        assert [line["text"] for line in state["lines"][:4]] == ["a line", f"peer {BAD_NAME}", "back", "another line"]
        assert values == {**values, "egg_island_epoch": 3, 'egg_island_fitness{kind="validation"}': 3.8125,
                          "egg_island_peers": 3, "egg_island_peers_up": 1, 'egg_events_total{event="merge"}': 2,
                          'egg_island_peer_fitness{name="south",kind="validation"}': 3.75}
        assert [v for k, v in values.items() if k.startswith("egg_island_taken_total")] == [1, 3, 0]
        assert not [k for k in values if k.startswith(("egg_island_peer_step", "egg_island_peer_fitness"))
                    and "west" in k]
    with server_again() as server:
        again = state_of(server)["merges"]
        assert [m | {"seconds": approx(m["seconds"], abs=1e-3)} for m in again] == state["merges"]


def test_status_tells_of_an_island(server):
    told = server.status()
    # a coordinator of before there were any
    plain = describe_status({k: v for k, v in told.items() if k != "island"})
    assert plain == describe_status({**told, "island": None}) and "island" not in plain
    text = describe_status({**told, "island": ISLAND})
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
    assert describe_status({**told, "island": alone}).endswith(
        "\nisland north, epoch 3, descends from south, 0 of 0 peers up")


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
            told = server.fetched()
        shown = len(told["workers"])
        assert 500 < shown < 4000 and told["connected"] == 4000 and len(told["banned"]) == 100
        assert len(json.dumps(told).encode()) <= wire.STATUS.most
        text = describe_status(told)
        assert text.count("working") == shown and f"\nand {4000 - shown} more" in text


@mark.parametrize("lie", [-(1 << 59), 1 << 59, 0, -1])
def test_a_lie_does_not_move_the_loss(lie, tmp_path):
    """Of four chunks one states what cannot be: the mean of the others is hardly changed."""
    def loss(last):
        progress = Progress(CFG, run, told)
        progress.begin_step()
        progress.chunk_handed_out()
        progress.complete_step(0, [40_000, 41_000, 42_000, last])
        return progress.loss

    with contextlib.closing(history.open_run(CFG)) as run, told_to(tmp_path) as told:
        assert loss(lie) == approx(loss(40_000), rel=0.3)
