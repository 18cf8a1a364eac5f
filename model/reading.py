"""The whole network in plain NumPy: both models from tokens to logits and loss, as SPEC 4 to 7, 13 and 14 say, and the
votes of unit trials on them, as SPEC 21 says.

One `Reading` is one member of the population, or a window of unit trials, computed the slow and obvious way. The
engines must agree with it in every bit: the tests hold them against it, and `egg.py debug` shows its parts. From other
modules it takes the tables of parameters and of credits, the divisors of products, the integer tables, the bases of
transforms and the noise draw; all other arithmetic is written out here.
"""

import functools

import numpy as np

from model import integer_tables, parameters, rules, steps, units


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


def times(x, y):
    """int64: a matrix product by float64, exact: sums are far below 2^53."""
    return (x.astype(np.float64) @ y).astype(np.int64)


class Reading:
    """A member of a State: seed of its pair; sign +1 or -1, or 0 for the unperturbed model. All values are int64, those
    named h, n or x are [positions, HIDDEN_DIM].

    carried int64 [layers, HIDDEN_DIM]: the state from which the recurrent model reads on. see(layer, name, values) is
    called with every part, int64 [positions, width], layer -1 for a part outside the layers. kept {(name, layer): int64
    [positions, width or 1]}: what unit trials take of the forward pass."""

    def __init__(self, cfg, state, seed=0, sign=0, see=lambda layer, name, values: None):
        self.cfg, self.state, self.see = cfg, state, see
        self.seed, self.sign = seed, sign
        self.kept = {}
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

    def keep(self, name, layer, values):
        self.kept[name, layer] = values
        return values

    # the transformer (SPEC 7)

    def transformer(self, tokens):
        h = self.observed(-1, "Emb", clip(self.embedded(tokens) + self.vector("emb_bias")))
        h = self.mlp(h, 0, "ln_init", "w_emb_mlp_", "mlp_emb_bias_", ("LN_Init", "InitMLP_Exp", "InitMLP"), "_0")
        rope = integer_tables.rope_table(self.cfg, len(tokens)).astype(np.int64)
        for layer in range(self.cfg.N_LAYERS):
            n = self.keep("normed_1", layer, self.observed(layer, "LN1", self.layer_norm(h, "ln_1", layer)))
            q, k, v = (self.product(name, layer, n) for name in ("w_q", "w_k", "w_v"))
            q, k, v = (self.keep(name, layer, self.amax(y, name, layer)) for name, y in
                       (("query", self.rotated(q, rope)), ("key", self.rotated(k, rope)), ("value", v)))
            a = self.keep("attended", layer, self.observed(layer, "Attended", self.attention(q, k, v, layer)))
            h = self.amax(wrap(h + (self.product("w_o", layer, a) >> self.cfg.SHIFT_OUT)), "output", layer)
            h = self.mlp(self.observed(layer, "Attn", h), layer, "ln_2", "w_", "mlp_bias_", ("LN2", "MLP_Exp", "MLP"),
                         "")
        return self.observed(-1, "LN_F", self.layer_norm(h, "ln_f"))

    def embedded(self, tokens):
        e = self.look_up("embedding", tokens)
        if self.cfg.NTT_MODE:
            c = self.coefficients(tokens)
            e = e + sum(self.look_up(f"ntt_emb_{byte}", c >> 8 * byte & 255) >> 2 for byte in (1, 2, 3))
        return e

    def mlp(self, h, layer, norm, weights, biases, names, kept):
        normed, inner, result = names
        n = self.keep("normed" + (kept or "_2"), layer, self.observed(layer, normed, self.layer_norm(h, norm, layer)))
        u = (self.product(weights + "up", layer, n) >> self.cfg.SHIFT_MLP_UP) + self.vector(biases + "up", layer)
        u = self.keep("before" + kept, layer, clip(u))
        u = self.observed(layer, inner, integer_tables.gelu_table().astype(np.int64)[u & 255])
        y = self.product(weights + "down", layer, self.keep("inner" + kept, layer, u), groups=4)
        y = wrap(h + (y >> self.cfg.SHIFT_MLP_DOWN) + self.vector(biases + "down", layer))
        return self.observed(layer, result, self.amax(y, "down" + kept, layer))

    def rotated(self, x, rope):
        """Neighbouring elements (even, odd) of a head turned by the angle of their position."""
        even, odd = np.moveaxis(x.reshape(len(x), -1, self.cfg.HEAD_DIM // 2, 2), -1, 0)
        cos, sin = np.moveaxis(rope[:, None], -1, 0)
        turned = np.stack([even * cos - odd * sin, even * sin + odd * cos], -1)
        half = 1 << self.cfg.ROPE_SCALE_BIT - 1
        return wrap((turned + half >> self.cfg.ROPE_SCALE_BIT).reshape(x.shape))

    def attention(self, q, k, v, layer):
        exp, a = integer_tables.exp_table(self.cfg).astype(np.int64), np.zeros_like(q)
        weights = np.zeros((self.cfg.N_HEADS, len(q), len(q)), np.int64)
        for number, head in enumerate(np.split(np.arange(self.cfg.HIDDEN_DIM), self.cfg.N_HEADS)):
            scores = q[:, head] @ k[:, head].T >> self.cfg.SHIFT_ATTN
            for t, row in enumerate(scores):
                weights[number, t, :t + 1] = w = exp[np.minimum(len(exp) - 1, row[:t + 1].max() - row[:t + 1])]
                a[t, head] = clip(divide(w @ v[:t + 1, head], w.sum()))
        total = self.observed(layer, "Weights", weights).sum(2, keepdims=True)
        self.keep("shares", layer, (8192 * weights + total) // (2 * total))
        return a

    def layer_norm(self, x, name, layer=0):
        product = wrap(x * self.vector(name, layer))
        return clip(wrap(divide(product, self.mean_size(x, name, layer)) + self.vector(name + "_bias", layer)))

    def mean_size(self, x, name, layer):
        return self.keep(name, layer, np.maximum(1, np.abs(x).sum(1, keepdims=True) // self.cfg.HIDDEN_DIM))

    def amax(self, v, name, layer):
        """v scaled so that its largest value is 127, rounded in float32 with halves away from zero."""
        largest = np.abs(v).max(1, keepdims=True).astype(np.float32)
        scale = self.keep("scale_" + name, layer, np.float32(127) / (largest + np.float32(1e-9)))
        y = v.astype(np.float32) * scale
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
        x = self.observed(-1, "Emb", clip(self.look_up("embedding", tokens)))
        for layer in range(self.cfg.N_LAYERS):
            n = self.keep("normed_1", layer, self.observed(layer, "LN1", self.norm(x, "ln_1", layer)))
            x = self.observed(layer, "GRU", clip(x + self.observed(layer, "State", self.states(n, layer, tokens))))
            n = self.keep("normed_2", layer, self.observed(layer, "LN2", self.norm(x, "ln_2", layer)))
            u = self.keep("before", layer, self.divided_product("w_up", layer, n))
            u = self.observed(layer, "MLP_Exp", np.maximum(u, 0) if self.cfg.MLP_RELU else u)
            y = self.divided_product("w_down", layer, self.keep("inner", layer, u))
            x = self.observed(layer, "MLP", clip(x + y))
        return self.observed(-1, "LN_F", self.norm(x, "ln_f"))

    def states(self, n, layer, tokens):
        """int64 [positions, HIDDEN_DIM]: the state after every position."""
        # what is added to the products with the state
        forget, candidate = (self.divided_product("w_" + of, layer, n) + self.vector("b_" + of, layer) for of in "fh")
        h = self.carried[layer:layer + 1]
        before, opened, gated, new, states = (np.zeros(n.shape, np.int64) for _ in range(5))
        for t, token in enumerate(tokens):
            before[t] = h = h * (token != 0)             # token 0 begins a text
            opened[t] = f = clip(forget[t] + self.divided_product("u_f", layer, h)) + 127
            gated[t] = past = f * h >> 8
            new[t] = c = clip(candidate[t] + self.divided_product("u_h", layer, past))
            states[t] = h = h + (f * (c - h) >> 8)
        self.carried[layer] = h
        for name, values in ("state", before), ("gate", opened), ("gated", gated), ("candidate", new):
            self.keep(name, layer, values)
        return states

    def divided_product(self, name, layer, x):
        return clip(self.product(name, layer, x) // parameters.divisor(self.cfg, x.shape[1]))

    def norm(self, x, name, layer=0):
        return clip(x * self.vector(name, layer) // self.mean_size(x, name, layer))

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
        y = times(x, self.stored(t))
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


# --- unit trials (SPEC 21) --------------------------------------------------------------------------------------------

def f32(x):
    return np.asarray(x, np.float32)


def power(e):
    """float32: 2^e, e cut to what float32 has."""
    return f32(2) ** f32(np.clip(e, -126, 127))


def with_exponent(credits, bits, axis=-1):
    """(int64, exponents): float32 credits as whole numbers of `bits` bits times 2^exponent. Those along an axis have
    one exponent."""
    top = np.abs(credits).max(axis, keepdims=True)
    e = np.clip(np.frexp(top)[1] - bits, -units.EXPONENTS, units.EXPONENTS) * (top > 0) - units.EXPONENTS * (top == 0)
    limit = (1 << bits) - 1
    return np.clip(np.rint(credits * power(-e)), -limit, limit).astype(np.int64), e


class Trial(Reading):
    """A window that is read once, and the credits of its units. rows {(name, layer): (int64 [positions, units], int64
    [positions, 1])}: credits as int8 and their exponents; errors int64 [positions, VOCAB_SIZE]: those of the head."""

    def read(self, window, seed, weight=units.FULL, counted=True):
        """int: the loss of a window int [WINDOW] with this seed. weight: of its errors, in 7ths; counted bool
        [positions]: which of them count."""
        cfg, T, before = self.cfg, self.cfg.SEQ_LEN, self.cfg.STATE_TOKENS
        if before:
            self.hidden(window[:before])
        self.tokens, drawn = window[before:before + T], window[before + T + 1:]
        targets = np.column_stack([window[before + 1:before + T + 1], drawn.reshape(T, -1)])
        seen, self.see = {}, lambda layer, name, values: seen.update({name: values})
        losses = self.losses(self.tokens, targets)
        self.kept["normed_f", 0] = seen["LN_F"]
        weights = weight * (np.zeros(T, np.int64) + counted)[:, None]
        self.errors = self.head_errors(seen["Logits"], targets, seed, weights)
        self.rows = {}
        head = self.stored(self.tensors["head" if cfg.MODEL == "gru" else "embedding", 0])
        c = self.through_norm([(times(self.errors, head.T), f32(1))], "ln_f", 0, "normed_f")
        (self.down_recurrent if cfg.MODEL == "gru" else self.down_transformer)(c)
        return sum(losses)

    def head_errors(self, z, targets, seed, weight):
        """int64 [positions, VOCAB_SIZE]: 127 times what is wanted less the softmax, times weight / 7, rounded down
        after a dither; 0 where a logit is at its limit and cannot follow."""
        exp, V = integer_tables.exp_table(self.cfg).astype(np.int64), self.cfg.VOCAB_SIZE
        w = exp[np.minimum(len(exp) - 1, z.max(1, keepdims=True) - z)]
        share = w * ((127 << 48) // w.sum(1, keepdims=True)) >> 32
        wanted = (targets[:, :, None] == np.arange(V)).sum(1) * (127 << 16) // targets.shape[1]
        dither = steps.hash32(seed & 0xFFFFFFFF, np.arange(rules.DITHER_STREAM, rules.DITHER_STREAM + len(z)))
        random = dither.astype(np.int64)[:, None] + 40503 * np.arange(V) & 0xFFFF
        errors = ((wanted - share) * weight // 7 + random) >> 16
        stuck = (np.abs(z) == 127) & (np.sign(z) == np.sign(errors)) & (self.cfg.MODEL == "gru")
        return np.where(stuck, 0, errors)

    def through_norm(self, parts, norm, layer, outputs):
        """float32 [positions, HIDDEN_DIM]: the credits below a norm, from those of its outputs, the sum of `parts`:
        whole numbers times float32 [positions, 1]. What makes a row only longer is worth nothing, as the norm takes it
        out."""
        n = self.kept[outputs, layer]
        c, along = (functools.reduce(np.add, [f32(x) * scale for x, scale in of])
                    for of in (parts, [((x * n).sum(1, keepdims=True), scale) for x, scale in parts]))
        c = c - along / f32(np.maximum(1, (n * n).sum(1, keepdims=True))) * f32(n)
        return c * (f32(self.vector(norm, layer)) / f32(self.kept[norm, layer]))

    def row(self, name, layer, credits):
        """Notes the credits of units, float32 [positions, units]."""
        self.rows[name, layer] = with_exponent(credits, units.ROW_BITS)

    def handed(self, name, layer, matrix, shift=0, divisor=1):
        """(int64 [positions, inputs], float32 [positions, 1]): what credits hand down through a matrix, whole numbers
        and their scale, with 2^-shift and a divisor."""
        whole, e = self.rows[name, layer]
        return (times(whole, self.stored(self.tensors[matrix, layer]).T), power(e - shift) * (f32(1) / f32(divisor)))

    def through_mlp(self, c, layer, first, weights, norm, kept, up_shift, down_shift, up_divisor=1, down_divisor=1):
        """The credits below an MLP, from those of its sum with the residual stream. first: what its credits' names
        begin with; shifts and divisors: of its products."""
        trials = units.trial_tables(self.cfg)[1].astype(np.int64)[self.kept["before" + kept, layer] & 255]
        self.row(first + "down", layer, c)
        inner, scale = self.handed(first + "down", layer, weights + "down", down_shift + 3, down_divisor)
        self.row(first + "up", layer, f32(inner) * scale * f32(trials))
        below = [self.handed(first + "up", layer, weights + "up", up_shift, up_divisor)]
        return c + self.through_norm(below, norm, layer, "normed" + (kept or "_2"))

    def down_transformer(self, c):
        cfg, kept = self.cfg, self.kept
        shifts = cfg.SHIFT_MLP_UP, cfg.SHIFT_MLP_DOWN
        for layer in reversed(range(cfg.N_LAYERS)):
            c = self.through_mlp(c * kept["scale_down", layer], layer, "", "w_", "ln_2", "", *shifts)
            c = c * kept["scale_output", layer]
            self.row("output", layer, c)
            read, scale = self.handed("output", layer, "w_o", cfg.SHIFT_OUT)
            self.through_attention(f32(read) * scale, layer)
            below = [self.handed(name, layer, "w_" + name[0]) for name in ("query", "key", "value")]
            c = c + self.through_norm(below, "ln_1", layer, "normed_1")
        c = self.through_mlp(c * kept["scale_down_0", 0], 0, "first_", "w_emb_mlp_", "ln_init", "_0", *shifts)
        self.row("embedding", 0, c)

    def through_attention(self, c, layer):
        """Notes the credits of queries, keys and values, from those of what is read, float32 [positions, H]."""
        cfg, kept = self.cfg, self.kept
        q, k, v, y = (kept[name, layer] for name in ("query", "key", "value", "attended"))
        of_query, of_key, of_value = (np.zeros(c.shape, np.float32) for _ in range(3))
        scaled = f32(1) / f32(cfg.SOFTMAX_EXP_SCALE)
        for number, head in enumerate(np.split(np.arange(cfg.HIDDEN_DIM), cfg.N_HEADS)):
            share = kept["shares", layer][number]
            whole, e = with_exponent(c[:, head], units.WINDOW_BITS, (0, 1))
            # a score tried alone: more of one position, less of what is read now
            worth = times(whole, v[:, head].T) - (whole * y[:, head]).sum(1, keepdims=True)
            trial, e_trial = with_exponent(f32(worth) * f32(share), units.WINDOW_BITS, (0, 1))
            unit = power(e + e_trial - 12 - cfg.SHIFT_ATTN)
            of_query[:, head] = f32(self.turned_back(times(trial, k[:, head]))) * unit * scaled
            of_key[:, head] = f32(self.turned_back(times(trial.T, q[:, head]))) * unit * scaled
            of_value[:, head] = f32(times(share.T, whole)) * power(e - 12)
        for name, credits in ("query", of_query), ("key", of_key), ("value", of_value):
            self.row(name, layer, credits * kept["scale_" + name, layer])

    def turned_back(self, x):
        """The rotation of a head by the opposite angle."""
        even, odd = np.moveaxis(x.reshape(len(x), -1, 2), -1, 0)
        cos, sin = np.moveaxis(integer_tables.rope_table(self.cfg, len(x)).astype(np.int64), -1, 0)
        turned = np.stack([even * cos + odd * sin, odd * cos - even * sin], -1)
        return wrap((turned + (1 << self.cfg.ROPE_SCALE_BIT - 1) >> self.cfg.ROPE_SCALE_BIT).reshape(x.shape))

    def down_recurrent(self, c):
        cfg, kept, trials = self.cfg, self.kept, units.trial_tables(self.cfg)[0].astype(np.int64)
        narrow, wide = (parameters.divisor(cfg, n * cfg.HIDDEN_DIM) for n in (1, 4))
        for layer in reversed(range(cfg.N_LAYERS)):
            c = self.through_mlp(c, layer, "", "w_", "ln_2", "", 0, 0, narrow, wide)
            h, f, new = (kept[name, layer] for name in ("state", "gate", "candidate"))
            worth, of_state = np.zeros(cfg.HIDDEN_DIM, np.float32), np.zeros_like(c)
            for t in reversed(range(len(c))):
                of_state[t] = worth = c[t] + worth
                worth = worth * (f32(256 - f[t]) * f32(1 / 256)) * f32(self.tokens[t] != 0)
            self.row("gate", layer, of_state * f32((new - h) * trials[f - 127 & 255]) * f32(2 ** -11))
            self.row("candidate", layer, of_state * f32(f * trials[new & 255]) * f32(2 ** -11))
            below = [self.handed("gate", layer, "w_f", 0, narrow), self.handed("candidate", layer, "w_h", 0, narrow)]
            c = c + self.through_norm(below, "ln_1", layer, "normed_1")
        self.row("embedding", 0, c)


def votes_of_windows(cfg, state, windows, first, weights=None, counted=None):
    """({tensor: int64 votes}, int): the votes of a chunk and its loss, of windows int [n, WINDOW], the first of which
    has number `first` in the step. weights int [n], counted bool [n, SEQ_LEN]: see Trial.read."""
    weights = np.full(len(windows), units.FULL) if weights is None else weights
    counted = np.ones((len(windows), cfg.SEQ_LEN), bool) if counted is None else counted
    trials = [Trial(cfg, state) for _ in windows]
    loss = sum(trial.read(window, state.seed + first + number, int(weights[number]), counted[number])
               for number, (trial, window) in enumerate(zip(trials, windows)))
    matrices, biases, embedding = units.votes(cfg)
    votes = {t: np.zeros((t.rows, t.cols) if t.matrix else t.cols, np.int64) for t in parameters.tensors(cfg)}
    top, operands = {}, {None: [trial.errors for trial in trials]}
    for name in trials[0].rows if trials else ():
        rows = [trial.rows[name] for trial in trials]
        exponents = np.concatenate([e[np.abs(whole).max(1) > 0].ravel() for whole, e in rows]).astype(np.int64)
        top[name] = units.loudest(np.bincount(exponents + units.EXPONENTS, minlength=2 * units.EXPONENTS + 1))
        # the exponent of all rows of the chunk
        operands[name] = [np.clip(np.rint(f32(whole) * power(e - top[name])), -127, 127).astype(np.int64)
                          for whole, e in rows]
    for number, trial in enumerate(trials):
        for tensor, name, inputs in matrices:
            layer = tensor.layer
            votes[tensor] += times(trial.kept[inputs, layer].T, operands[name][number])
        for tensor, name in biases:
            votes[tensor] += operands[name][number].sum(0)
        table = operands["embedding", 0][number]
        if embedding.product:                                # tied: as a table and as the head in one unit
            table = np.rint(f32(table) * power(np.clip(top["embedding", 0], *units.TABLE_SHIFTS))).astype(np.int64)
        np.add.at(votes[embedding].T, trial.tokens, table)
    return votes, loss
