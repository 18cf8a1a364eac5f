"""The event log of a run. Console, JSON logs, TensorBoard, wandb, MLflow and the live page (tools.live_page) are
sinks of events. docs/EVENTS.md lists the events. Every saved run has a JSON log of its own, which tools.curves reads.
"""

import contextlib
import errno
import functools
import importlib
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
FLUSH_EVERY = 5.0          # seconds between two flushes of TensorBoard's file
SAMPLE = re.compile(r"( *sample at step (\d{1,18}): )(.*?) >>> (.*)", re.DOTALL)      # a message of a worker


class WatchError(EggError):
    """About a log, a directory or a library that logging and plotting need."""


class Events(contextlib.AbstractContextManager):
    """Passes every event to every sink: sink.emit(event, line). event: a dict with time (Unix, seconds), event (its
    kind) and the fields of that kind; line: for the console, or None. log_json: a file, tensorboard: a directory,
    log_to: "wandb" or "mlflow", or None. As a context manager it logs the error that ends the block. Raises WatchError
    for a file that cannot be written or a library that is missing."""

    _left_out = 0              # events of peers since the last report about that
    _sampled = None            # (step, texts) of the last sample

    def __init__(self, cfg, run, console, log_json=None, tensorboard=None, log_to=None):
        self._of_peers = Budget(*OF_PEERS)
        self._reports = Budget(0.1, 1)               # lines about events that were left out
        warn = console.line
        self.files = []
        try:
            if run.directory:
                self.files.append(JsonLog(os.path.join(run.directory, EVENTS), WRITABLE, warn))
            if log_json is not None:
                self.files.append(JsonLog(log_json, "give --log-json a file that can be written", warn, links=True))
            if tensorboard is not None:
                self.files.append(Library(f"--tensorboard {tensorboard}", "watch",
                                          functools.partial(begin_tensorboard, tensorboard), warn))
            if log_to is not None:
                self.files.append(Library(f"--log-to {log_to}", "track",
                                          functools.partial(begin_tracker, log_to, cfg.constants()), warn))
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


def figures(event):
    """{name: number}: what an event has to be drawn."""
    kind, unit, values = event["event"], event.get("unit", "").replace("/", "_per_"), {}
    if kind == "step":
        names = "updates", "tokens_per_second", "learning_rate"
        values = {name: event[name] for name in names}
        if event["loss"] is not None:                # no chunk of this step was of text
            values[f"loss/{unit}"] = event["loss"]
    elif kind in ("validation", "reward"):
        values = {f"{kind}/{unit}".rstrip("/"): event["value"]}          # a reward has no unit
        values.update((f"reward_{name}", number) for name, number in event.get("numbers", {}).items())
    return values


class Library:
    """Gives events to a library, on whose answers nothing waits. option: what names it; begin(): returns log(event) and
    end(); requirements: the file that installs it."""

    def __init__(self, option, requirements, begin, warn):
        self.option = option
        self.warn = warn
        try:
            self._log, self._end = begin()
        except WatchError:
            raise
        except ModuleNotFoundError as missing:
            raise WatchError(f"{option.split()[0]} needs {missing.name}: pip install -r requirements/"
                             f"{requirements}.txt") from None
        except Exception as error:                   # the libraries have many
            raise WatchError(f"{option}: {error}") from None

    def emit(self, event, _):
        try:
            if self._log:
                self._log(event)
        except Exception as error:
            self._log = None
            self.warn(f"{self.option}: {error}: nothing more is written there")

    def close(self):
        with contextlib.suppress(Exception):
            self._end()


def begin_tracker(name, constants):
    """Figures and constants for wandb or mlflow (see Library). Where they go is said by its own variables (WANDB_MODE,
    MLFLOW_TRACKING_URI)."""
    library = importlib.import_module(name)
    if name == "wandb":
        run = library.init(config=constants, settings={"console": "off"})
        run.define_metric("*", step_metric="step")               # else what comes late would be dropped
        write, end = lambda values, step: run.log({**values, "step": step}), run.finish
    else:
        library.start_run()
        library.log_params(constants)
        write, end = functools.partial(library.log_metrics, synchronous=False), library.end_run

    def log(event):
        if values := figures(event):
            write(values, step=event["step"])

    return log, end


def begin_tensorboard(directory):
    """Scalars and samples by the SummaryWriter of tensorboardX (see Library). Its queue has no limit, and a full disk
    would end the thread that empties it."""
    from tensorboardX import SummaryWriter
    goes_on = os.path.isdir(directory) and os.listdir(directory)
    known = None                                     # the step with which a run goes on: its validation is there
    with explained(WatchError, f"--tensorboard {directory}", "give a directory that can be written"):
        writer = SummaryWriter(str(directory), max_queue=0, flush_secs=FLUSH_EVERY)

    def log(event):
        nonlocal known
        kind = event["event"]
        if kind == "start" and goes_on:
            known = event["step"]
        elif kind in ("validation", "reward") and event["step"] == known:
            return
        if kind == "sample":                         # indented: TensorBoard renders it as a code block of Markdown
            text = f"    {event['prompt']} >>> {event['text']}".replace("\n", "\n    ")
            writer.add_text("sample", text, event["step"], event["time"])
        for name, value in figures(event).items():
            writer.add_scalar(name, value, event["step"], event["time"])
        if is_nearly_full(os.statvfs(directory)):
            raise WatchError("the disk is nearly full")

    def end():
        # a disk that fails has ended the thread that empties the queue: at its exit Python would wait for that
        writer.file_writer.event_writer._event_queue.cancel_join_thread()
        writer.close()

    return log, end
