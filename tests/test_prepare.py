"""`prepare`: own text becomes data files, and the next command trains on them."""

import filecmp
import itertools
import os
import pathlib
import shlex
import shutil
import sys
from unittest import mock

import numpy as np
from pytest import mark
import pyzstd

import egg
import egg_config
from model import data_files
from model.data_files import DataError
from tools import prepare
from commands import PROSE, TEXT, fails, line_with, paste, run, succeeds
from readings import configured
from coordinators import refused
from fakes import full


MANY = 1 << 20, 1 << 16             # tokens to train on, and held out


# --- own text ---------------------------------------------------------------------------------------------------------

def test_prepare_leads_to_text(here, compiled):
    """Text -> training -> generation by what is printed."""
    arguments = "--out 'my books' --vocab-size 300"
    (here / "it's mine.txt").write_bytes(TEXT * 2)
    made = run(f"prepare {arguments}", "it's mine.txt")
    assert (made.returncode, made.stderr) == (0, "")
    line = line_with("next: ", made.stdout)
    assert "--preset laptop" in line and " --save-dir ckpt-" in line.replace("'", "")
    trained = succeeds(paste(line + " --steps 3", "next: "))
    assert "steps 0 to 3" in trained and "bits/byte after" in trained
    assert succeeds(paste(line_with("try it: ", trained), "try it: ")).startswith("\n")
    assert line_with("next: ", run(f"prepare --force {arguments}", "it's mine.txt").stdout).count("-2") == 1


def test_prepare_leads_to_the_preset_of_the_machine():
    assert shlex.join(prepare.training_on("/x/a b", True, 5000, False, MANY)) == (
        "--preset best -D VOCAB_SIZE=5000 -D 'INPUT_FILE=/x/a b/input.bin' -D 'VAL_FILE=/x/a b/val.bin' "
        "-D 'DECODING_FILE=/x/a b/decoding.bin' --save-dir 'ckpt-a b'")
    for size, plain, gpu, preset in ((8192, False, True, "best"), (700, False, False, "laptop"),
                                     (256, True, True, "best-bytes"), (256, True, False, "laptop-bytes")):
        args = egg.parsed(["train", *prepare.training_on("x", gpu, size, plain, MANY)])
        assert args.preset == preset and ("DETOKENIZE=0" in args.defines) == plain
        configured(preset, *args.defines)


def test_prompts_and_answers_get_settings_with_which_they_are_learnt(here):
    """As for examples/sort.py: a window of a few lines, soft targets that follow all of a prompt; plain bytes."""
    (here / "t.txt").write_text("".join(f"{k * 7919 % 1000:03}>{k * 7919 % 1000:03}.\n" for k in range(30000)))
    told = succeeds(run("prepare t.txt --out mine"))
    assert "each line is a prompt and its answer" in told
    assert "--preset laptop-bytes -D DETOKENIZE=0 -D SEQ_LEN=16 -D SOFT_TARGETS=0:7 -D INPUT_FILE=" in told
    assert prepare.longest_answer(TEXT) == prepare.longest_answer(b"a>b") == 0


def test_prepare_makes_tokens_unless_told_otherwise(here, monkeypatch):
    (here / "t.txt").write_bytes(TEXT)
    with monkeypatch.context() as patched:                       # bytes need no library
        patched.setitem(sys.modules, "tokenizers", None)
        told = succeeds(run("prepare t.txt --vocab-size 256 --out mine"))
    assert "BPE" not in told and "--preset laptop-bytes -D DETOKENIZE=0 -D INPUT_FILE=mine/input.bin" in told
    assert sorted(os.listdir("mine")) == ["input.bin", "val.bin"]
    told = succeeds(run("prepare t.txt --out tokens -D VOCAB_SIZE=300"))
    assert "BPE: " in told and "--preset laptop -D VOCAB_SIZE=" in told and os.path.exists("tokens/decoding.bin")
    fails(run("prepare t.txt --out t.txt"), 1, "t.txt: File exists: ", "give --out a directory that can be")


def test_a_short_text_becomes_bytes_unless_told_otherwise(here, monkeypatch):
    text = TEXT * (1 + 8000 // len(TEXT))
    (here / "t.txt").write_bytes(text)
    monkeypatch.setattr(prepare, "TOKENS_FROM", len(text))       # a part of it is held out
    short = succeeds(run("prepare t.txt --out short"))
    assert "plain bytes: " in short and "--preset laptop-bytes -D DETOKENIZE=0" in short
    assert "BPE: " in succeeds(run("prepare t.txt --out told --vocab-size 300"))
    assert "BPE: " in succeeds(run("prepare t.txt --out preset --preset laptop-bytes"))
    monkeypatch.setattr(prepare, "TOKENS_FROM", len(text) // 2)
    long = succeeds(run("prepare t.txt --out long"))
    assert "BPE: " in long and "--preset laptop -D VOCAB_SIZE=" in long and "plain bytes" not in long


def test_a_text_that_is_too_short_leads_to_no_command(here):
    (here / "t.txt").write_text("hello world, this is my own tiny file\n" * 3)
    done = run("prepare t.txt --vocab-size 256 --out made")
    assert "next: " not in done.stdout
    fails(done, 1, "5 tokens in one of these files are too few to train with --preset laptop-bytes, which needs 66")
    assert not (here / "made").exists()


def test_prepare_asks_before_it_replaces(here, monkeypatch):
    line, old = "prepare t.txt --vocab-size 256", here / "val.bin"
    (here / "t.txt").write_bytes(TEXT)
    old.write_bytes(b"old")
    fails(run(line), 2, "val.bin would be replaced: give another directory with --out DIR, or --force")
    assert not (here / "input.bin").exists()
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    for answer, status in (EOFError, 2), ("", 2), ("n", 2), ("y", 0):
        monkeypatch.setattr("builtins.input", mock.Mock(side_effect=[answer]))
        assert run(line).returncode == status and (old.read_bytes() == b"old") == bool(status)


def test_files_of_two_prepares_do_not_mix_and_a_run_knows_its_own(here, compiled_units):
    """By what is in them, not by their names."""
    for name, text in ("a", TEXT), ("b", TEXT.upper()):
        (here / name).mkdir()
        (here / f"{name}.txt").write_bytes(text * 2)
        succeeds(run(f"prepare {name}.txt --vocab-size 300 --out {name}"))
    size = len(data_files.Decoding.read("a/decoding.bin"))
    line = f"train --preset laptop -D VOCAB_SIZE={max(size, 300)} --steps 1 --save-dir ckpt -D SOFT_TARGETS="
    for files in "aab", "aba", "baa":
        names = [f"-D{name}={at}/{file}" for (name, file), at in zip(prepare.FILES.items(), files)]
        fails(run(line, *names), 2, "was made with another vocabulary than ", "the three files of one `python egg.py")
    succeeds(run(line, *(f"-D{name}=a/{file}" for name, file in prepare.FILES.items())))
    ask = "generate --load-dir ckpt --prompt the --tokens 3"
    succeeds(run(ask))
    os.rename("a", "gone")
    shutil.copy("b/decoding.bin", ".")                           # it would be found here, but the run has its own
    os.rename("ckpt", "elsewhere")
    ask = ask.replace("ckpt", "elsewhere")
    succeeds(run(ask))
    os.rename("elsewhere/decoding.bin", "mine.bin")              # as of an older run
    done = run(ask)
    assert (done.returncode, done.stdout) == (1, "") and "is not the decoding.bin of this run" in done.stderr
    succeeds(run(ask + " -D DECODING_FILE=mine.bin"))
    files = [f"-D{name}=gone/{file}" for name, file in prepare.FILES.items()]
    succeeds(run("train --save-dir elsewhere --steps 2", *files))
    assert filecmp.cmp("elsewhere/decoding.bin", "mine.bin", False)


# --- preparing a text -------------------------------------------------------------------------------------------------

def read_back(vocab):
    """(training text, held-out text) as the three files say."""
    kind = "u1" if vocab == 256 else "<u4"
    decoding = data_files.load_decoding(egg_config.make(VOCAB_SIZE=vocab))
    return [decoding.expand(np.fromfile(name, kind)).tobytes() for name in ("input.bin", "val.bin")]


def prepared(text, vocab, held_out=None, said=print):
    """What `prepare` returns, which makes files here of a text (bytes) and says lines to `said`."""
    pathlib.Path("t").write_bytes(text)
    return prepare.prepare(["t"], vocab, held_out, ".", said)[0]


def test_split_gives_back_all_of_the_text():
    for data in (PROSE * 3000, b"x" * 100000, b"a\n" * 30000, PROSE * 5, (b"y" * 999 + b"\n") * 1000):
        train, held_out = prepare.split(data)
        assert len(train) == len(held_out) + 1 and 0.04 < sum(map(len, held_out)) / len(data) < 0.11
        assert b"".join(a + b for a, b in itertools.zip_longest(train, held_out, fillvalue=b"")) == data
        if len(data) > 50000 and data.count(b"\n") * 200 > len(data):
            assert all(part.endswith(b"\n") for part in train + held_out), "cuts are at line ends"
    assert len(prepare.split(PROSE * 30000)[1]) == prepare.VAL_BLOCKS


@mark.parametrize("vocab, piece", [(256, None), (257, None), (400, None), (400, 100)])
def test_any_bytes_come_back(here, monkeypatch, vocab, piece):
    """Also where the text is longer than the pieces of the encoder."""
    monkeypatch.setattr(prepare, "ENCODE_BYTES", piece or prepare.ENCODE_BYTES)
    noise = np.random.default_rng(5).integers(0, 256, 30000, dtype=np.uint8).tobytes()
    data = (PROSE * 100 + noise + b"\x00" * 1000 + "\u00e9\u2028\u0085\u00a0".encode() * 100
            + b"\r\n \r\n" * 500 + bytes(range(256)) * 20)
    assert prepared(data, vocab) == vocab
    assert read_back(vocab) == [b"".join(part) for part in prepare.split(data)]
    assert sorted(os.listdir()) == ["decoding.bin", "decoding.sha256"] * (vocab > 256) + ["input.bin", "t", "val.bin"]
    if vocab > 256:
        decoding = data_files.Decoding.read("decoding.bin")
        assert decoding.decode(range(256)) == bytes(range(256))
        assert len({decoding.decode([token]) for token in range(vocab)}) == vocab


def test_several_texts_zst_and_held_out_file(here):
    parts = [PROSE * 200, b"second file, no line end", PROSE.upper() * 50]
    for name, text in zip(("a", "b", "c.zst", "v"), (*parts[:2], pyzstd.compress(parts[2]), b"held out\xff")):
        (here / name).write_bytes(text)
    prepare.prepare(["a", "b", "c.zst"], 300, "v")
    assert read_back(300) == [b"".join(parts), b"held out\xff"]


def test_a_directory_is_all_its_files_and_progress_is_shown(here, monkeypatch):
    (here / "books" / "more").mkdir(parents=True)
    for name in "books/b", "books/a", "books/more/c", "books/.hidden":
        (here / name).write_bytes(name.encode() * 9000)
    now, said = itertools.count(), []
    monkeypatch.setattr(prepare, "ENCODE_BYTES", 9000)
    monkeypatch.setattr("tools.prepare.time.monotonic", lambda: next(now))
    prepare.prepare(["books"], 300, "books/a", ".", said.append)
    assert read_back(300) == [b"".join(name * 9000 for name in (b"books/a", b"books/b", b"books/more/c")),
                              b"books/a" * 9000]
    assert any(line.startswith("BPE: read ") for line in said)


def test_a_directory_with_other_files_and_a_table_and_a_field_of_json(here):
    """What is no text is left out with a line in a directory, and refused where it is named."""
    (here / "books").mkdir()
    for name, content in {"a.txt": PROSE * 20, "b.pdf": b"%PDF-1.7\n" + PROSE, "c.csv": PROSE,
                          "d.jsonl": b'{"body": "a field"}\n'}.items():
        (here / "books" / name).write_bytes(content)
    said = []
    prepare.prepare(["books"], 256, "books/a.txt", ".", said.append, field="body")
    assert pathlib.Path("input.bin").read_bytes() == PROSE * 20 + PROSE + b"a field"
    assert said[:2] == ["left out: books/b.pdf holds a PDF, not bytes: give the text itself",
                        "books/c.csv: a table or no text: every byte of it is learnt"]
    with refused("b.pdf holds a PDF", DataError):
        prepare.prepare(["books/b.pdf"], 256)
    fails(run("prepare books/d.jsonl --force"), 1, 'line 1', 'in its field "text"', "--field NAME")
    assert "next: " in succeeds(run("prepare books/a.txt books/d.jsonl --field body --vocab-size 256 --out more"))


def test_each_text_is_read_once_and_none_that_prepare_has_made(here):
    """However often it is there, and wherever links lead."""
    (here / "d" / "v1" / ".git").mkdir(parents=True)
    texts = [os.urandom(9000).hex().encode() + b"\n" for _ in range(3)]
    for name, text in {"d/a": texts[0], "d/v1/b": texts[1], "d/copy": texts[0], "d/v1/.git/c": TEXT,
                       "d/v1/packed.zst": pyzstd.compress(texts[2])}.items():
        (here / name).write_bytes(text)
    for link, to in ("d/loop", "."), ("d/v1/up", ".."), ("d/current", "v1"), ("d/broken", "nowhere"), ("d/same", "a"):
        os.symlink(to, link)
    for line in "prepare d --out d", "prepare d d/a --force --out d":
        told = succeeds(run(f"{line} --vocab-size 256"))
        assert "left out: d/copy is the same text as d/a" in told and "left out: d/loop is a link to" in told
        assert "warning" not in told and ("left out: d/input.bin" in told) == ("force" in line)
        assert sum(map(os.path.getsize, ("d/input.bin", "d/val.bin"))) == 3 * len(texts[0])
    told = succeeds(run("prepare d/a d/v1 d/input.bin d/val.bin --out all --vocab-size 256"))
    assert "of the held-out text stands in the text to train on, too" in told


@mark.parametrize("between", [b"", b"\n"])
def test_the_end_of_a_text_is_one_token(here, monkeypatch, between):
    """In the files of `prepare`, as in a prompt, and not taken into account by the BPE."""
    monkeypatch.setattr(prepare, "ENCODE_BYTES", 200)
    text = (PROSE.replace(b"\n", b" ") + between + data_files.END + between) * 300
    assert prepared(text, 300) == 300
    decoding = data_files.Decoding.read("decoding.bin")
    files = [np.fromfile(name, "<u4") for name in ("input.bin", "val.bin")]
    assert decoding.decode([299]) == data_files.END and b"|>" not in decoding and b"endo" not in decoding
    assert sum((tokens == 299).sum() for tokens in files) == 300
    assert sum(decoding.decode(tokens).count(data_files.END) for tokens in files) == 300
    assert (decoding.encode(text) == 299).sum() == 300


def test_the_vocabulary_is_learned_from_the_training_part_alone(here):
    (here / "v").write_bytes(b"zyzzyva " * 5000)
    prepared(PROSE * 50, 320, "v")
    decoding = data_files.Decoding.read("decoding.bin")
    assert not any(b"zy" in decoding.decode([t]) for t in range(320)) and decoding.lengths.max() > 2


def test_fewer_tokens_than_asked_for(here):
    said = []
    got = prepared(b"abababab\n" * 200, 5000, said=said.append)
    assert 256 < got < 300 and any(f"{5000 - got:,} tokens fewer" in line for line in said)
    assert len(data_files.Decoding.read("decoding.bin")) == got


def test_bad_texts_leave_the_old_files(here, monkeypatch):
    for name, content in {"input.bin": b"old", "decoding.bin": b"oldest", "empty": b"", "short": b"ab",
                          "bad.zst": b"no zstd", "cut.zst": pyzstd.compress(b"a" * 999)[:-2],
                          "good": PROSE * 100}.items():
        (here / name).write_bytes(content)
    for text, words in {"none": "none.*No such file", "empty": "empty.*no text",
                        "short": "too short", "bad.zst": "bad.zst.*no whole zstd file",
                        "cut.zst": "cut.zst.*no whole zstd file"}.items():
        with refused(words, DataError):
            prepare.prepare([text], 300)
    with refused("empty: no text there, nothing to hold out", DataError):
        prepare.prepare(["good"], 300, "empty")
    monkeypatch.setattr(os, "fsync", full)
    with refused("No space left on device", DataError):
        prepare.prepare(["good"], 256)
    assert (here / "input.bin").read_bytes() == b"old" and (here / "decoding.bin").read_bytes() == b"oldest"
    assert not [*here.glob("input.bin.*")], "no temporary file stays"
