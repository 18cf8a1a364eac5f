"""The snapshots of a run and the upload of the next one from a worker."""

import contextlib

from cluster import hub, snapshots
from cluster.wire import SNAPSHOT_DATA, SNAPSHOT_WANTED

MOST_COMING = 4            # whole snapshots that the disk has not taken yet


class Collector:
    """Collects for an egg_net.Coordinator. shelf: the snapshots.Shelf; worker, upload: who sends which
    snapshots.Upload, or None. A whole upload counts if it has the digest that its worker has stated, and that most
    workers have. beside: the hub.Beside in which it is checked and kept, and the history cut."""

    worker = upload = None

    def __init__(self, coordinator):
        self.coordinator = coordinator
        self.dispatcher = coordinator.dispatcher
        self.cfg = coordinator.cfg
        self.run = coordinator.run
        self.events = coordinator.events
        self.shelf = snapshots.Shelf(self.cfg, self.run)
        self.beside = hub.Beside()
        self.beside.begin(self.shelf.check(self.events.warn))

    def wanted(self, worker):
        """Whether this worker shall send its state for the shelf: every SNAPSHOT_EVERY steps, and at the end."""
        every, step, shelf = self.cfg.SNAPSHOT_EVERY, worker.step, self.shelf
        coming = shelf.digests.keys() - shelf.files.keys()               # to the disk
        if not step:
            return False
        due = (step in shelf.figures or every and step % every == 0) and self.run.step < step + every
        now = step == self.run.step and (self.coordinator.island.handover or every and self.coordinator.closing)
        return ((due or now) and shelf.directory
                and step not in shelf.files and step not in coming and len(coming) < MOST_COMING
                and not shelf.stopped and worker.digest)

    def ask(self, worker):
        """Asks a worker for its state, once per step, if it is wanted and no other worker has failed less often to send
        it."""
        step = worker.step
        if (self.upload or worker.state_asked == step or not self.wanted(worker)
                or worker.states_failed > min(other.states_failed for other in self.dispatcher.workers)):
            return
        worker.state_asked = step
        try:
            self.upload = snapshots.Upload(self.cfg, step, self.run.seed_of(step), worker.digest, self.run.directory)
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
        upload = self.upload
        if self.worker is worker and upload.step == step:                # else of an upload that was given up
            try:
                upload.feed(*piece)
            except ValueError as error:
                self._refuse(error)
            except OSError as error:
                self._stop(error)
            else:
                if upload.whole:
                    self.shelf.digests[step] = upload.digest             # nobody else is asked for it
                    self.worker = self.upload = None
                    self.beside.begin(self._keep(worker, upload))

    def _keep(self, worker, upload):
        """A task that checks a whole upload and keeps it."""
        step, shelf = upload.step, self.shelf
        try:
            yield upload.check
            if self.coordinator.states.contradicts(step, upload.digest):
                raise ValueError("others have another state")
            yield from shelf.put(upload)
            self.events.emit("snapshot", step=step, bytes=upload.total)
            self.coordinator.island.snapshot_kept(step)
            yield from self._forget()
        except ValueError as error:
            self._warn(worker, step, error)
        except OSError as error:
            self._stop(error)
        finally:
            upload.drop()
            if step not in shelf.files:
                shelf.forget(step)                   # another one may be asked
            self.dispatcher.changed = True

    def _forget(self):
        """A task. With noise on activations the history keeps the steps since the second newest snapshot: a step is a
        digit a weight, and who comes late begins with a snapshot."""
        run, shelf = self.run, self.shelf
        step = sorted({run.start.step, *shelf.files})[-2:][0]
        if (self.cfg.PERTURB == "activations" and step > run.start.step
                and (step in shelf.digests or not run.start.origin)):
            with contextlib.suppress(OSError):               # the next snapshot will bring another chance
                yield from run.forget_before(step, shelf.sha256[step], shelf.digests.get(step))
                shelf.arrange()

    def _refuse(self, reason):
        self._warn(self.worker, self.upload.step, reason)
        self.drop()

    def _warn(self, worker, step, reason):
        worker.states_failed += 1
        self.events.warn(f"worker {worker.session.title}: its snapshot of step {step} is not used: {reason}", peer=True)

    def leave(self, worker):
        """The worker has gone: without it no upload goes on."""
        if worker is self.worker:
            self.drop() if self.coordinator.closing else self._refuse("it left")

    def drop(self, workers=None):
        """Gives the present upload up; with `workers` only if it comes from one of them."""
        if self.upload and (workers is None or self.worker in workers):
            self.upload.drop()
            self.worker = self.upload = None
            self.dispatcher.changed = True           # the next upload may begin

    def check(self, now):
        """Gives up an upload that does not come."""
        self.shelf.close_unread(now)
        if self.upload and self.run.step >= self.upload.step + self.cfg.SNAPSHOT_EVERY:
            self._refuse("it did not come")

    def _stop(self, error):
        """A run does not need snapshots: it continues without them."""
        self.drop()
        if self.shelf.stopped:
            return
        self.shelf.stopped = True
        self.events.warn(f"{self.run.directory}: no more snapshots, {error.strerror}: start again when this is mended")
