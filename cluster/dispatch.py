"""The workers of a coordinator: which chunk each is handed, who waits, how long a lease lasts, who checks whom."""

import math
import random
import time

from cluster.hub import Newest
from cluster.step import Step

CHUNKS_HELD = 2            # by one worker: it may ask for the next before the last is done
CHUNKS_OWED = 16           # results that may still come, whatever became of the lease
ACTIVE_SECONDS = 8.0       # a worker without a chunk that was silent for longer is not expected to do anything
AUDIT_PATIENCE = 5.0       # seconds that an audited chunk waits for a second worker to come back after a restart
PROBATION = 8              # chunks of a worker that joins, or that has erred, which another one evaluates too
AUTHORS = 4096             # whose probation is remembered
# A worker loses its chunk after LEASE_FACTOR times its usual time for one, LEAST_LEASE seconds at least; while no time
# is known after STRAGGLER_TIMEOUT without a sign of life. Its result counts even then, if it comes before that of
# another one.
LEASE_FACTOR, LEAST_LEASE = 4.0, 3.0


class Dispatcher:
    """Hands out the chunks of the present step, `work`, and holds the requests that must wait; answer(worker) serves
    such a request again. workers: the set of those that have been let in; each has `arrived` when it asks for work.
    changed: something has happened for those that wait. usual: seconds that a chunk usually takes, None before that is
    known. several: more than one author is at work; alone: only one has been for `patience` seconds, so that nobody can
    audit it."""

    work = usual = None
    changed = several = alone = False
    _spare = False             # whether there were more workers than chunks
    known = 0                  # workers that have asked for work
    probation = PROBATION

    def __init__(self, cfg, run, events, answer, patience):
        self.cfg = cfg
        self.run = run
        self.events = events
        self._answer = answer
        self.workers = set()
        self.waiting = []
        self.authors = frozenset()                   # at work
        self._patience = patience
        # when there was last more than one author; a run that goes on may have had some that will come back
        self._several_at = time.monotonic() if run.step else -math.inf
        self._probation = Newest(AUTHORS)            # Author: chunks that are still to be checked
        self._dice = random.SystemRandom()           # nobody can know what will be audited
        self._known_chunks = {}                      # worker: chunks that it delivered in the step before

    @property
    def busy(self):
        return bool(self.changed and self.waiting)

    def begin_step(self):
        if self.work:
            self._known_chunks = self.work.delivered
        self.work = Step(self.cfg)
        self.work.alone = self.alone
        self.work.authors = self.authors
        self._late = []                              # chunks that an idle worker may copy
        self.changed = True

    def hold(self, worker):
        worker.waiting = True
        self.waiting.append(worker)

    def answer_waiting(self):
        """Answers those that wait when something has changed."""
        if self.changed:
            self.changed, waiting, self.waiting = False, self.waiting, []
            for worker in waiting:
                worker.waiting = False
                worker.session.hub.guard(worker.session, self._answer, worker)

    def hand_out(self, worker):
        """The chunk that this worker does next, None where there is none for it now."""
        now = time.monotonic()
        leases = self.work.leases[worker]
        chunk = self.work.take(worker, now, self._known_chunks.get(worker, ()))
        if len(leases) > CHUNKS_HELD:
            # One that asks again and again without delivering has lost what it was given. It is not left waiting while
            # there is work, and holds no more than CHUNKS_HELD, so that nobody else waits for it.
            self.give_back(worker, [next(iter(leases))])
        elif chunk is None and self._late and not leases:
            chunk = self.work.copy(worker, now, self._late)
        if chunk is not None:
            worker.owed[self.run.step, chunk] = now
            if len(worker.owed) > CHUNKS_OWED:
                del worker.owed[next(iter(worker.owed))]
            self._audit(worker.author, chunk)
        return chunk

    def _audit(self, author, chunk):
        """Has another one evaluate a chunk too: by chance, or as its author is new or has erred."""
        left = self._probation.setdefault(author, self.probation)
        doubted = self.several and left > 0
        if (doubted or self._dice.random() < self.cfg.AUDIT_RATE) and self.work.audit(chunk):
            self._probation[author] = left - doubted
            self.changed = True

    def take(self, worker, result, chunk):
        """Books a result (wire.RESULT) that was owed. Returns the authors that have erred by it, a set; None for one
        that comes too late or does not count."""
        since = worker.owed.pop((result.step, chunk))
        took = time.monotonic() - since
        worker.lapsed = False
        worker.pace = took if worker.pace is None else 0.7 * worker.pace + 0.3 * took
        if result.step < self.run.step:
            return None                              # the step was completed without it
        worker.results += 1
        if not worker.trusted:                       # made with a state that others contradict
            self.give_back(worker, [chunk])
            return None
        erred = self.work.result(worker, chunk, result.packed, result.sum_loss)
        if worker.waiting or chunk not in self.work.done:
            self.changed = True
        if authors := self.work.dispute(chunk):
            names = " and ".join(author.name for author in authors)
            hint = "; is reward() a function of its input alone? look for sets, clocks and random"
            self.events.warn(f"step {self.run.step}: {names} disagree about chunk {chunk}: another worker decides, or "
                             "they evaluate it again; if each repeats its result, start another worker"
                             f"{hint * bool(self.cfg.OBJECTIVE)}", peer=True)
        return erred

    def votes_from_text(self, chunk):
        """Whether it does, and not from what a judge says."""
        if not self.cfg.OBJECTIVE:
            return True
        from model.rewards import is_text        # with NumPy, which a coordinator does not need to start
        return is_text(self.cfg, self.run.step, chunk)

    def doubt(self, author):
        """Forgets what this author has computed in this step; its next chunks are checked."""
        self._probation[author] = self.probation
        self.work.withdraw(author)
        self.changed = True

    def distrust(self, who):
        """Others contradict the state of this Process, or Author. Returns its workers that were trusted until now."""
        doubted = {worker for worker in self.workers if worker.process[:len(who)] == who and worker.trusted}
        for worker in doubted:
            worker.trusted = False
            self.doubt(worker.author)
        return doubted

    def give_back(self, worker, chunks):
        for chunk in chunks:
            self.work.give_back(worker, chunk)
            self.changed = True

    def leave(self, worker):
        """The worker has gone; its chunks are handed out again. Returns whether it was the last one of its process."""
        self.workers.discard(worker)
        self.known -= worker.step is not None
        self.work.leave(worker)
        self.changed = True
        return not any(other.process == worker.process for other in self.workers)

    def check(self, now):
        """Leases, late chunks, the authors at work; several times a second."""
        for worker, leases in list(self.work.leases.items()):
            pace = worker.pace or self.usual
            lease, heard = (max(LEAST_LEASE, LEASE_FACTOR * pace), 0) if pace else \
                (self.cfg.STRAGGLER_TIMEOUT, worker.session.heard)
            chunks = [chunk for chunk, since in leases.items() if now - max(since, heard) > lease]
            if chunks and self.known > 1:            # one that is alone may take its time
                self.events.warn(f"worker {worker.session.title} has not delivered for {lease:.2g} s, its "
                                 f"{chunks_text(chunks)} handed out again", peer=True)
                worker.lapsed = True
                self.give_back(worker, chunks)
        self._count_authors(now)
        paces = sorted(worker.pace for worker in self.workers if worker.pace)
        self.usual = paces[(len(paces) - 1) // 2] if paces else None
        if self.waiting and self.usual:
            self._late = self.work.late(now, self.usual)
            self.changed |= bool(self._late)

    def arrived(self, worker):
        """A worker asks for the first time. Authors are counted where that makes a difference: thousands may arrive."""
        self.known += 1
        chunks, size = self.cfg.N_CHUNKS, self.cfg.CHUNK_SIZE
        if self.known == chunks + 1 and not self._spare:
            self._spare = True
            self.events.warn(f"{self.known} workers, but a step has {chunks} of the chunks that they share: some wait; "
                             f"a new run with -D POPULATION_SIZE={self.known * size} has one for each", peer=True)
        if not self.several:
            self._count_authors(time.monotonic())

    def expects(self, worker, now):
        """Whether a worker can be expected to do its share."""
        return (worker.trusted and not worker.lapsed and worker.step is not None and self.run.step - worker.step <= 1
                and (worker.waiting or bool(self.work.leases.get(worker))
                     or now - worker.session.heard < ACTIVE_SECONDS))

    def _count_authors(self, now):
        """Notes which authors are at work: one that is alone cannot be audited."""
        before, authors = self.alone, self.authors
        self.authors = frozenset(worker.author for worker in self.workers if self.expects(worker, now))
        self.several = len(self.authors) > 1
        if self.several:
            self._several_at = now
        self.alone = not self.several and now - self._several_at >= self._patience
        self.work.alone, self.work.authors = self.alone, self.authors
        if self.alone != before:
            self.work.settle()
            self.changed = True
        self.changed |= self.work.disputed and self.authors != authors         # who may decide has changed


def chunks_text(chunks):
    return f"chunk {', '.join(str(c) for c in sorted(chunks))} is"
