"""`egg.py ray`: a training run on a Ray cluster.

The coordinator is an actor on the node that holds the save directory. Workers are actors, one on every GPU or with some
CPUs each. Ray places them, restarts those that die, and carries code, configuration, data and secret. All actors belong
to this process, the driver: they end with it, and the same command continues from the save directory.
"""

import collections
import contextlib
import io
import json
import logging
import os
import re
import socket
import tempfile
import time
import traceback
import types

import numpy as np

import egg_config
import egg_net
from cluster import auth, history
from cluster.console import one_line, stop_signals
from egg_config import ROOT, EggError, UsageError
from model import data_files

try:
    import ray
    from ray.util import metrics
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
except ModuleNotFoundError as missing:
    raise EggError(f"{missing.name} is missing: pip install -r requirements/ray.txt") from None

NOT_CARRIED = [".git", ".venv", "/tests", "/docs", "*.bin", "/ckpt*"]       # data travels as objects
CONNECT_SECONDS = 10.0
MOST_PATH = 26             # bytes of a directory in which the paths of Ray's sockets are not too long (107)
POLL_SECONDS = 0.25        # between two requests for news of the coordinator
NODES_SECONDS = 2.0        # between two searches for new nodes
WAIT_MINUTES = 5.0         # limit for resources of the first worker
LOCK_SECONDS = 30.0        # limit for the coordinator of a killed driver to end
STOP_SECONDS = 30.0        # limit for the coordinator to stop
SILENT_SECONDS = 5.0       # without an answer of the coordinator, until a line says so
FOR_EVER = {"max_restarts": -1, "max_task_retries": -1}
GAUGES = {"step": "the last step", "loss": "mean loss of the population", "tokens_per_second": "speed of the last step",
          "value": "validation: cross-entropy of held-out text"}


class RayError(EggError):
    """About the Ray cluster, or an actor on it."""


@contextlib.contextmanager
def connected(address):
    """A block in which this process is connected to a cluster. address: "auto" or None (RAY_ADDRESS, or a cluster on
    this machine), "local" (a new one, which ends with the block) or HOST:PORT. Raises RayError, also for a node where
    another user could replace the code that Ray unpacks."""
    address = address or "auto"
    if address.startswith("ray://"):
        raise UsageError(f"--address {address}: the driver must run inside the cluster: run the command on a node, or "
                         "give it to `ray job submit`")
    host, colon, port = address.rpartition(":")
    job = json.loads(os.environ.get("RAY_JOB_CONFIG_JSON_ENV_VAR") or "{}").get("runtime_env", {})
    environment = None if "working_dir" in job else {"working_dir": ROOT, "excludes": NOT_CARRIED}
    options = dict(log_to_driver=False, logging_level=logging.ERROR)
    os.environ["RAY_COLOR_PREFIX"] = "0"
    with contextlib.ExitStack() as stack:
        try:
            if address == "local":
                options |= dict(_temp_dir=private_directory(stack), include_dashboard=False)
            stack.callback(disconnect)
            if address == "local":
                os.environ.setdefault("RAY_AUTH_TOKEN", os.urandom(32).hex())    # or every local user may give it jobs
            else:
                if colon:            # Ray itself would try for minutes
                    socket.create_connection((host, int(port)), timeout=CONNECT_SECONDS).close()
                ray.init(address, **options)         # without our code
                check_nodes()
                ray.shutdown()
            ray.init(address, runtime_env=environment, **options)
        except (OSError, RuntimeError, ValueError, ray.exceptions.RayError) as error:
            raise RayError(f"no Ray cluster to use at --address {address} ({one_line(str(error), 200)}): start one "
                           "with `ray start --head`, or give --address local for one on this machine") from None
        yield


def disconnect():
    rest = io.StringIO()                                     # Ray repeats reports here whose first lines were shown
    with contextlib.redirect_stdout(rest), contextlib.redirect_stderr(rest):
        ray.shutdown()


def private_directory(stack):
    """A path for Ray's files that no other user reaches, until `stack` closes. Ray lets everybody write into its
    directories, so they lie in one of mode 0700. Raises RayError."""
    place = tempfile.gettempdir()
    private = stack.enter_context(tempfile.TemporaryDirectory(
        prefix="egg-", dir=place if len(place) <= MOST_PATH else "/tmp", ignore_cleanup_errors=True))
    refuse_replaceable("this machine", os.getuid(), auth.way(private))
    return os.path.join(private, "ray")


def on_every_node(function, *arguments):
    """[(address, reference)]: calls the function on every live node."""
    remote = ray.remote(function)
    return [(node["NodeManagerAddress"], remote.options(num_cpus=0, scheduling_strategy=NodeAffinitySchedulingStrategy(
        node["NodeID"], soft=False)).remote(*arguments)) for node in live_nodes()]


def check_nodes():
    """Raises RayError where another user of a node could replace what Ray unpacks there."""
    way = auth.way

    def look():
        from ray._private import worker
        return os.getuid(), way(worker._global_node.get_runtime_env_dir_path())

    ray.cloudpickle.register_pickle_by_value(auth)           # the nodes do not have our modules yet
    asked = on_every_node(look)
    ray.cloudpickle.unregister_pickle_by_value(auth)
    for address, reference in asked:
        with contextlib.suppress(ray.exceptions.TaskUnschedulableError, ray.exceptions.NodeDiedError):    # it is gone
            refuse_replaceable(f"Ray node {address}", *ray.get(reference))


def refuse_replaceable(where, user, way):
    if found := auth.replaceable(user, way):
        raise RayError(f"on {where} other users may replace the code of a run, which Ray unpacks in {way[-1][0]} (see "
                       f"{found}): `mkdir -m 700 ~/ray` there, and start Ray with --temp-dir ~/ray/tmp")


def absolute(directory):
    """The path of a directory. Raises UsageError for one that would be lost with the files of a job."""
    if not os.path.isabs(directory) and "_ray_pkg_" in os.getcwd():
        raise UsageError(f"--save-dir {directory}: a job runs in a copy of its working directory, which Ray removes "
                         "afterwards: give an absolute path")
    return os.path.abspath(directory)


def live_nodes():
    return [node for node in ray.nodes() if node["Alive"]]


def nodes():
    """[{"CPU": number, "GPU": number}] of the live nodes."""
    return [{kind: int(node["Resources"].get(kind, 0)) for kind in ("CPU", "GPU")} for node in live_nodes()]


def ready(references, timeout=0):
    """The references whose calls have ended."""
    return ray.wait(references, num_returns=len(references), timeout=timeout)[0] if references else []


def result(reference):
    """The result of a call. Raises the EggError with which it ended, or a RayError."""
    try:
        return ray.get(reference)
    except Exception as error:          # whatever the actor raised, or why Ray has no result
        cause = getattr(error, "cause", None)
        raise cause if isinstance(cause, EggError) else RayError(problem(error)) from None


def problem(error):
    """An error of an actor or a trial in one line, without the tracebacks in which Ray wraps it."""
    cause = getattr(error, "cause", None) or error
    lines = f"{type(cause).__name__}: {cause}".strip().split("\n")
    line = ([line for line in lines if re.match(r"[\w.]+(Error|Exception)\b", line)] or lines)[-1]
    if not (module := re.search(r"No module named '(\w+)", line)):
        return one_line(line, 300)
    if any(name.partition(".")[0] == module[1] for name in os.listdir(ROOT)):
        return (f"a node has lost {module[1]}, a part of this program: several Ray nodes on one machine need a "
                "`ray start --temp-dir` each; the same command continues")
    return (f"a node has no {module[1]}: install requirements/core.txt (on GPU nodes cuda12.txt or cuda13.txt) on "
            "every node")


# --- actors ----------------------------------------------------------------------------------------------------------

class CoordinatorActor:
    """Coordinates the run and serves as its console: it keeps the lines and events until the driver fetches them, and
    passes the figures of each step to Ray's metrics. `run` occupies one thread, the driver's calls have another."""

    def __init__(self):
        self.calls = collections.deque(maxlen=10_000)
        self.status = ""
        self.stopped = []
        self.gauges = {name: metrics.Gauge(f"egg_{name}", text) for name, text in GAUGES.items()}

    def run(self, cfg, **options):
        """A summary of egg_net.run_coordinator and the validations. The coordinator of a killed driver may hold the
        directory for a moment."""
        until = time.monotonic() + LOCK_SECONDS
        while True:
            try:
                done = egg_net.run_coordinator(cfg, console=self, stopped=self.stopped, **options)
                return done.summary(), done.validations
            except history.HistoryError as error:
                if not isinstance(error.__context__, BlockingIOError) or time.monotonic() > until or self.stopped:
                    raise
            time.sleep(0.2)

    def emit(self, event, line):
        self.calls.append(("emit", event, line))
        if event["event"] in ("step", "validation"):
            for name in self.gauges.keys() & event.keys():
                self.gauges[name].set(event[name])

    def line(self, text):
        self.calls.append(("line", text))

    def progress(self, text=None):
        self.status = self.status if text is None else text

    def clear(self):
        self.status = ""

    def news(self):
        """(status line, calls for the console of the driver since the last call)."""
        return self.status, [self.calls.popleft() for _ in range(len(self.calls))]

    def stop(self):
        self.stopped.append(True)


class WorkerActor:
    def placed(self):
        """Answers as soon as Ray has found a place for this actor."""

    def run(self, cfg, files, address, secret, objective, number, threads):
        """Serves the coordinator for ever. files: {constant: object with the bytes}; objective: a path on this node, or
        None. Raises EggError."""
        from engine import hardware
        from tools import train
        gpus, opened = ray.get_gpu_ids(), {name: tempfile.TemporaryFile() for name in files}
        for name, file in opened.items():        # files without a name: they end with this process
            ray.get(files[name]).tofile(file)
            file.flush()
        values = {name: f"/proc/self/fd/{file.fileno()}" for name, file in opened.items()}
        cfg = cfg.changed(**values, DEVICE="cuda" if gpus else "cpu")
        name = f"{socket.gethostname()}/" + (f"cuda:{gpus[0]}" if gpus else f"cpu-{number}")
        try:
            train.work(cfg, *address, hardware.one_device(cfg), None if gpus else threads,
                       access=auth.Access(secret), name=name, objective=objective)
        except EggError:
            raise
        except Exception:               # Ray starts another process
            traceback.print_exc()
            os._exit(1)


# --- the driver ------------------------------------------------------------------------------------------------------

class Workers:
    """The workers of a run. workers: their number, 0 or None for as many as the nodes have room for; cpus: of a worker
    on a node without GPUs, None for the fewest that a node has; arguments: of WorkerActor.run, but the last two."""

    def __init__(self, cfg, workers, cpus, arguments, console):
        self.device = cfg.DEVICE
        self.workers = workers
        self.given = cpus
        self.console = console
        self.arguments = arguments
        self.alive = {}                              # reference of `run`, which ends with the worker: actor
        self.started = []                            # resources of every worker that was started
        self.placed = []                             # references of `placed`
        self.search_at = 0.0                         # time of the next search for nodes
        # a node without CPUs (often the head node) is for other things
        self.cpus = cpus or min((n["CPU"] for n in nodes() if n["CPU"]), default=1)

    def wanted(self):
        """[(resources, number of workers)]: as requested, or as many as the nodes have room for."""
        found = nodes()
        gpus = sum(n["GPU"] for n in found)
        on_gpus = self.device == "cuda" or self.device == "auto" and gpus > 0
        on_cpus = self.device == "cpu" or self.device == "auto" and (self.given or not gpus)
        cpus = sum(n["CPU"] // self.cpus for n in found if not (on_gpus and n["GPU"]))
        if self.workers:
            gpus = cpus = self.workers
            on_cpus = not on_gpus
        return [({"num_gpus": 1, "num_cpus": 1}, gpus)] * on_gpus + [({"num_cpus": self.cpus}, cpus)] * bool(on_cpus)

    def grow(self):
        """Starts workers while there is room. Those without a place are pending until a node joins."""
        if time.monotonic() < self.search_at:
            return
        self.search_at = time.monotonic() + NODES_SECONDS
        for resources, wanted in self.wanted():
            for _ in range(wanted - self.started.count(resources)):
                actor = ray.remote(WorkerActor).options(**resources, **FOR_EVER).remote()
                self.placed.append(actor.placed.remote())
                self.alive[actor.run.remote(*self.arguments, len(self.started), self.cpus)] = actor
                self.started.append(resources)

    def watch(self):
        """Names the workers that ended with an error. Raises the error when no worker is left."""
        for served in ready(list(self.alive)):
            del self.alive[served]
            try:
                result(served)
            except EggError as error:
                if not self.alive:
                    raise
                self.console.line(f"warning: a worker ended: {error}")

    def needs(self):
        """What a worker needs, and what is free."""
        free = ray.available_resources()
        need = "1 GPU and 1 CPU" if "num_gpus" in self.wanted()[0][0] else f"{self.cpus} CPUs"
        return f"a worker needs {need}, free are {free.get('GPU', 0):g} GPUs and {free.get('CPU', 0):g} CPUs"


def home(save_dir):
    """Address of the node for the coordinator: where save_dir holds a run, else this node. Raises RayError."""
    here = ray.util.get_node_ip_address()
    holding = sorted({address for address, found in on_every_node(history.holds_run, save_dir) if result(found)})
    if len(holding) > 1 and here not in holding:
        raise RayError(f"{save_dir} holds a run on {', '.join(holding)}: give this command on the node that shall "
                       "continue")
    return here if here in holding or not holding else holding[0]


def train(cfg, args, secret, options, console):
    """The command `egg.py ray`; args: its arguments; options: of egg_net.run_coordinator. Returns the directory of the
    run. Raises UsageError, RayError, DataError, HistoryError, NetError; the completed steps are kept in every case."""
    save_dir, objective = absolute(args.save_dir), args.objective and os.path.abspath(args.objective)
    paths = {name: os.path.abspath(path) for name in ("load_dir", "log_json", "tensorboard") if (path := options[name])}
    data_files.open_tokens(cfg, cfg.INPUT_FILE)              # an error is reported once, not by every node
    with connected(args.address):
        files = {name: ray.put(np.fromfile(getattr(cfg, name), np.uint8)) for name in egg_config.DATA_FILES
                 if os.path.isfile(getattr(cfg, name))}
        cfg = cfg.changed(**{name: os.path.abspath(getattr(cfg, name)) for name in files})
        secret, node = secret or os.urandom(32), home(save_dir)
        there = dict(num_cpus=0, resources={f"node:{node}": 0.001})
        free_port = ray.remote(lambda: socket.create_server(("", 0)).getsockname()[1])
        port = args.port or ray.get(free_port.options(**there).remote())
        actor = ray.remote(CoordinatorActor).options(**there, max_concurrency=4, **FOR_EVER).remote()
        finish = actor.run.remote(cfg, port=port, access=auth.Access(secret),
                                  **{**options, **paths, "save_dir": save_dir})
        console.line(f"the coordinator is on {node}, port {port}")
        workers = Workers(cfg, args.workers, args.cpus, (cfg, files, (node, port), secret, objective), console)
        try:
            summary, validations = follow(actor, finish, workers, args.wait or WAIT_MINUTES, console)
        finally:
            console.clear()
        console.line(summary)
        if validations:
            console.line("validation: {1:.3f} {2} at step {0}".format(*validations[-1]))
    return save_dir


def follow(actor, finish, workers, wait, console):
    """Shows the coordinator's news and keeps the workers running, until the run or a signal ends it. Returns the result
    of CoordinatorActor.run."""
    started = heard = time.monotonic()
    news = actor.news.remote()
    stop_at = None
    placed = []
    waiting_shown = False
    reports = collections.deque(maxlen=100)                  # the lines that a thread of Ray prints
    screen = types.SimpleNamespace(write=reports.append, flush=lambda: None)
    with stop_signals() as stopped, contextlib.redirect_stdout(screen):
        while not ready([finish]):
            now = time.monotonic()
            while reports:
                if report := reports.popleft().strip():
                    console.line("Ray: " + one_line(report.partition("\n")[0], 200))
            if ready([news], POLL_SECONDS):
                status = show(news, console)
                time.sleep(POLL_SECONDS)
                news, heard = actor.news.remote(), now
                console.progress(status)
            elif now - heard > SILENT_SECONDS:
                console.progress("the coordinator does not answer: Ray starts it again when its node is there")
            if stopped and not stop_at:
                console.line("stopping (once more to stop at once) ...")
                actor.stop.remote()
                stop_at = now + STOP_SECONDS
            if stop_at and now > stop_at:
                raise RayError("the coordinator does not stop; the completed steps are kept")
            if stop_at:
                continue
            workers.grow()
            workers.watch()
            placed = placed or ready(workers.placed)
            if not placed and now - started > 60 * wait:
                raise RayError(f"no free resources for a worker within {wait:g} min: {workers.needs()}: free some, add "
                               "a node, or wait longer with --wait")
            if not placed and not waiting_shown and now - started > SILENT_SECONDS:
                console.line(f"waiting for resources: {workers.needs()}")
                waiting_shown = True
    with contextlib.suppress(EggError):
        show(news, console)
        show(actor.news.remote(), console)
    return result(finish)


def show(news, console):
    """Passes the coordinator's news to the console. Returns its status line. Raises RayError."""
    status, calls = result(news)
    for name, *values in calls:
        getattr(console, name)(*values)
    return status
