"""The architecture of a configuration, for people (`egg.py arch`)."""

from cluster.console import table
from model import activations, optimizers, parameters


def describe(cfg):
    """str: a table of the parameters, then what the model, the optimizer and a step cost."""
    arrays = parameters.tensors(cfg)
    size = parameters.n_weights(cfg)
    tokens = cfg.POPULATION_SIZE * cfg.SEQ_LEN
    model, work, multiply_adds = (_recurrent if cfg.MODEL == "gru" else _transformer)(cfg)
    facts = [("model", model), ("optimizer", f"{_bytes(12 * size)} (m, v and accumulator, float32), noise scales "
                                             f"{_bytes(parameters.n_overlay(cfg))}")]
    sides = [sorted((t.rows, t.cols)) for t in arrays if optimizers.constants(cfg, 1.0, t).rule == optimizers.MUON]
    if sides:
        muon = optimizers.MUON_ROUNDS * sum(short * short * (2 * long + short) for short, long in sides)
        facts.append(("", f"Muon for {len(sides)} matrices, {muon:.3g} multiply-adds an update"))
    if cfg.SIGMA_SCHEDULE:
        facts.append(("noise", f"SIGMA_SHIFT {cfg.SIGMA_SHIFT}, then {_by_step(cfg.SIGMA_SCHEDULE)}"))
    if cfg.SOFT_TARGETS:
        facts.append(("targets", f"{cfg.TARGETS} a position; context in tokens: {_by_step(cfg.SOFT_TARGETS)}"))
    groups = cfg.POPULATION_SIZE // cfg.GROUP_SIZE
    if cfg.PERTURB == "weights":
        parts, evaluated = f"{cfg.N_PAIRS:,} antithetic pairs", multiply_adds * tokens
        votes = f"{size * cfg.N_PAIRS:.3g} to vote in the update"
    else:                                                    # the clean model reads every window, too, and each votes
        parts = f"{groups:,} groups of {cfg.GROUP_SIZE}"
        evaluated = multiply_adds * (tokens + groups * cfg.SEQ_LEN)
        votes = f"{size * groups * cfg.SEQ_LEN:.3g} to vote"
        noises = ", ".join(f"{p.name} {p.amplitude}" for p in activations.phases(cfg).values() if not p.layer)
        credit = f"{cfg.CREDIT}/16" if cfg.MODEL == "gru" else "through attention"
        facts.append(("noise", f"on activations: {noises}; credit {credit}"))
    facts += [
        ("a token", work),
        ("a step", f"{cfg.POPULATION_SIZE:,} members ({parts}, {cfg.N_CHUNKS} chunks) x "
                   f"{cfg.SEQ_LEN} tokens = {tokens:,} tokens"),
        ("", f"{evaluated:.3g} multiply-adds to evaluate, {votes}"),
        ("on the wire", f"{cfg.N_CHUNKS} results of {-(-cfg.CHUNK_DIGITS // 5):,} bytes of fitness, then "
                        f"{-(-cfg.STEP_DIGITS // 5):,} bytes to every worker")]
    return "\n".join([*_table(cfg, arrays, size), "", *(f"{name:12}{fact}" for name, fact in facts)])


def _transformer(cfg):
    """(the model, the work of a token, its multiply-adds)."""
    products = parameters.products_per_token(cfg)
    # scores and weighted values over (T + 1) / 2 positions on average
    attention = cfg.N_LAYERS * cfg.HIDDEN_DIM * (cfg.SEQ_LEN + 1)
    return (f"{cfg.N_LAYERS} layers of {cfg.HIDDEN_DIM}, {cfg.N_HEADS} heads of {cfg.HEAD_DIM}, {cfg.SEQ_LEN} "
            f"positions, {_vocabulary(cfg)}; head and embedding are one matrix",
            f"{products:,} multiply-adds in matrices, {attention:,} in attention", products + attention)


def _recurrent(cfg):
    """The same of the recurrent model."""
    products = parameters.products_per_token(cfg)
    extra = cfg.STATE_TOKENS / cfg.SEQ_LEN / cfg.GROUP_SIZE
    work = f"{products:,} multiply-adds" + f", and {extra:.0%} more for the state a window begins with" * bool(extra)
    return (f"recurrent, {cfg.N_LAYERS} layers of {cfg.HIDDEN_DIM}, {_vocabulary(cfg)}; windows of {cfg.SEQ_LEN}", work,
            products * (1 + extra) if extra else products)


def _vocabulary(cfg):
    return f"{cfg.VOCAB_SIZE:,} tokens{' (bytes)' if cfg.VOCAB_SIZE == 256 else ''}"


def _by_step(schedule):
    return ", ".join(f"{value} from step {step:,}" for step, value in schedule)


def _table(cfg, arrays, size):
    """[line]: a row for every parameter."""
    rows = []
    for t in arrays:
        if t.layer == 0:
            layers = cfg.N_LAYERS if t.per_layer else 1
            rows.append((t.name, f"{t.rows} x {t.cols}" if t.matrix else str(t.cols), f"{t.size:,}",
                         str(layers) if t.per_layer else "", f"{layers * t.size:,}", _bytes(layers * t.size)))
    rows.append(("all", "", "", "", f"{size:,}", _bytes(size)))
    head, *body, total = table(("component", "dimensions", "parameters", "layers", "total", "size"), rows, 2)
    rule = "-" * len(head)
    return [head, rule, *body, rule, total]


def _bytes(n):
    for size, unit in (1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB"):
        if n >= size:
            return f"{n / size:.2f} {unit}"
    return f"{n} B"
