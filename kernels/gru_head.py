"""The head of the recurrent model with noise, for vocabularies whose logits a warp cannot keep, on every card: the
vocabulary passes by twice, for the largest logits and for the sums, and no logit leaves the registers. (Logits through
memory, as kernels.gru has them: 39 M tokens/s instead of 54; H 256, V 8192, T 64, H200, commit e65f980.)

A warp takes a task at a time: both members of a pair at eight (TILES 1) or sixteen positions (2). The warps of a block
go through the vocabulary together, STAGE columns at a time, which lie in a ring of shared memory. The target's logit is
a dot product of its own. """

from types import SimpleNamespace

from numba import cuda, int8, int32, int64, uint32

from kernels import gru_parts, ptx
from kernels.gru_parts import OFFSET, STAGE, begin_with, columns, input_bytes
from kernels.parts import PLAN, blocks, quad_max, quad_sum, unrolled
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
    AT_B, AT_NOISE = 16 * H, 16 * H + input_bytes(cfg, H, 4)
    LEAST = -(1 << 31)
    noise, job_shift = nz.noise, nz.shift
    fill_norm, norm = gru_parts.norm_functions(cfg, nz, cc, 1)
    fill_input, _ = gru_parts.input_functions(cfg, nz, H, 4)
    quotients = gru_parts.quotient_functions(cfg, nz, cc, H, add=128)
    word_of, factor, noisy = quotients.word, quotients.factor, quotients.noisy
    pairs, pairs_of, START = quotients.pairs, quotients.pairs_of, quotients.start
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
        a = ptx.load_shared(int32(int32(ptx.byte_permute(d, 0, 0x4440) * int32(128)) + exps))
        b = ptx.load_shared(int32(int32(ptx.byte_permute(d, 0, 0x4441) * int32(128)) + exps))
        c = ptx.load_shared(int32(int32(ptx.byte_permute(d, 0, 0x4442) * int32(128)) + exps))
        d = ptx.load_shared(int32(int32(ptx.byte_permute(d, 0, 0x4443) * int32(128)) + exps))
        return int32(int32(a + b) + int32(c + d))

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

    @device
    def enter_row(m, tile, packed, at, token, column, shift, table, q, row_x, n, s, top, total, target):
        """n, the sums, and the target's logit of member m of a tile."""
        r, at_n = 2 * tile + m, WORDS * tile
        sb, _ = norm(row_x, n, at_n, m, table, int32(table + AT_B), q)
        s[r], top[r], total[r] = factor(sb, m, shift), int32(LEAST), int64(0)
        target[r] = logit(noisy(target_sum(n, at_n + m, packed, at, token, q), s[r], column, shift))

    enter_rows = unrolled(2, enter_row)

    @device
    def enter(tile, x, packed, at, overlay, tokens, at_token, at_overlay, stream, shift, unit, position0, table, q,
              row_x, n, s, top, total, target):
        position = min(position0 + 8 * tile, T - 1)
        load_rows(row_x, x, unit, position, q)
        token = tokens[at_token + position + 1]
        column = word_of(noise(stream, token), overlay[at_overlay + token], stream, token)
        enter_rows(tile, packed, at, token, column, shift, table, q, row_x, n, s, top, total, target)

    @device
    def largest_row(r, acc, i, s, n, shift, top, c):
        top[r] = largest(acc, (r >> 1) * 16 + 8 * i + 2 * (r & 1), s[r], n, shift, top[r], c)

    @device
    def weigh_row(r, acc, i, s, n, shift, most, exps, total, c):
        total[r] += weigh(acc, (r >> 1) * 16 + 8 * i + 2 * (r & 1), s[r], n, shift, most[r], exps, c)

    largest_rows, weigh_rows = unrolled(ROWS, largest_row), unrolled(ROWS, weigh_row)

    @device
    def largest_part(i, acc, s, shift, at_noise, top, c):
        """top of all rows after 16 columns from c + 16 i on."""
        largest_rows(acc, i, s, ptx.load_shared4(int32(at_noise + i * 64)), shift, top, int32(c + i * 16))

    @device
    def weigh_part(i, acc, s, shift, at_noise, most, exps, total, c):
        weigh_rows(acc, i, s, ptx.load_shared4(int32(at_noise + i * 64)), shift, most, exps, total, int32(c + i * 16))

    @device
    def settle(r, top, most):
        """From the largest noisy sum of row r to its logit, and that in every byte of a word."""
        top[r] = logit(ptx.bits_float(quad_max(top[r])))
        most[r] = ptx.byte_permute(top[r], 0, 0)

    enter_all, largest_all, weigh_all = unrolled(TILES, enter), unrolled(2, largest_part), unrolled(2, weigh_part)
    settle_all = unrolled(ROWS, settle)

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
                fill_norm(words, mine, weights, overlay, plan, call_norm * PLAN, seed, i)
                stream = uint32(seed + uint32(plan[call_norm * PLAN + 4]))
                entry = overlay[plan[call_norm * PLAN + 5] + i]
                fill_input(words, bytes_, mine + AT_B, i >> 4, (i >> 2) & 3, i & 3, stream, entry, i)
            cuda.syncwarp()
            stream = uint32(seed + uint32(plan[call * PLAN + 1]))
            shift = job_shift(job)
            enter_all(x, packed, at, overlay, tokens, int64(unit) * width + skip, plan[call * PLAN + 2], stream, shift,
                      unit, position0, table, q, row_x, n, s, top, total, target)
            for step in range(2 * PARTS):
                ptx.copy_wait_but_one()
                cuda.syncthreads()
                fetch(base, packed, at, step + 2, t)
                column0 = (step % PARTS) * STAGE
                for i in range(lane, STAGE, 32):
                    word, c = int32(0), column0 + i
                    if c < V:
                        word = word_of(noise(stream, c), overlay[plan[call * PLAN + 2] + c], stream, c)
                    words[(mine + AT_NOISE) // 4 + i] = word
                cuda.syncwarp()
                if step == PARTS:
                    settle_all(top, most)
                at_weights = origin(int32(base + (step % STAGES) * BYTES), packed, at, t)
                for half in range(STAGE // 32):
                    product(acc, n, at_weights, half * (32 * H), start)
                    at_noise, c = int32(table + AT_NOISE + half * 128 + q * 16), int32(column0 + half * 32 + q * 4)
                    if step < PARTS:
                        largest_all(acc, s, shift, at_noise, top, c)
                    else:
                        weigh_all(acc, s, shift, at_noise, most, at_exps, total, c)
            # lane q of the four that share the rows makes the loss of row q
            mine_total, mine_distance = int64(1), int32(0)
            for r in range(ROWS):
                whole = quad_sum64(total[r])
                if q == r:
                    mine_total, mine_distance = whole, int32(top[r] - target[r])
            loss = int64(0)
            if live and q < ROWS and position0 + 8 * (q >> 1) < T:
                loss = position_loss(mine_total, mine_distance, 0)
            for k in (4, 8, 16):
                loss += cuda.shfl_xor_sync(0xFFFFFFFF, loss, k)
            if live and lane < ROWS:
                cuda.atomic.add(losses, 2 * int64(unit) + (lane & 1), loss)

    return stream_head, size.bytes


@device
def quad_sum64(x):
    """int64 sum over the four lanes that share a row."""
    x += cuda.shfl_xor_sync(0xFFFFFFFF, x, 1)
    return x + cuda.shfl_xor_sync(0xFFFFFFFF, x, 2)
