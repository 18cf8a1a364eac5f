"""Unit trials on a GPU: the arrays of a chunk and the launches of kernels.units, from its windows to its digits."""

import numpy as np
from numba import cuda

from kernels import reading
from kernels.parts import blocks
from kernels.tiles import DEPTH, THREADS, TILE
from kernels.units import BINS, BLOCK, HEAD_BLOCK, HEAD_ROWS, TURNS, wide
from kernels.update import SPLIT
from model import parameters, units


def vote_tiles(matrices, positions):
    """int32 [n, 10]: tiles (kernels.update.Work) of the votes on matrices with one input. Operand rows: those of their
    outputs, one matrix after the other, then those of the input."""
    first, tiles, at = sum(wide(t.cols) for t in matrices), [], 0
    for t in matrices:
        tiles += [(at + p, first + s, min(TILE, t.cols - p), min(TILE, t.rows - s), 0, blocks(positions, DEPTH) * DEPTH,
                   t.weights - 4 * at, t.cols, 1, s) for p in range(0, t.cols, TILE) for s in range(0, t.rows, TILE)]
        at += wide(t.cols)
    return np.array(tiles, np.int32)


def chunk_sizes(cfg):
    """{name: (numbers, dtype)} of the arrays."""
    gru, n = cfg.MODEL == "gru", max(cfg.SEQ_LEN, cfg.STATE_TOKENS)
    S, S4, VS = (wide(n) for n in (cfg.HIDDEN_DIM, 4 * cfg.HIDDEN_DIM, cfg.VOCAB_SIZE))
    squares = 1 if gru else cfg.CHUNK_SIZE * cfg.N_HEADS * cfg.SEQ_LEN ** 2
    per, R = 2 if gru else 3, wide(cfg.CHUNK_SIZE * n)
    return reading.sizes(cfg, cfg.CHUNK_SIZE, n, cfg.SEQ_LEN, apart=True) | dict(
        ones=(per * R, np.float32), errors=(R * VS, np.int8), losses=(R, np.int64), c=(R * S, np.float32),
        credits=(R * max(per * S, S4), np.int8), exponents=(per * R, np.int32), zeros=(R, np.int32),
        counts=(per * BINS, np.int32), tops=(per, np.int32), parts=(R * per * S, np.float32),
        shares=(1 if gru else cfg.N_LAYERS * squares, np.int16), read=(1 if gru else R * S, np.int16),
        trials=(squares, np.float32), window_tops=(2 * cfg.CHUNK_SIZE * cfg.N_HEADS, np.int32),
        operand=((VS + 8 * S) * (blocks(cfg.CHUNK_SIZE * cfg.SEQ_LEN, SPLIT) + 1) * SPLIT // 4, np.int32),
        weights=(cfg.CHUNK_SIZE * cfg.SEQ_LEN, np.int8), votes=(cfg.CHUNK_DIGITS, np.int32),
        digits=(cfg.CHUNK_DIGITS, np.int8),
        result=(1 + len(parameters.tensors(cfg)) + blocks(cfg.CHUNK_BYTES, 8), np.int64))


def reciprocal(divisor):
    """The bits of a float32."""
    return int((np.float32(1) / np.float32(divisor)).view(np.int32))


class Trials(reading.Reading):
    """The device arrays and launches of a chunk: `launch` it; then arrays.result holds the loss, the sizes of votes and
    the packed digits (digits_of). Of the arrays, weights int8 [windows * SEQ_LEN] are those of the positions in 7ths:
    all 7 unless somebody sets them (SPEC 22)."""

    def __init__(self, forward):
        cfg = forward.cfg
        super().__init__(forward, cfg.SEQ_LEN, chunk_sizes(cfg))
        self.rows, a = cfg.CHUNK_SIZE * cfg.SEQ_LEN, self.arrays
        a.ones.copy_to_device(np.ones(a.ones.size, np.float32))
        a.weights.copy_to_device(np.full(a.weights.size, units.FULL, np.int8))
        of_tensors = np.array([x for t in self._tensors for x in (t.weights, t.size)], np.int64)
        tables = dict(of_tensors=of_tensors, trials=units.trial_tables(cfg)[1], cuts=units.trial_tables(cfg)[0],
                      skip=np.array([cfg.STATE_TOKENS], np.int32))
        vars(self.tables).update({name: cuda.to_device(table) for name, table in tables.items()})
        self._totals, digits = a.result[:1 + len(self._tensors)], a.result[1 + len(self._tensors):].view(np.uint8)
        self._digits = digits[:cfg.CHUNK_BYTES]
        self._tiles = {}

    def digits_of(self, result):
        """(bytes, int): the packed digits and the loss of a chunk, whose arrays.result was fetched."""
        return result[1 + len(self._tensors):].tobytes()[:self.cfg.CHUNK_BYTES], int(result[0])

    def launch(self, stream, weights, packed, windows, job):
        """Fills arrays.result. weights, packed: see egg_kernels; windows int32, flat, as model.soft_targets.windows;
        job uint32: seed of the step, number of the first window."""
        cfg, a = self.cfg, self.arrays
        model = stream, weights, packed, windows, cfg.WINDOW
        for sums in self._totals, a.votes, a.c:
            cuda.cudadrv.driver.device_memset(sums, 0, sums.nbytes, stream)
        self.begin(stream)
        if cfg.STATE_TOKENS:
            self.read(*model, cfg.STATE_TOKENS)
        self.read(*model, cfg.SEQ_LEN, self.tables.skip)
        self._head(job)
        (self._down_recurrent if self.gru else self._down_transformer)()
        embedding = self._named["embedding", 0]
        self._launch("token_votes", self._count * cfg.HIDDEN_DIM, a.credits, a.exponents, a.tops, windows, self._count,
                     embedding.weights, a.votes)
        of_tensors, votes, tensors = self.tables.of_tensors, self._totals[1:], len(self._tensors)
        self._launch("vote_sizes", 64 * BLOCK, a.votes, of_tensors, votes, high=tensors)
        self._launch("vote_digits", 64 * BLOCK, a.votes, of_tensors, votes, a.digits, high=tensors)
        self.pack()

    def pack(self):
        """From arrays.digits to the packed digits in arrays.result."""
        self._launch("pack_digits", self._digits.size, self.arrays.digits, self._digits)

    def _shares(self, layer):
        return self._part("shares", layer, self.arrays.trials.size)

    def _heads(self, name, *arguments):
        """A kernel with a block a head of a window."""
        self.kernels[name]((self.cfg.CHUNK_SIZE, self.cfg.N_HEADS), BLOCK, self._stream, *arguments)

    def _attend(self, layer, qkv, attended):
        self._heads("attend", qkv.view(np.int32), qkv, self.tables.exps, self._shares(layer), attended)

    # back

    def _head(self, job):
        """Losses, errors, the votes on the head, and in a.y the credits of its inputs."""
        a, head = self.arrays, self._named["head" if self.gru else "embedding", 0]
        for first in range(0, self._count, HEAD_ROWS):
            rows = self.logits(first)
            self.kernels["errors"](rows, HEAD_BLOCK, self._stream, a.z.view(np.int32), first, self._tokens, job,
                                   self.tables.exps, a.weights, a.errors.view(np.int32), a.errors, a.losses)
        self._launch("add_losses", blocks(self._count, 4), a.losses, self._count, a.result)
        self._vote([(head, a.errors, self.VS, 0, 0, -1)], self._last_normed(), self.S)
        self._product("product", a.errors, self.VS, head, a.y, self.S, back=True)

    def _vote(self, groups, inputs, inputs_bytes):
        """Votes on matrices that have the same inputs int8 [rows, inputs_bytes]. groups: of each (tensor, credits int8,
        bytes of a row, first byte, first exponent, number of its top or -1: no exponents)."""
        a, rows, key = self.arrays, groups[0][0].rows, tuple(t for t, *_ in groups)
        if key not in self._tiles:
            self._tiles[key] = cuda.to_device(vote_tiles(key, self.rows))
        tiles, operand_rows, at = self._tiles[key], sum(wide(t.cols) for t in key) + wide(rows), 0

        def spread(source, width, first, columns, exponents, part, row):
            self.kernels["spread"]((blocks(columns, 128), blocks(self._count, 64)), BLOCK, self._stream,
                                   source.view(np.int32), width // 4, first // 4, columns, a.exponents, exponents,
                                   a.tops, part, self._count, row, operand_rows, a.operand)

        for t, credits, width, first, exponents, part in groups:
            spread(credits, width, first, wide(t.cols) if part < 0 else t.cols, exponents, part, at)
            at += wide(t.cols)
        spread(inputs, inputs_bytes, 0, rows, 0, -1, at)
        splits = blocks(self._count, SPLIT)
        self.kernels["products"](len(tiles) * splits, THREADS, self._stream, tiles, a.operand, np.int32(operand_rows),
                                 np.int32(0), a.votes)

    def _descend(self, parts, exponents, shift, less, norm, layer, number, by):
        """From a.y to the rows of credits a.credits [rows, S], exponents a.exponents[0]."""
        a = self.arrays
        self._rows("descend", a.y, parts * self.S, parts, exponents, self.padded, shift, less, self._weights,
                   self._named[norm, layer].weights, self._normed(number).view(np.int32), self._means(number), by,
                   self._count, a.c.view(np.int32), a.credits.view(np.int32), a.exponents, a.counts, turns=TURNS)
        self._loudest(1)

    def _loudest(self, parts):
        self.kernels["loudest"](parts, BINS, self._stream, self.arrays.counts, self.arrays.tops)

    def _down_mlp(self, number, norm, layer, weights, shifts=(0, 0), divisors=(1, 1)):
        """From the rows of the credits of an MLP's sum to a.y, the credits of its norm's outputs, their exponents."""
        a, named = self.arrays, self._named
        before, inner = (self._part(name, number, self.padded * self.S4) for name in ("before", "inner"))
        up, down = named[weights + "up", layer], named[weights + "down", layer]
        self._vote([(down, a.credits, self.S, 0, 0, 0)], inner, self.S4)
        self._product("product", a.credits, self.S, down, a.y, self.S4, back=True)
        self._rows("try_inner", a.y, a.exponents, shifts[1] + 3, reciprocal(divisors[1]), before.view(np.int32),
                   self.tables.trials, self._count, a.credits.view(np.int32), a.exponents, a.counts, turns=TURNS)
        self._loudest(1)
        self._vote([(up, a.credits, self.S4, 0, 0, 0)], self._normed(norm), self.S)
        self._product("product", a.credits, self.S4, up, a.y, self.S, back=True)

    def _down_transformer(self):
        cfg, a, L = self.cfg, self.arrays, self.cfg.N_LAYERS
        shifts, one = (cfg.SHIFT_MLP_UP, cfg.SHIFT_MLP_DOWN), reciprocal(1)
        self._descend(1, a.zeros, 0, reciprocal(1), "ln_f", 0, 1 + 2 * L, self._scale(L))
        for layer in reversed(range(L)):
            self._down_mlp(1 + layer, 2 + 2 * layer, layer, "w_", shifts)
            self._descend(1, a.exponents, cfg.SHIFT_MLP_UP, one, "ln_2", layer, 2 + 2 * layer,
                          self._scale(1 + L + layer))
            self._down_attention(layer)
            self._descend(3, a.exponents, 0, one, "ln_1", layer, 1 + 2 * layer, self._scale(layer))
        self._down_mlp(0, 0, 0, "w_emb_mlp_", shifts)
        self._descend(1, a.exponents, cfg.SHIFT_MLP_UP, one, "ln_init", 0, 0, a.ones)

    def _down_attention(self, layer):
        a, named = self.arrays, self._named
        qkv, shares = self._qkv(layer), self._shares(layer)
        attended = self._part("attended", layer, self.padded * self.S)
        out, half = named["w_o", layer], a.window_tops.size // 2
        tops, trial_tops = a.window_tops[:half], a.window_tops[half:]
        self._vote([(out, a.credits, self.S, 0, 0, 0)], attended, self.S)
        self._product("product", a.credits, self.S, out, a.y, self.S, back=True)
        cuda.cudadrv.driver.device_memset(a.window_tops, 0, a.window_tops.nbytes, self._stream)
        self._heads("loudest_read", a.y, a.exponents, tops)
        self._heads("try_scores", a.y, a.exponents, tops, qkv.view(np.int32), attended, shares, a.read, a.trials,
                    trial_tops)
        self._heads("through_attention", tops, qkv.view(np.int16), a.read.view(np.int32), shares, a.trials, trial_tops,
                    self.tables.rope, a.parts)
        self._side_by_side("qkv", layer, 1 + 2 * layer, self._part("qkv_scales", layer, 3 * self.padded))

    def _side_by_side(self, names, layer, norm, by):
        """From a.parts to votes on the matrices w_q, w_k, w_v or w_f, w_h, and to their products side by side in
        a.y."""
        a, parts, S = self.arrays, len(names), self.S
        matrices = [self._named["w_" + name, layer] for name in names]
        self._rows("as_rows", a.parts, parts, by, self.padded, self._count, a.credits.view(np.int32), a.exponents,
                   a.counts, high=parts, turns=TURNS)
        self._loudest(parts)
        self._vote([(t, a.credits, parts * S, k * S, k * self.padded, k) for k, t in enumerate(matrices)],
                   self._normed(norm), S)
        for k, t in enumerate(matrices):
            self._product("product", a.credits[k * S:], parts * S, t, a.y[k * S:], parts * S, back=True)

    def _down_recurrent(self):
        cfg, a, named = self.cfg, self.arrays, self._named
        narrow, broad = (parameters.divisor(cfg, n * cfg.HIDDEN_DIM) for n in (1, 4))
        less = reciprocal(narrow)
        self._descend(1, a.zeros, 0, reciprocal(1), "ln_f", 0, 2 * cfg.N_LAYERS, a.ones)
        for layer in reversed(range(cfg.N_LAYERS)):
            self._down_mlp(layer, 2 * layer + 1, layer, "w_", divisors=(narrow, broad))
            self._descend(1, a.exponents, 0, less, "ln_2", layer, 2 * layer + 1, a.ones)
            before, gates, past, candidates = self._kept(layer)
            self._launch("through_states", cfg.CHUNK_SIZE * cfg.HIDDEN_DIM, a.c, self._tokens, cfg.STATE_TOKENS,
                         cfg.SEQ_LEN, cfg.CHUNK_SIZE, before, gates, candidates, self.tables.cuts, a.parts)
            self._side_by_side("fh", layer, 2 * layer, a.ones)
            for k, (name, inputs) in enumerate((("u_f", before), ("u_h", past))):
                self._vote([(named[name, layer], a.credits, 2 * self.S, k * self.S, k * self.padded, k)], inputs,
                           self.S)
                self._launch("bias_votes", cfg.HIDDEN_DIM * blocks(self._count, 64), a.credits, self.S // 2,
                             k * self.S, a.exponents, k * self.padded, a.tops, k, self._count,
                             named["b" + name[1:], layer].weights, a.votes)
            self._descend(2, a.exponents, 0, less, "ln_1", layer, 2 * layer, a.ones)
