"""The host's side of a forward pass: kernels, how matrices are packed, and scratch memory."""

import inspect

import numpy as np
from numba import cuda, int32, int64

from kernels.parts import A32, SIGNS, aligned, blocks, byte


class Kernel:
    """A kernel as its builder returns it: the dispatcher, bytes of dynamic shared memory, and of a product its Shape. A
    parameter has the type that annotates it, or is an int64."""

    def __init__(self, dispatcher, shared=0, shape=None):
        self.dispatcher = dispatcher
        self.name = dispatcher.py_func.__name__
        self.shared = shared
        self.shape = shape
        types = dispatcher.py_func.__annotations__
        self.signature = tuple(types.get(name, int64) for name in inspect.signature(dispatcher.py_func).parameters)

    def __call__(self, grid, threads, stream, *arguments):
        """Enqueues it with its arguments."""
        self.dispatcher[grid, threads, stream, self.shared](*arguments)


# --- packing ----------------------------------------------------------------------------------------------------------

# How a matrix is packed. PLAIN, QUADS, UP, DOWN: as core matrices of one row a column, [K / width][columns / 8][width /
# 16], with zeros in columns beyond the matrix. QUADS: with the columns permuted within 16, so that a thread's four
# accumulators of 16 columns are neighbours. UP, DOWN: the same, and the hidden units of an MLP in blocks of 128, units
# i + sub * H of 32 neighbouring i. ROWS: the columns one after the other, in the order of kernels.gru, as bytes + 128.
# BACK: the transposed matrix, as QUADS. `width` is a part of the K inputs of a column, or K and zeros behind it.
PLAIN = 0
QUADS = 1
UP = 2
DOWN = 3
ROWS = 4
BACK = 5


def _pack_kernel(H):
    """Words from `target` on of a canonical matrix [K / 4, n, 4] from word `source` on. One thread per word."""
    @cuda.jit(launch_bounds=256)
    def pack(weights: A32, packed: A32, source, target, order, K, n, columns, width, size):
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
            word = int32(0)
            if order == BACK:
                for e in range(4):
                    if col < K and 4 * k4 + e < n:
                        of_output = weights[source + (col >> 2) * n + 4 * k4 + e]
                        word |= (byte(of_output, col & 3) & 255) << int32(8 * e)
            elif col < n and 4 * k4 < K:
                if order == UP:
                    col = ((col >> 5) & 3) * H + (col >> 7) * 32 + (col & 31)
                if order == DOWN:
                    k4 = ((k4 >> 3) & 3) * (H // 4) + (k4 >> 5) * 8 + (k4 & 7)
                word = weights[source + k4 * n + col]
            packed[target + i] = int32(word ^ SIGNS) if order == ROWS else word
    return Kernel(pack)


class Packing:
    """The packed array, of what `add` appends, and the kernel that packs it."""

    def __init__(self, cfg):
        self.bytes = 0
        self._copies = []
        self._added = {}
        self.kernel = _pack_kernel(cfg.HIDDEN_DIM)

    def add(self, t, order, columns, width):
        """Appends the matrix of a tensor, if it is not there already; the word at which it begins."""
        inputs = t.cols if order == BACK else t.rows
        at, size = self.bytes // 4, columns * blocks(inputs, width) * width // 4
        if (first := self._added.setdefault((t.weights, order, columns, width), at)) != at:
            return first
        self._copies.append((t.weights // 4, at, order, t.rows, t.cols, columns, width, size))
        self.bytes += 4 * size
        return at

    def launch(self, stream, weights, packed):
        for *copy, size in self._copies:
            self.kernel(blocks(size, 256), 256, stream, weights.view(np.int32), packed.view(np.int32), *copy, size)


def ranges(sizes):
    """({name: (first byte, end)} of arrays of these sizes in scratch memory, bytes of all)."""
    out, end = {}, 0
    for name, size in sizes.items():
        out[name] = (end, end + size)
        end = aligned(end + size)
    return out, end
