"""The chunks of one step: who evaluates which, the results, and which of them are audited. No sockets.
Two honest results of a chunk are the same to the bit. A chunk that is audited, or whose results differ, is done when a
result has at least two votes (trust.tally), and more than any other. The others have lied."""

from collections import deque

from cluster.trust import tally, withdraw
from model import ternary

COPY_AFTER = 1.5           # an idle worker evaluates a chunk too after so many times its usual time; times its holders


class Step:
    """holders: chunk -> {peer: since}; a peer is any object with an `author`, who may have several. audited: chunks
    that need two results if there are two authors; results: chunk -> {(packed fitness, sum of losses): authors};
    done: chunk -> the one that counts. alone: there is no second author for an audit; by_host: authors of several hosts
    are at work, so an audit needs two of them."""

    def __init__(self, cfg, audited=(), alone=False, by_host=False):
        self.cfg, self.audited, self.alone, self.by_host = cfg, set(audited), alone, by_host
        self.queue = deque([*range(cfg.N_CHUNKS), *sorted(self.audited)])
        self.holders, self.results, self.done, self._disputed = {}, {}, {}, set()

    @property
    def complete(self):
        return len(self.done) == self.cfg.N_CHUNKS

    def fitness(self):
        """bytes: the packed fitness of all pairs, once the step is complete."""
        return ternary.join([self.done[chunk][0] for chunk in range(self.cfg.N_CHUNKS)], self.cfg.CHUNK_SIZE // 2)

    def take(self, peer, author, now):
        """The next chunk that this peer has neither held nor delivered, or None."""
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
        return sorted((chunk for chunk, peers in self.holders.items()
                       if now - max(peers.values()) > COPY_AFTER * usual * len(peers)),
                      key=lambda chunk: min(self.holders[chunk].values()))

    def copy(self, peer, author, now, late):
        """One of the `late` chunks for an idle peer, to evaluate a second time; it is removed from the list."""
        chunk = next((c for c in late if c in self.holders and not self._used(c, peer, author)), None)
        if chunk is not None:
            late.remove(chunk)
            self.holders[chunk][peer] = now
        return chunk

    def give_back(self, peer, chunk):
        self._release(peer, chunk)
        if chunk not in self.done and not self.holders.get(chunk):
            self.queue.appendleft(chunk)

    def audit(self, chunk):
        """A second author evaluates this chunk too, if it is not done yet."""
        if chunk not in self.audited and chunk not in self.done:
            self.audited.add(chunk)
            self.queue.append(chunk)

    def result(self, peer, author, chunk, packed, sum_loss):
        """Returns the authors who have lied."""
        self._release(peer, chunk)
        kinds = self.results.setdefault(chunk, {})
        if author in self._authors(chunk):
            return []
        kinds.setdefault((packed, sum_loss), []).append(author)
        return self._judge(chunk)

    def settle(self):
        """Judges what waits for a second author, after `alone` or `by_host` has changed."""
        for chunk in [c for c in self.results if c not in self.done]:
            self._judge(chunk)

    def withdraw(self, author):
        """Forgets every result of this author; chunks that nobody else has done are to be done again."""
        for chunk, kinds in self.results.items():
            withdraw(kinds, author)
            if self.done.get(chunk) not in kinds:
                self.done.pop(chunk, None)
                self._judge(chunk)

    def disputed(self):
        """[(chunk, authors)] whose results differ and are not decided yet, each chunk once."""
        found = {c for c in self.results if c not in self.done and len(self.results[c]) > 1} - self._disputed
        self._disputed |= found
        return [(chunk, self._authors(chunk)) for chunk in sorted(found)]

    def _judge(self, chunk):
        kinds = self.results[chunk]
        votes = tally(kinds, self.by_host)
        ranked = sorted(kinds, key=lambda kind: -votes[kind])
        first, second = ([votes[kind] for kind in ranked] + [0, 0])[:2]
        if not (first > max(second, 1) or first == 1 and not second and (self.alone or chunk not in self.audited)):
            self.done.pop(chunk, None)
            if not self.holders.get(chunk) and chunk not in self.queue:
                self.queue.appendleft(chunk)
            return []
        self.done[chunk] = ranked[0]
        return [author for kind in ranked[1:] for author in kinds[kind]]

    def _authors(self, chunk):
        return [author for authors in self.results.get(chunk, {}).values() for author in authors]

    def _used(self, chunk, peer, author):
        """Whether the peer holds this chunk, its author has done it, or its host has while another one is to check
        that. Where results differ everybody is heard: a host that is right twice outvotes nobody alone."""
        holders, authors = self.holders.get(chunk, ()), self._authors(chunk)
        if peer in holders or author in authors:
            return True
        if not self.by_host or len(self.results.get(chunk, ())) > 1:
            return False
        return author.voter in {a.voter for a in (*authors, *(holder.author for holder in holders))}

    def _release(self, peer, chunk):
        if self.holders.get(chunk, {}).pop(peer, None) is not None and not self.holders[chunk]:
            del self.holders[chunk]
