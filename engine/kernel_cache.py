"""Compiled kernels on disk. The name of a file says all that it is made of: the sources of the models, kernels and
engines, the versions of the compilers, and what `key` is given. So an edit compiles everything again, once.

numba has a cache too, but it finds no function that calls other compiled functions again in another process.
"""

import atexit
import contextlib
import ctypes
import fcntl
import functools
import gc
import hashlib
import os
import pathlib
import pickle
import shutil
import signal
import stat
import sys
import tempfile
import time

import llvmlite
import numba
import numpy as np
from numba.core import compiler, runtime, serialize

from engine import simd

ROOT = pathlib.Path(__file__).resolve().parents[1]
SOURCES = "egg_kernels.py", "engine/*.py", "kernels/*.py", "model/*.py"
VERSIONS = sys.implementation.cache_tag, sys.version_info[:3], numba.__version__, llvmlite.__version__, np.__version__
UNUSED_SECONDS = 30 * 86400.0
PR_SET_PDEATHSIG = 1       # of prctl(2)


def digest_of_sources(root):
    """str: a digest of the names and contents of all files from which a kernel can be made."""
    files = [(path.name, path.read_bytes()) for pattern in SOURCES for path in sorted(root.glob(pattern))]
    return hashlib.sha256(repr(files).encode()).hexdigest()


# of the files as this process has read them: before it compiles anything
OF_SOURCES = digest_of_sources(ROOT)


def key(*parts):
    """str: a name for what is made from `parts`, objects whose repr says all, by these sources and compilers."""
    return hashlib.sha256(repr((OF_SOURCES, VERSIONS, parts)).encode()).hexdigest()[:32]


# --- the directory ----------------------------------------------------------------------------------------------------

@functools.cache
def directory():
    """The directory in which this process keeps compiled kernels (a Path). They are code that will run, so it must be
    this user's, and nobody else may enter it."""
    cache = pathlib.Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"))
    path = cache / "egg" / "kernels"
    with contextlib.suppress(OSError):
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = path.lstat()
        private = stat.S_ISDIR(status.st_mode) and status.st_mode & 0o777 == 0o700       # it may inherit set-group-id
        if private and status.st_uid == os.getuid():
            (path / "last-use").touch()                      # an OSError where nothing can be written
            remove_unused(path)
            return path
    tell(f"egg: {cache} has no private directory for compiled kernels, so they are compiled again every time\n")
    path = tempfile.mkdtemp(prefix="egg-")
    atexit.register(shutil.rmtree, path, True)
    return pathlib.Path(path)


def remove_unused(where):
    """Removes what was not used for UNUSED_SECONDS."""
    for path in where.iterdir():
        with contextlib.suppress(OSError):
            if path.lstat().st_mtime < time.time() - UNUSED_SECONDS:
                path.unlink()


def read(path):
    """The object in a file of the cache, None if it is missing or damaged."""
    try:
        os.utime(path)
        return pickle.loads(path.read_bytes())
    except (OSError, EOFError, pickle.UnpicklingError):
        return None


def write(path, data):
    """Writes a whole file at once, unless the sources have changed since `key` named it: a module that was read later
    may be another one. If writing fails, one line says so, and the kernel will be compiled again."""
    part = path.with_name(f"{path.name}.{os.urandom(8).hex()}")          # containers share a home, and numbers
    if digest_of_sources(ROOT) != OF_SOURCES:
        return
    try:
        part.write_bytes(data)
        part.replace(path)
    except OSError as error:
        cannot_keep(error.strerror)


@functools.cache
def cannot_keep(reason):
    tell(f"egg: compiled kernels cannot be kept in {directory()}: {reason}\n")


@contextlib.contextmanager
def alone(kind):
    """A block that the processes of this user enter one after the other: what starts together compiles once."""
    with open(directory() / f"lock-{kind}", "w") as file:
        with contextlib.suppress(OSError):           # there is none on some network drives: it only saves work
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def tell(text):
    print(text, end="", file=sys.stderr, flush=True)


def show(text=""):
    """Replaces the text that a terminal showed last."""
    if sys.stderr.isatty() and os.environ.get("TERM") != "dumb":
        tell("\r\x1b[K" + text)


def forked(work):
    """The number of a fork of this process that calls work(), quietly, and ends; at the latest when this one does."""
    pid = os.fork()
    if not pid:
        try:
            ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
            gc.disable()                         # memory of a GPU is garbage that only its own process can free
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
            work()
        finally:
            os._exit(0)
    return pid


# --- the CPU engine ---------------------------------------------------------------------------------------------------

class CpuCache:
    """Stands in for numba's cache of one function."""

    def __init__(self, function):
        self._name, self._module = function.__name__, function.__module__

    def _path(self, signature, context):
        made = key(self._module, str(signature), simd.use(), context.codegen().magic_tuple())
        return directory() / f"cpu-{self._name}-{made}"

    def load_overload(self, signature, context):
        """The compiled function, None if it has to be compiled."""
        runtime.rtsys.initialize(context)                    # all that loading needs; compiling refreshes the context
        stored = read(self._path(signature, context))
        if stored is None:
            show(f"egg: compiling {self._name} ...")
            return None
        return compiler.CompileResult._rebuild(context, *stored)

    def save_overload(self, signature, result):
        """Writes a compiled function to its file."""
        if not result.library.has_dynamic_globals:
            write(self._path(signature, result.target_context), serialize.dumps(result._reduce()))
        show()


# --- the CUDA engine --------------------------------------------------------------------------------------------------

class CudaCache:
    """Stands in for numba-cuda's cache of one kernel."""

    def __init__(self, path):
        self.cache_path = path

    def load_overload(self, signature, context):
        """The compiled kernel, None if it has to be compiled."""
        context.refresh()
        return read(self.cache_path)

    def save_overload(self, signature, kernel):
        """Writes a compiled kernel to its file."""
        from numba.cuda.serialize import dumps
        write(self.cache_path, dumps(kernel))
