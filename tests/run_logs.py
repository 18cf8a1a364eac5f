"""Logs of runs, real and made up, and what is drawn of them."""

import contextlib
import json

import egg_net
from cluster import event_log, history
from cluster.console import Printer
from tools import curves
from fakes import CFG, Lines


A_STEP = dict(step=7, tokens=70, loss=1.5, unit="bits/byte", updates=3, reports=1, learning_rate=0.25, seconds=1.0,
              elapsed=8.0, tokens_per_second=10.0, sent=1, received=2)


def events(path):
    """Those in a file, or of the run in a directory."""
    path = path / history.EVENTS if path.is_dir() else path
    return [json.loads(line) for line in path.read_text().splitlines()]


def of_kind(kind, told):
    return [event for event in told if event["event"] == kind]


@contextlib.contextmanager
def told_to(lines=None, *more, saved=None, **options):
    """The Events of a run, which go to `lines` and to files; saved: the run's own."""
    console = egg_net.Console(lines or Lines())
    with contextlib.closing(history.open_run(CFG, saved)) as run, \
            event_log.Events(CFG, run, console, *more, **options) as told:
        yield told


def write(path, *told):
    """Events, as the last lines of a log."""
    with open(path, "a") as file:
        file.writelines(json.dumps(event) + "\n" for event in told)


def example(path, steps=300, loss=2.0, unit="bits/byte"):
    for k in range(steps):
        told = {"step": k, "tokens": k * 10000}
        if k % 50 == 0:
            write(path, {"event": "validation", "value": 4 * loss * 0.99 ** k, "unit": unit, **told})
        write(path, {"event": "step", "loss": loss * 0.99 ** k, "seconds": 0.5, "elapsed": 0.5 * (k + 1), **told})


def drawn(*paths, **options):
    """[line] of what `plot` prints of runs."""
    stream = Lines()
    curves.plot(paths, Printer(stream), **options)
    return stream.text.splitlines()
