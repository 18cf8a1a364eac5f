"""The update of SPEC 9 on a GPU: votes as integer matrix products over the population, optimizer, threshold,
noise-scale overlay.

A noise stream depends only on seed + pair + offset, so the noise of every matrix is a shifted view of ONE array,
noise(seed + n, i) with n = pair + offset. It is hashed once ("plain" operand rows, one for every index i) and serves
the larger side of every matrix. The smaller side of each matrix is hashed again, multiplied by the fitness and aligned
to the plain side's n ("signed" rows). What is left is a plain int8 product over n, contiguous in both operands; slices
of n bound the memory. Vectors are few numbers: their noise is hashed for each of them.
"""

from typing import NamedTuple

import numpy as np
from numba import cuda, float32, int8, int32, int64, uint32
from numba.cuda import libdevice

from model import optimizers, parameters, rules, ternary
from kernels import muon
from kernels.parts import A2, A8, A32, AU32, B1, F1, F2, blocks, clip, int32s, pack_bytes
from kernels.rules import TARGET, build_noise, device
from kernels.ptx import copy_async16, copy_commit, copy_wait_but_one, mma_tile, shared_address

TILE = 128                  # plain and signed rows of a block of products
DEPTH = 64                  # values of n in a stage of its shared memory
STAGES = 3
STAGE = 2 * TILE * DEPTH    # bytes
SHARED = STAGES * STAGE     # 48 KiB: every card grants it without asking
# values of n that a block adds up; the operands of a split lie together and nearly fit the L2 cache
SPLIT = 4096
PIECE = 1024                # values of n that a block of the kernel `operands` makes for eight rows
THREADS = 128
ELEMENTS = 4 * THREADS      # weights that a block of the kernel `optimize` moves
FIT_PAD = 128               # zeros before and after the fitness

# columns of Work.rows, Work.tiles, Work.vectors and Work.tensors
INDEX, DELTA, SHIFT, LOW, HIGH = range(5)
PLAIN, SIGNED, PLAIN_COUNT, SIGNED_COUNT, FIRST, LAST, VOTES, COLS, SIGNED_IS_ROW, SIGNED_AT = range(10)
ELEMENT, SEED_A, SEED_B, VOTE = range(4)
WEIGHTS, SIZE, WIDTH, MATRIX, OVERLAY_A, OVERLAY_B, BY_TOKEN, DIRECTION = range(8)


class Work(NamedTuple):
    """What the kernels do, as int32 arrays.

    rows [operand rows, 5]: INDEX that is hashed, DELTA of its seed from n, SHIFT of the fitness (-1: plain), LOW and
    HIGH: range of n that is used. tiles [tiles, 10]: first PLAIN and SIGNED operand row, number of each, range of n,
    where the VOTES of the matrix begin, its COLS, whether the signed side is its rows, and the first of them. vectors
    [elements, 4]: ELEMENT, the seeds of its two streams, where its VOTE goes. tensors [tensors, 8], in the order of
    model.parameters.tensors (DIRECTION: kernels.muon.Work.directions). blocks [blocks, 2]: a tensor, the first of its
    elements to move."""
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
            vectors += [(i, t.seed_a, t.seed_b, t.weights + i) for i in range(t.cols)]
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
    table = [(t.weights, t.size, t.cols, t.matrix, t.overlay_a, t.overlay_b, t.by_token, direction)
             for t, direction in zip(tensors, muon.work(cfg).directions)]
    parts = [(i, first) for i, t in enumerate(tensors) for first in range(0, t.size, ELEMENTS)]
    rows = np.concatenate([plain, np.array(signed, np.int32)])
    return Work(*(np.array(a, np.int32) for a in (rows, tiles, vectors, table, parts)), int(rows[:, HIGH].max()))


@device
def place(rows, row, n):
    """Index of the operand word with four values of `row` from n (counted from the slice's start, a multiple of 4)
    on."""
    matrix = (int64(n // SPLIT) * (rows >> 3) + (row >> 3)) * (SPLIT // 16) + (n % SPLIT // 16)
    return matrix * 32 + (row & 7) * 4 + (n % 16 // 4)


@device
def fetch(to, operand, plain_at, signed_at, step):
    """This thread's share of a stage: TILE plain and TILE signed rows of DEPTH values, which begin at these words in
    step 0; 512 bytes of each eight rows."""
    t = cuda.threadIdx.x
    for side in range(2):
        at = (signed_at if side else plain_at) + step * (DEPTH * 2)
        for i in range(4):
            copy_async16(int32(to + side * (STAGE // 2) + (t + i * THREADS) * 16), operand,
                         at + ((t >> 5) + 4 * i) * (SPLIT * 2) + (t & 31) * 4)


@device
def vote_index(p, s, signed_is_row, cols):
    r, c = (s, p) if signed_is_row else (p, s)
    return int32((r >> 2) * 4 * cols + c * 4 + (r & 3))


def draw_function(cfg):
    """Device function (seed, i) -> int32: the noise as votes count it."""
    noise, signs = build_noise(cfg).noise, not cfg.USE_CLT

    @device
    def vote_draw(seed, i):
        n = noise(seed, i)
        return int32(int32(n > 0) - int32(n < 0)) if signs else n

    return vote_draw


def operands_kernel(cfg):
    """The kernel that hashes noise into the operands of products."""
    vote_draw = draw_function(cfg)

    def operands(rows: A2, seed: AU32, fit: A8, start: int32, width: int32, out: A32):
        """out int32: the operands of the slice from n = start on, core matrices [width / SPLIT][rows / 8][SPLIT /
        16][8][16 bytes]. fit: FIT_PAD zeros, [pairs], FIT_PAD zeros. Grid: (rows / 8) * (width / PIECE), eight rows and
        PIECE values of n each."""
        pieces = int32(width // PIECE)
        group = int32(cuda.blockIdx.x // pieces)
        lane, warp = cuda.threadIdx.x & 31, cuda.threadIdx.x >> 5
        row = int32(group * 8 + (lane >> 2))
        first = int32((cuda.blockIdx.x - group * pieces) * PIECE + warp * 16)
        to = place(rows.shape[0], row, first) + (lane & 3)
        n = int32(start + first + (lane & 3) * 4)
        low, high = rows[row, LOW], rows[row, HIGH]
        shift, index = rows[row, SHIFT], rows[row, INDEX]
        own = uint32(seed[0] + uint32(rows[row, DELTA]))
        draws = int32s(4)
        for _ in range(PIECE // 64):
            if uint32(n - low) < uint32(high - low):
                for k in range(4):
                    draws[k] = vote_draw(uint32(own + uint32(n + k)), index)
                    if shift >= 0:
                        draws[k] = int32(draws[k] * fit[n - shift + FIT_PAD + k])
                out[to] = pack_bytes(draws, 0)
            n = int32(n + 64)
            to += 128

    return operands


def products_kernel():
    """The kernel of the matrices' votes."""
    multiply = mma_tile(64, DEPTH // 32, 8 * DEPTH)
    # a thread's sums, of its warp's quarter of the block, lie in 4 by 8 tiles of 16 plain rows by 8 signed ones

    def products(tiles: A2, operand: A32, rows: int32, start: int32, votes: A32):
        """votes += plain . signed over SPLIT values of n, atomically (a sum of integers has no order). Grid: splits *
        tiles, the tiles of one split side by side, so that the operands they share stay in the L2 cache."""
        sm = cuda.shared.array(0, int32)
        t = cuda.threadIdx.x
        split = int32(cuda.blockIdx.x // tiles.shape[0])
        tile = int32(cuda.blockIdx.x - split * tiles.shape[0])
        first = max(int32(start + split * SPLIT), tiles[tile, FIRST])
        last = min(int32(start + split * SPLIT + SPLIT), tiles[tile, LAST])
        steps = int32((last - first) // DEPTH)
        if steps <= 0:
            return
        plain, signed = tiles[tile, PLAIN], tiles[tile, SIGNED]
        plain_at, signed_at = place(rows, plain, first - start), place(rows, signed, first - start)
        base = shared_address(sm, 0)
        for ahead in range(2):
            if ahead < steps:
                fetch(base + ahead * STAGE, operand, plain_at, signed_at, ahead)
            copy_commit()
        lane, warp = t & 31, t >> 5
        g, q = lane >> 2, lane & 3
        # ldmatrix: where this lane's rows of the first core matrices lie
        plain_lane = (warp >> 1) * (64 * DEPTH) + ((lane >> 3) & 1) * (8 * DEPTH) + (lane >> 4) * 128 + (lane & 7) * 16
        signed_lane = (warp & 1) * (64 * DEPTH) + (lane >> 4) * (8 * DEPTH) + ((lane >> 3) & 1) * 128 + (lane & 7) * 16
        signed_lane += STAGE // 2
        acc = cuda.local.array((4, 32), int32)
        for i in range(4):
            for j in range(32):
                acc[i, j] = 0
        slot = int32(0)
        for step in range(steps):
            copy_wait_but_one()
            cuda.syncthreads()
            if step + 2 < steps:
                fetch(base + (slot + 2 if slot == 0 else slot - 1) * STAGE, operand, plain_at, signed_at, step + 2)
            copy_commit()
            here = base + slot * STAGE
            for i in range(4):
                multiply(acc[i], int32(here + plain_lane + i * (16 * DEPTH)), int32(here + signed_lane))
            slot = int32(0) if slot == STAGES - 1 else int32(slot + 1)
        # a step of 8 plain rows, of 8 signed rows, of one signed row, in votes [rows / 4, cols, 4]
        if tiles[tile, SIGNED_IS_ROW]:
            down, right = int32(32), int32(8 * tiles[tile, COLS])
            one = int32(1)
        else:
            down, right = int32(8 * tiles[tile, COLS]), int32(32)
            one = int32(4)
        p, s = 64 * (warp >> 1) + g, 64 * (warp & 1) + 2 * q
        at = tiles[tile, VOTES] + vote_index(plain + p, tiles[tile, SIGNED_AT] + s, tiles[tile, SIGNED_IS_ROW],
                                             tiles[tile, COLS])
        p, s = tiles[tile, PLAIN_COUNT] - p, tiles[tile, SIGNED_COUNT] - s           # how many there are from here on
        for i in range(4):
            for half in range(2):
                for j in range(8):
                    for k in range(2):
                        if 16 * i + 8 * half < p and 8 * j + k < s:
                            cuda.atomic.add(votes, at + (2 * i + half) * down + j * right + k * one,
                                            acc[i, 4 * j + 2 * half + k])

    return products


def vectors_kernel(cfg):
    """The kernel of the vectors' votes."""
    vote_draw = draw_function(cfg)

    def vector_votes(vectors: A2, seed: AU32, fit: A8, pairs: int32, votes: A32):
        """votes += the sum over pairs of fit * noise * noise. Grid: elements of all vectors, a block each."""
        element = vectors[cuda.blockIdx.x, ELEMENT]
        seed_a, seed_b = uint32(vectors[cuda.blockIdx.x, SEED_A]), uint32(vectors[cuda.blockIdx.x, SEED_B])
        total = int32(0)
        for pair in range(int32(cuda.threadIdx.x), pairs, THREADS):
            digit, own = int32(fit[FIT_PAD + pair]), uint32(seed[0] + uint32(pair))
            if digit != 0:
                a, b = vote_draw(uint32(own + seed_a), element), vote_draw(uint32(own + seed_b), element)
                total = int32(total + digit * a * b)
        cuda.atomic.add(votes, vectors[cuda.blockIdx.x, VOTE], total)

    return vector_votes


def optimize_kernel(cfg):
    """The kernel that moves the weights."""
    rare, adapt = cfg.RARE_TOKENS > 0, cfg.ADAPTIVE_NOISE_MODE != 0
    with_muon = bool(cfg.USE_MUON)
    by_sgd, by_ztest = cfg.OPTIMIZER == "sgd", cfg.OPTIMIZER == "ztest"
    muon_size = float32(np.float32(optimizers.MUON_SIZE))
    o = optimizers.constants(cfg, 1.0, parameters.tensors(cfg)[0])
    beta1, one_less_beta1, beta2, one_less_beta2, eps, decay = map(
        float32, (o.beta1, o.one_less_beta1, o.beta2, o.one_less_beta2, o.eps, o.decay))
    all_decay = cfg.PERTURB == "weights"                     # see optimizers.constants
    rule = rules.update_rules(device, TARGET)
    adamw, whole_step = rule.adamw, rule.whole_step
    muon_step = rule.muon
    sgd, ztest = rule.sgd, rule.ztest

    def optimize(blocks: A2, tensors: A2, rates: F1, token_rates: F1, votes: A32, directions: F1, weights: A8,
                 moments: F2, touched: B1, changed: A32):
        """Moves every weight by its vote, or its direction (kernels.muon), and clears the vote. rates float32
        [tensors]; token_rates float32 [tokens], with RARE_TOKENS; moments float32 [weights, 3]; touched uint8
        [overlay]: set where a weight of the row or column changed; changed int32 [1]: how many did. Grid: blocks."""
        tensor, lane = blocks[cuda.blockIdx.x, 0], cuda.threadIdx.x & 31
        base, size = tensors[tensor, WEIGHTS], tensors[tensor, SIZE]
        cols, matrix = tensors[tensor, WIDTH], tensors[tensor, MATRIX]
        rate, by_token = rates[tensor], tensors[tensor, BY_TOKEN]
        direction = tensors[tensor, DIRECTION] if with_muon else int32(-1)
        for j in range(ELEMENTS // THREADS):
            i = int32(blocks[cuda.blockIdx.x, 1] + j * THREADS + cuda.threadIdx.x)
            moved = False
            if i < size:
                at = int64(base) + i
                vote, weight = votes[at], int32(weights[at])
                acc = moments[at, 2]
                if rare and by_token != 0:
                    rate = libdevice.fmul_rn(rates[tensor], token_rates[(i >> 2) % cols])
                votes[at] = 0
                if by_ztest:
                    move = ztest(vote, weight, int32(rate))
                else:
                    if direction >= 0:
                        rows = size // cols
                        r, c = (i >> 2) // cols * 4 + (i & 3), (i >> 2) % cols
                        x = directions[int64(direction) + (r * cols + c if rows <= cols else c * rows + r)]
                        long = libdevice.fsqrt_rn(libdevice.int2float_rn(max(rows, cols)))
                        acc = muon_step(x, libdevice.fmul_rn(muon_size, long), weight, acc, rate, decay)
                    elif by_sgd:
                        acc = sgd(vote, acc, rate)
                    else:
                        m, v, acc = adamw(vote, weight, moments[at, 0], moments[at, 1], acc, rate, beta1,
                                          one_less_beta1, beta2, one_less_beta2, eps,
                                          decay if all_decay or matrix else float32(0))
                        moments[at, 0], moments[at, 1] = m, v
                    move, acc = whole_step(weight, acc)
                moments[at, 2] = acc
                moved = move != 0
                if moved:
                    weights[at] = int8(weight + move)
                    if adapt:
                        if matrix:
                            touched[tensors[tensor, OVERLAY_A] + (i >> 2) % cols] = 1
                            touched[tensors[tensor, OVERLAY_B] + (i >> 2) // cols * 4 + (i & 3)] = 1
                        else:
                            touched[tensors[tensor, OVERLAY_A] + i] = 1
            count = cuda.popc(cuda.ballot_sync(0xFFFFFFFF, moved))
            if lane == 0 and count > 0:
                cuda.atomic.add(changed, 0, count)

    return optimize


def unpack_kernel(cfg):
    """The kernel that unpacks the digits of a step (model.ternary): int8 [pairs] or, with noise on activations, int32
    [weights], their sums over the chunks, which are the votes."""
    chunks, kind = (1, A8) if cfg.PERTURB == "weights" else (cfg.N_CHUNKS, A32)

    def unpack(packed: B1, digits: kind):
        """digits: of all chunks, each in the same number of bytes; the last byte may have more. One thread per byte."""
        i, each = int64(cuda.grid(1)), packed.size // chunks
        if i < each:
            sums = int32s(5)
            for k in range(5):
                sums[k] = 0
            for chunk in range(chunks):
                byte = int32(packed[chunk * each + i])
                for k in range(5):
                    digit = byte % int32(3)
                    sums[k] += int32(-1) if digit == 2 else digit
                    byte //= int32(3)
            for k in range(5):
                if 5 * i + k < digits.size:
                    digits[5 * i + k] = sums[k]

    return unpack


def seen_kernel(cfg):
    """The kernel that adds the further votes of pairs on the tokens in their windows."""
    T, H, V = cfg.SEQ_LEN + 1, cfg.HIDDEN_DIM, cfg.VOCAB_SIZE
    first, others = cfg.STATE_TOKENS, cfg.SEEN_VOTES - 1
    vote_draw = draw_function(cfg)

    def seen(windows: A32, tables: A2, fit: A8, seed: AU32, votes: A32):
        """Adds the votes of a pair on the tokens in its window another SEEN_VOTES - 1 times. windows int32, flat:
        those of all pairs; tables [tables, 3]: first of the weights, seed of the tokens' noise, of the hidden units';
        fit int8. Grid: pairs * tables."""
        tokens = cuda.shared.array(T, int32)
        draws = cuda.shared.array(T, int32)                  # on another line: the simulator tells arrays apart by it
        t, pair = cuda.threadIdx.x, int32(cuda.blockIdx.x // tables.shape[0])
        table, vote = int32(cuda.blockIdx.x - pair * tables.shape[0]), int32(fit[FIT_PAD + pair])
        if vote == 0:
            return
        own, at = uint32(seed[0] + uint32(pair)), pair * int32(first + T) + first
        for i in range(t, T, THREADS):
            token, again = windows[at + i], False
            for j in range(i):
                again |= windows[at + j] == token
            tokens[i] = int32(-1) if again else token
            draws[i] = vote_draw(uint32(own + uint32(tables[table, 1])), token)
        cuda.syncthreads()
        for r in range(t, H, THREADS):
            b = int32(vote_draw(uint32(own + uint32(tables[table, 2])), r) * int32(vote * others))
            for i in range(T):
                if tokens[i] >= 0:
                    to = tables[table, 0] + vote_index(tokens[i], r, True, V)
                    cuda.atomic.add(votes, to, int32(draws[i] * b))

    return seen


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


def build(cfg):
    """The kernels of a configuration, as Python functions."""
    own = [unpack_kernel(cfg), optimize_kernel(cfg)]
    if cfg.PERTURB == "weights":
        own += [operands_kernel(cfg), products_kernel(), vectors_kernel(cfg), rescale_kernel(cfg)]
    if cfg.SEEN_VOTES > 1:
        own.append(seen_kernel(cfg))
    return own + muon.build(cfg)


def window_bytes(cfg):
    """Size of the windows of all pairs; of a single number where they are not needed."""
    return 4 * cfg.N_PAIRS * (cfg.STATE_TOKENS + cfg.SEQ_LEN + 1) if cfg.SEEN_VOTES > 1 else 4


class Update:
    """The device buffers of one configuration's updates and their launches.

    kernels: {name: compiled dispatcher} of `build`; budget: bytes that the operands may take (at least a slice of SPLIT
    values of n). Set `rates`, `token_rates` (with RARE_TOKENS), `windows` (of all pairs, with SEEN_VOTES),
    `packed` (the digits of the step), `changed` (to 0) and the seed, enqueue `launches`, read `changed`."""

    def __init__(self, cfg, kernels, budget):
        w = work(cfg)
        rows = len(w.rows) if "operands" in kernels else 0   # with noise on activations nothing is hashed
        self.width = max(1, min(blocks(w.span, SPLIT), int(budget) // (max(1, rows) * SPLIT) - 1)) * SPLIT
        self.kernels = kernels
        self.starts = range(0, w.span, self.width) if rows else ()
        self.tables = Work(*map(cuda.to_device, w[:5]), w.span)
        # another split, for tiles that reach beyond the last row
        self.operands = cuda.device_array(rows * (self.width + SPLIT) // 4, np.int32)
        self.votes = cuda.to_device(np.zeros(parameters.n_weights(cfg), np.int32))
        self.touched = cuda.to_device(np.zeros(parameters.n_overlay(cfg), np.uint8))
        self.packed = cuda.device_array(ternary.packed_size(cfg.STEP_DIGITS), np.uint8)
        self.fit = cuda.to_device(np.zeros(2 * FIT_PAD + cfg.N_PAIRS, np.int8))
        self.rates = cuda.device_array(len(w.tensors), np.float32)
        self.token_rates = cuda.device_array(cfg.VOCAB_SIZE if cfg.RARE_TOKENS else 1, np.float32)
        self.changed = cuda.to_device(np.zeros(1, np.int32))
        self.windows = cuda.device_array(window_bytes(cfg) // 4, np.int32)
        self.seen = cuda.to_device(np.array([(t.weights, t.seed_a, t.seed_b) for t in parameters.tensors(cfg)
                                             if t.seen], np.int32))
        self.muon = muon.Direction(cfg, kernels)
        self.pairs = cfg.N_PAIRS
        self.adapt = cfg.ADAPTIVE_NOISE_MODE != 0

    @staticmethod
    def bytes_needed(cfg):
        """Device memory of all buffers with the smallest slice."""
        w = work(cfg)
        rows = len(w.rows) if cfg.PERTURB == "weights" else 0
        return (rows * 2 * SPLIT + sum(a.nbytes for a in w[:5]) + 4 * parameters.n_weights(cfg) + cfg.N_PAIRS
                + ternary.packed_size(cfg.STEP_DIGITS) + window_bytes(cfg) + muon.Direction.bytes_needed(cfg))

    def launches(self, stream, seed, weights, moments, overlay):
        """[(kernel's name, function that enqueues it)] of an update. On the device: seed uint32 [>= 1], weights int8
        [n], moments float32 [n, 3], overlay int8."""
        tables, out = self.tables, []
        rows = np.int32(len(tables.rows))
        digits = self.fit[FIT_PAD:][:self.pairs] if self.starts else self.votes

        def add(name, grid, *args, shared=0):
            out.append((name, lambda: self.kernels[name][int(grid), THREADS, stream, shared](*args)))

        add("unpack", blocks(self.packed.size, THREADS), self.packed, digits)
        for start in map(np.int32, self.starts):
            add("operands", rows // 8 * (self.width // PIECE), tables.rows, seed, self.fit, start, np.int32(self.width),
                self.operands)
            add("products", len(tables.tiles) * (self.width // SPLIT), tables.tiles, self.operands, rows, start,
                self.votes, shared=SHARED)
        if self.starts:
            add("vector_votes", len(tables.vectors), tables.vectors, seed, self.fit, np.int32(self.pairs), self.votes)
        if "seen" in self.kernels:
            add("seen", self.pairs * len(self.seen), self.windows, self.seen, self.fit, seed, self.votes)
        out += self.muon.launches(stream, self.votes, moments)
        add("optimize", len(tables.blocks), tables.blocks, tables.tensors, self.rates, self.token_rates, self.votes,
            self.muon.x, weights, moments, self.touched, self.changed)
        if self.adapt:
            add("rescale", blocks(overlay.size, THREADS), self.touched, overlay)
        return out
