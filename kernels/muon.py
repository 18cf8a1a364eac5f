"""Muon's directions on a GPU, with the bits of the CPU engine: momentum, and its orthogonalisation by Newton-Schulz
(see model.rules).

Every sum is one chain of float32 fma in the order of the rule, so a thread owns its outputs and walks k alone. Tensor
cores would not do: they have no exact float32 and no order. It is 23 GFLOP a step in the default configuration; all
matrices go through each product in one launch. A thread has 4 x 4 outputs, and both operands lie with k as their rows,
so that it loads four neighbours of each at once.
"""

import numpy as np
from numba import cuda, float32

from kernels import ptx
from kernels.parts import A2, A32, F1, F2, blocks, unroll, unrolled
from kernels.rules import TARGET, device
from model import parameters, rules

THREADS = 128
ROWS, COLS = 64, 32         # of the outputs of a block, 4 x 4 a thread
TOGETHER = 4                # values of k that a thread loads before it uses them
FIRST, INPUTS, OUTPUTS = range(3)               # columns of `matrices`


def matrices(cfg):
    """int32 [n, 3]: of those that Muon moves the first weight, rows and columns. One side is HIDDEN_DIM, and the other
    not shorter. None in a step that adds moves, which Muon has made before."""
    moves = cfg.USE_MUON and cfg.LOCAL_STEPS == 1
    return np.array([(t.weights, t.rows, t.cols) for t in parameters.tensors(cfg) if moves and t.hidden],
                    np.int32).reshape(-1, 3)


@device
def place(i, rows, cols):
    """Where element i of a canonical matrix lies in x, the matrix [shorter side, longer side]."""
    r, c = (i >> 2) // cols * 4 + (i & 3), (i >> 2) % cols
    return r * cols + c if rows <= cols else c * rows + r


def build(cfg):
    """The kernels of a configuration, as Python functions; none without USE_MUON."""
    if not cfg.USE_MUON:
        return []
    H, PARTS, EPS = cfg.HIDDEN_DIM, rules.MUON_PARTS, float32(rules.MUON_EPS)
    MOMENTUM = np.float32(cfg.MUON_MOMENTUM)
    momentum = rules.update_rules(device, TARGET).momentum
    add, mul, div = TARGET.add, TARGET.mul, TARGET.div
    fma, sqrt = TARGET.fma, TARGET.sqrt

    def muon_momenta(matrices: A2, votes: A32, moments: F2, x: F1):
        """The momenta after the votes (int32, canonical), which also go to x. A thread an element. Grid: [elements,
        matrices]."""
        i, b = cuda.grid(1), cuda.blockIdx.y
        first, rows, cols = matrices[b, FIRST], matrices[b, INPUTS], matrices[b, OUTPUTS]
        if i < rows * cols:
            m = momentum(votes[first + i], moments[first + i, 0], MOMENTUM)
            moments[first + i, 0] = m
            x[first + place(i, rows, cols)] = m

    def muon_scale(matrices: A2, x: F1, turned: F1):
        """Divides x by its norm, and fills `turned`: x transposed. A block of MUON_PARTS threads a matrix."""
        sums = cuda.shared.array(PARTS, float32)
        t, b = cuda.threadIdx.x, cuda.blockIdx.x
        first, long = matrices[b, FIRST], max(matrices[b, INPUTS], matrices[b, OUTPUTS])
        total = float32(0)
        for i in range(t, H * long, PARTS):
            total = fma(x[first + i], x[first + i], total)
        sums[t] = total
        half = PARTS // 2
        while half > 0:
            cuda.syncthreads()                               # the sums of the turn before are whole
            if t < half:
                sums[t] = add(sums[t], sums[t + half])
            half //= 2
        cuda.syncthreads()                                   # so is the last
        norm = add(sqrt(sums[0]), EPS)
        for i in range(t, H * long, PARTS):
            value = div(x[first + i], norm)
            x[first + i] = value
            turned[first + i % long * H + i // long] = value

    def muon_product(matrices: A2, deep, wide, alpha: float32, beta: float32, left: F1, right: F1, out: F1, turned: F1):
        """out = left^T . right, or, unless `deep`, fma(beta, left^T . right, alpha * right). `deep`: the sums run over
        the longer side, else over the shorter one; `wide`: so do the columns of right and out, and `turned` is out
        transposed. Grid: [columns / COLS, rows / ROWS, matrices]."""
        b, t = cuda.blockIdx.z, cuda.threadIdx.x
        first, long = matrices[b, FIRST], max(matrices[b, INPUTS], matrices[b, OUTPUTS])
        depth, width = long if deep else H, long if wide else H
        row, col = cuda.blockIdx.y * ROWS + t // (COLS // 4) * 4, cuda.blockIdx.x * COLS + t % (COLS // 4) * 4
        if row < H and col < width:
            acc = cuda.local.array((4, 4), float32)
            for i in range(4):
                for j in range(4):
                    acc[i, j] = float32(0)
            for some in range(0, depth, TOGETHER):
                for e in unrolled(range(TOGETHER)):
                    k = some + e
                    ours, theirs = ptx.load4(left, first + k * H + row), ptx.load4(right, first + k * width + col)
                    for i in range(4):
                        for j in range(4):
                            acc[i, j] = fma(ptx.bits_float(ours[i]), ptx.bits_float(theirs[j]), acc[i, j])
            for i in range(4):
                for j in range(4):
                    at, value = first + (row + i) * width + col + j, acc[i, j]
                    if not deep:
                        value = fma(beta, value, mul(alpha, right[at]))
                    out[at] = value
                    if wide:
                        turned[first + (col + j) * H + row + i] = value

    return [muon_momenta, muon_scale, unroll(muon_product)]


class Directions:
    """Device buffers of Muon's directions, [weights], and the launches that fill `x`, a matrix from its first weight on
    as `place` says; kernels: compiled dispatchers of `build`."""

    def __init__(self, cfg, kernels):
        self.kernels, self.coefficients = kernels, rules.muon_coefficients(cfg)
        self.matrices, self.hidden_dim = matrices(cfg), cfg.HIDDEN_DIM
        self.x, self.turned, self.square, self.poly = (
            cuda.device_array(parameters.n_weights(cfg) if len(self.matrices) else 1, np.float32) for _ in range(4))

    @staticmethod
    def bytes_needed(cfg):
        """Device memory of the buffers."""
        return 16 * parameters.n_weights(cfg) if cfg.USE_MUON else 0

    def launches(self, stream, votes, moments):
        """[function that enqueues a kernel]; the directions are then in `x`."""
        out, count = [], len(self.matrices)
        if not count:
            return out
        table, H = cuda.to_device(self.matrices), self.hidden_dim
        a, b, c = self.coefficients

        def add(name, grid, threads, *args):
            out.append(lambda: self.kernels[name][grid, threads, stream](table, *args))

        def product(deep, wide, *args):
            grid = blocks(4 * H if wide else H, COLS), blocks(H, ROWS), count
            add("muon_product", grid, THREADS, deep, wide, *args)

        add("muon_momenta", (blocks(4 * H * H, THREADS), count), THREADS, votes, moments, self.x)
        add("muon_scale", count, rules.MUON_PARTS, self.x, self.turned)
        for _ in range(rules.MUON_ROUNDS):
            product(1, 0, a, a, self.turned, self.turned, self.square, self.turned)
            product(0, 0, b, c, self.square, self.square, self.poly, self.turned)
            product(0, 1, a, np.float32(1), self.poly, self.x, self.square, self.turned)
            self.x, self.square = self.square, self.x
        return out
