"""The update of an optimizer for whose parameters the far tier is home, or for their gradients or states.

update = FarUpdate(optimizer, folder)
update.nbytes(budget, trained)    what it takes on the device, in windows that suit the budget
update.begin(budget, parameters)    from now on optimizer.step() runs in windows
"""

from __future__ import annotations

import os
from collections.abc import Collection

import torch
from torch import Tensor

from .pointwise import is_pointwise
from .spill import spill_folder
from .state_parts import is_large, state_parts
from .window_bytes import Far, window_bytes
from .windowed import Windowed

SMALLEST, LARGEST = 1 << 18, 64 << 20  # bytes of a window
SHARE = 16  # of the budget is one


class FarUpdate:
    """Of an optimizer, or of none: then updates are the caller's own affair."""

    def __init__(self, optimizer: torch.optim.Optimizer | None, folder: str | os.PathLike[str] | None) -> None:
        self.optimizer, self.folder = optimizer, folder
        self.windowed: Windowed | None = None
        self.far_states: set[Tensor] = set()

    @property
    def can_stream(self) -> bool:
        return self.optimizer is None or is_pointwise(self.optimizer)

    def nbytes(self, budget: int, trained: Collection[Tensor]) -> int:
        """What an update allocates at most, whatever lives far."""
        if self.optimizer is None:
            return 0
        far = Far(is_large, is_large, is_large)
        return max(taken.total for taken in window_bytes(self.optimizer, _window(budget), far, trained))

    def of_parts(self, parts: Collection[int]) -> list[Tensor]:
        """The parameters of these parts of the states, as they are cut now."""
        found = state_parts(self.optimizer) if self.optimizer is not None and parts else []
        return [parameter for i in parts for parameter in found[i].parameters]

    def begin(self, budget: int, parameters: Collection[Tensor]) -> list[dict[str, object]]:
        """Let the optimizer step in windows; the states of these parameters, as far as there are any."""
        if self.optimizer is None:
            return []
        self.far_states.update(parameters)
        if self.windowed is None:
            folder = spill_folder(self.folder)
            self.windowed = Windowed(self.optimizer, _window(budget), self.far_states.__contains__, folder)
        return [self.optimizer.state[parameter] for parameter in self.far_states if parameter in self.optimizer.state]


def _window(budget: int) -> int:
    return min(LARGEST, max(SMALLEST, budget // SHARE))
