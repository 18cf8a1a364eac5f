"""The live page and /metrics: a small HTTP server in the coordinator's event loop. All its resources are bounded.

GET / is the page (live_page.html), /state.json what it shows, /metrics the same figures for Prometheus.
"""

import base64
import contextlib
import errno
import gzip
import hashlib
import hmac
import http
import json
import math
import operator
import os
import re
import time
from collections import deque
from types import SimpleNamespace
from typing import NamedTuple

from cluster import auth, hub
from cluster.console import to_the_end
from cluster.event_log import WatchError
from egg_config import ROOT
from tools import curves

MOST_CLIENTS = 128         # connections, half of them of clients that have received nothing yet
MOST_HEADER = 8192         # bytes of a request
REQUEST_SECONDS = 10.0     # seconds that a client may take for a request, from connecting or from its first byte
SEND_SECONDS = 20.0        # ... to receive the response
IDLE_SECONDS = 60.0        # ... between one request and the next
LINGER_SECONDS = 1.0       # ... to read the last response before its connection is closed
MADE_EVERY = 1.0           # seconds for which a response is reused
POINTS = 800               # most points of a curve
# most entries in a response; peers: as many as workers
WORKERS = 200
LINES = 50
MERGES = 200
SPEED_SECONDS = 10.0       # over which the speed is averaged, roughly
LOOKING_SECONDS = 6.0      # since a browser has asked for the state, in which somebody is looking
FAREWELL_SECONDS = 3.0     # that the page is served after the end of a run at which somebody is looking
PAGE = os.path.join(ROOT, "tools", "live_page.html")
HTML = "text/html; charset=utf-8"
JSON = "application/json"
TEXT = "text/plain; charset=utf-8"
PROMETHEUS = "text/plain; version=0.0.4; charset=utf-8"
TOKEN = rb"[!#$%&'*+.^_`|~0-9A-Za-z-]+"
REQUEST = re.compile(rb"(%b) ([!-~\x80-\xff]+) (HTTP/1\.[01])\r\n((?:%b:[\t -~\x80-\xff]*\r\n)*)\r\n" % (TOKEN, TOKEN))
TAKES_GZIP = re.compile(r"\bgzip\b(?!\s*;\s*q=0(\.0*)?\s*(,|$))")         # in Accept-Encoding


class Where(NamedTuple):
    """The address of the page, and who may see it. password: "" for everybody; tls: an ssl.SSLContext or None."""
    host: str
    port: int
    password: str
    tls: object

    descriptors = MOST_CLIENTS     # connections that it may hold open (egg_net.Coordinator)

    def attach(self, coordinator):
        """The Page of a coordinator. Raises WatchError."""
        return Page(self, coordinator)


def where(address, access):
    """The Where of --http. address: (host, port), "" for this machine alone; access: a cluster.auth.Access. Raises
    AuthError for an address that others can reach without a password, or with a password in the clear."""
    host, port = address[0] or "127.0.0.1", address[1]
    password = auth.page_password(access.secret)
    if auth.is_loopback(host):
        return Where(host, port, password, None)
    if not access.insecure and not (access.secret and access.tls):
        wrong = "would send its password over the network in the clear" if access.secret else \
            "would show the run to anybody"
        raise auth.AuthError(f"--http {host}:{port} {wrong}: look at it through `ssh -L {port}:localhost:{port}` with "
                             f"--http {port}, or give a secret and TLS, or --insecure on a network where everybody is "
                             "trusted")
    return Where(host, port, password, access.tls)


# --- figures ---------------------------------------------------------------------------------------------------------

# {source: ((name, help text, field of what the source has, fields that are labels), ...)}; see `Figures.metrics`
METRICS = {
    "run": (
        ("egg_steps_total", "steps of the run that are complete", "step"),
        ("egg_tokens_total", "tokens evaluated in them", "tokens"),
        ("egg_tokens_per_second", "tokens evaluated per second, over the last 10 seconds or so", "tokens_per_second"),
        ("egg_step_seconds", "duration of the last step", "step_seconds"),
        ("egg_learning_rate", "learning rate of the last step", "learning_rate"),
        ("egg_sigma_shift", "SIGMA_SHIFT of the current step: larger means quieter noise", "sigma_shift"),
        ("egg_weights_changed", "weights that the last reported update changed", "updates"),
        ("egg_chunks", "chunks of a step", "chunks"),
        ("egg_chunks_done", "chunks of the current step that are done", "chunks_done"),
        ("egg_sent_bytes_total", "bytes sent to workers in the steps since the start", "sent"),
        ("egg_received_bytes_total", "bytes received from workers in the steps since the start", "received"),
        ("egg_snapshot_step", "step of the newest snapshot, 0 without one", "snapshot"),
        ("egg_workers", "workers that are connected", "n_workers")),
    "loss": (("egg_loss", "mean loss of the population in the last step", "value", "unit"),),
    "events": (("egg_events_total", "events since the start, by kind", "count", "event"),),
    "validation": (
        ("egg_validation", "the last validation", "value", "unit"),
        ("egg_validation_step", "step of the last validation", "step")),
    "best": (("egg_validation_best", "the lowest validation", "value", "unit"),),
    "reward": (
        ("egg_reward", "the last mean reward on held-out prompts", "value"),
        ("egg_reward_step", "step of the last one", "step")),
    "best_reward": (("egg_reward_best", "the highest of them", "value"),),
    "workers": (
        ("egg_worker_chunks_total", "results taken from a worker", "chunks", "name", "address", "device"),
        ("egg_worker_chunk_seconds", "seconds per chunk of a worker", "chunk_seconds", "name", "address", "device"),
        ("egg_worker_last_seen_seconds", "seconds since a worker was heard", "last_seen", "name", "address", "device")),
    "island": (
        ("egg_island_epoch", "starts of the history: merges and rejuvenations so far", "epoch"),
        ("egg_island_fitness", "what is compared with peers: lower is better, of a reward higher", "fitness", "kind"),
        ("egg_island_peers", "islands that are known", "n_peers"),
        ("egg_island_peers_up", "islands that can be reached", "n_up")),
    "peers": (
        ("egg_island_peer_fitness", "fitness that a peer states", "fitness", "name", "kind"),
        ("egg_island_peer_step", "step that a peer states", "step", "name"),
        ("egg_island_given_total", "states given to a peer", "given", "name"),
        ("egg_island_taken_total", "states taken from a peer", "taken", "name")),
}
CURVES = {"step": "loss", "validation": "validation", "reward": "reward"}      # the events that add to a curve
BEST = {"validation": min, "reward": max}


class Figures:
    """What the page shows: a sink of the events (cluster.event_log) of a coordinator."""

    COUNTED = ("joined", "left", "banned", "refused", "snapshot", "gossip", "merge", "rejuvenated")
    LISTED = ("joined", "left", "banned", "refused", "warning", "message")
    LISTED_WITH_LINE = ("peer", "gossip", "merge", "rejuvenated")
    finished = False
    sent = received = 0
    _seconds = _tokens = 0.0                         # of the last steps, fading

    def __init__(self, coordinator):
        self.coordinator = coordinator
        self.step = {}
        self.last = {}                               # what was measured, and the best of it, by the name of its curve
        self.best = {}
        self.lines = deque(maxlen=LINES)
        self.counts = dict.fromkeys(self.COUNTED, 0)
        self.curve = curves.Curve("")
        run = coordinator.run
        if run.directory is not None and run.step:
            with contextlib.suppress(WatchError):          # old versions wrote no events
                self.curve = curves.read_curve(run.directory)
        self.curve.cut(run.step)
        self.curve.add({"event": "start", "config": coordinator.cfg.constants()})
        self.curves = {}
        for name in CURVES.values():
            self.curves[name] = curves.Thinned(POINTS)
            for point in getattr(self.curve, name):
                self._add(name, point)
        coordinator.events.sinks.append(self)

    def _add(self, name, point):
        self.curves[name].add(*point[1:])            # without the step
        if name in BEST:
            found = {"step": point.step, "value": point.value}
            if name == "validation":
                found["unit"] = self.curve.unit
            self.last[name] = found
            self.best[name] = BEST[name](self.best.get(name, found), found, key=operator.itemgetter("value"))

    def emit(self, event, line):
        kind, curve = event["event"], self.curve
        curve.add(event)
        if kind in CURVES:
            self._add(CURVES[kind], getattr(curve, CURVES[kind])[-1])
        if kind == "step":
            self._add_step(event)
        elif kind in self.LISTED or line and kind in self.LISTED_WITH_LINE:
            text = line or f"worker {event['worker']} ({event['address']}, {event['device']}) {kind}"
            self.lines.appendleft({"time": event["time"], "kind": kind, "text": text})
        if kind in self.counts:
            self.counts[kind] += 1
        self.finished = self.finished or kind == "stop"

    def _add_step(self, event):
        self.step = event
        self.sent += event["sent"]
        self.received += event["received"]
        fade = math.exp(-event["seconds"] / SPEED_SECONDS)
        self._seconds = fade * self._seconds + event["seconds"]
        self._tokens = fade * self._tokens + event["tokens_per_second"] * event["seconds"]

    def _seconds_at(self, step):
        """Seconds of training after `step` completed steps."""
        return round(self.curve.at(step).seconds, 3)

    def _shown(self, merge):
        return {"step": merge.step, "tokens": merge.step * self.coordinator.progress.tokens_a_step,
                "seconds": self._seconds_at(merge.step), "peer": merge.peer,
                "peer_step": merge.peer_step, "part": round(merge.share, 4)}

    def seconds_left(self):
        """Until `minutes` or `steps` end the run, at the speed so far; None where nothing tells."""
        coordinator, progress = self.coordinator, self.coordinator.progress
        if progress.started is None:
            return None
        left, _ = to_the_end(coordinator.minutes, coordinator.steps, progress.first_step, coordinator.run.step,
                             progress.seconds, time.monotonic() - progress.started)
        return None if left is None else round(max(left, 0.0), 1)

    def state(self):
        """What the page shows, as a dict for JSON."""
        coordinator, cfg = self.coordinator, self.coordinator.cfg
        status = coordinator.status()
        directory = coordinator.run.directory
        island = status["island"]
        workers = status["workers"]
        if island:
            peers = island["peers"]
            island = {**{k: island[k] for k in ("name", "epoch", "fitness", "kind", "founder")},
                      "peers": peers[:WORKERS], "n_peers": len(peers),
                      "n_up": sum(peer["state"] == "up" for peer in peers)}
        return {"time": round(time.time(), 3),
                "name": os.path.basename(os.path.abspath(directory)) if directory else None,
                **{k: status[k] for k in ("step", "steps", "chunks", "chunks_done", "snapshot", "loss_unit")},
                "started": coordinator.progress.started is not None, "finished": self.finished,
                "tokens": status["step"] * coordinator.progress.tokens_a_step,
                "seconds": self._seconds_at(status["step"]), "seconds_left": self.seconds_left(),
                "tokens_per_second": round(self._tokens / (self._seconds or 1.0), 1),
                "step_seconds": self.step.get("seconds"),
                **{k: self.step.get(k) for k in ("loss", "learning_rate", "updates")}, "weights": coordinator.n_weights,
                "sigma_shift": cfg.sigma_shift(status["step"]) if cfg.PERTURB == "weights" else None, "sent": self.sent,
                "received": self.received, "validation": self.last.get("validation"),
                "best": self.best.get("validation"), "reward": self.last.get("reward"),
                "best_reward": self.best.get("reward"),
                "references": self.curve.references, "unit": self.curve.unit,
                "curves": {name: points.all() for name, points in self.curves.items()},
                "workers": workers[:WORKERS], "n_workers": len(workers), "island": island,
                "merges": [self._shown(merge) for merge in self.curve.merges[-MERGES:]],
                "samples": [*reversed(self.curve.samples)], "lines": list(self.lines)}

    def metrics(self):
        """The same in the text format of Prometheus."""
        state = self.state()
        parts = "validation", "best", "reward", "best_reward", "island"
        return prometheus({
            "run": [state], **{source: [state[source]] for source in parts},
            "loss": [{"value": state["loss"], "unit": state["loss_unit"]}],
            "events": [{"event": kind, "count": n} for kind, n in self.counts.items()],
            "workers": state["workers"], "peers": state["island"]["peers"] if state["island"] else []})


def prometheus(sources):
    """str: the text format. sources: {source in METRICS: [{field: value} or None]}; names in _total are counters."""
    lines = []
    for source, metrics in METRICS.items():
        for name, text, field, *labels in metrics:
            entries = [entry for entry in sources[source] if entry and entry[field] is not None]
            if entries:
                kind = "counter" if name.endswith("_total") else "gauge"
                lines += [f"# HELP {name} {text}", f"# TYPE {name} {kind}"]
            for entry in entries:
                words = ",".join(f"{label}={quoted(entry[label])}" for label in labels)
                lines.append(f"{name}{{{words}}} {entry[field]}" if words else f"{name} {entry[field]}")
    return "\n".join(lines) + "\n"


def quoted(text):
    """A label value in the text format of Prometheus."""
    return '"' + str(text).replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"") + '"'


# --- the server ------------------------------------------------------------------------------------------------------

class Client(hub.Connection):
    """A connection of a browser. `until` is its deadline: it is moved by whole requests and responses, not by single
    bytes. The page holds those that have got something (`served`) apart from the others."""

    PIECE = MOST_HEADER
    last = None                # whether the response that is being sent is the last one, None where none is
    ending = False             # the client shall close
    idle = False               # it has asked for nothing since the last response

    def __init__(self, page, sock, address):
        self.page, self.until = page, time.monotonic() + REQUEST_SECONDS
        super().__init__(page.coordinator.hub, sock, address, page.traffic, page.where.tls)

    def received(self):
        """Answers at most one request, so that no client keeps the others waiting."""
        now = time.monotonic()
        last, self.last = self.last, None
        if last:
            # not closed at once: with unread input the system would discard the response
            self.ending = True
            self.until = now + LINGER_SECONDS
            self.end()
        elif last is not None or self.idle and self.inbox:
            self.idle = not self.inbox
            self.until = now + (IDLE_SECONDS if self.idle else REQUEST_SECONDS)
        end = self.inbox.find(b"\r\n\r\n")
        if self.ending:
            self.inbox.clear()
        elif 0 <= end <= MOST_HEADER:
            status, answer, self.last = self.page.answer(bytes(self.inbox[:end + 4]))
            del self.inbox[:end + 4]
            if status == 200 and self not in self.page.served:
                self.page.serve(self)
            self._answer(answer)
        elif len(self.inbox) > MOST_HEADER:
            self.last = True
            self._answer(response(431, f"a request has at most {MOST_HEADER} bytes\n"))

    def _answer(self, response):
        self.until = time.monotonic() + SEND_SECONDS
        self.send(*response)
        self.hub.again.add(self)

    def full(self):
        return b"\r\n\r\n" in self.inbox and not self.ending

    def check(self, now):
        if now > self.until:
            self.close()

    def broken(self, error):
        why = f"its request cannot be handled: {type(error).__name__}: {error}"
        self.page.coordinator.admission.report(self.host, self.address, why)
        self.close()

    def closed(self):
        self.page.newcomers.pop(self, None)
        self.page.served.discard(self)


class Page:
    """Serves `where` in the event loop of `coordinator`. Raises WatchError if it cannot listen there."""

    def __init__(self, where, coordinator):
        self.where = where
        self.coordinator = coordinator
        self.traffic = SimpleNamespace(sent=0, received=0)
        self.newcomers = hub.Unproven(MOST_CLIENTS // 2)
        self.served = set()
        with open(PAGE, "rb") as file:
            self.html = Body(HTML, file.read())
        self.policy = policy(self.html.plain)
        self.figures = Figures(coordinator)
        self._bodies = {}                            # by path: the newest last, before it those still on their way
        self._looked = -math.inf                     # when a browser last asked for the state
        try:
            self.address = coordinator.hub.listen(where.host, where.port, self._accept, self.newcomers.room,
                                                  MOST_CLIENTS)
        except OSError as error:
            why = "this port is in use" if error.errno == errno.EADDRINUSE else error.strerror
            raise WatchError(f"--http {where.host}:{where.port}: {why}: choose another") from None

    def invitation(self):
        """A line with the page's address."""
        password = f", any name, password {self.where.password}" if self.where.password else ""
        return f"live page: {'https' if self.where.tls else 'http'}://{hub.address_text(*self.address)}/{password}"

    def farewell(self):
        """Serves the end of the run for a moment, if somebody is looking."""
        until = time.monotonic() + FAREWELL_SECONDS
        self._bodies.clear()
        while self._looked > until - FAREWELL_SECONDS - LOOKING_SECONDS and time.monotonic() < until:
            self.coordinator.poll(0.1)

    def answer(self, head):
        """(status, `response`, whether it is the last one on this connection) to the head of a request."""
        try:
            request = parse(head)
        except ValueError as error:
            return error.args[0], response(error.args[0], error.args[1] + "\n"), True
        fields = request.fields
        status, body, *more = self._found(request)
        last = status == 403 or request.version == "HTTP/1.0" or "close" in fields.get("connection", "").lower()
        zipped = status == 200 and bool(TAKES_GZIP.search(fields.get("accept-encoding", "").lower()))
        return status, response(status, body, last, *more, head=request.method == "HEAD", zipped=zipped), last

    def _found(self, request):
        """(status, Body or text, further fields of the response) for a Request."""
        if not self._host_allowed(request.fields.get("host", "")):
            return 403, "this page is for the machine it runs on: ask for it as localhost\n"
        if self.where.password and not self._knows_password(request.fields.get("authorization", "")):
            return (401, "any name will do; the coordinator prints the password when it starts\n",
                    'WWW-Authenticate: Basic realm="egg", charset="UTF-8"')
        if request.method not in ("GET", "HEAD"):
            return 405, "GET and HEAD alone\n", "Allow: GET, HEAD"
        body = self._body(request.target.partition("?")[0])
        if body is self.html:
            return 200, body, f"Content-Security-Policy: {self.policy}"
        return (200, body) if body else (404, "there is /, /state.json and /metrics\n")

    def _body(self, path):
        """The Body of a path, None if there is none."""
        if path == "/":
            return self.html
        if path not in ("/state.json", "/metrics"):
            return None
        now = time.monotonic()
        if path == "/state.json":
            self._looked = now
        bodies = self._bodies.setdefault(path, [])
        if not bodies or now - bodies[-1].made >= MADE_EVERY:
            way = self.coordinator.hub.on_the_way
            bodies[:] = [body for body in bodies if way((body.plain, body.zipped))]
            if len(bodies) < hub.VERSIONS:
                kind, text = (PROMETHEUS, self.figures.metrics()) if path == "/metrics" else \
                    (JSON, json.dumps(self.figures.state(), separators=(",", ":")))
                bodies.append(Body(kind, text.encode()))
        return bodies[-1]

    def _host_allowed(self, host):
        """Against DNS rebinding: a page that is served to this machine only is not served under other names."""
        match = re.fullmatch(r"(?:\[([^%\[\]]+)\]|([^%:\[\]]+))(?::[0-9]*)?", host.lower())
        return not auth.is_loopback(self.where.host) or bool(match) and auth.is_loopback(match[1] or match[2])

    def _knows_password(self, authorization):
        scheme, _, text = authorization.partition(" ")
        try:
            credentials = base64.b64decode(text.strip(), validate=True) if scheme.lower() == "basic" else b""
        except ValueError:
            return False
        return hmac.compare_digest(credentials.partition(b":")[2], self.where.password.encode())

    def _accept(self, sock, address):
        """See hub.Hub.listen."""
        self.newcomers[Client(self, sock, address)] = True

    def serve(self, client):
        """A client receives something for the first time. A full page closes an idle client for it, or the oldest."""
        if len(self.served) >= MOST_CLIENTS // 2:
            min(self.served, key=lambda c: (not c.idle, c.until)).close()
        self.newcomers.pop(client, None)
        self.served.add(client)


# --- HTTP -------------------------------------------------------------------------------------------------------------

class Request(NamedTuple):
    """The head of a request. fields: {lower-case name: value}."""
    method: str
    target: str
    version: str
    fields: dict


class Body:
    """The body of a response, plain and compressed. made: when, by the clock of time.monotonic."""

    def __init__(self, kind, data):
        self.kind = kind
        self.plain = data
        self.zipped = gzip.compress(data, 1, mtime=0)
        self.made = time.monotonic()


def response(status, body, last=True, *fields, head=False, zipped=False):
    """(head, body) of a response, both bytes. body: a Body, or text; last: the connection is closed after it; head:
    without body."""
    body = body if isinstance(body, Body) else Body(TEXT, body.encode())
    data = body.zipped if zipped else body.plain
    lines = [f"HTTP/1.1 {status} {http.HTTPStatus(status).phrase}", f"Content-Type: {body.kind}",
             f"Content-Length: {len(data)}", "Cache-Control: no-store", "X-Content-Type-Options: nosniff",
             "Referrer-Policy: no-referrer", "Cross-Origin-Resource-Policy: same-origin", "Vary: Accept-Encoding",
             *fields]
    lines += ["Content-Encoding: gzip"] * zipped + ["Connection: close"] * last
    return "\r\n".join(lines).encode() + b"\r\n\r\n", b"" if head else data


def parse(head):
    """The Request in bytes that end with an empty line. Raises ValueError(status, reason)."""
    request = REQUEST.fullmatch(head)
    if not request:
        other = re.match(rb"\S+ \S+ HTTP/(?!1\.[01])[0-9]\.[0-9]\r\n", head)
        raise ValueError(*((505, "HTTP/1.1 is spoken here") if other else (400, "this is not a request")))
    method, target, version, lines = (part.decode("latin-1") for part in request.groups())
    fields = {}
    for line in lines.split("\r\n")[:-1]:
        name, _, value = line.partition(":")
        name, value = name.lower(), value.strip(" \t")
        if name in ("host", "content-length", "authorization") and name in fields:
            raise ValueError(400, f"two fields {name}")
        fields[name] = f"{fields[name]}, {value}" if name in fields else value
    if "host" not in fields and version != "HTTP/1.0":
        raise ValueError(400, "there is no field Host")
    if "transfer-encoding" in fields or fields.get("content-length", "0") != "0":
        raise ValueError(413, "a request here has no body")
    return Request(method, target, version, fields)


def policy(html):
    """The Content-Security-Policy of a page: its own scripts and styles by their hashes, and requests to its host."""
    def hashes(tag):
        parts = re.findall(rb"<%s>(.*?)</%s>" % (tag, tag), html, re.S)
        return " ".join(f"'sha256-{base64.b64encode(hashlib.sha256(part).digest()).decode()}'" for part in parts)

    return (f"default-src 'none'; script-src {hashes(b'script')}; style-src {hashes(b'style')}; connect-src 'self'; "
            "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'")
