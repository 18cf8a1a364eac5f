"""Draws loss, validation and reward of runs, and the descent of islands, in the terminal or as a picture with
matplotlib."""

import math
import os
import shutil
import string
import textwrap
from collections import Counter, namedtuple

import numpy as np

from cluster.console import one_line, shortened
from cluster.event_log import WatchError
from egg_config import explained
from tools.curves import Thinned, read_curve

ROWS = 12                  # lines of a chart in the terminal
LABEL = 8                  # columns of the numbers on its left
NAME = 32                  # most characters of an island's name
MOST_NAMED = 6             # most islands in a line of text
LEAST = 0.01               # a smaller share of a model is ignored
COLOURS = "yellow", "cyan", "magenta", "green", "blue", "red"      # of the runs, in the terminal
LETTERS = string.ascii_lowercase
BRAILLE = ((0x01, 0x02, 0x04, 0x40), (0x08, 0x10, 0x20, 0x80))      # dots of a character: [column][row]
TIME = ((1, "s"), (60, "min"), (3600, "h"), (86400, "days"))
COUNT = ((1, ""), (1e3, "thousand "), (1e6, "million "), (1e9, "billion "), (1e12, "trillion "))
POINTS = 2000              # most points of a curve, each the mean of neighbours


def plot(runs, printer, x="tokens", out=None, log=False):
    """Draws the curves of `runs` (save directories or JSON logs) against `x`: "tokens", "time" or "steps", with `log`
    on a logarithmic axis. out: file of the picture, None: `printer` (a console.Printer) gets them in characters. Raises
    WatchError."""
    if out is not None and not os.path.splitext(out)[1]:     # matplotlib would add one
        raise WatchError(f"--out {out}: the suffix says what to write: {out}.png, {out}.svg or {out}.pdf")
    curves = [read_curve(run) for run in runs]
    names = [curve.name for curve in curves]
    names = [run if names.count(name) > 1 else name for name, run in zip(names, runs)]       # to tell them apart
    charts = [chart for quantity in ("reward", "validation", "loss")
              if (chart := Chart(quantity, curves, x, log)).lines]
    if not charts:
        raise WatchError("no step has a place on a logarithmic axis yet: leave --log out")
    tree = Tree(curves, charts[0])
    if out is None:
        printer.line(terminal(charts, names, tree, printer))
    else:
        picture(charts, names, out, tree)
        printer.line(f"picture: {out}")


class Chart:
    """One quantity of all runs. lines: [(number of the run, [(x, y)])]; references: {name: y}."""

    def __init__(self, quantity, curves, x, log=False):
        self.field = {"steps": "step", "tokens": "tokens", "time": "seconds"}[x]         # of a curves.Point
        units = {curve.unit for curve in curves if curve.validation}
        loss_units = {curve.loss_unit for curve in curves if curve.loss}
        self.title = {"reward": "reward, mean on held-out prompts", "validation": _with_units(quantity, units),
                      "loss": _with_units("training loss", loss_units)}[quantity]
        furthest = max(self.at(points[-1]) for curve in curves
                       for points in (curve.loss, curve.validation, curve.reward) if points)
        # up to two minutes are shown in seconds, but two million tokens in millions
        scales, least = (TIME[:1] if log else TIME, 2) if x == "time" else (COUNT, 1)
        self.size, unit = max([scale for scale in scales if least * scale[0] <= furthest] or scales[:1])
        self.x_title = f"time of training, {unit}" if x == "time" else f"{unit}{x}"
        self.log = log
        self.x_end = furthest / self.size or 1.0
        points = [[(self.at(point) / self.size, point.value) for point in getattr(curve, quantity)
                   if self.at(point) > 0 or not log] for curve in curves]
        self.x_start = min([self.x_end / 10, *(x for line in points for x, _ in line)]) if log else 0.0
        self.lines = [(i, Thinned(POINTS, line).all()) for i, line in enumerate(points) if line]
        self.references = {}
        ys = [y for _, line in self.lines for _, y in line] or [0.0, 1.0]
        if quantity == "validation" and len(units) == 1:
            near = (max(ys) - min(ys)) / 2
            first, *others = [curve.references for curve in curves if curve.validation]
            self.references = {k: y for k, y in first.items() if min(ys) - near < y < max(ys) + near
                               and all(other.get(k) == y for other in others)}       # they hold for every run
            ys += self.references.values()
        margin = 0.05 if max(ys) - min(ys) < 1e-9 else 0.0
        self.low = min(ys) - margin
        self.high = max(ys) + margin

    def at(self, point):
        """What the axis shows of a curves.Point."""
        return getattr(point, self.field)

    def across(self, x):
        """The place of x on the axis, from 0 to 1."""
        if not self.log:
            return x / self.x_end
        return math.log(max(x, self.x_start) / self.x_start) / math.log(self.x_end / self.x_start)

    def column(self, x, columns):
        """Which of `columns` columns x falls in."""
        return _place(self.across(x), columns)

    def row(self, y, rows):
        """Which of `rows` rows y falls in, counted from the top."""
        return _place((self.high - y) / (self.high - self.low), rows)

    def x_ticks(self, count):
        """[(x, text)]: about `count` of the axis."""
        if not self.log:
            positions, decimals = ticks(0, self.x_end, count)
            return [(x, f"{x:.{decimals}f}") for x in positions]
        first, last = math.log10(self.x_start), math.log10(self.x_end)
        steps = (1, 2, 5) if 3 * (last - first) <= count else (1,)
        positions = [m * 10.0 ** power for power in range(math.floor(first), math.ceil(last) + 1) for m in steps]
        return [(x, f"{x:g}") for x in positions if self.x_start <= x <= self.x_end]


# A part of an island's lane, between two merges. shares: {origin: share of the model}
Piece = namedtuple("Piece", "start end shares")
Gift = namedtuple("Gift", "giver given_at taker taken_at")       # a merge: one island gave its model, another took it


class Tree:
    """The descent of the models of islands. runs: {name: Curve} of the islands among the runs; numbers: {name: number
    of the run; higher ones for peers without a run}; lanes: {name: [Piece]}; gifts: [Gift]; rejuvenations: [(name,
    x)]. `chart` has the scale of x."""

    def __init__(self, curves, chart):
        self.runs = {}                               # the longest run of each island
        for curve in curves:
            if curve.island and (curve.island not in self.runs or self.runs[curve.island].steps < curve.steps):
                self.runs[curve.island] = curve
        merges = sorted(((m, name) for name, curve in self.runs.items() for m in curve.merges), key=lambda x: x[0].time)
        self.numbers = {name: curves.index(curve) for name, curve in self.runs.items()}
        for merge, _ in merges:
            self.numbers.setdefault(merge.peer, len(curves) + len(self.numbers.keys() - self.runs.keys()))
        states = {name: [(0, "", {name: 1.0})] for name in self.numbers}         # [(step, digest, shares)]
        self.gifts = []

        def x(name, step, default=None):
            return chart.at(self.runs[name].at(step)) / chart.size if name in self.runs else default

        for m, name in merges:
            # if the peer merged at this very step itself, the digest decides between its states before and after that
            theirs = next((shares for step, digest, shares in reversed(states[m.peer])
                           if step < m.peer_step or digest == m.theirs), states[m.peer][0][2])
            kept, taken = (Counter({k: part * share for k, share in shares.items()})
                           for part, shares in ((1 - m.share, states[name][-1][2]), (m.share, theirs)))
            states[name].append((m.step, m.digest, kept + taken))                # without those that have gone
            self.gifts.append(Gift(m.peer, x(m.peer, m.peer_step, x(name, m.step)), name, x(name, m.step)))
        self.rejuvenations = [(name, x(name, point.step)) for name, run in self.runs.items()
                              for point in run.rejuvenations]
        self.lanes = {}
        for name, parts in states.items():
            starts = [x(name, step, 0.0) for step, _, _ in parts]
            end = x(name, self.runs[name].steps) if name in self.runs else \
                max(gift.given_at for gift in self.gifts if gift.giver == name)
            self.lanes[name] = [Piece(a, b, shares) for a, b, (_, _, shares) in zip(starts, starts[1:] + [end], parts)]

    def descent(self, name):
        """[(origin, share)] of an island's newest model, the largest share first."""
        shares = self.lanes[name][-1].shares.items()
        return sorted(((k, v) for k, v in shares if v >= LEAST), key=lambda pair: (-pair[1], pair[0]))

    def living(self):
        """str: which lines live on, and on how many of the islands in `runs`."""
        found = Counter(sorted(origin for name in self.runs for origin, _ in self.descent(name)))
        gone = [island_text(name) for name in self.runs if name not in found]
        lines = [f"{island_text(k)} on {n}" for k, n in found.most_common()]
        gone = f"; gone: {shortened(gone, MOST_NAMED)}" if gone else ""
        return f"lines that live on {len(self.runs)} islands: {shortened(lines, MOST_NAMED)}{gone}"


def _place(share, count):
    """The number, of `count` places, of the one at this share of the way."""
    return min(max(round(share * (count - 1)), 0), count - 1)


def _with_units(title, units):
    """The title, and behind it the units that are known, as one phrase."""
    return ", ".join([title, *filter(None, [" or ".join(sorted(units - {""}))])])


def island_text(name):
    """The name of an island, which may be a stranger's text."""
    return one_line(name, NAME) or "?"


def ticks(low, high, count):
    """([position], decimals) of about `count` round numbers from low to high, 1, 2 or 5 times a power of ten apart."""
    rough = (high - low) / max(count, 1)
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(m * power for m in (1, 2, 5, 10) if m * power >= rough * 0.999)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [k * step for k in range(first, last + 1)], max(0, -math.floor(math.log10(step) + 1e-9))


# --- the terminal -----------------------------------------------------------------------------------------------------

def terminal(charts, names, tree, printer, width=None):
    """str: the charts and the Tree in characters, `width` columns wide (default: the terminal's). Braille dots if the
    printer can show them and has colours, or if there is only one run; else a letter for every run."""
    dots = (printer.coloured or len(names) == 1) and _can(printer.stream, "\u28ff")
    width = max(width or shutil.get_terminal_size().columns, LABEL + 4)
    frame = "\u2502\u2500\u2514\u2524\u252c" if _can(printer.stream, "\u2502\u2524") else "|-+++"

    def paint(text, i):
        return printer.colour(text, COLOURS[i % len(COLOURS)])

    out = []
    for chart in charts:
        out += [chart.title, *_rows(chart, width, dots, frame, paint), ""]
    if tree.runs:
        out += ["islands: who most of a model descends from, in capitals where it was taken in",
                *_lanes(tree, charts[0], width, frame, paint), ""]
    islands = {tree.numbers[island]: island for island in tree.runs}
    for i, name in enumerate(names):
        ends = ", ".join(f"{chart.title.partition(',')[0]} {line[-1][1]:.4g}"
                         for chart in charts for k, line in chart.lines if k == i)
        if i in islands:
            shares = shortened([f"{v:.0%} {island_text(k)}" for k, v in tree.descent(islands[i])], MOST_NAMED)
            ends += f"; island {island_text(islands[i])}, of {shares}"
        out.append(f"{paint(LETTERS[i % 26] if islands or not dots else '*', i)} {name}: {ends}")
    if tree.runs:
        out.append(tree.living())
    return "\n".join(out)


def _can(stream, text):
    try:
        text.encode(stream.encoding or "ascii")
        return True
    except (UnicodeError, LookupError):
        return False


def _rows(chart, width, dots, frame, paint):
    """The lines of one chart: the curves, the axes and their numbers."""
    columns = width - LABEL - 1
    across, down = (2, 4) if dots else (1, 1)
    drawn, runs = np.zeros((2, ROWS, columns), int)          # the dots of each character, and the run that it shows
    for i, line in chart.lines:
        for x, y in _strokes(line, chart, columns * across, ROWS * down):
            place = y // down, x // across
            drawn[place] |= BRAILLE[x % across][y % down]
            runs[place] = i

    numbers, places = ticks(chart.low, chart.high, ROWS / 3)
    at = {chart.row(y, ROWS): y for y in numbers}
    words = {chart.row(y, ROWS): f"{name} {y:.2f}" for name, y in chart.references.items()}
    out = []
    for row in range(ROWS):
        word = _beside(words.get(row, ""), set(np.flatnonzero(drawn[row])), columns)
        text = "".join(paint(chr(0x2800 + bits) if dots else LETTERS[i % 26], i) if bits else letter
                       for bits, i, letter in zip(drawn[row], runs[row], word))
        label = f"{at[row]:.{places}f} {frame[3]}" if row in at else frame[0]
        out.append(label.rjust(LABEL + 1) + text.rstrip())
    axis, below = [frame[1]] * columns, [" "] * (width + LABEL)
    for x, text in chart.x_ticks(max(columns / 12, 1)):
        column = chart.column(x, columns)
        axis[column] = frame[4]
        start = min(max(LABEL + 1 + column - len(text) // 2, 0), width - len(text))
        below[start:start + len(text)] = text
    return out + [" " * LABEL + frame[2] + "".join(axis), "".join(below).rstrip()[:width], chart.x_title.rjust(width)]


def _beside(word, taken, columns):
    """A row with the word as far right as no curve is in its way; an empty row where there is no such place."""
    free = (at for at in range(columns - len(word), -1, -1) if taken.isdisjoint(range(at - 1, at + len(word) + 1)))
    return (" " * next(free, columns) + word).ljust(columns)[:columns]


def _lanes(tree, chart, width, frame, paint):
    """One line per island: in each column the letter of the island from which most of the model comes."""
    columns = width - LABEL - 1
    lanes = {name: [(" ", 0)] * columns for name in tree.lanes}

    for name, pieces in tree.lanes.items():
        for piece in pieces:
            i = tree.numbers[max(piece.shares, key=lambda origin: (piece.shares[origin], origin))]
            for at in range(chart.column(piece.start, columns), chart.column(piece.end, columns) + 1):
                lanes[name][at] = LETTERS[i % 26], i
    for gift in tree.gifts:
        i = tree.numbers[gift.giver]
        lanes[gift.taker][chart.column(gift.taken_at, columns)] = LETTERS[i % 26].upper(), i
    for name, x in tree.rejuvenations:
        at = chart.column(x, columns)
        lanes[name][at] = "!", lanes[name][at][1]
    return [f"{island_text(name)[:LABEL - 1]} {frame[0]}".rjust(LABEL + 1) + "".join(
        paint(text, i) if text != " " else text for text, i in cells).rstrip() for name, cells in lanes.items()]


def _strokes(line, chart, width, height):
    """Every dot (x, y from the top) on the polygon through the points, on a grid of width x height dots."""
    dots = [(chart.column(x, width), chart.row(y, height)) for x, y in line]
    for (x0, y0), (x1, y1) in zip(dots[:1] + dots, dots):
        n = max(abs(x1 - x0), abs(y1 - y0), 1)
        yield from ((round(x0 + (x1 - x0) * k / n), round(y0 + (y1 - y0) * k / n)) for k in range(n + 1))


# --- a picture --------------------------------------------------------------------------------------------------------

def picture(charts, names, path, tree):
    """Writes the charts and the Tree to a picture, in the format of its suffix. Raises WatchError."""
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ImportError:
        why = "--out needs matplotlib: pip install -r requirements/watch.txt; without --out the curves are drawn here"
        raise WatchError(why) from None
    matplotlib.rcParams["text.parse_math"] = False           # names may hold a $
    heights = [3.6] * len(charts) + [0.9 + min(0.35 * len(tree.lanes), 12)] * bool(tree.runs)
    figure = Figure(figsize=(9, sum(heights)), layout="constrained")
    axes = figure.subplots(len(heights), 1, sharex=True, squeeze=False, height_ratios=heights)[:, 0]
    for chart, ax in zip(charts, axes):
        for i, line in chart.lines:
            ax.plot(*zip(*line), color=f"C{i}", linewidth=1.6, label=names[i], marker="o" if len(line) == 1 else None)
        for gift in tree.gifts:                              # in the giver's colour, on the taker's curve
            x = gift.taken_at
            for line in (line for i, line in chart.lines if i == tree.numbers[gift.taker] and line[0][0] <= x):
                ax.plot(x, np.interp(x, *zip(*line)), marker="v", markersize=6, color=f"C{tree.numbers[gift.giver]}",
                        markeredgecolor="white", zorder=3)
        for name, y in chart.references.items():
            ax.axhline(y, color="0.45", linewidth=0.9, linestyle=(0, (2, 3)))
            ax.annotate(f"{name} {y:.2f}", (1, y), xycoords=("axes fraction", "data"), va="center", color="0.35",
                        xytext=(4, 0), textcoords="offset points", fontsize=9)   # beside the curves
        margin = 0.08 * (chart.high - chart.low)
        if chart.log:
            ax.set_xscale("log")
            ax.set_xticks(*zip(*chart.x_ticks(9)))
            ax.set_xticks([], minor=True)
        ax.set(ylabel=chart.title, xlim=(min(c.x_start for c in charts), chart.x_end),
               ylim=(chart.low - margin, chart.high + margin))
        ax.grid(True, color="0.9", linewidth=0.8)
    if tree.runs:
        _draw_tree(axes[-1], tree)
    for ax in axes:
        ax.spines[["top", "right"]].set_visible(False)
    axes[-1].set_xlabel(charts[-1].x_title)
    figure.legend(*axes[len(charts) - 1].get_legend_handles_labels(), loc="outside upper left", ncols=3,
                  frameon=False)
    try:
        with explained(WatchError, path, "name a file that can be written"):
            figure.savefig(path, dpi=110)
    except ValueError as error:
        raise WatchError(f"--out {path}: {error}") from None


def _draw_tree(ax, tree):
    """A lane for every island, divided by the shares of its model, and an arrow for every merge."""
    place = {name: k for k, name in enumerate(tree.lanes)}
    for name, pieces in tree.lanes.items():
        xs = [piece.start for piece in pieces] + [pieces[-1].end]
        low = [place[name] - 0.3] * len(xs)
        for origin, number in tree.numbers.items():
            shares = [piece.shares.get(origin, 0.0) for piece in pieces]
            high = [y + 0.6 * share for y, share in zip(low, shares + shares[-1:])]
            if any(shares):
                ax.fill_between(xs, low, high, step="post", color=f"C{number}", linewidth=0,
                                alpha=1.0 if name in tree.runs else 0.4)
            low = high
    arrow = dict(arrowstyle="-|>", color="0.2", linewidth=0.9, shrinkA=0, shrinkB=0)
    for gift in tree.gifts:
        ax.annotate("", (gift.taken_at, place[gift.taker]), (gift.given_at, place[gift.giver]), arrowprops=arrow)
    for name, x in tree.rejuvenations:
        ax.plot(x, place[name], marker="*", markersize=9, color="white", markeredgecolor="0.2")
    ax.set_yticks(list(place.values()), [island_text(name) for name in place])
    ax.set(ylabel="islands", ylim=(len(place) - 0.4, -0.6))
    ax.set_title(textwrap.fill(tree.living(), 110), fontsize=9, color="0.35", loc="left")
