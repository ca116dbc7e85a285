"""Update offloaded parameters one at a time, each as a whole, by the user's own optimizer.

    Muon over 48 matrices, w at hand   ->   w, its gradient and its momentum are in a window, and no other parameter has
                                            a gradient; Muon.step; they go back to the tier

A class that is no function of elements may keep tables by parameter, and attributes that a copy would not have. So it
is not copied.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from torch import optim

from ..storage.mapped_storage import BufferLocation
from ..tensors.parameter_groups import parameter_groups
from ..tensors.state_leaves import state_leaves
from .elementwise import unhooked_step
from .optimizer_profiler import UNLIMITED
from .update_operands import GRADIENT, PARAMETER, LayoutsOf, ParameterPredicate, ParameterUpdate, whole_updates
from .window_views import WindowView, WriteBack
from .windowed_update import WindowedUpdate


class WholeUpdate(WindowedUpdate):
    """One update of an optimizer, whose windows are of one parameter each."""

    separate = True

    def __init__(
        self, optimizer: optim.Optimizer, layouts: LayoutsOf, offloaded: ParameterPredicate,
        location: BufferLocation,
    ) -> None:  # fmt: skip
        """
        Args:
            layouts: the leaves of a state that a first step creates, as far as they may be offloaded, by group and
                parameter.
        """
        self.layouts = layouts
        super().__init__(optimizer, UNLIMITED, offloaded, location)

    def run(self) -> None:
        try:
            with _without_gradients(self.optimizer):
                super().run()
        finally:
            self.fingerprints = self._fingerprints()

    def _parameter_updates(
        self, offloaded: ParameterPredicate, location: BufferLocation, on_host: object, gradient_order: object
    ) -> tuple[list[ParameterUpdate], list[ParameterUpdate]]:
        return whole_updates(self.optimizer, self.layouts, offloaded, location), []

    def _step(self, at: int, views: Sequence[WindowView]) -> list[WriteBack]:
        return [write for each in views for write in self._step_on(each)]

    def _step_on(self, window: WindowView) -> list[WriteBack]:
        parameter, state = window.update.parameter, self.optimizer.state
        moved = {
            leaf: window.moved[leaf.name] for leaf in state_leaves(window.update.state) if leaf.name in window.moved
        }
        data = parameter.data
        for leaf, tensor in moved.items():
            leaf.put(tensor)
        parameter.data, parameter.grad = window.tensors[PARAMETER], window.tensors[GRADIENT]
        try:
            unhooked_step(type(self.optimizer))(self.optimizer)
        except BaseException:
            for leaf in moved:
                leaf.put(leaf.tensor)
            raise
        finally:
            parameter.data, parameter.grad = data, None
        return window.store_leaves(state_leaves(state.get(parameter, {})))


@contextmanager
def _without_gradients(optimizer: optim.Optimizer) -> Iterator[None]:
    """Take all gradients away, and give them back."""
    gradients = {parameter: parameter.grad for parameter in parameter_groups(optimizer)}
    for parameter in gradients:
        parameter.grad = None
    try:
        yield
    finally:
        for parameter, gradient in gradients.items():
            parameter.grad = gradient
