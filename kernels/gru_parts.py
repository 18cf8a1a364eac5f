"""Parts of the recurrent kernels: the noise of inputs, the embedding and the norm, the rules of the states.

A word of bytes holds the columns 4 q... of 16. Quotients and norms are made by the float units, which have twice the
rate of the integer ones: a float FLOAT_BASE + k, rounded down, has 0x4000 + k in its bytes 1 and 2.
"""

from numba import cuda, float32, int8, int32, int64, uint32

from kernels import ptx
from kernels.host import Kernel
from kernels.noise import factor_function, input_words
from kernels.parts import A32, BITS, MAGIC, SIGNS, blocks, byte, called, clip, int32s, pack_bytes, quad_sum
from kernels.product import TALLEST
from kernels.rules import device

# bytes 1 and 2 of a float FLOAT_BASE + k are OFFSET + k, of any k from -OFFSET to 2^16, compared without a sign
FLOAT_BASE, OFFSET = 32768 + 0x4C00, 0x4C00
EVEN, ODD = 0x00FF00FF, 0xFF00FF00 - (1 << 32)


def both(x):
    """A word of two int16 x."""
    word = (x & 0xFFFF) * 0x10001
    return word - (1 << 32) if word >> 31 else word


HIGHEST, LOWEST = both(127), both(-127)


def clip_function(cc):
    """Device function that clips four floats FLOAT_BASE + k, which may have a fraction, to -127..127 and returns two
    words of two int16 OFFSET + k."""
    LOW, HIGH = float(FLOAT_BASE - 127), float(FLOAT_BASE + 127)
    LOW2, HIGH2 = both(OFFSET - 127), both(OFFSET + 127)
    NATIVE = cc[0] >= 9

    @device
    def limited(a):
        return a if NATIVE else ptx.maximum(ptx.minimum(a, float32(HIGH)), float32(LOW))

    @device
    def two(a, b):
        y = ptx.byte_permute(ptx.float_bits(limited(a)), ptx.float_bits(limited(b)), 0x6521)
        return ptx.max2_unsigned(ptx.min2_unsigned(y, HIGH2), LOW2) if NATIVE else y

    @device
    def clipped(a, b, c, d):
        return two(a, b), two(c, d)
    return clipped


def input_bytes(cfg, inputs):
    """Bytes of a pair's table of the noise of `inputs` inputs."""
    return inputs * (1, 4, 8)[cfg.ADAPTIVE_NOISE_MODE]


def input_functions(cfg, nz, inputs):
    """Device functions of the noise of a pair's inputs in a table at byte `at`:

    fill(words, bytes_, at, place, drawn, i, n)     sets entry `place` to the noise of an input, drawn[i], of n
    add(word, address, k, q, total)                 total + the terms of the inputs 16 k + 4 q...
    """
    MODE = cfg.ADAPTIVE_NOISE_MODE
    input_term = nz.input_term

    @device
    def fill(words, bytes_, at, place, drawn, i, n):
        if MODE == 0:
            bytes_[at + place] = drawn[i]
        else:
            words[at // 4 + place] = drawn[i]
            if MODE == 2:
                words[at // 4 + place + inputs] = drawn[i + n]

    if MODE == 0:
        @device
        def add(word, address, k, q, total):
            return ptx.dp4a(word, ptx.read_shared(address + k * 16 + q * 4), total)
    else:
        @device
        def add(word, address, k, q, total):
            c = ptx.load_shared4(address + k * 64 + q * 16)
            if MODE == 2:
                f = ptx.load_shared4(address + 4 * inputs + k * 64 + q * 16)
                for e in range(4):
                    total = int32(total + input_term(byte(word, e), c[e], ptx.bits_float(f[e])))
            else:
                for e in range(4):
                    total = int32(total + input_term(byte(word, e), c[e], float32(0)))
            return total

    return fill, add


def normed_function(cfg, cc):
    """Device function: ln of a word of x, of columns 16 k + 4 q... of member m's row; the table of the weights is at a
    shared address."""
    H, clipped = cfg.HIDDEN_DIM, clip_function(cc)

    @device
    def normed(word, m, k, address, q, reciprocal):
        at = int32(address + m * (4 * H) + k * 64 + q * 16)
        w, v = ptx.load_shared4(at), ptx.load_shared4(at + 8 * H)
        u = cuda.local.array(4, float32)
        for e in range(4):
            f = cuda.fma(ptx.bits_float(ptx.byte_permute(word, BITS, 0x7640 + e)), ptx.bits_float(w[e]),
                         ptx.bits_float(v[e]))
            u[e] = ptx.fma_down(f, reciprocal, float32(FLOAT_BASE + 1 / 256))
        y, z = clipped(u[0], u[1], u[2], u[3])
        return ptx.bytes4(y, z)
    return normed


def norm_table_function(cfg, fill_input, streams):
    """Device function that fills column i of a layer norm's table at byte 0: float32 weights of member 0 and 1, and
    -(MAGIC + 128) times them, 16 H bytes; then the input noises of `streams` products. drawn[first...]: as norm_kernel.
    """
    H = cfg.HIDDEN_DIM
    SIZE, INPUTS = input_bytes(cfg, H), input_words(cfg, H)

    @device
    def fill(words, bytes_, drawn, first, i):
        for member in range(2):
            at = member * H + i
            a = float32(clip(drawn[first + at]))
            words[at], words[2 * H + at] = ptx.float_bits(a), ptx.float_bits(float32(a * float32(-(MAGIC + 128))))
        for s in range(streams):
            fill_input(words, bytes_, 16 * H + s * SIZE, i, drawn, first + 2 * H + s * INPUTS + i, H)
    return fill


def int16_functions(cc):
    """(within, added), device functions of two words of two int16, y and z:

    within(y, z, low, high)     clipped; low, high: as `both` has them
    added(x, y, z)              a word of x (bytes + 128) plus them
    """
    add2, min2, max2 = ptx.int16_pairs(cc)
    LOW, HIGH = both(1), both(255)

    @device
    def within(y, z, low, high):
        return max2(min2(y, high), low), max2(min2(z, high), low)

    @device
    def added(x, y, z):
        y, z = add2(ptx.byte_permute(x, 0, 0x4140), y), add2(ptx.byte_permute(x, 0, 0x4342), z)
        y, z = within(y, z, LOW, HIGH)
        return ptx.bytes4(y, z)

    return within, added


def state_functions(cc):
    """(gated, next_state, opened, candidates), device functions of the rules of model.rules on four columns: h, f,
    `word` are words of bytes; y, z two int16 each. A product of bytes is a dot product of which all but one term is
    hidden by a mask, which serves two of four.

    gated(y, z, h)                  a word of bytes; y, z: the gate
    next_state(f, h, y, z)          two words of int16; y, z: the candidates
    opened(y, z, word, b, c)        the gate as two words of int16: quotients y, z, those of the input, biases b, c
    candidates(y, z, word, b, c)    the candidates from the same
    """
    FULL = both(254)
    (add2, _, _), (within, _) = ptx.int16_pairs(cc), int16_functions(cc)

    @called
    def gated(y, z, h):
        even, odd = int32(h & EVEN), int32(h & ODD)
        a, b = ptx.dp2a_low(y, even), ptx.dp2a_low(y, odd)
        c, d = ptx.dp2a_high(z, even), ptx.dp2a_high(z, odd)
        return ptx.byte_permute(ptx.byte_permute(a, b, 0x0051), ptx.byte_permute(c, d, 0x0051), 0x5410)

    @device
    def less(a, b):
        return add2(add2(a, int32(b ^ (-1))), int32(0x00010001))

    @called
    def next_state(f, h, y, z):
        even, odd = int32(f & EVEN), int32(f & ODD)
        h_low, h_high = ptx.low2(h), ptx.high2(h)
        y, z = less(y, h_low), less(z, h_high)
        return (add2(h_low, ptx.byte_permute(ptx.dp2a_low_u8(y, even), ptx.dp2a_low_u8(y, odd), 0x6521)),
                add2(h_high, ptx.byte_permute(ptx.dp2a_high_u8(z, even), ptx.dp2a_high_u8(z, odd), 0x6521)))

    @device
    def summed(y, z, word, b, c, low, high):
        return within(add2(add2(y, ptx.low2(word)), b), add2(add2(z, ptx.high2(word)), c), low, high)

    @called
    def opened(y, z, word, b, c):
        return summed(y, z, word, b, c, 0, FULL)

    @called
    def candidates(y, z, word, b, c):
        return summed(y, z, word, b, c, LOWEST, HIGHEST)

    return gated, next_state, opened, candidates


@device
def row_of(unit, position, n):
    """The even member's row of P = unit * n + position; the odd member's is 8 further."""
    place = int64(unit) * n + position
    return (int64(place >> 3) << 4) + (place & 7)


def embedding_functions(cfg, nz):
    """(of_token, embedded), device functions of the embedding. Its noise is in `drawn`: from `first` on that of the
    hidden side, then that of the tokens.

    of_token(drawn, first, token)                   a token's noise, and its factor
    embedded(x, to, packed, at, drawn, first, n, f, q)
                                                    x[to...] = four words [16 columns][row] of 32 columns of x, from
                                                    packed word `at` and drawn[first] on; n, f: of_token
    """
    H = cfg.HIDDEN_DIM
    SHIFT = cfg.NOISE_SHIFT
    AT_TOKENS, TOKENS = input_words(cfg, H), blocks(cfg.VOCAB_SIZE, 4) * 4
    table_term, factor = nz.table_term, factor_function(cfg)

    @device
    def of_token(drawn, first, token):
        at = first + AT_TOKENS + token
        return drawn[at], factor(drawn, at + TOKENS)

    @device
    def embedded(x, to, packed, at, drawn, first, n, f, q):
        e, u = ptx.load2(packed, at + q * 2), int32s(8)
        for i in range(2):
            here = first + i * 16 + q * 4
            other = ptx.load4(drawn, here)
            for k in range(4):
                d, v = table_term(n, f, other[k], factor(drawn, here + H + k)), byte(int32(e[i] ^ SIGNS), k)
                u[k], u[4 + k] = clip(int32(v + (d >> SHIFT))), clip(int32(v + (int32(-d) >> SHIFT)))
            x[to + 2 * i], x[to + 2 * i + 1] = pack_bytes(u, 0) ^ SIGNS, pack_bytes(u, 4) ^ SIGNS

    return of_token, embedded


def norm_kernel(cfg, nz, cc, streams, embeds=False):
    """out = ln(x) as core matrices, and its sums sb with `streams` input noises; the sums of the next product begin.
    Launch [units, ceil(n / 64)], 256 threads; four lanes have both members at a position. embeds: x is the
    embedding, which is stored first; token `position` of pair i is tokens[i * width + skip + position], rows_at the
    packed word of rows of H bytes.

    drawn: the norm, inputs of the streams; inputs of the hidden side of the embedding and of its tokens. sb:
    [3][stride]."""
    H = cfg.HIDDEN_DIM
    STEPS = H // 32
    SIZE = input_bytes(cfg, H)
    EMBEDDING = 2 * H + streams * input_words(cfg, H)
    fill_input, add = input_functions(cfg, nz, H)
    fill_norm = norm_table_function(cfg, fill_input, streams)
    normed = normed_function(cfg, cc)
    of_token, embedded = embedding_functions(cfg, nz)

    @cuda.jit(launch_bounds=256)
    def norm(drawn: A32, each, packed: A32, rows_at, tokens: A32, width, skip, n, stride, x: A32, out: A32, sb: A32):
        words, bytes_ = cuda.shared.array(0, int32), cuda.shared.array(0, int8)
        t, pair = cuda.threadIdx.x, int64(cuda.blockIdx.x)
        place = cuda.blockIdx.y * 64 + (t >> 2)
        q = t & 3
        base = ptx.shared_address(words, 0)
        first = pair * each
        for i in range(t, H, 256):
            fill_norm(words, bytes_, drawn, first, i)
        cuda.syncthreads()                                   # the table is whole
        inside, position = int32(1) if place < n else int32(0), min(place, n - 1)
        to = row_of(pair, position, n)
        at_x = to * (H // 4) + q * 2
        if embeds:
            token = tokens[pair * width + skip + position]
            e = int32s(4)
            token_noise, token_factor = of_token(drawn, first + EMBEDDING, token)
            for b in range(STEPS):
                embedded(e, 0, packed, rows_at + int64(token) * (H // 4) + b * 8, drawn, first + EMBEDDING + b * 32,
                         token_noise, token_factor, q)
                for m in range(2):
                    ptx.store2(x, at_x + m * (2 * H) + b * 8, e[m], e[2 + m])
        for member in range(2):
            total = int32(0)
            for b in range(STEPS):
                word = ptx.load2(x, at_x + member * (2 * H) + b * 8)
                total = ptx.distance4(word[1], SIGNS, ptx.distance4(word[0], SIGNS, total))
            mean = max(int32(uint32(quad_sum(total)) // uint32(H)), int32(1))
            reciprocal = ptx.reciprocal(float32(mean))
            sum0, sum1 = int32(0), int32(0)
            at_n = (to >> 3) * (2 * H) + member * (2 * H) + (to & 7) * 4 + q
            for b in range(STEPS):
                word = ptx.load2(x, at_x + member * (2 * H) + b * 8)
                for i in range(2):
                    k = 2 * b + i
                    v = normed(word[i], member, k, base, q, reciprocal)
                    sum0 = add(v, int32(base + 16 * H), k, q, sum0)
                    if streams > 1:
                        sum1 = add(v, int32(base + 16 * H + SIZE), k, q, sum1)
                    if ptx.keep_in_loop(inside) != 0:
                        out[at_n + k * 32] = v
            sum0, sum1, row = quad_sum(sum0), quad_sum(sum1), to + 8 * member
            if q == 0 and inside != 0:
                sb[row], sb[stride + row], sb[2 * stride + row] = sum0, sum1, 0

    return Kernel(norm, 16 * H + streams * SIZE)


def rows_of_places(places):
    """Rows of `places` pairs times positions, with those that fill the tallest tile."""
    return blocks(blocks(places, 8) * 16, TALLEST) * TALLEST
