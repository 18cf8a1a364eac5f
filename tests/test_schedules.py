"""Switches in distributed and resumed runs; schedules."""

import functools
from contextlib import closing

from numpy import uint8
from numpy.random import default_rng
from pytest import mark, raises

import egg_config
from egg_config import make
from cluster import history
from cluster.history import open_run
from engine.cpu_engine import CpuEngine
from compiling import kernels_for
from coordinators import cluster, replayed
from fakes import any_fitness, step_alone
from readings import BASE, SMALL, configured

COMPILED = ["compiled", "compiled_gru"]                      # for conftest.py
TOKENS = default_rng(1).integers(0, 256, 600).astype(uint8)


# --- distributed, resumed ---------------------------------------------------------------------------------------------

@mark.parametrize("values", [
    dict(USE_MUON=1, NTT_MODE=3, LOSS="exact"),
    dict(MODEL="gru", HEAD_DIM=64, STATE_TOKENS=3, LOSS="exact", AUDIT_RATE=1.0,
         SOFT_TARGETS=((1, 2), (4, 1))),
    dict(NTT_MODE=1, NTT_CAUSAL=0, USE_SAME_DATA=1, OPTIMIZER="sgd", LR_SCHEDULE=((0, 0.1), (3, 0.02))),
    dict(USE_MUON=1, MUON_NS="cubic", NTT_MODE=2, HOST_GAUSSIAN=1, HOST_MASK=7, DEVICE_GAUSSIAN=1, DEVICE_MASK=31,
         ADAPTIVE_NOISE_MODE=2)],
    ids="muon-ntt3 gru-soft-targets ntt1-sgd muon-cubic-ntt2-gaussian-tails".split())
def test_distributed_and_resumed(tmp_path, values):
    """Two workers that compare their digests every step, then a new coordinator that goes on with two new ones: the run
    of one engine."""
    cfg = BASE.changed(**values)
    engine = functools.partial(CpuEngine, cfg, TOKENS, threads=1)
    alone = engine()
    assert any([step_alone(alone)[2] for _ in range(6)])
    for steps in (3, 6):
        workers = [engine(), engine()]
        server = cluster(tmp_path, workers, steps, cfg, save=True)
        assert "not that of others" not in server.said
    assert {one.digest() for one in (*workers, replayed(tmp_path, engine()))} == {alone.digest()}


def test_the_schedule_is_that_of_the_specification_and_data():
    rates = {0: 0.5, 99: 0.5, 100: 0.25, 199: 0.25, 200: 0.125, 10**6: 0.125}
    assert {step: make().learning_rate(step) for step in rates} == rates


def test_a_run_without_a_schedule_is_as_before(tmp_path, monkeypatch):
    """It neither stores nor sends the constant, and goes on although egg_config.py now has a schedule."""
    values = {**SMALL, "LOSS": "exact"}
    with closing(open_run(cfg := make(**values), tmp_path)) as run:
        run.append(any_fitness(cfg, 1), 1, 1)
    assert "SOFT_TARGETS" not in {**cfg.shared(), **cfg.saved()}
    constants, name = egg_config.CONSTANTS, "SOFT_TARGETS"
    monkeypatch.setitem(constants, name, constants[name]._replace(value=((0, 3),)))
    changed, again = make(**values), egg_config.load(environ={}, saved=history.configuration(tmp_path))
    assert "SOFT_TARGETS" in changed.shared() and again.SOFT_TARGETS == ()
    open_run(again, tmp_path).close()
    with raises(history.HistoryError, match=r"SOFT_TARGETS = \[\] there, \[\[0, 3\]\] here"):
        history.read_run(changed, tmp_path)


@mark.parametrize("preset", egg_config.PRESETS)
def test_presets_are_good(preset):
    kernels_for(configured(preset))
