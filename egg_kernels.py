"""The transformer's forward pass on CUDA (SPEC 2 to 7): what the engine calls, validation and single-token generation.
`kernels.transformer` has the evaluation of members, with noise, `kernels.gru` the recurrent model with the same
interface.

What the CUDA engine uses:

    noise = build_noise(cfg)              device functions with the constants frozen, see there
    forward = build_forward(cfg, cc, shared_limit)
        cc              (major, minor) of the device; shared_limit: bytes of dynamic shared memory a block may have
        .packed_bytes   size of the int8 device array that holds the matrices in the order the tensor cores want
        .kernels        {verb: [(dispatcher, signature, dynamic shared bytes)]}: compile those of a verb
                        (kernels.ptx.allow_shared) before its first launch; "load": pack, "step": evaluate, "validate",
                        "generate": token
        .tables()       uploads the constant tables; call once on the device, before the launches below
        .scratch_bytes(pairs), .clean_scratch_bytes(windows, T)    size of the int8 device array `scratch` of a call
        .pack(stream, weights, packed)
                        after every change of the weights. weights: int8, the flat canonical array of
                        model.parameters.State
        .evaluate(stream, weights, packed, overlay, windows, job, offset, pairs, scratch, losses)
                        losses[2 i], [2 i + 1] (int64) of pairs job[1] + offset + i, 0 <= i < pairs: even and odd
                        member.
                        overlay: int8, flat as in State; windows: int32, model.rules.windows of these pairs;
                        job: uint32 [2] on the device = seed of the step, first pair of the job; offset, pairs: Python
                        ints
        .validate(stream, weights, packed, windows, count, T, scratch, nats)
                        nats[i T + t] (float64): cross-entropy of token t + 1 of window i, without noise; windows: int32
                        [count, T + 1]
        .cache_bytes(positions), .token_scratch_bytes
        .token(stream, weights, packed, tokens, at, positions, rope, cache, scratch, logits)
                        logits (int32 [V]) after tokens[at[0]] (int32 arrays on the device) at position at[0], without
                        noise; the keys and values of positions 0..at[0] - 1 must be in `cache`, those of at[0] are
                        added. rope: device copy of model.integer_tables.rope_table(cfg, positions), int32, flat

Launches only enqueue work on `stream`, allocate nothing and can be captured in a graph. All arrays are 1-D contiguous
device arrays.
"""

import math
from types import SimpleNamespace

import numpy as np
from numba import cuda, float64, int8, int32, int64, uint32, uint64

from kernels import ptx
from kernels import transformer
from kernels.parts import (A8, A32, AF64, PLAN, TILE, amax_scale, blocks, byte, clip, ntt_functions,
                           pack4, quad_max, quad_sum, quantise)
from kernels import products
from kernels.products import CLEAN_EXPS, Pass, block_sum, chunk, matrix_vector, ranges, tile_functions
from kernels.rules import build_noise, device, divide
from model import integer_tables


# --- validation: one kernel a phase, activations in device memory ----------------------------------------------------
#
# Row = (pair of windows, window, position), so a pair is 2 T consecutive rows; activations and packed matrices (one row
# an output column) are core matrices (kernels.ptx) and every fragment or piece of a row is 16 aligned bytes.
# A call's run-time constants (where its parameters lie, their seed offsets) are a row of the plan.

def _rows_kernel(cfg, nz, source):
    """h = the embedding look-up, or amax(h + product); then n = ln(h).

    source: "embedding", "attention" (no bias) or "mlp". Launch [pairs of windows, row blocks], 256 threads; four lanes
    share a row.
    plan: 0 ln, 4 ln bias, 8 bias (of each the first word: its weights); embedding: 20 packed."""
    H, T = cfg.HIDDEN_DIM, cfg.SEQ_LEN
    EMBED, BIAS = source == "embedding", source != "attention"
    SHIFT = cfg.SHIFT_OUT if source == "attention" else cfg.SHIFT_MLP_DOWN
    ROWS, WORDS = min(2 * T, 128), 3 * H
    NTT = EMBED and cfg.NTT_MODE != 0
    coefficient, look_up = ntt_functions(cfg, nz, False, cfg.NTT_CAUSAL)

    if EMBED:
        @device
        def values(sm, word, y, at, col, weights, coef):
            """The four elements of a word."""
            out = cuda.local.array(4, int32)
            for k in range(4):
                v = byte(word, k)
                if NTT:
                    v = int32(v + look_up(weights, weights, uint32(0), coef, col + k)[0])
                out[k] = clip(int32(v + sm[2 * H + col + k]))
            return out[0], out[1], out[2], out[3]
    else:
        @device
        def values(sm, word, y, at, col, weights, coef):
            """The four elements of a word before amax."""
            out = cuda.local.array(4, int32)
            for k in range(4):
                v = int32(byte(word, k) + int32(y[at + k] >> int32(SHIFT)))
                out[k] = int32(v + sm[2 * H + col + k]) if BIAS else v
            return out[0], out[1], out[2], out[3]

    @cuda.jit(launch_bounds=256)
    def rows(call, plan, weights, packed, windows, count, h, n, y):
        sm = cuda.shared.array(WORDS, int32)                 # ln, its bias, bias
        t, unit = cuda.threadIdx.x, cuda.blockIdx.x
        first = cuda.blockIdx.y * ROWS
        p = call * PLAN
        for i in range(t, H, 256):
            sm[i], sm[H + i] = weights[plan[p] + i], weights[plan[p + 4] + i]
            if BIAS:
                sm[2 * H + i] = weights[plan[p + 8] + i]
        cuda.syncthreads()
        lane = t & 31
        q = lane & 3
        for group in range(t >> 5, ROWS // 8, 8):
            here = first + group * 8
            if here < 2 * T:
                member = 1 if here >= T else 0
                row = unit * (2 * T) + here + (lane >> 2)
                at_h = (row >> 3) * (2 * H) + lane           # word of the row's piece 0; pieces are 32 words apart
                at_e, coef = int64(0), int32(0)
                if EMBED:
                    window = min(2 * unit + member, count - 1)
                    token = windows[window * (T + 1) + here + (lane >> 2) - member * T]
                    at_e = plan[p + 20] + (token >> 3) * (2 * H) + (token & 7) * 4 + q
                    if NTT:
                        coef = coefficient(windows, window * (T + 1), here + (lane >> 2) - member * T)
                total = int32(0)
                if EMBED:
                    for piece in range(H // 16):
                        a, b, c, d = values(sm, packed[at_e + piece * 32], y, 0, piece * 16 + q * 4, weights, coef)
                        h[at_h + piece * 32] = pack4(a, b, c, d)
                        total = int32(total + int32(int32(abs(a) + abs(b)) + int32(abs(c) + abs(d))))
                else:
                    top = int32(0)
                    for piece in range(H // 16):
                        col = piece * 16 + q * 4
                        a, b, c, d = values(sm, h[at_h + piece * 32], y, row * H + col, col, weights, coef)
                        top = int32(max(top, max(max(abs(a), abs(b)), max(abs(c), abs(d)))))
                    scale = amax_scale(quad_max(top))
                    for piece in range(H // 16):
                        col = piece * 16 + q * 4
                        a, b, c, d = values(sm, h[at_h + piece * 32], y, row * H + col, col, weights, coef)
                        a, b, c, d = quantise(a, scale), quantise(b, scale), quantise(c, scale), quantise(d, scale)
                        h[at_h + piece * 32] = pack4(a, b, c, d)
                        total = int32(total + int32(int32(abs(a) + abs(b)) + int32(abs(c) + abs(d))))
                mean = int32(max(int32(uint32(quad_sum(total)) // uint32(H)), int32(1)))
                x = cuda.local.array(4, int32)
                for piece in range(H // 16):
                    word = h[at_h + piece * 32]
                    for k in range(4):
                        i = piece * 16 + q * 4 + k
                        x[k] = clip(int32(divide(int32(byte(word, k) * sm[i]), mean) + sm[H + i]))
                    n[at_h + piece * 32] = pack4(x[0], x[1], x[2], x[3])

    return rows


def _product_kernel(cfg, K, N, up):
    """y = x W, int32 [z][rows][N]; with `up`: u = GELU[clip((y >> SHIFT_MLP_UP) + bias)], int8 core matrices of N bytes
    a row.

    Launch [row tiles, column tiles, matrices], 256 threads. plan, 8 entries a matrix: 0 packed words, 1 seed A, 2
    overlay A, 3.. the bias (vector_function)."""
    SHIFT, KC = cfg.SHIFT_MLP_UP, chunk(K)
    fetch, _, walk = tile_functions(K, KC)

    @cuda.jit(launch_bounds=256)
    def product(call, plan, weights, packed, stride, gelu, x, y, u):
        sm = cuda.shared.array(0, int32)
        table = cuda.shared.array(256, int32)
        t, z = cuda.threadIdx.x, cuda.blockIdx.z
        lane, warp = t & 31, t >> 5
        row0, col0 = cuda.blockIdx.x * TILE, cuda.blockIdx.y * TILE
        p = call * PLAN + z * 8
        at = ptx.shared_address(sm, 0)
        at_a, at_b = int64(row0) * (K // 4), plan[p] + int64(col0) * (K // 4)
        fetch(at, x, at_a, packed, at_b, 0, t)
        ptx.copy_commit()
        if up:
            table[t] = gelu[t]
        acc = cuda.local.array(64, int32)
        walk(acc, at, x, at_a, packed, at_b, warp, lane, t)
        for i in range(4):
            row = row0 + (warp >> 1) * 32 + i * 8 + (lane >> 2)
            for j in range(8):
                for k in range(2):
                    v = acc[((i >> 1) * 8 + j) * 4 + (i & 1) * 2 + k]
                    c = col0 + (warp & 1) * 64 + j * 8 + (lane & 3) * 2 + k
                    if up:
                        v = clip(int32(int32(v >> int32(SHIFT)) + weights[plan[p + 3] + c]))
                        u[uint64((row >> 3) * (8 * N) + (c >> 4) * 128 + (row & 7) * 16 + (c & 15))] = table[v & 255]
                    elif c < N:
                        y[uint64((z * stride + row) * N + c)] = v

    return product, 4 * TILE * KC


def _rotate_kernel(cfg):
    """q, k, v int8 from y int32 [3][rows][H]: rotary embedding of q and k, amax of each. q, k as core matrices; v
    transposed, core matrices of one row a channel, positions permuted within 32 as the weights' mma fragments hold
    them. Launch [rows / 64, 3]."""
    H, T, D, BIT = cfg.HIDDEN_DIM, cfg.SEQ_LEN, cfg.HEAD_DIM, cfg.ROPE_SCALE_BIT
    TP = (T + 31) // 32 * 32

    @device
    def turn(y, at, rope, at_rope, rotate):
        e, o = y[at], y[at + 1]
        if not rotate:
            return e, o
        cos, sin, half = int64(rope[at_rope]), int64(rope[at_rope + 1]), int64(1) << int64(BIT - 1)
        return (int32((int64(e) * cos - int64(o) * sin + half) >> int64(BIT)),
                int32((int64(e) * sin + int64(o) * cos + half) >> int64(BIT)))

    @cuda.jit(launch_bounds=256)
    def rotate(rows, stride, rope, y, q, k, v):
        t, which = cuda.threadIdx.x, cuda.blockIdx.y
        lane = t & 31
        row = cuda.blockIdx.x * 64 + (t >> 5) * 8 + (lane >> 2)
        if row < rows:
            position = row % T
            at_y = int64(which * stride + row) * H
            top = int32(0)
            for piece in range(H // 16):
                col = piece * 16 + (lane & 3) * 4
                for pair in range(2):
                    a, b = turn(y, at_y + col + 2 * pair, rope, position * D + (col + 2 * pair) % D, which < 2)
                    top = int32(max(top, max(abs(a), abs(b))))
            scale = amax_scale(quad_max(top))
            slot = position & 31
            slot = ((position & ~31) | ((slot >> 4) << 4) | (((slot & 7) >> 1) << 2) | (((slot >> 3) & 1) << 1)
                    | (slot & 1))
            for piece in range(H // 16):
                col = piece * 16 + (lane & 3) * 4
                a, b = turn(y, at_y + col, rope, position * D + col % D, which < 2)
                c, d = turn(y, at_y + col + 2, rope, position * D + (col + 2) % D, which < 2)
                a, b, c, d = quantise(a, scale), quantise(b, scale), quantise(c, scale), quantise(d, scale)
                if which == 0:
                    q[(row >> 3) * (2 * H) + piece * 32 + lane] = pack4(a, b, c, d)
                elif which == 1:
                    k[(row >> 3) * (2 * H) + piece * 32 + lane] = pack4(a, b, c, d)
                else:
                    at = (int64(row // T) * H + (col & ~7)) * TP + (slot >> 4) * 128 + (col & 7) * 16 + (slot & 15)
                    v[at], v[at + 16], v[at + 32], v[at + 48] = a, b, c, d

    return rotate


def _attention_kernel(cfg):
    """a int8 core matrices from q, k, v of _rotate_kernel: a warp makes 16 positions of one head. Launch 128 threads, a
    warp a task.

    Scores are made twice, first for the row maxima. A score fragment of four column tiles is, byte for byte, an A
    fragment over 32 positions (in the permuted order v is stored in), so the weights go into their byte-limb products
    without leaving registers."""
    H, T, D, HEADS, SHIFT = cfg.HIDDEN_DIM, cfg.SEQ_LEN, cfg.HEAD_DIM, cfg.N_HEADS, cfg.SHIFT_ATTN
    TP, BLOCKS, LIMBS = (T + 31) // 32 * 32, (T + 15) // 16, (cfg.SOFTMAX_SCALE_BIT + 8) // 8
    PART = min(D, 64)                                       # channels accumulated together
    TILES, LOWEST = PART // 8, -2 ** 31
    QUERY, SUMS = D // 8, 3 * TILES * 4

    @device
    def scores(s, query, k, at):
        """s[4 j ...] for the 32 positions whose keys start at word `at`."""
        for j in range(4):
            c = (int32(0), int32(0), int32(0), int32(0))
            for i in range(D // 32):
                where = at + j * (2 * H) + i * 64
                c = ptx.mma_s8(query[4 * i], query[4 * i + 1], query[4 * i + 2], query[4 * i + 3], k[where],
                               k[where + 32], c[0], c[1], c[2], c[3])
            s[4 * j], s[4 * j + 1], s[4 * j + 2], s[4 * j + 3] = c[0], c[1], c[2], c[3]

    @cuda.jit(launch_bounds=128)
    def attention(units, exps, q, k, v, a):
        exp = cuda.shared.array(256, int32)
        t = cuda.threadIdx.x
        exp[t], exp[t + 128] = exps[t], exps[t + 128]
        cuda.syncthreads()
        lane = t & 31
        task = cuda.blockIdx.x * 4 + (t >> 5)
        block, head, member = task % BLOCKS, (task // BLOCKS) % HEADS, task // (BLOCKS * HEADS)
        if member >= 2 * units:
            return
        row0 = member * T + block * 16
        piece = head * (D // 16)
        position, two = block * 16 + (lane >> 2), (lane & 3) * 2
        query = cuda.local.array(QUERY, int32)
        for i in range(D // 32):
            at = (row0 >> 3) * (2 * H) + (piece + 2 * i) * 32 + lane
            query[4 * i], query[4 * i + 1] = q[at], q[at + 2 * H]
            query[4 * i + 2], query[4 * i + 3] = q[at + 32], q[at + 2 * H + 32]
        at_k = ((member * T) >> 3) * (2 * H) + piece * 32 + lane
        s = cuda.local.array(16, int32)
        top0, top1 = int32(LOWEST), int32(LOWEST)
        groups = (block * 16 + 15) // 32 + 1
        for group in range(groups):
            scores(s, query, k, at_k + group * (8 * H))
            for j in range(4):
                for e in range(2):
                    c = group * 32 + j * 8 + two + e
                    if c <= position:
                        top0 = int32(max(top0, s[4 * j + e]))
                    if c <= position + 8:
                        top1 = int32(max(top1, s[4 * j + 2 + e]))
        top0, top1 = int32(quad_max(top0) >> int32(SHIFT)), int32(quad_max(top1) >> int32(SHIFT))
        sums = cuda.local.array(SUMS, int32)
        limb = cuda.local.array(4, int32)
        for part in range(D // PART):
            total0, total1 = int32(0), int32(0)
            for i in range(SUMS):
                sums[i] = 0
            for group in range(groups):
                scores(s, query, k, at_k + group * (8 * H))
                for j in range(4):
                    for e in range(2):
                        c = group * 32 + j * 8 + two + e
                        d = int32(min(int32(top0 - int32(s[4 * j + e] >> int32(SHIFT))), int32(255)))
                        w = exp[d] if c <= position else int32(0)
                        s[4 * j + e] = w
                        total0 = int32(total0 + w)
                        d = int32(min(int32(top1 - int32(s[4 * j + 2 + e] >> int32(SHIFT))), int32(255)))
                        w = exp[d] if c <= position + 8 else int32(0)
                        s[4 * j + 2 + e] = w
                        total1 = int32(total1 + w)
                for n in range(LIMBS):
                    pick = n * 0x11 + 0x40
                    # a0, a2 of row g from tiles 0, 1 and 2, 3; a1, a3 the same of row g + 8
                    for i in range(4):
                        m = (i >> 1) * 8 + (i & 1) * 2
                        limb[i] = ptx.byte_permute(ptx.byte_permute(s[m], s[m + 1], pick),
                                                       ptx.byte_permute(s[m + 4], s[m + 5], pick), 0x5410)
                    for d in range(TILES):
                        at = ((int64(member) * H + head * D + part * PART + d * 8) * TP + group * 256) // 4 + lane
                        m = (n * TILES + d) * 4
                        r = ptx.mma_u8s8(limb[0], limb[1], limb[2], limb[3], v[at], v[at + 32],
                                             sums[m], sums[m + 1], sums[m + 2], sums[m + 3])
                        sums[m], sums[m + 1], sums[m + 2], sums[m + 3] = r[0], r[1], r[2], r[3]
            den0, den1 = float(quad_sum(total0)), float(quad_sum(total1))
            for d in range(TILES):
                col = head * D + part * PART + d * 8 + two
                for half in range(2):
                    row = row0 + half * 8 + (lane >> 2)
                    for e in range(2):
                        m = d * 4 + half * 2 + e
                        # exact
                        num = float(sums[m]) + 256.0 * float(sums[TILES * 4 + m]) + 65536.0 * float(sums[TILES * 8 + m])
                        if position + half * 8 < T:
                            a[(row >> 3) * (8 * H) + ((col + e) >> 4) * 128 + (row & 7) * 16 + ((col + e) & 15)] = clip(
                                int32(num / (den1 if half else den0)))

    return attention


def _head_kernel(cfg):
    """The output head of validation: no logit reaches memory; tiles of the vocabulary pass by twice, for the row maxima
    and for the sums.
    nats float64 [rows] is set to the cross-entropy of each position.

    Launch [row tiles], 256 threads. plan: 0 packed words. exps: float64 exponentials of logit differences."""
    H, T, V, SHIFT = cfg.HIDDEN_DIM, cfg.SEQ_LEN, cfg.VOCAB_SIZE, cfg.SHIFT_LOGIT
    KC, LOWEST, SCALE = chunk(H), -2 ** 31, float(cfg.SOFTMAX_EXP_SCALE)
    STAGE, CHUNKS, TILES = 2 * TILE * KC, H // KC, (V + TILE - 1) // TILE
    STEPS, RAGGED = 2 * TILES * CHUNKS, V % TILE != 0
    fetch, multiply, _ = tile_functions(H, KC)

    # A thread has rows r = 0..3, 8 apart, of 16 columns; one call a row, as larger loops over acc would not be unrolled
    # on every card.

    @device
    def largest(acc, r, top, limit):
        """top, and the columns before `limit` of row r; those beyond become the lowest value."""
        for j in range(8):
            for e in range(2):
                i = (r >> 1) * 32 + (r & 1) * 2 + j * 4 + e
                if RAGGED and j * 8 + e >= limit:
                    acc[i] = int32(LOWEST)
                top = int32(max(top, acc[i]))
        return top

    @device
    def weigh(acc, r, top, total, hit, where, limit, exps):
        """Adds the exponentials of row r, whose largest logit is top[r], to total[r]; column `where` is the target."""
        some = float64(0)
        for j in range(8):
            for e in range(2):
                v = int32(acc[(r >> 1) * 32 + (r & 1) * 2 + j * 4 + e] >> int32(SHIFT))
                if not RAGGED or j * 8 + e < limit:
                    some += exps[uint32(min(uint32(int32(top[r] - v)), uint32(CLEAN_EXPS - 1)))]
                if where == j * 8 + e:
                    hit[r] = v
        total[r] += some

    @cuda.jit(launch_bounds=256)
    def head(call, plan, packed, windows, count, rows, exps, x, nats):
        sm = cuda.shared.array(0, int32)
        best, hits = cuda.shared.array((2, 128), int32), cuda.shared.array((2, 128), int32)
        part = cuda.shared.array((2, 128), float64)
        t = cuda.threadIdx.x
        lane, warp = t & 31, t >> 5
        g, q = lane >> 2, lane & 3
        row0 = cuda.blockIdx.x * TILE
        p = call * PLAN
        at = ptx.shared_address(sm, 0)
        at_a = int64(row0) * (H // 4)
        fetch(at, x, at_a, packed, int64(plan[p]), 0, t)
        ptx.copy_commit()
        acc = cuda.local.array(64, int32)
        top, target, hit = cuda.local.array(4, int32), cuda.local.array(4, int32), cuda.local.array(4, int32)
        total = cuda.local.array(4, float64)
        for r in range(4):                                  # this thread's rows
            row = row0 + (warp >> 1) * 32 + r * 8 + g
            window = row // T
            top[r], total[r], hit[r], target[r] = LOWEST, 0, 0, -1
            if row < rows and window < count:
                target[r] = windows[window * (T + 1) + row - window * T + 1]
        for i in range(64):
            acc[i] = 0
        for step in range(STEPS):
            chunk, tile = step % CHUNKS, (step // CHUNKS) % TILES
            if step + 1 < STEPS:
                ahead = ((step + 1) // CHUNKS) % TILES
                fetch(int32(at + ((step + 1) & 1) * STAGE), x, at_a, packed, plan[p] + int64(ahead) * (TILE * H // 4),
                      ((step + 1) % CHUNKS) * KC, t)
            ptx.copy_commit()
            ptx.copy_wait_but_one()
            cuda.syncthreads()
            multiply(acc, int32(at + (step & 1) * STAGE), warp, lane)
            if chunk == CHUNKS - 1:
                col0 = tile * TILE + (warp & 1) * 64 + q * 2
                limit = V - col0
                if step < STEPS // 2:
                    top[0], top[1] = largest(acc, 0, top[0], limit), largest(acc, 1, top[1], limit)
                    top[2], top[3] = largest(acc, 2, top[2], limit), largest(acc, 3, top[3], limit)
                else:
                    weigh(acc, 0, top, total, hit, target[0] - col0, limit, exps)
                    weigh(acc, 1, top, total, hit, target[1] - col0, limit, exps)
                    weigh(acc, 2, top, total, hit, target[2] - col0, limit, exps)
                    weigh(acc, 3, top, total, hit, target[3] - col0, limit, exps)
                if step == STEPS // 2 - 1:                   # rows are shared by two warps: the larger maximum, shifted
                    for r in range(4):
                        m = quad_max(top[r])
                        if q == 0:
                            best[warp & 1, (warp >> 1) * 32 + r * 8 + g] = m
                    cuda.syncthreads()
                    for r in range(4):
                        m = (warp >> 1) * 32 + r * 8 + g
                        top[r] = int32(int32(max(best[0, m], best[1, m])) >> int32(SHIFT))
                for i in range(64):
                    acc[i] = 0
            cuda.syncthreads()
        for r in range(4):
            some = total[r]
            some += cuda.shfl_xor_sync(0xFFFFFFFF, some, 1)
            some += cuda.shfl_xor_sync(0xFFFFFFFF, some, 2)
            h = quad_sum(hit[r])
            if q == 0:
                m = (warp >> 1) * 32 + r * 8 + g
                part[warp & 1, m] = some
                hits[warp & 1, m] = h
                best[warp & 1, m] = top[r]
        cuda.syncthreads()
        row = row0 + t
        if t < TILE and row < rows and row // T < count:
            h = int32(hits[0, t] + hits[1, t])
            nats[row] = math.log(part[0, t] + part[1, t]) + float(int32(best[0, t] - h)) / SCALE

    return head, 2 * STAGE


# --- one token at a time, without noise -------------------------------------------------------------------------------

def _token_kernel(cfg):
    """The hidden state after one more token, as normed for the head: n int8 [H]. One block of 1024 threads; a thread is
    a channel.

    calls int32: rows of the plan in order: embed, then up and down of the first MLP, then for each layer ln_1, qkv, o,
    ln_2, up, down, then ln_f. keys, values: the two halves of the cache, int8 [layers][positions][H]; scores int32
    [heads][positions]."""
    H, D, L, HEADS, SCALE_BIT = cfg.HIDDEN_DIM, cfg.HEAD_DIM, cfg.N_LAYERS, cfg.N_HEADS, cfg.ROPE_SCALE_BIT
    SHIFT_ATTN, SHIFT_OUT, SHIFT_UP, SHIFT_DOWN = cfg.SHIFT_ATTN, cfg.SHIFT_OUT, cfg.SHIFT_MLP_UP, cfg.SHIFT_MLP_DOWN
    WORDS, H4, NTT = H // 4, 4 * H, cfg.NTT_MODE != 0
    coefficient, look_up = ntt_functions(cfg, build_noise(cfg), False, True)

    from_h, from_4h = matrix_vector(H), matrix_vector(4 * H)

    @device
    def block_max(x, part, t):
        x = ptx.warp_max(x)
        cuda.syncthreads()
        if (t & 31) == 0:
            part[t >> 5] = x
        cuda.syncthreads()
        return ptx.warp_max(part[t & 31])

    @device
    def normed(h, weights, plan, p, part, t):
        """Entry t of ln(h), h the thread's own channel."""
        mean = max(block_sum(int32(abs(h)), part, t) // int32(H), 1)
        if t >= H:
            return int32(0)
        product = int32(h * int32(weights[plan[p] + t]))
        quotient = int32(uint32(abs(product)) // uint32(mean))
        return clip(int32((quotient if product >= 0 else int32(-quotient)) + int32(weights[plan[p + 4] + t])))

    @device
    def scaled_down(v, part, t):
        """Entry t of amax(v)."""
        return quantise(v, amax_scale(block_max(int32(abs(v)), part, t)))

    @cuda.jit(launch_bounds=1024)
    def token(calls, plan, weights, packed, tokens, at, positions, rope, exps, gelu, keys, values, key_words, scores,
              out):
        # H, then 4 H bytes: the vectors multiplied next
        words, vector = cuda.shared.array(0, int32), cuda.shared.array(0, int8)
        y = cuda.shared.array(H4, int32)
        part = cuda.shared.array(32, int32)
        top, total = cuda.shared.array(HEADS, int32), cuda.shared.array(HEADS, int64)
        t = cuda.threadIdx.x
        here = at[0]
        token_id = tokens[here]
        p = calls[0] * PLAN
        h, call = int32(0), 1
        if t < H:
            block = plan[p + 20] + (token_id >> 3) * (2 * H) + (t >> 4) * 32 + (token_id & 7) * 4 + ((t >> 2) & 3)
            h = int32(byte(packed[block], t & 3) + int32(weights[plan[p + 8] + t]))
            if NTT:
                h = int32(h + look_up(weights, weights, uint32(0), coefficient(tokens, 0, here), t)[0])
            h = clip(h)
        n = normed(h, weights, plan, p, part, t)
        for layer in range(-1, L):
            if layer >= 0:
                if t < H:
                    vector[t] = n
                    if t < HEADS:
                        top[t], total[t] = -2 ** 31, 0
                cuda.syncthreads()
                p = calls[call] * PLAN
                for which in range(3):
                    from_h(words, 0, packed, plan[p + 8 * which], H, y, which * H, t)
                cuda.syncthreads()
                if t < H and (t & 1) == 0:
                    cos, sin, half = int64(rope[here * D + t % D]), int64(rope[here * D + t % D
                                                                               + 1]), int64(1) << int64(SCALE_BIT - 1)
                    for which in range(2):
                        a, b = int64(y[which * H + t]), int64(y[which * H + t + 1])
                        y[which * H + t] = int32((a * cos - b * sin + half) >> int64(SCALE_BIT))
                        y[which * H + t + 1] = int32((a * sin + b * cos + half) >> int64(SCALE_BIT))
                cuda.syncthreads()
                q = scaled_down(y[t] if t < H else int32(0), part, t)
                k = scaled_down(y[H + t] if t < H else int32(0), part, t)
                v = scaled_down(y[2 * H + t] if t < H else int32(0), part, t)
                base = int64(layer) * positions
                if t < H:
                    vector[t] = q
                    keys[(base + here) * H + t] = k
                    values[(base + here) * H + t] = v
                cuda.syncthreads()
                for task in range(t, HEADS * (here + 1), 1024):
                    head, past = task // (here + 1), task % (here + 1)
                    s = int32(0)
                    for i in range(D // 4):
                        s = ptx.dp4a(key_words[(base + past) * WORDS + head * (D // 4) + i], words[head * (D // 4) + i],
                                     s)
                    scores[head * positions + past] = s
                    cuda.atomic.max(top, head, s)
                cuda.syncthreads()
                for task in range(t, HEADS * (here + 1), 1024):
                    head, past = task // (here + 1), task % (here + 1)
                    d = int32(int32(top[head] >> int32(SHIFT_ATTN))
                              - int32(scores[head * positions + past] >> int32(SHIFT_ATTN)))
                    w = exps[min(d, int32(255))]
                    scores[head * positions + past] = w
                    cuda.atomic.add(total, head, int64(w))
                cuda.syncthreads()
                if t < H:
                    head, num = t // D, int64(0)
                    for past in range(here + 1):
                        num += int64(int32(scores[head * positions + past] * int32(values[(base + past) * H + t])))
                    vector[t] = clip(int32(float(num) / float(total[head])))
                cuda.syncthreads()
                from_h(words, 0, packed, plan[calls[call + 1] * PLAN], H, y, 0, t)
                cuda.syncthreads()
                h = scaled_down(int32(h + int32(y[t] >> int32(SHIFT_OUT))) if t < H else int32(0), part, t)
                n = normed(h, weights, plan, calls[call + 2] * PLAN, part, t)
                call += 3
            if t < H:
                vector[t] = n
            cuda.syncthreads()
            p = calls[call] * PLAN
            from_h(words, 0, packed, plan[p], 4 * H, y, 0, t)
            cuda.syncthreads()
            for i in range(t, 4 * H, 1024):
                vector[H + i] = gelu[clip(int32(int32(y[i] >> int32(SHIFT_UP)) + int32(weights[plan[p + 3] + i])))
                                     & 255]
            cuda.syncthreads()
            from_4h(words, WORDS, packed, plan[calls[call + 1] * PLAN], H, y, 0, t)
            cuda.syncthreads()
            p = calls[call + 2] * PLAN                       # the next norm carries the bias of this product
            if t < H:
                h = int32(int32(h + int32(y[t] >> int32(SHIFT_DOWN))) + int32(weights[plan[p + 8] + t]))
            h = scaled_down(h, part, t)
            n = normed(h, weights, plan, p, part, t)
            call += 3
        if t < H:
            out[t] = n

    return token


# --- the forward pass -------------------------------------------------------------------------------------------------

ROWS_TYPES = (int64, A32, A8, A32, A32, int64, A32, A32, A32)
PRODUCT_TYPES = (int64, A32, A8, A32, int64, A8, A32, A32, A8)
ROTATE_TYPES = (int64, int64, A32, A32, A32, A32, A8)
ATTENTION_TYPES = (int64, A32, A32, A32, A32, A8)
HEAD_TYPES = (int64, A32, A32, A32, int64, int64, AF64, A32, AF64)
TOKEN_TYPES = (A32, A32, A8, A32, A32, A32, int64, A32, A32, A8, A8, A8, A32, A32, A8)


class _Plan(products.Plan):
    """The calls of a forward pass in order."""

    def __init__(self, cfg, packing):
        super().__init__(cfg, packing)
        self.embed = self._add(self._normed("ln_init", 0, "emb_bias", ("w_emb_mlp_up",)) + self._embedding())
        self.emb_mlp = self._mlp(0, "w_emb_mlp_up", "w_emb_mlp_down", "mlp_emb_bias_up", "mlp_emb_bias_down")
        self.layers = []
        before = ("mlp_emb_bias_down", 0)
        for layer in range(cfg.N_LAYERS):
            self.layers.append(SimpleNamespace(
                ln_1=self._add(self._normed("ln_1", layer, before[0], ("w_q", "w_k", "w_v"), before[1])),
                qkv=self._add(sum((self._biased(name, layer) for name in ("w_q", "w_k", "w_v")), [])),
                sums_o=self._add(12 * [0] + self._input("w_o", layer)),
                o=self._add(self._biased("w_o", layer)),
                ln_2=self._add(self._normed("ln_2", layer, None, ("w_up",))),
                mlp=self._mlp(layer, "w_up", "w_down", "mlp_bias_up", "mlp_bias_down")))
            before = ("mlp_bias_down", layer)
        self.ln_f = self._add(self._normed("ln_f", 0, before[0], ("embedding",), before[1]))
        self.head = self._add(self._biased("embedding", 0))

    def token_calls(self):
        """Rows of the plan in the order of the token kernel."""
        calls = [self.embed, self.emb_mlp.up, self.emb_mlp.down]
        for layer in self.layers:
            calls += [layer.ln_1, layer.qkv, layer.o, layer.ln_2, layer.mlp.up, layer.mlp.down]
        return np.array(calls + [self.ln_f], np.int32)

    def _biased(self, name, layer, bias=None):
        return self._matrix(name, layer) + (self._vector(bias, layer) if bias else 4 * [0]) + [0]

    def _normed(self, ln, layer, bias, streams, bias_layer=0):
        entries = self._vector(ln, layer) + self._vector(ln + "_bias", layer)
        entries += self._vector(bias, bias_layer) if bias else 4 * [0]
        return sum((self._input(name, layer) for name in streams), entries) + [0] * (2 * (4 - len(streams)))

    def _embedding(self):
        t = self._tensors["embedding", 0]
        return [self._packing.at["embedding", 0] // 4, t.overlay_a, t.overlay_b]

    def _mlp(self, layer, up, down, bias_up, bias_down):
        return SimpleNamespace(up=self._add(self._biased(up, layer, bias_up) + self._input(down, layer)),
                               sums=self._add(12 * [0] + self._input(down, layer)),
                               down=self._add(self._biased(down, layer, bias_down) + self._input(down, layer)))


class _Clean(Pass):
    """The forward pass without noise, one kernel a phase; a pair is two windows."""

    def __init__(self, cfg):
        super().__init__(cfg)
        nz, H, add = build_noise(cfg), cfg.HIDDEN_DIM, self.add
        self.rows = {source: add(_rows_kernel(cfg, nz, source), ROWS_TYPES)
                     for source in ("embedding", "attention", "mlp")}
        self.square = add(_product_kernel(cfg, H, H, False), PRODUCT_TYPES)
        self.up = add(_product_kernel(cfg, H, 4 * H, True), PRODUCT_TYPES)
        self.down = add(_product_kernel(cfg, 4 * H, H, False), PRODUCT_TYPES)
        self.rotate = add(_rotate_kernel(cfg), ROTATE_TYPES)
        self.attention = add(_attention_kernel(cfg), ATTENTION_TYPES)
        self.head = add(_head_kernel(cfg), HEAD_TYPES)

    def layout(self, units):
        """Byte ranges of the scratch arrays of `units` pairs, and their total."""
        H, T = self.cfg.HIDDEN_DIM, self.cfg.SEQ_LEN
        rows = blocks(units * 2 * T, TILE) * TILE
        out, end = ranges(dict(h=rows * H, n=rows * H, y=12 * rows * H, q=(rows + 32) * H, k=(rows + 32) * H,
                               v=2 * units * H * blocks(T, 32) * 32))
        return out, rows, end

    def launch(self, stream, plan, tables, weights, packed, windows, count, scratch, nats):
        """Enqueues the whole pass over `count` windows."""
        cfg, H, T, units = self.cfg, self.cfg.HIDDEN_DIM, self.cfg.SEQ_LEN, blocks(count, 2)
        layout, stride, _ = self.layout(units)
        part = {name: scratch[a:b] for name, (a, b) in layout.items()}
        words = {name: x.view(np.int32) for name, x in part.items()}
        h, n, y = words["h"], words["n"], words["y"]
        y_down, u = y[:stride * H], part["y"][4 * stride * H:8 * stride * H]
        packed, rows = packed.view(np.int32), units * 2 * T

        def normalise(source, call):
            kernel, shared = self.rows[source]
            kernel[(units, blocks(2 * T, 128)), 256, stream, shared](call, tables.plan, weights, packed, windows, count,
                                                                     h, n, y)

        def product(kernel, call, x, columns, matrices=1, y=y, u=part["v"]):
            kernel, shared = kernel
            kernel[(stride // TILE, blocks(columns, TILE), matrices), 256, stream, shared](
                call, tables.plan, weights, packed, stride, tables.gelu, x, y, u)

        def mlp(calls):
            product(self.up, calls.up, n, 4 * H, u=u)
            product(self.down, calls.down, u.view(np.int32), H, y=y_down)

        normalise("embedding", plan.embed)
        mlp(plan.emb_mlp)
        for layer in plan.layers:
            normalise("mlp", layer.ln_1)
            product(self.square, layer.qkv, n, H, 3)
            self.rotate[0][(blocks(rows, 64), 3), 256, stream](rows, stride, tables.rope, y, words["q"], words["k"],
                                                               part["v"])
            tasks = 2 * units * cfg.N_HEADS * blocks(T, 16)
            self.attention[0][blocks(tasks, 4), 128, stream](units, tables.exps, words["q"], words["k"], words["v"],
                                                             part["n"])
            product(self.square, layer.o, n, H)
            normalise("attention", layer.ln_2)
            mlp(layer.mlp)
        normalise("mlp", plan.ln_f)
        kernel, shared = self.head
        kernel[stride // TILE, 256, stream, shared](plan.head, tables.plan, packed, windows, count, rows,
                                                    tables.clean_exps, n, nats)


class Forward(products.Forward):
    """See the top of this file."""

    def __init__(self, cfg, cc, shared_limit, silent=False):
        SHIFT = cfg.SHIFT_LOGIT

        @device
        def logit(total):
            return int32(total >> int32(SHIFT))

        super().__init__(cfg, cc, _token_kernel(cfg), TOKEN_TYPES, logit)
        self._plan = _Plan(cfg, self._packing)
        card = transformer.Card(tuple(cc) == (9, 0) and cfg.TENSOR_CORES != "mma", shared_limit, cc[0] < 10)
        self._noisy, self._clean = transformer.Noisy(cfg, self._packing, card, silent), _Clean(cfg)
        self._serve()

    def tables(self):
        super().tables(gelu=integer_tables.gelu_table(),
                       rope=integer_tables.rope_table(self.cfg, self.cfg.SEQ_LEN).ravel())

    def scratch_bytes(self, pairs):
        return self._noisy.layout(pairs)[2]

    def clean_scratch_bytes(self, windows, length):
        return self._clean.layout(blocks(windows, 2))[2]

    def evaluate(self, stream, weights, packed, overlay, windows, job, offset, pairs, scratch, losses):
        self._noisy.launch(stream, self._plan, self._tables, weights, packed, overlay, windows, pairs, job, offset,
                           pairs, scratch, losses)

    def validate(self, stream, weights, packed, windows, count, length, scratch, nats):
        self._clean.launch(stream, self._plan, self._tables, weights, packed, windows, count, scratch, nats)

    def cache_bytes(self, positions):
        cfg = self.cfg
        return 2 * cfg.N_LAYERS * positions * cfg.HIDDEN_DIM + 4 * cfg.N_HEADS * positions

    def token(self, stream, weights, packed, tokens, at, positions, rope, cache, scratch, logits):
        cfg, tables = self.cfg, self._tables
        half = cfg.N_LAYERS * positions * cfg.HIDDEN_DIM
        keys, packed = cache[:half], packed.view(np.int32)
        self._token[1, 1024, stream, 5 * cfg.HIDDEN_DIM](
            tables.calls, tables.plan, weights, packed, tokens, at, positions, rope, tables.exps, tables.gelu, keys,
            cache[half:2 * half], keys.view(np.int32), cache[2 * half:].view(np.int32), scratch)
        self._logits[blocks(cfg.VOCAB_SIZE, 64), 256, stream](
            self._packing.at["embedding", 0] // 4, packed, scratch.view(np.int32), logits)


def build_forward(cfg, cc, shared_limit, silent=False):
    """The forward pass of a configuration on a device: see the top of this file. silent: as build_noise."""
    if cfg.MODEL == "gru":
        from kernels import gru                                # it builds on this module
        return gru.Forward(cfg, cc, shared_limit, silent)
    return Forward(cfg, cc, shared_limit, silent)
