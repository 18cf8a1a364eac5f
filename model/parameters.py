"""A model as one table: from it come initialisation, canonical bytes, noise overlay, optimizer walk, `arch` and digests
(SPEC 2, 3, 6). TABLE is the transformer, GRU_TABLE the recurrent model of nano-egg. NumPy, without devices or sockets.
"""

import dataclasses
import functools
import hashlib
import math
from collections import namedtuple
from typing import NamedTuple

import numpy as np

from model import optimizers
from model.rules import uniform_noise
from model.seeds import INITIAL_SEED, first_seed


class Param(NamedTuple):
    """A row of the table. Widths: HIDDEN_DIM ("H"), 4 H ("4H"), VOCAB_SIZE ("V"), or the values of a byte ("256")."""
    name: str
    shape: tuple            # (rows = inputs, cols = outputs) of a matrix, (width,) of a vector
    a: int                  # noise offset of the output side; first offset of a vector
    b: object               # noise offset of the input side ("H": a + HIDDEN_DIM); second offset of a vector
    start: object = None    # initial value of a vector; None: random draws
    per_layer: bool = False
    lr_scale: float = 1.0   # factor on the learning rate
    multiplied: bool = True  # activations are multiplied by it: not by a matrix that is only looked up in
    needs: str = ""         # constant without which (0) the model does not have it


H, H4, V, BYTE = "H", "4H", "V", "256"

TABLE = (
    Param("embedding", (H, V), 0, H),
    Param("emb_bias", (H,), 50, 51, 0, lr_scale=0.1),
    Param("ntt_emb_1", (H, BYTE), 600, H, lr_scale=0.5, multiplied=False, needs="NTT_MODE"),
    Param("ntt_emb_2", (H, BYTE), 610, H, lr_scale=0.5, multiplied=False, needs="NTT_MODE"),
    Param("ntt_emb_3", (H, BYTE), 620, H, lr_scale=0.5, multiplied=False, needs="NTT_MODE"),
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
    Param("embedding", (H, V), 10, 11, multiplied=False),
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
LAYER_SEED = 1000           # seed distance of two layers


# One stored array: a Param of one layer. Offsets count elements of the flat arrays of `State`. param: index into the
# table; rows: inputs, 1 for a vector; cols: outputs, or the width of a vector; size: rows * cols; weights: first
# element in State.weights and in the optimizer arrays; seed_a, seed_b: added to a member's seed, streams of the output
# and of the input side (vector: first and second stream); overlay_a, overlay_b: first entry in State.overlay that
# scales stream a or b (vector: the same); looked_up: its columns are; product: activations are multiplied by it;
# hidden: a matrix from hidden units to hidden units, which Muon moves; by_token: a table with a column for every token;
# seen: SEEN_VOTES applies, not to the recurrent model's head, which every window teaches about all tokens.
Tensor = namedtuple("Tensor", (
    "param name layer rows cols size matrix weights seed_a seed_b overlay_a overlay_b lr_scale per_layer looked_up "
    "product hidden by_token seen"))


def table(cfg):
    return TABLE if cfg.MODEL == "transformer" else GRU_TABLE


def tensors(cfg):
    """Every stored array in canonical order: a list of Tensor."""
    out, weights, overlay = [], 0, 0
    widths = {H: cfg.HIDDEN_DIM, H4: 4 * cfg.HIDDEN_DIM, V: cfg.VOCAB_SIZE, BYTE: 256}
    for i, p in enumerate(table(cfg)):
        if p.needs and not getattr(cfg, p.needs):
            continue
        layers, matrix, lookup = cfg.N_LAYERS if p.per_layer else 1, len(p.shape) == 2, p.b == H
        rows, cols = ([1] + [widths[symbol] for symbol in p.shape])[-2:]
        # overlay order is row, then col; the "row" of what is looked up is the token or byte, which is its output side;
        # a vector has the second array alone, for both its streams
        first, second = (cols, rows) if lookup else (rows if matrix else 0, cols)
        product = matrix and p.multiplied
        for layer in range(layers):
            base, after = overlay + layer * first, overlay + layers * first + layer * second
            seed_a, seed_b = p.a + LAYER_SEED * layer, (p.a + cfg.HIDDEN_DIM if lookup else p.b) + LAYER_SEED * layer
            out.append(Tensor(
                param=i, name=p.name, layer=layer, rows=rows, cols=cols, size=rows * cols, matrix=matrix,
                weights=weights, seed_a=seed_a, seed_b=seed_b, overlay_a=base if lookup else after,
                overlay_b=base if matrix and not lookup else after, lr_scale=p.lr_scale, per_layer=p.per_layer,
                looked_up=lookup or not p.multiplied, product=product, hidden=product and V not in p.shape,
                by_token=V in p.shape, seen=p.name == "embedding"))
            weights += rows * cols
        overlay += layers * (first + second)
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
    """Divisor of a product over `inputs` inputs in the recurrent model (SPEC 13); the quotient is rounded down."""
    return (1 << cfg.FIXED_POINT) * math.isqrt(inputs)


@dataclasses.dataclass(eq=False)
class State:
    """What training changes, as flat arrays in canonical order: weights int8 [n], moments float32 [n, 3] (m, v, acc),
    overlay int8 [k]. `step` updates have been applied; `seed` is the seed of the next step's evaluation."""
    weights: np.ndarray
    moments: np.ndarray
    overlay: np.ndarray
    step: int = 0
    seed: int = INITIAL_SEED

    def digests(self):
        """SHA-256 (hex) of weights, moments and overlay: what golden data record."""
        arrays = self.weights, self.moments, self.overlay
        return tuple(hashlib.sha256(np.ascontiguousarray(x)).hexdigest() for x in arrays)


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
        if params[t.param].start is not None:
            weights[t.weights:t.weights + t.size] = params[t.param].start
    # drawn matrix by matrix, layer by layer (the stored order is parameter by parameter)
    drawn = sorted((t for t in arrays if params[t.param].start is None), key=lambda t: (t.per_layer, t.layer, t.param))
    draws = _xorshift(42, sum(t.size for t in drawn))
    for t in drawn:
        mine, draws = np.split(draws, [t.size])
        mask = cfg.TOKEN_MASK if t.by_token and cfg.TOKEN_MASK >= 0 else cfg.HOST_MASK
        matrix = uniform_noise(mine, mask, cfg.HOST_GAUSSIAN).reshape(t.rows, t.cols)
        weights[t.weights:t.weights + t.size] = to_canonical(matrix)
    overlay = np.full(n_overlay(cfg), cfg.ADAPTIVE_NOISE_INIT, np.int8)
    return State(weights, np.zeros((weights.size, 3), np.float32), overlay, 0, first_seed(cfg))


def to_canonical(matrix):
    """[rows, cols, ...] -> flat [rows / 4, cols, 4, ...]."""
    rows, cols, *rest = matrix.shape
    return np.ascontiguousarray(matrix.reshape(rows // 4, 4, cols, *rest).swapaxes(1, 2)).reshape(-1, *rest)


def from_canonical(flat, rows, cols):
    """Flat [rows / 4, cols, 4, ...] -> [rows, cols, ...]."""
    rest = flat.shape[1:]
    return np.ascontiguousarray(flat.reshape(rows // 4, cols, 4, *rest).swapaxes(1, 2)).reshape(rows, cols, *rest)


def _xorshift(state, count):
    """uint32 [count]: successive states of xorshift32 after `state`. The step is linear over bits, so a known run of n
    states gives the next n by one linear map, applied bytewise from tables; the run doubles."""
    def step(x):
        x = x ^ x << np.uint32(13)
        x = x ^ x >> np.uint32(17)
        return x ^ x << np.uint32(5)

    out, done = np.empty(count, np.uint32), 1
    out[:1] = step(np.array([state], np.uint32))
    # the image of every single bit under one step
    columns = step(np.uint32(1) << np.arange(32, dtype=np.uint32))
    while done < count:
        more = min(done, count - done)
        out[done:done + more] = _applied(columns, out[:more])
        columns = _applied(columns, columns)                 # the map of 2 n steps is that of n steps, twice
        done += more
    return out


def _applied(columns, x):
    """uint32: the image of x under the linear map over bits whose columns are given, by tables for the bytes of x."""
    bits = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little").astype(bool)
    tables = (np.bitwise_xor.reduce(np.where(bits, columns[k:k + 8], np.uint32(0)), axis=1) for k in range(0, 32, 8))
    return functools.reduce(np.bitwise_xor, (table[x >> np.uint32(8 * k) & np.uint32(255)]
                                             for k, table in enumerate(tables)))


# --- the architecture for people -------------------------------------------------------------------------------------

def describe(cfg):
    """str: a table of the parameters, then what model, optimizer and a step take."""
    n, T, members, arrays = n_weights(cfg), cfg.SEQ_LEN, cfg.POPULATION_SIZE, tensors(cfg)
    rows = [("component", "dimensions", "parameters", "layers", "total", "size")]
    for t in (t for t in arrays if t.layer == 0):
        count = cfg.N_LAYERS if t.per_layer else 1
        rows.append((t.name, f"{t.rows} x {t.cols}" if t.matrix else str(t.cols), f"{t.size:,}",
                     str(count) if t.per_layer else "", f"{count * t.size:,}", _bytes(count * t.size)))
    rows.append(("all", "", "", "", f"{n:,}", _bytes(n)))
    widths = [max(map(len, column)) for column in zip(*rows)]
    lines = ["  ".join(cell.ljust(w) if i < 2 else cell.rjust(w) for i, (cell, w) in enumerate(zip(row, widths)))
             .rstrip() for row in rows]
    rule = "-" * (sum(widths) + 2 * len(widths) - 2)

    tokens = f"{cfg.VOCAB_SIZE:,} tokens{' (bytes)' if cfg.VOCAB_SIZE == 256 else ''}"
    token = products_per_token(cfg)
    if cfg.MODEL == "gru":
        model = f"recurrent, {cfg.N_LAYERS} layers of {cfg.HIDDEN_DIM}, {tokens}; windows of {T}"
        work = f"{token:,} multiply-adds"
        if cfg.STATE_TOKENS:
            more = cfg.STATE_TOKENS / T / cfg.GROUP_SIZE
            work += f", and {more:.0%} more for the state a window begins with"
            token *= 1 + more
    else:
        # scores and weighted values over (T + 1) / 2 positions on average
        attention = cfg.N_LAYERS * cfg.HIDDEN_DIM * (T + 1)
        model = (f"{cfg.N_LAYERS} layers of {cfg.HIDDEN_DIM}, {cfg.N_HEADS} heads of {cfg.HEAD_DIM}, {T} positions, "
                 f"{tokens}; head and embedding are one matrix")
        work = f"{token:,} multiply-adds in matrices, {attention:,} in attention"
        token += attention
    sides = [sorted((t.rows, t.cols)) for t in arrays if optimizers.constants(cfg, 1.0, t).rule == optimizers.MUON]
    muon = optimizers.MUON_ROUNDS * sum(short * short * (2 * long + short) for short, long in sides)
    falling, contexts = (", ".join(f"{value} from step {step:,}" for step, value in schedule)
                         for schedule in (cfg.SIGMA_SCHEDULE, cfg.SOFT_TARGETS))
    facts = (
        ("model", model),
        ("optimizer", f"{_bytes(12 * n)} (m, v and accumulator, float32), noise scales {_bytes(n_overlay(cfg))}"),
        *([("", f"Muon for {len(sides)} matrices, {muon:.3g} multiply-adds an update")] if sides else []),
        *([("noise", f"SIGMA_SHIFT {cfg.SIGMA_SHIFT}, then {falling}")] if falling else []),
        *([("targets", f"{cfg.TARGETS} a position; context in tokens: {contexts}")] if contexts else []),
        ("a token", work),
        ("a step", f"{members:,} members ({members // 2:,} antithetic pairs, {cfg.N_CHUNKS} chunks) x {T} tokens = "
                   f"{members * T:,} tokens"),
        ("", f"{token * members * T:.3g} multiply-adds to evaluate, {n * cfg.N_PAIRS:.3g} to vote in the update"),
        ("on the wire", f"{cfg.N_CHUNKS} results of {-(-cfg.CHUNK_SIZE // 10):,} bytes of fitness, then "
                        f"{-(-cfg.N_PAIRS // 5):,} bytes to every worker"))
    return "\n".join([lines[0], rule, *lines[1:-1], rule, lines[-1], "", *(f"{name:12}{fact}" for name, fact in facts)])


def _bytes(n):
    return next((f"{n / size:.2f} {unit}" for size, unit in ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB"))
                 if n >= size), f"{n} B")
