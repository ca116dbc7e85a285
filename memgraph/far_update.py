"""The update of an optimizer for whose parameters the far tier is home, or for their gradients or states.

update = FarUpdate(optimizer, folder)
update.nbytes(budget, trained)    what it takes on the device, in windows that suit the budget
FarStates(update, budget, parameters).begin()    from now on optimizer.step() runs in windows
"""

from __future__ import annotations

import os
from collections.abc import Collection
from dataclasses import dataclass

import torch
from torch import Tensor

from .pointwise import is_pointwise
from .spill import spill_folder
from .state_parts import is_large
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

    def begin(self, budget: int) -> None:
        """Let the optimizer step in windows."""
        if self.optimizer is not None and self.windowed is None:
            folder = spill_folder(self.folder)
            self.windowed = Windowed(self.optimizer, _window(budget), self.far_states.__contains__, folder)

    def states(self, parameters: Collection[Tensor]) -> list[dict[str, object]]:
        """Those of these parameters, as far as there are any."""
        states = self.optimizer.state if self.optimizer is not None else {}
        return [states[parameter] for parameter in parameters if parameter in states]


@dataclass(frozen=True, eq=False)
class FarStates:
    """The parameters whose states one step has far, and the update that keeps them there."""

    update: FarUpdate
    budget: int
    parameters: tuple[Tensor, ...] = ()

    @property
    def begun(self) -> bool:
        """Whether the update makes new states where they belong."""
        return self.update.far_states.issuperset(self.parameters)

    def begin(self) -> list[dict[str, object]]:
        """Let the update run in windows, and have new states made where they belong; the states that are there."""
        self.update.begin(self.budget)
        self.update.far_states.update(self.parameters)
        return self.there()

    def there(self) -> list[dict[str, object]]:
        """The states, as far as there are any."""
        return self.update.states(self.parameters)

    def end(self, kept: Collection[Tensor]) -> list[dict[str, object]]:
        """New states are made on the device, but for those of `kept`; the states that are there and belong there."""
        gone = set(self.parameters) - set(kept)
        self.update.far_states.difference_update(gone)
        return self.update.states(gone)


def _window(budget: int) -> int:
    return min(LARGEST, max(SMALLEST, budget // SHARE))
