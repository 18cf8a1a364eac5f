"""`egg.py ray`: a training run on a Ray cluster.

The coordinator runs in this process, the driver. Workers are actors, one on every GPU or with some CPUs each. Ray
places them, restarts those that die, carries code, configuration, data and secret to them, and ends them with the
driver. The same command continues from the save directory.
"""

import contextlib
import logging
import os
import socket
import tempfile
import time
from collections import Counter

import numpy as np

import egg_config
import egg_net
from cluster import auth
from cluster.console import one_line
from egg_config import ROOT, EggError, UsageError
from model import data_files

try:
    import ray
except ModuleNotFoundError as missing:
    raise EggError(f"{missing.name} is missing: pip install -r requirements/ray.txt") from None

NOT_CARRIED = [".git", ".venv", "/tests", "/docs", "*.bin", "/ckpt*"]       # data travels as objects
JOB_COPY = "_ray_pkg_"     # part of the path of the copy that Ray makes of a job's working directory
CONNECT_SECONDS = 10.0
LOOK_SECONDS = 2.0         # between two looks at nodes and workers
WAIT_MINUTES = 5.0         # until the first worker has to be at work


class RayError(EggError):
    """About the Ray cluster, or an actor on it."""


@contextlib.contextmanager
def connected(address):
    """A block in which this process is connected to a cluster. address: "auto" or None (RAY_ADDRESS, or a cluster on
    this machine), "local" (a new one, which ends with the block) or HOST:PORT. Raises RayError."""
    address = address or "auto"
    host, colon, port = address.rpartition(":")
    options = {} if JOB_COPY in ROOT else {"runtime_env": {"working_dir": ROOT, "excludes": NOT_CARRIED}}
    with tempfile.TemporaryDirectory(dir="/tmp", ignore_cleanup_errors=True) as private:
        if address == "local":           # other users of this machine may neither replace its files nor give it jobs
            options |= {"_temp_dir": f"{private}/ray", "include_dashboard": False}
            os.environ.setdefault("RAY_AUTH_TOKEN", os.urandom(32).hex())
        try:
            if colon:                    # Ray itself would try for minutes
                socket.create_connection((host, int(port)), CONNECT_SECONDS).close()
            cluster = ray.init(address, log_to_driver=False, logging_level=logging.ERROR, **options)
        except Exception as error:       # of many kinds
            raise RayError(f"no Ray cluster to use at {address} ({one_line(str(error), 200)}): run this on a node of "
                           "one, or in a `ray job submit`, or give HOST:PORT of its head as the address, or local for "
                           "one on this machine") from None
        with cluster:
            yield


def lasting(directory):
    """The absolute path of a directory. Raises UsageError for one that would be lost with the files of a job."""
    path = os.path.abspath(directory)
    if JOB_COPY in path:
        raise UsageError(f"{directory}: a job runs in a copy of its working directory, which Ray removes afterwards: "
                         "give an absolute path elsewhere")
    return path


def problem(error):
    """The error of an actor or a trial in one line, without the tracebacks in which Ray wraps it."""
    cause = getattr(error, "cause", None) or error
    if isinstance(cause, ModuleNotFoundError):
        return f"a node has no {cause.name}: install requirements/core.txt there, on GPU nodes cuda12.txt or cuda13.txt"
    return one_line(str(cause) if isinstance(cause, EggError) else f"{type(cause).__name__}: {cause}")


@ray.remote(max_restarts=-1, max_task_retries=-1)
class Worker:
    """The actor that serves the coordinator on a GPU, or on CPUs."""

    def serve(self, cfg, files, secret, objective, address, threads):
        """Serves for ever. files: {constant: object with the bytes}; objective: a path on this node, or None; address:
        (host, port) of the coordinator; threads: on CPUs. Raises EggError."""
        from engine import hardware
        from tools import train
        gpus = ray.get_gpu_ids()
        paths = {}
        opened = []                      # files without names, which end with this process
        for name, reference in files.items():
            opened.append(tempfile.TemporaryFile())
            ray.get(reference).tofile(opened[-1])
            paths[name] = f"/proc/self/fd/{opened[-1].fileno()}"
        cfg = cfg.changed(**paths, DEVICE="cuda" if gpus else "cpu")
        unit = f"cuda:{gpus[0]}" if gpus else f"cpu-{os.getpid()}"
        try:
            train.work(cfg, *address, hardware.one_device(cfg), threads, access=auth.Access(secret),
                       name=f"{socket.gethostname()}/{unit}", objective=objective)
        except EggError:
            raise
        except Exception:
            logging.exception("the worker failed")
            os._exit(1)                  # Ray starts another process


def nodes():
    """[(GPUs, CPUs)] of the nodes; a dead one has none."""
    return [tuple(int(node["Resources"].get(kind, 0)) for kind in ("GPU", "CPU")) for node in ray.nodes()]


def wanted(device, args, cpus):
    """{(GPUs, CPUs) of a worker: number}, as requested or as many as the nodes have room for. cpus: of a worker without
    a GPU; with --cpus, nodes without GPUs are used beside others."""
    room = Counter()
    for gpus, cores in nodes():
        if gpus and device != "cpu":
            room[1, 1] += gpus
        else:
            room[0, cpus] += cores // cpus
    best = (1, 1) if room[1, 1] or device == "cuda" else (0, cpus)
    if device == "auto" and args.cpus and not args.workers:
        return room
    return Counter({best: args.workers or room[best]})


def train(cfg, args, access, console, **options):
    """The command `egg.py ray`; args: its arguments; access: an auth.Access; options: of egg_net.run_coordinator.
    Returns its Progress. Raises RayError, UsageError, DataError, HistoryError, NetError; the completed steps are kept
    in every case."""
    options["save_dir"] = lasting(args.save_dir)
    secret = access.secret or os.urandom(32)
    data_files.open_tokens(cfg, cfg.INPUT_FILE)              # an error is reported once, not by every worker
    with connected(args.address):
        return egg_net.run_coordinator(cfg, None, args.port, console=console, access=auth.Access(secret),
                                       watch=watcher(cfg, args, secret, console), **options)


def watcher(cfg, args, secret, console):
    """A function for egg_net.run_coordinator that starts workers where there is room, and names those that end with an
    error. It raises RayError when none is left, or none has begun in time. args: of the command."""
    files = {name: ray.put(np.fromfile(path, np.uint8)) for name in egg_config.DATA_FILES
             if os.path.isfile(path := getattr(cfg, name))}
    objective = args.objective and os.path.abspath(args.objective)
    # a node without CPUs (often the head node) is for other things
    cpus = args.cpus or min((cores for _, cores in nodes() if cores), default=1)
    need = f"a worker needs a GPU and a CPU, or without GPUs {cpus} CPUs; `ray status` shows what is free"
    begin_by = time.monotonic() + 60 * (args.wait or WAIT_MINUTES)
    look_at = 0.0                        # time of the next look at nodes and workers
    started = Counter()                  # {(GPUs, CPUs): number}
    serving = {}                         # {reference of Worker.serve: actor}

    def watch(coordinator):
        nonlocal look_at
        now = time.monotonic()
        if now < look_at:
            return
        look_at = now + LOOK_SECONDS
        missing = wanted(cfg.DEVICE, args, cpus) - started
        started.update(missing)
        for gpus, cores in missing.elements():
            actor = Worker.options(num_gpus=gpus, num_cpus=cores).remote()
            address = ray.util.get_node_ip_address(), coordinator.address[1]
            serving[actor.serve.remote(cfg, files, secret, objective, address, cores)] = actor
        for ended in ray.wait([*serving], timeout=0)[0] if serving else ():
            del serving[ended]
            try:
                ray.get(ended)
            except Exception as error:   # whatever the worker raised, or why Ray has no result
                if not serving:
                    raise RayError(problem(error)) from None
                console.line(f"warning: a worker ended: {problem(error)}")
        if not coordinator.progress.started:
            console.progress(f"waiting for the first worker: {need}")
            if now > begin_by:
                raise RayError(f"no worker yet: {need}: free some, add a node, or wait longer with --wait")

    return watch
