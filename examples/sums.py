"""Reward: 1 for the right sum of two digits, else 0. One pair of ten is held out. `python examples/sums.py` writes
sums.txt, a text of the other sums to begin with, and sums-val.txt of those held out."""
import random

ROWS = [{"prompt": f"{a}+{b}=", "answer": str(a + b), "held": (3 * a + b) % 10 == 0}
        for a in range(10) for b in range(10)]
DATA = [row for row in ROWS if not row["held"]]
HELD_OUT = [row for row in ROWS if row["held"]]
TOKENS = 3                                             # to write after a prompt
STOP = "."
TEMPERATURE = 0                                        # only the noise of the members explores


def reward(completions, answer, **columns):
    return [float(text == right) for text, right in zip(completions, answer)]


if __name__ == "__main__":
    for name, rows, lines in ("sums.txt", DATA, 60000), ("sums-val.txt", HELD_OUT, 2000):
        open(name, "w").write("".join(row["prompt"] + row["answer"] + ".\n" for row in random.choices(rows, k=lines)))
