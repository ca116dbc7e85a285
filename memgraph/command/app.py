"""The command `memgraph`.

    memgraph plan train.py:setup --budget 8GB   ->   the report on stdout, progress on stderr, exit code 0 or 3

Exit codes: 0 it fits, 3 it does not, 1 an error, 2 wrong usage, 130 interrupted.
"""

from __future__ import annotations

import os
import traceback
import warnings
from typing import Any

import typer

from passes import BudgetError

from ..errors import MemgraphError
from ..system.pass_log import DEBUG
from .demo import demo
from .doctor import doctor
from .files import diff, show, verify
from .fit import fit
from .output import fail, say
from .planning import explain, plan, sweep

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

app = typer.Typer(
    name="memgraph",
    help=HELP,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for each in (plan, fit, sweep, explain, show, diff, verify, doctor, demo):
    app.command()(each)


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
