"""The noisy forward pass of the recurrent model on cc 9.0 where H = 256: wgmma kernels whose activations stay in
registers, as bytes.

`kernels.gru` has the general path, decides, and documents calls and plan; it made 179 M tokens/s where this makes 356
(one layer, V 256, T 100, H200, commit e65f980). A layer is three kernels: gates (ln_1, W_f, W_h), the recurrence, and
the MLP (ln_2, up, down). Rows of a pair are those of the even, then of the odd member. A warpgroup takes 64 rows at a
time, each of its warps 16 of them in the layout of `kernels.gru_parts`. Device memory has the order of the threads:
column 64 w + 16 k + 4 q + e of a row is byte 64 w + 16 q + 4 k + e, so 16 bytes go at once.

A quotient is (acc * 2^(16 - D) + s * n * 2^(16 - D - N)) >> 16, for accumulator, sum sb with the member's sign, column
noise, divisor 2^D and noise shift N: the upper half of a word, and two of them are clipped by one instruction.
"""

from numba import cuda, float32, int8, int32, int64, uint32, uint64

from model import parameters
from kernels import gru_parts, ptx
from kernels.parts import PLAN, SIGNS, blocks, byte, clip, quad_max, quad_sum, vector_function, weight
from kernels.rules import build_noise, device, loss_function, loudest

H = 256
LEAST_SEQ_LEN = 32                          # then 64 rows belong to two pairs at most
SHARED = 227 * 1024
# bytes of 128 columns of a square matrix, and of every other stage of weights
HALF = H * H // 2
ROWS, LINE = 64, 32                         # of a tile; words of a line of the cache: the rows of a tile are 128 lines
PAIRS = 32                                  # of a block of the recurrence
WIDE, MLP = 3, 2                            # warpgroups of a block
HIGHEST, LOWEST = gru_parts.both(127), gru_parts.both(-127)


def fits(cfg, cc, shared_limit):
    """Whether this path serves a configuration on a device."""
    return (tuple(cc) == (9, 0) and shared_limit >= SHARED and (cfg.HIDDEN_DIM, cfg.ADAPTIVE_NOISE_MODE) == (H, 0)
            and cfg.SEQ_LEN >= LEAST_SEQ_LEN and parameters.divisor(cfg, H) == 256 and cfg.NOISE_SHIFTS[-1] <= 8
            and H * 127 * ((127 << 8) + (loudest(cfg) ** 2 << 8 - cfg.NOISE_SHIFTS[0])) < 2 ** 31)


# --- small device functions -------------------------------------------------------------------------------------------

@device
def group_of(t):
    """Warpgroup of a thread, so that the compiler knows it to be the same for all lanes."""
    return cuda.shfl_sync(0xFFFFFFFF, t >> 7, 0)


@device
def left_of(shift):
    """How far noise goes left to be in 256ths."""
    return int32(int32(int32(8) - shift) & int32(31))


@device
def quotients(acc, i, s, n, unit):
    """The quotients of four columns, not clipped, as two words of int16; unit = 256 (of a constant ptxas would make
    shifts, which the busier units take)."""
    a, b = int32(int32(acc[i] * unit) + int32(s * n[0])), int32(int32(acc[i + 1] * unit) + int32(s * n[1]))
    c, d = int32(int32(acc[i + 4] * unit) + int32(s * n[2])), int32(int32(acc[i + 5] * unit) + int32(s * n[3]))
    return ptx.byte_permute(a, b, 0x7632), ptx.byte_permute(c, d, 0x7632)


@device
def place(column):
    """Byte of a column in the order of the threads."""
    return (column & ~63) | ((column & 12) << 2) | ((column & 48) >> 2) | (column & 3)


@device
def load_rows(x, source, row, q):
    """x[2 k + half] = the words of a row and of that 8 further."""
    for half in range(2):
        for w in range(4):
            r = ptx.load4(source, int64(row + 8 * half) * (H // 4) + w * 16 + q * 4)
            for k in range(4):
                x[8 * w + 2 * k + half] = r[k]


@device
def _word(unit, n, position, member, q):
    """`word` of gru_parts.RecurrentPass.add_head."""
    return (int64(unit) * (2 * n) + member * n + position) * (H // 4) + q * 4


@device
def _two_words(x, at, b):
    """`two` of the same."""
    word = ptx.load2(x, at + (b >> 1) * 16 + (b & 1) * 2)
    return int32(word[0] ^ int32(SIGNS)), int32(word[1] ^ int32(SIGNS))


def _norm_function(streams):
    """Device function: x[2 k + half] becomes ln of that row, for weights (float bits) at shared address ln and input
    noises (bytes) at b and b + H; returns the sums sb."""
    @device
    def norm(x, half, ln, b, q):
        total = int32(0)
        for k in range(16):
            total = ptx.distance4(int32(x[2 * k + half] ^ int32(SIGNS)), int32(SIGNS), total)
        mean = float32(max(int32(quad_sum(total) >> int32(8)), int32(1)))
        reciprocal = float32(float32(1) / mean)
        nudge = float32(float32(reciprocal * float32(0.5)) - float32(0.5))
        first, second = int32(0), int32(0)
        t = cuda.local.array(4, int32)
        for w in range(4):
            b1 = ptx.load_shared4(int32(b + w * 64 + q * 16))
            if streams > 1:
                b2 = ptx.load_shared4(int32(b + H + w * 64 + q * 16))
            for k in range(4):
                word = int32(x[8 * w + 2 * k + half] ^ int32(SIGNS))
                weight = ptx.load_shared4(int32(ln + w * 256 + k * 64 + q * 16))
                for e in range(4):
                    # x w / mean, half a unit of x w up and half of the quotient down, to the nearest whole number:
                    # rounded down
                    f = float32(ptx.bits_float(ptx.byte_permute(word, 0x4B000000, 0x7440 + e)) - float32(8388736))
                    f = cuda.fma(float32(f * ptx.bits_float(weight[e])), reciprocal, nudge)
                    t[e] = ptx.float_bits(float32(f + float32(12582912)))
                word = ptx.bytes4(ptx.clip2(ptx.byte_permute(t[0], t[1], 0x5410)),
                                  ptx.clip2(ptx.byte_permute(t[2], t[3], 0x5410)))
                x[8 * w + 2 * k + half] = word
                first = ptx.dp4a(word, b1[k], first)
                if streams > 1:
                    second = ptx.dp4a(word, b2[k], second)
        return quad_sum(first), quad_sum(second) if streams > 1 else int32(0)
    return norm


def _where_function(cfg):
    """Device function: (pair, member) of a row."""
    T = cfg.SEQ_LEN

    @device
    def where(row):
        unit = int32(uint32(row) // uint32(2 * T))
        return unit, int32(1) if int32(row - int32(unit * int32(2 * T))) >= T else int32(0)
    return where


# --- embedding --------------------------------------------------------------------------------------------------------

def _embed_kernel(cfg, nz):
    """x = the embedding, and zero losses. Launch [pairs], 256 threads; half a warp has a row, a lane the same columns
    of every row. plan and windows as kernels.gru._embed_kernel."""
    T, noise, job_shift = cfg.SEQ_LEN, nz.noise, nz.shift

    @cuda.jit(launch_bounds=256)
    def embed(call, plan, packed, tokens, width, skip, job, offset, x, losses):
        t, unit, p = cuda.threadIdx.x, cuda.blockIdx.x, call * PLAN
        if t < 2:
            losses[2 * unit + t] = 0
        seed = uint32(uint32(job[0] + job[1]) + uint32(offset + unit))
        w, q = (t & 15) >> 2, t & 3
        other, left = cuda.local.array(16, int32), left_of(job_shift(job))
        for k in range(16):
            other[k] = noise(uint32(seed + uint32(plan[p + 2])), w * 64 + (k >> 2) * 16 + q * 4 + (k & 3))
        for here in range(t >> 4, 2 * T, 16):
            member = 1 if here >= T else 0
            token = tokens[unit * width + skip + here - member * T]
            own = int32(noise(uint32(seed + uint32(plan[p + 1])), token) * int32((1 - 2 * member) << left))
            at = plan[p] + (token >> 3) * (2 * H) + w * 128 + (token & 7) * 4 + q
            e, v = cuda.local.array(4, int32), cuda.local.array(4, int32)
            for k in range(4):
                word = packed[uint64(at + k * 32)]
                for i in range(4):
                    v[i] = int32(int32(byte(word, i) << int32(8)) + int32(own * other[4 * k + i]))
                e[k] = ptx.bytes4(ptx.clip2(ptx.byte_permute(v[0], v[1], 0x6521)),
                                  ptx.clip2(ptx.byte_permute(v[2], v[3], 0x6521)))
            ptx.store4(x, (int64(unit) * (2 * T) + here) * (H // 4) + w * 16 + q * 4, e[0], e[1], e[2], e[3])

    return embed


# --- gates and candidates; the head -----------------------------------------------------------------------------------

def _tables(streams, columns):
    """Shared tables of a warpgroup, each of two pairs, the even and the odd one: bytes at which they lie (noise of the
    columns int32, weights of the norm float [member], input noise as bytes), and all of them."""
    ln = 8 * columns
    b = ln + 16 * H
    return ln, b, b + 2 * H * streams


def _fill_function(cfg, nz, streams):
    """Device function that fills ln and b of the tables of a warpgroup for a pair."""
    noise, vector = nz.noise, vector_function(cfg, nz)

    @device
    def fill(words, bytes_, at_ln, at_b, unit, seed, weights, overlay, plan, p, c):
        slot = unit & 1
        for i in range(c, H, 128):
            even, odd = vector(weights, overlay, plan, p, seed, i)
            words[at_ln // 4 + slot * (2 * H) + i] = ptx.float_bits(float32(clip(even)))
            words[at_ln // 4 + slot * (2 * H) + H + i] = ptx.float_bits(float32(clip(odd)))
            for s in range(streams):
                bytes_[at_b + (slot * streams + s) * H + place(i)] = noise(uint32(seed + uint32(plan[p + 4 + 2 * s])),
                                                                           i)
    return fill


def _wide_kernel(cfg, nz, head):
    """gates, candidates = W_f n, W_h n with n = ln_1(x), each row in the order of the threads; with `head` the losses
    of the logits of ln_f(x). Launch [blocks] of WIDE warpgroups; each takes `each` tiles of 64 rows in a row, the
    matrices stay in shared memory.

    at: packed word of the matrices, one after the other. plan rows: call_norm as kernels.gru._norm_kernel, call as
    _product_kernel. There `tokens` are those of the launch in kernels.gru, units the pairs there are."""
    MATRICES = 1 if head else 2
    GROUPS, THREADS, T, TARGETS, job_shift = WIDE, 128 * WIDE, cfg.SEQ_LEN, cfg.TARGETS, nz.shift
    AT_TABLES, COLUMNS = MATRICES * H * H, MATRICES * H
    AT_LN, AT_B, SIZE = _tables(MATRICES, COLUMNS)
    AT_EXPS = AT_TABLES + GROUPS * SIZE                      # [entry][lane]: a look-up has no bank conflicts
    noise, fill, norm, where = nz.noise, _fill_function(cfg, nz,
                                                        MATRICES), _norm_function(MATRICES), _where_function(cfg)
    product, position_loss = ptx.wgmma_product(128, H // 32, True, False), loss_function(cfg)

    @device
    def quarter(acc, j, s0, s1, n0, n1, unit, q, out0, out1, at):
        """out0, out1[at...] = the quotients of 64 columns of both rows, the first or (j = 1) the second of acc."""
        for k in range(4):
            i = 32 * j + 8 * k
            a, b = quotients(acc, i, s0, ptx.load_shared4(int32(n0 + j * 256 + k * 64 + q * 16)), unit)
            out0[at + k] = ptx.bytes4(ptx.clip2(a), ptx.clip2(b))
            a, b = quotients(acc, i + 2, s1, ptx.load_shared4(int32(n1 + j * 256 + k * 64 + q * 16)), unit)
            out1[at + k] = ptx.bytes4(ptx.clip2(a), ptx.clip2(b))

    @device
    def store(acc, j, s0, s1, n0, n1, unit, q, out0, out1, to, at):
        """The same as rows."""
        quarter(acc, j, s0, s1, n0, n1, unit, q, out0, out1, 0)
        ptx.store4(to, at, out0[0], out0[1], out0[2], out0[3])
        ptx.store4(to, at + 8 * (H // 4), out1[0], out1[1], out1[2], out1[3])

    @device
    def shown(z, token, q):
        """int32: the logit of a token, if it is one of this lane's, else 0."""
        word = int32(0)
        for k in range(16):
            word = z[k] if (token >> 4) == k else word
        word = int32(int32(word << int32(24 - 8 * (token & 3))) >> int32(24))
        return word if ((token >> 2) & 3) == q else int32(0)

    @device
    def add_loss(z, row, unit, member, tokens, width, skip, units, exps, losses, q):
        """Adds the loss of a row of logits, z its 16 words."""
        position = int32(int32(row - int32(unit * int32(2 * T))) - int32(member * int32(T)))
        at_window = int64(min(unit, units - 1)) * width + skip
        target = shown(z, tokens[at_window + position + 1], q)
        for k in range(TARGETS - 1):
            token = tokens[at_window + T + 1 + (TARGETS - 1) * position + k]
            target = int32(target + shown(z, token, q))
        top = int32(LOWEST)
        for k in range(16):
            top = ptx.max2(ptx.max2(top, ptx.low2(z[k])), ptx.high2(z[k]))
        top = quad_max(max(int32(int32(top << int32(16)) >> int32(16)), int32(top >> int32(16))))
        total, most = int32(0), ptx.byte_permute(int32(top + 128), 0, 0)
        for k in range(16):
            d = int32(most - int32(z[k] ^ int32(SIGNS)))
            for e in range(4):
                total = int32(total + weight(d, e, exps))
        total = quad_sum(total)
        target = quad_sum(target)
        if q == 0 and unit < units:
            cuda.atomic.add(losses, 2 * unit + member, position_loss(int64(total), int32(TARGETS * top), target))

    @cuda.jit(launch_bounds=THREADS)
    def wide(call_norm, call, at, plan, weights, packed, overlay, job, offset, tiles, each, x, gates, candidates,
             tokens, width, skip, units, exps, losses):
        words, bytes_ = cuda.shared.array(0, int32), cuda.shared.array(0, int8)
        barriers = cuda.shared.array(1, int64)
        t = cuda.threadIdx.x
        group, lane, c = group_of(t), t & 31, t & 127
        q = lane & 3
        base, bar = ptx.shared_address(words, 0), ptx.shared_address(barriers, 0)
        if t == 0:
            ptx.barrier_init(bar, 1)
            ptx.barrier_fence()
            ptx.barrier_expect(bar, AT_TABLES)
            ptx.copy_bulk(base, packed, at, AT_TABLES, bar)
        if head:
            for i in range(t, 256 * 32, THREADS):
                words[AT_EXPS // 4 + i] = exps[i >> 5]
        cuda.syncthreads()
        ptx.barrier_wait(bar, 0)
        mine = AT_TABLES + group * SIZE
        noise_unit = int32(int32(cuda.gridDim.y) << int32(8))
        seed0 = uint32(uint32(job[0] + job[1]) + uint32(offset))
        first, loaded = (cuda.blockIdx.x * GROUPS + group) * each, int32(-1)
        left = left_of(job_shift(job))
        acc, n = cuda.local.array(64, int32), cuda.local.array(32, int32)
        out0, out1 = cuda.local.array(16, int32), cuda.local.array(16, int32)
        for tile in range(first, min(first + each, tiles)):
            row = int32(tile * ROWS + (c >> 5) * 16 + (lane >> 2))
            load_rows(n, x, row, q)
            ptx.prefetch(x, int64(min(tile + 1, tiles - 1)) * (ROWS * H // 4) + c * LINE)
            low, high = where(tile * ROWS)[0], where(tile * ROWS + ROWS - 1)[0]
            if high > loaded:
                ptx.named_barrier(1 + group, 128)
                for unit in range(max(low, loaded + 1), high + 1):
                    seed = uint32(seed0 + uint32(unit))
                    fill(words, bytes_, mine + AT_LN, mine + AT_B, unit, seed, weights, overlay, plan, call_norm * PLAN,
                         c)
                    for i in range(c, COLUMNS, 128):
                        stream = uint32(seed + uint32(plan[call * PLAN + (i // H) * 4 + 1]))
                        words[mine // 4 + (unit & 1) * COLUMNS + i] = int32(noise(stream, i % H) << left)
                ptx.named_barrier(1 + group, 128)
                loaded = high
            unit0, member0 = where(row)
            unit1, member1 = where(row + 8)
            at_ln, at_b = base + mine + AT_LN, base + mine + AT_B
            f0, h0 = norm(n, 0, int32(at_ln + (unit0 & 1) * (8 * H) + member0 * (4 * H)),
                          int32(at_b + (unit0 & 1) * (MATRICES * H)), q)
            f1, h1 = norm(n, 1, int32(at_ln + (unit1 & 1) * (8 * H) + member1 * (4 * H)),
                          int32(at_b + (unit1 & 1) * (MATRICES * H)), q)
            n0, n1 = int32(base + mine + (unit0 & 1) * (4 * COLUMNS)), int32(base + mine + (unit1 & 1) * (4 * COLUMNS))
            s0, s1 = int32(-f0) if member0 else f0, int32(-f1) if member1 else f1
            if head:
                for part in range(2):
                    product(acc, n, int32(base + part * HALF))
                    for j in range(2):
                        quarter(acc, j, s0, s1, int32(n0 + part * 512), int32(n1 + part * 512), noise_unit, q, out0,
                                out1, 8 * part + 4 * j)
                at_exps = int32(base + AT_EXPS + lane * 4)
                add_loss(out0, row, unit0, member0, tokens, width, skip, units, at_exps, losses, q)
                add_loss(out1, row + 8, unit1, member1, tokens, width, skip, units, at_exps, losses, q)
            else:
                to = int64(row) * (H // 4) + q * 4
                for part in range(4):
                    product(acc, n, int32(base + part * HALF))
                    for j in range(2):
                        store(acc, j, s0, s1, n0, n1, noise_unit, q, out0, out1, gates if part < 2 else candidates,
                              to + 16 * j)
                    n0, n1, to = int32(n0 + 512), int32(n1 + 512), to + 32
                    if part == 1:
                        s0, s1, to = int32(-h0) if member0 else h0, int32(-h1) if member1 else h1, to - 64

    return wide, AT_EXPS + (256 * 32 * 4 if head else 0)


# --- the recurrence ---------------------------------------------------------------------------------------------------

def _recur_kernel(cfg, nz):
    """One layer's state through the positions: x = clip(x + h) in place. Launch [blocks] of 512 threads; a block has 32
    pairs, rows g and g + 8 of a warp are the members of one, a warpgroup has 64 columns. U_f and U_h, 64 KB each, stay
    in shared memory.

    at: packed word of U_f; U_h follows. plan, tokens, states, begin, per_group as kernels.gru._recur_kernel; states as
    words."""
    T, job_shift = cfg.SEQ_LEN, nz.shift
    AT_H, AT_P, AT_OWN = 2 * H * H, 2 * H * H + ROWS * H, 2 * H * H + 2 * ROWS * H
    # what a thread keeps of its columns: 16 bytes each, [what][thread]; biases [member]
    A_F, A_H, B_F, B_H, BIAS_F, BIAS_H = 0, 1, 2, 3, 4, 6
    OWN, SUMS, AHEAD = 512 * 16, 2 * 4 * ROWS, 2             # AHEAD: positions that are on their way from memory
    noise, vector = nz.noise, vector_function(cfg, nz)
    product = ptx.wgmma_product(64, H // 32, False, False)
    gated, next_state, _, _ = gru_parts.state_functions((9, 0))

    @device
    def own(base, what, t):
        return ptx.load_shared4(int32(base + AT_OWN + what * OWN + t * 16))

    @device
    def spread(word, left):
        """Four bytes of noise as quotients() wants them."""
        return (int32(byte(word, 0) << left), int32(byte(word, 1) << left),
                int32(byte(word, 2) << left), int32(byte(word, 3) << left))

    @device
    def store_sums(sums, row, group, s0, s1, q):
        s0, s1 = quad_sum(s0), quad_sum(s1)
        if q == 0:
            sums[row * 4 + group], sums[(row + 8) * 4 + group] = s0, s1

    @device
    def whole_sum(address, row):
        s = ptx.load_shared4(int32(address + row * 16))
        return int32(int32(s[0] + s[1]) + int32(s[2] + s[3]))

    @device
    def opened(x):
        """f + 127 of two int16, x = the sum + 127."""
        return ptx.max2(ptx.min2(x, 2 * HIGHEST), 0)

    @cuda.jit(launch_bounds=512)
    def recur(call, at, plan, weights, packed, overlay, tokens, width, skip, units, job, offset, gates, candidates, x,
              states, per_group, begin):
        words, bytes_ = cuda.shared.array(0, int32), cuda.shared.array(0, int8)
        sums = cuda.shared.array(SUMS, int32)        # [of h, of p][row][warpgroup]
        barriers = cuda.shared.array(1, int64)
        t, p = cuda.threadIdx.x, call * PLAN
        group, lane, warp = group_of(t), t & 31, (t & 127) >> 5
        g, q = lane >> 2, lane & 3
        base, bar, at_sums = ptx.shared_address(words, 0), ptx.shared_address(barriers, 0), ptx.shared_address(sums, 0)
        pair = cuda.blockIdx.x * PAIRS + warp * 8 + g
        seed = uint32(uint32(job[0] + job[1]) + uint32(offset + pair))
        if t == 0:
            ptx.barrier_init(bar, 1)
            ptx.barrier_fence()
        # racecheck takes the initialisation, a uniform instruction, for that of lane 31
        cuda.syncthreads()
        if t == 0:
            ptx.barrier_expect(bar, 2 * H * H)
            ptx.copy_bulk(base, packed, at, 2 * H * H, bar)
        for k in range(16):
            column, to = group * 64 + (k >> 2) * 16 + q * 4 + (k & 3), AT_OWN + t * 16 + k
            for which in range(2):
                bytes_[to + (A_F + which) * OWN] = noise(uint32(seed + uint32(plan[p + 9 + 4 * which])), column)
                bytes_[to + (B_F + which) * OWN] = noise(uint32(seed + uint32(plan[p + 11 + 4 * which])), column)
                even, odd = vector(weights, overlay, plan, p + 4 * which, seed, column)
                more = int32(127 * (1 - which))              # b_f + 127, without a sign
                bytes_[to + (BIAS_F + 2 * which) * OWN] = int32(clip(even) + more)
                bytes_[to + (BIAS_F + 2 * which + 1) * OWN] = int32(clip(odd) + more)
        row = warp * 16 + g
        mine = min(pair, units - 1)
        at_token = int64(mine) * width + skip
        h, f = cuda.local.array(8, int32), cuda.local.array(8, int32)      # words [column block][member]
        for k in range(8):
            h[k] = 0
        if begin and tokens[at_token] != 0:
            state = ((int64(job[1]) + offset + mine) // per_group
                     - (int64(job[1]) + offset) // per_group) * (H // 4) + group * 16 + q
            for k in range(4):
                h[2 * k] = states[state + k * 4]
                h[2 * k + 1] = h[2 * k]
        # of the thread's words in h and p: rows g, and 8 H bytes further
        at_word = base + (warp * 2) * (8 * H) + group * 512 + g * 16 + q * 4
        s0, s1 = int32(0), int32(0)
        b = own(base, B_F, t)
        for k in range(4):
            ptx.store_shared(int32(at_word + AT_H + k * 128), h[2 * k])
            ptx.store_shared(int32(at_word + AT_H + k * 128 + 8 * H), h[2 * k + 1])
            s0, s1 = ptx.dp4a(h[2 * k], b[k], s0), ptx.dp4a(h[2 * k + 1], b[k], s1)
        store_sums(sums, row, group, s0, s1, q)
        ptx.proxy_fence()
        cuda.syncthreads()
        ptx.barrier_wait(bar, 0)
        noise_unit = int32(int32(cuda.gridDim.y) << int32(8))
        at_f = int32(base + group * (64 * H))
        acc, total = cuda.local.array(32, int32), cuda.local.array(2, int32)
        left = left_of(job_shift(job))
        at0 = int64(pair) * (2 * T) * (H // 4) + group * 16 + q * 4
        at1 = at0 + T * (H // 4)
        # of a row of its sequence
        line = (int64(cuda.blockIdx.x * ROWS + (t & 127) // 2) * T) * (H // 4) + (t & 1) * LINE
        for position in range(T):
            ahead = line + min(position + AHEAD, T - 1) * (H // 4)
            if group == 0:
                ptx.prefetch(gates, ahead)
            elif group == 1:
                ptx.prefetch(candidates, ahead)
            elif group == 2:
                ptx.prefetch(x, ahead)
            old0, old1 = ptx.load4(gates, at0), ptx.load4(gates, at1)
            following = tokens[at_token + position + 1]
            product(acc, int32(base + AT_H), at_f)
            s0, s1 = whole_sum(at_sums, row), int32(-whole_sum(at_sums, row + 8))
            a, b, bias0, bias1 = own(base, A_F, t), own(base, B_H, t), own(base, BIAS_F, t), own(base, BIAS_F + 1, t)
            total[0], total[1] = 0, 0
            for k in range(4):
                n = spread(a[k], left)
                for half in range(2):
                    y, z = quotients(acc, 8 * k + 2 * half, s0 if half == 0 else s1, n, noise_unit)
                    old, bias = (old0[k], bias0[k]) if half == 0 else (old1[k], bias1[k])
                    y = opened(ptx.add2(ptx.clip2(y), ptx.add2(ptx.low2(old), ptx.byte_permute(bias, 0, 0x4140))))
                    z = opened(ptx.add2(ptx.clip2(z), ptx.add2(ptx.high2(old), ptx.byte_permute(bias, 0, 0x4342))))
                    f[2 * k + half] = ptx.bytes4(y, z)
                    past = gated(y, z, h[2 * k + half])
                    ptx.store_shared(int32(at_word + AT_P + k * 128 + half * (8 * H)), past)
                    total[half] = ptx.dp4a(past, b[k], total[half])
            store_sums(sums, row + ROWS, group, total[0], total[1], q)
            ptx.proxy_fence()
            cuda.syncthreads()
            old0, old1 = ptx.load4(candidates, at0), ptx.load4(candidates, at1)
            both0, both1 = ptx.load4(x, at0), ptx.load4(x, at1)
            product(acc, int32(base + AT_P), int32(at_f + H * H))
            s0, s1 = whole_sum(at_sums, row + ROWS), int32(-whole_sum(at_sums, row + ROWS + 8))
            a, b, bias0, bias1 = own(base, A_H, t), own(base, B_F, t), own(base, BIAS_H, t), own(base, BIAS_H + 1, t)
            total[0], total[1] = 0, 0
            out = cuda.local.array(8, int32)
            for k in range(4):
                n = spread(a[k], left)
                for half in range(2):
                    y, z = quotients(acc, 8 * k + 2 * half, s0 if half == 0 else s1, n, noise_unit)
                    old, bias, both = (old0[k], bias0[k], both0[k]) if half == 0 else (old1[k], bias1[k], both1[k])
                    y = ptx.clip2(ptx.add2(ptx.clip2(y), ptx.add2(ptx.low2(old), ptx.low2(bias))))
                    z = ptx.clip2(ptx.add2(ptx.clip2(z), ptx.add2(ptx.high2(old), ptx.high2(bias))))
                    i = 2 * k + half
                    y, z = next_state(f[i], h[i], y, z)
                    out[i] = ptx.bytes4(ptx.clip2(ptx.add2(ptx.low2(both), y)), ptx.clip2(ptx.add2(ptx.high2(both), z)))
                    h[i] = ptx.bytes4(y, z) if following != 0 else int32(0)
                    ptx.store_shared(int32(at_word + AT_H + k * 128 + half * (8 * H)), h[i])
                    total[half] = ptx.dp4a(h[i], b[k], total[half])
            ptx.store4(x, at0, out[0], out[2], out[4], out[6])
            ptx.store4(x, at1, out[1], out[3], out[5], out[7])
            store_sums(sums, row, group, total[0], total[1], q)
            at0, at1 = at0 + H // 4, at1 + H // 4
            ptx.proxy_fence()
            cuda.syncthreads()

    return recur, AT_OWN + 8 * OWN


# --- the MLP ----------------------------------------------------------------------------------------------------------

def _mlp_kernel(cfg, nz):
    """x = clip(x + W_down (W_up ln_2(x))) in place. Launch [blocks] of MLP warpgroups; each takes `each` tiles of 64
    rows in a row. They read the weights as they stream by: for every 128 inner values their columns of W_up and their
    rows of W_down, 32 KB each.

    at: packed word of W_up; W_down follows in chunks of 128 inputs. plan rows: call_norm, call_inner, call_down,
    call_sums as in kernels.gru."""
    GROUPS, STAGES, CHUNKS, INNER, job_shift = MLP, 5, 8, 4 * H, nz.shift
    THREADS, STEPS, STAGE, LEFT, BARRIERS = 128 * MLP, 2 * CHUNKS, HALF, 8 * STAGES, 2 * STAGES
    DOWN_SHIFT, LOW = parameters.divisor(cfg, INNER).bit_length() - 1, 0 if cfg.MLP_RELU else LOWEST
    AT_N, AT_TABLES = STAGES * STAGE, STAGES * STAGE + GROUPS * ROWS * H
    AT_LN, AT_B, AT_DOWN = _tables(1, INNER)                 # then column noise and input noise of W_down
    AT_INNER = AT_DOWN + 8 * H
    SIZE = AT_INNER + 2 * INNER
    noise, fill, norm, where = nz.noise, _fill_function(cfg, nz, 1), _norm_function(1), _where_function(cfg)
    up, down = ptx.wgmma_product(128, H // 32, False, False), ptx.wgmma_product(256, 4, True, True)

    @device
    def inner(acc, u, j, s0, s1, n0, n1, b0, b1, unit, q, t0, t1):
        """u[8 j...] = the inner values of 64 columns of both rows; t0, t1 + their sums with the input noise."""
        noise0, noise1 = ptx.load_shared4(int32(b0 + j * 64 + q * 16)), ptx.load_shared4(int32(b1 + j * 64 + q * 16))
        for k in range(4):
            i = 32 * j + 8 * k
            a, b = quotients(acc, i, s0, ptx.load_shared4(int32(n0 + j * 256 + k * 64 + q * 16)), unit)
            a, b = ptx.max2(ptx.min2(a, HIGHEST), LOW), ptx.max2(ptx.min2(b, HIGHEST), LOW)
            u[8 * j + 2 * k] = ptx.bytes4(a, b)
            a, b = quotients(acc, i + 2, s1, ptx.load_shared4(int32(n1 + j * 256 + k * 64 + q * 16)), unit)
            a, b = ptx.max2(ptx.min2(a, HIGHEST), LOW), ptx.max2(ptx.min2(b, HIGHEST), LOW)
            u[8 * j + 2 * k + 1] = ptx.bytes4(a, b)
            t0, t1 = ptx.dp4a(u[8 * j + 2 * k], noise0[k], t0), ptx.dp4a(u[8 * j + 2 * k + 1], noise1[k], t1)
        return t0, t1

    @device
    def sum_of(a, s, n, shift):
        return int32(int32(a + ptx.shift_right(int32(s * n), shift)) >> int32(DOWN_SHIFT))

    @device
    def finish(acc, w, s0, s1, shift, n0, n1, old, x, row, q):
        """64 columns of both rows of x, which were `old`."""
        for half in range(2):
            s, n, at = (s0, n0, row) if half == 0 else (s1, n1, row + 8)
            out = cuda.local.array(4, int32)
            for k in range(4):
                i, c, word = 32 * w + 8 * k + 2 * half, ptx.load_shared4(int32(n + w * 256 + k * 64 + q
                                                                               * 16)), old[8 * w + 2 * k + half]
                a = ptx.clip2(ptx.saturate2(sum_of(acc[i], s, c[0], shift), sum_of(acc[i + 1], s, c[1], shift)))
                b = ptx.clip2(ptx.saturate2(sum_of(acc[i + 4], s, c[2], shift), sum_of(acc[i + 5], s, c[3], shift)))
                out[k] = ptx.bytes4(ptx.clip2(ptx.add2(ptx.low2(word), a)), ptx.clip2(ptx.add2(ptx.high2(word), b)))
            ptx.store4(x, int64(at) * (H // 4) + w * 16 + q * 4, out[0], out[1], out[2], out[3])

    @device
    def split(step):
        turn = int32(uint32(step) // uint32(STAGES))
        return turn, int32(step - turn * int32(STAGES))

    @device
    def fetch(base, bar, packed, at, step):
        """Starts the copy of the weights of a step: W_up and W_down in turn."""
        stage, chunk = split(step)[1], int32(step & int32(STEPS - 1)) >> 1
        ptx.barrier_expect(bar + 8 * stage, STAGE)
        ptx.copy_bulk(base + stage * STAGE, packed, at + ((step & 1) * CHUNKS + chunk) * (STAGE // 4), STAGE,
                      bar + 8 * stage)

    @device
    def weights_of(base, bar, step):
        """Their shared address, when they are there."""
        turn, stage = split(step)
        ptx.barrier_wait(bar + 8 * stage, turn & 1)
        return int32(base + stage * STAGE)

    @device
    def leave(base, bar, packed, at, step, steps, lane):
        """This warp has done with them; the last warp to leave starts the next copy."""
        if lane == 0 and ptx.count_round(int32(bar + LEFT + 8 * split(step)[1]), 4 * GROUPS - 1) == 4 * GROUPS - 1:
            if int32(step + STAGES) < steps:
                fetch(base, bar, packed, at, int32(step + STAGES))

    @cuda.jit(launch_bounds=THREADS)
    def mlp(call_norm, call_inner, call_down, call_sums, at, plan, weights, packed, overlay, job, offset, tiles, each,
            x):
        words, bytes_ = cuda.shared.array(0, int32), cuda.shared.array(0, int8)
        barriers = cuda.shared.array(BARRIERS, int64)        # of stages, then how many warps left each
        t = cuda.threadIdx.x
        group, lane, c = group_of(t), t & 31, t & 127
        q = lane & 3
        base, bar = ptx.shared_address(words, 0), ptx.shared_address(barriers, 0)
        if t == 0:
            for i in range(STAGES):
                ptx.barrier_init(bar + 8 * i, 1)
                ptx.store_shared(int32(bar + LEFT + 8 * i), 0)
            ptx.barrier_fence()
            for i in range(STAGES):
                fetch(base, bar, packed, at, int32(i))
        cuda.syncthreads()
        mine, at_n = AT_TABLES + group * SIZE, base + AT_N + group * (ROWS * H)
        noise_unit = int32(int32(cuda.gridDim.y) << int32(8))
        seed0 = uint32(uint32(job[0] + job[1]) + uint32(offset))
        first, loaded = (cuda.blockIdx.x * GROUPS + group) * each, int32(-1)
        shift = job_shift(job)
        # the last blocks go through the motions beyond the last tile, for the other warpgroup
        step, steps = int32(0), int32(each * STEPS)
        sums, acc, u = cuda.local.array(128, int32), cuda.local.array(64, int32), cuda.local.array(16, int32)
        for turn in range(each):
            tile, live = min(first + turn, tiles - 1), first + turn < tiles
            row = int32(tile * ROWS + (c >> 5) * 16 + (lane >> 2))
            unit0, member0 = where(row)
            unit1, member1 = where(row + 8)
            slot0, slot1 = unit0 & 1, unit1 & 1
            low, high = where(tile * ROWS)[0], where(tile * ROWS + ROWS - 1)[0]
            ptx.named_barrier(1 + group, 128)            # nobody reads n or the tables any more
            if high > loaded:
                for unit in range(max(low, loaded + 1), high + 1):
                    seed = uint32(seed0 + uint32(unit))
                    fill(words, bytes_, mine + AT_LN, mine + AT_B, unit, seed, weights, overlay, plan, call_norm * PLAN,
                         c)
                    for i in range(c, INNER, 128):
                        stream = uint32(seed + uint32(plan[call_inner * PLAN + 1]))
                        words[mine // 4 + (unit & 1) * INNER + i] = int32(noise(stream, i) << left_of(shift))
                        bytes_[mine + AT_INNER + (unit & 1) * INNER
                               + place(i)] = noise(uint32(seed + uint32(plan[call_sums * PLAN])), i)
                    for i in range(c, H, 128):
                        words[(mine + AT_DOWN) // 4 + (unit & 1) * H
                              + i] = noise(uint32(seed + uint32(plan[call_down * PLAN + 1])), i)
                ptx.named_barrier(1 + group, 128)
                loaded = high
            n = cuda.local.array(32, int32)
            load_rows(n, x, row, q)
            ptx.prefetch(x, int64(min(tile + 1, tiles - 1)) * (ROWS * H // 4) + c * LINE)
            at_ln, at_b = base + mine + AT_LN, base + mine + AT_B
            s0, _ = norm(n, 0, int32(at_ln + slot0 * (8 * H) + member0 * (4 * H)), int32(at_b + slot0 * H), q)
            s1, _ = norm(n, 1, int32(at_ln + slot1 * (8 * H) + member1 * (4 * H)), int32(at_b + slot1 * H), q)
            s0, s1 = int32(-s0) if member0 else s0, int32(-s1) if member1 else s1
            to = int32(at_n + (c >> 5) * (16 * H) + lane * 4)
            for k in range(16):
                ptx.store_shared(int32(to + k * 128), n[2 * k])
                ptx.store_shared(int32(to + k * 128 + 8 * H), n[2 * k + 1])
            ptx.proxy_fence()
            ptx.named_barrier(1 + group, 128)
            n0, n1 = int32(base + mine + slot0 * (4 * INNER)), int32(base + mine + slot1 * (4 * INNER))
            b0, b1 = int32(base + mine + AT_INNER + slot0 * INNER), int32(base + mine + AT_INNER + slot1 * INNER)
            t0, t1 = int32(0), int32(0)
            for i in range(128):
                sums[i] = 0
            for _ in range(CHUNKS):
                up(acc, int32(at_n), weights_of(base, bar, step))
                leave(base, bar, packed, at, step, steps, lane)
                for j in range(2):
                    t0, t1 = inner(acc, u, j, s0, s1, n0, n1, b0, b1, noise_unit, q, t0, t1)
                down(sums, u, weights_of(base, bar, int32(step + 1)))
                leave(base, bar, packed, at, int32(step + 1), steps, lane)
                step = int32(step + 2)
                n0, n1, b0, b1 = int32(n0 + 512), int32(n1 + 512), int32(b0 + 128), int32(b1 + 128)
            load_rows(n, x, row, q)
            s0, s1 = quad_sum(t0), quad_sum(t1)
            s0, s1 = int32(-s0) if member0 else s0, int32(-s1) if member1 else s1
            if live:
                n0, n1 = int32(base + mine + AT_DOWN + slot0 * (4 * H)), int32(base + mine + AT_DOWN + slot1 * (4 * H))
                for w in range(4):
                    finish(sums, w, s0, s1, shift, n0, n1, n, x, row, q)

    return mlp, AT_TABLES + GROUPS * SIZE


# --- the pass ---------------------------------------------------------------------------------------------------------

class Hopper(gru_parts.RowsPass):
    """The noisy forward pass."""

    def __init__(self, cfg, card, packing, silent):
        super().__init__(cfg, packing, 128, PAIRS, cfg.VOCAB_SIZE == H)     # then logits stay in registers
        nz, add = build_noise(cfg, silent), self.add
        self.embed, self.gates = add(_embed_kernel(cfg, nz)), add(_wide_kernel(cfg, nz, False))
        if self.own_head:
            self.head = add(_wide_kernel(cfg, nz, True))
        else:
            self.add_head(nz, (9, 0), card, packing, (_word, _two_words))
        self.recur, self.mlp = add(_recur_kernel(cfg, nz)), add(_mlp_kernel(cfg, nz))

    def launch(self, plan, tables, units, scratch, **given):
        given = self.arguments(given, tables, self.layout(units, given["n"])[0], scratch, units=units)
        tiles, processors = blocks(units * 2 * given["n"], ROWS), cuda.get_current_device().MULTIPROCESSOR_COUNT

        def over_tiles(kernel, groups, name, layer, **calls):
            each = blocks(tiles, groups * processors)
            kernel(blocks(tiles, groups * each), 128 * groups, given, at=self.at[name, layer], tiles=tiles, each=each,
                   **calls)

        self.embed(units, 256, given, call=plan.embed)
        for i, layer in enumerate(plan.layers):
            over_tiles(self.gates, WIDE, "w_f", i, call_norm=layer.norm_1, call=layer.gates)
            self.recur(blocks(units, PAIRS), 512, given, call=layer.recur, at=self.at["u_f", i],
                       states=self.states(given, i))
            over_tiles(self.mlp, MLP, "w_up", i, call_norm=layer.norm_2, call_inner=layer.inner, call_down=layer.down,
                       call_sums=layer.sums)
        if not self.own_head:
            return self.score(plan, given, units)
        over_tiles(self.head, WIDE, "head", 0, call_norm=plan.norm_f, call=plan.head)
