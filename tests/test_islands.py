"""Islands: introductions, comparisons, transfers, merges, lies, chaos."""

import functools
import math
import os
import pathlib
import random
import re
import select
import shutil
import socket
import subprocess
import sys
import tempfile
from contextlib import ExitStack, closing, contextmanager, suppress
from itertools import permutations
from json import dumps, loads
from threading import Thread
from time import monotonic, sleep
from types import SimpleNamespace

import numpy as np
from hypothesis import given, settings
from hypothesis.strategies import (binary, booleans, dictionaries, floats, integers, lists, none, one_of, sampled_from,
                                   sets, text, tuples)
from pytest import approx, fixture, mark, raises

import egg_config
import egg_net
from cluster import history, snapshots, wire
from cluster.auth import Access, client_tls, server_tls
from cluster.history import open_run
from cluster.wire import ISLAND, STANDING, STATE, STATE_REQUEST, frame
from islands import gossip, merging, peers, transfer
from islands.gossip import Elites, Standing, read_standing
from model import seeds, state_digest
from model.parameters import initial_state
from coordinators import Coordinator, Peer2, Server, caller, free_port, refused, run_worker, until
from fakes import (ACTIVATIONS, CFG, FakeEngine, FakeObjective, GOOD_STEP, Lines, SECRET, VALIDATION, any_fitness,
                   full)
from fuzzing import EXAMPLES, SLOW
from recordings import HERE, digests
from run_logs import events
from commands import fails, run


# --- lies of peers ----------------------------------------------------------------------------------------------------

def test_a_state_that_comes_too_slowly_or_is_gone_is_given_up_and_its_giver_distrusted(monkeypatch, a):
    monkeypatch.setattr(transfer, "STALLED", 0.5)
    liar, size = Stranger(a, "liar"), snapshots.most_bytes(a.cfg)
    head = snapshots._make_head(a.cfg, 1, 1, b"s" * 32, b"", size)
    data = head + snapshots.pack(initial_state(a.cfg))
    a.reaches(11)
    liar.say(0.0, state=b"s" * 32)
    until(lambda: a.island.incoming)
    with suppress(TimeoutError):
        while True:                          # the head, then byte by byte, as long as it is asked for more
            wanted, at, _ = STATE_REQUEST.unpack(liar.link.next(STATE_REQUEST, 1))
            liar.send(STATE, wanted, len(head) + size, at, data[at:at + 1] if at else head)
            sleep(0.05)
    a.says("too little came")
    assert not a.island.incoming and a.peers.distrusted
    a.peers.check(monotonic() + 2 * peers.DISTRUST)
    assert not a.peers.distrusted
    stranger = Stranger(a)
    stranger.serve(b"", b"g" * 32, lambda: "any more" in a.said)
    stranger.say(0.001)                                       # and then nothing
    stranger.next(STATE_REQUEST)
    a.says("nothing more came of the state of stranger")
    assert not a.island.incoming and a.peers.distrusted


def test_an_island_that_is_called_writes_no_line_of_its_own(tmp_path):
    with Isle(tmp_path / "b", "b", rate=0) as b:
        b.peers.objection = lambda *_: None
        b.peers.card["config"] = {**ISLE.shared(), "SEQ_LEN": "8\nStep 999999 | Tokens: 1 B", "\nStep 888888": 1}
        with Isle(tmp_path / "a", "a", rate=0, peers=[b]) as a:
            a.says("refuses this island")
    assert "Step 999999" in a.said and "\nStep" not in a.said


def test_one_host_cannot_fill_the_table_of_peers_and_who_is_gone_is_forgotten(monkeypatch, a):
    monkeypatch.setattr(peers, "MOST_OF_HOST", 5)
    known = a.peers.known

    def all_have_gone():
        until(lambda: not any(peer.session for peer in known.values()))

    for i in range(12):                                      # they come and go
        Stranger(a, f"name{i}", seed=100 + i).close()
        all_have_gone()
    assert len(known) <= 5
    stay = [Stranger(a, f"stay{i}", seed=200 + i) for i in range(5)]
    with refused("5 islands are known here, the maximum for one host"):
        Stranger(a, "more", seed=300)
    other = caller("127.0.0.3", a, ISLE, lambda isle, cfg: Stranger(isle, "other", seed=301))
    until(lambda: set(known) == {"other", *(f"stay{i}" for i in range(5))})
    with refused("an island of this name is connected from 127.0.0.3"):
        Stranger(a, "other", seed=302)                  # a name that is in use cannot be taken over
    for one in (*stay, other):
        one.close()
    all_have_gone()
    a.peers.check(monotonic() + 2 * peers.FORGOTTEN)
    assert not known


def test_an_island_that_stands_still_is_rejuvenated_with_a_state_that_is_confirmed(tmp_path, monkeypatch):
    """Two workers: one gives the state with which an epoch begins, the other one states its hash."""
    hashed, plain = [], snapshots.state_hash

    def state_hash(state, *kind):
        hashed.extend([] if kind else [state.step])                  # SHA-256 is that of a snapshot's head
        return plain(state, *kind)

    monkeypatch.setattr(snapshots, "state_hash", state_hash)
    with Isle(tmp_path, "a", 0, cfg=changed(REJUVENATE_AFTER=12, SNAPSHOT_EVERY=1000)) as a:
        class Beside(Learner):
            def evaluate(self, *members):                # not ahead of the other, which would be expected no more
                until(lambda: all(engine.step >= self.step for engine in engines) or not a.thread.is_alive())
                return super().evaluate(*members)

        engines = [Beside(a.cfg, 0) for _ in range(2)]
        for engine in engines:
            a.work(engine)
        first = a.tells("rejuvenated")
        assert hashed == [first["step"]] and "goes on with our state" not in a.said
        second = a.tells("rejuvenated", epoch=2)
    assert first["epoch"] == 1 and 12 <= second["step"] - first["step"] < 20 and "no better for 12 steps" in a.said
    starts = history.epochs(tmp_path)
    # as after a kill in a handover
    history.link_file(tmp_path / history.FILE, tmp_path / history.OLD.format(starts[-1].epoch))
    assert history.epochs(tmp_path) == starts
    start = starts[1]
    assert start.origin["kind"] == "rejuvenate" and start.origin["digest"] == first["digest"]


@mark.parametrize("ours, theirs", [(None, 1.0), ("1", 1.0), (1.0, None), (1.0, "x"), (1.0, 0.5)])
def test_what_a_header_says_of_a_merge_is_believed_only_if_it_can_be(ours, theirs):
    """The directory of a run may come from a stranger."""
    fitness, warned = gossip.Fitness(), []
    for step in range(100):
        fitness.add("loss", gossip.KINDS["loss"][0], 9.0, step)
    island = SimpleNamespace(
        fitness=fitness, peers=SimpleNamespace(known={}), events=SimpleNamespace(warn=warned.append),
        on_trial={"epoch": 1, "digest": "00", "fitness_kind": "loss", "kind": CFG.MERGE, "from": "b", "ours": ours,
                  "theirs": theirs})
    assert gossip.Island._must_undo(island) == bool(warned) == ((ours, theirs) == (1.0, 0.5))
    island.on_trial = {"epoch": 1, "digest": "00", "fitness_kind": "loss"}
    assert not gossip.Island._must_undo(island) and island.on_trial is None


def test_coming_and_going_does_not_fill_the_log(a):
    for _ in range(150):
        Stranger(a, "moth").close()
    assert a.said.count("peer moth") < 100


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
        self.weights = np.maximum(self.weights, -127)            # as the update of a model
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
        self.peers = self.island.peers
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

    def outcomes(self, first):
        """{outcome} of its tournaments from number `first` on."""
        return {event["outcome"] for event in self.told("gossip")[first:]}

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
    return state_digest.of_state(state).hex()


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


@fixture
def a(tmp_path):
    """An island alone, which learns slowly."""
    with Isle(tmp_path, "a", 3) as a:
        yield a


# --- what the command line says ---------------------------------------------------------------------------------------

def test_addresses_bandwidths_and_names():
    assert peers.parse_peer("10.0.0.2:5000") == ("10.0.0.2", 5000) and peers.parse_peer("[::1]:1") == ("::1", 1)
    assert [*map(peers.parse_bandwidth, ("0", "1000", "500k", "2.5M"))] == [0, 1000, 500e3, 2.5e6]
    for parse, texts in (
            (peers.parse_peer, ("", "host", "host:", ":5", "host:0", "host:65536", "::1:5", "host:5x", "host:\u0665")),
            (peers.parse_bandwidth, ("", "3", "-1", "5G", "1e6", "nan", "0.5k", "k")),
            (peers.parse_name, ("", "two words", "x" * 65, "\x1b[2J", "<b>"))):
        for wrong in texts:
            with raises(ValueError):
                parse(wrong)


def test_peers_of_a_slurm_job(tmp_path, monkeypatch):
    """A stand-in for scontrol shows what is asked of it; what it cannot read or is not there is one line."""
    scontrol = tmp_path / "scontrol"
    scontrol.write_text('#!/bin/sh\n[ "$1 $2 $3" = "show hostnames n[1-3]" ] || exit 1\nprintf "n1\\nn2\\nn3\\n"\n')
    scontrol.chmod(0o755)
    job = {"SLURM_JOB_NODELIST": "n[1-3]", "SLURMD_NODENAME": "n2"}
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    assert peers.peers_from_slurm(7, job) == [("n1", 7), ("n3", 7)]
    for wrong in ({}, {"SLURM_JOB_NODELIST": "n[1"}):
        with refused("SLURM_JOB_NODELIST.*--peer$", egg_config.ConfigError):
            peers.peers_from_slurm(7, wrong)
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    with refused("needs scontrol to list the nodes: No such file.*--peer$", egg_config.ConfigError):
        peers.peers_from_slurm(7, job)


@mark.parametrize("arguments, status, says", [
    ("--peer 127.0.0.1:1", 2, "give --island NAME"),
    ("--island 'a b'", 2, "is not a name"),
    ("--island a --peer nowhere", 2, "is not HOST:PORT"),
    ("--island a --gossip-bandwidth fast", 2, "bytes a second"),
    ("--island a --save-dir here -D SNAPSHOT_EVERY=0", 2, "SNAPSHOT_EVERY above 0"),
    ("--island a --save-dir here --peer no-such.invalid:3", 1, "cannot be reached"),
    ("--island a --save-dir here --peer 'no such.invalid:3'", 2, "is not HOST:PORT"),
])
def test_wrong_use_is_one_line(here, arguments, status, says):
    fails(run(f"coordinator --port 0 --preset laptop {arguments}"), status, says)


def test_without_validation_the_training_loss_decides_and_is_shown_in_its_unit(tmp_path):
    cfg = changed(VALIDATE_EVERY=0)
    with two(tmp_path, cfg=cfg, validation=None) as (a, b):
        event, merge = b.tells("gossip", outcome="pull"), b.tells("merge")
        assert merge["fitness_kind"] == "loss" and merge["theirs"] < merge["ours"]
        b.says("is better")
        bits, unit = egg_config.loss_unit(cfg.constants())
        theirs, ours, shown = re.search(r"a is better, ([0-9.]+) against ([0-9.]+) (\S+): ", b.said).groups()
        assert shown == unit and event["kind"] == "loss" and event["ours"] > event["theirs"]
        assert float(theirs) == approx(bits * event["theirs"], abs=1e-3)
        assert float(ours) == approx(bits * event["ours"], abs=1e-3)
        found = a.shown()
        assert found["kind"] == "loss" and found["fitness"] == approx(bits * a.island.fitness.value, rel=0.5)
        until(lambda: any(peer["fitness"] for peer in b.shown()["peers"]))


class Rewarded(Learner, FakeObjective):
    """Its validation rises with what it learns, and so does its reward: that decides."""

    def bits(self):
        return 1 + self.level / 1250

    def reward(self, engine):
        return self.level / 1250 - 4


def test_islands_with_an_objective_compare_rewards_and_refuse_another_one(tmp_path):
    cfg = changed(OBJECTIVE="a" * 64)
    ours, theirs = (dict(engine=Rewarded(cfg.changed(ISLAND_SEED=seed), rate)) for seed, rate in RATES.items())
    with two(tmp_path, ours=ours, theirs=theirs, cfg=cfg) as (a, b):
        merge = b.tells("merge")
        assert merge["peer"] == "a" and merge["fitness_kind"] == "reward" and merge["theirs"] < merge["ours"]
        b.says("is better")
        theirs, ours = map(float, re.search(r"a is better, (\S+) against (\S+) reward: ", b.said).groups())
        assert theirs > ours and not a.told("merge") and a.shown()["fitness"] > ours
        with refused("must be the same on all islands: OBJECTIVE"):
            Stranger(a, "c", cfg=cfg.changed(OBJECTIVE="b" * 64))
    assert any("-reward-" in path.name for path in (tmp_path / "a").glob("elite-*"))


# --- who is a peer ----------------------------------------------------------------------------------------------------

class Stranger(Peer2):
    """An island spoken frame by frame, that calls."""

    def __init__(self, isle, name="stranger", cfg=ISLE, seed=99):
        cfg = cfg.changed(ISLAND_SEED=seed)
        super().__init__(isle, cfg, role="island", name=name, config=cfg.shared())
        self.card = loads(self.link.next(ISLAND))

    def say(self, fitness=5.0, state=b"s" * 32, ask=True):
        self.send(STANDING, Standing(fitness, "validation", "bits/byte", 50, 0, "stranger", state, 50, ask).pack())

    def serve(self, data, sha256, until, pieces=None):
        """Gives the snapshot file `data` to who asks for `sha256`, answers tournaments with a fitness of 0.001
        meanwhile."""
        asked = []
        while not until():
            try:
                opcode, payload = self.next(STANDING, STATE_REQUEST, timeout=0.05)
            except TimeoutError:
                continue
            if opcode == STANDING and loads(payload)["ask"]:
                self.say(0.001, state=sha256, ask=False)
            elif opcode == STATE_REQUEST:
                wanted, offset, size = STATE_REQUEST.unpack(payload)
                asked.append((offset, size))
                if pieces is not None and len(asked) > pieces:
                    self.close()
                    break
                self.send(STATE, wanted, len(data), offset, data[offset:offset + size])
        return asked


def test_islands_are_introduced_and_what_must_be_the_same_is(tmp_path):
    with Isle(tmp_path / "a", "a", rate=0) as a:
        for says, values in [("SEQ_LEN = 16 there, 8 here", dict(cfg=changed(SEQ_LEN=16))),
                             ("LOSS = exact there", dict(cfg=changed(LOSS="exact"))),
                             ("ISLAND_SEED = 97 there and here", dict(seed=97)),
                             ("called a, as this island", dict(name="a")),
                             ("cannot be shown", dict(name="a <b>"))]:
            with refused(says):
                Stranger(a, **values)
            assert says in a.said
        other = Stranger(a, "b",
                         cfg=changed(SIGMA_SHIFT=4, LR_SCHEDULE=((0, 0.1),), CHUNK_SIZE=16, VALIDATE_EVERY=7))
        assert other.card["name"] == "a" and other.card["config"]["ISLAND_SEED"] == 97
        a.tells("peer", peer="b", state="up")
        other.close()
        a.tells("peer", peer="b", state="down")
        again = Stranger(a, "b")                            # it may come back
        until(lambda: len(a.told("peer", peer="b", state="up")) == 2)
        with a.connect() as old:
            old.sendall(frame(wire.Frame(wire.JOB_REQUEST), bytes(24)))
            assert old.recv(100) == b"" and "protocol 1 has no snapshots" in a.said
        assert a.shown()["peers"][0]["state"] == "up"
        again.close()
        until(lambda: a.shown()["peers"][0]["state"] == "down")
    assert {"island", "peer"} <= {event["event"] for event in events(tmp_path / "a")}
    with Server(tmp_path, CFG) as plain, refused("is no island"):
        Stranger(plain)


def paired(isle):
    """Whether it has one connection to each of two others."""
    sessions = sum(peer.session is not None for peer in list(isle.peers.known.values()))
    return (sessions, len(isle.coordinator.hub.connections)) == (2, 2)


def test_an_address_that_refuses_is_followed_by_the_next():
    crew = object.__new__(peers.Peers)
    crew.coordinator = SimpleNamespace(closing=False)
    crew.events = SimpleNamespace(about=lambda *_, **__: None)
    target = peers.Target("127.0.0.1", 1)
    target.addresses = ["first", "second"]
    target.session = SimpleNamespace(role=SimpleNamespace(target=target, peer=None))
    target.session.close = functools.partial(crew.lost, target.session)
    crew.refused(target.session, "another configuration")
    assert target.addresses == ["second", "first"]
    assert target.pause == peers.LONGEST_PAUSE and target.logged and not target.session


def test_islands_find_each_other_whatever_list_they_are_given(tmp_path):
    """Everybody is given everybody, itself too, and calls both ways: one connection for each pair stays."""
    ports = [free_port() for _ in range(3)]
    with ExitStack() as stack:
        isles = [stack.enter_context(Isle(tmp_path / n, n, 0, ports, port=port)) for n, port in zip("abc", ports)]
        until(lambda: all(map(paired, isles)))
        sleep(0.5)
        assert all(map(paired, isles))
        assert all(sum(target.is_self for target in isle.peers.targets) == 1 for isle in isles)
    assert not any("refused" in isle.said for isle in isles)


def test_islands_with_a_secret_and_tls(tmp_path, certificates):
    cert, key = certificates
    access = Access(SECRET, server_tls(cert, key))
    with two(tmp_path, (0, 0), access=access, settings=dict(tls=client_tls(cert, cert, key))) as (a, b):
        a.tells("peer", peer="b")
        b.tells("peer", peer="a")
    plain = Access(SECRET)
    with Isle(tmp_path / "a", "a", 0, access=plain) as a, Isle(tmp_path / "c", "c", 0, [a]) as c, \
            Isle(tmp_path / "d", "d", 0, [a], access=Access(SECRET + b"x")) as d:
        c.tells("peer", state="refused")
        d.tells("peer", state="refused")
        assert "wants a secret" in c.said and "does not know the secret" in d.said
        assert not a.peers.known


def test_every_island_has_its_own_noise():
    states = [initial_state(changed(ISLAND_SEED=number)) for number in (0, 1, 2, 1 << 31)]
    assert all(np.array_equal(state.weights, states[0].weights) for state in states)
    now = [state.seed for state in states]
    assert now[0] == seeds.INITIAL_SEED
    for step in range(2000):
        assert len(set(now)) == 4
        now = [seeds.next_seed(seed, step) for seed in now]


def test_islands_that_begin_with_one_model_have_their_own_noise(here):
    from tools import use
    cfg = changed(ISLAND_SEED=1)
    state = Learner(cfg, 1).state()
    metadata = {"format": use.FORMAT, "config": dumps(cfg.saved()), "step": "9", "seed": "77"}
    use.write_tensors("w", use.to_arrays(cfg, state, False), metadata)
    starts = []
    for name, defines in ("same", ""), ("two", "-D ISLAND_SEED=2"), ("three", "-D ISLAND_SEED=3"):
        assert run(f"import w --save-dir {name} {defines}", preset="").returncode == 0
        starts.append(history.epochs(name)[0])
    assert starts[0].seed == 77 and len({start.seed for start in starts}) == 3
    assert {start.step for start in starts} == {9}


# --- tournaments and epochs -------------------------------------------------------------------------------------------

def test_the_worse_island_takes_the_better_ones_state_and_all_goes_on(tmp_path):
    """Epoch, header, events, status; the run is resumed, rebuilt by replay, joined by a late worker and copied
    elsewhere."""
    # with older figures the copy could be better than what the giver was when it was last validated
    with two(tmp_path, cfg=changed(VALIDATE_EVERY=1)) as (a, b):
        until(lambda: b.told("merge") and b.run.step > b.start.step + 3)
        island = b.shown()
        assert b.late_worker().loads >= 1 and a.start.epoch == 0 and not a.told("merge")
    merge, start = b.told("merge")[-1], b.start
    assert start.origin["epoch"] == start.epoch == merge["epoch"] >= 1
    assert {**merge, "kind": "clone", "peer": "a", "fitness_kind": "validation"} == merge
    assert {**start.origin, "digest": merge["digest"], "founder": "a"} == start.origin
    assert merge["theirs"] < merge["ours"]
    peer = island["peers"][0]
    assert (island["name"], peer["name"], peer["state"]) == ("b", "a", "up") and peer["taken"] >= 1
    assert [entry["epoch"] for entry in b.island.lineage] == [*range(start.epoch + 1)]
    assert b.island.lineage[-1]["from"] == "a"
    assert dumps(island) and a.coordinator.status()["island"]["peers"][0]["given"] >= 1
    pull = b.told("gossip", outcome="pull", kind="validation", peer="a")[0]
    assert pull["theirs"] < pull["ours"]
    # the state that came is the giver's of that step, and where both histories lie everything can be rebuilt
    first = history.epochs(tmp_path / "b")[1].origin
    assert digest(a.replayed(until_step=first["peer_step"])) == first["parent_theirs"]
    assert digest(b.replayed("history-000.egg", first["parent_ours_step"])) == first["parent_ours"]
    begun = snapshots.unpack(b.cfg, b.snapshot(start.step).read_bytes())
    assert (begun.step, begun.seed, digest(begun)) == (start.step, start.seed, start.origin["digest"])
    with Isle(tmp_path / "b", "b", 3) as again:                                 # a worker that begins at step 0
        again.reaches(b.replayed().step + 3)
        assert again.start == start and again.island.lineage == b.island.lineage and again.engine.loads >= 1
    moved = open_run(b.cfg, tmp_path / "moved", tmp_path / "b")
    assert moved.start == start and moved.step == again.run.step
    assert os.path.exists(tmp_path / "moved" / "history-000.egg")
    assert snapshots.Shelf(b.cfg, moved).newest >= start.step
    moved.close()
    with open(b.snapshot(start.step), "r+b") as file:                            # damage is found on resume
        file.seek(5000)
        file.write(b"damage")
    with refused(r"missing or damaged.*mv .*history-\d+.egg", history.HistoryError):
        egg_net.run_coordinator(b.cfg, port=0, save_dir=tmp_path / "b", island=gossip.IslandSettings("b", []),
                                console=egg_net.Console(Lines()))


def test_islands_with_noise_on_activations_forget_the_beginning_of_an_epoch(tmp_path):
    """It begins with a snapshot then; a late worker, a restart and a replay lead to the same state."""
    cfg = ACTIVATIONS.changed(VALIDATE_EVERY=5, SNAPSHOT_EVERY=5, SAMPLE_EVERY=0, GOSSIP_RATE=1.0)
    with two(tmp_path, ours=GIVES, cfg=cfg) as (a, b):
        b.tells("merge")
        a.stop()
        until(lambda: b.start.epoch and b.start.step > b.start.origin.get("since", math.inf))
        b.late_worker()
    start = b.start
    assert start.origin["since"] == b.told("merge")[-1]["step"] < start.step and start.origin["founder"] == "a"
    with Isle(tmp_path / "b", "b", 3, cfg=cfg) as again:
        until(lambda: again.run.step > b.run.step + 12 and again.start.step > start.step)
        again.stop()
    again.worker.join(60)                                    # it may still be about an update
    at_end = b.replayed(until_step=again.engine.step)
    assert state_digest.of_state(at_end) == again.engine.digest() and again.engine.step > start.step
    assert "state at step" not in b.said + again.said        # all replicas stayed equal


@mark.parametrize("constants", [dict(MERGE="recombine"), dict(OPTIMIZER_MERGE="interpolate"),
                                dict(MERGE="recombine", OPTIMIZER_MERGE="reset")])
def test_a_mixed_state_is_what_the_two_parents_give(tmp_path, monkeypatch, constants):
    cfg = changed(**constants)
    monkeypatch.setitem(gossip.REGRET, cfg.MERGE, math.inf)          # weights 8 and 9 do not mix as a number
    with two(tmp_path, ours=GIVES, cfg=cfg) as (a, b):
        b.tells("merge")
        b.stop()
        a.stop()
    first = history.epochs(tmp_path / "b")[1].origin
    ours, theirs = b.replayed("history-000.egg"), a.replayed(until_step=first["peer_step"])
    assert digest(ours) == first["parent_ours"] and first["parent_ours_step"] == ours.step
    assert digest(theirs) == first["parent_theirs"]
    assert digest(merging.merge(b.cfg, ours, theirs, first["ours"], first["theirs"])) == first["digest"]


def test_who_does_not_accept_gives_and_keeps(tmp_path):
    with two(tmp_path, (0, 30), GIVES) as (a, b):
        b.reaches(11)                                            # it is the better one when the other begins
        a.worker = a.work(Learner(a.cfg, 3))
        a.tells("gossip", peer="b", outcome="keep")
        b.tells("gossip", peer="a", outcome="offer")
        a.reaches(26)
    assert a.start.epoch == b.start.epoch == 0 and not a.told("gossip", outcome="pull")


def test_validation_and_loss_are_never_compared(tmp_path):
    with two(tmp_path, theirs=dict(validation=None)) as (a, b):
        until(lambda: a.island.fitness.kind == "validation" and b.run.step > 20)
        b.tells("gossip", outcome="refused")
        n = len(b.told("gossip"))
        until(lambda: len(b.told("gossip")) > n + 5)
        assert b.outcomes(n) == {"refused"} and b.island.fitness.kind == "loss"
    assert a.start.epoch == b.start.epoch == 0


def test_one_state_is_not_taken_twice(a):
    stranger = Stranger(a)
    stranger.serve(DATA, SHA256, lambda: a.told("merge"))
    n = len(a.told("gossip"))
    assert not stranger.serve(DATA, SHA256, lambda: "keep" in a.outcomes(n + 3))
    assert a.start.epoch == 1 and a.outcomes(n + 3) == {"keep"}
    stranger.serve(*own_snapshot(9500), lambda: a.start.epoch == 2)             # another one is


# --- states on their way ----------------------------------------------------------------------------------------------

STRANGE = changed(ISLAND_SEED=99)


def own_snapshot(level=9000, step=50, poisoned=False, cfg=STRANGE):
    """(bytes of a snapshot file, SHA-256 of its state)."""
    state = Learner(cfg, 1).state()
    state.step, state.weights[8:10] = step, divmod(level, 100)
    if poisoned:
        state.moments[5] = math.nan
    with tempfile.TemporaryDirectory() as directory:
        sha256 = snapshots.save(cfg, state, directory)
        return pathlib.Path(directory, f"snapshot-{step:08d}.egg").read_bytes(), sha256


DATA, SHA256 = own_snapshot()


@mark.parametrize("data, sha256", [
    (DATA, b"x" * 32),                                       # not the state that was promised
    (DATA[:3000] + b"damage" + DATA[3006:], SHA256),
    (DATA[:-1], SHA256),
    (DATA + b"more", SHA256),
    (b"EGGSNAP2" + bytes(2000), SHA256),
    own_snapshot(cfg=STRANGE.changed(N_LAYERS=2)),           # of another shape
    own_snapshot(poisoned=True),
], ids=range(7))
def test_a_wrong_state_is_never_used_and_its_giver_not_believed(tmp_path, data, sha256):
    with Isle(tmp_path, "a", 3) as a:
        stranger = Stranger(a)
        asked = stranger.serve(data, sha256, lambda: "nothing of stranger is taken for 600 s" in a.said)
        a.reaches(21)
        assert asked and a.start.epoch == 0 and a.peers.distrusted
        n = len(a.told("gossip"))
        assert not stranger.serve(data, sha256, lambda: len(a.told("gossip")) > n + 3)
        assert a.outcomes(n) == {"refused"} and a.shown()["peers"][0]["state"] == "distrusted"
    assert not [*tmp_path.glob("*.part")] and history.read_run(a.cfg, tmp_path).step == a.run.step


def test_a_transfer_goes_on_where_it_stopped(tmp_path):
    with Isle(tmp_path, "a", 3, settings=dict(bandwidth=1e6)) as a:
        asked = []
        while not a.told("merge"):
            with suppress(OSError):
                asked.append(Stranger(a).serve(DATA, SHA256, lambda: a.told("merge"), pieces=3))
        assert a.start.origin["peer_step"] == 50
    offsets = [offset for some in asked for offset, _ in some]
    assert len(DATA) > 6 << 16 and len(asked) > 2 and offsets == sorted(offsets)
    # what was not answered is asked again, no more
    assert [some[0][0] for some in asked[1:]] == [some[-1][0] for some in asked[:-1]]


def test_the_bandwidth_is_a_bound_in_both_directions(tmp_path):
    rate = 400e3
    ours, theirs = (dict(settings=dict(bandwidth=most)) for most in (rate, 0))
    with two(tmp_path, (30, 1), ours, theirs) as (a, b):
        merge, pull = b.tells("merge"), b.tells("gossip", outcome="pull")
        size = b.snapshot(merge["step"]).stat().st_size
        took = merge["time"] - pull["time"]
        assert took > (size - rate / 2) / rate * 0.9 and size > 2 * rate
        steps = [e for e in b.told("step") if pull["time"] < e["time"] < pull["time"] + took]
        assert len(steps) > 8
        assert max(e["seconds"] for e in steps) < max(0.5, took / 4)      # training goes on beside it


def test_a_bucket_passes_its_rate(monkeypatch):
    now = [7.0]
    monkeypatch.setattr(transfer, "time", SimpleNamespace(monotonic=lambda: now[0]))
    bucket, passed = transfer.Bucket(100e3), 0
    for _ in range(5000):
        now[0] += 1e-4
        passed += bucket.take(bucket.piece) * bucket.piece
    assert 50e3 - 2 * bucket.piece < passed <= 100e3 + bucket.piece


def test_a_flood_of_questions_is_bounded(a):
    a.reaches(3)
    stranger = Stranger(a)
    answers, began = 0, monotonic()
    for _ in range(500):
        stranger.say()
    with suppress(TimeoutError):
        while True:
            answers += not loads(stranger.link.next(STANDING, 0.5 if answers >= peers.QUESTIONS else 20))["ask"]
    assert peers.QUESTIONS <= answers <= peers.QUESTIONS + (monotonic() - began) / peers.ASK_EVERY + 1
    for _ in range(50):  # of nothing that is here: no more than one at a time is looked at
        stranger.send(STATE_REQUEST, b"?" * 32, 1 << 40, 1 << 31)
    assert STATE.unpack(stranger.link.next(STATE))[1:] == (0, 1 << 40, b"")
    a.reaches(a.run.step + 4)


# --- whose word counts ------------------------------------------------------------------------------------------------

def test_a_lie_about_fitness_is_found_out_and_taken_back(tmp_path):
    """The stranger promises 0.001 and gives an untrained model, whole and well-formed."""
    with Isle(tmp_path, "a", 60) as a:
        a.reaches(32)
        Stranger(a).serve(*own_snapshot(0), lambda: a.told("merge", kind="undo"))
        taken, back = a.told("merge")
        assert taken["peer"] == "stranger" and back["peer"] == "a" and a.peers.distrusted
        assert "promised 0.0010" in a.said
        a.reaches(back["step"] + 11)
        best = min(e["value"] for e in a.told("validation"))
        after = [e["value"] for e in a.told("validation") if e["step"] > back["step"]]
        assert after and max(after) < 7 and best < 6.6
    assert len([*tmp_path.glob("elite-*")]) == 1
    assert a.start.origin["kind"] == "undo" and a.start.origin["founder"] == "a"


def test_elites_are_the_best_and_no_merge_touches_them(tmp_path):
    with two(tmp_path, theirs=dict(cfg=changed(ELITES=3))) as (a, b):
        until(lambda: len(b.told("merge")) >= 2)
        until(lambda: b.told("elite") and b.told("elite")[-1]["step"] > b.told("merge")[-1]["step"])
    kept = sorted(b.island.elites.files)
    assert 1 < len(kept) <= 3
    assert sorted(path.name for path in b.directory.glob("elite-*")) == sorted(elite.name for elite in kept)
    epoch, state = b.island.elites.best(b.cfg)
    assert (kept[0].epoch, kept[0].step) == (epoch, state.step)
    assert not [*b.directory.glob("*.part")]
    assert kept[0].fitness == approx(min(told["fitness"] for told in b.told("elite")), abs=1e-4)


def test_elites_hold_more_than_one_kind_apart_and_survive_damage(tmp_path):
    elites = Elites(tmp_path, 2)

    def offer(step, figure, kind="validation", epoch=0, to=elites):
        file = tmp_path / f"file{step}"
        file.write_bytes(own_snapshot(step, step)[0])
        return to.offer(file, epoch, step, kind, figure)

    def steps():
        return [(elite.epoch, elite.step) for elite in elites.files]

    assert [offer(10, 0.5, "loss"), offer(20, 7.0), offer(30, 6.0), offer(40, 7.5), offer(40, 0.1, "loss"),
            offer(20, 5.0), offer(20, 5.0)] == [True, True, True, False, False, True, False]
    again = Elites(tmp_path, 2)
    assert steps() == [(0, 20), (0, 30)] and again.files == elites.files
    assert again.best(STRANGE)[1].step == 20
    assert offer(20, 5.5, epoch=1)
    assert steps() == [(0, 20), (1, 20)]                     # of another epoch
    assert offer(30, 5.4)
    (tmp_path / again.files[0].name).write_bytes(b"damage")
    assert Elites(tmp_path, 2).best(STRANGE)[1].step == 30
    none = Elites(tmp_path, 0)
    assert none.files and not offer(40, 1.0, to=none)


# --- crashes ----------------------------------------------------------------------------------------------------------

class Killed(BaseException):
    pass


def test_a_crash_at_any_moment_of_a_handover_leaves_one_whole_epoch(tmp_path, monkeypatch):
    """Every call that changes the disk is the last one once; what lies there then is opened and goes on."""
    cfg = changed(ISLAND_SEED=97)
    base, engine = tmp_path / "base", Learner(cfg, 10)
    run = open_run(cfg, base)
    for _ in range(12):
        fitness = any_fitness(cfg, run.step)
        run.append(fitness, 0, 0)
        engine.update(fitness)
    run.close()

    def island(run):
        return Coordinator(cfg, run, log_dir=tmp_path, console=egg_net.Console(Lines()),
                           island=gossip.IslandSettings("a", []))

    names, outcomes = ("link", "replace", "fsync", "unlink", "chmod", "symlink"), []
    for last in range(1, 40):
        directory = tmp_path / str(last)
        shutil.copytree(base, directory)
        coordinator = island(open_run(cfg, directory))
        state, calls = engine.state(), [0]

        def last_call(real):
            def call(*arguments, **options):
                calls[0] += 1
                if calls[0] == last:
                    raise Killed
                return real(*arguments, **options)
            return call

        with monkeypatch.context() as patch, suppress(Killed):
            for name in names:
                patch.setattr(os, name, last_call(getattr(os, name)))
            coordinator.begin_epoch(state, {"epoch": 1, "kind": "undo", "from": "a", "founder": "a",
                                            "digest": digest(state)})
        coordinator.run.close()
        coordinator.close()
        with closing(open_run(cfg, directory)) as run, closing(island(run)) as again:
            assert run.step == 12 and run.start.epoch in (0, 1)
            outcomes.append(run.start.epoch)
            if run.start.epoch:
                assert digests(again.shelf.state(12)) == digests(state)
                assert again.island.lineage[1]["digest"] == digest(state)
            else:
                replay = Learner(cfg, 10)
                history.replay(run, replay)
                assert digests(replay.state()) == digests(state) and not again.shelf.files
            run.append(GOOD_STEP, 0, 0)
        if calls[0] < last:                                          # nobody was killed
            break
    assert calls[0] < last > 8 and outcomes == sorted(outcomes) and {0, 1} == set(outcomes)


def test_a_disk_without_room_keeps_the_own_state(tmp_path, monkeypatch):
    with two(tmp_path) as (a, b):
        monkeypatch.setattr(history, "replacing", full)
        b.says("goes on with our state: the new state cannot be kept: No space left")
        monkeypatch.undo()
        before = b.run.step
        until(lambda: b.run.step > before + 3 and b.told("merge"))


# --- hostile bytes ----------------------------------------------------------------------------------------------------

JSON = one_of(none(), booleans(), integers(), floats(), text(max_size=9), lists(integers(), max_size=3),
              dictionaries(text(max_size=3), integers(), max_size=2))
GOOD = loads(Standing(1.0, "loss", "logit units", 1, 0, "x", b"s" * 32, 1, True).pack())


@SLOW
@given(dictionaries(sampled_from([*GOOD, "more"]), JSON, max_size=4),
       sets(sampled_from(list(GOOD)), max_size=1), binary(max_size=40))
def test_any_standing_is_read_or_refused(values, missing, raw):
    for payload in (raw, dumps({**{k: v for k, v in GOOD.items() if k not in missing}, **values}).encode()):
        try:
            standing = read_standing(payload)
        except wire.FrameError:
            continue
        assert read_standing(standing.pack()) == standing
        assert (standing.fitness is None or 0 <= standing.fitness < 1e9)


@given(lists(tuples(integers(0, 5), binary(max_size=300), integers(1, 200), integers(0, 1 << 40)),
             max_size=6))
def test_any_pieces_of_a_file_end_without_a_trace(pieces):
    with tempfile.TemporaryDirectory() as directory:
        download = transfer.Incoming(STRANGE, None, SimpleNamespace(state=SHA256), directory, None)
        try:
            for kind, noise, size, place in pieces:
                total, at, some = len(DATA), download.got, DATA[download.got:download.got + size]
                download.add(*[(total, at, some), (total, at, some), (total, at, some[:100] + noise),
                               (total + 1, at, some), (total, place, some), (1 << 63, at, noise)][kind])
            if download.finished:
                download.upload.check()
                assert download.upload.sha256 == SHA256
        except ValueError:
            pass
        download.drop()
        assert os.listdir(directory) == []


@fixture(scope="module")
def besieged(tmp_path_factory):
    with Isle(tmp_path_factory.mktemp("besieged"), "a", 3) as a:
        yield a


@settings(max_examples=EXAMPLES // 6)
@given(lists(tuples(sampled_from([0, 1, 32, 34, 35, 36, 40, 43, 44, 45, 46, 47, 200]), binary(max_size=120)),
             min_size=1, max_size=4))
def test_a_live_island_takes_any_frames(besieged, frames):
    stranger = Stranger(besieged, f"s{random.randrange(50)}")
    with suppress(OSError, egg_net.NetError):
        for opcode, payload in frames:
            stranger.send(wire.Frame(opcode), payload)
        stranger.link.check(0.005)
    stranger.close()
    besieged.reaches(besieged.run.step + 1)
    assert besieged.start.epoch == 0


# --- chaos ------------------------------------------------------------------------------------------------------------

class Sea(Thread):
    """What lies between islands: whoever calls another one does so through here. cut: islands that reach nobody; slow:
    bytes that pass at a time between two looks, by island."""

    def __init__(self, ports):
        super().__init__(daemon=True)
        self.ports, self.stop = ports, False
        self.heal()
        self.doors = {socket.create_server(("127.0.0.1", 0)): pair for pair in permutations(range(len(ports)), 2)}
        self.links = {}                                          # socket -> (its other side, pair of islands)
        self.start()

    def heal(self):
        self.cut, self.slow = set(), {}

    def way(self, i):
        """[(host, port)] of all others, as island i calls them."""
        return [door.getsockname()[:2] for door, pair in self.doors.items() if pair[0] == i]

    def run(self):
        while not self.stop:
            for ready in select.select([*self.doors, *self.links], [], [], 0.01)[0]:
                with suppress(OSError):
                    if ready in self.doors:
                        self._meet(ready)
                    elif ready in self.links:
                        self._pass(ready)
            for end in [s for s, (_, pair) in self.links.items() if self.cut & set(pair)]:
                self._part(end)
        for sock in [*self.doors, *self.links]:
            sock.close()

    def _meet(self, door):
        sock, pair = door.accept()[0], self.doors[door]
        try:
            if self.cut & set(pair):
                raise OSError
            other = socket.create_connection(("127.0.0.1", self.ports[pair[1]]), 1)
        except OSError:
            sock.close()
            return
        self.links.update({sock: (other, pair), other: (sock, pair)})

    def _pass(self, sock):
        other, pair = self.links[sock]
        most = min((self.slow[i] for i in pair if i in self.slow), default=1 << 16)
        try:
            data = sock.recv(most)
            other.settimeout(1)
            other.sendall(data)
        except OSError:
            data = b""
        if not data:
            self._part(sock)

    def _part(self, sock):
        if sock in self.links:
            for end in sock, self.links[sock][0]:
                del self.links[end]
                end.close()


class Archipelago:
    """Islands as processes, each with a worker, and a seed that decides what goes wrong: they are killed and started
    again, stopped for a while, cut off and slowed down; a liar promises what its state does not keep, a forger sends
    states that are not those it promised."""

    def __init__(self, directory, seed, islands, cfg):
        self.directory = directory
        self.random = random.Random(seed)
        self.stop = False
        self.cfgs = [cfg.changed(ISLAND_SEED=i + 1) for i in range(islands)]
        self.ports = [free_port() for _ in self.cfgs]
        self.sea, self.killed = Sea(self.ports), 0
        self.processes, self.threads = [self._coordinator(i) for i in range(islands)], []
        for i in range(islands):
            self._thread(self._work, i)
        data, sha256 = own_snapshot(0, cfg=self.cfgs[0])
        self._thread(self._deceive, "liar", data, sha256)
        self._thread(self._deceive, "forger", data, b"f" * 32)

    def _thread(self, target, *arguments):
        self.threads.append(Thread(target=target, args=arguments, daemon=True))
        self.threads[-1].start()

    def _coordinator(self, i):
        program = ("import egg_net, egg_config; from islands import gossip, peers, transfer\n"
                   "peers.FIRST_PAUSE, peers.LONGEST_PAUSE = 0.1, 1.0\n"
                   "peers.PATIENCE, transfer.STALLED = 2.0, 5.0\n"
                   f"cfg = egg_config.make(**{self.cfgs[i].constants()!r})\n"
                   f"settings = gossip.IslandSettings('i{i}', {self.sea.way(i)!r})\n"
                   f"egg_net.run_coordinator(cfg, '127.0.0.1', {self.ports[i]}, "
                   f"save_dir={str(self.directory / f'i{i}')!r}, island=settings)\n")
        with open(self.directory / f"i{i}.log", "a") as log:
            return subprocess.Popen([sys.executable, "-c", program], cwd=HERE, stdout=log, stderr=log)

    def _work(self, i):
        engine = Learner(self.cfgs[i], 1 + i, pause=0.02)
        while not self.stop:
            with suppress(egg_config.EggError):
                run_worker(self.ports[i], engine, self.cfgs[i], validation=VALIDATION)
            sleep(0.05)

    def _deceive(self, name, data, sha256):
        dice = random.Random(name)
        while not self.stop:
            with suppress(OSError, egg_config.EggError, egg_net.OldCoordinator):
                end = monotonic() + 2
                stranger = Stranger(dice.choice(self.ports), name, cfg=self.cfgs[0], seed=1000)
                stranger.serve(data, sha256, lambda: self.stop or monotonic() > end)
                stranger.close()
            sleep(0.05)

    def _harm(self):
        i, dice = self.random.randrange(len(self.ports)), self.random
        what = dice.choice(["killed", "killed", "stopped", "cut", "slowed"])
        if what == "killed":
            self.killed += 1
            self.processes[i].kill()
            self.processes[i].wait()
            sleep(dice.uniform(0, 0.5))
            self.processes[i] = self._coordinator(i)
        elif what == "stopped":
            self.processes[i].send_signal(19)
            sleep(dice.uniform(0.2, 2.5))
            self.processes[i].send_signal(18)
        elif what == "cut":
            self.sea.cut = set(dice.sample(range(len(self.ports)), dice.randrange(1, len(self.ports))))
        else:
            self.sea.slow = {i: dice.choice([100, 1000])}

    def run(self, seconds):
        """Harm for so long, on a slow machine longer; then all heal, and go on for a few steps."""
        began = monotonic()
        while (now := monotonic() - began) < seconds or now < 8 * seconds and not self.happened():
            sleep(self.random.uniform(0.1, 0.8))
            self._harm()
            if self.random.random() < 0.4:
                self.sea.heal()
        self.sea.heal()
        # every island trains on, and has a snapshot (SNAPSHOT_EVERY is 10), however slow the machine is
        wanted = [max(self.steps(i) + 3, 12) for i in range(len(self.ports))]
        seen = None
        while behind := self.behind(wanted):
            if behind != seen:
                seen, end = behind, monotonic() + 120
            assert monotonic() < end, f"islands stand still: {behind}"
            sleep(0.2)                                  # the learners are threads of this process

    def happened(self):
        """Whether an island was killed and another one has found a deceiver out."""
        return self.killed and any(map(self.distrusted, range(len(self.ports))))

    def behind(self, wanted):
        """{island: its steps} of those that have fewer than wanted."""
        return {i: steps for i, least in enumerate(wanted) if (steps := self.steps(i)) < least}

    def events(self, i):
        """[dict]: what an island told; of a line that is being written nothing."""
        out = []
        with suppress(FileNotFoundError), open(self.directory / f"i{i}" / history.EVENTS) as file:
            for line in file:
                with suppress(ValueError):
                    out.append(loads(line))
        return out

    def steps(self, i):
        return sum(event["event"] == "step" for event in self.events(i))

    def distrusted(self, i):
        """How often an island has found a deceiver out."""
        return sum("nothing of" in event.get("text", "") for event in self.events(i))

    def end(self):
        """The coordinators' exit statuses."""
        self.stop = self.sea.stop = True
        for process in self.processes:
            process.terminate()
        codes = [process.wait(60) for process in self.processes]
        for thread in self.threads:
            thread.join(60)
        return codes


def test_an_archipelago_survives_chaos(tmp_path, seed=1, seconds=10, islands=8):
    """Everything goes wrong for `seconds`. Every island is what it must be: it trains on, its history leads from
    the state its epoch began with to its newest snapshot, its best state is there."""
    often = changed(GOSSIP_RATE=0.3, VALIDATE_EVERY=10, SNAPSHOT_EVERY=10, ELITES=2)
    trouble = Archipelago(tmp_path, seed, islands, often)
    try:
        trouble.run(seconds)
    finally:
        codes = trouble.end()
    epochs, distrusted = 0, 0
    for i in range(islands):
        log = (tmp_path / f"i{i}.log").read_text()
        assert "Traceback" not in log and codes[i] == 0, log[-3000:]
        with closing(open_run(trouble.cfgs[i], tmp_path / f"i{i}")) as run:
            shelf = snapshots.Shelf(run.cfg, run)
            for work in shelf.check(print):
                work()
            engine = Learner(run.cfg, 1 + i)
            if run.start.step:
                engine.load(shelf.state(run.start.step))
            history.replay(run, engine, max(shelf.newest, run.start.step))
            newest = shelf.state(shelf.newest)
            assert digests(newest) == digests(engine.state()), f"i{i} is not what its history says"
            assert newest.step == engine.step
            told = [(e["kind"] != "validation", e["fitness"] + 1e-4) for e in trouble.events(i)
                    if e["event"] == "elite"]
            elites = Elites(run.directory, 2)
            assert not told or elites.files[0][:2] <= min(told) and elites.best(run.cfg)
            starts = history.epochs(run.directory)
            assert [start.epoch for start in starts] == list(range(run.start.epoch + 1))
            assert all(a.step < b.step for a, b in zip(starts, starts[1:]))
            assert run.step > 3
        epochs += run.start.epoch
        distrusted += trouble.distrusted(i)
    assert epochs > 0 and trouble.killed and distrusted
