"""What a command writes to its terminal: lines, a progress line below them, colours; and the signals that stop it."""

import contextlib
import math
import os
import re
import shutil
import signal
import sys
import threading
import time


class Console:
    """Where lines go. On a terminal a progress line may stand below them; colours only there, and not with NO_COLOR.

    The steps of a run: on a terminal a status line that is rewritten in place, and a lasting line at each validation,
    snapshot and sample, or every LINE_EVERY seconds. Elsewhere, and with `verbose`, the line of d-eggs for each."""

    COLOURS = {"bold": "1", "red": "31", "green": "32", "yellow": "33", "blue": "34", "magenta": "35", "cyan": "36",
               "white": "37", "grey": "90"}
    PROGRESS_EVERY = 0.1       # seconds
    LINE_EVERY = 10.0

    def __init__(self, stream=None, quiet=False, verbose=False):
        self.stream, self.quiet = stream or sys.stdout, quiet
        self.terminal = self.stream.isatty()
        self.live = self.terminal and not verbose
        self._status, self._line_at = [], 0.0                # parts of the status line; when the next one lasts
        self._references, self._last_validation, self._bits, self._unit = "", "", 1.0, ""
        self.coloured = self.terminal and not os.environ.get("NO_COLOR")
        self._progress, self._next = False, 0.0              # a progress line stands there; when it may change
        self._last_loss = math.inf
        self._validation = None                              # an event that the next step's line will show

    def tell(self, event, line):
        """Makes the console a sink of events (cluster.event_log)."""
        if self.live and event["event"] in self.LIVE:
            self.LIVE[event["event"]](self, event)
        elif event["event"] == "validation":
            self._validation = event
        elif event["event"] == "step":
            self.line(self._step_line(event))
        elif line is not None:
            before, newline, text = line.rpartition("\n")    # a sample is one line
            self.line(before + newline + self.sample(text) if event["event"] == "sample" else line)

    def _live_start(self, event):
        config = event["config"]
        self._bits = 16 / (config["SOFTMAX_EXP_SCALE"] * math.log(2))        # of a unit of loss
        self._unit = "bits/byte" if config["VOCAB_SIZE"] == 256 else "bits/token"

    def _live_references(self, event):
        self._references = "(" + ", ".join(f"{name} {value:.2f}" for name, value in event["values"].items()) + ")"

    def _live_validation(self, event):
        self._last_validation = f"val {event['value']:.2f} {event['unit']}"
        self.line(_fit(f"validation at step {event['step']}: {event['value']:.3f} {event['unit']}", self._references))

    def _live_snapshot(self, event):
        self.line(f"snapshot of step {event['step']} kept")

    def _live_step(self, event):
        minutes, seconds = divmod(int(event["elapsed"]), 60)
        self._status = [f"{minutes}:{seconds:02} step {event['step']}", self._last_validation,
                        f"loss {event['loss'] * self._bits:.2f} {self._unit}", f"{count_text(event['tokens'])} tokens",
                        f"{event['tokens_per_second'] / 1e3:,.0f} k/s", self._references]
        now = time.monotonic()
        if now >= self._line_at:
            self._line_at = now + self.LINE_EVERY
            self.line(_fit(*self._status))
        self.progress()

    LIVE = dict(start=_live_start, references=_live_references, validation=_live_validation, snapshot=_live_snapshot,
                step=_live_step)

    def _step_line(self, event):
        better, self._last_loss = event["loss"] <= self._last_loss, event["loss"]
        loss = self.colour(f"{event['loss']:.4f}", "green" if better else "red")
        speed = self.colour(f"{event['tokens_per_second']:.2f}", "blue")
        # the tokens are those that trained the model whose loss this is
        line = (f"Step {event['step']} | Tokens: {count_text(event['tokens'])} | Loss: {loss} | "
                f"Time: {1e3 * event['seconds']:.2f} ms | "
                f"Updates: {event['updates']} (n={event['reports']}, max={event['updates']}) | Speed: {speed} tok/s | "
                f"LR: {event['learning_rate']:g} | "
                f"Net: {(event['sent'] + event['received']) / event['seconds'] / (1 << 20):.2f} MB/s "
                f"(Tx: {_bytes_text(event['sent'])}, Rx: {_bytes_text(event['received'])})")
        validation, self._validation = self._validation, None
        if validation:
            line += f" | Val: {self.colour(format(validation['value'], '.2f'), 'blue')} {validation['unit']}"
            line += f" (step {validation['step']})" if validation["step"] != event["step"] else ""
        return line

    def line(self, text):
        if not self.quiet:
            self._write(("\r\x1b[K" if self._progress else "") + text + "\n")
            self._progress = False
            if self._status:
                self._next = 0.0
                self.progress()

    def progress(self, text=""):
        """Rewrites the line below the others: the status of the run, if there is one, and `text`."""
        if self.terminal and not self.quiet and time.monotonic() >= self._next:
            self._write("\r\x1b[K" + _fit(*self._status, text))
            self._progress, self._next = True, time.monotonic() + self.PROGRESS_EVERY

    def clear(self):
        """Removes the progress line and forgets the status."""
        self._status = []
        if self._progress:
            self._write("\r\x1b[K")
            self._progress = False

    def write(self, text, name=None):
        """Writes part of a line at once, in a colour. Control characters do not reach a terminal."""
        if self.terminal:
            text = "".join(c for c in text if c.isprintable() or c in "\n\t")
        self._write(self.colour(text, name) if name and text else text)

    def sample(self, text):
        """`text` with prompt and continuation in different colours, if it is a sample (egg_net.sample)."""
        parts = re.fullmatch(r"( *sample at step \d+: | *)(.*?)( >>> )(.*)", text, re.DOTALL)
        if not parts:
            return text
        return parts[1] + self.colour(parts[2], "blue") + parts[3] + self.colour(parts[4], "green")

    def colour(self, text, name):
        return f"\x1b[{self.COLOURS[name]}m{text}\x1b[0m" if self.coloured else text

    def _write(self, text):
        encoding = self.stream.encoding or "utf-8"
        self.stream.write(text.encode(encoding, "replace").decode(encoding))
        self.stream.flush()


def _fit(*parts):
    """The parts that fit a line of the terminal, as one text."""
    width, text = shutil.get_terminal_size().columns - 1, ""
    for part in filter(None, parts):
        if not text:
            text = part[:width]
        elif len(text) + 2 + len(part) <= width:
            text += "  " + part
    return text


def printable(text):
    """Text from a peer made safe for a terminal and a log: no control characters, and indented, so that no line of it
    looks like one of this program."""
    lines = ("".join(c for c in line.replace("\t", " ") if c.isprintable()) for line in text.split("\n"))
    return "\n".join("  " + line for line in lines)


def one_line(text, most=2000):
    """The same as part of a line, of at most `most` characters."""
    return printable(text.replace("\n", " ")).strip()[:most]


def path_text(path):
    """A path as text that can be encoded; its bytes need not be UTF-8."""
    return os.fsencode(path).decode("utf-8", "replace")


def count_text(n):
    """A number of tokens in millions or billions."""
    return f"{n / 1e9:.2f} B" if n >= 1e9 else f"{n / 1e6:.2f} M"


def _bytes_text(n):
    return f"{n} B" if n < 1 << 10 else f"{n / (1 << 10):.2f} KB" if n < 1 << 20 else f"{n / (1 << 20):.2f} MB"


@contextlib.contextmanager
def stop_signals():
    """Yields a list that is no longer empty after SIGINT or SIGTERM; a second SIGINT interrupts as usual."""
    stopped = []

    def on_signal(number, _):
        if stopped and number == signal.SIGINT:
            raise KeyboardInterrupt
        stopped.append(number)

    if threading.current_thread() is not threading.main_thread():
        yield stopped
        return
    before = [(number, signal.signal(number, on_signal)) for number in (signal.SIGINT, signal.SIGTERM)]
    try:
        yield stopped
    finally:
        for number, handler in before:
            signal.signal(number, handler)
