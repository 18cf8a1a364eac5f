"""Daily use, command by command as a user types them: what one command prints is what the next one needs."""

import contextlib
import io
import json
import os
import pathlib
import pty
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
import types
from unittest import mock

import numpy as np
import pytest

import egg
import egg_config
import kit
from cluster import history
from cluster.console import Console
from tools import prepare, train

CFG = kit.CFG.changed(DEVICE="cpu", VALIDATE_TOKENS=64, SNAPSHOT_EVERY=0)
CHANGED = {**kit.differing(CFG), "SNAPSHOT_EVERY": 0}
DEFINES = [f"-D{name}={egg_config.text(value)}" for name, value in CHANGED.items()]
TEXT = b"the quick brown fox jumps over the lazy dog. " * 400


def run(*arguments, env=None):
    """What the command line does in the current directory, in this process, which has imported the engine already."""
    out, err = io.StringIO(), io.StringIO()
    with (mock.patch.dict(os.environ, {"EGG_DEVICE": "cpu", **(env or {})}), contextlib.redirect_stdout(out),
          mock.patch.object(sys, "argv", [str(kit.HERE / "egg.py")]), contextlib.redirect_stderr(err)):
        try:
            status = egg.main([*map(str, arguments)])
        except SystemExit as ended:
            status = ended.code
    return types.SimpleNamespace(returncode=status, stdout=out.getvalue(), stderr=err.getvalue())


def process(*arguments, program=kit.HERE / "egg.py", python=sys.executable, env=None, stdin=None, timeout=120):
    """The same as a process of its own, which has ended."""
    return subprocess.run([python, program, *map(str, arguments)], capture_output=True, text=True, timeout=timeout,
                          stdin=stdin or subprocess.DEVNULL, env={**os.environ, "EGG_DEVICE": "cpu", **(env or {})})


def paste(line, label, **more):
    """Runs the command behind `label` in a printed line as a shell does; the finished process."""
    return subprocess.run(line.removeprefix(label), shell=True, capture_output=True, text=True, errors="replace",
                          timeout=120, stdin=subprocess.DEVNULL, env={**os.environ, "EGG_DEVICE": "cpu"}, **more)


def line_with(label, text):
    found, = [line for line in text.splitlines() if line.startswith(label)]
    return found


def fails(result, status, *words):
    assert result.returncode == status and result.stderr.startswith("egg: ") and result.stderr.count("\n") == 1, result
    assert [word for word in words if word not in result.stderr] == [], result.stderr


@pytest.fixture
def bytes_here(tmp_path, monkeypatch):
    """A directory with data of plain bytes under other names than the default, which is the current one."""
    (tmp_path / "my data").mkdir()
    (tmp_path / "my data" / "train.bin").write_bytes(TEXT)
    (tmp_path / "my data" / "val.bin").write_bytes(TEXT[:500])
    monkeypatch.chdir(tmp_path)
    return [*DEFINES, "-DINPUT_FILE=my data/train.bin", "-DVAL_FILE=my data/val.bin"]


# --- a directory that holds a run ------------------------------------------------------------------------------------

def test_a_run_goes_on_by_its_directory_alone(bytes_here, compiled):
    """train, the printed commands, coordinator, export, import: the constants are named once."""
    first = run("train", "--steps", 2, "--save-dir", "ckpt one", *bytes_here)
    assert first.returncode == 0, first.stderr
    again = line_with("continue it: ", first.stdout)
    assert shlex.split(again)[-3:] == ["train", "--save-dir", "ckpt one"]
    more = paste(again + " --steps 4", "continue it: ")
    assert more.returncode == 0 and "my data/train.bin: 18,000 tokens" in more.stdout, more
    assert "steps 2 to 4: " in more.stdout
    for line in (line_with("try it: ", first.stdout), line_with("try it: ", more.stdout)):
        written = paste(line, "try it: ")
        assert written.returncode == 0 and written.stdout.startswith("The king said"), written
    told = run("eval", "--load-dir", "ckpt one")
    assert told.returncode == 0 and told.stdout.startswith("my data/val.bin: ") and "bigram" in told.stdout, told
    assert run("export", "w.safetensors", "--load-dir", "ckpt one").returncode == 0
    begun = run("import", "w.safetensors", "--save-dir", "new one")
    assert begun.returncode == 0 and shlex.split(begun.stdout.splitlines()[-1])[-2:] == ["--save-dir", "new one"]
    on = paste(line_with("next: ", begun.stdout) + " --steps 5 -D 'INPUT_FILE=my data/train.bin'", "next: ")
    assert on.returncode == 0 and "steps 4 to 5: " in on.stdout, on
    copied = run("train", "--load-dir", "ckpt one", "--save-dir", "copy", "--steps", 5)
    assert copied.returncode == 0 and "steps 4 to 5: " in copied.stdout, copied


def test_a_coordinator_prints_the_command_that_continues_it(bytes_here):
    (pathlib.Path("it's secret")).write_text("0123456789abcdef0123456789abcdef")
    os.chmod("it's secret", 0o600)
    arguments = ["--port", "0", "--save-dir", "ckpt", "--http", "127.0.0.1:0", "--secret-file", "it's secret",
                 "-D", "IDLE_TIMEOUT=99"]
    command = [sys.executable, kit.HERE / "egg.py", "coordinator", "--minutes", "9", *arguments, *DEFINES]
    for _ in range(2):
        with subprocess.Popen(command, shell=isinstance(command, str), stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                              text=True, start_new_session=True) as process:
            assert process.stdout.readline().startswith("coordinator on 0.0.0.0:")
            os.killpg(process.pid, signal.SIGTERM)
            out, err = process.communicate(timeout=20)
        line = line_with("continue it: ", out)
        assert not err and shlex.split(line)[4:] == ["coordinator", *arguments]
        command = "exec " + line.removeprefix("continue it: ")
    assert history.configuration("ckpt")["SEQ_LEN"] == CFG.SEQ_LEN


def test_the_continuation_is_that_of_the_arguments(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    done = types.SimpleNamespace(run=types.SimpleNamespace(directory="ckpt"))
    monkeypatch.setattr("egg_net.run_coordinator", lambda *_, **__: done)
    assert egg.main(["coordinator", "--steps", "3", "--load-dir=old", "--verb", "-DPORT=9", "-D", "N_LAYERS=2",
                     "--peer", "a:1", "--peer", "[::1]:2", "--island", "x", "--save-dir", "ckpt"]) == 0
    assert shlex.split(line_with("continue it: ", capsys.readouterr().out))[4:] == [
        "coordinator", "--save-dir", "ckpt", "--verbose", "--island", "x", "--peer", "a:1", "--peer", "[::1]:2", "-D",
        "PORT=9"]


def test_only_what_is_given_can_conflict_and_is_named(bytes_here):
    history.open_run(CFG, "ckpt").close()
    for command in ("train", "coordinator"):
        for where in ("--save-dir", "--load-dir"):
            fails(run(command, where, "ckpt", "-D", "N_LAYERS=3", "-DVALIDATE_EVERY=5"), 2,
                  "ckpt holds a run of another configuration: -D N_LAYERS: N_LAYERS = 3, there it is 1; leave that out")
    fails(run("train", "--save-dir", "ckpt", env={"EGG_SEQ_LEN": "16"}), 2, "EGG_SEQ_LEN: SEQ_LEN = 16, there it is 8;")
    fails(run("train", "--save-dir", "ckpt", "--preset", "nano-egg"), 2,
          "--preset nano-egg: MODEL = gru, there it is transformer (and ")
    fails(run("generate", "--load-dir", "ckpt", "-D", "HIDDEN_DIM=128"), 2,
          "-D HIDDEN_DIM: HIDDEN_DIM = 128, there it is 64;")
    same = ["-DN_LAYERS=1", "-DPOPULATION_SIZE=128", "-DLR_SCHEDULE=" + egg_config.text(CFG.LR_SCHEDULE)]
    laptop = egg_config.load("laptop", environ={}).saved()
    for environ, defines, saved in ({}, same, CFG.saved()), ({"EGG_PRESET": "laptop"}, [], laptop):
        cfg = egg_config.load(defines=[x[2:] for x in defines], environ=environ, saved=saved, run="ckpt")
        assert cfg.saved() == egg_config.make(**saved).saved()
    eight = CFG.changed(POPULATION_SIZE=0)
    egg_config.load(defines=["POPULATION_SIZE=0"], environ={}, saved=eight.saved(), run="ckpt")


def test_an_old_run_without_settings_works_as_before(bytes_here):
    history.open_run(egg_config.load(defines=[x[2:] for x in bytes_here], environ={}), "ckpt").close()
    settings = json.loads(pathlib.Path("ckpt/settings.json").read_text())
    assert settings["INPUT_FILE"] == "../my data/train.bin"
    assert settings["VALIDATE_EVERY"] == 2 and settings["SNAPSHOT_EVERY"] == 0
    assert history.configuration("ckpt")["INPUT_FILE"] == "my data/train.bin"
    assert "DECODING_FILE" not in history.configuration("ckpt")                      # it is not there
    os.mkdir("elsewhere")
    os.chdir("elsewhere")
    assert history.configuration("../ckpt")["VAL_FILE"] == "../my data/val.bin"
    for old in (b"", b"[]", b"\xff", b'{"INPUT_FILE": 7}', b'{"LATER": 1}'):
        pathlib.Path("../ckpt/settings.json").write_bytes(old)
        assert history.configuration("../ckpt") == CFG.saved()
    os.unlink("../ckpt/settings.json")
    assert history.configuration("../ckpt") == CFG.saved()


def test_an_empty_newer_directory_does_not_win(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run = history.open_run(CFG, "ckpt-trained")
    run.append(bytes(13), 1, 1)
    run.close()
    os.utime("ckpt-trained/history.egg", (1, 1))
    history.open_run(CFG, "ckpt-empty").close()
    assert history.newest() == "ckpt-trained"
    shutil.rmtree("ckpt-trained")
    assert history.newest() == "ckpt-empty"


# --- the clock of --minutes ------------------------------------------------------------------------------------------

WARMED = """
import json, sys
import egg_config
from engine import cpu_engine, kernel_cache
from tools import train
cfg = egg_config.load(sys.argv[1], json.loads(sys.argv[2]))
data = train.open_data(cfg, print)
engine = train.start_engine(cfg, data, "cpu", 1, lambda line: None)
ready = {x.py_func.__name__ for name, module in sys.modules.items() if name.startswith("engine.")
         for x in list(vars(module).values()) if hasattr(x, "py_func") and getattr(x, "overloads", None)}
load, later = kernel_cache.CpuCache.load_overload, []
def watched(self, signature, context):
    later.append(self._function.__name__)
    return load(self, signature, context)
kernel_cache.CpuCache.load_overload = watched
for verb in json.loads(sys.argv[3]):
    if verb == "evaluate":
        engine.evaluate(0, 2)
    if verb == "update":
        import numpy as np
        fitness = np.zeros(cfg.N_PAIRS, np.int8)
        fitness[:2] = 1, -1
        engine.update(fitness)
    if verb == "digest":
        engine.digest()
    if verb == "validate":
        engine.validate(data.validation.windows[:1])
    if verb == "generate":
        list(engine.generate([1, 2, 3], 2, 1))
print(json.dumps([sorted(ready), later]))
"""
STEP, REPORT = ["evaluate", "update", "digest"], ["validate", "generate"]


def warmed(preset, defines, verbs):
    """({compiled before the first step}, [what the verbs load or compile later])."""
    done = subprocess.run([sys.executable, "-c", WARMED, preset, json.dumps(defines), json.dumps(verbs)], cwd=kit.HERE,
                          capture_output=True, text=True, env={**os.environ, "EGG_DEVICE": "cpu"})
    assert done.returncode == 0, done.stderr
    ready, later = json.loads(done.stdout)
    return set(ready), later


@pytest.mark.parametrize("preset, defines", [
    ("laptop", ["USE_MUON=1", "ADAPTIVE_NOISE_MODE=2", "RARE_TOKENS=0.01"]),
    ("best", ["NTT_MODE=1", "CHUNK_SIZE=64", "POPULATION_SIZE=64"]),
    ("nano-egg", ["CHUNK_SIZE=64", "POPULATION_SIZE=64"])])
def test_nothing_is_compiled_once_the_clock_runs(preset, defines, compiled, compiled_gru):
    assert warmed(preset, defines, STEP + REPORT)[1] == []


def test_nothing_is_compiled_that_the_run_does_not_use(compiled):
    everything, later = warmed("laptop", [], STEP + REPORT)
    no_report, later_too = warmed("laptop", ["VALIDATE_EVERY=0", "SAMPLE_EVERY=0"], STEP)
    assert later == later_too == [] and no_report < everything and "choose_token" in everything - no_report


def test_without_samples_the_end_has_none(bytes_here, compiled):
    done = run("train", "--steps", 1, *bytes_here, "-DSAMPLE_EVERY=0")
    assert done.returncode == 0 and "sample" not in done.stdout and "validation: " in done.stdout, done
    assert "nothing of this run is kept: --save-dir DIR keeps it" in done.stdout.splitlines()


# --- the first command -----------------------------------------------------------------------------------------------

def test_the_fingerprint_of_the_unedited_constants():
    assert egg_config.SHIPPED == egg_config.make().fingerprint()


def test_plain_training_takes_the_laptop_preset_where_there_is_no_gpu(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("EGG_DEVICE", "cpu")
    started = []
    monkeypatch.setattr("tools.train.train", lambda cfg, *_, **__: started.append(cfg) or sys.exit(0))

    def model(*arguments):
        with pytest.raises(SystemExit):
            egg.main(["train", *arguments])
        return started[-1].HIDDEN_DIM, "no GPU here: taking the preset laptop" in capsys.readouterr().out

    history.open_run(egg_config.make(), "ckpt").close()
    assert model() == model("--save-dir", "new", "--minutes", "1") == model("-D", "PORT=7") == (64, True)
    for chosen in ("-D", "N_LAYERS=4"), ("-D", "INPUT_FILE=mine.bin"), ("--save-dir", "ckpt"), ("--preset", "best"):
        assert model(*chosen) == (256, False)
    monkeypatch.setenv("EGG_SEQ_LEN", "64")
    assert model() == (256, False)
    monkeypatch.delenv("EGG_SEQ_LEN")
    monkeypatch.setattr(egg_config, "SHIPPED", "of another file: this one was edited")
    assert model() == (256, False)
    monkeypatch.undo()
    monkeypatch.setattr("tools.train.train", lambda cfg, *_, **__: started.append(cfg) or sys.exit(0))
    monkeypatch.setattr("engine.hardware.devices", lambda cfg: ["cuda:0"])
    assert model() == (256, False)


def test_a_slow_step_is_announced(tmp_path, monkeypatch, compiled):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "input.bin").write_bytes(TEXT)
    many = ["-DVOCAB_SIZE=256", "-DHIDDEN_DIM=256", "-DCHUNK_SIZE=65536", "-DPOPULATION_SIZE=16777216",
            "-DVALIDATE_EVERY=0", "-DSAMPLE_EVERY=0"]
    command = [sys.executable, kit.HERE / "egg.py", "train", *many]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                          env={**os.environ, "EGG_DEVICE": "cpu"}) as process:
        said = next(line for line in process.stdout if "a step of" in line or "Step 0" in line)
        process.kill()
    assert re.match(r"a step of 16,777,216 members takes about [\d.]+ (min|h) here: .* --preset laptop", said), said


def test_what_is_made_once_is_no_time_of_a_step():
    """The first evaluation waits for the table of soft targets."""
    class Engine:
        calls = 0

        def evaluate(self, first, count):
            self.calls += 1
            time.sleep(0.5 if self.calls == 1 else count / 1000)

    assert 100 < train.members_a_second(egg_config.make(CHUNK_SIZE=4096), Engine()) < 1010


# --- no traceback ----------------------------------------------------------------------------------------------------

@pytest.fixture
def clone(tmp_path):
    """The program alone, as a clone without an environment."""
    leave = shutil.ignore_patterns(".git", ".venv", "tests", "docs", "*.bin", "__pycache__", ".*cache", "ckpt*")
    return pathlib.Path(shutil.copytree(kit.HERE, tmp_path / "a clone", ignore=leave))


def test_a_python_without_the_libraries(clone, monkeypatch):
    """The system's Python, as it comes."""
    monkeypatch.chdir(clone.parent)
    bare = dict(program="-S", env={"PYTHONPATH": ""})
    for command in (["arch"], ["worker", "localhost"], ["train", "--save-dir", "x"], ["coordinator"]):
        result = process(clone / "egg.py", *command, **bare)
        library = "numpy" if command == ["arch"] else ""
        fails(result, 1, "has no " + library, "install it with `make -C 'a clone' install`")
    advice = re.search("`(.*)`", result.stderr)[1]
    dry = subprocess.run(advice.replace("make", "make -n"), shell=True, capture_output=True, text=True)
    assert shutil.which("make") is None or dry.returncode == 0 and "install -q -r" in dry.stdout, dry
    (clone / ".venv" / "bin").mkdir(parents=True)
    (clone / ".venv" / "bin" / "python").write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    (clone / ".venv" / "bin" / "python").chmod(0o755)
    (clone / ".venv" / "ready").touch()
    result = process(clone / "egg.py", "arch", "-D", "N_LAYERS=2", **bare)
    fails(result, 1, "has no numpy: it is installed for another: ")
    for directory in clone.parent, clone:
        monkeypatch.chdir(directory)
        program = clone / "egg.py" if directory == clone.parent else "egg.py"
        result = process(program, "arch", "-D", "N_LAYERS=2", **bare)
        done = paste(result.stderr.partition("another: ")[2], "")
        assert done.returncode == 0 and "multiply-adds" in done.stdout, (result, done)


def test_a_missing_library_is_named_with_what_installs_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "libraries").mkdir()
    (tmp_path / "libraries" / "sitecustomize.py").write_text("import sys; sys.modules['pyzstd'] = None")
    fails(process("coordinator", "--port", 0, env={"PYTHONPATH": tmp_path / "libraries"}), 1, "has no pyzstd: ")


def test_a_missing_module_of_the_program_is_an_error_of_it(monkeypatch):
    import tools
    monkeypatch.delattr(tools, "plot", raising=False)
    monkeypatch.setitem(sys.modules, "tools.plot", None)
    with pytest.raises(ImportError):
        egg.main(["plot", "ckpt"])


@pytest.mark.parametrize("command", ["train --preset laptop --save-dir ckpt", "generate", "coordinator --port 0",
                                     "worker localhost", "status", "arch"])
def test_ctrl_c_early_leaves_no_traceback(command, tmp_path):
    """In the first seconds of a command, from when the program itself has begun."""
    history.open_run(CFG, str(tmp_path / "ckpt-old")).close()
    for name in ("input.bin", "val.bin", "decoding.bin"):
        (tmp_path / name).symlink_to(kit.HERE / name)
    for delay in (0, 0.15, 0.5, 1.2):
        process = subprocess.Popen([sys.executable, kit.HERE / "egg.py", *command.split()], cwd=tmp_path, text=True,
                                   stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, start_new_session=True,
                                   env={**os.environ, "EGG_DEVICE": "cpu"})
        # Python takes SIGINT when it starts, and the program gives it back until it can handle it: a short moment that
        # a busy machine may miss
        latest = time.monotonic() + 3
        for handled in (True, False):
            while process.poll() is None and catches_sigint(process.pid) != handled and time.monotonic() < latest:
                time.sleep(0.001)
        time.sleep(delay)
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGINT)
        err = process.communicate(timeout=60)[1]
        assert "Traceback" not in err and err.count("\n") <= 1, (delay, err)
        assert process.returncode in (130, -signal.SIGINT, 0, 1)


def test_ctrl_c_in_a_callback_is_not_lost():
    """Python prints what a callback raises and goes on."""
    program = ("import signal, sys, time\n"
               "signal.signal(signal.SIGINT, signal.SIG_DFL)\n"
               "import egg, egg_config\n"
               "class Last:\n"
               "    def __del__(self):\n"
               "        signal.raise_signal(signal.SIGINT)\n"
               "egg_config.load = lambda *_, **__: (str(Last()), time.sleep(60))\n"
               "sys.exit(egg.main(['arch']))\n")
    ended = subprocess.run([sys.executable, "-c", program], cwd=kit.HERE, capture_output=True, text=True, timeout=50)
    assert (ended.returncode, ended.stderr) == (130, "")


def catches_sigint(pid):
    try:
        with open(f"/proc/{pid}/status") as file:
            return int(re.search(r"SigCgt:\s+(\w+)", file.read())[1], 16) >> signal.SIGINT - 1 & 1 == 1
    except OSError:
        return None


# --- own text --------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("arguments", [["--out", "my books", "--vocab-size", "300"], ["--vocab-size", "256"]])
def test_prepare_leads_to_text(arguments, tmp_path, monkeypatch, compiled):
    """Text -> training -> generation by what is printed."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "it's mine.txt").write_bytes(TEXT * 2)
    made = run("prepare", "it's mine.txt", *arguments)
    assert made.returncode == 0 and made.stderr == "", made
    line = line_with("next: ", made.stdout)
    assert "--preset laptop" in line and " --save-dir ckpt-" in line.replace("'", "")
    trained = paste(line + " --steps 3", "next: ")
    assert trained.returncode == 0 and "steps 0 to 3" in trained.stdout and "bits/byte after" in trained.stdout, trained
    again = paste(line_with("continue it: ", trained.stdout) + " --steps 4", "continue it: ")
    assert again.returncode == 0 and "steps 3 to 4" in again.stdout, again
    written = paste(line_with("try it: ", again.stdout), "try it: ")
    assert written.returncode == 0 and written.stdout.startswith("The king said"), written
    assert line_with("next: ", run("prepare", "it's mine.txt", *arguments, "--force").stdout).count("-2") == 1


def test_prepare_leads_to_the_preset_of_the_machine():
    assert prepare.training_on(".", 8192, False, True)[:2] == ["--preset", "best"]
    assert prepare.training_on("/x/a b", 5000, False, True) == [
        "--preset", "best", "-D", "VOCAB_SIZE=5000", "-D", "INPUT_FILE=/x/a b/input.bin", "-D",
        "VAL_FILE=/x/a b/val.bin", "-D", "DECODING_FILE=/x/a b/decoding.bin", "--save-dir", "ckpt-a b"]
    assert prepare.training_on("/x", 256, True, True)[:4] == ["--preset", "best-bytes", "-D", "DETOKENIZE=0"]
    for directory, size, plain, gpu in ((".", 8192, False, True), ("x", 700, False, False), ("x", 256, True, True)):
        args = egg.parsed(["train", *prepare.training_on(directory, size, plain, gpu)])
        egg_config.load(args.preset, args.defines, environ={})


def test_prepare_asks_before_it_replaces(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "t.txt").write_bytes(TEXT)
    (tmp_path / "val.bin").write_bytes(b"old")
    fails(run("prepare", "t.txt", "--vocab-size", 256), 2,
          "val.bin would be replaced: give another directory with --out DIR, or --force")
    assert (tmp_path / "val.bin").read_bytes() == b"old" and not (tmp_path / "input.bin").exists()
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)

    def end_of_input(question):
        raise EOFError

    monkeypatch.setattr("builtins.input", end_of_input)
    assert egg.main(["prepare", "t.txt", "--vocab-size", "256"]) == 2
    for answer, replaced in (("", False), ("n", False), ("y", True)):
        monkeypatch.setattr("builtins.input", lambda question: answer)
        assert egg.main(["prepare", "t.txt", "--vocab-size", "256"]) == (0 if replaced else 2)
        assert ((tmp_path / "val.bin").read_bytes() != b"old") == replaced


# --- messages --------------------------------------------------------------------------------------------------------

def test_a_secret_file_that_others_may_read(tmp_path, capfd):
    from cluster import auth
    path = tmp_path / "my secret"
    path.write_text("0123456789abcdef")
    for mode, warns in ((0o644, True), (0o620, True), (0o600, False), (0o400, False)):
        path.chmod(mode)
        auth.read_secret(path)
        warning = f"egg: others on this machine may read or change {path}: chmod 600 '{path}'\n"
        assert capfd.readouterr().err == warns * warning


def test_what_installs_a_library_is_a_command(tmp_path, monkeypatch):
    """From any directory: with the Python that runs the program, or the pip of `make`, and the list where it is."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tokenizers.py").write_text("raise ImportError")
    (tmp_path / "t.txt").write_bytes(TEXT)
    result = process("prepare", "t.txt", env={"PYTHONPATH": tmp_path})
    fails(result, 1, "the BPE needs the tokenizers library: ", "--vocab-size 256")
    *pip, install, _, names = shlex.split(re.search("`(.*)`", result.stderr)[1])
    assert install == "install" and os.path.samefile(names, kit.HERE / "requirements" / "prepare.txt")
    assert subprocess.run([*pip, "--version"], capture_output=True).returncode == 0


def test_commands_in_messages_are_those_of_this_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    program = min(os.path.relpath(kit.HERE / "egg.py"), str(kit.HERE / "egg.py"), key=len)
    fails(run("generate"), 1, f"make one with `{sys.executable} {program} train --save-dir ckpt`")
    monkeypatch.chdir(kit.HERE)
    assert run("train", "--help").stdout.count("\n") > 10
    fails(run("train", "--steps", "x"), 2, "egg.py train --help)")


# --- the console -----------------------------------------------------------------------------------------------------

STEP_EVENT = {"event": "step", "step": 1, "tokens": 9, "loss": 1.0, "unit": "bits/byte", "seconds": 0.03,
              "elapsed": 1.0, "updates": 1, "reports": 1, "tokens_per_second": 9.0, "learning_rate": 0.5, "sent": 1,
              "received": 1}


def screen(text, columns):
    """The lines that a terminal shows in the end, without colours."""
    rows = [""]
    for piece in re.split(r"(\n|\r\x1b\[J)", re.sub(r"\x1b\[\d*m", "", text)):
        if piece == "\n":
            rows.append("")
        elif piece == "\r\x1b[J":
            rows[-1] = ""
        else:
            rows[-1] += piece
    assert max(map(len, rows)) < columns, rows
    return rows


@pytest.mark.parametrize("columns", [80, 40, 160])
def test_a_terminal_has_one_status_line_that_fits(columns, monkeypatch):
    """Of 300 steps: the first is a lasting line, a validation and a sample too, and all others rewrite one line."""
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setattr(Console, "PROGRESS_EVERY", 0.0)
    stream = kit.Lines()
    stream.isatty = lambda: True
    console = Console(stream, minutes=2)
    console.emit({"event": "start", "step": 0, "config": CFG.constants()}, None)
    console.emit({"event": "references", "unit": "bits/byte", "values": {"uniform": 8.0, "bigram": 3.5052}}, None)
    for step in range(300):
        if step == 100:
            console.emit({"event": "validation", "step": 100, "value": 4.2, "unit": "bits/byte"}, None)
        console.emit({"event": "step", "step": step, "tokens": 32768 * step, "loss": 3.847, "unit": "bits/byte",
                      "seconds": 0.03, "elapsed": 65.3, "tokens_per_second": 943710.2}, None)
    console.line("a warning")
    console.progress("step 300: 3/8 chunks")
    rows = screen(stream.text, columns)
    assert rows[0].startswith("1:05 step 0") and rows[1].startswith("validation at step 100: 4.200 bits/byte")
    assert rows[2] == "a warning" and rows[3].startswith("1:05 [####----] ends " if columns >= 80 else "1:05  step 299")
    assert len(rows) == 4
    if columns >= 80:
        assert rows[1].endswith("(bigram 3.51)")
        speed = "944 k/s" if columns == 80 else "9.80 M tokens, 944 k tokens/s"
        assert "  step 299  loss 3.85 val 4.20 bits/byte  " + speed in rows[3]
    assert ("  9.80 M tokens, 944 k tokens/s" in rows[3]) == ("3/8 chunks" in rows[3]) == (columns == 160)
    console.clear()
    assert screen(stream.text, columns)[-1] == ""


def test_the_bar_ends_where_the_run_does(monkeypatch):
    """By steps, by minutes, and by what comes first; a run without an end has no bar."""
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr("cluster.console.time.time", lambda: 0.0)
    monkeypatch.setattr("cluster.console.time.localtime", time.gmtime)
    event = {"event": "step", "step": 119, "tokens": 9, "loss": 1.0, "unit": "bits/token", "elapsed": 10.0,
             "tokens_per_second": 9.0}
    for limits, bar in ((dict(steps=200), "[#-------] ends 00:00:40"), (dict(minutes=1), "[#-------] ends 00:00:50"),
                        (dict(steps=200, minutes=1), "[#-------] ends 00:00:40"), (dict(minutes=900), "ends 14:59"),
                        (dict(steps=120), "[########] ends 00:00:00"), (dict(minutes=1e4), "ends Wed 07 Jan"),
                        ({}, "")):
        stream = kit.Lines()
        stream.isatty = lambda: True
        console = Console(stream, **limits)
        console.emit({"event": "start", "step": 100, "config": CFG.constants()}, None)
        console.emit(event, None)
        assert re.search(r"\r?0:10 ?" + re.escape(bar) if bar.startswith("[") else bar, stream.text), stream.text
        assert ("[" in stream.text.replace("\x1b[", "")) == bool(bar)


def test_a_status_line_that_a_narrower_terminal_has_wrapped_is_removed(monkeypatch):
    monkeypatch.setattr(Console, "PROGRESS_EVERY", 0.0)
    monkeypatch.setenv("COLUMNS", "100")
    stream = kit.Lines()
    stream.isatty = lambda: True
    console = Console(stream)
    console.progress("x" * 99)
    monkeypatch.setenv("COLUMNS", "40")
    console.progress()                                   # three rows of 40: the last two rows up, all below erased
    assert stream.text.endswith("x" * 99 + "\x1b[2A\r\x1b[J" + "x" * 39)


def test_the_line_of_d_eggs_has_its_unit(monkeypatch):
    bits = egg_config.loss_unit(CFG.constants())[0]
    assert bits == pytest.approx(16 / CFG.SOFTMAX_EXP_SCALE / np.log(2))
    console = Console(kit.Lines())
    console.emit({"event": "start", "step": 0, "config": CFG.constants()}, None)
    console.emit({**STEP_EVENT, "loss": round(0.9977 * bits, 7)}, None)
    assert "| Loss: 0.9977 |" in console.stream.text


@pytest.mark.parametrize("hostile", ["\x1b[2J", "\x1b]0;title\x07", "\x9b31m", "\u202e", "\r", "\x1b[31;1m",
                                     "\x1b[?25l"])
def test_no_text_steers_a_terminal(hostile, tmp_path, monkeypatch, capsys):
    """Console, errors, plots and status: all pass one place."""
    def harmless(text):
        return not [c for c in text if not c.isprintable() and c != "\n"]

    monkeypatch.delenv("NO_COLOR", raising=False)
    stream = kit.Lines()
    stream.isatty = lambda: True
    console = Console(stream)
    console.line(f"a{hostile}b")
    console.emit({"event": "warning"}, f"refused {hostile}")
    assert harmless(stream.text) and "refused" in stream.text
    monkeypatch.chdir(tmp_path)
    log = tmp_path / f"log {hostile}"
    log.write_text("".join(json.dumps(event) + "\n" for event in (
        {"event": "island", "name": hostile + "x"}, {"event": "references", "values": {hostile: 4.0}},
        {"event": "validation", "step": 0, "tokens": 0, "value": 4.1, "unit": hostile},
        {"event": "step", "step": 0, "tokens": 0, "loss": 1, "unit": hostile, "seconds": 1})))
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    assert egg.main(["plot", log.name]) == 0
    assert egg.main(["plot", "no " + hostile]) == 1 and egg.main(["arch", "-D", f"MODEL={hostile}"]) == 2
    out, err = capsys.readouterr()
    assert harmless(re.sub("\x1b\\[(0|3[1-6])m", "", out)) and harmless(err) and err.count("\n") == 2


# --- an output that takes nothing more -------------------------------------------------------------------------------

def test_a_full_disk_under_the_output_ends_no_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    command = [sys.executable, kit.HERE / "egg.py", "coordinator", "--port", "0", "--save-dir", "ckpt", *DEFINES]
    with open("/dev/full", "w") as full, subprocess.Popen(command, stdout=full, stderr=subprocess.PIPE,
                                                          text=True) as process:
        assert process.stderr.readline() == ("egg: the output: No space left on device: lines are missing in it from "
                                             "now on\n")
        time.sleep(0.5)
        assert process.poll() is None                    # and it serves
        process.send_signal(signal.SIGINT)
        assert process.wait(20) == 0 and process.stderr.read() == ""
    told = [json.loads(line)["event"] for line in open("ckpt/events.jsonl")]
    assert told[-1] == "stop" and "error" not in told


def test_an_output_that_nobody_reads_holds_nothing_up():
    """Lines that find no room are lost, their number is said where lines arrive again, and the pipe stays blocking for
    those who share it."""
    reader, writer = os.pipe()
    with open(writer, "w") as stream, open(reader, "rb", buffering=0) as other_end:
        console = Console(stream)
        started = time.monotonic()
        for k in range(5000):
            console.line(f"line {k} " + "x" * 90)
        assert time.monotonic() - started < 5 and os.get_blocking(writer)
        text = other_end.read(1 << 20)
        for k in range(3):
            console.line(f"afterwards {k}")
            text += other_end.read(1 << 20)
    lines = text.decode().splitlines()
    kept = [line for line in lines if line.startswith("line ")]
    assert kept == [f"line {k} " + "x" * 90 for k in range(len(kept))] and len(kept) > 500
    lost = 5000 - len(kept)
    assert lines[len(kept):] == [f"({lost} lines are missing here: they could not be written)", "afterwards 0",
                                 "afterwards 1", "afterwards 2"]


def test_a_terminal_that_is_held_holds_nothing_up():
    """Ctrl-S, or a connection that hangs: nobody takes what a terminal shows."""
    master, slave = pty.openpty()
    with open(slave, "w") as stream:
        console = Console(stream)
        started = time.monotonic()
        for k in range(5000):
            console.line(f"line {k} " + "x" * 90)
            console.progress("a progress line")
        assert time.monotonic() - started < 5 and os.get_blocking(slave)
    os.close(master)


def test_closed_streams_are_no_error(tmp_path):
    done = subprocess.run(f"cd {tmp_path}; {sys.executable} {kit.HERE / 'egg.py'} plot . >&- 2>&-", shell=True)
    assert done.returncode == 1                          # for there is no run, and not for a traceback's 1
    code = "import sys; sys.stdout = None; from cluster.console import Console; Console().line('x')"
    assert subprocess.run([sys.executable, "-c", code], cwd=kit.HERE).returncode == 0


def test_a_reader_that_leaves_ends_no_run(capfd):
    reader, writer = os.pipe()
    with open(writer, "w") as stream:
        console = Console(stream)
        os.close(reader)
        for _ in range(3):
            console.line("a line")
    assert capfd.readouterr().err.count("Broken pipe: lines are missing in it from now on\n") == 1


def test_lines_last_every_ten_seconds_and_verbose_has_them_all(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    stream, now = kit.Lines(), [100.0]
    stream.isatty = lambda: True
    monkeypatch.setattr("cluster.console.time.monotonic", lambda: now[0])
    console = Console(stream)
    for _ in range(50):
        now[0] += 0.5
        console.emit(STEP_EVENT, None)
    assert stream.text.count("\n") == 3
    verbose = Console(kit.Lines(), verbose=True)
    verbose.stream.isatty = lambda: True
    for _ in range(5):
        verbose.emit(STEP_EVENT, None)
    assert verbose.stream.text.count("\n") == 5 and verbose.stream.text.startswith("Step 1 | Tokens: ")
