"""The digest by which replicas are compared at every step (SPEC 16): cheap, and the same on every engine.

It finds a replica that has drifted, however little. It does not withstand somebody who looks for two states with the
same digest, which brings a liar nothing: see cluster.collector and docs/SECURITY.md.
"""

import struct

import numpy as np

FIRST = 3                  # number of the first word of the weights: step and seed are before it
PIECE = 1 << 15            # words that NumPy mixes at a time, so that they stay in the cache

u64 = np.uint64
STEP, FACTOR_1, FACTOR_2 = u64(0x9E3779B97F4A7C15), u64(0xBF58476D1CE4E5B9), u64(0x94D049BB133111EB)
BY_30, BY_27, BY_31, HALF, LOW = u64(30), u64(27), u64(31), u64(32), u64(0xFFFFFFFF)


def mixed(word, number):
    """The uint64 that a word adds to the first sum. For NumPy arrays, and compiled by both engines."""
    x = word + number * STEP
    x = (x ^ (x >> BY_30)) * FACTOR_1
    x = (x ^ (x >> BY_27)) * FACTOR_2
    return x ^ (x >> BY_31)


def halves(x):
    """The uint64 that it adds to the second sum."""
    return (x & LOW) * (x >> HALF)


class Digest:
    """The digest of bytes that come in pieces. number: that of the next word."""

    def __init__(self, step, seed):
        self.number, self._rest, self._sums = 1, b"", [0, 0]
        self.update(struct.pack("<QQ", step, seed))

    def update(self, data):
        """Goes on with a bytes-like object."""
        data = self._rest + data if self._rest else data
        words = np.frombuffer(data, "<u8", len(data) // 8)
        self._rest = bytes(data[8 * words.size:])
        for at in range(0, words.size, PIECE):
            some = words[at:at + PIECE]
            x = mixed(some, np.arange(self.number, self.number + some.size, dtype=u64))
            self.add(int(x.sum(dtype=u64)), int(halves(x).sum(dtype=u64)))
            self.number += some.size

    def add(self, first, second):
        """Takes in the sums of words that somebody else has mixed; `number` is theirs to move."""
        self._sums = [(mine + its) % (1 << 64) for mine, its in zip(self._sums, (first, second))]

    def digest(self):
        """bytes [16]."""
        if self._rest:
            self.update(bytes(-len(self._rest) % 8))
        return struct.pack("<QQ", *self._sums)


def of_state(state):
    """bytes [16]: the digest of an model.parameters.State."""
    digest = Digest(state.step, state.seed)
    for part in (state.weights, state.moments, state.overlay):
        digest.update(np.ascontiguousarray(part).data.cast("B"))
    return digest.digest()
