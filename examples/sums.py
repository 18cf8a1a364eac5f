"""Reward: 1 for the right sum of two digits, else 0. One pair of ten is held out."""
ROWS = [{"prompt": f"{a}+{b}=", "answer": str(a + b), "held": (3 * a + b) % 10 == 0}
        for a in range(10) for b in range(10)]
DATA = [row for row in ROWS if not row["held"]]
HELD_OUT = [row for row in ROWS if row["held"]]
TOKENS = 3                                             # to write after a prompt
STOP = "."


def reward(completions, answer, **columns):
    return [float(text == right) for text, right in zip(completions, answer)]
