"""The architecture of a configuration, for people (`egg.py arch`)."""

from cluster.console import table
from model import activations, parameters


def describe(cfg):
    """str: a table of the parameters, each of which is a byte, then what the model, the optimizer and a step cost."""
    arrays, rows = parameters.tensors(cfg), []
    for t in arrays:
        if t.layer == 0:
            layers = cfg.N_LAYERS if t.per_layer else 1
            rows.append((t.name, f"{t.rows} x {t.cols}" if t.matrix else str(t.cols), f"{t.size:,}",
                         str(layers) if t.per_layer else "", f"{layers * t.size:,}"))
    size, tokens = parameters.n_weights(cfg), cfg.POPULATION_SIZE * cfg.SEQ_LEN
    head, *body = table(("component", "dimensions", "parameters", "layers", "total"),
                        [*rows, ("all", "", "", "", f"{size:,}")], 2)
    rule = "-" * len(head)
    products, attention = parameters.products_per_token(cfg), ""
    model = f"{cfg.N_LAYERS} layers of {cfg.HIDDEN_DIM}, {cfg.VOCAB_SIZE:,} tokens, windows of {cfg.SEQ_LEN}"
    if cfg.MODEL == "transformer":               # scores and weighted values over (T + 1) / 2 positions on average
        model += f", {cfg.N_HEADS} heads of {cfg.HEAD_DIM}; head and embedding are one matrix"
        attention = f", {cfg.N_LAYERS * cfg.HIDDEN_DIM * (cfg.SEQ_LEN + 1):,} in attention"
    groups = cfg.POPULATION_SIZE // cfg.GROUP_SIZE
    if cfg.PERTURB == "weights":
        noise, parts = "on weights", f"{cfg.N_PAIRS:,} antithetic pairs"
        read, votes = tokens, size * cfg.N_PAIRS
    else:                                        # the clean model reads every window, too, and each votes
        noise = "on activations: " + ", ".join(
            f"{p.name} {p.amplitude}" for p in activations.phases(cfg).values() if not p.layer)
        parts, read = f"{groups:,} groups of {cfg.GROUP_SIZE}", tokens + groups * cfg.SEQ_LEN
        votes = size * groups * cfg.SEQ_LEN
    facts = {"model": f"{cfg.MODEL}, {model}",
             "optimizer": f"{12 * size:,} bytes (m, v and accumulator, float32), {parameters.n_overlay(cfg):,} noise "
                          "scales",
             "noise": noise,
             "a token": f"{products:,} multiply-adds in matrices{attention}",
             "a step": f"{cfg.POPULATION_SIZE:,} members ({parts}, {cfg.N_CHUNKS} chunks) x {cfg.SEQ_LEN} tokens = "
                       f"{tokens:,} tokens",
             "": f"{products * read:.3g} multiply-adds in matrices to evaluate, {votes:.3g} to vote",
             "on the wire": f"{cfg.N_CHUNKS} results of {-(-cfg.CHUNK_DIGITS // 5):,} bytes of fitness, then "
                            f"{-(-cfg.STEP_DIGITS // 5):,} bytes to every worker"}
    lines = [head, rule, *body[:-1], rule, body[-1], "", *(f"{name:12}{fact}" for name, fact in facts.items())]
    return "\n".join(lines)
