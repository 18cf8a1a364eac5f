"""The attention of the transformer."""

from numba import cuda, float32, int32, int64, uint32, uint64

from kernels import ptx
from kernels.host import Kernel
from kernels.parts import A32, blocks, exp_sizes, int32s, pack_bytes, quad_max, quad_sum, unrolled
from kernels.product import ZEROS, padded_length

KEYS = 64                                   # positions of keys and values that a block takes at a time


def value_length(cfg):
    """Positions of a row of v: whole tiles of the attention."""
    return blocks(padded_length(cfg), KEYS) * KEYS


def _tile_functions(cfg, gpu, threads, SUMS):
    """(fetch, begin_head, scores, largest, weigh), device functions: the copies of keys and values to shared memory, by
    a block of `threads`; the scores of two rows, and the weights that these become. SUMS: of a lane."""
    H = cfg.HIDDEN_DIM
    D = cfg.HEAD_DIM
    LENGTH, POSITIONS = padded_length(cfg), value_length(cfg)
    MANY = LENGTH > KEYS                                     # more than one tile
    BYTES = KEYS * D                                         # of keys
    LOWEST = -2 ** 31
    SHIFT = cfg.SHIFT_ATTN
    MOST, COPIES = exp_sizes(cfg)

    @gpu.device
    def fetch(to, k, v, member, step, per_head, tiles, t):
        """Starts the copies of a step: keys of a tile, and values where they are wanted."""
        head, r = step // per_head, step % per_head
        tile = r if r < tiles else 2 * tiles - 2 - r
        at_k = (int64(member) * LENGTH + tile * KEYS >> 3) * (2 * H) + head * (2 * D)
        at_v = (int64(member) * H + head * D) * (POSITIONS // 4) + tile * (2 * KEYS)
        for i in range(t, BYTES // 16, threads):
            ptx.copy_async16(int32(to + i * 16), k, at_k + (i // (D // 2)) * (2 * H) + (i % (D // 2)) * 4)
            if not MANY or r >= tiles - 1:
                ptx.copy_async16(int32(to + BYTES + i * 16), v,
                                 at_v + (i // (KEYS // 2)) * (2 * POSITIONS) + (i % (KEYS // 2)) * 4)
        ptx.copy_commit()

    @gpu.device
    def begin_head(query, tops, dens, high, low, queries, at, head):
        """Takes the query of a head, and begins its maxima and sums."""
        tops[0] = LOWEST
        tops[1] = LOWEST
        dens[0] = 0
        dens[1] = 0
        for i in unrolled(range(D // 32)):
            for k in range(4):
                where = at + (head * (D // 16) + 2 * i) * 32 + (k & 1) * (2 * H) + (k >> 1) * 32
                query[i, k] = queries[uint64(where)]
        for i in unrolled(range(SUMS)):
            high[i], low[i] = 0, 0

    @gpu.device
    def scores(s, query, at, wide):
        """s[4 j ...] = products of the query with the keys at shared address `at`: of this lane for load_matrix4."""
        for j in unrolled(range(0, KEYS // 8, 2)):
            if j < 4 or wide:
                c, d = ZEROS, ZEROS
                for i in unrolled(range(D // 32)):
                    b = ptx.load_matrix4(at + j * (8 * D) + i * 256)
                    c, d = ptx.mma_s8(query[i], b[0], b[1], c), ptx.mma_s8(query[i], b[2], b[3], d)
                for e in range(4):
                    s[4 * j + e], s[4 * j + 4 + e] = c[e], d[e]

    @gpu.device
    def largest(s, tops, first, position, wide):
        """tops: the largest scores of the two rows so far; first: this lane's first column."""
        for j in unrolled(range(KEYS // 8)):
            if j < 4 or wide:
                for e in range(2):
                    for half in range(2):
                        known = first + 8 * j + e <= position + 8 * half
                        tops[half] = max(tops[half], s[4 * j + 2 * half + e]) if known else tops[half]

    @gpu.device
    def weigh(s, tops, dens, exp, copy, first, position, wide):
        """Scores become weights, whose sums are added to dens."""
        for j in unrolled(range(KEYS // 8)):
            if j < 4 or wide:
                for e in range(2):
                    for half in range(2):
                        below = int32(tops[half] - (s[4 * j + 2 * half + e] >> SHIFT))
                        w = exp[uint32(uint32(min(uint32(below), uint32(MOST)) * uint32(COPIES)) + uint32(copy))]
                        w = w if first + 8 * j + e <= position + 8 * half else int32(0)
                        s[4 * j + 2 * half + e] = w
                        dens[half] += w

    return fetch, begin_head, scores, largest, weigh


def _sum_functions(cfg, nz, gpu):
    """(split, set_values, add_values, finish), device functions: weights times values, byte limb by byte limb; the
    quotients of 16 channels, and what they add to sb.

    A score fragment of four column tiles is, byte for byte, an A fragment over 32 positions (in the permuted order of
    v), so the weights go into the products of their byte limbs without leaving registers. Over 64 positions a limb sum
    fits int32 by Horner's rule; sums over more are kept as 2^16 high + low."""
    H = cfg.HIDDEN_DIM
    D = cfg.HEAD_DIM
    LIMBS = (cfg.SOFTMAX_SCALE_BIT + 8) // 8
    MODE = cfg.ADAPTIVE_NOISE_MODE
    MANY = padded_length(cfg) > KEYS                         # more than one tile
    input_term = nz.input_term

    @gpu.device
    def split(limbs, s, wide):
        """The byte limbs of the weights as A fragments: limbs[group of 32 * 3 + limb]."""
        for g in unrolled(range(KEYS // 32)):
            if g == 0 or wide:
                for n in unrolled(range(LIMBS)):
                    pick = n * 0x11 + 0x40
                    for i in unrolled(range(4)):
                        m = g * 16 + (i >> 1) * 8 + (i & 1) * 2
                        low, high = ptx.byte_permute(s[m], s[m + 1], pick), ptx.byte_permute(s[m + 4], s[m + 5], pick)
                        limbs[g * 3 + n, i] = ptx.byte_permute(low, high, 0x5410)

    @gpu.device
    def weighted(limbs, at, wide):
        """Sums of weights times values of 8 channels, whose values of the tile are at a shared address (of this
        lane)."""
        r, v = ZEROS, ptx.load_matrix4(at)
        for i in unrolled(range(LIMBS)):
            n = LIMBS - 1 - i
            r = (int32(r[0] << 8), int32(r[1] << 8), int32(r[2] << 8), int32(r[3] << 8))
            r = ptx.mma_u8s8(limbs[n], v[0], v[1], r)
            if wide:
                r = ptx.mma_u8s8(limbs[3 + n], v[2], v[3], r)
        return r

    @gpu.device
    def set_values(low, limbs, at, d, wide):
        """low: the sums of 16 channels, from 16 d on, over the only tile."""
        for n in unrolled(range(2)):
            w = weighted(limbs, int32(at + (2 * d + n) * (8 * KEYS)), wide)
            for e in range(4):
                low[4 * n + e] = w[e]

    @gpu.device
    def add_values(high, low, limbs, at, wide):
        """Adds the sums of all channels of a head over a tile."""
        for d in unrolled(range(D // 8)):
            w = weighted(limbs, int32(at + d * (8 * KEYS)), wide)
            for e in range(4):
                low[4 * d + e] += w[e] & 0xFFFF
                high[4 * d + e] += w[e] >> 16

    @gpu.device
    def finish(high, low, at, dens, reciprocals, drawn, at_noise, a, to, sums):
        """Divides the sums of 16 channels in high, low [at...], 2^16 high + low, toward zero (at most 127 in size),
        stores their words and adds to the sums sb of the two rows. A reciprocal is a little small, so that an estimate
        is right or one less."""
        c, x = ptx.load4(drawn, at_noise), int32s(4)
        for half in range(2):
            den = dens[half]
            for k in range(4):
                m = at + (k >> 1) * 4 + half * 2 + (k & 1)
                num, total = low[m], float32(low[m])
                if MANY:
                    total = cuda.fma(float32(high[m]), float32(65536), total)
                    num = int32((high[m] << 16) + num)           # its remainder fits int32, so it need not
                size = int32(num if total >= float32(0) else int32(-num))
                q = int32(ptx.float_bits(ptx.fma_down(abs(total), reciprocals[half], 1 << 23))
                          - int32(0x4B000000))
                q = int32(q + 1) if int32(size - q * den) >= den else q
                x[k] = q if total >= float32(0) else -q
                f = ptx.bits_float(drawn[at_noise + H + k]) if MODE == 2 else float32(0)
                sums[half] += input_term(x[k], c[k], f)
            a[uint64(to + half * (2 * H))] = pack_bytes(x, 0)

    return split, set_values, add_values, finish


def attention_kernel(cfg, nz, gpu):
    """The attention output a, from q, k and v of kernels.transformer._full_width_kernel, and its sums sb. Launch
    [members, tiles of 64 positions], a warp for 16 positions, all heads.

    Keys and values of a head come to shared memory KEYS positions at a time while the tile before is used. A row's
    scores pass by once for its maximum and, where there is more than one tile, again for the weights: from the last
    tile, which is still at hand, back to the first.
    drawn: the inputs of the output projection."""
    H = cfg.HIDDEN_DIM
    D = cfg.HEAD_DIM
    HEADS = cfg.N_HEADS
    SHIFT = cfg.SHIFT_ATTN
    LENGTH = padded_length(cfg)
    MOST, COPIES = exp_sizes(cfg)
    EXPS = (MOST + 1) * COPIES
    QUERY = D // 32
    SCORES = KEYS // 2
    BELOW_ONE = 1 - 2.0 ** -22
    MANY = LENGTH > KEYS                                     # more than one tile
    SUMS = D // 2 if MANY else 8                             # of a lane: two rows of all channels, or of 16
    BYTES, STAGE = KEYS * D, 2 * KEYS * D                    # of keys, and of a stage
    # threads, and blocks of a multiprocessor: as many as registers allow
    ALL, RESIDENT = 32 * min(4, LENGTH // 16), 4 if not MANY else 3 if D <= 64 else 2
    fetch, begin_head, scores, largest, weigh = _tile_functions(cfg, gpu, ALL, SUMS)
    split, set_values, add_values, finish = _sum_functions(cfg, nz, gpu)

    @cuda.jit(launch_bounds=(128, RESIDENT))
    @gpu.unroll
    def attention(drawn: A32, each, exps: A32, queries: A32, keys: A32, values: A32, a: A32, sb: A32):
        sm = cuda.shared.array(0, int32, 128)                     # two stages of keys and values
        exp = cuda.shared.array(EXPS, int32)
        t = cuda.threadIdx.x
        member = cuda.blockIdx.x
        mine = cuda.blockIdx.y
        lane, warp = t & 31, t >> 5
        base, matrix = ptx.shared_address(sm, 0), lane >> 3
        tiles = mine + 1 if MANY else 1
        per_head = 2 * tiles - 1
        steps = HEADS * per_head
        fetch(base, keys, values, member, 0, per_head, tiles, t)
        for i in range(t, EXPS, ALL):
            exp[i] = exps[i // COPIES]
        position = mine * 64 + warp * 16 + (lane >> 2)
        row = int64(member) * LENGTH + position
        works = mine * 64 + warp * 16 < LENGTH
        at, first = (row >> 3) * (2 * H) + lane, (lane & 3) * 2
        wide_at_last = int32(warp & 3) >= 2                  # sees more than 32 positions of the last tile
        copy = lane & (COPIES - 1)
        at_noise = (member >> 1) * each + (lane & 3) * 4
        at_k = base + (matrix >> 1) * (8 * D) + (matrix & 1) * 128 + (lane & 7) * 16
        at_v = base + BYTES + lane * 16
        s = int32s(SCORES)
        query = cuda.local.array((QUERY, 4), int32)
        limbs = cuda.local.array((6, 4), int32)
        high, low = int32s(SUMS), int32s(SUMS)
        tops = int32s(2)
        dens = int32s(2)
        sums = int32s(2)
        reciprocals = cuda.local.array(2, float32)
        sums[0], sums[1] = 0, 0
        for step in range(steps):
            head = step // per_head
            r = step % per_head
            here = (step & 1) * STAGE
            tile = r if r < tiles else 2 * tiles - 2 - r
            wide, column = wide_at_last or tile < mine, tile * KEYS + first
            if step + 1 < steps:
                fetch(base + STAGE - here, keys, values, member, step + 1, per_head, tiles, t)
            else:
                ptx.copy_commit()
            ptx.copy_wait_but_one()
            cuda.syncthreads()                               # the stage of this step is there, whoever copied it
            if works:
                if r == 0:
                    begin_head(query, tops, dens, high, low, queries, at, head)
                scores(s, query, at_k + here, wide)
                if r < tiles:
                    largest(s, tops, column, position, wide)
                if r == tiles - 1:
                    for half in range(2):
                        tops[half] = quad_max(tops[half]) >> SHIFT
                if r >= tiles - 1:
                    weigh(s, tops, dens, exp, copy, column, position, wide)
                    split(limbs, s, wide)
                    if MANY:
                        add_values(high, low, limbs, at_v + here, wide)
                if r == per_head - 1:
                    for half in range(2):
                        dens[half] = quad_sum(dens[half])
                        reciprocals[half] = float32(BELOW_ONE) / float32(dens[half])
                    for d in unrolled(range(D // 16)):
                        if not MANY:
                            set_values(low, limbs, at_v + here, d, wide)
                        channel = head * D + d * 16
                        finish(high, low, 8 * d if MANY else 0, dens, reciprocals, drawn,
                               at_noise + channel, a, at + (channel >> 4) * 32, sums)
            cuda.syncthreads()                               # all have read it: the next turn fills it
        for half in range(2):
            total = quad_sum(sums[half])
            if works and (lane & 3) == 0:
                sb[row + 8 * half] = total

    return Kernel(attention, 2 * STAGE)
