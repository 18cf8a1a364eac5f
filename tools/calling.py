"""Commands that can be pasted in the present directory."""

import os
import shlex
import shutil
import sys

from egg_config import ROOT


def command_line(*arguments):
    """A command line that calls this program with the present Python, to be pasted in this directory."""
    name = os.path.basename(sys.executable)
    python = name if sys.executable == shutil.which(name) else _from_here(sys.executable)
    return shlex.join([python, _from_here(os.path.join(ROOT, "egg.py")), *map(str, arguments)])


def _from_here(path):
    """The shorter form of a path, relative to this directory or absolute."""
    return min(os.path.relpath(path), os.path.abspath(path), key=len)
