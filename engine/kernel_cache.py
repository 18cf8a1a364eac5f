"""Compiled kernels on disk. The name of a file says all that it is made of: the sources of the models, kernels and
engines, the versions of the compilers, and what `key` is given. So an edit compiles everything again, once.

numba has a cache too, but it finds no function that calls other compiled functions again in another process.
"""

import atexit
import contextlib
import ctypes
import fcntl
import functools
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
import llvmlite.binding
import numba
import numpy as np
from numba.core import codegen, compiler, config, runtime, serialize
from numba.core.compiler import CompileResult

ROOT = pathlib.Path(__file__).resolve().parents[1]
SOURCES = "egg_kernels.py", "engine/*.py", "kernels/*.py", "model/*.py"
VERSIONS = sys.implementation.cache_tag, sys.version_info[:3], numba.__version__, llvmlite.__version__, np.__version__
UNUSED_SECONDS = 30 * 86400.0
PR_SET_PDEATHSIG = 1       # of prctl(2)
# LLVM prefers registers of 256 bits where it has larger ones. Read when numba compiles its first function.
config.CPU_FEATURES = config.CPU_FEATURES or llvmlite.binding.get_host_cpu_features().flatten() + ",-prefer-256-bit"


def digest_of_sources(root):
    """str: a digest of the names and contents of all files from which a kernel can be made."""
    files = sorted(path for pattern in SOURCES for path in root.glob(pattern))
    return hashlib.sha256(repr([(path.name, path.read_bytes()) for path in files]).encode()).hexdigest()


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
        if stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid() and status.st_mode & 0o777 == 0o700:
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
    """Writes a whole file at once. If that fails, one line says so, and the kernel will be compiled again."""
    part = path.with_name(f"{path.name}.{os.getpid()}")
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
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
            work()
        finally:
            os._exit(0)
    return pid


# --- the CPU engine ---------------------------------------------------------------------------------------------------

class CpuCache:
    """Stands in for numba's cache of one function. variant(): the kind of vector instructions to compile for."""

    def __init__(self, function, variant):
        self._function, self._variant = function, variant

    def _path(self, signature, context):
        kinds = [(str(t), getattr(t, "fields", ()), str(getattr(t, "instance_class", None)))
                 for t in getattr(signature, "args", signature)]
        name = self._function.__name__
        return directory() / f"cpu-{name}-{key(name, kinds, self._variant(), context.codegen().magic_tuple())}"

    def load_overload(self, signature, context):
        """The compiled function, None if it has to be compiled."""
        runtime.rtsys.initialize(context)                    # all that loading needs; compiling refreshes the context
        found = read(self._path(signature, context))
        if found is None:
            show(f"egg: compiling {self._function.__name__} ...")
            return None
        return CompileResult._rebuild(context, *found)

    def save_overload(self, signature, result):
        """Writes a compiled function to its file."""
        if not result.library.has_dynamic_globals:
            write(self._path(signature, result.target_context), serialize.dumps(result._reduce()))
        show()


class Inner(codegen.JITCodeLibrary):
    """A function that is optimized and becomes machine code only within its callers. numba does both for every function
    too, which takes more than twice the time and gives code that is a fifth to a third slower."""

    def finalize(self):
        self._raise_if_finalized()
        for library in dict.fromkeys(self._linking_libraries):
            self._final_module.link_in(library._get_module_for_linking(), preserve=True)
        self._final_module.verify()
        self._finalize_dynamic_globals()
        self._finalized = True

    # numba asks for these so that Python can call the function; a call raises a TypeError
    codegen = property(lambda self: self)

    def set_env(self, name, environment):
        """Nothing: without machine code there is no environment."""

    def get_pointer_to_function(self, name):
        return ctypes.cast(ctypes.pythonapi.PyErr_BadArgument, ctypes.c_void_p).value


class InnerCompiler(compiler.Compiler):
    """Compiles a function into an `Inner`."""

    def compile_extra(self, function):
        self.state.library = Inner(self.state.targetctx.codegen(), function.__qualname__)
        self.state.library.enable_object_caching()
        return super().compile_extra(function)


def njit(variant):
    """A decorator like numba.njit(nogil=True, error_model="numpy") with a CpuCache."""
    def decorate(function):
        compiled = numba.njit(nogil=True, error_model="numpy", no_cfunc_wrapper=True)(function)
        compiled._cache = CpuCache(function, variant)
        return compiled
    return decorate


# decorators for functions that only compiled functions call. A `leaf` allocates no array and counts no references,
# because counting takes longer than a short row. `inlined` is for those that are called once a row.
inner = functools.partial(numba.njit, nogil=True, error_model="numpy", no_cpython_wrapper=True, no_cfunc_wrapper=True,
                          pipeline_class=InnerCompiler)
leaf = functools.partial(inner, _nrt=False)
inlined = functools.partial(leaf, forceinline=True)


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
