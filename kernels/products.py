"""What both models share: on the device products of the packed matrices for validation and single-token generation
(mma.sync, every card, and dp4a), on the host the packing, the plan, and the frame of a forward pass."""

from types import SimpleNamespace

import numpy as np
from numba import cuda, int32, int64

from kernels import ptx
from kernels.parts import A32, PLAN, SIGNS, TILE, aligned, blocks, quad_sum
from kernels.rules import device
from model import integer_tables
from model import parameters

CLEAN_EXPS = 4096           # entries of the float64 exponential table of validation, the last 0
LOGITS_TYPES = (int64, A32, A32, A32)
PACK_TYPES = (A32, A32) + 7 * (int64,)


def units_in_tile(cfg):
    """Pairs that TILE consecutive rows, starting at a multiple of TILE, can touch."""
    rows = 2 * cfg.SEQ_LEN
    return max(1, TILE // rows) if TILE % rows == 0 or rows % TILE == 0 else (TILE - 2 + rows) // rows + 1


def tile_functions(K, KC):
    """Device functions that fetch the chunk k0..k0 + KC of TILE rows of A and of B (core matrices of K bytes a row)
    into shared memory, that add its product to acc, and that do both for one chunk after the other: eight warps, each
    32 rows (warp // 2) by 64 columns; acc[(i * 8 + j) * 4 + ...] is the mma tile of rows 16 i and columns 8 j."""
    PIECES = TILE * KC // 16

    @device
    def fetch(at, a, at_a, b, at_b, k0, t):
        for i in range(t, PIECES, 256):
            block, rest = i // (KC // 2), i % (KC // 2)
            source = int64(block * (2 * K) + k0 * 2 + rest * 4)
            ptx.copy_async16(int32(at + i * 16), a, at_a + source)
            ptx.copy_async16(int32(at + TILE * KC + i * 16), b, at_b + source)

    @device
    def multiply(acc, at, warp, lane):
        matrix = int32(lane >> 3)
        row = int32(int32(lane & 7) * 16)
        a_at = int32(at + row + ((warp >> 1) * 4 + (matrix & 1)) * (KC * 8) + (matrix >> 1) * 128)
        b_at = int32(at + TILE * KC + row + ((warp & 1) * 8 + (matrix >> 1)) * (KC * 8) + (matrix & 1) * 128)
        for s in range(KC // 32):
            a = ptx.load_matrix4(int32(a_at + s * 256))
            a2 = ptx.load_matrix4(int32(a_at + s * 256 + 2 * KC * 8))
            for j in range(4):
                b = ptx.load_matrix4(int32(b_at + s * 256 + j * 2 * KC * 8))
                for half in range(2):
                    m = (2 * j + half) * 4
                    b0, b1 = (b[0], b[1]) if half == 0 else (b[2], b[3])
                    r = ptx.mma_s8(a[0], a[1], a[2], a[3], b0, b1, acc[m], acc[m + 1], acc[m + 2], acc[m + 3])
                    acc[m], acc[m + 1], acc[m + 2], acc[m + 3] = r[0], r[1], r[2], r[3]
                    m += 32
                    r = ptx.mma_s8(a2[0], a2[1], a2[2], a2[3], b0, b1, acc[m], acc[m + 1], acc[m + 2], acc[m + 3])
                    acc[m], acc[m + 1], acc[m + 2], acc[m + 3] = r[0], r[1], r[2], r[3]

    @device
    def walk(acc, at, a, at_a, b, at_b, warp, lane, t):
        """acc = the product over all of K; its first chunk is on its way to `at`."""
        for i in range(64):
            acc[i] = 0
        for k in range(K // KC):
            if k + 1 < K // KC:
                fetch(int32(at + ((k + 1) & 1) * (2 * TILE * KC)), a, at_a, b, at_b, (k + 1) * KC, t)
            ptx.copy_commit()
            ptx.copy_wait_but_one()
            cuda.syncthreads()
            multiply(acc, int32(at + (k & 1) * (2 * TILE * KC)), warp, lane)
            cuda.syncthreads()

    return fetch, multiply, walk


def chunk(K):
    return 128 if K % 128 == 0 else 64 if K % 64 == 0 else 32


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


@device
def block_sum(x, part, t):
    """Sum over a block of 1024 threads; part: 32 words of shared memory."""
    x = ptx.warp_sum(x)
    cuda.syncthreads()
    if (t & 31) == 0:
        part[t >> 5] = x
    cuda.syncthreads()
    return ptx.warp_sum(part[t & 31])


def logits_kernel(cfg, logit):
    """logits int32 [V] from n, the words of int8 [H]; logit: device function, of a sum. Launch 256 threads a block of
    64 columns."""
    H, V = cfg.HIDDEN_DIM, cfg.VOCAB_SIZE

    @cuda.jit(launch_bounds=256)
    def logits(at_packed, packed, n, z):
        t = cuda.threadIdx.x
        lane = t & 31
        block = cuda.blockIdx.x * 8 + (t >> 5)
        col = block * 8 + (lane >> 2)
        if block * 8 < V:
            s = int32(0)
            for piece in range(H // 16):
                s = ptx.dp4a(packed[at_packed + block * (2 * H) + piece * 32 + lane], n[piece * 4 + (lane & 3)], s)
            s = quad_sum(s)
            if (lane & 3) == 0 and col < V:
                z[col] = logit(s)

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
        self.at, self.copies, self.bytes, self.kernel = {}, [], 0, _pack_kernel(cfg.HIDDEN_DIM)
        for t in parameters.tensors(cfg):
            if t.product or t.name == "embedding":           # whose columns are looked up there too
                self.at[t.name, t.layer] = 4 * self.add(t, PLAIN, blocks(t.cols, TILE) * TILE, t.rows)

    def add(self, t, order, columns, width):
        """Appends the matrix of a tensor; the word at which it begins."""
        at, size = self.bytes // 4, t.rows * columns // 4
        self.copies.append((t.weights // 4, at, order, t.cols, columns, width, size))
        self.bytes += 4 * size
        return at

    def launch(self, stream, weights, packed):
        for copy in self.copies:
            self.kernel[blocks(copy[-1], 256), 256, stream](weights.view(np.int32), packed.view(np.int32), *copy)


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
    """A forward pass, with or without noise: its kernels [(dispatcher, signature, dynamic shared bytes)]."""

    def __init__(self, cfg):
        self.cfg, self.kernels = cfg, []

    def add(self, made, signature):
        """(dispatcher, dynamic shared bytes, ...) of a kernel, or of what its builder returns."""
        made = made if isinstance(made, tuple) else (made, 0)
        self.kernels.append((made[0], signature, made[1]))
        return made


class Forward:
    """What the CUDA engine uses of both models: see the top of egg_kernels."""

    def __init__(self, cfg, cc, token, token_types, logit):
        self.cfg, self._packing, self.token_scratch_bytes = cfg, Packing(cfg), cfg.HIDDEN_DIM
        self._token, self._token_types, self._logits = token, token_types, logits_kernel(cfg, logit)
        if cfg.TENSOR_CORES == "wgmma" and tuple(cc) != (9, 0):
            raise ValueError(f"TENSOR_CORES = wgmma: only GPUs of compute capability 9.0 have it, not {cc[0]}.{cc[1]}")

    def _serve(self, more=()):
        """With plan, noisy and clean pass made: what the engine compiles. more: kernels of a step."""
        self.packed_bytes = self._packing.bytes
        generate = [(self._token, self._token_types, 5 * self.cfg.HIDDEN_DIM), (self._logits, LOGITS_TYPES, 0)]
        self.kernels = {"load": [(self._packing.kernel, PACK_TYPES, 0)], "step": self._noisy.kernels + [*more],
                        "validate": self._clean.kernels, "generate": generate}

    def tables(self, **more):
        """Uploads the constant tables, `more` among them."""
        exps = integer_tables.exp_table(self.cfg)
        clean = np.exp(-np.arange(CLEAN_EXPS) / self.cfg.SOFTMAX_EXP_SCALE)
        clean[-1] = 0
        arrays = dict(plan=self._plan.table(), calls=self._plan.token_calls(), clean_exps=clean,
                      exps=exps[np.minimum(np.arange(256), exps.size - 1)], **more)
        self._tables = SimpleNamespace(**{name: cuda.to_device(array) for name, array in arrays.items()})

    def pack(self, stream, weights, packed):
        self._packing.launch(stream, weights, packed)
