"""The vector instructions of the CPU engine, every kind that this processor has, against NumPy on random operands."""

import itertools

import numpy as np
from numpy import float32, int32, int64, int8, uint8
import pytest

from engine import cpu_kernels, simd
from model import integer_tables
from recordings import python
from readings import equal


def hold_against_numpy():
    """Every operation of engine.simd with the kind of this process: also lengths that end within a register."""
    from numba import njit
    rng, rows, panel = np.random.default_rng(5), simd.ROWS, simd.PANEL
    compiled = njit(error_model="numpy")

    def hold(out, wanted, what):
        """Nothing is written beside the panel."""
        equal(out[:, :panel], wanted, what)
        assert not out[:, panel:].any(), what

    @compiled
    def products(x, x_at, w, w_at, init, init_stride, out, k4):
        simd.tile(x.ravel(), x_at, x.shape[1], w, w_at, init.ravel(), 0, init_stride, out.ravel(), 0,
                  out.shape[1], k4)

    @compiled
    def noisy_products(x, w, w_at, init, sums, noise, noise_stride, shift, out, k4):
        simd.noisy_tile(x.ravel(), 1, x.shape[1], w, w_at, init, 5, sums, 2, noise.ravel(), 3, noise_stride,
                        int32(shift), out.ravel(), 0, out.shape[1], k4)

    @compiled
    def chains(x, w, out, count):
        simd.chain_tile(x.ravel(), 0, x.shape[1], w.ravel(), 0, out.ravel(), 0, out.shape[1], count)

    @compiled
    def activated(x, out):
        for i in range(x.size):
            out[i] = cpu_kernels.gelu(x[i])

    @compiled
    def summed(table, short, top, shift, z, count, out):
        return simd.exp_sum(table, 0, short, int32(top), int32(shift), z, 16, count, out, 16)

    for count in (1, 15, 16, 63, 64, 65, 130, 8192):
        for short, shift in itertools.product((0, 1), (0, 3)):
            table = np.sort(rng.integers(0, 1 << 24, 256)).astype(int32)[::-1].copy()
            table[95 if short else 256:] = 0
            z = (rng.integers(-300, 1, count + 31) << shift).astype(int32)
            z[17] = -40000 << shift                             # more than 16 bits away
            z[16 + count:] = 1 << 20                            # beside what counts
            wanted = table[np.minimum(255, 7 - (z[16:16 + count] >> shift))]
            out = np.full(count + 31, -1, int32)
            assert summed(table, short, 7, shift, z, count, out) == wanted.sum(dtype=int64), (count, short)
            equal(out[16:16 + count], wanted, count)
            assert not out[16 + count:16 + -(-count // 16) * 16].any()
    for k4 in (1, 2, 3, 8, 17, 64, 257):
        for low, high in ((0, 256), (255, 256)):                # extreme operands too: no sum of pairs may saturate
            x = rng.integers(low, high, (rows, 4 * k4 + 5)).astype(uint8)
            w = rng.integers(-128, -127 if low else 128, (k4, panel, 4)).astype(int8)
            packed = np.concatenate([np.zeros(7, int8), w.ravel()])
            for init, stride in ((rng.integers(-9999, 9999, (rows, panel + 3)).astype(int32), panel + 3),
                                 (rng.integers(-9999, 9999, (1, panel)).astype(int32), 0)):
                out = np.zeros((rows, panel + 3), int32)
                products(x, 1, packed, 7, init, stride, out, k4)
                plain = x[:, 1:1 + 4 * k4].astype(int64) @ w.transpose(0, 2, 1).reshape(4 * k4, panel).astype(int64)
                hold(out, plain + init[:, :panel], k4)
            init, sums, noise = (rng.integers(-1 << 31, 1 << 31, shape).astype(int32)
                                 for shape in (panel + 5, rows + 2, (rows // 2, panel + 7)))
            for stride, pair in (0, np.zeros(rows, int)), (panel + 7, np.arange(rows) // 2):
                out = np.zeros((rows, panel + 3), int32)
                noisy_products(x, packed, 7, init, sums, noise, stride, 9, out, k4)
                added = (sums[2:, None] * noise[pair, 3:][:, :panel] >> int32(9)) + init[5:]     # int32, wraps
                hold(out, added + plain.astype(int32), k4)
    for count in (1, 5, 32, 100):
        x, w = (rng.normal(size=shape).astype(float32) for shape in ((rows, count + 2), (count, panel)))
        out, plain = np.zeros((rows, panel + 1), float32), np.zeros((rows, panel), float32)
        chains(x, w, out, count)
        for k in range(count):                                  # fma: exact in extended precision, then rounded once
            plain = (np.asarray(x[:, k, None], np.longdouble) * w[k] + plain).astype(float32)
        hold(out, plain, count)
    x, out = np.arange(-127, 128).astype(int8), np.zeros(255, uint8)
    activated(x, out)
    equal(out, integer_tables.gelu_table()[x].view(uint8) + uint8(128))


@pytest.mark.parametrize("kind", simd.available())
def test_every_operation_is_that_of_numpy(kind):
    code = f"import gc, test_simd; gc.disable(); test_simd.simd.use({kind!r}); test_simd.hold_against_numpy()"
    python("-c", code, PYTHONPATH="tests")
