"""Credits of unit trials on the CPU (SPEC 21): what both models hand down through products, and votes.

A row of credits goes through a product as int8 + 128, the rows of several positions together.
"""

from engine.cpu_kernels import (BEFORE, CLEAN, DEAD, GROUP, NORMED_2, SLOT, add_below, add_product, draw_norm, i64,
                                new_rows, new_sides, nothing_below, product, through_norm)
from engine.cpu_rules import bits, digit, exponent, f32, float_of, i32, inlined, leaf, njit, power, u32, whole
from engine.simd import PANEL, local
from model import units

OF_UP, OF_DOWN, OF_EMBEDDING = SLOT["of_up"], SLOT["of_down"], SLOT["of_embedding"]
BITS, FULL = i32(units.ROW_BITS), i32((1 << units.ROW_BITS) - 1)
TRIAL_BITS = i64(3)          # a trial is the difference of values 2^3 apart


@inlined
def size_of(credits, r, n):
    """int32: the bits of the largest size of the first n of row r, float32, which are in the order of the sizes."""
    top = i32(0)
    for i in range(n):
        top = max(top, i32(bits(credits[r, i]) & i32(0x7FFFFFFF)))
    return top


@leaf
def note(kept, name, layer, first, count, credits, b):
    """Keeps `count` rows of credits float32 [>= count, n], in rows first.. of a Kept, and as what goes down in Rows."""
    place = kept.places[name, layer]
    for r in range(count):
        row = kept.bytes[first + r, place:]
        b.exponents[r] = e = exponent(float_of(size_of(credits, r, b.x.shape[1])), BITS)
        unit, live = power(i32(-e)), i32(0)
        for i in range(b.x.shape[1]):
            credit = whole(credits[r, i], unit, FULL)
            live |= credit
            row[i] = b.x[r, i] = credit + i32(128)
        kept.exponents[first + r, name, layer] = e if live else DEAD


@leaf
def hand(c, param, layer, of, count, shift, divisor, to):
    """Hands `count` Rows down through a matrix, with 2^-shift and a divisor, to other ones, or the same."""
    sides, one = new_sides(1, 1, 1), f32(f32(1) / f32(divisor))
    product(c, c.table.shape[0] // 2 + param, layer, sides, CLEAN, of.x, count, count, to.y)
    for r in range(count):
        to.scales[r] = f32(power(i32(of.exponents[r] - i32(shift))) * one)


@inlined
def kept_scales(kept, param, layer, first, count, scales):
    """Gives back what `keep_scales` kept."""
    for r in range(count):
        scales[r] = kept.scales[first + r, param, layer]


@inlined
def kept_rows(kept, name, layer, first, count, x):
    """Gives back what `keep` kept."""
    place = kept.places[name, layer]
    for r in range(count):
        row = kept.bytes[first + r, place:]
        for i in range(x.shape[1]):
            x[r, i] = row[i]


@inlined
def scale_credit(kept, param, layer, first, count):
    """The residual stream's credits times the factors of amax."""
    for r in range(first, first + count):
        scale = kept.scales[r, param, layer]
        for i in range(kept.credit.shape[1]):
            kept.credit[r, i] = f32(kept.credit[r, i] * scale)


@leaf
def join(c, kept, ln, layer, first, count, b):
    """Adds the sums of Rows, below a norm, to the residual stream's credits in rows first.."""
    norm, means = local((2, 2, c.HIDDEN_DIM), i32), local(GROUP, f32)
    draw_norm(c, ln, layer, i32(0), CLEAN, norm)
    kept_scales(kept, ln, layer, first, count, means)
    through_norm(b, count, norm[0, 0], means, kept.credit[first:])


@leaf
def through_mlp(c, kept, ln, layer, slot, rows):
    """The residual stream's credits below an MLP: see `mlp` of cpu_kernels."""
    H = c.HIDDEN_DIM
    up, down = ln + (1 if c.gru else 2), ln + (2 if c.gru else 4)
    shift_up, shift_down = (i64(0), i64(0)) if c.gru else (c.SHIFT_MLP_UP, c.SHIFT_MLP_DOWN)
    divisor_up, divisor_down = (c.divisor, c.divisor_down) if c.gru else (i64(1), i64(1))
    b, wide = new_rows(GROUP, H, H), new_rows(GROUP, 4 * H, H)
    for first in range(0, rows, GROUP):
        count = min(GROUP, rows - first)
        if not c.gru:
            scale_credit(kept, down, layer, first, count)
        note(kept, OF_DOWN, slot, first, count, kept.credit[first:], b)
        hand(c, down, layer, b, count, TRIAL_BITS + shift_down, divisor_down, wide)
        kept_rows(kept, BEFORE, slot, first, count, wide.x)
        for r in range(count):
            for i in range(4 * H):
                wide.below[r, i] = f32(f32(f32(wide.y[r, i]) * wide.scales[r]) * f32(c.trials[1, wide.x[r, i]]))
        note(kept, OF_UP, slot, first, count, wide.below, wide)
        hand(c, up, layer, wide, count, shift_up, divisor_up, b)
        kept_rows(kept, NORMED_2, slot, first, count, b.outputs)
        nothing_below(b)
        add_below(b, count)
        join(c, kept, ln, layer, first, count, b)


@leaf
def note_embedding(c, kept, rows):
    b = new_rows(GROUP, c.HIDDEN_DIM, c.HIDDEN_DIM)
    for first in range(0, rows, GROUP):
        note(kept, OF_EMBEDDING, i64(0), first, min(GROUP, rows - first), kept.credit[first:], b)


# --- votes ------------------------------------------------------------------------------------------------------------

@njit
def operand(kept, name, layer, top, out):
    """out int8 [>= rows, units]: credits with the exponent `top` of their chunk; rows beyond those kept are 0."""
    place = kept.places[name, layer]
    for r in range(out.shape[0]):
        row, unit = kept.bytes[r, place:], power(i32(kept.exponents[r, name, layer] - i32(top)))
        if kept.exponents[r, name, layer] == DEAD:
            for i in range(out.shape[1]):
                out[r, i] = 0
        else:
            for i in range(out.shape[1]):
                out[r, i] = whole(f32(i32(row[i]) - i32(128)), unit, FULL)


@njit
def inputs_of(kept, name, layer, words):
    """words uint32 [rows / 4, inputs]: kept inputs of matrices, four positions a word."""
    place = kept.places[name, layer]
    for k in range(words.shape[0]):
        for j in range(4):
            row, bit = kept.bytes[4 * k + j, place:], u32(8 * j)
            for i in range(words.shape[1]):
                words[k, i] = u32(u32(row[i]) << bit) | (words[k, i] if j else u32(0))


@njit
def add_products(x, credits, votes):
    """votes int32 [inputs, units padded to PANEL] += inputs . credits: x uint8 [n / 4, 4 inputs], of `inputs_of`;
    credits int8 [n, units]; n a multiple of 4."""
    for p in range(votes.shape[1] // PANEL):
        add_product(x, i64(4), x.shape[1], credits[:, p * PANEL:(p + 1) * PANEL], votes, p)


@njit
def add_sums(credits, votes):
    """votes int32 [units] += the sums of credits int8 [n, units]."""
    for r in range(credits.shape[0]):
        for i in range(credits.shape[1]):
            votes[i] += i32(credits[r, i])


@njit
def add_looked_up(credits, tokens, factor, votes):
    """votes int32 [V, H] += credits int8 [>= n, H] times `factor`, rounded, in the rows of tokens int32 [n]."""
    for r in range(tokens.size):
        for i in range(credits.shape[1]):
            votes[tokens[r], i] += whole(f32(i32(credits[r, i])), factor, i32(1 << 30))


@njit
def add_up(sums, first, end):
    """int64: the total size of columns first..end - 1 of sums int32 [threads, n], after all rows are added to the
    first; the others are then 0."""
    total, all_ = i64(0), sums[0, first:end]
    for k in range(1, sums.shape[0]):
        its = sums[k, first:end]
        for i in range(its.size):
            all_[i] += its[i]
            its[i] = 0
    for i in range(all_.size):
        total += abs(i64(all_[i]))
    return total


@njit
def take_digits(sums, least, most, out):
    """out int8 [n]: the digits of votes, sums int32 [n], of at most `most`; the sums are then 0."""
    for i in range(out.size):
        out[i] = digit(sums[i], least, most)
    sums[:] = 0
