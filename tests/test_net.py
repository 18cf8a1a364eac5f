"""Wire format, coordinator, worker, history, local training. A fake engine (crc, no model) where the model does not
matter."""

import json
import multiprocessing
import os
import pathlib
import re
import shutil
import signal
import socket
import threading
import time

import numpy as np
import pytest

import egg_config
from cluster import history
from model import fitness_digits
from model import parameters
from model import seeds
import egg_net
from tools import train
from cluster import session
from cluster import wire
from cluster.wire import JOB_REQUEST, JOB_RESPONSE, LOG_MESSAGE, NOTHING, RESULT, VALIDATION
from kit import (CFG, GOOD, HERE, FakeEngine, Lines, Peer, Server, begin_together, coordinator_process, expected,
                 filled, free_port, result_frame, until, whole, work_in_thread)

SPAWN = multiprocessing.get_context("spawn")


# --- frames ----------------------------------------------------------------------------------------------------------

def test_frames_are_those_of_the_specification():
    assert wire.frame(JOB_REQUEST, 1, 2, 0).hex() == (
        "4a4f4253" "01" "00" "00000018" "0000000000000001" "0000000000000002" "0000000000000000")
    assert wire.frame(RESULT, 1, 2, 3, 4, -1, 2, b"ab").hex() == (
        "4a4f4253" "01" "01" "0000002e" "0000000000000001" "0000000000000002" "0000000000000003" "0000000000000004"
        "ffffffffffffffff" "00000002" "6162")
    assert wire.frame(JOB_RESPONSE, 42, 1, NOTHING, 0).hex() == (
        "4a4f4253" "01" "02" "0000001c" "000000000000002a" "0000000000000001" "ffffffffffffffff" "00000000")
    assert wire.frame(LOG_MESSAGE, b"hi").hex() == "4a4f4253" "01" "03" "00000002" "6869"


def test_frames_come_out_whole_however_the_bytes_arrive():
    limits, buffer, got = wire.limits(CFG), bytearray(), []
    sent = [(LOG_MESSAGE, b"text"), (JOB_REQUEST, bytes(24)), (99, b"from a newer peer"), (LOG_MESSAGE, b"")]
    for byte in b"".join(wire.frame(wire.Frame(opcode), payload) for opcode, payload in sent):
        buffer.append(byte)
        while one := wire.next_frame(buffer, limits):
            got.append(one[1:])
    assert got == sent and not buffer


REFUSED = {
    "wrong magic": b"GET / HTTP/1.1\r\n\r\n",
    "protocol version 3, here 1 or 2": b"JOBS\x03\x00" + bytes([0, 0, 0, 24]) + bytes(24),
    "JOB_REQUEST of 23 bytes, allowed 24": wire.frame(wire.Frame(JOB_REQUEST), bytes(23)),
    "RESULT of 49 bytes, allowed 44 to 48": result_frame(packed=GOOD + b"\0"),
    "RESULT of 43 bytes": wire.frame(wire.Frame(RESULT), bytes(43)),
    "LOG_MESSAGE of 1000000 bytes": wire.HEADER.pack(b"JOBS", 1, LOG_MESSAGE, 1000000),
    "opcode 77 of 4000000000 bytes": wire.HEADER.pack(b"JOBS", 1, 77, 4000000000),
    "RESULT says 3 bytes of fitness and carries 4": result_frame(size=3),
    "3 bytes of fitness where 16 values need 4": result_frame(packed=GOOD[:3]),
    "byte 250 is not five ternary digits": result_frame(packed=b"\xfa" + GOOD[1:]),
    "digits after the last value": result_frame(packed=GOOD[:3] + b"\xf2"),
    "wrong step: RESULT for step 7 while step 0": result_frame(step=7),
    "wrong chunk: RESULT for member 33": result_frame(position=33),
    "wrong chunk: RESULT for member 128": result_frame(position=128),
    "wrong figures": result_frame(updates=1 << 60),
    "wrong figures: sum of losses": result_frame(loss=-(1 << 63)),
    "wrong validation": wire.frame(VALIDATION, 0, 0, 0, 1.0),
    "wrong validation: nan": wire.frame(VALIDATION, 0, 1, 0, float("nan")),
}


def test_wrong_frames_end_their_connection_with_one_line_and_nothing_else(tmp_path):
    with Server(tmp_path, steps=1, drain=0) as server:
        honest = Peer(server.port)
        first = honest.chunk(0)
        for reason, data in REFUSED.items():
            before = server.lines.text
            peer = Peer(server.port)
            peer.link.send(data)
            assert peer.closed(), reason
            said = server.lines.text[len(before):]
            assert said.startswith("refused 127.0.0.1:") and reason in said and said.count("\n") == 1, (reason, said)
        before = server.lines.text
        again = Peer(server.port)
        again.link.send(REFUSED["wrong magic"])
        assert again.closed() and server.lines.text == before, "the same offence is told once"
        honest.result(0, first)
        for _ in range(3):
            honest.result(0, honest.chunk(0))
        until(lambda: server.run.step == 1)
        assert fitness_digits.unpack_ternary(server.run.fitness(0), CFG.N_PAIRS).all()


def test_unknown_frames_and_half_frames_do_no_harm(tmp_path):
    with Server(tmp_path) as server:
        half, peer = Peer(server.port), Peer(server.port)
        half.link.send(b"JOBS\x01")
        peer.link.send(wire.frame(wire.Frame(200), b"hello from the future"))
        peer.link.send(wire.frame(LOG_MESSAGE, b"\x1b[31mred\x07 text\nStep 5 | fake"))
        assert peer.chunk(0) == 0
        assert "  [31mred text\n  Step 5 | fake\n" in server.lines.text and "\x1b" not in server.lines.text


def test_a_frame_that_never_ends_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(session, "FRAME_SECONDS", 0.3)
    with Server(tmp_path) as server:
        honest, slow = Peer(server.port), Peer(server.port)
        assert honest.chunk(0) == 0
        with pytest.raises(OSError):                             # a byte now and then is no sign of life
            for byte in result_frame() * 2:
                slow.link.send(bytes([byte]))
                time.sleep(0.02)
        assert "refused" in server.lines.text and "stopped in the middle of a frame" in server.lines.text
        assert honest.chunk(0) == 32


# --- serving ---------------------------------------------------------------------------------------------------------

def test_requests_are_held_and_woken(tmp_path):
    with Server(tmp_path) as server:
        a, b = Peer(server.port), Peer(server.port)
        mine = [a.chunk(0), a.chunk(0), b.chunk(0), b.chunk(0)]
        assert mine == [0, 32, 64, 96]
        late = Peer(server.port)
        late.ask(0)
        assert late.silent()
        b.link.close()                                           # a holder leaves: its chunks are wanted at once
        assert late.answer()[2] in (64, 96)
        late.ask(0)
        assert late.answer()[2] in (64, 96)
        late.ask(0)                                              # nothing left, but a step will be complete soon
        assert late.silent()
        for position in mine:
            a.result(0, position)
        seed, step, _, packed = late.answer()
        assert step == 1 and seed == seeds.next_seed(42, 0) and \
            fitness_digits.unpack_ternary(packed, CFG.N_PAIRS).all()


def test_a_silent_workers_chunk_is_handed_out_again_and_the_first_result_counts(tmp_path):
    cfg = CFG.changed(STRAGGLER_TIMEOUT=0.3, POPULATION_SIZE=32)
    with Server(tmp_path, cfg) as server:
        slow, fast = Peer(server.port, cfg), Peer(server.port, cfg)
        assert slow.chunk(0) == 0
        fast.ask(0)
        assert fast.answer()[2] == 0
        assert "silent for 0.3 s, its chunk 0 is handed out again" in server.lines.text
        fast.result(0, 0, GOOD, updates=7, loss=11)
        until(lambda: server.run.step == 1)
        # too late: ignored
        slow.result(0, 0, fitness_digits.pack_ternary(-np.ones(16, np.int8)), updates=9, loss=22)
        slow.ask(0)
        assert slow.answer()[3] == GOOD and server.run.record(0) == (11, 7)


def test_duplicate_results_count_once(tmp_path):
    with Server(tmp_path) as server:
        peer = Peer(server.port)
        for position in (0, 0, 32, 64, 32):
            peer.result(0, position, loss=10)
        assert peer.chunk(0) == 96
        peer.result(0, 96, loss=10, updates=3)
        until(lambda: server.run.step == 1)
        assert server.run.record(0) == (40, 3)


def test_the_step_line_the_log_and_the_validation(tmp_path):
    with Server(tmp_path, steps=1, drain=0) as server:
        peer = Peer(server.port)
        assert peer.chunk(0) == 0                                # who holds chunk 0 validates
        peer.link.send(wire.frame(VALIDATION, 0, 100, 300, 300 * np.log(2)))
        for position in (0, 32, 64, 96):
            peer.result(0, position, loss=4096, updates=5 if position < 64 else 0)
    assert re.search(r"^Step 0 \| Tokens: 0\.00 M \| Loss: 1\.0000 \| Time: [\d.]+ ms \| Updates: 5 \(n=2, max=5\) \| "
                     r"Speed: [\d.]+ tok/s \| LR: 0\.5 \| Net: [\d.]+ MB/s \(Tx: \d+ B, Rx: \d+ B\) \| "
                     r"Val: 1\.00 bits/byte$",
                     server.lines.text, re.M), server.lines.text
    log = (tmp_path / "coordinator.log").read_text().splitlines()
    assert log[0].startswith("# egg") and "# CHUNK_SIZE = 32" in log and log[-2] == "Step,RelTime,Loss,Updates,LR"
    assert re.fullmatch(r"0,\d+\.\d{3},1\.000000,5,0\.5", log[-1])


def test_colours_only_on_a_terminal_and_not_with_no_color(monkeypatch):
    monkeypatch.delenv("NO_COLOR", raising=False)
    stream = Lines()
    assert egg_net.Console(stream).colour("x", "red") == "x"
    stream.isatty = lambda: True
    console = egg_net.Console(stream)
    assert console.colour("x", "red") == "\x1b[31mx\x1b[0m"
    console.progress("step 12: 3/8 chunks")
    console.line("done")
    assert stream.text == "\r\x1b[Jstep 12: 3/8 chunks\r\x1b[Jdone\n"
    monkeypatch.setenv("NO_COLOR", "1")
    assert egg_net.Console(stream).colour("x", "red") == "x"


def test_answers_come_within_a_millisecond(tmp_path):
    cfg = CFG.changed(POPULATION_SIZE=32 * 400)
    with Server(tmp_path, cfg) as server:
        peer, times = Peer(server.port, cfg), []
        for _ in range(300):
            started = time.perf_counter()
            peer.ask(0)
            position = peer.answer()[2]
            times.append(time.perf_counter() - started)
            peer.result(0, position)
    assert sorted(times)[150] < 1e-3, f"median {1e3 * sorted(times)[150]:.2f} ms"


# --- the worker ------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("workers", [1, 2])
def test_any_number_of_workers_gives_the_same_run(tmp_path, workers):
    packed, digests = expected(6)
    engines = [FakeEngine(pause=0.002) for _ in range(workers)]
    server = Server(tmp_path, steps=6, stay=True)
    begin_together(engines)
    threads = [work_in_thread(server.port, engine) for engine in engines]
    with server:
        until(lambda: all(engine.step == 6 for engine in engines))
        assert whole(server.run) == packed
    for thread in threads:
        thread.join(10)
    assert all(engine.state().digests() == digests and engine.evaluated for engine in engines)
    updates = [re.search(rf"Step {k} .*Updates: (\d+)", server.lines.text)[1] for k in range(1, 6)]
    assert updates == ["101", "102", "103", "104", "105"]


def test_a_late_worker_catches_up(tmp_path):
    late = FakeEngine()
    with Server(tmp_path) as server:
        first = work_in_thread(server.port, FakeEngine(pause=0.01))
        until(lambda: server.run.step >= 3)
        second = work_in_thread(server.port, late)
        until(lambda: late.evaluated)
        server.stop()
        first.join(10), second.join(10)
        assert whole(server.run) == expected(server.run.step)[0]
    assert late.state().digests() == expected(late.step)[1] and min(late.evaluated)[0] >= 3


def test_the_first_samples_and_validations_come_early():
    for every, steps in ((0, []), (2, [0, 2, 4, 6]), (10, [0, 1, 2, 5, 10, 20]), (500, [0, 50, 100, 250, 500, 1000])):
        assert [step for step in range(1001) if egg_net.due(every, step)][:len(steps)] == steps
        assert every or not egg_net.due(every, 0)


def test_validation_and_samples_reach_the_console(tmp_path):
    from model import data_files
    decoding = data_files.load_decoding(CFG)
    validation = data_files.Validation(np.zeros((3, 9), np.int32), 12, "bits/byte")
    with Server(tmp_path, steps=3) as server:
        tokens = np.frombuffer(b"ab\nd" * 20, np.uint8)
        thread = work_in_thread(server.port, FakeEngine(), tokens=tokens, validation=validation, decoding=decoding)
    thread.join(10)
    assert "  sample at step 0: ab\u23ced >>> AAA\n" in server.lines.text
    assert "sample at step 2: ab\u23ced >>> CCC\n" in server.lines.text
    lines = [x for x in server.lines.text.splitlines() if x.startswith("Step")]
    # (step + 1) / ln 2 / 12
    assert [x.partition("Val: ")[2] for x in lines] == ["0.12 bits/byte", "", "0.36 bits/byte"]


def test_a_worker_survives_its_coordinator_and_a_run_that_begins_again(tmp_path):
    packed, digests = expected(4)
    engine, lines = FakeEngine(pause=0.01), Lines()
    port = free_port()
    with Server(tmp_path / "a", port=port, save=True) as server:
        work_in_thread(port, engine, retry=True, lines=lines)
        until(lambda: server.run.step >= 2)
        server.stop()
    with Server(tmp_path / "a", port=port, save=True, steps=engine.step + 3) as server:      # goes on where it was
        until(lambda: server.run.step == server.coordinator.steps)
    assert engine.loads == 0 and "the coordinator is gone, trying again" in lines.text
    # another run, behind the worker
    with Server(tmp_path / "b", port=port, save=True, steps=4) as server:
        until(lambda: server.run.step == 4)
        assert [server.run.fitness(k) for k in range(4)] == packed
        until(lambda: engine.step == 4)
    assert engine.loads == 1 and engine.state().digests() == digests and "rebuilding from the beginning" in lines.text


class FakeCoordinator:
    """Answers every request of one worker with the next of the given responses."""

    def __init__(self, *responses):
        self.listener, self.requests = socket.create_server(("127.0.0.1", 0)), []
        self.port, self.responses = self.listener.getsockname()[1], list(responses)
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self):
        sock, buffer = self.listener.accept()[0], bytearray()
        with sock:
            while data := sock.recv(1 << 16):
                buffer += data
                while got := wire.next_frame(buffer, wire.limits(CFG)):
                    self.requests.append(got[1:])
                    if got[1] == JOB_REQUEST:
                        if not self.responses:
                            return
                        sock.sendall(self.responses.pop(0))


def response(seed, step, position, packed=b""):
    return wire.frame(JOB_RESPONSE, seed, step, position, len(packed), packed)


def serve_fake(engine, *responses):
    """Requests and results that the worker sent while it was given these responses."""
    fake = FakeCoordinator(*responses)
    chunks = egg_net.run_worker(CFG, "127.0.0.1", fake.port, engine, retry=False, protocol=1,
                                console=egg_net.Console(Lines()))
    return chunks, fake.requests


def test_the_worker_serves_a_coordinator_that_polls():
    """The C++ coordinator does not hold requests, and may leave step and seed of an empty answer 0."""
    engine = FakeEngine()
    fitness, seed1 = np.ones(CFG.N_PAIRS, np.int8), seeds.next_seed(42, 0)
    chunks, requests = serve_fake(engine, response(42, 0, NOTHING), response(0, 0, NOTHING),
                                  response(seed1, 1, 0, fitness_digits.pack_ternary(fitness)),
                                  response(seed1, 1, NOTHING),
                                  response(0, 0, NOTHING), response(seed1, 1, 64), response(seed1, 1, 0))
    assert chunks == 2 and engine.loads == 0 and engine.step == 1
    results = [wire.RESULT.unpack(p)[:6] for op, p in requests if op == RESULT]
    losses = FakeEngine.evaluate(engine, 64, 32)
    assert results[0] == (seed1, 1, 64, 101, losses.sum(), 4) and results[1][1:4] == (1, 0, 0)
    fitness = fitness_digits.chunk_fitness(losses, CFG)
    assert [p for op, p in requests if op == RESULT][0][44:] == fitness_digits.pack_ternary(fitness)
    asked = [wire.JOB_REQUEST.unpack(p)[:2] for op, p in requests if op == JOB_REQUEST]
    assert asked == [(42, 0)] * 3 + [(seed1, 1)] * 5


def test_a_worker_that_does_not_fit_rebuilds_once_and_stops_with_a_line():
    seed1 = seeds.next_seed(42, 0)
    catch_up = response(seed1, 1, 0, fitness_digits.pack_ternary(np.zeros(CFG.N_PAIRS, np.int8)))
    engine = FakeEngine()
    assert serve_fake(engine, catch_up, response(42, 0, NOTHING), response(42, 0, 32))[0] == 1        # it was ahead
    assert engine.loads == 1 and engine.step == 0
    engine = FakeEngine()
    assert serve_fake(engine, catch_up, response(seed1 + 1, 1, 0), catch_up, response(seed1, 1, 0))[0] == 1
    assert engine.loads == 1
    with pytest.raises(egg_net.NetError, match="does not fit this worker: it answers for step 1 with seed"):
        serve_fake(FakeEngine(), catch_up, response(seed1 + 1, 1, 0), catch_up, response(seed1 + 1, 1, 0))
    with pytest.raises(egg_net.NetError, match="answers for step 0 with seed 0"):
        # the C++ answer "too far behind"
        serve_fake(FakeEngine(), catch_up, response(0, 0, 0), response(0, 0, 0))


@pytest.mark.parametrize("reason, answer", [
    ("wrong magic", b"HTTP/1.1 400 Bad Request\r\n\r\n"),
    ("protocol version 9", b"JOBS\x09\x02" + bytes(32)),
    ("JOB_RESPONSE of 1000 bytes, allowed 28 to 41", wire.frame(wire.Frame(JOB_RESPONSE), bytes(1000))),
    ("says 9 bytes of fitness and carries 2", wire.frame(JOB_RESPONSE, 42, 1, 0, 9, b"ab")),
    ("the fitness of step 0 cannot be right", response(42, 1, 0, b"\xff" * 13)),
    ("it hands out member 33", response(42, 0, 33)),
    ("it hands out member 128", response(42, 0, 128)),
])
def test_the_worker_refuses_what_cannot_be_right(reason, answer):
    with pytest.raises(egg_net.NetError, match=re.escape(reason)) as caught:
        serve_fake(FakeEngine(), answer)
    assert "\n" not in str(caught.value)


def test_unreachable_hosts_are_one_line():
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    for host, words in (("no-such-host.invalid", "cannot be reached"), ("a..b", "cannot be reached"),
                        ("127.0.0.1", "no coordinator at")):
        with pytest.raises(egg_net.NetError, match=words) as caught:
            egg_net.run_worker(CFG, host, port, FakeEngine(), retry=False, console=egg_net.Console(Lines()))
        assert "\n" not in str(caught.value)


def test_a_worker_looks_at_its_socket_between_slices(tmp_path):
    engine = FakeEngine(pause=0.25)                                    # 2 members a slice at this speed
    with Server(tmp_path) as server:
        thread = work_in_thread(server.port, engine)
        until(lambda: len(engine.evaluated) >= 1)
        server.stop()
        thread.join(1.5)
        assert not thread.is_alive()
    worker = egg_net.Worker(CFG, engine, None, None, None, False, None)
    for speed, seconds in ((100, 0.2), (10 ** 6, 0.2), (1, 0.2), (37, 0.2)):
        for _ in range(8):
            worker._measure(worker.slice, worker.slice / speed)
        for left in (2, 32, 1000, 40960):
            count = worker._slice_size(left)
            assert count % 2 == 0 and 2 <= count <= left and count <= max(2, speed * seconds + 2)


# --- history ---------------------------------------------------------------------------------------------------------

def test_history_keeps_every_step(tmp_path):
    packed = filled(tmp_path, 150)
    run = history.open_run(CFG, tmp_path)
    seed = 42
    for k in range(150):
        seed = seeds.next_seed(seed, k)
    assert (run.step, run.seed, whole(run), run.record(149)) == (150, seed, packed, (-149000, 149))
    assert run.notices == []
    run.append(packed[0], 1 << 62, 1)
    run.close()
    again = history.open_run(CFG, tmp_path)
    assert whole(again) == packed + packed[:1]
    again.close()


def test_a_run_from_before_a_constant_existed_goes_on(tmp_path, monkeypatch):
    """It is the run that the default of that constant makes; with another value it is another run."""
    saved = egg_config.Config.saved
    monkeypatch.setattr(egg_config.Config, "saved",
                        lambda cfg: {name: value for name, value in saved(cfg).items() if name != "NTT_MODE"})
    history.open_run(CFG, str(tmp_path)).close()
    monkeypatch.undo()
    history.open_run(CFG, str(tmp_path)).close()
    with pytest.raises(history.HistoryError, match="NTT_MODE = 0 there, 1 here"):
        history.open_run(CFG.changed(NTT_MODE=1), str(tmp_path))


def test_a_torn_tail_is_cut_at_any_byte_and_the_run_goes_on(tmp_path):
    packed = filled(tmp_path / "a", 3)
    data = (tmp_path / "a" / history.FILE).read_bytes()
    run = history.open_run(CFG, tmp_path / "a")
    last = run._offsets[2]
    run.close()
    for end in range(last, len(data)):
        for tail in (data[last:end], bytes(end - last), data[last:-1] + b"?"):
            (tmp_path / "a" / history.FILE).write_bytes(data[:last] + tail)
            run = history.open_run(CFG, tmp_path / "a")
            assert whole(run) == packed[:2]
            assert len(run.notices) == bool(tail)
            assert all("step 2 was only half written" in line for line in run.notices)
            run.append(packed[2], -2000, 2)
            run.close()
            assert (tmp_path / "a" / history.FILE).read_bytes() == data


def test_a_corrupt_middle_is_refused_with_its_position_and_left_alone(tmp_path):
    filled(tmp_path, 40)
    file = tmp_path / history.FILE
    data = file.read_bytes()
    run = history.open_run(CFG, tmp_path)
    offsets = run._offsets
    run.close()
    for step in (0, 17, 38):
        for at in range(offsets[step], offsets[step + 1]):
            bad = bytearray(data)
            bad[at] ^= 0x41
            file.write_bytes(bad)
            with pytest.raises(history.HistoryError, match=rf"damaged at byte {offsets[step]} \(step {step}\)"):
                history.open_run(CFG, tmp_path)
            assert file.read_bytes() == bad
    missing = data[:offsets[10]] + data[offsets[11]:]
    file.write_bytes(missing)
    with pytest.raises(history.HistoryError, match=rf"byte {offsets[10]} \(step 10\)"):
        history.open_run(CFG, tmp_path)


def test_other_files_and_other_configurations_are_refused(tmp_path):
    filled(tmp_path, 2)
    file = tmp_path / history.FILE
    data = file.read_bytes()
    other = CFG.changed(SIGMA_SHIFT=5, LR_SCHEDULE=((0, 0.1),))
    differ = r"LR_SCHEDULE = .* there, \[\[0, 0.1\]\] here; SIGMA_SHIFT = 3 there, 5 here"
    with pytest.raises(history.HistoryError, match=differ):
        history.open_run(other, tmp_path)
    harmless = CFG.changed(VALIDATE_EVERY=7, SAMPLING_TEMP=0.1, PORT=1)
    history.open_run(harmless, tmp_path).close()
    for words, content in (("not a fitness history", b"something else"),
                           ("cut short in its header, after 0 bytes", b""),
                           ("cut short in its header", data[:50]), ("cut short in its header", data[:4]),
                           ("damaged in its header", data[:60] + b"!" + data[61:])):
        file.write_bytes(content)
        with pytest.raises(history.HistoryError, match=words):
            history.open_run(CFG, tmp_path)
        assert file.read_bytes() == content


def test_directories_that_cannot_be_used_are_one_line(tmp_path):
    (tmp_path / "file").write_text("")
    run = history.open_run(CFG, tmp_path / "run")
    for words, save, load in (("in use by another coordinator", tmp_path / "run", None),
                              ("Not a directory|File exists", tmp_path / "file", None),
                              ("Not a directory", tmp_path / "file" / "x", None),
                              ("no such directory", None, tmp_path / "none"),
                              ("holds no run", tmp_path / "new", tmp_path)):
        with pytest.raises(history.HistoryError, match=words) as caught:
            history.open_run(CFG, save, load)
        assert "\n" not in str(caught.value)
    run.close()
    history.open_run(CFG, tmp_path / "run").close()


def test_a_full_disk_keeps_what_was_complete(tmp_path, monkeypatch):
    packed = filled(tmp_path, 2)
    run, real = history.open_run(CFG, tmp_path), os.pwrite
    def full(handle, data, at):
        if len(data) > 20:
            return real(handle, data[:20], at)
        raise OSError(28, "No space left on device")
    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(history.HistoryError, match="No space left on device: step 2 is not kept"):
        run.append(packed[0], 1, 1)
    monkeypatch.undo()
    run.append(packed[0], 1, 1)
    run.close()
    run = history.open_run(CFG, tmp_path)
    assert whole(run) == packed + packed[:1] and run.notices == []
    run.close()


def test_load_dir_continues_here_or_elsewhere(tmp_path):
    packed = filled(tmp_path / "a", 4)
    run = history.open_run(CFG, None, tmp_path / "a")
    assert (run.directory, run.step) == (tmp_path / "a", 4)
    run.close()
    run = history.open_run(CFG, tmp_path / "b", tmp_path / "a")
    assert (run.directory, whole(run), run.record(3)) == (tmp_path / "b", packed, (-3000, 3))
    run.append(packed[0], 0, 0)
    run.close()
    run = history.open_run(CFG, tmp_path / "b", tmp_path / "a")         # the same command again goes on
    assert whole(run) == packed + packed[:1]
    run.close()
    filled(tmp_path / "c", 3)
    with pytest.raises(history.HistoryError, match="holds another run than --load-dir"):
        history.open_run(CFG, tmp_path / "c", tmp_path / "a")
    run = history.open_run(CFG)
    assert (run.step, run.directory) == (0, None)
    run.close()


# --- C++ checkpoints, golden runs ------------------------------------------------------------------------------------

def golden_a():
    """(Config, recorded arrays) of golden configuration A."""
    recorded = np.load(HERE / "tests" / "golden" / "A.npz")
    return egg_config.make(**json.loads(str(recorded["config"])), VALIDATE_EVERY=0, SAMPLE_EVERY=0,
                           AUDIT_RATE=0.0), recorded


CHECKPOINTS = HERE / "tests" / "golden" / "cpp_checkpoint_A"


def test_a_directory_of_cpp_checkpoints_rebuilds_the_model(tmp_path):
    from engine import cpu_engine
    cfg, recorded = golden_a()
    run = history.open_run(cfg, tmp_path / "run", CHECKPOINTS)
    assert all((fitness_digits.unpack_ternary(run.fitness(k), cfg.N_PAIRS) == recorded["fitness"][k]).all()
               for k in range(6))
    engine = cpu_engine.CpuEngine(cfg)
    history.replay(run, engine)
    run.close()
    assert (engine.state().weights == recorded["model_6"].view(np.int8).ravel()).all()
    assert engine.state().digests() == tuple(str(recorded[name][5])
                                             for name in ("model_sha256", "adam_sha256", "scales_sha256"))
    assert history.open_run(cfg, tmp_path / "run").step == 6


@pytest.mark.parametrize("words, number, change", [
    ("not a checkpoint of the C\\+\\+ system", 3, lambda d: b"xxxx" + d[4:]),
    ("not a checkpoint of the C\\+\\+ system", 1, lambda d: d[:4] + b"\2" + d[5:]),
    ("holds step 3, its name says 2", 2, lambda d: d[:8] + b"\3" + d[9:]),
    ("seed \\d+ where step 4 has", 4, lambda d: d[:16] + b"\0" + d[17:]),
    ("bytes of fitness in a file of 83 bytes", 5, lambda d: d[:-1]),
    ("bytes of fitness in a file of 85 bytes", 5, lambda d: d + b"\0"),
    ("is cut short: 20 bytes", 6, lambda d: d[:20]),
    ("byte 255 is not five ternary digits", 2, lambda d: d[:32] + b"\xff" + d[33:]),
    ("checkpoint_00000004.bin is missing", 4, None),
    ("checkpoint_00000001.bin is missing", 1, None),
])
def test_damaged_cpp_checkpoints_are_refused(tmp_path, words, number, change):
    shutil.copytree(CHECKPOINTS, tmp_path / "cpp")
    file = tmp_path / "cpp" / f"checkpoint_{number:08d}.bin"
    if change is None:
        file.unlink()
    else:
        file.write_bytes(change(file.read_bytes()))
    with pytest.raises(history.HistoryError, match=words):
        history.open_run(golden_a()[0], tmp_path / "run", tmp_path / "cpp")
    assert not (tmp_path / "run").exists()


class Stuck:
    """An engine that stops for ever in the middle of a chunk of some step, after saying so in a file."""

    def __init__(self, engine, step, flag):
        self.engine, self.at, self.flag = engine, step, flag

    def __getattr__(self, name):
        return getattr(self.engine, name)

    def evaluate(self, first, count):
        losses = self.engine.evaluate(first, count // 2 & ~1)
        if self.engine.step == self.at:
            pathlib.Path(self.flag).touch()
            time.sleep(60)
        return np.concatenate([losses, self.engine.evaluate(first + losses.size, count - losses.size)])


def golden_worker(port, pipe, stuck_at=None, flag=None):
    """A worker process on golden configuration A; sends its digests when the coordinator has its six steps."""
    from engine import cpu_engine
    cfg, recorded = golden_a()
    engine = cpu_engine.CpuEngine(cfg, np.frombuffer(recorded["input_bin"].tobytes(), "<u4"), 1)
    pipe.recv()                                               # the sign to begin
    serve = engine if stuck_at is None else Stuck(engine, stuck_at, flag)
    work_in_thread(port, serve, cfg, retry=True)
    until(lambda: engine.step == 6, 100)
    pipe.send(engine.state().digests())


def start_golden_worker(*arguments):
    ours, theirs = SPAWN.Pipe()
    process = SPAWN.Process(target=golden_worker, args=(arguments[0], theirs, *arguments[1:]), daemon=True)
    process.start()
    return process, ours


def test_killed_workers_and_a_stopped_coordinator_change_no_bit_of_golden_a(tmp_path, compiled):
    cfg, recorded = golden_a()
    port, flag = free_port(), tmp_path / "stuck"
    server = Server(tmp_path / "run", cfg, port=port, save=True, steps=4)
    steady, victim, late = start_golden_worker(port), start_golden_worker(port, 2, str(flag)), start_golden_worker(port)
    victim[1].send("go")
    with server:
        until(flag.exists)
        steady[1].send("go")
        until(lambda: len(server.coordinator.dispatcher.work.done) == 7)
        victim[0].kill()                                      # in the middle of a chunk of step 2, all others are done
        until(lambda: server.run.step == 4)
    with Server(tmp_path / "run", cfg, port=port, save=True, steps=6, stay=True) as server:
        late[1].send("go")
        until(lambda: server.run.step == 6)
        assert victim[0].exitcode == -signal.SIGKILL
        for k in range(6):
            assert (fitness_digits.unpack_ternary(server.run.fitness(k), cfg.N_PAIRS) == recorded["fitness"][k]).all()
            assert server.run.record(k)[0] == recorded["loss"][k].astype(np.int64).sum()
        assert [server.run.record(k)[1] for k in range(1, 6)] == list(recorded["updates"][:5])
        golden = tuple(str(recorded[name][5]) for name in ("model_sha256", "adam_sha256", "scales_sha256"))
        assert steady[1].recv() == late[1].recv() == golden
    steady[0].join(10), late[0].join(10), victim[0].join(10)


def fast(rounds):
    """[(chunks a second, chunks a second of processor time)]: a wait of 50 ms in every chunk would show in the first,
    which depends on what else the machine does."""
    clock, processor = map(max, zip(*rounds))
    return clock > 20 and processor > 50


def test_golden_a_is_driven_at_fifty_chunks_a_second(tmp_path, compiled):
    cfg, recorded = golden_a()
    from engine import cpu_engine
    engine = cpu_engine.CpuEngine(cfg, np.frombuffer(recorded["input_bin"].tobytes(), "<u4"))
    rounds = [(0.0, 0.0)]
    while not fast(rounds) and len(rounds) < 12:
        began = time.process_time()
        with Server(tmp_path / str(len(rounds)), cfg, save=True, steps=20) as server:
            thread = work_in_thread(server.port, engine, cfg)
        thread.join(10)
        seconds, chunks = server.coordinator.progress.seconds, 20 * cfg.N_CHUNKS
        rounds.append((chunks / seconds, chunks / (time.process_time() - began)))
        engine.load(parameters.initial_state(cfg))
    assert fast(rounds), rounds


# --- the coordinator as a command, and training ----------------------------------------------------------------------

def test_sigkill_and_sigterm_of_the_coordinator_lose_no_step(tmp_path):
    engine = FakeEngine(pause=0.001)
    process, port = coordinator_process(tmp_path, free_port())
    work_in_thread(port, engine, retry=True)
    until(lambda: engine.step >= 3)
    process.kill()
    process.communicate()
    second, _ = coordinator_process(tmp_path, port)
    refused, nothing = coordinator_process(tmp_path, 0)
    assert nothing is None and "in use by another coordinator" in refused.communicate()[1] and refused.returncode == 1
    refused, nothing = coordinator_process(tmp_path / "other", port)
    assert nothing is None and refused.communicate()[1].startswith(f"egg: port {port} is in use")
    assert refused.returncode == 1
    before = engine.step
    until(lambda: engine.step >= before + 3)
    second.send_signal(signal.SIGTERM)
    out, err = second.communicate(timeout=10)
    assert second.returncode == 0 and not err and f"the run lies in {tmp_path}\n" in out
    run = history.open_run(CFG, tmp_path)
    assert run.step >= 6 and whole(run) == expected(run.step)[0] and engine.loads == 0
    run.close()


def test_training_on_this_machine_goes_on_where_it_stopped(small, tmp_path, compiled):
    lines = Lines()
    first = train.train(small, steps=3, save_dir="run", threads=1, console=egg_net.Console(lines))
    assert (first.progress.run.step, first.final.step, first.unit) == (3, 3, "bits/byte")
    assert first.before is not None
    assert 0 < first.after < 20 and len(first.references) == 3
    second = train.train(small, steps=5, save_dir="run", threads=1, console=egg_net.Console(lines))
    assert (second.progress.first_step, second.progress.run.step) == (3, 5)
    assert second.before == pytest.approx(first.after, abs=1e-12)
    for words in ("starting: 1 worker on cpu", "ready after", "Step 4 |", "steps 3 to 5:",
                  "bits/byte after (uniform 8.00",
                  "sample after 5 steps", "the run lies in run"):
        assert words in lines.text, words
    third = train.train(small, steps=5, save_dir="run", threads=1, console=egg_net.Console(lines))
    assert third.final is None and "the run has its 5 steps already" in lines.text


def test_a_worker_process_that_dies_is_started_again_and_changes_nothing(small, tmp_path, compiled):
    # validation is off, so that the run is quick and its history all there is
    cfg, lines = small.changed(VALIDATE_EVERY=0, SAMPLE_EVERY=0), Lines()
    options = dict(steps=80, threads=1)
    killed = dict(options, save_dir="killed", console=egg_net.Console(lines))
    others = multiprocessing.active_children()                   # of other tests: the compilers of kernels
    thread = threading.Thread(target=train.train, args=(cfg,), kwargs=killed)
    thread.start()
    until(lambda: "Step 2 " in lines.text)
    for process in multiprocessing.active_children():
        if process not in others:
            process.kill()
    train.train(cfg, save_dir="undisturbed", console=egg_net.Console(Lines()), **options)
    thread.join(60)
    assert "the worker on cpu was killed by SIGKILL: starting it again" in lines.text
    runs = [history.open_run(cfg, name) for name in ("killed", "undisturbed")]
    assert whole(runs[0]) == whole(runs[1]) and runs[0].step == 80
    [run.close() for run in runs]


def test_training_names_what_is_missing(small, tmp_path):
    from model import data_files
    (tmp_path / "input.bin").unlink()
    with pytest.raises(data_files.DataError, match="input.bin"):
        train.train(small, steps=1, console=egg_net.Console(Lines()))
