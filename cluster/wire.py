"""Frames: what coordinators and workers send to each other, byte by byte (docs/PROTOCOL.md). Version 1 is for C++
peers; version 2 adds what a cluster needs."""

import functools
import json
import re
import struct
from collections import namedtuple

from cluster import history
from model import steps

MAGIC = b"JOBS"
V1 = 1
V2 = 2
HEADER = struct.Struct(">4sBBI")         # magic, version, opcode, bytes of payload
DIGEST = 16                              # bytes of a state's digest (model.parameters.Digest)

NOTHING = (1 << 64) - 1                  # first member of a response that hands out nothing
OTHER_LIMIT = 1 << 12                    # bytes of ERROR, and of unknown frames: newer peers may send some
BLOCK = 1 << 16                          # bytes of a snapshot in one frame
JSON_DEPTH = 8                           # levels of lists and objects in JSON of a peer


Received = namedtuple("Received", "version opcode payload")          # a whole frame


class Frame(int):
    """The opcode of a frame. layout: "name:format" (of `struct`) of every field, and then the name of the bytes that
    follow the fields, if any may: up to `most` of them, or most(cfg)."""

    def __new__(cls, opcode, layout="", most=0):
        self = super().__new__(cls, opcode)
        forms = re.findall(r":(\w+)", layout)
        self.most = most
        self.head = struct.Struct(">" + "".join(forms))
        self._names = re.sub(r":\w+", "", layout).split()
        self._fixed = len(forms)
        return self

    @functools.cached_property
    def _make(self):
        return namedtuple("Fields", self._names)._make

    def parts(self, *fields):
        """[bytes] that make the payload with these fields."""
        return [self.head.pack(*fields[:self._fixed]), *fields[self._fixed:]]

    def unpack(self, payload):
        """The fields of a payload, by name."""
        fields = self.head.unpack_from(payload)
        return self._make((*fields, payload[self.head.size:]) if len(self._names) > self._fixed else fields)


# both versions
JOB_REQUEST = Frame(0, "seed:Q step:Q zero:Q digest")            # digest: of the state at this step; version 2 alone
# updates: weights changed by the worker's last update, 0 where it has reported them; packed: digits (SPEC 8)
RESULT = Frame(1, "seed:Q step:Q first:Q updates:Q sum_loss:q size:I packed",
               lambda cfg: cfg.CHUNK_BYTES)
# first: a member; packed: the bytes of a step (steps.join_digits), compressed by zstd in version 2
JOB_RESPONSE = Frame(2, "seed:Q step:Q first:Q size:I packed", lambda cfg: cfg.STEP_BYTES)
LOG_MESSAGE = Frame(3, "text", 1 << 14)
VALIDATION = Frame(16, "step:Q tokens:Q bytes:Q nats:d")         # bytes: of these tokens, 0: unknown; C++ ignores it
# version 2
HELLO = Frame(32, "random:32s")                      # of the worker
CHALLENGE = Frame(33, "random:32s flags:B")          # of the coordinator; flags: SECRET_WANTED, or 0
JOIN = Frame(34, "proof:32s card", 1 << 13)          # card: JSON
WELCOME = Frame(35, "proof:32s config:32s data:32s step:Q snapshot:Q")       # config, data: digests
ERROR = Frame(36, "code:H text", OTHER_LIMIT - 2)
HEARTBEAT = Frame(37)
REBUILD = Frame(38, "step:Q")                        # of the snapshot to begin from (0: none)
SNAPSHOT_WANTED = Frame(39, "step:Q")
SNAPSHOT_DATA = Frame(40, "step:Q total:Q offset:Q piece", BLOCK)            # total: bytes of the whole
SNAPSHOT_REQUEST = Frame(41, "step:Q offset:Q")
STATUS = Frame(42, "json", 1 << 22)
# The worker wants the coordinator to prove itself first; name: that of its key, empty if it has the secret itself
PROVE = Frame(47, "name", 64)
PROVED = Frame(48, "proof:32s")
# of the unperturbed model on held-out prompts, with an objective; json: what else is shown, see Progress.rewarded
REWARD = Frame(51, "step:Q texts:Q reward:d json", 1 << 17)
MEASURE = Frame(52)                                  # validate, sample: the run ends with this state
SPENT = Frame(53, "idle:d receiving:d")              # seconds of this connection that a worker waited, and received
# what the bytes of the present step will say (model.steps): with LOCAL_STEPS, before a chunk
COOLING = Frame(54, "cooling:B")
NAMES = {value: name for name, value in globals().items() if type(value) is Frame}
SECRET_WANTED = 3                        # in CHALLENGE: the coordinator has a secret, and answers PROVE

# codes of ERROR
BAD_FRAME = 1
NO_ACCESS = 2
OTHER_CONFIG = 3
OTHER_DATA = 4
BANNED = 5
FULL = 6
ENDED = 7


class FrameError(Exception):
    """A frame that cannot be right. The connection it came on is closed, with an ERROR of this code."""

    def __init__(self, why, code=BAD_FRAME):
        super().__init__(why)
        self.code = code


class Refused(FrameError):
    """A peer that may not take part, though its frames are right."""


def read_json(data):
    """The object in UTF-8 JSON of a peer, safe to compare, to compute with and to encode again. Raises ValueError for
    anything but an object, lone surrogates, numbers beyond 64 bits or not finite, and more than JSON_DEPTH levels."""
    def whole(text):
        if abs(value := int(text)) >= 1 << 64:
            raise ValueError(f"a number that is too large: {text[:20]}")
        return value

    def levels(value):
        inner = value.values() if type(value) is dict else value if type(value) is list else ()
        return 1 + max(map(levels, inner), default=0)

    try:
        decoded = json.loads(str(data, "utf-8"), parse_int=whole)
        # ValueError for a number that is not finite, and UnicodeEncodeError, another one, for a lone surrogate
        json.dumps(decoded, ensure_ascii=False, allow_nan=False).encode()
        if levels(decoded) > JSON_DEPTH:
            raise RecursionError
    except RecursionError:
        raise ValueError("too many levels") from None
    if type(decoded) is not dict:
        raise ValueError("not an object")
    return decoded


def pieces(opcode, *fields, version=V1):
    """[bytes] that make a Frame with these fields; what follows them comes last, and is not copied."""
    head, *rest = opcode.parts(*fields)
    return [HEADER.pack(MAGIC, version, opcode, len(head) + sum(map(len, rest))) + head, *rest]


def frame(*fields, **version):
    """bytes of a Frame; see `pieces`."""
    return b"".join(pieces(*fields, **version))


def limits(cfg):
    """{version: {opcode: (least, most) bytes of payload}} of every known frame; others may have OTHER_LIMIT bytes."""
    sizes = {kind: (kind.head.size, kind.head.size + (kind.most(cfg) if callable(kind.most) else kind.most))
             for kind in NAMES}
    request = JOB_REQUEST.head.size + DIGEST
    response = JOB_RESPONSE.head.size
    return {V1: sizes, V2: {**sizes, JOB_REQUEST: (request, request),
                            JOB_RESPONSE: (response, response + history.most_body(cfg))}}


# the frames that a worker or a reader of the status takes
FROM_COORDINATOR = {V1: (JOB_RESPONSE,), V2: (JOB_RESPONSE, CHALLENGE, PROVED, WELCOME, ERROR, REBUILD, SNAPSHOT_WANTED,
                                              SNAPSHOT_DATA, STATUS, MEASURE, COOLING)}
# the frames that a coordinator takes, from a peer that it does not know yet and from those that it does
FROM_WORKERS = (JOB_REQUEST, RESULT, LOG_MESSAGE, VALIDATION)
FROM_ARRIVAL = {V1: FROM_WORKERS, V2: (HELLO, PROVE, JOIN)}
FROM_WORKER = {V1: FROM_WORKERS,
               V2: (*FROM_WORKERS, HEARTBEAT, SNAPSHOT_DATA, SNAPSHOT_REQUEST, REWARD, SPENT)}


def only(every, frames):
    """The `limits` of these frames, {version: opcodes}."""
    return {version: {k: every[version][k] for k in opcodes} for version, opcodes in frames.items()}


def name(opcode):
    return NAMES.get(opcode, f"opcode {opcode}")


def next_frame(buffer, allowed):
    """Takes the first frame out of a hub.Inbox: a Received, or None while it is incomplete. Raises FrameError, as soon
    as the header has come, for one that cannot be right. allowed: as `limits` gives it."""
    if buffer.lacks > 0 or len(buffer) < HEADER.size:
        return None
    magic, version, opcode, size = HEADER.unpack_from(buffer)
    if magic != MAGIC:
        raise FrameError("wrong magic: not an egg peer")
    if version not in allowed:
        raise FrameError(f"protocol version {version}, here {' or '.join(map(str, allowed))}")
    least, most = allowed[version].get(opcode, (0, OTHER_LIMIT))
    if not least <= size <= most:
        sizes = f"{least}" if least == most else f"{least} to {most}"
        hint = " (another CHUNK_SIZE or POPULATION_SIZE there?)" if opcode in (RESULT, JOB_RESPONSE) else ""
        raise FrameError(f"wrong length: {name(opcode)} of {size} bytes, allowed {sizes}{hint}")
    end = HEADER.size + size
    if len(buffer) < end:
        buffer.lacks = end - len(buffer)
        return None
    payload = bytes(memoryview(buffer)[HEADER.size:end])     # copied once
    del buffer[:end]
    return Received(version, opcode, payload)


def read_result(cfg, n_weights, payload):
    """(the fields of a RESULT, its chunk), of a model of n_weights weights. Raises FrameError for one that cannot be
    right."""
    result = RESULT.unpack(payload)
    if result.size != len(result.packed):
        raise FrameError(f"wrong length: RESULT says {result.size} bytes of fitness and carries {len(result.packed)}")
    chunk, rest = divmod(result.first, cfg.CHUNK_SIZE)
    if rest or chunk >= cfg.N_CHUNKS:
        raise FrameError(f"wrong chunk: RESULT for member {result.first}, chunks begin at multiples of "
                         f"{cfg.CHUNK_SIZE} below {cfg.POPULATION_SIZE}")
    try:
        steps.check_digits(result.packed, cfg.CHUNK_DIGITS, cfg.DIGIT_VALUES)
    except ValueError as error:
        raise FrameError(f"wrong fitness: {error}") from None
    # a logit is an int32 shifted by SHIFT_LOGIT; the logarithm of its sum adds no more than -1 to 128 half units
    tokens = cfg.CHUNK_SIZE * cfg.SEQ_LEN * cfg.LOCAL_STEPS * cfg.LOSS_SCALE
    most = 1 << 32 - min(cfg.SHIFT_LOGIT, 8)
    if (not -16 * tokens <= result.sum_loss <= min(tokens * most, (1 << 62) // cfg.N_CHUNKS)
            or result.updates > n_weights):
        raise FrameError(f"wrong figures: sum of losses {result.sum_loss}, {result.updates} weights changed of "
                         f"{n_weights}")
    return result, chunk
