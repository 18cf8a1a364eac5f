"""Unit trials in random configurations: the plain reading, its update included, in the place of an engine."""

import copy
import dataclasses
import hashlib
import math

import numpy as np

import egg_config
from engine import hardware
from model import parameters, rules, soft_targets, steps
from model.reading import votes_of_windows

GPU_KINDS = "wgmma", "mma"


def random_configuration(seed, widest=128):
    """(Config, training tokens) drawn by a seed, every third one with the recurrent model: few enough sequences for the
    plain reading."""
    rng = np.random.default_rng(seed)

    def one_of(*values):
        return values[rng.integers(len(values))]

    widths = [H for H in (64, 64, 96, 128, 160, 192, 256, 320, 512, 768, 1024) if H <= widest]
    H, loss = one_of(*widths), one_of("exact", "exact", "deggs")
    windows = one_of(2, 4, 6, 10) if H <= 320 else one_of(2, 4)
    layers = one_of(1, 1, 2, 3, 4) if H <= 320 else one_of(1, 2)
    if seed % 3:
        of_model = dict(
            MODEL="transformer", SEQ_LEN=8 * int(rng.integers(1, 6)), HEAD_DIM=one_of(*(D for D in (32, 64, 128)
                                                                                       if H % D == 0)),
            SHIFT_MLP_UP=one_of(7, 8, 6), SHIFT_MLP_DOWN=one_of(7, 9), SHIFT_OUT=one_of(7, 8),
            SHIFT_ATTN=one_of(7, 8, 10, 11), SHIFT_LOGIT=one_of(8, 6))
    else:
        of_model = dict(
            MODEL="gru", SEQ_LEN=int(rng.integers(8, 40)), STATE_TOKENS=one_of(0, 0, 5, 17), MLP_RELU=one_of(0, 1),
            FIXED_POINT=one_of(4, 4, 3))
    cfg = egg_config.make(
        PERTURB="units", HIDDEN_DIM=H, N_LAYERS=layers, VOCAB_SIZE=one_of(256, 256, 257, 301, 1000), **of_model,
        CHUNK_SIZE=windows, POPULATION_SIZE=one_of(1, 2, 3) * windows, LOSS=loss,
        HOST_GAUSSIAN=1, HOST_MASK=one_of(7, 15, 42), ADAPTIVE_NOISE_MODE=0, SOFTMAX_EXP_SCALE=one_of(6.0, 12.0, 23.0),
        ADAPTIVE_THRESHOLD_ALPHA=one_of(0.77, 0.1, 1.5), USE_ADAPTIVE_THRESHOLD=one_of(1, 1, 0),
        LR_SCHEDULE=((0, 1.5), (1, one_of(0.3, 1.0))), ADAM_BETA1=one_of(0.5, 0.9), ADAM_WEIGHT_DECAY=one_of(0.0, 0.01),
        NOISE_REUSE=one_of(1, 1, 2), USE_SAME_DATA=one_of(0, 0, 1),
        SOFT_TARGETS=one_of((), ((0, 1),), ((0, 2),)) if loss == "exact" else ())
    tokens = rng.integers(0, 5, 400) * 50 % cfg.VOCAB_SIZE
    levels = one_of(1, 2, 3, 7)
    cfg = cfg.changed(VOTE_LEVELS=levels, LOCAL_STEPS=one_of(1, 2, 3) if levels == 7 else 1)
    return cfg, tokens.astype(np.uint8 if cfg.VOCAB_SIZE == 256 else np.uint32)


def step_of(engine, cooling=None):
    """([(packed digits, loss) of a chunk], weights changed): a whole step of an engine; cooling: by default one that
    follows from the digits."""
    cfg = engine.cfg
    found = [engine.evaluate(first, cfg.CHUNK_SIZE) for first in range(0, cfg.POPULATION_SIZE, cfg.CHUNK_SIZE)]
    return found, engine.update(steps.join_digits(cfg, [packed for packed, _ in found],
                                                   found[0][0][0] % 20 if cooling is None else cooling))


def fma(a, b, c):
    """float32, rounded once (in extended precision, where the product is exact, first)."""
    return (np.asarray(a, np.longdouble) * b + c).astype(np.float32)


def chunk_digits(cfg, votes):
    """int8 [CHUNK_DIGITS]: the digits of {tensor: int64 votes}."""
    digits = np.zeros(cfg.CHUNK_DIGITS, np.int8)
    for tensor, sums in votes.items():
        voted = digits_of(cfg, sums)
        digits[tensor.span] = parameters.to_canonical(voted) if tensor.matrix else voted
    return digits


def digits_of(cfg, votes):
    """Votes (int64) in units of twice the least vote, rounded to the nearest, halves away from 0, -n to n."""
    alpha = float(np.float32(cfg.ADAPTIVE_THRESHOLD_ALPHA)) if cfg.USE_ADAPTIVE_THRESHOLD else 0
    least = max(1, math.ceil(np.abs(votes).sum() / votes.size * alpha))
    return np.sign(votes) * np.minimum((np.abs(votes) + least) // (2 * least), cfg.VOTE_LEVELS)


class PlainEngine:
    """The plain reading of SPEC 9 (AdamW), 21 and 23, with the verbs of an engine. local: the engine of local steps,
    whose `load`, `evaluate`, `move` and `state` are used."""

    def __init__(self, cfg, tokens, local=None):
        self.cfg, self.tokens, self.whole = cfg, tokens, parameters.initial_state(cfg)
        self._followers = soft_targets.Tables(cfg, tokens)
        self._local = local or (PlainEngine(cfg.changed(LOCAL_STEPS=1), tokens) if cfg.LOCAL_STEPS > 1 else None)

    def load(self, state):
        self.whole = copy.deepcopy(state)

    def state(self):
        return self.whole

    def short_run(self, first, count):
        """SPEC 23."""
        cfg, before, local, loss = self.cfg, self.whole, self._local, 0
        local.load(dataclasses.replace(before, step=before.step * cfg.LOCAL_STEPS))
        for k in range(cfg.LOCAL_STEPS):
            packed, its = local.evaluate(first, count)
            local.move(rules.unpacked_digits(packed, cfg.CHUNK_DIGITS, 15).astype(np.int32), self.rate(k))
            loss += its
        after, digits, f = local.state(), np.zeros(cfg.CHUNK_DIGITS, np.int8), np.float32
        for t in parameters.tensors(cfg):
            span, muon = t.span, cfg.USE_MUON and t.hidden
            moved = f(after.weights[span].astype(int) - before.weights[span]) \
                + (after.moments[span, 2] - before.moments[span, 2])
            q = np.rint(moved * f(1 / max(1e-30, self.unit(t, self.rate())))).astype(int)
            m = after.moments[span, 0]
            digits[span] = np.clip(q, -2, 2) * 3 + (m > 3) - (m < -3).astype(int) if muon else np.clip(q, -7, 7)
        return steps.pack_digits(digits, 15), loss

    def rate(self, k=0):
        cooling = int(self.whole.overlay[0])
        return self.cfg.learning_rate(self.whole.step * self.cfg.LOCAL_STEPS + k) * (
            1 - (cooling if 0 <= cooling < 20 else 0) / 20)

    def unit(self, t, rate):
        muon = self.cfg.USE_MUON and t.hidden
        return rate * (self.cfg.MUON_LR_SCALE if muon else t.lr_scale) * ((0.28 if muon else 0.4)
                                                                          * math.sqrt(self.cfg.LOCAL_STEPS))

    def add_moves(self, votes, cooling):
        """votes int32 [CHUNK_DIGITS], the sums of a step of which chunks sent moves; number of weights changed."""
        cfg, state, changed, f = self.cfg, self.whole, 0, np.float32
        n, b2 = cfg.N_CHUNKS, cfg.ADAM_BETA2 ** cfg.LOCAL_STEPS
        for t in parameters.tensors(cfg):
            q, e = np.divmod(votes[t.span] + n, 2 * n + 1)
            e, w, (m, v, acc) = e - n, state.weights[t.span].astype(np.int32), state.moments[t.span].T
            muon = cfg.USE_MUON and t.hidden
            if muon:
                m = f(e) * f(6 / n)
            else:
                q = 3 * q + e
                unit = 0.4 * math.sqrt(cfg.LOCAL_STEPS)
                m, v = 0 * m, fma(f(q * q), f((1 - b2) * unit ** 2 / (cfg.LOCAL_STEPS * n)), v * f(b2))
                v = np.clip(v, f(0.02), f(200))
            acc = fma(f(q), f(self.unit(t, self.rate()) * (1.4 if n > 1 else 1) / n), acc)
            moved = np.clip(w + np.trunc(acc).astype(int), -127, 127)
            state.weights[t.span] = moved
            state.moments[t.span] = np.stack([m, v, np.clip(acc - f(moved - w), f(-1), f(1))], 1)
            changed += np.count_nonzero(moved != w)
        state.overlay[0] = cooling
        state.seed, state.step = steps.next_seed(state.seed, state.step, cfg.NOISE_REUSE), state.step + 1
        return changed

    def evaluate(self, first, count):
        cfg, state = self.cfg, self.whole
        if self._local:
            return self.short_run(first, count)
        known = self._followers.at_step(state.step)
        windows = soft_targets.windows(cfg, self.tokens, known, state.step, state.seed, first, count)
        votes, loss = votes_of_windows(cfg, state, windows, first)
        return steps.pack_digits(chunk_digits(cfg, votes), 2 * cfg.VOTE_LEVELS + 1), loss

    def update(self, fitness):
        cfg = self.cfg
        steps.check_step(cfg, fitness)
        if cfg.N_CHUNKS <= 2:
            digits = rules.unpacked_digits(fitness[:-1], cfg.N_CHUNKS * cfg.CHUNK_DIGITS, 2 * cfg.VOTE_LEVELS + 1)
            if self._local:                          # 3 q + e becomes q (2 N + 1) + e
                q = np.floor_divide(digits + 1, 3)
                digits = q * (2 * cfg.N_CHUNKS + 1) + digits - 3 * q
            votes = digits.reshape(cfg.N_CHUNKS, -1).sum(0, dtype=np.int32)
        else:                                        # a plane for each digit of a byte
            most = (4 * cfg.N_CHUNKS + 3 if self._local else cfg.VOTE_LEVELS) * cfg.N_CHUNKS
            kind, planes = np.int8 if most < 128 else np.int16, {1: 5, 2: 3}
            votes = np.frombuffer(fitness[:-1], kind).reshape(planes.get(cfg.VOTE_LEVELS, 2), -1).T.ravel()
            votes = votes.astype(np.int32)
        if self._local:
            return self.add_moves(votes, fitness[-1])
        return self.move(votes, cfg.learning_rate(self.whole.step) * (1 - fitness[-1] / 20))

    def move(self, votes, rate):
        """AdamW's update by votes int32 [CHUNK_DIGITS]; number of weights changed."""
        cfg, state, changed, f, rate = self.cfg, self.whole, 0, np.float32, np.float32(rate)
        b1, b2 = f(cfg.ADAM_BETA1), f(cfg.ADAM_BETA2)
        for t in parameters.tensors(cfg):
            g, w = -votes[t.span].astype(f), state.weights[t.span].astype(np.int32)
            m, v, acc = state.moments[t.span].T
            m = fma(m, b1, g * (f(1) - b1))
            v = fma(g * g, f(1) - b2, v * b2)
            u = fma(w.astype(f), f(cfg.ADAM_WEIGHT_DECAY) if t.matrix else f(0), m / (np.sqrt(v) + f(cfg.ADAM_EPS)))
            acc = fma(-rate, u, acc)
            moved = np.clip(w + (acc >= 1).astype(np.int32) - (acc <= -1), -127, 127)
            state.weights[t.span] = moved
            acc = np.where(moved != w, acc - (moved - w).astype(f), np.clip(acc, f(-1), f(1)))
            state.moments[t.span] = np.stack([m, v, acc], 1)
            changed += np.count_nonzero(moved != w)
        state.seed, state.step = steps.next_seed(state.seed, state.step, cfg.NOISE_REUSE), state.step + 1
        return changed

    def digest(self):
        return parameters.digest_of(self.whole)


def course(engine, steps=3):
    """[what each step gave]: of every chunk a hash of its digits and its loss; weights changed; digest of the state."""
    told = []
    for _ in range(steps):
        found, changed = step_of(engine)
        told.append([[hashlib.sha256(packed).hexdigest()[:16], int(loss)] for packed, loss in found]
                    + [int(changed), engine.digest().hex()])
    return told


def engine_of(kind, seed):
    """kind: "plain", or an instruction set."""
    cfg, tokens = random_configuration(seed, 1024)
    if kind == "plain":
        return PlainEngine(cfg, tokens)
    if kind in GPU_KINDS:
        from engine import cuda_engine
        return cuda_engine.CudaEngine(cfg.changed(TENSOR_CORES=kind), tokens)
    from engine import cpu_engine
    return cpu_engine.CpuEngine(cfg.changed(SIMD=kind), tokens, threads=1 + seed % min(2, hardware.cores()))
