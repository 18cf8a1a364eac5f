"""The coordinator: serving a step, status, a full disk, kills, chaos, and local training."""

import json
import multiprocessing
import os
import re
import signal
import threading
from contextlib import closing
from time import sleep

import numpy as np
from pytest import mark

import egg_net
from cluster import history, snapshots, wire
from cluster.auth import Access
from cluster.status import describe_status
from cluster.wire import JOB_RESPONSE, REBUILD, VALIDATION
from model import parameters, steps
import load
from chaos_cluster import CHAOS, OFTEN, chaos
from coordinators import (named, Peer, Peer2, Server, cluster, asks, coordinator_process, filled, first_step,
                          free_port, kept, refused, until, upload, work_in_thread)
from fakes import CFG, FakeEngine, GOOD_STEP, Lines, SECRET, UNITS, changed, expected, full
from commands import process, train_here
from run_logs import events, of_kind


# --- what the disk, a kill and chaos do -------------------------------------------------------------------------------

def test_a_full_disk_ends_the_coordinator_with_a_line_and_the_run_goes_on_after(tmp_path):
    """The limit on the size of a file stands for the disk: a write that does not fit fails in the middle."""
    # so that it is larger than events.jsonl, which grows too
    filled(tmp_path, 60)
    size = (tmp_path / history.FILE).stat().st_size
    limit = ("import resource, sys; sys.dont_write_bytecode = True\n"           # it would be cut, and stay so
             f"resource.setrlimit(resource.RLIMIT_FSIZE, ({size + 250},) * 2)\n")
    coordinator, port = coordinator_process(tmp_path, before=limit)
    work_in_thread(port, FakeEngine(pause=0.001), retry=True)
    _, err = coordinator.communicate(timeout=60)
    kept = re.fullmatch(r"egg: .*history.egg: File too large: step (\d+) is not kept, all before it are; mend this and "
                        r"start the same command again\n", err)
    assert coordinator.returncode == 1 and kept, err
    with closing(history.open_run(CFG, tmp_path)) as run:
        assert run.step == int(kept[1]) > 60 and run.notices == []


def test_snapshots_that_cannot_be_written_do_not_end_the_run(tmp_path, monkeypatch):
    cfg = changed(SNAPSHOT_EVERY=2)
    monkeypatch.setattr(snapshots.Upload, "keep", full)
    server = cluster(tmp_path, [FakeEngine(cfg, 0.002)], 6, cfg, save=True)
    assert server.said.count("no more snapshots, No space left on device") == 1
    assert not [*tmp_path.glob("snapshot*")]


def test_workers_without_a_chunk_are_announced_once(tmp_path):
    with Server(tmp_path, changed(POPULATION_SIZE=2 * CFG.CHUNK_SIZE)) as server:
        workers = []

        def one_more():
            workers.extend(named(server, f"w{len(workers)}"))
            workers[-1].ask(0)
            until(lambda: server.dispatcher.known == len(workers))

        one_more()
        one_more()
        assert "workers, but a step" not in server.said
        one_more()
        workers.pop().close()
        server.has_workers(2)
        one_more()
        assert server.said.count("3 workers, but a step has 2 of the chunks that they share: some wait") == 1


def test_an_upload_ends_with_its_worker_and_with_no_other(tmp_path):
    with Server(tmp_path, changed(SNAPSHOT_EVERY=1), save=True) as server:
        giver, other = named(server, "w2", "w3")
        giver.works(0, 4)
        giver.ask(1, b"g" * 16)
        giver.next(wire.SNAPSHOT_WANTED)
        upload = server.collector.upload
        server._distrust(server.author("w3"))
        other.close()
        server.has_workers(1)
        assert upload and server.collector.upload is upload
        giver.close()
        until(lambda: server.collector.upload is None)
    assert not [*tmp_path.glob("*.part")]


def test_a_snapshot_of_one_that_had_drifted_is_removed(tmp_path):
    with Server(tmp_path, changed(SNAPSHOT_EVERY=1), save=True) as server:
        liar, one, other = named(server, "liar", "w0", "w1")
        engine = first_step(server, liar)
        state = engine.state()
        state.weights[5] ^= 1
        liar.ask(1, parameters.digest_of(state))
        assert liar.next(wire.SNAPSHOT_WANTED)[1] == (1).to_bytes(8, "big")
        upload(liar, state)
        until(lambda: server.shelf.newest == 1)
        assert asks(one, engine, REBUILD, JOB_RESPONSE) == (REBUILD, bytes(8))  # not from that snapshot
        assert server.shelf.newest == 0
        for peer in one, other:
            peer.ask(1, engine.digest())
        assert other.answer() and one.answer()
    assert not [*tmp_path.glob("snapshot*")]


@mark.parametrize("cfg", [CHAOS, UNITS.changed(**OFTEN)], ids=["weights", "units"])
def test_chaos_changes_no_bit(tmp_path, cfg):
    steps, kills = chaos(tmp_path, 1, steps=25, kills=15, cfg=cfg)
    assert steps >= 25 and kills >= 15


# --- status and load --------------------------------------------------------------------------------------------------

def test_status_as_a_table_and_as_json(tmp_path):
    secret, access = tmp_path / "secret", Access(SECRET)
    secret.write_bytes(SECRET)
    with Server(tmp_path, access=access) as server:
        server.work(FakeEngine(pause=0.01), access=access, name="node7/cuda:0")
        server.reaches(2)
        ask = f"status 127.0.0.1 --port {server.port}"
        table = process(ask, "--secret-file", secret)
        told = json.loads(process(ask, "--json", "--secret-file", secret).stdout)
    assert table.returncode == 0 and re.search(
        r"^step \d+, \d of 4 chunks done, [\d,]+ tokens/s, loss (.*\n)*node7/cuda:0 +fake +127.0.0.1:\d+ "
        r"+(computing|waiting|catching up) +\d+ +\d+ +[\d.e-]+ +\d\.\d s$", table.stdout, re.M), table
    assert told["step"] >= 2 and told["steps"] is None and told["tokens_per_second"] > 0
    worker, = told["workers"]
    assert worker["chunks"] >= 8 and worker["last_seen"] < 5


def test_the_link_of_a_worker_is_told_and_what_to_set_for_a_slow_one_once(tmp_path, monkeypatch):
    """Whatever a worker says of itself."""
    monkeypatch.setattr(egg_net, "LINK_SECONDS", 0.05)
    with Server(tmp_path, UNITS, stay=True) as server:
        near, far, odd = (Peer2(server, name=name) for name in ("near", "far", "odd"))
        for turn in range(4):
            near.send(wire.SPENT, 0.0, 0.0)
            far.send(wire.SPENT, 9.0 * turn, 0.04 * turn)
            odd.send(wire.SPENT, float("nan"), -float("inf"))
            sleep(0.1)
        server.says("of its time goes into")
        links = {worker["name"]: worker for worker in server.status()["workers"]}
        assert links["near"]["exchange"] == links["odd"]["idle"] == 0 and 10 < links["near"]["up"] < 1000
        assert links["far"]["idle"] == 1 and 0.1 < links["far"]["exchange"] < 0.7
        times = int(re.search(r"far .*: a new run with -D LOCAL_STEPS=(\d+) -D VOTE_LEVELS=7 sends", server.said)[1])
        assert 2 <= times <= 20
        assert server.said.count("of its time") == 1
        assert re.search(r"^far .* 100%  +\d", describe_status(server.fetched()), re.M)


def test_a_worker_tells_how_long_it_waited_and_received(tmp_path, monkeypatch):
    monkeypatch.setattr("cluster.link.HEARTBEAT_EVERY", 0.1)
    monkeypatch.setattr(egg_net, "LINK_SECONDS", 0.5)
    monkeypatch.setattr(egg_net, "SURE_AFTER", 1000)         # who has begun ahead is not idle
    with Server(tmp_path, save=True, stay=True) as server:
        other = Peer2(server, name="other")
        server.work(FakeEngine(CFG, 0.05), name="waits")
        until(lambda: server.run.step >= 2)
        other.ask(server.run.step)                   # and does nothing: the chunk is handed out again after a while
        until(lambda: (server.worker("waits").link["idle"] or 0) > 0.5)
    assert of_kind("link", events(tmp_path))


def test_with_local_steps_a_worker_knows_how_a_step_is_cooled_before_it_ends(tmp_path):
    cfg = UNITS.changed(LOCAL_STEPS=2, VOTE_LEVELS=7)
    with Server(tmp_path, cfg, steps=2) as server:
        peer = Peer2(server, cfg=cfg)
        for step, share in (0, 0.5), (1, 1.0):
            peer.ask(step)
            *_, payload = peer.next(wire.COOLING)
            peer.works(step, cfg.N_CHUNKS, packed=bytes(cfg.CHUNK_BYTES))
            until(lambda: server.run.step == step + 1)
            assert [*payload] == [server.run.fitness(step)[-1]] == [steps.cooling_at(share)]


def test_many_workers_are_served(tmp_path):
    did = load.measure(tmp_path, 100, 1.5, 0.1)
    # 300 results a second of one core, whatever else runs on it
    assert did["CPU ms a result"] < 10 / 3 and did["MB"] < 300, did


# --- serving ----------------------------------------------------------------------------------------------------------

def test_requests_are_held_and_woken(server):
    a, b, late = (Peer(server) for _ in range(3))
    assert [peer.chunk(0) for peer in (a, a, b, b)] == [0, 32, 64, 96]
    late.ask(0)
    assert late.silent()
    b.close()                                           # a holder leaves: its chunks are wanted at once
    assert {late.answer().first, late.chunk(0)} == {64, 96}
    late.ask(0)                                         # nothing left, but a step will be complete soon
    assert late.silent()
    for peer, position in zip((a, a, late, late), (0, 32, 64, 96)):
        peer.result(0, position)
    answer = late.answer()
    assert (answer.step, answer.seed, answer.packed) == (1, steps.next_seed(42, 0), GOOD_STEP)


def test_the_step_line_and_the_validation(tmp_path):
    with Server(tmp_path, steps=1, drain=0) as server:
        peer = Peer(server)
        for _ in range(4):
            position = peer.chunk(0)
            if not position:                                     # who holds chunk 0 validates
                peer.link.send(wire.frame(VALIDATION, 0, 100, 300, 300 * np.log(2)))
            peer.result(0, position, loss=4096, updates=5 * (position < 64))
    assert re.search(r"^Step 0 \| Tokens: 0\.00 M \| Loss: 1\.0000 \| Time: [\d.]+ ms \| Updates: 5 \(n=2, max=5\) \| "
                     r"Speed: [\d.]+ tok/s \| LR: 0\.5 \| Net: [\d.]+ MB/s \(Tx: \d+ B, Rx: \d+ B\) \| "
                     r"Val: 1\.00 bits/byte$",
                     server.said, re.M), server.said


# --- the coordinator as a command, and training -----------------------------------------------------------------------

def test_sigkill_and_sigterm_of_the_coordinator_lose_no_step(tmp_path):
    engine = FakeEngine(pause=0.001)
    first, port = coordinator_process(tmp_path, free_port())
    work_in_thread(port, engine, retry=True)
    until(lambda: engine.step >= 3)
    first.kill()
    first.communicate()
    second, _ = coordinator_process(tmp_path, port)
    for directory, at, words in ((tmp_path, 0, "egg: .*in use by another coordinator"),
                                 (tmp_path / "other", port, f"egg: port {port} is in use")):
        refused, nothing = coordinator_process(directory, at)
        assert nothing is None and re.match(words, refused.communicate()[1]) and refused.returncode == 1
    before = engine.step
    until(lambda: engine.step >= before + 3)
    second.send_signal(signal.SIGTERM)
    out, err = second.communicate(timeout=60)
    assert second.returncode == 0 and not err and f"the run lies in {tmp_path}\n" in out
    packed = kept(tmp_path)
    assert len(packed) >= 6 and packed == expected(len(packed))[0] and engine.loads == 0


def test_a_worker_process_that_dies_is_started_again_and_changes_nothing(small, compiled):
    # validation is off, so that the run is quick and its history all there is
    cfg, lines = small.changed(VALIDATE_EVERY=0, SAMPLE_EVERY=0), Lines()
    others = {*multiprocessing.active_children()}                # of other tests: the compilers of kernels
    thread = threading.Thread(target=train_here, args=(cfg, 80, lines, "killed"))
    thread.start()
    until(lambda: "Step 2 " in lines.text)
    for child in {*multiprocessing.active_children()} - others:
        child.kill()
    train_here(cfg, 80, Lines(), "undisturbed")
    thread.join(60)
    assert "the worker on cpu was killed by SIGKILL: starting it again" in lines.text
    packed = kept("killed", cfg)
    assert packed == kept("undisturbed", cfg) and len(packed) == 80
