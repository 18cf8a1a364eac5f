"""The status: what a coordinator reports about its run and its workers, and the table of `egg.py status`."""

import contextlib
import json
import os
import socket
import time

from cluster import auth
from cluster.console import one_line, path_text, printable, table
from cluster.hub import NetError, reason
from cluster.link import CONNECT_TIMEOUT, Link, check_address
from cluster.wire import STATUS, V2, read_json

EPOCHS = 5                # epochs of an island that are listed
CELL, LINE = 64, 4000      # characters of a text in the table, and of a line
WORKERS, BANS = 4000, 100  # in a status, at most
# the columns of the tables, {title: field}, and how some fields are shown
WORKER_COLUMNS = {"worker": "name", "device": "device", "address": "address", "state": "state", "step": "step",
                  "chunks": "chunks", "s/chunk": "chunk_seconds", "last seen": "last_seen"}
PEER_COLUMNS = {"peer": "name", "address": "address", "state": "state", "compares": "kind",
                "fitness": "fitness", "step": "step", "epoch": "epoch", "taken": "taken",
                "last seen": "last_seen"}
FORMATS = {"chunk_seconds": "{:.3g}", "fitness": "{:.4f}", "last_seen": "{:.1f} s"}


def _last(measures, *names):
    """{name: value} of the last of some measures, None without any."""
    return dict(zip(names, measures[-1])) if measures else None


def report(coordinator):
    """The status of an egg_net.Coordinator, a dict for JSON."""
    run = coordinator.run
    bans = coordinator.admission.bans
    progress = coordinator.progress
    workers = sorted((w.status() for w in coordinator.dispatcher.workers), key=lambda w: (w["name"], w["address"]))
    return {"step": run.step, "steps": coordinator.steps, "chunks_done": len(coordinator.dispatcher.work.done),
            "chunks": coordinator.cfg.N_CHUNKS, "tokens_per_second": progress.speed,
            "loss": progress.loss and progress.loss * progress.bits, "loss_unit": progress.unit,
            "seconds": round(time.monotonic() - progress.started, 1) if progress.started else 0.0,
            "validation": _last(progress.validations, "step", "figure", "unit"),
            "reward": _last(progress.rewards, "step", "value"), "snapshot": coordinator.shelf.newest,
            "save_dir": run.directory and path_text(run.directory), "banned": dict(list(bans.all().items())[-BANS:]),
            "ban_file": bans.path and path_text(bans.path), "connected": len(workers), "workers": workers[:WORKERS],
            "island": coordinator.island.status()}


def fetch_status(cfg, host, port, access=auth.Access()):
    """The status of the coordinator at host:port, a dict (egg_net.Coordinator.status). Raises NetError."""
    check_address(host, port)
    card = {"role": "status", "id": os.urandom(8).hex(), "name": socket.gethostname()}
    try:
        with contextlib.closing(Link(cfg, host, port, V2, access, card)) as link:
            status = read_json(link.next(STATUS, CONNECT_TIMEOUT))
        describe_status(status)                      # raises an error for one that is not complete
        return status
    except OSError as error:
        raise NetError(f"no coordinator at {host}:{port}: {reason(error)}") from None
    except (ValueError, KeyError, TypeError, AttributeError):
        raise NetError(f"{host}:{port}: a status that cannot be read") from None


def pack_status(status):
    """bytes: the JSON of a status (egg_net.Coordinator.status), with as many entries of its lists as a frame holds."""
    most = WORKERS
    while len(data := json.dumps(status).encode()) > STATUS.most:
        most //= 2
        island = status["island"] and {**status["island"], "peers": status["island"]["peers"][:most]}
        status = {**status, "workers": status["workers"][:most], "island": island,
                  "banned": dict(list(status["banned"].items())[-most:])}
    return data


def describe_status(status):
    """str: a table of what fetch_status gives."""
    of = f" of {status['steps']}" if status["steps"] else ""
    first = "step {step}{of}, {chunks_done} of {chunks} chunks done, {tokens_per_second:,.0f} tokens/s".format(
        **status, of=of)
    if status["loss"] is not None:
        # an older coordinator sends no unit
        first += f", loss {status['loss']:.3f} {status.get('loss_unit', 'units of d-eggs')}"
    if status["validation"]:
        first += ", validation {figure:.3f} {unit} at step {step}".format(**status["validation"])
    if status.get("reward"):
        first += ", reward {value:.4f} at step {step}".format(**status["reward"])
    newest = f", newest snapshot of step {status['snapshot']}" if status["snapshot"] else ""
    lines = [first, f"kept in {status['save_dir']}{newest}" if status["save_dir"] else "not kept",
             *(f"banned: {who}: {why}" for who, why in status["banned"].items())]
    if status["banned"]:
        lines.append(f"to lift a ban remove its line from {status['ban_file']}" if status["ban_file"] else
                     "bans last until the coordinator ends")
    workers, island = status["workers"], status.get("island")    # older coordinators send no islands
    lines += _table(WORKER_COLUMNS, workers, 4) if workers else ["no workers"]
    more = status.get("connected", 0) - len(workers)
    lines += [f"and {more} more"] * (more > 0)
    if island:
        up = sum(peer["state"] == "up" for peer in island["peers"])
        line = f"island {_cell(island['name'])}, epoch {island['epoch']}, {up} of {len(island['peers'])} peers up"
        if island["fitness"] is not None:
            line += f", fitness {island['fitness']:.4f} ({island['kind']})"
        lines += ["", line]
        for epoch in [epoch for epoch in island["epochs"] if epoch["epoch"]][-EPOCHS:]:
            source = "rejuvenated" if epoch["peer_step"] is None else \
                f"the state of {_cell(epoch['from'])} at its step {epoch['peer_step']}"
            lines.append(f"  epoch {epoch['epoch']} from step {epoch['step']}: {source}")
        if island["peers"]:
            lines += _table(PEER_COLUMNS, island["peers"], 4)
    return "\n".join(printable(line[:LINE]).removeprefix("  ") for line in lines)


def _table(columns, entries, words):
    """[line]: an empty one, the titles of the columns, and the entries; what is None stays empty. words: see `table`"""
    rows = [["" if entry[key] is None else _cell(FORMATS.get(key, "{}").format(entry[key]))
             for key in columns.values()] for entry in entries]
    return ["", *table([*columns], rows, words)]


def _cell(value):
    return one_line(str(value), CELL)
