"""Islands: populations that gossip. A coordinator that is an island meets others in tournaments; who is worse takes the other's state.

No central place: every island serves its peers on its coordinator's port and calls them, in the coordinator's loop. A tournament is a question
and an answer (STANDING), the state travels as the snapshot file of the giver beside training (STATE_REQUEST, STATE), and between two steps it
becomes a new epoch of the receiver's run (cluster.history.Start). PROTOCOL.md has the frames.

Nobody's word counts for more than it must. A state is used when its SHA-256 is the one that was asked for and islands.merging finds nothing
impossible in it. Whether its fitness was a lie shows when it is measured here: an epoch that turns out worse than what was before it is taken
back, to the best state of this island's own measure (its elites), and the peer is not believed for a while.
"""

import contextlib
import json
import math
import os
import random
import re
import socket
import threading
import time
from typing import NamedTuple

import egg_config
from model import state_digest
from cluster import history
from islands import merging
from cluster import snapshots
from cluster import auth
from cluster import greeting
from cluster import wire
from cluster.hooks import Hook
from cluster.session import Role, Session
from egg_config import EggError
from cluster.wire import (BLOCK, ERROR, FULL, FrameError, ISLAND, ITSELF, OTHER_CONFIG, Refused, STANDING, STATE, STATE_HEAD, STATE_REQUEST,
                          STATE_WANTED, V2)

NAME = re.compile(r"[A-Za-z0-9_.:/-]{1,64}")
KINDS = {"validation": ("bits/byte", "bits/token"), "loss": ("logit units",)}      # of fitness, and their units
SHARE = {"validation": 0.8, "loss": 0.05}    # that the newest measure has in the exponential mean: validation hardly varies by chance
SURE = {"validation": 1, "loss": 10}         # measures after which a new epoch is judged
REGRET = {"clone": 0.03, "recombine": 0.1}   # it is taken back if it is worse than what was before by more than this share
DISTRUST = 600.0           # seconds for which a peer is not believed
PATIENCE = 10.0            # seconds that a peer may take to say how it stands
STALLED = 60.0             # seconds after which a state of which nothing more comes is given up; a peer may come back meanwhile
HANDOVER_SECONDS = 30.0    # the next step waits so long at most for a worker to send the own state
BACK_OFF = (0.5, 30.0)     # seconds between two calls: the first, the longest
ASK_EVERY = 0.25           # seconds between two questions to one peer at least
QUESTIONS = 8              # of a peer that are answered in a row, and one every ASK_EVERY seconds after that
LENT, LEND_SECONDS = 4, 60.0     # files that are kept open for peers that read them, and seconds without a question
LEAST_PIECE = 1 << 10      # bytes of a state in one frame at least, however little may pass
MOST_PEERS = 1024
LINEAGE = 200              # epochs that `status` lists at most
BANDWIDTH = 16e6           # bytes a second, unless told otherwise


class IslandError(EggError):
    """About a peer's address, or what an island needs."""


class Terms(NamedTuple):
    """What an island is told. peers: [(host, port)]; bandwidth: bytes of states a second, each way, 0 for no bound; accept: whether it takes
    states over; tls: the ssl.SSLContext to call peers with, or None."""
    name: str
    peers: list
    bandwidth: float = BANDWIDTH
    accept: bool = True
    tls: object = None

    descriptors = LENT         # files that an island may hold open (cluster.hooks)

    def attach(self, coordinator):
        """The Island of a coordinator. Raises IslandError."""
        return Island(coordinator, self)


# --- what the command line says ----------------------------------------------------------------------------------------------

def terms(name, peers, from_slurm, port, bandwidth, accept, tls=None):
    """The Terms of the command line, None without an island. peers: [(host, port)]. Raises ConfigError for a wrong use."""
    if name is None:
        if peers or from_slurm or not accept or bandwidth is not None:
            raise egg_config.ConfigError("--peer, --peers-from-slurm, --gossip-bandwidth and --no-accept are for islands: give --island NAME too")
        return None
    peers = list(peers) + (peers_from_slurm(port) if from_slurm else [])
    return Terms(name, list(dict.fromkeys(peers)), BANDWIDTH if bandwidth is None else bandwidth, accept, tls)


def parse_name(text):
    """A name that any terminal, page or log can show. Raises ValueError."""
    if not NAME.fullmatch(text):
        raise ValueError(text)
    return text


def parse_peer(text):
    """(host, port) of HOST:PORT or [IPV6]:PORT. Raises ValueError."""
    host, colon, port = text.rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        raise ValueError(text)
    if not (colon and host and port.isascii() and port.isdigit() and 0 < int(port) < 65536):
        raise ValueError(text)
    return host, int(port)


def parse_bandwidth(text):
    """Bytes a second of 0 (no bound), 500k, 2.5M. Raises ValueError."""
    match = re.fullmatch(r"(\d{1,12}(?:\.\d{1,6})?)([kM]?)", text)
    rate = float(match[1]) * {"": 1, "k": 1e3, "M": 1e6}[match[2]] if match else -1.0
    if not (rate == 0 or 1000 <= rate <= 1e12):
        raise ValueError(text)
    return rate


def peers_from_slurm(port, environ=os.environ):
    """[(host, port)]: the other nodes of the Slurm job that this process is part of. Raises ConfigError."""
    nodes = environ.get("SLURM_JOB_NODELIST")
    if not nodes:
        raise egg_config.ConfigError("--peers-from-slurm: SLURM_JOB_NODELIST is not set: start it in a Slurm job, or name the peers with --peer")
    try:
        names = expand_nodes(nodes)
    except ValueError:
        raise egg_config.ConfigError(f"--peers-from-slurm: SLURM_JOB_NODELIST = {nodes[:200]!r} cannot be read: name the peers with --peer") from None
    own = environ.get("SLURMD_NODENAME") or socket.gethostname().partition(".")[0]
    return [(name, port) for name in names if name != own]


def expand_nodes(text):
    """[str]: the names in a Slurm list such as "login,gpu[01-03,7],r[1-2]n[0-1]". Raises ValueError."""
    names, item_of = [], r"(?:[A-Za-z0-9_.-]|\[[0-9,-]+\])+"
    if not re.fullmatch(f"{item_of}(?:,{item_of})*", text):
        raise ValueError(text)
    for item in re.findall(item_of, text):
        found = [""]
        for part in re.findall(r"\[[^\]]*\]|[^\[]+", item):
            ends = _ranges(part[1:-1]) if part.startswith("[") else [part]
            if len(names) + len(found) * len(ends) > MOST_PEERS:
                raise ValueError(text)
            found = [name + end for name in found for end in ends]
        names += found
    return names


def _ranges(text):
    """["01", "02", "7"] of "01-02,7"."""
    out = []
    for item in text.split(","):
        match = re.fullmatch(r"(\d{1,9})(?:-(\d{1,9}))?", item)
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (0, -1)
        if not 0 <= last - first < MOST_PEERS:
            raise ValueError(text)
        out += [str(n).zfill(len(match[1])) for n in range(first, last + 1)]
    return out


# --- frames ------------------------------------------------------------------------------------------------------------------

class Standing(NamedTuple):
    """How an island stands. fitness: None while it has not been measured; kind: a key of KINDS; state: SHA-256 of its newest snapshot
    (bytes), None without one, and state_step its step; founder: the island from which its population descends; ask: it wants an answer."""
    fitness: object
    kind: str
    unit: str
    step: int
    epoch: int
    founder: str
    state: object
    state_step: int
    ask: bool

    def pack(self):
        return json.dumps({**self._asdict(), "state": self.state.hex() if self.state else None}).encode()


def read_standing(payload):
    """The Standing in a frame. Raises FrameError where it cannot be one."""
    try:
        told = json.loads(payload)
        standing = Standing(**{**told, "state": bytes.fromhex(told["state"]) if told["state"] is not None else None})
        counts = (standing.step, standing.epoch, standing.state_step)
        if not (all(type(x) is int and 0 <= x < 1 << 48 for x in counts) and type(standing.ask) is bool and standing.unit in KINDS[standing.kind]
                and (standing.state is None or len(standing.state) == 32) and NAME.fullmatch(standing.founder)
                and (standing.fitness is None or type(standing.fitness) in (int, float) and math.isfinite(standing.fitness)
                     and 0 <= standing.fitness < 1e9)):
            raise ValueError
    except (ValueError, TypeError, KeyError, RecursionError):
        raise FrameError("wrong standing: it cannot be read") from None
    return standing


# --- what an island knows ------------------------------------------------------------------------------------------------------

class Target:
    """An address that is called. addresses: [(family, address)] that the system has for it, the next one to try first; name: who answered."""

    def __init__(self, host, port):
        self.host, self.title = host, f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        try:
            self.addresses = [(found[0], found[4]) for found in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)]
        except (OSError, UnicodeError):
            raise IslandError(f"--peer {self.title} cannot be reached: this is no name or address: give HOST:PORT of another island's "
                              "coordinator") from None
        self.name, self.connection, self.itself, self.told = None, None, False, False
        self.pause, self.call_at = BACK_OFF[0], 0.0

    def failed(self, longest=False):
        self.addresses.append(self.addresses.pop(0))
        self.call_at = time.monotonic() + self.pause * random.uniform(0.5, 1.0)
        self.pause = BACK_OFF[1] if longest else min(2 * self.pause, BACK_OFF[1])


class Peer:
    """Another island, through all its connections."""

    def __init__(self, name):
        self.name, self.connection, self.address, self.id, self.identity = name, None, "", "", ""
        self.standing = None
        self.asked = None                  # when, while the answer is not here
        self.ask_at = 0.0                  # not before
        self.questions, self.spoke = QUESTIONS, time.monotonic()
        self.heard = time.monotonic()
        self.given = self.taken = 0        # whole states

    def may_ask(self):
        now = time.monotonic()
        self.questions, self.spoke = min(QUESTIONS, self.questions + (now - self.spoke) / ASK_EVERY), now
        if self.questions < 1:
            return False
        self.questions -= 1
        return True


class Fitness:
    """The exponential mean of what this island measures in the present epoch: validation, or the training loss as long as there was none."""

    def __init__(self):
        self.kind, self.unit = "loss", KINDS["loss"][0]
        self.begin()
        self.best, self.best_step = math.inf, 0

    def begin(self):
        """Of a new epoch nothing is known yet."""
        self.value, self.measures = None, 0

    def add(self, kind, unit, x, step):
        """Takes a measure in, unless it is a loss beside validation."""
        if (kind, unit) != (self.kind, self.unit):
            if kind == "loss":
                return
            self.kind, self.unit, self.best = kind, unit, math.inf
            self.begin()
        self.measures += 1
        share = max(SHARE[kind], 1 / self.measures)            # the plain mean at first
        self.value = x if self.value is None else (1 - share) * self.value + share * x
        if self.value < self.best:
            self.best, self.best_step = self.value, step


class Elites:
    """The best states that this island has measured: copies of snapshots in the save directory, which no epoch touches."""

    FILE = re.compile(r"elite-(\d{3,})-(\d{8,})-(validation|loss)-(\d+\.\d{4})\.egg")      # epoch, step, kind, fitness

    def __init__(self, directory, most):
        self.directory, self.most = directory, most
        found = ((name, self.FILE.fullmatch(name)) for name in os.listdir(directory))
        self.files = sorted((m[3] != "validation", float(m[4]), (int(m[1]), int(m[2])), name) for name, m in found if m)      # the best first

    def offer(self, path, epoch, step, kind, fitness):
        """Keeps the snapshot at `path` if it is one of the best; whether it is new there. A state that was measured again is kept once.
        Raises OSError."""
        name = f"elite-{epoch:03d}-{step:08d}-{kind}-{fitness:.4f}.egg"
        entry = (kind != "validation", float(f"{fitness:.4f}"), (epoch, step), name)
        others = [e for e in self.files if e[2] != (epoch, step)]
        files = sorted([*others, entry])[:self.most]
        if entry not in files or entry in self.files:
            return False
        part = os.path.join(self.directory, name + ".part")
        with contextlib.suppress(FileNotFoundError):
            os.unlink(part)
        os.link(path, part)
        os.replace(part, os.path.join(self.directory, name))
        for _, _, _, old in set(self.files) - set(files):
            with contextlib.suppress(OSError):
                os.unlink(os.path.join(self.directory, old))
        self.files = files
        return True

    def best(self, cfg):
        """(epoch, State) of the best one that can be read, None where there is none."""
        for _, _, (epoch, _), name in self.files:
            with contextlib.suppress(OSError, ValueError), open(os.path.join(self.directory, name), "rb") as file:
                return epoch, snapshots.unpack(cfg, file.read())
        return None


class Bucket:
    """How much may pass: `rate` bytes a second, 0 for no bound; what was not used lasts for a moment."""

    def __init__(self, rate):
        self.rate, self.at = rate, time.monotonic()
        self.piece = int(max(LEAST_PIECE, min(BLOCK, rate / 4))) if rate else BLOCK      # of a state that is sent or asked for at once
        self.credit = self.most = max(2 * self.piece, rate / 2)

    def take(self, size):
        """Whether so many bytes may pass now; then they are taken."""
        now = time.monotonic()
        self.credit, self.at = min(self.most, self.credit + (now - self.at) * self.rate), now
        if self.rate and self.credit < size:
            return False
        self.credit -= size
        return True


class Transfer:
    """A state on its way in. made: once it is all here what `prepare` has made of it, None until then."""

    def __init__(self, cfg, peer, standing, directory):
        self.cfg, self.peer, self.standing, self.download = cfg, peer, standing, snapshots.Download(cfg, standing.state, directory)
        self.asked, self.moved, self.made = False, time.monotonic(), None

    def prepare(self, fitness):
        """Does what does not need the own state, in a thread, so that no worker has to wait for it. fitness: the own one."""
        def work():
            try:
                theirs = self.download.upload.state()
                if merging.needs_ours(self.cfg):
                    self.made = theirs, None
                else:
                    state = merging.merge(self.cfg, None, theirs, fitness, self.standing.fitness)
                    self.made = state, snapshots.pack(state)
            except (OSError, ValueError) as error:
                self.made = error
        threading.Thread(target=work, daemon=True).start()

    def result(self, ours, fitness):
        """(State of the next epoch, its body as a snapshot or None). Raises OSError, ValueError for a state that cannot be used."""
        if isinstance(self.made, Exception):
            raise self.made
        state, body = self.made
        return (state, body) if body else (merging.merge(self.cfg, ours, state, fitness, self.standing.fitness), None)


class Handover(NamedTuple):
    """What the next epoch is made of. kind: MERGE, "undo" or "rejuvenate"; transfer: a finished Transfer, or None; ours: whether the own state
    is needed."""
    kind: str
    transfer: object
    ours: bool
    since: float


class Call(Role):
    """The role of a session by which an island calls another one, until both are introduced."""

    peer = None

    def __init__(self, session, island, target):
        super().__init__(session)
        self.island, self.target = island, target
        self.caller = greeting.Caller(island.coordinator.access.secret, island.card())

    def begin(self):
        self.session.version = V2
        self.session.reply(*self.caller.begin())

    def handle(self, opcode, payload):
        if opcode == ERROR:
            self.island.read_error(self.session, payload)
        elif opcode == ISLAND and self.caller.welcome:
            self.island.was_let_in(self.session, greeting.read_card(payload))
        else:
            try:
                answer = self.caller.handle(opcode, payload)
            except greeting.GreetingError as error:
                self.island.refused(self.session, str(error))
            else:
                if answer:
                    self.session.reply(*answer)

    def check(self, now):
        if now - self.session.born > auth.HANDSHAKE_SECONDS:
            self.session.close()                     # it is called again

    def closed(self):
        self.island.lost(self.session)


class PeerRole(Role):
    """The role of a session with another island, whoever called. target: the one that was called here, or None."""

    def __init__(self, session, island, peer, target):
        super().__init__(session)
        self.island, self.peer, self.target = island, peer, target
        self.wanted = None                           # (SHA-256, offset, size) of a piece of a state that it waits for

    def handle(self, opcode, payload):
        if opcode == ERROR:
            self.island.read_error(self.session, payload)
        else:
            self.island.handle(self.session, opcode, payload)

    def closed(self):
        self.island.lost(self.session)


class Island(Hook):
    """The island of a coordinator (egg_net.Coordinator)."""

    takes_version_1 = False

    def __init__(self, coordinator, terms):
        cfg, run = coordinator.cfg, coordinator.run
        if run.directory is None or not cfg.SNAPSHOT_EVERY:
            raise IslandError("an island needs --save-dir and SNAPSHOT_EVERY above 0: it gives its snapshots away")
        self.coordinator, self.cfg, self.run, self.terms, self.events = coordinator, cfg, run, terms, coordinator.events
        self.id = os.urandom(8).hex()
        self.targets = [Target(*address) for address in terms.peers]
        self.peers, self.distrusted = {}, {}         # name -> Peer; identity -> until when
        self.fitness, self.elites = Fitness(), Elites(run.directory, cfg.ELITES)
        self.outgoing, self.incoming = Bucket(terms.bandwidth), Bucket(terms.bandwidth)
        self.lent = {}                               # SHA-256 -> [file, when it was last asked for]
        self.transfer = self.handover = None
        self.last = None                             # SHA-256 of the state that was taken last: it is not taken twice
        self.trial = run.start.origin                # of the present epoch, until it has been judged
        self.told = None                             # fields of a merge that is told when its first chunk is handed out
        self.idle_since = run.step                   # step from which REJUVENATE_AFTER counts
        self.lineage = [self._ancestor(start) for start in history.epochs(run.directory)]
        self.events.tell("island", f"island {terms.name}, {len(self.targets)} peers to call", name=terms.name,
                         peers=[target.title for target in self.targets])

    def _ancestor(self, start):
        origin = start.origin or {}
        return {"epoch": start.epoch, "step": start.step, "from": origin.get("from", self.terms.name), "peer_step": origin.get("peer_step"),
                "digest": origin.get("digest"), "founder": origin.get("founder", self.terms.name)}

    @property
    def founder(self):
        """The island from which the present population descends."""
        return self.lineage[-1]["founder"]

    # who is there

    def card(self):
        """What JOIN and ISLAND say."""
        return {"role": "island", "id": self.id, "name": self.terms.name, "config": json.loads(json.dumps(self.cfg.shared()))}

    def objection(self, card):
        """Why an island with this card cannot be a peer, or None."""
        if not NAME.fullmatch(card.name):
            return "its name cannot be shown: letters, digits and _ . : / - are"
        if card.name == self.terms.name:
            return f"it is called {card.name} as this island is: give every island a name of its own"
        here, there = ({k: v for k, v in config.items() if not egg_config.may_differ(k)} for config in (self.card()["config"], card.config))
        if differ := history.difference(there, here):
            return f"these constants must be the same on all islands: {differ}"
        if card.config.get("ISLAND_SEED") == self.cfg.ISLAND_SEED:
            return f"ISLAND_SEED = {self.cfg.ISLAND_SEED} there and here, so their noise would be the same: give every island another, -D ISLAND_SEED=N"
        if card.name not in self.peers and len(self.peers) >= MOST_PEERS:
            return f"{MOST_PEERS} islands are known here, as many as can be"
        return None

    def admit_peer(self, card, author):
        """Raises Refused where the island of this card, which calls, cannot be a peer."""
        if card.id == self.id:
            raise Refused("this is the island itself", ITSELF)
        if why := self.objection(card):
            raise Refused(f"island {card.name}: {why}", OTHER_CONFIG)

    def peer_joined(self, connection, card, author):
        """An island that called is let in."""
        connection.reply(ISLAND, json.dumps(self.card()).encode())
        if connection.open:
            self._joined(connection, card, author.identity, None)

    def was_let_in(self, connection, card):
        """The island that was called, with this card, has let us in."""
        if why := self.objection(card):
            self.refused(connection, why)
        else:
            self._joined(connection, card, self.coordinator.admission.author(connection, card).identity, connection.role.target)

    def _joined(self, connection, card, identity, target):
        """A peer is introduced, whoever called. Of two connections between the same processes both sides keep that of the smaller id."""
        peer = self.peers.setdefault(card.name, Peer(card.name))
        old, same = peer.connection, peer.id == card.id
        if target:
            target.name, target.pause = peer.name, BACK_OFF[0]
        if old and same and bool(old.role.target) != bool(target) and bool(old.role.target) == (self.id < card.id):
            connection.close()
            return
        connection.role, connection.title = PeerRole(connection, self, peer, target), f"{peer.name} ({connection.address})"
        connection.limits = wire.only(self.coordinator.admission.limits, wire.FROM_ISLAND)
        peer.connection, peer.id, peer.identity, peer.heard, peer.asked = connection, card.id, identity, time.monotonic(), None
        peer.address = target.title if target else connection.address
        if old:
            old.close()
        else:
            self._tell_peer(peer, peer.address, "up")

    def lost(self, connection):
        """A connection of ours, or of a peer, is closed."""
        target, peer = connection.role.target, connection.role.peer
        if self.coordinator.closing:
            return
        if target and target.connection is connection:
            target.connection = None
            target.failed()
            if not target.told and not target.name and not target.itself:
                target.told = True
                self.events.tell("peer", f"island: {target.title} does not answer yet, trying again", peer=target.title, address=target.title,
                                 state="down")
        if peer and peer.connection is connection:
            peer.connection = peer.asked = None
            if self.transfer and self.transfer.peer is peer:
                self.transfer.asked = False          # when it is back it is asked for what is missing
            self._tell_peer(peer, peer.address, "down")

    def refused(self, connection, why, code=None):
        """A peer does not want us."""
        target = connection.role.target
        if target:
            target.itself = target.itself or code == ITSELF
            target.failed(longest=True)
            if not target.told and not target.itself:
                target.told = True
                self.events.tell("peer", f"island: {target.title} refuses this island: {why}", peer=target.title, address=target.title,
                                 state="refused")
        connection.close()

    def read_error(self, connection, payload):
        """Another island ends the connection, and says why."""
        code, why = greeting.read_error(payload)
        if code == FULL:
            connection.close()
        else:
            self.refused(connection, why, code)

    def _call(self, target):
        """Begins to connect to another island."""
        family, address = target.addresses[0]
        coordinator = self.coordinator
        try:
            connection = Session(coordinator.hub, socket.socket(family, socket.SOCK_STREAM), address, coordinator.progress.traffic,
                                 coordinator.admission.door, wire.only(coordinator.admission.limits, wire.FROM_CALLED), self.terms.tls, target.host)
        except OSError:                              # file descriptors are used up
            target.failed()
            return
        connection.title, connection.role, target.connection = target.title, Call(connection, self, target), connection

    def _tell_peer(self, peer, address, state):
        self.events.tell("peer", f"island: peer {peer.name} at {address} is {state}", peer=peer.name, address=address, state=state)

    def _connected(self, name):
        return name in self.peers and self.peers[name].connection is not None

    def _believed(self, peer):
        return time.monotonic() >= self.distrusted.get(peer.identity, 0.0)

    def _distrust(self, peer, why):
        self.distrusted[peer.identity] = time.monotonic() + DISTRUST
        self.events.warn(f"island: {why}; nothing of {peer.name} is taken for {DISTRUST:g} s")

    # what is due

    def check(self, now):
        """Calls, deadlines, and what had to wait for the bandwidth; several times a second."""
        for target in self.targets:
            if not target.connection and not target.itself and now >= target.call_at and not self._connected(target.name):
                self._call(target)
        for peer in self.peers.values():
            connection = peer.connection
            if connection and peer.asked and now - peer.asked > PATIENCE:
                connection.close()
            elif connection and connection.waits:
                self._pay(connection)
                if not connection.waits:
                    connection.received()            # what has come meanwhile
        if self.transfer and now - self.transfer.moved > STALLED and not self.transfer.download.finished:
            self._end_transfer(f"nothing more came of the state of {self.transfer.peer.name}")
        self._ask()
        if self.handover and now - self.handover.since > HANDOVER_SECONDS:
            self._give_up(f"no worker sent the own state within {HANDOVER_SECONDS:g} s")
        for sha256 in [s for s, (_, asked) in self.lent.items() if now - asked > LEND_SECONDS]:
            self.lent.pop(sha256)[0].close()

    def close(self):
        if self.told:
            self.chunk_handed_out()
        if self.transfer:
            self.transfer.download.drop()
        for file, _ in self.lent.values():
            file.close()
        self.lent.clear()

    # tournaments

    def standing(self, ask=False):
        shelf, fitness = self.coordinator.shelf, self.fitness
        return Standing(fitness.value, fitness.kind, fitness.unit, self.run.step, self.run.start.epoch, self.founder,
                        shelf.sha256.get(shelf.newest), shelf.newest, ask)

    def handle(self, connection, opcode, payload):
        """A frame of a peer. Raises FrameError."""
        peer = connection.role.peer
        peer.heard = time.monotonic()
        if opcode == STANDING:
            standing = read_standing(payload)
            if standing.ask and not peer.may_ask():
                return
            expected, peer.standing = standing.ask or peer.asked is not None, standing
            if standing.ask:
                connection.reply(STANDING, self.standing().pack())
            else:
                peer.asked = None
            if expected:
                self._judge(peer, standing)
        elif opcode == STATE_REQUEST:
            connection.role.wanted, connection.waits = STATE_WANTED.unpack(payload), True
            self._pay(connection)
        elif opcode == STATE:
            sha256, total, offset = STATE_HEAD.unpack_from(payload)
            if self.transfer and self.transfer.peer is peer and self.transfer.asked and sha256 == self.transfer.standing.state:
                self._take(total, offset, payload[STATE_HEAD.size:])

    def _tournament(self):
        now = time.monotonic()
        there = [peer for peer in self.peers.values() if peer.connection and not peer.asked and now >= peer.ask_at]
        if there:
            peer = random.choice(there)
            peer.asked, peer.ask_at = now, now + ASK_EVERY
            peer.connection.reply(STANDING, self.standing(True).pack())

    def _judge(self, peer, theirs):
        """Both sides of a tournament do this with the same two standings, so that the better one needs not say more."""
        ours, outcome = self.standing(), "keep"
        if (ours.kind, ours.unit) != (theirs.kind, theirs.unit) or not self._believed(peer):
            outcome = "refused"
        elif None not in (ours.fitness, theirs.fitness) and theirs.fitness < ours.fitness:
            free = not (self.transfer or self.handover or self.coordinator.closing)
            if self.terms.accept and free and theirs.state not in (None, self.last):
                outcome = "pull"
        elif None not in (ours.fitness, theirs.fitness) and ours.fitness < theirs.fitness:
            outcome = "offer"
        if outcome == "pull" or not theirs.ask:
            line = f"island: {peer.name} is better, {theirs.fitness:.4f} against {ours.fitness:.4f} {ours.unit}: fetching its state of step " \
                   f"{theirs.state_step}" if outcome == "pull" else None
            self.events.tell("gossip", line, peer=peer.name, ours=_rounded(ours.fitness), theirs=_rounded(theirs.fitness), kind=ours.kind,
                             outcome=outcome)
        if outcome == "pull":
            self.transfer = Transfer(self.cfg, peer, theirs, self.run.directory)
            self._ask()

    # states on their way

    def _ask(self):
        """For the next piece of the state that is on its way in, as soon as it may pass."""
        transfer = self.transfer
        if transfer and transfer.peer.connection and not transfer.asked and not transfer.download.finished \
                and self.incoming.take(self.incoming.piece):
            transfer.asked = True
            transfer.peer.connection.reply(STATE_REQUEST, STATE_WANTED.pack(transfer.standing.state, transfer.download.got, self.incoming.piece))

    def _take(self, total, offset, data):
        transfer = self.transfer
        transfer.asked, transfer.moved = False, time.monotonic()
        if not total:
            self._end_transfer(f"{transfer.peer.name} does not have its state of step {transfer.standing.state_step} any more")
            return
        try:
            transfer.download.add(total, offset, data)
        except ValueError as error:
            self._end_transfer()
            self._distrust(transfer.peer, f"the state of {transfer.peer.name} is not used: {error}")
        except OSError as error:
            self._end_transfer(f"the state of {transfer.peer.name} cannot be kept: {error.strerror}")
        else:
            if transfer.download.finished:
                transfer.prepare(self.fitness.value)
            self._ask()

    def _end_transfer(self, why=None):
        self.transfer.download.drop()
        self.transfer = None
        if why:
            self.events.warn(f"island: {why}")

    def _pay(self, connection):
        """Sends what a peer asked for, as soon as it may pass; until then nothing more is taken from it."""
        sha256, offset, size = connection.role.wanted
        size = min(size, self.outgoing.piece)
        if self.outgoing.take(size):
            connection.waits = False
            total, data = self._lend(sha256, offset, size)
            if total and offset < total == offset + len(data):
                connection.role.peer.given += 1
            connection.reply(STATE, STATE_HEAD.pack(sha256, total, offset), data)

    def _lend(self, sha256, offset, size):
        """(bytes of the snapshot file, some of them); (0, b"") where it is not here. What is being read stays until it is no longer."""
        shelf = self.coordinator.shelf
        step = next((s for s, found in shelf.sha256.items() if found == sha256), None)
        try:
            if sha256 not in self.lent and step is not None:
                self.lent[sha256] = [open(os.path.join(self.run.directory, shelf.files[step]), "rb", buffering=0), 0.0]
                while len(self.lent) > LENT:
                    self.lent.pop(min(self.lent, key=lambda s: (s == sha256, self.lent[s][1])))[0].close()
            if sha256 in self.lent:
                file, self.lent[sha256][1] = self.lent[sha256][0], time.monotonic()
                total = os.fstat(file.fileno()).st_size
                return total, os.pread(file.fileno(), size, min(offset, total))
        except OSError:
            pass
        return 0, b""

    # what is measured

    def validated(self, step, value, unit):
        """A validation of the present epoch."""
        self.fitness.add("validation", unit, value, step)
        self.snapshot_kept(step)

    def snapshot_kept(self, step):
        """There is a snapshot of this step, or it has been measured: if it is one of the best states it stays."""
        shelf, fitness = self.coordinator.shelf, self.fitness
        if step in shelf.files and fitness.value is not None and self.elites.most:
            try:
                if self.elites.offer(os.path.join(self.run.directory, shelf.files[step]), self.run.start.epoch, step, fitness.kind, fitness.value):
                    self.events.tell("elite", step=step, fitness=_rounded(fitness.value), kind=fitness.kind)
            except OSError as error:
                self.events.warn(f"island: the state of step {step} cannot be kept as an elite: {error.strerror}")

    # epochs

    def step_completed(self, loss):
        """A step is complete and no chunk of the next one handed out: the moment for another state, or for a tournament."""
        self.fitness.add("loss", KINDS["loss"][0], loss, self.run.step)
        if self.coordinator.finished or self.coordinator.closing or self.run.step <= self.run.start.step:
            return
        if handover := self._due():
            self.handover = handover
            if not handover.ours:
                self._hand_over(None)
        elif random.random() < self.cfg.GOSSIP_RATE:
            self._tournament()

    def _due(self):
        """The Handover for which it is time, or None."""
        cfg, now, fitness = self.cfg, time.monotonic(), self.fitness
        if self._regretted():
            return Handover("undo", None, False, now)
        if self.transfer and self.transfer.made:
            theirs = self.transfer.standing
            if (theirs.kind, theirs.unit) == (fitness.kind, fitness.unit) and None is not fitness.value > theirs.fitness:
                return Handover(cfg.MERGE, self.transfer, merging.needs_ours(cfg), now)
            self._end_transfer(f"the state of {self.transfer.peer.name} is no longer better than the own one: not used")
        if fitness.best < math.inf:
            self.idle_since = max(self.idle_since, fitness.best_step)
        if cfg.REJUVENATE_AFTER and self.run.step - self.idle_since >= cfg.REJUVENATE_AFTER:
            return Handover("rejuvenate", None, True, now)
        return None

    def _regretted(self):
        """Whether the present epoch is worse than what was before it; then its giver is not believed."""
        origin, fitness = self.trial, self.fitness
        if not origin or fitness.measures < SURE[fitness.kind]:
            return False
        self.trial = None
        if origin["fitness_kind"] != fitness.kind or origin["kind"] not in REGRET \
                or fitness.value <= (1 + REGRET[origin["kind"]]) * origin["ours"]:
            return False
        why = f"with the state of {origin['from']}, which promised {origin['theirs']:.4f}, this island has {fitness.value:.4f} {fitness.unit} after " \
              f"{origin['ours']:.4f} before"
        if origin["from"] in self.peers:
            self._distrust(self.peers[origin["from"]], why)
        else:
            self.events.warn(f"island: {why}")
        return bool(self.elites.files)

    @property
    def awaits_state(self):
        return self.handover is not None

    def state_received(self, upload):
        """A worker has sent the state of the present step, for which the handover waits, if it still does."""
        if not self.handover or upload.step != self.run.step:
            return
        if self.coordinator.trust.contradicts(upload.step, upload.digest):
            self._give_up("workers hold different states")
            return
        self._hand_over(upload.state(), upload.digest)

    def _hand_over(self, ours, digest=None):
        """Makes the next epoch. ours: the own State where it is needed, with its digest."""
        handover, cfg, fitness = self.handover, self.cfg, self.fitness
        kind, transfer = handover.kind, handover.transfer
        origin = {"epoch": self.run.start.epoch + 1, "kind": kind, "island": self.terms.name, "from": self.terms.name, "founder": self.founder,
                  "peer_step": None, "fitness_kind": fitness.kind, "ours": _rounded(fitness.value), "theirs": None, "parent_theirs": None,
                  "parent_ours": digest.hex() if ours else self.coordinator.trust.leading(self.run.step - 1).hex(),
                  "parent_ours_step": self.run.step - (not ours)}
        body = None
        try:
            if kind == "undo":
                found = self.elites.best(cfg)
                if not found:
                    self._give_up("no elite can be read")
                    return
                epoch, state = found
                origin["peer_step"] = state.step
                origin["founder"] = next((e["founder"] for e in self.lineage if e["epoch"] == epoch), self.terms.name)
            elif kind == "rejuvenate":
                state = merging.rejuvenate(cfg, ours)
            else:
                peer, theirs, upload = transfer.peer, transfer.standing, transfer.download.upload
                state, body = transfer.result(ours, fitness.value)
                mixed = {"alpha": cfg.RECOMBINE_ALPHA} if kind == "recombine" else {}
                origin.update({"from": peer.name, "peer_step": upload.step, "theirs": _rounded(theirs.fitness), "optimizer": cfg.OPTIMIZER_MERGE,
                               "founder": theirs.founder, "parent_theirs": upload.digest.hex(), **mixed})
            state.step, state.seed = self.run.step, self.run.seed
            origin["digest"] = state_digest.of_state(state).hex()
            self.coordinator.begin_epoch(state, origin, body)
        except ValueError as error:
            self._distrust(transfer.peer, f"the state of {transfer.peer.name} is not used: {error}")     # nothing else raises it
            self._give_up()
            return
        except OSError as error:
            self._give_up(f"the new state cannot be kept: {error.strerror}")
            return
        self._begun(handover, origin)

    def _begun(self, handover, origin):
        kind, transfer = handover.kind, handover.transfer
        self.trial = origin
        self.lineage.append(self._ancestor(self.run.start))
        self.idle_since = self.run.step
        fields = {"step": self.run.step, "epoch": origin["epoch"], "digest": origin["digest"]}
        if kind == "rejuvenate":
            self.events.tell("rejuvenated", f"island: no better for {self.cfg.REJUVENATE_AFTER} steps: moments begin anew and the noise is raised "
                                            f"(epoch {origin['epoch']}, step {self.run.step})", **fields)
        else:
            self.told = {**fields, "peer": origin["from"], "since": handover.since, "peer_step": origin["peer_step"], "kind": kind,
                         **{k: origin[k] for k in ("ours", "theirs", "fitness_kind", "parent_ours", "parent_theirs", "founder")}}
        if transfer:
            transfer.peer.taken += 1
            self.last = transfer.standing.state
        self.fitness.begin()
        self._end_handover()

    def chunk_handed_out(self):
        """The first chunk of a new epoch is: what the handover took is known."""
        fields, self.told = self.told, None
        if fields:
            seconds = time.monotonic() - fields.pop("since")
            what = "back to the own state" if fields["kind"] == "undo" else f"{fields['kind']} of the state of {fields['peer']}"
            self.events.tell("merge", f"island: step {fields['step']} begins epoch {fields['epoch']}: {what} of step {fields['peer_step']}, "
                                      f"handed over in {seconds:.2f} s", **fields, seconds=round(seconds, 3))

    def _give_up(self, why=None):
        if why:
            self.events.warn(f"island: step {self.run.step} goes on with the own state: {why}")
        self._end_handover()

    def _end_handover(self):
        if self.transfer:                            # what it promised is to be compared with another state now
            self._end_transfer()
        self.handover, self.idle_since = None, max(self.idle_since, self.run.step if self.handover.kind == "rejuvenate" else 0)
        self.coordinator.wake()

    # what people see

    def status(self):
        """What `status` tells about it, as a dict for JSON."""
        now = time.monotonic()
        peers = [{"name": p.name, "address": p.address, "state": "down" if not p.connection else "up" if self._believed(p) else "distrusted",
                  "fitness": _rounded(p.standing.fitness) if p.standing else None, "kind": p.standing.kind if p.standing else None,
                  "step": p.standing.step if p.standing else None, "epoch": p.standing.epoch if p.standing else None,
                  "founder": p.standing.founder if p.standing else None,
                  "last_seen": round(now - p.heard, 3), "given": p.given, "taken": p.taken} for p in self.peers.values()]
        return {"name": self.terms.name, "epoch": self.run.start.epoch, "fitness": _rounded(self.fitness.value), "kind": self.fitness.kind,
                "founder": self.founder, "peers": peers, "lineage": self.lineage[-LINEAGE:]}


def _rounded(x):
    return None if x is None else round(x, 6)
