"""What a run is good for: sampling held against a plain reading of SPEC 10, and every command that uses a saved run."""

import contextlib
import io
import json
import os
import re
import shutil
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import numba
import numpy as np
from numpy import int8
from pytest import approx, fixture, mark, MonkeyPatch
import safetensors.numpy

import egg
import egg_config
import egg_net
from cluster import snapshots
from cluster.history import configuration, open_run, read_run
from engine import cpu_engine, cpu_kernels, cpu_transformer
from model import data_files, integer_tables, parameters, rules
from model.reading import Reading
from tools import debug, use
from tools.use import UseError
from coordinators import Server, kept, refused, whole
from fakes import CFG as NET_CFG, Lines, step_alone
from readings import TINY, equal, hold_text_against_the_reading
from recordings import HERE, digests, write_decoding
from commands import defines, fails, run

CFG = NET_CFG.changed(LR_SCHEDULE=((0, 1.2),), DEVICE="cpu", N_LAYERS=2)
TEXT = b"the quick brown fox jumps over the lazy dog. " * 200
TOKENS = np.frombuffer(TEXT, np.uint8)
STEPS, SNAPSHOT = 6, 4


# --- sampling ---------------------------------------------------------------------------------------------------------

def test_attention_over_more_positions_than_one_sum_of_bytes_can_hold():
    """255 * 127 * 66,312 passes int32: sums of attention must not wrap, however long a sequence is."""
    cfg, n = egg_config.make(**TINY, VOCAB_SIZE=256, CHUNK_SIZE=2), 70_000
    engine, exp = cpu_engine.CpuEngine(cfg), integer_tables.exp_table(cfg)
    below = max(range(1, 100), key=lambda d: exp[d] & 255)  # the difference whose weight has the largest lowest byte
    assert (int(exp[below]) & 255) * 127 * n > 2 ** 31
    cache = cpu_transformer.memory(cfg, 1, n)
    keys, values = np.zeros((cache.shape[3], 64), int8), np.full((cache.shape[3], 64), 127, int8)
    keys[:, ::32] = 63 - 2 * below if below < 64 else -64
    keys[0, ::32] = 63
    values[1::2, 5] = -100
    cache[0], cache[1] = keys, values
    scores = 127 * keys[:n, 0].astype(np.int64) >> cfg.SHIFT_ATTN
    weights = exp[np.minimum(255, scores[0] - scores)].astype(np.int64)

    @numba.njit(error_model="numpy")
    def attended(model, cache, kept):
        room = cpu_transformer.new_room(model, 1, cache)
        for i in range(64):
            room.q[0, i] = 0 if i % 32 else 127
        cpu_transformer.attend(model, room, 0, 0, 0, n - 1, 1, kept)
        return room.x

    want = [(weights * values[:n, d]).sum() / weights.sum() for d in range(32)]
    model = engine._model
    equal(attended(model, cache, cpu_kernels.nothing_kept(model))[0, :32].astype(int) - 128, np.trunc(want))


def test_a_sequence_takes_the_memory_that_it_has_come_to():
    """So that a generation can be as long as anybody likes; and what was there before the cache grew is still right
    after."""
    engine = make()
    endless = engine.generate([5], 1 << 40, 3, temp=9.0)
    hold_text_against_the_reading(engine, [5], [next(endless) for _ in range(300)], 3, temp=9.0,
                                  min_p=CFG.SAMPLING_MIN_P, penalty=CFG.SAMPLING_PRESENCE_PENALTY)


def test_a_prompt_of_another_vocabulary_is_refused():
    for prompt in ([], [256], [-1]):
        with refused("one token or more, each below VOCAB_SIZE = 256", ValueError):
            next(make().generate(prompt, 1, 0))


# --- text -------------------------------------------------------------------------------------------------------------

def test_characters_that_are_split_over_tokens():
    def streamed(text):
        return [*use.stream(bytes([b]) for b in text)]

    assert streamed("é€😀\n".encode()) == ["", "é", "", "", "€", "", "", "", "😀", "\n", ""]
    assert "".join(streamed(b"a\xe2\x82b\xff")) == "a\ufffdb\ufffd"
    assert "".join(streamed(b"\xe2\x82")) == "\ufffd"          # cut off at the end


@mark.parametrize("stops, shown", [([], "one, two"), (["x", ", t"], "one"), (["two"], "one, "), (["o!", "ne"], "o"),
                                   (["e,", "one"], ""), (["two!"], "one, two")])
def test_text_ends_before_a_stop_and_nothing_that_begins_one_is_shown_early(stops, shown):
    stops, size = [stop.encode() for stop in stops], 0
    for cut in 1, 3:
        pieces = [b"one, two"[at:at + cut] for at in range(0, 8, cut)]
        assert b"".join(use.until(pieces, stops)).decode() == shown
        for piece in use.until((pieces[k] for k in range(len(pieces) - 1)), stops):
            size += len(piece)
            assert not any(stop in piece for stop in stops)
    assert use.until(iter([b"ab", b"cd"]), [b"x"]).__next__() == b"ab"           # at once


def test_the_tokens_of_a_text_are_those_of_the_bpe_that_made_the_vocabulary():
    decoding = data_files.load_decoding(egg_config.make())
    tokens = np.fromfile(HERE / "val.bin", "<u4")
    equal(decoding.encode(decoding.decode(tokens)), tokens)
    for text in ("naïve – 😀".encode(), bytes(range(256)), b"", b"  \n\n  x"):
        assert decoding.decode(decoding.encode(text)) == text


# --- a saved run ------------------------------------------------------------------------------------------------------

def step_once(engine, run):
    fitness, losses, changed = step_alone(engine)
    run.append(fitness, int(losses.sum()), changed)


def make(cfg=CFG):
    return cpu_engine.CpuEngine(cfg, TOKENS, threads=1)


def with_state(state):
    engine = make()
    engine.load(state)
    return engine


def uploaded(state, directory):
    """A snapshots.Upload that has got all of a State."""
    body = snapshots.pack(state)
    upload = snapshots.Upload(CFG, state.step, state.seed, parameters.digest_of(state), directory)
    upload.feed(len(body), 0, body)
    upload.check()
    return upload


@fixture(scope="module")
def trained(tmp_path_factory):
    """(directory with the data, [State after each step]); in its ckpt a run with a snapshot, judged 3.5."""
    directory = tmp_path_factory.mktemp("trained")
    (directory / "input.bin").write_bytes(TEXT)
    (directory / "val.bin").write_bytes(TEXT[:500])
    with MonkeyPatch.context() as patch:
        patch.chdir(directory)                           # a run remembers where its data are
        run = open_run(CFG, str(directory / "ckpt"))
    engine = make()
    states = [engine.state()]
    for _ in range(STEPS):
        step_once(engine, run)
        states.append(engine.state())
    upload = uploaded(states[SNAPSHOT], directory / "ckpt")
    upload.keep(f"snapshot-{SNAPSHOT:08d}-3.5000.egg", run.fitness(SNAPSHOT - 1))
    run.close()
    return directory, states


@fixture
def here(trained, tmp_path, monkeypatch):
    """The same in a directory of our own, which we are in."""
    shutil.copytree(trained[0], tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("EGG_DEVICE", "cpu")
    return trained[1]


def load(directory="ckpt", best=False, cfg=CFG, lines=None):
    return use.load(cfg, directory, best, threads=1, console=egg_net.Console(lines or Lines()))


def call(line, *more):
    """What a command has done, without the line that names the run."""
    done = run(line, *more, preset="")
    done.stderr = re.sub(r"^egg: \S+, step \d+\n", "", done.stderr)
    return done


def prints(line, *more):
    """What a command has printed that ends well and has nothing to warn of."""
    done = call(line, *more)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


def test_a_run_is_loaded_by_snapshot_and_replay(here):
    newest = load(lines=(lines := Lines()))
    assert newest.step == STEPS and digests(newest.state()) == digests(here[STEPS]) != digests(here[0])
    best = load(best=True)
    assert best.step == SNAPSHOT and digests(best.state()) == digests(here[SNAPSHOT]) and not lines.text
    # a better one, damaged: the next one is taken, with a line
    name = next(Path("ckpt").glob("snapshot*"))
    better = Path(f"ckpt/snapshot-{SNAPSHOT + 1:08d}-3.4000.egg")
    with closing(read_run(CFG, "ckpt")) as run:
        uploaded(here[SNAPSHOT + 1], "ckpt").keep(better.name, run.fitness(SNAPSHOT))
    better.write_bytes(better.read_bytes()[:-1] + b"?")
    assert load(best=True, lines=lines).step == SNAPSHOT
    name.write_bytes(name.read_bytes()[:-1] + b"?")
    assert digests(load(lines=lines).state()) == digests(here[STEPS])
    assert lines.text.count(f"snapshot of step {SNAPSHOT + 1}") == 2 and f"snapshot of step {SNAPSHOT}:" in lines.text
    with refused("cannot be read", UseError):
        load(best=True)
    name.unlink(), better.unlink()
    with refused("no best snapshot", UseError):
        load(best=True)
    assert digests(load().state()) == digests(here[STEPS])


def test_generate_knows_the_configuration_and_writes_what_the_engine_draws(here):
    ask = "generate --prompt 'the qu' --tokens 12 --seed 9"
    out = prints(f"{ask} --load-dir ckpt --temp 9")
    more = bytes(with_state(here[STEPS]).generate(list(b"the qu"), 12, 9, temp=9))
    assert out == "the qu" + more.decode("utf-8", "replace")
    fails(call("generate --prompt ''"), 2, "the prompt is empty")
    # newest ckpt*
    assert prints(f"{ask} --temp 9 --best") != out == prints(f"{ask} -D SAMPLING_TEMP=9 -D N_LAYERS=2")


def test_several_texts_stops_and_one_prompt_after_another(here, monkeypatch):
    def written(prompt, seed):
        text = bytes(with_state(here[STEPS]).generate(list(prompt.encode()), 12, seed, temp=9))
        return prompt + text.decode("utf-8", "replace")

    ask = "generate --tokens 12 --temp 9 --seed 4294967295"
    first, second = written("fox", 4294967295), written("fox", 4294967296)
    assert prints(f"{ask} -n 2 --prompt fox") == f"{first}\n---\n{second}" and first != second
    stop = next(c for c in first[4:] if c.isascii())
    assert prints(ask, "--prompt", "fox", "--stop", "nowhere", "--stop", stop) == "fox" + first[3:].partition(stop)[0]
    fails(call("generate --stop ''"), 2, "or a text of --stop: give")
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"fox\n\n"), "utf-8"))
    assert prints(f"{ask} --interactive") == first + "\n---\n" + written("\n", 4294967296)


def test_a_prompt_is_asked_for_on_a_terminal_until_ctrl_d(here):
    terminal, inside = os.openpty()
    done = subprocess.Popen([sys.executable, HERE / "egg.py", *"generate --tokens 3 --interactive".split()],
                            stdin=inside, stdout=inside, stderr=inside, env={**os.environ, "EGG_DEVICE": "cpu"})
    os.close(inside)
    text = b""
    for answer in b"the fox\n", b"\x04":
        while not text.endswith(b"> "):
            text += os.read(terminal, 1000)
        os.write(terminal, answer)
        text += b"|"
    with contextlib.suppress(OSError):                       # the other end is closed
        while more := os.read(terminal, 1000):
            text += more
    os.close(terminal)
    assert done.wait(60) == 0
    assert b"the fox" in text.split(b"|")[1] and text.endswith(b"\r\n")


def test_the_token_for_the_end_of_a_text_ends_it(tmp_path):
    class Ends:
        def generate(self, prompt, count, seed):
            yield from (97, 256, 98)

    path = write_decoding(tmp_path / "decoding.bin", [*(bytes([b]) for b in range(256)), b"<|endoftext|>"])
    cfg = CFG.changed(VOCAB_SIZE=257, DECODING_FILE=path)
    decoding = data_files.load_decoding(cfg)
    assert b"".join(use.continuation(cfg, decoding, Ends(), b"x", 3, 0)) == b"a"
    assert b"".join(use.continuation(CFG, data_files.load_decoding(CFG), Ends(), b"x", 3, 0)) == b"a\xef\xbf\xbdb"


def test_bytes_pass_a_pipe_as_they_are(here, capsysbinary, monkeypatch):
    """The prompt from standard input, and a continuation that is no UTF-8; which run it was is said on the side."""
    prompt = b"\xe2\x82lazy\xff\n"
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(prompt)))
    assert egg.main("generate --prompt - --tokens 60 --temp 90 --seed 3".split()) == 0
    out, err = capsysbinary.readouterr()
    more = bytes(with_state(here[STEPS]).generate(list(prompt), 60, 3, temp=90.0))
    assert out == prompt + more and max(more) > 127
    assert err == b"egg: ckpt, step %d\n" % STEPS
    assert egg.main(["eval", "--best"]) == 0
    assert capsysbinary.readouterr()[1] == b"egg: ckpt, step %d\n" % SNAPSHOT


WRONG = """
generate --load-dir nowhere | nowhere: No such file or directory: give --load-dir
generate --load-dir . | holds no run
eval missing.txt | missing.txt: No such file
eval short.txt | too few for a window
eval empty.txt | empty.txt is empty: give a text
eval short.bin | short.bin holds 5 tokens
export no/such/place | no/such/place: No such file
import short.txt --save-dir new | no safetensors file
import missing.txt --save-dir new | missing.txt: No such file
debug --json no/such/place | no/such/place: No such file
"""                      # what is typed | what is said


@mark.parametrize("line", WRONG.strip().split("\n"))
def test_what_is_wrong_is_said_in_one_line(here, line):
    arguments, says = line.split(" | ")
    for name in "short.txt", "short.bin":
        Path(name).write_text("brief")
    Path("empty.txt").touch()
    fails(call(arguments), 1, says)


def test_without_a_run_or_a_vocabulary(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert call("generate").stderr.startswith("egg: there is no saved run here (ckpt*): make one with")
    open_run(CFG.changed(VOCAB_SIZE=300, N_LAYERS=1), "ckpt-wide").close()
    monkeypatch.setenv("EGG_DEVICE", "cpu")
    done = call("generate --prompt x")
    assert done.returncode == 1 and not done.stdout
    assert "decoding.bin is missing, and without it no text can be turned into tokens" in done.stderr
    write_decoding(tmp_path / "decoding.bin", [bytes([b]) for b in range(256) if b != 0x21])
    fails(done := call("generate --prompt 'x!'"), 1, "no token for byte 0x21")
    assert not done.stdout
    prints("generate --prompt x --tokens 2")


def test_text_comes_while_it_is_made_and_steers_no_terminal():
    class Slow:
        def generate(self, prompt, count, seed, **settings):
            for token in b"a\x1bb\xc3\xa9":
                seen.append(screen.text)
                yield token

    seen, screen = [], Lines(terminal=True)
    use.generate(CFG, Slow(), [b"go\x07\xc3"], 5, 0, egg_net.Console(screen))
    plain = [re.sub(r"\x1b\[\d*m", "", text) for text in (*seen, screen.text)]
    assert plain[-1] == "go\ufffdabé\n" and "\x1b[34mgo\x1b[0m" in screen.text and "\x1b[32ma" not in seen[0]
    assert [*map(len, plain[:-1])] == [2, 4, 4, 5, 5]


def test_samples_have_two_colours_on_a_terminal_alone(monkeypatch):
    def shown(terminal):
        console = egg_net.Console(Lines(terminal))
        console.emit({"event": "sample", "prompt": "a\nb\x1b[1m", "text": "c"}, "sample: ")
        return console.stream.text

    legend = "sample: (given >>> what the model adds) "
    plain, coloured = legend + "a\u23ceb[1m >>> c\n", legend + "\x1b[34ma\u23ceb[1m\x1b[0m >>> \x1b[32mc\x1b[0m\n"
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert (shown(True), shown(False)) == (coloured, plain)
    monkeypatch.setenv("NO_COLOR", "1")
    assert shown(True) == plain


# --- eval -------------------------------------------------------------------------------------------------------------

def test_eval_gives_the_figures_of_the_engine(here):
    out = prints("eval")
    held_out = data_files.open_validation(CFG, data_files.load_decoding(CFG))
    nats, count = with_state(here[STEPS]).validate(held_out.windows)
    references = data_files.references(CFG, TOKENS, held_out)
    rows = {line[:16].strip(): [float(x) for x in line[16:].split()] for line in out.splitlines()[2:]}
    for name, bits in {f"step {STEPS}": held_out.bits(nats), **references,
                       **data_files.context_tables(TOKENS, held_out)}.items():
        assert rows[name] == approx([bits, bits * np.log(2), 2 ** bits], abs=0.006), name
    assert re.search(rf"^val.bin: {count} tokens, {count} bytes, in windows of 8; [\d,]+ tokens/s on cpu", out)
    Path("val.txt").write_bytes(TEXT[:500])
    assert prints("eval val.txt").splitlines()[1:] == out.splitlines()[1:]
    few = prints("eval --tokens 16 --best")
    assert few.startswith("val.bin: 16 tokens") and f"step {SNAPSHOT} " in few
    os.unlink("input.bin")
    done = call("eval")
    assert done.returncode == 0 and "uniform" in done.stdout and "unigram" not in done.stdout
    assert done.stderr.startswith("egg: no unigram and bigram figures: input.bin is missing")


# --- export and import ------------------------------------------------------------------------------------------------

def test_export_is_a_safetensors_file(here):
    prints("export w.safetensors")
    arrays, metadata = safetensors.numpy.load_file("w.safetensors"), use.open_tensors("w.safetensors")[1]
    files = {name: getattr(CFG, name) for name in egg_config.DATA_FILES}
    assert json.loads(metadata["config"]) == {**CFG.saved(), **files}
    assert (metadata["step"], metadata["seed"]) == (str(STEPS), str(here[STEPS].seed))
    tensors = {f"layers.{t.layer}.{t.name}" if t.per_layer else t.name: t for t in parameters.tensors(CFG)}
    assert arrays.keys() == tensors.keys()
    for name, t in tensors.items():
        flat = here[STEPS].weights[t.span]
        equal(arrays[name], parameters.from_canonical(flat, t.cols) if t.matrix else flat)


def test_the_same_state_is_the_same_bytes(here):
    for name in "abc":                                          # the library orders metadata by chance
        prints(f"export {name} --full")
    first, *others = [Path(name).read_bytes() for name in "abc"]
    assert set(others) == {first} and int.from_bytes(first[:8], "little") % 8 == 0


def test_weights_alone_begin_a_run_with_a_fresh_optimizer(here):
    prints("export w.safetensors --best")
    assert prints("import w.safetensors --save-dir new").startswith(
        f"new: a run at step {SNAPSHOT}, its optimizer and noise scales begin anew\nnext: ")
    state = load("new").state()
    equal(state.weights, here[SNAPSHOT].weights)
    assert (state.step, state.seed) == (SNAPSHOT, here[SNAPSHOT].seed)
    assert not state.moments.any() and (state.overlay == CFG.ADAPTIVE_NOISE_INIT).all()
    assert egg_config.load(environ={}, saved=configuration("new")).saved() == CFG.saved()
    assert "holds a run already" in call("import w.safetensors --save-dir new").stderr


def test_a_file_written_by_the_library_is_taken_and_one_that_does_not_fit_is_refused(here):
    call("export w.safetensors")
    arrays, metadata = safetensors.numpy.load_file("w.safetensors"), use.open_tensors("w.safetensors")[1]
    last = arrays.pop("ln_f")
    for says, tensors, header in (
            ("has no ln_f", {}, {}), ("ln_f is F32 [64]", dict(ln_f=np.zeros(64, np.float32)), {}),
            ("holds extra, which", dict(ln_f=last, extra=last), {}),
            ("ln_f is I8 [63], this configuration has I8 [64]:", dict(ln_f=last[1:].copy()), {}),
            ("a weight or noise scale of -128", dict(ln_f=np.full(64, -128, int8)), {}),
            ("its step and seed", dict(ln_f=last), {"step": "many"}),
            ("its configuration cannot be read", dict(ln_f=last), {"config": "{"})):
        safetensors.numpy.save_file({**arrays, **tensors}, "other.safetensors", {**metadata, **header})
        done = call("import other.safetensors --save-dir other")
        assert done.returncode in (1, 2) and not os.path.exists("other")
        fails(done, done.returncode, says)
    # no metadata: the configuration by -D, and step 1
    safetensors.numpy.save_file({**arrays, "ln_f": last}, "other.safetensors")
    assert prints("import other.safetensors --save-dir other", *defines(CFG)).startswith("other: a run at step 1")
    state = load("other").state()
    equal(state.weights, here[STEPS].weights)
    assert state.seed == here[1].seed


def test_a_damaged_safetensors_file_ends_in_one_line(here):
    call("export w.safetensors")
    data = Path("w.safetensors").read_bytes()
    for wrong in b"", data[:-1], data + b"x", b"\xff" * 8 + data[8:], data[:8] + b"[]" + data[10:]:
        Path("wrong").write_bytes(wrong)
        fails(call("import wrong --save-dir new"), 1, "no safetensors file")


def test_training_goes_on_from_an_import_to_the_bit(here):
    """With --full the run is the one that was exported: a coordinator and a worker that begins at step 0, against the
    engine alone."""
    prints("export w.safetensors --full")
    assert "with the optimizer's state" in prints("import w.safetensors --save-dir new")
    alone, worker = with_state(here[STEPS]), make()
    record = open_run(CFG, None)
    record.step, record.seed = alone.step, alone.seed
    record.start = record.start._replace(step=alone.step, seed=alone.seed)
    with Server("new", CFG, save=True, steps=STEPS + 3) as server:
        thread = server.work(worker, tokens=TOKENS)
    thread.join(60)
    for _ in range(3):
        step_once(alone, record)
    assert worker.step == STEPS + 3 and worker.digest() == alone.digest()
    assert kept("new", CFG) == whole(record) and len(whole(record)) == 3
    # it goes on elsewhere
    open_run(CFG, "elsewhere", "new").close()
    assert load("new").digest() == alone.digest() == load("elsewhere").digest()
    with refused("step 1 needs is not kept", UseError):
        use.load(CFG, "elsewhere", threads=1, console=egg_net.Console(Lines()), step=1)
    for path in Path("elsewhere").glob("snapshot*"):         # that of the beginning, and of the end
        path.unlink()
    with refused(r"restore it from a copy \(there is none", UseError):
        load("elsewhere")


def test_the_snapshot_with_which_an_imported_run_began_stays(here):
    prints("export w.safetensors")
    prints("import w.safetensors --save-dir new")
    with closing(open_run(CFG, "new")) as run:
        shelf = snapshots.Shelf(CFG, run)
        engine = with_state(shelf.state(STEPS))
        for _ in range(4):
            step_once(engine, run)
            shelf.digests[engine.step] = engine.digest()
            [work() for work in shelf.put(uploaded(engine.state(), "new"))]
        assert sorted(shelf.files) == [STEPS, STEPS + 3, STEPS + 4] == sorted(snapshots.Shelf(CFG, run).files)


# --- debugging --------------------------------------------------------------------------------------------------------

def test_statistics():
    told = debug.statistics(np.array([0, 0, 4, -4, 127, -127, 126, 126], int8))
    assert told == approx({"mean": 31.5, "low": -127, "high": 127, "std": 7013 ** 0.5, "saturated": 0.5, "zero": 0.25,
                           "entropy": 2.5})
    told = debug.attention_statistics(np.array([4, 4, 0, 4, 4]))
    assert told.items() >= {"entropy": 2, "peak": 0.25, "sum": 16, "context": 4}.items()


GRU = CFG.changed(MODEL="gru", HEAD_DIM=64, STATE_TOKENS=5, LOSS="exact")


@mark.parametrize("cfg, outside, layer", [
    (CFG, "Emb LN_Init InitMLP_Exp InitMLP", "LN1 Attn Attn Attn LN2 MLP_Exp MLP "),
    (GRU, "Emb", "LN1 State GRU LN2 MLP_Exp MLP ")], ids=["transformer", "gru"])
def test_a_trace_shows_every_part_of_member_0(cfg, outside, layer):
    """What it looks at is what the losses come from, which test_egg holds against the engines; here: which member,
    position and order, from the state that the tokens before the window make."""
    state, shown = parameters.initial_state(cfg), {}
    state.step = STEPS
    told = debug.trace(cfg, state, TOKENS)
    assert [part["name"] for part in told["parts"]] == [*outside.split(), *(2 * layer).split(), "LN_F"]
    assert (told["step"], told["position"]) == (STEPS, 7) and len(told["weights"]) == len(parameters.tensors(cfg))
    before, window, _ = np.split(rules.windows(cfg, TOKENS, STEPS, 0, 1)[0], [cfg.STATE_TOKENS, -1])
    clean = Reading(cfg, state)
    reading = Reading(cfg, state, state.seed, 1, lambda layer, name, values: shown.update({(layer, name): values}))
    if before.size:
        clean.hidden(before)
    reading.carried = clean.carried
    reading.logits(window)
    for part in told["parts"]:
        values = shown[part["layer"], "Weights" if "head" in part else part["name"]]
        want = debug.attention_statistics(values[part["head"]][7]) if "head" in part else debug.statistics(values[7])
        assert want.items() <= part.items()


def test_debug_command_and_layout(here):
    out = prints("debug --json trace.jsonl")
    head, names, *lines = out.splitlines()
    assert head == "step 6, member 0, position 7" and names.split()[:3] == ["layer", "name", "mean"]
    assert re.fullmatch(r"0 +LN1( +-?\d+\.\d\d){5}( +-?\d+){2}", lines[4])
    assert [*map(str.split, lines)].count("layer name head entropy peak largest sum context".split()) == 1
    prints("debug --json trace.jsonl --best")
    assert [json.loads(line)["step"] for line in open("trace.jsonl")] == [STEPS, SNAPSHOT]
