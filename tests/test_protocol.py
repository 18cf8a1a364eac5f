"""Frames and the introduction of protocols 1 and 2, byte by byte, and whatever else arrives instead."""

import hashlib
import hmac
import math
import os
import re
from contextlib import suppress
from json import dumps, loads
from time import sleep
from unittest import mock

from hypothesis import given, strategies as st
from hypothesis.strategies import (binary, booleans, characters, dictionaries, floats, integers, just, lists, none,
                                   one_of, sampled_from, tuples)
from pytest import fixture, raises
import pyzstd

import egg_config
import egg_net
from cluster import admission, auth, history, hub, snapshots, status, wire
from cluster.auth import Access, key_of, read_card
from cluster.wire import (Frame, FrameError, HEARTBEAT, HELLO, JOB_REQUEST, JOB_RESPONSE, JOIN, LOG_MESSAGE, NOTHING,
                          PROVE, RESULT, V2, VALIDATION, WELCOME, frame)
from islands.gossip import Standing, read_status
from model import steps
from coordinators import Peer, Peer2, Server, kept, listening, named, refused, result_frame, run_worker
from fakes import CFG, FakeEngine, GOOD, Lines, SECRET, card, changed
from fuzzing import SLOW

LIMITS = wire.limits(CFG)


# --- introduction -----------------------------------------------------------------------------------------------------

def test_protocol_2_byte_by_byte(tmp_path):
    """PROTOCOL.md in bytes, without the code that speaks it."""
    def proof(side, hello, challenge, text):
        return hmac.digest(SECRET, b"egg 2 " + side + b"\0" + hello + challenge + hashlib.sha256(text).digest(),
                           "sha256")

    with Server(tmp_path, access=Access(SECRET)) as server, server.connect() as sock:
        receive = sock.makefile("rb").read
        hello, text = bytes(range(32)), as_json()
        sock.sendall(b"JOBS\x02\x20\x00\x00\x00\x20" + hello)
        assert receive(10) == b"JOBS\x02\x21\x00\x00\x00\x21"
        challenge = receive(32)
        assert receive(1) == b"\x03"                              # a secret is wanted; it would prove itself first
        sock.sendall(b"JOBS\x02\x22" + (32 + len(text)).to_bytes(4, "big")
                     + proof(b"worker", hello, challenge, text) + text)
        assert receive(10) == b"JOBS\x02\x23\x00\x00\x00\x70"
        assert receive(32) == proof(b"coordinator", hello, challenge, text)
        default = egg_config.make().saved()
        config = hashlib.sha256(dumps({k: v for k, v in CFG.saved().items() if v != default[k]},
                                      sort_keys=True).encode()).digest()
        assert receive(80) == config + bytes(32) + bytes(8) + bytes(8)
        sock.sendall(b"JOBS\x02\x00\x00\x00\x00\x28" + (42).to_bytes(8, "big") + bytes(16) + b"d" * 16)
        assert receive(38) == b"JOBS\x02\x02\x00\x00\x00\x1c" + (42).to_bytes(8, "big") + bytes(16) + bytes(4)


def greet(caller, host):
    """The JOIN of a caller, and what a host makes of it, after an introduction without sockets."""
    next(host)
    sent = next(caller)
    while sent[0] != JOIN:
        sent = takes(caller, *takes(host, *sent))
    with raises(StopIteration) as end:
        takes(host, *sent)
    return sent, end.value.value


def takes(side, opcode, *fields):
    """The answer of a caller or host to a frame of these fields."""
    return side.send((opcode, b"".join(opcode.parts(*fields))))


def test_the_introduction_proves_both_sides():
    caller = auth.caller(Access(SECRET), card())
    join, (given, key, proof) = greet(caller, auth.host(SECRET))
    assert given.role == "worker" and given.config == CFG.saved() and key == ""
    state = [b"c" * 32, b"d" * 32, 7, 4]
    with raises(StopIteration):
        takes(caller, WELCOME, proof, *state)
    another = auth.host(SECRET)
    next(another)
    takes(another, HELLO, bytes(32))
    with raises(wire.Refused, match="wrong secret"):                            # recorded in another introduction
        takes(another, *join)
    caller = auth.caller(Access(SECRET), card())
    greet(caller, auth.host(SECRET))
    with raises(FrameError, match="does not know the secret"):
        takes(caller, WELCOME, proof, *state)                    # of another introduction


def test_who_has_a_key_cannot_join_by_another_name():
    access = Access(key_of(SECRET, "gpu7"), name="gpu7")
    _, (given, key, _) = greet(auth.caller(access, card()), auth.host(SECRET))
    assert key == "gpu7" == given.name
    with raises(wire.Refused, match="the key of gpu7 lets in a worker of that name"):
        host, text = auth.host(SECRET), as_json(name="gpu8")
        next(host)
        _, challenge, _ = takes(host, HELLO, bytes(32))
        takes(host, PROVE, b"gpu7")
        takes(host, JOIN, auth._proof(access.secret, b"worker", bytes(32) + challenge, text), text)


def test_a_worker_falls_back_to_protocol_1_and_never_with_a_secret():
    def old(sock):
        """A coordinator of protocol 1 alone: closes on anything else."""
        data = sock.recv(1 << 16)
        versions.append(data[4])
        if data[4] == 1:
            sock.sendall(frame(JOB_RESPONSE, 42, 0, 32, 0))
            sleep(0.2)

    with listening(old) as port:
        versions, lines = [], Lines()
        assert run_worker(port, FakeEngine(), lines=lines) == 1 and versions == [2, 1]
        assert "give --tls-ca if it has TLS; trying protocol 1" in lines.text
        with refused("closed the connection during the introduction"):
            run_worker(port, FakeEngine(), access=Access(SECRET))


# --- any bytes --------------------------------------------------------------------------------------------------------

OPCODES = [0, 1, 2, 3, 16, *range(32, 51), 77, 255]
FRAME = tuples(sampled_from([1, 1, 2, 2, 2, 0, 9]), sampled_from(OPCODES),
               none() | integers(0, 0xFFFFFFFF),
               binary(max_size=130) | sampled_from([bytes(n) for n in (0, 24, 28, 32, 33, 44, 48, 64)]))


def hostile(parts):
    """bytes of frames with wrong versions, opcodes and lengths."""
    return b"".join(wire.HEADER.pack(b"JOBS", version, opcode, len(body) if size is None else size) + body
                    for version, opcode, size, body in parts)


BYTES = (binary(max_size=300) | lists(FRAME, max_size=5).map(hostile)
         | tuples(lists(FRAME, max_size=3).map(hostile), binary(max_size=40)).map(b"".join))


@given(BYTES, integers(1, 50))
def test_the_frame_parser_takes_any_bytes(data, piece):
    """However the bytes come: whole frames, with what was sent, or a FrameError; never more held than the longest frame
    that is allowed."""
    def parse(pieces):
        buffer, got = hub.Inbox(), []
        try:
            for part in pieces:
                buffer.add(part)
                while one := wire.next_frame(buffer, LIMITS):
                    got.append(one)
        except FrameError as error:
            return got, str(error)
        return got, b"".join((buffer, *buffer._pieces))

    whole = parse([data])
    assert whole == parse([data[k:k + piece] for k in range(0, len(data), piece)])
    sent = b""
    for version, opcode, payload in whole[0]:
        least, most = LIMITS[version].get(opcode, (0, wire.OTHER_LIMIT))
        assert least <= len(payload) <= most
        sent += frame(Frame(opcode), payload, version=version)
    assert data.startswith(sent)


@given(BYTES)
def test_snapshots_histories_and_cards_take_any_bytes(data):
    with raises(ValueError):
        snapshots.unpack(CFG, data)
    with suppress(FrameError):
        read_card(data)
    for text in (b"[" * 5000, b'{"role":' * 900, b"1" * 5000, b"[1, 2]", as_json(config=1), as_json(data="zz"),
                 as_json(config={"\ud800": math.nan}), as_json(role="?").replace(b"?", b"\xed\xa0\x80")):
        with raises(FrameError):
            read_card(text)


@fixture(scope="module")
def besieged(tmp_path_factory):
    """A coordinator with an honest worker, for hostile clients. It must serve throughout."""
    cfg, directory = changed(SNAPSHOT_EVERY=0, STRAGGLER_TIMEOUT=0.3), tmp_path_factory.mktemp("besieged")
    engine = FakeEngine(cfg, pause=0.002)
    with Server(directory, cfg, save=True, stay=True) as server:
        thread = server.work(engine, name="honest")
        server.reaches(1)
        yield server
        server.reaches(server.run.step + 3)
        server.stop()
        thread.join(60)
    same, packed = FakeEngine(cfg), kept(directory, cfg)     # the honest worker is where the history leads
    assert 0 < engine.step <= len(packed)
    for fitness in packed[:engine.step]:
        same.update(fitness)
    assert engine.digest() == same.digest()


# --- hostile frames ---------------------------------------------------------------------------------------------------

def as_json(**values):
    """The JSON of JOIN with these values."""
    return dumps(card(**values)).encode()


def test_what_no_json_of_ours_is_is_refused():
    for wrong in (b"", b"{", b"1", b'{"a": 18446744073709551616}', b'{"a":' * 9 + b"1" + b"}" * 9, b"\xff"):
        with raises(ValueError):
            wire.read_json(wrong)


def test_whatever_a_frame_raises_drops_that_peer_and_nobody_else(monkeypatch, server):
    honest, hostile = named(server, "honest", "hostile")
    hostile.chunk(0)
    broken = mock.Mock(side_effect=RuntimeError("something that nobody has thought of\nin two lines"))
    monkeypatch.setattr(egg_net.RemoteWorker, "take_validation", broken)
    hostile.send(VALIDATION, 0, 1, 1, 1.0)
    server.says("what it sent cannot be handled: RuntimeError: something that nobody")
    server.has_workers(1)
    honest.works(0, 4)                                           # also the chunk of the one that was dropped
    assert "Traceback" not in server.said


def test_a_save_directory_need_not_be_utf_8(tmp_path):
    directory = os.fsdecode(os.fsencode(tmp_path) + b"/r\xfcn")
    os.mkdir(directory)
    with Server(directory, save=True) as server:
        assert "r\ufffdn" in status.describe_status(server.fetched())


# --- hostile cards, standings, requests and holders, at random --------------------------------------------------------

LEAF = one_of(none(), booleans(), integers(), integers(-(1 << 70), 1 << 70), floats(),
              sampled_from([10 ** 400, -(10 ** 4200), math.inf, math.nan, 2 ** 64, 2 ** 63, -1, 1e308,
                            "\ud800", "\udfff\ud800", "\x1b[31m", "\0", ""]),
              st.text(characters(), max_size=8))
TREE = st.recursive(LEAF, lambda inner: lists(inner, max_size=3) | dictionaries(
    st.text(characters(), max_size=4), inner, max_size=3), max_leaves=12)
DEEP = tuples(integers(1, 3000), sampled_from(["[]", '{"a":}'])).map(
    lambda pair: (pair[1][:-1] * pair[0] + "1" + pair[1][-1] * pair[0]).encode())
FIELDS = dictionaries(sampled_from([*card(), "more"]), TREE, max_size=4)
CONSTANTS = dictionaries(sampled_from([*CFG.saved()]), TREE, max_size=3)
VALUES = one_of(just({}), FIELDS, FIELDS.map(lambda values: {"role": "island", **values}),
                CONSTANTS.map(lambda config: dict(config={**CFG.saved(), **config})))
CARDS = VALUES.map(lambda values: as_json(**values)) | TREE.map(lambda tree: dumps(tree).encode()) | DEEP \
    | binary(max_size=60)


@given(CARDS)
def test_any_json_is_read_or_refused(data):
    try:
        found = wire.read_json(data)
    except ValueError:
        found = None
    if found is not None:
        assert wire.read_json(dumps(found, ensure_ascii=False).encode()) == found
        assert loads(dumps(found, allow_nan=False)) == found
    with suppress(FrameError):
        read = read_card(data)
        assert all("\n" not in text and text.isprintable() for text in (read.id, read.name, read.device))
        history.difference(CFG.saved(), read.config).encode()


@given(dictionaries(sampled_from(Standing._fields), TREE, max_size=3))
def test_any_standing_of_an_island_is_read_or_refused(values):
    standing = {**Standing(1.0, "validation", "bits/byte", 1, None)._asdict(), **values}
    told = dict(step=5, island=dict(name="x", id="1", epoch=0, standing=standing))
    with suppress(ValueError):
        *_, read = read_status(dumps(told).encode())
        assert read.fitness is None or math.isfinite(read.fitness)


NUMBER = one_of(integers(0, 40), sampled_from([(1 << 64) - 1, 1 << 63, (1 << 48) + 1, 1 << 32]),
                integers(0, (1 << 64) - 1))
REAL = floats() | sampled_from([1.7e308, 1e300, 0.0, -0.0, 5e-324, math.inf, math.nan])


def figures(opcode, *fields, rest=b""):
    """A frame with these fields drawn."""
    return tuples(*fields).map(lambda drawn: frame(opcode, *drawn, rest, version=V2))


FIGURES = one_of(
    # a step that nobody votes on: two liars of a host may outvote one honest worker of it
    figures(JOB_REQUEST, NUMBER, integers(1 << 20, (1 << 64) - 1), just(0), rest=bytes(wire.DIGEST)),
    figures(RESULT, *[NUMBER] * 4, integers(-(1 << 63), (1 << 63) - 1), sampled_from([4, 4, 0, 1 << 31]), rest=GOOD),
    figures(VALIDATION, *[NUMBER] * 3, REAL), figures(wire.SNAPSHOT_REQUEST, NUMBER, NUMBER),
    figures(wire.SNAPSHOT_DATA, *[NUMBER] * 3, rest=pyzstd.compress(bytes(9))), figures(HEARTBEAT),
    st.text(characters(), max_size=30).map(
        lambda text: frame(LOG_MESSAGE, text.encode("utf-8", "surrogatepass"), version=V2)))


@SLOW
@given(none() | VALUES, lists(BYTES | FIGURES, min_size=1, max_size=12), booleans())
def test_a_live_coordinator_takes_anything(besieged, values, parts, patient):
    """Any card, or none, and after it any bytes and figures at their limits, with and without reading the answers: no
    exception, and the honest go on."""
    with suppress(OSError, ValueError, egg_net.NetError, egg_net.OldCoordinator):     # also what Python does not write
        with besieged.connect() if values is None else Peer2(besieged, **values).link.sock as sock:
            sock.settimeout(0.01 if patient else 0.001)
            for part in parts:
                sock.sendall(part)
                with suppress(TimeoutError):
                    sock.recv(1 << 16)
    assert besieged.serves


# --- protocol 1, frames -----------------------------------------------------------------------------------------------

def test_frames_are_those_of_the_specification():
    assert frame(JOB_REQUEST, 1, 2, 0).hex() == (
        "4a4f4253" "01" "00" "00000018" "0000000000000001" "0000000000000002" "0000000000000000")
    assert frame(RESULT, 1, 2, 3, 4, -1, 2, b"ab").hex() == (
        "4a4f4253" "01" "01" "0000002e" "0000000000000001" "0000000000000002" "0000000000000003" "0000000000000004"
        "ffffffffffffffff" "00000002" "6162")
    assert frame(JOB_RESPONSE, 42, 1, NOTHING, 0).hex() == (
        "4a4f4253" "01" "02" "0000001c" "000000000000002a" "0000000000000001" "ffffffffffffffff" "00000000")
    assert frame(LOG_MESSAGE, b"hi").hex() == "4a4f4253" "01" "03" "00000002" "6869"


REFUSED = {
    "wrong magic": b"GET / HTTP/1.1\r\n\r\n",
    "protocol version 3, here 1 or 2": b"JOBS\x03\x00" + bytes([0, 0, 0, 24]) + bytes(24),
    "JOB_REQUEST of 23 bytes, allowed 24": frame(Frame(JOB_REQUEST), bytes(23)),
    "RESULT of 49 bytes, allowed 44 to 48": result_frame(packed=GOOD + b"\0"),
    "LOG_MESSAGE of 1000000 bytes": wire.HEADER.pack(b"JOBS", 1, LOG_MESSAGE, 1000000),
    "RESULT says 3 bytes of fitness and carries 4": result_frame(size=3),
    "3 bytes of fitness where 16 values need 4": result_frame(packed=GOOD[:3]),
    "byte 250 is not 5 digits of 3 values": result_frame(packed=b"\xfa" + GOOD[1:]),
    "digits after the last value": result_frame(packed=GOOD[:3] + b"\xf2"),
    "wrong step: RESULT for step 7 while step 0": result_frame(step=7),
    "wrong chunk: RESULT for member 128": result_frame(position=128),
    "wrong figures": result_frame(updates=1 << 60),
    "wrong figures: sum of losses": result_frame(loss=-(1 << 63)),
    "wrong validation": frame(VALIDATION, 0, 0, 0, 1.0),
}


def test_wrong_frames_end_their_connection_with_one_line_and_nothing_else(tmp_path):
    with Server(tmp_path, steps=1, drain=0) as server:
        honest = Peer(server)
        first = honest.chunk(0)
        for reason, data in [*REFUSED.items(), ("", REFUSED["wrong magic"])]:         # an offence is told once
            before, peer = server.said, Peer(server)
            peer.link.send(data)
            assert peer.closed(), data
            said = server.said[len(before):]
            assert re.fullmatch("refused 127.0.0.1:.*\n" if reason else "", said) and reason in said, (reason, said)
        honest.result(0, first)
        honest.works(0, 3)
        server.reaches(1)
        assert all(steps.unpack_digits(server.run.fitness(0), CFG.N_PAIRS))


def test_unknown_frames_and_half_frames_do_no_harm(server):
    half, peer = Peer(server), Peer(server)
    half.link.send(b"JOBS\x01")
    peer.link.send(frame(Frame(200), b"hello from the future"))
    assert peer.chunk(0) == 0


def test_a_frame_that_never_ends_is_refused(monkeypatch, server):
    monkeypatch.setattr(admission, "FRAME_SECONDS", 0.3)
    honest, slow = Peer(server), Peer(server)
    assert honest.chunk(0) == 0
    with raises(OSError):                                 # a byte now and then is no sign of life
        for byte in result_frame() * 2:
            slow.link.send(bytes([byte]))
            sleep(0.02)
    assert "refused" in server.said and "stopped in the middle of a frame" in server.said
    assert honest.chunk(0) == 32
