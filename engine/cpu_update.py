"""The update on the CPU (SPEC 9): packing of weights, votes, Muon's directions, the steps of weights, digests."""

import numpy as np

from engine import cpu_rules
from engine.cpu_compiler import njit
from engine.cpu_kernels import add_product, vote_draw
from engine.cpu_rules import adamw, f32, fma, i32, muon, sgd, u32, whole_step, ztest
from engine.simd import PANEL, ROWS, chain_tile
from model import state_digest
from model.optimizers import MUON, MUON_EPS, MUON_PARTS, SGD, ZTEST

mixed, halves = cpu_rules.rule(state_digest.mixed), cpu_rules.rule(state_digest.halves)
BLOCK = 2048                # pairs whose noise is made at once for a product over the population


@njit
def pack(weights, packed, correction, t, first, end):
    """Copies panels first..end - 1 of one matrix (t: its row of Model.table) from the canonical weights, with each
    column's correction."""
    k4, cols = t.rows // 4, t.cols
    for p in range(first, end):
        count = min(PANEL, cols - p * PANEL)
        sums = np.zeros(PANEL, i32)
        for k in range(k4):
            source = t.weights + (k * cols + p * PANEL) * 4
            target = t.packed + (p * k4 + k) * PANEL * 4
            for j in range(4 * count):
                value = weights[source + j]
                packed[target + j] = value
                sums[j >> 2] += value
        for j in range(PANEL):
            correction[t.correction + p * PANEL + j] = -128 * sums[j]


@njit
def input_block(c, t, seeds, signs, x, first, end):
    """x uint8 [rows padded, pairs padded to 4], rows first..end - 1: sign * noise(B, row) + 128 of a block of pairs."""
    for r in range(first, end):
        for q in range(seeds.size):
            x[r, q] = vote_draw(c, u32(seeds[q] + t.seed_b), r) * signs[q] + 128
        for q in range(seeds.size, x.shape[1]):
            x[r, q] = 128


@njit
def panel_votes(c, t, seeds, x, votes, first, end):
    """Adds a block of pairs to panels first..end - 1 of votes int32 [rows padded to ROWS, cols padded to PANEL]: x
    times noise(A, col), made here."""
    for p in range(first, end):
        noise = np.zeros((x.shape[1], min(PANEL, t.cols - p * PANEL)), np.int8)
        for q in range(seeds.size):
            for j in range(noise.shape[1]):
                noise[q, j] = vote_draw(c, u32(seeds[q] + t.seed_a), p * PANEL + j)
        add_product(x, noise, votes, p)


@njit
def vector_votes(c, t, seeds, signs, votes, first, end):
    """votes int32 [width] from first to end - 1: sum over pairs of sign * noise(first stream, i) * noise(second stream,
    i)."""
    for i in range(first, end):
        s = i32(0)
        for q in range(seeds.size):
            a = vote_draw(c, u32(seeds[q] + t.seed_a), i)
            b = vote_draw(c, u32(seeds[q] + t.seed_b), i)
            s = i32(s + a * b * signs[q])
        votes[i] = s


@njit
def muon_start(o, t, votes, moments, x):
    """Muon's momentum after votes int32 [rows, cols], and x float32 [shorter side, longer side]: the momentum of norm
    1."""
    rows, cols = t.rows, t.cols
    sums = np.zeros(MUON_PARTS, f32)
    for i in range(x.shape[0]):
        for j in range(x.shape[1]):
            r, c = (i, j) if rows <= cols else (j, i)
            at = t.weights + ((r >> 2) * cols + c) * 4 + (r & 3)
            m = fma(moments[at, 0], o.momentum, f32(i32(-votes[r, c])))
            part = (i * x.shape[1] + j) % MUON_PARTS
            sums[part] = fma(m, m, sums[part])
            moments[at, 0] = x[i, j] = m
    half = MUON_PARTS // 2
    while half:
        for part in range(half):
            sums[part] = f32(sums[part] + sums[part + half])
        half //= 2
    norm = f32(f32(np.sqrt(sums[0])) + f32(MUON_EPS))
    for i in range(x.shape[0]):
        for j in range(x.shape[1]):
            x[i, j] = f32(x[i, j] / norm)


@njit
def muon_panels(left, right, gram, alpha, beta, out, first, end):
    """Column panels first..end - 1 of out = left . left^T where `gram`, else fma(beta, left . right, alpha * right);
    float32, out is neither of the others."""
    length = left.shape[1]
    panel = np.empty((length, PANEL), f32)
    for p in range(first, end):
        for k in range(length):
            for j in range(PANEL):
                panel[k, j] = left[p * PANEL + j, k] if gram else right[k, p * PANEL + j]
        for r in range(0, out.shape[0], ROWS):
            chain_tile(left, r * length, length, panel, 0, out, r * out.shape[1] + p * PANEL, out.shape[1], length)
        if not gram:
            for r in range(out.shape[0]):
                for j in range(p * PANEL, (p + 1) * PANEL):
                    out[r, j] = fma(beta, out[r, j], f32(alpha * right[r, j]))


@njit                       # not `inner`: optimized only within its caller, it takes more than twice the time
def move(o, vote, direction, weight, moments):
    """The move of one weight, int32; moments float32 [3] (m, v, acc) change in place. direction: Muon's."""
    if o.rule == ZTEST:
        least = i32(o.lr)        # few votes are as large, which a processor predicts; half of them are positive
        return ztest(vote, weight, least) if vote >= least or vote <= -least else i32(0)
    if o.rule == SGD:
        acc = sgd(vote, moments[2], o.lr)
    elif o.rule == MUON:
        acc = muon(direction, o.size, weight, moments[2], o.lr, o.decay)
    else:
        moments[0], moments[1], acc = adamw(vote, weight, moments[0], moments[1], moments[2], o.lr, o.beta1,
                                            o.one_less_beta1, o.beta2, o.one_less_beta2, o.eps, o.decay)
    step, moments[2] = whole_step(weight, acc)
    return step


@njit
def apply_votes(o, weights, t, group, votes, x, moments, changed_rows, changed_cols, first, end):
    """Moves the weights of rows group * first..group * end - 1 of one stored array by their votes int32 [rows, cols],
    or by Muon's x float32 [shorter side, longer side], and marks the rows and columns of those that changed; their
    number. group: 4 rows of a matrix are stored together, a vector is one row."""
    cols, changed = t.cols, 0
    direction = f32(0)
    for block in range(first, end):
        for col in range(cols):
            for k in range(group):
                at = t.weights + (block * cols + col) * group + k
                weight = i32(weights[at])
                if o.rule == MUON:
                    r = block * group + k
                    direction = x[r, col] if t.rows <= cols else x[col, r]
                step = move(o, votes[block * group + k, col], direction, weight, moments[at])
                if step:
                    weights[at] = weight + step
                    changed_rows[block * group + k] = 1
                    changed_cols[col] = 1                   # threads only ever write the same 1
                    changed += 1
    return changed


@njit
def word_sums(words, number, first, end):
    """The two sums of model.state_digest over words first..end - 1 of uint64 [n]; number: that of words[0]."""
    a = b = np.uint64(0)
    part, number = words[first:end], np.uint64(number + first)
    for i in range(part.size):
        x = mixed(part[i], number + np.uint64(i))
        a += x
        b += halves(x)
    return a, b
