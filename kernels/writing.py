"""Writing: the logits after the next token of many sequences, by the unperturbed model (SPEC 10).

Rows        A sequence is a row, 16 of them a tile of a product (ptx.mma_s8). A block has two tiles where they fit.
Memory      The vectors of a row lie in shared memory, in regions of H bytes. The vector of an MLP, four times as long,
            takes the place of regions 2 to 5.
Phases      In turn a warp takes a row, a head of a row, or 32 columns of a product. A row is always the same warp's.
"""

from collections import namedtuple

import numpy as np
from numba import cuda, float32, int32, int64, int8

from kernels import ptx
from kernels.host import Kernel
from kernels.parts import A2, A32, A8, BITS, MAGIC, amax_scale, blocks, clip, int32s, quotient_function, rounded
from kernels.rules import NORMS, device, ntt_functions
from kernels.transformer import turned_function
from model import parameters

WARPS = 16
THREADS = 32 * WARPS
COLUMNS = 32                 # of a product that a warp makes at a time
AHEAD = 4                    # steps of 32 inputs whose columns are on their way, at most
# regions: activations X, whose number is 0; N, what a norm or attention makes of them; the inner vector of an MLP, or
# of the recurrent model gates, candidates, gated states and states, of the transformer queries
N, INSIDE = 1, 2
GATE, CANDIDATE, GATED, STATE, REGIONS = range(2, 7)
# What the phases of a block share: shared memory; where a thread is; the block's sequences, `rows` from `first` on; the
# position that is read; and arguments of the kernel
Block = namedtuple("Block", "memory lane warp first rows position places weights packed tokens room count rope exps "
                            "gelu cache y")


def row_bytes(H):
    """Of shared memory: an odd multiple of 32, so that the loads of a warp have no bank conflicts."""
    return REGIONS * H + 32


def rows_of_block(cfg, gpu):
    return 32 if 32 * row_bytes(cfg.HIDDEN_DIM) <= gpu.shared else 16


def logit_columns(cfg):
    """From one row of logits to the next."""
    return blocks(cfg.VOCAB_SIZE, COLUMNS) * COLUMNS


def places(cfg, packing):
    """int32 [L, parameters.table]: where the parameters of a layer begin: matrices in the packed array, vectors in the
    weights."""
    table = np.zeros((cfg.N_LAYERS, len(parameters.table(cfg))), np.int32)
    for t in parameters.tensors(cfg):
        table[t.layer, t.param] = packing.at.get((t.name, t.layer), t.weights)
    return table


# --- parts of both models ---------------------------------------------------------------------------------------------

def product_function(gpu, cfg, K, finish, both=False):
    """Device function: the product of region x, vectors of K entries, with a matrix of `columns` columns, a parameter
    of a layer. finish(block, at, row, c, total, where) takes a result; at: entry c of region X in block.memory. With
    `both` it is finish(block, row, c, a, b, where), which takes those of columns c and c + 1.

    Lane 4 g + q takes inputs 8 q... of every 32 as those 4 q... and 16 + 4 q... of ptx.mma_s8: the order of inputs is
    free, and so a load has eight of them. acc[16 i + 4 j + 2 h + e]: tile i, row g + 8 h, column 8 j + 2 q + e."""
    H, STEPS, TILES = cfg.HIDDEN_DIM, K // 32, rows_of_block(cfg, gpu) // 16
    EACH = max(n for n in range(1, AHEAD + 1) if STEPS % n == 0)
    ROW, TURNS = row_bytes(H), STEPS // EACH
    ACC, WORDS = 16 * TILES, 8 * EACH

    @gpu.called
    def fetch(columns, d, packed, at):
        for j in range(4):
            columns[8 * d + 2 * j], columns[8 * d + 2 * j + 1] = ptx.load2(packed, at + j * (2 * K))

    @gpu.called
    def add_product(acc, memory, x, columns, d):
        for i in range(TILES):
            even, odd = ptx.load2(memory, x + 16 * i * ROW), ptx.load2(memory, x + (16 * i + 8) * ROW)
            for j in range(4):
                at, b = 16 * i + 4 * j, 8 * d + 2 * j
                acc[at], acc[at + 1], acc[at + 2], acc[at + 3] = ptx.mma_s8(
                    (even[0], odd[0], even[1], odd[1]), columns[b], columns[b + 1],
                    (acc[at], acc[at + 1], acc[at + 2], acc[at + 3]))

    @gpu.called
    def product(block, layer, parameter, x, columns, where):
        acc, fetched = int32s(ACC), int32s(WORDS)
        g, q = block.lane >> 2, block.lane & 3
        for first in range(COLUMNS * block.warp, columns, COLUMNS * WARPS):
            here = g * ROW + x * H + 8 * q
            at = block.places[layer, parameter] + first * (K // 4) + ((q & 2) << 4) + g * 4 + (q & 1) * 2
            for i in range(ACC):
                acc[i] = 0
            for d in range(EACH):
                fetch(fetched, d, block.packed, at + 64 * d)
            for turn in range(TURNS):
                at += 64 * EACH
                for d in range(EACH):
                    add_product(acc, block.memory, here, fetched, d)
                    here += 32
                    if turn < TURNS - 1:
                        fetch(fetched, d, block.packed, at + 64 * d)
            for i in range(2 * TILES):
                for j in range(4):
                    a, row, c = 16 * (i >> 1) + 4 * j + 2 * (i & 1), 8 * i + g, first + 8 * j + 2 * q
                    if both:
                        finish(block, row, c, acc[a], acc[a + 1], where)
                    else:
                        for e in range(2):
                            finish(block, row * ROW + c + e, row, c + e, acc[a + e], where)
        cuda.syncthreads()
    return product


def divided_function(cfg, inputs):
    """Device function: a result of a product over `inputs`, divided, rounded down and clipped."""
    _, quotient = quotient_function(parameters.divisor(cfg, inputs), MAGIC, False)

    @device
    def divided(total):
        return quotient(total) - BITS
    return divided


def norms_function(gpu, cfg):
    """Device function: region N = ln(X) of all rows, by a norm in `places`, behind which its biases are."""
    GRU, H, ROW = cfg.MODEL == "gru", cfg.HIDDEN_DIM, row_bytes(cfg.HIDDEN_DIM)
    divided, plain = NORMS.quotient, NORMS.normed

    @gpu.called
    def norms(block, layer, ln):
        for row in range(block.warp, block.rows, WARPS):
            total = int32(0)
            for i in range(block.lane, H, 32):
                total += int32(abs(block.memory[row * ROW + i]))
            mean = int32(max(ptx.warp_sum(total) // H, 1))
            reciprocal = float32(float32(1) / float32(mean))
            for i in range(block.lane, H, 32):
                x, weight = block.memory[row * ROW + i], block.weights[block.places[layer, ln] + i]
                if GRU:
                    x = divided(int32(x * weight), mean, reciprocal)
                else:
                    x = plain(x, weight, block.weights[block.places[layer, ln + 1] + i], mean)
                block.memory[row * ROW + N * H + i] = x
        cuda.syncthreads()
    return norms


def embed_function(gpu, cfg):
    """Device function: region X of all rows, for the tokens at the position (SPEC 7, 13, 14)."""
    H, V, ROW = cfg.HIDDEN_DIM, cfg.VOCAB_SIZE, row_bytes(cfg.HIDDEN_DIM)
    GRU, NTT = cfg.MODEL == "gru", cfg.NTT_MODE != 0
    coefficient, place = ntt_functions(cfg, True)

    @gpu.called
    def embed(block):
        for row in range(block.warp, block.rows, WARPS):
            first = (block.first + row) * block.room
            token = block.tokens[first + block.position]
            c = coefficient(block.tokens, first, block.position) if NTT else int32(0)
            for i in range(block.lane, H, 32):
                x = int32(block.weights[(i >> 2) * (4 * V) + token * 4 + (i & 3)])
                if not GRU:
                    x += block.weights[block.places[0, 1] + i]
                if NTT:
                    for k in range(3):
                        x += block.weights[place(k, c, i)] >> 2
                block.memory[row * ROW + i] = clip(x)
    return embed


# --- the recurrent model ----------------------------------------------------------------------------------------------

def recurrent_functions(gpu, cfg):
    """Device functions (mix, mlp, logit): the first two, of a block, a layer and the norm before them, behind which
    their parameters are, go from region N to region X and the cache, int8 [L, count, H] (SPEC 13)."""
    H, ROW = cfg.HIDDEN_DIM, row_bytes(cfg.HIDDEN_DIM)
    LOWEST = 0 if cfg.MLP_RELU else -127
    divided, divided_down = divided_function(cfg, H), divided_function(cfg, 4 * H)
    open_gate, gated, next_state = NORMS.gate, NORMS.gated, NORMS.next_state

    @gpu.called
    def keep(block, at, row, c, total, where):
        """where: (region, least value)."""
        block.memory[at + where[0] * H] = max(divided(total), where[1])

    @gpu.called
    def open_gates(block, at, row, c, total, biases):
        f = open_gate(block.memory[at + GATE * H], divided(total) + block.weights[biases + c])
        block.memory[at + GATE * H] = f - 127
        block.memory[at + GATED * H] = gated(f, block.memory[at + STATE * H])

    @gpu.called
    def move_states(block, at, row, c, total, where):
        """where: (place of the biases, first entry of the block's states)."""
        new = clip(block.memory[at + CANDIDATE * H] + divided(total) + block.weights[where[0] + c])
        h = next_state(block.memory[at + GATE * H] + 127, block.memory[at + STATE * H], new)
        block.memory[at] = clip(block.memory[at] + h)
        if row < block.rows:
            block.cache[where[1] + row * H + c] = h

    @gpu.called
    def add(block, at, row, c, total, where):
        block.memory[at] = clip(block.memory[at] + divided_down(total))

    to_keep, to_gates, to_states = (product_function(gpu, cfg, H, finish) for finish in (keep, open_gates, move_states))
    down = product_function(gpu, cfg, 4 * H, add)

    @gpu.device
    def mix(block, layer, ln):
        first = (layer * block.count + block.first) * H
        for row in range(block.warp, block.rows, WARPS):
            begun = block.position > 0 and block.tokens[(block.first + row) * block.room + block.position] != 0
            for i in range(block.lane, H, 32):
                block.memory[row * ROW + STATE * H + i] = block.cache[first + row * H + i] if begun else 0
        to_keep(block, layer, ln + 1, N, H, (GATE, -127))
        to_keep(block, layer, ln + 4, N, H, (CANDIDATE, -127))
        to_gates(block, layer, ln + 2, STATE, H, block.places[layer, ln + 3])
        to_states(block, layer, ln + 5, GATED, H, (block.places[layer, ln + 6], first))

    @gpu.device
    def mlp(block, layer, ln):
        to_keep(block, layer, ln + 1, N, 4 * H, (INSIDE, LOWEST))
        down(block, layer, ln + 2, INSIDE, H, 0)

    return mix, mlp, divided


# --- the transformer --------------------------------------------------------------------------------------------------

def attention_function(gpu, cfg):
    """Device function: region N of a head of a row, from its queries; cache[keys], cache[values]: those of the head at
    position 0."""
    H, D, SHIFT_ATTN = cfg.HIDDEN_DIM, cfg.HEAD_DIM, cfg.SHIFT_ATTN
    DIMENSIONS = D // 32                                     # that a lane has

    @gpu.device
    def score(block, query, key):
        s = int32(0)
        for i in range(D // 16):
            a, b = ptx.load4(block.memory, query + 16 * i), ptx.load4(block.cache, key + 16 * i)
            for k in range(4):
                s = ptx.dp4a(a[k], b[k], s)
        return s >> SHIFT_ATTN

    @gpu.called
    def attend(block, at, keys, values):
        """at: where this head of region X lies."""
        query, top = at + INSIDE * H, int32(-2 ** 31)
        for past in range(block.lane, block.position + 1, 32):
            top = max(top, score(block, query, keys + past * H))
        top = ptx.warp_max(top)
        total, sums = int64(0), cuda.local.array(DIMENSIONS, int64)
        for d in range(DIMENSIONS):
            sums[d] = 0
        for start in range(0, block.position + 1, 32):
            weight = int32(0)
            if start + block.lane <= block.position:
                weight = block.exps[min(top - score(block, query, keys + (start + block.lane) * H), 255)]
            total += ptx.warp_sum(weight)
            for past in range(start, min(start + 32, block.position + 1), 8):
                for i in range(8):                           # the last ones may have a weight of 0
                    w = cuda.shfl_sync(0xFFFFFFFF, weight, past + i)
                    for d in range(DIMENSIONS):
                        value = block.cache[values + min(past + i, block.position) * H + 32 * d + block.lane]
                        sums[d] = ptx.mad_wide(w, value, sums[d])
        for d in range(DIMENSIONS):
            block.memory[at + N * H + 32 * d + block.lane] = clip(float(sums[d]) / float(total))
    return attend


def transformer_functions(gpu, cfg):
    """The same for the transformer (SPEC 7); cache: keys and values of a layer, one after the other, int8 [count, room,
    H]."""
    H, D, ROW = cfg.HIDDEN_DIM, cfg.HEAD_DIM, row_bytes(cfg.HIDDEN_DIM)
    HEADS, SHIFT_OUT, SHIFT_LOGIT = cfg.N_HEADS, cfg.SHIFT_OUT, cfg.SHIFT_LOGIT
    SHIFT_UP, SHIFT_DOWN = cfg.SHIFT_MLP_UP, cfg.SHIFT_MLP_DOWN
    turned, attend = turned_function(cfg), attention_function(gpu, cfg)

    @gpu.called
    def turn(block, row, c, a, b, where):
        """where: (which matrix, the position to which its results are turned)."""
        cos, sin = ptx.load2(block.rope, int64(where[1] * D + c % D))
        a, b = turned(a, b, cos, sin)
        ptx.store2(block.y, (block.first + row) * (3 * H) + where[0] * H + c, a, b)

    @gpu.called
    def add(block, at, row, c, total, where):
        """where: (shift, place of the biases or -1)."""
        total = int32(block.memory[at] + (total >> where[0]))
        if where[1] >= 0:
            total += block.weights[where[1] + c]
        block.y[(block.first + row) * (3 * H) + c] = total

    @gpu.called
    def inner(block, at, row, c, total, biases):
        u = clip(int32((total >> SHIFT_UP) + block.weights[biases + c]))
        block.memory[at + INSIDE * H] = block.gelu[u & 255]

    to_turn, up = product_function(gpu, cfg, H, turn, True), product_function(gpu, cfg, H, inner)
    out, down = (product_function(gpu, cfg, K, add) for K in (H, 4 * H))

    @gpu.called
    def amax(block, first, out, to):
        """out[to...] = amax of block.y[first...], H of them."""
        top = int32(0)
        for i in range(block.lane, H, 32):
            top = max(top, int32(abs(block.y[first + i])))
        scale = amax_scale(ptx.warp_max(top))
        for i in range(block.lane, H, 32):
            out[to + i] = rounded(block.y[first + i], scale) >> 8

    @gpu.called
    def settle(block):
        for row in range(block.warp, block.rows, WARPS):
            amax(block, (block.first + row) * (3 * H), block.memory, row * ROW)

    @gpu.device
    def mix(block, layer, ln):
        length = block.room * H
        keys = (2 * layer * block.count + block.first) * length
        values = keys + block.count * length
        for matrix in range(3):                              # position 0 turns nothing
            to_turn(block, layer, ln + 2 + matrix, N, H, (matrix, block.position if matrix < 2 else 0))
        for row in range(block.warp, block.rows, WARPS):
            y, at = (block.first + row) * (3 * H), row * length + block.position * H
            amax(block, y, block.memory, row * ROW + INSIDE * H)
            amax(block, y + H, block.cache, keys + at)
            amax(block, y + 2 * H, block.cache, values + at)
        cuda.syncthreads()
        for task in range(block.warp, block.rows * HEADS, WARPS):
            row, head = task // HEADS, task % HEADS * D
            attend(block, row * ROW + head, keys + row * length + head, values + row * length + head)
        cuda.syncthreads()
        out(block, layer, ln + 5, N, H, (SHIFT_OUT, -1))
        settle(block)

    @gpu.device
    def mlp(block, layer, ln):
        up(block, layer, ln + 2, N, 4 * H, block.places[layer, ln + 3])
        down(block, layer, ln + 4, INSIDE, H, (SHIFT_DOWN, block.places[layer, ln + 5]))
        settle(block)

    @device
    def logit(total):
        return total >> SHIFT_LOGIT

    return mix, mlp, logit


# --- the kernel -------------------------------------------------------------------------------------------------------

def kernel(cfg, gpu):
    """z = logits int32 [count or more, logit_columns] after the tokens at position at[0]: tokens int32 [count, room];
    cache: what earlier positions left. last: the layer whose cache is the last that anybody wants; L: z, too. places:
    see `places`; y int32 [rows of all blocks, 3 H]: results of a product before their row's largest is known."""
    H, L, WIDTH = cfg.HIDDEN_DIM, cfg.N_LAYERS, logit_columns(cfg)
    GRU, ROWS = cfg.MODEL == "gru", rows_of_block(cfg, gpu)
    number = {p.name: i for i, p in enumerate(parameters.table(cfg))}
    LN_1, LN_2, LN_F = number["ln_1"], number["ln_2"], number["ln_f"]
    FIRST, LN_INIT, HEAD = (0, 0, 1) if GRU else (-1, number["ln_init"], 0)
    embed, norms = embed_function(gpu, cfg), norms_function(gpu, cfg)
    mix, mlp, logit = (recurrent_functions if GRU else transformer_functions)(gpu, cfg)

    @gpu.called
    def store(block, row, c, a, b, z):
        ptx.store2(z, (block.first + row) * WIDTH + c, logit(a), logit(b))

    head = product_function(gpu, cfg, H, store, True)

    @cuda.jit(launch_bounds=THREADS)
    @gpu.unroll
    def write(places: A2, weights: A8, packed: A32, tokens: A32, at: A32, room, count, last, rope: A32, exps: A32,
              gelu: A8, cache: A8, y: A32, z: A32):
        t, first = cuda.threadIdx.x, int64(cuda.blockIdx.x) * ROWS
        block = Block(cuda.shared.array(0, int8, 128), t & 31, t >> 5, first, min(ROWS, count - first), at[0], places,
                      weights, packed, tokens, room, count, rope, exps, gelu, cache, y)
        embed(block)
        for layer in range(FIRST, L):                        # the transformer has an MLP before its layers
            if layer >= 0:
                norms(block, layer, LN_1)
                mix(block, layer, LN_1)
                if layer == last:
                    return
            norms(block, max(layer, 0), LN_2 if layer >= 0 else LN_INIT)
            mlp(block, max(layer, 0), LN_2 if layer >= 0 else LN_INIT)
        norms(block, 0, LN_F)
        head(block, 0, HEAD, N, WIDTH, z)

    return Kernel(write, ROWS * row_bytes(H))
