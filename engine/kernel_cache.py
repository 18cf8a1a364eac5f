"""Compiled kernels on disk. The name of a file is a digest of everything that is compiled in, and of nothing else.

That is: the code of the kernel and of all functions that it calls, the values of their closures and globals (among them
the constants of the configuration that the kernel freezes), the types of the arguments, the kind of device, and the
versions of Python and the compilers. So a changed learning rate, a comment, or the same sources in another directory
need no compilation, and a changed constant only that of the kernels that use it. numba's caches compare paths and
modification times; they miss changes in called functions, and equal sources elsewhere.
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
import re
import shutil
import signal
import stat
import sys
import tempfile
import time
import types
from unittest import mock

import llvmlite
import llvmlite.binding
import numba
import numpy as np
from numba.core import (codegen, compiler, compiler_machinery, config, runtime, serialize, targetconfig, typed_passes,
                        untyped_passes)
from numba.core.compiler import CompileResult
from numba.core.types.functions import BaseFunction

VERSIONS = sys.implementation.cache_tag, sys.version_info[:3], numba.__version__, llvmlite.__version__, np.__version__
PR_SET_PDEATHSIG = 1       # of prctl(2)
MOST_BYTES = 1 << 31       # of the kernels that are kept
UNUSED_SECONDS = 90 * 86400.0
# LLVM prefers registers of 256 bits where it has larger ones. Read when numba compiles its first function.
config.CPU_FEATURES = config.CPU_FEATURES or llvmlite.binding.get_host_cpu_features().flatten() + ",-prefer-256-bit"
COMPILERS = {"numba", "numba_cuda", "llvmlite", "numpy", "cuda", *sys.stdlib_module_names}    # covered by VERSIONS
# what code means: neither names, paths and lines nor comments
OF_CODE = ("co_code", "co_exceptiontable", "co_flags", "co_argcount", "co_varnames", "co_names", "co_freevars",
           "co_cellvars", "co_consts")
# the parts of a function that is compiled or to be compiled, of an intrinsic, of a functools.partial
OF_WRAPPERS = ("py_func", "targetoptions"), ("_defn",), ("func", "args", "keywords")


# --- where the files are ---------------------------------------------------------------------------------------------

@functools.cache
def directory():
    """The directory in which this process keeps compiled kernels (a Path). They are code that will run, so nobody else
    may write there."""
    cache = pathlib.Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"))
    for path in cache / "egg" / "kernels", pathlib.Path(tempfile.gettempdir()) / f"egg-{os.getuid()}":
        resolved = path.parent.resolve() / path.name     # so that no link on the way can be turned later
        if path.is_absolute() and is_private(resolved):
            return resolved
    path = tempfile.mkdtemp(prefix="egg-")
    atexit.register(shutil.rmtree, path, True)
    tell(f"egg: {cache} has no private directory for compiled kernels, so they are compiled again every time\n")
    return pathlib.Path(path)


def is_private(path):
    """Whether `path`, made if it is missing, is a directory (no link) of this user that nobody else may enter, and that
    nobody but this user and root can replace."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.mkdir(mode=0o700, exist_ok=True)
        found = path.lstat()
        above = [parent.stat() for parent in path.parents]
    except OSError:
        return False
    return (stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and found.st_mode & 0o777 == 0o700
            and all(one.st_uid in (0, os.getuid()) and (not one.st_mode & 0o022 or one.st_mode & stat.S_ISVTX)
                    for one in above))


def read(path):
    """The object in a file of this cache, None if it is missing, damaged or of a class that has moved. Sets the time of
    change, by which `prune` knows the last use."""
    try:
        with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as file:
            found = os.fstat(file.fileno())
            if not stat.S_ISREG(found.st_mode) or found.st_uid != os.getuid():
                return None
            os.utime(file.fileno())
            return pickle.load(file)
    except (OSError, EOFError, AttributeError, ImportError, pickle.UnpicklingError):
        return None


def write(path, data):
    """Writes a whole file at once. If that fails, one line says so, and the kernel will be compiled again."""
    part = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        part.write_bytes(data)
        part.replace(path)
        prune(path.parent)
    except OSError as error:
        cannot_keep(path.parent, error.strerror)


@functools.cache
def prune(where, most=MOST_BYTES):
    """Removes kernels that were not used for UNUSED_SECONDS, and then the least recently used ones until all together
    have at most `most` bytes; once in a process."""
    found = []
    for path in where.iterdir():
        with contextlib.suppress(OSError):
            found.append((path.lstat(), path))
    total, oldest = 0, time.time() - UNUSED_SECONDS
    for status, path in sorted(found, key=lambda one: -one[0].st_mtime):
        total += status.st_size
        if status.st_mtime < oldest or total > most:
            with contextlib.suppress(OSError):
                path.unlink()


@functools.cache
def cannot_keep(where, reason):
    tell(f"egg: compiled kernels cannot be kept in {where}: {reason}\n")


def tell(text):
    print(text, end="", file=sys.stderr, flush=True)


def show(text=""):
    """Replaces the text that a terminal showed last."""
    if sys.stderr.isatty() and os.environ.get("TERM") != "dumb":
        tell("\r\x1b[K" + text)


# --- what is compiled in ---------------------------------------------------------------------------------------------

def key(known, *what):
    """str: a name for `what` (objects that `content` understands) compiled by these versions of the compilers."""
    return content((what, VERSIONS), known)[:32]


def content(value, known):
    """str: a digest of what `value` means to a compiler, the same in every process and checkout. known: {}, or that of
    earlier calls since which nothing has changed. Raises TypeError for an object that has no such digest."""
    if id(value) not in known:
        known[id(value)] = value, "recursion"
        known[id(value)] = value, hashlib.sha256(repr(_parts(value, known)).encode()).hexdigest()
    return known[id(value)][1]


def _parts(value, known):
    """What `content` hashes of a value: text, numbers, and digests of the values it consists of."""
    of, kind = functools.partial(content, known=known), type(value)
    if value is None or isinstance(value, (bool, int, float, str, bytes)):
        return kind.__name__, value
    if isinstance(value, (np.generic, np.ndarray)):
        return str(value.dtype), value.shape, value.tobytes()
    if isinstance(value, (tuple, list)):
        return kind.__name__, getattr(value, "_fields", ()), [*map(of, value)]
    if isinstance(value, (dict, set, frozenset)):
        return kind.__name__, sorted(map(of, value.items() if isinstance(value, dict) else value))
    if isinstance(value, types.CodeType):
        return [of(getattr(value, part)) for part in OF_CODE]
    for parts in OF_WRAPPERS:
        if hasattr(value, parts[0]):
            return parts, [of(getattr(value, part)) for part in parts]
    if isinstance(value, types.ModuleType):
        return "module", value.__name__
    module = getattr(value if hasattr(value, "__qualname__") else kind, "__module__", None) or ""
    ours = _is_ours(module)
    if isinstance(value, types.FunctionType) and ours:
        return "function", of(value.__code__), of(value.__defaults__), [*map(of, _captured(value))]
    if isinstance(value, type) and ours:
        functions = [of(f) for _, f in sorted(vars(value).items()) if isinstance(f, types.FunctionType)]
        return "class", module, value.__qualname__, functions
    if hasattr(value, "__qualname__"):
        return "name", module, value.__qualname__
    if ours or kind is types.SimpleNamespace:
        return "object", of(kind), of(vars(value))
    text = f"{module}.{kind.__qualname__} {value}"
    if re.search(r" at 0x[0-9a-f]", text):
        raise TypeError(f"{text}: the cache of kernels cannot tell what this compiles to")
    return "object", text


def _is_ours(module):
    return module.partition(".")[0] not in COMPILERS


def _captured(function):
    """The values of a function's closure, and the globals and attributes of our modules that it names."""
    names = set(_names(function.__code__))
    yield from (cell.cell_contents for cell in function.__closure__ or ())
    for name in sorted(names & function.__globals__.keys()):
        value = function.__globals__[name]
        yield name, value
        if isinstance(value, types.ModuleType) and _is_ours(value.__name__):
            yield from ((attribute, getattr(value, attribute)) for attribute in sorted(names & vars(value).keys()))


def _names(code):
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names(constant)


# --- the two engines' kernels ----------------------------------------------------------------------------------------

@contextlib.contextmanager
def uncollected():
    """A block in which Python does not search for garbage."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


@contextlib.contextmanager
def quick(core):
    """A block in which numba (core: the module numba.core) or numba-cuda (its copy of that) compiles faster, to the
    same code: it finds the signature of a call of its own functions once, and not at every call of them, does not
    search for variables that live on from block to block, and notes no times."""
    choose, known = BaseFunction.get_call_type, {}

    def get_call_type(self, context, args, kws):
        flags = targetconfig.ConfigStack.top_or_none()
        call = self, args, tuple(kws.items()), flags and flags.nrt          # a leaf has implementations of its own
        if call not in known:
            signature = choose(self, context, args, kws)
            known[call] = signature, self._impl_keys[signature.args]
        signature, self._impl_keys[signature.args] = known[call]
        return signature

    def run(self, emit_dels=False, extend_lifetimes=False):
        self.func_ir.blocks = core.transforms.canonicalize_cfg(self.func_ir.blocks)
        self.func_ir.variable_lifetime = core.postproc.VariableLifetime(self.func_ir.blocks)
        self.func_ir.generator_info = None
        if emit_dels:
            self._insert_var_dels(extend_lifetimes)

    with (mock.patch.object(BaseFunction, "get_call_type", get_call_type),
          mock.patch.object(core.postproc.PostProcessor, "run", run),
          mock.patch.multiple(core.event, start_event=nothing, end_event=nothing)):
        yield


def nothing(*_, **__):
    pass


once = {}       # {name of a function: called before it is compiled, "any": before the next one is}; each is called once


def forked(work):
    """The number of a fork of this process that calls work(), quietly, and ends; at the latest when this one does."""
    pid = os.fork()
    if not pid:
        try:
            ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
            gc.disable()                         # memory of a GPU is garbage that only its own process can free
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
            once.clear()
            work()
        finally:
            os._exit(0)
    return pid


class CpuCache:
    """Replaces numba's cache of one njit function. variant(): the kind of processor to compile for, asked for at the
    first call."""

    known = {}              # of `content`, for all functions

    def __init__(self, function, variant):
        self._function, self._variant = function, variant
        self._lock = contextlib.ExitStack()

    def _path(self, signature, context):
        kinds = [(str(t), getattr(t, "fields", ()), str(getattr(t, "instance_class", None)))
                 for t in getattr(signature, "args", signature)]
        target = self._variant(), context.codegen().magic_tuple()
        name = f"cpu-{self._function.__name__}-{key(self.known, self._function, kinds, target)}"
        return directory() / name

    def load_overload(self, signature, context):
        """The compiled function, None if it has to be compiled. Waits while another process compiles it."""
        runtime.rtsys.initialize(context)                    # all that loading needs; compiling refreshes the context
        path = self._path(signature, context)
        found = read(path)
        if found is None:
            once.pop("any", nothing)()
            show(f"egg: compiling {self._function.__name__} ...")
            self._lock.close()                               # of a compilation that was interrupted
            with contextlib.suppress(OSError):
                lock = path.with_suffix(".lock")
                file = self._lock.enter_context(open(lock, "wb"))
                self._lock.callback(lock.unlink, missing_ok=True)
                fcntl.flock(file, fcntl.LOCK_EX)             # the kernel frees it when this process ends
            found = read(path)
        if found is not None:
            self._lock.close()
            return CompileResult._rebuild(context, *found)

    def save_overload(self, signature, result):
        """Writes a compiled function to its file."""
        if not result.library.has_dynamic_globals and all(lifted.can_cache for lifted in result.lifted):
            write(self._path(signature, result.target_context), serialize.dumps(result._reduce()))
        self._lock.close()
        show()


class Inner(codegen.JITCodeLibrary):
    """A function that is optimized and becomes machine code only within its callers. numba does both for every function
    together with all that it calls, which takes most of the time where functions are nested deeply."""

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


# numba's passes without those that none of our functions needs (closures, with blocks, array expressions ...)
PASSES = (untyped_passes.TranslateByteCode, untyped_passes.FixupArgs, untyped_passes.IRProcessing,
          untyped_passes.DeadBranchPrune, untyped_passes.GenericRewrites, untyped_passes.ReconstructSSA,
          typed_passes.NopythonTypeInference, typed_passes.PreLowerStripPhis, typed_passes.IRLegalization,
          typed_passes.AnnotateTypes, typed_passes.NativeLowering, typed_passes.NoPythonBackend)


class InnerCompiler(compiler.CompilerBase):
    """Compiles a function into an `Inner`, and likewise the functions of numba that it calls."""

    library_class = Inner

    def define_pipelines(self):
        pipeline = compiler_machinery.PassManager("egg")
        for step in PASSES:
            pipeline.add_pass(step)
        pipeline.finalize()
        return [pipeline]

    def compile_extra(self, function):
        once.pop(function.__name__, nothing)()
        target = self.state.targetctx.codegen()
        self.state.library = self.library_class(target, function.__qualname__)
        self.state.library.enable_object_caching()
        before, target._library_class = target._library_class, Inner
        try:
            return super().compile_extra(function)
        finally:
            target._library_class = before


class OuterCompiler(InnerCompiler):
    """Compiles a function that Python calls."""

    library_class = codegen.JITCodeLibrary

    def compile_extra(self, function):
        with quick(numba.core):                  # saves a sixth of the time
            return super().compile_extra(function)


def njit(variant):
    """A decorator like numba.njit(nogil=True, error_model="numpy") with a CpuCache."""
    def decorate(function):
        compiled = numba.njit(nogil=True, error_model="numpy", no_cfunc_wrapper=True,
                              pipeline_class=OuterCompiler)(function)
        compiled._cache = CpuCache(function, variant)
        return compiled
    return decorate


class LeafCompiler(InnerCompiler):
    """Compiles functions that count no references, because counting takes longer than a short row. They allocate no
    array and make no view of another type; their slices cost nothing."""

    def __init__(self, typing, target, library, types_, returned, flags, local):
        flags.nrt = False
        super().__init__(typing, target, library, types_, returned, flags, local)


def _inner(pipeline, **options):
    return numba.njit(nogil=True, error_model="numpy", no_cpython_wrapper=True, no_cfunc_wrapper=True,
                      pipeline_class=pipeline, **options)


# decorators for functions that only compiled functions call; `inlined` is for those that are called once a row
inner = _inner(InnerCompiler)
leaf = _inner(LeafCompiler)
inlined = _inner(LeafCompiler, forceinline=True)


class CudaCache:
    """Replaces numba-cuda's cache of one kernel."""

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


def cuda_path(known, name, dispatcher, signature, capability):
    """The file of a CUDA kernel for a compute capability. known: see `content`."""
    import numba_cuda
    return directory() / f"cuda-{name}-{key(known, dispatcher, signature, capability, numba_cuda.__version__)}"
