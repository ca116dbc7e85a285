"""Replace an optimizer's step by one in windows.

    windowed = WindowedOptimizer(optimizer, nbytes, offloaded, location)
    optimizer.step()     # offloaded parameters, gradients and states are updated in windows of nbytes

Where nothing is offloaded, the plain step runs. Schedulers may be built before or after. Copies and pickles of the
optimizer have the plain step.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor, optim
from torch.optim.optimizer import _global_optimizer_post_hooks

from ..errors import UpdateError
from ..storage.async_copy import CopyLog
from ..storage.mapped_storage import BufferLocation, buffer_slice_of
from ..storage.places import Places
from ..storage.spill_file import SpillError
from ..tensors.parameter_groups import parameter_groups
from ..tensors.state_leaves import state_leaves
from .elementwise import check_windows, declared_elementwise, replace_step, unhooked_step
from .optimizer_profiler import UNLIMITED
from .trial_copy import UntriedUpdateError
from .update_operands import ParameterPredicate, no_parameters
from .windowed_update import WindowedUpdate


class WindowedOptimizer:
    """The step of one optimizer. `offloaded`: parameters whose states are; `on_host`: those that the host updates."""

    def __init__(
        self, optimizer: optim.Optimizer, nbytes: int, offloaded: ParameterPredicate, location: BufferLocation | Places,
        on_host: ParameterPredicate = no_parameters, whole: bool = False,
    ) -> None:  # fmt: skip
        """
        Args:
            whole: parameters are updated as wholes.
        """
        self.nbytes, self.offloaded, self.location, self.on_host = nbytes, offloaded, location, on_host
        self.whole = whole
        self.chain: Sequence[WindowedOptimizer] = ()  # those that are stepped with this one
        self.optimizer = optimizer
        self.pending: WindowedUpdate | None = None  # that the disk has interrupted
        self.pending_loss: Any = None  # that its closure returned
        self.copies: CopyLog = {}  # of the latest update
        self.lock = threading.RLock()  # windows are the parameters while they are stepped on
        self.plain = optimizer.step
        optimizer.step = replace_step(optimizer, self.step)  # type: ignore[method-assign]

    def step(self, *args: Any, **kwargs: Any) -> Any:
        """Replace `optimizer.step`.

        Raises:
            SpillError: the disk failed. The next call resumes the same update.
            UpdateError: this optimizer's update can't be run in windows. Nothing has changed.
        """
        with self.lock:
            return self._step(*args, **kwargs)

    def _step(self, *args: Any, **kwargs: Any) -> Any:
        optimizer = self.optimizer
        if self.pending is None and any(each.pending is not None for each in self.chain):
            return None  # the disk has interrupted a later one of the chain
        if not declared_elementwise(type(optimizer)) and not self._is_offloaded():
            return self.plain(*args, **kwargs)
        optimizer._opt_called = True  # type: ignore[attr-defined]  # read by schedulers
        if self.pending is not None and self._is_resumable(self.pending):
            return self._resume(self.pending, args, kwargs)
        if self._is_offloaded():
            check_windows(optimizer, self.whole)
        return optim.Optimizer.profile_hook_step(self._begin)(optimizer, *args, **kwargs)

    def _begin(self, optimizer: optim.Optimizer, closure: Any = None, **kwargs: Any) -> Any:
        loss, is_offloaded = None, self._is_offloaded()
        if kwargs and is_offloaded:
            raise UpdateError(
                f"{type(optimizer).__name__}.step() in windows takes a closure and nothing else, not "
                f"{', '.join(kwargs)}: set options of the groups"
            )
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if self._is_offloaded():
            check_windows(optimizer, self.whole)  # once more, for the gradients that the closure made
            with torch.inference_mode(False), torch.no_grad():
                update = self.pending = self._update()
                self.pending_loss, self.copies = loss, update.copies
                self._run(update)
            return update.outcome.value if closure is None else loss
        found = unhooked_step(type(optimizer))(optimizer, **kwargs)
        return found if closure is None else loss

    def _update(self) -> WindowedUpdate:
        """Return an update in windows; where its step fails on made-up parameters by now, raise what it raises."""
        nbytes = UNLIMITED if self.whole else self.nbytes
        try:
            return WindowedUpdate(self.optimizer, nbytes, self.offloaded, self.location, self.on_host, whole=self.whole)
        except UntriedUpdateError as error:
            if (cause := error.__cause__) is None:
                raise
            cause.add_note(
                "raised by a trial of the step, since attributes of the optimizer have changed: nothing is updated"
            )
            raise cause from None

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
        except Exception:  # the optimizer itself raised: what it has done stays, as without windows
            update.finish()
            self._drop()
            raise
        except BaseException as error:  # Ctrl-C
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
