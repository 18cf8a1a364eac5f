"""Whether the replicas of the workers are one and the same: votes on the digest of a step's state.

A state is right when more authors state its digest than any other. Who is outvoted, or one of as many, rebuilds its
replica once; after that it is banned, or waits for somebody who decides.
"""

from typing import NamedTuple

STEPS_KEPT = 8             # digests of so many steps are remembered
AGREES, REBUILD, WAIT, BAN = "agrees", "rebuild", "wait", "ban"


class Verdict(NamedTuple):
    """kind: AGREES, REBUILD, WAIT or BAN; outvoted: the authors that state something else, where the verdict is AGREES;
    news: whether this settles a tie (AGREES) or is the first to notice it (WAIT)."""
    kind: str
    outvoted: set = frozenset()
    news: bool = False


class Trust:
    """votes: {step: {digest: authors}}, of the last steps."""

    def __init__(self):
        self.votes, self._tied = {}, set()

    def judge(self, step, author, digest, rebuilt):
        """Takes a vote in and gives the Verdict on it. rebuilt: the author has rebuilt its replica at this step."""
        votes = self.votes.setdefault(step, {})
        while len(self.votes) > STEPS_KEPT:
            self._tied.discard(oldest := min(self.votes))
            del self.votes[oldest]
        self._withdraw(votes, author)
        votes.setdefault(digest, set()).add(author)
        count, others = len(votes[digest]), self._most_against(votes, digest)
        if count > others:
            outvoted = {a for d, authors in votes.items() if d != digest for a in authors}
            settled = step in self._tied
            self._tied.discard(step)
            return Verdict(AGREES, outvoted, settled)
        if not rebuilt:
            return Verdict(REBUILD)
        if count < others:
            return Verdict(BAN)
        news = step not in self._tied
        self._tied.add(step)
        return Verdict(WAIT, news=news)

    def forget(self, author):
        """The author has left."""
        for votes in self.votes.values():
            self._withdraw(votes, author)

    def decided(self, step):
        """Whether one state of this step has more votes than any other; so it is where nobody has voted."""
        sizes = sorted((len(authors) for authors in self.votes.get(step, {}).values()), reverse=True)
        return len(sizes) < 2 or sizes[0] > sizes[1]

    def leading(self, step):
        """The digest with most votes at this step, b"" where nobody has voted."""
        votes = self.votes.get(step, {})
        return max(votes, key=lambda digest: len(votes[digest]), default=b"")

    def contradicts(self, step, digest):
        """Whether another state of this step has votes, and at least as many as this one."""
        votes = self.votes.get(step, {})
        return 0 < self._most_against(votes, digest) >= len(votes.get(digest, ()))

    def clear(self):
        """Another state takes the place of the present one."""
        self.votes.clear()
        self._tied.clear()

    @staticmethod
    def _most_against(votes, digest):
        return max((len(authors) for d, authors in votes.items() if d != digest), default=0)

    @staticmethod
    def _withdraw(votes, author):
        for digest, authors in list(votes.items()):
            authors.discard(author)
            if not authors:
                del votes[digest]
