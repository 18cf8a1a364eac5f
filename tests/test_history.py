"""history.egg, C++ checkpoints, and runs that are rebuilt from them."""

import contextlib
import math
import multiprocessing
import os
import pathlib
import shutil
import signal
import time

import numpy as np
import pytest

import egg_config
from cluster import fairness, history, step
from cluster.history import open_run
from model import fitness_digits, parameters, seeds
from coordinators import Server, filled, free_port, kept, refused, until, whole, work_in_thread
from fakes import CFG, any_fitness, step_alone
from recordings import HERE, digests, golden, recorded_digests
from readings import configured


# --- history ----------------------------------------------------------------------------------------------------------

def test_a_history_of_100000_steps_opens_quickly(tmp_path):
    cfg = configured("laptop-weights")
    run = open_run(cfg, tmp_path)
    fitness = any_fitness(cfg, 1)
    for k in range(100_000):
        run.append(fitness, k, 0)
    run.close()
    started = time.thread_time()
    run = open_run(cfg, tmp_path)
    seconds = time.thread_time() - started
    assert run.step == 100_000 and run.fitness(50_000) == fitness and seconds < 5, f"{seconds:.1f} s"
    run.close()


def cannot_open(words, directory, cfg=CFG, load_dir=None):
    """A run is refused with these words, a pattern, in one line."""
    with refused(words, history.HistoryError):
        open_run(cfg, directory, load_dir)


SPAWN = multiprocessing.get_context("spawn")


def test_history_keeps_every_step(tmp_path):
    packed = filled(tmp_path, 150)
    run = open_run(CFG, tmp_path)
    seed = 42
    for k in range(150):
        seed = seeds.next_seed(seed, k)
    assert (run.step, run.seed, whole(run), run.record(149)) == (150, seed, packed, (-149000, 149))
    assert run.notices == []
    run.append(packed[0], 1 << 62, 1)
    run.close()
    assert kept(tmp_path) == packed + packed[:1]


def test_a_run_from_before_a_constant_existed_goes_on(tmp_path, monkeypatch):
    """It is the run that the default of that constant makes; with another value it is another run."""
    saved = egg_config.Config.saved
    monkeypatch.setattr(egg_config.Config, "saved",
                        lambda cfg: {name: value for name, value in saved(cfg).items() if name != "NTT_MODE"})
    open_run(CFG, str(tmp_path)).close()
    monkeypatch.undo()
    open_run(CFG, str(tmp_path)).close()
    cannot_open("NTT_MODE = 0 there, 1 here", tmp_path, CFG.changed(NTT_MODE=1))


def test_a_torn_tail_is_cut_at_any_byte_and_the_run_goes_on(tmp_path):
    packed = filled(tmp_path / "a", 3)
    data = (tmp_path / "a" / history.FILE).read_bytes()
    run = open_run(CFG, tmp_path / "a")
    last = run._offsets[2]
    run.close()
    for end in range(last, len(data)):
        for tail in (data[last:end], bytes(end - last), data[last:-1] + b"?"):
            (tmp_path / "a" / history.FILE).write_bytes(data[:last] + tail)
            run = open_run(CFG, tmp_path / "a")
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
    run = open_run(CFG, tmp_path)
    offsets = run._offsets
    run.close()
    for k in (0, 17, 38):
        for at in range(offsets[k], offsets[k + 1]):
            bad = bytearray(data)
            bad[at] ^= 0x41
            file.write_bytes(bad)
            cannot_open(rf"damaged at byte {offsets[k]} \(step {k}\)", tmp_path)
            assert file.read_bytes() == bad
    file.write_bytes(data[:offsets[10]] + data[offsets[11]:])
    cannot_open(rf"byte {offsets[10]} \(step 10\)", tmp_path)


def test_a_damaged_record_before_a_torn_one_is_no_interrupted_write(tmp_path):
    filled(tmp_path, 3)
    file = tmp_path / history.FILE
    data = file.read_bytes()
    with contextlib.closing(open_run(CFG, tmp_path)) as run:
        first, last, end = run._offsets[1:]
    for at in range(first, last):
        for torn in (1, 7, history.HEAD - 1, history.HEAD + 2, end - last - 1):
            bad = bytearray(data[:last + torn])
            bad[at] ^= 0x41
            file.write_bytes(bad)
            cannot_open(rf"damaged at byte {first} \(step 1\) with more behind it", tmp_path)
            assert file.read_bytes() == bad


def test_what_a_killed_coordinator_left_behind_is_removed_by_the_owner_alone(tmp_path):
    filled(tmp_path, 2)
    parts = {name + "k1ll3d.part" for name in (history.FILE, history.SETTINGS, history.DATA_FILE)}
    for name in (*parts, "mine.part"):
        (tmp_path / name).write_bytes(b"half")
    history.read_run(CFG, tmp_path).close()
    assert parts < set(os.listdir(tmp_path))
    open_run(CFG, tmp_path).close()
    assert not parts & set(os.listdir(tmp_path)) and (tmp_path / "mine.part").exists()


def test_other_files_and_other_configurations_are_refused(tmp_path):
    filled(tmp_path, 2)
    file = tmp_path / history.FILE
    data = file.read_bytes()
    other = CFG.changed(SIGMA_SHIFT=5, LR_SCHEDULE=((0, 0.1),))
    cannot_open(r"SIGMA_SHIFT = 3 there, 5 here; LR_SCHEDULE = .* there, \[\[0, 0.1\]\] here", tmp_path, other)
    harmless = CFG.changed(VALIDATE_EVERY=7, SAMPLING_TEMP=0.1, PORT=1)
    open_run(harmless, tmp_path).close()
    for words, content in (("not a fitness history", b"something else"),
                           ("cut short in its header, after 0 bytes", b""),
                           ("cut short in its header", data[:50]), ("cut short in its header", data[:4]),
                           ("damaged in its header", data[:60] + b"!" + data[61:])):
        file.write_bytes(content)
        cannot_open(words, tmp_path)
        assert file.read_bytes() == content


def test_directories_that_cannot_be_used_are_one_line(tmp_path):
    (tmp_path / "file").write_text("")
    run = open_run(CFG, tmp_path / "run")
    for words, save, load in (("in use by another coordinator", tmp_path / "run", None),
                              ("Not a directory|File exists", tmp_path / "file", None),
                              ("Not a directory", tmp_path / "file" / "x", None),
                              ("no such directory", None, tmp_path / "none"),
                              ("holds no run", tmp_path / "new", tmp_path)):
        cannot_open(words, save, load_dir=load)
    run.close()
    open_run(CFG, tmp_path / "run").close()


def test_a_full_disk_keeps_what_was_complete(tmp_path, monkeypatch):
    packed = filled(tmp_path, 2)
    run, real = open_run(CFG, tmp_path), os.pwrite
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
    run = open_run(CFG, tmp_path)
    assert whole(run) == packed + packed[:1] and run.notices == []
    run.close()


def test_load_dir_continues_elsewhere(tmp_path, monkeypatch):
    packed = filled(tmp_path / "a", 4)
    monkeypatch.chdir(tmp_path / "a")
    before = {path: path.read_bytes() for path in (tmp_path / "a").iterdir()}
    for load_dir, directory in ("../a/", "../a-2"), (".", "../a-3"), (str(tmp_path / "a"), str(tmp_path / "a-4")):
        run = open_run(CFG, None, load_dir)
        assert (run.directory, whole(run), run.beside) == (directory, packed, f" ({load_dir} stays as it is)")
        run.append(packed[0], 0, 0)
        run.close()
    assert {path: path.read_bytes() for path in (tmp_path / "a").iterdir()} == before
    run = open_run(CFG, tmp_path / "a", tmp_path / "a")          # unless it is meant
    assert (run.directory, run.step, run.beside) == (tmp_path / "a", 4, "")
    run.close()
    run = open_run(CFG, tmp_path / "b", tmp_path / "a")
    assert (run.directory, whole(run), run.record(3)) == (tmp_path / "b", packed, (-3000, 3))
    run.append(packed[0], 0, 0)
    run.close()
    open_run(CFG, tmp_path / "b", tmp_path / "a").close()       # the same command again goes on
    assert kept(tmp_path / "b") == packed + packed[:1]
    filled(tmp_path / "c", 3)
    cannot_open("holds another run than --load-dir", tmp_path / "c", load_dir=tmp_path / "a")
    run = open_run(CFG)
    assert (run.step, run.directory) == (0, None)
    run.close()


# --- C++ checkpoints, golden runs -------------------------------------------------------------------------------------

def golden_a():
    """(Config, tokens, recording) of golden configuration A, for a cluster that trains and no more."""
    cfg, tokens, recorded = golden("A")
    return cfg.changed(VALIDATE_EVERY=0, SAMPLE_EVERY=0, AUDIT_RATE=0.0), tokens, recorded


def hold_against_fitness(run, cfg, recorded):
    for k in range(6):
        assert (fitness_digits.unpack_ternary(run.fitness(k), cfg.N_PAIRS) == recorded["fitness"][k]).all()


CHECKPOINTS = HERE / "tests" / "golden" / "cpp_checkpoint_A"


def test_a_directory_of_cpp_checkpoints_rebuilds_the_model(tmp_path):
    from engine import cpu_engine
    cfg, _, recorded = golden_a()
    run = open_run(cfg, tmp_path / "run", CHECKPOINTS)
    hold_against_fitness(run, cfg, recorded)
    engine = cpu_engine.CpuEngine(cfg)
    history.replay(run, engine)
    run.close()
    assert digests(engine.state()) == recorded_digests(recorded, 5)
    assert open_run(cfg, tmp_path / "run").step == 6


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
    cannot_open(words, tmp_path / "run", golden_a()[0], tmp_path / "cpp")
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
    cfg, tokens, _ = golden_a()
    engine = cpu_engine.CpuEngine(cfg, tokens, 1)
    pipe.recv()                                               # the sign to begin
    serve = engine if stuck_at is None else Stuck(engine, stuck_at, flag)
    work_in_thread(port, serve, cfg, retry=True)
    until(lambda: engine.step == 6)
    pipe.send(digests(engine.state()))


def start_golden_worker(*arguments):
    ours, theirs = SPAWN.Pipe()
    process = SPAWN.Process(target=golden_worker, args=(arguments[0], theirs, *arguments[1:]), daemon=True)
    process.start()
    return process, ours


def test_killed_workers_and_a_stopped_coordinator_change_no_bit_of_golden_a(tmp_path, compiled, monkeypatch):
    monkeypatch.setattr(step, "COPY_AFTER", math.inf)         # only the kill hands the victim's chunk to another,
    monkeypatch.setattr(fairness, "LEAST_LEASE", 60)          # however slow this machine is
    cfg, _, recorded = golden_a()
    port, flag = free_port(), tmp_path / "stuck"
    server = Server(tmp_path / "run", cfg, port=port, save=True, steps=4)
    steady, victim, late = start_golden_worker(port), start_golden_worker(port, 2, str(flag)), start_golden_worker(port)
    victim[1].send("go")
    with server:
        until(flag.exists)
        steady[1].send("go")
        until(lambda: len(server.dispatcher.work.done) == 7)
        victim[0].kill()                                      # in the middle of a chunk of step 2, all others are done
        server.reaches(4)
    with Server(tmp_path / "run", cfg, port=port, save=True, steps=6, stay=True) as server:
        late[1].send("go")
        server.reaches(6)
        assert victim[0].exitcode == -signal.SIGKILL
        for k in range(6):
            assert server.run.record(k)[0] == recorded["loss"][k].astype(np.int64).sum()
        hold_against_fitness(server.run, cfg, recorded)
        assert [server.run.record(k)[1] for k in range(1, 6)] == list(recorded["updates"][:5])
        assert steady[1].recv() == late[1].recv() == recorded_digests(recorded, 5)
    steady[0].join(60), late[0].join(60), victim[0].join(60)


def test_golden_a_is_driven_hardly_slower_than_alone(tmp_path, compiled):
    """A coordinator costs 5 ms of processor time a chunk at most. A wait of 50 ms in every chunk would show in what the
    clock says, which depends on what else the machine does: so the engine alone takes turns with it."""
    from engine import cpu_engine
    cfg, tokens, _ = golden_a()
    engine = cpu_engine.CpuEngine(cfg, tokens)
    rounds = []

    def timed(steps):
        """(seconds, seconds of processor time) of a chunk."""
        engine.load(parameters.initial_state(cfg))
        began = time.monotonic(), time.process_time()
        steps()
        return (time.monotonic() - began[0]) / chunks, (time.process_time() - began[1]) / chunks

    def alone():
        for _ in range(10):
            step_alone(engine)

    def driven():
        with Server(tmp_path / str(len(rounds)), cfg, save=True, steps=10) as server:
            server.work(engine).join(60)

    def good():
        (clock, used), (driven_clock, driven_used) = (map(min, zip(*some)) for some in zip(*rounds))
        return driven_clock < 1.5 * clock + 0.02 and driven_used < used + 0.005

    chunks = 10 * cfg.N_CHUNKS
    while not rounds or not good() and len(rounds) < 8:
        rounds.append((timed(alone), timed(driven)))
    assert good(), rounds
