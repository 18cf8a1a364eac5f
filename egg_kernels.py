"""The transformer's forward pass on CUDA (SPEC 2 to 7): what the engine calls, and single-token generation.
`kernels.transformer` has the evaluation of members and validation, `kernels.gru` the recurrent model with the same
interface.

What the CUDA engine uses:

    forward = build_forward(cfg, cc, shared_limit)
        cc              (major, minor) of the device; shared_limit: bytes of dynamic shared memory a block may have
        .packed_bytes   size of the int8 device array that holds the matrices in the order the tensor cores want
        .kernels        {verb: [products.Kernel]}: compile those of a verb (kernels.ptx.allow_shared) before its first
                        launch; "load": pack, "step": evaluate, "validate", "generate": token
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
        .validate(stream, weights, packed, windows, count, T, scratch, nats)
                        nats[i T + t] (float64): cross-entropy of token t + 1 of window i, without noise; windows: int32
                        [count, T + 1]
        .cache_bytes(positions), .token_scratch_bytes
        .token(stream, weights, packed, tokens, at, positions, rope, cache, scratch, logits)
                        logits (int32 [V]) after tokens[at[0]] (int32 arrays on the device) at position at[0], without
                        noise; the keys and values of positions 0..at[0] - 1 must be in `cache`, those of at[0] are
                        added. rope: device copy of model.integer_tables.rope_table(cfg, positions), int32, flat

Launches only enqueue work on `stream`, allocate nothing and can be captured in a graph. All arrays are 1-D contiguous
device arrays.
"""

from types import SimpleNamespace

import numpy as np
from numba import cuda, int8, int32, int64, uint32

from kernels import products, ptx, transformer
from kernels.parts import A8, A32, PLAN, amax_scale, byte, clip, ntt_functions, rounded
from kernels.products import Kernel, block_max, block_sum, matrix_vector
from kernels.rules import build_noise, device
from model import integer_tables


# --- one token at a time, without noise -------------------------------------------------------------------------------

def _token_kernel(cfg):
    """The hidden state after one more token, as normed for the head: n int8 [H]. One block of 1024 threads; a thread is
    a channel.

    calls int32: rows of the plan in order: embed, then up and down of the first MLP, then for each layer ln_1, qkv, o,
    ln_2, up, down, then ln_f. keys, values: the two halves of the cache, int8 [layers][positions][H]; scores int32
    [heads][positions]."""
    H, D, L, HEADS, SCALE_BIT = cfg.HIDDEN_DIM, cfg.HEAD_DIM, cfg.N_LAYERS, cfg.N_HEADS, cfg.ROPE_SCALE_BIT
    SHIFT_ATTN, SHIFT_OUT, SHIFT_UP, SHIFT_DOWN = cfg.SHIFT_ATTN, cfg.SHIFT_OUT, cfg.SHIFT_MLP_UP, cfg.SHIFT_MLP_DOWN
    WORDS, H4, NTT = H // 4, 4 * H, cfg.NTT_MODE != 0
    coefficient, look_up = ntt_functions(cfg, build_noise(cfg), False, True)
    from_h, from_4h = matrix_vector(H), matrix_vector(4 * H)

    @device
    def normed(h, weights, plan, p, part, t):
        """Entry t of ln(h), h the thread's own channel."""
        mean = max(block_sum(int32(abs(h)), part, t) // int32(H), 1)
        if t >= H:
            return int32(0)
        product = int32(h * int32(weights[plan[p] + t]))
        quotient = int32(uint32(abs(product)) // uint32(mean))
        return clip(int32((quotient if product >= 0 else int32(-quotient)) + int32(weights[plan[p + 4] + t])))

    @device
    def scaled_down(v, part, t):
        """Entry t of amax(v)."""
        return byte(rounded(v, amax_scale(block_max(int32(abs(v)), part, t))), 1)

    @cuda.jit(launch_bounds=1024)
    def token(calls, plan, weights, packed, tokens, at, positions, rope, exps, gelu, keys, values, key_words, scores,
              out):
        # H, then 4 H bytes: the vectors multiplied next
        words, vector = cuda.shared.array(0, int32), cuda.shared.array(0, int8)
        y = cuda.shared.array(H4, int32)
        part = cuda.shared.array(32, int32)
        top, total = cuda.shared.array(HEADS, int32), cuda.shared.array(HEADS, int64)
        t = cuda.threadIdx.x
        here = at[0]
        token_id = tokens[here]
        p = calls[0] * PLAN
        h, call = int32(0), 1
        if t < H:
            block = plan[p + 20] + (token_id >> 3) * (2 * H) + (t >> 4) * 32 + (token_id & 7) * 4 + ((t >> 2) & 3)
            h = int32(byte(packed[block], t & 3) + int32(weights[plan[p + 8] + t]))
            if NTT:
                c = coefficient(tokens, 0, here)
                h = int32(h + look_up(weights, weights, uint32(0), int32(0), int32(0), c, t)[0])
            h = clip(h)
        n = normed(h, weights, plan, p, part, t)
        for layer in range(-1, L):
            if layer >= 0:
                if t < H:
                    vector[t] = n
                    if t < HEADS:
                        top[t], total[t] = -2 ** 31, 0
                cuda.syncthreads()
                p = calls[call] * PLAN
                for which in range(3):
                    from_h(words, 0, packed, plan[p + 8 * which], H, y, which * H, t)
                cuda.syncthreads()
                if t < H and (t & 1) == 0:
                    cos, sin = int64(rope[here * D + t % D]), int64(rope[here * D + t % D + 1])
                    half = int64(1) << int64(SCALE_BIT - 1)
                    for which in range(2):
                        a, b = int64(y[which * H + t]), int64(y[which * H + t + 1])
                        y[which * H + t] = int32((a * cos - b * sin + half) >> int64(SCALE_BIT))
                        y[which * H + t + 1] = int32((a * sin + b * cos + half) >> int64(SCALE_BIT))
                cuda.syncthreads()
                q = scaled_down(y[t] if t < H else int32(0), part, t)
                k = scaled_down(y[H + t] if t < H else int32(0), part, t)
                v = scaled_down(y[2 * H + t] if t < H else int32(0), part, t)
                base = int64(layer) * positions
                if t < H:
                    vector[t] = q
                    keys[(base + here) * H + t] = k
                    values[(base + here) * H + t] = v
                cuda.syncthreads()
                for task in range(t, HEADS * (here + 1), 1024):
                    head, past = task // (here + 1), task % (here + 1)
                    s = int32(0)
                    for i in range(D // 4):
                        s = ptx.dp4a(key_words[(base + past) * WORDS + head * (D // 4) + i], words[head * (D // 4) + i],
                                     s)
                    scores[head * positions + past] = s
                    cuda.atomic.max(top, head, s)
                cuda.syncthreads()
                for task in range(t, HEADS * (here + 1), 1024):
                    head, past = task // (here + 1), task % (here + 1)
                    d = int32(int32(top[head] >> int32(SHIFT_ATTN))
                              - int32(scores[head * positions + past] >> int32(SHIFT_ATTN)))
                    w = exps[min(d, int32(255))]
                    scores[head * positions + past] = w
                    cuda.atomic.add(total, head, int64(w))
                cuda.syncthreads()
                if t < H:
                    head, num = t // D, int64(0)
                    for past in range(here + 1):
                        num += int64(int32(scores[head * positions + past] * int32(values[(base + past) * H + t])))
                    vector[t] = clip(int32(float(num) / float(total[head])))
                cuda.syncthreads()
                from_h(words, 0, packed, plan[calls[call + 1] * PLAN], H, y, 0, t)
                cuda.syncthreads()
                h = scaled_down(int32(h + int32(y[t] >> int32(SHIFT_OUT))) if t < H else int32(0), part, t)
                n = normed(h, weights, plan, calls[call + 2] * PLAN, part, t)
                call += 3
            if t < H:
                vector[t] = n
            cuda.syncthreads()
            p = calls[call] * PLAN
            from_h(words, 0, packed, plan[p], 4 * H, y, 0, t)
            cuda.syncthreads()
            for i in range(t, 4 * H, 1024):
                vector[H + i] = gelu[clip(int32(int32(y[i] >> int32(SHIFT_UP)) + int32(weights[plan[p + 3] + i])))
                                     & 255]
            cuda.syncthreads()
            from_4h(words, WORDS, packed, plan[calls[call + 1] * PLAN], H, y, 0, t)
            cuda.syncthreads()
            p = calls[call + 2] * PLAN                       # the next norm carries the bias of this product
            if t < H:
                h = int32(int32(h + int32(y[t] >> int32(SHIFT_DOWN))) + int32(weights[plan[p + 8] + t]))
            h = scaled_down(h, part, t)
            n = normed(h, weights, plan, p, part, t)
            call += 3
        if t < H:
            out[t] = n

    return token


# --- the forward pass -------------------------------------------------------------------------------------------------

class _Plan(products.Plan):
    """The calls of a forward pass in order."""

    def __init__(self, cfg, packing):
        super().__init__(cfg, packing)
        table = self._tensors["embedding", 0]
        self.embed = self._add(self._normed("ln_init", 0, "emb_bias", ("w_emb_mlp_up",))
                               + [packing.at["embedding", 0] // 4, table.overlay_a, table.overlay_b])
        self.emb_mlp = self._mlp(0, "w_emb_mlp_up", "w_emb_mlp_down", "mlp_emb_bias_up", "mlp_emb_bias_down")
        self.layers = []
        before = ("mlp_emb_bias_down", 0)
        for layer in range(cfg.N_LAYERS):
            self.layers.append(SimpleNamespace(
                ln_1=self._add(self._normed("ln_1", layer, before[0], ("w_q", "w_k", "w_v"), before[1])),
                qkv=self._add(sum((self._biased(name, layer) for name in ("w_q", "w_k", "w_v")), [])),
                sums_o=self._add(12 * [0] + self._input("w_o", layer)),
                o=self._add(self._biased("w_o", layer)),
                ln_2=self._add(self._normed("ln_2", layer, None, ("w_up",))),
                mlp=self._mlp(layer, "w_up", "w_down", "mlp_bias_up", "mlp_bias_down")))
            before = ("mlp_bias_down", layer)
        self.ln_f = self._add(self._normed("ln_f", 0, before[0], ("embedding",), before[1]))
        self.head = self._add(self._biased("embedding", 0))

    def token_calls(self):
        """Rows of the plan in the order of the token kernel."""
        calls = [(a.ln_1, a.qkv, a.o, a.ln_2, a.mlp.up, a.mlp.down) for a in self.layers]
        return np.array([self.embed, self.emb_mlp.up, self.emb_mlp.down, *sum(calls, ()), self.ln_f], np.int32)

    def _biased(self, name, layer, bias=None):
        return self._matrix(name, layer) + (self._vector(bias, layer) if bias else 4 * [0]) + [0]

    def _normed(self, ln, layer, bias, streams, bias_layer=0):
        entries = self._vector(ln, layer) + self._vector(ln + "_bias", layer)
        entries += self._vector(bias, bias_layer) if bias else 4 * [0]
        return sum((self._input(name, layer) for name in streams), entries) + [0] * (2 * (4 - len(streams)))

    def _mlp(self, layer, up, down, bias_up, bias_down):
        return SimpleNamespace(up=self._add(self._biased(up, layer, bias_up) + self._input(down, layer)),
                               down=self._add(self._biased(down, layer, bias_down) + self._input(down, layer)))


class Forward(products.Forward):
    """See the top of this file."""

    def __init__(self, cfg, cc, shared_limit, silent=False):
        SHIFT = cfg.SHIFT_LOGIT

        @device
        def logit(total):
            return int32(total >> int32(SHIFT))

        token = Kernel((_token_kernel(cfg), 5 * cfg.HIDDEN_DIM), calls=A32, at=A32, keys=A8, values=A8,
                       key_words=A32, scores=A32, out=A8)
        super().__init__(cfg, cc, token, logit, "embedding")
        self._plan = _Plan(cfg, self._packing)
        card = transformer.Card(tuple(cc) == (9, 0) and cfg.TENSOR_CORES != "mma", shared_limit, cc[0] < 10)
        self._noisy = transformer.Members(cfg, self._packing, card, silent)
        self._clean = SimpleNamespace(kernels=self._noisy.clean_kernels)
        self._serve()

    def tables(self):
        super().tables(no_job=np.zeros(4, np.uint32), gelu=integer_tables.gelu_table(),
                       rope=integer_tables.rope_table(self.cfg, self.cfg.SEQ_LEN).ravel())

    def scratch_bytes(self, pairs):
        return self._noisy.layout(pairs)[2]

    def clean_scratch_bytes(self, windows, length):
        return self._noisy.layout(windows)[2]

    def evaluate(self, stream, weights, packed, overlay, windows, job, offset, pairs, scratch, losses):
        self._noisy.launch(self._plan, self._tables, pairs, scratch, stream=stream, weights=weights, packed=packed,
                           overlay=overlay, windows=windows, job=job, offset=offset, losses=losses)

    def validate(self, stream, weights, packed, windows, count, length, scratch, nats):
        self._noisy.launch(self._plan, self._tables, count, scratch, True, stream=stream, weights=weights,
                           packed=packed, overlay=weights, windows=windows, job=self._tables.no_job, offset=0,
                           losses=nats)

    def cache_bytes(self, positions):
        cfg = self.cfg
        return 2 * cfg.N_LAYERS * positions * cfg.HIDDEN_DIM + 4 * cfg.N_HEADS * positions

    def _cache(self, cache, positions):
        half = self.cfg.N_LAYERS * positions * self.cfg.HIDDEN_DIM
        return dict(gelu=self._tables.gelu, keys=cache[:half], key_words=cache[:half].view(np.int32),
                    values=cache[half:2 * half], scores=cache[2 * half:].view(np.int32))


def build_forward(cfg, cc, shared_limit, silent=False):
    """The forward pass of a configuration on a device: see the top of this file. silent: as build_noise."""
    if cfg.MODEL == "gru":
        from kernels import gru                                # it builds on this module
        return gru.Forward(cfg, cc, shared_limit, silent)
    return Forward(cfg, cc, shared_limit, silent)
