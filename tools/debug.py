"""Inside one member: statistics of its activations, by the plain reading of the model (model.reading), and of all
weights. DEBUG=1 prints them with the names, columns and colours of d-eggs.
"""

import json
import re

import numpy as np

from egg_config import EggError, explained
from model import parameters, rules
from model.reading import Reading

EVERY = 10                 # steps between two reports
POSITION = 32              # position of the window whose activations are shown; the last one of a shorter window
SATURATED = 126            # a value of this size or more counts as saturated


# --- statistics ------------------------------------------------------------------------------------------------------

def statistics(values):
    """{name: number} of int8 values: mean, standard deviation, entropy in bits, shares of saturated and of zero values,
    range."""
    values = np.asarray(values, np.int64).ravel()
    share = np.bincount(values + 128, minlength=256) / values.size
    return {"mean": float(values.mean()), "std": float(values.std()), "entropy": entropy(share),
            "saturated": float((np.abs(values) >= SATURATED).mean()), "zero": float((values == 0).mean()),
            "low": int(values.min()), "high": int(values.max())}


def attention_statistics(weights):
    """{name: number} of the weights of one query (int64 [context]): entropy in bits, largest share and weight, sum,
    number of weights above 0."""
    share = weights / weights.sum()
    return {"entropy": entropy(share), "peak": float(share.max()), "largest": int(weights.max()),
            "sum": int(weights.sum()), "context": int(np.count_nonzero(weights))}


def entropy(share):
    """float: in bits, of shares that sum to 1."""
    share = share[share > 0]
    return float(-(share * np.log2(share)).sum() + 0.0)


def trace(cfg, state, tokens):
    """A dict for JSON: statistics of member 0 of the state's step at one position of its window, and of every weight
    array. tokens: the training data. parts: in the order of the forward pass, {"layer", "name"} with `statistics`, or
    with "head" and `attention_statistics`; layer -1: outside the layers."""
    before, window = np.split(rules.windows(cfg, tokens, state.step, 0, 1)[0], [cfg.STATE_TOKENS])
    position = min(POSITION, cfg.SEQ_LEN - 1)
    parts = []

    def see(layer, name, values):
        if name in ("Before", "Gated", "Attended", "Logits"):            # for the votes of noise on activations alone
            return
        if name == "Weights":
            parts.extend({"layer": layer, "name": "Attn", "head": head, **attention_statistics(weights[position])}
                         for head, weights in enumerate(values))
        else:
            parts.append({"layer": layer, "name": name, **statistics(values[position])})

    clean, on_weights = Reading(cfg, state), cfg.PERTURB == "weights"
    member = Reading(cfg, state, state.seed, int(on_weights), see, not on_weights)
    if cfg.STATE_TOKENS:
        clean.hidden(before)
        member.carried = clean.carried
    member.hidden(window[:position + 1])
    weights = [{"layer": t.layer if t.per_layer else -1, "name": t.name,
                **statistics(state.weights[t.span])} for t in parameters.tensors(cfg)]
    return {"step": state.step, "member": 0, "position": position, "parts": parts, "weights": weights}


# --- for people and for programs -------------------------------------------------------------------------------------

# the lines of d-eggs; what stands between <a colour> and </> has this colour
PART = ("<grey>{head}</><white>{name:14}</>: Mean:<bold>{mean:5.1f}</> Std:<bold>{std:4.1f}</> "
        "Ent:<magenta>{entropy:4.2f}</>(<magenta>{bits:3.0f}%</>) <{of_saturated}>Sat:{saturated:3d}%</> "
        "<{of_zero}>Zero:{zero:3d}%</> <{of_range}>Range:[{low:4d}..{high:4d}]</>")
QUERY = ("<grey>{head}</><yellow>{name:14}</>: Ent:<magenta>{entropy:4.2f}</>(<magenta>{bits:3.0f}%</>) "
         "MaxW:<cyan>{largest:6d}</> SumW:<green>{sum:8d}</> Ctx:<bold>{context:4d}</>")
COLOURED = re.compile("<([a-z]+)>(.*?)</>")


def describe(traced, colour):
    """[str]: the lines of a trace; colour(text, name) paints."""
    step, position = traced["step"], traced["position"]
    lines = []
    for part in traced["parts"]:
        place = f"[S{step:5d} L{part['layer']:2d} T{position:3d}"
        if "head" not in part:
            lines.append(_line(place + "] ", part))
            continue
        possible = np.log2(part["context"]) if part["context"] > 1 else np.inf
        lines.append(QUERY.format_map({**part, "head": f"{place} H{part['head']}] ",
                                       "bits": 100 * part["entropy"] / possible}))
    lines += [_line(f"[S{step:5d} L{part['layer']:2d} Wght] ", part) for part in traced["weights"]]
    return [COLOURED.sub(lambda match: colour(match[2], match[1]), line) for line in lines]


def _line(head, part):
    saturated, zero = (int(100 * part[share] + 1e-9) for share in ("saturated", "zero"))
    return PART.format_map({
        **part, "head": head, "bits": 100 * part["entropy"] / 8, "saturated": saturated, "zero": zero,
        "of_saturated": "red" if saturated > 10 else "yellow" if saturated else "grey",
        "of_zero": "blue" if zero > 50 else "cyan" if zero > 10 else "grey",
        "of_range": "red" if max(-part["low"], part["high"]) >= 127 else "green"})


def report(cfg, engine, tokens, console, path=None):
    """Prints the trace of an engine's state, and appends it to the file `path` as a line of JSON. Raises EggError."""
    traced = trace(cfg, engine.state(), tokens)
    for line in describe(traced, console.colour):
        console.line(line)
    if path:
        with explained(EggError, path, "name a file for the trace that can be written"), open(path, "a") as file:
            file.write(json.dumps(traced) + "\n")
