"""Compiling ahead: CUDA kernels for every supported card, and the CPU engine."""

import contextlib
import fcntl
import gc
import json
import os
import pickle
import re
import subprocess
import sys

import pytest

import egg_config
from recordings import HERE

# compute capability -> KiB of shared memory that a block can have
CARDS = {(8, 0): 163, (8, 6): 99, (8, 9): 99, (9, 0): 227, (10, 0): 227, (12, 0): 99}
LARGE = [(8, 0), (10, 0)]                                    # have the code of cc 8.6 and 12.0 in larger tiles
OTHERS = [cc for cc in CARDS if cc not in LARGE]


def kernels_for(cfg, cc=(9, 0)):
    """engine.cuda_engine.kernels for a configuration on a card: (forward, its own kernels, {verb: [Kernel]})."""
    from numba import uint32

    from engine import cuda_engine
    return cuda_engine.kernels(cfg, cc, CARDS[cc] * 1024, uint32)


def kernels_of(constants, cc):
    """{part: [Kernel]} for a configuration on a card: "all", those that do not "write", the "forward" pass, and of it
    the "noisy" one."""
    forward, own, by_verb = kernels_for(egg_config.make(**constants), cc)
    every = {(id(kernel.dispatcher), repr(kernel.signature)): kernel for some in by_verb.values() for kernel in some}
    noisy, every = [kernel.dispatcher for kernel in forward.kernels["step"]], list(every.values())
    return {"all": every, "not writing": [kernel for kernel in every if kernel not in by_verb["write"]],
            "forward": [kernel for kernel in every if kernel.dispatcher not in own.values()],
            "noisy": [kernel for kernel in every if kernel.dispatcher in noisy]}


class Compiler:
    """Compiles CUDA kernels into files of a directory, which the processes of a test run share. Each distinct kernel is
    compiled once: what is the same on several cards, or in several configurations, for one of them. So is within a
    process each distinct device function, as far as LLVM: its code is then part of each kernel that calls it."""

    def __init__(self, directory):
        self.directory = directory
        self.known, self.first = {}, {}

    def first_of(self, function):
        """The first device function, or function to inline, of all that have the same content."""
        from engine import kernel_cache
        return self.first.setdefault(kernel_cache.content(function, self.known), function)

    def __call__(self, constants, cards=CARDS, **which):
        """{card: [(name, bytes of shared memory, PTX)]} of the kernels of a configuration; which: see `compile`."""
        return {cc: [(name, shared, (self.directory / file).read_text())
                     for name, shared, file in self.compile(constants, cc, **which)] for cc in cards}

    def compile(self, constants, cc, part="all", names=None, wait=True):
        """[(name, bytes of shared memory, name of its file)] of the kernels of a configuration on a card; names: of
        each name as many kernels as it stands there. Without `wait` kernels that another process is about to compile
        are left to it. The list is kept, so that other processes need not build the kernels."""
        from engine import kernel_cache
        from engine.quick_numba import quick_cuda, without_gpu
        listed = self.directory / f"list-{kernel_cache.key({}, constants, cc, part, names)}"
        if listed.exists():
            return json.loads(listed.read_text())
        some = kernels_of(constants, cc)[part]
        if names is not None:
            some = [kernel for name in dict.fromkeys(names)
                    for kernel in [k for k in some if k.name == name][:names.count(name)]]
        files = [kernel_cache.key(self.known, kernel.dispatcher, kernel.signature) for kernel in some]
        with quick_cuda(self.first_of), without_gpu(cc):
            for kernel, file in zip(some, files):
                self._compile(kernel, self.directory / file, cc, wait)
        made = [(kernel.name, kernel.shared, file) for kernel, file in zip(some, files)]
        if all((self.directory / file).exists() for file in files):
            write_at_once(listed, json.dumps(made))
        return made

    def _compile(self, kernel, file, cc, wait):
        from numba import cuda
        with open(f"{file}.lock", "w") as lock, contextlib.suppress(BlockingIOError):
            fcntl.flock(lock, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
            if not file.exists():
                ptx, _ = cuda.compile_ptx(kernel.dispatcher.py_func, kernel.signature,
                                          cc=(9, 0, "a") if cc == (9, 0) else cc)
                write_at_once(file, ptx)

    def ahead(self, jobs):
        """Starts a process that compiles at low priority what jobs, [arguments of a call], will want."""
        code = "import compiling, pickle, sys; compiling.compile_ahead(*pickle.load(sys.stdin.buffer))"
        process = subprocess.Popen([sys.executable, "-c", code], cwd=HERE, stdin=subprocess.PIPE,
                                   env={**os.environ, "PYTHONPATH": f"{HERE}{os.pathsep}{HERE / 'tests'}"})
        process.stdin.write(pickle.dumps((self, jobs)))
        process.stdin.close()
        return process


def compile_ahead(compiler, jobs):
    os.nice(10)
    gc.disable()
    for constants, cards, which in jobs:
        for cc in cards:
            compiler.compile(constants, cc, wait=False, **which)
    os._exit(0)                                              # else Python frees 2 GB object by object: seconds


def write_at_once(path, text):
    part = path.with_name(f"{path.name}.{os.getpid()}")
    part.write_text(text)
    part.rename(path)


def compiled_as(name, *arguments, deep=False, **which):
    """A parameter of a test of `compiled_kernels`, which are what a Compiler compiles for these arguments."""
    return pytest.param(marks=[pytest.mark.compiles(*arguments, **which), *[pytest.mark.deep] * deep], id=name)


def hold_against_cards(made):
    """The kernels that a Compiler made are in registers alone and fit the shared memory of the cards."""
    for cc, kernels in made.items():
        for name, shared, ptx in kernels:
            assert re.search(r"\.target sm_\d+a?\b", ptx), name
            assert not re.search(r"\.local\b", ptx), f"{name} for {cc} uses local memory"
            assert shared <= CARDS[cc] * 1024, f"{name} needs {shared} bytes of shared memory"


def compile_cpu_engine(model, ready):
    """Compiles all of the CPU engine for a model, and says so by a file in the directory `ready`."""
    from engine import cpu_engine
    try:
        cpu_engine.warm_up(egg_config.make(MODEL=model, USE_MUON=1), lambda line: None, cpu_engine.VERBS)
    finally:
        (ready / model).touch()
