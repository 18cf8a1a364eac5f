"""The recordings of d-eggs in tests/golden."""

import hashlib
import json
import os
import pathlib
import subprocess
import sys

import numpy as np
import pyzstd

import egg_config
from model import parameters, rules, steps
from fakes import step_alone
from readings import equal

HERE = pathlib.Path(__file__).parent.parent


def python(*arguments, cwd=HERE, **environ):
    """What a process of this Python prints, which ends well and says nothing on standard error."""
    done = subprocess.run([sys.executable, *map(str, arguments)], cwd=cwd, env={**os.environ, **environ},
                          capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, ""), done.stderr + done.stdout
    return done.stdout


def write_decoding(path, pieces):
    """The path (str) of a decoding.bin with these bytes of tokens."""
    path.write_bytes(len(pieces).to_bytes(4, "little") + b"".join(len(p).to_bytes(4, "little") + p for p in pieces))
    return str(path)


def golden(name):
    """(configuration, tokens, recording) of golden/<name>.npz."""
    z = np.load(HERE / "tests" / "golden" / f"{name}.npz")
    cfg = egg_config.make(**json.loads(str(z["config"])))
    if name == "E":
        raw = pyzstd.decompress((HERE / "tests" / "golden" / "input_8k.bin.zst").read_bytes())
        return cfg, np.frombuffer(raw, np.uint32), z
    return cfg, z["input_bin"] if cfg.VOCAB_SIZE == 256 else z["input_bin"].view(np.uint32), z


def digests(state):
    """(SHA-256 of the weights, of the moments, of the overlay), hex, as the recordings have them."""
    arrays = state.weights, state.moments, state.overlay
    return tuple(hashlib.sha256(np.ascontiguousarray(x)).hexdigest() for x in arrays)


def recorded_digests(z, step):
    """Those of a recording after the update of a step."""
    return tuple(str(z[part][step]) for part in ("model_sha256", "adam_sha256", "scales_sha256"))


def hold_against_recording(engine_type, name):
    """Six whole steps of an engine."""
    cfg, tokens, z = golden(name)
    engine = engine_type(cfg, tokens)
    equal(engine.state().weights, z["model_0"].view(np.int8))
    for k in range(6):
        fitness, losses, changed = step_alone(engine)
        equal(losses, z["loss"][k], f"losses of step {k}")
        equal(rules.unpacked_digits(fitness, cfg.N_PAIRS), z["fitness"][k], f"fitness of step {k}")
        assert changed == z["updates"][k]
        state = engine.state()
        equal(state.overlay, z["scales"][k])
        assert digests(state) == recorded_digests(z, k), f"update {k}"
        if k == 2 and "adam_3" in z:
            equal(state.moments, z["adam_3"])
    equal(engine.state().weights, z["model_6"].view(np.int8))


def recorded_updates(engine, step, hold):
    """Brings an engine of golden E, which has done `step` updates or fewer, to `step` updates, and calls hold(state, k)
    with the State after update k.

    E.npz has the fitness of step 0 and digests of the others. E_fitness.npz has the fitness of these other steps. It is
    that of our losses, except for single digits that were turned until the digest was the recorded one: in E a few
    losses are not the recorded ones. So the digest is checked here."""
    cfg, tokens, z = golden("E")
    later = np.load(HERE / "tests" / "golden" / "E_fitness.npz")
    for k in range(engine.step, step):
        fitness = rules.unpacked_digits(later[f"fitness_{k}"].tobytes(), cfg.N_PAIRS) if k else z["fitness_0"]
        assert hashlib.sha256(fitness.astype(np.int32)).hexdigest() == str(z["fitness_sha256"][k])
        engine.update(steps.pack_digits(fitness))
        hold(engine.state(), k)


def hold_against_golden_e(state, k):
    """The whole state is the recorded one after update k."""
    cfg, _, z = golden("E")
    assert digests(state) == recorded_digests(z, k), k
    assert digest_of_part(cfg, state) == PART_OF_E[k]


# SHA-256 of the part of golden E, after each update. Whoever holds the whole state against the recording holds these
# against it, too.
PART_OF_E = (
    "3ffb49e9112eae1732938207eb5355bd53abd966bb5f12b929a9b6879cf8119e",
    "a1d0131b2e27ce3227ff97fe381a1c5301ee1426f517fc07024d42182834bb97",
    "e651516aa6276c95012b5554ecba3e0753971ff33cc44157cb35e4f6f18d7a4e",
    "30d5ca76a2780200191df47952527572b342e4ee57bc4c3328e6bee0cdffec3f",
    "70e36bb447f59804057850ec0bda21661689699917aa3f513ed8a5a47c4f2fc9",
)


def in_part(t):
    """Whether a tensor belongs to the part of golden E that is updated where the whole would take too long: every
    vector, and a matrix of each shape but the embedding's; a tenth of all weights."""
    return not t.matrix or (t.name, t.layer) in (("w_q", 0), ("w_up", 3), ("w_down", 3))


def digest_of_part(cfg, state):
    """SHA-256, in hex, of the weights, moments and noise overlay of the tensors in_part of a State."""
    digest = hashlib.sha256()
    for t in filter(in_part, parameters.tensors(cfg)):
        digest.update(state.weights[t.span])
        digest.update(state.moments[t.span])
        digest.update(state.overlay[t.overlay_a:t.overlay_a + t.cols])
        if t.matrix:
            digest.update(state.overlay[t.overlay_b:t.overlay_b + t.rows])
    return digest.hexdigest()


def recorded_generation(engine, step):
    """What d-eggs wrote after `step` updates: (int32 [SEQ_LEN + 1], length of its prompt). See recorded_updates."""
    recorded_updates(engine, step, hold_against_golden_e)
    cfg, tokens, z = golden("E")
    recorded, prompt = z[f"gen_{step}"].astype(np.int32), 32
    start = engine.step * cfg.SEQ_LEN % (len(tokens) - cfg.SEQ_LEN)
    equal(recorded[:prompt], tokens[start:start + prompt])
    return recorded, prompt
