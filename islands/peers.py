"""The other islands: addresses, connections, introductions, trust. There is no central place: every island calls its
peers, and serves them on the port and in the event loop of its coordinator."""

import json
import os
import random
import re
import socket
import time

import egg_config
from cluster import auth, history, wire
from cluster.console import one_line
from cluster.hub import Budget, NetError, address_text, resolve, split_address
from cluster.session import Role, Session
from cluster.wire import ERROR, FULL, ISLAND, ITSELF, OTHER_CONFIG, Refused, STATE, STATE_REQUEST, V2
from egg_config import ConfigError, explained

NAME = re.compile(r"[A-Za-z0-9_.:/-]{1,64}")
DISTRUST = 600.0           # seconds for which a peer is not trusted
PATIENCE = 10.0            # seconds within which a peer must answer a question
FIRST_PAUSE = 0.5          # seconds between the first two calls of an address; doubles up to
LONGEST_PAUSE = 30.0
ASK_EVERY = 0.25           # least seconds between two questions to one peer
QUESTIONS = 8              # questions of a peer that are answered in a row; after that one every ASK_EVERY seconds
MOST_PEERS = 1024
MOST_OF_HOST = 64
FORGOTTEN = 600.0          # seconds after which a disconnected peer is forgotten


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


def parse_bandwidth(text):
    """Bytes per second of 0 (no limit), 500k, 2.5M. Raises ValueError."""
    match = re.fullmatch(r"(\d{1,12}(?:\.\d{1,6})?)([kM]?)", text)
    rate = float(match[1]) * {"": 1, "k": 1e3, "M": 1e6}[match[2]] if match else -1.0
    if not (rate == 0 or 1000 <= rate <= 1e12):
        raise ValueError(text)
    return rate


def peers_from_slurm(port, environ=os.environ):
    """[(host, port)] of the other nodes of this process's Slurm job. Raises ConfigError."""
    import subprocess
    nodes = environ.get("SLURM_JOB_NODELIST")
    advice = "give the peers with --peer"
    if not nodes:
        raise ConfigError(f"--peers-from-slurm: SLURM_JOB_NODELIST is not set: start it in a Slurm job, or {advice}")
    with explained(ConfigError, "--peers-from-slurm needs scontrol to list the nodes", advice):
        done = subprocess.run(["scontrol", "show", "hostnames", nodes], capture_output=True, text=True)
    if done.returncode:
        raise ConfigError(f"--peers-from-slurm: scontrol cannot read SLURM_JOB_NODELIST = {nodes[:200]!r}: {advice}")
    this_node = environ.get("SLURMD_NODENAME") or socket.gethostname().partition(".")[0]
    return [(host, port) for host in done.stdout.split() if host != this_node]


class Target:
    """An address to call. addresses: [(family, address)], the next one first; is_self: the island called itself."""

    name = session = None
    is_self = logged = False
    pause, call_at = FIRST_PAUSE, 0.0

    def __init__(self, host, port):
        self.host = host
        self.title = address_text(host, port)
        try:
            self.addresses = [(entry[0], entry[4]) for entry in resolve(host, port)]
        except OSError:
            raise NetError(f"--peer {self.title} cannot be reached: this is no name or address: give HOST:PORT of "
                           "another island's coordinator") from None

    def failed(self):
        self.addresses.append(self.addresses.pop(0))
        self.call_at = time.monotonic() + self.pause * random.uniform(0.5, 1.0)
        self.pause = min(2 * self.pause, LONGEST_PAUSE)


class Peer:
    """Another island, through all its connections. author: the admission.Author of the last connection; standing: its
    last Standing; question_at: time of the open question for it, or None; given, taken: numbers of complete states."""

    address = ""
    session = standing = question_at = None
    next_question_at = 0.0
    given = taken = 0

    def __init__(self, author):
        self.name = author.name
        self.author = author
        self.heard = time.monotonic()
        self.questions = Budget(1 / ASK_EVERY, QUESTIONS)        # those of this peer that are answered


class PeerRole(Role):
    """The role of a session with another island. target: the Target that was called; caller: the auth.Caller of the
    introduction; both None if the other island called. peer: None until both islands are introduced."""

    peer = None
    wanted = None              # the fields of STATE_REQUEST: the requested piece of a state

    def __init__(self, session, peers, target=None, caller=None):
        super().__init__(session)
        self.peers = peers
        self.target = target
        self.caller = caller

    def begin(self):
        self.session.version = V2
        self.session.reply(*self.caller.begin())

    def handle(self, opcode, payload):
        if opcode == ERROR:
            code, why = auth.read_error(payload)
            if code == FULL:
                self.session.close()
            else:
                self.peers.refused(self.session, why, code)
        elif self.peer:
            self.peer.heard = time.monotonic()
            if opcode != STATE_REQUEST:
                return self.peers.island.handle(self.peer, opcode, payload)
            self.wanted = STATE_REQUEST.unpack(payload)
            self.send_piece()
        elif opcode == ISLAND and self.caller.welcome:
            self.peers.accepted(self.session, auth.read_card(payload))
        else:
            try:
                if answer := self.caller.handle(opcode, payload):
                    self.session.reply(*answer)
            except auth.GreetingError as error:
                self.peers.refused(self.session, str(error))
        return True

    def check(self, now):
        if not self.peer and now - self.session.born > auth.HANDSHAKE_SECONDS:
            self.session.close()                     # it is called again
        elif self.wanted:
            self.send_piece()

    def send_piece(self):
        """Sends the requested piece as soon as the bandwidth allows; until then nothing is read from the peer."""
        shelf = self.peers.coordinator.shelf
        bandwidth = self.peers.bandwidth
        sha256, offset, most = self.wanted
        size = min(most, bandwidth.piece)
        if not bandwidth.take(size):
            self.session.wait()
            return
        self.wanted = None
        step = next((step for step, found in shelf.sha256.items() if found == sha256), None)
        total, data = shelf.piece(sha256, shelf.path(step), offset, size)
        self.peer.given += offset < total == offset + len(data)
        self.session.reply(STATE, sha256, total, offset, data)
        self.session.go_on()

    def closed(self):
        self.peers.lost(self.session)


class Peers:
    """Calls and introduces peers for an islands.gossip.Island: island.handle(peer, opcode, payload) takes their frames,
    island.peer_lost(peer) follows the end of a connection. settings: an islands.gossip.IslandSettings; bandwidth: the
    transfer.Bucket of the states that they request. Raises NetError."""

    def __init__(self, island, coordinator, settings, bandwidth):
        self.island = island
        self.coordinator = coordinator
        self.cfg = coordinator.cfg
        self.events = coordinator.events
        self.id = os.urandom(8).hex()
        self.name = settings.name
        self.tls = settings.tls
        self.bandwidth = bandwidth
        # the auth.Card of this island in JOIN and ISLAND; constants as JSON returns them
        self.card = {"role": "island", "id": self.id, "name": self.name,
                     "config": json.loads(json.dumps(self.cfg.shared()))}
        self.targets = [Target(*address) for address in settings.peers]
        self.known = {}                              # name: Peer
        self.distrusted = {}                         # identity: end of the distrust, time.monotonic()

    def check(self, now):
        for target in self.targets:
            peer = self.known.get(target.name)
            if not (target.session or target.is_self or peer and peer.session) and now >= target.call_at:
                self._call(target)
        for peer in list(self.known.values()):
            if peer.question_at and now - peer.question_at > PATIENCE:
                peer.session.close()
            if not peer.session and now - peer.heard > FORGOTTEN:
                del self.known[peer.name]
        self.distrusted = {identity: until for identity, until in self.distrusted.items() if now < until}

    def trusted(self, peer):
        return peer.author.identity not in self.distrusted

    def distrust(self, peer, why):
        self.distrusted[peer.author.identity] = time.monotonic() + DISTRUST
        self.events.warn(f"island: {why}; nothing of {peer.name} is taken for {DISTRUST:g} s", peer.author.host)

    # introductions

    def objection(self, card, author):
        """Why an island with this card cannot be a peer, or None. author: the admission.Author of its connection."""
        if not NAME.fullmatch(card.name):
            return "its name cannot be shown: it needs letters, digits and _ . : / -"
        if card.name == self.name:
            return f"it is called {card.name}, as this island: give every island another name"
        ours, theirs = ({name: value for name, value in config.items() if not egg_config.may_differ(name)}
                        for config in (self.card["config"], card.config))
        if differ := history.difference(theirs, ours):
            return f"these constants must be the same on all islands: {differ}"
        if card.config.get("ISLAND_SEED") == self.cfg.ISLAND_SEED:
            return (f"ISLAND_SEED = {self.cfg.ISLAND_SEED} there and here, so their noise would be the same: give "
                    "every island another, -D ISLAND_SEED=N")
        peer = self.known.get(card.name)
        if peer and peer.session and peer.author.key != card.id and peer.author.identity != author.identity:
            return f"an island of this name is connected from {peer.author.host}: give every island another name"
        of_host = [peer for peer in self.known.values() if peer.author.host == author.host]
        for peers, most in ((of_host, MOST_OF_HOST), (self.known.values(), MOST_PEERS)):
            if not peer and len(peers) >= most:
                gone = [other for other in peers if not other.session]
                if not gone:
                    return f"{most} islands are known here, the maximum" + (" for one host" if peers is of_host else "")
                del self.known[min(gone, key=lambda other: other.heard).name]
        return None

    def admit(self, card, author):
        """Raises Refused if the calling island cannot be a peer."""
        if card.id == self.id:
            raise Refused("this is the island itself", ITSELF)
        if why := self.objection(card, author):
            raise Refused(f"island {card.name}: {why}", OTHER_CONFIG)

    def joined(self, session, author):
        session.role = PeerRole(session, self)
        session.reply(ISLAND, json.dumps(self.card).encode())
        if session.open:
            self._introduced(session, author)

    def accepted(self, session, card):
        """The called island, which has this card, has let this island in."""
        author = self.coordinator.admission.author(session, card)
        if why := self.objection(card, author):
            self.refused(session, why)
        else:
            self._introduced(session, author)

    def _introduced(self, session, author):
        """Of two connections between the same processes, both sides keep the one that the smaller id called."""
        peer = self.known.setdefault(author.name, Peer(author))
        target = session.role.target
        old, calls = peer.session, self.id < author.key
        if target:
            target.name = peer.name
            target.pause = FIRST_PAUSE
        if old and peer.author.key == author.key and bool(old.role.target) == calls != bool(target):
            session.close()
            return
        session.role.peer = peer
        session.title = f"{peer.name} ({session.address})"
        session.take(wire.FROM_ISLAND)
        session.idle = None
        session.become_known()
        peer.session = session
        peer.author = author
        peer.heard = time.monotonic()
        peer.question_at = None
        peer.address = target.title if target else session.address
        if old:
            old.close()
        else:
            self._log_peer(peer, "up")

    def _call(self, target):
        family, address = target.addresses[0]
        caller = auth.Caller(self.coordinator.access.secret, self.card)
        try:
            session = Session(self.coordinator.admission, socket.socket(family, socket.SOCK_STREAM), address,
                              wire.FROM_CALLED, self.tls, target.host)
        except OSError:                              # there are no file descriptors left
            return target.failed()
        session.title = target.title
        session.role = PeerRole(session, self, target, caller)
        target.session = session

    # ends

    def lost(self, session):
        target = session.role.target
        peer = session.role.peer
        if self.coordinator.closing:
            return
        if target:
            target.session = None
            target.failed()
            if not target.name:
                self._log_target(target, "does not answer yet, trying again", "down")
        if peer and peer.session is session:
            peer.session = peer.question_at = None
            self.island.peer_lost(peer)
            self._log_peer(peer, "down")

    def refused(self, session, why, code=None):
        if target := session.role.target:
            target.is_self |= code == ITSELF
            target.pause = LONGEST_PAUSE
            self._log_target(target, f"refuses this island: {why}", "refused")
        session.close()

    def _log_target(self, target, what, state):
        """Once for each target."""
        if not target.logged and not target.is_self:
            target.logged = True
            line = one_line(f"{target.title} {what}")        # it may quote the constants of a peer
            self.events.about(target.host, "peer", f"island: {line}", peer=target.title, address=target.title,
                              state=state)

    def _log_peer(self, peer, state):
        self.events.about(peer.author.host, "peer", f"island: peer {peer.name} at {peer.address} is {state}",
                          peer=peer.name, address=peer.address, state=state)

    def status(self):
        rows = []
        for peer in self.known.values():
            state = "down" if not peer.session else "up" if self.trusted(peer) else "distrusted"
            standing = {k: getattr(peer.standing, k, None) for k in ("fitness", "kind", "step", "epoch", "founder")}
            standing["fitness"] = self.island.shown(standing["fitness"], standing["kind"])
            rows.append({"name": peer.name, "address": peer.address, "state": state, **standing, "given": peer.given,
                         "taken": peer.taken, "last_seen": round(time.monotonic() - peer.heard, 3)})
        return rows
