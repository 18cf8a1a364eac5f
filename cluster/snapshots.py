"""The state of the model as a file (SPEC 17), with which a late worker starts; digests of configurations and data.
A file is on the disk before the shelf lists it, and is compared with its SHA-256 before it is used: disks flip bits."""

import contextlib
import functools
import hashlib
import json
import math
import os
import shutil
import struct
from collections import namedtuple

from cluster import history, hub
from cluster.history import most_bytes, open_file, read_file, sizes
from cluster.wire import BLOCK, SNAPSHOT_DATA, SNAPSHOT_REQUEST, SNAPSHOT_WANTED

MAGIC = b"EGGSNAP2"
HEAD = struct.Struct("<8sQQ32s32s32sQ")
HEAD_SIZE = HEAD.size + 4                # with its CRC-32
VALUES = b"values: "      # before the digest of a configuration, in the field of 32 bytes
KEPT = 2                   # newest snapshots that are kept, beside the best
LEVEL = 1                  # of zstd: moments hardly shrink, weights do at any level
OTHER_HASH = "damaged: its SHA-256 is another"
PIECE = 1 << 20            # bytes that are decompressed at a time
SLICE = 1 << 23            # bytes that are compressed at a time
MOST_COMING = 4            # whole snapshots that the disk has not taken yet


# The first bytes of a snapshot file. step, seed, size (bytes of the body): int; sha256 (of the state), config (see
# `fits`), before (SHA-256 of the fitness of the previous step): bytes [32]
Head = namedtuple("Head", "step seed sha256 config before size")


def state_hash(state):
    """bytes [32]: SHA-256 of the same bytes as model.parameters.Digest (without the zeros at its end)."""
    digest = _begin(state.step, state.seed)
    for part in _parts(state):
        digest.update(part)
    return digest.digest()


def _begin(step, seed):
    return hashlib.sha256(struct.pack("<QQ", step, seed))


def _parts(state):
    return [memoryview(x).cast("B") for x in (state.weights, state.moments, state.overlay)]


def data_digest(tokens):
    """bytes [32] that identify training data: its size and all of it, or 256 evenly spread pieces of large data."""
    if tokens is None:
        return bytes(32)
    digest = hashlib.sha256(f"{len(tokens)} {tokens.dtype}".encode())
    piece = 1 << 16
    small = len(tokens) <= 256 * piece
    last = len(tokens) - piece
    for start in range(0, len(tokens), piece) if small else [*(int(k * (last / 255)) for k in range(255)), last]:
        digest.update(tokens[start:start + piece])
    return digest.digest()


def config_digest(constants):
    """bytes [32] over constants that determine the model, {name: value}."""
    return hashlib.sha256(json.dumps(constants, sort_keys=True).encode()).digest()


def _values(cfg):
    return VALUES + config_digest(cfg.saved())[len(VALUES):]


def fits(cfg, head):
    """Whether a Head is of this configuration. Those of older programs have a digest of what differed from their
    egg_config.py, which nobody knows."""
    return not head.config.startswith(VALUES) or head.config == _values(cfg)


def pack(state):
    """bytes of the body of a snapshot."""
    return b"".join(_packed(state))


def _packed(state):
    import pyzstd
    compressor = pyzstd.ZstdCompressor(LEVEL)
    for part in _parts(state):
        for at in range(0, len(part), SLICE):
            yield compressor.compress(part[at:at + SLICE])
    yield compressor.flush()


def read(cfg, path):
    """The State in a snapshot file. Raises ValueError (one line) for damage, OSError."""
    return unpack(cfg, read_file(path, most_bytes(cfg)))


def unpack(cfg, data, sha256=None):
    """The State in the content of a snapshot file. sha256: what it must have, where the file is that of another island,
    whose configuration may differ. Raises ValueError (one line): damage, another configuration."""
    from model import parameters                     # with NumPy, which a coordinator does not need to start
    data = memoryview(data)
    head = read_head(data)
    if sha256 not in (None, head.sha256):
        raise ValueError(f"snapshot of step {head.step}: it is not the state that was stated")
    try:
        if not sha256 and not fits(cfg, head):
            raise ValueError("it is of another configuration")
        raw = history.unzip(data[HEAD_SIZE:], sum(sizes(cfg)))
        digest = _begin(head.step, head.seed)
        digest.update(raw)
        if digest.digest() != head.sha256:
            raise ValueError(OTHER_HASH)
        return parameters.from_raw(cfg, raw, head.step, head.seed)
    except ValueError as error:
        raise ValueError(f"snapshot of step {head.step}: {error}") from None


def whole(cfg, directory, damage, step=None):
    """The State of the newest snapshot in the save directory of a run whose history is damaged (history.Damaged), or of
    the one of a step, that is whole. Raises `damage` without one."""
    matches = filter(None, map(history.SNAPSHOT.fullmatch, os.listdir(directory)))
    for match in sorted(matches, key=lambda match: -int(match[1])):
        if step in (None, int(match[1])):
            with contextlib.suppress(ValueError, OSError):
                return read(cfg, os.path.join(directory, match[0]))
    raise damage


def mend(cfg, directory, damage):
    """Lets a run whose history is damaged go on from its newest whole snapshot: where that is not older than what can
    be read, or where workers need no earlier steps. Returns a line about it. Raises `damage`, OSError."""
    state, path = whole(cfg, directory, damage), os.path.join(directory, history.FILE)
    if state.step < damage.step and cfg.PERTURB == "weights":
        raise damage
    shutil.copyfile(path, copy := history.unused(f"{path}.damaged"))
    history.begin_anew(cfg, directory, history.Start(state.step, state.seed, state_hash(state).hex()))
    return (f"{path} is damaged: the run goes on from step {state.step}, the steps after that are gone; {copy} is the "
            "damaged file")


def check(path):
    """Reads a snapshot file, in pieces. Raises ValueError if its state is not the one that its head names, OSError."""
    with open_file(path) as file:
        head = read_head(file.read(HEAD_SIZE))
        digest = _begin(head.step, head.seed)
        for raw in _unpacked(file):
            digest.update(raw)
    if digest.digest() != head.sha256:
        raise ValueError(OTHER_HASH)


def _unpacked(file, most=math.inf):
    """Yields the state in the body of a snapshot file, up to `most` bytes, in pieces. Raises ValueError."""
    source = history.decompressor()
    while not source.eof:
        data = file.read(PIECE) if source.needs_input else b""
        if source.needs_input and not data:
            raise ValueError("it is cut short")
        yield (raw := history.decompress(source, data, PIECE))
        most -= len(raw)
        if most < 0:
            raise ValueError("it is too long")
    if source.unused_data or file.read(1):
        raise ValueError("something follows it")


def read_head(data):
    """The Head of the content of a snapshot file. Raises ValueError."""
    if not history.is_intact(data[:HEAD_SIZE], HEAD_SIZE):
        raise ValueError("not a snapshot, or damaged in its first bytes")
    magic, *fields = HEAD.unpack(data[:HEAD.size])
    if magic != MAGIC:
        raise ValueError("not a snapshot")
    return Head(*fields)


def _make_head(cfg, step, seed, sha256, fitness, size):
    """The first bytes of a snapshot file. fitness: packed, of the previous step; size: of the body, in bytes."""
    return history.with_crc(HEAD.pack(MAGIC, step, seed, sha256, _values(cfg), hashlib.sha256(fitness).digest(), size))


def save(cfg, state, directory):
    """Writes a State as the snapshot with which a run or an epoch begins; it is on the disk when this returns. Returns
    its SHA-256 (bytes). Raises OSError."""
    sha256 = state_hash(state)
    with history.replacing(directory, history.snapshot_name(state.step)) as file:
        file.write(bytes(HEAD_SIZE))
        file.writelines(_packed(state))
        size = file.tell() - HEAD_SIZE
        file.seek(0)
        file.write(_make_head(cfg, state.step, state.seed, sha256, b"", size))
    return sha256


class Upload:
    """A snapshot that is being received: its pieces are written as they come. `whole`: all have come; then `check`.
    digest: of its state, as the worker has stated it; sha256: set by `check`; `got`, `total`: bytes of the body; drop:
    removes its file, unless that is kept. Raises ValueError for data that cannot be right, OSError of the disk."""

    got = 0
    total = sha256 = None

    def __init__(self, cfg, step, seed, digest, directory):
        self.step = step
        self.seed = seed
        self.digest = digest
        self._cfg = cfg
        self._part = history.Part(directory, "snapshot-")
        self._file = self._part.file
        self._file.write(bytes(HEAD_SIZE))
        self.drop = self._part.drop

    def feed(self, total, offset, data):
        """Takes a piece."""
        self.total = self.total or total
        end = offset + len(data)
        if (total, offset) != (self.total, self.got) or not data or not end <= total <= most_bytes(self._cfg):
            raise ValueError(f"piece of {len(data)} bytes at {offset} of {total}, the next one is at {self.got} of "
                             f"{self.total}")
        self._file.write(data)
        self.got = end

    @property
    def whole(self):
        return self.got == self.total

    def check(self):
        """Compares the state with the digest, in pieces, perhaps in a thread beside the loop."""
        from model import parameters
        digests = parameters.Digest(self.step, self.seed), _begin(self.step, self.seed)
        left = sum(sizes(self._cfg))
        self._file.seek(HEAD_SIZE)
        for raw in _unpacked(self._file, left):
            for digest in digests:
                digest.update(raw)
            left -= len(raw)
        digest, self.sha256 = (digest.digest() for digest in digests)
        if left or digest != self.digest:
            raise ValueError("it is not the state that workers stated")

    def keep(self, name, fitness):
        """Gives the file its head and its name, and waits until both are on the disk. fitness: packed, of the previous
        step."""
        self._file.seek(0)
        self._file.write(_make_head(self._cfg, self.step, self.seed, self.sha256, fitness, self.total))
        self._part.keep(name)


class Shelf:
    """The snapshots of the current epoch of `run`: `files`, {step: name}. Links `latest` and `best` name two of them;
    old ones are removed. damaged: {line: file, or None} about files that cannot be used; doubtful: steps of those that
    `check` has not come to yet, which are not offered. stopped: no more snapshots, they cannot be written."""

    stopped = False

    def __init__(self, cfg, run):
        self.cfg = cfg
        self.run = run
        self.directory = run.directory
        self.files = {}
        self.digests = {}                # step -> digest, of those that were uploaded, also before they are in `files`
        self.figures = {}                # step -> figure, see `ranked`
        self.sha256 = {}                 # step -> SHA-256 of the state
        self.damaged = {}
        self.doubtful = set()
        for match in self._matches():
            self._take(match)

    def _matches(self):
        names = os.listdir(self.directory) if self.directory else ()
        return filter(None, map(history.SNAPSHOT.fullmatch, names))

    def _take(self, match):
        """Lists a file, by the match of its name, if its head belongs to this run."""
        try:
            with open_file(self._place(match[0])) as file:
                head = read_head(file.read(HEAD_SIZE))
                if head.size != os.fstat(file.fileno()).st_size - HEAD_SIZE:
                    raise ValueError("it is cut short")
        except (OSError, ValueError) as error:
            return self._note(match[0], error)
        if not fits(self.cfg, head):
            self.damaged[f"{self._place(match[0])} is of another configuration and not used"] = None
        elif head.step == int(match[1]) and self._is_of_run(head):
            self.files[head.step] = match[0]
            self.sha256[head.step] = head.sha256
            if match[3] and bool(match[2]) == bool(self.cfg.OBJECTIVE):
                self.figures[head.step] = float(match[3])

    def _note(self, name, error):
        why = getattr(error, "strerror", None) or error
        self.damaged[f"{self._place(name)} is damaged and not used: {why}"] = name

    def _is_of_run(self, head):
        """With unit trials the history may begin later than the epoch: of the snapshots between, the best
        stays."""
        step, start = head.step, self.run.start
        if step < start.step:
            since = start.origin.get("since", start.step) if start.origin else 0
            return self.cfg.PERTURB == "units" and step >= since
        if step == start.step and start.state:
            return head.sha256.hex() == start.state
        return 0 < step <= self.run.step and head.before == hashlib.sha256(self.run.fitness(step - 1)).digest()

    def check(self, warn):
        """A task (hub.Beside) of a coordinator: compares all files with their hashes, the newest first. One that is
        damaged is forgotten, and `warn` takes a line. Raises HistoryError where the history begins with a snapshot and
        none is left."""
        self.doubtful.update(self.files)
        return self._check(warn)

    def _check(self, warn):
        for step in sorted(self.files, reverse=True):
            try:
                yield functools.partial(check, self.path(step))
            except (OSError, ValueError) as error:
                self._note(self.files.pop(step), error)
                del self.sha256[step]
            except GeneratorExit:
                return self.doubtful.clear()
            self.doubtful.discard(step)
        for line, name in self.damaged.items():
            if name and os.access(self._place(name), os.R_OK):       # it is named once
                os.replace(self._place(name), self._place(f"{name}.damaged"))
            warn(line)
        start = self.run.start
        if start.step and max(self.files, default=0) < start.step:
            old = self._place(history.OLD.format(start.epoch - 1))
            raise history.HistoryError(
                f"{self.directory}: the snapshot of step {start.step}, with which its history begins, is missing or "
                "damaged: restore it from a copy" + bool(start.epoch) * f", or continue from the previous epoch: mv "
                f"{old} {self._place(history.FILE)}")
        self.arrange()

    def newest_but(self, known=()):
        """Step of the newest snapshot with which a worker can begin and whose SHA-256 is not in `known`, 0 without one.
        """
        return max((step for step in self.files.keys() - self.doubtful
                    if step >= self.run.start.step and self.sha256[step] not in known), default=0)

    newest = property(newest_but)

    @property
    def ranked(self):
        """[step] of the snapshots that were measured, the lowest validation, with an objective the highest reward,
        first."""
        sign = -1 if self.cfg.OBJECTIVE else 1
        return sorted(self.files.keys() & self.figures, key=lambda step: (sign * self.figures[step], -step))

    @property
    def best(self):
        return next(iter(self.ranked), None)

    def _place(self, name):
        return os.path.join(self.directory, name)

    def path(self, step):
        return self._place(self.files[step]) if step in self.files else None

    def state(self, step):
        return read(self.cfg, self.path(step))

    def put(self, upload):
        """A task (hub.Beside) that keeps an Upload. It is listed once it is on the disk, if nobody forgets it before.
        """
        step = upload.step
        name = history.snapshot_name(step, self.figures.get(step), self.cfg.OBJECTIVE)
        yield functools.partial(upload.keep, name, self.run.fitness(step - 1))
        if step not in self.digests:
            return self.remove(name)
        self.files[step] = name
        self.sha256[step] = upload.sha256
        self.arrange()

    def measured(self, step, figure):
        """The figure of a validation, with an objective of the reward alone, for the file name of the snapshot of this
        step, which may still be on its way. The best reward so far has a snapshot, whatever its step."""
        best = self.cfg.OBJECTIVE and figure > max(self.figures.values(), default=-math.inf)
        every, kept = self.cfg.SNAPSHOT_EVERY, step in self.files or step in self.digests
        if step and self.directory and every and (best or step % every == 0 or kept):
            self.figures[step] = figure
            with contextlib.suppress(OSError):
                self.arrange()

    def forget_figures(self):
        """Of another text: no snapshot is measured yet. Rewards have prompts of their own."""
        if not self.cfg.OBJECTIVE:
            self.figures.clear()
            with contextlib.suppress(OSError):
                self.arrange()

    def begin_epoch(self, sha256):
        """Goes on with the snapshot of the state with which an epoch begins, which is on the disk, as the history is.
        Earlier ones are removed, but for those with which the history of an earlier epoch begins."""
        step = self.run.start.step
        self.files, self.sha256 = {step: history.snapshot_name(step)}, {step: sha256}
        self.figures, self.digests, self.doubtful = {}, {}, set()
        self.stopped = False
        needed = {start.step for start in history.epochs(self.directory)} - {step}
        for match in self._matches():
            if match[0] != self.files[step] and int(match[1]) <= step and int(match[1]) not in needed:
                self.remove(match[0])
        self.arrange()

    def forget(self, step):
        if step in self.files:
            self.remove(self.files.pop(step))
        self.digests.pop(step, None)
        self.sha256.pop(step, None)

    def remove(self, name):
        history.remove(self._place(name))

    def arrange(self):
        """Adds figures to file names, updates the links `latest` and `best`, removes old snapshots."""
        if self.doubtful or not self.directory:
            return                                       # `check` ends with this
        for step in self.files:
            name = history.snapshot_name(step, self.figures.get(step), self.cfg.OBJECTIVE)
            if name != self.files[step]:
                os.replace(self.path(step), self._place(name))
                self.files[step] = name
        history.sync_directory(self.directory)           # of the names to which the links lead
        for link, step in (("latest", self.newest), ("best", self.best)):
            path = self._place(f"{link}.egg")
            history.remove(path + ".part" if step else path)
            with contextlib.suppress(OSError):           # names of files say as much
                if step:
                    os.symlink(self.files[step], path + ".part")
                    os.replace(path + ".part", path)
        stay = {*sorted(self.files)[-KEPT:], self.best, self.run.start.step}       # there is no other copy of the start
        if every := self.cfg.KEEP_EVERY * self.cfg.SNAPSHOT_EVERY:
            stay |= {step for step in self.files if step % every == 0}
        for step in self.files.keys() - stay:
            self.forget(step)

    def block(self, step, offset, size):
        """(bytes of the file of a snapshot, up to `size` of them from `offset`), (0, b"") where there is none."""
        with contextlib.suppress(OSError):
            if step in self.files:
                with open_file(self.path(step)) as file:
                    total = os.fstat(file.fileno()).st_size
                    return total, os.pread(file.fileno(), size, min(offset, total))
        return 0, b""


class Collector:
    """Collects for an egg_net.Coordinator. shelf: the Shelf; worker, upload: who sends which
    Upload, or None. A whole upload counts if it has the digest that its worker has stated, and that most
    workers have. beside: the hub.Beside in which it is checked and kept, and the history cut."""

    worker = upload = None

    def __init__(self, coordinator):
        self.coordinator = coordinator
        self.dispatcher = coordinator.dispatcher
        self.cfg = coordinator.cfg
        self.run = coordinator.run
        self.events = coordinator.events
        self.shelf = Shelf(self.cfg, self.run)
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
            self.upload = Upload(self.cfg, step, self.run.seed_of(step), worker.digest, self.run.directory)
            self.worker = worker
            worker.session.reply(SNAPSHOT_WANTED, step)
        except OSError as error:
            self._stop(error)

    def give(self, session, payload):
        """Answers a SNAPSHOT_REQUEST."""
        step, offset = SNAPSHOT_REQUEST.unpack(payload)
        total, data = self.shelf.block(step, offset, BLOCK)
        session.reply(SNAPSHOT_DATA, step, total, offset, data)

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
        """A task. With unit trials the history keeps the steps since the second newest snapshot: a step is a
        digit a weight, and who comes late begins with a snapshot."""
        run, shelf = self.run, self.shelf
        step = sorted({run.start.step, *shelf.files})[-2:][0]
        if (self.cfg.PERTURB == "units" and step > run.start.step
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

    def check(self):
        """Gives up an upload that does not come."""
        if self.upload and self.run.step >= self.upload.step + self.cfg.SNAPSHOT_EVERY:
            self._refuse("it did not come")

    def _stop(self, error):
        """A run does not need snapshots: it continues without them."""
        self.drop()
        if self.shelf.stopped:
            return
        self.shelf.stopped = True
        self.events.warn(f"{self.run.directory}: no more snapshots, {error.strerror}: start again when this is mended")
