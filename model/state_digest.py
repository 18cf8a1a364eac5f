"""The digest by which replicas are compared at every step (SPEC 16): cheap, and the same on every engine.

It finds every replica that has drifted. It is not cryptographic: two states of one digest can be constructed, but that
gains a liar nothing (cluster.collector, docs/SECURITY.md).
"""

import struct

import numpy as np

FIRST = 3                  # number of the first word of the weights: step and seed are before it
PIECE = 1 << 15            # words that NumPy mixes at a time, so that they stay in the cache

u64 = np.uint64
STEP = u64(0x9E3779B97F4A7C15)
FACTOR_1 = u64(0xBF58476D1CE4E5B9)
FACTOR_2 = u64(0x94D049BB133111EB)
LOW = u64(0xFFFFFFFF)


def mixed(word, number):
    """The uint64 that a word adds to the first sum. For NumPy arrays, and compiled by both engines."""
    x = word + number * STEP
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


def of_state(state):
    """bytes [16]: the digest of a model.parameters.State."""
    digest = Digest(state.step, state.seed)
    for part in (state.weights, state.moments, state.overlay):
        digest.update(np.ascontiguousarray(part).data.cast("B"))
    return digest.digest()
