"""Commands that read plan files, without a model.

memgraph show plan.json
memgraph diff before.json after.json
memgraph verify plan.json
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, TypeVar

import typer

from ..errors import PlanError
from ..report.report import Report
from ..report.saved_plan import SavedPlan
from ..report.verification import verify as verify_plan
from .output import NewPage, say, write

File = Annotated[Path, typer.Argument(metavar="PLAN.json", help="a file of `memgraph plan -o`, or Report.to_json()")]
Json = Annotated[bool, typer.Option("--json", help="print JSON")]
WRITTEN = "`memgraph plan ... -o plan.json` writes one"
Parsed = TypeVar("Parsed")


def show(
    file: File,
    html: NewPage = None,
    beside: Annotated[Path | None, typer.Option(help="another plan file, which the page compares with")] = None,
    as_json: Json = False,
) -> int:
    """Print the report of a plan file.

    \b
        memgraph show plan.json
        memgraph show today.json --html plan.html --beside yesterday.json
        memgraph show plan.json --json | jq .measured

    \b
    Exit codes: 0 it fits, 3 it was measured over its budget.
    """
    if beside is not None and html is None:
        raise typer.BadParameter("--beside is for the page: give --html as well, or use `memgraph diff`")
    report = read_plan(file)
    if html is not None:
        say(f"wrote {report.to_html(html, beside=read_plan(beside) if beside else None)}")
    write(report, as_json)
    return 3 if (report.measured or report.peak) > report.budget else 0


def diff(before: File, after: File, as_json: Json = False) -> int:
    """Print what two plans decide differently, and the difference in bytes and time.

    \b
        memgraph diff before.json after.json
    """
    write(read_plan(before).diff(read_plan(after)), as_json)
    return 0


def verify(file: File, as_json: Json = False) -> int:
    """Derive bytes, time and bound of a plan file again: by simulation and exact arithmetic, without a solver.

    \b
        memgraph verify plan.json

    \b
    Exit codes: 0 all that it claims is derived, 3 it does not fit, 1 less is proven than it claims.
    """
    found = verify_plan(_read(file, SavedPlan.from_json))
    write(found, as_json)
    return 3 if found.peak > found.budget else int(not found.holds)


def read_plan(file: Path) -> Report:
    """Return the report that a file holds.

    Raises:
        typer.BadParameter: there is no such file.
        PlanError: the file holds no plan.
    """
    return _read(file, Report.from_json)


def _read(file: Path, parse: Callable[[str], Parsed]) -> Parsed:
    if file.is_dir():
        raise typer.BadParameter(f"{str(file)!r} is a directory, and a plan is a file; {WRITTEN}")
    if not file.is_file():
        raise typer.BadParameter(f"there is no file {str(file)!r}")
    try:
        return parse(file.read_text())
    except UnicodeDecodeError as error:
        raise PlanError(f"{file} is no plan file: it is not text ({error.reason}); {WRITTEN}") from error
    except PlanError as error:
        raise PlanError(f"{file}: {error}") from error
