"""The head of the recurrent model with noise, for vocabularies whose logits a warp cannot keep, on every card: the
vocabulary passes by twice, for the largest logits and for the sums, and no logit leaves the registers. (Logits through
memory, as kernels.gru has them: 39 M tokens/s instead of 54; H 256, V 8192, T 64, H200, commit e65f980.)

A warp takes a task at a time: both members of a pair at eight (TILES 1) or sixteen positions (2). The warps of a block
go through the vocabulary together, STAGE columns at a time, which lie in a ring of shared memory. The target's logit is
a dot product of its own. """

from types import SimpleNamespace

from numba import cuda, int8, int32, int64, uint32

from kernels import gru_parts, ptx
from kernels.gru_parts import OFFSET, STAGE, begin_with, columns, input_bytes, stream_of
from kernels.parts import PLAN, blocks, quad_max, quad_sum, quad_sum64, unrolled, weights
from kernels.rules import device, loss_function

STAGES = 3                                  # of the ring
# of the table of exponentials; the last is 0, for columns beyond the vocabulary
ENTRIES = 256


def size_of(cfg, limit):
    """Shared memory of the kernel: rows of a task in 16, tasks of a pair, warps of a block (0: it does not fit), bytes
    of a warp's tables, all bytes."""
    H = cfg.HIDDEN_DIM
    tiles, ring = 2 if H <= 256 else 1, STAGES * STAGE * H
    table = 16 * H + input_bytes(cfg, H, 4) + 4 * STAGE
    free = limit - 1024 - ring - ENTRIES * 32 * 4
    warps = min(12 if H <= 256 else 8, free // table)
    warps -= warps % 4 if warps > 4 else 0
    return SimpleNamespace(tiles=tiles, tasks=blocks(cfg.SEQ_LEN, 8 * tiles), warps=warps, table=table,
                           at=ring + ENTRIES * 32 * 4, bytes=ring + ENTRIES * 32 * 4 + warps * table)


def head_kernel(cfg, nz, cc, size, load_rows):
    """Adds the losses of the pairs to losses int64 [pairs, 2]. Launch [blocks] of size.warps warps.

    load_rows(x, source, unit, position, q): device function that sets x, words [16 columns k][member] of bytes + 128,
    of a lane.
    at: packed word of the matrix (kernels.gru_narrow packs it so), `columns` columns. plan rows: as in kernels.gru."""
    H, T, STEPS, V, TILES, W = cfg.HIDDEN_DIM, cfg.SEQ_LEN, cfg.HIDDEN_DIM // 32, cfg.VOCAB_SIZE, size.tiles, size.warps
    THREADS, WORDS, ALL, ACC, ROWS = 32 * W, H // 8, H // 8 * TILES, 16 * TILES, 2 * TILES
    BYTES, PARTS, RAGGED, TASKS = STAGE * H, columns(cfg) // STAGE, V % STAGE != 0, size.tasks
    AT_EXPS, AT, TABLE = STAGES * BYTES, size.at, size.table
    AT_NOISE = 16 * H + input_bytes(cfg, H, 4)
    LEAST = -(1 << 31)
    job_shift, (fill_norm, norm) = nz.shift, gru_parts.norm_functions(cfg, nz, cc, 1)
    START, word_of, factor, noisy, pairs_of, pairs = gru_parts.quotient_functions(cfg, nz, cc, H, add=128)
    _, origin, product = gru_parts.product_functions(THREADS, 32, STEPS, True, False, TILES)
    position_loss = loss_function(cfg)

    @device
    def fetch(base, packed, at, step, t):
        """Sends the columns of a step, two rounds of the vocabulary, on their way into the ring."""
        if step < 2 * PARTS:
            first = at + int64(step % PARTS) * (BYTES // 4)
            to = int32(base + (step % STAGES) * BYTES)
            for i in range(t * 16, BYTES, THREADS * 16):
                ptx.copy_async16(int32(to + i), packed, first + i // 4)
        ptx.copy_commit()

    @device
    def largest(acc, i, s, n, shift, top, c):
        """The larger of top and four noisy sums of columns c..., as the bits of floats."""
        for e in range(4):
            v = ptx.float_bits(noisy(acc[i + (e & 1) + 4 * (e >> 1)], s, n[e], shift))
            if RAGGED and c + e >= V:
                v = int32(LEAST)
            top = max(top, v)
        return top

    @device
    def weigh(acc, i, s, n, shift, most, exps, c):
        """The sum of the exponentials of four logits of columns c..."""
        y, z = pairs(acc, i, s, n, shift)
        d = int32(most - ptx.bytes4(y, z))
        if RAGGED and c + 4 > V:
            d = int32(d | int32(int32(-1) << int32(8 * max(V - c, 0)))) if V > c else int32(-1)
        return weights(d, exps)

    @device
    def logit(v):
        """The logit of a noisy sum, + 128."""
        y, _ = pairs_of(v, v, v, v)
        return int32(int32(y & int32(0xFFFF)) - int32(OFFSET))

    @device
    def target_sum(n, at_n, packed, at, token, q):
        """The product of the row whose words are n[at_n], n[at_n + 2]... with the column of a token."""
        column = (token & ~15) | ((token & 12) >> 1) | ((token & 2) << 2) | (token & 1)
        first = at + int64(column >> 3) * (2 * H) + (column & 7) * 4 + q
        total = int32(0)
        for k in range(2 * STEPS):
            total = ptx.dp4a(n[at_n + 2 * k], packed[first + k * 32], total)
        return int32(quad_sum(total) + int32(START))

    @unrolled
    def enter(x, packed, at, overlay, tokens, at_token, at_overlay, stream, shift, unit, position0, table, q, row_x, n,
              s, top, total, target):
        """n, the sums, and the target's logit of all rows."""
        for d in range(TILES):
            position = min(position0 + 8 * d, T - 1)
            load_rows(row_x, x, unit, position, q)
            token = tokens[at_token + position + 1]
            column = word_of(overlay, at_overlay, stream, token)
            for j in range(2):
                r, (sb, _) = 2 * d + j, norm(row_x, n, WORDS * d, j, table, q)
                s[r], top[r], total[r] = factor(sb, j, shift), int32(LEAST), int64(0)
                total_of = target_sum(n, WORDS * d + j, packed, at, token, q)
                target[r] = logit(noisy(total_of, s[r], column, shift))

    @unrolled
    def largest_of(acc, s, shift, at_noise, top, c):
        """top of all rows after 32 columns from c on."""
        for d in range(2):
            n = ptx.load_shared4(int32(at_noise + d * 64))
            for j in range(ROWS):
                top[j] = largest(acc, (j >> 1) * 16 + 8 * d + 2 * (j & 1), s[j], n, shift, top[j], int32(c + d * 16))

    @unrolled
    def weigh_all(acc, s, shift, at_noise, most, exps, total, c):
        for d in range(2):
            n = ptx.load_shared4(int32(at_noise + d * 64))
            for j in range(ROWS):
                total[j] += weigh(acc, (j >> 1) * 16 + 8 * d + 2 * (j & 1), s[j], n, shift, most[j], exps,
                                  int32(c + d * 16))

    @unrolled
    def settle(top, most):
        """From the largest noisy sums to their logits, and those in every byte of a word."""
        for j in range(ROWS):
            top[j] = logit(ptx.bits_float(quad_max(top[j])))
            most[j] = ptx.byte_permute(top[j], 0, 0)

    @unrolled
    def own_row(q, total, top, target):
        """Sum and distance of row q: its loss is made by lane q of the four that share the rows."""
        mine_total, mine_distance = int64(1), int32(0)
        for j in range(ROWS):
            whole = quad_sum64(total[j])
            if q == j:
                mine_total, mine_distance = whole, int32(top[j] - target[j])
        return mine_total, mine_distance

    @cuda.jit(launch_bounds=THREADS)
    def stream_head(call_norm, call, at, plan, weights, packed, overlay, tokens, width, skip, job, offset, units, exps,
                    x, losses):
        words, bytes_ = cuda.shared.array(0, int32), cuda.shared.array(0, int8)
        t = cuda.threadIdx.x
        lane, mine = t & 31, AT + (t >> 5) * TABLE
        g, q = lane >> 2, lane & 3
        base = ptx.shared_address(words, 0)
        table, at_exps = int32(base + mine), int32(base + AT_EXPS + lane * 4)
        for i in range(t, ENTRIES * 32, THREADS):
            words[AT_EXPS // 4 + i] = exps[i >> 5] if i < (ENTRIES - 1) * 32 else 0
        acc, start = cuda.local.array(ACC, int32), cuda.local.array(4, int32)
        begin_with(start, START)
        row_x, n = cuda.local.array(WORDS, int32), cuda.local.array(ALL, int32)
        s, top, most, total, target = (cuda.local.array(ROWS, int32), cuda.local.array(ROWS, int32),
                                       cuda.local.array(ROWS, int32),
                                       cuda.local.array(ROWS, int64), cuda.local.array(ROWS, int32))
        every = int64(units) * TASKS
        for first_task in range(cuda.blockIdx.x * W, every, cuda.gridDim.x * W):
            task = first_task + (t >> 5)
            live = task < every
            task = min(task, every - 1)
            unit, position0 = int32(task // TASKS), int32(task % TASKS) * (8 * TILES) + g
            seed = uint32(uint32(job[0] + job[1]) + uint32(offset + unit))
            cuda.syncthreads()                               # nobody reads the ring or the tables any more
            fetch(base, packed, at, 0, t)
            fetch(base, packed, at, 1, t)
            for i in range(lane, H, 32):
                fill_norm(words, bytes_, mine, weights, overlay, plan, call_norm * PLAN, seed, i)
            cuda.syncwarp()
            stream = stream_of(plan, call * PLAN + 1, seed)
            shift = job_shift(job)
            enter(x, packed, at, overlay, tokens, int64(unit) * width + skip, plan[call * PLAN + 2], stream, shift,
                  unit, position0, table, q, row_x, n, s, top, total, target)
            for step in range(2 * PARTS):
                ptx.copy_wait_but_one()
                cuda.syncthreads()
                fetch(base, packed, at, step + 2, t)
                column0 = (step % PARTS) * STAGE
                for i in range(lane, STAGE, 32):
                    word, c = int32(0), column0 + i
                    if c < V:
                        word = word_of(overlay, plan[call * PLAN + 2], stream, c)
                    words[(mine + AT_NOISE) // 4 + i] = word
                cuda.syncwarp()
                if step == PARTS:
                    settle(top, most)
                at_weights = origin(int32(base + (step % STAGES) * BYTES), packed, at, t)
                for half in range(STAGE // 32):
                    product(acc, n, at_weights, half * (32 * H), start)
                    at_noise, c = int32(table + AT_NOISE + half * 128 + q * 16), int32(column0 + half * 32 + q * 4)
                    if step < PARTS:
                        largest_of(acc, s, shift, at_noise, top, c)
                    else:
                        weigh_all(acc, s, shift, at_noise, most, at_exps, total, c)
            mine_total, mine_distance = own_row(q, total, top, target)
            loss = int64(0)
            if live and q < ROWS and position0 + 8 * (q >> 1) < T:
                loss = position_loss(mine_total, mine_distance, 0)
            for k in (4, 8, 16):
                loss += cuda.shfl_xor_sync(0xFFFFFFFF, loss, k)
            if live and lane < ROWS:
                cuda.atomic.add(losses, 2 * int64(unit) + (lane & 1), loss)

    return stream_head, size.bytes
