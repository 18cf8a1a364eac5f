"""The snapshots of a run and the upload of the next one from a worker."""

import contextlib

from cluster import snapshots
from cluster.wire import SNAPSHOT_DATA, SNAPSHOT_WANTED


class Collector:
    """Collects for an egg_net.Coordinator. shelf: the snapshots.Shelf; worker, upload: who sends or sent which
    snapshots.Upload, or None. A whole upload counts if it has the digest that its worker has stated, and that most
    workers have. Raises HistoryError where the state with which an epoch began is missing."""

    worker = upload = None

    def __init__(self, coordinator):
        self.coordinator = coordinator
        self.dispatcher = coordinator.dispatcher
        self.cfg = coordinator.cfg
        self.run = coordinator.run
        self.events = coordinator.events
        self.shelf = snapshots.Shelf(self.cfg, self.run)
        self.shelf.check_start()

    def _wanted(self, worker):
        """Whether this worker shall send its state for the shelf."""
        every, step = self.cfg.SNAPSHOT_EVERY, worker.step
        return (every and step and step % every == 0 and self.run.step < step + every and self.shelf.directory
                and step not in self.shelf.files and not self.shelf.stopped and worker.digest)

    def ask(self, worker, remember=False):
        """Asks a worker for its state, once per step, if it is wanted and no other worker has failed less often to send
        it. remember: for `Upload.state`, without a file, and whatever the step."""
        step = worker.step
        if (self.upload or worker.state_asked == step or not (remember or self._wanted(worker))
                or worker.states_failed > min(other.states_failed for other in self.dispatcher.workers)):
            return
        worker.state_asked = step
        try:
            self.upload = snapshots.Upload(self.cfg, step, self.run.seed_of(step), worker.digest, self.run.directory,
                                           remember=remember)
            self.worker = worker
            worker.session.reply(SNAPSHOT_WANTED, step)
        except OSError as error:
            self._stop(error)

    def goes_on(self, worker):
        """The worker has sent a request or a result: its state cannot follow."""
        if worker is self.worker:
            self._refuse("it did not come")

    def take(self, worker, payload):
        step, *piece = SNAPSHOT_DATA.unpack(payload)
        if self.worker is worker and self.upload.step == step:           # else of an upload that was given up
            self._unpack(self.upload.feed, *piece)
            if self.unpacking:
                worker.session.wait()                # with its next piece

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
            if upload.finished:
                self._keep(upload)
        except ValueError as error:
            self._refuse(error)
        except OSError as error:
            self._stop(error)

    def _keep(self, upload):
        if self.coordinator.states.contradicts(upload.step, upload.digest):
            return self._refuse("others have another state")
        if not upload.remembered:
            self.shelf.put(upload)
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

    def _refuse(self, reason):
        self.worker.states_failed += 1
        self.events.warn(f"worker {self.worker.session.title}: its snapshot of step {self.upload.step} is not used: "
                         f"{reason}", peer=True)
        self.drop()

    def leave(self, worker):
        """The worker has gone: without it no upload goes on."""
        if worker is self.worker:
            self.drop() if self.coordinator.closing else self._refuse("it left")

    def drop(self, workers=None):
        """Gives the present upload up; with `workers` only if it comes from one of them."""
        if self.upload and (workers is None or self.worker in workers):
            self.upload.drop()
            self._end()

    def check(self, now):
        """Gives up an upload that does not come."""
        self.shelf.close_unread(now)
        if self.upload and self.run.step >= self.upload.step + self.cfg.SNAPSHOT_EVERY:
            self._refuse("it did not come")

    def _end(self):
        self.worker.session.go_on()
        self.worker = self.upload = None
        self.dispatcher.changed = True               # the next upload may begin

    def _stop(self, error):
        """A run does not need snapshots: it continues without them."""
        self.drop()
        self.shelf.stopped = True
        self.events.warn(f"{self.run.directory}: no more snapshots, {error.strerror}: start again when this is mended")
