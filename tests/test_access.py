"""Who is let in: addresses, secrets, TLS, limits, names."""

import contextlib
import hmac
import os
import re
import shlex
import shutil
import subprocess
import time
from json import dumps
from unittest import mock

from pytest import mark, raises

import egg
import egg_config
import egg_net
from cluster import admission, auth, hub, snapshots, status, wire
from cluster.auth import (Access, AuthError, Caller, Host, client_tls, key_of, listen_host,
                          page_password, read_secret, server_tls, whole_secret)
from cluster.wire import HELLO, JOB_REQUEST, V2, WELCOME, frame
from coordinators import Peer, Peer2, Server, idle, listening, refused, turned_away, until, whole
from fakes import CFG, FakeEngine, Lines, SECRET, card, changed, expected
from recordings import HERE
from readings import configured

LIMITS = wire.limits(CFG)


# --- access -----------------------------------------------------------------------------------------------------------

def test_where_a_coordinator_listens():
    closed, secret, open_ = Access(), Access(SECRET), Access(insecure=True)
    assert listen_host(None, closed) == "127.0.0.1"
    assert listen_host(None, secret) == listen_host(None, open_) == "0.0.0.0"
    for host in ("127.0.0.1", "localhost", "::1", "127.8.9.1"):
        assert listen_host(host, closed) == host
    for host in ("0.0.0.0", "::", "10.0.0.1", "node7"):
        assert listen_host(host, secret) == listen_host(host, open_) == host
        with raises(AuthError, match="without a secret would let anybody in"):
            listen_host(host, closed)


def test_secrets_are_read_from_a_file_or_the_environment(tmp_path):
    path, environ = tmp_path / "s", {"EGG_SECRET": "another secret, as long"}
    path.write_bytes(SECRET + b"\n")
    assert read_secret(path, environ) == (SECRET, "")
    assert read_secret(None, environ) == (b"another secret, as long", "")
    assert read_secret(None, {}) == (b"", "")
    path.write_bytes(b"123")
    for path, environ, words in ((path, {}, "holds 3 bytes"), (None, {"EGG_SECRET": ""}, "EGG_SECRET holds 0 bytes"),
                                 (tmp_path / "none", {}, "No such file")):
        with raises(AuthError, match=words):
            read_secret(path, environ)
    assert egg_config.load(environ={"EGG_SECRET": "x"}).fingerprint() == configured().fingerprint()


def test_strangers_are_refused_and_logged_once(tmp_path):
    """Without a secret, with a wrong one, with a recorded proof, with version 1: five times each, one line each."""
    def replay():
        with server.connect() as sock:
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
    with Server(tmp_path, access=Access(SECRET)) as server:
        link = Recording(CFG, "127.0.0.1", server.port, V2, Access(SECRET), card())
        honest = Peer2(server, secret=SECRET)
        assert len(recorded) == 3
        for _ in range(5):
            turned_away("wants a secret", server)
            turned_away("does not know the secret", server, secret=b"not the secret but long")
            replay()
            old = Peer(server)
            old.ask(0)
            assert old.closed()
            sock = server.connect()
            sock.sendall(frame(wire.Frame(JOB_REQUEST), bytes(64), version=V2))           # no introduction at all
            assert wire.next_frame(bytearray(sock.recv(1000)), LIMITS)[1] == wire.ERROR
        assert honest.chunk(0) == 0
    told = [line for line in server.said.splitlines() if line.startswith("refused")]
    assert len(told) == 4, told
    for words in ("wrong secret", "it does not believe our proof", "protocol 1 cannot prove a secret",
                  "JOB_REQUEST before the introduction"):
        assert sum(words in line for line in told) == 1
    link.close()


def test_refusals_are_logged_again_after_a_while(tmp_path, monkeypatch):
    now = [time.monotonic()]
    monkeypatch.setattr(admission.time, "monotonic", lambda: now[0])
    with idle(tmp_path) as coordinator:
        for _ in range(2):
            for port in range(3):
                coordinator.admission.report(f"10.0.0.1:{port}", "wrong secret")
            now[0] += admission.REFUSED_SECONDS + 1
        assert coordinator.console.stream.text.count("refused 10.0.0.1:0: wrong secret") == 2
        assert "10.0.0.1:1" not in coordinator.console.stream.text


def test_a_worker_refuses_a_coordinator_that_does_not_know_the_secret(server):
    turned_away("it has no secret, and here is one", server, secret=SECRET)

    def impostor(sock):
        sock.recv(1000)
        sock.sendall(frame(wire.CHALLENGE, bytes(32), 1, version=V2))
        # sends the worker's own proof back
        sock.sendall(frame(WELCOME, sock.recv(10000)[10:42], snapshots.config_digest(CFG), bytes(32), 0, 0, version=V2))
        sock.recv(1)

    with listening(impostor) as port:
        turned_away("does not know the secret", port, secret=SECRET)


def test_tls(tmp_path, certificates):
    cert, key = certificates
    packed, digest = expected(12)
    access, ours = Access(SECRET, server_tls(cert, key)), Access(SECRET, client_tls(cert))
    engine, late = FakeEngine(), FakeEngine()
    with Server(tmp_path, changed(SNAPSHOT_EVERY=4), save=True, access=access, stay=True, steps=12) as server:
        for one in engine, late:
            server.work(one, access=ours)
            until(lambda: one.step == 12)
            assert whole(server.run) == packed and one.digest() == digest
        # by a snapshot of several blocks, through TLS
        assert late.loads == 1
        with server.connect() as plain:
            plain.sendall(frame(HELLO, bytes(32), version=V2))
            plain.settimeout(60)
            with contextlib.suppress(ConnectionResetError):
                while data := plain.recv(1000):
                    assert b"JOBS" not in data                    # at most an alert of TLS
        assert "no TLS" in server.said
        for plain in Access(SECRET), Access():
            with refused("check that it is an egg coordinator of protocol 2, and give --tls-ca if it has TLS"):
                status.fetch_status(CFG, "127.0.0.1", server.port, plain)
    with Server(tmp_path, access=Access(SECRET)) as server, raises((egg_net.NetError, OSError)):
        Peer2(server, access=ours)
    for wrong in (cert, None), (None, key), (key, key), (tmp_path / "none", key):
        with raises(AuthError):
            server_tls(*wrong)


@mark.skipif(shutil.which("openssl") is None, reason="needs openssl")
def test_the_tls_commands_of_the_document(here):
    """They are run as they stand there, and a worker gets in with what they made."""
    text, engine = (HERE / "docs" / "CLUSTERS.md").read_text(), FakeEngine()
    lines = re.findall("^    (openssl .*)$", text, re.M)
    made = subprocess.run(["sh", "-ec", "\n".join(lines)], capture_output=True, text=True)
    assert len(lines) == 2 and made.returncode == 0, made
    host, worker = (egg.parsed(shlex.split(re.search(f"egg.py ({command} .*--tls.*)", text)[1], comments=True))
                    for command in ("coordinator", "worker"))
    assert os.stat(host.tls_key).st_mode & 0o077 == 0
    with Server(here, access=Access(SECRET, server_tls(host.tls_cert, host.tls_key)), stay=True, steps=2) as server:
        server.work(engine, access=Access(SECRET, client_tls(worker.tls_ca)))
        until(lambda: engine.step == 2)


def test_connections_are_bounded(tmp_path, monkeypatch):
    with Server(tmp_path, changed(IDLE_TIMEOUT=3600)) as server:
        silent = [server.connect() for _ in range(5)]
        server.admission.most = 4
        honest, *others = [Peer2(server) for _ in range(4)]
        for _ in range(3):
            with raises(TimeoutError, match="4 connections are open, as many as can be"):
                Peer2(server)
        assert server.said.count("4 connections are open") == 1
        [peer.close() for peer in others]
        with mock.patch.object(auth, "HANDSHAKE_SECONDS", 0.3):
            until(lambda: len(server.hub.connections) == 1)                    # the silent ones are closed
            assert all(s.recv(1) == b"" for s in silent)
            assert server.said.count("did not complete the introduction within 0.3 s") == 1
        session, = server.hub.connections
        for _ in range(3):
            session.heard -= 2000                                                      # as if it was silent for so long
            honest.send(wire.HEARTBEAT)
            until(lambda: time.monotonic() - session.heard < 1000)
        assert honest.chunk(0) == 0                                                    # heartbeats keep it
        old = Peer(server)
        # version 1 has none, and is idle all the same
        assert old.chunk(0) == 32
        for session in list(server.hub.connections):
            session.heard -= 3600
        until(lambda: not server.hub.connections)
        assert "said nothing for 3600 s" in server.said


def test_a_worker_comes_again_when_there_is_room(tmp_path):
    engine, lines = FakeEngine(), Lines()
    with Server(tmp_path) as server:
        server.admission.most = 1
        first = Peer2(server)
        server.work(engine, retry=True, lines=lines)
        until(lambda: "no coordinator at" in lines.text)
        assert not engine.evaluated
        first.close()
        until(lambda: engine.evaluated)


def test_a_worker_with_other_constants_learns_what_to_change(tmp_path):
    """A forgotten preset, on either side; else the constants, with their values where they are unset."""
    laptop, default = egg_config.make(**egg_config.PRESETS["laptop-bytes"]), egg_config.make()
    with Server(tmp_path, laptop) as server:
        turned_away("the coordinator's constants are those of --preset laptop-bytes: give it to the worker too$",
                    server, default)
        turned_away(r"configuration: CREDIT = 12 at the coordinator, 8 at the worker; SOFT_TARGETS = \[\[0, 2\], .* "
                    r"at the coordinator, \[\] at the worker$", server, laptop.changed(CREDIT=8, SOFT_TARGETS=()))
        assert server.said.count("refused") == 2
    with Server(tmp_path, default, access=Access(SECRET)) as server:
        turned_away("configuration: the worker's constants are those of --preset laptop-bytes: give it to the "
                    "coordinator too", server, laptop, secret=SECRET)
        turned_away("configuration: MODEL = transformer at the coordinator, gru at the worker; HIDDEN_DIM = 256 .*; "
                    r"N_LAYERS = 4 at the coordinator, 1 at the worker; and \d\d more$",
                    server, laptop.changed(CREDIT=9), secret=SECRET, config={**laptop.saved(), "X": 1, "CREDIT": 9})
        assert server.said.count("refused") == 2
    with Server(tmp_path) as server:
        turned_away("X = unknown at the coordinator, 1 at", server, config={**CFG.saved(), "X": 1})


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
    assert server.fetched()["workers"][0]["name"] == "[31mred Step 5 | fake"


# --- the secret -------------------------------------------------------------------------------------------------------

def test_an_impostor_gets_nothing_to_guess_with():
    """It does not know the secret, but says that it proves itself first."""
    got = []

    def impostor(sock):
        sock.recv(1000)
        sock.sendall(frame(wire.CHALLENGE, bytes(32), wire.SECRET_WANTED, version=V2))
        got.append(sock.recv(10000))
        sock.sendall(frame(wire.PROVED, os.urandom(32), version=V2))
        got.append(sock.recv(10000))

    with listening(impostor) as port:
        turned_away("does not know the secret", port, secret=SECRET)
    assert got == [frame(wire.PROVE, version=V2), b""]


def test_a_coordinator_proves_itself_once_and_with_a_slow_key():
    host = Host(SECRET)
    host.handle(HELLO, bytes(32))
    opcode, proof = host.handle(wire.PROVE, b"")
    text = b"egg 2 coordinator first\0" + bytes(32) + host._challenge
    assert opcode == wire.PROVED and proof == hmac.digest(auth.stretched(SECRET), text, "sha256")
    for another in host, Host(b""):
        with raises(wire.FrameError):
            another.handle(wire.PROVE, b"")
    password = page_password(SECRET)
    assert len(password) == 32 and SECRET.decode() not in password and page_password(b"") == ""
    auth.stretched.cache_clear()
    started = time.process_time()
    auth.stretched(b"a guess of the secret")
    assert time.process_time() - started > 0.01


# --- keys -------------------------------------------------------------------------------------------------------------

def test_a_key_lets_in_one_name_and_bans_stay_with_it(tmp_path, capsys):
    (tmp_path / "secret").write_bytes(SECRET)
    (tmp_path / "secret").chmod(0o600)
    assert egg.main(["key", "gpu7", "--secret-file", str(tmp_path / "secret")]) == 0
    (tmp_path / "key").write_text(capsys.readouterr().out)
    (tmp_path / "key").chmod(0o600)
    secret, name = read_secret(tmp_path / "key")
    assert (secret, name) == (key_of(SECRET, "gpu7"), "gpu7") and SECRET not in (tmp_path / "key").read_bytes()
    with raises(AuthError, match="holds the key of the worker gpu7: this command needs the secret"):
        whole_secret(tmp_path / "key")
    with Server(tmp_path, access=Access(SECRET), save=True) as server:
        ours = Access(secret, name=name)
        one, two = (Peer2(server, access=ours, name=stated) for stated in ("another", "a third"))
        server.has_workers(2)
        authors = {worker.author for worker in server.dispatcher.workers}
        assert len(authors) == 1 and next(iter(authors)).voter == "gpu7"              # one machine, one vote
        assert one.chunk(0) == 0 and two.chunk(0) == 32
        turned_away("does not know the secret", server, access=Access(secret, name="gpu8"))
        turned_away("does not know the secret", server, access=Access(bytes(32), name="gpu7"))
        server.calls.put(lambda: [server._count_error(server.author(), "it lied") for _ in range(3)])
        server.says("banned gpu7")
        turned_away("banned: it lied; to let gpu7 in again", server, access=ours, name="yet another")
        Peer2(server, secret=SECRET)                                      # who has the secret takes any name


def test_who_has_a_key_cannot_join_by_another_name():
    access = Access(key_of(SECRET, "gpu7"), name="gpu7")
    caller, host = Caller(access, card()), Host(SECRET)
    caller._text = dumps(card(name="gpu8")).encode()
    with raises(wire.Refused, match="the key of gpu7 lets in a worker of that name"):
        introduce(caller, host)
    caller = Caller(access, card())
    introduce(caller, host := Host(SECRET))
    assert host.key == "gpu7" == host.card.name


def introduce(caller, host):
    answer = caller.begin()
    while answer:
        opcode, *fields = answer
        answer = host.handle(opcode, b"".join(opcode.parts(*fields)))
        if answer:
            opcode, *fields = answer
            answer = caller.handle(opcode, b"".join(opcode.parts(*fields)))


@mark.parametrize("name", ["", "a b", "x" * 65, "\u00e4", "a\n"])
def test_names_that_cannot_have_a_key_are_one_line(name, capsys, monkeypatch):
    monkeypatch.setenv("EGG_SECRET", "a secret that is long enough")
    assert egg.main(["key", name]) == 2
    assert "cannot be the name of a key" in capsys.readouterr().err
