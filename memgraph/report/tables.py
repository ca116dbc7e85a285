"""Format numbers and tables for people.

942049812 bytes -> 942.0 MB    8192 bytes -> 8.2 kB    7090512.0 us -> 7090.5 ms
printed(table) -> its text, without colours

Functions import rich, so that a training loop that prints nothing does without.
"""

from __future__ import annotations

import html
import io
import math
import re
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Group, RenderableType
    from rich.table import Table
    from rich.text import Text

WIDTH, PADDING = 120, 2


def printed(what: RenderableType) -> str:
    """Return the text that rich would draw, in lines of 120 columns, or of as many as keep words whole."""
    from rich.console import Console

    whole, width = fitted(what, WIDTH)
    # In a notebook rich would show it, and write nothing to the file.
    console = Console(file=io.StringIO(), width=width, color_system=None, force_terminal=False, force_jupyter=False)
    console.print(whole)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    return "\n".join(line.rstrip() for line in text.splitlines())


def fitted(what: Any, width: int) -> tuple[Any, int]:
    """Return what is to be printed, with tables whose lines break between words, and the columns that this takes.

    These are `width`, or more where a table can't be so narrow.
    """
    while hasattr(what, "__rich__"):
        what = what.__rich__()
    if hasattr(what, "renderables"):
        parts = [fitted(part, width) for part in what.renderables]
        return stacked(*(part for part, _ in parts)), max((taken for _, taken in parts), default=width)
    columns = getattr(what, "columns", ())
    texts = [[str(each) for each in (column.header, *column.cells)] for column in columns]
    widths = [max(map(len, cells)) for cells in texts]
    least = [max((len(word) for cell in cells for word in cell.split()), default=1) for cells in texts]
    while sum(widths) + PADDING * len(widths) > width and widths != least:
        # The widest of those that may be narrower loses a column.
        widest = max((i for i in range(len(widths)) if widths[i] > least[i]), key=widths.__getitem__)
        widths[widest] -= 1
    for column, taken in zip(columns, widths, strict=True):
        column.width = taken
    return what, max(width, sum(widths) + PADDING * len(widths))


class Printed:
    """A result that prints itself by what it gives to rich, in a terminal and in a notebook."""

    __slots__ = ()

    def __rich__(self) -> RenderableType:
        raise NotImplementedError

    def __str__(self) -> str:
        return printed(self)

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(str(self))}</pre>"


def table(title: str, *columns: str, right: tuple[str, ...] = ()) -> Table:
    """Return an empty table; the columns named in `right` hold numbers."""
    from rich.table import Table

    empty = Table(
        title=title, title_justify="left", box=None, pad_edge=False, padding=(0, PADDING, 0, 0), title_style=""
    )
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
    """Format bytes as kB, MB or GB, which are powers of 1000: megabytes from 0.1 to 10,000."""
    unit, name = _unit(nbytes)
    return f"{nbytes / unit:.1f} {name}" if unit > 1 else f"{nbytes} B"


def mb_above(nbytes: int) -> str:
    """Format bytes as megabytes, rounded up, or as they are below 0.1: a budget that is read off and given works."""
    return f"{math.ceil(nbytes / 1e5) / 10:.1f} MB" if nbytes >= 100_000 else f"{nbytes} B"


def _unit(nbytes: int) -> tuple[int, str]:
    size = abs(nbytes)
    if size < 1_000:
        return 1, "B"
    if size < 100_000:
        return 1_000, "kB"
    return (1_000_000, "MB") if size < 10_000_000_000 else (1_000_000_000, "GB")


def ms(us: float) -> str:
    """Format microseconds as milliseconds."""
    return f"{us / 1e3:.1f} ms"
