"""Digests and snapshots: what a state is, who may give one, and what is kept."""

import contextlib
import os
import shutil
import time

import numpy as np
import pytest
import pyzstd

import egg_net
from cluster import history, snapshots, wire
from cluster.wire import JOB_RESPONSE
from model import parameters, state_digest
from coordinators import Server, caller, cluster, until, whole, work_in_thread
from fakes import CFG, FakeEngine, Lines, any_fitness, changed, expected, feed


# --- digests ----------------------------------------------------------------------------------------------------------

def test_the_digest_is_that_of_the_specification_and_any_bit_changes_it():
    """SPEC 16 in plain integers; then every part of the state, pieces of any size, and the CPU engine."""
    from engine import cpu_engine
    most = (1 << 64) - 1
    cfg = changed(VOCAB_SIZE=301)                                # an overlay that is no multiple of 8 bytes
    rng, state = np.random.default_rng(1), parameters.initial_state(cfg)
    state.moments[:] = rng.normal(size=state.moments.shape)
    state.overlay[:] = rng.integers(-127, 128, state.overlay.size)
    state.step, state.seed = 9, 4000000000
    data = (9).to_bytes(8, "little") + state.seed.to_bytes(8, "little") + state.weights.tobytes()
    data += state.moments.tobytes() + state.overlay.tobytes()
    data += bytes(-len(data) % 8)
    first = second = 0
    for number in range(1, len(data) // 8 + 1):
        x = int.from_bytes(data[8 * number - 8:8 * number], "little") + number * 0x9E3779B97F4A7C15 & most
        x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & most
        x = (x ^ x >> 27) * 0x94D049BB133111EB & most
        x ^= x >> 31
        first, second = first + x, second + (x & 0xFFFFFFFF) * (x >> 32)
    digest = state_digest.of_state(state)
    assert digest == (first & most).to_bytes(8, "little") + (second & most).to_bytes(8, "little")
    assert state.overlay.size % 8
    pieces = state_digest.Digest(9, state.seed)
    for at in range(16, len(data), 99991):
        pieces.update(data[at:min(at + 99991, 16 + sum(snapshots.sizes(cfg)[:2]) + state.overlay.size)])
    assert pieces.digest() == digest
    for threads in (1, None):
        engine = cpu_engine.CpuEngine(cfg, threads=threads)
        engine.load(state)
        assert engine.digest() == digest
        engine.update(any_fitness(cfg, rng))
        assert engine.digest() == state_digest.of_state(engine.state()) != digest
    seen = {digest}
    for array in (state.weights, state.moments.view(np.uint8).ravel(), state.overlay):
        for at in (0, 1, array.size - 1, *rng.integers(0, array.size, 10)):
            for bit in (1, -128):
                array.view(np.int8)[at] ^= bit
                seen.add(state_digest.of_state(state))
                array.view(np.int8)[at] ^= bit
    state.step += 1
    seen.add(state_digest.of_state(state))
    state.step, state.seed = 9, state.seed + 1
    seen.add(state_digest.of_state(state))
    state.seed -= 1
    state.moments[[3, 5000]] = state.moments[[5000, 3]]
    seen.add(state_digest.of_state(state))
    assert len(seen) == 1 + 3 * 13 * 2 + 3


def test_training_data_are_told_apart():
    tokens = np.arange(100_000, dtype=np.uint32)
    digest = snapshots.data_digest(tokens)
    for other in (tokens[:-1], tokens.astype(np.uint8), np.where(tokens == 70_000, 0, tokens).astype(np.uint32)):
        assert snapshots.data_digest(other) != digest
    assert snapshots.data_digest(tokens.copy()) == digest and snapshots.data_digest(None) == bytes(32)


# --- snapshots --------------------------------------------------------------------------------------------------------

def test_a_snapshot_is_the_state_and_any_changed_byte_is_found(tmp_path):
    rng, state = np.random.default_rng(1), parameters.initial_state(CFG)
    state.moments[:] = np.abs(rng.normal(size=state.moments.shape))
    state.step, state.seed = 20, 77
    run = history.open_run(CFG)
    upload, body = snapshots.Upload(CFG, 20, 77, state_digest.of_state(state), tmp_path), snapshots.pack(state)
    for at in range(0, len(body), 10000):
        assert not upload.finished
        feed(upload, len(body), at, body[at:at + 10000])
    assert upload.finished
    upload.keep(tmp_path / "s", b"fitness")
    data = (tmp_path / "s").read_bytes()
    back = snapshots.unpack(CFG, data)
    assert back.digests() == state.digests() and (back.step, back.seed) == (20, 77)
    for at in [*range(snapshots.HEAD.size + 4), *rng.integers(0, len(data), 60)]:
        bad = bytearray(data)
        bad[at] ^= 1 << at % 8
        if at < snapshots.HEAD.size + 4:
            with pytest.raises(ValueError, match="snapshot"):
                snapshots.unpack(CFG, bytes(bad))
        else:
            with contextlib.suppress(ValueError):                # zstd does not use every bit
                assert snapshots.unpack(CFG, bytes(bad)).digests() == state.digests()
    for bad in (b"", data[:100], data[:-1], data + b"x", history.MAGIC):
        with pytest.raises(ValueError):
            snapshots.unpack(CFG, bad)
    with pytest.raises(ValueError, match="another configuration"):
        snapshots.unpack(changed(SIGMA_SHIFT=1), data)
    run.close()


@pytest.mark.parametrize("pieces", [
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
    body = snapshots.pack(parameters.initial_state(CFG))
    upload = snapshots.Upload(CFG, 20, 77, bytes(16), tmp_path)
    started = time.thread_time()
    with pytest.raises(ValueError):
        for piece in pieces(body):
            feed(upload, *piece)
    upload.drop()
    assert not os.listdir(tmp_path) and time.thread_time() - started < 1


def test_a_late_worker_joins_by_a_snapshot_and_old_ones_go(tmp_path):
    from model import data_files
    cfg = changed(SNAPSHOT_EVERY=4)
    validation = data_files.Validation(np.zeros((3, 9), np.int32), 12, "bits/byte")
    packed, digests = expected(22)
    with Server(tmp_path, cfg, save=True, steps=22, stay=True) as server:
        work_in_thread(server.port, FakeEngine(cfg, 0.003), cfg, validation=validation)
        until(lambda: server.run.step == 22)
        shelf = server.coordinator.shelf
        until(lambda: shelf.newest == 20)
        late, lines = FakeEngine(cfg), Lines()
        work_in_thread(server.port, late, cfg, lines=lines)
        until(lambda: late.step == 22)
        assert late.loads == 1 and "at step 20 by a snapshot" in lines.text and late.state().digests() == digests
        assert whole(server.run) == packed
    names = sorted(n for n in os.listdir(tmp_path) if n.endswith(".egg") and n != history.FILE)
    assert names == ["best.egg", "latest.egg", "snapshot-00000004-0.6011.egg", "snapshot-00000016-2.0438.egg",
                     "snapshot-00000020-2.5247.egg"]
    assert os.readlink(tmp_path / "best.egg") == names[2] and os.readlink(tmp_path / "latest.egg") == names[4]

    # a run that goes on elsewhere takes them along, a damaged one is found out and the run replayed instead
    with Server(tmp_path, cfg) as server:
        server.stop()
    for damage in (False, True):
        if damage:
            data = bytearray((tmp_path / names[4]).read_bytes())
            data[-100] ^= 1
            (tmp_path / names[4]).write_bytes(data)
        run = history.open_run(cfg, tmp_path / f"new{damage}", tmp_path)
        run.close()
        with Server(tmp_path / f"new{damage}", cfg, save=True, steps=22, stay=True) as server:
            late, lines = FakeEngine(cfg), Lines()
            work_in_thread(server.port, late, cfg, lines=lines)
            until(lambda: late.step == 22)
            assert late.loads == (0 if damage else 1) and late.state().digests() == digests
            assert ("replaying the run instead" in lines.text) == damage
    other = history.open_run(cfg, tmp_path / "other")                       # snapshots of another run are left alone
    for k in range(22):
        other.append(packed[0], 0, 0)
    shutil.copy(tmp_path / names[3], tmp_path / "other")
    assert snapshots.Shelf(cfg, other).files == {}
    other.close()


def test_a_wrong_snapshot_is_not_kept_and_another_worker_is_asked(tmp_path):
    cfg = changed(SNAPSHOT_EVERY=2)

    class Wrong(FakeEngine):
        def state(self):
            state = super().state()
            if self.step == 2:
                state.moments = state.moments + 1
            return state

        def digest(self):
            return state_digest.of_state(super().state())

    server = cluster(tmp_path, [Wrong(cfg, 0.003)], 3, cfg, save=True)
    assert "its snapshot of step 2 is not used: it is not the state that workers stated" in server.lines.text
    assert not [n for n in os.listdir(tmp_path) if n.startswith("snapshot")]


# --- forged snapshots -------------------------------------------------------------------------------------------------

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
        assert peer.answer().first == 32 * chunk
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


def test_who_goes_on_without_sending_its_state_is_named_and_others_are_asked_first(tmp_path):
    cfg = changed(SNAPSHOT_EVERY=1)
    with Server(tmp_path, cfg, save=True) as server:
        silent, giver = (caller(f"127.0.0.{i}", server.port, cfg, name=f"w{i}") for i in (2, 3))
        engine = first_step(server, (silent, giver), cfg)
        silent.ask(1, engine.digest())
        silent.next(wire.SNAPSHOT_WANTED)
        silent.result(1, silent.answer().first)
        until(lambda: "w2" in server.lines.text and "step 1 is not used: it did not come" in server.lines.text)
        giver.ask(1, engine.digest())
        giver.next(wire.SNAPSHOT_WANTED)                         # at once, in the same step
        upload(giver, engine.state())
        giver.result(1, giver.answer().first)
        silent.ask(1, engine.digest())
        silent.next(wire.HASH_WANTED)
        hash_of(engine.state())(silent)
        until(lambda: server.coordinator.shelf.newest == 1)
        silent.result(1, silent.answer().first)
        giver.ask(1, engine.digest())
        giver.result(1, giver.answer().first)
        until(lambda: server.run.step == 2)
        engine.update(np.ones(cfg.N_PAIRS, np.int8))
        again = caller("127.0.0.2", server.port, cfg, name="another name")
        again.ask(2, engine.digest())
        assert again.next(wire.SNAPSHOT_WANTED, JOB_RESPONSE)[0] == JOB_RESPONSE
        giver.ask(2, engine.digest())
        giver.next(wire.SNAPSHOT_WANTED)


def test_who_left_or_failed_most_is_asked_last(tmp_path):
    cfg = changed(SNAPSHOT_EVERY=1)
    with Server(tmp_path, cfg, save=True) as server:
        taker, giver = (caller(f"127.0.0.{i}", server.port, cfg, name=f"w{i}") for i in (2, 3))
        engine, failed = first_step(server, (taker, giver), cfg), server.coordinator.collector._failed
        for times in 1, 2:
            taker.ask(1, engine.digest())
            taker.next(wire.SNAPSHOT_WANTED)
            taker.link.close()
            until(lambda: failed.get("127.0.0.2") == times)
            failed["127.0.0.3"] = 2                              # the other has failed as well, which is no end
            taker = caller("127.0.0.2", server.port, cfg, name=f"again {times}")
        failed["127.0.0.3"] = 1
        taker.ask(1, engine.digest())
        assert taker.next(wire.SNAPSHOT_WANTED, JOB_RESPONSE)[0] == JOB_RESPONSE
        giver.ask(1, engine.digest())
        giver.next(wire.SNAPSHOT_WANTED)


def test_a_snapshot_comes_from_one_to_which_faster_ones_leave_no_chunk_of_its_step(tmp_path):
    cfg = changed(SNAPSHOT_EVERY=2)
    with Server(tmp_path, cfg, save=True) as server:
        fast = caller("127.0.0.2", server.port, cfg, name="fast")
        for step in range(3):
            for _ in range(4):
                fast.result(step, fast.chunk(step))
            until(lambda: server.run.step == step + 1)
        assert "step 2 is not used: it did not come" in server.lines.text
        slow = caller("127.0.0.3", server.port, cfg, name="slow")
        slow.ask(2)
        slow.next(wire.SNAPSHOT_WANTED)
        assert server.coordinator.collector.upload.seed == server.run.seed_of(2) != server.run.seed


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
        position = old.answer().first                               # it has ignored HASH_WANTED
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
