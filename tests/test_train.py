"""`train` as a user types it: a directory that holds a run, --minutes, the first command."""

import json
import os
import pathlib
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from contextlib import closing
from unittest import mock

import numpy as np
from pytest import fixture, mark, raises

import egg
import egg_config
import egg_net
from egg_config import make
from cluster.console import Console, stop_signals
from cluster.history import configuration, discard, newest, open_run, read_run, snapshot_name
from cluster.snapshots import state_hash
from engine import hardware
from tools import train, use
from commands import CFG, DEFINES, TEXT, begin, fails, line_with, paste, run, succeeds
from coordinators import filled
from fakes import Lines
from recordings import HERE, digests, python
from readings import configured


@fixture
def bytes_here(here):
    """A directory with data of plain bytes under other names than the default, which is the current one."""
    (here / "my data").mkdir()
    (here / "my data" / "train.bin").write_bytes(TEXT)
    (here / "my data" / "val.bin").write_bytes(TEXT[:500])
    return [*DEFINES, "-DINPUT_FILE=my data/train.bin", "-DVAL_FILE=my data/val.bin"]


# --- a directory that holds a run -------------------------------------------------------------------------------------

def test_a_run_goes_on_by_its_directory_alone(bytes_here, compiled):
    """train, the printed commands, coordinator, export, import: the constants are named once."""
    first = succeeds(run("train --steps 2 --save-dir 'ckpt one'", *bytes_here))
    assert len(line_with("validation: ", first)) < 80 and "(unigram " in first and "Step 0 |" not in first
    again = line_with("continue it: ", first)
    assert shlex.split(again)[-3:] == ["train", "--save-dir", "ckpt one"]
    more = succeeds(paste(again + " --steps 4", "continue it: "))
    assert "train.bin: 18,000 bytes\nmy data/val.bin: validation on 64 bytes\n" in more and "steps 2 to 4: " in more
    for said in first, more:
        assert said.splitlines()[-1] == line_with("try it: ", said)
        written = paste(said.splitlines()[-1], "try it: ")
        assert succeeds(written).startswith("\n") and len(written.stdout) > 100
        assert written.stderr == "egg: ckpt one, step 4\n"
    told = succeeds(run("eval --load-dir 'ckpt one'"))
    assert told.startswith("my data/val.bin: ") and "bigram" in told
    succeeds(run("export w.safetensors --load-dir 'ckpt one'"))
    begun = succeeds(run("import w.safetensors --save-dir 'new one'"))
    assert shlex.split(begun.splitlines()[-1])[-6:] == [
        "--save-dir", "new one", "-D", "INPUT_FILE=my data/train.bin", "-D", "VAL_FILE=my data/val.bin"]
    assert succeeds(run("eval --load-dir 'new one'")).splitlines()[1:] == told.splitlines()[1:]
    on = succeeds(paste(line_with("next: ", begun) + " --steps 5", "next: "))
    assert "my data/train.bin: 18,000" in on and "steps 4 to 5: " in on
    assert "steps 4 to 5: " in succeeds(run("train --load-dir 'ckpt one' --save-dir copy --steps 5"))
    assert "the run has its 5 steps already" in succeeds(run("train --save-dir copy --steps 5"))
    copy = pathlib.Path("copy", "history.egg")
    before = copy.read_bytes()
    beside = succeeds(run("train --load-dir copy --steps 6"))
    assert "steps 5 to 6: " in beside and "kept in copy-2 (copy stays as it is)\n" in beside
    assert shlex.split(line_with("continue it: ", beside))[-2:] == ["--save-dir", "copy-2"]
    assert copy.read_bytes() == before


def test_the_same_command_continues_a_coordinator(bytes_here):
    pathlib.Path("it's secret").write_text("0123456789abcdef0123456789abcdef")
    os.chmod("it's secret", 0o600)
    command = [sys.executable, HERE / "egg.py", "coordinator", "--minutes", "9", "--port", "0", "--save-dir", "ckpt",
               "--http", "127.0.0.1:0", "--secret-file", "it's secret", "-D", "IDLE_TIMEOUT=99", *DEFINES]
    for _ in range(2):
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                              start_new_session=True) as process:
            assert process.stdout.readline().startswith("coordinator on 0.0.0.0:")
            os.killpg(process.pid, signal.SIGTERM)
            out, err = process.communicate(timeout=60)
        assert not err and "continue it: the same command, with --save-dir ckpt\n" in out
    assert configuration("ckpt")["SEQ_LEN"] == CFG.SEQ_LEN


def test_only_what_is_given_can_conflict_and_is_named(bytes_here):
    filled("ckpt", 1)
    for command in ("train", "coordinator"):
        for where in ("--save-dir", "--load-dir"):
            fails(run(f"{command} {where} ckpt -D N_LAYERS=3 -DVALIDATE_EVERY=5"), 2,
                  "ckpt holds a run of another configuration: -D N_LAYERS: N_LAYERS = 3, there it is 1; leave that out")
    fails(run("train --save-dir ckpt", EGG_SEQ_LEN="16"), 2, "EGG_SEQ_LEN: SEQ_LEN = 16, there it is 8;")
    fails(run("train --save-dir ckpt --preset nano-egg"), 2,
          "--preset nano-egg: MODEL = gru, there it is transformer (and ")
    fails(run("generate --load-dir ckpt -D HIDDEN_DIM=128"), 2,
          "-D HIDDEN_DIM: HIDDEN_DIM = 128, there it is 64;")
    same = ["N_LAYERS=1", "POPULATION_SIZE=128", "LR_SCHEDULE=" + egg_config.text(CFG.LR_SCHEDULE)]
    laptop = configured("laptop-bytes").saved()
    for environ, defines, saved in ({}, same, CFG.saved()), ({"EGG_PRESET": "laptop-bytes"}, [], laptop):
        cfg = egg_config.load(defines=defines, environ=environ, saved=saved, run="ckpt")
        assert cfg.saved() == egg_config.load(environ={}, saved=saved).saved()


def test_other_constants_of_run_begin_a_new_run_with_the_state_of_another(bytes_here, compiled):
    """Weights, moments and noise scales go on at the same step; an island gets noise of its own."""
    succeeds(run("train --steps 3 --save-dir a", *bytes_here))
    fails(run("train --save-dir a -D LR_SCHEDULE=0:0.05"), 2, "LR_SCHEDULE = 0:0.05, there it is ",
          "or begin a new run with its model: the same command with --load-dir a in place of --save-dir")
    said = run("train --load-dir a --steps 5 -D LR_SCHEDULE=0:0.05")
    assert "egg: a-2 begins with the model of a, step 3; a stays as it is\n" in said.stderr
    assert "steps 3 to 5: " in succeeds(said) and configuration("a-2")["LR_SCHEDULE"] == [[0, 0.05]]
    assert " -D" not in line_with("continue it: ", said.stdout)
    assert "steps 5 to 6: " in succeeds(run("train --save-dir a-2 --steps 6"))
    island = "coordinator --load-dir a --save-dir b --island x --steps 1 --port 0"
    assert ", step 3, kept in b," in succeeds(run(island, "-DISLAND_SEED=7", "-DSNAPSHOT_EVERY=9"))
    source, island = (use.load(egg_config.load(environ={}, saved=configuration(path)), path, console=Console()).state()
                      for path in ("a", "b"))
    assert digests(island) == digests(source) and island.step == source.step == 3 and island.seed != source.seed
    with closing(read_run(CFG.changed(LR_SCHEDULE=((0, 0.05),)), "a-2")) as begun:
        assert begun.start == (3, source.seed, state_hash(source).hex(), None, 0)


def test_a_run_ends_with_a_good_validation_or_without_a_better_one(bytes_here, compiled):
    """As with --steps: the last state is kept and measured. What ends it, test_events has."""
    often = [*bytes_here, "-DVALIDATE_EVERY=1", "-DSNAPSHOT_EVERY=50"]
    said = succeeds(run("train --save-dir run --steps 30 --target 9.5", *often))
    steps = int(re.search(r"\nstopped after (\d+) steps, as the validation has come to \d\.\d{4} bits/byte; the run "
                          "lies in run\n", said)[1])
    assert 0 < steps < 30 and os.path.exists("run/" + snapshot_name(steps))
    done = run("train --target 2", *bytes_here, "-DVALIDATE_EVERY=0")
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert done.stderr.startswith("egg: --target and --patience need validations: name a VAL_FILE, with VALIDATE_EVERY")
    fails(run("train --target 0"), 2, "argument --target: '0' is not a number from 0.001 to 64")


def test_a_run_without_a_step_is_replaced(bytes_here, compiled):
    """Its constants and its data bind nobody; what is not said is as it was."""
    open_run(CFG.changed(SEQ_LEN=16), "run").close()
    pathlib.Path("run/data.sha256").write_text("ab" * 32)
    said = succeeds(run("train --steps 1 --save-dir run", *bytes_here))
    assert "run held a run without a step: this one takes its place\n" in said and "steps 0 to 1: " in said
    fails(run("train --save-dir run -D SEQ_LEN=16"), 2, "run holds a run of another configuration")
    open_run(CFG.changed(SEQ_LEN=16), "new").close()
    pathlib.Path("new/data.sha256").write_text("ab" * 32)
    said = succeeds(run("train --steps 1 --save-dir new", *bytes_here[-2:], "-DSAMPLE_EVERY=0"))
    assert "takes its place" not in said and configuration("new")["SEQ_LEN"] == 16


@mark.parametrize("load_dir", ["", "--load-dir ckpt -DLR_SCHEDULE=0:0.1"])
def test_what_cannot_begin_leaves_no_directory(bytes_here, monkeypatch, load_dir, compiled):
    def ends(words, line, *more):
        done = run(f"{line} --save-dir new", *more, *shlex.split(load_dir))
        assert done.returncode == 1 and words in done.stderr.splitlines()[-1], done

    succeeds(run("train --steps 1 --save-dir ckpt", *bytes_here))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        ends(f"port {port} is in use", f"coordinator --port {port}", *bytes_here[:-2])
        ends(f"egg: --http 127.0.0.1:{port}: Address already in use: choose another address", f"train --http {port}",
             *bytes_here)
    monkeypatch.setattr(train, "Training", mock.Mock(side_effect=train.TrainError("too little memory")))
    ends("too little memory", "train", *bytes_here)
    assert sorted(path.name for path in pathlib.Path().iterdir() if path.is_dir()) == ["ckpt", "my data"]
    with closing(open_run(CFG, "new")):                          # of a process that was quicker, and has it in use
        discard("new")
        assert os.path.exists("new/history.egg")
    discard("new")
    discard("ckpt")
    fails(run("train --save-dir ckpt", *bytes_here), 1, "too little memory")
    assert not os.path.exists("new")
    assert configuration("ckpt")


def test_an_old_run_without_settings_works_as_before(bytes_here):
    open_run(configured(None, *[x[2:] for x in bytes_here]), "ckpt").close()
    settings = json.loads(pathlib.Path("ckpt/settings.json").read_text())
    assert {"INPUT_FILE": "../my data/train.bin", "VALIDATE_EVERY": 2, "SNAPSHOT_EVERY": 0}.items() <= settings.items()
    assert configuration("ckpt")["INPUT_FILE"] == "my data/train.bin"
    assert "DECODING_FILE" not in configuration("ckpt")                      # it is not there
    os.mkdir("elsewhere")
    os.chdir("elsewhere")
    assert configuration("../ckpt")["VAL_FILE"] == "../my data/val.bin"
    for old in (b"", b"[]", b"\xff", b'{"INPUT_FILE": 7}', b'{"LATER": 1}'):
        pathlib.Path("../ckpt/settings.json").write_bytes(old)
        assert configuration("../ckpt") == CFG.saved()
    os.unlink("../ckpt/settings.json")
    assert configuration("../ckpt") == CFG.saved()


def test_a_copied_run_and_the_same_file_twice(bytes_here, compiled):
    succeeds(run("train --steps 1 --save-dir ckpt", *bytes_here))
    fails(run("train --save-dir ckpt", "-DVAL_FILE=my data/train.bin"), 2, "is both INPUT_FILE and VAL_FILE: give a")
    shutil.copy("my data/train.bin", "copy.bin")
    assert "warning: copy.bin is a copy of my data/train.bin: validations will be too good" in \
        succeeds(run("train --save-dir ckpt --steps 2", "-DVAL_FILE=copy.bin"))
    os.mkdir("elsewhere")
    shutil.move("ckpt", "elsewhere/ckpt")
    os.chdir("elsewhere")
    os.rename("../my data", "../other")
    fails(run("train --save-dir ckpt"), 2, f"input.bin is missing in {os.getcwd()}", "-D INPUT_FILE=...")


def test_habits_from_elsewhere(bytes_here, compiled):
    """Names of nanoGPT, a directory in place of --load-dir, an option twice, the version."""
    for name, here in egg_config.ELSEWHERE.items():
        if name.isupper() and name not in ("TOP_K", "MAX_ITERS", "OUT_DIR", "LR"):
            fails(run(f"train -D {name}=1"), 2, f"-D {name}: no such constant in egg_config.py: here that is {here}")
    for option in "--lr 1", "--top-k 5", "--max-iters=9", "--out-dir x":
        fails(run(f"train {option}"), 2, f"; {option[:4]}", " is here -")
    succeeds(run("train --steps 1 --save-dir mine", *bytes_here))
    one, other = (succeeds(run(f"eval {place}")).splitlines()[1:] for place in ("mine", "--load-dir mine"))
    assert one == other and len(one) > 3
    assert succeeds(run("generate mine@1 --tokens 3")) == succeeds(run("generate --load-dir mine --tokens 3"))
    fails(run("generate nothing --load-dir mine"), 2, "nothing holds no run: text to continue is given with --prompt")
    fails(run("train --load-dir a --load-dir b"), 2, "--load-dir is given twice")
    assert re.match(r"egg, commit [\w-]+, Python 3", succeeds(run("--version")))
    assert os.access(HERE / "egg.py", os.X_OK)


def test_a_run_without_a_directory_leaves_nothing_and_stops_by_signals(here):
    """Also by those of a closed terminal and of a job system; nohup stays."""
    for number in signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2:
        with begin("coordinator --port 0", *DEFINES, stdout=subprocess.PIPE) as process:
            assert process.stdout.readline().startswith("coordinator on ")
            process.send_signal(number)
            said, _ = process.communicate(timeout=60)
        assert process.returncode == 0 and "stopped after 0 steps" in said
    assert os.listdir() == []
    with mock.patch("signal.getsignal", return_value=signal.SIG_IGN), stop_signals():
        assert signal.signal(signal.SIGHUP, signal.SIG_DFL) == signal.SIG_DFL


def test_a_time_in_which_no_step_is_done_is_told(bytes_here, compiled):
    """Not where somebody has stopped it before."""
    long = [*bytes_here, "-DCHUNK_SIZE=4096", "-DPOPULATION_SIZE=32768", "-DVALIDATE_EVERY=0", "-DSAMPLE_EVERY=0"]
    assert "no step was done in 0.001 min: give more time, or" in succeeds(run("train --minutes 0.001", *long))
    with begin("train --minutes 60 --preset deggs", *long, stdout=subprocess.PIPE) as process:
        assert any(line.startswith("starting: ") for line in process.stdout)
        process.send_signal(signal.SIGINT)
        said, _ = process.communicate(timeout=60)
    assert process.returncode == 0 and "stopped after 0 steps" in said and "no step was done" not in said


def test_an_empty_newer_directory_does_not_win(here):
    run = open_run(CFG, "ckpt-trained")
    run.append(bytes(13), 1, 1)
    run.close()
    os.utime("ckpt-trained/history.egg", (1, 1))
    open_run(CFG, "ckpt-empty").close()
    assert newest() == "ckpt-trained"
    shutil.rmtree("ckpt-trained")
    assert newest() == "ckpt-empty"


def test_the_end_has_a_snapshot_and_some_stay_for_good(bytes_here, compiled):
    """Any step opens by its number, a snapshot by its file; `runs` compares them."""
    def snapshots_of(directory):
        return sorted(int(path.name[9:17]) for path in pathlib.Path(directory).glob("snapshot*"))

    often = [*bytes_here, "-DSNAPSHOT_EVERY=2", "-DVALIDATE_EVERY=1"]
    said = succeeds(run("train --steps 9 --keep-every 2 --save-dir ckpt", *often))
    assert {4, 8, 9} <= {*snapshots_of("ckpt")}
    last, = pathlib.Path("ckpt").glob("snapshot-00000009-*.egg")
    after = line_with("validation: ", said).split()[3]
    assert abs(float(last.name[18:-4]) - float(after)) < 0.001
    succeeds(run("train --steps 14 --save-dir ckpt", "-DKEEP_EVERY=2"))
    succeeds(run("train --steps 15 --save-dir ckpt"))
    assert {4, 8, 12, 14, 15} <= {*snapshots_of("ckpt")} and len(snapshots_of("ckpt")) <= 6
    eighth, = pathlib.Path("ckpt").glob("snapshot-00000008*")
    for place, step in ("ckpt@5", 5), ("ckpt/latest.egg", 15), (eighth, 8):
        assert run(f"generate --load-dir {place} --tokens 1").stderr == f"egg: ckpt, step {step}\n"
    fails(run("eval --load-dir ckpt@16"), 1, "ckpt has only 15 steps")
    assert "a new run" not in (said := run("train --load-dir ckpt@5 --steps 6")).stdout
    assert "egg: ckpt-2 begins with the model of ckpt, step 5; ckpt stays as it is" in said.stderr
    assert "steps 5 to 6: " in succeeds(said)
    succeeds(run("train --load-dir ckpt@5 --steps 5 -D LR_SCHEDULE=0:0.125"))
    table = [line.split(maxsplit=4) for line in succeeds(run("runs")).splitlines()]
    assert [(name, steps) for name, steps, *_ in table] == [("run", "steps"), ("ckpt", "15"), ("ckpt-2", "6"),
                                                            ("ckpt-3", "5")]
    assert table[1][3] == "bits/byte" and "LR_SCHEDULE=0:0.125" in table[3][-1] and "N_LAYERS" not in str(table)


# --- the clock of --minutes -------------------------------------------------------------------------------------------

WARMED = """
import json, sys
import egg_config
from engine import cpu_engine, kernel_cache
from tools import train
cfg = egg_config.load(sys.argv[1], json.loads(sys.argv[2]))
data = train.open_data(cfg)
engine = train.start_engine(cfg, data, "cpu", 1, lambda line: None)
ready = {x.py_func.__name__ for name, module in sys.modules.items() if name.startswith("engine.")
         for x in list(vars(module).values()) if hasattr(x, "py_func") and getattr(x, "overloads", None)}
load, later = kernel_cache.CpuCache.load_overload, []
def watched(self, signature, context):
    later.append(self._name)
    return load(self, signature, context)
kernel_cache.CpuCache.load_overload = watched
for verb in json.loads(sys.argv[3]):
    if verb == "evaluate":
        engine.evaluate(0, 2 if cfg.PERTURB == "weights" else cfg.CHUNK_SIZE)
    if verb == "update":
        engine.update(bytes([1]).ljust(cfg.STEP_BYTES, b"\\0"))
    if verb == "digest":
        engine.digest()
    if verb == "validate":
        engine.validate(data.validation.windows[:1])
    if verb == "write":
        list(engine.generate([1, 2, 3], 2, 1))
print(json.dumps([sorted(ready), later]))
"""
STEP, REPORT = ["evaluate", "update", "digest"], ["validate", "write"]


def warmed(preset, defines, verbs):
    """({compiled before the first step}, [what the verbs load or compile later]). A small model and little data: they
    are not what is asked here."""
    defines = json.dumps(["INPUT_FILE=val.bin", "VAL_FILE=input.bin", "N_LAYERS=1", "HIDDEN_DIM=64", "CHUNK_SIZE=64",
                          "POPULATION_SIZE=64", *defines])
    ready, later = json.loads(python("-c", WARMED, preset, defines, json.dumps(verbs), EGG_DEVICE="cpu"))
    return set(ready), later


@mark.parametrize("preset, defines", [
    ("nano-egg", ["USE_MUON=1", "ADAPTIVE_NOISE_MODE=2"]), ("deggs", ["NTT_MODE=1"]),
    ("best", ["CHUNK_SIZE=4", "POPULATION_SIZE=4", "LOCAL_STEPS=2"])])
def test_nothing_is_compiled_once_the_clock_runs(preset, defines, compiled, compiled_gru):
    assert warmed(preset, defines, STEP + REPORT)[1] == []


def test_nothing_is_compiled_that_the_run_does_not_use(compiled_units):
    everything, later = warmed("laptop-bytes", ["CHUNK_SIZE=4"], STEP + REPORT)
    no_report, later_too = warmed("laptop-bytes", ["VALIDATE_EVERY=0", "SAMPLE_EVERY=0"], STEP)
    assert later == later_too == [] and no_report < everything and "write_texts" in everything - no_report


def test_without_samples_the_end_has_none(bytes_here, compiled):
    said = succeeds(run("train --steps 1 --verbose", *bytes_here, "-DSAMPLE_EVERY=0"))
    assert "sample" not in said and "validation: " in said and "Step 0 |" in said
    quiet = run("train --steps 1 --quiet", *bytes_here)
    assert (quiet.returncode, quiet.stdout, quiet.stderr) == (0, "", "")
    assert "nothing of this run is kept: --save-dir DIR keeps it" in said.splitlines()


# --- the first command ------------------------------------------------------------------------------------------------

@fixture
def started(here, monkeypatch, capsys):
    """What `train` would start: started(device, arguments) -> (cfg, the line about the preset)."""
    found = []
    monkeypatch.setattr("tools.train.train", lambda cfg, *_, **__: found.append(cfg) or sys.exit(0))

    def start(device, arguments=""):
        monkeypatch.setattr(hardware, "devices", lambda cfg: [device if cfg.DEVICE == "auto" else "cpu"])
        with raises(SystemExit):
            egg.main(["train", *arguments.split()])
        return found[-1], capsys.readouterr().out

    return start


@mark.parametrize("device, preset, other", [("cpu", "laptop", "a GPU"), ("cuda:0", "best", "no GPU")])
def test_plain_training_takes_the_preset_of_the_machine(started, monkeypatch, device, preset, other):
    open_run(make(), "ckpt").close()
    fast, deggs = configured(preset), make()
    for more in "", "--save-dir new --minutes 1", "-D PORT=7":
        cfg, said = started(device, more)
        assert cfg.shared() == fast.shared() and other not in said
        assert said.count("\n") == 1 and f"here: taking the preset {preset} (--preset deggs" in said
    assert started(device, "-D N_LAYERS=2")[0].shared() == fast.changed(N_LAYERS=2).shared()
    assert started(device, "-D INPUT_FILE=mine.bin")[0].INPUT_FILE == "mine.bin"
    assert started(device, "-D DEVICE=cpu")[0].MODEL == "gru", "a GPU that must not be used is none"
    for chosen in "--save-dir ckpt", "--load-dir ckpt", "--preset deggs":
        cfg, said = started(device, chosen)
        assert cfg.shared() == deggs.shared() and said == ""
    with monkeypatch.context() as patch:
        patch.setenv("EGG_SEQ_LEN", "32")
        assert started(device)[0].shared() == fast.changed(SEQ_LEN=32).shared()
        patch.setenv("EGG_PRESET", "deggs")
        assert started(device)[0].shared() == deggs.changed(SEQ_LEN=32).shared()


def test_the_time_of_a_step_is_told_before_the_first(bytes_here, monkeypatch, compiled):
    """And by `arch`; where it is long, and where there is no VNNI, what that means."""
    said = succeeds(run("train --steps 1", *bytes_here))
    line = line_with("a step of ", said)
    assert re.fullmatch(r"a step of \d+ members takes about [\d.e-]+ s here", line) and "1 steps are too few" in said
    assert said.index(line) < said.index("worker: ") and ("VNNI" in said) == ("vnni" not in said)
    assert line_with("a step of ", succeeds(run("arch", *bytes_here)))
    slow, lines = mock.Mock(**{"evaluate.side_effect": lambda *_: time.sleep(0.3)}), []
    slow.name, slow.local = "cpu madd x2", None
    train.tell_pace(make(), slow, lines.append)
    assert re.match(r"a step of 327,680 members takes about [\d,]+ min here: --preset laptop, a GPU or ", lines[0])
    assert lines[1].startswith("this processor has no VNNI")
    train.tell_pace(make(SIMD="madd"), slow, lines.append)
    assert len(lines) == 3
    slow.local, slow.evaluate = mock.Mock(evaluate=slow.evaluate), None          # 2 of 4 * 1,024 windows take 0.3 s
    train.tell_pace(egg_config.load(preset="best", defines=["LOCAL_STEPS=4"]), slow, lines.append)
    assert re.match("a step of 4,096 windows takes about 10 min here: .* a smaller LOCAL_STEPS is faster", lines[3])


def test_the_mark_to_beat_is_said_in_words(bytes_here, monkeypatch, compiled):
    """And why the two figures of a line have two units."""
    said = succeeds(run("train --steps 1 --save-dir new", *bytes_here))
    assert re.search(r"for comparison, .*bigram [\d.]+: a table of pairs, the mark to beat$", said, re.M)
    assert "loss is in" not in said and 'a table of pairs ("bigram"): ' in succeeds(run("plot new"))
    tokens, known = np.arange(300, dtype=np.uint32) % 300, mock.Mock(unit="bits/byte", n_bytes=300)
    known.windows = np.zeros((10, 11), np.int32)
    monkeypatch.setattr("model.data_files.references", lambda *_: {"bigram": 1.0})
    lines = Lines()
    train.print_references(make(), train.Data(tokens, known, None), egg_net.Console(lines))
    assert "loss is in bits/token, as windows are cut in tokens; val in bits/byte: a token has 3.00 bytes" in lines.text


def edit(monkeypatch, name, value):
    """As if this constant were edited in egg_config.py."""
    monkeypatch.setitem(egg_config.CONSTANTS, name, egg_config.CONSTANTS[name]._replace(value=value))


def test_only_what_a_model_depends_on_chooses_one(started, monkeypatch):
    """And what the file says and nobody uses is told."""
    edit(monkeypatch, "SAMPLING_TEMP", 0.8)
    edit(monkeypatch, "PORT", 7)
    cfg, said = started("cpu")
    assert (cfg.MODEL, cfg.SAMPLING_TEMP, cfg.PORT) == ("gru", 0.8, 7) and "taking the preset laptop" in said
    edit(monkeypatch, "VALIDATE_EVERY", 7)
    assert started("cpu")[0].VALIDATE_EVERY == 50 and started("cpu", "-D VALIDATE_EVERY=7")[0].VALIDATE_EVERY == 7
    edit(monkeypatch, "N_LAYERS", 2)
    cfg, said = started("cpu")
    assert cfg == make() and said == ("egg_config.py decides, as N_LAYERS is edited there (--preset laptop suits "
                                      "this machine)\n")


def test_an_edit_that_is_overruled_is_told(here, monkeypatch):
    open_run(make(), "ckpt").close()
    monkeypatch.setattr(train, "measure", lambda *_: None)
    edit(monkeypatch, "LR_SCHEDULE", ((0, 7.0),))
    edit(monkeypatch, "N_LAYERS", 3)
    edit(monkeypatch, "SAMPLE_EVERY", 3)
    for line, says in (("arch", ""), ("arch -D N_LAYERS=4", ""), ("arch --preset deggs", ""),
                       ("arch --preset best", "egg: egg_config.py sets N_LAYERS, LR_SCHEDULE, SAMPLE_EVERY, but "
                        "--preset best has its own: "),
                       ("generate --load-dir ckpt --tokens 1", "SAMPLE_EVERY, but the run has its own: ")):
        assert says in (told := run(line, preset="").stderr) and ("egg_config.py" in told) == bool(says), line


def test_coordinator_and_worker_say_which_preset_would_suit(here, monkeypatch):
    monkeypatch.setattr(hardware, "devices", lambda cfg: ["cuda:0"])
    done = mock.Mock(**{"run.directory": None})
    monkeypatch.setattr("egg_net.run_coordinator", lambda *_, hint, **__: hint and print(hint) or done)
    monkeypatch.setattr("tools.train.work", lambda *_, **__: None)
    open_run(make(), "ckpt").close()
    for command, words in (("worker localhost", "--preset best suits this machine"),
                           ("coordinator", "--preset best suits GPUs, --preset laptop CPUs")):
        said = succeeds(run(command, preset=""))
        assert said.count("\n") == 1 and said.startswith("no preset: ") and words in said
        for chosen in "--preset deggs", "--preset best", "-D N_LAYERS=2":
            assert succeeds(run(f"{command} {chosen}", preset="")) == ""
    assert succeeds(run("coordinator --save-dir ckpt", preset="")) == ""
