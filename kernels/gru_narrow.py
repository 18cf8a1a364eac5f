"""The noisy forward pass of narrow recurrent models on every card: a warp owns rows, and no warp waits for another.

`kernels.gru` has the general path and decides, `kernels.gru_parts` has what the kernels are made of, and the layout.
The general path made 331 and 442 M tokens/s where this makes 743 and 1,578 (H 128 and 64, one layer, V 256, T 100,
H200, commit e65f980). A layer is three kernels: gates (the embedding, ln_1, W_f, W_h), the recurrence, and the MLP
(ln_2, up, down); the head ends the pass. Between two products nothing but x, gates and candidates leaves the registers.
The weights of a kernel stay in shared memory where they fit, else they come from the caches. A warp takes 16 rows at a
time: members 0 and 1 of one pair at eight positions, or, in the recurrence, of eight pairs at one position.

In device memory row (pair, position, member) is row ((pair / 8 * T + position) * 2 + member) * 8 + pair % 8, and column
32 b + 16 i + 4 q + e of a row is byte 32 b + 8 q + 4 i + e: what a thread holds of 32 columns is 8 bytes. x lies there
as x + 128.
"""

from types import SimpleNamespace

from numba import cuda, float32, int8, int32, int64, uint32

from kernels import gru_parts, ptx
from kernels.gru_parts import OFFSET, added_function, begin_with, both, input_bytes, row_functions, stream_of
from kernels.parts import (BITS, PLAN, SIGNS, blocks, byte, clip, floor_constants, quad_sum, unrolled, vector_function,
                           weight)
from kernels.rules import device, loss_function
from model import parameters

WIDEST = 256                                # beyond, 16 rows a warp read the weights too often
LARGEST_V = 1024                            # logits that a warp keeps


def own_head(cfg):
    """Whether the logits of a warp stay on the chip; else the head of kernels.transformer serves."""
    return cfg.VOCAB_SIZE <= LARGEST_V and cfg.VOCAB_SIZE % 32 == 0


def fits(cfg, cc, shared_limit):
    """Whether this path serves a configuration on a device."""
    if cfg.HIDDEN_DIM > WIDEST:
        return False
    try:
        for inputs in (cfg.HIDDEN_DIM, 4 * cfg.HIDDEN_DIM):
            floor_constants(parameters.divisor(cfg, inputs), gru_parts.BASE)
    except ValueError:
        return False
    return all(part.warps > 0 for part in sizes(cfg, shared_limit).values())


@device
def row_of(unit, position, T):
    """The even member's row; the odd member's is 8 further."""
    return (int64(unit >> 3) * T + position) * 16 + (unit & 7)


# --- shared memory ----------------------------------------------------------------------------------------------------

def sizes(cfg, limit, wgmma=False):
    """Shared memory of each kernel: bytes of weights, whether they are resident, bytes of a warp's tables, warps of a
    block, all bytes; then columns of a product, and warps that make one together."""
    H, V = cfg.HIDDEN_DIM, cfg.VOCAB_SIZE
    tile, own = input_bytes(cfg, H, 4), input_bytes(cfg, H, 32)
    # weights, tables of a warp, what all warps share, most warps (for their registers)
    few = 12 if wgmma else 8
    plans = dict(gates=(2 * H * H, 8 * H + 16 * H + 2 * tile + H * (8 if cfg.ADAPTIVE_NOISE_MODE else 4), 0,
                        16 if H <= 128 else few),
                 recur=(2 * H * H, H // 16 * 32 * 64 + 2 * own, 0, 16 if H <= 64 else 12 if H <= 128 else 8),
                 mlp=(8 * H * H, 16 * H + 16 * H + tile + 4 * H + input_bytes(cfg, 4 * H, 4), 0,
                      16 if H <= 64 else 12 if H <= 128 else 8),
                 head=(H * V, 4 * V + 16 * H + tile + 16 * V, 256 * 32 * 4, 16 if H <= 128 else few))
    if not own_head(cfg):
        del plans["head"]
    out, free = {}, limit - 1024                             # what the driver and static arrays take
    for name, (weights, table, more, most) in plans.items():
        resident = (free - more - weights) // table >= 4
        at = (weights if resident else 0) + more
        warps = min(most, (free - at) // table)
        warps -= warps % 4 if warps > 4 else 0               # the schedulers get the same
        out[name] = SimpleNamespace(weights=weights, resident=resident, table=table, warps=warps, at=at,
                                    bytes=at + warps * table, columns=128 if wgmma else 32, together=4 if wgmma else 1)
    return out


# --- gates and candidates ---------------------------------------------------------------------------------------------

def gates_kernel(cfg, nz, cc, size, row_of, first_layer):
    """gates, candidates = W_f n, W_h n with n = ln_1(x); in the first layer x is the embedding, which is stored. Launch
    [blocks] of size.warps warps. A warp takes eight positions of a pair after the other; the warps that make a product
    together go through pairs side by side. row_of: where rows lie.

    at: packed word of W_f; W_h follows. rows_at: packed word of the embedding, rows of H bytes. plan rows: as in
    kernels.gru."""
    H, T, MODE, STEPS = cfg.HIDDEN_DIM, cfg.SEQ_LEN, cfg.ADAPTIVE_NOISE_MODE, cfg.HIDDEN_DIM // 32
    COLUMNS, TOGETHER, TURNS, ACC = size.columns, size.together, blocks(T, 8), size.columns // 2
    GROUPS = size.warps // TOGETHER
    THREADS, WEIGHTS, AT, TABLE, W, WORDS = 32 * size.warps, size.weights, size.at, size.table, size.warps, H // 8
    AT_LN, AT_OTHER = 8 * H, 24 * H + 2 * input_bytes(cfg, H, 4)
    noise, embed_factor, job_shift, unit_of = nz.noise, nz.factor, nz.shift, nz.unit
    fill_norm, norm = gru_parts.norm_functions(cfg, nz, cc, 2)
    load_rows, store_rows = row_functions(H)
    START, word_of, factor, _, _, pairs = gru_parts.quotient_functions(cfg, nz, cc, H)
    bring, origin, product = gru_parts.product_functions(THREADS, COLUMNS, STEPS, size.resident, wgmma=TOGETHER > 1)
    clipped = gru_parts.clip_function(cc, gru_parts.MAGIC, 1, 255)

    @device
    def disturbed(word, j, other, f, own, own_factor, sign, shift):
        """Byte j of a word of the embedding as the float MAGIC + 128 + v, v with its noise."""
        if MODE == 0:
            return ptx.fma_down(own_factor, ptx.bits_float(other),
                                ptx.bits_float(ptx.byte_permute(word, BITS, 0x7640 + j)))
        d = ptx.trunc_f32(float32(float32(float32(int32(own * other)) * own_factor) * ptx.bits_float(f)))
        v = int32(byte(int32(word ^ int32(SIGNS)), j) + int32(int32(d * sign) >> shift))
        return ptx.bits_float(int32(clip(v) + int32(BITS + 128)))

    @device
    def embedded(x, packed, at, address, own, own_factor, shift, q):
        """x of the token whose row begins at packed word `at`."""
        for b in range(STEPS):
            e = ptx.load2(packed, at + b * 8 + q * 2)
            for i in range(2):
                k = 2 * b + i
                other = ptx.load_shared4(int32(address + k * 64 + q * 16))
                f = ptx.load_shared4(int32(address + 4 * H + k * 64 + q * 16)) if MODE else other
                for m in range(2):
                    u = cuda.local.array(4, float32)
                    for j in range(4):
                        u[j] = disturbed(e[i], j, other[j], f[j], own,
                                         float32(-own_factor) if m and MODE == 0 else own_factor, int32(1 - 2 * m),
                                         shift)
                    y, z = clipped(u[0], u[1], u[2], u[3])
                    x[2 * k + m] = ptx.bytes4(y, z)

    @device
    def multiply(acc, n, at_weights, start, out, row, s0, s1, shift, at_noise, q):
        """out = the quotients of both rows."""
        for b in range(H // COLUMNS):
            product(acc, n, at_weights, b * (COLUMNS * H), start)
            for j in range(COLUMNS // 32):
                at = int32(at_noise + b * (4 * COLUMNS) + j * 128)
                noise0, noise1 = ptx.load_shared4(at), ptx.load_shared4(int32(at + 64))
                for m in range(2):
                    s = s1 if m else s0
                    y, z = pairs(acc, 16 * j + 2 * m, s, noise0, shift)
                    v, w = pairs(acc, 16 * j + 8 + 2 * m, s, noise1, shift)
                    ptx.store2(out, (row + 8 * m) * (H // 4) + b * (COLUMNS // 4) + j * 8 + q * 2, ptx.bytes4(y, z),
                               ptx.bytes4(v, w))

    @cuda.jit(launch_bounds=THREADS)
    def gates_and_candidates(call_embed, call_norm, call, at, rows_at, plan, weights, packed, overlay, tokens, width,
                             skip, job, offset, units, x, gates, candidates, losses):
        words, bytes_ = cuda.shared.array(0, int32), cuda.shared.array(0, int8)
        t = cuda.threadIdx.x
        lane, mine = t & 31, AT + (t >> 5) * TABLE
        g, q = lane >> 2, lane & 3
        base = ptx.shared_address(words, 0)
        bring(base, packed, at, WEIGHTS, t)
        at_weights = origin(base, packed, at, t)
        cuda.syncthreads()
        table = int32(base + mine)
        acc, row_x, n = cuda.local.array(ACC, int32), cuda.local.array(WORDS, int32), cuda.local.array(WORDS, int32)
        start = cuda.local.array(4, int32)
        begin_with(start, START)
        shift = job_shift(job)
        steps = ((units - 1) // TOGETHER + 1) * TURNS
        each = (steps - 1) // (cuda.gridDim.x * GROUPS) + 1
        begin = (cuda.blockIdx.x * GROUPS + (t >> 5) // TOGETHER) * each
        for step in range(begin, min(begin + each, steps)):
            turn = step // TURNS
            unit, first = min(turn * TOGETHER + (t >> 5) % TOGETHER, units - 1), (step - turn * TURNS) * 8
            seed = uint32(uint32(job[0] + job[1]) + uint32(offset + unit))
            if first == 0 or step == begin:
                cuda.syncwarp()                              # nobody reads the tables any more
                if first_layer and lane < 2:
                    losses[2 * unit + lane] = 0
                for i in range(lane, H, 32):
                    fill_norm(words, bytes_, mine + AT_LN, weights, overlay, plan, call_norm * PLAN, seed, i)
                    for z in range(2):
                        p = call * PLAN + 4 * z
                        words[mine // 4 + z * H + i] = word_of(overlay, plan[p + 2], stream_of(plan, p + 1, seed), i)
                    if first_layer:
                        stream, other = stream_of(plan, call_embed * PLAN + 2, seed), (mine + AT_OTHER) // 4 + i
                        if MODE == 0:
                            words[other] = ptx.float_bits(float32(noise(stream, i)))
                        else:
                            words[other] = noise(stream, i)
                            words[other + H] = ptx.float_bits(embed_factor(overlay[plan[call_embed * PLAN + 4] + i],
                                                                           stream, i))
                cuda.syncwarp()
            position = min(first + g, T - 1)
            row = row_of(unit, position, T)
            if first_layer:
                token = tokens[int64(unit) * width + skip + position]
                stream = stream_of(plan, call_embed * PLAN + 1, seed)
                own = noise(stream, token)
                if MODE == 0:
                    own_factor = float32(float32(own) * unit_of(shift))
                else:
                    own_factor = embed_factor(overlay[plan[call_embed * PLAN + 3] + token], stream, token)
                embedded(row_x, packed, rows_at + int64(token) * (H // 4), int32(table + AT_OTHER), own, own_factor,
                         shift, q)
                store_rows(row_x, x, row * (H // 4), q)
            else:
                load_rows(row_x, x, row * (H // 4), q)
            f0, h0 = norm(row_x, n, 0, 0, int32(table + AT_LN), q)
            f1, h1 = norm(row_x, n, 0, 1, int32(table + AT_LN), q)
            multiply(acc, n, at_weights, start, gates, row, factor(f0, 0, shift), factor(f1, 1, shift), shift,
                     int32(table + q * 16), q)
            multiply(acc, n, at_weights + H * H, start, candidates, row, factor(h0, 0, shift), factor(h1, 1, shift),
                     shift, int32(table + 4 * H + q * 16), q)

    return gates_and_candidates, size.bytes


# --- the recurrence ---------------------------------------------------------------------------------------------------

def recur_kernel(cfg, nz, cc, size):
    """One layer's state through the positions: x = clip(x + h) in place. Launch [blocks] of size.warps warps; a warp
    takes eight pairs after eight others, lane 4 g + q has columns of pair g.

    at: packed word of U_f; U_h follows. plan, tokens, states, begin, per_group as kernels.gru._recur_kernel; states as
    words."""
    H, T, STEPS = cfg.HIDDEN_DIM, cfg.SEQ_LEN, cfg.HIDDEN_DIM // 32
    THREADS, WEIGHTS, AT, TABLE, W, WORDS = 32 * size.warps, size.weights, size.at, size.table, size.warps, H // 8
    # tables of a warp, 16 bytes [16 columns k][lane]: column noise of U_f and U_h, biases [member][pair of columns];
    # then input noise
    KS = H // 16
    A_H, BIAS_F, BIAS, AT_B = 512 * KS, 1024 * KS, 512 * KS, 2048 * KS
    OWN_B = input_bytes(cfg, H, 32)
    vector, (fill_input, add) = vector_function(cfg, nz), gru_parts.input_functions(cfg, nz, H, 32)
    START, word_of, factor, _, _, pairs = gru_parts.quotient_functions(cfg, nz, cc, H)
    job_shift = nz.shift
    bring, origin, product = gru_parts.product_functions(THREADS, 32, STEPS, size.resident)
    gated, next_state, opened, candidates_of = gru_parts.state_functions(cc)
    (load_rows, store_rows), added = row_functions(H), added_function(cc)

    @unrolled
    def columns(which, acc, left, at_weights, start, table, lane, s0, s1, shift, old, h, f, past, x):
        """which = 0: f and the gated states; 1: the new states and x. left: what U_f or U_h multiplies."""
        for d in range(STEPS):
            product(acc, left, at_weights, which * (H * H) + d * (32 * H), start)
            for i in range(2):
                k, at = 2 * d + i, int32(table + (2 * d + i) * 512 + lane * 16)
                n, bias = ptx.load_shared4(int32(at + which * A_H)), ptx.load_shared4(int32(at + BIAS_F + which * BIAS))
                for m in range(2):
                    y, z = pairs(acc, 8 * i + 2 * m, s1 if m else s0, n, shift)
                    if which == 0:
                        y, z = opened(y, z, old[2 * k + m], bias[2 * m], bias[2 * m + 1])
                        f[2 * k + m], past[2 * k + m] = ptx.bytes4(y, z), gated(y, z, h[2 * k + m])
                    else:
                        y, z = candidates_of(y, z, old[2 * k + m], bias[2 * m], bias[2 * m + 1])
                        y, z = next_state(f[2 * k + m], h[2 * k + m], y, z)
                        h[2 * k + m], x[2 * k + m] = ptx.bytes4(y, z), added(x[2 * k + m], y, z)

    @cuda.jit(launch_bounds=THREADS)
    def recur(call, at, plan, weights, packed, overlay, tokens, width, skip, units, job, offset, gates, candidates, x,
              states, per_group, begin):
        words, bytes_ = cuda.shared.array(0, int32), cuda.shared.array(0, int8)
        t, p = cuda.threadIdx.x, call * PLAN
        lane, mine = t & 31, AT + (t >> 5) * TABLE
        g, q = lane >> 2, lane & 3
        base = ptx.shared_address(words, 0)
        bring(base, packed, at, WEIGHTS, t)
        at_weights = origin(base, packed, at, t)
        cuda.syncthreads()
        table = int32(base + mine)
        acc, h, past, f = (cuda.local.array(16, int32), cuda.local.array(WORDS, int32), cuda.local.array(WORDS, int32),
                           cuda.local.array(WORDS, int32))
        old, both_x, start = cuda.local.array(WORDS, int32), cuda.local.array(WORDS, int32), cuda.local.array(4, int32)
        begin_with(start, START)
        shift = job_shift(job)
        for eight in range(cuda.blockIdx.x * W + (t >> 5), (units + 7) >> 3, cuda.gridDim.x * W):
            pair = min(eight * 8 + g, units - 1)
            seed = uint32(uint32(job[0] + job[1]) + uint32(offset + pair))
            for i in range(4 * KS):                          # a lane has its tables to itself
                k, e = i >> 2, i & 3
                c = k * 16 + q * 4 + e
                for which in range(2):
                    words[(mine + which * A_H + k * 512 + lane * 16) // 4 + e] = word_of(
                        overlay, plan[p + 10 + 4 * which], stream_of(plan, p + 9 + 4 * which, seed), c)
                    fill_input(words, bytes_, mine + AT_B + which * OWN_B, (k * 32 + lane) * 4 + e, overlay,
                               plan[p + 16 + which], stream_of(plan, p + 11 + 4 * which, seed), c)
                    even, odd = vector(weights, overlay, plan, p + 4 * which, seed, c)
                    more = int32(127 * (1 - which) - OFFSET)     # b_f + 127, and without the offset of the quotients
                    to = mine + BIAS_F + which * BIAS + k * 512 + lane * 16 + e * 2
                    for m in range(2):
                        value = int32(clip(odd if m else even) + more)
                        bytes_[to + 8 * m], bytes_[to + 8 * m + 1] = value, int32(value >> int32(8))
            at_token = int64(pair) * width + skip
            for k in range(2 * KS):
                h[k] = 0
            if begin and tokens[at_token] != 0:
                state = ((int64(job[1]) + offset + pair) // per_group
                         - (int64(job[1]) + offset) // per_group) * (H // 4) + q
                for k in range(KS):
                    h[2 * k] = states[state + k * 4]
                    h[2 * k + 1] = h[2 * k]
            at_row = (int64(eight) * T * 16 + g) * (H // 4)
            for position in range(T):
                load_rows(old, gates, at_row, q)
                following = tokens[at_token + position + 1]
                s0, s1 = int32(0), int32(0)
                for k in range(KS):
                    s0 = add(h[2 * k], int32(table + AT_B), k, lane, s0)
                    s1 = add(h[2 * k + 1], int32(table + AT_B), k, lane, s1)
                s0, s1 = factor(quad_sum(s0), 0, shift), factor(quad_sum(s1), 1, shift)
                columns(0, acc, h, at_weights, start, table, lane, s0, s1, shift, old, h, f, past, both_x)
                load_rows(old, candidates, at_row, q)
                load_rows(both_x, x, at_row, q)
                s0, s1 = int32(0), int32(0)
                for k in range(KS):
                    s0 = add(past[2 * k], int32(table + AT_B + OWN_B), k, lane, s0)
                    s1 = add(past[2 * k + 1], int32(table + AT_B + OWN_B), k, lane, s1)
                s0, s1 = factor(quad_sum(s0), 0, shift), factor(quad_sum(s1), 1, shift)
                columns(1, acc, past, at_weights, start, table, lane, s0, s1, shift, old, h, f, past, both_x)
                store_rows(both_x, x, at_row, q)
                if following == 0:
                    for k in range(2 * KS):
                        h[k] = 0
                at_row += 16 * (H // 4)

    return recur, size.bytes


# --- the MLP ----------------------------------------------------------------------------------------------------------

def mlp_kernel(cfg, nz, cc, size):
    """x = clip(x + W_down (W_up ln_2(x))) in place. Launch as gates_and_candidates.

    at: packed word of W_up; W_down follows in chunks of 32 inputs. plan rows: as in kernels.gru."""
    H, T, STEPS, INNER = cfg.HIDDEN_DIM, cfg.SEQ_LEN, cfg.HIDDEN_DIM // 32, 4 * cfg.HIDDEN_DIM
    THREADS, WEIGHTS, AT, TABLE, W, WORDS = 32 * size.warps, size.weights, size.at, size.table, size.warps, H // 8
    AT_LN, AT_DOWN, SUMS = 4 * INNER, 4 * INNER + 16 * H + input_bytes(cfg, H, 4), H // 2
    AT_INNER, job_shift = AT_DOWN + 4 * H, nz.shift
    (load_rows, _), (fill_norm, norm) = row_functions(H), gru_parts.norm_functions(cfg, nz, cc, 1)
    fill_inner, add = gru_parts.input_functions(cfg, nz, INNER, 4)
    UP_START, up_word, up_factor, _, _, up_pairs = gru_parts.quotient_functions(
        cfg, nz, cc, H, lowest=0 if cfg.MLP_RELU else -127)
    DOWN_START, down_word, down_factor, _, _, down_pairs = gru_parts.quotient_functions(cfg, nz, cc, INNER)
    bring, origin, up = gru_parts.product_functions(THREADS, 32, STEPS, size.resident)
    _, origin_down, down = gru_parts.product_functions(THREADS, H, 1, size.resident, True)
    added = added_function(cc, OFFSET)

    @device
    def inner(acc, u, c, s0, s1, shift, at_noise, at_inputs, q, t0, t1):
        """u = 32 inner values of both rows; t0, t1 + their sums with the input noise."""
        for i in range(2):
            n = ptx.load_shared4(int32(at_noise + i * 64))
            for m in range(2):
                y, z = up_pairs(acc, 8 * i + 2 * m, s1 if m else s0, n, shift)
                u[2 * i + m] = ptx.bytes4(y, z)
            t0, t1 = add(u[2 * i], at_inputs, 2 * c + i, q, t0), add(u[2 * i + 1], at_inputs, 2 * c + i, q, t1)
        return t0, t1

    @device
    def finish(sums, k, m, s, shift, at_noise, x):
        y, z = down_pairs(sums, 8 * k + 2 * m, s, ptx.load_shared4(int32(at_noise + k * 64)), shift)
        x[2 * k + m] = added(x[2 * k + m], y, z)

    @cuda.jit(launch_bounds=THREADS)
    def mlp(call_norm, call_inner, call_down, call_sums, at, plan, weights, packed, overlay, job, offset, units, x):
        words, bytes_ = cuda.shared.array(0, int32), cuda.shared.array(0, int8)
        t = cuda.threadIdx.x
        lane, mine = t & 31, AT + (t >> 5) * TABLE
        g, q = lane >> 2, lane & 3
        base = ptx.shared_address(words, 0)
        bring(base, packed, at, WEIGHTS, t)
        at_weights = origin(base, packed, at, t)
        at_down = origin_down(int32(base + INNER * H), packed, at + INNER * H // 4, t)
        cuda.syncthreads()
        table = int32(base + mine)
        acc, sums, u = cuda.local.array(16, int32), cuda.local.array(SUMS, int32), cuda.local.array(4, int32)
        row_x, n, start = cuda.local.array(WORDS, int32), cuda.local.array(WORDS, int32), cuda.local.array(4, int32)
        begin_with(start, UP_START)
        shift = job_shift(job)
        for unit in range(cuda.blockIdx.x * W + (t >> 5), units, cuda.gridDim.x * W):
            seed = uint32(uint32(job[0] + job[1]) + uint32(offset + unit))
            cuda.syncwarp()                                  # nobody reads the tables any more
            for i in range(lane, INNER, 32):
                words[mine // 4 + i] = up_word(overlay, plan[call_inner * PLAN + 2],
                                               stream_of(plan, call_inner * PLAN + 1, seed), i)
                fill_inner(words, bytes_, mine + AT_INNER, i, overlay, plan[call_sums * PLAN + 1],
                           stream_of(plan, call_sums * PLAN, seed), i)
            for i in range(lane, H, 32):
                fill_norm(words, bytes_, mine + AT_LN, weights, overlay, plan, call_norm * PLAN, seed, i)
                words[(mine + AT_DOWN) // 4 + i] = down_word(overlay, plan[call_down * PLAN + 2],
                                                             stream_of(plan, call_down * PLAN + 1, seed), i)
            cuda.syncwarp()
            for first in range(0, T, 8):
                position = min(first + g, T - 1)
                row = row_of(unit, position, T) * (H // 4)
                load_rows(row_x, x, row, q)
                s0, _ = norm(row_x, n, 0, 0, int32(table + AT_LN), q)
                s1, _ = norm(row_x, n, 0, 1, int32(table + AT_LN), q)
                s0, s1, t0, t1 = up_factor(s0, 0, shift), up_factor(s1, 1, shift), int32(0), int32(0)
                for i in range(16 * STEPS):
                    sums[i] = DOWN_START
                for c in range(INNER // 32):
                    up(acc, n, at_weights, c * (32 * H), start)
                    t0, t1 = inner(acc, u, c, s0, s1, shift, int32(table + c * 128 + q * 16), int32(table + AT_INNER),
                                   q, t0, t1)
                    down(sums, u, at_down, c * (32 * H), start)
                s0, s1 = down_factor(quad_sum(t0), 0, shift), down_factor(quad_sum(t1), 1, shift)
                for k in range(2 * STEPS):
                    finish(sums, k, 0, s0, shift, int32(table + AT_DOWN + q * 16), row_x)
                    finish(sums, k, 1, s1, shift, int32(table + AT_DOWN + q * 16), row_x)
                cuda.syncwarp()                              # at the end of the window lanes have the same row
                for m in range(2):
                    for b in range(STEPS):
                        if first + g < T:
                            ptx.store2(x, row + m * (2 * H) + b * 8 + q * 2, row_x[4 * b + m], row_x[4 * b + 2 + m])

    return mlp, size.bytes


# --- the head ---------------------------------------------------------------------------------------------------------

def head_kernel(cfg, nz, cc, size, row_of):
    """losses[2 i], [2 i + 1] = the losses of pair i. Launch [blocks] of size.warps warps; a warp takes one pair after
    the other. The logits of a tile stay in shared memory, as z + 128. row_of: where rows lie.

    at: packed word of the matrix. plan rows: as in kernels.gru."""
    H, T, STEPS, V, VB = cfg.HIDDEN_DIM, cfg.SEQ_LEN, cfg.HIDDEN_DIM // 32, cfg.VOCAB_SIZE, cfg.VOCAB_SIZE // 32
    COLUMNS, ACC = size.columns, size.columns // 2
    THREADS, WEIGHTS, AT, TABLE, W, WORDS = 32 * size.warps, size.weights, size.at, size.table, size.warps, H // 8
    AT_EXPS = WEIGHTS if size.resident else 0                # [entry][lane]: a look-up has no bank conflicts
    job_shift, AT_LN, AT_Z, TARGETS = nz.shift, 4 * V, 4 * V + 16 * H + input_bytes(cfg, H, 4), cfg.TARGETS
    (load_rows, _), (fill_norm, norm) = row_functions(H), gru_parts.norm_functions(cfg, nz, cc, 1)
    START, word_of, factor, _, _, pairs = gru_parts.quotient_functions(cfg, nz, cc, H, add=128)
    bring, origin, product = gru_parts.product_functions(THREADS, COLUMNS, STEPS, size.resident,
                                                         wgmma=size.together > 1)
    position_loss, max2 = loss_function(cfg), ptx.int16_pairs(cc).max2
    LOWEST = both(OFFSET + 1)

    @device
    def logits(acc, z, i, j, m, s, shift, at_noise, top):
        """z[2 i + m] = a word of logits; the larger of them and top, two int16."""
        y, w = pairs(acc, 16 * j + 8 * i + 2 * m, s, ptx.load_shared4(int32(at_noise + i * 64)), shift)
        z[2 * i + m] = ptx.bytes4(y, w)
        return max2(max2(top, y), w)

    @device
    def highest(top):
        """The largest logit of a row, + 128."""
        for k in (1, 2):
            top = max2(top, cuda.shfl_xor_sync(0xFFFFFFFF, top, k))
        return max(int32(top & int32(0xFFFF)), int32(uint32(top) >> uint32(16))) - OFFSET

    @device
    def weigh(word, most, exps, total):
        """total + the exponentials of four logits."""
        d = int32(most - word)
        for e in range(4):
            total = int32(total + weight(d, e, exps))
        return total

    @device
    def shown(bytes_, mine, lane, member, token):
        """A token's logit, + 128: its byte is in the word of lane 4 g + (token / 4) % 4."""
        at = (int32(AT_Z + mine) + int32(token >> 5) * 512 + (lane & 28) * 16
              + ((token >> 2) & 3) * 16 + ((token >> 4) & 1) * 8)
        return int32(int32(bytes_[at + member * 4 + (token & 3)]) & int32(255))

    @cuda.jit(launch_bounds=THREADS)
    def head(call_norm, call, at, plan, weights, packed, overlay, tokens, width, skip, job, offset, units, exps, x,
             losses):
        words, bytes_ = cuda.shared.array(0, int32), cuda.shared.array(0, int8)
        t = cuda.threadIdx.x
        lane, mine = t & 31, AT + (t >> 5) * TABLE
        g, q = lane >> 2, lane & 3
        base = ptx.shared_address(words, 0)
        bring(base, packed, at, WEIGHTS, t)
        at_weights = origin(base, packed, at, t)
        for i in range(t, 256 * 32, THREADS):
            words[AT_EXPS // 4 + i] = exps[i >> 5]
        cuda.syncthreads()
        table, at_exps = int32(base + mine), int32(base + AT_EXPS + lane * 4)
        at_z = int32(table + AT_Z + lane * 16)
        acc, z = cuda.local.array(ACC, int32), cuda.local.array(4, int32)
        row_x, n, start = cuda.local.array(WORDS, int32), cuda.local.array(WORDS, int32), cuda.local.array(4, int32)
        begin_with(start, START)
        shift = job_shift(job)
        for begin in range(cuda.blockIdx.x * W, units, cuda.gridDim.x * W):
            unit = min(begin + (t >> 5), units - 1)          # the warps of a product stay together
            seed = uint32(uint32(job[0] + job[1]) + uint32(offset + unit))
            cuda.syncwarp()                                  # nobody reads the tables any more
            for i in range(lane, V, 32):
                words[mine // 4 + i] = word_of(overlay, plan[call * PLAN + 2], stream_of(plan, call * PLAN + 1, seed),
                                               i)
            for i in range(lane, H, 32):
                fill_norm(words, bytes_, mine + AT_LN, weights, overlay, plan, call_norm * PLAN, seed, i)
            cuda.syncwarp()
            # the losses of two tiles are made at once: of the first lanes with q < 2 keep what is needed, of the second
            # the others
            member = q & 1
            loss, total, distance, some = int64(0), int32(1), int32(0), False
            for first in range(0, T, 8):
                position = min(first + g, T - 1)
                load_rows(row_x, x, row_of(unit, position, T) * (H // 4), q)
                s0, _ = norm(row_x, n, 0, 0, int32(table + AT_LN), q)
                s1, _ = norm(row_x, n, 0, 1, int32(table + AT_LN), q)
                s0, s1 = factor(s0, 0, shift), factor(s1, 1, shift)
                token = tokens[int64(unit) * width + skip + position + 1]
                top0, top1 = int32(LOWEST), int32(LOWEST)
                cuda.syncwarp()                              # nobody looks for the last target any more
                for b in range(V // COLUMNS):
                    product(acc, n, at_weights, b * (COLUMNS * H), start)
                    for j in range(COLUMNS // 32):
                        at_noise = int32(table + b * (4 * COLUMNS) + j * 128 + q * 16)
                        for i in range(2):
                            top0 = logits(acc, z, i, j, 0, s0, shift, at_noise, top0)
                            top1 = logits(acc, z, i, j, 1, s1, shift, at_noise, top1)
                        ptx.store_shared4(int32(at_z + (b * (COLUMNS // 32) + j) * 512), z[0], z[1], z[2], z[3])
                cuda.syncwarp()
                top0, top1 = highest(top0), highest(top1)
                most0, most1 = ptx.byte_permute(top0, 0, 0), ptx.byte_permute(top1, 0, 0)
                total0, total1 = int32(0), int32(0)
                for b in range(VB):
                    a = ptx.load_shared4(int32(at_z + b * 512))
                    total0 = weigh(a[2], most0, at_exps, weigh(a[0], most0, at_exps, total0))
                    total1 = weigh(a[3], most1, at_exps, weigh(a[1], most1, at_exps, total1))
                total0, total1 = quad_sum(total0), quad_sum(total1)
                if (q >> 1) == ((first >> 3) & 1):
                    total, top = (total1, top1) if member else (total0, top0)
                    distance = int32(TARGETS * top - shown(bytes_, mine, lane, member, token))
                    for k in range(TARGETS - 1):
                        drawn = tokens[int64(unit) * width + skip + T + 1 + (TARGETS - 1) * position + k]
                        distance = int32(distance - shown(bytes_, mine, lane, member, drawn))
                    some = first + g < T
                if (first >> 3) & 1 or first + 8 >= T:
                    if some:
                        loss += position_loss(int64(total), distance, 0)
                    some = False
            for k in (2, 4, 8, 16):
                loss += cuda.shfl_xor_sync(0xFFFFFFFF, loss, k)
            if lane < 2:
                losses[2 * unit + lane] = loss

    return head, size.bytes
