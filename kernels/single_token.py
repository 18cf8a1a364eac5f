"""Single-token generation with both models: a forward pass of one token at a time, without noise, by dp4a."""

from numba import cuda, float32, int8, int32, int64, uint32

from kernels import ptx
from kernels.gru_parts import (B_F, B_H, DOWN, GATES, INNER, LAYER, NORM_1, NORM_2, RECUR, U_F, U_H, W_F, W_H)
from kernels.host import Kernel
from kernels.pairs import ntt_functions
from kernels.parts import (A32, A8, BITS, MAGIC, PLAN, amax_scale, byte, clip, quad_sum, quotient_function, rounded)
from kernels.rules import NORMS, build_noise, device, divide
from kernels.transformer import BIAS, NEXT_MATRIX, LN, LN_BIAS, MATRIX, MATRIX_BIAS, TABLE
from model import parameters


def _matrix_vector(K):
    @device
    def multiply(x, at_x, packed, at, columns, y, at_y, t):
        """y[at_y + c] = x . column c of a packed matrix, x from word at_x on: a warp makes eight columns."""
        lane = t & 31
        for block in range(t >> 5, columns // 8, 32):
            s = int32(0)
            base = at + block * (2 * K) + lane
            for piece in range(K // 16):
                s = ptx.dp4a(packed[base + piece * 32], x[at_x + piece * 4 + (lane & 3)], s)
            s = quad_sum(s)
            if (lane & 3) == 0:
                y[at_y + block * 8 + (lane >> 2)] = s
    return multiply


def _over_the_block(over_the_warp):
    @device
    def whole(x, part, t):
        """Of a block of 1024 threads; part: 32 words of shared memory."""
        x = over_the_warp(x)
        cuda.syncthreads()
        if (t & 31) == 0:
            part[t >> 5] = x
        cuda.syncthreads()
        return over_the_warp(part[t & 31])
    return whole


block_sum, block_max = _over_the_block(ptx.warp_sum), _over_the_block(ptx.warp_max)


@device
def embedding(packed, first, H, token, t):
    """Entry t of the embedding of a token, which is packed from word `first` on."""
    word = packed[first + (token >> 3) * (2 * H) + (t >> 4) * 32 + (token & 7) * 4 + ((t >> 2) & 3)]
    return int32(byte(word, t & 3))


def transformer_token_kernel(cfg):
    """The hidden state after one more token, as normed for the head: n int8 [H]. One block of 1024 threads; a thread is
    a channel.

    calls int32: rows of the plan in order: embed, then up and down of the first MLP, then for each layer ln_1, qkv, o,
    ln_2, up, down, then ln_f. keys, values: the two halves of the cache, int8 [layers][positions][H]; scores int32
    [heads][positions]."""
    H = cfg.HIDDEN_DIM
    D = cfg.HEAD_DIM
    L = cfg.N_LAYERS
    HEADS = cfg.N_HEADS
    SCALE_BIT = cfg.ROPE_SCALE_BIT
    SHIFT_ATTN = cfg.SHIFT_ATTN
    SHIFT_OUT = cfg.SHIFT_OUT
    SHIFT_UP = cfg.SHIFT_MLP_UP
    SHIFT_DOWN = cfg.SHIFT_MLP_DOWN
    WORDS = H // 4
    H4 = 4 * H
    NTT = cfg.NTT_MODE != 0
    coefficient, look_up = ntt_functions(cfg, build_noise(cfg), False, True)
    from_h, from_4h = _matrix_vector(H), _matrix_vector(4 * H)

    @device
    def normed(h, weights, plan, p, part, t):
        """Entry t of ln(h), h the thread's own channel."""
        mean = max(block_sum(int32(abs(h)), part, t) // int32(H), 1)
        if t >= H:
            return int32(0)
        product = int32(h * weights[plan[p + LN] + t])
        return clip(int32(divide(product, mean) + weights[plan[p + LN_BIAS] + t]))

    @device
    def scaled_down(v, part, t):
        """Entry t of amax(v)."""
        return byte(rounded(v, amax_scale(block_max(int32(abs(v)), part, t))), 1)

    @cuda.jit(launch_bounds=1024)
    def token(calls: A32, plan: A32, weights: A8, packed: A32, tokens: A32, at: A32, positions, rope: A32, exps: A32,
              gelu: A8, keys: A8, values: A8, key_words: A32, scores: A32, out: A8):
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
            h = int32(embedding(packed, plan[p + TABLE], H, token_id, t) + weights[plan[p + BIAS] + t])
            if NTT:
                c = coefficient(tokens, 0, here)
                h = int32(h + look_up(weights, weights, uint32(0), int32(0), int32(0), c, t)[0])
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
                    from_h(words, 0, packed, plan[p + which * NEXT_MATRIX], H, y, which * H, t)
                cuda.syncthreads()
                if t < H and (t & 1) == 0:
                    cos, sin = int64(rope[here * D + t % D]), int64(rope[here * D + t % D + 1])
                    half = int64(1) << int64(SCALE_BIT - 1)
                    for which in range(2):
                        a, b = int64(y[which * H + t]), int64(y[which * H + t + 1])
                        y[which * H + t] = (a * cos - b * sin + half) >> int64(SCALE_BIT)
                        y[which * H + t + 1] = (a * sin + b * cos + half) >> int64(SCALE_BIT)
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
                    d = int32((top[head] >> SHIFT_ATTN)
                              - (scores[head * positions + past] >> SHIFT_ATTN))
                    w = exps[min(d, int32(255))]
                    scores[head * positions + past] = w
                    cuda.atomic.add(total, head, int64(w))
                cuda.syncthreads()
                if t < H:
                    head, num = t // D, int64(0)
                    for past in range(here + 1):
                        num += int64(int32(scores[head * positions + past] * values[(base + past) * H + t]))
                    vector[t] = clip(int32(float(num) / float(total[head])))
                cuda.syncthreads()
                from_h(words, 0, packed, plan[calls[call + 1] * PLAN + MATRIX], H, y, 0, t)
                cuda.syncthreads()
                h = scaled_down(int32(h + (y[t] >> SHIFT_OUT)) if t < H else int32(0), part, t)
                n = normed(h, weights, plan, calls[call + 2] * PLAN, part, t)
                call += 3
            if t < H:
                vector[t] = n
            cuda.syncthreads()
            p = calls[call] * PLAN
            from_h(words, 0, packed, plan[p + MATRIX], 4 * H, y, 0, t)
            cuda.syncthreads()
            for i in range(t, 4 * H, 1024):
                bias = int32(weights[plan[p + MATRIX_BIAS] + i])
                vector[H + i] = gelu[clip(int32((y[i] >> SHIFT_UP) + bias)) & 255]
            cuda.syncthreads()
            from_4h(words, WORDS, packed, plan[calls[call + 1] * PLAN + MATRIX], H, y, 0, t)
            cuda.syncthreads()
            p = calls[call + 2] * PLAN                       # the next norm carries the bias of this product
            if t < H:
                h = int32(h + (y[t] >> SHIFT_DOWN) + weights[plan[p + BIAS] + t])
            h = scaled_down(h, part, t)
            n = normed(h, weights, plan, p, part, t)
            call += 3
        if t < H:
            out[t] = n

    return Kernel(token, 5 * H)


def _floor_quotient(cfg, inputs):
    """Device function: a sum over `inputs` divided, rounded down and clipped."""
    _, quotient = quotient_function(parameters.divisor(cfg, inputs), MAGIC, False)

    @device
    def divided(y):
        return int32(quotient(y) - BITS)
    return divided


def recurrent_token_kernel(cfg):
    """ln_f of the last layer's output after one more token: out int8 [H]. One block of 1024 threads; a thread is a
    channel. states int8 [L, H]: of the layers, before and after."""
    H = cfg.HIDDEN_DIM
    L = cfg.N_LAYERS
    LOWEST = 0 if cfg.MLP_RELU else -127
    from_h, from_4h = _matrix_vector(H), _matrix_vector(4 * H)
    quotient, quotient_down = _floor_quotient(cfg, H), _floor_quotient(cfg, 4 * H)
    divided = NORMS.quotient
    open_gate = NORMS.gate
    gated = NORMS.gated
    next_state = NORMS.next_state
    H4 = 4 * H

    @device
    def normed(x, weights, at, part, t):
        """Entry t of ln(x), x the thread's own channel."""
        mean = int32(max(block_sum(int32(abs(x)), part, t) // int32(H), 1))
        if t >= H:
            return int32(0)
        return divided(int32(x * weights[at + t]), mean, float32(float32(1) / float32(mean)))

    @cuda.jit(launch_bounds=1024)
    def token(plan: A32, weights: A8, packed: A32, tokens: A32, at: A32, states: A8, out: A8):
        # three vectors of H bytes, or one of 4 H after one
        words, vector = cuda.shared.array(0, int32), cuda.shared.array(0, int8)
        y = cuda.shared.array(H4, int32)
        part = cuda.shared.array(32, int32)
        t, id_ = cuda.threadIdx.x, tokens[at[0]]
        x = int32(0)
        if t < H:
            x = embedding(packed, plan[0], H, id_, t)
        for layer in range(L):
            first = 1 + layer * LAYER
            gates = (first + GATES) * PLAN
            recur = (first + RECUR) * PLAN
            inner = (first + INNER) * PLAN
            n, h = normed(x, weights, plan[(first + NORM_1) * PLAN], part, t), int32(0)
            if t < H:
                if at[0] > 0 and id_ != 0:
                    h = int32(states[layer * H + t])
                vector[t], vector[H + t] = n, h
            cuda.syncthreads()
            from_h(words, 0, packed, plan[gates + W_F], H, y, 0, t)
            from_h(words, 0, packed, plan[gates + W_H], H, y, H, t)
            from_h(words, H // 4, packed, plan[recur + U_F], H, y, 2 * H, t)
            cuda.syncthreads()
            f, c = int32(0), int32(0)
            if t < H:
                f = open_gate(int32(quotient(y[t]) + quotient(y[2 * H + t])), int32(weights[plan[recur + B_F] + t]))
                c = quotient(y[H + t])
                vector[2 * H + t] = gated(f, h)
            cuda.syncthreads()
            from_h(words, H // 2, packed, plan[recur + U_H], H, y, 0, t)
            cuda.syncthreads()
            if t < H:
                c = clip(int32(c + quotient(y[t]) + weights[plan[recur + B_H] + t]))
                h = next_state(f, h, c)
                states[layer * H + t] = h
                x = clip(int32(x + h))
            n = normed(x, weights, plan[(first + NORM_2) * PLAN], part, t)
            if t < H:
                vector[t] = n
            cuda.syncthreads()
            from_h(words, 0, packed, plan[inner], H4, y, 0, t)
            cuda.syncthreads()
            for i in range(t, H4, 1024):
                vector[H + i] = int32(max(quotient(y[i]), int32(LOWEST)))
            cuda.syncthreads()
            from_4h(words, H // 4, packed, plan[(first + DOWN) * PLAN], H, y, 0, t)
            cuda.syncthreads()
            if t < H:
                x = clip(int32(x + quotient_down(y[t])))
        n = normed(x, weights, plan[(1 + L * LAYER) * PLAN], part, t)
        if t < H:
            out[t] = n

    return Kernel(token, 5 * H)


def logits_kernel(cfg):
    """z = logits int32 [V] from x, the words of int8 [H]. Launch 256 threads a block of 64 columns."""
    H = cfg.HIDDEN_DIM
    V = cfg.VOCAB_SIZE
    SHIFT = cfg.SHIFT_LOGIT
    multiply = _matrix_vector(cfg.HIDDEN_DIM)

    if cfg.MODEL == "gru":
        logit = _floor_quotient(cfg, H)
    else:
        @device
        def logit(total):
            return int32(total >> SHIFT)

    @cuda.jit(launch_bounds=256)
    def logits(at, packed: A32, x: A32, z: A32):
        sums = cuda.shared.array(64, int32)
        t, first = cuda.threadIdx.x, cuda.blockIdx.x * 64
        multiply(x, 0, packed, at + first * (H // 4), 64, sums, 0, t)
        cuda.syncthreads()
        if t < 64 and first + t < V:
            z[first + t] = logit(sums[t])

    return Kernel(logits)
