"""history.egg, C++ checkpoints, and runs that are rebuilt from them."""

import functools
import os
import shutil
from contextlib import closing
from time import thread_time

import pyzstd
from pytest import mark

import egg_config
from cluster import history
from cluster.history import open_run
from model import rules
from coordinators import filled, kept, refused, replayed, whole
from fakes import CFG, any_fitness, changed, full
from readings import configured
from recordings import HERE, digests, golden, recorded_digests


# --- history ----------------------------------------------------------------------------------------------------------

def opened(*directories, cfg=CFG):
    """A run that is closed at the end of the block."""
    return closing(open_run(cfg, *directories))


def test_a_history_of_100000_steps_opens_quickly(tmp_path, monkeypatch):
    cfg = configured("nano-egg", "CHUNK_SIZE=256", "POPULATION_SIZE=1024")
    monkeypatch.setattr(pyzstd, "compress", functools.cache(pyzstd.compress))          # of the same fitness
    fitness = any_fitness(cfg, 1)
    with opened(tmp_path, cfg=cfg) as run, monkeypatch.context() as patched:
        patched.setattr(os, "fsync", lambda handle: None)
        for k in range(100_000):
            run.append(fitness, k, 0)
    started = thread_time()
    with opened(tmp_path, cfg=cfg) as run:
        seconds = thread_time() - started
        assert run.step == 100_000 and run.fitness(50_000) == fitness and seconds < 5, f"{seconds:.1f} s"


def cannot_open(words, directory, cfg=CFG, load_dir=None):
    """A run is refused with these words, a pattern, in one line."""
    with refused(words, history.HistoryError):
        open_run(cfg, directory, load_dir)


def test_a_run_from_before_a_constant_existed_goes_on(tmp_path, monkeypatch):
    """It is the run that the default of that constant makes; with another value it is another run."""
    saved = egg_config.Config.saved
    monkeypatch.setattr(egg_config.Config, "saved",
                        lambda cfg: {name: value for name, value in saved(cfg).items() if name != "NTT_MODE"})
    filled(tmp_path, 1)
    monkeypatch.undo()
    open_run(CFG, tmp_path).close()
    cannot_open("NTT_MODE = 0 there, 1 here", tmp_path, changed(NTT_MODE=1))


def recorded_run(directory):
    """The file of a run, its bytes, and where its records begin and the last one ends."""
    file = directory / history.FILE
    with opened(directory) as run:
        return file, file.read_bytes(), run._offsets


def refuses(words, directory, content):
    """A run whose file has this content is refused with these words, and the file is left alone."""
    file = directory / history.FILE
    file.write_bytes(content)
    cannot_open(words, directory)
    assert file.read_bytes() == content


def changed_at(data, at):
    return data[:at] + bytes([data[at] ^ 0x41]) + data[at + 1:]


def test_a_torn_tail_is_cut_at_any_byte_and_the_run_goes_on(tmp_path):
    packed = filled(tmp_path, 3)
    file, data, (*_, last, _) = recorded_run(tmp_path)
    for end in range(last, len(data)):
        for tail in (data[last:end], bytes(end - last), data[last:-1] + b"?"):
            file.write_bytes(data[:last] + tail)
            with opened(tmp_path) as run:
                assert whole(run) == packed[:2] and len(run.notices) == bool(tail)
                assert all("step 2 was only half written" in line for line in run.notices)
                run.append(packed[2], -2000, 2)
            assert file.read_bytes() == data


def test_a_corrupt_middle_is_refused_with_its_position_and_left_alone(tmp_path):
    filled(tmp_path, 40)
    _, data, offsets = recorded_run(tmp_path)
    for k in (0, 17, 38):
        for at in range(offsets[k], offsets[k + 1]):
            refuses(rf"damaged at byte {offsets[k]} \(step {k}\)", tmp_path, changed_at(data, at))
    refuses(rf"byte {offsets[10]} \(step 10\)", tmp_path, data[:offsets[10]] + data[offsets[11]:])


def test_what_a_killed_coordinator_left_behind_is_removed_by_the_owner_alone(tmp_path):
    filled(tmp_path, 2)
    parts = {f"{name}k1ll3d.part" for name in (history.FILE, history.SETTINGS, history.DATA_FILE, "snapshot-")}
    for name in (*parts, "mine.part"):
        (tmp_path / name).write_bytes(b"half")
    history.read_run(CFG, tmp_path).close()
    assert parts < set(os.listdir(tmp_path))
    open_run(CFG, tmp_path).close()
    assert not parts & set(os.listdir(tmp_path)) and (tmp_path / "mine.part").exists()


def test_other_files_and_other_configurations_are_refused(tmp_path):
    filled(tmp_path, 2)
    cannot_open(r"SIGMA_SHIFT = 3 there, 5 here; LR_SCHEDULE = .* there, 0:0.1 here", tmp_path,
                changed(SIGMA_SHIFT=5, LR_SCHEDULE=((0, 0.1),)))
    open_run(changed(VALIDATE_EVERY=7, SAMPLING_TEMP=0.1, PORT=1), tmp_path).close()             # harmless
    data = (tmp_path / history.FILE).read_bytes()
    for content in b"something else", b"", data[:50], data[:4], data[:60] + b"!" + data[61:]:
        refuses("no fitness history, or damaged in its header", tmp_path, content)


def test_directories_that_cannot_be_used_are_one_line(tmp_path):
    (tmp_path / "file").write_text("")
    with opened(tmp_path / "run"):
        for words, save, load in (("in use by another coordinator", tmp_path / "run", None),
                                  ("Not a directory|File exists", tmp_path / "file", None),
                                  ("Not a directory|File exists", tmp_path / "file" / "x", None),
                                  ("No such file or directory: give", None, tmp_path / "none"),
                                  ("holds no run", tmp_path / "new", tmp_path)):
            cannot_open(words, save, load_dir=load)
    open_run(CFG, tmp_path / "run").close()


def test_a_full_disk_keeps_what_was_complete(tmp_path, monkeypatch):
    packed, real = filled(tmp_path, 2), os.pwrite

    def half(handle, data, at):
        return real(handle, data[:20], at) if len(data) > 20 else full()

    with opened(tmp_path) as run:
        with monkeypatch.context() as patched:
            patched.setattr(os, "pwrite", half)
            with refused("No space left on device: step 2 is not kept", history.HistoryError):
                run.append(packed[0], 1, 1)
        run.append(packed[0], 1, 1)
    assert kept(tmp_path) == packed + packed[:1]


def test_a_history_of_any_size_is_cut_in_pieces_while_steps_are_appended(tmp_path, monkeypatch):
    packed, pread = filled(tmp_path, 40), os.pread
    with opened(tmp_path) as run:
        monkeypatch.setattr(history, "PIECE", 500, raising=False)
        monkeypatch.setattr(os, "pread", lambda handle, size, at: pread(handle, min(size, 1000), at))      # as at 2 GB
        for work in run.forget_before(10, b"s" * 32, None):
            work()
            packed.append(packed[len(packed) % 7])
            run.append(packed[-1], 0, 0)
        assert len(packed) > 42 and whole(run) == packed[10:] and run.start.step == 10
    monkeypatch.undo()
    assert kept(tmp_path) == packed[10:]


def test_load_dir_continues_elsewhere(tmp_path, monkeypatch):
    a, b = tmp_path / "a", tmp_path / "b"
    packed = filled(a, 4)
    monkeypatch.chdir(a)
    before = {path: path.read_bytes() for path in a.iterdir()}
    for save_dir, load_dir, directory in (None, "../a/", "../a-2"), (None, ".", "../a-3"), (b, a, b):
        with opened(save_dir, load_dir) as run:
            assert (run.directory, whole(run), run.record(3)[2:4]) == (directory, packed, (-3000, 3))
            assert run.beside == f" ({load_dir} stays as it is)"
            run.append(packed[0], 0, 0)
    assert {path: path.read_bytes() for path in a.iterdir()} == before
    with opened(a, a) as run:                    # unless it is meant
        assert (run.directory, run.step, run.beside) == (a, 4, "")
    with opened(b, a) as run:                                    # the same command again goes on
        assert whole(run) == packed + packed[:1]
        assert run.notices == [f"{b} holds a run already: it goes on, --load-dir is not used"]
    with opened() as run:
        assert (run.step, run.directory) == (0, None)


# --- C++ checkpoints, golden runs -------------------------------------------------------------------------------------

def golden_a():
    """(Config, tokens, recording) of golden configuration A, for a cluster that trains and no more."""
    cfg, tokens, recorded = golden("A")
    return cfg.changed(VALIDATE_EVERY=0, SAMPLE_EVERY=0, AUDIT_RATE=0.0), tokens, recorded


def hold_against_fitness(run, cfg, recorded):
    for k in range(6):
        assert (rules.unpacked_digits(run.fitness(k), cfg.N_PAIRS) == recorded["fitness"][k]).all()


CHECKPOINTS = HERE / "tests" / "golden" / "cpp_checkpoint_A"


def test_a_directory_of_cpp_checkpoints_rebuilds_the_model(tmp_path):
    from engine.cpu_engine import CpuEngine
    cfg, _, recorded = golden_a()
    with opened(tmp_path, CHECKPOINTS, cfg=cfg) as run:
        hold_against_fitness(run, cfg, recorded)
    assert digests(replayed(tmp_path, CpuEngine(cfg)).state()) == recorded_digests(recorded, 5)
    assert open_run(cfg, tmp_path).step == 6


@mark.parametrize("words, number, change", [
    ("it is not the checkpoint of step 2 of such a run", 2, lambda d: d[:8] + b"\3" + d[9:]),
    ("51 bytes where a step has 52: .* POPULATION_SIZE", 5, lambda d: d[:-1]),
    ("checkpoint_00000004.bin: No such file or directory: without it the model cannot", 4, None),
])
def test_damaged_cpp_checkpoints_are_refused(tmp_path, words, number, change):
    shutil.copytree(CHECKPOINTS, tmp_path / "cpp")
    file = tmp_path / "cpp" / f"checkpoint_{number:08d}.bin"
    data = file.read_bytes()
    file.unlink()
    if change:
        file.write_bytes(change(data))
    cannot_open(words, tmp_path / "run", golden_a()[0], tmp_path / "cpp")
    assert not (tmp_path / "run").exists()
