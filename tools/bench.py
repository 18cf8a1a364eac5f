"""`python egg.py bench`: what this machine does, as figures that can be compared: evaluation beside the machine's own
matrix product, the other verbs of an engine, and whole steps through a real coordinator and its workers."""

import functools
import json
import pathlib
import platform
import re
import statistics
import tempfile

import numpy as np

from cluster.console import Console
from cluster.history import EVENTS
from engine import hardware
from model import data_files, parameters, rules, steps
from tools import train

ROUNDS = 5
say = functools.partial(print, flush=True)


def bench(cfg, device, threads):
    """Prints the figures of one device; threads: cores of a CPU, None for all."""
    info = pathlib.Path("/proc/cpuinfo")
    match = re.search(r"(?m)^model name\s*: (.*)", info.read_text() if info.exists() else "")
    processor = match[1] if match else platform.processor() or "unknown processor"
    say(f"{platform.machine()}, {hardware.cores()} cores, {processor}; Python {platform.python_version()}")
    on_weights = cfg.PERTURB == "weights"
    say(f"configuration: {'recurrent ' * (cfg.MODEL == 'gru')}H {cfg.HIDDEN_DIM} L {cfg.N_LAYERS} T {cfg.SEQ_LEN} V "
        f"{cfg.VOCAB_SIZE}, {train.read_a_step(cfg)} in {cfg.N_CHUNKS} chunks, loss {cfg.LOSS}, "
        + (f"noise mode {cfg.ADAPTIVE_NOISE_MODE}" if on_weights else "unit trials"))
    tokens = data_files.open_tokens(cfg, cfg.INPUT_FILE)
    if device == "cpu":
        from engine import cpu_engine
        cpu_engine.warm_up(cfg, say, cpu_engine.VERBS)
    engine = train.make_engine(cfg, tokens, device, threads)
    some = cfg.CHUNK_SIZE
    if device == "cpu" and on_weights:               # a whole chunk would take minutes
        some, _ = train.few(cfg, engine)
    bench_engine(cfg, engine, tokens, some, device)
    if some < cfg.CHUNK_SIZE:
        cfg = cfg.changed(CHUNK_SIZE=some, POPULATION_SIZE=8 * some)
    bench_steps(cfg, device, threads)


def bench_engine(cfg, engine, tokens, some, device):
    """Evaluation of some members or windows, then update, digest, validation and generation."""
    count, per_token = some * cfg.LOCAL_STEPS * cfg.SEQ_LEN, parameters.products_per_token(cfg)
    if cfg.PERTURB == "units":                       # forward, back, and to vote
        per_token *= 3
    seconds = median_seconds(lambda: engine.evaluate(0, some))
    work, limit, name = count * per_token / seconds, *peak(device)
    say(f"evaluation  {count / seconds:,.0f} tokens/s on {engine.name}, {seconds * 1e3:.1f} ms for {count:,} tokens; "
        f"{work / 1e9:,.0f} G multiply-adds/s, {work / limit:.2f} times {name}")
    if device == "cpu":
        say("            " + ("good: int8 is as fast as float32 or faster" if work >= limit else
                              "low: another program uses the cores, or the processor has no AVX512-VNNI"))
    digits = np.random.default_rng(1).integers(-1, 2, (cfg.N_CHUNKS, cfg.CHUNK_DIGITS)).astype(np.int8)
    fitness = steps.join_digits(cfg, [steps.pack_digits(chunk, cfg.DIGIT_VALUES) for chunk in digits])
    windows = rules.windows(cfg, tokens, 0, 0, min(some, cfg.POPULATION_SIZE // cfg.MEMBERS))[:, cfg.STATE_TOKENS:]
    prompt, new = np.asarray(tokens[:cfg.SAMPLE_PROMPT], np.int32), 64 if device == "cpu" else 512
    say(f"update      {median_seconds(lambda: engine.update(fitness)) * 1e3:,.2f} ms")
    say(f"digest      {median_seconds(engine.digest) * 1e3:.2f} ms of {parameters.n_weights(cfg):,} weights")
    seconds = median_seconds(lambda: engine.validate(windows))
    say(f"validation  {len(windows) * cfg.SEQ_LEN / seconds:,.0f} tokens/s, without noise")
    seconds = median_seconds(lambda: list(engine.generate(prompt, new, 1)))
    say(f"generation  {new / seconds:,.0f} tokens/s (prompt {len(prompt)}, {new} new)")


def peak(device):
    """(multiply-adds/s that the device may do, what that is)."""
    if device != "cpu":
        from engine import cuda_engine
        return cuda_engine.card(int(device.partition(":")[2]))[1] / 2, "the int8 peak at the highest clock"
    a, b = (np.random.default_rng(i).random(shape, np.float32) for i, shape in enumerate(((2048, 1024), (1024, 1024))))
    return a.size * b.shape[1] / median_seconds(lambda: a @ b), "the float32 product of NumPy"


def bench_steps(cfg, device, threads, seconds=15):
    """Whole steps in a training of some seconds, without validations, samples and snapshots, after the first third of
    the steps, in which the slices of a worker are small."""
    cfg = cfg.changed(VALIDATE_EVERY=0, SAMPLE_EVERY=0, SNAPSHOT_EVERY=0, DEVICE=device.partition(":")[0])
    with tempfile.TemporaryDirectory() as directory:
        train.train(cfg, threads, Console(quiet=True), minutes=seconds / 60, save_dir=directory)
        events = map(json.loads, pathlib.Path(directory, EVENTS).read_text().splitlines())
        ends = [event["elapsed"] for event in events if event["event"] == "step"]
    ends = ends[len(ends) // 3:]
    if len(ends) < 2:
        return say(f"whole steps: fewer than two in {seconds} s")
    step = (ends[-1] - ends[0]) / (len(ends) - 1)
    say(f"whole steps {cfg.STEP_TOKENS / step:,.0f} tokens/s, {1e3 * step:,.1f} ms a step of "
        f"{train.read_a_step(cfg)}, {cfg.N_CHUNKS / step:,.1f} chunks/s")


def median_seconds(run, seconds=0.5):
    """Median time of run(), after two calls that compile, capture and fill caches: of as many as take `seconds`, and
    of ROUNDS where that takes no more than ten times as long. Clocks fall when a device is busy for long."""
    run(), run()
    times = []
    while sum(times) < seconds or len(times) < ROUNDS and sum(times) < 10 * seconds:
        times.append(train.seconds_of(run))
    return statistics.median(times)
