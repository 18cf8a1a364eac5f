"""The CUDA model: the phases of the forward pass in order (SPEC 2 to 7, 13, 21), each a kernel of the folder `kernels`.

model        kernels, in this order (here: Transformer._launch, Recurrent._launch)
both         draw: the noise on weights of all pairs, which the kernels below read (kernels.noise)
transformer  embed, norm, up, down; in each layer norm, qkv, attention, o, norm, up, down; then norm, head
recurrent    in each layer norm (the first looks up the embedding), gates, recur, norm, inner, down; then norm, head

PERTURB      what a step runs
weights      the pass over pairs of members, by these kernels
units        unit trials, by kernels of their own (kernels.units), whose arrays are row-major: a forward pass over the
             windows of a chunk, the head's errors, the transposed pass, and the votes

Validation is the pass with a noise of 0, which the job says by its mask, and another head, `clean`.

card         cc 9.0: products by wgmma, copies by bulk copies; others: mma.sync and cp.async. Shapes of tiles follow
             from the shared memory of a block (kernels.product)

Each launch says of which call of the plan, from and to which array.

What the CUDA engine uses:

    forward = build_forward(cfg, gpu_of(cfg, cc, shared_limit))
        cc              (major, minor) of the device; shared_limit: bytes of dynamic shared memory a block may have
        .packed_bytes   size of the int8 device array that holds the matrices in the order the tensor cores want
        .kernels        {verb: [kernels.host.Kernel]}: compile those of a verb (kernels.ptx.allow_shared) before its
                        first launch; "load": pack, "step": evaluate, or those of .trials; "validate", "write"
        .tables()       uploads the constant tables; call once on the device, before the launches below
        .scratch_bytes(pairs), .clean_scratch_bytes(windows, T)    size of the int8 device array `scratch` of a call
        .pack(stream, weights, packed)
                        after every change of the weights. weights: int8, the flat canonical array of
                        model.parameters.State
        .evaluate(stream, weights, packed, overlay, windows, job, offset, pairs, scratch, losses)
                        losses[2 i], [2 i + 1] (int64) of pairs job[1] + offset + i, 0 <= i < pairs: even and odd
                        member. overlay: int8, flat as in State; windows: int32, model.soft_targets.windows of these
                        pairs; job: uint32 [3] on the device = seed of the step, first pair of the job, 2^32 - 1;
                        offset, pairs: Python ints
        .trials         None, or with unit trials (SPEC 21) the kernels.trials.Trials of a step, in place of `evaluate`
        .validate(stream, weights, packed, windows, count, T, scratch, nats)
                        nats[i T + t] (float64): cross-entropy of token t + 1 of window i, without noise; windows: int32
                        [count, T + 1]
        .writing_bytes(count, room)         size of the int8 device array `memory` below
        .logit_columns                      from one row of the array `logits` below, a multiple of 32, to the next
        .write(stream, weights, packed, tokens, at, room, count, rope, memory, logits)
                        logits (None: nobody wants them) after the token at position at[0] of `count` sequences, tokens
                        int32 [count, room], without noise; `memory` must hold what the positions 0..at[0] - 1 left
                        there. rope: device copy of model.integer_tables.rope_table(cfg, room), int32, flat

Launches only enqueue work on `stream`, allocate nothing and can be captured in a graph. All arrays are 1-D contiguous
device arrays.
"""

from types import SimpleNamespace

import numpy as np
from numba import cuda
from numba.cuda.cudadrv import driver

from kernels import gru, noise, transformer, writing
from kernels.gru_parts import rows_of_places
from kernels.host import CLEAN_EXPS, CLEAN_ONE, Packing, ranges
from kernels.parts import Gpu, aligned, blocks
from kernels.product import THREADS, padded_length
from kernels.trials import Trials
from model import integer_tables


def processors():
    return cuda.get_current_device().MULTIPROCESSOR_COUNT


def arrays_in(scratch, layout):
    """The int32 arrays of a `layout` in scratch memory, as attributes."""
    return SimpleNamespace(**{name: scratch[first:end].view(np.int32) for name, (first, end) in layout.items()})


class Forward:
    """What both models have in common. MODULE: that of the model's kernels."""

    def __init__(self, cfg, gpu):
        self.cfg = cfg
        self._packing = packing = Packing(cfg)
        self._kernels = kernels = self.MODULE.Kernels(cfg, packing, gpu)
        self._write, self._rows = writing.kernel(cfg, gpu), writing.rows_of_block(cfg, gpu)
        self.logit_columns = writing.logit_columns(cfg)
        self.packed_bytes = packing.bytes
        self.trials = Trials(cfg, gpu.wgmma) if cfg.PERTURB == "units" else None
        step = list(self.trials.kernels.values()) if self.trials else kernels.noisy
        self.kernels = {"load": [packing.kernel], "step": step, "validate": kernels.clean, "write": [self._write]}

    def tables(self):
        """Uploads the constant tables."""
        cfg = self.cfg
        clean = np.rint(np.exp(-np.arange(CLEAN_EXPS) / cfg.SOFTMAX_EXP_SCALE) * CLEAN_ONE).astype(np.int64)
        clean[-1] = 0
        arrays = dict(plan=self._kernels.plan.table(), no_job=np.zeros(3, np.uint32), clean_exps=clean,
                      places=writing.places(cfg, self._packing), gelu=integer_tables.gelu_table(),
                      exps=integer_tables.exp_table(cfg),
                      rope=integer_tables.rope_table(cfg, cfg.SEQ_LEN).ravel())
        self._tables = SimpleNamespace(**{name: cuda.to_device(array) for name, array in arrays.items()})

    def pack(self, stream, weights, packed):
        self._packing.launch(stream, weights, packed)

    def _draw(self, stream, weights, overlay, job, offset, pairs, array):
        """Draws the noise of pairs into an array, or what all windows without noise share. Returns a function of a call
        of the plan: the first arguments of its kernel."""
        kernels, tables = self._kernels, self._tables
        each = 0 if job is tables.no_job else kernels.plan.words
        kernels.draw((pairs if each else 1, len(tables.plan)), noise.THREADS, stream, tables.plan, weights, overlay,
                     job, offset, each, array)
        return lambda call: (array[call:], each)

    def _exps(self, clean):
        """The table of exponentials of a head: that of validation, or that of members."""
        return self._tables.clean_exps if clean else self._tables.exps

    def _layout(self, count, room):
        cfg, rows = self.cfg, blocks(count, self._rows) * self._rows
        cached = 1 if cfg.MODEL == "gru" else 2 * room
        return ranges(dict(cache=cfg.N_LAYERS * count * cached * cfg.HIDDEN_DIM, y=12 * rows * cfg.HIDDEN_DIM))

    def writing_bytes(self, count, room):
        return self._layout(count, room)[1]

    def write(self, stream, weights, packed, tokens, at, room, count, rope, memory, logits):
        layout, tables = self._layout(count, room)[0], self._tables
        cache, y = (memory[slice(*layout[name])] for name in ("cache", "y"))
        last, z = self.cfg.N_LAYERS - (logits is None), tokens if logits is None else logits
        self._write(blocks(count, self._rows), writing.THREADS, stream, tables.places, weights, packed.view(np.int32),
                    tokens, at, room, count, last, rope, tables.exps, tables.gelu, cache, y.view(np.int32), z)


class Transformer(Forward):
    """The embedding and its MLP; layers of attention and MLP; a norm and the head."""

    MODULE = transformer

    def scratch_bytes(self, pairs):
        return self._kernels.layout(pairs)[1]

    def clean_scratch_bytes(self, windows, length):
        return self.scratch_bytes(windows)

    def validate(self, stream, weights, packed, windows, count, length, scratch, nats):
        self._launch(stream, weights, packed, weights, windows, self._tables.no_job, 0, count, scratch, nats,
                     self._kernels.clean_head)

    def evaluate(self, stream, weights, packed, overlay, windows, job, offset, pairs, scratch, losses):
        self._launch(stream, weights, packed, overlay, windows, job, offset, pairs, scratch, losses, self._kernels.head)

    def _launch(self, stream, weights, packed, overlay, windows, job, offset, pairs, scratch, losses, head):
        """The pass over pairs, or as many windows, with job[2] = 0, so that both members of a pair are the unperturbed
        model."""
        kernels, plan, tables = self._kernels, self._kernels.plan, self._tables
        length, packed, clean = padded_length(self.cfg), packed.view(np.int32), head is kernels.clean_head
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
                      kernels.at_embedding, weights, packed, windows, width, a.h, losses.view(np.int64))
        mlp(plan.embedding_mlp, "w_emb_mlp_up", "w_emb_mlp_down", 0)
        for i, layer in enumerate(plan.layers):
            norm(layer.norm, 3)
            full_width("qkv", layer.qkv, "w_q", i, a.n, a.queries, 3)
            kernels.attention((2 * pairs, blocks(length, 64)), 32 * min(4, length // 16), stream,
                              *drawn(layer.attention), tables.exps, a.queries, a.keys, a.values, a.n, a.sb)
            full_width("o", layer.o, "w_o", i, a.n, a.h)
            mlp(layer.mlp, "w_up", "w_down", i)
        norm(plan.ln_f, 1)
        head(blocks(rows, 64 * head.shape.RG), THREADS, stream, *drawn(plan.head), packed, kernels.at_tiles[clean],
             kernels.at_columns, windows, width, pairs, self._exps(clean), a.n, a.sb, losses, self.cfg.SEQ_LEN)


class Recurrent(Forward):
    """The embedding; layers of recurrence and MLP; a norm and the head. A pass without noise over the tokens before the
    windows gives the states with which pairs begin."""

    MODULE = gru

    def _state_bytes(self, pairs):
        """Of the states with which pairs begin, behind which the scratch memory of a pass lies."""
        return aligned(pairs * self.cfg.N_LAYERS * self.cfg.HIDDEN_DIM) if self.cfg.STATE_TOKENS else 0

    def scratch_bytes(self, pairs):
        if not pairs:
            return 0
        return self._state_bytes(pairs) + max(self.clean_scratch_bytes(pairs, n)
                                              for n in (self.cfg.SEQ_LEN, self.cfg.STATE_TOKENS))

    def clean_scratch_bytes(self, windows, length):
        return self._kernels.layout(windows, length)[1] if windows else 0

    def evaluate(self, stream, weights, packed, overlay, windows, job, offset, pairs, scratch, losses):
        before, states = self.cfg.STATE_TOKENS, None
        model = stream, weights, packed, overlay, windows, windows.size // pairs
        work = scratch[self._state_bytes(pairs):]
        if before:
            states = scratch[:pairs * self.cfg.N_LAYERS * self.cfg.HIDDEN_DIM]
            self._launch(*model, pairs, before, work, self._tables.no_job, states=states, keep=1)
        self._launch(*model, pairs, self.cfg.SEQ_LEN, work, job, offset, self._kernels.head, losses, states, before,
                     int(before > 0))

    def validate(self, stream, weights, packed, windows, count, length, scratch, nats):
        self._launch(stream, weights, packed, weights, windows, length + 1, count, length, scratch,
                     self._tables.no_job, 0, self._kernels.clean_head, nats)

    def _launch(self, stream, weights, packed, overlay, tokens, width, units, n, scratch, job, offset=0, head=None,
                losses=None, states=None, skip=0, begin=0, keep=0):
        """The pass over `units` pairs or, with job[2] = 0, windows. It reads n positions from `skip` on of rows of
        `width` tokens. states int8 [L, units, H]: where `begin`, units begin with them; where `keep` is 1, the states
        at the end go there. head: None, or what makes losses: int64 [units, 2]; of validation float64 [units, n]."""
        kernels, plan = self._kernels, self._kernels.plan
        H = self.cfg.HIDDEN_DIM
        packed, stride = packed.view(np.int32), rows_of_places(units * n)
        a = arrays_in(scratch, kernels.layout(units, n)[0])
        drawn = self._draw(stream, weights, overlay, job, offset, units, a.drawn)

        def norm(kernel, call, out, sb):
            kernel((units, blocks(n, 64)), 256, stream, *drawn(call), packed, kernels.rows_at, tokens, width, skip, n,
                   stride, a.x, out, sb)

        def product(kind, call, matrix, layer, x, out, matrices=1):
            tiles = blocks(2 * units * n, 64 * kernels.shapes[kind].RG)
            kernels.products[kind](min(tiles, processors() // matrices) * matrices, THREADS, stream, *drawn(call),
                                   packed, kernels.matrices[matrix, layer], units, n, stride, x, a.sb, out,
                                   a.gates.size)

        for i, layer in enumerate(plan.layers):
            norm(kernels.norms[min(i, 1)], layer.ln_1, a.normed, a.sb)
            product("gates", layer.gates, "w_f", i, a.normed, a.u, 2)
            # without states any array of their type will do
            of_layer = packed if states is None else states[i * units * H:(i + 1) * units * H].view(np.int32)
            kernels.recur(blocks(units, kernels.recur.shape.rows // 2), THREADS, stream, *drawn(layer.recur), packed,
                          kernels.matrices["u_f", i], tokens, width, skip, n, units, a.gates, a.candidates, a.x,
                          of_layer, a.tables, begin, keep)
            norm(kernels.norm_f, layer.ln_2, a.normed, a.sb)
            product("inner", layer.inner, "w_up", i, a.normed, a.u)
            product("down", layer.down, "w_down", i, a.u, a.x)
        if head is None:
            return
        # gates and candidates are needed no more: the rows of ln_f and their sums take their place
        clean = head is kernels.clean_head
        norm(kernels.norm_f, plan.ln_f, a.gates, a.candidates)
        if not clean:                                        # the head adds to them
            driver.device_memset(losses, 0, losses.nbytes, stream)
        head(blocks(units * n, 32 * head.shape.RG), THREADS, stream, *drawn(plan.head), packed, kernels.at_tiles[clean],
             kernels.at_columns, tokens, width, units, self._exps(clean), a.gates, a.candidates, losses, n)


def gpu_of(cfg, cc, shared_limit):
    """The Gpu for which the kernels of a configuration are made. Raises ValueError where it lacks what is wanted."""
    newest = tuple(cc) == (9, 0)
    if cfg.TENSOR_CORES == "wgmma" and not newest:
        raise ValueError(f"TENSOR_CORES = wgmma: only GPUs of compute capability 9.0 have it, not {cc[0]}.{cc[1]}")
    return Gpu(tuple(cc), shared_limit, newest and cfg.TENSOR_CORES != "mma")


def build_forward(cfg, gpu):
    """The forward pass of a configuration on a Gpu: see the top of this file."""
    return (Recurrent if cfg.MODEL == "gru" else Transformer)(cfg, gpu)
