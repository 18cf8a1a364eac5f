"""Every constant of egg, edited like a config.h.

Edit the assignments below, or leave them and override: an environment variable EGG_<NAME>=value, or -D NAME=VALUE after a
subcommand (the later wins: this file, preset, environment, -D). `load()` applies the overrides, checks everything and returns the
constants as one immutable-by-custom object; nothing else in egg reads this module's globals. SPEC: the numeric contract with d-eggs.
"""

import difflib
import hashlib
import json
import math
import os
import types

# --- model ---------------------------------------------------------------------------------------------------------------
MODEL = "transformer"         # or "gru": the recurrent model of nano-egg
HIDDEN_DIM = 256              # width of the model: 64 to 1024, a multiple of 32 and of HEAD_DIM
HEAD_DIM = 64                 # width of one attention head: 32, 64 or 128
N_LAYERS = 4                  # layers
SEQ_LEN = 64                  # tokens of a training window: 8 to 1024, for the transformer a multiple of 8
STATE_TOKENS = 0              # gru: tokens before a window from which the unperturbed model makes the state it begins with; 0: from zero
MLP_RELU = 0                  # gru: 1: no negative values inside the MLP
VOCAB_SIZE = 8192             # 256 means raw bytes: input.bin holds uint8 and no decoding.bin is needed; else uint32 tokens
NTT_MODE = 0                  # embeddings of a transform of the window (model.transforms): 0 none, 1 Walsh-Hadamard, 2 modulo 257, 3 modulo 65537
NTT_CAUSAL = 1                # 1: a position's coefficient sees no token after it; 0: the whole window, targets included, as in d-eggs

# --- population ----------------------------------------------------------------------------------------------------------
CHUNK_SIZE = 40960            # members evaluated in one job (even: antithetic pairs stay together)
POPULATION_SIZE = 0           # members a step, a multiple of CHUNK_SIZE; 0 means 8 chunks
GROUP_SIZE = 2                # members that read the same tokens: even, a divisor of POPULATION_SIZE

# --- fixed-point arithmetic ----------------------------------------------------------------------------------------------
FIXED_POINT = 4               # fractional bits of weights and activations
SIGMA_SHIFT = 3               # matrix noise is shifted right by FIXED_POINT + SIGMA_SHIFT: larger means quieter
SIGMA_SHIFT_VECTOR = 4        # right shift of the noise of biases and norm weights
SHIFT_ATTN = 8                # right shifts after the products
SHIFT_OUT = 9
SHIFT_LOGIT = 8
SHIFT_MLP_UP = 8
SHIFT_MLP_DOWN = 10
SHIFT_QKV = 6                 # exists in d-eggs, unused there and here
SOFTMAX_SCALE_BIT = 18        # fractional bits of the integer exponential
SOFTMAX_LUT_SIZE = 256        # entries of its table
SOFTMAX_EXP_SCALE = 6.0       # logit units a nat
ROPE_SCALE_BIT = 20           # fractional bits of the rotary tables

# --- noise ---------------------------------------------------------------------------------------------------------------
HOST_GAUSSIAN = 0             # 1: initial weights are the sum of three uniform draws
DEVICE_GAUSSIAN = 0           # 1: so is the noise
HOST_MASK = 15                # magnitude mask of a draw, 0 to 127 (0 to 42 with the Gaussian form)
TOKEN_MASK = -1               # HOST_MASK of the tables that have a column for every token; -1: HOST_MASK
DEVICE_MASK = 15
NOISE_REUSE = 1               # steps for which every member keeps its noise; 0: for ever
ADAPTIVE_NOISE_MODE = 1       # noise-scale overlay: 0 off, 1 scale, 2 heavy-tailed
ADAPTIVE_NOISE_INIT = 64      # its start,
ADAPTIVE_NOISE_INC = 5        # what a changed row or column gains,
ADAPTIVE_NOISE_DEC = 1        # what an unchanged one loses

# --- fitness -------------------------------------------------------------------------------------------------------------
LOSS = "deggs"                # "deggs": the coarse logarithm of SPEC 7.5; "exact": true cross-entropy in fixed point
USE_SAME_DATA = 0             # 1: every pair reads the same window
CHUNK_MEAN_FILTER = 1         # 1: add the mean difference of the chunk, raised to this power, to every difference
CHUNK_MEAN_EXPONENT = 1.2
USE_ADAPTIVE_THRESHOLD = 1    # 1: differences below this share of their mean size count as 0
ADAPTIVE_THRESHOLD_ALPHA = 0.1
FAST_FITNESS = 0              # 1: the sign of the difference, neither filtered nor measured against the others'

# --- optimizer -----------------------------------------------------------------------------------------------------------
OPTIMIZER = "adamw"           # "adamw"; "sgd": the accumulator collects lr * vote / sqrt(pairs); "ztest": weights whose vote is significant
LR_SCHEDULE = ((0, 0.5), (100, 0.25), (200, 0.125))   # (first step, learning rate); as an override: 0:0.5,100:0.25
RARE_TOKENS = 0.0             # the columns of tokens that are less than this share of the data learn more slowly: their rate times
#                               sqrt(their share / RARE_TOKENS); 0: all alike
ADAM_BETA1 = 0.9
ADAM_BETA2 = 0.95
ADAM_EPS = 1e-8
ADAM_WEIGHT_DECAY = 0.01
ZTEST_ALPHA = 4.0             # "ztest": the share of the weights that chance would move; above 1 it falls from 1 to 2^-ZTEST_ALPHA in 1,000 steps
USE_CLT = 1                   # 0: votes count the signs of the noise in place of the noise
USE_MUON = 0                  # 1: the matrices of attention and MLPs move along their orthogonalised momentum; the rest stays with AdamW
MUON_MOMENTUM = 0.85          # share of the momentum that is left after a step
MUON_LR_SCALE = 1.0           # factor on their learning rate; at 1 a step is about as long as AdamW's
MUON_NS = "quintic"           # Newton-Schulz iteration: "quintic" (singular values to 0.7..1.2, quickly) or "cubic" (to 1, slowly, as d-eggs)

# --- islands: populations that gossip (islands.gossip) -----------------------------------------------------------------------
ISLAND_SEED = 0               # another number, another noise from the first step on: every island needs its own, all its workers the same;
#                               the rest of these is the coordinator's alone, and a run goes on when it changes
GOSSIP_RATE = 0.01            # probability that an island compares itself with a peer after a step
MERGE = "clone"               # what it makes of a better peer's state: "clone" takes it, "recombine" mixes it with its own by fitness
RECOMBINE_ALPHA = 0.5         # "recombine": share of the better one where both are equally good; who is far behind has less (islands.merging)
OPTIMIZER_MERGE = "copy"      # moments of the result: "reset", "copy" the peer's, "interpolate" as the weights; accumulators go with the weights
ELITES = 1                    # best states that are kept whatever is merged
REJUVENATE_AFTER = 0          # steps without improvement after which moments begin anew and the noise is raised; 0: never

# --- sampling, validation ------------------------------------------------------------------------------------------------
SAMPLING_TEMP = 0.6           # 0 is greedy
SAMPLING_MIN_P = 0.08         # tokens less likely than this share of the likeliest are cut; 0 cuts none
SAMPLING_PRESENCE_PENALTY = 0.2   # nats, once for every token seen
SAMPLE_EVERY = 5              # steps between samples during training; 0: none
SAMPLE_PROMPT = 32            # tokens of the data a sample starts from
SAMPLE_TOKENS = 64            # tokens it adds
VALIDATE_EVERY = 10           # steps between validations on VAL_FILE; 0: none
VALIDATE_TOKENS = 65536       # tokens a validation reads at most, in windows spread evenly over the file; 0: all
VALIDATE_WINDOW = 0           # gru: tokens of such a window, which begins with a state of zero; 0: SEQ_LEN

# --- this machine (not compared between coordinator and worker) ------------------------------------------------------------
INPUT_FILE = "input.bin"
VAL_FILE = "val.bin"
DECODING_FILE = "decoding.bin"
DETOKENIZE = 0                # 1, with VOCAB_SIZE 256: the files hold tokens of decoding.bin, read as the bytes they stand for
PORT = 12345
STRAGGLER_TIMEOUT = 90.0      # seconds after which a silent worker's chunk is handed out again, before the time of a chunk is known
AUDIT_RATE = 0.01             # share of the chunks that two workers evaluate, where there are two; 1: all
SNAPSHOT_EVERY = 100          # steps between snapshots in the save directory; 0: none
CONNECTIONS_PER_ADDRESS = 256  # connections that one address may hold open at the coordinator
IDLE_TIMEOUT = 600.0          # seconds after which a connection that says nothing at all is closed
DEVICE = "auto"               # "cpu", "cuda", or "auto": a GPU where there is one
DEBUG = 0                     # 1: every tenth step the worker of chunk 0 prints statistics of member 0's activations and of the weights
DEBUG_FILE = ""               # ... and appends them to this file, a line of JSON a step
SIMD = "auto"                 # int8 products of the CPU engine: "auto", "vnni512", "vnni256", "madd", "portable"

PRESETS = {
    # A byte model that learns within a minute on two cores. The shifts suit sums over 64 hidden units instead of 256: with those of the
    # defaults the MLPs would hardly be heard beside the residual stream. The noise of norms and biases is quiet instead of switched off:
    # the overlay switches it off within 64 steps, and at small rates that of everything else later.
    "laptop": dict(HIDDEN_DIM=64, HEAD_DIM=32, N_LAYERS=1, SEQ_LEN=32, VOCAB_SIZE=256, DETOKENIZE=1, CHUNK_SIZE=128,
                   SHIFT_MLP_UP=6, SHIFT_MLP_DOWN=6, SHIFT_OUT=7, HOST_MASK=7, SIGMA_SHIFT=2, SIGMA_SHIFT_VECTOR=7, ADAPTIVE_NOISE_MODE=0,
                   LOSS="exact", CHUNK_MEAN_FILTER=0, ADAPTIVE_THRESHOLD_ALPHA=1.0,
                   LR_SCHEDULE=((0, 0.5), (200, 0.25), (500, 0.125), (1500, 0.0625)), ADAM_WEIGHT_DECAY=0.001,
                   VALIDATE_EVERY=100, SAMPLE_EVERY=500),
    # The best found so far for minutes on one large GPU: a single layer, which learns as much from a token as four and sees twice as many a
    # second; many steps, with rates that fall; MLPs that are heard, noise as in "laptop", and rare tokens that begin small and stay so.
    # A step is one chunk: with several GPUs set CHUNK_SIZE to what each is to have of it. So with "best-bytes".
    "best": dict(N_LAYERS=1, LOSS="exact", HOST_MASK=7, TOKEN_MASK=1, RARE_TOKENS=0.0005, SIGMA_SHIFT=2, SIGMA_SHIFT_VECTOR=7,
                 ADAPTIVE_NOISE_MODE=0, CHUNK_MEAN_FILTER=0, ADAPTIVE_THRESHOLD_ALPHA=1.0,
                 SHIFT_MLP_UP=7, SHIFT_MLP_DOWN=7, SHIFT_OUT=8, ADAM_WEIGHT_DECAY=0.001, CHUNK_SIZE=32768, POPULATION_SIZE=32768,
                 LR_SCHEDULE=((0, 0.35), (500, 0.17), (2000, 0.085), (5000, 0.042), (8500, 0.02), (10500, 0.01)),
                 VALIDATE_EVERY=100, SAMPLE_EVERY=100, SNAPSHOT_EVERY=1000),
    # nano-egg's model, members, windows and validation. Three draws of 4 bits have a standard deviation of 15.2, its normal ones, cut to
    # integers, of 15.6; 16 logit units are a bit. It learns more from AdamW, louder noise and a threshold than from nano-egg's own
    # settings, which are OPTIMIZER=ztest SIGMA_SHIFT=4 FAST_FITNESS=1. Two chunks, so that two GPUs can share a step; one fills the largest.
    "nano-egg": dict(MODEL="gru", HIDDEN_DIM=256, N_LAYERS=6, SEQ_LEN=100, VOCAB_SIZE=256, DETOKENIZE=1, CHUNK_SIZE=16384,
                     POPULATION_SIZE=32768, SIGMA_SHIFT=3, SIGMA_SHIFT_VECTOR=8, HOST_GAUSSIAN=1, DEVICE_GAUSSIAN=1,
                     ADAPTIVE_NOISE_MODE=0, LOSS="exact", SOFTMAX_EXP_SCALE=16 / math.log(2), CHUNK_MEAN_FILTER=0, ADAPTIVE_THRESHOLD_ALPHA=1.0,
                     LR_SCHEDULE=((0, 1.0), (60, 0.7), (150, 0.5), (300, 0.35), (600, 0.25), (1500, 0.15), (4000, 0.08), (8000, 0.04)),
                     ADAM_WEIGHT_DECAY=0.001, VALIDATE_EVERY=50, VALIDATE_TOKENS=0, VALIDATE_WINDOW=448, SAMPLE_EVERY=100),
}
# The best found so far for bytes: nano-egg's model with a single layer, which learns no less from a token than six and sees five times as many.
PRESETS["best-bytes"] = {**PRESETS["nano-egg"], "N_LAYERS": 1, "CHUNK_SIZE": 65536, "POPULATION_SIZE": 65536,
                         "VALIDATE_EVERY": 100, "SNAPSHOT_EVERY": 1000,
                         "LR_SCHEDULE": ((0, 1.0), (60, 0.7), (150, 0.5), (300, 0.35), (600, 0.25), (1200, 0.15), (2500, 0.1), (5000, 0.06),
                                         (8000, 0.04), (11000, 0.025), (13500, 0.0125))}

LOCAL = {"INPUT_FILE", "VAL_FILE", "DECODING_FILE", "PORT", "STRAGGLER_TIMEOUT", "AUDIT_RATE", "SNAPSHOT_EVERY",
         "CONNECTIONS_PER_ADDRESS", "IDLE_TIMEOUT", "DEVICE", "DEBUG", "DEBUG_FILE", "SIMD",
         "GOSSIP_RATE", "MERGE", "RECOMBINE_ALPHA", "OPTIMIZER_MERGE", "ELITES", "REJUVENATE_AFTER"}

_DEFAULTS = {k: v for k, v in globals().items() if k.isupper() and k not in ("PRESETS", "LOCAL") and not k.startswith("_")}

# constants that say nothing to the other model
_OWN = {"transformer": ("HEAD_DIM", "SHIFT_ATTN", "SHIFT_OUT", "SHIFT_LOGIT", "SHIFT_MLP_UP", "SHIFT_MLP_DOWN", "SHIFT_QKV", "ROPE_SCALE_BIT",
                        "NTT_MODE", "NTT_CAUSAL", "DEBUG"),
        "gru": ("STATE_TOKENS", "MLP_RELU", "VALIDATE_WINDOW")}

# name: allowed values (a tuple of strings), or (lowest, highest)
_RULES = {
    "MODEL": ("transformer", "gru"), "STATE_TOKENS": (0, 1024), "MLP_RELU": (0, 1),
    "HIDDEN_DIM": (64, 1024), "HEAD_DIM": (32, 128), "N_LAYERS": (1, 64), "SEQ_LEN": (8, 1024), "VOCAB_SIZE": (256, 262144),
    "CHUNK_SIZE": (2, 1 << 24), "POPULATION_SIZE": (0, 1 << 28), "GROUP_SIZE": (2, 1 << 28), "NOISE_REUSE": (0, 1 << 30),
    "FIXED_POINT": (0, 15), "SIGMA_SHIFT": (0, 15), "SIGMA_SHIFT_VECTOR": (0, 15), "SHIFT_ATTN": (0, 24), "SHIFT_OUT": (0, 24),
    "SHIFT_LOGIT": (0, 24), "SHIFT_MLP_UP": (0, 24), "SHIFT_MLP_DOWN": (0, 24), "SHIFT_QKV": (0, 24),
    "SOFTMAX_SCALE_BIT": (8, 18), "SOFTMAX_LUT_SIZE": (2, 256), "SOFTMAX_EXP_SCALE": (0.5, 64.0), "ROPE_SCALE_BIT": (1, 30),
    "HOST_GAUSSIAN": (0, 1), "DEVICE_GAUSSIAN": (0, 1), "HOST_MASK": (0, 127), "TOKEN_MASK": (-1, 127), "DEVICE_MASK": (0, 127),
    "ADAPTIVE_NOISE_MODE": (0, 2), "ADAPTIVE_NOISE_INIT": (-127, 127), "ADAPTIVE_NOISE_INC": (0, 127), "ADAPTIVE_NOISE_DEC": (0, 127),
    "LOSS": ("deggs", "exact"), "USE_SAME_DATA": (0, 1), "CHUNK_MEAN_FILTER": (0, 1), "CHUNK_MEAN_EXPONENT": (0.0, 4.0),
    "USE_ADAPTIVE_THRESHOLD": (0, 1), "ADAPTIVE_THRESHOLD_ALPHA": (0.0, 100.0), "FAST_FITNESS": (0, 1),
    "OPTIMIZER": ("adamw", "sgd", "ztest"), "ZTEST_ALPHA": (1e-6, 64.0), "USE_CLT": (0, 1), "RARE_TOKENS": (0.0, 1.0),
    "ADAM_BETA1": (0.0, 1.0), "ADAM_BETA2": (0.0, 1.0), "ADAM_EPS": (0.0, 1.0), "ADAM_WEIGHT_DECAY": (0.0, 1.0),
    "USE_MUON": (0, 1), "MUON_MOMENTUM": (0.0, 0.9999), "MUON_LR_SCALE": (0.0, 1000.0),
    "MUON_NS": ("quintic", "cubic"), "NTT_MODE": (0, 3), "NTT_CAUSAL": (0, 1),
    "ISLAND_SEED": (0, (1 << 32) - 1), "GOSSIP_RATE": (0.0, 1.0), "MERGE": ("clone", "recombine"), "RECOMBINE_ALPHA": (0.0, 1.0),
    "OPTIMIZER_MERGE": ("reset", "copy", "interpolate"), "ELITES": (0, 1000), "REJUVENATE_AFTER": (0, 1 << 30),
    "SAMPLING_TEMP": (0.0, 100.0), "SAMPLING_MIN_P": (0.0, 1.0), "SAMPLING_PRESENCE_PENALTY": (0.0, 100.0),
    "SAMPLE_EVERY": (0, 1 << 30), "SAMPLE_PROMPT": (1, 1024), "SAMPLE_TOKENS": (1, 65536),
    "VALIDATE_EVERY": (0, 1 << 30), "VALIDATE_TOKENS": (0, 1 << 40), "VALIDATE_WINDOW": (0, 1 << 20), "DETOKENIZE": (0, 1),
    "PORT": (0, 65535), "STRAGGLER_TIMEOUT": (0.1, 1e6), "AUDIT_RATE": (0.0, 1.0),
    "SNAPSHOT_EVERY": (0, 1 << 30), "CONNECTIONS_PER_ADDRESS": (1, 1 << 20), "IDLE_TIMEOUT": (1.0, 1e6), "DEVICE": ("auto", "cpu", "cuda"),
    "DEBUG": (0, 1), "SIMD": ("auto", "vnni512", "vnni256", "madd", "portable"),
}


class EggError(Exception):
    """A message for the user, in one line: what was wrong, what to do. The base of all such errors of the program."""


class ConfigError(EggError):
    """One line: which constant, what was wrong, what is allowed."""


class Config(types.SimpleNamespace):
    """All constants by name, plus the derived values of `_derive`. Treat it as read-only; it pickles."""

    def constants(self):
        return {k: getattr(self, k) for k in _DEFAULTS}

    def shared(self):
        """The constants that coordinator and workers must agree on."""
        return {k: v for k, v in self.constants().items() if k not in LOCAL}

    def fingerprint(self):
        """SHA-256 (hex) over the shared constants."""
        return hashlib.sha256(json.dumps(self.shared(), sort_keys=True).encode()).hexdigest()

    def learning_rate(self, step):
        """Learning rate (float) of the update of `step`; "ztest": the share of the weights that chance would move."""
        if self.OPTIMIZER == "ztest":
            return 1 / ((2 ** self.ZTEST_ALPHA - 1) * step / 1000 + 1) if self.ZTEST_ALPHA > 1 else self.ZTEST_ALPHA
        return [rate for first, rate in self.LR_SCHEDULE if first <= step][-1]


def load(preset=None, defines=(), environ=os.environ, saved=()):
    """Constants with overrides applied and checked: this file < preset < EGG_* in `environ` < `defines` ("NAME=VALUE" strings).
    saved: the constants of a saved run, as JSON gives them back, which stand in for those of this file.

    Raises ConfigError with one line naming the constant and the rule."""
    values = {**_DEFAULTS, **{k: tuple(map(tuple, v)) if isinstance(v, list) else v for k, v in dict(saved).items()}}
    preset = preset or environ.get("EGG_PRESET")
    if preset:
        if preset not in PRESETS:
            raise ConfigError(f"no preset {preset!r}: there is {', '.join(PRESETS)}")
        values.update(PRESETS[preset])
    for key, text in environ.items():
        if key.startswith("EGG_") and key not in ("EGG_PRESET", "EGG_SECRET"):
            values.update(_parse(key[4:], text, key))
    for define in defines:
        name, equals, text = define.partition("=")
        if not equals:
            raise ConfigError(f"-D {define}: write -D NAME=VALUE")
        values.update(_parse(name.strip(), text.strip(), f"-D {name.strip()}"))
    return make(**values)


def make(**values):
    """A checked Config from keyword constants; those not given keep this file's values."""
    unknown = [k for k in values if k not in _DEFAULTS]
    if unknown:
        raise ConfigError(f"{unknown[0]}: {_no_such(unknown[0])}")
    cfg = Config(**{**_DEFAULTS, **values})
    if not cfg.POPULATION_SIZE:
        cfg.POPULATION_SIZE = 8 * cfg.CHUNK_SIZE
    validate(cfg)
    _derive(cfg)
    return cfg


def validate(cfg):
    """Raises ConfigError at the first constant, or combination of constants, that cannot work."""
    def need(ok, name, rule):
        if not ok:
            raise ConfigError(f"{name} = {getattr(cfg, name)}: {rule}")

    for name, rule in _RULES.items():
        value = getattr(cfg, name)
        if isinstance(rule[0], str):
            need(value in rule, name, f"must be one of {', '.join(rule)}")
        else:
            kind = type(_DEFAULTS[name])
            need(type(value) is kind or kind is float and type(value) is int, name, f"must be {_kind(name)}")
            need(rule[0] <= value <= rule[1], name, f"must be from {rule[0]} to {rule[1]}")
    for model, names in _OWN.items():
        for name in names if model != cfg.MODEL else ():
            need(getattr(cfg, name) == _DEFAULTS[name], name, f"says nothing to MODEL = {cfg.MODEL}: leave it at {_DEFAULTS[name]}")
    need(cfg.HIDDEN_DIM % 32 == 0, "HIDDEN_DIM", "must be a multiple of 32")
    if cfg.MODEL == "transformer":
        need(cfg.HEAD_DIM in (32, 64, 128), "HEAD_DIM", "must be 32, 64 or 128")
        need(cfg.HIDDEN_DIM % cfg.HEAD_DIM == 0, "HIDDEN_DIM", f"must be a multiple of HEAD_DIM = {cfg.HEAD_DIM}")
        need(cfg.SEQ_LEN % 8 == 0, "SEQ_LEN", "must be a multiple of 8")
    else:
        need(cfg.FIXED_POINT <= 7, "FIXED_POINT", "must be at most 7 with MODEL = gru: its divisions are exact so far")
    need(cfg.CHUNK_SIZE % 2 == 0, "CHUNK_SIZE", "must be even: a job is made of antithetic pairs")
    need(cfg.POPULATION_SIZE % cfg.CHUNK_SIZE == 0, "POPULATION_SIZE", f"must be a multiple of CHUNK_SIZE = {cfg.CHUNK_SIZE}")
    need(cfg.GROUP_SIZE % 2 == 0 and cfg.POPULATION_SIZE % cfg.GROUP_SIZE == 0, "GROUP_SIZE",
         f"must be even, as antithetic pairs read the same tokens, and divide POPULATION_SIZE = {cfg.POPULATION_SIZE}")
    for gaussian, *masks in ("HOST_GAUSSIAN", "HOST_MASK", "TOKEN_MASK"), ("DEVICE_GAUSSIAN", "DEVICE_MASK"):
        for mask in masks if getattr(cfg, gaussian) else ():
            need(getattr(cfg, mask) <= 42, mask, f"must be at most 42 with {gaussian}: three draws must fit int8")
    need(not cfg.DETOKENIZE or cfg.VOCAB_SIZE == 256, "DETOKENIZE", "needs VOCAB_SIZE 256: it turns tokens into bytes")
    need(not cfg.RARE_TOKENS or cfg.OPTIMIZER != "ztest", "RARE_TOKENS", "needs OPTIMIZER adamw or sgd: the z-test has no learning rate")
    need(not cfg.USE_MUON or cfg.OPTIMIZER == "adamw", "USE_MUON", "needs OPTIMIZER adamw, which moves what Muon does not")
    need(not cfg.NTT_MODE or cfg.SEQ_LEN & (cfg.SEQ_LEN - 1) == 0, "NTT_MODE", f"needs a SEQ_LEN that is a power of two, not {cfg.SEQ_LEN}")
    need(cfg.NTT_MODE != 2 or cfg.SEQ_LEN <= 256, "NTT_MODE", f"needs SEQ_LEN of 256 at most, not {cfg.SEQ_LEN}: 257 has no root of that order")
    steps = [s for s, _ in cfg.LR_SCHEDULE]
    need(steps and steps[0] == 0 and steps == sorted(set(steps)), "LR_SCHEDULE", "must start at step 0, steps rising")
    need(all(0 <= r <= 1000 for _, r in cfg.LR_SCHEDULE), "LR_SCHEDULE", "rates must be from 0 to 1000")


def _derive(cfg):
    cfg.N_HEADS = cfg.HIDDEN_DIM // cfg.HEAD_DIM
    cfg.N_CHUNKS = cfg.POPULATION_SIZE // cfg.CHUNK_SIZE
    cfg.N_PAIRS = cfg.POPULATION_SIZE // 2
    cfg.N_GROUPS = 1 if cfg.USE_SAME_DATA else cfg.POPULATION_SIZE // cfg.GROUP_SIZE
    cfg.NOISE_SHIFT = cfg.FIXED_POINT + cfg.SIGMA_SHIFT
    cfg.LOSS_SCALE = 256 if cfg.LOSS == "exact" else 1         # units of an evaluated loss in one logit unit


def bounds(name):
    """(lowest, highest) that a constant may be."""
    return _RULES[name]


def changed(cfg):
    """{name: value}: the constants of cfg, without those of this machine, that are not as in this file."""
    default = make()
    return {name: value for name, value in cfg.shared().items() if value != getattr(default, name)}


def text(value):
    """A value as an override takes it."""
    return ",".join(f"{step}:{rate!r}" for step, rate in value) if isinstance(value, tuple) else str(value)


def _kind(name):
    return {int: "a whole number", float: "a number", str: "text", tuple: "step:rate,step:rate,..."}[type(_DEFAULTS[name])]


def _no_such(name):
    near = difflib.get_close_matches(name, _DEFAULTS, 1)
    return "no such constant in egg_config.py" + (f"; did you mean {near[0]}?" if near else "")


def _parse(name, text, source):
    if name not in _DEFAULTS:
        raise ConfigError(f"{source}: {_no_such(name)}")
    kind = type(_DEFAULTS[name])
    try:
        if kind is int:
            value = {"true": 1, "false": 0}.get(text.lower())
            value = int(text, 0) if value is None else value
        elif kind is tuple:
            value = tuple((int(s), float(r)) for s, r in (item.split(":") for item in text.split(",")))
        else:
            value = kind(text)
    except ValueError:
        raise ConfigError(f"{source}: {text!r} is not {_kind(name)}") from None
    return {name: value}
