"""What a worker does for its coordinator (egg_net.run_worker): its replica of the model, and the chunk with which it
begins before the coordinator answers."""

import time

import numpy as np

from cluster import history, snapshots, wire
from cluster.hub import NetError
from cluster.wire import V2
from model import data_files, fitness_digits, parameters, ternary

SLICE_SECONDS = 0.2        # a worker computes for about so long at most before it reads its socket
FIRST_SLICE = 64           # members, before its speed is known
SURE_AFTER = 16            # chunks in order, after which a worker expects the next one
POLL_SECONDS = 0.1         # a C++ coordinator with nothing to hand out is asked again so often


class Worker:
    """A replica of the model and what it needs to serve; see `run_worker`."""

    changed = 0                            # weights changed by the last update, until a result has reported it
    rebuilt = False                        # since the last chunk
    reported_step = -1                     # the last step that was validated and sampled
    digest = None, b""                     # (step, digest of the state then)
    speed, slice = 0.0, FIRST_SLICE        # members a second, at a time
    piece = None, 0                        # (first member, members) of the next evaluation
    own = -1, {}                           # (step, {first member: fitness}): the chunks that this worker has done in it
    chunks = answers = 0

    def __init__(self, cfg, engine, tokens, validation, decoding, validate_first, console, inspect=None):
        self.cfg, self.engine, self.console, self.inspect = cfg, engine, console, inspect
        self.tokens, self.validation, self.decoding, self.validate_next = tokens, validation, decoding, validate_first
        self.foresight, self.prepared = Foresight(cfg), set()

    def serve(self, link):
        """Asks for work and does it until the coordinator is gone (OSError)."""
        engine, result, answers = self.engine, b"", (wire.JOB_RESPONSE,)
        if link.version == V2:
            answers += wire.REBUILD, wire.SNAPSHOT_WANTED, wire.HASH_WANTED
        if link.snapshot > engine.step:
            self._fetch_snapshot(link, link.snapshot)
        while True:
            request = wire.REQUEST.pack(engine.seed, engine.step, 0)
            digest = self._state_digest() if link.version == V2 else b""
            link.send(result + link.frame(wire.JOB_REQUEST, request, digest))
            result = b""
            while (got := link.any_of(answers))[0] in (wire.SNAPSHOT_WANTED, wire.HASH_WANTED):
                self._send_state(link, got[0], link.unpack_step(got[1]))
            self.answers += 1
            if got[0] == wire.REBUILD:
                start = link.unpack_step(got[1])
                self.console.line(f"worker: at step {engine.step}, told to go on from the state of step {start}")
                if not start or not self._fetch_snapshot(link, start):
                    self._load(parameters.initial_state(self.cfg))
                continue
            seed, step, position, packed = link.unpack_response(got[1])
            if packed:
                self._apply(link, step, packed)
            elif position == wire.NOTHING:
                # a C++ coordinator may leave these fields empty: a seed of 0 is no information
                if step < engine.step and seed not in (0, engine.seed):
                    self._start_over(link, seed, step)
                else:
                    link.check(POLL_SECONDS)
            elif (seed, step) != (engine.seed, engine.step):
                self._start_over(link, seed, step)
            elif position % self.cfg.CHUNK_SIZE or position >= self.cfg.POPULATION_SIZE:
                raise NetError(f"{link.name}: it hands out member {position}, chunks here begin at multiples of "
                               f"{self.cfg.CHUNK_SIZE} below {self.cfg.POPULATION_SIZE}: set CHUNK_SIZE and "
                               "POPULATION_SIZE as there")
            else:
                result = self._evaluate(link, position)

    def _evaluate(self, link, first):
        """The RESULT frame of the chunk that begins with member `first`."""
        if first == 0 and self.engine.step != self.reported_step:
            self._report(link)
            self.reported_step = self.engine.step
        self.foresight.handed_out(self.engine.step, first)
        parts, at, end = [], first, first + self.cfg.CHUNK_SIZE
        if self.piece[0] != first:
            self.piece = first, self._slice_size(end - first)
        while at < end:
            (at, count), started, self.piece = self.piece, time.perf_counter(), (None, 0)
            self.engine.begin(at, count)
            if at + count < end:
                self._begin(at + count, end)
            elif (following := self.foresight.following(self.engine.step)) > first:
                self._begin(following)
            sizes = {count, self.piece[1]}
            parts.append(self.engine.evaluate(at, count))
            if sizes <= self.prepared:
                self._measure(count, time.perf_counter() - started)
            self.prepared |= sizes           # the first evaluation of a size may last far longer than the next
            if (at := at + count) < end:
                link.check()
        losses = np.concatenate(parts)
        fitness = fitness_digits.chunk_fitness(losses, self.cfg)
        self._note(first, fitness)
        packed = fitness_digits.pack_ternary(fitness)
        head = wire.RESULT_HEAD.pack(self.engine.seed, self.engine.step, first, self.changed, int(losses.sum()),
                                     len(packed))
        self.changed, self.rebuilt, self.chunks = 0, False, self.chunks + 1
        self.console.progress(f"step {self.engine.step}: {self.chunks} chunks done, "
                              f"{self.speed * self.cfg.SEQ_LEN:.0f} tok/s")
        return link.frame(wire.RESULT, head, packed)

    def _note(self, first, fitness):
        """Notes the fitness of a chunk. Where this worker has done the whole step, the update will be of that, unless a
        result is disputed."""
        step, chunks = self.engine.step, self.own[1] if self.own[0] == self.engine.step else {}
        self.own, chunks[first] = (step, chunks), fitness
        if len(chunks) == self.cfg.N_CHUNKS:
            self._begin_update(np.concatenate([chunks[k] for k in sorted(chunks)]))

    def _begin_update(self, fitness):
        """Lets an engine that can begin with an update, and with the chunk that follows."""
        if self.engine.begin_update(fitness) and (following := self.foresight.following(self.engine.step)) >= 0:
            self._begin(following)

    def _begin(self, first, end=None):
        """Sets the next evaluation: a slice of the chunk that begins with member `first`, or of first.. end - 1."""
        self.piece = first, self._slice_size(end - first if end else self.cfg.CHUNK_SIZE)
        self.engine.begin(*self.piece)

    def _apply(self, link, step, packed):
        """Updates the replica by the fitness of its step, which leads to `step`."""
        if step != self.engine.step + 1:
            return self._start_over(link, None, step)
        try:
            if link.version == V2:
                packed = history.unzip(packed, ternary.packed_size(self.cfg.N_PAIRS))
            fitness = fitness_digits.unpack_ternary(packed, self.cfg.N_PAIRS)
        except ValueError as error:
            raise NetError(f"{link.name}: the fitness of step {step - 1} cannot be right ({error}): "
                           "set POPULATION_SIZE as there") from None
        self._begin_update(fitness)
        self.changed = self.engine.update(fitness)

    def _slice_size(self, left):
        """An even number of members: a chunk, halved until that is expected to take SLICE_SECONDS at most, so that an
        engine has few sizes to prepare for."""
        size = self.cfg.CHUNK_SIZE
        while size > self.slice:
            size = size // 2 + 1 & ~1
        return min(left, size)

    def _measure(self, count, seconds):
        self.speed = count / max(seconds, 1e-9)
        # grows by steps: the first slices of a device say little about the speed of large ones
        self.slice = max(2, min(int(self.speed * SLICE_SECONDS), 8 * self.slice) & ~1)

    def _report(self, link):
        """What the worker of chunk 0 adds to its result: validation and a sample, every so many steps."""
        cfg, step = self.cfg, self.engine.step
        if self.inspect:
            self.inspect(self.engine)
        if self.validation and (self.validate_next or due(cfg.VALIDATE_EVERY, step)):
            self.validate_next = False
            nats, tokens = self.engine.validate(self.validation.windows)
            n_bytes = self.validation.n_bytes if self.validation.unit == "bits/byte" else 0
            link.send(link.frame(wire.VALIDATION, wire.VALIDATED.pack(step, tokens, n_bytes, nats)))
        if self.tokens is not None and due(cfg.SAMPLE_EVERY, step):
            text = sample(cfg, self.engine, self.tokens, self.decoding).replace("\n", "\u23ce")    # one line of the log
            link.send(link.frame(wire.LOG_MESSAGE, f"sample at step {step}: {text}".encode()[:wire.TEXT_LIMIT]))

    def _state_digest(self):
        if self.digest[0] != self.engine.step:
            self.digest = self.engine.step, self.engine.digest()
        return self.digest[1]

    def _load(self, state):
        self.engine.load(state)
        self.changed, self.reported_step, self.digest, self.own = 0, -1, (None, b""), (-1, {})

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
        self._load(parameters.initial_state(self.cfg))

    def _fetch_snapshot(self, link, step):
        """Takes over the coordinator's snapshot of this step. Returns whether it was good; if not, replay the run."""
        data, total, most = bytearray(), 1, snapshots.most_bytes(self.cfg)
        while len(data) < total:
            link.send(link.frame(wire.SNAPSHOT_REQUEST, wire.BLOCK_REQUEST.pack(step, len(data))))
            payload = link.next(wire.SNAPSHOT_DATA)
            its_step, total, offset = wire.BLOCK_HEAD.unpack_from(payload)
            empty = len(payload) == wire.BLOCK_HEAD.size
            if (its_step, offset) != (step, len(data)) or total > most or empty and total:
                raise NetError(f"{link.name}: a piece of a snapshot that was not asked for")
            data += payload[wire.BLOCK_HEAD.size:]
        try:
            state = snapshots.unpack(self.cfg, data)
        except ValueError as error:
            self.console.line(f"worker: {error}; replaying the run instead")
            return False
        self._load(state)
        self.console.line(f"worker: at step {step} by a snapshot")
        return True

    def _send_state(self, link, opcode, step):
        if step != self.engine.step:
            raise NetError(f"{link.name}: it wants the state of step {step}, here is step {self.engine.step}")
        state = self.engine.state()
        if opcode == wire.HASH_WANTED:
            return link.send(link.frame(wire.STATE_HASH, wire.STEP_HASH.pack(step, snapshots.state_hash(state))))
        body = snapshots.pack(state)
        for offset in range(0, len(body), wire.BLOCK):
            head = wire.BLOCK_HEAD.pack(step, len(body), offset)
            link.send(link.frame(wire.SNAPSHOT_DATA, head, body[offset:offset + wire.BLOCK]))


class Foresight:
    """Which chunk a worker is handed next: the one behind its last, as long as it is the only worker. While it waits
    for an answer its engine can begin with that chunk. A mistake costs a slice of evaluation, so nothing is foreseen
    before SURE_AFTER right guesses in a row, and twice as many after every mistake."""

    def __init__(self, cfg):
        self._cfg, self._at, self._guess = cfg, None, None       # step and guess since the last chunk
        self._right, self._needed = 0, SURE_AFTER

    def handed_out(self, step, first):
        """A chunk was handed out in this step that begins with member `first`."""
        if first != self._guess:
            self._needed *= 2 if self._right >= self._needed else 1
        self._right = self._right + 1 if first == self._guess else 0
        self._at, self._guess = step, (first + self._cfg.CHUNK_SIZE) % self._cfg.POPULATION_SIZE

    def following(self, step):
        """First member of the next chunk; -1: that is not certain enough, or nothing was handed out in this step."""
        return self._guess if self._right >= self._needed and step == self._at else -1


def due(every, step):
    """Whether a step has a sample or a validation: every so many, and a few early ones, to show learning begin."""
    return every and (step % every == 0 or every >= 10 and step in (every // 10, every // 5, every // 2))


def sample(cfg, engine, tokens, decoding):
    """str: a piece of the data and the model's continuation of it (SPEC 10)."""
    at = engine.step * cfg.SEQ_LEN % (len(tokens) - cfg.SEQ_LEN)
    prompt = np.asarray(tokens[at:at + cfg.SAMPLE_PROMPT]).astype(np.int64)
    more = list(engine.generate(prompt, cfg.SAMPLE_TOKENS, engine.seed))
    return f"{data_files.text(decoding, prompt)} >>> {data_files.text(decoding, more)}"
