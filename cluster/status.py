"""The status: what a coordinator reports about its run and its workers, and the table of `egg.py status`."""

import json
import os
import socket

from cluster import auth
from cluster.console import one_line, path_text, printable, table
from cluster.hub import NetError, reason
from cluster.link import CONNECT_TIMEOUT, Link, OldCoordinator, check_address
from cluster.wire import STATUS, STATUS_LIMIT, V2, read_json

LINEAGE = 5                # epochs of an island that are listed
CELL, LINE = 64, 4000      # characters of a text in the table, and of a line
WORKERS, BANS = 4000, 100  # in a status, at most


def report(coordinator):
    """The status of an egg_net.Coordinator, a dict for JSON."""
    run, bans = coordinator.run, coordinator.admission.bans
    workers = sorted((w.status() for w in coordinator.dispatcher.workers), key=lambda w: (w["name"], w["address"]))
    return {"step": run.step, "steps": coordinator.steps, "chunks_done": len(coordinator.dispatcher.work.done),
            "chunks": coordinator.cfg.N_CHUNKS, **coordinator.progress.status(), "snapshot": coordinator.shelf.newest,
            "save_dir": run.directory and path_text(run.directory), "banned": dict(list(bans.all().items())[-BANS:]),
            "ban_file": bans.path and path_text(bans.path), "connected": len(workers), "workers": workers[:WORKERS],
            "island": coordinator.island.status()}


def fetch_status(cfg, host, port, access=auth.Access()):
    """The status of the coordinator at host:port, a dict (egg_net.Coordinator.status). Raises NetError."""
    check_address(host, port)
    card = {"role": "status", "id": os.urandom(8).hex(), "name": socket.gethostname()}
    try:
        link = Link(cfg, host, port, V2, access, card)
        try:
            status = read_json(link.next(STATUS, CONNECT_TIMEOUT))
            describe_status(status)                  # raises an error for one that is not complete
            return status
        finally:
            link.close()
    except OldCoordinator:
        raise NetError(closed_on_greeting(host, port)) from None
    except OSError as error:
        raise NetError(f"no coordinator at {host}:{port}: {reason(error)}") from None
    except (ValueError, KeyError, TypeError, AttributeError):
        raise NetError(f"{host}:{port}: a status that cannot be read") from None


def closed_on_greeting(host, port):
    return (f"{host}:{port} closed the connection during the introduction: check that it is an egg coordinator of "
            "protocol 2, and that both sides use TLS (--tls-ca) or neither does")


def pack_status(status):
    """bytes: the JSON of a status (egg_net.Coordinator.status), with so many entries of its lists as a frame holds."""
    most = len(status["workers"]) + len(status["banned"]) + len(status["island"]["peers"] if status["island"] else ())
    while len(data := json.dumps(status).encode()) > STATUS_LIMIT:
        most //= 2
        island = status["island"] and {**status["island"], "peers": status["island"]["peers"][:most]}
        status = {**status, "workers": status["workers"][:most], "island": island,
                  "banned": dict(list(status["banned"].items())[-most:] if most else ())}
    return data


def describe_status(status):
    """str: a table of what fetch_status gives."""
    of = f" of {status['steps']}" if status["steps"] else ""
    facts = [f"step {status['step']}{of}, {status['chunks_done']} of {status['chunks']} chunks done, "
             f"{status['tokens_per_second']:,.0f} tokens/s"]
    if status["loss"] is not None:
        # a coordinator of before losses had a unit
        facts[0] += f", loss {status['loss']:.3f} {status.get('loss_unit', 'units of d-eggs')}"
    if status["validation"]:
        facts[0] += ", validation {figure:.3f} {unit} at step {step}".format(**status["validation"])
    newest = f", newest snapshot of step {status['snapshot']}" if status["snapshot"] else ""
    facts.append(f"kept in {status['save_dir']}{newest}" if status["save_dir"] else "not kept")
    if status["banned"]:
        facts += [f"banned: {who}: {why}" for who, why in status["banned"].items()]
        facts.append(f"to lift a ban remove its line from {status['ban_file']}" if status["ban_file"] else
                     "bans last until the coordinator ends")
    rows = [(*(_cell(w[k]) for k in ("name", "device", "address", "state", "step", "chunks")),
             f"{w['chunk_seconds']:.3g}" if w["chunk_seconds"] else "", f"{w['last_seen']:.1f} s")
            for w in status["workers"]]
    head = "worker", "device", "address", "state", "step", "chunks", "s/chunk", "last seen"
    lines = facts + (["", *table(head, rows, 4)] if rows else ["no workers"])
    more = status.get("connected", 0) - len(rows)
    lines += [f"and {more} more"] * (more > 0)
    lines += _describe_island(status.get("island"))          # coordinators from before there were islands send none
    return "\n".join(printable(line[:LINE]).removeprefix("  ") for line in lines)


def _describe_island(island):
    """[line] of an island among its peers; [] where the coordinator is no island."""
    if not island:
        return []
    peers = [{k: _cell(v) if type(v) is str else v for k, v in p.items()} for p in island["peers"]]
    up = sum(p["state"] == "up" for p in peers)
    first = (f"island {_cell(island['name'])}, epoch {island['epoch']}, descends from "
             f"{_cell(island['founder'])}, {up} of {len(peers)} peers up")
    if island["fitness"] is not None:
        first += f", fitness {island['fitness']:.4f} ({island['kind']})"
    lines = ["", first]
    for epoch in [epoch for epoch in island["lineage"] if epoch["epoch"]][-LINEAGE:]:
        source = "rejuvenated" if epoch["peer_step"] is None else \
            f"the state of {_cell(epoch['from'])} at its step {epoch['peer_step']}"
        lines.append(f"  epoch {epoch['epoch']} from step {epoch['step']}: {source}")
    columns = (("peer", "name", "{}"), ("address", "address", "{}"), ("state", "state", "{}"),
               ("descends from", "founder", "{}"), ("compares", "kind", "{}"), ("fitness", "fitness", "{:.4f}"),
               ("step", "step", "{}"), ("epoch", "epoch", "{}"), ("given", "given", "{}"), ("taken", "taken", "{}"),
               ("last seen", "last_seen", "{:.1f} s"))
    rows = [["" if p[key] is None else form.format(p[key]) for _, key, form in columns] for p in peers]
    return lines + (["", *table([title for title, _, _ in columns], rows, 5)] if rows else [])


def _cell(value):
    return one_line(str(value), CELL)
