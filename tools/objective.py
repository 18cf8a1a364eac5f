"""Rewards: what a Python function of the user thinks of what members write (SPEC 22, docs/OBJECTIVES.md).

A file of --objective has reward(prompts, completions, **columns): lists of str of one length; it returns as many
numbers, more is better. This is the form of the reward functions of TRL. Optional in the file: DATA and HELD_OUT, lists
of dicts or the names of JSON-lines files with "prompt" and further columns; TOKENS to write after a prompt; STOP, a
text that ends a completion; TEMPERATURE; reply(prompts, texts, **columns), what the other side says after each text,
and TURNS, the number of texts that a dialogue has.
"""

import asyncio
import contextlib
import functools
import inspect
import itertools
import json
import math
import multiprocessing
import multiprocessing.connection
import os
import pickle
import runpy
import signal
import sys
import threading
import time
from collections import namedtuple
from numbers import Real

import numpy as np

from egg_config import EggError, explained
from engine import hardware
from model import data_files, fitness_digits, sampling
from model.seeds import hash32
from tools import processes

PROMPT_TOKENS = 16           # of the data before a completion, where the file has no DATA
HELD_OUT_TEXTS = 256         # of the unperturbed model, which are measured
LONGEST = 4096               # tokens of a prompt and its completion
MOST_TURNS = 64
REWARD_UNIT = 1 << 16        # of a reward in fixed point, in which it takes the place of a loss
MOST_REWARD = 1 << 30
# Makes texts of tokens: data_files.Decoding, [row], the names of further columns, STOP
Reader = namedtuple("Reader", "decoding rows columns stop")
# first hashes of a pair's choice of prompts and of its seeds of draws: behind those of noise, before those of targets
PROMPT_STREAM, DRAW_STREAM = 1 << 28, 1 << 29


class ObjectiveError(EggError):
    """About a file of --objective or what its function returns."""


class Prompts(namedtuple("Prompts", "rows tokens lengths")):
    """What texts begin with. rows: int64 [n], numbers of the rows of DATA and HELD_OUT, or -1 for a window of the data;
    tokens: int32 [n, longest]; lengths: int64 [n]."""

    def part(self, number):
        """The Prompts of these numbers."""
        return Prompts(*(values[number] for values in self))


def read(path):
    """{name: value}: what the file defines. Raises ObjectiveError for one that has an error or no function reward."""
    with explained(ObjectiveError, path, "give --objective the path of a Python file"), open(path, "rb"):
        pass
    sys.path.insert(0, os.path.dirname(os.path.abspath(path)))
    try:
        names = runpy.run_path(path)
    except SyntaxError as error:
        raise ObjectiveError(f"{path}:{error.lineno or 1}: {error.msg}") from None
    except (Exception, SystemExit) as error:
        advice = "" if isinstance(error, OSError) else f": it must run by itself, as `python {path}` does"
        raise ObjectiveError(f"{path}: {_said(error)}{advice}") from None
    finally:
        del sys.path[0]
    if not callable(names.get("reward")):
        raise ObjectiveError(f"{path} has no function reward(prompts, completions, **columns): it is to return a list "
                             "of numbers")
    return names


def _said(error):
    text = ""
    with contextlib.suppress(Exception):             # str() calls code of the user
        text = " ".join(str(error).split())[:200]
    return f"{type(error).__name__}: {text}".removesuffix(": ")


def _rows(path, names, name):
    """[{column: value}] of DATA or HELD_OUT, [] without it. Raises ObjectiveError."""
    if name not in names:
        return []
    value, place = names[name], path
    if isinstance(value, str):
        place = os.path.join(os.path.dirname(os.path.abspath(path)), value)
        with explained(ObjectiveError, place, f"{name} of {path} names it"), open(place, "rb") as file:
            lines = [(number, line) for number, line in enumerate(file, 1) if line.strip()]
        value = []
        for number, line in lines:
            try:
                value.append(json.loads(line))
            except ValueError as error:
                raise ObjectiveError(f"{place}:{number}: {getattr(error, 'msg', error)}: every line is to be a JSON "
                                     "object") from None
    if not (isinstance(value, list) and value):
        raise ObjectiveError(f"{place}: {name} is to be a list of dicts, each with a text as \"prompt\", or the name "
                             "of a JSON-lines file of such")
    for number, row in enumerate(value, 1):
        good = False
        with contextlib.suppress(AttributeError, KeyError, TypeError, UnicodeEncodeError):
            good = row["prompt"].encode() and all(isinstance(column, str) for column in row.keys())
        if not good:
            raise ObjectiveError(f"{place}: row {number} of {name} is {str(row)[:80]!r}: must be a dict with texts as "
                                 "keys, and a text that is not empty as \"prompt\"")
    return value


def _number(path, names, name, default, low, high):
    value = names.get(name, default)
    kind = type(default)
    if not (isinstance(value, Real) and low <= value <= high and kind(value) == value):
        whole = "whole " * (kind is int)
        raise ObjectiveError(f"{path}: {name} = {value!r}: must be a {whole}number from {low} to {high}")
    return kind(value)


def _begun(rows, sequences):
    """The Prompts of rows (numbers) with these sequences of tokens."""
    lengths = np.array([len(sequence) for sequence in sequences], np.int64)
    tokens = np.zeros((len(sequences), lengths.max(initial=0)), np.int32)
    for row, sequence in zip(tokens, sequences):
        row[:len(sequence)] = sequence
    return Prompts(rows, tokens, lengths)


def _windows(tokens, starts):
    """The Prompts that begin at these places of the tokens."""
    windows = np.asarray(tokens)[starts[:, None] + np.arange(PROMPT_TOKENS)].astype(np.int32)
    return Prompts(np.full(len(starts), -1), windows, np.full(len(starts), PROMPT_TOKENS))


# --- judging ---------------------------------------------------------------------------------------------------------

# what a function of this name returns: the type of an answer, and its name in the plural
ANSWERS = {"reward": (float, "numbers"), "reply": (str, "texts")}


def judged(function, texts, name="reward"):
    """[float], the rewards of `texts`, a dict of lists, of which the function gets what it takes; or [str], of a
    function whose name is reply. Raises ObjectiveError with the reason."""
    takes = inspect.signature(function).parameters
    every = any(parameter.kind == parameter.VAR_KEYWORD for parameter in takes.values())
    answers = function(**{column: values for column, values in texts.items() if every or column in takes})
    if inspect.iscoroutine(answers):                 # TRL takes such functions too
        answers = asyncio.run(answers)
    kind, kinds = ANSWERS[name]
    if not isinstance(answers, (str, set, dict)):
        with contextlib.suppress(TypeError, ValueError):
            answers = [float(value + 0) for value in answers] if kind is float else list(answers)       # text + 0 fails
    if not (isinstance(answers, list) and all(isinstance(x, kind) for x in answers)):
        raise ObjectiveError(f"{name} returned {str(answers)[:80]!r}, which is no list of {kinds}")
    if len(answers) != len(texts["prompts"]):
        raise ObjectiveError(f"{name} returned {len(answers)} {kinds} for {len(texts['prompts'])} completions")
    for value, text in zip(answers, texts["completions"]) if kind is float else ():
        if not abs(value) <= MOST_REWARD:
            raise ObjectiveError(f"reward returned {value} for {text[:80]!r}: must be from -2^30 to 2^30")
    return answers


def readable(reader, rows, tokens, lengths, completions):
    """The dict of lists for a function, of the values of Prompts. completions: int32 [n, TOKENS], or the texts."""
    def text(tokens):
        return reader.decoding.expand(tokens).tobytes().decode("utf-8", "replace")

    if not isinstance(completions, list):
        completions = list(map(text, completions))
        if reader.stop:
            completions = [written.partition(reader.stop)[0] for written in completions]
    rows = [reader.rows[row] if row >= 0 else {} for row in rows]
    first = [row.get("prompt") or text(begun[:n]) for row, begun, n in zip(rows, tokens, lengths)]
    return {"prompts": first, "completions": completions,
            **{name: [row.get(name) for row in rows] for name in reader.columns}}


def _judge(path, name, reader, pipe):
    """The main function of a process that judges: says [] when it has loaded the file; takes dicts of lists, or
    of arguments of `readable`; answers with lists of rewards or replies, or with a str, the error."""
    os.setpgid(0, 0)                                 # so that what the function starts ends with this process
    threading.Thread(target=_end_with_parent, daemon=True).start()
    beside = os.path.dirname(os.path.abspath(path))
    try:
        function = read(path)[name]
        sys.path.insert(0, beside)                   # for imports within the function
        pipe.send([])                                # it has loaded
        while True:
            texts = pipe.recv()
            texts = texts if "prompts" in texts else readable(reader, **texts)
            try:
                pipe.send(judged(function, texts, name))
            except BaseException as error:           # also SystemExit
                pipe.send(f"{path}: {_blamed(function, texts, name, error)}")
    except (EOFError, BrokenPipeError):
        pass
    except EggError as error:
        pipe.send(str(error))


def _end_with_parent():
    """A parent that is killed must not leave a function behind that never returns."""
    multiprocessing.connection.wait([multiprocessing.parent_process().sentinel])
    os.killpg(0, signal.SIGKILL)


def _blamed(function, texts, name, error):
    """str: the error, with the first text for which the function fails alone."""
    why = str(error) if isinstance(error, ObjectiveError) else f"{name} raised {_said(error)}"
    for i, text in enumerate(texts["completions" if name == "reward" else "texts"]):
        try:
            judged(function, {column: values[i:i + 1] for column, values in texts.items()}, name)
        except BaseException:
            return f"{why}, for the prompt {texts['prompts'][i][-60:]!r} and the text {text[:60]!r}"
    return why


class Judge:
    """`count` processes that call the function `name` of a file on lists of texts, while the engine writes the next
    ones."""

    def __init__(self, path, count, seconds, reader, name="reward"):
        self._path, self._seconds, self._name = path, seconds, name
        try:
            started = [processes.start(_judge, path, name, reader) for _ in range(count)]
        except (pickle.PicklingError, AttributeError, TypeError) as error:       # at the first one, if at all
            raise ObjectiveError(f"{path}: a column of DATA cannot be passed to another process ({_said(error)}): give "
                                 "numbers and texts") from None
        self._processes, self._pipes = zip(*started)
        self.waited = 0.0                            # seconds in `finish`
        # (pipe, first text, end) of the answers that are expected; at first that the file has loaded, however long
        self._busy = [(pipe, 0, None) for pipe in self._pipes]

    def begin(self, texts):
        """Hands out a dict of lists for the function, or of arguments of `readable`, to the processes; returns the
        answers to what was handed out before. Raises ObjectiveError."""
        before = self.finish()
        count = len(next(iter(texts.values())))
        ends = [count * i // len(self._pipes) for i in range(len(self._pipes) + 1)]
        self._busy = [(pipe, a, b) for pipe, a, b in zip(self._pipes, ends, ends[1:]) if b > a]
        for pipe, a, b in self._busy:
            with contextlib.suppress(OSError):       # `finish` says why
                pipe.send({name: values[a:b] for name, values in texts.items()})
        return before

    def finish(self):
        """[float] or [str]: the rewards of what was handed out, or the replies; [] for nothing. Raises ObjectiveError.
        """
        answers, started, until = [], time.perf_counter(), time.monotonic() + self._seconds
        for pipe, a, b in self._busy:
            try:
                if not pipe.poll(None if b is None else max(until - time.monotonic(), 0)):
                    raise ObjectiveError(f"{self._path}: {self._name} did not return within {self._seconds:g} s: give "
                                         "it longer with -D OBJECTIVE_SECONDS=")
                answer = pipe.recv()
            except (EOFError, OSError):
                raise ObjectiveError(f"{self._path}: a process that judges has ended: does {self._name} end Python, or "
                                     "need more memory than there is?") from None
            if isinstance(answer, str):
                raise ObjectiveError(answer)
            answers += answer
        self._busy = []
        self.waited += time.perf_counter() - started
        return answers

    def answers(self, texts):
        """`begin` and `finish`."""
        self.begin(texts)
        return self.finish()

    def close(self):
        for process in self._processes:
            with contextlib.suppress(ProcessLookupError):    # it has not begun
                os.killpg(process.pid, signal.SIGKILL)
            process.kill()


# --- the objective of a worker ---------------------------------------------------------------------------------------

class Objective:
    """The file of --objective at a worker. decoding: data_files.Decoding; tokens: the training data, held_out: tokens
    of VAL_FILE or None. Raises ObjectiveError."""

    equal = False              # whether the members of each pair of the last chunk earned the same

    def __init__(self, cfg, path, decoding, tokens, held_out=None, processes=None):
        with contextlib.chdir("."):                  # which the file may leave
            names = read(path)
        self.cfg, self.path = cfg, path
        self.decoding, self.tokens = decoding, tokens
        self.write = _number(path, names, "TOKENS", 64, 1, LONGEST - 1)
        self.stop = names.get("STOP", "")
        if not isinstance(self.stop, str):
            raise ObjectiveError(f"{path}: STOP = {self.stop!r}: must be a text")
        self.turns = _number(path, names, "TURNS", 1, 1, MOST_TURNS)
        if callable(names.get("reply")) != (self.turns > 1):
            raise ObjectiveError(f"{path}: TURNS of 2 or more and a function reply(prompts, texts) need each other")
        temperature = _number(path, names, "TEMPERATURE", 1.0, 0.0, 100.0)
        self.settings = sampling.settings(cfg, temperature, 0.0, 0.0)
        if decoding is None:
            raise ObjectiveError(f"{cfg.DECODING_FILE} is missing, and without it tokens are no text")
        rows, kept_out = (_rows(path, names, name) for name in ("DATA", "HELD_OUT"))
        self.rows = rows if kept_out or len(rows) < 10 else [row for i, row in enumerate(rows) if i % 10]
        kept_out = kept_out or rows[::10]
        columns = sorted({name for row in rows + kept_out for name in row} - {"prompt", "completions", "prompts"})
        self.reader = Reader(decoding, self.rows + kept_out, columns, self.stop)
        encoded = [self._encoded(row["prompt"]) for row in self.reader.rows]
        self._of_rows = _begun(np.arange(len(encoded)), encoded)
        self.held = self._held(len(kept_out), tokens if held_out is None else held_out, temperature > 0)
        judge = functools.partial(Judge, path, processes or hardware.cores(), cfg.OBJECTIVE_SECONDS, self.reader)
        self.judge = judge()
        self.other = judge("reply") if self.turns > 1 else None
        self.step, self.seconds = None, [0.0, 0.0]               # see `pace`
        self.pace = ()

    def _encoded(self, text, before=0):
        """int32: the tokens of a prompt, or of its part behind `before` tokens. Raises ObjectiveError for one that is
        too long, DataError for one that the model has no tokens for."""
        prompt = data_files.encoded(self.cfg, self.decoding, text.encode("utf-8", "replace"))
        if before + len(prompt) + self.write > LONGEST:
            raise ObjectiveError(f"{self.path}: the prompt {text[:40]!r} ... has {before + len(prompt)} tokens, with "
                                 f"TOKENS = {self.write} more than {LONGEST}: shorten it")
        return prompt

    def _held(self, rows, tokens, drawn):
        """The Prompts on which the unperturbed model is measured: of `rows` rows, the last ones, or of the tokens. If
        texts are drawn, few rows get several."""
        count = HELD_OUT_TEXTS if drawn or not rows else min(rows, HELD_OUT_TEXTS)
        if rows:
            return self._of_rows.part(len(self.rows) + np.arange(count) * max(rows, count) // count % rows)
        return _windows(tokens, np.arange(count) * (len(tokens) - PROMPT_TOKENS) // count)

    def prompts(self, numbers):
        """The Prompts that int64 [n] choose."""
        if self.rows:
            return self._of_rows.part(numbers % len(self.rows))
        return _windows(self.tokens, numbers % (len(self.tokens) - PROMPT_TOKENS))

    def _written(self, engine, prompts, seeds):
        """The arguments of `readable` by name, as Judge.begin takes them: Prompts and what the engine writes behind
        them. seeds: int64 [n], of the draws."""
        written = {**prompts._asdict(), "completions": self._continued(engine, prompts, seeds)}
        if self.turns == 1:
            return written
        known, so_far = readable(self.reader, **written), prompts
        completions = texts = known["completions"]
        for turn in range(1, self.turns):
            dialogues = [prompt + text[:len(text) - len(last)] for prompt, text, last in
                         zip(known["prompts"], completions, texts)]
            replies = self.other.answers({**{name: known[name] for name in self.reader.columns}, "prompts": dialogues,
                                          "texts": texts})
            so_far = _begun(prompts.rows, [
                np.concatenate([tokens[:n], self._encoded(text + reply, int(n))])
                for tokens, n, text, reply in zip(so_far.tokens, so_far.lengths, texts, replies)])
            turns = self._continued(engine, so_far, hash32(seeds, turn))
            texts = readable(self.reader, *so_far, turns)["completions"]
            completions = ["".join(parts) for parts in zip(completions, replies, texts)]
        return {**written, "completions": completions}

    def _continued(self, engine, prompts, seeds):
        """int32 [n, TOKENS]: what the engine writes behind Prompts."""
        texts = np.pad(prompts.tokens[:, :prompts.lengths.max()], ((0, 0), (0, self.write)))
        engine.write(texts, prompts.lengths, seeds.astype(np.uint32), self.settings)
        return np.take_along_axis(texts, prompts.lengths[:, None] + np.arange(self.write), 1)

    def rewards(self, engine, first, pairs, check):
        """int64 [pairs, 2]: the rewards of the members of pairs first.. of this step in fixed point, summed over their
        OBJECTIVE_PROMPTS prompts. Both members of a pair have the same prompts and the same draws. check(): called
        between slices."""
        self.judge.finish()                          # what is left of a chunk that was given up
        rewards = []
        for k in range(self.cfg.OBJECTIVE_PROMPTS):
            slices = -(-2 * pairs // engine.TEXTS_AT_ONCE)
            for at, end in itertools.pairwise(pairs * i // slices for i in range(slices + 1)):
                of_pair = engine.seed + np.arange(first + at, first + end)
                numbers, seeds = (hash32(of_pair, stream + k) for stream in (PROMPT_STREAM, DRAW_STREAM))
                rewards += self.judge.begin(
                    self._written(engine, self.prompts(numbers.repeat(2)), seeds.repeat(2)))
                check()
        rewards += self.judge.finish()
        return np.rint(np.array(rewards) * REWARD_UNIT).astype(np.int64).reshape(-1, pairs, 2).sum(0)

    def chunk(self, engine, first, check):
        """(packed digits, sum of losses) of the chunk that begins with member `first`: the first TEXT_SHARE of its
        pairs are judged by their losses on text, the others by their rewards."""
        cfg, started, waited = self.cfg, time.perf_counter(), self.judge.waited
        pairs = cfg.CHUNK_SIZE // 2
        on_text = round(cfg.TEXT_SHARE * pairs)
        loss, parts = 0, []
        if on_text:
            losses = engine.evaluate(first, 2 * on_text)
            loss = int(losses.sum()) * pairs // on_text
            parts.append(fitness_digits.chunk_fitness(losses, cfg))
        if on_text < pairs:
            rewards = self.rewards(engine, first // 2 + on_text, pairs - on_text, check)
            differ = rewards[:, 0] != rewards[:, 1]
            self.equal = not differ.any()
            # equal rewards are no vote, whatever the threshold
            parts.append(fitness_digits.chunk_fitness(-rewards.ravel(), cfg) * differ)
        self._note(engine.step, time.perf_counter() - started, self.judge.waited - waited)
        return fitness_digits.pack_ternary(np.concatenate(parts).astype(np.int8)), loss

    def _note(self, step, took, waited):
        """Keeps in `pace` what the last whole step of this worker was spent on, for people: a long and a short text."""
        if step != self.step:
            if self.step is not None:
                writing, waiting = (f"{seconds:.2f} s" for seconds in self.seconds)
                self.pace = (f"a step: writing {writing}, waiting {waiting} for reward()",
                             f"writing {writing}, waiting {waiting}")
            self.step, self.seconds = step, [0.0, 0.0]
        self.seconds[0] += took - waited
        self.seconds[1] += waited

    def measured(self, engine):
        """(number of texts after held-out prompts, mean reward of the unperturbed model); the same draws every time."""
        rewards = self.judged(engine, self.held)[1]
        return len(rewards), math.fsum(rewards) / len(rewards)

    def sample(self, engine, number):
        """str: a held-out prompt, what the unperturbed model writes, its reward."""
        written, rewards = self.judged(engine, self.held.part([number % len(self.held.rows)]))
        texts = readable(self.reader, **written)
        hint = "; the members of each pair earned the same, so nothing is learnt" * self.equal
        return f"{texts['prompts'][0]} >>> {texts['completions'][0]} (reward {rewards[0]:.4f}{hint})"

    def try_out(self):
        """Lets the function judge an empty text and a prompt, and reply to the prompt. Raises ObjectiveError."""
        known = readable(self.reader, *self.held.part([0, 0]), ["", ""])
        del known["completions"]
        prompt = known["prompts"][0]
        self.judge.answers({**known, "completions": ["", prompt]})
        if self.other:
            self.other.answers({**known, "texts": [prompt, prompt]})

    def judged(self, engine, prompts):
        """(the arguments of `readable` by name, rewards) of what the unperturbed model writes."""
        texts = self._written(engine, prompts, np.arange(len(prompts.rows)))
        return texts, self.judge.answers(texts)

    def close(self):
        for judge in filter(None, (self.judge, self.other)):
            judge.close()
