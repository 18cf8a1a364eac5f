"""The live page and /metrics: http.server in threads of its own, to which the coordinator hands its events, and its
figures once a second.

GET / is the page (live_page.html), /state.json what it shows, /metrics the same figures for Prometheus.
"""

import base64
import hmac
import json
import queue
import re
import socket
import socketserver
import threading
import time
from collections import Counter, deque, namedtuple
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from cluster import auth
from cluster.console import one_line
from cluster.event_log import WatchError
from cluster.hub import address_text, nothing, resolve
from egg_config import ROOT, explained
from tools.curves import Curve, INCOMPLETE, read_curve, thinned

MOST_CLIENTS = 64          # connections at a time; the next one takes the place of the oldest
REQUEST_SECONDS = 10.0     # that a client may keep its thread waiting
FAREWELL_SECONDS = 3.0     # that the page is served after the end of a run at which somebody has looked
POINTS = 800               # most points of a curve
ENTRIES = 200              # most workers, peers of an island and lines
LOCAL = re.compile(r"(localhost|127(\.\d+){3}|\[::1\])(:\d*)?", re.IGNORECASE)     # a field Host of this machine
SHOWN = "step", "references", "validation", "reward"     # the newest event of each is part of the state
BETTER = {"validation": min, "reward": max}

# metric (docs/EVENTS.md), part of the state ("run": all of it), field, fields that are labels
METRICS = """\
egg_steps_total               run              step
egg_tokens_total              run              tokens
egg_tokens_per_second         run              tokens_per_second
egg_loss                      last_step        loss               unit
egg_step_seconds              last_step        seconds
egg_learning_rate             last_step        learning_rate
egg_weights_changed           last_step        updates
egg_chunks                    run              chunks
egg_chunks_done               run              chunks_done
egg_sent_bytes_total          run              sent
egg_received_bytes_total      run              received
egg_snapshot_step             run              snapshot
egg_workers                   run              connected
egg_events_total              events           count              event
egg_validation                last_validation  value              unit
egg_validation_step           last_validation  step
egg_validation_best           best_validation  value              unit
egg_reward                    last_reward      value
egg_reward_step               last_reward      step
egg_reward_best               best_reward      value
egg_reward_deviation          last_reward      deviation
egg_reward_lowest             last_reward      lowest
egg_reward_highest            last_reward      highest
egg_reward_distinct_texts     last_reward      distinct_texts
egg_reward_distinct_words     last_reward      distinct_words
egg_reward_seen               last_reward      seen_mean
egg_reward_seen_deviation     last_reward      seen_deviation
egg_reward_seen_lowest        last_reward      seen_lowest
egg_reward_seen_highest       last_reward      seen_highest
egg_reward_seen_differ        last_reward      seen_prompts_differ
egg_texts_judged_total        last_reward      judged
egg_worker_chunks_total       workers          chunks             name address device
egg_worker_chunk_seconds      workers          chunk_seconds      name address device
egg_worker_last_seen_seconds  workers          last_seen          name address device
egg_island_epoch              island           epoch
egg_island_fitness            island           fitness            kind
egg_island_peers              run              n_peers
egg_island_peers_up           run              n_up
egg_island_peer_fitness       peers            fitness            name kind
egg_island_peer_step          peers            step               name
egg_island_taken_total        peers            taken              name
"""


class Where(namedtuple("Where", "host port password tls insecure", defaults=[False])):
    """The address of the page, and who may see it. password: "" for everybody; tls: an ssl.SSLContext or None;
    insecure: under any name, as behind a proxy."""

    def attach(self, coordinator):
        """The Page of a coordinator. Raises WatchError."""
        return Page(self, coordinator)


def where(address, access):
    """The Where of --http. address: (host, port), "" for this machine alone; access: a cluster.auth.Access. Raises
    AuthError for an address that others can reach without a password, or with a password in the clear."""
    host, port = address[0] or "127.0.0.1", address[1]
    local = auth.is_loopback(host)
    if not (local or access.insecure or access.secret and access.tls):
        raise auth.AuthError(f"--http {host}:{port} would show the run, or the password, to anybody on the network: "
                             f"look at it through `ssh -L {port}:localhost:{port}` with --http {port}, or give a "
                             "secret and TLS, or --insecure on a network where everybody is trusted")
    return Where(host, port, auth.page_password(access.secret), None if local else access.tls, access.insecure)


def figures(coordinator):
    """dict: the status of a coordinator, and what else the page shows that is not in its events."""
    status, progress = coordinator.status(), coordinator.progress
    island = status["island"]
    peers = island["peers"] if island else []
    return {**status, **vars(progress.traffic), "workers": status["workers"][:ENTRIES], "peers": peers[:ENTRIES],
            "n_peers": island and len(peers), "n_up": island and sum(peer["state"] == "up" for peer in peers),
            "minutes": coordinator.minutes, "tokens": coordinator.run.tokens(status["step"]),
            "step_tokens": coordinator.cfg.STEP_TOKENS, "local_steps": coordinator.cfg.LOCAL_STEPS,
            "weights": progress.loss and coordinator.n_weights}


class View(Curve):
    """The course of a run, and what else the page shows of its events. counts: {kind of event: how many since the
    start}; lines: what happened, the newest first; newest: {"last_" or "best_" and kind: event}."""

    def __init__(self):
        super().__init__()
        self.counts = Counter()
        self.lines = deque(maxlen=ENTRIES)
        self.newest = {}

    def add(self, event, line=None):
        of = self.of
        super().add(event)
        kind = event["event"]
        if self.of != of:                                    # earlier figures were of another text
            self.newest.pop("best_validation", None)
        if kind in SHOWN:
            self.newest[f"last_{kind}"] = {**event.get("numbers", {}), **event}          # of a reward
        if kind in BETTER:
            best = f"best_{kind}"
            self.newest[best] = BETTER[kind](self.newest.get(best, event), event, key=lambda event: event["value"])
        elif line and kind != "sample":
            self.lines.appendleft({"time": event["time"], "kind": kind, "text": line})

    def state(self, figures):
        """dict for JSON: the `figures` of a coordinator with what comes of its events."""
        return {**figures, **self.newest, "total": self.seconds, "merges": self.merges, "samples": self.samples,
                "lines": self.lines,
                "curves": {name: thinned(getattr(self, name), POINTS)
                           for name in ("loss", "validation", "reward")},
                "events": [{"event": kind, "count": count} for kind, count in self.counts.items()]}


def prometheus(state):
    """str: the figures of a state in the text format of Prometheus; names in _total are counters."""
    parts = {"run": state, **state}
    lines = []
    for metric in METRICS.splitlines():
        name, part, field, *labels = metric.split()
        lines.append(f"# TYPE {name} {'counter' if name.endswith('_total') else 'gauge'}\n")
        entries = parts.get(part)
        for entry in entries if isinstance(entries, list) else [entries]:
            if entry and entry.get(field) is not None:       # an old log lacks some
                words = ",".join(f"{label}={json.dumps(one_line(str(entry.get(label))), ensure_ascii=False)}"
                                 for label in labels)
                lines.append(f"{name}{'{' * bool(words)}{words}{'}' * bool(words)} {entry[field]}\n")
    return "".join(lines)


class Page(ThreadingHTTPServer):
    """Serves `where`, with a thread for each connection; a sink of the events of a coordinator. Raises WatchError if it
    cannot listen there."""

    daemon_threads = True
    request_queue_size = MOST_CLIENTS
    server_bind = socketserver.TCPServer.server_bind         # that of HTTPServer asks for the name of this host
    handle_error = nothing
    looked = False             # whether a browser has asked for the state
    _due = 0.0                 # when the next figures are

    def __init__(self, where, coordinator):
        self.where = where
        self.coordinator = coordinator
        self.clients = deque(maxlen=MOST_CLIENTS)            # the newest connections
        self.news = queue.SimpleQueue()                      # (event, line), (None, figures); None at the end
        with open(f"{ROOT}/tools/live_page.html", "rb") as file:
            self.bodies = {"/": ("text/html; charset=utf-8", file.read())}         # {path: (type, bytes)}
        with explained(WatchError, f"--http {address_text(where.host, where.port)}", "choose another address"):
            self.address_family, *_, address = resolve(where.host, where.port)[0]
            super().__init__(address, Client)
        if where.tls:
            self.socket = where.tls.wrap_socket(self.socket, server_side=True, do_handshake_on_connect=False)
        coordinator.events.sinks.append(self)
        for work in self.serve_forever, self._follow:
            threading.Thread(target=work, daemon=True).start()

    def invitation(self):
        """A line with the page's address."""
        password = f", any name, password {self.where.password}" if self.where.password else ""
        scheme = "https" if self.where.tls else "http"
        return f"live page: {scheme}://{address_text(*self.server_address[:2])}/{password}"

    def emit(self, event, line):
        self.news.put((event, line))

    def check(self, now):
        """Hands over the figures of the coordinator, once a second."""
        if now >= self._due:
            self._due = now + 1.0
            self.emit(None, figures(self.coordinator))

    def farewell(self):
        """Serves the end of the run for a moment, if somebody has looked."""
        self.check(self._due)
        if self.looked:
            time.sleep(FAREWELL_SECONDS)

    def close(self):
        self.shutdown()
        self.server_close()
        self.news.put(None)

    def _follow(self):
        """Makes what is served, in a thread of its own: the log of a long run takes a second to read."""
        directory = self.coordinator.run.directory
        view = View()
        if directory:
            with suppress(WatchError):            # there is no log yet
                read_curve(directory, view)
        for event, news in iter(self.news.get, None):
            if event:
                view.counts[event["event"]] += 1
                with suppress(*INCOMPLETE):
                    view.add(event, news)
            else:
                state = view.state(news)
                self.bodies["/state.json"] = "application/json", json.dumps(state, default=list).encode()
                self.bodies["/metrics"] = "text/plain; version=0.0.4; charset=utf-8", prometheus(state).encode()

    def verify_request(self, request, client_address):
        with suppress(OSError, IndexError):                  # the oldest one may have ended
            self.clients[-MOST_CLIENTS].shutdown(socket.SHUT_RDWR)
        self.clients.append(request)
        return True


class Client(BaseHTTPRequestHandler):
    """Answers the one request of a connection."""

    timeout = REQUEST_SECONDS
    log_message = nothing

    def do_GET(self):
        page = self.server
        host, _, password, _, insecure = page.where
        path = "/" + self.path.partition("?")[0].rpartition("/")[2]          # a proxy may leave its prefix there
        if auth.is_loopback(host) and not insecure and not LOCAL.fullmatch(self.headers["Host"] or ""):
            self.send_error(403, "this page is for the machine it runs on: ask for it as localhost, or behind a proxy, "
                                 "as of JupyterHub, start with --insecure")
        elif password and not self._knows(password):
            self.send_error(401, "any name will do; the coordinator prints the password when it starts")
        elif path not in page.bodies:
            self.send_error(404, "there is /, /state.json and /metrics")
        else:
            page.looked |= path == "/state.json"
            kind, body = page.bodies[path]
            self.send_response(200)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", len(body))
            self.end_headers()
            self.wfile.write(body)

    def end_headers(self):
        self.send_header("WWW-Authenticate", 'Basic realm="egg", charset="UTF-8"')     # heeded with 401 alone
        super().end_headers()

    def _knows(self, password):
        text = self.headers.get("Authorization", "").removeprefix("Basic ")
        with suppress(ValueError):
            return hmac.compare_digest(base64.b64decode(text).partition(b":")[2], password.encode())
