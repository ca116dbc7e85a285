"""Format numbers and tables for people.

942049812 bytes -> 942.0 MB    7090512.0 us -> 7090.5 ms    printed(table) -> its text, without colours

Functions import rich, so that a training loop that prints nothing does without.
"""

from __future__ import annotations

import io
import math
import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Group, RenderableType
    from rich.table import Table
    from rich.text import Text

WIDTH = 120


def printed(what: RenderableType) -> str:
    """Return the text that rich would draw, in lines of 120 columns."""
    from rich.console import Console

    console = Console(file=io.StringIO(), width=WIDTH, color_system=None, force_terminal=False)
    console.print(what)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    return "\n".join(line.rstrip() for line in text.splitlines())


def table(title: str, *columns: str, right: tuple[str, ...] = ()) -> Table:
    """Return an empty table; the columns named in `right` hold numbers."""
    from rich.table import Table

    empty = Table(title=title, title_justify="left", box=None, pad_edge=False, padding=(0, 2, 0, 0), title_style="")
    for column in columns:
        empty.add_column(column, justify="right" if column in right else "left", overflow="fold")
    return empty


def unstyled(lines: str) -> Text:
    """Return lines as they are, without rich's markup."""
    from rich.text import Text

    return Text(lines)


def stacked(*parts: RenderableType) -> Group:
    """Return what is printed as these parts, one below the other."""
    from rich.console import Group

    return Group(*parts)


def layer_path(where: str) -> str:
    """Return a module path with a star for the numbers of layers, so that equal layers have one."""
    return re.sub(r"(?<=\.)\d+(?=[.\s]|$)", "*", where)


def mb(nbytes: int) -> str:
    """Format bytes as megabytes of 10^6, or as bytes below 0.1 MB."""
    return f"{nbytes / 1e6:.1f} MB" if abs(nbytes) >= 100_000 else f"{nbytes} B"


def mb_above(nbytes: int) -> str:
    """Format bytes as `mb` does, rounded up: a budget that is read off and given works."""
    return mb(math.ceil(nbytes / 1e5) * 100_000 if nbytes >= 100_000 else nbytes)


def ms(us: float) -> str:
    """Format microseconds as milliseconds."""
    return f"{us / 1e3:.1f} ms"
