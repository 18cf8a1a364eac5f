"""The comparison of both engines on one configuration."""

import time
from unittest import mock

import numpy as np

import egg_config
from model import fitness_digits, parameters, sampling
from compiling import CARDS
from coordinators import until
from recordings import digests

SEED = 20240607
# the constants of an engine that is compared beside that of the configuration itself: other instructions, equal bits
OTHER_INSTRUCTIONS = [{"TENSOR_CORES": "mma"}] if "TENSOR_CORES" in egg_config.CONSTANTS else []


def course(engine, start, windows, prompt, count, seed, settings, texts, lengths):
    """({what: value}, the State at the end): what an engine gives over three steps from the State `start`, a
    validation, a generation, and texts that members and the unperturbed model write behind prompts of these lengths.
    Its own losses make the fitness, so that engines can be compared that do not run side by side."""
    cfg, seen = engine.cfg, {}
    engine.load(start)
    for step in range(3):
        chunks = range(0, cfg.POPULATION_SIZE, cfg.CHUNK_SIZE)
        losses = [engine.evaluate(first, cfg.CHUNK_SIZE) for first in chunks]
        fitness = np.concatenate([fitness_digits.chunk_fitness(x, cfg) for x in losses])
        changed = engine.update(fitness_digits.pack_ternary(fitness))
        seen[f"losses of step {step}"] = np.concatenate(losses).tolist()
        seen[f"update {step}"] = changed, digests(engine.state()), engine.seed
        seen[f"digest after update {step}"] = engine.digest()
    seen["validation"] = engine.validate(windows)
    seen["tokens"] = list(engine.generate(prompt, count, seed, **settings))
    for first_pair, number in (5, len(texts)), (None, len(texts) - 1):
        written, seeds = texts[:number].copy(), np.arange(seed, seed + number, dtype=np.uint32) // 2
        engine.write(written, lengths[:number], seeds, sampling.settings(cfg, **settings), first_pair)
        seen[f"texts from pair {first_pair}"] = written.tolist()
    return seen, engine.state()


def compare(constants, seed, ready):
    """Both engines on one configuration, with numbers drawn by `seed`: (what differs between them, as text that is
    empty if nothing does; {part: seconds}). ready: see compile_cpu_engine."""
    from engine import cpu_engine, cuda_engine
    cuda_engine.COMPILERS = 1                                   # this process is one of many
    rng, seconds = np.random.default_rng(seed), {}
    cfg = egg_config.make(**{"LR_SCHEDULE": ((0, 1.2),), **constants})
    tokens = rng.integers(0, cfg.VOCAB_SIZE, 3 * cfg.SEQ_LEN + 200)
    if cfg.SOFT_TARGETS:                                        # of few kinds, so that contexts come back
        tokens = tokens % 5 * (cfg.VOCAB_SIZE // 5)
    tokens = tokens.astype(np.uint8 if cfg.VOCAB_SIZE == 256 else np.uint32)
    start = parameters.initial_state(cfg)
    start.seed = int(rng.integers(2 ** 32))
    longer = int(rng.integers(40)) if cfg.MODEL == "gru" else 0            # VALIDATE_WINDOW
    windows = rng.integers(0, cfg.VOCAB_SIZE, (3, cfg.SEQ_LEN + longer + 1))
    prompt = rng.integers(0, cfg.VOCAB_SIZE, rng.integers(1, 12))
    settings = {name: float(rng.choice(values)) for name, values in
                dict(temp=(0.0, 0.6, 1.5), min_p=(0.0, 0.08, 0.5), penalty=(0.0, 0.2, 1.0)).items()}
    texts = rng.integers(0, cfg.VOCAB_SIZE, (2 * int(rng.integers(1, 20)), 24)).astype(np.int32)
    texts[::3, 1] = 0                                           # which resets the recurrent model
    # often beyond SEQ_LEN
    verbs = dict(start=start, windows=windows, prompt=prompt, count=24 + min(2 * cfg.SEQ_LEN, 100), seed=seed + 1,
                 settings=settings, texts=texts, lengths=rng.integers(1, 12, len(texts)))

    def timed(part, call, *arguments, **more):
        began = time.monotonic()
        result = call(*arguments, **more)
        seconds[part] = time.monotonic() - began
        return result

    gpu = cuda_engine.CudaEngine(cfg, tokens)
    got, end = timed("GPU", course, gpu, **verbs)
    seconds["compiling"] = gpu.compile_seconds
    seconds["GPU"] = max(0.0, seconds["GPU"] - gpu.compile_seconds)
    others, limit, kib = [], cuda_engine.ptx.shared_limit, list(CARDS.values())[seed % len(CARDS)]
    for more in OTHER_INSTRUCTIONS:                              # in the tiles of a card with so much shared memory
        with mock.patch.object(cuda_engine.ptx, "shared_limit", lambda gpu: min(limit(gpu), kib * 1024)):
            other = cuda_engine.CudaEngine(cfg.changed(**more), tokens)
        for state in start, end:                                 # the first and a later state
            other.load(state)
            others.append((more, state, other.evaluate(0, cfg.CHUNK_SIZE).tolist()))
        seconds["compiling, other"] = seconds.get("compiling, other", 0.0) + other.compile_seconds
    timed("waiting for the CPU engine", until, (ready / cfg.MODEL).exists, 400)
    cpu = cpu_engine.CpuEngine(cfg, tokens, threads=1)
    want, _ = timed("CPU", course, cpu, **verbs)
    (nats, count), (nats_gpu, count_gpu) = want.pop("validation"), got.pop("validation")
    wrong = [what for what in want if want[what] != got[what]]
    if count != count_gpu or abs(nats - nats_gpu) > 1e-9 * nats:
        wrong.append(f"validation {nats} {nats_gpu}")
    if "tokens" in wrong:
        wrong.append(f"{want['tokens']} {got['tokens']} with {settings}")
    for more, state, losses in others:
        cpu.load(state)
        if cpu.evaluate(0, cfg.CHUNK_SIZE).tolist() != losses:
            wrong.append(f"losses of step {state.step} with {more} in tiles of {kib} KiB")
    return ", ".join(wrong), seconds
