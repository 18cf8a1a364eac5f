"""Reward: 1 for a JSON array of three numbers, less for a beginning of one."""
import json
import re

DATA = [{"prompt": "three numbers: "}]
HELD_OUT = DATA
TOKENS = 16
STOP = "\n"


def reward(completions, **columns):
    return [score(text) for text in completions]


def score(text):
    try:
        value = json.loads(text)
    except ValueError:
        # the longest beginning of an array, so that there is a way there
        return 0.5 * max(len(found[0]) for found in re.finditer(r"\[?[\d, ]*\]?", text)) / max(1, len(text))
    whole = isinstance(value, list) and all(isinstance(number, (int, float)) for number in value)
    return 1.0 if whole and len(value) == 3 else 0.75 if whole else 0.25
