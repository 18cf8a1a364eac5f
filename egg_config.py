"""Every constant of egg, edited like a config.h.

Edit the values below, or override them for one run: by an environment variable EGG_<NAME>=value, or by -D NAME=VALUE
after a subcommand. The later wins: this file, preset, environment, -D.

The comment behind a value is part of the program: the values that are allowed, who must agree, the meaning.

    all      the coordinator, its workers, the saved run and all islands must have the same value
    run      the same, but islands may differ
    islands  only islands must agree, as they compare their validations; a run keeps the value, but it may change
    free     nobody must agree; a run keeps the value, but it may change at any step
    local    nobody must agree; the value belongs to one machine, or to the coordinator alone

A constant marked (transformer) or (gru) must keep its default with the other model. `python egg_config.py` prints all
this as the tables of docs/CONFIGURATION.md.
"""

import contextlib
import hashlib
import importlib.machinery
import json
import math
import os
import re
import signal
import sys
import types
from collections import namedtuple

# --- model -----------------------------------------------------------------------------------------------------------
MODEL = "transformer"            # transformer, gru | all | `transformer`, or `gru`: the recurrent model of nano-egg
HIDDEN_DIM = 256                 # 64 to 1024    | all     | width of the model; a multiple of 32 and of HEAD_DIM
HEAD_DIM = 64                    # 32, 64, 128   | all     | (transformer) width of one attention head
N_LAYERS = 4                     # 1 to 64       | all     | layers
SEQ_LEN = 64                     # 8 to 1024     | all     | tokens of a training window; with `transformer` a multiple
#                                                            of 8
STATE_TOKENS = 0                 # 0 to 1024     | all     | (gru) tokens before a window from which the unperturbed
#                                                            model makes the initial state; 0: the state is zero
MLP_RELU = 0                     # 0, 1          | all     | (gru) 1: no negative values inside the MLP
VOCAB_SIZE = 8192                # 256 to 262144 | all     | number of tokens; 256: raw bytes
NTT_MODE = 0                     # 0 to 3        | all     | (transformer) embeddings of a transform of the window:
#                                                            0 none, 1 Walsh-Hadamard, 2 modulo 257, 3 modulo 65537
NTT_CAUSAL = 1                   # 0, 1          | all     | (transformer) 1: a coefficient sees no later token; 0: the
#                                                            whole window, as in d-eggs, for comparison only

# --- population ------------------------------------------------------------------------------------------------------
CHUNK_SIZE = 40960               # 2 to 2^24     | run     | members evaluated in one job, with PERTURB = units windows;
#                                                            even: antithetic pairs stay together
POPULATION_SIZE = 0              # 0 to 2^28     | run     | members, or windows, of a step; a multiple of CHUNK_SIZE;
#                                                            0: 8 chunks
GROUP_SIZE = 2                   # 2 to 2^28     | run     | members that read the same tokens; even, a divisor of
#                                                            POPULATION_SIZE

# --- fixed-point arithmetic ------------------------------------------------------------------------------------------
FIXED_POINT = 4                  # 0 to 15       | all     | fractional bits of weights and activations; at most 7 with
#                                                            `gru`
SIGMA_SHIFT = 3                  # 0 to 15       | run     | matrix noise is shifted right by FIXED_POINT + SIGMA_SHIFT:
#                                                            a larger value is quieter
SIGMA_SHIFT_VECTOR = 4           # 0 to 15       | run     | right shift of the noise of biases and norm weights
SHIFT_ATTN = 8                   # 0 to 24       | all     | (transformer) right shift of attention scores: a larger
#                                                            value is softer
SHIFT_OUT = 9                    # 0 to 24       | all     | (transformer) right shift after the output product of
#                                                            attention
SHIFT_LOGIT = 8                  # 0 to 24       | all     | (transformer) right shift after the head
SHIFT_MLP_UP = 8                 # 0 to 24       | all     | (transformer) right shift after the first product of an MLP
SHIFT_MLP_DOWN = 10              # 0 to 24       | all     | (transformer) right shift after the second product of an
#                                                            MLP
SHIFT_QKV = 6                    # 0 to 24       | all     | (transformer) exists in d-eggs; unused there and here
SOFTMAX_SCALE_BIT = 18           # 8 to 18       | all     | fractional bits of the integer exponential
SOFTMAX_LUT_SIZE = 256           # 2 to 256      | all     | entries of its table
SOFTMAX_EXP_SCALE = 6.0          # 0.5 to 64.0   | all     | logit units per nat
ROPE_SCALE_BIT = 20              # 1 to 30       | all     | (transformer) fractional bits of the rotary tables

# --- noise -----------------------------------------------------------------------------------------------------------
HOST_GAUSSIAN = 0                # 0, 1          | run     | 1: an initial weight is the sum of three uniform draws
DEVICE_GAUSSIAN = 0              # 0, 1          | run     | 1: a noise value is the sum of three uniform draws
HOST_MASK = 15                   # 0 to 127      | run     | magnitude mask of an initial weight; at most 42 with
#                                                            HOST_GAUSSIAN
DEVICE_MASK = 15                 # 0 to 127      | run     | magnitude mask of the noise; at most 42 with
#                                                            DEVICE_GAUSSIAN
NOISE_REUSE = 1                  # 0 to 2^30     | run     | steps for which every member keeps its noise; 0: for ever
ADAPTIVE_NOISE_MODE = 1          # 0 to 2        | all     | noise-scale overlay: 0 off, 1 scale, 2 heavy-tailed
ADAPTIVE_NOISE_INIT = 64         # -127 to 127   | run     | its initial value; 64 is a factor of 1 in mode 1
ADAPTIVE_NOISE_INC = 5           # 0 to 127      | run     | increase per update for a row or column that changed
ADAPTIVE_NOISE_DEC = 1           # 0 to 127      | run     | decrease per update for one that did not

# --- estimator -------------------------------------------------------------------------------------------------------
PERTURB = "weights"              # weights, units | all    | `weights`: evolution, noise on the weights of pairs;
#                                                            `units`: unit trials, learn far more from a token

# --- fitness ---------------------------------------------------------------------------------------------------------
LOSS = "deggs"                   # deggs, exact  | all     | `deggs`: the coarse logarithm of d-eggs; `exact`:
#                                                            cross-entropy in fixed point, which trains better
USE_SAME_DATA = 0                # 0, 1          | run     | 1: every pair reads the same window
CHUNK_MEAN_FILTER = 1            # 0, 1          | run     | 1: adds the mean difference of the chunk, raised to
#                                                            CHUNK_MEAN_EXPONENT, to every difference
CHUNK_MEAN_EXPONENT = 1.2        # 0.0 to 4.0    | run     | exponent of CHUNK_MEAN_FILTER
USE_ADAPTIVE_THRESHOLD = 1       # 0, 1          | run     | 1: small differences count as 0
ADAPTIVE_THRESHOLD_ALPHA = 0.1   # 0.0 to 100.0  | run     | their threshold, as a share of the mean size of the
#                                                            differences
VOTE_LEVELS = 1                  # 1 to 7        | run     | with unit trials: the largest digit of a weight: more
#                                                            learn more, and take more bytes
LOCAL_STEPS = 1                  # 1 to 1024     | run     | with unit trials: updates that a chunk makes for itself
#                                                            before it sends how its weights moved; needs VOTE_LEVELS 7
FAST_FITNESS = 0                 # 0, 1          | run     | 1: the sign of the difference, without filter and threshold
SOFT_TARGETS = ()                # contexts 0 to 7 | run   | first step:context, ...; a position is scored against 8
#                                                            tokens that follow the same context (number of tokens)

# --- optimizer -------------------------------------------------------------------------------------------------------
OPTIMIZER = "adamw"              # adamw, sgd, ztest | all | `adamw`, `sgd` (the accumulator collects votes), or `ztest`
#                                                            (significant votes move weights)
LR_SCHEDULE = ((0, 0.5), (100, 0.25), (200, 0.125))     # rates 0.0 to 1000.0 | run | first update:rate, ...; not used
#                                                            by `ztest`. An update is a step, or one of LOCAL_STEPS
ADAM_BETA1 = 0.9                 # 0.0 to 1.0    | run     | decay of the first moment
ADAM_BETA2 = 0.95                # 0.0 to 1.0    | run     | decay of the second moment
ADAM_EPS = 1e-8                  # 0.0 to 1.0    | run     | added to the root of the second moment
ADAM_WEIGHT_DECAY = 0.01         # 0.0 to 1.0    | run     | weight decay of `adamw` and Muon
ZTEST_ALPHA = 4.0                # 1e-6 to 64.0  | run     | `ztest`: share of weights that chance moves; above 1: it
#                                                            falls from 1 to 2^-ZTEST_ALPHA in 1,000 steps
USE_CLT = 1                      # 0, 1          | run     | 0: votes count the signs of the noise instead of the noise
USE_MUON = 0                     # 0, 1          | all     | 1: matrices between hidden units move along their
#                                                            orthogonalised momentum
MUON_MOMENTUM = 0.85             # 0.0 to 0.9999 | run     | share of the momentum that remains after a step
MUON_LR_SCALE = 1.0              # 0.0 to 1000.0 | run     | factor on the learning rate of these matrices; at 1 a step
#                                                            is about as long as that of AdamW
MUON_NS = "quintic"              # quintic, cubic | run    | Newton-Schulz iteration: `quintic` (fast, singular values
#                                                            to 0.7 .. 1.2) or `cubic` (slow, to 1, as in d-eggs)

# --- rewards ---------------------------------------------------------------------------------------------------------
OBJECTIVE = ""                   #               | all     | SHA-256 of the file of --objective, which sets it
OBJECTIVE_TEXTS = 8              # 2 to 1024     | run     | texts that the model writes after a prompt, to compare
TEXT_SHARE = 0.35                # 0.0 to 1.0    | run     | with an objective: share of the chunks that vote from the
#                                                            data, so that the model keeps its language
OBJECTIVE_SECONDS = 60.0         # 0.001 to 1e6  | local   | most seconds for which a batch of texts may be waited for

# --- islands ---------------------------------------------------------------------------------------------------------
ISLAND_SEED = 0                  # 0 to 4294967295 | run   | selects the noise; every island needs another number, all
#                                                            its workers the same
GOSSIP_RATE = 0.01               # 0.0 to 1.0    | local   | probability that an island compares itself with a peer
#                                                            after a step
MERGE = "clone"                  # clone, recombine | local | `clone` takes a better state, `recombine` mixes both by
#                                                            fitness
RECOMBINE_ALPHA = 0.5            # 0.0 to 1.0    | local   | `recombine`: share of the better state if both are equally
#                                                            good
OPTIMIZER_MERGE = "copy"         # reset, copy, interpolate | local | moments after a merge: `reset`, `copy` those of
#                                                            the peer, or `interpolate` as the weights
ELITES = 1                       # 0 to 1000     | local   | number of best states that are kept, whatever is merged
REJUVENATE_AFTER = 0             # 0 to 2^30     | local   | steps without improvement after which moments are reset and
#                                                            noise scales raised; 0: never

# --- sampling and validation -----------------------------------------------------------------------------------------
SAMPLING_TEMP = 0.6              # 0.0 to 100.0  | free    | temperature; 0 always takes the likeliest token
SAMPLING_MIN_P = 0.08            # 0.0 to 1.0    | free    | tokens less likely than this share of the likeliest are
#                                                            cut; 0 cuts none
SAMPLING_PRESENCE_PENALTY = 0.2  # 0.0 to 100.0  | free    | nats, taken once from every token seen
SAMPLE_EVERY = 5                 # 0 to 2^30     | free    | steps between samples during training; 0: none; from 10 on
#                                                            also after a tenth, a fifth and a half of it
SAMPLE_PROMPT = 32               # 1 to 1024     | free    | tokens of the data that a sample continues
SAMPLE_TOKENS = 64               # 1 to 65536    | free    | tokens that a sample adds
VALIDATE_EVERY = 10              # 0 to 2^30     | free    | steps between validations; 0: none; from 10 on also after
#                                                            a tenth, a fifth and a half of it
VALIDATE_TOKENS = 65536          # 0 to 2^40     | islands | most tokens that a validation reads, in windows spread
#                                                            evenly over VAL_FILE; 0: all
VALIDATE_WINDOW = 0              # 0 to 2^20     | islands | (gru) tokens of such a window, which begins with a state
#                                                            of zero; 0: SEQ_LEN

# --- this machine ----------------------------------------------------------------------------------------------------
INPUT_FILE = "input.bin"         #               | local   | training data
VAL_FILE = "val.bin"             #               | local   | held-out data
DECODING_FILE = "decoding.bin"   #               | local   | the bytes of each token
DECODING_SHA256 = ""             #               | local   | of DECODING_FILE, which a saved run keeps: another one is
#                                                            refused
DETOKENIZE = 0                   # 0, 1          | all     | 1, with VOCAB_SIZE 256: the files hold tokens of
#                                                            DECODING_FILE; the model reads their bytes
PORT = 12345                     # 0 to 65535    | local   | TCP port of the coordinator
STRAGGLER_TIMEOUT = 90.0         # 0.1 to 1e6    | local   | seconds after which a silent worker's chunk is handed out
#                                                            again, while the usual time of a chunk is unknown
AUDIT_RATE = 0.01                # 0.0 to 1.0    | local   | share of the chunks that two workers evaluate, if there are
#                                                            two
SNAPSHOT_EVERY = 100             # 0 to 2^30     | local   | steps between snapshots in the save directory; 0: none
KEEP_EVERY = 0                   # 0 to 2^30     | local   | every so many snapshots one is kept for good; 0: none
IDLE_TIMEOUT = 600.0             # 1.0 to 1e6    | local   | seconds after which a silent connection is closed
DEVICE = "auto"                  # auto, cpu, cuda | local | `cpu`, `cuda`, or `auto`: a GPU if there is one
SIMD = "auto"                    # auto, vnni512, vnni256, madd, portable | local | int8 products of the CPU engine
TENSOR_CORES = "auto"            # auto, wgmma, mma | local | int8 products of the CUDA engine: `wgmma` (only H100 and
#                                                            H200), `mma`, or `auto`: the better one

# Sets of values; a schedule stands as after -D: step:value, ...
PRESETS = {
    # The values above as they are.
    "deggs": {},
    # A model of bytes for two cores. 12 logit units are a nat: with more of them the frequent tokens reach the largest
    # logit. Two chunks, so that two machines can share a step. The rate falls with the root of the steps. With less
    # decay the units of the MLP are cut after some thousand steps, and the run becomes worse.
    "laptop-bytes": dict(
        MODEL="gru", PERTURB="units", HIDDEN_DIM=64, N_LAYERS=1, SEQ_LEN=64, VOCAB_SIZE=256, DETOKENIZE=1,
        MLP_RELU=1, CHUNK_SIZE=32, POPULATION_SIZE=64, HOST_GAUSSIAN=1, HOST_MASK=7, LOSS="exact",
        SOFTMAX_EXP_SCALE=12.0, ADAPTIVE_NOISE_MODE=0, ADAPTIVE_THRESHOLD_ALPHA=0.25, VOTE_LEVELS=7, USE_MUON=1,
        MUON_LR_SCALE=6.0, ADAM_BETA1=0.5, ADAM_BETA2=0.99, ADAM_WEIGHT_DECAY=0.0006,
        LR_SCHEDULE="0:0.5, 50:0.463, 100:0.433, 150:0.408, 200:0.387, 300:0.354, 450:0.316, 600:0.289, 900:0.25, "
                    "1200:0.224, 1800:0.189, 2700:0.158, 4000:0.132, 6000:0.109, 10000:0.086, 20000:0.061",
        VALIDATE_EVERY=200, SAMPLE_EVERY=1000),
    # For minutes on large GPUs: two chunks, so that two can share a step, of 16 updates by 512 windows each. Queries
    # and keys are as long as amax makes them, whatever their weights: SHIFT_ATTN makes their scores as large as those
    # of a new float model. Muon moves the matrices between hidden units: with digits AdamW learns far less in four
    # layers. Without decay weights grow until units are cut. The rate falls with the root of the updates, and before a
    # planned end to a twentieth (model.steps).
    "best": dict(
        PERTURB="units", N_LAYERS=4, LOSS="exact", HOST_MASK=7, ADAPTIVE_NOISE_MODE=0,
        ADAPTIVE_THRESHOLD_ALPHA=0.25, VOTE_LEVELS=7, SHIFT_MLP_UP=7, SHIFT_MLP_DOWN=7, SHIFT_OUT=8, SHIFT_ATTN=11,
        CHUNK_SIZE=512, POPULATION_SIZE=1024, LOCAL_STEPS=16, USE_MUON=1, MUON_LR_SCALE=5.0, ADAM_BETA1=0.5,
        ADAM_BETA2=0.99, ADAM_WEIGHT_DECAY=0.002,
        LR_SCHEDULE="0:0.325, 100:0.302, 200:0.282, 400:0.252, 600:0.23, 800:0.213, 1000:0.199, 1500:0.174, "
                    "2000:0.156, 3000:0.133, 4500:0.112, 7000:0.091, 10000:0.078",
        VALIDATE_EVERY=5, SAMPLE_EVERY=5, SNAPSHOT_EVERY=10),
    # nano-egg's model, population, windows and validation. Three draws of 4 bits have a standard deviation of 15.2;
    # nano-egg's normal draws, cut to integers, have 15.6. 16 logit units are a bit. AdamW, louder noise and a threshold
    # learn more than nano-egg's own settings, which are OPTIMIZER=ztest SIGMA_SHIFT=4 FAST_FITNESS=1.
    # Two chunks, so that two GPUs can share a step.
    "nano-egg": dict(
        MODEL="gru", HIDDEN_DIM=256, N_LAYERS=6, SEQ_LEN=100, VOCAB_SIZE=256, DETOKENIZE=1, CHUNK_SIZE=16384,
        POPULATION_SIZE=32768, SIGMA_SHIFT=3, SIGMA_SHIFT_VECTOR=8, HOST_GAUSSIAN=1, DEVICE_GAUSSIAN=1, LOSS="exact",
        SOFTMAX_EXP_SCALE=16 / math.log(2), ADAPTIVE_NOISE_MODE=0, CHUNK_MEAN_FILTER=0, ADAPTIVE_THRESHOLD_ALPHA=1.0,
        LR_SCHEDULE="0:1.0, 60:0.7, 150:0.5, 300:0.35, 600:0.25, 1500:0.15, 4000:0.08, 8000:0.04",
        ADAM_WEIGHT_DECAY=0.001, VALIDATE_EVERY=50, VALIDATE_TOKENS=0, VALIDATE_WINDOW=448, SAMPLE_EVERY=100,
        SNAPSHOT_EVERY=1000),
}
# A model of tokens that writes words after seconds on two cores. Soft targets help where a step has few tokens: after
# 20 s on two cores 1.82 bits/byte with them, 1.97 without.
PRESETS["laptop"] = {
    **PRESETS["laptop-bytes"], "VOCAB_SIZE": 8192, "DETOKENIZE": 0,
    "SOFTMAX_EXP_SCALE": 14.0, "SOFT_TARGETS": "0:1, 400:2", "MUON_LR_SCALE": 9.0,
    "ADAM_WEIGHT_DECAY": 0.002,
    "VALIDATE_EVERY": 50, "SAMPLE_EVERY": 100}
# Bytes on a large GPU: a larger model, and 512 windows a step.
PRESETS["best-bytes"] = {
    **PRESETS["laptop-bytes"], "HIDDEN_DIM": 256, "SEQ_LEN": 128, "CHUNK_SIZE": 512, "POPULATION_SIZE": 512,
    "SOFTMAX_EXP_SCALE": 16.0, "HOST_MASK": 15, "MUON_LR_SCALE": 3.0,
    "VALIDATE_EVERY": 100, "VALIDATE_TOKENS": 0, "SNAPSHOT_EVERY": 1000}

# What a run with --objective sets where nothing else was said: few windows, and rates and a share of text with which a
# model that has learnt keeps what it knows. The constant TEXT_SHARE stays what older runs have.
OBJECTIVE_SETTINGS = dict(
    PERTURB="units", CHUNK_SIZE=64, POPULATION_SIZE=256, GROUP_SIZE=2, OPTIMIZER="adamw", LOSS="exact",
    ADAPTIVE_NOISE_MODE=0, ADAPTIVE_THRESHOLD_ALPHA=0.4, VOTE_LEVELS=1, LOCAL_STEPS=1, ADAM_BETA1=0.5,
    ADAM_WEIGHT_DECAY=0.0002,
    LR_SCHEDULE="0:0.03, 10:0.045, 40:0.06, 150:0.07, 1000:0.05, 3000:0.03", TEXT_SHARE=0.25, VALIDATE_EVERY=20,
    SAMPLE_EVERY=20)
# ... and where the file has DATA, so that there is something right: language matters less
DATA_SETTINGS = dict(TEXT_SHARE=0.1)

# --- the program: nothing to edit from here on -----------------------------------------------------------------------

# the values above as they were shipped: what is edited is known by that
SHIPPED = """
    MODEL=transformer HIDDEN_DIM=256 HEAD_DIM=64 N_LAYERS=4 SEQ_LEN=64 STATE_TOKENS=0 MLP_RELU=0
    VOCAB_SIZE=8192 NTT_MODE=0 NTT_CAUSAL=1 CHUNK_SIZE=40960 POPULATION_SIZE=0 GROUP_SIZE=2 FIXED_POINT=4
    SIGMA_SHIFT=3 SIGMA_SHIFT_VECTOR=4 SHIFT_ATTN=8 SHIFT_OUT=9 SHIFT_LOGIT=8 SHIFT_MLP_UP=8 SHIFT_MLP_DOWN=10
    SHIFT_QKV=6 SOFTMAX_SCALE_BIT=18 SOFTMAX_LUT_SIZE=256 SOFTMAX_EXP_SCALE=6.0 ROPE_SCALE_BIT=20
    HOST_GAUSSIAN=0 DEVICE_GAUSSIAN=0 HOST_MASK=15 DEVICE_MASK=15 NOISE_REUSE=1 ADAPTIVE_NOISE_MODE=1
    ADAPTIVE_NOISE_INIT=64 ADAPTIVE_NOISE_INC=5 ADAPTIVE_NOISE_DEC=1 PERTURB=weights LOSS=deggs USE_SAME_DATA=0
    CHUNK_MEAN_FILTER=1 CHUNK_MEAN_EXPONENT=1.2 USE_ADAPTIVE_THRESHOLD=1
    ADAPTIVE_THRESHOLD_ALPHA=0.1 VOTE_LEVELS=1 LOCAL_STEPS=1 FAST_FITNESS=0 SOFT_TARGETS= OPTIMIZER=adamw
    LR_SCHEDULE=0:0.5,100:0.25,200:0.125 ADAM_BETA1=0.9 ADAM_BETA2=0.95 ADAM_EPS=1e-08 ADAM_WEIGHT_DECAY=0.01
    ZTEST_ALPHA=4.0 USE_CLT=1 USE_MUON=0 MUON_MOMENTUM=0.85 MUON_LR_SCALE=1.0 MUON_NS=quintic OBJECTIVE=
    OBJECTIVE_TEXTS=8 TEXT_SHARE=0.35 OBJECTIVE_SECONDS=60.0 ISLAND_SEED=0 GOSSIP_RATE=0.01 MERGE=clone
    RECOMBINE_ALPHA=0.5 OPTIMIZER_MERGE=copy ELITES=1 REJUVENATE_AFTER=0 SAMPLING_TEMP=0.6 SAMPLING_MIN_P=0.08
    SAMPLING_PRESENCE_PENALTY=0.2 SAMPLE_EVERY=5 SAMPLE_PROMPT=32 SAMPLE_TOKENS=64 VALIDATE_EVERY=10
    VALIDATE_TOKENS=65536 VALIDATE_WINDOW=0 INPUT_FILE=input.bin VAL_FILE=val.bin DECODING_FILE=decoding.bin
    DECODING_SHA256= DETOKENIZE=0 PORT=12345 STRAGGLER_TIMEOUT=90.0 AUDIT_RATE=0.01 SNAPSHOT_EVERY=100
    KEEP_EVERY=0 IDLE_TIMEOUT=600.0 DEVICE=auto SIMD=auto TENSOR_CORES=auto"""

MOST_RUNS = 90             # chunks of a step with LOCAL_STEPS: their sums have 16 bits
AGREE = "all", "run", "islands", "free", "local"      # who must agree, as described at the top
ROOT = os.path.dirname(os.path.abspath(__file__))
FOLDERS = "model", "kernels", "engine", "cluster", "islands", "tools", "deploy", "lab"
DATA_FILES = "INPUT_FILE", "VAL_FILE", "DECODING_FILE"
KINDS = {int: "a whole number", float: "a number", str: "text"}
# the value of constants with which nothing differs from a program that lacks them
UNSET = {"SOFT_TARGETS": (), "PERTURB": "weights", "VOTE_LEVELS": 1, "LOCAL_STEPS": 1, "OBJECTIVE": "",
         "OBJECTIVE_TEXTS": 8, "TEXT_SHARE": 0.35}
# constants that are gone, with the value that every run has: older programs store and send it
GONE = {"RARE_TOKENS": 0.0, "TOKEN_MASK": -1}
# what runs and workers with unit trials say beside their constants: how the votes of a step are stored and sent
FORMAT = {"FORMAT_OF_VOTES": "sums"}
# those of noise on activations, which unit trials have replaced
FORMER = {"VERSION_OF_VOTES", "CREDIT", "NOISE_EMBEDDING", "NOISE_GATE", "NOISE_CANDIDATE", "NOISE_ATTENTION",
          "NOISE_OUTPUT", "NOISE_UP", "NOISE_DOWN"}


class EggError(Exception):
    """A message for the user, in one line: what was wrong, what to do. status: the exit status of a command."""
    status = 1


class UsageError(EggError):
    """A wrong use: the same command can never work."""
    status = 2


class ConfigError(UsageError):
    """About a constant: its name, the mistake, the rule."""


@contextlib.contextmanager
def explained(kind, place, advice=""):
    """An OSError in the block becomes a `kind` of EggError: the place, what the system says, the advice."""
    try:
        yield
    except OSError as error:
        raise kind(f"{place}: {error.strerror}" + f": {advice}" * bool(advice)) from None


def sha256_of(path):
    """SHA-256 (hex) of a file. Raises OSError."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


class OwnFolders:
    """Finds FOLDERS here, whatever else has their names: what is installed, or lies beside a notebook."""

    @staticmethod
    def find_spec(name, path=None, target=None):
        return importlib.machinery.PathFinder.find_spec(name, [ROOT]) if name in FOLDERS else None


def take_out(ours):
    """{name: module}: what is loaded under the names of FOLDERS, our modules or those of others, is no longer."""
    return {name: sys.modules.pop(name) for name, module in [*sys.modules.items()] if name.partition(".")[0] in FOLDERS
            and (getattr(module, "__file__", 0) or "").startswith(ROOT + os.sep) == ours}


if __name__ == "egg_config":                         # not where a copy of this file is loaded under another name
    sys.meta_path.insert(0, OwnFolders)
    take_out(False)                                  # who has imported them keeps them


def begin_process(main, *arguments):
    """What a process of engine.hardware begins with. It is here, so that OwnFolders finds what `main` is of."""
    import multiprocessing                           # a coordinator has no use for it
    multiprocessing.current_process().daemon = False         # it may have processes of its own: judges, a user's pools
    multiprocessing.set_start_method(None, force=True)       # which begin as in any program
    main(*arguments)


# --- what the lines above say ----------------------------------------------------------------------------------------

class Constant(namedtuple("Constant", "section value kind limits allowed agree model meaning line")):
    """One line of the file. kind: int, float, str, or tuple for a schedule; limits: what is allowed, as written;
    allowed: the same as values: (lowest, highest) for "lowest to highest", all of a list, () for any text; model: the
    only MODEL that has the constant, or None; line: its number."""

    def objection(self, value):
        """The rule that a value breaks, in words, or None."""
        numbers, limits = [value], self.limits
        word = ""
        if self.kind is tuple:
            word, _, limits = limits.partition("s ")
            kinds = {int, type(self.allowed[0])}
            if not (isinstance(value, (tuple, list)) and all(
                    isinstance(entry, (tuple, list)) and len(entry) == 2 and {*map(type, entry)} <= kinds
                    for entry in value)):
                return f"must be pairs of a step and a {word}"
            steps, numbers = [step for step, _ in value], [number for _, number in value]
            if steps != sorted({max(step, 0) for step in steps}):
                return "steps must rise, from 0 on"
            word += "s "
        elif type(value) is not self.kind and (self.kind, type(value)) != (float, int):
            return f"must be {KINDS[self.kind]}" + ", without a comma" * isinstance(value, tuple)
        if " to " not in limits:
            return f"must be one of {limits}" if self.allowed and value not in self.allowed else None
        low, high = self.allowed
        return None if all(low <= number <= high for number in numbers) else f"{word}must be from {limits}"


LINE = re.compile(r"^(?:# --- (?P<section>.*?) -+|(?P<name>\w+) *=(?P<twice>=?)[^#\n]*#?(?P<comment>.*(?:\n#  .*)*))$",
                  re.MULTILINE)


def _constants():
    """{name: Constant} of this file. Raises ConfigError for an assignment that is none."""
    with open(__file__, encoding="utf-8") as file:
        source = file.read()
    end = source.find("\nPRESETS")
    constants, section = {}, ""
    for match in LINE.finditer(source):
        name, line = match["name"], source.count("\n", 0, match.start()) + 1
        if match.start() > end:
            if name in constants:
                raise ConfigError(f"{_place(line)}{name}: has no effect below PRESETS: set it in line "
                                  f"{constants[name].line}")
            continue
        if not name:
            section = match["section"]
            continue
        if match["twice"]:
            raise ConfigError(f"{_place(line)}{name}: == sets nothing: write =")
        limits, agree, meaning = (part.strip() for part in [*match["comment"].split("|", 2), "", ""][:3])
        if not agree and name in constants:          # it is set again
            constants[name] = constants[name]._replace(line=line)
        elif not agree:
            raise ConfigError(f"{_place(line)}{name}: a constant needs the comment behind its value: # allowed | agree "
                              "| meaning")
        elif agree not in AGREE:
            raise ConfigError(f"{_place(line)}{name}: {agree!r} must be one of {', '.join(AGREE)}")
        else:
            value = globals()[name]
            value = int(value) if isinstance(value, bool) else value
            model, meaning = re.fullmatch(r"(?:\((\w+)\) )?(.*)", re.sub(r"\n# *| +", " ", meaning)).groups()
            constants[name] = Constant(section, value, *_allowed(limits), agree, model, meaning, line)
    return constants


def _place(line):
    return f"{os.path.basename(__file__)}:{line}: "


def _allowed(limits):
    """(kind, limits, values) of the limits of a constant; the words of a schedule stand before its range."""
    low, to, high = limits.partition(" to ")
    values = [low.split()[-1], high] if to else limits.split(", ") if limits else []
    if not "".join(values).lstrip("-")[:1].isdigit():
        return str, limits, tuple(values)
    numbers = tuple(_number(value) for value in values)
    return tuple if limits[0].isalpha() else type(numbers[0]), limits, numbers


def _number(text):
    """The number that is written: -1, 0.5, 1e6, 2^30."""
    base, _, exponent = text.partition("^")
    return int(base) ** int(exponent or 1) if base.lstrip("-").isdigit() else float(text)


# {a name of nanoGPT and others, also of an option: what it is here}
ELSEWHERE = {
    "LEARNING_RATE": "-D LR_SCHEDULE=0:RATE", "LR": "-D LR_SCHEDULE=0:RATE", "BLOCK_SIZE": "-D SEQ_LEN=N",
    "N_EMBD": "-D HIDDEN_DIM=N", "N_HEAD": "-D HEAD_DIM=N, the width of a head", "N_LAYER": "-D N_LAYERS=N",
    "BATCH_SIZE": "-D POPULATION_SIZE=N", "DROPOUT": "nothing, as there is none", "TOP_K": "--min-p P",
    "MAX_ITERS": "--steps N", "OUT_DIR": "--save-dir DIR", "SEED": "-D ISLAND_SEED=N"}


def _no_such(name):
    if here := ELSEWHERE.get(name.upper()):
        return f"no such constant in egg_config.py: here that is {here}"
    return "no such constant in egg_config.py" + near(name.upper(), CONSTANTS)


def near(typed, words):
    """The end of a message about what somebody has typed: the word that is like it, if there is one."""
    import difflib                                   # here: no program that starts well needs it
    return "".join(f"; did you mean {word}?" for word in difflib.get_close_matches(typed, words, 1))


CONSTANTS = _constants()
# the model
DETERMINING = {*GONE, *FORMAT, *(name for name, constant in CONSTANTS.items() if constant.agree in ("all", "run"))}
# what else a saved run keeps; a directory, perhaps a stranger's, sets nothing but these
KEPT = {*(name for name, constant in CONSTANTS.items() if constant.agree in ("islands", "free")), *DATA_FILES,
        "SNAPSHOT_EVERY", "KEEP_EVERY", "DECODING_SHA256"}


# --- a configuration -------------------------------------------------------------------------------------------------

class Config(types.SimpleNamespace):
    """All constants by name, plus the derived values of `_derive`. Treat it as read-only; it pickles."""

    def __getattr__(self, name):
        if not name.isupper():
            raise AttributeError(name)
        raise ConfigError(f"{os.path.basename(__file__)}: the constant {name} is missing")

    def constants(self):
        """{name: value} of all constants."""
        return {name: getattr(self, name) for name in CONSTANTS}

    def changed(self, **values):
        """A checked Config with these values in place of its own. Raises ConfigError."""
        return make(self.constants(), **values)

    def shared(self):
        """The constants in the fingerprint, without those that are unset, because older programs lack them, and with
        those that are gone, because older programs have them."""
        return GONE | (FORMAT if self.PERTURB == "units" else {}) | {
            name: value for name, value in self.constants().items()
            if CONSTANTS[name].agree != "local" and value != UNSET.get(name)}

    def saved(self):
        """Those of them that determine the model, and with it a saved run, as JSON returns them."""
        return json.loads(json.dumps({name: value for name, value in self.shared().items() if name in DETERMINING}))

    def settings(self):
        """The constants that a saved run keeps although it does not depend on them: they may change at any step."""
        return {name: value for name, value in self.constants().items() if name in KEPT}

    def compiled(self):
        """The same without the constants on which no kernel depends: building one that reads such a constant fails, so
        that what is left names a kernel."""
        others = "LR_SCHEDULE", "OBJECTIVE", "OBJECTIVE_TEXTS", "TEXT_SHARE"
        return Config(**{name: value for name, value in vars(self).items() if name not in CONSTANTS
                         or CONSTANTS[name].agree in ("all", "run") and name not in others})

    def learning_rate(self, step):
        """Learning rate (float) of the update of `step`; "ztest": share of the weights that chance would move."""
        if self.OPTIMIZER == "ztest":
            return 1 / ((2 ** self.ZTEST_ALPHA - 1) * step / 1000 + 1) if self.ZTEST_ALPHA > 1 else self.ZTEST_ALPHA
        return _scheduled(self.LR_SCHEDULE, step)

    def soft_context(self, step):
        """Tokens of context (int) of the soft targets of `step`, 0: none are drawn."""
        return _scheduled(self.SOFT_TARGETS, step)


def _scheduled(schedule, step):
    """The value of a schedule at `step`; 0 before its first entry."""
    return [0, *(value for first, value in schedule if first <= step)][-1]


def overrides(preset=None, defines=(), environ=os.environ, objective=None):
    """{name: (source, value)}: the constants that are set for one run, preset < OBJECTIVE_SETTINGS < EGG_* in `environ`
    < `defines` ("NAME=VALUE" strings); source: as the user wrote it. objective: (file, its SHA-256, the settings of a
    run that it begins, else {}), or None. Raises ConfigError."""
    source = f"--preset {preset}" if preset else "EGG_PRESET"
    preset = preset or environ.get("EGG_PRESET")
    if preset and preset not in PRESETS:
        raise ConfigError(f"no preset {preset!r}: there is {', '.join(PRESETS)}{near(preset, PRESETS)}")
    sources = {name: (source, value) for name, value in PRESETS.get(preset, {}).items()}
    for name in sources.keys() - CONSTANTS.keys():
        with open(__file__, encoding="utf-8") as file:
            line = next((number for number, line in enumerate(file, 1) if re.search(rf"\b{name}\b", line)), 1)
        raise ConfigError(f"{_place(line)}{name}: {_no_such(name)}")
    if objective:
        source, digest, settings = objective
        values = {**settings, "OBJECTIVE": digest}
        sources.update((name, (f"--objective {source}", value)) for name, value in values.items())
    for key, text in environ.items():
        if key.startswith("EGG_") and key not in ("EGG_PRESET", "EGG_SECRET"):
            sources[key[4:]] = key, _parse(key[4:], text, key)
    for define in defines:
        name, equals, text = (part.strip() for part in define.partition("="))
        if not equals:
            raise ConfigError(f"-D {define}: write -D NAME=VALUE")
        sources[name] = f"-D {name}", _parse(name, text, f"-D {name}")
    return sources


def load(preset=None, defines=(), environ=os.environ, saved=(), run=None, objective=None, begins=False):
    """A Config with the `overrides`. saved: the constants of a saved run, as JSON returns them, in place of
    this file's; run: its directory if it must continue with them; begins: those of "run" may be others. Raises
    ConfigError."""
    values = {name: _tuples(value) for name, value in {**(LACKING if saved else {}), **dict(saved)}.items()
              if (name, value) not in (GONE | FORMAT).items()}
    if unknown := values.keys() - CONSTANTS.keys():
        raise ConfigError(f"{run or 'the saved run'} has {min(unknown)}, which this program does not know: use the egg "
                          "that made it")
    there = Config(**{**_defaults(), **values})
    sources, differ, kinds = overrides(preset, defines, environ, objective), {}, set()
    for name, (source, value) in sources.items() if run else ():
        known = getattr(there, name)
        if name == "POPULATION_SIZE":
            value = value or 8 * there.CHUNK_SIZE
        if name == "OBJECTIVE" and value != known:
            reason = "was begun with another file, or that one has changed" if known else "has no objective"
            raise ConfigError(f"{source}: {run} {reason}: --load-dir {run} with another --save-dir begins a new run "
                              "with its model")
        if name in DETERMINING and value != known and not (begins and CONSTANTS[name].agree == "run"):
            kinds.add(CONSTANTS[name].agree)
            differ.setdefault(source, []).append(f"{name} = {text(value)}, there it is {text(known) or 'unset'}")
    try:
        cfg = make(values, **{name: value for name, (_, value) in sources.items()})
    except ConfigError as error:                     # a bad value is that, whatever the run has
        name, *_ = str(error).split()
        if not differ or sources.get(name, [""])[0].endswith(name):
            raise
    if differ:
        differences = "; ".join(f"{source}: {texts[0]}" + f" (and {len(texts) - 1} more)" * (len(texts) > 1)
                                for source, texts in differ.items())
        advice = "name another directory" if "all" in kinds else \
            f"begin a new run with its model: the same command with --load-dir {run} in place of --save-dir"
        raise ConfigError(f"{run} holds a run of another configuration: {differences}; leave that out, or {advice}")
    return cfg


def renewed(config):
    """The constants of a saved run, {name: value}, as they are called now. Noise on activations becomes unit trials
    with as many chunks and digits: the same update replays its steps."""
    new = {name: value for name, value in config.items() if name not in FORMER}
    if config.get("PERTURB") == "activations":
        group, chunk, every = (config.get(name, SHIPPED[name])
                               for name in ("GROUP_SIZE", "CHUNK_SIZE", "POPULATION_SIZE"))
        new["PERTURB"] = "units"
        with contextlib.suppress(TypeError, ZeroDivisionError):          # of a stranger, whom `make` refuses
            windows = chunk // group
            windows *= 1 + windows % 2
            new |= {"GROUP_SIZE": 2, "CHUNK_SIZE": windows, "POPULATION_SIZE": every // chunk * windows}
    return new


def edited():
    """[name]: the constants whose values above were edited."""
    return [name for name, constant in CONSTANTS.items() if constant.value != SHIPPED.get(name, constant.value)]


def _defaults():
    return {name: constant.value for name, constant in CONSTANTS.items()}


def _tuples(value):
    """A value with tuples in place of the lists of JSON."""
    return tuple(map(_tuples, value)) if isinstance(value, list) else value


def make(saved=(), /, **values):
    """A checked Config from keyword constants; those not given keep the values of `saved`, or of this file."""
    for name in values:
        if name not in CONSTANTS:
            raise ConfigError(f"{name}: {_no_such(name)}")
    saved = dict(saved)
    cfg = Config(**{**_defaults(), **saved, **{name: _tuples(value) for name, value in values.items()}})
    if not cfg.POPULATION_SIZE:
        cfg.POPULATION_SIZE = 8 * cfg.CHUNK_SIZE
    validate(cfg, saved, {**saved, **values})
    _derive(cfg)
    return cfg


def validate(cfg, saved, given):
    """Raises ConfigError at the first constant, or combination of constants, that cannot work. saved, given: those of a
    saved run, and all whose value is not that of this file."""
    def need(ok, name, rule):
        if not ok:
            value, constant = getattr(cfg, name), CONSTANTS[name]
            place = "" if name in given else _place(constant.line)
            shown = text(value) if isinstance(value, constant.kind) else repr(value)
            raise ConfigError(f"{place}{name} = {shown}: {rule}")

    for name, constant in CONSTANTS.items():
        value = getattr(cfg, name)
        rule = constant.objection(value)
        need(rule is None, name, rule)
        need(constant.model in (None, cfg.MODEL) or value in (constant.value, saved.get(name)), name,
             f"has no meaning with MODEL = {cfg.MODEL}: leave it at {constant.value}")
    for name in DATA_FILES:
        need(getattr(cfg, name), name, "must name a file")
    need(cfg.HIDDEN_DIM % 32 == 0, "HIDDEN_DIM", "must be a multiple of 32")
    if cfg.MODEL == "transformer":
        need(cfg.HIDDEN_DIM % cfg.HEAD_DIM == 0, "HIDDEN_DIM", f"must be a multiple of HEAD_DIM = {cfg.HEAD_DIM}")
        need(cfg.SEQ_LEN % 8 == 0, "SEQ_LEN", "must be a multiple of 8")
    else:
        need(cfg.FIXED_POINT <= 7, "FIXED_POINT", "must be at most 7 with MODEL = gru: divisions are not exact above")
    need(cfg.CHUNK_SIZE % 2 == 0, "CHUNK_SIZE", "must be even: a job is made of antithetic pairs")
    need(cfg.POPULATION_SIZE % cfg.CHUNK_SIZE == 0, "POPULATION_SIZE",
         f"must be a multiple of CHUNK_SIZE = {cfg.CHUNK_SIZE}")
    need(cfg.GROUP_SIZE % 2 == 0 and cfg.POPULATION_SIZE % cfg.GROUP_SIZE == 0, "GROUP_SIZE",
         f"must be even, as antithetic pairs read the same tokens, and divide POPULATION_SIZE = {cfg.POPULATION_SIZE}")
    for gaussian, mask in ("HOST_GAUSSIAN", "HOST_MASK"), ("DEVICE_GAUSSIAN", "DEVICE_MASK"):
        need(not getattr(cfg, gaussian) or getattr(cfg, mask) <= 42, mask,
             f"must be at most 42 with {gaussian}: three draws must fit int8")
    need(not cfg.DETOKENIZE or cfg.VOCAB_SIZE == 256, "DETOKENIZE", "needs VOCAB_SIZE 256: it turns tokens into bytes")
    need(not cfg.SOFT_TARGETS or cfg.LOSS == "exact", "SOFT_TARGETS",
         "needs LOSS exact: the mean over 8 targets is a fraction of a logit unit")
    need(not cfg.USE_MUON or cfg.OPTIMIZER == "adamw", "USE_MUON",
         "needs OPTIMIZER adamw for all other parameters")
    need(not cfg.NTT_MODE or cfg.SEQ_LEN & (cfg.SEQ_LEN - 1) == 0, "NTT_MODE",
         f"needs a SEQ_LEN that is a power of two, not {cfg.SEQ_LEN}")
    need(cfg.NTT_MODE != 2 or cfg.SEQ_LEN <= 256, "NTT_MODE",
         f"needs SEQ_LEN of 256 at most, not {cfg.SEQ_LEN}: 257 has no root of that order")
    if cfg.OBJECTIVE:
        need(cfg.PERTURB == "units", "PERTURB", "must be units with --objective")
        need(cfg.CHUNK_SIZE % cfg.OBJECTIVE_TEXTS == 0, "CHUNK_SIZE",
             f"must be a multiple of OBJECTIVE_TEXTS = {cfg.OBJECTIVE_TEXTS} with --objective: the texts after a "
             "prompt are in one chunk")
    if cfg.PERTURB == "units":
        for name, value in ("OPTIMIZER", "adamw"), ("ADAPTIVE_NOISE_MODE", 0), ("NTT_MODE", 0), ("GROUP_SIZE", 2):
            need(getattr(cfg, name) == value, name, f"must be {value} with PERTURB = units")
        most = MOST_RUNS if cfg.LOCAL_STEPS > 1 else (2047 if cfg.VOTE_LEVELS == 1 else 32767) // cfg.VOTE_LEVELS
        need(cfg.POPULATION_SIZE <= most * cfg.CHUNK_SIZE, "POPULATION_SIZE",
             f"must be at most {most * cfg.CHUNK_SIZE:,}, which is {most:,} chunks, with PERTURB = units, "
             f"VOTE_LEVELS = {cfg.VOTE_LEVELS} and LOCAL_STEPS = {cfg.LOCAL_STEPS}: sums of digits have 12 to 16 bits")
        need(cfg.CHUNK_SIZE <= most_windows(cfg), "CHUNK_SIZE",
             f"must be at most {most_windows(cfg)} with PERTURB = units and SEQ_LEN = {cfg.SEQ_LEN}: votes are sums "
             "in 32 bits")
    if cfg.LOCAL_STEPS > 1:
        need(not cfg.OBJECTIVE, "LOCAL_STEPS", "must be 1 with --objective: leave it out")
        need(cfg.PERTURB == "units", "LOCAL_STEPS", "must be 1 with noise on weights: unit trials have more, as in "
             "--preset laptop and best")
        need(cfg.VOTE_LEVELS == 7, "VOTE_LEVELS", "must be 7 with LOCAL_STEPS above 1")
    tokens = 64 // max(1, (cfg.VOCAB_SIZE - 1).bit_length()) - 1         # whose codes fit 64 bits
    need(all(context <= tokens for _, context in cfg.SOFT_TARGETS), "SOFT_TARGETS",
         f"contexts must be from 0 to {tokens} tokens with VOCAB_SIZE = {cfg.VOCAB_SIZE}")
    need(cfg.LR_SCHEDULE and cfg.LR_SCHEDULE[0][0] == 0, "LR_SCHEDULE", "must start at step 0, steps rising")


def digits_a_byte(values):
    """int: how many digits of so many values fit a byte."""
    return int(math.log(256, values))


def _largest_sum(cfg):
    """int: the largest sum of the terms of a step's digits (model.steps.Sums)."""
    chunks = cfg.POPULATION_SIZE // cfg.CHUNK_SIZE
    return (4 * chunks + 3) * chunks if cfg.LOCAL_STEPS > 1 else cfg.VOTE_LEVELS * chunks


def _derive(cfg):
    cfg.N_HEADS = cfg.HIDDEN_DIM // cfg.HEAD_DIM
    cfg.N_CHUNKS = cfg.POPULATION_SIZE // cfg.CHUNK_SIZE
    cfg.N_PAIRS = cfg.POPULATION_SIZE // 2
    cfg.STEP_TOKENS = cfg.POPULATION_SIZE * cfg.LOCAL_STEPS * cfg.SEQ_LEN       # that are evaluated
    cfg.MEMBERS = 2 if cfg.PERTURB == "weights" else 1          # of a window: a pair, or the window itself
    cfg.N_GROUPS = 1 if cfg.USE_SAME_DATA else cfg.POPULATION_SIZE // cfg.MEMBERS // (cfg.GROUP_SIZE // 2)
    cfg.TARGETS = 8 if cfg.SOFT_TARGETS else 1                  # of a position
    cfg.WINDOW = cfg.STATE_TOKENS + 1 + cfg.SEQ_LEN * cfg.TARGETS      # numbers that are read for a window
    cfg.NOISE_SHIFT = cfg.FIXED_POINT + cfg.SIGMA_SHIFT         # right shift of the noise of matrices
    # digits in which a chunk is sent: one a pair, or with unit trials one a weight, in whole bytes; these bytes, and
    # those of a step (steps.join_digits)
    H = cfg.HIDDEN_DIM
    weights = (2 * H * cfg.VOCAB_SIZE + cfg.N_LAYERS * (12 * H * H + 4 * H) + H if cfg.MODEL == "gru"
               else H * cfg.VOCAB_SIZE + (cfg.N_LAYERS + 1) * (8 * H * H + 7 * H)
               + cfg.N_LAYERS * (4 * H * H + 2 * H) + 3 * H)
    cfg.DIGIT_VALUES = 3 if cfg.PERTURB == "weights" else 2 * cfg.VOTE_LEVELS + 1
    each = digits_a_byte(cfg.DIGIT_VALUES)
    cfg.CHUNK_DIGITS = cfg.CHUNK_SIZE // 2 if cfg.PERTURB == "weights" else -(-weights // each) * each
    cfg.CHUNK_BYTES = -(-cfg.CHUNK_DIGITS // each)
    cfg.SUMMED = cfg.PERTURB == "units" and cfg.N_CHUNKS > 2    # two chunks: sums would save little, and take time
    cfg.LARGEST_SUM = _largest_sum(cfg)
    cfg.WIDE_SUMS = cfg.LARGEST_SUM > 127                       # int16
    copies = (1 + cfg.WIDE_SUMS) * each if cfg.SUMMED else cfg.N_CHUNKS
    cfg.STEP_BYTES = -(-cfg.N_PAIRS // each) if cfg.PERTURB == "weights" else 1 + cfg.CHUNK_BYTES * copies
    cfg.LOSS_SCALE = 256 if cfg.LOSS == "exact" else 1         # units of an evaluated loss in one logit unit


def most_windows(cfg):
    """int: the largest CHUNK_SIZE."""
    return (1 << (31 if cfg.PERTURB == "weights" else 17 if cfg.MODEL == "gru" else 16)) // cfg.SEQ_LEN


def loss_unit(constants):
    """(bits in one unit of the losses of d-eggs, the unit in which losses are shown) with these {name: value}."""
    return (16 / (constants["SOFTMAX_EXP_SCALE"] * math.log(2)),
            "bits/byte" if constants["VOCAB_SIZE"] == 256 else "bits/token")


def may_differ(name):
    """Whether islands that gossip may differ in a constant; not in one that this program does not know."""
    return name in CONSTANTS and CONSTANTS[name].agree in ("run", "free")


def text(value):
    """A value as an override takes it."""
    if isinstance(value, (tuple, list)):             # a schedule, perhaps of a peer, which may hold anything
        return ",".join(str(entry).strip("[]()").replace(", ", ":") for entry in value)
    return str(value)


def _parse(name, text, source):
    """The value of a constant in an override."""
    if name not in CONSTANTS:
        raise ConfigError(f"{source}: {_no_such(name)}")
    constant = CONSTANTS[name]
    try:
        if constant.kind is int:
            return int({"true": "1", "false": "0"}.get(text.lower(), text), 0)
        if constant.kind is tuple:
            number = type(constant.allowed[0])
            return tuple((int(s), number(r)) for s, r in (item.split(":") for item in text.split(",") if text))
        return constant.kind(text)
    except ValueError:
        wanted = KINDS.get(constant.kind) or "step:{0},step:{0},...".format(constant.limits.partition("s ")[0])
        raise ConfigError(f"{source}: {text!r} is not {wanted}") from None


SHIPPED = {_name: _parse(_name, _text, "SHIPPED") for _name, _, _text in
           (_word.partition("=") for _word in SHIPPED.split()) if _name in CONSTANTS}
# what a saved run has that lacks a constant, as JSON returns it
LACKING = json.loads(json.dumps({name: SHIPPED[name] for name in SHIPPED.keys() & DETERMINING} | UNSET | GONE))
for _preset in *PRESETS.values(), OBJECTIVE_SETTINGS:
    _preset |= {_name: _parse(_name, _text, "PRESETS") for _name, _text in _preset.items() if isinstance(_text, str)}


# --- the tables of docs/CONFIGURATION.md -----------------------------------------------------------------------------

def tables():
    """All constants, as Markdown."""
    lines, section = [], ""
    for name, constant in CONSTANTS.items():
        if constant.section != section:
            section = constant.section
            lines += ["", f"### {section.capitalize()}", "",
                      *_head("constant", "default", "allowed", "agree", "meaning")]
        meaning = f"({constant.model}) {constant.meaning}" if constant.model else constant.meaning
        lines.append(_row(name, text(constant.value), constant.limits, constant.agree, meaning))
    return "\n".join(lines[1:])


def _head(*cells):
    return _row(*cells), len(cells) * "|---" + "|"


def _row(*cells):
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)    # `| head` ends us without a traceback
    print(tables())
