"""The whole method of egg in one file, with NumPy alone: a model of bytes learns to write, without back-propagation.

    python examples/nano.py              # in egg's directory: learns from input.bin for a minute, then writes
    python examples/nano.py my.txt       # the same with any file of text

 1. The model is a recurrent network (a minGRU); its weights, and all it computes, are whole numbers from -127 to 127.
 2. A step reads some windows of the text, each with the clean model and with the members of a group.
 3. A member is the model with noise, +A or -A, added to the outputs of its units: in every unit, at every position.
 4. Where a member predicts better than its group, its noise was good there; where it predicts worse, the opposite was.
 5. So each position of a member has a digit, -7 to 7: how much better than the mean of the group it was.
 6. The digit, and a part of later ones, is the noise's credit; credit times noise, summed, is what a unit should do.
 7. That times the inputs of the unit, which are known, is a vote on each of its weights.
 8. The last matrix needs no noise: its units should do what followed less what was predicted.
 9. Only the signs of large votes count; AdamW makes fractions of them, and a weight moves by 1 when they add up to 1.
10. All is whole numbers and hashes, so that every machine gets the same weights, in every bit: those of
    `egg.py train --preset laptop-bytes` with the settings below (-D NAME=VALUE). docs/SPEC.md has every rule.
"""

import functools
import math
import os
import signal
import sys
import time

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")         # products are small: threads would wait for each other
import numpy as np                                         # noqa: E402

SECONDS, VALIDATE_EVERY, VALIDATE_TOKENS = 60, 100, 32768
HIDDEN_DIM, SEQ_LEN = 64, 64                     # units; bytes of a window
GROUP_SIZE = 8                                   # members that read a window
CHUNK_SIZE = POPULATION_SIZE = 128               # of a step: 16 windows (1,024 positions; float32 adds votes of 1,040)
NOISE_GATE, NOISE_CANDIDATE, NOISE_UP, NOISE_DOWN = 7, 3, 3, 3
CREDIT = 12                                      # sixteenths of the credit of the next position, which noise gets, too
ADAPTIVE_THRESHOLD_ALPHA = 0.4                   # votes below this share of the mean vote do not count
SOFT_TARGETS = (0, 2), (100, 3)                  # from this step on: targets that follow the same 2, 3 bytes
SOFTMAX_EXP_SCALE, SOFTMAX_SCALE_BIT = 12.0, 18  # logits in a nat; fractional bits of exponentials
# Powers of two: a product with them is exact, so that float32 rounds a product and a sum once, as egg does (a fused
# multiply-add). With other values nano learns as well, but some bits may differ.
LR_SCHEDULE = (0, 0.5), (300, 0.25), (1200, 0.125)
ADAM_BETA1, ADAM_BETA2, ADAM_EPS, ADAM_WEIGHT_DECAY = 0.5, 0.99, 1e-8, 2 ** -12
SAMPLING_TEMP, SAMPLING_MIN_P, SAMPLING_PRESENCE_PENALTY = 0.6, 0.08, 0.2

GROUPS, T, H = CHUNK_SIZE // GROUP_SIZE, SEQ_LEN, HIDDEN_DIM
# Where there is noise: number in the network, units, size, and whether it changes the losses of later positions, too.
# (Number 0 would be the embedding. It keeps its random values: they serve as well, and other votes have less noise.)
PHASES = {"gate": (1, H, NOISE_GATE, True), "candidate": (2, H, NOISE_CANDIDATE, True),
          "up": (3, 4 * H, NOISE_UP, False), "down": (4, H, NOISE_DOWN, False)}
# Every matrix that learns: rows, columns, its inputs, the outputs that vote on it
MATRICES = {"head": (H, 256, "normed_f", "logits"), "w_f": (H, H, "normed_1", "gate"), "u_f": (H, H, "before", "gate"),
            "w_h": (H, H, "normed_1", "candidate"), "u_h": (H, H, "gated", "candidate"),
            "w_up": (H, 4 * H, "normed_2", "up"), "w_down": (4 * H, H, "inner", "down")}
BIASES = {"b_f": "gate", "b_h": "candidate"}
FRACTION_BITS = max(bits for bits in range(5) if 7 * 16 << bits <= 127 * (16 - CREDIT))     # of a credit that fades
EXP = np.exp(-np.arange(256) / SOFTMAX_EXP_SCALE) * 2 ** SOFTMAX_SCALE_BIT
EXP = np.where(EXP >= 1, np.rint(EXP), 0).astype(np.int32)           # of how far a logit is below the largest one


def hashed(seed, i):
    """32 random bits for a seed and an index, int or int64 arrays: nobody has to store or send random numbers."""
    x = seed + i * 0x9E3779B9 & 0xFFFFFFFF
    x = (x ^ x >> 16) * 0x85EBCA6B & 0xFFFFFFFF
    x = (x ^ x >> 13) * 0xC2B2AE35 & 0xFFFFFFFF
    return x ^ x >> 16


def initial_weights():
    """{name: float32 array} of whole numbers: matrices are sums of three draws, biases begin at 0."""
    state, weights = 42, {}
    for name, (rows, cols, *_) in {"embedding": (H, 256), **MATRICES}.items():
        draws = np.empty(rows * cols, np.int64)
        for i in range(draws.size):              # xorshift32
            state ^= state << 13 & 0xFFFFFFFF
            state ^= state >> 17
            state ^= state << 5 & 0xFFFFFFFF
            draws[i] = state
        three = [(2 * (draws >> bit & 1) - 1) * (draws >> bit + 1 & 15) for bit in (0, 5, 10)]
        weights[name] = sum(three).reshape(rows, cols).astype(np.float32)
    return weights | {name: np.zeros(H, np.float32) for name in BIASES}


def signs_of_noise(number, units, seed):
    """float32 [groups, members, positions, units]: -1 or 1, a bit of a hash each. number: of the phase."""
    words = hashed(seed + np.arange(CHUNK_SIZE)[:, None], (number << 20) + np.arange(T * units // 32)).astype("<u4")
    bits = np.unpackbits(words.view(np.uint8), bitorder="little")
    bits = bits.reshape(-1, 4, 8).swapaxes(1, 2)           # output 4 a + b has bit 8 b + a of its word
    return (1 - 2 * bits.astype(np.float32)).reshape(GROUPS, GROUP_SIZE, T, units)


def contexts(text, places, length):
    """uint64: the bytes before each place as a number, with room for one more. The text is a ring."""
    return sum(np.take(text, places - back, mode="wrap").astype(np.uint64) << np.uint64(8 * back)
               for back in range(1, length + 1))


def windows(text, known, length, step, seed):
    """int64 inputs [groups, positions] and targets [.., 8]: the byte that follows, and 7 that follow the same context
    somewhere, which takes most of the chance out of a loss. known: all contexts with the byte that follows, sorted."""
    starts = (step * T + np.arange(GROUPS) * (text.size // GROUPS)) % (text.size - T)
    places = starts[:, None] + np.arange(T)
    context = contexts(text, places + 1, length)
    first = np.searchsorted(known, context)[..., None]
    count = np.searchsorted(known, context | np.uint64(255), "right")[..., None] - first
    random = hashed(seed + np.arange(GROUPS)[:, None], (1 << 30) + np.arange(7 * T)).reshape(GROUPS, T, 7)
    drawn = known[first + random % count] & np.uint64(255)
    return text[places].astype(np.int64), np.concatenate([text[places + 1][..., None], drawn], -1).astype(np.int64)


# --- the model: float32 has fast products, and holds its whole numbers exactly, as all sums are below 2^24 ---
def clip(x):
    return np.clip(x, -127, 127)


def product(x, matrix):
    y = (x.reshape(-1, len(matrix)) @ matrix).reshape(*x.shape[:-1], -1)
    return clip(np.floor(y / (16 * math.isqrt(len(matrix)))))


def normed(x):
    return clip(np.floor(16 * x / np.maximum(1, np.floor(np.abs(x).sum(-1, keepdims=True) / H))))


def forward(w, tokens, noise=dict.fromkeys(PHASES, 0), h=0):
    """{name: float32 [groups, members, positions, units]}: all parts of the model, for tokens [groups, positions].
    noise: {phase: what is added to its outputs}; the clean model has none, and is one member. h: the state before."""
    x = clip(w["embedding"].T[tokens])[:, None]
    normed_1 = normed(x)
    gate = product(normed_1, w["w_f"]) + w["b_f"] + noise["gate"]
    candidate = product(normed_1, w["w_h"]) + w["b_h"] + noise["candidate"]
    h = np.zeros_like(gate[:, :, 0]) + h
    before, gated, states = np.empty((3, *gate.shape), np.float32)
    for t in range(tokens.shape[1]):
        before[:, :, t] = h = h * (tokens[:, t, None, None] != 0)      # byte 0 begins a text
        f = clip(gate[:, :, t] + product(h, w["u_f"])) + 127           # how much of the state is renewed, of 256
        gated[:, :, t] = past = np.floor(f * h / 256)
        c = clip(candidate[:, :, t] + product(past, w["u_h"]))
        states[:, :, t] = h = h + np.floor(f * (c - h) / 256)
    x = clip(x + states)
    normed_2 = normed(x)
    inner = np.maximum(0, clip(product(normed_2, w["w_up"]) + noise["up"]))
    normed_f = normed(clip(x + clip(product(inner, w["w_down"]) + noise["down"])))
    return dict(normed_1=normed_1, before=before, gated=gated, states=states, normed_2=normed_2, inner=inner,
                normed_f=normed_f, logits=product(normed_f, w["head"]))


def losses(z, targets):
    """int64 [groups, members, positions]: the mean cross-entropy over the 8 targets, in 1/256 of a logit."""
    top = z.max(-1, keepdims=True)
    total = EXP[(top - z).astype(np.uint8)].sum(-1)
    # log2 of the total with 16 fractional bits, in whole numbers: to square a number is to double its logarithm
    whole = np.frexp(total)[1] - 1
    m, fraction = (total << 31 - whole).astype(np.uint64), np.uint64(0)
    for _ in range(16):
        m = m * m >> np.uint64(31)
        bit = m >> np.uint64(32)
        m, fraction = m >> bit, fraction + fraction + bit
    octaves = (whole - SOFTMAX_SCALE_BIT << 16) + fraction.astype(np.int64)
    distance = (top - np.take_along_axis(z, targets[:, None], -1)).sum(-1).astype(np.int64)
    return (octaves * round(SOFTMAX_EXP_SCALE * np.log(2) * 256 * 65536) >> 32) + distance * 32


# --- a step: noise, digits, credit, votes, update ------------------------------------------------------------
def digits_of(better):
    """int64 [groups, members, positions]: by how much losses are smaller, as -7 to 7, which is four times the mean."""
    total = int(np.abs(better).sum())
    least = [max(1, -(-(2 * q - 1) * 2 * total // (7 * better.size))) for q in range(1, 8)]
    return np.sign(better) * np.searchsorted(least, np.abs(better), "right")


def wished(signs, digits, later):
    """float32 [groups, positions, units]: where the outputs of a phase should go: credit times noise, summed over the
    members of a group. later: noise is credited with the digits of later positions, too, which fade."""
    credit, due, usual = digits.astype(np.float32), 0, 2
    if later:
        usual = 3 << FRACTION_BITS
        for t in reversed(range(T)):
            credit[..., t] = due = (digits[..., t] << FRACTION_BITS) + np.trunc(due * CREDIT / 16)
    total = np.einsum("gmtu,gmt->gtu", signs, credit)
    unit = 1 << max(0, math.isqrt(GROUP_SIZE * usual ** 2).bit_length() - 6)
    return clip(np.sign(total) * np.floor(np.abs(total) / unit + 0.5))


def errors_of_head(z, targets, seed):
    """float32 [groups, positions, 256]: 127 times what followed less what was predicted, rounded at random."""
    w = EXP[(z.max(-1, keepdims=True) - z).astype(np.uint8)].astype(np.int64)
    followed = (targets[..., None] == np.arange(256)).sum(2)
    words = hashed(seed + np.arange(GROUPS)[:, None], (1 << 31) + np.arange(T * 128)).astype("<u4")
    random = words.view("<u2").astype(np.int64).reshape(z.shape)
    whole = 8 * w.sum(-1, keepdims=True)
    errors = (followed * whole - 8 * 8 * w) * (127 << 16) // (8 * whole) + random >> 16
    return np.where((np.abs(z) == 127) & (np.sign(z) == np.sign(errors)), 0, errors).astype(np.float32)


def votes(w, tokens, targets, seed):
    """({name: float32 array} of votes on weights, the loss of the clean model)."""
    clean = forward(w, tokens)
    signs = {phase: signs_of_noise(number, units, seed) for phase, (number, units, _, _) in PHASES.items()}
    noisy = forward(w, tokens, {phase: size * signs[phase] for phase, (_, _, size, _) in PHASES.items()})
    loss = losses(clean["logits"], targets)
    better = loss - losses(noisy["logits"], targets)
    digits = digits_of(GROUP_SIZE * better - better.sum(1, keepdims=True))
    wishes = {phase: wished(signs[phase], digits, later) for phase, (_, _, _, later) in PHASES.items()}
    wishes["logits"] = errors_of_head(clean["logits"][:, 0], targets, seed)
    flat = {name: x.reshape(-1, x.shape[-1]) for name, x in (clean | wishes).items()}
    return ({name: flat[inputs].T @ flat[outputs] for name, (_, _, inputs, outputs) in MATRICES.items()}
            | {name: flat[phase].sum(0) for name, phase in BIASES.items()}, int(loss.sum()))


def update(w, moments, vote, rate):
    """AdamW on the signs of large votes. A weight moves by 1 when the sum of its fractions, acc, passes 1."""
    f = np.float32
    for name in w:
        votes_on, (m, v, acc) = vote.get(name, np.zeros(1)), moments[name]
        size = np.abs(votes_on)
        least = max(1, math.ceil(size.sum(dtype=np.float64) / size.size * float(f(ADAPTIVE_THRESHOLD_ALPHA))))
        g = f(-np.sign(votes_on) * (size >= least))
        decay = 0 if name in BIASES else ADAM_WEIGHT_DECAY
        m = m * f(ADAM_BETA1) + g * (f(1) - f(ADAM_BETA1))
        v = g * g * (f(1) - f(ADAM_BETA2)) + v * f(ADAM_BETA2)
        acc = acc - f(rate) * (w[name] * f(decay) + m / (np.sqrt(v) + f(ADAM_EPS)))
        moved = clip(w[name] + (acc >= 1) - (acc <= -1)).astype(f)
        moments[name] = m, v, np.where(moved != w[name], acc - (moved - w[name]), np.clip(acc, f(-1), f(1)))
        w[name] = moved


# --- validation, text, and the run ---------------------------------------------------------------------------
def bits_per_byte(w, text):
    """The cross-entropy on windows of a text."""
    there = (text.size - 1) // T
    wanted = min(there, max(1, VALIDATE_TOKENS // T))
    places = (np.arange(wanted) * there // wanted * T)[:, None] + np.arange(T)
    z = forward(w, text[places])["logits"][:, 0].astype(np.float64) / SOFTMAX_EXP_SCALE
    likely = np.take_along_axis(z, text[places + 1][..., None].astype(np.int64), -1)[..., 0]
    return float((np.log(np.exp(z).sum(-1)) - likely).mean() / math.log(2))


def write(w, prompt, count, seed):
    """bytes: a prompt and its continuation."""
    f, tokens, h = np.float32, list(prompt), 0
    floor = int(f(np.log(f(SAMPLING_MIN_P))) * f(SOFTMAX_EXP_SCALE))
    order, fresh = np.arange(256).reshape(-1, H).T.ravel(), tokens
    for t in range(len(tokens) - 1, len(tokens) - 1 + count):
        parts = forward(w, np.array([fresh]), h=h)
        h, score = parts["states"][:, :, -1], parts["logits"][0, 0, -1]
        score[np.unique(tokens)] -= f(SAMPLING_PRESENCE_PENALTY * SOFTMAX_EXP_SCALE)
        below = np.trunc((score - score.max()) / f(SAMPLING_TEMP)).astype(np.int64)
        weight = np.where(below >= floor, EXP[np.minimum(255, -below)], 0)[order]
        threshold = hashed(seed + 999 + 555 * t, 0) % int(weight.sum())
        fresh = [int(order[np.searchsorted(np.cumsum(weight), threshold, "right")])]
        tokens += fresh
    return bytes(tokens)


def train(text):
    """Yields (step, seed, weights, moments, loss in bits/byte) after every step, for ever."""
    w, seed, step = initial_weights(), 42, 0
    moments = {name: np.zeros((3, *x.shape), np.float32) for name, x in w.items()}
    known = functools.cache(lambda length: np.sort(contexts(text, np.arange(text.size), length) | text))
    while True:
        length, rate = ([value for first, value in schedule if first <= step][-1]
                        for schedule in (SOFT_TARGETS, LR_SCHEDULE))
        tokens, targets = windows(text, known(length), length, step, seed)
        vote, loss = votes(w, tokens, targets, seed)
        update(w, moments, vote, rate)
        step, seed = step + 1, hashed(seed, step + 1)
        yield step, seed, w, moments, loss / tokens.size / 256 / SOFTMAX_EXP_SCALE / math.log(2)


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
