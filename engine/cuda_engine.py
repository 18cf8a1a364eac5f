"""The CUDA engine: the verbs of an engine on an NVIDIA GPU of compute capability 8.0 or newer, with the same bits as
`engine.cpu_engine`.

Forward pass of both models: `egg_kernels`. Update: `kernels.update`. Here: device memory, compiled kernels kept on
disk, launch sequences replayed as CUDA graphs, token choice on the device.
"""

import bisect
import collections
import functools
import gc
import pickle
import struct
import subprocess
import sys
import time
from unittest import mock

import numba_cuda
import numpy as np
from cuda.bindings import driver
from numba import cuda, float32, int32, int64, types, uint8, uint32, uint64
from numba.cuda.core import config as numba_config
from numba.cuda import dispatcher
from numba.cuda.cudadrv import devices
from numba.cuda.cudadrv.error import CudaSupportError

import egg_kernels
from engine import hardware, kernel_cache
from engine.kernel_cache import show, tell
from kernels import ptx, tiles, update
from kernels.host import Kernel
from kernels.parts import A32, A64, AU32, B1, F1, blocks
from kernels.reading import bytes_of, sizes
from kernels.rules import TARGET, device
from kernels.trials import Trials, chunk_sizes
from kernels.units import logit_type, warp_sum, wide
from model import integer_tables, parameters, rewards, rules, soft_targets, steps

numba_config.CUDA_LOW_OCCUPANCY_WARNINGS = 0      # small configurations have small grids

BLOCK = 256                 # threads of the small kernels
CHOOSERS = 1024             # threads that choose a token, at most
MANY_TEXTS = 1024           # from this number of texts on, fewer threads per text keep the GPU busy
DIGESTERS = 1024            # blocks that make a digest, at most
AHEAD = 16                  # tokens enqueued at once while generating
ROOM = 16                   # of a text in device memory: a multiple of it
# for which kernels are made that read texts
LENGTHS = sorted(multiple << power for multiple in (2, 3) for power in range(3, 10) if multiple << power <= 1024)
SHARE = 8                   # the operands of an update take at most 1 / SHARE of the free memory
OPERANDS = 1 << 30          # and at most this number of bytes
ROWS = 1 << 20              # positions that are validated at once, at most
COMPILERS = 8               # processes that compile kernels at once, at most


# --- compiling -------------------------------------------------------------------------------------------------------

def kernels(cfg, cc, shared_limit):
    """(forward pass, {name: dispatcher} of update and engine, {verb: [Kernel]}): the last are the kernels that a verb
    launches; each has a `file`, in the cache, and is `made_by` these arguments. Verbs: "load", "step" (evaluate and
    update), "validate", "write" and "digest"."""
    made_by = cfg, cc, shared_limit
    gpu, cfg = egg_kernels.gpu_of(cfg, cc, shared_limit), cfg.compiled()
    forward = egg_kernels.build_forward(cfg, gpu)
    of_pass = {id(kernel) for some in forward.kernels.values() for kernel in some}
    made, every = {}, {"digest": [], **{verb: list(some) for verb, some in forward.kernels.items()}}
    for function in update.build(cfg, cc[0] == 9) + build(cfg):
        name = function.__name__
        made[name] = cuda.jit(function)
        kernel = Kernel(made[name], tiles.SHARED if name == "products" else 0)
        every[{"digest": "digest", "choose": "write"}.get(name, "step")].append(kernel)
    made_of = numba_cuda.__version__, vars(cfg), cc
    of_forward, others = kernel_cache.key(made_of, gpu), kernel_cache.key(made_of)
    for number, kernel in enumerate(kernel for verb in sorted(every) for kernel in every[verb]):
        kernel.made_by = made_by
        kernel.file = f"cuda-{kernel.name}-{number}-{of_forward if id(kernel) in of_pass else others}"
    return forward, made, every


def compile_all(every, capability, purpose):
    """Compiles the Kernels `every` for a compute capability, or loads them from the cache. Returns the seconds that
    took. A line on stderr names what is compiled; a terminal shows the progress."""
    started, where = time.monotonic(), kernel_cache.directory()
    some = {where / kernel.file: kernel for kernel in every}
    if missing := [path for path in some if not path.exists()]:
        tell(f"egg: compiling {len(missing)} of {len(some)} CUDA kernels for {purpose}; kept in {where}\n")
        with kernel_cache.alone("cuda"):
            _compile_together({path: some[path] for path in missing if not path.exists()}, capability, started)
    for path, kernel in some.items():
        kernel.dispatcher._cache = kernel_cache.CudaCache(path)
        ptx.allow_shared(kernel.dispatcher, kernel.signature, kernel.shared)
        kernel.dispatcher.disable_compile()
    seconds = time.monotonic() - started
    if missing:
        show()
        tell(f"egg: CUDA kernels ready in {seconds:.1f} s\n")
    return seconds


def _compile_together(missing, capability, started):
    """New processes, as the driver of a GPU does not survive a fork, compile the kernels {file: Kernel} into their
    files, unless there is only one core. A kernel that fails there is left to this process, which reports the error."""
    longest_first = sorted(missing.items(), key=lambda item: -item[1].shared)        # tiles in shared memory take long
    count = min(COMPILERS, hardware.cores(), len(missing))
    program = (f"import sys; sys.path.insert(0, {str(kernel_cache.ROOT)!r}); from engine import cuda_engine; "
               "cuda_engine.compile_some()")
    running = []
    for some in (longest_first[i::count] for i in range(count if count > 1 else 0)):
        running.append(subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE,
                                        stderr=subprocess.DEVNULL))
        with running[-1].stdin as stdin:
            pickle.dump((some[0][1].made_by, capability, [(path, kernel.file) for path, kernel in some]), stdin)
    while any(process.poll() is None for process in running):
        time.sleep(0.1)
        show(f"egg: {sum(path.exists() for path in missing)} of {len(missing)} kernels, "
             f"{time.monotonic() - started:.0f} s")


def compile_some():
    """The main function of such a process, which reads what it compiles from standard input."""
    made_by, capability, some = pickle.load(sys.stdin.buffer)
    without_gpu(capability)
    every = {kernel.file: kernel for made in kernels(*made_by)[2].values() for kernel in made}
    for path, name in some:
        every[name].dispatcher._cache = kernel_cache.CudaCache(path)
        every[name].dispatcher.compile(every[name].signature)


def without_gpu(capability):
    """From now on this process compiles kernels to machine code for a compute capability, and loads none."""
    devices._runtime = mock.MagicMock(**{"get_or_create_context.return_value.device.compute_capability": capability})
    dispatcher._Kernel.bind = lambda self: self._codelibrary.get_cubin()


# --- kernels of this file --------------------------------------------------------------------------------------------

AU64 = types.Array(uint64, 1, "C")


def build(cfg):
    """The kernels of this file, as Python functions."""
    return [_digest_kernel(), _choose_kernel(cfg)]


@device
def in_order(bits):
    """int32 in the order of the floats that have these bits, and back."""
    return int32(bits ^ ((bits >> 31) & 0x7FFFFFFF))


def _choose_kernel(cfg):
    V, H = cfg.VOCAB_SIZE, cfg.HIDDEN_DIM
    last = cfg.SOFTMAX_LUT_SIZE - 1
    hash32, rule = rules.draw_rules(device, 0).hash32, rules.sampling_rules(device, TARGET)
    score, share = rule.score, rule.share

    @device
    def score_at(z, present, place, penalty):
        return score(z[uint64(place)], present[uint64(place)] if penalty else uint8(0), penalty)

    @device
    def after(v, residue):
        """(token, residue) that follow in the order of the draw: all of a residue modulo H, then the next residue's."""
        v = uint32(v + uint32(H))
        if v >= uint32(V):
            residue = uint32(residue + uint32(1))
            v = residue
        return v, residue

    def choose(z: logit_type(cfg), exps: A32, settings: F1, floor: A64, draw: AU32, tokens: A32, room, width, at: A32,
               present: B1):
        """Advances all sequences by one position: marks the token at position at[0] as present and, after the prompt,
        writes the next one as SPEC 10 draws it from logits z [sequences, width]. A block, of a power of two up to
        CHOOSERS threads, for each of tokens [sequences, room]. exps int32: EXP; settings float32 [2]: temperature,
        penalty in logit units; floor int64 [1]: smallest d kept; draw uint32 [sequences, 2]: prompt length, seed;
        present uint8 [sequences, width]; at[1]: number of blocks that have read at[0]."""
        tops, sums = cuda.shared.array(32, int32), cuda.shared.array(32, int64)      # of warps
        best = cuda.shared.array(1, int32)
        t, threads, position = uint32(cuda.threadIdx.x), uint32(cuda.blockDim.x), at[0]
        text, first = uint64(cuda.blockIdx.x), uint64(cuda.blockIdx.x) * uint64(width)
        here, lane, warp = uint64(text * uint64(room) + uint64(position)), t & uint32(31), t >> uint32(5)
        if t == 0:
            present[uint64(first + uint64(tokens[here]))] = 1
            best[0] = V
        if t < 32:
            tops[t], sums[t] = -2 ** 31, 0
        cuda.syncthreads()
        if position + 1 >= draw[uint64(2 * text)]:
            temp, penalty = settings[0], settings[1]
            least = floor[0]
            top = float32(-np.inf)
            v = t
            while v < uint32(V):
                for i in range(4):                           # loads that do not wait for each other
                    place = first + min(uint32(v + uint32(i) * threads), uint32(V - 1))
                    top = max(top, score_at(z, present, place, penalty))
                v = uint32(v + uint32(4) * threads)
            ordered = ptx.warp_max(in_order(ptx.float_bits(top)))
            if lane == 0:
                tops[warp] = ordered
            cuda.syncthreads()
            top = ptx.bits_float(in_order(ptx.warp_max(tops[lane])))
            if temp == 0:
                for token in range(int32(t), V, int32(threads)):
                    if score_at(z, present, first + uint64(token), penalty) == top:
                        cuda.atomic.min(best, 0, token)
                        break
                cuda.syncthreads()
                if t == 0:
                    tokens[uint64(here + 1)] = best[0]
            else:
                # a thread has neighbouring residues modulo H, whose order is that of the draw
                each = uint32(uint32(uint32(H - 1) + threads) // threads)
                mine, end = uint32(t * each), min(uint32(uint32(t + 1) * each), uint32(min(H, V)))
                total = int64(0)
                reach = float32(float32(least - 2) * temp)   # what is further below the top has no share
                residue, v = mine, mine
                while residue < end:                         # a range with steps would count its turns by a division
                    x = score_at(z, present, first + v, penalty)
                    if float32(x - top) >= reach:
                        total += share(exps, last, x, top, temp, least)
                    v, residue = after(v, residue)
                running = total
                for step in range(5):                        # sums of the warp up to this thread
                    below = cuda.shfl_up_sync(0xFFFFFFFF, running, 1 << step)
                    running += below if lane >= 1 << step else int64(0)
                if lane == 31:
                    sums[warp] = running
                cuda.syncthreads()
                every = int64(0)
                for other in range(int32(threads) >> 5):
                    running += sums[other] if other < warp else int64(0)
                    every += sums[other]
                random = hash32(uint32(draw[uint64(2 * text + 1)] + 999 + 555 * position), 0)
                threshold = int64(random)
                if threshold >= every:                       # then it has 32 bits
                    threshold = int64(uint32(random % uint32(every)))
                if running - total <= threshold and threshold < running:
                    running -= total
                    residue, v = mine, mine
                    while running <= threshold:
                        tokens[uint64(here + 1)] = v
                        running += share(exps, last, score_at(z, present, first + v, penalty), top, temp, least)
                        v, residue = after(v, residue)
        if t == 0 and cuda.atomic.add(at, 1, 1) == cuda.gridDim.x - 1:
            at[0], at[1] = position + 1, 0

    return choose


def _digest_kernel():
    mixed, halves = device(parameters.mixed), device(parameters.halves)

    def digest(words: AU64, number, out: A64):
        """Adds to out int64 [2] the sums of model.parameters.Digest over words; number: of the first. Any grid."""
        a, b = int64(0), int64(0)
        for i in range(cuda.grid(1), words.size, cuda.gridsize(1)):
            x = mixed(words[i], uint64(number + i))
            a += int64(x)
            b += int64(halves(x))
        a, b = warp_sum(a), warp_sum(b)
        if cuda.threadIdx.x & 31 == 0:
            cuda.atomic.add(out, 0, a)
            cuda.atomic.add(out, 1, b)

    return digest


class Replay:
    """A fixed sequence of launches on a stream: enqueued one by one the first time, captured as a CUDA graph the second
    time, replayed from then on."""

    def __init__(self, stream, enqueue):
        self._stream, self._enqueue = stream, enqueue
        self._enqueued = False
        self._graph = None

    def __call__(self):
        if not self._enqueued:
            self._enqueued = True
            return self._enqueue()
        handle = driver.CUstream(int(self._stream.handle))
        if self._graph is None:
            graph = self._captured(handle)
            self._graph = _driver(driver.cuGraphInstantiate(graph, 0))
            _driver(driver.cuGraphDestroy(graph))
        _driver(driver.cuGraphLaunch(self._graph, handle))

    def _captured(self, handle):
        """The launches as a graph. Whatever is freed on the device meanwhile, perhaps as garbage, spoils it."""
        collects = gc.isenabled()
        gc.disable()
        with cuda.defer_cleanup():
            _driver(driver.cuStreamBeginCapture(
                handle, driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL))
            try:
                self._enqueue()
            finally:                                         # after an error, too: else this thread could not go on
                ended = driver.cuStreamEndCapture(handle)
                if collects:
                    gc.enable()
        return _driver(ended)

    def __del__(self):
        if self._graph is not None:
            driver.cuGraphExecDestroy(self._graph)


def _driver(result):
    """The value of a driver call, (error code, value...). Raises RuntimeError with the name of the error."""
    if int(result[0]):
        raise RuntimeError(f"CUDA graph: {result[0].name}")
    return result[1] if len(result) > 1 else None


# --- the engine ------------------------------------------------------------------------------------------------------

# The evaluation of a number of members: the windows of their pairs, the array with its result, and the function that
# enqueues it
Evaluation = collections.namedtuple("Evaluation", "windows result launch")


# How an engine evaluates: the Evaluation of a number of members, and on the host, twice, room for its Fetched result
# and, page-locked, for its windows
Members = collections.namedtuple("Members", "evaluation rooms")


def evaluating(engine):
    """The Members of an engine. Reserves device memory for a chunk; with noise on weights in slices whose scratch takes
    at most half of what is free. The result is losses or, with unit trials, what kernels.trials.Trials
    says."""
    cfg, forward, trials = engine.cfg, engine._forward, engine._trials
    chunk, width = cfg.CHUNK_SIZE // cfg.MEMBERS, cfg.WINDOW
    if not trials:
        most = engine._at_once(forward.scratch_bytes, chunk, "evaluate a single pair")
        scratch = forward.reserve(most)
    all_windows = cuda.device_array(chunk * width, np.int32)
    all_losses = None if trials else cuda.device_array(2 * chunk, np.int64)

    @functools.cache
    def evaluation(members):
        count = members // cfg.MEMBERS
        windows = all_windows[:count * width]

        def enqueue():
            if trials:
                return trials.launch(engine.stream, engine._weights, engine._packed, windows, engine._job)
            for at in range(0, count, most):
                end = min(count, at + most)
                forward.evaluate(engine.stream, engine._weights, engine._packed, engine._overlay,
                                 windows[at * width:end * width], engine._job, at, end - at, scratch,
                                 all_losses[2 * at:2 * end])

        result = trials.arrays.result if trials else all_losses[:members]
        return Evaluation(windows, result, Replay(engine.stream, enqueue))

    size = evaluation(cfg.CHUNK_SIZE).result.size
    rooms = [(Fetched(size, np.int64), cuda.pinned_array(cfg.LOCAL_STEPS * all_windows.size, np.int32))
             for _ in range(2)]
    return Members(evaluation, rooms)


class ShortRun:
    """The updates that a chunk makes for itself (SPEC 23): kernels.update.Update, device memory and launches.

    `begin` at the state of the step; after every evaluation `update`; at last `end`: the digits are in the result, and
    the state is again that of the step."""

    def __init__(self, engine):
        cfg, self._engine, self._stream = engine.cfg.changed(LOCAL_STEPS=1), engine, engine.stream
        self._votes, self._state = update.Update(cfg, engine._kernels, 0), engine._state[:2]
        self._before = list(map(cuda.device_array_like, self._state))
        self._total = cuda.to_device(np.zeros(1, np.int64))
        self._launches = self._votes.moves(engine.stream, *self._state)
        self._update, self._end = Replay(engine.stream, self._launch_update), Replay(engine.stream, self._launch_end)

    def begin(self):
        copy_all(self._before, self._state, self._stream)

    def update(self, rate):
        self._votes.set_rate(rate, self._stream)
        self._update()

    def end(self, rate):
        self._engine._votes.set_rate(rate, self._stream)
        self._end()

    def _launch_update(self):
        engine, a = self._engine, self._engine._trials.arrays
        engine._kernels["take"][blocks(a.digits.size, BLOCK), BLOCK, self._stream](
            a.digits, a.result, self._votes.votes, self._total)
        for launch in self._launches:
            launch()
        engine._pack()

    def _launch_end(self):
        engine, a, tables = self._engine, self._engine._trials.arrays, self._votes.tables
        engine._kernels["moves"][len(tables.blocks), tiles.THREADS, self._stream](
            tables.blocks, tables.tensors, engine._votes.optimizers, *self._before, *self._state, a.digits, a.result,
            self._total)
        engine._trials.pack()
        copy_all(self._state, self._before, self._stream)
        engine._pack()


def checked_memory(cfg, forward, name):
    """Bytes of free memory of the current GPU. Raises ValueError where a model does not fit."""
    need = 13 * parameters.n_weights(cfg) + forward.packed_bytes + update.Update.bytes_needed(cfg)
    need += bytes_of(chunk_sizes(cfg)) if cfg.PERTURB == "units" else 0
    if cfg.LOCAL_STEPS > 1:
        need += 13 * parameters.n_weights(cfg) + update.Update.bytes_needed(cfg)
    free = memory().free
    if need > free:
        raise ValueError(f"{name}: this configuration needs {need / 2**30:.1f} GiB of GPU memory, "
                         f"{free / 2**30:.1f} GiB are free: lower HIDDEN_DIM, N_LAYERS or VOCAB_SIZE")
    return free


class CudaEngine:
    """The verbs of an engine (see engine.cpu_engine.CpuEngine) on GPU `device`.

    tokens: 1-D uint8 or uint32 array, may be memory-mapped, or None where nothing is evaluated; the host cuts the
    windows. verbs: see tools.train.make_engine. Raises ValueError (one line) where the device is missing or too small.

    Work is begun ahead. `step`, `seed` are of the state that callers know, `_at` of the one on the device:

    at rest                 _at is step, seed, cooling (SPEC 23); _begun is empty
    an evaluation begun     ... but for its result, in _begun; `evaluate` waits for it
    an update begun         _at is the next step; _fitness is of the update, _saved a copy of the state before it
    ... and evaluations     in _begun, of the next step
    the update completed    `update` was called with that fitness: step becomes _at, and what was begun stays

    Whatever needs the state that callers know undoes an update that is begun: _saved comes back, _begun is dropped."""

    TEXTS_AT_ONCE = 4096         # as in CpuEngine: 16 or 32 a multiprocessor

    def __init__(self, cfg, tokens=None, device=0, verbs=()):
        try:
            cuda.select_device(device)
        except (CudaSupportError, IndexError) as error:
            raise ValueError(f"GPU {device} cannot be used: {str(error).splitlines()[0]}") from None
        gpu = cuda.get_current_device()
        self.cfg, self.tokens = cfg, tokens
        self.name = gpu.name.decode() if isinstance(gpu.name, bytes) else gpu.name
        self.stream, self._capability = cuda.stream(), gpu.compute_capability
        self._forward, self._kernels, self._waiting = kernels(cfg, self._capability, ptx.shared_limit(gpu))
        self.compile_seconds, self._tables = 0.0, soft_targets.Tables(cfg, tokens)
        self._ready("load", *(["step"] if tokens is not None else []), *verbs)
        self._reserve()
        self.load(parameters.initial_state(cfg))

    def _ready(self, *verbs):
        """Compiles or loads the kernels of some verbs of `kernels` before they are first launched."""
        if verbs := [verb for verb in verbs if verb in self._waiting]:
            every = [kernel for verb in verbs for kernel in self._waiting.pop(verb)]
            purpose = f"{self.name}: {', '.join(verbs)}"
            self.compile_seconds += compile_all(every, self._capability, purpose)

    def _reserve(self):
        """Reserves device memory for everything but evaluation, whose slices are sized at the first call by the memory
        that is then free."""
        cfg, n = self.cfg, parameters.n_weights(self.cfg)
        free = checked_memory(cfg, self._forward, self.name)
        self._trials = Trials(self._forward) if cfg.PERTURB == "units" else None
        self._weights = cuda.device_array(n, np.int8)
        self._overlay_padded = cuda.to_device(np.zeros(blocks(parameters.n_overlay(cfg), 8) * 8, np.int8))
        self._overlay = self._overlay_padded[:parameters.n_overlay(cfg)]
        self._moments = cuda.device_array((n, 3), np.float32)
        self._packed = cuda.device_array(self._forward.packed_bytes, np.int8)
        self._state = self._weights, self._moments, self._overlay
        self._saved = None                                   # a copy of the state, see _save
        self._job = cuda.device_array(2, np.uint32)
        self._sums, self._zeros = cuda.device_array(2, np.int64), cuda.to_device(np.zeros(2, np.int64))
        self._digest, self._changed = Fetched(2, np.int64), Fetched(1, np.int32)
        self._exps = cuda.to_device(integer_tables.exp_table(cfg))
        self._votes = update.Update(cfg, self._kernels, min(OPERANDS, free // SHARE))
        # page-locked. A begun update may read the fitness of the next one; it is undone in that case
        self._given_fitness = cuda.pinned_array(self._votes.packed.size, np.uint8)
        self._run = ShortRun(self) if cfg.LOCAL_STEPS > 1 else None
        self._texts = self._read = None                      # Texts of the last `write`, TextReader of the last `vote`
        self._update_steps = self._votes.launches(self.stream, self._job, *self._state)
        self._update = Replay(self.stream, self._launch_update)
        self._add_up = Replay(self.stream, self._launch_digest)

    def _pack(self):
        self._forward.pack(self.stream, self._weights, self._packed)

    def _launch_update(self):
        self._votes.changed.copy_to_device(self._zeros.view(np.int32)[:1], self.stream)
        self._votes.packed.copy_to_device(self._given_fitness, self.stream)
        for launch in self._update_steps:
            launch()
        if self._run:                                        # the cooling of the next step
            self._overlay[:1].copy_to_device(self._votes.packed[-1:].view(np.int8), self.stream)
        self._pack()
        self._changed.copy(self._votes.changed, self.stream)

    def _launch_digest(self):
        self._sums.copy_to_device(self._zeros, self.stream)
        number = parameters.FIRST_WORD
        for words in (array.view(np.uint64) for array in (self._weights, self._moments.ravel(), self._overlay_padded)):
            grid = min(DIGESTERS, blocks(words.size, BLOCK))
            self._kernels["digest"][grid, BLOCK, self.stream](words, number, self._sums)
            number += words.size
        self._digest.copy(self._sums, self.stream)

    def load(self, state):
        """Takes over a State (copied)."""
        self.step, self.seed = state.step, state.seed
        self._cooling = steps.known_cooling(self.cfg, state.overlay)
        self._set_state(map(np.ascontiguousarray, (state.weights, state.moments, state.overlay)))
        self._save()
        self.stream.synchronize()

    def _set_state(self, arrays):
        copy_all(self._state, arrays, self.stream)
        self._pack()
        self._fitness = None                                 # of the update that is begun
        self._at = self.step, self.seed, self._cooling       # after that update, else now
        self._begun = {}                                     # {(first, count): Fetched} of evaluations there
        self._digested = False                               # whether a digest of the state there is begun

    def state(self):
        """A copy of the State."""
        self._undo_update()
        return parameters.State(*(array.copy_to_host() for array in self._state), self.step, self.seed)

    def digest(self):
        """bytes [16]: parameters.digest_of the State, without bringing it to the host. From the first one on `update`
        prepares the next."""
        self._undo_update()
        if not self._digested:
            self._ready("digest")
            self._enqueue_digest()
        digest = parameters.Digest(self.step, self.seed)
        digest.add(*map(int, self._digest.wait()))
        return digest.digest()

    def _enqueue_digest(self):
        self._add_up()
        self._digest.record(self.stream)
        self._digested = True

    def begin(self, first, count):
        """Begins with an evaluation of this step or, after `begin_update`, of the next one, so that the GPU is not idle
        until it is asked for. Two may be begun."""
        if (first, count) not in self._begun:
            if len(self._begun) > 1:
                del self._begun[next(iter(self._begun))]
            self._begun[first, count] = self._enqueue(first, count)

    def evaluate(self, first, count):
        """int64 [count]: losses of members first.. (both even) of this step. With unit trials these are the windows of
        a chunk, and it is (bytes, int): the chunk's packed digits and its loss (SPEC 21)."""
        self._undo_update()
        self.begin(first, count)
        values = self._begun.pop((first, count)).wait()
        return self._trials.digits_of(values) if self._trials else values.copy()

    _members = functools.cached_property(evaluating)

    def vote(self, first, windows, advantages, counted, temperature):
        """See engine.cpu_engine.CpuEngine."""
        self._undo_update()
        kind = next(length for length in LENGTHS if length >= counted.shape[1]), temperature
        if (self._read and self._read.kind) != kind:
            self._read = None                                # frees its memory
            self._read = TextReader(self, *kind)
        return self._read.vote(first, windows, advantages, counted)

    def _enqueue(self, first, count):
        """The Fetched losses of an evaluation, which is begun."""
        self._ready("step")
        evaluation = self._members.evaluation(count)
        cfg, (step, seed, cooling) = self.cfg, self._at
        room, windows = next(room for room in self._members.rooms if room[0] not in self._begun.values())
        windows = windows[:cfg.LOCAL_STEPS * evaluation.windows.size].reshape(cfg.LOCAL_STEPS, -1)
        if self._run:
            self._run.begin()
        for number, part in enumerate(windows, step * cfg.LOCAL_STEPS):      # of the update
            self._set_job(first, seed)
            part[:] = soft_targets.windows(cfg, self.tokens, self._tables.at_step(number), number, seed,
                                           first // cfg.MEMBERS, count // cfg.MEMBERS).ravel()
            send(evaluation.windows, part, self.stream)
            evaluation.launch()
            if self._run:
                self._run.update(steps.learning_rate(cfg, number, cooling))
                seed = steps.next_seed(seed, number, cfg.NOISE_REUSE)
        if self._run:
            self._run.end(self._rate())
        return room.copy(evaluation.result, self.stream).record(self.stream)

    def _rate(self, cooling=0):
        """float: the rate of the step on the device; cooling: that of its bytes, or with LOCAL_STEPS the known one."""
        step, _, known = self._at
        return steps.learning_rate(self.cfg, step * self.cfg.LOCAL_STEPS, known if self._run else cooling)

    def _set_job(self, first=0, seed=0):
        """Sends the job that an evaluation of members first.., or an update, reads: seed, first pair or window."""
        send(self._job, np.array([seed, first // self.cfg.MEMBERS], np.uint32), self.stream)

    def _at_once(self, size, count, name):
        """The number, at most `count`, whose size(n) bytes fit half of the free memory."""
        most = largest(size, count, memory().free // 2)
        if not most:
            raise ValueError(f"{self.name}: not enough free GPU memory to {name}")
        return most

    def update(self, fitness):
        """Applies the update of this step and goes on to the next; number of weights changed. fitness: the bytes of
        the step (steps.join_digits)."""
        self._enqueue_update(fitness)
        self.step, self.seed, self._cooling = self._at
        self._fitness = None
        self._save()
        return int(self._changed.wait()[0])

    def begin_update(self, fitness):
        """Begins an update, which `update` completes if it is of the same fitness. A verb that needs the state of
        this step undoes it. Returns False, having done nothing, where there is no memory for a copy of the state."""
        if self._saved is None:
            fits = sum(array.nbytes for array in self._state) <= memory().free // 2
            self._saved = list(map(cuda.device_array_like, self._state)) if fits else []
            self._save()
        if self._saved:
            self._enqueue_update(fitness)
        return bool(self._saved)

    def _save(self):
        """Copies the state, to which `_undo_update` returns; early, so that the next update needs not wait for it."""
        copy_all(self._saved or (), self._state, self.stream)

    def _undo_update(self):
        if self._fitness is not None:
            self._set_state(self._saved)

    def _enqueue_update(self, fitness):
        """Begins an update unless it has begun already. Any other update that has begun is undone first."""
        if self._fitness == fitness:
            return
        self._undo_update()
        self._ready("step")
        self._set_update(fitness)
        self._update()
        self._changed.record(self.stream)
        self._fitness = fitness
        self._at = (self.step + 1, steps.next_seed(self.seed, self.step, self.cfg.NOISE_REUSE),
                    steps.cooling_of(self.cfg, fitness))
        self._begun = {}
        if "digest" not in self._waiting:                    # somebody has asked for one
            self._enqueue_digest()

    def _set_update(self, fitness):
        cooling = steps.cooling_of(self.cfg, fitness)
        self._given_fitness[:] = np.frombuffer(fitness, np.uint8, self._given_fitness.size)
        if self._run:
            self._given_fitness[-1] = cooling
        self._votes.set_rate(self._rate(cooling), self.stream)
        self._set_job(seed=self.seed)

    def validate(self, windows):
        """(nats, tokens): summed cross-entropy of softmax(logits / SOFTMAX_EXP_SCALE), without noise, over int
        [n, SEQ_LEN + 1] windows (gru: of any length)."""
        self._ready("validate")
        self._undo_update()
        windows = np.ascontiguousarray(windows, np.int32)
        T, total = windows.shape[1] - 1, 0.0
        most = self._at_once(lambda n: bytes_of(sizes(self.cfg, n, T, T)), max(1, min(len(windows), ROWS // T)),
                             "validate a single window")
        reading = self._forward.reading(most, T, T)
        for at in range(0, len(windows), most):
            part = windows[at:at + most]
            nats, tokens = cuda.device_array(len(part) * T, np.float64), cuda.to_device(part.ravel(), self.stream)
            reading.validate(self.stream, self._weights, self._packed, tokens, nats)
            total += float(nats.copy_to_host(stream=self.stream).sum())
        self.stream.synchronize()
        return total, len(windows) * T

    def generate(self, prompt, count, seed, **settings):
        """Yields `count` int tokens that continue prompt (int [n >= 1]); settings: of rules.sampling_settings."""
        prompt, s = rules.checked_prompt(self.cfg, prompt), rules.sampling_settings(self.cfg, **settings)
        done, total = len(prompt), len(prompt) + count
        texts = Texts(self, 1, total)
        texts.begin(prompt[None], done, seed & 0xFFFFFFFF, s)
        while done < total:
            reach = min(total, done + AHEAD)
            yield from texts.until(reach)[0, done:reach].tolist()
            done = reach

    def write(self, texts, lengths, seeds, s):
        """Fills texts int32 [sequences, room] behind their prompts, whose lengths (int64 [sequences]) are at least 1
        and below room. seeds uint32 [sequences]: of the draws (SPEC 10); s: rules.Sampling."""
        count, room = texts.shape
        self._undo_update()
        most_room = blocks(room, ROOM) * ROOM                # prompts of similar lengths then share a graph
        known = self._texts and (self._texts.room, self._texts.wanted)
        if not (known and known[0] == most_room and known[1] // 2 < count <= known[1]):
            self._texts = None                               # frees its memory
            self._texts = Texts(self, count, most_room)
        most = self._texts.count
        for at in range(0, count, most):
            self._texts.begin(texts[at:at + most], lengths[at:at + most], seeds[at:at + most], s)
            texts[at:at + most] = self._texts.until(room)[:count - at, :room]


class TextReader:
    """Reads texts of up to `length` positions at a temperature, for the votes of a chunk (SPEC 22)."""

    def __init__(self, engine, length, temperature):
        self.kind, self._engine = (length, temperature), engine
        cfg = rewards.text_reading(engine.cfg, length, temperature)
        limit = ptx.shared_limit(cuda.get_current_device())
        forward, _, every = kernels(cfg, engine._capability, limit)
        engine.compile_seconds += compile_all([kernel for kernel in every["step"] if kernel in forward.kernels["step"]],
                                              engine._capability, f"{engine.name}: texts of {length} tokens")
        self._trials = Trials(forward)
        self._windows = cuda.device_array(cfg.CHUNK_SIZE * (length + 1), np.int32)
        self._replay = Replay(engine.stream, self._enqueue)
        self._fetched = Fetched(self._trials.arrays.result.size, np.int64)

    def _enqueue(self):
        engine = self._engine
        self._trials.launch(engine.stream, engine._weights, engine._packed, self._windows, engine._job)

    def vote(self, first, windows, advantages, counted):
        """See CudaEngine.vote."""
        engine, arrays, (n, T) = self._engine, self._trials.arrays, counted.shape
        chunk, length = engine.cfg.CHUNK_SIZE, self.kind[0]
        texts, weights = np.zeros((chunk, length + 1), np.int32), np.zeros((chunk, length), np.int8)
        texts[:n, :T + 1], weights[:n, :T] = windows, advantages[:, None] * counted
        copy_all((self._windows, arrays.weights), (texts.ravel(), weights.ravel()), engine.stream)
        engine._set_job(first, engine.seed)
        self._replay()
        result = self._fetched.copy(arrays.result, engine.stream).record(engine.stream)
        return self._trials.digits_of(result.wait())[0]


class Texts:
    """`wanted` sequences, or as many of them as fit, of up to `room` tokens that are written together, in device
    memory. `count`: how many these are."""

    def __init__(self, engine, wanted, room):
        cfg, self._engine = engine.cfg, engine
        engine._ready("write")
        engine._undo_update()
        width = wide(cfg.VOCAB_SIZE)

        def size(count):
            return bytes_of(sizes(cfg, count, 1, room)) + count * (4 * room + width + 8) + 4 * room * cfg.HEAD_DIM

        count = largest(size, wanted, memory().free // 2)
        if not count:
            raise MemoryError(f"{engine.name}: not enough free GPU memory for {room} positions")
        self.wanted, self.count, self.room = wanted, count, room
        self._inputs = inputs = cuda.device_array(6 + 2 * count, np.uint32)      # see `begin`
        floor, settings = inputs[:2].view(np.int64), inputs[2:4].view(np.float32)
        at, draw = inputs[4:6].view(np.int32), inputs[6:]
        self._host = cuda.pinned_array(inputs.size, np.uint32)
        self._tokens = tokens = cuda.device_array(count * room, np.int32)
        present = cuda.device_array(count * width, np.uint8)
        self._reading = reading = engine._forward.reading(count, 1, room)
        self._fetched = Fetched(count * room, np.int32)
        self._fetched.array[:] = 0                           # every row is read, also the unused ones
        few = 4 if count < MANY_TEXTS else 32                # tokens of the vocabulary that a thread has
        threads = min(CHOOSERS, max(32, 1 << (cfg.VOCAB_SIZE // few).bit_length() - 1))
        choose = engine._kernels["choose"][count, threads, engine.stream]

        def enqueue(wanted):
            reading.read(engine.stream, engine._weights, engine._packed, tokens, room, 1, at)
            if wanted:
                reading.logits()
            choose(reading.arrays.z, engine._exps, settings, floor, draw, tokens, room, width, at, present)

        self._forget = functools.partial(cuda.cudadrv.driver.device_memset, present, 0, present.nbytes, engine.stream)
        # within all prompts nobody wants logits
        self._advance = [Replay(engine.stream, functools.partial(enqueue, wanted)) for wanted in (False, True)]

    def begin(self, texts, lengths, seeds, s):
        """The arguments are those of CudaEngine.write, of `count` sequences or fewer."""
        engine, number = self._engine, len(texts)
        self._host[:6] = np.frombuffer(struct.pack("q2f2i", s.floor, s.temp, s.penalty, 0, 0), np.uint32)
        draw = self._host[6:].reshape(-1, 2)
        draw[:number, 0], draw[:number, 1] = lengths, seeds
        draw[number:] = self.room                            # nothing is drawn for the unused rows
        self._inputs.copy_to_device(self._host, engine.stream)
        self._forget()
        self._reading.begin(engine.stream)
        longest, tokens = np.max(lengths), self._fetched.array
        tokens.reshape(self.count, self.room)[:number, :longest] = texts[:, :longest]
        self._tokens.copy_to_device(tokens, engine.stream)
        self._reached, self._shortest = 1, np.min(lengths)

    def until(self, end):
        """int32 [count, room]: the tokens, those before position `end` being written. The next call changes them."""
        for place in range(self._reached, end):
            self._advance[int(place >= self._shortest)]()
        self._reached = end
        stream = self._engine.stream
        return self._fetched.copy(self._tokens, stream).record(stream).wait().reshape(self.count, self.room)


def largest(size, most, budget):
    """The largest n <= most with size(n) <= budget bytes, for a size that grows with n; 0 where one is too large."""
    return bisect.bisect_right(range(1, most + 1), budget, key=size)


def memory():
    """(free, total): bytes of the memory of the current GPU."""
    return cuda.current_context().get_memory_info()


def send(array, values, stream):
    """Enqueues the copy of values to an array on the device. copy_to_device takes 80 us longer, for which the GPU waits
    at the end of a step."""
    cuda.cudadrv.driver.host_to_device(array, values, values.nbytes, stream)


def copy_all(arrays, values, stream):
    """Enqueues the copies of values to arrays on the device."""
    for array, value in zip(arrays, values):
        array.copy_to_device(value, stream)


class Fetched:
    """A copy on the host of an array on the device, made while the host goes on: page-locked memory and an event."""

    def __init__(self, size, kind):
        self.array, self._event = cuda.pinned_array(size, kind), cuda.event(timing=False)

    def copy(self, array, stream):
        """Enqueues the copy of an array of at most that size, perhaps as part of a graph; self."""
        self._size = array.size
        array.copy_to_host(self.array[:array.size], stream)
        return self

    def record(self, stream):
        """Marks the place in the stream for which `wait` waits, after `copy` or a graph with it; self."""
        self._event.record(stream)
        return self

    def wait(self):
        """The copied values, until the next copy."""
        self._event.synchronize()
        return self.array[:self._size]


# --- figures for `bench` ---------------------------------------------------------------------------------------------

# dense int8 operations a clock and multiprocessor; other cards: 2048
OPERATIONS = {(8, 0): 4096, (9, 0): 8192, (10, 0): 16384}


def card(device):
    """(whether GPU `device` has wgmma, dense int8 operations per second at its highest clock)."""
    cuda.select_device(device)
    gpu = cuda.get_current_device()
    operations = OPERATIONS.get(gpu.compute_capability, 2048)
    return gpu.compute_capability == (9, 0), operations * gpu.MULTIPROCESSOR_COUNT * gpu.CLOCK_RATE * 1e3
