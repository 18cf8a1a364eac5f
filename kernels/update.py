"""The update of SPEC 9 on a GPU: votes as integer matrix products over the population, optimizer, threshold,
noise-scale overlay.

A noise stream depends only on seed + pair + offset, so the noise of every parameter is a shifted view of ONE array,
noise(seed + n, i) with n = pair + offset. It is hashed once ("plain" operand rows, one for every index i) and serves
the larger side of every matrix. The smaller side of each matrix is hashed again, multiplied by the
fitness and aligned to the plain side's n ("signed" rows). What is left is a plain int8 product over n, contiguous in
both operands; slices of n bound the memory.
"""

from typing import NamedTuple

import numpy as np
from numba import cuda, float32, int8, int32, types, uint32
from numba.cuda.np.numpy_support import from_dtype

from model import parameters, rules, steps
from kernels import muon
from kernels.parts import A2, A8, A32, A64, AU32, B1, F1, F2, blocks, clip, int32s, pack_bytes
from kernels.rules import TARGET, build_noise, device
from kernels.tiles import DEPTH, SHARED, THREADS, TILE, tile_functions

# values of n that a block adds up; the operands of a split lie together and nearly fit the L2 cache
SPLIT = 4096
PIECE = 1024                # values of n that a block of the kernel `operands` makes for eight rows
ELEMENTS = 4 * THREADS      # weights that a block of the kernel `optimize` moves
FIT_PAD = 128               # zeros before and after the fitness

# columns of Work.rows, Work.tiles and Work.tensors
INDEX, DELTA, SHIFT, LOW, HIGH = range(5)
PLAIN, SIGNED, PLAIN_COUNT, SIGNED_COUNT, FIRST, LAST, VOTES, COLS, SIGNED_IS_ROW, SIGNED_AT = range(10)
WEIGHTS, SIZE, WIDTH, MATRIX, OVERLAY_A, OVERLAY_B = range(6)
OPTIMIZER = np.dtype([(name, np.int32 if name in ("rule", "chunks") else np.float32)
                      for name in rules.Optimizer._fields])
OPTIMIZERS = types.Array(from_dtype(OPTIMIZER), 1, "C")


class Work(NamedTuple):
    """What the kernels do, as int32 arrays.

    rows [operand rows, 5]: INDEX that is hashed, DELTA of its seed from n, SHIFT of the fitness (-1: plain), LOW and
    HIGH: range of n that is used. tiles [tiles, 10]: first PLAIN and SIGNED operand row, number of each, range of n,
    where the VOTES of the matrix begin, its COLS, whether the signed side is its rows, and the first of them. vectors
    [vectors, 4]: first weight, size, distances of both streams' seeds from that of the pair. tensors [tensors, 6], in
    the order of model.parameters.tensors. blocks [blocks, 2]: a tensor, the first of its elements to move."""
    rows: np.ndarray
    tiles: np.ndarray
    vectors: np.ndarray
    tensors: np.ndarray
    blocks: np.ndarray
    span: int               # n runs from 0 to span - 1


def work(cfg):
    """The Work of a configuration."""
    tensors, pairs = parameters.tensors(cfg), cfg.N_PAIRS
    plain = np.zeros((blocks(max(cfg.VOCAB_SIZE, 4 * cfg.HIDDEN_DIM), 8) * 8, 5), np.int32)
    plain[:, INDEX] = np.arange(len(plain))
    plain[:, SHIFT] = -1
    signed, tiles = [], []
    vectors = []
    for t in tensors:
        if not t.matrix:
            vectors.append((t.weights, t.size, t.seed_a, t.seed_b))
            continue
        signed_is_row = t.rows <= t.cols
        few, many = sorted((t.rows, t.cols))
        few_seed, many_seed = (t.seed_b, t.seed_a) if signed_is_row else (t.seed_a, t.seed_b)
        low, high = many_seed // DEPTH * DEPTH, blocks(many_seed + pairs, DEPTH) * DEPTH
        plain[:many, HIGH] = np.maximum(plain[:many, HIGH], high)
        at = len(plain) + len(signed)
        signed += [(i, few_seed - many_seed, many_seed, low, high) for i in range(few)] + [(0,) * 5] * (-few % 8)
        tiles += [(p, at + s, min(TILE, many - p), min(TILE, few - s), low, high, t.weights, t.cols, signed_is_row, s)
                  for p in range(0, many, TILE) for s in range(0, few, TILE)]
    table = [(t.weights, t.size, t.cols, t.matrix, t.overlay_a, t.overlay_b) for t in tensors]
    parts = [(i, first) for i, t in enumerate(tensors) for first in range(0, t.size, ELEMENTS)]
    rows = np.concatenate([plain, np.array(signed, np.int32)])
    return Work(*(np.array(a, np.int32) for a in (rows, tiles, vectors, table, parts)), int(rows[:, HIGH].max()))


@device
def place(rows, row, n):
    """Index of the operand word with four values of `row` from n (counted from the slice's start, a multiple of 4)
    on."""
    matrix = (n // SPLIT * (rows >> 3) + (row >> 3)) * (SPLIT // 16) + (n % SPLIT // 16)
    return matrix * 32 + (row & 7) * 4 + (n % 16 // 4)


@device
def vote_index(p, s, signed_is_row, cols):
    r, c = (s, p) if signed_is_row else (p, s)
    return int32((r >> 2) * 4 * cols + c * 4 + (r & 3))


def noise_kernels(cfg):
    """The kernels that hash noise: into the operands of products, and for the votes on vectors."""
    signs = not cfg.USE_CLT
    noise = build_noise(cfg).noise

    @device
    def draw(seed, i):
        """int32: noise as votes count it."""
        n = noise(seed, i)
        return int32(n > 0) - int32(n < 0) if signs else n

    def operands(rows: A2, seed: AU32, fit: A8, start: int32, width: int32, out: A32):
        """out int32: the operands of the slice from n = start on, core matrices [width / SPLIT][rows / 8][SPLIT /
        16][8][16 bytes]. fit int8: FIT_PAD zeros, [pairs], zeros. Grid: (rows / 8) * (width / PIECE), eight rows and
        PIECE values of n each."""
        pieces = width // PIECE
        group = int32(cuda.blockIdx.x // pieces)
        lane, warp = cuda.threadIdx.x & 31, cuda.threadIdx.x >> 5
        row = int32(group * 8 + (lane >> 2))
        first = int32((cuda.blockIdx.x - group * pieces) * PIECE + warp * 16)
        to = place(rows.shape[0], row, first) + (lane & 3)
        n = int32(start + first + (lane & 3) * 4)
        low, high = rows[row, LOW], rows[row, HIGH]
        shift = rows[row, SHIFT]
        x = uint32(seed[0] + rows[row, DELTA] + rows[row, INDEX] * 0x9E3779B9)
        draws = int32s(4)
        for _ in range(PIECE // 64):
            if uint32(n - low) < uint32(high - low):
                for e in range(4):
                    draws[e] = draw(uint32(x + n + e), 0)
                    if shift >= 0:
                        draws[e] = int32(draws[e] * fit[n + e - shift + FIT_PAD])
                out[to] = pack_bytes(draws, 0)
            n = int32(n + 64)
            to += 128

    def vector_votes(vectors: A2, seed: AU32, fit: A8, votes: A32):
        """Adds votes on vectors. A thread an element, for SPLIT pairs. Grid: [elements, pairs / SPLIT, vectors]."""
        i, v, total = cuda.grid(1), cuda.blockIdx.z, int32(0)
        first, size = vectors[v, 0], vectors[v, 1]
        if i < size:
            start = cuda.blockIdx.y * SPLIT
            for q in range(start, min(start + SPLIT, fit.size)):
                if fit[q] != 0:
                    here = uint32(seed[0] + q)
                    product = draw(uint32(here + vectors[v, 2]), i) * draw(uint32(here + vectors[v, 3]), i)
                    total = int32(total + fit[q] * product)
            cuda.atomic.add(votes, first + i, total)

    return operands, vector_votes


def products_kernel(wgmma):
    """The kernel of the matrices' votes; wgmma: see kernels.tiles."""
    tile_of = tile_functions(wgmma)
    TALL, WIDE = tile_of.TALL, tile_of.WIDE
    SUMS, APART = tile_of.SUMS, tile_of.APART
    accumulate, corner = tile_of.accumulate, tile_of.corner

    def products(tiles: A2, operand: A32, rows: int32, start: int32, votes: A32):
        """votes += plain . signed over SPLIT values of n, atomically (a sum of integers has no order). Grid: splits *
        tiles, the tiles of one split side by side, so that the operands they share stay in the L2 cache."""
        t = cuda.threadIdx.x
        split = cuda.blockIdx.x // tiles.shape[0]
        tile = int32(cuda.blockIdx.x - split * tiles.shape[0])
        first = max(int32(start + split * SPLIT), tiles[tile, FIRST])
        last = min(int32(start + split * SPLIT + SPLIT), tiles[tile, LAST])
        steps = int32((last - first) // DEPTH)
        if steps <= 0:
            return                                           # all of the block: nobody waits at a barrier
        plain, signed = tiles[tile, PLAIN], tiles[tile, SIGNED]
        lane = (t >> 5) * (SPLIT * 2) + (t & 31) * 4         # 512 bytes of each eight rows
        acc = cuda.local.array((TALL, SUMS), int32)
        for i in range(TALL):
            for j in range(SUMS):
                acc[i, j] = 0
        accumulate(acc, operand, place(rows, plain, first - start) + lane, SPLIT * 2, DEPTH * 2,
                   operand, place(rows, signed, first - start) + lane, SPLIT * 2, DEPTH * 2, steps)
        # a step of 8 plain rows, of 8 signed rows, of one signed row, in votes [rows / 4, cols, 4]
        if tiles[tile, SIGNED_IS_ROW]:
            down, right = int32(32), int32(8 * tiles[tile, COLS])
            one = int32(1)
        else:
            down, right = int32(8 * tiles[tile, COLS]), int32(32)
            one = int32(4)
        p, s = corner()
        at = tiles[tile, VOTES] + vote_index(plain + p, tiles[tile, SIGNED_AT] + s, tiles[tile, SIGNED_IS_ROW],
                                             tiles[tile, COLS])
        p, s = tiles[tile, PLAIN_COUNT] - p, tiles[tile, SIGNED_COUNT] - s           # how many there are from here on
        for i in range(TALL):
            for half in range(2):
                for j in range(WIDE):
                    for k in range(2):
                        if APART * i + 8 * half < p and 8 * j + k < s:
                            cuda.atomic.add(votes, at + (APART // 8 * i + half) * down + j * right + k * one,
                                            acc[i, 4 * j + 2 * half + k])

    return products


def optimizers(cfg, lr):
    """[rules.Optimizer] of the tensors as OPTIMIZER; lr: of the step."""
    return np.array([tuple(rules.update_constants(cfg, lr, t)) for t in parameters.tensors(cfg)], OPTIMIZER)


def optimize_kernel(cfg):
    """The kernel that moves the weights."""
    adapt = cfg.ADAPTIVE_NOISE_MODE != 0
    step_of = rules.update_rules(device, TARGET).step

    def optimize(blocks: A2, tensors: A2, optimizers: OPTIMIZERS, votes: A32, directions: F1, weights: A8, moments: F2,
                 touched: B1, changed: A32):
        """Moves every weight by its vote, or its direction (kernels.muon), and clears the vote. moments float32
        [weights, 3]; touched uint8 [overlay]: set where a weight of the row or column changed; changed int32 [1]: how
        many did. Grid: blocks."""
        tensor, lane = blocks[cuda.blockIdx.x, 0], cuda.threadIdx.x & 31
        base, size = tensors[tensor, WEIGHTS], tensors[tensor, SIZE]
        cols, matrix = tensors[tensor, WIDTH], tensors[tensor, MATRIX]
        o = optimizers[tensor]
        for j in range(ELEMENTS // THREADS):
            i = int32(blocks[cuda.blockIdx.x, 1] + j * THREADS + cuda.threadIdx.x)
            moved = False
            if i < size:
                at, group = base + i, 4 if matrix else 1
                r, c = i // group // cols * group + i % group, i // group % cols
                x = directions[base + muon.place(i, size // cols, cols)] if o.rule == rules.MUON else float32(0)
                move, m, v, acc = step_of(o, votes[at], x, int32(weights[at]), moments[at, 0], moments[at, 1],
                                          moments[at, 2])
                votes[at] = 0
                moments[at, 0], moments[at, 1], moments[at, 2] = m, v, acc
                moved = move != 0
                if moved:
                    weights[at] = int8(weights[at] + move)
                    if adapt:
                        touched[tensors[tensor, OVERLAY_A] + c] = 1
                        if matrix:
                            touched[tensors[tensor, OVERLAY_B] + r] = 1
            count = cuda.popc(cuda.ballot_sync(0xFFFFFFFF, moved))
            if lane == 0 and count > 0:
                cuda.atomic.add(changed, 0, count)

    return optimize


def unpack_kernel(cfg):
    """The kernel that unpacks a step (steps.join_digits): its digits as int8 [pairs] or, with unit trials, int32
    [weights], the sums of their terms over the chunks, which are the votes."""
    units, summed, wide = cfg.PERTURB == "units", cfg.SUMMED, cfg.WIDE_SUMS
    kind, chunks, moves = A32 if units else A8, cfg.N_CHUNKS if units else 1, cfg.LOCAL_STEPS > 1
    VALUES, EACH = cfg.DIGIT_VALUES, steps.packing(cfg.DIGIT_VALUES).digits

    def unpack(packed: B1, digits: kind):
        """The last byte of digits may have more. One thread for a byte of digits."""
        i, each = cuda.grid(1), (digits.size + EACH - 1) // EACH
        if i < each:
            sums = int32s(EACH)
            for k in range(EACH):
                sums[k] = 0
                if summed:
                    at = (k * each + i) * (2 if wide else 1)
                    sums[k] = int32(int8(packed[at + 1 if wide else at]))
                    if wide:
                        sums[k] = int32(sums[k] << 8 | packed[at])
            for chunk in range(0 if summed else chunks):
                byte = int32(packed[chunk * each + i])
                for k in range(EACH):
                    digit = byte % int32(VALUES)
                    digit = int32(digit - VALUES) if digit > VALUES // 2 else digit
                    if moves:                                # steps.Sums; 10: no negative number is divided
                        digit += int32(2 * (chunks - 1)) * ((digit + int32(10)) // int32(3) - int32(3))
                    sums[k] += digit
                    byte //= int32(VALUES)
            for k in range(EACH):
                if EACH * i + k < digits.size:
                    digits[EACH * i + k] = sums[k]

    return unpack


def rescale_kernel(cfg):
    """The kernel of the noise-scale overlay."""
    increase, decrease = cfg.ADAPTIVE_NOISE_INC, -cfg.ADAPTIVE_NOISE_DEC

    def rescale(touched: B1, overlay: A8):
        """The overlay's step; clears `touched`. One thread per entry."""
        i = cuda.grid(1)
        if i < overlay.size:
            overlay[i] = int8(clip(overlay[i] + (increase if touched[i] else decrease)))
            touched[i] = 0

    return rescale


def short_run_kernels(cfg):
    """The kernels of updates that a chunk makes for itself (SPEC 23)."""
    move_digit = rules.update_rules(device, TARGET).move_digit

    def take(digits: A8, loss: A64, votes: A32, total: A64):
        """votes int32 [n]: the digits of a local step, int8 [n]. total[0] += loss[0]. A thread a digit."""
        i = cuda.grid(1)
        if i < digits.size:
            votes[i] = digits[i]
        if i == 0:
            total[0] += loss[0]

    def moves(blocks: A2, tensors: A2, optimizers: OPTIMIZERS, weights_before: A8, moments_before: F2, weights: A8,
              moments: F2, digits: A8, loss: A64, total: A64):
        """digits int8 [n] of weights that a short run has moved; loss[0] = total[0], which becomes 0. moments float32
        [n, 3]. Grid: blocks."""
        tensor = blocks[cuda.blockIdx.x, 0]
        o = optimizers[tensor]
        for j in range(ELEMENTS // THREADS):
            i = int32(blocks[cuda.blockIdx.x, 1] + j * THREADS + cuda.threadIdx.x)
            if i < tensors[tensor, SIZE]:
                at = tensors[tensor, WEIGHTS] + i
                digits[at] = move_digit(o, int32(weights_before[at]), moments_before[at, 2], int32(weights[at]),
                                        moments[at, 2], moments[at, 0])
        if cuda.grid(1) == 0:
            loss[0], total[0] = total[0], 0

    return [take, moves]


def build(cfg, wgmma):
    """The kernels of a configuration, as Python functions; wgmma: see products_kernel."""
    own = [unpack_kernel(cfg), optimize_kernel(cfg)]
    if cfg.LOCAL_STEPS > 1:
        own += short_run_kernels(cfg)
    if cfg.PERTURB == "weights":
        own += [*noise_kernels(cfg), products_kernel(wgmma), rescale_kernel(cfg)]
    return own + muon.build(cfg)


class Update:
    """The device buffers of one configuration's updates and their launches.

    kernels: {name: compiled dispatcher} of `build`; budget: bytes that the operands may take (at least a slice of SPLIT
    values of n). `set_rate`, set `packed` (the bytes of the step), `changed` (to 0) and the seed, enqueue `launches`,
    read `changed`."""

    def __init__(self, cfg, kernels, budget):
        w = work(cfg)
        self.cfg, self.rate = cfg, None                      # the learning rate that is on the device
        rows = len(w.rows) if "operands" in kernels else 0   # with unit trials nothing is hashed
        self.width = max(1, min(blocks(w.span, SPLIT), int(budget) // (max(1, rows) * SPLIT) - 1)) * SPLIT
        self.kernels = kernels
        self.starts = range(0, w.span, self.width) if rows else ()
        self.tables = Work(*map(cuda.to_device, w[:5]), w.span)
        # another split: for tiles that reach beyond the last row
        self.operands = cuda.device_array(rows * (self.width + SPLIT) // 4, np.int32)
        self.votes = cuda.to_device(np.zeros(parameters.n_weights(cfg), np.int32))
        self.touched = cuda.to_device(np.zeros(parameters.n_overlay(cfg), np.uint8))
        self.packed = cuda.device_array(cfg.STEP_BYTES, np.uint8)
        self.fit = cuda.to_device(np.zeros(2 * FIT_PAD + cfg.N_PAIRS, np.int8))
        self.optimizers = cuda.device_array(len(w.tensors), OPTIMIZER)
        self.changed = cuda.to_device(np.zeros(1, np.int32))
        self.muon = muon.Directions(cfg, kernels)
        self.pairs, self.each = cfg.N_PAIRS, steps.packing(cfg.DIGIT_VALUES).digits
        self.vector_grid = blocks(4 * cfg.HIDDEN_DIM, THREADS), blocks(cfg.N_PAIRS, SPLIT), len(w.vectors)
        self.adapt = cfg.ADAPTIVE_NOISE_MODE != 0

    @staticmethod
    def bytes_needed(cfg):
        """Device memory of all buffers with the smallest slice."""
        w = work(cfg)
        rows = len(w.rows) if cfg.PERTURB == "weights" else 0
        return (rows * 2 * SPLIT + sum(a.nbytes for a in w[:5]) + 4 * parameters.n_weights(cfg) + cfg.N_PAIRS
                + cfg.STEP_BYTES + muon.Directions.bytes_needed(cfg))

    def launches(self, stream, seed, weights, moments, overlay):
        """[function that enqueues a kernel] of an update. On the device: seed uint32 [>= 1], weights int8
        [n], moments float32 [n, 3], overlay int8."""
        tables, out = self.tables, []
        rows = np.int32(len(tables.rows))
        digits = self.fit[FIT_PAD:][:self.pairs] if self.starts else self.votes

        def add(name, grid, *args, shared=0):
            out.append(lambda: self.kernels[name][grid, THREADS, stream, shared](*args))

        add("unpack", blocks(digits.size, self.each * THREADS), self.packed, digits)
        for start in map(np.int32, self.starts):
            add("operands", len(tables.rows) // 8 * (self.width // PIECE), tables.rows, seed, self.fit, start,
                np.int32(self.width), self.operands)
            add("products", len(tables.tiles) * (self.width // SPLIT), tables.tiles, self.operands, rows, start,
                self.votes, shared=SHARED)
        if self.starts:
            add("vector_votes", self.vector_grid, tables.vectors, seed, digits, self.votes)
        out += self.moves(stream, weights, moments)
        if self.adapt:
            add("rescale", blocks(overlay.size, THREADS), self.touched, overlay)
        return out

    def moves(self, stream, weights, moments):
        """[function that enqueues a kernel]: the weights move by `votes`, which become 0."""
        tables = self.tables
        return [*self.muon.launches(stream, self.votes, moments),
                lambda: self.kernels["optimize"][len(tables.blocks), THREADS, stream](
                    tables.blocks, tables.tensors, self.optimizers, self.votes, self.muon.x, weights, moments,
                    self.touched, self.changed)]

    def set_rate(self, rate, stream):
        """Enqueues the constants of the optimizer for a learning rate."""
        if rate != self.rate:
            self.optimizers.copy_to_device(optimizers(self.cfg, rate), stream)
            self.rate = rate
