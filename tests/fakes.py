"""Configurations, engines and streams that stand in for real ones."""

import functools
import os
import random
import sys
import threading
import time
import zlib

import numpy as np
from numpy import int8

import egg_config
from model import data_files, parameters, rules, steps
from model.rules import chunk_fitness
from model.steps import pack_digits

# 16 pairs a chunk: no multiple of 5, so chunks and steps are packed differently
CFG = egg_config.make(HIDDEN_DIM=64, HEAD_DIM=32, N_LAYERS=1, SEQ_LEN=8, VOCAB_SIZE=256, CHUNK_SIZE=32,
                      POPULATION_SIZE=128, VALIDATE_EVERY=2, SAMPLE_EVERY=2, SAMPLE_PROMPT=4, SAMPLE_TOKENS=3,
                      AUDIT_RATE=0.0)
# the same with unit trials, where a chunk gives a digit for every weight
UNITS = CFG.changed(MODEL="gru", HEAD_DIM=64, PERTURB="units", LOSS="exact", HOST_GAUSSIAN=1, ADAPTIVE_NOISE_MODE=0)
# what a configuration with an objective has
REWARDED = dict(MODEL="gru", HEAD_DIM=64, PERTURB="units", LOSS="exact", HOST_GAUSSIAN=1, ADAPTIVE_NOISE_MODE=0,
                OBJECTIVE="0" * 64)


def any_fitness(cfg, rng):
    """bytes: a step of random digits; rng: a generator, or its seed."""
    digits = np.random.default_rng(rng).integers(-1, 2, (cfg.N_CHUNKS, cfg.CHUNK_DIGITS)).astype(int8)
    return steps.join_digits(cfg, [pack_digits(chunk) for chunk in digits])


class FakeEngine:
    """Follows the engines' interface; losses (or the digits of a chunk) depend on seed, member and on all fitness so
    far."""

    name = "fake"

    def __init__(self, cfg=CFG, pause=0.0):
        self.cfg = cfg
        self.pause = pause
        self.evaluated = []
        self.loads = -1
        self.load(parameters.initial_state(cfg))

    def load(self, state):
        self.whole = state
        self.weights = state.weights[:8].copy()
        self.step = state.step
        self.seed = state.seed
        self.loads += 1
        self.rest = None

    def state(self):
        weights = np.concatenate([self.weights, self.whole.weights[8:]])
        return parameters.State(weights, self.whole.moments, self.whole.overlay, self.step, self.seed)

    def digest(self):
        """That of state(), of which only the first words change until another one is loaded."""
        state = self.state()
        digest = parameters.Digest(state.step, state.seed)
        digest.update(state.weights[:16].data)
        first = np.array(digest._sums, np.uint64)
        if self.rest is None:
            self.rest = np.frombuffer(parameters.digest_of(state), np.uint64) - first
        return (self.rest + first).tobytes()

    def evaluate(self, first, count):
        assert first % 2 == count % 2 == 0 and count > 0
        self.evaluated.append((self.step, first, count))
        time.sleep(self.pause)
        seed, size = self.seed + zlib.crc32(self.weights), parameters.n_weights(self.cfg)
        losses = (steps.hash32(seed, np.arange(first, first + count, dtype=np.uint64)) % 1000).astype(np.int64)
        if self.cfg.PERTURB == "weights":
            return losses
        digits = (steps.hash32(seed + first, np.arange(self.cfg.CHUNK_DIGITS)) % 3).astype(int8) - int8(1)
        digits[size:] = 0
        return pack_digits(digits, self.cfg.DIGIT_VALUES), int(losses.sum())

    def begin(self, first, count):
        pass

    begin_update = None

    def update(self, fitness):
        steps.check_step(self.cfg, fitness)
        digest = zlib.crc32(fitness, zlib.crc32(self.weights))
        self.weights = np.maximum(np.frombuffer(digest.to_bytes(4, "little") * 2, int8), -127)   # a State has no -128
        self.seed, self.step = steps.next_seed(self.seed, self.step), self.step + 1
        return 100 + self.step

    def validate(self, windows):
        return float(self.step + 1), windows.shape[0] * (windows.shape[1] - 1)

    def generate(self, prompt, count, seed, temp=None, min_p=None, penalty=None):
        yield from [65 + self.step] * count


class FakeObjective:
    """Follows tools.objective.Objective; every chunk votes from text, and what a `reward(engine)` gives is measured."""

    pace = ()

    def chunk(self, engine, first, check):
        return engine.evaluate(first, engine.cfg.CHUNK_SIZE)[0], 0

    def measured(self, engine):
        return 4, self.reward(engine), {"news": "", "numbers": {}}


def step_alone(engine):
    """(packed fitness, losses, weights changed) of a whole step of an engine without a network."""
    size = engine.cfg.CHUNK_SIZE
    found = [engine.evaluate(first, size) for first in range(0, engine.cfg.POPULATION_SIZE, size)]
    if engine.cfg.PERTURB == "weights":
        found = [(pack_digits(chunk_fitness(losses, engine.cfg)), losses) for losses in found]
    packed, losses = zip(*found)
    fitness = steps.join_digits(engine.cfg, packed)
    return fitness, np.hstack(losses), engine.update(fitness)


def expected(steps, cfg=CFG):
    """([packed fitness of each step], digest) as one engine without a network does it."""
    engine = FakeEngine(cfg)
    return [step_alone(engine)[0] for _ in range(steps)], engine.digest()


def full(*_):
    """What a full disk does."""
    raise OSError(28, "No space left on device")


class Lines:
    """A stream that remembers what was printed."""

    encoding = "utf-8"

    def __init__(self, terminal=False):
        self.text, self.terminal = "", terminal

    def isatty(self):
        return self.terminal

    def write(self, text):
        self.text += text

    def flush(self):
        pass


class Dice(random.Random):
    """In the place of `random` in the cluster's modules. It is not the generator that hypothesis watches while threads
    of a test draw from it. And a worker that would try again after its test is over ends."""

    def uniform(self, low, high):
        if getattr(threading.current_thread(), "over", False):
            sys.exit()
        return super().uniform(low, high)


GOOD = pack_digits(np.ones(16, int8))
GOOD_STEP = pack_digits(np.ones(CFG.N_PAIRS, int8))
VALIDATION = data_files.Validation(np.zeros((3, 9), np.int32), 12, "bits/byte")
SECRET = b"sixteen bytes or more"


def changed(**constants):
    return CFG.changed(**constants)


def differing(cfg):
    """{name: value}: the constants of cfg, without the local ones, that are not as in egg_config.py."""
    default = egg_config.make().constants() | egg_config.GONE
    return {name: value for name, value in cfg.shared().items() if value != default[name]}


def card(cfg=CFG, **values):
    return {"role": "worker", "id": os.urandom(4).hex(), "name": "peer", "device": "a pencil",
            "config": cfg.saved(), "data": "", **values}


class Liar(FakeEngine):
    """Evaluates wrongly from some step on."""

    def __init__(self, cfg=CFG, start=0, pause=0.0):
        super().__init__(cfg, pause)
        self.start = start

    def evaluate(self, first, count):
        found = super().evaluate(first, count)
        if self.step < self.start:
            return found
        if not isinstance(found, tuple):
            return found[::-1].copy()
        packed, loss = found
        return pack_digits(-rules.unpacked_digits(packed, 5 * len(packed))), loss


class Drifting(FakeEngine):
    """Its weights change by themselves after some step, once."""

    def __init__(self, cfg=CFG, after=3, pause=0.0):
        super().__init__(cfg, pause)
        self.after, self.drifted = after, False

    def update(self, fitness):
        changed = super().update(fitness)
        if self.step >= self.after and not self.drifted:
            self.drifted = True
            self.weights[3] ^= 1
        return changed


def begin_together(engines):
    """The first evaluation of each waits until all have one to do, so that every worker takes part in a short run."""
    all_here = threading.Barrier(len(engines))

    def first(engine, *members):
        del engine.evaluate
        all_here.wait(60)
        return engine.evaluate(*members)

    for engine in engines:
        engine.evaluate = functools.partial(first, engine)


BAD = pack_digits(-np.ones(16, int8))
