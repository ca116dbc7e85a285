"""Output of a command: data to stdout, messages to stderr.

write(report, as_json=False)   ->   text, coloured in a terminal unless NO_COLOR is set
fail("no such file", 1)        ->   `memgraph: no such file` on stderr, and 1
"""

from __future__ import annotations

import sys
from typing import Protocol

from rich.console import Console, RenderableType

from ..report.tables import printed


class Writable(Protocol):
    """A result that prints as text for people, or as JSON for programs."""

    def to_json(self) -> str: ...
    def __rich__(self) -> RenderableType: ...


def write(what: Writable, as_json: bool) -> None:
    """Write a result to stdout: as JSON, or as text that a pipe gets in lines of 120 columns."""
    if as_json:
        print(what.to_json())
    elif sys.stdout.isatty():
        Console().print(what)
    else:
        print(printed(what))


def say(message: str) -> None:
    """Write a line to stderr."""
    print(f"memgraph: {message}", file=sys.stderr, flush=True)


def fail(message: str, code: int) -> int:
    """Write a message to stderr; return the exit code."""
    say(message)
    return code
