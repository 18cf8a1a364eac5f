"""One step's chunks: who evaluates which, what came back, what has to be checked. No sockets here; drive it and ask it.

Evaluation is deterministic to the bit, so two honest results of a chunk are the same. A chunk that is audited, or about which two
results disagree, is done when two authors agree on it and more than on any other result; who said otherwise is a liar.
"""

from collections import deque

import numpy as np

COPIES = 2                 # evaluations of one chunk at a time, once workers are idle
COPY_AFTER = 1.5           # times the usual time of a chunk, before an idle worker takes a copy of it


class Step:
    """holders: chunk -> {peer: since}, a peer being whatever the caller likes; results come from authors, who outlive their peers.
    audited: chunks that need two results where there are two authors."""

    def __init__(self, cfg, audited=()):
        self.cfg, self.audited = cfg, set(audited)
        self.queue = deque([*range(cfg.N_CHUNKS), *sorted(self.audited)])
        self.holders, self.results, self.done = {}, {}, {}     # done: chunk -> (packed, sum of losses)
        self.fitness = np.zeros(cfg.N_PAIRS, np.int8)

    @property
    def complete(self):
        return len(self.done) == self.cfg.N_CHUNKS

    @property
    def sum_loss(self):
        return sum(loss for _, loss in self.done.values())

    def take(self, peer, author, now):
        """The next chunk for this peer, None where there is none that it has not touched."""
        skipped, found = [], None
        while self.queue and found is None:
            chunk = self.queue.popleft()
            if chunk not in self.done:
                if self._touched(chunk, peer, author):
                    skipped.append(chunk)
                else:
                    found = chunk
        self.queue.extendleft(reversed(skipped))
        if found is not None:
            self.holders.setdefault(found, {})[peer] = now
        return found

    def late(self, now, usual):
        """[chunk]: those that are out for longer than chunks usually are, the oldest first."""
        since = [(min(who.values()), chunk) for chunk, who in self.holders.items() if len(who) < COPIES]
        return [chunk for when, chunk in sorted(since) if now - when > COPY_AFTER * usual]

    def copy(self, peer, author, now, late):
        """A second evaluation of one of the `late` chunks, for an idle peer; it is taken out of the list."""
        for chunk in late:
            if chunk in self.holders and not self._touched(chunk, peer, author):
                late.remove(chunk)
                self.holders[chunk][peer] = now
                return chunk
        return None

    def give_back(self, peer, chunk):
        """The peer will not do it, or not soon."""
        self._release(peer, chunk)
        if chunk not in self.done and not self.holders.get(chunk):
            self.queue.appendleft(chunk)

    def result(self, peer, author, chunk, packed, sum_loss, fitness, alone):
        """Takes a result in. alone: there is no second author, so that an audit cannot be. Returns the authors who lied."""
        self._release(peer, chunk)
        kinds = self.results.setdefault(chunk, {})
        if any(author in authors for authors, _ in kinds.values()):
            return []
        kinds.setdefault((packed, sum_loss), ([], fitness))[0].append(author)
        return self._judge(chunk, alone)

    def settle(self, alone):
        """Judges again what waited for a second author, after the number of authors has changed."""
        for chunk in [c for c in self.results if c not in self.done] if alone else ():
            self._judge(chunk, alone)

    def withdraw(self, author, alone):
        """Forgets every result of this author; what nobody else said is to be done again."""
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
        """[(chunk, authors)] on which results disagree and nobody has decided yet."""
        return [(chunk, [a for authors, _ in self.results[chunk].values() for a in authors])
                for chunk in self.results if chunk not in self.done and len(self.results[chunk]) > 1]

    def _judge(self, chunk, alone):
        kinds = self.results[chunk]
        ranked = sorted(kinds, key=lambda kind: -len(kinds[kind][0]))
        first, second = ([len(kinds[kind][0]) for kind in ranked] + [0, 0])[:2]
        if not (first > max(second, 1) or first == 1 and not second and (alone or chunk not in self.audited)):
            self.done.pop(chunk, None)
            self._want(chunk)
            return []
        best, pairs = ranked[0], self.cfg.CHUNK_SIZE // 2
        self.done[chunk] = best
        self.fitness[chunk * pairs:(chunk + 1) * pairs] = kinds[best][1]
        return [author for kind in ranked[1:] for author in kinds[kind][0]]

    def _want(self, chunk):
        if chunk not in self.done and not self.holders.get(chunk) and chunk not in self.queue:
            self.queue.appendleft(chunk)

    def _touched(self, chunk, peer, author):
        return peer in self.holders.get(chunk, ()) or any(author in authors for authors, _ in self.results.get(chunk, {}).values())

    def _release(self, peer, chunk):
        who = self.holders.get(chunk)
        if who is not None:
            who.pop(peer, None)
            if not who:
                del self.holders[chunk]
