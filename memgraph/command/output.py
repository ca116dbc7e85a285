"""Output of a command: data to stdout, messages to stderr.

write(report, as_json=False)   ->   text, coloured in a terminal unless NO_COLOR is set
fail("no such file", 1)        ->   `memgraph: no such file` on stderr, and 1
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import Annotated, Protocol

import typer
from rich.console import Console, RenderableType

from ..report.given_reports import written_file
from ..report.report import Report
from ..report.tables import fitted, printed


class Writable(Protocol):
    """A result that prints as text for people, or as JSON for programs."""

    def to_json(self) -> str: ...
    def __rich__(self) -> RenderableType: ...


def write(what: Writable, as_json: bool) -> None:
    """Write a result to stdout at once: as JSON, or as text that a pipe gets in lines of 120 columns."""
    if as_json:
        print(what.to_json(), flush=True)
    elif sys.stdout.isatty():
        console = Console()
        whole, console.width = fitted(what, console.width)
        console.print(whole)
    else:
        print(printed(what), flush=True)


def new_file(given: Path | None) -> Path | None:
    """Check an option that names a file to write, before any work is done.

    Raises:
        typer.BadParameter: it is a folder, or its folder does not exist.
    """
    try:
        return None if given is None else written_file(given)
    except (OSError, ValueError) as error:
        raise typer.BadParameter(str(error)) from error


NewPlan = Annotated[
    Path | None, typer.Option("--output", "-o", help="write the plan to this file, as JSON", callback=new_file)
]
NewPage = Annotated[Path | None, typer.Option(help="write a page for a browser to this file", callback=new_file)]


def save(report: Report, output: Path | None, html: Path | None = None) -> None:
    """Write a plan file and a page, where they are asked for."""
    if output is not None:
        output.write_text(report.to_json())
        say(f"wrote {output}")
    if html is not None:
        say(f"wrote {report.to_html(html)}")


@contextmanager
def stdout_for_data() -> Iterator[None]:
    """Send what code of the user prints to stderr: Python's output, and that of the process and its children."""
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        with redirect_stdout(sys.stderr):
            yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)


def say(message: str) -> None:
    """Write a line to stderr."""
    print(f"memgraph: {message}", file=sys.stderr, flush=True)


def fail(message: str, code: int) -> int:
    """Write a message to stderr; return the exit code."""
    say(message)
    return code
