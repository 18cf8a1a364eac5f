"""Data files (SPEC 10): tokens, the bytes of a token, held-out windows, reference figures. `tools.prepare` makes the
files. One that is missing or damaged raises DataError, a line that says what to do."""

import filecmp
import heapq
import importlib
import json
import math
import os
import re
import sys
from collections import namedtuple

import numpy as np

from egg_config import EggError, UsageError, explained, sha256_of

MARK = "decoding.sha256"     # beside tokens: that of the decoding.bin with which they were made
END = b"<|endoftext|>"        # the bytes of the token for the end of a text, where a vocabulary has one
LONGEST_TOKEN = 1 << 16      # bytes; a longer token in decoding.bin is an error
MOST_WORDS = 1 << 20         # whose tokens are remembered
BLOCK = 1 << 22              # tokens that are checked at once, so that a file may be larger than the memory
REFERENCE_TOKENS = 1 << 24   # most training tokens that the references count, in runs spread evenly over the file

# The words that the BPE splits a text into: a word with the space before it, digits, punctuation, space. The text is
# its bytes as characters of Latin-1. Bytes of 128 and above count as letters, so that no UTF-8 character is split here.
WORDS = (r" ?[A-Za-z\x80-\xff]+| ?[0-9]+| ?[^A-Za-z0-9\x80-\xff \t\n\r\x0b\x0c]+"
         r"|[ \t\n\r\x0b\x0c]+(?![^ \t\n\r\x0b\x0c])|[ \t\n\r\x0b\x0c]+")


# {first bytes: the module that unpacks such a file}, {first bytes: what other files are}
PACKED = {b"\x1f\x8b": "gzip", b"\xfd7zXZ": "lzma", b"\x28\xb5\x2f\xfd": "pyzstd", b"BZh91AY&SY": "bz2"}
FOREIGN = {b"PK\3\4": "a zip archive", b"7z\xbc\xaf": "a 7z archive", b"Rar!": "a RAR archive", b"%PDF": "a PDF",
           b"PAR1": "a parquet file", b"\x93NUMPY": "a .npy array", b"\xff\xfe": "UTF-16 text",
           b"\xfe\xff": "UTF-16 text", (20240520).to_bytes(4, "little"): "tokens of llm.c",
           (20240801).to_bytes(4, "little"): "tokens of llm.c"}


class DataError(EggError):
    """About a data file."""


class UnusableData(DataError, UsageError):
    """Data with which no run can begin."""


# --- tokens ----------------------------------------------------------------------------------------------------------

def open_tokens(cfg, path):
    """The tokens of a file: 1-D uint32 (uint8 where VOCAB_SIZE is 256), memory-mapped, read-only, all below VOCAB_SIZE.
    With DETOKENIZE the file holds tokens of decoding.bin; the result is their bytes (uint8, in memory). Raises
    DataError for a file that is missing, empty, cut short, out of range, too short for one window, or of tokens where
    bytes are wanted."""
    size = _size(path)
    if size == 0:
        raise DataError(f"{path} is empty: make it again with `python egg.py prepare TEXT`")
    wide, mark = cfg.VOCAB_SIZE != 256 or cfg.DETOKENIZE, os.path.join(os.path.dirname(path), MARK)
    if wide and os.path.exists(mark) and os.path.exists(cfg.DECODING_FILE):
        with explained(DataError, mark), open(mark) as file:
            if file.read(64) != _digest(cfg.DECODING_FILE):
                raise DataError(f"{path} was made with another vocabulary than {cfg.DECODING_FILE}: give the three "
                                "files of one `python egg.py prepare`, -D INPUT_FILE=... -D VAL_FILE=... "
                                "-D DECODING_FILE=...")
    with explained(DataError, path):
        tokens = np.memmap(path, "u1", "r")
    if not wide:
        _need_bytes(tokens, path, "make bytes of a text with `python egg.py prepare TEXT --vocab-size 256`, or begin a "
                    "run with DETOKENIZE=1, which reads the bytes of tokens")
    elif size % 4 or not _are_tokens(tokens):
        raise DataError(f"{path} is damaged or plain bytes, or has numbers of another size, not uint32 tokens: make "
                        "tokens of a text with `python egg.py prepare TEXT`, or read its bytes with --preset "
                        "laptop-bytes -D DETOKENIZE=0")
    else:
        tokens = tokens.view("<u4")
    if cfg.DETOKENIZE:
        if not os.path.exists(cfg.DECODING_FILE):
            raise DataError(f"{cfg.DECODING_FILE} is missing, and DETOKENIZE needs it to turn the tokens of {path} "
                            "into bytes: make both with `python egg.py prepare TEXT --vocab-size N`, or set "
                            "DETOKENIZE=0 for plain bytes")
        decoding = Decoding.read(cfg.DECODING_FILE)
        need_decodable(tokens, path, decoding, cfg.DECODING_FILE)
        tokens = np.concatenate([decoding.expand(tokens[at:at + BLOCK]) for at in range(0, tokens.size, BLOCK)])
    elif wide and (largest := _largest(tokens)) >= cfg.VOCAB_SIZE:
        raise DataError(f"{path} holds token {largest}, but VOCAB_SIZE is {cfg.VOCAB_SIZE}: set VOCAB_SIZE to that of "
                        "the file (-D VOCAB_SIZE=N), or make the file again with "
                        "`python egg.py prepare TEXT --vocab-size N`")
    if tokens.size < cfg.SEQ_LEN + 2:
        raise DataError(f"{path} holds {tokens.size} tokens, too few for a window of SEQ_LEN = {cfg.SEQ_LEN}: "
                        f"{cfg.SEQ_LEN + 2} are needed; prepare a longer text or lower SEQ_LEN")
    return tokens


def _size(path):
    with explained(DataError, path):
        if os.path.isfile(path):
            return os.path.getsize(path)
    where = "" if os.path.isabs(path) else f" in {os.getcwd()}"
    raise DataError(f"{path} is {'no file' if os.path.exists(path) else 'missing'}{where}: start in its directory, "
                    "name it with -D INPUT_FILE=..., -D VAL_FILE=... or -D DECODING_FILE=..., or make it with "
                    "`python egg.py prepare TEXT`")


def _digest(path):
    """SHA-256 (hex) of a file. Raises DataError where there is none."""
    _size(path)
    return sha256_of(path)


def _are_tokens(data):
    """Whether data (uint8) can be uint32 tokens, which are below 2^18; if every second is 0, they are int64. The first
    BLOCK shows it."""
    tokens = data[:BLOCK // 4 * 4].view("<u4")
    return (tokens < 1 << 18).all() and (tokens.size < 16 or tokens[1::2].any() or not tokens.any())


def _need_bytes(data, path, advice):
    """Raises DataError for data (uint8) that are something else than a text or other bytes to learn."""
    head, start = data[:512].tobytes(), data[:min(BLOCK, data.size) // 4 * 4]
    kind = next((name for first, name in {**PACKED, **FOREIGN}.items() if head.startswith(first)), None)
    if head[257:262] == b"ustar":
        kind = "a tar archive"
    elif not kind and start.any():
        control = np.isin(start, [*range(9), 11, 12, *range(14, 32)])   # rare in a text, usual for a high byte
        if (start.view("<u4") < 1 << 18).all() or (start.view(">u4") < 1 << 18).all() or (
                start.size >= 64 and control[1::2].mean() > control[::2].mean() + 0.3):
            kind = "tokens, or UTF-16 text"
    if kind:
        raise DataError(f"{path} holds {kind}, not bytes: {advice}")


def _largest(tokens):
    return max(int(tokens[at:at + BLOCK].max()) for at in range(0, tokens.size, BLOCK))


def need_decodable(tokens, path, decoding, decoding_file):
    """Raises DataError for tokens that a Decoding does not have."""
    if (largest := _largest(tokens)) >= len(decoding):
        raise DataError(f"{path} holds token {largest}, but {decoding_file} only has {len(decoding)}: the files of one "
                        "`python egg.py prepare` belong together")


def read_text(path, field="text"):
    """bytes of a file, one that is packed unpacked, of JSON lines (.jsonl) that field. Raises DataError, also for a
    file of another format."""
    with explained(DataError, path, "give the path of a text file"), open(path, "rb") as file:
        data = file.read()
    name = "pyzstd" if path.endswith(".zst") else None
    while name := next((name for first, name in PACKED.items() if data.startswith(first)), name):
        try:
            data, name = importlib.import_module(name).decompress(data), None          # it may be packed twice
        except Exception as error:                       # each library has its own
            raise DataError(f"{path}: no whole {name.removeprefix('py')} file ({' '.join(str(error).split())}): fetch "
                            "or pack it again") from None
    if ".jsonl" in os.path.basename(path):
        texts = []
        for number, row in json_lines(path, data):
            if not (isinstance(row, dict) and isinstance(row.get(field), str)):
                raise DataError(f"{path}: line {number} is no JSON object with a text in its field \"{field}\": "
                                "--field NAME names another")
            texts.append(row[field])
        data = "\n".join(texts).encode("utf-8", "replace")
    _need_bytes(np.frombuffer(data, np.uint8), path, "give the text itself")
    return data


def json_lines(path, data, kind=DataError):
    """Yields (number of the line, value) of JSON lines (bytes), without empty ones. Raises a `kind` of EggError."""
    for number, line in enumerate(data.splitlines(), 1):
        try:
            if line.strip():
                yield number, json.loads(line)
        except (ValueError, RecursionError) as error:
            raise kind(f"{path}:{number}: {getattr(error, 'msg', error)}: every line is to be a JSON object") from None


# --- what a token stands for -----------------------------------------------------------------------------------------

class Decoding:
    """The bytes of every token. lengths: int64 [tokens], in bytes; len() is the number of tokens."""

    def __init__(self, pieces):
        self.lengths = np.array([len(p) for p in pieces], np.int64)
        self._first = np.cumsum(self.lengths) - self.lengths
        self._pieces, self._bytes = pieces, np.frombuffer(b"".join(pieces), np.uint8)
        self._ids = None                 # bytes -> token, once something is encoded
        self._words = {}                 # word -> its tokens

    def __len__(self):
        return self.lengths.size

    def __contains__(self, piece):
        return piece in self._pieces

    @classmethod
    def read(cls, path):
        """From a decoding.bin. Raises DataError for a file that is missing, cut short or damaged."""
        _size(path)
        with explained(DataError, path), open(path, "rb") as file:
            data = file.read()

        def need(ok, message):
            if not ok:
                raise DataError(f"{path} is damaged or no decoding.bin ({message}): make it again with `python egg.py "
                                "prepare TEXT --vocab-size N`")

        count = int.from_bytes(data[:4], "little")
        pieces, at = [], 4
        need(0 < count <= (len(data) - 4) // 4, f"{count} tokens in {len(data)} bytes")
        for token in range(count):
            first = at + 4
            at = first + int.from_bytes(data[at:first], "little")
            need(first <= at <= min(len(data), first + LONGEST_TOKEN), f"token {token} of {count} does not fit")
            pieces.append(data[first:at])
        need(at == len(data), f"{len(data) - at} bytes after the last token")
        return cls(pieces)

    def expand(self, tokens):
        """uint8: the bytes of `tokens` (integers below len(self)), one after the other."""
        lengths = self.lengths[tokens]
        ends = np.cumsum(lengths)
        inside = np.arange(ends[-1] if ends.size else 0) - np.repeat(ends - lengths, lengths)
        return self._bytes[np.repeat(self._first[tokens], lengths) + inside]

    def encode(self, data):
        """int32: the tokens of `data` (bytes). Within a word (WORDS), the two neighbours whose merge has the lowest id
        are merged, until no two neighbours make a token; END is one. `prepare` numbers tokens in the order in which the
        BPE learned its merges, so these are the tokens of the BPE. Raises DataError for a byte that has no token."""
        if self._ids is None:
            # of equal tokens the first counts
            self._ids = {self._pieces[t]: t for t in reversed(range(len(self)))}
        if unknown := [b for b in sorted(set(data)) if bytes([b]) not in self._ids]:
            raise DataError(f"the vocabulary has no token for byte {unknown[0]:#04x} ({chr(unknown[0])!r}), which the "
                            "text holds: leave it out, or use the decoding.bin of `python egg.py prepare`")
        if (self.lengths == 1).all():
            return np.array([self._ids.get(bytes([b]), 0) for b in range(256)], np.int32)[np.frombuffer(data, np.uint8)]
        known, end, out = self._words, self._ids.get(END, 0), []
        if len(known) > MOST_WORDS:
            known.clear()
        for text in data.split(END) if end else [data]:
            for word in re.findall(WORDS, text.decode("latin-1")):
                if word not in known:
                    known[word] = self._merge(word.encode("latin-1"))
                out += known[word]
            out.append(end)                          # behind the last one it is too much
        return np.array(out[:-1], np.int32)

    def _merge(self, word):
        """[token]: the tokens of one word."""
        ids, count = self._ids, len(word)
        # of the part that begins at a byte, 0 where none does: its size; where the one before it begins
        sizes, before = [1] * count, [*range(-1, count - 1)]
        heap = [(ids[word[at:at + 2]], at, 2) for at in range(count - 1) if word[at:at + 2] in ids]
        heapq.heapify(heap)
        while heap:
            lowest, changed = heap[0][0], []
            while heap and heap[0][0] == lowest:
                _, at, size = heapq.heappop(heap)
                right = at + sizes[at]
                if right < at + size and sizes[at] + sizes[right] == size:       # both are still there
                    sizes[at], sizes[right] = size, 0
                    if at + size < count:
                        before[at + size] = at
                    changed += before[at], at
            for at in changed:
                end = at + sizes[at]
                if at >= 0 and at < end < count and (new := word[at:end + sizes[end]]) in ids:
                    heapq.heappush(heap, (ids[new], at, len(new)))
        return [ids[word[at:at + size]] for at, size in enumerate(sizes) if size]

    def decode(self, tokens):
        """bytes of a sequence of token ids; an id that decoding.bin does not have becomes U+FFFD."""
        return b"".join(self._pieces[t] if 0 <= t < len(self) else b"\xef\xbf\xbd" for t in map(int, tokens))


def warn(line):
    print(f"egg: {line}", file=sys.stderr, flush=True)


def load_decoding(cfg, warn=warn):
    """The Decoding for cfg's tokens; None, after one warning, if decoding.bin is missing. Raises DataError."""
    if cfg.VOCAB_SIZE == 256:
        return Decoding([bytes([b]) for b in range(256)])
    if not os.path.exists(cfg.DECODING_FILE):
        warn(f"{cfg.DECODING_FILE} is missing: samples show token ids, validation is in bits per token")
        return None
    if cfg.DECODING_SHA256 not in ("", _digest(cfg.DECODING_FILE)):
        raise DataError(f"{cfg.DECODING_FILE} is not the decoding.bin of this run, whose tokens are others: name that "
                        "one with -D DECODING_FILE=...")
    decoding = Decoding.read(cfg.DECODING_FILE)
    if len(decoding) > cfg.VOCAB_SIZE:
        raise DataError(f"{cfg.DECODING_FILE} has {len(decoding)} tokens, the model {cfg.VOCAB_SIZE}: give the "
                        "decoding.bin of its data with -D DECODING_FILE=...")
    return decoding


def encoded(cfg, decoding, text):
    """int32: the tokens of a text (bytes) for the model; see Decoding.encode. Raises DataError."""
    if decoding is None:
        raise DataError(f"{cfg.DECODING_FILE} is missing, and without it no text can be turned into tokens: start in "
                        "its directory, or name it with -D DECODING_FILE=...")
    tokens = decoding.encode(text)
    if tokens.max(initial=0) >= cfg.VOCAB_SIZE:
        raise DataError(f"{cfg.DECODING_FILE} has {len(decoding)} tokens, the model {cfg.VOCAB_SIZE}: give the "
                        "decoding.bin of its training")
    return tokens


def text(decoding, tokens):
    """str: the text of the tokens, or their ids if `decoding` is None."""
    if decoding is None:
        return "token ids " + " ".join(str(int(t)) for t in tokens)
    return decoding.decode(tokens).decode("utf-8", "replace")


# --- validation ------------------------------------------------------------------------------------------------------

class Validation(namedtuple("Validation", "windows n_bytes unit")):
    """Held-out windows: int32 [n, (VALIDATE_WINDOW or SEQ_LEN) + 1], inputs row[:-1], targets row[1:]; n_bytes: the
    bytes of all targets, without a decoding their number; unit: "bits/byte" or "bits/token". engine.validate(windows)
    returns (nats, number of targets)."""

    def bits(self, nats):
        """`nats`, summed over all targets, in `unit`."""
        return float(nats) / math.log(2) / self.n_bytes


def open_validation(cfg, decoding, warn=warn):
    """A Validation on VALIDATE_TOKENS tokens of VAL_FILE. None if validation is off (VALIDATE_EVERY 0) or, after one
    warning, if the file is missing. `decoding`: a Decoding or None. Raises DataError like open_tokens."""
    if not cfg.VALIDATE_EVERY:
        return None
    if not os.path.exists(cfg.VAL_FILE):
        warn(f"{cfg.VAL_FILE} is missing: no validation")
        return None
    if os.path.exists(cfg.INPUT_FILE) and os.path.samefile(cfg.INPUT_FILE, cfg.VAL_FILE):
        raise DataError(f"{cfg.VAL_FILE} is both INPUT_FILE and VAL_FILE: give a file of held-out data with "
                        "-D VAL_FILE=..., or -D VALIDATE_EVERY=0")
    if os.path.exists(cfg.INPUT_FILE) and filecmp.cmp(cfg.INPUT_FILE, cfg.VAL_FILE, False):
        warn(f"{cfg.VAL_FILE} is a copy of {cfg.INPUT_FILE}: validations will be too good")
    return held_out(cfg, open_tokens(cfg, cfg.VAL_FILE), cfg.VAL_FILE, decoding, cfg.VALIDATE_TOKENS)


def held_out(cfg, tokens, path, decoding, most=0):
    """A Validation (SPEC 15) on `most` tokens (0: all) of a file, in windows spread evenly. Raises DataError."""
    length = min(cfg.VALIDATE_WINDOW or cfg.SEQ_LEN, tokens.size - 1)
    if decoding is not None:
        need_decodable(tokens, path, decoding, cfg.DECODING_FILE)
    whole = (tokens.size - 1) // length
    wanted = min(whole, max(1, most // length)) if most else whole
    starts = np.arange(wanted) * whole // wanted * length
    windows = np.stack([tokens[s:s + length + 1] for s in starts]).astype(np.int32)
    if decoding is None:
        return Validation(windows, wanted * length, "bits/token")
    return Validation(windows, max(1, int(decoding.lengths[windows[:, 1:]].sum())), "bits/byte")


def references(cfg, train, validation):
    """{"uniform": x, "unigram": x, "bigram": x}: figures of simple models (SPEC 15), in validation.unit. Counts come
    from `train` (1-D tokens). Unigram: every token counted once more than seen. Bigram: Witten-Bell."""
    runs = max(1, -(-train.size // REFERENCE_TOKENS))
    train = np.concatenate([train[r * train.size // runs:][:REFERENCE_TOKENS // runs] for r in range(runs)])
    unigram, bigram = _tables(train, validation, cfg.VOCAB_SIZE, 1)
    uniform = validation.bits(validation.windows[:, 1:].size * math.log(cfg.VOCAB_SIZE))
    return {"uniform": uniform, "unigram": unigram, "bigram": bigram}


def context_tables(train, validation, contexts=(2, 3, 5)):
    """{"table of 2 bytes": x, ...}: what tables of the bytes before know, counted in `train` (uint8), in
    validation.unit."""
    figures = list(_tables(train, validation, 256, max(contexts)))
    return {f"table of {length} bytes": figures[length] for length in contexts}


def _tables(train, validation, vocab, longest):
    """Yields the figures of tables of the 0, 1, .. `longest` tokens before, counted in `train`. Interpolated
    Witten-Bell: (c(h, w) + d(h) p(w)) / (c(h) + d(h)), with d(h) different tokens seen after the context h and p of the
    next shorter context. No context begins before its window."""
    bits = (vocab - 1).bit_length()
    code = np.uint32 if bits * (longest + 1) <= 32 else np.uint64
    inputs, target = validation.windows[:, :-1].astype(code), validation.windows[:, 1:].astype(code)
    share = ((np.bincount(train, minlength=vocab) + 1) / (train.size + vocab))[target.astype(np.int64)]
    yield validation.bits(-np.log(share).sum())
    keys, context = train.astype(code), np.zeros_like(inputs)
    for length in range(1, longest + 1):
        # the token before those that are known already: the oldest has the highest bits
        keys = keys[1:] | train[:keys.size - 1].astype(code) << code(bits * length)
        context[:, length - 1:] |= inputs[:, :inputs.shape[1] - length + 1] << code(bits * (length - 1))
        kinds, counts = np.unique(keys, return_counts=True)
        before = np.append(0, np.cumsum(counts))                 # of each kind: how many keys are smaller
        here, shorter = context[:, length - 1:] << code(bits), share[:, length - 1:]
        low, high = np.searchsorted(kinds, here), np.searchsorted(kinds, here + code((1 << bits) - 1), "right")
        first, last = (np.searchsorted(kinds, here | target[:, length - 1:], side) for side in ("left", "right"))
        total = np.maximum(1, before[high] - before[low] + high - low)
        share[:, length - 1:] = np.where(
            high > low, (before[last] - before[first] + (high - low) * shorter) / total, shorter)
        yield validation.bits(-np.log(share).sum())
