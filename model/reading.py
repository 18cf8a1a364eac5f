"""The whole network in plain NumPy: both models from tokens to logits and loss, as SPEC 4 to 7, 13, 14 and, for noise
on activations, 21 say.

One `Reading` is one member of the population, computed the slow and obvious way. The engines must agree with it in
every bit: the tests hold them against it, and `egg.py debug` shows its parts. From other modules it takes the tables of
parameters and of phases, the divisors of products, the integer tables, the bases of transforms and the noise draw; all
other arithmetic is written out here.
"""

import numpy as np

from model import activations, integer_tables, parameters, rules, steps


def wrap(x):
    """int64 values as int32 would hold them."""
    return (x + 2 ** 31) % 2 ** 32 - 2 ** 31


def trunc(f):
    """int64: float values truncated, saturating at int32."""
    return np.clip(np.trunc(f.astype(np.float64)), -2 ** 31, 2 ** 31 - 1).astype(np.int64)


def clip(x):
    return np.clip(x, -127, 127)


def divide(x, divisor):
    """The quotient truncated toward zero, for a positive divisor."""
    return np.sign(x) * (np.abs(x) // divisor)


def log2(q):
    """log2 of a positive int with 16 fractional bits."""
    e = q.bit_length() - 1
    m = q << 31 - e if e <= 31 else q >> e - 31
    fraction = 0
    for _ in range(16):
        m = m * m >> 31
        bit = m >> 32
        m >>= bit
        fraction = 2 * fraction + bit
    return (e << 16) + fraction


class Reading:
    """A member of a State: seed of its pair; sign +1 or -1, or 0 for the unperturbed model. All values are int64, those
    named h, n or x are [positions, HIDDEN_DIM].

    carried int64 [layers, HIDDEN_DIM]: the state from which the recurrent model reads on. see(layer, name, values) is
    called with every part, int64 [positions, width], layer -1 for a part outside the layers; after attention also with
    "Weights", values[head][query] int64 [positions up to the query]. disturbed: the noise is on activations instead,
    and `seed` that of the member."""

    def __init__(self, cfg, state, seed=0, sign=0, see=lambda layer, name, values: None, disturbed=False):
        self.cfg, self.state, self.see = cfg, state, see
        self.seed, self.sign = seed, sign
        self.phases = activations.phases(cfg) if disturbed else {}         # whose outputs have noise
        self.tensors = {(t.name, t.layer): t for t in parameters.tensors(cfg)}
        self.carried = np.zeros((cfg.N_LAYERS, cfg.HIDDEN_DIM), np.int64)

    def loss(self, tokens, targets):
        """int: the sum of `losses`."""
        return sum(self.losses(tokens, targets))

    def losses(self, tokens, targets):
        """[int]: SPEC 7, item 5, of every position. targets: int [positions], or [positions, 8] soft ones."""
        z, targets = self.observed(-1, "Logits", self.logits(tokens)), np.reshape(targets, (len(tokens), -1))
        exp, bit = integer_tables.exp_table(self.cfg).astype(np.int64), self.cfg.SOFTMAX_SCALE_BIT
        top = z.max(1, keepdims=True)
        total = exp[np.minimum(len(exp) - 1, top - z)].sum(1).tolist()
        distances = (top - np.take_along_axis(z, targets, 1)).sum(1).tolist()
        if self.cfg.LOSS == "deggs":
            return [((q.bit_length() - 1 - bit) * 16 >> 1) + distance for q, distance in zip(total, distances)]
        unit, part = integer_tables.log_unit(self.cfg), 256 // targets.shape[1]
        return [((log2(q) - (bit << 16)) * unit >> 32) + distance * part for q, distance in zip(total, distances)]

    def logits(self, tokens):
        """int64 [positions, VOCAB_SIZE]."""
        n = self.hidden(tokens)
        if self.cfg.MODEL == "gru":
            return self.divided_product("head", 0, n)
        return self.product("embedding", 0, n) >> self.cfg.SHIFT_LOGIT

    def hidden(self, tokens):
        """int64 [positions, HIDDEN_DIM]: the input of the head."""
        tokens = np.asarray(tokens, np.int64)
        return self.recurrent(tokens) if self.cfg.MODEL == "gru" else self.transformer(tokens)

    def observed(self, layer, name, values):
        self.see(layer, name, values)
        return values

    # the transformer (SPEC 7)

    def transformer(self, tokens):
        h = clip(self.embedded(tokens) + self.vector("emb_bias"))
        h = self.observed(-1, "Emb", self.disturbed("embedding", 0, h))
        h = self.mlp(h, 0, "ln_init", "w_emb_mlp_", "mlp_emb_bias_", ("LN_Init", "InitMLP_Exp", "InitMLP"),
                     ("first_up", "first_down"))
        rope = integer_tables.rope_table(self.cfg, len(tokens)).astype(np.int64)
        for layer in range(self.cfg.N_LAYERS):
            n = self.observed(layer, "LN1", self.layer_norm(h, "ln_1", layer))
            q, k, v = (self.product(name, layer, n) for name in ("w_q", "w_k", "w_v"))
            q, k, v = (self.disturbed(name, layer, self.amax(y)) for name, y in
                       (("query", self.rotated(q, rope)), ("key", self.rotated(k, rope)), ("value", v)))
            a = self.observed(layer, "Attended", self.attention(q, k, v, layer))
            h = self.amax(wrap(h + (self.product("w_o", layer, a) >> self.cfg.SHIFT_OUT)))
            h = self.observed(layer, "Attn", self.disturbed("output", layer, h))
            h = self.mlp(h, layer, "ln_2", "w_", "mlp_bias_", ("LN2", "MLP_Exp", "MLP"), ("up", "down"))
        return self.observed(-1, "LN_F", self.layer_norm(h, "ln_f"))

    def embedded(self, tokens):
        e = self.look_up("embedding", tokens)
        if self.cfg.NTT_MODE:
            c = self.coefficients(tokens)
            e = e + sum(self.look_up(f"ntt_emb_{byte}", c >> 8 * byte & 255) >> 2 for byte in (1, 2, 3))
        return e

    def mlp(self, h, layer, norm, weights, biases, names, phases):
        normed, inner, result = names
        up, down = phases
        n = self.observed(layer, normed, self.layer_norm(h, norm, layer))
        u = (self.product(weights + "up", layer, n) >> self.cfg.SHIFT_MLP_UP) + self.vector(biases + "up", layer)
        u = self.disturbed(up, layer, u)
        u = self.observed(layer, inner, integer_tables.gelu_table().astype(np.int64)[u & 255])
        y = self.product(weights + "down", layer, u, groups=4) >> self.cfg.SHIFT_MLP_DOWN
        h = self.amax(wrap(h + y + self.vector(biases + "down", layer)))
        return self.observed(layer, result, self.disturbed(down, layer, h))

    def rotated(self, x, rope):
        """Neighbouring elements (even, odd) of a head turned by the angle of their position."""
        even, odd = np.moveaxis(x.reshape(len(x), -1, self.cfg.HEAD_DIM // 2, 2), -1, 0)
        cos, sin = np.moveaxis(rope[:, None], -1, 0)
        turned = np.stack([even * cos - odd * sin, even * sin + odd * cos], -1)
        half = 1 << self.cfg.ROPE_SCALE_BIT - 1
        return wrap((turned + half >> self.cfg.ROPE_SCALE_BIT).reshape(x.shape))

    def attention(self, q, k, v, layer):
        exp, weights = integer_tables.exp_table(self.cfg).astype(np.int64), []
        a = np.zeros_like(q)
        for head in np.split(np.arange(self.cfg.HIDDEN_DIM), self.cfg.N_HEADS):
            scores = q[:, head] @ k[:, head].T >> self.cfg.SHIFT_ATTN
            distances = [row[:t + 1].max() - row[:t + 1] for t, row in enumerate(scores)]
            weights.append([exp[np.minimum(len(exp) - 1, distance)] for distance in distances])
            for t, w in enumerate(weights[-1]):
                a[t, head] = clip(divide(w @ v[:t + 1, head], w.sum()))
        self.see(layer, "Weights", weights)
        return a

    def layer_norm(self, x, name, layer=0):
        product = wrap(x * self.vector(name, layer))
        return clip(wrap(divide(product, self.mean_size(x)) + self.vector(name + "_bias", layer)))

    def mean_size(self, x):
        return np.maximum(1, np.abs(x).sum(1, keepdims=True) // self.cfg.HIDDEN_DIM)

    def amax(self, v):
        """v scaled so that its largest value is 127, rounded in float32 with halves away from zero."""
        largest = np.abs(v).max(1, keepdims=True).astype(np.float32)
        y = v.astype(np.float32) * (np.float32(127) / (largest + np.float32(1e-9)))
        whole = np.trunc(y)
        return clip(whole + np.where(np.abs(y - whole) >= 0.5, np.sign(y), 0)).astype(np.int64)

    def coefficients(self, tokens):
        """int64 [positions]: the transform of the tokens in blocks of SEQ_LEN (SPEC 14); only in a whole window can a
        coefficient see its targets."""
        T, prime = self.cfg.SEQ_LEN, integer_tables.PRIME[self.cfg.NTT_MODE]
        basis = integer_tables.basis(self.cfg, self.cfg.NTT_CAUSAL or len(tokens) != T)
        blocks = np.zeros((-(-len(tokens) // T), T), np.int64)
        blocks.ravel()[:len(tokens)] = tokens
        c = (blocks @ basis.T).ravel()[:len(tokens)]
        return c % prime if prime else c

    # the recurrent model (SPEC 13)

    def recurrent(self, tokens):
        x = clip(self.look_up("embedding", tokens))
        x = self.observed(-1, "Emb", self.disturbed("embedding", 0, x))
        for layer in range(self.cfg.N_LAYERS):
            n = self.observed(layer, "LN1", self.norm(x, "ln_1", layer))
            x = self.observed(layer, "GRU", clip(x + self.observed(layer, "State", self.states(n, layer, tokens))))
            u = self.divided_product("w_up", layer, self.observed(layer, "LN2", self.norm(x, "ln_2", layer)))
            u = clip(u + self.disturbance("up", layer, len(x)))
            u = self.observed(layer, "MLP_Exp", np.maximum(u, 0) if self.cfg.MLP_RELU else u)
            y = clip(self.divided_product("w_down", layer, u) + self.disturbance("down", layer, len(x)))
            x = self.observed(layer, "MLP", clip(x + y))
        return self.observed(-1, "LN_F", self.norm(x, "ln_f"))

    def states(self, n, layer, tokens):
        """int64 [positions, HIDDEN_DIM]: the state after every position."""
        forget, candidate = self.divided_product("w_f", layer, n), self.divided_product("w_h", layer, n)
        # what is added to the products with the state
        forget = forget + self.vector("b_f", layer) + self.disturbance("gate", layer, len(n))
        candidate = candidate + self.vector("b_h", layer) + self.disturbance("candidate", layer, len(n))
        h = self.carried[layer:layer + 1]
        before, gated, states = np.zeros((3, *n.shape), np.int64)
        for t, token in enumerate(tokens):
            before[t] = h = h * (token != 0)             # token 0 begins a text
            f = clip(forget[t] + self.divided_product("u_f", layer, h)) + 127
            gated[t] = past = f * h >> 8
            c = clip(candidate[t] + self.divided_product("u_h", layer, past))
            states[t] = h = h + (f * (c - h) >> 8)
        self.carried[layer] = h
        self.see(layer, "Before", before)
        self.see(layer, "Gated", gated)
        return states


    def divided_product(self, name, layer, x):
        return clip(self.product(name, layer, x) // parameters.divisor(self.cfg, x.shape[1]))

    def norm(self, x, name, layer=0):
        return clip(x * self.vector(name, layer) // self.mean_size(x))

    # noise on activations (SPEC 21)

    def disturbance(self, name, layer, positions):
        """The noise of the outputs of a phase, 0 where noise is on weights."""
        if not self.phases:
            return 0
        number = self.seed - self.state.seed & 0xFFFFFFFF
        return activations.noise(self.cfg, self.phases[name, layer], number, self.seed, positions)

    def disturbed(self, name, layer, y):
        return clip(y + self.disturbance(name, layer, len(y)))

    # weights and their noise (SPEC 4)

    def stored(self, t):
        flat = self.state.weights[t.span]
        return (parameters.from_canonical(flat, t.cols) if t.matrix else flat).astype(np.int64)

    def noise(self, stream, index):
        draws = steps.hash32(self.seed + stream, index)
        return rules.uniform_noise(draws, self.cfg.DEVICE_MASK, self.cfg.DEVICE_GAUSSIAN).astype(np.int64)

    def factor(self, first, stream, index):
        """float32: the noise-scale factors of the overlay's entries first + index."""
        overlay = self.state.overlay[first + index].astype(np.float32)
        if self.cfg.ADAPTIVE_NOISE_MODE == 0:
            return np.ones_like(overlay)
        if self.cfg.ADAPTIVE_NOISE_MODE == 1:
            return np.clip(overlay, 0, 64) / np.float32(64)
        tail = steps.hash32(self.seed + stream + 100000, index).astype(np.float32)
        return (overlay + np.float32(127)) / np.float32(255) / np.sqrt((tail + np.float32(1)) / np.float32(4294967296))

    def vector(self, name, layer=0):
        t = self.tensors[name, layer]
        index = np.arange(t.cols)
        noise = (self.noise(t.seed_a, index) * self.noise(t.seed_b, index)).astype(np.float32)
        noise = trunc(noise * self.factor(t.overlay_a, t.seed_a, index))
        v = self.stored(t) + (noise * self.sign >> self.cfg.SIGMA_SHIFT_VECTOR)
        return clip(v) if self.cfg.MODEL == "gru" else v

    def product(self, name, layer, x, groups=1):
        """int64 [positions, cols]: x [positions, rows] times a matrix. With 4 groups, the down products of the
        transformer, the noise of four inputs goes through one running integer."""
        t = self.tensors[name, layer]
        y = (x.astype(np.float64) @ self.stored(t)).astype(np.int64)          # exact: sums are far below 2^53
        if self.sign == 0:
            return y
        rows, cols = np.arange(t.rows), np.arange(t.cols)
        noisy = (x * self.noise(t.seed_b, rows)).astype(np.float32)
        factor = self.factor(t.overlay_b, t.seed_b, rows)
        pb = 0
        for group in np.split(rows, groups):
            # a fma: float64 holds the product; modes 0 and 1 round nothing, mode 2 rounds the sum in float64 first
            pb = trunc((pb + noisy[:, group].astype(np.float64) * factor[group]).astype(np.float32))
        sb = wrap(pb.sum(1, keepdims=True))
        a = trunc(self.noise(t.seed_a, cols).astype(np.float32) * self.factor(t.overlay_a, t.seed_a, cols))
        return wrap(y + (wrap(wrap(sb * a) * self.sign) >> self.cfg.NOISE_SHIFT))

    def look_up(self, name, columns):
        """int64 [positions, HIDDEN_DIM]: columns of an embedding."""
        t, hidden = self.tensors[name, 0], np.arange(self.cfg.HIDDEN_DIM)
        noise = (self.noise(t.seed_a, columns)[:, None] * self.noise(t.seed_b, hidden)).astype(np.float32)
        noise = noise * self.factor(t.overlay_a, t.seed_a, columns)[:, None]
        noise = noise * self.factor(t.overlay_b, t.seed_b, hidden)
        return self.stored(t)[:, columns].T + (trunc(noise) * self.sign >> self.cfg.NOISE_SHIFT)
