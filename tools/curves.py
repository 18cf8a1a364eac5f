"""Curves of runs, read from their logs of events (docs/EVENTS.md): loss, validation and reward by step, tokens and time
of training, and what islands took in."""

import contextlib
import io
import itertools
import json
import os
from collections import defaultdict, deque, namedtuple

import egg_config
from cluster.console import one_line
from cluster.event_log import LONGEST, WatchError
from cluster.history import EVENTS, open_file

POINTS = 1 << 12           # most points of a curve
READ_WHOLE = 1 << 24       # bytes of a log: of the steps in one that is n times as long only each n-th is read
SAMPLES, MERGES = 8, 200   # the newest ones of a run that are kept
TEXT = 64                  # characters of a name or a unit
MOST = 1e15                # size of a number: a forged one must not break the arithmetic of charts
ADVICE = "name a --save-dir, or a file of --log-json"

# raised by an event that is incomplete or of another program
INCOMPLETE = ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError

Point = namedtuple("Point", "step tokens seconds value")         # floats; seconds: of training until then


class Curve:
    """The course of a run, built event by event. loss, validation, reward: [Point]; units: {quantity: unit, "" where it
    is not known}; steps: how many are completed; seconds: of training until then; references: {simple model: its
    validation}; merges: [(the last Point of the loss, event)], of an island; samples: [event]."""

    steps = 0
    seconds = 0.0
    _bits = 1.0                # in one unit of the losses, in old logs that do not name it
    _before = 0.0              # seconds of training before this start of the run

    def __init__(self, name=""):
        self.name = name
        self.loss, self.validation, self.reward = [], [], []
        self.units = defaultdict(str)
        self.references = {}
        self.merges = deque(maxlen=MERGES)
        self.samples = deque(maxlen=SAMPLES)

    def add(self, event):
        """Raises one of INCOMPLETE."""
        match event["event"]:
            case "start":
                self._bits, self.units["loss"] = egg_config.loss_unit(event["config"])
                self._before = self.seconds if event["step"] else 0.0
            case "step":
                bits = 1.0 if "unit" in event else self._bits
                self._add("loss", event, bits * event["loss"], self._before + event["elapsed"])
                self.steps = event["step"] + 1
                self.seconds = self._before + event["elapsed"]
            case "validation" | "reward" as quantity:
                self._add(quantity, event, event["value"], event.get("seconds", self.seconds))
            case "references":
                self.references = {_text(name): _number(value) for name, value in event["values"].items()}
            case "merge":
                self.merges.append((self.loss[-1], event))
            case "sample":
                self.samples.append(event)

    def _add(self, quantity, event, value, seconds):
        point = Point(*map(_number, (event["step"], event["tokens"], seconds, value)))
        points = getattr(self, quantity)
        while points and points[-1].step >= point.step:          # a run that was resumed repeats steps
            points.pop()
        points.append(point)
        if len(points) > POINTS:
            points[:] = thinned(points, POINTS // 2)
        self.units[quantity] = _text(event.get("unit", self.units[quantity]))


def thinned(points, most):
    """[Point]: about `most` of a curve at most, each the mean of its neighbours, of as many steps each."""
    span = points[-1].step - points[0].step if points else 0
    width = 1 << int(span // most).bit_length()      # a power of two: a group of groups is a group
    groups = [[*group] for _, group in itertools.groupby(points, lambda point: point.step // width)]
    return [Point(*(sum(column) / len(group) for column in zip(*group))) for group in groups]


def read_curve(path, curve=None):
    """The Curve in a save directory, perhaps a stranger's, or in a file of --log-json: a new one, or `curve`. Lines
    that are torn or hold something else are skipped. Raises WatchError."""
    # a link may be named by the user, but not lie in the directory
    name = os.path.join(path, EVENTS) if os.path.isdir(path) else os.path.realpath(path)
    curve = curve or Curve(one_line(str(path)).removesuffix(".jsonl"))
    for part in [f"{name}.1"] * os.path.lexists(f"{name}.1") + [name]:         # a long log has an older part
        with egg_config.explained(WatchError, part, ADVICE), open_file(part) as raw, io.BufferedReader(raw) as file:
            every = 1 + os.path.getsize(part) // READ_WHOLE
            for number, line in enumerate(iter(lambda: file.readline(LONGEST), b"")):
                if number % every == 0 or b'"event": "step"' not in line:
                    with contextlib.suppress(*INCOMPLETE):
                        curve.add(json.loads(line))
    if not curve.loss and not curve.validation:
        raise WatchError(f"{name} holds no step of a run: {ADVICE}")
    return curve


def _number(value):
    """float. Raises ValueError or TypeError."""
    number = float(value)
    if not abs(number) <= MOST:
        raise ValueError
    return number


def _text(value):
    """A text of a log as part of a line: without characters that no terminal and no picture can show."""
    return one_line(str(value), TEXT)
