"""The votes of a chunk with noise on activations (SPEC 21) on a GPU, for egg_kernels.Recurrent.

The matrices' votes are int8 products over the positions of all groups, by the kernel of the update (kernels.update.
products_kernel) with its operand layout: a row for every input of a matrix and for every output with noise, contiguous
over n = group * PADDED + position, PADDED = SEQ_LEN rounded up to 4. Positions beyond SEQ_LEN are 0.
"""

from types import SimpleNamespace

import numpy as np
from numba import cuda, float64, int8, int32, int64, uint32

from kernels import ptx
from kernels.host import Kernel
from kernels.parts import A8, A32, A64, AU32, B1, across, blocks, int32s, pack_bytes
from kernels.rules import device
from kernels.update import DEPTH, SHARED, SPLIT, THREADS, TILE, place, products_kernel, vote_index
from model import activations, parameters, rules, ternary

BLOCK = 128
TOGETHER = 8                 # positions whose logits a thread computes, a multiple of 4
RULES = rules.activation_rules(device)
drawn = RULES.drawn
digit = RULES.digit
least_difference = RULES.least_difference
least_vote = RULES.least_vote
credited = RULES.credited
settled = RULES.settled
head_error = RULES.head_error


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
def core_word(p, j, inputs, width):
    """Where word j of position p lies: of the even member of a pair, in core matrices of `inputs` inputs, in pieces of
    `width` (kernels.gru)."""
    block, piece = p >> 3, uint32(4 * j) // uint32(width)    # of eight positions: 16 rows, of which these are the first
    return ((block >> 2) * (16 * inputs) + (block & 3) * (4 * width) + (p & 7) * 4 + (j & 3)
            + piece * (16 * width) + ((j >> 2) - piece * (width >> 4)) * 32)


@device
def share_of(units, quads):
    """(j, quad, group, t): a thread has number j of `units` at the positions t, t + 1, t + 2 and t + 3 of a group, four
    of all positions; quads: of a group."""
    i = int64(cuda.grid(1))
    j, quad = i % units, i // units
    group = quad // quads
    return j, quad, group, (quad - group * quads) * 4


def build(cfg):
    """{name: Kernel} of a configuration; `products` is that of the update. Blocks have BLOCK threads."""
    made = [*_head_kernels(cfg), *_credit_kernels(cfg), *_vote_kernels(cfg)]
    return {function.__name__: Kernel(cuda.jit(launch_bounds=BLOCK)(function)) for function in made}


def padded(cfg):
    """Positions of a group in an operand row."""
    return 4 * blocks(cfg.SEQ_LEN, 4)


def _head_kernels(cfg):
    """What is kept of the unperturbed model: the inputs of matrices, and the head's errors."""
    H, V = cfg.HIDDEN_DIM, cfg.VOCAB_SIZE
    T, K = cfg.SEQ_LEN, cfg.GROUP_SIZE
    PADDED = padded(cfg)
    TARGETS, SKIP = cfg.TARGETS, cfg.STATE_TOKENS
    DIVISOR = parameters.divisor(cfg, H)
    HEAD_WORDS = TOGETHER * H // 4

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
                    p = group * T + t + e
                    words_of[e] = source[core_word(p, j, inputs, pieces) if pieces else p * words + j]
            turned = turn4(words_of)
            for e in range(4):
                operand[place(rows, row + j * 4 + e, offset * PADDED + quad * 4)] = turned[e]

    def errors(head: A32, normed: A32, losses: A64, exps: A32, tokens: A32, width, chunk: AU32, row, offset, count,
               rows, operand: A32):
        """Operand rows from `row` on: the head's errors, of `count` groups from `offset` on. head: its canonical
        weights; losses: as kernels.head leaves them; chunk: the job. One thread per token, TOGETHER positions per
        block."""
        x = cuda.shared.array(HEAD_WORDS, int32)
        logits = cuda.shared.array((TOGETHER, BLOCK), int32)
        first, lane = int64(cuda.blockIdx.y) * TOGETHER, cuda.threadIdx.x
        for i in range(lane, HEAD_WORDS, BLOCK):
            n = first + i % TOGETHER
            p = min(n - n // PADDED * (PADDED - T), count * T - 1)           # beyond a window any position will do
            x[i] = normed[core_word(p, i // TOGETHER, H, H)]
        cuda.syncthreads()
        v = cuda.blockIdx.x * BLOCK + lane
        if v < V:
            acc = int32s(TOGETHER)
            for e in range(TOGETHER):
                acc[e] = 0
            for j in range(H // 4):
                w = head[j * V + v]
                for e in range(TOGETHER):
                    acc[e] = ptx.dp4a(w, x[j * TOGETHER + e], acc[e])
            for e in range(TOGETHER):
                logits[e, lane] = max(min(acc[e] // int32(DIVISOR), 127), -127)
            for four in range(0, TOGETHER, 4):
                group = (first + four) // PADDED
                t = first + four - group * PADDED
                if group < count:
                    seed = uint32(chunk[0] + (chunk[1] // uint32(K // 2) + uint32(offset + group)))
                    values = int32s(4)
                    for e in range(4):
                        values[e] = 0
                        if t + e < T:
                            at = group * width + SKIP + 1
                            wanted = int32(tokens[at + t + e] == v)
                            for k in range(TARGETS - 1):
                                wanted += int32(tokens[at + T + (t + e) * (TARGETS - 1) + k] == v)
                            logit, softmax = logits[four + e, lane], losses[(2 * group + 1) * T + t + e]
                            values[e] = head_error(logit, wanted, TARGETS, exps[softmax % 256 - 128 - logit],
                                                  softmax // 256, seed, (t + e) * V + v)
                    operand[place(rows, row + v, offset * PADDED + first + four)] = pack_bytes(values, 0)

    return keep, errors


def _credit_kernels(cfg):
    """From losses to settled sums of credit times noise."""
    T, K = cfg.SEQ_LEN, cfg.GROUP_SIZE
    PADDED, QUADS = padded(cfg), blocks(K, 4)
    BITS, CREDIT = activations.fraction_bits(cfg), cfg.CREDIT
    LEVELS = activations.LEVELS

    def measure(clean: A64, losses: A64, totals: A64):
        """totals[0] += the sizes of all differences of losses; totals[1] += the losses of the groups' clean model."""
        total, clean_loss = int64(0), int64(0)
        for i in range(cuda.grid(1), losses.size, cuda.gridsize(1)):
            member = i // T
            t = i - member * T
            before = clean[member // K * (2 * T) + t]
            total += abs(before - losses[i])
            clean_loss += before if member % K == 0 else int64(0)
        total, clean_loss = warp_sum(total), warp_sum(clean_loss)
        if cuda.threadIdx.x & 31 == 0:
            cuda.atomic.add(totals, 0, total)
            cuda.atomic.add(totals, 1, clean_loss)

    def credit(clean: A64, losses: A64, totals: A64, position_digits: A8, later: A8):
        """position_digits, later int8 [groups * PADDED, 4 QUADS]: digits and credits. One thread per member."""
        least = cuda.local.array(LEVELS, int64)
        for level in range(LEVELS):
            least[level] = least_difference(level + 1, totals[0], losses.size)
        member = int64(cuda.grid(1))
        if member * T < losses.size:
            group = member // K
            k, after = member - group * K, int32(0)
            for back in range(T):
                t = T - 1 - back
                e = digit(clean[group * (2 * T) + t] - losses[member * T + t], least)
                after = credited(e, after, BITS, CREDIT)
                at = (group * PADDED + t) * (4 * QUADS) + k
                position_digits[at], later[at] = e, after

    def add_up(credits: A32, job: AU32, begins, amplitude, shift, units, row, positions, rows, operand: A32):
        """Operand rows from `row` on: settled sums over the members of credit times noise. A thread four outputs of
        four positions; credits: a word for every four members."""
        words = units // 4
        j, quad, group, t = share_of(words, PADDED // 4)
        if quad * 4 < positions:
            member = uint32(job[0] + uint32(2) * job[1] + uint32(group * K))
            first = uint32(uint32(begins) + uint32(int32(t) * int32(words) + int32(j)))
            acc, words_of = cuda.local.array((4, 4), int32), int32s(4)
            for e in range(4):
                for u in range(4):
                    acc[e, u] = 0
            for k in range(QUADS):
                for e in range(4):
                    four_credits = credits[(quad * 4 + e) * QUADS + k]
                    here = uint32(first + uint32(e * int32(words)))
                    for u in range(4):
                        words_of[u] = int32(drawn(uint32(member + uint32(4 * k + u)), here, amplitude))
                    turned = turn4(words_of)
                    for u in range(4):
                        acc[e, u] = ptx.dp4a(turned[u], four_credits, acc[e, u])
            for u in range(4):
                for e in range(4):
                    words_of[e] = settled(acc[e, u], int32(shift))
                operand[place(rows, row + j * 4 + u, quad * 4)] = pack_bytes(words_of, 0)

    return measure, credit, add_up


def _vote_kernels(cfg):
    """The votes that are no products, and the digits of all."""
    H, T, V = cfg.HIDDEN_DIM, cfg.SEQ_LEN, cfg.VOCAB_SIZE
    PADDED = padded(cfg)
    WIDTH, SKIP = cfg.READERS * cfg.WINDOW, cfg.STATE_TOKENS             # between the windows of two groups
    ALPHA = activations.alpha(cfg)

    def token_votes(operand: A32, row, windows: A32, positions, rows, at, votes: A32):
        """Adds operand rows from `row` on to the votes of the embedding's columns, canonical from votes[at] on. A
        thread an output and four positions."""
        unit, quad, group, t = share_of(H, PADDED // 4)
        if quad * 4 < positions:
            word = operand[place(rows, row + unit, quad * 4)]
            for e in range(4):
                vote = ptx.byte_permute(word, 0, int32(0x8880 + 0x1111 * e))
                if t + e < T and vote != 0:
                    token = windows[group * WIDTH + SKIP + t + e]
                    cuda.atomic.add(votes, at + vote_index(token, unit, True, V), vote)

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
            vote = int64(votes[first + i])
            digits[first + i] = int8(int32(vote >= least) - int32(vote <= -least))

    def pack_digits(digits: A8, packed: B1):
        """packed uint8 [digits / 5] (model.ternary). One thread per byte."""
        i = int64(cuda.grid(1))
        if i < packed.size:
            byte = int32(0)
            for k in range(5):
                digit = int32(digits[5 * i + 4 - k])
                byte = byte * int32(3) + (int32(2) if digit < 0 else digit)
            packed[i] = byte

    return token_votes, vote_sizes, vote_digits, pack_digits


class Votes:
    """The device arrays and launches of a chunk's votes; `keep` and `head` while the clean model reads, then `finish`.
    Arrays are reserved by `reserve`, on the device."""

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

    def _sizes(self):
        """{name: (numbers, dtype)} of the arrays."""
        cfg, places = self.cfg, self.groups * self.cfg.SEQ_LEN
        credits = self.positions * 4 * blocks(cfg.GROUP_SIZE, 4), np.int8
        return dict(operand=(self._rows * (self._splits + 1) * SPLIT // 4, np.int32),
                    clean=(2 * places, np.int64), losses=(cfg.CHUNK_SIZE * cfg.SEQ_LEN, np.int64),
                    position_digits=credits, later=credits, digits=(cfg.CHUNK_DIGITS, np.int8),
                    kept=(2 * places * cfg.HIDDEN_DIM // 4, np.int32), votes=(cfg.CHUNK_DIGITS, np.int32),
                    # the size of differences, the loss, the sizes of votes; then the packed digits
                    result=(2 + len(self._tensors) + blocks(cfg.CHUNK_DIGITS, 40), np.int64))

    def bytes_needed(self):
        return sum(count * np.dtype(kind).itemsize for count, kind in self._sizes().values())

    def reserve(self):
        """Reserves the arrays, all 0 but the operand rows of ones."""
        zeros = {name: np.zeros(count, kind) for name, (count, kind) in self._sizes().items()}
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
        totals, digits = arrays.result[:2 + len(tensors)], arrays.result[2 + len(tensors):].view(np.uint8)
        of_tensors = np.array([x for t in tensors for x in (t.weights, t.size)], np.int64)
        self._args = dict(vars(arrays), rows=self._rows, positions=self.positions, start=0, totals=totals,
                           sizes=totals[2:], packed=digits[:ternary.packed_size(self.cfg.CHUNK_DIGITS)],
                           tiles=cuda.to_device(np.array(tiles, np.int32)), tensors=cuda.to_device(of_tensors))

    def _launch(self, name, work, args, threads=BLOCK, high=1, **others):
        """A kernel whose threads each do one part of `work`; high: the grid's second dimension."""
        self.kernels[name]((blocks(work, threads), high), threads, self._args | args, **others)

    def keep(self, args, name, layer, source):
        """Keeps what the clean model of args["count"] groups has as the input `name`."""
        inputs = self._counts[name, layer]
        pieces = 0 if name in ("state", "gated") else self._pieces if name == "inner" else inputs
        self._launch("keep", args["count"] * self.padded // 4 * inputs // 4, args, source=source, inputs=inputs,
                     pieces=pieces, row=self._row[name, layer])

    def head(self, args, normed):
        """Keeps the head's inputs and errors of args["count"] groups."""
        head = self.matrices[0].tensor
        self.keep(args, "normed_f", 0, normed)
        self._launch("errors", head.cols, args, high=blocks(args["count"] * self.padded, TOGETHER), normed=normed,
                     head=args["weights"][head.span].view(np.int32), row=self._row[None])

    def finish(self, stream, job, windows):
        """Fills arrays.result, from the losses of all members and what was kept; windows: of all pairs."""
        cfg, arrays = self.cfg, self.arrays
        args = dict(stream=stream, job=job, windows=windows)
        for sums in self._args["totals"], arrays.votes:
            cuda.cudadrv.driver.device_memset(sums, 0, sums.nbytes, stream)
        self._launch("measure", min(1024 * BLOCK, arrays.losses.size), args)
        self._launch("credit", cfg.CHUNK_SIZE, args, 32)
        for phase in self.phases:
            credits = arrays.later if phase.later else arrays.position_digits
            self._launch("add_up", self.positions // 4 * phase.units // 4, args, credits=credits.view(np.int32),
                         begins=phase.stream, amplitude=phase.amplitude, shift=phase.shift, units=phase.units,
                         row=self._row[phase])
        self._launch("products", len(self._args["tiles"]) * self._splits * THREADS, args, THREADS)
        tensor, phase = self.embedding
        self._launch("token_votes", self.positions // 4 * phase.units, args, row=self._row[phase], at=tensor.weights)
        for name in "vote_sizes", "vote_digits":
            self._launch(name, 64 * BLOCK, args, high=len(self._tensors))
        self._launch("pack_digits", self._args["packed"].size, args)

    def digits_of(self, result):
        """(bytes, int): the packed digits and the loss of a chunk, whose arrays.result was fetched."""
        size = ternary.packed_size(self.cfg.CHUNK_DIGITS)
        return result[2 + len(self._tensors):].tobytes()[:size], self.cfg.GROUP_SIZE * int(result[1])
