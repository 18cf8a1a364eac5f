"""Unit trials (SPEC 21): both engines against the plain reading, runs and clusters. Rewards as votes on positions (SPEC
22): the rules against a plain writing of them, and votes of texts against plain readings."""

import contextlib
import json

import numpy as np
import pytest
from pytest import raises

from cluster import history
from cluster.console import Printer
from coordinators import Peer, Server, cluster
from egg_config import ConfigError
from engine import cpu_engine, simd
from fakes import Lines, UNITS
from model import parameters, rewards, rules, steps, units
from model.reading import votes_of_windows
from tools import use
from readings import equal
from recordings import python
from run_logs import events, of_kind
from units_compared import GPU_KINDS, PlainEngine, chunk_digits, course, engine_of, random_configuration, step_of

CFG = UNITS.changed(SEQ_LEN=16, CHUNK_SIZE=16, POPULATION_SIZE=32, VALIDATE_EVERY=0, SAMPLE_EVERY=0,
                          SNAPSHOT_EVERY=5, ADAPTIVE_THRESHOLD_ALPHA=0.77)
COMPILED = ["compiled_units", "compiled", "compiled_gru"]                                 # for conftest.py
# for the plain reading; every third one has the recurrent model
CHEAP = 14, 23, 27, 34, 38, 42, 49, 65, 81, 97, 114, 117, 123, 160, 186, 191, 196, 233, 294
TOKENS = (np.random.default_rng(1).integers(0, 5, 500) * 50).astype(np.uint8)


class Local(cpu_engine.CpuEngine):
    """For a PlainEngine."""

    def move(self, votes, rate):
        return self.advance(rate, votes)


@pytest.mark.parametrize("seed", CHEAP)
def test_the_cpu_engine_steps_as_the_plain_reading(seed):
    """The votes, and what the update makes of them."""
    assert course(engine_of("auto", seed), 2) == course(engine_of("plain", seed), 2)


def test_a_head_of_many_tokens_votes_as_the_plain_reading():
    """As in the presets: its logits are made a few rows at a time."""
    cfg = random_configuration(14)[0].changed(VOCAB_SIZE=8192)
    tokens = np.random.default_rng(14).integers(0, 8192, 400).astype(np.uint32)
    want = PlainEngine(cfg, tokens).evaluate(0, cfg.CHUNK_SIZE)
    assert cpu_engine.CpuEngine(cfg, tokens, threads=1).evaluate(0, cfg.CHUNK_SIZE) == want


def test_the_loudest_row_but_one_in_64_sets_the_exponent():
    counts = np.zeros(2 * units.EXPONENTS + 1, np.int64)
    assert units.loudest(counts) == 0
    counts[units.EXPONENTS - 20] = 63
    assert units.loudest(counts) == -20
    counts[units.EXPONENTS + 7] = 1
    assert units.loudest(counts) == 7                        # of 64, one is all that may be louder
    counts[units.EXPONENTS - 20] += 1
    assert units.loudest(counts) == -20


OF_KIND = """
import json, sys
from units_compared import course, engine_of
print(json.dumps([course(engine_of(sys.argv[1], int(seed))) for seed in sys.argv[2:]]))
"""


@pytest.mark.deep
def test_every_instruction_set_steps_as_the_plain_reading():
    """In a process of its own, because numba compiles for one kind."""
    chosen = 1003, 1004, 1011, 1013, 1021, 1032, 1035, 1042, 1046, 1050, 1051
    want = [course(engine_of("plain", seed)) for seed in chosen]
    for kind in simd.available():
        assert json.loads(python("-c", OF_KIND, kind, *chosen, PYTHONPATH="tests")) == want, kind


@pytest.mark.parametrize("levels, each", [(1, 5), (2, 3), (3, 2), (7, 2)])
def test_what_a_chunk_sends(levels, each):
    for cfg in CFG, CFG.changed(N_LAYERS=3, HIDDEN_DIM=96, VOCAB_SIZE=300):
        cfg = cfg.changed(VOTE_LEVELS=levels)
        assert 0 <= cfg.CHUNK_DIGITS - parameters.n_weights(cfg) < each and cfg.CHUNK_DIGITS % each == 0
    for chunks in 1, 2, 3, 127 // levels, 128:
        cfg = cfg.changed(POPULATION_SIZE=chunks * cfg.CHUNK_SIZE)
        copies = chunks if chunks < 3 else each if chunks * levels < 128 else 2 * each
        assert cfg.STEP_BYTES == 1 + cfg.CHUNK_DIGITS // each * copies
        digits = np.tile(np.resize(np.arange(-levels, levels + 1, dtype=np.int8), cfg.CHUNK_DIGITS), (chunks, 1))
        step = steps.join_digits(cfg, [steps.pack_digits(chunk, 2 * levels + 1) for chunk in digits], 7)
        equal(rules.step_votes(cfg, step), digits.sum(0, dtype=np.int32))
        assert step[-1] == 7 and abs(digits.sum(0, dtype=int)).max() == chunks * levels
        for wrong in step[:-1], step + b"0", b"\x80" * (len(step) - 1) + b"0":
            with raises(ValueError):
                steps.check_step(cfg, wrong if chunks > 2 else wrong.replace(b"\x80", b"\xff"))


@pytest.mark.parametrize("chunks", [1, 2, 5, 6, 90])
def test_what_a_short_run_sends(chunks):
    """The sums of q and of e, of digits 3 q + e, stay apart."""
    cfg = CFG.changed(VOTE_LEVELS=7, LOCAL_STEPS=4, POPULATION_SIZE=chunks * CFG.CHUNK_SIZE)
    assert cfg.STEP_BYTES == 1 + cfg.CHUNK_BYTES * (chunks if chunks < 3 else 2 if chunks < 6 else 4)
    for digits in (np.tile(np.resize(np.arange(-7, 8, dtype=np.int8), cfg.CHUNK_DIGITS), (chunks, 1)),
                   np.random.default_rng(chunks).integers(-7, 8, (chunks, cfg.CHUNK_DIGITS)).astype(np.int8)):
        step = steps.join_digits(cfg, [steps.pack_digits(chunk, 15) for chunk in digits], 7)
        steps.check_step(cfg, step)
        q = np.rint(digits / 3).astype(int)
        equal(rules.step_votes(cfg, step),
              (q.sum(0) * (2 * chunks + 1) + (digits - 3 * q).sum(0, dtype=int)).astype(np.int32))
    with raises(ConfigError, match="which is 90 chunks"):
        cfg.changed(POPULATION_SIZE=91 * CFG.CHUNK_SIZE)


def short_runs(chunks):
    return CFG.changed(VOTE_LEVELS=7, LOCAL_STEPS=3, CHUNK_SIZE=4, POPULATION_SIZE=4 * chunks, USE_MUON=1,
                       ADAM_BETA1=0.5, MUON_LR_SCALE=3.0)


def test_a_new_run_with_other_constants_goes_on_at_the_same_update_and_token(tmp_path):
    """So do its rates. One that has dropped its first steps knows what these have read."""
    def begin(new, old, source, name):
        if source == "file":
            use.import_(new, tmp_path / source, tmp_path / name)
        else:
            use.begin(new, old, str(tmp_path / source), str(tmp_path / name), 1, Printer(Lines()), None)
        with contextlib.closing(history.open_run(new, tmp_path / name)) as run:
            assert run.start.step == run.step
            return run.step, run.tokens(run.step)

    cfg = CFG.changed(VOTE_LEVELS=7, LOCAL_STEPS=2, CHUNK_SIZE=4, POPULATION_SIZE=8)
    cluster(tmp_path / "a", [cpu_engine.CpuEngine(cfg, TOKENS, threads=1)], 5, cfg, save=True)
    use.export(cfg, use.load(cfg, tmp_path / "a", console=Printer(Lines())), tmp_path / "file", True)
    many = cfg.changed(POPULATION_SIZE=16)
    for number, (new, first) in enumerate([(cfg, 5), (many, 5), *((cfg.changed(LOCAL_STEPS=local), 10 // local)
                                                                  for local in (1, 4))]):
        for source, name in ("a", f"b{number}"), ("file", f"f{number}"):
            assert begin(new, cfg, source, name) == (first, 5 * cfg.STEP_TOKENS)
    cluster(tmp_path / "b1", [cpu_engine.CpuEngine(many, TOKENS, threads=1)], 16, many, save=True)
    with contextlib.closing(history.read_run(many, tmp_path / "b1")) as run:
        assert run.start.step == 15
    read = 5 * cfg.STEP_TOKENS + 11 * many.STEP_TOKENS
    assert begin(cfg, many, "b1", "c") == (16, read)
    assert read - many.STEP_TOKENS == of_kind("step", events(tmp_path / "b1"))[-1]["tokens"]


@pytest.mark.parametrize("chunks", [1, 2, 3, 7])
def test_short_runs_with_muon(chunks):
    """Local steps are those of a run without them; digits, and the step that adds them, the plain reading's."""
    cfg = short_runs(chunks)
    plain = PlainEngine(cfg, TOKENS, Local(cfg.changed(LOCAL_STEPS=1), TOKENS, threads=1))
    assert course(plain, 4) == course(cpu_engine.CpuEngine(cfg, TOKENS, threads=2), 4)


@pytest.mark.parametrize("local", [1, 2])
def test_workers_with_audits_train_as_one_engine_and_a_late_one_begins_with_a_snapshot(tmp_path, local):
    cfg = CFG.changed(AUDIT_RATE=1.0, VOTE_LEVELS=7 if local > 1 else 1, LOCAL_STEPS=local)
    *workers, late, alone = [cpu_engine.CpuEngine(cfg, TOKENS, threads=1) for _ in range(4)]
    server = cluster(tmp_path, workers, 12, cfg, save=True)
    assert "banned" not in server.said
    with contextlib.closing(history.open_run(cfg, tmp_path)) as run:
        assert run.step == 12 and run.start.step == 10       # the second newest snapshot
    with Server(tmp_path, cfg, save=True, steps=13, drain=15) as server:
        thread = server.work(late, lines=(said := Lines()))
        server.reaches(13)
    thread.join(60)
    for _ in range(13):
        step_of(alone, cooling=0)
    assert late.digest() == alone.digest()
    assert "by a snapshot" in said.text


def test_protocol_1_is_refused_by_name(tmp_path):
    with Server(tmp_path, CFG, stay=True) as server:
        peer = Peer(server)
        peer.ask(0)
        assert peer.closed()
        server.says("a worker of protocol 2 is needed")


@pytest.mark.gpu
@pytest.mark.parametrize("seed", [*range(100, 108), 95, 1003])
def test_random_configurations_on_the_gpu(seed):
    from engine import cuda_engine
    want = course(engine_of("auto", seed))
    for kind in GPU_KINDS[not cuda_engine.card(0)[0]:]:
        assert course(engine_of(kind, seed)) == want


@pytest.mark.gpu
@pytest.mark.parametrize("chunks", [1, 2, 7])
def test_short_runs_on_the_gpu(chunks):
    """Also where the next one is begun ahead, after an update that is undone, and after the right one."""
    from engine import cuda_engine
    cfg = short_runs(chunks).changed(LR_SCHEDULE=((0, 0.5), (4, 0.25)), HIDDEN_DIM=128)
    engine, ahead = (cuda_engine.CudaEngine(cfg, TOKENS) for _ in range(2))
    cpu = cpu_engine.CpuEngine(cfg, TOKENS)
    for number in range(3):
        found = [cpu.evaluate(first, 4) for first in range(0, 4 * chunks, 4)]
        step = steps.join_digits(cfg, [packed for packed, _ in found], 5 + number)
        for one in engine, ahead:
            assert [one.evaluate(first, 4) for first in range(0, 4 * chunks, 4)] == found
        assert ahead.begin_update(steps.join_digits(cfg, [found[0][0]] * chunks, 3))
        ahead.begin(0, 4)
        assert ahead.evaluate(0, 4) == found[0]
        assert ahead.begin_update(step)
        ahead.begin(4 * chunks - 4, 4)
        assert ahead.update(step) == engine.update(step) == cpu.update(step)
        assert ahead.digest() == engine.digest() == cpu.digest()
        assert ahead.evaluate(4 * chunks - 4, 4) == cpu.evaluate(4 * chunks - 4, 4)


# --- rewards as votes on positions (SPEC 22) --------------------------------------------------------------------------

def nearest(x, y):
    """x / y, halves away from zero."""
    return int(np.sign(x)) * ((2 * abs(x) + y) // (2 * y))


def plain_advantages(earned, each):
    more = []
    for at in range(0, len(earned), each):
        known = [round(65536 * x) for x in earned[at:at + each] if x is not None]
        more += [0 if x is None else nearest(round(65536 * x) * len(known) - sum(known), len(known))
                 for x in earned[at:at + each]]
    some = [abs(x) for x in more if x]
    return [int(np.sign(x)) * sum(abs(x) >= max(1, -(-(4 * level - 2) * sum(some) // (7 * len(some))))
                                  for level in range(1, 8)) for x in more]


@pytest.mark.parametrize("seed", range(20))
def test_advantages(seed):
    rng = np.random.default_rng(seed)
    cfg = random_configuration(1000)[0].changed(OBJECTIVE_TEXTS=(each := int(rng.integers(2, 9))))
    earned = (rng.integers(0, 3, 8 * each) * 10.0 ** rng.integers(-4, 5, 8 * each) * rng.choice([1, -1])).tolist()
    for i in rng.integers(0, len(earned), len(earned) // 4 * (seed % 2)):
        earned[i] = None
    earned[:each] = [earned[0]] * each                        # equal rewards
    got = rewards.advantages(cfg, earned)
    assert got.tolist() == plain_advantages(earned, each)
    assert not got[:each].any() and set(got) > {0} and abs(got).max() <= 7


def test_one_text_of_eight_that_is_right_weighs_as_much_as_the_others():
    cfg = random_configuration(1000)[0].changed(OBJECTIVE_TEXTS=8)
    assert rewards.advantages(cfg, [1.0] + 7 * [0.0] + 8 * [0.5]).tolist() == [7] + 7 * [-1] + 8 * [0]
    assert not rewards.advantages(cfg, 16 * [None]).any()
    assert not rewards.advantages(cfg, [3.0] + 15 * [None]).any()


@pytest.mark.parametrize("share, chunks", [(0.5, 8), (0.1, 8), (0.5, 1), (0.0, 4), (1.0, 4), (0.35, 3)])
def test_a_share_of_the_chunks_votes_from_the_data(share, chunks):
    cfg = random_configuration(1000)[0]
    cfg = cfg.changed(TEXT_SHARE=share, POPULATION_SIZE=chunks * cfg.CHUNK_SIZE)
    text = [[rewards.is_text(cfg, step, chunk) for chunk in range(chunks)] for step in range(400)]
    assert abs(np.mean(text) - share) < 0.01
    assert all(abs(sum(of_step) - share * chunks) < 1 for of_step in text)
    for step, of_step in enumerate(text):
        if any(of_step):
            loss = sum(rewards.text_loss(cfg, step, 1000) for _ in range(sum(of_step)))
            assert 1000 * chunks - sum(of_step) < loss <= 1000 * chunks


def test_texts_of_a_prompt_have_its_number_and_draws_of_their_own():
    cfg = random_configuration(1000)[0].changed(OBJECTIVE_TEXTS=4)
    choices, draws = rewards.text_draws(cfg, (1 << 32) - 3, 8, 8)
    want = [int(steps.hash32((1 << 32) - 3 + g & 0xFFFFFFFF, 1 << 28)) for g in (8, 12)]
    assert choices.tolist() == 4 * want[:1] + 4 * want[1:]
    assert draws.tolist() == [int(steps.hash32((1 << 32) - 3 + g & 0xFFFFFFFF, 1 << 29)) for g in range(8, 16)]


def some_texts(seed):
    """(Config, training tokens, arguments of an engine's `vote`): texts and advantages drawn by a seed."""
    cfg, data = random_configuration(seed)
    rng, n = np.random.default_rng(seed), cfg.CHUNK_SIZE
    texts = [rng.integers(0, cfg.VOCAB_SIZE, rng.integers(3, 15)) for _ in range(n)]
    own = [rng.random(len(text)) < 0.7 for text in texts]
    own[0][-1] = True
    advantages = rng.integers(-7, 8, n).astype(np.int8)
    advantages[0] = rng.choice([-7, -2, 3])
    windows, weights, counted = rewards.text_windows(texts, own, advantages)
    assert len(windows) == np.count_nonzero(advantages) and windows.shape[1] % 8 == 1
    return cfg, data, (n, windows, weights, counted, float(rng.choice([0.25, 1.0, 1.5])))


@pytest.mark.parametrize("seed", [1000, 1001, 1002, 1005, 1007])
def test_votes_of_texts_are_those_of_the_plain_reading(seed):
    cfg, data, (first, windows, weights, counted, temperature) = some_texts(seed)
    engine = cpu_engine.CpuEngine(cfg, data, threads=1)
    packed = engine.vote(first, windows, weights, counted, temperature)
    got = rules.unpacked_digits(packed, cfg.CHUNK_DIGITS, cfg.DIGIT_VALUES)
    reading = rewards.text_reading(cfg, counted.shape[1], temperature)
    votes, _ = votes_of_windows(reading, parameters.initial_state(cfg), windows, first, weights, counted)
    equal(got, chunk_digits(cfg, votes))
    assert len(np.unique(got)) >= 3


@pytest.mark.gpu
@pytest.mark.parametrize("seed", range(1000, 1004))
def test_votes_of_texts_on_the_gpu(seed):
    from engine import cuda_engine
    cfg, data, arguments = some_texts(seed)
    gpu, cpu = cuda_engine.CudaEngine(cfg, data), cpu_engine.CpuEngine(cfg, data, threads=1)
    for _ in range(2):                                       # launches, then a graph of them
        assert gpu.vote(*arguments) == cpu.vote(*arguments)
        assert gpu.evaluate(0, cfg.CHUNK_SIZE) == cpu.evaluate(0, cfg.CHUNK_SIZE)
