"""The output head of both models."""

from types import SimpleNamespace

from numba import cuda, int32, int64, uint32, uint64

from kernels import ptx
from kernels.host import Kernel
from kernels.parts import (A32, A64, BITS, MAGIC, SIGNS, exp_sizes, int32s, quad_sum, quad_sum64, quotient_function,
                           unrolled)
from kernels.product import (GROUPS, TALLEST, THREADS, begin_functions, begin_tile_function, joined, members_of,
                             padded_length, place_function, product_functions, wide_shape)
from kernels.rules import TARGET, device
from model import integer_tables, parameters, rules


def _sizes(cfg, gpu):
    """What lies in shared memory: the rows and the ring of the product (`shape`), from word AT_TABLES on the noise of
    two tiles for SLOTS members, from AT_PARTS on an int32 or int64 of each row and column group; and EXPS words of EXP:
    COPIES of an entry, entries STRIDE words apart. PLACED: that is 2^LOGIT bytes, so that a level is an address.
    FARTHEST: from the highest level to those of the last entry. MEMBERS: the shift from a member to its window. RAGGED:
    the last tile has columns beyond the vocabulary."""
    V = cfg.VOCAB_SIZE
    LOGIT = cfg.SHIFT_LOGIT
    PAIRED = cfg.MODEL == "gru"
    MOST, COPIES = exp_sizes(cfg)
    if PAIRED:
        MOST, COPIES = 254, 32 if gpu.shared > 128 * 1024 else 8
    # a level stays an address if noise is far from 2^31
    PLACED = (not PAIRED and 4 * COPIES <= 1 << LOGIT <= 1024 and (MOST + 1) << LOGIT <= 24 * 1024
              and cfg.NOISE_SHIFT > 1)
    STRIDE = (1 << LOGIT) // 4 if PLACED else COPIES
    EXPS = (MOST + 1) * STRIDE
    FARTHEST = (MOST << LOGIT) + (1 << LOGIT) - 1
    SLOTS = members_of(32, cfg.SEQ_LEN) if PAIRED else members_of(64, padded_length(cfg))
    TABLES, PARTS = GROUPS * 2 * SLOTS * 128, 2 * TALLEST
    shape = wide_shape(gpu.shared - 4 * (TABLES + PARTS + EXPS) - 2048, cfg.HIDDEN_DIM, V, gpu.wgmma)
    AT_TABLES = shape.bytes // 4
    AT_PARTS = AT_TABLES + TABLES
    return SimpleNamespace(
        COPIES=COPIES, PLACED=PLACED, STRIDE=STRIDE, EXPS=EXPS, FARTHEST=FARTHEST, SLOTS=SLOTS, shape=shape,
        AT_TABLES=AT_TABLES, AT_PARTS=AT_PARTS, bytes=4 * (AT_PARTS + PARTS), MEMBERS=0 if PAIRED else 1,
        RAGGED=V % (128 * shape.CG) != 0)


def _tile_functions(cfg, gpu, sizes, as_column, BASE):
    """(ZERO, logit, settled, slot_of, prepare, hide, add_weights, add_groups): device functions of a tile's noise in
    shared memory, of levels, and of the sums of the weights of a thread's two rows; and the level of 0: the BASE of
    `begin_functions`, except in the recurrent model."""
    V = cfg.VOCAB_SIZE
    PAIRED = cfg.MODEL == "gru"
    LOGIT = cfg.SHIFT_LOGIT
    ONES = (1 << LOGIT) - 1
    MEMBERS, SLOTS = sizes.MEMBERS, sizes.SLOTS
    RAGGED, PLACED = sizes.RAGGED, sizes.PLACED
    ENTRY = 4 * sizes.COPIES
    CG, AT_PARTS = sizes.shape.CG, sizes.AT_PARTS
    ZERO, quotient = (quotient_function(parameters.divisor(cfg, cfg.HIDDEN_DIM), MAGIC, BASE) if PAIRED
                      else (BASE, None))
    HIDDEN = ZERO - (1 << 29)                                # the level of columns beyond the vocabulary

    @gpu.device
    def slot_of(c):
        """Where the noise of column c lies, so that the four columns of a thread in 16 are neighbours."""
        return (c & 0x70) | ((c & 6) << 1) | ((c & 8) >> 2) | (c & 1)

    @gpu.called
    def prepare(sm, at, slot, v, member, drawn, each):
        """The noise of column v of the vocabulary for the members that this warpgroup's rows touch."""
        for m in range(SLOTS):
            n = ((member + m) >> MEMBERS) * each + (v if not RAGGED or v < V else V - 1)
            sm[at + m * 128 + slot] = as_column(drawn[n])

    @device
    def logit(a):
        """The logit of a level."""
        return int32(quotient(a) - BITS) if PAIRED else int32(int32(a - ZERO) >> LOGIT)

    @gpu.called
    def weight(top, a, last, at):
        """EXP of the distance from level a to the `settled` top."""
        if PAIRED:
            return ptx.load_shared(top - quotient(a) * ENTRY)
        below = min(uint32(top - a), uint32(last))
        if PLACED:
            return ptx.load_shared(int32(below & uint32(~ONES & 0xFFFFFFFF)) | at)
        return ptx.load_shared(int32(below >> uint32(LOGIT)) * ENTRY + at)

    @device
    def settled(top, table):
        """The highest level with the same logit, as `weight` takes it."""
        return int32((quotient(top) * ENTRY if PAIRED else top | ONES) + table)

    @gpu.device
    def hide(acc, limit):
        """Hides columns 8 j + e of this thread from `limit` on, which will count as the smallest weight. Returns how
        many."""
        hidden = 0
        if RAGGED and limit < 128:
            for j in unrolled(range(16)):
                for e in range(2):
                    if j * 8 + e >= limit:
                        acc[4 * j + e], acc[4 * j + 2 + e] = HIDDEN, HIDDEN
                        hidden += 1
        return hidden

    @gpu.device
    def add_weights(totals, partial, tops, acc, limit, hidden, last, at_exp):
        """totals += the weights of a tile's columns, of which the last `hidden` are beyond the vocabulary."""
        partial[0], partial[1] = uint32(0), uint32(0)
        for j in unrolled(range(16)):
            for e in range(2):
                for half in range(2):
                    w = weight(tops[half], acc[4 * j + 2 * half + e], last, at_exp)
                    partial[half] = uint32(partial[half] + uint32(w))
        for half in range(2):
            totals[half] += int64(partial[half])
            if RAGGED and limit < 128:
                totals[half] -= int64(hidden) * weight(tops[half], int32(HIDDEN), last, at_exp)

    @gpu.device
    def add_groups(totals, wide, row, rg, side, q):
        """totals: from those of a thread to those of a row, over all columns."""
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

    return ZERO, logit, settled, slot_of, prepare, hide, add_weights, add_groups


def _loss_functions(cfg, gpu, logit, ZERO):
    """(target_logits, store_loss), device functions: the loss of a position."""
    H = cfg.HIDDEN_DIM
    PAIRED = cfg.MODEL == "gru"
    SHIFT, TARGETS, SKIP = cfg.NOISE_SHIFT, cfg.TARGETS, cfg.STATE_TOKENS
    loss_of = rules.loss_rule(device, TARGET, cfg.LOSS == "exact")
    BIT, UNIT, UNIT_OF_DISTANCE = cfg.SOFTMAX_SCALE_BIT, integer_tables.log_unit(cfg), 256 // cfg.TARGETS

    @device
    def scored(half, unit, position):
        """Window and position of a thread's first or (half = 1) second row."""
        return unit, position if PAIRED else position + 8 * half

    @device
    def store_loss(losses, unit, odd, position, totals, best, z, count, length):
        for half in range(2):
            window, here = scored(half, unit, position)
            if window < count and here < length:
                # of several targets: their number times the largest, and the sum of theirs
                loss = loss_of(totals[half], int32(TARGETS * best[half]), z[half], BIT, UNIT, UNIT_OF_DISTANCE)
                cuda.atomic.add(losses, 2 * unit + (half if PAIRED else odd), loss)

    @gpu.called
    def target_logits(half, drawn, each, packed, at_columns, x, row, windows, width, unit, position, count, length, s,
                      q):
        """Sum of the logits of the targets of a thread's first or (half = 1) second row: of the token that follows, and
        of those drawn."""
        dots, tokens = int32s(TARGETS), int32s(TARGETS)
        window, here = scored(half, unit, position)
        first = min(window, count - 1) * width + SKIP + 1
        here = min(here, length - 1)
        for i in unrolled(range(TARGETS)):
            tokens[i] = windows[first + (here if i == 0 else length + here * (TARGETS - 1) + i - 1)]
            dots[i] = 0
        at_x = int64(row + 8 * half >> 3) * (2 * H) + (row & 7) * 4 + q
        for piece in range(H // 32):
            a, b = x[uint64(at_x + piece * 64)], x[uint64(at_x + piece * 64 + 32)]
            for i in unrolled(range(TARGETS)):
                w = ptx.load2(packed, at_columns + int64(tokens[i]) * (H // 4) + piece * 8 + q * 2)
                dots[i] = ptx.dp4a(w[1] ^ SIGNS, b, ptx.dp4a(w[0] ^ SIGNS, a, dots[i]))
        z = int32(0)
        for i in unrolled(range(TARGETS)):
            n = int32(int32(s[half] * drawn[unit * each + tokens[i]]) >> SHIFT)
            z = int32(z + logit(int32(quad_sum(dots[i]) + n + ZERO)))
        return z

    return target_logits, store_loss


def head_kernel(cfg, gpu):
    """The output head of both models: no logit reaches memory; tiles of the vocabulary pass by twice, for the row
    maxima and for the sums. Adds each position's loss to losses int64 [pairs, 2]. Launch [tiles of 64 RG rows], 512
    threads. drawn: the columns; at_tiles, at_columns: words packed for the product, and as ROWS for the targets;
    length: positions of a window.

    In the recurrent model (PAIRED) a thread's rows are the members of a pair, or twice a window, at one position, as in
    kernels.gru; and a logit is a quotient, clipped: what the transformer has as levels, logit bits to the left, are
    quotients there, times the distance of two entries of EXP.

    The columns of the embedding are not permuted, as in generation, but the noise of a tile is: see
    `slot_of`."""
    PAIRED = cfg.MODEL == "gru"
    V = cfg.VOCAB_SIZE
    LENGTH = padded_length(cfg)
    sizes = _sizes(cfg, gpu)
    COPIES, STRIDE, EXPS = sizes.COPIES, sizes.STRIDE, sizes.EXPS
    PLACED, FARTHEST = sizes.PLACED, sizes.FARTHEST
    SLOTS, MEMBERS = sizes.SLOTS, sizes.MEMBERS
    AT_TABLES, AT_PARTS = sizes.AT_TABLES, sizes.AT_PARTS
    shape = sizes.shape
    CG, TILES = shape.CG, shape.passes
    STEPS, APART = 2 * shape.steps, shape.apart
    place_of = place_function(cfg, shape.RG, PAIRED)
    open_ring, wait_rows, multiply, finish = product_functions(gpu, shape, 2)
    as_row, as_column, begin, BASE = begin_functions(cfg, cfg.HIDDEN_DIM)
    ZERO, logit, settled, slot_of, prepare, hide, add_weights, add_groups = _tile_functions(
        cfg, gpu, sizes, as_column, BASE)
    begin_tile = begin_tile_function(gpu, begin, ZERO)
    target_logits, store_loss = _loss_functions(cfg, gpu, logit, ZERO)

    @cuda.jit(launch_bounds=THREADS)
    @gpu.unroll
    def head(drawn: A32, each, packed: A32, at_tiles, at_columns, windows: A32, width, count, exps: A32, x: A32,
             sb: A32, losses: A64, length):
        sm, wide = cuda.shared.array(0, int32, 128), cuda.shared.array(0, int64, 128)
        exp = cuda.shared.array(EXPS, int32, 1024)           # [entry][copy, and a gap where PLACED]
        tile = cuda.blockIdx.x
        ring = open_ring(STEPS, tile, 1, x, packed, at_tiles)
        t, base = ring.t, ring.base
        group = t >> 7
        lane = t & 31
        c = t & 127
        q = lane & 3
        side = group % CG
        rg = group // CG
        for i in range(t, EXPS, THREADS):
            exp[i] = exps[i // STRIDE]
        cuda.syncthreads()                                   # the table is whole
        row, member, slot, sign = place_of(tile, t, length)
        unit = (member + slot) >> MEMBERS
        position = (row >> 4) * 8 + (row & 7) - unit * length if PAIRED else row % LENGTH
        at_exp, table = int32((lane & (COPIES - 1)) * 4), ptx.shared_address(exp, 0)
        if not PLACED:
            at_exp, table = int32(at_exp + table), int32(0)
        if PAIRED:
            table = at_exp
        acc = int32s(64)
        totals = cuda.local.array(2, int64)
        partial = cuda.local.array(2, uint32)
        s, z = int32s(2), int32s(2)
        tops, best = int32s(2), int32s(2)
        for half in range(2):
            tops[half], totals[half] = -2 ** 31, 0
            s[half] = int32(sb[uint64(row + 8 * half)] * (-sign if PAIRED and half == 1 else sign))
        # a loop over this much would not be unrolled
        z[0] = target_logits(0, drawn, each, packed, at_columns, x, row, windows, width, unit, position, count, length,
                             s, q)
        z[1] = target_logits(1, drawn, each, packed, at_columns, x, row, windows, width, unit, position, count, length,
                             s, q)
        s[0], s[1] = as_row(s[0]), as_row(s[1])
        here = AT_TABLES + group * (2 * SLOTS * 128)
        my_slot = slot_of(c)
        last = int32(table + FARTHEST)
        at_noise = base + 4 * (here + slot * 128) + q * 16
        prepare(sm, here, my_slot, side * 128 + c, member, drawn, each)
        ptx.named_barrier(1 + group, 128)
        begin_tile(acc, at_noise, s)
        wait_rows(ring, 0)
        step = int32(side * APART)
        for ahead in range(2 * TILES):
            block = ahead if ahead < TILES else ahead - TILES
            odd = ahead & 1
            step = multiply(acc, ring, step)
            coming = block + 1 if block + 1 < TILES else 0   # while the tensor cores work: the noise of the next tile
            prepare(sm, here + (1 - odd) * (SLOTS * 128), my_slot, (coming * CG + side) * 128 + c, member, drawn,
                    each)
            ptx.named_barrier(1 + group, 128)
            step = finish(acc, ring, step, False, False, 0, 0)
            limit = V - (block * CG + side) * 128 - q * 2    # of the columns 8 j + e of this thread
            hidden = hide(acc, limit)
            if ahead < TILES:
                for j in unrolled(range(16)):
                    for half in range(2):
                        tops[half] = max(max(tops[half], acc[4 * j + 2 * half]), acc[4 * j + 2 * half + 1])
                if ahead == TILES - 1:                       # from here on: the highest level with the same logit
                    joined(tops, sm, AT_PARTS + (rg * 64 + (row & 63)) * CG, CG, side, q, 5 + rg)
                    if CG > 1:                               # the sums will take this place
                        ptx.named_barrier(5 + rg, CG * 128)
                    for half in range(2):
                        best[half], tops[half] = logit(tops[half]), settled(tops[half], table)
            else:
                add_weights(totals, partial, tops, acc, limit, hidden, last, at_exp)
            begin_tile(acc, at_noise + (1 - odd) * (SLOTS * 512), s)
        add_groups(totals, wide, row, rg, side, q)
        if q == 0 and side == 0:
            store_loss(losses, unit, (member + slot) & 1, position, totals, best, z, count, length)

    return Kernel(head, sizes.bytes, shape)
