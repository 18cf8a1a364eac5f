"""Commands that can be pasted in the present directory: with the present Python, the present pip."""

import os
import re
import shlex
import shutil
import sys

from egg_config import ROOT


def command_line(*arguments):
    """A command line that calls this program with the present Python, to be pasted in this directory."""
    name = os.path.basename(sys.executable)
    python = name if sys.executable == shutil.which(name) else from_here(sys.executable)
    return shlex.join([python, from_here(ROOT, "egg.py"), *map(str, arguments)])


def from_here(*parts):
    """The shorter form of a path, relative to this directory or absolute."""
    path = os.path.join(*parts)
    return min(os.path.relpath(path), os.path.abspath(path), key=len)


def as_called(text):
    """`text` with its commands changed so that they work in this directory with the present Python."""
    lists = from_here(ROOT, "requirements")
    text = re.sub(r"(?<![\w./-])python egg\.py", lambda _: command_line(), text)
    text = text.replace("-r requirements/", f"-r {shlex.quote(lists)}/")
    return text.replace("pip install ", pip() + " install ")


def aligned(examples):
    """`examples`, with the comments of all commands in one column after `as_called`."""
    grown = " " * (len(command_line()) - len("python egg.py"))
    return "\n".join(line if "python egg.py" in line else re.sub(r"(?<=\S)(?=   +\S)", grown, line)
                     for line in examples.split("\n"))


def pip():
    """The command that installs into the present Python: the one that `make` noted, or pip."""
    try:
        with open(os.path.join(sys.prefix, "pip")) as file:
            return file.read().strip().replace(".venv/", shlex.quote(from_here(sys.prefix)) + "/")
    except OSError:
        return shlex.quote(sys.executable) + " -m pip"


def installation():
    """Advice where a library is missing that every command needs."""
    venv = os.path.join(ROOT, ".venv")
    if os.path.exists(os.path.join(venv, "ready")) and not os.path.samefile(sys.prefix, venv):
        words = [from_here(venv, "bin", "python"), from_here(ROOT, "egg.py"), *sys.argv[1:]]
        return f"it is installed for another: {shlex.join(words)}"
    return f"install it with `make -C {shlex.quote(from_here(ROOT))} install`"
