"""The fitness history of a run: one append-only file from which every replica of the model can be rebuilt, bit for bit
(SPEC 17). A record is on the disk before anybody sees the next step, so a completed step is never lost. A run that
began from an imported model, each epoch of an island, and a run with unit trials is rebuilt from the snapshot of its
Start. The file of the previous epoch stays beside the present one as OLD.

A power cut takes what was not synced, content or name. So no file of a run is removed before what replaces it is on the
disk: `replacing`, `link_file` and `sync_directory` end with that."""

import contextlib
import errno
import fcntl
import functools
import glob
import importlib.util
import json
import os
import re
import shlex
import shutil
import struct
import tempfile
import zlib
from collections import namedtuple

import egg_config
from cluster.console import one_line
from egg_config import EggError, explained
from model import steps

FILE = "history.egg"
OLD = "history-{:03d}.egg"
OLD_NAME = re.compile(r"history-\d{3,15}\.egg")
EVENTS = "events.jsonl"                  # the events of the run (cluster.event_log)
DATA_FILE = "data.sha256"                # digest of the training data, once a worker has sent it
DECODING = "decoding.bin"                # the run's own copy of DECODING_FILE: it travels with it
DIGESTS = {"data": DATA_FILE, "held_out": "validation.sha256"}       # held_out: of the windows that validations read
SETTINGS = "settings.json"               # egg_config.Config.settings; names of files are relative to the directory
MAGIC = b"EGGHIST1"
RECORD = struct.Struct("<IQqQI")
HEAD = RECORD.size + 4                   # bytes of a record up to its body
# step, whether the figure is a reward, figure (cluster.snapshots); epoch, step, kind, fitness (islands.gossip)
SNAPSHOT = re.compile(r"snapshot-(\d{8,15})(?:-(reward-)?(-?\d{1,10}\.\d{4,6}))?\.egg")
ELITE = re.compile(r"elite-(\d{3,15})-(\d{8,15})-(validation|reward)-(-?\d{1,10}\.\d{4})\.egg")
# beside FILE, by --load-dir
COPIED = re.compile(r"(snapshot|elite|history)-.*\.egg|events\.jsonl(\.1)?|validation\.sha256")
# what is not written yet
PARTS = re.compile(r"(history|settings|data|validation|decoding|snapshot|events|elite).*\.part")
# of what a file system does not have
LACKING = errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL, errno.ENOLCK, errno.EBADF
LOADED_LATER = "numpy", "pyzstd"         # libraries that a coordinator needs with the first result and the first step
LONGEST_HEADER = LONGEST_TEXT = 1 << 20     # bytes of the header of FILE; of SETTINGS and DATA_FILE
MOST_STEPS = 1 << 48
NAMED = 3                                # constants in which configurations differ, in an error
PIECE = 1 << 25                          # bytes of FILE that are copied at a time
WRITABLE = "give a --save-dir that can be written"
TO_RETRY = "mend this and start the same command again"

CPP_CHECKPOINT = struct.Struct("<IIQQQ")      # magic, version, step, seed, bytes of fitness (SPEC 10)
CPP_MAGIC = 0x45474743
CPP_NAME = re.compile(r"checkpoint_(\d{8,15})\.bin")

Record = namedtuple("Record", "size step sum_loss updates seed")         # the head of one; size: bytes of the body


class HistoryError(EggError):
    """About a save directory or the files in it."""


class Damaged(HistoryError):
    """A history whose middle or header is damaged. step: the first that cannot be read."""

    step = 0


def open_file(path, mode="rb"):
    """An unbuffered file of a save directory, perhaps from a stranger: OSError for a link, a pipe or a device. To
    append (mode "ab"), the file need not be there."""
    if os.path.lexists(path) and not _is_plain(path):
        raise OSError(errno.EINVAL, "not a regular file", os.fspath(path))
    return open(path, mode, buffering=0)


def _is_plain(path):
    return os.path.isfile(path) and not os.path.islink(path)


def read_file(path, most):
    """bytes of such a file. Raises OSError also where it has more than `most`."""
    with open_file(path) as file:
        if os.fstat(file.fileno()).st_size > most:
            raise OSError(errno.EFBIG, os.strerror(errno.EFBIG), os.fspath(path))
        return file.read()


def remove(path):
    """Removes a file that may be gone, or that the disk does not let go: it is in nobody's way."""
    with contextlib.suppress(OSError):
        os.unlink(path)


@contextlib.contextmanager
def where_possible():
    """A block that not every file system can do: on exFAT, SMB or NFS there may be no links, locks or modes. Yields a
    list that then gets the error."""
    lacking = []
    try:
        yield lacking
    except OSError as error:
        lacking.append(error)
        if error.errno not in LACKING:
            raise


def sync_directory(directory):
    """Waits until the names in a directory are on the disk."""
    handle = os.open(directory, os.O_RDONLY)
    try:
        with where_possible():
            os.fsync(handle)
    finally:
        os.close(handle)


def make_directory(path):
    """Makes a directory that may be there; a new one's name is on the disk after this."""
    path = os.path.abspath(path)
    if not os.path.isdir(path):
        make_directory(os.path.dirname(path))
        os.makedirs(path, exist_ok=True)
        sync_directory(os.path.dirname(path))


class Part:
    """A file that is being written, and nobody reads."""

    def __init__(self, directory, name):
        self.file = tempfile.NamedTemporaryFile(dir=directory, prefix=name, suffix=".part", delete=False)
        self._directory = directory

    def keep(self, name):
        """Gives it its name, once its content is on the disk, and waits until the name is, too. Raises OSError."""
        self.file.flush()
        os.fsync(self.file.fileno())
        with where_possible():
            os.chmod(self.file.name, 0o644)
        os.replace(self.file.name, os.path.join(self._directory, name))
        self.file.close()
        sync_directory(self._directory)

    def drop(self):
        """Removes it, unless it has its name."""
        with contextlib.suppress(OSError):           # writing the buffer may fail on a full disk
            self.file.close()
        remove(self.file.name)


@contextlib.contextmanager
def replacing(directory, name):
    """Yields a file that takes this name at the end of the block, whole and on the disk; after an error, not at all."""
    part = Part(directory, name)
    try:
        yield part.file
        part.keep(name)
    finally:
        part.drop()


def write_file(directory, name, data):
    """Writes a file like `replacing`. Raises OSError; then nothing has changed."""
    with replacing(directory, name) as file:
        file.write(data)


def copy_file(path, directory, name):
    """Copies a file like `replacing`. Raises OSError."""
    with open_file(path) as file, replacing(directory, name) as copy:
        shutil.copyfileobj(file, copy, PIECE)


def link_file(path, new):
    """Gives a file a second name, which another file may have had; it is on the disk after this. Raises OSError."""
    with contextlib.suppress(FileNotFoundError):
        os.unlink(new)
    with where_possible() as lacking:
        os.link(path, new)
    if lacking:
        copy_file(path, *os.path.split(new))
    sync_directory(os.path.dirname(new))


def snapshot_name(step, figure=None, reward=False):
    """The name of the snapshot of a step; figure: of its validation, or its held-out reward."""
    figure = "" if figure is None else f"-reward-{figure:.6f}" if reward else f"-{figure:.4f}"
    return f"snapshot-{step:08d}{figure}.egg"


def crc(data):
    return zlib.crc32(data).to_bytes(4, "little")


def with_crc(data):
    return data + crc(data)


def is_intact(data, size):
    """Whether these are `size` bytes that end with the CRC-32 of those before."""
    return len(data) == size and crc(data[:-4]) == data[-4:]


def sizes(cfg):
    """(bytes of weights, of moments, of overlay)."""
    from model import parameters                     # with NumPy, which a coordinator does not need to start
    n = parameters.n_weights(cfg)
    return n, 12 * n, parameters.n_overlay(cfg)


def most_bytes(cfg):
    """The largest snapshot file, in bytes: zstd adds less than that to what it cannot compress."""
    return sum(sizes(cfg)) * 101 // 100 + 8192


class Start(namedtuple("Start", "step seed state origin more", defaults=["", None, 0])):
    """Where a run, or an epoch of it, begins: with the random initial model, or with another state (`state`: its
    SHA-256, hex). origin: {name: value} of an epoch, for JSON: its number (epoch), the state's digest, and more of
    islands.gossip. more: tokens that its model had read before, beyond those of as many steps of the run."""

    @property
    def epoch(self):
        return self.origin["epoch"] if self.origin else 0


class Run:
    """The completed steps of a run. `step`: their number, which is the next step; `seed`: of that step; `start`: a
    Start; `directory`: None for a temporary file; `data`, `held_out`: digests of the training data and of what
    validations read, zeros while unknown; `notices`: lines about repairs; `beside`: says what was loaded. lock: a
    handle, of one that may write."""

    beside = ""
    data = held_out = bytes(32)
    _newest = None, b""                      # the last step that was appended, and its body, which all workers want

    def __init__(self, cfg, file, directory=None, lock=None):
        self.cfg = cfg
        self.directory = directory
        self.notices = []
        self._file = file
        self._lock = lock
        self._name = _file_of(directory) if directory else "the temporary history file"
        if directory:
            for name in DIGESTS:
                with contextlib.suppress(OSError, ValueError):
                    digest = bytes.fromhex(read_file(os.path.join(directory, DIGESTS[name]), LONGEST_TEXT).decode())
                    setattr(self, name, digest if len(digest) == 32 else bytes(32))
        self._read_all()                     # sets the rest; _offsets: where the records begin, and the end of the file

    def tokens(self, step):
        """int: those that the model of a step has learned from."""
        return step * self.cfg.STEP_TOKENS + self.start.more

    def fitness(self, step):
        """bytes: a completed step (steps.join_digits); b"" for the step before the start."""
        if step == self.start.step - 1:
            return b""
        try:
            packed = unzip(self.body(step), self.cfg.STEP_BYTES)
            steps.check_step(self.cfg, packed)
            return packed
        except ValueError as error:
            raise HistoryError(f"{self._name}: step {step} cannot be read ({error}): restore it from a copy") from None

    def body(self, step):
        """bytes: the same, compressed, as in the record."""
        if step == self._newest[0]:
            return self._newest[1]
        k = step - self.start.step
        at, end = self._offsets[k:k + 2]
        with explained(HistoryError, self._name, TO_RETRY):
            data = self._pread(end - at - HEAD, at + HEAD)
        if not is_intact(data, end - at - HEAD):
            raise HistoryError(f"{self._name}: step {step}, at byte {at}, has changed since it was opened: restore it "
                               "from a copy")
        return data[:-4]

    def record(self, step):
        """The Record of a completed step."""
        return Record(*RECORD.unpack(self._pread(RECORD.size, self._offsets[step - self.start.step])))

    def append(self, packed, sum_loss, updates):
        """Completes the current step, which is then on the disk, for a run that is kept. After a HistoryError nothing
        has changed."""
        handle, at, body = self._file.fileno(), self._offsets[-1], _compressed(self.cfg, packed)
        head = with_crc(RECORD.pack(len(body), self.step, sum_loss, updates, self.seed))
        with explained(HistoryError, self._name, f"step {self.step} is not kept, all before it are; {TO_RETRY}"):
            try:
                for part in head, body, crc(body):
                    while part:
                        done = os.pwrite(handle, part, at)
                        at, part = at + done, part[done:]
                if self.directory:
                    os.fsync(handle)
            except OSError:
                os.ftruncate(handle, self._offsets[-1])
                raise
        self._newest = self.step, body
        self._offsets.append(at)
        self._advance()

    def copy(self, directory):
        """Writes the history as it is into another directory. Raises OSError."""
        with replacing(directory, FILE) as file:
            self._file.seek(0)
            shutil.copyfileobj(self._file, file, PIECE)

    def begin_epoch(self, start):
        """Continues from the current step with another state, whose snapshot must be on the disk. At every moment one
        of the two epochs is on the disk completely. Raises OSError; then nothing has changed."""
        # a handover that was interrupted may have left the other name
        link_file(self._name, os.path.join(self.directory, OLD.format(self.start.epoch)))
        for work in self._rewrite(start):
            work()

    def seed_of(self, step):
        """The seed of a completed step or of the next one."""
        return self.seed if step == self.step else self.record(step).seed

    def forget_before(self, step, state, digest):
        """A task (hub.Beside) that removes the completed steps before `step`, whose snapshot must be on the disk:
        with unit trials a step is a digit a weight. state: SHA-256 of that state; digest: its
        model.parameters.Digest, or None. Raises OSError; then nothing has changed."""
        origin = self.start.origin and {"since": self.start.step, **self.start.origin, "digest": digest.hex()}
        yield from self._rewrite(Start(step, self.seed_of(step), state.hex(), origin))

    def keep(self, name, digest):
        """Stores a digest, `data` or `held_out`; if the disk refuses it, until the end of this session. Returns whether
        another one was there."""
        before = getattr(self, name)
        setattr(self, name, digest)
        if self.directory and digest != before:
            _keep_text(self.directory, DIGESTS[name], digest.hex())
        return digest != before != bytes(32)

    def close(self):
        self._file.close()
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def _rewrite(self, start):
        """A task (hub.Beside): begins the file anew with this Start, and with the completed steps from there on.
        The run goes on meanwhile; the steps that have come are copied in the loop."""
        start = start._replace(more=self.start.more)
        old, offsets, header = self._file, self._offsets, _header(self.cfg, start)
        first = start.step - self.start.step
        shift = offsets[first] - len(header)                 # by which the records move
        with replacing(self.directory, FILE) as file:
            file.write(header)

            def copy(end):
                while (at := file.tell() + shift) < end:
                    if not (piece := os.pread(old.fileno(), min(end - at, PIECE), at)):
                        raise OSError(errno.EIO, "it has become shorter", self._name)
                    file.write(piece)
                file.flush()
                os.fsync(file.fileno())

            for _ in range(2):               # at the second time what has come during the first
                yield functools.partial(copy, offsets[-1])
            copy(offsets[-1])
            new = open_file(file.name, "r+b")
        self._file = new
        self._offsets = [at - shift for at in offsets[first:]]
        self.start = start
        yield old.close                      # to give gigabytes back takes seconds

    def _advance(self):
        self.seed = steps.next_seed(self.seed, self.step, self.cfg.NOISE_REUSE)
        self.step += 1

    def _pread(self, size, at):
        return os.pread(self._file.fileno(), size, at)

    def _read_all(self):
        """Checks every record and stores its offset. An incomplete last one is ignored, and cut off by the owner."""
        config, start, size = _read_header(self._file, self._name)
        if differ := difference(egg_config.renewed(config), self.cfg.saved()):
            raise HistoryError(f"{self._name} holds a run of another configuration: {differ}; set these as there, or "
                               "give another --save-dir")
        self._offsets = [size]
        self.start = start or Start(0, steps.first_seed(self.cfg))
        self.step, self.seed = self.start[:2]
        most = most_body(self.cfg)
        while head := self._pread(HEAD, self._offsets[-1]):
            record = Record(*RECORD.unpack_from(head.ljust(HEAD)))
            length = record.size + 4         # of the body and its CRC-32
            if not (is_intact(head, HEAD) and (record.step, record.seed) == (self.step, self.seed)
                    and 0 < record.size <= most
                    and is_intact(self._pread(length, self._offsets[-1] + HEAD), length)):
                return self._cut_torn_record(HEAD + 4 + most)
            self._offsets.append(self._offsets[-1] + HEAD + length)
            self._advance()

    def _cut_torn_record(self, longest):
        """Only the last record can be an interrupted write. Where a later one follows it is damage: to cut it would
        lose steps. longest: bytes of a record."""
        size = os.fstat(self._file.fileno()).st_size
        at = self._offsets[-1]
        rest = self._pread(longest + HEAD, at)
        later = re.finditer(re.escape((self.step + 1).to_bytes(8, "little")), rest)
        if size - at > longest or any(is_intact(rest[match.start() - 4:][:HEAD], HEAD) for match in later):
            damage = Damaged(f"{self._name} is damaged at byte {at} (step {self.step}) with more behind it: restore "
                             f"the file from a copy; to continue from step {self.step} instead, cut it with `truncate "
                             f"-s {at} {shlex.quote(self._name)}`")
            damage.step = self.step
            raise damage
        if self._lock is not None:
            os.ftruncate(self._file.fileno(), at)
            self.notices.append(f"{self._name}: step {self.step} was only half written, its {size - at} bytes are cut")


def open_run(cfg, save_dir=None, load_dir=None, mend=None):
    """The Run that a coordinator continues or begins, locked until it is closed. save_dir: the run to continue or
    begin. load_dir (a save directory, or C++ checkpoints): a run to copy, and to continue in save_dir, by default in
    load_dir-2 or the like; save_dir may hold a run already, which goes on. Neither: a temporary file. mend: see
    `open_directory`. Raises HistoryError: another configuration (naming the constants that differ), damage, a directory
    in use or not writable.
    """
    for library in LOADED_LATER:
        if importlib.util.find_spec(library) is None:
            raise ModuleNotFoundError(f"No module named {library!r}", name=library)
    if load_dir is None:
        return open_directory(cfg, save_dir, mend=mend) if save_dir is not None else _temporary_run(cfg)
    if save_dir and holds_run(save_dir):
        run = open_directory(cfg, save_dir, mend=mend)
        if os.path.realpath(save_dir) != os.path.realpath(load_dir):
            run.notices.append(f"{save_dir} holds a run already: it goes on, --load-dir is not used")
        return run
    with contextlib.closing(read_run(cfg, load_dir)) as source:
        target = save_dir or beside(load_dir)
        with explained(HistoryError, target, WRITABLE):
            make_directory(target)
            _copy_rest(load_dir, target)
            source.copy(target)
    run = open_directory(cfg, target)
    run.beside = f" ({load_dir} stays as it is)"
    return run


def at_step(path):
    """(directory, step) of DIR@STEP, or of the file of a snapshot; (path, None) of a directory."""
    place, name = os.path.split(os.path.realpath(path))          # latest.egg and best.egg are links
    if match := SNAPSHOT.fullmatch(name):
        return os.path.relpath(place), int(match[1])
    directory, at, step = path.rpartition("@")
    return (directory, int(step)) if at and step.isdecimal() and not os.path.exists(path) else (path, None)


def beside(directory):
    """Makes the first of directory-2, directory-3, ... that is not there, for a run that begins with that of
    `directory`: others may look for one at the same time. Raises HistoryError."""
    with explained(HistoryError, directory, WRITABLE):
        while True:
            with contextlib.suppress(FileExistsError):
                os.mkdir(target := unused(os.path.abspath(directory)))
                break
        sync_directory(os.path.dirname(target))
    return target if os.path.isabs(directory) else os.path.relpath(target)


def unused(path):
    """The first of path, path-2, path-3, ... that is not there."""
    free, number = path, 1
    while os.path.lexists(free):
        number += 1
        free = f"{path}-{number}"
    return free


def read_run(cfg, directory):
    """The Run in a save directory, to read, also beside its coordinator, or of C++ checkpoints. Raises HistoryError."""
    if not _is_ours(directory):
        return _read_cpp_checkpoints(cfg, directory)
    with explained(HistoryError, path := _file_of(directory)):
        return Run(cfg, open_file(path), directory)


def configuration(directory):
    """{name: value}: the constants of the run in a save directory; {} of C++ checkpoints. Raises HistoryError."""
    if not _is_ours(directory):
        return {}
    settings = config = {}
    with contextlib.suppress(OSError, ValueError, AttributeError, RecursionError):       # an older run has no SETTINGS
        settings = dict(json.loads(read_file(os.path.join(directory, SETTINGS), LONGEST_TEXT)).items())
        config = determining(settings)
    try:
        config, *_ = _header_of(_file_of(directory))
    except Damaged:
        if not config:
            raise
    config = egg_config.renewed(config)
    config.update((name, value) for name, value in settings.items() if name in egg_config.KEPT)
    for name in egg_config.DATA_FILES:       # as seen from here, and only those that are there
        kept = str(config.pop(name, ""))
        path = os.path.normpath(os.path.join(os.path.realpath(directory), kept))
        if os.path.isfile(path):
            config[name] = path if os.path.isabs(kept) else os.path.relpath(path)
    if _is_plain(path := os.path.join(directory, DECODING)):
        config["DECODING_FILE"] = path
    return config


def determining(config):
    """{name: value} without the constants that do not determine a saved model. Raises ValueError for what can be no
    name."""
    if not all(map(str.isidentifier, config)):
        raise ValueError
    return {name: value for name, value in config.items()
            if name not in egg_config.CONSTANTS or name in egg_config.DETERMINING}


def _file_of(directory):
    return os.path.join(directory, FILE)


def holds_run(directory):
    return os.path.isfile(_file_of(directory))


def is_blank(directory, begun=False):
    """Whether the run in a directory has no step; begun: also where it has a state to begin with."""
    _, start, size = _header_of(_file_of(directory))
    return os.path.getsize(_file_of(directory)) <= size and (begun or not start)


def discard(directory):
    """Removes a directory whose run has no step, unless another process has begun with it meanwhile."""
    with contextlib.suppress(OSError, HistoryError), contextlib.ExitStack() as undo:
        lock = os.open(directory, os.O_RDONLY)
        undo.callback(os.close, lock)
        with where_possible():
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if not os.listdir(directory) or is_blank(directory, begun=True):
            shutil.rmtree(directory)


def _is_ours(directory):
    """Whether the run in a directory is one of this program, not C++ checkpoints. Raises HistoryError without any."""
    with explained(HistoryError, directory, "give --load-dir, or runs, the directory of a saved run"):
        names = os.listdir(directory)
    ours = holds_run(directory)
    if not ours and not any(map(CPP_NAME.fullmatch, names)):
        raise HistoryError(f"{directory} holds no run: neither {FILE} nor checkpoint_00000001.bin: give the directory "
                           "of a saved run")
    return ours


def epochs(directory):
    """[Start]: of the epochs whose history in a save directory can be read, the oldest first. A handover that was
    interrupted leaves two files of one epoch."""
    starts = {}
    for name in os.listdir(directory):
        if name == FILE or OLD_NAME.fullmatch(name):
            with contextlib.suppress(HistoryError):
                start = _header_of(os.path.join(directory, name))[1] or Start(0, 0)
                starts[start.epoch] = start
    return [starts[epoch] for epoch in sorted(starts)]


def newest(pattern="ckpt*"):
    """The directory whose run was written last, one with a step if there is any. Raises HistoryError without one."""
    def rank(directory):
        blank = False
        with contextlib.suppress(OSError, HistoryError):     # who opens it learns of the error
            blank = is_blank(directory)
        return not blank, os.path.getmtime(_file_of(directory))

    directories = [name for name in glob.glob(pattern) if holds_run(name)]
    if not directories:
        raise HistoryError("there is no saved run here (ckpt*): make one with `python egg.py train --save-dir ckpt`, "
                           "or give its directory")
    return max(directories, key=rank)


def replay(run, engine, until=None):
    """Applies the steps that an engine lacks, up to the run's step or to step `until`."""
    for step in range(engine.step, run.step if until is None else until):
        engine.update(run.fitness(step))


def _read_cpp_checkpoints(cfg, directory):
    """The Run in the files of the C++ system, without losses. Raises HistoryError."""
    run = _temporary_run(cfg)
    names = {int(match[1]): match[0] for match in map(CPP_NAME.fullmatch, os.listdir(directory)) if match}
    for step in range(1, len(names) + 1):
        path = os.path.join(directory, names.get(step, f"checkpoint_{step:08d}.bin"))
        with explained(HistoryError, path, "without it the model cannot be rebuilt"), open_file(path) as file:
            data = file.read(CPP_CHECKPOINT.size + cfg.STEP_BYTES + 1)
        packed = data[CPP_CHECKPOINT.size:]
        try:
            steps.check_step(cfg, packed)
            run.append(packed, 0, 0)
            if not data.startswith(CPP_CHECKPOINT.pack(CPP_MAGIC, 1, step, run.seed, cfg.STEP_BYTES)):
                raise ValueError(f"it is not the checkpoint of step {step} of such a run")
        except ValueError as error:
            raise HistoryError(f"{path}: {error}: is it damaged, or were POPULATION_SIZE and CHUNK_SIZE others?") \
                from None
    return run


def _temporary_run(cfg):
    with explained(HistoryError, "the temporary history file", TO_RETRY):
        file = tempfile.TemporaryFile(buffering=0)
        file.write(_header(cfg, Start(0, 0)))
    return Run(cfg, file)


def begin_anew(cfg, directory, start):
    """Writes a history without a step. Raises OSError."""
    write_file(directory, FILE, _header(cfg, start))


def open_directory(cfg, directory, start=None, mend=None):
    """The Run in `directory`, locked; begun at `start` if there is none. mend(cfg, directory, Damaged): mends a damaged
    one, and returns a line about it. Raises HistoryError."""
    with contextlib.ExitStack() as undo:
        try:
            make_directory(directory)
            lock = os.open(directory, os.O_RDONLY)
            undo.callback(os.close, lock)
            with where_possible() as lacking:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            try:
                run = _locked_run(cfg, directory, start, lock)
            except Damaged as damage:
                if not mend:
                    raise
                line = mend(cfg, directory, damage)
                run = _locked_run(cfg, directory, start, lock)
                run.notices.append(line)
            run.notices += [f"{directory} cannot be locked: see that no other run writes into it" for _ in lacking]
            os.fsync(run._file.fileno())     # a coordinator that was killed had perhaps not come to that
            sync_directory(directory)
        except BlockingIOError:
            raise HistoryError(f"{directory} is in use by another coordinator: stop it, or change --save-dir") from None
        except OSError as error:
            where = error.filename or directory
            raise HistoryError(f"{where}: {error.strerror}: {WRITABLE}") from None
        undo.pop_all()
    for name in os.listdir(directory):       # of one that was killed
        if PARTS.fullmatch(name):
            remove(os.path.join(directory, name))
    settings = cfg.saved() | cfg.settings()          # the first for a header that is damaged
    for name in egg_config.DATA_FILES:
        if not os.path.isabs(settings[name]):
            settings[name] = os.path.relpath(settings[name], os.path.realpath(directory))
    with contextlib.suppress(OSError):               # a coordinator need not have it
        digest = egg_config.sha256_of(cfg.DECODING_FILE)
        settings["DECODING_SHA256"] = cfg.DECODING_SHA256 or digest
        if digest == settings["DECODING_SHA256"] and (cfg.VOCAB_SIZE != 256 or cfg.DETOKENIZE):
            copy_file(os.path.realpath(cfg.DECODING_FILE), directory, DECODING)
    _keep_text(directory, SETTINGS, json.dumps(settings, indent=1))
    return run


def _locked_run(cfg, directory, start, lock):
    """The Run in a directory, begun if there is none, or one without a step that is another. Raises OSError."""
    path, header = _file_of(directory), _header(cfg, start or Start(0, 0))
    blank = os.path.exists(path) and is_blank(directory)
    other = blank and read_file(path, LONGEST_TEXT) != header
    for name in DIGESTS.values() if blank else ():
        remove(os.path.join(directory, name))
    if other or not os.path.exists(path):
        write_file(directory, FILE, header)
    run = Run(cfg, open_file(path, "r+b"), directory, lock)
    run.notices += [f"{directory} held a run without a step: this one takes its place"] * other
    return run


def _keep_text(directory, name, text):
    """Writes a file that a run can do without: a disk that refuses it is no error."""
    with contextlib.suppress(OSError):
        write_file(directory, name, (text + "\n").encode())


def _copy_rest(source, target):
    """Copies snapshots, events and earlier epochs, but no links and pipes of a stranger. Raises OSError."""
    for name in filter(COPIED.fullmatch, os.listdir(source)):
        if _is_plain(path := os.path.join(source, name)):
            copy_file(path, target, name)


def _compressed(cfg, packed):
    """bytes: a step as one zstd frame."""
    import pyzstd                                    # here, so that a coordinator starts without it
    if cfg.PERTURB == "weights":
        return pyzstd.compress(packed, 1)
    if not cfg.SUMMED:                               # of `best` in a fifth of the time: workers may wait for it
        return pyzstd.compress(packed, -1)
    # sums have no repetitions: to look for few of them leaves the entropy coder, in half the time
    few = pyzstd.CParameter
    return pyzstd.compress(packed, {few.compressionLevel: 1, few.hashLog: 6, few.minMatch: 7})


def most_body(cfg):
    """The largest body of a record, in bytes: the documented bound of zstd."""
    size = cfg.STEP_BYTES
    return size + (size >> 8) + max(131072 - size >> 11, 0)


def decompressor():
    """A pyzstd.ZstdDecompressor for foreign data: its window bounds the memory (level 1 needs 2^19)."""
    import pyzstd
    return pyzstd.ZstdDecompressor(option={pyzstd.DParameter.windowLogMax: 20})


def decompress(source, data, most):
    """The next bytes, up to `most`, of decompressed data. source: a `decompressor`. Raises ValueError."""
    import pyzstd
    try:
        return source.decompress(data, most)
    except (pyzstd.ZstdError, EOFError) as error:
        raise ValueError(str(error)) from None


def unzip(data, size):
    """bytes [size] of one zstd frame. Raises ValueError for anything else, before that takes more memory."""
    source = decompressor()
    raw = decompress(source, data, size + 1)
    if len(raw) != size or not source.eof or source.unused_data:
        raise ValueError(f"it does not unpack to {size} bytes")
    return raw


def difference(there, here, where=("there", "here")):
    """The first NAMED constants in which two configurations (see Config.saved) differ, in the order of egg_config.py,
    where what matters most comes first, as one text, with the number of the others; "" where they agree."""
    there, here = ({**egg_config.LACKING, **constants} for constants in (there, here))
    foreign = (there.keys() | here.keys()) - egg_config.CONSTANTS.keys() - egg_config.FORMER
    texts = []
    for name in (*egg_config.CONSTANTS, *sorted(foreign)):
        values = [constants.get(name, "unknown") for constants in (there, here)]
        if values[0] != values[1]:
            texts.append(one_line(f"{name} = " + ", ".join(
                f"{egg_config.text(value) or 'unset'} {place}" for value, place in zip(values, where))))
    others = [f"and {len(texts) - NAMED} more"] * (len(texts) > NAMED)
    return "; ".join(texts[:NAMED] + others)


def _header(cfg, start):
    fields = {"version": 3 if start.origin else 2 if start.step else 1, "config": cfg.saved()}  # every egg reads 1
    if start.step:
        fields["start"] = start._asdict()
        fields["more"] = fields["start"].pop("more")         # there no older egg minds it
    text = json.dumps(fields, sort_keys=True).encode()
    return with_crc(MAGIC + len(text).to_bytes(4, "little") + text)


def _header_of(path):
    with explained(HistoryError, path), open_file(path) as file:
        return _read_header(file, path)


def _read_header(file, name):
    """(configuration, Start or None for the random initial model, bytes) of a file's header. Raises HistoryError."""
    data = os.pread(file.fileno(), 16 + LONGEST_HEADER, 0)
    end = 16 + int.from_bytes(data[8:12], "little")
    try:
        if data[:8] != MAGIC or not is_intact(data[:end], end):
            raise ValueError
        header = json.loads(data[12:end - 4])
        version = header["version"]
        config = determining(header["config"])
        start = header.get("start")
        if start:
            start = Start(**start, more=header.get("more", 0))
            struct.pack("<QIQq", start.step, start.seed, start.epoch, start.more)        # they are numbers
            bytes.fromhex(start.state)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError, struct.error):
        raise Damaged(f"{name} is no fitness history, or damaged in its header: restore it from a copy, or move it "
                      "away to begin again") from None
    if config.get("PERTURB", "weights") != "weights" and not config.items() >= egg_config.FORMAT.items():
        raise HistoryError(f"{name} is of an older egg, whose steps have another format: `egg.py export` of that egg "
                           "and `egg.py import` of this one begin a new run with its model")
    if version not in (1, 2, 3):
        raise HistoryError(f"{name} has format {version}, this program reads 1 to 3: use the egg that wrote it")
    return config, start, end
