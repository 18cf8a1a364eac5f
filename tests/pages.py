"""A client of the live page."""

import contextlib
import http.client
import json
import re

from coordinators import until
from tools import live_page

EVERYBODY = live_page.Where("127.0.0.1", 0, "", None)


def ask(server, path="/", method="GET", context=None, host="localhost", **fields):
    """(status, fields, body) of an answer. context: an ssl.SSLContext, for TLS."""
    port = server.page.server_address[1]
    connection = http.client.HTTPSConnection("localhost", port, timeout=60, context=context) if context else \
        http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    with contextlib.closing(connection):
        connection.request(method, path, headers={"Host": host, **fields})
        answer = connection.getresponse()
        return answer.status, answer.headers, answer.read()


def state_of(server):
    """What the page shows of all that has happened so far."""
    bodies = server.page.bodies
    for _ in range(2):                               # the first may have been on its way
        before = bodies.get("/state.json")
        server.calls.put(lambda: server.page.check(server.page._due))
        until(lambda: bodies.get("/state.json") is not before)
    return json.loads(ask(server, "/state.json")[2])


def page_shows(server, step):
    """Waits until the page tells of a step."""
    until(lambda: state_of(server).get("last_step", {}).get("step") == step)


def parse_metrics(text):
    """{name with labels: value}, every line held against the text form of Prometheus."""
    values, families = {}, []
    assert text.endswith("\n")
    for line in text.splitlines():
        if line.startswith("# TYPE "):
            _, _, name, kind = line.split()
            assert (kind == "counter") == name.endswith("_total") and name not in families
            families.append(name)
            continue
        match = re.fullmatch(r'((egg_[a-z_]+)(?:\{(?:[a-z]+="(?:[^"\\\n]|\\[\\"n])*",?)+\})?) (-?[\d.e+-]+)', line)
        assert match and match[2] == families[-1] and match[1] not in values, line
        values[match[1]] = float(match[3])
    return values
