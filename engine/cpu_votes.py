"""From what was read to moved weights, on the CPU (SPEC 9, 21): the votes of pairs with noise on weights, those of
windows with unit trials, and the moves of the weights."""

from collections import namedtuple

import numpy as np

from engine import cpu_credits, cpu_gru, cpu_transformer
from engine.cpu_kernels import NO_NATS, SLOT, add_product, i64, layout, new_kept, nothing_kept, vote_draw
from engine.cpu_rules import f32, fma, i32, momentum, move_digit, njit, rule, step, u32
from engine.simd import PANEL, ROWS, chain_tile, local
from model import parameters, units
from model.rules import ADAMW, MUON_EPS, MUON_PARTS

mixed, halves = rule(parameters.mixed), rule(parameters.halves)
MOVED = 256                 # weights that are moved in vectors
BLOCK = 2048                # pairs whose noise is made at once for a product over the population
WINDOWS_TOGETHER = 16               # windows that a thread reads together: in the recurrent model they fill two tiles
# What was read of windows: their Kept; tokens int32 [n]; loss: int
Reading = namedtuple("Reading", "kept tokens loss")


# --- votes with noise on weights --------------------------------------------------------------------------------------

@njit
def input_block(c, t, seeds, signs, x, first, end):
    """x uint8 [rows padded, pairs padded to 4], rows first..end - 1: sign * noise(B, row) + 128 of a block of pairs."""
    for r in range(first, end):
        for q in range(seeds.size):
            x[r, q] = vote_draw(c, u32(seeds[q] + t.seed_b), r) * signs[q] + 128
        for q in range(seeds.size, x.shape[1]):
            x[r, q] = 128


@njit
def panel_votes(c, t, seeds, x, votes, first, end):
    """Adds a block of pairs to panels first..end - 1 of votes int32 [rows padded to ROWS, cols padded to PANEL]: x
    times noise(A, col), made here."""
    for p in range(first, end):
        noise = np.zeros((x.shape[1], min(PANEL, t.cols - p * PANEL)), np.int8)
        for q in range(seeds.size):
            for j in range(noise.shape[1]):
                noise[q, j] = vote_draw(c, u32(seeds[q] + t.seed_a), p * PANEL + j)
        add_product(x, x.shape[1], i64(4), noise, votes, p)


@njit
def vector_votes(c, t, seeds, signs, votes, first, end):
    """votes int32 [width] from first to end - 1: sum over pairs of sign * noise(first stream, i) * noise(second stream,
    i)."""
    for i in range(first, end):
        s = i32(0)
        for q in range(seeds.size):
            a = vote_draw(c, u32(seeds[q] + t.seed_a), i)
            b = vote_draw(c, u32(seeds[q] + t.seed_b), i)
            s = i32(s + a * b * signs[q])
        votes[i] = s


# --- votes of unit trials ---------------------------------------------------------------------------------------------

class UnitVotes:
    """Reads windows for CpuEngine, and votes. threads, job, spread: of the engine."""

    def __init__(self, cfg, threads, job, spread):
        self.cfg, self._threads = cfg, threads
        self._job, self._spread = job, spread
        self._forward = cpu_gru if cfg.MODEL == "gru" else cpu_transformer
        self._places, self._width = layout(cfg)
        matrices, self._biases, self._embedding = units.votes(cfg)
        self._head, self._matrices = matrices[0].tensor, matrices[1:]
        # the sums of votes, one after the other: int32 [V, H] of the head and embedding, [rows, cols padded] of others
        self._by_token = {self._head, self._embedding}
        voting = self._by_token | {vote.tensor for vote in self._matrices} | {tensor for tensor, _ in self._biases}
        self._shapes, self._ends, self._spare = {}, [0], []
        for t in parameters.tensors(cfg):
            if t in voting:
                padded = -(-t.cols // PANEL) * PANEL
                self._shapes[t] = (t.cols, t.rows) if t in self._by_token else (t.rows, padded)
                self._ends.append(self._ends[-1] + np.prod(self._shapes[t]))

    def together(self, count):
        """The number of windows, of this many, that are read together."""
        return max(1, min(WINDOWS_TOGETHER, -(-count // self._threads)))

    def _sums(self, memory):
        """{tensor: its sums} in int32 memory."""
        return {t: memory[at:end].reshape(shape)
                for (t, shape), at, end in zip(self._shapes.items(), self._ends, self._ends[1:])}

    def pool(self):
        """(int32 [threads, n], list): memory for the sums of a chunk, which are 0, and the rows of it that no thread
        has."""
        if self._spare:
            return self._spare.pop()
        return np.zeros((self._threads, self._ends[-1]), np.int32), list(range(self._threads))

    def read(self, c, pool, windows, seed, weights=None, counted=None):
        """A Reading of windows int32 [n, WINDOW]. pool: to whose sums the votes on the head are added; seed: of the
        first window; weights int8 [n], counted bool [n, T]: of their errors."""
        cfg, T = self.cfg, self.cfg.SEQ_LEN
        n, rows = len(windows), -(-len(windows) * T // 4) * 4
        if weights is None:
            weights, counted = np.full(n, units.FULL, np.int8), np.ones((n, T), bool)
        weights = (weights[:, None] * counted).astype(np.int8).ravel()
        tokens = np.ascontiguousarray(windows[:, cfg.STATE_TOKENS:cfg.STATE_TOKENS + T])
        each = n if cfg.MODEL == "gru" else 1
        (memory, free), losses = pool, np.empty((1, n * T), np.int64)
        mine = free.pop()
        kept = new_kept(c, self._places, self._width, rows, T * (each == 1), self._sums(memory[mine])[self._head],
                        weights)
        for at in range(0, n, each):
            part = slice(at * T, (at + each) * T)
            its = kept._replace(bytes=kept.bytes[part], exponents=kept.exponents[part], scales=kept.scales[part],
                                credit=kept.credit[part], weights=weights[part], seed=u32(seed + at & 0xFFFFFFFF))
            some = slice(at, at + each)
            self._forward.run_windows(c, losses[:, part], NO_NATS, windows[some], cfg.STATE_TOKENS, T, u32(0), 0, its)
            self._forward.hand_down(c, its, tokens[some])
        free.append(mine)
        return Reading(kept, tokens.ravel(), int(losses.sum()))

    def _loudest(self, read):
        """{(credits, layer): the exponent of those of a chunk}."""
        top = {}
        for kind, layer in units.kinds(self.cfg):
            slot, number = self._slot(kind.name, layer)
            found = np.concatenate([part.kept.exponents[:, slot, number] for part in read]).astype(np.int64)
            found = found[found >= -units.EXPONENTS] + units.EXPONENTS
            top[kind.name, layer] = units.loudest(np.bincount(found, minlength=2 * units.EXPONENTS + 1))
        return top

    def _slot(self, name, layer, of="of_"):
        """The numbers of credits, or of inputs, in a Kept."""
        outside = name.startswith("first_") or name.endswith("_0")
        name = name.removeprefix("first_").replace("normed_0", "normed_2").removesuffix("_0")
        return SLOT[of + name], i64(self.cfg.N_LAYERS if outside else layer)

    def _vote(self, pool, top, part):
        """Adds the votes of a Reading to some sums of the pool."""
        memory, free = pool
        mine = free.pop()
        sums, rows = self._sums(memory[mine]), len(part.kept.bytes)
        inputs, operands = {}, {}
        for kind, layer in units.kinds(self.cfg):
            name = kind.name, layer
            operands[name] = np.empty((rows, kind.units * self.cfg.HIDDEN_DIM), np.int8)
            cpu_credits.operand(part.kept, *self._slot(*name), i64(top[name]), operands[name])
        for tensor, name, of in self._matrices:
            slot = self._slot(of, tensor.layer, "")
            if slot not in inputs:
                inputs[slot] = np.empty((rows // 4, tensor.rows), np.uint32)
                cpu_credits.inputs_of(part.kept, *slot, inputs[slot])
            cpu_credits.add_products(inputs[slot].view(np.uint8), operands[name], sums[tensor])
        for tensor, name in self._biases:
            cpu_credits.add_sums(operands[name], sums[tensor][0])
        # tied: as a table and as the head in one unit
        shift = np.clip(top["embedding", 0], *units.TABLE_SHIFTS) if self._embedding.product else 0
        factor = np.exp2(np.float32(shift))
        cpu_credits.add_looked_up(operands["embedding", 0], part.tokens, factor, sums[self._embedding])
        free.append(mine)

    def chunk(self, read, pool):
        """(bytes, int): the packed digits and the loss of a chunk, of which these Readings are."""
        top = self._loudest(read)
        self._job([(pool, top, part) for part in read], self._vote).finish()
        digits, (memory, _) = np.zeros(self.cfg.CHUNK_DIGITS, np.int8), pool

        def send(t, at, end):
            small = np.empty(end - at, np.int8)
            least = units.least_vote(self.cfg, t, cpu_credits.add_up(memory, at, end))
            cpu_credits.take_digits(memory[0, at:end], least, np.int32(self.cfg.VOTE_LEVELS), small)
            small, its = small.reshape(self._shapes[t]), digits[t.span]
            if t in self._by_token:                          # four of a token, side by side in either order
                its.view(np.int32).reshape(-1, t.cols)[:] = small.view(np.int32).T
            else:
                its[:] = parameters.to_canonical(small[:, :t.cols]) if t.matrix else small[0, :t.cols]

        self._job(list(zip(self._shapes, self._ends, self._ends[1:])), send).finish()
        self._spare.append(pool)
        packed = np.empty(self.cfg.CHUNK_BYTES, np.uint8)
        rows = digits.reshape(packed.size, -1)
        self._spread(packed.size, digits.size, pack_digits, rows, np.int32(self.cfg.DIGIT_VALUES), packed)
        return packed.tobytes(), sum(part.loss for part in read)

    def vote_on_nothing(self, c):
        """Compiles what hands down and votes, or loads it from the cache."""
        nothing = Reading(nothing_kept(c), np.empty(0, np.int32), 0)
        self._forward.hand_down(c, nothing.kept, np.empty((1, 0), np.int32))
        self.chunk([nothing], self.pool())


# --- moves, digests ---------------------------------------------------------------------------------------------------

@njit
def muon_momenta(o, votes, moments, out):
    """out float32 [n]: Muon's momenta after votes int32 [n], which become the first of moments float32 [n, 3]."""
    for i in range(out.size):
        out[i] = moments[i, 0] = momentum(votes[i], moments[i, 0], o.momentum)


@njit
def muon_norm(x):
    """float32: by what Muon divides x float32 [n]."""
    sums, half = np.zeros(MUON_PARTS, f32), MUON_PARTS // 2
    for i in range(x.size):
        sums[i % MUON_PARTS] = fma(x[i], x[i], sums[i % MUON_PARTS])
    while half:
        for part in range(half):
            sums[part] = f32(sums[part] + sums[part + half])
        half //= 2
    return f32(f32(np.sqrt(sums[0])) + f32(MUON_EPS))


@njit
def muon_panels(left, right, gram, alpha, beta, out, first, end):
    """Column panels first..end - 1 of out = left . left^T where `gram`, else fma(beta, left . right, alpha * right);
    float32, out is neither of the others."""
    length = left.shape[1]
    panel = np.empty((length, PANEL), f32)
    for p in range(first, end):
        for k in range(length):
            for j in range(PANEL):
                panel[k, j] = left[p * PANEL + j, k] if gram else right[k, p * PANEL + j]
        for r in range(0, out.shape[0], ROWS):
            chain_tile(left, r * length, length, panel, 0, out, r * out.shape[1] + p * PANEL, out.shape[1], length)
        if not gram:
            for r in range(out.shape[0]):
                for j in range(p * PANEL, (p + 1) * PANEL):
                    out[r, j] = fma(beta, out[r, j], f32(alpha * right[r, j]))


@njit
def apply_votes(o, votes, directions, weights, moments, first, end):
    """Moves weights first..end - 1 of int8 [n] by their votes int32 [n]; moments float32 [n, 3] (m, v, acc).
    directions: float32 [n], those of Muon, or empty."""
    m, v, acc = local(MOVED, f32), local(MOVED, f32), local(MOVED, f32)
    w, to = local(MOVED, i32), local(MOVED, f32)
    for at in range(first, end, MOVED):
        n, vote = min(MOVED, end - at), votes[at:]
        some, its = weights[at:], moments[at:]
        for i in range(n):
            m[i], v[i], acc[i], w[i] = its[i, 0], its[i, 1], its[i, 2], some[i]
            to[i] = directions[at + i] if directions.size else f32(0)
        if o.rule == ADAMW:                          # known in the loop, which is vectorised for that
            for i in range(n):
                move, m[i], v[i], acc[i] = step(o, vote[i], to[i], w[i], m[i], v[i], acc[i])
                w[i] += move
        else:
            for i in range(n):
                move, m[i], v[i], acc[i] = step(o, vote[i], to[i], w[i], m[i], v[i], acc[i])
                w[i] += move
        for i in range(n):
            its[i, 0], its[i, 1], its[i, 2], some[i] = m[i], v[i], acc[i], w[i]


@njit
def moves(o, weights_before, moments_before, weights, moments, digits, first, end):
    """Digits first..end - 1, int8 [n], of weights int8 [n] that a short run has moved; moments float32 [n, 3]."""
    for i in range(first, end):
        digits[i] = move_digit(o, i32(weights_before[i]), moments_before[i, 2], i32(weights[i]), moments[i, 2],
                               moments[i, 0])


@njit
def pack_digits(digits, values, packed, first, end):
    """Bytes first..end - 1 of packed digits of so many values (model.steps), int8 [bytes, digits in a byte]."""
    for i in range(first, end):
        number = i32(0)
        for k in range(digits.shape[1] - 1, -1, -1):
            digit = i32(digits[i, k])
            number = i32(number * values + (digit if digit >= 0 else i32(digit + values)))
        packed[i] = number


@njit
def word_sums(words, number, first, end):
    """The two sums of model.parameters.Digest over words first..end - 1 of uint64 [n]; number: that of words[0]."""
    a = b = np.uint64(0)
    part, number = words[first:end], np.uint64(number + first)
    for i in range(part.size):
        x = mixed(part[i], number + np.uint64(i))
        a += x
        b += halves(x)
    return a, b
