"""Secrets and keys, the introduction by which both sides prove them, TLS, and the addresses that are safe to listen on
(docs/SECURITY.md, docs/PROTOCOL.md). The introduction has no sockets: `caller` is the side of a worker, a reader of the
status and an island that calls another, `host` that of the coordinator. Both are generators, which yield their frames,
(wire.Frame, fields ...), and are sent the answers, (opcode, payload)."""

import functools
import hashlib
import hmac
import ipaddress
import json
import os
import re
import shlex
import ssl
import sys
from collections import namedtuple
from hmac import compare_digest

from cluster import wire
from cluster.console import one_line
from cluster.wire import CHALLENGE, FrameError, HELLO, JOIN, PROVE, PROVED, Refused, SECRET_WANTED, WELCOME
from egg_config import UsageError, explained

LEAST_SECRET = 16          # bytes
HANDSHAKE_SECONDS = 10.0   # a peer may take so long from connecting to being let in
KEY = re.compile(rb"([!-~]{1,64}) ([0-9a-f]{64})")         # the line that `egg.py key` prints: a name and its proof
FROM_HOST = CHALLENGE, PROVED, WELCOME


class AuthError(UsageError):
    """About a secret, a certificate or an address that is not safe to listen on."""


# How to meet peers. secret: bytes, b"" for none; tls: an ssl.SSLContext or None; insecure: anybody may connect; name:
# the secret is the key of this name, "" for the secret itself
Access = namedtuple("Access", "secret tls insecure name", defaults=[b"", None, False, ""])


# --- secrets and keys -------------------------------------------------------------------------------------------------

def read_secret(path=None, environ=os.environ):
    """(secret, name) of the file `path`, or else of EGG_SECRET: bytes, b"" where neither is given, and the name of a
    key, "" for the secret itself. Raises AuthError."""
    if path is not None:
        with explained(AuthError, f"--secret-file {path}", "name a file that can be read"), open(path, "rb") as file:
            secret = file.read(1 << 16).strip()
            if os.fstat(file.fileno()).st_mode & 0o077:
                print(f"egg: others on this machine may read or change {path}: chmod 600 {shlex.quote(str(path))}",
                      file=sys.stderr, flush=True)
    elif "EGG_SECRET" in environ:
        secret = environ["EGG_SECRET"].encode("utf-8", "surrogateescape").strip()
    else:
        return b"", ""
    if key := KEY.fullmatch(secret):
        return bytes.fromhex(key[2].decode()), key[1].decode()
    if len(secret) < LEAST_SECRET:
        raise AuthError(f"{path or 'EGG_SECRET'} holds {len(secret)} bytes, a secret needs {LEAST_SECRET}: make one "
                        "with `openssl rand -hex 32`")
    return secret, ""


def whole_secret(path=None):
    """bytes of the secret itself, b"" without one. Raises AuthError for the key of a worker."""
    secret, name = read_secret(path)
    if name:
        raise AuthError(f"{path or 'EGG_SECRET'} holds the key of the worker {name}: this command needs the secret")
    return secret


@functools.cache
def stretched(secret):
    """32 bytes, which take some 50 ms and 16 MiB to make of a guessed secret; b"" without one."""
    return secret and hashlib.scrypt(secret, salt=b"egg 2 coordinator first", n=1 << 14, r=8, p=1, dklen=32)


def key_of(secret, name):
    """32 bytes: the key with which a worker of this name, and of no other, is let in. The secret does not follow from
    it. Raises AuthError for a name that cannot be one."""
    if not KEY.fullmatch(f"{name} {'0' * 64}".encode("utf-8", "replace")):
        raise AuthError(f"{name!r} cannot be the name of a key: 1 to 64 ASCII characters without spaces")
    return hmac.digest(stretched(secret), b"egg 2 key\0" + name.encode(), "sha256")


def page_password(secret):
    """The password of the live page: nobody finds the secret by it."""
    return hmac.digest(stretched(secret), b"egg 2 page", "sha256").hex()[:32] if secret else ""


# --- the introduction -------------------------------------------------------------------------------------------------

IMPOSTOR = "it does not know the secret given here: is it the right coordinator, and have both sides the same one?"


# What a caller states about itself in JOIN. role: "worker", "island" or "status"; id: of its process; name, device:
# text; config: {name: value}; data, validation: SHA-256 (bytes) of its training and of its held-out data, zeros if
# unknown; same: {name: digest} of what else all workers must have alike
Card = namedtuple("Card", "role id name device config data validation same")
UNKNOWN = Card("worker", "", "", "", {}, b"", b"", {})       # of a worker that speaks version 1


def read_card(text):
    """The Card in the JSON of JOIN, checked and safe to print. Raises FrameError."""
    try:
        card = wire.read_json(text)
        role, config = card["role"], card["config"] if card["role"] != "status" else {}
        same = {one_line(name, 128): str(digest) for name, digest in card.get("same", {}).items()}
        data, validation = (bytes.fromhex(card.get(k, "")) or bytes(32) for k in ("data", "validation"))
        if role not in ("worker", "status", "island") or {len(data), len(validation)} != {32} \
                or type(config) is not dict:
            raise ValueError
        id_, name, device = (one_line(str(card.get(k, "")), 64) for k in ("id", "name", "device"))
    except (ValueError, KeyError, TypeError, AttributeError):
        raise FrameError("JOIN cannot be read") from None
    return Card(role, id_, name or "nameless", device or "unknown device", config, data, validation, same)


def read_error(payload):
    """(code, text that is safe to print) of an ERROR."""
    code, text = wire.ERROR.unpack(payload)
    return code, one_line(text.decode("utf-8", "replace"))


def _proof(secret, side, randoms, text):
    """32 bytes that only who knows the secret can make. side: b"worker" or b"coordinator"; randoms: bytes of the
    caller and of the host; text: of JOIN."""
    return hmac.digest(secret, b"egg 2 " + side + b"\0" + randoms + hashlib.sha256(text).digest(), "sha256")


def _first_proof(secret, name, randoms):
    """32 bytes by which the coordinator proves itself before the caller does. A key is no guess, so it needs no
    stretching."""
    return hmac.digest(secret if name else stretched(secret), b"egg 2 coordinator first\0" + randoms, "sha256")


def _fields(kind, received):
    """The fields of a frame that was sent to a generator, which must be of this kind. Raises FrameError."""
    opcode, payload = received
    if opcode != kind:
        raise FrameError(f"{wire.name(opcode)} before the introduction is complete")
    return kind.unpack(payload)


def caller(access, card):
    """The side of a caller, which ends when it is let in. A host with a secret proves itself before we do. card: a dict
    for JSON, see Card. Raises FrameError where the host wants a secret or does not know it, and for a frame out of
    order."""
    secret, name = access.secret, access.name
    text = json.dumps({**card, "name": name} if name else card).encode()
    hello = os.urandom(HELLO.head.size)
    challenge, flags = _fields(CHALLENGE, (yield HELLO, hello))
    randoms = hello + challenge
    if flags and not secret:
        raise FrameError("it wants a secret: give both sides the same --secret-file FILE or EGG_SECRET")
    if secret and not flags:
        raise FrameError("it has no secret, and here is one: give both sides the same one, or leave --secret-file and "
                         "EGG_SECRET out")
    if secret:
        proved = _fields(PROVED, (yield PROVE, name.encode()))
        if not compare_digest(proved.proof, _first_proof(secret, name, randoms)):
            raise FrameError(IMPOSTOR)
    welcome = _fields(WELCOME, (yield JOIN, _proof(secret, b"worker", randoms, text), text))
    if not compare_digest(welcome.proof, _proof(secret, b"coordinator", randoms, text)):
        raise FrameError(IMPOSTOR)


def host(secret):
    """The side of a coordinator, which is sent the first frame; returns (the Card of the caller, whose key it has, ""
    for the secret itself, the proof for WELCOME). Raises FrameError."""
    hello, = _fields(HELLO, (yield))
    challenge, name = os.urandom(HELLO.head.size), ""
    randoms = hello + challenge
    came = yield CHALLENGE, challenge, SECRET_WANTED if secret else 0
    if came[0] == PROVE and secret:
        if name := came[1].decode("ascii", "replace"):
            try:
                secret = key_of(secret, name)
            except AuthError as error:
                raise FrameError(str(error)) from None
        came = yield PROVED, _first_proof(secret, name, randoms)
    proof, text = _fields(JOIN, came)
    if not compare_digest(proof, _proof(secret, b"worker", randoms, text)):
        raise Refused("wrong secret", wire.NO_ACCESS)
    card = read_card(text)
    if name and (card.name != name or card.role == "island"):
        raise Refused(f"the key of {name} lets in a worker of that name", wire.NO_ACCESS)
    return card, name, _proof(secret, b"coordinator", randoms, text)


# --- this machine: addresses, TLS -------------------------------------------------------------------------------------

def is_loopback(host):
    """Whether an address (or the name localhost) is reached from this machine alone."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def listen_host(host, access):
    """The address a coordinator listens on: `host`; without one every address if there is a secret, else loopback.
    Raises AuthError where anybody could connect and --insecure was not given."""
    if host is None:
        return "0.0.0.0" if access.secret or access.insecure else "127.0.0.1"
    if not (access.secret or access.insecure or is_loopback(host)):
        raise AuthError(f"--host {host} without a secret would let anybody in: give --secret-file FILE (or EGG_SECRET) "
                        "here and to every worker, or --insecure on a network where everybody is trusted")
    return host


def server_tls(cert, key, ca=None):
    """The ssl.SSLContext of a coordinator, None without `cert`. ca: certificates of the signers of workers'."""
    return _tls(ssl.PROTOCOL_TLS_SERVER, cert and key, "both --tls-cert and --tls-key at the coordinator",
                cert, key, ca)


def client_tls(ca, cert=None, key=None):
    """The ssl.SSLContext of a worker that trusts coordinators signed by `ca`; None without."""
    return _tls(ssl.PROTOCOL_TLS_CLIENT, ca, "--tls-ca at the worker: the certificate of the coordinator, or of its "
                "signer", cert, key, ca)


def _tls(kind, complete, needs, cert, key, ca):
    if cert is key is ca is None:
        return None
    if not complete:
        raise AuthError(f"TLS needs {needs}")
    context = ssl.SSLContext(kind)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    if cert is not None:
        with explained(AuthError, f"{cert}, {key}", "give PEM files, --tls-key the key of --tls-cert"):
            context.load_cert_chain(cert, key)
    if ca is not None:
        with explained(AuthError, ca, "give --tls-ca a certificate, PEM"):
            context.load_verify_locations(ca)
        context.verify_mode = ssl.CERT_REQUIRED
    return context
