"""The forward pass without noise on a GPU, over rows: the launches of kernels.units that read windows. Validation is
this pass; unit trials go back from it (kernels.trials)."""

from types import SimpleNamespace

import numpy as np
from numba import cuda

from kernels.host import CLEAN_EXPS, CLEAN_ONE, ranges
from kernels.parts import A8, A16, A32, blocks
from kernels.tiles import DEPTH, THREADS, TILE
from kernels.units import BLOCK, HEAD_BLOCK, HEAD_ROWS, WARPS, logit_type, wide
from model import integer_tables, parameters


def packed_places(cfg):
    """({matrix: (first byte of its rows for outputs, and of those for inputs)}, bytes of all). Rows for outputs of
    matrices with one input lie side by side."""
    tensors, together = parameters.tensors(cfg), ("w_f", "w_h") if cfg.MODEL == "gru" else ("w_q", "w_k", "w_v")
    first = [t for layer in range(cfg.N_LAYERS) for t in tensors if t.layer == layer and t.name in together]
    matrices = first + [t for t in tensors if t.matrix and t not in first]
    ends = np.cumsum([0] + [wide(t.rows) * wide(t.cols) for t in matrices + matrices]).tolist()
    return {t: (ends[k], ends[len(matrices) + k]) for k, t in enumerate(matrices)}, ends[-1]


def sizes(cfg, windows, R, apart):
    """{name: (numbers, dtype)} of the arrays of a pass over windows, of R rows. apart: each layer and norm has its part
    of an array, as the way back wants it; else all share one."""
    gru, L = cfg.MODEL == "gru", cfg.N_LAYERS
    S, S4, VS = (wide(n) for n in (cfg.HIDDEN_DIM, 4 * cfg.HIDDEN_DIM, cfg.VOCAB_SIZE))
    squares = 1 if gru else windows * cfg.N_HEADS * cfg.SEQ_LEN ** 2
    layers, more = (L, 0 if gru else 1) if apart else (1, 0)
    norms, mlps = 2 * L + 1 + more if apart else 1, layers + more
    scales = mlps + L if apart else 1
    z = {A8: np.int8, A16: np.int16, A32: np.int32}[logit_type(cfg)]
    return dict(
        packed=(packed_places(cfg)[1], np.int8), h=(R * S, np.int8), normed=(norms * R * S, np.int8),
        means=(norms * R, np.int32), before=(mlps * R * S4, np.int8), inner=(mlps * R * S4, np.int8),
        scales=(scales * R, np.float32), y=(R * max((2 if gru else 3) * S, S4), np.int32),
        z=(min(HEAD_ROWS, R) * VS, z), qkv=(1 if gru else layers * R * 3 * S, np.int8),
        shares=(1 if gru else layers * squares, np.int16), attended=(1 if gru else layers * R * S, np.int8),
        qkv_scales=(1 if gru else layers * 3 * R, np.float32), gates=(R * 2 * S if gru else 1, np.int8),
        kept=(4 * layers * R * S if gru else 1, np.int8),
        states=(windows * cfg.HIDDEN_DIM * L if gru else 1, np.int8))


class Reading:
    """A forward pass by kernels {name: Kernel} of kernels.units.build. `upload` on the device, then `validate`."""

    def __init__(self, cfg, kernels):
        self.cfg, self.kernels = cfg, kernels
        self.gru, self._tensors = cfg.MODEL == "gru", parameters.tensors(cfg)
        self._named = {(t.name, t.layer): t for t in self._tensors}
        self.S, self.S4, self.VS = wide(cfg.HIDDEN_DIM), wide(4 * cfg.HIDDEN_DIM), wide(cfg.VOCAB_SIZE)
        self._packed = packed_places(cfg)[0]
        self._read = self._read_recurrent if self.gru else self._read_transformer

    def upload(self, **more):
        """Uploads the tables."""
        cfg = self.cfg
        clean = np.rint(np.exp(-np.arange(CLEAN_EXPS) / cfg.SOFTMAX_EXP_SCALE) * CLEAN_ONE).astype(np.int64)
        clean[-1] = 0
        tables = dict(exps=integer_tables.exp_table(cfg), clean_exps=clean, gelu=integer_tables.gelu_table(),
                      rope=integer_tables.rope_table(cfg, cfg.SEQ_LEN).ravel(), **more)
        self.tables = SimpleNamespace(**{name: cuda.to_device(table) for name, table in tables.items()})

    def _layout(self, count, length):
        arrays = sizes(self.cfg, count, wide(count * length), False)
        bytes_of = {name: size * np.dtype(kind).itemsize for name, (size, kind) in arrays.items()}
        return arrays, *ranges(bytes_of)

    def scratch_bytes(self, count, length):
        """Of `validate`."""
        return self._layout(count, length)[2]

    def validate(self, stream, weights, windows, count, length, scratch, nats):
        """Fills nats float64 [count * length] (egg_kernels): the pass over windows int32 [count, length + 1]."""
        arrays, places, _ = self._layout(count, length)
        self.arrays = SimpleNamespace(**{name: scratch[first:end].view(arrays[name][1])
                                         for name, (first, end) in places.items()})
        cuda.cudadrv.driver.device_memset(scratch, 0, scratch.nbytes, stream)
        self._begin(stream, weights, windows, length + 1, count, wide(count * length))
        self.pack(stream, weights)
        self._read(0, length)
        for first in self._logits():
            self.kernels["nats"](self._count, HEAD_BLOCK, stream, self.arrays.z.view(np.int32), first, windows, length,
                                 self.tables.clean_exps, nats)

    def _begin(self, stream, weights, windows, width, count, padded):
        """Of the launches that follow: `count` windows of `width` numbers; the arrays have `padded` rows."""
        self._stream, self._weights, self._windows = stream, weights, windows
        self._width, self._chunk, self.padded = width, count, padded

    def _logits(self):
        """Yields the first row of each piece of the rows, whose logits are then in z and whose number in _count."""
        cfg, every, head = self.cfg, self._count, self._named["head" if self.gru else "embedding", 0]
        normed = self._normed(2 * cfg.N_LAYERS + (0 if self.gru else 1))
        for first in range(0, every, HEAD_ROWS):
            self._count = min(HEAD_ROWS, every - first)
            self._product("scaled", normed[first * self.S:], self.S, head, self.arrays.z.view(np.int32), self.VS)
            yield first
        self._count = every

    def _launch(self, name, work, *arguments, threads=BLOCK, high=1):
        """A kernel whose threads each do one part of `work`; high: the grid's second dimension."""
        self.kernels[name]((blocks(work, threads), high), threads, self._stream, *arguments)

    def _rows(self, name, *arguments, high=1, turns=1):
        """A kernel with a warp for a row, or for `turns` rows."""
        self.kernels[name]((blocks(self._count, WARPS * turns), high), BLOCK, self._stream, *arguments)

    def pack(self, stream, weights):
        self._stream, packed = stream, self.arrays.packed.view(np.int32)
        for t, (forward, back) in self._packed.items():
            self._launch("pack", t.rows // 4 * blocks(t.cols, 4), weights.view(np.int32), t.weights // 4, t.rows,
                         t.cols, packed, forward // 4, wide(t.rows) // 4, back // 4, wide(t.cols) // 4)

    def _product(self, kernel, x, x_bytes, tensor, *arguments, back=False, columns=0):
        """A product of rows x of x_bytes with a matrix, or with the transposed one; the last arguments are the
        kernel's. columns: of the result, where several matrices lie side by side."""
        inputs, outputs = (tensor.cols, tensor.rows) if back else (tensor.rows, tensor.cols)
        grid = (columns or wide(outputs)) // TILE, blocks(self._count, TILE)
        self.kernels[kernel](grid, THREADS, self._stream, x.view(np.int32), x_bytes // 4,
                             self.arrays.packed.view(np.int32), self._packed[tensor][back] // 4, wide(inputs) // 4,
                             wide(inputs) // DEPTH, *arguments)

    def _part(self, name, number, size):
        """Part `number`, of this size, of an array of as many, or of one that all share."""
        array = getattr(self.arrays, name)
        return array[number * size % array.size:][:size]

    def _normed(self, number):
        return self._part("normed", number, self.padded * self.S)

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

    def _embed(self, skip, n):
        a, named = self.arrays, self._named
        bias = -1 if self.gru else named["emb_bias", 0].weights
        self._count = self._chunk * n
        self._rows("embed", a.packed.view(np.int32), self._packed[named["embedding", 0]][0] // 4, self._weights, bias,
                   self._windows, self._width, skip, n, self._count, a.h.view(np.int32))

    def _read_transformer(self, skip, n):
        cfg, a, named = self.cfg, self.arrays, self._named
        L = cfg.N_LAYERS
        self._embed(skip, n)
        self._read_norm(0, "ln_init", 0)
        self._read_mlp(0, 0, 0, "w_emb_mlp_", "mlp_emb_bias_")
        for layer in range(L):
            self._read_norm(1 + 2 * layer, "ln_1", layer)
            qkv, attended = self._qkv(layer), self._part("attended", layer, self.padded * self.S)
            self._product("product", self._normed(1 + 2 * layer), self.S, named["w_q", layer], a.y, 3 * self.S,
                          columns=3 * self.S)
            self._rows("quantise", a.y, self.tables.rope, self._count, self.padded, qkv.view(np.int32),
                       self._part("qkv_scales", layer, 3 * self.padded), high=3)
            self._heads("attend", qkv.view(np.int32), qkv, self.tables.exps, self._shares(layer), attended)
            self._product("product", attended, self.S, named["w_o", layer], a.y, self.S)
            self._rows("residual", a.y, cfg.SHIFT_OUT, self._weights, -1, self._count, a.h.view(np.int32),
                       self._scale(1 + L + layer))
            self._read_norm(2 + 2 * layer, "ln_2", layer)
            self._read_mlp(1 + layer, 2 + 2 * layer, layer, "w_", "mlp_bias_")
        self._read_norm(1 + 2 * L, "ln_f", 0)

    def _qkv(self, layer):
        return self._part("qkv", layer, 3 * self.padded * self.S)

    def _shares(self, layer):
        return self._part("shares", layer, self._chunk * self.cfg.N_HEADS * self.cfg.SEQ_LEN ** 2)

    def _heads(self, name, *arguments):
        """A kernel with a block a head of a window."""
        self.kernels[name]((self._chunk, self.cfg.N_HEADS), BLOCK, self._stream, *arguments)

    def _kept(self, layer):
        """States before a position, gates, gated states, candidates."""
        return [self._part("kept", 4 * layer + k, self.padded * self.S) for k in range(4)]

    def _read_recurrent(self, skip, n):
        cfg, a, named = self.cfg, self.arrays, self._named
        self._embed(skip, n)
        for layer in range(cfg.N_LAYERS):
            self._read_norm(2 * layer, "ln_1", layer)
            self._product("scaled", self._normed(2 * layer), self.S, named["w_f", layer], a.gates.view(np.int32),
                          2 * self.S, columns=2 * self.S)
            matrices = (named[name, layer].weights // 4 for name in ("u_f", "u_h"))
            biases = (named[name, layer].weights for name in ("b_f", "b_h"))
            states = self._part("states", layer, self._chunk * cfg.HIDDEN_DIM)
            self._launch("recur", blocks(self._chunk, 8) * cfg.HIDDEN_DIM, a.gates, self._weights.view(np.int32),
                         self._weights, *matrices, *biases, self._windows, self._width, skip, n, self._chunk, states,
                         *self._kept(layer), a.h, threads=cfg.HIDDEN_DIM)
            self._read_norm(2 * layer + 1, "ln_2", layer)
            self._read_mlp(layer, 2 * layer + 1, layer, "w_", "")
        self._read_norm(2 * cfg.N_LAYERS, "ln_f", 0)
