"""Islands: populations that gossip (docs/ISLANDS.md). A coordinator that is an island compares itself with others in
tournaments (STANDING), and the worse one takes over the state of the better one. The state travels as the giver's
snapshot file during training (STATE_REQUEST, STATE). Between two steps it becomes a new epoch of the receiver's run
(cluster.history.Start). Peers are not trusted: an epoch that turns out worse than the previous one is undone, and for a
while nothing is taken from that peer."""

import contextlib
import json
import math
import os
import random
import time
from collections import namedtuple

from cluster import history, snapshots
from cluster.hub import nothing
from cluster.wire import FrameError, STANDING, STATE, read_json
from egg_config import UsageError
from egg_net import Hook
from islands import merging, transfer
from islands.peers import ASK_EVERY, NAME, Peers
from model import state_digest

# kinds of fitness, of which less is better: their units; of a reward it is the negative
KINDS = {"validation": ("bits/byte", "bits/token"), "loss": ("logit units",), "reward": ("reward",)}
# of the newest measure in the exponential mean; validation and reward are hardly noisy
WEIGHT = {"validation": 0.8, "loss": 0.05, "reward": 0.8}
SURE = {"validation": 1, "loss": 10, "reward": 1}            # number of measures after which a new epoch is judged
REGRET = {"clone": 0.03, "recombine": 0.1}   # an epoch that is worse than the previous one by more than this is undone
HANDOVER_SECONDS = 30.0    # limit for a worker to send our state; the next step waits for it
LINEAGE = 200              # most epochs in `status`
BANDWIDTH = 16e6           # bytes per second, by default


class IslandSettings(namedtuple("IslandSettings", "name peers bandwidth accept tls", defaults=[BANDWIDTH, True, None])):
    """The settings of an island. peers: [(host, port)]; bandwidth: bytes of states per second, each way, 0 for no
    limit; accept: whether it takes over states; tls: the ssl.SSLContext for calls to peers, or None."""

    def attach(self, coordinator):
        return Island(coordinator, self)


class Standing(namedtuple("Standing", "fitness kind unit step epoch founder state state_step ask")):
    """How an island stands. fitness: a number, None before it is measured; kind: a key of KINDS; unit: of the fitness;
    state, state_step: SHA-256 (bytes, or None) and step of its newest snapshot; founder: island from which its
    population descends; ask: whether the peer shall answer."""

    def pack(self):
        return json.dumps({**self._asdict(), "state": self.state and self.state.hex()}).encode()

    def compares(self, other):
        return (self.kind, self.unit) == (other.kind, other.unit)


def read_standing(payload):
    """The Standing in a frame. Raises FrameError if it cannot be one."""
    try:
        fields = read_json(payload)
        state = fields["state"] and bytes.fromhex(fields["state"])
        standing = Standing(**{**fields, "state": state})
        counts = standing.step, standing.epoch, standing.state_step
        fitness = standing.fitness
        if not (all(type(x) is int and 0 <= x < history.MOST_STEPS for x in counts) and type(standing.ask) is bool
                and standing.unit in KINDS[standing.kind] and NAME.fullmatch(standing.founder)
                and (state is None or len(state) == 32)
                and (fitness is None or type(fitness) in (int, float) and abs(fitness) <= 1 << 30
                     and (fitness >= 0 or standing.kind == "reward"))):
            raise ValueError
    except (ValueError, TypeError, KeyError):
        raise FrameError("wrong standing: it cannot be read") from None
    return standing


class Fitness:
    """The exponential mean of the measures in this epoch: of validation, or of the loss until there is validation; with
    an objective of the reward."""

    kind, unit = "loss", KINDS["loss"][0]
    best, best_step = math.inf, 0

    def __init__(self):
        self.begin()

    def begin(self):
        self.value, self.measures = None, 0

    def add(self, kind, unit, x, step):
        """Adds a measure, unless it is a loss and there is validation."""
        if (kind, unit) != (self.kind, self.unit):
            if kind == "loss":
                return
            self.kind, self.unit = kind, unit
            self.best = math.inf
            self.begin()
        self.measures += 1
        weight = max(WEIGHT[kind], 1 / self.measures)          # the plain mean at first
        self.value = x if self.value is None else (1 - weight) * self.value + weight * x
        if self.value < self.best:
            self.best, self.best_step = self.value, step


Elite = namedtuple("Elite", "is_loss fitness epoch step name")       # the file of an elite; the smallest is the best


def read_elite(name):
    """The Elite of a file name, None of another file."""
    match = history.ELITE.fullmatch(name)
    return match and Elite(match[3] == "loss", float(match[4]), int(match[1]), int(match[2]), name)


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

    def best(self, cfg):
        """(epoch, State) of the best elite that can be read, None without one."""
        for elite in self.files:
            with contextlib.suppress(OSError, ValueError):
                return elite.epoch, snapshots.read(cfg, os.path.join(self.directory, elite.name))
        return None


# A change to another state. kind: MERGE, "undo" or "rejuvenate"; incoming: a finished transfer.Incoming or None;
# needs_ours: whether our state is needed; since: time.monotonic() at which it began
Handover = namedtuple("Handover", "kind incoming needs_ours since")


class Island(Hook):
    """The island of an egg_net.Coordinator. lineage: [dict for JSON] of its epochs. Raises NetError, UsageError."""

    takes_version_1 = False
    incoming = None
    last_taken = None          # SHA-256 of the last state taken: it is not taken twice
    merge_event = None         # fields of a merge whose first chunk is not handed out yet

    def __init__(self, coordinator, settings):
        cfg = coordinator.cfg
        run = coordinator.run
        if not (run.directory and cfg.SNAPSHOT_EVERY):
            raise UsageError("an island needs --save-dir and SNAPSHOT_EVERY above 0: it gives its snapshots away")
        self.coordinator = coordinator
        self.events = coordinator.events
        self.cfg = cfg
        self.run = run
        self.settings = settings
        self.peers = Peers(self, coordinator, settings, transfer.Bucket(settings.bandwidth))
        self.admit_peer = self.peers.admit
        self.peer_joined = self.peers.joined
        self.fitness = Fitness()
        self.elites = Elites(run.directory, cfg.ELITES)
        self.bandwidth_in = transfer.Bucket(settings.bandwidth)
        self.on_trial = run.start.origin             # of the current epoch, until it has been judged
        self.idle_since = run.step                   # step from which REJUVENATE_AFTER counts
        self.lineage = [ancestor(start, settings.name) for start in history.epochs(run.directory)]
        titles = [target.title for target in self.peers.targets]
        self.events.emit("island", f"island {settings.name}; addresses to call: {', '.join(titles) or 'none'}",
                         name=settings.name, peers=titles)

    # the coordinator calls these (egg_net.Hook)

    def check(self, now):
        self.peers.check(now)
        if self.incoming and (why := self.incoming.too_slow(now)):
            self._drop_incoming(f"{why} of the state of {self.incoming.peer.name}", distrust=True)
        elif self.incoming:
            self._advance(nothing)
        if self.handover and now - self.handover.since > HANDOVER_SECONDS:
            self._give_up(f"no worker sent our state within {HANDOVER_SECONDS:g} s")

    def close(self):
        self.chunk_handed_out()
        if self.incoming:
            self.incoming.drop()

    def validated(self, step, value, unit):
        self.fitness.add("reward" if self.cfg.OBJECTIVE else "validation", unit, value, step)
        self._offer_elite(step)

    def _offer_elite(self, step):
        """Keeps the snapshot of this step as an elite if it is one of the best."""
        path, fitness = self.coordinator.shelf.path(step), self.fitness
        if not path or fitness.value is None:
            return
        try:
            if self.elites.offer(path, self.run.start.epoch, step, fitness.kind, fitness.value):
                self.events.emit("elite", step=step, fitness=_rounded(fitness.value), kind=fitness.kind)
        except OSError as error:
            self.events.warn(f"island: the state of step {step} cannot be kept as an elite: {error.strerror}")

    def step_completed(self, loss):
        """Between two steps it may change to another state, or begin a tournament."""
        if not self.cfg.OBJECTIVE:
            self.fitness.add("loss", KINDS["loss"][0], loss, self.run.step)
        if self.coordinator.finished or self.coordinator.closing:
            return
        self.handover = self._due()
        if self.handover and not self.handover.needs_ours:
            self._hand_over(None)
        elif not self.handover and random.random() < self.cfg.GOSSIP_RATE:
            now = time.monotonic()
            free = [peer for peer in self.peers.known.values()
                    if peer.session and not peer.question_at and now >= peer.next_question_at]
            if free:
                peer = random.choice(free)
                peer.question_at = now
                peer.next_question_at = now + ASK_EVERY
                peer.session.reply(STANDING, self.standing(True).pack())

    def state_received(self, upload):
        if not upload.remembered:
            self._offer_elite(upload.step)
        elif not self.handover or upload.step != self.run.step:
            return
        elif self.coordinator.trust.contradicts(upload.step, upload.digest):
            self._give_up("workers hold different states")
        else:
            self._hand_over(upload.state(), upload.digest)

    def chunk_handed_out(self):
        """Logs a merge with the first chunk of its epoch: then its duration is known."""
        event, self.merge_event = self.merge_event, None
        if event:
            seconds = time.monotonic() - event.pop("since")
            source = "back to our own state" if event["kind"] == "undo" else \
                f"{event['kind']} of the state of {event['peer']}"
            line = (f"island: step {event['step']} begins epoch {event['epoch']}: {source} of step "
                    f"{event['peer_step']}, handed over in {seconds:.2f} s")
            self.events.emit("merge", line, **event, seconds=round(seconds, 3))

    def status(self):
        return {"name": self.settings.name, "epoch": self.run.start.epoch, "kind": self.fitness.kind,
                "fitness": self.shown(self.fitness.value, self.fitness.kind), "founder": self.lineage[-1]["founder"],
                "peers": self.peers.status(), "lineage": self.lineage[-LINEAGE:]}

    def shown(self, fitness, kind):
        """A fitness for people: a loss in the unit in which losses are shown, a reward as it is; None of None."""
        units = {"loss": self.coordinator.progress.bits, "reward": -1}
        return fitness and _rounded(fitness * units.get(kind, 1))

    def handle(self, peer, opcode, payload):
        """Takes a frame of a peer. Returns whether it was useful. Raises FrameError."""
        if opcode == STANDING:
            return self._take_standing(peer, read_standing(payload))
        incoming = self.incoming
        if opcode != STATE or not incoming or incoming.peer is not peer or not incoming.requested:
            return False
        sha256, total, *piece = STATE.unpack(payload)
        if sha256 != incoming.standing.state:
            return False
        if total:
            self._advance(incoming.add, total, *piece)
        else:
            self._drop_incoming(f"{peer.name} does not have its state of step {incoming.standing.state_step} any more")
        return True

    def peer_lost(self, peer):
        if self.incoming and self.incoming.peer is peer:
            self.incoming.requested = False          # the piece is requested again when the peer is back

    def standing(self, ask=False):
        shelf, fitness = self.coordinator.shelf, self.fitness
        return Standing(fitness.value, fitness.kind, fitness.unit, self.run.step, self.run.start.epoch,
                        self.lineage[-1]["founder"], shelf.sha256.get(shelf.newest), shelf.newest, ask)

    def _take_standing(self, peer, theirs):
        """Both sides judge the same two standings, so the better island need not send anything else."""
        if not (peer.questions.take() if theirs.ask else peer.question_at):
            return False                             # too many, or no answer to ours
        peer.standing, ours = theirs, self.standing()
        if theirs.ask:
            peer.session.reply(STANDING, ours.pack())
        else:
            peer.question_at = None
        behind = 0 if None in (ours.fitness, theirs.fitness) else ours.fitness - theirs.fitness
        busy = self.incoming or self.handover or self.coordinator.closing
        outcome, line = "offer" if behind < 0 else "keep", None
        if not ours.compares(theirs) or not self.peers.trusted(peer):
            outcome = "refused"
        elif behind > 0 and self.settings.accept and not busy and theirs.state not in (None, self.last_taken):
            outcome = "pull"
            figures = (self.shown(standing.fitness, ours.kind) for standing in (theirs, ours))
            unit = self.coordinator.progress.unit if ours.kind == "loss" else ours.unit
            line = "island: {} is better, {:.4f} against {:.4f} {}: fetching its state of step {}".format(
                peer.name, *figures, unit, theirs.state_step)
            self.incoming = transfer.Incoming(self.cfg, peer, theirs, self.run.directory, self.bandwidth_in)
            self.incoming.request()
        if outcome == "pull" or not theirs.ask:
            self.events.about(peer.author.host, "gossip", line, peer=peer.name, ours=_rounded(ours.fitness),
                              theirs=_rounded(theirs.fitness), kind=ours.kind, outcome=outcome)
        return True

    def _advance(self, work, *arguments):
        """Calls `work` for the incoming state, then requests the next piece."""
        incoming, name = self.incoming, self.incoming.peer.name
        try:
            work(*arguments)
        except ValueError as error:
            self._drop_incoming(f"the state of {name} is not used: {error}", distrust=True)
        except OSError as error:
            self._drop_incoming(f"the state of {name} cannot be kept: {error.strerror}")
        else:
            if incoming.finished and not incoming.preparing:
                incoming.prepare(self.fitness.value)
            incoming.request()

    def _drop_incoming(self, why=None, distrust=False):
        incoming, self.incoming = self.incoming, None
        incoming.drop()
        if distrust:
            self.peers.distrust(incoming.peer, why)
        elif why:
            self.events.warn(f"island: {why}", incoming.peer.author.host)

    # epochs

    def _due(self):
        cfg = self.cfg
        now = time.monotonic()
        fitness = self.fitness
        if self._must_undo() and self.elites.files:
            return Handover("undo", None, False, now)
        if self.incoming and self.incoming.made:
            theirs = self.incoming.standing
            if theirs.compares(fitness) and fitness.value is not None and fitness.value > theirs.fitness:
                return Handover(cfg.MERGE, self.incoming, merging.needs_ours(cfg), now)
            self._drop_incoming(f"the state of {self.incoming.peer.name} is no longer better than ours: not used")
        self.idle_since = max(self.idle_since, fitness.best_step)
        if cfg.REJUVENATE_AFTER and self.run.step - self.idle_since >= cfg.REJUVENATE_AFTER:
            return Handover("rejuvenate", None, True, now)
        return None

    def _must_undo(self):
        """Whether the current epoch is worse than the previous one; then its giver is distrusted."""
        origin, fitness = self.on_trial, self.fitness
        if not origin or fitness.measures < SURE[fitness.kind]:
            return False
        self.on_trial = None
        if not _regrets(origin, fitness):
            return False
        sign = -1 if fitness.kind == "reward" else 1
        why = (f"the state of {origin['from']} promised {sign * origin['theirs']:.4f}; this island measures "
               f"{sign * fitness.value:.4f} {fitness.unit} with it and had {sign * origin['ours']:.4f} before")
        if giver := self.peers.known.get(origin["from"]):
            self.peers.distrust(giver, why)
        else:
            self.events.warn(f"island: {why}")
        return True

    def _hand_over(self, ours, digest=None):
        """Begins the next epoch. ours: our State if it is needed; digest: its digest."""
        handover = self.handover
        run = self.run
        name = self.settings.name
        parent = digest if ours else self.coordinator.trust.leading(run.step - 1)
        origin = {"epoch": run.start.epoch + 1, "kind": handover.kind, "island": name, "from": name,
                  "founder": self.lineage[-1]["founder"], "peer_step": None, "fitness_kind": self.fitness.kind,
                  "ours": _rounded(self.fitness.value), "theirs": None, "parent_theirs": None,
                  "parent_ours": parent.hex(), "parent_ours_step": run.step - (not ours)}
        try:
            state, body, more = self._next_state(ours)
            if not state:
                return self._give_up("no elite can be read")
            state.step, state.seed = run.step, run.seed
            origin.update(more, digest=state_digest.of_state(state).hex())
            self.coordinator.begin_epoch(state, origin, body)
        except ValueError as error:                  # only a peer's state raises it
            peer = handover.incoming.peer
            self.peers.distrust(peer, f"the state of {peer.name} is not used: {error}")
            self._end_handover()
        except OSError as error:
            self._give_up(f"the new state cannot be kept: {error.strerror}")
        else:
            self._epoch_begun(origin)

    def _next_state(self, ours):
        """(State of the next epoch, its body as a snapshot or None, more fields of its origin); the State is None if no
        elite can be read. Raises OSError, ValueError for a peer's state that cannot be used."""
        cfg = self.cfg
        kind = self.handover.kind
        incoming = self.handover.incoming
        if kind == "rejuvenate":
            return merging.rejuvenate(cfg, ours), None, {}
        if kind == "undo":
            epoch, state = self.elites.best(cfg) or (None, None)
            founder = next((e["founder"] for e in self.lineage if e["epoch"] == epoch), self.settings.name)
            return state, None, {"peer_step": state and state.step, "founder": founder}
        theirs, upload = incoming.standing, incoming.upload
        more = {"alpha": cfg.RECOMBINE_ALPHA} if kind == "recombine" else {}
        return *incoming.result(ours, self.fitness.value), {
            "from": incoming.peer.name, "peer_step": upload.step, "theirs": _rounded(theirs.fitness),
            "optimizer": cfg.OPTIMIZER_MERGE, "founder": theirs.founder, "parent_theirs": upload.digest.hex(), **more}

    def _epoch_begun(self, origin):
        handover = self.handover
        self.on_trial = origin
        self.idle_since = self.run.step
        self.lineage.append(ancestor(self.run.start, self.settings.name))
        event = {"step": self.run.step, "epoch": origin["epoch"], "digest": origin["digest"]}
        if handover.kind == "rejuvenate":
            line = (f"island: no better for {self.cfg.REJUVENATE_AFTER} steps: moments begin anew and the noise is "
                    f"raised (epoch {origin['epoch']}, step {self.run.step})")
            self.events.emit("rejuvenated", line, **event)
        else:
            names = "ours", "theirs", "fitness_kind", "parent_ours", "parent_theirs", "founder", "peer_step", "kind"
            self.merge_event = {**event, "peer": origin["from"], "since": handover.since,
                                **{k: origin[k] for k in names}}
        if handover.incoming:
            handover.incoming.peer.taken += 1
            self.last_taken = handover.incoming.standing.state
        self.fitness.begin()
        self._end_handover()

    def _give_up(self, why):
        self.events.warn(f"island: step {self.run.step} goes on with our state: {why}")
        self._end_handover()

    def _end_handover(self):
        if self.incoming:                            # its fitness was compared with the previous state
            self._drop_incoming()
        if self.handover.kind == "rejuvenate":
            self.idle_since = self.run.step
        self.handover = None
        self.coordinator.dispatcher.changed = True


def _regrets(origin, fitness):
    """Whether this fitness is worse than that before the merge of an origin, by more than REGRET. The header of a run
    that somebody else began may hold anything in place of an origin's fields."""
    ours, kind = origin.get("ours"), origin.get("kind")
    return ("from" in origin and origin.get("fitness_kind") == fitness.kind and kind in REGRET
            and all(isinstance(figure, (int, float)) for figure in (ours, origin.get("theirs")))
            and fitness.value - ours > REGRET[kind] * abs(ours))


def ancestor(start, name):
    """The entry of `lineage` for an epoch that begins with a history.Start. name: of the island."""
    origin = start.origin or {}
    return {"epoch": start.epoch, "step": start.step, "from": origin.get("from", name),
            "peer_step": origin.get("peer_step"), "digest": origin.get("digest"),
            "founder": origin.get("founder", name)}


def _rounded(x):
    return None if x is None else round(x, 6)
