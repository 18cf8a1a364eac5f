"""The noisy forward pass on cc 9.0 where T = 64 and H = 256: wgmma kernels that take a pair, or two, a block.

`egg_kernels` has what it shares with the general path, decides which of the two serves, and documents the calls. A pair is 128 rows, a
warpgroup 64 of them (one member) by 128 columns: wgmma on operands that bulk copies bring to shared memory, a ring of stages with a
full and an empty barrier each, so that warpgroups drift apart and one multiplies while another does its epilogue; noise is hashed
while the tensor cores work, and the accumulators of the head and of the up projection begin with it.

Columns of the packed matrices are permuted within 16 so that a thread's accumulators are four neighbours: with grp = 16 columns,
acc[8 grp + 0, 1, 4, 5] = columns 16 grp + 4 q + 0..3 of row g, acc[8 grp + 2, 3, 6, 7] the same of row g + 8. The hidden units of
an MLP are stored in blocks of 128, units i + sub * H of 32 neighbouring i, so that the four units which share a running integer
(SPEC 4) lie in one block.
"""

import numpy as np
from numba import cuda, float32, int32, int64, uint32, uint64

from model import integer_tables
from model import parameters
from kernels import ptx
from egg_kernels import (A8, A32, A64, AU32, PLAN, TILE, aligned, amax_scale, blocks, build_noise, byte, clip, device,
                         loss_function, ntt_functions, pack4, pack_quad, quad_max, quad_sum, vector_function)

SEQ_LEN, HIDDEN_DIM = 64, 256
ROW_WORDS = 2 * SEQ_LEN * HIDDEN_DIM // 4        # int32 words of a pair's activations of width H
MEMBER_BYTES, TILE_BYTES = SEQ_LEN * HIDDEN_DIM, TILE * HIDDEN_DIM
SHARED = 220 * 1024                         # what the largest of these kernels needs, with its static part


def _wgmma_tile(K=HIDDEN_DIM):
    """Device functions (start, done): begin acc = 64 rows x 128 columns over K from shared memory, added to acc where keep is not 0;
    and wait for it. Between, acc must not be touched."""
    product, done = ptx.wgmma_s8(128), ptx.wgmma_done(128)

    @device
    def start(acc, a_desc, b_desc, keep):
        ptx.wgmma_fence()
        product(acc, a_desc, b_desc, keep)
        for k in range(1, K // 32):
            product(acc, a_desc + 16 * k, b_desc + 16 * k, 1)
    return start, done


def _descriptor(K=HIDDEN_DIM):
    """Device function: wgmma descriptor of core matrices at a shared address, rows of K bytes."""
    STRIDES = ptx.wgmma_descriptor_strides(K)

    @device
    def descriptor(address):
        return ((int64(address) & int64(0x3FFFF)) >> int64(4)) | int64(STRIDES)
    return descriptor


def _exp_entries(cfg):
    """Entries of EXP up to the one that all further ones equal."""
    exps = integer_tables.exp_table(cfg)
    last = exps[min(255, exps.size - 1)]
    return int(np.flatnonzero(exps != last)[-1]) + 2 if (exps != last).any() else 1


def _copies(cfg):
    """How many copies of EXP, one a bank, fit: a look-up by 32 lanes then has no bank conflicts, or few."""
    return 32 if _exp_entries(cfg) <= 96 else 8


def _loudest(cfg):
    """Largest size of a noise value."""
    return cfg.DEVICE_MASK * (3 if cfg.DEVICE_GAUSSIAN else 1)


def _begin_functions(cfg, nz, inputs, most=0):
    """How a product over `inputs` begins with its noise already in the accumulators: (row, column, begin, BASE)

    row(s), column(n)   device functions: a signed sb and a column noise (int32) as `begin` wants them, int32
    begin(s, n, c)      c + (s * n >> NOISE_SHIFT), where c = BASE + an int32 of at most `most` in size
    BASE                not 0 where all that stays below 2^22. Then it is one float32 instruction: 1.5 * 2^23 + i has the bits BASE + i,
                        and a fused multiply-add that rounds downward is a multiplication, a shift and a sum
    """
    SILENT, NOISE_SHIFT, UNIT = nz.silent, cfg.NOISE_SHIFT, 2.0 ** -cfg.NOISE_SHIFT
    sb = inputs * 127 * _loudest(cfg)
    FITS = cfg.ADAPTIVE_NOISE_MODE < 2 and sb < 1 << 24 and (sb * _loudest(cfg) >> NOISE_SHIFT) + 1 + most < 1 << 22

    @device
    def row(s):
        return ptx.float_bits(float32(float32(s) * float32(UNIT))) if FITS else s

    @device
    def column(n):
        return ptx.float_bits(float32(n)) if FITS else n

    @device
    def begin(s, n, c):
        if SILENT:
            return c
        if FITS:
            return ptx.float_bits(ptx.fma_down(ptx.bits_float(s), ptx.bits_float(n), ptx.bits_float(c)))
        return int32(c + int32(int32(s * n) >> int32(NOISE_SHIFT)))

    return row, column, begin, 0x4B400000 if FITS else 0


def _load4(nz):
    """Device function: four words of noise from a shared address."""
    SILENT = nz.silent

    @device
    def load4(address):
        if SILENT:
            return int32(0), int32(0), int32(0), int32(0)
        return ptx.load_shared4(address)
    return load4


def _head_kernel(cfg, nz):
    """The output head (as in egg_kernels) of two pairs a block, four warpgroups. Launch [pairs / 2], 512 threads."""
    V = cfg.VOCAB_SIZE
    TILES = (V + TILE - 1) // TILE
    STEPS, RAGGED = 2 * TILES, V % TILE
    LOGIT, NOISE_SHIFT, ONES = cfg.SHIFT_LOGIT, cfg.NOISE_SHIFT, (1 << cfg.SHIFT_LOGIT) - 1
    MOST, COPIES = _exp_entries(cfg) - 1, _copies(cfg)
    FARTHEST = (MOST << LOGIT) + ONES
    # entries of EXP lie 2^LOGIT bytes apart, if that fits: then a level is an address (and stays one if noise is far from 2^31)
    PLACED = 4 * COPIES <= 1 << LOGIT <= 1024 and (MOST + 1) << LOGIT <= 24 * 1024 and NOISE_SHIFT > 1
    STRIDE = (1 << LOGIT) // 4 if PLACED else COPIES         # words
    EXPS = (MOST + 1) * STRIDE
    noise, scaled, four, SILENT = nz.noise, nz.scaled, _load4(nz), nz.silent
    as_row, as_column, begin, BASE = _begin_functions(cfg, nz, HIDDEN_DIM)
    BASE = 0 if SILENT else BASE
    HIDDEN = BASE - (1 << 29)                                # the level of columns beyond the vocabulary
    position_loss = loss_function(cfg)
    (start, done), descriptor = _wgmma_tile(), _descriptor()
    SHARED_B, STAGES, LAG = 4 * MEMBER_BYTES, 4, 2            # a stage is refilled LAG steps after its use, so the warpgroups may drift
    EMPTY = 8 * STAGES

    @device
    def noisy(a, s, n):
        return int32(a + int32(int32(s * n) >> int32(NOISE_SHIFT)))

    @device
    def begin_tile(acc, at, s0, s1):
        """Accumulators before the product: the noise of their columns, at a shared address."""
        if not SILENT:
            for j in range(8):
                n = four(at + j * 64)
                for k in range(4):
                    i = 8 * j + (k >> 1) * 4 + (k & 1)
                    acc[i], acc[i + 2] = begin(s0, n[k], int32(BASE)), begin(s1, n[k], int32(BASE))

    @device
    def weight(top, a, last, at):
        """EXP of the distance from level a to the highest level with the highest logit."""
        below = min(uint32(int32(top - a)), uint32(last))
        if PLACED:
            return ptx.load_shared(int32(int32(below & uint32(~ONES & 0xFFFFFFFF)) | at))
        return ptx.load_shared(int32(int32(int32(below >> uint32(LOGIT)) * int32(4 * COPIES)) + at))

    @device
    def target_logit(packed, at, x, at_x, token, s, overlay, at_overlay, stream, q):
        dot, at_token = int32(0), at + (token >> 3) * (2 * HIDDEN_DIM) + (token & 7) * 4 + q
        for piece in range(HIDDEN_DIM // 16):
            dot = ptx.dp4a(x[at_x + piece * 32], packed[at_token + piece * 32], dot)
        n = scaled(noise(stream, token), overlay[at_overlay + token], stream, token)
        return int32(noisy(quad_sum(dot), s, n) >> int32(LOGIT))

    @cuda.jit(launch_bounds=512)
    def head(call, plan, packed, overlay, windows, pairs, job, offset, exps, x, sb, losses):
        sm = cuda.shared.array(0, int32)
        exp = cuda.shared.array(EXPS, int32, 1024)           # [entry][copy, and a gap where PLACED]
        column = cuda.shared.array(1024, int32)              # [warpgroup][parity of the tile][128]
        barriers = cuda.shared.array(8, int64)
        t = cuda.threadIdx.x
        group, lane = t >> 7, t & 31
        q = lane & 3
        unit = 2 * cuda.blockIdx.x + (group >> 1)
        member = group & 1
        base, bar = ptx.shared_address(sm, 0), ptx.shared_address(barriers, 0)
        tiles = base + SHARED_B
        at = plan[call * PLAN]
        if t == 0:
            for i in range(STAGES):
                ptx.barrier_init(bar + 8 * i, 1)
                ptx.barrier_init(bar + EMPTY + 8 * i, 16)
            ptx.barrier_fence()
        for i in range(t, EXPS, 512):
            exp[i] = exps[i // STRIDE]
        cuda.syncthreads()
        if t == 0:
            ptx.barrier_expect(bar, SHARED_B + TILE_BYTES)
            ptx.copy_bulk(base, x, int64(cuda.blockIdx.x) * (2 * ROW_WORDS), SHARED_B, bar)
            ptx.copy_bulk(tiles, packed, at, TILE_BYTES, bar)
            for i in range(1, STAGES):
                ptx.barrier_expect(bar + 8 * i, TILE_BYTES)
                ptx.copy_bulk(tiles + i * TILE_BYTES, packed, at + int64(i % TILES) * (TILE_BYTES // 4), TILE_BYTES, bar + 8 * i)
        row = ((t & 127) >> 5) * 16 + (lane >> 2)            # within the member; and row + 8
        sign = int32(1 - 2 * member)
        s0, s1 = int32(sb[unit * 128 + member * 64 + row] * sign), int32(sb[unit * 128 + member * 64 + row + 8] * sign)
        stream = uint32(uint32(uint32(job[0] + job[1]) + uint32(offset + unit)) + uint32(plan[call * PLAN + 1]))
        at_overlay = plan[call * PLAN + 2]
        z0, z1 = int32(0), int32(0)
        if unit < pairs:
            at_x = int64(unit) * ROW_WORDS + ((member * 64 + row) >> 3) * (2 * HIDDEN_DIM) + (row & 7) * 4 + q
            at_window = unit * (SEQ_LEN + 1) + row + 1
            z0 = target_logit(packed, at, x, at_x, windows[at_window], s0, overlay, at_overlay, stream, q)
            z1 = target_logit(packed, at, x, at_x + 2 * HIDDEN_DIM, windows[at_window + 8], s1, overlay, at_overlay, stream, q)
        top0, top1 = int32(-2 ** 31), int32(-2 ** 31)
        total0, total1 = int64(0), int64(0)
        a_desc = descriptor(base + group * MEMBER_BYTES)
        acc = cuda.local.array(64, int32)
        for i in range(64):
            acc[i] = 0
        c, here = t & 127, group * 256
        slot = (c & 0x70) | ((c & 6) << 1) | ((c & 8) >> 2) | (c & 1)
        column[here + slot] = as_column(scaled(noise(stream, c), overlay[at_overlay + c], stream, c))      # V is at least 256
        v = c + TILE
        entry = overlay[at_overlay + min(v, V - 1)]
        at_noise, at_exp = ptx.shared_address(column, here) + q * 16, int32((lane & (COPIES - 1)) * 4)
        table = ptx.shared_address(exp, 0)
        if not PLACED:
            at_exp, table = int32(at_exp + table), int32(0)
        last = int32(table + int32(FARTHEST))
        s0, s1 = as_row(s0), as_row(s1)
        ptx.named_barrier(1 + group, 128)
        begin_tile(acc, at_noise, s0, s1)
        for step in range(STEPS):
            stage, tile, odd = step & (STAGES - 1), step if step < TILES else step - TILES, step & 1
            ptx.barrier_wait(bar + 8 * stage, (step // STAGES) & 1)
            start(acc, a_desc, descriptor(tiles + stage * TILE_BYTES), 0 if SILENT else 1)
            n = as_column(scaled(noise(stream, v), entry, stream, v))   # while the tensor cores work: the noise of the next tile
            column[here + 128 - odd * 128 + slot] = n if RAGGED == 0 or v < V else int32(0)
            v = v + TILE if v + TILE < TILES * TILE else c
            entry = overlay[uint64(at_overlay + min(v, V - 1))]         # of the tile after it
            ptx.named_barrier(1 + group, 128)
            done(acc)
            if lane == 0:
                ptx.barrier_arrive(bar + EMPTY + 8 * stage)
            if RAGGED != 0 and tile == TILES - 1:
                for j in range(16):
                    for e in range(2):
                        if j * 8 + q * 2 + e >= RAGGED:
                            acc[4 * j + e] = HIDDEN
                            acc[4 * j + 2 + e] = HIDDEN
            if step < TILES:
                for j in range(16):
                    top0 = int32(max(max(top0, acc[4 * j]), acc[4 * j + 1]))
                    top1 = int32(max(max(top1, acc[4 * j + 2]), acc[4 * j + 3]))
                if step == TILES - 1:                        # from here on: the highest level with the same logit
                    top0 = int32(int32(quad_max(top0) | int32(ONES)) + table)
                    top1 = int32(int32(quad_max(top1) | int32(ONES)) + table)
            else:
                e0, e1 = uint32(0), uint32(0)
                for j in range(16):
                    for e in range(2):
                        i = 4 * j + e
                        e0 = uint32(e0 + uint32(weight(top0, acc[i], last, at_exp)))
                        e1 = uint32(e1 + uint32(weight(top1, acc[i + 2], last, at_exp)))
                total0 += int64(e0)
                total1 += int64(e1)
                if RAGGED != 0 and tile == TILES - 1:        # the hidden columns counted as the smallest weight
                    hidden = 0
                    for j in range(16):
                        for e in range(2):
                            hidden += 1 if j * 8 + q * 2 + e >= RAGGED else 0
                    total0 -= int64(hidden) * exp[MOST * STRIDE]
                    total1 -= int64(hidden) * exp[MOST * STRIDE]
            begin_tile(acc, at_noise + 512 - odd * 512, s0, s1)
            if t == 0 and step >= LAG and step - LAG + STAGES < STEPS:
                old = step - LAG
                stage = old & (STAGES - 1)
                ptx.barrier_wait(bar + EMPTY + 8 * stage, (old // STAGES) & 1)
                ahead = old + STAGES
                ahead = ahead if ahead < TILES else ahead - TILES
                ptx.barrier_expect(bar + 8 * stage, TILE_BYTES)
                source = at + int64(ahead) * (TILE_BYTES // 4)
                ptx.copy_bulk(tiles + stage * TILE_BYTES, packed, source, TILE_BYTES, bar + 8 * stage)
        total0 += cuda.shfl_xor_sync(0xFFFFFFFF, total0, 1)
        total1 += cuda.shfl_xor_sync(0xFFFFFFFF, total1, 1)
        total0 += cuda.shfl_xor_sync(0xFFFFFFFF, total0, 2)
        total1 += cuda.shfl_xor_sync(0xFFFFFFFF, total1, 2)
        if q == 0 and unit < pairs:
            less = int32(table + int32(BASE))
            here = position_loss(total0, int32(int32(top0 - less) >> int32(LOGIT)), z0)
            here += position_loss(total1, int32(int32(top1 - less) >> int32(LOGIT)), z1)
            cuda.atomic.add(losses, 2 * unit + member, here)

    return head, SHARED_B + STAGES * TILE_BYTES


def _embed_kernel(cfg, nz):
    """h = clip(embedding look-up + bias) of both members, and zero losses. Launch [pairs], 256 threads; four lanes a position.
    plan as egg_kernels._rows_kernel."""
    H, NOISE_SHIFT = HIDDEN_DIM, cfg.NOISE_SHIFT
    vector = vector_function(cfg, nz, True)
    noise, factor, NTT = nz.noise, nz.factor, cfg.NTT_MODE != 0
    coefficient, look_up = ntt_functions(cfg, nz, True, cfg.NTT_CAUSAL)

    @cuda.jit(launch_bounds=256)
    def embed(call, plan, weights, packed, overlay, windows, job, offset, h, losses):
        table, factors = cuda.shared.array(768, int32), cuda.shared.array(256, float32)     # bias even, odd, noise
        t, unit = cuda.threadIdx.x, cuda.blockIdx.x
        p = call * PLAN
        seed = uint32(uint32(job[0] + job[1]) + uint32(offset + unit))
        if t < 2:
            losses[2 * unit + t] = 0
        table[t], table[H + t] = vector(weights, overlay, plan, p + 8, seed, t)
        stream = uint32(seed + uint32(H))
        table[2 * H + t] = noise(stream, t)
        factors[t] = factor(overlay[plan[p + 22] + t], stream, t)
        cuda.syncthreads()
        lane, row = t & 31, t >> 2
        token = windows[unit * (SEQ_LEN + 1) + row]
        n, f = noise(seed, token), factor(overlay[plan[p + 21] + token], seed, token)
        at_e = plan[p + 20] + (token >> 3) * (2 * H) + (token & 7) * 4 + (lane & 3)
        at_h = int64(unit) * ROW_WORDS + (row >> 3) * (2 * H) + lane
        address = ptx.shared_address(table, (lane & 3) * 4)
        x = cuda.local.array(8, int32)
        if NTT:
            coef = coefficient(windows, unit * (SEQ_LEN + 1), row)
        for piece in range(H // 16):
            word = packed[uint64(at_e + piece * 32)]
            even, odd = ptx.load_shared4(address + piece * 64), ptx.load_shared4(address + piece * 64 + 4 * H)
            c = ptx.load_shared4(address + piece * 64 + 8 * H)
            for k in range(4):
                d = ptx.trunc_f32(float32(float32(float32(int32(n * c[k])) * f) * factors[piece * 16 + (lane & 3) * 4 + k]))
                e = byte(word, k)
                more = int32(0), int32(0)
                if NTT:
                    more = look_up(weights, overlay, seed, coef, piece * 16 + (lane & 3) * 4 + k)
                x[k] = clip(int32(int32(int32(e + int32(d >> int32(NOISE_SHIFT))) + even[k]) + more[0]))
                x[4 + k] = clip(int32(int32(int32(e + int32(int32(-d) >> int32(NOISE_SHIFT))) + odd[k]) + more[1]))
            h[uint64(at_h + piece * 32)] = pack4(x[0], x[1], x[2], x[3])
            h[uint64(at_h + piece * 32 + ROW_WORDS // 2)] = pack4(x[4], x[5], x[6], x[7])

    return embed


def _norm_kernel(cfg, nz, streams):
    """n = ln(h) and the sums sb of n with `streams` input noises. Launch [pairs], 256 threads; a warp has 16 rows, four lanes two of
    them. plan as egg_kernels._rows_kernel."""
    H, MODE = HIDDEN_DIM, cfg.ADAPTIVE_NOISE_MODE
    FLOAT = MODE < 2 and 127 * (128 + (_loudest(cfg) ** 2 >> cfg.SIGMA_SHIFT_VECTOR)) < 1 << 20     # then 2^-21 of |p| changes no quotient
    AT_C, COEFFICIENTS = 4 * H, (4 + streams) * H           # ln even, odd, bias even, odd, streams
    FACTORS, SUMMED = streams * H if MODE == 2 else 1, 0 if nz.silent else streams
    vector = vector_function(cfg, nz, True)
    noise, factor, input_coefficient, input_term, whole_factor = nz.noise, nz.factor, nz.input_coefficient, nz.input_term, nz.whole

    @device
    def shared_bias(b):
        """A bias as `normed` wants it."""
        return ptx.float_bits(float32(float32(int32(b + int32(127))) * float32(1 / 254))) if FLOAT else b

    @device
    def normed(p, mean, reciprocal, b):
        """clip(p / mean toward zero + bias) in the low byte. As floats: 2^23 with the sign of p, whose neighbours are whole numbers, takes
        the quotient, rounded toward zero; then what is cut to [0, 1] stands for -127 to 127."""
        if FLOAT:
            f = float32(p)
            whole = ptx.with_sign(float32(1 << 23), f)
            quotient = float32(ptx.fma_toward_zero(f, reciprocal, whole) - whole)
            share = ptx.fma_sat(quotient, float32(1 / 254), ptx.bits_float(b))
            return ptx.float_bits(cuda.fma(share, float32(254), float32(12582912 - 127)))
        quotient = int32(uint32(abs(p)) // uint32(mean))
        return clip(int32((quotient if p >= 0 else int32(-quotient)) + b))

    @device
    def sizes(word):
        """Sum of the four |bytes|."""
        negative = ptx.byte_permute(word, 0, 0xBA98)
        return ptx.dp4a(negative, -1, ptx.dp4a(int32(word ^ negative), 0x01010101, 0))

    @cuda.jit(launch_bounds=256)
    def norm(call, plan, weights, overlay, job, offset, s_stride, h, n, sb):
        table, factors = cuda.shared.array(COEFFICIENTS, int32), cuda.shared.array(FACTORS, float32)
        packed_noise = cuda.shared.array(192, int32)         # [stream][H / 4]
        t, unit = cuda.threadIdx.x, cuda.blockIdx.x
        p = call * PLAN
        seed = uint32(uint32(job[0] + job[1]) + uint32(offset + unit))
        table[t], table[H + t] = vector(weights, overlay, plan, p, seed, t)
        even, odd = vector(weights, overlay, plan, p + 4, seed, t)
        table[2 * H + t], table[3 * H + t] = shared_bias(even), shared_bias(odd)
        whole = int32(1)
        for s in range(SUMMED):
            stream = uint32(seed + uint32(plan[p + 12 + 2 * s]))
            entry = overlay[plan[p + 13 + 2 * s] + t]
            whole = int32(whole & whole_factor(entry))
            table[AT_C + s * H + t] = input_coefficient(entry, stream, t)
            word = pack_quad(noise(stream, t))
            if t & 3 == 0:
                packed_noise[s * (H // 4) + (t >> 2)] = word
            if MODE == 2:
                factors[s * H + t] = factor(entry, stream, t)
        whole = cuda.syncthreads_and(whole)                  # then sb is a plain sum of products
        lane = t & 31
        row = (t >> 5) * 16 + (lane >> 2)
        at = int64(unit) * ROW_WORDS + (row >> 3) * (2 * H) + lane
        member = row >> 6
        sums = cuda.local.array(6, int32)
        x = cuda.local.array(4, int32)
        for i in range(6):
            sums[i] = 0
        total0, total1 = int32(0), int32(0)
        for piece in range(16):
            total0 = int32(total0 + sizes(h[uint64(at + piece * 32)]))
            total1 = int32(total1 + sizes(h[uint64(at + 2 * H + piece * 32)]))
        mean0 = int32(max(int32(uint32(quad_sum(total0)) // uint32(H)), int32(1)))
        mean1 = int32(max(int32(uint32(quad_sum(total1)) // uint32(H)), int32(1)))
        above = float32(1 + 2.0 ** -22)                      # so that a quotient is never below the whole number that it is
        reciprocal0, reciprocal1 = float32(above / float32(mean0)), float32(above / float32(mean1))
        address = ptx.shared_address(table, (lane & 3) * 4)
        at_w = address + member * (4 * H)
        for piece in range(16):
            w, b = ptx.load_shared4(at_w + piece * 64), ptx.load_shared4(at_w + 8 * H + piece * 64)
            for half in range(2):
                word = h[uint64(at + half * (2 * H) + piece * 32)]
                mean, reciprocal = (mean0, reciprocal0) if half == 0 else (mean1, reciprocal1)
                for k in range(4):
                    x[k] = normed(int32(byte(word, k) * w[k]), mean, reciprocal, b[k])
                word = pack4(x[0], x[1], x[2], x[3])
                n[uint64(at + half * (2 * H) + piece * 32)] = word
                if whole:
                    for s in range(SUMMED):
                        c4 = packed_noise[uint32(s * (H // 4) + piece * 4 + (lane & 3))]
                        sums[3 * half + s] = ptx.dp4a(word, c4, sums[3 * half + s])
                else:
                    for s in range(SUMMED):
                        c = ptx.load_shared4(address + (AT_C + s * H) * 4 + piece * 64)
                        for k in range(4):
                            f = factors[s * H + piece * 16 + (lane & 3) * 4 + k] if MODE == 2 else float32(0)
                            sums[3 * half + s] = int32(sums[3 * half + s] + input_term(byte(word, k), c[k], f))
        for half in range(2):
            for s in range(streams):
                total = quad_sum(sums[3 * half + s])
                if (lane & 3) == 0:
                    sb[s * s_stride + unit * 128 + row + half * 8] = total

    return norm


def _up_kernel(cfg, nz):
    """u = GELU[clip((up(n) >> SHIFT_MLP_UP) + bias)], two pairs at a time, hidden units in blocks. Launch [blocks] of 512 threads; a
    block takes every gridDim-th two pairs. plan as egg_kernels._product_kernel. u words: [pair][8 blocks][core matrices of 128 rows,
    128 bytes]."""
    H, SHIFT = HIDDEN_DIM, cfg.SHIFT_MLP_UP
    TILES, SHARED_B, STAGES, EMPTY = 4 * H // TILE, 4 * MEMBER_BYTES, 3, 32
    AT_TABLE = SHARED_B + STAGES * TILE_BYTES
    noise, scaled = nz.noise, nz.scaled
    vector = vector_function(cfg, nz, True)
    (start, done), descriptor = _wgmma_tile(), _descriptor()
    as_row, as_column, begin, BASE = _begin_functions(cfg, nz, H, 256 + (_loudest(cfg) ** 2 >> cfg.SIGMA_SHIFT_VECTOR) << SHIFT)
    UNIT, MIDDLE = 2.0 ** -(SHIFT + 8), 0.5 - 1.5 * 2.0 ** (15 - SHIFT)          # to [0, 1] from 1.5 * 2^23 +- 128 << SHIFT
    INDEX = 1 << 17                                          # + i / 64 has the bits 0x48000000 + i, and 128 times that is 128 i
    four = _load4(nz)

    @device
    def begin_tile(acc, at, s0, s1):
        """Accumulators before the product: noise, and where they are floats bias, of their columns, at a shared address."""
        for j in range(8):
            n, b = four(at + j * 64), ptx.load_shared4(at + j * 64 + 512)
            for k in range(4):
                i = 8 * j + (k >> 1) * 4 + (k & 1)
                c = b[k] if BASE else int32(0)
                acc[i], acc[i + 2] = begin(s0, n[k], c), begin(s1, n[k], c)

    @device
    def unit_address(a, bias, at):
        """Where GELU of a hidden unit lies."""
        if BASE:
            share = ptx.fma_sat(ptx.bits_float(a), float32(UNIT), float32(MIDDLE))
            return int32(int32(ptx.float_bits(ptx.fma_down(share, float32(4), float32(INDEX))) * int32(128)) + at)
        return int32(int32(min(max(int32(int32(a >> int32(SHIFT)) + bias), int32(0)), int32(256)) * int32(128)) + at)

    @device
    def prepare(column, at, weights, overlay, plan, p, seed, seed_a, at_overlay, i, sb, row, member):
        """Noise and bias of hidden unit i of this thread's column; the sb of its two rows, as `begin` wants them."""
        stream = uint32(seed + seed_a)
        column[at] = as_column(scaled(noise(stream, i), overlay[uint64(at_overlay + i)], stream, i))
        plus, minus = vector(weights, overlay, plan, p + 3, seed, i)
        bias = minus if member else plus
        column[at + 128] = int32(int32(bias << int32(SHIFT)) + int32(BASE)) if BASE else int32(bias + int32(128))
        sign = int32(1 - 2 * member)
        return as_row(int32(sb[uint64(row)] * sign)), as_row(int32(sb[uint64(row + 8)] * sign))

    @cuda.jit(launch_bounds=512)
    def up(call, at, plan, weights, packed, overlay, job, offset, pairs, gelu, x, sb, u):
        sm = cuda.shared.array(0, int32)
        column = cuda.shared.array(2048, int32)              # [warpgroup][parity of the tile][noise, bias][128]
        barriers = cuda.shared.array(16, int64)              # full, empty; then full, empty of each warpgroup's rows
        t = cuda.threadIdx.x
        group, lane = t >> 7, t & 31
        q = lane & 3
        member = group & 1
        base, bar = ptx.shared_address(sm, 0), ptx.shared_address(barriers, 0)
        tiles, rows_full, rows_empty = base + SHARED_B, bar + 64 + 8 * group, bar + 96 + 8 * group
        rows_at = base + group * MEMBER_BYTES
        p = call * PLAN
        if 2 * cuda.blockIdx.x >= pairs:
            return
        steps = (((pairs + 1) // 2 - 1 - cuda.blockIdx.x) // cuda.gridDim.x + 1) * TILES
        if t == 0:
            for i in range(STAGES):
                ptx.barrier_init(bar + 8 * i, 1)
                ptx.barrier_init(bar + EMPTY + 8 * i, 16)
            for i in range(4):
                ptx.barrier_init(bar + 64 + 8 * i, 1)
                ptx.barrier_init(bar + 96 + 8 * i, 4)
            ptx.barrier_fence()
        for i in range(t, 257 * 32, 512):                    # [x + 128][lane] behind the tiles: a look-up has no bank conflicts
            sm[AT_TABLE // 4 + i] = gelu[(min(max(i >> 5, 1), 255) - 128) & 255]
        at_lane = int32(base + AT_TABLE + lane * 4)
        cuda.syncthreads()
        unit = 2 * cuda.blockIdx.x + (group >> 1)
        if (t & 127) == 0:
            ptx.barrier_expect(rows_full, MEMBER_BYTES)
            ptx.copy_bulk(rows_at, x, int64(unit * 2 + member) * (MEMBER_BYTES // 4), MEMBER_BYTES, rows_full)
        if t == 0:
            for i in range(STAGES):
                ptx.barrier_expect(bar + 8 * i, TILE_BYTES)
                ptx.copy_bulk(tiles + i * TILE_BYTES, packed, at + i * (TILE_BYTES // 4), TILE_BYTES, bar + 8 * i)
        row = member * 64 + ((t & 127) >> 5) * 16 + (lane >> 2)
        acc = cuda.local.array(64, int32)
        for i in range(64):
            acc[i] = 0
        stage, phase, c, here = 0, 0, t & 127, group * 512
        at_noise = ptx.shared_address(column, here) + q * 16
        base_seed, seed_a, at_overlay = uint32(uint32(job[0] + job[1]) + uint32(offset)), uint32(plan[p + 1]), plan[p + 2]
        s0, s1 = prepare(column, here + c, weights, overlay, plan, p, uint32(base_seed + uint32(unit)), seed_a, at_overlay,
                         (c >> 5) * H + (c & 31), sb, unit * 128 + row, member)
        ptx.named_barrier(1 + group, 128)
        begin_tile(acc, at_noise, s0, s1)
        for step in range(steps):
            tile, turn, odd = step % TILES, (step // TILES) & 1, step & 1
            ptx.barrier_wait(rows_full, turn)
            ptx.barrier_wait(bar + 8 * stage, phase)
            start(acc, descriptor(ptx.here(rows_at)), descriptor(tiles + stage * TILE_BYTES), 1)
            to = int64(unit) * (4 * ROW_WORDS) + tile * (ROW_WORDS // 2) + (row >> 3) * H + lane
            if tile == TILES - 1 and step + 1 < steps:
                unit += 2 * cuda.gridDim.x
            s0, s1 = prepare(column, here + 256 - odd * 256 + c, weights, overlay, plan, p, uint32(base_seed + uint32(unit)), seed_a,
                             at_overlay, (c >> 5) * H + (step + 1) % TILES * 32 + (c & 31), sb, unit * 128 + row, member)
            ptx.named_barrier(1 + group, 128)
            done(acc)
            if lane == 0:
                ptx.barrier_arrive(bar + EMPTY + 8 * stage)
            if tile == TILES - 1:
                if lane == 0:
                    ptx.barrier_arrive(rows_empty)
                if (t & 127) == 0 and step + 1 < steps:
                    ptx.barrier_wait(rows_empty, turn)
                    ptx.barrier_expect(rows_full, MEMBER_BYTES)
                    ptx.copy_bulk(rows_at, x, int64(unit * 2 + member) * (MEMBER_BYTES // 4), MEMBER_BYTES, rows_full)
            for j in range(8):
                if not BASE:
                    b = ptx.load_shared4(at_noise + odd * 1024 + j * 64 + 512)
                for half in range(2):
                    for k in range(4):
                        i = 8 * j + half * 2 + (k >> 1) * 4 + (k & 1)
                        acc[i] = ptx.load_shared(unit_address(acc[i], int32(0) if BASE else b[k], at_lane))
                    i = 8 * j + half * 2
                    u[uint64(to + half * H + j * 32)] = pack4(acc[i], acc[i + 1], acc[i + 4], acc[i + 5])
            if not BASE:                                     # the biases just read are the next to be overwritten
                ptx.named_barrier(1 + group, 128)
            begin_tile(acc, at_noise + 1024 - odd * 1024, s0, s1)
            if t == 0 and step >= 1 and step - 1 + STAGES < steps:      # refill the stage before this one
                old = stage - 1 if stage > 0 else STAGES - 1
                ptx.barrier_wait(bar + EMPTY + 8 * old, phase if stage > 0 else phase ^ 1)
                ptx.barrier_expect(bar + 8 * old, TILE_BYTES)
                ahead = (step - 1 + STAGES) % TILES
                ptx.copy_bulk(tiles + old * TILE_BYTES, packed, at + ahead * (TILE_BYTES // 4), TILE_BYTES, bar + 8 * old)
            stage += 1
            if stage == STAGES:
                stage, phase = 0, phase ^ 1

    return up, AT_TABLE + 257 * 32 * 4


@device
def rounded(v, scale):
    """egg_kernels.quantise in the second byte of the result, without its conversion to an integer, which is slow: what lies below 0
    goes to the float32 below, so that a half is rounded down there as well; then x + 1/2 rounded down to 256ths by the size of the sum.
    Equal for every float32 up to 128."""
    x = float32(float32(v) * scale)
    return ptx.float_bits(ptx.add_down(ptx.fma_down(x, float32(2.0 ** -25), x), float32(49152.5)))


@device
def pack_rounded(a, b, c, d):
    return ptx.byte_permute(ptx.byte_permute(a, b, 0x0051), ptx.byte_permute(c, d, 0x0051), 0x5410)


def _row_functions():
    """Device functions on the accumulators of two warpgroups that share 64 rows of width H, columns 128 * side on:

    scale(acc, tops, at, side, q, barrier)      acc = amax(acc) of two rows, as `rounded` gives it; at: of the first in tops int32 [row][2]
    store(acc, out, to)                         their four-byte words
    """
    @device
    def scale(acc, tops, at, side, q, barrier):
        top0, top1, low0, low1 = int32(0), int32(0), int32(0), int32(0)
        for j in range(16):
            top0, low0 = int32(max(max(top0, acc[4 * j]), acc[4 * j + 1])), int32(min(min(low0, acc[4 * j]), acc[4 * j + 1]))
            top1, low1 = int32(max(max(top1, acc[4 * j + 2]), acc[4 * j + 3])), int32(min(min(low1, acc[4 * j + 2]), acc[4 * j + 3]))
        top0, top1 = quad_max(int32(max(top0, int32(-low0)))), quad_max(int32(max(top1, int32(-low1))))
        if q == 0:
            tops[at + side], tops[at + 16 + side] = top0, top1
        ptx.named_barrier(barrier, 256)
        scale0, scale1 = amax_scale(max(tops[at], tops[at + 1])), amax_scale(max(tops[at + 16], tops[at + 17]))
        for j in range(16):
            for e in range(2):
                acc[4 * j + e] = rounded(acc[4 * j + e], scale0)
                acc[4 * j + 2 + e] = rounded(acc[4 * j + 2 + e], scale1)

    @device
    def store(acc, out, to):
        for j in range(8):
            for half in range(2):
                i = 8 * j + 2 * half
                out[uint64(to + j * 32 + half * (2 * HIDDEN_DIM))] = pack_rounded(acc[i], acc[i + 1], acc[i + 4], acc[i + 5])

    return scale, store


def _square_kernel(cfg, nz, kind):
    """Products of full width, so that a row's amax needs nothing outside the block: four warpgroups, member = group // 2, columns
    128 * (group % 2). Launch [blocks] of 512 threads; a block takes every gridDim-th pair. The matrix stays in shared memory.

    kind "qkv": the matrix is blockIdx % 3; q, k, v int8 much as egg_kernels makes them. "o": h = amax(h + (product >> shift)).
    In "qkv" the members take turns, for the second begins when the first has multiplied once.
    plan: egg_kernels._product_kernel's 8 entries a matrix. s_stride: rows of one sb array."""
    H, T, D, BIT = HIDDEN_DIM, SEQ_LEN, cfg.HEAD_DIM, cfg.ROPE_SCALE_BIT
    NOISE_SHIFT, SHIFT = cfg.NOISE_SHIFT, cfg.SHIFT_OUT
    QKV = kind == "qkv"
    MATRICES = 3 if QKV else 1
    STAGES, STAGE, B_BYTES = 2, 2 * MEMBER_BYTES, H * H
    AT_B = STAGES * STAGE
    AT_ROPE = AT_B + B_BYTES
    EMPTY, MATRIX = 8 * STAGES, 16 * STAGES
    ROPE_ROW = D + 16                                       # words: rows g of a warp fall into different banks
    noise, scaled, four = nz.noise, nz.scaled, _load4(nz)
    (start, done), descriptor, (scale, store) = _wgmma_tile(), _descriptor(), _row_functions()

    @device
    def fill(base, bar, step, first, every, x):
        """Starts the copy of a step's pair into its stage."""
        stage = step & (STAGES - 1)
        ptx.barrier_expect(bar + 8 * stage, STAGE)
        ptx.copy_bulk(base + stage * STAGE, x, int64(first + step * every) * (STAGE // 4), STAGE, bar + 8 * stage)

    @device
    def turn(e, o, cos, sin):
        half, less = int64(1) << int64(BIT - 1), int32(-sin)
        return (int32(ptx.mad_wide(o, less, ptx.mad_wide(e, cos, half)) >> int64(BIT)),
                int32(ptx.mad_wide(o, cos, ptx.mad_wide(e, sin, half)) >> int64(BIT)))

    @cuda.jit(launch_bounds=512)
    def square(call, at, plan, packed, overlay, job, offset, pairs, s_stride, rope, x, sb, h, q_out, k_out, v_out):
        sm = cuda.shared.array(0, int32)
        column = cuda.shared.array(512, int32)               # [member][256]
        tops = cuda.shared.array(256, int32)                 # [row][column half]
        barriers = cuda.shared.array(5, int64)               # full, empty of each stage; matrix
        t = cuda.threadIdx.x
        group, lane = t >> 7, t & 31
        q = lane & 3
        member, side = group >> 1, group & 1
        which = cuda.blockIdx.x % MATRICES
        first, every = cuda.blockIdx.x // MATRICES, cuda.gridDim.x // MATRICES
        base, bar = ptx.shared_address(sm, 0), ptx.shared_address(barriers, 0)
        p = call * PLAN + which * 8
        if t == 0:
            for i in range(STAGES):
                ptx.barrier_init(bar + 8 * i, 1)
                ptx.barrier_init(bar + EMPTY + 8 * i, 16)
            ptx.barrier_init(bar + MATRIX, 1)
            ptx.barrier_fence()
        if QKV:
            for i in range(t, T * D, 512):
                sm[AT_ROPE // 4 + (i // D) * ROPE_ROW + i % D] = rope[i]
        cuda.syncthreads()
        steps = 0
        if first < pairs:
            steps = (pairs - 1 - first) // every + 1
        if t == 0:
            ptx.barrier_expect(bar + MATRIX, B_BYTES)
            ptx.copy_bulk(base + AT_B, packed, at + which * (B_BYTES // 4), B_BYTES, bar + MATRIX)
            for i in range(STAGES):
                if i < steps:
                    fill(base, bar, i, first, every, x)
        ptx.barrier_wait(bar + MATRIX, 0)
        row = member * 64 + ((t & 127) >> 5) * 16 + (lane >> 2)
        sign = int32(1 - 2 * member)
        base_seed = uint32(uint32(uint32(job[0] + job[1]) + uint32(offset)) + uint32(plan[p + 1]))
        at_overlay, c = plan[p + 2], t & 255
        acc = cuda.local.array(64, int32)
        for i in range(64):
            acc[i] = 0
        if QKV and member == 1 and steps > 0:
            ptx.named_barrier(3, 512)
        for step in range(steps):
            stage, unit = step & (STAGES - 1), first + step * every
            s0 = int32(sb[uint64(which * s_stride + unit * 128 + row)] * sign)
            s1 = int32(sb[uint64(which * s_stride + unit * 128 + row + 8)] * sign)
            ptx.barrier_wait(bar + 8 * stage, (step // STAGES) & 1)
            start(acc, descriptor(base + stage * STAGE + member * MEMBER_BYTES), descriptor(base + AT_B + side * (B_BYTES // 2)), 0)
            stream = uint32(base_seed + uint32(unit))        # while the tensor cores work
            column[member * 256 + c] = scaled(noise(stream, c), overlay[uint64(at_overlay + c)], stream, c)
            ptx.named_barrier(1 + member, 256)
            done(acc)
            if lane == 0:
                ptx.barrier_arrive(bar + EMPTY + 8 * stage)
            if QKV and member == 0 and step == 0:
                ptx.named_barrier(3, 512)
            at_noise = ptx.shared_address(column, member * 256 + side * 128) + q * 16
            to = int64(unit) * ROW_WORDS + (row >> 3) * (2 * H) + side * 256 + lane
            for j in range(8):
                n = four(at_noise + j * 64)
                for half in range(2):
                    s = s0 if half == 0 else s1
                    word = int32(0) if QKV else h[uint64(to + j * 32 + half * (2 * H))]
                    for k in range(4):
                        i = 8 * j + half * 2 + (k >> 1) * 4 + (k & 1)
                        v = int32(acc[i] + int32(int32(s * n[k]) >> int32(NOISE_SHIFT)))
                        acc[i] = v if QKV else int32(byte(word, k) + int32(v >> int32(SHIFT)))
            if QKV and which < 2:
                at_rope = base + AT_ROPE + ((row & 63) * ROPE_ROW) * 4
                for j in range(8):
                    col = (side * 128 + j * 16) % D + q * 4
                    for half in range(2):
                        r = ptx.load_shared4(at_rope + half * (8 * ROPE_ROW * 4) + col * 4)
                        i = 8 * j + 2 * half
                        acc[i], acc[i + 1] = turn(acc[i], acc[i + 1], r[0], r[1])
                        acc[i + 4], acc[i + 5] = turn(acc[i + 4], acc[i + 5], r[2], r[3])
            scale(acc, tops, row * 2, side, q, 1 + member)
            if QKV and which == 2:
                # positions in the order of egg_kernels._rotate_kernel: rows g, g ^ 1 and the two 8 further are neighbouring bytes;
                # channels permuted within 16 like the columns of the matrices
                odd = (lane >> 2) & 1
                slot = ((row & 63) >> 4) * 128 + ((lane >> 3) & 3) * 4
                for j in range(8):
                    i = 8 * j
                    left = pack_rounded(acc[i], acc[i + 2], acc[i + 1], acc[i + 3])
                    right = pack_rounded(acc[i + 4], acc[i + 6], acc[i + 5], acc[i + 7])
                    other = cuda.shfl_xor_sync(0xFFFFFFFF, left if odd else right, 4)
                    even_row, odd_row = (other, right) if odd else (left, other)
                    i = side * 128 + j * 16 + odd * 8 + q * 2
                    at_v = ((int64(unit) * 2 + member) * (H * T) + (i >> 3) * (8 * T) + (i & 7) * 16 + slot) >> 2
                    v_out[uint64(at_v)] = ptx.byte_permute(even_row, odd_row, 0x5140)
                    v_out[uint64(at_v + 4)] = ptx.byte_permute(even_row, odd_row, 0x7362)
            elif not QKV:
                store(acc, h, to)
            elif which == 0:
                store(acc, q_out, to)
            else:
                store(acc, k_out, to)
            if t == 0 and step + STAGES < steps:
                ptx.barrier_wait(bar + EMPTY + 8 * stage, (step // STAGES) & 1)
                fill(base, bar, step + STAGES, first, every, x)

    return square, AT_ROPE + (T * ROPE_ROW * 4 if QKV else 0)


def _down_kernel(cfg, nz):
    """h = amax(h + (down(u) >> SHIFT_MLP_DOWN) + bias), four warpgroups as in _square_kernel, over a stream of eight blocks of 128
    hidden units that comes round for every pair. Launch [blocks] of 512 threads; a block takes every gridDim-th pair.

    The sums sb are made here, of the hidden units in shared memory; the last warp to leave a stage refills it.
    plan: 1 seed, 2 overlay of the output side, 3 bias (vector_function), 8 seed, 9 overlay of the input side."""
    H, MODE, NOISE_SHIFT, SHIFT = HIDDEN_DIM, cfg.ADAPTIVE_NOISE_MODE, cfg.NOISE_SHIFT, cfg.SHIFT_MLP_DOWN
    CHUNKS, K, STAGES = 8, 128, 4
    A_BYTES, B_BYTES = 128 * K, H * K
    STAGE, EMPTY = A_BYTES + B_BYTES, 8 * STAGES
    BARRIERS, COEFFICIENTS, FACTORS = 2 * STAGES, 8 * H, 8 * H if MODE == 2 else 1
    SILENT = nz.silent
    noise, scaled, factor, whole_factor, four = nz.noise, nz.scaled, nz.factor, nz.whole, _load4(nz)
    input_coefficient, input_fold = nz.input_coefficient, nz.input_fold
    vector = vector_function(cfg, nz, True)
    (start, done), descriptor, (scale, store) = _wgmma_tile(K), _descriptor(K), _row_functions()

    @device
    def fill(base, bar, step, first, every, x, packed, at):
        """Starts the copies of a step into its stage."""
        chunk, to, full = step % CHUNKS, base + (step % STAGES) * STAGE, bar + 8 * (step % STAGES)
        source = int64(first + (step // CHUNKS) * every) * CHUNKS + chunk
        ptx.barrier_expect(full, STAGE)
        ptx.copy_bulk(to, x, source * (A_BYTES // 4), A_BYTES, full)
        ptx.copy_bulk(to + A_BYTES, packed, at + chunk * (B_BYTES // 4), B_BYTES, full)

    @device
    def prepare(column, bias, coefficient, factors, weights, overlay, plan, p, job, unit, c, member, whole):
        """Noise and bias of column c and the noise of the input side (whole: as bytes), for one member's 256 threads; unit: the pair."""
        seed = uint32(uint32(job[0] + job[1]) + uint32(unit))
        stream = uint32(seed + uint32(plan[p + 1]))
        column[member * 256 + c] = scaled(noise(stream, c), overlay[plan[p + 2] + c], stream, c)
        plus, minus = vector(weights, overlay, plan, p + 3, seed, c)
        bias[member * 256 + c] = minus if member else plus
        stream = uint32(seed + uint32(plan[p + 8]))
        for i in range(c, 4 * H, 256):
            entry = overlay[plan[p + 9] + i]
            if whole:
                word = pack_quad(noise(stream, i))
                if c & 3 == 0:
                    coefficient[member * (4 * H) + (i >> 2)] = word
            else:
                coefficient[member * (4 * H) + i] = input_coefficient(entry, stream, i)
            if MODE == 2:
                factors[member * (4 * H) + i] = factor(entry, stream, i)
        ptx.named_barrier(1 + member, 256)

    @device
    def fold_64ths(pb, x, c):
        """input_fold of mode 1 with the running integer in 64ths: one shift less."""
        return ptx.whole_64ths(int32(int32(x * c) + pb))

    @device
    def add_sums(total, sm, at, chunk, coefficient, factors, t, member, whole):
        """total + this thread's share of sb (in 64ths in mode 1, unless whole) for one row, t // 4 of the member, over the block of
        hidden units at word `at`."""
        if SILENT:
            return total
        lane = t & 31
        if whole:
            at_c, where = member * (4 * H) + chunk * 8 + (lane & 3), at + (t >> 5) * H + lane
            for piece in range(2):
                for sub in range(4):
                    total = ptx.dp4a(sm[uint32(where + sub * 64 + piece * 32)], coefficient[uint32(at_c + sub * 64 + piece * 4)],
                                         total)
            return total
        address = ptx.shared_address(coefficient, member * (4 * H) + chunk * 32 + (lane & 3) * 4)
        where = at + (t >> 5) * H + lane
        pb = cuda.local.array(4, int32)
        for piece in range(2):                               # 16 neighbouring i
            for k in range(4):
                pb[k] = 0
            for sub in range(4):
                c = ptx.load_shared4(int32(address + sub * (4 * H) + piece * 64))
                word = sm[uint32(where + sub * 64 + piece * 32)]
                for k in range(4):
                    f = float32(0)
                    if MODE == 2:
                        f = factors[member * (4 * H) + sub * H + chunk * 32 + piece * 16 + (lane & 3) * 4 + k]
                    pb[k] = fold_64ths(pb[k], byte(word, k), c[k]) if MODE == 1 else input_fold(pb[k], byte(word, k), c[k], f)
            total = int32(total + int32(int32(pb[0] + pb[1]) + int32(pb[2] + pb[3])))
        return total

    @cuda.jit(launch_bounds=512)
    def down(call, at, plan, weights, packed, overlay, job, offset, pairs, x, h):
        sm = cuda.shared.array(0, int32)
        column, bias = cuda.shared.array(512, int32), cuda.shared.array(512, int32)      # [member][256]
        coefficient, factors = cuda.shared.array(COEFFICIENTS, int32), cuda.shared.array(FACTORS, float32)     # [member][4 H]
        row_sums = cuda.shared.array(128, int32)
        tops = cuda.shared.array(256, int32)                 # [row][column half]
        left = cuda.shared.array(STAGES, int32)              # warps that have left a stage
        barriers = cuda.shared.array(BARRIERS, int64)        # full, empty of each stage
        t = cuda.threadIdx.x
        group, lane = t >> 7, t & 31
        q = lane & 3
        member, side = group >> 1, group & 1
        first, every = cuda.blockIdx.x, cuda.gridDim.x
        base, bar = ptx.shared_address(sm, 0), ptx.shared_address(barriers, 0)
        p = call * PLAN
        if t < STAGES:
            left[t] = 0
        if t == 0:
            for i in range(STAGES):
                ptx.barrier_init(bar + 8 * i, 1)
                ptx.barrier_init(bar + EMPTY + 8 * i, 512)
            ptx.barrier_fence()
        whole = int32(whole_factor(overlay[plan[p + 9] + t]) & whole_factor(overlay[plan[p + 9] + t + 512]))
        whole = cuda.syncthreads_and(whole)                  # then sb is a plain sum of products
        steps = 0
        if first < pairs:
            steps = ((pairs - 1 - first) // every + 1) * CHUNKS
        if t == 0 and steps > 0:
            for i in range(STAGES):
                fill(base, bar, i, first, every, x, packed, at)
        row = member * 64 + ((t & 127) >> 5) * 16 + (lane >> 2)
        sign = int32(1 - 2 * member)
        total = int32(0)
        acc = cuda.local.array(64, int32)
        for i in range(64):
            acc[i] = 0
        prepare(column, bias, coefficient, factors, weights, overlay, plan, p, job, offset + first, t & 255, member, whole)
        for step in range(steps):
            stage, chunk = step & (STAGES - 1), step & (CHUNKS - 1)
            ptx.barrier_wait(bar + 8 * stage, (step // STAGES) & 1)
            at_a = stage * STAGE + member * (A_BYTES // 2)
            at_b = stage * STAGE + A_BYTES + side * (B_BYTES // 2)
            start(acc, descriptor(ptx.here(base + at_a)), descriptor(base + at_b), int32(chunk))
            done(acc)
            total = add_sums(total if chunk > 0 else int32(0), sm, at_a // 4, chunk, coefficient, factors, t & 255, member, whole)
            # by every thread, since all have read of it: racecheck does not follow a syncwarp and an arrival of lane 0, and this is as fast
            ptx.barrier_arrive(bar + EMPTY + 8 * stage)
            if lane == 0 and cuda.atomic.add(left, stage, 1) & 15 == 15 and step + STAGES < steps:
                ptx.barrier_wait(bar + EMPTY + 8 * stage, (step // STAGES) & 1)
                fill(base, bar, step + STAGES, first, every, x, packed, at)
            if chunk == CHUNKS - 1:
                unit = first + (step // CHUNKS) * every
                to = int64(unit) * ROW_WORDS + (row >> 3) * (2 * H) + side * 256 + lane
                total = quad_sum(total)
                if MODE == 1 and not whole:
                    total = int32(total >> int32(6))
                if q == 0:
                    row_sums[member * 64 + ((t & 255) >> 2)] = total
                ptx.named_barrier(1 + member, 256)
                s0, s1 = int32(row_sums[row] * sign), int32(row_sums[row + 8] * sign)
                at_noise = ptx.shared_address(column, member * 256 + side * 128) + q * 16
                at_bias = ptx.shared_address(bias, member * 256 + side * 128) + q * 16
                for j in range(8):
                    n, b = four(at_noise + j * 64), ptx.load_shared4(at_bias + j * 64)
                    for half in range(2):
                        s = s0 if half == 0 else s1
                        word = h[uint64(to + j * 32 + half * (2 * H))]
                        for k in range(4):
                            i = 8 * j + half * 2 + (k >> 1) * 4 + (k & 1)
                            v = int32(acc[i] + int32(int32(s * n[k]) >> int32(NOISE_SHIFT)))
                            acc[i] = int32(int32(v >> int32(SHIFT)) + int32(byte(word, k) + b[k]))
                scale(acc, tops, row * 2, side, q, 1 + member)
                store(acc, h, to)
                prepare(column, bias, coefficient, factors, weights, overlay, plan, p, job, offset + unit + every, t & 255, member,
                        whole)

    return down, STAGES * STAGE


def _attention_kernel(cfg, nz):
    """a of q, k, v from _square_kernel, and the sums sb of a. Launch [pairs], 256 threads; a warp has 16 positions of one member, all
    heads.

    As in egg_kernels, with a whole row of scores in registers, and the byte limbs summed by Horner's rule: 64 positions fit int32.
    plan as egg_kernels._sums_kernel."""
    H, T, D, HEADS, SHIFT, MODE = HIDDEN_DIM, SEQ_LEN, cfg.HEAD_DIM, cfg.N_HEADS, cfg.SHIFT_ATTN, cfg.ADAPTIVE_NOISE_MODE
    MOST, COPIES, LIMBS, LOWEST = _exp_entries(cfg) - 1, _copies(cfg), (cfg.SOFTMAX_SCALE_BIT + 8) // 8, -2 ** 31
    EXPS, QUERY, FACTORS = (MOST + 1) * COPIES, D // 8, H if MODE == 2 else 1
    HALF, BELOW_ONE = 2 * MEMBER_BYTES, 1 - 2.0 ** -22
    factor, input_coefficient, input_term, four = nz.factor, nz.input_coefficient, nz.input_term, _load4(nz)

    @device
    def quotient(num, den, reciprocal):
        """num / den toward zero, |num| <= 127 den <= 127 * 2^24; `reciprocal` is a little small: the estimate is right or one less."""
        size = abs(num)
        q = int32(ptx.float_bits(ptx.fma_down(float32(size), reciprocal, float32(1 << 23))) - int32(0x4B000000))
        q = int32(q + 1) if int32(size - int32(q * den)) >= den else q
        return q if num >= 0 else int32(-q)

    @cuda.jit(launch_bounds=256)
    def attention(call, plan, overlay, job, offset, exps, q_in, k_in, v_in, a, sb):
        sm = cuda.shared.array(0, int32)                     # keys, values of the pair
        exp = cuda.shared.array(EXPS, int32)
        coefficient, factors = cuda.shared.array(256, int32), cuda.shared.array(FACTORS, float32)
        barriers = cuda.shared.array(1, int64)
        t, unit = cuda.threadIdx.x, cuda.blockIdx.x
        lane, warp = t & 31, t >> 5
        base, bar = ptx.shared_address(sm, 0), ptx.shared_address(barriers, 0)
        if t == 0:
            ptx.barrier_init(bar, 1)
            ptx.barrier_fence()
            ptx.barrier_expect(bar, 2 * HALF)
            ptx.copy_bulk(base, k_in, int64(unit) * ROW_WORDS, HALF, bar)
            ptx.copy_bulk(base + HALF, v_in, int64(unit) * ROW_WORDS, HALF, bar)
        for i in range(t, EXPS, 256):
            exp[i] = exps[i // COPIES]
        stream = uint32(uint32(uint32(job[0] + job[1]) + uint32(offset + unit)) + uint32(plan[call * PLAN + 12]))
        entry = overlay[plan[call * PLAN + 13] + t]
        coefficient[t] = input_coefficient(entry, stream, t)
        if MODE == 2:
            factors[t] = factor(entry, stream, t)
        cuda.syncthreads()
        ptx.barrier_wait(bar, 0)
        member, block = warp >> 2, warp & 3
        row = warp * 16 + (lane >> 2)
        position, two = block * 16 + (lane >> 2), (lane & 3) * 2
        at = int64(unit) * ROW_WORDS + (row >> 3) * (2 * H) + lane
        wide = block >= 2                                    # sees more than 32 positions
        copy = lane & (COPIES - 1)
        at_c = ptx.shared_address(coefficient, (lane & 3) * 4)
        query, s, limbs = cuda.local.array(QUERY, int32), cuda.local.array(32, int32), cuda.local.array(24, int32)
        o = cuda.local.array(8, int32)
        x = cuda.local.array(4, int32)
        sum0, sum1 = int32(0), int32(0)
        for head in range(HEADS):
            for i in range(D // 32):
                where = at + (head * (D // 16) + 2 * i) * 32
                query[4 * i], query[4 * i + 1] = q_in[uint64(where)], q_in[uint64(where + 2 * H)]
                query[4 * i + 2], query[4 * i + 3] = q_in[uint64(where + 32)], q_in[uint64(where + 2 * H + 32)]
            top0, top1 = int32(LOWEST), int32(LOWEST)
            for j in range(8):
                if j < 4 or wide:
                    r = (int32(0), int32(0), int32(0), int32(0))
                    for i in range(D // 32):
                        where = uint32((member * 8 + j) * (2 * H) + (head * (D // 16) + 2 * i) * 32 + lane)
                        r = ptx.mma_s8(query[4 * i], query[4 * i + 1], query[4 * i + 2], query[4 * i + 3], sm[where],
                                           sm[uint32(where + 32)], r[0], r[1], r[2], r[3])
                    for e in range(2):
                        c = j * 8 + two + e
                        top0 = int32(max(top0, r[e])) if c <= position else top0
                        top1 = int32(max(top1, r[2 + e])) if c <= position + 8 else top1
                    s[4 * j], s[4 * j + 1], s[4 * j + 2], s[4 * j + 3] = r[0], r[1], r[2], r[3]
            top0, top1 = int32(quad_max(top0) >> int32(SHIFT)), int32(quad_max(top1) >> int32(SHIFT))
            den0, den1 = int32(0), int32(0)
            for j in range(8):
                if j < 4 or wide:
                    for e in range(2):
                        c = j * 8 + two + e
                        d = uint32(min(uint32(int32(top0 - int32(s[4 * j + e] >> int32(SHIFT)))), uint32(MOST)))
                        w = exp[uint32(uint32(d * uint32(COPIES)) + uint32(copy))]
                        w = w if c <= position else int32(0)
                        s[4 * j + e] = w
                        den0 = int32(den0 + w)
                        d = uint32(min(uint32(int32(top1 - int32(s[4 * j + 2 + e] >> int32(SHIFT)))), uint32(MOST)))
                        w = exp[uint32(uint32(d * uint32(COPIES)) + uint32(copy))]
                        w = w if c <= position + 8 else int32(0)
                        s[4 * j + 2 + e] = w
                        den1 = int32(den1 + w)
            den0, den1 = quad_sum(den0), quad_sum(den1)
            reciprocal0, reciprocal1 = float32(float32(BELOW_ONE) / float32(den0)), float32(float32(BELOW_ONE) / float32(den1))
            for g in range(2):
                if g == 0 or wide:
                    for n in range(LIMBS):
                        pick = n * 0x11 + 0x40
                        for i in range(4):
                            m = g * 16 + (i >> 1) * 8 + (i & 1) * 2
                            limbs[(g * 3 + n) * 4 + i] = ptx.byte_permute(ptx.byte_permute(s[m], s[m + 1], pick),
                                                                              ptx.byte_permute(s[m + 4], s[m + 5], pick), 0x5410)
            for d in range(D // 16):
                channel = head * D + d * 16
                for tile in range(2):
                    r = (int32(0), int32(0), int32(0), int32(0))
                    v = ptx.load_matrix4(int32(base + HALF + (member * H + channel + tile * 8) * T + lane * 16))
                    for i in range(LIMBS):
                        n = LIMBS - 1 - i
                        r = (int32(r[0] << int32(8)), int32(r[1] << int32(8)), int32(r[2] << int32(8)), int32(r[3] << int32(8)))
                        m = n * 4
                        r = ptx.mma_u8s8(limbs[m], limbs[m + 1], limbs[m + 2], limbs[m + 3], v[0], v[1], r[0], r[1], r[2], r[3])
                        if wide:
                            m = n * 4 + 12
                            r = ptx.mma_u8s8(limbs[m], limbs[m + 1], limbs[m + 2], limbs[m + 3], v[2], v[3], r[0], r[1], r[2], r[3])
                    for k in range(4):
                        o[tile * 4 + k] = r[k]
                c = four(at_c + channel * 4)
                for half in range(2):
                    for k in range(4):
                        m = (k >> 1) * 4 + half * 2 + (k & 1)
                        x[k] = quotient(o[m], den0, reciprocal0) if half == 0 else quotient(o[m], den1, reciprocal1)
                        f = factors[channel + (lane & 3) * 4 + k] if MODE == 2 else float32(0)
                        if half == 0:
                            sum0 = int32(sum0 + input_term(x[k], c[k], f))
                        else:
                            sum1 = int32(sum1 + input_term(x[k], c[k], f))
                    a[uint64(at + half * (2 * H) + (channel >> 4) * 32)] = pack4(x[0], x[1], x[2], x[3])
        sum0, sum1 = quad_sum(sum0), quad_sum(sum1)
        if (lane & 3) == 0:
            sb[unit * 128 + row], sb[unit * 128 + row + 8] = sum0, sum1

    return attention, 2 * HALF


def _pack_kernel():
    """A canonical matrix [K / 4, N, 4] as the fast path wants it, see there. kind: 0 square, 1 up, 2 down."""
    H = HIDDEN_DIM

    @cuda.jit(launch_bounds=256)
    def pack(weights, packed, source, target, kind, n):
        i = cuda.grid(1)
        if i < n * (H if kind == 2 else H // 4):
            chunk, K = 0, H
            if kind == 2:
                chunk, i, K = i // (H * H // 8), i % (H * H // 8), H // 2
            block, rest = i // (2 * K), i % (2 * K)
            col, k4 = block * 8 + (rest & 31) // 4, (rest // 32) * 4 + (rest & 3)
            col = (col & ~15) | ((col & 6) << 1) | ((col & 8) >> 2) | (col & 1)
            if kind == 1:
                col = ((col >> 5) & 3) * H + (col >> 7) * 32 + (col & 31)
            if kind == 2:
                k4 = (k4 >> 3) * (H // 4) + chunk * 8 + (k4 & 7)
            packed[target + chunk * (H * H // 8) + i] = weights[source + k4 * n + col]

    return pack


# --- the pass ------------------------------------------------------------------------------------------------------------------------

EMBED_TYPES = (int64, A32, A8, A32, A8, A32, AU32, int64, A32, A64)
ATTENTION_TYPES = (int64, A32, A8, AU32, int64, A32, A32, A32, A32, A32, A32)
NORM_TYPES = (int64, A32, A8, A8, AU32, int64, int64, A32, A32, A32)
UP_TYPES = (int64, int64, A32, A8, A32, A8, AU32, int64, int64, A8, A32, A32, A32)
SQUARE_TYPES = (int64, int64, A32, A32, A8, AU32, int64, int64, int64, A32, A32, A32, A32, A32, A32, A32)
DOWN_TYPES = (int64, int64, A32, A8, A32, A8, AU32, int64, int64, A32, A32)
HEAD_TYPES = (int64, A32, A32, A8, A32, int64, AU32, int64, A32, A32, A32, A64)
PACK_TYPES = (A32, A32, int64, int64, int64, int64)


class Hopper:
    """The noisy forward pass on cc 9.0 at T = 64, H = 256."""

    def __init__(self, cfg, packing, silent):
        nz = build_noise(cfg, silent)
        self.kernels = []

        def add(made, signature):
            kernel, shared = made if isinstance(made, tuple) else (made, 0)
            self.kernels.append((kernel, signature, shared))
            return kernel, shared

        self.embed = add(_embed_kernel(cfg, nz), EMBED_TYPES)
        self.norms = {streams: add(_norm_kernel(cfg, nz, streams), NORM_TYPES) for streams in (1, 3)}
        self.up = add(_up_kernel(cfg, nz), UP_TYPES)
        self.down = add(_down_kernel(cfg, nz), DOWN_TYPES)
        self.squares = {kind: add(_square_kernel(cfg, nz, kind), SQUARE_TYPES) for kind in ("qkv", "o")}
        self.attention = add(_attention_kernel(cfg, nz), ATTENTION_TYPES)
        self.head = add(_head_kernel(cfg, nz), HEAD_TYPES)
        self.pack = add(_pack_kernel(), PACK_TYPES)
        self.at, self.copies, end = {}, [], packing.bytes
        matrices = [t for t in parameters.tensors(cfg) if t.hidden]
        for t in sorted(matrices, key=lambda t: t.layer):    # a layer's q, k, v lie together
            self.at[t.name, t.layer] = end // 4
            kind = 2 if t.rows > t.cols else 1 if t.cols > t.rows else 0
            self.copies.append((t.weights // 4, end // 4, kind, t.cols, t.size))
            end += t.size
        self.packed_bytes = end

    def layout(self, units):
        units = units + units % 2
        rows = units * 128
        size = rows * HIDDEN_DIM
        sizes = dict(h=size, n=size, sb=12 * rows, u=4 * size, q=size, k=size, v=size)
        out, end = {}, 0
        for name, size in sizes.items():
            out[name] = (end, end + size)
            end = aligned(end + size)
        return out, rows, end

    def launch_pack(self, stream, weights, packed):
        for source, target, kind, columns, size in self.copies:
            kernel = self.pack[0]
            kernel[blocks(size // 4, 256), 256, stream](weights.view(np.int32), packed.view(np.int32), source, target, kind, columns)

    def launch(self, stream, plan, tables, weights, packed, overlay, windows, count, job, offset, units, scratch, losses):
        layout, stride, _ = self.layout(units)
        words = {name: scratch[a:b].view(np.int32) for name, (a, b) in layout.items()}
        h, n, sb, u, q, k, v = (words[name] for name in ("h", "n", "sb", "u", "q", "k", "v"))
        packed, processors = packed.view(np.int32), cuda.get_current_device().MULTIPROCESSOR_COUNT

        def norm(call, streams):
            self.norms[streams][0][units, 256, stream](call, tables.plan, weights, overlay, job, offset, stride, h, n, sb)

        def square(kind, call, name, layer):
            kernel, shared = self.squares[kind]
            grid = processors // 3 * 3 if kind == "qkv" else processors
            kernel[grid, 512, stream, shared](
                call, self.at[name, layer], tables.plan, packed, overlay, job, offset, units, stride, tables.rope, n, sb, h, q, k, v)

        def mlp(calls, up, down, layer):
            kernel, shared = self.up
            kernel[processors, 512, stream, shared](
                calls.up, self.at[up, layer], tables.plan, weights, packed, overlay, job, offset, units, tables.gelu, n, sb, u)
            kernel, shared = self.down
            kernel[processors, 512, stream, shared](
                calls.down, self.at[down, layer], tables.plan, weights, packed, overlay, job, offset, units, u, h)

        self.embed[0][units, 256, stream](plan.embed, tables.plan, weights, packed, overlay, windows, job, offset, h, losses)
        norm(plan.embed, 1)
        mlp(plan.emb_mlp, "w_emb_mlp_up", "w_emb_mlp_down", 0)
        for i, layer in enumerate(plan.layers):
            norm(layer.ln_1, 3)
            square("qkv", layer.qkv, "w_q", i)
            kernel, shared = self.attention
            kernel[units, 256, stream, shared](layer.sums_o, tables.plan, overlay, job, offset, tables.exps, q, k, v, n, sb)
            square("o", layer.o, "w_o", i)
            norm(layer.ln_2, 1)
            mlp(layer.mlp, "w_up", "w_down", i)
        norm(plan.ln_f, 1)
        kernel, shared = self.head
        kernel[blocks(units, 2), 512, stream, shared](
            plan.head, tables.plan, packed, overlay, windows, units, job, offset, tables.exps, n, sb, losses)
