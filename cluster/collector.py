"""The snapshots of a run and the upload of the next one from a worker."""

from cluster import snapshots
from cluster.wire import BLOCK_HEAD, SNAPSHOT_WANTED, STEP


class Collector:
    """shelf: the snapshots.Shelf; worker, upload: who is sending which snapshots.Upload, or None. freed() is called
    when another upload may begin. Raises HistoryError where the state with which an epoch began is missing."""

    def __init__(self, cfg, run, events, freed):
        self.cfg, self.run, self.events, self._freed = cfg, run, events, freed
        self.worker = self.upload = None
        self.shelf = snapshots.Shelf(cfg, run)
        self.shelf.check_start()

    def wanted(self, worker, step):
        """Whether this worker, at `step`, shall send its state for the shelf."""
        return worker.digest and worker.sends_snapshots and self.upload is None and self.shelf.wanted(step)

    def ask(self, worker, remember=False):
        """Asks for the state of the present step. remember: for `Upload.state`, without a file."""
        try:
            self.upload = snapshots.Upload(self.cfg, self.run.step, self.run.seed, worker.digest, self.run.directory,
                                           remember=remember)
            self.worker = worker
            worker.session.reply(SNAPSHOT_WANTED, STEP.pack(self.run.step))
        except OSError as error:
            self._stop(error)

    def take(self, worker, payload):
        """Takes a SNAPSHOT_DATA; the Upload once it is whole and kept or remembered, None until then."""
        step, total, offset = BLOCK_HEAD.unpack_from(payload)
        upload = self.upload
        if self.worker is not worker or upload.step != step:
            return None                              # of an upload that was given up
        try:
            upload.add(total, offset, payload[BLOCK_HEAD.size:])
            if not upload.finished:
                return None
            if not upload.remembered:
                self.shelf.put(upload)
        except ValueError as error:
            worker.sends_snapshots = False
            self.drop()
            self.events.warn(f"worker {worker.session.title}: its snapshot of step {step} is not used: {error}")
            return None
        except OSError as error:
            self._stop(error)
            return None
        self._end()
        if not upload.remembered:
            self.events.tell("snapshot", step=step, bytes=total, overlay=upload.overlay())
        return upload

    def drop(self, workers=None):
        """Gives the present upload up; with `workers` only if it comes from one of them."""
        if self.upload and (workers is None or self.worker in workers):
            self.upload.drop()
            self._end()

    def check(self):
        """Gives up an upload that does not come."""
        if self.upload and self.run.step >= self.upload.step + self.cfg.SNAPSHOT_EVERY:
            self.worker.sends_snapshots = False
            self.drop()

    def begin_epoch(self):
        """The run has another start now."""
        self.drop()
        self.shelf.close()
        self.shelf = snapshots.Shelf(self.cfg, self.run)
        self.shelf.arrange()

    def _end(self):
        self.worker = self.upload = None
        self._freed()

    def _stop(self, error):
        """The run is more than its snapshots: it goes on without them."""
        self.drop()
        self.shelf.stop()
        self.events.warn(f"{self.run.directory}: no more snapshots, {error.strerror}: start again when this is mended")
