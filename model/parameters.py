"""A model as one table: from it come initialisation, canonical bytes, noise overlay, optimizer walk, `arch` and
digests.

TABLE is the transformer, GRU_TABLE the recurrent model of nano-egg; `table` says which one a configuration has.
Nothing here knows of devices or sockets; arrays are NumPy. SPEC sections 2, 3, 6.
"""

import functools
import hashlib
import math
import statistics
from typing import NamedTuple

import numpy as np


class Param(NamedTuple):
    """A row of the table. Widths are in units of HIDDEN_DIM ("H"), 4 H ("4H") or VOCAB_SIZE ("V"), or the values of a
    byte ("256")."""
    name: str
    shape: tuple            # (rows = inputs, cols = outputs) of a matrix, (width,) of a vector
    a: int                  # noise offset of the output side; first offset of a vector
    b: object               # noise offset of the input side ("H": a + HIDDEN_DIM); second offset of a vector
    start: object = None    # initial value of a vector; None: random draws
    per_layer: bool = False
    lr_scale: float = 1.0   # factor on the learning rate
    looked_up: bool = False  # a table whose columns are looked up; the transformer's embedding is multiplied as well
    needs: str = ""         # constant without which (0) the model does not have it


H, H4, V, BYTE = "H", "4H", "V", "256"

TABLE = (
    Param("embedding", (H, V), 0, H),
    Param("emb_bias", (H,), 50, 51, 0, lr_scale=0.1),
    Param("ntt_emb_1", (H, BYTE), 600, H, lr_scale=0.5, looked_up=True, needs="NTT_MODE"),
    Param("ntt_emb_2", (H, BYTE), 610, H, lr_scale=0.5, looked_up=True, needs="NTT_MODE"),
    Param("ntt_emb_3", (H, BYTE), 620, H, lr_scale=0.5, looked_up=True, needs="NTT_MODE"),
    Param("ln_init", (H,), 500, 501, 16),
    Param("ln_init_bias", (H,), 502, 503, 0),
    Param("w_emb_mlp_up", (H, H4), 510, 511),
    Param("mlp_emb_bias_up", (H4,), 514, 515, 0),
    Param("w_emb_mlp_down", (H4, H), 512, 513),
    Param("mlp_emb_bias_down", (H,), 516, 517, 0),
    Param("ln_1", (H,), 100, 101, 16, True),
    Param("ln_1_bias", (H,), 110, 111, 0, True),
    Param("w_q", (H, H), 200, 201, None, True),
    Param("w_k", (H, H), 202, 203, None, True),
    Param("w_v", (H, H), 204, 205, None, True),
    Param("w_o", (H, H), 206, 207, None, True),
    Param("ln_2", (H,), 300, 301, 16, True),
    Param("ln_2_bias", (H,), 310, 311, 0, True),
    Param("w_up", (H, H4), 400, 401, None, True),
    Param("mlp_bias_up", (H4,), 410, 411, 0, True),
    Param("w_down", (H4, H), 402, 403, None, True),
    Param("mlp_bias_down", (H,), 412, 413, 0, True),
    Param("ln_f", (H,), 900, 901, 16),
    Param("ln_f_bias", (H,), 910, 911, 0),
)
GRU_TABLE = (
    Param("embedding", (H, V), 10, 11, looked_up=True),
    Param("head", (H, V), 20, 21),
    Param("ln_1", (H,), 100, 101, 16, True),
    Param("w_f", (H, H), 200, 201, None, True),
    Param("u_f", (H, H), 202, 203, None, True),
    Param("b_f", (H,), 210, 211, 0, True),
    Param("w_h", (H, H), 204, 205, None, True),
    Param("u_h", (H, H), 206, 207, None, True),
    Param("b_h", (H,), 212, 213, 0, True),
    Param("ln_2", (H,), 300, 301, 16, True),
    Param("w_up", (H, H4), 400, 401, None, True),
    Param("w_down", (H4, H), 402, 403, None, True),
    Param("ln_f", (H,), 900, 901, 16),
)
INDEX = {p.name: i for i, p in enumerate(TABLE)}
LAYER_SEED = 1000           # seed distance of two layers


class Tensor(NamedTuple):
    """One stored array: a Param of one layer. Offsets count elements of the flat arrays of `State`."""
    param: int              # index into the table
    name: str
    layer: int
    rows: int               # inputs; 1 for a vector
    cols: int               # outputs; the width of a vector
    matrix: bool
    weights: int            # first element in State.weights and in the optimizer arrays
    seed_a: int             # added to a member's seed: stream of the output side (vector: first stream)
    seed_b: int             # stream of the input side (vector: second stream)
    overlay_a: int          # first entry in State.overlay that scales stream a
    overlay_b: int          # ... that scales stream b (vector: the same as overlay_a)
    lr_scale: float
    per_layer: bool
    product: bool           # activations are multiplied by it: every matrix that is not only looked up in
    hidden: bool            # a matrix from hidden units to hidden units: those that Muon moves
    by_token: bool          # a table with a column for every token

    @property
    def size(self):
        return self.rows * self.cols


def width(symbol, cfg):
    return {H: cfg.HIDDEN_DIM, H4: 4 * cfg.HIDDEN_DIM, V: cfg.VOCAB_SIZE, BYTE: 256}[symbol]


def table(cfg):
    return TABLE if cfg.MODEL == "transformer" else GRU_TABLE


def tensors(cfg):
    """Every stored array in canonical order: a list of Tensor."""
    out, weights, overlay = [], 0, 0
    for i, p in enumerate(table(cfg)):
        if p.needs and not getattr(cfg, p.needs):
            continue
        layers = cfg.N_LAYERS if p.per_layer else 1
        dims = [width(s, cfg) for s in p.shape]
        matrix = len(dims) == 2
        rows, cols = dims if matrix else (1, dims[0])
        # overlay field order is row, then col; the "row" of what is looked up is the token or byte, which is its output
        # side
        lookup = p.b == H
        first, second = (cols, rows) if lookup else (rows, cols)
        for layer in range(layers):
            base = overlay + layer * first
            after = overlay + layers * first + layer * second
            side_a, side_b = (base, after) if lookup else (after, base)
            if not matrix:
                side_a = side_b = overlay + layer * cols
            b = p.a + cfg.HIDDEN_DIM if lookup else p.b
            out.append(Tensor(i, p.name, layer, rows, cols, matrix, weights, p.a + LAYER_SEED * layer,
                              b + LAYER_SEED * layer,
                              side_a, side_b, p.lr_scale, p.per_layer, matrix and not p.looked_up,
                              matrix and not p.looked_up and V not in p.shape, V in p.shape))
            weights += rows * cols
        overlay += layers * (first + second if matrix else cols)
    return out


def n_weights(cfg):
    last = tensors(cfg)[-1]
    return last.weights + last.size


def n_overlay(cfg):
    last = tensors(cfg)[-1]
    return last.overlay_a + last.cols


def products_per_token(cfg):
    """Multiply-adds of the weight matrices for one token (attention itself left out, as in the reference figures)."""
    return sum(t.size for t in tensors(cfg) if t.product)


def divisor(cfg, inputs):
    """By what the gru divides a product over so many inputs, rounding down."""
    return (1 << cfg.FIXED_POINT) * math.isqrt(inputs)


class State:
    """What training changes, as flat arrays in canonical order: weights int8 [n], moments float32 [n, 3] (m, v, acc),
    overlay int8 [k]. `step` updates have been applied; `seed` is the seed of the next step's evaluation."""

    def __init__(self, cfg, weights, moments, overlay, step=0, seed=None):
        self.weights, self.moments, self.overlay = weights, moments, overlay
        self.step = step
        self.seed = INITIAL_SEED if seed is None else seed

    def digests(self):
        """SHA-256 (hex) of weights, moments and overlay: what golden data record."""
        return tuple(hashlib.sha256(np.ascontiguousarray(x)).hexdigest() for x in (self.weights, self.moments,
                                                                                   self.overlay))


def initial_state(cfg):
    """State before the first update (SPEC 3)."""
    weights = np.zeros(n_weights(cfg), np.int8)
    arrays, params = tensors(cfg), table(cfg)
    for t in arrays:
        if params[t.param].start is not None:
            weights[t.weights:t.weights + t.size] = params[t.param].start
    # drawn matrix by matrix, layer by layer (the stored order is parameter by parameter)
    drawn = sorted((t for t in arrays if params[t.param].start is None),
                   key=lambda t: (params[t.param].per_layer, t.layer, t.param))
    draws = np.asarray(_xorshift(42, sum(t.size for t in drawn)))
    at = 0
    for t in drawn:
        mask = cfg.TOKEN_MASK if t.by_token and cfg.TOKEN_MASK >= 0 else cfg.HOST_MASK
        matrix = uniform_noise(draws[at:at + t.size], mask, cfg.HOST_GAUSSIAN).reshape(t.rows, t.cols)
        weights[t.weights:t.weights + t.size] = to_canonical(matrix)
        at += t.size
    return State(cfg, weights, np.zeros((weights.size, 3), np.float32),
                 np.full(n_overlay(cfg), cfg.ADAPTIVE_NOISE_INIT, np.int8),
                 0, first_seed(cfg))


def to_canonical(matrix):
    """[rows, cols] -> flat [rows / 4, cols, 4]."""
    rows, cols = matrix.shape
    return np.ascontiguousarray(matrix.reshape(rows // 4, 4, cols).transpose(0, 2, 1)).ravel()


def from_canonical(flat, rows, cols):
    """Flat [rows / 4, cols, 4] -> [rows, cols]."""
    return np.ascontiguousarray(flat.reshape(rows // 4, cols, 4).transpose(0, 2, 1)).reshape(rows, cols)


# --- random numbers (SPEC 2) -----------------------------------------------------------------------------------------

INITIAL_SEED = 42


def hash32(seed, index):
    """The counter hash of SPEC 2: uint32 from two integers."""
    x = (seed + index * 0x9E3779B9) & 0xFFFFFFFF
    x ^= x >> 16
    x = x * 0x85EBCA6B & 0xFFFFFFFF
    x ^= x >> 13
    x = x * 0xC2B2AE35 & 0xFFFFFFFF
    return x ^ x >> 16


def first_seed(cfg):
    """Seed of step 0. No two islands have the same one, at this step or, with NOISE_REUSE = 1, at any other: the hash
    is one to one."""
    return hash32(INITIAL_SEED, cfg.ISLAND_SEED) if cfg.ISLAND_SEED else INITIAL_SEED


def next_seed(seed, step, reuse=1):
    """Seed of step + 1 from the seed of `step`, which is kept for `reuse` steps (0: for ever)."""
    return seed if not reuse or (step + 1) % reuse else hash32(seed, step + 1)


def uniform_noise(draws, mask, gaussian):
    """int8 noise from uint32 draws: bit 0 is the sign, the bits above it the magnitude; the Gaussian form sums
    three."""
    def term(sign_bit, shift):
        magnitude = (draws >> np.uint32(shift) & np.uint32(mask)).astype(np.int8)
        return np.where(draws >> np.uint32(sign_bit) & np.uint32(1), magnitude, -magnitude)
    return term(0, 1) + term(5, 6) + term(10, 11) if gaussian else term(0, 1)


def _xorshift(state, count):
    """uint32 [count]: successive states of xorshift32 after `state`. The step is linear over bits, so a known run of n
    states gives the next n by one linear map, applied bytewise from tables; the run doubles."""
    def step(x):
        x = x ^ x << np.uint32(13)
        x = x ^ x >> np.uint32(17)
        return x ^ x << np.uint32(5)

    out = np.empty(count, np.uint32)
    if count:
        out[:1] = step(np.array([state], np.uint32))
    # the image of every single bit under one step
    columns = step(np.uint32(1) << np.arange(32, dtype=np.uint32))
    done = 1
    while done < count:
        tables = _byte_tables(columns)
        more = min(done, count - done)
        out[done:done + more] = _apply(tables, out[:more])
        # the map of 2 n steps is that of n steps, twice
        columns = _apply(tables, columns)
        done += more
    return out


def _byte_tables(columns):
    """uint32 [4, 256]: the image of every value of each byte under the linear map whose columns are given."""
    bits = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little").astype(bool)
    return np.stack([np.bitwise_xor.reduce(np.where(bits, columns[8 * k:8 * k + 8], np.uint32(0)),
                                           axis=1) for k in range(4)])


def _apply(tables, x):
    return functools.reduce(np.bitwise_xor, (tables[k][x >> np.uint32(8 * k) & np.uint32(255)] for k in range(4)))


# --- tables (SPEC 6) -------------------------------------------------------------------------------------------------

def _round(x):
    """Halves away from zero, in double."""
    return np.trunc(x + np.copysign(0.5, x))


def exp_table(cfg):
    """int32 [SOFTMAX_LUT_SIZE]: EXP of SPEC 6."""
    y = np.exp(-np.arange(cfg.SOFTMAX_LUT_SIZE) / cfg.SOFTMAX_EXP_SCALE) * 2.0 ** cfg.SOFTMAX_SCALE_BIT
    return np.where(y >= 1, _round(y), 0).astype(np.int32)


def gelu_table():
    """int8 [256], indexed by the byte of an int8: GELU of SPEC 6."""
    import math
    x = np.arange(256, dtype=np.uint8).view(np.int8) / 16.0
    y = 0.5 * x * (1 + np.array([math.erf(v / 1.41421356) for v in x]))
    return np.clip(_round(16 * y), -127, 127).astype(np.int8)


def rope_table(cfg, positions):
    """int32 [positions, HEAD_DIM / 2, 2]: cosine and sine of SPEC 6."""
    half = np.arange(cfg.HEAD_DIM // 2)
    angle = np.arange(positions)[:, None] * np.power(10000.0, -2.0 * half / cfg.HEAD_DIM)
    return np.stack([_round(np.cos(angle) * 2.0 ** cfg.ROPE_SCALE_BIT),
                     _round(np.sin(angle) * 2.0 ** cfg.ROPE_SCALE_BIT)],
                    axis=-1).astype(np.int32)


# --- fitness (SPEC 8) ------------------------------------------------------------------------------------------------

def chunk_fitness(losses, cfg):
    """int8 [members / 2] in {-1, 0, 1} from the losses (int64 [members], even member first) of one chunk.

    With LOSS = "exact" the losses count 1/256 logit units; the mean filter raises the mean in logit units to its
    power."""
    d = (losses[1::2].astype(np.int64) - losses[0::2]).astype(np.int64)
    if cfg.FAST_FITNESS:
        return np.sign(d).astype(np.int8)
    if cfg.CHUNK_MEAN_FILTER:
        m = float(np.mean(d, dtype=np.float64)) / cfg.LOSS_SCALE
        if m != 0:
            m = (1.0 if m > 0 else -1.0) * abs(m) ** cfg.CHUNK_MEAN_EXPONENT
        d = d + int(m * cfg.LOSS_SCALE)
    if not cfg.USE_ADAPTIVE_THRESHOLD:
        return np.sign(d).astype(np.int8)
    threshold = float(np.mean(np.abs(d), dtype=np.float64)) * float(np.float32(cfg.ADAPTIVE_THRESHOLD_ALPHA))
    return np.where(np.abs(d) < threshold, 0, np.where(d > 0, 1, -1)).astype(np.int8)


def pack_ternary(fitness):
    """bytes: five values of {-1, 0, 1} a byte, least significant digit first (-1 is digit 2)."""
    digits = np.zeros(packed_size(fitness.size) * 5, np.uint8)
    digits[:fitness.size] = np.where(fitness < 0, 2, fitness)
    return (digits.reshape(-1, 5) @ np.array([1, 3, 9, 27, 81], np.uint8)).astype(np.uint8).tobytes()


def packed_size(count):
    """Bytes of `count` packed values."""
    return -(-count // 5)


def unpack_ternary(data, count):
    """int8 [count] from packed bytes. Raises ValueError for a wrong size, a byte above 242 or a digit beyond
    `count`."""
    packed = np.frombuffer(data, np.uint8)
    if packed.size != packed_size(count):
        raise ValueError(f"{packed.size} bytes of fitness where {count} values need {packed_size(count)}")
    if packed.size and packed.max() > 242:
        raise ValueError(f"byte {int(packed.max())} is not five ternary digits")
    digits = _DIGITS[packed].reshape(-1)
    if digits[count:].any():
        raise ValueError("digits after the last value")
    return digits[:count]


_DIGITS = np.array([[(0, 1, -1)[b // 3 ** k % 3] for k in range(5)] for b in range(243)], np.int8)


# --- loss, windows, optimizer, sampling: what both engines are told --------------------------------------------------

def log_unit(cfg):
    """Loss units (1/256 logit) in one octave of Q, with 16 fractional bits: the factor of log2 in LOSS = "exact"."""
    return round(cfg.SOFTMAX_EXP_SCALE * np.log(2.0) * 256 * 65536)


def window_starts(cfg, n_tokens, step, first_pair, pairs):
    """int64 [pairs]: first token of each pair's window (SPEC 7). A group of pairs follows a stream: it begins where the
    share of the group before ends, and every step goes on by a window."""
    stride = 0 if cfg.USE_SAME_DATA else n_tokens // cfg.N_GROUPS
    groups = np.arange(first_pair, first_pair + pairs, dtype=np.int64) // (cfg.GROUP_SIZE // 2)
    return (step * cfg.SEQ_LEN + groups * stride) % (n_tokens - cfg.SEQ_LEN)


def windows(cfg, tokens, step, first_pair, pairs):
    """int32 [pairs, STATE_TOKENS + SEQ_LEN + 1]: what each pair's window begins from (the end of the data comes before
    its beginning), then its inputs and targets."""
    starts = window_starts(cfg, len(tokens), step, first_pair, pairs)
    return np.asarray(tokens[(starts[:, None] + np.arange(-cfg.STATE_TOKENS, cfg.SEQ_LEN + 1)) % len(tokens)], np.int32)


ADAMW, SGD, MUON, ZTEST = range(4)

# Muon (K. Jordan et al. 2024), in float32, the same bits on every machine because every sum is one chain of fma in a
# fixed order:   m = fma(m, MUON_MOMENTUM, -vote);  X = m / (|m| + 1e-7), written with its shorter side first
# (transposed where there are more rows)   |m|: element i of X, row after row, goes into chain i mod MUON_PARTS of
# squares; the chains are then added in halves, first to last   MUON_ROUNDS times:  A = X X^T,  B = fma(c, A A, b A),  X
# = a X + B X;  a product's element is one chain over k = 0, 1, ...   acc = fma(-lr, fma(w, decay, X * size), acc), then
# the threshold rule of SPEC 9 `size`, 0.2 sqrt(longer side), makes a step about as long as one of AdamW (J. Liu et al.
# 2025).
MUON_ROUNDS, MUON_PARTS, MUON_EPS, MUON_SIZE = 5, 1024, 1e-7, 0.2
MUON_COEFFICIENTS = {"quintic": (3.4445, -4.7750, 2.0315), "cubic": (1.5, -0.5, 0.0)}      # a, b, c of MUON_NS


class Optimizer(NamedTuple):
    """float32 constants of the update; rule: ADAMW, SGD (lr is then the factor of a vote), MUON, or ZTEST (lr is then
    the smallest vote that moves a weight, a whole number)."""
    rule: int
    lr: float
    beta1: float
    one_less_beta1: float
    beta2: float
    one_less_beta2: float
    eps: float
    decay: float
    momentum: float
    size: float


def least_vote(cfg, alpha):
    """The size of a vote which chance exceeds in about a share `alpha` of the weights: |vote| * 16 >= t * isqrt(pairs)
    * 256, where t / 16 is the quantile of the normal distribution, and 256 the variance of a product of two draws (1
    for signs). A whole number."""
    t = int(16 * -statistics.NormalDist().inv_cdf(alpha / 2))
    return -(-t * math.isqrt(cfg.N_PAIRS) * (256 if cfg.USE_CLT else 1) // 16)


def optimizer(cfg, lr, t):
    """The Optimizer constants of one Tensor for what cfg.learning_rate gives."""
    rule = MUON if cfg.USE_MUON and t.hidden else {"adamw": ADAMW, "sgd": SGD, "ztest": ZTEST}[cfg.OPTIMIZER]
    scale = cfg.MUON_LR_SCALE if rule == MUON else t.lr_scale
    rate = np.float32(np.float32(lr) * np.float32(scale)) if scale != 1.0 else np.float32(lr)
    if rule == SGD:
        rate = np.float32(float(rate) / cfg.N_PAIRS ** 0.5)
    elif rule == ZTEST:
        rate = np.float32(least_vote(cfg, lr))
    b1, b2 = np.float32(cfg.ADAM_BETA1), np.float32(cfg.ADAM_BETA2)
    one = np.float32(1)
    return Optimizer(rule, rate, b1, one - b1, b2, one - b2, np.float32(cfg.ADAM_EPS),
                     np.float32(cfg.ADAM_WEIGHT_DECAY),
                     np.float32(cfg.MUON_MOMENTUM), np.float32(MUON_SIZE) * np.sqrt(np.float32(max(t.rows, t.cols))))


def token_rates(cfg, tokens):
    """float32 [VOCAB_SIZE]: factors on the learning rate of the columns of tables by token, sqrt(share of the token in
    the training data / RARE_TOKENS), at most 1 (0 for a token that does not occur). Every operation is exact or rounded
    correctly: the same bits everywhere. Raises ValueError where there are no data."""
    if tokens is None:
        raise ValueError("RARE_TOKENS needs the training data: name them with -D INPUT_FILE=...")
    piece = 1 << 24
    counts = sum(np.bincount(tokens[at:at + piece], minlength=cfg.VOCAB_SIZE) for at in range(0, len(tokens), piece))
    return np.sqrt(np.minimum(1.0, counts / (len(tokens) * cfg.RARE_TOKENS))).astype(np.float32)


def muon_coefficients(cfg):
    """float32 a, b, c of the Newton-Schulz iteration."""
    return tuple(map(np.float32, MUON_COEFFICIENTS[cfg.MUON_NS]))


class Sampling(NamedTuple):
    temp: np.float32        # 0 is greedy
    floor: int              # smallest trunc((z - top) / temp) that is kept
    penalty: np.float32     # logit units taken once from every token seen


def sampling(cfg, temp=None, min_p=None, penalty=None):
    """Sampling settings in the kernels' units; None: the configuration's. Penalty in nats."""
    temp, min_p, penalty = (default if given is None else given for given, default in
                            ((temp, cfg.SAMPLING_TEMP), (min_p, cfg.SAMPLING_MIN_P),
                             (penalty, cfg.SAMPLING_PRESENCE_PENALTY)))
    unit = np.float32(cfg.SOFTMAX_EXP_SCALE)
    floor = int(np.float32(np.log(np.float32(min_p))) * unit) if min_p > 0 else -(1 << 31)
    return Sampling(np.float32(temp), floor, np.float32(penalty * cfg.SOFTMAX_EXP_SCALE))


def checked_prompt(cfg, prompt):
    """int32 [n]: the tokens of a prompt. Raises ValueError (one line) for one that is empty or not of this
    vocabulary."""
    prompt = np.array(prompt, np.int64).ravel()
    if not prompt.size or prompt.min() < 0 or prompt.max() >= cfg.VOCAB_SIZE:
        raise ValueError(f"a prompt must be one token or more, each below VOCAB_SIZE = {cfg.VOCAB_SIZE}")
    return prompt.astype(np.int32)


def sampling_random(seed, position):
    """The uint32 that draws the token after `position` of a sequence sampled under `seed` (SPEC 10)."""
    return np.uint32(hash32(seed + 999 + 555 * position, 0))


# --- the architecture for people -------------------------------------------------------------------------------------

def describe(cfg):
    """str: a table of the parameters, then what model, optimizer and a step take."""
    rows, arrays = [("component", "dimensions", "parameters", "layers", "total", "size")], tensors(cfg)
    for i, p in enumerate(table(cfg)):
        mine = [t for t in arrays if t.param == i]
        if not mine:
            continue
        total = sum(t.size for t in mine)
        rows.append((p.name, " x ".join(str(width(s, cfg)) for s in p.shape), f"{mine[0].size:,}",
                     str(len(mine)) if p.per_layer else "",
                     f"{total:,}", _bytes(total)))
    n, T, members = n_weights(cfg), cfg.SEQ_LEN, cfg.POPULATION_SIZE
    rows.append(("all", "", "", "", f"{n:,}", _bytes(n)))
    widths = [max(map(len, column)) for column in zip(*rows)]
    lines = ["  ".join(cell.ljust(w) if i < 2 else cell.rjust(w) for i,
                       (cell, w) in enumerate(zip(row, widths))).rstrip() for row in rows]
    rule = "-" * (sum(widths) + 2 * len(widths) - 2)
    lines = [lines[0], rule, *lines[1:-1], rule, lines[-1]]

    bytes_told = " (bytes)" if cfg.VOCAB_SIZE == 256 else ""
    if cfg.MODEL == "gru":
        token = products_per_token(cfg)
        model = f"recurrent, {cfg.N_LAYERS} layers of {cfg.HIDDEN_DIM}, {cfg.VOCAB_SIZE:,} tokens{bytes_told}; windows of {T}"
        work = f"{token:,} multiply-adds"
        if cfg.STATE_TOKENS:
            work += f", and {cfg.STATE_TOKENS / T / cfg.GROUP_SIZE:.0%} more for the state a window begins with"
            token *= 1 + cfg.STATE_TOKENS / T / cfg.GROUP_SIZE
    else:
        # scores and weighted values over (T + 1) / 2 positions on average
        attention = cfg.N_LAYERS * cfg.HIDDEN_DIM * (T + 1)
        token = products_per_token(cfg) + attention
        model = (f"{cfg.N_LAYERS} layers of {cfg.HIDDEN_DIM}, {cfg.N_HEADS} heads of {cfg.HEAD_DIM}, {T} positions, {cfg.VOCAB_SIZE:,} tokens"
                 f"{bytes_told}; head and embedding are one matrix")
        work = f"{products_per_token(cfg):,} multiply-adds in matrices, {attention:,} in attention"
    packed = -(-cfg.CHUNK_SIZE // 10), -(-cfg.N_PAIRS // 5)        # five pairs a byte
    sides = [sorted((t.rows, t.cols)) for t in arrays if optimizer(cfg, 1.0, t).rule == MUON]
    muon = MUON_ROUNDS * sum(short * short * (2 * long + short) for short, long in sides)
    facts = (
        ("model", model),
        ("optimizer", f"{_bytes(12 * n)} (m, v and accumulator, float32), noise scales {_bytes(n_overlay(cfg))}"),
        *([("", f"Muon for {len(sides)} matrices, {muon:.3g} multiply-adds an update")] if sides else []),
        ("a token", work),
        ("a step",
         f"{members:,} members ({members // 2:,} antithetic pairs, {cfg.N_CHUNKS} chunks) x {T} tokens = {members * T:,} tokens"),
        ("", f"{token * members * T:.3g} multiply-adds to evaluate, {n * cfg.N_PAIRS:.3g} to vote in the update"),
        ("on the wire",
         f"{cfg.N_CHUNKS} results of {packed[0]:,} bytes of fitness, then {packed[1]:,} bytes to every worker"),
    )
    return "\n".join(lines + [""] + [f"{name:12}{fact}" for name, fact in facts])


def _bytes(n):
    for unit in "B", "KiB", "MiB":
        if n < 1024:
            break
        n /= 1024
    else:
        unit = "GiB"
    return f"{n:.0f} {unit}" if unit == "B" else f"{n:.2f} {unit}"
