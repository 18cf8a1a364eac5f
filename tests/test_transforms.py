"""NTT_MODE: the transforms and the model that uses them, against plain readings (SPEC 14)."""

import numpy as np
import pytest

from engine import cpu_engine
from model import parameters, rules
from model.integer_tables import PRIME, root, transform
from model.reading import Reading
from readings import BASE, equal, hold_against_the_reading, random_config


# --- number-theoretic transforms --------------------------------------------------------------------------------------

def direct(x, mode, k):
    """Coefficient k of x by the definition, term by term, in Python's integers."""
    p = PRIME[mode]
    if not p:
        return sum(-int(v) if bin(i & k).count("1") % 2 else int(v) for i, v in enumerate(x))
    r = root(mode, len(x))
    return sum(int(v) * pow(r, i * k, p) for i, v in enumerate(x)) % p


@pytest.mark.parametrize("mode, length", [(1, 8), (1, 128), (2, 8), (2, 256), (3, 16), (3, 128)])
def test_transforms(mode, length):
    """Table against definition; the root has the order that the length needs."""
    rng, p = np.random.default_rng(length), PRIME[mode]
    x = rng.integers(0, p or 262144, length)
    found = x @ transform(mode, length).T
    equal(found % p if p else found, [direct(x, mode, k) for k in range(length)])
    if p:
        powers = {pow(root(mode, length), k, p) for k in range(length)}
        assert len(powers) == length and pow(root(mode, length), length, p) == 1


class NttReading(Reading):
    """The plain reading of the SPEC with coefficients from the definition in model.integer_tables."""

    def coefficients(self, tokens):
        cfg, T = self.cfg, self.cfg.SEQ_LEN
        out = []
        for position in range(len(tokens)):
            block = list(tokens[position // T * T:][:T]) + [0] * T
            seen = position % T + 1 if cfg.NTT_CAUSAL or len(tokens) != T else T
            out.append(direct(block[:seen] + [0] * (T - seen), cfg.NTT_MODE, position % T))
        own = super().coefficients(tokens)
        assert own.tolist() == out
        return own


@pytest.mark.parametrize("seed", range(6))
def test_the_engine_does_what_the_plain_reading_does(seed):
    rng = np.random.default_rng(seed)
    cfg = random_config(rng, NTT_MODE=seed % 3 + 1, NTT_CAUSAL=seed // 3, SEQ_LEN=int(rng.choice([8, 16, 32])),
                        LOSS="deggs")
    tokens = rng.integers(0, cfg.VOCAB_SIZE, 500).astype(np.uint32)
    hold_against_the_reading(cpu_engine.CpuEngine(cfg, tokens), rng, NttReading)


def test_ntt_mode_0_is_the_model_as_it_was_and_the_tables_are_drawn_after_the_embedding():
    base, ntt = BASE, BASE.changed(NTT_MODE=1)
    tensors = {t.name: t for t in parameters.tensors(ntt)}
    added = ["ntt_emb_1", "ntt_emb_2", "ntt_emb_3"]
    assert tensors.keys() - {t.name for t in parameters.tensors(base)} == {*added}
    weights = parameters.initial_state(ntt).weights
    drawn = rules.uniform_noise(parameters._xorshift(42, 4 * 64 * 256), 15, 0).reshape(4, 64, 256)
    for matrix, name in zip(drawn, ["embedding", *added]):
        equal(weights[tensors[name].span], parameters.to_canonical(matrix))
    assert parameters.products_per_token(ntt) == parameters.products_per_token(base)
