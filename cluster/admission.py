"""Who comes in: connections that speak frames (cluster.wire), limits, bans, and the checks that a peer passes before it
may take part. What the frames mean is up to the role of a session: that of a greeting (Arrival) until the peer is let
in, and then worker (egg_net.RemoteWorker) or reader of the status."""

import contextlib
import errno
import functools
import json
import os
import time

import egg_config
from cluster import auth, history, hub, snapshots, wire
from cluster.console import one_line
from cluster.hub import NetError, Newest, reason
from cluster.step import Author
from cluster.wire import BAD_FRAME, BANNED, FULL, OTHER_CONFIG, OTHER_DATA, FrameError, Refused, V1, V2

FRAME_SECONDS = 30.0       # the longest time for a frame that has begun, and for reading an answer
BACKLOG = 1024                                 # connections that the system holds until they are accepted
ARRIVALS = 256                                 # connections at a time that have proved nothing yet
REFUSALS, REFUSED_SECONDS = 1024, 600.0        # that are remembered, and not logged again meanwhile
ERRORS = 3                                     # wrong results and states of a worker, after which it is banned
BANNED_FILE = "banned.txt"                     # in the save directory: a name a line, perhaps a tab and the reason
MOST_BANNED = 1 << 20                          # bytes of that file


class Role:
    """What a peer is to this process. handle(opcode, payload) takes a frame, or raises."""

    waiting = False            # its request is held

    def __init__(self, session):
        self.session = session

    # check: deadlines, several times a second. closed: the connection has ended
    check = closed = hub.nothing


class Session(hub.Connection):
    """admission: the admission.Admission that reports its refusal; frames: see `take`; others: see hub.Connection."""

    role = None
    version = None             # that of its last frame, V1 or V2
    idle = None                # seconds for which it may be silent, None for ever
    frame_since = None         # since when it has begun a frame that is not complete
    receiving = 0.0            # seconds for which frames were on their way

    def __init__(self, admission, sock, address, frames, tls=None):
        self.admission = admission
        self.take(frames)
        super().__init__(admission.coordinator.hub, sock, address, admission.coordinator.progress.traffic, tls)
        self.title = self.address          # with its name, once that is known

    def take(self, frames):
        """From now on takes these frames, {version: opcodes}; others are ignored."""
        self.limits = wire.only(self.admission.limits, frames)

    def received(self):
        while self.open and not self.outbox and (frame := wire.next_frame(self.inbox, self.limits)):
            if self.frame_since:
                self.receiving += time.monotonic() - self.frame_since
            self.frame_since = None
            self.version = frame.version
            self.role.handle(frame.opcode, frame.payload)
        self.frame_since = (self.frame_since or time.monotonic()) if self.inbox else None

    def reply(self, opcode, *fields):
        self.send(*wire.pieces(opcode, *fields, version=self.version))

    def refuse(self, why, code=BAD_FRAME):
        """Closes the connection with a line in the log, and with an ERROR if the peer understands that."""
        if self.open:
            self.admission.report(self.title, why)
            if self.version == V2 and not self.outbox:
                text = why.encode("utf-8", "replace")[:wire.ERROR.most]           # `why` may quote the peer
                with contextlib.suppress(OSError):
                    self.sock.send(wire.frame(wire.ERROR, code, text, version=V2))
            self.close()

    failed = refuse

    def broken(self, error):
        place = "" if isinstance(error, FrameError) else f"what it sent cannot be handled: {type(error).__name__}: "
        self.refuse(f"{place}{error}", getattr(error, "code", BAD_FRAME))

    def check(self, now):
        self.role.check(now)
        if self.idle and now - self.heard > self.idle and not (self.version == V1 and self.role.waiting):
            self.refuse(f"said nothing for {self.idle:g} s")
        if self.frame_since and now - self.frame_since > FRAME_SECONDS:
            self.refuse("stopped in the middle of a frame")

    def closed(self):
        self.admission.leave(self)
        if self.role:
            self.role.closed()


class Bans:
    """Who may not come back, and why: a line each in BANNED_FILE of `directory`, which is read whenever somebody
    arrives. A ban that cannot be written lasts as long as this object. errors: {name: (wrong results and states, step
    of the last one)}; warn: takes a line, once, where the file cannot be read."""

    def __init__(self, directory=None, warn=hub.nothing):
        self.path = directory and os.path.join(directory, BANNED_FILE)
        self._warn = functools.cache(warn)
        self.errors = Newest(REFUSALS)
        self._unwritten = Newest(REFUSALS)

    def add(self, name, why):
        line = f"{name}\t{why}\n".encode("utf-8", "replace")
        try:
            if not self.path:
                raise OSError
            with history.open_file(self.path, "ab") as file:
                if os.fstat(file.fileno()).st_size + len(line) > MOST_BANNED:
                    raise OSError
                file.write(line)
                os.fsync(file.fileno())
        except OSError:
            self._unwritten[name] = why

    def all(self):
        """{name: why}; without those of a file that cannot be read."""
        try:
            return self._read()
        except OSError as error:
            self._warn(f"{self.path}: {error.strerror}: nobody is let in until it can be read")
            return dict(self._unwritten)

    def _read(self):
        text = ""
        if self.path and os.path.lexists(self.path):
            text = history.read_file(self.path, MOST_BANNED).decode("utf-8", "replace")
        lines = (line.partition("\t") for line in text.split("\n"))
        return {**self._unwritten, **{name: why or "by hand" for name, _, why in lines if name}}

    def message(self, name):
        """Why this worker may not take part, None where it may. Raises Refused while nobody can know."""
        try:
            why = self._read().get(name)
        except OSError as error:
            raise Refused(f"nobody is let in while {self.path} cannot be read: {error.strerror}", FULL) from None
        lift = f"remove its line from {self.path}" if self.path else "start the coordinator again"
        return why and f"banned: {why}; to let {name} in again, {lift}"


class Admission:
    """Accepts the connections of a coordinator (egg_net.Coordinator), lets peers in, and logs who is refused. most:
    connections at a time; arrivals: those that have proved nothing yet, the newest of them, so that they keep no worker
    out."""

    def __init__(self, coordinator, access, most):
        self.coordinator = coordinator
        self.cfg = coordinator.cfg
        self.access = access
        auth.stretched(access.secret)                # takes a while, once
        self.limits = wire.limits(self.cfg)
        self.bans = Bans(coordinator.run.directory, coordinator.events.warn)
        self._same = Newest(REFUSALS)                # {name: digest} of what the first worker had, see auth.Card
        self.arrivals = {}                           # {session: True}, the oldest first
        self._most_arrivals = min(ARRIVALS, most // 4)
        self.most = most - self._most_arrivals
        self._refused = Newest(REFUSALS)             # (address, reason): when it was logged

    @functools.cached_property
    def config_digest(self):
        """Older workers compare it with theirs, of what differs from an egg_config.py that nobody has edited."""
        shipped = egg_config.make(**egg_config.SHIPPED).saved()
        return snapshots.config_digest({name: value for name, value in self.cfg.saved().items()
                                        if value != shipped.get(name)})

    def listen(self, host, port):
        """The (host, port) that is listened on. Raises NetError."""
        try:
            return self.coordinator.hub.listen(host, port, self.accept, BACKLOG)
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise NetError(f"port {port} is in use: stop that coordinator, or choose another --port") from None
            raise NetError(f"cannot listen on {host} port {port}: {reason(error)}: change --host or --port") from None

    def accept(self, sock, address):
        if len(self.arrivals) >= self._most_arrivals:
            next(iter(self.arrivals)).close()
        session = Session(self, sock, address, wire.FROM_ARRIVAL, self.access.tls)
        self.arrivals[session] = True
        session.role = Arrival(session)

    def leave(self, session):
        self.arrivals.pop(session, None)

    def report(self, title, why):
        """Logs a refusal if it is new: a peer that tries again and again must not fill the log. `why` may quote it."""
        why, now = one_line(why), time.monotonic()
        key = title.rpartition(":")[0], why          # each attempt has another port
        if now - self._refused.get(key, -REFUSED_SECONDS) >= REFUSED_SECONDS and self.coordinator.events.allows():
            self._refused[key] = now
            self.coordinator.events.emit("refused", f"refused {title}: {why}", address=title, reason=why)

    def let_in_version_1(self, session):
        if (not self.coordinator.island.takes_version_1 or self.cfg.PERTURB == "units" or self.access.secret
                or self.access.tls):
            raise Refused("protocol 1 has no secret, TLS, islands and unit trials: a worker of protocol 2 is "
                          "needed")
        self._enter(session, V1)
        self.coordinator.worker_joined(session, Author("a version 1 peer", session.title), auth.UNKNOWN)

    def let_in(self, session, card, key, proof):
        """The peer of a finished introduction, see auth.host. Raises Refused."""
        coordinator = self.coordinator
        if card.role == "worker":
            self._check_worker(card)
        elif card.role == "island":
            coordinator.island.admit_peer(card)
        self._enter(session, V2)
        if card.role == "worker":
            session.title = f"{card.name} ({session.title}, {card.device})"
            coordinator.worker_joined(session, Author(card.name, key or card.id), card)
        run = coordinator.run
        session.reply(wire.WELCOME, proof, self.config_digest, run.data, run.step, coordinator.shelf.newest)
        if card.role != "worker":
            session.reply(wire.STATUS, json.dumps(coordinator.status()).encode())

    def _enter(self, session, version):
        if len(self.coordinator.hub.connections) - len(self.arrivals) >= self.most:
            raise Refused(f"{self.most} connections are open, as many as can be", FULL)
        self.arrivals.pop(session, None)
        session.take({version: wire.FROM_WORKER[version]})
        session.idle = self.cfg.IDLE_TIMEOUT

    def _check_worker(self, card):
        if why := self.bans.message(card.name):
            raise Refused(why, BANNED)
        if differ := history.difference(self.cfg.saved(), card.config, ("at the coordinator", "at the worker")):
            raise Refused(f"another configuration: {differ}: give both the same egg, egg_config.py, --preset, -D "
                          "and --objective", OTHER_CONFIG)
        run = self.coordinator.run
        if any(card.data):
            if any(run.data) and card.data != run.data:
                raise Refused("other training data than this run has: give every worker the same INPUT_FILE; to go on "
                              f"with other data, remove {history.DATA_FILE} from the save directory", OTHER_DATA)
            run.keep("data", card.data)
        same = {**card.same, **({"held-out data": card.validation} if any(card.validation) else {})}
        if differ := [name for name, digest in same.items() if self._same.get(name, digest) != digest]:
            raise Refused(f"other {' and '.join(differ[:3])} than the first worker had: give every worker the same; to "
                          "go on with others, start the coordinator again", OTHER_DATA)
        for name, digest in same.items():
            self._same[name] = digest
        if any(card.validation) and run.keep("held_out", card.validation):
            self.coordinator.events.warn("validations read another text than before (VAL_FILE, VALIDATE_TOKENS): their "
                                         "figures are not compared with earlier ones")
            self.coordinator.shelf.forget_figures()


class Arrival(Role):
    """The role of a session until its peer is let in, and after that of one that reads the status, once, or of an
    island, which may fetch a snapshot as well. card: its auth.Card, once it is proved."""

    card = proved = None

    def __init__(self, session):
        super().__init__(session)
        self._host = auth.host(session.admission.access.secret)
        next(self._host)

    def handle(self, opcode, payload):
        session, admission = self.session, self.session.admission
        if self.card:
            if self.card.role == "status":
                raise FrameError("a status was asked for, and nothing else is answered")
            if opcode == wire.SNAPSHOT_REQUEST:
                admission.coordinator.collector.give(session, payload)
        elif session.version == V1:
            admission.let_in_version_1(session)
            session.role.handle(opcode, payload)
        else:
            try:
                answer = self._host.send((opcode, payload))
                self.proved = answer[0] == wire.PROVED
                session.reply(*answer)
            except StopIteration as end:
                self.card, key, proof = end.value
                admission.let_in(session, self.card, key, proof)

    def check(self, now):
        if not self.card and now - self.session.born > auth.HANDSHAKE_SECONDS:
            self.session.refuse(f"did not complete the introduction within {auth.HANDSHAKE_SECONDS:g} s")
        elif now - self.session.heard > auth.HANDSHAKE_SECONDS + FRAME_SECONDS:
            self.session.close()                     # it has not read its answer

    def closed(self):
        if self.proved and not self.card:
            self.session.admission.report(self.session.title, "it does not believe our proof: has it another secret?")
