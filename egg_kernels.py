"""The CUDA model: the phases of the forward pass in order (SPEC 2 to 7, 13, 21), each a kernel of the folder `kernels`.

model        kernels, in this order (here: Transformer.evaluate, Recurrent._launch)
transformer  embed, norm, up, down; in each layer norm, qkv, attention, o, norm, up, down; then norm, head
recurrent    in each layer norm (the first looks up the embedding), gates, recur, norm, inner, down; then norm, head

noise           what runs
on weights      the pass over pairs of members; `clean` for validation: the same kernels with the noise masked out by
                the job, and another head
on activations  (recurrent) the clean pass over groups, which keeps what matrices multiply (keep) and the errors of the
                head (errors); the pass over members; then measure, credit, add_up, products, token_votes, vote_sizes,
                vote_digits and pack_digits (kernels.activations)

card            cc 9.0: products by wgmma, copies by bulk copies; others: mma.sync and cp.async. Shapes of tiles follow
                from the shared memory of a block (kernels.product)

Each launch says on which row of the plan (the run-time constants of a call), from and to which array.

What the CUDA engine uses:

    forward = build_forward(cfg, gpu_of(cfg, cc, shared_limit))
        cc              (major, minor) of the device; shared_limit: bytes of dynamic shared memory a block may have
        .packed_bytes   size of the int8 device array that holds the matrices in the order the tensor cores want
        .kernels        {verb: [kernels.host.Kernel]}: compile those of a verb (kernels.ptx.allow_shared) before its
                        first launch; "load": pack, "step": evaluate, "validate", "write"
        .tables()       uploads the constant tables; call once on the device, before the launches below
        .scratch_bytes(pairs), .clean_scratch_bytes(windows, T)    size of the int8 device array `scratch` of a call
        .pack(stream, weights, packed)
                        after every change of the weights. weights: int8, the flat canonical array of
                        model.parameters.State
        .evaluate(stream, weights, packed, overlay, windows, job, offset, pairs, scratch, losses)
                        losses[2 i], [2 i + 1] (int64) of pairs job[1] + offset + i, 0 <= i < pairs: even and odd
                        member. overlay: int8, flat as in State; windows: int32, model.soft_targets.windows of these
                        pairs; job: uint32 [4] on the device = seed of the step, first pair of the job, 2^32 - 1, shift
                        of the noise; offset, pairs: Python ints
        .votes          None, or with noise on activations (SPEC 21) a kernels.activations.Votes. Then losses has those
                        of all positions, and `evaluate` has a further argument: True, where the unperturbed model
                        reads, instead of pairs, groups, for the votes. Their windows are those of all their pairs
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

from kernels import activations, gru, transformer, writing
from kernels.gru_parts import DOWN, GATES, INNER, NORM_1, NORM_2, rows_of_places
from kernels.host import CLEAN_EXPS, CLEAN_ONE, Packing, ranges
from kernels.parts import Gpu, aligned, blocks
from kernels.product import THREADS, padded_length
from model import integer_tables


def processors():
    return cuda.get_current_device().MULTIPROCESSOR_COUNT


class Forward:
    """What both models have in common."""

    votes = None

    def __init__(self, cfg, gpu, plan, kernels):
        """plan, kernels: functions that make the plan and the kernels of the model."""
        self.cfg = cfg
        self._packing = packing = Packing(cfg)
        self._plan = plan(cfg, packing)
        self._kernels = kernels = kernels(cfg, packing, gpu)
        self._write, self._rows = writing.kernel(cfg, gpu), writing.rows_of_block(cfg, gpu)
        self.logit_columns = writing.logit_columns(cfg)
        self.packed_bytes = packing.bytes
        self.kernels = {"load": [packing.kernel], "step": kernels.noisy, "validate": kernels.clean,
                        "write": [self._write]}

    def _vote(self, down, gpu):
        """Prepares the votes of noise on activations; down: the Shape of the product that reads the MLP's inner
        values."""
        if self.cfg.PERTURB == "activations":
            self.votes = activations.Votes(self.cfg, down.KP, gpu.wgmma)
            self.kernels["step"] = [*self.kernels["step"], *self.votes.kernels.values()]

    def tables(self, **of_model):
        """Uploads the constant tables, `of_model` among them."""
        exps = integer_tables.exp_table(self.cfg)
        clean = np.rint(np.exp(-np.arange(CLEAN_EXPS) / self.cfg.SOFTMAX_EXP_SCALE) * CLEAN_ONE).astype(np.int64)
        clean[-1] = 0
        arrays = dict(plan=self._plan.table(), no_job=np.zeros(4, np.uint32), clean_exps=clean,
                      places=writing.places(self.cfg, self._packing), gelu=integer_tables.gelu_table(),
                      exps=exps[np.minimum(np.arange(256), exps.size - 1)], **of_model)
        self._tables = SimpleNamespace(**{name: cuda.to_device(array) for name, array in arrays.items()})

    def pack(self, stream, weights, packed):
        self._packing.launch(stream, weights, packed)

    def _args(self, layout, scratch, packed, **args):
        """What all kernels of a pass are given, by the names of their parameters; layout: of arrays in scratch."""
        arrays = {name: scratch[first:end].view(np.int32) for name, (first, end) in layout.items()}
        return dict(vars(self._tables), packed=packed.view(np.int32), at_columns=self._kernels.at_columns, **arrays,
                    **args)

    def _layout(self, count, room):
        cfg, rows = self.cfg, blocks(count, self._rows) * self._rows
        cached = 1 if cfg.MODEL == "gru" else 2 * room
        return ranges(dict(cache=cfg.N_LAYERS * count * cached * cfg.HIDDEN_DIM, y=12 * rows * cfg.HIDDEN_DIM))

    def writing_bytes(self, count, room):
        return self._layout(count, room)[1]

    def write(self, stream, weights, packed, tokens, at, room, count, rope, memory, logits):
        args = self._args(self._layout(count, room)[0], memory, packed, stream=stream, weights=weights, tokens=tokens,
                          at=at, room=room, count=count, last=self.cfg.N_LAYERS - (logits is None),
                          z=tokens if logits is None else logits)
        args |= dict(rope=rope, cache=args["cache"].view(np.int8))                   # not that of SEQ_LEN
        self._write(blocks(count, self._rows), writing.THREADS, args)


class Transformer(Forward):
    """The embedding and its MLP; layers of attention and MLP; a norm and the head."""

    def __init__(self, cfg, gpu):
        super().__init__(cfg, gpu, transformer.Plan, transformer.Kernels)
        self._vote(self._kernels.full_width["down"].shape, gpu)

    def tables(self):
        rope = integer_tables.rope_table(self.cfg, self.cfg.SEQ_LEN).ravel()
        super().tables(rope=rope)

    def scratch_bytes(self, pairs):
        return self._kernels.layout(pairs)[1]

    def clean_scratch_bytes(self, windows, length):
        return self.scratch_bytes(windows)

    def validate(self, stream, weights, packed, windows, count, length, scratch, nats):
        self._launch(count, scratch, self._kernels.clean_head, stream=stream, weights=weights, packed=packed,
                     overlay=weights, windows=windows, job=self._tables.no_job, offset=0, losses=nats)

    def evaluate(self, stream, weights, packed, overlay, windows, job, offset, units, scratch, losses, clean=False):
        """clean: see the top of this file."""
        self._launch(units, scratch, self._kernels.head, clean, stream=stream, weights=weights, packed=packed,
                     overlay=overlay, windows=windows, job=self._tables.no_job if clean else job, offset=offset,
                     losses=losses, chunk=job)

    def _launch(self, pairs, scratch, head, keeps=False, *, packed, windows, losses, **args):
        """The pass over pairs, or as many windows, with job[2] = 0, so that both members of a pair are the unperturbed
        model. keeps: self.votes keeps what the matrices multiply, and the windows are those of groups from `offset` on;
        chunk: the job of their chunk."""
        cfg = self.cfg
        plan = self._plan
        kernels = self._kernels
        length = padded_length(cfg)
        args = self._args(kernels.layout(pairs)[0], scratch, packed, windows=windows, tokens=windows,
                          width=windows.size // pairs, losses=losses,
                          stride=transformer.rows_of_pairs(cfg, pairs), count=pairs, **args)
        rows = 2 * pairs * length
        n = args["n"]
        most = min(processors(), transformer.MOST_BLOCKS)

        def norm(row, streams):
            kernels.norms[streams]((pairs, blocks(2 * length, 128)), 256, args, call=row, out=n)

        def product(kernel, row, matrix, layer, x, matrices=1, **out):
            tiles = blocks(rows, 64 * kernel.shape.RG)
            kernel(min(tiles, most // matrices) * matrices, THREADS, args, call=row,
                   at=kernels.matrices[matrix, layer], tiles=tiles, x=x, **out)

        def keep(name, layer, source):
            if keeps:
                self.votes.keep(args, name, layer, source)

        def mlp(rows, up, down, layer, inputs):
            keep("normed" + inputs, layer, n)
            product(kernels.up, rows.up, up, layer, n)
            keep("inner" + inputs.replace("_2", ""), layer, args["u"])
            product(kernels.full_width["down"], rows.down, down, layer, args["u"])

        kernels.embed((pairs, blocks(length, 64)), 4 * min(length, 64), args, call=plan.embed,
                      losses=losses.view(np.int64))
        norm(plan.embed, 1)
        mlp(plan.embedding_mlp, "w_emb_mlp_up", "w_emb_mlp_down", 0, "_0")
        for i, layer in enumerate(plan.layers):
            norm(layer.ln_1, 3)
            keep("normed_1", i, n)
            product(kernels.full_width["qkv"], layer.qkv, "w_q", i, n, 3, h=args["queries"])
            kernels.attention((2 * pairs, blocks(length, 64)), 32 * min(4, length // 16), args, call=layer.attention,
                              a=n)
            keep("attended", i, n)
            if keeps:
                self.votes.attended(args, i)
            product(kernels.full_width["o"], layer.o, "w_o", i, n)
            norm(layer.ln_2, 1)
            mlp(layer.mlp, "w_up", "w_down", i, "_2")
        norm(plan.ln_f, 1)
        exps = self._tables.clean_exps if head is kernels.clean_head else self._tables.exps
        head(blocks(rows, 64 * head.shape.RG), THREADS, args, call=plan.head, x=n, length=cfg.SEQ_LEN,
             at_tiles=kernels.matrices["embedding", 0], exps=exps)
        if keeps:
            self.votes.head(args, n)


class Recurrent(Forward):
    """The embedding; layers of recurrence and MLP; a norm and the head. A pass without noise over the tokens before the
    windows gives the states with which pairs begin."""

    def __init__(self, cfg, gpu):
        super().__init__(cfg, gpu, gru.Plan, gru.Kernels)
        self._vote(self._kernels.shapes["down"], gpu)

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

    def evaluate(self, stream, weights, packed, overlay, windows, job, offset, units, scratch, losses, clean=False):
        """clean: see the top of this file."""
        cfg = self.cfg
        states = None
        before = cfg.STATE_TOKENS
        args = dict(stream=stream, weights=weights, packed=packed, overlay=overlay, tokens=windows,
                    width=windows.size // units)
        work = scratch[self._state_bytes(units):]
        if before:
            states = scratch[:units * cfg.N_LAYERS * cfg.HIDDEN_DIM]
            self._launch(units, before, work, True, states, **args, keep=1)
        self._launch(units, cfg.SEQ_LEN, work, False, states, **args, job=self._tables.no_job if clean else job,
                     offset=offset, skip=before, begin=int(before > 0), keep=gru.KEEP_INPUTS * clean, losses=losses,
                     chunk=job)

    def validate(self, stream, weights, packed, windows, count, length, scratch, nats):
        self._launch(count, length, scratch, True, stream=stream, weights=weights, packed=packed, overlay=weights,
                     tokens=windows, width=length + 1, losses=nats)

    def _launch(self, units, n, scratch, clean, states=None, **args):
        """The pass over `units` pairs or, clean, without noise, windows. It reads n positions from `skip` on of
        rows of `width` tokens. states int8 [L, units, H]: where `begin`, units begin with them; where `keep` is 1, the
        states at the end go there. losses: None, or int64 [units, 2], with noise on activations [units, 2, n]; clean:
        float64 [units, n]. Where `keep` is KEEP_INPUTS, self.votes keeps what the matrices multiply, and the units are
        groups from `offset` on; chunk: the job of their chunk. Defaults: a pass without noise from the first token
        on; states and losses are not stored."""
        plan, size = self._plan, units * self.cfg.HIDDEN_DIM
        args = dict(job=self._tables.no_job, offset=0, skip=0, begin=0, keep=0, losses=None,
                    kept=self.votes.arrays.kept if self.votes else self._tables.plan) | args
        args = self._args(self._kernels.layout(units, n)[0], scratch, units=units, count=units, n=n, length=n,
                          stride=rows_of_places(units * n), rows_at=self._kernels.rows_at, **args)
        for i, row in enumerate(plan.layers):
            # without states any array of their type will do
            args["states"] = args["plan"] if states is None else states[i * size:(i + 1) * size].view(np.int32)
            self._layer(args, row, i, units, n)
        if args["losses"] is not None:
            self._head(args, units, n, clean)

    def _layer(self, args, row, i, units, n):
        kernels = self._kernels
        normed = args["normed"]

        def norm(kernel, row):
            kernel((units, blocks(n, 64)), 256, args, call=row, out=normed)

        def product(kind, row, matrix, x, out, matrices=1):
            tiles = blocks(2 * units * n, 64 * kernels.shapes[kind].RG)
            kernels.products[kind](min(tiles, processors() // matrices) * matrices, THREADS, args, call=row,
                                   at=kernels.matrices[matrix, i], x=x, out=out, beyond=args["gates"].size)

        def keep(name, source):
            if args["keep"] == gru.KEEP_INPUTS:
                self.votes.keep(args, name, i, source)

        norm(kernels.norms[min(i, 1)], row + NORM_1)
        keep("normed_1", normed)
        product("gates", row + GATES, "w_f", normed, args["u"], 2)
        kernels.recur(blocks(units, kernels.state_rows // 2), THREADS, args, call=row, at=kernels.matrices["u_f", i])
        half = args["kept"].size // 2
        keep("state", args["kept"][:half])
        keep("gated", args["kept"][half:])
        norm(kernels.norm_f, row + NORM_2)
        keep("normed_2", normed)
        product("inner", row + INNER, "w_up", normed, args["u"])
        keep("inner", args["u"])
        product("down", row + DOWN, "w_down", args["u"], args["x"])

    def _head(self, args, units, n, clean):
        """Norm and head. Gates and candidates are needed no more: the rows of ln_f and their sums take their place."""
        kernels = self._kernels
        plan = self._plan
        normed = args["gates"]
        sb = args["candidates"]
        kernels.norm_f((units, blocks(n, 64)), 256, args, call=plan.ln_f, out=normed, sb=sb)
        if not clean and not self.votes:                     # the head adds to them
            driver.device_memset(args["losses"], 0, args["losses"].nbytes, args["stream"])
        head = kernels.clean_head if clean else kernels.head
        head(blocks(units * n, 32 * head.shape.RG), THREADS, args, call=plan.head, at_tiles=kernels.at_tiles[clean],
             x=normed, sb=sb, windows=args["tokens"], exps=self._tables.clean_exps if clean else self._tables.exps)
        if args["keep"] == gru.KEEP_INPUTS:
            self.votes.head(args, normed)


def gpu_of(cfg, cc, shared_limit):
    """The Gpu for which the kernels of a configuration are made. Raises ValueError where it lacks what is wanted."""
    newest = tuple(cc) == (9, 0)
    if cfg.TENSOR_CORES == "wgmma" and not newest:
        raise ValueError(f"TENSOR_CORES = wgmma: only GPUs of compute capability 9.0 have it, not {cc[0]}.{cc[1]}")
    return Gpu(tuple(cc), shared_limit, newest and cfg.TENSOR_CORES != "mma")


def build_forward(cfg, gpu):
    """The forward pass of a configuration on a Gpu: see the top of this file."""
    return (Recurrent if cfg.MODEL == "gru" else Transformer)(cfg, gpu)
