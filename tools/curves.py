"""Curves of runs, read from their JSON logs: loss and validation by step, tokens and time; for islands also their
merges."""

import bisect
import collections
import contextlib
import json
import math
import os

import egg_config
from cluster.event_log import LONGEST, WatchError
from cluster.history import EVENTS
from islands import merging

SAMPLES = 8                # newest samples of a run that are kept

# what reading something else than a complete event raises
INCOMPLETE = ValueError, KeyError, TypeError, AttributeError, ArithmeticError, RecursionError


# A state that an island took over. step, time (Unix, seconds): when; peer, peer_step: whose, at which of its steps,
# perhaps its own; share: of that state in the result, 0 to 1; theirs, digest: of that state and the result
Merge = collections.namedtuple("Merge", "step time peer peer_step share theirs digest")


class Curve:
    """The course of a run, built event by event. loss, validation: [(step, tokens, seconds of training, value)];
    loss_unit, unit: of them, "" and None if not known; references: {simple model: its validation}; island: its name, or
    ""; merges: [Merge]; rejuvenations: [(step,)]; samples: the last events of that kind."""

    def __init__(self, name):
        self.name, self.loss, self.validation, self.unit, self.references = name, [], [], None, {}
        self.island, self.merges, self.rejuvenations, self._alpha = "", [], [], 1.0
        self.samples = collections.deque(maxlen=SAMPLES)
        self._bits, self.loss_unit = 1.0, ""         # of the losses in files of before they had a unit

    @property
    def steps(self):
        """Number of completed steps."""
        return self.loss[-1][0] + 1 if self.loss else self.validation[-1][0]

    def at(self, step):
        """(step, tokens, seconds of training) after so many completed steps."""
        i = bisect.bisect_left(self.loss, step, key=lambda point: point[0])
        last, tokens = self.loss[-1][:2] if self.loss else (0, 0.0)      # steps have equally many tokens
        return step, step * tokens / max(last, 1), self.loss[i - 1][2] if i else 0.0

    def cut(self, step):
        """Leaves what there was after so many completed steps."""
        _cut(self.loss, step)
        for points in self.validation, self.merges, self.rejuvenations:
            _cut(points, step + 1)

    def add(self, event):
        """Raises one of INCOMPLETE."""
        kind = event["event"]
        if kind == "step":
            step, tokens, value, seconds = _numbers(event, "step", "tokens", "loss", "seconds")
            value *= 1.0 if "unit" in event else self._bits
            self.loss_unit = str(event.get("unit", self.loss_unit))
            self.cut(step)
            self.loss.append((int(step), tokens, (self.loss[-1][2] if self.loss else 0.0) + seconds, value))
        elif kind == "validation":
            step, tokens, value = _numbers(event, "step", "tokens", "value")
            _cut(self.validation, step)
            seconds = next((point[2] for point in reversed(self.loss) if point[0] < step), 0.0)
            seconds = _numbers(event, "seconds")[0] if "seconds" in event else seconds      # in a log without steps
            self.validation.append((int(step), tokens, seconds, value))
            self.unit = str(event["unit"])
        elif kind == "references":
            self.references = {str(k): float(v) for k, v in event["values"].items()}
        elif kind == "start":
            self._alpha = float(event["config"]["RECOMBINE_ALPHA"])
            self._bits, self.loss_unit = egg_config.loss_unit(event["config"])
        elif kind == "island":
            self.island = str(event["name"])
        elif kind == "merge":
            step, when, peer_step = _numbers(event, "step", "time", "peer_step")
            share = merged_share(event, self._alpha)
            self.merges.append(Merge(int(step), when, str(event["peer"]), int(peer_step), share,
                                     str(event["parent_theirs"]), str(event["digest"])))
        elif kind == "sample":
            self.samples.append({name: event[name] for name in ("step", "worker", "prompt", "text")})
        elif kind == "rejuvenated":
            self.rejuvenations.append((int(*_numbers(event, "step")),))


def read_curve(path):
    """The Curve in a save directory or in a file of --log-json. Lines that are torn or hold something else are skipped.
    A run that was resumed from an earlier step repeats steps: the last record of a step counts. Raises WatchError."""
    name = os.path.join(path, EVENTS) if os.path.isdir(path) else path
    curve = Curve(os.path.basename(os.path.abspath(path)).removesuffix(".jsonl"))
    try:
        for part in [f"{name}.1"] * os.path.isfile(f"{name}.1") + [name]:      # a long log has an older part
            with open(part, "rb") as file:
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
    """[float]: these fields of an event. Raises one of INCOMPLETE."""
    numbers = [float(event[name]) for name in names]
    if not all(map(math.isfinite, numbers)):
        raise ValueError
    return numbers


def merged_share(event, alpha):
    """The share, 0 to 1, of the peer's state in the result of a merge event; alpha: RECOMBINE_ALPHA."""
    if event["kind"] != "recombine":                 # "clone", or "undo": a complete state
        return 1.0
    ours, theirs = _numbers(event, "ours", "theirs")
    worse = merging.worse_share(alpha, ours, theirs) / (1 << merging.SHARE_BITS)
    return worse if ours <= theirs else 1 - worse


def _cut(points, step):
    """Removes the points from `step` on."""
    while points and points[-1][0] >= step:
        points.pop()


class Thinned:
    """A growing curve in at most `most` points, each the mean of `every` neighbours, which doubles at need."""

    def __init__(self, most, points=()):
        self.most, self.every, self.points, self._rest = most, 1, [], []
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
