"""Reward: 1 for a JSON array of three different numbers below 100. One beginning of ten is held out.
`python examples/json_array.py` writes arrays.txt and arrays-val.txt, texts of arrays of one to eight to begin with."""
import json
import random
import re

DATA = [{"prompt": f"[{n}, "} for n in range(100)]
TOKENS = 28                                            # to write after a prompt
STOP, MEASURE_TEMPERATURE = "\n", 0                    # held out, the likeliest array counts


def reward(prompts, completions, **columns):
    return [score(prompt + text) for prompt, text in zip(prompts, completions)]


def score(text):
    """The score falls with the distance from three numbers: a step toward three pays. No array: 0.1 at most."""
    try:
        array = json.loads(text)
        if all(x < 100 for x in array):
            return 1.0 if len(array) == len(set(array)) == 3 else 0.7 - 0.1 * min(6, abs(len(set(array)) - 3))
    except ValueError:
        pass
    return 0.1 * len(re.match(r"\[(\d\d?(, \d\d?)*)?", text)[0]) / len(text)


if __name__ == "__main__":
    for name, lines in ("arrays.txt", 20000), ("arrays-val.txt", 500):
        arrays = [random.sample(range(100), random.randint(1, 8)) for _ in range(lines)]
        open(name, "w").write("".join(f"{array}\n" for array in arrays))
