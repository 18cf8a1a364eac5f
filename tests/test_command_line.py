"""The command line: devices, files, the cluster of two commands, and one line for each bad input."""

import os
import select
import shutil
import signal
import subprocess
import sys
from unittest import mock

from pytest import fixture, mark

import egg
from egg_config import make
from engine import hardware
from model import parameters
from tools import train
from commands import fails, process, run, succeeds
from coordinators import Server, refused, until
from fakes import CFG
from recordings import HERE

# --- engines ----------------------------------------------------------------------------------------------------------

@mark.parametrize("capabilities, numba_cuda, words", [
    ([], True, "no NVIDIA GPU is visible"),
    ([(7, 5)], True, "compute capability 7.5, 8.0 is the least"),
    ([(9, 0)], False, "pip install -r requirements/cuda12.txt"),
])
def test_without_a_gpu_that_can_be_used(monkeypatch, capsys, capabilities, numba_cuda, words):
    monkeypatch.setattr(hardware, "driver", lambda: (12, capabilities))
    monkeypatch.setattr(hardware.importlib.util, "find_spec", lambda name: numba_cuda or None)
    assert hardware.devices(make(DEVICE="auto")) == hardware.devices(make(DEVICE="cpu")) == ["cpu"]
    err = capsys.readouterr().err                                # a GPU that is not used is worth a line
    assert words in err and err.count("\n") == 1 if capabilities else err == ""
    with refused(words, hardware.EngineError):
        hardware.devices(make(DEVICE="cuda"))


def test_choice_of_a_gpu(monkeypatch):
    monkeypatch.setattr(hardware, "driver", lambda: (12, [(7, 5), (8, 0), (9, 0)]))
    monkeypatch.setattr(hardware.importlib.util, "find_spec", lambda name: True)
    cfg = make(DEVICE="cuda")
    assert hardware.devices(cfg) == hardware.devices(make(DEVICE="auto")) == ["cuda:1", "cuda:2"]
    assert hardware.one_device(cfg) == "cuda:1" and hardware.one_device(cfg, 2) == "cuda:2"
    with refused("GPU 0 cannot be used: there is cuda:1, cuda:2", hardware.EngineError):
        hardware.one_device(cfg, 0)


@mark.parametrize("own, files, cores", [
    ("0::/\n", {"cpu.max": "200000 100000"}, 2), ("0::/\n", {"cpu.max": "max 100000"}, 64),
    ("0::/a/b\n", {"a/cpu.max": "150000 100000", "a/b/cpu.max": "300000 100000"}, 1),
    ("3:cpu,cpuacct:/docker/x\n1:cpuset:/\n0::/\n",
     {"cpu/cpu.cfs_quota_us": "50000", "cpu/cpu.cfs_period_us": "100000"}, 1),
    ("3:cpu:/x\n", {"cpu/x/cpu.cfs_quota_us": "300000", "cpu/x/cpu.cfs_period_us": "100000"}, 3),
    ("3:cpu:/x\n", {"cpu/x/cpu.cfs_quota_us": "-1", "cpu/x/cpu.cfs_period_us": "100000"}, 64), ("", {}, 64)])
def test_a_cpu_quota_counts_as_cores(tmp_path, monkeypatch, own, files, cores):
    """As docker --cpus and limits.cpu of Kubernetes set it; an outer group bounds an inner one."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(64))
    (tmp_path / "own").write_text(own)
    for name, text in files.items():
        path = tmp_path / "groups" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")
    assert hardware.cores(str(tmp_path / "groups"), tmp_path / "own") == cores


# --- the command line -------------------------------------------------------------------------------------------------

WRONG = """
| COMMAND | --help
tran | invalid choice: 'tran' (choose from 'train', 'coordinator',  | ; did you mean train? | egg.py --help
plot -D N_LAYERS=2 | unrecognized arguments: -D
train --minuts 3 | unrecognized arguments: --minuts 3; did you mean --minutes? (see python egg.py train --help)
coordinator --host 0.0.0.0 | --host 0.0.0.0 without a secret
coordinator --tls-cert cert | needs both --tls-cert and --tls-key
coordinator --island a | an island needs --save-dir
coordinator --port 0 --preset laptop-bytes --peer 127.0.0.1:1 | give --island NAME
coordinator --port 0 --preset laptop-bytes --island 'a b' | is not a name
coordinator --port 0 --preset laptop-bytes --island a --peer host:0 | is not HOST:PORT
coordinator --port 0 --island a --save-dir here -D SNAPSHOT_EVERY=0 | SNAPSHOT_EVERY and VALIDATE_EVERY above 0
worker localhost --tls-cert cert | needs --tls-ca
worker localhost --secret-file none | --secret-file none: No such file
worker localhost --tls-ca '' | --tls-ca: '' is not the name of a file
generate --load-dir '' | --load-dir: '' is not the name of a file or directory
worker localhost --tls-ca none | egg: none: No such file or directory: give --tls-ca a certificate, PEM
coordinator --tls-cert none --tls-key key | none, key: No such file | --tls-key the key of --tls-cert
train --save-dir | --save-dir: expected one argument (see
train --threads 0 | --threads | 1 to
train --threads many | --threads | 'many'
train --minutes nan | --minutes
train --steps -3 | --steps | 1 or more
coordinator --port 65536 | --port | 0 to 65535
coordinator --port 0 --http 0.0.0.0:0 | egg: --http 0.0.0.0:0 would show the run
coordinator --http what | --http
train -D MODEL=transformer | no meaning with MODEL = transformer | (with the preset laptop, | --preset deggs egg_config
worker | HOST
worker here --gpu -1 | --gpu
arch --preset desktop | --preset | laptop
arch --preset lptop | ; did you mean laptop?
arch -D HIDDEN_DIM=65 | HIDDEN_DIM = 65 | multiple
generate --tokens 0 | '0' is not a whole number, 1 or more
generate --temp -1 | argument --temp: '-1' is not a number from 0.0 to 100.0
import short.txt | --save-dir
prepare x --vocab-size 255 | --vocab-size | 256 to 262144
"""                      # what is typed | what is said | ...


@mark.parametrize("line", WRONG.strip().split("\n"))
def test_wrong_use_is_one_line_and_status_2(here, line):
    args, *words = map(str.strip, line.split("|"))
    result = run(args, preset="")
    fails(result, 2, *words)
    assert result.stdout == ""


@mark.parametrize("command", "coordinator worker train arch prepare bench plot runs key".split())
def test_help_offers_constants_where_they_matter(command):
    said = succeeds(run(command, "--help"))
    assert f"egg.py {command}" in said and ("-D NAME=VALUE" in said) == (command not in ("plot", "runs", "key"))
    assert "--preset" in said or "-D NAME=VALUE" not in said


@mark.parametrize("arguments, limit, says", [
    ("", "--minutes 1", "for a minute"), ("--minutes 10 -D N_LAYERS=2", "--minutes 10", "with --minutes 10 "),
    ("--steps=9", "--steps=9", "with --steps=9"), ("-D N_LAYERS=2", "--minutes 1", "for a minute")])
def test_make_run_takes_a_limit_once_and_says_it(arguments, limit, says):
    make = ["make", "-n", "run", f"ARGS={arguments}"]
    told = succeeds(subprocess.run(make, cwd=HERE, capture_output=True, text=True))
    line = told.partition(" egg.py train ")[2]
    assert limit in line and line.count("--minutes") + line.count("--steps") == 1 and f"trains {says}" in told


def test_workers_of_one_host_have_different_names(monkeypatch):
    """Also two on its CPU: a ban hits one. An address of version 6 may stand in brackets."""
    names = []
    monkeypatch.setattr("egg_net.run_worker", lambda *_, name, **__: names.append(name))
    for device, pid in ("cuda:0", 1), ("cuda:1", 1), ("cpu", 1), ("cpu", 2):
        monkeypatch.setattr(os, "getpid", lambda: pid)
        rest = dict.fromkeys(("open_data", "print_references", "start_engine"), mock.DEFAULT)
        with mock.patch.multiple(train, **rest):
            train.work(CFG, "::1", 1, device)
    assert len({*names}) == 4 and names[0].endswith("/cuda:0")
    for command in "worker", "status":
        assert egg.parsed([command, "[::1]"]).host == "::1"


def test_arch_adds_up():
    out = run("arch -D N_LAYERS=2 -D HIDDEN_DIM=128 -D VOCAB_SIZE=1000 -D NTT_MODE=3").stdout
    cfg = make(N_LAYERS=2, HIDDEN_DIM=128, VOCAB_SIZE=1000, NTT_MODE=3)
    lines, names = [line.split() for line in out.splitlines()], [p.name for p in parameters.TABLE]
    totals = {line[0]: int(line[-1].replace(",", "")) for line in lines if line and line[0] in names}
    assert list(totals) == names and sum(totals.values()) == parameters.n_weights(cfg)
    assert f"{parameters.n_weights(cfg):,}" in out and f"{parameters.products_per_token(cfg):,} multiply-adds" in out


def test_what_cannot_begin_is_one_line(here):
    fails(process("hatch", cwd=here), 2, "hatch")
    fails(run("arch", EGG_HEAD_DIM="48"), 2, "HEAD_DIM = 48")
    fails(run("prepare 'no such text'"), 1, "no such text: No such file")
    fails(run("worker localhost -D DEVICE=cuda --gpu 999"), 2)
    fails(run("train --preset=deggs -DVOCAB_SIZE=256"), 2, "input.bin is missing", "prepare TEXT")
    (here / "input.bin").write_bytes(bytes(64))
    fails(run("worker localhost -DVOCAB_SIZE=256"), 2, "input.bin holds 64 tokens, too few", "66 are needed")
    assert succeeds(run("worker localhost --list-devices -D DEVICE=cpu")) == "cpu\n"


@mark.parametrize("words, status", [(["egg.py", "arch"], 1), (["egg_config.py"], -signal.SIGPIPE)])
def test_a_reader_that_goes_away(words, status):
    """`egg.py arch | head -0` must not end in a traceback."""
    read, write = os.pipe()
    os.close(read)
    result = subprocess.run([sys.executable, *words], cwd=HERE, stdout=write, stderr=subprocess.PIPE, text=True)
    os.close(write)
    assert result.stderr == "" and result.returncode == status


@fixture
def run_workers(tmp_path):
    """A run-workers.sh that starts the egg.py of the test's directory."""
    return shutil.copy(HERE / "run-workers.sh", tmp_path)


FAKE_WORKER = """
import os, sys, time
if "--list-devices" in sys.argv:
    sys.exit(print("cuda:0\\ncuda:2"))
with open("log", "a") as log:
    log.write(f"{os.getpid()} {' '.join(sys.argv[1:])}\\n")
if sys.argv[-1] == "0" and open("log").read().count("--gpu 0") == 1:
    os.kill(os.getpid(), 9)
time.sleep(60)
"""


@fixture
def cluster_of_two(tmp_path, run_workers):
    """run-workers.sh on a terminal, in a process group of its own, with two GPUs, once the worker on the first has died
    and was started again: (process, log of the workers that were started, what the terminal gets). In the end none of
    these workers is left."""
    (tmp_path / "egg.py").write_text(FAKE_WORKER)
    terminal, inside = os.openpty()
    process = subprocess.Popen([run_workers, "far", "--port", "7"], cwd="/", stdout=inside, stderr=subprocess.PIPE,
                               text=True, start_new_session=True, env={**os.environ, "TERM": "xterm"})
    log = tmp_path / "log"
    until(lambda: log.exists() and len(log.read_text().splitlines()) == 3)
    yield process, log, terminal
    assert not [line for line in log.read_text().splitlines() if os.path.exists(f"/proc/{line.split()[0]}")]
    process.stderr.close()
    os.close(terminal)
    os.close(inside)


def test_run_workers_keeps_one_on_every_gpu_and_stops_all(cluster_of_two):
    """A killed worker leaves no status line."""
    process, log, terminal = cluster_of_two
    process.terminate()
    assert process.wait(60) == 143
    said = "run-workers: worker on GPU 0 ended with status 137, starting it again in 1 s\n"
    cleared = b""
    while len(cleared) < 8 and select.select([terminal], [], [], 10)[0]:         # a read may return the first alone
        cleared += os.read(terminal, 99)
    assert process.stderr.read() == said and cleared == 2 * b"\r\x1b[K"
    started = [line.partition(" ")[2] for line in log.read_text().splitlines()]
    assert sorted(started) == 2 * ["worker far --port 7 --gpu 0"] + ["worker far --port 7 --gpu 2"]


def test_ctrl_c_on_run_workers_leaves_no_worker(cluster_of_two):
    """A terminal sends SIGINT to the whole process group."""
    process, *_ = cluster_of_two
    os.killpg(process.pid, signal.SIGINT)
    assert process.wait(60) == 130


def test_run_workers_gives_up_on_a_worker_that_is_refused(tmp_path, run_workers):
    """For another configuration; a real worker and coordinator."""
    (tmp_path / "egg.py").write_text(f"import runpy, sys; sys.path.insert(0, {str(HERE)!r})\n"
                                     f"runpy.run_path({os.path.join(HERE, 'egg.py')!r}, run_name='__main__')\n")
    python = tmp_path / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    (tmp_path / "input.bin").write_bytes(bytes(range(256)) * 9)
    with Server(tmp_path, CFG) as server:
        done = process(f"127.0.0.1 --port {server.port} -D VOCAB_SIZE=256 -D DEVICE=cpu", python=(),
                       program=run_workers, cwd=tmp_path)
    assert done.returncode == 2 and "refuses this worker: " in done.stderr and "again" not in done.stderr


SLURM_WORKER = """
import sys
if "--list-devices" in sys.argv:
    sys.exit(print("\\n".join(f"cuda:{i}" for i in range(5))))
with open("log", "a") as log:
    log.write(" ".join(sys.argv[1:]) + "\\n")
"""


@mark.parametrize("tasks, task, gpus", [("1(x4)", 0, [0, 1, 2, 3, 4]), ("2,1(x3)", 1, [1, 3]), ("8", 6, [])])
def test_tasks_of_a_slurm_step_share_the_gpus_of_a_node(tmp_path, run_workers, tasks, task, gpus):
    (tmp_path / "egg.py").write_text(SLURM_WORKER)
    environ = {"SLURM_STEP_TASKS_PER_NODE": tasks, "SLURM_LOCALID": str(task), "SLURM_LAUNCH_NODE_IPADDR": "10.1.2.3"}
    succeeds(process("--port 7", python=(), program=run_workers, cwd="/", env=environ))
    log = tmp_path / "log"
    log.touch()
    assert sorted(log.read_text().splitlines()) == [f"worker 10.1.2.3 --port 7 --gpu {i}" for i in gpus]
