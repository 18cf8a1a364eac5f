"""Who is let in: addresses, secrets, TLS, limits, names."""

import contextlib
import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
import time
from types import SimpleNamespace
from unittest import mock

from pytest import mark, raises

import egg
import egg_config
import egg_net
from cluster import admission, auth, event_log, greeting, hub, snapshots, status, trust, wire
from cluster.auth import Access, AuthError, client_tls, listen_host, page_password, read_secret, server_tls, user_key
from cluster.wire import HELLO, JOB_REQUEST, JOIN, V2, WELCOME, frame
from coordinators import Peer, Peer2, Server, idle, listening, refused, run_worker, turned_away, until, whole
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
    assert read_secret(path, environ) == SECRET
    assert read_secret(None, environ) == b"another secret, as long"
    assert read_secret(None, {}) == b""
    path.write_bytes(b"123")
    for path, environ, words in ((path, {}, "holds 3 bytes"), (None, {"EGG_SECRET": ""}, "EGG_SECRET holds 0 bytes"),
                                 (tmp_path / "none", {}, "No such file")):
        with raises(AuthError, match=words):
            read_secret(path, environ)
    assert egg_config.load(environ={"EGG_SECRET": "x"}).fingerprint() == configured().fingerprint()


def test_ray_warns_once_of_a_secret_that_others_may_read(here, monkeypatch, capsys):
    (here / "s").write_bytes(SECRET)
    (here / "s").chmod(0o644)
    monkeypatch.setitem(sys.modules, "deploy.ray", SimpleNamespace(
        train=lambda cfg, args, access, console, http, **_: print(page_password(access.secret) == http.password)
        or SimpleNamespace(run=SimpleNamespace(directory="x"))))
    assert egg.main("ray --save-dir x --secret-file s --http 0".split()) == 0
    said = capsys.readouterr()
    assert said.out.startswith("True\n") and said.err.count("others on this machine may read") == 1


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


def test_strangers_cannot_silence_the_refusals_of_others(tmp_path, monkeypatch):
    monkeypatch.setattr(event_log, "OF_ALL", (10_000, 10_000))
    now = [time.monotonic()]
    monkeypatch.setattr(admission.time, "monotonic", lambda: now[0])
    with idle(tmp_path) as coordinator:
        told, strangers = coordinator.console.stream, 2 * admission.HOSTS_LOGGED

        def report(reason, host="10.9.9.9", who="the last"):
            coordinator.admission.report(host, who, reason)

        for k in range(strangers):
            report("wrong secret", f"10.0.{k // 256}.{k % 256}", "a stranger")
        for _ in range(3):
            report("wrong secret")
        for k in range(2 * admission.REASONS_LOGGED):
            report(f"reason {k}.")
        assert told.text.count("a stranger") == strangers
        assert told.text.count("the last") == admission.REASONS_LOGGED
        assert len(coordinator.admission._refused) == admission.HOSTS_LOGGED
        now[0] += admission.REFUSED_SECONDS + 1
        report("wrong secret")
        assert told.text.count("refused the last: wrong secret") == 2


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
        for plain in Access(SECRET), Access():          # and the worker tries no older protocol, nor again
            for call in (lambda: run_worker(server, FakeEngine(), retry=True, access=plain),
                         lambda: status.fetch_status(CFG, "127.0.0.1", server.port, plain)):
                with refused(f"127.0.0.1:{server.port}: it seems to speak TLS: give --tls-ca"):
                    call()
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


def test_connections_are_bounded(tmp_path):
    with Server(tmp_path, changed(CONNECTIONS_PER_ADDRESS=4, IDLE_TIMEOUT=3600)) as server:
        silent = [server.connect() for _ in range(5)]
        honest, *others = [Peer2(server) for _ in range(4)]
        for _ in range(3):
            with raises(TimeoutError, match="4 connections from one address"):
                Peer2(server)
        assert server.said.count("4 connections from one address") == 1
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
        until(lambda: not (server.hub.connections or server.admission.by_host))
        assert "said nothing for 3600 s" in server.said


def test_a_worker_comes_again_when_there_is_room(tmp_path):
    engine, lines = FakeEngine(), Lines()
    with Server(tmp_path, changed(CONNECTIONS_PER_ADDRESS=1)) as server:
        first = Peer2(server)
        server.work(engine, retry=True, lines=lines)
        until(lambda: "no coordinator at" in lines.text)
        assert not engine.evaluated
        first.close()
        until(lambda: engine.evaluated)


def test_a_worker_with_other_constants_learns_what_to_change(tmp_path):
    """A forgotten preset, on either side; else the constants, with their values where they are unset."""
    laptop, default = egg_config.make(**egg_config.PRESETS["laptop"]), egg_config.make()
    with Server(tmp_path, laptop) as server:
        turned_away("the coordinator's constants are those of --preset laptop: give it to the worker too$",
                    server, default)
        turned_away(r"configuration: CREDIT = 12 at the coordinator, 8 at the worker; SOFT_TARGETS = \[\[0, 2\], .* "
                    r"at the coordinator, \[\] at the worker$", server, laptop.changed(CREDIT=8, SOFT_TARGETS=()))
        assert server.said.count("refused") == 2
    with Server(tmp_path, default, access=Access(SECRET)) as server:
        turned_away("configuration: the worker's constants are those of --preset laptop: give it to the coordinator "
                    "too", server, laptop, secret=SECRET)
        turned_away("configuration: MODEL = transformer at the coordinator, gru at the worker; HIDDEN_DIM = 256 .*; "
                    r"N_LAYERS = 4 at the coordinator, 1 at the worker; and \d\d more$",
                    server, laptop.changed(CREDIT=9), secret=SECRET, config={**laptop.saved(), "X": 1, "CREDIT": 9})
        assert server.said.count("refused") == 2
    with Server(tmp_path) as server:
        turned_away("X = unknown at the coordinator, 1 at", server, config={**CFG.saved(), "X": 1})


def test_no_text_of_a_peer_can_write_to_the_terminal_or_fill_the_log(server):
    turned_away("another configuration", server, config={"N_LAYERS": "\x1b[31m\nStep 9 | fake", "\x07": "\x1b]0;x"})
    peer, most = Peer2(server, name="\x1b[31mred\nStep 5 | fake", device="\x07bell\u202e"), event_log.OF_HOST[1]
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
        sock.sendall(frame(wire.CHALLENGE, bytes(32), wire.SECRET_WANTED | wire.PROVES_FIRST, version=V2))
        got.append(sock.recv(10000))
        sock.sendall(frame(wire.PROVED, os.urandom(32), version=V2))
        got.append(sock.recv(10000))

    with listening(impostor) as port:
        turned_away("does not know the secret", port, secret=SECRET)
    assert got == [frame(wire.PROVE, version=V2), b""]


def test_who_has_met_a_coordinator_that_proves_itself_takes_no_other():
    def old_host(caller):
        caller.begin()
        return caller.handle(wire.CHALLENGE, b"".join(wire.CHALLENGE.parts(bytes(32), wire.SECRET_WANTED)))

    assert old_host(greeting.Caller(SECRET, card()))[0] == JOIN          # an old coordinator is served in its order
    with raises(greeting.GreetingError, match="does not prove itself first, as it did before"):
        old_host(greeting.Caller(SECRET, card(), first=True))


def test_a_coordinator_proves_itself_once_and_with_a_slow_key():
    host = greeting.Host(SECRET)
    host.handle(HELLO, bytes(32))
    opcode, proof = host.handle(wire.PROVE, b"")
    assert opcode == wire.PROVED and proof == auth.early_proof(SECRET, bytes(32), host._challenge)
    for another in host, greeting.Host(b""):
        with raises(wire.FrameError):
            another.handle(wire.PROVE, b"")
    password = page_password(SECRET)
    assert len(password) == 32 and SECRET.decode() not in password and page_password(b"") == ""
    auth.stretched.cache_clear()
    started = time.process_time()
    auth.stretched(b"a guess of the secret")
    assert time.process_time() - started > 0.01


def test_a_host_of_ipv6_is_its_first_64_bits():
    """With a vote, a budget and a place for each address of one network, one machine would be as many as it likes."""
    def arrive(address):
        with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as sock:
            connection = hub.Connection(loop, sock, (address, 7, 0, 0), None)
            connection.close()
            return connection

    loop = hub.Hub()
    ours = [arrive(f"2001:db8:0:7::{k:x}") for k in range(1, 7)]
    assert {one.host for one in ours} == {"2001:db8:0:7::/64"} and ours[5].address == "[2001:db8:0:7::6]:7"
    assert [arrive(text).host for text in ("2001:db8:0:8::1", "::ffff:10.0.0.1", "10.0.0.1", "fe80::1%eth0", "::1")] \
        == ["2001:db8:0:8::/64", "10.0.0.1", "10.0.0.1", "fe80::/64", "::/64"]
    stated = greeting.Card("worker", "k.1", "w", "", {}, b"", b"")
    authors = [admission.Admission.author(None, one, stated) for one in ours]
    assert trust.tally({b"a lie": set(authors), b"": {admission.Author("10.0.0.1", "", "")}}) == {b"a lie": 1, b"": 1}
    bans = admission.Bans()
    bans.add(authors[1].former, "by an older version")
    assert "at 2001:db8:0:7::2 (" in bans.message(authors[1]) and not bans.message(authors[0])
    bans.add(authors[1].identity, "it lied")
    assert all(map(bans.message, authors))
    loop.close()


# --- names ------------------------------------------------------------------------------------------------------------

def test_a_liar_with_the_name_of_a_victim_is_banned_alone(tmp_path):
    with Server(tmp_path, save=True) as server:
        victim = Peer2(server, name="gpu0", id="victims-key.1")
        assert victim.chunk(0) == 0
        liar = Peer2(server, name="gpu0", id="another-user.2")
        liar.chunk(0)
        server.ban(next(w.author for w in server.dispatcher.workers if "another" in w.author.key), "it lied")
        turned_away("banned: it lied", server, name="gpu0", id="another-user.3")  # restarted
        again = Peer2(server, name="gpu0", id="victims-key.4")
        assert again.chunk(0) == 64 or again.link.version == V2
        victim.result(0, 0)


def test_the_key_of_a_user_stays_and_is_private(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    key, path = user_key(), tmp_path / "egg" / "worker-key"
    assert key == user_key() and len(key) == 32 and path.stat().st_mode & 0o777 == 0o600
    path.chmod(0o644)
    assert user_key() != key                                # others may have read it
    path.unlink()
    path.symlink_to(tmp_path / "elsewhere")
    assert user_key() != user_key()
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc/none")
    assert len(user_key()) == 32
