"""Reward: the share of letters that stand in different words of a list, so that one word again and again earns little.
"""
import os
import re

with open(os.path.join(os.path.dirname(os.path.abspath(__file__)), "words.txt")) as file:
    WORDS = set(file.read().split())
TOKENS = 64
TEMPERATURE = 0.25


def reward(completions, **columns):
    scores = []
    for text in completions:
        words = set(re.findall("[a-z]+", text.lower()))
        scores.append(sum(len(word) for word in words if word in WORDS) / max(1, len(text)))
    return scores
