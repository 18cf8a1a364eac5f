"""`python egg.py bench`: what this machine does, as figures that can be compared: rates beside the machine's own matrix
product, in one run."""

import os
import pathlib
import platform
import statistics
import tempfile
import time

import numpy as np

import egg_config
from model import data_files
from engine import engines
from engine import hardware
from model import parameters
from model import rules
import egg_net
from tools import train

ROUNDS = 5
SMALL = dict(HIDDEN_DIM=128, HEAD_DIM=64, N_LAYERS=2, SEQ_LEN=16, VOCAB_SIZE=512, CHUNK_SIZE=64, DETOKENIZE=0,
             POPULATION_SIZE=0)


def main(cfg, args):
    """Prints the figures of one device; args.gpu and args.threads as for a worker."""
    device = hardware.one_device(cfg, args.gpu)
    print(f"{platform.machine()}, {hardware.cores()} cores, {_processor()}; Python {platform.python_version()}")
    print(f"configuration: H {cfg.HIDDEN_DIM}, L {cfg.N_LAYERS}, T {cfg.SEQ_LEN}, V {cfg.VOCAB_SIZE}, "
          f"{cfg.POPULATION_SIZE} members in {cfg.N_CHUNKS} chunks, loss {cfg.LOSS}, noise mode "
          f"{cfg.ADAPTIVE_NOISE_MODE}, {parameters.products_per_token(cfg) / 1e6:.2f} M multiply-adds a token")
    tokens = _tokens(cfg)
    if device == "cpu":
        bench_cpu(cfg, tokens, args.threads)
    else:
        from engine import cuda_engine
        cuda_engine.bench(cfg, tokens, int(device.partition(":")[2]))
    bench_steps(cfg, tokens, device, args.threads)


def bench_cpu(cfg, tokens, threads):
    """Evaluation against NumPy's float32 matrix product with as many threads, update, validation, generation."""
    from engine import cpu_engine
    seconds = cpu_engine.warm_up(cfg, lambda line: print(line, flush=True), cpu_engine.VERBS)
    print(f"engine ready after {seconds:.1f} s")
    engine = engines.make(cfg, tokens, "cpu", threads)
    print(f"engine {engine.name}")
    per_token = parameters.products_per_token(cfg)
    members = _members(engine, cfg, 0.7)
    rates, ratios = [], []
    for _ in range(ROUNDS):
        gemm = _gemm_rate()
        started = time.perf_counter()
        engine.evaluate(0, members)
        rates.append(members * cfg.SEQ_LEN / (time.perf_counter() - started))
        ratios.append(rates[-1] * per_token / gemm)
        print(f"  evaluation {rates[-1]:10,.0f} tokens/s = {rates[-1] * per_token / 1e9:6.1f} G multiply-adds/s; "
              f"float32 GEMM {gemm / 1e9:6.1f} G; ratio {ratios[-1]:.2f}", flush=True)
    print(f"evaluation  {statistics.median(rates):,.0f} tokens/s; multiply-adds over those of float32 GEMM: "
          f"{statistics.median(ratios):.2f} (medians of {ROUNDS})")
    fitness = np.random.default_rng(1).integers(-1, 2, cfg.N_PAIRS).astype(np.int8)
    started = time.perf_counter()
    engine.update(fitness)
    seconds = time.perf_counter() - started
    print(f"update      {seconds * 1e3:,.0f} ms for {cfg.POPULATION_SIZE:,} members", flush=True)
    times = []
    for _ in range(ROUNDS):
        started = time.perf_counter()
        engine.digest()
        times.append(time.perf_counter() - started)
    size = 13 * parameters.n_weights(cfg)
    print(f"digest      {statistics.median(times) * 1e3:.2f} ms for {size / 1e6:.1f} MB of state")
    windows = rules.windows(cfg, tokens, 0, 0, max(1, members // 2))[:, cfg.STATE_TOKENS:]
    started = time.perf_counter()
    engine.validate(windows)
    print(f"validation  {len(windows) * cfg.SEQ_LEN / (time.perf_counter() - started):,.0f} tokens/s, without noise")
    started = time.perf_counter()
    made = len(list(engine.generate(windows[0, :-1], 64, 1)))
    print(f"generation  {made / (time.perf_counter() - started):,.0f} tokens/s", flush=True)


def bench_steps(cfg, tokens, device, threads):
    """Whole steps through a real coordinator and worker processes on this machine."""
    for name, changes, seconds in ("small chunks (64 members)", SMALL, 2), ("this configuration", {}, 5):
        settings = {**cfg.constants(), **changes}
        shape = egg_config.make(**settings)
        if device == "cpu" and name == "this configuration":
            # a whole population would take minutes: as many members as a few seconds allow, in eight chunks
            engine = engines.make(shape, tokens, device, threads)
            chunk = min(shape.CHUNK_SIZE, _members(engine, shape, seconds / 8))
            shape = egg_config.make(**{**settings, "CHUNK_SIZE": chunk, "POPULATION_SIZE": 8 * chunk})
        with tempfile.TemporaryDirectory() as directory:
            data = pathlib.Path(directory) / "tokens.bin"
            kind = np.uint8 if shape.VOCAB_SIZE == 256 else np.uint32
            (np.asarray(tokens, np.uint32) % shape.VOCAB_SIZE).astype(kind).tofile(data)
            quiet = dict(INPUT_FILE=str(data), DETOKENIZE=0, VALIDATE_EVERY=0, SAMPLE_EVERY=0,
                         DEVICE=device.partition(":")[0])
            settings = egg_config.make(**{**shape.constants(), **quiet})
            did = train.train(settings, minutes=seconds / 20, save_dir=directory, threads=threads,
                              console=egg_net.Console(quiet=True)).coordinator
        steps = did.step - did.first_step
        if not steps:
            print(f"whole steps, {name}: none complete in {3 * seconds} s")
            continue
        print(f"whole steps, {name}: {steps * shape.N_CHUNKS / did.seconds:,.1f} chunks/s, "
              f"{did.tokens / did.seconds:,.0f} tokens/s, {1e3 * did.seconds / steps:,.0f} ms a step of "
              f"{shape.POPULATION_SIZE:,} members", flush=True)


def _tokens(cfg):
    if os.path.exists(cfg.INPUT_FILE):
        return data_files.open_tokens(cfg, cfg.INPUT_FILE)
    print(f"{cfg.INPUT_FILE} is missing: random tokens serve as well here")
    return np.random.default_rng(0).integers(0, cfg.VOCAB_SIZE, 1 << 20).astype(np.uint32)


def _members(engine, cfg, seconds):
    """An even number of members whose evaluation takes about `seconds`, at most a chunk."""
    return max(2, min(cfg.CHUNK_SIZE, int(seconds * train.members_a_second(cfg, engine))) & ~1)


def _gemm_rate(seconds=0.5):
    """Multiply-adds/s of NumPy's float32 matrix product, on all threads that it uses."""
    a, b = (np.random.default_rng(i).random(shape, np.float32) for i, shape in enumerate(((2048, 1024), (1024, 1024))))
    started, done = time.perf_counter(), 0
    while time.perf_counter() - started < seconds:
        a @ b
        done += a.size * b.shape[1]
    return done / (time.perf_counter() - started)


def _processor():
    try:
        lines = pathlib.Path("/proc/cpuinfo").read_text().splitlines()
        names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
        return next(names, "unknown processor")
    except OSError:
        return platform.processor() or "unknown processor"
