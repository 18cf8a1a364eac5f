"""The trip of a fitness digit, from evaluation to the next update: the worker, and the coordinator.

Members of a population come in pairs; a pair's fitness is one ternary digit. (With unit trials, SPEC 21, a chunk is
some windows, and has one digit for every weight, of up to 15 values; a step has these, or their sums.) A worker holds a
replica of the model. It asks for a chunk of the population, evaluates it on its engine and sends the digits, some in a
byte. The coordinator gathers the chunks of a step, appends the step to the history and answers the next request of
every worker with the fitness of all pairs, from which the worker's engine makes the same update everywhere. A worker
that joins late takes a snapshot (cluster.snapshots) and replays the steps after it. The calls, in order; the frames are
in capitals, and cluster.wire lists their fields (docs/PROTOCOL.md explains them):

    worker        Worker.serve                      asks for work: JOB_REQUEST
    coordinator   Coordinator._answer               hands out a chunk: JOB_RESPONSE
    worker        Worker._evaluate                  engine.evaluate makes losses,
                  model.rules.chunk_fitness         these become digits,
                  model.steps.pack_digits           some digits a byte
                  Worker._result                    makes a RESULT of them,
                  cluster.link.Link.send            which leaves the worker with the next JOB_REQUEST
    coordinator   cluster.admission.Session.received takes frames out of what has come
                  RemoteWorker.handle
                  cluster.wire.read_result          checks the RESULT
                  Coordinator.take_result
                  cluster.dispatch.Dispatcher.take  books it,
                  cluster.step.Step.result          with its digits, and judges whether the chunk is done
                  Coordinator._complete_step        when all chunks are:
                  cluster.step.Step.fitness             the digits of all pairs, or sums
                  cluster.history.Run.append            go to the disk
                  Coordinator._answer               serves whoever asks next: a JOB_RESPONSE with these digits
    worker        Link.any_of                       takes it
                  Worker._apply                     checks it and hands it to engine.update

Each side is one process with one loop (cluster.hub at the coordinator, cluster.link at the worker). Only two tasks run
in threads of their own: an island's calls (islands.gossip) and a worker's soft targets (model.soft_targets). Which
worker is handed which chunk is up to cluster.dispatch."""

import contextlib
import functools
import json
import os
import random
import resource
import socket
import time

from cluster import auth, event_log, history, snapshots, status, wire
from cluster.admission import Admission, ERRORS, Role
from cluster.console import Console, printable, stop_signals
from cluster.dispatch import ACTIVE_SECONDS, AUDIT_PATIENCE, Dispatcher, chunks_text
from cluster.hub import Hub, NetError, address_text, nothing, reason
from cluster.link import Link, OldCoordinator, RunEnded, check_address
from cluster.status import Progress
from cluster.step import AGREES, Process, REBUILD, STATES_KEPT, States
from cluster.wire import FrameError, Refused, V1, V2
from egg_config import EggError
from model import steps

# worker; its methods import what needs NumPy, which a coordinator starts without

SLICE_SECONDS = 0.2        # the longest time that a worker should compute before it reads its socket
FIRST_SLICE = 64           # members or windows, before its speed is known
SURE_AFTER = 4             # chunks in order, or steps, after which a worker expects the next one
NO_CHUNK = -1              # in place of a chunk's first member, where there is no chunk
POLL_SECONDS = 0.1         # between requests to a C++ coordinator that has nothing to hand out
TABLES = "tables of exponentials, cosines and powers, which its NumPy and libm make,"
BACK_OFF = (0.1, 5.0)      # seconds between attempts to connect: the first, the longest


class Worker:
    """A replica of the model and what it needs to serve; see `run_worker`. validate_first: with the first chunk 0,
    whatever the step; objective: by which texts are judged, a tools.objective.Objective."""

    changed = 0                            # weights changed by the last update, until a result has reported it
    digest = None                          # of the present state, once it is asked for
    rebuilt = False                        # since the last chunk
    reported_step = -1                     # the last step that was validated and sampled
    speed, slice = 0.0, FIRST_SLICE        # members or windows a second, at a time
    chunks = answers = 0

    def __init__(self, cfg, engine, tokens, validation, decoding, console, validate_first=False, objective=None):
        self.cfg = cfg
        self.engine = engine
        self.console = console
        self.tokens = tokens
        self.validation = validation
        self.decoding = decoding
        self.validate_next = validate_first
        self.objective = objective
        self.predictor = ChunkPredictor(cfg)
        self.done = {}                       # {first member: packed digits} of the chunks of this step done here
        self.cooling = 0                     # of the step before, or as the coordinator has told (model.steps)
        self.begun = {}                      # {first member: members} of the chunk with which the engine has begun
        self.prepared = set()                # sizes of slices for which the engine is prepared

    def serve(self, link):
        """Asks for work and does it until the coordinator is gone (OSError)."""
        engine = self.engine
        result = b""
        answers = (wire.JOB_RESPONSE,)
        if link.version == V2:
            answers += wire.REBUILD, wire.SNAPSHOT_WANTED, wire.MEASURE, wire.COOLING
        while True:
            digest = b""
            if link.version == V2:
                digest = self.digest = self.digest or engine.digest()
            link.send(result + link.frame(wire.JOB_REQUEST, engine.seed, engine.step, 0, digest))
            result = b""
            # with work begun ahead the device is not idle
            while (frame := link.any_of(answers, idle=not self.begun)).opcode in (wire.SNAPSHOT_WANTED, wire.COOLING):
                if frame.opcode == wire.COOLING:
                    self.cooling, = frame.payload
                else:
                    self._send_state(link, link.unpack_step(frame.payload))
            self.answers += 1
            if frame.opcode == wire.MEASURE:
                self._report(link, True)
                continue
            if frame.opcode == wire.REBUILD:
                start = link.unpack_step(frame.payload)
                self.console.line(f"worker: at step {engine.step}, told to begin with the state of step {start}")
                if not (start and self._fetch_snapshot(link, start)):
                    self._load()
                continue
            seed, step, first, _, packed = link.unpack_response(frame.payload)
            if packed:
                self._apply(link, step, packed)
            elif first == wire.NOTHING:
                # a C++ coordinator may leave these fields empty: a seed of 0 is no information
                if step < engine.step and seed not in (0, engine.seed):
                    self._start_over(link, seed, step)
                else:
                    link.check(POLL_SECONDS)
            elif (seed, step) != (engine.seed, engine.step):
                self._start_over(link, seed, step)
            elif first % self.cfg.CHUNK_SIZE or first >= self.cfg.POPULATION_SIZE:
                raise NetError(f"{link.name}: it hands out member {first}, chunks here begin at multiples of "
                               f"{self.cfg.CHUNK_SIZE} below {self.cfg.POPULATION_SIZE}: set CHUNK_SIZE and "
                               "POPULATION_SIZE as there")
            else:
                result = self._result(link, first, *self._evaluate(link, first))

    def _evaluate(self, link, first):
        """(packed digits, loss) of the chunk that begins with member `first`."""
        import numpy as np
        from model import rules
        if first == 0 and self.engine.step != self.reported_step:
            self._report(link)
            self.reported_step = self.engine.step
        if self.objective:
            started = time.perf_counter()
            packed, loss = self.objective.chunk(self.engine, first, link.check)
            self.speed = self.cfg.CHUNK_SIZE / (time.perf_counter() - started)
            return packed, loss
        self.predictor.handed_out(self.engine.step, first)
        following = self.predictor.following()
        parts = []
        at = first
        end = first + self.cfg.CHUNK_SIZE
        while at < end:
            started = time.perf_counter()
            count = self.begun.pop(at, None) or self._slice_size(end - at)
            if at + count == end and following != NO_CHUNK:
                self.engine.begin(at, count)                 # before that of the next chunk
                self._begin(following)
            parts.append(self.engine.evaluate(at, count))
            sizes = {count, *self.begun.values()}
            if sizes <= self.prepared:
                self._measure(count, time.perf_counter() - started)
            self.prepared |= sizes           # the first evaluation of a size may last far longer than the next
            if (at := at + count) < end:
                link.check()
        if self.cfg.PERTURB == "units":
            return parts[0]
        losses = parts[0] if len(parts) == 1 else np.concatenate(parts)
        return steps.pack_digits(rules.chunk_fitness(losses, self.cfg)), int(losses.sum())

    def _result(self, link, first, packed, loss):
        """The RESULT frame of a chunk. When this worker has done all chunks of the step, it begins with the update by
        their digits; a disputed result makes it begin again."""
        self.done[first] = packed
        if len(self.done) == self.cfg.N_CHUNKS and self.engine.begin_update:
            # most steps are cooled as the one before; else the update is begun again
            chunks = [self.done[first] for first in sorted(self.done)]
            self._begin_update(steps.join_digits(self.cfg, chunks, self.cooling))
        result = link.frame(wire.RESULT, self.engine.seed, self.engine.step, first, self.changed, loss,
                            len(packed), packed)
        self.changed = 0
        self.rebuilt = False
        self.chunks += 1
        self.console.progress(f"step {self.engine.step}: {self.chunks} chunks done, "
                              f"{self.speed * self.cfg.LOCAL_STEPS * self.cfg.SEQ_LEN / 1e3:,.0f} k tokens/s")
        return result

    def _begin_update(self, fitness):
        """Begins with an update and with the chunk that is expected after it, if the engine can."""
        if self.engine.begin_update and self.engine.begin_update(fitness):
            first = self.predictor.first_after(self.engine.step)
            if first != NO_CHUNK:
                self._begin(first)

    def _begin(self, first):
        """Begins with the first slice of the chunk that begins with member `first`."""
        self.begun = {first: self._slice_size(self.cfg.CHUNK_SIZE)}
        self.engine.begin(first, self.begun[first])

    def _apply(self, link, step, packed):
        """Updates the replica by the fitness of its step, which leads to `step`."""
        if step != self.engine.step + 1:
            return self._start_over(link, None, step)

        try:
            if link.version == V2:
                packed = history.unzip(packed, self.cfg.STEP_BYTES)
            if len(packed) == self.cfg.STEP_BYTES:
                self._begin_update(packed)           # a GPU is at work while the bytes are checked
            steps.check_step(self.cfg, packed)
        except ValueError as error:
            raise NetError(f"{link.name}: the fitness of step {step - 1} cannot be right ({error}): "
                           "set POPULATION_SIZE as there") from None
        self.changed = self.engine.update(packed)
        self.cooling = packed[-1]
        self.digest = None
        self.done = {}

    def _slice_size(self, left):
        """An even number of members: a chunk, halved until that is expected to take SLICE_SECONDS at most, so that an
        engine has few sizes to prepare for. With unit trials the digits are of whole chunks."""
        size = self.cfg.CHUNK_SIZE
        while size > self.slice and self.cfg.PERTURB == "weights":
            size = size // 2 + 1 & ~1
        return min(left, size)

    def _measure(self, count, seconds):
        self.speed = count / max(seconds, 1e-9)
        # grows by steps: the first slices of a device say little about the speed of large ones
        self.slice = max(2, min(int(self.speed * SLICE_SECONDS), 8 * self.slice) & ~1)

    def _report(self, link, at_end=False):
        """Sends a validation and a sample where they are due; the worker of chunk 0 does, and one at the end."""
        cfg, step = self.cfg, self.engine.step
        if at_end or self.validate_next or due(cfg.VALIDATE_EVERY, step):
            self.validate_next = False
            if self.validation:
                nats, tokens = self.engine.validate(self.validation.windows)
                n_bytes = self.validation.n_bytes if self.validation.unit == "bits/byte" else 0
                link.say(wire.VALIDATION, step, tokens, n_bytes, nats)
            if self.objective:
                texts, mean, shown = self.objective.measured(self.engine)
                if mean is None:
                    link.log(f"reward at step {step}: none of {texts} texts is judged")
                else:
                    shown = json.dumps(shown, ensure_ascii=False).encode("utf-8", "replace")
                    link.say(wire.REWARD, step, texts, mean, shown)
        if (at_end and cfg.SAMPLE_EVERY or due(cfg.SAMPLE_EVERY, step)) and (self.objective or self.tokens is not None):
            text = sample(cfg, self.engine, self.tokens, self.decoding, self.objective)
            line = f"sample at step {step}: " + text.replace("\n", "\u23ce")                   # one line of the log
            link.log(line)

    def _load(self, state=None):
        """Goes on from a State, by default from the beginning."""
        from model import parameters
        self.engine.load(state or parameters.initial_state(self.cfg))
        self.changed = 0
        self.reported_step = -1
        self.digest = None
        self.done = {}

    def _start_over(self, link, seed, step):
        """This replica and the coordinator's run have parted: replay the run from its beginning, once."""
        if self.rebuilt:
            its = f"step {step}" if seed is None else f"step {step} with seed {seed}"
            raise NetError(f"{link.name}: its run does not fit this worker: it answers for {its}, here is step "
                           f"{self.engine.step} with seed {self.engine.seed}; is the configuration the same on both "
                           "sides, and does it still hold the history of the run?")
        self.rebuilt = True
        self.console.line(f"worker: at step {self.engine.step}, the coordinator at step {step}: rebuilding from the "
                          "beginning")
        self._load()

    def _fetch_snapshot(self, link, step):
        """Takes over the coordinator's snapshot of this step. Returns whether it was good; if not, replay the run."""
        try:
            state = snapshots.unpack(self.cfg, link.fetch_snapshot(step, snapshots.most_bytes(self.cfg)))
        except ValueError as error:
            self.console.line(f"worker: {error}; replaying the run instead")
            return False
        self._load(state)
        self.console.line(f"worker: at step {step} by a snapshot")
        return True

    def _send_state(self, link, step):
        if step != self.engine.step:
            raise NetError(f"{link.name}: it wants the state of step {step}, here is step {self.engine.step}")
        body = snapshots.pack(self.engine.state())
        for offset in range(0, len(body), wire.BLOCK):
            link.say(wire.SNAPSHOT_DATA, step, len(body), offset, body[offset:offset + wire.BLOCK])


class Sureness:
    """Whether guesses are to be relied on: after SURE_AFTER right ones in a row, and twice as many after a mistake."""

    def __init__(self):
        self._right, self._needed = 0, SURE_AFTER

    def __bool__(self):
        return self._right >= self._needed

    def count(self, right):
        self._needed *= 2 if self and not right else 1
        self._right = self._right + 1 if right else 0


class ChunkPredictor:
    """Predicts the chunk that a worker is handed next, with which its engine can begin before the answer. A step is
    expected to be like the one before: in its first chunk, and in what follows each chunk. A mistake costs a slice of
    evaluation. An audit, after which a worker is handed a chunk more, says nothing about the next step's first."""

    def __init__(self, cfg):
        self._cfg = cfg
        self._step = self._first = self._last = None         # that was handed out last, its first and its last chunk
        self._following = {}                                 # {chunk: the one after it in its step, NO_CHUNK: none}
        self._sure_of_first = Sureness()
        self._sure_of_following = Sureness()

    def handed_out(self, step, first):
        """A chunk was handed out in this step that begins with member `first`."""
        if self._step is not None:
            following = first if step == self._step else NO_CHUNK
            self._sure_of_following.count(following == self._guess())
            self._following[self._last] = following
        if step != self._step:
            self._sure_of_first.count(first == self._first)
            self._step = step
            self._first = first
        self._last = first

    def _guess(self):
        """What follows the last chunk; at first the next of the population."""
        following = self._last + self._cfg.CHUNK_SIZE
        return self._following.get(self._last, following if following < self._cfg.POPULATION_SIZE else NO_CHUNK)

    def following(self):
        """First member of the next chunk of this step; NO_CHUNK: none, or that is not certain enough."""
        return self._guess() if self._sure_of_following else NO_CHUNK

    def first_after(self, step):
        """First member of the first chunk after this step; NO_CHUNK: that is not certain enough, or nothing was handed
        out in this step."""
        return self._first if self._sure_of_first and step == self._step else NO_CHUNK


def due(every, step):
    """Whether a step has a sample or a validation: each multiple of `every`, and a few early ones, to show learning
    begin."""
    return every and (step % every == 0 or every >= 10 and step in (every // 10, every // 5, every // 2))


def sample(cfg, engine, tokens, decoding, objective=None):
    """str: a piece of the data and the model's continuation of it (SPEC 10), or with an objective its sample."""
    if objective:
        return objective.sample(engine, engine.step)
    import numpy as np
    from model import data_files
    at = engine.step * cfg.SEQ_LEN % (len(tokens) - cfg.SEQ_LEN)
    prompt = np.asarray(tokens[at:at + cfg.SAMPLE_PROMPT]).astype(np.int64)
    continuation = data_files.text(decoding, list(engine.generate(prompt, cfg.SAMPLE_TOKENS, engine.seed)))
    return f"{data_files.text(decoding, prompt)} >>> {continuation}"


def run_worker(cfg, host, port, engine, tokens=None, validation=None, decoding=None, *, retry=True, console=None,
               access=auth.Access(), name=None, **options):
    """Serves the coordinator at host:port with `engine`, through interruptions, to the planned end of the run; with
    retry=False until the coordinator closes. Returns the number of chunks done. The engine keeps the state it has come
    to. tokens: the training data, for samples; validation: a data_files.Validation or None; decoding: a
    data_files.Decoding or None; access: an auth.Access; without secret and TLS a coordinator that closes on protocol 2
    is called with protocol 1; name: in the coordinator's lines, default host and device; options: of Worker. Raises
    NetError where no coordinator can be, or one that does not fit or refuses this worker."""
    console = console or Console()
    check_address(host, port)
    from model import integer_tables
    worker = Worker(cfg, engine, tokens, validation, decoding, console, **options)
    card = {"role": "worker", "id": os.urandom(8).hex(),
            "name": name or f"{socket.gethostname()}/{engine.name}",
            "device": engine.name, "config": cfg.saved(), "data": snapshots.data_digest(tokens).hex(),
            "validation": snapshots.data_digest(validation and validation.windows).hex(),
            "same": {**getattr(worker.objective, "files", {}), TABLES: integer_tables.digest(cfg)}}
    version, pause = V2, BACK_OFF[0]
    connected = False
    logged = set()                           # since the last answer: a line is logged once

    def log(line):
        if line not in logged:
            logged.add(line)
            console.line(f"worker: {line}")

    while True:
        answers = worker.answers
        try:
            with contextlib.closing(Link(cfg, host, port, version, access, card)) as link:
                connected = True
                log(f"{engine.name}, connected to {host}:{port}{' (protocol 1)' * (version == V1)}")
                link.keep_alive()
                try:
                    worker.serve(link)
                except OSError:
                    with contextlib.suppress(OSError):
                        link.any_of((), 1.0)         # what it has told before it went, as that the run has ended
                    raise
                except EggError as error:
                    if retry and not isinstance(error, NetError):        # else who has started it reads of it
                        link.log(f"it ends: {error}")
                    raise
        except RunEnded as error:
            log(error)
            return worker.chunks
        except OldCoordinator as error:
            if not (access.secret or access.tls):
                log(f"{error}; trying protocol 1")
                version = V1                 # at once, and for one connection: it may also have been stopped just then
                continue
            if not retry:
                raise
            problem = str(error)
        except OSError as error:
            if connected and not retry:
                return worker.chunks
            problem = "the coordinator is gone" if connected else f"cannot join {host}:{port}: {reason(error)}"
            if not retry:
                raise NetError(problem) from None
        if worker.answers > answers:
            pause = BACK_OFF[0]
            logged.clear()
        log(f"{problem}, trying again")
        version = V2
        time.sleep(pause * random.uniform(0.5, 1.0))
        pause = min(2 * pause, BACK_OFF[1])


# coordinator

CHECK_EVERY = 0.05         # seconds between checks of leases and deadlines
TICK = 0.25                # seconds the coordinator sleeps at most, to notice signals and the end of its time
OTHER_FILES = 128          # files and sockets of the page that a coordinator may open beside its connections
LEAST_CONNECTIONS = 64     # that it must be able to hold open
LINK_SECONDS = 10.0        # over which the link of a worker is measured


class Hook:
    """What an island can do in a coordinator, which calls these methods in its own loop; this one does nothing."""

    takes_version_1 = True     # a peer of protocol 1 takes no snapshots and cannot follow a change of the state
    handover = None            # what waits for a worker's state of this step; until then no chunk is handed out

    def admit_peer(self, card):
        """Raises Refused where the coordinator that calls may not be a peer. card: an auth.Card of role "island"."""
        raise Refused(f"island {card.name}: this one is no island: start it with --island NAME", wire.OTHER_CONFIG)

    check = nothing            # (now): deadlines and whatever else is due; several times a second
    snapshot_kept = nothing    # (step): the shelf has a snapshot of this step
    step_completed = nothing   # (): a step is in the history and no chunk of the next one handed out
    # (step, value, unit): a worker has measured the state of this step, with an objective its reward; less is better
    validated = nothing
    status = nothing           # its part of `egg.py status`, for JSON


class RemoteWorker(Role):
    """A worker as the coordinator sees it: the role of its session. author: who answers for its results; card: its
    auth.Card, one without digests with protocol 1."""

    step = digest = None       # of its last request: steps that it has applied; its state (None with protocol 1)
    trusted = True             # no other worker contradicts its state
    rebuilt_at = None          # step at which it was last made to rebuild
    state_asked = None         # step at which it was last asked for its state (snapshots.Collector)
    states_failed = 0          # how often that did not come
    lapsed = False             # it has lost a lease, and delivered nothing since
    pace = None                # seconds for a chunk
    results = 0                # that were taken
    _point = None              # when its link was measured last, and what had been spent then

    def __init__(self, session, coordinator, author, card):
        super().__init__(session)
        self.coordinator = coordinator
        self.version = session.version
        self.author, self.process = author, Process(*author, card.id)
        self.card = card
        self.joins = session.version == V2           # nothing was handed out yet: it may begin with a snapshot
        self.offered = set()                         # SHA-256 of the snapshots that it was told of
        self.owed = {}                               # {(step, chunk): when} it was handed out, until its result comes
        self.link = coordinator.progress.links       # bytes/s, and shares of the time
        coordinator.dispatcher.workers.add(self)

    def handle(self, opcode, payload):
        coordinator = self.coordinator
        if self.version == V1 and opcode not in wire.FROM_WORKERS:
            return
        match opcode:
            case wire.JOB_REQUEST:
                coordinator.collector.goes_on(self)
                request = wire.JOB_REQUEST.unpack(payload)
                coordinator.take_request(self, request.step, request.digest or None)
            case wire.RESULT:
                coordinator.collector.goes_on(self)
                coordinator.take_result(self, *wire.read_result(coordinator.cfg, coordinator.n_weights, payload))
            case wire.VALIDATION:
                self.take_validation(*wire.VALIDATION.unpack(payload))
            case wire.REWARD:
                self.take_reward(*wire.REWARD.unpack(payload))
            case wire.LOG_MESSAGE if coordinator.events.allows(len(payload)):
                text = printable(payload.decode("utf-8", "replace"))
                coordinator.events.message(self.author.name, text,
                                           f"worker {self.session.title}:\n" * coordinator.peers)
            case wire.SPENT:
                self.take_spent(*wire.SPENT.unpack(payload))
            case wire.SNAPSHOT_DATA:
                coordinator.collector.take(self, payload)
            case wire.SNAPSHOT_REQUEST:
                coordinator.collector.give(self.session, payload)

    def take_validation(self, step, *stated):
        """stated: tokens, their bytes, nats."""
        coordinator = self.coordinator
        figure, unit = coordinator.progress.figure(*stated)
        if self.trusted and coordinator.progress.validated(step, figure, unit) and not coordinator.cfg.OBJECTIVE:
            coordinator.shelf.measured(step, figure)
            coordinator.island.validated(step, figure, unit)

    def take_reward(self, step, texts, reward, shown):
        coordinator = self.coordinator
        shown = coordinator.progress.check_reward(texts, reward, shown)
        if self.trusted and coordinator.progress.rewarded(step, texts, reward, shown):
            coordinator.shelf.measured(step, reward)
            coordinator.island.validated(step, -reward, "reward")               # of a fitness less is better

    def take_spent(self, idle, receiving):
        """Measures its link, every LINK_SECONDS."""
        point = time.monotonic(), *self.session.moved, idle, receiving + self.session.receiving
        before = self._point = self._point or point
        seconds = point[0] - before[0]
        if seconds < LINK_SECONDS:
            return
        self._point = point
        up, down, *shares = ((now - then) / seconds for now, then in zip(point[1:], before[1:]))
        idle, exchange = (min(1.0, max(0.0, share)) for share in shares)         # 0.0 of what is no number
        self.link = {"up": round(up), "down": round(down), "idle": round(idle, 3), "exchange": round(exchange, 3)}
        if self.coordinator.events.allows():
            self.coordinator.events.emit("link", worker=self.author.name, **self.link)
        self.coordinator.progress.check_link(self.session.title, up, down, exchange)

    def needs_snapshot(self):
        """Whether no replay leads it to the present state, or it has just come and a snapshot is quicker."""
        shelf, start = self.coordinator.shelf, self.coordinator.run.start
        of_epoch_before = start.origin and self.digest and self.digest.hex() != start.origin["digest"]
        return (self.step < start.step or self.step == start.step and of_epoch_before
                or self.joins and shelf.newest_but(self.offered) > self.step)

    def begin_with_snapshot(self):
        """Sends it to the newest snapshot; when it asks again, as it found that damaged, to an older one."""
        shelf = self.coordinator.shelf
        step = shelf.newest_but(self.offered)
        if self.version == V1 or not step:
            return self.session.refuse(
                f"this run: its history begins at step {self.coordinator.run.start.step}, with a snapshot: the worker "
                "must speak protocol 2, and be able to read one of those in the save directory")
        self.offered.add(shelf.sha256[step])
        self.session.reply(wire.REBUILD, step)

    def closed(self):
        self.coordinator.worker_left(self)

    def status(self):
        silent = time.monotonic() - self.session.heard
        state = ("in doubt" if not self.trusted else
                 "silent" if silent > ACTIVE_SECONDS and not self.waiting else
                 "computing" if self.coordinator.dispatcher.work.leases[self] else
                 "waiting" if self.waiting else "catching up")
        return {"name": self.author.name, "address": self.session.address, "device": self.card.device,
                "protocol": self.version, "step": self.step, "chunks": self.results,
                "chunk_seconds": self.pace, "last_seen": round(silent, 3), "state": state, **self.link}


class Coordinator:
    """Serves workers until `finished`; drive it with `poll`. The run ends when it has `steps` steps, or `minutes` after
    the first chunk (None: never); peers=False: no lines about workers that come and go. island: None, or an
    islands.gossip.IslandSettings, whose attach(coordinator) returns a Hook; http: None, or a tools.live_page.Where,
    whose attach(coordinator) returns the page. Raises an EggError for an option that cannot be used."""

    closing, _check_at = False, 0.0
    _measuring = None          # the worker that measures the last state; False: that is done
    _ended = None              # the event of the last step, until it is reported
    status = status.report

    def __init__(self, cfg, run, host, port, steps=None, minutes=None, *, console, events, peers=True,
                 access=auth.Access(), http=None, island=None):
        self.cfg, self.run, self.peers = cfg, run, peers
        self.steps, self.minutes = steps, minutes
        self.console, self.events, self.access = console, events, access
        self._undecided = set()                      # steps at which workers wait for a majority of their states
        self.hub, self.progress, self.states = Hub(), Progress(cfg, run, events), States()
        self.dispatcher = Dispatcher(cfg, run, events, self._answer, AUDIT_PATIENCE if peers else 0.0)
        self.collector = snapshots.Collector(self)
        self.shelf = self.collector.shelf            # a snapshots.Shelf
        self.admission = Admission(self, access, room_for_connections())
        self.island = island.attach(self) if island else Hook()
        self.address = self.admission.listen(auth.listen_host(host, access), port)
        self._begin_step()
        self.page = http.attach(self) if http else None

    @functools.cached_property
    def n_weights(self):
        return history.sizes(self.cfg)[0]

    @property
    def finished(self):
        started = self.progress.started
        return (self.progress.enough or self.steps is not None and self.run.step >= self.steps
                or self.minutes is not None and started and time.monotonic() - started >= 60 * self.minutes)

    def poll(self, timeout=TICK):
        self.hub.poll(0 if self.dispatcher.busy else timeout)
        self.dispatcher.changed |= self.collector.beside.turn()
        self.dispatcher.answer_waiting()
        if not self.dispatcher.busy:                 # before anything else is written: workers come first
            self._conclude_step()
        now = time.monotonic()
        if now >= self._check_at:
            self._check_at = now + CHECK_EVERY
            self.console.progress()                  # its clock, and the width of the terminal
            self.hub.check(now)
            self.dispatcher.check(now)
            self.collector.check()
            self._complete_step()                    # an audit may have been settled
            if not self.closing:
                self.island.check(now)
            self.dispatcher.answer_waiting()
            if self.page:
                self.page.check(now)

    def finish(self, seconds):
        """Ends the run: see `drain`; then the sinks of events, and the page, learn of it."""
        self.drain(seconds)
        self.console.clear()
        run, why = self.run, self.progress.enough
        kept = f"the run lies in {run.directory}" if run.directory else "they are not kept (--save-dir keeps them)"
        self.events.emit("stop", f"stopped after {run.step} steps{why}; {kept}", step=run.step)
        if self.page:
            self.page.farewell()

    def dismiss(self):
        """Ends the connections of the workers, who after a planned end need not wait for us; the page is still served.
        """
        self.closing = True
        self.console.clear()
        for session in [*self.admission.arrivals, *(worker.session for worker in self.dispatcher.workers)]:
            if self.finished and session.version == V2:
                session.reply(wire.ERROR, wire.ENDED, f"the run has ended after {self.run.step} steps".encode())
            session.close()

    def drain(self, seconds):
        """Hands out no more work; within `seconds` workers apply what is complete, and one sends the last snapshot and
        measures it."""
        def owes(worker):
            return worker.step is not None and (worker.step < self.run.step or self.collector.wanted(worker)
                                                or self._measuring is None and worker.version == V2)

        self.closing = self.dispatcher.changed = True
        if self.run.step == self.progress.first_step:
            self._measuring = False
        until = time.monotonic() + seconds
        while time.monotonic() < until and (self._measuring or any(map(owes, self.dispatcher.workers))):
            self.poll(0.05)
        self.collector.beside.finish()
        self._conclude_step()

    def close(self):
        self.dismiss()
        self.collector.beside.drop()
        self.hub.close()
        if self.page:
            self.page.close()

    # who comes and goes (cluster.admission lets in)

    def worker_joined(self, session, author, card):
        session.role = RemoteWorker(session, self, author, card)

    def worker_left(self, worker):
        if worker.step is not None and not self.closing:
            leases = self.dispatcher.work.leases[worker]
            returned = f", its {chunks_text(leases)} handed out again" if leases else ""
            self._log_worker("left", worker, f"worker {worker.session.title} left{returned}")
        if self.dispatcher.leave(worker):
            self.states.forget(worker.process)
        self.collector.leave(worker)
        if worker is self._measuring:
            self._measuring = None                   # another one may

    def _log_worker(self, kind, worker, line):
        if self.events.allows():
            self.events.emit(kind, line if self.peers else None, worker=worker.author.name,
                             address=worker.session.address, device=worker.card.device, step=worker.step)

    # a step: requests, chunks, results, and its end

    def take_request(self, worker, step, digest):
        """A worker at this step asks for work. digest: of its state, None with protocol 1."""
        first, worker.step, worker.digest = worker.step is None, step, digest
        if first:
            self.dispatcher.arrived(worker)
            self._log_worker("joined", worker, f"worker {worker.session.title} joined at step {step} "
                             f"({self.dispatcher.known} connected)")
        if not worker.waiting:
            self._answer(worker)

    def _answer(self, worker):
        """Serves a request: with what the worker lacks, with a chunk, or later."""
        run, step, session = self.run, worker.step, worker.session
        if step > run.step:
            # The worker is ahead of the run. Ours rebuilds when it gets this answer; a C++ worker waits.
            return session.reply(wire.JOB_RESPONSE, run.seed, run.step, wire.NOTHING, 0)
        if worker.joins and max(self.shelf.doubtful, default=0) > max(step, self.shelf.newest):
            return self.dispatcher.hold(worker)      # until it is known whether it can be offered
        if worker.needs_snapshot():
            return worker.begin_with_snapshot()
        if worker.digest and not self._agrees(worker):
            return
        self.collector.ask(worker)                   # for the state of this step, before it has anything else to do
        if step < run.step:
            worker.joins = False
            packed = run.body(step) if worker.version == V2 else run.fitness(step)
            session.reply(wire.JOB_RESPONSE, run.seed, step + 1, 0, len(packed), packed)
        elif self.island.handover:
            self.dispatcher.hold(worker)
        elif (chunk := None if self.closing or self.finished else self.dispatcher.hand_out(worker)) is not None:
            worker.joins = False
            self.progress.chunk_handed_out()
            if self.cfg.LOCAL_STEPS > 1:             # else a wrong guess would cost a whole chunk
                session.reply(wire.COOLING, self._cooling)
            session.reply(wire.JOB_RESPONSE, run.seed, run.step, chunk * self.cfg.CHUNK_SIZE, 0)
        elif self.closing and self._measuring is None and worker.version == V2:
            self._measuring = worker
            session.reply(wire.MEASURE)
        else:
            if worker is self._measuring:
                self._measuring = False
            self.dispatcher.hold(worker)

    def take_result(self, worker, result, chunk):
        """result: the fields of RESULT."""
        step, work = self.run.step, self.dispatcher.work
        if result.step > step or worker.version == V2 and result.step == step != worker.step:
            raise FrameError(f"wrong step: RESULT for step {result.step} while step {step} is being done, after a "
                             f"request at step {worker.step}")
        if (result.step, chunk) not in worker.owed:
            if worker.version == V2 and result.step == step:
                raise FrameError(f"wrong chunk: RESULT for chunk {chunk}, which it does not owe")
            return                                   # perhaps it was handed out on an earlier connection
        if (erred := self.dispatcher.take(worker, result, chunk)) is None:
            return
        self.progress.result(result.updates)
        for author in erred:
            self._blame(author, f"its result for chunk {chunk} of step {step} is not that of others, or not its own "
                        "when it was evaluated again", counts=self.dispatcher.votes_from_text(chunk))
        self.console.progress(f"step {step}: {len(work.done)}/{self.cfg.N_CHUNKS} chunks")
        self._complete_step()

    def _complete_step(self):
        """Ends the step if all chunks are done. Without a majority among its states nobody's results count yet."""
        step, work = self.run.step, self.dispatcher.work
        if not (work.complete and self.states.decided(step)):
            return
        self._conclude_step()                        # if two end in one turn
        sum_loss = sum(outcome.sum_loss for outcome in work.done.values())
        reads_text = any(map(self.dispatcher.votes_from_text, work.done))
        if self.cfg.LOCAL_STEPS == 1:
            self._cooling = self.progress.cooling(self.steps, self.minutes)
        fitness = work.fitness(self._cooling)
        self.run.append(fitness, sum_loss, self.progress.updates)            # before any worker sees the next step
        self._ended = self.progress.complete_step(step, sum_loss if reads_text else None, fitness)
        self._begin_step()
        self.island.step_completed()
        self.dispatcher.answer_waiting()

    def _conclude_step(self):
        """Reports the step that has ended, while the workers go on."""
        if self._ended:
            event, self._ended = self._ended, None
            self.events.emit("step", **event)

    def _begin_step(self):
        self.dispatcher.begin_step()
        self.progress.begin_step()
        self._cooling = self.progress.cooling(self.steps, self.minutes)

    # states

    def _agrees(self, worker):
        """Whether the state of this worker is right; if not, the worker has to rebuild it, or waits."""
        step = worker.step
        if step <= self.run.step - STATES_KEPT:
            return True                              # it replays the run, and will be compared later
        rebuilt = worker.rebuilt_at == step
        verdict, erred = self.states.judge(step, worker.process, worker.digest, rebuilt, self.dispatcher.authors)
        uploaded = self.shelf.digests.get(step)
        if uploaded and self.states.contradicts(step, uploaded):
            self.shelf.forget(step)                  # it differs from the majority: nobody must rebuild from it
        if erred:
            self._blame(worker.author, f"its state at step {step} is not that of others, or not its own before",
                        again=rebuilt)
            if not worker.session.open:
                return False
        if verdict == AGREES:
            worker.trusted = True
            for outvoted in self.states.outvoted(step, worker.digest):
                self._distrust(outvoted)
            if step in self._undecided:
                self._undecided.discard(step)
                self.dispatcher.changed = True       # others of this state have waited for the decision
            self._complete_step()                    # so may the step
            return True
        self._distrust(worker.process)
        if verdict == REBUILD:
            worker.rebuilt_at = step
            start = max((s for s in self.shelf.files if s <= step), default=0)
            self.events.warn(f"worker {worker.session.title}: its state at step {step} is not that of others: it "
                             f"rebuilds from step {start}", peer=True)
            worker.session.reply(wire.REBUILD, start)
            return False
        if rebuilt and step not in self._undecided:
            self.events.warn(f"step {self.run.step}: workers hold different states of step {step} and there is no "
                             "majority: start another worker, which decides, or stop the wrong one", peer=True)
        self._undecided.add(step)
        self.dispatcher.hold(worker)
        return False

    def _distrust(self, who):
        self.collector.drop(self.dispatcher.distrust(who))

    def _blame(self, author, reason, counts=True, again=False):
        """Doubts an author. Of its errors in a step the first one counts, and what a process repeats after it has
        rebuilt (again); at the third one it is banned. counts=False: it may have computed well, and its judge have
        failed."""
        self.dispatcher.doubt(author)
        bans, name = self.admission.bans, author.name
        count, step = bans.errors.get(name, (0, None))
        if not counts or step == self.run.step and not again:
            return
        count += 1
        bans.errors[name] = count, self.run.step
        if count < ERRORS:
            return self.events.warn(f"worker {name} has erred, {count} of {ERRORS} times: {reason}", peer=True)
        self.events.emit("banned", f"banned {name}: {reason}", worker=name, reason=reason)
        workers = [worker for worker in self.dispatcher.workers if worker.author == author]
        if any(worker.version == V2 for worker in workers):          # all peers of version 1 have the same name
            bans.add(name, reason)
        self._distrust(author)
        for worker in workers:
            worker.session.refuse(f"banned: {reason}", wire.BANNED)

    def begin_epoch(self, state, origin):
        """Goes on from another state, of this step and seed, between two steps. origin: see history.Start. Raises
        OSError, and then nothing has changed."""
        self.collector.beside.drop()
        try:
            sha256 = snapshots.save(self.cfg, state, self.run.directory)
            self.run.begin_epoch(history.Start(state.step, state.seed, sha256.hex(), origin))
        except OSError:
            self.shelf.forget(state.step)            # it may be that of the other state now
            self.shelf.remove(history.snapshot_name(state.step))
            raise
        self.collector.drop()
        self.shelf.begin_epoch(sha256)
        self.states.clear()
        for worker in self.dispatcher.workers:
            worker.rebuilt_at = None
            worker.owed.clear()
        self._begin_step()


def room_for_connections():
    """How many connections a coordinator may hold open beside files and the page. Raises NetError."""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
    room = (limit if limit != resource.RLIM_INFINITY else 1 << 16) - OTHER_FILES
    if room < LEAST_CONNECTIONS:
        raise NetError(f"this process may open {limit} files, and a coordinator needs "
                       f"{OTHER_FILES + LEAST_CONNECTIONS}: raise the limit with `ulimit -n 4096`")
    return room


@contextlib.contextmanager
def opened_coordinator(cfg, host, port, console, save_dir=None, load_dir=None, log_json=None, target=None,
                       patience=None, **options):
    """A Coordinator with its run and its logs, for a block. save_dir, load_dir: see history.open_run; log_json:
    see event_log.Events; target, patience: see Progress; options: of Coordinator. Raises EggError."""
    with (contextlib.closing(history.open_run(cfg, save_dir, load_dir, snapshots.mend)) as run,
          event_log.Events(cfg, run, console, log_json) as events,
          contextlib.closing(Coordinator(cfg, run, host, port, console=console, events=events, **options)) as opened):
        opened.progress.target, opened.progress.patience = target, patience
        yield opened


def run_coordinator(cfg, host=None, port=None, *, console=None, watch=nothing, hint=None, **options):
    """Serves a run until it has `steps` completed steps, `minutes` have passed since the first chunk, SIGINT or
    SIGTERM. host: see auth.listen_host; port: default cfg.PORT; watch(coordinator): called several times a second;
    hint: a line at the start, or None; options: see `opened_coordinator`. Returns its Progress. Raises EggError."""
    console, port = console or Console(), cfg.PORT if port is None else port
    with stop_signals() as stopped, opened_coordinator(cfg, host, port, console, **options) as coordinator:
        run, access = coordinator.run, coordinator.access
        place = f"kept in {run.directory}{run.beside}" if run.directory else "not kept (--save-dir keeps the run)"
        who = "with a secret" if access.secret else \
            "open to this machine" if auth.is_loopback(coordinator.address[0]) else "OPEN TO ANYBODY"
        if access.tls:
            who += " and TLS"
        console.line(f"coordinator on {address_text(*coordinator.address)}, step {run.step}, {place}, {who}")
        if coordinator.page:
            console.line(coordinator.page.invitation())
        if hint:
            console.line(hint)
        while not coordinator.finished and not stopped:
            coordinator.poll()
            watch(coordinator)
        coordinator.finish(0 if stopped else 5)
        return coordinator.progress
