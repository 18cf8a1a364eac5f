"""The workers of a coordinator: which chunk each is handed, who waits, and how many authors and hosts are at work."""

import math
import os
import time
from array import array
from collections import deque

from cluster.fairness import Fairness, SLOW_STEPS
from cluster.hub import Newest
from cluster.step import COPY_AFTER, Step

CHUNKS_HELD = 2            # by one worker: it may ask for the next before the last is done
ANSWERS_IN_A_ROW = 16      # held requests that are answered before sockets are read again
LEAST_PAUSE, MOST_PAUSE = 0.004, 0.05      # see Dispatcher.pause
AUDIT_PATIENCE = 5.0       # seconds that an audited chunk waits for a second worker to come back after a restart


class Dispatcher:
    """Hands out the chunks of the present step, `work`, and holds the requests that must wait; answer(worker) serves
    such a request again. workers: the set of those that have been let in; each has `arrived` when it asks for work.
    steps: {number: Step} of the present step and the one before. changed: something has happened for those that wait.
    several: more than one author is at work, by_host: of more than one host; alone: only one has been for `patience`
    seconds, so nobody can audit it."""

    work = None
    changed = several = by_host = alone = False
    known = 0                  # workers that have asked for work
    _late_at = 0.0             # when late chunks are searched next, for those that wait
    _due = 0                   # how many of those that wait are to be answered since `changed`
    _hosts_at = -math.inf      # when there was last more than one host

    def __init__(self, cfg, run, events, answer, patience):
        self.cfg = cfg
        self.run = run
        self.events = events
        self._answer = answer
        self.workers = set()
        self.fairness = Fairness(cfg, run, self.workers)
        self.steps = Newest(2)
        self.waiting = deque()
        self._patience = patience
        # when there was last more than one author; a run that goes on may have had some that will come back
        self._several_at = time.monotonic() if run.step else -math.inf
        self.voters = set()                          # Author.voter of the authors at work

    @property
    def busy(self):
        return bool(self._due or self.changed and self.waiting)

    @property
    def pause(self):
        """Seconds between two searches for late chunks, which are for those that wait. Where chunks are short, a host
        that is slow on purpose must not gain the time between two checks in every step."""
        return max(LEAST_PAUSE, min(MOST_PAUSE, self.fairness.usual or MOST_PAUSE)) if self.waiting else math.inf

    def begin_step(self):
        draws = array("I", os.urandom(4 * self.cfg.N_CHUNKS))        # nobody can know what will be audited
        audited = {chunk for chunk, draw in enumerate(draws) if draw < self.cfg.AUDIT_RATE * (1 << 32)}
        step, every = self.run.step, self.cfg.VALIDATE_EVERY
        if self.several and every and step % every == 0:
            audited.add(0)                           # so that two validate
        if self.work:
            for worker in self.fairness.step_ended(self.work.accounts):
                if self.by_host:             # those of one host share its processors
                    self.events.warn(f"worker {worker.session.title} took longer than {COPY_AFTER:g} times as long as "
                                     f"is usual in {SLOW_STEPS} steps in a row, and others had to do its chunks: while "
                                     "they deliver in time it is served last", worker.author.host)
            self.work.end()
        self.work = Step(self.cfg, audited, self.alone, self.by_host)
        self.steps[step] = self.work
        self._late = []                              # chunks that an idle worker may copy
        self.changed = True

    def hold(self, worker):
        worker.waiting = True
        self.waiting.append(worker)

    def answer_waiting(self):
        """Answers those that wait when something has changed, see Fairness.in_order. Not all at once, so that the next
        request of the first worker does not wait for a thousand others."""
        usual = self.fairness.usual
        if self.waiting and usual and not self.work.queue and (now := time.monotonic()) >= self._late_at:
            self._late_at = now + self.pause
            self._late = self.work.late(now, usual)
            self.changed |= bool(self._late)
        if self.changed:
            self.changed = False
            self.waiting = deque(self.fairness.in_order(self.waiting))
            self._due = len(self.waiting)
        for _ in range(min(self._due, ANSWERS_IN_A_ROW)):
            self._due -= 1
            worker = self.waiting.popleft()
            worker.waiting = False
            worker.conduct.turn = time.monotonic()
            worker.session.hub.guard(worker.session, self._answer, worker)

    def hand_out(self, worker):
        """The chunk that this worker does next, None where there is none for it now."""
        now = time.monotonic()
        if len(worker.conduct.owing) >= CHUNKS_HELD:
            self.fairness.gave_up(worker, now)
            worker.conduct.owing.clear()
        if self.fairness.must_wait(worker, self.work, now):
            return None
        held = self.work.accounts[worker].held
        past = self.steps.get(self.run.step - 1)
        chunk = self.work.take(worker, now, past and past.accounts[worker])
        if len(held) > CHUNKS_HELD:
            # One that asks again and again without delivering has lost what it was given. It is not left waiting while
            # there is work, and holds no more than CHUNKS_HELD, so that nobody else waits for it.
            self.give_back(worker, [next(iter(held))])
        elif chunk is None and self._late and not held:
            chunk = self.work.copy(worker, now, self._late)
        if chunk is not None:
            self.fairness.handed_out(worker, chunk, now)
        return chunk

    def owed(self, worker, number, chunk):
        """Whether the worker was handed this chunk in a step, and its result was still to come: now it has."""
        given = self.steps[number].accounts[worker].given if number in self.steps else {}
        if since := given.get(chunk) or worker.conduct.owing.get((number, chunk)):
            given[chunk] = None
            self.fairness.delivers(worker, since)
        return bool(since)

    def believes(self, worker, number, figure, trust):
        """Whether a validation or a reward counts: of a worker that was handed chunk 0 of this step, if nobody is there
        to state the same or somebody has; if not, a second worker shall evaluate chunk 0. figure: see
        trust.Trust.confirms."""
        step, author = self.steps.get(number), worker.author
        if not (worker.trusted and step and author in step.validators):
            return False
        believed = trust.confirms(number, author, figure, self.several, self.by_host)
        if not believed and step is self.work:
            self.work.audit(0)
            self.changed = True
        return believed

    def delivered(self, worker, chunk):
        """A result of the present step has come."""
        if worker.trusted:
            worker.conduct.delivered(chunk in self.work.accounts[worker].held)
        else:                                        # made with a state that others contradict
            self.give_back(worker, [chunk])

    def give_back(self, worker, chunks):
        for chunk in chunks:
            self.work.give_back(worker, chunk)
            self.changed = True

    def leave(self, worker):
        """The worker has gone; its chunks are handed out again. Returns whether it was the last one of its author."""
        self.workers.discard(worker)
        if worker.conduct.owing:
            self.fairness.gave_up(worker, time.monotonic())
        self.known -= worker.step is not None
        for step in self.steps.values():
            step.leave(worker)
        self.changed = True
        return not any(other.author == worker.author for other in self.workers)

    def check(self, now):
        """Leases, audits that nobody can do, the usual time of a chunk; several times a second."""
        for worker, account in list(self.work.accounts.items()):
            for why, seconds, chunks in self.fairness.expired(worker, account.held, now) if account.held else ():
                self.events.warn(f"worker {worker.session.title} {why} {seconds:.2g} s, its {chunks_text(chunks)} "
                                 "handed out again", worker.author.host)
                self.fairness.gave_up(worker, now)
                self.give_back(worker, chunks)
        self._count_authors(now)
        for chunk, authors in self.work.disputed():
            names = " and ".join(author.name for author in authors)
            self.events.warn(f"step {self.run.step}: {names} disagree about chunk {chunk}; a third worker will decide"
                             f"{self.work.doubt}", "")
        self.fairness.measure()
        self.changed |= self.fairness.passed_over

    def arrived(self, worker):
        """A worker asks for the first time. Authors are counted where that makes a difference: thousands may arrive."""
        self.known += 1
        if not (self.several and (len(self.voters) > 1 or worker.author.voter in self.voters)):
            self._count_authors(time.monotonic())

    def _count_authors(self, now):
        """Notes how many authors and hosts are at work: one that is alone cannot be audited."""
        active = {worker.author for worker in self.workers if self.fairness.expects(worker, now)}
        self.voters = {author.voter for author in active}
        self.several = len(active) > 1
        hosts = len(self.voters) > 1
        if self.several:
            self._several_at = now
        if hosts:
            self._hosts_at = now
        before = self.alone, self.by_host
        self.alone = not self.several and now - self._several_at >= self._patience
        self.by_host = hosts or now - self._hosts_at < self._patience
        self.work.alone = self.alone
        self.work.by_host = self.by_host
        if (self.alone, self.by_host) != before:
            self.work.settle()
            self.changed = True

    def witnesses(self, author):
        """Whether another worker may confirm the hash of a state that this author has stated."""
        now = time.monotonic()
        return any(worker.states_hashes and worker.author != author and self.fairness.expects(worker, now)
                   and not (self.by_host and worker.author.voter == author.voter) for worker in self.workers)


def chunks_text(chunks):
    return f"chunk {', '.join(str(c) for c in sorted(chunks))} is"
