"""The command `memgraph`.

    memgraph plan train.py:setup --budget 8GB   ->   the report on stdout, progress on stderr, exit code 0 or 3

Exit codes: 0 it fits, 3 it does not, 1 an error, 2 wrong usage, 130 interrupted.
"""

from __future__ import annotations

import os
import platform
import sys
import traceback
import warnings
from collections.abc import Sequence
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import Annotated, Any

import typer

from passes import BudgetError

from ..errors import MemgraphError
from ..system.pass_log import DEBUG
from .output import fail, say

UsageError: Any = typer.BadParameter.__bases__[0]  # of click, or of typer's own copy of it
FITS, FAILED, USAGE, DOES_NOT_FIT, INTERRUPTED = 0, 1, 2, 3, 130

HELP = """Will a training step fit a number of bytes, what does it cost, and why is its peak there?

\b
    memgraph plan train.py:setup --budget 8GB --html plan.html
    memgraph explain train.py:setup
    memgraph fit llama --device h200 --budget 24GB --dtype bfloat16

\b
Exit codes: 0 it fits, 3 it does not, 1 an error, 2 wrong usage, 130 interrupted.
"""

COMMANDS = {  # and the module that has it
    "plan": "planning", "fit": "fit", "sweep": "planning", "explain": "planning", "show": "files", "diff": "files",
    "verify": "files", "doctor": "doctor", "demo": "demo",
}  # fmt: skip
VERSIONED = {"memgraph": "memgraph-torch", "torch": "torch"}
TEXT = "files"  # the module that needs no torch


def app_of(words: Sequence[str]) -> typer.Typer:
    """Return the command line with the command that these words name, or with all, whose import takes seconds."""
    app = typer.Typer(
        name="memgraph",
        help=HELP,
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback()(_options)  # one command is a command too
    named = next((word for word in words if not word.startswith("-")), "")
    if named in COMMANDS and COMMANDS[named] != TEXT and {"-h", "--help"}.isdisjoint(words):
        say("loading torch")
    wanted = [named] if named in COMMANDS else [] if "--version" in words else [*COMMANDS]
    for name in wanted:
        app.command(name)(getattr(import_module(f".{COMMANDS[name]}", __package__), name))
    return app


def _print_versions(asked: bool) -> None:
    if asked:
        known = (f"{name} {_version(package)}" for name, package in VERSIONED.items())
        print(", ".join([*known, f"Python {platform.python_version()}"]))
        raise typer.Exit


def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_versions, is_eager=True, help="Print versions and exit.")
    ] = False,
) -> None:
    """Options of the program itself."""


def _version(package: str) -> str:
    """Return the version of an installed package, which is not imported for it."""
    try:
        return version(package)
    except PackageNotFoundError:
        return "(not installed)"


def main(arguments: list[str] | None = None) -> int:
    """Run a command line and return its exit code."""
    with warnings.catch_warnings():
        warnings.showwarning = _warned
        return _run(arguments)


def _warned(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: object = None,
    line: object = None,
) -> None:
    """Write a warning as other lines are; the line of code that it came from is the library's."""
    say(f"warning: {message}")


def _run(arguments: list[str] | None) -> int:
    try:
        app = app_of(sys.argv[1:] if arguments is None else arguments)
        code = app(args=arguments, prog_name="memgraph", standalone_mode=False)
        if code == INTERRUPTED:  # typer has caught it
            raise KeyboardInterrupt
        return code if isinstance(code, int) else FITS
    except UsageError as error:
        error.show()
        return USAGE
    except BudgetError as error:
        return fail(str(error), DOES_NOT_FIT)
    except (KeyboardInterrupt, typer.Abort):
        return fail("interrupted", INTERRUPTED)
    except BrokenPipeError:
        return _unread()
    except SystemExit as error:
        if isinstance(error.__context__, BrokenPipeError):  # rich's console turns one into the other
            return _unread()
        return fail(f"the code of the model ended the process, with exit code {error.code}", FAILED)
    except Exception as error:
        return fail(_told(error), FAILED)


def _unread() -> int:
    """Return the exit code of a command whose output goes to a closed pipe."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # what is left in buffers is written at exit
    return FAILED


def _told(error: Exception) -> str:
    """Return the text of an error, with the source line where that of the user raised it."""
    if os.environ.get(DEBUG, "") not in ("", "0"):
        traceback.print_exception(error)
    text = f"{type(error).__name__}: {error}"
    if isinstance(error, MemgraphError | OSError):
        return text
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return f"{text} ({frame.filename}:{frame.lineno}; {DEBUG}=1 shows the traceback)"
