"""The votes of a chunk with noise on activations (SPEC 21) on a GPU, for both models of egg_kernels.

The matrices' votes are int8 products over the positions of all groups, by the kernel of the update (kernels.update.
products_kernel) with its operand layout: a row for every input of a matrix and for every output with noise, contiguous
over n = group * PADDED + position, PADDED = SEQ_LEN rounded up to 4. Positions beyond SEQ_LEN are 0.

Credits are int8 [n][heads][4 QUADS]: of the members of a group, in words of four; heads is 1 but for keys and values.
"""

from collections import namedtuple
from types import SimpleNamespace

import numpy as np
from numba import cuda, float64, int8, int16, int32, int64, types, uint32

from kernels import gru_parts, ptx
from kernels.host import SOFTMAX_SUM, SOFTMAX_TOP, Kernel
from kernels.parts import A8, A32, A64, AU32, B1, across, blocks, called, int32s, pack_bytes, unroll
from kernels.product import padded_length
from kernels.rules import device
from kernels.transformer import turned_function
from kernels.update import DEPTH, SHARED, SPLIT, THREADS, TILE, place, products_kernel, vote_index
from model import activations, integer_tables, parameters, rules, steps

BLOCK = 128
WARPS = BLOCK // 32
TOGETHER = 16                # positions whose logits a thread computes, a multiple of 4
ONES = 0x01010101
A16 = types.Array(int16, 1, "C")
hash32 = rules.draw_rules(device, 0).hash32
RULES = rules.activation_rules(device)
digit = RULES.digit
least_difference = RULES.least_difference
least_vote = RULES.least_vote
credited = RULES.credited
rounded = RULES.rounded
settled = RULES.settled
weighed = RULES.weighed
weighed_excess = RULES.weighed_excess
attention_share = RULES.attention_share
handed_down = RULES.handed_down
excess = RULES.excess
dithered = RULES.dithered


@device
def turn4(x):
    """Transposes the bytes of four words."""
    turned = int32s(4)
    for half in range(2):
        low = ptx.byte_permute(x[0], x[1], 0x5140 + 0x2222 * half)
        high = ptx.byte_permute(x[2], x[3], 0x5140 + 0x2222 * half)
        turned[2 * half] = ptx.byte_permute(low, high, 0x5410)
        turned[2 * half + 1] = ptx.byte_permute(low, high, 0x7632)
    return turned


@device
def warp_sum(x):
    """int64 sum over the warp."""
    for d in range(5):
        x += across(x, 16 >> d)
    return x


@device
def warp_max(x):
    """int32 maximum over the warp."""
    for d in range(5):
        x = max(x, across(x, 16 >> d))
    return x


@device
def core_word(row, j, inputs, width):
    """Where word j of a row lies in core matrices of `inputs` inputs, in pieces of `width`."""
    piece = uint32(4 * j) // uint32(width)
    return ((row >> 6) * (16 * inputs) + ((row >> 3) & 7) * (2 * width) + (row & 7) * 4 + (j & 3)
            + piece * (16 * width) + ((j >> 2) - piece * (width >> 4)) * 32)


def row_function(cfg):
    """Device function: the row of the even member of a pair at a position."""
    T, LENGTH = cfg.SEQ_LEN, padded_length(cfg)
    PAIRED = cfg.MODEL == "gru"

    @device
    def row_of(pair, t):
        return gru_parts.row_of(pair, t, T) if PAIRED else pair * (2 * LENGTH) + t

    return row_of


@device
def share_of(units, quads):
    """(j, quad, group, t): a thread has number j of `units` at the positions t, t + 1, t + 2 and t + 3 of a group, four
    of all positions; quads: of a group."""
    i = cuda.grid(1)
    j, quad = i % units, i // units
    group = quad // quads
    return j, quad, group, (quad - group * quads) * 4


def build(cfg):
    """{name: Kernel} of a configuration; `products` is that of the update. Blocks have BLOCK threads."""
    made = [_keep_kernel(cfg), _errors_kernel(cfg), *_credit_kernels(cfg), _sums_kernel(cfg), *_vote_kernels(cfg)]
    made += [_share_kernel(cfg)] if cfg.MODEL == "transformer" else []
    return {function.__name__: Kernel(cuda.jit(launch_bounds=BLOCK)(function)) for function in made}


def padded(cfg):
    """Positions of a group in an operand row."""
    return 4 * blocks(cfg.SEQ_LEN, 4)


def _keep_kernel(cfg):
    """What is kept of the unperturbed model: the inputs of matrices."""
    H, T = cfg.HIDDEN_DIM, cfg.SEQ_LEN
    PAIRED, PADDED = cfg.MODEL == "gru", padded(cfg)
    row_of = row_function(cfg)

    @device
    def unit_word(j, inputs):
        """Where word j of an MLP's inner values lies in the order of kernels.transformer's u."""
        if PAIRED or inputs == H:
            return j
        unit = 4 * j
        sub = unit // H
        i = unit - sub * H
        return ((i >> 5) * 128 + sub * 32 + (i & 31)) >> 2

    def keep(source: A32, inputs, pieces, row, offset, count, rows, operand: A32):
        """Operand rows from `row` on of what a pass left: `inputs` bytes a position of the even members of `count`
        pairs, the first of which is group `offset`. pieces: as of core_word; 0: it left rows of words. A thread four
        inputs of four positions."""
        words = inputs // 4
        j, quad, group, t = share_of(words, PADDED // 4)
        if group < count:
            words_of = int32s(4)
            for e in range(4):
                words_of[e] = 0
                if t + e < T:
                    at = (group * T + t + e) * words + j
                    if pieces > 0:
                        at = core_word(row_of(group, t + e), unit_word(j, inputs), inputs, pieces)
                    words_of[e] = source[at]
            turned = turn4(words_of)
            for e in range(4):
                operand[place(rows, row + j * 4 + e, offset * PADDED + quad * 4)] = turned[e]

    return keep


def _errors_kernel(cfg):
    """The errors of the head."""
    H, V = cfg.HIDDEN_DIM, cfg.VOCAB_SIZE
    T, K = cfg.SEQ_LEN, cfg.GROUP_SIZE
    PAIRED, PADDED = cfg.MODEL == "gru", padded(cfg)
    TARGETS, SKIP = cfg.TARGETS, cfg.STATE_TOKENS
    DIVISOR, SHIFT = parameters.divisor(cfg, H), cfg.SHIFT_LOGIT
    HEAD_WORDS, QUADS = TOGETHER * H // 4, TOGETHER // 4
    row_of = row_function(cfg)

    @device
    def add_dots(acc, head, address, v):
        """acc += products of column v of the head with TOGETHER positions at a shared address."""
        at = v
        for j in range(H // 4):
            w = head[uint32(at)]
            at = int32(at + V)
            for four in range(0, TOGETHER, 4):
                x = ptx.load_shared4(address + four * 4)
                for e in range(4):
                    acc[four + e] = ptx.dp4a(w, x[e], acc[four + e])
            address = int32(address + TOGETHER * 4)

    @device
    def logit_of(dot):
        return max(min(dot // DIVISOR, 127), -127) if PAIRED else dot >> SHIFT

    def errors(head: A32, normed: A32, losses: A64, exps: A32, tokens: A32, width, chunk: AU32, row, offset, count,
               rows, counted: A8, operand: A32, operand_bytes: A8):
        """Operand rows from `row` on: the head's errors, of `count` groups from `offset` on. head: its canonical
        weights; losses: as kernels.head leaves them; chunk: the job; counted: see Votes. A block TOGETHER positions:
        first as if no token were wanted, whose error is one for every distance from the largest logit but for its
        dither, then those that are."""
        x = cuda.shared.array(HEAD_WORDS, int32, 16)
        of_distance = cuda.shared.array((TOGETHER, 256), int32)
        tops = cuda.shared.array(TOGETHER, int32)
        first, lane = cuda.blockIdx.x * TOGETHER, cuda.threadIdx.x
        for i in range(lane, HEAD_WORDS, BLOCK):
            n = first + i % TOGETHER
            group = min(n // PADDED, count - 1)              # beyond a window any position will do
            x[i] = normed[core_word(row_of(group, min(n - group * PADDED, T - 1)), i // TOGETHER, H, H)]
        for i in range(lane, TOGETHER * 256, BLOCK):
            e, distance = i >> 8, i & 255
            group = (first + e) // PADDED
            t = first + e - group * PADDED
            top, error = SOFTMAX_TOP, int32(0)               # beyond a window: no error
            if group < count and t < T:
                softmax = losses[(2 * group + 1) * T + t]
                top, error = softmax % SOFTMAX_SUM - SOFTMAX_TOP, excess(0, 1, exps[distance], softmax // SOFTMAX_SUM)
                error = weighed_excess(error, counted[(offset + group) * T + t])
            of_distance[e, distance] = error
            if distance == 0:
                tops[e] = top
        cuda.syncthreads()
        address, acc, values = ptx.shared_address(x, 0), int32s(TOGETHER), int32s(4)
        places = cuda.local.array(QUADS, int64)
        for i in range(QUADS):
            places[i] = place(rows, row, offset * PADDED + first + 4 * i)
        for v in range(lane, int32(V), int32(BLOCK)):
            for e in range(TOGETHER):
                acc[e] = 0
            add_dots(acc, head, address, v)
            for four in range(0, TOGETHER, 4):
                group = (first + four) // PADDED
                t = first + four - group * PADDED
                if group < count:
                    seed = chunk[0] + (chunk[1] // (K // 2) + (offset + group))
                    for e in range(4):
                        logit = logit_of(acc[four + e])
                        below = uint32(min(int32(tops[four + e] - logit), int32(255)))
                        number = uint32((t + e) * V + v)
                        values[e] = dithered(logit if PAIRED else int32(0), of_distance[four + e, below], seed, number)
                    to = (v >> 3) * (SPLIT * 2) + (v & 7) * 4    # as place says: rows in eights
                    operand[places[four // 4] + to] = pack_bytes(values, 0)
        cuda.syncthreads()
        for i in range(lane, TOGETHER * TARGETS, BLOCK):
            e, k = i // TARGETS, i % TARGETS
            group = (first + e) // PADDED
            t = first + e - group * PADDED
            if group < count and t < T:
                at = group * width + SKIP + 1
                drawn = at + T + t * (TARGETS - 1) - 1       # the first target is the token that follows
                v = tokens[at + t] if k == 0 else tokens[drawn + k]
                wanted, dot = tokens[at + t] == v, int32(0)
                for other in range(1, TARGETS):
                    wanted += tokens[drawn + other] == v
                for j in range(H // 4):
                    dot = ptx.dp4a(head[j * V + v], x[j * TOGETHER + e], dot)
                logit, softmax = logit_of(dot), losses[(2 * group + 1) * T + t]
                error = excess(wanted, TARGETS, exps[min(tops[e] - logit, 255)], softmax // SOFTMAX_SUM)
                error = weighed_excess(error, counted[(offset + group) * T + t])
                seed = uint32(chunk[0] + (chunk[1] // (K // 2) + (offset + group)))
                error = dithered(logit if PAIRED else int32(0), error, seed, t * V + v)
                n = offset * PADDED + first + e
                operand_bytes[4 * place(rows, row + v, n // 4 * 4) + n % 4] = int8(error)

    return errors


def _share_kernel(cfg):
    """The attention of the transformer."""
    H, T = cfg.HIDDEN_DIM, cfg.SEQ_LEN
    D, HEADS = cfg.HEAD_DIM, cfg.N_HEADS
    SHIFT_ATTN = cfg.SHIFT_ATTN
    row_of = row_function(cfg)

    def share(queries: A32, keys: A32, exps: A32, at, offset, shares: A16):
        """shares int16 [group][head][position][position that it sees], from shares[at] on: of the unperturbed model's
        attention, in 2^-12. Launch [groups, heads], a warp for every fourth position."""
        scores = cuda.shared.array((WARPS, T), int32)
        lane, warp = cuda.threadIdx.x & 31, cuda.threadIdx.x >> 5
        pair, head = cuda.blockIdx.x, cuda.blockIdx.y
        for t in range(warp, T, WARPS):
            row, top = row_of(pair, t), -2 ** 31
            for s in range(lane, t + 1, 32):
                other, score = row_of(pair, s), int32(0)
                for j in range(D // 4):
                    word = head * (D // 4) + j
                    score = ptx.dp4a(queries[core_word(row, word, H, H)], keys[core_word(other, word, H, H)], score)
                scores[warp, s] = score >> SHIFT_ATTN
                top = max(top, score >> SHIFT_ATTN)
            top, total = warp_max(top), int64(0)
            for s in range(lane, t + 1, 32):
                weight = exps[min(top - scores[warp, s], 255)]
                scores[warp, s] = weight
                total += weight
            total = warp_sum(total)
            first = at + (((offset + pair) * HEADS + head) * T + t) * T
            for s in range(lane, t + 1, 32):
                shares[first + s] = attention_share(scores[warp, s], total)

    return share


def _credit_kernels(cfg):
    """From losses to credits."""
    T, K = cfg.SEQ_LEN, cfg.GROUP_SIZE
    HEADS = cfg.N_HEADS
    PAIRED = cfg.MODEL == "gru"
    PADDED, MEMBERS = padded(cfg), 4 * blocks(K, 4)
    BITS, CREDIT = activations.fraction_bits(cfg), cfg.CREDIT
    LEVELS, UNIT = activations.LEVELS, activations.UNIT

    def measure(clean: A64, losses: A64, counted: A8, totals: A64):
        """Losses become what is better than the mean of the group (SPEC 21, D), 0 where a position does not count.
        totals[0] += the sizes of all of them; totals[1] += the losses of the groups' clean model; totals[2] += how many
        count. One thread per position."""
        i = cuda.grid(1)
        total, clean_loss, votes = int64(0), int64(0), int64(0)
        if i * K < losses.size:
            group = i // T
            at, gains = group * (K - 1) * T + i, int64(0)
            clean_loss = clean[group * T + i]
            for k in range(K):
                gains += clean_loss - losses[at + k * T]
            votes = K if counted[i] != 0 else 0
            for k in range(K):
                better = K * (clean_loss - losses[at + k * T]) - gains if votes else int64(0)
                total += abs(better)
                losses[at + k * T] = better
        total, clean_loss, votes = warp_sum(total), warp_sum(clean_loss), warp_sum(votes)
        if cuda.threadIdx.x & 31 == 0:
            cuda.atomic.add(totals, 0, total)
            cuda.atomic.add(totals, 1, clean_loss)
            cuda.atomic.add(totals, 2, votes)

    def credit(losses: A64, totals: A64, credits: A8, later: A8):
        """credits, later int8: of positions, and in the recurrent model with later ones. One thread per member."""
        least = cuda.local.array(LEVELS, int64)
        for level in range(LEVELS):
            least[level] = least_difference(level + 1, totals[0], totals[2])
        member = cuda.grid(1)
        if member * T < losses.size:
            group = member // K
            k, after = member - group * K, int32(0)
            for back in range(T):
                t = T - 1 - back
                e = digit(losses[member * T + t], least)
                at = (group * PADDED + t) * MEMBERS + k
                if PAIRED:
                    after = credited(e, after, BITS, CREDIT)
                    credits[at], later[at] = e, after
                else:
                    credits[at] = e * UNIT

    def attend(shares: A16, at, credits: A8, later: A8, below: A8):
        """later int8 [n][heads][members]: the credits of keys and values of a layer; below: those of what lies below
        it. credits: of its outputs; shares[at...]: its attention. One thread per position and member."""
        i = cuda.grid(1)
        k, n = i % MEMBERS, i // MEMBERS
        group = n // PADDED
        s = n - group * PADDED
        if i < below.size and s < T and k < K:
            attended = int32(0)
            for head in range(HEADS):
                total, here = int32(0), at + (group * HEADS + head) * (T * T) + s
                for t in range(s, T):
                    total += shares[here + t * T] * credits[i + (t - s) * MEMBERS]
                later[(n * HEADS + head) * MEMBERS + k] = settled(total, 12)
                attended += rounded(total, 8)
            below[i] = handed_down(credits[i], attended, HEADS)

    return (measure, credit) if PAIRED else (measure, credit, attend)


def _sums_kernel(cfg):
    """Settled sums of credit times the sign of the noise."""
    H, D, T = cfg.HIDDEN_DIM, cfg.HEAD_DIM, cfg.SEQ_LEN
    K, LAYERS = cfg.GROUP_SIZE, cfg.N_LAYERS
    PADDED, QUADS = padded(cfg), blocks(cfg.GROUP_SIZE, 4)
    turned = turned_function(cfg)

    @device
    def whose_turn(first, turn):
        """A mask of bytes: which of the members from number `first` on have the noise of layer `turn`."""
        mask = -1
        if LAYERS > 1 and turn >= 0:
            mask = int32(0)
            for u in range(4):
                if int32(uint32(first + uint32(u)) % uint32(LAYERS)) == turn:
                    mask |= int32(255) << 8 * u
        return mask

    @called
    def hashed(seed, number):
        return hash32(seed, number)

    @called
    def add4(sums, i, draws, four):
        """sums[4 i ...] += the credits of the four members whose noise of outputs 4 i .. 4 i + 3 has a minus."""
        signs = int32s(4)
        for e in range(4):
            signs[e] = draws[e] >> i & ONES
        by_output = turn4(signs)
        for e in range(4):
            sums[4 * i + e] = ptx.dp4a(by_output[e], four, sums[4 * i + e])

    @called
    def settle(out, j, e, total, weight, shift):
        out[j] |= (weighed(total, weight, shift) & 255) << 8 * e

    @called
    def turn_back(sums, j, cos, sin):
        sums[j], sums[j + 1] = turned(sums[j], sums[j + 1], cos, -sin)

    @unroll
    def add_up(credits: A32, heads, job: AU32, begins, turn, shift, rotated, rope: A32, units, row, positions, rows,
               weights: A8, operand: A32):
        """Operand rows from `row` on. A thread has the 32 outputs of a hash at four positions; credits: a word for
        every four members; rotated: the outputs are those of queries or keys, whose sums are turned back; weights: see
        Votes."""
        words = units // 32
        b, quad, group, t = share_of(words, PADDED // 4)
        if quad * 4 < positions:
            number = uint32(2) * job[1] + group * K
            head = b * 32 // D if heads > 1 else int64(0)
            sums, out, draws = int32s(32), int32s(32), cuda.local.array(4, uint32)
            for j in range(32):
                out[j] = 0
            for e in range(4):
                for j in range(32):
                    sums[j] = 0
                all_credits, at = int32(0), ((quad * 4 + e) * heads + head) * QUADS
                here = begins + ((t + e) * int32(words) + b)
                for k in range(QUADS):
                    first = uint32(number + 4 * k)
                    four = int32(credits[at + k] & whose_turn(first, turn))
                    if four != 0:
                        all_credits = ptx.dp4a(four, ONES, all_credits)
                        for d in range(4):
                            draws[d] = hashed(uint32(job[0] + first + d), here)
                        for i in range(8):
                            add4(sums, int32(i), draws, four)
                for j in range(32):                          # a set bit is a minus
                    sums[j] = all_credits - 2 * sums[j]
                if rotated:
                    at_angle = min(t + e, T - 1) * D + (b * 32) % D
                    for i in range(16):
                        turn_back(sums, int32(2 * i), rope[at_angle + 2 * i], rope[at_angle + 2 * i + 1])
                for j in range(32):
                    settle(out, int32(j), e, sums[j], weights[group], shift)
            to = place(rows, row + b * 32, quad * 4)
            for j in range(32):                              # as place says: rows in eights
                operand[to + (j >> 3) * (SPLIT * 2) + (j & 7) * 4] = out[j]

    return add_up


def _vote_kernels(cfg):
    """The votes that are no products, and the digits of all."""
    H, T, V = cfg.HIDDEN_DIM, cfg.SEQ_LEN, cfg.VOCAB_SIZE
    PADDED = padded(cfg)
    WIDTH, SKIP = cfg.READERS * cfg.WINDOW, cfg.STATE_TOKENS             # between the windows of two groups
    ALPHA = activations.alpha(cfg)

    def token_votes(operand: A32, row, windows: A32, positions, rows, at, weight, votes: A32):
        """Adds `weight` times operand rows from `row` on to the votes of the embedding's columns, canonical from
        votes[at] on. A thread an output and four positions."""
        unit, quad, group, t = share_of(H, PADDED // 4)
        if quad * 4 < positions:
            word = operand[place(rows, row + unit, quad * 4)]
            for e in range(4):
                vote = ptx.byte_permute(word, 0, 0x8880 + 0x1111 * e)
                if t + e < T and vote != 0:
                    token = windows[group * WIDTH + SKIP + t + e]
                    cuda.atomic.add(votes, at + vote_index(token, unit, True, V), weight * vote)

    def vote_sizes(votes: A32, tensors: A64, sizes: A64):
        """sizes[i] += the sizes of the votes on tensor i: tensors int64 [2 i] its first weight, [2 i + 1] its size.
        Grid: [blocks, tensors]."""
        tensor, total = cuda.blockIdx.y, int64(0)
        first, size = tensors[2 * tensor], tensors[2 * tensor + 1]
        for i in range(cuda.blockIdx.x * BLOCK + cuda.threadIdx.x, size, cuda.gridDim.x * BLOCK):
            total += abs(int64(votes[first + i]))
        total = warp_sum(total)
        if cuda.threadIdx.x & 31 == 0:
            cuda.atomic.add(sizes, tensor, total)

    def vote_digits(votes: A32, tensors: A64, sizes: A64, digits: A8):
        """digits int8 [weights]. Grid: as vote_sizes."""
        tensor = cuda.blockIdx.y
        first, size = tensors[2 * tensor], tensors[2 * tensor + 1]
        least = least_vote(sizes[tensor], size, float64(ALPHA))
        for i in range(cuda.blockIdx.x * BLOCK + cuda.threadIdx.x, size, cuda.gridDim.x * BLOCK):
            vote = votes[first + i]
            digits[first + i] = int8((vote >= least) - (vote <= -least))

    def pack_digits(digits: A8, packed: B1):
        """packed uint8 [digits / 5] (model.steps). One thread per byte."""
        i = cuda.grid(1)
        if i < packed.size:
            byte = int32(0)
            for k in range(5):
                digit = digits[5 * i + 4 - k]
                byte = byte * int32(3) + (int32(2) if digit < 0 else digit)
            packed[i] = byte

    return token_votes, vote_sizes, vote_digits, pack_digits


# Groups that the clean model reads: `count` from number `first` of the chunk on; job: of the chunk
Groups = namedtuple("Groups", "stream job first count")


class Votes:
    """The device arrays and launches of a chunk's votes; `keep`, `attended` and `head` while the clean model reads,
    then `finish`. Arrays are reserved by `reserve`, on the device. Of them weights int8 [groups] are those of the
    windows and counted int8 [groups * SEQ_LEN] those of the positions, 0 where they do not count (SPEC 22): all 7
    unless somebody sets them."""

    def __init__(self, cfg, pieces, wgmma):
        self.cfg, self._pieces = cfg, pieces                 # inputs of a piece of the MLP's inner values
        self.kernels = build(cfg) | {"products": Kernel(cuda.jit(products_kernel(wgmma)), SHARED)}
        self.matrices, biases, self.embedding = activations.votes(cfg)
        self.phases = activations.phases(cfg).values()
        self.groups = cfg.CHUNK_SIZE // cfg.GROUP_SIZE
        self.padded = padded(cfg)
        self.positions = self.groups * self.padded
        # the bias is the weight of an input that is always 1
        self._products = [*self.matrices, *(activations.Vote(tensor, phase, "one") for tensor, phase in biases)]
        # numbers of operand rows: of phases, of the head's errors, of (input, layer)
        self._counts = ({phase: phase.units for phase in self.phases} | {None: cfg.VOCAB_SIZE}
                        | {(vote.inputs, vote.tensor.layer): vote.tensor.rows for vote in self._products})
        self._row, end = {}, 0                               # the first of them
        for kind, count in self._counts.items():
            self._row[kind], end = end, end + 8 * blocks(count, 8)
        self._rows, self._splits = end, blocks(self.positions, SPLIT)
        self._tensors = parameters.tensors(cfg)
        self._recurrent = cfg.MODEL == "gru"
        self._heads = 1 if self._recurrent else cfg.N_HEADS  # of credits of keys and values
        self._attention = 0 if self._recurrent else self.groups * cfg.N_HEADS * cfg.SEQ_LEN ** 2       # of a layer

    def _sizes(self):
        """{name: (numbers, dtype)} of the arrays."""
        cfg, places = self.cfg, self.groups * self.cfg.SEQ_LEN
        credits = self.positions * 4 * blocks(cfg.GROUP_SIZE, 4)
        return dict(operand=(self._rows * (self._splits + 1) * SPLIT // 4, np.int32),
                    clean=(2 * places, np.int64), losses=(cfg.CHUNK_SIZE * cfg.SEQ_LEN, np.int64),
                    credits=(credits, np.int8), below=(credits, np.int8), later=(credits * self._heads, np.int8),
                    shares=(max(1, cfg.N_LAYERS * self._attention), np.int16), digits=(cfg.CHUNK_DIGITS, np.int8),
                    kept=(2 * places * cfg.HIDDEN_DIM // 4 if self._recurrent else 1, np.int32),
                    votes=(cfg.CHUNK_DIGITS, np.int32),
                    weights=(self.groups, np.int8), counted=(places, np.int8),
                    # the size of differences, the loss, the number of differences, the sizes of votes; then the packed
                    # digits
                    result=(3 + len(self._tensors) + blocks(cfg.CHUNK_DIGITS, 40), np.int64))

    def bytes_needed(self):
        return sum(count * np.dtype(kind).itemsize for count, kind in self._sizes().values())

    def reserve(self):
        """Reserves the arrays, all 0 but the operand rows of ones and the weights."""
        zeros = {name: np.zeros(count, kind) for name, (count, kind) in self._sizes().items()}
        zeros["weights"][:] = zeros["counted"][:] = activations.LEVELS
        operand = zeros["operand"].view(np.int8).reshape(-1, self._rows // 8, SPLIT // 16, 8, 16)            # see place
        tiles, tensors = [], self._tensors
        for t, phase, name in self._products:
            units, inputs = self._row[phase], self._row[name, t.layer]
            if not t.matrix:
                operand[:, inputs // 8, :, 0] = 1
            # the votes on a vector lie as those on a matrix of one column, whose rows are the outputs
            tiles += [(units + p, inputs + s, min(TILE, t.cols - p), min(TILE, t.rows - s), 0,
                       blocks(self.positions, DEPTH) * DEPTH, t.weights - (4 * units if t.matrix else units),
                       t.cols if t.matrix else 1, t.matrix, s)
                      for p in range(0, t.cols, TILE) for s in range(0, t.rows, TILE)]
        self.arrays = arrays = SimpleNamespace(**{name: cuda.to_device(array) for name, array in zeros.items()})
        self._totals, digits = arrays.result[:3 + len(tensors)], arrays.result[3 + len(tensors):].view(np.uint8)
        self._packed = digits[:steps.packed_size(self.cfg.CHUNK_DIGITS)]
        self._tiles = cuda.to_device(np.array(tiles, np.int32))
        self._of_tensors = cuda.to_device(np.array([x for t in tensors for x in (t.weights, t.size)], np.int64))
        self._rope = cuda.to_device(integer_tables.rope_table(self.cfg, self.cfg.SEQ_LEN).ravel())

    def _launch(self, name, work, stream, *arguments, threads=BLOCK, high=1):
        """A kernel whose threads each do one part of `work`; high: the grid's second dimension."""
        self.kernels[name]((blocks(work, threads), high), threads, stream, *arguments)

    def keep(self, groups, name, layer, source):
        """Keeps what the clean model of some Groups has as the input `name`."""
        inputs, count = self._counts[name, layer], groups.count
        pieces = 0 if name in ("state", "gated") else self._pieces if name.startswith("inner") else inputs
        self._launch("keep", count * self.padded // 4 * inputs // 4, groups.stream, source, inputs, pieces,
                     self._row[name, layer], groups.first, count, self._rows, self.arrays.operand)

    def attended(self, groups, layer, queries, keys, exps):
        """Keeps the attention of the clean model in a layer."""
        self._launch("share", groups.count * BLOCK, groups.stream, queries, keys, exps, layer * self._attention,
                     groups.first, self.arrays.shares, high=self.cfg.N_HEADS)

    def head(self, groups, normed, weights, losses, exps, tokens, width):
        """Keeps the head's inputs and errors. weights: all; tokens: the windows, `width` apart."""
        head, operand = self.matrices[0].tensor, self.arrays.operand
        self.keep(groups, "normed_f", 0, normed)
        self._launch("errors", blocks(groups.count * self.padded, TOGETHER) * BLOCK, groups.stream,
                     weights[head.span].view(np.int32), normed, losses, exps, tokens, width, groups.job,
                     self._row[None], groups.first, groups.count, self._rows, self.arrays.counted, operand,
                     operand.view(np.int8))

    def finish(self, stream, job, windows):
        """Fills arrays.result, from the losses of all members and what was kept; windows: of all pairs."""
        cfg, arrays, totals = self.cfg, self.arrays, self._totals
        for sums in totals, arrays.votes:
            cuda.cudadrv.driver.device_memset(sums, 0, sums.nbytes, stream)
        self._launch("measure", self.groups * cfg.SEQ_LEN, stream, arrays.clean, arrays.losses, arrays.counted, totals)
        self._launch("credit", cfg.CHUNK_SIZE, stream, arrays.losses, totals, arrays.credits, arrays.later, threads=32)
        credits, below = arrays.credits, arrays.below
        if self._recurrent:
            self._add_up(self.phases, stream, job, credits)
        for layer in () if self._recurrent else reversed(range(cfg.N_LAYERS)):
            self._launch("attend", credits.size, stream, arrays.shares, layer * self._attention, credits, arrays.later,
                         below)
            self._add_up([phase for phase in self.phases if phase.layer == layer and not phase.outside], stream, job,
                         credits)
            credits, below = below, credits
        if not self._recurrent:
            self._add_up([phase for phase in self.phases if phase.outside], stream, job, credits)
        self._launch("products", len(self._tiles) * self._splits * THREADS, stream, self._tiles, arrays.operand,
                     self._rows, 0, arrays.votes, threads=THREADS)
        tensor, phase, weight = self.embedding
        self._launch("token_votes", self.positions // 4 * phase.units, stream, arrays.operand, self._row[phase],
                     windows, self.positions, self._rows, tensor.weights, weight, arrays.votes)
        of_tensors, sizes = self._of_tensors, totals[3:]
        self._launch("vote_sizes", 64 * BLOCK, stream, arrays.votes, of_tensors, sizes, high=len(self._tensors))
        self._launch("vote_digits", 64 * BLOCK, stream, arrays.votes, of_tensors, sizes, arrays.digits,
                     high=len(self._tensors))
        self._launch("pack_digits", self._packed.size, stream, arrays.digits, self._packed)

    def _add_up(self, phases, stream, job, credits):
        """Sums credit times noise of some phases; credits: of those that are not "later"."""
        for phase in (phase for phase in phases if phase.amplitude):         # the others have rows of 0
            self._launch("add_up", self.positions // 4 * phase.units // 32, stream,
                         (self.arrays.later if phase.later else credits).view(np.int32),
                         self._heads if phase.later else 1, job, phase.stream, phase.turn, phase.shift,
                         phase.rotated, self._rope, phase.units, self._row[phase], self.positions,
                         self._rows, self.arrays.weights, self.arrays.operand)

    def digits_of(self, result):
        """(bytes, int): the packed digits and the loss of a chunk, whose arrays.result was fetched."""
        size = steps.packed_size(self.cfg.CHUNK_DIGITS)
        return result[3 + len(self._tensors):].tobytes()[:size], self.cfg.GROUP_SIZE * int(result[1])
