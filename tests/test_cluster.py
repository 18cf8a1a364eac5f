"""A cluster one can trust: introduction, secrets, TLS, limits, digests, audits, leases, snapshots, chaos, fuzzing."""

import contextlib
import os
import pathlib
import re
import resource
import shutil
import socket
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import hypothesis
import numpy as np
import pytest
import pyzstd
from hypothesis import strategies as st

import egg_config
import egg_net
from cluster import admission, auth, dispatch, event_log, greeting, history, leases, snapshots, status, trust, wire
from cluster.wire import HELLO, JOB_REQUEST, JOB_RESPONSE, JOIN, REBUILD, V2, WELCOME
from model import fitness_digits, parameters, state_digest
from tools import load
from kit import (CFG, GOOD, SECRET, SLOW, Coordinator, Drifting, FakeEngine, Liar, Lines, Peer, Peer2, Server, card,
                 changed, chaos, cluster, expected, feed, filled, until, whole, work_in_thread)

LIMITS = wire.limits(CFG)


# --- introduction ----------------------------------------------------------------------------------------------------

def test_protocol_2_byte_by_byte(tmp_path):
    """PROTOCOL.md in bytes, without the code that speaks it."""
    import hashlib
    import hmac
    import json

    def proof(side, hello, challenge, text):
        return hmac.digest(SECRET, b"egg 2 " + side + b"\0" + hello + challenge + hashlib.sha256(text).digest(),
                           "sha256")

    with (Server(tmp_path, access=auth.Access(SECRET)) as server,
          socket.create_connection(("127.0.0.1", server.port)) as sock):
        def receive(size):
            data = b""
            while len(data) < size:
                data += sock.recv(size - len(data))
            return data

        hello, text = bytes(range(32)), json.dumps(card()).encode()
        sock.sendall(b"JOBS\x02\x20\x00\x00\x00\x20" + hello)
        assert receive(10) == b"JOBS\x02\x21\x00\x00\x00\x21"
        challenge = receive(32)
        assert receive(1) == b"\x03"                              # a secret is wanted; it would prove itself first
        sock.sendall(b"JOBS\x02\x22" + (32 + len(text)).to_bytes(4, "big")
                     + proof(b"worker", hello, challenge, text) + text)
        assert receive(10) == b"JOBS\x02\x23\x00\x00\x00\x70"
        assert receive(32) == proof(b"coordinator", hello, challenge, text)
        kept, default = CFG.saved(), egg_config.make().saved()
        config = hashlib.sha256(json.dumps({k: v for k, v in kept.items() if v != default[k]},
                                           sort_keys=True).encode()).digest()
        assert receive(80) == config + bytes(32) + bytes(8) + bytes(8)
        sock.sendall(b"JOBS\x02\x00\x00\x00\x00\x28" + (42).to_bytes(8, "big") + bytes(16) + b"d" * 16)
        assert receive(38) == b"JOBS\x02\x02\x00\x00\x00\x1c" + (42).to_bytes(8, "big") + bytes(16) + bytes(4)


def greet(ours, theirs, card=card()):
    """(Caller, Host) after an introduction without sockets, with these secrets."""
    caller, host = greeting.Caller(ours, card), greeting.Host(theirs)
    answer = caller.begin()
    while answer and (answer := takes(host, *answer)):
        answer = takes(caller, *answer)
    return caller, host


def takes(side, opcode, *fields):
    """The answer of a Caller or Host to a frame of these fields."""
    return side.handle(opcode, opcode.pack(*fields))


def test_the_introduction_proves_both_sides():
    caller, host = greet(SECRET, SECRET)
    assert host.card.role == "worker" and host.card.config == CFG.saved() and caller.welcome is None
    state = [b"c" * 32, b"d" * 32, 7, 4]
    assert takes(caller, *host.welcome(*state)) is None and caller.welcome == state
    with pytest.raises(wire.FrameError, match="WELCOME before the introduction is complete"):
        takes(caller, *host.welcome(*state))
    assert greet(b"", b"", card(role="status"))[1].card.role == "status"
    with pytest.raises(greeting.GreetingError, match="does not know the secret"):
        greet(b"not the secret but long", SECRET)
    host = greeting.Host(SECRET)
    host.handle(HELLO, bytes(32))
    with pytest.raises(wire.Refused, match="wrong secret") as refused:
        host.handle(JOIN, bytes(32) + b"{}")
    assert refused.value.code == wire.NO_ACCESS
    with pytest.raises(greeting.GreetingError, match="it wants a secret"):
        greet(b"", SECRET)
    caller, _ = greet(SECRET, SECRET)
    with pytest.raises(greeting.GreetingError, match="does not know the secret"):
        takes(caller, *greet(SECRET, SECRET)[1].welcome(*state))         # of another introduction
    for early in (JOIN, WELCOME, JOB_REQUEST, 99):
        with pytest.raises(wire.FrameError, match="before the introduction is complete"):
            greeting.Host(SECRET).handle(early, bytes(64))


@pytest.mark.parametrize("words, other, values", [
    ("SIGMA_SHIFT = 3 at the coordinator, 5 at the worker", dict(SIGMA_SHIFT=5), {}),
    ("ADAM_BETA1 = 0.9 at the coordinator, 0.5 at the worker; N_LAYERS = 1 at the coordinator, 2",
     dict(N_LAYERS=2, ADAM_BETA1=0.5), {}),
    ("other training data than most workers", {}, dict(data="ab" * 32)),
])
def test_a_worker_that_does_not_fit_is_told_what_differs(tmp_path, words, other, values):
    with Server(tmp_path, save=True) as server:
        Peer2(server.port, data="cd" * 32)
        with pytest.raises(egg_net.NetError, match=words):
            Peer2(server.port, changed(**other), **values)
        assert words in server.lines.text
        Peer2(server.port, data="")                              # does not tell, as without data
        Peer2(server.port, changed(VALIDATE_EVERY=7, SAMPLING_TEMP=0.1))
    assert (tmp_path / history.DATA_FILE).read_text().strip() == "cd" * 32
    with Server(tmp_path, save=True) as server, pytest.raises(egg_net.NetError, match="other training data"):
        Peer2(server.port, data="ab" * 32)                       # after a restart too


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
        engine.update(rng.integers(-1, 2, cfg.N_PAIRS).astype(np.int8))
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


class Closing:
    """A coordinator of protocol 1 alone: closes on anything else. Counts who came."""

    def __init__(self):
        self.listener, self.versions = socket.create_server(("127.0.0.1", 0)), []
        self.port = self.listener.getsockname()[1]
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self):
        with contextlib.suppress(OSError):
            while True:
                with self.listener.accept()[0] as sock:
                    data = sock.recv(1 << 16)
                    self.versions.append(data[4])
                    if data[4] == 1:
                        sock.sendall(wire.frame(JOB_RESPONSE, 42, 0, 32, 0))
                        time.sleep(0.2)


def test_a_worker_falls_back_to_protocol_1_and_never_with_a_secret():
    def serve(**options):
        old = Closing()
        try:
            return old, egg_net.run_worker(CFG, "127.0.0.1", old.port, FakeEngine(), retry=False,
                                           console=egg_net.Console(Lines()), **options)
        finally:
            old.listener.close()

    old, chunks = serve()
    assert old.versions == [2, 1] and chunks == 1
    old, chunks = serve(protocol=1)
    assert old.versions == [1] and chunks == 1
    for options in (dict(protocol=2), dict(access=auth.Access(SECRET))):
        with pytest.raises(egg_net.NetError, match="closed the connection during the introduction"):
            serve(**options)
    with pytest.raises(egg_net.NetError, match="protocol 1 has neither secret nor TLS"):
        serve(protocol=1, access=auth.Access(SECRET))


# --- access ----------------------------------------------------------------------------------------------------------

def test_where_a_coordinator_listens():
    secret, open_ = auth.Access(SECRET), auth.Access(insecure=True)
    assert auth.listen_host(None, auth.Access()) == "127.0.0.1"
    assert auth.listen_host(None, secret) == auth.listen_host(None, open_) == "0.0.0.0"
    for host in ("127.0.0.1", "localhost", "::1", "127.8.9.1"):
        assert auth.listen_host(host, auth.Access()) == host
    for host in ("0.0.0.0", "::", "10.0.0.1", "node7"):
        assert auth.listen_host(host, secret) == auth.listen_host(host, open_) == host
        with pytest.raises(auth.AuthError, match="without a secret would let anybody in"):
            auth.listen_host(host, auth.Access())


def test_secrets_are_read_from_a_file_or_the_environment(tmp_path):
    (tmp_path / "s").write_bytes(SECRET + b"\n")
    assert auth.read_secret(tmp_path / "s", {"EGG_SECRET": "another secret, as long"}) == SECRET
    assert auth.read_secret(None, {"EGG_SECRET": "another secret, as long"}) == b"another secret, as long"
    assert auth.read_secret(None, {}) == b""
    (tmp_path / "short").write_bytes(b"123")
    for path, environ, words in ((tmp_path / "short", {}, "holds 3 bytes"),
                                 (None, {"EGG_SECRET": ""}, "EGG_SECRET holds 0 bytes"),
                                 (tmp_path / "none", {}, "No such file")):
        with pytest.raises(auth.AuthError, match=words):
            auth.read_secret(path, environ)
    assert egg_config.load(environ={"EGG_SECRET": "x"}).fingerprint() == egg_config.load(environ={}).fingerprint()


def refused_by(call, words):
    with pytest.raises(egg_net.NetError, match=words) as caught:
        call()
    assert "\n" not in str(caught.value)


def test_strangers_are_refused_and_logged_once(tmp_path):
    """Without a secret, with a wrong one, with a recorded proof, with version 1: five times each, one line each."""
    def replay():
        with socket.create_connection(("127.0.0.1", server.port)) as sock:
            sock.sendall(recorded[0])
            sock.recv(43)
            sock.sendall(recorded[-1])
            data = sock.recv(1000)
        assert data[:6] == b"JOBS\x02\x24" and b"wrong secret" in data

    class Recording(egg_net.Link):
        def send(self, data):
            recorded.append(data)
            super().send(data)

    recorded = []
    with Server(tmp_path, access=auth.Access(SECRET)) as server:
        link = Recording(CFG, "127.0.0.1", server.port, V2, auth.Access(SECRET), card())
        honest = Peer2(server.port, secret=SECRET)
        assert len(recorded) == 3
        for _ in range(5):
            refused_by(lambda: Peer2(server.port), "wants a secret")
            refused_by(lambda: Peer2(server.port, secret=b"not the secret but long"), "does not know the secret")
            replay()
            old = Peer(server.port)
            old.ask(0)
            assert old.closed()
            sock = socket.create_connection(("127.0.0.1", server.port))
            sock.sendall(wire.frame(wire.Frame(JOB_REQUEST), bytes(64), version=V2))           # no introduction at all
            assert wire.next_frame(bytearray(sock.recv(1000)), LIMITS)[1] == wire.ERROR
        assert honest.chunk(0) == 0
    told = [line for line in server.lines.text.splitlines() if line.startswith("refused")]
    assert len(told) == 4, told
    for words in ("wrong secret", "it does not believe our proof", "protocol 1 cannot prove a secret",
                  "JOB_REQUEST before the introduction"):
        assert sum(words in line for line in told) == 1
    link.close()


def test_a_worker_refuses_a_coordinator_that_does_not_know_the_secret(tmp_path):
    with Server(tmp_path) as server:
        refused_by(lambda: Peer2(server.port, secret=SECRET), "it has no secret, and here is one")
    listener = socket.create_server(("127.0.0.1", 0))

    def impostor():
        with listener.accept()[0] as sock:
            sock.recv(1000)
            sock.sendall(wire.frame(wire.CHALLENGE, bytes(32), 1, version=V2))
            given = sock.recv(10000)[10:42]                      # sends the worker's own proof back
            sock.sendall(wire.frame(WELCOME, given, snapshots.config_digest(CFG), bytes(32), 0, 0, version=V2))
            sock.recv(1)

    thread = threading.Thread(target=impostor)
    thread.start()
    refused_by(lambda: Peer2(listener.getsockname()[1], secret=SECRET), "does not know the secret")
    thread.join(5)
    listener.close()


def test_tls(tmp_path, certificates):
    cert, key = certificates
    packed, digests = expected(12)
    access = auth.Access(SECRET, auth.server_tls(cert, key))
    ours = auth.Access(SECRET, auth.client_tls(cert))
    engine = FakeEngine()
    with Server(tmp_path, changed(SNAPSHOT_EVERY=4), save=True, access=access, stay=True, steps=12) as server:
        work_in_thread(server.port, engine, changed(SNAPSHOT_EVERY=4), access=ours)
        until(lambda: engine.step == 12)
        assert whole(server.run) == packed and engine.state().digests() == digests
        late = FakeEngine()
        work_in_thread(server.port, late, access=ours)
        until(lambda: late.step == 12)
        # by a snapshot of several blocks, through TLS
        assert late.loads == 1 and late.state().digests() == digests
        with socket.create_connection(("127.0.0.1", server.port)) as plain:
            plain.sendall(wire.frame(HELLO, bytes(32), version=V2))
            plain.settimeout(5)
            with contextlib.suppress(ConnectionResetError):
                while data := plain.recv(1000):
                    assert b"JOBS" not in data                    # at most an alert of TLS
        assert "no TLS" in server.lines.text
    with Server(tmp_path, access=auth.Access(SECRET)) as server:
        with pytest.raises((egg_net.NetError, OSError)):
            egg_net.Link(CFG, "127.0.0.1", server.port, V2, ours, card())
    for wrong in (dict(cert=cert), dict(cert=None, key=key), dict(cert=key, key=key),
                  dict(cert=tmp_path / "none", key=key)):
        with pytest.raises(auth.AuthError):
            auth.server_tls(**{"key": None, **wrong})


def test_connections_are_bounded(tmp_path, monkeypatch):
    monkeypatch.setattr(auth, "HANDSHAKE_SECONDS", 0.3)
    cfg = changed(CONNECTIONS_PER_ADDRESS=4, IDLE_TIMEOUT=3.0)
    with Server(tmp_path, cfg) as server:
        silent = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(5)]
        honest, *others = [Peer2(server.port, cfg) for _ in range(4)]
        for _ in range(3):
            with pytest.raises(TimeoutError, match="4 connections from one address"):
                Peer2(server.port, cfg)
        assert server.lines.text.count("4 connections from one address") == 1
        [peer.link.close() for peer in others]
        until(lambda: len(server.coordinator.hub.connections) == 1)                        # the silent ones are closed
        assert all(s.recv(1) == b"" for s in silent)
        assert server.lines.text.count("did not complete the introduction within 0.3 s") == 1
        for _ in range(9):
            time.sleep(0.4)
            honest.link.send(honest.link.frame(wire.HEARTBEAT))
        assert honest.chunk(0) == 0                                                    # heartbeats keep it
        old = Peer(server.port, cfg)
        # version 1 has none, and is idle all the same
        assert old.chunk(0) == 32
        until(lambda: not server.coordinator.hub.connections)
        assert "said nothing for 3 s" in server.lines.text and not server.coordinator.admission.by_host


def test_a_worker_comes_again_when_there_is_room(tmp_path):
    cfg, engine, lines = changed(CONNECTIONS_PER_ADDRESS=1), FakeEngine(), Lines()
    with Server(tmp_path, cfg) as server:
        first = Peer2(server.port, cfg)
        work_in_thread(server.port, engine, cfg, retry=True, lines=lines)
        until(lambda: "no coordinator at" in lines.text)
        assert not engine.evaluated
        first.link.close()
        until(lambda: engine.evaluated)


def test_no_text_of_a_peer_can_write_to_the_terminal_or_fill_the_log(tmp_path):
    with Server(tmp_path) as server:
        refused_by(lambda: Peer2(server.port, config={"N_LAYERS": "\x1b[31m\nStep 9 | fake", "\x07": "\x1b]0;x"}),
                   "another configuration")
        peer = Peer2(server.port)
        for i in range(3 * event_log.OF_HOST[0]):
            peer.link.send(peer.link.frame(wire.LOG_MESSAGE, f"word {i}.".encode()))
        assert peer.chunk(0) == 0
        text, most = server.lines.text, event_log.OF_HOST[0]
        assert not re.search("[\x1b\x07]|^Step", text, re.M) and text.count("another configuration") == 1
        assert "word 0." in text and most - 10 <= text.count("word ") < most + 10


def test_names_cannot_write_to_the_terminal(tmp_path):
    with Server(tmp_path) as server:
        peer = Peer2(server.port, name="\x1b[31mred\nStep 5 | fake", device="\x07bell\u202e")
        assert peer.chunk(0) == 0
        assert "worker [31mred Step 5 | fake (127.0.0.1:" in server.lines.text
        assert not re.search("[\x1b\x07\u202e]", server.lines.text)
        assert status.fetch_status(CFG, "127.0.0.1", server.port)["workers"][0]["name"] == "[31mred Step 5 | fake"


# --- chunks of a step: audits, liars, leases, copies -----------------------------------------------------------------

A, B, C, D = (admission.Author("host", x, f"worker {x}") for x in "abcd")
YES = GOOD, 5
NO = fitness_digits.pack_ternary(-np.ones(16, np.int8)), 5


def give(step, author, chunk, what):
    return step.result(author, author, chunk, *what)


def test_an_audited_chunk_needs_two_authors_and_a_third_decides():
    step = leases.Step(CFG, audited=[1])
    assert [step.take(A, A, 0) for _ in range(5)] == [0, 1, 2, 3, None] and step.take(B, B, 0) == 1
    for chunk in (0, 1, 2, 3):
        assert give(step, A, chunk, YES) == []
    assert set(step.done) == {0, 2, 3} and step.take(A, A, 1) is None
    assert give(step, B, 1, NO) == [] and 1 not in step.done
    assert step.disputed() == [(1, [A, B])]
    assert step.take(A, A, 1) is None and step.take(B, B, 1) is None and step.take(C, C, 1) == 1
    assert give(step, C, 1, YES) == [B] and step.complete \
        and step.fitness() == fitness_digits.pack_ternary(np.ones(CFG.N_PAIRS, np.int8))
    step.withdraw(B)
    assert give(step, D, 1, NO) == [D] and step.complete


def test_a_late_result_that_differs_opens_the_chunk_again():
    step = leases.Step(CFG)
    assert give(step, A, 0, NO) == [] and 0 in step.done
    assert give(step, A, 0, YES) == [] and step.done[0] == NO             # its own first word counts
    assert give(step, B, 0, YES) == [] and 0 not in step.done and step.take(C, C, 0) == 0
    assert give(step, C, 0, YES) == [A] and step.done[0] == YES


def test_an_audit_waits_for_nobody_and_a_withdrawn_result_is_done_again():
    step = leases.Step(CFG, audited=[0])
    assert give(step, A, 0, YES) == [] and not step.done
    step.alone = True
    step.settle()
    step.alone = False
    assert set(step.done) == {0}
    give(step, B, 1, YES)
    give(step, A, 2, YES)
    give(step, B, 2, YES)
    step.withdraw(A)
    assert set(step.done) == {1, 2}
    assert sorted(iter(lambda: step.take(C, C, 0), None)) == [0, 3]
    step.alone = True
    assert give(step, B, 0, YES) == [] and 0 in step.done


def test_copies_go_to_idle_workers_and_the_first_result_counts():
    step = leases.Step(CFG)
    assert [step.take(A, A, t) for t in range(4)] == [0, 1, 2, 3]
    give(step, A, 2, YES)
    assert step.late(3.0, 1.0) == [0, 1] and step.late(1.2, 1.0) == []
    late = step.late(3.0, 1.0)
    assert step.copy(A, A, 3.0, late) is None and step.copy(B, B, 3.0, late) == 0 and late == [1]
    assert step.late(5.9, 1.0) == [1, 3] and step.late(6.1, 1.0) == [0, 1, 3]   # a third one waits twice as long
    give(step, B, 0, YES)
    step.give_back(A, 0)
    assert step.take(C, C, 9) is None


def test_leases_follow_the_time_that_chunks_take(tmp_path, monkeypatch):
    monkeypatch.setattr(dispatch, "LEAST_LEASE", 1.0)
    with Server(tmp_path) as server:
        quick, stuck = Peer2(server.port), Peer2(server.port)
        for position in (0, 32):
            quick.ask(0)
            assert quick.answer()[2] == position
            time.sleep(0.02)
            quick.result(0, position)
        assert stuck.chunk(0) == 64 and quick.chunk(0) == 96
        quick.result(0, 96)
        started = time.monotonic()
        quick.ask(0)
        assert quick.answer()[2] == 64 and time.monotonic() - started < 1.0    # a copy, well before the lease is over
        until(lambda: re.search(r"silent for 1(\.0\d*)? s, its chunk 2 is handed out again", server.lines.text))
        assert CFG.STRAGGLER_TIMEOUT == 90
        quick.result(0, 64)
        until(lambda: server.run.step == 1)


def test_a_worker_that_asks_and_does_not_deliver_never_waits_while_there_is_work(tmp_path):
    cfg = changed(POPULATION_SIZE=32 * 12)
    with Server(tmp_path, cfg) as server:
        greedy, other = Peer(server.port, cfg), Peer2(server.port, cfg)
        # without waiting, and without holding more than CHUNKS_HELD
        asked = [greedy.chunk(0) // 32 for _ in range(9)]
        known = next(worker for worker in server.coordinator.dispatcher.workers if worker.version == 1)
        assert all(0 <= c < 12 for c in asked) and len(known.held) == dispatch.CHUNKS_HELD
        mine = []
        for _ in range(12 - dispatch.CHUNKS_HELD):
            mine.append(other.chunk(0) // 32)
            other.result(0, 32 * mine[-1])
        assert sorted(mine + asked[-dispatch.CHUNKS_HELD:]) == list(range(12))
        greedy.ask(0)                                            # now there is nothing left that it has not got
        assert greedy.silent()


def test_only_chunks_that_were_handed_out_are_taken(tmp_path):
    """Else two liars could outvote whomever they like."""
    with Server(tmp_path) as server:
        peer = Peer2(server.port)
        assert peer.chunk(0) == 0
        peer.result(0, 64)
        with pytest.raises(egg_net.NetError, match="RESULT for chunk 2, which it was not given"):
            peer.answer()
        assert not server.coordinator.dispatcher.work.done


def test_when_a_step_ends_the_first_worker_does_not_wait_for_the_last(tmp_path):
    cfg, run = changed(POPULATION_SIZE=32), history.open_run(changed(POPULATION_SIZE=32))
    coordinator = Coordinator(cfg, run, log_dir=tmp_path, console=egg_net.Console(Lines()))
    peers = []
    for _ in range(6 * dispatch.ANSWERS_IN_A_ROW):
        peers.append(Peer(coordinator.address[1], cfg))
        peers[-1].ask(0)
        until(lambda: coordinator.poll(0.01) or len(coordinator.dispatcher.waiting) == len(peers) - 1)
    assert peers[0].answer()[2] == 0                             # it has the chunk, the others wait
    peers[0].result(0, 0)
    until(lambda: coordinator.poll(0.001) or run.step == 1)
    assert len(coordinator.dispatcher.waiting) > dispatch.ANSWERS_IN_A_ROW
    assert peers[1].answer()[1] == 1
    peers[1].ask(1)
    coordinator.poll()
    # its next chunk, before the last has been told of the step
    assert peers[1].answer()[1:3] == (1, 0) and coordinator.dispatcher.waiting
    until(lambda: coordinator.poll(0.001) or not coordinator.dispatcher.waiting)
    assert all(peer.answer()[1] == 1 for peer in peers[2:])
    coordinator.close()
    run.close()


def test_a_liar_is_found_by_audits_named_and_banned(tmp_path):
    cfg = changed(AUDIT_RATE=1.0)
    engines = [FakeEngine(cfg, 0.002), Liar(cfg, 2, pause=0.001), FakeEngine(cfg, 0.002), FakeEngine(cfg, 0.002)]
    server = cluster(tmp_path, engines, 20, cfg, save=True)
    assert re.search(r"^banned w1 at 127.0.0.1: its result for chunk \d of step \d+ is not that of two others$",
                     server.lines.text, re.M)
    assert server.lines.text.count("banned w") == 1
    run = history.open_run(cfg, tmp_path)
    assert whole(run) == expected(20)[0]
    run.close()


def test_a_ban_outlasts_the_coordinator_until_its_line_is_removed(tmp_path):
    for turn in range(3):
        with Server(tmp_path, save=True) as server:
            if turn == 0:
                peer = Peer2(server.port, name="w1")
                assert peer.chunk(0) == 0
                server.coordinator.ban(next(iter(server.coordinator.dispatcher.workers)).author,
                                       "it said that 2 + 2 = 5")
                with pytest.raises(egg_net.NetError, match="banned: it said that 2 [+] 2 = 5; to let w1 at 127.0.0.1 "
                                                           "in again, remove its line"):
                    peer.answer()
            if turn < 2:
                for _ in range(2):
                    with pytest.raises(egg_net.NetError, match="banned: it said that"):
                        Peer2(server.port, name="w1")
                Peer2(server.port, name="w2")
                told = status.fetch_status(CFG, "127.0.0.1", server.port)
                assert told["banned"] == {"w1 at 127.0.0.1": "it said that 2 + 2 = 5"}
                assert ("banned: w1 at 127.0.0.1: it said that 2 + 2 = 5\n"
                        f"to lift a ban remove its line from {tmp_path}") in status.describe_status(told)
            if turn == 1:
                (tmp_path / admission.BANNED_FILE).write_text("")          # no restart is needed
            if turn:
                Peer2(server.port, name="w1")


def test_a_ban_holds_on_to_a_certificate(tmp_path, certificates):
    cert, key = certificates
    access = auth.Access(SECRET, auth.server_tls(cert, key, ca=cert))
    ours = auth.Access(SECRET, auth.client_tls(cert, cert, key))
    with Server(tmp_path, save=True, access=access) as server:
        link = egg_net.Link(CFG, "127.0.0.1", server.port, V2, ours, card(name="w1"))
        until(lambda: server.coordinator.dispatcher.workers)
        server.coordinator.ban(next(iter(server.coordinator.dispatcher.workers)).author, "it lied")
        link.close()
        refused_by(lambda: egg_net.Link(CFG, "127.0.0.1", server.port, V2, ours, card(name="another name")),
                   "banned: it lied")
    assert re.fullmatch(r"certificate [0-9a-f]{64}\tit lied\n", (tmp_path / admission.BANNED_FILE).read_text())


def test_bans_that_cannot_be_written_hold_until_the_end(tmp_path):
    bans = admission.Bans(tmp_path / "gone")
    bans.add("w1 at host", "it lied")
    assert bans.all() == {"w1 at host": "it lied"}
    (tmp_path / admission.BANNED_FILE).write_bytes(b"no tab\n\n\xff at host\twhy\twith a tab\nw2 at host\ttorn")
    assert admission.Bans(tmp_path).all() == {"\ufffd at host": "why\twith a tab", "w2 at host": "torn"}


def test_audits_do_not_hold_up_a_lonely_worker_for_long(tmp_path, monkeypatch):
    monkeypatch.setattr(egg_net, "AUDIT_PATIENCE", 2.0)
    times = [time.monotonic()]
    for steps in (4, 8):
        cluster(tmp_path, [FakeEngine()], steps, changed(AUDIT_RATE=1.0), save=True)
        times.append(time.monotonic())
    assert times[1] - times[0] < 2.0 < times[2] - times[1]       # when the run goes on, another might come back


def test_a_replica_that_drifted_rebuilds_and_its_results_are_refused(tmp_path):
    packed, digests = expected(9)
    engines = [FakeEngine(pause=0.002), Drifting(pause=0.001), FakeEngine(pause=0.002)]
    server = cluster(tmp_path, engines, 9, save=True)
    assert "worker w1" in server.lines.text and "its state at step 3 is not that of others" in server.lines.text
    # one of two that differ cannot know that it is right
    assert engines[1].loads >= 1 and engines[0].loads + engines[2].loads <= 1
    assert [engine.state().digests() for engine in engines] == [digests] * 3
    run = history.open_run(CFG, tmp_path)
    assert whole(run) == packed
    run.close()


def test_the_majority_of_authors_decides_which_state_is_right():
    votes = trust.Trust()
    assert votes.judge(5, A, b"x", False) == (trust.AGREES, set(), False) and votes.decided(5) and votes.decided(6)
    assert votes.judge(5, A, b"x", False)[0] == trust.AGREES                  # its own vote counts once
    assert votes.judge(5, B, b"y", False)[0] == trust.REBUILD and not votes.decided(5)
    assert votes.judge(5, B, b"y", True) == (trust.WAIT, set(), True)
    assert votes.judge(5, A, b"x", True) == (trust.WAIT, set(), False)
    assert votes.contradicts(5, b"x") and not votes.contradicts(6, b"x") and votes.leading(6) == b""
    assert votes.judge(5, C, b"y", False) == (trust.AGREES, {A}, True) and votes.leading(5) == b"y"
    assert votes.judge(5, A, b"x", True)[0] == trust.BAN and not votes.contradicts(5, b"y")
    assert votes.judge(5, A, b"y", True) == (trust.AGREES, set(), False)         # it has rebuilt
    votes.forget(A), votes.forget(B), votes.forget(C)
    assert votes.decided(5) and votes.leading(5) == b""
    for step in range(5, 30):
        votes.judge(step, A, b"x", False)
    assert min(votes.votes) == 30 - trust.STEPS_KEPT


def test_a_step_does_not_end_while_states_differ_and_nobody_has_decided(tmp_path):
    coordinator = Coordinator(CFG, history.open_run(CFG), log_dir=tmp_path, console=egg_net.Console(Lines()))
    try:
        coordinator.progress.chunk_handed_out()                  # as the first result does
        one, two, three = (admission.Author("127.0.0.1", name, name) for name in "abc")
        coordinator.trust.votes[0] = {b"right": {one}, b"wrong": {two}}
        pairs = np.zeros(CFG.CHUNK_SIZE // 2, np.int8)
        for chunk in range(CFG.N_CHUNKS):
            coordinator.dispatcher.work.result(None, one, chunk, fitness_digits.pack_ternary(pairs), 0)
        coordinator._complete_step_if_done()
        assert coordinator.dispatcher.work.complete and coordinator.run.step == 0
        coordinator.trust.votes[0][b"right"].add(three)
        coordinator._complete_step_if_done()
        assert coordinator.run.step == 1
    finally:
        coordinator.close()


def test_a_replica_that_drifts_again_after_rebuilding_is_banned(tmp_path):
    server = cluster(tmp_path, [FakeEngine(pause=0.002), Drifting(times=99, pause=0.002), FakeEngine(pause=0.002)], 9,
                     save=True)
    assert re.search("banned w1 at 127.0.0.1: its state at step 3 is not that of others, and was not after it was "
                     "rebuilt", server.lines.text)
    run = history.open_run(CFG, tmp_path)
    assert whole(run) == expected(9)[0]
    run.close()


def test_when_two_hold_different_states_both_rebuild_and_a_third_decides(tmp_path):
    with Server(tmp_path) as server:
        a, b = Peer2(server.port, name="a"), Peer2(server.port, name="b")
        a.ask(0, b"a" * 16)
        assert a.next(JOB_RESPONSE)[0] == JOB_RESPONSE
        a.result(0, 0)
        until(lambda: server.coordinator.dispatcher.work.done)
        b.ask(0, b"b" * 16)
        assert b.next(REBUILD, JOB_RESPONSE) == (REBUILD, bytes(8))
        a.ask(0, b"a" * 16)
        assert a.next(REBUILD, JOB_RESPONSE) == (REBUILD, bytes(8))
        # what was computed in doubt is done again
        assert not server.coordinator.dispatcher.work.done
        for peer, digest in ((a, b"a"), (b, b"b")):
            peer.ask(0, digest * 16)
            assert peer.silent()
        assert "start another worker, which decides" in server.lines.text
        c, started = Peer2(server.port, name="c"), time.monotonic()
        c.ask(0, b"b" * 16)
        assert c.next(JOB_RESPONSE)[0] == JOB_RESPONSE and b.next(JOB_RESPONSE)[0] == JOB_RESPONSE
        assert time.monotonic() - started < 1                                   # b was waiting for just this
        with pytest.raises(egg_net.NetError, match="banned: its state at step 0"):
            a.next(JOB_RESPONSE)
        with pytest.raises(egg_net.NetError, match="banned: its state at step 0"):
            Peer2(server.port, name="a")


# --- snapshots -------------------------------------------------------------------------------------------------------

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


# --- what the disk, a kill and chaos do ------------------------------------------------------------------------------

def test_a_full_disk_ends_the_coordinator_with_a_line_and_the_run_goes_on_after(tmp_path):
    """The limit on the size of a file stands for the disk: a write that does not fit fails in the middle."""
    # so that it is larger than coordinator.log, which grows too
    filled(tmp_path, 60)
    size = (tmp_path / history.FILE).stat().st_size
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    program = ("import resource, sys, egg_net, egg_config; from cluster import history\n"
               f"resource.setrlimit(resource.RLIMIT_FSIZE, ({size + 250}, {size + 250}))\n"
               f"cfg = egg_config.make(**{CFG.constants()!r})\n"
               "try:\n"
               f"    egg_net.run_coordinator(cfg, '127.0.0.1', 0, save_dir={str(tmp_path)!r})\n"
               "except egg_config.EggError as error:\n"
               "    sys.exit(f'egg: {error}')\n")
    process = subprocess.Popen([sys.executable, "-c", program], cwd=pathlib.Path(egg_net.__file__).parent,
                               stdout=subprocess.PIPE,
                               stderr=subprocess.PIPE, text=True)
    port = int(re.search(r":(\d+), step 60", process.stdout.readline())[1])
    work_in_thread(port, FakeEngine(pause=0.001), retry=True)
    _, err = process.communicate(timeout=20)
    kept = re.fullmatch(r"egg: .*history.egg: File too large: step (\d+) is not kept, all before it are; mend this and "
                        r"start the same command again\n", err)
    assert process.returncode == 1 and kept, err
    assert resource.getrlimit(resource.RLIMIT_FSIZE) == before
    run = history.open_run(CFG, tmp_path)
    assert run.step == int(kept[1]) > 60 and run.notices == []
    run.close()


def test_snapshots_that_cannot_be_written_do_not_end_the_run(tmp_path, monkeypatch):
    cfg = changed(SNAPSHOT_EVERY=2)

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(snapshots.Upload, "keep", full)
    server = cluster(tmp_path, [FakeEngine(cfg, 0.002)], 6, cfg, save=True)
    assert server.lines.text.count("no more snapshots, No space left on device") == 1
    assert not [n for n in os.listdir(tmp_path) if n.startswith("snapshot")]


def test_an_upload_ends_with_its_worker_and_with_no_other(tmp_path):
    cfg = changed(SNAPSHOT_EVERY=1)
    with Server(tmp_path, cfg, save=True) as server:
        giver, other = Peer2(server.port, cfg, name="giver"), Peer2(server.port, cfg, name="other")
        for chunk in range(4):
            giver.result(0, giver.chunk(0))
        giver.ask(1, b"g" * 16)
        assert giver.next(wire.SNAPSHOT_WANTED)[1] == (1).to_bytes(8, "big")
        coordinator = server.coordinator
        collector, upload = coordinator.collector, coordinator.collector.upload
        author = next(worker.author for worker in coordinator.dispatcher.workers if worker.author.name == "other")
        for _ in range(2):                                       # the second time there is nothing left to distrust
            coordinator._distrust(author)
        other.link.close()
        until(lambda: len(coordinator.dispatcher.workers) == 1)
        assert upload and collector.upload is upload
        giver.link.close()
        until(lambda: collector.upload is None)
    assert not [name for name in os.listdir(tmp_path) if name.endswith(".part")]


def test_a_snapshot_of_one_that_had_drifted_is_removed(tmp_path):
    cfg = changed(SNAPSHOT_EVERY=1)
    with Server(tmp_path, cfg, save=True) as server:
        engine = FakeEngine(cfg)
        liar, others = Peer2(server.port, cfg, name="liar"), [Peer2(server.port, cfg, name=f"w{i}") for i in range(2)]
        for chunk in range(4):
            liar.ask(0, engine.digest())
            assert liar.answer()[2] == 32 * chunk
            liar.result(0, 32 * chunk)
        engine.update(np.ones(cfg.N_PAIRS, np.int8))
        right, state = engine.digest(), engine.state()
        state.weights[5] ^= 1
        liar.ask(1, state_digest.of_state(state))
        assert liar.next(wire.SNAPSHOT_WANTED)[1] == (1).to_bytes(8, "big")
        body = snapshots.pack(state)
        for at in range(0, len(body), wire.BLOCK):
            liar.link.send(liar.link.frame(wire.SNAPSHOT_DATA, 1, len(body), at, body[at:at + wire.BLOCK]))
        until(lambda: server.coordinator.shelf.newest == 1)
        others[0].ask(1, right)
        assert others[0].next(REBUILD, JOB_RESPONSE) == (REBUILD, bytes(8))     # not from that snapshot
        assert server.coordinator.shelf.newest == 0
        others[0].ask(1, right)
        others[1].ask(1, right)
        assert others[1].next(JOB_RESPONSE) and others[0].next(JOB_RESPONSE)
        refused_by(lambda: (liar.ask(1, state_digest.of_state(state)), liar.next(REBUILD), liar.ask(1, bytes(16)),
                            liar.next(JOB_RESPONSE)), "banned")
    assert not [n for n in os.listdir(tmp_path) if n.startswith("snapshot")]


def test_chaos_changes_no_bit(tmp_path):
    steps, kills = chaos(tmp_path, 1, steps=25, kills=5)
    assert steps >= 25 and kills >= 5


# --- hostile bytes ---------------------------------------------------------------------------------------------------

OPCODES = [0, 1, 2, 3, 16, *range(32, 51), 77, 255]
FRAME = st.tuples(st.sampled_from([1, 1, 2, 2, 2, 0, 9]), st.sampled_from(OPCODES),
                  st.one_of(st.none(), st.integers(0, 0xFFFFFFFF)),
                  st.one_of(st.binary(max_size=130),
                            st.sampled_from([bytes(n) for n in (0, 24, 28, 32, 33, 44, 48, 64)])))


def hostile(parts):
    """bytes of frames with wrong versions, opcodes and lengths."""
    return b"".join(wire.HEADER.pack(b"JOBS", version, opcode, len(body) if size is None else size) + body
                    for version, opcode, size, body in parts)


BYTES = st.one_of(st.binary(max_size=300), st.lists(FRAME, max_size=5).map(hostile),
                  st.tuples(st.lists(FRAME, max_size=3).map(hostile), st.binary(max_size=40)).map(b"".join))


@hypothesis.given(BYTES, st.integers(1, 50))
def test_the_frame_parser_takes_any_bytes(data, piece):
    """However the bytes come: frames or a FrameError, never more held than the longest frame that is allowed."""
    def parse(pieces):
        buffer, got = bytearray(), []
        try:
            for part in pieces:
                buffer += part
                while one := wire.next_frame(buffer, LIMITS):
                    got.append(one)
        except wire.FrameError as error:
            return got, str(error)
        return got, bytes(buffer)

    whole_, split = parse([data]), parse([data[k:k + piece] for k in range(0, len(data), piece)])
    assert whole_ == split
    for version, opcode, payload in whole_[0]:
        least, most = LIMITS[version].get(opcode, (0, wire.OTHER_LIMIT))
        assert least <= len(payload) <= most


@hypothesis.given(BYTES)
def test_snapshots_histories_and_cards_take_any_bytes(data):
    with pytest.raises(ValueError):
        snapshots.unpack(CFG, data)
    with contextlib.suppress(wire.FrameError):
        greeting.read_card(data)
    for text in (b"[" * 5000, b'{"role":' * 900, b'{"role": "worker", "config": 1}', b"1" * 5000,
                 b'{"role": "worker", "config": {}, "data": "zz"}'):
        with pytest.raises(wire.FrameError):
            greeting.read_card(text)


@pytest.fixture(scope="module")
def besieged(tmp_path_factory):
    """A coordinator with an honest worker, for hostile clients: (server, engine). It must serve throughout."""
    cfg, directory = changed(CONNECTIONS_PER_ADDRESS=200, SNAPSHOT_EVERY=0), tmp_path_factory.mktemp("besieged")
    engine = FakeEngine(cfg, pause=0.002)
    with Server(directory, cfg, save=True, stay=True) as server:
        thread = work_in_thread(server.port, engine, cfg, name="honest")
        until(lambda: server.run.step > 0)
        yield server, engine
        assert not server.failure, server.failure
        before = server.run.step
        until(lambda: server.run.step > before + 2)
        server.stop()
        thread.join(10)
    assert server.lines.text.count("refused") < 100
    run = history.open_run(cfg, directory)                   # the honest worker is where the history leads
    assert engine.step <= run.step
    same = FakeEngine(cfg)
    for step in range(engine.step):
        same.update(fitness_digits.unpack_ternary(run.fitness(step), cfg.N_PAIRS))
    assert engine.step > 0 and engine.state().digests() == same.state().digests()
    run.close()


@SLOW
@hypothesis.given(st.lists(BYTES, min_size=1, max_size=4), st.booleans(), st.booleans())
def test_a_live_coordinator_takes_any_bytes(besieged, parts, introduced, patient):
    """Before and after the introduction, with and without reading the answers: no exception, and the honest go on."""
    server, _ = besieged
    with contextlib.suppress(OSError, egg_net.NetError, egg_net.OldCoordinator):
        link = Peer2(server.port, server.coordinator.cfg, name="hostile").link if introduced else None
        sock = link.sock if link else socket.create_connection(("127.0.0.1", server.port))
        try:
            sock.settimeout(0.001 if not patient else 0.01)
            for part in parts:
                sock.sendall(part)
                with contextlib.suppress(TimeoutError):
                    sock.recv(1 << 16)
        finally:
            sock.close()
    assert not server.failure and server.thread.is_alive()


def test_slow_clients_do_not_hold_up_the_others(besieged):
    server, engine = besieged
    crowd = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(150)]
    step = server.run.step
    for turn in range(20):
        for i, sock in enumerate(crowd):
            with contextlib.suppress(OSError):
                sock.send(wire.frame(wire.Frame(JOIN), bytes(8000), version=V2)[turn:turn + 1])
        time.sleep(0.01)
    until(lambda: server.run.step > step + 5)
    assert max(len(c.inbox) for c in list(server.coordinator.hub.connections)) < 1 << 17
    [sock.close() for sock in crowd]


# --- status, history, load -------------------------------------------------------------------------------------------

def test_status_as_a_table_and_as_json(tmp_path):
    import json
    secret = tmp_path / "secret"
    secret.write_bytes(SECRET)
    egg = [sys.executable, pathlib.Path(egg_net.__file__).parent / "egg.py", "status", "127.0.0.1", "--port"]
    with Server(tmp_path, access=auth.Access(SECRET)) as server:
        engine = FakeEngine(pause=0.01)
        work_in_thread(server.port, engine, access=auth.Access(SECRET), name="node7/cuda:0")
        until(lambda: server.run.step >= 2)
        table = subprocess.run([*egg, str(server.port), "--secret-file", secret], capture_output=True, text=True)
        told = json.loads(subprocess.run([*egg, str(server.port), "--secret-file", secret, "--json"],
                                         capture_output=True, text=True).stdout)
        without = subprocess.run([*egg, str(server.port)], capture_output=True, text=True)
    assert table.returncode == 0 and re.search(r"^step \d+, \d of 4 chunks done, [\d,]+ tokens/s, loss ",
                                               table.stdout), table
    assert re.search(r"^node7/cuda:0 +fake +127.0.0.1:\d+ +(computing|waiting|catching up) +\d+ +\d+ +[\d.e-]+ "
                     r"+\d\.\d s$", table.stdout, re.M)
    assert told["step"] >= 2 and told["chunks"] == 4 and told["steps"] is None and told["tokens_per_second"] > 0
    worker, = told["workers"]
    assert worker["name"] == "node7/cuda:0" and worker["protocol"] == 2
    assert worker["chunks"] >= 8 and worker["last_seen"] < 5
    assert without.returncode == 2
    assert without.stderr.startswith("egg: 127.0.0.1:") and "wants a secret" in without.stderr


def test_a_history_of_100000_steps_opens_quickly(tmp_path):
    cfg = egg_config.load("laptop", environ={})
    run = history.open_run(cfg, tmp_path)
    fitness = fitness_digits.pack_ternary(np.random.default_rng(1).integers(-1, 2, cfg.N_PAIRS).astype(np.int8))
    for k in range(100_000):
        run.append(fitness, k, 0)
    run.close()
    started = time.thread_time()
    run = history.open_run(cfg, tmp_path)
    seconds = time.thread_time() - started
    assert run.step == 100_000 and run.fitness(50_000) == fitness and seconds < 5, f"{seconds:.1f} s"
    run.close()


def test_a_crowd_that_arrives_is_counted_when_it_makes_a_difference(monkeypatch):
    """Not at every arrival: thousands of workers come at once where a coordinator starts again."""
    dispatcher, counted = dispatch.Dispatcher(CFG, SimpleNamespace(step=0), None, None, 60), []
    dispatcher.work, original = SimpleNamespace(settle=lambda: None), dispatch.Dispatcher._count_authors
    monkeypatch.setattr(dispatch.Dispatcher, "_count_authors", lambda self, now: counted.append(original(self, now)))

    class Arrival(SimpleNamespace):
        __hash__ = object.__hash__

    def arrive(host, name):
        author = admission.Author(host, name, name)
        worker = Arrival(trusted=True, stuck=False, chunks=0, author=author, step=0, waiting=True, held={})
        dispatcher.enter(worker)
        dispatcher.arrived(worker)

    arrive("a", "0")
    assert (dispatcher.alone, dispatcher.several, dispatcher.by_host) == (True, False, False)
    for i in range(1, 1000):
        arrive("a", str(i))
    assert (dispatcher.alone, dispatcher.several, dispatcher.by_host, len(counted)) == (False, True, False, 2)
    for i in range(1000):
        arrive(f"b{i}", "0")
    assert dispatcher.by_host and len(counted) == 3 and dispatcher.known == 2000
    arrive("a", "0")
    last = [dispatcher.leave(worker) for worker in list(dispatcher.workers)]         # of its author
    assert last.count(False) == 1 and dispatcher.known == 0


def test_many_workers_are_served(tmp_path):
    did = load.measure(tmp_path, 100, 1.5, 0.1)
    assert did["results/s"] > 300 and did["MB"] < 300, did


# --- Slurm -----------------------------------------------------------------------------------------------------------

FAKE_WORKER = """
import sys
if "--list-devices" in sys.argv:
    sys.exit(print("\\n".join(f"cuda:{i}" for i in range(5))))
with open("log", "a") as log:
    log.write(" ".join(sys.argv[1:]) + "\\n")
"""


@pytest.mark.parametrize("tasks, task, gpus", [("1(x4)", 0, [0, 1, 2, 3, 4]), ("2(x4)", 0, [0, 2, 4]),
                                               ("2,1(x3)", 1, [1, 3]), ("8", 6, [])])
def test_tasks_of_a_slurm_step_share_the_gpus_of_a_node(tmp_path, tasks, task, gpus):
    here = pathlib.Path(egg_net.__file__).parent
    (tmp_path / "egg.py").write_text(FAKE_WORKER)
    shutil.copy(here / "run-workers.sh", tmp_path)
    environ = {**os.environ, "SLURM_STEP_TASKS_PER_NODE": tasks, "SLURM_LOCALID": str(task),
               "SLURM_LAUNCH_NODE_IPADDR": "10.1.2.3"}
    did = subprocess.run([tmp_path / "run-workers.sh", "--port", "7"], cwd="/", env=environ, timeout=20)
    log = tmp_path / "log"
    assert did.returncode == 0
    lines = sorted(log.read_text().splitlines() if log.exists() else [])
    assert lines == [f"worker 10.1.2.3 --port 7 --gpu {i}" for i in gpus]
