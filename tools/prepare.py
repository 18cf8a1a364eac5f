"""`python egg.py prepare`: makes the data files from texts. model.data_files reads them (SPEC 10)."""

import contextlib
import hashlib
import itertools
import os
import pathlib
import sys
import time

import egg_config
from cluster.history import replacing, unused
from egg_config import UsageError, explained
from model import soft_targets
from model.data_files import END, MARK, WORDS, DataError, Decoding, read_text

FILES = {"INPUT_FILE": "input.bin", "VAL_FILE": "val.bin", "DECODING_FILE": "decoding.bin"}     # of a directory
VAL_SHARE = 0.05             # share of a text that is held out
VAL_BLOCKS = 64              # most blocks of held-out text
VAL_BLOCK_MIN = 1024         # least bytes of such a block, if the text is long enough
TOKENS_FROM = 200_000        # bytes of the shortest text that becomes tokens where nothing else was said
LEARN_BYTES = 1 << 26        # of a longer text the BPE learns from about so many bytes, spread evenly
PROBE = 1 << 16              # bytes of a text in which prompts and answers are looked for
SIGNS = b">", b"=", b":", b"?", b"|", b"\t"
LONGEST_ANSWER = 48          # bytes of a line
SAMPLES, SAMPLE = 32, 100    # of the held-out text that are looked for in the other, and bytes of one
MUCH_KNOWN = 0.1             # share of them that is worth a warning
ENCODE_BYTES = 1 << 16       # approximate bytes of text that are encoded at once


def prepare(texts, vocab_size, val=None, out=".", say=print, advise=lambda *made: made, progress=None, field="text"):
    """Writes input.bin, val.bin and (unless vocab_size is 256: plain bytes) decoding.bin into the directory `out`.
    texts: paths of files and directories, read one after the other, see data_files.read_text; vocab_size None: what
    suits the length of the text; val: path of the held-out text, None: see `split`. The BPE learns from the training
    part alone. `say` takes lines, `progress` such as replace each other; field: of JSON lines. Returns what `advise`
    says, before anything is written, of the number of tokens in the vocabulary, whether the files hold plain bytes, how
    many tokens there are to train on, and held out, and what `longest_answer` finds. Raises DataError and then leaves
    old files."""
    tell = progress or say
    text = _text(texts, "prepare", say, field)
    train, held_out = ([text], [_text([val], "hold out", say, field)]) if val else split(text)
    del text                                         # whose parts are copies
    if not any(train) or not any(held_out):
        raise DataError(f"the text is too short to set {VAL_SHARE:.0%} of it aside: give more text, or held-out text "
                        "with --val FILE")
    say(f"text: {sum(map(len, train)):,} bytes to train on, {sum(map(len, held_out)):,} held out")
    if (share := _share_known(train, held_out)) > MUCH_KNOWN:
        say(f"warning: {share:.0%} of the held-out text stands in the text to train on, too: validations will be too "
            "good; is a text there twice?")

    longest = longest_answer(train[0])
    if vocab_size is None:
        vocab_size = egg_config.VOCAB_SIZE
        if longest or sum(map(len, train)) < TOKENS_FROM:
            vocab_size = 256
            why = "each line is a prompt and its answer" if longest else \
                f"{TOKENS_FROM:,} bytes to train on are enough for tokens"
            say(f"plain bytes: {why} (--vocab-size N makes tokens)")
    files, n_tokens = {"input.bin": train, "val.bin": held_out}, 256
    if vocab_size != 256:
        pieces = _train_bpe(train, vocab_size, say, tell)
        n_tokens, decoding = len(pieces), Decoding(pieces)
        files = {name: _encode(decoding, parts, name, tell) for name, parts in files.items()}
        files["decoding.bin"] = [len(pieces).to_bytes(4, "little")]
        files["decoding.bin"] += (len(x).to_bytes(4, "little") + x for x in pieces)
        files[MARK] = [hashlib.sha256(b"".join(files["decoding.bin"])).hexdigest().encode()]
    plain = vocab_size == 256
    counts = [sum(map(len, files[name])) // (1 if plain else 4) for name in ("input.bin", "val.bin")]
    advice = advise(n_tokens, plain, counts, longest)
    to_mend = "nothing was changed there; give --out a directory that can be written"
    with explained(DataError, out, to_mend), contextlib.ExitStack() as stack:    # any error leaves the old files
        os.makedirs(out, exist_ok=True)
        for name, parts in files.items():
            file = stack.enter_context(replacing(out, name))
            file.writelines(parts)
            file.flush()
            os.fsync(file.fileno())                  # all are on the disk before the first takes its place
    for name, parts in files.items():
        say(f"{os.path.join(out, name)}: {sum(map(len, parts)):,} bytes")
    return advice


def _files(path, say):
    """Yields the file `path`, or those of a directory that are not hidden, no links to directories, which may lead in
    circles, and not made by `prepare`."""
    for file in sorted(pathlib.Path(path).rglob("*")) if os.path.isdir(path) else [path]:
        if file == path:
            yield path
        elif any(part[0] == "." for part in file.relative_to(path).parts):
            continue
        elif file.is_symlink() and file.is_dir() or file.name in (*FILES.values(), MARK):
            say(f"left out: {file} is a link to a directory, or a file that `prepare` makes")
        elif file.is_file():
            yield str(file)


def _text(paths, purpose, say, field):
    """bytes of files, one after the other, each text once; `say` takes a line about one that is left out. Raises
    DataError where there are none."""
    texts = {}                                       # SHA-256: (file, text)
    for path, file in ((path, file) for path in paths for file in _files(path, say)):
        try:
            text = read_text(file, field)
        except DataError as error:
            if file == path:
                raise
            say(f"left out: {error}")
            continue
        if (digest := hashlib.sha256(text).digest()) in texts and text:
            say(f"left out: {file} is the same text as {texts[digest][0]}")
            continue
        if file.endswith((".csv", ".tsv")) or b"\0" in text[:ENCODE_BYTES]:
            say(f"{file}: a table or no text: every byte of it is learnt")
        texts[digest] = file, text
    if text := b"".join(text for _, text in texts.values()):
        return text
    raise DataError(f"{', '.join(paths)}: no text there, nothing to {purpose}")


def _share_known(train, held_out):
    """The share of the held-out text, by samples, that stands in the text to train on."""
    text = b"".join(held_out)
    samples = [text[at:at + SAMPLE] for at in range(0, len(text) - SAMPLE, max(SAMPLE, len(text) // SAMPLES))]
    return sum(any(sample in part for part in train) for sample in samples) / max(len(samples), 1)


def need_room(directory, force):
    """Asks before files of an earlier `prepare` in a directory are replaced. Raises UsageError."""
    there = [path for name in FILES.values()
             if os.path.exists(path := os.path.normpath(os.path.join(directory, name)))]
    if force or not there:
        return
    with contextlib.suppress(EOFError):              # Ctrl-D
        if sys.stdin.isatty() and input(f"replace {', '.join(there)}? [y/N] ").strip().lower() in ("y", "yes"):
            return
    raise UsageError(f"{', '.join(there)} would be replaced: give another directory with --out DIR, or --force")


def longest_answer(text):
    """Bytes of the longest line of a text whose lines are prompts and answers: short ones, in which the same sign
    stands once, between the two. 0 for other texts."""
    lines = text[:PROBE].split(b"\n")[1:-1]
    longest = max(map(len, lines), default=LONGEST_ANSWER)
    return longest * (longest < LONGEST_ANSWER and any(all(line.count(sign) == 1 for line in lines) for sign in SIGNS))


def training_on(directory, gpu, n_tokens, plain, counts, longest=0):
    """[argument]: of `train`, for the files that `prepare` has made, with the preset for this machine. counts: tokens
    to train on, and held out; longest: see `longest_answer`. Raises DataError where they are too few for a window."""
    preset = ("best" if gpu else "laptop") + ("-bytes" if plain else "")
    constants = {"DETOKENIZE": 0} if plain else {}
    if plain and longest:                            # an answer depends on all of its prompt, and on no other line
        constants |= {"SEQ_LEN": longest // 16 * 16 + 16, "SOFT_TARGETS": "0:7"}
    if not plain and n_tokens != egg_config.VOCAB_SIZE:
        constants = {"VOCAB_SIZE": max(n_tokens, 257)}       # 256 would mean plain bytes
    if os.path.normpath(directory) != ".":
        constants |= {name: os.path.join(directory, file) for name, file in FILES.items()
                      if not (plain and name == "DECODING_FILE")}
    cfg = egg_config.load(preset, [f"{name}={value}" for name, value in constants.items()], environ={})
    if min(counts) < cfg.SEQ_LEN + 2:
        raise DataError(f"{min(counts)} tokens in one of these files are too few to train with --preset {preset}, "
                        f"which needs {cfg.SEQ_LEN + 2}: give more text, or held-out text with --val FILE")
    if soft_targets.lacks_memory(cfg, counts[0]):
        constants["SOFT_TARGETS"] = ""
    kept = unused("ckpt-" + os.path.basename(os.path.abspath(directory)))
    return ["--preset", preset, *(word for name, value in constants.items() for word in ("-D", f"{name}={value}")),
            "--save-dir", kept]


def split(data):
    """(training, held out): two lists of bytes that together hold `data`. The second has about VAL_SHARE of it, in
    blocks spread evenly, cut at line ends unless a line is longer than a block."""
    share = int(len(data) * VAL_SHARE)
    blocks = max(1, min(VAL_BLOCKS, share // VAL_BLOCK_MIN))
    size = share // blocks

    def cut(at):
        return _cut(data, at, at + size) or at

    cuts = [0]
    for block in range(blocks):
        cuts.append(cut((2 * block + 1) * len(data) // (2 * blocks) - size // 2))
        cuts.append(cut(cuts[-1] + size))
    parts = [data[a:b] for a, b in itertools.pairwise([*cuts, len(data)])]
    return parts[::2], parts[1::2]


def _cut(data, low, high):
    """Where to cut a text between two places, best at a line end, else before END; 0 where neither is."""
    return data.find(b"\n", low, high) + 1 or max(data.find(END, low, high), 0)


def _blocks(parts):
    """The texts in Latin-1 strings of about ENCODE_BYTES, cut at line ends if possible: the end of one ends a word."""
    for part in parts:
        at = 0
        while at < len(part):
            limit = at + 2 * ENCODE_BYTES
            after = _cut(part, at + ENCODE_BYTES, limit) or min(limit, len(part))
            yield part[at:after].decode("latin-1")
            at = after


def _blocks_told(parts, work, tell, most=1 << 62):
    """The same, every nth so that they have `most` bytes about; `tell` takes a line every two seconds."""
    total, done, due = sum(map(len, parts)), 0, time.monotonic() + 2
    for number, block in enumerate(_blocks(parts)):
        if number % (1 + total // most) == 0:
            yield block
        done += len(block)
        if time.monotonic() > due:
            due = time.monotonic() + 2
            tell(f"{work} {done:,} of {total:,} bytes ({done / total:.0%})")


def _train_bpe(parts, vocab_size, say, tell):
    """[bytes of token 0, 1, ...]: of a byte-level BPE over `parts`. Tokens 0 to 255 are the single bytes, the last one
    is END if the text has that."""
    try:
        import tokenizers
    except ImportError:
        raise DataError("the BPE needs the tokenizers library: `pip install -r requirements/prepare.txt`, or prepare"
                        " plain bytes with --vocab-size 256") from None
    bpe = tokenizers.Tokenizer(tokenizers.models.BPE())
    bpe.pre_tokenizer = tokenizers.pre_tokenizers.Split(tokenizers.Regex(WORDS), "isolated")
    ends = [END.decode()] if any(END in part for part in parts) else []
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=vocab_size - len(ends), min_frequency=2, show_progress=False,
                                             initial_alphabet=[chr(b) for b in range(256)])
    say(f"BPE: learning {vocab_size:,} tokens ...")
    started = time.monotonic()
    bpe.train_from_iterator((text for block in _blocks_told(parts, "BPE: read", tell, LEARN_BYTES)
                             for text in block.split(END.decode())), trainer)
    bpe.add_special_tokens(ends)
    vocabulary = sorted(bpe.get_vocab().items(), key=lambda item: item[1])
    say(f"BPE: {len(vocabulary):,} tokens in {time.monotonic() - started:.1f} s")
    if missing := vocab_size - len(vocabulary):
        say(f"BPE: the text has no more repeated pairs, so {missing:,} tokens fewer than asked for")
    return [token.encode("latin-1") for token, _ in vocabulary]


def _encode(decoding, parts, name, tell):
    """[little-endian uint32 bytes]: the tokens of `parts`."""
    return [decoding.encode(block.encode("latin-1")).astype("<u4").tobytes()
            for block in _blocks_told(parts, f"{name}: encoded", tell)]
