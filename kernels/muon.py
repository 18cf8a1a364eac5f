"""Muon's direction on a GPU, with the bits of the CPU engine: momentum, and its orthogonalisation by Newton-Schulz (see
model.rules).

Every sum is one chain of float32 fma in the order of the rule, so a thread owns its outputs and walks k alone; tiles in
shared memory change where operands are read, not the order in which they are added. Tensor cores would not do: they
have no exact float32 and no order. It is 23 GFLOP a step in the default configuration; all matrices go through each
product in one launch.
"""

from typing import NamedTuple

import numpy as np
from numba import cuda, float32, int32, int64
from numba.cuda import libdevice

from kernels import ptx
from kernels.parts import A2, A32, F1, F2, int32s
from model import parameters, rules

TILE = 64                   # rows and columns of a block's outputs, 8 x 4 a thread of 8 x 16: enough blocks for a GPU
DEPTH = 16                  # values of k in its shared memory
PITCH = TILE + 4            # floats of a k there: few banks twice, fours are aligned
OPERAND = DEPTH * PITCH
THREADS = 128
LOADS = TILE * DEPTH // THREADS     # numbers of each operand that a thread loads
TOGETHER = 4                # numbers of a matrix that a thread loads before it uses them
# columns of Work.matrices
WEIGHTS, ROWS, COLS, SHORT, LONG, AT_X, AT_A = range(7)


class Work(NamedTuple):
    """int32 arrays. matrices [n, 7]: first of its WEIGHTS, ROWS, COLS, the SHORT and LONG of them, where its x [SHORT,
    LONG] and its square [SHORT, SHORT] begin. squares, wides [tiles, 3]: matrix, first row and first column of an
    output tile. directions [tensors]: where the x of a tensor begins, -1 where Muon does not move it. x_size, a_size:
    numbers of all x and of all squares."""
    matrices: np.ndarray
    squares: np.ndarray
    wides: np.ndarray
    directions: np.ndarray
    x_size: int
    a_size: int


def work(cfg):
    """The Work of a configuration; nothing in it without USE_MUON."""
    matrices, directions = [], []
    squares, wides = [], []
    x, a = 0, 0
    for t in parameters.tensors(cfg):
        moved = cfg.USE_MUON and t.hidden
        directions.append(x if moved else -1)
        if moved:
            short, long = sorted((t.rows, t.cols))
            squares += [(len(matrices), i, j) for i in range(0, short, TILE) for j in range(0, short, TILE)]
            wides += [(len(matrices), i, j) for i in range(0, short, TILE) for j in range(0, long, TILE)]
            matrices.append((t.weights, t.rows, t.cols, short, long, x, a))
            x, a = x + t.size, a + short * short
    return Work(*(np.array(table, np.int32) for table in (matrices, squares, wides, directions)), x, a)


def build(cfg):
    """The kernels of a configuration, as Python functions; none without USE_MUON."""
    if not cfg.USE_MUON:
        return []
    PARTS, EPS = rules.MUON_PARTS, float32(rules.MUON_EPS)
    MOMENTUM = np.float32(cfg.MUON_MOMENTUM)

    def muon_start(matrices: A2, votes: A32, moments: F2, x: F1):
        """Momentum after the votes (int32, canonical), and x: the momentum of norm 1. A block of MUON_PARTS threads a
        matrix."""
        sums = cuda.shared.array(PARTS, float32)
        t, b = cuda.threadIdx.x, cuda.blockIdx.x
        rows, cols = matrices[b, ROWS], matrices[b, COLS]
        size = rows * cols
        long = matrices[b, LONG]
        first, at_x = int64(matrices[b, WEIGHTS]), matrices[b, AT_X]
        total = float32(0)
        old, ats = cuda.local.array(TOGETHER, float32), cuda.local.array(TOGETHER, int64)
        for some in range(t, size, TOGETHER * PARTS):
            for e in range(TOGETHER):
                i = some + e * PARTS
                r, c = i // long, i % long
                if rows > cols:
                    r, c = c, r
                ats[e] = first + ((r >> 2) * cols + c) * 4 + (r & 3)
                if i < size:
                    old[e] = libdevice.fmaf_rn(moments[ats[e], 0], MOMENTUM, libdevice.int2float_rn(-votes[ats[e]]))
            for e in range(TOGETHER):
                i = some + e * PARTS
                if i < size:
                    total = libdevice.fmaf_rn(old[e], old[e], total)
                    moments[ats[e], 0], x[at_x + i] = old[e], old[e]
        sums[t] = total
        half = PARTS // 2
        while half > 0:
            cuda.syncthreads()
            if t < half:
                sums[t] = libdevice.fadd_rn(sums[t], sums[t + half])
            half //= 2
        cuda.syncthreads()
        norm = libdevice.fadd_rn(libdevice.fsqrt_rn(sums[0]), EPS)
        for some in range(t, size, TOGETHER * PARTS):
            for e in range(TOGETHER):
                if some + e * PARTS < size:
                    old[e] = x[at_x + some + e * PARTS]
            for e in range(TOGETHER):
                if some + e * PARTS < size:
                    x[at_x + some + e * PARTS] = libdevice.fdiv_rn(old[e], norm)

    def product(name, gram):
        """The kernel of a product, as engine.cpu_votes.muon_panels: left . left^T of x, or fma(beta, square . right,
        alpha * right)."""
        def kernel(tiles: A2, matrices: A2, wide: int32, alpha: float32, beta: float32, left: F1, right: F1, out: F1):
            ours = cuda.shared.array(OPERAND, float32, 16)
            theirs = cuda.shared.array(OPERAND, float32, 16)
            acc, factors, others = cuda.local.array((8, 4), float32), int32s(8), int32s(4)
            next_ours, next_theirs = cuda.local.array(LOADS, float32), cuda.local.array(LOADS, float32)
            t = cuda.threadIdx.x
            matrix = tiles[cuda.blockIdx.x, 0]
            row, col = tiles[cuda.blockIdx.x, 1], tiles[cuda.blockIdx.x, 2]
            short, at_a = matrices[matrix, SHORT], int64(matrices[matrix, AT_A])
            width = matrices[matrix, LONG] if gram or wide else short            # of the operand beside the square
            at = int64(matrices[matrix, AT_X]) if gram or wide else at_a
            depth, columns = (width, short) if gram else (short, width)
            at_left, at_out = (at, at_a) if gram else (at_a, at)
            # a thread has rows 8 down + i, columns 4 right + j
            down, right_ = t // 16, t % 16
            at_ours = ptx.shared_address(ours, 0) + 32 * down
            at_theirs = ptx.shared_address(theirs, 0) + 16 * right_
            for i in range(8):
                for j in range(4):
                    acc[i, j] = float32(0)
            for step in range(0, depth + DEPTH, DEPTH):
                # the operands of this step, while those of the last one are multiplied
                for n in range(LOADS):
                    k, i = t % DEPTH, t // DEPTH + n * (THREADS // DEPTH)
                    live = step < depth
                    x = left[at_left + (row + i) * depth + step + k] if live and row + i < short else float32(0)
                    next_ours[n] = x
                    if gram:
                        x = left[at_left + (col + i) * depth + step + k] if live and col + i < short else float32(0)
                    else:
                        k, i = t // TILE + n * (THREADS // TILE), t % TILE
                        x = right[at + (step + k) * width + col + i] if live and col + i < width else float32(0)
                    next_theirs[n] = x
                for k in range(DEPTH if step > 0 else 0):
                    b = ptx.load_shared4(int32(at_theirs + k * (4 * PITCH)))
                    for half in range(2):
                        a = ptx.load_shared4(int32(at_ours + k * (4 * PITCH) + 16 * half))
                        for e in range(4):
                            factors[4 * half + e], others[e] = a[e], b[e]
                    for i in range(8):
                        for j in range(4):
                            acc[i, j] = libdevice.fmaf_rn(ptx.bits_float(factors[i]), ptx.bits_float(others[j]),
                                                          acc[i, j])
                cuda.syncthreads()
                for n in range(LOADS):
                    k, i = t % DEPTH, t // DEPTH + n * (THREADS // DEPTH)
                    ours[k * PITCH + i] = next_ours[n]
                    if not gram:
                        k, i = t // TILE + n * (THREADS // TILE), t % TILE
                    theirs[k * PITCH + i] = next_theirs[n]
                cuda.syncthreads()
            for i in range(8):
                for j in range(4):
                    r, c = row + 8 * down + i, col + 4 * right_ + j
                    if r < short and c < columns:
                        to = at_out + r * columns + c
                        x = acc[i, j]
                        out[to] = x if gram else libdevice.fmaf_rn(beta, x, libdevice.fmul_rn(alpha, right[to]))
        kernel.__name__ = name
        return kernel

    return [muon_start, product("muon_gram", True), product("muon_mix", False)]


class Direction:
    """Device buffers of Muon's directions and the launches that fill `x`, the flat directions; kernels: compiled
    dispatchers of `build`."""

    def __init__(self, cfg, kernels):
        w = work(cfg)
        self.kernels, self.coefficients = kernels, rules.muon_coefficients(cfg)
        self.tables = [cuda.to_device(table) for table in w[:3]] if w.x_size else []
        self.x, self.other = (cuda.device_array(max(1, w.x_size), np.float32) for _ in range(2))
        self.square, self.poly = (cuda.device_array(max(1, w.a_size), np.float32) for _ in range(2))

    @staticmethod
    def bytes_needed(cfg):
        """Device memory of the buffers."""
        w = work(cfg)
        return 8 * (w.x_size + w.a_size) + sum(table.nbytes for table in w[:3])

    def launches(self, stream, votes, moments):
        """[function that enqueues a kernel]; the directions are then in `x`."""
        if not self.tables:
            return []
        matrices, squares, wides = self.tables
        a, b, c = self.coefficients
        out = []

        def add(name, grid, threads, *args):
            out.append(lambda: self.kernels[name][grid, threads, stream](*args))

        def product(name, tiles, *args):
            add(name, len(tiles), THREADS, tiles, matrices, *args)

        add("muon_start", len(matrices), rules.MUON_PARTS, matrices, votes, moments, self.x)
        for _ in range(rules.MUON_ROUNDS):
            product("muon_gram", squares, np.int32(0), a, a, self.x, self.x, self.square)
            product("muon_mix", squares, np.int32(0), b, c, self.square, self.square, self.poly)
            product("muon_mix", wides, np.int32(1), a, np.float32(1), self.poly, self.x, self.other)
            self.x, self.other = self.other, self.x
        return out
