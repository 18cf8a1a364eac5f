"""What a coordinator measures of its run (loss, speed, validations, bytes) and reports about it and its workers: the
status, and the table of `egg.py status`."""

import contextlib
import math
import os
import socket
import time
from types import SimpleNamespace

import egg_config
from cluster import auth
from cluster.console import count_text, one_line, path_text, printable, rewards_text, table
from cluster.hub import NetError, reason
from cluster.link import CONNECT_TIMEOUT, Link, check_address
from cluster.wire import FrameError, STATUS, V2, read_json
from model import steps

CELL, LINE = 64, 4000      # characters of a text in the table, and of a line
WORKERS, BANS = 2000, 100  # in a status, at most: they fit a frame
# the columns of the tables, {title: field}, and how some fields are shown
WORKER_COLUMNS = {"worker": "name", "device": "device", "address": "address", "state": "state", "step": "step",
                  "chunks": "chunks", "s/chunk": "chunk_seconds", "up/s": "up", "down/s": "down", "idle": "idle",
                  "last seen": "last_seen"}
PEER_COLUMNS = {"peer": "name", "address": "address", "state": "state", "compares": "kind",
                "fitness": "fitness", "step": "step", "epoch": "epoch", "taken": "taken",
                "last seen": "last_seen"}
FORMATS = {"chunk_seconds": "{:.3g}", "fitness": "{:.4f}", "last_seen": "{:.1f} s", "up": "{:,.0f} B",
           "down": "{:,.0f} B", "idle": "{:.0%}"}
MUCH_WORSE = 1.15          # times the best validation so far
BY_HEART = 1.02, 5         # times the best validation, and validations since, where the loss has fallen all the while
LEARNT = 300               # updates after which a model is better than a table of single tokens
RISEN = 0.15               # bits that language may lose to rewards before advice is due
AS_HIGH = 0.1              # share by which the reward with other rows is less, where the prompt does not matter
# {figure beside the reward: what it is called when that halves, what to change}
VARIETY, SHORT = "a lower TEMPERATURE, or reward variety", "a reward that such texts do not earn"
SHRINKS = (("distinct_texts", "variety has halved", VARIETY), ("distinct_words", "variety has halved", VARIETY),
           ("words_a_text", "texts have become short", SHORT), ("letters_a_text", "texts have become short", SHORT))
MOST_EXCHANGE = 0.1        # share of a worker's time in which its bytes may be on their way
MOST_LOCAL_STEPS = 64      # that are advised: more were not tried
MOST_BITS = 64             # of a validation, a token or byte: more cannot be right


# --- measures ---------------------------------------------------------------------------------------------------------

class Progress:
    """started: when the first chunk was handed out (time.monotonic), None before; loss, speed (tokens/s): of the last
    step; bits: of one unit of this loss, that of d-eggs, in `unit`, in which losses are shown; validations: [(step,
    figure, unit)], the first and the last three; rewards: [(step, mean on held-out prompts, texts)], the same."""

    started = loss = _completed = None
    speed = 0.0
    _written = 0               # tokens a step, for rewards
    target = patience = None   # validations that end the run: one this good, so many in a row without a better one
    unigram = 0.0              # the validation of a table of single tokens, where it is known
    enough = ""                # why they have ended it, for the last line
    _worse = 0
    _lasted = 0.0              # seconds, of the last step

    def __init__(self, cfg, run, events):
        self.cfg = cfg
        self.run = run
        self.events = events
        self.first_step = run.step
        self.validations = []
        self.rewards = []
        self._most = {}                                                    # {name of SHRINKS: the most so far}
        self._advised = set()                                              # what was advised
        self.links = dict.fromkeys(("up", "down", "idle", "exchange"))     # of a worker, while nothing is known
        self._best = math.inf, 0                                           # validation, step
        self._loss_then = None                                             # at that step
        self.traffic = SimpleNamespace(sent=0, received=0)                 # bytes
        self.bits, self.unit = egg_config.loss_unit(cfg.constants())

    def begin_step(self):
        self._updates = []           # weights changed by the last update, of every worker that reports them
        self._step_started = time.monotonic()
        self._sent = self.traffic.sent
        self._received = self.traffic.received

    def chunk_handed_out(self):
        if not self.started:
            self.started = self._step_started = time.monotonic()

    def result(self, updates):
        if updates:
            self._updates.append(updates)

    @property
    def updates(self):
        return max(self._updates, default=0)

    def cooling(self, last, minutes):
        """What the step that ends says (model.steps), or with LOCAL_STEPS that which begins, of the next: of a run that
        is planned up to step `last`, for so many minutes, or neither: None."""
        early = self.cfg.LOCAL_STEPS > 1
        begun, step = self.first_step, self.run.step + early
        seconds = time.monotonic() - self.started + early * self._lasted if self.started else 0
        return steps.cooling_at(max((step - begun) / max(1, last - begun) if last is not None else 0,
                                    seconds / (60 * minutes) if minutes else 0))

    def of_step(self, step, sum_loss):
        """The fields of the event of a step that its record knows. sum_loss: None where no chunk of it read text."""
        self.loss = sum_loss and sum_loss / (self.cfg.STEP_TOKENS * 16 * self.cfg.LOSS_SCALE)
        return {"step": step, "tokens": self.run.tokens(step),
                "loss": self.loss and round(self.loss * self.bits, 7), "unit": self.unit}

    def complete_step(self, step, sum_loss, fitness):
        """The fields of the event of a completed step, whose packed digits are `fitness`."""
        now = self._completed = time.monotonic()
        seconds = self._lasted = max(now - self._step_started, 1e-6)
        self.speed = (self.cfg.STEP_TOKENS + self._written) / seconds
        rate = steps.learning_rate(self.cfg, step * self.cfg.LOCAL_STEPS, steps.cooling_of(self.cfg, fitness))
        return {**self.of_step(step, sum_loss), "updates": self.updates, "reports": len(self._updates),
                "learning_rate": rate, "seconds": round(seconds, 6), "elapsed": round(now - self.started, 3),
                "tokens_per_second": round(self.speed, 2), "sent": self.traffic.sent - self._sent,
                "received": self.traffic.received - self._received}

    @staticmethod
    def figure(tokens, n_bytes, nats):
        """(figure, unit) of what a worker states about a validation. Raises FrameError."""
        bits = nats / math.log(2) if tokens else math.nan
        if not (0 <= bits <= MOST_BITS * tokens and bits <= MOST_BITS * (n_bytes or tokens)):
            raise FrameError(f"wrong validation: {nats} nats over {tokens} tokens of {n_bytes} bytes")
        return bits / (n_bytes or tokens), "bits/byte" if n_bytes else "bits/token"

    def validated(self, step, figure, unit):
        """Notes the figure of a step, and warns of one that is much worse. Returns whether it was noted."""
        noted = self._measured(self.validations, "validation", step, figure, unit=unit)
        if noted:
            best, at = self._best = min(self._best, (figure, step))
            self._worse = 0 if at == step else self._worse + 1
            if not self._worse:
                self._loss_then = self.loss
            poor = best > self.unigram > 0           # than a table of single tokens
            by_heart = (None not in (self.loss, self._loss_then) and self.loss < self._loss_then
                        and self._worse >= BY_HEART[1] and figure > BY_HEART[0] * best and not poor)
            if self.target and figure <= self.target:
                self.enough = f", as the validation has come to {figure:.4f} {unit}"
            elif self.patience and self._worse >= self.patience:
                self.enough = f", by --patience {self._worse}: no validation was better than that of step {at}"
            if step * self.cfg.LOCAL_STEPS >= LEARNT and poor and "unigram" not in self._advised:
                self._advised.add("unigram")
                self.events.warn(f"step {step}: the model is no better than a table of single tokens, {best:.3f} to "
                                 f"{self.unigram:.3f} {unit}: begin again with a larger rate (LR_SCHEDULE), other "
                                 "SHIFT_* constants or a smaller model")
            if self.cfg.OBJECTIVE:
                self._advise("a larger TEXT_SHARE, or smaller rates", figure >= best + RISEN,
                             f"step {step}: language has become worse, {best:.3f} to {figure:.3f} {unit} since {at}")
            elif figure > MUCH_WORSE * (self.validations[-2][1] if by_heart else best):
                self.events.warn(f"step {step}: the validation has become much worse, {figure:.4f} {unit} after "
                                 f"{best:.4f} at step {at}: a worker may compute wrongly (egg.py status lists them), "
                                 "or the learning rate is too high")
            elif by_heart and "by heart" not in self._advised:
                self._advised.add("by heart")
                self.events.warn(f"step {step}: the model learns the text by heart: the loss falls, but the validation "
                                 f"was best at step {at}, {best:.3f} {unit}, and is {figure:.3f}. --best takes that "
                                 "state, --patience ends such a run; more text, a smaller model or a larger "
                                 "ADAM_WEIGHT_DECAY help")
        return noted

    def check_reward(self, texts, reward, shown):
        """What `rewarded` takes, from the JSON of a worker. Raises FrameError for what no worker of this run can have.
        """
        with contextlib.suppress(ValueError, LookupError, TypeError, AttributeError):
            shown = read_json(shown)
            if (texts and abs(reward) <= 1 << 30 and self.cfg.OBJECTIVE and type(shown["news"]) is str
                    and all(type(x) in (int, float) for x in shown["numbers"].values())):
                return shown
        raise FrameError(f"wrong reward: {reward} of {texts} texts")

    def rewarded(self, step, texts, reward, shown):
        """Notes the mean reward on held-out prompts of a step. shown: what tools.objective.Objective.measured tells
        more. Returns whether it was noted."""
        numbers = shown["numbers"]
        line = f"reward at step {step}: {rewards_text(texts, reward, numbers)}\n{printable(shown['news'][:LINE])}"
        noted = self._measured(self.rewards, "reward", step, reward, line.strip(), texts=texts, numbers=numbers)
        if noted:
            self._written = numbers.get("written_a_step", 0)
            self.events.emit("completions", step=step, completions=shown.get("completions"))
            for name, what, advice in SHRINKS:
                now = numbers.get(name, 0)
                most = self._most[name] = max(self._most.get(name, 0), now)
                self._advise(advice, 2 * now <= most > 0,
                             f"step {step}: {what}, {now:.4g} {name.replace('_', ' ')} after {most:.4g}")
            others = numbers.get("with_other_rows", -math.inf)
            self._advise("a reward for which the prompt matters", reward > self.rewards[0][1]
                         and reward - others <= AS_HIGH * abs(reward), f"step {step}: the texts earn as much with the "
                         f"prompts and columns of other rows, {others:.4f} of {reward:.4f}")
        return noted

    def _advise(self, advice, due, line):
        """Warns with an advice, once."""
        if due and advice not in self._advised:
            self._advised.add(advice)
            self.events.warn(f"{line}: if that is too much, begin again with {advice} (docs/OBJECTIVES.md)")

    def check_link(self, title, up, down, exchange):
        """Warns, once, where bytes are on their way for more than a tenth of a worker's time: what to set."""
        cfg = self.cfg
        if exchange <= MOST_EXCHANGE or "exchange" in self._advised:
            return
        self._advised.add("exchange")
        times = math.ceil(exchange / (1.001 - exchange) / MOST_EXCHANGE)
        if cfg.PERTURB == "units" and not cfg.OBJECTIVE and cfg.N_CHUNKS <= egg_config.MOST_RUNS:
            possible, settings = times * cfg.LOCAL_STEPS <= MOST_LOCAL_STEPS, f"LOCAL_STEPS={times * cfg.LOCAL_STEPS}"
            settings += " -D VOTE_LEVELS=7" * (cfg.VOTE_LEVELS != 7)
        else:
            possible = times * cfg.CHUNK_SIZE <= egg_config.most_windows(cfg)
            settings = f"CHUNK_SIZE={times * cfg.CHUNK_SIZE} -D POPULATION_SIZE={times * cfg.POPULATION_SIZE}"
        self.events.warn(f"worker {title}: {exchange:.0%} of its time goes into {up / 1e6:.2f} MB/s up and "
                         f"{down / 1e6:.2f} MB/s down: " + (
                             f"a new run with -D {settings} sends less often" if possible else
                             "chunks are as large as they can be: make an island of it (docs/ISLANDS.md)"), peer=True)

    def _measured(self, known, kind, step, value, line=None, **details):
        """Notes a measure unless its step is too old or has one in `known`. Returns whether it was noted."""
        if (not max(self.run.step - 1, self.run.start.step) <= step <= self.run.step
                or any(entry[0] == step for entry in known[-2:])):
            return False
        del known[1:-2]
        known.append((step, value, *details.values()))
        if any(self.run.held_out):
            details["of"] = self.run.held_out.hex()[:16]
        self.events.emit(kind, line, step=step, tokens=self.run.tokens(step), value=round(value, 6), **details)
        return True

    @property
    def seconds(self):
        """From the first chunk handed out to the last completed step, 0 without one."""
        return self._completed - self.started if self._completed else 0.0

    def summary(self):
        """str: what the coordinator did."""
        tokens = (self.run.step - self.first_step) * self.cfg.STEP_TOKENS
        speed = f" in {self.seconds:.1f} s, {tokens / self.seconds:,.0f} tokens/s" if self.seconds else ""
        return f"\nsteps {self.first_step} to {self.run.step}: {count_text(tokens)} tokens evaluated{speed}"


# --- the status -------------------------------------------------------------------------------------------------------

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


def describe_status(status):
    """str: a table of what fetch_status gives."""
    target = f" of {status['steps']}" if status["steps"] else ""
    first = "step {step}{target}, {chunks_done} of {chunks} chunks done, {tokens_per_second:,.0f} tokens/s".format(
        **status, target=target)
    if status["loss"] is not None:
        first += f", loss {status['loss']:.3f} {status['loss_unit']}"
    if status["validation"]:
        first += ", validation {figure:.3f} {unit} at step {step}".format(**status["validation"])
    if status["reward"]:
        first += ", reward {value:.4f} at step {step}".format(**status["reward"])
    newest = f", newest snapshot of step {status['snapshot']}" if status["snapshot"] else ""
    lines = [first, f"kept in {status['save_dir']}{newest}" if status["save_dir"] else "not kept",
             *(f"banned: {who}: {why}" for who, why in status["banned"].items())]
    if status["banned"]:
        lines.append(f"to lift a ban remove its line from {status['ban_file']}" if status["ban_file"] else
                     "bans last until the coordinator ends")
    workers, island = status["workers"], status["island"]
    lines += _table(WORKER_COLUMNS, workers, 4) if workers else ["no workers"]
    unlisted = status["connected"] - len(workers)
    lines += [f"and {unlisted} more"] * (unlisted > 0)
    if island:
        up = sum(peer["state"] == "up" for peer in island["peers"])
        line = f"island {_cell(island['name'])}, epoch {island['epoch']}, {up} of {len(island['peers'])} peers up"
        if island["fitness"] is not None:
            line += f", fitness {island['fitness']:.4f} ({island['kind']})"
        lines += ["", line]
        if island["peers"]:
            lines += _table(PEER_COLUMNS, island["peers"], 4)
    return "\n".join(printable(line[:LINE]).removeprefix("  ") for line in lines)


def _table(columns, entries, words):
    """[line]: an empty one, the titles of the columns, and the entries; what is None stays empty. words: see `table`"""
    # an older coordinator tells less of a worker
    rows = [["" if (value := entry.get(key)) is None else _cell(FORMATS.get(key, "{}").format(value))
             for key in columns.values()] for entry in entries]
    return ["", *table([*columns], rows, words)]


def _cell(value):
    return one_line(str(value), CELL)
