"""What a terminal shows: no traceback, messages, the progress line, an output that takes nothing more."""

import contextlib
import json
import os
import pathlib
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time

from pytest import fixture, mark

import egg
from cluster import auth, history
from cluster.console import Console
from commands import CFG, DEFINES, DEGGS, begin, fails, process
from fakes import Lines
from recordings import HERE, python
from run_logs import A_STEP, write


# --- no traceback -----------------------------------------------------------------------------------------------------

@fixture
def clone(tmp_path):
    """The program alone, as a clone without an environment."""
    leave = shutil.ignore_patterns(".*", "tests", "docs", "*.bin", "__pycache__", "ckpt*")  # .* may vanish
    return pathlib.Path(shutil.copytree(HERE, tmp_path / "a clone", ignore=leave))


def test_a_python_without_the_libraries(clone):
    """The system's Python, as it comes."""
    for command in "arch", "worker localhost", "train --save-dir x", "coordinator":
        result = process(command, program=clone / "egg.py", python=[sys.executable, "-S"], env={"PYTHONPATH": ""})
        library = "numpy" if command == "arch" else ""
        fails(result, 1, "has no " + library, f"install it with `make install` in {clone}, and call .venv/bin/python")


def test_a_missing_library_is_named_with_what_installs_it(here):
    (here / "sitecustomize.py").write_text("import sys; sys.modules['pyzstd'] = None")
    fails(process("coordinator --port 0", env={"PYTHONPATH": here}), 1, "has no pyzstd: ")


@mark.parametrize("command", ["train --preset laptop-bytes --save-dir ckpt", "generate", "coordinator --port 0"])
def test_ctrl_c_early_leaves_no_traceback(command, tmp_path, monkeypatch):
    """In the first seconds of a command, from when the program itself has begun, and also while it compiles."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    history.open_run(CFG, str(tmp_path / "ckpt-old")).close()
    for name in ("input.bin", "val.bin", "decoding.bin"):
        (tmp_path / name).symlink_to(HERE / name)
    for delay in (0, 0.5):
        process = begin(command, cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
                        start_new_session=True)
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


def catches_sigint(pid):
    with contextlib.suppress(OSError), open(f"/proc/{pid}/status") as file:
        return int(re.search(r"SigCgt:\s+(\w+)", file.read())[1], 16) >> signal.SIGINT - 1 & 1 == 1


# --- messages ---------------------------------------------------------------------------------------------------------

def test_a_secret_file_that_others_may_read(tmp_path, capfd):
    path = tmp_path / "my secret"
    path.write_text("0123456789abcdef")
    warning = f"egg: others on this machine may read or change {path}: chmod 600 '{path}'\n"
    for mode, said in (0o644, warning), (0o620, warning), (0o600, ""):
        path.chmod(mode)
        auth.read_secret(path)
        assert capfd.readouterr().err == said


# --- the console ------------------------------------------------------------------------------------------------------

STEP_EVENT = {"event": "step", **A_STEP}


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


@mark.parametrize("columns", [80, 40, 160])
def test_a_terminal_has_one_status_line_that_fits(columns, monkeypatch):
    """The first of 300 steps is a lasting line, a validation and a warning too, and all others rewrite one line."""
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setattr(Console, "PROGRESS_EVERY", 0.0)
    console = Console(Lines(terminal=True), minutes=2)
    console.emit({"event": "start", "step": 0, "config": CFG.constants()}, None)
    for step in range(300):
        if step == 100:
            console.emit({"event": "validation", "step": 100, "value": 4.2, "unit": "bits/byte"}, None)
        console.emit({**STEP_EVENT, "step": step, "tokens": 32768 * step, "loss": 3.847, "elapsed": 65.3,
                      "tokens_per_second": 943710.2}, None)
    console.line("a warning")
    console.progress("step 300: 3/8 chunks")
    first, validation, warning, status = screen(console.stream.text, columns)
    assert first.startswith("1:05 step 0") and "validation at step 100: 4.200 bits/byte".startswith(validation)
    assert warning == "a warning" and status.startswith("1:05 of 2:00  step 299")
    assert ("  step 299  loss 3.85 bits/byte  val 4.20 bits/byte  " in status) == (columns >= 80)
    assert ("  944 k/s  9.80 M tokens" in status) == ("3/8 chunks" in status) == (columns == 160)
    console.clear()
    assert screen(console.stream.text, columns)[-1] == ""


@mark.parametrize("terminal", [True, False])
def test_a_dumb_terminal_and_a_pipe_get_plain_lines(monkeypatch, terminal):
    monkeypatch.setenv("TERM", "dumb" if terminal else "xterm")
    monkeypatch.setattr(Console, "PROGRESS_EVERY", 0.0)
    console = Console(Lines(terminal))
    for step in range(99):
        console.emit({**STEP_EVENT, "step": step}, None)
    console.emit({"event": "validation", "step": 99, "value": 4.2, "unit": "bits/byte"}, None)
    console.progress("1/8 chunks")
    console.line("a\x1b[2Jb")
    console.clear()
    first, validation, line = console.stream.text.splitlines()
    assert re.match(r"\d+:\d\d  ?step 0  loss [\d.]+ bits/", first) and "\x1b" not in console.stream.text
    assert (validation, line) == ("validation at step 99: 4.200 bits/byte", "a[2Jb")


@mark.parametrize("hostile", ["\x1b[2J", "\x1b]0;title\x07", "\x9b31m", "\u202e", "\r"])
def test_no_text_steers_a_terminal(hostile, here, monkeypatch, capsys):
    """Console, errors, plots and status: all pass one place."""
    def harmless(text):
        return text.replace("\n", "").isprintable()

    monkeypatch.delenv("NO_COLOR", raising=False)
    stream = Lines(terminal=True)
    console = Console(stream)
    console.line(f"a{hostile}b")
    console.emit({"event": "warning"}, f"refused {hostile}")
    assert harmless(stream.text) and "refused" in stream.text
    log = here / f"log {hostile}"
    write(log, {"event": "references", "values": {hostile: 4.0}},
          {"event": "step", "step": 0, "tokens": 0, "loss": 1, "unit": hostile, "elapsed": 1})
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    assert egg.main(["plot", log.name]) == 0
    assert egg.main(["plot", "no " + hostile]) == 1 and egg.main(["arch", "-D", f"MODEL={hostile}"]) == 2
    out, err = capsys.readouterr()
    assert harmless(re.sub("\x1b\\[(0|3[1-6])m", "", out)) and harmless(err) and err.count("\n") == 2


# --- an output that takes nothing more --------------------------------------------------------------------------------

def test_a_full_disk_under_the_output_ends_no_run(here):
    with open("/dev/full", "w") as full, begin("coordinator --port 0 --save-dir ckpt", *DEFINES, stdout=full,
                                               stderr=subprocess.PIPE) as process:
        assert process.stderr.readline() == ("egg: the output: No space left on device: lines are missing in it from "
                                             "now on\n")
        time.sleep(0.5)
        assert process.poll() is None                    # and it serves
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 0 and process.stderr.read() == ""
    told = [json.loads(line)["event"] for line in open("ckpt/events.jsonl")]
    assert told[-1] == "stop" and "error" not in told


def test_a_training_does_not_need_its_standard_streams(here, compiled):
    """As of cron or a service; also a prompt and a question that find no input, and a full output."""
    def shell(line):
        return subprocess.run(f"{shlex.join([sys.executable, str(HERE / 'egg.py')])} {line}", shell=True, text=True,
                              stderr=subprocess.PIPE, timeout=120, env={**os.environ, **DEGGS})

    (here / "input.bin").write_bytes(b"the quick brown fox " * 99)
    done = shell(f"train --steps 1 --save-dir ckpt {shlex.join(DEFINES)} <&- >&-")
    assert (done.returncode, done.stderr) == (0, "")
    told = [json.loads(line)["event"] for line in open("ckpt/events.jsonl")]
    assert told[-1] == "stop" and "error" not in told
    fails(shell("generate --prompt - <&-"), 2, "the prompt is empty")
    fails(shell("prepare input.bin --vocab-size 256 <&-"), 2, "input.bin would be replaced")
    assert shell("arch >&-").stderr == ""
    fails(shell("arch >/dev/full"), 1, "the output: No space left on device")


def test_what_the_platform_lacks_is_one_line(here, compiled):
    (here / "sitecustomize.py").write_text("import sys; sys.modules['fcntl'] = None")
    for command in "train --save-dir x", "coordinator", "generate":
        fails(process(command, env={"PYTHONPATH": here}), 1, "needs Linux or another Unix; on Windows use WSL")
    (here / "input.bin").write_bytes(b"the quick brown fox " * 99)
    done = process("train --steps 1", *DEFINES, env={"NUMBA_DISABLE_JIT": "1"})
    assert done.returncode == 0 and "steps 0 to 1: " in done.stdout, done


def test_closed_streams_are_no_error(tmp_path):
    done = subprocess.run(f"cd {tmp_path}; {sys.executable} {HERE / 'egg.py'} plot . >&- 2>&-", shell=True)
    assert done.returncode == 1                          # for there is no run, and not for a traceback's 1
    python("-c", "import sys; sys.stdout = None; from cluster.console import Console; Console().line('x')")


def test_lines_last_every_ten_seconds_and_verbose_has_them_all(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    now = [100.0]
    monkeypatch.setattr("cluster.console.time.monotonic", lambda: now[0])
    for verbose, lines in (False, 3), (True, 50):
        console = Console(Lines(terminal=True), verbose=verbose)
        for _ in range(50):
            now[0] += 0.5
            console.emit(STEP_EVENT, None)
        assert console.stream.text.count("\n") == lines
