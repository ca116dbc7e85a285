"""Replace an optimizer's step by one in windows.

    windowed = WindowedOptimizer(optimizer, nbytes, offloaded, location)
    optimizer.step()     # offloaded parameters, gradients and states are updated in windows of nbytes

Where nothing is offloaded, the plain step runs. Schedulers may be built before or after. Copies and pickles of the
optimizer have the plain step.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor, optim
from torch.optim.optimizer import _global_optimizer_post_hooks

from ..storage.async_copy import CopyLog
from ..storage.mapped_storage import BufferLocation, buffer_slice_of
from ..storage.spill_file import SpillError
from ..tensors.parameter_groups import parameter_groups
from ..tensors.state_leaves import state_leaves
from .elementwise import check_windows, declared_elementwise, replace_step, unhooked_step
from .update_operands import LayoutsOf, ParameterPredicate, no_parameters
from .whole_update import WholeUpdate
from .windowed_update import WindowedUpdate


class WindowedOptimizer:
    """The step of one optimizer. `offloaded`: parameters whose states are; `on_host`: those that the host updates."""

    def __init__(
        self, optimizer: optim.Optimizer, nbytes: int, offloaded: ParameterPredicate, location: BufferLocation,
        on_host: ParameterPredicate = no_parameters, layouts: LayoutsOf | None = None,
    ) -> None:  # fmt: skip
        """
        Args:
            layouts: what a first step creates, for an optimizer whose parameters are updated as wholes.
        """
        self.nbytes, self.offloaded, self.location, self.on_host = nbytes, offloaded, location, on_host
        self.layouts = layouts
        self.chain: Sequence[WindowedOptimizer] = ()  # those that are stepped with this one
        self.optimizer = optimizer
        self.pending: WindowedUpdate | None = None  # that the disk has interrupted
        self.pending_loss: Any = None  # that its closure returned
        self.copies: CopyLog = {}  # of the latest update
        self.plain = optimizer.step
        optimizer.step = replace_step(optimizer, self.step)  # type: ignore[method-assign]

    def step(self, *args: Any, **kwargs: Any) -> Any:
        """Replace `optimizer.step`.

        Raises:
            SpillError: the disk failed. The next call resumes the same update.
            UpdateError: this optimizer's update can't be run in windows. Nothing has changed.
        """
        optimizer = self.optimizer
        if self.pending is None and any(each.pending is not None for each in self.chain):
            return None  # the disk has interrupted a later one of the chain
        if not declared_elementwise(type(optimizer)) and not self._is_offloaded():
            return self.plain(*args, **kwargs)
        optimizer._opt_called = True  # type: ignore[attr-defined]  # read by schedulers
        if self.pending is not None and self._is_resumable(self.pending):
            return self._resume(self.pending, args, kwargs)
        if self._is_offloaded():
            check_windows(optimizer, self.layouts is not None)
        return optim.Optimizer.profile_hook_step(self._begin)(optimizer, *args, **kwargs)

    def _begin(self, optimizer: optim.Optimizer, closure: Any = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if self._is_offloaded():
            check_windows(optimizer, self.layouts is not None)  # once more, for the gradients that the closure made
            with torch.inference_mode(False), torch.no_grad():
                self.pending = self._update()
                self.pending_loss, self.copies = loss, self.pending.copies
                self._run(self.pending)
        else:
            unhooked_step(type(optimizer))(optimizer)
        return loss

    def _update(self) -> WindowedUpdate:
        if self.layouts is not None:
            return WholeUpdate(self.optimizer, self.layouts, self.offloaded, self.location)
        return WindowedUpdate(self.optimizer, self.nbytes, self.offloaded, self.location, self.on_host)

    def _resume(self, update: WindowedUpdate, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Resume an update whose pre-hooks and closure have run."""
        loss = self.pending_loss
        with torch.inference_mode(False), torch.no_grad():
            self._run(update)
        for hook in chain(self.optimizer._optimizer_step_post_hooks.values(), _global_optimizer_post_hooks.values()):
            hook(self.optimizer, args, kwargs)
        return loss

    def _run(self, update: WindowedUpdate) -> None:
        try:
            update.run()
        except SpillError as error:
            raise SpillError(f"{error}; {_what_is_left(update)}") from error
        except BaseException as error:
            if isinstance(error, Exception) and not update.is_started:  # the optimizer itself raised
                self._drop()
            else:  # Ctrl-C
                error.add_note(_what_is_left(update))
            raise
        finally:
            if update.is_done:
                self._drop()

    def _drop(self) -> None:
        self.pending = self.pending_loss = None

    def _is_resumable(self, update: WindowedUpdate) -> bool:
        """Return False if a state was loaded since.

        Raises:
            SpillError: the gradients have changed.
        """
        changed = update.changed()
        if changed == "gradient" and update.is_started:
            done = f"{update.finished} of {len(update.windows)} windows of the last update are done"
            message = f"{done}, and the gradients that the others need have been changed"
            raise SpillError(f"{message}; load an earlier state into model and optimizer")
        if changed is not None:
            self._drop()
        return changed is None

    def _is_offloaded(self) -> bool:
        """Return True if the step needs anything that is offloaded, or has to be."""
        trained = [parameter for parameter in parameter_groups(self.optimizer) if parameter.grad is not None]
        return any(
            self.offloaded(parameter) or any(map(buffer_slice_of, self._tensors(parameter))) for parameter in trained
        )

    def _tensors(self, parameter: Tensor) -> list[Tensor]:
        states = (leaf.tensor for leaf in state_leaves(self.optimizer.state.get(parameter, {})))
        return [value for value in (parameter, parameter.grad, *states) if value is not None]


def _what_is_left(update: WindowedUpdate) -> str:
    """Say how many windows are done, and how to continue."""
    if update.is_done:
        return "this update is done"
    done = f"{update.finished} of {len(update.windows)} windows of this update are done"
    return f"{done}: call step() again, which does the others, or load an earlier state into model and optimizer"
