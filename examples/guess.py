"""A game: guess a number from 0 to 9. The other side says "higher" or "lower". The reward is 1 for the first guess, and
less for every further one; `python examples/guess.py` writes games.txt, long games of a player who only guesses."""
import random
import re

DATA = HELD_OUT = [{"prompt": "number?\n", "secret": n} for n in range(10)] * 10
TOKENS, STOP = 2, "\n"                                 # of a guess
TEMPERATURE = 0                                        # the noise of the members is all that tries something
TURNS = 4                                              # guesses in a game


def said(guess, secret):
    if not re.fullmatch("[0-9]", guess):
        return "\nwhat\n"
    return f"\n{['lower', 'right', 'higher'][(secret >= int(guess)) + (secret > int(guess))]}\n"


def reply(prompts, texts, secret, **columns):
    return [said(guess, number) for guess, number in zip(texts, secret)]


def reward(completions, secret, **columns):
    games = [(text.split("\n")[::2], str(number)) for text, number in zip(completions, secret)]
    return [1 - guesses.index(number) / TURNS if number in guesses else 0.0 for guesses, number in games]


if __name__ == "__main__":
    games = [(random.randrange(10), random.choices("0123456789", k=50)) for _ in range(600)]
    open("games.txt", "w").write("".join("number?\n" + "".join(guess + said(guess, secret) for guess in guesses)
                                         for secret, guesses in games))
