"""Curves of runs, read from their JSON logs: loss, validation and reward by step, tokens and time; for islands also
their merges."""

import bisect
import contextlib
import io
import itertools
import json
import math
import os
from collections import deque, namedtuple

import egg_config
from cluster.event_log import LONGEST, WatchError
from cluster.history import EVENTS, MOST_COPIED, open_file
from islands import merging

SAMPLES = 8                # newest samples of a run that are kept
POINTS = 1 << 16           # most points of a curve: of a longer one pairs of neighbours become one
MERGES, NAMES = 1024, 16   # newest merges that are kept; simple models
TEXT = 64                  # characters of a name, a unit or a digest
# of numbers but 0 in a log: a forged one must not break the arithmetic of charts
LEAST, MOST, MOST_VALUE = 1e-9, 1e15, 1 << 30

# raised by an event that is incomplete or of another program
INCOMPLETE = ValueError, KeyError, TypeError, AttributeError, ArithmeticError, RecursionError


Point = namedtuple("Point", "step tokens seconds value")         # of a curve. seconds: of training
# An island took over a state. time: Unix, seconds; peer, peer_step: whose state, and its step there (the peer may be
# the island itself); share: of that state in the result, 0 to 1; theirs, digest: digests of that state, of the result
Merge = namedtuple("Merge", "step time peer peer_step share theirs digest")


class Curve:
    """The course of a run, built event by event. loss, validation, reward: [Point]; loss_unit, unit: of the first two,
    "" and None if not known; references: {simple model: its validation}; island: its name, or ""; merges:
    [Merge]; rejuvenations: [Point], of which only the step counts; samples: the last events of that kind."""

    loss_unit = island = ""
    unit = None
    _alpha = 1.0
    _bits = 1.0                                      # in one unit of the losses, in old files that do not name it

    def __init__(self, name):
        self.name = name
        self.loss, self.validation, self.reward = [], [], []
        self.merges, self.rejuvenations = [], []
        self.references = {}
        self.samples = deque(maxlen=SAMPLES)

    @property
    def steps(self):
        """Number of completed steps."""
        return self.loss[-1].step + 1 if self.loss else self.validation[-1].step

    def at(self, step):
        """The Point after `step` completed steps, without a value."""
        i = bisect.bisect_left(self.loss, (step,))               # a Point begins with its step
        seconds = self.loss[i - 1].seconds if i else 0.0
        last = self.loss[-1] if self.loss else Point(0, 0.0, 0.0, 0.0)
        tokens = step * last.tokens / max(last.step, 1)          # all steps have equally many tokens
        return Point(step, tokens, seconds, math.nan)

    def cut(self, step):
        """Keeps what there was after `step` completed steps."""
        _cut(self.loss, step)
        for points in self.validation, self.reward, self.merges, self.rejuvenations:
            _cut(points, step + 1)

    def add(self, event):
        """Raises one of INCOMPLETE."""
        match event["event"]:
            case "step":
                step, tokens, value, seconds = _numbers(event, "step", "tokens", "loss", "seconds")
                value = _value(value * (1.0 if "unit" in event else self._bits))
                self.loss_unit = _text(event.get("unit", self.loss_unit))
                self.cut(step)
                before = self.loss[-1].seconds if self.loss else 0.0
                _append(self.loss, Point(int(step), tokens, before + seconds, value))
            case "validation":
                unit = _text(event["unit"])
                self._measured(self.validation, event, *_numbers(event, "value"))
                self.unit = unit
            case "reward":
                self._measured(self.reward, event, float(event["value"]))
            case "references":
                self.references = {_text(k): _value(float(v))
                                   for k, v in itertools.islice(event["values"].items(), NAMES)}
            case "start":
                self._alpha = min(max(*_numbers(event["config"], "RECOMBINE_ALPHA"), 0.0), 1.0)
                self._bits, self.loss_unit = egg_config.loss_unit(event["config"])
            case "island":
                self.island = _text(event["name"])
            case "merge":
                step, when, peer_step = _numbers(event, "step", "time", "peer_step")
                peer, theirs, digest = (_text(event[name]) for name in ("peer", "parent_theirs", "digest"))
                share = merged_share(event, self._alpha)
                self.merges.append(Merge(int(step), when, peer, int(peer_step), share, theirs, digest))
                del self.merges[:-MERGES]
            case "sample":
                self.samples.append({"step": int(*_numbers(event, "step")),
                                     "worker": event["worker"] and _text(event["worker"]),
                                     **{name: str(event[name]) for name in ("prompt", "text")}})
            case "rejuvenated":
                self.rejuvenations.append(self.at(int(*_numbers(event, "step"))))
                del self.rejuvenations[:-MERGES]

    def _measured(self, points, event, value):
        step, tokens = _numbers(event, "step", "tokens")
        if "seconds" in event:                       # in a log without steps
            seconds, = _numbers(event, "seconds")
        else:
            seconds = self.at(step).seconds
        point = Point(int(step), tokens, seconds, _value(value))
        _cut(points, step)
        _append(points, point)


def read_curve(path):
    """The Curve in a save directory, perhaps a stranger's, or in a file of --log-json. Lines that are torn or hold
    something else are skipped. A run that was resumed from an earlier step repeats steps: the last record of a step
    counts. Raises WatchError."""
    name = os.path.join(path, EVENTS) if os.path.isdir(path) else path
    curve = Curve(os.path.basename(os.path.abspath(path)).removesuffix(".jsonl"))
    try:
        for part in [f"{name}.1"] * os.path.lexists(f"{name}.1") + [name]:     # a long log has an older part
            # only the user's own name may be that of a link
            with open_file(os.path.realpath(part) if name == path else part) as raw, io.BufferedReader(raw) as file:
                if os.fstat(raw.fileno()).st_size > MOST_COPIED:
                    raise WatchError(f"{part} has more than {MOST_COPIED:,} bytes, no log of egg has: name another, or "
                                     "its first part")
                for line in iter(lambda: file.readline(LONGEST), b""):
                    with contextlib.suppress(*INCOMPLETE):
                        curve.add(json.loads(line))
    except OSError as error:
        why = "contains no run of egg" if name != path and isinstance(error, FileNotFoundError) else error.strerror
        raise WatchError(f"{path}: {why}: name a --save-dir, or a file of --log-json") from None
    if not curve.loss and not curve.validation:
        raise WatchError(f"{name} holds no step of a run: name a --save-dir, or a file of --log-json")
    return curve


def _numbers(event, *names):
    """[float]: these fields of an event, none of which is negative in one that is right. Raises one of INCOMPLETE."""
    numbers = [float(event[name]) for name in names]
    if not all(number == 0 or LEAST <= number <= MOST for number in numbers):
        raise ValueError
    return numbers


def _value(value):
    if not abs(value) <= MOST_VALUE:
        raise ValueError
    return value


def _text(value):
    return str(value)[:TEXT]


def _append(points, point):
    points.append(point)
    if len(points) >= POINTS:
        points[:] = [b._replace(value=(a.value + b.value) / 2) for a, b in zip(points[::2], points[1::2])]


def merged_share(event, alpha):
    """The share, 0 to 1, of the peer's state in the result of a merge event; alpha: RECOMBINE_ALPHA."""
    if event["kind"] != "recombine":                 # "clone", or "undo": a complete state
        return 1.0
    ours, theirs = (_value(float(event[name])) for name in ("ours", "theirs"))
    worse = merging.worse_share(alpha, ours, theirs) / (1 << merging.SHARE_BITS)
    return worse if ours <= theirs else 1 - worse


def _cut(points, step):
    """Removes the points from `step` on."""
    while points and points[-1].step >= step:
        points.pop()


class Thinned:
    """A growing curve in at most `most` points, each the mean of `every` neighbours; `every` doubles when they are
    full."""

    def __init__(self, most, points=()):
        self.most = most
        self.every = 1
        self.points = []
        self._rest = []                              # the neighbours of the next point
        for point in points:
            self.add(*point)

    def add(self, *point):
        self._rest.append(point)
        if len(self._rest) == self.every:
            self.points.append(_mean(self._rest))
            self._rest = []
            if len(self.points) >= self.most:
                self.points = [_mean(pair) for pair in zip(self.points[::2], self.points[1::2])]
                self.every *= 2

    def all(self):
        """[point]; the last one is the mean of fewer neighbours."""
        return self.points + ([_mean(self._rest)] if self._rest else [])


def _mean(points):
    # six digits are enough for any screen, and keep what is sent small
    return tuple(float(f"{sum(column) / len(points):.6g}") for column in zip(*points))
