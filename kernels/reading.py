"""The forward pass without noise on a GPU, over rows: the launches of kernels.units that read n positions at a time of
many sequences. Validation reads whole windows, texts are written a position at a time, and what noise on weights begins
with are the states behind the tokens before its windows. Unit trials go back from it (kernels.trials)."""

from types import SimpleNamespace

import numpy as np
from numba import cuda

from kernels.host import BACK, QUADS
from kernels.parts import A8, A16, A32, blocks
from kernels.tiles import DEPTH, THREADS, TILE
from kernels.units import BLOCK, HEAD_ROWS, NATS, NATS_ONE, WARPS, logit_type, wide
from model import integer_tables, parameters


def packed_places(cfg, packing):
    """({matrix: first word of its rows for outputs}, the same of those for inputs, for the way back). Rows for outputs
    of matrices with one input lie side by side."""
    tensors, together = parameters.tensors(cfg), ("w_q", "w_k", "w_v", "w_f", "w_h", "u_f", "u_h")
    named = {(t.name, t.layer): t for t in tensors}
    first = [named[name, layer] for layer in range(cfg.N_LAYERS) for name in together if (name, layer) in named]
    matrices = first + [t for t in tensors if t.matrix and t not in first]
    return ({t: packing.add(t, QUADS, wide(t.cols), wide(t.rows)) for t in matrices},
            {t: packing.add(t, BACK, wide(t.rows), wide(t.cols)) for t in matrices if cfg.PERTURB == "units"})


def sizes(cfg, count, n, room, apart=False):
    """{name: (numbers, dtype)} of the arrays for n positions at a time of `count` sequences of up to `room`. apart:
    each layer and norm has its part of an array, as the way back wants it; else all share one."""
    gru, L, R = cfg.MODEL == "gru", cfg.N_LAYERS, wide(count * n)
    S, S4, VS = (wide(width) for width in (cfg.HIDDEN_DIM, 4 * cfg.HIDDEN_DIM, cfg.VOCAB_SIZE))
    layers, more = (L, 0 if gru else 1) if apart else (1, 0)
    norms, mlps = 2 * layers + 1 + more if apart else 1, layers + more
    z = {A8: np.int8, A16: np.int16, A32: np.int32}[logit_type(cfg)]
    return dict(
        h=(R * S, np.int8), normed=(norms * R * S, np.int8), means=(norms * R, np.int32),
        before=(mlps * R * S4, np.int8), inner=(mlps * R * S4, np.int8),
        scales=((mlps + L if apart else 1) * R, np.float32), y=(R * max((2 if gru else 3) * S, S4), np.int32),
        # of a text all logits are wanted at once
        z=((R if n == 1 else min(HEAD_ROWS, R)) * VS, z),
        qkv=(1 if gru else L * count * room * 3 * S, np.int8), attended=(1 if gru else layers * R * S, np.int8),
        qkv_scales=(1 if gru else layers * 3 * R, np.float32), gates=(R * 2 * S if gru else 1, np.int8),
        kept=(4 * layers * R * S if gru else 1, np.int8), states=(L * count * cfg.HIDDEN_DIM if gru else 1, np.int8))


def bytes_of(arrays):
    return sum(count * np.dtype(kind).itemsize for count, kind in arrays.values())


class Reading:
    """The device arrays and launches of a pass over sequences of up to `room` positions: `begin`, then `read` in turn
    through all positions. forward: an egg_kernels.Forward; arrays: what `sizes` gives, and more."""

    def __init__(self, forward, room, arrays):
        cfg = self.cfg = forward.cfg
        self.kernels, self._places, self._room = forward.rows, forward.places, room
        self.gru, self._tensors = cfg.MODEL == "gru", parameters.tensors(cfg)
        self._named = {(t.name, t.layer): t for t in self._tensors}
        self.S, self.S4, self.VS = wide(cfg.HIDDEN_DIM), wide(4 * cfg.HIDDEN_DIM), wide(cfg.VOCAB_SIZE)
        self.arrays = SimpleNamespace(**{name: cuda.device_array(*array) for name, array in arrays.items()})
        for array in vars(self.arrays).values():
            cuda.cudadrv.driver.device_memset(array, 0, array.nbytes, 0)
        self.padded = self.arrays.h.size // self.S
        nats = np.rint(np.exp(-np.arange(NATS) / cfg.SOFTMAX_EXP_SCALE) * NATS_ONE).astype(np.int64)
        nats[-1] = 0
        tables = dict(exps=integer_tables.exp_table(cfg), nats=nats, gelu=integer_tables.gelu_table(),
                      rope=integer_tables.rope_table(cfg, room).ravel(), start=np.zeros(1, np.int32))
        self.tables = SimpleNamespace(**{name: cuda.to_device(table) for name, table in tables.items()})

    def begin(self, stream):
        """All sequences begin again."""
        states = self.arrays.states
        cuda.cudadrv.driver.device_memset(states, 0, states.nbytes, stream)

    def read(self, stream, weights, packed, tokens, width, n, at=None, causal=1):
        """Reads n positions of every sequence, from at[0] on, int32, or from the first; tokens int32
        [sequences, width], flat. weights, packed: see egg_kernels. causal: see kernels.rules.ntt_functions."""
        cfg, a, named = self.cfg, self.arrays, self._named
        self._stream, self._weights, self._packed = stream, weights, packed.view(np.int32)
        self._tokens, self._width, self._n = tokens, width, n
        self._at = self.tables.start if at is None else at
        self._sequences = tokens.size // width
        self._count = self._sequences * n
        bias = -1 if self.gru else named["emb_bias", 0].weights
        self._rows("embed", self._packed, self._places[0][named["embedding", 0]], weights, bias, tokens, width,
                   self._at, n, causal, self._count, a.h.view(np.int32))
        norms = 0 if self.gru else 1                         # before the layers
        if not self.gru:
            self._read_norm(0, "ln_init", 0)
            self._read_mlp(0, 0, 0, "w_emb_mlp_", "mlp_emb_bias_")
        for layer in range(cfg.N_LAYERS):
            norm = norms + 2 * layer
            self._read_norm(norm, "ln_1", layer)
            (self._recur if self.gru else self._read_attention)(layer, norm)
            self._read_norm(norm + 1, "ln_2", layer)
            self._read_mlp(norms + layer, norm + 1, layer, "w_", "mlp_bias_")
        self._read_norm(norms + 2 * cfg.N_LAYERS, "ln_f", 0)

    def logits(self, first=0):
        """The logits of rows from `first` on go to arrays.z, as many as it holds; how many that are."""
        rows, head = min(self.arrays.z.size // self.VS, self._count - first), "head" if self.gru else "embedding"
        self._product("scaled", self._last_normed()[first * self.S:], self.S, self._named[head, 0],
                      self.arrays.z.view(np.int32), self.VS, rows=rows)
        return rows

    def validate(self, stream, weights, packed, windows, nats):
        """nats float64, flat: the cross-entropy of each token but the first of windows int32 [count, room + 1]."""
        self.begin(stream)
        self.read(stream, weights, packed, windows, self._room + 1, self._room, causal=self.cfg.NTT_CAUSAL)
        for first in range(0, self._count, HEAD_ROWS):
            rows = self.logits(first)
            self.kernels["nats"](blocks(rows, WARPS), BLOCK, stream, self.arrays.z, first, rows, windows, self._room,
                                 self.tables.nats, nats)

    def states(self, layer):
        """int8 [sequences, H], flat, at the position that is reached."""
        return self._part("states", layer, self._sequences * self.cfg.HIDDEN_DIM)

    def _launch(self, name, work, *arguments, threads=BLOCK, high=1):
        """A kernel whose threads each do one part of `work`; high: the grid's second dimension."""
        self.kernels[name]((blocks(work, threads), high), threads, self._stream, *arguments)

    def _rows(self, name, *arguments, high=1, turns=1):
        """A kernel with a warp for a row, or for `turns` rows."""
        self.kernels[name]((blocks(self._count, WARPS * turns), high), BLOCK, self._stream, *arguments)

    def _product(self, kernel, x, x_bytes, tensor, *arguments, back=False, columns=0, rows=0):
        """A product of rows x of x_bytes with a matrix, or with the transposed one; the last arguments are the
        kernel's. columns: of the result, where several matrices lie side by side; rows: 0 for all."""
        inputs, outputs = (tensor.cols, tensor.rows) if back else (tensor.rows, tensor.cols)
        grid = (columns or wide(outputs)) // TILE, blocks(rows or self._count, TILE)
        self.kernels[kernel](grid, THREADS, self._stream, x.view(np.int32), x_bytes // 4, self._packed,
                             self._places[back][tensor], wide(inputs) // 4, wide(inputs) // DEPTH, *arguments)

    def _part(self, name, number, size):
        """Part `number`, of this size, of an array of as many, or of one that all share."""
        array = getattr(self.arrays, name)
        return array[number * size % array.size:][:size]

    def _normed(self, number):
        return self._part("normed", number, self.padded * self.S)

    def _last_normed(self):
        return self._normed(2 * self.cfg.N_LAYERS + (0 if self.gru else 1))

    def _means(self, number):
        return self._part("means", number, self.padded)

    def _scale(self, number):
        return self._part("scales", number, self.padded)

    def _read_norm(self, number, name, layer):
        named = self._named
        bias = -1 if self.gru else named[name + "_bias", layer].weights
        self._rows("norm", self.arrays.h.view(np.int32), self._weights, named[name, layer].weights, bias, self._count,
                   self._normed(number).view(np.int32), self._means(number))

    def _read_mlp(self, number, norm, layer, weights, biases):
        a, cfg, named = self.arrays, self.cfg, self._named
        before, inner = (self._part(name, number, self.padded * self.S4) for name in ("before", "inner"))
        bias_up, bias_down = (-1 if self.gru else named[biases + end, layer].weights for end in ("up", "down"))
        self._product("product", self._normed(norm), self.S, named[weights + "up", layer], a.y, self.S4)
        self._launch("inner", self._count * cfg.HIDDEN_DIM, a.y, self._weights, bias_up, self.tables.gelu, self._count,
                     before.view(np.int32), inner.view(np.int32))
        self._product("product", inner, self.S4, named[weights + "down", layer], a.y, self.S)
        self._rows("residual", a.y, cfg.SHIFT_MLP_DOWN, self._weights, bias_down, self._count, a.h.view(np.int32),
                   self._scale(number))

    def _read_attention(self, layer, norm):
        a, cfg, named = self.arrays, self.cfg, self._named
        attended = self._part("attended", layer, self.padded * self.S)
        self._product("product", self._normed(norm), self.S, named["w_q", layer], a.y, 3 * self.S,
                      columns=3 * self.S)
        self._rows("quantise", a.y, self.tables.rope, self._at, self._n, self._room, self._count, self.padded,
                   self._qkv(layer).view(np.int32), self._part("qkv_scales", layer, 3 * self.padded), high=3)
        self._attend(layer, self._qkv(layer), attended)
        self._product("product", attended, self.S, named["w_o", layer], a.y, self.S)
        self._rows("residual", a.y, cfg.SHIFT_OUT, self._weights, -1, self._count, a.h.view(np.int32),
                   self._scale(1 + cfg.N_LAYERS + layer))

    def _attend(self, layer, qkv, attended):
        self._rows("recall", qkv.view(np.int32), qkv, self.tables.exps, self._at, self._n, self._room, self._count,
                   attended, high=self.cfg.N_HEADS)

    def _qkv(self, layer):
        return self._part("qkv", layer, 3 * self._sequences * self._room * self.S)

    def _kept(self, layer):
        """States before a position, gates, gated states, candidates."""
        return [self._part("kept", 4 * layer + k, self.padded * self.S) for k in range(4)]

    def _recur(self, layer, norm):
        a, named, H = self.arrays, self._named, self.cfg.HIDDEN_DIM
        self._product("scaled", self._normed(norm), self.S, named["w_f", layer], a.gates.view(np.int32), 2 * self.S,
                      columns=2 * self.S)
        matrices = (named[name, layer].weights // 4 for name in ("u_f", "u_h"))
        biases = (named[name, layer].weights for name in ("b_f", "b_h"))
        self._launch("recur", blocks(self._sequences, 8) * H, a.gates, self._weights.view(np.int32), self._weights,
                     *matrices, *biases, self._tokens, self._width, self._at, self._n, self._sequences,
                     self.states(layer), *self._kept(layer), a.h, threads=H)
