"""The rules of both models and of their training, each written once (SPEC 2, 4, 5, 7, 9, 10).

A rule is a plain function of scalars. A builder makes the rules for one compiler (jit) and its Arithmetic (ops):
`engine.cpu_rules` for numba.njit, `kernels.rules` for numba.cuda.jit. A switch is an argument of the builder, a number
one of the rule. Every integer result is cast, because numba's promotion of types differs between compilers.
"""

import math
from collections import namedtuple
from types import SimpleNamespace

import numpy as np

from model import steps

# The operations besides casts; integers wrap, floats are IEEE, rounded once to nearest, never contracted. trunc: int32
# of a float32, toward zero, saturating; trunc_64th: int32 / 64, toward zero; divide(p, d): int32 p / int32 d, toward
# zero, for |p| < 2^23 and d > 0; log2_floor: of a positive int64; bits: int32 of a float32, float_of: back; nearest:
# int32 of a float32, ties to even; the others of float32.
Arithmetic = namedtuple("Arithmetic", "trunc trunc_64th divide log2_floor sqrt fma add sub mul div bits float_of "
                        "nearest")
i32 = np.int32
u32 = np.uint32
f32 = np.float32
i64 = np.int64
u64 = np.uint64
TARGET_STREAM = 1 << 30      # first index of the draws of soft targets; noise has smaller ones
DITHER_STREAM = 1 << 31      # of the dither of the head's errors
DITHER_STEP = 40503          # of the dither from token to token: 2^16 times the golden ratio, odd

ADAMW = 0
SGD = 1
MUON = 2
ZTEST = 3
MOVED = 4
MOVED_MUON = 5

# Muon (SPEC 9). It has the same bits on every machine, because every sum is one chain of fma in a fixed order.
MUON_ROUNDS = 5
MUON_PARTS = 1024
MUON_EPS = 1e-7
MUON_SIZE = 0.2
MUON_COEFFICIENTS = {"quintic": (3.4445, -4.7750, 2.0315), "cubic": (1.5, -0.5, 0.0)}      # a, b, c of MUON_NS
# Short runs (SPEC 23): how far a digit moves a weight, in the rate times the root of LOCAL_STEPS; by what the mean move
# of several chunks is multiplied; a momentum whose sign is sure, and its size thereafter; limits of AdamW's v
UNIT, MUON_UNIT = 0.4, 0.28
OUTER = 1.4
SURE, MOMENTUM = 3.0, 6.0
LEAST_V, MOST_V = 0.02, 200.0
# The float32 constants of the update; rule: ADAMW, SGD (lr is then the factor of a vote), MUON (size is then the length
# of a step), ZTEST (lr is then the smallest vote that moves a weight, a whole number), or, of the step that adds the
# moves of `chunks` short runs (SPEC 23), MOVED (lr: the move of a weight for one in the sum of digits; size: digits in
# a move of 1), or MOVED_MUON (momentum: what one in their signs adds to it). rule and chunks are ints
Optimizer = namedtuple("Optimizer",
                       "rule lr beta1 one_less_beta1 beta2 one_less_beta2 eps decay momentum size chunks")
# How tokens are drawn (SPEC 10): temp float32, 0 is greedy; floor int: smallest trunc((z - top) / temp) that is kept;
# penalty float32: logit units taken once from every token seen
Sampling = namedtuple("Sampling", "temp floor penalty")


def draw_rules(jit, gaussian):
    """Random numbers (SPEC 2); gaussian: DEVICE_GAUSSIAN or HOST_GAUSSIAN."""
    @jit
    def hash32(seed, i):
        """uint32; seed and i are taken modulo 2^32."""
        x = u32(u32(seed) + u32(u32(i) * u32(0x9E3779B9)))
        x = u32(x ^ u32(x >> u32(16)))
        x = u32(x * u32(0x85EBCA6B))
        x = u32(x ^ u32(x >> u32(13)))
        x = u32(x * u32(0xC2B2AE35))
        return u32(x ^ u32(x >> u32(16)))

    @jit
    def term(r, mask):
        """Bit 0 of r is the sign, 1 for plus; the bits above it are the magnitude."""
        size = i32(u32(r >> u32(1)) & u32(mask))
        return size if r & u32(1) else i32(-size)

    @jit
    def draw(r, mask):
        """int32 that fits int8: the noise of a hash r; mask: of the magnitude."""
        if gaussian:
            return i32(i32(term(r, mask) + term(u32(r >> u32(5)), mask)) + term(u32(r >> u32(10)), mask))
        return term(r, mask)

    return SimpleNamespace(hash32=hash32, draw=draw)


def factor_rules(jit, ops, mode):
    """Noise scaled by the overlay (SPEC 4); mode: ADAPTIVE_NOISE_MODE."""
    trunc, trunc_64th = ops.trunc, ops.trunc_64th
    sqrt, fma = ops.sqrt, ops.fma
    hash32 = draw_rules(jit, 0).hash32

    @jit
    def sixty_fourths(overlay):
        """int32: the factor of mode 1 in 64ths."""
        return i32(min(max(i32(overlay), i32(0)), i32(64)))

    @jit
    def factor(overlay, seed, i):
        """float32: the factor of SPEC 4; seed: of the noise stream that is scaled."""
        if mode == 0:
            return f32(1)
        if mode == 1:
            return f32(f32(sixty_fourths(overlay)) * f32(1 / 64))
        tail = f32(f32(f32(hash32(u32(u32(seed) + u32(100000)), i)) + f32(1)) / f32(4294967296))
        scale = f32(f32(i32(i32(overlay) + i32(127))) / f32(255))
        return f32(scale / f32(sqrt(tail)))

    @jit
    def scaled(p, overlay, seed, i):
        """int32: trunc(p * factor), p an integer below 2^24 in size."""
        if mode == 0:
            return i32(p)
        if mode == 1:
            size = i32(i32(abs(i32(p)) * sixty_fourths(overlay)) >> i32(6))
            return size if p >= 0 else i32(-size)
        return trunc(f32(f32(i32(p)) * factor(overlay, seed, i)))

    @jit
    def input_coefficient(n, overlay):
        """int32: the noise n of an input for `input_term` and `input_fold`, in 64ths in mode 1."""
        return i32(n * sixty_fourths(overlay)) if mode == 1 else i32(n)

    @jit
    def input_term(x, c, f):
        """int32: trunc(x * noise * factor), a term of sb; c: input_coefficient; f: the factor, used in mode 2."""
        p = i32(x * c)
        if mode == 0:
            return p
        if mode == 1:
            return trunc_64th(p)
        return trunc(f32(f32(p) * f))

    @jit
    def input_fold(pb, x, c, f):
        """int32: the next running integer pb of a down projection."""
        p = i32(x * c)
        if mode == 0:
            return i32(pb + p)
        if mode == 1:
            return trunc_64th(i32(p + i32(pb << i32(6))))
        return trunc(fma(f32(p), f, f32(pb)))

    @jit
    def table_term(a, factor_a, b, factor_b):
        """int32: trunc(a * b * factor_a * factor_b), the noise of an element of a table whose columns are looked up."""
        if mode == 0:
            return i32(a * b)
        return trunc(f32(f32(f32(i32(a * b)) * factor_a) * factor_b))

    return SimpleNamespace(factor=factor, scaled=scaled, input_coefficient=input_coefficient, input_term=input_term,
                           input_fold=input_fold, table_term=table_term)


def loss_rule(jit, ops, exact):
    """The loss of a position (SPEC 7); exact: LOSS = "exact", in 1/256 logit units. Of several targets (only then):
    the distances of their logits from the largest are added up, and `unit_of_distance` is 256 / targets."""
    log2_floor = ops.log2_floor

    @jit
    def loss(total, top, target, bit, unit, unit_of_distance):
        """int64, from Q (int64), the largest logit and the target's. bit: SOFTMAX_SCALE_BIT; unit: `log_unit`. log2 of
        Q has 16 fractional bits, by squaring a 32-bit mantissa: integers only, so the same everywhere."""
        e = i64(log2_floor(total))
        distance = i64(top) - i64(target)
        if not exact:
            return (((e - bit) * 16) >> 1) + distance
        m = u32(u64(total) << u64(31 - e) if e <= 31 else u64(total) >> u64(e - 31))
        fraction = i64(0)
        for _ in range(16):
            square = u64(u64(m) * u64(m))                    # from 2^62 on; one: from 2^63 on
            one = u64(square >> u64(63))
            m = u32(square >> u64(32)) if one else u32(square >> u64(31))
            fraction = 2 * fraction + i64(one)
        return (((((e - bit) << 16) + fraction) * unit) >> 32) + distance * unit_of_distance

    return loss


def norm_rules(jit, ops):
    """Clips and divisions of both models (SPEC 5, 7, 8)."""
    trunc, divide = ops.trunc, ops.divide

    @jit
    def clip(x):
        """int32: x between -127 and 127."""
        return i32(min(max(i32(x), i32(-127)), i32(127)))

    @jit
    def normed(x, weight, bias, mean):
        """int32: an element of ln(x); weight, bias: as the member sees them; mean: of the |x|, at least 1."""
        return clip(i32(divide(i32(i32(x) * weight), mean) + bias))

    @jit
    def quotient(y, d, reciprocal):
        """int32: clip(y / d rounded down); reciprocal: float32(1 / d). Cut to +-127 d and moved to positive numbers, y
        is below 2^23. Half a unit off the integers, the error of the product cannot reach the next one."""
        inside = i32(max(i32(-127 * d), min(i32(127 * d), y)))
        return i32(trunc(f32(f32(f32(i32(inside + i32(128 * d))) + f32(0.5)) * reciprocal)) - i32(128))

    @jit
    def gate(x, h):
        """int32, 0 to 254: how far a gate is open; x, h: products of the layer's input and of its state."""
        return i32(clip(i32(x + h)) + i32(127))

    @jit
    def gated(f, h):
        """int32: the share of the state h that the gate f lets pass."""
        return i32(i32(f * h) >> i32(8))

    @jit
    def next_state(f, h, candidate):
        """int32: the state after a position."""
        return i32(h + i32(i32(f * i32(candidate - h)) >> i32(8)))

    return SimpleNamespace(clip=clip, normed=normed, quotient=quotient, gate=gate, gated=gated, next_state=next_state)


def update_rules(jit, ops):
    """The update of one weight (SPEC 9). o: Optimizer; vote, weight: int32; m, v, acc: float32, its moments and
    accumulator."""
    add, sub = ops.add, ops.sub
    mul, div = ops.mul, ops.div
    fma, sqrt = ops.fma, ops.sqrt
    trunc, nearest = ops.trunc, ops.nearest

    @jit
    def adamw(o, vote, weight, m, v, acc):
        """(m, v, acc) after a vote."""
        g = f32(i32(-vote))
        m = fma(m, o.beta1, mul(g, o.one_less_beta1))
        v = fma(mul(g, g), o.one_less_beta2, mul(v, o.beta2))
        u = div(m, add(sqrt(v), o.eps))
        return m, v, fma(f32(-o.lr), fma(f32(weight), o.decay, u), acc)

    @jit
    def whole_step(weight, acc):
        """(move, acc): the whole step -1, 0 or 1 that acc has reached, and acc without it."""
        move = i32(0)
        if acc >= f32(1):
            move = i32(1 if weight < 127 else 0)
            acc = sub(acc, f32(1)) if move else f32(1)
        elif acc <= f32(-1):
            move = i32(-1 if weight > -127 else 0)
            acc = add(acc, f32(1)) if move else f32(-1)
        return move, acc

    @jit
    def ztest(vote, weight, least):
        """The move -1, 0 or 1; least: the smallest vote that moves a weight."""
        move = i32(0)
        if vote > 0 and vote >= least:
            move = i32(1 if weight < 127 else 0)
        elif vote < 0 and -vote >= least:
            move = i32(-1 if weight > -127 else 0)
        return move

    @jit
    def momentum(vote, m, kept):
        """Muon's m after a vote; kept: MUON_MOMENTUM."""
        return fma(m, kept, f32(i32(-vote)))

    @jit
    def moved(o, sums, weight, m, v, acc):
        """(move, m, v, acc) after the moves of chunks; sums: of the terms of their digits (model.steps)."""
        base = i32(2 * o.chunks + 1)
        q = i32(i32(i32(sums + o.chunks) + i32(2 * o.chunks) * base) // base - i32(2 * o.chunks))
        e = i32(sums - q * base)
        if o.rule == MOVED:
            q = i32(3 * q + e)
            m, v = f32(0), fma(f32(i32(q * q)), o.one_less_beta2, mul(v, o.beta2))
            v = max(f32(LEAST_V), min(f32(MOST_V), v))
        else:
            m = mul(f32(e), o.momentum)
        acc = fma(f32(q), o.lr, acc)
        move = max(i32(-127 - weight), min(i32(127 - weight), trunc(acc)))
        return move, m, v, max(f32(-1), min(f32(1), sub(acc, f32(move))))

    @jit
    def move_digit(o, weight_before, acc_before, weight, acc, m):
        """int32: the digit of a weight that a short run has moved (SPEC 23). m: Muon's, at its end."""
        most = i32(7) if o.rule == MOVED else i32(2)
        moved = add(f32(i32(weight - weight_before)), sub(acc, acc_before))
        q = max(i32(-most), min(most, nearest(mul(moved, o.size))))
        if o.rule == MOVED:
            return q
        return i32(3 * q + (i32(1) if m > f32(SURE) else i32(-1) if m < f32(-SURE) else i32(0)))

    @jit
    def step(o, vote, direction, weight, m, v, acc):
        """(move, m, v, acc): by how much the weight moves, int32, and the others after that. direction: of Muon,
        float32."""
        if o.rule >= MOVED:
            return moved(o, vote, weight, m, v, acc)
        if o.rule == ZTEST:
            return ztest(vote, weight, i32(o.lr)), m, v, acc
        if o.rule == ADAMW:
            m, v, acc = adamw(o, vote, weight, m, v, acc)
        elif o.rule == SGD:
            acc = fma(f32(vote), o.lr, acc)
        else:
            acc = fma(f32(-o.lr), fma(f32(weight), o.decay, mul(direction, o.size)), acc)
        move, acc = whole_step(weight, acc)
        return move, m, v, acc

    return SimpleNamespace(momentum=momentum, step=step, move_digit=move_digit)


def vote_rules(jit):
    """From sums of votes to digits (SPEC 21)."""
    @jit
    def least_vote(total, size, alpha):
        """int32: the least size of a vote that counts, in a tensor of `size` weights whose votes have the size `total`
        (int64); alpha: float64."""
        least = i64(math.ceil(np.float64(np.float64(total) / np.float64(size)) * alpha))
        return i32(min(max(i64(1), least), i64((1 << 31) - 1)))

    @jit
    def digit(vote, least, most):
        """int32: a vote (int32) in units of twice the least vote, rounded to the nearest, at most `most`. A quotient of
        float64, truncated, is that of the integers, and is vectorised."""
        halves = i32(np.float64(abs(vote)) / np.float64(least))
        size = i32(i32(min(halves, i32(i32(2) * most)) + i32(1)) >> i32(1))
        return size if vote >= 0 else i32(-size)

    return SimpleNamespace(least_vote=least_vote, digit=digit)


def unit_rules(jit, ops):
    """Unit trials (SPEC 21): the head's errors, and credits as integers with an exponent. float32 appears element by
    element only; every sum is one of integers."""
    bits, float_of, nearest = ops.bits, ops.float_of, ops.nearest
    mul = ops.mul
    hash32 = draw_rules(jit, 0).hash32

    @jit
    def attention_share(weight, total):
        """int32: the share of an attention weight (int32) in the sum `total` (int64) of its query's, in 2^-12,
        rounded."""
        return i32(i64(i64(i64(weight) << i64(13)) + total) // i64(i64(2) * total))

    @jit
    def share_unit(total):
        """int64: what `share` takes of the sum `total` (int64) of the EXP of a position."""
        return i64(i64(127 << 48) // total)

    @jit
    def share(weight, unit):
        """int32: 127 times the softmax of a token whose EXP is `weight`, in 2^-16, rounded down."""
        return i32(i64(i64(weight) * unit) >> i64(32))

    @jit
    def dither_of(seed, position):
        """int32: what `error` takes for the tokens of a position of the window with this seed."""
        return i32(u32(hash32(seed, u32(u32(DITHER_STREAM) + u32(position))) & u32(0xFFFF)))

    @jit
    def excess(wanted, share, weight):
        """int32: the error of a logit in 2^-16. wanted: 127 times the share of the targets that are this token, in
        2^-16; weight: of the window, -7 to 7."""
        return i32(i32(i32(wanted - share) * weight) // i32(7))

    @jit
    def error(wanted, share, weight, dither, token):
        """int32 that fits int8: the error of a logit, rounded down after adding 16 bits that differ from token to
        token. wanted, share, weight: see `excess`."""
        random = i32(u32(u32(dither) + u32(u32(DITHER_STEP) * u32(token))) & u32(0xFFFF))
        return i32(i32(excess(wanted, share, weight) + random) >> i32(16))

    @jit
    def exponent(top, bits_kept):
        """int32: the exponent of a row of float32 credits whose largest size is `top`: divided by 2^exponent it has
        `bits_kept` bits."""
        return i32(max(i32(-100), min(i32(100), i32(i32(bits(top)) >> i32(23)) - i32(126 + bits_kept))))

    @jit
    def power(e):
        """float32: 2^e, e from -126 to 127, which it is cut to."""
        return float_of(i32(i32(max(i32(-126), min(i32(127), i32(e))) + i32(127)) << i32(23)))

    @jit
    def whole(credit, unit, most):
        """int32: a float32 credit times `unit` (of `power`), to the nearest, ties to even, within +- most."""
        return i32(max(i32(-most), min(i32(most), nearest(mul(credit, unit)))))

    return SimpleNamespace(attention_share=attention_share, share_unit=share_unit, share=share, dither_of=dither_of,
                           excess=excess, error=error, exponent=exponent, power=power, whole=whole)


def sampling_rules(jit, ops):
    """The choice of a token (SPEC 10)."""
    trunc = ops.trunc
    sub, div = ops.sub, ops.div

    @jit
    def score(z, present, penalty):
        """float32: a logit (int32), less the presence penalty where the token is present."""
        return sub(f32(z), penalty) if present else f32(z)

    @jit
    def share(exps, last, score, top, temp, floor):
        """int64: the weight of a token in the draw; exps: EXP, whose last index is `last`; floor: `Sampling.floor`."""
        less = sub(score, top)
        d = i64(trunc(less if temp == f32(1) else div(less, temp)))
        return i64(exps[u64(min(i64(last), -d))]) if d >= floor else i64(0)

    return SimpleNamespace(score=score, share=share)


# --- on the host -----------------------------------------------------------------------------------------------------

def uniform_noise(draws, mask, gaussian):
    """int8 noise from an array of uint32 draws: the `draw` of `draw_rules` for arrays."""
    def term(sign_bit, shift):
        magnitude = (draws >> np.uint32(shift) & np.uint32(mask)).astype(np.int8)
        return np.where(draws >> np.uint32(sign_bit) & np.uint32(1), magnitude, -magnitude)
    return term(0, 1) + term(5, 6) + term(10, 11) if gaussian else term(0, 1)


def chunk_fitness(losses, cfg):
    """int8 [members / 2] in {-1, 0, 1} from the losses (int64 [members], even member first) of one chunk. The mean
    filter raises the mean in logit units to its power; the unit of the losses of LOSS = "exact" is 1/256 of that."""
    d = losses[1::2] - losses[0::2]
    if cfg.FAST_FITNESS:
        return np.sign(d).astype(np.int8)
    if cfg.CHUNK_MEAN_FILTER:
        m = float(np.mean(d, dtype=np.float64)) / cfg.LOSS_SCALE
        if m != 0:
            m = math.copysign(abs(m) ** cfg.CHUNK_MEAN_EXPONENT, m)
        d = d + int(m * cfg.LOSS_SCALE)
    if not cfg.USE_ADAPTIVE_THRESHOLD:
        return np.sign(d).astype(np.int8)
    threshold = np.mean(np.abs(d), dtype=np.float64) * float(np.float32(cfg.ADAPTIVE_THRESHOLD_ALPHA))
    return np.where(np.abs(d) < threshold, 0, np.where(d > 0, 1, -1)).astype(np.int8)


def step_votes(cfg, fitness):
    """int32 [CHUNK_DIGITS]: the sums of the digits of a step of unit trials, from its bytes. Raises ValueError, see
    steps.check_step."""
    steps.check_step(cfg, fitness)
    sums = steps.sums_of(cfg, fitness)
    votes = np.empty(sums.shape[::-1], np.int32)
    for k, its in enumerate(sums):                   # in a quarter of the time that the transposed array takes
        votes[:, k] = its
    return votes.ravel()


def unpacked_digits(packed, count, values=3):
    """int8 [count] from packed bytes. Raises ValueError, see steps.check_digits."""
    return np.frombuffer(steps.unpack_digits(packed, count, values), np.int8)


def least_vote_by_chance(cfg, alpha):
    """int: the size of vote that about a share `alpha` of the weights reaches by chance: |vote| * 16 >= t *
    isqrt(pairs) * 256; t / 16: normal quantile; 256: variance of a product of two draws (1 for signs)."""
    import statistics               # here, because a coordinator starts without it
    t = int(16 * -statistics.NormalDist().inv_cdf(alpha / 2))
    return -(-t * math.isqrt(cfg.N_PAIRS) * (256 if cfg.USE_CLT else 1) // 16)


def update_constants(cfg, lr, t):
    """The Optimizer constants of one Tensor; lr: cfg.learning_rate of the step."""
    rule = MUON if cfg.USE_MUON and t.hidden else {"adamw": ADAMW, "sgd": SGD, "ztest": ZTEST}[cfg.OPTIMIZER]
    scale = cfg.MUON_LR_SCALE if rule == MUON else t.lr_scale
    rate = np.float32(lr) * np.float32(scale)
    if rule == SGD:
        rate = np.float32(float(rate) / cfg.N_PAIRS ** 0.5)
    elif rule == ZTEST:
        rate = np.float32(least_vote_by_chance(cfg, lr))
    decays = t.matrix or cfg.PERTURB == "weights"       # with unit trials nothing votes on norms
    if cfg.LOCAL_STEPS > 1:
        return _moved_constants(cfg, lr * scale, rule)
    beta1 = np.float32(cfg.ADAM_BETA1)
    beta2 = np.float32(cfg.ADAM_BETA2)
    return Optimizer(rule=rule, lr=rate, beta1=beta1, one_less_beta1=np.float32(1) - beta1, beta2=beta2,
                     one_less_beta2=np.float32(1) - beta2, eps=np.float32(cfg.ADAM_EPS),
                     decay=np.float32(cfg.ADAM_WEIGHT_DECAY if decays else 0),
                     momentum=np.float32(cfg.MUON_MOMENTUM),
                     size=np.float32(MUON_SIZE) * np.sqrt(np.float32(max(t.rows, t.cols))), chunks=cfg.N_CHUNKS)


def _moved_constants(cfg, rate, rule):
    """The Optimizer constants of a step that adds moves. A weight whose updates are all of the size of the rate, in
    random directions, has moved by it times the root of LOCAL_STEPS."""
    unit = (MUON_UNIT if rule == MUON else UNIT) * math.sqrt(cfg.LOCAL_STEPS)
    chunks, beta2 = cfg.N_CHUNKS, cfg.ADAM_BETA2 ** cfg.LOCAL_STEPS
    zero = np.float32(0)
    return Optimizer(
        rule=MOVED_MUON if rule == MUON else MOVED, lr=np.float32(rate * unit * min(OUTER, chunks) / chunks),
        beta1=zero, one_less_beta1=zero, beta2=np.float32(beta2),
        one_less_beta2=np.float32((1 - beta2) * unit ** 2 / (cfg.LOCAL_STEPS * chunks)), eps=zero, decay=zero,
        momentum=np.float32(MOMENTUM / chunks), size=np.float32(1 / max(rate * unit, 1e-30)),
        chunks=chunks)


def muon_coefficients(cfg):
    """float32 a, b, c of the Newton-Schulz iteration."""
    return tuple(map(np.float32, MUON_COEFFICIENTS[cfg.MUON_NS]))


def sampling_settings(cfg, temp=None, min_p=None, penalty=None):
    """Sampling settings in the kernels' units; None: the configuration's. Penalty in nats."""
    temp = cfg.SAMPLING_TEMP if temp is None else temp
    min_p = cfg.SAMPLING_MIN_P if min_p is None else min_p
    penalty = cfg.SAMPLING_PRESENCE_PENALTY if penalty is None else penalty
    unit = np.float32(cfg.SOFTMAX_EXP_SCALE)
    floor = int(np.float32(np.log(np.float32(min_p))) * unit) if min_p > 0 else -(1 << 31)
    return Sampling(np.float32(temp), floor, np.float32(penalty * cfg.SOFTMAX_EXP_SCALE))


def checked_prompt(cfg, prompt):
    """int32 [n]: the tokens of a prompt. Raises ValueError for one that is empty or not of this vocabulary."""
    prompt = np.array(prompt, np.int64).ravel()
    if not prompt.size or prompt.min() < 0 or prompt.max() >= cfg.VOCAB_SIZE:
        raise ValueError(f"a prompt must be one token or more, each below VOCAB_SIZE = {cfg.VOCAB_SIZE}")
    return prompt.astype(np.int32)


# --- windows of the data (SPEC 7) ------------------------------------------------------------------------------------

def window_starts(cfg, n_tokens, step, first_pair, pairs):
    """int64 [pairs]: first token of each pair's window (SPEC 7); every step reads the next window of a stream. Every
    group of pairs reads its own stream, which begins `stride` tokens after that of the previous group."""
    stride = 0 if cfg.USE_SAME_DATA else n_tokens // cfg.N_GROUPS
    group = np.arange(first_pair, first_pair + pairs, dtype=np.int64) // (cfg.GROUP_SIZE // 2)
    return (step * cfg.SEQ_LEN + group * stride) % (n_tokens - cfg.SEQ_LEN)


def windows(cfg, tokens, step, first_pair, pairs):
    """int32 [pairs, STATE_TOKENS + SEQ_LEN + 1]: the tokens before each pair's window, then its inputs and targets."""
    return windows_at(cfg, tokens, window_starts(cfg, len(tokens), step, first_pair, pairs))


def windows_at(cfg, tokens, starts):
    """The same of windows that start at int64 [n]. The data are a ring."""
    places = starts[:, None] + np.arange(-cfg.STATE_TOKENS, cfg.SEQ_LEN + 1)
    return np.take(tokens, places, mode="wrap").astype(np.int32)
