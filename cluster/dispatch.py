"""The workers of a coordinator, and who of them does what: chunks, leases, those that wait, how fast each one is."""

import math
import os
import time
from array import array
from collections import Counter, deque

from cluster import leases, wire
from cluster.console import printable
from cluster.progress import median
from cluster.session import Role
from cluster.wire import V2

CHUNKS_HELD = 2            # by one worker: it may ask for the next before the last is done
ANSWERS_IN_A_ROW = 16      # held requests that are answered before sockets are read again
ACTIVE_SECONDS = 8.0       # a worker that was silent for longer is not expected to do anything
ASK_WITHIN = 2.0           # seconds after an answer or a result in which a punctual worker may ask before others
AUDIT_PATIENCE = 5.0       # seconds that an audited chunk waits for a second worker to come back after a restart
# A silent worker's chunk goes to another one after LEASE_FACTOR times a chunk's usual time, LEAST_LEASE seconds at
# least. With heartbeats a worker has LEASE_FACTOR times longer, and STRAGGLER_TIMEOUT at least; both have that while no
# usual time is known.
LEASE_FACTOR, LEAST_LEASE = 4.0, 2.0


class RemoteWorker(Role):
    """A worker as the coordinator (egg_net.Coordinator) sees it: the role of its session."""

    step = digest = None           # of its last request: steps that it has applied; its state (None with protocol 1)
    trusted = True                 # no other worker contradicts its state
    rebuilt_at = None              # step at which it was last told to rebuild
    sent_to_start = None           # epoch to whose start it was sent
    sends_snapshots = True         # and they are right
    states_hash = True             # when it is asked to; workers of older versions do not
    hash_wanted = None             # step of which it has been asked
    next_block = None              # (step, offset) of a snapshot that it reads
    punctual = None                # whether its last chunk came before others had it; None before the first
    stuck = False                  # it let the longest lease expire, and has delivered nothing since
    turn, pace = 0.0, None         # when it was last answered after waiting, or delivered; seconds for a chunk
    chunks, has_worked = 0, False  # results that were taken; whether it has delivered one since its last request

    def __init__(self, session, coordinator, author, device="", data=b""):
        super().__init__(session)
        self.coordinator, self.author, self.version = coordinator, author, session.version
        self.device, self.data = device, data    # data: the digest of its training data, b"" or zeros if unknown
        self.held, self.given = {}, {}           # chunk -> when it was handed out; the same of all of this step
        self.owed = set()                        # (step, chunk) handed out, of which no result has come
        coordinator.dispatcher.enter(self)

    def handle(self, opcode, payload):
        """Of use are the results that it owes, a request after one of them or at a later step, a state in order."""
        coordinator, useful = self.coordinator, False
        if self.hash_wanted is not None and opcode in (wire.JOB_REQUEST, wire.RESULT):
            coordinator.collector.ignored(self)
        if opcode == wire.JOB_REQUEST:
            step, digest = wire.JOB_REQUEST.unpack(payload)[1], payload[wire.JOB_REQUEST.head.size:] or None
            useful, self.has_worked = self.has_worked or self.step is None or step > self.step, False
            coordinator.take_request(self, step, digest)
        elif opcode == wire.RESULT:
            result = wire.read_result(coordinator.cfg, coordinator.n_weights, payload)
            if (owed := (result.step, result.chunk)) in self.owed:
                self.owed.remove(owed)
                useful = self.has_worked = True
            coordinator.take_result(self, result)
        elif opcode == wire.VALIDATION:
            coordinator.take_validation(self, *wire.VALIDATION.unpack(payload))
        elif opcode == wire.LOG_MESSAGE and coordinator.events.allows(self.author.host):
            text = printable(payload.decode("utf-8", "replace"))
            line = f"worker {self.session.title}:\n{text}" if coordinator.peers else text
            coordinator.events.message(self.author.name, text, line)
        elif opcode == wire.SNAPSHOT_DATA and self.version == V2:
            useful = coordinator.collector.worker is self
            coordinator.collector.take(self, payload)
        elif opcode == wire.STATE_HASH and self.version == V2:
            useful = self.hash_wanted is not None
            coordinator.collector.take_hash(self, payload)
        elif opcode == wire.SNAPSHOT_REQUEST and self.version == V2:
            step, offset = wire.SNAPSHOT_REQUEST.unpack(payload)
            total, data = coordinator.shelf.block(step, offset, wire.BLOCK)
            useful, self.next_block = (step, offset) == self.next_block, (step, offset + len(data))
            self.session.reply(wire.SNAPSHOT_DATA, step, total, offset, data)
        return useful

    def closed(self):
        self.coordinator.worker_left(self)

    def status(self):
        silent = time.monotonic() - self.session.heard
        state = ("in doubt" if not self.trusted else "silent" if silent > ACTIVE_SECONDS and not self.waiting else
                 "computing" if self.held else "waiting" if self.waiting else "catching up")
        return {"name": self.author.name, "address": self.session.address, "device": self.device,
                "protocol": self.version, "step": self.step, "chunks": self.chunks, "chunk_seconds": self.pace,
                "last_seen": round(silent, 3), "state": state}


class Dispatcher:
    """Hands out the chunks of a step (`work`, a leases.Step) and holds the requests that must wait; answer(worker)
    serves such a request again. changed: something has happened for those that wait. several: more than one author is
    at work, by_host: of more than one host; alone: only one has been for `patience` seconds, so nobody can audit it."""

    def __init__(self, cfg, run, events, answer, patience):
        self.cfg, self.run, self.events, self._answer = cfg, run, events, answer
        self.workers, self.work, self.usual = set(), None, None        # usual: seconds that a chunk takes most workers
        self.waiting, self._due = deque(), 0         # those that wait; how many to answer since `changed`
        self.changed = self.several = self.by_host = self.alone = False
        self._patience = patience
        # when there was last more than one author; a run that goes on may have had some that will come back
        self._several_at = time.monotonic() if run.step else -math.inf
        self._hosts_at = -math.inf                     # the same for hosts
        self._voters, self.known = set(), 0          # Author.voter of those at work; workers that have asked for work
        self._of = Counter()                         # author -> its workers
        self._passed_over = False                    # a worker waits although there may be a chunk for it
        self._late = []                              # chunks that an idle worker may take a copy of
        self._stuck = set()                          # voters (Author.voter) of workers that were stuck
        self._first_of = {}                          # step -> authors that have held its chunk 0; of two steps
        self._frame = None, b""                      # the last answer that let a worker catch up

    @property
    def busy(self):
        return bool(self._due or self.changed and self.waiting)

    def begin_step(self):
        draws = array("I", os.urandom(4 * self.cfg.N_CHUNKS))        # nobody can know what will be audited
        audited = {chunk for chunk, draw in enumerate(draws) if draw < self.cfg.AUDIT_RATE * (1 << 32)}
        every, now = self.cfg.VALIDATE_EVERY, time.monotonic()
        if self.several and every and self.run.step % every == 0:
            audited.add(0)                           # so that two validate
        self.work = leases.Step(self.cfg, audited, self.alone, self.by_host)
        for worker in self.workers:
            if self.usual and any(now - since > leases.COPY_AFTER * self.usual for since in worker.held.values()):
                worker.punctual = False              # others have done its chunk
            worker.held.clear()
            worker.given.clear()
            worker.owed = {owed for owed in worker.owed if owed[0] == self.run.step - 1}
        self._first_of = {step: authors for step, authors in self._first_of.items() if step == self.run.step - 1}
        self._late = []
        self.changed = True

    def hold(self, worker):
        worker.waiting = True
        self.waiting.append(worker)

    def answer_waiting(self):
        """First come, first served, when something has changed; who let a lease expire comes last. Not all at once, so
        that the next request of the first worker does not wait for a thousand others."""
        if self.changed:
            self.changed = self._passed_over = False
            self.waiting = deque(sorted(self.waiting, key=lambda worker: (True, None, False).index(worker.punctual)))
            self._due = len(self.waiting)
        for _ in range(min(self._due, ANSWERS_IN_A_ROW)):
            self._due -= 1
            worker = self.waiting.popleft()
            worker.waiting, worker.turn = False, time.monotonic()
            worker.session.hub.guard(worker.session, self._answer, worker)

    def hand_out(self, worker):
        """The chunk that this worker does next, None where there is none for it now."""
        now = time.monotonic()
        last = worker.punctual is False or not worker.chunks and worker.author.voter in self._stuck
        if last and any(other.punctual and now - other.turn < ASK_WITHIN and not other.held and not other.waiting
                        and self._active(other, now) for other in self.workers):
            self._passed_over = True                 # another one, which delivers in time, is about to ask
            return None
        chunk = self.work.take(worker, worker.author, now)
        if len(worker.held) >= CHUNKS_HELD:
            # One that asks again and again without delivering has lost what it was given. It is not left waiting while
            # there is work, and holds no more than CHUNKS_HELD, so that nobody else waits for it.
            if chunk is not None:
                self.give_back(worker, [next(iter(worker.held))])
        elif chunk is None and self._late and not worker.held:
            chunk = self.work.copy(worker, worker.author, now, self._late)
        if chunk is not None:
            worker.held[chunk] = worker.given[chunk] = now
            worker.owed.add((self.run.step, chunk))
            if chunk == 0:
                self._first_of.setdefault(self.run.step, set()).add(worker.author)
        return chunk

    def believes(self, worker, step, figure, trust):
        """Whether a validation counts: of a worker that was given chunk 0 of this step, if nobody is there to state the
        same or somebody has; if not, a second worker shall evaluate chunk 0. figure: see trust.Trust.confirms."""
        author = worker.author
        if not worker.trusted or author not in self._first_of.get(step, ()):
            return False
        believed = trust.confirms(step, author, figure, self.several, self.by_host)
        if not believed and step == self.run.step:
            self.work.audit(0)
            self.changed = True
        return believed

    def catch_up(self, step, version):
        """The frame with the fitness of a step, which all workers want at once when the step ends."""
        key = self.run.step, self.run.start, step, version
        if self._frame[0] != key:
            packed = self.run.body(step) if version == V2 else self.run.fitness(step)
            fields = self.run.seed, step + 1, 0, len(packed), packed
            self._frame = key, wire.frame(wire.JOB_RESPONSE, *fields, version=version)
        return self._frame[1]

    def take_result(self, worker, result):
        """Notes a result of the present step; the authors that it proves to have lied."""
        in_time, worker.turn = worker.held.pop(result.chunk, None) is not None, time.monotonic()
        if not worker.trusted:
            self.work.give_back(worker, result.chunk)        # made with a state that others contradict
            self.changed = True
            return []
        if result.chunk in worker.given:
            took = worker.turn - worker.given[result.chunk]
            worker.pace = took if worker.pace is None else 0.7 * worker.pace + 0.3 * took
            worker.punctual, worker.stuck = in_time, False
        worker.chunks += 1
        liars = self.work.result(worker, worker.author, result.chunk, result.packed, result.sum_loss)
        self.changed = self.changed or worker.waiting or result.chunk not in self.work.done
        return liars

    def give_back(self, worker, chunks):
        for chunk in chunks:
            del worker.held[chunk]
            self.work.give_back(worker, chunk)
            self.changed = True

    def distrust(self, author):
        """Forgets what this author has computed in this step; the workers that are no longer trusted."""
        doubted = [w for w in self.workers if w.author == author and w.trusted]
        for worker in doubted:
            worker.trusted = False
        self.work.withdraw(author)
        self.changed = True
        return doubted

    def enter(self, worker):
        """The worker has been let in; `arrived` is called when it asks for work."""
        self.workers.add(worker)
        self._of[worker.author] += 1

    def leave(self, worker):
        """The worker has gone; its chunks are handed out again. Returns whether it was the last one of its author."""
        self.workers.discard(worker)
        self.known -= worker.step is not None
        self.give_back(worker, list(worker.held))
        self.changed = True
        self._of[worker.author] -= 1
        if last := not self._of[worker.author]:
            del self._of[worker.author]
        return last

    def check(self, now):
        """Leases, audits that nobody can do, chunks that are late; several times a second."""
        for worker in self.workers:
            self._check_leases(worker, now)
        paces = [w.pace for w in self.workers if w.pace]
        self.usual = median(paces) if paces else self.usual
        self._count_authors(now)
        for chunk, authors in self.work.disputed():
            names = " and ".join(author.name for author in authors)
            self.events.warn(f"step {self.run.step}: {names} disagree about chunk {chunk}; a third worker will decide")
        self._late = self.work.late(now, self.usual) if self.usual and not self.work.queue else []
        self.changed = self.changed or self._passed_over or bool(self._late and self.waiting)

    def arrived(self, worker):
        """A worker asks for the first time. Authors are counted where that makes a difference: thousands may arrive."""
        self.known += 1
        if not (self.several and (len(self._voters) > 1 or worker.author.voter in self._voters)):
            self._count_authors(time.monotonic())

    def _count_authors(self, now):
        """Notes how many authors and hosts are at work: one that is alone cannot be audited."""
        active = {w.author for w in self.workers if self._active(w, now)}
        self._voters = {author.voter for author in active}
        self.several, hosts = len(active) > 1, len(self._voters) > 1
        self._several_at = now if self.several else self._several_at
        self._hosts_at = now if hosts else self._hosts_at
        before = self.alone, self.by_host
        self.alone = not self.several and now - self._several_at >= self._patience
        self.by_host = hosts or now - self._hosts_at < self._patience
        self.work.alone, self.work.by_host = self.alone, self.by_host
        if (self.alone, self.by_host) != before:
            self.work.settle()
            self.changed = True

    def witnesses(self, author):
        """Whether another worker may confirm the hash of a state that this author has stated."""
        now = time.monotonic()
        return any(w.states_hash and w.author != author and self._active(w, now)
                   and not (self.by_host and w.author.voter == author.voter) for w in self.workers)

    def _active(self, worker, now):
        """Whether a worker can be expected to do its share; one of a host that had a stuck one has to deliver first."""
        return (worker.trusted and not worker.stuck and (worker.chunks or worker.author.voter not in self._stuck)
                and worker.step is not None and self.run.step - worker.step <= 1
                and (worker.waiting or now - worker.session.heard < ACTIVE_SECONDS))

    def _check_leases(self, worker, now):
        pace, heard, timeout = worker.pace or self.usual, worker.session.heard, self.cfg.STRAGGLER_TIMEOUT
        lease = max(LEAST_LEASE, LEASE_FACTOR * pace) if pace else timeout
        if not worker.held or now - min(worker.held.values()) <= lease:
            return
        longest = max(timeout, LEASE_FACTOR * lease) if pace else timeout
        silent = [c for c, since in worker.held.items() if now - max(since, heard) > lease]
        stuck = [c for c, since in worker.held.items() if now - since > longest and c not in silent]
        if stuck:
            worker.stuck = True
            self._stuck.add(worker.author.voter)
        for words, seconds, late in (("silent for", lease, silent), ("has not delivered for", longest, stuck)):
            if late:
                worker.punctual = False
                self.events.warn(f"worker {worker.session.title} {words} {seconds:.2g} s, its {chunks_text(late)} "
                                 "handed out again")
                self.give_back(worker, late)


def chunks_text(chunks):
    return f"chunk {', '.join(str(c) for c in sorted(chunks))} is"
