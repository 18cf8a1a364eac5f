"""The comparison of both engines on one configuration."""

from unittest import mock

import numpy as np

import egg_config
from model import parameters, rules
from compiling import CARDS
from coordinators import until
from fakes import any_fitness, step_alone
from readings import as_data, equal, settings_of
from recordings import digests

SEED = 20240607
# the constants of an engine that is compared beside that of the configuration itself: other instructions, equal bits
OTHER_INSTRUCTIONS = dict(TENSOR_CORES="mma")


def begun_ahead(plain, ahead, piece):
    """Gives (step, fitness) of three steps, for the caller's updates, after evaluations with right and wrong
    expectations: the losses of an engine that has begun them, or something else, are those of a plain one. piece:
    members of a chunk."""
    chunk = plain.cfg.CHUNK_SIZE
    for step in range(3):
        for first, count, expected in ((0, piece, (piece, chunk - piece)), (piece, chunk - piece, (chunk, chunk)),
                                       (0, chunk, (chunk, chunk)), (chunk, chunk, (0, chunk)), (2, piece, None),
                                       (chunk, chunk, None)):
            ahead.begin(first, count)
            if expected:
                ahead.begin(*expected)
            losses = ahead.evaluate(first, count)
            equal(losses, plain.evaluate(first, count), (step, first))
            assert (first, count) not in ahead._begun and (expected is None or expected in ahead._begun)
        assert len(np.unique(losses)) > 2
        yield step, any_fitness(plain.cfg, step)
        assert ahead.digest() == plain.digest()
    ahead.begin(0, chunk)
    for engine in plain, ahead:
        engine.load(parameters.initial_state(plain.cfg))
    equal(ahead.evaluate(0, chunk), plain.evaluate(0, chunk), "what was begun before a load is stale")


def course(engine, start, windows, prompt, count, seed, settings, texts, lengths):
    """({what: value}, the State at the end): what an engine gives over three steps from the State `start`, a
    validation, a generation, and texts that it writes together behind prompts of these lengths.
    Its own losses make the fitness, so that engines can be compared that do not run side by side."""
    cfg, seen = engine.cfg, {}
    engine.load(start)
    for step in range(3):
        _, losses, changed = step_alone(engine)
        seen[f"losses of step {step}"] = losses.tolist()
        seen[f"update {step}"] = changed, digests(engine.state()), engine.seed
        seen[f"digest after update {step}"] = engine.digest()
    seen["validation"] = engine.validate(windows)
    seen["tokens"] = list(engine.generate(prompt, count, seed, **settings))
    written, seeds = texts.copy(), np.arange(seed, seed + len(texts), dtype=np.uint32) // 2
    engine.write(written, lengths, seeds, rules.sampling_settings(cfg, **settings))
    seen["texts"] = written.tolist()
    return seen, engine.state()


def compare(constants, seed, ready):
    """Both engines on one configuration, with numbers drawn by `seed`: what differs between them, as text that is empty
    if nothing does. ready: see compile_cpu_engine."""
    from engine import cpu_engine, cuda_engine
    cuda_engine.COMPILERS = 1                                   # this process is one of many
    rng = np.random.default_rng(seed)
    cfg = egg_config.make(**{"LR_SCHEDULE": ((0, 1.2),), **constants})
    tokens = rng.integers(0, cfg.VOCAB_SIZE, 3 * cfg.SEQ_LEN + 200)
    if cfg.SOFT_TARGETS:                                        # of few kinds, so that contexts come back
        tokens = tokens % 5 * (cfg.VOCAB_SIZE // 5)
    tokens = as_data(cfg, tokens)
    start = parameters.initial_state(cfg)
    start.seed = int(rng.integers(2 ** 32))
    longer = int(rng.integers(40)) if cfg.MODEL == "gru" else 0            # VALIDATE_WINDOW
    windows = rng.integers(0, cfg.VOCAB_SIZE, (3, cfg.SEQ_LEN + longer + 1))
    prompt = rng.integers(0, cfg.VOCAB_SIZE, rng.integers(1, 12))
    settings = settings_of(rng)
    texts = rng.integers(0, cfg.VOCAB_SIZE, (int(rng.integers(1, 40)), 24)).astype(np.int32)
    texts[::3, 1] = 0                                           # which resets the recurrent model
    # often beyond SEQ_LEN
    verbs = dict(start=start, windows=windows, prompt=prompt, count=24 + min(2 * cfg.SEQ_LEN, 100), seed=seed + 1,
                 settings=settings, texts=texts, lengths=rng.integers(1, 12, len(texts)))

    gpu = cuda_engine.CudaEngine(cfg, tokens)
    got, end = course(gpu, **verbs)
    others, limit, kib = [], cuda_engine.ptx.shared_limit, list(CARDS.values())[seed // 2 % len(CARDS)]
    # in the tiles of a card with so much shared memory
    if seed % 2:                                                 # compiling takes most of the time
        with mock.patch.object(cuda_engine.ptx, "shared_limit", lambda gpu: min(limit(gpu), kib * 1024)):
            other = cuda_engine.CudaEngine(cfg.changed(**OTHER_INSTRUCTIONS), tokens)
        for state in start, end:                                 # the first and a later state
            other.load(state)
            others.append((state, other.evaluate(0, cfg.CHUNK_SIZE).tolist()))
    until((ready / cfg.MODEL).exists, 400)
    cpu = cpu_engine.CpuEngine(cfg, tokens, threads=1)
    want, _ = course(cpu, **verbs)
    (nats, count), (nats_gpu, count_gpu) = want.pop("validation"), got.pop("validation")
    wrong = [what for what in want if want[what] != got[what]]
    if count != count_gpu or abs(nats - nats_gpu) > 1e-9 * nats:
        wrong.append(f"validation {nats} {nats_gpu}")
    if "tokens" in wrong:
        wrong.append(f"{want['tokens']} {got['tokens']} with {settings}")
    for state, losses in others:
        cpu.load(state)
        if cpu.evaluate(0, cfg.CHUNK_SIZE).tolist() != losses:
            wrong.append(f"losses of step {state.step} with {OTHER_INSTRUCTIONS} in tiles of {kib} KiB")
    return ", ".join(wrong)
