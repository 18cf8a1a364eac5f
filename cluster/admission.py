"""Who comes in: limits on connections, bans, and the checks that a peer passes before it may take part."""

import collections
import contextlib
import errno
import hashlib
import os
import time
from typing import NamedTuple

from cluster import auth, greeting, history, status, wire
from cluster.console import one_line
from cluster.hub import Crowd, NetError, reason
from cluster.session import Role, Session
from cluster.wire import BANNED, FULL, OTHER_CONFIG, OTHER_DATA, Refused, V1, V2

BACKLOG = 1024                                 # connections that the system holds until they are accepted
ARRIVALS = 256                                 # connections at a time that have proved nothing yet
REASONS_LOGGED, ADDRESSES_LOGGED = 32, 256     # refusals of an address that are logged, and addresses
BANNED_FILE = "banned.txt"                     # in the save directory: identity, tab, reason
MOST_BANNED = 1 << 26                          # bytes of that file
NO_VERSION_1 = "protocol 1 cannot prove a secret: this coordinator has a secret or TLS and needs protocol 2"
NO_SNAPSHOTS = "an island needs workers of protocol 2: protocol 1 has no snapshots"


class Author(NamedTuple):
    """Who is responsible for results. key: the `id` of a greeting.Card; certificate: its SHA-256 (hex), or ""."""
    host: str
    key: str
    name: str
    certificate: str = ""
    named: bool = True         # False for a peer of version 1: a ban would keep out all of its host, and ends it only

    @property
    def identity(self):
        """What a ban names: the certificate if the coordinator requires one (it cannot be forged), else name, address
        and, unless the worker is an old one, its user on that machine: nobody else there can get it banned."""
        if self.certificate:
            return f"certificate {self.certificate}"
        user, dot, _ = self.key.partition(".")
        mark = f" ({hashlib.sha256(user.encode()).hexdigest()[:16]})" if dot else ""
        return f"{self.name} at {self.host}{mark}"

    @property
    def voter(self):
        """What has one vote (cluster.trust): the certificate, or else the host."""
        return self.certificate or self.host


class Door:
    """Counts the connections of callers, and logs who is refused, each reason once. arrivals: those that have proved
    nothing yet; they count by themselves, so that they keep no worker out."""

    def __init__(self, total, per_address, events):
        self.arrivals = Crowd(min(ARRIVALS, total // 4))
        self.total, self.per_address, self.events = total - self.arrivals.most, per_address, events
        self.by_host = collections.Counter()   # connections that were let in
        self._logged = {}                      # host -> reasons

    def let_in(self, session):
        """An arrival has proved who it is. Raises Refused where there can be no more."""
        if self.by_host.total() >= self.total:
            raise Refused(f"{self.total} connections are open, as many as can be", FULL)
        if self.by_host[session.host] >= self.per_address:
            raise Refused(f"{self.per_address} connections from one address are open, as many as may be "
                          "(CONNECTIONS_PER_ADDRESS)", FULL)
        self.arrivals.discard(session)
        self.by_host[session.host] += 1
        session.become_known()

    def leave(self, session):
        if not self.arrivals.discard(session):
            self.by_host -= {session.host: 1}        # which forgets a host without connections

    def report(self, host, title, why):
        """Logs a refusal if it is new: a peer that tries again and again must not fill the log. `why` may quote it."""
        why = one_line(why)
        if host not in self._logged and len(self._logged) >= ADDRESSES_LOGGED:
            return
        logged = self._logged.setdefault(host, set())
        if why not in logged and len(logged) < REASONS_LOGGED:
            logged.add(why)
            self.events.about(host, "refused", f"refused {title}: {why}", address=title, reason=why)


class Bans:
    """Who may not come back, and why: a line each in BANNED_FILE of `directory`, which is read whenever a peer comes
    in. A ban that cannot be written lasts as long as this object."""

    def __init__(self, directory=None):
        self.path = os.path.join(directory, BANNED_FILE) if directory is not None else None
        self._unwritten = {}

    def add(self, identity, reason):
        """identity, reason: one line each."""
        try:
            if self.path is None:
                raise OSError
            with open(os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, 0o644),
                      "a", encoding="utf-8") as file:
                file.write(f"{identity}\t{reason}\n")
                file.flush()
                os.fsync(file.fileno())
        except OSError:
            self._unwritten[identity] = reason

    def all(self):
        """{identity: reason}."""
        bans = dict(self._unwritten)
        if self.path is not None:
            with contextlib.suppress(OSError):
                text = history.read_file(self.path, MOST_BANNED).decode("utf-8", "replace")
                bans.update(line.split("\t", 1) for line in text.split("\n") if "\t" in line)
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
        auth.stretched(access.secret)                # takes a while, once
        self.limits = wire.limits(self.cfg)
        self.door = Door(most, self.cfg.CONNECTIONS_PER_ADDRESS, coordinator.events)
        self.bans = Bans(coordinator.run.directory)
        self._status_made, self._status_until = b"", 0.0

    def listen(self, host, port):
        """The (host, port) that is listened on. Raises NetError."""
        try:
            return self.coordinator.hub.listen(host, port, self.accept, self.door.arrivals.room, BACKLOG)
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise NetError(f"port {port} is in use: stop the coordinator that is there, or choose another with "
                               "--port") from None
            raise NetError(f"cannot listen on {host} port {port}: {reason(error)}: choose others with --host and "
                           "--port") from None

    def accept(self, sock, address):
        """See hub.Hub.listen."""
        session = Session(self.coordinator.hub, sock, address, self.coordinator.progress.traffic, self.door,
                          wire.only(self.limits, wire.FROM_ARRIVAL), self.access.tls)
        self.door.arrivals.add(session)
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
        author = Author(session.host, session.title, "a version 1 peer", named=False)
        if why := self.bans.message(author):
            raise Refused(why)
        self.door.let_in(session)
        session.limits = wire.only(self.limits, wire.FROM_WORKER[V1])
        self.coordinator.worker_joined(session, author, "")

    def let_in(self, session, host):
        """The peer of a finished greeting.Host. Raises Refused."""
        card, author = host.card, self.author(session, host.card)
        if card.role == "worker":
            self._check_worker(card, author)
        elif card.role == "island":
            self.coordinator.island.admit_peer(card, author)
        self.door.let_in(session)
        session.limits = wire.only(self.limits, wire.FROM_WORKER[V2])
        if card.role == "worker":
            session.title = f"{author.name} ({session.title}, {card.device})"
            self.coordinator.worker_joined(session, author, card.device, card.data)
        session.reply(*host.welcome(self.coordinator.welcome()))
        if card.role == "status":
            session.reply(wire.STATUS, self._status())
        elif card.role == "island" and session.open:
            self.coordinator.island.peer_joined(session, card, author)

    def _status(self):
        """The payload of STATUS, which is used again for so long that making it takes a tenth of the time at most."""
        if time.monotonic() >= self._status_until:
            began = time.monotonic()
            self._status_made = status.pack_status(self.coordinator.status())
            now = time.monotonic()
            self._status_until = now + 10 * (now - began)
        return self._status_made

    def _check_worker(self, card, author):
        if why := self.bans.message(author):
            raise Refused(why, BANNED)
        sides = "at the coordinator", "at the worker"
        if differ := history.difference(history.kept(self.cfg), card.config, sides):
            raise Refused(f"another configuration: {differ}", OTHER_CONFIG)
        if any(card.data):
            self._check_data(author, card.data)

    def _check_data(self, author, digest):
        """The digest of the data of a worker that comes in. Raises Refused if most have others, and refuses others."""
        run, trust = self.coordinator.run, self.coordinator.trust
        why = ("other training data than most workers of this run have: give every worker the same INPUT_FILE; to go "
               f"on with other data, remove {history.DATA_FILE} from the save directory")
        run.keep_data(trust.data_of_most(digest, author, run.data))
        for worker in [w for w in self.coordinator.dispatcher.workers if any(w.data) and w.data != run.data]:
            worker.session.refuse(why, OTHER_DATA)
        if digest != run.data:
            raise Refused(why, OTHER_DATA)


class Arrival(Role):
    """The role of a session until its peer is let in, and after that of one that reads the status, once."""

    def __init__(self, session, admission):
        super().__init__(session)
        self.admission = admission
        self.host = greeting.Host(admission.access.secret)

    def handle(self, opcode, payload):
        session = self.session
        if self.host.card:
            raise wire.FrameError("a status was asked for, and nothing else is answered")
        if session.version == V1:
            self.admission.let_in_version_1(session)
            return session.role.handle(opcode, payload)
        if answer := self.host.handle(opcode, payload):
            session.reply(*answer)
        if self.host.card:
            self.admission.let_in(session, self.host)
        return True

    def check(self, now):
        idle = self.admission.cfg.IDLE_TIMEOUT
        if not self.session.known and now - self.session.born > auth.HANDSHAKE_SECONDS:
            self.session.refuse(f"did not complete the introduction within {auth.HANDSHAKE_SECONDS:g} s")
        elif self.session.known and now - self.session.heard > idle:
            self.session.refuse(f"said nothing for {idle:g} s")

    def closed(self):
        if self.host.proved and not self.session.known:
            self.admission.door.report(self.session.host, self.session.title, "it does not believe our proof: has it "
                                       "another secret?")


