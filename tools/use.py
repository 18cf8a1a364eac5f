"""What can be done with a saved run: generate text, evaluate it on a text, export and import its weights (SPEC 18)."""

import codecs
import contextlib
import itertools
import json
import math
import os
import time

import numpy as np

import egg_config
from model import data_files, parameters, steps
from cluster import history, snapshots
from cluster.console import rewards_text
from egg_config import DATA_FILES, EggError, UsageError, explained
from tools import train

EVAL_TOKENS = 1 << 16      # that are evaluated between two progress lines
FORMAT = "egg-1"           # in the metadata
BETWEEN = b"\n---\n"        # between two texts in a pipe or file


class UseError(EggError):
    """About a saved run, a prompt or a file that cannot be used."""


# --- a saved run ------------------------------------------------------------------------------------------------------

def load(cfg, directory, best=False, device="cpu", threads=None, console=None, step=None):
    """An engine in the state of a saved run, of `step` if that is given: the newest snapshot and a replay of the steps
    after it, or (best) the snapshot that is best (snapshots.Shelf.best); console shows progress. Raises HistoryError,
    UseError, EngineError."""
    try:
        run = history.read_run(cfg, directory)
    except history.Damaged as damage:
        state = snapshots.whole(cfg, directory, damage, step)
        console.line(f"{damage}; here is its snapshot of step {state.step}")
        engine = train.make_engine(cfg, None, device, threads)
        engine.load(state)
        return engine
    with contextlib.closing(run):
        last = run.step if step is None else step
        if last > run.step:
            raise UseError(f"{directory} has only {run.step} steps")
        state = _state(cfg, run, best, console.line, last)
        until = state.step if best else last
        engine = train.make_engine(cfg, None, device, threads)
        engine.load(state)
        for step in range(state.step, until):
            console.progress(f"{directory}: replaying step {step} of {until} ...")
            history.replay(run, engine, step + 1)
        console.clear()
        return engine


def _state(cfg, run, best, warn, last):
    """The State to begin with: of the newest readable snapshot to step `last` (of the best), else the initial one;
    `warn` takes lines."""
    shelf = snapshots.Shelf(cfg, run)
    for line in shelf.damaged:
        warn(line)
    steps = shelf.ranked if best else sorted((s for s in shelf.files if run.start.step <= s <= last or s == last),
                                             reverse=True)
    if best and not steps:
        raise UseError(f"{run.directory} has no best snapshot: snapshots are taken every SNAPSHOT_EVERY steps, and "
                       "rated if the step is measured; leave --best out")
    for step in steps:
        try:
            return shelf.state(step)
        except (ValueError, OSError) as error:
            warn(f"{os.path.join(run.directory, shelf.files[step])}: {error}")
    if best or run.start.step:
        removed = shelf.files and not steps
        why = "is not kept: --keep-every N keeps more" if removed else "cannot be read: restore it from a copy"
        kept = f"there are those of the steps {sorted(shelf.files)}" if shelf.files else "there is none"
        raise UseError(f"{run.directory}: the snapshot that step {last} needs {why} ({kept})")
    return parameters.initial_state(cfg)


# --- generate ---------------------------------------------------------------------------------------------------------

def stream(pieces):
    """Yields pieces (bytes) as text. A character that is split comes with the last of its pieces."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    for piece in pieces:
        yield decoder.decode(piece)
    yield decoder.decode(b"", True)


def until(pieces, stops):
    """Yields the bytes of `pieces` before the first of `stops` (bytes), as soon as they cannot be part of one."""
    text = b""
    for piece in pieces:
        text += piece
        if ends := [at for stop in stops if (at := text.find(stop)) >= 0]:
            yield text[:min(ends)]
            return
        begun = max((size for stop in stops for size in range(1, len(stop)) if text.endswith(stop[:size])), default=0)
        done = len(text) - begun
        yield text[:done]
        text = text[done:]
    yield text


def need_text(*texts):
    """Raises UsageError for an empty prompt, or text of --stop (bytes)."""
    if b"" in texts:
        raise UsageError("the prompt is empty, or a text of --stop: give at least one character")


def continuation(cfg, decoding, engine, text, count, seed, stops=(), **settings):
    """Yields the model's continuation of a text, both bytes, of `count` tokens, or up to the first of `stops` or to the
    vocabulary's token for the end of a text. settings: temp, min_p, penalty; None: SAMPLING_* of cfg. Raises
    UsageError."""
    need_text(text, *stops)
    tokens = engine.generate(data_files.encoded(cfg, decoding, text), count, seed, **settings)
    ends = [data_files.END] if data_files.END in decoding else []
    return until((decoding.decode([token]) for token in tokens), [*stops, *ends])


def generate(cfg, engine, prompts, count, seed, console, samples=1, **settings):
    """Writes every prompt (bytes) and its continuation, piece by piece: to a terminal as text, else as these bytes and
    no other, but for BETWEEN two of them. samples: of each, with the next seeds; settings: of `continuation`."""
    decoding = data_files.load_decoding(cfg)
    for number, text in enumerate(text for text in prompts for _ in range(samples)):
        pieces = itertools.chain([text], continuation(cfg, decoding, engine, text, count, seed + number, **settings))
        if not console.terminal:
            for piece in itertools.chain([BETWEEN] * (number > 0), pieces):
                console.stream.buffer.write(piece)
                console.stream.buffer.flush()
            continue
        try:
            # one decoder for both: the prompt may end inside a character
            for at, piece in enumerate(stream(pieces)):
                console.write(piece, "green" if at else "blue")
        finally:
            console.write("\n")


# --- eval -------------------------------------------------------------------------------------------------------------

def evaluate(cfg, engine, path, most, console):
    """Prints the loss of the model and of simple models on a file (text, or tokens in a .bin; None: VAL_FILE), on at
    most `most` tokens of it (0: all). Returns (nats, tokens, Validation)."""
    decoding = data_files.load_decoding(cfg)
    name = path or cfg.VAL_FILE
    held_out = data_files.held_out(cfg, _read_tokens(cfg, decoding, name, path), name, decoding, most)
    windows = held_out.windows
    started = time.perf_counter()
    nats = 0.0
    batch = max(1, EVAL_TOKENS // windows.shape[1])  # windows at a time
    for at in range(0, len(windows), batch):
        console.progress(f"{name}: {at / len(windows):.0%}")
        nats += engine.validate(windows[at:at + batch])[0]
    console.clear()
    seconds = time.perf_counter() - started
    count = windows[:, 1:].size
    figures = {f"step {engine.step}": held_out.bits(nats), **_references(cfg, held_out)}
    size = f", {held_out.n_bytes:,} bytes" if held_out.unit == "bits/byte" else ""
    console.line(f"{name}: {count:,} tokens{size}, in windows of {windows.shape[1] - 1}; {count / seconds:,.0f} "
                 f"tokens/s on {engine.name}")
    console.line(f"{'':16}{held_out.unit:>12}{'nats/token':>12}{'perplexity':>12}")
    for source, figure in figures.items():
        each = figure * math.log(2) * held_out.n_bytes / count
        console.line(f"{source:16}{figure:12.4f}{each:12.4f}{math.exp(min(each, 700)):12.2f}")
    return nats, count, held_out


def _read_tokens(cfg, decoding, name, path):
    if path is None or path.endswith(".bin"):
        return data_files.open_tokens(cfg, name)
    text = data_files.read_text(path)
    if not text:
        raise UseError(f"{path} is empty: give a text")
    tokens = data_files.encoded(cfg, decoding, text)
    if tokens.size <= cfg.SEQ_LEN:
        raise UseError(f"{path} holds {tokens.size} tokens, too few for a window of SEQ_LEN = {cfg.SEQ_LEN}: give a "
                       "longer text")
    return tokens


def _references(cfg, held_out):
    """{name: figure} of simple models; without training data only of the one that needs none."""
    try:
        train = data_files.open_tokens(cfg, cfg.INPUT_FILE)
        tables = data_files.context_tables(train, held_out) if cfg.VOCAB_SIZE == 256 else {}
        return data_files.references(cfg, train, held_out) | tables
    except data_files.DataError as error:
        data_files.warn(f"no unigram and bigram figures: {error}")
        return {"uniform": held_out.bits(held_out.windows[:, 1:].size * math.log(cfg.VOCAB_SIZE))}


# --- safetensors ------------------------------------------------------------------------------------------------------

NAMES = {np.dtype("i1"): "I8", np.dtype("f4"): "F32"}        # of the types of arrays in a file


def library():
    """The module safetensors. Raises UseError without it."""
    try:
        import safetensors.numpy
        return safetensors
    except ImportError:
        raise UseError("export and import need safetensors: `pip install -r requirements/export.txt`") from None


def write_tensors(path, arrays, metadata):
    """Writes {name: int8 or float32 array} and {name: text} as a safetensors file. Raises OSError, UseError."""
    arrays = {name: np.ascontiguousarray(array) for name, array in arrays.items()}
    data = library().numpy.save(arrays, metadata)
    # the library writes the metadata in an order of chance: the same state shall be the same bytes
    end = 8 + int.from_bytes(data[:8], "little")
    header = json.dumps(json.loads(data[8:end]), sort_keys=True).encode()
    header += b" " * (-len(header) % 8)
    with history.replacing(*os.path.split(os.path.abspath(path))) as file:
        file.writelines((len(header).to_bytes(8, "little"), header, memoryview(data)[end:]))


def open_tensors(path):
    """(safetensors.safe_open of a file, which reads an array when it is asked for; its metadata, {name: text}). Raises
    UseError."""
    safetensors = library()
    with explained(UseError, path, "give the path of a .safetensors file"), open(path, "rb"):
        pass                                         # the library does not say why it cannot open a file
    try:
        file = safetensors.safe_open(path, "np")
        return file, file.metadata() or {}
    except (OSError, safetensors.SafetensorError) as error:
        raise UseError(f"{path} is no safetensors file of `egg.py export`, or damaged: {error}") from None


def views(cfg, state, full):
    """Yields (name in a file, view of the State, shape, whether it is a matrix in canonical order) of every stored
    array; full: with moments and noise scales."""
    for t in parameters.tensors(cfg):
        name = f"layers.{t.layer}.{t.name}" if t.per_layer else t.name
        shape = (t.rows, t.cols) if t.matrix else (t.cols,)
        yield name, state.weights[t.span], shape, t.matrix
        if full:
            yield name + ".moments", state.moments[t.span], (*shape, 3), t.matrix
            yield name + ".noise_out", state.overlay[t.overlay_a:t.overlay_a + t.cols], (t.cols,), False
        if full and t.matrix:
            yield name + ".noise_in", state.overlay[t.overlay_b:t.overlay_b + t.rows], (t.rows,), False


def to_arrays(cfg, state, full):
    """{name: array} of a State."""
    return {name: parameters.from_canonical(view, shape[1]) if matrix else view
            for name, view, shape, matrix in views(cfg, state, full)}


def read_state(cfg, file, path):
    """(State, full) of the file of `open_tensors`; full: with moments and noise scales, else initial ones. Raises
    UseError."""
    left, advice = set(file.keys()), "set the constants as they were when it was made"
    full = any(name.endswith(".moments") for name in left)
    state = parameters.initial_state(cfg)
    for name, view, shape, matrix in views(cfg, state, full):
        if name not in left:
            raise UseError(f"{path} has no {name}, which this configuration needs: {advice}")
        array, wanted = file.get_slice(name), (NAMES[view.dtype], list(shape))
        if (stored := (array.get_dtype(), array.get_shape())) != wanted:
            raise UseError(f"{path}: {name} is {stored[0]} {stored[1]}, this configuration has {wanted[0]} "
                           f"{wanted[1]}: {advice}")
        left.remove(name)
        view[...] = parameters.to_canonical(file.get_tensor(name)) if matrix else file.get_tensor(name)
    if left:
        raise UseError(f"{path} holds {min(left)}, which this configuration does not have: {advice}")
    try:
        parameters.check_state(state)
    except ValueError as error:
        raise UseError(f"{path} cannot be used: {error}") from None
    return state, full


def export(cfg, engine, path, full):
    """Writes the weights of a saved run as a safetensors file; returns a line about it. Raises UseError."""
    state = engine.state()
    arrays = to_arrays(cfg, state, full)
    files = {name: getattr(cfg, name) for name in DATA_FILES}        # an import shall learn from the same text
    metadata = {"format": FORMAT, "step": str(state.step), "seed": str(state.seed),
                "config": json.dumps({**cfg.saved(), **files}, sort_keys=True)}
    with explained(UseError, path, "give the path of a file that can be written"):
        write_tensors(path, arrays, metadata)
    extent = ", with the optimizer's state" if full else ""
    return f"{path}: {len(arrays)} arrays, {os.path.getsize(path):,} bytes, of step {state.step}{extent}"


def read_config(path):
    """{name: value}: the constants in the metadata of a safetensors file. Raises UseError."""
    with contextlib.suppress(ValueError, RecursionError):
        if isinstance(config := json.loads(open_tensors(path)[1].get("config", "{}")), dict):
            files = {name: path for name, path in config.items() if name in DATA_FILES and os.path.isfile(str(path))}
            return egg_config.renewed(history.determining(config)) | files
    raise UseError(f"{path}: its configuration cannot be read: was it written by `egg.py export`?")


def evaluate_objective(cfg, engine, path, console):
    """Prints what the model earns on the held-out prompts of a file of --objective and on seen ones, its loss on text,
    and the best of its texts. Raises EggError."""
    from tools import objective
    cfg = cfg.changed(OBJECTIVE="")                  # any file will do
    data = train.open_data(cfg, console)
    with train.opened_objective(cfg, path, data) as judge:
        judge.measure_seen(engine)
        count, mean, shown = judge.measured(engine)
        console.line(f"step {engine.step}: mean reward {rewards_text(count, mean, shown['numbers'])}")
        if known := data.validation:
            console.line(f"  {known.bits(engine.validate(known.windows)[0]):.4f} {known.unit} on {cfg.VAL_FILE}")
        if shown["news"]:
            console.line(shown["news"])
        for text in shown["completions"]:
            console.line(objective.told(text["prompt"], text["completion"], text["reward"]))


def begin(cfg, old, source, directory, threads, console, step):
    """Makes a save directory that begins with the state of the saved run `source`, of the Config `old`, at `step` or
    its end, with other LOCAL_STEPS at the step with as many updates; with an objective only with its weights and
    accumulators, as it begins to learn something else. Raises EggError."""
    engine = load(old, source, False, "cpu", threads, console, step)
    state, more = engine.state(), sum(start.more for start in history.epochs(source)[-1:])
    if cfg.OBJECTIVE or not state.step:
        model, state = state, parameters.initial_state(cfg)
        if model.weights.size != state.weights.size:
            raise UseError(f"{source} holds a model of another shape: leave -D and --preset out")
        state.weights, state.moments[:, 2] = model.weights, model.moments[:, 2]
        # not step 0: there a worker would begin with the random initial model
        state.step, state.seed = 1, steps.next_seed(steps.first_seed(cfg), 0)
        old, more = cfg, 0
    _begin(cfg, old, state, directory, more)
    counts = f", and counts from step {state.step}" * (state.step != engine.step)
    console.line(f"egg: {directory} begins with the model of {source}, step {engine.step}{counts}; {source} stays as "
                 "it is")


def _begin(cfg, old, state, directory, more=0):
    """old: the Config of the run which the state is from; more: of its history.Start. Rates and tokens go on."""
    more += state.step * old.STEP_TOKENS
    state.step = max(1, state.step * old.LOCAL_STEPS // cfg.LOCAL_STEPS)
    if cfg.ISLAND_SEED != old.ISLAND_SEED:
        state.seed = steps.hash32(state.seed, cfg.ISLAND_SEED)          # islands with one model need other noise
    if history.holds_run(directory):
        raise UseError(f"{directory} holds a run already: give a new --save-dir")
    with explained(UseError, directory, "give a --save-dir that can be written"):
        history.make_directory(directory)
        sha256 = snapshots.save(cfg, state, directory)
    start = history.Start(state.step, state.seed, sha256.hex(), more=more - state.step * cfg.STEP_TOKENS)
    history.open_directory(cfg, directory, start).close()


def import_(cfg, path, directory):
    """Makes a save directory that begins with a safetensors file; returns a line about it. Raises EggError."""
    file, metadata = open_tensors(path)
    state, full = read_state(cfg, file, path)
    try:
        # not 0: there a worker would begin with the random initial model
        step = int(metadata.get("step", 0))
        state.step = max(1, step)
        state.seed = int(metadata["seed"]) if step else steps.next_seed(steps.first_seed(cfg), 0)
        if not (state.step < 1 << 40 and 0 <= state.seed < 1 << 32):
            raise ValueError
    except (ValueError, KeyError):
        raise UseError(f"{path}: its step and seed cannot be read: was it written by `egg.py export`?") from None
    _begin(cfg, egg_config.load(environ={}, saved=read_config(path)), state, directory)
    extent = "with the optimizer's state" if full else "its optimizer and noise scales begin anew"
    return f"{directory}: a run at step {state.step}, {extent}"
