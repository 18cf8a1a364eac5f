"""The recurrent model (engine.cpu_gru) on CUDA, with the interface of egg_kernels.Forward and the same bits as the CPU.

A layer reads the whole window before the next begins. Then only two of its six products follow the positions one by
one; the others are plain matrix products over all members times positions, whose weights are fetched once for 128 rows.
Position after position they would be fetched for every token: 4.8 MB times 100 positions a block of members, far beyond
what the second-level cache can give. The products with the state are one kernel a layer: a block has the states of some
sequences in shared memory and takes them through all positions; U_f and U_h (128 KB at H = 256) come from the caches,
tile by tile in the order of the tensor cores.

Row = (pair, member, position), as in egg_kernels: a pair ("unit") is 2 n consecutive rows for n positions, without
noise two sequences. x, the gates, the candidates and the logits lie row by row; what is multiplied lies as core
matrices (kernels.ptx). What is not recurrent runs over some units at a time, so that what passes between its kernels
stays in the second-level cache. """

import math
from types import SimpleNamespace

import numpy as np
from numba import cuda, float32, float64, int16, int32, int64, types, uint32

from kernels import gru_hopper
from kernels import gru_narrow
from kernels import products
from kernels import ptx
from kernels.parts import (A32, A64, A8, AF64, AU32, PLAN, TILE, aligned, blocks, byte, clip, pack4, quad_sum,
                           unrolled, vector_function)
from kernels.products import Pass, block_sum, chunk, matrix_vector, ranges, tile_functions, units_in_tile
from kernels.rules import NORMS, build_noise, device, loss_function
from model import parameters

A16 = types.Array(int16, 1, "C")
# rows that go through products, sums and norms together: 4 H times as many bytes fit the cache at H = 256
SLICE = 40960
# sequences a block of the recurrence may take, the most that shared memory allows; 32 leave room for a second block
STATE_ROWS = (32, 16)


# --- small device functions -------------------------------------------------------------------------------------------

quotient, open_gate, gated, next_state = NORMS.quotient, NORMS.gate, NORMS.gated, NORMS.next_state


def divide_function(d):
    """Device function: clip(y / d rounded down) for a constant d; a shift where d is a power of two."""
    SHIFT, RECIPROCAL = d.bit_length() - 1, float(np.float32(1) / np.float32(d))

    if d == 1 << SHIFT:
        @device
        def divide(y):
            return clip(int32(y >> int32(SHIFT)))
    else:
        @device
        def divide(y):
            return quotient(y, int32(d), float32(RECIPROCAL))
    return divide


@device
def two_bytes(a, b):
    return int16(int32(int32(a & int32(255)) | int32(b << int32(8))))


@device
def low(pair):
    return int32(int32(int32(pair) << int32(24)) >> int32(24))


@device
def high(pair):
    return int32(int32(pair) >> int32(8))


# --- everything but the recurrence ------------------------------------------------------------------------------------

def _gather_kernel():
    """The tokens from which the state of every group is made. Launch blocks of 256 over streams * n; stream g is the
    g-th group that the pairs from job[1] + offset on belong to (the last ones may repeat a pair)."""
    @cuda.jit(launch_bounds=256)
    def gather(windows, width, n, pairs, per_group, streams, job, offset, tokens):
        i = cuda.grid(1)
        if i < streams * n:
            stream, first = i // n, (int64(job[1]) + offset) % per_group
            pair = min(max(stream * per_group - first, 0), pairs - 1)
            tokens[i] = windows[pair * width + i - stream * n]
    return gather


def _embed_kernel(cfg, nz, noisy):
    """x = the embedding, a warp a row. Launch [units, ceil(2 n / 8)], 256 threads. plan: 0 packed, 1 and 2 seeds, 3 and
    4 overlays of the token's and of the hidden side. Position p of window i is tokens[i * width + skip + p]."""
    H, SHIFT = cfg.HIDDEN_DIM, cfg.NOISE_SHIFT
    noise, factor = nz.noise, nz.factor

    @device
    def value(v, i, own, own_factor, stream, overlay, at_overlay, sign):
        """Element i, v without noise."""
        if not noisy:
            return v
        d = float32(float32(int32(own * noise(stream, i))) * own_factor)
        d = ptx.trunc_f32(float32(d * factor(overlay[at_overlay + i], stream, i)))
        return clip(int32(v + int32(int32(d * sign) >> int32(SHIFT))))

    @cuda.jit(launch_bounds=256)
    def embed(call, plan, packed, overlay, tokens, width, skip, n, count, job, offset, x, losses):
        t, unit = cuda.threadIdx.x, cuda.blockIdx.x
        here, lane, p = cuda.blockIdx.y * 8 + (t >> 5), t & 31, call * PLAN
        if noisy and cuda.blockIdx.y == 0 and t < 2:
            losses[2 * unit + t] = 0
        if here < 2 * n:
            member = 1 if here >= n else 0
            window = unit if noisy else min(2 * unit + member, count - 1)
            token = tokens[window * width + skip + here - member * n]
            sign = int32(1 - 2 * member)
            seed = uint32(uint32(job[0] + job[1]) + uint32(offset + unit))
            own, own_factor, stream = int32(0), float32(0), uint32(seed + uint32(plan[p + 2]))
            if noisy:
                own = noise(uint32(seed + uint32(plan[p + 1])), token)
                own_factor = factor(overlay[plan[p + 3] + token], uint32(seed + uint32(plan[p + 1])), token)
            for word in range(lane, H // 4, 32):
                e = packed[plan[p] + (token >> 3) * (2 * H) + (word >> 2) * 32 + (token & 7) * 4 + (word & 3)]
                i, over = word * 4, plan[p + 4]
                a = value(byte(e, 0), i, own, own_factor, stream, overlay, over, sign)
                b = value(byte(e, 1), i + 1, own, own_factor, stream, overlay, over, sign)
                c = value(byte(e, 2), i + 2, own, own_factor, stream, overlay, over, sign)
                d = value(byte(e, 3), i + 3, own, own_factor, stream, overlay, over, sign)
                x[(unit * (2 * n) + here) * (H // 4) + word] = pack4(a, b, c, d)
    return embed


def _norm_kernel(cfg, nz, noisy, streams):
    """out = ln(x) as core matrices, and its sums sb with `streams` input noises. Launch [units, ceil(2 n / 128)], 256
    threads; four lanes share a row. plan: 0 ln (vector_function), 4.. seed and overlay of each stream."""
    H, MODE = cfg.HIDDEN_DIM, cfg.ADAPTIVE_NOISE_MODE
    STREAMS = streams if noisy else 0
    AT_F = (2 + streams) * H
    vector, factor = vector_function(cfg, nz, noisy), nz.factor
    input_coefficient, input_term = nz.input_coefficient, nz.input_term

    @device
    def term(sm, smf, v, s, i):
        """Of element i, v, in the sum of stream s."""
        if s >= STREAMS:
            return int32(0)
        return input_term(v, sm[(2 + s) * H + i], smf[AT_F + s * H + i] if MODE == 2 else float32(0))

    @cuda.jit(launch_bounds=256)
    def norm(call, plan, weights, overlay, job, offset, n, stride, x, out, sb):
        sm, smf = cuda.shared.array(0, int32), cuda.shared.array(0, float32)
        t, unit = cuda.threadIdx.x, cuda.blockIdx.x
        p, first = call * PLAN, cuda.blockIdx.y * 128
        seed = uint32(uint32(job[0] + job[1]) + uint32(offset + unit))
        for i in range(t, H, 256):
            even, odd = vector(weights, overlay, plan, p, seed, i)
            sm[i], sm[H + i] = clip(even), clip(odd)
            for k in range(STREAMS):
                stream = uint32(seed + uint32(plan[p + 4 + 2 * k]))
                entry = overlay[plan[p + 5 + 2 * k] + i]
                sm[(2 + k) * H + i] = input_coefficient(entry, stream, i)
                if MODE == 2:
                    smf[AT_F + k * H + i] = factor(entry, stream, i)
        cuda.syncthreads()
        lane, q = t & 31, t & 3
        for group in range(t >> 5, 16, 8):
            if first + group * 8 < 2 * n:
                here = first + group * 8 + (lane >> 2)
                inside = here < 2 * n
                here = min(here, 2 * n - 1)
                member, row = 1 if here >= n else 0, unit * (2 * n) + here
                at_x, at_out = row * (H // 4) + q, (row >> 3) * (2 * H) + (row & 7) * 4 + q
                total = int32(0)
                for piece in range(H // 16):
                    word = x[at_x + piece * 4]
                    for k in range(4):
                        total = int32(total + abs(byte(word, k)))
                mean = int32(max(int32(uint32(quad_sum(total)) // uint32(H)), int32(1)))
                reciprocal = float32(float32(1) / float32(mean))
                first_sum, second_sum = int32(0), int32(0)
                for piece in range(H // 16):
                    word, i = x[at_x + piece * 4], piece * 16 + q * 4
                    a = quotient(int32(byte(word, 0) * sm[member * H + i]), mean, reciprocal)
                    b = quotient(int32(byte(word, 1) * sm[member * H + i + 1]), mean, reciprocal)
                    c = quotient(int32(byte(word, 2) * sm[member * H + i + 2]), mean, reciprocal)
                    d = quotient(int32(byte(word, 3) * sm[member * H + i + 3]), mean, reciprocal)
                    first_sum = int32(int32(first_sum + int32(term(sm, smf, a, 0, i) + term(sm, smf, b, 0, i + 1)))
                                      + int32(term(sm, smf, c, 0, i + 2) + term(sm, smf, d, 0, i + 3)))
                    second_sum = int32(int32(second_sum + int32(term(sm, smf, a, 1, i) + term(sm, smf, b, 1, i + 1)))
                                       + int32(term(sm, smf, c, 1, i + 2) + term(sm, smf, d, 1, i + 3)))
                    if inside:
                        out[at_out + piece * 32] = pack4(a, b, c, d)
                if STREAMS > 0:
                    first_sum, second_sum = quad_sum(first_sum), quad_sum(second_sum)
                    if q == 0 and inside:
                        sb[row] = first_sum
                        if STREAMS > 1:
                            sb[stride + row] = second_sum

    return norm, 4 * H * (2 + streams * (2 if MODE == 2 else 1))


def _inner_sums_kernel(cfg, nz):
    """sb of u, the inside of the MLP, core matrices of 4 H bytes a row. Launch as _norm_kernel. plan: 0 seed, 1
    overlay."""
    K, MODE = 4 * cfg.HIDDEN_DIM, cfg.ADAPTIVE_NOISE_MODE
    factor, input_coefficient, input_term = nz.factor, nz.input_coefficient, nz.input_term

    @cuda.jit(launch_bounds=256)
    def inner_sums(call, plan, overlay, job, offset, n, u, sb):
        sm, smf = cuda.shared.array(0, int32), cuda.shared.array(0, float32)
        t, unit = cuda.threadIdx.x, cuda.blockIdx.x
        p, first = call * PLAN, cuda.blockIdx.y * 128
        stream = uint32(uint32(uint32(job[0] + job[1]) + uint32(offset + unit)) + uint32(plan[p]))
        for i in range(t, K, 256):
            entry = overlay[plan[p + 1] + i]
            sm[i] = input_coefficient(entry, stream, i)
            if MODE == 2:
                smf[K + i] = factor(entry, stream, i)
        cuda.syncthreads()
        lane, q = t & 31, t & 3
        for group in range(t >> 5, 16, 8):
            if first + group * 8 < 2 * n:
                here = first + group * 8 + (lane >> 2)
                row = unit * (2 * n) + min(here, 2 * n - 1)
                total = int32(0)
                for piece in range(K // 16):
                    word = u[(row >> 3) * (2 * K) + piece * 32 + (row & 7) * 4 + q]
                    for k in range(4):
                        i = piece * 16 + q * 4 + k
                        f = smf[K + i] if MODE == 2 else float32(0)
                        total = int32(total + input_term(byte(word, k), sm[i], f))
                total = quad_sum(total)
                if q == 0 and here < 2 * n:
                    sb[row] = total

    return inner_sums, 4 * K * (2 if MODE == 2 else 1)


def _product_kernel(cfg, nz, noisy, kind):
    """q = x W with noise, divided and clipped. kind "rows": out[z * beyond + row * line + c], for any number of columns
    up to `line`; "inner": 4 H columns as core matrices, MLP_RELU; "down": from 4 H inputs, out = clip(out + q) in rows
    of H.

    Launch [row tiles, column tiles, matrices z], 256 threads. plan, 4 entries a matrix: 0 packed words, 1 seed A, 2
    overlay A. rows: those of `out` that there are. beyond, line in bytes. sb int32 [z][stride]."""
    H, T, NOISE_SHIFT = cfg.HIDDEN_DIM, cfg.SEQ_LEN, cfg.NOISE_SHIFT
    K, N = (4 * H, H) if kind == "down" else (H, 4 * H)
    UNITS, KC, LOWEST = units_in_tile(cfg), chunk(K), 0 if cfg.MLP_RELU and kind == "inner" else -127
    STAGE, NOISE_SIZE = 2 * TILE * KC, UNITS * TILE if noisy else 1
    INNER, DOWN = kind == "inner", kind == "down"
    noise, scaled, divide = nz.noise, nz.scaled, divide_function(parameters.divisor(cfg, K))
    fetch, _, walk = tile_functions(K, KC)

    # A thread has rows r = 0..3, 8 apart, of 16 columns.

    @device
    def finish(r, acc, row0, col0, warp, lane, unit0, column, sb, z, rows, stride, out, beyond, line):
        """From sums to what is kept of row r."""
        row, first = row0 + (warp >> 1) * 32 + r * 8 + (lane >> 2), (warp & 1) * 64 + (lane & 3) * 2
        s, at = int32(0), int64(0)
        if noisy:
            unit = row // (2 * T)
            s = int32(sb[z * stride + row] * int32(1 - 2 * (1 if row - unit * (2 * T) >= T else 0)))
            at = (unit - unit0) * TILE + first
        for j in range(8):
            m, c = (r >> 1) * 32 + (r & 1) * 2 + j * 4, col0 + first + j * 8
            a, b = acc[m], acc[m + 1]
            if noisy:
                a = int32(a + int32(int32(s * column[at + j * 8]) >> int32(NOISE_SHIFT)))
                b = int32(b + int32(int32(s * column[at + j * 8 + 1]) >> int32(NOISE_SHIFT)))
            a, b = int32(max(divide(a), int32(LOWEST))), int32(max(divide(b), int32(LOWEST)))
            if INNER:
                out[(row >> 3) * (4 * N) + (c >> 4) * 64 + (row & 7) * 8 + ((c & 15) >> 1)] = two_bytes(a, b)
            elif row < rows and c < line:
                here = (z * beyond + row * line + c) >> 1
                if DOWN:
                    old = out[here]
                    out[here] = two_bytes(clip(int32(low(old) + a)), clip(int32(high(old) + b)))
                else:
                    out[here] = two_bytes(a, b)

    finish_all = unrolled(4, finish)

    @cuda.jit(launch_bounds=256)
    def product(call, plan, packed, overlay, job, offset, columns, rows, stride, x, sb, out, beyond, line):
        sm = cuda.shared.array(0, int32)
        column = cuda.shared.array(NOISE_SIZE, int32)
        t, z = cuda.threadIdx.x, cuda.blockIdx.z
        lane, warp = t & 31, t >> 5
        row0, col0 = cuda.blockIdx.x * TILE, cuda.blockIdx.y * TILE
        p = call * PLAN + z * 4
        at = ptx.shared_address(sm, 0)
        at_a, at_b = int64(row0) * (K // 4), plan[p] + int64(col0) * (K // 4)
        fetch(at, x, at_a, packed, at_b, 0, t)
        ptx.copy_commit()
        unit0 = row0 // (2 * T)
        if noisy:
            base = uint32(uint32(uint32(job[0] + job[1]) + uint32(offset + unit0)) + uint32(plan[p + 1]))
            for i in range(t, UNITS * TILE, 256):
                c = col0 + (i & (TILE - 1))
                if c < columns:
                    stream = uint32(base + uint32(i // TILE))
                    column[i] = scaled(noise(stream, c), overlay[plan[p + 2] + c], stream, c)
        acc = cuda.local.array(64, int32)
        walk(acc, at, x, at_a, packed, at_b, warp, lane, t)
        finish_all(acc, row0, col0, warp, lane, unit0, column, sb, z, rows, stride, out, beyond, line)

    return product, 2 * STAGE


def _losses_kernel(cfg, noisy):
    """The loss of every row of logits, int8 [rows, line]; a warp a row, blocks of eight. With noise it is added to
    losses int64 [pairs, 2]; without, losses float64 [rows] is set to its cross-entropy in nats. The target of position
    p is tokens[... + skip + p + 1]."""
    V, SCALE = cfg.VOCAB_SIZE, float(cfg.SOFTMAX_EXP_SCALE)
    SUM = int64 if noisy else float64
    position_loss = loss_function(cfg)

    @cuda.jit(launch_bounds=256)
    def position_losses(z, line, exps, tokens, width, skip, n, rows, count, losses):
        lane, row = cuda.threadIdx.x & 31, cuda.blockIdx.x * 8 + (cuda.threadIdx.x >> 5)
        if row < rows:
            top = int32(-128)
            for v in range(lane, V, 32):
                top = int32(max(top, int32(z[row * line + v])))
            top = ptx.warp_max(top)
            total = SUM(0)
            for v in range(lane, V, 32):
                total += exps[int32(top - int32(z[row * line + v]))]
            for k in (16, 8, 4, 2, 1):
                total += cuda.shfl_xor_sync(0xFFFFFFFF, total, k)
            if lane == 0:
                sequence = row // n
                window = sequence >> 1 if noisy else sequence
                if noisy or window < count:
                    target = int32(z[row * line + tokens[window * width + skip + row - sequence * n + 1]])
                    if noisy:
                        cuda.atomic.add(losses, sequence, position_loss(total, top, target))
                    else:
                        losses[row] = math.log(total) + float(int32(top - target)) / SCALE

    return position_losses


# --- the recurrence ---------------------------------------------------------------------------------------------------

def recur_bytes(cfg, noisy, rows):
    """Dynamic shared memory of a block: state, gated state, two biases a sequence; four noise streams a pair."""
    return (4 + (2 if noisy else 0)) * rows * cfg.HIDDEN_DIM


def _recur_kernel(cfg, nz, noisy, rows_a_block):
    """One layer's state through n positions, rows_a_block sequences a block: x = clip(x + h) in place. Launch [blocks],
    256 threads.

    gates, candidates: W_f n and W_h n, rows of H; what f + 127 becomes is kept in place of the gates until the state
    needs it. plan: 0 b_f, 4 b_h (vector_function); 8, 12: packed words, seed A, overlay A, seed B of U_f and U_h; 16,
    17 their overlays B. states int8 [sequences or groups, H]: where `begin`, sequence s begins with that of its group
    (per_group pairs; the first pair is job[1] + offset); where `keep`, it goes there in the end."""
    H, MODE, SHIFT, ROWS = cfg.HIDDEN_DIM, cfg.ADAPTIVE_NOISE_MODE, cfg.NOISE_SHIFT, rows_a_block
    TILES, PAIRS, COLUMNS = ROWS // 16, ROWS // 2, (H + 255) // 256
    # bytes: where they begin in shared memory
    PAST, BIAS, NOISE = ROWS * H, 2 * ROWS * H, 4 * ROWS * H
    divide = divide_function(parameters.divisor(cfg, H))
    vector, noise, factor, scaled, input_term = vector_function(cfg, nz,
                                                                noisy), nz.noise, nz.factor, nz.scaled, nz.input_term
    ACC = TILES * 16

    @device
    def place(row, col):
        """Byte of an element of core matrices."""
        return (row >> 3) * (8 * H) + (col >> 4) * 128 + (row & 7) * 16 + (col & 15)

    @device
    def sums(words, bytes_, at_x, which, seed, overlay, at_overlay, sb, t):
        """sb[row] of the matrix at at_x (bytes) with input noise `which`; four lanes a row."""
        if t < 4 * ROWS:
            row, q = t >> 2, t & 3
            total = int32(0)
            at_noise = NOISE + (which * PAIRS + (row >> 1)) * H
            stream = uint32(seed + uint32(row >> 1))
            for piece in range(H // 16):
                word = words[(at_x + place(row, piece * 16)) // 4 + q]
                if MODE == 0:
                    total = ptx.dp4a(word, words[at_noise // 4 + piece * 4 + q], total)
                else:
                    for k in range(4):
                        i = piece * 16 + q * 4 + k
                        c, entry = int32(bytes_[at_noise + i]), overlay[at_overlay + i]
                        if MODE == 1:
                            c = int32(c * min(max(int32(entry), int32(0)), int32(64)))
                        total = int32(total + input_term(byte(word, k), c, factor(entry, stream, i)))
            total = quad_sum(total)
            if q == 0:
                sb[row] = int32(total * int32(1 - 2 * (row & 1)))

    @device
    def multiply(acc, address, packed, at, lane):
        """acc[(i * 4 + j) * 4 + ...] = rows 16 i of the matrix at a shared address times columns 8 j of the packed one
        from word `at`."""
        matrix = int32(lane >> 3)
        a_at = int32(address + int32(lane & 7) * 16 + (matrix & 1) * (8 * H) + (matrix >> 1) * 128)
        for i in range(ACC):
            acc[i] = 0
        b = cuda.local.array(8, int32)
        for k in range(H // 32):
            for j in range(4):
                b[2 * j] = packed[at + j * (2 * H) + k * 64 + lane]
                b[2 * j + 1] = packed[at + j * (2 * H) + k * 64 + 32 + lane]
            for i in range(TILES):
                a = ptx.load_matrix4(int32(a_at + i * (16 * H) + k * 256))
                for j in range(4):
                    m = (i * 4 + j) * 4
                    r = ptx.mma_s8(a[0], a[1], a[2], a[3], b[2 * j], b[2 * j + 1], acc[m], acc[m + 1], acc[m + 2],
                                   acc[m + 3])
                    acc[m], acc[m + 1], acc[m + 2], acc[m + 3] = r[0], r[1], r[2], r[3]

    # A thread has rows 16 i + g and 8 further, of 8 columns, of every i < TILES.

    @device
    def disturbed(v, row, c, s, which, bytes_, stream, overlay, at_overlay):
        """The quotient of a product v of row and column c."""
        if noisy:
            a = scaled(int32(bytes_[NOISE + (which * PAIRS + (row >> 1)) * H + c]), overlay[at_overlay + c],
                       uint32(stream + uint32(row >> 1)), c)
            v = int32(v + int32(int32(s * a) >> int32(SHIFT)))
        return divide(v)

    @device
    def gate(i, acc, col0, bytes_, stream, overlay, at_overlay, sb, gates, first, sequences, n, position, lane):
        """f + 127 in place of the gates, and the gated state."""
        for half in range(2):
            row = i * 16 + half * 8 + (lane >> 2)
            s, live = sb[row] if noisy else int32(0), first + row < sequences
            at = (min(first + row, sequences - 1) * n + position) * (H // 2)
            for j in range(4):
                m, c = (i * 4 + j) * 4 + half * 2, col0 + j * 8 + (lane & 3) * 2
                y = disturbed(acc[m], row, c, s, 0, bytes_, stream, overlay, at_overlay)
                y2 = disturbed(acc[m + 1], row, c + 1, s, 0, bytes_, stream, overlay, at_overlay)
                old, here = gates[at + (c >> 1)], place(row, c)
                f = open_gate(int32(low(old) + y), int32(bytes_[BIAS + row * H + c]))
                f2 = open_gate(int32(high(old) + y2), int32(bytes_[BIAS + row * H + c + 1]))
                if live:
                    gates[at + (c >> 1)] = two_bytes(f, f2)
                bytes_[PAST + here] = gated(f, int32(bytes_[here]))
                bytes_[PAST + here + 1] = gated(f2, int32(bytes_[here + 1]))

    @device
    def step(h, f, new):
        return int32(h + int32(int32(int32(f & int32(255)) * int32(new - h)) >> int32(8)))

    @device
    def advance(i, acc, col0, bytes_, stream, overlay, at_overlay, sb, gates, candidates, x, first, sequences, n,
                position, lane):
        """The new state, and x."""
        for half in range(2):
            row = i * 16 + half * 8 + (lane >> 2)
            s, live = sb[row] if noisy else int32(0), first + row < sequences
            at = (min(first + row, sequences - 1) * n + position) * (H // 2)
            for j in range(4):
                m, c = (i * 4 + j) * 4 + half * 2, col0 + j * 8 + (lane & 3) * 2
                y = disturbed(acc[m], row, c, s, 2, bytes_, stream, overlay, at_overlay)
                y2 = disturbed(acc[m + 1], row, c + 1, s, 2, bytes_, stream, overlay, at_overlay)
                f, old, here = int32(gates[at + (c >> 1)]), candidates[at + (c >> 1)], place(row, c)
                new = clip(int32(int32(low(old) + y) + int32(bytes_[BIAS + (ROWS + row) * H + c])))
                new2 = clip(int32(int32(high(old) + y2) + int32(bytes_[BIAS + (ROWS + row) * H + c + 1])))
                h = step(int32(bytes_[here]), f, new)
                h2 = step(int32(bytes_[here + 1]), int32(f >> int32(8)), new2)
                bytes_[here], bytes_[here + 1] = h, h2
                if live:
                    both = x[at + (c >> 1)]
                    x[at + (c >> 1)] = two_bytes(clip(int32(low(both) + h)), clip(int32(high(both) + h2)))

    gate_all, advance_all = unrolled(TILES, gate), unrolled(TILES, advance)

    @cuda.jit(launch_bounds=256)
    def recur(call, plan, weights, packed, overlay, tokens, width, skip, n, sequences, count, job, offset, gates,
              candidates, x, states, per_group, begin, keep):
        bytes_, words = cuda.shared.array(0, types.int8), cuda.shared.array(0, int32)
        sb = cuda.shared.array(ROWS, int32)
        t, first, p = cuda.threadIdx.x, cuda.blockIdx.x * ROWS, call * PLAN
        lane, warp = t & 31, t >> 5
        address = ptx.shared_address(words, 0)
        seed = uint32(uint32(job[0] + job[1]) + uint32(offset + (first >> 1)))     # of the block's first pair
        group0 = (int64(job[1]) + offset) // per_group
        for i in range(t, PAIRS * H, 256):
            pair, c = i // H, i % H
            for which in range(2):
                even, odd = vector(weights, overlay, plan, p + 4 * which, uint32(seed + uint32(pair)), c)
                bytes_[BIAS + (which * ROWS + 2 * pair) * H + c] = clip(even)
                bytes_[BIAS + (which * ROWS + 2 * pair + 1) * H + c] = clip(odd)
            if noisy:
                for which in range(2):
                    at = p + 8 + 4 * which
                    bytes_[NOISE + (2 * which * PAIRS + pair) * H
                           + c] = noise(uint32(seed + uint32(pair) + uint32(plan[at + 1])), c)
                    bytes_[NOISE + ((2 * which + 1) * PAIRS + pair) * H
                           + c] = noise(uint32(seed + uint32(pair) + uint32(plan[at + 3])), c)
        for i in range(t, ROWS * H, 256):
            row, c = i // H, i % H
            sequence, h = min(first + row, sequences - 1), int32(0)
            if begin:
                group = (int64(job[1]) + offset + (sequence >> 1)) // per_group - group0
                h = int32(states[group * H + c])
            bytes_[place(row, c)] = h
        cuda.syncthreads()
        acc = cuda.local.array(ACC, int32)
        mine = min(first + t, sequences - 1)                 # of thread t < ROWS: whose token it looks at
        window = mine >> 1 if noisy else min(mine, count - 1)
        for position in range(n):
            zero = int32(1) if t < ROWS and tokens[window * width + skip + position] == 0 else int32(0)
            if cuda.syncthreads_or(zero):
                if zero:
                    for piece in range(H // 16):
                        for k in range(4):
                            words[place(t, piece * 16) // 4 + k] = 0
                cuda.syncthreads()
            if noisy:
                sums(words, bytes_, 0, 1, uint32(seed + uint32(plan[p + 11])), overlay, plan[p + 16], sb, t)
                cuda.syncthreads()
            for column in range(COLUMNS):
                col0 = column * 256 + warp * 32
                if col0 < H:
                    multiply(acc, address, packed, plan[p + 8] + (col0 >> 3) * (2 * H), lane)
                    stream, at_overlay = uint32(seed + uint32(plan[p + 9])), plan[p + 10]
                    gate_all(acc, col0, bytes_, stream, overlay, at_overlay, sb, gates, first, sequences, n, position,
                             lane)
            cuda.syncthreads()
            if noisy:
                sums(words, bytes_, PAST, 3, uint32(seed + uint32(plan[p + 15])), overlay, plan[p + 17], sb, t)
                cuda.syncthreads()
            for column in range(COLUMNS):
                col0 = column * 256 + warp * 32
                if col0 < H:
                    multiply(acc, int32(address + PAST), packed, plan[p + 12] + (col0 >> 3) * (2 * H), lane)
                    stream, at_overlay = uint32(seed + uint32(plan[p + 13])), plan[p + 14]
                    advance_all(acc, col0, bytes_, stream, overlay, at_overlay, sb, gates, candidates, x, first,
                                sequences, n, position, lane)
            cuda.syncthreads()
        if keep:
            for i in range(t, ROWS * H, 256):
                row, c = i // H, i % H
                if first + row < sequences:
                    states[(first + row) * H + c] = bytes_[place(row, c)]

    return recur, recur_bytes(cfg, noisy, ROWS)


# --- one token at a time, without noise -------------------------------------------------------------------------------

def _token_kernel(cfg):
    """ln_f of the last layer's output after one more token: out int8 [H]. One block of 1024 threads; a thread is a
    channel. calls int32: rows of the plan: embed, then for each layer gates, recur, inner, down, then the head's norm;
    norms begin a row of the plan with their weights. states int8 [L, H] go on."""
    H, L, LOWEST = cfg.HIDDEN_DIM, cfg.N_LAYERS, 0 if cfg.MLP_RELU else -127
    from_h, from_4h = matrix_vector(H), matrix_vector(4 * H)
    divide, divide_down = divide_function(parameters.divisor(cfg, H)), divide_function(parameters.divisor(cfg, 4 * H))
    H4 = 4 * H

    @device
    def normed(x, weights, at, part, t):
        """Entry t of ln(x), x the thread's own channel."""
        mean = int32(max(block_sum(int32(abs(x)), part, t) // int32(H), 1))
        if t >= H:
            return int32(0)
        return quotient(int32(x * int32(weights[at + t])), mean, float32(float32(1) / float32(mean)))

    @cuda.jit(launch_bounds=1024)
    def token(calls, plan, weights, packed, tokens, at, states, out):
        # three vectors of H bytes, or one of 4 H after one
        words, vector = cuda.shared.array(0, int32), cuda.shared.array(0, types.int8)
        y = cuda.shared.array(H4, int32)
        part = cuda.shared.array(32, int32)
        t, id_ = cuda.threadIdx.x, tokens[at[0]]
        x = int32(0)
        if t < H:
            x = byte(packed[plan[calls[0] * PLAN] + (id_ >> 3) * (2 * H) + (t >> 4) * 32 + (id_ & 7) * 4
                            + ((t >> 2) & 3)], t & 3)
        for layer in range(L):
            gates, recur = calls[1 + 4 * layer] * PLAN, calls[2 + 4 * layer] * PLAN
            inner, down = calls[3 + 4 * layer] * PLAN, calls[4 + 4 * layer] * PLAN
            n, h = normed(x, weights, plan[gates + 16], part, t), int32(0)
            if t < H:
                if at[0] > 0 and id_ != 0:
                    h = int32(states[layer * H + t])
                vector[t], vector[H + t] = n, h
            cuda.syncthreads()
            from_h(words, 0, packed, plan[gates], H, y, 0, t)
            from_h(words, 0, packed, plan[gates + 4], H, y, H, t)
            from_h(words, H // 4, packed, plan[recur + 8], H, y, 2 * H, t)
            cuda.syncthreads()
            f, c = int32(0), int32(0)
            if t < H:
                f = open_gate(int32(divide(y[t]) + divide(y[2 * H + t])), int32(weights[plan[recur] + t]))
                c = divide(y[H + t])
                vector[2 * H + t] = gated(f, h)
            cuda.syncthreads()
            from_h(words, H // 2, packed, plan[recur + 12], H, y, 0, t)
            cuda.syncthreads()
            if t < H:
                c = clip(int32(int32(c + divide(y[t])) + int32(weights[plan[recur + 4] + t])))
                h = next_state(f, h, c)
                states[layer * H + t] = h
                x = clip(int32(x + h))
            n = normed(x, weights, plan[inner + 16], part, t)
            if t < H:
                vector[t] = n
            cuda.syncthreads()
            from_h(words, 0, packed, plan[inner], H4, y, 0, t)
            cuda.syncthreads()
            for i in range(t, H4, 1024):
                vector[H + i] = int32(max(divide(y[i]), int32(LOWEST)))
            cuda.syncthreads()
            from_4h(words, H // 4, packed, plan[down], H, y, 0, t)
            cuda.syncthreads()
            if t < H:
                x = clip(int32(x + divide_down(y[t])))
        n = normed(x, weights, plan[calls[4 * L + 1] * PLAN + 16], part, t)
        if t < H:
            out[t] = n

    return token


# --- the forward pass -------------------------------------------------------------------------------------------------

GATHER_TYPES = (A32, int64, int64, int64, int64, int64, AU32, int64, A32)
EMBED_TYPES = (int64, A32, A32, A8, A32, int64, int64, int64, int64, AU32, int64, A32)              # and losses
NORM_TYPES = (int64, A32, A8, A8, AU32, int64, int64, int64, A32, A32, A32)
SUMS_TYPES = (int64, A32, A8, AU32, int64, int64, A32, A32)
PRODUCT_TYPES = (int64, A32, A32, A8, AU32, int64, int64, int64, int64, A32, A32, A16, int64, int64)
LOSSES_TYPES = (A8, int64)                                                                          # and exps,
LOSSES_MORE = (A32, int64, int64, int64, int64, int64)                                               # ... and losses
RECUR_TYPES = (int64, A32, A8, A32, A8, A32, int64, int64, int64, int64, int64, AU32, int64, A16, A16, A16, A8, int64,
               int64, int64)
TOKEN_TYPES = (A32, A32, A8, A32, A32, A32, A8, A8)


class _Plan(products.Plan):
    """The calls of a forward pass."""

    def __init__(self, cfg, packing):
        super().__init__(cfg, packing)
        e = self._tensors["embedding", 0]
        self.embed = self._add([packing.at["embedding", 0] // 4, e.seed_a, e.seed_b, e.overlay_a, e.overlay_b])
        self.layers = []
        for layer in range(cfg.N_LAYERS):
            u_f, u_h = self._tensors["u_f", layer], self._tensors["u_h", layer]
            self.layers.append(SimpleNamespace(
                norm_1=self._normed("ln_1", layer, "w_f", "w_h"), norm_2=self._normed("ln_2", layer, "w_up"),
                gates=self._products(layer, "ln_1", "w_f", "w_h"), inner=self._products(layer, "ln_2", "w_up"),
                down=self._products(layer, "ln_2", "w_down"), sums=self._add(self._input("w_down", layer)),
                recur=self._add(self._vector("b_f", layer) + self._vector("b_h", layer)
                                + self._matrix("u_f", layer) + [u_f.seed_b] + self._matrix("u_h", layer) + [u_h.seed_b]
                                + [u_f.overlay_b, u_h.overlay_b])))
        self.norm_f, self.head = self._normed("ln_f", 0, "head"), self._products(0, "ln_f", "head")

    def token_calls(self):
        """Rows of the plan in the order of the token kernel."""
        calls = [self.embed]
        for layer in self.layers:
            calls += [layer.gates, layer.recur, layer.inner, layer.down]
        return np.array(calls + [self.head], np.int32)

    def _normed(self, ln, layer, *streams):
        return self._add(sum((self._input(name, layer) for name in streams), self._vector(ln, layer)))

    def _products(self, layer, ln, *names):
        entries = sum((self._matrix(name, layer) + [0] for name in names), [])
        return self._add(entries + [0] * (16 - len(entries)) + [self._tensors[ln, layer].weights])


class _Pass(Pass):
    """The forward pass with or without noise: its kernels and their launches."""

    def __init__(self, cfg, noisy, shared_limit, silent=False):
        super().__init__(cfg)
        self.noisy, nz, losses, add = noisy, build_noise(cfg, silent), A64 if noisy else AF64, self.add
        self.state_rows = next(rows for rows in STATE_ROWS if recur_bytes(cfg, noisy, rows) + 1024 <= shared_limit)
        self.embed = add(_embed_kernel(cfg, nz, noisy), EMBED_TYPES + (losses,))
        self.norm_two, self.norm_one = (add(_norm_kernel(cfg, nz, noisy, streams), NORM_TYPES) for streams in (2, 1))
        self.to_rows, self.to_inner, self.to_down = (add(_product_kernel(cfg, nz, noisy, kind), PRODUCT_TYPES)
                                                     for kind in ("rows", "inner", "down"))
        if noisy:
            self.sums = add(_inner_sums_kernel(cfg, nz), SUMS_TYPES)
        self.recur = add(_recur_kernel(cfg, nz, noisy, self.state_rows), RECUR_TYPES)
        self.losses = add(_losses_kernel(cfg, noisy),
                          LOSSES_TYPES + (A32 if noisy else AF64,) + LOSSES_MORE + (losses,))

    def layout(self, units, n):
        """Byte ranges of the scratch arrays of `units` pairs of n positions, rows of a slice (of whole units), and last
        the total of bytes."""
        H, V = self.cfg.HIDDEN_DIM, self.cfg.VOCAB_SIZE
        rows, some = units * 2 * n, max(1, min(units, SLICE // (2 * n)))
        padded = blocks(some * 2 * n, TILE) * TILE
        out, end = ranges(dict(x=rows * H, gates=rows * H, candidates=rows * H, n=padded * H,
                               u=max(padded * 4 * H, some * 2 * n * blocks(V, TILE) * TILE), sb=8 * padded))
        return out, some, padded, end

    def launch(self, stream, plan, tables, weights, packed, overlay, tokens, width, skip, n, count, job, offset, units,
               scratch, states, per_group, begin, keep, losses):
        """Enqueues the pass over n positions of `count` rows of tokens, `units` pairs (without noise of two rows each).
        losses None: no head. states int8 [L, streams, H]: see _recur_kernel; per_group is then that of the noisy
        pass."""
        cfg, H = self.cfg, self.cfg.HIDDEN_DIM
        layout, some, padded, _ = self.layout(units, n)
        part = {name: scratch[a:b] for name, (a, b) in layout.items()}
        words, packed, rows_a_unit = {name: a.view(np.int32) for name, a in part.items()}, packed.view(np.int32), 2 * n
        dummy = tables.no_floats if not self.noisy else tables.no_ints

        def slices():
            for first in range(0, units, some):
                yield first, min(some, units - first)

        def norm(which, call, first, count_):
            kernel, shared = which
            kernel[(count_, blocks(rows_a_unit, 128)), 256, stream, shared](
                call, tables.plan, weights, overlay, job, offset + first, n, padded,
                words["x"][first * rows_a_unit * (H // 4):], words["n"], words["sb"])

        def product(which, call, first, count_, x, columns, matrices, out, beyond, line):
            kernel, shared = which
            rows = count_ * rows_a_unit
            kernel[(blocks(rows, TILE), blocks(columns, TILE), matrices), 256, stream, shared](
                call, tables.plan, packed, overlay, job, offset + first, columns, rows, padded, x, words["sb"], out,
                beyond, line)

        def rows_of(name, first):
            return part[name][first * rows_a_unit * H:].view(np.int16)

        self.embed[0][(units, blocks(rows_a_unit, 8)), 256, stream](
            plan.embed, tables.plan, packed, overlay, tokens, width, skip, n, count, job, offset, words["x"],
            dummy if losses is None else losses)
        for i, layer in enumerate(plan.layers):
            beyond = layout["candidates"][0] - layout["gates"][0]
            for first, count_ in slices():
                norm(self.norm_two, layer.norm_1, first, count_)
                both = scratch[layout["gates"][0] + first * rows_a_unit * H:layout["candidates"][1]].view(np.int16)
                product(self.to_rows, layer.gates, first, count_, words["n"], H, 2, both, beyond, H)
            kernel, shared = self.recur
            mine = states[i * (states.size // cfg.N_LAYERS):(i + 1) * (states.size // cfg.N_LAYERS)]
            kernel[blocks(2 * units, self.state_rows), 256, stream, shared](
                layer.recur, tables.plan, weights, packed, overlay, tokens, width, skip, n, 2 * units, count, job,
                offset, rows_of("gates", 0),
                rows_of("candidates", 0), rows_of("x", 0), mine, per_group, begin, keep)
            for first, count_ in slices():
                norm(self.norm_one, layer.norm_2, first, count_)
                product(self.to_inner, layer.inner, first, count_, words["n"], 4 * H, 1, part["u"].view(np.int16), 0,
                        4 * H)
                if self.noisy:
                    kernel, shared = self.sums
                    kernel[(count_, blocks(rows_a_unit, 128)), 256, stream, shared](layer.sums, tables.plan, overlay,
                                                                                    job, offset + first, n,
                                                                                  words["u"], words["sb"])
                product(self.to_down, layer.down, first, count_, words["u"], H, 1, rows_of("x", first), 0, H)
        for first, count_ in slices() if losses is not None else ():
            line, rows = blocks(cfg.VOCAB_SIZE, TILE) * TILE, count_ * rows_a_unit
            norm(self.norm_one, plan.norm_f, first, count_)
            product(self.to_rows, plan.head, first, count_, words["n"], cfg.VOCAB_SIZE, 1, part["u"].view(np.int16), 0,
                    line)
            done = first if self.noisy else 2 * first
            self.losses[0][blocks(rows, 8), 256, stream](
                part["u"], line, tables.exps if self.noisy else tables.clean_exps, tokens[done * width:], width, skip,
                n, rows, count - done,
                losses[2 * first if self.noisy else first * rows_a_unit:])


class Forward(products.Forward):
    """What the CUDA engine uses: see the top of egg_kernels."""

    def __init__(self, cfg, cc, shared_limit, silent=False):
        super().__init__(cfg, cc, _token_kernel(cfg), TOKEN_TYPES,
                         divide_function(parameters.divisor(cfg, cfg.HIDDEN_DIM)))
        self._plan, self._gather = _Plan(cfg, self._packing), _gather_kernel()
        if cfg.TENSOR_CORES != "mma" and gru_hopper.fits(cfg, cc, shared_limit):
            self._noisy = gru_hopper.Hopper(cfg, self._packing, silent)
        elif gru_narrow.fits(cfg, cc, shared_limit):
            self._noisy = gru_narrow.Narrow(cfg, cc, shared_limit, self._packing, silent)
        else:
            self._noisy = _Pass(cfg, True, shared_limit, silent)
        self._clean = _Pass(cfg, False, shared_limit)
        self._serve([(self._gather, GATHER_TYPES, 0)] + self._clean.kernels if cfg.STATE_TOKENS else [])

    def tables(self):
        super().tables(no_job=np.zeros(2, np.uint32), no_floats=np.zeros(1), no_ints=np.zeros(1, np.int64),
                       no_states=np.zeros(self.cfg.N_LAYERS, np.int8))

    def _parts(self, pairs):
        """(streams that make states, bytes of: their tokens, their states, the scratch of both passes)."""
        cfg, per_group = self.cfg, self.cfg.GROUP_SIZE // 2
        streams = min(pairs, (pairs - 1) // per_group + 2) if cfg.STATE_TOKENS else 0
        scratch = self._noisy.layout(pairs, cfg.SEQ_LEN)[-1]
        if streams:
            scratch = max(scratch, self._clean.layout(blocks(streams, 2), cfg.STATE_TOKENS)[-1])
        return streams, aligned(4 * streams * cfg.STATE_TOKENS), aligned(2 * blocks(streams, 2) * cfg.N_LAYERS
                                                                         * cfg.HIDDEN_DIM), scratch

    def scratch_bytes(self, pairs):
        return sum(self._parts(pairs)[1:]) if pairs else 0

    def clean_scratch_bytes(self, windows, length):
        return self._clean.layout(blocks(windows, 2), length)[-1] if windows else 0

    def evaluate(self, stream, weights, packed, overlay, windows, job, offset, pairs, scratch, losses):
        cfg, tables, per_group = self.cfg, self._tables, self.cfg.GROUP_SIZE // 2
        before, width = cfg.STATE_TOKENS, cfg.STATE_TOKENS + cfg.SEQ_LEN + 1
        streams, token_bytes, state_bytes, _ = self._parts(pairs)
        tokens, states, work = scratch[:token_bytes], scratch[token_bytes:token_bytes
                                                              + state_bytes], scratch[token_bytes + state_bytes:]
        if streams:
            tokens, units = tokens.view(np.int32), blocks(streams, 2)
            states = states[:2 * units * cfg.N_LAYERS * cfg.HIDDEN_DIM]
            self._gather[blocks(streams * before, 256), 256, stream](windows, width, before, pairs, per_group, streams,
                                                                     job, offset, tokens)
            self._clean.launch(stream, self._plan, tables, weights, packed, overlay, tokens, before, 0, before, streams,
                               job, offset, units, work, states, per_group, 0, 1, None)
        self._noisy.launch(stream, self._plan, tables, weights, packed, overlay, windows, width, before, cfg.SEQ_LEN,
                           pairs, job, offset, pairs,
                           work, states if streams else tables.no_states, per_group, int(streams > 0), 0, losses)

    def validate(self, stream, weights, packed, windows, count, length, scratch, nats):
        self._clean.launch(stream, self._plan, self._tables, weights, packed, weights, windows, length + 1, 0, length,
                           count,
                           self._tables.no_job, 0, blocks(count, 2), scratch, self._tables.no_states, 1, 0, 0, nats)

    def cache_bytes(self, positions):
        return self.cfg.N_LAYERS * self.cfg.HIDDEN_DIM

    def token(self, stream, weights, packed, tokens, at, positions, rope, cache, scratch, logits):
        cfg, packed = self.cfg, packed.view(np.int32)
        self._token[1, 1024, stream, 5 * cfg.HIDDEN_DIM](self._tables.calls, self._tables.plan, weights, packed, tokens,
                                                         at, cache, scratch)
        self._logits[blocks(cfg.VOCAB_SIZE, 64), 256, stream](self._packing.at["head", 0] // 4, packed,
                                                              scratch.view(np.int32), logits)
