"""A model as one table (SPEC 2, 3), which gives the initial weights, the canonical order of all arrays, the noise
overlay and the walk of the optimizer; its state, and the digest of that. TABLE is the transformer, GRU_TABLE the
recurrent model of nano-egg.
"""

import dataclasses
import math
import struct
from typing import NamedTuple

import numpy as np

from model.rules import uniform_noise
from model.steps import INITIAL_SEED, first_seed


H = "H"                     # HIDDEN_DIM
H4 = "4H"                   # 4 * HIDDEN_DIM
V = "V"                     # VOCAB_SIZE
BYTE = "256"                # the values of a byte


class Param(NamedTuple):
    """A row of the table."""
    name: str
    shape: tuple            # of the widths above: (rows = inputs, cols = outputs) of a matrix, (width,) of a vector
    a: int                  # noise offset of the output side, a + 1 of the input side; both offsets of a vector
    per_layer: bool = False
    start: int = 0          # initial value of a vector; matrices are drawn
    lr_scale: float = 1.0   # factor on the learning rate
    by_row: bool = False    # the offset of the input side is a + HIDDEN_DIM, and the overlay has the columns first
    multiplied: bool = True  # whether activations are multiplied by the matrix; False: its columns are looked up only
    needs: str = ""         # the model has the array only if this constant is not 0


TABLE = (
    Param("embedding", (H, V), 0, by_row=True),
    Param("emb_bias", (H,), 50, lr_scale=0.1),
    *(Param(f"ntt_emb_{byte}", (H, BYTE), 590 + 10 * byte, lr_scale=0.5, by_row=True, multiplied=False,
            needs="NTT_MODE") for byte in (1, 2, 3)),
    Param("ln_init", (H,), 500, start=16),
    Param("ln_init_bias", (H,), 502),
    Param("w_emb_mlp_up", (H, H4), 510),
    Param("mlp_emb_bias_up", (H4,), 514),
    Param("w_emb_mlp_down", (H4, H), 512),
    Param("mlp_emb_bias_down", (H,), 516),
    Param("ln_1", (H,), 100, True, 16),
    Param("ln_1_bias", (H,), 110, True),
    Param("w_q", (H, H), 200, True),
    Param("w_k", (H, H), 202, True),
    Param("w_v", (H, H), 204, True),
    Param("w_o", (H, H), 206, True),
    Param("ln_2", (H,), 300, True, 16),
    Param("ln_2_bias", (H,), 310, True),
    Param("w_up", (H, H4), 400, True),
    Param("mlp_bias_up", (H4,), 410, True),
    Param("w_down", (H4, H), 402, True),
    Param("mlp_bias_down", (H,), 412, True),
    Param("ln_f", (H,), 900, start=16),
    Param("ln_f_bias", (H,), 910),
)
GRU_TABLE = (
    Param("embedding", (H, V), 10, multiplied=False),
    Param("head", (H, V), 20),
    Param("ln_1", (H,), 100, True, 16),
    Param("w_f", (H, H), 200, True),
    Param("u_f", (H, H), 202, True),
    Param("b_f", (H,), 210, True),
    Param("w_h", (H, H), 204, True),
    Param("u_h", (H, H), 206, True),
    Param("b_h", (H,), 212, True),
    Param("ln_2", (H,), 300, True, 16),
    Param("w_up", (H, H4), 400, True),
    Param("w_down", (H4, H), 402, True),
    Param("ln_f", (H,), 900, start=16),
)
LAYER_SEED = 1000           # seed distance of two layers


class Tensor(NamedTuple):
    """One stored array: a Param of one layer. Offsets count elements of the flat arrays of `State`."""
    param: int              # index into the table
    name: str
    layer: int
    rows: int               # inputs; 1 of a vector
    cols: int               # outputs, or the width of a vector
    size: int               # rows * cols
    matrix: bool
    weights: int            # first element in State.weights and State.moments
    seed_a: int             # added to a member's seed: noise stream of the output side; first stream of a vector
    seed_b: int             # ... of the input side; second stream of a vector
    overlay_a: int          # first entry in State.overlay that scales stream a
    overlay_b: int          # ... stream b; of a vector the same as overlay_a
    lr_scale: float
    per_layer: bool
    looked_up: bool         # a token or byte selects one of its columns
    product: bool           # activations are multiplied by it
    hidden: bool            # a matrix from hidden units to hidden units, which Muon moves

    @property
    def span(self):
        """Its elements of State.weights and State.moments."""
        return slice(self.weights, self.weights + self.size)


def table(cfg):
    return TABLE if cfg.MODEL == "transformer" else GRU_TABLE


def tensors(cfg):
    """[Tensor]: every stored array in canonical order."""
    all_tensors, weights, overlay = [], 0, 0
    widths = {H: cfg.HIDDEN_DIM, H4: 4 * cfg.HIDDEN_DIM, V: cfg.VOCAB_SIZE, BYTE: 256}
    for i, p in enumerate(table(cfg)):
        if p.needs and not getattr(cfg, p.needs):
            continue
        layers = cfg.N_LAYERS if p.per_layer else 1
        matrix = len(p.shape) == 2
        rows, cols = ([1] + [widths[symbol] for symbol in p.shape])[-2:]
        # overlay order is row, then col; the "row" of a table by_row is the token or byte, which is its output side; a
        # vector has the second array alone, for both its streams
        first, second = (cols, rows) if p.by_row else (rows if matrix else 0, cols)
        product = matrix and p.multiplied
        for layer in range(layers):
            before = overlay + layer * first
            after = overlay + layers * first + layer * second
            all_tensors.append(Tensor(
                param=i, name=p.name, layer=layer, rows=rows, cols=cols, size=rows * cols, matrix=matrix,
                weights=weights, seed_a=p.a + LAYER_SEED * layer,
                seed_b=p.a + (cfg.HIDDEN_DIM if p.by_row else 1) + LAYER_SEED * layer,
                overlay_a=before if p.by_row else after, overlay_b=before if matrix and not p.by_row else after,
                lr_scale=p.lr_scale, per_layer=p.per_layer, looked_up=p.by_row or not p.multiplied, product=product,
                hidden=product and V not in p.shape))
            weights += rows * cols
        overlay += layers * (first + second)
    return all_tensors


def n_weights(cfg):
    last = tensors(cfg)[-1]
    return last.weights + last.size


def n_overlay(cfg):
    last = tensors(cfg)[-1]
    return last.overlay_a + last.cols


def products_per_token(cfg):
    """Multiply-adds of the weight matrices for one token, without attention."""
    return sum(t.size for t in tensors(cfg) if t.product)


def divisor(cfg, inputs):
    """Divisor of a product over `inputs` inputs in the recurrent model (SPEC 13); the quotient is rounded down."""
    return (1 << cfg.FIXED_POINT) * math.isqrt(inputs)


@dataclasses.dataclass(eq=False)
class State:
    """What training changes, as flat arrays in canonical order: weights int8 [n], moments float32 [n, 3] (m, v, acc),
    overlay int8 [k]. step: number of updates that were applied; seed: of the next step's evaluation."""
    weights: np.ndarray
    moments: np.ndarray
    overlay: np.ndarray
    step: int = 0
    seed: int = INITIAL_SEED


def check_state(state):
    """Raises ValueError (one line) for a State that no training produces and no update can handle."""
    if not np.isfinite(state.moments).all():
        raise ValueError("it holds moments that are not finite numbers")
    if (state.moments[:, 1] < 0).any():
        raise ValueError("it holds mean squares below 0")
    if min(state.weights.min(), state.overlay.min(initial=0)) < -127:
        raise ValueError("it holds a weight or noise scale of -128")


def from_raw(cfg, raw, step, seed):
    """The State in the bytes of weights, moments and overlay. Raises ValueError, see `check_state`."""
    n, raw = n_weights(cfg), np.frombuffer(raw, np.int8)
    state = State(raw[:n], raw[n:13 * n].view("<f4").reshape(-1, 3), raw[13 * n:], step, seed)
    check_state(state)
    return state


def initial_state(cfg):
    """State before the first update (SPEC 3)."""
    weights = np.zeros(n_weights(cfg), np.int8)
    arrays, params = tensors(cfg), table(cfg)
    for t in arrays:
        if not t.matrix:
            weights[t.span] = params[t.param].start
    # drawn matrix by matrix, layer by layer (the stored order is parameter by parameter)
    drawn = sorted((t for t in arrays if t.matrix), key=lambda t: (t.per_layer, t.layer, t.param))
    draws = _xorshift(42, sum(t.size for t in drawn))
    for t in drawn:
        matrix = uniform_noise(draws[:t.size], cfg.HOST_MASK, cfg.HOST_GAUSSIAN).reshape(t.rows, t.cols)
        draws = draws[t.size:]
        weights[t.span] = to_canonical(matrix)
    overlay = np.full(n_overlay(cfg), cfg.ADAPTIVE_NOISE_INIT, np.int8)
    return State(weights, np.zeros((weights.size, 3), np.float32), overlay, 0, first_seed(cfg))


def to_canonical(matrix):
    """[rows, cols, ...] -> flat [rows / 4, cols, 4, ...]."""
    rows, cols, *rest = matrix.shape
    return np.ascontiguousarray(matrix.reshape(rows // 4, 4, cols, *rest).swapaxes(1, 2)).reshape(-1, *rest)


def from_canonical(flat, cols):
    """Flat [rows / 4, cols, 4, ...] -> [rows, cols, ...]."""
    rest = flat.shape[1:]
    return np.ascontiguousarray(flat.reshape(-1, cols, 4, *rest).swapaxes(1, 2)).reshape(-1, cols, *rest)


def _xorshift(state, count):
    """uint32 [count]: successive states of xorshift32 after `state`. The step is linear over bits, so a known run of n
    states gives the next n by one linear map; the run doubles."""
    def step(x):
        x = x ^ x << np.uint32(13)
        x = x ^ x >> np.uint32(17)
        return x ^ x << np.uint32(5)

    out, done = np.empty(count, np.uint32), 1
    out[:1] = step(np.array([state], np.uint32))
    # the image of every single bit under one step
    columns = step(np.uint32(1) << np.arange(32, dtype=np.uint32))
    while done < count:
        count_now = min(done, count - done)
        out[done:done + count_now] = _applied(columns, out[:count_now])
        columns = _applied(columns, columns)                 # the map of 2 n steps is that of n steps, twice
        done += count_now
    return out


def _applied(columns, x):
    """uint32: the image of x under the linear map over bits whose columns are given."""
    out = np.zeros_like(x)
    for bit, column in enumerate(columns):
        out ^= (x >> np.uint32(bit) & np.uint32(1)) * column
    return out


# --- the digest of a state --------------------------------------------------------------------------------------------

# By it replicas are compared at every step (SPEC 16): cheap, and the same on every engine. It finds every replica that
# has drifted. It is not cryptographic: two states of one digest can be constructed, but that gains a liar nothing
# (cluster.collector, docs/SECURITY.md).
FIRST_WORD = 3                  # number of the first word of the weights: step and seed are before it
PIECE = 1 << 15            # words that NumPy mixes at a time, so that they stay in the cache

u64 = np.uint64
WORD_STEP = u64(0x9E3779B97F4A7C15)
FACTOR_1 = u64(0xBF58476D1CE4E5B9)
FACTOR_2 = u64(0x94D049BB133111EB)
LOW = u64(0xFFFFFFFF)


def mixed(word, number):
    """The uint64 that a word adds to the first sum. For NumPy arrays, and compiled by both engines."""
    x = word + number * WORD_STEP
    x = (x ^ (x >> u64(30))) * FACTOR_1
    x = (x ^ (x >> u64(27))) * FACTOR_2
    return x ^ (x >> u64(31))


def halves(x):
    """The uint64 that a mixed word adds to the second sum."""
    return (x & LOW) * (x >> u64(32))


class Digest:
    """The digest of bytes that come in pieces. number: of the next word."""

    def __init__(self, step, seed):
        self.number = 1
        self._rest = b""
        self._sums = [0, 0]
        self.update(struct.pack("<QQ", step, seed))

    def update(self, data):
        """Adds a bytes-like object."""
        data = self._rest + data if self._rest else data
        words = np.frombuffer(data, "<u8", len(data) // 8)
        self._rest = bytes(data[8 * words.size:])
        for at in range(0, words.size, PIECE):
            piece = words[at:at + PIECE]
            x = mixed(piece, np.arange(self.number, self.number + piece.size, dtype=u64))
            self.add(int(x.sum(dtype=u64)), int(halves(x).sum(dtype=u64)))
            self.number += piece.size

    def add(self, first, second):
        """Adds the sums of words that the caller has mixed; the caller also advances `number`."""
        self._sums = [(mine + its) % (1 << 64) for mine, its in zip(self._sums, (first, second))]

    def digest(self):
        """bytes [16]."""
        if self._rest:
            self.update(bytes(-len(self._rest) % 8))
        return struct.pack("<QQ", *self._sums)


def digest_of(state):
    """bytes [16]: the digest of a State."""
    digest = Digest(state.step, state.seed)
    for part in (state.weights, state.moments, state.overlay):
        digest.update(np.ascontiguousarray(part).data.cast("B"))
    return digest.digest()
