"""Commands that read plan files, without a model.

memgraph show plan.json
memgraph diff before.json after.json
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ..report.report import Report
from .output import write

File = Annotated[Path, typer.Argument(metavar="PLAN.json", help="a file of `memgraph plan -o`, or Report.to_json()")]
Json = Annotated[bool, typer.Option("--json", help="print JSON")]


def show(file: File, as_json: Json = False) -> int:
    """Print the report of a plan file.

    \b
        memgraph show plan.json
        memgraph show plan.json --json | jq .measured

    \b
    Exit codes: 0 it fits, 3 it was measured over its budget.
    """
    report = read_plan(file)
    write(report, as_json)
    return 3 if (report.measured or report.peak) > report.budget else 0


def diff(before: File, after: File, as_json: Json = False) -> int:
    """Print what two plans decide differently, and the difference in bytes and time.

    \b
        memgraph diff before.json after.json
    """
    write(read_plan(before).diff(read_plan(after)), as_json)
    return 0


def read_plan(file: Path) -> Report:
    """Return the report that a file holds.

    Raises:
        typer.BadParameter: there is no such file.
        PlanError: the file holds no plan.
    """
    if not file.is_file():
        raise typer.BadParameter(f"there is no file {str(file)!r}")
    return Report.from_json(file.read_text())
