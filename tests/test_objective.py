"""Rewards: the model writes texts, a file judges them, and runs learn from that (docs/OBJECTIVES.md)."""

import contextlib
import hashlib
import json
import os
import re
import runpy
import shutil
import signal
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest

import egg
import egg_config
from cluster import history
from cluster import wire
from cluster.console import Console, STOPPING, rewards_text
from cluster.status import Progress, describe_status
from cluster.wire import FrameError
from coordinators import Server, refused, run_worker, until
from engine import cpu_engine
from fakes import FakeEngine, FakeObjective, Lines, REWARDED, VALIDATION, changed
from pages import EVERYBODY, ask, page_shows, parse_metrics, state_of
from run_logs import events, of_kind
from model import data_files, rewards
from readings import equal
from tools import objective, train
from tools.curves import read_curve
from commands import succeeds
import commands

COMPILED = ["compiled", "compiled_gru"]                      # for conftest.py
HERE = egg_config.ROOT
CFG = egg_config.make(
    MODEL="gru", HIDDEN_DIM=64, N_LAYERS=1, SEQ_LEN=16, VOCAB_SIZE=256, LOSS="exact", CHUNK_SIZE=8, POPULATION_SIZE=16,
    ADAPTIVE_NOISE_MODE=0, PERTURB="units", VALIDATE_EVERY=0, SAMPLE_EVERY=0, AUDIT_RATE=0.0,
    OBJECTIVE="x", OBJECTIVE_TEXTS=4, OBJECTIVE_SECONDS=60.0)
TOKENS = np.frombuffer(b"the king said that the queen was here. " * 20, np.uint8)
BYTES = data_files.Decoding([bytes([b]) for b in range(256)])
LETTERS = """
TOKENS = 6
def reward(prompts, completions, **columns):
    return [sum(letter.isalpha() for letter in text) for text in completions]
"""


def new_engine(cfg=CFG):
    return cpu_engine.CpuEngine(cfg, TOKENS, threads=1)


def go_on():
    """Whether the coordinator is still there: it is."""


def rewards_of(own, engine=None, first=0):
    return np.array(own.texts(engine or new_engine(), first, go_on)[2])


@pytest.fixture
def judged(tmp_path, monkeypatch):
    """A function that opens an Objective with the text of a file."""
    monkeypatch.setattr(sys, "path", sys.path[:])    # which gets the file's directory
    with contextlib.ExitStack() as opened:
        def make(text, cfg=CFG, name="own.py", processes=1):
            (tmp_path / name).write_text(text)
            made = objective.Objective(cfg, str(tmp_path / name), BYTES, TOKENS, processes=processes)
            return opened.enter_context(contextlib.closing(made))
        yield make


def test_a_chunk_votes_from_the_data_or_from_texts(judged):
    cfg = CFG.changed(TEXT_SHARE=0.5)
    own, engine = judged(LETTERS, cfg), new_engine(cfg)
    text, other = sorted(range(2), key=lambda chunk: not rewards.is_text(cfg, 0, chunk))
    digits, loss = engine.evaluate(8 * text, 8)
    assert rewards.is_text(cfg, 0, text) and own.chunk(engine, 8 * text, go_on) == (digits, 2 * loss)
    assert not rewards.is_text(cfg, 0, other)
    packed, loss = own.chunk(engine, 8 * other, go_on)
    sequences, written, earned = own.texts(engine, 8 * other, go_on)
    windows = rewards.text_windows(sequences, written, rewards.advantages(cfg, earned))
    assert loss == 0 and any(packed) and packed == engine.vote(8 * other, *windows, 1.0)
    begun = [tuple(tokens[:16]) for tokens in sequences]
    assert len(set(begun[:4])) == len(set(begun[4:])) == 1 < len({tuple(tokens) for tokens in sequences[:4]})
    assert all(tokens.size == 22 and own.sum() == own[16:].sum() == 6 for tokens, own in zip(sequences, written))


def test_a_text_votes_up_to_the_token_with_which_it_ends():
    own = SimpleNamespace(decoding=data_files.Decoding([b"x", b"a", b"ba", b"bab"]), stop="ab")
    for tokens, known, voting in ([0, 1, 2, 0], [0], [0, 1, 2]), ([0, 2, 3, 0], [0, 2], [0, 2, 3]), \
            ([3, 0], [3], [3]), ([0, 2], [0, 2], [0, 2]):
        tokens = np.array(tokens, np.int32)
        assert objective.Objective._ended(own, tokens)[0].tolist() == known
        assert objective.Objective._ended(own, tokens, True)[0].tolist() == voting


@pytest.mark.parametrize("kind", ["def", "async def"])
def test_a_reward_function_of_trl_runs_as_it_is(judged, tmp_path, kind):
    rows = [{"prompt": f"{a}+{b}=", "answer": str(a + b), "kind": "sum"} for a in range(5) for b in range(4)]
    (tmp_path / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    own = judged("""
DATA = "sums.jsonl"
TOKENS = 3
STOP = "."
""" + kind + """ reward(completions, answer, **kwargs):
    assert len(completions) == len(answer) == len(kwargs["prompts"]) == len(kwargs["kind"])
    assert not any("." in text for text in completions)
    return [10.0 if str(eval(prompt[:-1])) == right else -1.0 for prompt, right in zip(kwargs["prompts"], answer)]
""")
    assert len(own.rows) == 18 and own.held_out.rows.tolist() == [18, 19] * 128    # every tenth is held out
    assert own.measured(new_engine())[:2] == (256, 10.0)


JUDGES = """
def any_name(prompts, completions, **columns):
    return [len(text) for text in completions]

from helpers import longer, shorter
_other = longer
def own(completions):
    return longer(completions)

from helpers import longer

import functools
from helpers import shorter as reward
def longer(completions):
    return [9]
reward = functools.partial(reward, sign=1)

class Judge:
    def __init__(self, completions=()):
        pass
    def __call__(self, completions):
        return [len(text) for text in completions]
judge = Judge()

from helpers import longer, shorter
WEIGHTS = {'longer': 2, 'shorter': 1.0}

def a(completions):
    return [3 * len(text) for text in completions]
async def b(completions):
    return [-4 * len(text) for text in completions]
WEIGHTS = [1, 0.5]

from helpers import longer, shorter
def twice(completions):
    return [2 * len(text) for text in completions]
reward_funcs = [twice, shorter]

from helpers import longer
def b(completions):
    return [2] * len(completions)
reward_funcs, WEIGHTS = [b, longer], [0, 1]
"""                      # files


@pytest.mark.parametrize("text", JUDGES.strip().split("\n\n"))
def test_what_judges_is_reward_or_the_only_function_that_takes_completions_or_those_of_weights(judged, tmp_path, text):
    (tmp_path / "helpers.py").write_text("""
def longer(completions):
    return [len(text) for text in completions]
def shorter(completions, sign=-1):
    return [sign * len(text) for text in completions]
""")
    own = judged(text)
    assert own.judge.answers({"prompts": ["x", "y"], "completions": ["abc", ""]}) == [3.0, 0.0]


def test_a_text_that_no_function_judges_has_no_reward_no_vote_and_no_part_in_the_figures(judged):
    cfg = CFG.changed(TEXT_SHARE=0.0)
    own = judged("""
TOKENS, WEIGHTS = 6, {"long": 2.0, "short": 1.0}
def long(completions):
    return [len(text) if len(text) > 4 else None for text in completions]
def short(completions):
    return [1 if len(text) in (3, 5) else None for text in completions]
""", cfg)
    texts = ["abc", "abcd", "abcde", "abcdef"]
    assert own.judge.answers({"prompts": texts, "completions": texts}) == [1.0, None, 11.0, 12.0]
    assert own.judge.columns == {"long": [None, None, 5.0, 6.0], "short": [1.0, None, 1.0, None]}
    figures = objective.statistics(texts, [1.0, None, 11.0, 12.0], 2)
    assert figures == {"texts": 4, "mean": 8.0, "deviation": figures["deviation"], "lowest": 1.0, "highest": 12.0,
                       "distinct_texts": 4, "distinct_words": 4, "prompts_differ": 0.5}
    own = judged("def reward(completions):\n    return [None] * len(completions)\n", cfg, "none.py")
    packed, _ = own.chunk(new_engine(cfg), 0, go_on)
    assert not any(packed) and own.measured(new_engine())[:2] == (256, None)
    assert own.sample(new_engine(), 0).endswith(" (not judged)")
    assert rewards_text(256, None, {}).startswith("none judged of 256 texts")
    assert "mean" not in own.measured(new_engine())[2]["numbers"]


def test_each_function_gets_lists_of_its_own(judged):
    """It may empty them, and what is in them."""
    own = judged("""
TOKENS = 6
WEIGHTS = {"first": 1, "second": 100}
def first(completions, completion_ids, **columns):
    [ids.clear() for ids in completion_ids]
    return [len(completions.pop(0)) for _ in [*completions]]
def second(completions, completion_ids):
    return [len(text) if ids else 0 for text, ids in zip(completions, completion_ids)]
""")
    texts, earned = own.judged(new_engine(), own.held_out)
    assert earned == [101 * len(text) for text in texts["completions"]] and sum(earned) > 0


def test_a_file_may_lie_beside_modules_with_the_names_of_our_folders(judged, tmp_path):
    """Also where it is one of them, and imports them late, or in a process of its own."""
    (tmp_path / "engine.py").write_text("def worth(text):\n    return float(len(text))\n")
    own = judged("""
import multiprocessing
import engine
TOKENS = 6
pools = []
def reward(completions):
    from engine import worth
    pools.append(pools[0] if pools else multiprocessing.get_context("spawn").Pool(1))
    return [worth(text) + 1 for text in pools[0].map(str, completions)] if pools[0].map(engine.worth, "a") else None
""", name="model.py")
    assert (rewards_of(own) > 0).all()
    from engine import hardware
    assert vars(sys.modules["model"])["__path__"] == [os.path.join(HERE, "model")] and hardware.cores


def test_a_function_gets_what_trl_gives(judged):
    own = judged("""
TOKENS, STOP, DATA = 6, "e", [{"prompt": "the king", "answer": "x"}] * 20
def reward(prompts, completions, completion_ids, trainer_state, log_metric, log_extra, **columns):
    assert set(columns) == {"answer"} and trainer_state.max_steps == 2 ** 31 - 1
    for text, ids in zip(completions, completion_ids):
        assert type(ids) is list and bytes(ids).decode(errors="replace") == text
    log_metric("step", trainer_state.global_step)
    log_extra("length", [len(ids) for ids in completion_ids])
    log_extra("text", completions)
    return [float(trainer_state.global_step)] * len(completions)
""", processes=2)
    engine = new_engine()
    engine.step = 7
    count, mean, shown = own.measured(engine)
    assert (count, mean, shown["numbers"]["logged_step"]) == (256, 7.0, 7.0)
    assert 0 < shown["numbers"]["logged_length"] <= 6 and len(shown["completions"]) == 8
    for row in shown["completions"]:
        assert row["prompt"] == "the king" and row["completion"] == row["text"] and row["reward"] == 7.0
        assert len(row["completion"].encode()) >= row["length"] - 5 and "e" not in row["completion"]


@pytest.mark.parametrize("name", ["own.py", "json.py"])
def test_a_file_is_a_module(judged, name):
    own = judged("""
from __future__ import annotations
import concurrent.futures
import dataclasses
import multiprocessing
import pickle
@dataclasses.dataclass
class Score:
    text: str
def length(score):
    return len(score.text)
def reward(completions):
    @dataclasses.dataclass
    class Inner:
        value: float
    scores = pickle.loads(pickle.dumps([Score(text) for text in completions]))
    with concurrent.futures.ProcessPoolExecutor(1) as pool:
        first = list(pool.map(length, scores))
    with multiprocessing.get_context("fork").Pool(1) as pool:
        assert first == pool.map(length, scores)
    if __name__ == "own":
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            assert first == pool.map(length, scores)
    return [Inner(value).value for value in first]
""", name=name)
    assert own.judge.answers({"prompts": ["", ""], "completions": ["a", "bc"]}) == [1.0, 2.0]


def test_what_a_function_prints_is_shown_once_and_then_counted(judged, capfd):
    own = judged("""
print("it loads")
def reward(completions):
    print("it judges", *range(len(completions)), sep="\\n")
    return [0] * len(completions)
""")
    engine = new_engine()
    assert own.measured(engine)[2]["news"] == f"{own.path} has printed 258 lines: it loads"
    assert own.measured(engine)[2]["news"] == f"{own.path} has printed 515 lines"
    assert "it " not in "".join(capfd.readouterr())
    failing = judged("def reward(completions):\n    print('the last words')\n    return 1 / 0\n", name="fails.py")
    with refused("reward raised ZeroDivisionError", objective.ObjectiveError):
        failing.try_out()
    assert "the last words\n" in capfd.readouterr().err


GAME = """
DATA = [{"prompt": "ab", "secret": "x"}, {"prompt": "abcd", "secret": "y"}]
HELD_OUT, TOKENS, TURNS, MEASURE_TEMPERATURE = DATA, 2, 3, 0
def reply(prompts, texts, secret, **columns):
    return [f"<{hidden}{len(prompt + text)}>" for prompt, text, hidden in zip(prompts, texts, secret)]
def reward(prompts, completions):
    return [float(prompt in ("ab", "abcd") and text.count("<") == 2) for prompt, text in zip(prompts, completions)]
"""


def speaking(engine):
    """[(seeds, texts so far)] of the calls of an engine's `write`, which writes two letters."""
    writes = []

    def write(texts, lengths, seeds, *more):
        for text, n, seed in zip(texts, lengths, seeds):
            text[n:n + 2] = 65 + seed % 2, 66 + len(writes)
        writes.append((seeds, [bytes(text[:n].astype(np.uint8)).decode() for text, n in zip(texts, lengths)]))

    engine.write = write
    return writes


def test_the_other_side_replies_after_each_text_but_the_last(judged):
    writes, own = speaking(engine := new_engine()), judged(GAME)
    texts, earned = own.judged(engine, objective.Prompts(*(np.concatenate([of, of]) for of in own.held_out)))
    assert texts["prompts"] == ["ab", "abcd"] * 2 and earned == [1.0] * 4
    letter = "AB"
    later = [objective.hash32(np.arange(4, dtype=np.uint32), np.full(4, turn, np.uint32)) % 2 for turn in (1, 2)]
    assert texts["completions"][1] == f"BB<y6>{letter[later[0][1]]}C<y12>{letter[later[1][1]]}D"
    assert writes[2][1][0] == "abAB<x4>" + letter[later[0][0]] + "C<x10>"
    writes.clear()
    sequences, own_tokens, earned = own.texts(engine, 0, go_on)
    assert len(writes) == 3 and earned == [1.0] * 8
    assert all(len(set(seeds.tolist())) == 8 for seeds, _ in writes)
    assert len(set(writes[0][1][:4])) == len(set(writes[0][1][4:])) == 1
    for tokens, written in zip(sequences, own_tokens):       # what the other side says has no vote
        text, prompt = bytes(tokens.astype(np.uint8)).decode(), 2 if tokens[2] in (65, 66) and tokens[3] == 66 else 4
        said = "".join(letter for letter, here in zip(text, written) if here)
        assert re.fullmatch("[AB]B[AB]C[AB]D", said) and not written[:prompt].any()
        assert text == f"{text[:prompt]}{said[:2]}<{text[prompt + 3]}{prompt + 2}>{said[2:4]}" + \
            f"<{text[prompt + 3]}{prompt + 8 + len(str(prompt + 2)) - 1}>{said[4:]}"


def test_a_dialogue_ends_where_the_other_side_replies_none(judged):
    writes = speaking(engine := new_engine())
    own = judged("""
DATA = HELD_OUT = [{"prompt": "ab", "left": 0}, {"prompt": "abc", "left": 1}, {"prompt": "abcd", "left": 2}]
TOKENS, TURNS = 2, 9
def reply(prompts, texts, left):
    return [None if n == prompt.count("<") else "<>" for prompt, n in zip(prompts, left)]
def reward(completions, completion_ids):
    assert [bytes(ids).decode() for ids in completion_ids] == completions
    return [len(text) for text in completions]
""")
    texts, rewards = own.judged(engine, own.held_out.part([0, 1, 2]))
    assert [re.sub("[AB]([BCD])", r"\1", text) for text in texts["completions"]] == ["B", "B<>C", "B<>C<>D"]
    assert len(writes) == 3 and rewards == [2.0, 6.0, 10.0]      # nothing is written once all have ended


def test_a_vocabulary_of_another_model_is_one_line(judged, monkeypatch):
    monkeypatch.setattr(sys.modules[__name__], "BYTES", data_files.Decoding([*(bytes([b]) for b in range(256)), b"ab"]))
    with refused("decoding.bin has 257 tokens, the model 256: give the decoding.bin", data_files.DataError):
        judged(GAME)


WRONG = r"""
def reward(completions)
    pass
==> own.py:1: expected ':'

LETTERS
DATA = [{'prompt': 'x', 'check': lambda text: 1}]
==> a column of DATA cannot be passed

import nowhere
==> ModuleNotFoundError: No module named 'nowhere'

x = 1
==> has no function reward

def a(completions):
    pass
def b(completions):
    pass
==> own.py has no function reward.*\(it has: a.*\), nor WEIGHTS

def a(completions):
    pass
WEIGHTS = {'b': 1}
==> own.py has no function reward.*\(it has: a.*\), nor WEIGHTS

def a(completions):
    pass
WEIGHTS = [1, 2]
==> own.py has no function reward.*\(it has: a.*\), nor WEIGHTS

def a(completions):
    pass
WEIGHTS = {'a': '1'}
==> own.py has no function reward.*\(it has: a.*\), nor WEIGHTS

def a(completions):
    pass
WEIGHTS = {}
==> own.py has no function reward.*\(it has: a.*\), nor WEIGHTS

LETTERS
TEMPERATURE = 0
==> TEMPERATURE = 0: must be from 0.083 to 11: equal texts teach nothing; MEASURE_TEMPERATURE = 0

import sys
sys.exit(0)
==> SystemExit: 0: it must run by itself

LETTERS
STOP = 3
==> STOP = 3: must be a text

LETTERS
TOKENS = 0
==> TOKENS = 0: must be a whole number from 1

LETTERS
DATA = [{'prompt': 'x'}, {'text': 'x'}]
==> row 2 of DATA is .*: must be a dict

LETTERS
DATA = [{'prompt': '\ud83d'}]
==> row 1 of DATA is .*ud83d

LETTERS
HELD_OUT = []
==> HELD_OUT is to be a list of dicts

LETTERS
DATA = 'nowhere.jsonl'
==> nowhere.jsonl: No such file

LETTERS
DATA = [{'prompt': 'x' * 5000}]
==> has 5000 tokens, with TOKENS = 6 more than 1024

def reward(completions):
    return [float('nan')] * len(completions)
==> returned nan for

LETTERS
DATA = [{'prompt': [{'role': 'user', 'content': 'x'}]}]
==> not empty as .* \(join the messages

def reward(completions, log_extra):
    log_extra('n', [1])
    return [1]
==> log_extra\('n'\) got 1 values for 8 completions

def reward(completions):
    return 3
==> returned '3', which is no list of numbers

def reward(completions):
    return '5' * len(completions)
==> returned '55555555', which is no list of numbers

def reward(completions):
    return [1]
==> returned 1 numbers for 8 completions

def reward(completions):
    return [1 / 0]
==> own.py:2: reward raised ZeroDivisionError

import json
def reward(completions):
    return json.loads('[')
==> own.py:3: reward raised JSONDecodeError

def reward(completions, answer):
    return answer
==> own.py: reward raised TypeError: .* 'answer'

def reward(completions):
    return [10 ** 400] * len(completions)
==> 000.*, which is no list of numbers

def a(completions):
    return [1] * len(completions)
def b(completions):
    raise ValueError('no')
WEIGHTS = [1, 1]
==> own.py:4: b raised ValueError: no

def reward(completions):
    return [len(completion[0]['content']) for completion in completions]
==> own.py:2: reward raised .*Error: .*: completions are texts here, not lists of messages

class Odd(Exception):
    __str__ = None
def reward(completions):
    raise Odd
==> own.py:4: reward raised Odd

def reward(completions):
    import os; os._exit(3)
==> a process that judges has ended

GAME
def reply(texts):
    return 'a'
==> reply returned 'a', which is no list of texts

GAME
def reply(texts):
    return texts[:1]
==> reply returned 1 texts for 8 completions

GAME
def reply(texts):
    return ['x' * 5000] * len(texts)
==> up to the reply 'xx.*, with TOKENS = 6 more than 1024

def reward(completions):
    import time; time.sleep(99)
==> did not return within 0.05 s: give it longer
"""                      # a file, and what is said of it


@pytest.mark.parametrize("text, words", [
    ("x = '\0'", "own.py:1: source code .*null bytes"),
    (GAME.replace("3", "1"), "TURNS of 2 or more and a function reply"),
    *(block.split("\n==> ") for block in WRONG.strip().split("\n\n"))])
def test_what_a_file_does_wrong_is_one_line(judged, text, words):
    text = text.replace("LETTERS", LETTERS).replace("GAME", GAME)
    with refused(words, objective.ObjectiveError):
        own = judged(text, CFG.changed(OBJECTIVE_SECONDS=0.05 if "sleep" in text else 60.0))
        own.write = 6
        rewards_of(own)


def test_the_time_in_which_a_file_loads_is_not_that_of_its_texts(judged):
    own = judged("import time\ntime.sleep(1)\n" + LETTERS, CFG.changed(OBJECTIVE_SECONDS=0.4))
    assert rewards_of(own).any()
    own.judge._seconds = 1e6                         # the longest of OBJECTIVE_SECONDS
    assert rewards_of(own).any()


@pytest.mark.parametrize("line, words", [
    (b"{'prompt': 'x'}", r"data:3: Expecting property name.*: every line is to be a JSON object"),
    (b'{"prompt": "\xff"}', r"data:3: 'utf-8' codec"),
    (b'["x"]', r"data: row 2 of DATA is \"\['x'\]\": must be a dict")])
def test_a_line_that_is_no_row_is_named(judged, tmp_path, line, words):
    (tmp_path / "data").write_bytes(b'{"prompt": "x"}\n\n' + line + b"\n")
    with refused(words, objective.ObjectiveError):
        judged(LETTERS + "DATA = 'data'\n")


def test_what_a_file_may_do(judged, tmp_path, monkeypatch):
    """It changes the directory, imports what lies beside it, counts with NumPy, replies with a tuple of nothing and of
    what is no text."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "beside.py").write_text("ONE = 1\n")
    own = judged("""
import os
import numpy
DATA = [{"prompt": "a"}]
TOKENS, TURNS, TEMPERATURE, MEASURE_TEMPERATURE = numpy.int64(2), 2, 0.5, 0
os.chdir("/")
def reward(completions):
    import beside
    assert os.getcwd() == "/"
    return numpy.full(len(completions), beside.ONE)
def reply(texts):
    return ("", "\\ud800", *texts[2:])
""")
    own.try_out()
    assert (own.settings.temp, own.measuring.temp) == (0.5, 0)
    assert own.write == 2 and rewards_of(own).all() and os.getcwd() == str(tmp_path)


def answers_of(own, *texts):
    return own.judge.answers({"prompts": ["x"] * len(texts), "completions": list(texts)})


def test_a_judge_has_the_signals_of_any_process_although_its_worker_ignores_them(judged):
    """Else a pool, which ends its processes by SIGTERM, waits for ever."""
    before = {number: signal.signal(number, signal.SIG_IGN) for number in STOPPING}
    try:
        own = judged("""
import multiprocessing, signal, subprocess
def reward(completions):
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL and not signal.pthread_sigmask(signal.SIG_BLOCK, [])
    child = subprocess.Popen(["sleep", "600"])
    child.terminate()
    assert child.wait() == -signal.SIGTERM
    with multiprocessing.Pool(2) as pool:
        return pool.map(len, completions)
""", CFG.changed(OBJECTIVE_SECONDS=20.0))
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    assert answers_of(own, "a", "bc") == [1.0, 2.0]


def test_a_function_that_fails_now_and_then_is_asked_again(judged):
    own = judged("""
calls = 0
def reward(completions, log_extra):
    global calls
    calls += 1
    if calls % 3 == 1:
        raise OSError("the server is busy")
    log_extra("call", [calls] * len(completions))
    return [None if text == "late" and calls % 3 else len(text) for text in completions]
""")
    for at in 0, 3:
        assert answers_of(own, "a", "late", "bc") == [1.0, 4.0, 2.0]
        assert own.judge.columns == {"call": [at + 2.0] * 3}


def test_functions_that_wait_run_together_in_one_event_loop(judged):
    """Of all calls: the barrier belongs to the loop of the first."""
    own = judged("""
import asyncio
gate = asyncio.Barrier(2)
async def a(completions):
    await gate.wait()
    return [1] * len(completions)
async def b(completions):
    await gate.wait()
    return [2] * len(completions)
WEIGHTS = [1, 10]
""")
    for _ in range(2):
        assert answers_of(own, "a", "bc") == [21.0, 21.0]


def test_what_a_file_imports_and_reads_is_known(judged, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "beside_it.py").write_text("ONE = 1\n")
    (tmp_path / "words.txt").write_text("a b")
    text = ("import beside_it, json, numpy\nopen('words.txt').read()\nopen('/etc/hosts').close()\n"
            "open('log.txt', 'w').write('it begins')\n" + LETTERS)
    first = judged(text).files
    assert {*first} == {"beside_it.py", "words.txt", "own.py"}
    (tmp_path / "words.txt").write_text("a c")
    del sys.modules["beside_it"]                     # now it is in __pycache__
    again = judged(text).files
    assert again["beside_it.py"] == first["beside_it.py"] and again["words.txt"] != first["words.txt"]


@pytest.mark.parametrize("reads", [True, False])
def test_the_reward_with_other_rows_is_shown_where_rows_matter(judged, reads):
    own = judged(f"""
DATA = [{{"prompt": "the king", "k": k}} for k in range(20)]
TOKENS = 6
def reward(completions, k):
    return k if {reads} else [1] * len(k)
""")
    count, mean, shown = own.measured(new_engine())
    assert shown["numbers"].get("with_other_rows") == (mean if reads else None)
    assert 0 < shown["numbers"]["words_a_text"] <= 6 and 0 <= shown["numbers"]["letters_a_text"] <= 6


def test_what_a_file_logs_fits_a_frame_whatever_it_holds(judged):
    """Control characters take six bytes in JSON, other ones up to four."""
    own = judged(r"""
DATA, TOKENS = [{"prompt": "\0" * 200}, {"prompt": "\U0001f600" * 200}], 6
def reward(completions, log_extra):
    for number in range(20):
        log_extra(f"{number}" + "\0\x1b" * 40, ["\0\ud800\U0001f600" * 99] * len(completions))
    return [len(text) for text in completions]
""", CFG)
    *mean, shown = own.measured(new_engine())
    told = json.dumps(shown, ensure_ascii=False).encode("utf-8", "replace")
    assert len(told) < wire.REWARD.most and b"\\u" not in told
    assert Progress(FAKE, SimpleNamespace(step=0), None).check_reward(*mean, told)


LEFT = """
import os, subprocess
def reward(completions):
    with open(PATH, "w") as file:
        print(subprocess.Popen(["sleep", "600"]).pid, file=file)
    return [0] * len(completions)
"""
POOL = """
import multiprocessing, os, time
def wait(_):
    with open(PATH, "w") as file:
        print(os.getpid(), file=file)
    time.sleep(600)
def reward(completions):
    with multiprocessing.Pool(1) as pool:
        return pool.map(wait, completions)
"""


@pytest.mark.parametrize("text, words", [(LEFT, ""), (POOL, "reward did not return within 1 s")])
def test_what_a_function_has_started_ends_with_its_judge(judged, tmp_path, text, words):
    own = judged(text.replace("PATH", repr(str(tmp_path / "pid"))), CFG.changed(OBJECTIVE_SECONDS=1.0))
    with refused(words, objective.ObjectiveError) if words else contextlib.nullcontext():
        own.try_out()
    pid = (tmp_path / "pid").read_text().strip()
    assert os.path.exists(f"/proc/{pid}")
    own.close()
    until(lambda: not os.path.exists(f"/proc/{pid}") or " Z " in open(f"/proc/{pid}/stat").read())


def test_answers_about_a_chunk_that_was_given_up_are_not_taken_for_another(judged):
    def gone():
        raise ConnectionError

    own, engine = judged(LETTERS), new_engine()
    want = rewards_of(own, engine, 8)
    with pytest.raises(ConnectionError):             # the coordinator, while the texts are judged
        own.texts(engine, 0, gone)
    equal(rewards_of(own, engine, 8), want)
    assert want.any()


def test_a_judge_ends_with_its_parent_also_in_a_function_that_never_returns(tmp_path):
    (tmp_path / "own.py").write_text("def reward(completions):\n    while True:\n        pass\n")
    (tmp_path / "parent.py").write_text(f"""
import os, signal, sys
sys.path.insert(0, {HERE!r})
from tools import objective
if __name__ == "__main__":
    judge = objective.Judge("own.py", 1, 99.0)
    judge.begin({{"prompts": [""], "completions": [""]}})
    os.kill(judge._processes[0].pid, signal.SIGINT)      # Ctrl-C in a terminal reaches it too
    print(judge._processes[0].pid, judge._processes[0].is_alive(), flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
""")
    done = subprocess.run([sys.executable, "parent.py"], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.stdout.split()[1] == "True" and not done.stderr
    until(lambda: not os.path.exists(f"/proc/{done.stdout.split()[0]}"))


def test_workers_with_audits_agree_and_the_coordinator_shows_the_reward(judged, tmp_path):
    cfg = CFG.changed(AUDIT_RATE=1.0, VALIDATE_EVERY=2)
    own = [judged(LETTERS, cfg, f"own{i}.py") for i in range(2)]
    validation = data_files.held_out(cfg, TOKENS, "text", BYTES, 64)
    engines = [new_engine(cfg) for _ in own]
    with Server(tmp_path, cfg, steps=6, drain=15) as server:
        threads = [server.work(engine, tokens=TOKENS, validation=validation, decoding=BYTES, objective=judge,
                               name=name)
                   for engine, judge, name in zip(engines, own, "ab")]
        for thread in threads:
            thread.join(60)
    assert engines[0].step == 6 and engines[0].digest() == engines[1].digest()
    said = server.said
    assert "banned" not in said
    assert "reward at step 2: " in said and "the mean of 256 texts after held-out prompts" in said


def test_a_worker_takes_no_other_file_than_that_of_the_run(tmp_path):
    (tmp_path / "own.py").write_text(LETTERS)
    cfg = CFG.changed(OBJECTIVE=hashlib.sha256(LETTERS.encode()).hexdigest(), VAL_FILE="none")
    data = train.Data(TOKENS, None, BYTES)
    with train.opened_objective(cfg, str(tmp_path / "own.py"), data, 1) as own:
        assert own.write == 6
    for name, words in (("own.py", "own.py is not the file with which this run began"),
                        ("none.py", "none.py: No such file or directory: the file of --objective must be on the disk")):
        with refused(words, objective.ObjectiveError), \
                train.opened_objective(CFG.changed(OBJECTIVE="b" * 64), str(tmp_path / name), data, 1):
            pass


class Scripted(FakeObjective):
    """It measures what REWARDS has for a step."""

    def reward(self, engine):
        return REWARDS[engine.step]

    def sample(self, engine, number):
        return f"a prompt >>> a text (reward {self.reward(engine):.4f})"


FAKE = changed(**REWARDED, SNAPSHOT_EVERY=2, VALIDATE_EVERY=2, SAMPLE_EVERY=2)
REWARDS = [-0.5, 0, -0.25, 0, -0.125, 0, -3, 0, -0.25, 0, -0.2, 0]


def test_the_highest_reward_is_the_best_and_page_metrics_status_and_plots_have_it(tmp_path):
    """Of snapshots, too; and after a restart."""
    with Server(tmp_path, FAKE, save=True, steps=11, stay=True, drain=0, http=EVERYBODY) as server:
        # the validation of a FakeEngine rises
        server.work(FakeEngine(FAKE, 0.003), validation=VALIDATION, objective=Scripted())
        until(lambda: server.run.step == 11 and server.shelf.newest == 10)
        page_shows(server, 10)
        state = state_of(server)
        values = parse_metrics(ask(server, "/metrics")[2].decode())
        assert describe_status(server.status()).splitlines()[0].endswith("reward -0.2000 at step 10")
    last, best = (dict(step=step, value=REWARDS[step]) for step in (10, 4))
    assert state["last_reward"] == state["last_reward"] | last and state["best_reward"] == state["best_reward"] | best
    assert [point[3] for point in state["curves"]["reward"]] == REWARDS[:11:2]
    assert state["samples"][-1]["text"] == "a text (reward -0.2000)"
    assert values == {**values, "egg_reward": -0.2, "egg_reward_best": -0.125, "egg_reward_step": 10}
    names = ["snapshot-00000004-reward--0.125000.egg", "snapshot-00000008-reward--0.250000.egg",
             "snapshot-00000010-reward--0.200000.egg"]
    assert sorted(path.name for path in tmp_path.glob("snapshot*")) == names
    assert os.readlink(tmp_path / "best.egg") == names[0]
    os.rename(tmp_path / names[1], tmp_path / "snapshot-00000008-0.9000.egg")          # of a validation
    with Server(tmp_path, FAKE, save=True, stay=True, http=EVERYBODY) as server:
        assert (server.shelf.best, server.shelf.figures) == (4, {4: -0.125, 10: -0.2})
        assert state_of(server)["best_reward"] == state["best_reward"]
    plotted = succeeds(commands.run("plot", tmp_path)).splitlines()
    assert "reward, against million tokens" in plotted and any(line.startswith("loss, ") for line in plotted)


def test_the_best_reward_so_far_has_a_snapshot_whatever_its_step(tmp_path):
    cfg = FAKE.changed(SNAPSHOT_EVERY=1000)
    with Server(tmp_path, cfg, save=True, steps=11, stay=True) as server:
        server.work(FakeEngine(cfg, 0.003), objective=Scripted())
        until(lambda: server.run.step == 11 and sorted(server.shelf.files) == [2, 4])
    assert os.readlink(tmp_path / "best.egg") == "snapshot-00000011-reward-0.000000.egg"            # the end counts


def test_a_reward_that_is_earned_by_less_is_told(tmp_path):
    """By ever shorter texts, and whatever the prompt."""
    told = []
    run = SimpleNamespace(step=0, start=SimpleNamespace(step=0), held_out=b"", tokens=lambda step: 0)
    progress = Progress(FAKE, run, SimpleNamespace(emit=lambda *_, **more: None, warn=told.append))
    for step, words, reward, others in (0, 47, 0.1, 0.1), (2, 30, 0.4, 0.1), (4, 20, 0.8, 0.75), (6, 4, 0.9, 0.9):
        progress.run.step = step
        progress.rewarded(step, 4, reward, {"news": "", "numbers": {"words_a_text": words, "with_other_rows": others}})
    assert told == [
        "step 4: texts have become short, 20 words a text after 47: if that is too much, begin again with a reward "
        "that such texts do not earn (docs/OBJECTIVES.md)",
        "step 4: the texts earn as much with the prompts and columns of other rows, 0.7500 of 0.8000: if that is too "
        "much, begin again with a reward for which the prompt matters (docs/OBJECTIVES.md)"]


def test_a_step_without_text_has_no_loss(tmp_path):
    cfg = FAKE.changed(TEXT_SHARE=0.0)
    with Server(tmp_path, cfg, save=True, steps=3, stay=True) as server:
        server.work(FakeEngine(cfg, 0.003), objective=Scripted())
        server.reaches(3)
    assert [event["loss"] for event in of_kind("step", events(tmp_path))] == [None] * 3
    assert not read_curve(tmp_path).loss
    console = Console(Lines())
    for event in events(tmp_path):
        console.emit(event, None)
    assert "step 2" in console.stream.text and "loss" not in console.stream.text


class Collapsing(FakeObjective):
    def measured(self, engine):
        words = 100 - 5 * engine.step
        numbers = {"distinct_words": words, "distinct_texts": 9, "seen_texts": 8, "seen_prompts_differ": words / 1000}
        return 4, 0.5, {"news": "a line", "numbers": numbers, "completions": [{"prompt": "p", "reward": 0.5}]}

    def sample(self, engine, number):
        return "a prompt >>> a text"


def test_what_goes_wrong_is_said_in_words(tmp_path):
    with Server(tmp_path, FAKE, save=True, steps=14, stay=True, http=EVERYBODY) as server:
        server.work(FakeEngine(FAKE, 0.003), validation=VALIDATION, objective=Collapsing())
        page_shows(server, 13)
        state, lines = state_of(server), server.said
        metrics = parse_metrics(ask(server, "/metrics")[2].decode())
    assert lines.count("variety has halved, 50 distinct words after 100: if that is too much, begin again with") == 1
    assert lines.count("language has become worse, ") == 1 and "since 0: if that is too much" in lines
    assert ("reward at step 2: 0.5000, the mean of 4 texts after held-out prompts\n  distinct words 90, distinct texts "
            "9\n  seen: texts 8, prompts differ 0.09\n  a line\n") in lines
    assert lines.count("so that hardly anything can be learnt") == 1
    assert metrics["egg_reward_distinct_words"] == 40 and metrics["egg_reward_seen_differ"] == 0.04
    assert state["last_reward"]["numbers"]["seen_prompts_differ"] == 0.04
    log = of_kind("completions", events(tmp_path))
    assert log[0]["step"] == 0 and log[0]["completions"] == [{"prompt": "p", "reward": 0.5}]


@pytest.mark.parametrize("texts, reward, shown", [
    (0, 1.0, b'{"news": "", "numbers": {}}'), (1, float("nan"), b'{"news": "", "numbers": {}}'), (1, 1.0, b"{"),
    (1, 1.0, b'{"numbers": {}}'), (1, 1.0, b'{"news": 3, "numbers": {}}'),
    (1, 1.0, b'{"news": "", "numbers": {"lowest": "1"}}'), (1, 1.0, b'{"news": "", "numbers": {"lowest": NaN}}'),
    (1, 1.0, b'{"news": "", "numbers": []}')])
def test_no_worker_ends_a_coordinator_by_what_it_states_about_rewards(texts, reward, shown):
    progress = Progress(FAKE, SimpleNamespace(step=0), None)
    assert progress.check_reward(1, 1.0, b'{"news": "", "numbers": {}}') == {"news": "", "numbers": {}}
    with refused("wrong reward", FrameError):
        progress.check_reward(texts, reward, shown)


@pytest.mark.parametrize("text, share", [(LETTERS, 0.25), (LETTERS + "DATA = HELD_OUT = []\n", 0.1),
                                         (LETTERS + "from beside import DATA, HELD_OUT\n", 0.1), ("(", 0.25)])
def test_a_file_with_data_needs_less_text(tmp_path, text, share):
    (tmp_path / "own.py").write_text(text)
    args = SimpleNamespace(function=egg.train, objective=str(tmp_path / "own.py"), run=None)
    assert egg_config.load(objective=egg.objective_of(args), environ={}).TEXT_SHARE == share
    args.run = "ckpt"
    assert egg.objective_of(args)[2] == {}


# --- the command line ------------------------------------------------------------------------------------------------

def test_a_function_that_throws_dice_is_what_the_coordinator_suggests(judged, tmp_path):
    cfg = CFG.changed(AUDIT_RATE=1.0, TEXT_SHARE=0.0)
    own = [judged("import random\ndef reward(completions):\n    return [random.random() for _ in completions]\n", cfg,
                  f"own{i}.py") for i in range(2)]
    with Server(tmp_path, cfg) as server:
        for judge in own:
            server.work(new_engine(cfg), tokens=TOKENS, objective=judge)
        server.says("; is reward() a function of its input alone? look for sets, clocks "
                    "and random")
        until(lambda: len(server.dispatcher._probation) == 2)
        assert "has erred" not in server.said        # whose judge alone differs may have computed well


def test_the_coordinator_is_told_why_a_worker_ends(judged, tmp_path):
    cfg = CFG.changed(TEXT_SHARE=0.0)
    own = judged("def reward(completions):\n    raise ValueError('no such thing')\n", cfg)
    with Server(tmp_path, cfg) as server:
        with refused("reward raised ValueError", objective.ObjectiveError):
            run_worker(server, new_engine(cfg), retry=True, tokens=TOKENS, objective=own)
        server.says("it ends: ")
        server.says("own.py:2: reward raised ValueError: no such thing")


@pytest.fixture(scope="module")
def place(tmp_path_factory, compiled_units):
    """A directory with a text, a file of an objective and a saved run `ckpt` of one step."""
    at = tmp_path_factory.mktemp("place")
    TOKENS.tofile(at / "input.bin")
    TOKENS.tofile(at / "val.bin")
    (at / "own.py").write_text(LETTERS)
    line = "train --preset laptop-bytes -D DETOKENIZE=0 -D SOFT_TARGETS= --steps 1 --save-dir ckpt"
    succeeds(commands.process(line, cwd=at))
    return at


@pytest.fixture
def run(place, here):
    """A function that runs a command in a copy of that directory."""
    shutil.copytree(place, here, dirs_exist_ok=True)

    def run(line, *more, status=0):
        small = ["-D", "DEVICE=cpu"] if line.startswith("train") else []
        done = commands.run(line, *more, *small, preset="")
        assert done.returncode == status, done.stderr + done.stdout
        return done.stdout + done.stderr
    return run


def test_a_run_with_an_objective_begins_from_another_and_goes_on(run, tmp_path):
    old = tmp_path / "ckpt" / "history.egg"
    before = old.read_bytes()
    small = "-D CHUNK_SIZE=8 -D POPULATION_SIZE=16 -D VALIDATE_EVERY=1 -D TEXT_SHARE=0.35"
    said = run(f"train --objective own.py --load-dir ckpt --save-dir new --steps 3 {small}")
    assert "new begins with the model of ckpt, step 1" in said and "before, " in said and "on held-out prompts" in said
    assert old.read_bytes() == before
    for command in ("train", "ray"):
        said = run(f"{command} --save-dir new", status=2)
        assert "new is a run with an objective: continue it with --objective FILE" in said
    run("train --objective own.py --save-dir new --steps 4")           # with the share that it has
    assert "TEXT_SHARE" not in history.configuration(str(tmp_path / "new"))             # 0.35, as older runs
    told = events(tmp_path / "new")
    assert [event["step"] for event in of_kind("reward", told)][:2] == [1, 2]
    samples = of_kind("sample", told)
    assert samples and all(re.search(r" \(reward \S+\)$", one["text"]) for one in samples)      # also at the end
    said = run("eval --load-dir new --objective own.py")
    assert re.search(r"mean reward [\d.]+, the mean of 256 texts after held-out prompts\n  distinct|deviation ", said)
    assert re.search(r"\n  seen: texts 256, mean .*, prompts differ [\d.]+\n  [\d.]+ bits/byte on val.bin\n", said)
    assert said.count(" >>> ") == 8
    run("generate --load-dir new --prompt the --tokens 3")
    run("eval --load-dir new --objective", os.path.join(HERE, "examples", "words.py"))
    (tmp_path / "own.py").write_text(LETTERS + "# changed\n")
    said = run("train --objective own.py --save-dir new --steps 5", status=2)
    assert "own.py: new was begun with another file, or that one has changed: --load-dir new with another --s" in said
    said = run(f"train --objective own.py --load-dir new --save-dir newer --steps 2 {small}")
    assert "newer begins with the model of new, step 4" in said and "stopped after 2 steps" in said


def test_rewards_are_measured_without_held_out_text_and_at_the_end_without_validations(run, tmp_path):
    (tmp_path / "val.bin").unlink()
    small = "-D CHUNK_SIZE=8 -D POPULATION_SIZE=16 --objective own.py --load-dir ckpt"
    said = run(f"train {small} -D VALIDATE_EVERY=1 --save-dir a --steps 3")
    assert "reward at step 2: " in said and "val.bin is missing: no validation" in said
    (tmp_path / "own.py").write_text("TOKENS = 6\ndef reward(completions, trainer_state):\n    done = "
                                     "trainer_state.global_step / trainer_state.max_steps\n"
                                     "    return [done] * len(completions)\n")
    said = run(f"train {small} -D VALIDATE_EVERY=0 --save-dir b --steps 3")
    assert os.readlink(tmp_path / "b" / "best.egg") == "snapshot-00000003-reward-1.000000.egg"
    assert "reward at step 3: " in said and "reward at step 2: " not in said and "after, on held-out prompts" in said


def test_an_error_of_the_function_ends_training_in_one_line(run, tmp_path):
    (tmp_path / "own.py").write_text("def reward(completions):\n    raise ValueError('no such thing')\n")
    said = run("train --objective own.py --load-dir ckpt --save-dir new --steps 3", status=1)
    assert "own.py:2: reward raised ValueError: no such thing" in said and "Traceback" not in said
    assert not (tmp_path / "new").exists()
    for name, why in ("no.py", "No such file or directory"), (".", "Is a directory"):
        said = run(f"train --objective {name} --save-dir x", status=2)
        assert f"egg: {name}: {why}: give --objective the path" in said
    assert "'' is not the name of a file" in run("train --objective '' --steps 1", status=2)
    for more in "own.txt", "--tokens 5":
        said = run(f"eval --load-dir ckpt --objective own.py {more}", status=2)
        assert "leave FILE and --tokens out" in said
    said = run("train --objective own.py --save-dir ckpt", status=2)
    assert "--objective own.py: ckpt has no objective: --load-dir ckpt with another --save-dir begins a new" in said
    (tmp_path / "own.py").write_text("def reward(completions):\n    return 5\n")
    said = run("train --objective own.py --preset laptop-bytes -D DETOKENIZE=0 --save-dir x", status=1)
    assert "own.py: reward returned '5', which is no list of numbers" in said
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize("name, column, prompt, texts, low, written", [
    ("words", "completions", "", ["the king said", "qzx"], 0.0, None),
    ("sort", "answer", "314>", ["134", "314", "134 "], 0.0, "sort.txt"),
    ("json_array", "prompts", "[5, ", ["71, 8]", "71, 71]", "71, 8, 9, 10]", "7, 100]", "           "], 0.1,
     "arrays.txt"),
    ("guess", "secret", "?", ["7=7=7=7", "5>7=7=7", "1>x!3>4"], 0.0, "games.txt")])
def test_examples_judge(name, column, prompt, texts, low, written, here):
    path = os.path.join(HERE, "examples", name + ".py")
    (names, functions), n = objective.read(path), len(texts)
    columns = {"prompts": [prompt] * n, "completions": texts, "answer": ["134"] * n, "secret": [7] * n}
    scores, _ = objective.judged(functions, {name: columns[name] for name in ("prompts", "completions", column)}, None,
                                 None)
    assert scores[0] == max(scores) > max(scores[1:]) and 0.7 < scores[0] <= 1 and 0 <= min(scores) <= low
    with contextlib.closing(objective.Objective(CFG, path, BYTES, TOKENS, processes=1)) as own:
        own.try_out()
    if written:
        runpy.run_path(path, run_name="__main__")
        assert len((here / written).read_text()) > 100000
    if name == "guess":
        assert names["reply"](["7", "8", "3", "x"], [7] * 4) == [None, "<", ">", "!"]
