"""The transformer's forward pass on CUDA, for every shape and every card of cc 8.0 and newer.

`egg_kernels` documents the calls and has generation. Validation is the same pass with the noise masked out; only its
head is another kernel. Five parts make it:

Rows        A member's T positions are padded to a multiple of 16, so that the 16 rows of a warp belong to one member; a
            pair is two members, one after the other. Activations are core matrices (ptx) of int8.
Fragment    A warp owns 16 rows by N columns of a product: with half = 0, 1 for rows g and g + 8, acc[4 j + 2 half + e]
            is column 8 j + 2 q + e. This is what wgmma gives a warp of a warpgroup; mma.sync is used in the same shape,
            so that one epilogue serves both. (Tiles of 32 x 64 would read less shared memory, but only mma.sync on cc
            8.0 and 9.0 is fast enough to notice.)
Packing     Columns of the matrices between hidden units are permuted within 16, so that acc[8 j + 2 half + 0, 1, 4, 5]
            are columns 16 j + 4 q + 0..3. The 4 H units of an MLP lie in blocks of 128, units i + sub * H of 32
            neighbouring i, so that the four units which share a running integer (SPEC 4) lie in one thread.
Product     512 threads are four warpgroups: RG groups of 64 rows by CG groups of N columns. Pieces of the weights, K
            bytes wide in KP bytes at a time, pass through a ring of stages, so that warps drift apart: one multiplies
            while another does its epilogue. The rows stay in shared memory, or pass through the ring as well. Where
            they stay for several passes, the column groups of wgmma take turns.
            The copies are bulk copies beside wgmma and cp.async beside mma.sync.
Epilogues   Noise of the columns is hashed while the tensor cores work. The accumulators of the up projection and of the
            head begin with it. Products of full width keep a row's amax in the block; where the row is wider than 512
            columns, sums of earlier passes wait in scratch memory of the block.
"""

import math
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np
from numba import cuda, float32, float64, int32, int64, uint32, uint64

from kernels import ptx
from kernels.parts import (A64, AF64, BITS, MAGIC, PLAN, SIGNS, amax_scale, blocks, byte, clip, ntt_functions, pack4,
                           pack_quad, pack_rounded, quad_max, quad_sum, quad_sum64, quotient_function, rounded,
                           thread, vector_function, wgmma_descriptor, written_out)
from kernels.products import CLEAN_EXPS, CLEAN_ONE, DOWN, PLAIN, QUADS, ROWS, UP, Kernel, Pass, ranges
from kernels.rules import build_noise, device, divide, loss_function, loudest
from model import integer_tables
from model import parameters

THREADS, GROUPS = 512, 4
TILE = 64                                   # positions of keys and values that the attention takes at a time
TALLEST = 64 * GROUPS                       # rows of the tallest tile: arrays of rows are padded to a multiple of it
MOST_BLOCKS = 256                           # of a persistent kernel
# int64 of shared memory for barriers: full and empty of 12 stages and of the rows, and turns where stages are few
BARRIER_WORDS = 32
ZEROS = (np.int32(0),) * 4
CLEAN_HEAD = dict(losses=AF64, exps=A64)    # types of the parameters of validation's head


class Card(NamedTuple):
    """What kernels are made for."""
    wgmma: bool             # and bulk copies; else mma.sync and cp.async
    shared: int             # bytes of shared memory a block may have
    unrolls: bool = True    # whether the compiler for it unrolls loops over registers

    def written(self, function):
        return function if self.unrolls else written_out(function)

    def device(self, function):
        return device(self.written(function))


# --- rows -------------------------------------------------------------------------------------------------------------

def padded_length(cfg):
    """Rows of a member."""
    return blocks(cfg.SEQ_LEN, 16) * 16


def members_of(rows, length):
    """Most members of `length` rows that `rows` rows, from a multiple of `rows` on, can touch."""
    return blocks(length - math.gcd(rows, length) + rows, length)


# --- the tables of EXP, and noise as float32 --------------------------------------------------------------------------

def exp_sizes(cfg):
    """(the first entry of EXP that all further ones equal; how many copies of the table, one a bank, fit: a look-up by
    32 lanes then has no bank conflicts, or few)."""
    exps = integer_tables.exp_table(cfg)[:256]
    most = int(np.flatnonzero(exps != exps[-1])[-1]) + 1 if (exps != exps[-1]).any() else 0
    return most, 32 if most < 96 else 8


def begin_functions(cfg, nz, inputs, most=0):
    """Device functions that put the noise of a product over `inputs` inputs into the accumulators before the product
    starts: (row, column, begin, BASE)

    row(s, shift), column(n)    device functions: a signed sb and a column noise (int32) as `begin` wants them, int32
    begin(s, n, c, shift)       c + (s * n >> shift), where c = BASE + an int32 of at most `most` in size
    BASE                        not 0 where all that stays below 2^22. Then it is one float32 instruction: 1.5 * 2^23 +
                                i has the bits BASE + i, and a fused multiply-add that rounds downward is a
                                multiplication, a shift and a sum
    """
    SILENT, unit, sb = nz.silent, nz.unit, inputs * 127 * loudest(cfg)
    most += (sb * loudest(cfg) >> cfg.NOISE_SHIFTS[0]) + 1
    FITS = cfg.ADAPTIVE_NOISE_MODE < 2 and sb < 1 << 24 and most < 1 << 22

    @device
    def row(s, shift):
        return ptx.float_bits(float32(float32(s) * unit(shift))) if FITS else s

    @device
    def column(n):
        return ptx.float_bits(float32(n)) if FITS else n

    @device
    def begin(s, n, c, shift):
        if SILENT:
            return c
        if FITS:
            return ptx.float_bits(ptx.fma_down(ptx.bits_float(s), ptx.bits_float(n), ptx.bits_float(c)))
        return int32(c + ptx.shift_right(int32(s * n), shift))

    return row, column, begin, 0x4B400000 if FITS else 0


def begin_tile_function(card, nz, begin, base, at_bias=0):
    """Device function (acc, at, s, shift): 128 columns of accumulators before the product, with the noise of their
    columns, at a shared address, and what they begin with: `base`, or what lies at_bias bytes further. s: of both
    rows."""
    SILENT = nz.silent

    @card.device
    def begin_tile(acc, at, s, shift):
        n = ZEROS
        for j in range(8):
            if not SILENT:
                n = ptx.load_shared4(at + j * 64)
            if at_bias:
                b = ptx.load_shared4(at + j * 64 + at_bias)
            for k in range(4):
                i = 8 * j + (k >> 1) * 4 + (k & 1)
                c = b[k] if at_bias else int32(base)
                acc[i], acc[i + 2] = begin(s[0], n[k], c, shift), begin(s[1], n[k], c, shift)
    return begin_tile


class Source(NamedTuple):
    """What the noise and the vectors of a call are made of, in a running kernel: the arrays, the first entry of its row
    of the plan, and the seed of pair 0."""
    plan: object
    p: int
    weights: object
    overlay: object
    job: object
    seed: int


def pair_functions(cfg, nz):
    """Device functions of a Source, with the noise masked by job[2] as int32: -1 or, for validation, 0.

    column(source, pair, i)         noise of column i of the matrix: plan: 1 seed A, 2 overlay A
    vector(source, at, pair, i)     entry i of a vector for both members: plan[at...] as of vector_function
    """
    of_plan, noise, scaled = vector_function(cfg, nz), nz.noise, nz.scaled

    @device
    def column(source, pair, i):
        stream = uint32(uint32(source.seed + uint32(pair)) + uint32(source.plan[source.p + 1]))
        n = scaled(noise(stream, i), source.overlay[uint64(source.plan[source.p + 2] + i)], stream, i)
        return int32(n & int32(source.job[2]))

    @device
    def vector(source, at, pair, i):
        at, seed, mask = source.p + at, uint32(source.seed + uint32(pair)), int32(source.job[2])
        w = int32(source.weights[source.plan[at] + i])
        even, odd = of_plan(source.weights, source.overlay, source.plan, at, seed, i)
        return int32(w + int32(int32(even - w) & mask)), int32(w + int32(int32(odd - w) & mask))

    return column, vector


# --- the product ------------------------------------------------------------------------------------------------------

class Shape(SimpleNamespace):
    """How a product of K inputs is cut: RG groups of 64 rows by CG groups of N columns, `passes` of them; pieces of KP
    inputs in `stages` stages; `pieced`: the rows lie in memory in pieces; `together`: all warps end a tile together;
    `stream`: the rows pass through the ring with the weights, else they stay; `resident`: so do the weights; `turns`:
    a stage is for one column group, so that they take turns with the tensor cores and with their epilogues. Bytes:
    `at_ring` of the rows before the ring, `stage` of a stage, `bytes` of all."""

    def columns(self):
        """Columns of the matrix, with those that pad it."""
        return self.passes * self.CG * self.N

    def steps(self):
        """(steps of a tile, steps from one column group to the next)."""
        pieces = self.K // self.KP
        return self.passes * pieces * (self.CG if self.turns else 1), pieces if self.turns else 0

    def traffic(self):
        """Bytes that a row brings from the second-level cache, half as much again for sums that wait there, and a tenth
        for epilogues beside which the tensor cores rest."""
        weights = 0 if self.resident else self.columns() * self.K / (64 * self.RG)
        bytes_ = weights + self.K * (self.passes if self.stream else 1) + 12 * self.CG * self.N * (self.passes - 1)
        return bytes_ if self.resident or self.turns else 1.1 * bytes_


def _shapes(budget, K, CG, N, passes, together, pieced=False, turns=False):
    """[(rank, Shape)] of products that `budget` bytes of shared memory hold, those of rank 0 with a ring that is deep
    enough. turns: column groups may take turns where the rows stay for several passes."""
    found, RG = [], GROUPS // CG
    for stream in False, True:
        rows = 0 if stream else 64 * RG * K
        for KP in (k for k in range(256, 31, -32) if K % k == 0 and not (pieced and k & (k - 1))):
            stage = (CG * N + (64 * RG if stream else 0)) * KP
            steps = passes * K // KP
            resident = not stream and steps <= 12 and rows + steps * stage <= budget
            alternate = turns and CG > 1 and passes > 1 and not stream and not resident
            if alternate:
                stage = N * KP
            stages = steps if resident else min(5, (budget - rows) // stage)
            if resident or stages >= 2:
                rank = 0 if resident or stages >= 3 and KP >= min(64, K) else 1
                found.append((rank, Shape(K=K, RG=RG, CG=CG, N=N, passes=passes, KP=KP, stages=stages,
                                          together=together, pieced=pieced, stream=stream, turns=alternate,
                                          resident=resident, at_ring=rows, stage=stage, bytes=rows + stages * stage)))
    return found


def wide_shape(budget, K, columns, turns=False):
    """Shape of a product whose columns pass by: as many rows as fit, so that the weights are read seldom. None: nothing
    fits."""
    found = [x for CG in (1, 2, 4) for x in _shapes(budget, K, CG, 128, blocks(columns, 128 * CG), False, False, turns)]
    return min(found, key=lambda x: (x[0], x[1].stream, x[1].CG, -x[1].KP))[1] if found else None


def full_shape(budget, K, H, unit=16, turns=False):
    """Shape of a product whose block has whole rows of H columns, N a multiple of `unit`."""
    found = []
    for CG in 1, 2, 4:
        passes = blocks(H, 128 * CG)
        found += _shapes(budget, K, CG, blocks(H, unit * CG * passes) * unit, passes, True, K > H, turns)
    return min(found, key=lambda x: (x[0], round(x[1].traffic() / H), x[1].passes, x[1].CG, -x[1].KP))[1]


class Ring(NamedTuple):
    """What the functions of a product share in a running kernel. Numba reads the fields; their types are its own."""
    base: int               # shared address of the rows, and after them of the stages
    bar: int                # that of the barriers
    steps: int              # of all tiles: pieces of a pass, passes of a tile
    first: int              # the block's tiles: this one, and every `every`-th after it
    every: int
    x: object               # the rows, int32
    w: object               # packed weights, int32, and where the matrix begins
    at: int
    t: int                  # thread


def product_functions(card, shape, repeat=1, matrices=1, fresh=False, own_rows=False):
    """Device functions, in this order, of the product of a Shape whose passes come round `repeat` times for every tile
    of rows, and are those of so many matrices, one behind the other:

    open_ring(steps, first, every, x, w, at)    the Ring of the block, with a barrier of the block; starts the first
                                                copies. The kernel makes the rows itself with `own_rows`
    wait_rows(ring, turn)                       turn: how many tiles came before
    multiply(acc, ring, step, from_piece)       acc += the product of all pieces of a pass, with `fresh` acc = it; the
                                                rows lie in the pieces from from_piece on. The tensor cores may still
                                                work on the last, whose step it returns
    finish(acc, ring, step, last, more, turn, coming)
                                                acc may be read; the stage is filled again, and the rows if this was the
                                                `last` pass of a tile and `more` tiles follow, next `coming`. Returns
                                                the next step

    Beside bulk copies the last warp that leaves a stage, or the rows, starts the next copy into it: warps may drift
    apart by as much as the ring holds.
    """
    BULK, K, KP, RG, CG, N = card.wgmma, shape.K, shape.KP, shape.RG, shape.CG, shape.N
    STAGES, STREAM, RESIDENT, STAGE, AT_RING = shape.stages, shape.stream, shape.resident, shape.stage, shape.at_ring
    PIECES, PIECED, TURNS = K // KP, shape.pieced, shape.turns
    # of a stage: its columns, the warps that read it
    COLUMNS, READERS = (N, 4 * RG) if TURNS else (CG * N, THREADS // 32)
    ALL_COLUMNS = shape.columns() // matrices
    PER = ALL_COLUMNS // COLUMNS
    # steps by which warps may drift beside cp.async, about
    LAG = min(1 if shape.together or PIECES > 1 else 2, STAGES - 2)
    EMPTY = 8 * (STAGES + RG)                                # after the rows of row group i, which are stage STAGES + i
    TURN, TAKERS = 2 * EMPTY, GROUPS if TURNS else 0        # then those of the warpgroups' turns
    A_PART, ROW_THREADS = 64 * RG * KP if STREAM else 0, CG * 128
    A_WIDTH, A_PIECE = KP if STREAM or PIECED else K, 64 * KP if PIECED else 8 * KP
    # of a piece of rows in memory: words from one to the next; bytes that lie together, words from these to the next
    NEXT, EACH, APART = (16 * KP, 64 * KP, 16 * K) if PIECED else (2 * KP, 8 * KP, 2 * K)
    assert 2 * (STAGES + RG) + TAKERS <= BARRIER_WORDS
    wait = ptx.barrier_wait if BULK else ptx.barrier_test

    @device
    def split(i, n):
        """i // n and i % n of an int32 that is not negative, n a constant."""
        return int32(uint32(i) // uint32(n)), int32(uint32(i) % uint32(n))

    @card.device
    def copy(to, source, at, count, each, apart, full, t, threads):
        """`count` times `each` bytes, `apart` words apart from source[at] on: by this thread, or beside cp.async by so
        many threads, of which this is number t."""
        if BULK:
            for i in range(count):
                ptx.copy_bulk(to + i * each, source, at + i * apart, each, full)
        else:
            for i in range(t, count * each // 16, threads):
                word = i * 4 if count == 1 else i // (each // 16) * apart + i % (each // 16) * 4
                ptx.copy_async16(int32(to + i * 16), source, at + word)

    @card.device
    def fetch_rows(ring, group, tile):
        full, at = ring.bar + 8 * (STAGES + group), int64(tile * RG + group) * (16 * K)
        if BULK:
            ptx.barrier_expect(full, 64 * K)
        copy(ring.base + group * (64 * K), ring.x, at, 1, 64 * K, 0, full, ring.t % ROW_THREADS, ROW_THREADS)
        if not BULK:
            ptx.copy_arrive(full)

    @card.device
    def fetch(ring, step):
        """The copies of a step: beside bulk copies by one thread, else by all."""
        stage = split(step, STAGES)[1]
        passes, piece = split(step, PIECES)
        tiles, ahead = split(passes, PER * matrices)
        to, at, full = ring.base + AT_RING + stage * STAGE, ring.at, ring.bar + 8 * stage
        if BULK:
            ptx.barrier_expect(full, STAGE)
        if STREAM:
            tile = ring.first + split(tiles, repeat)[0] * ring.every
            copy(to, ring.x, int64(tile) * (16 * RG * K) + piece * NEXT, 64 * RG * KP // EACH, EACH, APART, full,
                 ring.t, THREADS)
        if matrices > 1:
            matrix, ahead = split(ahead, PER)
            at = at + matrix * (ALL_COLUMNS * K // 4)
        copy(to + A_PART, ring.w, at + int32(piece * ALL_COLUMNS + ahead * COLUMNS) * (KP // 4), 1, COLUMNS * KP, 0,
             full, ring.t, THREADS)
        if not BULK:
            ptx.copy_arrive(full)

    @card.device
    def open_ring(steps, first, every, x, w, at):
        sm, barriers = cuda.shared.array(0, int32, 128), cuda.shared.array(BARRIER_WORDS, int64)
        base, bar = ptx.shared_address(sm, 0), ptx.shared_address(barriers, 0)
        t = thread() if own_rows else cuda.threadIdx.x
        ring = Ring(base, bar, steps, first, every, x, w, at, t)
        if t == 0:
            for i in range(STAGES + RG):
                threads = THREADS if i < STAGES else ROW_THREADS
                ptx.barrier_init(bar + 8 * i, 1 if BULK else threads)
                if BULK:
                    ptx.store_shared(int32(bar + EMPTY + 8 * i), 0)
                else:
                    ptx.barrier_init(bar + EMPTY + 8 * i, threads)
            for i in range(TAKERS):
                ptx.barrier_init(bar + TURN + 8 * i, 128)
            if BULK:
                ptx.barrier_fence()
        cuda.syncthreads()
        if not STREAM and not own_rows and steps > 0 and (not BULK or t % ROW_THREADS == 0):
            fetch_rows(ring, t // ROW_THREADS, first)
        if not BULK or t == 0:
            for step in range(min(STAGES, steps)):
                fetch(ring, int32(step))
        return ring

    @card.device
    def wait_rows(ring, turn):
        if not STREAM:
            wait(ring.bar + 8 * (STAGES + ring.t // ROW_THREADS), turn & 1)

    @card.device
    def last_to_leave(ring, i, warps):
        """This warp has done with stage i. Whether this thread is to fill it again: one thread, of the last of `warps`
        warps; none beside cp.async, where all wait for that. There every lane arrives: racecheck of the CUDA toolkit
        does not see that a lane which arrives after syncwarp does so for its warp."""
        if not BULK:
            ptx.barrier_arrive(ring.bar + EMPTY + 8 * i)
        elif ring.t & 31 == 0:
            return ptx.count_round(int32(ring.bar + EMPTY + 8 * i), warps - 1) == warps - 1
        return False

    @card.device
    def leave_rows(ring, more, turn, coming):
        if not STREAM:
            group = ring.t // ROW_THREADS
            if last_to_leave(ring, STAGES + group, ROW_THREADS // 32) and more:
                fetch_rows(ring, group, coming)
            if not BULK and more:
                wait(ring.bar + EMPTY + 8 * (STAGES + group), turn & 1)
                fetch_rows(ring, group, coming)

    @card.device
    def leave(ring, step):
        """This warp has done with the stage of a step, which is for that of a later one."""
        if not RESIDENT:
            cuda.syncwarp()
            if last_to_leave(ring, split(step, STAGES)[1], READERS) and int32(step + STAGES) < int32(ring.steps):
                fetch(ring, int32(step + STAGES))
            if not BULK:
                old = int32(step - LAG)
                if old >= 0 and old + STAGES < ring.steps:
                    turn, stage = split(old, STAGES)
                    wait(ring.bar + EMPTY + 8 * stage, turn & 1)
                    fetch(ring, int32(old + STAGES))

    @card.device
    def operands(ring, step, piece):
        """Waits for a step; shared addresses of the rows and of the columns of this warpgroup."""
        group = ring.t >> 7
        turn, stage = split(step, STAGES)
        wait(ring.bar + 8 * stage, 0 if RESIDENT else turn & 1)
        at = ring.base + AT_RING + stage * STAGE
        b = at + A_PART + (0 if TURNS else (group % CG) * (N * KP))
        if STREAM:
            return at + (group // CG) * (64 * KP), b
        return ring.base + (group // CG) * (64 * K) + piece * A_PIECE, b

    if BULK:
        product, done = ptx.wgmma_s8(N), ptx.wgmma_done(N)
        of_rows, of_columns = wgmma_descriptor(A_WIDTH), wgmma_descriptor(KP)

        @card.device
        def start(acc, ring, step, piece, keep):
            a, b = operands(ring, step, piece)
            a_desc, b_desc = of_rows(ptx.keep_in_loop(a)), of_columns(ptx.keep_in_loop(b))
            ptx.wgmma_fence()
            for k in range(KP // 32):
                product(acc, a_desc + 16 * k, b_desc + 16 * k, 1 if k else keep)
    else:
        product = ptx.mma_tile(N, KP // 32, 8 * KP)

        @card.device
        def start(acc, ring, step, piece, keep):
            a, b = operands(ring, step, piece)
            if keep == 0:
                for i in range(N // 2):
                    acc[i] = 0
            matrix, row = (ring.t >> 3) & 3, (ring.t & 7) * 16        # what load_matrix4 takes of this lane
            a = a + ((ring.t & 127) >> 5) * (16 * A_WIDTH) + (matrix & 1) * (8 * A_WIDTH) + (matrix >> 1) * 128 + row
            product(acc, int32(a), int32(b + (matrix >> 1) * (8 * KP) + (matrix & 1) * 128 + row))

        @card.device
        def done(acc):
            pass

    @card.device
    def multiply(acc, ring, step, from_piece=0):
        step, group = int32(step), ring.t >> 7
        if TURNS and step > 0:
            # A barrier tells only odd phases from even ones: nobody may wait for a stage two phases ahead.
            wait(ring.bar + TURN + 8 * group, split(int32(step - PIECES), CG * PIECES)[0] & 1)
        for piece in range(int32(PIECES - 1)):
            start(acc, ring, step, from_piece + piece, piece if fresh else 1)
            done(acc)
            leave(ring, step)
            step = int32(step + 1)
        start(acc, ring, step, from_piece + (PIECES - 1), PIECES - 1 if fresh else 1)
        if TURNS:                                            # nobody waits in the end; a branch would cost more
            ptx.barrier_arrive(ring.bar + TURN + 8 * (group // CG * CG + (group + 1) % CG))
        return step

    @card.device
    def finish(acc, ring, step, last, more, turn, coming):
        done(acc)
        leave(ring, step)
        if last:
            leave_rows(ring, more, turn, coming)
        return int32(step + 1 + ((CG - 1) * PIECES if TURNS else 0))

    return open_ring, wait_rows, multiply, finish


def _place_function(cfg, RG, paired=False):
    """Device function place(tile, t, length) -> (row, member, slot, sign): the first of a thread's two rows (the other
    is 8 further), the member of the first of the 64 rows of its warpgroup, how many members further its own is, and
    that one's sign. paired: rows as in kernels.gru, with pairs for members, of windows of `length` positions."""
    LENGTH, CG, PLACES = padded_length(cfg), GROUPS // RG, 32 if paired else 64
    SLOTS = members_of(PLACES, cfg.SEQ_LEN if paired else LENGTH)

    @device
    def place(tile, t, length):
        n, g = uint32(length if paired else LENGTH), int32((t & 31) >> 2)
        first = int32((tile * RG + (t >> 7) // CG) * PLACES)
        warp = int32(first + ((t & 127) >> 5) * (PLACES // 4))
        member, slot = int32(uint32(first) // n), int32(0)
        if SLOTS > 1:
            slot = int32(int32(uint32(int32(warp + g) if paired else warp) // n) - member)
        if paired:
            return int32(int32(2 * warp) + g), member, slot, int32(1)
        return int32(warp + g), member, slot, int32(1 - 2 * ((member + slot) & 1))

    return place


# --- up: GELU of a product that is wider than the rows ----------------------------------------------------------------

def _up_kernel(cfg, nz, card, KP):
    """u = GELU[clip((up(n) >> SHIFT_MLP_UP) + bias)], hidden units in blocks of 128, and their sums sb for the down
    projection.

    Launch [blocks] of 512 threads; a block takes every gridDim-th tile of 64 RG rows. The sums are added to sb[3 *
    stride + row].
    u: [64 rows][pieces of KP hidden units][core matrices], as the down projection takes it.
    plan: 0 packed words, 1 seed A, 2 overlay A, 3.. the bias (vector_function), 8, 9 seed and overlay of the input side
    of the down projection."""
    H, SHIFT, MODE = cfg.HIDDEN_DIM, cfg.SHIFT_MLP_UP, cfg.ADAPTIVE_NOISE_MODE
    BLOCKS, SLOTS = H // 32, members_of(64, padded_length(cfg))
    # words of a member's tables: noise, bias; noise of the input side of the down projection as bytes, as coefficients;
    # their factors
    BIAS, BYTES, COEFFICIENT, FACTOR, TABLE = 128, 256, 288, 416, (288, 416, 544)[MODE]
    TABLES = GROUPS * 2 * SLOTS * TABLE
    # of GELU: a look-up by 32 lanes then has no bank conflicts, or few
    for COPIES in 32, 8, 4:
        GELUS = 257 * COPIES
        shape = wide_shape(card.shared - 4 * (TABLES + GELUS) - 1024, H, 4 * H, card.wgmma)
        if shape and (shape.resident or not shape.stream and shape.stages * shape.KP * (1 + shape.turns) >= H):
            break
    RG, CG, PASSES, (STEPS, APART) = shape.RG, shape.CG, shape.passes, shape.steps()
    RAGGED, AT_GELU = PASSES * CG != BLOCKS, shape.bytes // 4
    AT_TABLES = AT_GELU + GELUS
    # blocks and words of a piece or a block; 16 columns
    PIECE, WORDS, STEP = max(KP // 128, 1), 16 * max(KP, 128), KP // 16
    place = _place_function(cfg, RG)
    open_ring, wait_rows, multiply, finish = product_functions(card, shape)
    noise, factor, whole_factor, job_shift = nz.noise, nz.factor, nz.whole, nz.shift
    input_coefficient, input_fold = nz.input_coefficient, nz.input_fold
    column, vector = pair_functions(cfg, nz)
    as_row, as_column, begin, BASE = begin_functions(cfg, nz, H,
                                                     256 + (loudest(cfg) ** 2 >> cfg.SIGMA_SHIFT_VECTOR) << SHIFT)
    begin_tile = begin_tile_function(card, nz, begin, 0, 4 * BIAS if BASE else 0)
    # to [0, 1] from 1.5 * 2^23 +- 128 << SHIFT
    UNIT, MIDDLE = 2.0 ** -(SHIFT + 8), 0.5 - 1.5 * 2.0 ** (15 - SHIFT)
    # + i / 64 has the bits 0x48000000 + i, and 128 times that is 128 i
    INDEX = 1 << 17
    LESS = 0 if COPIES == 32 else 0x48000000

    @card.device
    def unit_address(a, bias, at):
        """Where GELU of a hidden unit lies."""
        if BASE:
            share = ptx.fma_sat(ptx.bits_float(a), float32(UNIT), float32(MIDDLE))
            return int32(int32(int32(ptx.float_bits(ptx.fma_down(share, float32(4), float32(INDEX))) - int32(LESS))
                               * int32(4 * COPIES)) + at)
        return int32(int32(min(max(int32(int32(a >> int32(SHIFT)) + bias), int32(0)), int32(256)) * int32(4 * COPIES))
                     + at)

    @card.device
    def prepare(sm, smf, at, c, block, member, source):
        """Tables, from word `at` on, of the members that this warpgroup's rows touch, for hidden unit c of a block."""
        i = (c >> 5) * H + (min(block, BLOCKS - 1) if RAGGED else block) * 32 + (c & 31)
        for slot in range(SLOTS):
            pair, to = (member + slot) >> 1, at + slot * TABLE + c
            sm[to] = as_column(column(source, pair, i))
            even, odd = vector(source, 3, pair, i)
            bias = odd if (member + slot) & 1 else even
            sm[to + BIAS] = int32(int32(bias << int32(SHIFT)) + int32(BASE)) if BASE else int32(bias + int32(128))
            # both forms: a branch here would make the products wait for each other
            stream = uint32(uint32(source.seed + uint32(pair)) + uint32(source.plan[source.p + 8]))
            if MODE < 2:
                word = pack_quad(noise(stream, i))
                if c & 3 == 0:
                    sm[at + slot * TABLE + BYTES + (c >> 2)] = word
            if MODE > 0:
                entry = source.overlay[uint64(source.plan[source.p + 9] + i)]
                sm[to + COEFFICIENT] = input_coefficient(entry, stream, i)
                if MODE == 2:
                    smf[to + FACTOR] = factor(entry, stream, i)

    @device
    @(written_out if MODE == 2 else card.written)            # those of mode 2 every compiler leaves
    def folded(acc, smf, at_words, at, sums):
        """Adds to sums what the hidden units in acc, in two rows, add to sb."""
        pb = cuda.local.array(8, int32)
        for g in range(2):                                   # 16 neighbouring i
            for k in range(8):
                pb[k] = 0
            for sub in range(4):
                j = 2 * sub + g
                c = ptx.load_shared4(at + 4 * COEFFICIENT + j * 64)
                for k in range(4):
                    f = smf[at_words + FACTOR + j * 16 + k] if MODE == 2 else float32(0)
                    for half in range(2):
                        i = 8 * j + half * 2 + (k >> 1) * 4 + (k & 1)
                        pb[4 * half + k] = input_fold(pb[4 * half + k], acc[i], c[k], f)
            for k in range(8):
                sums[k >> 2] = int32(sums[k >> 2] + pb[k])

    @cuda.jit(launch_bounds=THREADS)
    @card.written
    def up(call, at, plan, weights, packed, overlay, job, offset, tiles, stride, gelu, x, sb, u):
        sm, smf = cuda.shared.array(0, int32, 128), cuda.shared.array(0, float32, 128)
        first, every = cuda.blockIdx.x, cuda.gridDim.x
        count = (tiles - 1 - first) // every + 1
        ring = open_ring(count * STEPS, first, every, x, packed, at)
        source = Source(plan, call * PLAN, weights, overlay, job, uint32(uint32(job[0] + job[1]) + uint32(offset)))
        t, base = ring.t, ring.base
        group, lane, c = t >> 7, t & 31, t & 127
        q, side = lane & 3, group % CG
        for i in range(t, GELUS, THREADS):                   # [x + 128][copy]
            sm[AT_GELU + i] = gelu[(min(max(i // COPIES, 1), 255) - 128) & 255]
        whole = int32(1)
        for i in range(t, 4 * H, THREADS):
            whole = int32(whole & whole_factor(overlay[plan[source.p + 9] + i]))
        whole = cuda.syncthreads_and(whole)                  # then sb is a plain sum of products
        at_lane = int32(base + 4 * AT_GELU + (lane & (COPIES - 1)) * 4)
        here = AT_TABLES + group * (2 * SLOTS * TABLE)
        acc, s, sums = cuda.local.array(64, int32), cuda.local.array(2, int32), cuda.local.array(2, int32)
        row, member, slot, sign = place(first, t, 0)
        prepare(sm, smf, here, c, side, member, source)
        shift = job_shift(job)
        for half in range(2):
            s[half] = as_row(int32(sb[uint64(row + 8 * half)] * sign), shift)
        ptx.named_barrier(1 + group, 128)
        begin_tile(acc, base + 4 * (here + slot * TABLE) + q * 16, s, shift)
        step, odd = int32(side * APART), 0
        for turn in range(count):
            tile = first + turn * every
            wait_rows(ring, turn)
            sums[0], sums[1] = 0, 0
            for ahead in range(PASSES):
                block, at_slot = ahead * CG + side, here + (odd * SLOTS + slot) * TABLE
                to = (int64(row >> 6) * (64 * H) + block // PIECE * WORDS + block % PIECE * 256
                      + ((row >> 3) & 7) * (2 * KP) + lane)
                mine, last = row, ahead == PASSES - 1
                step = multiply(acc, ring, step)
                if last and turn + 1 < count:                # while the tensor cores work: the tables of the next pass
                    row, member, slot, sign = place(tile + every, t, 0)
                prepare(sm, smf, here + (1 - odd) * (SLOTS * TABLE), c, side if last else block + CG, member, source)
                if last:
                    for half in range(2):
                        s[half] = as_row(int32(sb[uint64(row + 8 * half)] * sign), shift)
                ptx.named_barrier(1 + group, 128)
                step = finish(acc, ring, step, last, turn + 1 < count, turn, tile + every)
                at_bytes = base + 4 * at_slot + q * 16
                if not RAGGED or block < BLOCKS:
                    for j in range(8):
                        if not BASE:
                            b = ptx.load_shared4(at_bytes + j * 64 + 4 * BIAS)
                        c4 = int32(0)
                        if whole:
                            c4 = sm[uint32(at_slot + BYTES + 4 * j + q)]
                        for half in range(2):
                            for k in range(4):
                                i = 8 * j + half * 2 + (k >> 1) * 4 + (k & 1)
                                acc[i] = ptx.load_shared(unit_address(acc[i], int32(0) if BASE else b[k], at_lane))
                            i = 8 * j + half * 2
                            word = pack4(acc[i], acc[i + 1], acc[i + 4], acc[i + 5])
                            u[uint64(to + half * (2 * KP) + j // STEP * (16 * KP) + j % STEP * 32)] = word
                            sums[half] = ptx.dp4a(word, c4, sums[half])
                    if MODE > 0 and not whole:
                        folded(acc, smf, at_slot + q * 4, at_bytes, sums)
                if last:
                    for half in range(2):
                        total = quad_sum(sums[half])
                        if q == 0:
                            cuda.atomic.add(sb, 3 * stride + mine + 8 * half, total)
                ptx.named_barrier(1 + group, 128)            # the tables just read are the next to be overwritten
                odd = 1 - odd
                begin_tile(acc, base + 4 * (here + (odd * SLOTS + slot) * TABLE) + q * 16, s, shift)

    return up, 4 * (AT_TABLES + TABLES), shape


# --- products of full width: q, k, v; what is added to the residual stream --------------------------------------------

@device
def joined(tops, sm, at, CG, side, q, barrier):
    """The largest values of a thread's two rows become those of the quad and of all CG column groups, which exchange
    them through words of shared memory."""
    for half in range(2):
        tops[half] = quad_max(tops[half])
    if CG > 1:
        if q == 0:
            sm[at + side], sm[at + 8 * CG + side] = tops[0], tops[1]
        ptx.named_barrier(barrier, int32(CG * 128))
        for k in range(CG):
            for half in range(2):
                tops[half] = int32(max(tops[half], sm[at + half * (8 * CG) + k]))


def value_length(cfg):
    """Positions of a row of v: whole tiles of the attention."""
    return blocks(padded_length(cfg), TILE) * TILE


def _full_kernel(cfg, nz, card, kind):
    """Products of full width, so that a row's amax needs nothing outside the block. Launch [blocks] of 512 threads; a
    block takes every gridDim-th tile of 64 RG rows ("qkv": every gridDim / 3-th, of matrix blockIdx % 3).

    kind "qkv": q, k, v = amax of the product, q and k rotated first; q, k as core matrices, in h, k after q; v
    transposed: core matrices of one row a channel (permuted as the columns are), positions permuted within 32 as the
    weights' mma fragments hold them.
    "o", "down": h = amax(h + (product >> shift) + bias), without a bias in "o".
    plan, 8 entries a matrix: as _up_kernel's first. sb: [4][stride]; spill: what `layout` says."""
    H, D, BIT, T = cfg.HIDDEN_DIM, cfg.HEAD_DIM, cfg.ROPE_SCALE_BIT, cfg.SEQ_LEN
    QKV, DOWN = kind == "qkv", kind == "down"
    K = 4 * H if DOWN else H
    SHIFT = cfg.SHIFT_MLP_DOWN if DOWN else cfg.SHIFT_OUT
    MATRICES, LENGTH, POSITIONS = 3 if QKV else 1, padded_length(cfg), value_length(cfg)
    SLOTS = members_of(64, LENGTH)
    TABLE = 256 if DOWN else 128                             # words of a member's tables for 128 columns: noise, bias
    TABLES, TOPS = 2 * GROUPS * SLOTS * TABLE, 2 * TALLEST   # words; TOPS: of this tile and of the next
    shape = full_shape(card.shared - 4 * (TABLES + TOPS) - 1024, K, H, turns=card.wgmma)
    CG, N, PASSES, RG = shape.CG, shape.N, shape.passes, shape.RG
    (STEPS, APART), RAGGED, ACC = shape.steps(), shape.columns() != H, N // 2
    AT_TABLES, place = shape.bytes // 4, _place_function(cfg, RG)
    AT_TOPS = AT_TABLES + TABLES
    MATRIX_WORDS, SB_AT = shape.columns() * K // 4, 3 if DOWN else 0
    open_ring, wait_rows, multiply, finish = product_functions(card, shape, fresh=True)
    job_shift, (column, vector) = nz.shift, pair_functions(cfg, nz)

    @card.device
    def prepare(sm, at, c, columns, member, source):
        """Tables, from word `at` on, of the members that this warpgroup's rows touch, for its column c from `columns`
        on. Without a branch, which would make the products wait for each other: what lies beyond the columns is not
        used."""
        i = min(columns + min(c, N - 1), H - 1)
        for slot in range(SLOTS):
            pair, to = (member + slot) >> 1, at + slot * TABLE + c
            sm[to] = column(source, pair, i)
            if DOWN:
                even, odd = vector(source, 3, pair, i)
                sm[to + 128] = odd if (member + slot) & 1 else even

    @card.device
    def turned(e, o, cos, sin):
        half, less = int64(1) << int64(BIT - 1), int32(-sin)
        return (int32(ptx.mad_wide(o, less, ptx.mad_wide(e, cos, half)) >> int64(BIT)),
                int32(ptx.mad_wide(o, cos, ptx.mad_wide(e, sin, half)) >> int64(BIT)))

    @card.device
    def extremes(acc, most, least):
        """The largest and smallest values so far of the two rows."""
        for j in range(N // 8):
            for half in range(2):
                a, b = acc[4 * j + 2 * half], acc[4 * j + 2 * half + 1]
                most[half], least[half] = int32(max(max(most[half], a), b)), int32(min(min(least[half], a), b))

    @card.device
    def quantised(acc, scales):
        for i in range(ACC):
            acc[i] = rounded(acc[i], scales[(i >> 1) & 1])

    @card.device
    def store(acc, out, to, col):
        for j in range(N // 16):
            if not RAGGED or col + 16 * j < H:
                for half in range(2):
                    i = 8 * j + 2 * half
                    word = pack_rounded(acc[i], acc[i + 1], acc[i + 4], acc[i + 5])
                    out[uint64(to + (col >> 4) * 32 + j * 32 + half * (2 * H))] = word

    @card.device
    def store_transposed(acc, out, row, col, lane):
        """Rows g, g ^ 1 and the two 8 further are neighbouring bytes."""
        odd, q = (lane >> 2) & 1, lane & 3
        first = row - (lane >> 2)
        member, position = first // LENGTH, first % LENGTH
        for j in range(N // 16):
            if not RAGGED or col + 16 * j < H:
                i = 8 * j
                left = pack_rounded(acc[i], acc[i + 2], acc[i + 1], acc[i + 3])
                right = pack_rounded(acc[i + 4], acc[i + 6], acc[i + 5], acc[i + 7])
                other = cuda.shfl_xor_sync(0xFFFFFFFF, left if odd else right, 4)
                even_row, odd_row = (other, right) if odd else (left, other)
                i = col + j * 16 + odd * 8 + q * 2
                to = (int64(member) * (H * POSITIONS) + (i >> 3) * (8 * POSITIONS) + (i & 7) * 16 + (position >> 4)
                      * 128 + ((lane >> 3) & 3) * 4) >> 2
                out[uint64(to)] = ptx.byte_permute(even_row, odd_row, 0x5140)
                out[uint64(to + 4)] = ptx.byte_permute(even_row, odd_row, 0x7362)

    # not card.written: its own loops are unrolled by every compiler, and written out they take twice as long to compile
    @cuda.jit(launch_bounds=THREADS)
    def full(call, at, plan, weights, packed, overlay, job, offset, tiles, stride, rope, x, sb, h, values, spill):
        sm = cuda.shared.array(0, int32, 128)
        which, first, every = cuda.blockIdx.x % MATRICES, cuda.blockIdx.x // MATRICES, cuda.gridDim.x // MATRICES
        count = 0
        if first < tiles:
            count = (tiles - 1 - first) // every + 1
        ring = open_ring(count * STEPS, first, every, x, packed, at + which * MATRIX_WORDS)
        source = Source(plan, call * PLAN + which * 8, weights, overlay, job,
                        uint32(uint32(job[0] + job[1]) + uint32(offset)))
        t, base = ring.t, ring.base
        group, lane, c = t >> 7, t & 31, t & 127
        q, side, rg = lane & 3, group % CG, group // CG
        acc, s, scales = cuda.local.array(ACC, int32), cuda.local.array(2, int32), cuda.local.array(2, float32)
        most, least = cuda.local.array(2, int32), cuda.local.array(2, int32)
        for i in range(ACC):
            acc[i] = 0
        at_spill = int64(cuda.blockIdx.x) * ((PASSES - 1) * ACC * THREADS) + t * 4
        step = int32(side * APART)
        for turn in range(count):
            tile = first + turn * every
            row, member, slot, sign = place(tile, t, 0)
            for half in range(2):
                s[half] = int32(sb[uint64((SB_AT + which) * stride + row + 8 * half)] * sign)
                most[half], least[half] = 0, 0
            to = int64(which * stride + row >> 3) * (2 * H) + lane
            wait_rows(ring, turn)
            for ahead in range(PASSES):
                col = ahead * (CG * N) + side * N
                buffer = AT_TABLES + (2 * group + ((turn * PASSES + ahead) & 1)) * (SLOTS * TABLE)
                step = multiply(acc, ring, step)
                prepare(sm, buffer, c, col, member, source)  # while the tensor cores work
                ptx.named_barrier(1 + group, 128)
                step = finish(acc, ring, step, ahead == PASSES - 1, turn + 1 < count, turn, tile + every)
                at_noise, shift = base + 4 * (buffer + slot * TABLE) + q * 16, job_shift(job)
                for j in range(N // 16):
                    if not RAGGED or col + 16 * j < H:
                        n = ptx.load_shared4(at_noise + j * 64)
                        if DOWN:
                            b = ptx.load_shared4(at_noise + 512 + j * 64)
                        for half in range(2):
                            word = int32(0) if QKV else h[uint64(to + (col >> 4) * 32 + j * 32 + half * (2 * H))]
                            for k in range(4):
                                i = 8 * j + half * 2 + (k >> 1) * 4 + (k & 1)
                                v = int32(acc[i] + ptx.shift_right(int32(s[half] * n[k]), shift))
                                if not QKV:
                                    v = int32(int32(v >> int32(SHIFT)) + byte(word, k))
                                if DOWN:
                                    v = int32(v + b[k])
                                acc[i] = v
                if QKV and which < 2:
                    for j in range(N // 16):
                        for half in range(2):
                            i, position = 8 * j + 2 * half, min(row % LENGTH + 8 * half, T - 1)
                            r = ptx.load4(rope, int64(position * D + ((col + j * 16 + q * 4) & (D - 1))))
                            acc[i], acc[i + 1] = turned(acc[i], acc[i + 1], r[0], r[1])
                            acc[i + 4], acc[i + 5] = turned(acc[i + 4], acc[i + 5], r[2], r[3])
                extremes(acc, most, least)
                if PASSES > 1 and ahead < PASSES - 1:
                    for i in range(0, ACC, 4):
                        ptx.store4(spill, at_spill + (ahead * ACC + i) * THREADS, acc[i], acc[i + 1], acc[i + 2],
                                   acc[i + 3])
            mine = ((turn & 1) * RG + rg) * 64 + (c >> 5) * 16 + (lane >> 2)
            for half in range(2):
                most[half] = int32(max(most[half], int32(-least[half])))
            joined(most, sm, AT_TOPS + mine * CG, CG, side, q, 5 + rg)
            for half in range(2):
                scales[half] = amax_scale(most[half])
            for back in range(PASSES):
                ahead = PASSES - 1 - back
                if back > 0:
                    for i in range(0, ACC, 4):
                        a = ptx.load4(spill, at_spill + (ahead * ACC + i) * THREADS)
                        acc[i], acc[i + 1], acc[i + 2], acc[i + 3] = a[0], a[1], a[2], a[3]
                quantised(acc, scales)
                col = ahead * (CG * N) + side * N
                if QKV and which == 2:
                    store_transposed(acc, values, row, col, lane)
                else:
                    store(acc, h, to, col)

    return full, 4 * (AT_TOPS + TOPS), shape


# --- head -------------------------------------------------------------------------------------------------------------

def head_kernel(cfg, nz, card, clean=False):
    """The output head of both models: no logit reaches memory; tiles of the vocabulary pass by twice, for the row
    maxima and for the sums. Adds each position's loss to losses int64 [pairs, 2]. Launch [tiles of 64 RG rows], 512
    threads. plan: 1 seed A, 2 overlay A; at_tiles, at_columns: words packed for the product, and as ROWS for the
    targets; length: positions of a window.

    In the recurrent model (PAIRED) a thread's rows are the members of a pair, or two windows, at one position, as in
    kernels.gru; and a logit is a quotient, clipped: what the transformer has as levels, logit bits to the left, are
    quotients there, times the distance of two entries of EXP.

    clean: for validation. It sets losses float64 [windows, length] to the cross-entropy of each position, of `count`
    windows; exps: int64 exponentials of logit differences (products.CLEAN_ONE), so that sums do not
    depend on their order.

    The columns of the embedding are not permuted, as in validation and generation, but the noise of a tile is: see
    `slot_of`."""
    H, T, V, LENGTH, TARGETS = cfg.HIDDEN_DIM, cfg.SEQ_LEN, cfg.VOCAB_SIZE, padded_length(cfg), cfg.TARGETS
    LOGIT, ONES, PAIRED = cfg.SHIFT_LOGIT, (1 << cfg.SHIFT_LOGIT) - 1, cfg.MODEL == "gru"
    SCALE, MEMBERS = float(cfg.SOFTMAX_EXP_SCALE), 0 if PAIRED else 1        # shift from a member to its window
    WIDTH, SKIP, SUM = cfg.WINDOW, cfg.STATE_TOKENS, uint32
    if clean:
        TARGETS, SKIP, SUM = 1, 0, int64
    MOST, COPIES = exp_sizes(cfg)
    if PAIRED:
        MOST, COPIES = 254, 32 if card.shared > 128 * 1024 else 8
    FARTHEST = (MOST << LOGIT) + ONES
    # entries of EXP lie 2^LOGIT bytes apart, if that fits: then a level is an address (and stays one if noise is far
    # from 2^31)
    PLACED = (not PAIRED and 4 * COPIES <= 1 << LOGIT <= 1024 and (MOST + 1) << LOGIT <= 24 * 1024
              and cfg.NOISE_SHIFTS[0] > 1)
    STRIDE = (1 << LOGIT) // 4 if PLACED else COPIES         # words
    EXPS = (MOST + 1) * STRIDE
    SLOTS = members_of(32, T) if PAIRED else members_of(64, LENGTH)
    TABLES, PARTS = GROUPS * 2 * SLOTS * 128, 2 * TALLEST    # words; PARTS: int32 or int64 of each row and column group
    shape = wide_shape(card.shared - 4 * (TABLES + PARTS + EXPS) - 2048, H, V, card.wgmma)
    RG, CG, TILES, (STEPS, APART) = shape.RG, shape.CG, shape.passes, shape.steps()
    RAGGED, STEPS = V % (128 * CG) != 0, 2 * STEPS
    AT_TABLES = shape.bytes // 4
    AT_PARTS, ENTRY, place = AT_TABLES + TABLES, 4 * COPIES, _place_function(cfg, RG, PAIRED)
    open_ring, wait_rows, multiply, finish = product_functions(card, shape, 2)
    job_shift, (column, _) = nz.shift, pair_functions(cfg, nz)
    as_row, as_column, begin, BASE = begin_functions(cfg, nz, H)
    BASE, quotient = quotient_function(parameters.divisor(cfg, H), MAGIC, BASE) if PAIRED else (BASE, None)
    HIDDEN = BASE - (1 << 29)                                # the level of columns beyond the vocabulary
    begin_tile = begin_tile_function(card, nz, begin, BASE)
    position_loss = loss_function(cfg)

    @card.device
    def slot_of(c):
        """Where the noise of column c lies, so that the four columns of a thread in 16 are neighbours."""
        return (c & 0x70) | ((c & 6) << 1) | ((c & 8) >> 2) | (c & 1)

    @card.device
    def prepare(sm, at, slot, v, member, source):
        """The noise of column v of the vocabulary for the members that this warpgroup's rows touch."""
        for m in range(SLOTS):
            n = column(source, (member + m) >> MEMBERS, v if not RAGGED or v < V else V - 1)
            sm[at + m * 128 + slot] = as_column(n)

    @device
    def logit(a):
        """Of a level."""
        return int32(quotient(a) - int32(BITS)) if PAIRED else int32(int32(a - int32(BASE)) >> int32(LOGIT))

    @card.device
    def weight(top, a, last, at, exps):
        """EXP of the distance from level a to the `settled` top."""
        if clean:
            return exps[uint64(min(uint32(int32(top - logit(a))), uint32(CLEAN_EXPS - 1)))]
        if PAIRED:
            return ptx.load_shared(int32(top - int32(quotient(a) * int32(ENTRY))))
        below = min(uint32(int32(top - a)), uint32(last))
        if PLACED:
            return ptx.load_shared(int32(int32(below & uint32(~ONES & 0xFFFFFFFF)) | at))
        return ptx.load_shared(int32(int32(int32(below >> uint32(LOGIT)) * int32(ENTRY)) + at))

    @device
    def settled(top, table):
        """The highest logit of validation; of members the highest level with the same logit."""
        if clean:
            return logit(top)
        return int32(int32(quotient(top) * int32(ENTRY) if PAIRED else int32(top | int32(ONES))) + table)

    @device
    def scored(half, unit, position):
        """Window and position of a thread's first or (half = 1) second row."""
        if PAIRED:
            return 2 * unit + half if clean else unit, position
        return unit, position + 8 * half

    @device
    def store_loss(losses, unit, odd, position, totals, best, z, count, length):
        for half in range(2):
            window, here = scored(half, unit, position)
            if window < count and here < length:
                if clean:
                    losses[window * length + here] = (math.log(float64(totals[half]) / CLEAN_ONE)
                                                      + float(int32(best[half] - z[half])) / SCALE)
                else:
                    loss = position_loss(totals[half], int32(TARGETS * best[half]), z[half])
                    cuda.atomic.add(losses, 2 * unit + (half if PAIRED else odd), loss)

    @card.device
    def target_logits(half, source, packed, at_columns, x, row, windows, unit, position, count, length, s, shift, q):
        """Sum of the logits of the targets of a thread's first or (half = 1) second row: of the token that follows, and
        of those drawn."""
        dots, tokens = cuda.local.array(TARGETS, int32), cuda.local.array(TARGETS, int32)
        window, here = scored(half, unit, position)
        first = min(window, count - 1) * (length + 1 if clean else WIDTH) + SKIP + 1
        here = min(here, length - 1)
        for i in range(TARGETS):
            tokens[i] = windows[first + (here if i == 0 else length + here * (TARGETS - 1) + i - 1)]
            dots[i] = 0
        at_x = int64(row + 8 * half >> 3) * (2 * H) + (row & 7) * 4 + q
        for piece in range(H // 32):
            a, b = x[uint64(at_x + piece * 64)], x[uint64(at_x + piece * 64 + 32)]
            for i in range(TARGETS):
                w = ptx.load2(packed, at_columns + int64(tokens[i]) * (H // 4) + piece * 8 + q * 2)
                dots[i] = ptx.dp4a(int32(w[1] ^ int32(SIGNS)), b, ptx.dp4a(int32(w[0] ^ int32(SIGNS)), a, dots[i]))
        z = int32(0)
        for i in range(TARGETS):
            n = int32(int32(s[half] * column(source, unit, tokens[i])) >> shift)
            z = int32(z + logit(int32(int32(quad_sum(dots[i]) + n) + int32(BASE))))
        return z

    @cuda.jit(launch_bounds=THREADS)
    @card.written
    def head(call, at_tiles, at_columns, plan, packed, overlay, windows, count, job, offset, exps, x, sb, losses,
             length):
        sm, wide = cuda.shared.array(0, int32, 128), cuda.shared.array(0, int64, 128)
        exp = cuda.shared.array(EXPS, int32, 1024)           # [entry][copy, and a gap where PLACED]
        tile = cuda.blockIdx.x
        ring = open_ring(STEPS, tile, 1, x, packed, at_tiles)
        t, base = ring.t, ring.base
        group, lane, c = t >> 7, t & 31, t & 127
        q, side, rg = lane & 3, group % CG, group // CG
        if not clean:
            for i in range(t, EXPS, THREADS):
                exp[i] = exps[i // STRIDE]
            cuda.syncthreads()
        row, member, slot, sign = place(tile, t, length)
        unit = (member + slot) >> MEMBERS
        position = (row >> 4) * 8 + (row & 7) - unit * length if PAIRED else row % LENGTH
        source = Source(plan, call * PLAN, overlay, overlay, job, uint32(uint32(job[0] + job[1]) + uint32(offset)))
        at_exp, table = int32((lane & (COPIES - 1)) * 4), ptx.shared_address(exp, 0)
        if not PLACED:
            at_exp, table = int32(at_exp + table), int32(0)
        if PAIRED:
            table = at_exp
        acc, totals, some = cuda.local.array(64, int32), cuda.local.array(2, int64), cuda.local.array(2, SUM)
        s, z = cuda.local.array(2, int32), cuda.local.array(2, int32)
        tops, best = cuda.local.array(2, int32), cuda.local.array(2, int32)
        shift = job_shift(job)
        for half in range(2):
            tops[half], totals[half] = int32(-2 ** 31), 0
            s[half] = int32(sb[uint64(row + 8 * half)] * (-sign if PAIRED and half == 1 else sign))
        # a loop over this much would not be unrolled
        z[0] = target_logits(0, source, packed, at_columns, x, row, windows, unit, position, count, length, s, shift, q)
        z[1] = target_logits(1, source, packed, at_columns, x, row, windows, unit, position, count, length, s, shift, q)
        s[0], s[1] = as_row(s[0], shift), as_row(s[1], shift)
        here, my_slot, last = AT_TABLES + group * (2 * SLOTS * 128), slot_of(c), int32(table + int32(FARTHEST))
        at_noise = base + 4 * (here + slot * 128) + q * 16
        prepare(sm, here, my_slot, side * 128 + c, member, source)
        ptx.named_barrier(1 + group, 128)
        begin_tile(acc, at_noise, s, shift)
        wait_rows(ring, 0)
        step = int32(side * APART)
        for ahead in range(2 * TILES):
            block = ahead if ahead < TILES else ahead - TILES
            odd = ahead & 1
            step = multiply(acc, ring, step)
            coming = block + 1 if block + 1 < TILES else 0   # while the tensor cores work: the noise of the next tile
            prepare(sm, here + (1 - odd) * (SLOTS * 128), my_slot, (coming * CG + side) * 128 + c, member, source)
            ptx.named_barrier(1 + group, 128)
            step = finish(acc, ring, step, False, False, 0, 0)
            limit = V - (block * CG + side) * 128 - q * 2    # of the columns 8 j + e of this thread
            hidden = 0                                       # columns, which will count as the smallest weight
            if RAGGED and limit < 128:
                for j in range(16):
                    for e in range(2):
                        if j * 8 + e >= limit:
                            acc[4 * j + e], acc[4 * j + 2 + e] = HIDDEN, HIDDEN
                            hidden += 1
            if ahead < TILES:
                for j in range(16):
                    for half in range(2):
                        tops[half] = int32(max(max(tops[half], acc[4 * j + 2 * half]), acc[4 * j + 2 * half + 1]))
                if ahead == TILES - 1:                       # from here on: the highest level with the same logit
                    joined(tops, sm, AT_PARTS + (rg * 64 + (row & 63)) * CG, CG, side, q, 5 + rg)
                    if CG > 1:                               # the sums will take this place
                        ptx.named_barrier(5 + rg, CG * 128)
                    for half in range(2):
                        best[half], tops[half] = logit(tops[half]), settled(tops[half], table)
            else:
                some[0], some[1] = SUM(0), SUM(0)
                for j in range(16):
                    for e in range(2):
                        for half in range(2):
                            w = weight(tops[half], acc[4 * j + 2 * half + e], last, at_exp, exps)
                            some[half] = SUM(some[half] + SUM(w))
                for half in range(2):
                    totals[half] += int64(some[half])
                    if RAGGED and limit < 128:
                        totals[half] -= int64(hidden) * weight(tops[half], int32(HIDDEN), last, at_exp, exps)
            begin_tile(acc, at_noise + (1 - odd) * (SLOTS * 512), s, shift)
        for half in range(2):
            totals[half] = quad_sum64(totals[half])
        if CG > 1:
            mine = AT_PARTS // 2 + (rg * 64 + (row & 63)) * CG
            if q == 0:
                wide[mine + side], wide[mine + 8 * CG + side] = totals[0], totals[1]
            ptx.named_barrier(5 + rg, CG * 128)
            totals[0], totals[1] = 0, 0
            for k in range(CG):
                for half in range(2):
                    totals[half] += wide[mine + half * (8 * CG) + k]
        if q == 0 and side == 0:
            store_loss(losses, unit, (member + slot) & 1, position, totals, best, z, count, length)

    return head, 4 * (AT_PARTS + PARTS), shape


# --- embedding and norm -----------------------------------------------------------------------------------------------

def _embed_kernel(cfg, nz, card):
    """h = clip(embedding look-up + bias) of both members, and zero losses. Launch [pairs, LENGTH / 16], 64 threads;
    four lanes a position. width: tokens of a pair's window. plan: 8 bias (vector_function), 20 packed words, 21 overlay
    A, 22 overlay B."""
    H, T, LENGTH, (_, vector) = cfg.HIDDEN_DIM, cfg.SEQ_LEN, padded_length(cfg), pair_functions(cfg, nz)
    noise, factor, job_shift, NTT = nz.noise, nz.factor, nz.shift, cfg.NTT_MODE != 0
    coefficient, look_up = ntt_functions(cfg, nz, True, cfg.NTT_CAUSAL)
    POSITIONS, WORDS = min(LENGTH, 64), 3 * H

    @cuda.jit(launch_bounds=256)
    @card.written
    def embed(call, plan, weights, packed, overlay, windows, width, job, offset, h, losses):
        table = cuda.shared.array(WORDS, int32)              # bias even, odd, noise
        factors = cuda.shared.array(H, float32)
        t, unit = cuda.threadIdx.x, cuda.blockIdx.x
        p, mask, shift = call * PLAN, int32(job[2]), job_shift(job)
        seed = uint32(uint32(job[0] + job[1]) + uint32(offset + unit))
        source = Source(plan, p, weights, overlay, job, seed)
        if t < 2 and cuda.blockIdx.y == 0:
            losses[2 * unit + t] = 0
        stream = uint32(seed + uint32(H))
        for i in range(t, H, 4 * POSITIONS):
            table[i], table[H + i] = vector(source, 8, 0, i)
            table[2 * H + i] = int32(noise(stream, i) & mask)
            factors[i] = factor(overlay[plan[p + 22] + i], stream, i)
        cuda.syncthreads()
        lane, position = t & 31, cuda.blockIdx.y * POSITIONS + (t >> 2)
        if position < LENGTH:
            q, here = lane & 3, min(position, T - 1)
            token = windows[unit * width + here]
            coef = coefficient(windows, unit * width, here) if NTT else int32(0)
            n, f = noise(seed, token), factor(overlay[plan[p + 21] + token], seed, token)
            at = plan[p + 20] + (token >> 3) * (2 * H) + (token & 7) * 4 + q
            at_h = (int64(unit) * (2 * LENGTH) + position >> 3) * (2 * H) + lane
            address, x = ptx.shared_address(table, q * 4), cuda.local.array(8, int32)
            for piece in range(H // 16):
                word = packed[uint64(at + piece * 32)]
                even, odd = ptx.load_shared4(address + piece * 64), ptx.load_shared4(address + piece * 64 + 4 * H)
                c = ptx.load_shared4(address + piece * 64 + 8 * H)
                for k in range(4):
                    i = piece * 16 + q * 4 + k
                    d = ptx.trunc_f32(float32(float32(float32(int32(n * c[k])) * f) * factors[i]))
                    e, more, more_odd = byte(word, k), int32(0), int32(0)
                    if NTT:
                        more, more_odd = look_up(weights, overlay, seed, shift, mask, coef, i)
                    x[k] = clip(int32(int32(int32(e + int32(d >> shift)) + even[k]) + more))
                    x[4 + k] = clip(int32(int32(int32(e + int32(int32(-d) >> shift)) + odd[k]) + more_odd))
                h[uint64(at_h + piece * 32)] = pack4(x[0], x[1], x[2], x[3])
                h[uint64(at_h + piece * 32 + LENGTH * (H // 4))] = pack4(x[4], x[5], x[6], x[7])

    return embed


def _norm_kernel(cfg, nz, card, streams):
    """out = ln(h), its sums sb with `streams` input noises, and zeros for those of the down projection. Launch
    [pairs, 2 LENGTH / 128], 256 threads; a warp has 16 rows, four lanes two of them.
    plan: 0 ln, 4 ln bias (vector_function), 12.. seed and overlay of each stream; sb: [4][stride]."""
    H, MODE, LENGTH = cfg.HIDDEN_DIM, cfg.ADAPTIVE_NOISE_MODE, padded_length(cfg)
    # then 2^-21 of |p| changes no quotient
    FLOAT = MODE < 2 and 127 * (128 + (loudest(cfg) ** 2 >> cfg.SIGMA_SHIFT_VECTOR)) < 1 << 20
    AT_C, COEFFICIENTS = 4 * H, (4 + streams) * H           # ln even, odd, bias even, odd, streams
    FACTORS, BYTES, THREADS_OF_H = streams * H if MODE == 2 else 1, streams * H // 4, blocks(H, 256) * 256
    noise, factor, whole_factor, (_, vector) = nz.noise, nz.factor, nz.whole, pair_functions(cfg, nz)
    input_coefficient, input_term = nz.input_coefficient, nz.input_term

    @card.device
    def shared_bias(b):
        """A bias as `normed` wants it."""
        return ptx.float_bits(float32(float32(int32(b + int32(127))) * float32(1 / 254))) if FLOAT else b

    @card.device
    def normed(p, mean, reciprocal, b):
        """clip(p / mean toward zero + bias) in the low byte. As floats: 2^23 with the sign of p, whose neighbours are
        whole numbers, takes the quotient, rounded toward zero; then what is cut to [0, 1] stands for -127 to 127."""
        if FLOAT:
            f = float32(p)
            whole = ptx.with_sign(float32(1 << 23), f)
            quotient = float32(ptx.fma_toward_zero(f, reciprocal, whole) - whole)
            share = ptx.fma_sat(quotient, float32(1 / 254), ptx.bits_float(b))
            return ptx.float_bits(cuda.fma(share, float32(254), float32(12582912 - 127)))
        return clip(int32(divide(p, mean) + b))

    @cuda.jit(launch_bounds=256)
    @card.written
    def norm(call, plan, weights, overlay, job, offset, stride, h, out, sb):
        table, factors = cuda.shared.array(COEFFICIENTS, int32), cuda.shared.array(FACTORS, float32)
        packed_noise = cuda.shared.array(BYTES, int32)       # [stream][H / 4]
        t, unit, p = cuda.threadIdx.x, cuda.blockIdx.x, call * PLAN
        source = Source(plan, p, weights, overlay, job, uint32(uint32(job[0] + job[1]) + uint32(offset + unit)))
        whole = int32(1)
        for i in range(t, THREADS_OF_H, 256):
            if i < H:                                        # H is a multiple of 32: so for whole warps
                table[i], table[H + i] = vector(source, 0, 0, i)
                even, odd = vector(source, 4, 0, i)
                table[2 * H + i], table[3 * H + i] = shared_bias(even), shared_bias(odd)
                for s in range(streams):
                    stream = uint32(source.seed + uint32(plan[p + 12 + 2 * s]))
                    entry = overlay[plan[p + 13 + 2 * s] + i]
                    whole = int32(whole & whole_factor(entry))
                    table[AT_C + s * H + i] = input_coefficient(entry, stream, i)
                    word = pack_quad(noise(stream, i))
                    if t & 3 == 0:
                        packed_noise[s * (H // 4) + (i >> 2)] = word
                    if MODE == 2:
                        factors[s * H + i] = factor(entry, stream, i)
        whole = cuda.syncthreads_and(whole)                  # then sb is a plain sum of products
        lane, warp = t & 31, cuda.blockIdx.y * 128 + (t >> 5) * 16
        if warp < 2 * LENGTH:
            member, row = warp // LENGTH, int64(unit) * (2 * LENGTH) + warp + (lane >> 2)
            at = (row >> 3) * (2 * H) + lane
            x, sums, totals = cuda.local.array(4, int32), cuda.local.array(6, int32), cuda.local.array(2, int32)
            means, reciprocals = cuda.local.array(2, int32), cuda.local.array(2, float32)
            for i in range(6):
                sums[i] = 0
            totals[0], totals[1] = 0, 0
            for piece in range(H // 16):
                for half in range(2):                        # the sum of |bytes|
                    word = h[uint64(at + half * (2 * H) + piece * 32)]
                    negative = ptx.byte_permute(word, 0, 0xBA98)
                    totals[half] = ptx.dp4a(negative, -1, ptx.dp4a(int32(word ^ negative), 0x01010101, totals[half]))
            for half in range(2):
                means[half] = int32(max(int32(uint32(quad_sum(totals[half])) // uint32(H)), int32(1)))
                # so that a quotient is never below the whole number that it is
                reciprocals[half] = float32(float32(1 + 2.0 ** -22) / float32(means[half]))
            address = ptx.shared_address(table, (lane & 3) * 4)
            at_w = address + member * (4 * H)
            for piece in range(H // 16):
                w, b = ptx.load_shared4(at_w + piece * 64), ptx.load_shared4(at_w + 8 * H + piece * 64)
                for half in range(2):
                    word = h[uint64(at + half * (2 * H) + piece * 32)]
                    for k in range(4):
                        x[k] = normed(int32(byte(word, k) * w[k]), means[half], reciprocals[half], b[k])
                    word = pack4(x[0], x[1], x[2], x[3])
                    out[uint64(at + half * (2 * H) + piece * 32)] = word
                    if whole:
                        for s in range(streams):
                            c4 = packed_noise[uint32(s * (H // 4) + piece * 4 + (lane & 3))]
                            sums[3 * half + s] = ptx.dp4a(word, c4, sums[3 * half + s])
                    else:
                        for s in range(streams):
                            c = ptx.load_shared4(address + (AT_C + s * H) * 4 + piece * 64)
                            for k in range(4):
                                f = factors[s * H + piece * 16 + (lane & 3) * 4 + k] if MODE == 2 else float32(0)
                                sums[3 * half + s] = int32(sums[3 * half + s] + input_term(byte(word, k), c[k], f))
            for half in range(2):
                for s in range(streams):
                    total = quad_sum(sums[3 * half + s])
                    if (lane & 3) == 0:
                        sb[s * stride + row + half * 8] = total
                if (lane & 3) == 0:
                    sb[3 * stride + row + half * 8] = 0

    return norm


# --- attention --------------------------------------------------------------------------------------------------------

def _attention_kernel(cfg, nz, card):
    """a of q, k, v from _full_kernel, and the sums sb of a. Launch [members, tiles of 64 positions], a warp for 16
    positions, all heads.

    Keys and values of a head come to shared memory TILE positions at a time while the tile before is used. A row's
    scores pass by once for its maximum and, where there is more than one tile, again for the weights: from the last
    tile, which is still at hand, back to the first. A score fragment of four column tiles is, byte for byte, an A
    fragment over 32 positions (in the permuted order of v), so the weights go into the products of their byte limbs
    without leaving registers. Over 64 positions a limb sum fits int32 by Horner's rule; sums over more are kept as 2^16
    high + low. plan: 12 seed, 13 overlay."""
    H, D, HEADS, SHIFT, MODE = cfg.HIDDEN_DIM, cfg.HEAD_DIM, cfg.N_HEADS, cfg.SHIFT_ATTN, cfg.ADAPTIVE_NOISE_MODE
    LENGTH, POSITIONS = padded_length(cfg), value_length(cfg)
    (MOST, COPIES), LIMBS, LOWEST = exp_sizes(cfg), (cfg.SOFTMAX_SCALE_BIT + 8) // 8, -2 ** 31
    EXPS, QUERY, FACTORS, SCORES = (MOST + 1) * COPIES, D // 32, H if MODE == 2 else 1, TILE // 2
    BELOW_ONE = 1 - 2.0 ** -22
    MANY = LENGTH > 64                                       # more than one tile
    SUMS = D // 2 if MANY else 8                             # of a lane: two rows of all channels, or of 16
    BYTES, STAGE = TILE * D, 2 * TILE * D                    # of keys, and of a stage
    WARPS = min(4, LENGTH // 16)
    # blocks of a multiprocessor: so many as registers allow
    ALL, RESIDENT = 32 * WARPS, 4 if not MANY else 3 if D <= 64 else 2
    factor, input_coefficient, input_term = nz.factor, nz.input_coefficient, nz.input_term

    @card.device
    def fetch(to, k, v, member, step, per_head, tiles, t):
        """Starts the copies of a step: keys of a tile, and values where they are wanted."""
        head, r = step // per_head, step % per_head
        tile = r if r < tiles else 2 * tiles - 2 - r
        at_k = (int64(member) * LENGTH + tile * TILE >> 3) * (2 * H) + head * (2 * D)
        at_v = (int64(member) * H + head * D) * (POSITIONS // 4) + tile * (2 * TILE)
        for i in range(t, BYTES // 16, ALL):
            ptx.copy_async16(int32(to + i * 16), k, at_k + (i // (D // 2)) * (2 * H) + (i % (D // 2)) * 4)
            if not MANY or r >= tiles - 1:
                ptx.copy_async16(int32(to + BYTES + i * 16), v,
                                 at_v + (i // (TILE // 2)) * (2 * POSITIONS) + (i % (TILE // 2)) * 4)
        ptx.copy_commit()

    @card.device
    def scores(s, query, at, wide):
        """s[4 j ...] = products of the query with the keys at shared address `at`: of this lane for load_matrix4."""
        for j in range(0, TILE // 8, 2):
            if j < 4 or wide:
                c, d = ZEROS, ZEROS
                for i in range(D // 32):
                    b = ptx.load_matrix4(int32(at + j * (8 * D) + i * 256))
                    c, d = ptx.mma_s8(query[i], b[0], b[1], c), ptx.mma_s8(query[i], b[2], b[3], d)
                for e in range(4):
                    s[4 * j + e], s[4 * j + 4 + e] = c[e], d[e]

    @card.device
    def largest(s, tops, first, position, wide):
        """tops: the largest scores of the two rows so far; first: this lane's first column."""
        for j in range(TILE // 8):
            if j < 4 or wide:
                for e in range(2):
                    for half in range(2):
                        known = first + 8 * j + e <= position + 8 * half
                        tops[half] = int32(max(tops[half], s[4 * j + 2 * half + e])) if known else tops[half]

    @card.device
    def weigh(s, tops, dens, exp, copy, first, position, wide):
        """Scores become weights, whose sums are added to dens."""
        for j in range(TILE // 8):
            if j < 4 or wide:
                for e in range(2):
                    for half in range(2):
                        below = int32(tops[half] - int32(s[4 * j + 2 * half + e] >> int32(SHIFT)))
                        w = exp[uint32(uint32(min(uint32(below), uint32(MOST)) * uint32(COPIES)) + uint32(copy))]
                        w = w if first + 8 * j + e <= position + 8 * half else int32(0)
                        s[4 * j + 2 * half + e] = w
                        dens[half] = int32(dens[half] + w)

    @card.device
    def split(limbs, s, wide):
        """The byte limbs of the weights as A fragments: limbs[group of 32 * 3 + limb]."""
        for g in range(TILE // 32):
            if g == 0 or wide:
                for n in range(LIMBS):
                    pick = n * 0x11 + 0x40
                    for i in range(4):
                        m = g * 16 + (i >> 1) * 8 + (i & 1) * 2
                        low, high = ptx.byte_permute(s[m], s[m + 1], pick), ptx.byte_permute(s[m + 4], s[m + 5], pick)
                        limbs[g * 3 + n, i] = ptx.byte_permute(low, high, 0x5410)

    @card.device
    def weighted(limbs, at, wide):
        """Sums of weights times values of 8 channels, whose values of the tile are at a shared address (of this
        lane)."""
        r, v = ZEROS, ptx.load_matrix4(at)
        for i in range(LIMBS):
            n = LIMBS - 1 - i
            r = (int32(r[0] << int32(8)), int32(r[1] << int32(8)), int32(r[2] << int32(8)), int32(r[3] << int32(8)))
            r = ptx.mma_u8s8(limbs[n], v[0], v[1], r)
            if wide:
                r = ptx.mma_u8s8(limbs[3 + n], v[2], v[3], r)
        return r

    @card.device
    def finish(high, low, at, dens, reciprocals, at_c, at_f, factors, a, to, sums):
        """Divides the sums of 16 channels in high, low [at...], 2^16 high + low, toward zero (at most 127 in size),
        stores their words and adds to the sums sb of the two rows. A reciprocal is a little small, so that an estimate
        is right or one less."""
        c = ptx.load_shared4(at_c)
        x = cuda.local.array(4, int32)
        for half in range(2):
            den = dens[half]
            for k in range(4):
                m = at + (k >> 1) * 4 + half * 2 + (k & 1)
                num, total = low[m], float32(low[m])
                if MANY:
                    total = cuda.fma(float32(high[m]), float32(65536), total)
                    num = int32(int32(high[m] << int32(16)) + num)           # its remainder fits int32, so it need not
                size = int32(num if total >= float32(0) else int32(-num))
                q = int32(ptx.float_bits(ptx.fma_down(abs(total), reciprocals[half], float32(1 << 23)))
                          - int32(0x4B000000))
                q = int32(q + 1) if int32(size - int32(q * den)) >= den else q
                x[k] = q if total >= float32(0) else int32(-q)
                f = factors[at_f + k] if MODE == 2 else float32(0)
                sums[half] = int32(sums[half] + input_term(x[k], c[k], f))
            a[uint64(to + half * (2 * H))] = pack4(x[0], x[1], x[2], x[3])

    @cuda.jit(launch_bounds=(128, RESIDENT))
    @card.written
    def attention(call, plan, overlay, job, offset, exps, queries, keys, values, a, sb):
        sm = cuda.shared.array(0, int32, 128)                     # two stages of keys and values
        exp = cuda.shared.array(EXPS, int32)
        coefficient, factors = cuda.shared.array(H, int32), cuda.shared.array(FACTORS, float32)
        t, member, mine = cuda.threadIdx.x, cuda.blockIdx.x, cuda.blockIdx.y
        lane, warp = t & 31, t >> 5
        base, matrix = ptx.shared_address(sm, 0), lane >> 3
        tiles = mine + 1 if MANY else 1
        per_head = 2 * tiles - 1
        steps = HEADS * per_head
        fetch(base, keys, values, member, 0, per_head, tiles, t)
        for i in range(t, EXPS, ALL):
            exp[i] = exps[i // COPIES]
        stream = uint32(uint32(uint32(job[0] + job[1]) + uint32(offset + (member >> 1)))
                        + uint32(plan[call * PLAN + 12]))
        for i in range(t, H, ALL):
            entry = overlay[plan[call * PLAN + 13] + i]
            coefficient[i] = input_coefficient(entry, stream, i)
            if MODE == 2:
                factors[i] = factor(entry, stream, i)
        position = mine * 64 + warp * 16 + (lane >> 2)
        row = int64(member) * LENGTH + position
        works = mine * 64 + warp * 16 < LENGTH
        at, first = (row >> 3) * (2 * H) + lane, (lane & 3) * 2
        wide_at_last = int32(warp & 3) >= 2                  # sees more than 32 positions of the last tile
        copy = lane & (COPIES - 1)
        at_c = ptx.shared_address(coefficient, (lane & 3) * 4)
        at_k = base + (matrix >> 1) * (8 * D) + (matrix & 1) * 128 + (lane & 7) * 16
        at_v = base + BYTES + lane * 16
        s, query, limbs = (cuda.local.array(SCORES, int32), cuda.local.array((QUERY, 4), int32),
                           cuda.local.array((6, 4), int32))
        high, low = cuda.local.array(SUMS, int32), cuda.local.array(SUMS, int32)
        tops, dens, sums = cuda.local.array(2, int32), cuda.local.array(2, int32), cuda.local.array(2, int32)
        reciprocals = cuda.local.array(2, float32)
        sums[0], sums[1] = 0, 0
        for step in range(steps):
            head, r, here = step // per_head, step % per_head, (step & 1) * STAGE
            tile = r if r < tiles else 2 * tiles - 2 - r
            wide, column = wide_at_last or tile < mine, tile * TILE + first
            if step + 1 < steps:
                fetch(base + STAGE - here, keys, values, member, step + 1, per_head, tiles, t)
            else:
                ptx.copy_commit()
            ptx.copy_wait_but_one()
            cuda.syncthreads()
            if works:
                if r == 0:
                    tops[0], tops[1], dens[0], dens[1] = int32(LOWEST), int32(LOWEST), 0, 0
                    for i in range(D // 32):
                        for k in range(4):
                            where = at + (head * (D // 16) + 2 * i) * 32 + (k & 1) * (2 * H) + (k >> 1) * 32
                            query[i, k] = queries[uint64(where)]
                    for i in range(SUMS):
                        high[i], low[i] = 0, 0
                scores(s, query, at_k + here, wide)
                if r < tiles:
                    largest(s, tops, column, position, wide)
                if r == tiles - 1:
                    for half in range(2):
                        tops[half] = int32(quad_max(tops[half]) >> int32(SHIFT))
                if r >= tiles - 1:
                    weigh(s, tops, dens, exp, copy, column, position, wide)
                    split(limbs, s, wide)
                    if MANY:
                        for d in range(D // 8):
                            w = weighted(limbs, int32(at_v + here + d * (8 * TILE)), wide)
                            for e in range(4):
                                low[4 * d + e] = int32(low[4 * d + e] + int32(w[e] & int32(0xFFFF)))
                                high[4 * d + e] = int32(high[4 * d + e] + int32(w[e] >> int32(16)))
                if r == per_head - 1:
                    for half in range(2):
                        dens[half] = quad_sum(dens[half])
                        reciprocals[half] = float32(float32(BELOW_ONE) / float32(dens[half]))
                    for d in range(D // 16):
                        if not MANY:
                            for n in range(2):
                                w = weighted(limbs, int32(at_v + here + (2 * d + n) * (8 * TILE)), wide)
                                for e in range(4):
                                    low[4 * n + e] = w[e]
                        channel = head * D + d * 16
                        finish(high, low, 8 * d if MANY else 0, dens, reciprocals, at_c + channel * 4,
                               channel + (lane & 3) * 4, factors, a, at + (channel >> 4) * 32, sums)
            cuda.syncthreads()
        for half in range(2):
            total = quad_sum(sums[half])
            if works and (lane & 3) == 0:
                sb[row + 8 * half] = total

    return attention, 2 * STAGE


# --- the pass ---------------------------------------------------------------------------------------------------------

class Members(Pass):
    """The forward pass of a configuration on a Card: of members, and without noise of windows (`clean_kernels`)."""

    def __init__(self, cfg, packing, card, silent):
        super().__init__(cfg)
        nz, add = build_noise(cfg, silent), self.add
        self.embed = add(_embed_kernel(cfg, nz, card))
        self.norms = {streams: add(_norm_kernel(cfg, nz, card, streams)) for streams in (1, 3)}
        self.full = {kind: add(_full_kernel(cfg, nz, card, kind)) for kind in ("qkv", "o", "down")}
        self.up = add(_up_kernel(cfg, nz, card, self.full["down"].shape.KP))
        self.attention = add(_attention_kernel(cfg, nz, card))
        self.clean_head = Kernel(head_kernel(cfg, build_noise(cfg, True), card, True), **CLEAN_HEAD)
        self.clean_kernels, self.head = [*self.kernels, self.clean_head], add(head_kernel(cfg, nz, card))
        used = {"embedding": (PLAIN, self.head), "w_o": (QUADS, self.full["o"])}
        used |= {name: (QUADS, self.full["qkv"]) for name in ("w_q", "w_k", "w_v")}
        used |= {name: (UP, self.up) for name in ("w_up", "w_emb_mlp_up")}
        used |= {name: (DOWN, self.full["down"]) for name in ("w_down", "w_emb_mlp_down")}
        self.at = {}
        for t in sorted((t for t in parameters.tensors(cfg) if t.product), key=lambda t: t.layer):
            order, shape = used[t.name][0], used[t.name][1].shape
            self.at[t.name, t.layer] = packing.add(t, order, shape.columns(), shape.KP)
            if t.name == "embedding":
                self.at_columns = packing.add(t, ROWS, t.cols, t.rows)

    def layout(self, pairs):
        """({name: (first byte, end)} of the scratch arrays of so many pairs, rows, bytes)."""
        cfg, H = self.cfg, self.cfg.HIDDEN_DIM
        rows = blocks(2 * pairs * padded_length(cfg), TALLEST) * TALLEST
        members, shapes = blocks(rows, padded_length(cfg)), [kernel.shape for kernel in self.full.values()]
        spill = max(4 * MOST_BLOCKS * (shape.passes - 1) * (shape.N // 2) * THREADS for shape in shapes)
        out, end = ranges(dict(h=rows * H, n=rows * H, sb=16 * rows, u=4 * rows * H, queries=(2 * rows + 64) * H,
                               values=members * H * value_length(cfg), spill=max(spill, 4)))
        out["keys"] = (out["queries"][0] + rows * H, out["queries"][1])      # behind the queries
        return out, rows, end

    def launch(self, plan, tables, pairs, scratch, clean=False, **given):
        """Enqueues the whole pass over so many pairs; clean: over so many windows, with job[2] = 0, so that both
        members of a pair are the unperturbed model. given: what kernels are given, by the names of their parameters."""
        layout, stride, _ = self.layout(pairs)
        given = self.arguments(given, tables, layout, scratch, rope=tables.rope, gelu=tables.gelu, stride=stride,
                               count=pairs)
        length, n = padded_length(self.cfg), given["n"]
        rows, processors = 2 * pairs * length, min(cuda.get_current_device().MULTIPROCESSOR_COUNT, MOST_BLOCKS)

        def norm(call, streams):
            self.norms[streams]((pairs, blocks(2 * length, 128)), 256, given, call=call, out=n)

        def product(kernel, call, name, layer, x, matrices=1, **out):
            tiles = blocks(rows, 64 * kernel.shape.RG)
            kernel(min(tiles, processors // matrices) * matrices, THREADS, given, call=call, at=self.at[name, layer],
                   tiles=tiles, x=x, **out)

        def mlp(calls, up, down, layer):
            product(self.up, calls.up, up, layer, n)
            product(self.full["down"], calls.down, down, layer, given["u"])

        self.embed((pairs, blocks(length, 64)), 4 * min(length, 64), given, call=plan.embed,
                   width=self.cfg.SEQ_LEN + 1 if clean else self.cfg.WINDOW, losses=given["losses"].view(np.int64))
        norm(plan.embed, 1)
        mlp(plan.emb_mlp, "w_emb_mlp_up", "w_emb_mlp_down", 0)
        for i, layer in enumerate(plan.layers):
            norm(layer.ln_1, 3)
            product(self.full["qkv"], layer.qkv, "w_q", i, n, 3, h=given["queries"])
            self.attention((2 * pairs, blocks(length, 64)), 32 * min(4, length // 16), given, call=layer.sums_o, a=n)
            product(self.full["o"], layer.o, "w_o", i, n)
            norm(layer.ln_2, 1)
            mlp(layer.mlp, "w_up", "w_down", i)
        norm(plan.ln_f, 1)
        head = self.clean_head if clean else self.head
        head(blocks(rows, 64 * head.shape.RG), THREADS, given, call=plan.head, x=n, length=self.cfg.SEQ_LEN,
             exps=tables.clean_exps if clean else tables.exps, at_tiles=self.at["embedding", 0],
             at_columns=self.at_columns)
