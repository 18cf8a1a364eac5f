"""Soft targets (SPEC 7): a position is scored against the token that follows it and against tokens that follow the same
context elsewhere in the training data, because the one token that follows is most of the noise in a loss."""

import os
import threading
from collections import namedtuple
from concurrent.futures import Future

import numpy as np

from model import rules
from model.steps import hash32


# The tokens that follow every context: first, size uint32 [n], tokens as the data. Those that follow the context before
# place p are tokens[first[p]:first[p] + size[p]], one or more, in ascending order.
Followers = namedtuple("Followers", "first size tokens")
PIECE = 1 << 20            # places that are sorted at a time


def followers(cfg, tokens, context):
    """The Followers of the contexts of `context` tokens before every place of the data, which are a ring. Places are
    put in order by the first bits of their contexts, and then sorted in pieces, so that little memory is taken."""
    bits, n = max(1, (cfg.VOCAB_SIZE - 1).bit_length()), len(tokens)
    width = np.uint32 if bits * (context + 1) <= 32 else np.uint64

    def keys(places):
        """The context of each place, then its token."""
        key = np.zeros(places.size, width)
        for back in range(context, -1, -1):
            key <<= width(bits)
            key |= np.take(tokens, places - back, mode="wrap")
        return key

    heads, total = np.empty(n, np.uint16), 0
    for at in range(0, n, PIECE):
        head = heads[at:at + PIECE]
        head[:] = keys(np.arange(at, at + head.size)) >> width(max(bits, bits * (context + 1) - 16))
        total += np.bincount(head, minlength=1 << 16)
    ends = np.cumsum(total)
    free, places = ends - total, np.empty(n, np.uint32)      # where the next place of a head goes
    for at in range(0, n, PIECE):
        head = heads[at:at + PIECE]
        count = np.bincount(head, minlength=1 << 16)
        to = np.repeat(free - np.cumsum(count) + count, count) + np.arange(head.size)
        places[to] = at + np.argsort(head, kind="stable")
        free += count
    del heads
    first, size, sorted_tokens = np.empty(n, np.uint32), np.empty(n, np.uint32), np.empty(n, tokens.dtype)
    start = 0
    while start < n:                                         # whole contexts, PIECE places or one head of them
        end = max(ends[np.searchsorted(ends, start, "right")], ends[np.searchsorted(ends, start + PIECE, "right") - 1])
        place = places[start:end].astype(np.int64)
        key = keys(place)
        for low in range(0, bits * (context + 1), 16):       # sorting 16 bits is quick, and equal keys are alike
            order = np.argsort((key >> width(low)).astype(np.uint16), kind="stable")
            key, place = key[order], place[order]
        before = key >> width(bits)
        starts = np.flatnonzero(np.append(True, before[1:] != before[:-1]))
        sizes = np.diff(starts, append=key.size)
        first[place], size[place] = np.repeat(start + starts, sizes), np.repeat(sizes, sizes)
        sorted_tokens[start:end] = key & width((1 << bits) - 1)
        start = end
    return Followers(first, size, sorted_tokens)


def windows(cfg, tokens, known, step, seed, first, count):
    """int32 [count, cfg.WINDOW]: model.rules.windows, then with SOFT_TARGETS the drawn targets of every position.
    known: their Followers, or None: all targets are the token that follows. seed: of the step. first: windows of the
    step before these."""
    starts = rules.window_starts(cfg, len(tokens), step, first, count)
    cut = rules.windows_at(cfg, tokens, starts)
    drawn, T = cfg.TARGETS - 1, cfg.SEQ_LEN
    if not drawn:
        return cut
    if known is None:
        return np.concatenate([cut, np.repeat(cut[:, -T:], drawn, 1)], 1)
    at = starts[:, None] + np.arange(1, T + 1)
    size, followed = (np.take(x, at, mode="wrap").repeat(drawn, axis=1) for x in (known.size, known.first))
    seeds = (np.arange(first, first + count) + seed).astype(np.uint32)[:, None]
    random = hash32(seeds, np.arange(rules.TARGET_STREAM, rules.TARGET_STREAM + T * drawn, dtype=np.uint32))
    return np.concatenate([cut, np.take(known.tokens, random % size + followed)], 1, dtype=np.int32)


def lacks_memory(cfg, count):
    """Whether the memory of this machine is too small for Followers of so many tokens: up to 20 bytes each while they
    are made, and 12 of those that serve meanwhile."""
    each = 32 if len(cfg.SOFT_TARGETS) > 1 else 20
    return bool(cfg.SOFT_TARGETS) and each * count > os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


class Tables:
    """The Followers of the steps of a run. A thread makes those of step 0 while an engine is loaded or compiled, and
    those of the next context of SOFT_TARGETS while the present ones serve. Raises ValueError if the memory is too
    small."""

    def __init__(self, cfg, tokens):
        self._cfg, self._tokens = cfg, tokens
        self._made = {}                      # context: Future of its Followers
        if tokens is not None and lacks_memory(cfg, len(tokens)):
            raise ValueError(f"SOFT_TARGETS: the memory of this machine is too small for {len(tokens):,} tokens of "
                             "training data: use less data, or train without, with -D SOFT_TARGETS=")
        if tokens is not None:
            self._begin(0)

    def at_step(self, step):
        """The Followers of a step; None: its context is 0. Those of the next context are begun when these are there:
        at the start of a run two would share the cores."""
        self._begin(step)
        context = self._cfg.soft_context(step)
        known = self._made[context].result() if context else None
        coming = next((first for first, _ in self._cfg.SOFT_TARGETS if first > step), step)
        self._begin(coming)
        wanted = {self._cfg.soft_context(s) for s in (step - 1, step, coming)}
        self._made = {c: made for c, made in self._made.items() if c in wanted}
        return known

    def _begin(self, step):
        """Begins to make the Followers of a step, if that is not done."""
        context = self._cfg.soft_context(step)
        if not context or context in self._made:
            return
        made = self._made[context] = Future()

        def make():
            try:
                made.set_result(followers(self._cfg, self._tokens, context))
            except BaseException as error:
                made.set_exception(error)

        threading.Thread(target=make, daemon=True).start()
