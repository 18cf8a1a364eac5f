"""`python egg.py bench`: what this machine does, as figures that can be compared: rates beside those of NumPy's matrix
product, in one run."""

import functools
import json
import os
import pathlib
import platform
import re
import statistics
import tempfile
import time

import numpy as np

from cluster.history import EVENTS
from engine import engines, hardware
from model import data_files, fitness_digits, parameters, rules
import egg_net
from tools import train

ROUNDS = 5
SLICE_SECONDS = 0.3        # least time of the evaluation from which a speed is estimated
say = functools.partial(print, flush=True)
SMALL = dict(HIDDEN_DIM=128, HEAD_DIM=64, N_LAYERS=2, SEQ_LEN=16, VOCAB_SIZE=512, CHUNK_SIZE=64, DETOKENIZE=0,
             POPULATION_SIZE=0)


def bench(cfg, device, threads):
    """Prints the figures of one device; threads: cores of a CPU, None for all."""
    print_machine()
    say(f"configuration: {shape_text(cfg)}, {cfg.POPULATION_SIZE} members in {cfg.N_CHUNKS} chunks, loss {cfg.LOSS}, "
        f"noise mode {cfg.ADAPTIVE_NOISE_MODE}, {parameters.products_per_token(cfg) / 1e6:.2f} M multiply-adds a "
        "token")
    if os.path.exists(cfg.INPUT_FILE):
        tokens = data_files.open_tokens(cfg, cfg.INPUT_FILE)
    else:
        say(f"{cfg.INPUT_FILE} is missing: random tokens serve as well here")
        tokens = random_tokens(cfg)
    bench_engine(cfg, tokens, device, threads)
    bench_steps(cfg, tokens, device, threads)


def bench_engine(cfg, tokens, device, threads):
    """Evaluation beside the machine's own matrix product, then update, digest, validation and generation."""
    on_cpu = device == "cpu"
    engine, members = evaluation_on_cpu(cfg, tokens, threads) if on_cpu else evaluation_on_gpu(cfg, tokens, device)
    time_of = _once if on_cpu else median_seconds
    fitness, matrices = random_fitness(cfg), sum(t.size for t in parameters.tensors(cfg) if t.matrix)
    seconds = time_of(lambda: engine.update(fitness))
    say(f"update      {seconds * 1e3:,.2f} ms for {cfg.POPULATION_SIZE:,} members, "
        f"{2e-9 * cfg.N_PAIRS * matrices / seconds:,.0f} G operations/s")
    seconds = median_seconds(engine.digest)
    say(f"digest      {seconds * 1e3:.2f} ms for {13e-6 * parameters.n_weights(cfg):.1f} MB of state")
    windows = rules.windows(cfg, tokens, 0, 0, min(members, cfg.N_PAIRS))[:, cfg.STATE_TOKENS:]
    seconds = time_of(lambda: engine.validate(windows))
    say(f"validation  {len(windows) * cfg.SEQ_LEN / seconds:,.0f} tokens/s, without noise")
    prompt, count = np.asarray(tokens[:cfg.SAMPLE_PROMPT], np.int32), 64 if on_cpu else 512
    seconds = time_of(lambda: list(engine.generate(prompt, count, 1)))
    say(f"generation  {count / seconds:,.0f} tokens/s (prompt {len(prompt)}, {count} new)")
    if not on_cpu:
        from engine import cuda_engine
        kernels, memory = cuda_engine.update_times(engine, fitness), cuda_engine.memory()
        say("kernels of the update, ms: " + ", ".join(f"{name} {ms:.2f}" for name, ms in kernels.items()))
        used = (memory.total - memory.free) / 2**30
        say(f"device memory in use {used:.2f} of {memory.total / 2**30:.0f} GiB")


def evaluation_on_cpu(cfg, tokens, threads):
    """Prints evaluation against NumPy's float32 matrix product. Returns (engine, members that take about 0.7 s)."""
    from engine import cpu_engine
    seconds = cpu_engine.warm_up(cfg, say, cpu_engine.VERBS)
    engine = engines.make(cfg, tokens, "cpu", threads)
    say(f"engine {engine.name}, ready in {seconds:.1f} s")
    per_token, members = parameters.products_per_token(cfg), _members(engine, cfg, 0.7)
    rates, ratios = [], []
    for _ in range(ROUNDS):
        gemm = numpy_rate()
        rates.append(members * cfg.SEQ_LEN / _once(lambda: engine.evaluate(0, members)))
        ratios.append(rates[-1] * per_token / gemm)
        say(f"  evaluation {rates[-1]:10,.0f} tokens/s = {rates[-1] * per_token / 1e9:6.1f} G multiply-adds/s; "
            f"float32 GEMM {gemm / 1e9:6.1f} G; ratio {ratios[-1]:.2f}")
    say(f"evaluation  {statistics.median(rates):,.0f} tokens/s; multiply-adds over those of float32 GEMM: "
        f"{statistics.median(ratios):.2f} (medians of {ROUNDS})")
    return engine, members


def evaluation_on_gpu(cfg, tokens, device):
    """Prints evaluation of a chunk with and without noise. Returns (engine, members of a chunk)."""
    from engine import cuda_engine
    number = int(device.partition(":")[2])
    (_, peak), count = cuda_engine.card(number), cfg.CHUNK_SIZE * cfg.SEQ_LEN

    def evaluation(name, engine):
        seconds = median_seconds(lambda: engine.evaluate(0, cfg.CHUNK_SIZE))
        work = 2 * count / seconds * parameters.products_per_token(cfg)
        say(f"{name}  {count / seconds / 1e6:.2f} M tokens/s, {work / 1e12:.0f} TOP/s, {work / peak:.1%} of the "
            f"peak; {seconds * 1e3:.1f} ms for {count:,} tokens")
        return seconds

    engine = cuda_engine.CudaEngine(cfg, tokens, number)
    say(f"engine {engine.name}, ready in {engine.compile_seconds:.1f} s; int8 peak at the highest clock "
        f"{peak / 1e12:.0f} TOP/s")
    noisy = evaluation("evaluation", engine)
    if cfg.PERTURB == "weights":
        silent = evaluation("  no noise", cuda_engine.CudaEngine(cfg, tokens, number, silent=True))
        say(f"noise costs {1 - silent / noisy:.1%} of evaluation")
    return engine, cfg.CHUNK_SIZE


def bench_steps(cfg, tokens, device, threads):
    """Whole steps through a real coordinator and worker processes on this machine."""
    for name, changes, seconds in ("small chunks (64 members)", SMALL, 2), ("this configuration", {}, 5):
        shape = cfg.changed(**changes)
        if changes and cfg.PERTURB == "activations":         # its chunks are never small
            continue
        if device == "cpu" and not changes and cfg.PERTURB == "weights":     # a whole population would take minutes
            shape = for_cpu(shape, tokens, threads)
        step, summary = whole_step(shape, tokens, device, threads, seconds)
        say(f"whole steps, {name}: " + (summary if step is None else
            f"{shape.N_CHUNKS / step:,.1f} chunks/s, {shape.POPULATION_SIZE * shape.SEQ_LEN / step:,.0f} tokens/s, "
            f"{1e3 * step:,.1f} ms a step of {shape.POPULATION_SIZE:,} members"))


# --- what one measurement needs ---------------------------------------------------------------------------------------

def whole_step(cfg, tokens, device, threads, seconds):
    """(seconds of a step, None without two; what was found) in a training of 3 times `seconds`, without validations,
    samples and snapshots, after the first third of its steps, in which the slices of a worker are small."""
    with tempfile.TemporaryDirectory() as directory:
        data = pathlib.Path(directory) / "tokens.bin"
        kind = np.uint8 if cfg.VOCAB_SIZE == 256 else np.uint32
        (np.asarray(tokens, np.uint32) % cfg.VOCAB_SIZE).astype(kind).tofile(data)
        quiet = dict(INPUT_FILE=str(data), DETOKENIZE=0, VALIDATE_EVERY=0, SAMPLE_EVERY=0, SNAPSHOT_EVERY=0,
                     DEVICE=device.partition(":")[0])
        train.train(cfg.changed(**quiet), threads, egg_net.Console(quiet=True), minutes=seconds / 20,
                    save_dir=directory)
        events = [json.loads(line) for line in data.with_name(EVENTS).read_text().splitlines()]
    ends = [event["elapsed"] for event in events if event["event"] == "step"]
    joined = sum(event["event"] == "joined" for event in events)
    summary = f"{len(ends)} steps in {3 * seconds} s, the last after {max(ends, default=0)} s; {joined} workers joined"
    ends = ends[len(ends) // 3:]
    return (ends[-1] - ends[0]) / (len(ends) - 1) if len(ends) > 1 else None, summary


def for_cpu(cfg, tokens, threads):
    """cfg with eight chunks that the CPU engine evaluates in about 2 s."""
    chunk = _members(engines.make(cfg, tokens, "cpu", threads), cfg, 0.25)
    return cfg.changed(CHUNK_SIZE=chunk, POPULATION_SIZE=8 * chunk)


def _once(run):
    """Seconds of a call, for what takes long enough."""
    began = time.perf_counter()
    run()
    return time.perf_counter() - began


def median_seconds(run, seconds=0.5):
    """Median time of run(), after two calls that compile, capture and fill caches: ROUNDS calls, or more where these
    take less than `seconds`, as clocks fall when a device is busy for long."""
    run(), run()
    times = []
    while len(times) < ROUNDS or sum(times) < seconds:
        times.append(_once(run))
    return statistics.median(times)


def random_fitness(cfg):
    return fitness_digits.pack_ternary(np.random.default_rng(1).integers(-1, 2, cfg.STEP_DIGITS).astype(np.int8))


def shape_text(cfg):
    return (f"{'recurrent ' * (cfg.MODEL == 'gru')}H {cfg.HIDDEN_DIM} L {cfg.N_LAYERS} T {cfg.SEQ_LEN} "
            f"V {cfg.VOCAB_SIZE}")


def print_machine():
    info = pathlib.Path("/proc/cpuinfo")
    match = re.search(r"(?m)^model name\s*: (.*)", info.read_text() if info.exists() else "")
    name = match[1] if match else platform.processor() or "unknown processor"
    say(f"{platform.machine()}, {hardware.cores()} cores, {name}; Python {platform.python_version()}")


def random_tokens(cfg):
    kind = np.uint8 if cfg.VOCAB_SIZE == 256 else np.uint32
    return np.random.default_rng(0).integers(0, cfg.VOCAB_SIZE, 1 << 20).astype(kind)


def _members(engine, cfg, seconds):
    """An even number of members whose evaluation takes about `seconds`, at most a chunk; with noise on activations
    always a chunk."""
    if cfg.PERTURB == "activations":
        return cfg.CHUNK_SIZE
    count = 2
    engine.evaluate(0, count)                        # the first evaluation also makes the table of soft targets
    while True:
        started = time.perf_counter()
        engine.evaluate(0, count)
        took = time.perf_counter() - started
        if took > SLICE_SECONDS or count == cfg.CHUNK_SIZE:
            return max(2, min(cfg.CHUNK_SIZE, int(seconds * count / took)) & ~1)
        count = min(4 * count, cfg.CHUNK_SIZE)


def numpy_rate():
    """Multiply-adds/s of NumPy's float32 matrix product, on all threads that it uses."""
    a, b = (np.random.default_rng(i).random(shape, np.float32) for i, shape in enumerate(((2048, 1024), (1024, 1024))))
    started, done = time.perf_counter(), 0
    while time.perf_counter() - started < 0.5:
        a @ b
        done += a.size * b.shape[1]
    return done / (time.perf_counter() - started)
