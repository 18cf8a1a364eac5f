"""The introduction (docs/PROTOCOL.md) from both sides, without sockets. A worker, a reader of the status and an island
that calls another are the Caller, whoever is called is the Host. Each takes the other's frames and returns its answer,
(wire.Frame, fields ...)."""

import json
import os
from collections import namedtuple
from hmac import compare_digest

from cluster import auth, wire
from cluster.console import one_line
from cluster.wire import CHALLENGE, FrameError, HELLO, JOIN, PROVE, PROVED, Refused, SECRET_WANTED, WELCOME

FROM_HOST = CHALLENGE, PROVED, WELCOME
IMPOSTOR = "it does not know the secret given here: is it the right coordinator, and have both sides the same one?"


class GreetingError(Exception):
    """The other side is not the one that was meant, or wants what this side does not have."""


# What a caller states about itself in JOIN. role: "worker", "island" or "status"; id: of its process, of a new worker
# auth.user_key(), "." and more; name, device: text; config: {name: value}; data, validation: SHA-256 (bytes) of its
# training and of its held-out data, zeros if unknown
Card = namedtuple("Card", "role id name device config data validation")
UNKNOWN = Card("worker", "", "", "", {}, b"", b"")           # of a worker that speaks version 1


def read_card(text):
    """The Card in the JSON of JOIN or ISLAND, checked and safe to print. Raises FrameError."""
    try:
        card = wire.read_json(text)
        role, config = card["role"], card["config"] if card["role"] != "status" else {}
        data, validation = (bytes.fromhex(card.get(k, "")) or bytes(32) for k in ("data", "validation"))
        if role not in ("worker", "status", "island") or {len(data), len(validation)} != {32} \
                or type(config) is not dict:
            raise ValueError
        id_, name, device = (one_line(str(card.get(k, "")), 64) for k in ("id", "name", "device"))
    except (ValueError, KeyError, TypeError):
        raise FrameError("JOIN cannot be read") from None
    return Card(role, id_, name or "nameless", device or "unknown device", config, data, validation)


def read_error(payload):
    """(code, text that is safe to print) of an ERROR."""
    code, text = wire.ERROR.unpack(payload)
    return code, one_line(text.decode("utf-8", "replace"))


class _Side:
    _hello = _challenge = None         # random bytes of the caller, of the host

    def _proof(self, side):
        return auth.proof(self._secret, side, self._hello, self._challenge, self._text)


class Caller(_Side):
    """card: a dict for JSON, see Card; first: the host must prove itself first, as a new one does. welcome: the fields
    of WELCOME, once the host has let us in and proved itself; proves_first: whether it does."""

    welcome, proves_first = None, False

    def __init__(self, secret, card, first=False):
        self._secret = secret
        self._text = json.dumps(card).encode()
        self._first = first
        self._hello = os.urandom(HELLO.head.size)

    def begin(self):
        return HELLO, self._hello

    def handle(self, opcode, payload):
        """Takes a frame of the host; the answer, None without one. Raises GreetingError where the host wants a secret
        or does not know it, FrameError for a frame out of order."""
        if opcode == CHALLENGE and not self._challenge:
            self._challenge, flags = CHALLENGE.unpack(payload)
            if flags & SECRET_WANTED and not self._secret:
                raise GreetingError("it wants a secret: give both sides the same --secret-file FILE or EGG_SECRET")
            if self._secret and not flags & SECRET_WANTED:
                raise GreetingError("it has no secret, and here is one: give both sides the same one, or leave "
                                    "--secret-file and EGG_SECRET out")
            self.proves_first = bool(self._secret and flags & wire.PROVES_FIRST)
            if self._first and not self.proves_first:
                raise GreetingError("it does not prove itself first, as it did before: an impostor, or an older "
                                    "version of egg; start this worker again if you have changed the coordinator")
            return (PROVE,) if self.proves_first else self._join()
        if opcode == PROVED and self.proves_first:
            if not compare_digest(payload, auth.early_proof(self._secret, self._hello, self._challenge)):
                raise GreetingError(IMPOSTOR)
            return self._join()
        if opcode == WELCOME and self._challenge and not self.welcome:
            fields = WELCOME.unpack(payload)
            if not compare_digest(fields.proof, self._proof(b"coordinator")):
                raise GreetingError(IMPOSTOR)
            self.welcome = fields
            return None
        raise FrameError(f"{wire.name(opcode)} before the introduction is complete")

    def _join(self):
        return JOIN, self._proof(b"worker"), self._text


class Host(_Side):
    """card: the Card of the caller, once it is there and proved; proved: the host has proved itself first."""

    card, proved = None, False

    def __init__(self, secret):
        self._secret = secret
        self._challenge = os.urandom(HELLO.head.size)

    def handle(self, opcode, payload):
        """Takes a frame of the caller; the answer, None without one. Raises FrameError."""
        if opcode == HELLO and not self._hello:
            self._hello = payload
            flags = SECRET_WANTED | wire.PROVES_FIRST if self._secret else 0
            return CHALLENGE, self._challenge, flags
        if opcode == PROVE and self._hello and self._secret and not self.proved:
            self.proved = True
            return PROVED, auth.early_proof(self._secret, self._hello, self._challenge)
        if opcode == JOIN and self._hello:
            proof, self._text = JOIN.unpack(payload)
            if not compare_digest(proof, self._proof(b"worker")):
                raise Refused("wrong secret", wire.NO_ACCESS)
            self.card = read_card(self._text)
            return None
        raise FrameError(f"{wire.name(opcode)} before the introduction is complete")

    def welcome(self, *fields):
        """The WELCOME with these fields behind the proof."""
        return WELCOME, self._proof(b"coordinator"), *fields
