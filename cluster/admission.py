"""Who comes in: limits on connections, bans, and the checks that a peer passes before it may take part."""

import collections
import errno
import functools
import hashlib
import os
import time

import egg_config
from cluster import auth, greeting, history, snapshots, status, wire
from cluster.console import one_line
from cluster.hub import NetError, Newest, Unproven, VERSIONS, reason, split_address
from cluster.session import FRAME_SECONDS, Role, Session
from cluster.trust import of_most
from cluster.wire import BANNED, FULL, OTHER_CONFIG, OTHER_DATA, Refused, V1, V2

BACKLOG = 1024                                 # connections that the system holds until they are accepted
ARRIVALS = 256                                 # connections at a time that have proved nothing yet
REASONS_LOGGED, HOSTS_LOGGED = 32, 256         # refusals of a host that are logged, and hosts that are remembered
REFUSED_SECONDS = 600.0                        # after which a refusal is news again
BANNED_FILE = "banned.txt"                     # in the save directory: identity, tab, reason
MOST_BANNED, MOST_WRITTEN = 1 << 26, 1 << 20   # bytes of that file that are read; up to which lines are added
BANS_OF_HOST, MOST_UNWRITTEN = 64, 4096        # lines of a host in it; bans that are not in it


class Author(collections.namedtuple("Author", "host key name certificate named former", defaults=["", True, ""])):
    """Who is responsible for results. host: see hub.host_of; key: the `id` of a greeting.Card; certificate: the SHA-256
    of its public key (hex), or ""; named: False for a peer of version 1: a ban would keep out all of its host, and ends
    it only; former: what a ban by an older version names, with a hash of the whole certificate, or the whole of an IPv6
    address."""

    @property
    def identity(self):
        """What a ban names: the certificate if there is one (it cannot be forged), else name, address and, unless the
        worker is an old one, its user on that machine: nobody else there can get it banned."""
        if self.certificate:
            return f"certificate {self.certificate}"
        user, dot, _ = self.key.partition(".")
        mark = f" ({hashlib.sha256(user.encode()).hexdigest()[:16]})" if dot else ""
        return f"{self.name} at {self.host}{mark}"

    @property
    def voter(self):
        """What has one vote (cluster.trust): the certificate, or else the host."""
        return self.certificate or self.host


class Bans:
    """Who may not come back, and why: a line each in BANNED_FILE of `directory`, which is read again when it has
    changed. A ban that cannot be written, or that is one too many of its host, lasts as long as this object; of these
    the newest are kept. unreadable: why the file cannot be read, None where it can."""

    unreadable = None
    _seen = None               # what identifies the content of the file
    _torn = False              # its last line has no end

    def __init__(self, directory=None):
        self.path = directory and os.path.join(directory, BANNED_FILE)
        self._written = {}
        self._unwritten = Newest(MOST_UNWRITTEN)
        self._of_host = collections.Counter()

    def add(self, identity, reason):
        self._read()
        if identity in self._written or identity in self._unwritten:
            return
        line = ("\n" * self._torn + f"{identity}\t{reason}\n").encode("utf-8", "replace")
        try:
            if (not self.path or self._of_host[_host_of(identity)] >= BANS_OF_HOST
                    or len(line) + (self._seen or (0,))[0] > MOST_WRITTEN):
                raise OSError
            with history.open_file(self.path, "ab") as file:
                if file.write(line) < len(line):
                    raise OSError
                os.fsync(file.fileno())
        except OSError:
            self._unwritten[identity] = reason

    def all(self):
        self._read()
        return {**self._unwritten, **self._written}

    def _read(self):
        if not self.path:
            return
        try:
            found = os.lstat(self.path) if os.path.lexists(self.path) else None
            seen = found and (found.st_size, found.st_mtime_ns, found.st_ino)
            if seen != self._seen:
                text = history.read_file(self.path, MOST_BANNED).decode("utf-8", "replace") if found else ""
                self._written = dict(line.split("\t", 1) for line in text.split("\n") if "\t" in line)
                counted = self._written if len(text) <= MOST_WRITTEN else ()         # else none is added
                self._of_host = collections.Counter(map(_host_of, counted))
                self._seen = seen
                self._torn = text[-1:] not in ("", "\n")
            self.unreadable = None
        except OSError as error:
            self.unreadable = error.strerror

    def message(self, author):
        """Why this author may not take part, None where it may."""
        self._read()
        lift = f"remove its line from {self.path}" if self.path else "start the coordinator again"
        for name in author.identity, author.former:
            if why := self._written.get(name) or self._unwritten.get(name):
                return f"banned: {why}; to let {name} in again, {lift}"

    def check(self, author):
        """Raises Refused for a banned author, and for everybody while nobody can know who is banned."""
        if why := self.message(author):
            raise Refused(why, BANNED)
        if self.unreadable:
            raise Refused(f"nobody is let in while {self.path} cannot be read: {self.unreadable}", FULL)


def _host_of(identity):
    """The host in an Author.identity; a certificate stands for itself."""
    return identity.rpartition(" at ")[2].partition(" (")[0]


class Admission:
    """Accepts the connections of a coordinator (egg_net.Coordinator), lets peers in, and logs who is refused. most:
    connections at a time; arrivals: those that have proved nothing yet, which count by themselves, so that they keep no
    worker out; by_host: the number of those that were let in."""

    validation = bytes(32)     # digest of the held-out data, zeros while unknown
    _status_until = 0.0        # the last of `_statuses` is good

    def __init__(self, coordinator, access, most):
        self.coordinator = coordinator
        self.cfg = coordinator.cfg
        self.access = access
        auth.stretched(access.secret)                # takes a while, once
        self.limits = wire.limits(self.cfg)
        self.bans = Bans(coordinator.run.directory)
        self.arrivals = Unproven(min(ARRIVALS, most // 4))
        self.by_host = collections.Counter()
        self.most = most - self.arrivals.most
        self._refused = Newest(HOSTS_LOGGED)         # host -> (since when, reasons that are logged)
        self._statuses = []

    @functools.cached_property
    def config_digest(self):
        return snapshots.config_digest(self.cfg)

    def listen(self, host, port):
        """The (host, port) that is listened on. Raises NetError."""
        try:
            return self.coordinator.hub.listen(host, port, self.accept, self.arrivals.room, BACKLOG)
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise NetError(f"port {port} is in use: stop that coordinator, or choose another --port") from None
            raise NetError(f"cannot listen on {host} port {port}: {reason(error)}: change --host or --port") from None

    def accept(self, sock, address):
        session = Session(self, sock, address, wire.FROM_ARRIVAL, self.access.tls)
        self.arrivals[session] = True
        session.role = Arrival(session)

    def leave(self, session):
        if not self.arrivals.pop(session, False):
            self.by_host -= {session.host: 1}        # which forgets a host without connections

    def report(self, host, title, why):
        """Logs a refusal if it is new: a peer that tries again and again must not fill the log. `why` may quote it.
        What is logged is forgotten in time, and for newer hosts: nobody can keep the refusals of others silent."""
        why, now = one_line(why), time.monotonic()
        if host not in self._refused or now - self._refused[host][0] > REFUSED_SECONDS:
            self._refused[host] = now, set()
        _, logged = self._refused[host]
        if why not in logged and len(logged) < REASONS_LOGGED and self.coordinator.events.allows(host):
            logged.add(why)
            self.coordinator.events.emit("refused", f"refused {title}: {why}", address=title, reason=why)

    def author(self, session, card):
        shown = session.certificate
        if shown and card.role == "worker" and auth.may_sign(shown):
            raise Refused("its certificate may sign others (CA:TRUE), and each of these would have a vote: make one "
                          "with `openssl req -x509 -addext basicConstraints=critical,CA:FALSE ...`", wire.NO_ACCESS)
        key, whole = (hashlib.sha256(part(shown)).hexdigest() if shown else "" for part in (auth.public_key, bytes))
        former = Author(split_address(session.address)[0], card.id, card.name, whole).identity
        return Author(session.host, card.id, card.name, key, former=former)

    def let_in_version_1(self, session):
        what = ("an island" if not self.coordinator.island.takes_version_1 else
                "noise on activations (PERTURB)" if self.cfg.PERTURB == "activations" else "")
        if what:
            raise Refused(f"{what} needs workers of protocol 2: protocol 1 has no snapshots")
        if self.access.secret or self.access.tls:
            raise Refused("protocol 1 cannot prove a secret: this coordinator has a secret or TLS and needs protocol 2")
        author = Author(session.host, session.title, "a version 1 peer", named=False)
        self.bans.check(author)
        self._enter(session, V1)
        self.coordinator.worker_joined(session, author, greeting.UNKNOWN)

    def let_in(self, session, host):
        """The peer of a finished greeting.Host. Raises Refused."""
        coordinator, card, author = self.coordinator, host.card, self.author(session, host.card)
        if card.role == "worker":
            self._check_worker(card, author)
        elif card.role == "island":
            coordinator.island.admit_peer(card, author)
        self._enter(session, V2)
        if card.role == "worker":
            session.title = f"{author.name} ({session.title}, {card.device})"
            coordinator.worker_joined(session, author, card)
        run = coordinator.run
        session.reply(*host.welcome(self.config_digest, run.data, run.step, coordinator.shelf.newest))
        if card.role == "status":
            session.send(self._status())
        elif card.role == "island" and session.open:
            coordinator.island.peer_joined(session, author)

    def _enter(self, session, version):
        if self.by_host.total() >= self.most:
            raise Refused(f"{self.most} connections are open, as many as can be", FULL)
        if self.by_host[session.host] >= (most := self.cfg.CONNECTIONS_PER_ADDRESS):
            raise Refused(f"{most} connections from one address are open, the most (CONNECTIONS_PER_ADDRESS)", FULL)
        self.arrivals.pop(session, None)
        self.by_host[session.host] += 1
        session.take({version: wire.FROM_WORKER[version]})
        session.idle = self.cfg.IDLE_TIMEOUT
        session.become_known()

    def _status(self):
        """The frame with the status. It is cached for ten times as long as it took to make, and for longer while too
        many older ones are not read."""
        if (began := time.monotonic()) >= self._status_until:
            self._statuses = self.coordinator.hub.on_the_way(self._statuses)
            if len(self._statuses) < VERSIONS:
                self._statuses.append(wire.frame(wire.STATUS, status.pack_status(self.coordinator.status()),
                                                 version=V2))
            self._status_until = began + 10 * (time.monotonic() - began)
        return self._statuses[-1]

    def _check_worker(self, card, author):
        self.bans.check(author)
        if differ := other_constants(self.cfg.agreed(), card.config):
            raise Refused(f"another configuration: {differ}", OTHER_CONFIG)
        run = self.coordinator.run
        trust = self.coordinator.trust
        if any(card.data):
            run.keep_data(of_most(trust.data, card.data, author, run.data))
            self._need_same("data", card, run.data, "other training data than most workers of this run have: give "
                            "every worker the same INPUT_FILE; to go on with other data, remove "
                            f"{history.DATA_FILE} from the save directory")
        if any(card.validation):
            self.validation = of_most(trust.validation, card.validation, author, self.validation)
            self._need_same("validation", card, self.validation, "other held-out data than most workers of this run "
                            "have: give every worker the same VAL_FILE, or this one -D VALIDATE_EVERY=0; to go on "
                            "with another file, start the coordinator again")

    def _need_same(self, name, card, digest, why):
        """Refuses all workers, and the one with this card, that have stated other data. name: of their field."""
        for worker in list(self.coordinator.dispatcher.workers):
            if any(stated := getattr(worker.card, name)) and stated != digest:
                worker.session.refuse(why, OTHER_DATA)
        if getattr(card, name) != digest:
            raise Refused(why, OTHER_DATA)


def other_constants(ours, theirs):
    """How the constants of a worker differ from those of the coordinator (see Config.agreed), in words; "" if they do
    not. A forgotten preset, or another objective, is named instead of its many constants."""
    objectives = [constants.get("OBJECTIVE", "") for constants in (ours, theirs)]
    if objectives[0] != objectives[1]:
        return ("the coordinator has another file of --objective: give both the same one" if all(objectives)
                else "the coordinator has an objective: give the worker --objective FILE too" if objectives[0]
                else "the coordinator has no objective: leave --objective out, or give it to the coordinator too")
    many = len(history.differing(ours, theirs)) > history.NAMED
    for constants, side, other in (ours, "coordinator", "worker"), (theirs, "worker", "coordinator"):
        if many and (preset := egg_config.preset_of(constants)):
            return f"the {side}'s constants are those of --preset {preset}: give it to the {other} too"
    return history.difference(ours, theirs, ("at the coordinator", "at the worker"))


class Arrival(Role):
    """The role of a session until its peer is let in, and after that of one that reads the status, once."""

    def __init__(self, session):
        super().__init__(session)
        self.host = greeting.Host(session.admission.access.secret)

    def handle(self, opcode, payload):
        session = self.session
        if self.host.card:
            raise wire.FrameError("a status was asked for, and nothing else is answered")
        if session.version == V1:
            session.admission.let_in_version_1(session)
            return session.role.handle(opcode, payload)
        if answer := self.host.handle(opcode, payload):
            session.reply(*answer)
        if self.host.card:
            session.admission.let_in(session, self.host)
        return True

    def check(self, now):
        if not self.session.known and now - self.session.born > auth.HANDSHAKE_SECONDS:
            self.session.refuse(f"did not complete the introduction within {auth.HANDSHAKE_SECONDS:g} s")
        elif now - self.session.born > auth.HANDSHAKE_SECONDS + FRAME_SECONDS:
            self.session.close()                     # it has not read the status

    def closed(self):
        if self.host.proved and not self.host.card:
            self.session.admission.report(self.session.host, self.session.title,
                                          "it does not believe our proof: has it another secret?")


