"""Who may take part: the shared secret, the proofs of knowing it, TLS, how much one address may ask for, and who is banned.

Both sides send 32 random bytes and prove with HMAC-SHA256 over both, and over what the worker said about itself, that they know the
secret. Fresh random bytes on either side make a recorded proof worthless, and the side is part of what is signed, so that a proof
cannot be sent back as one's own. Without TLS whoever sits on the line can read and, after the introduction, change what passes: on
networks of others use TLS.
"""

import contextlib
import hashlib
import hmac
import ipaddress
import os
import ssl
from typing import NamedTuple

from egg_config import EggError

LEAST_SECRET = 16          # bytes
HANDSHAKE_SECONDS = 10.0   # a peer may take so long from connecting to being let in
REASONS_TOLD = 32          # refusals of one address that are logged, each reason once
ADDRESSES_TOLD = 256
BANNED_FILE = "banned.txt"  # in the save directory: identity, tab, reason


class AuthError(EggError):
    """About a secret, a certificate or an address that is not safe to listen on."""


class Access(NamedTuple):
    """How to meet peers. secret: bytes, b"" for none; tls: an ssl.SSLContext or None; insecure: strangers are welcome."""
    secret: bytes = b""
    tls: object = None
    insecure: bool = False


def read_secret(path=None, environ=os.environ):
    """bytes of the secret in the file `path`, or else in EGG_SECRET; b"" where neither is given. Raises AuthError."""
    source = path if path is not None else "EGG_SECRET"
    if path is not None:
        try:
            with open(path, "rb") as file:
                secret = file.read(1 << 16).strip()
        except OSError as error:
            raise AuthError(f"--secret-file {path}: {error.strerror}: name a file that can be read") from None
    elif "EGG_SECRET" in environ:
        secret = environ["EGG_SECRET"].encode("utf-8", "surrogateescape").strip()
    else:
        return b""
    if len(secret) < LEAST_SECRET:
        raise AuthError(f"{source} holds {len(secret)} bytes, a secret needs {LEAST_SECRET}: make one with `openssl rand -hex 32`")
    return secret


def proof(secret, side, hello, challenge, text):
    """32 bytes that only who knows the secret can make. side: b"worker" or b"coordinator"; hello, challenge: the random bytes of both;
    text: the worker's JOIN."""
    return hmac.digest(secret, b"egg 2 " + side + b"\0" + hello + challenge + hashlib.sha256(text).digest(), "sha256")


def proves(secret, given, side, hello, challenge, text):
    return hmac.compare_digest(given, proof(secret, side, hello, challenge, text))


def is_loopback(host):
    """Whether an address (or the name localhost) is reached from this machine alone."""
    try:
        return ipaddress.ip_address(host.partition("%")[0]).is_loopback
    except ValueError:
        return host == "localhost"


def listen_host(host, access):
    """The address a coordinator listens on: `host`, or without one every address where there is a secret, else loopback.

    Raises AuthError where strangers could come in and nobody said that they may."""
    if host is None:
        return "0.0.0.0" if access.secret or access.insecure else "127.0.0.1"
    if not (access.secret or access.insecure or is_loopback(host)):
        raise AuthError(f"--host {host} without a secret would let anybody in: give --secret-file FILE (or EGG_SECRET) here and to every "
                        "worker, or --insecure on a network where everybody is trusted")
    return host


def server_tls(cert, key, ca=None):
    """The ssl.SSLContext of a coordinator, None without `cert`. ca: certificates that workers must have been signed by."""
    if cert is None and key is None and ca is None:
        return None
    if cert is None or key is None:
        raise AuthError("TLS needs both --tls-cert and --tls-key at the coordinator")
    return _context(ssl.PROTOCOL_TLS_SERVER, cert, key, ca)


def client_tls(ca, cert=None, key=None):
    """The ssl.SSLContext of a worker that trusts coordinators signed by `ca`; None without."""
    if ca is None:
        if cert is not None or key is not None:
            raise AuthError("TLS needs --tls-ca at the worker: the certificate of the coordinator, or of who signed it")
        return None
    return _context(ssl.PROTOCOL_TLS_CLIENT, cert, key, ca)


def _context(kind, cert, key, ca):
    context = ssl.SSLContext(kind)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    try:
        if cert is not None:
            context.load_cert_chain(cert, key)
        if ca is not None:
            context.load_verify_locations(ca)
            context.verify_mode = ssl.CERT_REQUIRED
    except (OSError, ssl.SSLError) as error:
        names = ", ".join(str(x) for x in (cert, key, ca) if x is not None)
        raise AuthError(f"{names}: {error.strerror or error}: give PEM files, --tls-key the key of --tls-cert") from None
    return context


class Door:
    """Counts connections, and remembers what has been said about whom it refused."""

    def __init__(self, total, per_address):
        self.total, self.per_address = total, per_address
        self.count, self.by_host = 0, {}
        self._told = {}

    def enter(self, host):
        """Lets a connection in, or gives the reason why not."""
        if self.count >= self.total:
            return f"{self.total} connections are open, as many as can be"
        if self.by_host.get(host, 0) >= self.per_address:
            return f"{self.per_address} connections from one address are open, as many as may be (CONNECTIONS_PER_ADDRESS)"
        self.count += 1
        self.by_host[host] = self.by_host.get(host, 0) + 1
        return None

    def leave(self, host):
        self.count -= 1
        self.by_host[host] -= 1
        if not self.by_host[host]:
            del self.by_host[host]

    def worth_telling(self, host, reason):
        """Whether a refusal is new: a peer that tries again and again must not fill the log."""
        if host not in self._told and len(self._told) >= ADDRESSES_TOLD:
            return False
        told = self._told.setdefault(host, set())
        if reason in told or len(told) >= REASONS_TOLD:
            return False
        told.add(reason)
        return True


class Bans:
    """Who may not come back, and why. A line each in BANNED_FILE of `directory`, so that a restart forgets none; to lift a ban remove its
    line, the file is read whenever somebody comes in. What cannot be written, and without a directory all, lasts as long as this object."""

    def __init__(self, directory=None):
        self.path = os.path.join(directory, BANNED_FILE) if directory is not None else None
        self._kept = {}

    def add(self, identity, reason):
        """identity, reason: one line each."""
        try:
            if self.path is None:
                raise OSError
            with open(self.path, "a", encoding="utf-8") as file:
                file.write(f"{identity}\t{reason}\n")
                file.flush()
                os.fsync(file.fileno())
        except OSError:
            self._kept[identity] = reason

    def all(self):
        """{identity: reason}."""
        bans = dict(self._kept)
        if self.path is not None:
            with contextlib.suppress(OSError), open(self.path, encoding="utf-8", errors="replace") as file:
                bans.update(line.rstrip("\n").split("\t", 1) for line in file if "\t" in line)
        return bans
