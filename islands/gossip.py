"""Islands: coordinators that compare themselves, and the worse one takes over the state of the better one
(docs/ISLANDS.md). To a peer an island is a late worker: a thread asks for the status, compares, fetches the newest
snapshot and merges it. Between two steps the result begins a new epoch of the run (cluster.history.Start)."""

import contextlib
import math
import os
import random
import re
import threading
import time
from collections import namedtuple

import egg_config
from cluster import auth, history, snapshots
from cluster.console import one_line
from cluster.hub import address_text, split_address
from cluster.link import Link
from cluster.wire import OTHER_CONFIG, Refused, STATUS, V2, read_json
from egg_config import EggError, UsageError
from egg_net import Hook
from islands import merging
from model import parameters

NAME = re.compile(r"[A-Za-z0-9_.:/-]{1,64}")
# kinds of fitness, of which less is better: their units; of a reward it is the negative
KINDS = {"validation": ("bits/byte", "bits/token"), "reward": ("reward",)}
WEIGHT = 0.8               # of the newest measure in the exponential mean
HANDOVER_SECONDS = 30.0    # limit for a worker to send our state; the next step waits for it
PATIENCE = 30.0            # seconds within which a peer must answer
PAUSE = (0.5, 30.0)        # seconds between two calls of an address that does not answer: the first, the longest
BANDWIDTH = 16e6           # bytes of states that an island fetches per second


def parse_name(text):
    """A name that any terminal, page or log can show. Raises ValueError."""
    if not NAME.fullmatch(text):
        raise ValueError(text)
    return text


def parse_peer(text):
    """(host, port) of HOST:PORT or [IPV6]:PORT. Raises ValueError."""
    host, port = split_address(text)
    if not (host and port):
        raise ValueError(text)
    return host, port


class IslandSettings(namedtuple("IslandSettings", "name peers accept tls", defaults=[True, None])):
    """The settings of an island. peers: [(host, port)]; accept: whether it takes over states; tls: the ssl.SSLContext
    for calls to peers, or None."""

    def attach(self, coordinator):
        return Island(coordinator, self)


# --- fitness ----------------------------------------------------------------------------------------------------------

# How an island stands. fitness: a number, None before it is measured; kind: a key of KINDS; unit: of the fitness;
# snapshot: step of its newest snapshot, 0 without one; sha256: of that state, hex
Standing = namedtuple("Standing", "fitness kind unit snapshot sha256")


def compares(one, other):
    """Whether two fitnesses are of one kind, and measured."""
    return (one.kind, one.unit) == (other.kind, other.unit) and None not in (one.fitness, other.fitness)


def read_status(data):
    """(name, id, step, epoch, Standing) of an island, from the JSON of its status. Raises ValueError."""
    try:
        status = read_json(data)
        island = status["island"]
        standing = Standing(*(island["standing"][field] for field in Standing._fields))
        fitness, counts = standing.fitness, (status["step"], island["epoch"], standing.snapshot)
        if not (all(type(count) is int and 0 <= count < history.MOST_STEPS for count in counts)
                and NAME.fullmatch(island["name"]) and standing.unit in KINDS[standing.kind]
                and (standing.sha256 is None or len(bytes.fromhex(standing.sha256)) == 32)
                and (fitness is None or type(fitness) in (int, float) and abs(fitness) <= 1 << 30
                     and (fitness >= 0 or standing.kind == "reward"))):
            raise ValueError
    except (ValueError, TypeError, KeyError):
        raise ValueError("its status is not that of an island of this version") from None
    return island["name"], island["id"], status["step"], island["epoch"], standing


class Fitness:
    """The exponential mean of the measures in this epoch: of validation, with an objective of the reward. fitness: None
    before the first."""

    best, best_step = math.inf, 0

    def __init__(self, cfg):
        self.kind = "reward" if cfg.OBJECTIVE else "validation"
        self.unit = KINDS[self.kind][0]
        self.fitness = None

    def add(self, unit, measure, step):
        if unit != self.unit:
            self.unit = unit
            self.best, self.fitness = math.inf, None
        self.fitness = measure if self.fitness is None else round((1 - WEIGHT) * self.fitness + WEIGHT * measure, 6)
        if self.fitness < self.best:
            self.best, self.best_step = self.fitness, step


Elite = namedtuple("Elite", "fitness epoch step name")       # the file of an elite; the smallest is the best


def read_elite(name):
    """The Elite of a file name, None of another file."""
    match = history.ELITE.fullmatch(name)
    return match and Elite(float(match[4]), int(match[1]), int(match[2]), name)


class Elites:
    """The best states that this island has measured: copies of snapshots that no epoch removes. files: [Elite], best
    first."""

    def __init__(self, directory, most):
        self.directory = directory
        self.most = most
        self.files = sorted(filter(None, map(read_elite, os.listdir(directory))))

    def offer(self, path, epoch, step, kind, fitness):
        """Keeps the snapshot at `path` if it is one of the best. Returns whether it is new. Raises OSError."""
        new = read_elite(f"elite-{epoch:03d}-{step:08d}-{kind}-{fitness:.4f}.egg")
        others = [elite for elite in self.files if (elite.epoch, elite.step) != (epoch, step)]
        files = sorted([*others, new])[:self.most]
        if new not in files or new in self.files:
            return False
        history.link_file(path, os.path.join(self.directory, new.name))
        for elite in set(self.files) - set(files):
            history.remove(os.path.join(self.directory, elite.name))
        self.files = files
        return True


# --- peers ------------------------------------------------------------------------------------------------------------

class Peer:
    """An address to call. name: of the island there, once it has answered; state: "up", "down", "refused" or "itself",
    None before the first call; standing, step, epoch: of its last answer, heard at; taken: number of its states."""

    state = standing = step = epoch = None
    call_at = heard = 0.0
    taken = 0

    def __init__(self, host, port):
        self.host, self.port = host, port
        self.name = self.title = address_text(host, port)
        self._pause = PAUSE[0]

    def answered(self, status, own_id):
        """Takes the result of read_status."""
        self.name, id_, self.step, self.epoch, self.standing = status
        self.state = "itself" if id_ == own_id else "up"
        self.heard, self._pause = time.monotonic(), PAUSE[0]

    def failed(self, state):
        self.state = state
        self.call_at = time.monotonic() + self._pause * random.uniform(0.5, 1.0)
        self._pause = min(2 * self._pause, PAUSE[1])


class Call:
    """A call to a peer, in a thread of its own. ours: the Standing with which its state is compared, or None: only the
    status is asked for. Afterwards, when `done`: status, see read_status, or None; error: why the call failed, refused:
    for good; state: that of the peer, None if it was not better."""

    done = refused = False
    status = error = state = None

    def __init__(self, island, peer, ours):
        self.peer = peer
        self.ours = ours
        self.since = time.monotonic()
        threading.Thread(target=self._run, args=(island,), daemon=True).start()

    def _run(self, island):
        cfg, peer, ours = island.cfg, self.peer, self.ours
        access = auth.Access(island.coordinator.access.secret, island.settings.tls)
        try:
            with contextlib.closing(Link(cfg, peer.host, peer.port, V2, access, island.card)) as link:
                self.status = read_status(link.next(STATUS, PATIENCE))
                *_, theirs = self.status
                if ours and theirs.sha256 and compares(ours, theirs) and theirs.fitness < ours.fitness:
                    data = link.fetch_snapshot(theirs.snapshot, snapshots.most_bytes(cfg), BANDWIDTH)
                    self.state = snapshots.unpack(cfg, data, bytes.fromhex(theirs.sha256))
        except (EggError, ValueError) as error:
            self.error, self.refused = str(error), True
        except OSError as error:
            self.error = error.strerror or str(error)
        self.done = True


# --- the island -------------------------------------------------------------------------------------------------------

# A change to another state, which waits for ours. call: the Call with that of a peer, None to rejuvenate; since: when
# it began
Handover = namedtuple("Handover", "call since")


class Island(Hook):
    """The island of an egg_net.Coordinator. Raises NetError, UsageError."""

    takes_version_1 = False
    call = None                # the present Call
    last_taken = None          # SHA-256 of the last state taken: it is not taken twice

    def __init__(self, coordinator, settings):
        cfg, run = coordinator.cfg, coordinator.run
        if not (run.directory and cfg.SNAPSHOT_EVERY and cfg.VALIDATE_EVERY):
            raise UsageError("an island needs --save-dir, SNAPSHOT_EVERY and VALIDATE_EVERY above 0: it gives its "
                             "snapshots away and compares validations")
        self.coordinator = coordinator
        self.events = coordinator.events
        self.cfg = cfg
        self.run = run
        self.settings = settings
        self.peers = [Peer(host, port) for host, port in settings.peers]
        self.card = {"role": "island", "id": os.urandom(8).hex(), "name": settings.name, "config": cfg.shared()}
        self.fitness = Fitness(cfg)
        self.elites = Elites(run.directory, cfg.ELITES)
        self.idle_since = run.step                   # step from which REJUVENATE_AFTER counts
        titles = [peer.title for peer in self.peers]
        self.events.emit("island", f"island {settings.name}; addresses to call: {', '.join(titles) or 'none'}",
                         name=settings.name, peers=titles)

    # the coordinator calls these (egg_net.Hook)

    def admit_peer(self, card):
        if card.id == self.card["id"]:
            return                                   # it calls itself, and will see that by the status
        reason = None
        ours, theirs = ({name: value for name, value in config.items() if not egg_config.may_differ(name)}
                        for config in (self.card["config"], card.config))
        if card.name == self.settings.name:
            reason = f"it is called {card.name}, as this island: give every island another name"
        elif differ := history.difference(theirs, ours):
            reason = f"these constants must be the same on all islands: {differ}"
        elif card.config.get("ISLAND_SEED") == self.cfg.ISLAND_SEED:
            reason = (f"ISLAND_SEED = {self.cfg.ISLAND_SEED} there and here, so their noise would be the same: give "
                      "every island another, -D ISLAND_SEED=N")
        if reason:
            raise Refused(f"island {card.name}: {reason}", OTHER_CONFIG)

    def check(self, now):
        if self.call and self.call.done and not self.call.state:
            self._take_answer()                      # with a state it waits for the end of the step
        if self.handover and now - self.handover.since > HANDOVER_SECONDS:
            self._give_up(f"no worker sent our state within {HANDOVER_SECONDS:g} s")
        silent = [peer for peer in self.peers if peer.state not in ("up", "itself") and now >= peer.call_at]
        if silent and not (self.call or self.handover):
            self.call = Call(self, random.choice(silent), None)

    def validated(self, step, figure, unit):
        self.fitness.add(unit, figure, step)
        self._offer_elite(step)

    def step_completed(self):
        """Between two steps it may change to another state, or begin a comparison."""
        if self.coordinator.finished or self.coordinator.closing:
            return
        if self.call and self.call.done:
            self._take_answer()
        if not self.handover and self._rejuvenation_is_due():
            self.handover = Handover(None, time.monotonic())
        up = [peer for peer in self.peers if peer.state == "up"]
        if up and not (self.handover or self.call) and random.random() < self.cfg.GOSSIP_RATE:
            self.call = Call(self, random.choice(up), self.standing() if self.settings.accept else None)

    def snapshot_kept(self, step):
        if self.handover and step == self.run.step:
            self._hand_over(self.handover.call)
        else:
            self._offer_elite(step)

    def status(self):
        peers = [{"name": peer.name, "address": peer.title, "state": peer.state or "down",
                  "kind": peer.standing and peer.standing.kind,
                  "fitness": peer.standing and self._shown(peer.standing.fitness, peer.standing.kind),
                  "step": peer.step, "epoch": peer.epoch, "taken": peer.taken,
                  "last_seen": round(time.monotonic() - peer.heard, 3) if peer.heard else None}
                 for peer in self.peers if peer.state != "itself"]
        return {"name": self.settings.name, "id": self.card["id"], "epoch": self.run.start.epoch,
                "kind": self.fitness.kind, "fitness": self._shown(self.fitness.fitness, self.fitness.kind),
                "standing": self.standing()._asdict(), "peers": peers, "since": self.run.start.step,
                "from": self.run.start.origin and self.run.start.origin["from"]}

    def standing(self):
        shelf, fitness = self.coordinator.shelf, self.fitness
        sha256 = shelf.sha256.get(shelf.newest)
        return Standing(fitness.fitness, fitness.kind, fitness.unit, shelf.newest, sha256 and sha256.hex())

    # comparisons

    def _take_answer(self):
        """Ends the present call, and hands over to its state if that is still better."""
        call, self.call = self.call, None
        peer, before = call.peer, call.peer.state
        if call.status:
            peer.answered(call.status, self.card["id"])
        if call.error:
            peer.failed("refused" if call.refused else "down")
        if peer.state != before and peer.state != "itself":
            told = {"up": f"peer {peer.name} at {peer.title} is up"}.get(
                peer.state, f"peer {peer.name} is {peer.state}: {one_line(call.error or '')}")
            self.events.emit("peer", f"island: {told}", peer=peer.name, address=peer.title, state=peer.state)
        if not (call.ours and call.status):
            return
        ours, theirs = self.standing(), call.status[-1]
        better = call.state and compares(ours, theirs) and theirs.fitness < ours.fitness
        outcome = ("take" if better and theirs.sha256 != self.last_taken else
                   "keep" if compares(ours, theirs) else "other kind")
        self.events.emit("gossip", None, peer=peer.name, ours=ours.fitness, theirs=theirs.fitness,
                         kind=ours.kind, outcome=outcome)
        if outcome == "take":
            self.handover = Handover(call, time.monotonic())

    def _offer_elite(self, step):
        """Keeps the snapshot of this step as an elite if it is one of the best."""
        path, fitness = self.coordinator.shelf.path(step), self.fitness
        if not path or fitness.fitness is None:
            return
        try:
            if self.elites.offer(path, self.run.start.epoch, step, fitness.kind, fitness.fitness):
                self.events.emit("elite", step=step, fitness=fitness.fitness, kind=fitness.kind)
        except OSError as error:
            self.events.warn(f"island: the state of step {step} cannot be kept as an elite: {error.strerror}")

    def _shown(self, fitness, kind):
        """A fitness for people: a reward as it is, not its negative; None of None."""
        return None if fitness is None else -fitness if kind == "reward" else fitness

    # epochs

    def _rejuvenation_is_due(self):
        self.idle_since = max(self.idle_since, self.fitness.best_step)
        return self.cfg.REJUVENATE_AFTER and self.run.step - self.idle_since >= self.cfg.REJUVENATE_AFTER

    def _hand_over(self, call):
        """Begins the next epoch, now that our state is on the shelf. call: see Handover."""
        cfg, run, fitness = self.cfg, self.run, self.fitness
        origin = {"epoch": run.start.epoch + 1, "kind": cfg.MERGE if call else "rejuvenate",
                  "island": self.settings.name, "from": call.peer.name if call else self.settings.name,
                  "peer_step": None, "fitness_kind": fitness.kind, "ours": fitness.fitness, "theirs": None}
        try:
            state = self.coordinator.shelf.state(run.step)
            if call:
                theirs = call.status[-1]
                origin |= {"peer_step": theirs.snapshot, "theirs": theirs.fitness}
                state = merging.merge(cfg, state, call.state, fitness.fitness, theirs.fitness)
            else:
                state = merging.rejuvenate(cfg, state)
            origin["digest"] = parameters.digest_of(state).hex()
            self.coordinator.begin_epoch(state, origin)
        except ValueError as error:                  # a peer's state
            self._give_up(f"the state of {origin['from']} is not used: {error}")
        except OSError as error:
            self._give_up(f"the new state cannot be kept: {error.strerror}")
        else:
            self._epoch_begun(call, origin)

    def _epoch_begun(self, call, origin):
        step, epoch, since = self.run.step, origin["epoch"], self.handover.since
        event = {"step": step, "epoch": epoch, "digest": origin["digest"]}
        if call:
            peer, theirs = call.peer, call.status[-1]
            peer.taken += 1
            self.last_taken = theirs.sha256
            figures = "{:.4f} against {:.4f}".format(*(self._shown(x, theirs.kind) for x in (theirs.fitness,
                                                                                          self.fitness.fitness)))
            line = (f"island: step {step} begins epoch {epoch}: {origin['kind']} of the state of {peer.name} of step "
                    f"{theirs.snapshot}, {figures} {theirs.unit}, fetched in {since - call.since:.1f} s")
            self.events.emit("merge", line, **event, peer=peer.name, seconds=round(time.monotonic() - since, 3),
                             **{k: origin[k] for k in ("ours", "theirs", "fitness_kind", "peer_step", "kind")})
        else:
            line = (f"island: no better for {self.cfg.REJUVENATE_AFTER} steps: moments begin anew and the noise is "
                    f"raised (epoch {epoch}, step {step})")
            self.events.emit("rejuvenated", line, **event)
        self.fitness.fitness = None
        self._end_handover()

    def _give_up(self, reason):
        self.events.warn(f"island: step {self.run.step} goes on with our state: {reason}")
        self._end_handover()

    def _end_handover(self):
        self.idle_since = self.run.step
        self.handover = None
        self.coordinator.dispatcher.changed = True
