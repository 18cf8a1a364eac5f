"""Votes: on the results of the chunks of one step, and on the states of the workers. No sockets, and no clock.

Two honest results of a chunk are equal to the bit. When one counts:

at work          chunk                    it counts with
one author       any                      its result, once it has been alone for the dispatcher's patience
several          not audited, one result  that
several          audited, or disputed     two votes, and more than any other result; who gave another has erred
no other than    disputed                 a third vote. Meanwhile they evaluate it again: who contradicts itself has
who disagree                              erred

A chunk is audited by chance, or because its author is new or has erred (dispatch.Dispatcher).

A state is right when it has more votes than any other. A worker that is outvoted rebuilds its replica, and so do all
in a tie."""

from collections import Counter, defaultdict, deque, namedtuple
from itertools import chain, islice

from cluster.hub import Newest
from model import steps

LOOK_AHEAD = 16            # chunks of the queue that `take` looks at for one that the worker knows
COPY_AFTER = 1.5           # an idle worker copies a chunk after this multiple of its usual time, times its holders
STATES_KEPT = 8            # steps whose states are remembered

# Who answers for results: a machine with a key, or else a process. Each has one vote. name: that of the worker, by
# which errors are counted and bans are made; voter: the name again with a key, else a random id of the process
Author = namedtuple("Author", "name voter")
# Who answers for a state: a process. Those with one key have one vote for each state that they hold together.
Process = namedtuple("Process", "name voter id")
Outcome = namedtuple("Outcome", "packed sum_loss")       # the result of a chunk; packed: bytes of digits


class Step:
    """The chunks of one step. holders: {chunk: {worker: when}} and leases: {worker: {chunk: when}}, which hold the
    same; a worker is any object with an `author`. audited: chunks that need two results; results: {chunk: {Author:
    Outcome}}; done: {chunk: the Outcome that counts}; delivered: {worker: chunks}. alone: nobody else is there for an
    audit; authors: those at work."""

    alone = False
    authors = frozenset()

    def __init__(self, cfg):
        self.cfg = cfg
        self.audited = set()
        self.queue = deque(range(cfg.N_CHUNKS))
        self.holders = {}
        self.leases = defaultdict(dict)
        self.results = {}
        self.done = {}
        self.delivered = defaultdict(set)
        self._repeated = defaultdict(set)            # {chunk: authors that have stated the same twice}
        self._reported = set()                       # chunks of `dispute`
        self._sums = None                            # of the digits of what is done (steps.Sums)

    @property
    def disputed(self):
        """Whether results of a chunk have differed."""
        return bool(self._reported)

    @property
    def complete(self):
        return len(self.done) == self.cfg.N_CHUNKS

    def fitness(self, cooling=0):
        """bytes: the step, once it is complete. cooling: see steps.join_digits."""
        chunks = [self.done[chunk].packed for chunk in range(self.cfg.N_CHUNKS)]
        return steps.join_digits(self.cfg, chunks, cooling, self._sums)

    def take(self, worker, now, known=()):
        """Hands out the next chunk that this worker may do. Returns it, or None. known: chunks that it delivered in the
        step before. One of these comes first if it is among the next few: a worker that is handed the same chunks in
        every step begins with them before they are handed out."""
        ahead = [chunk for chunk in islice(self.queue, LOOK_AHEAD) if chunk in known]
        for chunk in chain(ahead, self.queue):
            if chunk not in self.done and not self._excluded(chunk, worker):
                self.queue.remove(chunk)
                return self._hand_out(chunk, worker, now)

    def late(self, now, usual):
        """[chunk]: those that take longer than usual (seconds), the oldest first; none while others wait in the queue.
        """
        if any(chunk not in self.done for chunk in self.queue):
            return []
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
        self._wanted(chunk)

    def leave(self, worker):
        """The worker has gone: its chunks are handed out again."""
        for chunk in list(self.leases[worker]):
            self.give_back(worker, chunk)
        del self.leases[worker]

    def audit(self, chunk):
        """A second author evaluates this chunk too, if it is not done yet. Returns whether that is new."""
        if chunk in self.audited or chunk in self.done:
            return False
        self.audited.add(chunk)
        self.queue.append(chunk)
        return True

    def result(self, worker, chunk, packed, sum_loss):
        """Takes a result. Returns the authors that have erred, a set."""
        self._end_lease(worker, chunk)
        self.delivered[worker].add(chunk)
        author, outcome = worker.author, Outcome(packed, sum_loss)
        outcomes = self.results.setdefault(chunk, {})
        before = outcomes.get(author)
        outcomes[author] = outcome
        if before == outcome:
            self._repeated[chunk].add(author)
        erred = self._judge(chunk)
        self._wanted(chunk)
        return erred if before in (None, outcome) else erred | {author}

    def settle(self):
        """Judges the chunks that wait for a second author, after `alone` has changed."""
        for chunk in self.results:
            if chunk not in self.done:
                self._judge(chunk)

    def withdraw(self, author):
        """Forgets every result of this author; chunks that nobody else has done are to be done again."""
        for chunk, outcomes in self.results.items():
            self._repeated[chunk].discard(author)
            if outcomes.pop(author, None):
                self._judge(chunk)
                self._wanted(chunk)

    def dispute(self, chunk):
        """[Author]: those whose results of a chunk differ and are not decided, once; else None."""
        if self._differ(chunk) and chunk not in self._reported:
            self._reported.add(chunk)
            return sorted(self.results[chunk])

    def _differ(self, chunk):
        return chunk not in self.done and len(set(self.results.get(chunk, {}).values())) > 1

    def _judge(self, chunk):
        """Decides whether a chunk is done. Returns the authors that have erred, a set."""
        outcomes = self.results[chunk]
        if self.alone:                                       # it is believed, also against one that has gone
            outcomes = {author: outcome for author, outcome in outcomes.items() if author in self.authors} or outcomes
        best = next(iter(outcomes.values()), None)
        if len(outcomes) > 1:                                # else nobody waits for megabytes to be hashed
            (best, most), (_, second) = [*Counter(outcomes.values()).most_common(2), (None, 0)][:2]
            if most < 2 or most == second:
                best = None
        elif chunk in self.audited and not self.alone:
            best = None
        self._count(chunk, best)
        return {author for author, outcome in outcomes.items() if best and outcome != best}

    def _count(self, chunk, outcome=None):
        """Counts an Outcome in place of the one that counted before; None: none does any more. Digits are added as they
        come, and taken back, so that no worker waits for that at the end of the step."""
        before = self.done.pop(chunk, None)
        if outcome:
            self.done[chunk] = outcome
        if self._sums is None and self.cfg.SUMMED:       # not between two steps, when workers wait
            self._sums = steps.Sums(self.cfg)
        for sign, one in ((-1, before), (1, outcome)) if outcome != before else ():
            if one and self._sums is not None:
                self._sums.add(one.packed, sign)

    def _wanted(self, chunk):
        """Puts a chunk that is not done into the queue, unless it is there or somebody holds it."""
        if chunk not in self.done and chunk not in self.holders and chunk not in self.queue:
            self.queue.appendleft(chunk)

    def _excluded(self, chunk, worker):
        """Whether this worker must not get the chunk: its author holds it, or has done it and others can decide."""
        author, outcomes = worker.author, self.results.get(chunk, {})
        if any(holder.author == author for holder in self.holders.get(chunk, ())):
            return True
        return author in outcomes and (not self._differ(chunk) or author in self._repeated[chunk]
                                       or not self.authors <= outcomes.keys())

    def _hand_out(self, chunk, worker, now):
        self.leases[worker][chunk] = now
        self.holders.setdefault(chunk, {})[worker] = now
        return chunk

    def _end_lease(self, worker, chunk):
        if self.leases[worker].pop(chunk, None) is not None:
            del self.holders[chunk][worker]
            if not self.holders[chunk]:
                del self.holders[chunk]


# verdicts on a state
AGREES = "agrees"
REBUILD = "rebuild"
WAIT = "wait"


class States:
    """votes: {step: {digest: Processes}} of the last steps."""

    def __init__(self):
        self.votes = Newest(STATES_KEPT)

    def judge(self, step, process, digest, rebuilt, at_work=()):
        """Takes a vote in. Returns the verdict on it (AGREES, REBUILD or WAIT), and whether the process has erred: it
        is outvoted, or contradicts itself. rebuilt: it has rebuilt its replica at this step; at_work: Authors. While
        one of them has still to vote, a tie is waited out."""
        if step not in self.votes:
            self.votes[step] = {}
        votes = self.votes[step]
        erred = any(process in holders for other, holders in votes.items() if other != digest)
        if erred:
            self._withdraw(votes, process)
        votes.setdefault(digest, set()).add(process)
        count, others = len(authors(votes[digest])), self._most_for_another(step, digest)
        if count > others:
            return AGREES, erred
        if count < others:
            self._withdraw(votes, process)           # the error counts once; it votes again when it has rebuilt
            return REBUILD, True
        all_voted = authors(set().union(*votes.values())) >= set(at_work)
        return REBUILD if all_voted and not rebuilt else WAIT, erred

    def outvoted(self, step, digest):
        """[Process]: those that hold another state of this step."""
        return [process for other, holders in self.votes.get(step, {}).items() if other != digest
                for process in holders]

    def forget(self, process):
        for votes in self.votes.values():
            self._withdraw(votes, process)

    def decided(self, step):
        """Whether one state of this step has more votes than any other; so it is where nobody has voted."""
        counts = sorted(len(authors(holders)) for holders in self.votes.get(step, {}).values())[-2:]
        return len(counts) < 2 or counts[1] > counts[0]

    def contradicts(self, step, digest):
        """Whether another state of this step has votes, and at least as many as this one."""
        others = self._most_for_another(step, digest)
        return 0 < others >= len(authors(self.votes.get(step, {}).get(digest, ())))

    def clear(self):
        self.votes.clear()

    def _most_for_another(self, step, digest):
        votes = self.votes.get(step, {})
        return max((len(authors(holders)) for other, holders in votes.items() if other != digest), default=0)

    @staticmethod
    def _withdraw(votes, process):
        for digest, holders in list(votes.items()):
            holders.discard(process)
            if not holders:
                del votes[digest]


def authors(processes):
    """{Author}: those of some processes."""
    return {process[:2] for process in processes}
