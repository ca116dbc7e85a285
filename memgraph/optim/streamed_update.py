"""Update parameters one after the other, as their gradients come, while the disk reads ahead and writes behind.

Before:                                  After:
    update(v, dv)  fill, compute, drain      update(v, dv)  ..., compute
    ...                                      ...            drain the end of v, fill the begin of w
    update(w, dw)  fill, compute, drain      update(w, dw)  compute, ...

It is one update in windows whose gradients come late: its two buffers pass from one parameter to the next, so that the
disk works while backward computes. Reading ahead changes nothing, and all writes have ended when `finish` returns.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, optim

from ..storage.mapped_storage import BufferLocation
from ..system.signals import Interrupts
from .update_operands import GRADIENT, PARAMETER, ParameterPredicate
from .window_views import view
from .windowed_update import WindowedUpdate


class StreamedUpdate(WindowedUpdate):
    """The updates of some parameters in one backward."""

    separate = True

    def __init__(
        self, optimizer: optim.Optimizer, parameters: Sequence[Tensor], nbytes: int, offloaded: ParameterPredicate,
        location: BufferLocation,
    ) -> None:  # fmt: skip
        """`optimizer` has these parameters and no others; their gradients come in this order. Errors as in the base."""
        super().__init__(optimizer, nbytes, offloaded, location, gradient_order=parameters)
        self.next_parameter = 0

    def update(self, parameter: Tensor, gradient: Tensor) -> None:
        """Compute all windows of one parameter. The last of them are still being written when this returns.

        Raises:
            SpillError: the disk failed, for this parameter or for an earlier one.
        """
        update = self.updates[self.next_parameter]
        assert update.parameter is parameter, "updates come in the order of the graph"
        with Interrupts() as interrupts:
            try:
                update.set_gradient(gradient)
                while update.chunks_left and not self._is_computed(self.next_parameter):
                    self._advance()
                    interrupts.check()
                self._read_ahead()
            except BaseException:
                self._finish_copies()
                raise
            finally:
                update.set_gradient(None)  # frees the gradient
        self.next_parameter += 1

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
        """Wait until no copy runs, with or without errors."""
        self._finish_copies()

    def _is_computed(self, row: int) -> bool:
        """Return True if all windows of the parameter are computed."""
        return self.computed == len(self.windows) or self.windows[self.computed][0].row > row

    def _compute(self, at: int) -> None:
        for each in self.filled[at].views:
            operand = each.update.operands[GRADIENT]
            if not operand.needs_buffer(each.chunk.whole):
                each.tensors[GRADIENT] = view(operand, each.chunk)
        super()._compute(at)
        for each in self.drained[at].views:
            del each.tensors[GRADIENT]
            each.tensors[PARAMETER].grad = None
