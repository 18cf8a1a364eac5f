"""The shared secret, the proofs of knowing it, TLS, and the addresses that are safe to listen on (docs/SECURITY.md)."""

import contextlib
import functools
import hashlib
import hmac
import ipaddress
import os
import shlex
import ssl
import sys
from collections import namedtuple

from cluster import history
from egg_config import UsageError, explained

LEAST_SECRET = 16          # bytes
HANDSHAKE_SECONDS = 10.0   # a peer may take so long from connecting to being let in


class AuthError(UsageError):
    """About a secret, a certificate or an address that is not safe to listen on."""


# How to meet peers. secret: bytes, b"" for none; tls: an ssl.SSLContext or None; insecure: anybody may connect
Access = namedtuple("Access", "secret tls insecure", defaults=[b"", None, False])


def read_secret(path=None, environ=os.environ):
    """bytes of the secret in the file `path`, or else in EGG_SECRET; b"" where neither is given. Raises AuthError."""
    if path is not None:
        with explained(AuthError, f"--secret-file {path}", "name a file that can be read"), open(path, "rb") as file:
            secret = file.read(1 << 16).strip()
            if os.fstat(file.fileno()).st_mode & 0o077:
                print(f"egg: others on this machine may read or change {path}: chmod 600 {shlex.quote(str(path))}",
                      file=sys.stderr, flush=True)
    elif "EGG_SECRET" in environ:
        secret = environ["EGG_SECRET"].encode("utf-8", "surrogateescape").strip()
    else:
        return b""
    if len(secret) < LEAST_SECRET:
        raise AuthError(f"{path or 'EGG_SECRET'} holds {len(secret)} bytes, a secret needs {LEAST_SECRET}: make one "
                        "with `openssl rand -hex 32`")
    return secret


def proof(secret, side, hello, challenge, text):
    """32 bytes that only who knows the secret can make. side: b"worker" or b"coordinator"; text: the JSON of JOIN."""
    return hmac.digest(secret, b"egg 2 " + side + b"\0" + hello + challenge + hashlib.sha256(text).digest(), "sha256")


@functools.cache
def stretched(secret):
    """32 bytes, which take some 50 ms and 16 MiB to make of a guessed secret; b"" without one."""
    return secret and hashlib.scrypt(secret, salt=b"egg 2 coordinator first", n=1 << 14, r=8, p=1, dklen=32)


def early_proof(secret, hello, challenge):
    """32 bytes that only who knows the secret can make; the coordinator sends them before the caller states a proof."""
    return hmac.digest(stretched(secret), b"egg 2 coordinator first\0" + hello + challenge, "sha256")


def page_password(secret):
    """The password of the live page: nobody finds the secret by it."""
    return hmac.digest(stretched(secret), b"egg 2 page", "sha256").hex()[:32] if secret else ""


def user_key():
    """Text that identifies this user on this machine, unknown to other users; kept in a file where there can be one."""
    path = os.path.join(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "egg", "worker-key")
    fresh = os.urandom(16).hex()
    try:
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with (contextlib.suppress(FileExistsError),
              open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600), "w") as file):
            file.write(fresh)
        with history.open_file(path) as file:
            found = os.fstat(file.fileno())
            key = file.read(33).decode()
        private = found.st_uid == os.getuid() and not found.st_mode & 0o077
        return key if private and len(key) == 32 and key.isalnum() else fresh
    except (OSError, ValueError):
        return fresh


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


def der_element(data, at):
    """(start, end) of the content of the DER element at an offset of bytes that OpenSSL has accepted."""
    size, start = data[at + 1], at + 2
    if size & 0x80:
        size, start = int.from_bytes(data[start:start + size % 0x80]), start + size % 0x80
    return start, start + size


def public_key(certificate):
    """bytes: the SubjectPublicKeyInfo of a certificate (DER). The certificate itself names nobody: of an ECDSA
    signature (r, s) there is a twin, (r, -s), which anybody can make."""
    at, _ = der_element(certificate, 0)
    at, _ = der_element(certificate, at)                 # TBSCertificate
    # before it: version, if any; serial, algorithm, issuer, validity, subject
    for _ in range(5 + (certificate[at] == 0xA0)):
        _, at = der_element(certificate, at)
    return certificate[at:der_element(certificate, at)[1]]


def may_sign(certificate):
    """Whether OpenSSL takes others that this certificate (DER) has signed: CA:TRUE, which `openssl req -x509` makes."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.load_verify_locations(cadata=certificate)
    return context.cert_store_stats()["x509_ca"] > 0


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
        found = context.cert_store_stats()
        if kind == ssl.PROTOCOL_TLS_SERVER and 0 < found["x509_ca"] < found["x509"]:
            raise AuthError(f"{ca} holds certificates that may sign others (CA:TRUE) beside some that may not, and "
                            "whoever has the key of one has as many votes as it likes: give --tls-ca either those "
                            "of signers, or those of workers, all without CA:TRUE")
    return context
