"""What a coordinator knows of one step: which chunks are handed out to whom, which results have come, and which chunks
are audited. No sockets, and no clock of its own.

Two honest results of a chunk are equal to the bit. A chunk that is audited, or whose results differ, is done when one
result has at least two votes (trust.tally) and more votes than any other. The authors of the others have lied."""

from collections import defaultdict, deque, namedtuple
from itertools import islice

from cluster.trust import tally, WHY_DIFFERENT, withdraw
from model import ternary

LOOK_AHEAD = 16            # chunks of the queue that `take` looks at for one that the worker knows
COPY_AFTER = 1.5           # an idle worker copies a chunk after this multiple of its usual time, times its holders


Outcome = namedtuple("Outcome", "packed sum_loss")       # the result of a chunk; packed: bytes of ternary fitness
# What one worker has been handed in a step. given: {chunk: when, or None once its result has come}, all; held:
# {chunk: when}, its leases
Account = namedtuple("Account", "given held")


class Step:
    """accounts: {worker: Account}, where a worker is any object with an `author`, who may have several; holders:
    {chunk: {worker: when}}, the leases; audited: chunks that need two results if there are two authors; results:
    {chunk: {Outcome: authors}}; done: {chunk: the Outcome that counts}; validators: authors that have been handed
    chunk 0. alone: there is no second author for an audit; by_host: authors of several hosts are at work, so an audit
    needs two of them."""

    def __init__(self, cfg, audited=(), alone=False, by_host=False):
        self.cfg = cfg
        self.doubt = WHY_DIFFERENT if cfg.OBJECTIVE else ""          # for messages about results that differ
        self.audited = set(audited)
        self.alone = alone
        self.by_host = by_host
        self.queue = deque([*range(cfg.N_CHUNKS), *sorted(self.audited)])
        self.accounts = defaultdict(lambda: Account({}, {}))
        self.holders = {}
        self.results = {}
        self.done = {}
        self.validators = set()
        self._reported = set()                       # disputed chunks that `disputed` has returned

    @property
    def complete(self):
        return len(self.done) == self.cfg.N_CHUNKS

    def fitness(self):
        """bytes: the packed digits of all chunks, once the step is complete."""
        return ternary.join([self.done[chunk].packed for chunk in range(self.cfg.N_CHUNKS)], self.cfg.CHUNK_DIGITS)

    def end(self):
        """Forgets the results: of a step that has ended only `accounts` and `validators` are still used."""
        self.results, self.done = {}, {}

    def take(self, worker, now, before=None):
        """Hands out the next chunk that this worker has neither held nor delivered. Returns it, or None. before: the
        Account of the worker in the step before, or None. A chunk that it delivered then, if it is among the next few,
        comes first: a worker that is handed the same chunks in every step begins with them before they are handed
        out."""
        for chunk in islice(self.queue, LOOK_AHEAD if before else 0):
            if before.given.get(chunk, now) is None and chunk not in self.done and not self._excluded(chunk, worker):
                self.queue.remove(chunk)
                return self._hand_out(chunk, worker, now)
        skipped, found = [], None
        while self.queue and found is None:
            chunk = self.queue.popleft()
            if chunk not in self.done:
                if self._excluded(chunk, worker):
                    skipped.append(chunk)
                else:
                    found = chunk
        self.queue.extendleft(reversed(skipped))
        return None if found is None else self._hand_out(found, worker, now)

    def late(self, now, usual):
        """[chunk]: those that take longer than usual (seconds), the oldest first."""
        return sorted((chunk for chunk, since in self.holders.items()
                       if now - max(since.values()) > COPY_AFTER * usual * len(since)),
                      key=lambda chunk: min(self.holders[chunk].values()))

    def copy(self, worker, now, late):
        """Hands out one of the `late` chunks to an idle worker, as a second copy, and removes it from the list. Returns
        the chunk, or None."""
        chunk = next((c for c in late if c in self.holders and not self._excluded(c, worker)), None)
        if chunk is not None:
            late.remove(chunk)
            self._hand_out(chunk, worker, now)
        return chunk

    def give_back(self, worker, chunk):
        """Ends a lease without a result."""
        self._end_lease(worker, chunk)
        if chunk not in self.done and chunk not in self.holders:
            self.queue.appendleft(chunk)

    def leave(self, worker):
        """The worker has gone: its chunks are handed out again."""
        for chunk in list(self.accounts[worker].held):
            self.give_back(worker, chunk)
        del self.accounts[worker]

    def audit(self, chunk):
        """A second author evaluates this chunk too, if it is not done yet."""
        if chunk not in self.audited and chunk not in self.done:
            self.audited.add(chunk)
            self.queue.append(chunk)

    def result(self, worker, chunk, packed, sum_loss):
        """Takes a result. Returns the authors who have lied."""
        self._end_lease(worker, chunk)
        if worker.author in self._authors(chunk):
            return []
        self.results.setdefault(chunk, {}).setdefault(Outcome(packed, sum_loss), []).append(worker.author)
        return self._judge(chunk)

    def settle(self):
        """Judges the chunks that wait for a second author, after `alone` or `by_host` has changed."""
        for chunk in self.results:
            if chunk not in self.done:
                self._judge(chunk)

    def withdraw(self, author):
        """Forgets every result of this author; chunks that nobody else has done are to be done again."""
        for chunk, outcomes in self.results.items():
            withdraw(outcomes, author)
            if self.done.get(chunk) not in outcomes:
                self.done.pop(chunk, None)
                self._judge(chunk)

    def disputed(self):
        """[(chunk, authors)] whose results differ and are not decided yet, each chunk once."""
        found = {c for c in self.results if c not in self.done and len(self.results[c]) > 1} - self._reported
        self._reported |= found
        return [(chunk, self._authors(chunk)) for chunk in sorted(found)]

    def _judge(self, chunk):
        outcomes = self.results[chunk]
        if len(outcomes) == 1 and (self.alone or chunk not in self.audited):
            self.done[chunk] = next(iter(outcomes))
            return []
        votes = tally(outcomes, self.by_host)
        best = max(votes, key=votes.get, default=None)
        most = votes.pop(best, 0)
        if most > max([1, *votes.values()]):
            self.done[chunk] = best
            return [author for outcome in votes for author in outcomes[outcome]]
        self.done.pop(chunk, None)
        if chunk not in self.holders and chunk not in self.queue:
            self.queue.appendleft(chunk)
        return []

    def _authors(self, chunk):
        return [author for authors in self.results.get(chunk, {}).values() for author in authors]

    def _excluded(self, chunk, worker):
        """Whether this worker must not get the chunk: it holds it, its author has done it, or its host holds it or has
        done it and another host must check it. If results differ, every host may evaluate it: a host has one vote
        however many results it gives."""
        holders = self.holders.get(chunk, ())
        authors = self._authors(chunk)
        if worker in holders or worker.author in authors:
            return True
        if not self.by_host or len(self.results.get(chunk, ())) > 1:
            return False
        return worker.author.voter in {a.voter for a in (*authors, *(holder.author for holder in holders))}

    def _hand_out(self, chunk, worker, now):
        account = self.accounts[worker]
        account.held[chunk] = account.given[chunk] = now
        self.holders.setdefault(chunk, {})[worker] = now
        if chunk == 0:
            self.validators.add(worker.author)
        return chunk

    def _end_lease(self, worker, chunk):
        if self.accounts[worker].held.pop(chunk, None) is not None:
            del self.holders[chunk][worker]
            if not self.holders[chunk]:
                del self.holders[chunk]
