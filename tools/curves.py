"""Curves of runs, read from their logs of events (docs/EVENTS.md): loss, validation and reward by step, tokens and time
of training, and what islands took in. They are drawn with matplotlib, or as lines of blocks in the terminal."""

import contextlib
import glob
import io
import itertools
import json
import os
import shutil
from collections import defaultdict, deque, namedtuple

import egg_config
from cluster import history
from cluster.console import one_line, table
from cluster.event_log import LONGEST, WatchError
from cluster.history import EVENTS, open_file
from cluster.status import Progress
from egg_config import explained

POINTS = 1 << 12           # most points of a curve
READ_WHOLE = 1 << 24       # bytes of a log: of the steps in one that is n times as long only each n-th is read
SAMPLES, MERGES = 8, 200   # the newest ones of a run that are kept
TEXT = 64                  # characters of a name or a unit
MOST = 1e15                # size of a number: a forged one must not break the arithmetic of charts
ADVICE = "name a --save-dir, or a file of --log-json"
# {--x: (the field of a Point by its number, size of a unit, title)}
AXES = {"steps": (0, 1, "steps"), "tokens": (1, 1e6, "million tokens"), "time": (2, 60, "minutes of training")}
DRAWN = 2000               # most points of a curve in a picture
BLOCKS = "\u2581\u2582\u2583\u2584\u2585\u2586\u2587\u2588"
WORDS = 40                 # columns beside the blocks of a line in the terminal

# raised by an event that is incomplete or of another program
INCOMPLETE = ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError

Point = namedtuple("Point", "step tokens seconds value")         # floats; seconds: of training until then


class Curve:
    """The course of a run, built event by event. loss, validation, reward: [Point]; units: {quantity: unit, "" where it
    is not known}; steps: how many are completed; seconds: of training until then; references: {simple model: its
    validation}; merges: [(the last Point of the loss, event)], of an island; samples: [event]."""

    steps = 0
    of = None                  # what names the text of the validations
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
                if event["loss"] is not None:
                    self._add("loss", event, bits * event["loss"], self._before + event["elapsed"])
                self.steps = event["step"] + 1
                self.seconds = self._before + event["elapsed"]
            case "validation" | "reward" as quantity:
                before, self.of = self.of, event.get("of", self.of)
                if quantity == "validation" and before not in (None, self.of):           # they were of another text
                    self.validation.clear()
                self._add(quantity, event, event["value"], event.get("seconds", self.seconds))
            case "references":
                self.references = {_text(name): _number(value) for name, value in event["values"].items()}
            case "merge":
                self.merges.append((self.loss[-1], event))
            case "sample" if event not in self.samples:          # the page may find one in the log that is also news
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
    lost = not os.path.lexists(name) and history.holds_run(path)
    for event in events_of(path) if lost else ():
        curve.add(event)
    for part in [f"{name}.1"] * os.path.lexists(f"{name}.1") + [name] * (not lost):       # a long log has an older part
        with explained(WatchError, part, ADVICE), open_file(part) as raw, io.BufferedReader(raw) as file:
            every = 1 + os.path.getsize(part) // READ_WHOLE
            for number, line in enumerate(iter(lambda: file.readline(LONGEST), b"")):
                if number % every == 0 or b'"event": "step"' not in line:
                    with contextlib.suppress(*INCOMPLETE):
                        curve.add(json.loads(line))
    if not curve.steps and not curve.validation:
        raise WatchError(f"{name} holds no step of a run: {ADVICE}")
    return curve


def events_of(directory):
    """Yields the steps that the history of a run tells, whose log is missing. Raises HistoryError."""
    cfg = egg_config.load(environ={}, saved=history.configuration(directory))
    with contextlib.closing(history.read_run(cfg, directory)) as run:
        progress = Progress(cfg, run, None)
        for step in range(run.start.step, run.step):
            yield {"event": "step", "elapsed": 0.0, **progress.of_step(step, run.record(step).sum_loss or None)}


def _number(value):
    """float. Raises ValueError or TypeError."""
    number = float(value)
    if not abs(number) <= MOST:
        raise ValueError
    return number


def _text(value):
    """A text of a log as part of a line: without characters that no terminal and no picture can show."""
    return one_line(str(value), TEXT)


# --- drawn ------------------------------------------------------------------------------------------------------------

def plot(runs, printer, x="tokens", out=None, log=False):
    """Draws the curves of `runs` (save directories or JSON logs) against `x`: "tokens", "time" or "steps", with `log`
    on a logarithmic axis. out: file of the picture; None: `printer` (a console.Printer) gets lines. Raises
    WatchError."""
    curves = []
    for number, run in enumerate(runs, 1):
        try:
            curves.append(read_curve(run))
        except WatchError as error:
            if number == len(runs) and not curves:
                raise
            printer.line(f"left out: {error}")
    charts = charts_of(curves, x, log)
    if not charts:
        raise WatchError("no step has a place on a logarithmic axis yet: leave --log out")
    if out:
        picture(charts, curves, x, out, log)
        printer.line(f"picture: {out}")
    else:
        for title, lines in charts.items():
            printer.line("\n".join([f"{title}, against {AXES[x][2]}", *sparklines(lines, log)]))
            if "validation" in title and (mark := dict(common_references(lines)).get("bigram")):
                printer.line(f'the mark to beat, a table of pairs ("bigram"): {mark:.4g}')


def runs(directories, printer):
    """Prints a table of runs; of none: all in this directory. Raises HistoryError."""
    directories = directories or sorted(filter(history.holds_run, glob.glob("*"))) or [history.newest()]
    constants = [egg_config.load(environ={}, saved=history.configuration(name)).constants() for name in directories]
    for values in constants:
        values.update((name, os.path.relpath(values[name])) for name in egg_config.DATA_FILES)   # one file, one name
    rows = []
    for name, values in zip(directories, constants):
        curve = Curve()
        with contextlib.suppress(WatchError):
            read_curve(name, curve)
        best = [f"{min(p.value for p in curve.validation):.4f} {curve.units['validation']}"] if curve.validation else []
        best += [f"reward {max(p.value for p in curve.reward):.4f}"] if curve.reward else []
        differ = [f"{key}={text[:40]}" + "..." * (len(text) > 40) for key, value in values.items()
                  if any(other[key] != value for other in constants) and key != "DECODING_FILE"      # a copy in each
                  for text in [egg_config.text(value)]]
        # an imported run has the steps of its beginning, and no log of them
        steps = max(curve.steps, *(start.step for start in history.epochs(name)), 0)
        rows.append((name, str(steps), ", ".join(best), " ".join(differ)))
    printer.line("\n".join(table(("run", "steps", "best", "constants that differ"), rows, 4)))


def charts_of(curves, x, log):
    """{title: {curve: (places, values)}}: every quantity that some of the runs have."""
    field, size, _ = AXES[x]
    charts = {}
    for quantity in "reward", "validation", "loss":
        lines = {}
        units = set()
        for curve in curves:
            points = thinned(getattr(curve, quantity), DRAWN)
            # a logarithmic axis has no place for the beginning
            shown = [(point[field] / size, point.value) for point in points if point[field] > 1e-3 or not log]
            if shown:
                lines[curve] = tuple(zip(*shown))
                units.add(curve.units[quantity])
        if lines:
            charts[", ".join([quantity, *sorted(units - {""})])] = lines
    return charts


def sparklines(lines, log):
    """Yields a line for every curve: blocks, its last value and name; blanks where it has not begun, or has ended."""
    import numpy as np                               # the live page starts without it
    places, values = np.concatenate([*lines.values()], axis=1)
    columns = max(shutil.get_terminal_size().columns - WORDS, 8)
    grid = (np.geomspace if log else np.linspace)(places.min(), places.max(), columns)
    for curve, line in lines.items():
        heights = np.interp(grid, *line, left=np.nan, right=np.nan) - values.min()
        levels = 7 * heights / (np.ptp(values) or 1)
        blocks = "".join(BLOCKS[round(level)] if level >= 0 else " " for level in levels)
        yield f"{blocks} {line[1][-1]:.4g}  {curve.name}"


def picture(charts, curves, x, out, log):
    """Writes the charts (see `charts_of`) to a file in the format of its suffix. Raises WatchError."""
    import numpy as np
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ImportError:
        raise WatchError("--out needs matplotlib: pip install -r requirements/watch.txt; without --out a line for "
                         "each curve is printed here") from None
    if not out.endswith((".png", ".svg", ".pdf")):
        raise WatchError(f"--out {out}: name a file that ends with .png, .svg or .pdf")
    matplotlib.rcParams["text.parse_math"] = False           # names may hold a $
    field, size, x_title = AXES[x]
    figure = Figure(figsize=(9, 3.6 * len(charts)), layout="constrained")
    axes = figure.subplots(len(charts), sharex=True, squeeze=False)[:, 0]
    drawn = {}
    for ax, (title, lines) in zip(axes, charts.items()):
        for curve, line in lines.items():
            colour = f"C{curves.index(curve)}"
            drawn[curve.name], = ax.plot(*line, ".-", color=colour, markersize=2)
            taken = [point[field] / size for point, _ in curve.merges]
            ax.plot(taken, np.interp(taken, *line), "v", color=colour)
        if "validation" in title:
            add_references(ax, common_references(lines))
        ax.set_ylabel(title)
        ax.grid(color="0.9")
    if log:
        ax.set_xscale("log")
        ax.xaxis.set_major_formatter("{x:g}")
    ax.set_xlabel(x_title)
    figure.legend(drawn.values(), drawn, loc="outside upper left", ncols=3, frameon=False)
    with explained(WatchError, f"--out {out}", "name a file that can be written"):
        figure.savefig(out)


def common_references(curves):
    """{(name, value)}: of the simple models, what holds for all curves."""
    return set.intersection(*(set(curve.references.items()) for curve in curves))


def add_references(ax, references):
    """Marks the simple models, [(name, value)], whose values are among those that are shown, and the mark to beat."""
    low, high = ax.get_ylim()
    for name, value in references:
        if low < value < high or name == "bigram":
            words = "table of pairs\n (bigram)" if name == "bigram" else name
            ax.axhline(value, color="0.5", linestyle=":")
            ax.text(1, value, f" {words} {value:.2f}", transform=ax.get_yaxis_transform(), va="center")
