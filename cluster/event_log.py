"""What a run tells while it goes on. Whatever is worth telling is an event; console, coordinator.log, JSON logs, TensorBoard and the
live page (tools.live_page) are sinks, where events go. EVENTS.md lists the events.

Every run that is kept has a JSON log of its own, cluster.history.EVENTS, in its save directory: the curve of the run, from which `egg.py plot` draws and
the live page knows what was before.
"""

import bisect
import contextlib
import datetime
import json
import math
import os
import re
import stat
import time
from typing import NamedTuple

from islands import merging
from cluster.history import EVENTS
from egg_config import EggError

LONGEST = 1 << 18          # bytes of one event in a log: a sample, every character escaped
FLUSH_EVERY = 5.0          # seconds between TensorBoard's visits to the disk
SAMPLE = re.compile(r" *sample at step (\d{1,18}): (.*?) >>> (.*)")


class WatchError(EggError):
    """About a log, a directory or a library that watching needs."""


# --- events ----------------------------------------------------------------------------------------------------------------

class Events:
    """Gives every event to every sink: sink.tell(event, line). event: a dict with time (Unix, seconds), event (its kind) and the fields
    of that kind; line: the same in words for people, None where they are told otherwise or not at all.

    run: an cluster.history.Run; directory: where coordinator.log grows; log_json: a file, tensorboard: a directory, or None. As a context
    manager it tells the error that ends the block. Raises WatchError where something cannot be written or is not installed."""

    def __init__(self, cfg, run, directory, console, log_json=None, tensorboard=None):
        self.files = []
        self.sinks = [console]
        try:
            self._open(CoordinatorLog, os.path.join(directory, "coordinator.log"), "give a --save-dir that can be written", console.line,
                       cfg, run.step)
            if run.directory is not None:
                self._open(JsonLog, os.path.join(run.directory, EVENTS), "give a --save-dir that can be written", console.line)
            if log_json is not None:
                self._open(JsonLog, log_json, "give --log-json a file that can be written", console.line)
            if tensorboard is not None:
                self._open(TensorBoard, tensorboard, console.line)
        except WatchError:
            self.close()
            raise
        self.tell("start", step=run.step, directory=str(run.directory) if run.directory is not None else None, config=cfg.constants())

    def _open(self, kind, *arguments):
        self.files.append(kind(*arguments))
        self.sinks.append(self.files[-1])

    def tell(self, kind, line=None, /, **fields):
        event = {"time": round(time.time(), 3), "event": kind, **fields}
        for sink in self.sinks:
            sink.tell(event, line)

    def warn(self, line):
        self.tell("warning", line, text=line)

    def message(self, worker, text, line):
        """What a worker says, safe to print; a sample is told as one."""
        if found := SAMPLE.fullmatch(text):
            prompt, sample = (x.replace("\u23ce", "\n") for x in found.groups()[1:])
            self.tell("sample", line, worker=worker, step=int(found[1]), prompt=prompt, text=sample)
        else:
            self.tell("message", line, worker=worker, text=text)

    def close(self):
        for file in self.files:
            file.close()

    def __enter__(self):
        return self

    def __exit__(self, kind, error, _):
        if kind is not None and issubclass(kind, Exception):
            self.tell("error", text=str(error))      # without a line: egg.py ends with one
        self.close()


# --- files -----------------------------------------------------------------------------------------------------------------

class Lines:
    """A file that grows by whole lines. What a full disk does not take is lost, that is said once, and training goes on."""

    def __init__(self, path, advice, say):
        self.path, self.say, self.torn, self.said = path, say, False, False
        try:
            # a pipe that nobody reads must not hold the coordinator up
            self.handle = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NONBLOCK, 0o644)
            if stat.S_ISREG(os.fstat(self.handle).st_mode):
                with contextlib.suppress(OSError), open(path, "rb") as file:
                    file.seek(-1, os.SEEK_END)
                    self.torn = file.read(1) != b"\n"
        except OSError as error:
            raise WatchError(f"{path}: {error.strerror}: {advice}") from None

    def add(self, text):
        data = (b"\n" if self.torn else b"") + text.encode("utf-8", "replace") + b"\n"
        try:
            while data:
                data = data[os.write(self.handle, data):]
            self.torn = False
        except OSError as error:
            self.torn = True                         # some of it may be there
            if not self.said:
                self.said = True
                self.say(f"{self.path}: {error.strerror}: what happens meanwhile is missing there")

    def close(self):
        """Can be called more than once."""
        if self.handle is not None:
            os.close(self.handle)
            self.handle = None


class JsonLog(Lines):
    """An event a line."""

    def tell(self, event, _):
        self.add(json.dumps(event))


class CoordinatorLog(Lines):
    """The log of d-eggs: the constants of a session, then a line of figures a step."""

    def __init__(self, path, advice, say, cfg, step):
        super().__init__(path, advice, say)
        now = datetime.datetime.now().astimezone().isoformat(timespec="seconds")
        constants = "".join(f"# {name} = {value}\n" for name, value in cfg.constants().items())
        self.add(f"# egg, {now}, from step {step}\n{constants}Step,RelTime,Loss,Updates,LR")

    def tell(self, event, _):
        if event["event"] == "step":
            self.add("{step},{elapsed:.3f},{loss:.6f},{updates},{learning_rate:g}".format(**event))


class TensorBoard:
    """Scalars and samples for TensorBoard. Of tensorboardX only the writing of records is used: its SummaryWriter hands them to a thread
    that dies of a full disk, and the run would hang."""

    def __init__(self, directory, say):
        self.directory, self.say, self.flush_at = directory, say, 0.0
        try:
            from tensorboardX import event_file_writer, summary
            from tensorboardX.proto import event_pb2, summary_pb2
        except ImportError:
            raise WatchError("--tensorboard needs tensorboardX: pip install tensorboardX") from None
        self._event, self._summary, self._text = event_pb2.Event, summary_pb2.Summary, summary.text
        try:
            os.makedirs(directory, exist_ok=True)
            self._writer = event_file_writer.EventsWriter(os.path.join(directory, "egg"), f".{os.getpid()}")
        except OSError as error:
            raise WatchError(f"--tensorboard {directory}: {error.strerror}: name a directory that can be written") from None

    def tell(self, event, _):
        kind = event["event"]
        if kind == "step":
            self._scalars(event, {name: event[name] for name in ("loss", "updates", "tokens_per_second", "learning_rate")})
        elif kind == "validation":
            self._scalars(event, {"validation/" + event["unit"].replace("/", "_per_"): event["value"]})
        elif kind == "snapshot" and event["overlay"]:
            self._scalars(event, {f"overlay/{name}": value for name, value in event["overlay"].items()})
        elif kind == "sample":
            # a code block of Markdown, which TensorBoard renders
            text = "\n".join("    " + line for line in f"{event['prompt']} >>> {event['text']}".split("\n"))
            self._write(event, self._text("sample", text))

    def _scalars(self, event, values):
        self._write(event, self._summary(value=[self._summary.Value(tag=k, simple_value=v) for k, v in values.items()]))

    def _write(self, event, summary):
        if self._writer is None:
            return
        try:
            self._writer.write_event(self._event(wall_time=event["time"], step=event["step"], summary=summary))
            if time.monotonic() >= self.flush_at:
                self._writer.flush()
                self.flush_at = time.monotonic() + FLUSH_EVERY
        except OSError as error:
            self.close()
            self.say(f"--tensorboard {self.directory}: {error.strerror}: nothing more is written there")

    def close(self):
        writer, self._writer = self._writer, None
        if writer is not None:
            with contextlib.suppress(OSError):
                writer.close()


# --- curves ----------------------------------------------------------------------------------------------------------------

class Merge(NamedTuple):
    """A state that an island took in: after `step` steps, at Unix seconds `time`, the state of `peer` after its `peer_step` steps; one of
    its own earlier ones where it is the peer itself.
    part: its share in the result, 0 to 1; theirs, digest: what it and the result are known by (hex)."""
    step: int
    time: float
    peer: str
    peer_step: int
    part: float
    theirs: str
    digest: str


class Curve(NamedTuple):
    """What a JSON log says about the course of a run. loss, validation: [(step, tokens, seconds of training, value)], steps rising;
    unit: of validation, None without; references: {name: value in that unit}; island: its name, "" where it is none; merges: [Merge],
    steps rising; pushes: [(step,)] at which it was rejuvenated."""
    name: str
    loss: list
    validation: list
    unit: object
    references: dict
    island: str
    merges: list
    pushes: list

    @property
    def steps(self):
        """Steps that were done."""
        return self.loss[-1][0] + 1 if self.loss else self.validation[-1][0]

    def at(self, step):
        """(step, tokens, seconds of training) when so many steps were done."""
        i = bisect.bisect_left(self.loss, step, key=lambda point: point[0])
        last, tokens = self.loss[-1][:2] if self.loss else (0, 0.0)                # as many in every step
        return step, step * tokens / max(last, 1), self.loss[i - 1][2] if i else 0.0


def read_curve(path):
    """The Curve in a save directory or in a file of --log-json. Lines that are torn or of something else are passed over; where a step
    is told again, by a run that went on from before it, the last word counts. Raises WatchError."""
    name = os.path.join(path, EVENTS) if os.path.isdir(path) else path
    loss, validation, unit, references, island, merges, pushes, alpha = [], [], None, {}, "", [], [], 1.0
    try:
        with open(name, "rb") as file:
            for line in iter(lambda: file.readline(LONGEST), b""):
                # what is not a whole event of ours raises one of these
                with contextlib.suppress(ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
                    event = json.loads(line)
                    kind = event["event"]
                    if kind == "step":
                        step, tokens, value, took = _numbers(event, "step", "tokens", "loss", "seconds")
                        _cut(loss, step)
                        _cut(merges, step + 1)
                        _cut(pushes, step + 1)
                        loss.append((int(step), tokens, (loss[-1][2] if loss else 0.0) + took, value))
                    elif kind == "validation":
                        step, tokens, value = _numbers(event, "step", "tokens", "value")
                        _cut(validation, step)
                        seconds = next((point[2] for point in reversed(loss) if point[0] < step), 0.0)
                        validation.append((int(step), tokens, seconds, value))
                        unit = str(event["unit"])
                    elif kind == "references":
                        references = {str(k): float(v) for k, v in event["values"].items()}
                    elif kind == "start":
                        alpha = float(event["config"]["RECOMBINE_ALPHA"])
                    elif kind == "island":
                        island = str(event["name"])
                    elif kind == "merge":
                        step, when, peer_step = _numbers(event, "step", "time", "peer_step")
                        merges.append(Merge(int(step), when, str(event["peer"]), int(peer_step), part(event, alpha),
                                            str(event["parent_theirs"]), str(event["digest"])))
                    elif kind == "rejuvenated":
                        pushes.append((int(*_numbers(event, "step")),))
    except OSError as error:
        what = "no run of egg lies there" if os.path.isdir(path) and isinstance(error, FileNotFoundError) else error.strerror
        raise WatchError(f"{path}: {what}: name a --save-dir, or a file of --log-json") from None
    if not loss and not validation:
        raise WatchError(f"{name} holds no step of a run: name a --save-dir, or a file of --log-json")
    return Curve(os.path.basename(os.path.abspath(path)), loss, validation, unit, references, island, merges, pushes)


def _numbers(event, *names):
    """[float]: these fields of an event. Raises ValueError and others where one is missing or not finite."""
    numbers = [float(event[name]) for name in names]
    if not all(map(math.isfinite, numbers)):
        raise ValueError
    return numbers


def part(event, alpha):
    """The share, 0 to 1, of the other's state in what the merge of an event made under RECOMBINE_ALPHA."""
    if event["kind"] != "recombine":                 # "clone", or "undo": back to a state of its own
        return 1.0
    ours, theirs = _numbers(event, "ours", "theirs")
    worse = merging.worse_part(alpha, ours, theirs) / (1 << merging.PART)
    return worse if ours <= theirs else 1 - worse


def _cut(points, step):
    """Takes away what is told again from this step on."""
    while points and points[-1][0] >= step:
        points.pop()


class Thinned:
    """A curve that only grows, kept in at most `most` points: each is the mean of `every` neighbours, and when there are too many, two
    become one."""

    def __init__(self, most):
        self.most, self.every, self.points, self._rest = most, 1, [], []

    def add(self, *point):
        self._rest.append(point)
        if len(self._rest) == self.every:
            self.points.append(_mean(self._rest))
            self._rest = []
            if len(self.points) >= self.most:
                self.points = [_mean(pair) for pair in zip(self.points[::2], self.points[1::2])]
                self.every *= 2

    def all(self):
        """[point], the last one of what has come since the last whole one."""
        return self.points + ([_mean(self._rest)] if self._rest else [])


def _mean(points):
    # six digits are enough for any screen, and keep what is sent small
    return tuple(float(f"{sum(column) / len(points):.6g}") for column in zip(*points))
