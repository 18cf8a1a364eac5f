"""`egg.py bench` with a fake engine, and the table of `python -m lab.shapes` with the real one."""

import re
from types import SimpleNamespace

import numpy as np
from pytest import approx, importorskip

import egg_config
from fakes import CFG, FakeEngine
from lab import shapes
from recordings import HERE
from tools import bench


class Clock:
    """In the place of `time`: a look at it takes 0.1 ms, and all else what it adds."""

    def __init__(self):
        self.now = 0.0

    def perf_counter(self):
        self.now += 1e-4
        return self.now


class Gpu(FakeEngine):
    """Takes a millisecond for four members, and half of that without noise."""
    name, compile_seconds = "cuda:0 fake", 1.0

    def __init__(self, cfg, tokens, device, silent=False):
        super().__init__(cfg)
        self.silent = silent

    def evaluate(self, first, count):
        bench.time.now += count / (8000 if self.silent else 4000)
        return super().evaluate(first, count)


bench_seconds = bench.median_seconds


def test_a_gpu_has_every_figure(monkeypatch, capsys):
    cuda_engine = importorskip("engine.cuda_engine")
    monkeypatch.setattr(bench, "time", Clock())
    monkeypatch.setattr(cuda_engine, "card", lambda device: (True, 2e12))
    monkeypatch.setattr(bench, "median_seconds", lambda run: bench_seconds(run, 0.02))
    monkeypatch.setattr(cuda_engine, "CudaEngine", Gpu)
    monkeypatch.setattr(cuda_engine, "update_times", lambda engine, fitness: {"votes": 1.5, "rest": 0.25})
    monkeypatch.setattr(cuda_engine, "memory", lambda: SimpleNamespace(free=7 << 30, total=8 << 30))
    bench.bench_engine(CFG, np.zeros(1000, np.uint8), "cuda:0", None)
    out = capsys.readouterr().out
    noise, = re.findall(r"noise costs (.*)% of evaluation", out)
    assert float(noise) == approx(50, abs=1)
    for words in ("evaluation  0.03 M tokens/s, 0 TOP/s", "update ", "digest ", "validation ", "generation ",
                  "kernels of the update, ms: votes 1.50, rest 0.25", "device memory in use 1.00 of 8 GiB"):
        assert f"\n{words}" in out


def test_every_shape_is_a_configuration():
    for name, constants in shapes.SHAPES.items():
        assert len(name) <= 10 and len(bench.shape_text(egg_config.make(**constants))) <= 37, name


def test_whole_steps_on_a_cpu(compiled, monkeypatch, capsys):
    """A step lasts longer than its evaluation and update."""
    monkeypatch.chdir(HERE.parent)
    small = {name: value for name, value in CFG.constants().items() if name not in ("SIMD", "DEVICE")}
    monkeypatch.setattr(shapes, "SHAPES", {"small": small, "wrong": dict(HIDDEN_DIM=65)})
    whole_step = bench.whole_step
    monkeypatch.setattr(bench, "whole_step", lambda *args: whole_step(*args[:-1], 0.5))
    monkeypatch.setattr(bench, "median_seconds", lambda run: bench_seconds(run, 0.05))
    shapes.print_table(egg_config.make(DEVICE="cpu"), shapes.SHAPES, True)
    out = capsys.readouterr().out.splitlines()
    name, *_, update, step, beyond = out[-2].split()
    assert name == "small" and float(step) > float(update) > 0 and beyond.endswith("%")
    assert "wrong" in out[-1] and "HIDDEN_DIM" in out[-1]
