"""Trains with many settings through Ray Tune, ends the worse trials early (ASHA), and ranks them by validation.
`pip install -r requirements/ray.txt`, edit what stands below, then `python examples/sweep.py sweep` where the data are.
It uses the cluster that RAY_ADDRESS names (auto: the one of this machine, or HOST:PORT), else this machine alone. Nodes
share the directories of the data and of the sweep. Ctrl-C keeps everything, and the same command continues; other
settings need another directory."""
import os
import sys

sys.path.append(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
import egg
import egg_use
from egg_config import EggError
from model import data_files

try:
    from deploy import ray as cluster                  # first, because it says how to install Ray
    from ray import tune
    from ray.tune.search.variant_generator import generate_variants
except EggError as error:
    sys.exit(f"sweep: {error}")

PRESET = "laptop-bytes"
STEPS, GRACE = 2000, 200                               # of a trial; before a trial may be ended
SAMPLES = 4                                            # draws of the ranges, for each combination of the lists
CPUS, GPUS = 1, 0                                      # of a trial
SETTINGS = {
    "VALIDATE_EVERY": 50,
    "MUON_LR_SCALE": tune.grid_search([4.0, 6.0, 9.0]),
    "LR_SCHEDULE": tune.grid_search(["0:0.5,200:0.25", "0:0.25"]),
    "ADAM_WEIGHT_DECAY": tune.loguniform(1e-4, 0.1),
    "ISLAND_SEED": tune.grid_search([1, 2])}           # each setting again, with other draws
HERE = os.getcwd()


def options(settings):
    return {"preset": PRESET, "threads": CPUS, "steps": STEPS, "DEVICE": "cuda" if GPUS else "cpu", **settings}


def sweep(directory):
    """Trains in directories below that of the sweep, and prints a table of the runs, the best first."""
    def trial(settings):
        os.chdir(HERE)
        run = os.path.join(directory, tune.get_context().get_trial_name())

        def report(event):                             # ASHA may end the trial here
            if event["event"] == "validation":
                tune.report({"validation": event["value"], "step": event["step"], "run": run})

        egg_use.train(report, save_dir=run, **options(settings))

    for _, settings in generate_variants(SETTINGS):    # an error is told once, not by every trial
        cfg = egg.configured(["train", *egg_use.words(options(settings))])[1]
        data_files.open_tokens(cfg, cfg.VAL_FILE)
    trainable = tune.with_resources(trial, {"cpu": CPUS, "gpu": GPUS})
    if tune.Tuner.can_restore(directory):
        tuner = tune.Tuner.restore(directory, trainable, param_space=SETTINGS, restart_errored=True)
    else:
        asha = tune.schedulers.ASHAScheduler("step", max_t=STEPS, grace_period=GRACE, reduction_factor=2)
        place, name = os.path.split(directory)
        tuner = tune.Tuner(trainable, param_space=SETTINGS, run_config=tune.RunConfig(name, place), tune_config=(
            tune.TuneConfig(metric="validation", mode="min", num_samples=SAMPLES, scheduler=asha)))
    with cluster.connected(os.environ.get("RAY_ADDRESS", "local")):
        trials = tuner.fit().get_dataframe("validation", "min")
    if "run" not in trials:
        raise EggError("no trial has a validation: lines of Ray Tune above say why")
    best_first = trials.dropna(subset="run").sort_values("validation")["run"]
    egg.main(["runs", *best_first])
    print("the same command continues what was interrupted; these runs as curves: python egg.py plot", *best_first)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        print("usage: python examples/sweep.py DIRECTORY", file=sys.stderr)
        sys.exit(2)
    try:
        sweep(cluster.lasting(sys.argv[1]))
    except Exception as error:
        sys.exit(egg.failed(error))
