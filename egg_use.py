"""For notebooks and scripts: a saved run writes, is measured, goes on. docs/USE.md has an example."""

import math

import egg
from egg_config import UsageError
from model import data_files
from tools import use


class Model:
    """A saved run that is loaded. Errors of this module are egg_config.EggError."""

    def __init__(self, cfg, engine):
        self.cfg, self.engine, self.decoding = cfg, engine, data_files.load_decoding(cfg)

    def generate(self, prompt, tokens=200, seed=1, **settings):
        """str: what follows the prompt. settings: temp, min_p, penalty; stops: [bytes] before which it ends."""
        pieces = use.continuation(self.cfg, self.decoding, self.engine, prompt.encode(), tokens, seed, **settings)
        return "".join(use.stream(pieces))

    def score(self, text):
        """Bits per byte of a text, the first token aside, which nothing precedes; read in windows, as by `eval`."""
        if not text:
            raise UsageError("the text to score is empty")
        tokens = data_files.encoded(self.cfg, self.decoding, text.encode())
        nats = n_bytes = 0
        while tokens.size > 1:                       # whole windows, then the rest
            part = data_files.held_out(self.cfg, tokens, "the text", self.decoding)
            nats += self.engine.validate(part.windows)[0]
            n_bytes += part.n_bytes
            tokens = tokens[part.windows[:, 1:].size:]
        return nats / math.log(2) / n_bytes if n_bytes else math.nan


def load(directory, **options):
    """The Model of a save directory, DIR@STEP or the file of a snapshot. options: see `words`, of `generate`."""
    args, cfg = egg.configured(["generate", "--load-dir", directory, *words(options)])
    return Model(cfg, egg.load(cfg, args))


def train(callback=None, **options):
    """Trains until the end that is given, or an interrupt; returns the save directory. callback(event): gets every
    event (docs/EVENTS.md); options: see `words`, of `train`."""
    args, cfg = egg.configured(["train", *words(options)])
    args.callback = callback
    return egg.train(cfg, args)


def words(options):
    """[word]: options of a command line, as save_dir="ckpt", best=True, or constants, as N_LAYERS=2."""
    return [f"-D{name}={value}" if name.isupper() else f"--{name.replace('_', '-')}" + f"={value}" * (value is not True)
            for name, value in options.items()]
