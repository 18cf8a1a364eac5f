"""What a model is made of: the parts of a configuration and what they cost (`egg.py arch`); and inside one member, with
unit trials the model (`egg.py debug`), statistics of its activations, by the plain reading of the model
(model.reading), and of all weights, with the names of d-eggs.
"""

import json

import numpy as np

from cluster.console import table
from egg_config import EggError, explained
from model import parameters, rules
from model.reading import Reading

POSITION = 32              # position of the window whose activations are shown; the last one of a shorter window
SATURATED = 126            # a value of this size or more counts as saturated


# --- architecture -----------------------------------------------------------------------------------------------------

def architecture(cfg):
    """str: a table of the parameters, each of which is a byte, then what the model, the optimizer and a step cost."""
    arrays, rows = parameters.tensors(cfg), []
    for t in arrays:
        if t.layer == 0:
            layers = cfg.N_LAYERS if t.per_layer else 1
            rows.append((t.name, f"{t.rows} x {t.cols}" if t.matrix else str(t.cols), f"{t.size:,}",
                         str(layers) if t.per_layer else "", f"{layers * t.size:,}"))
    size, tokens = parameters.n_weights(cfg), cfg.STEP_TOKENS
    head, *body = table(("component", "dimensions", "parameters", "layers", "total"),
                        [*rows, ("all", "", "", "", f"{size:,}")], 2)
    rule = "-" * len(head)
    products, attention = parameters.products_per_token(cfg), ""
    model = f"{cfg.N_LAYERS} layers of {cfg.HIDDEN_DIM}, {cfg.VOCAB_SIZE:,} tokens, windows of {cfg.SEQ_LEN}"
    if cfg.MODEL == "transformer":               # scores and weighted values over (T + 1) / 2 positions on average
        model += f", {cfg.N_HEADS} heads of {cfg.HEAD_DIM}; head and embedding are one matrix"
        attention = f", {cfg.N_LAYERS * cfg.HIDDEN_DIM * (cfg.SEQ_LEN + 1):,} in attention"
    if cfg.PERTURB == "weights":
        estimator, parts = "noise on weights", f"members ({cfg.N_PAIRS:,} antithetic pairs, "
        evaluated, votes = products * tokens, size * cfg.N_PAIRS
    else:                                        # credits go back through the same matrices
        estimator, parts = "unit trials", "windows ("
        evaluated, votes = 2 * products * tokens, products * tokens
    amount = f"{cfg.POPULATION_SIZE * cfg.LOCAL_STEPS:,} {parts}{cfg.N_CHUNKS} chunks" + (
        f" of {cfg.LOCAL_STEPS} updates)" if cfg.LOCAL_STEPS > 1 else ")")
    facts = {"model": f"{cfg.MODEL}, {model}",
             "optimizer": f"{12 * size:,} bytes (m, v and accumulator, float32), {parameters.n_overlay(cfg):,} noise "
                          "scales",
             "estimator": estimator,
             "a token": f"{products:,} multiply-adds in matrices{attention}",
             "a step": f"{amount} x {cfg.SEQ_LEN} tokens = {tokens:,} tokens",
             "": f"{evaluated:.3g} multiply-adds in matrices to evaluate, {votes:.3g} to vote",
             "on the wire": f"{cfg.N_CHUNKS} results of {cfg.CHUNK_BYTES:,} bytes of fitness, then "
                            f"at most {cfg.STEP_BYTES:,} bytes to every worker"}
    lines = [head, rule, *body[:-1], rule, body[-1], "", *(f"{name:12}{fact}" for name, fact in facts.items())]
    return "\n".join(lines)


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
    """A dict for JSON: statistics of member 0 of the state's step (with unit trials: of the model) at one position of
    its window, and of every weight array. tokens: the training data. parts: in the order of the forward pass,
    {"layer", "name"} with `statistics`, or with "head" and `attention_statistics`; layer -1: outside the layers."""
    before, window = np.split(rules.windows(cfg, tokens, state.step, 0, 1)[0], [cfg.STATE_TOKENS])
    position = min(POSITION, cfg.SEQ_LEN - 1)
    parts = []

    def see(layer, name, values):
        if name in ("Attended", "Logits"):           # for the votes of unit trials alone
            return
        if name == "Weights":
            parts.extend({"layer": layer, "name": "Attn", "head": head, **attention_statistics(weights[position])}
                         for head, weights in enumerate(values))
        else:
            parts.append({"layer": layer, "name": name, **statistics(values[position])})

    on_weights = cfg.PERTURB == "weights"
    clean, member = Reading(cfg, state), Reading(cfg, state, state.seed, int(on_weights), see)
    if cfg.STATE_TOKENS:
        clean.hidden(before)
        member.carried = clean.carried
    member.hidden(window[:position + 1])
    weights = [{"layer": t.layer if t.per_layer else -1, "name": t.name,
                **statistics(state.weights[t.span])} for t in parameters.tensors(cfg)]
    return {"step": state.step, "member": 0 if on_weights else None, "position": position, "parts": parts,
            "weights": weights}


# --- for people and for programs -------------------------------------------------------------------------------------

def describe(traced):
    """[str]: the lines of a trace, a table of values and one of attention; layer -1: outside the layers."""
    of = "" if traced["member"] is None else "member 0, "
    lines, tables = [f"step {traced['step']}, {of}position {traced['position']}"], {}
    for part in traced["parts"] + traced["weights"]:
        cells = [f"{value:.2f}" if isinstance(value, float) else str(value) for value in part.values()]
        tables.setdefault(tuple(part), []).append(cells)
    for head, rows in tables.items():
        lines += table(head, rows, 2)
    return lines


def report(cfg, engine, tokens, console, path=None):
    """Prints the trace of an engine's state, and appends it to the file `path` as a line of JSON. Raises EggError."""
    traced = trace(cfg, engine.state(), tokens)
    for line in describe(traced):
        console.line(line)
    if path:
        with explained(EggError, path, "name a file for the trace that can be written"), open(path, "a") as file:
            file.write(json.dumps(traced) + "\n")
