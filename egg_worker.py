"""Worker: a replica of the model that evaluates chunks for a coordinator. PROTOCOL.md says what passes between them."""

import json
import os
import random
import socket
import ssl
import time

import numpy as np

import egg_auth
import egg_data
import egg_history
import egg_model
import egg_snapshot
import egg_wire
from egg_net import Console, HEARTBEAT_EVERY, NetError, one_line, printable, reason, tune
from egg_wire import (BLOCK, BLOCK_HEAD, BLOCK_REQUEST, CHALLENGE, CHALLENGED, ERROR, FAILED, FULL, FrameError, HEARTBEAT,
                      HELLO, JOB_REQUEST, JOB_RESPONSE, JOIN, LOG_MESSAGE, NONCE, NOTHING, REBUILD, REQUEST, RESPONSE, RESULT,
                      RESULT_HEAD, SNAPSHOT_DATA, SNAPSHOT_REQUEST, SNAPSHOT_WANTED, STATED, STATUS, STEP, TEXT_LIMIT, V1, V2,
                      VALIDATED, VALIDATION, WELCOME, WELCOMED, frame, next_frame)

SLICE_SECONDS = 0.2        # how long a worker computes at most without looking at its socket, roughly
FIRST_SLICE = 64           # members, before its speed is known
CONNECT_TIMEOUT = 10.0     # seconds
SEND_TIMEOUT = 60.0        # seconds
BACK_OFF = (0.1, 5.0)      # seconds between attempts to connect: the first, the longest
LINEAGE = 5                # epochs that `status` tells of at most
POLL_SECONDS = 0.1         # a C++ coordinator with nothing to hand out is asked again so often


class OldCoordinator(Exception):
    """The coordinator closed on our HELLO: it may speak version 1 alone."""


class Link:
    """A worker's connection, introduced. Every method raises OSError when the coordinator is gone, NetError when it is no coordinator of
    ours or does not let us in; making one raises OldCoordinator where version 1 may help. version: V1 or V2; card: what JOIN says."""

    def __init__(self, cfg, host, port, version=V1, access=egg_auth.Access(), card=None):
        self.name, self.limits, self.inbox = f"{host}:{port}", egg_wire.limits(cfg), bytearray()
        self.version, self.limits = version, {version: self.limits[version]}
        self.beaten, self.snapshot = time.monotonic(), 0
        self.sock = socket.create_connection((host, port), timeout=CONNECT_TIMEOUT)
        try:
            tune(self.sock)
            if access.tls:
                self.sock = self._tls(access.tls, host)
            if version == V2:
                self._introduce(cfg, access, card)
        except BaseException:
            self.sock.close()
            raise

    def _tls(self, context, host):
        try:
            return context.wrap_socket(self.sock, server_hostname=host)
        except ssl.SSLCertVerificationError as error:
            raise NetError(f"{self.name}: its certificate is not good: {error.verify_message}: give --tls-ca the certificate of this "
                           "coordinator, made for the name used here") from None
        except ssl.SSLError as error:
            raise NetError(f"{self.name}: no TLS: {error.reason}: is the coordinator given --tls-cert?") from None

    def _introduce(self, cfg, access, card):
        hello, text = os.urandom(NONCE.size), json.dumps(card).encode()
        self.send(self.frame(HELLO, hello))
        try:
            challenge, wanted = CHALLENGED.unpack(self.next(CHALLENGE, CONNECT_TIMEOUT))
        except ConnectionError:
            raise OldCoordinator from None
        if wanted and not access.secret:
            raise NetError(f"{self.name} wants a secret: give the coordinator's with --secret-file FILE, or in EGG_SECRET")
        self.send(self.frame(JOIN, egg_auth.proof(access.secret, b"worker", hello, challenge, text), text))
        proof, config, _, _, self.snapshot = WELCOMED.unpack(self.next(WELCOME, CONNECT_TIMEOUT))
        if not egg_auth.proves(access.secret, proof, b"coordinator", hello, challenge, text):
            raise NetError(f"{self.name} does not know the secret: is it the right coordinator?")
        if card["role"] == "worker" and config != egg_snapshot.config_digest(cfg):
            raise NetError(f"{self.name}: it let us in with another configuration: is it of the same version of egg?")

    def frame(self, opcode, *parts):
        return frame(opcode, *parts, version=self.version)

    def send(self, data):
        self.sock.settimeout(SEND_TIMEOUT)
        self.sock.sendall(data)
        self.beaten = time.monotonic()

    def beat(self):
        """A sign of life where one is due."""
        if self.version == V2 and time.monotonic() - self.beaten >= HEARTBEAT_EVERY:
            self.send(self.frame(HEARTBEAT))

    def next(self, *wanted):
        """Payload of the next frame; see `any_of`."""
        return self.any_of((wanted[0],), *wanted[1:])[1]

    def any_of(self, opcodes, timeout=None):
        """(opcode, payload) of the next frame with one of these opcodes, others are passed over; heartbeats go out meanwhile. Raises
        TimeoutError after `timeout` seconds."""
        until = None if timeout is None else time.monotonic() + timeout
        while True:
            try:
                while got := next_frame(self.inbox, self.limits):
                    if got[1] in opcodes:
                        return got[1:]
                    if got[1] == ERROR and self.version == V2:
                        code, why = FAILED.unpack_from(got[2])[0], one_line(got[2][FAILED.size:].decode("utf-8", "replace"))
                        if code == FULL:
                            raise TimeoutError(why)
                        raise NetError(f"{self.name} refuses this worker: {why}")
            except FrameError as error:
                raise NetError(f"{self.name}: {error}") from None
            if until is not None and time.monotonic() >= until:
                raise TimeoutError(f"{self.name} does not answer")
            self._receive(HEARTBEAT_EVERY if until is None else min(HEARTBEAT_EVERY, max(until - time.monotonic(), 0.001)))
            self.beat()

    def response(self, timeout=None):
        """(seed, step, first member, fitness as it came) of the next JOB_RESPONSE."""
        return self.unpack_response(self.next(JOB_RESPONSE, timeout))

    def unpack_response(self, payload):
        seed, step, position, size = RESPONSE.unpack_from(payload)
        if size != len(payload) - RESPONSE.size:
            raise NetError(f"{self.name}: wrong length: JOB_RESPONSE says {size} bytes of fitness and carries "
                           f"{len(payload) - RESPONSE.size}")
        return seed, step, position, payload[RESPONSE.size:]

    def check(self, seconds=0.0):
        """Looks whether the coordinator is still there, for so long."""
        self._receive(seconds)
        self.beat()

    def _receive(self, seconds):
        """Takes in what comes within so many seconds."""
        self.sock.settimeout(seconds)
        try:
            data = self.sock.recv(1 << 16)
        except (BlockingIOError, TimeoutError, ssl.SSLWantReadError):
            return
        if not data:
            raise ConnectionResetError("the connection was closed")
        self.inbox += data

    def close(self):
        self.sock.close()


class Worker:
    """A replica of the model and what it needs to serve; see `run_worker`."""

    def __init__(self, cfg, engine, tokens, validation, decoding, validate_first, console):
        self.cfg, self.engine, self.console = cfg, engine, console
        self.tokens, self.validation, self.decoding = tokens, validation, decoding
        self.changed = 0                   # weights changed by the last update, until reported
        self.rebuilt = False               # since the last chunk
        self.validate_next = validate_first
        self.told_step = -1                # the last step that was validated and sampled
        self.speed = None                  # members a second
        self.slice = FIRST_SLICE
        self.chunks = 0
        self.stated = None                 # (step, digest of the state then)

    def serve(self, link, heard):
        """Asks for work and does it until the coordinator is gone (OSError). `heard` is called with every answer."""
        engine = self.engine
        if link.snapshot > engine.step:
            self._load(link, link.snapshot)
        while True:
            link.send(link.frame(JOB_REQUEST, REQUEST.pack(engine.seed, engine.step, 0), self._state(link)))
            opcode, payload = link.any_of((JOB_RESPONSE, REBUILD, SNAPSHOT_WANTED) if link.version == V2 else (JOB_RESPONSE,))
            while opcode == SNAPSHOT_WANTED:
                self._send_snapshot(link, *STEP.unpack(payload))
                opcode, payload = link.any_of((JOB_RESPONSE, REBUILD, SNAPSHOT_WANTED))
            heard()
            if opcode == REBUILD:
                start = STEP.unpack(payload)[0]
                self.console.line(f"worker: at step {engine.step}, told to go on from the state of step {start}")
                if not start or not self._load(link, start):
                    self._begin_again()
                continue
            seed, step, position, packed = link.unpack_response(payload)
            if packed:
                self._catch_up(link, step, packed)
            elif position == NOTHING:
                # a seed of 0 says nothing: a C++ coordinator may leave these fields empty here
                if step < engine.step and seed not in (0, engine.seed):
                    self._rebuild(link, seed, step)
                else:
                    link.check(POLL_SECONDS)
            elif (seed, step) != (engine.seed, engine.step):
                self._rebuild(link, seed, step)
            elif position % self.cfg.CHUNK_SIZE or position >= self.cfg.POPULATION_SIZE:
                raise NetError(f"{link.name}: it hands out member {position}, chunks here begin at multiples of {self.cfg.CHUNK_SIZE} "
                               f"below {self.cfg.POPULATION_SIZE}: set CHUNK_SIZE and POPULATION_SIZE as there")
            else:
                self._work(link, position)

    def _catch_up(self, link, step, packed):
        if step != self.engine.step + 1:
            self._rebuild(link, None, step)
            return
        try:
            if link.version == V2:
                packed = egg_history.unzip(packed, egg_model.packed_size(self.cfg.N_PAIRS))
            fitness = egg_model.unpack_ternary(packed, self.cfg.N_PAIRS)
        except ValueError as error:
            raise NetError(f"{link.name}: the fitness of step {step - 1} cannot be right ({error}): "
                           "set POPULATION_SIZE as there") from None
        self.changed = self.engine.update(fitness)

    def _rebuild(self, link, seed, step):
        """This replica and the coordinator's run have parted: begin again and replay the run, once."""
        if self.rebuilt:
            raise NetError(f"{link.name}: its run does not fit this worker: it answers for step {step}"
                           + (f" with seed {seed}" if seed is not None else "")
                           + f", here is step {self.engine.step} with seed {self.engine.seed}; "
                           "is the configuration the same on both sides, and does it still hold the history of the run?")
        self.rebuilt = True
        self.console.line(f"worker: at step {self.engine.step}, the coordinator at step {step}: rebuilding from the beginning")
        self._begin_again()

    def _begin_again(self, state=None):
        self.engine.load(state or egg_model.initial_state(self.cfg))
        self.changed, self.told_step, self.stated = 0, -1, None

    def _state(self, link):
        """The digest of this step's state, which goes with every request; b"" with version 1."""
        if link.version == V1:
            return b""
        if self.stated is None or self.stated[0] != self.engine.step:
            self.stated = self.engine.step, self.engine.digest()
        return STATED.pack(self.stated[1])

    def _load(self, link, step):
        """Takes over the coordinator's snapshot of this step; whether it was good. Without it the run is replayed as far."""
        data, total = bytearray(), 1
        while len(data) < total:
            link.send(link.frame(SNAPSHOT_REQUEST, BLOCK_REQUEST.pack(step, len(data))))
            payload = link.next(SNAPSHOT_DATA)
            its_step, total, offset = BLOCK_HEAD.unpack_from(payload)
            if (its_step, offset) != (step, len(data)) or total > egg_snapshot.most_bytes(self.cfg) or len(payload) == BLOCK_HEAD.size and total:
                raise NetError(f"{link.name}: a piece of a snapshot that was not asked for")
            data += payload[BLOCK_HEAD.size:]
        try:
            state = egg_snapshot.unpack(self.cfg, data)
        except ValueError as error:
            self.console.line(f"worker: {error}; replaying the run instead")
            return False
        self._begin_again(state)
        self.console.line(f"worker: at step {step} by a snapshot")
        return True

    def _send_snapshot(self, link, step):
        """The state of this step, in pieces."""
        if step != self.engine.step:
            raise NetError(f"{link.name}: it wants a snapshot of step {step}, here is step {self.engine.step}")
        body = egg_snapshot.pack(self.engine.state())
        for offset in range(0, len(body), BLOCK):
            link.send(link.frame(SNAPSHOT_DATA, BLOCK_HEAD.pack(step, len(body), offset), body[offset:offset + BLOCK]))

    def _work(self, link, first):
        if first == 0 and self.engine.step != self.told_step:
            self._tell(link)
            self.told_step = self.engine.step
        losses = np.empty(self.cfg.CHUNK_SIZE, np.int64)
        done = 0
        while done < losses.size:
            count = self._slice_size(losses.size - done)
            started = time.perf_counter()
            losses[done:done + count] = self.engine.evaluate(first + done, count)
            self._measure(count, time.perf_counter() - started)
            done += count
            link.check()
        packed = egg_model.pack_ternary(egg_model.chunk_fitness(losses, self.cfg))
        head = RESULT_HEAD.pack(self.engine.seed, self.engine.step, first, self.changed, int(losses.sum()), len(packed))
        link.send(link.frame(RESULT, head, packed))
        self.changed, self.rebuilt = 0, False
        self.chunks += 1
        self.console.progress(f"step {self.engine.step}: {self.chunks} chunks done, {self.speed * self.cfg.SEQ_LEN:.0f} tok/s")

    def _slice_size(self, left):
        """Even number of members: equal slices of what is left, none expected to take longer than SLICE_SECONDS."""
        slices = -(-left // self.slice)
        return min(left, -(-left // slices) + 1 & ~1)

    def _measure(self, count, seconds):
        self.speed = count / max(seconds, 1e-9)
        # grows by steps: the first slices of a device say little about the speed of large ones
        self.slice = max(2, min(int(self.speed * SLICE_SECONDS), 8 * self.slice) & ~1)

    def _tell(self, link):
        """What the worker of chunk 0 adds to the result: validation and a sample, every so many steps."""
        cfg, step = self.cfg, self.engine.step
        if cfg.DEBUG and self.tokens is not None:
            import egg_debug
            if step % egg_debug.EVERY == 0:
                egg_debug.report(cfg, self.engine, self.tokens, Console(), cfg.DEBUG_FILE)       # here, not at the coordinator
        if self.validation is not None and (self.validate_next or cfg.VALIDATE_EVERY and step % cfg.VALIDATE_EVERY == 0):
            self.validate_next = False
            nats, tokens = self.engine.validate(self.validation.windows)
            n_bytes = self.validation.n_bytes if self.validation.unit == "bits/byte" else 0
            link.send(link.frame(VALIDATION, VALIDATED.pack(step, tokens, n_bytes, nats)))
        if self.tokens is not None and cfg.SAMPLE_EVERY and step % cfg.SAMPLE_EVERY == 0:
            text = sample(cfg, self.engine, self.tokens, self.decoding).replace("\n", "\u23ce")         # one line of the log
            link.send(link.frame(LOG_MESSAGE, f"sample at step {step}: {text}".encode()[:TEXT_LIMIT]))


def sample(cfg, engine, tokens, decoding):
    """str: a piece of the data and how the model goes on from there (SPEC 10)."""
    at = engine.step * cfg.SEQ_LEN % (len(tokens) - cfg.SEQ_LEN)
    prompt = np.asarray(tokens[at:at + cfg.SAMPLE_PROMPT]).astype(np.int64)
    more = list(engine.generate(prompt, cfg.SAMPLE_TOKENS, engine.seed))
    return f"{egg_data.text(decoding, prompt)} >>> {egg_data.text(decoding, more)}"


WHICH_HOST = "give the name or address of the coordinator's machine"


def check_address(host, port):
    """Raises NetError where `host` is no name or address."""
    try:
        socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        why = reason(error) if isinstance(error, OSError) else "this is no name"
        raise NetError(f"{host} cannot be reached: {why}: {WHICH_HOST}") from None


def run_worker(cfg, host, port, engine, tokens=None, validation=None, decoding=None, *, retry=True, validate_first=False,
               console=None, access=egg_auth.Access(), protocol=0, name=None):
    """Serves the coordinator at host:port with `engine`, through interruptions, for ever; with retry=False until the coordinator
    closes, and returns the number of chunks done. The engine keeps the state it has come to.

    tokens: the training data, for samples; validation: an egg_data.Validation or None; decoding: an egg_data.Decoding or None;
    validate_first: with the first chunk 0, whatever the step; access: an egg_auth.Access; protocol: 1, 2, or 0 for 2 and then 1 where
    the coordinator closes on that (never where there is a secret or TLS); name: in the coordinator's lines, default host and device.
    Raises NetError where no coordinator can be, or one that does not fit or does not let us in."""
    console = console or Console()
    check_address(host, port)
    if protocol == V1 and (access.secret or access.tls):
        raise NetError("protocol 1 has neither secret nor TLS: leave --protocol 1 out, or the secret")
    worker = Worker(cfg, engine, tokens, validation, decoding, validate_first, console)
    card = {"role": "worker", "id": os.urandom(8).hex(), "name": name or f"{socket.gethostname()}/{engine.name}", "device": engine.name,
            "config": egg_history.kept(cfg), "data": egg_snapshot.data_digest(tokens).hex()}
    version = protocol or V2
    pause, known = BACK_OFF[0], False
    say_there = say_gone = True              # attempts that bring no answer are told once

    def heard():
        nonlocal pause, say_there, say_gone
        pause, say_there, say_gone = BACK_OFF[0], True, True

    while True:
        link = None
        try:
            link = Link(cfg, host, port, version, access, card)
            if say_there:
                say_there, say_gone = False, True
                console.line(f"worker: {engine.name}, connected to {host}:{port}" + (" (protocol 1)" if link.version == V1 else ""))
            known = True
            worker.serve(link, heard)
        except OldCoordinator:
            if not (protocol or access.secret or access.tls or version == V1):
                version = V1                 # at once, and for one connection: who closed may also have been stopped just then
                continue
            if not retry:
                raise NetError(f"{host}:{port} closed on our greeting: is it an egg coordinator, with TLS as here, of protocol 2?") from None
            if say_gone:
                console.line("worker: the coordinator closed on our greeting, trying again")
            say_gone = False
        except OSError as error:
            if not known and not isinstance(error, (ConnectionError, TimeoutError)):
                raise NetError(f"{host} cannot be reached: {reason(error)}: {WHICH_HOST}") from None
            if not retry and known:
                return worker.chunks
            if not retry:
                raise NetError(f"no coordinator at {host}:{port}: {reason(error)}") from None
            if say_gone:
                what = "the coordinator is gone" if known else f"no coordinator at {host}:{port} yet"
                console.line(f"worker: {what}, trying again")
            say_gone = False
        finally:
            if link is not None:
                link.close()
        version = protocol or V2
        time.sleep(pause * random.uniform(0.5, 1.0))
        pause = min(2 * pause, BACK_OFF[1])


def fetch_status(cfg, host, port, access=egg_auth.Access()):
    """What the coordinator at host:port tells about its run, as a dict (Coordinator.status). Raises NetError."""
    check_address(host, port)
    card = {"role": "status", "id": os.urandom(8).hex(), "name": socket.gethostname()}
    try:
        link = Link(cfg, host, port, V2, access, card)
        try:
            return json.loads(link.next(STATUS, CONNECT_TIMEOUT))
        finally:
            link.close()
    except OldCoordinator:
        raise NetError(f"{host}:{port} closed on our greeting: is it an egg coordinator, with TLS as here, of protocol 2?") from None
    except OSError as error:
        raise NetError(f"no coordinator at {host}:{port}: {reason(error)}") from None
    except ValueError:
        raise NetError(f"{host}:{port}: a status that cannot be read") from None


def describe_status(told):
    """str: a table of what fetch_status gives."""
    of = f" of {told['steps']}" if told["steps"] else ""
    facts = [f"step {told['step']}{of}, {told['chunks_done']} of {told['chunks']} chunks done, {told['tokens_per_second']:,.0f} tokens/s"]
    if told["loss"] is not None:
        facts[0] += f", loss {told['loss']:.4f}"
    if told["validation"]:
        facts[0] += ", validation {figure:.3f} {unit} at step {step}".format(**told["validation"])
    facts.append(f"kept in {told['save_dir']}" + (f", newest snapshot of step {told['snapshot']}" if told["snapshot"] else "")
                 if told["save_dir"] else "not kept")
    if told["banned"]:
        facts += [f"banned: {who}: {why}" for who, why in told["banned"].items()]
        facts.append(f"to lift a ban remove its line from {told['ban_file']}" if told["ban_file"] else "bans last until the coordinator ends")
    lines = _table(("worker", "device", "address", "state", "step", "chunks", "s/chunk", "last seen"),
                   [(w["name"], w["device"], w["address"], w["state"], str(w["step"]), str(w["chunks"]),
                     f"{w['chunk_seconds']:.3g}" if w["chunk_seconds"] else "", f"{w['last_seen']:.1f} s") for w in told["workers"]], 4)
    lines = facts + ([""] + lines if told["workers"] else ["no workers"]) + _describe_island(told.get("island"))      # none before islands
    return "\n".join(printable(line).removeprefix("  ") for line in lines)


def _describe_island(island):
    """[line] of a coordinator's place among its peers; [] where it is no island."""
    if not island:
        return []
    peers = [{k: one_line(v, 64) if type(v) is str else v for k, v in p.items()} for p in island["peers"]]
    up = sum(p["state"] == "up" for p in peers)
    name, founder = one_line(island["name"], 64), one_line(island["founder"], 64)
    first = f"island {name}, epoch {island['epoch']}, descends from {founder}, {up} of {len(peers)} peers up"
    if island["fitness"] is not None:
        first += f", fitness {island['fitness']:.4f} ({island['kind']})"
    lines = ["", first]
    for told in [told for told in island["lineage"] if told["epoch"]][-LINEAGE:]:
        source = "rejuvenated" if told["peer_step"] is None else f"the state of {one_line(told['from'], 64)} at its step {told['peer_step']}"
        lines.append(f"  epoch {told['epoch']} from step {told['step']}: {source}")
    columns = (("peer", "name", "{}"), ("address", "address", "{}"), ("state", "state", "{}"), ("descends from", "founder", "{}"),
               ("compares", "kind", "{}"), ("fitness", "fitness", "{:.4f}"), ("step", "step", "{}"), ("epoch", "epoch", "{}"), ("given", "given", "{}"), ("taken", "taken", "{}"),
               ("last seen", "last_seen", "{:.1f} s"))
    rows = [["" if p[key] is None else form.format(p[key]) for _, key, form in columns] for p in peers]
    return lines + ([""] + _table([title for title, _, _ in columns], rows, 5) if rows else [])


def _table(head, rows, words):
    """[line]: rows under their head, the first columns, of words, to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(head, *rows)]
    return ["  ".join(cell.ljust(n) if i < words else cell.rjust(n) for i, (cell, n) in enumerate(zip(row, widths))).rstrip()
            for row in (head, *rows)]
