"""The event log of a run. Console, JSON logs and the live page (tools.live_page) are sinks of events.
docs/EVENTS.md lists the events. Every saved run has a JSON log of its own, which tools.curves reads.
"""

import contextlib
import errno
import json
import os
import re
import stat
import time

from cluster.history import EVENTS, WRITABLE
from cluster.hub import Budget
from egg_config import EggError, explained

OF_PEERS = 32.0, 1024      # events caused by peers: rate per second, burst
LINE = 512                 # bytes of a peer's text in an event that count as another event
LOG_BYTES = 1 << 28        # a log that is longer becomes the older one, NAME.1, and begins anew
RESERVE = 1 << 26          # bytes that logs leave free on the disk (a twentieth of a small one), for the run itself
LONGEST = 1 << 18          # bytes of one event in a log: a sample with every character escaped
SAMPLE = re.compile(r"( *sample at step (\d{1,18}): )(.*?) >>> (.*)", re.DOTALL)      # a message of a worker


class WatchError(EggError):
    """About a log, a file or a library that logging and plotting need."""


class Events(contextlib.AbstractContextManager):
    """Passes every event to every sink: sink.emit(event, line). event: a dict with time (Unix, seconds), event (its
    kind) and the fields of that kind; line: for the console, or None. log_json: a file, or None. As a context manager
    it logs the error that ends the block. Raises WatchError for a file that cannot be written."""

    _left_out = 0              # events of peers since the last report about that
    _sampled = None            # (step, texts) of the last sample

    def __init__(self, cfg, run, console, log_json=None):
        self._of_peers = Budget(*OF_PEERS)
        self._reports = Budget(0.1, 1)               # lines about events that were left out
        warn = console.line
        self.files = []
        try:
            if run.directory:
                self.files.append(JsonLog(os.path.join(run.directory, EVENTS), WRITABLE, warn))
            if log_json is not None:
                self.files.append(JsonLog(log_json, "give --log-json a file that can be written", warn, links=True))
        except WatchError:
            self.close()
            raise
        self.sinks = [console, *self.files]
        self.emit("start", step=run.step, directory=run.directory and str(run.directory), config=cfg.constants())
        for line in run.notices:
            self.warn(line)

    def emit(self, kind, line=None, /, **fields):
        event = {"time": round(time.time(), 3), "event": kind, **fields}
        for sink in self.sinks:
            sink.emit(event, line)

    def allows(self, size=0):
        """Whether peers may cause an event now, of `size` bytes of theirs; if so it is counted, a long one as many.
        They must not fill the disk, and what was logged before must not rotate away."""
        if not self._of_peers.take(1 + size // LINE):
            self._left_out += 1
            return False
        if self._left_out and self._reports.take():
            count, self._left_out = self._left_out, 0
            self.warn(f"{count} lines about peers are left out: they came too fast")
        return True

    def warn(self, line, peer=False):
        """A warning; peer: a peer has caused it, so that it is left out where it may cause none now."""
        if not peer or self.allows():
            self.emit("warning", line, text=line)

    def message(self, worker, text, title=""):
        """Logs a printable message of a worker. A message that holds a sample becomes a sample event, once where
        several workers have the chunk that brings it. title: what stands before it on the console."""
        if not (sample := SAMPLE.fullmatch(text)):
            return self.emit("message", title + text, worker=worker, text=text)
        head, step, *texts = sample.groups()
        if (step, texts) != self._sampled:
            self._sampled = step, texts
            prompt, continuation = (x.replace("\u23ce", "\n") for x in texts)
            self.emit("sample", title + head, worker=worker, step=int(step), prompt=prompt, text=continuation)

    def close(self):
        for file in self.files:
            file.close()

    def __exit__(self, kind, error, _):
        if isinstance(error, Exception):
            self.emit("error", text=str(error))      # no line: egg.py prints the error
        self.close()


def is_nearly_full(disk):
    """Whether a disk has less than RESERVE left. disk: its os.statvfs."""
    return disk.f_bavail * disk.f_frsize < min(RESERVE, disk.f_blocks * disk.f_frsize // 20)


class JsonLog:
    """A file to which every event is appended as a line of JSON. `warn` takes one line when the disk is full, or leaves
    less than RESERVE; lines are then lost, and training goes on. advice: the end of the error message if the file
    cannot be opened; links: the path may be a link, which in a save directory may lead a stranger's file anywhere."""

    warned = False

    def __init__(self, path, advice, warn, links=False):
        self.path = path
        self.links = links
        self.warn = warn
        with explained(WatchError, path, advice):
            self._open()

    def _open(self):
        # non-blocking: a pipe without a reader must not stop the coordinator
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NONBLOCK | (0 if self.links else os.O_NOFOLLOW)
        self.handle = os.open(self.path, flags, 0o644)
        status = os.fstat(self.handle)
        self.regular = stat.S_ISREG(status.st_mode)
        self.size = status.st_size
        self.torn = False
        if self.regular and self.size:
            with contextlib.suppress(OSError), open(self.path, "rb") as file:
                file.seek(-1, os.SEEK_END)
                self.torn = file.read(1) != b"\n"

    def emit(self, event, _):
        try:
            if self.regular:
                self._make_room()
            data = ("\n" * self.torn + json.dumps(event) + "\n").encode()
            while data:
                done = os.write(self.handle, data)
                self.size = self.size + done
                data = data[done:]
            self.torn = False
        except OSError as error:
            self.torn = True                         # part of the line may have been written
            if not self.warned:
                self.warned = True
                self.warn(f"{self.path}: {error.strerror}: events are missing in it from now on")

    def _make_room(self):
        if is_nearly_full(os.fstatvfs(self.handle)):
            raise OSError(errno.ENOSPC, "the disk is nearly full")
        if self.size > LOG_BYTES:
            with contextlib.suppress(FileNotFoundError):
                os.replace(self.path, self.path + ".1")
            full = self.handle
            self._open()                             # before the other is closed: it may fail
            os.close(full)

    def close(self):
        if self.handle is not None:
            os.close(self.handle)
            self.handle = None
