"""A table of models of many shapes: what this machine reaches with each of them (lab/MEASUREMENTS.md). With
-D TENSOR_CORES=mma a card with wgmma shows what others have."""

import gc

import egg_config
import lab
from engine import engines, hardware
from model import parameters
from tools import bench

BYTES = {**egg_config.PRESETS["nano-egg"], "N_LAYERS": 1, "CHUNK_SIZE": 65536, "POPULATION_SIZE": 65536}
# name: the constants that differ from those of this run; lab/MEASUREMENTS.md lists the figures
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


def print_table(cfg, names, whole_steps):
    """Prints a line for each named shape: evaluation of a chunk, update; with whole_steps also a step through
    coordinator and worker, and the share of it that is neither evaluation nor update."""
    device = hardware.one_device(cfg)
    bench.print_machine()
    print(f"{'name':10} {'shape':37} {'members':>7} {'M tokens/s':>10} {'TOP/s':>7} {'update ms':>9}"
          + f" {'step ms':>9} {'beyond':>7}" * whole_steps, flush=True)
    for name in names:
        try:
            line = measure(cfg.changed(**{"POPULATION_SIZE": 0, **SHAPES[name]}), device, whole_steps)
        except (egg_config.EggError, MemoryError, ValueError) as error:
            line = str(error)
        print(f"{name:10} {line}", flush=True)
        gc.collect()                                         # the memory of this engine goes before the next is made


def measure(shape, device, whole_steps):
    """The line of a shape in the table, but its name."""
    tokens = bench.random_tokens(shape)
    shape = bench.for_cpu(shape, tokens, None) if device == "cpu" else shape
    engine, fitness = engines.make(shape, tokens, device), bench.random_fitness(shape)
    evaluation = bench.median_seconds(lambda: engine.evaluate(0, shape.CHUNK_SIZE))
    update = bench.median_seconds(lambda: engine.update(fitness))
    speed = shape.CHUNK_SIZE * shape.SEQ_LEN / evaluation
    line = (f"{bench.shape_text(shape):37} {shape.CHUNK_SIZE:7,} {speed / 1e6:10.3f} "
            f"{2e-12 * speed * parameters.products_per_token(shape):7.2f} {update * 1e3:9.2f}")
    if not whole_steps:
        return line
    del engine                                               # its memory is for the worker
    gc.collect()
    step, why = bench.whole_step(shape, tokens, device, None, 5)
    if step is None:
        return f"{line}  {why}"
    beyond = 1 - (-(-shape.N_CHUNKS // len(hardware.devices(shape))) * evaluation + update) / step
    return line + f" {step * 1e3:9.2f} {beyond:7.1%}"


if __name__ == "__main__":
    options = lab.parser(__doc__)
    options.add_argument("shapes", nargs="*", default=SHAPES, help=", ".join(SHAPES) + " (default: all)")
    options.add_argument("--whole-steps", action="store_true", help="also whole steps")
    args = options.parse_args()
    print_table(lab.configuration(args), args.shapes, args.whole_steps)
