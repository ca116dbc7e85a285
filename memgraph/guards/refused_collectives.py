"""Refuse collectives of the user's own in forward.

    dist.all_reduce(found)   ->   a CaptureError, with the user's line

A plan runs the ops of a step in an order of its own, and may run one twice. Ranks have different plans, and would wait
for each other.
"""

from __future__ import annotations

import sys
from typing import Any

from ..errors import CaptureError
from ..system.frames import is_users_code

NAMESPACES = ("c10d", "c10d_functional", "_c10d_functional", "_c10d_functional_autograd")


class RefusedCollectiveError(CaptureError):
    """Forward runs a collective, so the submodule can't run as it is either: it would run twice."""


def refuse_collective(func: Any) -> None:
    """
    Raises:
        RefusedCollectiveError: an op is a collective, which has not begun.
    """
    if getattr(func, "namespace", "") not in NAMESPACES:
        return
    frame: Any = sys._getframe(1)
    while frame is not None and not is_users_code(frame.f_code):
        frame = frame.f_back
    place = f" at {frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}" if frame is not None else ""
    name = func.name().partition("::")[2].partition(".")[0].rstrip("_")
    raise RefusedCollectiveError(
        f"forward runs a collective of torch.distributed ({name}){place}, and collectives in forward can't be "
        "captured: a plan may run an op twice, on one rank and not on the others; run it outside of the module, before "
        "or after its call, and give the module its result"
    )
