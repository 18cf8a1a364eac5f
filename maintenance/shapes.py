"""A table of models of many shapes: what this machine reaches with each of them (docs/BENCHMARKS.md)."""

import gc
import sys

import egg_config
from engine import engines, hardware
from model import parameters
from tools import bench

BYTES = {**egg_config.PRESETS["best-bytes-weights"], "CHUNK_SIZE": 65536}
# name: the constants that differ from those of this run; docs/BENCHMARKS.md lists the figures
SHAPES = {
    "default": {},
    "H64": dict(HIDDEN_DIM=64),
    "H128": dict(HIDDEN_DIM=128),
    "H320": dict(HIDDEN_DIM=320),
    "T128": dict(SEQ_LEN=128, CHUNK_SIZE=20480),
    "T256": dict(SEQ_LEN=256, CHUNK_SIZE=10240),
    "H512": dict(HIDDEN_DIM=512, N_LAYERS=8, CHUNK_SIZE=16384),
    "H512-T128": dict(HIDDEN_DIM=512, N_LAYERS=8, SEQ_LEN=128, CHUNK_SIZE=8192),
    "H768": dict(HIDDEN_DIM=768, N_LAYERS=12, SEQ_LEN=128, VOCAB_SIZE=32768, CHUNK_SIZE=4096),
    "H1024": dict(HIDDEN_DIM=1024, HEAD_DIM=128, N_LAYERS=12, SEQ_LEN=256, CHUNK_SIZE=2048),
    "best": {**egg_config.PRESETS["best"], "CHUNK_SIZE": 32768},
    "gru-H64": {**BYTES, "HIDDEN_DIM": 64},
    "gru-H96": {**BYTES, "HIDDEN_DIM": 96},
    "gru-H128": {**BYTES, "HIDDEN_DIM": 128},
    "gru-H512": {**BYTES, "HIDDEN_DIM": 512, "CHUNK_SIZE": 32768, "POPULATION_SIZE": 32768},
    "gru-V8192": {**BYTES, "SEQ_LEN": 64, "VOCAB_SIZE": 8192, "DETOKENIZE": 0, "SOFT_TARGETS": (),
                  "CHUNK_SIZE": 16384, "POPULATION_SIZE": 16384},
    "nano-egg": egg_config.PRESETS["nano-egg"],
    "best-bytes": BYTES,
}
MOST_FOR_CPU = 16e6        # multiply-adds a token of a shape that is measured on a CPU


def print_table(cfg, names, device, threads, whole_steps):
    """Prints a line for each named shape, [] for all, and instruction: evaluation of a chunk, the same operations as a
    share of what the device can do, update; with whole_steps also a step through coordinator and worker, and the share
    of it that is neither evaluation nor update."""
    if unknown := [name for name in names if name not in SHAPES]:
        raise egg_config.UsageError(f"no shape {unknown[0]!r}: there is {', '.join(SHAPES)}")
    if device == "cpu":
        instructions, peak = ["auto"], 2 * bench.numpy_rate()
    else:
        from engine import cuda_engine
        has_wgmma, peak = cuda_engine.card(int(device.partition(":")[2]))
        instructions = ["wgmma", "mma"] if has_wgmma else ["mma"]
        instructions = [x for x in instructions if cfg.TENSOR_CORES in ("auto", x)] or [cfg.TENSOR_CORES]
    bench.print_machine()
    what = "float32 matrix products of NumPy" if device == "cpu" else "int8 products at the highest clock"
    print(f"{device}; 100 %: {peak / 1e12:,.2f} TOP/s, {what}")
    print(f"{'name':10} {'shape':37} {'engine':8} {'members':>7} {'M tokens/s':>10} {'TOP/s':>7} {'share':>7} "
          f"{'update ms':>9}" + f" {'step ms':>9} {'beyond':>7}" * whole_steps, flush=True)
    wanted = [(name, instruction) for name in names or SHAPES for instruction in instructions]
    for i, (name, instruction) in enumerate(wanted):
        print(f"egg: {name}, {i + 1} of {len(wanted)}", file=sys.stderr, flush=True)
        try:
            line = _measure(cfg, name, instruction, device, threads, peak, whole_steps)
        except (egg_config.EggError, MemoryError, ValueError) as error:
            line = f"{name:10} {error}"
        print(line, flush=True)
        gc.collect()                                         # the memory of this engine goes before the next is made


def _measure(cfg, name, instruction, device, threads, peak, whole_steps):
    """The line of a shape in the table."""
    shape = cfg.changed(**{"POPULATION_SIZE": 0, **SHAPES[name], "TENSOR_CORES": instruction})
    per_token = parameters.products_per_token(shape)
    if device == "cpu" and per_token > MOST_FOR_CPU:
        return f"{name:10} {bench.shape_text(shape):37} needs a GPU: {per_token / 1e6:.0f} M multiply-adds a token"
    tokens = bench.random_tokens(shape)
    shape = bench.for_cpu(shape, tokens, threads) if device == "cpu" else shape
    engine, fitness = engines.make(shape, tokens, device, threads), bench.random_fitness(shape)
    evaluation = bench.median_seconds(lambda: engine.evaluate(0, shape.CHUNK_SIZE))
    update = bench.median_seconds(lambda: engine.update(fitness))
    speed = shape.CHUNK_SIZE * shape.SEQ_LEN / evaluation
    kind = engine.name.split()[1] if device == "cpu" else instruction      # "cpu vnni512 x2"
    line = (f"{name:10} {bench.shape_text(shape):37} {kind:8} {shape.CHUNK_SIZE:7,} {speed / 1e6:10.3f} "
            f"{2 * speed * per_token / 1e12:7.2f} {2 * speed * per_token / peak:7.1%} {update * 1e3:9.2f}")
    if not whole_steps:
        return line
    del engine                                               # its memory is for the worker
    gc.collect()
    step, found = bench.whole_step(shape, tokens, device, threads, 5)
    if step is None:
        return f"{line}  {found}"
    beyond = 1 - (-(-shape.N_CHUNKS // len(hardware.devices(shape))) * evaluation + update) / step
    return line + f" {step * 1e3:9.2f} {beyond:7.1%}"
