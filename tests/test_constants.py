"""The constants: overrides, limits, combinations, fingerprints, edits, and who must agree."""

import hashlib
import importlib.util
import inspect
import json
import pathlib
import re
import shutil
from types import SimpleNamespace

from pytest import mark, raises

import egg_config
from cluster import history
from egg_config import AGREE, ConfigError, CONSTANTS, make
from tools import train
from compiling import kernels_for
from readings import BASE, SMALL, configured
from recordings import HERE
from commands import process
from coordinators import refused


# --- overrides and combinations ---------------------------------------------------------------------------------------

def test_overrides_in_order():
    cfg = egg_config.load(defines=["N_LAYERS=3"], environ={"EGG_N_LAYERS": "2", "EGG_SEQ_LEN": "32", "PATH": "x"})
    assert (cfg.N_LAYERS, cfg.SEQ_LEN, cfg.HIDDEN_DIM) == (3, 32, egg_config.HIDDEN_DIM)
    assert configured(None, "CHUNK_SIZE=64").POPULATION_SIZE == 512
    assert egg_config.load(environ={"EGG_PRESET": "laptop-bytes"}).shared() == configured("laptop-bytes").shared()
    assert configured(None, "LR_SCHEDULE=0:1,50:0.5").LR_SCHEDULE == ((0, 1.0), (50, 0.5))
    assert configured(None, "USE_SAME_DATA=true").USE_SAME_DATA == 1
    with raises(ConfigError, match="EGG_HIDEN_DIM: .* did you mean HIDDEN_DIM"):
        egg_config.load(environ={"EGG_HIDEN_DIM": "1"})


REFUSED = """
deggs | HIDDEN_DIM=96 | multiple of HEAD_DIM
deggs | HEAD_DIM=48 | 32, 64, 128
deggs | SEQ_LEN=13 | multiple of 8
deggs | CHUNK_SIZE=41 | even
deggs | POPULATION_SIZE=5 | multiple of CHUNK_SIZE
deggs | N_LAYERS=two | whole number
deggs | hidden_dim=128 | did you mean HIDDEN_DIM?
deggs | N_LAYERS | NAME=VALUE
deggs | LR_SCHEDULE=5:1 | start at step 0
deggs | LR_SCHEDULE=fast | step:rate
deggs | DETOKENIZE=1 | VOCAB_SIZE 256
deggs | ADAM_BETA1=nan | from 0.0 to 1.0
deggs | DEVICE_MASK=43 DEVICE_GAUSSIAN=1 | DEVICE_MASK = 43
deggs | USE_MUON=1 OPTIMIZER=sgd | USE_MUON = 1: needs OPTIMIZER adamw
deggs | NTT_MODE=1 SEQ_LEN=24 | NTT_MODE = 1: needs a SEQ_LEN that is a power of two, not 24
deggs | NTT_MODE=2 SEQ_LEN=512 | NTT_MODE = 2: needs SEQ_LEN of 256 at most, not 512
deggs | SOFT_TARGETS=5:16 | SOFT_TARGETS = 5:16: contexts must be from 0 to 7
deggs | SOFT_TARGETS=5:2,5:3 | SOFT_TARGETS = 5:2,5:3: steps must rise, from 0 on
deggs | SOFT_TARGETS=-5:2 | SOFT_TARGETS = -5:2: steps must rise, from 0 on
deggs | SOFT_TARGETS=4 | '4' is not step:context,step:context,...
deggs | SOFT_TARGETS=0:2 | SOFT_TARGETS = 0:2: needs LOSS exact
deggs | SOFT_TARGETS=0:8 LOSS=exact VOCAB_SIZE=256 | contexts must be from 0 to 7
deggs | SOFT_TARGETS=0:4 LOSS=exact | contexts must be from 0 to 3 tokens with VOCAB_SIZE = 8192
laptop | VAL_FILE= | VAL_FILE = : must name a file
deggs | HOST_MASK=50 HOST_GAUSSIAN=1 | HOST_MASK = 50: must be at most 42 with HOST_GAUSSIAN
deggs | PERTURB=units ADAPTIVE_NOISE_MODE=0 NTT_MODE=1 | NTT_MODE = 1: must be 0 with PERTURB = units
deggs | PERTURB=activations | PERTURB = activations: must be one of weights, units
deggs | PORT=70000 | PORT = 70000: must be from 0 to 65535
deggs | AUDIT_RATE=much | AUDIT_RATE: 'much' is not a number
deggs | SIMD=mmx | SIMD = mmx: must be one of auto, vnni512, vnni256, madd, portable
deggs | STATE_TOKENS=4 | STATE_TOKENS = 4: has no meaning with MODEL = transformer: leave it at 0
deggs | HIDEN_DIM=64 | HIDEN_DIM: no such constant in egg_config.py; did you mean HIDDEN_DIM?
nano-egg | HEAD_DIM=32 | has no meaning with MODEL = gru
nano-egg | GROUP_SIZE=3 | even
nano-egg | GROUP_SIZE=48 | divide POPULATION_SIZE
nano-egg | MODEL=lstm | transformer, gru
nano-egg | HIDDEN_DIM=100 | multiple of 32
nano-egg | MODEL=transformer | VALIDATE_WINDOW = 448: has no meaning
laptop | OPTIMIZER=ztest USE_MUON=0 | OPTIMIZER = ztest: must be adamw with PERTURB = units
laptop | ADAPTIVE_NOISE_MODE=1 | ADAPTIVE_NOISE_MODE = 1: must be 0
laptop | GROUP_SIZE=4 | GROUP_SIZE = 4: must be 2 with PERTURB = units
laptop | CHUNK_SIZE=1048576 POPULATION_SIZE=0 | CHUNK_SIZE = 1048576: must be at most 2048 with
best | CHUNK_SIZE=65536 POPULATION_SIZE=0 | CHUNK_SIZE = 65536: must be at most 1024 with
"""                      # preset | definitions | what is said of them


@mark.parametrize("line", REFUSED.strip().split("\n"))
def test_constants_that_cannot_be_are_named_in_one_line(line):
    preset, defines, says = line.split(" | ")
    with refused(re.escape(says), ConfigError) as error:
        configured(preset, *defines.split())
    assert defines.split("=")[0] in str(error.value)


def fingerprint(cfg):
    """SHA-256 (hex) over the shared constants."""
    return hashlib.sha256(json.dumps(cfg.shared(), sort_keys=True).encode()).hexdigest()


def test_what_is_shared_is_what_must_agree():
    """And a saved run names the constants that determine it."""
    base = make()
    for name, constant in CONSTANTS.items():
        other = egg_config.Config(**{**base.constants(), name: "another value"})
        assert (other.shared() != base.shared()) == (constant.agree != "local"), name
        assert (name in history.difference(base.saved(), other.saved())) == (name in egg_config.DETERMINING), name


def test_a_saved_run_with_a_constant_that_is_gone_is_refused():
    """And one that has it at the value of all runs goes on."""
    assert egg_config.load(environ={}, saved=make(N_LAYERS=2).saved()).saved() == make(N_LAYERS=2).saved()
    assert egg_config.GONE.items() <= make().saved().items()
    for name, value in ("SIGMA_SCHEDULE", [[0, 5]]), ("SEEN_VOTES", 4), ("RARE_TOKENS", 0.1), ("TOKEN_MASK", 1):
        with refused(f"ckpt has {name}, which this program does not know: use the egg that made it", ConfigError):
            egg_config.load(environ={}, saved={**make().saved(), name: value}, run="ckpt")


def test_constants_of_noise_on_activations_are_those_of_unit_trials():
    """As many chunks and digits, whatever a group was; what somebody else may have written is refused."""
    for chunk, group, windows in (256, 16, 16), (48, 16, 6), (8192, 16, 512), (16, 16, 2):
        cfg = make(egg_config.renewed(dict(
            make(**SMALL, PERTURB="units", ADAPTIVE_NOISE_MODE=0, LOSS="exact").saved(), PERTURB="activations",
            GROUP_SIZE=group, CHUNK_SIZE=chunk, POPULATION_SIZE=3 * chunk, CREDIT=12, NOISE_UP=3, VERSION_OF_VOTES=3)))
        assert (cfg.PERTURB, cfg.N_CHUNKS, cfg.CHUNK_SIZE, cfg.GROUP_SIZE) == ("units", 3, windows, 2)
        assert "CREDIT" not in cfg.saved()
    for wrong in dict(GROUP_SIZE=0), dict(CHUNK_SIZE="many"), dict(POPULATION_SIZE=[]), dict(CHUNK_SIZE=0):
        with raises(ConfigError):
            make(egg_config.renewed({"PERTURB": "activations", **wrong}))
    assert egg_config.renewed({"NOISE_UP": 3, "N_LAYERS": 2}) == {"N_LAYERS": 2}        # of a run that does not use it


# fingerprints of commit 84062b8, and the SHA-256 of the constants that a run saved by it holds
RECORDED = {
    None: ("cc6018665ccdeed5cbd0bc4bc282092a6729bba180e3655be8692ed10b533da9",
           "749e69c6583609ff0b5f4e803f2a08ed08debb714f8f85686a9ef2564e849cfa"),
    "nano-egg": ("6d2fcae2961b7abf632e1c4c54f59041f31ad2022025e04df9b9555ccb48ca5c",
                 "4e8eed0e1805de84c05ac519191b3a44b3298f4ddb83ee4a2f3435b778e3e2b3"),
}


# --- the table of constants -------------------------------------------------------------------------------------------

def test_fingerprints_and_saved_constants_are_those_of_84062b8():
    newer = {"deggs", "laptop", "laptop-bytes", "best", "best-bytes"}
    assert set(RECORDED) | newer == {None, *egg_config.PRESETS}
    assert configured("deggs").constants() == make().constants()
    for preset, (shared, saved) in RECORDED.items():
        cfg = configured(preset)
        assert fingerprint(cfg) == shared, preset
        assert hashlib.sha256(json.dumps(cfg.saved(), sort_keys=True).encode()).hexdigest() == saved, preset


def test_the_table_has_every_constant_once_and_its_default_is_allowed():
    lines = inspect.getsource(egg_config).partition("\nPRESETS = ")[0]
    assert list(CONSTANTS) == re.findall(r"^(\w+) = ", lines, re.M)
    for name, constant in CONSTANTS.items():
        assert constant.value == getattr(egg_config, name) and constant.objection(constant.value) is None, name
        assert constant.agree in AGREE and constant.model in (None, *CONSTANTS["MODEL"].allowed) and constant.meaning


def edited(tmp_path, old, new):
    """egg_config.py, imported as it is after an edit."""
    text = inspect.getsource(egg_config)
    assert text.count(old) == 1
    path = tmp_path / "egg_config.py"
    path.write_text(text.replace(old, new))
    spec = importlib.util.spec_from_file_location("edited_config", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@mark.parametrize("old, new, message", [
    ("\nHIDDEN_DIM = 256 ", "\nHIDDEN_DIM = 256.0 ", "HIDDEN_DIM = 256.0: must be a whole number"),
    ("\nHIDDEN_DIM = 256 ", "\nHIDDEN_DIM = 100 ", "HIDDEN_DIM = 100: must be a multiple of 32"),
    ("\nHIDDEN_DIM = 256 ", "\nHIDDEN_DIM = 256, ", "HIDDEN_DIM = (256,): must be a whole number, without a comma"),
    ("\nHIDDEN_DIM = 256 ", '\nHIDDEN_DIM = "256" ', "HIDDEN_DIM = '256': must be a whole number"),
    ('\nINPUT_FILE = "input.bin" ', "\nINPUT_FILE = 7 ", "INPUT_FILE = 7: must be text"),
    ("\nSOFT_TARGETS = () ", "\nSOFT_TARGETS = 5 ", "SOFT_TARGETS = 5: must be pairs of a step and a context"),
    ("\nN_LAYERS = 4 ", "\nN_LAYER = 5\nN_LAYERS = 4 ",
     "N_LAYER: a constant needs the comment behind its value: # allowed | agree | meaning"),
    ('\nPORT = 12345                     # 0 to 65535    | local   | TCP port of the coordinator\n', "\nPORT = 12346\n",
     "PORT: a constant needs the comment behind its value: # allowed | agree | meaning"),
    ("| all     | layers", "| al      | layers", "N_LAYERS: 'al' must be one of all, run, islands, free, local")])
def test_a_bad_edit_is_one_line_with_its_place(tmp_path, old, new, message):
    with raises(Exception) as error:
        edited(tmp_path, old, new).make()
    source = (tmp_path / "egg_config.py").read_text().split("\n")
    line = next(i for i, text in enumerate(source, 1) if text.startswith(re.match(r"\w+", message)[0] + " ="))
    assert type(error.value).__name__ == "ConfigError" and str(error.value) == f"egg_config.py:{line}: {message}"


@mark.parametrize("old, new, message", [
    ('\nMODEL = "transformer" ', "\nMODEL = transformer ",
     "MODEL: name 'transformer' is not defined: text needs quotes, and == sets nothing"),
    ("\nN_LAYERS = 4 ", "\nN_LAYERS = ", "N_LAYERS: invalid syntax"),
    ("\nN_LAYERS = 4 ", "\n N_LAYERS = 4 ", "N_LAYERS: unexpected indent"),
    ("\nN_LAYERS = 4 ", "\nN_LAYERS == 5 ",
     "N_LAYERS: name 'N_LAYERS' is not defined: text needs quotes, and == sets nothing"),
    ("\nPRESETS = {", "\nN_LAYERS == 5\nPRESETS = {", "N_LAYERS: == sets nothing: write ="),
    ("\nAGREE = ", "\nPORT = 12346\nAGREE = ",
     f"PORT: has no effect below PRESETS: set it in line {CONSTANTS['PORT'].line}")])
def test_a_bad_edit_ends_every_command_with_one_line(tmp_path, old, new, message):
    text = inspect.getsource(egg_config)
    (tmp_path / "egg_config.py").write_text(text.replace(old, new))
    shutil.copy(HERE / "egg.py", tmp_path)
    done = process("arch", program="egg.py", cwd=tmp_path)
    line = text.partition(old)[0].count("\n") + 2
    assert (done.returncode, done.stdout, done.stderr) == (2, "", f"egg: egg_config.py:{line}: {message}\n")


def test_a_value_of_the_command_line_is_not_blamed_on_the_file(monkeypatch):
    """Also where it is the default; and one of the file is, also where a preset is added."""
    for given, said in (["CHUNK_SIZE=40960", "GROUP_SIZE=6"], "GROUP_SIZE = 6: "), (["HEAD_DIM=64", "HIDDEN_DIM=96"],
                                                                                   "HIDDEN_DIM = 96: "):
        with raises(ConfigError) as error:
            configured(None, *given)
        assert str(error.value).startswith(said)
    monkeypatch.setitem(CONSTANTS, "HOST_MASK", CONSTANTS["HOST_MASK"]._replace(value=50))
    with raises(ConfigError, match="^egg_config.py:[0-9]+: HOST_MASK = 50: must be at most 42"):
        configured(None, "HOST_GAUSSIAN=1")
    with raises(ConfigError, match="^HOST_MASK = 50: "):
        configured(None, "HOST_GAUSSIAN=1", "HOST_MASK=50")


def test_what_was_shipped_is_what_the_file_says():
    """Of a constant that is new, or has another value, SHIPPED gets that, too."""
    assert egg_config.edited() == [] and egg_config.SHIPPED.keys() == CONSTANTS.keys()
    assert {**make().constants(), "POPULATION_SIZE": 0} == egg_config.SHIPPED


def test_a_bad_value_is_told_before_what_a_run_has():
    saved = make(**SMALL).saved()
    for given, says in (("HIDDEN_DIM=100", "HIDDEN_DIM = 100: must be a multiple of 32"),
                        ("N_LAYERS=65", "N_LAYERS = 65: must be from 1 to 64"),
                        ("N_LAYERS=3", "ckpt holds a run of another configuration: -D N_LAYERS: N_LAYERS = 3")):
        with raises(ConfigError, match=says):
            egg_config.load(None, [given], {}, saved, "ckpt")


def test_a_typo_in_a_preset_has_its_place(tmp_path):
    mine = edited(tmp_path, "\nPRESETS = {\n", "\nPRESETS = {'mine': dict(HIDEN_DIM=64),\n")
    line = inspect.getsource(egg_config).partition("\nPRESETS = {\n")[0].count("\n") + 2
    with raises(mine.ConfigError, match=f"egg_config.py:{line}: HIDEN_DIM: no such .* did you mean HIDDEN_DIM"):
        mine.load("mine", environ={})


def test_good_edits(tmp_path):
    """True and False are 1 and 0; a constant that is assigned again has its last value; what it means may be left
    out; a misspelt one is missed."""
    muon = edited(tmp_path, "\nUSE_MUON = 0 ", "\nUSE_MUON = True ").make()
    assert muon.USE_MUON is not True and muon.shared() == make(USE_MUON=1).shared()
    wide = edited(tmp_path, "\nPRESETS = {", "\nHIDDEN_DIM = 512\n\nPRESETS = {")
    assert wide.make().shared() == make(HIDDEN_DIM=512).shared()
    assert edited(tmp_path, "| all     | layers\n", "| all |\n").make().shared() == make().shared()
    misspelt = edited(tmp_path, "\nN_LAYERS = 4 ", "\nN_LAYER = 4 ")
    with raises(misspelt.ConfigError, match="the constant N_LAYERS is missing"):
        misspelt.make().N_LAYERS


def test_the_form_that_sees_its_targets_is_warned_of(here):
    pathlib.Path("input.bin").write_bytes(bytes(64))
    said = []
    for causal in (1, 0):
        train.open_data(BASE.changed(NTT_MODE=3, NTT_CAUSAL=causal), SimpleNamespace(line=said.append))
    assert sum("NTT_CAUSAL = 0" in line for line in said) == 1


# --- schedules and presets --------------------------------------------------------------------------------------------

def test_the_schedule_is_that_of_the_specification_and_data():
    rates = {0: 0.5, 99: 0.5, 100: 0.25, 199: 0.25, 200: 0.125, 10**6: 0.125}
    assert {step: make().learning_rate(step) for step in rates} == rates


@mark.parametrize("preset", egg_config.PRESETS)
def test_presets_are_good(preset):
    kernels_for(configured(preset))
