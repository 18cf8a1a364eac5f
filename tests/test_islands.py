"""Islands: introductions, comparisons, merges, elites, crashes."""

import math
from contextlib import ExitStack, closing, contextmanager
from json import dumps

import numpy as np
from pytest import approx, mark

from cluster import history, snapshots, wire
from cluster.auth import Access, client_tls, server_tls
from cluster.history import open_run
from cluster.wire import frame
from islands import gossip, merging
from islands.gossip import Elites
from model import parameters
from coordinators import Server, free_port, turned_away, until
from fakes import CFG, FakeEngine, FakeObjective, REWARDED, SECRET, UNITS, VALIDATION, full
from commands import run

ISLE = CFG.changed(VALIDATE_EVERY=5, SNAPSHOT_EVERY=5, SAMPLE_EVERY=0, GOSSIP_RATE=1.0, AUDIT_RATE=0.0)


def changed(**constants):
    return ISLE.changed(**constants)


class Learner(FakeEngine):
    """Its validation falls from 8 bits/byte by rate / 1000 a step. What it has learned is in weights 8 and 9, so that
    it travels with the state; the optimizer's moments are noise, so that a state takes several frames."""

    def __init__(self, cfg, rate, pause=0.002):
        self.rate = rate
        super().__init__(cfg, pause)

    def load(self, state):
        super().load(state)
        self.level = (int(state.weights[8]) * 100 + int(state.weights[9])) if state.step else 0

    def state(self):
        state = super().state()
        state.weights[8:10] = divmod(self.level, 100)
        if not state.moments.any():
            noise = np.random.default_rng(self.cfg.ISLAND_SEED).normal(size=state.moments.shape).astype(np.float32)
            state.moments = self.whole.moments = np.abs(noise) * np.float32(0.01)
        return state

    def update(self, fitness):
        super().update(fitness)
        self.level = min(self.level + self.rate, 9999)
        return 100 + self.step

    def bits(self):
        return 8 - self.level / 1250

    def validate(self, windows):
        return self.bits() * math.log(2) * VALIDATION.n_bytes, windows[:, 1:].size


class Isle(Server):
    """An island with a worker, which learns at `rate` (0: without a worker); of a run with an objective, it judges."""

    def __init__(self, directory, name, rate=10, peers=(), cfg=ISLE, engine=None, validation=VALIDATION, port=0,
                 settings={}, **options):
        self.cfg = cfg.changed(ISLAND_SEED=sum(name.encode()))   # another for every name used here
        peers = [("127.0.0.1", getattr(peer, "port", peer)) for peer in peers]
        island = gossip.IslandSettings(name, peers, **settings)
        super().__init__(directory, self.cfg, port, save=True, island=island, **options)
        self.directory, self.events, self.validation = directory, [], validation
        self.coordinator.events.sinks.append(self)
        self.engine = engine or (Learner(self.cfg, rate) if rate else None)

    @property
    def start(self):
        return self.run.start

    def shown(self):
        """What its status says of it."""
        return self.status()["island"]

    def emit(self, event, line):
        self.events.append(event)

    def told(self, event, /, **fields):
        return [e for e in list(self.events) if e["event"] == event and fields.items() <= e.items()]

    def tells(self, event, /, **fields):
        """Waits for such an event and returns the first."""
        until(lambda: self.told(event, **fields))
        return self.told(event, **fields)[0]

    def work(self, engine):
        return super().work(engine, validation=self.validation, objective=engine if self.cfg.OBJECTIVE else None)

    def late_worker(self):
        """The engine of another worker, once it is in the present epoch."""
        late = Learner(self.cfg, 3)
        self.work(late)
        until(lambda: late.step > self.start.step)
        return late

    def __enter__(self):
        super().__enter__()
        if self.engine:
            self.worker = self.work(self.engine)
        return self

    def snapshot(self, step):
        """The path of a snapshot, which may have its figure in the name."""
        path, = self.directory.glob(f"snapshot-{step:08d}*.egg")
        return path

    def replayed(self, name=history.FILE, until_step=None):
        """The State at the end of the epoch in a file, from what lies in the directory and an engine alone."""
        run = history.Run(self.cfg, open(self.directory / name, "rb", buffering=0), str(self.directory))
        engine = Learner(self.cfg, RATES[self.cfg.ISLAND_SEED])
        if run.start.step:
            engine.load(snapshots.unpack(self.cfg, self.snapshot(run.start.step).read_bytes()))
        history.replay(run, engine, until_step)
        run.close()
        return engine.state()


def digest(state):
    """As headers and events have it."""
    return parameters.digest_of(state).hex()


RATES = {97: 30, 98: 3}                                          # of islands a and b where they are replayed


GIVES = dict(settings=dict(accept=False))


@contextmanager
def two(directory, rates=(30, 3), ours={}, theirs={}, **both):
    """Islands a and b, which calls a, with these rates of learning and options. If a is the better one, it is so from
    the start, however slow the machine is."""
    with Isle(directory / "a", "a", rates[0], **both, **ours) as a:
        a.reaches(11 if rates[0] > rates[1] else 0)              # it has been validated at step 10
        with Isle(directory / "b", "b", rates[1], [a], **both, **theirs) as b:
            yield a, b


class Rewarded(Learner, FakeObjective):
    """Its validation rises with what it learns, and so does its reward: that decides."""

    def bits(self):
        return 1 + self.level / 1250

    def reward(self, engine):
        return self.level / 1250 - 4


def test_islands_with_an_objective_compare_rewards_and_refuse_another_one(tmp_path):
    cfg = changed(**REWARDED)
    ours, theirs = (dict(engine=Rewarded(cfg.changed(ISLAND_SEED=seed), rate)) for seed, rate in RATES.items())
    with two(tmp_path, ours=ours, theirs=theirs, cfg=cfg) as (a, b):
        merge = b.tells("merge")
        assert merge["peer"] == "a" and merge["fitness_kind"] == "reward" and merge["theirs"] < merge["ours"]
        stranger(a, "must be the same on all islands: OBJECTIVE", cfg=cfg.changed(OBJECTIVE="b" * 64))
    assert any("-reward-" in path.name for path in (tmp_path / "a").glob("elite-*"))


# --- who is a peer ----------------------------------------------------------------------------------------------------

def stranger(isle, words, name="stranger", cfg=ISLE, seed=99):
    """An island that calls is turned away with these words."""
    cfg = cfg.changed(ISLAND_SEED=seed)
    turned_away(words, isle, cfg, role="island", name=name, config=cfg.shared())


def test_what_must_be_the_same_on_all_islands_is(tmp_path):
    with Isle(tmp_path / "a", "a", rate=0) as a:
        for says, values in [("SEQ_LEN = 16 there, 8 here", dict(cfg=changed(SEQ_LEN=16))),
                             ("ISLAND_SEED = 97 there and here", dict(seed=97)),
                             ("called a, as this island", dict(name="a"))]:
            stranger(a, says, **values)
            assert says in a.said
        with a.connect() as old:
            old.sendall(frame(wire.Frame(wire.JOB_REQUEST), bytes(24)))
            assert old.recv(100) == b"" and "protocol 1 has no secret, TLS, islands" in a.said
        other = changed(SIGMA_SHIFT=4, LR_SCHEDULE=((0, 0.1),), CHUNK_SIZE=16, VALIDATE_EVERY=7)
        with Isle(tmp_path / "b", "b", 0, [a], cfg=other) as b:
            b.tells("peer", peer="a", state="up")
    with Server(tmp_path, CFG) as plain, Isle(tmp_path / "c", "c", 0, [plain]) as c:
        c.says("is no island")


def test_islands_find_each_other_whatever_list_they_are_given(tmp_path):
    """Everybody is given everybody, itself too; one that is away is called until it comes."""
    ports = [free_port() for _ in range(3)]
    with ExitStack() as stack:
        isles = [stack.enter_context(Isle(tmp_path / n, n, 0, ports, port=port)) for n, port in zip("abc", ports)]
        until(lambda: all([peer["state"] for peer in isle.shown()["peers"]] == ["up"] * 2 for isle in isles))
    assert not any("is refused" in isle.said for isle in isles)


def test_islands_with_a_secret_and_tls(tmp_path, certificates):
    cert, key = certificates
    access = Access(SECRET, server_tls(cert, key))
    with two(tmp_path, (0, 0), access=access, settings=dict(tls=client_tls(cert, cert, key))) as (a, b):
        b.tells("peer", peer="a", state="up")
    with two(tmp_path, (0, 0), dict(access=Access(SECRET))) as (_, b):
        b.says("wants a secret")


def test_islands_that_begin_with_one_model_have_their_own_noise(here):
    from tools import use
    cfg = changed(ISLAND_SEED=1)
    metadata = {"format": use.FORMAT, "config": dumps(cfg.saved()), "step": "9", "seed": "77"}
    use.write_tensors("w", use.to_arrays(cfg, Learner(cfg, 1).state(), False), metadata)
    starts = []
    for number in 1, 2, 3:
        assert run(f"import w --save-dir {number} -D ISLAND_SEED={number}", preset="").returncode == 0
        starts += history.epochs(str(number))
    assert starts[0].seed == 77 and len({start.seed for start in starts}) == 3
    assert [start.step for start in starts] == [9] * 3


# --- comparisons and epochs -------------------------------------------------------------------------------------------

def test_the_worse_island_takes_the_better_ones_state_and_all_goes_on(tmp_path):
    """Epoch, header, events, status; the run is resumed, rebuilt by replay, joined by a late worker and copied
    elsewhere."""
    with two(tmp_path, cfg=changed(VALIDATE_EVERY=1)) as (a, b):
        until(lambda: b.told("merge") and b.run.step > b.start.step + 3)
        assert b.late_worker().loads >= 1 and a.start.epoch == 0 and not a.told("merge")
    merge, start = b.told("merge")[-1], b.start
    assert start.origin["epoch"] == start.epoch == merge["epoch"] >= 1
    assert {**merge, "kind": "clone", "peer": "a", "fitness_kind": "validation"} == merge
    assert start.origin["digest"] == merge["digest"] and merge["theirs"] < merge["ours"]
    assert [start.epoch for start in history.epochs(b.directory)] == [*range(start.epoch + 1)]
    assert (b.island.status()["since"], b.island.status()["from"]) == (start.step, "a")
    begun = snapshots.unpack(b.cfg, b.snapshot(start.step).read_bytes())
    assert (begun.step, begun.seed, digest(begun)) == (start.step, start.seed, start.origin["digest"])
    with Isle(tmp_path / "b", "b", 3) as again:                                 # a worker that begins at step 0
        again.reaches(b.replayed().step + 3)
        assert again.start == start and again.engine.loads >= 1
    with closing(open_run(b.cfg, tmp_path / "moved", tmp_path / "b")) as moved:
        assert (moved.start, moved.step) == (start, again.run.step)
        assert snapshots.Shelf(b.cfg, moved).newest >= start.step


def test_islands_with_unit_trials_forget_the_beginning_of_an_epoch(tmp_path):
    """It begins with a snapshot then; a late worker, a restart and a replay lead to the same state."""
    cfg = UNITS.changed(VALIDATE_EVERY=5, SNAPSHOT_EVERY=5, SAMPLE_EVERY=0, GOSSIP_RATE=1.0)
    with two(tmp_path, ours=GIVES, cfg=cfg) as (a, b):
        b.tells("merge")
        a.stop()
        until(lambda: b.start.epoch and b.start.step > b.start.origin.get("since", math.inf))
        b.late_worker()
    start = b.start
    assert start.origin["since"] == b.told("merge")[-1]["step"] < start.step
    with Isle(tmp_path / "b", "b", 3, cfg=cfg) as again:
        until(lambda: again.run.step > b.run.step + 12 and again.start.step > start.step)
        again.stop()
    again.worker.join(60)                                    # it may still be about an update
    at_end = b.replayed(until_step=again.engine.step)
    assert parameters.digest_of(at_end) == again.engine.digest() and again.engine.step > start.step
    assert "state at step" not in b.said + again.said        # all replicas stayed equal


@mark.parametrize("constants", [dict(MERGE="recombine", OPTIMIZER_MERGE="reset"), dict(OPTIMIZER_MERGE="interpolate")])
def test_a_mixed_state_is_what_the_two_parents_give(tmp_path, constants):
    with two(tmp_path, ours=GIVES, cfg=changed(**constants)) as (a, b):
        b.tells("merge")
        b.stop()
        a.stop()
    first = history.epochs(tmp_path / "b")[1].origin
    ours, theirs = b.replayed("history-000.egg"), a.replayed(until_step=first["peer_step"])
    assert digest(merging.merge(b.cfg, ours, theirs, first["ours"], first["theirs"])) == first["digest"]


def test_who_does_not_accept_gives_and_keeps(tmp_path):
    with two(tmp_path, (0, 30), GIVES) as (a, b):
        b.reaches(11)                                            # it is the better one when the other begins
        a.worker = a.work(Learner(a.cfg, 3))
        b.tells("gossip", peer="a", outcome="keep")
        a.reaches(26)
    assert a.start.epoch == b.start.epoch == 0 and not a.told("merge")


def test_bytes_and_tokens_are_never_compared(tmp_path):
    with two(tmp_path, theirs=dict(validation=VALIDATION._replace(unit="bits/token"))) as (a, b):
        until(lambda: b.told("gossip", outcome="other kind"))
        assert (a.island.fitness.unit, b.island.fitness.unit) == ("bits/byte", "bits/token")
    assert a.start.epoch == b.start.epoch == 0


@mark.parametrize("damage", ["promise", "byte"])
def test_a_wrong_state_is_never_used(tmp_path, damage):
    with two(tmp_path, ours=GIVES) as (a, b):
        def spoil():
            shelf, plain = a.shelf, a.shelf.block

            def block(*place):
                total, data = plain(*place)
                return total, data[:-1] + b"?"

            if damage == "promise":
                shelf.sha256 = {step: b"x" * 32 for step in range(10 ** 4)}
            else:
                shelf.block = block
        a.calls.put(spoil)
        b.tells("peer", state="refused")
        b.reaches(b.run.step + 3)
    assert "not a snapshot" in b.said or "of step" in b.said.partition("is refused: ")[2]


# --- elites and rejuvenation ------------------------------------------------------------------------------------------

def test_elites_are_the_best_and_no_merge_touches_them(tmp_path):
    with two(tmp_path, theirs=dict(cfg=changed(ELITES=3))) as (a, b):
        until(lambda: len(b.told("merge")) >= 2)
        until(lambda: b.told("elite") and b.told("elite")[-1]["step"] > b.told("merge")[-1]["step"])
    taken = [event["peer_step"] for event in b.told("merge")]
    assert len(taken) == len({*taken}), "one state is not taken twice"
    kept = sorted(b.island.elites.files)
    assert 1 < len(kept) <= 3
    assert sorted(path.name for path in b.directory.glob("elite-*")) == sorted(elite.name for elite in kept)
    assert kept[0].fitness == approx(min(told["fitness"] for told in b.told("elite")), abs=1e-4)


def test_elites_are_the_best_of_all_epochs(tmp_path):
    elites, file = Elites(tmp_path, 2), tmp_path / "file"

    def offer(step, figure, to=elites):
        file.write_bytes(b"a snapshot")
        return to.offer(file, 0, step, "validation", figure)

    for step, figure, taken in (20, 7.0, True), (30, 6.0, True), (40, 7.5, False), (20, 5.0, True), (20, 5.0, False):
        assert offer(step, figure) is taken
    assert [elite.step for elite in elites.files] == [20, 30] and Elites(tmp_path, 2).files == elites.files
    nobody = Elites(tmp_path, 0)
    assert nobody.files and not offer(40, 1.0, nobody)


def test_an_island_that_stands_still_is_rejuvenated(tmp_path):
    cfg = changed(REJUVENATE_AFTER=6, GOSSIP_RATE=0.0)

    class Still(Learner):
        def bits(self):
            return 5.0

    with Isle(tmp_path, "a", cfg=cfg, engine=Still(cfg.changed(ISLAND_SEED=97), 1)) as a:
        event = a.tells("rejuvenated")
        begun = snapshots.unpack(a.cfg, a.snapshot(event["step"]).read_bytes())
    assert not begun.moments[:, :2].any() and event["epoch"] == 1


# --- crashes ----------------------------------------------------------------------------------------------------------

def test_a_disk_without_room_keeps_the_own_state(tmp_path, monkeypatch):
    with two(tmp_path) as (a, b):
        monkeypatch.setattr(history, "replacing", full)
        b.says("goes on with our state: the new state cannot be kept: No space left")
        b.reaches(b.run.step + 3)
    assert b.start.epoch == 0 or b.told("merge")


def test_a_peer_whose_name_is_unknown_does_not_keep_an_island_from_starting():
    assert gossip.Peer("no-such.invalid", 3).name == "no-such.invalid:3"
