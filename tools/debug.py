"""Inside one member: a plain reading of the SPEC in NumPy, and statistics of what it computes and of the weights.

The tests hold the engines against `Reading`, so it takes nothing from `model.rules`: hash, noise, factor, norms and
products are written here once more, from the SPEC, the slow and obvious way. DEBUG=1 prints what it sees, with the
names, columns and colours of d-eggs.
"""

import json

import numpy as np

from model import integer_tables, parameters, rules, transforms
from egg_config import EggError, explained

EVERY = 10                 # steps between two reports
POSITION = 32              # of the window, at which activations are looked at; the last one of a shorter window
SATURATED = 126            # a value of this size or more counts as saturated


# --- a plain reading of the SPEC -------------------------------------------------------------------------------------

def wrap(x):
    """int64 values as int32 would hold them."""
    return (np.asarray(x, np.int64) + 2 ** 31) % 2 ** 32 - 2 ** 31


def truncated(f):
    """int64: float32 values truncated, saturating at int32."""
    return np.clip(np.trunc(f.astype(np.float64)), -2 ** 31, 2 ** 31 - 1).astype(np.int64)


def hashes(seed, index):
    """uint32: the hash of SPEC 2 over an array of indices."""
    with np.errstate(over="ignore"):
        x = np.uint32(seed & 0xFFFFFFFF) + np.atleast_1d(index).astype(np.uint32) * np.uint32(0x9E3779B9)
        x = (x ^ x >> np.uint32(16)) * np.uint32(0x85EBCA6B)
        x = (x ^ x >> np.uint32(13)) * np.uint32(0xC2B2AE35)
        return x ^ x >> np.uint32(16)


def drawn(r, mask, gaussian):
    """int64: the noise of SPEC 2 from an array of hashes."""
    def u(a, b):
        sign = np.where(r >> np.uint32(a) & np.uint32(1), 1, -1)
        return sign * (r >> np.uint32(b) & np.uint32(mask)).astype(np.int64)
    return u(0, 1) + u(5, 6) + u(10, 11) if gaussian else u(0, 1)


class Reading:
    """SPEC 4, 5, 7 for one member of a State: sign +1 or -1, or 0 for the unperturbed model; int64 throughout. After
    every part comes see(layer, name, int64 [positions, width]), after attention see(layer, "Weights", [[int64
    [context]] of every position] of every head)."""

    def __init__(self, cfg, state, see=lambda *_: None):
        self.cfg, self.state, self.see, self.noise_shift = cfg, state, see, cfg.noise_shift(state.step)
        self.tensors = {(t.name, t.layer): t for t in parameters.tensors(cfg)}

    def noise(self, seed, index):
        return drawn(hashes(seed, index), self.cfg.DEVICE_MASK, self.cfg.DEVICE_GAUSSIAN)

    def factor(self, at, seed, index):
        overlay = self.state.overlay[at + np.asarray(index)].astype(np.float32)
        if self.cfg.ADAPTIVE_NOISE_MODE < 2:
            return np.clip(overlay, 0, 64) / np.float32(64) if self.cfg.ADAPTIVE_NOISE_MODE else np.ones_like(overlay)
        tail = (hashes(seed + 100000, index).astype(np.float32) + np.float32(1)) / np.float32(4294967296)
        return (overlay + np.float32(127)) / np.float32(255) / np.sqrt(tail)

    def matrix(self, t):
        return parameters.from_canonical(self.state.weights[t.weights:t.weights + t.size], t.rows,
                                         t.cols).astype(np.int64)

    def vector(self, name, layer, seed, sign):
        t = self.tensors[name, layer]
        i, v = np.arange(t.cols), self.state.weights[t.weights:t.weights + t.cols].astype(np.int64)
        if not sign:
            return v
        p = (self.noise(seed + t.seed_a, i) * self.noise(seed + t.seed_b, i)).astype(np.float32)
        return v + (truncated(p * self.factor(t.overlay_a, seed + t.seed_a, i)) * sign >> self.cfg.SIGMA_SHIFT_VECTOR)

    def product(self, name, layer, seed, sign, x, down=False):
        t = self.tensors[name, layer]
        y = (x.astype(np.float64) @ self.matrix(t)).astype(np.int64)          # exact: sums are far below 2^53
        if not sign:
            return y
        rows, cols, H = np.arange(t.rows), np.arange(t.cols), self.cfg.HIDDEN_DIM
        xn = (x * self.noise(seed + t.seed_b, rows)).astype(np.float32)
        f = self.factor(t.overlay_b, seed + t.seed_b, rows)
        if down:
            p = np.zeros((len(x), H), np.int64)
            for sub in range(4):
                part = slice(sub * H, sub * H + H)
                # in float64 the product is exact and the sum is rounded once more only where modes 0 and 1 cannot get
                p = truncated((p + xn[:, part].astype(np.float64) * f[part]).astype(np.float32))
            sb = wrap(p.sum(1))
        else:
            sb = wrap(truncated(xn * f).sum(1))
        noise = self.noise(seed + t.seed_a, cols).astype(np.float32)
        a = truncated(noise * self.factor(t.overlay_a, seed + t.seed_a, cols))
        return wrap(y + (wrap(wrap(sb[:, None] * a) * sign) >> self.noise_shift))

    def layer_norm(self, h, name, layer, seed, sign):
        w, b = (self.vector(part, layer, seed, sign) for part in (name, name + "_bias"))
        p, mean = wrap(h * w), np.maximum(1, np.abs(h).sum(1) // self.cfg.HIDDEN_DIM)[:, None]
        return np.clip(wrap(np.sign(p) * (np.abs(p) // mean) + b), -127, 127)

    def amax(self, v):
        y = v.astype(np.float32) * (np.float32(127) / (np.abs(v).max(1).astype(np.float32)[:, None] + np.float32(1e-9)))
        whole = np.trunc(y)
        return np.clip(whole + np.where(np.abs(y - whole) >= 0.5, np.sign(y), 0), -127, 127).astype(np.int64)

    def mlp(self, h, layer, seed, sign, norm, up, up_bias, down, down_bias, names):
        cfg = self.cfg
        n = self.layer_norm(h, norm, layer, seed, sign)
        u = (self.product(up, layer, seed, sign, n) >> cfg.SHIFT_MLP_UP) + self.vector(up_bias, layer, seed, sign)
        u = integer_tables.gelu_table().astype(np.int64)[np.clip(u, -127, 127) & 255]
        down = self.product(down, layer, seed, sign, u, down=True) >> cfg.SHIFT_MLP_DOWN
        h = self.amax(wrap(h + down + self.vector(down_bias, layer, seed, sign)))
        for name, values in zip(names, (n, u, h)):
            self.see(layer, name, values)
        return h

    def rotate(self, y, rope):
        cfg = self.cfg
        e, o = np.moveaxis(y.reshape(len(y), -1, cfg.HEAD_DIM // 2, 2), -1, 0)
        cos, sin = np.moveaxis(rope[:, None], -1, 0)
        half = 1 << cfg.ROPE_SCALE_BIT - 1
        turned = np.stack([(e * cos - o * sin + half) >> cfg.ROPE_SCALE_BIT,
                           (e * sin + o * cos + half) >> cfg.ROPE_SCALE_BIT], -1)
        return wrap(turned.reshape(y.shape))

    def attend(self, q, k, v, layer=0):
        cfg, exp, a = self.cfg, integer_tables.exp_table(self.cfg).astype(np.int64), np.zeros_like(q)
        seen = []
        for head in range(cfg.N_HEADS):
            part = slice(head * cfg.HEAD_DIM, (head + 1) * cfg.HEAD_DIM)
            scores = q[:, part] @ k[:, part].T >> cfg.SHIFT_ATTN
            down = [scores[t, :t + 1].max() - scores[t, :t + 1] for t in range(len(q))]
            seen.append([exp[np.minimum(len(exp) - 1, distance)] for distance in down])
            for t, w in enumerate(seen[-1]):
                total = (w[:, None] * v[:t + 1, part]).sum(0)
                a[t, part] = np.clip(np.sign(total) * (np.abs(total) // w.sum()), -127, 127)
        self.see(layer, "Weights", seen)
        return a

    def look_up(self, name, columns, seed, sign):
        """int64 [positions, HIDDEN_DIM]: columns of an embedding."""
        t, hidden = self.tensors[name, 0], np.arange(self.cfg.HIDDEN_DIM)
        e = self.matrix(t)[:, columns].T
        if not sign:
            return e
        p = (self.noise(seed + t.seed_a, columns)[:, None] * self.noise(seed + t.seed_b, hidden)).astype(np.float32)
        p = p * self.factor(t.overlay_a, seed + t.seed_a, columns)[:, None]
        p = p * self.factor(t.overlay_b, seed + t.seed_b, hidden)
        return e + (truncated(p) * sign >> self.noise_shift)

    def coefficients(self, tokens):
        """int64 [positions]: the transform's coefficient of each position; only a whole window can see its targets."""
        T, p = self.cfg.SEQ_LEN, transforms.PRIME[self.cfg.NTT_MODE]
        basis = transforms.basis(self.cfg, self.cfg.NTT_CAUSAL or len(tokens) != T)
        blocks = np.zeros((-(-len(tokens) // T), T), np.int64)
        blocks.ravel()[:len(tokens)] = tokens
        c = (blocks @ basis.T).ravel()[:len(tokens)]
        return c % p if p else c

    def hidden(self, tokens, seed=0, sign=0):
        """int64 [positions, HIDDEN_DIM]: what the head reads."""
        cfg, e = self.cfg, self.look_up("embedding", np.asarray(tokens), seed, sign)
        if cfg.NTT_MODE:
            c = self.coefficients(tokens)
            e = e + sum(self.look_up(f"ntt_emb_{k + 1}", c >> 8 * k + 8 & 255, seed, sign) >> 2 for k in range(3))
        h = np.clip(e + self.vector("emb_bias", 0, seed, sign), -127, 127)
        self.see(-1, "Emb", h)
        h = self.mlp(h, 0, seed, sign, "ln_init", "w_emb_mlp_up", "mlp_emb_bias_up", "w_emb_mlp_down",
                     "mlp_emb_bias_down", ("LN_Init", "InitMLP_Exp", "InitMLP"))
        rope = integer_tables.rope_table(cfg, len(tokens)).astype(np.int64)
        for layer in range(cfg.N_LAYERS):
            n = self.layer_norm(h, "ln_1", layer, seed, sign)
            self.see(layer, "LN1", n)
            q, k, v = (self.product(name, layer, seed, sign, n) for name in ("w_q", "w_k", "w_v"))
            a = self.attend(self.amax(self.rotate(q, rope)), self.amax(self.rotate(k, rope)), self.amax(v), layer)
            h = self.amax(wrap(h + (self.product("w_o", layer, seed, sign, a) >> cfg.SHIFT_OUT)))
            self.see(layer, "Attn", h)
            h = self.mlp(h, layer, seed, sign, "ln_2", "w_up", "mlp_bias_up", "w_down", "mlp_bias_down",
                         ("LN2", "MLP_Exp", "MLP"))
        n = self.layer_norm(h, "ln_f", 0, seed, sign)
        self.see(-1, "LN_F", n)
        return n

    def logits(self, tokens, seed=0, sign=0):
        """int64 [positions, VOCAB_SIZE]."""
        return self.product("embedding", 0, seed, sign, self.hidden(tokens, seed, sign)) >> self.cfg.SHIFT_LOGIT


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
    with "head" and `attention_statistics`; layer -1 is what stands outside the layers. Raises EggError."""
    if cfg.MODEL != "transformer":
        raise EggError("debug reads the transformer alone: there are no such statistics of the recurrent model")
    window = rules.windows(cfg, tokens, state.step, 0, 1)[0]
    position, parts = min(POSITION, cfg.SEQ_LEN - 1), []

    def see(layer, name, values):
        if name == "Weights":
            parts.extend({"layer": layer, "name": "Attn", "head": head, **attention_statistics(seen[position])}
                         for head, seen in enumerate(values))
        else:
            parts.append({"layer": layer, "name": name, **statistics(values[position])})

    Reading(cfg, state, see).hidden(window[:position + 1], state.seed, 1)
    weights = [{"layer": t.layer if t.per_layer else -1, "name": t.name,
                **statistics(state.weights[t.weights:t.weights + t.size])} for t in parameters.tensors(cfg)]
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
