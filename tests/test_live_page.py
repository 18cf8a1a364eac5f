"""The live page and /metrics."""

import base64
from contextlib import suppress
import gzip
import json
import re
import shutil
import signal
import socket
import ssl
import struct
import subprocess
import time
from http import HTTPStatus

import hypothesis
import numpy as np
from pytest import approx, fixture, mark, raises
from hypothesis import strategies as st

from cluster import auth, hub
from cluster.hub import split_address
from cluster.wire import LOG_MESSAGE, VALIDATION
from tools import live_page
from coordinators import Peer, Peer2, Server, refused, until
from fakes import SECRET, changed
from pages import EVERYBODY, ask, connect, page_port, page_shows, parse_metrics, receive, request, state_of
from recordings import HERE, python
from commands import begin, fails, run
from readings import configured


@fixture
def server(tmp_path):
    """A coordinator with a page for everybody."""
    with Server(tmp_path, http=EVERYBODY) as server:
        yield server


# --- hostile requests -------------------------------------------------------------------------------------------------

def test_no_header_takes_long():
    """8 KB of spaces took a third of a second; 16 clients stopped training by them."""
    for field in (b"X:" + b" " * 8000 + b"y", b"X:" + b"\t " * 4000 + b"\x01", b"X: " + b"a " * 4000,
                  b":" * 8000, b" " * 8000, b"X" * 8000, b"X:\xff" * 2000, b"\r\n".join([b"a: b"] * 1500)):
        started = time.thread_time()
        try:
            live_page.parse(b"GET / HTTP/1.1\r\nHost: a\r\n" + field + b"\r\n\r\n")
        except ValueError as error:
            assert HTTPStatus(error.args[0])
        assert time.thread_time() - started < 0.05, field[:10]


def test_a_request_that_breaks_the_page_ends_its_connection_alone(server, monkeypatch):
    def broken(_):
        raise RuntimeError("nobody has thought of this")

    monkeypatch.setattr(server.page, "answer", broken)
    for _ in range(2):
        with connect(server) as sock:
            sock.sendall(request())
            assert sock.recv(1) == b""
    assert server.said.count("its request cannot be handled: RuntimeError") == 1
    assert Peer2(server).chunk(0) == 0


PASSWORD = auth.page_password(SECRET).encode()
MASTER = live_page.Where("127.0.0.1", 0, PASSWORD.decode(), None)


# --- the live page ----------------------------------------------------------------------------------------------------

def basic(password, name=b"me"):
    return "Basic " + base64.b64encode(name + b":" + password).decode()


def test_the_page_its_state_and_metrics(tmp_path):
    cfg = changed(SNAPSHOT_EVERY=2)
    with Server(tmp_path, cfg, steps=3, stay=True, save=True, http=EVERYBODY) as server:
        status, fields, html = ask(server)
        assert status == 200 and fields["content-type"] == "text/html; charset=utf-8" and b"<script>" in html
        assert "default-src 'none'" in fields["content-security-policy"]
        assert not re.search(rb'(src|href)="(?!state.json|metrics|data:)', html)
        peer = Peer(server)
        peer.send(LOG_MESSAGE, "sample at step 0: a<script>\u23ceb >>> <img src=x>".encode())
        counted = dict(loss=4096, updates=5)
        assert peer.chunk(0) == 0
        peer.send(VALIDATION, 0, 100, 300, 300 * np.log(2))
        peer.result(0, 0, **counted)
        peer.works(0, 3, **counted)
        page_shows(server, 0)                                            # after its report
        status, fields, body = ask(server, "/state.json?x=1")
        state = json.loads(body)
        assert (status, fields["content-type"]) == (200, "application/json") and len(state["workers"]) == 1
        bits = 16 / (cfg.SOFTMAX_EXP_SCALE * np.log(2))
        sample = dict(step=0, worker="a version 1 peer", prompt="a<script>\nb", text="<img src=x>")
        assert state == state | dict(
            step=1, steps=3, chunks=4, chunks_done=0, loss_unit="bits/byte", loss=approx(bits, abs=1e-6),
            best=dict(step=0, value=1.0, unit="bits/byte"), name=tmp_path.name, samples=[sample],
            island=None, merges=[], finished=False)
        assert state["curves"]["loss"] == [[0, approx(state["seconds"], abs=1e-3), approx(bits, 1e-4)]]
        assert state["curves"]["validation"][0][2] == 1.0
        assert [line["kind"] for line in state["lines"]] == ["joined"]
        packed = ask(server, "/state.json", accept_encoding="gzip, br")
        assert packed[1]["content-encoding"] == "gzip" and json.loads(gzip.decompress(packed[2]))["step"] == 1
        assert "content-encoding" not in ask(server, "/state.json", accept_encoding="gzip;q=0, br")[1]

        status, fields, body = ask(server, "/metrics")
        assert status == 200 and fields["content-type"].startswith("text/plain; version=0.0.4")
        values = parse_metrics(body.decode())
        assert values == {**values, "egg_steps_total": 1, "egg_tokens_total": 128 * 8, "egg_workers": 1,
                          'egg_loss{unit="bits/byte"}': approx(bits, abs=1e-6),
                          'egg_validation{unit="bits/byte"}': 1, 'egg_events_total{event="joined"}': 1}
        assert values["egg_sigma_shift"] == state["sigma_shift"] == cfg.SIGMA_SHIFT
        assert [v for k, v in values.items()
                if k.startswith('egg_worker_chunks_total{name="a version 1 peer",address="127.0.0.1:')] == [4]
        assert not [name for name in values if name.startswith("egg_island")]
        assert ask(server, "/", "HEAD")[::2] == (200, b"")


def test_there_is_no_shift_of_noise_on_activations(tmp_path):
    with Server(tmp_path, configured("laptop"), http=EVERYBODY) as server:
        assert state_of(server)["sigma_shift"] is None
        assert b"egg_sigma_shift" not in ask(server, "/metrics")[2]


def test_the_page_tells_of_the_end(tmp_path):
    """While somebody looks, the end is served for a moment; else the coordinator leaves at once."""
    for looks in (True, False):
        with begin("coordinator --port 0 --http 0", cwd=tmp_path, stdout=subprocess.PIPE) as process:
            process.stdout.readline()
            port = int(re.search(r":(\d+)/", process.stdout.readline())[1])
            states = [fetch(port)] if looks else []
            process.send_signal(signal.SIGINT)
            started = time.monotonic()
            while looks and (state := fetch(port)):
                states.append(state)
                time.sleep(0.3)
            assert process.wait(60) == 0
            took = time.monotonic() - started
        assert [state["finished"] for state in states[:1] + states[-1:]] == [False, True][:2 * looks]
        assert (took >= live_page.FAREWELL_SECONDS - 0.5) == looks and took < live_page.FAREWELL_SECONDS + 2


def fetch(port):
    """The state of a page, None where nobody serves it."""
    with suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=60) as sock:
        sock.sendall(request("/state.json"))
        return json.loads(receive(sock)[2] or "null")


def status_of(sock, path="/metrics", **fields):
    """Of a request over a connection that stays."""
    sock.sendall(request(path, close=False, **fields))
    return receive(sock)[0]


def test_labels_are_escaped():
    assert live_page.quoted('a"b\\c\nd') == r'"a\"b\\c\nd"'


BAD = {
    b"\r\n\r\n": 400, b"GET\r\n\r\n": 400, b"GET / HTTP/1.1\r\n\r\n": 400, b"GET / HTTP/2.0\r\n\r\n": 505,
    b"GET  / HTTP/1.1\r\nHost: localhost\r\n\r\n": 400,
    b"GET / HTTP/1.1\r\nHost: localhost\r\nHost: localhost\r\n\r\n": 400,
    b"GET / HTTP/1.1\r\nHost : localhost\r\n\r\n": 400,
    b"GET / HTTP/1.1\r\nHost: localhost\r\n folded\r\n\r\n": 400,
    b"GET / HTTP/1.1\r\nHost: localhost\r\nno colon\r\n\r\n": 400,
    b"GET / HTTP/1.1\r\nHost: localhost\r\nX: a\0b\r\n\r\n": 400,
    b"GET / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 5\r\n\r\nhello": 413,
    b"GET / HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n": 413,
    b"\x16\x03\x01\x02\x00\x01\x00\r\n\r\n": 400,
    b"POST / HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n": 405,
    b"BREW / HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n": 405,
    b"GET / HTTP/1.0\r\n\r\n": 403, b"GET / HTTP/1.0\r\nHost: localhost\r\n\r\n": 200,
    b"GET /%00 HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n": 404,
    b"GET /../etc/passwd HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n": 404, b"X" * 9000: 431,
    b"GET / HTTP/1.1\r\nX: " + b"y" * 100000: 431,
    b"GET / HTTP/1.1\r\nHost: localhost\r\n" + b"A: b\r\n" * 1500 + b"\r\n": 431,
}


def test_requests_that_cannot_be_served(server):
    for data, status in BAD.items():
        with connect(server) as sock:
            sock.sendall(data)
            assert receive(sock)[0] == status, data[:60]
            assert sock.recv(1) == b"", data[:60]                     # and the connection ends
    for host in ("evil.example", "evil.example:80", "127.0.0.1.evil.example", "127.0.0.1%x.evil.example",
                 "[::1%x.evil.example]:80", "127.0.0.1%25x.evil.example", "localhost:80.evil.example", "10.0.0.1",
                 "localhost.evil",
                 "[::2]:80", ""):
        assert ask(server, host=host)[0] == 403, host                 # a name that a stranger had resolved to here
    for host in ("localhost", "LOCALHOST:8080", "127.0.0.1", f"127.0.0.1:{page_port(server)}", "[::1]:80"):
        assert ask(server, host=host)[0] == 200, host
    assert Peer(server).chunk(0) == 0


def test_one_connection_for_many_requests_also_in_pieces(server):
    with connect(server) as sock:
        for _ in range(3):
            for byte in request("/metrics", close=False):
                sock.sendall(bytes([byte]))
            assert receive(sock)[0] == 200
        sock.sendall(request("/nothing", close=False) * 200 + request("/nothing"))  # one behind the other, read late
        assert sock.makefile("rb").read().count(b"HTTP/1.1 404 ") == 201


def test_clients_that_take_their_time_are_closed(server, monkeypatch):
    for name in ("REQUEST_SECONDS", "IDLE_SECONDS", "SEND_SECONDS", "LINGER_SECONDS"):
        monkeypatch.setattr(live_page, name, 0.3)
    silent, trickling, idle = (connect(server) for _ in range(3))
    deaf, lingering = (connect(server) for _ in range(2))
    assert status_of(idle) == 200
    lingering.sendall(b"\r\n\r\n")
    assert receive(lingering)[0] == 400
    deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    with suppress(OSError):
        deaf.settimeout(0.2)
        deaf.sendall(request("/", close=False) * 1000)  # more answers than the buffers hold, none of them read
    with raises(OSError):
        for sent, byte in enumerate(request("/" + "x" * 4000)):
            trickling.sendall(bytes([byte]))
            time.sleep(0.01)
    assert sent < 300
    for sock in (silent, idle, lingering):
        assert sock.recv(1) == b""
    until(lambda: not (server.page.newcomers or server.page.served))
    assert ask(server, "/metrics")[0] == 200 and Peer(server).chunk(0) == 0


def test_who_holds_connections_keeps_no_browser_out(server, monkeypatch):
    page = server.page
    monkeypatch.setattr(live_page, "MOST_CLIENTS", 16)
    monkeypatch.setattr(page.newcomers, "most", 8)
    browser = connect(server)
    assert status_of(browser) == 200
    held = [connect(server) for _ in range(30)]
    assert all(ask(server, "/metrics")[0] == 200 for _ in range(3))
    assert status_of(browser) == 200                                   # its connection was kept
    for sock in held:
        with suppress(OSError):
            sock.sendall(request("/metrics", close=False))
    until(lambda: len(page.served) > 1)
    assert len(page.newcomers) <= 8 and len(page.served) <= 8 and ask(server, "/metrics")[0] == 200
    [sock.close() for sock in held]


def test_the_password_is_asked_for_and_is_not_the_secret(tmp_path):
    with Server(tmp_path, http=MASTER) as server:
        for path in ("/", "/state.json", "/metrics", "/nothing"):
            status, fields, body = ask(server, path)
            assert status == 401 and fields["www-authenticate"].startswith("basic realm=") and b"egg_" not in body
        passwords = b"", SECRET, PASSWORD[:-1], PASSWORD + b"e", PASSWORD.upper() + b"!", b"\xff" * 21
        for wrong in (*map(basic, passwords), "Basic", "Basic !!!", "Basic " + base64.b64encode(PASSWORD).decode(),
                      "Bearer " + PASSWORD.decode(), "Basic \xe9"):
            assert ask(server, authorization=wrong)[0] == 401
        for name in (b"me", b"", b"egg"):
            assert ask(server, "/metrics", authorization=basic(PASSWORD, name))[0] == 200
        assert ask(server, "/metrics", host="evil.example", authorization=basic(PASSWORD))[0] == 403
        second = f"Authorization: {basic(b'x')}\r\nConnection".encode()
        with connect(server) as sock:
            sock.sendall(request(authorization=basic(PASSWORD)).replace(b"Connection", second))
            assert receive(sock)[0] == 400


def test_the_page_under_tls(tmp_path, certificates):
    cert, key = certificates
    where = live_page.Where("127.0.0.1", 0, PASSWORD.decode(), auth.server_tls(cert, key))
    with Server(tmp_path, http=where) as server:
        assert server.page.invitation().startswith("live page: https://127.0.0.1:")
        context = ssl.create_default_context(cafile=cert)
        with connect(server) as sock, context.wrap_socket(sock, server_hostname="localhost") as secure:
            for _ in range(2):
                assert status_of(secure, "/", authorization=basic(PASSWORD)) == 200
            # more than one TLS record
            secure.sendall(request("/nothing", close=False, authorization=basic(PASSWORD)) * 300)
            answers = secure.makefile("rb")
            assert all(next_head(answers).startswith(b"HTTP/1.1 404") for _ in range(300))
        with connect(server) as plain:
            plain.sendall(request())
            with suppress(ConnectionResetError):
                assert b"HTTP" not in plain.recv(100)
        assert Peer(server).chunk(0) == 0


def next_head(answers):
    """The head of the next response in a stream, and past its body."""
    head = b"".join(iter(answers.readline, b"\r\n"))
    answers.read(int(re.search(rb"Content-Length: (\d+)", head)[1]))
    return head


PIECES = [b"GET ", b"/", b" HTTP/1.1", b" HTTP/1.0", b"\r\n", b"\r\nHost: a", b"Content-Length: 0", b"Authorization:",
          b":", b" ", b"\0", b"\xff", b"a"]


@hypothesis.given(st.binary(max_size=200) | st.lists(st.sampled_from(PIECES)).map(b"".join)
                  | st.lists(st.sampled_from(PIECES)).map(lambda rest: b"GET / HTTP/1.1\r\nHost: a" + b"".join(rest)))
def test_any_head_is_parsed_or_refused(data):
    try:
        request = live_page.parse(data)
        assert request.method and request.target and request.version.startswith("HTTP/1.")
        assert all(name == name.lower() for name in request.fields)
    except ValueError as error:
        status, reason = error.args
        assert HTTPStatus(status) and "\n" not in reason


def test_noise_does_no_harm(tmp_path):
    import random
    rng = random.Random(7)
    whole = request("/metrics", authorization=basic(PASSWORD))
    with Server(tmp_path, http=MASTER) as server:
        for _ in range(150):
            with connect(server) as sock, suppress(OSError):
                kind = rng.randrange(4)
                if kind == 0:
                    sock.sendall(rng.randbytes(rng.randrange(20000)))
                elif kind == 1:
                    sock.sendall(whole[:rng.randrange(len(whole))])
                elif kind == 2:
                    at = rng.randrange(len(whole))
                    sock.sendall(whole[:at] + rng.randbytes(1) + whole[at + 1:])
                else:
                    sock.sendall(whole)
                    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # ends with a reset
        assert ask(server, "/metrics", authorization=basic(PASSWORD))[0] == 200 and Peer(server).chunk(0) == 0


def askers(server, monkeypatch, count, answer, every):
    """(sockets that have asked for the state, which is `answer` and made anew after `every` s; [1 for each making])."""
    made = []
    monkeypatch.setattr(live_page.Figures, "state", lambda self: made.append(1) or answer)
    monkeypatch.setattr(live_page, "MADE_EVERY", every)
    socks = [connect(server) for _ in range(count)]
    for sock in socks:
        sock.sendall(request("/state.json", close=False))
    return socks, made


def test_many_clients_share_what_is_made_once(server, monkeypatch):
    socks, made = askers(server, monkeypatch, 50, {}, 3600)
    assert {receive(sock)[0] for sock in socks} == {200} and made == [1]


def test_clients_that_do_not_read_share_a_few_answers(server, monkeypatch):
    socks, made = askers(server, monkeypatch, 30, {"x": "y" * (1 << 23)}, 0.0)
    until(lambda: len(server.page.served) == 30)
    held = {}
    for one in [*server.hub.connections]:
        # not the heads of answers: that of the last one may still be on its way
        held |= {id(part.obj): len(part.obj) for part in [*one.outbox] if len(part.obj) >> 20}
    assert 0 < len(held) <= hub.VERSIONS == len(made) and sum(held.values()) < (hub.VERSIONS + 1) << 23
    assert receive(socks[0])[0] == receive(socks[-1])[0] == 200
    [sock.close() for sock in socks]


def test_where_the_page_may_be_served():
    def served(host, *access):
        return live_page.where((host, 80), auth.Access(*access))

    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    assert served("127.0.0.1") == ("127.0.0.1", 80, "", None)
    # no TLS on the way to oneself
    assert served("localhost", SECRET, tls) == ("localhost", 80, PASSWORD.decode(), None)
    assert served("10.0.0.1", SECRET, tls) == ("10.0.0.1", 80, PASSWORD.decode(), tls)
    assert served("0.0.0.0", b"", None, True).password == ""
    with refused("show the run to anybody", auth.AuthError):
        served("0.0.0.0")
    with refused("password over the network in the clear", auth.AuthError):
        served("0.0.0.0", SECRET)
    assert served("").host == "127.0.0.1"
    assert [*map(split_address, ("80", "[::1]:80", "a.b:0"))] == [("", 80), ("::1", 80), ("a.b", 0)]
    for text in ("", "a", "1:2:3", "99999", "-1", ":80", "a b:80", "80 "):
        with raises(ValueError):
            split_address(text)


@mark.parametrize("minutes, steps, least, most", [(None, None, None, None), (60, None, 3590, 3600),
                                                        (60, 3, 0, 60), (None, 3, 0, 60)])
def test_the_page_knows_how_long_the_run_lasts(tmp_path, minutes, steps, least, most):
    with Server(tmp_path, minutes=minutes, steps=steps, stay=True, http=EVERYBODY) as server:
        assert server.page.figures.seconds_left() is None
        peer = Peer(server)
        peer.works(0, 4)
        page_shows(server, 0)
        left = state_of(server)["seconds_left"]
        assert left is None if least is None else least <= left <= most


@mark.skipif(shutil.which("node") is None, reason="needs node")
def test_a_steep_beginning_does_not_flatten_the_curve():
    source = re.search(r"^function heights.*?^}$", (HERE / "tools" / "live_page.html").read_text(), re.M | re.S)[0]
    steep = [[k, k, 2.8 + 5.2 * 0.8 ** k] for k in range(60)]
    straight, short = [[k, k, 8 - k / 10] for k in range(60)], steep[:3]
    program = f"{source}; for (const points of {json.dumps([steep, straight, short])})" \
              " console.log(JSON.stringify(heights(points, p => p[0])))"
    said = subprocess.run(["node", "-e", program], capture_output=True, text=True, check=True).stdout.splitlines()
    assert [*map(json.loads, said)] == [[steep[-1][2], steep[10][2]], [straight[-1][2], 8], [short[-1][2], 8]]


def test_a_busy_port_is_one_line(here):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        fails(run("coordinator --port 0 --http", port), 1,
              f"egg: --http 127.0.0.1:{port}: this port is in use: choose another\n")
    fails(run("coordinator --port 0 --http 0.0.0.0:0"), 2,
          "egg: --http 0.0.0.0:0 would show the run to anybody")


def test_the_coordinator_with_a_page_needs_neither_numba_nor_threads(tmp_path):
    program = """
import sys, threading, egg_net, egg_config
from cluster import auth, event_log, history; from tools import live_page
cfg, console = egg_config.make(), egg_net.Console(quiet=True)
where = live_page.where(('127.0.0.1', 0), auth.Access())
run = history.open_run(cfg)
events = event_log.Events(cfg, run, sys.argv[1], console)
coordinator = egg_net.Coordinator(cfg, run, '127.0.0.1', 0, console=console, events=events, http=where)
coordinator.poll(0)
heavy = ('numba', 'llvmlite', 'tensorboardX', 'matplotlib')
print({m for m in sys.modules if m.split('.')[0] in heavy}, threading.active_count())
"""
    assert python("-c", program, tmp_path) == "set() 1\n"
