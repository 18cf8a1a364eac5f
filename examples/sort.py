"""Reward: 1 for three digits in their order, else 0. Of 1,000 cases 100 are held out. `python examples/sort.py` writes
sort.txt, a text of the others to begin with, and sort-val.txt of those held out."""
import itertools
import random

ROWS = [{"prompt": "".join(digits) + ">", "answer": "".join(sorted(digits))}
        for digits in itertools.product("0123456789", repeat=3)]
random.Random(1).shuffle(ROWS)
HELD_OUT, DATA = ROWS[:100], ROWS[100:]
TOKENS, STOP = 4, "."                                  # three digits and the end
MEASURE_TEMPERATURE = 0                                # held out, the likeliest answer counts


def reward(completions, answer, **columns):
    return [float(text == right) for text, right in zip(completions, answer)]


if __name__ == "__main__":
    for name, rows, lines in ("sort.txt", DATA, 60000), ("sort-val.txt", HELD_OUT, 2000):
        open(name, "w").write("".join(row["prompt"] + row["answer"] + ".\n" for row in random.choices(rows, k=lines)))
