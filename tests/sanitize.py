"""The CUDA engine under the compute-sanitizer of the CUDA toolkit: memcheck and racecheck on every path, and whether
the results are those without them. Needs a GPU. By hand: python -m tests.sanitize [CONFIGURATION...]"""

import concurrent.futures
import hashlib
import re
import subprocess
import sys

import numpy as np

import egg_config
from engine import cuda_engine
from model import rules, steps

# Every path, small enough for tools that slow it down a hundred times. The products of the transformer have BLOCKS
# blocks, so that few members give each a second tile.
GRU = dict(MODEL="gru", VOCAB_SIZE=300, SEQ_LEN=12)
UNITS = dict(PERTURB="units", CHUNK_SIZE=4, ADAPTIVE_NOISE_MODE=0)
EXACT = dict(LOSS="exact", SOFT_TARGETS=((0, 1),))
SMALL = dict(HIDDEN_DIM=96, HEAD_DIM=32, SEQ_LEN=16, VOCAB_SIZE=300, CHUNK_SIZE=8)
DEFAULT = dict(VOCAB_SIZE=300, CHUNK_SIZE=24)
CONFIGURATIONS = {
    "general": SMALL,
    "switches": dict(SMALL, HIDDEN_DIM=64, USE_MUON=1, NTT_MODE=2),
    "default": DEFAULT,
    "default, mma": dict(DEFAULT, TENSOR_CORES="mma"),
    "mode 2": dict(EXACT, VOCAB_SIZE=512, CHUNK_SIZE=20, ADAPTIVE_NOISE_MODE=2),
    "wide": dict(DEFAULT, HIDDEN_DIM=576, SEQ_LEN=72, CHUNK_SIZE=12),
    "gru": dict(GRU, HIDDEN_DIM=64, CHUNK_SIZE=8, STATE_TOKENS=5, OPTIMIZER="ztest"),
    "gru, wide": dict(GRU | EXACT, HIDDEN_DIM=320, CHUNK_SIZE=20),
    "gru, fast": dict(GRU | EXACT, HIDDEN_DIM=256, SEQ_LEN=40, VOCAB_SIZE=256, CHUNK_SIZE=300, SIGMA_SHIFT=4,
                      ADAPTIVE_NOISE_MODE=0),
    "units": dict(GRU | UNITS | EXACT, HIDDEN_DIM=192, SEQ_LEN=40, VOCAB_SIZE=256, MLP_RELU=1, HOST_GAUSSIAN=1),
    "units of a transformer": dict(SMALL | UNITS | EXACT, SEQ_LEN=24),
    "short runs": dict(SMALL | UNITS | EXACT, SEQ_LEN=24, VOTE_LEVELS=7, LOCAL_STEPS=2, USE_MUON=1),
    "units, mma": dict(GRU | UNITS, HIDDEN_DIM=96, STATE_TOKENS=5, HOST_GAUSSIAN=1, TENSOR_CORES="mma"),
}
BLOCKS = 3
PROGRAM = f"from kernels import transformer; transformer.MOST_BLOCKS = {BLOCKS}; " \
    "from tests import sanitize; print(sanitize.digest_of({!r}))"


def config(name):
    return egg_config.make(N_LAYERS=1, **CONFIGURATIONS[name], POPULATION_SIZE=CONFIGURATIONS[name]["CHUNK_SIZE"])


def evaluation(engine):
    """int64 [n]: the losses of a chunk, or its packed digits and its loss."""
    found = engine.evaluate(0, engine.cfg.CHUNK_SIZE)
    return np.array([*found[0], found[1]]) if engine.cfg.PERTURB == "units" else found


def every_verb(engine, tokens, rng):
    """int32 [34, 12]: the texts that an engine writes; it does all else once, but evaluation."""
    cfg = engine.cfg
    digits = rng.integers(-1, 2, (cfg.N_CHUNKS, cfg.CHUNK_DIGITS)).astype(np.int8)
    engine.update(steps.join_digits(cfg, [steps.pack_digits(chunk, cfg.DIGIT_VALUES) for chunk in digits]))
    assert engine.validate(rules.windows(cfg, tokens, 0, 0, 3)[:, cfg.STATE_TOKENS:])[1] == 3 * cfg.SEQ_LEN
    assert len(list(engine.generate([1, 2, 3], 20, 1))) == 20
    texts = rng.integers(0, cfg.VOCAB_SIZE, (34, 12)).astype(np.int32)
    engine.write(texts, rng.integers(1, 9, 34), np.zeros(34, np.uint32), rules.sampling_settings(cfg))
    engine.load(engine.state())
    return texts


def digest_of(name):
    """Every verb of the engine on one configuration, launch by launch: 64 hexadecimal digits of the losses and of the
    state."""
    cuda_engine.Replay = lambda stream, enqueue: enqueue
    cfg, rng = config(name), np.random.default_rng(20240607)
    tokens = rng.integers(0, cfg.VOCAB_SIZE, 20000).astype(np.uint8 if cfg.VOCAB_SIZE == 256 else np.uint32)
    engine = cuda_engine.CudaEngine(cfg, tokens)
    losses = [evaluation(engine), every_verb(engine, tokens, rng).ravel().astype(np.int64), evaluation(engine)]
    return hashlib.sha256(np.concatenate(losses).tobytes()).hexdigest()[:32] + engine.digest().hex()


def run(name, *tool):
    """(digest_of a configuration, or None; lines of output) of a process, under a tool if one is named."""
    done = subprocess.run([*tool, sys.executable, "-c", PROGRAM.format(name)], capture_output=True, text=True)
    lines = (done.stdout + done.stderr).splitlines()
    return next((line for line in lines if re.fullmatch("[0-9a-f]{64}", line)), None), lines


def check(name):
    """Prints what both tools find on a configuration."""
    plain = run(name)[0]                                     # compiles, too
    for tool in "memcheck", "racecheck":
        result, lines = run(name, "compute-sanitizer", "--tool", tool, "--launch-timeout", "300", "--print-limit", "5")
        same = "as without it" if plain and result == plain else "NOT as without it"
        found = [line for line in lines if re.search("Error|Warning|hazard detected", line)]
        summary = next((line.strip("= ") for line in lines if "SUMMARY" in line), lines[-1:])
        print(f"{name}: {tool}: {summary}; results {same}", *found[:5], sep="\n    ", flush=True)


def main():
    with concurrent.futures.ThreadPoolExecutor() as pool:
        list(pool.map(check, sys.argv[1:] or CONFIGURATIONS))


if __name__ == "__main__":
    main()
