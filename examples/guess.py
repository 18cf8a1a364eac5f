"""A game: guess a number from 0 to 9. The other side says whether it is more, less or equal; the fewer guesses, the more
reward. `python examples/guess.py` writes games.txt and games-val.txt, of one who guesses what is still possible."""
import random

DATA = HELD_OUT = [{"prompt": "?", "secret": n} for n in range(10)]
TOKENS, TURNS = 1, 4                                   # of a guess, guesses in a game
TEMPERATURE = 0                                        # the noise of the members is all that tries something


def said(guess, secret):
    return "!" if guess not in "0123456789" else "<" if secret < int(guess) else ">" if secret > int(guess) else "="


def reply(texts, secret, **columns):
    return [said(guess, number) for guess, number in zip(texts, secret)]


def reward(completions, secret, **columns):
    found = [text[::2].find(str(number)) for text, number in zip(completions, secret)]
    return [1 - guesses / TURNS if guesses >= 0 else 0.0 for guesses in found]


if __name__ == "__main__":
    parts = []
    for secret in random.choices(range(10), k=60000):
        guess, low, high = parts.append("?"), 0, 9
        while guess != secret:
            guess = random.randint(low, high)
            low, high = (guess + 1, high) if guess < secret else (low, guess - 1)
            parts.append(str(guess) + said(str(guess), secret))
    open("games.txt", "w").write("".join(parts[5000:]))
    open("games-val.txt", "w").write("".join(parts[:5000]))
