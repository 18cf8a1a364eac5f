"""The worker: reconnecting, slices, rebuilding."""

import functools
import re
import subprocess
from time import sleep

import numpy as np
from pytest import mark

import egg_net
from cluster import dispatch, hub, wire
from cluster.wire import JOB_REQUEST, JOB_RESPONSE, NOTHING, RESULT, V2, frame
from model import rules, steps
from model.steps import pack_digits
from commands import DEFINES, TEXT, begin
from coordinators import (Peer2, Server, cluster, free_port, listening, refused, replayed, run_worker, until, whole,
                          work_in_thread)
from engine.cpu_engine import CpuEngine
from fakes import CFG, FakeEngine, GOOD_STEP, Lines, expected, step_alone
from readings import BASE

COMPILED = ["compiled", "compiled_gru"]                      # for conftest.py
TOKENS = np.random.default_rng(1).integers(0, 256, 600).astype(np.uint8)


# --- the worker -------------------------------------------------------------------------------------------------------

@mark.parametrize("values", [
    dict(USE_MUON=1, NTT_MODE=3, LOSS="exact"),
    dict(MODEL="gru", HEAD_DIM=64, STATE_TOKENS=3, LOSS="exact", AUDIT_RATE=1.0,
         SOFT_TARGETS=((1, 2), (4, 1))),
    dict(NTT_MODE=1, NTT_CAUSAL=0, USE_SAME_DATA=1, OPTIMIZER="sgd", LR_SCHEDULE=((0, 0.1), (3, 0.02))),
    dict(USE_MUON=1, MUON_NS="cubic", NTT_MODE=2, HOST_GAUSSIAN=1, HOST_MASK=7, DEVICE_GAUSSIAN=1, DEVICE_MASK=31,
         ADAPTIVE_NOISE_MODE=2)],
    ids="muon-ntt3 gru-soft-targets ntt1-sgd muon-cubic-ntt2-gaussian-tails".split())
def test_distributed_and_resumed(tmp_path, values):
    """Two workers that compare their digests every step, then a new coordinator that goes on with two new ones: the run
    of one engine."""
    cfg = BASE.changed(**values)
    engine = functools.partial(CpuEngine, cfg, TOKENS, threads=1)
    alone = engine()
    assert any([step_alone(alone)[2] for _ in range(6)])
    for steps in (3, 6):
        workers = [engine(), engine()]
        server = cluster(tmp_path, workers, steps, cfg, save=True)
        assert "not that of others" not in server.said
    assert {one.digest() for one in (*workers, replayed(tmp_path, engine()))} == {alone.digest()}


@mark.parametrize("every, steps", [(2, [0, 2, 4]), (10, [0, 1, 2, 5, 10]), (500, [0, 50, 100, 250, 500])])
def test_the_first_samples_and_validations_come_early(every, steps):
    assert [step for step in range(501) if egg_net.due(every, step)][:len(steps)] == steps


def test_a_worker_survives_its_coordinator_and_a_run_that_begins_again(tmp_path):
    (packed, digest), port = expected(4), free_port()
    engine, lines = FakeEngine(pause=0.01), Lines()
    with Server(tmp_path / "a", port=port, save=True) as server:
        work_in_thread(port, engine, retry=True, lines=lines)
        server.reaches(2)
        server.stop()
    with Server(tmp_path / "a", port=port, save=True) as server:                             # goes on where it was
        server.reaches(engine.step + 3)
        server.stop()
    assert engine.loads == 0 and "the coordinator is gone, trying again" in lines.text
    # another run, behind the worker
    with Server(tmp_path / "b", port=port, save=True, steps=4) as server:
        server.reaches(4)
        assert whole(server.run) == packed
        until(lambda: engine.step == 4)
    assert engine.loads == 1 and engine.digest() == digest and "rebuilding from the beginning" in lines.text


def test_workers_end_with_the_run_as_it_was_planned(here, compiled):
    """The commands; by a signal the coordinator ends otherwise, and they wait."""
    port, history = free_port(), here / "ckpt" / "history.egg"
    (here / "input.bin").write_bytes(TEXT)
    line = f"coordinator --save-dir ckpt --port {port}"
    with begin(f"worker 127.0.0.1 --port {port} --preset deggs", *DEFINES, stdout=subprocess.PIPE) as worker:
        with begin(f"{line} --preset deggs --steps 1000000", *DEFINES, stdout=subprocess.PIPE) as coordinator:
            until(lambda: history.exists() and history.stat().st_size > 5000)
            coordinator.terminate()
            coordinator.communicate()
        assert worker.poll() is None                  # it has another name than others of this host
        with begin(f"{line} --minutes 0.05", stdout=subprocess.PIPE) as coordinator:
            said, _ = worker.communicate(timeout=60)
            coordinator.communicate(timeout=60)
    assert worker.returncode == 0 == coordinator.returncode
    assert "the coordinator is gone, trying again" in said and ": the run has ended after " in said.splitlines()[-1]


def test_a_worker_in_the_middle_of_a_chunk_learns_of_the_end(tmp_path, monkeypatch):
    """Between two slices it finds the connection closed; what was told before that is read."""
    monkeypatch.setattr(egg_net.Worker, "slice", 2)
    slow, lines = FakeEngine(CFG, 0.2), Lines()
    with Server(tmp_path, steps=1, drain=0) as server:
        thread = server.work(slow, lines=lines)
        until(lambda: slow.evaluated)
        quick = Peer2(server)
        quick.ask = functools.partial(quick.ask, digest=FakeEngine().digest())
        quick.works(0, 3)
        quick.result(0, quick.chunk(0))                           # a copy of that of the slow one
    thread.join(60)
    assert "the run has ended after 1 steps" in lines.text


def test_a_worker_that_is_alone_may_take_its_time(tmp_path, monkeypatch):
    monkeypatch.setattr(dispatch, "LEAST_LEASE", 0.05)
    with Server(tmp_path, CFG.changed(STRAGGLER_TIMEOUT=0.1), steps=1) as server:
        peer = Peer2(server)
        peer.works(0, 3)
        assert peer.chunk(0) == 96
        sleep(0.5)
        peer.result(0, 96)
    assert "handed out again" not in server.said


def test_a_worker_that_computes_gives_signs_of_life(tmp_path, monkeypatch):
    """A chunk may take longer than a connection may be silent."""
    monkeypatch.setattr("cluster.link.HEARTBEAT_EVERY", 0.2)
    with Server(tmp_path, CFG.changed(IDLE_TIMEOUT=1.0), steps=1) as server:
        server.work(engine := FakeEngine(pause=1.5))
        until(lambda: engine.evaluated)
        engine.pause = 0.0
    assert len(engine.evaluated) == 4 and "said nothing" not in server.said


SEED1 = steps.next_seed(42, 0)


def response(seed, step, position, packed=b""):
    return frame(JOB_RESPONSE, seed, step, position, len(packed), packed)


def serve_fake(engine, *responses):
    """(number of chunks, requests and results) of a worker that is given these responses to its requests."""
    def serve(sock):
        buffer = hub.Inbox()
        while data := sock.recv(1 << 16):
            buffer.add(data)
            while got := wire.next_frame(buffer, wire.limits(CFG)):
                if got[0] == V2:
                    return
                requests.append(got[1:])
                if got[1] == JOB_REQUEST:
                    if not left:
                        return
                    sock.sendall(left.pop(0))

    requests, left = [], list(responses)
    with listening(serve) as port:
        return run_worker(port, engine), requests


def test_the_worker_serves_a_coordinator_that_polls():
    """The C++ coordinator does not hold requests, and may leave step and seed of an empty answer 0."""
    engine = FakeEngine()
    chunks, requests = serve_fake(engine, response(42, 0, NOTHING), response(0, 0, NOTHING),
                                  response(SEED1, 1, 0, GOOD_STEP), response(0, 0, NOTHING), response(SEED1, 1, 64))
    assert (chunks, engine.loads, engine.step) == (1, 0, 1)
    result, = (payload for opcode, payload in requests if opcode == RESULT)
    losses = engine.evaluate(64, 32)
    assert RESULT.unpack(result)[:6] == (SEED1, 1, 64, 101, losses.sum(), 4)
    assert result[44:] == pack_digits(rules.chunk_fitness(losses, CFG))
    asked = [JOB_REQUEST.unpack(payload)[:2] for opcode, payload in requests if opcode == JOB_REQUEST]
    assert asked == [(42, 0)] * 3 + [(SEED1, 1)] * 3


def test_a_worker_that_does_not_fit_rebuilds_once_and_stops_with_a_line():
    catch_up, other_seed = response(SEED1, 1, 0, GOOD_STEP), response(SEED1 + 1, 1, 0)
    engine = FakeEngine()
    assert serve_fake(engine, catch_up, response(42, 0, NOTHING), response(42, 0, 32))[0] == 1        # it was ahead
    assert engine.loads == 1 and engine.step == 0
    with refused("does not fit this worker: it answers for step 1 with seed"):
        serve_fake(FakeEngine(), catch_up, other_seed, catch_up, other_seed)
    with refused("answers for step 0 with seed 0"):
        # the C++ answer "too far behind"
        serve_fake(FakeEngine(), catch_up, response(0, 0, 0), response(0, 0, 0))


@mark.parametrize("reason, answer", [
    ("protocol version 9", b"JOBS\x09\x02" + bytes(32)),
    ("says 9 bytes of fitness and carries 2", frame(JOB_RESPONSE, 42, 1, 0, 9, b"ab")),
    ("the fitness of step 0 cannot be right", response(42, 1, 0, b"\xff" * 13)),
    ("it hands out member 33", response(42, 0, 33)),
])
def test_the_worker_refuses_what_cannot_be_right(reason, answer):
    with refused(re.escape(reason)):
        serve_fake(FakeEngine(), answer)


def test_unreachable_hosts_are_one_line():
    port = free_port()
    for host, words in (("a..b", "cannot be reached"), ("127.0.0.1", "cannot join 127.0.0.1:"),
                        ("localhost:12345", "cannot be reached: .*: write localhost --port 12345")):
        with refused(words):
            egg_net.run_worker(CFG, host, port, FakeEngine(), retry=False, console=egg_net.Console(Lines()))


def test_another_program_on_the_port_is_said_to_be_that(monkeypatch):
    """One that says nothing, as a server that waits for the end of a line."""
    monkeypatch.setattr("cluster.link.CONNECT_TIMEOUT", 0.2)
    with listening(lambda sock: sock.settimeout(9) or [*iter(lambda: sock.recv(99), b"")]) as port:
        work_in_thread(port, FakeEngine(), retry=True, lines=(lines := Lines()))
        until(lambda: f"127.0.0.1:{port}: it does not answer, so it may be another program, trying" in lines.text)
    with listening(lambda sock: sock.sendall(b"SSH-2.0-OpenSSH_9.2p1 Debian\r\n") or sleep(0.5)) as port:
        with refused("wrong magic: not an egg peer"):
            run_worker(port, FakeEngine(), retry=True)


def test_a_worker_looks_at_its_socket_between_slices(server):
    engine = FakeEngine(pause=0.25)                                    # 2 members a slice at this speed
    thread = server.work(engine)
    until(lambda: engine.evaluated)
    server.stop()
    slices = len(engine.evaluated)
    thread.join(60)
    assert not thread.is_alive() and len(engine.evaluated) <= slices + 1 < 16          # of a chunk
