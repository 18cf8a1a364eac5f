"""One step's chunks: who evaluates which, the results, and which of them have to be checked. No sockets.

Evaluation is deterministic to the bit, so two honest results of a chunk are the same. A chunk that is audited, or whose
results differ, is done when at least two authors agree, and more than on any other result. The others have lied.
"""

from collections import deque

import numpy as np

COPIES = 2                 # most evaluations of one chunk at a time, when workers are idle
COPY_AFTER = 1.5           # an idle worker evaluates a chunk too after so many times its usual time


class Step:
    """holders: chunk -> {peer: since}; a peer is any object. Results count by author, whoever that has as peers.
    audited: chunks that need two results if there are two authors; results: chunk -> {(packed, sum of losses):
    (authors, fitness)}; done: chunk -> the (packed, sum of losses) that counts; fitness: int8 [N_PAIRS], of `done`."""

    def __init__(self, cfg, audited=()):
        self.cfg, self.audited = cfg, set(audited)
        self.queue = deque([*range(cfg.N_CHUNKS), *sorted(self.audited)])
        self.holders, self.results, self.done = {}, {}, {}
        self.fitness = np.zeros(cfg.N_PAIRS, np.int8)

    @property
    def complete(self):
        return len(self.done) == self.cfg.N_CHUNKS

    @property
    def sum_loss(self):
        return sum(loss for _, loss in self.done.values())

    def take(self, peer, author, now):
        """The next chunk for this peer, None where there is none that it does not hold or has not done."""
        skipped, found = [], None
        while self.queue and found is None:
            chunk = self.queue.popleft()
            if chunk not in self.done:
                if self._used(chunk, peer, author):
                    skipped.append(chunk)
                else:
                    found = chunk
        self.queue.extendleft(reversed(skipped))
        if found is not None:
            self.holders.setdefault(found, {})[peer] = now
        return found

    def late(self, now, usual):
        """[chunk]: those that take longer than usual (seconds), the oldest first."""
        since = [(min(peers.values()), chunk) for chunk, peers in self.holders.items() if len(peers) < COPIES]
        return [chunk for when, chunk in sorted(since) if now - when > COPY_AFTER * usual]

    def copy(self, peer, author, now, late):
        """One of the `late` chunks for an idle peer, to evaluate a second time; it is removed from the list."""
        for chunk in late:
            if chunk in self.holders and not self._used(chunk, peer, author):
                late.remove(chunk)
                self.holders[chunk][peer] = now
                return chunk
        return None

    def give_back(self, peer, chunk):
        """The peer will not do this chunk, or not soon."""
        self._release(peer, chunk)
        if chunk not in self.done and not self.holders.get(chunk):
            self.queue.appendleft(chunk)

    def result(self, peer, author, chunk, packed, sum_loss, fitness, alone):
        """Notes a result. alone: there is no second author for an audit. Returns the authors who have lied."""
        self._release(peer, chunk)
        kinds = self.results.setdefault(chunk, {})
        if any(author in authors for authors, _ in kinds.values()):
            return []
        kinds.setdefault((packed, sum_loss), ([], fitness))[0].append(author)
        return self._judge(chunk, alone)

    def settle(self, alone):
        """Judges what waits for a second author, after the number of authors has changed."""
        for chunk in [c for c in self.results if c not in self.done] if alone else ():
            self._judge(chunk, alone)

    def withdraw(self, author, alone):
        """Forgets every result of this author; chunks that nobody else has done are to be done again."""
        for chunk, kinds in self.results.items():
            for key, (authors, _) in list(kinds.items()):
                if author in authors:
                    authors.remove(author)
                    if not authors:
                        del kinds[key]
            if self.done.get(chunk) not in kinds:
                self.done.pop(chunk, None)
                self._judge(chunk, alone)

    def disputed(self):
        """[(chunk, authors)] whose results differ and are not decided yet."""
        return [(chunk, [a for authors, _ in self.results[chunk].values() for a in authors])
                for chunk in self.results if chunk not in self.done and len(self.results[chunk]) > 1]

    def _judge(self, chunk, alone):
        kinds = self.results[chunk]
        ranked = sorted(kinds, key=lambda kind: -len(kinds[kind][0]))
        first, second = ([len(kinds[kind][0]) for kind in ranked] + [0, 0])[:2]
        if not (first > max(second, 1) or first == 1 and not second and (alone or chunk not in self.audited)):
            self.done.pop(chunk, None)
            if not self.holders.get(chunk) and chunk not in self.queue:
                self.queue.appendleft(chunk)
            return []
        best, pairs = ranked[0], self.cfg.CHUNK_SIZE // 2
        self.done[chunk] = best
        self.fitness[chunk * pairs:(chunk + 1) * pairs] = kinds[best][1]
        return [author for kind in ranked[1:] for author in kinds[kind][0]]

    def _used(self, chunk, peer, author):
        """Whether the peer holds this chunk, or its author has done it."""
        return (peer in self.holders.get(chunk, ())
                or any(author in authors for authors, _ in self.results.get(chunk, {}).values()))

    def _release(self, peer, chunk):
        peers = self.holders.get(chunk)
        if peers is not None:
            peers.pop(peer, None)
            if not peers:
                del self.holders[chunk]
