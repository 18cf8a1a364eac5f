"""`egg.py sweep`: trains with a table of settings on a Ray cluster, through Ray Tune, and ranks them by validation.

A trial is a run of `egg.py train` in its own directory. ASHA ends bad trials early. The same command continues an
interrupted sweep: finished trials stay as they are, the others continue from their directories.
"""

import contextlib
import csv
import functools
import itertools
import json
import logging
import math
import os
import re
import signal
import tomllib
from typing import NamedTuple

from deploy import ray as cluster
import ray
from ray import tune
from ray.tune.schedulers import ASHAScheduler

import egg_config
from cluster import event_log
from cluster.console import Console, handling, one_line, table
from cluster.history import configuration as configuration_of, holds_run
from egg_config import UsageError, explained
from model import data_files
from tools import curves

NUMBERS = {"steps": (int, 1), "minutes": (float, 0.001), "samples": (int, 1), "grace": (float, 0.001),
           "reduction": (float, 1.1), "cpus": (int, 1), "gpus": (int, 0)}      # setting: type, least value


class Table(NamedTuple):
    """The settings of a sweep (docs/CLUSTERS.md). constants: {name: [value] or {"low", "high", "log"}}."""
    constants: dict
    preset: str = None
    steps: int = None
    minutes: float = None
    samples: int = 1
    grace: float = None
    reduction: float = 2
    cpus: int = 1
    gpus: int = 0


def read_table(path):
    """The Table in a TOML file. Raises UsageError."""
    def need(ok, what):
        if not ok:
            raise UsageError(f"{path}: {what}")

    try:
        with explained(UsageError, path, "give a table of settings (docs/CLUSTERS.md)"), open(path, "rb") as file:
            table = tomllib.load(file)
    except ValueError as error:
        raise UsageError(f"{path} is not TOML: {one_line(str(error))}") from None
    unknown = sorted(table.keys() - set(Table._fields))
    need(not unknown, f"there is no setting {', '.join(unknown)}, only {', '.join(Table._fields)}; constants come "
         "after [constants]")
    for name, (kind, least) in NUMBERS.items():
        value = table.get(name, least)
        need(type(value) in (int, kind) and least <= value < math.inf, f"{name} = {value}: give a "
             f"{'whole ' * (kind is int)}number, {least} or more")
    need(("steps" in table) != ("minutes" in table), "give either steps or minutes, the budget of a trial")
    constants = table.get("constants")
    need(isinstance(constants, dict) and constants, "give the constants to be varied after [constants]")
    for name, value in constants.items():
        if isinstance(value, dict):
            low, high = value.get("low"), value.get("high")
            need(value.keys() <= {"low", "high", "log"} and {type(low), type(high)} <= {int, float} and low < high
                 and (low > 0 or not value.get("log")),
                 f"{name}: a range is {{low = ..., high = ...}}, with log = true for even shares of each factor")
        else:
            constants[name] = value if isinstance(value, list) else [value]
            need(constants[name], f"{name}: the list is empty")
    return Table(**table)


def draw(low, high, log=False):
    """The distribution of Ray Tune for a range."""
    if type(low) is type(high) is int:
        return (tune.lograndint if log else tune.randint)(low, high + 1)
    return (tune.loguniform if log else tune.uniform)(low, high)


def title(trial, names):
    """Name of a trial and of its directory: its number, and its values of the varied constants."""
    values = {name: trial.config[name] for name in names}
    text = ",".join(f"{k}={v:.4g}" if type(v) is float else f"{k}={v}" for k, v in values.items())
    return trial.trial_id.rpartition("_")[2][-3:] + "-" + re.sub(r"[^\w.=,+-]", "_", text)[:80]


# --- a trial ---------------------------------------------------------------------------------------------------------

class Reporter(Console):
    """The console of a trial. It reports each validation to Ray Tune at the end of its step, when all logs have it,
    because Tune may then end the trial. spent: minutes of training before this start."""

    def __init__(self, spent):
        super().__init__()
        self.trained = self.spent = spent
        self.found = None

    def emit(self, event, line):
        super().emit(event, line)
        if event["event"] == "step":
            self.trained = self.spent + event["elapsed"] / 60
            self.report()
        elif event["event"] == "validation":
            self.found = {"validation": event["value"], "unit": event["unit"], "steps": event["step"]}

    def report(self):
        found, self.found = self.found, None
        if found:
            tune.report({**found, "minutes": self.trained})


def run_trial(cfg, files, table, directory):
    """Runs or continues a trial. files: {constant: path}; directory: of all trials."""
    from tools import train
    to, spent = os.path.join(directory, tune.get_context().get_trial_name()), 0.0
    if holds_run(to):
        with contextlib.suppress(event_log.WatchError):          # it ended before its first step
            spent = curves.read_curve(to).loss[-1].seconds / 60
    cfg = cfg.changed(**files, DEVICE="cuda" if table.gpus else "cpu")
    minutes = table.minutes and max(table.minutes - spent, 1e-6)
    console = Reporter(spent)
    train.train(cfg, None if table.gpus else table.cpus, console, steps=table.steps, minutes=minutes, save_dir=to)
    console.report()


class Progress(tune.Callback):
    """A line for each trial that ends."""

    def __init__(self, count):
        self.count, self.done = count, 0

    def on_trial_complete(self, iteration, trials, trial, **info):
        self.done += 1
        last = "{validation:.3f} {unit} after {steps} steps, {minutes:.1f} min".format_map(trial.last_result)
        print(f"{self.done} of {self.count}: {trial}: {last}", flush=True)

    def on_trial_error(self, iteration, trials, trial, **info):
        print(f"{trial}: {cluster.problem(trial.get_error())}", flush=True)


# --- the sweep -------------------------------------------------------------------------------------------------------

def sweep(path, preset, defines, directory, address):
    """The command `egg.py sweep`. path: of the table; preset, defines: for every trial; directory: of the trials.
    Returns their directories, the best first. Raises UsageError, RayError, DataError."""
    table = read_table(path)
    directory = cluster.absolute(directory or os.path.splitext(path)[0])
    # without the secret, which must not stand in the files of Ray Tune
    environ = {name: text for name, text in os.environ.items() if name.startswith("EGG_") and name != "EGG_SECRET"}
    preset = preset or table.preset

    def configuration(values):
        return egg_config.load(preset, [*defines, *(f"{name}={value}" for name, value in values.items())], environ)

    files = check(table, configuration)
    names = [name for name, value in table.constants.items() if isinstance(value, dict) or len(value) > 1]
    remember(directory, json.dumps([table._asdict(), preset, defines], indent=1))

    def trial(values):
        run_trial(configuration(values), files, table, directory)

    trainable = tune.with_resources(trial, {"cpu": table.cpus, "gpu": table.gpus})
    count = table.samples * math.prod(len(v) for v in table.constants.values() if isinstance(v, list))
    os.environ |= {"TUNE_DISABLE_SIGINT_HANDLER": "1", "RAY_AIR_NEW_OUTPUT": "0"}
    logging.getLogger("ray.tune").setLevel(logging.CRITICAL)         # Progress has a line for each error
    with cluster.connected(address):
        if not any(node["CPU"] >= table.cpus and node["GPU"] >= table.gpus for node in cluster.nodes()):
            raise cluster.RayError(f"no node has the {table.cpus} CPUs and {table.gpus} GPUs of a trial: set cpus and "
                                   "gpus in the table, or add a node")
        try:
            tuner = make_tuner(trainable, table, directory, count, functools.partial(title, names=names))
            with interruptible() as stopped:
                results = tuner.fit()
        except (ray.exceptions.RayError, tune.TuneError) as error:
            raise cluster.RayError(f"{cluster.problem(error)}; the same command continues") from None
    if stopped:
        print("interrupted: the same command continues")
    ranked = rank(directory, names)
    if not ranked and not stopped:
        raise cluster.RayError(": ".join(["no trial has a validation", *map(cluster.problem, results.errors[:1])]))
    return [row[-1] for row in ranked]


def check(table, configuration):
    """The data files of the trials, {constant: path}. configuration: makes the Config of a trial of its constants.
    Raises UsageError, DataError for settings that cannot work."""
    choices = [value if isinstance(value, list) else [value["low"], value["high"]]
               for value in table.constants.values()]
    for values in itertools.product(*choices):
        cfg = configuration(dict(zip(table.constants, values)))
        if not cfg.VALIDATE_EVERY or not os.path.isfile(cfg.VAL_FILE):
            raise UsageError(f"VALIDATE_EVERY = {cfg.VALIDATE_EVERY}, VAL_FILE = {cfg.VAL_FILE}: trials are ranked by "
                             "validation: give a number of steps and a file that exists")
    data_files.open_tokens(cfg, cfg.INPUT_FILE)
    return {name: os.path.abspath(getattr(cfg, name)) for name in egg_config.DATA_FILES}


def remember(directory, text):
    """Saves the settings of a sweep. Raises UsageError if the directory holds another sweep."""
    os.makedirs(directory, exist_ok=True)
    with open(os.path.join(directory, "sweep.json"), "a+") as file:
        file.seek(0)
        before = file.read()
        if before not in ("", text):
            raise UsageError(f"{directory} holds a sweep of other settings: give another --save-dir")
        file.write(text[len(before):])


def make_tuner(trainable, table, directory, count, name):
    """The Tuner of a sweep: a new one, or one that continues the sweep in `directory`."""
    place = os.path.join(directory, "tune")
    if tune.Tuner.can_restore(place):
        return tune.Tuner.restore(place, trainable, resume_unfinished=True, restart_errored=True)
    budget, unit = (table.steps, "steps") if table.steps else (table.minutes, "minutes")
    scheduler = ASHAScheduler(unit, "validation", "min", budget, min(table.grace or budget / 8, budget),
                              table.reduction, stop_last_trials=False)
    space = {name: tune.grid_search(value) if isinstance(value, list) else draw(**value)
             for name, value in table.constants.items()}
    return tune.Tuner(trainable, param_space=space, tune_config=tune.TuneConfig(
        scheduler=scheduler, num_samples=table.samples, trial_name_creator=name, trial_dirname_creator=name),
        run_config=tune.RunConfig("tune", directory, callbacks=[Progress(count)], verbose=0,
                                  failure_config=tune.FailureConfig(max_failures=1)))


@contextlib.contextmanager
def interruptible():
    """Yields a list that gets an element by SIGINT or SIGTERM; these also make Tune save its state and end."""
    stopped = []

    def stop(number, _):
        stopped.append(number)
        signal.raise_signal(signal.SIGUSR1)          # asks Tune to stop

    with handling({signal.SIGUSR1: signal.SIG_IGN, signal.SIGINT: stop, signal.SIGTERM: stop}):
        yield stopped


def rank(directory, names):
    """Prints the ranked table of the trials and writes ranking.csv. Returns its rows, the directory last."""
    rows = []
    for run in sorted(filter(holds_run, (os.path.join(directory, name) for name in os.listdir(directory)))):
        with contextlib.suppress(event_log.WatchError):
            curve, constants = curves.read_curve(run), configuration_of(run)
            if curve.validation:
                best = min(curve.validation, key=lambda point: point.value)
                unit = curve.units["validation"]
                rows.append([round(best.value, 4), unit, int(best.step), curve.steps, *map(constants.get, names), run])
    rows.sort(key=lambda row: row[0])
    head = ["validation", "unit", "at step", "steps", *names]
    with open(os.path.join(directory, "ranking.csv"), "w", newline="") as file:
        csv.writer(file).writerows([["rank", *head, "directory"], *([i, *row] for i, row in enumerate(rows, 1))])
    print("\n".join(table(head, [[str(cell) for cell in row[:-1]] for row in rows], len(head))))
    return rows
