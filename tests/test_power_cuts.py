"""What a power cut leaves of a run, at every moment: a run that goes on, with every step that a worker has seen."""

import contextlib
import itertools
import os
import pathlib
import stat
import threading
from collections import namedtuple

from pytest import fixture, mark

import egg_net
from cluster import history, snapshots
from cluster.history import open_run
from model.parameters import initial_state
from model.parameters import digest_of
from tools import use
from coordinators import Server, filled, until
from fakes import FakeEngine, FakeObjective, REWARDED, UNITS, VALIDATION, changed, step_alone

# Names and contents that were synced, changes of names since, one by one, and what was promised by then: `step`,
# which a worker has seen; of the snapshots of `epoch` the steps that are `listed`, the `best`, and its `figure`
Moment = namedtuple("Moment", "names changes contents step epoch listed best figure")


class Disk:
    """Records the system calls on a directory. It is pessimistic: of a file is left what was last synced, and each name
    that was made, changed or removed since the directory was synced may be so or not."""

    def __init__(self, directory, patch):
        self.directory = directory
        self.names, self.changes, self.now, self.contents = {}, [], {}, {}
        self.step, self.server, self.moments = 0, None, []
        self.open = {}                                           # so that no inode is used twice
        self._lock = threading.RLock()
        for name in "fsync", "replace", "unlink", "link", "symlink":
            patch.setattr(os, name, self._recorded(getattr(os, name)))
        append = history.Run.append

        def seen(run, *record):
            append(run, *record)
            if run.directory and os.path.samefile(run.directory, directory):
                self.step = run.step

        patch.setattr(history.Run, "append", seen)

    def _recorded(self, call):
        def recorded(*arguments, **options):
            with self._lock:
                self._look()                                     # files that were made
                call(*arguments, **options)
                self._look()
                if call.__name__ == "fsync":
                    self._synced(arguments[0])
                self.moments.append(Moment(dict(self.names), list(self.changes), dict(self.contents), self.step,
                                           *self._promised()))
        return recorded

    def _promised(self):
        if not self.server:
            return 0, (), None, None
        shelf = self.server.shelf
        return self.server.run.start.epoch, tuple(shelf.files), shelf.best, shelf.figures.get(shelf.best)

    def _look(self):
        """Notes which names have changed."""
        now = {}
        for entry in os.scandir(self.directory):
            inode = entry.inode()
            if inode not in self.open:
                self.open[inode] = os.open(entry.path, os.O_PATH | os.O_NOFOLLOW)
                if entry.is_symlink():
                    self.contents[inode] = os.readlink(entry.path)
            if entry.name.endswith(".egg"):
                now[entry.name] = inode
        change = {name: now.get(name) for name in now.keys() | self.now if now.get(name) != self.now.get(name)}
        self.now = now
        if change:
            self.changes.append(change)

    def _synced(self, handle):
        status = os.fstat(handle)
        if stat.S_ISDIR(status.st_mode):
            if os.path.samestat(status, os.stat(self.directory)):
                self.names, self.changes = dict(self.now), []
        else:
            self.contents[status.st_ino] = pathlib.Path(f"/proc/self/fd/{handle}").read_bytes()

    def survivors(self):
        """Yields (Moment, {name: content}) for every moment and each set of names that may be left, once."""
        known = set()
        for moment in self.moments:
            count = len(moment.changes)
            some = itertools.product([0, 1], repeat=count) if count < 6 else \
                [[(k == one) ^ others for k in range(count)] for one in range(-1, count) for others in (0, 1)]
            for happened in some:
                names = dict(moment.names)
                for change in itertools.compress(moment.changes, happened):
                    names.update(change)
                files = {name: moment.contents.get(inode, b"") for name, inode in names.items() if inode}
                key = *moment[3:], frozenset(files.items())
                if key not in known:
                    known.add(key)
                    yield moment, files


def written(directory, files):
    directory.mkdir()
    for name, content in files.items():
        if isinstance(content, str):
            os.symlink(content, directory / name)
        else:
            (directory / name).write_bytes(content)
    return directory


def rebuilt(run):
    """The engine of a run, from its newest snapshot that is whole."""
    shelf, engine = snapshots.Shelf(run.cfg, run), FakeEngine(run.cfg)
    for step in sorted(shelf.files, reverse=True):
        with contextlib.suppress(ValueError):
            if step >= run.start.step:
                engine.load(shelf.state(step))
                break
    assert engine.step >= run.start.step
    history.replay(run, engine)
    return engine


def hold(disk, cfg, digests, tmp_path):
    """Opens what may be left at every moment. digests: {(epoch, step): of the state}."""
    count = epochs = 0
    figures = []                                                 # of the best snapshot, as it got better
    for count, (moment, files) in enumerate(disk.survivors()):
        at = written(tmp_path / f"left{count}", files)
        if not files.get(history.FILE):
            assert not (moment.step or moment.listed)                        # nothing was promised yet
            continue
        with contextlib.closing(open_run(cfg, at)) as run:
            assert run.step >= moment.step and (not run.start.epoch or files["history-000.egg"])
            assert rebuilt(run).digest() == digests[run.start.epoch, run.step]
            shelf = snapshots.Shelf(cfg, run)
            if run.start.epoch == moment.epoch:
                for step in moment.listed:
                    if step >= run.start.step or step == moment.best:
                        shelf.state(step)
            if cfg.OBJECTIVE and moment.best:
                figures += [moment.figure] * (moment.figure not in figures)
                assert len(figures) == 1 or shelf.figures[shelf.best] >= figures[-2]
        if files.get("history-000.egg"):                                     # the run of the epoch before
            os.replace(at / "history-000.egg", at / history.FILE)
            with contextlib.closing(open_run(cfg, at)) as run:
                epochs += run.start.epoch == 0 and (1, moment.step) in digests
                assert rebuilt(run).digest() == digests[run.start.epoch, run.step]
    assert count > 20
    return epochs


def course(engine, epoch, until):
    """{(epoch, step): digest} of the states that an engine comes to."""
    digests = {(epoch, engine.step): engine.digest()}
    while engine.step < until:
        step_alone(engine)
        digests[epoch, engine.step] = engine.digest()
    return digests


@fixture
def disk(tmp_path, monkeypatch):
    (tmp_path / "run").mkdir()
    with monkeypatch.context() as patch:
        disk = Disk(tmp_path / "run", patch)
        yield disk
    for handle in disk.open.values():
        os.close(handle)


class Watched(Server):
    """A Server on a Disk, whose listed snapshots are noted with every call."""

    def __init__(self, disk, cfg, **options):
        super().__init__(disk.directory, cfg, save=True, **options)
        disk.server = self


class Paid(FakeEngine, FakeObjective):
    def reward(self, _):
        return {2: 0.5, 10: 0.75}.get(self.step, 0.25)


OFTEN = dict(SNAPSHOT_EVERY=2, VALIDATE_EVERY=2, SAMPLE_EVERY=0)
KINDS = {"weights": changed(**OFTEN), "units": UNITS.changed(**OFTEN),
         "units with an objective": changed(**REWARDED, **OFTEN)}


@mark.parametrize("kind", ["weights", "units with an objective"])
def test_a_run_and_its_restart(disk, tmp_path, kind):
    cfg = KINDS[kind]
    for steps in 7, 14:
        engine = Paid(cfg, 0.004)
        with Watched(disk, cfg, steps=steps) as server:
            server.work(engine, validation=VALIDATION, objective=engine if cfg.OBJECTIVE else None)
            server.reaches(steps)
    names = os.listdir(disk.directory)
    assert any(name.startswith("snapshot-") and name.count("-") > 1 for name in names), names     # it has its figure
    hold(disk, cfg, course(FakeEngine(cfg), 0, 14), tmp_path)


class Epoch(egg_net.Hook):
    """An island that begins an epoch once there is a snapshot of step 4."""

    begun = None               # with this state

    def attach(self, coordinator):
        self.coordinator = coordinator
        return self

    def step_completed(self):
        run = self.coordinator.run
        if self.begun is None and self.coordinator.shelf.newest >= 4:
            self.begun = initial_state(run.cfg)
            self.begun.weights[:8] = 5
            self.begun.step, self.begun.seed = run.step, run.seed
            self.coordinator.begin_epoch(self.begun, {"epoch": 1, "digest": digest_of(self.begun).hex()})


@mark.parametrize("kind", ["weights", "units"])
def test_an_epoch_of_an_island_and_the_one_before(disk, tmp_path, kind):
    cfg, island = KINDS[kind], Epoch()
    with Watched(disk, cfg, stay=True, island=island) as server:
        server.work(FakeEngine(cfg, 0.004), validation=VALIDATION)
        until(lambda: island.begun and server.shelf.newest > island.begun.step + 2)
    digests = course(FakeEngine(cfg), 0, island.begun.step)
    engine = FakeEngine(cfg)
    engine.load(island.begun)
    assert hold(disk, cfg, digests | course(engine, 1, server.run.step), tmp_path) > 10


def test_an_import_and_a_copy(disk, tmp_path):
    cfg, engine = changed(**OFTEN), FakeEngine(changed(**OFTEN))
    for _ in range(3):
        step_alone(engine)
    metadata = {"config": "{}", "step": "3", "seed": str(engine.seed)}
    use.write_tensors(tmp_path / "model", use.to_arrays(cfg, engine.state(), True), metadata)
    use.import_(cfg, str(tmp_path / "model"), str(tmp_path / "imported"))
    with contextlib.closing(open_run(cfg, disk.directory, tmp_path / "imported")):
        pass
    with Watched(disk, cfg, steps=9) as server:
        server.work(FakeEngine(cfg, 0.004), validation=VALIDATION)
        server.reaches(9)
    hold(disk, cfg, course(engine, 0, 9), tmp_path)


def test_the_name_of_a_new_directory_is_on_the_disk(tmp_path, monkeypatch):
    synced, fsync = [], os.fsync
    monkeypatch.setattr(os, "fsync", lambda handle: synced.append(os.readlink(f"/proc/self/fd/{handle}"))
                        or fsync(handle))
    filled(tmp_path / "a" / "b")
    assert {str(tmp_path), str(tmp_path / "a"), str(tmp_path / "a" / "b")} < set(synced)
