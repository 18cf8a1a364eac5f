"""The rules of courtesy among the workers of a coordinator: who is served first, how long a lease lasts, who may copy
a late chunk, and from whom a share of the work can be expected. They follow from how a worker has delivered so far."""

import time

from cluster.hub import Newest
from cluster.step import COPY_AFTER

ACTIVE_SECONDS = 8.0       # a worker that was silent for longer is not expected to do anything
ASK_WITHIN = 2.0           # most seconds after an answer or a result in which a punctual worker may ask before others
# A silent worker loses its chunk after LEASE_FACTOR times its own time for one, LEAST_LEASE seconds at least: longer
# than from one heartbeat to the next. A worker that sends heartbeats keeps its chunk for LEASE_FACTOR^2 times the usual
# time of all workers, and STRAGGLER_TIMEOUT at least; no lease is longer. While no time is known, both leases last
# STRAGGLER_TIMEOUT.
LEASE_FACTOR, LEAST_LEASE = 4.0, 3.0
SLOW_STEPS = 3             # steps in a row in which a worker takes too long, after which a line names it
# While others deliver, the workers in doubt of one host wait between two chunks: first pause, longest pause, seconds
DOUBT, DOUBTED = (1.0, 64.0), 4096         # hosts that are remembered


class Conduct:
    """How a worker has delivered so far."""

    pace = None                # seconds for a chunk
    punctual = None            # whether its last chunk came before others had it; None before the first
    turn = 0.0                 # when it was last answered after waiting, or delivered
    results = 0                # that were taken
    dropped = False            # it has given up chunks, and delivered nothing since
    late = 0                   # steps in a row that ended while it took too long; stays when a line has said so

    def __init__(self):
        self.owing = {}                              # {(step, chunk): when} it was handed since a result came

    def came(self, given):
        """A result has come at `turn`, perhaps too late. given: when its chunk was handed out."""
        took = self.turn - given
        self.pace = took if self.pace is None else 0.7 * self.pace + 0.3 * took
        self.owing.clear()
        self.dropped = False

    def delivered(self, in_time):
        """A result of the present step has come. in_time: its lease had not expired."""
        self.punctual = in_time
        if self.late < SLOW_STEPS:
            self.late = 0
        self.results += 1


class Fairness:
    """workers: the set of those that are connected; usual: seconds that a chunk usually takes, see `measure`, None
    before it is known; passed_over: a worker waits although there may be a chunk for it."""

    usual = None
    passed_over = False

    def __init__(self, cfg, run, workers):
        self.run = run
        self.workers = workers
        self._timeout = cfg.STRAGGLER_TIMEOUT
        self._doubted = Newest(DOUBTED)              # voter: (pause, until when those in doubt get no chunk)

    def step_ended(self, accounts):
        """accounts: {worker: step.Account} of the step. Returns the workers that have turned out to be slow."""
        now, slow = time.monotonic(), []
        for worker, account in accounts.items():
            if self.usual and any(now - since > COPY_AFTER * self.usual for since in account.held.values()):
                worker.conduct.punctual = False              # others have done its chunk
                worker.conduct.late += 1
                if worker.conduct.late == SLOW_STEPS:
                    slow.append(worker)
        return slow

    def in_order(self, waiting):
        """[worker]: first come, first served, but workers whose lease expired are served last."""
        self.passed_over = False
        return sorted(waiting, key=lambda worker: (True, None, False).index(worker.conduct.punctual))

    def must_wait(self, worker, work, now):
        """Whether this worker gets no chunk of `work` now because another one, which delivers in time, is about to ask,
        and could find none left."""
        pauses = self.in_doubt(worker) and now < self._doubted.get(worker.author.voter, (0, 0))[1]
        scarce = len(work.queue) <= len(self.workers)
        if not pauses and (worker.conduct.punctual is not False or not scarce):
            return False
        # waiting longer than its own time for a chunk gains nothing
        most = min(ASK_WITHIN, worker.conduct.pace or ASK_WITHIN)
        found = any(other.conduct.punctual and self.expects(other, now)
                    and (pauses or now - other.conduct.turn < most and not other.waiting
                         and not work.accounts[other].held) for other in self.workers)
        self.passed_over |= found
        return found

    def in_doubt(self, worker):
        """Whether this worker has given up chunks, or another one of its host has and this one is new."""
        conduct = worker.conduct
        return conduct.dropped or not conduct.results and worker.author.voter in self._doubted

    def gave_up(self, worker, now):
        """The worker has taken chunks and does not deliver; its host pauses, longer if it was in doubt already."""
        voter = worker.author.voter
        doubted = self.in_doubt(worker)
        worker.conduct.dropped = True
        pause, _ = self._doubted.get(voter, (DOUBT[0], 0))
        if doubted:
            pause = min(2 * pause, DOUBT[1])
        self._doubted[voter] = pause, now + pause

    def handed_out(self, worker, chunk, now):
        worker.conduct.owing[self.run.step, chunk] = now
        voter = worker.author.voter
        if self.in_doubt(worker) and voter in self._doubted:
            pause, _ = self._doubted[voter]
            self._doubted[voter] = pause, now + pause

    def delivers(self, worker, given):
        """The result of a chunk that was handed out at this time has come, from one that may have been in doubt. The
        step may be over for long: to be slower than the run is no fault."""
        if self.in_doubt(worker):
            self._doubted.pop(worker.author.voter, None)
        worker.conduct.turn = time.monotonic()
        worker.conduct.came(given)

    def expects(self, worker, now):
        """Whether a worker can be expected to do its share; one in doubt has to deliver first."""
        return (worker.trusted and not self.in_doubt(worker)
                and worker.step is not None and self.run.step - worker.step <= 1
                and (worker.waiting or now - worker.session.heard < ACTIVE_SECONDS))

    def measure(self):
        """Finds the usual time of a chunk. Each voter has one pace, that of its fastest worker, and the lower quartile
        of them is usual, at most STRAGGLER_TIMEOUT. So one host cannot make the usual time grow by taking longer and
        longer, with however many workers."""
        paces = {}
        for worker in self.workers:
            if pace := worker.conduct.pace:
                voter = worker.author.voter
                paces[voter] = min(pace, paces.get(voter, self._timeout))
        if paces:
            self.usual = sorted(paces.values())[(len(paces) - 1) // 4]

    def expired(self, worker, held, now):
        """[(why, seconds, chunks)]: the chunks of this worker whose lease has expired; seconds: of the lease; why:
        the start of a message. held: {chunk: when it was handed out}, not empty."""
        conduct = worker.conduct
        usual, pace = self.usual, conduct.pace or self.usual
        longest = max(self._timeout, LEASE_FACTOR * max(LEAST_LEASE, LEASE_FACTOR * usual)) if usual else self._timeout
        # by its own time alone, a worker that takes longer and longer would be given more and more
        lease = min(longest, max(LEAST_LEASE, LEASE_FACTOR * pace)) if pace else self._timeout
        if now - min(held.values()) <= lease:
            return []
        silent = [chunk for chunk, since in held.items() if now - max(since, worker.session.heard) > lease]
        stuck = [chunk for chunk, since in held.items() if now - since > longest and chunk not in silent]
        if silent or stuck:
            conduct.punctual = False
        found = ("silent for", lease, silent), ("has not delivered for", longest, stuck)
        return [expired for expired in found if expired[2]]
