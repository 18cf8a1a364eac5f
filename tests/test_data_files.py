"""Data files: tokens, decoding, validation and reference figures."""

import bz2
import functools
import gzip
import io
import json
import lzma
import math
import re
import tarfile
import time

import numpy as np
from numpy import uint32, int32, uint8
from pytest import approx, mark
import pyzstd

import egg_config
from model import data_files
from model.data_files import DataError, Decoding, load_decoding, open_tokens, open_validation, references, Validation
from commands import TEXT
from coordinators import refused
from recordings import HERE, write_decoding
from tools import train

BASE = egg_config.make(SEQ_LEN=8, VOCAB_SIZE=300)
BYTES = BASE.changed(VOCAB_SIZE=256)


def write_tokens(path, tokens, kind="<u4"):
    np.asarray(tokens, kind).tofile(path)
    return str(path)


# --- tokens -----------------------------------------------------------------------------------------------------------

def test_tokens_are_mapped_and_checked(tmp_path):
    tokens = np.arange(50) % 256
    for cfg, kind in (BASE, "<u4"), (BYTES, "u1"):
        got = open_tokens(cfg, write_tokens(tmp_path / "a", tokens, kind))
        assert isinstance(got, np.memmap) and got.dtype == kind and not got.flags.writeable and (got == tokens).all()
    # as few as a window takes
    assert open_tokens(BASE, write_tokens(tmp_path / "c", range(10))).size == 10


@mark.parametrize("content, words", {
    None: "is missing",
    b"": "is empty",
    bytes(41): "is damaged or plain bytes",
    np.arange(50).astype("<u4").tobytes()[:-1]: "is damaged or plain bytes",
    b"to be, or not to be, that is the question...": "or read its bytes with --preset laptop-bytes -D DETOKENIZE=0",
    np.r_[np.zeros(49), 300].astype("<u4").tobytes(): "holds token 300, but VOCAB_SIZE is 300",
    np.r_[np.zeros(16), 300, np.zeros(33)].astype("<u4").tobytes(): "holds token 300, but VOCAB_SIZE is 300",
    np.r_[1 << 31, np.zeros(60)].astype("<u4").tobytes(): "is damaged",
    bytes(4 * 9): "9 tokens, too few for a window of SEQ_LEN = 8: 10 are needed",
}.items())
def test_bad_token_files(tmp_path, monkeypatch, content, words):
    monkeypatch.setattr(data_files, "BLOCK", 16)
    path = tmp_path / "input.bin"
    if content is not None:
        path.write_bytes(content)
    with refused(f"{path}.*{re.escape(words)}", DataError):
        open_tokens(BASE, str(path))


def test_detokenize_gives_the_bytes_of_the_tokens(tmp_path, monkeypatch):
    monkeypatch.setattr(data_files, "BLOCK", 7)
    decoding, path = tmp_path / "d", tmp_path / "a"
    pieces = [b"a", b"", b"bcd", b"\xff\x00", "\u6625".encode()]
    tokens = np.random.default_rng(1).integers(0, 5, 100)
    cfg = BYTES.changed(DETOKENIZE=1, DECODING_FILE=write_decoding(decoding, pieces))
    got = open_tokens(cfg, write_tokens(path, tokens))
    assert got.dtype == uint8 and got.tobytes() == b"".join(pieces[t] for t in tokens)
    with refused("holds token 5, but .* only has 5", DataError):
        open_tokens(cfg, write_tokens(path, [5] * 100))
    decoding.unlink()
    with refused("is missing, and DETOKENIZE needs it", DataError):
        open_tokens(cfg, path)


def test_tokens_are_not_read_as_bytes(tmp_path):
    """By their bytes, whatever the file is called; other bytes with many zeros are taken."""
    rng = np.random.default_rng(1)
    for most in 256, 8192, 1 << 18:
        path = write_tokens(tmp_path / "mine", rng.integers(0, most, 100))
        for read in functools.partial(open_tokens, BYTES), data_files.read_text:
            with refused(rf"{path}.* holds tokens, or UTF-16 text, not bytes: ", DataError):
                read(path)
    for data in (bytes(64), rng.integers(0, 256, 64, uint8).tobytes(),
                 np.arange(1 << 20, (1 << 20) + 64).astype("<u4").tobytes(), b"", b"ab", b"a\0\0"):
        (tmp_path / "bytes").write_bytes(data)
        assert data_files.read_text(str(tmp_path / "bytes")) == data
    assert open_tokens(BYTES, write_tokens(tmp_path / "bytes", bytearray(64), "u1")).tobytes() == bytes(64)


def packed_together():
    with tarfile.open(fileobj=(made := io.BytesIO()), mode="w") as archive:
        archive.addfile(tarfile.TarInfo("text"), io.BytesIO())
    return made.getvalue()


def tokens_of(kind, most=9000):
    return np.random.default_rng(1).integers(0, most, 999).astype(kind).tobytes()


@mark.parametrize("words, data", [
    *(("tokens, or UTF-16 text", data) for data in (
        tokens_of("<u2", 65), tokens_of("<u2"), tokens_of("<i8"), tokens_of("<i8", 1 << 18), tokens_of(">i8"),
        tokens_of(">u4"), ("the king said " * 9).encode("utf-16-le"))),
    ("UTF-16 text", "\u6625\u7720".encode("utf-16") * 9), ("a zip archive", b"PK\3\4" + bytes(range(99))),
    ("a PDF", b"%PDF-1.7 " * 9), ("a .npy array", b"\x93NUMPY\1\0v" + bytes(range(99))),
    ("tokens of llm.c", np.r_[20240520, 1, 9000, np.zeros(253)].astype("<u4").tobytes()),
    ("gzip", gzip.compress(TEXT)), ("a tar archive", packed_together())])
def test_a_foreign_format_is_refused(tmp_path, words, data):
    """By what is in it, for bytes and for tokens; no size of a vocabulary is advised."""
    path = tmp_path / "data.bin"
    path.write_bytes(data)
    with refused(f"holds {words}.*, not bytes: .*`python egg.py prepare TEXT", DataError):
        open_tokens(BYTES, str(path))
    with refused("is damaged or plain bytes, or has .*, not uint32 tokens: .*`python egg.py prepare TEXT`", DataError):
        open_tokens(BASE.changed(VOCAB_SIZE=262144), str(path))
    if words != "gzip":
        with refused(f"holds {words}", DataError):
            data_files.read_text(str(path))


def test_packed_texts_and_json_lines_are_read(tmp_path):
    lines = "".join(json.dumps({"id": 1, "text": text}) + "\n" for text in ("Caf\u00e9", "two\nlines")).encode()
    for name, data, text in (("a", gzip.compress(TEXT), TEXT), ("b.xz", lzma.compress(TEXT), TEXT),
                             ("c.bz2", bz2.compress(TEXT), TEXT), ("d", pyzstd.compress(TEXT), TEXT),
                             ("e.jsonl", lines.replace(b"\n", b"\r\n \n"), "Caf\u00e9\ntwo\nlines".encode()),
                             ("twice.gz", gzip.compress(bz2.compress(TEXT)), TEXT),
                             ("f.jsonl.gz", gzip.compress(lines), "Caf\u00e9\ntwo\nlines".encode())):
        (tmp_path / name).write_bytes(data)
        assert data_files.read_text(str(tmp_path / name)) == text
    for name, data, words in (("g", gzip.compress(TEXT)[:-9], "no whole gzip file"),
                              ("h.jsonl", lines + b'{"txt": 1}', "line 3 is no JSON object with a text"),
                              ("i.jsonl", b'\n{"text": null}\n' + lines, "line 2 is no JSON object with a text"),
                              ("j.jsonl", lines + b'\n"a"\n' + lines, "line 4 is no JSON object with a text"),
                              ("k.jsonl", b"\n{" + lines, "k.jsonl:2: Expecting property name .*: every line is to be"),
                              ("l.tar.gz", gzip.compress(packed_together()), "a tar archive, not bytes")):
        (tmp_path / name).write_bytes(data)
        with refused(words, DataError):
            data_files.read_text(str(tmp_path / name))


# --- decoding ---------------------------------------------------------------------------------------------------------

def test_decoding_reads_what_was_written(tmp_path):
    decoding = Decoding.read(write_decoding(tmp_path / "d", [b"a", b"", b" the", b"\xf0\x9f", b"\x9a\x80"]))
    assert len(decoding) == 5 and decoding.lengths.tolist() == [1, 0, 4, 2, 2]
    assert decoding.decode([2, 1, 0, 3, 4]) == b" thea\xf0\x9f\x9a\x80" and decoding.decode([]) == b""
    assert data_files.text(decoding, [2, 3, 4, 3, 0]) == " the\U0001f680\ufffda"
    assert data_files.text(decoding, [0, 77]) == "a\ufffd", "a token of the model that no text has"
    assert data_files.text(None, np.array([3, 77])) == "token ids 3 77"


def number(value):
    return value.to_bytes(4, "little")


@mark.parametrize("content", [
    b"\x01\x00", number(0), number(1 << 31) + bytes(100), number(2) + number(1) + b"a",
    number(2) + number(1) + b"a" + number(9) + b"ab", number(1) + number(1) + b"ab",
    b'{\n  "version": "1.0", "model": {}}'
])
def test_damaged_decoding(tmp_path, content):
    path = tmp_path / "decoding.bin"
    path.write_bytes(content)
    with refused(f"{path}.* is damaged", DataError):
        load_decoding(BASE.changed(DECODING_FILE=str(path)))


def test_a_directory_in_place_of_a_decoding(tmp_path):
    with refused(f"{tmp_path} is no file: .* -D DECODING_FILE=", DataError):
        load_decoding(BASE.changed(DECODING_FILE=str(tmp_path)))


def test_a_larger_vocabulary_than_that_of_the_model_is_refused(tmp_path):
    path = write_decoding(tmp_path / "d", [b"x"] * 301)
    with refused("d has 301 tokens, the model 300: give the decoding.bin of its data", DataError):
        load_decoding(BASE.changed(DECODING_FILE=path))
    cfg = BASE.changed(DECODING_FILE=path, VOCAB_SIZE=400, INPUT_FILE=write_tokens(tmp_path / "t", [*range(300), 301]))
    assert len(load_decoding(cfg)) == 301
    with refused("t holds token 301, but .*d only has 301: the files of one", DataError):
        train.open_data(cfg)


def test_a_long_word_is_encoded_in_time_that_grows_with_it():
    shipped, started = Decoding.read(HERE / "decoding.bin"), time.process_time()
    text = "".join(map(chr, np.random.default_rng(4).integers(0x4e00, 0x5fff, 50_000)))
    assert shipped.decode(shipped.encode(text.encode())).decode() == text and time.process_time() - started < 5


def test_the_end_of_a_text_is_one_token():
    pieces = [*(bytes([b]) for b in range(256)), b"<|", b"en", data_files.END]
    assert Decoding(pieces).encode(b"en<|endoftext|>en<|en").tolist() == [257, 258, 257, 256, 257]
    assert Decoding(pieces[:-1]).encode(data_files.END).size == 11, "a vocabulary without it"


def test_missing_decoding_is_a_warning(tmp_path, capsys):
    cfg = BASE.changed(DECODING_FILE=str(tmp_path / "none"), VAL_FILE=write_tokens(tmp_path / "v", range(40)))
    assert load_decoding(cfg) is None
    err = capsys.readouterr().err
    assert err.startswith("egg: ") and err.count("\n") == 1 and "bits per token" in err
    validation = open_validation(cfg, None)
    assert validation.unit == "bits/token"
    assert validation.bits(validation.windows[:, 1:].size * math.log(2)) == approx(1)
    # bytes need none
    assert load_decoding(BYTES.changed(DECODING_FILE="none")).decode(range(256)) == bytes(range(256))


# --- validation and references ----------------------------------------------------------------------------------------

def test_validation_windows_are_whole_and_evenly_spaced(tmp_path):
    path = write_tokens(tmp_path / "v", np.arange(8 * 20 + 1))
    decoding = Decoding([b"x" * (1 + t % 3) for t in range(300)])
    for limit, starts in {0: range(0, 160, 8), 32: (0, 40, 80, 120), 47: (0, 32, 64, 96, 128), 1: (0,)}.items():
        validation = open_validation(BASE.changed(VAL_FILE=path, VALIDATE_TOKENS=limit), decoding)
        assert validation.windows.tolist() == [list(range(s, s + 9)) for s in starts]
        assert validation.n_bytes == decoding.lengths[validation.windows[:, 1:]].sum()
        assert validation.unit == "bits/byte" and validation.bits(math.log(2) * validation.n_bytes) == approx(1)


def test_validation_off_missing_or_wrong(tmp_path):
    path, said = write_tokens(tmp_path / "v", range(40)), []
    assert open_validation(BASE.changed(VAL_FILE=path, VALIDATE_EVERY=0), None) is None
    assert open_validation(BASE.changed(VAL_FILE=path + "x"), None, said.append) is None
    assert len(said) == 1 and "is missing: no validation" in said[0]
    with refused("holds token 39, but .* only has 30: the files of one", DataError):
        open_validation(BASE.changed(VAL_FILE=path), Decoding([b"x"] * 30))


def bits_by_hand(train, vocab, windows, length):
    """float: bits that the tokens of windows cost by contexts of `length` tokens, counted in the training data."""
    text = train.tolist()

    def share(context, token):
        if not context:
            return (text.count(token) + 1) / (len(text) + vocab)
        n = len(context)
        after = [text[i + n] for i in range(len(text) - n) if text[i:i + n] == context]
        shorter, kinds = share(context[1:], token), len(set(after))
        return (after.count(token) + kinds * shorter) / (len(after) + kinds) if after else shorter

    return sum(-math.log2(share(row[max(0, t - length):t], row[t]))
               for row in windows.tolist() for t in range(1, len(row)))


@mark.parametrize("vocab", [7, 70000])        # pair codes of 32 and of 64 bits
def test_references_agree_with_the_plain_formulas(vocab):
    rng = np.random.default_rng(3)
    train = rng.integers(0, 6, 500).astype(uint32) * (vocab // 7)
    windows = rng.integers(0, 7, (6, 9)) * (vocab // 7)
    validation = Validation(windows.astype(int32), 100, "bits/byte")
    want = [48 * math.log2(vocab), *(bits_by_hand(train, vocab, windows, length) for length in (0, 1))]
    got = references(egg_config.Config(VOCAB_SIZE=vocab), train, validation)
    assert [*got] == ["uniform", "unigram", "bigram"]
    assert [*got.values()] == approx([bits / 100 for bits in want])
    if vocab == 7:
        got = data_files.context_tables(train.astype(uint8), validation, (2, 3))
        want = [bits_by_hand(train, 256, windows, length) / 100 for length in (2, 3)]
        assert [*got.values()] == approx(want)


def test_references_of_a_large_file_come_from_parts_of_it(monkeypatch):
    """Counting 64 of 500 tokens, spread over the file, must still find both halves of it."""
    monkeypatch.setattr(data_files, "REFERENCE_TOKENS", 64)
    train = np.repeat(np.array([1, 2], uint32), 250)
    validation = Validation(np.array([[1, 1, 2, 2, 2]] * 4, int32), 16, "bits/byte")
    got = references(egg_config.Config(VOCAB_SIZE=300), train, validation)
    assert got["bigram"] < got["unigram"] < got["uniform"]


def test_shipped_files_belong_together(monkeypatch):
    monkeypatch.chdir(HERE)
    cfg = egg_config.make(VALIDATE_TOKENS=0)
    decoding = load_decoding(cfg)
    train, validation = open_tokens(cfg, cfg.INPUT_FILE), open_validation(cfg, decoding)
    assert len(decoding) == cfg.VOCAB_SIZE and 0.04 < validation.n_bytes / decoding.lengths[train].sum() < 0.06
    assert [*references(cfg, train, validation).values()] == approx([3.65, 2.55, 1.85], abs=0.15)
    assert "the" in data_files.text(decoding, train[:200])
