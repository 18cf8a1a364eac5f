"""Reward: the share of a text that stands in different words of a list, so that one word again and again earns little.
More than ENOUGH earns no more: else the same long words would fill every text.
"""
import os
import re

with open(os.path.join(os.path.dirname(os.path.abspath(__file__)), "words.txt")) as file:
    WORDS = set(file.read().split())
ENOUGH = 0.55
TOKENS = 64
TEMPERATURE = 0.3


def reward(completions, **columns):
    scores = []
    for text in completions:
        found = set(re.findall("[a-z]+", text.lower()))
        share = sum(len(word) for word in found if word in WORDS) / max(1, len(text))
        scores.append(min(share, ENOUGH))
    return scores
