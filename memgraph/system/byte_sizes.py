"""Parse numbers of bytes, such as a budget.

"8GB" -> 8000000000    "8GiB" -> 8589934592    0.5 -> half of the device's memory    None -> the free memory
"""

from __future__ import annotations

import math
import os
import re
from dataclasses import dataclass
from fractions import Fraction

import torch

from .device import headroom_nbytes, memory_nbytes, unused_nbytes

UNITS = {
    "": 1,
    "B": 1,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KIB": 2**10,
    "MIB": 2**20,
    "GIB": 2**30,
    "TIB": 2**40,
}
VARIABLE = "MEMGRAPH_BUDGET"  # of the environment: the budget where none is given
SHOWN = 100  # characters
WHOLE = "bytes are whole, and a share is at most 1"


@dataclass(frozen=True)
class BudgetRequest:
    """An argument that is a number of bytes: its name, the owner of the memory, and what else may be given."""

    name: str
    whose: str
    otherwise: str
    what: str = "memory"

    @property
    def forms(self) -> str:
        share = f"a float in (0, 1] of {self.whose}'s {self.what}"
        return f'write e.g. "8GB", "8GiB", "500MB", an int of bytes, {share}, or {self.otherwise}'


BUDGET = BudgetRequest("budget", "the device", "None for what is free")
OF_ENVIRONMENT = BudgetRequest(VARIABLE, "the device", "leave it unset for what is free")
DISK = BudgetRequest("disk", "the disk", "None for what is free", "free bytes")


def budget_nbytes(budget: str | int | float | None, device: torch.device, resident: int = 0) -> int:
    """Return the bytes of `budget` on `device`; without one, those of MEMGRAPH_BUDGET or else what is free.

    Args:
        resident: bytes that the model already has there; they are part of a budget of None.

    Raises:
        ValueError: `budget` can't be read, is not positive, or is more than the device has.
    """
    if budget is None and (given := os.environ.get(VARIABLE)):
        return asked_nbytes(share_or_text(given), device, OF_ENVIRONMENT)
    if budget is None:
        return max(0, unused_nbytes(device) - headroom_nbytes(device)) + resident
    return asked_nbytes(budget, device, BUDGET)


def share_or_text(given: str) -> str | float:
    """Return a budget that a command line or the environment has as an argument: a share, as 0.5, is a float."""
    return float(given) if re.fullmatch(r"0?\.\d+|1\.0*", given) else given


def disk_nbytes(disk: str | int | float, free: int) -> int:
    """Return the bytes that the option `disk` allows; a float is a share of the `free` ones.

    Raises:
        ValueError: it can't be read, or is not positive.
    """
    return nbytes_within(disk, free if isinstance(disk, float) else 1 << 62, "the disk", DISK)


def asked_nbytes(given: str | int | float, device: torch.device, asked: BudgetRequest) -> int:
    """Return the bytes of a device's memory that an argument stands for.

    Raises:
        ValueError: the argument can't be read, is not positive, or is more than the device has.
    """
    return nbytes_within(given, memory_nbytes(device), str(device), asked)


def nbytes_within(given: str | int | float, available: int, where: str, asked: BudgetRequest = BUDGET) -> int:
    """Return the bytes that an argument stands for, of the `available` ones of a device; errors as `asked_nbytes`."""
    said = f"{asked.name}={shortened(given)}"
    if isinstance(given, float):
        nbytes = _fraction(given, said, available, asked)
    else:
        nbytes = _parse(given, said, asked) if isinstance(given, str) else given
    if nbytes <= 0:
        raise ValueError(f"{said} is {nbytes} bytes, which is not positive; {asked.forms}")
    if nbytes > available:
        raise ValueError(
            f"{said} is {nbytes} bytes, but {where} has {available}; give at most that, or {asked.otherwise}"
        )
    return nbytes


def shortened(given: object) -> str:
    """Return an argument as an error shows it: a saved plan in the wrong place has a million characters."""
    return text if len(text := repr(given)) <= SHOWN else f"{text[:SHOWN]}..."


def _fraction(share: float, said: str, available: int, asked: BudgetRequest) -> int:
    if math.isnan(share):
        raise ValueError(f"{said} is not a number, so an earlier computation went wrong; {asked.forms}")
    if not 0 < share <= 1:
        what = f"a float, which means a share of {asked.whose}'s {asked.what} in (0, 1]"
        raise ValueError(f"{said} is {what}; {asked.forms}")
    return int(share * available)


def _parse(text: str, said: str, asked: BudgetRequest) -> int:
    match = re.fullmatch(r"\s*(\d{1,30}(?:\.\d{1,30})?)\s*([A-Za-z]*|%)\s*", text)
    if not match:
        raise ValueError(f"{said} can't be read; {asked.forms}")
    number, unit = Fraction(match[1]), match[2]
    if hint := _hint(number, unit):
        raise ValueError(f"{said} can't be read: {hint}; {asked.forms}")
    if unit.upper() not in UNITS:
        raise ValueError(f"{said} can't be read; {asked.forms}")
    return int(number * UNITS[unit.upper()])


def _hint(number: Fraction, unit: str) -> str:
    """Return a hint for a likely typing error, or an empty string."""
    if unit == "%" or (not unit and number.denominator > 1):
        share = number / 100 if unit else number
        return f"a share is given as a float, {float(share)!r} without quotes" if share <= 1 else WHOLE
    if re.fullmatch("[KMGT]", unit, re.IGNORECASE):
        return f'the unit is "{unit.upper()}B" or "{unit.upper()}iB"'
    if re.fullmatch("[KMGT]i?b", unit):
        return f'"{unit}" are bits; the unit of bytes is "{unit[:-1]}B"'
    return ""
