"""`egg.py ray` and examples/sweep.py on a real Ray cluster of three nodes on this machine: `pytest -m ray`."""

import argparse
import contextlib
import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import tempfile
import time

from pytest import fixture, mark, MonkeyPatch, raises

import egg_config
from cluster import history
from egg_config import EggError, UsageError
from tools import train
from commands import defines
from fakes import changed, differing
from recordings import HERE
from run_logs import of_kind

pytestmark = mark.ray

CFG = changed(DEVICE="cpu", VALIDATE_TOKENS=64, VALIDATE_EVERY=10, SAMPLE_EVERY=0, POPULATION_SIZE=320)
STEPS = 120
DEFINES = defines(CFG, DEVICE="cpu")


@fixture(scope="module")
def place(tmp_path_factory):
    """A directory with data and a plain training run `plain`."""
    at = tmp_path_factory.mktemp("ray")
    text = b"the quick brown fox jumps over the lazy dog. " * 200
    (at / "input.bin").write_bytes(text)
    (at / "val.bin").write_bytes(text[:500])
    done = egg(at, "train", "--save-dir", "plain", "--steps", STEPS, "--preset", "deggs", *DEFINES).communicate()
    assert (at / "plain" / "history.egg").exists(), done
    return at


@fixture(scope="module")
def three_nodes():
    """A head node without CPUs and two nodes with a CPU each."""
    from ray import cluster_utils
    from ray._private import utils

    class Cluster(cluster_utils.Cluster):
        def add_node(self, **arguments):
            """Nodes of one machine would share a directory, where each replaces the code that another is importing."""
            return super().add_node(temp_dir=tempfile.mkdtemp(dir=root), **arguments)

    # where a cluster leaves its address; it does not exist where Ray has never run
    os.makedirs(os.path.dirname(utils.get_ray_address_file(None)), exist_ok=True)
    with MonkeyPatch.context() as patch, tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True) as root:
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
        try:
            for _ in range(2):
                cluster.add_node(num_cpus=1)
            yield cluster
        finally:
            cluster.shutdown()


def egg(at, *arguments, program=HERE / "egg.py", **environ):
    return subprocess.Popen([sys.executable, program, *map(str, arguments)], cwd=at, text=True,
                            env={**os.environ, **environ}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                            pipesize=1 << 20)    # read at its end


def printed(process):
    """All that a process prints until it ends."""
    return process.communicate(timeout=300)[0]


def drive(at, cluster, directory, *options):
    return egg(at, "ray", "--address", cluster.address, "--save-dir", directory, "--cpus", 1, "--port", 0, *options)


def events(directory):
    with contextlib.suppress(FileNotFoundError), open(directory / history.EVENTS) as file:
        return [json.loads(line) for line in file if line.endswith("\n")]
    return []


def wait_for(process, condition, seconds=120):
    until = time.monotonic() + seconds
    while not condition():
        assert process.poll() is None, printed(process)
        assert time.monotonic() < until, "waited in vain"
        time.sleep(0.1)


def interrupted(driver):
    """What a driver has printed that ends well after Ctrl-C."""
    driver.send_signal(signal.SIGINT)
    text = printed(driver)
    assert driver.returncode == 0 and "Traceback" not in text, text
    return text


def step_of(directory):
    return max((event["step"] for event in of_kind("step", events(directory))), default=0)


def joined(directory):
    return len(of_kind("joined", events(directory)))


def digests(*directories):
    """(step, digest of the state) of saved runs, after the steps that all of them have."""
    runs = [history.read_run(CFG, directory) for directory in directories]
    steps, states = min(run.step for run in runs), []
    for run in runs:
        engine = train.make_engine(CFG, None, "cpu")
        history.replay(run, engine, steps)
        states.append((engine.step, engine.digest()))
    return states


def test_deaths_and_arrivals_of_nodes_change_nothing_but_time(place, three_nodes):
    run = place / "nodes"
    driver = drive(place, three_nodes, run, *DEFINES)
    wait_for(driver, lambda: joined(run) >= 2 and step_of(run) >= 10)
    three_nodes.remove_node(three_nodes.worker_nodes.copy().pop(), allow_graceful=False)
    step, count = step_of(run), joined(run)
    wait_for(driver, lambda: step_of(run) >= step + 5)
    three_nodes.add_node(num_cpus=1)
    wait_for(driver, lambda: joined(run) > count and step_of(run) >= STEPS)
    assert "continue it: " in interrupted(driver)
    (step, state), plain = digests(run, place / "plain")
    assert step == STEPS and (step, state) == plain


def test_a_killed_driver_and_an_interrupted_one_go_on(place, three_nodes):
    run = place / "driver"
    driver = drive(place, three_nodes, run, *DEFINES)
    wait_for(driver, lambda: step_of(run) >= 10)
    driver.kill()
    driver.communicate()
    step = step_of(run)
    driver = drive(place, three_nodes, run)                  # the run keeps its constants
    wait_for(driver, lambda: step_of(run) >= step + 10)
    assert "continue it: " in interrupted(driver)
    (step, state), plain = digests(run, place / "plain")
    assert step >= 20 and (step, state) == plain


def test_nobody_else_reaches_the_files_of_a_local_cluster(place):
    def directories():
        return {*pathlib.Path("/tmp").glob("tmp*/ray")}

    before, run = directories(), place / "local"
    driver = egg(place, "ray", "--address", "local", "--save-dir", run, "--cpus", 1, "--port", 0, *DEFINES)
    wait_for(driver, lambda: step_of(run) >= 10)
    [directory] = directories() - before
    assert directory.parent.stat().st_mode & 0o777 == 0o700 and [*directory.glob("session_*/runtime_resources")]
    text = interrupted(driver)
    assert not directory.parent.exists(), text


def test_members_are_judged_by_the_file_on_the_node(place, three_nodes):
    (place / "own.py").write_text("TOKENS = 3\ndef reward(completions):\n    return [len(t) for t in completions]\n")
    driver = drive(place, three_nodes, "judged", "--objective", "own.py", "--steps", 3, "--workers", 1, *DEFINES)
    text = printed(driver)
    assert driver.returncode == 0 and "reward at step 0: " in text and "continue it: " in text, text
    driver = drive(place, three_nodes, "judged", "--steps", 4)
    assert "continue it with --objective FILE" in printed(driver) and driver.returncode == 2


@mark.parametrize("arguments, status, words", [
    (["--save-dir", "x", "-D", "HIDDEN_DIM=65"], 2, "HIDDEN_DIM"), ([], 2, "--save-dir"),
    (["--save-dir", "x", "-D", "INPUT_FILE=none.bin"], 1, "none.bin is missing"),
    (["--save-dir", "/proc/none", *DEFINES], 1, "/proc/none"),
    (["--save-dir", "x", "--cpus", 64, "--wait", 0.1, *DEFINES], 1, "no worker yet: a worker needs"),
    (["--save-dir", "x", "--address", "ray://127.0.0.1:1", *DEFINES], 1, "ray job submit"),
    (["--save-dir", "x", "--address", "127.0.0.1:1", *DEFINES], 1, "no Ray cluster")])
def test_what_cannot_work_ends_with_a_line(place, three_nodes, arguments, status, words):
    address = [] if "--address" in arguments else ["--address", three_nodes.address]
    process = egg(place, "ray", "--port", 0, *address, *arguments)
    text = printed(process)
    assert process.returncode == status and words in text and "Traceback" not in text, text
    assert [line for line in text.split("\n") if line.startswith("egg: ")] == text.strip().split("\n")[-1:]


@mark.parametrize("device, workers, cpus, expected", [
    ("auto", 0, 8, {(1, 1): 4, (0, 8): 5}), ("cuda", 3, None, {(1, 1): 3}), ("cpu", 9, 2, {(0, 2): 9})])
def test_workers_follow_the_nodes(monkeypatch, device, workers, cpus, expected):
    from deploy import ray
    monkeypatch.setattr(ray, "nodes", lambda: [(0, 0), (4, 8), (0, 16), (0, 24)])
    assert ray.wanted(device, argparse.Namespace(workers=workers, cpus=cpus), cpus or 8) == expected


def test_a_job_does_not_save_where_ray_removes_it(tmp_path, monkeypatch):
    from deploy import ray
    (tmp_path / "_ray_pkg_1").mkdir()
    monkeypatch.chdir(tmp_path / "_ray_pkg_1")
    assert ray.lasting("/data/ckpt") == "/data/ckpt"
    with raises(UsageError, match="give an absolute path"):
        ray.lasting("ckpt")


@mark.parametrize("error, line", [
    (ModuleNotFoundError("No module named 'numba.cuda'", name="numba.cuda"), "a node has no numba.cuda: install "
     "requirements/core.txt there, on GPU nodes cuda12.txt or cuda13.txt"),
    (EggError("what is wrong: what to do"), "what is wrong: what to do"),
    (OSError("disk\nfull"), "OSError: disk full")])
def test_errors_of_actors_are_a_line(error, line):
    from deploy import ray
    wrapped = RuntimeError("first\n  File x\nlast")
    wrapped.cause = error
    assert ray.problem(wrapped) == ray.problem(error) == line


def sweep(place, address, **more):
    """The started examples/sweep.py with other settings, as a user edits it. more: {name: Python}."""
    source = (HERE / "examples" / "sweep.py").read_text()
    first, last = source.index("PRESET = "), source.index("HERE = ")
    constants = {name: repr(egg_config.text(value)) for name, value in {**differing(CFG), "DEVICE": "cpu"}.items()}
    rows = ", ".join(f'"{name}": {value}' for name, value in {**constants, "VALIDATE_EVERY": "5", **more}.items())
    (place / "sweep.py").write_text(f"""{source[:first]}PRESET, STEPS, GRACE, SAMPLES = "deggs", 30, 4, 1
CPUS, GPUS, SETTINGS = 1, 0, {{{rows}}}
{source[last:]}""")
    return egg(place, "sweep", program="sweep.py", RAY_ADDRESS=address, PYTHONPATH=str(HERE))


def test_a_sweep_survives_an_interruption_and_ranks(place, three_nodes):
    settings = {"SIGMA_SHIFT": "tune.grid_search([1, 3])", "ADAM_WEIGHT_DECAY": "tune.loguniform(1e-4, 0.1)",
                "ISLAND_SEED": "tune.grid_search([1, 2])"}
    runs = place / "sweep"
    process = sweep(place, three_nodes.address, **settings)
    wait_for(process, lambda: any(step_of(run) >= 10 for run in runs.glob("trial_*")))
    assert "the same command continues" in interrupted(process)
    process = sweep(place, three_nodes.address, **settings)
    said = printed(process)
    assert process.returncode == 0 and "Traceback" not in said, said
    ranked = re.findall(r"^\S*/(trial_\w+) +(\d+) +([\d.]+) bits/byte(.*)$", said, re.M)
    figures = [float(row[2]) for row in ranked]
    assert len(ranked) == 4 and figures == sorted(figures), said
    assert max(step_of(run) for run in runs.glob("trial_*")) == 29           # of 30
    assert len({re.search(r"ADAM_WEIGHT_DECAY=\S+", row[3])[0] for row in ranked}) > 1
