"""The state of the model as a file, by which a worker that joins late gets there quickly; and what tells configurations and data apart.

A snapshot file: HEAD (magic, step, seed, SHA-256 of the state, of the configuration, of the fitness before it, bytes of the body), u32
CRC-32 of these, then weights, moments and overlay, one after the other, under zstd. All little-endian. It is checked by the digest that
workers state when it is taken and by SHA-256 when it is used, so nothing waits for the disk: a file that was only half written is found
out and thrown away.
"""

import contextlib
import hashlib
import json
import os
import struct
import tempfile
import zlib

import numpy as np
import pyzstd

import egg_digest
import egg_history
import egg_model

MAGIC = b"EGGSNAP2"
HEAD = struct.Struct("<8sQQ32s32s32sQ")
KEPT = 2                   # newest snapshots that stay, beside the best
LEVEL = 1                  # of zstd: moments hardly shrink, weights do at any level
PIECE = 1 << 20            # bytes that are unpacked at a time


def state_sha256(state):
    """bytes [32]: SHA-256 over the same bytes as egg_digest (without the zeros at its end)."""
    sha256 = _begin(state.step, state.seed)
    for part in _parts(state):
        sha256.update(part)
    return sha256.digest()


def _begin(step, seed):
    return hashlib.sha256(struct.pack("<QQ", step, seed))


def _parts(state):
    """Weights, moments and overlay as bytes."""
    return [np.ascontiguousarray(x).data.cast("B") for x in (state.weights, state.moments, state.overlay)]


def data_digest(tokens):
    """bytes [32] that tell one training set from another: its size, and all of it or, of what is large, 256 pieces spread evenly."""
    if tokens is None:
        return bytes(32)
    digest, piece = hashlib.sha256(f"{len(tokens)} {tokens.dtype}".encode()), 1 << 16
    starts = range(0, len(tokens), piece) if len(tokens) <= 256 * piece else np.linspace(0, len(tokens) - piece, 256).astype(np.int64)
    for start in starts:
        digest.update(np.ascontiguousarray(tokens[start:start + piece]))
    return digest.digest()


def config_digest(cfg):
    """bytes [32] over the constants that make the model what it is."""
    return hashlib.sha256(json.dumps(egg_history.essential(cfg), sort_keys=True).encode()).digest()


def sizes(cfg):
    """(bytes of weights, of moments, of overlay)."""
    n = egg_model.n_weights(cfg)
    return n, 12 * n, egg_model.n_overlay(cfg)


def most_bytes(cfg):
    """Bytes that a snapshot file has at most: what zstd cannot shrink grows by less than that."""
    return sum(sizes(cfg)) * 101 // 100 + 8192


def pack(state):
    """bytes of the body of a snapshot."""
    compressor = pyzstd.ZstdCompressor(LEVEL)
    return b"".join([compressor.compress(part) for part in _parts(state)]) + compressor.flush()


def unpack(cfg, data):
    """The State in the bytes of a snapshot file. Raises ValueError (one line) where it is damaged or not of this configuration."""
    step, seed, sha256, body = _head(cfg, data[:HEAD.size + 4])
    if len(data) != HEAD.size + 4 + body:
        raise ValueError(f"snapshot of step {step}: {len(data)} bytes of {HEAD.size + 4 + body}")
    n, m, k = sizes(cfg)
    try:
        raw = np.frombuffer(egg_history.unzip(data[HEAD.size + 4:], n + m + k), np.int8)
    except ValueError as error:
        raise ValueError(f"snapshot of step {step}: {error}") from None
    state = egg_model.State(cfg, raw[:n], raw[n:n + m].view("<f4").reshape(-1, 3), raw[n + m:], step, seed)
    if state_sha256(state) != sha256:
        raise ValueError(f"snapshot of step {step}: its SHA-256 is another")
    return state


def _head(cfg, data):
    """(step, seed, SHA-256, bytes of the body) from HEAD and its CRC. Raises ValueError."""
    if len(data) < HEAD.size + 4 or zlib.crc32(data[:HEAD.size]).to_bytes(4, "little") != data[HEAD.size:]:
        raise ValueError("not a snapshot, or damaged in its first bytes")
    magic, step, seed, sha256, config, _, body = HEAD.unpack(data[:HEAD.size])
    if magic != MAGIC:
        raise ValueError("not a snapshot")
    if config != config_digest(cfg):
        raise ValueError(f"snapshot of step {step} is of another configuration")
    return step, seed, sha256, body


def save(cfg, state, directory):
    """Puts a State into `directory` as the snapshot with which a run begins. Raises OSError."""
    body, upload = pack(state), Upload(cfg, state.step, state.seed, egg_digest.of_state(state), directory)
    upload.add(len(body), 0, body)
    upload.keep(os.path.join(directory, f"snapshot-{state.step:08d}.egg"), b"")


class Upload:
    """A snapshot on its way in: its body comes in pieces in order, is unpacked as it comes and forgotten again, so that memory stays
    flat and no piece costs much; `finished` when all is here and its digest is `digest`. Raises ValueError where it cannot be right,
    OSError of the disk."""

    def __init__(self, cfg, step, seed, digest, directory):
        self.step, self.seed, self.digest, self.total, self.finished = step, seed, digest, None, False
        self._cfg, self._left, self._got = cfg, sum(sizes(cfg)), 0
        self._sha256, self._digest = _begin(step, seed), egg_digest.Digest(step, seed)
        self._zstd, self._overlay = pyzstd.ZstdDecompressor(option=egg_history.WINDOW), b""
        self._file = tempfile.NamedTemporaryFile(dir=directory, prefix="snapshot-", suffix=".part", delete=False)
        self._file.write(bytes(HEAD.size + 4))

    def add(self, total, offset, data):
        if self.total is None:
            self.total = total
        most = most_bytes(self._cfg)
        if total != self.total or offset != self._got or not data or offset + len(data) > total or total > most:
            raise ValueError(f"piece of {len(data)} bytes at {offset} of {total}, wanted is the one at {self._got} of {self.total}")
        self._file.write(data)
        self._got += len(data)
        try:
            # what is unpacked is asked for in bounded pieces: a few bytes of zstd can stand for a great many
            while not self._zstd.eof and (data or not self._zstd.needs_input):
                raw = self._zstd.decompress(data, PIECE)
                data = b""
                self._left -= len(raw)
                if self._left < 0:
                    break
                self._sha256.update(raw)
                self._digest.update(raw)
                self._keep_overlay(raw)
        except pyzstd.ZstdError as error:
            raise ValueError(str(error)) from None
        if self._left < 0 or self._zstd.eof and (self._left or self._got != total or self._zstd.unused_data) \
                or self._got == total and not self._zstd.eof:
            raise ValueError(f"it does not unpack to {sum(sizes(self._cfg))} bytes")
        if self._got == total and self._digest.digest() != self.digest:
            raise ValueError("it is not the state that workers stated")
        self.finished = self._got == total

    def _keep_overlay(self, raw):
        weights, moments, _ = sizes(self._cfg)
        at = sum(sizes(self._cfg)) - self._left - len(raw)     # where in the state `raw` begins
        self._overlay += raw[max(weights + moments - at, 0):]

    def overlay(self):
        """{"mean", "min", "max"} of the noise-scale overlay in a finished upload, None where the configuration has none."""
        if not self._cfg.ADAPTIVE_NOISE_MODE:
            return None
        values = np.frombuffer(self._overlay, np.int8)
        return {"mean": round(float(values.mean()), 4), "min": int(values.min()), "max": int(values.max())}

    def keep(self, path, fitness):
        """Gives the file its head and its name. fitness: packed, of the step before."""
        before = hashlib.sha256(fitness).digest()
        head = HEAD.pack(MAGIC, self.step, self.seed, self._sha256.digest(), config_digest(self._cfg), before, self.total)
        self._file.seek(0)
        self._file.write(head + zlib.crc32(head).to_bytes(4, "little"))
        self._file.close()
        os.chmod(self._file.name, 0o644)
        os.replace(self._file.name, path)

    def drop(self):
        with contextlib.suppress(OSError):           # what is still buffered may find the disk full
            self._file.close()
        with contextlib.suppress(OSError):
            os.unlink(self._file.name)


class Shelf:
    """The snapshots in a save directory that belong to `run`: `latest` and `best` name two of them, the others go."""

    def __init__(self, cfg, run):
        self.cfg, self.run, self.directory = cfg, run, run.directory
        self.files, self.digests, self.figures = {}, {}, {}     # step -> name, -> digest of those taken in, -> validation figure
        self._open, self._stopped = (None, None), False
        for name in os.listdir(self.directory) if self.directory else ():
            if name.startswith("snapshot-") and name.endswith(".part"):
                with contextlib.suppress(OSError):
                    if run.owned:                            # else it may be on its way in
                        os.unlink(os.path.join(self.directory, name))
            elif match := egg_history.SNAPSHOT.fullmatch(name):
                self._take(name, match)

    def _take(self, name, match):
        """Lists a file if its head is that of this run; others are left alone."""
        with contextlib.suppress(OSError, ValueError), open(os.path.join(self.directory, name), "rb") as file:
            data = file.read(HEAD.size + 4)
            step, _, sha256, body = _head(self.cfg, data)
            start, size = self.run.start, os.fstat(file.fileno()).st_size
            if (step == int(match[1]) and max(1, start.step) <= step <= self.run.step and size == HEAD.size + 4 + body
                    and (step != start.step or sha256.hex() == start.state)
                    and HEAD.unpack(data[:HEAD.size])[5] == hashlib.sha256(self.run.fitness(step - 1)).digest()):
                self.files[step] = name
                if match[2]:
                    self.figures[step] = float(match[2])

    @property
    def newest(self):
        """Step of the newest snapshot, 0 without one."""
        return max(self.files, default=0)

    @property
    def best(self):
        """Step of the snapshot that was best in validation, None where none was validated."""
        return min((s for s in self.files if s in self.figures), key=lambda s: (self.figures[s], -s), default=None)

    def state(self, step):
        """The State in a snapshot. Raises ValueError (one line) where it is damaged, OSError."""
        with open(os.path.join(self.directory, self.files[step]), "rb") as file:
            return unpack(self.cfg, file.read())

    def wanted(self, step):
        every = self.cfg.SNAPSHOT_EVERY
        return bool(self.directory and every and step and step % every == 0 and step not in self.files and not self._stopped)

    def stop(self):
        """No more are wanted: they cannot be written."""
        self._stopped = True

    def put(self, upload):
        """Takes a finished upload in. Raises OSError."""
        name = f"snapshot-{upload.step:08d}.egg"
        upload.keep(os.path.join(self.directory, name), self.run.fitness(upload.step - 1))
        self.files[upload.step], self.digests[upload.step] = name, upload.digest
        self._arrange()

    def validated(self, step, figure):
        """Notes the validation figure of a step; the snapshot of this step, here already or still to come, carries it in its name."""
        if self.directory and self.cfg.SNAPSHOT_EVERY and step % self.cfg.SNAPSHOT_EVERY == 0:
            self.figures[step] = figure
            with contextlib.suppress(OSError):
                self._arrange()

    def forget(self, step):
        """Removes a snapshot: an old one, or one that turned out wrong."""
        with contextlib.suppress(OSError):
            os.unlink(os.path.join(self.directory, self.files.pop(step)))
        self.digests.pop(step, None)

    def _arrange(self):
        """Names with figures, `latest` and `best`, and away with the rest."""
        for step, name in list(self.files.items()):
            if step in self.figures and not egg_history.SNAPSHOT.fullmatch(name)[2]:
                new = f"snapshot-{step:08d}-{self.figures[step]:.4f}.egg"
                os.replace(os.path.join(self.directory, name), os.path.join(self.directory, new))
                self.files[step] = new
        best = self.best
        stay = set(sorted(self.files)[-KEPT:]) | {best, self.run.start.step}       # an imported start is nowhere else
        for step in set(self.files) - stay:
            self.forget(step)
        for link, step in (("latest", self.newest), ("best", best)):
            if step:
                path = os.path.join(self.directory, f"{link}.egg")
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(path + ".part")
                os.symlink(self.files[step], path + ".part")
                os.replace(path + ".part", path)

    def block(self, step, offset, size):
        """(bytes of the whole file, up to `size` of them from `offset`), None where there is no such snapshot."""
        try:
            if self._open[0] != step:
                self.close()
                self._open = (step, open(os.path.join(self.directory, self.files[step]), "rb"))
            handle = self._open[1].fileno()
            total = os.fstat(handle).st_size
            return total, os.pread(handle, size, min(offset, total))
        except (KeyError, OSError):
            return None

    def close(self):
        if self._open[1]:
            self._open[1].close()
        self._open = (None, None)
