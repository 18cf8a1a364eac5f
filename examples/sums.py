"""Reward: 1 for the right sum of two digits, else 0. One pair of ten is held out."""
DATA = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a in range(10) for b in range(10)]
TOKENS = 3                                             # to write after a prompt
STOP = "."


def reward(prompts, completions, answer):
    return [float(text == right) for text, right in zip(completions, answer)]
