"""Tiles of int8 products, for the votes of the update and for unit trials: a block multiplies TILE rows of each
operand, both contiguous in the direction of the sums, through STAGES stages of shared memory."""

from types import SimpleNamespace

from numba import cuda, int32

from kernels.parts import wgmma_descriptor
from kernels.ptx import (copy_async16, copy_commit, copy_wait_but_one, mma_tile, proxy_fence, shared_address,
                         wgmma_done, wgmma_fence, wgmma_s8)
from kernels.rules import device

TILE = 128                  # rows of each operand of a block
DEPTH = 64                  # bytes of a row in a stage
STAGES = 3
STAGE = 2 * TILE * DEPTH    # bytes
SHARED = STAGES * STAGE     # 48 KiB: every card grants it without asking
THREADS = 128


def tile_functions(wgmma):
    """TALL, SUMS: a thread's sums are int32 [TALL, SUMS]; accumulate and corner, device functions; wgmma: by the
    instruction of cc 9.0, which takes 4 to 20 % off an update.

    accumulate(acc, x, x_at, x_apart, x_each, w, w_at, w_apart, w_each, steps)
        acc += products of `steps` stages. x, w: int32 words of the operands; x_at: where this thread's first 16 bytes
        of row group t // 32 lie, eight rows a group; x_apart: words from a group to the next; x_each: from a stage to
        the next
    corner()    (row of x, row of w) of acc[0, 0]; acc[i, 4 j + 2 half + k] is APART * i + 8 * half rows of x and
                8 * j + k rows of w further
    """
    product, products_done = wgmma_s8(TILE), wgmma_done(TILE)
    descriptor = wgmma_descriptor(DEPTH)
    multiply = mma_tile(64, DEPTH // 32, 8 * DEPTH)
    # a thread's sums lie in TALL by WIDE tiles of rows of x by 8 of w: of a warp's quarter of the block, or of a
    # warpgroup's 64 rows of x by all of w
    TALL, WIDE = (2, 16) if wgmma else (4, 8)
    APART = 64 if wgmma else 16
    SUMS = 4 * WIDE

    @device
    def fetch(to, x, x_at, x_apart, w, w_at, w_apart):
        """This thread's share of a stage."""
        t = cuda.threadIdx.x
        for i in range(4):
            copy_async16(int32(to + (t + i * THREADS) * 16), x, x_at + 4 * i * x_apart)
        for i in range(4):
            copy_async16(int32(to + STAGE // 2 + (t + i * THREADS) * 16), w, w_at + 4 * i * w_apart)

    @device
    def accumulate(acc, x, x_at, x_apart, x_each, w, w_at, w_apart, w_each, steps):
        sm = cuda.shared.array(0, int32)
        t = cuda.threadIdx.x
        base = shared_address(sm, 0)
        for ahead in range(2):
            if ahead < steps:
                fetch(base + ahead * STAGE, x, x_at + ahead * x_each, x_apart, w, w_at + ahead * w_each, w_apart)
            copy_commit()
        lane, warp = t & 31, t >> 5
        # ldmatrix: where this lane's rows of the first core matrices lie
        x_lane = (warp >> 1) * (64 * DEPTH) + ((lane >> 3) & 1) * (8 * DEPTH) + (lane >> 4) * 128 + (lane & 7) * 16
        w_lane = (warp & 1) * (64 * DEPTH) + (lane >> 4) * (8 * DEPTH) + ((lane >> 3) & 1) * 128 + (lane & 7) * 16
        w_lane += STAGE // 2
        slot = int32(0)
        for step in range(steps):
            copy_wait_but_one()
            if wgmma:
                proxy_fence()
            cuda.syncthreads()                               # this stage is there; all have read the one filled now
            if step + 2 < steps:
                fetch(base + (slot + 2 if slot == 0 else slot - 1) * STAGE, x, x_at + (step + 2) * x_each, x_apart,
                      w, w_at + (step + 2) * w_each, w_apart)
            copy_commit()
            here = base + slot * STAGE
            if wgmma:
                x_rows = descriptor(here)
                w_rows = x_rows + (TILE * DEPTH >> 4)
                wgmma_fence()
                for k in range(DEPTH // 32):
                    for i in range(TALL):
                        product(acc[i], x_rows + i * (64 * DEPTH >> 4) + 16 * k, w_rows + 16 * k, 1)
                for i in range(TALL):
                    products_done(acc[i])
            else:
                for i in range(TALL):
                    multiply(acc[i], here + x_lane + i * (16 * DEPTH), here + w_lane)
            slot = int32(0) if slot == STAGES - 1 else int32(slot + 1)

    @device
    def corner():
        lane, warp = cuda.threadIdx.x & 31, cuda.threadIdx.x >> 5
        g, q = lane >> 2, lane & 3
        return (16 * warp if wgmma else 64 * (warp >> 1)) + g, 2 * q if wgmma else 64 * (warp & 1) + 2 * q

    return SimpleNamespace(TALL=TALL, WIDE=WIDE, SUMS=SUMS, APART=APART, accumulate=accumulate, corner=corner)
