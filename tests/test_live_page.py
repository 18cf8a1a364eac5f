"""The live page and /metrics."""

import base64
import json
import random
import re
import signal
import socket
import ssl
import subprocess
import threading
import time
import urllib.request
from contextlib import suppress

import numpy as np
from pytest import approx, fixture, raises

from cluster import auth
from cluster.hub import split_address
from cluster.wire import LOG_MESSAGE, VALIDATION
from tools import live_page
from coordinators import Peer, Server, filled, refused, until
from fakes import SECRET, changed
from pages import EVERYBODY, ask, page_shows, parse_metrics, state_of
from recordings import HERE
from commands import begin
from run_logs import example

PASSWORD = auth.page_password(SECRET)
HTML = (HERE / "tools" / "live_page.html").read_text()


@fixture
def server(tmp_path):
    """A coordinator with a page for everybody."""
    with Server(tmp_path, http=EVERYBODY) as server:
        yield server


def connect(server):
    return socket.create_connection(server.page.server_address[:2], timeout=60)


def basic(password, name="me"):
    return "Basic " + base64.b64encode(f"{name}:{password}".encode()).decode()


# --- what it shows ----------------------------------------------------------------------------------------------------

def test_the_page_its_state_and_metrics(tmp_path):
    cfg = changed(SNAPSHOT_EVERY=2)
    with Server(tmp_path, cfg, steps=3, stay=True, save=True, http=EVERYBODY) as server:
        status, fields, html = ask(server)
        assert (status, fields["content-type"], html) == (200, "text/html; charset=utf-8", HTML.encode())
        peer = Peer(server)
        peer.send(LOG_MESSAGE, "sample at step 0: a<script>\u23ceb >>> <img src=x>".encode())
        counted = dict(loss=4096, updates=5)
        assert peer.chunk(0) == 0
        peer.send(VALIDATION, 0, 100, 300, 300 * np.log(2))
        peer.result(0, 0, **counted)
        peer.works(0, 3, **counted)
        page_shows(server, 0)                                            # after its report
        state = state_of(server)
        bits = approx(16 / (cfg.SOFTMAX_EXP_SCALE * np.log(2)), abs=1e-4)
        last, best, sample = (state[name] for name in ("last_step", "best_validation", "samples"))
        assert state == state | dict(step=1, steps=3, chunks=4, connected=1, save_dir=str(tmp_path), island=None)
        assert last == last | dict(loss=bits, updates=5, unit="bits/byte")
        assert best == best | dict(step=0, value=1.0, unit="bits/byte")
        assert sample == [sample[0] | dict(step=0, prompt="a<script>\nb", text="<img src=x>")]
        assert state["curves"]["loss"] == [[0, 0, approx(state["total"], abs=1e-3), bits]]
        assert [line["kind"] for line in state["lines"]] == ["joined"]

        values = parse_metrics(ask(server, "/metrics")[2].decode())
        assert values == {**values, "egg_steps_total": 1, "egg_tokens_total": 128 * 8, "egg_workers": 1,
                          'egg_loss{unit="bits/byte"}': bits,
                          'egg_validation{unit="bits/byte"}': 1, 'egg_events_total{event="joined"}': 1}
    state = {"workers": [{"name": 'a"b\\c\nd\0', "address": "", "device": "", "chunks": 1}]}
    assert 'egg_worker_chunks_total{name="a\\"b\\\\c d",address="",device=""} 1\n' in live_page.prometheus(state)
    assert not re.search(r'(src|href)="(?!state.json|metrics|data:)', HTML) and "default-src 'none'" in HTML
    assert not re.search("innerHTML|outerHTML|insertAdjacent|document.write|eval", HTML)


def test_a_coordinator_serves_workers_while_its_page_reads_the_history(tmp_path, monkeypatch):
    read, go_on = live_page.read_curve, threading.Event()
    monkeypatch.setattr(live_page, "read_curve", lambda *args: (go_on.wait(60), read(*args)))
    filled(tmp_path, 3)
    example(tmp_path / "events.jsonl", 3)                        # without a learning rate
    with Server(tmp_path, steps=4, stay=True, save=True, http=EVERYBODY) as server:
        Peer(server).works(3, 4)
        server.reaches(4)
        assert ask(server)[0] == 200 and ask(server, "/state.json")[0] == 404
        go_on.set()
        page_shows(server, 3)
        assert [point[0] for point in state_of(server)["curves"]["loss"]] == [0, 1, 2, 3]


def test_the_page_tells_of_the_end(tmp_path):
    """Where somebody has looked, the end is served for a moment."""
    with begin("coordinator --port 0 --http 0", cwd=tmp_path, stdout=subprocess.PIPE) as process:
        process.stdout.readline()
        url = re.search(r"http:\S+/", process.stdout.readline())[0] + "state.json"
        states = []
        until(lambda: fetch(url, states))
        process.send_signal(signal.SIGINT)
        while fetch(url, states):
            time.sleep(0.1)
        assert process.wait(60) == 0
    assert [any(event["event"] == "stop" for event in states[at]["events"]) for at in (0, -1)] == [False, True]


def fetch(url, states):
    """Whether the state is served; it is added to the others."""
    with suppress(OSError):
        states.append(json.load(urllib.request.urlopen(url, timeout=60)))
        return True


# --- who may see it ---------------------------------------------------------------------------------------------------

def test_only_this_machine_is_served_by_its_own_names(server):
    for host in ("evil.example", "evil.example:80", "127.0.0.1.evil.example", "127.0.0.1%x.evil.example",
                 "[::1%x.evil.example]:80", "localhost:80.evil.example", "localhost.evil", "10.0.0.1", "[::2]:80", ""):
        assert ask(server, host=host)[0] == 403, host                 # a name that a stranger had resolved to here
    for host in ("localhost", "LOCALHOST:8080", "127.0.0.1", "127.0.0.1:80", "[::1]:80"):
        assert ask(server, host=host)[0] == 200, host


def test_a_proxy_may_have_a_prefix_and_with_insecure_a_name_of_its_own(tmp_path):
    """As JupyterHub: the page asks for what lies beside it."""
    assert 'fetch(new URL("state.json", location.origin + location.pathname)' in HTML
    page = live_page.where(("", 0), auth.Access(insecure=True))
    with Server(tmp_path, http=page) as server:
        for path, kind in ("/user/me/8080/", "text/html"), ("/?a=/b", "text/html"), ("/x/metrics?y", "text/plain"):
            until(lambda: ask(server, path, host="hub.example")[0] == 200)
            assert ask(server, path, host="hub.example")[1]["content-type"].startswith(kind)
        assert ask(server, "/user/metrics/nothing")[0] == 404


def test_the_password_is_asked_for_and_is_not_the_secret(tmp_path):
    with Server(tmp_path, http=EVERYBODY._replace(password=PASSWORD)) as server:
        for path in ("/", "/state.json", "/metrics", "/nothing"):
            status, fields, body = ask(server, path)
            assert status == 401 and fields["www-authenticate"].startswith("Basic realm=") and b"egg_" not in body
        for wrong in (*map(basic, ("", SECRET.decode(), PASSWORD[:-1])), "Basic", "Basic !!!", "Bearer " + PASSWORD,
                      "Basic " + base64.b64encode(b"x").decode(), "Basic \xe9"):
            assert ask(server, Authorization=wrong)[0] == 401
        for name in ("me", ""):
            assert ask(server, Authorization=basic(PASSWORD, name))[0] == 200
        assert ask(server, host="evil.example", Authorization=basic(PASSWORD))[0] == 403


def test_the_page_under_tls(tmp_path, certificates):
    cert, key = certificates
    where = live_page.Where("127.0.0.1", 0, PASSWORD, auth.server_tls(cert, key))
    with Server(tmp_path, http=where) as server:
        assert server.page.invitation().startswith("live page: https://127.0.0.1:")
        context = ssl.create_default_context(cafile=cert)
        with connect(server):                                          # one that says nothing holds nobody up
            assert ask(server, context=context, Authorization=basic(PASSWORD))[2] == HTML.encode()
            assert ask(server, context=context)[0] == 401
        with connect(server) as plain, suppress(ConnectionResetError):
            plain.sendall(b"GET / HTTP/1.0\r\n\r\n")
            assert b"HTTP" not in plain.recv(100)


def test_where_the_page_may_be_served():
    def served(host, *access):
        return live_page.where((host, 80), auth.Access(*access))

    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    assert served("127.0.0.1") == served("") == ("127.0.0.1", 80, "", None, False)
    # no TLS on the way to oneself
    assert served("localhost", SECRET, tls) == ("localhost", 80, PASSWORD, None, False)
    assert served("10.0.0.1", SECRET, tls) == ("10.0.0.1", 80, PASSWORD, tls, False)
    assert served("0.0.0.0", b"", None, True).password == ""
    for access in ((), (SECRET,), (b"", tls)):
        with refused("would show the run, or the password, to anybody", auth.AuthError):
            served("0.0.0.0", *access)
    assert [*map(split_address, ("80", "[::1]:80", "a.b:0"))] == [("", 80), ("::1", 80), ("a.b", 0)]
    for text in ("", "a", "1:2:3", "99999", ":80", "a b:80"):
        with raises(ValueError):
            split_address(text)


# --- clients that are not browsers ------------------------------------------------------------------------------------

def test_requests_that_cannot_be_served_end_their_connection_alone(server, capfd):
    dice, whole = random.Random(7), b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n"
    assert ask(server, "/../etc/passwd")[0] == 404 and ask(server, method="POST")[0] == 501
    for _ in range(50):
        at = dice.randrange(len(whole))
        with connect(server) as sock, suppress(OSError):
            sock.sendall(dice.choice((dice.randbytes(2000), whole[:at], whole[:at] + dice.randbytes(1) + whole[at:],
                                      b"X" * 100000)))
    assert ask(server)[0] == 200 and Peer(server).chunk(0) == 0 and capfd.readouterr().err == ""


def test_who_holds_connections_keeps_no_browser_out(server, monkeypatch):
    monkeypatch.setattr(live_page.Client, "timeout", 1000)           # none of them leaves by itself
    idle = [connect(server) for _ in range(3 * live_page.MOST_CLIENTS)]
    assert ask(server)[0] == 200 and Peer(server).chunk(0) == 0
    until(lambda: threading.active_count() < live_page.MOST_CLIENTS + 10)
    assert idle[0].recv(1) == b""
    monkeypatch.setattr(live_page.Client, "timeout", 0.1)
    with connect(server) as silent:
        assert silent.recv(1) == b""
    [sock.close() for sock in idle]
