"""The option --time-limit: seconds of planning, as `memgraph.compile` takes them.

--time-limit 10   ->   10.0;   --time-limit nan   ->   wrong usage
"""

from __future__ import annotations

from typing import Annotated

import typer

from ..options.argument_rules import check_argument


def time_limit(given: float | None) -> float | None:
    """Return a time limit.

    Raises:
        typer.BadParameter: no search can take so long.
    """
    try:
        check_argument("time_limit", given)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    return given


Limit = Annotated[
    float | None,
    typer.Option(help="seconds of planning after capture; 0 runs the quick pass only", callback=time_limit),
]
