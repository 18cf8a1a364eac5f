"""`egg.py bench`: every figure, with the real CPU engine and with a fake GPU."""

import re

import numpy as np
from pytest import approx, importorskip

from fakes import CFG, FakeEngine
from tools import bench


class Clock:
    """In the place of `time`: a look at it takes 0.1 ms, and all else what it adds."""

    def __init__(self):
        self.now = 0.0

    def perf_counter(self):
        self.now += 1e-4
        return self.now


class Gpu(FakeEngine):
    """Takes a second for 4,000 members."""
    name = "a fake GPU"

    def evaluate(self, first, count):
        bench.time.now += count / 4000
        return super().evaluate(first, count)


def test_a_gpu_has_every_figure(monkeypatch, capsys):
    cuda_engine = importorskip("engine.cuda_engine")
    monkeypatch.setattr(bench, "time", Clock())
    monkeypatch.setattr(cuda_engine, "card", lambda device: (True, 2e12))
    bench.bench_engine(CFG, Gpu(CFG), np.zeros(1000, np.uint8), CFG.CHUNK_SIZE, "cuda:0")
    out = capsys.readouterr().out
    speed, = re.findall(r"^evaluation  ([\d,]+) tokens/s on a fake GPU", out)
    assert float(speed.replace(",", "")) == approx(4000 * CFG.SEQ_LEN, rel=0.1)
    assert "times the int8 peak" in out
    for name in "update", "digest", "validation", "generation":
        assert re.search(rf"(?m)^{name} +[\d,.]+ ", out)


def test_a_cpu_has_every_figure(compiled, monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)
    (np.arange(3000) % 251).astype(np.uint8).tofile("input.bin")
    median, steps = bench.median_seconds, bench.bench_steps
    monkeypatch.setattr(bench, "median_seconds", lambda run: median(run, 0.02))
    monkeypatch.setattr(bench, "bench_steps", lambda *arguments: steps(*arguments, seconds=2))
    bench.bench(CFG.changed(DEVICE="cpu"), "cpu", None)
    out = capsys.readouterr().out
    times, word = re.search(r" ([\d.]+) times the float32 product of NumPy\n +(good|low): ", out).groups()
    assert word == "good" if float(times) > 1.01 else word == "low" if float(times) < 0.99 else True
    update, = re.findall(r"(?m)^update +([\d,.]+) ms", out)
    step, = re.findall(r"(?m)^whole steps .* tokens/s, ([\d,.]+) ms a step", out)
    assert float(step.replace(",", "")) > 0 and float(update.replace(",", "")) > 0
