"""Noise on weights: one kernel draws what the other kernels read of every pair, before them, into device memory.

Of a pair these are the words of its calls, one behind the other; of a call the parts that its kernel reads, in the
order of its plan:

vector      n words as the even member sees it, then n as the odd one does
columns     the scaled noise of n columns of a matrix
inputs      n words of input_coefficient (kernels.rules.build_noise), with ADAPTIVE_NOISE_MODE = 2 then n factors as the
            bits of float32; then a word that is 1 where all factors are 1, and three more
"""

import numpy as np
from numba import cuda, float32, int32, int64, uint32

from kernels import ptx
from kernels.host import Kernel
from kernels.parts import A2, A8, A32, AU32, blocks
from kernels.product import TALLEST
from kernels.rules import build_noise, device
from model import parameters

VECTOR, COLUMNS, INPUTS = range(3)
# columns of a row of the table of parts
KIND, FIRST, LENGTH, WEIGHTS, SEED_A, SEED_B, OVERLAY = range(7)
THREADS = 256


def input_words(cfg, inputs):
    """Words of the noise of `inputs` inputs, which are a multiple of 4."""
    return inputs * (2 if cfg.ADAPTIVE_NOISE_MODE == 2 else 1) + 4


def factor_function(cfg):
    """Device function: the factor at drawn[at] as table_term (kernels.rules.build_noise) takes it beside the
    coefficient of an input, which has that of mode 1 in it."""
    MODE = cfg.ADAPTIVE_NOISE_MODE

    @device
    def factor(drawn, at):
        return ptx.bits_float(drawn[at]) if MODE == 2 else float32(1 / 64)
    return factor


class Plan:
    """What is drawn for a pair, `words` int32. A module of kernels adds its calls."""

    def __init__(self, cfg):
        self._cfg, self.words = cfg, 0
        self._tensors = {(t.name, t.layer): t for t in parameters.tensors(cfg)}
        self._rows = []

    def add(self, *parts):
        """The first word of a call that reads these parts of a pair."""
        first = self.words
        for kind, length, *others in parts:
            length = blocks(length, 4) * 4                   # what is beyond the vocabulary is not used
            self._rows.append((kind, self.words, length, *others))
            self.words += (2 * length, length, input_words(self._cfg, length))[kind]
        return first

    def vector(self, name, layer=0):
        t = self._tensors[name, layer]
        return VECTOR, t.cols, t.weights, t.seed_a, t.seed_b, t.overlay_a

    def columns(self, name, layer=0, kind=COLUMNS):
        t = self._tensors[name, layer]
        return kind, t.cols, 0, t.seed_a, 0, t.overlay_a

    def looked_up(self, name):
        """The columns of a table, of which each position takes one."""
        return self.columns(name, kind=INPUTS)

    def inputs(self, name, layer=0):
        t = self._tensors[name, layer]
        return INPUTS, t.rows, 0, t.seed_b, 0, t.overlay_b

    def room(self, pairs):
        """Words of an array for pairs, with those whose rows fill the tallest tile."""
        return self.words * (pairs + blocks(TALLEST, self._cfg.SEQ_LEN) + 1)

    def table(self):
        return np.array(self._rows, np.int32)


def draw_kernel(cfg):
    """drawn int32 [pairs, each] = the parts of Plan.table, of pairs job[1] + offset on. Launch [pairs, rows of
    the table], 256 threads."""
    MODE, SHIFT = cfg.ADAPTIVE_NOISE_MODE, cfg.SIGMA_SHIFT_VECTOR
    WIDTH = 2 if MODE == 2 else 1
    nz = build_noise(cfg)
    noise, factor, scaled = nz.noise, nz.factor, nz.scaled
    input_coefficient, whole_factor = nz.input_coefficient, nz.whole

    @cuda.jit(launch_bounds=THREADS)
    def draw(table: A2, weights: A8, overlay: A8, job: AU32, offset, each, drawn: A32):
        pair, part = int64(cuda.blockIdx.x), table[cuda.blockIdx.y]
        kind, length, at = part[KIND], part[LENGTH], pair * each + part[FIRST]
        seed = uint32(uint32(job[0] + job[1]) + uint32(offset + pair))
        one, other = uint32(seed + uint32(part[SEED_A])), uint32(seed + uint32(part[SEED_B]))
        whole = int32(1)
        for i in range(cuda.threadIdx.x, length, THREADS):
            n, scale = noise(one, i), overlay[part[OVERLAY] + i]
            if kind == VECTOR:
                w = int32(weights[part[WEIGHTS] + i])
                p = scaled(int32(n * noise(other, i)), scale, one, i)
                drawn[at + i], drawn[at + length + i] = int32(w + (p >> SHIFT)), int32(w + (int32(-p) >> SHIFT))
            elif kind == COLUMNS:
                drawn[at + i] = scaled(n, scale, one, i)
            else:
                drawn[at + i] = input_coefficient(n, scale)
                if MODE == 2:
                    drawn[at + length + i] = ptx.float_bits(factor(scale, one, i))
                whole = int32(whole & whole_factor(scale))
        whole = cuda.syncthreads_and(whole)
        if kind == INPUTS and cuda.threadIdx.x == 0:
            drawn[at + WIDTH * length] = whole

    return Kernel(draw)
