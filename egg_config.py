"""Every constant of egg, edited like a config.h.

Edit the assignments below, or override them for one run: by an environment variable EGG_<NAME>=value, or by
-D NAME=VALUE after a subcommand. The later wins: this file, preset, environment, -D. FACTS says of each constant what
it may be and who must agree on it. `load()` applies the overrides, checks everything and returns a Config.
"""

import contextlib
import difflib
import hashlib
import json
import math
import os
import types
from typing import NamedTuple

# --- model -----------------------------------------------------------------------------------------------------------
MODEL = "transformer"         # or "gru": the recurrent model of nano-egg
HIDDEN_DIM = 256              # width of the model: 64 to 1024, a multiple of 32 and of HEAD_DIM
HEAD_DIM = 64                 # width of one attention head: 32, 64 or 128
N_LAYERS = 4                  # layers
SEQ_LEN = 64                  # tokens of a training window: 8 to 1024, for the transformer a multiple of 8
STATE_TOKENS = 0              # gru: tokens before a window, from which the unperturbed model makes a state; 0: none
MLP_RELU = 0                  # gru: 1: no negative values inside the MLP
VOCAB_SIZE = 8192             # 256: input.bin holds plain bytes and no decoding.bin is needed; else uint32 tokens
NTT_MODE = 0                  # adds embeddings of a transform of the window (model.transforms):
#                               0 none, 1 Walsh-Hadamard, 2 modulo 257, 3 modulo 65537
NTT_CAUSAL = 1                # 1: a coefficient sees no token after its position; 0: it sees the whole window (d-eggs)

# --- population ------------------------------------------------------------------------------------------------------
CHUNK_SIZE = 40960            # members evaluated in one job (even: antithetic pairs stay together)
POPULATION_SIZE = 0           # members a step, a multiple of CHUNK_SIZE; 0 means 8 chunks
GROUP_SIZE = 2                # members that read the same tokens: even, a divisor of POPULATION_SIZE

# --- fixed-point arithmetic ------------------------------------------------------------------------------------------
FIXED_POINT = 4               # fractional bits of weights and activations
SIGMA_SHIFT = 3               # matrix noise is shifted right by FIXED_POINT + SIGMA_SHIFT: larger means quieter
SIGMA_SCHEDULE = ()           # (first step, SIGMA_SHIFT from there on); as an override: 1000:4,3000:5; (): one for ever
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

# --- noise -----------------------------------------------------------------------------------------------------------
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

# --- fitness ---------------------------------------------------------------------------------------------------------
LOSS = "deggs"                # "deggs": the coarse logarithm of SPEC 7.5; "exact": true cross-entropy in fixed point
USE_SAME_DATA = 0             # 1: every pair reads the same window
CHUNK_MEAN_FILTER = 1         # 1: add the mean difference of the chunk, raised to this power, to every difference
CHUNK_MEAN_EXPONENT = 1.2
USE_ADAPTIVE_THRESHOLD = 1    # 1: differences below this share of their mean size count as 0
ADAPTIVE_THRESHOLD_ALPHA = 0.1
FAST_FITNESS = 0              # 1: the sign of the difference, neither filtered nor measured against the others'

SOFT_TARGETS = ()             # (first step, context): from there on a position is scored against 8 tokens, the one that
#                               follows and 7 drawn from all in the training data that follow the same last tokens,
#                               `context` of them; as an override: 0:2,300:3; 0 or (): the one that follows alone

# --- optimizer -------------------------------------------------------------------------------------------------------
OPTIMIZER = "adamw"           # "adamw"; "sgd": the accumulator collects lr * vote / sqrt(pairs);
#                               "ztest": weights with a significant vote move by 1
LR_SCHEDULE = ((0, 0.5), (100, 0.25), (200, 0.125))   # (first step, learning rate); as an override: 0:0.5,100:0.25
RARE_TOKENS = 0.0             # columns of tokens below this share of the data learn more slowly:
#                               by the factor sqrt(share / RARE_TOKENS); 0: all alike
SEEN_VOTES = 1                # a pair's vote on the embedding of a token counts so often if the pair's window holds the
#                               token: most of what the others vote on it is noise; 1: all alike
ADAM_BETA1 = 0.9
ADAM_BETA2 = 0.95
ADAM_EPS = 1e-8
ADAM_WEIGHT_DECAY = 0.01
ZTEST_ALPHA = 4.0             # "ztest": share of the weights that chance would move;
#                               above 1: it falls from 1 to 2^-ZTEST_ALPHA in 1,000 steps
USE_CLT = 1                   # 0: votes count the signs of the noise instead of the noise
USE_MUON = 0                  # 1: matrices of attention and MLPs move along their orthogonalised momentum
MUON_MOMENTUM = 0.85          # share of the momentum that is left after a step
MUON_LR_SCALE = 1.0           # factor on their learning rate; at 1 a step is about as long as AdamW's
MUON_NS = "quintic"           # Newton-Schulz iteration: "quintic" (singular values to 0.7..1.2, quickly),
#                               "cubic" (to 1, slowly, as in d-eggs)

# --- islands: populations that gossip (islands.gossip) ---------------------------------------------------------------
ISLAND_SEED = 0               # selects the noise: every island needs another number, and its workers the same as it.
#                               The other constants of this section concern the coordinator alone.
GOSSIP_RATE = 0.01            # probability that an island compares itself with a peer after a step
MERGE = "clone"               # use of a better peer's state: "clone" takes it, "recombine" mixes it with the own
RECOMBINE_ALPHA = 0.5         # "recombine": share of the better state when both are equally good (islands.merging)
OPTIMIZER_MERGE = "copy"      # moments after a merge: "reset", "copy" the peer's, "interpolate" as the weights
ELITES = 1                    # number of best states that are kept, whatever is merged
REJUVENATE_AFTER = 0          # steps without improvement before moments restart and the noise is raised; 0: never

# --- sampling, validation --------------------------------------------------------------------------------------------
SAMPLING_TEMP = 0.6           # 0 is greedy
SAMPLING_MIN_P = 0.08         # tokens less likely than this share of the likeliest are cut; 0 cuts none
SAMPLING_PRESENCE_PENALTY = 0.2   # nats, taken once from every token seen
SAMPLE_EVERY = 5              # steps between samples during training; 0: none; from 10 on a few more at first
SAMPLE_PROMPT = 32            # tokens of the data a sample starts from
SAMPLE_TOKENS = 64            # tokens that a sample adds
VALIDATE_EVERY = 10           # steps between validations on VAL_FILE; 0: none; from 10 on a few more at first
VALIDATE_TOKENS = 65536       # most tokens that a validation reads, in windows spread evenly over the file; 0: all
VALIDATE_WINDOW = 0           # gru: tokens of such a window, which begins with a state of zero; 0: SEQ_LEN

# --- this machine ----------------------------------------------------------------------------------------------------
INPUT_FILE = "input.bin"
VAL_FILE = "val.bin"
DECODING_FILE = "decoding.bin"
DETOKENIZE = 0                # 1, with VOCAB_SIZE 256: the files hold tokens of decoding.bin, read as their bytes
PORT = 12345
STRAGGLER_TIMEOUT = 90.0      # seconds before a silent worker's chunk is given away, until a chunk's time is known
AUDIT_RATE = 0.01             # share of the chunks that two workers evaluate, if there are two; 1: all
SNAPSHOT_EVERY = 100          # steps between snapshots in the save directory; 0: none
CONNECTIONS_PER_ADDRESS = 256  # connections that one address may hold open at the coordinator
IDLE_TIMEOUT = 600.0          # seconds before a silent connection is closed
DEVICE = "auto"               # "cpu", "cuda", or "auto": a GPU if there is one
DEBUG = 0                     # 1: every tenth step the worker of chunk 0 prints statistics of activations and weights
DEBUG_FILE = ""               # file to which it appends them, a line of JSON a step
SIMD = "auto"                 # int8 products of the CPU engine: "auto", "vnni512", "vnni256", "madd", "portable"
TENSOR_CORES = "auto"         # int8 products of the CUDA engine: "wgmma" (H100 and H200), "mma" (any card), "auto"

PRESETS = {
    # A byte model that learns within a minute on two cores: the small recurrent model learns as much from a token as
    # the transformer of that size and reads more of them a second. The overlay is off: it would end the noise of norms
    # and biases within 64 steps and later, at small rates, all other noise. Soft targets halve the tokens that are
    # needed. With so few members SEEN_VOTES, small initial weights and little momentum help as well.
    "laptop": dict(
        MODEL="gru", HIDDEN_DIM=64, N_LAYERS=1, SEQ_LEN=64, VOCAB_SIZE=256, DETOKENIZE=1, CHUNK_SIZE=256,
        POPULATION_SIZE=1024, SIGMA_SHIFT_VECTOR=8, HOST_GAUSSIAN=1, HOST_MASK=3, DEVICE_GAUSSIAN=1, LOSS="exact",
        SOFTMAX_EXP_SCALE=16 / math.log(2), ADAPTIVE_NOISE_MODE=0, CHUNK_MEAN_FILTER=0, ADAPTIVE_THRESHOLD_ALPHA=1.0,
        SOFT_TARGETS=((0, 1), (50, 2), (1000, 3)), SEEN_VOTES=16, ADAM_BETA1=0.5, ADAM_WEIGHT_DECAY=0.001,
        LR_SCHEDULE=((0, 1.0), (200, 0.5), (500, 0.25), (1500, 0.125), (4000, 0.06)), VALIDATE_EVERY=100,
        SAMPLE_EVERY=500),
    # The best found for minutes on one large GPU. One layer learns as much from a token as four and sees twice as many.
    # Many steps with falling rates. With the default shifts an MLP would add almost nothing to the residual stream.
    # Norms and biases have little noise; the overlay is off, as in "laptop"; rare tokens begin small and learn slowly.
    # A step has four chunks, so that up to four GPUs can share it; one chunk of 32768 would be 1.3 % faster on one GPU.
    "best": dict(
        N_LAYERS=1, LOSS="exact", HOST_MASK=7, TOKEN_MASK=1, RARE_TOKENS=0.0005, SIGMA_SHIFT=2, SIGMA_SHIFT_VECTOR=7,
        ADAPTIVE_NOISE_MODE=0, CHUNK_MEAN_FILTER=0, ADAPTIVE_THRESHOLD_ALPHA=1.0, ADAM_WEIGHT_DECAY=0.001,
        SHIFT_MLP_UP=7, SHIFT_MLP_DOWN=7, SHIFT_OUT=8, CHUNK_SIZE=8192, POPULATION_SIZE=32768,
        SOFT_TARGETS=((0, 1),), LR_SCHEDULE=((0, 0.5), (500, 0.25), (2000, 0.12), (5000, 0.06), (8500, 0.03),
                                             (10500, 0.015)),
        VALIDATE_EVERY=100, SAMPLE_EVERY=100, SNAPSHOT_EVERY=1000),
    # nano-egg's model, population, windows and validation. Three draws of 4 bits have a standard deviation of 15.2;
    # nano-egg's normal draws, cut to integers, have 15.6. 16 logit units are a bit. AdamW, louder noise and a threshold
    # learn more than nano-egg's own settings, which are OPTIMIZER=ztest SIGMA_SHIFT=4 FAST_FITNESS=1.
    # Two chunks, so that two GPUs can share a step.
    "nano-egg": dict(
        MODEL="gru", HIDDEN_DIM=256, N_LAYERS=6, SEQ_LEN=100, VOCAB_SIZE=256, DETOKENIZE=1, CHUNK_SIZE=16384,
        POPULATION_SIZE=32768, SIGMA_SHIFT=3, SIGMA_SHIFT_VECTOR=8, HOST_GAUSSIAN=1, DEVICE_GAUSSIAN=1, LOSS="exact",
        SOFTMAX_EXP_SCALE=16 / math.log(2), ADAPTIVE_NOISE_MODE=0, CHUNK_MEAN_FILTER=0, ADAPTIVE_THRESHOLD_ALPHA=1.0,
        LR_SCHEDULE=((0, 1.0), (60, 0.7), (150, 0.5), (300, 0.35), (600, 0.25), (1500, 0.15), (4000, 0.08),
                     (8000, 0.04)), ADAM_WEIGHT_DECAY=0.001, VALIDATE_EVERY=50, VALIDATE_TOKENS=0,
        VALIDATE_WINDOW=448, SAMPLE_EVERY=100, SNAPSHOT_EVERY=1000),
}
# The best found for bytes: nano-egg's model with one layer learns as much from a token and sees five times as many.
# Four chunks a step cost nothing on one GPU.
PRESETS["best-bytes"] = {
    **PRESETS["nano-egg"], "N_LAYERS": 1, "POPULATION_SIZE": 65536, "VALIDATE_EVERY": 100,
    "SOFT_TARGETS": ((0, 2), (60, 3), (500, 4), (5000, 5)),
    "LR_SCHEDULE": ((0, 1.5), (60, 1.05), (150, 0.75), (300, 0.5), (600, 0.37), (1200, 0.22), (2500, 0.15),
                    (5500, 0.09), (9000, 0.06), (12500, 0.035), (14800, 0.018)), "SNAPSHOT_EVERY": 1000}

_DEFAULTS = {k: v for k, v in globals().items() if k.isupper() and k != "PRESETS"}

SHIPPED = "cc6018665ccdeed5cbd0bc4bc282092a6729bba180e3655be8692ed10b533da9"     # fingerprint of this file unedited

# --- what holds for each constant ------------------------------------------------------------------------------------

ALL = "all"         # coordinator, workers and the islands that gossip must agree on it
ISLAND = "island"   # coordinator and workers must agree on it; islands that gossip may differ in it
LOCAL = "local"     # of this machine: it may differ everywhere and is in no fingerprint


class Fact(NamedTuple):
    """allowed: (lowest, highest), a tuple of words, or None; agree: ALL, ISLAND or LOCAL; model: the only MODEL that
    has the constant, or None; saved: whether a saved run goes on only if it is unchanged. Which constants are frozen
    into compiled kernels is not listed: engine.kernel_cache finds that in the kernels."""
    allowed: tuple | None
    agree: str = ALL
    model: str | None = None
    saved: bool = True


def _facts(*rows):
    """{name: Fact} from rows of (names, fields of Fact). A local constant never matters to a saved run."""
    facts = {}
    for name, fact in ((name, Fact(*row)) for names, *row in rows for name in names.split()):
        if name in facts:
            raise ValueError(f"{name} is twice in the table")
        facts[name] = fact._replace(saved=fact.saved and fact.agree != LOCAL)
    return facts


FACTS = _facts(
    ("MODEL", ("transformer", "gru")), ("HIDDEN_DIM", (64, 1024)), ("HEAD_DIM", (32, 128), ALL, "transformer"),
    ("N_LAYERS", (1, 64)), ("SEQ_LEN", (8, 1024)), ("STATE_TOKENS", (0, 1024), ALL, "gru"),
    ("MLP_RELU", (0, 1), ALL, "gru"), ("VOCAB_SIZE", (256, 262144)), ("NTT_MODE", (0, 3), ALL, "transformer"),
    ("NTT_CAUSAL", (0, 1), ALL, "transformer"), ("CHUNK_SIZE", (2, 1 << 24), ISLAND),
    ("POPULATION_SIZE", (0, 1 << 28), ISLAND), ("GROUP_SIZE", (2, 1 << 28), ISLAND), ("FIXED_POINT", (0, 15)),
    ("SIGMA_SHIFT SIGMA_SHIFT_VECTOR", (0, 15), ISLAND), ("SIGMA_SCHEDULE", None, ISLAND),
    ("SHIFT_ATTN SHIFT_OUT SHIFT_LOGIT SHIFT_MLP_UP SHIFT_MLP_DOWN SHIFT_QKV", (0, 24), ALL, "transformer"),
    ("SOFTMAX_SCALE_BIT", (8, 18)), ("SOFTMAX_LUT_SIZE", (2, 256)), ("SOFTMAX_EXP_SCALE", (0.5, 64.0)),
    ("ROPE_SCALE_BIT", (1, 30), ALL, "transformer"), ("HOST_GAUSSIAN DEVICE_GAUSSIAN", (0, 1), ISLAND),
    ("HOST_MASK DEVICE_MASK", (0, 127), ISLAND), ("TOKEN_MASK", (-1, 127), ISLAND),
    ("NOISE_REUSE", (0, 1 << 30), ISLAND), ("ADAPTIVE_NOISE_MODE", (0, 2)),
    ("ADAPTIVE_NOISE_INIT", (-127, 127), ISLAND), ("ADAPTIVE_NOISE_INC ADAPTIVE_NOISE_DEC", (0, 127), ISLAND),
    ("LOSS", ("deggs", "exact")), ("SOFT_TARGETS", None, ISLAND),
    ("USE_SAME_DATA CHUNK_MEAN_FILTER USE_ADAPTIVE_THRESHOLD FAST_FITNESS USE_CLT", (0, 1), ISLAND),
    ("CHUNK_MEAN_EXPONENT", (0.0, 4.0), ISLAND), ("ADAPTIVE_THRESHOLD_ALPHA", (0.0, 100.0), ISLAND),
    ("OPTIMIZER", ("adamw", "sgd", "ztest")), ("LR_SCHEDULE", None, ISLAND), ("SEEN_VOTES", (1, 127), ISLAND),
    ("RARE_TOKENS ADAM_BETA1 ADAM_BETA2 ADAM_EPS ADAM_WEIGHT_DECAY", (0.0, 1.0), ISLAND),
    ("ZTEST_ALPHA", (1e-6, 64.0), ISLAND), ("USE_MUON", (0, 1)), ("MUON_MOMENTUM", (0.0, 0.9999), ISLAND),
    ("MUON_LR_SCALE", (0.0, 1000.0), ISLAND), ("MUON_NS", ("quintic", "cubic"), ISLAND),
    ("ISLAND_SEED", (0, (1 << 32) - 1), ISLAND), ("GOSSIP_RATE RECOMBINE_ALPHA AUDIT_RATE", (0.0, 1.0), LOCAL),
    ("MERGE", ("clone", "recombine"), LOCAL), ("OPTIMIZER_MERGE", ("reset", "copy", "interpolate"), LOCAL),
    ("ELITES", (0, 1000), LOCAL), ("REJUVENATE_AFTER SNAPSHOT_EVERY", (0, 1 << 30), LOCAL),
    ("SAMPLING_TEMP SAMPLING_PRESENCE_PENALTY", (0.0, 100.0), ISLAND, None, False),
    ("SAMPLING_MIN_P", (0.0, 1.0), ISLAND, None, False),
    ("SAMPLE_EVERY VALIDATE_EVERY", (0, 1 << 30), ISLAND, None, False),
    ("SAMPLE_PROMPT", (1, 1024), ISLAND, None, False), ("SAMPLE_TOKENS", (1, 65536), ISLAND, None, False),
    ("VALIDATE_TOKENS", (0, 1 << 40), ALL, None, False),      # islands compare their validations
    ("VALIDATE_WINDOW", (0, 1 << 20), ALL, "gru", False),
    ("INPUT_FILE VAL_FILE DECODING_FILE DEBUG_FILE", None, LOCAL), ("DETOKENIZE", (0, 1)),
    ("PORT", (0, 65535), LOCAL), ("STRAGGLER_TIMEOUT", (0.1, 1e6), LOCAL),
    ("CONNECTIONS_PER_ADDRESS", (1, 1 << 20), LOCAL), ("IDLE_TIMEOUT", (1.0, 1e6), LOCAL),
    ("DEVICE", ("auto", "cpu", "cuda"), LOCAL), ("DEBUG", (0, 1), LOCAL),
    ("SIMD", ("auto", "vnni512", "vnni256", "madd", "portable"), LOCAL),
    ("TENSOR_CORES", ("auto", "wgmma", "mma"), LOCAL),
)


DATA_FILES = "INPUT_FILE", "VAL_FILE", "DECODING_FILE"


class EggError(Exception):
    """A message for the user, in one line: what was wrong, what to do. status: the exit status of a command."""
    status = 1


class UsageError(EggError):
    """A wrong use: the same command can never work."""
    status = 2


class ConfigError(UsageError):
    """About a constant: which one, what was wrong, what is allowed."""


@contextlib.contextmanager
def explained(kind, place, advice=""):
    """An OSError in the block becomes a `kind` of EggError: the place, what the system says, the advice."""
    try:
        yield
    except OSError as error:
        raise kind(f"{place}: {error.strerror}" + f": {advice}" * bool(advice)) from None


class Config(types.SimpleNamespace):
    """All constants by name, plus the derived values of `_derive`. Treat it as read-only; it pickles."""

    def constants(self):
        return {k: getattr(self, k) for k in _DEFAULTS}

    def shared(self):
        """The constants that coordinator and workers must agree on; none that is unset, for programs that lack it."""
        return {k: v for k, v in self.constants().items() if FACTS[k].agree != LOCAL and v != UNSET.get(k)}

    def saved(self):
        """The constants that a saved run depends on."""
        return {k: v for k, v in self.shared().items() if FACTS[k].saved}

    def settings(self):
        """The constants that a saved run keeps although it does not depend on them: they may change at any step."""
        kept = self.shared().keys() - self.saved().keys() | {*DATA_FILES, "SNAPSHOT_EVERY"}
        return {k: v for k, v in self.constants().items() if k in kept}

    def fingerprint(self):
        """SHA-256 (hex) over the shared constants."""
        return hashlib.sha256(json.dumps(self.shared(), sort_keys=True).encode()).hexdigest()

    def learning_rate(self, step):
        """Learning rate (float) of the update of `step`; "ztest": share of the weights that chance would move."""
        if self.OPTIMIZER == "ztest":
            return 1 / ((2 ** self.ZTEST_ALPHA - 1) * step / 1000 + 1) if self.ZTEST_ALPHA > 1 else self.ZTEST_ALPHA
        return [rate for first, rate in self.LR_SCHEDULE if first <= step][-1]

    def sigma_shift(self, step):
        """SIGMA_SHIFT (int) of the members of `step`."""
        return [self.SIGMA_SHIFT, *(shift for first, shift in self.SIGMA_SCHEDULE if first <= step)][-1]

    def soft_context(self, step):
        """Tokens of context (int) of the soft targets of `step`, 0: none are drawn."""
        return [0, *(context for first, context in self.SOFT_TARGETS if first <= step)][-1]

    def noise_shift(self, step):
        """Right shift (int) of the matrix noise of the members of `step`."""
        return self.FIXED_POINT + self.sigma_shift(step)


def given(preset=None, defines=(), environ=os.environ):
    """{name: (source, value)}: the constants that are set for one run, preset < EGG_* in `environ` < `defines`
    ("NAME=VALUE" strings); source: as the user wrote it. Raises ConfigError."""
    source = f"--preset {preset}" if preset else "EGG_PRESET"
    preset = preset or environ.get("EGG_PRESET")
    if preset and preset not in PRESETS:
        raise ConfigError(f"no preset {preset!r}: there is {', '.join(PRESETS)}")
    found = {name: (source, value) for name, value in PRESETS.get(preset, {}).items()}
    for key, text in environ.items():
        if key.startswith("EGG_") and key not in ("EGG_PRESET", "EGG_SECRET"):
            found[key[4:]] = key, _parse(key[4:], text, key)
    for define in defines:
        name, equals, text = (part.strip() for part in define.partition("="))
        if not equals:
            raise ConfigError(f"-D {define}: write -D NAME=VALUE")
        found[name] = f"-D {name}", _parse(name, text, f"-D {name}")
    return found


def load(preset=None, defines=(), environ=os.environ, saved=(), run=None):
    """A Config with the overrides of `given`. saved: the constants of a saved run, as JSON gives them back, instead of
    this file's; run: its directory, if it cannot go on with others. Raises ConfigError."""
    values = {**_DEFAULTS, **(UNSET if saved else {}), **{name: _tuples(value) for name, value in dict(saved).items()}}
    found, differ = given(preset, defines, environ), {}
    for name, (source, value) in found.items() if run else ():
        if name == "POPULATION_SIZE":
            value = value or 8 * values["CHUNK_SIZE"]
        if FACTS[name].saved and value != values[name]:
            differ.setdefault(source, []).append(f"{name} = {text(value)}, there it is {text(values[name])}")
    if differ:
        what = "; ".join(f"{source}: {texts[0]}" + f" (and {len(texts) - 1} more)" * (len(texts) > 1)
                         for source, texts in differ.items())
        raise ConfigError(f"{run} holds a run of another configuration: {what}; leave that out, or name another "
                          "directory")
    return make(**{**values, **{name: value for name, (_, value) in found.items()}})


def _tuples(value):
    """A value with tuples in place of the lists of JSON."""
    return tuple(map(_tuples, value)) if isinstance(value, list) else value


def make(**values):
    """A checked Config from keyword constants; those not given keep this file's values."""
    unknown = [k for k in values if k not in _DEFAULTS]
    if unknown:
        raise ConfigError(f"{unknown[0]}: {_no_such(unknown[0])}")
    cfg = Config(**{**_DEFAULTS, **{name: _tuples(value) for name, value in values.items()}})
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

    for name, fact in FACTS.items():
        value, kind, allowed = getattr(cfg, name), type(_DEFAULTS[name]), fact.allowed
        if allowed and kind is str:
            need(value in allowed, name, f"must be one of {', '.join(allowed)}")
        elif allowed:
            need(type(value) is kind or kind is float and type(value) is int, name, f"must be {KINDS[kind]}")
            need(allowed[0] <= value <= allowed[1], name, f"must be from {allowed[0]} to {allowed[1]}")
        need(fact.model in (None, cfg.MODEL) or value == _DEFAULTS[name], name,
             f"says nothing to MODEL = {cfg.MODEL}: leave it at {_DEFAULTS[name]}")
    need(cfg.HIDDEN_DIM % 32 == 0, "HIDDEN_DIM", "must be a multiple of 32")
    if cfg.MODEL == "transformer":
        need(cfg.HEAD_DIM in (32, 64, 128), "HEAD_DIM", "must be 32, 64 or 128")
        need(cfg.HIDDEN_DIM % cfg.HEAD_DIM == 0, "HIDDEN_DIM", f"must be a multiple of HEAD_DIM = {cfg.HEAD_DIM}")
        need(cfg.SEQ_LEN % 8 == 0, "SEQ_LEN", "must be a multiple of 8")
    else:
        need(cfg.FIXED_POINT <= 7, "FIXED_POINT", "must be at most 7 with MODEL = gru: its divisions are exact so far")
    need(cfg.CHUNK_SIZE % 2 == 0, "CHUNK_SIZE", "must be even: a job is made of antithetic pairs")
    need(cfg.POPULATION_SIZE % cfg.CHUNK_SIZE == 0, "POPULATION_SIZE",
         f"must be a multiple of CHUNK_SIZE = {cfg.CHUNK_SIZE}")
    need(cfg.GROUP_SIZE % 2 == 0 and cfg.POPULATION_SIZE % cfg.GROUP_SIZE == 0, "GROUP_SIZE",
         f"must be even, as antithetic pairs read the same tokens, and divide POPULATION_SIZE = {cfg.POPULATION_SIZE}")
    for gaussian, *masks in ("HOST_GAUSSIAN", "HOST_MASK", "TOKEN_MASK"), ("DEVICE_GAUSSIAN", "DEVICE_MASK"):
        for mask in masks if getattr(cfg, gaussian) else ():
            need(getattr(cfg, mask) <= 42, mask, f"must be at most 42 with {gaussian}: three draws must fit int8")
    need(not cfg.DETOKENIZE or cfg.VOCAB_SIZE == 256, "DETOKENIZE", "needs VOCAB_SIZE 256: it turns tokens into bytes")
    need(not cfg.RARE_TOKENS or cfg.OPTIMIZER != "ztest", "RARE_TOKENS",
         "needs OPTIMIZER adamw or sgd: the z-test has no learning rate")
    need(cfg.SEEN_VOTES == 1 or cfg.OPTIMIZER != "ztest", "SEEN_VOTES",
         "needs OPTIMIZER adamw or sgd: the z-test knows how far votes that all count alike may stray by chance")
    need(not cfg.SOFT_TARGETS or cfg.LOSS == "exact", "SOFT_TARGETS",
         "needs LOSS exact, which divides: the mean over 8 targets is a fraction of a logit unit")
    need(not cfg.USE_MUON or cfg.OPTIMIZER == "adamw", "USE_MUON",
         "needs OPTIMIZER adamw, which moves what Muon does not")
    need(not cfg.NTT_MODE or cfg.SEQ_LEN & (cfg.SEQ_LEN - 1) == 0, "NTT_MODE",
         f"needs a SEQ_LEN that is a power of two, not {cfg.SEQ_LEN}")
    need(cfg.NTT_MODE != 2 or cfg.SEQ_LEN <= 256, "NTT_MODE",
         f"needs SEQ_LEN of 256 at most, not {cfg.SEQ_LEN}: 257 has no root of that order")
    tokens = 64 // max(1, (cfg.VOCAB_SIZE - 1).bit_length()) - 1         # whose codes fit 64 bits
    ranges = {"LR_SCHEDULE": (0, 1000, ""), "SIGMA_SCHEDULE": (*FACTS["SIGMA_SHIFT"].allowed, ""),
              "SOFT_TARGETS": (0, tokens, f" tokens with VOCAB_SIZE = {cfg.VOCAB_SIZE}")}
    for name, (kinds, word, what) in SCHEDULES.items():
        schedule, (low, high, of) = getattr(cfg, name), ranges[name]
        need(isinstance(schedule, (tuple, list)) and all(
            isinstance(part, (tuple, list)) and len(part) == 2 and {*map(type, part)} <= kinds for part in schedule),
            name, f"must be pairs of a step and a {what}")
        steps = [first for first, _ in schedule]
        need(steps == sorted({max(step, 0) for step in steps}), name, "steps must rise, from 0 on")
        need(all(low <= value <= high for _, value in schedule), name, f"{word}s must be from {low} to {high}{of}")
    need(cfg.LR_SCHEDULE and cfg.LR_SCHEDULE[0][0] == 0, "LR_SCHEDULE", "must start at step 0, steps rising")


def _derive(cfg):
    cfg.N_HEADS = cfg.HIDDEN_DIM // cfg.HEAD_DIM
    cfg.N_CHUNKS = cfg.POPULATION_SIZE // cfg.CHUNK_SIZE
    cfg.N_PAIRS = cfg.POPULATION_SIZE // 2
    cfg.N_GROUPS = 1 if cfg.USE_SAME_DATA else cfg.POPULATION_SIZE // cfg.GROUP_SIZE
    cfg.TARGETS = 8 if cfg.SOFT_TARGETS else 1                  # of a position
    cfg.WINDOW = cfg.STATE_TOKENS + 1 + cfg.SEQ_LEN * cfg.TARGETS      # numbers that a pair reads
    # all shifts of the noise that a run meets: what is made for one is exact for all
    cfg.NOISE_SHIFTS = sorted({cfg.noise_shift(step) for step in (0, *(first for first, _ in cfg.SIGMA_SCHEDULE))})
    cfg.LOSS_SCALE = 256 if cfg.LOSS == "exact" else 1         # units of an evaluated loss in one logit unit


def loss_unit(constants):
    """(bits in one unit of the losses of d-eggs, the unit in which losses are shown) with these {name: value}."""
    bits = 16 / (constants["SOFTMAX_EXP_SCALE"] * math.log(2))
    return bits, "bits/byte" if constants["VOCAB_SIZE"] == 256 else "bits/token"


def may_differ(name):
    """Whether islands that gossip may differ in a constant; not in one that this program does not know."""
    return name in FACTS and FACTS[name].agree == ISLAND


def text(value):
    """A value as an override takes it."""
    return ",".join(f"{step}:{rate!r}" for step, rate in value) if isinstance(value, tuple) else str(value)


KINDS = {int: "a whole number", float: "a number", str: "text"}
# the value of constants with which nothing differs from a program that lacks them
UNSET = {"SIGMA_SCHEDULE": (), "SEEN_VOTES": 1, "SOFT_TARGETS": ()}
# constants that are pairs of a first step and a value: the types of both, a word for the value, what it is
SCHEDULES = {"LR_SCHEDULE": ({int, float}, "rate", "learning rate"), "SIGMA_SCHEDULE": ({int}, "shift", "SIGMA_SHIFT"),
             "SOFT_TARGETS": ({int}, "context", "number of tokens")}


def _no_such(name):
    near = difflib.get_close_matches(name, _DEFAULTS, 1)
    return "no such constant in egg_config.py" + (f"; did you mean {near[0]}?" if near else "")


def _parse(name, text, source):
    """The value of a constant in an override."""
    if name not in _DEFAULTS:
        raise ConfigError(f"{source}: {_no_such(name)}")
    kind = type(_DEFAULTS[name])
    try:
        if kind is int:
            return int({"true": "1", "false": "0"}.get(text.lower(), text), 0)
        if kind is tuple:
            number = float if name == "LR_SCHEDULE" else int
            return tuple((int(s), number(r)) for s, r in (item.split(":") for item in text.split(",") if text))
        return kind(text)
    except ValueError:
        wanted = KINDS[kind] if kind is not tuple else "step:{0},step:{0},...".format(SCHEDULES[name][1])
        raise ConfigError(f"{source}: {text!r} is not {wanted}") from None
