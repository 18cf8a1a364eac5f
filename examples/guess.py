"""A game: guess a number from 0 to 9; the other side says whether it is more, less or equal. Fewer guesses earn more.
`python examples/guess.py` writes games.txt and games-val.txt, of a player who guesses what is still possible."""
import random

DATA = HELD_OUT = [{"prompt": "?", "secret": n} for n in range(10)]
TOKENS, TURNS = 1, 4                                   # of a guess; guesses in a game
MEASURE_TEMPERATURE = 0                                # in a game that is measured it makes the likeliest guesses


def reply(texts, secret, **columns):
    """A hint; None after a hit, which ends the game."""
    return [None if guess == str(number) else hint(guess, number) for guess, number in zip(texts, secret)]


def hint(guess, secret):
    return "!" if guess not in "0123456789" else "<" if secret < int(guess) else ">" if secret > int(guess) else "="


def reward(completions, secret, **columns):
    return [1 - (text[::2] + str(number)).index(str(number)) / TURNS for text, number in zip(completions, secret)]


if __name__ == "__main__":
    parts = []
    for secret in random.choices(range(10), k=60000):
        guess, low, high = parts.append("?"), 0, 9
        while guess != secret:
            guess = random.randint(low, high)
            low, high = (guess + 1, high) if guess < secret else (low, guess - 1)
            parts.append(str(guess) + hint(str(guess), secret))
    for name, some in ("games.txt", parts[5000:]), ("games-val.txt", parts[:5000]):
        open(name, "w").write("".join(some))
