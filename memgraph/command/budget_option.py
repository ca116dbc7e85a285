"""The option --budget: bytes, or a share of a device's memory.

"24GB" -> 24000000000    "0.5" -> half of the memory
"""

from __future__ import annotations

import typer

from ..system.byte_sizes import BudgetRequest, nbytes_within, share_or_text

OPTION = BudgetRequest("--budget", "the device", "leave it out")


def budget_within(given: str, memory: int, title: str) -> int:
    """Return the bytes of a budget on a device with so much memory.

    Raises:
        typer.BadParameter: it can't be read, or is more than that.
    """
    try:
        return nbytes_within(share_or_text(given), memory, title, OPTION)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
