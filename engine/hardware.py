"""The devices of this machine, "cpu" or "cuda:N", and the choice among them; the processes of workers and of judges of
rewards. With the standard library alone."""

import functools
import importlib.util
import os
import signal
import sys
import types

from egg_config import EggError, UsageError, begin_process

OLDEST = (8, 0)     # lowest compute capability that is supported


class EngineError(EggError):
    """One line that names the device that cannot be used here, and a remedy."""


class NoDevice(EngineError, UsageError):
    """The device that was asked for is not there."""


def cores(groups="/sys/fs/cgroup", own="/proc/self/cgroup"):
    """Processor cores that this process may use, also by a CPU quota (of a container) in its control groups (version 1
    or 2) below the directory `groups`; own: the file that lists them."""
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    lines = _read(own).splitlines()
    for kinds, path in (line.split(":", 2)[1:] for line in lines):
        at = groups + "/cpu" * bool(kinds) + path.rstrip("/")
        while (not kinds or "cpu" in kinds.split(",")) and at.startswith(groups):
            quota, period = [*(_read(f"{at}/cpu.max") or _read(f"{at}/cpu.cfs_quota_us") + " " +
                               _read(f"{at}/cpu.cfs_period_us")).split(), "", ""][:2]
            if quota.isdecimal() and period.isdecimal():         # "max" or -1: none
                count = min(count, max(1, int(quota) // int(period)))
            at = os.path.dirname(at)
    return count


def _read(path):
    try:
        with open(path) as file:
            return file.read()
    except OSError:
        return ""


def driver():
    """(CUDA major version of the NVIDIA driver, [compute capability of every GPU]); (0, []) without a driver."""
    import ctypes                                    # a coordinator has no use for it
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return 0, []
    version, count = ctypes.c_int(), ctypes.c_int()
    if cuda.cuInit(0) or cuda.cuDriverGetVersion(ctypes.byref(version)) or cuda.cuDeviceGetCount(ctypes.byref(count)):
        return 0, []

    def attribute(device, number):
        value, handle = ctypes.c_int(), ctypes.c_int()
        cuda.cuDeviceGet(ctypes.byref(handle), device)
        cuda.cuDeviceGetAttribute(ctypes.byref(value), number, handle)
        return value.value

    return version.value // 1000, [(attribute(d, 75), attribute(d, 76)) for d in range(count.value)]


def devices(cfg):
    """The devices that cfg.DEVICE allows here, one worker each: ["cuda:0", ...] or ["cpu"].

    "auto" takes the GPUs if any can be used. Raises EngineError for "cuda" without a usable GPU."""
    if cfg.DEVICE == "cpu":
        return ["cpu"]
    major, capabilities = driver()
    usable = [f"cuda:{i}" for i, capability in enumerate(capabilities) if capability >= OLDEST]
    if not capabilities:
        wrong = "no NVIDIA GPU is visible here (nvidia-smi, CUDA_VISIBLE_DEVICES)"
    elif not usable:
        wrong = f"the GPU has compute capability {'.'.join(map(str, max(capabilities)))}, 8.0 is the least"
    elif importlib.util.find_spec("numba_cuda") is None:
        wrong = f"the GPU needs numba-cuda: pip install -r requirements/cuda{13 if major > 12 else 12}.txt"
    else:
        return usable
    if cfg.DEVICE == "cuda":
        raise NoDevice(f"DEVICE = cuda: {wrong}; or set DEVICE=cpu")
    if capabilities:
        _tell_once(f"egg: {wrong}; using the CPU")
    return ["cpu"]


def preset(cfg):
    """The preset of egg_config that suits the `devices` of this machine."""
    return "laptop" if devices(cfg) == ["cpu"] else "best"


@functools.cache
def _tell_once(line):
    print(line, file=sys.stderr, flush=True)


def one_device(cfg, gpu=None):
    """The device of one worker: GPU number `gpu`, or the first of `devices`. Raises EngineError for an unusable GPU."""
    usable = devices(cfg)
    if gpu is not None and f"cuda:{gpu}" not in usable:
        raise NoDevice(f"GPU {gpu} cannot be used: there is {', '.join(usable)}")
    return usable[0] if gpu is None else f"cuda:{gpu}"


def start_process(main, *arguments):
    """(process, our end of its pipe). The new process calls main(*arguments, the other end); it gets no Ctrl-C, and
    ends with this one."""
    import multiprocessing.resource_tracker          # a coordinator has no use for it
    if multiprocessing.current_process().daemon:
        raise EngineError("this process may have no processes of its own, as it is daemonic, of a Pool or of Celery: "
                          "call egg from another one, as of concurrent.futures.ProcessPoolExecutor")
    context = multiprocessing.get_context("spawn")                       # a GPU's driver does not survive fork
    ours, theirs = context.Pipe()
    process = context.Process(target=begin_process, args=(main, *arguments, theirs), daemon=True)
    multiprocessing.resource_tracker.ensure_running()                    # which would unblock SIGINT later
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})   # inherited
    program, sys.modules["__main__"] = sys.modules["__main__"], types.ModuleType("__main__")
    try:
        process.start()                              # it would import the program that calls us, which may train again
    finally:
        sys.modules["__main__"] = program
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        theirs.close()
    return process, ours

