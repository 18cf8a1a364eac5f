"""The CUDA engine: every kernel compiles for every supported card (no GPU needed); on a GPU (`pytest -m gpu`) the
engine is held against the golden recordings and, on random configurations, against the CPU engine."""

import contextlib
import gc
import hashlib
import re
import time
from unittest import mock

import numpy as np
from numpy.random import default_rng
import sanitize
from numba import cuda
from numba.cuda.np.numpy_support import from_dtype
from numpy import int32, int64, uint32
from pytest import approx, fixture, mark, param, raises

import no_device
from egg_config import make
from engine import cuda_engine
from engine.cpu_engine import CpuEngine
from engine.cuda_engine import CudaEngine
from kernels import attention, head, host, parts, product, transformer, update
from kernels import rules as noise_rules
from model import parameters, rules
from model.reading import Reading
from compiling import CARDS
from engines_compared import SEED, begun_ahead
from fakes import any_fitness, step_alone
from readings import TINY, as_data, equal, random_config, votes_on
from recordings import HERE, digests, golden, hold_against_recording, recorded_digests


# --- without a GPU ----------------------------------------------------------------------------------------------------

@mark.parametrize("kib", sorted(set(CARDS.values())))
def test_every_shape_fits_every_card(kib, monkeypatch):
    """Tiles exist for every width and length: no kernel needs more shared memory than a block has, beside 1 KiB. Of a
    card only its memory and its instructions matter here."""
    for module in attention, head, noise_rules, parts, product, transformer:
        for decorator in {"device", "unroll"} & vars(module).keys():         # nothing is compiled
            monkeypatch.setattr(module, decorator, lambda function: function)
    for H in range(64, 1025, 32):
        for T in 8, 1000:                                    # mode 2 needs the largest tables
            cfg = make(HIDDEN_DIM=H, HEAD_DIM=32, SEQ_LEN=T, N_LAYERS=1, ADAPTIVE_NOISE_MODE=2)
            for wgmma in {kib == CARDS[9, 0], False}:
                gpu = parts.Gpu((9, 0), kib * 1024, wgmma)
                kernels = transformer.Kernels(cfg, host.Packing(cfg), gpu)
                for kernel in kernels.all:
                    assert kernel.shared <= (kib - 1) * 1024, (H, T)
                for kernel in kernels.full_width.values():
                    shape = kernel.shape
                    assert H <= shape.columns < 2 * H and 16 <= shape.N <= 128 and shape.N % 16 == 0


def test_the_work_of_the_kernels_gives_the_votes():
    """The walk of the update's kernels, done by NumPy, against the sums of SPEC 9."""
    cfg = make(HIDDEN_DIM=96, HEAD_DIM=32, N_LAYERS=2, SEQ_LEN=8, VOCAB_SIZE=301, CHUNK_SIZE=74)
    work, pairs, state = update.work(cfg), np.arange(cfg.N_PAIRS), parameters.initial_state(cfg)
    packed, state.seed = any_fitness(cfg, SEED), 4000000000
    fitness = rules.unpacked_digits(packed, cfg.N_PAIRS)
    n = np.arange(work.span)
    operands = np.zeros((len(work.rows), n.size), int64)
    for row, (index, delta, shift, low, high) in zip(operands, work.rows.astype(int64)):
        row[:] = Reading(cfg, state, state.seed + n).noise(delta, index)
        if shift >= 0:
            signs = fitness[np.clip(n - shift, 0, cfg.N_PAIRS - 1)]
            row *= np.where((n >= shift) & (n < shift + cfg.N_PAIRS), signs, 0)
        row[:low] = row[high:] = 99                          # what no one may look at, or only times nought
    votes = np.zeros(parameters.n_weights(cfg), int64)
    for plain, signed, n_plain, n_signed, low, high, at, cols, signed_is_row, first in work.tiles:
        product = operands[plain:plain + n_plain, low:high] @ operands[signed:signed + n_signed, low:high].T
        p, s = np.meshgrid(plain + np.arange(n_plain), first + np.arange(n_signed), indexing="ij")
        r, c = (s, p) if signed_is_row else (p, s)
        np.add.at(votes, at + (r >> 2) * 4 * cols + c * 4 + (r & 3), product)
    for first, size, *streams in work.vectors:
        for i in range(size):
            draws = [Reading(cfg, state, state.seed + pairs).noise(stream, i) for stream in streams]
            votes[first + i] = np.prod(draws, 0) @ fitness
    for t in parameters.tensors(cfg):
        equal(votes[t.span], votes_on(cfg, state, t, packed), t)


@mark.parametrize("wrong", [False, True])
def test_a_graph_is_captured_while_nothing_is_freed(wrong, monkeypatch):
    """An error ends the capture, too; else the thread could allocate nothing any more."""
    did = []

    @contextlib.contextmanager
    def defer_cleanup():
        did.append("defer")
        yield
        did.append("free")

    def enqueue():
        assert not gc.isenabled() or "launch" not in did
        did.append("launch")
        if wrong and len(did) > 1:
            raise ValueError

    driver = mock.MagicMock()
    driver.cuStreamBeginCapture.side_effect = lambda *_: did.append("begin") or (0,)
    driver.cuStreamEndCapture.side_effect = lambda *_: did.append("end") or (0, "graph")
    driver.cuGraphInstantiate.return_value = 0, "executable"
    driver.cuGraphDestroy.return_value = driver.cuGraphLaunch.return_value = 0,
    monkeypatch.setattr(cuda_engine, "driver", driver)
    monkeypatch.setattr(cuda, "defer_cleanup", defer_cleanup)
    replay = cuda_engine.Replay(mock.MagicMock(), enqueue)
    replay()
    with raises(ValueError) if wrong else contextlib.nullcontext():
        replay()
    assert did == ["launch", "defer", "begin", "launch", "end", *["free"] * (not wrong)] and gc.isenabled()
    assert driver.cuGraphLaunch.call_count == 1 - wrong


@fixture
def no_gpu(monkeypatch):
    """numba.cuda without a GPU: arrays lie on the host, kernels check the kind of their arguments and do nothing."""
    def launcher(self, configuration):
        code, kernel = self.py_func.__code__, self.py_func.__name__

        def launch(*args):
            assert len(args) == code.co_argcount == len(self.expected), kernel
            for name, value, kind in zip(code.co_varnames, args, self.expected):
                if isinstance(value, np.ndarray):
                    assert (kind.dtype, kind.ndim) == (from_dtype(value.dtype), value.ndim), f"{kernel}: {name}"
                else:
                    assert not hasattr(kind, "ndim"), f"{kernel}: {name}"
        return launch

    def compile_all(every, capability, what):
        for kernel in every:
            kernel.dispatcher.expected = kernel.signature
        return 0.0

    for name, value in vars(no_device.DRIVER).items():
        monkeypatch.setattr(cuda.cudadrv.driver, name, value)
    names, _ = no_device.names(lambda shape, dtype: np.zeros(shape, dtype).view(no_device.HostArray))
    for name, value in names.items():
        monkeypatch.setattr(cuda, name, value)
    monkeypatch.setattr(type(cuda.jit(lambda: None)), "__getitem__", launcher)
    monkeypatch.setattr(cuda_engine, "compile_all", compile_all)
    monkeypatch.setattr(cuda_engine.ptx, "shared_limit", lambda gpu: CARDS[9, 0] * 1024)
    monkeypatch.setattr(cuda_engine, "Replay", lambda stream, enqueue: enqueue)


@mark.parametrize("constants", [{}, dict(MODEL="gru", USE_MUON=1, GROUP_SIZE=4)], ids=str)
def test_the_host_side_of_the_engine(constants, no_gpu):
    """Every verb, with kernels that do nothing: what the engine allocates, what it launches, with which arguments.
    More shapes are those of the sanitizers."""
    cfg = make(**{"N_LAYERS": 2, "VOCAB_SIZE": 512, "CHUNK_SIZE": 8, "POPULATION_SIZE": 16, **constants})
    tokens = np.arange(2000, dtype=uint32) % cfg.VOCAB_SIZE
    memory = cuda.current_context().get_memory_info()
    for trains in True, False:
        engine = CudaEngine(cfg, tokens if trains else None)
        later = {"validate", "write", "digest"}           # compiled at their first use
        assert set(engine._waiting) == (later if trains else later | {"step"})
        if trains:
            engine.begin(8, 8)
            engine.begin(0, 4)
            assert engine.evaluate(8, 8).shape == (8,) and len(engine._begun) == 1
            assert engine._job.tolist() == [engine.seed, 0]
            assert engine.evaluate(0, 4).shape == (4,) and not engine._begun
            memory.free, free = 1 << 10, memory.free
            assert not engine.begin_update(any_fitness(cfg, 1)), "no room for a copy of the state"
            memory.free, engine._saved = free, None
            assert engine.begin_update(any_fitness(cfg, 1))
            engine.begin(0, 8)
            assert engine._job[0] == engine._at[1] != engine.seed
        sanitize.every_verb(engine, tokens, default_rng(SEED))
        assert engine.step == 1 and len(engine.digest()) == 16 and not engine._waiting


@mark.parametrize("name", sanitize.CONFIGURATIONS)
def test_what_the_sanitizers_are_given(name, no_gpu):
    assert re.fullmatch("[0-9a-f]{64}", sanitize.digest_of(name))


# --- on a GPU ---------------------------------------------------------------------------------------------------------

gpu = mark.gpu


def digest(array):
    """SHA-256 of an array, as int32."""
    return hashlib.sha256(array.astype(int32).tobytes()).hexdigest()


@gpu
@mark.parametrize("name", "ABD")
def test_golden(name):
    hold_against_recording(CudaEngine, name)


@gpu
def test_golden_default_configuration():
    """All 327,680 members of all six steps, against d-eggs with its data race mended (SPEC 11); and against its
    recording as far as the race left that alone: the recorded losses, the fitness of two steps and the states after
    them."""
    cfg, tokens, recorded = golden("E")
    mended, engine = np.load(HERE / "tests" / "golden" / "E_mended.npz"), CudaEngine(cfg, tokens)
    assert digests(engine.state())[0] == str(recorded["init_model_sha256"])
    for step in range(6):
        packed, losses, _ = step_alone(engine)
        fitness, chunks = rules.unpacked_digits(packed, cfg.N_PAIRS), losses.reshape(cfg.N_CHUNKS, -1)
        if step == 0:
            equal(chunks[:, :256], recorded["loss_head"])
        assert [*map(digest, chunks)] == mended["loss_sha256"][step].tolist(), f"losses of step {step}"
        for data in (mended, recorded)[:2 if step < 2 else 1]:
            assert digest(fitness) == str(data["fitness_sha256"][step]), f"fitness of step {step}"
            assert digests(engine.state()) == recorded_digests(data, step), f"update {step}"


@gpu
@mark.parametrize("constants", [
    dict(LOSS="exact"), dict(MODEL="gru", N_LAYERS=1, VOCAB_SIZE=256),
    dict(LOSS="exact", VOCAB_SIZE=256, SOFT_TARGETS=((0, 1), (1, 2), (2, 0)))], ids=str)
def test_evaluations_begun_ahead(constants):
    """Right and wrong expectations, of evaluations and updates: the same losses, changes and states as without, in
    three steps."""
    cfg = make(**constants, HIDDEN_DIM=128, CHUNK_SIZE=512, POPULATION_SIZE=1024, SEQ_LEN=32)
    tokens = as_data(cfg, default_rng(SEED).integers(0, cfg.VOCAB_SIZE, 10000))
    plain, ahead = CudaEngine(cfg, tokens), CudaEngine(cfg, tokens)
    windows = rules.windows(cfg, tokens, 0, 0, 2)
    for step, fitness in begun_ahead(plain, ahead, 300):
        assert ahead.begin_update(fitness if step < 2 else any_fitness(cfg, 9))
        ahead.begin(0, 300 if step else 2)
        if step == 1:
            equal(ahead.evaluate(0, 512), plain.evaluate(0, 512), "the update is undone")
            ahead.begin_update(fitness)
            assert ahead.validate(windows) == plain.validate(windows)
            ahead.begin_update(fitness)
            ahead.begin(0, 300)
        assert ahead.update(fitness) == plain.update(fitness)
        assert digests(ahead.state()) == digests(plain.state())


@gpu
def test_a_digest_takes_less_than_2_ms():
    """That it is that of the CPU engine shows the comparison of both."""
    engine, times = CudaEngine(make()), []
    for _ in range(20):
        started = time.perf_counter()
        engine.digest()
        times.append(time.perf_counter() - started)
    assert min(times) < 2e-3, f"{1e3 * min(times):.2f} ms"           # others may be at work on the GPU


LOUD = dict(HIDDEN_DIM=256, HEAD_DIM=64, N_LAYERS=1, SEQ_LEN=64, ADAPTIVE_NOISE_MODE=1)
EXTREMES = (
    dict(TINY, HEAD_DIM=64, SEQ_LEN=1024, VOCAB_SIZE=256, NTT_MODE=3),
    dict(TINY, HIDDEN_DIM=1024, HEAD_DIM=128, VOCAB_SIZE=256),
    dict(TINY, HIDDEN_DIM=1024, SEQ_LEN=16, VOCAB_SIZE=5000, ADAPTIVE_NOISE_MODE=2),
    dict(TINY, VOCAB_SIZE=262144),
    dict(TINY, N_LAYERS=64, VOCAB_SIZE=257),
    dict(TINY, HIDDEN_DIM=96, N_LAYERS=2, VOCAB_SIZE=300, CHUNK_SIZE=2, POPULATION_SIZE=2),
    # noise that float32 and bytes hold, and noise that they do not
    dict(LOUD, VOCAB_SIZE=9000, ADAPTIVE_NOISE_INIT=64),
    dict(LOUD, HEAD_DIM=32, VOCAB_SIZE=5000, ADAPTIVE_NOISE_MODE=2, ADAPTIVE_NOISE_INIT=64),
    dict(LOUD, HEAD_DIM=128, N_LAYERS=2, VOCAB_SIZE=300, ADAPTIVE_NOISE_INIT=100),
    dict(LOUD, VOCAB_SIZE=400, DEVICE_GAUSSIAN=0, DEVICE_MASK=127, SIGMA_SHIFT=0, SHIFT_LOGIT=6),
)
SWITCHES = (
    dict(USE_MUON=1, NTT_MODE=1),
    dict(USE_MUON=1, MUON_NS="cubic", MUON_LR_SCALE=4.0, NTT_MODE=3),
    dict(NTT_MODE=2, NTT_CAUSAL=0, USE_CLT=0, USE_SAME_DATA=1, LOSS="exact",
         LR_SCHEDULE=((0, 1.2), (1, 0.6), (2, 0.3))),
    dict(OPTIMIZER="sgd", DEVICE_GAUSSIAN=1, DEVICE_MASK=31, HOST_GAUSSIAN=1, HOST_MASK=7, ADAPTIVE_NOISE_MODE=2),
    dict(SOFT_TARGETS=((0, 2), (1, 0), (2, 1)), LOSS="exact", NTT_MODE=2, DEVICE_GAUSSIAN=1, ADAPTIVE_NOISE_MODE=2),
)
# in the shape of the default configuration or in a small one
SHAPES = {}, dict(HIDDEN_DIM=96, HEAD_DIM=32, SEQ_LEN=32, VOCAB_SIZE=300)
SWITCHED = [dict(CHUNK_SIZE=16, POPULATION_SIZE=32, **SHAPES[i % 2], **switches) for i, switches in enumerate(SWITCHES)]
SWITCHED += [dict(TINY, HIDDEN_DIM=160, SEQ_LEN=72, VOCAB_SIZE=256, CHUNK_SIZE=38, POPULATION_SIZE=76, GROUP_SIZE=38,
                  LOSS="exact", SOFT_TARGETS=((0, 3), (2, 1)))]


def drawn(number, constants):
    """The constants of a configuration of which all but these are drawn; every second one has Muon."""
    shape = dict(CHUNK_SIZE=6, POPULATION_SIZE=12, LR_SCHEDULE=((0, 1.2),))
    muon = dict(USE_MUON=1, OPTIMIZER="adamw", MUON_LR_SCALE=5.0) if number % 2 else {}
    return random_config(default_rng(SEED + number), **{**shape, **muon, **constants}).constants()


@gpu
@mark.parametrize("constants, seed", [
    param(constants, SEED + i, id=f"{'extreme' if i < len(EXTREMES) else 'switch'}{i}")
    for i, constants in enumerate([*map(drawn, range(len(EXTREMES)), EXTREMES), *SWITCHED])])
def test_random_configurations_against_the_cpu_engine(compared):
    """The extremes and every switch: losses, three updates, validation, generation."""
    assert compared == ""


READ = dict(SEQ_LEN=48, VOCAB_SIZE=300, N_LAYERS=2, HIDDEN_DIM=96, HEAD_DIM=32, ADAPTIVE_NOISE_MODE=0, LOSS="exact",
            CHUNK_SIZE=8, POPULATION_SIZE=16)
READ_GRU = dict(READ, MODEL="gru", HEAD_DIM=64)


@gpu
@mark.parametrize("constants", [
    READ, dict(READ, PERTURB="units", TENSOR_CORES="mma"), dict(READ, SHIFT_LOGIT=5), dict(READ, VOCAB_SIZE=20000),
    dict(READ, HIDDEN_DIM=1024, HEAD_DIM=128, N_LAYERS=1, TENSOR_CORES="mma"),
    dict(READ, SEQ_LEN=64, NTT_MODE=2, NTT_CAUSAL=0), READ_GRU, dict(READ_GRU, PERTURB="units", STATE_TOKENS=5),
    dict(READ_GRU, HIDDEN_DIM=1024, N_LAYERS=1)], ids=str)
def test_windows_and_texts_in_slices(constants, cpu_compiled, monkeypatch):
    """More windows than have their logits in memory at once, in the recurrent model of another length, and texts beyond
    SEQ_LEN; then in slices, a small one last: as the CPU engine gives them."""
    cfg, rng = make(**constants), default_rng(SEED)
    engines = gpu_engine, cpu = CudaEngine(cfg), CpuEngine(cfg)
    length = 70 if cfg.MODEL == "gru" else cfg.SEQ_LEN
    windows = rng.integers(0, cfg.VOCAB_SIZE, (9000 // length, length + 1)).astype(int32)
    texts, lengths = rng.integers(0, cfg.VOCAB_SIZE, (137, cfg.SEQ_LEN + 30)).astype(int32), rng.integers(1, 50, 137)
    windows[::3] %= 5                                        # the recurrent model is reset
    texts[::3] %= 5
    state, settings = gpu_engine.state(), rules.sampling_settings(cfg, temp=0.8, min_p=0.01, penalty=0.1)
    state.weights[:] = rng.integers(-25, 26, state.weights.size)

    def write(engine):
        written = texts.copy()
        engine.write(written, lengths, np.arange(137, dtype=uint32), settings)
        return written

    for engine in engines:
        engine.load(state)
    nats, count = cpu.validate(windows)
    want = approx(nats, rel=1e-12), count                    # exact but for the order of a sum of float64
    written = write(cpu)
    assert gpu_engine.validate(windows) == want
    equal(write(gpu_engine), written)
    monkeypatch.setattr(cuda_engine, "largest", lambda size, most, budget: min(most, 5))
    gpu_engine._texts = None
    assert gpu_engine.validate(windows) == want
    equal(write(gpu_engine), written)


@gpu
def test_more_positions_than_the_memory_holds():
    engine = CudaEngine(make(**TINY, VOCAB_SIZE=256, CHUNK_SIZE=4))
    with raises(MemoryError, match="positions"):
        next(engine.generate([1], 1 << 32, 0))


@gpu
def test_compiled_kernels_are_kept(tmp_path, monkeypatch, capfd):
    """A learning rate is not compiled in; a verb's kernels are compiled at its first use."""
    monkeypatch.setattr("engine.kernel_cache.directory", lambda: tmp_path)
    cfg, tokens = make(**TINY, VOCAB_SIZE=256, CHUNK_SIZE=4), np.zeros(100, np.uint8)
    first, fitness = CudaEngine(cfg, tokens), any_fitness(cfg, 1)
    assert "compiling" in capfd.readouterr().err
    second = CudaEngine(cfg.changed(LR_SCHEDULE=((0, 0.5),), VALIDATE_EVERY=3), tokens)
    assert first.update(fitness) == second.update(fitness) and digests(first.state()) == digests(second.state())
    assert capfd.readouterr().err == "" and second.compile_seconds < first.compile_seconds / 2
    assert first.digest() == second.digest()
    assert capfd.readouterr().err.count("egg: compiling 1 of 1 CUDA kernels") == 1
