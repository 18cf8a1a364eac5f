"""What both models share: on the device the products of single-token generation (dp4a), on the host the packing, the
plan, kernels whose arguments go by name, and the frame of a forward pass."""

import inspect
from types import SimpleNamespace

import numpy as np
from numba import cuda, int32, int64

from kernels import ptx
from kernels.parts import A8, A32, A64, AU32, PLAN, SIGNS, TILE, aligned, blocks, quad_sum
from kernels.rules import device
from model import integer_tables
from model import parameters

# entries of the exponential table of validation, the last 0; its int64 for 1: a sum of 2^18 fits
CLEAN_EXPS, CLEAN_ONE = 4096, 2.0 ** 44
# of the parameters of kernels, by name; all others are int64
TYPES = dict.fromkeys(("plan packed windows tokens exps rope x h u a z out sb spill queries keys values gates "
                       "candidates states own").split(), A32)
TYPES |= dict(weights=A8, overlay=A8, gelu=A8, bytes_=A8, job=AU32, losses=A64)


class Kernel:
    """A kernel as its builder returns it: its dispatcher, or that, bytes of dynamic shared memory, and perhaps a Shape.
    types: of parameters whose type is not that of TYPES."""

    def __init__(self, made, **types):
        self.dispatcher, self.shared, self.shape = ((made if isinstance(made, tuple) else (made,)) + (0, None))[:3]
        self._names = list(inspect.signature(self.dispatcher.py_func).parameters)
        self.signature = tuple((TYPES | types).get(name, int64) for name in self._names)

    def __call__(self, grid, threads, given, **own):
        """Enqueues it on the stream given["stream"]; its arguments are taken by name from `own` or from `given`."""
        given = given | own
        self.dispatcher[grid, threads, given["stream"], self.shared](*[given[name] for name in self._names])


def matrix_vector(K):
    @device
    def multiply(x, at_x, packed, at, columns, y, at_y, t):
        """y[at_y + c] = x . column c of a packed matrix, x from word at_x on: a warp makes eight columns."""
        lane = t & 31
        for block in range(t >> 5, columns // 8, 32):
            s = int32(0)
            base = at + block * (2 * K) + lane
            for piece in range(K // 16):
                s = ptx.dp4a(packed[base + piece * 32], x[at_x + piece * 4 + (lane & 3)], s)
            s = quad_sum(s)
            if (lane & 3) == 0:
                y[at_y + block * 8 + (lane >> 2)] = s
    return multiply


def _over_the_block(over_the_warp):
    @device
    def whole(x, part, t):
        """Of a block of 1024 threads; part: 32 words of shared memory."""
        x = over_the_warp(x)
        cuda.syncthreads()
        if (t & 31) == 0:
            part[t >> 5] = x
        cuda.syncthreads()
        return over_the_warp(part[t & 31])
    return whole


block_sum, block_max = _over_the_block(ptx.warp_sum), _over_the_block(ptx.warp_max)


def logits_kernel(cfg, logit):
    """z = logits int32 [V] from x, the words of int8 [H]; logit: device function, of a sum. Launch 256 threads a block
    of 64 columns."""
    H, V, multiply = cfg.HIDDEN_DIM, cfg.VOCAB_SIZE, matrix_vector(cfg.HIDDEN_DIM)

    @cuda.jit(launch_bounds=256)
    def logits(at, packed, x, z):
        sums = cuda.shared.array(64, int32)
        t, first = cuda.threadIdx.x, cuda.blockIdx.x * 64
        multiply(x, 0, packed, at + first * (H // 4), 64, sums, 0, t)
        cuda.syncthreads()
        if t < 64 and first + t < V:
            z[first + t] = logit(sums[t])

    return logits


# --- packing ----------------------------------------------------------------------------------------------------------

# How a matrix is packed. PLAIN, QUADS, UP, DOWN: as core matrices of one row a column, [K / width][columns / 8][width /
# 16], with zeros in columns beyond the matrix. QUADS: with the columns permuted within 16, so that a thread's four
# accumulators of 16 columns are neighbours. UP, DOWN: the same, and the hidden units of an MLP in blocks of 128, units
# i + sub * H of 32 neighbouring i. ROWS: the columns one after the other, in the order of kernels.gru_narrow, as bytes
# + 128.
PLAIN, QUADS, UP, DOWN, ROWS = range(5)


def _pack_kernel(H):
    """Words from `target` on of a canonical matrix [K / 4, n, 4] from word `source` on. A thread a word."""
    @cuda.jit(launch_bounds=256)
    def pack(weights, packed, source, target, order, n, columns, width, size):
        i = cuda.grid(1)
        if i < size:
            if order == ROWS:
                j = i % (width // 4)
                col, k4 = i // (width // 4), (j & ~7) | ((j & 1) << 2) | ((j & 7) >> 1)
            else:
                piece, rest = i // (columns * width // 4), i % (columns * width // 4)
                block, rest = rest // (2 * width), rest % (2 * width)
                col, k4 = block * 8 + (rest & 31) // 4, piece * (width // 4) + (rest // 32) * 4 + (rest & 3)
                if order != PLAIN:
                    col = (col & ~15) | ((col & 6) << 1) | ((col & 8) >> 2) | (col & 1)
            known = col < n
            if order == UP:
                col = ((col >> 5) & 3) * H + (col >> 7) * 32 + (col & 31)
            if order == DOWN:
                k4 = ((k4 >> 3) & 3) * (H // 4) + (k4 >> 5) * 8 + (k4 & 7)
            word = weights[source + k4 * n + col] if known else int32(0)
            packed[target + i] = int32(word ^ int32(SIGNS)) if order == ROWS else word
    return pack


class Packing:
    """The packed array: first the matrices of validation and generation, `at` these bytes; then what the noisy pass
    adds. And the kernel that packs them."""

    def __init__(self, cfg):
        self.at, self.copies, self.bytes, self._added = {}, [], 0, {}
        self.kernel = Kernel(_pack_kernel(cfg.HIDDEN_DIM), weights=A32)
        for t in parameters.tensors(cfg):
            if t.product or t.name == "embedding":           # whose columns are looked up there too
                self.at[t.name, t.layer] = 4 * self.add(t, PLAIN, blocks(t.cols, TILE) * TILE, t.rows)

    def add(self, t, order, columns, width):
        """Appends the matrix of a tensor, if it is not there already; the word at which it begins."""
        at, size = self.bytes // 4, t.rows * columns // 4
        if (found := self._added.setdefault((t.weights, order, columns, width), at)) != at:
            return found
        self.copies.append(dict(source=t.weights // 4, target=at, order=order, n=t.cols, columns=columns, width=width,
                                size=size))
        self.bytes += 4 * size
        return at

    def launch(self, stream, weights, packed):
        for copy in self.copies:
            self.kernel(blocks(copy["size"], 256), 256, copy, stream=stream, weights=weights.view(np.int32),
                        packed=packed.view(np.int32))


# --- the frame of a forward pass --------------------------------------------------------------------------------------

class Plan:
    """The calls of a forward pass, each a row of run-time constants: PLAN int32. The methods give parts of a row."""

    def __init__(self, cfg, packing):
        self._tensors, self._packing, self._rows = {(t.name, t.layer): t for t in parameters.tensors(cfg)}, packing, []

    def table(self):
        return np.array(self._rows, np.int64).astype(np.int32).ravel()

    def _add(self, entries):
        """Number of the new row."""
        self._rows.append(entries + [0] * (PLAN - len(entries)))
        return len(self._rows) - 1

    def _vector(self, name, layer):
        t = self._tensors[name, layer]
        return [t.weights, t.seed_a, t.seed_b, t.overlay_a]

    def _input(self, name, layer):
        t = self._tensors[name, layer]
        return [t.seed_b, t.overlay_b]

    def _matrix(self, name, layer):
        t = self._tensors[name, layer]
        return [self._packing.at[name, layer] // 4, t.seed_a, t.overlay_a]


def ranges(sizes):
    """({name: (first byte, end)} of arrays of these sizes in scratch memory, bytes of all)."""
    out, end = {}, 0
    for name, size in sizes.items():
        out[name] = (end, end + size)
        end = aligned(end + size)
    return out, end


class Pass:
    """A forward pass, with or without noise."""

    def __init__(self, cfg):
        self.cfg, self.kernels = cfg, []

    def add(self, made, **types):
        """The Kernel of what a builder returned."""
        self.kernels.append(Kernel(made, **types))
        return self.kernels[-1]

    def arguments(self, given, tables, layout, scratch, **more):
        """What all kernels of a launch are given, by name: also the arrays of a layout in scratch memory."""
        arrays = {name: scratch[a:b].view(np.int32) for name, (a, b) in layout.items()}
        return given | arrays | dict(plan=tables.plan, exps=tables.exps, packed=given["packed"].view(np.int32)) | more


class Forward:
    """What the CUDA engine uses of both models: see the top of egg_kernels. head: the matrix of the logits."""

    def __init__(self, cfg, cc, token, logit, head):
        self.cfg, self._packing, self.token_scratch_bytes = cfg, Packing(cfg), cfg.HIDDEN_DIM
        self._token, self._logits, self._head = token, Kernel(logits_kernel(cfg, logit)), head
        if cfg.TENSOR_CORES == "wgmma" and tuple(cc) != (9, 0):
            raise ValueError(f"TENSOR_CORES = wgmma: only GPUs of compute capability 9.0 have it, not {cc[0]}.{cc[1]}")

    def _serve(self, more=()):
        """With plan, noisy and clean pass made: what the engine compiles. more: kernels of a step."""
        self.packed_bytes = self._packing.bytes
        self.kernels = {"load": [self._packing.kernel], "step": self._noisy.kernels + [*more],
                        "validate": self._clean.kernels, "generate": [self._token, self._logits]}

    def tables(self, **more):
        """Uploads the constant tables, `more` among them."""
        exps = integer_tables.exp_table(self.cfg)
        clean = np.rint(np.exp(-np.arange(CLEAN_EXPS) / self.cfg.SOFTMAX_EXP_SCALE) * CLEAN_ONE).astype(np.int64)
        clean[-1] = 0
        arrays = dict(plan=self._plan.table(), calls=self._plan.token_calls(), clean_exps=clean,
                      exps=exps[np.minimum(np.arange(256), exps.size - 1)], **more)
        self._tables = SimpleNamespace(**{name: cuda.to_device(array) for name, array in arrays.items()})

    def pack(self, stream, weights, packed):
        self._packing.launch(stream, weights, packed)

    def token(self, stream, weights, packed, tokens, at, positions, rope, cache, scratch, logits):
        given = dict(stream=stream, plan=self._tables.plan, calls=self._tables.calls, weights=weights, tokens=tokens,
                     packed=packed.view(np.int32), at=at, positions=positions, rope=rope, exps=self._tables.exps)
        self._token(1, 1024, given | self._cache(cache, positions), out=scratch)
        self._logits(blocks(self.cfg.VOCAB_SIZE, 64), 256, given, at=self._packing.at[self._head, 0] // 4,
                     x=scratch.view(np.int32), z=logits)
