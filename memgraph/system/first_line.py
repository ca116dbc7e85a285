"""The first line of the command line, printed before torch is imported, which takes seconds.

memgraph plan train.py:setup --budget 8GB   ->   memgraph: loading torch        after 0.1 s
                                                 memgraph: loading train.py:setup
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import PurePath

HELP = {"-h", "--help"}
MODULE, SCRIPTS = "memgraph", ("memgraph", "memgraph.exe")
VALUED = ("-X", "-W")  # options of Python whose value is a word of its own


def print_first_line() -> None:
    """Print the line if this process runs the command line, and not its help."""
    if is_command(sys.orig_argv) and HELP.isdisjoint(sys.orig_argv):
        print("memgraph: loading torch", file=sys.stderr, flush=True)


def is_command(words: Sequence[str]) -> bool:
    """Return True if a process that was started with these words runs a command of memgraph.

    It runs the script `memgraph`, or `python -m memgraph`.
    """
    rest = iter(words[1:])
    for word in rest:
        if word == "-m":
            return next(rest, "") == MODULE and next(rest, None) is not None
        if word in VALUED:
            next(rest, None)
        elif not word.startswith("-"):
            return PurePath(word).name in SCRIPTS and next(rest, None) is not None
        elif word == "-c":
            break
    return False
