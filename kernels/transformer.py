"""The kernels of the transformer except those of kernels.attention and kernels.head, its plan, and its scratch memory.

Rows        A member's T positions are padded to a multiple of 16, so that the 16 rows of a warp belong to one member; a
            pair is two members, one after the other. Activations are core matrices (ptx) of int8.
Packing     See kernels.product. The 4 H units of an MLP lie in blocks of 128, units i + sub * H of 32 neighbouring i,
            so that the four units which share a running integer (SPEC 4) lie in one thread.
Epilogues   Noise of the columns is fetched while the tensor cores work. The accumulators of the up projection and of
            the head begin with it. Products of full width keep a row's amax in the block; where the row is wider than
            512 columns, sums of earlier passes wait in scratch memory of the block.
"""

import functools
from types import SimpleNamespace

from numba import cuda, float32, int32, int64, uint32, uint64

from kernels import host, noise, ptx
from kernels.attention import attention_kernel, value_length
from kernels.head import head_kernel
from kernels.host import DOWN, PLAIN, QUADS, ROWS, UP, Kernel
from kernels.noise import factor_function, input_words
from kernels.parts import (A32, A64, A8, across, amax_scale, blocks, byte, clip, int32s, pack4, pack_bytes, pack_quad,
                           pack_rounded, quad_sum, rounded, unroll, unrolled)
from kernels.product import (GROUPS, TALLEST, THREADS, accumulator_of, begin_functions, begin_tile_function, full_shape,
                             joined, members_of, padded_length, place_function, product_functions, wide_shape)
from kernels.rules import build_noise, byte_of, device, divide, loudest, ntt_functions
from model import parameters

MOST_BLOCKS = 256                           # of a persistent kernel


# --- embedding and norm -----------------------------------------------------------------------------------------------

def _embed_kernel(cfg, nz, gpu):
    """h = clip(embedding look-up + bias) of both members, and zero losses. Launch [pairs, LENGTH / 16], 64 threads;
    four lanes a position. at_table: word of the packed embedding; width: tokens of a pair's window. drawn: the bias;
    inputs of the hidden side and of the tokens; of each table of NTT_MODE inputs of its bytes and of the hidden side.
    """
    H = cfg.HIDDEN_DIM
    T = cfg.SEQ_LEN
    LENGTH = padded_length(cfg)
    SHIFT = cfg.NOISE_SHIFT
    NTT = cfg.NTT_MODE != 0
    table_term, factor = nz.table_term, factor_function(cfg)
    coefficient, place = ntt_functions(cfg, cfg.NTT_CAUSAL)
    POSITIONS, TOKENS, BYTES = min(LENGTH, 64), blocks(cfg.VOCAB_SIZE, 4) * 4, 256
    # words of the call
    AT_TOKENS, AT_HIDDEN = 2 * H + input_words(cfg, H), input_words(cfg, BYTES)
    AT_NTT, EACH = AT_TOKENS + input_words(cfg, TOKENS), AT_HIDDEN + input_words(cfg, H)

    @device
    def look_up(weights, drawn, at, c, i):
        """What the tables of NTT_MODE, whose noise begins at drawn[at], add to hidden unit i of both members."""
        even, odd = int32(0), int32(0)
        for k in range(3):
            a, b = at + k * EACH + byte_of(k, c), at + k * EACH + AT_HIDDEN + i
            d = table_term(drawn[a], factor(drawn, a + BYTES), drawn[b], factor(drawn, b + H))
            w = int32(weights[place(k, c, i)])
            even = int32(even + (int32(w + (d >> SHIFT)) >> 2))
            odd = int32(odd + (int32(w + (int32(-d) >> SHIFT)) >> 2))
        return even, odd

    @cuda.jit(launch_bounds=256)
    @gpu.unroll
    def embed(drawn: A32, each, at_table, weights: A8, packed: A32, windows: A32, width, h: A32, losses: A64):
        t, unit = cuda.threadIdx.x, cuda.blockIdx.x
        first = unit * each
        if t < 2 and cuda.blockIdx.y == 0:
            losses[2 * unit + t] = 0
        lane, position = t & 31, cuda.blockIdx.y * POSITIONS + (t >> 2)
        if position < LENGTH:
            q, here = lane & 3, min(position, T - 1)
            token = windows[unit * width + here]
            coef = coefficient(windows, unit * width, here) if NTT else int32(0)
            n, f = drawn[first + AT_TOKENS + token], factor(drawn, first + AT_TOKENS + TOKENS + token)
            at = at_table + (token >> 3) * (2 * H) + (token & 7) * 4 + q
            at_h = (int64(unit) * (2 * LENGTH) + position >> 3) * (2 * H) + lane
            x = int32s(8)
            for piece in range(H // 16):
                word, here = packed[uint64(at + piece * 32)], first + piece * 16 + q * 4
                even, odd, c = ptx.load4(drawn, here), ptx.load4(drawn, here + H), ptx.load4(drawn, here + 2 * H)
                for k in range(4):
                    d = table_term(n, f, c[k], factor(drawn, here + 3 * H + k))
                    e = byte(word, k)
                    ntt_even = int32(0)
                    ntt_odd = int32(0)
                    if NTT:
                        ntt_even, ntt_odd = look_up(weights, drawn, first + AT_NTT, coef, piece * 16 + q * 4 + k)
                    x[k] = clip(int32(e + (d >> SHIFT) + even[k] + ntt_even))
                    x[4 + k] = clip(int32(e + (int32(-d) >> SHIFT) + odd[k] + ntt_odd))
                h[uint64(at_h + piece * 32)] = pack_bytes(x, 0)
                h[uint64(at_h + piece * 32 + LENGTH * (H // 4))] = pack_bytes(x, 4)

    return Kernel(embed)


def _norm_kernel(cfg, nz, gpu, streams):
    """out = ln(h), its sums sb with `streams` input noises, and zeros for those of the down projection. Launch [pairs,
    2 LENGTH / 128], 256 threads; a warp has 16 rows, four lanes two of them.
    drawn: the norm, its bias, inputs of the streams; sb: [4][stride]."""
    H = cfg.HIDDEN_DIM
    MODE = cfg.ADAPTIVE_NOISE_MODE
    LENGTH = padded_length(cfg)
    # then 2^-21 of |p| changes no quotient
    FLOAT = MODE < 2 and 127 * (128 + (loudest(cfg) ** 2 >> cfg.SIGMA_SHIFT_VECTOR)) < 1 << 20
    INPUTS, WORDS = input_words(cfg, H), 4 * H + streams * input_words(cfg, H)
    WHOLE, PACKED = 4 * H + (INPUTS - 4), streams * H // 4
    ONE = 6 if MODE == 1 else 0                              # bits of a factor in an input_coefficient
    input_term = nz.input_term

    @gpu.device
    def shared_bias(b):
        """A bias as `normed` wants it."""
        return ptx.float_bits(float32(int32(b + 127)) * float32(1 / 254)) if FLOAT else b

    @gpu.device
    def normed(p, mean, reciprocal, b):
        """clip(p / mean toward zero + bias) in the low byte. As floats: 2^23 with the sign of p, whose neighbours are
        whole numbers, takes the quotient, rounded toward zero; then what is cut to [0, 1] stands for -127 to 127."""
        if FLOAT:
            f = float32(p)
            whole = ptx.with_sign(1 << 23, f)
            quotient = ptx.fma_toward_zero(f, reciprocal, whole) - whole
            share = ptx.fma_sat(quotient, 1 / 254, ptx.bits_float(b))
            return ptx.float_bits(cuda.fma(share, float32(254), float32(12582912 - 127)))
        return clip(int32(divide(p, mean) + b))

    @cuda.jit(launch_bounds=256)
    @gpu.unroll
    def norm(drawn: A32, each, stride, h: A32, out: A32, sb: A32):
        table = cuda.shared.array(WORDS, int32)              # ln even, odd, bias even, odd, inputs of the streams
        packed_noise = cuda.shared.array(PACKED, int32)      # [stream][H / 4], where all factors are 1
        t = cuda.threadIdx.x
        unit = cuda.blockIdx.x
        for i in range(t, WORDS, 256):
            word = drawn[unit * each + i]
            table[i] = shared_bias(word) if 2 * H <= i < 4 * H else word
        cuda.syncthreads()                                   # the table is whole
        whole = int32(1)
        for s in range(streams):
            whole = int32(whole & table[WHOLE + s * INPUTS])
            for i in range(t, H // 4, 256):
                c = ptx.load_shared4(ptx.shared_address(table, 4 * H + s * INPUTS + 4 * i))
                packed_noise[s * (H // 4) + i] = pack4(c[0] >> ONE, c[1] >> ONE, c[2] >> ONE, c[3] >> ONE)
        whole = cuda.syncthreads_and(whole)                  # then sb is a plain sum of products
        lane, warp = t & 31, cuda.blockIdx.y * 128 + (t >> 5) * 16
        if warp < 2 * LENGTH:
            member, row = warp // LENGTH, int64(unit) * (2 * LENGTH) + warp + (lane >> 2)
            at = (row >> 3) * (2 * H) + lane
            x = int32s(4)
            sums = int32s(6)
            totals = int32s(2)
            means, reciprocals = int32s(2), cuda.local.array(2, float32)
            for i in unrolled(range(6)):
                sums[i] = 0
            totals[0], totals[1] = 0, 0
            for piece in range(H // 16):
                for half in range(2):                        # the sum of |bytes|
                    word = h[uint64(at + half * (2 * H) + piece * 32)]
                    negative = ptx.byte_permute(word, 0, 0xBA98)
                    totals[half] = ptx.dp4a(negative, -1, ptx.dp4a(word ^ negative, 0x01010101, totals[half]))
            for half in range(2):
                means[half] = int32(max(int32(uint32(quad_sum(totals[half])) // uint32(H)), int32(1)))
                # so that a quotient is never below the whole number that it is
                reciprocals[half] = float32(1 + 2.0 ** -22) / float32(means[half])
            address = ptx.shared_address(table, (lane & 3) * 4)
            at_w = address + member * (4 * H)
            for piece in range(H // 16):
                w, b = ptx.load_shared4(at_w + piece * 64), ptx.load_shared4(at_w + 8 * H + piece * 64)
                for half in range(2):
                    word = h[uint64(at + half * (2 * H) + piece * 32)]
                    for k in range(4):
                        x[k] = normed(int32(byte(word, k) * w[k]), means[half], reciprocals[half], b[k])
                    word = pack_bytes(x, 0)
                    out[uint64(at + half * (2 * H) + piece * 32)] = word
                    if whole:
                        for s in range(streams):
                            c4 = packed_noise[uint32(s * (H // 4) + piece * 4 + (lane & 3))]
                            sums[3 * half + s] = ptx.dp4a(word, c4, sums[3 * half + s])
                    else:
                        for s in range(streams):
                            c = ptx.load_shared4(address + (4 * H + s * INPUTS) * 4 + piece * 64)
                            for k in range(4):
                                f = float32(0)
                                if MODE == 2:
                                    f = ptx.bits_float(table[5 * H + s * INPUTS + piece * 16 + (lane & 3) * 4 + k])
                                sums[3 * half + s] += input_term(byte(word, k), c[k], f)
            for half in range(2):
                for s in range(streams):
                    total = quad_sum(sums[3 * half + s])
                    if (lane & 3) == 0:
                        sb[s * stride + row + half * 8] = total
                if (lane & 3) == 0:
                    sb[3 * stride + row + half * 8] = 0

    return Kernel(norm)


# --- up: GELU of a product that is wider than the rows ----------------------------------------------------------------

# words of a member's tables of _up_kernel: noise, bias; noise of the input side of the down projection as bytes, as
# coefficients; their factors
UP_BIAS = 128
UP_BYTES = 256
UP_COEFFICIENT = 288
UP_FACTOR = 416
UP_TABLE = (288, 416, 544)                  # of all, by ADAPTIVE_NOISE_MODE


def _up_shape(gpu, H, tables):
    """(Shape of the up projection beside `tables` words of tables, copies of GELU: a look-up by 32 lanes then has no
    bank conflicts, or few)."""
    for copies in 32, 8, 4:
        shape = wide_shape(gpu.shared - 4 * (tables + 257 * copies) - 1024, H, 4 * H, gpu.wgmma)
        if shape and (shape.resident or not shape.stream and shape.stages * shape.KP * (1 + shape.turns) >= H):
            break
    return shape, copies


def _unit_functions(cfg, nz, gpu, COPIES, BASE):
    """Device functions of hidden units: unit_address, where GELU of one lies, among COPIES copies of the table from
    `at` on; folded, which sums for the down projection where its noise is not whole."""
    SHIFT = cfg.SHIFT_MLP_UP
    MODE = cfg.ADAPTIVE_NOISE_MODE
    # to [0, 1] from 1.5 * 2^23 +- 128 << SHIFT
    UNIT, MIDDLE = 2.0 ** -(SHIFT + 8), 0.5 - 1.5 * 2.0 ** (15 - SHIFT)
    # + i / 64 has the bits 0x48000000 + i, and 128 times that is 128 i
    INDEX = 1 << 17
    LESS = 0 if COPIES == 32 else 0x48000000
    input_fold = nz.input_fold

    @gpu.called
    def unit_address(a, bias, at):
        if BASE:
            share = ptx.fma_sat(ptx.bits_float(a), UNIT, MIDDLE)
            return int32(int32(int32(ptx.float_bits(ptx.fma_down(share, 4, INDEX)) - int32(LESS))
                               * int32(4 * COPIES)) + at)
        return int32(min(max(int32((a >> SHIFT) + bias), int32(0)), int32(256)) * (4 * COPIES) + at)

    @device
    @(unroll if MODE == 2 else gpu.unroll)            # no compiler unrolls the loops of mode 2
    def folded(acc, sm, at_words, at, sums):
        """Adds to sums what the hidden units in acc, in two rows, add to sb."""
        pb = int32s(8)
        for g in unrolled(range(2)):                                   # 16 neighbouring i
            for k in range(8):
                pb[k] = 0
            for sub in unrolled(range(4)):
                j = 2 * sub + g
                c = ptx.load_shared4(at + 4 * UP_COEFFICIENT + j * 64)
                for k in range(4):
                    f = ptx.bits_float(sm[at_words + UP_FACTOR + j * 16 + k]) if MODE == 2 else float32(0)
                    for half in range(2):
                        i = accumulator_of(j, half, k)
                        pb[4 * half + k] = input_fold(pb[4 * half + k], acc[i], c[k], f)
            for k in range(8):
                sums[k >> 2] += pb[k]

    return unit_address, folded


def _up_tables(cfg, gpu, shape, as_column, BASE):
    """Device function that fills the tables of a warpgroup. as_column, BASE: see begin_functions."""
    H = cfg.HIDDEN_DIM
    SHIFT = cfg.SHIFT_MLP_UP
    MODE = cfg.ADAPTIVE_NOISE_MODE
    BLOCKS, SLOTS = H // 32, members_of(64, padded_length(cfg))
    RAGGED = shape.columns != 4 * H
    TABLE = UP_TABLE[MODE]
    ONE = 6 if MODE == 1 else 0

    @gpu.called
    def prepare(sm, at, c, block, member, drawn, each):
        """Tables, from word `at` on, of the members that this warpgroup's rows touch, for hidden unit c of a block."""
        i = (c >> 5) * H + (min(block, BLOCKS - 1) if RAGGED else block) * 32 + (c & 31)
        for slot in range(SLOTS):
            first, to = ((member + slot) >> 1) * each + i, at + slot * TABLE + c
            sm[to] = as_column(drawn[first])
            bias = drawn[first + 4 * H + ((member + slot) & 1) * (4 * H)]
            sm[to + UP_BIAS] = (bias << SHIFT) + BASE if BASE else bias + 128
            # both forms: a branch here would make the products wait for each other
            coefficient = drawn[first + 12 * H]
            if MODE < 2:
                word = pack_quad(coefficient >> ONE)
                if c & 3 == 0:
                    sm[at + slot * TABLE + UP_BYTES + (c >> 2)] = word
            if MODE > 0:
                sm[to + UP_COEFFICIENT] = coefficient
                if MODE == 2:
                    sm[to + UP_FACTOR] = drawn[first + 16 * H]

    return prepare


def _up_kernel(cfg, nz, gpu, KP):
    """u = GELU[clip((up(n) >> SHIFT_MLP_UP) + bias)], hidden units in blocks of 128, and their sums sb for the down
    projection.

    Launch [blocks] of 512 threads; a block takes every gridDim-th tile of 64 RG rows. The sums are added to sb[3 *
    stride + row].
    u: [64 rows][pieces of KP hidden units][core matrices], as the down projection takes it.
    drawn: the columns, the bias, the inputs of the down projection."""
    H = cfg.HIDDEN_DIM
    MODE = cfg.ADAPTIVE_NOISE_MODE
    BLOCKS, SLOTS = H // 32, members_of(64, padded_length(cfg))
    TABLE = UP_TABLE[MODE]
    TABLES = GROUPS * 2 * SLOTS * TABLE
    shape, COPIES = _up_shape(gpu, H, TABLES)
    GELUS = 257 * COPIES
    CG = shape.CG
    PASSES = shape.passes
    STEPS, APART = shape.steps, shape.apart
    RAGGED, AT_GELU = PASSES * CG != BLOCKS, shape.bytes // 4
    AT_TABLES = AT_GELU + GELUS
    # blocks and words of a piece or a block; 16 columns
    PIECE = max(KP // 128, 1)
    WORDS = 16 * max(KP, 128)
    STEP = KP // 16
    place_of = place_function(cfg, shape.RG)
    open_ring, wait_rows, multiply, finish = product_functions(gpu, shape)
    AT_WHOLE = 12 * H + input_words(cfg, 4 * H) - 4
    as_row, as_column, begin, BASE = begin_functions(
        cfg, H, 256 + (loudest(cfg) ** 2 >> cfg.SIGMA_SHIFT_VECTOR) << cfg.SHIFT_MLP_UP)
    begin_tile = begin_tile_function(gpu, begin, 0, 4 * UP_BIAS if BASE else 0)
    prepare = _up_tables(cfg, gpu, shape, as_column, BASE)
    unit_address, folded = _unit_functions(cfg, nz, gpu, COPIES, BASE)

    @cuda.jit(launch_bounds=THREADS)
    @gpu.unroll
    def up(drawn: A32, each, packed: A32, at, tiles, stride, gelu: A8, x: A32, sb: A32, u: A32):
        sm = cuda.shared.array(0, int32, 128)
        first, every = cuda.blockIdx.x, cuda.gridDim.x
        count = (tiles - 1 - first) // every + 1
        ring = open_ring(count * STEPS, first, every, x, packed, at)
        t, base = ring.t, ring.base
        group = t >> 7
        lane = t & 31
        c = t & 127
        q, side = lane & 3, group % CG
        for i in range(t, GELUS, THREADS):                   # [x + 128][copy]
            sm[AT_GELU + i] = gelu[(min(max(i // COPIES, 1), 255) - 128) & 255]
        whole = cuda.syncthreads_and(drawn[AT_WHOLE])        # then sb is a plain sum of products
        at_lane = int32(base + 4 * AT_GELU + (lane & (COPIES - 1)) * 4)
        here = AT_TABLES + group * (2 * SLOTS * TABLE)
        acc = int32s(64)
        s = int32s(2)
        sums = int32s(2)
        row, member, slot, sign = place_of(first, t, 0)
        prepare(sm, here, c, side, member, drawn, each)
        for half in range(2):
            s[half] = as_row(int32(sb[uint64(row + 8 * half)] * sign))
        ptx.named_barrier(1 + group, 128)
        begin_tile(acc, base + 4 * (here + slot * TABLE) + q * 16, s)
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
                    row, member, slot, sign = place_of(tile + every, t, 0)
                prepare(sm, here + (1 - odd) * (SLOTS * TABLE), c, side if last else block + CG, member, drawn, each)
                if last:
                    for half in range(2):
                        s[half] = as_row(int32(sb[uint64(row + 8 * half)] * sign))
                ptx.named_barrier(1 + group, 128)
                step = finish(acc, ring, step, last, turn + 1 < count, turn, tile + every)
                at_bytes = base + 4 * at_slot + q * 16
                if not RAGGED or block < BLOCKS:
                    for j in unrolled(range(8)):
                        if not BASE:
                            b = ptx.load_shared4(at_bytes + j * 64 + 4 * UP_BIAS)
                        c4 = int32(0)
                        if whole:
                            c4 = sm[uint32(at_slot + UP_BYTES + 4 * j + q)]
                        for half in range(2):
                            for k in range(4):
                                i = accumulator_of(j, half, k)
                                acc[i] = ptx.load_shared(unit_address(acc[i], int32(0) if BASE else b[k], at_lane))
                            i = 8 * j + half * 2
                            word = pack4(acc[i], acc[i + 1], acc[i + 4], acc[i + 5])
                            u[uint64(to + half * (2 * KP) + j // STEP * (16 * KP) + j % STEP * 32)] = word
                            sums[half] = ptx.dp4a(word, c4, sums[half])
                    if MODE > 0 and not whole:
                        folded(acc, sm, at_slot + q * 4, at_bytes, sums)
                if last:
                    for half in range(2):
                        total = quad_sum(sums[half])
                        if q == 0:
                            cuda.atomic.add(sb, 3 * stride + mine + 8 * half, total)
                ptx.named_barrier(1 + group, 128)            # the tables just read are the next to be overwritten
                odd = 1 - odd
                begin_tile(acc, base + 4 * (here + (odd * SLOTS + slot) * TABLE) + q * 16, s)

    return Kernel(up, 4 * (AT_TABLES + TABLES), shape)


# --- products of full width -------------------------------------------------------------------------------------------

def turned_function(cfg):
    """Device function: two neighbours in a head, turned by an angle."""
    BIT = cfg.ROPE_SCALE_BIT

    @device
    def turned(e, o, cos, sin):
        half, less = int64(1) << int64(BIT - 1), int32(-sin)
        return (int32(ptx.mad_wide(o, less, ptx.mad_wide(e, cos, half)) >> int64(BIT)),
                int32(ptx.mad_wide(o, cos, ptx.mad_wide(e, sin, half)) >> int64(BIT)))
    return turned


def _sum_functions(cfg, gpu, shape, kind, TABLE):
    """Device functions before amax: prepare fills the tables of a warpgroup, TABLE words of a member's: the noise of N
    columns and, for the down projection, their bias. On the accumulators of two rows: add_all(acc, s, at_noise, h, to,
    col) adds the noise and, as `kind` has them, h and the bias; rotate(acc, rope, row, col, q) turns q or k;
    extremes(acc, most, least); quantised(acc, scales)."""
    H = cfg.HIDDEN_DIM
    D = cfg.HEAD_DIM
    T = cfg.SEQ_LEN
    QKV, DOWN = kind == "qkv", kind == "down"
    SHIFT, NOISE_SHIFT = cfg.SHIFT_MLP_DOWN if DOWN else cfg.SHIFT_OUT, cfg.NOISE_SHIFT
    LENGTH = padded_length(cfg)
    SLOTS = members_of(64, LENGTH)
    N = shape.N
    RAGGED = shape.columns != H
    turned = turned_function(cfg)

    @gpu.device
    def prepare(sm, at, c, columns, member, drawn, first, each):
        """Tables, from word `at` on, of the members that this warpgroup's rows touch, for its column c from `columns`
        on. Without a branch, which would make the products wait for each other: what lies beyond the columns is not
        used."""
        i = min(columns + min(c, N - 1), H - 1)
        for slot in range(SLOTS):
            here, to = first + ((member + slot) >> 1) * each + i, at + slot * TABLE + c
            sm[to] = drawn[here]
            if DOWN:
                sm[to + 128] = drawn[here + H + ((member + slot) & 1) * H]

    @device
    def add_all(acc, s, at_noise, h, to, col):
        for j in range(N // 16):
            if not RAGGED or col + 16 * j < H:
                n = ptx.load_shared4(at_noise + j * 64)
                if DOWN:
                    b = ptx.load_shared4(at_noise + 512 + j * 64)
                for half in range(2):
                    word = int32(0) if QKV else h[uint64(to + (col >> 4) * 32 + j * 32 + half * (2 * H))]
                    for k in range(4):
                        i = accumulator_of(j, half, k)
                        v = int32(acc[i] + (int32(s[half] * n[k]) >> NOISE_SHIFT))
                        if not QKV:
                            v = int32((v >> SHIFT) + byte(word, k))
                        if DOWN:
                            v = int32(v + b[k])
                        acc[i] = v

    @device
    def rotate(acc, rope, row, col, q):
        for j in range(N // 16):
            for half in range(2):
                i, position = 8 * j + 2 * half, min(row % LENGTH + 8 * half, T - 1)
                r = ptx.load4(rope, int64(position * D + ((col + j * 16 + q * 4) & (D - 1))))
                acc[i], acc[i + 1] = turned(acc[i], acc[i + 1], r[0], r[1])
                acc[i + 4], acc[i + 5] = turned(acc[i + 4], acc[i + 5], r[2], r[3])

    @gpu.device
    def extremes(acc, most, least):
        """The largest and smallest values so far of the two rows."""
        for j in unrolled(range(N // 8)):
            for half in range(2):
                a, b = acc[4 * j + 2 * half], acc[4 * j + 2 * half + 1]
                most[half], least[half] = max(max(most[half], a), b), min(min(least[half], a), b)

    @gpu.device
    def quantised(acc, scales):
        for i in unrolled(range(N // 2)):
            acc[i] = rounded(acc[i], scales[(i >> 1) & 1])

    return prepare, add_all, rotate, extremes, quantised


def _store_functions(cfg, gpu, shape):
    """Device functions of quantised accumulators of two rows: store(acc, out, to, col) writes core matrices of rows,
    store_transposed(acc, out, row, col, lane) those of v."""
    H = cfg.HIDDEN_DIM
    LENGTH = padded_length(cfg)
    POSITIONS = value_length(cfg)
    N = shape.N
    RAGGED = shape.columns != H

    @gpu.device
    def store(acc, out, to, col):
        for j in unrolled(range(N // 16)):
            if not RAGGED or col + 16 * j < H:
                for half in range(2):
                    i = 8 * j + 2 * half
                    word = pack_rounded(acc[i], acc[i + 1], acc[i + 4], acc[i + 5])
                    out[uint64(to + (col >> 4) * 32 + j * 32 + half * (2 * H))] = word

    @gpu.device
    def store_transposed(acc, out, row, col, lane):
        """Rows g, g ^ 1 and the two 8 further are neighbouring bytes."""
        odd, q = (lane >> 2) & 1, lane & 3
        first = row - (lane >> 2)
        member, position = first // LENGTH, first % LENGTH
        for j in unrolled(range(N // 16)):
            if not RAGGED or col + 16 * j < H:
                i = 8 * j
                left = pack_rounded(acc[i], acc[i + 2], acc[i + 1], acc[i + 3])
                right = pack_rounded(acc[i + 4], acc[i + 6], acc[i + 5], acc[i + 7])
                other = across(left if odd else right, 4)
                even_row, odd_row = (other, right) if odd else (left, other)
                i = col + j * 16 + odd * 8 + q * 2
                to = (int64(member) * (H * POSITIONS) + (i >> 3) * (8 * POSITIONS) + (i & 7) * 16 + (position >> 4)
                      * 128 + ((lane >> 3) & 3) * 4) >> 2
                out[uint64(to)] = ptx.byte_permute(even_row, odd_row, 0x5140)
                out[uint64(to + 4)] = ptx.byte_permute(even_row, odd_row, 0x7362)

    return store, store_transposed


def _full_width_kernel(cfg, gpu, kind):
    """Products of full width, so that a row's amax needs nothing outside the block. Launch [blocks] of 512 threads; a
    block takes every gridDim-th tile of 64 RG rows ("qkv": every gridDim / 3-th, of matrix blockIdx % 3).

    kind "qkv": q, k, v = amax of the product, q and k rotated first; q, k as core matrices, in h, k after q; v
    transposed: core matrices of one row a channel (permuted as the columns are), positions permuted within 32 as the
    weights' mma fragments hold them.
    "o", "down": h = amax(h + (product >> shift) + bias), without a bias in "o".
    drawn: the columns of each matrix; of "down" then the bias. sb: [4][stride]; spill: as in `layout`."""
    H = cfg.HIDDEN_DIM
    QKV, DOWN = kind == "qkv", kind == "down"
    K = 4 * H if DOWN else H
    MATRICES = 3 if QKV else 1
    SLOTS = members_of(64, padded_length(cfg))
    TABLE = 256 if DOWN else 128                             # words of a member's tables for 128 columns: noise, bias
    TABLES, TOPS = 2 * GROUPS * SLOTS * TABLE, 2 * TALLEST   # words; TOPS: of this tile and of the next
    shape = full_shape(gpu.shared - 4 * (TABLES + TOPS) - 1024, K, H, turns=gpu.wgmma)
    CG = shape.CG
    N = shape.N
    PASSES = shape.passes
    RG = shape.RG
    STEPS, APART = shape.steps, shape.apart
    ACC = N // 2
    AT_TABLES, place_of = shape.bytes // 4, place_function(cfg, RG)
    AT_TOPS = AT_TABLES + TABLES
    MATRIX_WORDS, SB_AT = shape.columns * K // 4, 3 if DOWN else 0
    open_ring, wait_rows, multiply, finish = product_functions(gpu, shape, fresh=True)
    prepare, add_all, rotate, extremes, quantised = _sum_functions(cfg, gpu, shape, kind, TABLE)
    store, store_transposed = _store_functions(cfg, gpu, shape)

    # not gpu.unroll: every compiler unrolls the loops here, and unrolled before they take twice as long to compile
    @cuda.jit(launch_bounds=THREADS)
    def full_width_product(drawn: A32, each, packed: A32, at, tiles, stride, rope: A32, x: A32, sb: A32, h: A32,
                           values: A32, spill: A32):
        sm = cuda.shared.array(0, int32, 128)
        matrix = cuda.blockIdx.x % MATRICES
        first = cuda.blockIdx.x // MATRICES
        every = cuda.gridDim.x // MATRICES
        count = 0
        if first < tiles:
            count = (tiles - 1 - first) // every + 1
        ring = open_ring(count * STEPS, first, every, x, packed, at + matrix * MATRIX_WORDS)
        t, base = ring.t, ring.base
        group = t >> 7
        lane = t & 31
        c = t & 127
        q = lane & 3
        side = group % CG
        rg = group // CG
        acc = int32s(ACC)
        s = int32s(2)
        scales = cuda.local.array(2, float32)
        most, least = int32s(2), int32s(2)
        for i in range(ACC):
            acc[i] = 0
        at_spill = int64(cuda.blockIdx.x) * ((PASSES - 1) * ACC * THREADS) + t * 4
        step = int32(side * APART)
        for turn in range(count):
            tile = first + turn * every
            row, member, slot, sign = place_of(tile, t, 0)
            for half in range(2):
                s[half] = int32(sb[uint64((SB_AT + matrix) * stride + row + 8 * half)] * sign)
                most[half], least[half] = 0, 0
            to = int64(matrix * stride + row >> 3) * (2 * H) + lane
            wait_rows(ring, turn)
            for ahead in range(PASSES):
                col = ahead * (CG * N) + side * N
                buffer = AT_TABLES + (2 * group + ((turn * PASSES + ahead) & 1)) * (SLOTS * TABLE)
                step = multiply(acc, ring, step)
                prepare(sm, buffer, c, col, member, drawn, matrix * H, each)     # while the tensor cores work
                ptx.named_barrier(1 + group, 128)
                step = finish(acc, ring, step, ahead == PASSES - 1, turn + 1 < count, turn, tile + every)
                add_all(acc, s, base + 4 * (buffer + slot * TABLE) + q * 16, h, to, col)
                if QKV and matrix < 2:
                    rotate(acc, rope, row, col, q)
                extremes(acc, most, least)
                if PASSES > 1 and ahead < PASSES - 1:
                    for i in range(0, ACC, 4):
                        ptx.store4(spill, at_spill + (ahead * ACC + i) * THREADS, acc[i], acc[i + 1], acc[i + 2],
                                   acc[i + 3])
            mine = ((turn & 1) * RG + rg) * 64 + (c >> 5) * 16 + (lane >> 2)
            for half in range(2):
                most[half] = max(most[half], int32(-least[half]))
            joined(most, sm, AT_TOPS + mine * CG, CG, side, q, 5 + rg)
            for half in range(2):
                scales[half] = amax_scale(most[half])
            for back in range(PASSES):
                ahead = PASSES - 1 - back
                if back > 0:
                    for i in range(0, ACC, 4):
                        acc[i], acc[i + 1], acc[i + 2], acc[i + 3] = ptx.load4(
                            spill, at_spill + (ahead * ACC + i) * THREADS)
                quantised(acc, scales)
                col = ahead * (CG * N) + side * N
                if QKV and matrix == 2:
                    store_transposed(acc, values, row, col, lane)
                else:
                    store(acc, h, to, col)

    return Kernel(full_width_product, 4 * (AT_TOPS + TOPS), shape)


# --- all of them ------------------------------------------------------------------------------------------------------

class Plan(noise.Plan):
    """The calls of the transformer in order: where the noise of each begins."""

    def __init__(self, cfg):
        super().__init__(cfg)
        sides = [self.inputs("embedding"), self.looked_up("embedding")]
        for byte in (1, 2, 3) if cfg.NTT_MODE else ():
            sides += self.looked_up(f"ntt_emb_{byte}"), self.inputs(f"ntt_emb_{byte}")
        self.embed = self.add(self.vector("emb_bias"), *sides)
        self.embedding_mlp = self._mlp("ln_init", "w_emb_mlp_", "mlp_emb_bias_", 0)
        self.layers = []
        for i in range(cfg.N_LAYERS):
            queries = "w_q", "w_k", "w_v"
            self.layers.append(SimpleNamespace(
                norm=self._norm("ln_1", i, *queries), qkv=self.add(*(self.columns(name, i) for name in queries)),
                attention=self.add(self.inputs("w_o", i)), o=self.add(self.columns("w_o", i)),
                mlp=self._mlp("ln_2", "w_", "mlp_bias_", i)))
        self.ln_f = self._norm("ln_f", 0, "embedding")
        self.head = self.add(self.columns("embedding"))

    def _norm(self, name, layer, *matrices):
        """A norm before products with matrices."""
        return self.add(self.vector(name, layer), self.vector(name + "_bias", layer),
                        *(self.inputs(matrix, layer) for matrix in matrices))

    def _mlp(self, norm, weights, bias, layer):
        return SimpleNamespace(
            norm=self._norm(norm, layer, weights + "up"),
            up=self.add(self.columns(weights + "up", layer), self.vector(bias + "up", layer),
                        self.inputs(weights + "down", layer)),
            down=self.add(self.columns(weights + "down", layer), self.vector(bias + "down", layer)))


class Kernels:
    """The kernels of a configuration: `all` of them; `matrices`: the words at which their packed matrices begin."""

    def __init__(self, cfg, packing, gpu):
        self.cfg, self.plan, nz = cfg, Plan(cfg), build_noise(cfg)
        self.embed = _embed_kernel(cfg, nz, gpu)
        norm_of = functools.cache(functools.partial(_norm_kernel, cfg, nz, gpu))
        self.norms = {streams: norm_of(streams) for streams in (1, 3)}
        self.full_width = {kind: _full_width_kernel(cfg, gpu, kind) for kind in ("qkv", "o", "down")}
        self.up = _up_kernel(cfg, nz, gpu, self.full_width["down"].shape.KP)
        self.attention = attention_kernel(cfg, nz, gpu)
        self.head, self.draw = head_kernel(cfg, gpu), noise.draw_kernel(cfg)
        self.all = [self.draw, self.embed, *self.norms.values(), *self.full_width.values(), self.up, self.attention,
                    self.head]
        qkv, up, down = (QUADS, self.full_width["qkv"]), (UP, self.up), (DOWN, self.full_width["down"])
        used = dict(embedding=(PLAIN, self.head), w_q=qkv, w_k=qkv, w_v=qkv, w_o=(QUADS, self.full_width["o"]),
                    w_up=up, w_emb_mlp_up=up, w_down=down, w_emb_mlp_down=down)
        self.matrices = {}
        for t in sorted((t for t in parameters.tensors(cfg) if t.product), key=lambda t: t.layer):
            order, kernel = used[t.name]
            self.matrices[t.name, t.layer] = packing.add(t, order, kernel.shape.columns, kernel.shape.KP)
            if t.name == "embedding":
                self.at_tiles = self.matrices[t.name, 0]
                self.at_columns = packing.add(t, ROWS, t.cols, t.rows)
                self.at_embedding = packing.add(t, PLAIN, blocks(t.cols, 8) * 8, t.rows)

    def layout(self, pairs):
        """({name: (first byte, end)} of the arrays in the scratch memory of `pairs` pairs or windows, bytes of all)."""
        rows, H = rows_of_pairs(self.cfg, pairs), self.cfg.HIDDEN_DIM
        spill = max(2 * MOST_BLOCKS * (kernel.shape.passes - 1) * kernel.shape.N * THREADS
                    for kernel in self.full_width.values())
        out, end = host.ranges(dict(
            drawn=4 * self.plan.room(pairs), h=rows * H, n=rows * H, sb=16 * rows, u=4 * rows * H,
            queries=(2 * rows + 64) * H,
            values=blocks(rows, padded_length(self.cfg)) * H * value_length(self.cfg), spill=max(spill, 4)))
        out["keys"] = (out["queries"][0] + rows * H, out["queries"][1])      # behind the queries
        return out, end


def rows_of_pairs(cfg, pairs):
    """Rows of the arrays of `pairs` pairs, with those that fill the tallest tile."""
    return blocks(2 * pairs * padded_length(cfg), TALLEST) * TALLEST
