"""All ways with their ends, as a table.

python -m tests.memgraph.guards.ways.table    ->   the table of docs/python-state.md
"""

from __future__ import annotations

from . import (
    of_attributes,
    of_classes,
    of_functions,
    of_globals,
    of_imports,
    of_libraries,
    of_modules,
    of_objects,
    of_process,
    of_torch,
    of_torch_objects,
)  # fmt: skip
from .way import WAYS, outcome

FILES = (
    of_globals,
    of_objects,
    of_functions,
    of_imports,
    of_attributes,
    of_classes,
    of_process,
    of_torch,
    of_torch_objects,
    of_modules,
    of_libraries,
)
HEAD = "| read in | what changes | outcome |\n|---|---|---|\n"


def row(group: str, name: str, end: str) -> str:
    return f"| {group} | {name} | {end} |"


def table() -> str:
    """Run all ways, and return the table."""
    return HEAD + "\n".join(
        row(group, name, outcome(way)) for group, ways in WAYS.items() for name, way in ways.items()
    )


if __name__ == "__main__":
    print(table())
