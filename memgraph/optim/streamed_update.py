"""Update parameters one after the other, as their gradients come, while the disk works ahead and behind.

Before:                                  After:
    update(v, dv)  fill, compute, drain      update(v, dv)  ..., compute
    ...                                      ...            drain the end of v, fill the begin of w
    update(w, dw)  fill, compute, drain      update(w, dw)  compute, ...

It is one update in windows whose gradients come late: the two windows go on from one parameter to the next, so the disk
has work while backward computes.  What was read ahead has changed nothing, and what is written late has ended when
`finish` returns.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, optim

from ..storage.mapped_storage import BufferLocation
from ..system.signals import Interrupts
from .update_operands import GRADIENT, PARAMETER, ParameterPredicate
from .windowed_update import WindowedUpdate, view


class StreamedUpdate(WindowedUpdate):
    """The updates of some parameters in one backward."""

    def __init__(
        self,
        optimizer: optim.Optimizer,
        parameters: Sequence[Tensor],
        nbytes: int,
        offloaded: ParameterPredicate,
        location: BufferLocation,
    ) -> None:
        """`optimizer` has these parameters and no others; their gradients will come in this order.

        Raises:
            SpillError: the disk does not take states that have to go there. Nothing has changed.
            UpdateError: two parameters lie on one place.
            ValueError: the windows are too small for a chunk of some parameter.
        """
        super().__init__(optimizer, nbytes, offloaded, location, awaited=parameters)
        self.upcoming = 0  # the parameter that comes next

    def update(self, parameter: Tensor, gradient: Tensor) -> None:
        """Compute all windows of one parameter. The last of them are still being written when this returns.

        Raises:
            SpillError: the disk failed, for this parameter or for an earlier one.
        """
        update = self.updates[self.upcoming]
        assert update.parameter is parameter, "updates come in the order of the graph"
        with Interrupts() as interrupts:
            try:
                update.set_gradient(gradient)
                while update.chunks_left and not self._is_past(self.upcoming):
                    self._advance()
                    interrupts.check()
                self._read_ahead()
            except BaseException:
                self._finish_copies()
                raise
            finally:
                update.set_gradient(None)  # the gradient's bytes go here
        self.upcoming += 1

    def finish(self) -> None:
        """Wait until everything has been written.

        Raises:
            SpillError: the disk failed.
        """
        with Interrupts():
            try:
                while self.finished < self.computed:
                    self._finish(self.finished)
            finally:
                self._finish_copies()

    def stop(self) -> None:
        """Wait until no copy is under way, well or not."""
        self._finish_copies()

    def _is_past(self, turn: int) -> bool:
        """Whether all windows of the parameter at `turn` are computed."""
        return self.computed == len(self.windows) or self.windows[self.computed][0].row > turn

    def _compute(self, at: int) -> None:
        for one in self.filled[at].views:
            operand = one.update.operands[GRADIENT]
            if not operand.needs_buffer(one.chunk.whole):
                one.tensors[GRADIENT] = view(operand, one.chunk)
        super()._compute(at)
        for one in self.drained[at].views:
            del one.tensors[GRADIENT]
            one.tensors[PARAMETER].grad = None
