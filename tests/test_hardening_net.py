"""What one hostile peer cannot do over the network: frames, floods, connections without proof, logs, HTTP, impostors.
Every test here failed before the defence that it names existed."""

import contextlib
import json
import os
import socket
import subprocess
import sys
import threading
import time
from http import HTTPStatus

import hypothesis
import pyzstd
import pytest
from hypothesis import strategies as st

import egg_net
from cluster import auth, event_log, greeting, history, hub, leases, link, session, snapshots, status, wire
from cluster.wire import HEARTBEAT, HELLO, JOB_REQUEST, JOIN, V2
from islands import gossip
from kit import (CFG, GOOD, HERE, SECRET, SLOW, FakeEngine, Lines, Peer, Peer2, Server, card, changed, expected, until,
                 whole, work_in_thread)
from model import fitness_digits
from tools import live_page

LIMITS = wire.limits(CFG)
HUGE = "9" * 400


# --- frames ----------------------------------------------------------------------------------------------------------

def introduce(port, text):
    """A socket on which this JSON (bytes) has been stated in JOIN, to a coordinator without a secret."""
    sock = socket.create_connection(("127.0.0.1", port), timeout=5)
    hello = os.urandom(32)
    sock.sendall(wire.frame(HELLO, hello, version=V2))
    challenge = read_frame(sock)[1][:32]
    sock.sendall(wire.frame(JOIN, auth.proof(b"", b"worker", hello, challenge, text), text, version=V2))
    return sock


def read_frame(sock):
    """(opcode, payload), (None, b"") where the connection ends."""
    inbox = bytearray()
    while not (got := wire.next_frame(inbox, LIMITS)):
        data = sock.recv(1 << 16)
        if not data:
            return None, b""
        inbox += data
    return got[1:]


def ends(peer):
    """Whether the connection ends, after an ERROR."""
    peer.link.sock.settimeout(5)
    try:
        while peer.link.sock.recv(1 << 16):
            pass
    except ConnectionResetError:
        pass
    return True


def as_json(text=None, **values):
    """The JSON of JOIN with these values, which `text` replaces in it if it is given."""
    return json.dumps(card(**values)).replace('"TEXT"', text or "0").encode()


HOSTILE_CARDS = {
    "a lone surrogate in the configuration": as_json(config={"N_LAYERS": "\ud800"}),
    "a lone surrogate in the name of a constant": as_json(config={"\udfff": 1}),
    "a lone surrogate in the role": as_json(role="\ud800"),
    "a lone surrogate as UTF-8": b'{"role": "worker", "config": {"N_LAYERS": "\xed\xa0\x80"}}',
    "UTF-16": json.dumps(card(role="\ud800")).encode("utf-16"),
    "a huge integer": as_json(HUGE, config={"N_LAYERS": "TEXT"}),
    "a number that is infinite": as_json("1e999", config={"N_LAYERS": "TEXT"}),
    "no number": as_json("NaN", config={"N_LAYERS": "TEXT"}),
    "lists in lists": as_json("[" * 60 + "]" * 60, config={"N_LAYERS": "TEXT"}),
    "no object": b"[1, 2]",
}


@pytest.mark.parametrize("what", HOSTILE_CARDS)
def test_no_card_ends_the_coordinator(tmp_path, what):
    with Server(tmp_path) as server:
        honest = Peer2(server.port)
        sock = introduce(server.port, HOSTILE_CARDS[what])
        assert read_frame(sock)[0] == wire.ERROR and read_frame(sock)[0] is None
        assert honest.chunk(0) == 0 and not server.failure
        assert server.lines.text.count("refused") == 1


@pytest.mark.parametrize("text", [HUGE, "-" + HUGE, "1e999", "NaN", "Infinity", '"\\ud800"', "[" * 500 + "]" * 500])
def test_no_standing_can_be_infinite(text):
    good = json.loads(gossip.Standing(1.0, "loss", "logit units", 1, 0, "x", None, 0, True).pack())
    for name in ("fitness", "founder", "step"):
        payload = json.dumps({**good, name: "TEXT"}).replace('"TEXT"', text).encode()
        with pytest.raises(wire.FrameError):
            gossip.read_standing(payload)


def test_what_is_sane_is_read():
    deep = {"a": [{"b": [{"c": [1, -2.5, "\u00fc\U0001f95a", None, True, (1 << 64) - 1]}]}]}
    assert wire.read_json(json.dumps(deep).encode()) == deep
    for wrong in (b"", b"{", b"1", b'{"a": 18446744073709551616}', b'{"a":' * 9 + b"1" + b"}" * 9, b"\xff"):
        with pytest.raises(ValueError):
            wire.read_json(wrong)


def test_whatever_a_frame_raises_drops_that_peer_and_nobody_else(tmp_path, monkeypatch):
    monkeypatch.setattr(leases, "COPY_AFTER", 1e9)               # on a busy machine nobody takes a copy of a late chunk
    with Server(tmp_path) as server:
        honest, hostile, held = (Peer2(server.port) for _ in range(3))
        for peer in (honest, honest, hostile, hostile):
            peer.chunk(0)
        held.ask(0)                                              # nothing is left: its request is held

        def broken(*_):
            raise RuntimeError("something that nobody has thought of\nin two lines")

        monkeypatch.setattr(server.coordinator, "take_validation", broken)
        hostile.link.send(hostile.link.frame(wire.VALIDATION, 0, 1, 1, 1.0))
        assert ends(hostile)
        assert held.answer()[2] in (64, 96)                      # a chunk of the one that was dropped
        honest.result(0, 0)
        assert server.lines.text.count("what it sent cannot be handled: RuntimeError: something that nobody") == 1

        # the same while a held request is answered
        assert held.chunk(0) in (64, 96)
        late = Peer2(server.port)
        late.ask(0)
        until(lambda: server.coordinator.dispatcher.waiting)
        answer = server.coordinator.dispatcher._answer
        monkeypatch.setattr(server.coordinator.dispatcher, "_answer", broken)
        server.coordinator.dispatcher.changed = True
        until(lambda: len(server.coordinator.dispatcher.workers) == 2)
        monkeypatch.setattr(server.coordinator.dispatcher, "_answer", answer)
        assert not server.failure and server.thread.is_alive()
        honest.result(0, 32)
    assert "Traceback" not in server.lines.text


def test_a_full_disk_is_no_fault_of_a_peer(tmp_path, monkeypatch):
    """Errors of the program itself are not swallowed with those that peers cause."""
    def full(*_):
        raise history.HistoryError("no space left")

    with pytest.raises(AssertionError, match="no space left"), Server(tmp_path) as server:
        monkeypatch.setattr(server.run, "append", full)
        peer = Peer2(server.port)
        for _ in range(4):
            peer.result(0, peer.chunk(0))
        server.thread.join(5)


def test_a_save_directory_need_not_be_utf_8(tmp_path):
    directory = os.fsdecode(os.fsencode(tmp_path) + b"/r\xfcn")
    os.mkdir(directory)
    with Server(directory, save=True) as server:
        peer = Peer2(server.port, name="w")
        peer.chunk(0)
        author = next(iter(server.coordinator.dispatcher.workers)).author
        server.coordinator.admission.bans.add(author.identity, "so")
        with pytest.raises(egg_net.NetError, match="banned: so"):
            Peer2(server.port, name="w")
        told = status.fetch_status(CFG, "127.0.0.1", server.port)
        assert told["save_dir"].endswith("r\ufffdn") and "r\ufffdn" in status.describe_status(told)
        assert not server.failure


def test_one_lie_cannot_move_the_loss_out_of_sight(tmp_path):
    most = CFG.CHUNK_SIZE * CFG.SEQ_LEN * CFG.LOSS_SCALE << 24
    with Server(tmp_path) as server:
        for loss in (most + 1, -16 * CFG.CHUNK_SIZE * CFG.SEQ_LEN * CFG.LOSS_SCALE - 1, -(1 << 50)):
            peer = Peer2(server.port)
            peer.result(0, peer.chunk(0), loss=loss)
            assert ends(peer)
        assert server.lines.text.count("wrong figures: sum of losses") == 3


# --- memory ----------------------------------------------------------------------------------------------------------

def test_nobody_is_read_from_while_a_frame_of_theirs_is_unhandled(tmp_path):
    """An island that is owed a piece of a state; a worker that computes."""
    with Server(tmp_path) as server:
        peer = Peer2(server.port)
        peer.chunk(0)
        worker = next(iter(server.coordinator.dispatcher.workers))
        worker.session.wait()
        peer.link.sock.settimeout(0.5)
        with pytest.raises(TimeoutError):
            for _ in range(100):
                peer.link.sock.sendall(wire.frame(HEARTBEAT, version=V2) * 100_000)
        assert len(worker.session.inbox) <= 2 * session.hub.Connection.PIECE

    listener = socket.create_server(("127.0.0.1", 0))
    ours = link.Link(CFG, *listener.getsockname())               # of version 1: no introduction
    theirs = listener.accept()[0]
    flood = wire.frame(wire.JOB_RESPONSE, 42, 0, 0, 0) * 20_000
    thread = threading.Thread(target=pour, args=(theirs, flood * 20), daemon=True)
    thread.start()
    for _ in range(2000):
        ours.check()                                             # between slices of a chunk
    assert 0 < len(ours.inbox) <= 1 << 17
    ours.close(), theirs.close(), listener.close()


def pour(sock, data):
    try:
        sock.sendall(data)
    except OSError:
        pass


# --- floods ----------------------------------------------------------------------------------------------------------

def test_a_turn_takes_a_few_frames_of_each_and_a_flood_ends(tmp_path, monkeypatch):
    monkeypatch.setattr(session, "FLOOD_SECONDS", 1.0)
    with Server(tmp_path) as server:
        flooding, honest = Peer2(server.port, name="flooding"), Peer2(server.port)
        session_ = next(iter(server.coordinator.hub.connections))
        threading.Thread(target=pour, args=(flooding.link.sock, wire.frame(HEARTBEAT, version=V2) * 2_000_000),
                         daemon=True).start()
        for k in range(4):
            started = time.process_time()                        # which a busy machine does not lengthen
            honest.result(0, honest.chunk(0))
            assert time.process_time() - started < 0.5
        until(lambda: "it sends more than it may" in server.lines.text, 10)
        until(lambda: len(server.coordinator.hub.connections) == 1)
        assert session_.useless.most == session.USELESS


def test_requests_results_and_snapshots_that_are_wanted_are_no_flood(tmp_path):
    cfg = changed(SNAPSHOT_EVERY=4)
    with Server(tmp_path, cfg, save=True, steps=300, stay=True) as server:
        engine, late = FakeEngine(cfg), FakeEngine(cfg)
        work_in_thread(server.port, engine, cfg)
        until(lambda: engine.step == 300, 60)
        work_in_thread(server.port, late, cfg)
        until(lambda: late.step == 300, 30)
        assert "more than it may" not in server.lines.text
        assert whole(server.run)[:20] == expected(20, cfg)[0]


def test_connections_without_proof_keep_no_worker_out(tmp_path):
    cfg = changed(CONNECTIONS_PER_ADDRESS=4)
    with Server(tmp_path, cfg) as server:
        half = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(300)]
        started = time.monotonic()
        for sock in half[::2]:
            with contextlib.suppress(OSError):
                sock.sendall(wire.frame(HELLO, bytes(32), version=V2))
        peers = Peer2(server.port, cfg), Peer(server.port, cfg)
        assert [peer.chunk(0) for peer in peers] == [0, 32]
        assert time.monotonic() - started < 5
        assert len(server.coordinator.admission.arrivals) <= 256
        [sock.close() for sock in half]
        until(lambda: len(server.coordinator.hub.connections) == 2)


def test_a_crowd_makes_room_at_the_cost_of_who_is_most(monkeypatch):
    class One:
        def __init__(self, host, born):
            self.host, self.born = host, born

        def close(self):
            crowd.pop(self)

    crowd, now = hub.Crowd(4), time.monotonic()
    lone, *many = [One("a", now - 9), One("b", now - 3), One("b", now - 2), One("b", now - 1)]
    for one in (lone, *many):
        assert crowd.room()
        crowd[one] = True
    assert crowd.room() and len(crowd) == 3 and many[0] not in crowd and lone in crowd
    crowd[One("b", now)] = True
    many[1].born = time.monotonic()                              # too young to go: who comes now waits
    assert not crowd.room() and len(crowd) == 4


def test_few_files_are_one_line_at_the_start(tmp_path):
    command = ["bash", "-c", 'ulimit -n 64; exec "$@"', "-", sys.executable, HERE / "egg.py", "coordinator", "--port",
               "0"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1 and done.stderr.count("\n") == 1
    assert "may open 64 files" in done.stderr and "ulimit -n" in done.stderr


# --- HTTP ------------------------------------------------------------------------------------------------------------

def test_no_header_takes_long():
    """8 KB of spaces took a third of a second; 16 clients stopped training by them."""
    for field in (b"X:" + b" " * 8000 + b"y", b"X:" + b"\t " * 4000 + b"\x01", b"X: " + b"a " * 4000,
                  b":" * 8000, b" " * 8000, b"X" * 8000, b"X:\xff" * 2000, b"\r\n".join([b"a: b"] * 1500)):
        started = time.thread_time()
        try:
            live_page.parse(b"GET / HTTP/1.1\r\nHost: a\r\n" + field + b"\r\n\r\n")
        except ValueError as error:
            assert HTTPStatus(error.args[0])
        assert time.thread_time() - started < 0.05, field[:10]


def test_a_request_that_breaks_the_page_ends_its_connection_alone(tmp_path, monkeypatch):
    with Server(tmp_path, http=live_page.Where("127.0.0.1", 0, "", None)) as server:
        def broken(_):
            raise RuntimeError("nobody has thought of this")

        monkeypatch.setattr(server.coordinator.page, "answer", broken)
        for _ in range(2):
            with socket.create_connection(server.coordinator.page.address, timeout=5) as sock:
                sock.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
                assert sock.recv(1) == b""
        assert server.lines.text.count("its request cannot be handled: RuntimeError") == 1
        assert Peer2(server.port).chunk(0) == 0


# --- the secret ------------------------------------------------------------------------------------------------------

def test_an_impostor_gets_nothing_to_guess_with():
    """It does not know the secret, but says that it proves itself first."""
    listener, got = socket.create_server(("127.0.0.1", 0)), []

    def impostor():
        with listener.accept()[0] as sock:
            sock.recv(1000)
            flags = wire.SECRET_WANTED | wire.PROVES_FIRST
            sock.sendall(wire.frame(wire.CHALLENGE, bytes(32), flags, version=V2))
            got.append(sock.recv(10000))
            sock.sendall(wire.frame(wire.PROVED, os.urandom(32), version=V2))
            got.append(sock.recv(10000))

    thread = threading.Thread(target=impostor)
    thread.start()
    with pytest.raises(egg_net.NetError, match="does not know the secret"):
        Peer2(listener.getsockname()[1], secret=SECRET)
    thread.join(5)
    listener.close()
    assert got == [wire.frame(wire.PROVE, version=V2), b""]


def test_who_has_met_a_coordinator_that_proves_itself_takes_no_other():
    def old_host(caller):
        opcode, hello = caller.begin()
        return caller.handle(wire.CHALLENGE, wire.CHALLENGE.pack(bytes(32), wire.SECRET_WANTED))

    assert old_host(greeting.Caller(SECRET, card()))[0] == JOIN          # an old coordinator is served in its order
    with pytest.raises(greeting.GreetingError, match="does not prove itself first, as it did before"):
        old_host(greeting.Caller(SECRET, card(), first=True))


def test_a_coordinator_proves_itself_once_and_with_a_slow_key():
    host = greeting.Host(SECRET)
    host.handle(HELLO, bytes(32))
    opcode, proof = host.handle(wire.PROVE, b"")
    assert opcode == wire.PROVED and proof == auth.early_proof(SECRET, bytes(32), host._challenge)
    with pytest.raises(wire.FrameError):
        host.handle(wire.PROVE, b"")
    with pytest.raises(wire.FrameError):
        greeting.Host(b"").handle(wire.PROVE, b"")
    password = auth.page_password(SECRET)
    assert len(password) == 32 and SECRET.decode() not in password and auth.page_password(b"") == ""
    auth.stretched.cache_clear()
    started = time.process_time()
    auth.stretched(b"a guess of the secret")
    assert time.process_time() - started > 0.01


# --- names -----------------------------------------------------------------------------------------------------------

def test_a_liar_with_the_name_of_a_victim_is_banned_alone(tmp_path):
    with Server(tmp_path, save=True) as server:
        victim = Peer2(server.port, name="gpu0", id="victims-key.1")
        assert victim.chunk(0) == 0
        liar = Peer2(server.port, name="gpu0", id="another-user.2")
        liar.chunk(0)
        author = next(w.author for w in server.coordinator.dispatcher.workers if "another" in w.author.key)
        server.coordinator.ban(author, "it lied")
        with pytest.raises(egg_net.NetError, match="banned: it lied"):
            Peer2(server.port, name="gpu0", id="another-user.3")         # restarted
        again = Peer2(server.port, name="gpu0", id="victims-key.4")
        assert again.chunk(0) == 64 or again.link.version == V2
        victim.result(0, 0)


def test_the_key_of_a_user_stays_and_is_private(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    key = auth.user_key()
    path = tmp_path / "egg" / "worker-key"
    assert key == auth.user_key() and len(key) == 32 and path.stat().st_mode & 0o777 == 0o600
    path.chmod(0o644)
    assert auth.user_key() != key                                # others may have read it
    path.unlink()
    path.symlink_to(tmp_path / "elsewhere")
    assert auth.user_key() != auth.user_key()
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc/none")
    assert len(auth.user_key()) == 32


# --- logs ------------------------------------------------------------------------------------------------------------

def test_coming_again_does_not_fill_the_disk(tmp_path):
    with Server(tmp_path, save=True) as server:
        for _ in range(60):
            peer = Peer2(server.port)
            for _ in range(40):
                peer.link.send(peer.link.frame(wire.LOG_MESSAGE, b"x" * 16000))
            peer.link.send(peer.link.frame(JOB_REQUEST, 0, 0, 0, bytes(16)))
            peer.link.close()
        until(lambda: not server.coordinator.dispatcher.workers)
        size = (tmp_path / history.EVENTS).stat().st_size
        assert size < 2 * event_log.OF_HOST[0] * 17000, f"{size} bytes"
    assert (tmp_path / history.EVENTS).read_text().count('"event": "step"') == 0


def test_what_peers_cause_is_bounded_for_each_host_and_for_all(tmp_path):
    run = history.open_run(CFG)
    events = event_log.Events(CFG, run, tmp_path, egg_net.Console(lines := Lines()))
    for host in range(3):
        for i in range(1000):
            events.about(f"10.0.0.{host}", "joined", f"h{host}", worker="w", address="a", device="d", step=0)
    assert [lines.text.count(f"h{host}") for host in range(3)] == [event_log.OF_HOST[0]] * 3
    for host in range(5000):
        events.about(f"10.1.{host}", "joined", "many", worker="w", address="a", device="d", step=0)
    assert lines.text.count("many") <= event_log.OF_ALL[0] and len(events._of_host) <= event_log.HOSTS
    assert lines.text.count("lines about peers are left out") == 1
    events.close(), run.close()


def test_a_long_log_begins_anew_and_the_older_part_stays(tmp_path, monkeypatch):
    monkeypatch.setattr(event_log, "LOG_BYTES", 5000)
    run = history.open_run(CFG, tmp_path)
    with event_log.Events(CFG, run, tmp_path, egg_net.Console(Lines())) as events:
        for step in range(200):
            events.emit("step", step=step, tokens=step, loss=1.0, updates=1, reports=1, learning_rate=0.5, seconds=0.1,
                        elapsed=0.1, tokens_per_second=1.0, sent=1, received=1)
    run.close()
    for name in (history.EVENTS, "coordinator.log"):
        new, old = tmp_path / name, tmp_path / f"{name}.1"
        assert new.stat().st_size < 10000 and old.stat().st_size < 10000
    last = [json.loads(line) for line in (tmp_path / history.EVENTS).read_text().splitlines()]
    assert last[-1]["step"] == 199
    log = (tmp_path / "coordinator.log").read_text()
    assert log.startswith("# egg, ") and "Step,RelTime" in log and log.splitlines()[-1].startswith("199,")


def test_a_disk_that_is_nearly_full_stops_logs_before_it_stops_training(tmp_path, monkeypatch):
    lines, real, free = Lines(), os.fstatvfs, [0]

    def nearly(handle):
        found = list(real(handle))
        found[4] = free[0]                                       # f_bavail
        return os.statvfs_result(found)

    run = history.open_run(CFG, tmp_path)
    with event_log.Events(CFG, run, tmp_path, egg_net.Console(lines)) as events:
        monkeypatch.setattr(os, "fstatvfs", nearly)
        before = (tmp_path / history.EVENTS).stat().st_size
        for step in range(5):
            events.warn(f"w{step}")
            run.append(bytes(13), 0, 0)
        assert (tmp_path / history.EVENTS).stat().st_size == before and run.step == 5
        assert lines.text.count("the disk is nearly full: events are missing") == 1
        free[0] = 1 << 40
        events.warn("again")
        assert "again" in (tmp_path / history.EVENTS).read_text()
    run.close()


# --- status ----------------------------------------------------------------------------------------------------------

def test_a_status_is_never_too_long(tmp_path):
    with Server(tmp_path) as server:
        workers = [{"name": "\U0001f95a" * 64, "address": "1.2.3.4:5", "device": "\U0001f95a" * 64, "protocol": 2,
                    "step": 1, "chunks": 1, "chunk_seconds": None, "last_seen": 1.0, "state": "computing"}] * 4000
        made = {**server.status(), "workers": workers, "connected": 4000}
        server.coordinator.status = lambda: made
        told = status.fetch_status(CFG, "127.0.0.1", server.port)
        assert told["connected"] == 4000 and 500 < len(told["workers"]) < 4000


@pytest.mark.parametrize("payload", [
    b"{}", b"[]", b"5", b"\xff", b'{"step": "\\ud800"}', b'{"step": 1' + b"0" * 5000 + b"}", b"[" * 100000,
    json.dumps({"steps": [], "step": {}, "chunks_done": 1, "chunks": 1, "tokens_per_second": "x"}).encode(),
    json.dumps({"steps": 1, "step": 1, "chunks_done": 1, "chunks": 1, "tokens_per_second": 1, "loss": "x"}).encode()])
def test_a_hostile_status_is_one_line(payload, monkeypatch):
    class Hostile:
        def __init__(self, *_):
            pass

        def next(self, *_):
            return payload

        def close(self):
            pass

    monkeypatch.setattr(status, "Link", Hostile)
    with pytest.raises(egg_net.NetError, match="a status that cannot be read"):
        status.fetch_status(CFG, "127.0.0.1", 1)


def test_the_table_of_a_status_cannot_be_wide(tmp_path):
    with Server(tmp_path) as server:
        peer = Peer2(server.port)
        peer.chunk(0)
        told = status.fetch_status(CFG, "127.0.0.1", server.port)
    told["workers"] = [{**told["workers"][0], "step": "x" * 100_000, "name": "\x1b[31m" * 1000}] * 50
    told["save_dir"] = "y" * 1_000_000
    text = status.describe_status(told)
    assert len(text) < 50_000 and "\x1b" not in text


# --- zstd ------------------------------------------------------------------------------------------------------------

def test_a_state_that_unpacks_to_much_does_not_stop_the_loop(tmp_path):
    """A few KB of zstd that become 300 MB."""
    cfg = changed(HIDDEN_DIM=1024, N_LAYERS=2, SNAPSHOT_EVERY=1)
    size = sum(snapshots.sizes(cfg))
    assert size > 200 << 20
    body = pyzstd.compress(bytes(size), 1)
    upload = snapshots.Upload(cfg, 1, 2, bytes(16), tmp_path)
    longest, offset = 0.0, 0
    with pytest.raises(ValueError, match="not the state that workers stated"):
        while offset < len(body):
            started = time.thread_time()
            if upload.pending:
                upload.unpack()
            else:
                upload.feed(len(body), offset, body[offset:offset + wire.BLOCK])
                offset += wire.BLOCK
            longest = max(longest, time.thread_time() - started)
        while upload.pending:
            upload.unpack()
    upload.drop()
    assert longest < 0.1, f"{longest:.3f} s"


def test_training_goes_on_while_a_state_is_unpacked(tmp_path):
    """The pieces of a snapshot are unpacked between the turns of the loop, and the next one is not read before."""
    cfg = changed(SNAPSHOT_EVERY=1)
    with Server(tmp_path, cfg, save=True) as server:
        peer, other = Peer2(server.port, cfg, name="a"), Peer2(server.port, cfg, name="b")
        engine = FakeEngine(cfg)
        for _ in range(4):
            peer.ask(0, engine.digest())
            peer.result(0, peer.answer()[2])
        peer.ask(0, engine.digest())
        packed = history.unzip(peer.answer()[3], 13)
        engine.update(fitness_digits.unpack_ternary(packed, cfg.N_PAIRS))
        peer.ask(1, engine.digest())
        opcode, _ = peer.next(wire.SNAPSHOT_WANTED, wire.JOB_RESPONSE)
        assert opcode == wire.SNAPSHOT_WANTED
        body = snapshots.pack(engine.state())
        for offset in range(0, len(body), wire.BLOCK):
            piece = body[offset:offset + wire.BLOCK]
            peer.link.send(peer.link.frame(wire.SNAPSHOT_DATA, 1, len(body), offset, piece))
        collector = server.coordinator.collector
        until(lambda: collector.upload is None or collector.upload.finished)
        other.ask(0, FakeEngine(cfg).digest())
        assert other.answer()[1] == 1 and not server.failure


# --- hostile cards, standings, requests and holders, at random -------------------------------------------------------

LEAF = st.one_of(st.none(), st.booleans(), st.integers(), st.integers(-(1 << 70), 1 << 70), st.floats(),
                 st.sampled_from([10 ** 400, -(10 ** 4200), float("inf"), float("nan"), 2 ** 64, 2 ** 63, -1, 1e308]),
                 st.text(st.characters(), max_size=8),
                 st.sampled_from(["\ud800", "\udfff\ud800", "\x1b[31m", "\0", ""]))
TREE = st.recursive(LEAF, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(
    st.text(st.characters(), max_size=4), inner, max_size=3), max_leaves=12)
DEEP = st.tuples(st.integers(1, 3000), st.sampled_from(["[]", '{"a":}'])).map(
    lambda pair: (pair[1][:-1] * pair[0] + "1" + pair[1][-1] * pair[0]).encode())
FIELDS = st.dictionaries(st.sampled_from(["role", "id", "name", "device", "config", "data", "more"]), TREE, max_size=4)
CARDS = st.one_of(FIELDS.map(lambda values: encoded({**card(), **values})),
                  FIELDS.map(lambda values: encoded({**card(), "role": "island", **values})), DEEP,
                  TREE.map(lambda tree: encoded(tree)), st.binary(max_size=60),
                  st.dictionaries(st.sampled_from(list(card()["config"])), TREE, max_size=3).map(
                      lambda config: encoded(card(config={**card()["config"], **config}))))


def encoded(tree):
    """Its JSON; whole numbers that are too long for Python's own reader stay as they are."""
    before = sys.get_int_max_str_digits()
    sys.set_int_max_str_digits(0)
    try:
        return json.dumps(tree).encode()
    finally:
        sys.set_int_max_str_digits(before)


@hypothesis.given(CARDS)
def test_any_json_is_read_or_refused(data):
    try:
        found = wire.read_json(data)
    except ValueError:
        found = None
    if found is not None:
        assert wire.read_json(json.dumps(found, ensure_ascii=False).encode()) == found
        assert json.loads(json.dumps(found, allow_nan=False)) == found
    with contextlib.suppress(wire.FrameError):
        read = greeting.read_card(data)
        assert all("\n" not in text and text.isprintable() for text in (read.id, read.name, read.device))
        history.difference(CFG.saved(), read.config).encode()
    with contextlib.suppress(wire.FrameError):
        gossip.read_standing(data).pack()


@pytest.fixture(scope="module")
def besieged(tmp_path_factory):
    """A coordinator with an honest worker. It must serve throughout."""
    cfg = changed(CONNECTIONS_PER_ADDRESS=200, STRAGGLER_TIMEOUT=0.3)
    with Server(tmp_path_factory.mktemp("besieged"), cfg, save=True, stay=True) as server:
        thread = work_in_thread(server.port, FakeEngine(cfg, pause=0.002), cfg, name="honest", retry=True)
        until(lambda: server.run.step > 0)
        yield server
        before = server.run.step
        until(lambda: server.run.step > before + 2, 30)
        assert not server.failure, server.failure
        server.stop()
        assert thread.is_alive()


@SLOW
@hypothesis.given(CARDS)
def test_a_live_coordinator_takes_any_card(besieged, data):
    with contextlib.suppress(OSError), contextlib.closing(introduce(besieged.port, data[:wire.JOIN.most])) as sock:
        sock.settimeout(1)
        assert read_frame(sock)[0] in (wire.ERROR, wire.WELCOME, None)
    assert not besieged.failure and besieged.thread.is_alive()


NUMBER = st.one_of(st.integers(0, 40), st.sampled_from([(1 << 64) - 1, 1 << 63, (1 << 48) + 1, 1 << 32]),
                   st.integers(0, (1 << 64) - 1))
REAL = st.one_of(st.floats(), st.sampled_from([1.7e308, 1e300, 0.0, -0.0, 5e-324, float("inf"), float("nan")]))
ACTION = st.one_of(
    # a step that nobody votes on: two liars of a host may outvote one honest worker of it
    st.tuples(st.just(JOB_REQUEST), st.tuples(NUMBER, st.integers(1 << 20, (1 << 64) - 1), st.just(0)).map(
        lambda x: wire.JOB_REQUEST.pack(*x) + bytes(wire.DIGEST))),
    st.tuples(st.just(wire.RESULT), st.tuples(NUMBER, NUMBER, NUMBER, NUMBER, st.integers(-(1 << 63), (1 << 63) - 1),
                                              st.sampled_from([4, 4, 0, 1 << 31])).map(
        lambda x: wire.RESULT.pack(*x) + GOOD)),
    st.tuples(st.just(wire.VALIDATION), st.tuples(NUMBER, NUMBER, NUMBER, REAL).map(
        lambda x: wire.VALIDATION.pack(*x))),
    st.tuples(st.just(wire.SNAPSHOT_REQUEST), st.tuples(NUMBER, NUMBER).map(lambda x: wire.SNAPSHOT_REQUEST.pack(*x))),
    st.tuples(st.just(wire.SNAPSHOT_DATA), st.tuples(NUMBER, NUMBER, NUMBER).map(
        lambda x: wire.SNAPSHOT_DATA.pack(*x) + pyzstd.compress(bytes(9)))),
    st.tuples(st.just(wire.STATE_HASH), NUMBER.map(lambda x: wire.STATE_HASH.pack(x, bytes(32)))),
    st.tuples(st.just(wire.LOG_MESSAGE), st.text(st.characters(), max_size=30).map(
        lambda text: text.encode("utf-8", "surrogatepass"))),
    st.tuples(st.just(HEARTBEAT), st.just(b"")))


@SLOW
@hypothesis.given(st.lists(ACTION, min_size=1, max_size=12), st.booleans(), st.integers(0, 300))
def test_a_live_coordinator_takes_any_figures_and_holders_that_only_beat(besieged, actions, holds, beats):
    """A peer that knows all frames: figures at their limits, chunks that it takes and only sends heartbeats for."""
    with contextlib.suppress(OSError, egg_net.NetError):
        peer = Peer2(besieged.port, besieged.coordinator.cfg, name="hostile")
        with contextlib.closing(peer.link):
            if holds:
                step = besieged.run.step
                peer.ask(step, besieged.coordinator.trust.leading(step))
                peer.link.send(peer.link.frame(HEARTBEAT) * beats)
            for opcode, payload in actions:
                peer.link.send(wire.frame(wire.Frame(opcode), payload, version=V2))
            peer.link.sock.settimeout(0.01)
            peer.link.sock.recv(1 << 16)
    assert not besieged.failure and besieged.thread.is_alive()
