"""A client of the live page."""

import json
import re
import socket

from coordinators import until
from tools import live_page

EVERYBODY = live_page.Where("127.0.0.1", 0, "", None)


def page_port(server):
    return server.page.address[1]


def connect(server):
    return socket.create_connection(("127.0.0.1", page_port(server)), timeout=60)


def receive(sock):
    """(status, fields, body) of a response, as a browser understands it; (0, {}, b"") where the connection ends
    before."""
    data = b""
    while b"\r\n\r\n" not in data:
        more = sock.recv(1 << 16)
        if not more:
            return 0, {}, b""
        data += more
    head, _, body = data.partition(b"\r\n\r\n")
    lines = head.decode().split("\r\n")
    fields = dict(line.lower().split(": ", 1) for line in lines[1:])
    while len(body) < int(fields["content-length"]):
        body += sock.recv(1 << 16)
    return int(lines[0].split()[1]), fields, body


def ask(server, path="/", method="GET", host="localhost", **fields):
    with connect(server) as sock:
        sock.sendall(request(path, method, host, **fields))
        if method == "HEAD":
            head, _, body = sock.makefile("rb").read().partition(b"\r\n\r\n")
            return int(head.split()[1]), {}, body
        return receive(sock)


def page_shows(server, step):
    """Waits until the page tells of a step."""
    until(lambda: server.page.figures.step.get("step") == step)


def state_of(server):
    """What the page shows."""
    return json.loads(ask(server, "/state.json")[2])


def request(path="/", method="GET", host="localhost", close=True, **fields):
    lines = [f"{method} {path} HTTP/1.1", f"Host: {host}", *(f"{k.replace('_', '-')}: {v}" for k, v in fields.items())]
    return "\r\n".join(lines + ["Connection: close"] * close).encode() + b"\r\n\r\n"


def parse_metrics(text):
    """{name with labels: value}, every line held against the text form of Prometheus."""
    values, families = {}, []
    assert text.endswith("\n")
    for line in text.splitlines():
        if line.startswith("# "):
            word, name, rest = line.removeprefix("# ").split(" ", 2)
            assert word in ("HELP", "TYPE") and re.fullmatch("egg_[a-z_]+", name)
            if word == "TYPE":
                assert rest in ("counter", "gauge") and name not in families
                assert (rest == "counter") == name.endswith("_total")
                families.append(name)
            continue
        match = re.fullmatch(r'((egg_[a-z_]+)(?:\{(?:[a-z]+="(?:[^"\\\n]|\\[\\"n])*",?)+\})?) (-?[\d.e+-]+)', line)
        assert match and match[2] == families[-1] and match[1] not in values, line
        values[match[1]] = float(match[3])
    return values
