"""The whole method of egg in one file, with NumPy alone: a model of bytes learns to write, without derivatives.

    python examples/nano.py              # in egg's directory: learns from input.bin for a minute, then writes
    python examples/nano.py my.txt       # the same with any file of text

 1. The model is a recurrent network (a minGRU); its weights, and all it computes, are whole numbers from -127 to 127.
 2. A step reads some windows of the text, once: one forward pass.
 3. What followed less what was predicted is the error of every logit; it says where the logits should go.
 4. The credit of a value says what a little more of it is worth. Credits go down through the network:
 5. through a product with a matrix as a product with the transposed matrix;
 6. through a unit by a trial: how much more does it give, alone, at its value + 4 than at its value - 4?
 7. through the state as far as it is kept for later positions;
 8. through a norm by its factor; what only makes a row longer is worth nothing, because the norm takes it out.
 9. The credit of a unit times its inputs, summed over all positions, is a vote on each of its weights.
10. Large votes count as -1 or 1, others as 0. AdamW makes fractions of them; a weight moves by 1 when they reach 1.

The result is what back-propagation computes, with trials in place of derivatives, in integers, equal on every machine:
sums are of whole numbers, and what is float32 is rounded element by element. So every machine gets the same weights, in
every bit: those of `egg.py train --preset laptop-bytes` with the settings below (-D NAME=VALUE). docs/SPEC.md has every
rule.
"""

import math
import os
import signal
import sys
import time

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")         # products are small: threads would wait for each other
import numpy as np                                         # noqa: E402

SECONDS, VALIDATE_EVERY, VALIDATE_TOKENS = 60, 200, 32768
HIDDEN_DIM, SEQ_LEN = 64, 64                     # units; bytes of a window
CHUNK_SIZE = POPULATION_SIZE = 16                # windows of a step (1,024 positions; float32 adds votes of 1,040)
ADAPTIVE_THRESHOLD_ALPHA = 0.25                  # votes below this share of the mean vote do not count
VOTE_LEVELS = 7                                  # a digit is a vote in units of twice that, at most this
SOFTMAX_EXP_SCALE, SOFTMAX_SCALE_BIT = 12.0, 18  # logits in a nat; fractional bits of exponentials
# Powers of two: a product with them is exact, so that float32 rounds a product and a sum once, as egg does (a fused
# multiply-add). With other values nano learns as well, but some bits may differ.
LR_SCHEDULE = (0, 0.25), (800, 0.125), (1600, 0.0625), (2100, 0.03125)
ADAM_BETA1, ADAM_BETA2, ADAM_EPS, ADAM_WEIGHT_DECAY = 0.5, 0.99, 1e-8, 2 ** -12
SAMPLING_TEMP, SAMPLING_MIN_P, SAMPLING_PRESENCE_PENALTY = 0.6, 0.08, 0.2

T, H = SEQ_LEN, HIDDEN_DIM
TRIAL = 4                                        # by how much a unit is tried, up and down
# Every matrix: inputs, outputs, and the two parts of the model whose product votes on it; of each bias the credits
MATRICES = {"embedding": (H, 256, "of_embedding", "bytes"), "head": (H, 256, "normed_f", "errors"),
            "w_f": (H, H, "normed_1", "of_gate"), "u_f": (H, H, "before", "of_gate"),
            "w_h": (H, H, "normed_1", "of_candidate"), "u_h": (H, H, "gated", "of_candidate"),
            "w_up": (H, 4 * H, "normed_2", "of_up"), "w_down": (4 * H, H, "inner", "of_down")}
BIASES = {"b_f": "of_gate", "b_h": "of_candidate"}
EXP = np.exp(-np.arange(256) / SOFTMAX_EXP_SCALE) * 2 ** SOFTMAX_SCALE_BIT
EXP = np.where(EXP >= 1, np.rint(EXP), 0).astype(np.int64)           # of how far a logit is below the largest one
f32 = np.float32


def hashed(seed, i):
    """32 random bits for a seed and an index, int or int64 arrays: nobody has to store or send random numbers."""
    x = seed + i * 0x9E3779B9 & 0xFFFFFFFF
    x = (x ^ x >> 16) * 0x85EBCA6B & 0xFFFFFFFF
    x = (x ^ x >> 13) * 0xC2B2AE35 & 0xFFFFFFFF
    return x ^ x >> 16


def initial_weights():
    """{name: float32 array} of whole numbers: matrices are sums of three draws, biases begin at 0."""
    state, weights = 42, {}
    for name, (rows, cols, *_) in MATRICES.items():
        draws = np.empty(rows * cols, np.int64)
        for i in range(draws.size):              # xorshift32
            state ^= state << 13 & 0xFFFFFFFF
            state ^= state >> 17
            state ^= state << 5 & 0xFFFFFFFF
            draws[i] = state
        three = [(2 * (draws >> bit & 1) - 1) * (draws >> bit + 1 & 7) for bit in (0, 5, 10)]
        weights[name] = sum(three).reshape(rows, cols).astype(f32)
    return weights | {name: np.zeros(H, f32) for name in BIASES}


# --- forward: float32 has fast products, and holds its whole numbers exactly, as all sums are below 2^24 -------------
def clip(x):
    return np.clip(x, -127, 127)


def relu(x):
    return np.maximum(x, 0)


def divisor(matrix):
    """Of a product with a matrix, so that its results are about as large as its inputs."""
    return 16 * math.isqrt(len(matrix))


def product(x, matrix):
    return clip(np.floor(x @ matrix / divisor(matrix)))


def normed(x):
    """(a row with values of the size 16, the size that it had)."""
    size = np.maximum(1, np.floor(np.abs(x).sum(-1, keepdims=True) / H))
    return clip(np.floor(16 * x / size)), size


def forward(w, tokens, h=0):
    """{name: float32 [windows, positions, units]}: all parts of the model, for tokens [windows, positions]. h: the
    state before."""
    x = clip(w["embedding"].T[tokens])
    normed_1, size_1 = normed(x)
    gate, candidate = product(normed_1, w["w_f"]) + w["b_f"], product(normed_1, w["w_h"]) + w["b_h"]
    h = np.zeros_like(gate[:, 0]) + h
    before, gated, states = np.empty((3, *gate.shape), f32)
    for t in range(tokens.shape[1]):
        before[:, t] = h = h * (tokens[:, t, None] != 0)                   # byte 0 begins a text
        gate[:, t] = f = clip(gate[:, t] + product(h, w["u_f"])) + 127     # how much of the state is renewed, of 256
        gated[:, t] = past = np.floor(f * h / 256)
        candidate[:, t] = c = clip(candidate[:, t] + product(past, w["u_h"]))
        states[:, t] = h = h + np.floor(f * (c - h) / 256)
    x = clip(x + states)
    normed_2, size_2 = normed(x)
    inner = relu(up := product(normed_2, w["w_up"]))
    normed_f, size_f = normed(clip(x + product(inner, w["w_down"])))
    return dict(size_1=size_1, normed_1=normed_1, gate=gate, candidate=candidate, before=before, gated=gated,
                states=states, size_2=size_2, normed_2=normed_2, up=up, inner=inner, size_f=size_f, normed_f=normed_f,
                logits=product(normed_f, w["head"]))


def bits(z, followed):
    """The mean cross-entropy of logits, in bits per byte."""
    z = z / SOFTMAX_EXP_SCALE
    likely = np.take_along_axis(z, followed[..., None].astype(np.int64), -1)[..., 0]
    return float((np.log(np.exp(z).sum(-1)) - likely).mean(dtype=np.float64) / math.log(2))


# --- backward: errors, credits, votes --------------------------------------------------------------------------------
def errors_of_head(z, followed, seed):
    """float32 [windows, positions, 256]: 127 times what followed less what was predicted, rounded at random."""
    weight = EXP[(z.max(-1, keepdims=True) - z).astype(np.uint8)]
    predicted = weight * ((127 << 48) // weight.sum(-1, keepdims=True)) >> 32
    wanted = (followed[..., None] == np.arange(256)) * (127 << 16)
    dither = hashed(seed + np.arange(len(z))[:, None], (1 << 31) + np.arange(T))[..., None]
    random = dither + 40503 * np.arange(256) & 0xFFFF
    errors = wanted - predicted + random >> 16
    return np.where((np.abs(z) == 127) & (np.sign(z) == np.sign(errors)), 0, errors).astype(f32)   # it cannot follow


def power(e):
    return np.ldexp(f32(1), e)


def whole(credits):
    """(float32, int): credits as whole numbers of 7 bits, and of every position the power of two that they are in."""
    top = np.abs(credits).max(-1, keepdims=True)
    e = np.where(top > 0, np.clip(np.frexp(top)[1] - 7, -100, 100), -100)
    return clip(np.rint(credits * power(-e))), e


def handed(credits, matrix, width=1):
    """(whole numbers, their unit): credits that go down through a matrix. width: of the trials that come next."""
    number, e = credits
    return number @ matrix.T, power(e) / f32(width * divisor(matrix))


def through_norm(n, size, *parts):
    """The credits below a norm, from those of its outputs n: (whole numbers, unit) whose sum they are. What makes a row
    only longer is worth nothing."""
    c = sum(x * unit for x, unit in parts)
    along = sum(np.einsum("...u,...u", x, n, dtype=np.float64)[..., None].astype(f32) * unit for x, unit in parts)
    return (c - along / np.maximum(1, (n * n).sum(-1, keepdims=True)) * n) * (f32(16) / size)


def tried(unit, v):
    """How much more a unit gives a little above the value v than a little below it."""
    return unit(clip(v + TRIAL)) - unit(clip(v - TRIAL))


def credits_of(w, p, tokens):
    """{name: whole credits with their powers of two} of all units; p: parts of the forward pass, and the errors."""
    c = through_norm(p["normed_f"], p["size_f"], (p["errors"] @ w["head"].T, f32(1)))
    of_down = whole(c)
    down, unit = handed(of_down, w["w_down"], 2 * TRIAL)
    of_up = whole(down * unit * tried(relu, p["up"]))
    c = c + through_norm(p["normed_2"], p["size_2"], handed(of_up, w["w_up"]))
    f, h, new = p["gate"], p["before"], p["candidate"]
    of_state, later = np.empty_like(c), f32(0)
    for t in reversed(range(T)):                 # a state is worth what it does now, and what is left of it later
        of_state[:, t] = later = c[:, t] + later
        later = later * ((256 - f[:, t]) / 256) * (tokens[:, t, None] != 0)
    of_gate = whole(of_state * ((new - h) * tried(clip, f - 127)) / (256 * 2 * TRIAL))
    of_candidate = whole(of_state * (f * tried(clip, new)) / (256 * 2 * TRIAL))
    c = c + through_norm(p["normed_1"], p["size_1"], handed(of_gate, w["w_f"]), handed(of_candidate, w["w_h"]))
    return dict(of_down=of_down, of_up=of_up, of_gate=of_gate, of_candidate=of_candidate, of_embedding=whole(c))


def alike(number, e):
    """Whole credits of all positions in one power of two, with which one position in 64 may be cut."""
    there = np.sort(e[number.any(-1)].ravel())
    return clip(np.rint(number * power(e - (there[-there.size // 64] if there.size else 0))))


def votes(w, tokens, followed, seed):
    """({name: float32 array} of votes on weights, the loss in bits per byte)."""
    p = forward(w, tokens)
    p["errors"] = errors_of_head(p["logits"], followed, seed)
    p["bytes"] = (tokens[..., None] == np.arange(256)).astype(f32)
    p |= {name: alike(*credits) for name, credits in credits_of(w, p, tokens).items()}
    flat = {name: x.reshape(-1, x.shape[-1]) for name, x in p.items()}
    return ({name: flat[inputs].T @ flat[outputs] for name, (_, _, inputs, outputs) in MATRICES.items()}
            | {name: flat[credits].sum(0) for name, credits in BIASES.items()}, bits(p["logits"], followed))


def update(w, moments, vote, rate):
    """AdamW on digits of the votes. A weight moves by 1 when the sum of its fractions, acc, passes 1."""
    for name, votes_on in vote.items():
        m, v, acc = moments[name]
        size = np.abs(votes_on)
        least = max(1, math.ceil(size.sum(dtype=np.float64) / size.size * float(f32(ADAPTIVE_THRESHOLD_ALPHA))))
        g = -np.sign(votes_on) * np.minimum((size + least) // (2 * least), VOTE_LEVELS)
        decay = 0 if name in BIASES else ADAM_WEIGHT_DECAY
        m = m * f32(ADAM_BETA1) + g * (f32(1) - f32(ADAM_BETA1))
        v = g * g * (f32(1) - f32(ADAM_BETA2)) + v * f32(ADAM_BETA2)
        acc = acc - f32(rate) * (w[name] * f32(decay) + m / (np.sqrt(v) + f32(ADAM_EPS)))
        moved = clip(w[name] + (acc >= 1) - (acc <= -1)).astype(f32)
        moments[name] = m, v, np.where(moved != w[name], acc - (moved - w[name]), np.clip(acc, f32(-1), f32(1)))
        w[name] = moved


# --- validation, text, and the run -----------------------------------------------------------------------------------
def bits_per_byte(w, text):
    """The cross-entropy on windows of a text."""
    there = (text.size - 1) // T
    wanted = min(there, max(1, VALIDATE_TOKENS // T))
    places = (np.arange(wanted) * there // wanted * T)[:, None] + np.arange(T)
    return bits(forward(w, text[places])["logits"].astype(np.float64), text[places + 1])


def write(w, prompt, count, seed):
    """bytes: a prompt and its continuation."""
    tokens, h = list(prompt), 0
    floor = int(f32(np.log(f32(SAMPLING_MIN_P))) * f32(SOFTMAX_EXP_SCALE))
    order, fresh = np.arange(256).reshape(-1, H).T.ravel(), tokens
    for t in range(len(tokens) - 1, len(tokens) - 1 + count):
        parts = forward(w, np.array([fresh]), h)
        h, score = parts["states"][:, -1], parts["logits"][0, -1]
        score[np.unique(tokens)] -= f32(SAMPLING_PRESENCE_PENALTY * SOFTMAX_EXP_SCALE)
        below = np.trunc((score - score.max()) / f32(SAMPLING_TEMP)).astype(np.int64)
        weight = np.where(below >= floor, EXP[np.minimum(255, -below)], 0)[order]
        threshold = hashed(seed + 999 + 555 * t, 0) % int(weight.sum())
        fresh = [int(order[np.searchsorted(np.cumsum(weight), threshold, "right")])]
        tokens += fresh
    return bytes(tokens)


def train(text):
    """Yields (step, seed, weights, moments, loss in bits/byte) after every step, for ever."""
    w, seed, step = initial_weights(), 42, 0
    moments = {name: np.zeros((3, *x.shape), f32) for name, x in w.items()}
    while True:
        starts = (step * T + np.arange(CHUNK_SIZE) * (text.size // CHUNK_SIZE)) % (text.size - T)
        places = starts[:, None] + np.arange(T)
        vote, loss = votes(w, text[places], text[places + 1], seed)
        update(w, moments, vote, [rate for first, rate in LR_SCHEDULE if first <= step][-1])
        step, seed = step + 1, hashed(seed, step + 1)
        yield step, seed, w, moments, loss


def read(path):
    """uint8: a file of bytes. If its name ends with .bin, it holds tokens of decoding.bin, whose bytes are taken."""
    data = np.fromfile(path, np.uint8)
    if path.endswith(".bin"):
        with open("decoding.bin", "rb") as file:
            pieces = [file.read(int.from_bytes(file.read(4), "little"))
                      for _ in range(int.from_bytes(file.read(4), "little"))]
        data = np.frombuffer(b"".join(map(pieces.__getitem__, data.view("<u4").tolist())), np.uint8)
    return data


def main(path="input.bin"):
    try:
        text = read(path)
        text, unread = (text, read("val.bin")) if path == "input.bin" else np.split(text, [-(text.size // 20)])
    except (OSError, ValueError, IndexError) as error:
        sys.exit(f"{path} is no text, and no tokens of ./decoding.bin: {error}")
    if text.size < 100 * T:
        sys.exit(f"{path} is too short: take a text of {105 * T} bytes or more")
    print(f"{text.size:,} bytes to learn from for {SECONDS} s, {unread.size:,} for validation", flush=True)
    until = time.monotonic() + SECONDS
    for step, seed, w, _, loss in train(text):
        if (ends := time.monotonic() > until) or step % VALIDATE_EVERY == 0:
            print(f"step {step}  loss {loss:.2f}  val {bits_per_byte(w, unread):.2f} bits/byte", flush=True)
        if ends:
            break
    print(write(w, unread[:T].tobytes(), 400, seed).decode(errors="replace"))


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)           # Ctrl-C ends it without a traceback
    main(*sys.argv[1:2])
