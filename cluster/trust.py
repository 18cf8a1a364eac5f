"""Votes of the workers on the digest of a step's state, and on everything else that nobody may state alone: the figure
of a validation, the hash of a snapshot, the training data.
A state is right when it has more votes than any other. A worker that is outvoted, or whose state is tied with another
when all have voted, rebuilds its replica once; after that it is banned, or waits for a worker that breaks the tie."""

import math

STEPS_KEPT = 8             # steps whose digests are remembered
CLOSE = 1e-6               # share by which two engines may differ in the nats of a validation
# verdicts on a state
AGREES = "agrees"
REBUILD = "rebuild"
WAIT = "wait"
BAN = "ban"
# said of results and rewards that differ in a run with an objective
WHY_DIFFERENT = "; is reward() a function of its input alone? look for sets, clocks and random"


def tally(statements, by_host=False):
    """{statement: votes} of {statement: authors}. A certificate, or else a host, has one vote, because anybody can take
    many names. Only where all authors are of one host, and no other is at work (by_host), each of them has a vote."""
    by_host = by_host or len({author.voter for authors in statements.values() for author in authors}) > 1
    return {what: len({a.voter if by_host else a for a in authors}) for what, authors in statements.items()}


def shares(statements, what, by_host=False):
    """(votes for this statement, most votes for another); see `tally`."""
    votes = tally(statements, by_host)
    return votes.pop(what, 0), max(votes.values(), default=0)


def withdraw(statements, author):
    """Removes what an author has stated."""
    for what in [what for what, authors in statements.items() if author in authors]:
        statements[what].remove(author)
        if not statements[what]:
            del statements[what]


def of_most(votes, digest, author, known):
    """The digest of data that counts after an author has stated this one. votes: {digest: voters}, in which it is
    noted; known: the one that counted before, zeros for none. It stays in a tie, and has a vote of its own if it is
    older than this session."""
    if not any(known):
        known = digest
    elif not votes:
        votes[known] = {None}
    for other in [d for d in votes if d not in (known, digest)]:       # so that a host cannot fill the memory
        votes[other].discard(author.voter)
        if not votes[other]:
            del votes[other]
    votes.setdefault(digest, set()).add(author.voter)
    return digest if len(votes[digest]) > len(votes[known]) else known


class Trust:
    """votes: {step: {digest: authors}}; figures: {(step, size): [(author, figure)]} of validations and rewards; data,
    validation: {digest: voters} of the training and the held-out data, see `of_most`."""

    _reported = False          # an unconfirmed validation

    def __init__(self):
        self.votes = {}
        self.figures = {}
        self.data = {}
        self.validation = {}
        self._tied = {}                              # step without a majority: whether that was told

    def judge(self, step, author, digest, rebuilt, at_work=()):
        """Takes a vote in. Returns the verdict on it (AGREES, REBUILD, WAIT or BAN), the authors that state something
        else, with AGREES, and whether it settles a tie (AGREES) or is the first to tell of it (WAIT). rebuilt: the
        author has rebuilt its replica at this step; at_work: voters. While one of them has still to vote, a tie is
        waited out: nobody can make others rebuild who were about to outvote it."""
        votes = self.votes.setdefault(step, {})
        while len(self.votes) > STEPS_KEPT:
            self._tied.pop(oldest := min(self.votes), None)
            del self.votes[oldest]
        if author not in votes.get(digest, ()):
            withdraw(votes, author)
            votes.setdefault(digest, set()).add(author)
        count, others = self._count(step, digest)
        if count > others:
            return (AGREES, {a for d, authors in votes.items() if d != digest for a in authors},
                    self._tied.pop(step, None) is not None)
        voted = {author.voter for authors in votes.values() for author in authors}
        if count < others or not rebuilt and voted.issuperset(at_work):
            return BAN if rebuilt else REBUILD, set(), False
        news = rebuilt and not self._tied.get(step)
        self._tied[step] = self._tied.get(step) or rebuilt
        return WAIT, set(), news

    def forget(self, author):
        for votes in self.votes.values():
            withdraw(votes, author)

    def decided(self, step):
        """Whether one state of this step has more votes than any other; so it is where nobody has voted."""
        return not self.contradicts(step, self.leading(step))

    def leading(self, step):
        """The digest with most votes at this step, b"" where nobody has voted."""
        votes = tally(self.votes.get(step, {}))
        return max(votes, key=votes.get, default=b"")

    def contradicts(self, step, digest):
        """Whether another state of this step has votes, and at least as many as this one."""
        count, others = self._count(step, digest)
        return 0 < others >= count

    def clear(self):
        for known in (self.votes, self.figures, self._tied):
            known.clear()

    def confirms(self, step, author, figure, several, by_host):
        """Whether the (tokens, bytes, nats) of a validation count, or the (texts, mean) of a reward: of several authors
        two must state the same."""
        stated = self.figures.setdefault((step, len(figure)), [])
        while len(self.figures) > 4:
            del self.figures[min(self.figures)]
        stated.append((author, figure))
        same = {a for a, other in stated
                if other[:-1] == figure[:-1] and math.isclose(other[-1], figure[-1], rel_tol=CLOSE)}
        if confirmed := not several or tally({figure: same}, by_host)[figure] > 1:
            stated.clear()
        return confirmed

    def report_unconfirmed(self, step, objective, warn):
        """Warns of the authors of a figure of this step that does not count, the first time that there is one.
        objective: whether the run has one; warn: takes a line."""
        names = sorted({author.name for (at, _), stated in self.figures.items() if at == step for author, _ in stated})
        if names and not self._reported:
            self._reported = True
            what, files = (("reward or validation", "HELD_OUT and VAL_FILE" + WHY_DIFFERENT) if objective else
                           ("validation", "VAL_FILE"))
            warn(f"step {step}: its {what} is not used: two workers must state the same, "
                 f"{' and '.join(names)} did not: give every worker the same {files}")

    def _count(self, step, digest):
        """(votes for this digest, most votes for another); (1, 0) if all state this one, however many they are."""
        votes = self.votes.get(step, {})
        return (1, 0) if [*votes] == [digest] else shares(votes, digest)
