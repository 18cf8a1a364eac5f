"""The cache of compiled kernels: what names a kernel, its directory, and what a cold start compiles."""

import concurrent.futures
import os
import pickle
import shutil
import stat
import subprocess
import sys
import tempfile
import time
from unittest import mock

from pytest import fixture, mark, raises

import egg_config
from engine import kernel_cache, simd
from engine.kernel_cache import read, write
from compiling import kernels_for, kernels_of
from recordings import HERE, python
from readings import configured

CARD = (8, 0)


# --- names of compiled kernels ----------------------------------------------------------------------------------------

def cuda_files(*defines, cc=CARD):
    return {kernel.file for kernel in kernels_of(configured(None, *defines), cc)}


def test_cuda_kernels_are_named_by_what_they_can_depend_on():
    base = cuda_files()
    for define in "LR_SCHEDULE=0:0.1", "VALIDATE_EVERY=77", "PORT=1", "SAMPLING_TEMP=0.1", "INPUT_FILE=x":
        assert cuda_files(define) == base, define
    for define in "DEVICE_MASK=7", "ADAM_EPS=0.5", "SIGMA_SHIFT=5", "GROUP_SIZE=4":
        assert not cuda_files(define) & base, define
    assert not cuda_files(cc=(8, 6)) & base
    newest, mma = (cuda_files(*more, cc=(9, 0)) for more in ((), ("TENSOR_CORES=mma",)))
    shared = {name.split("-")[1] for name in newest & mma}
    assert "optimize" in shared and not shared & {"up", "norm", "head", "pack"}


def test_no_kernel_can_read_a_constant_that_does_not_name_it():
    frozen = configured().compiled()
    assert frozen.HIDDEN_DIM and frozen.NOISE_SHIFT
    for name in "LR_SCHEDULE", "PORT", "VALIDATE_EVERY":
        with raises(egg_config.ConfigError, match="missing"):
            getattr(frozen, name)


def test_an_edit_of_any_source_names_every_kernel_anew(tmp_path, monkeypatch):
    """And another checkout of the same sources has the same kernels."""
    for folder in "", "model", "kernels", "engine":
        (tmp_path / folder).mkdir(exist_ok=True)
        for path in (HERE / folder).glob("*.py"):
            shutil.copy(path, tmp_path / folder)
    here = kernel_cache.OF_SOURCES
    assert kernel_cache.digest_of_sources(tmp_path) == here
    base = cuda_files()
    for file in "egg_kernels.py", "engine/cpu_kernels.py", "kernels/ptx.py", "model/rules.py":
        path = tmp_path / file
        path.write_text(path.read_text() + "\n")
        edited = kernel_cache.digest_of_sources(tmp_path)
        assert edited != here, file
        monkeypatch.setattr(kernel_cache, "OF_SOURCES", edited)
        assert not cuda_files() & base
        write(tmp_path / "kernel", b"")
        assert not (tmp_path / "kernel").exists(), "edited while the process ran: it may have read either"
        shutil.copy(HERE / file, path)


@mark.parametrize("preset", [None, "nano-egg", "laptop-bytes"])
def test_a_run_compiles_what_its_verbs_use(preset):
    """Validation and generation share the pass over rows, which a step takes with unit trials alone; Muon's kernels are
    there only if they are used."""
    cfg = configured(preset)
    every = kernels_for(cfg)[2]
    assert set(every) == {"load", "step", "validate", "write", "digest"} and all(every.values())
    names = {verb: {kernel.name for kernel in kernels} for verb, kernels in every.items()}
    of_rows = {*every["write"]} & {*every["validate"]}
    for verb, own in dict(digest="digest", write="choose", validate="nats").items():
        assert {kernel.name for kernel in {*every[verb]} - of_rows} == {own} and own not in names["step"]
    assert {"unpack", "optimize"} <= names["step"]
    assert ("operands" in names["step"]) == (cfg.PERTURB == "weights")
    assert any("muon" in name for name in names["step"]) == bool(cfg.USE_MUON)
    assert len(of_rows) > 5 and of_rows & {*every["step"]} == (of_rows if cfg.PERTURB == "units" else set())


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
    """Else a new one, with a line that says so."""
    good = tmp_path / "cache" / "egg" / "kernels"
    assert used() == good and stat.S_IMODE(good.stat().st_mode) == 0o700

    def refused():
        other = used()
        return (other != good and stat.S_IMODE(other.stat().st_mode) == 0o700
                and capsys.readouterr().err.count("\n") == 1)

    for mode in 0o777, 0o750, 0o755, 0o500:
        good.chmod(mode)
        assert refused()
    good.chmod(0o2700)
    assert used() == good, "it inherits set-group-id"
    good.chmod(0o700)
    with mock.patch("os.getuid", lambda: os.geteuid() + 1):
        assert refused()
    with mock.patch("pathlib.Path.touch", side_effect=OSError):
        assert refused(), "nothing can be written there"
    assert used() == good
    good.rename(tmp_path / "elsewhere")
    good.symlink_to(tmp_path / "elsewhere")
    assert refused()


def test_damaged_and_missing_files_are_compiled_again(tmp_path, monkeypatch, capsys):
    kernel = tmp_path / "kernel"
    write(kernel, pickle.dumps([1, 2]))
    assert read(kernel) == [1, 2] and os.listdir(tmp_path) == ["kernel"]
    kernel.write_bytes(b"\x80\x05")
    assert read(kernel) is read(tmp_path / "none") is None
    assert capsys.readouterr().err == ""
    kernel_cache.cannot_keep.cache_clear()
    for _ in range(2):
        write(tmp_path / "none" / "kernel", b"")
    assert capsys.readouterr().err.count("cannot be kept in") == 1, "it says so once"


def test_what_was_not_used_for_a_month_is_removed(tmp_path, used):
    used().joinpath("new").touch()
    old = used() / "old"
    old.touch()
    os.utime(old, (time.time() - 40 * 86400,) * 2)
    assert sorted(os.listdir(used())) == ["last-use", "new"]


# --- compiling --------------------------------------------------------------------------------------------------------

CPU_PROGRAM = """
import sys, numpy as np
from engine import kernel_cache, simd
from engine.cpu_rules import inner, njit
simd.use(sys.argv[1])
@inner
def called(x):
    return x << 2
@njit
def kernel(a):
    return called(a[0]) + 1
save = kernel_cache.CpuCache.save_overload
kernel_cache.CpuCache.save_overload = lambda *a: (print("compiled"), save(*a))
print(kernel(np.array([3])), kernel(np.array([3])))
"""


def test_cpu_kernels_are_compiled_once(tmp_path):
    """A process finds what another one compiled, for the same vectors and types."""
    (tmp_path / "program.py").write_text(CPU_PROGRAM)

    def run(kind):
        return python(tmp_path / "program.py", kind, XDG_CACHE_HOME=str(tmp_path), PYTHONPATH=str(HERE)).split()

    assert run("madd") == ["compiled", "13", "13"] and run("madd") == ["13", "13"]
    assert run("portable")[0] == "compiled"


def test_a_new_process_compiles_what_a_gpu_runs(tmp_path):
    """Without a GPU: to the machine code of the card."""
    from engine import cuda_engine
    made = {tmp_path / k.name: k for k in kernels_for(configured())[2]["step"] if k.name in ("rescale", "unpack")}
    with mock.patch.object(cuda_engine, "COMPILERS", 8), mock.patch.object(cuda_engine.hardware, "cores", lambda: 2):
        cuda_engine._compile_together(made, (9, 0), 0.0)
    for path, kernel in made.items():
        library = read(path)._codelibrary
        cubin, = library._cubin_cache.values()
        assert cubin.code.startswith(b"\x7fELF") and f".text.{library._entry_name}".encode() in cubin.code
        assert not kernel.dispatcher.overloads, "this process has compiled nothing"


def test_no_configuration_by_import():
    """Nothing is chosen or set when the engines are loaded; EGG_SIMD reaches the engine by the configuration."""
    code = ("import os, sys, numba, egg_config\nos.environ['EGG_SIMD'] = 'portable'\n"
            "before = dict(os.environ), numba.config.CACHE_DIR\n"
            "from engine import cpu_engine, cuda_engine, hardware, simd\nfrom tools import train\n"
            "assert simd.KIND is None and (dict(os.environ), numba.config.CACHE_DIR) == before\n"
            "shape = ['CHUNK_SIZE=2', 'VOCAB_SIZE=256', 'N_LAYERS=1', 'HIDDEN_DIM=64']\n"
            "print(train.make_engine(egg_config.load(defines=shape), None, 'cpu', 1).name)\n"
            "try:\n    train.make_engine(egg_config.load(defines=[*shape, 'SIMD=' + sys.argv[1]]), None)\n"
            "except hardware.EngineError as error:\n    print(error)\n")
    first = [*simd.available()][0]
    refused = f"SIMD = {first}: this process has compiled for portable already; start another one\n"
    said = subprocess.run([sys.executable, "-c", code, first], cwd=HERE, capture_output=True, text=True).stdout
    assert said.endswith(f"cpu portable x1\n{'' if first == 'portable' else refused}"), said


def test_processes_that_start_together_compile_once(tmp_path):
    """Those that come later wait, and load what the first has compiled."""
    code = ("import egg_config\nfrom engine import cpu_engine, kernel_cache\n"
            "save = kernel_cache.CpuCache.save_overload\n"
            "kernel_cache.CpuCache.save_overload = lambda *a: (print('compiled', flush=True), save(*a))\n"
            "cpu_engine.warm_up(egg_config.make(), verbs=('digest',))\n")
    with concurrent.futures.ThreadPoolExecutor(3) as pool:
        said = [*pool.map(lambda _: python("-c", code, XDG_CACHE_HOME=str(tmp_path)), range(3))]
    assert sorted("compiled" in words for words in said) == [False, False, True]


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
