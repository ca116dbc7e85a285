"""The update of an optimizer for whose parameters the far tier is home, or for their gradients or states.

update = FarUpdate(optimizer, where=folder)
update.nbytes(trained)                   what it takes on the device, in windows
FarStates(update, parameters).begin()    from now on optimizer.step() runs in windows

How large a window is depends on the parameters and not on the budget, so that the smallest budget for which there is a
plan is the same whatever was asked for.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import torch
from torch import Tensor

from .errors import UpdateError
from .homes import Where
from .pointwise import obstacle_to_windows
from .state_parts import is_large
from .update import states_nbytes
from .window_bytes import Far, window_bytes
from .windowed import Windowed
from .windows import Update

SMALLEST, LARGEST = 1 << 18, 16 << 20  # bytes of a window
SHARE = 64  # of the parameters is one


class FarUpdate:
    """Of an optimizer, or of none: then updates are the caller's own affair.  `fused`: they run in backward, where
    somebody else sees to it that each is in windows."""

    def __init__(self, optimizer: torch.optim.Optimizer | None, fused: bool = False, where: Where = None) -> None:
        self.optimizer, self.where, self.fused = optimizer, where, fused
        self.windowed: Windowed | None = None
        self.far_states: set[Tensor] = set()

    @property
    def window(self) -> int:
        """Bytes of a window."""
        groups = self.optimizer.param_groups if self.optimizer is not None else ()
        nbytes = sum(parameter.nbytes for group in groups for parameter in group["params"])
        return min(LARGEST, max(SMALLEST, nbytes // SHARE))

    @property
    def can_stream(self) -> bool:
        return self.obstacle is None

    @property
    def obstacle(self) -> str | None:
        """Why nothing of the state can live far with this optimizer, and what to do."""
        if self.optimizer is None:
            return None
        return obstacle_to_windows(self.optimizer, lambda parameter: parameter.requires_grad)

    def nbytes(self, trained: Collection[Tensor]) -> int:
        """What an update allocates at most, whatever lives far."""
        if self.optimizer is None:
            return 0
        far = Far(is_large, is_large, is_large)
        return max(taken.total for taken in window_bytes(self.optimizer, self.window, far, trained))

    def refuse_at_home(self, there: int, budget: float) -> None:
        """Raise what is known of the optimizer before there is a step, if nothing of the state can live far with it;
        `there`: the bytes of parameters and buffers.

        Raises:
            UpdateError: its update can't be planned, or all that has to stay is more than the budget.
        """
        if self.optimizer is None or (obstacle := self.obstacle) is None:
            return
        needed = there + states_nbytes(self.optimizer)
        if needed > budget:
            raise UpdateError(
                f"{obstacle}. Parameters, buffers and all states are {needed} bytes, over the budget of {budget}"
            )

    def begin(self) -> None:
        """Let the optimizer step in windows."""
        if self.optimizer is not None and self.windowed is None and not self.fused:
            self.windowed = Windowed(self.optimizer, self.window, self.far_states.__contains__, self.where)

    def run(self, optimizer: torch.optim.Optimizer) -> None:
        """Update in windows what has a gradient."""
        Update(optimizer, self.window, self.far_states.__contains__, self.where).run()

    def states(self, parameters: Collection[Tensor]) -> list[dict[str, object]]:
        """Those of these parameters, as far as there are any."""
        states = self.optimizer.state if self.optimizer is not None else {}
        return [states[parameter] for parameter in parameters if parameter in states]


@dataclass(frozen=True, eq=False)
class FarStates:
    """The parameters whose states one step has far, and the update that keeps them there."""

    update: FarUpdate
    parameters: tuple[Tensor, ...] = ()

    @property
    def begun(self) -> bool:
        """Whether the update makes new states where they belong."""
        return self.update.far_states.issuperset(self.parameters)

    def begin(self) -> list[dict[str, object]]:
        """Let the update run in windows, and have new states made where they belong; the states that are there."""
        self.update.begin()
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
