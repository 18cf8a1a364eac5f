"""Rewards: what a Python function of the user thinks of what the model writes (SPEC 22, docs/OBJECTIVES.md).

A file of --objective has a reward function of the form of TRL: reward(prompts, completions, **columns) takes lists of
one length and returns as many numbers, more is better, or None for a text that it does not judge. Optional in the file:
WEIGHTS of several such functions; DATA and HELD_OUT, lists of dicts or the names of JSON-lines files with "prompt" and
further columns; TOKENS to write after a prompt; STOP, a text that ends a completion; TEMPERATURE; reply(prompts, texts,
**columns), what the other side says after each text, and TURNS, the most texts that a dialogue has.
"""

import asyncio
import contextlib
import functools
import importlib.util
import inspect
import io
import itertools
import math
import multiprocessing
import multiprocessing.connection
import os
import pickle
import re
import signal
import sys
import threading
import time
import traceback
import types
from collections import deque, namedtuple
from numbers import Real

import numpy as np

from cluster.console import STOPPING, clean
from egg_config import EggError, OwnFolders, UsageError, explained, sha256_of, take_out
from engine import hardware
from model import data_files, rules
from model.rewards import advantages, is_text, text_draws, text_loss, text_windows
from model.steps import hash32

PROMPT_TOKENS = 16           # of the data before a completion, where the file has no DATA
HELD_OUT_TEXTS = 256         # of the unperturbed model, which are measured
SEEN_PROMPTS = 32            # after which `egg.py eval` lets it write OBJECTIVE_TEXTS
CHUNKS_SHOWN = 8             # of which a measurement shows what they have learnt from
END_SECONDS = 1.0            # for a process that judges to end its own ones
LONGEST = 1024               # tokens of a prompt and all that follows
MOST_TURNS = 64
MOST_REWARD = 1 << 30
NO_END = (1 << 31) - 1       # max_steps of a run without --steps
TRIES = 3                    # of a function that fails, or does not judge a text: it may now and then
FILES = 16                   # that a file imports or reads and that are compared, at most
LOGGED = 16                  # most columns of the texts of a measurement that are kept
SHOWN = 4                    # of the best of these texts, and of others
# what a reward function gets beside the columns of DATA, as of TRL
OURS = {"prompt", "prompts", "completions", "completion_ids", "trainer_state", "log_metric", "log_extra"}


class ObjectiveError(EggError):
    """About a file of --objective or what its function returns."""


class WrongFile(ObjectiveError, UsageError):
    """About a file of --objective that cannot be read, or that is another one."""


class Prompts(namedtuple("Prompts", "rows tokens lengths")):
    """What texts begin with. rows: int64 [n], numbers of the rows of DATA and HELD_OUT, or -1 for a window of the data;
    tokens: int32 [n, longest]; lengths: int64 [n]."""

    def part(self, number):
        """The Prompts of these numbers."""
        return Prompts(*(values[number] for values in self))


def read(path):
    """({name: value}, {name: (weight, function)}): what the file defines, as a module of its name, and what of it
    judges. Raises ObjectiveError for a file that has an error or no such function."""
    with explained(WrongFile, path, "give --objective the path of a Python file"), open(path, "rb") as file:
        source = file.read()
    place, name = os.path.abspath(path), os.path.splitext(os.path.basename(path))[0]
    if name in sys.stdlib_module_names or getattr(sys.modules.get(name), "__file__", place) != place:
        name = f"objective_{name}"                   # another module has this name
    sys.modules[name] = module = types.ModuleType(name)      # where pickle and dataclasses look for it
    module.__file__ = place
    names = vars(module)
    try:
        exec(compile(source, place, "exec"), names)
    except SyntaxError as error:
        raise ObjectiveError(f"{path}:{error.lineno or 1}: {error.msg}") from None
    except (Exception, SystemExit) as error:
        advice = "" if isinstance(error, OSError) else f": it must run by itself, as `python {path}` does"
        raise ObjectiveError(f"{path}: {_said(error)}{advice}") from None
    return names, _judging(path, names)


@contextlib.contextmanager
def _at_home(path):
    """A block in which what lies beside a file can be imported, also by the name of a folder of egg, and by processes
    of its own."""
    sys.path.insert(0, os.path.dirname(os.path.abspath(path)))
    sys.meta_path.remove(OwnFolders)
    ours = take_out(True)
    try:
        yield
    finally:
        take_out(False)
        sys.modules.update(ours)
        sys.meta_path.insert(0, OwnFolders)
        del sys.path[0]


def _judging(path, names):
    """{name: (weight, function)} of those that judge: the ones of WEIGHTS, a dict, or a list in their order; else those
    of reward_funcs, `reward`, or the only one that takes completions. Raises ObjectiveError."""
    takes = [key for key, value in names.items() if key[0] != "_" and "completions" in _parameters(value)]
    own = [key for key in takes if getattr(names[key], "__module__", None) == names["__name__"]]
    takes = own or takes                             # else they are imported
    listed = [getattr(function, "__name__", "") for function in names.get("reward_funcs", ())]
    takes = listed or takes
    alone = not listed and callable(names.get("reward"))
    weights = names.get("WEIGHTS", dict.fromkeys(["reward"] if alone else takes, 1))
    if isinstance(weights, (list, tuple)):
        weights = dict(itertools.zip_longest(takes, weights))
    if not (isinstance(weights, dict) and (len(weights) == 1 or weights and (listed or "WEIGHTS" in names)) and all(
            callable(names.get(key)) and isinstance(weight, Real) for key, weight in weights.items())):
        raise ObjectiveError(f"{path} has no function reward(prompts, completions, **columns), which returns a list of "
                             f"numbers, nor one other that takes completions (it has: {', '.join(takes) or 'none'}), "
                             "nor WEIGHTS = {name: weight} or reward_funcs of several")
    return {key: (weight, names[key]) for key, weight in weights.items()}


def _parameters(function):
    """{name: inspect.Parameter} of a function, {} of anything else."""
    with contextlib.suppress(TypeError, ValueError):
        if not inspect.isclass(function):
            return inspect.signature(function).parameters
    return {}


def files_of(path, opened):
    """{name: digest} of FILES of the files that lie beneath the directory of an objective, or the present one: what it
    imports and reads, which all workers need alike. opened: paths."""
    place, files = os.path.dirname(os.path.abspath(path)), {}
    for file in opened:
        with contextlib.suppress(ValueError, OSError):       # no .pyc of a source; it is gone
            file = importlib.util.source_from_cache(file) if file.endswith(".pyc") else file
            if file.startswith((place, os.getcwd())) and not file.startswith(sys.prefix):
                files[os.path.relpath(file, place)] = sha256_of(file)[:16]
    return dict(sorted(files.items())[:FILES])


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
            value = [row for _, row in data_files.json_lines(place, file.read(), ObjectiveError)]
    if not (isinstance(value, list) and value):
        raise ObjectiveError(f"{place}: {name} is to be a list of dicts, each with a text as \"prompt\", or the name "
                             "of a JSON-lines file of such")
    for number, row in enumerate(value, 1):
        good = False
        with contextlib.suppress(AttributeError, KeyError, TypeError, UnicodeEncodeError):
            good = row["prompt"].encode() and all(isinstance(column, str) for column in row.keys())
        if not good:
            raise ObjectiveError(f"{place}: row {number} of {name} is {str(row)[:80]!r}: must be a dict with texts as "
                                 "keys, and a text that is not empty as \"prompt\" (join the messages of a chat)")
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
    return _begun(np.full(len(starts), -1), [tokens[start:start + PROMPT_TOKENS] for start in starts])


# --- judging ---------------------------------------------------------------------------------------------------------

def judged(functions, texts, loop, state, tries=TRIES):
    """(answers, {name: [value of each text]}): the rewards, None for a text that is not judged, by functions {name:
    (weight, function)}, or what `reply` replies, None at the end of a dialogue; and what is logged of each text. Each
    function gets of `texts`, a dict of lists, what it takes; as with TRL. loop: for asynchronous ones, which run
    together; state: as trainer_state. What fails is tried again, as are texts that are not judged. Raises
    ObjectiveError."""
    try:
        answers, columns = _judged_once(functions, texts, loop, state)
    except ObjectiveError:
        if tries == 1:
            raise
        return judged(functions, texts, loop, state, tries - 1)
    missing = [i for i, answer in enumerate(answers) if answer is None]
    if missing and tries > 1 and "reply" not in functions:
        left = {name: [values[i] for i in missing] for name, values in texts.items()}
        for i, late in zip(missing, judged(functions, left, loop, state, tries - 1)[0]):
            answers[i] = late
    return answers, columns


@contextlib.contextmanager
def _blamed(name):
    """What a block raises becomes an ObjectiveError about this function."""
    try:
        yield
    except BaseException as error:                   # also SystemExit
        last = traceback.extract_tb(error.__traceback__)[-1].line or ""
        hint = ": completions are texts here, not lists of messages" * bool(re.search("[\"'](content|role)[\"']", last))
        raise ObjectiveError(f"{name} raised {_said(error)}{hint}") from error


def _judged_once(functions, texts, loop, state):
    count, columns, answers = len(texts["prompts"]), {}, {}

    def log_extra(name, values):
        if len(values) != count:
            raise ValueError(f"log_extra({name!r}) got {len(values)} values for {count} completions")
        columns[clean(str(name)[:64])] = [float(x) if isinstance(x, Real) and abs(x) < 1e300 else clean(str(x)[:100])
                                          for x in values]

    def log_metric(name, value):
        log_extra(name, [value] * count)

    lists = pickle.dumps(texts)
    for name, (_, function) in functions.items():
        # each has lists of its own, which it may empty
        passed = {**pickle.loads(lists), "trainer_state": state, "log_metric": log_metric, "log_extra": log_extra}
        takes = _parameters(function)
        every = any(parameter.kind == parameter.VAR_KEYWORD for parameter in takes.values())
        with _blamed(name):
            answers[name] = function(**{key: values for key, values in passed.items() if every or key in takes})

    async def finish(name):
        with _blamed(name):
            answers[name] = await answers[name]

    async def together(names):
        await asyncio.gather(*map(finish, names))

    if names := [name for name, answer in answers.items() if inspect.isawaitable(answer)]:
        loop.run_until_complete(together(names))
    answers = {name: _checked(name, answer, count) for name, answer in answers.items()}
    if "reply" in functions:
        return answers["reply"], {}
    sums = []
    for text, *rewards in zip(texts["completions"], *answers.values()):
        parts = [weight * reward for (weight, _), reward in zip(functions.values(), rewards) if reward is not None]
        total = sum(parts)
        if not abs(total) <= MOST_REWARD:
            raise ObjectiveError(f"{' + '.join(answers)} returned {total} for {text[:80]!r}: must be from -2^30 to "
                                 "2^30")
        sums.append(total if parts else None)
    return sums, {**columns, **(answers if len(answers) > 1 else {})}


def _checked(name, answers, count):
    """A list of `count` floats or, of `reply`, texts, each of them or None. Raises ObjectiveError for anything else."""
    kind, kinds = (str, "texts") if name == "reply" else (float, "numbers")
    if not isinstance(answers, (str, set, dict)):
        with contextlib.suppress(TypeError, ValueError, OverflowError):
            answers = [float(x + 0) if kind is float and x is not None else x for x in answers]         # text + 0 fails
    if not (isinstance(answers, list) and all(x is None or isinstance(x, kind) for x in answers)):
        raise ObjectiveError(f"{name} returned {str(answers)[:80]!r}, which is no list of {kinds}")
    if len(answers) != count:
        raise ObjectiveError(f"{name} returned {len(answers)} {kinds} for {count} completions")
    return answers


def _judge(path, name, max_steps, pipe):
    """The main function of a process that judges. It takes (a dict of lists, the step), and gives (answers, columns,
    what was printed), the first time when it has loaded the file, or a str, the error."""
    os.setpgid(0, 0)                                 # so that what the function starts ends with this process
    for number in STOPPING:                          # what it starts can be stopped, as in any program; no Ctrl-C here
        signal.signal(number, (lambda *_: None) if number == signal.SIGINT else signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPPING)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    sys.stdout = printed = io.StringIO()
    loop = asyncio.new_event_loop()                  # one for all calls, as with TRL: the locks of a file belong to it
    asyncio.set_event_loop(loop)
    stack = contextlib.ExitStack()                   # to the end of the process
    try:
        stack.enter_context(_at_home(path))
        names, functions = read(path)
        functions = {name: (1, names[name])} if name == "reply" else functions
        answers = [], {}
        while True:
            pipe.send(answers if isinstance(answers, str) else (*answers, printed.getvalue()))
            printed.seek(0)
            printed.truncate()
            texts, step = pipe.recv()
            state = types.SimpleNamespace(global_step=step, max_steps=max_steps)
            try:
                answers = judged(functions, texts, loop, state)
            except ObjectiveError as error:
                print(printed.getvalue()[-2000:], end="", file=sys.stderr)
                lines = [frame.lineno for frame in traceback.extract_tb(getattr(error.__cause__, "__traceback__", None))
                         if frame.filename == names["__file__"]]         # not of the library that it called
                answers = f"{path}:{lines[-1]}: {error}" if lines else f"{path}: {error}"
    except (EOFError, ConnectionError):              # the parent has closed the pipe, maybe with answers in it
        pass
    except EggError as error:
        pipe.send(str(error))


def _end_with_parent():
    """A parent that is killed must not leave a function behind that never returns."""
    multiprocessing.connection.wait([multiprocessing.parent_process().sentinel])
    os.killpg(0, signal.SIGKILL)


class Judge:
    """`count` processes that call the functions of a file on lists of texts, while the engine writes the next ones.
    max_steps: of the run; name: reward or reply; columns: {name: [value of each text]}, what was logged of the last
    batch."""

    _lines, _first = 0, ""     # how many were printed, and the first of them until it is told

    def __init__(self, path, count, seconds, max_steps=NO_END, name="reward"):
        self._path, self._seconds, self._name = path, seconds, name
        self._processes, self._pipes = zip(*(hardware.start_process(_judge, path, name, max_steps)
                                             for _ in range(count)))
        self.waited = 0.0                            # seconds in `finish`
        self.columns = {}
        # (pipe, first text, end) of the answers that are expected; at first that the file has loaded, however long
        self._busy = [(pipe, 0, 0) for pipe in self._pipes]
        self._until = time.monotonic() + 1e6

    def begin(self, texts, step=0):
        """Hands out a dict of lists for the functions to the processes; returns the answers to what was handed out
        before. step: updates before. Raises ObjectiveError."""
        before = self.finish()
        count = len(texts["prompts"])
        ends = [count * i // len(self._pipes) for i in range(len(self._pipes) + 1)]
        self._busy = [(pipe, a, b) for pipe, a, b in zip(self._pipes, ends, ends[1:]) if b > a]
        for pipe, a, b in self._busy:
            try:
                pipe.send(({name: values[a:b] for name, values in texts.items()}, step))
            except (pickle.PicklingError, AttributeError, TypeError) as error:
                raise ObjectiveError(f"{self._path}: a column of DATA cannot be passed to another process "
                                     f"({_said(error)}): give numbers and texts") from None
            except OSError:
                pass                                 # `finish` says why
        self._until = time.monotonic() + self._seconds
        return before

    def finish(self):
        """[float or None] or [str or None]: the rewards of what was handed out, or the replies; [] for nothing. Raises
        ObjectiveError."""
        rewards, started, self.columns = [], time.perf_counter(), {}
        busy, self._busy, problem = self._busy, [], None
        for pipe, a, b in busy:
            try:
                if not pipe.poll(max(self._until - time.monotonic(), 0)):
                    raise ObjectiveError(f"{self._path}: {self._name} did not return within {self._seconds:g} s: give "
                                         "it longer with -D OBJECTIVE_SECONDS=")
                answers = pipe.recv()
            except (EOFError, OSError):
                raise ObjectiveError(f"{self._path}: a process that judges has ended: does {self._name} end Python, or "
                                     "need more memory than there is?") from None
            if isinstance(answers, str):
                problem = problem or answers
                continue
            values, columns, printed = answers
            rewards += values
            for name, column in columns.items():
                self.columns.setdefault(name, [None] * busy[-1][2])[a:b] = column
            self._first = self._first or printed.partition("\n")[0]
            self._lines += printed.count("\n")
        if problem:
            raise ObjectiveError(problem)
        self.waited += time.perf_counter() - started
        return rewards

    def news(self):
        """[str]: how many lines were printed so far, and once the first of them."""
        first, self._first = self._first, " "
        return [f"{self._path} has printed {self._lines:,} lines: {first[:200]}".rstrip(": ")] * bool(self._lines)

    def answers(self, texts, step=0):
        """`begin` and `finish`."""
        self.begin(texts, step)
        return self.finish()

    def close(self):
        for pipe in self._pipes:
            pipe.close()
        until = time.monotonic() + END_SECONDS
        for process in self._processes:
            multiprocessing.connection.wait([process.sentinel], max(until - time.monotonic(), 0))
            with contextlib.suppress(ProcessLookupError):    # it has not begun
                os.killpg(process.pid, signal.SIGKILL)
            process.kill()


def statistics(texts, rewards, each=1):
    """{name: number} of texts and their rewards (None: not judged), for people. each: how many follow the same prompt;
    prompts_differ: the share of the prompts after which rewards differ, where there are several."""
    earned = [reward for reward in rewards if reward is not None]
    differ = [len(set(rewards[i:i + each]) - {None}) > 1 for i in range(0, len(rewards), each)]
    mean = {"mean": math.fsum(earned) / len(earned), "deviation": float(np.std(earned)), "lowest": min(earned),
            "highest": max(earned)} if earned else {}
    return {"texts": len(texts), **mean, "distinct_texts": len(set(texts)),
            "distinct_words": len(set(" ".join(texts).split())),
            **({"prompts_differ": sum(differ) / len(differ)} if each > 1 else {})}


def told(prompt, completion, reward):
    """str: a text and what it earns."""
    return f"{prompt} >>> {completion} ({'not judged' if reward is None else f'reward {reward:.4f}'})"


# --- the objective of a worker ---------------------------------------------------------------------------------------

class Objective:
    """The file of --objective at a worker. decoding: data_files.Decoding; tokens: the training data, held_out: tokens
    of VAL_FILE or None; files: see `files_of`. Raises ObjectiveError."""

    seconds = waited = 0.0     # that chunks have taken, and of these the wait for the judge
    _reads_rows = False        # whether a reward has differed with another row of DATA

    def __init__(self, cfg, path, decoding, tokens, held_out=None, processes=None, max_steps=None):
        opened = {}
        sys.addaudithook(lambda event, about: event == "open" and about[1] in ("r", "rb", "rt")
                         and opened.setdefault(os.path.abspath(str(about[0]))))
        with _at_home(path), contextlib.chdir("."), contextlib.redirect_stdout(io.StringIO()):    # a judge shows it
            names, _ = read(path)
        self.files = files_of(path, [*opened])
        self.cfg, self.path = cfg, path
        self.decoding, self.tokens = decoding, tokens
        self.write = _number(path, names, "TOKENS", 64, 1, LONGEST - 1)
        self.stop = names.get("STOP", "")
        if not isinstance(self.stop, str):
            raise ObjectiveError(f"{path}: STOP = {self.stop!r}: must be a text")
        self.turns = _number(path, names, "TURNS", 1, 1, MOST_TURNS)
        if callable(names.get("reply")) != (self.turns > 1):
            raise ObjectiveError(f"{path}: TURNS of 2 or more and a function reply(prompts, texts) need each other")
        self.temperature = _number(path, names, "TEMPERATURE", 1.0, 0.0, 100.0)
        scale = cfg.SOFTMAX_EXP_SCALE
        if not 0.5 <= self.temperature * scale <= 64:
            raise ObjectiveError(f"{path}: TEMPERATURE = {self.temperature:g}: must be from {0.5 / scale:.2g} to "
                                 f"{64 / scale:.2g}: equal texts teach nothing; MEASURE_TEMPERATURE = 0 measures the "
                                 "likeliest")
        measured = _number(path, names, "MEASURE_TEMPERATURE", self.temperature, 0.0, 100.0)
        self.settings, self.measuring = (rules.sampling_settings(cfg, value, 0.0, 0.0)
                                         for value in (self.temperature, measured))
        if decoding is None:
            raise ObjectiveError(f"{cfg.DECODING_FILE} is missing, and without it tokens are no text")
        rows, kept_out = (_rows(path, names, name) for name in ("DATA", "HELD_OUT"))
        self.rows = rows if kept_out or len(rows) < 10 else [row for i, row in enumerate(rows) if i % 10]
        kept_out = kept_out or rows[::10]
        self._columns = sorted({name for row in rows + kept_out for name in row} - OURS)
        self._known = self.rows + kept_out
        encoded = [self._encoded(row["prompt"]) for row in self._known]
        self._of_rows = _begun(np.arange(len(encoded)), encoded)
        self.held_out = self._held_out_prompts(len(kept_out), tokens if held_out is None else held_out, measured > 0)
        judge = functools.partial(Judge, path, processes or hardware.cores(), cfg.OBJECTIVE_SECONDS,
                                  max_steps or NO_END)
        self.judge = judge()
        self.other = judge("reply") if self.turns > 1 else None
        self.learnt = deque(maxlen=CHUNKS_SHOWN)                 # (completions, rewards) of the last chunks

    def _encoded(self, text, before=0):
        """int32: the tokens of a prompt, or of its part behind `before` tokens. Raises ObjectiveError for one that is
        too long, DataError for one that the model has no tokens for."""
        prompt = data_files.encoded(self.cfg, self.decoding, text.encode("utf-8", "replace"))
        if before + len(prompt) + self.write > LONGEST:
            kind = "dialogue up to the reply" if before else "prompt"
            raise ObjectiveError(f"{self.path}: the {kind} {text[:40]!r} ... has {before + len(prompt)} tokens, with "
                                 f"TOKENS = {self.write} more than {LONGEST}: shorten it")
        return prompt

    def _held_out_prompts(self, rows, tokens, drawn):
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

    def _ended(self, tokens, through=False):
        """(tokens, text) of a completion, to where it ends; through: with the tokens of STOP."""
        data = self.decoding.decode(tokens)
        if self.stop:
            data, stop, _ = data.partition(self.stop.encode())
            ends = np.cumsum(lengths := self.decoding.lengths[tokens])
            tokens = tokens[ends - lengths < len(data) + len(stop) * through]
        return tokens, data.decode("utf-8", "replace")

    def _readable(self, prompts, completions):
        """The dict of lists for a function. completions: int32 [n, TOKENS]."""
        rows = [self._known[row] if row >= 0 else {} for row in prompts.rows]
        ids, texts = zip(*map(self._ended, completions))
        first = [row.get("prompt") or data_files.text(self.decoding, begun[:n])
                 for row, begun, n in zip(rows, prompts.tokens, prompts.lengths)]
        return {"prompts": first, "completions": list(texts), "completion_ids": [x.tolist() for x in ids],
                **{name: [row.get(name) for row in rows] for name in self._columns}}

    def _written(self, engine, prompts, seeds, settings):
        """(the dict of lists for a function; [int32 [n]]: each prompt and what follows; [bool [n]]: what of that the
        engine wrote). seeds: int64 [n], of the draws."""
        completions = self._continued(engine, prompts, seeds, settings)
        texts = self._readable(prompts, completions)
        begun = [tokens[:n] for tokens, n in zip(prompts.tokens, prompts.lengths)]
        own = [np.zeros(n, bool) for n in prompts.lengths]
        if self.turns > 1:
            texts["completions"] = self._dialogues(engine, prompts, seeds, settings, texts, completions, begun, own)
            texts["completion_ids"] = [self.decoding.encode(text.encode("utf-8", "replace")).tolist()
                                       for text in texts["completions"]]
        ends = [self._ended(tokens, True)[0] for tokens in completions]
        return (texts, list(map(np.append, begun, ends)),
                [np.append(before, np.ones(len(end), bool)) for before, end in zip(own, ends)])

    def _dialogues(self, engine, prompts, seeds, settings, known, completions, begun, own):
        """[str]: all that follows the prompts. known: the dict of the first texts; completions: their tokens, and then
        the last ones; begun, own: go on to what is before these (see `_written`)."""
        dialogues, texts = [*known["prompts"]], known["completions"]
        live = range(len(begun))                     # dialogues that go on; the others are written on, but not used
        for turn in range(1, self.turns):
            replies = self.other.answers({**{name: [known[name][i] for i in live] for name in self._columns},
                                          "prompts": [dialogues[i] for i in live], "texts": [texts[i] for i in live]},
                                         engine.step)
            replies = {i: reply for i, reply in zip(live, replies) if reply is not None}
            if not (live := list(replies)):
                break
            for i, reply in replies.items():
                text = self._ended(completions[i])[0]
                heard = self._encoded(reply, len(begun[i]) + len(text))
                begun[i] = np.concatenate([begun[i], text, heard])
                own[i] = np.concatenate([own[i], np.ones(len(text), bool), np.zeros(len(heard), bool)])
                dialogues[i] += texts[i] + reply
            continued = self._continued(engine, _begun(prompts.rows, begun), hash32(seeds, turn), settings)
            for i in live:
                completions[i] = continued[i]
                texts[i] = self._ended(continued[i])[1]
        return [(dialogue + text).removeprefix(prompt) for prompt, dialogue, text in
                zip(known["prompts"], dialogues, texts)]

    def _continued(self, engine, prompts, seeds, settings):
        """int32 [n, TOKENS]: what the engine writes behind Prompts."""
        texts = np.pad(prompts.tokens[:, :prompts.lengths.max()], ((0, 0), (0, self.write)))
        engine.write(texts, prompts.lengths, seeds.astype(np.uint32), settings)
        return np.take_along_axis(texts, prompts.lengths[:, None] + np.arange(self.write), 1)

    def texts(self, engine, first, check):
        """([int32 [n]], [bool [n]], [float or None]): the texts of a chunk, a text for each of its windows from number
        `first` of this step on, as `_written` gives them, and their rewards. check(): called between slices."""
        cfg = self.cfg
        self.judge.finish()                          # what is left of a chunk that was given up
        choices, seeds = text_draws(cfg, engine.seed, first, cfg.CHUNK_SIZE)
        each = max(1, engine.TEXTS_AT_ONCE // cfg.OBJECTIVE_TEXTS) * cfg.OBJECTIVE_TEXTS
        sequences, own, earned = [], [], []
        for at in range(0, len(seeds), each):
            texts, begun, written = self._written(engine, self.prompts(choices[at:at + each]), seeds[at:at + each],
                                                  self.settings)
            earned += self.judge.begin(texts, engine.step)
            sequences, own = sequences + begun, own + written
            check()
        last = self.judge.finish()
        self.learnt.append((texts["completions"], last))
        return sequences, own, earned + last

    def chunk(self, engine, first, check):
        """(packed digits, sum of losses) of the chunk that begins with window `first`: it votes from the data or from
        the rewards of texts."""
        cfg, started, waited = self.cfg, time.perf_counter(), self.judge.waited
        if is_text(cfg, engine.step, first // cfg.CHUNK_SIZE):
            packed, loss = engine.evaluate(first, cfg.CHUNK_SIZE)
            loss = text_loss(cfg, engine.step, loss)
        else:
            loss, (sequences, own, earned) = 0, self.texts(engine, first, check)
            windows = text_windows(sequences, own, advantages(cfg, earned))
            if len(windows[0]):
                packed = engine.vote(first, *windows, self.temperature)
            else:                                    # equal rewards are no votes
                packed = bytes(cfg.CHUNK_BYTES)
        self.seconds += time.perf_counter() - started
        self.waited += self.judge.waited - waited
        return packed, loss

    @property
    def texts_a_step(self):
        """That are judged, of all workers, in the mean."""
        return round(self.cfg.POPULATION_SIZE * (1 - self.cfg.TEXT_SHARE))

    def measured(self, engine):
        """(number of texts after held-out prompts, their mean reward, what Progress.rewarded shows beside it) of the
        unperturbed model; the same draws every time."""
        texts, rewards = self.judged(engine, self.held_out)
        prompts, completions = texts["prompts"], texts["completions"]
        columns, whole = dict(itertools.islice(self.judge.columns.items(), LOGGED)), " ".join(completions)
        numbers = {**statistics(completions, rewards), "words_a_text": len(whole.split()) / len(completions),
                   "letters_a_text": sum(map(str.isalpha, whole)) / len(completions),
                   **self._with_other_rows(texts, rewards, engine.step)}
        if self.learnt:
            written = [text for part, _ in self.learnt for text in part]
            earned = [reward for _, part in self.learnt for reward in part]
            learnt = statistics(written, earned, self.cfg.OBJECTIVE_TEXTS)
            numbers.update((f"seen_{name}", number) for name, number in learnt.items())
        if self.seconds:
            numbers.update(judged=self.texts_a_step * max(engine.step - 1, 0), waiting=self.waited / self.seconds,
                           written_a_step=self.texts_a_step * self.write * self.turns)
        for name, column in columns.items():
            if values := [x for x in column if isinstance(x, float)]:
                numbers[f"logged_{name}"] = math.fsum(values) / len(values)
        names = ["prompt", "completion", "reward", *columns]
        rows = [dict(zip(names, (clean(prompt[-200:]), clean(text[:1000]), *values)))
                for prompt, text, *values in zip(prompts, completions, rewards, *columns.values())]
        best = sorted((row for row in rows if row["reward"] is not None), key=lambda row: -row["reward"])
        return numbers.pop("texts"), numbers.pop("mean", None), {
            "numbers": numbers, "completions": best[:SHOWN] + rows[::-(-len(rows) // SHOWN)],
            "news": "\n".join(line for judge in (self.judge, self.other) if judge for line in judge.news())}

    def _with_other_rows(self, texts, rewards, step):
        """{"with_other_rows": the mean reward of the same texts with the prompts and columns of other rows}; {} while
        that makes no difference to any text."""
        turn = len(set(self.held_out.rows.tolist())) // 2
        others = {name: values if name.startswith("completion") else values[turn:] + values[:turn]
                  for name, values in texts.items()}
        with contextlib.suppress(ObjectiveError):    # it may need texts that belong to their rows
            earned = self.judge.answers(others, step) if turn else rewards
            self._reads_rows |= earned != rewards
            if self._reads_rows:
                return {"with_other_rows": statistics([], earned).get("mean", 0.0)}
        return {}

    def measure_seen(self, engine):
        """Lets `measured` tell also of what the model writes to learn from, after prompts that are not held out."""
        count, each = len(self.rows) or len(self.tokens) - PROMPT_TOKENS, self.cfg.OBJECTIVE_TEXTS
        numbers = np.arange(SEEN_PROMPTS).repeat(each) * count // SEEN_PROMPTS
        texts, rewards = self.judged(engine, self.prompts(numbers), self.settings)
        self.learnt.append((texts["completions"], rewards))

    def sample(self, engine, number):
        """str: a held-out prompt, what the unperturbed model writes, its reward."""
        texts, (reward,) = self.judged(engine, self.held_out.part([number % len(self.held_out.rows)]))
        return told(texts["prompts"][0], texts["completions"][0], reward)

    def try_out(self):
        """Lets the function judge an empty text and a prompt, and reply to the prompt. Raises ObjectiveError."""
        known = self._readable(self.held_out.part([0, 0]), np.zeros((2, 0), np.int32))
        texts = ["", known["prompts"][0]]
        self.judge.answers({**known, "completions": texts})
        if self.other:
            self.other.answers({**known, "texts": texts[1:] * 2})

    def judged(self, engine, prompts, settings=None):
        """(the dict of lists for a function, rewards) of what the unperturbed model writes."""
        texts = self._written(engine, prompts, np.arange(len(prompts.rows)), settings or self.measuring)[0]
        return texts, self.judge.answers(texts, engine.step)

    def close(self):
        for judge in filter(None, (self.judge, self.other)):
            judge.close()
