"""The snapshots of a run and the upload of the next one from a worker, which a second worker confirms."""

import contextlib
import time

from cluster import snapshots
from cluster.hub import Newest
from cluster.trust import shares
from cluster.wire import HASH_WANTED, SNAPSHOT_DATA, SNAPSHOT_WANTED, STATE_HASH

MOST_FAILED = 4096         # that are remembered
WITNESSES = 3              # hosts (Author.voter) that are asked for the hash of a state beside its giver


class Collector:
    """Collects for an egg_net.Coordinator. shelf: the snapshots.Shelf; worker, upload: who sends or sent which
    snapshots.Upload, or None. A whole upload counts once another author has stated the same hash of the state, of
    another host where there are any; at once where nobody else can. The digest that goes with every request is too weak
    for that (model.state_digest). Who sent another state than others have is banned. Raises HistoryError where the
    state with which an epoch began is missing."""

    worker = upload = None

    def __init__(self, coordinator):
        self.coordinator = coordinator
        self.dispatcher = coordinator.dispatcher
        self.cfg = coordinator.cfg
        self.run = coordinator.run
        self.events = coordinator.events
        # voter: its snapshots that were refused or did not come in a row
        self._failed = Newest(MOST_FAILED)
        self.shelf = snapshots.Shelf(self.cfg, self.run)
        self.shelf.check_start()

    def _wanted(self, worker):
        """Whether this worker shall send its state for the shelf."""
        every, step = self.cfg.SNAPSHOT_EVERY, worker.step
        return (every and step and step % every == 0 and self.run.step < step + every and self.shelf.directory
                and step not in self.shelf.files and not self.shelf.stopped and worker.digest)

    def ask(self, worker, remember=False):
        """Asks a worker for its state, once per step, if it is wanted and no other voter at work has failed less often.
        remember: for `Upload.state`, without a file, and whatever the step."""
        def fails(one):
            return self._failed.get(self._voice(one), 0)

        now, step = time.monotonic(), worker.step
        if self.upload or worker.state_asked == step or not (remember or self._wanted(worker)) or any(
                other.digest and other.state_asked != step and fails(other) < fails(worker)
                and self.dispatcher.fairness.expects(other, now)
                for other in (self.dispatcher.workers if fails(worker) else ())):
            return
        worker.state_asked = step
        try:
            self.upload = snapshots.Upload(self.cfg, step, self.run.seed_of(step), worker.digest, self.run.directory,
                                           remember=remember)
            self.worker = worker
            self._hashes = {}                        # {hash: authors}
            self._asked = {self._voice(worker)}      # who were asked: this one and those for the hash
            worker.session.reply(SNAPSHOT_WANTED, step)
        except OSError as error:
            self._stop(error)

    def ask_witness(self, worker):
        """Asks a worker for the hash of its state if that can confirm the present upload."""
        if (self.upload and worker.step == self.upload.step and worker.digest and worker.states_hashes
                and worker.hash_wanted is None and len(self._asked) <= WITNESSES
                and self._voice(worker) not in self._asked):
            self._asked.add(self._voice(worker))
            worker.hash_wanted = worker.step
            worker.session.reply(HASH_WANTED, worker.step)

    def take_hash(self, worker, payload):
        step, state_hash = STATE_HASH.unpack(payload)
        if worker.hash_wanted == step:
            worker.hash_wanted = None
            if self.upload and self.upload.step == step:
                self._hashes.setdefault(state_hash, set()).add(worker.author)
                self.settle()

    def goes_on(self, worker):
        """The worker has sent a request or a result: an answer to an earlier question cannot follow. A worker that did
        not send the hash is of an older version."""
        if worker.hash_wanted is not None:
            worker.states_hashes = False
            worker.hash_wanted = None
            self.settle()
        if worker is self.worker and not self.upload.finished:
            self._refuse("it did not come")

    def take(self, worker, payload):
        step, *piece = SNAPSHOT_DATA.unpack(payload)
        upload = self.upload
        if self.worker is not worker or upload.step != step or upload.finished:
            return                                   # of an upload that was given up
        self._unpack(upload.feed, *piece)
        if self.unpacking:
            worker.session.wait()                    # with its next piece

    @property
    def unpacking(self):
        """Whether `unpack` has something to do, one piece at a time, between the turns of the loop."""
        return self.upload and self.upload.pending

    def unpack(self):
        if self.unpacking:
            session = self.worker.session
            session.hub.guard(session, self._unpack, self.upload.unpack)
            if not self.unpacking:
                session.go_on()

    def _unpack(self, work, *arguments):
        upload = self.upload
        try:
            work(*arguments)
        except ValueError as error:
            self._refuse(error)
        except OSError as error:
            self._stop(error)
        else:
            if upload.finished:
                self._hashes.setdefault(upload.hash, set()).add(self.worker.author)
                self.settle()

    def settle(self):
        """Keeps the whole upload if it is confirmed, or if nobody can confirm it; drops it if others outvote it."""
        upload = self.upload
        if not (upload and upload.finished):
            return
        author = self.worker.author
        votes_for, votes_against = shares(self._hashes, upload.hash, self.dispatcher.by_host)
        if votes_against > max(votes_for, 1):
            self._refuse("two others have another state with the same digest")
            self.coordinator.ban(author, f"its snapshot of step {upload.step} is not the state of two others")
        elif votes_for > max(votes_against, 1) or not votes_against and not self.dispatcher.witnesses(author):
            self._keep(upload)

    def _keep(self, upload):
        try:
            if not upload.remembered:
                self.shelf.put(upload)
        except OSError as error:
            return self._stop(error)
        self._failed.pop(self._voice(self.worker), None)
        self._end()
        self._forget()
        if not upload.remembered:
            self.events.emit("snapshot", step=upload.step, bytes=upload.total, overlay=upload.overlay())
        self.coordinator.island.state_received(upload)

    def _forget(self):
        """With noise on activations the history keeps the steps since the second newest snapshot: a step is a digit a
        weight, and who comes late begins with a snapshot."""
        run, shelf = self.run, self.shelf
        step = sorted({run.start.step, *shelf.files})[-2:][0]
        if (self.cfg.PERTURB == "activations" and step > run.start.step
                and (step in shelf.digests or not run.start.origin)):
            with contextlib.suppress(OSError):               # the next snapshot will bring another chance
                run.forget_before(step, shelf.sha256[step], shelf.digests.get(step))
                shelf.arrange()

    def _refuse(self, why):
        voice = self._voice(self.worker)
        self._failed[voice] = self._failed.get(voice, 0) + 1
        self.events.warn(f"worker {self.worker.session.title}: its snapshot of step {self.upload.step} is not used: "
                         f"{why}", self.worker.author.host)
        self.drop()

    def _voice(self, worker):
        """The voter that is asked once: the host, or the author if all workers are of one host."""
        return worker.author.voter if self.dispatcher.by_host else worker.author

    def leave(self, worker):
        """The worker has gone: without it no upload goes on, but a whole one stays."""
        if worker is self.worker and not self.upload.finished:
            self.drop() if self.coordinator.closing else self._refuse("it left")
        self.settle()                                # perhaps nobody is left who can confirm it

    def drop(self, workers=None):
        """Gives the present upload up; with `workers` only if it comes from one of them."""
        if self.upload and (workers is None or self.worker in workers):
            self.upload.drop()
            self._end()

    def check(self, now):
        """Gives up an upload that does not come, or that nobody confirms."""
        self.shelf.close_unread(now)
        if self.upload and self.run.step >= self.upload.step + self.cfg.SNAPSHOT_EVERY:
            if self.upload.finished:
                self.events.warn(f"the snapshot of step {self.upload.step} is not used: no second worker confirmed it")
                self.drop()
            else:
                self._refuse("it did not come")
        self.settle()

    def _end(self):
        self.worker.session.go_on()
        self.worker = self.upload = None
        self.dispatcher.changed = True               # the next upload may begin

    def _stop(self, error):
        """A run does not need snapshots: it continues without them."""
        self.drop()
        self.shelf.stopped = True
        self.events.warn(f"{self.run.directory}: no more snapshots, {error.strerror}: start again when this is mended")
