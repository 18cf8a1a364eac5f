"""What a command writes to its terminal: lines, a progress line below them, colours; and the signals that stop it."""

import contextlib
import copy
import os
import shutil
import signal
import sys
import threading
import time

import egg_config

COLOURS = {"green": "32", "blue": "34"}
# a run stops by these as by Ctrl-C: a terminal that is closed, a job system that gives notice
STOPPING = signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2
HARDLY_ANY = 0.05          # prompts after which rewards differ
LONGEST_NAME, LONGEST_LINES = 80, 4000         # characters of what a worker states about rewards


class Printer:
    """Prints lines and, on a terminal, a progress line below them. Colours only there, and not with NO_COLOR. Every
    text passes `clean` here, whoever wrote it: no escape sequence but those of `colour` reaches a terminal."""

    PROGRESS_EVERY = 0.1       # seconds
    _shown = _text = ""        # progress line: all, its last part
    _next = 0.0                # when it may change

    def __init__(self, stream=None):
        self._out = self.stream = stream or sys.stdout or open(os.devnull, "w")      # it is None where it is closed
        self.terminal = self.stream.isatty()
        self.steered = self.terminal and os.environ.get("TERM") != "dumb"
        self.coloured = self.steered and not os.environ.get("NO_COLOR")

    def line(self, *parts):
        """Prints a line; parts: texts, or (text, colour)."""
        text = "".join(clean(part) if type(part) is str else self.colour(clean(part[0]), part[1]) for part in parts)
        self._write(self._erased() + text + "\n")
        self._text, self._next = "", 0.0
        self.progress()

    def progress(self, text=None):
        """Rewrites the line below the others; text: its last part, None for the one that it has."""
        if text is not None:
            self._text = text
        if self.steered and time.monotonic() >= self._next:
            self._next = time.monotonic() + self.PROGRESS_EVERY
            text = fit(*self._parts(), clean(self._text))
            if text != self._shown:
                self._write("\r\x1b[J" + text)
                self._shown = text

    def clear(self):
        self._text = ""
        self._write(self._erased())

    def write(self, text, name=None):
        self._write(self.colour(clean(text), name))

    def colour(self, text, name):
        return f"\x1b[{COLOURS[name]}m{text}\x1b[0m" if text and name and self.coloured else text

    def _parts(self):
        """[text]: what stands in the progress line before its text; see `fit`."""
        return []

    def _erased(self):
        """What removes the progress line."""
        there, self._shown = self._shown, ""
        return "\r\x1b[J" if there else ""

    def _write(self, text):
        if text and self._out:
            encoding = self.stream.encoding or "utf-8"
            self._out.write(text.encode(encoding, "replace").decode(encoding))
            self._out.flush()


class Console(Printer):
    """The console of a run, a sink of events. It never fails: lines that cannot be written are lost, and that is
    reported once. A line comes at each validation, snapshot and sample, and every LINE_EVERY seconds; on a terminal a
    status line below them is rewritten in place. With `verbose` every step has the line of d-eggs instead. steps,
    minutes: the end of the run, or None. callback(event): gets every event, too."""

    LINE_EVERY = 10.0
    _deggs = 1.0               # the unit of the loss of d-eggs
    _step = _validation = None     # the last event of a step, of a validation
    _step_at = _line_at = 0.0  # when that came, and when the next lasting line is due
    _legend = "(given >>> what the model adds) "         # of the first sample

    def __init__(self, stream=None, quiet=False, verbose=False, steps=None, minutes=None, callback=None):
        super().__init__(stream)
        self.callback = callback
        self.steps = steps
        self.minutes = minutes
        self.live = not verbose
        if quiet:
            self._out = None

    def emit(self, event, line):
        """line: what is printed of the event, None for nothing."""
        if self.callback:
            self.callback(copy.deepcopy(event))      # it may change what it gets
        match event["event"]:
            case "start":
                self._deggs, _ = egg_config.loss_unit(event["config"])
            case "validation":
                self._validation = event
                if self.live:
                    self.line(fit(f"validation at step {event['step']}: {event['value']:.3f} {event['unit']}"))
            case "snapshot" if self.live:
                self.line(f"snapshot of step {event['step']} kept")
            case "step" if self.live:
                self._step = event
                self._step_at = time.monotonic()
                if self._step_at >= self._line_at:
                    self._line_at = self._step_at + self.LINE_EVERY
                    self.line(fit(f"{clock(event['elapsed'])} step {event['step']}", *self._figures()))
                self.progress()
            case "step":
                self.line(self._step_line(event))
            case "sample" if line:
                prompt, text = (event[name].replace("\n", "\u23ce") for name in ("prompt", "text"))     # it is one line
                self.line(line, self._legend, (prompt, "blue"), " >>> ", (text, "green"))
                self._legend = ""
            case _ if line:
                self.line(line)

    def clear(self):
        self._step = None
        super().clear()

    def _parts(self):
        if self._step is None:
            return []
        elapsed = self._step["elapsed"] + time.monotonic() - self._step_at
        minutes = f" of {clock(60 * self.minutes)}" if self.minutes else ""
        steps = f" of {self.steps}" if self.steps else ""
        return [clock(elapsed) + minutes, f"step {self._step['step']}{steps}", *self._figures()]

    def _figures(self):
        step = self._step
        val = "val {value:.2f} {unit}".format(**self._validation) if self._validation else ""
        loss = "" if step["loss"] is None else f"loss {step['loss']:.2f} {step['unit']}"
        return [loss, val, f"{step['tokens_per_second'] / 1e3:,.0f} k/s",
                f"{count_text(step['tokens'])} tokens"]

    def _step_line(self, event):
        """The line of d-eggs; its loss has the unit of d-eggs."""
        sent, received = event["sent"], event["received"]
        # the tokens are those that trained the model whose loss this is
        line = (f"Step {event['step']} | Tokens: {count_text(event['tokens'])} | "
                f"Loss: {(event['loss'] or 0) / self._deggs:.4f} | Time: {1e3 * event['seconds']:.2f} ms | "
                f"Updates: {event['updates']} (n={event['reports']}, max={event['updates']}) | "
                f"Speed: {event['tokens_per_second']:.2f} tok/s | LR: {event['learning_rate']:g} | "
                f"Net: {(sent + received) / event['seconds'] / (1 << 20):.2f} MB/s "
                f"(Tx: {_bytes_text(sent)}, Rx: {_bytes_text(received)})")
        validation = self._validation
        self._validation = None
        if validation:
            line += f" | Val: {validation['value']:.2f} {validation['unit']}"
            if validation["step"] != event["step"]:
                line += f" (step {validation['step']})"
        return line

    def _write(self, text):
        try:
            super()._write(text)
        except OSError as error:
            let_go(self.stream)
            with contextlib.suppress(OSError):
                print(f"egg: the output: {error.strerror}: lines are missing in it from now on", file=sys.stderr)


def rewards_text(texts, mean, numbers):
    """str: what tools.objective.Objective.measured tells."""
    head = "none judged" if mean is None else f"{mean:.4f}, the mean"
    text = f"{head} of {texts} texts after held-out prompts\n  " + ", ".join(
        f"{one_line(name, LONGEST_NAME)} {round(number, 4):,}" for name, number in numbers.items())
    if numbers.get("seen_prompts_differ", 1) < HARDLY_ANY:
        text += "\n  after nearly all prompts the texts earn the same, so that hardly anything can be learnt"
    return text.replace(", seen_texts", "\n  seen: texts").replace("seen_", "").replace("_", " ")[:LONGEST_LINES]


def let_go(stream):
    """Writes to nowhere from now on: the reader is gone or the disk full, and Python would fail again at its exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def fit(*parts):
    """The parts that fit a line of the terminal, as one text."""
    width, text = shutil.get_terminal_size().columns - 1, ""
    for part in filter(None, parts):
        if not text:
            text = part[:width]
        elif len(text) + 2 + len(part) <= width:
            text += "  " + part
    return text


def clean(text):
    """Text without control characters, line ends excepted: nothing in it steers a terminal."""
    return "".join(c if c.isprintable() or c == "\n" else " " if c.isspace() else "" for c in text)


def printable(text):
    """Text from a peer made safe for a log: clean, and indented, so that no line looks like one of this program."""
    return "  " + clean(text).replace("\n", "\n  ")


def one_line(text, most=2000):
    """The same as part of a line, of at most `most` characters. It is cut before anything looks at it."""
    return clean(text[:most].replace("\n", " ")).strip()


def clock(seconds):
    """1:05, 2:03:59."""
    minutes, seconds = divmod(int(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{seconds:02}" if minutes >= 60 else f"{minutes}:{seconds:02}"


def path_text(path):
    """A path as text that can be encoded; its bytes need not be UTF-8."""
    return os.fsencode(path).decode("utf-8", "replace")


def count_text(n):
    return f"{n / 1e9:.2f} B" if n >= 1e9 else f"{n / 1e6:.2f} M"


def _bytes_text(n):
    return f"{n} B" if n < 1 << 10 else f"{n / (1 << 10):.2f} KB" if n < 1 << 20 else f"{n / (1 << 20):.2f} MB"


@contextlib.contextmanager
def stop_signals():
    """Yields a list that gets an element by a signal of STOPPING, in the main thread; a second SIGINT interrupts. One
    that is ignored, as by nohup, stays so."""
    stopped = []

    def on_signal(number, _):
        if stopped and number == signal.SIGINT:
            raise KeyboardInterrupt
        stopped.append(number)

    main = threading.current_thread() is threading.main_thread()
    before = {number: signal.signal(number, on_signal) for number in STOPPING
              if number in STOPPING[:2] or signal.getsignal(number) != signal.SIG_IGN} if main else {}
    try:
        yield stopped
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def table(head, rows, words):
    """[line]: rows under their head; the first columns, of words, are aligned to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(head, *rows)]
    return ["  ".join(cell.ljust(n) if i < words else cell.rjust(n)
                      for i, (cell, n) in enumerate(zip(row, widths))).rstrip() for row in (head, *rows)]
