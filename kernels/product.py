"""Products of all rows of a pass with a matrix, of every shape, on every GPU of cc 8.0 and newer, for the kernels of
both models.

Fragment    A warp owns 16 rows by N columns of a product: with half = 0, 1 for rows g and g + 8, acc[4 j + 2 half + e]
            is column 8 j + 2 q + e. This is what wgmma gives a warp of a warpgroup; mma.sync is used in the same shape,
            so that one epilogue serves both. (Tiles of 32 x 64 would read less shared memory, but only mma.sync on cc
            8.0 and 9.0 is fast enough to notice.)
Packing     Columns of the matrices between hidden units are permuted within 16, so that acc[8 j + 2 half + 0, 1, 4, 5]
            are columns 16 j + 4 q + 0..3.
Product     512 threads are four warpgroups: RG groups of 64 rows by CG groups of N columns. Pieces of the weights, K
            bytes wide in KP bytes at a time, pass through a ring of stages, so that warps drift apart: one multiplies
            while another does its epilogue. The rows stay in shared memory, or pass through the ring as well. Where
            they stay for several passes, the column groups of wgmma take turns.
            The copies are bulk copies beside wgmma and cp.async beside mma.sync.
"""

import math
from collections import namedtuple
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np
from numba import cuda, float32, int32, int64, uint32

from kernels import ptx
from kernels.parts import BITS, blocks, quad_max, thread, unrolled, wgmma_descriptor
from kernels.rules import device, loudest

THREADS, GROUPS = 512, 4
TALLEST = 64 * GROUPS                       # rows of the tallest tile: arrays of rows are padded to a multiple of it
# int64 of shared memory for barriers: full and empty of 12 stages and of the rows, and turns where stages are few
BARRIER_WORDS = 32
ZEROS = (np.int32(0),) * 4
Begin = namedtuple("Begin", "row column begin BASE")
Product = namedtuple("Product", "open_ring wait_rows multiply finish")


# --- rows -------------------------------------------------------------------------------------------------------------

def padded_length(cfg):
    """Rows of a member."""
    return blocks(cfg.SEQ_LEN, 16) * 16


def members_of(rows, length):
    """Most members of `length` rows that `rows` rows, from a multiple of `rows` on, can touch."""
    return blocks(length - math.gcd(rows, length) + rows, length)


@device
def accumulator_of(j, half, k):
    """Which accumulator of a thread is column 16 j + 4 q + k, in its first or (half = 1) second row, where columns are
    permuted (see Packing)."""
    return 8 * j + 2 * half + (k >> 1) * 4 + (k & 1)


# --- noise in the accumulators ---------------------------------------------------------------------------------------

def begin_functions(cfg, inputs, most=0):
    """A Begin: device functions that put the noise of a product over `inputs` inputs into the accumulators before the
    product starts:

    row(s), column(n)       a signed sb and a column noise (int32) as `begin` wants them, int32
    begin(s, n, c)          c + (s * n >> NOISE_SHIFT), where c = BASE + an int32 of at most `most` in size
    BASE                    not 0 where all that stays below 2^22. Then it is one float32 instruction: 1.5 * 2^23 +
                            i has the bits BASE + i, and a fused multiply-add that rounds downward is a
                            multiplication, a shift and a sum
    """
    SHIFT, UNIT = cfg.NOISE_SHIFT, 2.0 ** -cfg.NOISE_SHIFT
    sb = inputs * 127 * loudest(cfg)
    most += (sb * loudest(cfg) >> SHIFT) + 1
    FITS = cfg.ADAPTIVE_NOISE_MODE < 2 and sb < 1 << 24 and most < 1 << 22

    @device
    def row(s):
        return ptx.float_bits(float32(s) * float32(UNIT)) if FITS else s

    @device
    def column(n):
        return ptx.float_bits(float32(n)) if FITS else n

    @device
    def begin(s, n, c):
        if FITS:
            return ptx.float_bits(ptx.fma_down(ptx.bits_float(s), ptx.bits_float(n), ptx.bits_float(c)))
        return int32(c + (int32(s * n) >> SHIFT))

    return Begin(row, column, begin, BITS if FITS else 0)


def begin_tile_function(gpu, begin, base, at_bias=0, columns=128):
    """Device function (acc, at, s): accumulators before the product, with the noise of their columns, at a
    shared address, and what they begin with: `base`, or what lies at_bias bytes further. s: of both rows."""
    @gpu.called
    def begin_tile(acc, at, s):
        for j in unrolled(range(columns // 16)):
            n = ptx.load_shared4(at + j * 64)
            if at_bias:
                b = ptx.load_shared4(at + j * 64 + at_bias)
            for k in range(4):
                i = accumulator_of(j, 0, k)
                c = b[k] if at_bias else int32(base)
                acc[i], acc[i + 2] = begin(s[0], n[k], c), begin(s[1], n[k], c)
    return begin_tile


# --- the product ------------------------------------------------------------------------------------------------------

class Shape(SimpleNamespace):
    """How a product of K inputs is cut: RG groups of 64 rows by CG groups of N columns, `passes` of them; pieces of KP
    inputs in `stages` stages; `pieced`: the rows lie in memory in pieces; `together`: all warps end a tile together;
    `stream`: the rows pass through the ring with the weights, else they stay; `resident`: so do the weights; `turns`:
    a stage is for one column group, so that they take turns with the tensor cores and with their epilogues.

    `columns` of the matrix, with those that pad it; `pieces`, the steps of a pass; `steps` of a tile; `apart`, steps
    from one column group to the next; `row_threads` that share 64 rows. Bytes: `at_ring` of the rows before the ring,
    `stage` of a stage, `at_weights` of the rows in it before its weights, `bytes` of all. `at_empty`: bytes of the
    barriers of full stages and, after those, of full rows (row group i is stage `stages` + i); the barriers of empty
    ones come next, in the same order, and then those of the warpgroups' turns. `shallow`: the ring has few or small
    stages; a shape with more is preferred."""

    def traffic(self):
        """Bytes that a row brings from the second-level cache, half as much again for sums that wait there, and a tenth
        for epilogues beside which the tensor cores rest."""
        bytes_ = self.K * (self.passes if self.stream else 1) + 12 * self.CG * self.N * (self.passes - 1)
        if not self.resident:
            bytes_ += self.columns * self.K / (64 * self.RG)
        return bytes_ if self.resident or self.turns else 1.1 * bytes_


def shapes(budget, K, CG, N, passes, together, pieced=False, turns=False):
    """[Shape] of products that `budget` bytes of shared memory hold. turns: column groups may take turns where the rows
    stay for several passes."""
    fitting, RG = [], GROUPS // CG
    for stream in False, True:
        rows = 0 if stream else 64 * RG * K
        for KP in (k for k in range(256, 31, -32) if K % k == 0 and not (pieced and k & (k - 1))):
            at_weights, pieces = 64 * RG * KP if stream else 0, K // KP
            stage, steps = CG * N * KP + at_weights, passes * pieces
            resident = not stream and steps <= 12 and rows + steps * stage <= budget
            alternate = turns and CG > 1 and passes > 1 and not stream and not resident
            if alternate:
                stage = N * KP
            stages = steps if resident else min(5, (budget - rows) // stage)
            if resident or stages >= 2:
                fitting.append(Shape(
                    K=K, RG=RG, CG=CG, N=N, passes=passes, KP=KP, stages=stages, together=together, pieced=pieced,
                    stream=stream, turns=alternate, resident=resident, at_ring=rows, stage=stage,
                    bytes=rows + stages * stage, shallow=not resident and (stages < 3 or KP < min(64, K)),
                    columns=passes * CG * N, pieces=pieces, steps=steps * CG if alternate else steps,
                    apart=pieces if alternate else 0, row_threads=CG * 128, at_weights=at_weights,
                    at_empty=8 * (stages + RG)))
    return fitting


def wide_shape(budget, K, columns, turns=False):
    """Shape of a product whose columns pass by: as many rows as fit, so that the weights are read seldom. None: nothing
    fits."""
    fitting = [x for CG in (1, 2, 4)
               for x in shapes(budget, K, CG, 128, blocks(columns, 128 * CG), False, False, turns)]
    return min(fitting, key=lambda x: (x.shallow, x.stream, x.CG, -x.KP), default=None)


def full_shape(budget, K, H, unit=16, turns=False):
    """Shape of a product whose block has whole rows of H columns, N a multiple of `unit`."""
    fitting = []
    for CG in 1, 2, 4:
        passes = blocks(H, 128 * CG)
        fitting += shapes(budget, K, CG, blocks(H, unit * CG * passes) * unit, passes, True, K > H, turns)
    return min(fitting, key=lambda x: (x.shallow, round(x.traffic() / H), x.passes, x.CG, -x.KP))


class Ring(NamedTuple):
    """What the functions of a product share in a running kernel. Numba finds the types of the fields."""
    base: int               # shared address of the rows, and after them of the stages
    bar: int                # that of the barriers
    steps: int              # of all tiles: pieces of a pass, passes of a tile
    first: int              # the block's tiles: this one, and every `every`-th after it
    every: int
    x: object               # the rows, int32
    w: object               # packed weights, int32, and where the matrix begins
    at: int
    t: int                  # thread


@device
def split(i, n):
    """i // n and i % n of an int32 that is not negative, n a constant."""
    return int32(uint32(i) // uint32(n)), int32(uint32(i) % uint32(n))


def step_functions(gpu, shape, repeat, matrices, wait):
    """Device functions that start copies into shared memory: fetch_rows(ring, group, tile) of the rows of a row group,
    fetch(ring, step) of a stage; start(acc, ring, step, piece, keep) waits for a stage and starts acc += its products,
    or acc = them where `keep` is 0; done(acc) waits for the tensor cores. repeat, matrices: see product_functions;
    wait: that for a barrier."""
    BULK = gpu.wgmma
    K = shape.K
    KP = shape.KP
    N = shape.N
    RG = shape.RG
    CG = shape.CG
    STAGES = shape.stages
    STREAM = shape.stream
    RESIDENT = shape.resident
    STAGE = shape.stage
    AT_RING = shape.at_ring
    TURNS = shape.turns
    PIECES = shape.pieces
    ROW_THREADS = shape.row_threads
    AT_WEIGHTS = shape.at_weights
    COLUMNS = (1 if TURNS else CG) * N                       # of a stage
    ALL_COLUMNS = shape.columns // matrices
    PER = ALL_COLUMNS // COLUMNS
    # of a piece of rows in memory: words from one to the next; bytes that lie together, words from these to the next
    NEXT, EACH, APART = (16 * KP, 64 * KP, 16 * K) if shape.pieced else (2 * KP, 8 * KP, 2 * K)
    A_WIDTH, A_PIECE = KP if STREAM or shape.pieced else K, 64 * KP if shape.pieced else 8 * KP

    @gpu.device
    def copy(to, source, at, count, each, apart, full, t, threads):
        """`count` times `each` bytes, `apart` words apart from source[at] on: by this thread, or beside cp.async by
        `threads` threads, of which this is number t."""
        if BULK:
            for i in range(count):
                ptx.copy_bulk(to + i * each, source, at + i * apart, each, full)
        else:
            for i in range(t, count * each // 16, threads):
                word = i * 4 if count == 1 else i // (each // 16) * apart + i % (each // 16) * 4
                ptx.copy_async16(int32(to + i * 16), source, at + word)

    @gpu.called
    def fetch_rows(ring, group, tile):
        full, at = ring.bar + 8 * (STAGES + group), int64(tile * RG + group) * (16 * K)
        if BULK:
            ptx.barrier_expect(full, 64 * K)
        copy(ring.base + group * (64 * K), ring.x, at, 1, 64 * K, 0, full, ring.t % ROW_THREADS, ROW_THREADS)
        if not BULK:
            ptx.copy_arrive(full)

    @gpu.called
    def fetch(ring, step):
        """The copies of a step: beside bulk copies by one thread, else by all."""
        stage = split(step, STAGES)[1]
        passes, piece = split(step, PIECES)
        tiles, ahead = split(passes, PER * matrices)
        to = ring.base + AT_RING + stage * STAGE
        full, at = ring.bar + 8 * stage, ring.at
        if BULK:
            ptx.barrier_expect(full, STAGE)
        if STREAM:
            tile = ring.first + split(tiles, repeat)[0] * ring.every
            copy(to, ring.x, int64(tile) * (16 * RG * K) + piece * NEXT, 64 * RG * KP // EACH, EACH, APART, full,
                 ring.t, THREADS)
        if matrices > 1:
            matrix, ahead = split(ahead, PER)
            at = at + matrix * (ALL_COLUMNS * K // 4)
        copy(to + AT_WEIGHTS, ring.w, at + int32(piece * ALL_COLUMNS + ahead * COLUMNS) * (KP // 4), 1, COLUMNS * KP, 0,
             full, ring.t, THREADS)
        if not BULK:
            ptx.copy_arrive(full)

    @gpu.device
    def operands(ring, step, piece):
        """Waits for a step; shared addresses of the rows and of the columns of this warpgroup."""
        group = ring.t >> 7
        turn, stage = split(step, STAGES)
        wait(ring.bar + 8 * stage, 0 if RESIDENT else turn & 1)
        at = ring.base + AT_RING + stage * STAGE
        b = at + AT_WEIGHTS + (0 if TURNS else (group % CG) * (N * KP))
        if STREAM:
            return at + (group // CG) * (64 * KP), b
        return ring.base + (group // CG) * (64 * K) + piece * A_PIECE, b

    if gpu.wgmma:
        product, done = ptx.wgmma_s8(N), ptx.wgmma_done(N)
        of_rows, of_columns = wgmma_descriptor(A_WIDTH), wgmma_descriptor(KP)

        @gpu.called
        def start(acc, ring, step, piece, keep):
            a, b = operands(ring, step, piece)
            a_desc, b_desc = of_rows(ptx.keep_in_loop(a)), of_columns(ptx.keep_in_loop(b))
            ptx.wgmma_fence()
            for k in range(KP // 32):
                product(acc, a_desc + 16 * k, b_desc + 16 * k, 1 if k else keep)
    else:
        product = ptx.mma_tile(N, KP // 32, 8 * KP)

        @gpu.called
        def start(acc, ring, step, piece, keep):
            a, b = operands(ring, step, piece)
            if keep == 0:
                for i in unrolled(range(N // 2)):
                    acc[i] = 0
            matrix, row = (ring.t >> 3) & 3, (ring.t & 7) * 16        # what load_matrix4 takes of this lane
            a = a + ((ring.t & 127) >> 5) * (16 * A_WIDTH) + (matrix & 1) * (8 * A_WIDTH) + (matrix >> 1) * 128 + row
            product(acc, int32(a), int32(b + (matrix >> 1) * (8 * KP) + (matrix & 1) * 128 + row))

        @gpu.device
        def done(acc):
            pass

    return fetch_rows, fetch, start, done


def ring_functions(gpu, shape, own_rows, wait, fetch_rows, fetch):
    """Device functions: open_ring and wait_rows as in product_functions; leave_rows(ring, follows, turn, coming) and
    leave(ring, step), by which a warp has done with the rows or with a stage. wait: that for a barrier."""
    BULK = gpu.wgmma
    RG = shape.RG
    STAGES = shape.stages
    STREAM = shape.stream
    RESIDENT = shape.resident
    ROW_THREADS = shape.row_threads
    EMPTY = shape.at_empty
    TURN, TAKERS = 2 * EMPTY, GROUPS if shape.turns else 0
    READERS = 4 * RG if shape.turns else THREADS // 32       # warps that read a stage
    # steps by which warps may drift beside cp.async, about
    LAG = min(1 if shape.together or shape.pieces > 1 else 2, STAGES - 2)
    assert 2 * (STAGES + RG) + TAKERS <= BARRIER_WORDS

    @gpu.device
    def open_ring(steps, first, every, x, w, at):
        sm, barriers = cuda.shared.array(0, int32, 128), cuda.shared.array(BARRIER_WORDS, int64)
        base, bar = ptx.shared_address(sm, 0), ptx.shared_address(barriers, 0)
        t = thread() if own_rows else cuda.threadIdx.x
        ring = Ring(base, bar, steps, first, every, x, w, at, t)
        if t == 0:
            for i in unrolled(range(STAGES + RG)):
                threads = THREADS if i < STAGES else ROW_THREADS
                ptx.barrier_init(bar + 8 * i, 1 if BULK else threads)
                if BULK:
                    ptx.store_shared(bar + EMPTY + 8 * i, 0)
                else:
                    ptx.barrier_init(bar + EMPTY + 8 * i, threads)
            for i in unrolled(range(TAKERS)):
                ptx.barrier_init(bar + TURN + 8 * i, 128)
            if BULK:
                ptx.barrier_fence()
        cuda.syncthreads()                                   # nobody waits at a barrier before it is made
        if not STREAM and not own_rows and steps > 0 and (not BULK or t % ROW_THREADS == 0):
            fetch_rows(ring, t // ROW_THREADS, first)
        if not BULK or t == 0:
            for step in range(min(STAGES, steps)):
                fetch(ring, int32(step))
        return ring

    @gpu.device
    def wait_rows(ring, turn):
        if not STREAM:
            wait(ring.bar + 8 * (STAGES + ring.t // ROW_THREADS), turn & 1)

    @gpu.device
    def last_to_leave(ring, i, warps):
        """This warp has done with stage i. Whether this thread is to fill it again: one thread, of the last of `warps`
        warps; none beside cp.async, where all wait for that. There every lane arrives: racecheck of the CUDA toolkit
        does not see that a lane which arrives after syncwarp does so for its warp."""
        if not BULK:
            ptx.barrier_arrive(ring.bar + EMPTY + 8 * i)
        elif ring.t & 31 == 0:
            return ptx.count_round(ring.bar + EMPTY + 8 * i, warps - 1) == warps - 1
        return False

    @gpu.device
    def leave_rows(ring, follows, turn, coming):
        if not STREAM:
            group = ring.t // ROW_THREADS
            if last_to_leave(ring, STAGES + group, ROW_THREADS // 32) and follows:
                fetch_rows(ring, group, coming)
            if not BULK and follows:
                wait(ring.bar + EMPTY + 8 * (STAGES + group), turn & 1)
                fetch_rows(ring, group, coming)

    @gpu.called
    def leave(ring, step):
        """This warp has done with the stage of a step, which is for that of a later one."""
        if not RESIDENT:
            cuda.syncwarp()                                  # all lanes have read the stage
            if last_to_leave(ring, split(step, STAGES)[1], READERS) and int32(step + STAGES) < int32(ring.steps):
                fetch(ring, int32(step + STAGES))
            if not BULK:
                old = int32(step - LAG)
                if old >= 0 and old + STAGES < ring.steps:
                    turn, stage = split(old, STAGES)
                    wait(ring.bar + EMPTY + 8 * stage, turn & 1)
                    fetch(ring, int32(old + STAGES))

    return open_ring, wait_rows, leave_rows, leave


def product_functions(gpu, shape, repeat=1, matrices=1, fresh=False, own_rows=False):
    """A Product: device functions of that of a Shape whose passes come round `repeat` times for every tile of rows, and
    are those of `matrices` matrices, one behind the other:

    open_ring(steps, first, every, x, w, at)    the Ring of the block, with a barrier of the block; starts the first
                                                copies. The kernel makes the rows itself with `own_rows`
    wait_rows(ring, turn)                       turn: how many tiles came before
    multiply(acc, ring, step, from_piece)       acc += the product of all pieces of a pass, with `fresh` acc = it; the
                                                rows lie in the pieces from from_piece on. The tensor cores may still
                                                work on the last, whose step it returns
    finish(acc, ring, step, last, follows, turn, coming)
                                                acc may be read; the stage is filled again, and the rows if this was the
                                                `last` pass of a tile and another tile `follows`, `coming`. Returns
                                                the next step

    Beside bulk copies the last warp that leaves a stage, or the rows, starts the next copy into it: warps may drift
    apart by as much as the ring holds.
    """
    PIECES = shape.pieces
    CG = shape.CG
    TURNS = shape.turns
    TURN = 2 * shape.at_empty
    wait = ptx.barrier_wait if gpu.wgmma else ptx.barrier_test
    fetch_rows, fetch, start, done = step_functions(gpu, shape, repeat, matrices, wait)
    open_ring, wait_rows, leave_rows, leave = ring_functions(gpu, shape, own_rows, wait, fetch_rows, fetch)

    @gpu.device
    def multiply(acc, ring, step, from_piece=0):
        step, group = int32(step), ring.t >> 7
        if TURNS and step > 0:
            # A barrier tells only odd phases from even ones: no warp may wait for a stage two phases ahead.
            wait(ring.bar + TURN + 8 * group, split(int32(step - PIECES), CG * PIECES)[0] & 1)
        for piece in range(int32(PIECES - 1)):
            start(acc, ring, step, from_piece + piece, piece if fresh else 1)
            done(acc)
            leave(ring, step)
            step = int32(step + 1)
        start(acc, ring, step, from_piece + (PIECES - 1), PIECES - 1 if fresh else 1)
        if TURNS:                                            # no warp waits for the last; a branch would cost more
            ptx.barrier_arrive(ring.bar + TURN + 8 * (group // CG * CG + (group + 1) % CG))
        return step

    @gpu.device
    def finish(acc, ring, step, last, follows, turn, coming):
        done(acc)
        leave(ring, step)
        if last:
            leave_rows(ring, follows, turn, coming)
        return int32(step + 1 + ((CG - 1) * PIECES if TURNS else 0))

    return Product(open_ring, wait_rows, multiply, finish)


class Place(NamedTuple):
    """Where a thread is in a tile, in a running kernel."""
    row: int                # the first of its two rows; the other is 8 further
    first: int              # the member of the first of the 64 rows of its warpgroup
    slot: int               # how many members further that of its rows is
    sign: int               # of the noise of that one


def place_function(cfg, RG, paired=False):
    """Device function place_of(tile, t, length): the Place of thread t. paired: rows as in kernels.gru, with pairs for
    members, of windows of `length` positions."""
    LENGTH = padded_length(cfg)
    CG = GROUPS // RG
    PLACES = 32 if paired else 64
    SLOTS = members_of(PLACES, cfg.SEQ_LEN if paired else LENGTH)

    @device
    def place_of(tile, t, length):
        n, g = uint32(length if paired else LENGTH), int32((t & 31) >> 2)
        first = int32((tile * RG + (t >> 7) // CG) * PLACES)
        warp = int32(first + ((t & 127) >> 5) * (PLACES // 4))
        member, slot = int32(uint32(first) // n), int32(0)
        if SLOTS > 1:
            slot = int32(int32(uint32(warp + g if paired else warp) // n) - member)
        if paired:
            return Place(int32(2 * warp + g), member, slot, int32(1))
        return Place(int32(warp + g), member, slot, int32(1 - 2 * ((member + slot) & 1)))

    return place_of


@device
def joined(tops, sm, at, CG, side, q, barrier):
    """The largest values of a thread's two rows become those of the quad and of all CG column groups, which exchange
    them through words of shared memory."""
    for half in range(2):
        tops[half] = quad_max(tops[half])
    if CG > 1:
        if q == 0:
            sm[at + side], sm[at + 8 * CG + side] = tops[0], tops[1]
        ptx.named_barrier(barrier, CG * 128)
        for k in range(CG):
            for half in range(2):
                tops[half] = max(tops[half], sm[at + half * (8 * CG) + k])
