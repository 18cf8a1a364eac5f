"""`egg.py bench`: every figure, with the real CPU engine and with a fake GPU."""

import re

import numpy as np
from pytest import fixture, importorskip

from fakes import CFG, FakeEngine
from tools import bench


@fixture
def quick(monkeypatch):
    """Everything is measured for a moment."""
    median, steps = bench.median_seconds, bench.bench_steps
    monkeypatch.setattr(bench, "median_seconds", lambda run: median(run, 0.02))
    monkeypatch.setattr(bench, "bench_steps", lambda *arguments: steps(*arguments, seconds=0.5))


def test_a_gpu_has_every_figure(quick, monkeypatch, capsys):
    cuda_engine = importorskip("engine.cuda_engine")
    monkeypatch.setattr(cuda_engine, "card", lambda device: (True, 2e12))
    bench.bench_engine(CFG, FakeEngine(CFG, 0.02), np.zeros(1000, np.uint8), CFG.CHUNK_SIZE, "cuda:0")
    out = capsys.readouterr().out
    speed, = re.findall(r"^evaluation  ([\d,]+) tokens/s on fake", out)
    assert 0.1 < float(speed.replace(",", "")) * 0.02 / (CFG.CHUNK_SIZE * CFG.SEQ_LEN) < 1.01
    assert "times the int8 peak" in out
    for name in "update", "digest", "validation", "generation":
        assert re.search(rf"(?m)^{name} +[\d,.]+ ", out)


def test_a_cpu_has_every_figure(quick, compiled, here, capsys):
    (np.arange(3000) % 251).astype(np.uint8).tofile("input.bin")
    bench.bench(CFG.changed(DEVICE="cpu"), "cpu", None)
    out = capsys.readouterr().out
    times, word = re.search(r" ([\d.]+) times the float32 product of NumPy\n +(good|low): ", out).groups()
    assert word == "good" if float(times) > 1.01 else word == "low" if float(times) < 0.99 else True
    update, = re.findall(r"(?m)^update +([\d,.]+) ms", out)
    step, = re.findall(r"(?m)^whole steps .* tokens/s, ([\d,.]+) ms a step", out)
    assert float(step.replace(",", "")) > 0 and float(update.replace(",", "")) > 0
