"""A budget as people write it -> bytes.

"8GB" -> 8000000000    "8GiB" -> 8589934592    0.5 -> half of the device's memory    None -> what is free there
"""

from __future__ import annotations

import math
import re
from fractions import Fraction
from numbers import Integral

import torch

from .device import memory_nbytes, unused_nbytes

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
WHOLE = "bytes are whole, and a share is at most 1"
FORMS = (
    'write e.g. "8GB", "8GiB", "500MB", an int of bytes, a float in (0, 1] of the device\'s memory, '
    "or None for what is free"
)


def budget_nbytes(budget: str | int | float | None, device: torch.device, resident: int = 0) -> int:
    """The bytes that `budget` means on `device`; `resident` bytes of it are the model's already.

    Raises:
        TypeError: it is no str, int, float or None.
        ValueError: it can't be read, is not positive, or is more than the device has.
    """
    if isinstance(budget, Integral) and not isinstance(budget, bool):
        budget = int(budget)  # numpy's as well
    if isinstance(budget, bool) or not isinstance(budget, str | int | float | None):
        raise TypeError(f"budget is a {type(budget).__name__}, {budget!r}; {FORMS}")
    if budget is None:
        return unused_nbytes(device) + resident
    nbytes = (
        _fraction(budget, device)
        if isinstance(budget, float)
        else _parse(budget)
        if isinstance(budget, str)
        else budget
    )
    if nbytes <= 0:
        raise ValueError(f"budget={budget!r} is {nbytes} bytes, which is not positive; {FORMS}")
    if nbytes > (there := memory_nbytes(device)):
        raise ValueError(f"budget={budget!r} is {nbytes} bytes, but {device} has {there}; give at most that, or None")
    return nbytes


def _fraction(budget: float, device: torch.device) -> int:
    if math.isnan(budget):
        raise ValueError(f"budget={budget!r} is not a number, so a computation before it went wrong; {FORMS}")
    if not 0 < budget <= 1:
        raise ValueError(f"budget={budget!r} is a float, which means a share of the device's memory in (0, 1]; {FORMS}")
    return int(budget * memory_nbytes(device))


def _parse(budget: str) -> int:
    found = re.fullmatch(r"\s*(\d{1,30}(?:\.\d{1,30})?)\s*([A-Za-z]*|%)\s*", budget)
    if not found:
        raise ValueError(f"budget={budget!r} can't be read; {FORMS}")
    number, unit = Fraction(found[1]), found[2]
    if hint := _hint(number, unit):
        raise ValueError(f"budget={budget!r} can't be read: {hint}; {FORMS}")
    if unit.upper() not in UNITS:
        raise ValueError(f"budget={budget!r} can't be read; {FORMS}")
    return int(number * UNITS[unit.upper()])


def _hint(number: Fraction, unit: str) -> str:
    """What is likely meant, where it is not what is written."""
    if unit == "%" or (not unit and number.denominator > 1):
        share = number / 100 if unit else number
        return f"a share is given as a float, {float(share)!r} without quotes" if share <= 1 else WHOLE
    if re.fullmatch("[KMGT]", unit, re.IGNORECASE):
        return f'the unit is "{unit.upper()}B" or "{unit.upper()}iB"'
    if re.fullmatch("[KMGT]i?b", unit):
        return f'"{unit}" are bits; the unit of bytes is "{unit[:-1]}B"'
    return ""
