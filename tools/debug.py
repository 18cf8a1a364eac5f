"""Inside one member: a plain reading of the SPEC in NumPy, and statistics of what it computes and of the weights.

The tests hold the engines against `Reading`, so of `model` it takes only hash and draw: factors, norms and
products are written here once more, from the SPEC, the slow and obvious way. DEBUG=1 prints what it sees, with the
names, columns and colours of d-eggs.
"""

import json

import numpy as np

from model import integer_tables, parameters, rules, seeds, transforms
from egg_config import EggError, explained

EVERY = 10                 # steps between two reports
POSITION = 32              # of the window, at which activations are looked at; the last one of a shorter window
SATURATED = 126            # a value of this size or more counts as saturated


# --- a plain reading of the SPEC -------------------------------------------------------------------------------------

def wrap(x):
    """int64 values as int32 would hold them."""
    return (x + 2 ** 31) % 2 ** 32 - 2 ** 31


def truncated(f):
    """int64: float32 values truncated, saturating at int32."""
    return np.clip(np.trunc(f.astype(np.float64)), -2 ** 31, 2 ** 31 - 1).astype(np.int64)


def clip(x):
    return np.clip(x, -127, 127)


class Reading:
    """SPEC 4, 5, 7 and 13 for one member of a State: seed of its pair, sign +1 or -1, or 0 for the unperturbed model;
    int64 throughout. After every part comes see(layer, name, int64 [positions, width]), after attention see(layer,
    "Weights", [[int64 [context]] of every position] of every head). carried int64 [layers, HIDDEN_DIM]: the state with
    which the recurrent model begins; it goes on."""

    def __init__(self, cfg, state, seed=0, sign=0, see=lambda *_: None):
        self.cfg, self.state, self.seed, self.sign, self.see = cfg, state, seed, sign, see
        self.tensors = {(t.name, t.layer): t for t in parameters.tensors(cfg)}
        self.shift, self.carried = cfg.noise_shift(state.step), np.zeros((cfg.N_LAYERS, cfg.HIDDEN_DIM), np.int64)

    def show(self, layer, name, values):
        self.see(layer, name, values)
        return values

    def noise(self, stream, index):
        draws = seeds.hash32(self.seed + stream, index)
        return rules.uniform_noise(draws, self.cfg.DEVICE_MASK, self.cfg.DEVICE_GAUSSIAN).astype(np.int64)

    def factor(self, at, stream, index):
        overlay = self.state.overlay[at + index].astype(np.float32)
        if self.cfg.ADAPTIVE_NOISE_MODE < 2:
            return np.clip(overlay, 0, 64) / np.float32(64) if self.cfg.ADAPTIVE_NOISE_MODE else np.ones_like(overlay)
        tail = seeds.hash32(self.seed + stream + 100000, index).astype(np.float32)
        return (overlay + np.float32(127)) / np.float32(255) / np.sqrt((tail + np.float32(1)) / np.float32(4294967296))

    def stored(self, t):
        flat = self.state.weights[t.span]
        return (parameters.from_canonical(flat, t.rows, t.cols) if t.matrix else flat).astype(np.int64)

    def vector(self, name, layer=0):
        t = self.tensors[name, layer]
        i = np.arange(t.cols)
        p = (self.noise(t.seed_a, i) * self.noise(t.seed_b, i)).astype(np.float32)
        p = truncated(p * self.factor(t.overlay_a, t.seed_a, i))
        v = self.stored(t) + (p * self.sign >> self.cfg.SIGMA_SHIFT_VECTOR)
        return clip(v) if self.cfg.MODEL == "gru" else v

    def product(self, name, layer, x, fold=False):
        """x [positions, inputs] times a matrix. fold: four inputs of noise share a running integer."""
        t = self.tensors[name, layer]
        y = (x.astype(np.float64) @ self.stored(t)).astype(np.int64)          # exact: sums are far below 2^53
        if not self.sign:
            return y
        rows, cols = np.arange(t.rows), np.arange(t.cols)
        xn, p = (x * self.noise(t.seed_b, rows)).astype(np.float32), 0
        f = self.factor(t.overlay_b, t.seed_b, rows)
        for part in np.split(rows, 4) if fold else [rows]:
            # in float64 the product is exact and the sum is rounded once more only where modes 0 and 1 cannot get
            p = truncated((p + xn[:, part].astype(np.float64) * f[part]).astype(np.float32))
        a = truncated(self.noise(t.seed_a, cols).astype(np.float32) * self.factor(t.overlay_a, t.seed_a, cols))
        return wrap(y + (wrap(wrap(wrap(p.sum(1))[:, None] * a) * self.sign) >> self.shift))

    def look_up(self, name, columns):
        """int64 [positions, HIDDEN_DIM]: columns of an embedding."""
        t, hidden = self.tensors[name, 0], np.arange(self.cfg.HIDDEN_DIM)
        p = (self.noise(t.seed_a, columns)[:, None] * self.noise(t.seed_b, hidden)).astype(np.float32)
        p = p * self.factor(t.overlay_a, t.seed_a, columns)[:, None] * self.factor(t.overlay_b, t.seed_b, hidden)
        return self.stored(t)[:, columns].T + (truncated(p) * self.sign >> self.shift)

    def mean_size(self, x):
        return np.maximum(1, np.abs(x).sum(1) // self.cfg.HIDDEN_DIM)[:, None]

    def hidden(self, tokens):
        """int64 [positions, HIDDEN_DIM]: what the head reads."""
        tokens = np.asarray(tokens, np.int64)
        return self.recurrent(tokens) if self.cfg.MODEL == "gru" else self.transformer(tokens)

    def logits(self, tokens):
        """int64 [positions, VOCAB_SIZE]."""
        x = self.hidden(tokens)
        return self.quotient("head", 0, x) if self.cfg.MODEL == "gru" else \
            self.product("embedding", 0, x) >> self.cfg.SHIFT_LOGIT

    # the transformer

    def layer_norm(self, h, name, layer=0):
        p = wrap(h * self.vector(name, layer))
        return clip(wrap(np.sign(p) * (np.abs(p) // self.mean_size(h)) + self.vector(name + "_bias", layer)))

    def amax(self, v):
        y = v.astype(np.float32) * (np.float32(127) / (np.abs(v).max(1).astype(np.float32)[:, None] + np.float32(1e-9)))
        whole = np.trunc(y)
        return clip(whole + np.where(np.abs(y - whole) >= 0.5, np.sign(y), 0)).astype(np.int64)

    def mlp(self, h, layer, norm, up, up_bias, down, down_bias, names):
        n = self.show(layer, names[0], self.layer_norm(h, norm, layer))
        u = (self.product(up, layer, n) >> self.cfg.SHIFT_MLP_UP) + self.vector(up_bias, layer)
        u = self.show(layer, names[1], integer_tables.gelu_table().astype(np.int64)[clip(u) & 255])
        y = self.product(down, layer, u, fold=True) >> self.cfg.SHIFT_MLP_DOWN
        return self.show(layer, names[2], self.amax(wrap(h + y + self.vector(down_bias, layer))))

    def rotate(self, y, rope):
        bit = self.cfg.ROPE_SCALE_BIT
        e, o = np.moveaxis(y.reshape(len(y), -1, self.cfg.HEAD_DIM // 2, 2), -1, 0)
        cos, sin = np.moveaxis(rope[:, None], -1, 0)
        turned = np.stack([e * cos - o * sin, e * sin + o * cos], -1) + (1 << bit - 1) >> bit
        return wrap(turned.reshape(y.shape))

    def attend(self, q, k, v, layer):
        cfg, exp, a, seen = self.cfg, integer_tables.exp_table(self.cfg).astype(np.int64), np.zeros_like(q), []
        for part in np.split(np.arange(cfg.HIDDEN_DIM), cfg.N_HEADS):
            scores = q[:, part] @ k[:, part].T >> cfg.SHIFT_ATTN
            down = [scores[t, :t + 1].max() - scores[t, :t + 1] for t in range(len(q))]
            seen.append([exp[np.minimum(len(exp) - 1, distance)] for distance in down])
            for t, w in enumerate(seen[-1]):
                total = (w[:, None] * v[:t + 1, part]).sum(0)
                a[t, part] = clip(np.sign(total) * (np.abs(total) // w.sum()))
        self.see(layer, "Weights", seen)
        return a

    def coefficients(self, tokens):
        """int64 [positions]: the transform's coefficient of each position; only a whole window can see its targets."""
        T, p = self.cfg.SEQ_LEN, transforms.PRIME[self.cfg.NTT_MODE]
        basis = transforms.basis(self.cfg, self.cfg.NTT_CAUSAL or len(tokens) != T)
        blocks = np.zeros((-(-len(tokens) // T), T), np.int64)
        blocks.ravel()[:len(tokens)] = tokens
        c = (blocks @ basis.T).ravel()[:len(tokens)]
        return c % p if p else c

    def transformer(self, tokens):
        cfg, e = self.cfg, self.look_up("embedding", tokens)
        if cfg.NTT_MODE:
            c = self.coefficients(tokens)
            e = e + sum(self.look_up(f"ntt_emb_{k + 1}", c >> 8 * k + 8 & 255) >> 2 for k in range(3))
        h = self.show(-1, "Emb", clip(e + self.vector("emb_bias")))
        h = self.mlp(h, 0, "ln_init", "w_emb_mlp_up", "mlp_emb_bias_up", "w_emb_mlp_down", "mlp_emb_bias_down",
                     ("LN_Init", "InitMLP_Exp", "InitMLP"))
        rope = integer_tables.rope_table(cfg, len(tokens)).astype(np.int64)
        for layer in range(cfg.N_LAYERS):
            n = self.show(layer, "LN1", self.layer_norm(h, "ln_1", layer))
            q, k, v = (self.product(name, layer, n) for name in ("w_q", "w_k", "w_v"))
            a = self.attend(self.amax(self.rotate(q, rope)), self.amax(self.rotate(k, rope)), self.amax(v), layer)
            h = self.show(layer, "Attn", self.amax(wrap(h + (self.product("w_o", layer, a) >> cfg.SHIFT_OUT))))
            h = self.mlp(h, layer, "ln_2", "w_up", "mlp_bias_up", "w_down", "mlp_bias_down", ("LN2", "MLP_Exp", "MLP"))
        return self.show(-1, "LN_F", self.layer_norm(h, "ln_f"))

    # the recurrent model

    def quotient(self, name, layer, x):
        return clip(self.product(name, layer, x) // parameters.divisor(self.cfg, x.shape[1]))

    def norm(self, name, layer, x):
        return clip(x * self.vector(name, layer) // self.mean_size(x))

    def recurrent(self, tokens):
        x = self.show(-1, "Emb", clip(self.look_up("embedding", tokens)))
        for layer, h in enumerate(self.carried):
            n, states = self.show(layer, "LN1", self.norm("ln_1", layer, x)), []
            gates, candidates = self.quotient("w_f", layer, n), self.quotient("w_h", layer, n)
            bias_f, bias_h = self.vector("b_f", layer), self.vector("b_h", layer)
            for t, token in enumerate(tokens):
                h = h * (token != 0)                         # token 0 begins a text
                f = clip(gates[t] + self.quotient("u_f", layer, h[None])[0] + bias_f) + 127
                c = clip(candidates[t] + self.quotient("u_h", layer, (f * h >> 8)[None])[0] + bias_h)
                h = h + (f * (c - h) >> 8)
                states.append(h)
            self.carried[layer] = h
            x = self.show(layer, "GRU", clip(x + self.show(layer, "State", np.reshape(states, x.shape))))
            u = self.quotient("w_up", layer, self.show(layer, "LN2", self.norm("ln_2", layer, x)))
            u = self.show(layer, "MLP_Exp", np.maximum(u, 0) if self.cfg.MLP_RELU else u)
            x = self.show(layer, "MLP", clip(x + self.quotient("w_down", layer, u)))
        return self.show(-1, "LN_F", self.norm("ln_f", 0, x))


# --- statistics ------------------------------------------------------------------------------------------------------

def statistics(values):
    """Of int8 values: mean, standard deviation, entropy in bits, shares of saturated and of zero values, range."""
    values = np.asarray(values, np.int64).ravel()
    share = np.bincount(values + 128, minlength=256) / values.size
    held = share[share > 0]
    return {"mean": float(values.mean()), "std": float(values.std()),
            "entropy": float(-(held * np.log2(held)).sum() + 0.0),
            "saturated": float((np.abs(values) >= SATURATED).mean()), "zero": float((values == 0).mean()),
            "low": int(values.min()), "high": int(values.max())}


def attention_statistics(weights):
    """Of the weights of one query (int64 [context]): entropy in bits, largest share and weight, sum, their number."""
    share = weights[weights > 0] / weights.sum()
    return {"entropy": float(-(share * np.log2(share)).sum() + 0.0), "peak": float(share.max()),
            "largest": int(weights.max()), "sum": int(weights.sum()), "context": int(share.size)}


def trace(cfg, state, tokens):
    """A dict for JSON: statistics of member 0 of the state's step at one position of its window, and of every weight
    array. tokens: the training data. parts: in the order of the forward pass, {"layer", "name"} with `statistics`, or
    with "head" and `attention_statistics`; layer -1 is what stands outside the layers."""
    before, window = np.split(rules.windows(cfg, tokens, state.step, 0, 1)[0], [cfg.STATE_TOKENS])
    position, parts = min(POSITION, cfg.SEQ_LEN - 1), []

    def see(layer, name, values):
        if name == "Weights":
            parts.extend({"layer": layer, "name": "Attn", "head": head, **attention_statistics(seen[position])}
                         for head, seen in enumerate(values))
        else:
            parts.append({"layer": layer, "name": name, **statistics(values[position])})

    clean, member = Reading(cfg, state), Reading(cfg, state, state.seed, 1, see)
    if cfg.STATE_TOKENS:
        clean.hidden(before)
        member.carried = clean.carried
    member.hidden(window[:position + 1])
    weights = [{"layer": t.layer if t.per_layer else -1, "name": t.name,
                **statistics(state.weights[t.span])} for t in parameters.tensors(cfg)]
    return {"step": state.step, "member": 0, "position": position, "parts": parts, "weights": weights}


# --- for people and for programs -------------------------------------------------------------------------------------

def describe(told, colour):
    """[str]: the lines of a trace; colour(text, name) paints."""
    lines, step, position = [], told["step"], told["position"]
    for part in told["parts"]:
        if "head" not in part:
            lines.append(_line(f"[S{step:5d} L{part['layer']:2d} T{position:3d}] ", part, colour))
            continue
        possible = np.log2(part["context"]) if part["context"] > 1 else np.inf
        head = colour(f"[S{step:5d} L{part['layer']:2d} T{position:3d} H{part['head']}] ", "grey")
        lines.append(head + colour(f"{'Attn':14}", "yellow") + ": " + _entropy(part["entropy"], possible, colour)
                     + "MaxW:" + colour(f"{part['largest']:6d}", "cyan") + " SumW:"
                     + colour(f"{part['sum']:8d}", "green") + " Ctx:" + colour(f"{part['context']:4d}", "bold"))
    lines += [_line(f"[S{step:5d} L{part['layer']:2d} Wght] ", part, colour) for part in told["weights"]]
    return lines


def _line(head, s, colour):
    saturated, zero = (int(100 * s[share] + 1e-9) for share in ("saturated", "zero"))
    return (colour(head, "grey") + colour(f"{s['name']:14}", "white") + ": Mean:" + colour(f"{s['mean']:5.1f}", "bold")
            + " Std:" + colour(f"{s['std']:4.1f}", "bold") + " " + _entropy(s["entropy"], 8, colour)
            + colour(f"Sat:{saturated:3d}%", "red" if saturated > 10 else "yellow" if saturated else "grey") + " "
            + colour(f"Zero:{zero:3d}%", "blue" if zero > 50 else "cyan" if zero > 10 else "grey") + " "
            + colour(f"Range:[{s['low']:4d}..{s['high']:4d}]", "red" if max(-s["low"], s["high"]) >= 127 else "green"))


def _entropy(bits, possible, colour):
    return "Ent:" + colour(f"{bits:4.2f}", "magenta") + "(" + colour(f"{100 * bits / possible:3.0f}%", "magenta") + ") "


def report(cfg, engine, tokens, console, path=None):
    """Prints the trace of an engine's state, and appends it to the file `path` as a line of JSON. Raises EggError."""
    told = trace(cfg, engine.state(), tokens)
    for line in describe(told, console.colour):
        console.line(line)
    if path:
        with explained(EggError, path, "name a file for the trace that can be written"), open(path, "a") as file:
            file.write(json.dumps(told) + "\n")
