"""The state of the model as a file (SPEC 17), with which a late worker starts; digests of configurations and data.
A file is checked by the workers' digest when it is taken in and by SHA-256 when it is used. So nothing waits for the
disk: a file that was only half written is detected."""

import contextlib
import functools
import hashlib
import json
import math
import os
import struct
import tempfile
import time
from collections import namedtuple

from cluster import history
from cluster.history import most_bytes, open_file, read_file, sizes

MAGIC = b"EGGSNAP2"
HEAD = struct.Struct("<8sQQ32s32s32sQ")
HEAD_SIZE = HEAD.size + 4                # with its CRC-32
KEPT = 2                   # newest snapshots that are kept, beside the best
OPEN_FILES, OPEN_SECONDS = 8, 60.0       # that others are reading, and seconds without a request
LEVEL = 1                  # of zstd: moments hardly shrink, weights do at any level
PIECE = 1 << 20            # bytes that are decompressed at a time
SLICE = 1 << 23            # bytes that are compressed at a time
BLAKE2B = functools.partial(hashlib.blake2b, digest_size=32)


# The first bytes of a snapshot file. step, seed, size (bytes of the body): int; sha256 (of the state), config (see
# `config_digest`), before (SHA-256 of the fitness of the previous step): bytes [32]
Head = namedtuple("Head", "step seed sha256 config before size")


def state_hash(state, kind=BLAKE2B):
    """bytes [32]: a hash of the same bytes as model.state_digest (without the zeros at its end): BLAKE2b, by which a
    second worker confirms a snapshot, or SHA-256, which stands in its head."""
    digest = _begin(state.step, state.seed, kind)
    for part in _parts(state):
        digest.update(part)
    return digest.digest()


def _begin(step, seed, kind):
    return kind(struct.pack("<QQ", step, seed))


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


def config_digest(cfg):
    """bytes [32] over the constants that determine the model."""
    return hashlib.sha256(json.dumps(history.non_default(cfg), sort_keys=True).encode()).digest()


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
    if not sha256 and head.config != config_digest(cfg):
        raise ValueError(f"snapshot of step {head.step} is of another configuration")
    if len(data) != HEAD_SIZE + head.size:
        raise ValueError(f"snapshot of step {head.step}: {len(data)} bytes of {HEAD_SIZE + head.size}")
    try:
        state = parameters.from_raw(cfg, history.unzip(data[HEAD_SIZE:], sum(sizes(cfg))), head.step, head.seed)
    except ValueError as error:
        raise ValueError(f"snapshot of step {head.step}: {error}") from None
    if state_hash(state, hashlib.sha256) != head.sha256:
        raise ValueError(f"snapshot of step {head.step}: its SHA-256 is another")
    return state


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
    return history.with_crc(HEAD.pack(MAGIC, step, seed, sha256, config_digest(cfg), hashlib.sha256(fitness).digest(),
                                      size))


def save(cfg, state, directory, body=None):
    """Writes a State as the snapshot with which a run or an epoch begins; it is on the disk when this returns. Returns
    its SHA-256 (bytes). body: the result of `pack`, if it exists already. Raises OSError."""
    sha256 = state_hash(state, hashlib.sha256)
    with history.replacing(directory, history.snapshot_name(state.step)) as file:
        file.write(bytes(HEAD_SIZE))
        for piece in [body] if body else _packed(state):
            file.write(piece)
            file.flush()
            if hasattr(os, "posix_fadvise"):         # the disk writes while the next piece is compressed
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        size = file.tell() - HEAD_SIZE
        file.seek(0)
        file.write(_make_head(cfg, state.step, state.seed, sha256, b"", size))
    return sha256


class Upload:
    """A snapshot that is being received: the pieces of its body arrive in order and are decompressed and hashed at
    once, so that memory use is constant. `finished`: it is complete, and has the expected `digest` or `sha256`,
    whichever is given; `hash`: its `state_hash` then; `got`, `total`: bytes of the body. remember: no file is written,
    and the decompressed bytes are kept for `state`. Raises ValueError for data that cannot be right, OSError of the
    disk."""

    total = hash = _file = None
    finished = pending = False
    got = _unpacked = 0

    def __init__(self, cfg, step, seed, digest, directory, sha256=None, remember=False):
        from model import state_digest
        self.step = step
        self.seed = seed
        self.digest = digest
        self.sha256 = sha256
        self.remembered = remember
        self._cfg = cfg
        self._size = sum(sizes(cfg))
        self._most = most_bytes(cfg)
        self._first = 0 if remember else sum(sizes(cfg)[:2])
        self._raw = bytearray()                      # what it unpacks to, from byte `_first` on: all, or the overlay
        self._digests = state_digest.Digest(step, seed), _begin(step, seed, hashlib.sha256), _begin(step, seed, BLAKE2B)
        self._zstd = history.decompressor()
        if not remember:
            self._file = tempfile.NamedTemporaryFile(dir=directory, prefix="snapshot-", suffix=".part", delete=False)
            self._file.write(bytes(HEAD_SIZE))

    def feed(self, total, offset, data):
        """Takes a piece. As long as `pending`, `unpack` comes before the next one: it may unpack to very many bytes."""
        if self.total is None:
            self.total = total
        if total != self.total or offset != self.got or not data or not offset + len(data) <= total <= self._most:
            raise ValueError(f"piece of {len(data)} bytes at {offset} of {total}, the next one is at {self.got} of "
                             f"{self.total}")
        if self._file:
            self._file.write(data)
        self.got += len(data)
        self.unpack(data)

    def unpack(self, data=b""):
        raw = history.decompress(self._zstd, data, PIECE)
        eof = self._zstd.eof
        left = self._size - self._unpacked - len(raw)
        self.pending = not eof and not self._zstd.needs_input
        complete = self.got == self.total and not self.pending
        if left < 0 or (eof or complete) and (left or eof != complete or self._zstd.unused_data):
            raise ValueError(f"it does not unpack to {self._size} bytes")
        for digest in self._digests:
            digest.update(raw)
        self._raw += raw[max(self._first - self._unpacked, 0):]
        self._unpacked += len(raw)
        if complete:
            digest, sha256, self.hash = (digest.digest() for digest in self._digests)
            if self.digest not in (None, digest) or self.sha256 not in (None, sha256):
                raise ValueError(f"it is not the state that {'workers' if self.digest else 'its head'} stated")
            self.digest = digest
            self.sha256 = sha256
            self.finished = True

    def overlay(self):
        """{"mean", "min", "max"} of the noise scales of a finished upload, None if the configuration has none."""
        if not self._cfg.ADAPTIVE_NOISE_MODE:
            return None
        *_, overlay = sizes(self._cfg)
        values = memoryview(self._raw).cast("b")[-overlay:]
        return {"mean": round(sum(values) / len(values), 4), "min": min(values), "max": max(values)}

    def keep(self, path, fitness):
        """Gives the file its head and its name. fitness: packed, of the previous step."""
        self._file.seek(0)
        self._file.write(_make_head(self._cfg, self.step, self.seed, self.sha256, fitness, self.total))
        self._file.close()
        os.chmod(self._file.name, 0o644)
        os.replace(self._file.name, path)

    def state(self):
        """The State of a finished upload before `keep` and `drop`. Raises OSError."""
        from model import parameters
        raw = self._raw
        if not self.remembered:
            self._file.seek(HEAD_SIZE)
            raw = history.unzip(self._file.read(), self._size)
        return parameters.from_raw(self._cfg, raw, self.step, self.seed)

    def drop(self):
        if not self.remembered:
            with contextlib.suppress(OSError):       # writing the buffer may fail on a full disk
                self._file.close()
            history.remove(self._file.name)


class Shelf:
    """The snapshots of the current epoch of `run`. Links `latest` and `best` name two of them; old ones are removed.
    Files that others read piece by piece stay open meanwhile. stopped: no more snapshots, they cannot be written."""

    def __init__(self, cfg, run):
        self.cfg = cfg
        self.run = run
        self.directory = run.directory
        self._open = {}                                      # key -> (file, time of the last request), the latest last
        self.begin_epoch()

    def begin_epoch(self):
        """Finds the snapshots of this epoch; those of earlier ones are removed."""
        self.stopped = False
        self.files, self.digests = {}, {}                # step -> name; step -> digest of those that were uploaded
        self.figures, self.sha256 = {}, {}               # step -> figure, see `best`; step -> SHA-256 of the state
        names = os.listdir(self.directory) if self.directory else []
        start = self.run.start
        found = [match for match in map(history.SNAPSHOT.fullmatch, names) if match]
        for match in found:
            self._take(match)
        earlier = [match[0] for match in found if start.epoch and start.step in self.files
                   and int(match[1]) <= start.step and match[0] not in self.files.values()]
        parts = [name for name in names if name.startswith("snapshot-") and name.endswith(".part")]
        for name in [*earlier, *parts] if self.run.owned else ():      # otherwise a part may be an upload in progress
            self.remove(name)

    def _take(self, match):
        """Lists a file, by the match of its name, if its head belongs to this run."""
        with contextlib.suppress(OSError, ValueError), open_file(self._place(match[0])) as file:
            head = read_head(file.read(HEAD_SIZE))
            step, start = head.step, self.run.start
            if (step == int(match[1]) and head.config == config_digest(self.cfg)
                    and (self._begun < step < start.step or max(1, start.step) <= step <= self.run.step)
                    and os.fstat(file.fileno()).st_size == HEAD_SIZE + head.size
                    and (step < start.step or (
                        head.sha256.hex() == start.state if step == start.step and start.state else
                        head.before == hashlib.sha256(self.run.fitness(step - 1)).digest()))):
                self.files[step] = match[0]
                self.sha256[step] = head.sha256
                if match[3] and bool(match[2]) == bool(self.cfg.OBJECTIVE):
                    self.figures[step] = float(match[3])

    @property
    def _begun(self):
        """The step with which this epoch began. With noise on activations the run's history may begin later: of the
        snapshots between, the best stays."""
        start = self.run.start
        if self.cfg.PERTURB == "weights":
            return start.step
        return start.origin.get("since", start.step) if start.origin else 0

    @property
    def newest(self):
        return max(self.files, default=0)

    @property
    def best(self):
        """Step of the snapshot with the lowest validation, with an objective with the highest reward, None if none was
        measured."""
        sign = -1 if self.cfg.OBJECTIVE else 1
        return min((s for s in self.files if s in self.figures), key=lambda s: (sign * self.figures[s], -s),
                   default=None)

    def _place(self, name):
        return os.path.join(self.directory, name)

    def path(self, step):
        return self._place(self.files[step]) if step in self.files else None

    def state(self, step):
        return read(self.cfg, self._place(self.files[step]))

    def check_start(self):
        """Raises HistoryError if the state with which the epoch began is missing or damaged."""
        start = self.run.start
        if not start.origin:
            return
        from model import state_digest
        with contextlib.suppress(KeyError, OSError, ValueError):
            if state_digest.of_state(self.state(start.step)).hex() == start.origin["digest"]:
                return
        name, old = map(self._place, (history.FILE, history.OLD.format(start.epoch - 1)))
        raise history.HistoryError(f"{self.directory}: the snapshot of step {start.step}, with which epoch "
                                   f"{start.epoch} began, is missing or damaged: restore it from a copy, or continue "
                                   f"from the previous epoch: mv {old} {name}")

    def put(self, upload):
        step, name = upload.step, history.snapshot_name(upload.step)
        upload.keep(self._place(name), self.run.fitness(step - 1))
        self.files[step] = name
        self.digests[step] = upload.digest
        self.sha256[step] = upload.sha256
        self.arrange()

    def measured(self, step, figure):
        """The figure of a validation, with an objective of the reward alone, for the file name of the snapshot of this
        step, which may still be on its way."""
        if self.directory and self.cfg.SNAPSHOT_EVERY and step % self.cfg.SNAPSHOT_EVERY == 0:
            self.figures[step] = figure
            with contextlib.suppress(OSError):
                self.arrange()

    def forget(self, step):
        if step in self.files:
            self.remove(self.files.pop(step))
        self.digests.pop(step, None)
        self.sha256.pop(step, None)

    def remove(self, name):
        history.remove(self._place(name))

    def arrange(self):
        """Adds figures to file names, removes old snapshots, updates the links `latest` and `best`."""
        for step, name in list(self.files.items()):
            new = history.snapshot_name(step, self.figures.get(step), self.cfg.OBJECTIVE)
            if step in self.figures and new != name:
                os.replace(self._place(name), self._place(new))
                self.files[step] = new
        stay = {*sorted(self.files)[-KEPT:], self.best, self.run.start.step}       # there is no other copy of the start
        for step in self.files.keys() - stay:
            self.forget(step)
        for link, step in (("latest", self.newest), ("best", self.best)):
            path = self._place(f"{link}.egg")
            history.remove(path + ".part" if step else path)
            if step:
                os.symlink(self.files[step], path + ".part")
                os.replace(path + ".part", path)

    def block(self, step, offset, size):
        return self.piece((self.run.start.epoch, step), self.path(step), offset, size)

    def piece(self, key, path, offset, size):
        """(bytes of the file, up to `size` of them from `offset`), (0, b"") where there is none. key: of its content;
        path: None if it has been removed."""
        file, _ = self._open.pop(key, (None, 0))
        with contextlib.suppress(OSError):
            if file or path:
                file = file or open_file(path)
                self._open[key] = file, time.monotonic()
                while len(self._open) > OPEN_FILES:
                    oldest, _ = self._open.pop(next(iter(self._open)))
                    oldest.close()
                total = os.fstat(file.fileno()).st_size
                return total, os.pread(file.fileno(), size, min(offset, total))
        return 0, b""

    def close_unread(self, now=math.inf):
        """Closes the files that nobody has read for a while."""
        for key, (file, asked) in list(self._open.items()):
            if now - asked > OPEN_SECONDS:
                del self._open[key]
                file.close()
