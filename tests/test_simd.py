"""The vector instructions of the CPU engine: every kind that this processor has gives the same bits."""

import numpy as np
import pytest

from engine import simd
from engine.cpu_engine import CpuEngine
from model import rules
from readings import plain_losses, random_config, shaken
from recordings import python
import test_muon


def hold(kind):
    """Losses of shapes and weights that are drawn against the plain reading, and Muon, which knows a kind by its lanes
    alone; the deep tests hold whole steps of every kind."""
    simd.use(kind)
    for seed in range(100, 106):
        rng = np.random.default_rng(seed)
        cfg = random_config(rng)
        tokens = rng.integers(0, cfg.VOCAB_SIZE, 500).astype(np.uint32)
        engine = CpuEngine(cfg, tokens, threads=1)
        state = shaken(engine, rng)
        assert engine.evaluate(0, 8).tolist() == plain_losses(cfg, state, rules.windows(cfg, tokens, 0, 0, 4), 8)
    if kind == "portable":
        test_muon.test_muon_is_its_plain_reading("cubic", 1, 96)


@pytest.mark.parametrize("kind", [kind for kind in simd.available() if not kind.startswith("vnni")])
def test_every_kind_gives_the_same_bits(kind):
    """Every other test runs the fastest one; vnni256 has the products of vnni512 and the lanes of the others. In a
    process of its own, because numba compiles for one kind; without a search for garbage, which takes a tenth of the
    time of compiling."""
    python("-c", f"import gc, test_simd; gc.disable(); test_simd.hold({kind!r})", PYTHONPATH="tests")
