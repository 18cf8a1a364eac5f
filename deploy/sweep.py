"""`egg.py sweep`: trains with a table of settings on a Ray cluster, through Ray Tune, and ranks them by validation.

A trial is a run of `egg.py train` in its own directory. ASHA ends bad trials early. The same command continues an
interrupted sweep: finished trials stay as they are, the others continue from their directories.
"""

import inspect
import os
import tomllib
import zlib

from deploy import ray as cluster
from ray import tune
from ray.tune.schedulers import ASHAScheduler
from ray.tune.search.variant_generator import generate_variants

import egg_config
from cluster.console import Console
from egg_config import UsageError
from model import data_files
from tools import train


class Reporter(Console):
    """The console of a trial. It reports validations to Ray Tune, which may then end the trial."""

    trained = 0.0              # minutes

    def emit(self, event, line):
        super().emit(event, line)
        match event["event"]:
            case "step":
                self.trained = event["elapsed"] / 60
            case "validation":
                tune.report({"validation": event["value"], "unit": event["unit"], "step": event["step"],
                             "minutes": self.trained, "trial": tune.get_context().get_trial_name()})


def distribution(low, high, log=False):
    """What Ray Tune draws from for a range of the table. Raises TypeError, ValueError."""
    if low >= high:
        raise ValueError(f"a range from {low} to {high}: low has to be below high")
    if type(low) is type(high) is int:
        return (tune.lograndint if log else tune.randint)(low, high + 1)
    return (tune.loguniform if log else tune.uniform)(low, high)


def tuner(directory, chosen, defines, constants, preset=None, steps=None, minutes=None, samples=1, grace=0, reduction=2,
          cpus=1, gpus=0):
    """The Tuner of the settings of a table (docs/CLUSTERS.md): a new one, or one that continues the sweep in
    `directory`. chosen: a preset, in place of that of the table; defines: NAME=VALUE, for every trial. Raises
    TypeError, ValueError, AssertionError, ConfigError, DataError for what cannot work."""
    if bool(steps) == bool(minutes):
        raise ValueError("give either steps or minutes, the budget of a trial")
    here = os.getcwd()
    common = egg_config.overrides(chosen or preset, [*defines, "DEVICE=cuda" if gpus else "DEVICE=cpu"])

    def configuration(values):
        values = {name: value for name, (_, value) in common.items()} | values
        return egg_config.load(None, [f"{name}={egg_config.text(value)}" for name, value in values.items()], {})

    def trial(values):
        os.chdir(here)
        to = os.path.join(directory, tune.get_context().get_trial_name())
        train.train(configuration(values), cpus, Reporter(), steps=steps, minutes=minutes, save_dir=to)

    space = {}
    for name, value in constants.items():
        if isinstance(value, list):
            value = tune.grid_search(value)
        elif isinstance(value, dict):
            value = distribution(**value)
        space[name] = value
    for _, values in generate_variants(space):               # an error is reported once, not by every trial
        cfg = configuration(values)
        data_files.open_tokens(cfg, cfg.VAL_FILE)
    trainable = tune.with_resources(trial, {"cpu": cpus, "gpu": gpus})
    if tune.Tuner.can_restore(directory):
        return tune.Tuner.restore(directory, trainable, param_space=space, restart_errored=True)
    unit, budget = ("step", steps) if steps else ("minutes", minutes)
    scheduler = ASHAScheduler(unit, max_t=budget, grace_period=grace or budget / 8, reduction_factor=reduction)
    place, name = os.path.split(directory)
    return tune.Tuner(
        trainable, param_space=space, run_config=tune.RunConfig(name, place),
        tune_config=tune.TuneConfig(metric="validation", mode="min", num_samples=samples, scheduler=scheduler,
                                    trial_name_creator=lambda trial: trial.experiment_tag[:100]))


def sweep(path, preset, defines, directory, address):
    """The command `egg.py sweep`. path: of the table; preset, defines: for every trial; directory: of the trials.
    Returns their directories, the best first. Raises UsageError, RayError, DataError."""
    directory = cluster.lasting(directory or os.path.splitext(path)[0])
    try:
        with open(path, "rb") as file:
            table = tomllib.load(file)
        name = str(zlib.crc32(repr((table, preset, defines)).encode()))      # with other settings: another sweep
        for keys, known, place in ((table, inspect.signature(tuner).parameters, "the table of docs/CLUSTERS.md"),
                                   (table.get("constants", {}), egg_config.CONSTANTS, "egg_config.py")):
            for key in set(keys).difference(known):
                raise UsageError(f"{egg_config.line_of(path, key)}{key}: {place} has no such name")
        planned = tuner(os.path.join(directory, name), preset, defines, **table)
    except (TypeError, ValueError, AssertionError) as error:
        raise UsageError(f"{path}: {error}: docs/CLUSTERS.md has a table") from None
    with cluster.connected(address):
        return rank(planned.fit(), directory)


def rank(results, directory):
    """Prints the trials, ranked by their best validation, and writes ranking.csv. Returns their directories."""
    ranked = results.get_dataframe("validation", "min")
    if "validation" not in ranked:
        raise cluster.RayError("no trial has a validation: lines of Ray Tune above say why")
    ranked = ranked.filter(regex="^(validation|unit|step|config/.*|trial)$").sort_values("validation")
    ranked.columns = ranked.columns.str.removeprefix("config/")
    ranked.to_csv(os.path.join(directory, "ranking.csv"), index=False)
    print(ranked.to_string(index=False))
    print(f"kept in {directory}/ranking.csv; the same command continues trials that were interrupted")
    return [os.path.join(results.experiment_path, name) for name in ranked["trial"]]
