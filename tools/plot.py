"""Draws loss, validation and reward of runs: as a picture with matplotlib, or as lines of blocks in the terminal."""

import contextlib
import glob
import shutil

import numpy as np

import egg_config
from cluster import history
from cluster.console import table
from cluster.event_log import WatchError
from egg_config import explained
from tools.curves import Curve, read_curve, thinned

# {--x: (the field of a curves.Point by its number, size of a unit, title)}
AXES = {"steps": (0, 1, "steps"), "tokens": (1, 1e6, "million tokens"), "time": (2, 60, "minutes of training")}
POINTS = 2000              # most points of a curve
BLOCKS = "\u2581\u2582\u2583\u2584\u2585\u2586\u2587\u2588"
WORDS = 40                 # columns beside the blocks of a line in the terminal


def plot(runs, printer, x="tokens", out=None, log=False):
    """Draws the curves of `runs` (save directories or JSON logs) against `x`: "tokens", "time" or "steps", with `log`
    on a logarithmic axis. out: file of the picture; None: `printer` (a console.Printer) gets lines. Raises
    WatchError."""
    curves = [read_curve(run) for run in runs]
    charts = charts_of(curves, x, log)
    if not charts:
        raise WatchError("no step has a place on a logarithmic axis yet: leave --log out")
    if out:
        picture(charts, curves, x, out, log)
        printer.line(f"picture: {out}")
    else:
        for title, lines in charts.items():
            printer.line("\n".join([f"{title}, against {AXES[x][2]}", *sparklines(lines, log)]))


def runs(directories, printer):
    """Prints a table of runs; of none: all in this directory. Raises HistoryError."""
    directories = directories or sorted(filter(history.holds_run, glob.glob("*"))) or [history.newest()]
    constants = [egg_config.load(environ={}, saved=history.configuration(name)).constants() for name in directories]
    rows = []
    for name, values in zip(directories, constants):
        curve = Curve()
        with contextlib.suppress(WatchError):
            read_curve(name, curve)
        best = [f"{min(p.value for p in curve.validation):.4f} {curve.units['validation']}"] if curve.validation else []
        best += [f"reward {max(p.value for p in curve.reward):.4f}"] if curve.reward else []
        differ = [f"{key}={egg_config.text(value):.40}" for key, value in values.items()
                  if any(other[key] != value for other in constants)]
        rows.append((name, str(curve.steps), ", ".join(best), " ".join(differ)))
    printer.line("\n".join(table(("run", "steps", "best", "constants that differ"), rows, 4)))


def charts_of(curves, x, log):
    """{title: {curve: (places, values)}}: every quantity that some of the runs have."""
    field, size, _ = AXES[x]
    charts = {}
    for quantity in "reward", "validation", "loss":
        lines = {}
        units = set()
        for curve in curves:
            points = thinned(getattr(curve, quantity), POINTS)
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
            add_references(ax, set.intersection(*(set(curve.references.items()) for curve in lines)))
        ax.set_ylabel(title)
        ax.grid(color="0.9")
    if log:
        ax.set_xscale("log")
        ax.xaxis.set_major_formatter("{x:g}")
    ax.set_xlabel(x_title)
    figure.legend(drawn.values(), drawn, loc="outside upper left", ncols=3, frameon=False)
    with explained(WatchError, f"--out {out}", "name a file that can be written"):
        figure.savefig(out)


def add_references(ax, references):
    """Marks the simple models, [(name, value)], whose values are among those that are shown."""
    low, high = ax.get_ylim()
    for name, value in references:
        if low < value < high:
            ax.axhline(value, color="0.5", linestyle=":")
            ax.text(1, value, f" {name} {value:.2f}", transform=ax.get_yaxis_transform(), va="center")
