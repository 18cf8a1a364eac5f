"""The whole method of egg in one file, with NumPy alone: train a small language model of bytes without back-propagation.

    python examples/nano.py              # in egg's directory: a minute of training on input.bin, then a text
    python examples/nano.py my.txt       # the same with any file of text

 1. The model is a recurrent network (a minGRU) whose weights are whole numbers from -127 to 127, and so is all it computes.
 2. A step reads some windows of the text; each is read once by the clean model, and by several members of a population.
 3. A member is the model with noise, +A or -A, on the outputs of its units: at every position, in every unit.
 4. Where a member predicts better than the others, its noise was good there; where it predicts worse, the opposite was.
 5. So each position of a member gets a digit, -7 to 7: how much better than the mean of its group it was.
 6. The digit, and part of the later ones, is the credit of the noise; the sum of credit times noise says what a unit should
    have put out.
 7. That times the unit's inputs, which are known, is a vote on every weight before it.
 8. The last matrix needs no noise: it votes with the difference between what followed and what was predicted.
 9. Only the signs of large votes count, and AdamW turns them into fractions; when a weight's fractions pass 1, it moves by 1.
10. As everything is whole numbers and hashed seeds, every machine gets the same weights, in every bit: those of
    `egg.py train --preset laptop-bytes` with the settings below (-D NAME=VALUE). docs/SPEC.md has every rule.
"""

import functools
import math
import sys
import time

import numpy as np

SECONDS = 60                                     # of training
HIDDEN_DIM, SEQ_LEN = 64, 64                     # units; bytes of a window
GROUP_SIZE, CHUNK_SIZE = 16, 256                 # members that read a window, members: so 16 windows
POPULATION_SIZE = CHUNK_SIZE                     # of a step
NOISE_GATE, NOISE_CANDIDATE, NOISE_UP, NOISE_DOWN = 7, 3, 3, 3
CREDIT = 12                                      # sixteenths of the credit of the next position that a position gets, too
ADAPTIVE_THRESHOLD_ALPHA = 0.4                   # votes below this share of the mean vote do not count
SOFT_TARGETS = (0, 2), (100, 3)                  # from this step on: targets that follow the same 2, 3 bytes
SOFTMAX_EXP_SCALE = 12.0                         # logits in a nat
SOFTMAX_SCALE_BIT = 18                           # fractional bits of the exponentials
# Powers of two: a product with them is exact, so that float32 rounds a product and a sum once, as egg does (a fused
# multiply-add). With other values nano learns as well, but some bits may differ.
LR_SCHEDULE = (0, 0.5), (100, 0.25), (600, 0.125)
ADAM_BETA1, ADAM_BETA2, ADAM_EPS, ADAM_WEIGHT_DECAY = 0.5, 0.99, 1e-8, 2 ** -12
SAMPLING_TEMP, SAMPLING_MIN_P, SAMPLING_PRESENCE_PENALTY = 0.6, 0.08, 0.2
VALIDATE_EVERY, VALIDATE_TOKENS = 100, 32768

GROUPS = CHUNK_SIZE // GROUP_SIZE
# Where there is noise: number in the network, units, size, and whether it changes the losses of later positions, too.
# (Number 0 would be the embedding. It keeps its random values: they serve as well, and other votes have less noise.)
PHASES = {"gate": (1, HIDDEN_DIM, NOISE_GATE, True), "candidate": (2, HIDDEN_DIM, NOISE_CANDIDATE, True),
          "up": (3, 4 * HIDDEN_DIM, NOISE_UP, False), "down": (4, HIDDEN_DIM, NOISE_DOWN, False)}
# The outputs and the inputs of every matrix that learns
MATRICES = {"head": ("logits", "normed_f"), "w_f": ("gate", "normed_1"), "u_f": ("gate", "before"),
            "w_h": ("candidate", "normed_1"), "u_h": ("candidate", "gated"), "w_up": ("up", "normed_2"),
            "w_down": ("down", "inner")}
BIASES = {"b_f": "gate", "b_h": "candidate"}
EXP = np.exp(-np.arange(256) / SOFTMAX_EXP_SCALE) * 2 ** SOFTMAX_SCALE_BIT
EXP = np.where(EXP >= 1, np.rint(EXP), 0).astype(np.int32)           # of how far a logit is below the largest one


# --- random numbers: all are hashes, so that nobody has to store or send them ------------------------------------------

def hashed(seed, i):
    """32 random bits for each seed and index: int, or int64 arrays, whose products may wrap."""
    x = seed + i * 0x9E3779B9 & 0xFFFFFFFF
    x = (x ^ x >> 16) * 0x85EBCA6B & 0xFFFFFFFF
    x = (x ^ x >> 13) * 0xC2B2AE35 & 0xFFFFFFFF
    return x ^ x >> 16


def initial_weights():
    """{name: float32 array} of whole numbers: matrices are sums of three draws, biases begin at 0."""
    H, state, weights = HIDDEN_DIM, 42, {}
    for name, shape in {"embedding": (H, 256), "head": (H, 256), "w_f": (H, H), "u_f": (H, H), "w_h": (H, H),
                        "u_h": (H, H), "w_up": (H, 4 * H), "w_down": (4 * H, H)}.items():
        draws = np.empty(math.prod(shape), np.int64)
        for i in range(draws.size):              # xorshift32
            state ^= state << 13 & 0xFFFFFFFF
            state ^= state >> 17
            state ^= state << 5 & 0xFFFFFFFF
            draws[i] = state
        three = [(2 * (draws >> bit & 1) - 1) * (draws >> bit + 1 & 15) for bit in (0, 5, 10)]
        weights[name] = sum(three).reshape(shape).astype(np.float32)
    return weights | {name: np.zeros(H, np.float32) for name in BIASES}


def signs_of_noise(phase, seed):
    """float32 [groups, members, positions, units]: -1 or 1, a bit of a hash each."""
    number, units = PHASES[phase][:2]
    seeds = seed + np.arange(CHUNK_SIZE)[:, None]
    words = hashed(seeds, (number << 20) + np.arange(SEQ_LEN * units // 32)).astype("<u4")
    bits = np.unpackbits(words.view(np.uint8), bitorder="little").reshape(-1, 4, 8)
    bits = bits.swapaxes(1, 2)                   # output 4 a + b has bit 8 b + a of its word
    return (1 - 2 * bits.astype(np.float32)).reshape(GROUPS, GROUP_SIZE, SEQ_LEN, units)


# --- the text ----------------------------------------------------------------------------------------------------------

def scheduled(schedule, step):
    return [value for first, value in schedule if first <= step][-1]


def contexts(text, places, length):
    """uint64: the bytes before each place as a number, with room for one more. The text is a ring."""
    return sum(np.take(text, places - back, mode="wrap").astype(np.uint64) << np.uint64(8 * back)
               for back in range(length, 0, -1))


def sorted_contexts(text, length):
    """All contexts, each with the byte that follows it, in order."""
    return np.sort(contexts(text, np.arange(text.size), length) | text)


def windows(text, known, length, step, seed):
    """int64 inputs [groups, positions] and targets [.., 8]. The first target is the byte that follows; the others are
    bytes that follow the same context somewhere, which takes most of the chance out of a loss. known: the
    sorted_contexts of this length."""
    starts = (step * SEQ_LEN + np.arange(GROUPS) * (text.size // GROUPS)) % (text.size - SEQ_LEN)
    places = starts[:, None] + np.arange(SEQ_LEN)
    context = contexts(text, places + 1, length)
    first = np.searchsorted(known, context)[..., None]
    count = np.searchsorted(known, context | np.uint64(255), "right")[..., None] - first
    random = hashed(seed + np.arange(GROUPS)[:, None], (1 << 30) + np.arange(7 * SEQ_LEN)).reshape(GROUPS, SEQ_LEN, 7)
    drawn = known[first + random % count] & np.uint64(255)
    return text[places].astype(np.int64), np.concatenate([text[places + 1][..., None], drawn], -1).astype(np.int64)


# --- the model: float32 holds all its whole numbers exactly, as they are below 2^24, and has fast products -------------

def clip(x):
    return np.clip(x, -127, 127)


def product(x, matrix):
    rows = len(matrix)
    y = (x.reshape(-1, rows) @ matrix).reshape(*x.shape[:-1], -1)
    return clip(np.floor(y / (16 * math.isqrt(rows))))


def normed(x):
    return clip(np.floor(16 * x / np.maximum(1, np.floor(np.abs(x).sum(-1, keepdims=True) / HIDDEN_DIM))))


def forward(w, tokens, noise=dict.fromkeys(PHASES, 0), h=0):
    """{name: float32 [groups, members, positions, units]} of tokens [groups, positions]: what the model computes. noise:
    {phase: what is added to its outputs}; h [groups, members, units]: the state before. Without noise there is one
    member, the clean model."""
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
    x = clip(x + clip(product(inner, w["w_down"]) + noise["down"]))
    normed_f = normed(x)
    return dict(normed_1=normed_1, before=before, gated=gated, states=states, normed_2=normed_2, inner=inner,
                normed_f=normed_f, logits=product(normed_f, w["head"]))


def log2(q):
    """log2 of int64 with 16 fractional bits, in whole numbers."""
    e = np.frexp(q)[1] - 1
    m, fraction = (q << 31 - e).astype(np.uint64), np.zeros_like(q)
    for _ in range(16):
        m = m * m >> np.uint64(31)
        bit = m >> np.uint64(32)
        m >>= bit
        fraction = 2 * fraction + bit.astype(np.int64)
    return (e << 16) + fraction


def losses(z, targets):
    """int64 [groups, members, positions]: the mean cross-entropy over the 8 targets, in 1/256 of a logit."""
    top = z.max(-1, keepdims=True)
    octaves = log2(EXP[(top - z).astype(np.uint8)].sum(-1)) - (SOFTMAX_SCALE_BIT << 16)
    distance = (top - np.take_along_axis(z, targets[:, None], -1)).sum(-1).astype(np.int64)
    return (octaves * round(SOFTMAX_EXP_SCALE * np.log(2) * 256 * 65536) >> 32) + distance * 32


# --- a step: noise, digits, credit, votes, update ----------------------------------------------------------------------

def digits_of(better):
    """How much smaller the losses of members are, int64 [groups, members, positions], as -7 to 7: 7 is four times the
    mean size."""
    total = int(np.abs(better).sum())
    least = [max(1, -(-(2 * q - 1) * 2 * total // (7 * better.size))) for q in range(1, 8)]
    return np.sign(better) * np.searchsorted(least, np.abs(better), "right")


def credits_of(digits, later):
    """float32 like digits: of noise that acts at a position alone or later, too; then what follows fades."""
    if not later:
        return digits.astype(np.float32)
    credits, due = np.empty(digits.shape, np.float32), 0
    for t in reversed(range(SEQ_LEN)):
        credits[..., t] = due = (digits[..., t] << fraction_bits()) + np.trunc(due * CREDIT / 16)
    return credits


def fraction_bits():
    """Of a credit that fades: as many as a byte has room for."""
    return max(bits for bits in range(5) if 7 * 16 << bits <= 127 * (16 - CREDIT))


def wished(signs, digits, later):
    """float32 [groups, positions, units]: where the outputs of a phase should go, by the members of each group."""
    total = (signs * credits_of(digits, later)[..., None]).sum(1)
    usual = 3 << fraction_bits() if later else 2
    unit = 1 << max(0, math.isqrt(GROUP_SIZE * usual ** 2).bit_length() - 6)
    return clip(np.sign(total) * np.floor(np.abs(total) / unit + 0.5))


def errors_of_head(z, targets, seed):
    """float32 [groups, positions, 256]: 127 times what followed less what was predicted, rounded at random."""
    w = EXP[(z.max(-1, keepdims=True) - z).astype(np.uint8)].astype(np.int64)
    followed = (targets[..., None] == np.arange(256)).sum(2)
    words = hashed(seed + np.arange(GROUPS)[:, None], (1 << 31) + np.arange(SEQ_LEN * 128)).astype("<u4")
    random = words.view("<u2").astype(np.int64).reshape(z.shape)
    whole = 8 * w.sum(-1, keepdims=True)
    errors = (followed * whole - 8 * 8 * w) * (127 << 16) // (8 * whole) + random >> 16
    return np.where((np.abs(z) == 127) & (np.sign(z) == np.sign(errors)), 0, errors).astype(np.float32)


def votes(w, inputs, targets, seed):
    """({name: float32 array} of votes on weights, the loss of the clean model)."""
    clean = forward(w, inputs)
    signs = {phase: signs_of_noise(phase, seed) for phase in PHASES}
    noisy = forward(w, inputs, {phase: size * signs[phase] for phase, (_, _, size, _) in PHASES.items()})
    loss = losses(clean["logits"], targets)
    better = loss - losses(noisy["logits"], targets)
    digits = digits_of(GROUP_SIZE * better - better.sum(1, keepdims=True))
    wishes = {phase: wished(signs[phase], digits, later) for phase, (_, _, _, later) in PHASES.items()}
    wishes["logits"] = errors_of_head(clean["logits"][:, 0], targets, seed)
    # float64: these sums may pass 2^24
    flat = {name: x.reshape(-1, x.shape[-1]).astype(np.float64) for name, x in (clean | wishes).items()
            if name in wishes or name not in ("logits", "states")}
    return ({name: flat[of].T @ flat[to] for name, (to, of) in MATRICES.items()}
            | {name: flat[phase].sum(0) for name, phase in BIASES.items()}, int(loss.sum()))


def large(vote):
    """The signs of large votes, else 0."""
    size = np.abs(vote)
    least = max(1, math.ceil(float(size.sum()) / size.size * float(np.float32(ADAPTIVE_THRESHOLD_ALPHA))))
    return np.sign(vote) * (size >= least)


def update(w, moments, signs, rate):
    """AdamW on weights that move by 1: a weight moves when the sum of its fractions, acc, passes 1."""
    f = np.float32
    for name in w:
        g, decay = -f(signs.get(name, 0)), ADAM_WEIGHT_DECAY if w[name].ndim == 2 else 0
        m, v, acc = moments[name]
        m = m * f(ADAM_BETA1) + g * (f(1) - f(ADAM_BETA1))
        v = g * g * (f(1) - f(ADAM_BETA2)) + v * f(ADAM_BETA2)
        acc = acc - f(rate) * (w[name] * f(decay) + m / (np.sqrt(v) + f(ADAM_EPS)))
        moved = clip(w[name] + (acc >= 1) - (acc <= -1)).astype(f)
        acc = np.where(moved != w[name], acc - (moved - w[name]), np.clip(acc, f(-1), f(1)))
        moments[name] = m, v, acc
        w[name] = moved


# --- validation, text, and the run -------------------------------------------------------------------------------------

def bits_per_byte(w, text):
    """The cross-entropy on windows of a text."""
    there = (text.size - 1) // SEQ_LEN
    wanted = min(there, max(1, VALIDATE_TOKENS // SEQ_LEN))
    places = (np.arange(wanted) * there // wanted * SEQ_LEN)[:, None] + np.arange(SEQ_LEN)
    z = forward(w, text[places])["logits"][:, 0].astype(np.float64) / SOFTMAX_EXP_SCALE
    likely = np.take_along_axis(z, text[places + 1][..., None].astype(np.int64), -1)[..., 0]
    return float((np.log(np.exp(z).sum(-1)) - likely).mean() / math.log(2))


def write(w, prompt, count, seed):
    """bytes: a continuation of a prompt."""
    f, tokens, h = np.float32, list(prompt), 0
    floor = int(f(np.log(f(SAMPLING_MIN_P))) * f(SOFTMAX_EXP_SCALE))
    order, fresh = np.arange(256).reshape(-1, HIDDEN_DIM).T.ravel(), tokens
    for t in range(len(tokens) - 1, len(tokens) - 1 + count):
        parts = forward(w, np.array([fresh]), h=h)
        h, score = parts["states"][:, :, -1], parts["logits"][0, 0, -1]
        score[np.unique(tokens)] -= f(SAMPLING_PRESENCE_PENALTY * SOFTMAX_EXP_SCALE)
        below = np.trunc((score - score.max()) / f(SAMPLING_TEMP)).astype(np.int64)
        weight = np.where(below >= floor, EXP[np.minimum(255, -below)], 0)[order]
        threshold = hashed(seed + 999 + 555 * t, 0) % int(weight.sum())
        fresh = [int(order[np.searchsorted(np.cumsum(weight), threshold, "right")])]
        tokens += fresh
    return bytes(tokens[len(prompt):])


def train(text):
    """Yields (step, seed, weights, moments, loss in bits/byte) after every step, for ever."""
    w, seed, step = initial_weights(), 42, 0
    moments = {name: np.zeros((3, *x.shape), np.float32) for name, x in w.items()}
    known = functools.cache(functools.partial(sorted_contexts, text))
    while True:
        length = scheduled(SOFT_TARGETS, step)
        inputs, targets = windows(text, known(length), length, step, seed)
        vote, loss = votes(w, inputs, targets, seed)
        update(w, moments, {name: large(x) for name, x in vote.items()}, scheduled(LR_SCHEDULE, step))
        step += 1
        seed = hashed(seed, step)
        yield step, seed, w, moments, loss / inputs.size / 256 / SOFTMAX_EXP_SCALE / math.log(2)


def read(path):
    """uint8: a file of bytes. If its name ends with .bin, it holds tokens of decoding.bin, whose bytes are taken."""
    with open(path, "rb") as file:
        data = file.read()
    if path.endswith(".bin"):
        with open("decoding.bin", "rb") as file:
            pieces = [file.read(int.from_bytes(file.read(4), "little"))
                      for _ in range(int.from_bytes(file.read(4), "little"))]
        data = b"".join(map(pieces.__getitem__, np.frombuffer(data, "<u4").tolist()))
    return np.frombuffer(data, np.uint8)


def main(path="input.bin"):
    text = read(path)
    if path == "input.bin":
        held_out = read("val.bin")
    else:
        text, held_out = np.split(text, [text.size - text.size // 20])         # the end is not trained on
    print(f"{text.size:,} bytes to learn from, {held_out.size:,} held out")
    start = time.monotonic()
    for step, seed, w, _, loss in train(text):
        seconds = time.monotonic() - start
        ends = seconds > SECONDS
        if ends or step % VALIDATE_EVERY == 0:
            print(f"{seconds:3.0f} s  step {step:4}  loss {loss:.2f}  val {bits_per_byte(w, held_out):.3f} bits/byte",
                  flush=True)
        if ends:
            break
    prompt = held_out[:SEQ_LEN].tobytes()
    print((prompt + b" ... " + write(w, prompt, 400, seed)).decode(errors="replace"))


if __name__ == "__main__":
    main(*sys.argv[1:])
