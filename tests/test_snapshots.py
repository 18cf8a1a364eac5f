"""Digests and snapshots: what a state is, who may give one, and what is kept."""

import json
import os
import pathlib
import shutil
import threading
from contextlib import closing, suppress
from time import thread_time

import numpy as np
from numpy.random import default_rng
from pytest import fixture, mark, raises
import pyzstd

import egg_config
import egg_net
from cluster import history, snapshots, wire
from cluster.history import open_run
from cluster.snapshots import unpack
from cluster.wire import JOB_RESPONSE, SNAPSHOT_WANTED
from model import parameters
from model.parameters import digest_of, initial_state
from coordinators import (Peer2, Server, asks, cluster, filled, first_step, named, refused, run_worker, until, upload,
                          whole)
from fakes import CFG, FakeEngine, Lines, UNITS, VALIDATION, any_fitness, changed, expected
from recordings import digests
from tools import use


# --- digest ----------------------------------------------------------------------------------------------------------

def test_the_digest_is_that_of_the_specification():
    """SPEC 16 in plain integers; in pieces of any size, and by the CPU engine."""
    from engine import cpu_engine
    most = (1 << 64) - 1
    cfg = changed(VOCAB_SIZE=301)                                # an overlay that is no multiple of 8 bytes
    rng, state = default_rng(1), initial_state(cfg)
    state.moments[:] = rng.normal(size=state.moments.shape)
    state.overlay[:] = rng.integers(-127, 128, state.overlay.size)
    state.step, state.seed = 9, 4000000000
    data = np.array([9, state.seed], "<u8").tobytes() + state.weights.tobytes() + state.moments.tobytes()
    data += state.overlay.tobytes()
    data += bytes(-len(data) % 8)
    first = second = 0
    for number, word in enumerate(np.frombuffer(data, "<u8").tolist(), 1):
        x = word + number * 0x9E3779B97F4A7C15 & most
        x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & most
        x = (x ^ x >> 27) * 0x94D049BB133111EB & most
        x ^= x >> 31
        first, second = first + x, second + (x & 0xFFFFFFFF) * (x >> 32)
    digest = digest_of(state)
    assert digest == np.array([first & most, second & most], "<u8").tobytes()
    assert state.overlay.size % 8
    pieces = parameters.Digest(9, state.seed)
    parts = data[16:16 + sum(snapshots.sizes(cfg)[:2]) + state.overlay.size]
    for at in range(0, len(parts), 99991):
        pieces.update(parts[at:at + 99991])
    assert pieces.digest() == digest
    for threads in (1, None):
        engine = cpu_engine.CpuEngine(cfg, threads=threads)
        engine.load(state)
        assert engine.digest() == digest
        engine.update(any_fitness(cfg, rng))
        assert engine.digest() == digest_of(engine.state()) != digest


def test_training_data_are_told_apart():
    tokens = np.arange(100_000, dtype=np.uint32)
    digest = snapshots.data_digest(tokens)
    for other in (tokens[:-1], tokens.astype(np.uint8), np.where(tokens == 70_000, 0, tokens).astype(np.uint32)):
        assert snapshots.data_digest(other) != digest
    assert snapshots.data_digest(tokens.copy()) == digest and snapshots.data_digest(None) == bytes(32)


# --- snapshots --------------------------------------------------------------------------------------------------------

def test_a_snapshot_is_the_state_and_any_changed_byte_is_found(tmp_path):
    rng, state = default_rng(1), initial_state(CFG)
    state.moments[:] = np.abs(rng.normal(size=state.moments.shape))
    state.step, state.seed = 20, 77
    upload, body = snapshots.Upload(CFG, 20, 77, digest_of(state), tmp_path), snapshots.pack(state)
    for at in range(0, len(body), 10000):
        assert not upload.whole
        upload.feed(len(body), at, body[at:at + 10000])
    assert upload.whole
    upload.check()
    upload.keep("s", b"fitness")
    data = (tmp_path / "s").read_bytes()
    back = unpack(CFG, data)
    assert digests(back) == digests(state) and (back.step, back.seed) == (20, 77)
    for at in [*range(snapshots.HEAD.size + 4), *rng.integers(0, len(data), 60)]:
        bad = bytearray(data)
        bad[at] ^= 1 << at % 8
        if at < snapshots.HEAD.size + 4:
            with raises(ValueError, match="snapshot"):
                unpack(CFG, bytes(bad))
        else:
            with suppress(ValueError):                # zstd does not use every bit
                assert digests(unpack(CFG, bytes(bad))) == digests(state)
    for bad in (b"", data[:100], data[:-1], data + b"x", history.MAGIC):
        with raises(ValueError):
            unpack(CFG, bad)
    with raises(ValueError, match="another configuration"):
        unpack(changed(SIGMA_SHIFT=1), data)


@mark.parametrize("pieces", [
    lambda body: [(len(body), 10, body[10:])],                                  # not from the beginning
    lambda body: [(len(body), 0, body[:10]), (len(body) + 1, 10, body[10:])],
    lambda body: [(len(body), 0, body + b"x")],
    lambda body: [(len(body), 0, b"")],
    lambda body: [(1 << 40, 0, body)],
    lambda body: [(200, 0, b"\xff" * 200)],
    lambda body: [(len(body) - 9, 0, body[:-9])],
    lambda body: [(len(z := pyzstd.compress(bytes(1 << 28))), 0, z)],      # 256 MiB in 8 KB
])
def test_uploads_that_cannot_be_right_end_without_a_trace(tmp_path, pieces):
    body = snapshots.pack(initial_state(CFG))
    upload = snapshots.Upload(CFG, 20, 77, bytes(16), tmp_path)
    started = thread_time()
    with raises(ValueError):
        for piece in pieces(body):
            upload.feed(*piece)
        upload.check()
    upload.drop()
    assert not os.listdir(tmp_path) and thread_time() - started < 1


def late_worker(server, step):
    """(engine, Lines) of another worker, which has come to a step or beyond."""
    late, lines = FakeEngine(server.cfg), Lines()
    server.work(late, lines=lines)
    until(lambda: late.step >= step)
    return late, lines


def test_a_late_worker_joins_by_a_snapshot_and_old_ones_go(tmp_path):
    cfg = changed(SNAPSHOT_EVERY=4)
    packed, digest = expected(22)
    with Server(tmp_path, cfg, save=True, steps=22, stay=True, drain=0) as server:
        server.work(FakeEngine(cfg, 0.01), validation=VALIDATION)
        server.reaches(22)
        until(lambda: server.shelf.newest == 20)
        late, lines = late_worker(server, 22)
        assert late.loads == 1 and "at step 20 by a snapshot" in lines.text and late.digest() == digest
        assert whole(server.run) == packed
    names = sorted(path.name for path in tmp_path.glob("snapshot*.egg"))
    assert names == [f"snapshot-{name}.egg" for name in ("00000004-0.6011", "00000016-2.0438", "00000020-2.5247")]
    assert {path.name for path in tmp_path.glob("*.egg")} == {*names, "best.egg", "latest.egg", history.FILE}
    assert os.readlink(tmp_path / "best.egg") == names[0] and os.readlink(tmp_path / "latest.egg") == names[2]

    filled(tmp_path / "other", 22, cfg)                             # snapshots of another run are left alone
    shutil.copy(tmp_path / names[1], tmp_path / "other")
    with closing(open_run(cfg, tmp_path / "other")) as other:
        assert snapshots.Shelf(cfg, other).files == {}


# --- damaged snapshots ------------------------------------------------------------------------------------------------

def flip(path):
    data = bytearray(path.read_bytes())
    data[-100] ^= 1
    path.write_bytes(data)


RARELY = [changed(SNAPSHOT_EVERY=4), UNITS.changed(SNAPSHOT_EVERY=4)]


@mark.parametrize("cfg", RARELY, ids=["weights", "units"])
@mark.parametrize("damage", ["header", "early", "late"])
def test_a_run_whose_history_is_damaged_goes_on_from_its_newest_whole_snapshot(tmp_path, cfg, damage):
    """With a digit a pair the history is the run, so that no later step of it is given up."""
    at = str(tmp_path / "run")
    cluster(at, [FakeEngine(cfg, 0.003)], 11, cfg, save=True, drain=5)
    with closing(history.read_run(cfg, at)) as run:
        known = {"early": run.start.step + 1, "late": 9}.get(damage, 0)
        place = 40 if damage == "header" else run._offsets[known - run.start.step] + 30
    file = tmp_path / "run" / history.FILE
    newest = max(int(path.name[9:17]) for path in file.parent.glob("snapshot-*"))
    for name in (file.parent.glob(f"snapshot-{newest:08d}*") if damage == "late" else ()):
        name.unlink()                                        # that of the end
    newest = 8 if damage == "late" else newest
    data = bytearray(file.read_bytes())
    data[place] ^= 1
    file.write_bytes(data)
    assert history.configuration(at)["SEQ_LEN"] == cfg.SEQ_LEN
    lines = egg_net.Console(Lines())
    assert use.load(cfg, at, console=lines).step == newest
    assert f"here is its snapshot of step {newest}" in lines.stream.text
    if damage == "late" and cfg is RARELY[0]:
        with refused("truncate", history.Damaged):
            history.open_run(cfg, at, mend=snapshots.mend)
        return
    with Server(at, cfg, save=True, steps=14, mend=snapshots.mend) as server:
        line, = server.run.notices
        assert f"the run goes on from step {newest}, the steps after that are gone" in line
        server.work(engine := FakeEngine(cfg))
    assert engine.digest() == expected(14, cfg)[1]
    assert bytes(data) == (file.parent / f"{history.FILE}.damaged").read_bytes()


@mark.parametrize("cfg", RARELY, ids=["weights", "units"])
def test_a_damaged_snapshot_is_named_once_and_the_next_older_one_used(tmp_path, cfg):
    cluster(tmp_path, [FakeEngine(cfg, 0.003)], 10, cfg, save=True, drain=0)
    with Server(tmp_path, cfg, save=True, steps=11, stay=True, drain=0) as server:
        until(lambda: not server.shelf.doubtful)
        newest = server.shelf.path(8)
    flip(pathlib.Path(newest))
    (tmp_path / "snapshot-00000007.egg").write_bytes(b"")
    with Server(tmp_path, cfg, save=True, steps=13, stay=True, drain=0) as server:
        late, lines = late_worker(server, 10)
        assert "at step 4 by a snapshot" in lines.text and "replaying" not in lines.text
        server.reaches(13)
        assert server.said.count(f"{newest} is damaged and not used: ") == 1
        assert server.said.count("snapshot-00000007.egg is damaged and not used: not a snapshot") == 1
        assert (tmp_path / "snapshot-00000007.egg.damaged").exists() and os.path.exists(f"{newest}.damaged")
        until(lambda: late.step == 13)
        assert late.digest() == expected(13, cfg)[1]
        until(lambda: server.shelf.newest == 12)
    with Server(tmp_path, cfg, save=True) as server:
        until(lambda: not server.shelf.doubtful)
        assert "is damaged" not in server.said               # once


def test_a_worker_that_finds_a_snapshot_damaged_is_sent_to_the_next_older_one(tmp_path, monkeypatch):
    """As if it had been damaged after the coordinator looked at it."""
    cfg = UNITS.changed(SNAPSHOT_EVERY=4)
    cluster(tmp_path, [FakeEngine(cfg, 0.003)], 10, cfg, save=True, drain=0)
    with Server(tmp_path, cfg, save=True, steps=11, stay=True, drain=0) as server:
        until(lambda: not server.shelf.doubtful)
        flip(pathlib.Path(server.shelf.path(8)))
        late, lines = late_worker(server, 10)
        assert "at step 4 by a snapshot" in lines.text
        flip(pathlib.Path(server.shelf.path(4)))
        with refused("its history begins at step 4, with a snapshot"):
            run_worker(server, FakeEngine(cfg))


def test_a_history_that_begins_with_a_snapshot_that_is_damaged_needs_a_newer_one(tmp_path):
    cfg = UNITS.changed(SNAPSHOT_EVERY=4)
    cluster(tmp_path, [FakeEngine(cfg, 0.003)], 10, cfg, save=True, drain=0)
    first, second = (next(tmp_path.glob(f"snapshot-0000000{step}*.egg")) for step in (4, 8))
    flip(first)
    with Server(tmp_path, cfg, save=True, steps=11, stay=True, drain=0) as server:
        late, _ = late_worker(server, 10)
        server.reaches(11)
    flip(second)
    with refused("snapshot of step 4, with which its history begins, is missing or damaged: restore",
                 history.HistoryError):
        egg_net.run_coordinator(cfg, port=0, save_dir=tmp_path, console=egg_net.Console(Lines()))


def test_a_snapshot_is_offered_once_it_is_on_the_disk_and_nobody_waits_for_that(tmp_path, monkeypatch):
    fsync, slow = os.fsync, threading.Event()

    def synced(handle):
        if "snapshot-" in os.readlink(f"/proc/self/fd/{handle}"):
            assert slow.wait(60)
        fsync(handle)

    monkeypatch.setattr(os, "fsync", synced)
    cfg = changed(SNAPSHOT_EVERY=4)
    with Server(tmp_path, cfg, save=True, steps=23, drain=0) as server:
        server.work(FakeEngine(cfg, 0.003))
        server.reaches(21)
        assert server.shelf.newest == 0
        assert len([*tmp_path.glob("snapshot*.part")]) == snapshots.MOST_COMING       # more do not wait for the disk
        slow.set()
    with closing(history.read_run(cfg, tmp_path)) as run:
        assert sorted(snapshots.Shelf(cfg, run).files) == [12, 16]


# --- who gives them ---------------------------------------------------------------------------------------------------

@fixture
def server(tmp_path):
    """One that wants a snapshot of every step."""
    with Server(tmp_path, changed(SNAPSHOT_EVERY=1), save=True) as server:
        yield server


def test_a_forged_snapshot_is_not_served(server, tmp_path):
    wrong, other = named(server, "w2", "w3")
    engine = first_step(server, wrong, other)
    forgery = engine.state()
    forgery.weights[100] ^= 1
    asks(wrong, engine, SNAPSHOT_WANTED)
    upload(wrong, forgery)
    server.says("its snapshot of step 1 is not used: it is not the state that workers stated")
    assert server.shelf.newest == 0 and not [*tmp_path.glob("snapshot*")]
    asks(other, engine, SNAPSHOT_WANTED)
    upload(other, engine.state())
    until(lambda: server.shelf.newest == 1)


def test_who_goes_on_without_sending_its_state_is_named_and_others_are_asked_first(server):
    silent, giver = named(server, "w2", "w3")
    engine = first_step(server, silent, giver)
    asks(silent, engine, SNAPSHOT_WANTED)
    silent.delivers(1)
    until(lambda: "w2" in server.said and "step 1 is not used: it did not come" in server.said)
    asks(giver, engine, SNAPSHOT_WANTED)                         # at once, in the same step
    upload(giver, engine.state())
    until(lambda: server.shelf.newest == 1)
    giver.delivers(1)
    for _ in range(2):
        giver.ask(1, engine.digest())
        giver.delivers(1)
    server.reaches(2)
    engine.update(server.run.fitness(1))
    assert asks(silent, engine, SNAPSHOT_WANTED, JOB_RESPONSE)[0] == JOB_RESPONSE
    asks(giver, engine, SNAPSHOT_WANTED)


def test_a_run_that_ends_blames_nobody_for_a_snapshot_that_is_on_its_way(server):
    giver, = named(server, "w2")
    asks(giver, first_step(server, giver), SNAPSHOT_WANTED)
    server.stop()
    assert "is not used" not in server.said and not server.collector.upload


def test_a_snapshot_comes_from_one_to_which_faster_ones_leave_no_chunk_of_its_step(tmp_path):
    with Server(tmp_path, changed(SNAPSHOT_EVERY=2), save=True) as server:
        fast, slow = named(server, "w2", "w3")
        for step in range(3):
            fast.works(step, 4)
            server.reaches(step + 1)
        assert "step 2 is not used: it did not come" in server.said
        slow.ask(2)
        slow.next(SNAPSHOT_WANTED)
        assert server.collector.upload.seed == server.run.seed_of(2) != server.run.seed


def test_a_snapshot_is_checked_beside_the_loop(tmp_path, monkeypatch):
    """While it is read the coordinator answers, and a worker waits that would have to replay the run."""
    cfg, check, read = changed(SNAPSHOT_EVERY=4), snapshots.check, threading.Event()
    cluster(tmp_path, [FakeEngine(cfg, 0.003)], 10, cfg, save=True, drain=0)
    monkeypatch.setattr(snapshots, "check", lambda path: read.wait(60) and check(path))
    with Server(tmp_path, cfg, save=True) as server:
        peer = Peer2(server)
        peer.ask(0)
        assert peer.silent() and server.fetched() and server.shelf.doubtful
        read.set()
        assert peer.next(wire.REBUILD)[1] == server.shelf.newest.to_bytes(8, "big") > bytes(8)


def test_a_run_is_read_whatever_the_file_says_now(tmp_path, monkeypatch):
    """Also one of a program that took the digest of what differed from the file; one that somebody has copied here
    is not called damaged."""
    packed, state = filled(tmp_path, 3), initial_state(CFG)
    state.step, body = 2, snapshots.pack(state)
    with monkeypatch.context() as patch:
        patch.setattr(snapshots, "_values", lambda cfg: b"what an older program wrote here")
        old = snapshots._make_head(CFG, 2, state.seed, snapshots.state_hash(state), packed[1], len(body)) + body
    new, other = (snapshots._make_head(cfg, 2, state.seed, snapshots.state_hash(state), packed[1], len(body)) + body
                  for cfg in (CFG, changed(SIGMA_SHIFT=1)))
    path = tmp_path / "snapshot-00000002.egg"
    values = history.configuration(tmp_path)
    for name, value in ("ADAM_EPS", 0.5), ("HEAD_DIM", 32), ("MODEL", "gru"), ("SOFT_TARGETS", ((0, 9),)):
        monkeypatch.setitem(egg_config.CONSTANTS, name, egg_config.CONSTANTS[name]._replace(value=value))
    cfg = egg_config.load(environ={}, saved=values)
    assert cfg.saved() == CFG.saved()
    for data in old, new:
        path.write_bytes(data)
        assert digests(use.load(cfg, tmp_path, step=2, console=egg_net.Console(Lines())).state()) == digests(state)
    path.write_bytes(other)
    with closing(history.read_run(cfg, tmp_path)) as run:
        shelf = snapshots.Shelf(cfg, run)
    assert not shelf.files and [*shelf.damaged] == [f"{path} is of another configuration and not used"]


@mark.parametrize("lacks", ["activations", "units"])
def test_a_run_of_an_older_egg_is_refused_by_one_line(tmp_path, lacks):
    """Whoever opens it; what it holds are digits of all chunks."""
    open_run(UNITS, str(tmp_path)).close()
    path = tmp_path / history.FILE
    data = path.read_bytes()
    end = 16 + int.from_bytes(data[8:12], "little")
    header = json.loads(data[12:end - 4])
    header["config"]["PERTURB"] = lacks
    del header["config"]["FORMAT_OF_VOTES"]
    text = json.dumps(header, sort_keys=True).encode()
    path.write_bytes(history.with_crc(history.MAGIC + len(text).to_bytes(4, "little") + text) + data[end:])
    for opens in (lambda: open_run(UNITS, str(tmp_path)), lambda: history.read_run(UNITS, str(tmp_path)),
                  lambda: history.configuration(str(tmp_path))):
        with refused("is of an older egg, whose steps have another format: `egg.py export` of that egg and `egg.py "
                     "import` of this one begin a new run with its model", history.HistoryError):
            opens()


def test_constants_agree_by_an_edit_on_one_side(tmp_path, monkeypatch):
    """Coordinator and worker, also of older programs, whose digest is that of what differs from the shipped file."""
    with Server(tmp_path, save=True, steps=2, stay=True) as server:
        wanted = server.admission.config_digest
        monkeypatch.setitem(egg_config.CONSTANTS, "ADAM_EPS", egg_config.CONSTANTS["ADAM_EPS"]._replace(value=0.5))
        del server.admission.config_digest
        assert server.admission.config_digest == wanted
        server.admission.config_digest = bytes(32)
        server.work(FakeEngine(CFG))
        server.reaches(2)
