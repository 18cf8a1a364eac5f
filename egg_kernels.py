"""The CUDA model: the phases of the forward pass in order (SPEC 2 to 7, 13, 21), each a kernel of the folder `kernels`.

pass         kernels
over rows    without noise: kernels.reading. Validation, texts and unit trials take it, and noise on weights the states
             before its windows
over pairs   with noise on weights, of pairs of members, in this order (here: Transformer.evaluate, Recurrent.evaluate)
both         draw: the noise of all pairs, which the kernels below read (kernels.noise)
transformer  embed, norm, up, down; in each layer norm, qkv, attention, o, norm, up, down; then norm, head
recurrent    in each layer norm (the first looks up the embedding), gates, recur, norm, inner, down; then norm, head

card         cc 9.0: products by wgmma, copies by bulk copies; others: mma.sync and cp.async. Shapes of tiles follow
             from the shared memory of a block (kernels.product)

Each launch says of which call of the plan, from and to which array.

What the CUDA engine uses:

    forward = build_forward(cfg, gpu_of(cfg, cc, shared_limit))
        cc              (major, minor) of the device; shared_limit: bytes of dynamic shared memory a block may have
        .packed_bytes   size of the int8 device array that holds the matrices in the order the tensor cores want
        .kernels        {verb: [kernels.host.Kernel]}: compile those of a verb (kernels.ptx.allow_shared) before its
                        first launch; "load": pack, "step": evaluate, or those of unit trials; "validate", "write"
        .pack(stream, weights, packed)
                        after every change of the weights. weights: int8, the flat canonical array of
                        model.parameters.State
        .reading(count, n, room)            a kernels.reading.Reading, n positions at a time

    with noise on weights (with unit trials: kernels.trials.Trials(forward))
        .scratch_bytes(pairs)               of device memory that .reserve(pairs) takes, the `scratch` of a call
        .evaluate(stream, weights, packed, overlay, windows, job, offset, pairs, scratch, losses)
                        losses[2 i], [2 i + 1] (int64) of pairs job[1] + offset + i, 0 <= i < pairs: even and odd
                        member. overlay: int8, flat as in State; windows: int32, model.soft_targets.windows of these
                        pairs; job: uint32 [2] on the device = seed of the step, first pair of the job;
                        offset, pairs: Python ints

Launches only enqueue work on `stream`, allocate nothing and can be captured in a graph. All arrays are 1-D contiguous
device arrays.
"""

import functools
from types import SimpleNamespace

import numpy as np
from numba import cuda
from numba.cuda.cudadrv import driver

from kernels import gru, noise, reading, transformer, units
from kernels.gru_parts import rows_of_places
from kernels.host import Packing
from kernels.parts import Gpu, blocks
from kernels.product import THREADS, padded_length
from model import integer_tables


def processors():
    return cuda.get_current_device().MULTIPROCESSOR_COUNT


def arrays_in(scratch, layout):
    """The int32 arrays of a `layout` in scratch memory, as attributes."""
    return SimpleNamespace(**{name: scratch[first:end].view(np.int32) for name, (first, end) in layout.items()})


class Forward:
    """The pass over rows. rows: {name: Kernel}; places: those of matrices in the packed array."""

    def __init__(self, cfg, gpu):
        self.cfg, self._packing = cfg, Packing(cfg)
        self.places = reading.packed_places(cfg, self._packing)
        read, validation, others = units.build(cfg, gpu.wgmma)
        self.rows = read | validation | others
        self.kernels = {"load": [self._packing.kernel], "step": [*read.values(), *others.values()],
                        "validate": [*read.values(), *validation.values()], "write": list(read.values())}

    @property
    def packed_bytes(self):
        return self._packing.bytes

    def pack(self, stream, weights, packed):
        self._packing.launch(stream, weights, packed)

    def reading(self, count, n, room):
        return reading.Reading(self, room, reading.sizes(self.cfg, count, n, room))


class Pairs(Forward):
    """And what both models have in common of the pass over pairs. MODULE: that of the model's kernels."""

    def __init__(self, cfg, gpu):
        super().__init__(cfg, gpu)
        self._kernels = self.MODULE.Kernels(cfg, self._packing, gpu)
        self.kernels["step"] = self._kernels.all + (self.kernels["write"] if cfg.STATE_TOKENS else [])

    @functools.cached_property
    def _tables(self):
        """The constant tables on the device."""
        cfg = self.cfg
        arrays = dict(plan=self._kernels.plan.table(), gelu=integer_tables.gelu_table(),
                      exps=integer_tables.exp_table(cfg), rope=integer_tables.rope_table(cfg, cfg.SEQ_LEN).ravel())
        return SimpleNamespace(**{name: cuda.to_device(array) for name, array in arrays.items()})

    def reserve(self, pairs):
        return cuda.device_array(self.scratch_bytes(pairs), np.int8)

    def _draw(self, stream, weights, overlay, job, offset, pairs, array):
        """Draws the noise of pairs into an array. Returns a function of a call of the plan: the first arguments of its
        kernel."""
        each, table = self._kernels.plan.words, self._tables.plan
        grid = pairs, len(table)
        self._kernels.draw(grid, noise.THREADS, stream, table, weights, overlay, job, offset, each, array)
        return lambda call: (array[call:], each)


class Transformer(Pairs):
    """The embedding and its MLP; layers of attention and MLP; a norm and the head."""

    MODULE = transformer

    def scratch_bytes(self, pairs):
        return self._kernels.layout(pairs)[1]

    def evaluate(self, stream, weights, packed, overlay, windows, job, offset, pairs, scratch, losses):
        kernels, plan, tables = self._kernels, self._kernels.plan, self._tables
        length, packed = padded_length(self.cfg), packed.view(np.int32)
        a = arrays_in(scratch, kernels.layout(pairs)[0])
        drawn = self._draw(stream, weights, overlay, job, offset, pairs, a.drawn)
        stride, width = transformer.rows_of_pairs(self.cfg, pairs), windows.size // pairs
        rows = 2 * pairs * length
        most = min(processors(), transformer.MOST_BLOCKS)

        def norm(call, streams):
            kernels.norms[streams]((pairs, blocks(2 * length, 128)), 256, stream, *drawn(call), stride, a.h, a.n, a.sb)

        def of_product(kernel, call, matrix, layer, matrices=1):
            """Grid, threads and the first arguments."""
            tiles = blocks(rows, 64 * kernel.shape.RG)
            return (min(tiles, most // matrices) * matrices, THREADS, stream, *drawn(call), packed,
                    kernels.matrices[matrix, layer], tiles, stride)

        def full_width(kind, call, matrix, layer, x, h, matrices=1):
            kernel = kernels.full_width[kind]
            kernel(*of_product(kernel, call, matrix, layer, matrices), tables.rope, x, a.sb, h, a.values, a.spill)

        def mlp(calls, up, down, layer):
            norm(calls.norm, 1)
            kernels.up(*of_product(kernels.up, calls.up, up, layer), tables.gelu, a.n, a.sb, a.u)
            full_width("down", calls.down, down, layer, a.u, a.h)

        kernels.embed((pairs, blocks(length, 64)), 4 * min(length, 64), stream, *drawn(plan.embed),
                      kernels.at_embedding, weights, packed, windows, width, a.h, losses)
        mlp(plan.embedding_mlp, "w_emb_mlp_up", "w_emb_mlp_down", 0)
        for i, layer in enumerate(plan.layers):
            norm(layer.norm, 3)
            full_width("qkv", layer.qkv, "w_q", i, a.n, a.queries, 3)
            kernels.attention((2 * pairs, blocks(length, 64)), 32 * min(4, length // 16), stream,
                              *drawn(layer.attention), tables.exps, a.queries, a.keys, a.values, a.n, a.sb)
            full_width("o", layer.o, "w_o", i, a.n, a.h)
            mlp(layer.mlp, "w_up", "w_down", i)
        norm(plan.ln_f, 1)
        kernels.head(blocks(rows, 64 * kernels.head.shape.RG), THREADS, stream, *drawn(plan.head), packed,
                     kernels.at_tiles, kernels.at_columns, windows, width, pairs, tables.exps, a.n, a.sb, losses,
                     self.cfg.SEQ_LEN)


class Recurrent(Pairs):
    """The embedding; layers of recurrence and MLP; a norm and the head. The pass over rows reads the tokens before the
    windows, and gives the states with which pairs begin."""

    MODULE = gru

    def scratch_bytes(self, pairs):
        before = self.cfg.STATE_TOKENS
        of_rows = reading.bytes_of(reading.sizes(self.cfg, pairs, before, before)) if before else 0
        return self._kernels.layout(pairs, self.cfg.SEQ_LEN)[1] + of_rows

    def reserve(self, pairs):
        before, size = self.cfg.STATE_TOKENS, self._kernels.layout(pairs, self.cfg.SEQ_LEN)[1]
        return cuda.device_array(size, np.int8), self.reading(pairs, before, before) if before else None

    def evaluate(self, stream, weights, packed, overlay, windows, job, offset, pairs, scratch, losses):
        kernels, plan = self._kernels, self._kernels.plan
        (work, states), width = scratch, windows.size // pairs
        skip, n = self.cfg.STATE_TOKENS, self.cfg.SEQ_LEN
        if states:
            states.begin(stream)
            states.read(stream, weights, packed, windows, width, skip)
        packed, stride = packed.view(np.int32), rows_of_places(pairs * n)
        a = arrays_in(work, kernels.layout(pairs, n)[0])
        drawn = self._draw(stream, weights, overlay, job, offset, pairs, a.drawn)

        def norm(kernel, call, out, sb):
            kernel((pairs, blocks(n, 64)), 256, stream, *drawn(call), packed, kernels.rows_at, windows, width, skip, n,
                   stride, a.x, out, sb)

        def product(kind, call, matrix, layer, x, out, matrices=1):
            tiles = blocks(2 * pairs * n, 64 * kernels.shapes[kind].RG)
            kernels.products[kind](min(tiles, processors() // matrices) * matrices, THREADS, stream, *drawn(call),
                                   packed, kernels.matrices[matrix, layer], pairs, n, stride, x, a.sb, out,
                                   a.gates.size)

        for i, layer in enumerate(plan.layers):
            norm(kernels.norms[min(i, 1)], layer.ln_1, a.normed, a.sb)
            product("gates", layer.gates, "w_f", i, a.normed, a.u, 2)
            # without states any array of their type will do
            of_layer = states.states(i).view(np.int32) if states else packed
            kernels.recur(blocks(pairs, kernels.recur.shape.rows // 2), THREADS, stream, *drawn(layer.recur), packed,
                          kernels.matrices["u_f", i], windows, width, skip, n, pairs, a.gates, a.candidates, a.x,
                          of_layer, a.tables, int(skip > 0))
            norm(kernels.norm_f, layer.ln_2, a.normed, a.sb)
            product("inner", layer.inner, "w_up", i, a.normed, a.u)
            product("down", layer.down, "w_down", i, a.u, a.x)
        # gates and candidates are needed no more: the rows of ln_f and their sums take their place
        norm(kernels.norm_f, plan.ln_f, a.gates, a.candidates)
        driver.device_memset(losses, 0, losses.nbytes, stream)           # the head adds to them
        kernels.head(blocks(pairs * n, 32 * kernels.head.shape.RG), THREADS, stream, *drawn(plan.head), packed,
                     kernels.at_tiles, kernels.at_columns, windows, width, pairs, self._tables.exps, a.gates,
                     a.candidates, losses, n)


def gpu_of(cfg, cc, shared_limit):
    """The Gpu for which the kernels of a configuration are made. Raises ValueError where it lacks what is wanted."""
    newest = tuple(cc) == (9, 0)
    if cfg.TENSOR_CORES == "wgmma" and not newest:
        raise ValueError(f"TENSOR_CORES = wgmma: only GPUs of compute capability 9.0 have it, not {cc[0]}.{cc[1]}")
    return Gpu(tuple(cc), shared_limit, newest and cfg.TENSOR_CORES != "mma")


def build_forward(cfg, gpu):
    """The forward pass of a configuration on a Gpu: see the top of this file."""
    return (Forward if cfg.PERTURB == "units" else Recurrent if cfg.MODEL == "gru" else Transformer)(cfg, gpu)
