"""Fixtures that several test files use."""

import concurrent.futures
import contextlib
import fcntl
import functools
import gc
import multiprocessing
import os
import signal
import threading
from unittest import mock

import pytest

import egg_config
import egg_net
from engine import hardware
from islands import gossip
from model import parameters, steps
from tools import train
from compiling import compile_cpu_engine
from coordinators import Server
from engines_compared import compare
from fakes import CFG, Dice, UNITS
from commands import certificate

with contextlib.suppress(ImportError):           # a machine that runs `-m gpu` need not have hypothesis
    import fuzzing                               # noqa: F401

XDIST = "PYTEST_XDIST_WORKER" in os.environ
# A shell starts what it puts in the background with SIGINT ignored, and a process hands that on to those it starts.
signal.signal(signal.SIGINT, signal.default_int_handler)
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)          # else each of many processes compiles all modules it imports
egg_net.random = gossip.random = Dice()
parameters._xorshift = functools.lru_cache(9)(parameters._xorshift)         # most engines begin with the same numbers

FORKS, spawned = multiprocessing.get_context("forkserver"), hardware.start_process
FORKS.set_forkserver_preload(["engine.cpu_engine"])


def forked(main, *arguments):
    """hardware.start_process, for the workers of a training: as forks of a process that has imported the engine, which
    takes most of a short run. Commands in processes of their own begin them as users do."""
    if main is not train._worker_process:
        return spawned(main, *arguments)
    with (mock.patch.object(multiprocessing, "get_context", lambda _: FORKS),
          mock.patch.dict(os.environ, PYTHONPATH=egg_config.ROOT)):
        return spawned(main, *arguments)


hardware.start_process = forked


def compiled_once_for(cfg):
    """A fixture: the CPU engine's kernels for cfg are in the cache, so that worker processes need not all compile
    them."""
    @pytest.fixture(scope="session")
    def compiled(tmp_path_factory):
        from engine import cpu_engine
        with one_at_a_time(tmp_path_factory, cfg.PERTURB + cfg.MODEL):
            cpu_engine.warm_up(cfg, lambda line: None, cpu_engine.VERBS)
    return compiled


compiled, compiled_gru = compiled_once_for(CFG), compiled_once_for(egg_config.make(MODEL="gru"))
compiled_units = compiled_once_for(UNITS)


def shared(tmp_path_factory):
    """The temporary directory of a test run, of all processes of pytest-xdist."""
    directory = tmp_path_factory.getbasetemp()
    return directory.parent if XDIST else directory


@contextlib.contextmanager
def one_at_a_time(tmp_path_factory, name):
    """A block that the processes of pytest-xdist enter one after the other: the first compiles, the others find it."""
    with open(shared(tmp_path_factory) / f"{name}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@pytest.fixture(autouse=True, scope="module")
def compiled_once(request):
    """Under pytest-xdist a file that uses the CPU engine waits until it is compiled, instead of compiling it too.
    COMPILED, of a file: the fixtures to wait for, where they are not `compiled`."""
    used = ["compiled"] if hasattr(request.module, "cpu_engine") else []
    for fixture in getattr(request.module, "COMPILED", used) if XDIST else ():
        request.getfixturevalue(fixture)


@pytest.fixture(autouse=True)
def no_step_is_cooled(monkeypatch):
    """So that a run does not depend on when it ends; its processes do not know of this."""
    monkeypatch.setattr(steps, "cooling_at", lambda done: 0)


@pytest.fixture(autouse=True)
def workers_end_with_their_test():
    before = set(threading.enumerate())
    yield
    for thread in set(threading.enumerate()) - before:
        thread.over = True


@pytest.fixture
def here(tmp_path, monkeypatch):
    """The temporary directory of a test, as the current one."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def small(here):
    """A configuration that trains in a moment, in a directory with its data."""
    text = (b"the quick brown fox jumps over the lazy dog. " * 200)
    (here / "input.bin").write_bytes(text)
    (here / "val.bin").write_bytes(text[:500])
    return CFG.changed(DEVICE="cpu", VALIDATE_TOKENS=64)


@pytest.fixture
def server(tmp_path):
    """A coordinator on its own, in a thread."""
    with Server(tmp_path) as server:
        yield server


@pytest.fixture(scope="module")
def certificates(tmp_path_factory):
    """(certificate, key) files of localhost, signed by itself."""
    return certificate(tmp_path_factory.mktemp("tls"), "cert", "-subj", "/CN=localhost", "-addext",
                       "subjectAltName=DNS:localhost,IP:127.0.0.1", "-addext", "basicConstraints=critical,CA:FALSE")


# --- on a GPU --------------------------------------------------------------------------------------------------------

LONG = ("test_kernels_compile", "test_recorded_default_configuration", "test_chaos_changes_no_bit",
        "test_every_kind_gives_the_same_bits", "test_nothing_is_compiled_once_the_clock_runs",
        "test_ctrl_c_early_leaves_no_traceback")


def pytest_configure(config):
    if config.option.markexpr == "gpu" and config.getoption("numprocesses", None):
        raise pytest.UsageError("`-m gpu` starts a process per core itself, and one GPU serves them all: leave out -n")


def pytest_ignore_collect(collection_path, config):
    """With `-m gpu` and its like, files without such a test are not imported: this machine may lack what they need."""
    mark = config.option.markexpr
    if mark in ("gpu", "ray", "track", "deep") and collection_path.suffix == ".py":
        return f"mark.{mark}" not in collection_path.read_text() or None
    return None


def pytest_collection_finish():
    """Python searches for garbage less often, and not in what is imported: that took a twentieth of the test run."""
    gc.freeze()
    gc.set_threshold(100_000, 20)


def pytest_collection_modifyitems(items):
    """What compiles the CPU engine for all begins first, then the longest tests. Those whose work other processes
    prepare come last: comparisons of both engines. pytest-xdist gives each of its processes a
    share in this order, so each share begins with some of the long ones."""
    long = [item for name in LONG for item in items if item.name.partition("[")[0] == name]
    rest = sorted((item for item in items if item not in long), key=lambda item: "compared" in item.fixturenames)
    count = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", 1))
    shares = [len(rest) * i // count for i in range(count + 1)]
    items[:] = [item for i in range(count) for item in long[i::count] + rest[shares[i]:shares[i + 1]]]


@pytest.fixture(autouse=True)
def comparisons_begin_first(request):
    if request.node.get_closest_marker("gpu"):
        request.getfixturevalue("comparisons")


@pytest.fixture(scope="session")
def comparisons(request, tmp_path_factory):
    """({model: future of its CPU engine's compilation}, {node id: future of compare}), of every test that asks for
    `compared`. Compiling takes most of the time: every core takes part."""
    ready = tmp_path_factory.mktemp("compiled")
    drawn = {item.nodeid: item.callspec.params for item in request.session.items if "compared" in item.fixturenames}
    count, spawn = max(2, min(16, hardware.cores())), multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(count, spawn) as pool:
        models = {model: pool.submit(compile_cpu_engine, model, ready) for model in ("transformer", "gru")}
        yield models, {name: pool.submit(compare, **values, ready=ready) for name, values in drawn.items()}
        pool.shutdown(cancel_futures=True)


@pytest.fixture
def cpu_compiled(comparisons):
    """The CPU engine is compiled, by one process for all."""
    [future.result() for future in comparisons[0].values()]


@pytest.fixture
def compared(request, constants, seed, comparisons):
    """What differs between the engines on a configuration: text, empty where nothing does."""
    return comparisons[1][request.node.nodeid].result()
