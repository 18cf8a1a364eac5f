"""Data files, preparation, reference figures and the command line: what they give, and the one line they end with when
it goes wrong."""

import itertools
import math
import os
import shutil
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
import pyzstd

import egg
import egg_config
from model import data_files
from engine import hardware
from model import parameters
from tools import prepare
from kit import CFG, Server

HERE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
SMALL = dict(SEQ_LEN=8, VOCAB_SIZE=300)
PROSE = ("It was the best of times, it was the worst of times;\n"
         "it was the age of wisdom, it was the age of foolishness.\n"
         "Caf\u00e9 na\u00efve \u2014 \u6625\u7720\u4e0d\u89ba\u6681\n\n\tand 1234567890 more ...\n")


def write_tokens(path, tokens, kind="<u4"):
    np.asarray(tokens, kind).tofile(path)
    return str(path)


def write_decoding(path, pieces):
    path.write_bytes(len(pieces).to_bytes(4, "little") + b"".join(len(p).to_bytes(4, "little") + p for p in pieces))
    return str(path)


def one_line(raised):
    """The message of an error, which must be one line that means something."""
    message = str(raised.value)
    assert message and "\n" not in message and "Traceback" not in message
    return message


def run(*args, cwd, env=None, **more):
    """A finished process of the command line in `cwd`."""
    return subprocess.run([sys.executable, os.path.join(HERE, "egg.py"), *map(str, args)], cwd=cwd,
                          capture_output=True, text=True,
                          timeout=60, env={**os.environ, **(env or {})}, **more)


def fails(result, status, *words):
    """A command that ended with `status` and one line with all the words in it."""
    assert result.returncode == status, result
    assert result.stdout == "" and result.stderr.count("\n") == 1 and result.stderr.startswith("egg: "), result
    for word in words:
        assert word in result.stderr


# --- tokens ----------------------------------------------------------------------------------------------------------

def test_tokens_are_mapped_and_checked(tmp_path):
    cfg = egg_config.make(**SMALL)
    tokens = np.arange(50) % 300
    got = data_files.open_tokens(cfg, write_tokens(tmp_path / "a", tokens))
    assert isinstance(got, np.memmap) and got.dtype == np.uint32 and not got.flags.writeable
    assert (got == tokens).all()
    path = write_tokens(tmp_path / "b", tokens % 256, "u1")
    got = data_files.open_tokens(egg_config.make(SEQ_LEN=8, VOCAB_SIZE=256), path)
    assert isinstance(got, np.memmap) and got.dtype == np.uint8 and got.size == 50


@pytest.mark.parametrize("content, words", [
    (None, "is missing"),
    (b"", "is empty"),
    (bytes(41), "cut short"),
    (np.full(50, 300, "<u4").tobytes(), "holds token 300, but VOCAB_SIZE is 300"),
    (np.r_[np.zeros(60), 1 << 31].astype("<u4").tobytes(), "holds token 2147483648"),
    (bytes(4 * 9), "9 tokens, too few for a window of SEQ_LEN = 8: 10 are needed"),
])
def test_bad_token_files(tmp_path, content, words):
    path = tmp_path / "input.bin"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(data_files.DataError) as raised:
        data_files.open_tokens(egg_config.make(**SMALL), str(path))
    assert words in one_line(raised) and str(path) in one_line(raised)


def test_largest_token_is_found_in_any_block(tmp_path, monkeypatch):
    monkeypatch.setattr(data_files, "BLOCK", 16)
    for at in (0, 15, 16, 40, 49):
        tokens = np.zeros(50, int)
        tokens[at] = 300
        with pytest.raises(data_files.DataError, match="holds token 300"):
            data_files.open_tokens(egg_config.make(**SMALL), write_tokens(tmp_path / "a", tokens))


def test_ten_tokens_are_enough_for_a_window_of_eight(tmp_path):
    assert data_files.open_tokens(egg_config.make(**SMALL), write_tokens(tmp_path / "a", range(10))).size == 10


def test_detokenize_gives_the_bytes_of_the_tokens(tmp_path, monkeypatch):
    monkeypatch.setattr(data_files, "BLOCK", 7)
    pieces = [b"a", b"", b"bcd", b"\xff\x00", "\u6625".encode()]
    tokens = np.random.default_rng(1).integers(0, 5, 100)
    cfg = egg_config.make(SEQ_LEN=8, VOCAB_SIZE=256, DETOKENIZE=1, DECODING_FILE=write_decoding(tmp_path / "d", pieces))
    got = data_files.open_tokens(cfg, write_tokens(tmp_path / "a", tokens))
    assert got.dtype == np.uint8 and got.tobytes() == b"".join(pieces[t] for t in tokens)
    with pytest.raises(data_files.DataError, match="holds token 5, but .* only has 5"):
        data_files.open_tokens(cfg, write_tokens(tmp_path / "a", [5] * 100))
    os.remove(cfg.DECODING_FILE)
    with pytest.raises(data_files.DataError, match="is missing, and DETOKENIZE needs it") as raised:
        data_files.open_tokens(cfg, str(tmp_path / "a"))
    one_line(raised)


# --- decoding --------------------------------------------------------------------------------------------------------

def test_decoding_reads_what_was_written(tmp_path):
    pieces = [b"a", b"", b" the", b"\xf0\x9f", b"\x9a\x80"]
    decoding = data_files.Decoding.read(write_decoding(tmp_path / "d", pieces))
    assert len(decoding) == 5 and decoding.lengths.tolist() == [1, 0, 4, 2, 2]
    assert decoding.decode([2, 1, 0, 3, 4]) == b" thea\xf0\x9f\x9a\x80"
    assert decoding.expand(np.array([2, 1, 0, 3, 4])).tobytes() == b" thea\xf0\x9f\x9a\x80"
    assert decoding.expand(np.array([], int)).size == 0
    assert data_files.text(decoding, [2, 3, 4, 3, 0]) == " the\U0001f680\ufffda"
    assert data_files.text(decoding, [0, 77]) == "a\ufffd", "a token of the model that no text has"
    assert data_files.text(None, np.array([3, 77])) == "token ids 3 77"


@pytest.mark.parametrize("content", [
    b"", b"\x01\x00", (0).to_bytes(4, "little"), (1 << 31).to_bytes(4, "little") + bytes(100),
    (2).to_bytes(4, "little") + (1).to_bytes(4, "little") + b"a",
    (2).to_bytes(4, "little") + (1).to_bytes(4, "little") + b"a" + (9).to_bytes(4, "little") + b"ab",
    (1).to_bytes(4, "little") + (1 << 30).to_bytes(4, "little") + bytes(100),
    (1).to_bytes(4, "little") + (1).to_bytes(4, "little") + b"ab",
])
def test_damaged_decoding(tmp_path, content):
    path = tmp_path / "decoding.bin"
    path.write_bytes(content)
    with pytest.raises(data_files.DataError, match="is damaged") as raised:
        data_files.load_decoding(egg_config.make(**SMALL, DECODING_FILE=str(path)))
    assert str(path) in one_line(raised)


def test_missing_decoding_is_a_warning(tmp_path, capsys):
    held_out = write_tokens(tmp_path / "v", range(40))
    cfg = egg_config.make(**SMALL, DECODING_FILE=str(tmp_path / "none"), VAL_FILE=held_out)
    said = []
    assert data_files.load_decoding(cfg, said.append) is None
    assert data_files.load_decoding(cfg) is None
    assert len(said) == 1 and capsys.readouterr().err == f"egg: {said[0]}\n" and "bits per token" in said[0]
    validation = data_files.open_validation(cfg, None)
    assert validation.unit == "bits/token"
    assert validation.bits(validation.windows[:, 1:].size * math.log(2)) == pytest.approx(1)


def test_bytes_need_no_decoding():
    decoding = data_files.load_decoding(egg_config.make(VOCAB_SIZE=256, DECODING_FILE="none"))
    assert decoding.decode(range(256)) == bytes(range(256))


# --- validation and references ---------------------------------------------------------------------------------------

def test_validation_windows_are_whole_and_evenly_spaced(tmp_path):
    path = write_tokens(tmp_path / "v", np.arange(8 * 20 + 1))
    pieces = [b"x" * (1 + t % 3) for t in range(300)]
    decoding = data_files.Decoding(pieces)
    for limit, starts in ((0, range(0, 160, 8)), (10 ** 9, range(0, 160, 8)), (32, (0, 40, 80, 120)),
                          (47, (0, 32, 64, 96, 128)), (1, (0,))):
        cfg = egg_config.make(**SMALL, VAL_FILE=path, VALIDATE_TOKENS=limit)
        validation = data_files.open_validation(cfg, decoding)
        assert validation.windows.tolist() == [list(range(s, s + 9)) for s in starts]
        assert validation.n_bytes == sum(len(pieces[t]) for s in starts for t in range(s + 1, s + 9))
        assert validation.unit == "bits/byte" and validation.bits(math.log(2) * validation.n_bytes) == pytest.approx(1)


def test_validation_off_missing_or_wrong(tmp_path):
    path, said = write_tokens(tmp_path / "v", range(40)), []
    assert data_files.open_validation(egg_config.make(**SMALL, VAL_FILE=path, VALIDATE_EVERY=0), None) is None
    assert data_files.open_validation(egg_config.make(**SMALL, VAL_FILE=path + "x"), None, said.append) is None
    assert len(said) == 1 and "is missing: no validation" in said[0]
    with pytest.raises(data_files.DataError, match="holds token 39, but .* only has 30: the files of one"):
        data_files.open_validation(egg_config.make(**SMALL, VAL_FILE=path), data_files.Decoding([b"x"] * 30))


@pytest.mark.parametrize("vocab", [7, 70000])        # pair codes of 32 and of 64 bits
def test_references_agree_with_the_plain_formulas(vocab):
    rng = np.random.default_rng(3)
    cfg = egg_config.Config(VOCAB_SIZE=vocab)
    train = rng.integers(0, 6, 500).astype(np.uint32) * (vocab // 7)
    windows = rng.integers(0, 7, (6, 9)) * (vocab // 7)
    validation = data_files.Validation(windows.astype(np.int32), 100, "bits/byte")
    pairs = list(itertools.pairwise(train.tolist()))
    p_one, p_two = 0.0, 0.0
    for row in windows.tolist():
        for h, w in itertools.pairwise(row):
            one = ((train == w).sum() + 1) / (500 + vocab)
            after = [b for a, b in pairs if a == h]
            two = (after.count(w) + len(set(after)) * one) / (len(after) + len(set(after))) if after else one
            p_one, p_two = p_one - math.log2(one), p_two - math.log2(two)
    got = data_files.references(cfg, train, validation)
    assert got == {"uniform": pytest.approx(48 * math.log2(vocab) / 100), "unigram": pytest.approx(p_one / 100),
                   "bigram": pytest.approx(p_two / 100)}


def test_references_of_a_large_file_come_from_parts_of_it(monkeypatch):
    """Counting 64 of 500 tokens, spread over the file, must still find both halves of it."""
    monkeypatch.setattr(data_files, "REFERENCE_TOKENS", 64)
    train = np.repeat(np.array([1, 2], np.uint32), 250)
    validation = data_files.Validation(np.tile(np.array([[1, 1, 2, 2, 2]], np.int32), (4, 1)), 16, "bits/byte")
    got = data_files.references(egg_config.Config(VOCAB_SIZE=300), train, validation)
    assert got["bigram"] < got["unigram"] < got["uniform"]


def test_shipped_files_belong_together(monkeypatch):
    monkeypatch.chdir(HERE)
    cfg = egg_config.make(VALIDATE_TOKENS=0)
    decoding = data_files.load_decoding(cfg)
    assert len(decoding) == cfg.VOCAB_SIZE and decoding.decode(range(256)) == bytes(range(256))
    train, validation = data_files.open_tokens(cfg, cfg.INPUT_FILE), data_files.open_validation(cfg, decoding)
    assert 0.04 < validation.n_bytes / decoding.lengths[train].sum() < 0.06
    figures = data_files.references(cfg, train, validation)
    assert 3.5 < figures["uniform"] < 3.8 and 2.4 < figures["unigram"] < 2.7 and 1.7 < figures["bigram"] < 2.0
    assert "the" in data_files.text(decoding, train[:200])


# --- preparing a text ------------------------------------------------------------------------------------------------

def read_back(directory, vocab):
    """(training text, held-out text) as the three files say."""
    kind = "u1" if vocab == 256 else "<u4"
    cfg = egg_config.make(VOCAB_SIZE=vocab, DECODING_FILE=str(directory / "decoding.bin"))
    decoding = data_files.load_decoding(cfg)
    return [decoding.expand(np.fromfile(directory / name, kind)).tobytes() for name in ("input.bin", "val.bin")]


def test_split_gives_back_all_of_the_text():
    for data in (PROSE.encode() * 3000, b"x" * 100000, b"a\n" * 30000, PROSE.encode() * 5, (b"y" * 999 + b"\n") * 1000):
        train, held_out = prepare.split(data)
        assert sum(map(len, train)) + sum(map(len, held_out)) == len(data) and len(train) == len(held_out) + 1
        assert b"".join(a + b for a, b in itertools.zip_longest(train, held_out, fillvalue=b"")) == data
        assert 0.04 < sum(map(len, held_out)) / len(data) < 0.11
        if len(data) > 50000 and data.count(b"\n") * 200 > len(data):
            assert all(part.endswith(b"\n") for part in train + held_out), "cuts are at line ends"
    assert len(prepare.split(PROSE.encode() * 30000)[1]) == prepare.VAL_BLOCKS


@pytest.mark.parametrize("vocab", [256, 257, 400])
def test_any_bytes_come_back(tmp_path, vocab):
    rng = np.random.default_rng(5)
    noise = rng.integers(0, 256, 30000, dtype=np.uint8).tobytes()
    data = (PROSE.encode() * 100 + noise + b"\x00" * 1000 + "\u00e9\u2028\u0085\u00a0".encode() * 100
            + b"\r\n \r\n" * 500 + bytes(range(256)) * 20)
    (tmp_path / "text").write_bytes(data)
    said = []
    assert prepare.prepare([str(tmp_path / "text")], vocab, None, str(tmp_path / "out"), said.append) == vocab
    train, held_out = prepare.split(data)
    assert read_back(tmp_path / "out", vocab) == [b"".join(train), b"".join(held_out)]
    assert any("held out" in line for line in said)
    assert sorted(os.listdir(tmp_path / "out")) == sorted(["input.bin", "val.bin"] + ["decoding.bin"] * (vocab > 256))
    if vocab > 256:
        decoding = data_files.Decoding.read(str(tmp_path / "out" / "decoding.bin"))
        assert decoding.decode(range(256)) == bytes(range(256))
        assert len(set(map(bytes, map(decoding.expand, np.arange(vocab)[:, None])))) == vocab


def test_several_texts_zst_and_held_out_file(tmp_path):
    parts = [PROSE.encode() * 200, b"second file, no line end", PROSE.upper().encode() * 50]
    (tmp_path / "a").write_bytes(parts[0])
    (tmp_path / "b").write_bytes(parts[1])
    (tmp_path / "c.zst").write_bytes(pyzstd.compress(parts[2]))
    (tmp_path / "v").write_bytes(b"held out\xff")
    texts = [str(tmp_path / n) for n in ("a", "b", "c.zst")]
    prepare.prepare(texts, 300, str(tmp_path / "v"), str(tmp_path), lambda line: None)
    assert read_back(tmp_path, 300) == [b"".join(parts), b"held out\xff"]


def test_the_vocabulary_is_learned_from_the_training_part_alone(tmp_path):
    (tmp_path / "t").write_bytes(PROSE.encode() * 50)
    (tmp_path / "v").write_bytes(b"zyzzyva " * 5000)
    prepare.prepare([str(tmp_path / "t")], 320, str(tmp_path / "v"), str(tmp_path), lambda line: None)
    decoding = data_files.Decoding.read(str(tmp_path / "decoding.bin"))
    assert not any(b"zy" in decoding.decode([t]) for t in range(320)) and decoding.lengths.max() > 2


def test_a_text_longer_than_the_pieces_of_the_encoder(tmp_path, monkeypatch):
    data = PROSE.encode() * 100 + b"no line end" * 500
    (tmp_path / "t").write_bytes(data)
    monkeypatch.setattr(prepare, "ENCODE_BYTES", 100)
    prepare.prepare([str(tmp_path / "t")], 400, str(tmp_path / "t"), str(tmp_path), lambda line: None)
    assert read_back(tmp_path, 400) == [data, data]


def test_fewer_tokens_than_asked_for(tmp_path):
    (tmp_path / "t").write_bytes(b"abababab\n" * 200)
    said = []
    got = prepare.prepare([str(tmp_path / "t")], 5000, None, str(tmp_path), said.append)
    assert 256 < got < 300 and any(f"{5000 - got:,} tokens fewer" in line for line in said)
    assert len(data_files.Decoding.read(str(tmp_path / "decoding.bin"))) == got


def test_bad_texts_leave_the_old_files(tmp_path, monkeypatch):
    old = {"input.bin": b"old", "val.bin": b"older", "decoding.bin": b"oldest"}
    for name, content in {**old, "empty": b"", "short": b"ab", "bad.zst": b"no zstd",
                          "cut.zst": pyzstd.compress(b"a" * 999)[:-2], "good": PROSE.encode() * 100}.items():
        (tmp_path / name).write_bytes(content)
    monkeypatch.chdir(tmp_path)
    for texts, words in ((["none"], "No such file"), (["."], "Is a directory"), (["empty"], "no text"),
                         (["short"], "too short"), (["bad.zst"], "no whole zstd file"),
                         (["cut.zst"], "no whole zstd file")):
        with pytest.raises(data_files.DataError, match=words) as raised:
            prepare.prepare(texts, 300, say=lambda line: None)
        assert texts[0] in one_line(raised) or "too short" in one_line(raised)
    with pytest.raises(data_files.DataError, match="empty: no text there, nothing to hold out"):
        prepare.prepare(["good"], 300, "empty", say=lambda line: None)
    with pytest.raises(data_files.DataError, match="good: .*: nothing was changed there") as raised:
        prepare.prepare(["good"], 256, out="good", say=lambda line: None)
    one_line(raised)
    (tmp_path / "val.bin").unlink()
    (tmp_path / "val.bin").mkdir()
    monkeypatch.setattr(os, "fsync", lambda handle: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    with pytest.raises(data_files.DataError, match="No space left on device"):
        prepare.prepare(["good"], 256, say=lambda line: None)
    assert (tmp_path / "input.bin").read_bytes() == b"old" and (tmp_path / "decoding.bin").read_bytes() == b"oldest"
    assert not [name for name in os.listdir(tmp_path) if name.startswith("input.bin.")], "no temporary file stays"


def test_without_the_tokenizers_library(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    (tmp_path / "t").write_bytes(PROSE.encode() * 100)
    with pytest.raises(data_files.DataError, match="pip install -r requirements/prepare.txt") as raised:
        prepare.prepare([str(tmp_path / "t")], 300, out=str(tmp_path), say=lambda line: None)
    one_line(raised)
    assert os.path.exists(os.path.join(HERE, "requirements/prepare.txt"))
    assert prepare.prepare([str(tmp_path / "t")], 256, out=str(tmp_path), say=lambda line: None) == 256


# --- engines ---------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("capabilities, numba_cuda, got, words", [
    ([], True, ["cpu"], "no NVIDIA GPU is visible"),
    ([(7, 5)], True, ["cpu"], "compute capability 7.5, 8.0 is the least"),
    ([(9, 0)], False, ["cpu"], "pip install -r requirements/cuda12.txt"),
    ([(7, 5), (8, 0), (9, 0)], True, ["cuda:1", "cuda:2"], None),
])
def test_choice_of_device(monkeypatch, capsys, capabilities, numba_cuda, got, words):
    monkeypatch.setattr(hardware, "driver", lambda: (12, capabilities))
    monkeypatch.setattr(hardware.importlib.util, "find_spec", lambda name: numba_cuda or None)
    assert hardware.devices(egg_config.make(DEVICE="auto")) == got
    err = capsys.readouterr().err
    if words and capabilities:                       # a GPU that is not used is worth a line
        assert words in err and err.count("\n") == 1
    else:
        assert err == ""
    assert hardware.devices(egg_config.make(DEVICE="cpu")) == ["cpu"]
    cfg = egg_config.make(DEVICE="cuda")
    if words:
        with pytest.raises(hardware.EngineError, match=words) as raised:
            hardware.devices(cfg)
        one_line(raised)
    else:
        assert hardware.devices(cfg) == got
        assert hardware.one_device(cfg) == "cuda:1" and hardware.one_device(cfg, 2) == "cuda:2"
        with pytest.raises(hardware.EngineError, match="GPU 0 cannot be used: there is cuda:1, cuda:2"):
            hardware.one_device(cfg, 0)


# --- the command line ------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("args, words", [
    ("", ("COMMAND", "--help")),
    ("fly", ("no command 'fly': there is train, coordinator, ", "egg.py --help")),
    ("tran", ("no command 'tran'; did you mean train?",)),
    ("evaluate", ("no command 'evaluate'; did you mean eval?",)),
    ("coordinator --host 0.0.0.0", ("--host 0.0.0.0 without a secret",)),
    ("coordinator --tls-cert cert", ("needs both --tls-cert and --tls-key",)),
    ("coordinator --island a", ("an island needs --save-dir",)),
    ("worker localhost --tls-cert cert", ("needs --tls-ca",)),
    ("worker localhost --secret-file none", ("--secret-file none: No such file",)),
    ("train --threads 0", ("--threads", "1 to")),
    ("train --threads many", ("--threads", "'many'")),
    ("train --minutes 0", ("--minutes",)),
    ("train --minutes nan", ("--minutes",)),
    ("train --steps -3", ("--steps", "1 or more")),
    ("coordinator --port 65536", ("--port", "0 to 65535")),
    ("worker", ("HOST",)),
    ("worker here --gpu -1", ("--gpu",)),
    ("arch --preset desktop", ("--preset", "laptop")),
    ("arch -D HIDEN_DIM=64", ("HIDEN_DIM", "did you mean HIDDEN_DIM?")),
    ("arch -D HIDDEN_DIM", ("write -D NAME=VALUE",)),
    ("arch -D HIDDEN_DIM=65", ("HIDDEN_DIM = 65", "multiple")),
    ("prepare", ("TEXT",)),
    ("prepare x --vocab-size 255", ("--vocab-size", "256 to 262144")),
])
def test_wrong_use_is_one_line_and_status_2(args, words, capsys):
    try:
        status = egg.main(args.split())
    except SystemExit as ended:
        status = ended.code
    out, err = capsys.readouterr()
    assert status == 2 and out == "" and err.startswith("egg: ") and err.count("\n") == 1
    assert all(word in err for word in words), err


@pytest.mark.parametrize("command", ["coordinator", "worker", "train", "arch", "prepare", "bench"])
def test_help_of_every_command(command, capsys):
    with pytest.raises(SystemExit) as ended:
        egg.main([command, "--help"])
    out = capsys.readouterr().out
    assert ended.value.code == 0 and "-D NAME=VALUE" in out and "--preset" in out and f"egg.py {command}" in out


@pytest.mark.parametrize("ntt", [0, 3])
def test_arch_adds_up(ntt, capsys):
    defines = "N_LAYERS=2", "HIDDEN_DIM=128", "VOCAB_SIZE=1000", f"NTT_MODE={ntt}"
    assert egg.main(["arch", *(f"-D{define}" for define in defines)]) == 0
    out = capsys.readouterr().out
    cfg = egg_config.make(N_LAYERS=2, HIDDEN_DIM=128, VOCAB_SIZE=1000, NTT_MODE=ntt)
    lines, names = [line.split() for line in out.splitlines()], {p.name for p in parameters.TABLE}
    totals = {line[0]: int(line[-3].replace(",", "")) for line in lines if line and line[0] in names}
    assert list(totals) == [p.name for p in parameters.TABLE if ntt or p.needs != "NTT_MODE"]
    assert sum(totals.values()) == parameters.n_weights(cfg)
    assert totals["embedding"] == 128000 and totals["w_up"] == 2 * 128 * 512
    assert f"{parameters.n_weights(cfg):,}" in out and f"{parameters.products_per_token(cfg):,} multiply-adds" in out


def test_command_line_in_processes(tmp_path):
    fails(run("hatch", cwd=tmp_path), 2, "hatch")
    fails(run("arch", cwd=tmp_path, env={"EGG_HEAD_DIM": "48"}), 2, "HEAD_DIM = 48")
    fails(run("prepare", "no such text", cwd=tmp_path), 1, "no such text: No such file")
    fails(run("worker", "localhost", "-D", "DEVICE=cuda", "--gpu", "999", cwd=tmp_path), 1)
    fails(run("train", "-D", "VOCAB_SIZE=256", cwd=tmp_path), 1, "input.bin is missing", "egg.py prepare TEXT")
    (tmp_path / "input.bin").write_bytes(bytes(64))
    short = run("worker", "localhost", "-D", "VOCAB_SIZE=256", cwd=tmp_path)
    fails(short, 1, "input.bin holds 64 tokens, too few", "66 are needed")
    (tmp_path / "my text.txt").write_text(PROSE * 200)
    result = run("prepare", "my text.txt", "--vocab-size", "320", "--out", "my data", cwd=tmp_path)
    assert result.returncode == 0 and result.stderr == ""
    assert sorted(os.listdir(tmp_path / "my data")) == ["decoding.bin", "input.bin", "val.bin"]
    result = run("worker", "localhost", "--list-devices", "-D", "DEVICE=cpu", cwd=tmp_path)
    assert (result.returncode, result.stdout, result.stderr) == (0, "cpu\n", "")


def test_a_reader_that_goes_away(tmp_path):
    """`egg.py arch | head -0` must not end in a traceback."""
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, os.path.join(HERE, "egg.py"), "arch"]
    result = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, text=True, timeout=60)
    os.close(write)
    assert result.stderr == "" and result.returncode == 1


def test_run_workers_passes_on_a_wrong_option():
    script = os.path.join(HERE, "run-workers.sh")
    command = [script, "localhost", "--port", "none"]
    result = subprocess.run(command, cwd="/", capture_output=True, text=True, timeout=60)
    assert result.returncode == 2 and result.stdout == "" and result.stderr.count("\n") == 1
    assert "'none' is not a whole number from 0 to 65535" in result.stderr
    result = subprocess.run([script, "--help"], cwd="/", capture_output=True, text=True, timeout=60)
    assert result.returncode == 0 and result.stdout.startswith("usage: ./run-workers.sh [HOST]")


FAKE_WORKER = """
import os, sys, time
if "--list-devices" in sys.argv:
    sys.exit(print("cuda:0\\ncuda:2"))
with open("log", "a") as log:
    log.write(f"{os.getpid()} {' '.join(sys.argv[1:])}\\n")
if sys.argv[-1] == "0" and open("log").read().count("--gpu 0") == 1:
    sys.exit(1)
time.sleep(60)
"""


@pytest.fixture
def cluster_of_two(tmp_path):
    """run-workers.sh in a process group of its own, with two GPUs, once the worker on the first has died and was
    started again: (process, log of the workers that were started)."""
    (tmp_path / "egg.py").write_text(FAKE_WORKER)
    shutil.copy(os.path.join(HERE, "run-workers.sh"), tmp_path)
    command = [tmp_path / "run-workers.sh", "far", "--port", "7"]
    process = subprocess.Popen(command, cwd="/", stderr=subprocess.PIPE, text=True, start_new_session=True)
    log, until = tmp_path / "log", time.monotonic() + 20
    while time.monotonic() < until and (not log.exists() or len(log.read_text().splitlines()) < 3):
        time.sleep(0.05)
    yield process, log
    process.stderr.close()


def test_run_workers_keeps_one_on_every_gpu_and_stops_all(cluster_of_two):
    """TERM leaves no process behind."""
    process, log = cluster_of_two
    process.terminate()
    assert process.wait(20) == 143
    assert "the worker on GPU 0 ended with status 1, starting it again in 1 s" in process.stderr.read()
    started = [line.split(" ", 1) for line in log.read_text().splitlines()]
    assert sorted(line for _, line in started) == 2 * ["worker far --port 7 --gpu 0"] + ["worker far --port 7 --gpu 2"]
    assert not any(os.path.exists(f"/proc/{pid}") for pid, _ in started)


def test_ctrl_c_on_run_workers_leaves_no_worker(cluster_of_two):
    """A terminal sends SIGINT to the whole process group."""
    process, log = cluster_of_two
    os.killpg(process.pid, signal.SIGINT)
    assert process.wait(20) == 130
    left = [pid for pid in (line.split()[0] for line in log.read_text().splitlines()) if os.path.exists(f"/proc/{pid}")]
    for pid in left:
        os.kill(int(pid), signal.SIGKILL)
    assert not left


def test_run_workers_gives_up_on_a_worker_that_is_refused(tmp_path):
    """For another configuration; a real worker and coordinator."""
    shutil.copy(os.path.join(HERE, "run-workers.sh"), tmp_path)
    (tmp_path / "egg.py").write_text(f"import runpy, sys; sys.path.insert(0, {str(HERE)!r})\n"
                                     f"runpy.run_path({os.path.join(HERE, 'egg.py')!r}, run_name='__main__')\n")
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    python = tmp_path / ".venv" / "bin" / "python"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    (tmp_path / "input.bin").write_bytes(bytes(range(256)) * 9)
    with Server(tmp_path, CFG) as server:
        command = [tmp_path / "run-workers.sh", "127.0.0.1", "--port", str(server.port)]
        done = subprocess.run([*command, "-D", "VOCAB_SIZE=256", "-D", "DEVICE=cpu"], cwd=tmp_path, capture_output=True,
                              text=True, timeout=60)
    assert done.returncode == 2 and "refuses this worker: " in done.stderr and "again" not in done.stderr
