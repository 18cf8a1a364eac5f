"""The MLP of the recurrent model on cc 9.0 where H = 256: a wgmma kernel whose activations stay in registers, as bytes.

`kernels.gru` decides (class Fused), has the embedding and the recurrence, and documents calls, plan and rows;
`kernels.gru_narrow` has the gates and the head. With the general products and norms a layer took twice as long (179
against 356 M tokens/s, one layer, V 256, T 100, H200, commit e65f980): between up and down 4 H bytes a row would leave
the chip.

A quotient is (acc * 2^(16 - D) + s * n * 2^(16 - D - N)) >> 16, for accumulator, sum sb with the member's sign, column
noise, divisor 2^D and noise shift N: the upper half of a word, and two of them are clipped by one instruction.
"""

from numba import cuda, int8, int32, int64, uint32

from model import parameters
from kernels import gru_parts, ptx
from kernels.gru_parts import stream_of
from kernels.parts import PLAN, quad_sum, thread
from kernels.rules import device, loudest

H = 256
LEAST_SEQ_LEN = 32                          # then the 32 positions of a tile belong to two pairs at most
SHARED = 227 * 1024
TILE, LINE = 64, 32                         # rows of a warpgroup; words of a line of the cache
GROUPS = 2                                  # warpgroups of a block
HIGHEST, LOWEST = gru_parts.both(127), gru_parts.both(-127)


def fits(cfg, cc, shared_limit):
    """Whether this path serves a configuration on a device."""
    return (tuple(cc) == (9, 0) and shared_limit >= SHARED and (cfg.HIDDEN_DIM, cfg.ADAPTIVE_NOISE_MODE) == (H, 0)
            and cfg.SEQ_LEN >= LEAST_SEQ_LEN and parameters.divisor(cfg, H) == 256 and cfg.NOISE_SHIFTS[-1] <= 8
            and H * 127 * ((127 << 8) + (loudest(cfg) ** 2 << 8 - cfg.NOISE_SHIFTS[0])) < 2 ** 31)


@device
def left_of(shift):
    """How far noise goes left to be in 256ths."""
    return int32(int32(int32(8) - shift) & int32(31))


def mlp_kernel(cfg, nz):
    """x = clip(x + W_down (W_up ln_2(x))) in place. Launch [blocks] of GROUPS warpgroups; each takes `each` tiles of 64
    rows in a row. They read the weights as they stream by: for every 128 inner values their columns of W_up and their
    rows of W_down, 32 KB each.

    at: packed word of W_up; W_down follows in chunks of 128 inputs. plan rows: as in kernels.gru."""
    STAGES, CHUNKS, INNER, T, job_shift = 4, 8, 4 * H, cfg.SEQ_LEN, nz.shift
    THREADS, STEPS, STAGE, LEFT, BARRIERS = 128 * GROUPS, 2 * CHUNKS, 128 * H, 8 * STAGES, 2 * STAGES
    DOWN_SHIFT, LOW = parameters.divisor(cfg, INNER).bit_length() - 1, 0 if cfg.MLP_RELU else LOWEST
    # tables of a pair, of which a warpgroup has two, the even and the odd one: column noise of W_up; the norm; column
    # noise and input noise of W_down
    AT_N, AT_TABLES, AT_LN = STAGES * STAGE, STAGES * STAGE + GROUPS * TILE * H, 4 * INNER
    AT_DOWN = AT_LN + 16 * H + gru_parts.input_bytes(cfg, H, 4)
    AT_INNER, TABLE = AT_DOWN + 4 * H, AT_DOWN + 4 * H + INNER
    noise, (fill_norm, norm) = nz.noise, gru_parts.norm_functions(cfg, nz, (9, 0), 1)
    (load_rows, store_rows), added = gru_parts.row_functions(H), gru_parts.added_function((9, 0))
    up, down = ptx.wgmma_product(128, H // 32, False, False), ptx.wgmma_product(256, 4, True, True)

    @device
    def fill(words, bytes_, mine, seed, weights, overlay, plan, p_norm, p_inner, p_down, p_sums, left, c):
        """The tables of a pair, from byte `mine` on."""
        up_stream, inner_stream = stream_of(plan, p_inner + 1, seed), stream_of(plan, p_sums, seed)
        for i in range(c, INNER, 128):
            words[mine // 4 + i] = int32(noise(up_stream, i) << left)
            bytes_[mine + AT_INNER + i] = noise(inner_stream, i)
        for i in range(c, H, 128):
            fill_norm(words, bytes_, mine + AT_LN, weights, overlay, plan, p_norm, seed, i)
            words[(mine + AT_DOWN) // 4 + i] = noise(stream_of(plan, p_down + 1, seed), i)

    @device
    def quotients(acc, i, s, n, unit):
        """Four inner values; unit = 256 (of a constant ptxas would make shifts, which the busier units take)."""
        a, b = int32(int32(acc[i] * unit) + int32(s * n[0])), int32(int32(acc[i + 1] * unit) + int32(s * n[1]))
        c, d = int32(int32(acc[i + 4] * unit) + int32(s * n[2])), int32(int32(acc[i + 5] * unit) + int32(s * n[3]))
        a, b = ptx.byte_permute(a, b, 0x7632), ptx.byte_permute(c, d, 0x7632)
        return ptx.bytes4(ptx.max2(ptx.min2(a, HIGHEST), LOW), ptx.max2(ptx.min2(b, HIGHEST), LOW))

    @device
    def inner(acc, u, s0, s1, at_noise, at_inputs, unit, t0, t1):
        """u = 128 inner values of both rows; t0, t1 + their sums with the input noise."""
        for k in range(8):
            n, inputs = ptx.load_shared4(int32(at_noise + k * 64)), ptx.read_shared(int32(at_inputs + k * 16))
            u[2 * k], u[2 * k + 1] = quotients(acc, 8 * k, s0, n, unit), quotients(acc, 8 * k + 2, s1, n, unit)
            t0, t1 = ptx.dp4a(u[2 * k], inputs, t0), ptx.dp4a(u[2 * k + 1], inputs, t1)
        return t0, t1

    @device
    def sum_of(a, s, n, shift):
        return int32(int32(a + ptx.shift_right(int32(s * n), shift)) >> int32(DOWN_SHIFT))

    @device
    def finish(sums, x, m, s, shift, at_noise):
        """x of row m + the quotients of W_down."""
        for k in range(H // 16):
            i, n = 8 * k + 2 * m, ptx.load_shared4(int32(at_noise + k * 64))
            y = ptx.clip2(ptx.saturate2(sum_of(sums[i], s, n[0], shift), sum_of(sums[i + 1], s, n[1], shift)))
            z = ptx.clip2(ptx.saturate2(sum_of(sums[i + 4], s, n[2], shift), sum_of(sums[i + 5], s, n[3], shift)))
            x[2 * k + m] = added(x[2 * k + m], y, z)

    @device
    def fetch(base, bar, packed, at, step):
        """Starts the copy of the weights of a step: W_up and W_down in turn."""
        stage, chunk = step % STAGES, int32(step & int32(STEPS - 1)) >> 1
        ptx.barrier_expect(bar + 8 * stage, STAGE)
        ptx.copy_bulk(base + stage * STAGE, packed, at + ((step & 1) * CHUNKS + chunk) * (STAGE // 4), STAGE,
                      bar + 8 * stage)

    @device
    def weights_of(base, bar, step):
        """Their shared address, when they are there."""
        ptx.barrier_wait(bar + 8 * (step & (STAGES - 1)), step // STAGES & 1)
        return int32(base + (step & (STAGES - 1)) * STAGE)

    @device
    def leave(base, bar, packed, at, step, steps, lane):
        """This warp has done with them; the last warp to leave starts the next copy."""
        at_left = int32(bar + LEFT + 8 * (step & (STAGES - 1)))
        if lane == 0 and ptx.count_round(at_left, 4 * GROUPS - 1) == 4 * GROUPS - 1 and int32(step + STAGES) < steps:
            fetch(base, bar, packed, at, int32(step + STAGES))

    @cuda.jit(launch_bounds=THREADS)
    def mlp(call_norm, call_inner, call_down, call_sums, at, plan, weights, packed, overlay, job, offset, tiles, each,
            x):
        words, bytes_ = cuda.shared.array(0, int32), cuda.shared.array(0, int8)
        barriers = cuda.shared.array(BARRIERS, int64)        # of stages, then how many warps left each
        t = thread()
        group, lane, c = t >> 7, t & 31, t & 127
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
        mine, at_n = AT_TABLES + group * (2 * TABLE), base + AT_N + group * (TILE * H)
        noise_unit, shift = int32(int32(cuda.gridDim.y) << int32(8)), job_shift(job)
        seed0 = uint32(uint32(job[0] + job[1]) + uint32(offset))
        first, loaded = (cuda.blockIdx.x * GROUPS + group) * each, int32(-1)
        # the last blocks go through the motions beyond the last tile, for the other warpgroup
        step, steps = int32(0), int32(each * STEPS)
        sums, acc, u = cuda.local.array(128, int32), cuda.local.array(64, int32), cuda.local.array(16, int32)
        row_x, n = cuda.local.array(64, int32), cuda.local.array(64, int32)
        for turn in range(each):
            tile, live = int32(min(first + turn, tiles - 1)), first + turn < tiles
            row = tile * TILE + (c >> 5) * 16 + (lane >> 2)
            unit = int32(uint32(tile * 32 + (c >> 5) * 8 + (lane >> 2)) // uint32(T))
            low, high = int32(uint32(tile * 32) // uint32(T)), int32(uint32(tile * 32 + 31) // uint32(T))
            ptx.named_barrier(1 + group, 128)                # nobody reads n or the tables any more
            if high > loaded:
                for coming in range(max(low, loaded + 1), high + 1):
                    fill(words, bytes_, mine + (coming & 1) * TABLE, uint32(seed0 + uint32(coming)), weights, overlay,
                         plan, call_norm * PLAN, call_inner * PLAN, call_down * PLAN, call_sums * PLAN, left_of(shift),
                         c)
                ptx.named_barrier(1 + group, 128)
                loaded = high
            load_rows(row_x, x, int64(row) * (H // 4), q)
            ptx.prefetch(x, int64(min(tile + 1, tiles - 1)) * (TILE * H // 4) + c * LINE)
            table = int32(base + mine + (unit & 1) * TABLE)
            s0, _ = norm(row_x, n, 0, 0, int32(table + AT_LN), q)
            s1, _ = norm(row_x, n, 0, 1, int32(table + AT_LN), q)
            s1, to = int32(-s1), int32(at_n + (c >> 5) * (16 * H) + lane * 4)
            for k in range(16):
                ptx.store_shared(int32(to + k * 128), n[2 * k])
                ptx.store_shared(int32(to + k * 128 + 8 * H), n[2 * k + 1])
            ptx.proxy_fence()
            ptx.named_barrier(1 + group, 128)
            t0, t1 = int32(0), int32(0)
            for i in range(128):
                sums[i] = 0
            for chunk in range(CHUNKS):
                up(acc, int32(at_n), weights_of(base, bar, step))
                leave(base, bar, packed, at, step, steps, lane)
                t0, t1 = inner(acc, u, s0, s1, int32(table + chunk * 512 + q * 16),
                               int32(table + AT_INNER + chunk * 128 + q * 4), noise_unit, t0, t1)
                down(sums, u, weights_of(base, bar, int32(step + 1)))
                leave(base, bar, packed, at, int32(step + 1), steps, lane)
                step = int32(step + 2)
            load_rows(row_x, x, int64(row) * (H // 4), q)
            finish(sums, row_x, 0, quad_sum(t0), shift, int32(table + AT_DOWN + q * 16))
            finish(sums, row_x, 1, int32(-quad_sum(t1)), shift, int32(table + AT_DOWN + q * 16))
            if live:
                store_rows(row_x, x, int64(row) * (H // 4), q)

    return mlp, AT_TABLES + GROUPS * 2 * TABLE
