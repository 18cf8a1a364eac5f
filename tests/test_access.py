"""Who is let in: addresses, secrets, TLS, limits, names. And what one peer cannot take from the others: memory, time,
connections."""

import hmac
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from contextlib import suppress
from json import dumps
from threading import Thread
from unittest import mock

from pytest import mark, raises

import egg
import egg_config
import egg_net
from cluster import admission, auth, hub, link, status, wire
from cluster.auth import (Access, AuthError, client_tls, key_of, listen_host,
                          read_secret, server_tls, whole_secret)
from cluster.wire import HEARTBEAT, HELLO, JOB_REQUEST, V2, frame
from commands import certificate, fails, process
from coordinators import Peer, Peer2, Server, listening, named, refused, turned_away, until, whole
from fakes import CFG, FakeEngine, SECRET, changed, expected
from recordings import HERE


# --- access -----------------------------------------------------------------------------------------------------------

def test_where_a_coordinator_listens():
    closed, *safe = Access(), Access(SECRET), Access(insecure=True)
    assert listen_host(None, closed) == "127.0.0.1"
    assert [listen_host(None, access) for access in safe] == 2 * ["0.0.0.0"]
    for host in ("localhost", "::1", "127.8.9.1"):
        assert listen_host(host, closed) == host
    assert egg.parsed(["coordinator", "--host", "[::1]"]).host == "::1"
    for host in ("0.0.0.0", "::", "node7"):
        assert [listen_host(host, access) for access in safe] == 2 * [host]
        with raises(AuthError, match="without a secret would let anybody in"):
            listen_host(host, closed)


def test_secrets_are_read_from_a_file_or_the_environment(tmp_path):
    path, environ = tmp_path / "s", {"EGG_SECRET": "another secret, as long"}
    path.write_bytes(SECRET + b"\n")
    assert read_secret(path, environ) == (SECRET, "")
    assert [read_secret(None, environ)[0] for environ in (environ, {})] == [b"another secret, as long", b""]
    path.write_bytes(b"123")
    for path, environ, words in ((path, {}, "holds 3 bytes"), (None, {"EGG_SECRET": ""}, "EGG_SECRET holds 0 bytes"),
                                 (tmp_path / "none", {}, "No such file")):
        with raises(AuthError, match=words):
            read_secret(path, environ)


def test_strangers_are_refused_and_logged_once(tmp_path):
    """Without a secret, with a wrong one, with a wrong proof, with version 1, without an introduction: thrice each, one
    line each."""
    with Server(tmp_path, access=Access(SECRET)) as server:
        honest = Peer2(server, secret=SECRET)
        for _ in range(3):
            turned_away("wants a secret", server)
            turned_away("does not know the secret", server, secret=b"not the secret but long")
            for words, *frames in ((b"wrong secret", frame(HELLO, bytes(32), version=V2),
                                    frame(wire.JOIN, bytes(32), b"{}", version=V2)),
                                   (b"JOBS\x02\x24", frame(wire.Frame(JOB_REQUEST), bytes(64), version=V2))):
                with server.connect() as sock:
                    sock.sendall(b"".join(frames))
                    assert words in b"".join(iter(lambda: sock.recv(1000), b""))
            old = Peer(server)
            old.ask(0)
            assert old.closed()
        assert honest.chunk(0) == 0
    told = [line for line in server.said.splitlines() if line.startswith("refused")]
    assert len(told) == 4, told
    for words in ("wrong secret", "it does not believe our proof", "protocol 1 has no secret",
                  "JOB_REQUEST before the introduction"):
        assert sum(words in line for line in told) == 1


def test_tls(tmp_path, certificates):
    cert, key = certificates
    packed, digest = expected(12)
    access, ours = Access(SECRET, server_tls(cert, key)), Access(SECRET, client_tls(cert))
    engine, late = FakeEngine(), FakeEngine()
    with Server(tmp_path, changed(SNAPSHOT_EVERY=4), save=True, access=access, stay=True, steps=12) as server:
        for one in engine, late:
            server.work(one, access=ours)
            until(lambda: one.step == server.shelf.newest == 12)
            assert whole(server.run) == packed and one.digest() == digest
        # by a snapshot of several blocks, through TLS
        assert late.loads == 1
        with refused("check that it is an egg coordinator of protocol 2, and give --tls-ca if it has TLS"):
            status.fetch_status(CFG, "127.0.0.1", server.port, Access(SECRET))
        assert "no TLS" in server.said
        stranger, _ = certificate(tmp_path, "stranger", "-subj", "/CN=localhost")
        with refused("its certificate is not good") as told:
            Peer2(server, access=Access(SECRET, client_tls(stranger)))
        assert told.value.status == 2                # nothing would mend it
    with Server(tmp_path) as server:
        turned_away("it has no secret, and here is one", server, secret=SECRET)
        with raises((egg_net.NetError, OSError)) as told:
            Peer2(server, access=ours)
        assert getattr(told.value, "status", 2) == 2
    for wrong in (cert, None), (None, key), (key, key):
        with raises(AuthError):
            server_tls(*wrong)


@mark.skipif(shutil.which("openssl") is None, reason="needs openssl")
def test_the_tls_commands_of_the_document(here):
    """They are run as they stand there, and a worker gets in with what they made."""
    text = (HERE / "docs" / "CLUSTERS.md").read_text()
    lines = re.findall("^    (openssl .*)$", text, re.M)
    made = subprocess.run(["sh", "-ec", "\n".join(lines)], capture_output=True, text=True)
    assert len(lines) == 2 and made.returncode == 0, made
    host, worker = (egg.parsed(shlex.split(re.search(f"egg.py ({command} .*--tls.*)", text)[1], comments=True))
                    for command in ("coordinator", "worker"))
    with Server(here, access=Access(SECRET, server_tls(host.tls_cert, host.tls_key))) as server:
        Peer2(server, access=Access(SECRET, client_tls(worker.tls_ca)))


def test_connections_are_bounded(tmp_path, monkeypatch):
    with Server(tmp_path, changed(IDLE_TIMEOUT=3600)) as server:
        silent = [server.connect() for _ in range(5)]
        server.admission.most = 4
        honest, *others = [Peer2(server) for _ in range(4)]
        with raises(TimeoutError, match="4 connections are open, as many as can be"):
            Peer2(server)
        [peer.close() for peer in others]
        with mock.patch.object(auth, "HANDSHAKE_SECONDS", 0.3):
            until(lambda: len(server.hub.connections) == 1)                    # the silent ones are closed
            assert all(s.recv(1) == b"" for s in silent)
            assert server.said.count("did not complete the introduction within 0.3 s") == 1
        session, = server.hub.connections
        session.heard -= 2000                                                          # as if it was silent for so long
        honest.send(wire.HEARTBEAT)
        until(lambda: time.monotonic() - session.heard < 1000)                         # heartbeats keep it
        assert honest.chunk(0) == 0
        assert Peer(server).chunk(0) == 32                  # version 1 has none, and is idle all the same
        for session in list(server.hub.connections):
            session.heard -= 3600
        until(lambda: not server.hub.connections)
        assert "said nothing for 3600 s" in server.said


def test_a_worker_with_other_constants_learns_what_to_change(tmp_path):
    """The constants, with their values where they are unset, and what both sides have to be given."""
    advice = ": give both the same egg, egg_config.py, --preset, -D and --objective$"
    laptop, default = egg_config.make(**egg_config.PRESETS["laptop-bytes"]), egg_config.make()
    with Server(tmp_path, laptop) as server:
        turned_away(r"configuration: MODEL = gru at the coordinator, transformer at the worker; .*; and \d\d more"
                    + advice, server, default)
        turned_away(r"configuration: HOST_GAUSSIAN = 1 at the coordinator, 0 at the worker; SOFT_TARGETS = unset at "
                    r"the coordinator, 0:2 at the worker" + advice,
                    server, laptop.changed(HOST_GAUSSIAN=0, SOFT_TARGETS=((0, 2),)))
        older = {name: value for name, value in laptop.saved().items() if name != "FORMAT_OF_VOTES"}
        turned_away("configuration: FORMAT_OF_VOTES = sums at the coordinator, unknown at the worker" + advice, server,
                    config=older)
        turned_away("configuration: PERTURB = units at the coordinator, activations at the worker; FORMAT.*" + advice,
                    server, config={**older, "PERTURB": "activations", "CREDIT": 8, "VERSION_OF_VOTES": 3})
    with Server(tmp_path, default, access=Access(SECRET)) as server:
        turned_away("configuration: MODEL = transformer at the coordinator, gru at the worker; HIDDEN_DIM = 256 .*; "
                    r"N_LAYERS = 4 at the coordinator, 1 at the worker; and \d\d more" + advice,
                    server, secret=SECRET, config={**laptop.saved(), "MUCH": 9})


def test_no_text_of_a_peer_can_write_to_the_terminal_or_fill_the_log(server):
    turned_away("another configuration", server, config={"N_LAYERS": "\x1b[31m\nStep 9 | fake", "\x07": "\x1b]0;x"})
    peer = Peer2(server, name="\x1b[31mred\nStep 5 | fake", device="\x07bell\u202e")
    server.admission.coordinator.events._of_peers = hub.Budget(0, most := 20)
    for i in range(3 * most):
        peer.send(wire.LOG_MESSAGE, f"word {i}.".encode())
    assert peer.chunk(0) == 0
    text = server.said
    assert not re.search("[\x1b\x07\u202e]|^Step", text, re.M) and text.count("another configuration") == 1
    assert "word 0." in text and most - 10 <= text.count("word ") < most + 10
    assert "worker [31mred Step 5 | fake (127.0.0.1:" in text


# --- the secret -------------------------------------------------------------------------------------------------------

def test_an_impostor_gets_nothing_to_guess_with():
    """It does not know the secret, but says that it proves itself first."""
    got = []

    def impostor(sock):
        sock.recv(1000)
        for opcode, *fields in (wire.CHALLENGE, bytes(32), wire.SECRET_WANTED), (wire.PROVED, os.urandom(32)):
            sock.sendall(frame(opcode, *fields, version=V2))
            got.append(sock.recv(10000))

    with listening(impostor) as port:
        turned_away("does not know the secret", port, secret=SECRET)
    assert got == [frame(wire.PROVE, version=V2), b""]


def test_a_coordinator_proves_itself_once_and_with_a_slow_key():
    host, open_to_all = auth.host(SECRET), auth.host(b"")
    for side in host, open_to_all:
        next(side)
        _, challenge, _ = side.send((HELLO, bytes(32)))
        if side is host:
            opcode, proof = host.send((wire.PROVE, b""))
            text = b"egg 2 coordinator first\0" + bytes(32) + challenge
            assert opcode == wire.PROVED and proof == hmac.digest(auth.stretched(SECRET), text, "sha256")
        with raises(wire.FrameError):
            side.send((wire.PROVE, b""))
    auth.stretched.cache_clear()
    started = time.process_time()
    auth.stretched(b"a guess of the secret")
    assert time.process_time() - started > 0.01


# --- keys -------------------------------------------------------------------------------------------------------------

def test_a_key_lets_in_one_name_and_bans_stay_with_it(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("EGG_SECRET", SECRET.decode())
    assert egg.main(["key", "gpu7"]) == 0
    file = tmp_path / "key"
    file.write_text(capsys.readouterr().out)
    secret, name = read_secret(file)
    assert (secret, name) == (key_of(SECRET, "gpu7"), "gpu7") and SECRET not in file.read_bytes()
    with raises(AuthError, match="holds the key of the worker gpu7: this command needs the secret"):
        whole_secret(file)
    with Server(tmp_path, access=Access(SECRET), save=True) as server:
        ours = Access(secret, name=name)
        peers = [Peer2(server, access=ours, name=stated) for stated in ("another", "a third")]
        server.has_workers(len(peers))
        author, = {worker.author for worker in server.dispatcher.workers}
        assert author.voter == "gpu7"                                                 # one machine, one vote
        turned_away("does not know the secret", server, access=Access(secret, name="gpu8"))
        server.calls.put(lambda: [server._blame(author, "it lied", again=True) for _ in range(3)])
        server.says("banned gpu7")
        turned_away("banned: it lied; to let gpu7 in again", server, access=ours, name="yet another")


@mark.parametrize("name", ["", "a b", "x" * 65, "\u00e4", "a\n"])
def test_names_that_cannot_have_a_key_are_one_line(name, capsys, monkeypatch):
    monkeypatch.setenv("EGG_SECRET", "a secret that is long enough")
    assert egg.main(["key", name]) == 2
    assert "cannot be the name of a key" in capsys.readouterr().err


# --- memory -----------------------------------------------------------------------------------------------------------

def test_a_flood_of_frames_fills_no_memory_and_keeps_nobody_waiting(server):
    """A turn takes a few frames of each, and nobody is read from while a frame of theirs is unhandled."""
    flooding, honest = named(server, "flooding", "honest")
    flooding.chunk(0)
    theirs = server.worker("flooding").session
    Thread(target=pour, args=(flooding.link.sock, HEARTBEATS * 2_000_000), daemon=True).start()
    until(lambda: theirs.inbox)
    for _ in range(3):
        started = time.process_time()                            # which a busy machine does not lengthen
        honest.works(0)
        assert time.process_time() - started < 0.5
        assert len(theirs.inbox) <= 2 * hub.Connection.PIECE


def test_a_flood_of_a_coordinator_fills_no_memory_of_a_worker():
    with listening(lambda sock: pour(sock, frame(wire.JOB_RESPONSE, 42, 0, 0, 0) * 400_000)) as port:
        ours = link.Link(CFG, "127.0.0.1", port)                 # of version 1: no introduction
        until(lambda: ours.check() or ours.inbox)                # it has begun
        for _ in range(2000):
            ours.check()                                         # between slices of a chunk
        assert 0 < len(ours.inbox) <= 1 << 17
        ours.close()


HEARTBEATS = frame(HEARTBEAT, version=V2)


def pour(sock, data):
    with suppress(OSError):
        sock.sendall(data)


# --- floods -----------------------------------------------------------------------------------------------------------

def test_connections_without_proof_keep_no_worker_out(tmp_path):
    with Server(tmp_path) as server:
        half = [server.connect() for _ in range(1000)]
        started = time.monotonic()
        for sock in half[::2]:
            pour(sock, frame(HELLO, bytes(32), version=V2))
        peers = Peer2(server), Peer(server)
        assert [peer.chunk(0) for peer in peers] == [0, 32]
        assert time.monotonic() - started < 5
        assert len(server.admission.arrivals) <= 256
        [sock.close() for sock in half]
        until(lambda: len(server.hub.connections) == 2)


def test_few_files_are_one_line_at_the_start(tmp_path):
    done = process("coordinator --port 0", python=("bash", "-c", 'ulimit -n 64; exec "$@"', "-", sys.executable),
                   cwd=tmp_path)
    fails(done, 1, "may open 64 files", "ulimit -n")


# --- requests for the status ------------------------------------------------------------------------------------------

def test_readers_that_do_not_read_are_disconnected(tmp_path, monkeypatch):
    monkeypatch.setattr(admission, "FRAME_SECONDS", 0.5)
    monkeypatch.setattr(auth, "HANDSHAKE_SECONDS", 0.5)
    with Server(tmp_path) as server:
        server.admission.coordinator.status = lambda: "x" * (wire.STATUS.most - 2)          # and quotes
        readers = [Peer2(server, role="status").link for _ in range(8)]
        assert len(readers[0].next(wire.STATUS, 60)) == wire.STATUS.most              # who reads gets it whole
        until(lambda: not server.hub.connections)
        assert Peer2(server).chunk(0) == 0


@mark.parametrize("payload", [
    b"{}", b"5", b"\xff", b"[" * 100000,
    dumps({"steps": 1, "step": 1, "chunks_done": 1, "chunks": 1, "tokens_per_second": 1, "loss": "x"}).encode()])
def test_a_hostile_status_is_one_line(payload, monkeypatch):
    monkeypatch.setattr(status, "Link", lambda *_: mock.Mock(next=lambda *_: payload))
    with refused("a status that cannot be read"):
        status.fetch_status(CFG, "127.0.0.1", 1)
