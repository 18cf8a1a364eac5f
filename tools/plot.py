"""The curves of runs, side by side, and which islands they descend from: in the terminal, or as a picture with matplotlib."""

import math
import os
import shutil
import sys
import textwrap

import egg_net
from cluster.event_log import WatchError
from tools.curves import read_curve

ROWS = 12                  # lines of one chart in the terminal
LABEL = 8                  # columns for the numbers left of it
NAME = 32                  # characters of an island's name
MOST_NAMED = 6             # islands in a line of text
LEAST = 0.01               # a smaller share of a model is no descent any more
COLOURS = ("33", "36", "35", "32", "34", "31")         # of the runs, in the terminal
BRAILLE = ((0x01, 0x02, 0x04, 0x40), (0x08, 0x10, 0x20, 0x80))      # dots of a character: [column][row]
TIME = ((1, "s"), (60, "min"), (3600, "h"), (86400, "days"))
COUNT = ((1, ""), (1e3, "thousand "), (1e6, "million "), (1e9, "billion "), (1e12, "trillion "))
POINTS = 2000              # of a curve that are drawn at most, each the mean of its neighbours


def plot(runs, x="tokens", out=None):
    """Draws the curves of `runs` (save directories or JSON logs) against `x`: "tokens", "time" or "steps". out: a picture's file, None
    for the terminal. Raises WatchError."""
    curves = _named([read_curve(run) for run in runs], runs)
    charts = [chart for chart in (Chart("validation", curves, x), Chart("loss", curves, x)) if chart.lines]
    tree = Tree(curves, charts[0])
    if out is None:
        sys.stdout.write(terminal(charts, [curve.name for curve in curves], tree))
    else:
        picture(charts, [curve.name for curve in curves], out, tree)


def _named(curves, runs):
    """Every curve under a name of its own: the directory's, or where two have the same one all that was given."""
    names = [curve.name for curve in curves]
    return [c._replace(name=run if names.count(c.name) > 1 else c.name) for c, run in zip(curves, runs)]


class Chart:
    """One quantity of all runs. lines: [(number of the run, [(x, y)])]; title, x_title: words for the axes; references: {name: y}."""

    def __init__(self, what, curves, x):
        self.column = column = {"steps": 0, "tokens": 1, "time": 2}[x]
        points = [getattr(curve, what) for curve in curves]
        units = sorted({curve.unit for curve in curves if curve.validation})
        self.title = f"validation, {' or '.join(units)}" if what == "validation" else "training loss"
        furthest = max(p[-1][column] for curve in curves for p in (curve.loss, curve.validation) if p)
        # two minutes are told in seconds, two million in millions
        scales, least = (TIME, 2) if x == "time" else (COUNT, 1)
        size, unit = max([scale for scale in scales if least * scale[0] <= furthest] or scales[:1])
        self.size = size
        self.x_title = f"time of training, {unit}" if x == "time" else f"{unit}{x}"
        self.x_end = furthest / size or 1.0
        self.lines = [(i, thinned([(p[column] / size, p[3]) for p in line])) for i, line in enumerate(points) if line]
        ys = [y for _, line in self.lines for _, y in line]
        self.low, self.high = (min(ys), max(ys)) if ys else (0.0, 1.0)
        self.references = {}
        if what == "validation" and len(units) == 1:
            near = (self.high - self.low) / 2
            self.references = {k: y for curve in curves for k, y in curve.references.items() if self.low - near < y < self.high + near}
            heights = [self.low, self.high, *self.references.values()]
            self.low, self.high = min(heights), max(heights)
        if self.high - self.low < 1e-9:
            self.low, self.high = self.low - 0.05, self.high + 0.05


class Tree:
    """The family of the islands among the runs, and of those that they took from. numbers: {name: of the run, or beyond those};
    lanes: {name: [(from x, to x, {origin: share})]}, what its model descends from; edges: [(giver, x, taker, x)]; pushes: [(name, x)];
    here: the names of those whose runs are here. `chart` has the scale of x."""

    def __init__(self, curves, chart):
        self.here = {}                               # of two runs of one island that which went further
        for curve in curves:
            if curve.island and (curve.island not in self.here or self.here[curve.island].steps < curve.steps):
                self.here[curve.island] = curve
        merges = sorted(((m, name) for name, curve in self.here.items() for m in curve.merges), key=lambda pair: pair[0].time)
        self.numbers = {name: curves.index(curve) for name, curve in self.here.items()}
        for merge, _ in merges:
            self.numbers.setdefault(merge.peer, len(curves) + len(self.numbers.keys() - self.here.keys()))
        lives = {name: [(0, "", {name: 1.0})] for name in self.numbers}            # [(step, digest, {origin: share})]
        self.edges = []

        def x(name, step, otherwise=None):
            return self.here[name].at(step)[chart.column] / chart.size if name in self.here else otherwise

        for m, name in merges:
            # a state of the very step at which the giver took one in itself is that from before or from behind it
            theirs = next((whose for step, digest, whose in reversed(lives[m.peer]) if step < m.peer_step or digest == m.theirs),
                          lives[m.peer][0][2])
            ours = lives[name][-1][2]
            mixed = {k: (1 - m.share) * ours.get(k, 0.0) + m.share * theirs.get(k, 0.0) for k in ours | theirs}
            lives[name].append((m.step, m.digest, {k: share for k, share in mixed.items() if share}))
            self.edges.append((m.peer, x(m.peer, m.peer_step, x(name, m.step)), name, x(name, m.step)))
        self.pushes = [(name, x(name, step)) for name, curve in self.here.items() for step, in curve.rejuvenations]
        self.lanes = {}
        for name, life in lives.items():
            starts = [x(name, step, 0.0) for step, _, _ in life]
            end = x(name, self.here[name].steps) if name in self.here else max(at for giver, at, _, _ in self.edges if giver == name)
            self.lanes[name] = [(a, b, whose) for a, b, (_, _, whose) in zip(starts, starts[1:] + [end], life)]

    def descent(self, name):
        """[(origin, share)] of what an island's model is now, the largest first."""
        return sorted(((k, v) for k, v in self.lanes[name][-1][2].items() if v >= LEAST), key=lambda pair: (-pair[1], pair[0]))

    def living(self):
        """str: which lines live on, and on how many of the islands whose runs are here."""
        found = {}
        for name in self.here:
            for origin, _ in self.descent(name):
                found[origin] = found.get(origin, 0) + 1
        gone = [word(name) for name in self.here if name not in found]
        lines = [f"{word(k)} on {n}" for k, n in sorted(found.items(), key=lambda pair: (-pair[1], pair[0]))]
        return f"lines that live on {len(self.here)} islands: {some(lines)}" + (f"; gone: {some(gone)}" if gone else "")


def word(name):
    """The name of an island, which is a stranger's text."""
    return egg_net.one_line(name, NAME) or "?"


def some(words):
    """The first of them, and how many there are beyond."""
    return ", ".join(words[:MOST_NAMED] + [f"and {len(words) - MOST_NAMED} more"] * (len(words) > MOST_NAMED))


def thinned(points):
    every = -(-len(points) // POINTS)
    groups = [points[k:k + every] for k in range(0, len(points), every)]
    return [tuple(sum(column) / len(group) for column in zip(*group)) for group in groups]


def ticks(low, high, count):
    """([position], decimals) of about `count` round numbers from low to high, 1, 2 or 5 times a power of ten apart."""
    rough = (high - low) / max(count, 1)
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(m * power for m in (1, 2, 5, 10) if m * power >= rough * 0.999)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [k * step for k in range(first, last + 1)], max(0, -math.floor(math.log10(step) + 1e-9))


# --- the terminal ----------------------------------------------------------------------------------------------------------

def terminal(charts, names, tree, stream=sys.stdout, width=None):
    """str: the charts and the Tree in characters, `width` columns wide (default: the terminal's). Braille dots where the stream can show
    them and runs can be told apart, by colour or because there is one; else a letter for every run."""
    coloured = stream.isatty() and not os.environ.get("NO_COLOR")
    dots = (coloured or len(names) == 1) and _can(stream, "\u28ff")
    width = max(width or shutil.get_terminal_size().columns, LABEL + 4)
    frame = ("\u2502", "\u2500", "\u2514", "\u2524", "\u252c") if _can(stream, "\u2502\u2524") else ("|", "-", "+", "+", "+")

    def paint(text, i):
        return f"\x1b[{COLOURS[i % len(COLOURS)]}m{text}\x1b[0m" if coloured else text

    out = []
    for chart in charts:
        out += [chart.title, *_rows(chart, width, dots, frame, paint), ""]
    if tree.here:
        out += ["islands: who most of a model descends from, in capitals where it was taken in", *_lanes(tree, charts[0], width, frame, paint), ""]
    of = {tree.numbers[island]: island for island in tree.here}
    for i, name in enumerate(names):
        ends = ", ".join(f"{chart.title.partition(',')[0]} {line[-1][1]:.4g}" for chart in charts for k, line in chart.lines if k == i)
        family = "; island {}, of {}".format(word(of[i]), some([f"{v:.0%} {word(k)}" for k, v in tree.descent(of[i])])) if i in of else ""
        out.append(f"{paint(_letter(i) if of or not dots else '*', i)} {name}: {ends}{family}")
    if tree.here:
        out.append(tree.living())
    text = "\n".join(out) + "\n"
    return text.encode(stream.encoding or "utf-8", "replace").decode(stream.encoding or "utf-8")


def _can(stream, text):
    try:
        text.encode(stream.encoding or "ascii")
        return True
    except (UnicodeError, LookupError):
        return False


def _letter(i):
    return "abcdefghijklmnopqrstuvwxyz"[i % 26]


def _rows(chart, width, dots, frame, paint):
    """The lines of one chart: the curves, the axes and their numbers."""
    columns = width - LABEL - 1
    across, down = (2, 4) if dots else (1, 1)
    cells = {}                                       # (row, column) -> [dots, run]
    for i, line in chart.lines:
        for x, y in _strokes(line, chart, columns * across, ROWS * down):
            cell = cells.setdefault((y // down, x // across), [0, i])
            cell[0] |= BRAILLE[x % across][y % down] if dots else 1
            cell[1] = i
    def row_of(y):
        return round((chart.high - y) / (chart.high - chart.low) * (ROWS - 1))

    numbers, places = ticks(chart.low, chart.high, ROWS / 3)
    at, words = {row_of(y): y for y in numbers}, {row_of(y): f"{name} {y:.2f}" for name, y in chart.references.items()}
    out = []
    for row in range(ROWS):
        text, word = "", words.get(row, "")
        if any((row, column) in cells for column in range(columns - len(word), columns)):
            word = ""                                # half a word says less than none
        word = word.rjust(columns)[-columns:]
        for column in range(columns):
            bits, i = cells.get((row, column), (0, 0))
            text += paint(chr(0x2800 + bits) if dots else _letter(i), i) if bits else word[column]
        label = f"{at[row]:.{places}f} {frame[3]}" if row in at else frame[0]
        out.append(label.rjust(LABEL + 1) + text.rstrip())
    positions, decimals = ticks(0, chart.x_end, max(columns / 12, 1))
    axis, below = [frame[1]] * columns, [" "] * (width + LABEL)
    for x in positions:
        column = min(round(x / chart.x_end * (columns - 1)), columns - 1)
        axis[column] = frame[4]
        text = f"{x:.{decimals}f}"
        start = min(max(LABEL + 1 + column - len(text) // 2, 0), width - len(text))
        below[start:start + len(text)] = text
    return out + [" " * LABEL + frame[2] + "".join(axis), "".join(below).rstrip()[:width], chart.x_title.rjust(width)]


def _lanes(tree, chart, width, frame, paint):
    """The lines of a family: a letter a column, of the island from which most of the model comes there."""
    columns, out = width - LABEL - 1, []

    def column(x):
        return min(max(round(x / chart.x_end * (columns - 1)), 0), columns - 1)

    for name, pieces in tree.lanes.items():
        cells = [(" ", 0)] * columns
        for start, end, whose in pieces:
            i = tree.numbers[max(whose, key=lambda origin: (whose[origin], origin))]
            for at in range(column(start), column(end) + 1):
                cells[at] = _letter(i), i
        for giver, _, taker, x in tree.edges:
            if taker == name:
                cells[column(x)] = _letter(tree.numbers[giver]).upper(), tree.numbers[giver]
        for pushed, x in tree.pushes:
            if pushed == name:
                cells[column(x)] = "!", cells[column(x)][1]
        label = f"{word(name)[:LABEL - 1]} {frame[0]}".rjust(LABEL + 1)
        out.append(label + "".join(paint(text, i) if text != " " else text for text, i in cells).rstrip())
    return out


def _strokes(line, chart, width, height):
    """Every dot (x, y from the top) that the polygon through the points passes, on a grid of width x height dots."""
    def place(point):
        x = point[0] / chart.x_end * (width - 1)
        y = (chart.high - point[1]) / (chart.high - chart.low) * (height - 1)
        return min(max(round(x), 0), width - 1), min(max(round(y), 0), height - 1)

    before = place(line[0])
    yield before
    for point in line[1:]:
        (x0, y0), (x1, y1) = before, place(point)
        n = max(abs(x1 - x0), abs(y1 - y0))
        for k in range(1, n + 1):
            yield round(x0 + (x1 - x0) * k / n), round(y0 + (y1 - y0) * k / n)
        before = x1, y1


# --- a picture -------------------------------------------------------------------------------------------------------------

def picture(charts, names, path, tree):
    """Writes the charts and the Tree to a PNG file (or what else the name ends in and matplotlib knows). Raises WatchError."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise WatchError("--out needs matplotlib: pip install matplotlib; without --out the curves are drawn here") from None
    heights = [3.6] * len(charts) + [0.9 + min(0.35 * len(tree.lanes), 12)] * bool(tree.here)
    figure = Figure(figsize=(9, sum(heights)), layout="constrained")
    axes = figure.subplots(len(heights), 1, sharex=True, squeeze=False, height_ratios=heights)[:, 0]
    for chart, ax in zip(charts, axes):
        for i, line in chart.lines:
            ax.plot(*zip(*line), color=f"C{i}", linewidth=1.6, label=names[i], marker="o" if len(line) == 1 else None)
        for giver, _, taker, x in tree.edges:                # in the giver's colour, where the taker's curve is then
            for line in (line for i, line in chart.lines if i == tree.numbers[taker] and line[0][0] <= x):
                ax.plot(x, _height(line, x), marker="v", markersize=6, color=f"C{tree.numbers[giver]}", markeredgecolor="white", zorder=3)
        for name, y in chart.references.items():
            ax.axhline(y, color="0.45", linewidth=0.9, linestyle=(0, (2, 3)))
            below = y < min(line[-1][1] for _, line in chart.lines)        # on the side where no curve is
            ax.annotate(f"{name} {y:.2f}", (1, y), xycoords=("axes fraction", "data"), xytext=(-4, -11 if below else 3),
                        textcoords="offset points", ha="right", color="0.35", fontsize=9)
        ax.set_ylabel(chart.title)
        margin = 0.08 * (chart.high - chart.low)
        ax.set(xlim=(0, chart.x_end), ylim=(chart.low - margin, chart.high + margin))
        ax.grid(True, color="0.9", linewidth=0.8)
    if tree.here:
        _draw_tree(axes[-1], tree)
    for ax in axes:
        ax.spines[["top", "right"]].set_visible(False)
    axes[-1].set_xlabel(charts[-1].x_title)
    figure.legend(*axes[len(charts) - 1].get_legend_handles_labels(), loc="outside upper left", ncols=3, frameon=False)
    try:
        figure.savefig(path, dpi=110)
    except OSError as error:
        raise WatchError(f"{path}: {error.strerror}: name a file that can be written") from None
    except ValueError as error:
        raise WatchError(f"--out {path}: {error}") from None


def _height(line, x):
    """y of a curve at x, between its points or that of its last."""
    after = next((k for k, point in enumerate(line) if point[0] >= x), None)
    if not after:
        return line[-1][1] if after is None else line[0][1]
    (x0, y0), (x1, y1) = line[after - 1:after + 1]
    return y0 + (y1 - y0) * (x - x0) / (x1 - x0)


def _draw_tree(ax, tree):
    """A lane for every island, as high as the shares of those it descends from, and an arrow for every state that was taken in."""
    place = {name: k for k, name in enumerate(tree.lanes)}
    for name, pieces in tree.lanes.items():
        xs, low = [start for start, _, _ in pieces] + [pieces[-1][1]], [place[name] - 0.3] * (len(pieces) + 1)
        for origin, number in tree.numbers.items():
            shares = [whose.get(origin, 0.0) for _, _, whose in pieces]
            high = [y + 0.6 * share for y, share in zip(low, shares + shares[-1:])]
            if any(shares):
                ax.fill_between(xs, low, high, step="post", color=f"C{number}", alpha=1.0 if name in tree.here else 0.4, linewidth=0)
            low = high
    for giver, start, taker, end in tree.edges:
        ax.annotate("", (end, place[taker]), (start, place[giver]), arrowprops=dict(arrowstyle="-|>", color="0.2", linewidth=0.9,
                                                                                 shrinkA=0, shrinkB=0))
    for name, x in tree.pushes:
        ax.plot(x, place[name], marker="*", markersize=9, color="white", markeredgecolor="0.2")
    ax.set_yticks(list(place.values()), [word(name) for name in place], parse_math=False)
    ax.set(ylabel="islands", ylim=(len(place) - 0.4, -0.6))
    ax.set_title(textwrap.fill(tree.living(), 110), fontsize=9, color="0.35", loc="left", parse_math=False)
