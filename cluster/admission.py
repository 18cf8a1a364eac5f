"""Who comes in: limits on connections, bans, and the checks that a peer passes before it may take part."""

import contextlib
import hashlib
import os
from typing import NamedTuple

from cluster import auth, greeting, history, wire
from cluster.console import one_line
from cluster.session import Role, Session
from cluster.status import pack_status
from cluster.wire import BANNED, ERROR, FAILED, FULL, OTHER_CONFIG, OTHER_DATA, Refused, V1, V2

REASONS_LOGGED, ADDRESSES_LOGGED = 32, 256     # refusals of an address that are logged, and addresses
BANNED_FILE = "banned.txt"                     # in the save directory: identity, tab, reason
NO_VERSION_1 = "version 1 peers prove nothing and are not let in where there is a secret or TLS"
NO_SNAPSHOTS = "version 1 peers cannot take snapshots, by which an island goes on from another state: use protocol 2"


class Author(NamedTuple):
    """Who is responsible for results, through all its connections. key: of the process; certificate: SHA-256 (hex) of
    the one that it showed for TLS, "" without."""
    host: str
    key: str
    name: str
    certificate: str = ""

    @property
    def identity(self):
        """What a ban names: the certificate, which cannot be made up, where the coordinator asks for one."""
        return f"certificate {self.certificate}" if self.certificate else f"{self.name} at {self.host}"


class Door:
    """Counts connections, and logs who is refused, each reason once."""

    def __init__(self, total, per_address, events):
        self.total, self.per_address, self.events = total, per_address, events
        self.count, self.by_host = 0, {}
        self._logged = {}                      # host -> reasons

    def enter(self, host):
        """Counts a connection and returns None, or returns the reason why there can be no more."""
        if self.count >= self.total:
            return f"{self.total} connections are open, as many as can be"
        if self.by_host.get(host, 0) >= self.per_address:
            return (f"{self.per_address} connections from one address are open, as many as may be "
                    "(CONNECTIONS_PER_ADDRESS)")
        self.count += 1
        self.by_host[host] = self.by_host.get(host, 0) + 1
        return None

    def leave(self, host):
        self.count -= 1
        self.by_host[host] -= 1
        if not self.by_host[host]:
            del self.by_host[host]

    def report(self, host, title, why):
        """Logs a refusal if it is new: a peer that tries again and again must not fill the log. `why` may quote it."""
        why = one_line(why)
        if host not in self._logged and len(self._logged) >= ADDRESSES_LOGGED:
            return
        logged = self._logged.setdefault(host, set())
        if why not in logged and len(logged) < REASONS_LOGGED:
            logged.add(why)
            self.events.tell("refused", f"refused {title}: {why}", address=title, reason=why)


class Bans:
    """Who may not come back, and why: a line each in BANNED_FILE of `directory`, so that a restart forgets none. The
    file is read whenever a peer comes in; removing a line lifts that ban. A ban that cannot be written, or without a
    directory, lasts as long as this object."""

    def __init__(self, directory=None):
        self.path = os.path.join(directory, BANNED_FILE) if directory is not None else None
        self._unwritten = {}

    def add(self, identity, reason):
        """identity, reason: one line each."""
        try:
            if self.path is None:
                raise OSError
            with open(self.path, "a", encoding="utf-8") as file:
                file.write(f"{identity}\t{reason}\n")
                file.flush()
                os.fsync(file.fileno())
        except OSError:
            self._unwritten[identity] = reason

    def all(self):
        """{identity: reason}."""
        bans = dict(self._unwritten)
        if self.path is not None:
            with contextlib.suppress(OSError), open(self.path, encoding="utf-8", errors="replace") as file:
                bans.update(line.rstrip("\n").split("\t", 1) for line in file if "\t" in line)
        return bans

    def message(self, author):
        """Why this author may not take part, None where it may."""
        why = self.all().get(author.identity)
        lift = f"remove its line from {self.path}" if self.path else "start the coordinator again"
        return None if why is None else f"banned: {why}; to let {author.identity} in again, {lift}"


class Admission:
    """Accepts the connections of a coordinator (egg_net.Coordinator) and lets peers in. most: connections at a time."""

    def __init__(self, coordinator, access, most):
        self.coordinator, self.cfg, self.access = coordinator, coordinator.cfg, access
        self.limits = wire.limits(self.cfg)
        self.door = Door(most, self.cfg.CONNECTIONS_PER_ADDRESS, coordinator.events)
        self.bans = Bans(coordinator.run.directory)

    def accept(self, sock, address):
        """See hub.Hub.listen."""
        if why := self.door.enter(address[0]):
            self.door.report(address[0], f"{address[0]}:{address[1]}", why)
            with sock, contextlib.suppress(OSError):
                sock.send(wire.frame(ERROR, FAILED.pack(FULL), why.encode(), version=V2))
            return
        try:
            session = Session(self.coordinator.hub, sock, address, self.coordinator.progress.traffic, self.door,
                              wire.only(self.limits, wire.FROM_ARRIVAL), self.access.tls)
        except OSError:
            self.door.leave(address[0])
            raise
        session.role = Arrival(session, self)

    def author(self, session, card):
        shown = session.certificate
        return Author(session.host, card.id, card.name, hashlib.sha256(shown).hexdigest() if shown else "")

    def let_in_version_1(self, session):
        """Raises Refused."""
        if not self.coordinator.island.takes_version_1:
            raise Refused(NO_SNAPSHOTS)
        if self.access.secret or self.access.tls:
            raise Refused(NO_VERSION_1)
        author = Author(session.host, session.title, "a version 1 peer")
        if why := self.bans.message(author):
            raise Refused(why)
        session.limits = wire.only(self.limits, wire.FROM_WORKER[V1])
        self.coordinator.worker_joined(session, author, "")

    def let_in(self, session, host):
        """The peer of a finished greeting.Host. Raises Refused."""
        card, author = host.card, self.author(session, host.card)
        if card.role == "worker":
            self._check_worker(card, author)
        elif card.role == "island":
            self.coordinator.island.admit_peer(card, author)
        session.limits = wire.only(self.limits, wire.FROM_WORKER[V2])
        if card.role == "worker":
            session.title = f"{author.name} ({session.title}, {card.device})"
            self.coordinator.worker_joined(session, author, card.device)
        elif card.role == "status":
            session.role = StatusReader(session, self.cfg.IDLE_TIMEOUT)
        session.reply(*host.welcome(self.coordinator.welcome()))
        if card.role == "status":
            session.reply(wire.STATUS, pack_status(self.coordinator.status()))
        elif card.role == "island" and session.open:
            self.coordinator.island.peer_joined(session, card, author)

    def _check_worker(self, card, author):
        if why := self.bans.message(author):
            raise Refused(why, BANNED)
        sides = "at the coordinator", "at the worker"
        if differ := history.difference(history.kept(self.cfg), card.config, sides):
            raise Refused(f"another configuration: {differ}", OTHER_CONFIG)
        run = self.coordinator.run
        if any(card.data):
            if any(run.data) and card.data != run.data:
                raise Refused("other training data than the first worker of this run had: give every worker the same "
                              f"INPUT_FILE; to go on with other data, remove {history.DATA_FILE} from the save "
                              "directory", OTHER_DATA)
            run.keep_data(card.data)


class Arrival(Role):
    """The role of a session until its peer is let in."""

    def __init__(self, session, admission):
        super().__init__(session)
        self.admission = admission
        self.host = greeting.Host(admission.access.secret)

    def handle(self, opcode, payload):
        session = self.session
        if session.version == V1:
            self.admission.let_in_version_1(session)
            session.role.handle(opcode, payload)
            return
        if answer := self.host.handle(opcode, payload):
            session.reply(*answer)
        if self.host.card:
            self.admission.let_in(session, self.host)

    def check(self, now):
        if now - self.session.born > auth.HANDSHAKE_SECONDS:
            self.session.refuse(f"said nothing useful for {auth.HANDSHAKE_SECONDS:g} s")


class StatusReader(Role):
    """The role of a session whose peer has asked for the status and got it."""

    def __init__(self, session, idle_seconds):
        super().__init__(session)
        self.idle_seconds = idle_seconds

    def handle(self, opcode, payload):
        raise wire.FrameError("a status was asked for, and nothing else is answered")

    def check(self, now):
        if now - self.session.heard > self.idle_seconds:
            self.session.refuse(f"said nothing for {self.idle_seconds:g} s")
