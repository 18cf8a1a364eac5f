"""The table of constants, the cache of compiled kernels, and what they are derived from or keyed by. No GPU is needed."""

import hashlib
import json

import pytest

import egg_config
from cluster import history
from egg_config import ALL, FACTS, ISLAND, LOCAL

# fingerprints of commit 84062b8, and the SHA-256 of the constants that a run saved by it holds
RECORDED = {
    None: ("cc6018665ccdeed5cbd0bc4bc282092a6729bba180e3655be8692ed10b533da9",
           "749e69c6583609ff0b5f4e803f2a08ed08debb714f8f85686a9ef2564e849cfa"),
    "laptop": ("5f56776e7bd1431383cdb6f550101618ea0c74989d940b8b2da5c33d71e027d4",
               "eca8342dbc3363e7366a0b6132b78eae4921509d8f2e2c7f439778a4c66feab7"),
    "best": ("b39e9971cc1a72212b9c42bcbb591da282053c54aaaacdd211f634d343c52e5e",
             "7592e8f7800fdca07c136873fb292f399080c0b3d40411c22a2a4ae5a06da99f"),
    "nano-egg": ("6d2fcae2961b7abf632e1c4c54f59041f31ad2022025e04df9b9555ccb48ca5c",
                 "4e8eed0e1805de84c05ac519191b3a44b3298f4ddb83ee4a2f3435b778e3e2b3"),
    "best-bytes": ("1a7c50fa6c8affcbfcde1ab4fb84df9d60e5c9c61bb1f8c0c5cc93091e8692f4",
                   "26d3fa02c3273c03a682a16ee02e4fb077b4a707401326da68b496354bcaead8"),
}


# --- the table -------------------------------------------------------------------------------------------------------

def test_fingerprints_and_saved_constants_are_those_of_84062b8():
    assert set(RECORDED) == {None, *egg_config.PRESETS}
    for preset, (fingerprint, saved) in RECORDED.items():
        cfg = egg_config.load(preset, environ={})
        assert cfg.fingerprint() == fingerprint, preset
        assert hashlib.sha256(json.dumps(history.kept(cfg), sort_keys=True).encode()).hexdigest() == saved, preset


def test_the_table_has_every_constant_once_and_its_default_is_allowed():
    assert set(FACTS) == set(egg_config.make().constants())
    with pytest.raises(ValueError, match="PORT is twice in the table"):
        egg_config._facts(("PORT", (0, 1)), ("DEVICE PORT", None))
    for name, fact in FACTS.items():
        default = egg_config.make().constants()[name]
        assert fact.agree in (ALL, ISLAND, LOCAL) and fact.model in (None, *FACTS["MODEL"].allowed)
        if fact.allowed and isinstance(default, str):
            assert default in fact.allowed
        elif fact.allowed:
            assert fact.allowed[0] <= default <= fact.allowed[1] and {type(b) for b in fact.allowed} == {type(default)}


@pytest.mark.parametrize("name, agree, saved", [("HIDDEN_DIM", ALL, True), ("LR_SCHEDULE", ISLAND, True), ("PORT", LOCAL, False),
                                                ("VALIDATE_EVERY", ISLAND, False), ("VALIDATE_TOKENS", ALL, False), ("SIMD", LOCAL, False)])
def test_what_follows_from_the_table(name, agree, saved):
    """Who must agree, what a saved run depends on, what islands may differ in."""
    cfg = egg_config.make()
    assert (name in cfg.shared()) == (agree != LOCAL)
    assert (name in cfg.saved()) == (name in history.kept(cfg)) == saved
    assert egg_config.may_differ(name) == (agree == ISLAND)
    assert not egg_config.may_differ("A_CONSTANT_OF_THE_FUTURE")


@pytest.mark.parametrize("values, message", [
    (dict(HIDDEN_DIM=100), "HIDDEN_DIM = 100: must be a multiple of 32"),
    (dict(HIDDEN_DIM=64.0), "HIDDEN_DIM = 64.0: must be a whole number"),
    (dict(PORT=70000), "PORT = 70000: must be from 0 to 65535"),
    (dict(AUDIT_RATE="much"), "AUDIT_RATE = much: must be a number"),
    (dict(SIMD="mmx"), "SIMD = mmx: must be one of auto, vnni512, vnni256, madd, portable"),
    (dict(STATE_TOKENS=4), "STATE_TOKENS = 4: says nothing to MODEL = transformer: leave it at 0"),
    (dict(MODEL="gru", NTT_MODE=1), "NTT_MODE = 1: says nothing to MODEL = gru: leave it at 0"),
    (dict(LR_SCHEDULE=()), "LR_SCHEDULE = (): must start at step 0, steps rising"),
    (dict(HIDEN_DIM=64), "HIDEN_DIM: no such constant in egg_config.py; did you mean HIDDEN_DIM?")])
def test_a_bad_constant_is_one_line(values, message):
    with pytest.raises(egg_config.ConfigError) as error:
        egg_config.make(**values)
    assert str(error.value) == message
