"""What liars, stolen names and forged files cannot do: votes, validations, snapshots, leases, islands, files."""

import contextlib
import json
import os
import pickle
import random
import resource
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import zlib
from unittest import mock

import hypothesis
import numpy as np
import pytest
import pyzstd
from hypothesis import strategies as st

import egg
import egg_config
import egg_net
from cluster import admission, dispatch, event_log, history, leases, snapshots, trust, wire
from cluster.wire import JOB_RESPONSE
from islands import gossip, peers, transfer
from model import fitness_digits, parameters, state_digest
from tools import use
from kit import CFG, EXAMPLES, GOOD, HERE, FakeEngine, Peer, Peer2, Server, changed, cluster, until
from test_island import ISLE, Isle, Learner, Stranger

BAD = fitness_digits.pack_ternary(-np.ones(16, np.int8))


def caller(host, port, cfg=CFG, kind=Peer2, **values):
    """A peer whose connection comes from another address of this machine."""
    plain = socket.create_connection
    with mock.patch("socket.create_connection", lambda address, timeout=None: plain(address, timeout, (host, 0))):
        return kind(port, cfg, **values)


def told(server, words):
    until(lambda: words in server.lines.text)


# --- votes -----------------------------------------------------------------------------------------------------------

class Holder:
    def __init__(self, host, name):
        self.author = admission.Author(host, name, name)


def audit(step, chunk, *results):
    """Gives results (holder, packed) of a chunk; the names of those who are found to have lied."""
    liars = []
    for holder, packed in results:
        liars += step.result(holder, holder.author, chunk, packed, 5)
    return [author.name for author in liars]


def test_three_names_on_one_host_have_one_vote():
    sybils, honest = [Holder("1.1.1.1", f"s{i}") for i in range(3)], [Holder("2.2.2.2", "a"), Holder("3.3.3.3", "b")]
    step = leases.Step(CFG, [0])
    step.by_host = True
    assert audit(step, 0, *((s, BAD) for s in sybils), (honest[0], GOOD)) == [] and not step.done
    assert audit(step, 0, (honest[1], GOOD)) == ["s0", "s1", "s2"] and step.done[0][0] == GOOD
    votes = trust.Trust()
    for sybil in sybils:
        votes.judge(1, sybil.author, b"lie", False)
    assert votes.judge(1, honest[0].author, b"right", False)[0] == trust.REBUILD      # one against one
    verdict = votes.judge(1, honest[1].author, b"right", False)
    assert verdict[0] == trust.AGREES and {a.name for a in verdict[1]} == {"s0", "s1", "s2"}
    assert votes.judge(1, sybils[0].author, b"lie", True)[0] == trust.BAN
    certified = [holder.author._replace(certificate=holder.author.name) for holder in sybils]
    assert trust.tally({b"lie": set(certified)}) == {b"lie": 3}                          # machines behind one address


def test_one_host_cannot_fill_both_sides_of_an_audit():
    one, two, other = Holder("1.1.1.1", "one"), Holder("1.1.1.1", "two"), Holder("2.2.2.2", "other")
    step = leases.Step(CFG, [0])
    step.by_host = True
    assert step.take(one, one.author, 0) == 0
    assert [step.take(two, two.author, 0) for _ in range(4)] == [1, 2, 3, None]
    assert step.take(other, other.author, 0) == 0
    assert audit(step, 0, (one, BAD)) == [] and 0 not in step.done
    assert audit(step, 0, (two, BAD)) == [] and 0 not in step.done
    # results differ: now everybody is heard, and one wrong device of a host does not stop the others
    assert audit(step, 0, (other, GOOD)) == [] and 0 not in step.done
    third = Holder("1.1.1.1", "third")
    assert audit(step, 0, (third, GOOD)) == ["one", "two"] and step.done[0][0] == GOOD


def test_four_names_of_one_host_keep_no_lie(tmp_path):
    """Every chunk is audited: three sybils and two honest hosts."""
    cfg = changed(AUDIT_RATE=1.0)
    with Server(tmp_path, cfg) as server:
        sybils = [caller("127.0.0.2", server.port, cfg, name=f"s{i}") for i in range(3)]
        honest = [caller(f"127.0.0.{i}", server.port, cfg, name=f"h{i}") for i in (3, 4)]
        banned = 0
        for _ in range(40):
            for peer, packed in [(s, BAD) for s in sybils] + [(h, GOOD) for h in honest]:
                with contextlib.suppress(egg_net.NetError, OSError):
                    peer.ask(0)
                    try:
                        _, step, position, _ = peer.answer(0.02)
                    except TimeoutError:
                        continue
                    if step == 0:
                        peer.result(0, position, packed)
            banned = server.lines.text.count("banned s")
            if server.run.step:
                break
        assert server.run.step == 1 and banned >= 1 and "banned h" not in server.lines.text
        assert server.run.fitness(0) == fitness_digits.pack_ternary(np.ones(cfg.N_PAIRS, np.int8))


def test_what_a_banned_author_left_is_done_again_even_when_it_has_gone(tmp_path):
    with Server(tmp_path) as server:
        liar, other = Peer2(server.port, name="liar"), Peer2(server.port, name="other")
        assert liar.chunk(0) == 0
        liar.result(0, 0, BAD)
        until(lambda: 0 in server.coordinator.dispatcher.work.done)
        author = next(w.author for w in server.coordinator.dispatcher.workers if w.author.name == "liar")
        liar.link.close()
        until(lambda: len(server.coordinator.dispatcher.workers) == 1)
        server.coordinator.ban(author, "it lied about another chunk")
        assert 0 not in server.coordinator.dispatcher.work.done
        assert 0 in [other.chunk(0) for _ in range(4)]


def test_a_lying_peer_of_version_1_does_not_ban_its_host(tmp_path):
    with Server(tmp_path, save=True) as server:
        liar = Peer(server.port)
        assert liar.chunk(0) == 0
        server.coordinator.ban(next(iter(server.coordinator.dispatcher.workers)).author, "it lied")
        assert liar.closed()
        assert Peer(server.port).chunk(0) == 0
    assert not os.path.exists(tmp_path / admission.BANNED_FILE)


def test_the_digest_of_the_training_data_is_voted_on(tmp_path):
    lie, right = "ab" * 32, "cd" * 32
    with Server(tmp_path, save=True) as server:
        liar = caller("127.0.0.2", server.port, data=lie, name="liar")
        for _ in range(3):                                       # one host has one vote
            with pytest.raises(egg_net.NetError, match="other training data"):
                caller("127.0.0.3", server.port, data=right)
        assert server.run.data.hex() == lie
        honest = caller("127.0.0.4", server.port, data=right)
        assert server.run.data.hex() == right and honest.chunk(0) == 0
        with pytest.raises(egg_net.NetError, match="other training data"):
            liar.chunk(0)
    with Server(tmp_path, save=True) as server:                  # what is kept has a vote after a restart
        with pytest.raises(egg_net.NetError, match="other training data"):
            caller("127.0.0.2", server.port, data=lie)
        caller("127.0.0.3", server.port, data=right)
    assert (tmp_path / history.DATA_FILE).read_text().strip() == right


# --- validations -----------------------------------------------------------------------------------------------------

def validate(peer, step, tokens=100, n_bytes=200, nats=100.0):
    peer.link.send(peer.link.frame(wire.VALIDATION, step, tokens, n_bytes, nats))


@pytest.mark.parametrize("tokens, n_bytes, nats", [
    (1, 1, 1.7e308), (1, 0, 1e300), (100, 200, -1.0), (100, 200, float("nan")), (100, 200, float("inf")),
    (0, 1, 1.0), (1 << 40, 1, 1e6), (1, 1 << 40, 45.0)])
def test_a_validation_that_cannot_be_right_is_refused(tmp_path, tokens, n_bytes, nats):
    with Server(tmp_path) as server:
        peer = Peer2(server.port)
        assert peer.chunk(0) == 0
        validate(peer, 0, tokens, n_bytes, nats)
        with pytest.raises(egg_net.NetError, match="wrong validation"):
            peer.answer()


def test_a_validation_counts_from_the_holder_of_chunk_0_alone(tmp_path):
    cfg = changed(SNAPSHOT_EVERY=0)
    with Server(tmp_path, cfg) as server:
        progress = server.coordinator.progress
        for kind in (Peer, Peer2):                               # one that never worked
            idle = kind(server.port, cfg)
            validate(idle, 0, nats=0.0)
            assert idle.chunk(0) in (0, 32)
            if kind is Peer:
                idle.link.close()
                until(lambda: not server.coordinator.dispatcher.workers)
        assert progress.validations == []
        validate(idle, 0)                                        # it holds chunk 0 now, and is alone
        until(lambda: progress.validations)
        assert abs(progress.validations[0][1] - 100 / np.log(2) / 200) < 1e-9


def test_two_workers_must_state_the_same_validation(tmp_path):
    with Server(tmp_path, changed(VALIDATE_EVERY=0)) as server:
        progress = server.coordinator.progress
        liar, honest = (caller(f"127.0.0.{i}", server.port, name=f"w{i}") for i in (2, 3))
        third = caller("127.0.0.4", server.port, name="w4")
        assert liar.chunk(0) == 0 and honest.chunk(0) == 32 and third.chunk(0) == 64
        validate(liar, 0, nats=0.0)
        for again in range(3):
            validate(liar, 0, nats=0.0)                          # saying it twice does not help
        honest.result(0, 32)
        assert honest.chunk(0) in (0, 96)
        honest.result(0, 96)
        honest.result(0, 0) if honest.chunk(0) == 0 else None
        time.sleep(0.1)
        assert progress.validations == []
    with Server(tmp_path, changed(VALIDATE_EVERY=0)) as server:
        one, two = (caller(f"127.0.0.{i}", server.port, name=f"w{i}") for i in (2, 3))
        assert one.chunk(0) == 0 and two.chunk(0) == 32
        validate(one, 0)
        two.result(0, 32)
        position = two.chunk(0)
        while position != 0:                                     # chunk 0 is evaluated, and validated, by another host
            two.result(0, position)
            position = two.chunk(0)
        assert server.coordinator.progress.validations == []
        validate(two, 0, nats=100.0 * (1 + 1e-9))
        until(lambda: server.coordinator.progress.validations)


# --- snapshots -------------------------------------------------------------------------------------------------------

def forged(state):
    """Another State with the same digest: two words of the weights change places after mixing."""
    words, step = state.weights[:state.weights.size // 8 * 8].view("<u8"), int(state_digest.STEP)
    for k in range(100, words.size - 100):
        other = k + 50
        new = [(int(words[b]) + (b - a) * step) % (1 << 64) for a, b in ((k, other), (other, k))]
        if b"\x80" not in b"".join(w.to_bytes(8, "little") for w in new):
            changed_ = state.weights.copy()
            changed_[:state.weights.size // 8 * 8].view("<u8")[[k, other]] = new
            return type(state)(changed_, state.moments, state.overlay, state.step, state.seed)


def upload(peer, state):
    body = snapshots.pack(state)
    for at in range(0, len(body), wire.BLOCK):
        peer.link.send(peer.link.frame(wire.SNAPSHOT_DATA, state.step, len(body), at, body[at:at + wire.BLOCK]))


def hash_of(state):
    return lambda peer: peer.link.send(peer.link.frame(wire.STATE_HASH, state.step, snapshots.state_hash(state)))


def first_step(server, peers, cfg):
    """Completes step 0; the engine of the next one."""
    engine = FakeEngine(cfg)
    for chunk in range(4):
        peer = peers[chunk % len(peers)]
        peer.ask(0, engine.digest())
        assert peer.answer()[2] == 32 * chunk
        peer.result(0, 32 * chunk)
    until(lambda: server.run.step == 1)
    engine.update(np.ones(cfg.N_PAIRS, np.int8))
    return engine


def test_a_forged_snapshot_is_not_served_and_its_giver_banned(tmp_path):
    cfg = changed(SNAPSHOT_EVERY=1)
    with Server(tmp_path, cfg, save=True) as server:
        liar, one, two = (caller(f"127.0.0.{i}", server.port, cfg, name=f"w{i}") for i in (2, 3, 4))
        engine = first_step(server, (liar, one, two), cfg)
        state = engine.state()
        forgery = forged(state)
        assert state_digest.of_state(forgery) == engine.digest() and forgery.digests() != state.digests()
        liar.ask(1, engine.digest())
        assert liar.next(wire.SNAPSHOT_WANTED, timeout=5)[1] == (1).to_bytes(8, "big")
        upload(liar, forgery)
        liar.next(JOB_RESPONSE)
        shelf = server.coordinator.shelf
        for peer, newest in ((one, 0), (two, 0)):
            peer.ask(1, engine.digest())
            assert peer.next(wire.HASH_WANTED)[1] == (1).to_bytes(8, "big")
            assert shelf.newest == newest
            hash_of(state)(peer)
            peer.next(JOB_RESPONSE)
        with pytest.raises(egg_net.NetError, match="banned: its snapshot of step 1 is not the state of two others"):
            liar.answer()
        assert shelf.newest == 0
    assert not [name for name in os.listdir(tmp_path) if name.startswith("snapshot")]


def test_a_snapshot_is_served_once_another_host_has_stated_its_hash(tmp_path):
    cfg = changed(SNAPSHOT_EVERY=1)
    with Server(tmp_path, cfg, save=True) as server:
        giver, sybil, other = (caller(host, server.port, cfg, name=name) for host, name in
                               (("127.0.0.2", "giver"), ("127.0.0.2", "sybil"), ("127.0.0.3", "other")))
        engine = first_step(server, (giver, sybil, other), cfg)
        giver.ask(1, engine.digest())
        giver.next(wire.SNAPSHOT_WANTED)
        upload(giver, engine.state())
        giver.next(JOB_RESPONSE)
        sybil.ask(1, engine.digest())
        assert sybil.next(wire.HASH_WANTED, JOB_RESPONSE)[0] == JOB_RESPONSE        # its host has a say already
        until(lambda: server.coordinator.collector.upload.finished)
        hash_of(engine.state())(sybil)                                              # and nobody has asked
        other.ask(1, engine.digest())
        other.next(wire.HASH_WANTED)
        assert server.coordinator.shelf.newest == 0
        hash_of(engine.state())(other)
        until(lambda: server.coordinator.shelf.newest == 1)


def test_workers_that_do_not_know_the_hash_serve_as_before(tmp_path):
    cfg = changed(SNAPSHOT_EVERY=1)
    with Server(tmp_path, cfg, save=True) as server:
        giver, old = (caller(f"127.0.0.{i}", server.port, cfg, name=f"w{i}") for i in (2, 3))
        engine = first_step(server, (giver, old), cfg)
        giver.ask(1, engine.digest())
        giver.next(wire.SNAPSHOT_WANTED)
        upload(giver, engine.state())
        giver.next(JOB_RESPONSE)
        old.ask(1, engine.digest())
        position = old.answer()[2]                               # it has ignored HASH_WANTED
        assert server.coordinator.shelf.newest == 0
        old.result(1, position)
        until(lambda: server.coordinator.shelf.newest == 1)


def test_a_lonely_worker_gives_snapshots_and_a_real_pair_confirms_them(tmp_path):
    for engines in (1, 3):
        cfg = changed(SNAPSHOT_EVERY=2)
        at = tmp_path / str(engines)
        at.mkdir()
        cluster(at, [FakeEngine(cfg, 0.003) for _ in range(engines)], 9, cfg, save=True)
        run = history.open_run(cfg, at)
        assert snapshots.Shelf(cfg, run).newest >= 4
        run.close()


# --- leases ----------------------------------------------------------------------------------------------------------

def beat(server, holders, done, seconds=10):
    """Heartbeats of holders that deliver nothing, until done()."""
    end = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < end, "waited in vain"
        for holder in holders:
            holder.link.send(holder.link.frame(wire.HEARTBEAT))
            with contextlib.suppress(TimeoutError):              # asks for a chunk of every step, and for a second one
                holder.ask(holder.answer(0.001)[1])
        time.sleep(0.05)


def test_a_lease_ends_though_no_usual_time_is_known(tmp_path):
    cfg = changed(POPULATION_SIZE=32, STRAGGLER_TIMEOUT=0.4)
    with Server(tmp_path, cfg) as server:
        holder, honest = (caller(f"127.0.0.{i}", server.port, cfg, name=f"w{i}") for i in (2, 3))
        assert holder.chunk(0) == 0
        honest.ask(0)
        beat(server, [holder], lambda: "has not delivered for 0.4 s, its chunk 0 is handed out again"
             in server.lines.text)
        assert honest.answer()[2] == 0
        honest.result(0, 0)
        until(lambda: server.run.step == 1)


@pytest.mark.parametrize("audited", [0.0, 1.0])
def test_six_holders_that_only_beat_do_not_stop_eight_chunks(tmp_path, monkeypatch, audited):
    """Audited chunks wait for the holders, which are another host, until one of them is found out."""
    cfg = changed(POPULATION_SIZE=32 * 8, STRAGGLER_TIMEOUT=0.8, VALIDATE_EVERY=0, AUDIT_RATE=audited)
    monkeypatch.setattr(dispatch, "LEAST_LEASE", 0.3)
    monkeypatch.setattr(egg_net, "AUDIT_PATIENCE", 0.5)
    with Server(tmp_path, cfg) as server:
        holders = [caller("127.0.0.2", server.port, cfg, name=f"h{i}") for i in range(6)]
        honest = caller("127.0.0.3", server.port, cfg, name="honest")
        for holder in holders:
            holder.ask(0)

        def work():
            with contextlib.suppress(TimeoutError):
                while server.run.step < 3:
                    honest.ask(server.run.step) if not work.open else None
                    work.open = True
                    _, step, position, packed = honest.answer(0.02)
                    work.open = False
                    if not packed:
                        time.sleep(0.01)
                        honest.result(step, position)
            return server.run.step >= 3

        work.open = False
        started = time.monotonic()
        beat(server, holders, work, 20)
        assert time.monotonic() - started < 8, f"{time.monotonic() - started:.1f} s"


def test_copies_go_to_another_host_and_do_not_run_out():
    step = leases.Step(CFG)
    step.by_host = True
    one, two, other, more = (Holder(h, n) for h, n in (("1", "one"), ("1", "two"), ("2", "other"), ("3", "more")))
    assert step.take(one, one.author, 0) == 0
    assert step.copy(two, two.author, 9, [0]) is None and step.copy(other, other.author, 9, [0]) == 0
    assert step.late(11, 1.0) == [] and step.late(13, 1.0) == [0] and step.copy(more, more.author, 13, [0]) == 0


# --- islands ---------------------------------------------------------------------------------------------------------

def test_a_state_that_comes_too_slowly_is_given_up_and_its_giver_distrusted(tmp_path, monkeypatch):
    monkeypatch.setattr(transfer, "STALLED", 0.5)
    with Isle(tmp_path, "a", 3) as a:
        liar, cfg, size = Stranger(a.port, "liar"), a.coordinator.cfg, snapshots.most_bytes(a.coordinator.cfg)
        head = snapshots._make_head(cfg, 1, 1, b"s" * 32, b"", size)
        data = head + snapshots.pack(parameters.initial_state(cfg))
        until(lambda: a.run.step > 10)
        liar.say(0.0, state=b"s" * 32)
        until(lambda: a.island.incoming)
        with contextlib.suppress(TimeoutError):
            while True:                          # the head, then byte by byte, as long as it is asked for more
                wanted, at, _ = wire.STATE_REQUEST.unpack(liar.next(wire.STATE_REQUEST, 1))
                total, piece = len(head) + size, data[at:at + 1] if at else head
                liar.send(wire.STATE, wanted, total, at, piece)
                time.sleep(0.05)
        told(a, "too little came")
        assert not a.island.incoming and a.island.peers.distrusted
        a.island.peers.check(time.monotonic() + 2 * peers.DISTRUST)
        assert not a.island.peers.distrusted


def test_one_host_cannot_fill_the_table_of_peers_and_who_is_gone_is_forgotten(tmp_path, monkeypatch):
    monkeypatch.setattr(peers, "MOST_OF_HOST", 5)
    with Isle(tmp_path, "a", 3) as a:
        known = a.island.peers.known
        for i in range(12):                                      # they come and go
            Stranger(a.port, f"name{i}", seed=100 + i).link.close()
            until(lambda: not any(peer.session for peer in known.values()))
        assert len(known) <= 5
        stay = [Stranger(a.port, f"stay{i}", seed=200 + i) for i in range(5)]
        with pytest.raises(egg_net.NetError, match="5 islands are known here, the maximum for one host"):
            Stranger(a.port, "more", seed=300)
        other = caller("127.0.0.3", a.port, ISLE, lambda port, cfg: Stranger(port, "other", seed=301))
        until(lambda: set(known) == {"other", *(f"stay{i}" for i in range(5))})
        with pytest.raises(egg_net.NetError, match="an island of this name is connected from 127.0.0.3"):
            Stranger(a.port, "other", seed=302)                  # a name that is in use cannot be taken over
        for one in (*stay, other):
            one.link.close()
        until(lambda: not any(peer.session for peer in known.values()))
        a.island.peers.check(time.monotonic() + 2 * peers.FORGOTTEN)
        assert not known


def test_the_own_state_of_a_merge_is_confirmed_too(tmp_path, monkeypatch):
    """Two workers: one gives the state with which an epoch begins, the other one states its hash."""
    hashed, plain = [], snapshots.state_hash

    def state_hash(state, *kind):
        hashed.extend([] if kind else [state.step])                  # SHA-256 is that of a snapshot's head
        return plain(state, *kind)

    monkeypatch.setattr(snapshots, "state_hash", state_hash)
    cfg = ISLE.changed(REJUVENATE_AFTER=12, SNAPSHOT_EVERY=1000)
    with Isle(tmp_path, "a", 0, cfg=cfg) as a:
        for _ in range(2):
            a.work(Learner(a.cfg, 0))
        until(lambda: a.told("rejuvenated"), 20)
        step = a.told("rejuvenated")[0]["step"]
        assert hashed == [step] and "goes on with the own state" not in a.lines.text
        until(lambda: a.run.step > step + 2)


def test_coming_and_going_does_not_fill_the_log(tmp_path):
    with Isle(tmp_path, "a", 3) as a:
        for _ in range(150):
            Stranger(a.port, "moth").link.close()
        assert a.lines.text.count("peer moth") < 100


# --- files -----------------------------------------------------------------------------------------------------------

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
    fields = history.RECORD.pack(len(body), run.step, 0, 0, run.seed)
    return fields + zlib.crc32(fields).to_bytes(4, "little") + body + zlib.crc32(body).to_bytes(4, "little")


def test_forged_histories_and_checkpoints_take_no_memory(tmp_path):
    (tmp_path / "cpp").mkdir()
    (tmp_path / "cpp" / "checkpoint_00200000000.bin").write_bytes(b"x")
    run = history.open_run(CFG, tmp_path / "bomb")
    bomb = record(run, pyzstd.compress(bytes(1 << 30)))                       # 1 GiB in 32 KB
    small = record(run, pyzstd.compress(bytes(1 << 20), 19))                  # 1 MiB in a body of the right size
    run.close()
    for name, data in (("bomb", bomb), ("small", small)):
        header = (tmp_path / "bomb" / history.FILE).read_bytes()[:run._offsets[0]]
        (tmp_path / name).mkdir(exist_ok=True)
        (tmp_path / name / history.FILE).write_bytes(header + data)
    (tmp_path / "header").mkdir()
    with open(tmp_path / "header" / history.FILE, "wb") as file:
        file.write(history.MAGIC + (1 << 31).to_bytes(4, "little"))
        file.truncate(1 << 33)                                                # sparse
    (tmp_path / "long").mkdir()
    (tmp_path / "long" / history.FILE).write_bytes(header)
    os.truncate(tmp_path / "long" / history.FILE, 1 << 40)
    for name, words in (("cpp", "checkpoint_00000001.bin is missing"), ("bomb", "damaged at byte"),
                        ("small", "step 0 cannot be read"), ("header", "damaged in its header"),
                        ("long", "damaged at byte")):
        status, said = in_memory(OPEN, tmp_path / name)
        assert status == 0 and words in said and said.count("\n") == 1, (name, status, said)


IMPORT = """
import sys, egg_config
from tools import use
try:
    cfg = egg_config.make(**use.read_config(sys.argv[1]))
    use.import_(cfg, sys.argv[1], sys.argv[2])
except egg_config.EggError as error:
    print(error)
"""


def test_a_small_file_with_a_large_configuration_is_not_imported(tmp_path):
    cfg = egg_config.make(HIDDEN_DIM=1024, N_LAYERS=64, VOCAB_SIZE=65536)
    config = json.dumps(cfg.saved())
    use.write_tensors(tmp_path / "small", {"embedding": np.zeros((4, 4), np.int8)}, {"config": config})
    with open(tmp_path / "sparse", "wb") as file:
        header = json.dumps({"embedding": {"dtype": "I8", "shape": [1 << 20, 1 << 14], "data_offsets": [0, 1 << 34]},
                             "__metadata__": {"config": config}}).encode()
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + (1 << 34))
    for name, megabytes in (("small", 700), ("sparse", 20_000)):
        started = time.monotonic()
        status, said = in_memory(IMPORT, tmp_path / name, tmp_path / "run", megabytes=megabytes)
        assert status == 0 and "this configuration has" in said and said.count("\n") == 1, said
        assert time.monotonic() - started < 20


@pytest.mark.parametrize("config", ["5", "[1]", "null", '"x"', "{", "[" * 100_000, '{"LR_SCHEDULE": [1]}',
                                    '{"LR_SCHEDULE": {"a": 1}}', '{"LR_SCHEDULE": [[0, "x"]]}',
                                    '{"HIDDEN_DIM": {"a": [1]}}', '{"INPUT_FILE": 5}', '{"NO_SUCH": 1}', 5])
def test_an_odd_configuration_of_an_import_is_one_line(tmp_path, config, capsys):
    header = json.dumps({"embedding": {"dtype": "I8", "shape": [4, 4], "data_offsets": [0, 16]},
                         "__metadata__": {"config": config}}).encode()
    (tmp_path / "x").write_bytes(len(header).to_bytes(8, "little") + header + bytes(16))
    assert egg.main(["import", str(tmp_path / "x"), "--save-dir", str(tmp_path / "run")]) in (1, 2)
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.parametrize("change", [
    {"config": 5}, {"config": [[1, 2]]}, {"version": {}}, {"version": 9}, {"start": 3},
    {"start": {"step": "x", "seed": 1}}, {"start": {"step": 1 << 63, "seed": 1}}, {"start": {"step": -1, "seed": 1}},
    {"start": {"step": 1, "seed": 1 << 40}},
    {"start": {"step": 1, "seed": 1, "state": "zz"}}, {"start": {"step": 1, "seed": 1, "origin": 7}},
    {"start": {"step": 1, "seed": 1, "origin": {"epoch": "1", "digest": ""}}},
    {"start": {"step": 1, "seed": 1, "more": 1}}, "[" * 100_000, "5", "null", "[]", '"\\ud800"'])
def test_an_odd_header_of_a_history_is_one_line(tmp_path, change):
    run = history.open_run(CFG, tmp_path)
    run.close()
    data = (tmp_path / history.FILE).read_bytes()
    header = json.loads(data[12:-4])
    text = change.encode() if isinstance(change, str) else json.dumps({**header, **change}).encode()
    data = history.MAGIC + len(text).to_bytes(4, "little") + text
    (tmp_path / history.FILE).write_bytes(data + zlib.crc32(data).to_bytes(4, "little"))
    for call in (lambda: history.open_run(CFG, tmp_path), lambda: history.configuration(tmp_path),
                 lambda: history.epochs(tmp_path)):
        with contextlib.suppress(history.HistoryError):
            call()
    with pytest.raises(history.HistoryError) as error:
        history.open_run(CFG, tmp_path)
    assert "\n" not in str(error.value)


def test_links_pipes_and_huge_files_in_a_save_directory_are_left_alone(tmp_path):
    source, secret = tmp_path / "source", tmp_path / "secret"
    run = history.open_run(CFG, source)
    secret.write_text("a file of this user")
    for name in ("elite-000-00000001-loss-1.0000.egg", "history-000.egg", "history-secret", "elite-secret",
                 "snapshot-00000002.egg"):
        os.symlink(secret, source / name)
    os.symlink("/dev/zero", source / "history-001.egg")
    os.mkfifo(source / "snapshot-00000003.egg")
    os.mkfifo(source / "elite-000-00000002-loss-1.0000.egg")
    os.unlink(source / history.SETTINGS)
    os.symlink(secret, source / history.SETTINGS)
    with open(source / "snapshot-00000004.egg", "wb") as file:
        file.truncate(1 << 42)
    with open(source / "history-002.egg", "wb") as file:
        file.write(b"x")
        file.truncate(1 << 28)                                   # small enough, but with a hole
    for name in ("banned.txt", "coordinator.log", history.EVENTS):
        os.symlink(secret, source / name)
    run.close()
    history.open_run(CFG, tmp_path / "target", source).close()
    assert sorted(os.listdir(tmp_path / "target")) == [history.FILE, history.SETTINGS]
    run = history.open_run(CFG, source)
    assert snapshots.Shelf(CFG, run).files == {} and gossip.Elites(source, 3).best(CFG) is None
    bans = admission.Bans(source)
    bans.add("w1", "it lied")
    assert bans.all() == {"w1": "it lied"}
    for name in ("coordinator.log", history.EVENTS):
        with pytest.raises(event_log.WatchError):
            event_log.JsonLog(str(source / name), "", None)
    assert secret.read_text() == "a file of this user"                       # and nothing was written through a link
    run.close()
    with pytest.raises(OSError, match="regular"):
        history.open_file(source / "history-000.egg")
    with pytest.raises(OSError, match="too large"):
        snapshots.read(CFG, source / "snapshot-00000004.egg")
    os.replace(source / history.FILE, tmp_path / "moved")
    os.symlink(tmp_path / "moved", source / history.FILE)
    with pytest.raises(history.HistoryError, match="not a regular file"):
        history.open_run(CFG, source)


@pytest.mark.parametrize("spoil", [lambda s: s.weights.__setitem__(3, -128), lambda s: s.overlay.__setitem__(3, -128),
                                   lambda s: s.moments.__setitem__((3, 0), np.nan),
                                   lambda s: s.moments.__setitem__((3, 2), -np.inf)])
def test_a_worker_loads_no_state_that_import_would_refuse(tmp_path, spoil):
    cfg = changed(SNAPSHOT_EVERY=2)
    state = parameters.initial_state(cfg)
    state.overlay = np.zeros(max(8, state.overlay.size), np.int8)[:parameters.n_overlay(cfg)]
    spoil(state)
    state.step = 4
    snapshots.save(cfg, state, tmp_path)
    with pytest.raises(ValueError, match="it holds"):
        snapshots.read(cfg, tmp_path / "snapshot-00000004.egg")


# --- the cache of kernels --------------------------------------------------------------------------------------------

@pytest.fixture
def cache(tmp_path, monkeypatch):
    """A function that gives the directory of the cache, as in a new process."""
    from engine import kernel_cache
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    (tmp_path / "tmp").mkdir()

    def directory():
        kernel_cache.directory.cache_clear()
        return kernel_cache.directory()

    yield directory
    kernel_cache.directory.cache_clear()


def test_a_cache_that_others_could_have_made_is_not_used(tmp_path, cache):
    kernels, fallback = tmp_path / "cache" / "egg" / "kernels", tmp_path / "tmp" / f"egg-{os.getuid()}"
    assert cache() == kernels and kernels.stat().st_mode & 0o777 == 0o700
    for spoil, mend in ((lambda: kernels.chmod(0o750), lambda: kernels.chmod(0o700)),
                        (lambda: kernels.parent.chmod(0o777), lambda: kernels.parent.chmod(0o755)),
                        (lambda: (tmp_path / "cache").chmod(0o777), lambda: (tmp_path / "cache").chmod(0o755))):
        spoil()
        assert cache() == fallback
        mend()
    moved = tmp_path / "elsewhere"
    kernels.rename(moved)
    kernels.symlink_to(moved)
    assert cache() == fallback
    fallback.chmod(0o777)
    private = cache()
    assert private not in (kernels, fallback, moved) and private.stat().st_mode & 0o777 == 0o700


def test_a_kernel_that_is_not_ours_or_a_link_is_not_read(tmp_path):
    from engine import kernel_cache
    kernel_cache.write(tmp_path / "kernel", pickle.dumps("compiled"))
    assert kernel_cache.read(tmp_path / "kernel") == "compiled"
    os.symlink(tmp_path / "kernel", tmp_path / "link")
    assert kernel_cache.read(tmp_path / "link") is None
    with mock.patch("os.getuid", lambda: os.geteuid() + 1):
        assert kernel_cache.read(tmp_path / "kernel") is None


def test_old_kernels_are_removed(tmp_path):
    from engine import kernel_cache
    now = time.time()
    for i, days in enumerate((400, 100, 30, 1)):
        path = tmp_path / f"cpu-kernel-{i}"
        path.write_bytes(bytes(1000))
        os.utime(path, (now - days * 86400,) * 2)
    kernel_cache.prune(tmp_path, most=2000)
    assert sorted(os.listdir(tmp_path)) == ["cpu-kernel-2", "cpu-kernel-3"]
    kernel_cache.read(tmp_path / "cpu-kernel-2")                 # is used now
    kernel_cache.prune(tmp_path, most=1500)
    assert os.listdir(tmp_path) == ["cpu-kernel-2"]


# --- at random -------------------------------------------------------------------------------------------------------

@hypothesis.given(st.integers(0, 1 << 64))
def test_no_sybils_have_a_lie_kept_or_an_honest_author_accused(seed):
    """Two honest hosts and one liar with many names, on one step of which every chunk is audited, in any order."""
    dice, step = random.Random(seed), leases.Step(CFG, range(CFG.N_CHUNKS))
    step.by_host = True
    liars = [Holder("6.6.6.6", f"liar{i}") for i in range(dice.randint(1, 5))]
    honest = [Holder(f"1.1.1.{i % 2}", f"honest{i}") for i in range(dice.randint(2, 4))]
    accused, held = set(), []
    for turn in range(60):
        who, act = dice.choice(liars + honest), dice.choice(["take", "copy", "result", "result", "back", "withdraw"])
        if act in ("take", "copy"):
            chunk = step.take(who, who.author, turn) if act == "take" else \
                step.copy(who, who.author, turn, step.late(turn, 0.1))
            held += [(who, chunk)] * (chunk is not None)
        elif act == "withdraw" and accused:
            step.withdraw(dice.choice(sorted(accused)))
        elif held:
            who, chunk = held.pop(dice.randrange(len(held)))
            if act == "back":
                step.give_back(who, chunk)
            else:
                lie = who in liars and dice.random() < 0.5
                accused |= set(step.result(who, who.author, chunk, BAD if lie else GOOD, 5))
    assert not accused & {holder.author for holder in honest}
    assert all(packed == GOOD for packed, _ in step.done.values())
    for who, chunk in held:                                      # every lease ends
        step.give_back(who, chunk)
    for _ in range(100):                                         # and the honest can end it, whatever happened before
        for who in honest:
            chunk = step.take(who, who.author, 0) if not step.complete else None
            if chunk is None and not step.complete:
                chunk = step.copy(who, who.author, 1e9, step.late(1e9, 0.1))
            if chunk is not None:
                accused |= set(step.result(who, who.author, chunk, GOOD, 5))
    assert step.complete and all(packed == GOOD for packed, _ in step.done.values())
    assert not accused & {holder.author for holder in honest}


@hypothesis.given(st.lists(st.tuples(st.integers(0, 6), st.integers(0, 2), st.booleans()), max_size=40))
def test_no_sybils_outvote_two_honest_hosts(votes):
    """Names 0 and 1 are honest, of two hosts, the others of one liar. votes: (name, what it states, rebuilt)."""
    hosts = ["1.1.1.1", "2.2.2.2"] + ["6.6.6.6"] * 5
    authors = [admission.Author(host, str(i), str(i)) for i, host in enumerate(hosts)]
    kept = trust.Trust()
    for name, state, rebuilt in votes:
        kept.judge(1, authors[name], b"right" if name < 2 else b"lie%d" % state, rebuilt)
        kept.confirms(1, authors[name], (1, 1, 5.0) if name < 2 else (1, 1, float(state)), True, True)
    for name in (0, 1):
        verdict = kept.judge(1, authors[name], b"right", True)
    assert verdict[0] == trust.AGREES and not verdict[1] & set(authors[:2]) and kept.decided(1)
    assert kept.leading(1) == b"right" and not kept.contradicts(1, b"right")
    for name in range(2, 7):                                     # now only liars can be wrong
        verdict = kept.judge(1, authors[name], b"lie", True)
        assert verdict[0] == trust.BAN


NAMES = [history.FILE, "history-000.egg", "history-001.egg", "snapshot-00000001.egg", "snapshot-00000002-1.5000.egg",
         "snapshot-99999999999999999999.egg", "elite-000-00000001-loss-1.0000.egg",
         "elite-001-00000002-validation-2.0000.egg", history.SETTINGS,
         history.DATA_FILE, history.EVENTS, "banned.txt", "latest.egg", "checkpoint_00000001.bin",
         "checkpoint_00000002.bin", "snapshot-x.part"]
KINDS = st.one_of(
    st.tuples(st.just("link"), st.sampled_from(["/dev/zero", "/etc/hostname", "nowhere", ".", "history.egg", "../x"])),
    st.tuples(st.just("pipe"), st.none()), st.tuples(st.just("folder"), st.none()),
    st.tuples(st.just("sparse"), st.integers(0, 1 << 43)), st.tuples(st.just("bytes"), st.binary(max_size=200)),
    st.tuples(st.just("cut"), st.integers(0, 3000)), st.tuples(st.just("flip"), st.integers(0, 1 << 20)),
    st.tuples(st.just("grown"), st.integers(0, 1 << 43)))


@pytest.fixture(scope="module")
def good_directory(tmp_path_factory):
    """A save directory with a file of every kind."""
    at = tmp_path_factory.mktemp("good")
    run = history.open_run(CFG, at)
    state = parameters.initial_state(CFG)
    for step in (1, 2):
        run.append(GOOD_STEP, 5, 0)
        state.step = step
        snapshots.save(CFG, state, at)
    run.keep_data(b"d" * 32)
    run.close()
    for name in NAMES:
        if not (at / name).exists():
            (at / name).write_bytes((at / "snapshot-00000002.egg").read_bytes() if name.endswith(".egg") else b"x")
    return at


GOOD_STEP = fitness_digits.pack_ternary(np.ones(CFG.N_PAIRS, np.int8))


@hypothesis.settings(max_examples=EXAMPLES // 6)
@hypothesis.given(st.lists(st.tuples(st.sampled_from(NAMES), KINDS), min_size=1, max_size=5))
def test_any_files_in_a_save_directory_end_in_a_run_or_a_line(good_directory, changes):
    """Links, pipes, folders, sparse, cut, changed and huge files: no other error, no waiting, no memory."""
    with tempfile.TemporaryDirectory() as top:
        at, began = os.path.join(top, "run"), time.process_time()      # not that of a disk under load
        shutil.copytree(good_directory, at)
        for name, (kind, what) in changes:
            path = os.path.join(at, name)
            data = open(path, "rb").read() if os.path.isfile(path) and os.path.getsize(path) < 1 << 20 else b"x"
            if os.path.isdir(path) and not os.path.islink(path):
                continue
            os.unlink(path)
            if kind == "link":
                os.symlink(what, path)
            elif kind == "pipe":
                os.mkfifo(path)
            elif kind == "folder":
                os.mkdir(path)
            else:
                if kind == "flip" and data:
                    byte, bit = divmod(what % (8 * len(data)), 8)
                    data = data[:byte] + bytes([data[byte] ^ 1 << bit]) + data[byte + 1:]
                with open(path, "wb") as file:
                    file.write(b"" if kind == "sparse" else what if kind == "bytes" else data)
                    if kind in ("sparse", "cut", "grown"):
                        with contextlib.suppress(OSError):       # larger than this file system can hold
                            file.truncate(what)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        for call in (history.configuration, history.epochs, lambda _: history.newest(os.path.join(top, "r*")),
                     lambda at: read_all(history.read_run(CFG, at)), lambda at: read_all(history.open_run(CFG, at)),
                     lambda at: read_all(history.open_run(CFG, os.path.join(top, "copy"), at))):
            with contextlib.suppress(history.HistoryError):
                call(at)
        gossip.Elites(at, 3).best(CFG)
        assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 300 << 10, "KiB of memory"
        assert time.process_time() - began < 20
        kept = [os.path.join(top, "copy", name) for name in os.listdir(os.path.join(top, "copy"))] \
            if os.path.isdir(os.path.join(top, "copy")) else []
        assert not any(os.path.islink(path) and not path.endswith(("latest.egg", "best.egg")) for path in kept)


def read_all(run):
    try:
        for step in range(run.start.step, run.step):
            run.fitness(step)
        shelf = snapshots.Shelf(CFG, run)
        for step in shelf.files:
            with contextlib.suppress(ValueError, OSError):
                shelf.state(step)
        shelf.block(shelf.newest, 0, 100)
        shelf.close_unread()
    finally:
        run.close()
