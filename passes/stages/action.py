"""The actions that ranks run: forward, backward, or the gradients of parameters, of one micro-batch in one stage.

F0 F1 B0 B1    ->    Action("forward", 0, 0), Action("forward", 0, 1), Action("backward", 0, 0), ...
"""

from __future__ import annotations

from typing import NamedTuple

FORWARD, BACKWARD, WEIGHTS = "forward", "backward", "weights"


class Action(NamedTuple):
    """One thing that a rank runs: `kind` is forward, backward or weights."""

    kind: str
    stage: int
    chunk: int
