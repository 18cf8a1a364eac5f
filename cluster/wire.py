"""Frames: what coordinators, workers and islands send to each other, byte by byte (docs/PROTOCOL.md). Version 1 is for
C++ peers; version 2 adds what a cluster among strangers needs."""

import json
import math
import struct
from typing import NamedTuple

from cluster import history
from model import ternary

MAGIC, V1, V2 = b"JOBS", 1, 2
HEADER = struct.Struct(">4sBBI")         # magic, version, opcode, bytes of payload

# both versions
JOB_REQUEST, RESULT, JOB_RESPONSE, LOG_MESSAGE = 0, 1, 2, 3
VALIDATION = 16                          # ours: C++ peers ignore it
# version 2
HELLO, CHALLENGE, JOIN, WELCOME, ERROR, HEARTBEAT = 32, 33, 34, 35, 36, 37
PROVE, PROVED = 47, 48                   # the worker asks the coordinator to prove itself first, and it does
REBUILD, SNAPSHOT_WANTED, SNAPSHOT_DATA, SNAPSHOT_REQUEST, STATUS = 38, 39, 40, 41, 42
ISLAND, STANDING, STATE_REQUEST, STATE = 43, 44, 45, 46      # between islands
HASH_WANTED, STATE_HASH = 49, 50         # workers that do not know these ignore them
NAMES = {v: k for k, v in list(globals().items()) if type(v) is int and k not in ("V1", "V2")}

REQUEST = struct.Struct(">QQQ")          # seed, step, 0
STATED = struct.Struct(">16s")           # version 2 adds: digest of the state at this step (model.state_digest)
STATED_REQUEST = struct.Struct(REQUEST.format + STATED.format[1:])
RESPONSE = struct.Struct(">QQQI")        # seed, step, first member, bytes of fitness (version 2: zstd) that follow
RESULT_HEAD = struct.Struct(">QQQQqI")   # seed, step, first member, weights changed, sum of losses, bytes of fitness
VALIDATED = struct.Struct(">QQQd")       # step, tokens predicted, bytes they stand for (0: unknown), nats
NONCE = struct.Struct(">32s")            # HELLO: random bytes of the worker
CHALLENGED = struct.Struct(">32sB")      # CHALLENGE: random bytes of the coordinator; flags: SECRET_WANTED, ...
SECRET_WANTED, PROVES_FIRST = 1, 2       # the coordinator has a secret; it answers PROVE
PROOF = struct.Struct(">32s")            # PROVED: the coordinator's proof; JOIN: the worker's, JSON follows
WELCOMED = struct.Struct(">32s32s32sQQ")   # WELCOME: the coordinator's proof and what is in a greeting.Welcome
FAILED = struct.Struct(">H")             # ERROR: code; text follows
STEP = struct.Struct(">Q")               # REBUILD (to begin from its snapshot; 0: none), SNAPSHOT_WANTED, HASH_WANTED
STEP_HASH = struct.Struct(">Q32s")       # STATE_HASH: step, BLAKE2b of the state (cluster.snapshots.state_hash)
BLOCK_HEAD = struct.Struct(">QQQ")       # SNAPSHOT_DATA: step, bytes of the whole, offset of those that follow
BLOCK_REQUEST = struct.Struct(">QQ")     # SNAPSHOT_REQUEST: step, offset
STATE_WANTED = struct.Struct(">32sQI")   # STATE_REQUEST: SHA-256 of the state, offset in its snapshot file, most bytes
STATE_HEAD = struct.Struct(">32sQQ")     # STATE: SHA-256 of the state, bytes of the file (0: none), offset of these

EMPTY = struct.Struct("")
STEP_LIMIT = 1 << 48                     # no run has so many steps
NOTHING = (1 << 64) - 1                  # first member of a response that hands out nothing
TEXT_LIMIT = 1 << 14                     # bytes of a log message
OTHER_LIMIT = 1 << 12                    # bytes of ERROR, and of unknown frames: newer peers may send some
JOIN_LIMIT = 1 << 13                     # bytes of the JSON in JOIN
STATUS_LIMIT = 1 << 22                   # bytes of a status
BLOCK = 1 << 16                          # bytes of a snapshot in one frame
STANDING_LIMIT = 1 << 10                 # bytes of a standing
JSON_DEPTH = 8                           # levels of lists and objects in JSON of a peer

# codes of ERROR
BAD_FRAME, NO_ACCESS, OTHER_CONFIG, OTHER_DATA, BANNED, FULL, ITSELF = 1, 2, 3, 4, 5, 6, 7


class FrameError(Exception):
    """A frame that cannot be right. The connection it came on is closed, with an ERROR of this code."""
    code = BAD_FRAME


class Refused(FrameError):
    """A peer that may not take part, though its frames are right."""

    def __init__(self, why, code=BAD_FRAME):
        super().__init__(why)
        self.code = code


def read_json(data):
    """The object in UTF-8 JSON of a peer, safe to compare, to compute with and to encode again. Raises ValueError for
    anything but an object, lone surrogates, numbers beyond 64 bits or not finite, and more than JSON_DEPTH levels."""
    def number(text):
        value = math.inf if len(text) >= 400 else int(text) if text.lstrip("-").isdigit() else float(text)
        if not abs(value) < (1 << 64 if type(value) is int else math.inf):
            raise ValueError(f"a number that is too large: {text[:20]}")
        return value

    def levels(value):
        inner = value.values() if type(value) is dict else value if type(value) is list else ()
        return 1 + max(map(levels, inner), default=0)

    try:
        found = json.loads(str(data, "utf-8"), parse_int=number, parse_float=number, parse_constant=number)
        json.dumps(found, ensure_ascii=False).encode()       # UnicodeEncodeError, a ValueError, for a lone surrogate
        if levels(found) > JSON_DEPTH:
            raise RecursionError
    except RecursionError:
        raise ValueError("too many levels") from None
    if type(found) is not dict:
        raise ValueError("not an object")
    return found


def frame(opcode, *parts, version=V1):
    payload = b"".join(parts)
    return HEADER.pack(MAGIC, version, opcode, len(payload)) + payload


def limits(cfg):
    """{version: {opcode: (least, most) bytes of payload}} of every known frame; others may have OTHER_LIMIT bytes."""
    def sizes(table):                    # {opcode: (struct, most bytes that follow it)}
        return {opcode: (head.size, head.size + most) for opcode, (head, most) in table.items()}

    pairs, chunk = (ternary.packed_size(n) for n in (cfg.N_PAIRS, cfg.CHUNK_SIZE // 2))
    v1 = {JOB_REQUEST: (REQUEST, 0), RESULT: (RESULT_HEAD, chunk), JOB_RESPONSE: (RESPONSE, pairs),
          LOG_MESSAGE: (EMPTY, TEXT_LIMIT), VALIDATION: (VALIDATED, 0)}
    v2 = {**v1, JOB_REQUEST: (STATED_REQUEST, 0), JOB_RESPONSE: (RESPONSE, history.most_body(cfg)),
          HELLO: (NONCE, 0), CHALLENGE: (CHALLENGED, 0), PROVE: (EMPTY, 0), PROVED: (PROOF, 0),
          JOIN: (PROOF, JOIN_LIMIT), WELCOME: (WELCOMED, 0), ERROR: (FAILED, OTHER_LIMIT - FAILED.size),
          HEARTBEAT: (EMPTY, 0), STATUS: (EMPTY, STATUS_LIMIT), REBUILD: (STEP, 0), SNAPSHOT_WANTED: (STEP, 0),
          HASH_WANTED: (STEP, 0), STATE_HASH: (STEP_HASH, 0), SNAPSHOT_DATA: (BLOCK_HEAD, BLOCK),
          SNAPSHOT_REQUEST: (BLOCK_REQUEST, 0), ISLAND: (EMPTY, JOIN_LIMIT), STANDING: (EMPTY, STANDING_LIMIT),
          STATE_REQUEST: (STATE_WANTED, 0), STATE: (STATE_HEAD, BLOCK)}
    return {V1: sizes(v1), V2: sizes(v2)}


# the frames that a worker or a reader of the status takes
FROM_COORDINATOR = {V1: (JOB_RESPONSE,), V2: (JOB_RESPONSE, CHALLENGE, PROVED, WELCOME, ERROR, REBUILD, SNAPSHOT_WANTED,
                                              HASH_WANTED, SNAPSHOT_DATA, STATUS)}
# the frames that a coordinator takes: from a peer that it does not know yet, from workers, from an island that it has
# called until that has let it in, and from islands
FROM_WORKERS = (JOB_REQUEST, RESULT, LOG_MESSAGE, VALIDATION)
FROM_ARRIVAL = {V1: FROM_WORKERS, V2: (HELLO, PROVE, JOIN)}
FROM_WORKER = {V1: {V1: FROM_WORKERS},
               V2: {V2: (*FROM_WORKERS, HEARTBEAT, SNAPSHOT_DATA, SNAPSHOT_REQUEST, STATE_HASH)}}
FROM_CALLED = {V2: (CHALLENGE, PROVED, WELCOME, ISLAND, ERROR)}
FROM_ISLAND = {V2: (STANDING, STATE_REQUEST, STATE, ERROR)}


def only(every, frames):
    """The `limits` of these frames, {version: opcodes}."""
    return {version: {k: every[version][k] for k in opcodes} for version, opcodes in frames.items()}


def name(opcode):
    return NAMES.get(opcode, f"opcode {opcode}")


def whole_frame(buffer, allowed):
    """(version, opcode, bytes of payload) of the first frame in a bytearray, None while it is incomplete. Raises
    FrameError, as soon as the header has come, for one that cannot be right. allowed: as `limits` gives it."""
    if len(buffer) < HEADER.size:
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
    return (version, opcode, size) if len(buffer) >= HEADER.size + size else None


def next_frame(buffer, allowed):
    """Takes the first whole frame out of a bytearray: (version, opcode, payload), or None; see whole_frame."""
    if (found := whole_frame(buffer, allowed)) is None:
        return None
    version, opcode, size = found
    payload = bytes(buffer[HEADER.size:HEADER.size + size])
    del buffer[:HEADER.size + size]
    return version, opcode, payload


class Result(NamedTuple):
    """A RESULT. updates: weights changed by the worker's last update, 0 where it has reported them already; packed:
    bytes of ternary fitness (SPEC 8)."""
    step: int
    chunk: int
    updates: int
    sum_loss: int
    packed: bytes


def read_result(cfg, n_weights, payload):
    """The Result in a frame, of a model of n_weights weights. Raises FrameError for one that cannot be right."""
    _, step, position, updates, sum_loss, size = RESULT_HEAD.unpack_from(payload)
    packed = payload[RESULT_HEAD.size:]
    if size != len(packed):
        raise FrameError(f"wrong length: RESULT says {size} bytes of fitness and carries {len(packed)}")
    chunk, rest = divmod(position, cfg.CHUNK_SIZE)
    if rest or chunk >= cfg.N_CHUNKS:
        raise FrameError(f"wrong chunk: RESULT for member {position}, chunks begin at multiples of {cfg.CHUNK_SIZE} "
                         f"below {cfg.POPULATION_SIZE}")
    try:
        ternary.check(packed, cfg.CHUNK_SIZE // 2)
    except ValueError as error:
        raise FrameError(f"wrong fitness: {error}") from None
    # a logit is an int32 shifted by SHIFT_LOGIT; the logarithm of its sum adds no more than -1 to 128 half units
    tokens, most = cfg.CHUNK_SIZE * cfg.SEQ_LEN * cfg.LOSS_SCALE, 1 << 32 - min(cfg.SHIFT_LOGIT, 8)
    if not -16 * tokens <= sum_loss <= min(tokens * most, (1 << 62) // cfg.N_CHUNKS) or updates > n_weights:
        raise FrameError(f"wrong figures: sum of losses {sum_loss}, {updates} weights changed of {n_weights}")
    return Result(step, chunk, updates, sum_loss, packed)
