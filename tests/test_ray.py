"""`egg.py ray` and `egg.py sweep` on a real Ray cluster of three nodes on this machine: `pytest -m ray`."""

import contextlib
import csv
import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import tempfile
import time

from pytest import fixture, mark, MonkeyPatch

from cluster import history
from engine import engines
from commands import defines
from fakes import changed
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


@contextlib.contextmanager
def ray_cluster():
    """A head node without CPUs and two nodes with a CPU each."""
    from ray import cluster_utils
    from ray._private import utils

    class Cluster(cluster_utils.Cluster):
        def add_node(self, **arguments):
            """Nodes of one machine would share a directory, where each replaces the code that another is importing."""
            return super().add_node(temp_dir=tempfile.mkdtemp(dir=root), **arguments)

    # where a cluster leaves its address; it does not exist where Ray has never run
    os.makedirs(os.path.dirname(utils.get_ray_address_file(None)), exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True) as root:
        cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
        try:
            for _ in range(2):
                cluster.add_node(num_cpus=1)
            cluster.root = root
            yield cluster
        finally:
            cluster.shutdown()


@fixture(scope="module")
def three_nodes(monkeypatch_module):
    with ray_cluster() as cluster:
        yield cluster


@fixture(scope="module")
def monkeypatch_module():
    with MonkeyPatch.context() as patch:
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        yield patch


def egg(at, *arguments):
    return subprocess.Popen([sys.executable, HERE / "egg.py", *map(str, arguments)], cwd=at, text=True,
                            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, pipesize=1 << 20)    # read at its end


def printed(process):
    """All that a process prints until it ends."""
    return process.communicate(timeout=300)[0]


def drive(at, cluster, directory, *more):
    return egg(at, "ray", "--address", cluster.address, "--save-dir", directory, "--cpus", 1, "--port", 0, *more)


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


def goes_on(driver, run, steps):
    """Waits until a run has so many more steps."""
    step = step_of(run)
    wait_for(driver, lambda: step_of(run) >= step + steps)


def interrupted(driver):
    """What a driver has printed that ends well after Ctrl-C."""
    driver.send_signal(signal.SIGINT)
    said = printed(driver)
    assert driver.returncode == 0, said
    return said


def step_of(directory):
    return max((event["step"] for event in of_kind("step", events(directory))), default=0)


def joined(directory):
    return len(of_kind("joined", events(directory)))


def digests(*directories):
    """(step, digest of the state) of saved runs, after the steps that all of them have."""
    runs = [history.read_run(CFG, directory) for directory in directories]
    steps, found = min(run.step for run in runs), []
    for run in runs:
        engine = engines.make(CFG, None, "cpu")
        history.replay(run, engine, steps)
        found.append((engine.step, engine.digest()))
    return found


def processes(title):
    """Ids of processes by the title that Ray gives them."""
    found = []
    for path in pathlib.Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            if path.read_bytes().startswith(title.encode()):
                found.append(int(path.parent.name))
    return found


def test_a_cluster_that_is_restarted_as_a_whole_goes_on_from_the_save_directory(place, monkeypatch_module):
    run, step = place / "restarted", 0
    for constants in (DEFINES, ()):                          # the run keeps its constants
        with ray_cluster() as cluster:
            driver = drive(place, cluster, run, *constants)
            wait_for(driver, lambda: step_of(run) >= step + 10)
            before, step = step, step_of(run)
        driver.kill()                                        # its node has gone too
        driver.communicate()
    (step, ours), plain = digests(run, place / "plain")
    assert step >= before + 10 >= 20 and (step, ours) == plain


def test_deaths_and_arrivals_of_nodes_change_nothing_but_time(place, three_nodes):
    run = place / "nodes"
    driver = drive(place, three_nodes, run, *DEFINES)
    wait_for(driver, lambda: joined(run) >= 2 and step_of(run) >= 10)
    three_nodes.remove_node(three_nodes.worker_nodes.copy().pop(), allow_graceful=False)
    goes_on(driver, run, 5)
    three_nodes.add_node(num_cpus=1)
    count = joined(run)
    wait_for(driver, lambda: joined(run) > count)
    [os.kill(process, signal.SIGKILL) for process in processes("ray::CoordinatorActor")]
    wait_for(driver, lambda: len(of_kind("start", events(run))) > 1)
    step = step_of(run)
    wait_for(driver, lambda: step_of(run) >= max(step + 5, STEPS))
    said = interrupted(driver)
    assert said.count("coordinator on") > 1 and "continue it: " in said, said
    assert "\nRay: (raylet) " in said and "[state-dump]" not in said and "\x1b" not in said, said
    (step, ours), plain = digests(run, place / "plain")
    assert step == STEPS and (step, ours) == plain


def test_a_killed_driver_and_an_interrupted_one_go_on(place, three_nodes):
    run = place / "driver"
    driver = drive(place, three_nodes, run, *DEFINES)
    wait_for(driver, lambda: step_of(run) >= 10)
    driver.kill()
    driver.communicate()
    driver = drive(place, three_nodes, run)                  # the run keeps its constants
    goes_on(driver, run, 10)
    said = interrupted(driver)
    assert "continue it: " in said and "Traceback" not in said, said
    (step, ours), plain = digests(run, place / "plain")
    assert step >= 20 and (step, ours) == plain


def test_nobody_else_can_replace_the_code_of_a_run(place, three_nodes, monkeypatch):
    os.chmod(three_nodes.root, 0o755)                        # below, Ray lets everybody write
    refused = drive(place, three_nodes, place / "open", *DEFINES)
    said = printed(refused)
    os.chmod(three_nodes.root, 0o700)
    assert refused.returncode == 1 and "other users may replace" in said and said.count("\n") == 1, said
    assert not (place / "open").exists()

    with tempfile.TemporaryDirectory(dir="/tmp") as root:
        os.chmod(root, 0o755)
        monkeypatch.setenv("TMPDIR", root)
        run = place / "local"
        driver = egg(place, "ray", "--address", "local", "--save-dir", run, "--cpus", 1, "--port", 0, *DEFINES)
        wait_for(driver, lambda: step_of(run) >= 10)
        [private] = pathlib.Path(root).glob("egg-*")
        assert private.stat().st_mode & 0o777 == 0o700 and [*private.glob("ray/session_*/runtime_resources")]
        said = interrupted(driver)
        assert not private.exists(), said


def test_members_are_judged_by_the_file_on_the_node(place, three_nodes):
    (place / "own.py").write_text("TOKENS = 3\ndef reward(completions):\n    return [len(t) for t in completions]\n")
    driver = drive(place, three_nodes, "judged", "--objective", "own.py", "--steps", 3, "--workers", 1, *DEFINES)
    said = printed(driver)
    assert driver.returncode == 0 and "reward at step 0: " in said and "--objective own.py" in said, said
    driver = drive(place, three_nodes, "judged", "--steps", 4)
    assert "continue it with --objective FILE" in printed(driver) and driver.returncode == 2


@mark.parametrize("arguments, status, words", [
    (["--save-dir", "x", "-D", "HIDDEN_DIM=65"], 2, "HIDDEN_DIM"), ([], 2, "--save-dir"),
    (["--save-dir", "x", "-D", "INPUT_FILE=none.bin"], 1, "none.bin is missing"),
    (["--save-dir", "/proc/none", *DEFINES], 1, "/proc/none"),
    (["--save-dir", "x", "--cpus", 64, "--wait", 0.1, *DEFINES], 1, "no free resources"),
    (["--save-dir", "x", "--address", "ray://127.0.0.1:1", *DEFINES], 2, "ray job submit"),
    (["--save-dir", "x", "--address", "127.0.0.1:1", *DEFINES], 1, "no Ray cluster")])
def test_what_cannot_work_ends_with_a_line(place, three_nodes, arguments, status, words):
    address = [] if "--address" in arguments else ["--address", three_nodes.address]
    process = egg(place, "ray", "--port", 0, *address, *arguments)
    said = printed(process)
    assert process.returncode == status and words in said and "Traceback" not in said, said
    assert [line for line in said.split("\n") if line.startswith("egg: ")] == said.strip().split("\n")[-1:]


@mark.parametrize("device, workers, cpus, gpu_workers, cpu_workers", [
    ("auto", 0, None, 4, 0), ("auto", 0, 8, 4, 5), ("cpu", 0, 8, 0, 6), ("cpu", 0, None, 0, 6), ("cuda", 3, None, 3, 0),
    ("auto", 3, 2, 3, 0), ("cpu", 9, 2, 0, 9)])
def test_workers_follow_the_nodes(monkeypatch, device, workers, cpus, gpu_workers, cpu_workers):
    from deploy import ray
    found = [{"CPU": 0, "GPU": 0}, {"CPU": 8, "GPU": 4}, {"CPU": 16, "GPU": 0}, {"CPU": 24, "GPU": 0}]
    monkeypatch.setattr(ray, "nodes", lambda: found)
    kinds = ray.Workers(changed(DEVICE=device), workers, cpus, None, None).wanted()
    counts = {"num_gpus" in resources: number for resources, number in kinds}
    assert (counts.get(True, 0), counts.get(False, 0)) == (gpu_workers, cpu_workers)


@mark.parametrize("error, words", [
    (RuntimeError("The function failed to import:\nTraceback\nModuleNotFoundError: No module named 'egg_config'"),
     "a node has lost egg_config, .* --temp-dir.*"),
    (ModuleNotFoundError("No module named 'numba.cuda'"), "a node has no numba: install requirements/core.txt .*"),
    (RuntimeError("first\n  File x\nfoo.BarError: what\n\nlogs: none"), "foo.BarError: what"),
    (OSError("disk\nfull"), "OSError: disk")])
def test_errors_of_actors_are_a_line(error, words):
    from deploy import ray
    assert re.fullmatch(words, ray.problem(error))


@mark.parametrize("text, words", {
    "x =": "not TOML", "stepz = 1": "stepz", "steps = 0": "steps = 0", "cpus = 1.5": "cpus = 1.5",
    "": "either steps or minutes", "steps = 3": "[constants]", "steps = 3\n[constants]\nN_LAYERS = []": "empty",
    "steps = 3\n[constants]\nN_LAYERS = {low = 3, high = 1}": "N_LAYERS",
    "steps = 3\n[constants]\nN_LAYERS = [1, 99]": "N_LAYERS = 99", "steps = 3\n[constants]\nLAYERS = 1": "LAYERS",
    "steps = 3\n[constants]\nVALIDATE_EVERY = [0, 5]": "VALIDATE_EVERY = 0"}.items())
def test_a_wrong_table_ends_with_a_line(place, monkeypatch, capsys, text, words):
    import egg as program
    monkeypatch.chdir(place)
    pathlib.Path("wrong.toml").write_text(text)
    assert program.main(["sweep", "wrong.toml", *DEFINES[:4]]) == 2
    said = capsys.readouterr().err
    assert said.startswith("egg: ") and said.count("\n") == 1 and words in said


def test_a_sweep_survives_an_interruption_and_ranks(place, three_nodes):
    (place / "table.toml").write_text("steps = 30\n[constants]\nVALIDATE_EVERY = 5\nSIGMA_SHIFT = [1, 3]\n"
                                      "ADAM_WEIGHT_DECAY = {low = 1e-4, high = 0.1, log = true}\n"
                                      "ISLAND_SEED = [1, 2]\n")
    command = "sweep", "table.toml", "--address", three_nodes.address, "--save-dir", "sweep", *DEFINES
    sweep = egg(place, *command)
    runs = place / "sweep"
    wait_for(sweep, lambda: any(step_of(run) >= 10 for run in runs.glob("00*")))
    sweep.send_signal(signal.SIGINT)
    said = printed(sweep)
    assert sweep.returncode == 0 and "interrupted" in said, said
    sweep = egg(place, *command)
    said = printed(sweep)
    assert sweep.returncode == 0 and "Traceback" not in said and "plot them: " in said, said
    with open(runs / "ranking.csv") as file:
        ranked = list(csv.DictReader(file))
    figures = [float(row["validation"]) for row in ranked]
    assert len(ranked) == 4 and figures == sorted(figures) and max(int(row["steps"]) for row in ranked) == 30
    assert len({row["ADAM_WEIGHT_DECAY"] for row in ranked}) > 1
    other = egg(place, *command, "-D", "SEQ_LEN=16")
    assert "holds a sweep of other settings" in printed(other) and other.returncode == 2
