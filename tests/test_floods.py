"""What one peer cannot take from the others: memory, time, connections."""

import sys
from contextlib import suppress
from json import dumps
from threading import Thread
from time import monotonic, process_time
from unittest import mock

from pytest import mark

from cluster import admission, auth, hub, link, status, wire
from cluster.wire import HEARTBEAT, HELLO, V2, frame
from commands import fails, process
from coordinators import Peer, Peer2, Server, listening, named, refused, until
from fakes import CFG


# --- memory -----------------------------------------------------------------------------------------------------------

def test_a_flood_of_frames_fills_no_memory_and_keeps_nobody_waiting(server):
    """A turn takes a few frames of each, and nobody is read from while a frame of theirs is unhandled."""
    flooding, honest = named(server, "flooding", "honest")
    flooding.chunk(0)
    theirs = server.worker("flooding").session
    Thread(target=pour, args=(flooding.link.sock, HEARTBEATS * 2_000_000), daemon=True).start()
    until(lambda: theirs.inbox)
    for _ in range(3):
        started = process_time()                            # which a busy machine does not lengthen
        honest.works(0)
        assert process_time() - started < 0.5
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
        started = monotonic()
        for sock in half[::2]:
            pour(sock, frame(HELLO, bytes(32), version=V2))
        peers = Peer2(server), Peer(server)
        assert [peer.chunk(0) for peer in peers] == [0, 32]
        assert monotonic() - started < 5
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
