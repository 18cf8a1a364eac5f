"""The cache of compiled kernels: what names a kernel, its directory, forged files, and what a cold start compiles."""

import ast
import concurrent.futures
import fcntl
import os
import pickle
import re
import shutil
import stat
import subprocess
import sys
import tempfile
import time
import types
from types import SimpleNamespace
from unittest import mock

import numpy as np
from pytest import fixture, mark, raises

from engine import kernel_cache, simd
from engine.kernel_cache import read, write
from compiling import kernels_for
from recordings import HERE, python
from readings import configured


# --- names of compiled kernels ----------------------------------------------------------------------------------------

CARD = (8, 0)


def cuda_files(cfg, cc=CARD):
    """[names of the files] of every CUDA kernel of a configuration."""
    kernels, known = sum(kernels_for(cfg, cc)[2].values(), []), {}
    return [kernel_cache.cuda_path(known, k.name, k.dispatcher, k.signature, cc).name for k in kernels]


FROZEN_NOWHERE = ("LR_SCHEDULE=0:0.1", "VALIDATE_EVERY=77", "PORT=1", "SNAPSHOT_EVERY=1", "SAMPLING_TEMP=0.1",
                  "HOST_MASK=3", "NOISE_REUSE=5", "CHUNK_MEAN_EXPONENT=2.0", "ISLAND_SEED=4",
                  "INPUT_FILE=other.bin", "AUDIT_RATE=1.0")
FROZEN = {"DEVICE_MASK=7": {"operands"}, "ADAM_EPS=0.5": {"optimize"}, "SHIFT_LOGIT=9": {"head", "logits"},
          "ADAPTIVE_NOISE_INC=9": {"rescale"}, "GROUP_SIZE=4": {"cut_windows"}}
FALLING = {"embed", "up", "full_width_product", "head", "read_transformer", "logits"}


def test_cuda_kernels_are_named_by_the_constants_that_they_freeze():
    def changed(define):
        return {name.split("-")[1] for name in set(cuda_files(configured(None, define))) - base}

    default = configured()
    base = set(cuda_files(default))
    assert set(cuda_files(configured(None, *FROZEN_NOWHERE))) == base
    for define, kernels in FROZEN.items():
        found = changed(define)
        assert kernels <= found and "digest" not in found, (define, found)
    falling, other = (f"SIGMA_SCHEDULE={schedule}" for schedule in ("0:2,9:5", "5:2,7:3,8:4"))
    assert changed(falling) == FALLING and cuda_files(configured(None, falling)) == cuda_files(configured(None, other))
    assert not base & set(cuda_files(default, (8, 6))), "another card"


@mark.parametrize("preset", [None, "nano-egg", "laptop"])
def test_a_run_compiles_what_its_verbs_use(preset):
    """The kernels of validation and generation are apart from those of a step; Muon's are there only if they are
    used."""
    cfg = configured(preset)
    every = kernels_for(cfg)[2]
    assert set(every) == {"load", "step", "validate", "write", "digest"} and all(every.values())
    names = {verb: {kernel.name for kernel in kernels} for verb, kernels in every.items()}
    assert names["digest"] == {"digest"} and names["write"] == {
        "draw", "read_recurrent" if cfg.MODEL == "gru" else "read_transformer", "logits", "choose"}
    assert {"unpack", "optimize", "cut_windows"} <= names["step"]
    assert ("operands" in names["step"]) == (cfg.PERTURB == "weights")
    assert not any("muon" in name for name in names["step"])
    assert not names["step"] & (names["digest"] | names["write"])


def checkout(to):
    """A copy of the program's sources."""
    for folder in "", "model", "kernels", "engine":
        (to / folder).mkdir(exist_ok=True)
        for path in (HERE / folder).glob("*.py"):
            shutil.copy(path, to / folder)
    return to


NAMES = """
import sys, egg_config
from engine import cpu_engine, cuda_engine, kernel_cache, simd
from numba import uint32
simd.use("portable")
cfg, known = egg_config.make(), {}
every = cuda_engine.kernels(cfg, (8, 0), 163 * 1024, uint32)[2]
kernels = sum(every.values(), [])
cuda = {k.name: kernel_cache.cuda_path(known, k.name, k.dispatcher, k.signature, (8, 0)).name for k in kernels}
functions = [f for name, module in sys.modules.items() if name.startswith("engine.cpu_") for f in vars(module).values()]
cpu = {f.__name__: kernel_cache.content(f, known) for f in functions if hasattr(f, "py_func")}
print(repr([cuda, cpu]))
"""


def names_in(directory, seed="0"):
    """[{CUDA kernel: file}, {CPU function: digest}] as a process in this checkout has them."""
    # without byte code: Python would not see that a file has changed within a second, to one of the same size
    return ast.literal_eval(python("-Bc", NAMES, cwd=directory, PYTHONHASHSEED=seed, PYTHONPATH=""))


def test_another_checkout_of_the_same_code_has_the_same_names(tmp_path):
    """Comments, line numbers, paths and the order of hashing do not matter; a rule that changes does, to all that use
    it."""
    here, there = names_in(HERE), checkout(tmp_path)
    def edit(file, old, new):
        """Changes the first occurrence."""
        path = there / file
        text = path.read_text()
        assert old in text
        path.write_text(text.replace(old, new, 1))

    for file in "egg_kernels.py", "engine/cpu_engine.py", "kernels/ptx.py":
        edit(file, '"""\n\n', '"""\n\n# a comment, and other line numbers\n\n\n')
    assert names_in(there, "7") == here
    edit("model/state_digest.py", "0xBF58476D1CE4E5B9", "0xBF58476D1CE4E5BB")
    changed = [{name for name in new if new[name] != old[name]} for new, old in zip(names_in(there), here)]
    assert changed == [{"digest"}, {"mixed", "word_sums"}]


def test_what_a_compiler_sees():
    """Closures, globals, called functions, attributes of own modules and helper code of intrinsics count; names of
    variables outside do not."""
    def make(factor, helper=abs):
        def inner(x):
            return helper(x) * factor
        return inner

    def of(value):
        return kernel_cache.content(value, {})

    one, two = (lambda x: x + 1), (lambda x: x + 2)
    assert of(make(3)) == of(make(3)) != of(make(4)) and of(make(3, one)) != of(make(3, two))
    assert of(make(3, one)) == of(make(3, lambda x: x + 1))
    assert of(3) != of(3.0) != of(True) != of(np.float32(3)) and of(np.arange(3)) != of(np.arange(4))
    assert of({"a": 1, "b": {2, 3}}) == of({"b": {3, 2}, "a": 1})
    assert len({of(kernel_cache.njit(None)(f).py_func) for f in (one, two)}) == 2
    with raises(TypeError, match="cannot tell"):
        of(make(object()))

    def deep(x):
        return deep(x - 1) if x else 0
    assert of(deep) == of(deep)


# --- its directory ----------------------------------------------------------------------------------------------------

@fixture
def used(tmp_path, monkeypatch):
    """A function that gives the directory of the cache, as in a new process."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))

    def directory():
        kernel_cache.directory.cache_clear()
        return kernel_cache.directory()

    yield directory
    kernel_cache.directory.cache_clear()


def test_a_directory_is_used_only_if_it_is_private(tmp_path, monkeypatch, used, capsys):
    """Else another one, which others cannot have made either."""
    good, second = tmp_path / "cache" / "egg" / "kernels", tmp_path / f"egg-{os.getuid()}"
    elsewhere = tmp_path / "elsewhere"
    assert used() == good and stat.S_IMODE(good.stat().st_mode) == 0o700
    for path, bad, mended in (*((good, mode, 0o700) for mode in (0o777, 0o750, 0o755, 0o500)),
                              (good.parent, 0o777, 0o755), (tmp_path / "cache", 0o777, 0o755)):
        path.chmod(bad)
        assert used() == second
        path.chmod(mended)
        assert used() == good
    good.rename(elsewhere)
    good.symlink_to(elsewhere)
    assert used() == second
    for mode in 0o701, 0o777:
        second.chmod(mode)
        assert capsys.readouterr().err == ""
        third = used()
        assert third.parent == tmp_path and third not in (second, good, elsewhere) and kernel_cache.is_private(third)
        assert stat.S_IMODE(third.stat().st_mode) == 0o700 and capsys.readouterr().err.count("\n") == 1
    monkeypatch.setattr(os, "getuid", lambda: os.geteuid() + 1)
    assert not kernel_cache.is_private(third), "that of somebody else"


def test_damaged_and_missing_files_are_compiled_again(tmp_path, capsys):
    kernel, none = tmp_path / "kernel", tmp_path / "none"
    write(kernel, pickle.dumps([1, 2]))
    assert read(kernel) == [1, 2] and os.listdir(tmp_path) == ["kernel"]
    kernel.write_bytes(b"\x80\x05")
    assert read(kernel) is read(none) is None
    assert capsys.readouterr().err == ""
    for _ in range(2):
        write(none / "kernel", b"")
    told = f"egg: compiled kernels cannot be kept in {none}: No such file or directory\n"
    assert capsys.readouterr().err == told, "it says so once"


# --- compiling --------------------------------------------------------------------------------------------------------

CPU_PROGRAM = """
import sys, numpy as np
from engine import kernel_cache
njit = kernel_cache.njit(lambda: sys.argv[1])
SHIFT = int(sys.argv[2])
@njit
def called(x):
    return x << SHIFT
@njit
def kernel(a):
    return called(a[0]) + 1
kernel_cache.once["any"] = lambda: print("compiling")
print(kernel(np.array([3])), kernel(np.array([3])))
"""


def test_cpu_kernels_are_compiled_once(tmp_path):
    """A process finds what another one compiled, for the same vectors, constants and types."""
    def run(*arguments):
        (tmp_path / "program.py").write_text(CPU_PROGRAM)
        return python(tmp_path / "program.py", *arguments, XDG_CACHE_HOME=str(tmp_path), PYTHONPATH=str(HERE)).split()

    assert run("madd", "2") == ["compiling", "13", "13"]
    assert run("portable", "2")[0] == "compiling" and run("madd", "3") == ["compiling", "25", "25"]
    assert run("madd", "2") == ["13", "13"]
    names = sorted(path.name.rpartition("-")[0] for path in (tmp_path / "egg" / "kernels").iterdir())
    assert names == 3 * ["cpu-called"] + 3 * ["cpu-kernel"]


def test_an_inner_function_is_compiled_into_its_callers_alone():
    import numba

    @kernel_cache.inner
    def twice(x):
        return 2 * x

    assert numba.njit(lambda x: twice(x) + twice(x + 1))(5) == 22
    with raises(TypeError, match="bad argument type"):
        twice(5)


class FakeDispatcher:
    """A CUDA kernel whose compilation writes its name into the file that its cache names. "fails" is compiled by the
    process of the test alone, and every other kernel once."""
    compiled, parent = [], os.getpid()

    def __init__(self, function):
        self.py_func, self.targetoptions = function, {}
        self._cache, self.closed = None, False

    def compile(self, signature):
        assert not self.closed
        name, path = self.py_func.__name__, self._cache.cache_path
        if self._cache.load_overload(signature, mock.Mock()) is None:
            self.compiled.append(name)
            assert not path.exists()
            if name == "fails" and os.getpid() != self.parent:
                raise ValueError
            write(path, pickle.dumps(name))

    def disable_compile(self):
        self.closed = True


def fakes(names, factor=1):
    def kernel(x):
        return x * factor

    functions = [types.FunctionType(kernel.__code__, globals(), name, None, kernel.__closure__) for name in names]
    return [SimpleNamespace(name=function.__name__, dispatcher=FakeDispatcher(function), shared=0,
                            signature=(function.__name__,)) for function in functions]


@mark.parametrize("cores", [1, 3])
def test_several_processes_compile_what_is_missing(cores, tmp_path, monkeypatch, capsys):
    from engine import cuda_engine
    monkeypatch.setattr(kernel_cache, "directory", lambda: tmp_path)
    monkeypatch.setattr(cuda_engine.hardware, "cores", lambda: cores)
    monkeypatch.setattr(cuda_engine, "COMPILERS", 8)         # a comparison of engines in this process sets it to 1
    monkeypatch.setattr(cuda_engine.ptx, "allow_shared", lambda kernel, signature, shared: kernel.compile(signature))
    FakeDispatcher.compiled = []
    names = ["a", "b", "fails", "c", "d", "a"]               # two verbs have kernel a

    def compile_(names, factor=1):
        every = fakes(names, factor)
        cuda_engine.compile_all(every, CARD, "a card: step")
        assert all(kernel.dispatcher.closed for kernel in every)
        compiled, FakeDispatcher.compiled = FakeDispatcher.compiled, []
        return compiled, capsys.readouterr().err

    compiled, err = compile_(names)
    assert compiled == (names[:5] if cores == 1 else ["fails"])
    assert f"egg: compiling 5 of 5 CUDA kernels for a card: step; kept in {tmp_path}\n" in err and "ready in" in err
    assert compile_(names) == ([], ""), "everything is there"
    compiled, err = compile_(names + ["e"])
    assert "compiling 1 of 6 CUDA kernels" in err and compiled == ["e"]
    assert len(compile_(names, factor=2)[1].splitlines()) == 2, "a constant that is compiled in has changed"
    for path in tmp_path.glob("cuda-a-*"):                    # those of both factors
        path.unlink()
    assert compile_(names)[0] == ["a"], "a file a kernel"


def test_a_fork_compiles_what_a_gpu_runs(tmp_path, monkeypatch):
    """Without a GPU: to the machine code of the card, from the same PTX as numba-cuda makes alone."""
    from numba import cuda

    from engine import cuda_engine
    monkeypatch.setattr(cuda_engine, "COMPILERS", 8)
    kernels = kernels_for(configured())[2]["step"]
    made = {tmp_path / k.name: k for k in kernels if k.name in ("rescale", "cut_windows")}
    cuda_engine._compile_together(made, (9, 0), 0.0)
    for path, kernel in made.items():
        library = read(path)._codelibrary
        cubin, = library._cubin_cache.values()
        assert cubin.code.startswith(b"\x7fELF") and f".text.{library._entry_name}".encode() in cubin.code
        ptx, _ = cuda.compile_ptx(kernel.dispatcher.py_func, kernel.signature, cc=(9, 0, "a"))
        without_names = [re.sub(r"_Z\w+", "", text) for text in (ptx, library.get_asm_str((9, 0, "a")))]
        assert without_names[0].split("{")[1:] == without_names[1].split("{")[1:]
        assert not kernel.dispatcher.overloads, "this process has compiled nothing"


OTHER_VERSION = """
import os
from types import SimpleNamespace
import numba_cuda
from numba.cuda.core import ssa
numba_cuda.__version__ = "0.99.1"
del ssa._run_ssa
from engine import cuda_engine
import sys
assert "engine.quick_numba" not in sys.modules
with cuda_engine.quickly():
    pass
cuda_engine.hardware.cores, os.fork = lambda: 8, None
cuda_engine._compile_together({i: SimpleNamespace(shared=0) for i in range(3)}, (9, 0), 0.0)
"""


def test_other_versions_of_numba_are_left_as_they_are():
    """The engine loads, forks nothing, and numba compiles as it does without it."""
    python("-c", OTHER_VERSION)


def test_no_configuration_by_import():
    """Nothing is chosen or set when the engines are loaded; EGG_SIMD reaches the engine by the configuration."""
    code = ("import os, sys, numba, egg_config\nos.environ['EGG_SIMD'] = 'portable'\n"
            "before = dict(os.environ), numba.config.CACHE_DIR\n"
            "from engine import cpu_engine, cuda_engine, engines, hardware, simd\n"
            "assert simd.KIND is None and (dict(os.environ), numba.config.CACHE_DIR) == before\n"
            "shape = ['CHUNK_SIZE=2', 'VOCAB_SIZE=256', 'N_LAYERS=1', 'HIDDEN_DIM=64']\n"
            "print(engines.make(egg_config.load(defines=shape), None, 'cpu', 1).name)\n"
            "try:\n    engines.make(egg_config.load(defines=[*shape, 'SIMD=' + sys.argv[1]]), None)\n"
            "except hardware.EngineError as error:\n    print(error)\n")
    first = simd.available()[0]
    refused = f"SIMD = {first}: this process has compiled for portable already; start another one\n"
    said = subprocess.run([sys.executable, "-c", code, first], cwd=HERE, capture_output=True, text=True).stdout
    assert said.endswith(f"cpu portable x1\n{'' if first == 'portable' else refused}"), said


STEP_PROGRAM = """
import sys, egg_config
from engine import cpu_engine


def compiled():
    files = [vars(module) for name, module in sys.modules.items() if name.startswith("engine.cpu_")]
    functions = [f for file in files for f in file.values() if getattr(f, "overloads", None)]
    assert not [f for f in functions if f.py_func.__module__ == "engine.cpu_gru"]
    return {f.py_func.__name__ for f in functions}

cpu_engine.warm_up(egg_config.make())
assert compiled() >= {"run_windows", "panel_votes", "apply_votes", "pack"}, compiled()
assert not compiled() & {"word_sums", "write_texts", "muon_start", "muon_panels"}, compiled()
cpu_engine.warm_up(egg_config.make(), verbs=("digest",))
assert "word_sums" in compiled()
"""


def test_a_training_step_compiles_its_own_kernels_alone(compiled):
    """Or loads them, where they are in the cache: neither Muon's, nor those of generation and digests, nor the other
    model's."""
    python("-c", STEP_PROGRAM)


COLD_PROGRAM = """
import os, egg_config
from engine import cpu_engine, hardware, kernel_cache

hardware.cores = lambda: 2
save = kernel_cache.CpuCache.save_overload

def noted(cache, signature, result):
    with open(os.environ["COMPILED"], "a") as file:
        file.write(f"{os.getpid()} {cache._function.__name__}\\n")
    save(cache, signature, result)

kernel_cache.CpuCache.save_overload = noted
cpu_engine.warm_up(egg_config.make(), verbs=cpu_engine.VERBS)
"""


def test_a_cold_start_compiles_each_function_once(tmp_path, others_wait):
    """Three processes share the work, and whoever needs what another one compiles waits for it; no lock is left."""
    python("-c", COLD_PROGRAM, XDG_CACHE_HOME=str(tmp_path), COMPILED=str(tmp_path / "compiled"))
    pids, names = zip(*(line.split() for line in (tmp_path / "compiled").read_text().splitlines()))
    assert len(names) == len({*names}) and {"run_windows", "apply_votes", "write_texts"} <= {*names}
    assert len({*pids}) == 3, "two forks took part"
    files = [*(tmp_path / "egg" / "kernels").iterdir()]
    assert sorted(path.name.rpartition("-")[0] for path in files) == sorted(f"cpu-{name}" for name in names)
    for path in files:                                       # the other tests need not compile the same again
        write(kernel_cache.directory() / path.name, path.read_bytes())


FORK_PROGRAM = """
import os, time
from engine import kernel_cache
ready, begun = os.pipe()
kernel_cache.forked(lambda: (os.write(begun, b"."), time.sleep(60)))
os.read(ready, 1)
os.kill(os.getpid(), 9)
"""


def test_a_fork_ends_with_its_process():
    """Else `run` would wait, because the fork has the same output."""
    ended = subprocess.run([sys.executable, "-c", FORK_PROGRAM], cwd=HERE, capture_output=True, timeout=30)
    assert ended.returncode == -9


def test_an_interrupted_compilation_holds_no_lock(tmp_path, monkeypatch):
    """Else the next one would wait for it for ever."""
    taken, flock, cache = [], fcntl.flock, kernel_cache.CpuCache(python, None)
    monkeypatch.setattr(cache, "_path", lambda *_: tmp_path / "cpu-function-1")
    monkeypatch.setattr(fcntl, "flock", lambda file, how: taken.append(flock(file, how | fcntl.LOCK_NB)))
    for times in 1, 2:
        assert cache.load_overload(None, mock.Mock()) is None
        assert len(taken) == times
    cache.save_overload(None, SimpleNamespace(library=SimpleNamespace(has_dynamic_globals=True)))
    assert not any(tmp_path.iterdir())


def test_a_function_that_another_process_compiles_is_waited_for(tmp_path):
    """Three processes that begin together compile it once in all."""
    (tmp_path / "program.py").write_text(CPU_PROGRAM.replace("\nprint", """
save = kernel_cache.CpuCache.save_overload
kernel_cache.CpuCache.save_overload = lambda *a: (time.sleep(0.2), print("compiled"), save(*a))
print""").replace("import sys,", "import sys, time,"))
    def run(_):
        return python(tmp_path / "program.py", "madd", "2", XDG_CACHE_HOME=str(tmp_path), PYTHONPATH=str(HERE)).split()

    with concurrent.futures.ThreadPoolExecutor(3) as pool:
        said = [*pool.map(run, range(3))]
    assert all(words[-2:] == ["13", "13"] for words in said) and sum(words.count("compiled") for words in said) == 2


# --- forged files -----------------------------------------------------------------------------------------------------

def test_a_kernel_that_is_not_ours_or_a_link_is_not_read(tmp_path):
    kernel, link = tmp_path / "kernel", tmp_path / "link"
    write(kernel, pickle.dumps("compiled"))
    assert read(kernel) == "compiled"
    link.symlink_to(kernel)
    assert read(link) is None
    with mock.patch("os.getuid", lambda: os.geteuid() + 1):
        assert read(kernel) is None


def test_old_kernels_are_removed(tmp_path):
    for i, days in enumerate((400, 100, 30, 1)):
        path = tmp_path / f"cpu-kernel-{i}"
        path.write_bytes(bytes(1000))
        os.utime(path, (time.time() - days * 86400,) * 2)
    kernel_cache.prune(tmp_path, most=2000)
    assert sorted(os.listdir(tmp_path)) == ["cpu-kernel-2", "cpu-kernel-3"]
    read(tmp_path / "cpu-kernel-2")                 # is used now
    kernel_cache.prune(tmp_path, most=1500)
    assert os.listdir(tmp_path) == ["cpu-kernel-2"]
