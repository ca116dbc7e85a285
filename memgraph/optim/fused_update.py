"""Run an optimizer's update inside of backward, parameter by parameter.

loss.backward()       each parameter is updated as soon as its gradient is whole; the gradient goes at once
optimizer.step()      finds nothing to do, which schedulers and hooks take for a step

The optimizer's own step runs on each parameter, with the options that it has then. What would need all gradients, or
the same one twice, is refused before anything has changed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn, optim

from ..errors import FusedError
from ..profile.memory_meter import resident_bytes
from ..storage.mapped_storage import buffer_slice_of
from .elementwise import ELEMENTWISE, is_elementwise, is_nondeterministic, replace_step, without_hooks
from .offloaded_update import OffloadedUpdate
from .optimizer_clone import APART, clone_obstacle
from .optimizer_profiler import state_tensors
from .streamed_update import StreamedUpdate
from .torn import PartialUpdateGuard
from .twin import clone_optimizer

INSTEAD = "compile without fuse_update for this"


class FusedUpdate:
    """The updates of one optimizer, in the backward of one module."""

    def __init__(self, module: nn.Module, optimizer: optim.Optimizer, far: OffloadedUpdate) -> None:
        self.optimizer, self.far = optimizer, far
        self.torn = PartialUpdateGuard(module)
        self.groups: dict[Tensor, int] = {}
        self.parameters: dict[str, Tensor] = {}  # of the backward that runs, or ran last
        self.relay: StreamedUpdate | None = None  # updates what is far, once the first of it was updated
        self.waited: dict[str, float] = {}  # microseconds of each update, by the parameter's name, for the far tier
        self.updated = 0
        self.begun = False  # the latest backward was not refused
        self.options: list[dict[str, Any]] | None = None  # as they were in a backward that `step` does not know of
        self.plain = optimizer.step
        optimizer.step = replace_step(optimizer, self.step)  # type: ignore[method-assign]
        optimizer.register_load_state_dict_post_hook(self._loaded)

    def begin(
        self, takers: Mapping[str, Tensor | None], tangents: Sequence[Tensor | None], again: bool
    ) -> Callable[[str, Tensor], None]:
        """What updates a parameter in the backward that begins now; `takers` are those that would take their gradients,
        in the order in which they will be updated.

        Raises:
            FusedError: they can't be updated in this backward. Nothing has changed.
        """
        self.begun = False
        self.torn.check()
        self.groups = {p: i for i, group in enumerate(self.optimizer.param_groups) for p in group["params"]}
        if found := self._obstacle(takers, tangents, again):
            raise FusedError(f"{found}; {INSTEAD}")
        self.parameters = {name: taker for name, taker in takers.items() if taker is not None}
        self.updated, self.options, self.begun = 0, _options(self.optimizer), True
        self.waited = {}
        return self._update

    def _update(self, name: str, gradient: Tensor) -> None:
        """Step on one parameter, unless it was frozen since forward."""
        if name not in self.parameters:
            return
        parameter = self.parameters[name]
        far = self._is_far(parameter)
        if far and self.relay is None:
            ours = list(filter(self._is_far, self.parameters.values()))
            self.relay = self.far.relay(self._alone(*ours), ours)
        self.updated += 1
        if far and self.relay is not None:
            before = self.relay.waited
            self.relay.update(parameter, gradient)
            self.waited[name] = (self.relay.waited - before) * 1e6
            return
        one = self._alone(parameter)
        parameter.grad = gradient
        try:
            without_hooks(type(one))(one)
        finally:
            parameter.grad = None

    def ended(self) -> None:
        """All is updated.

        Raises:
            SpillError: the disk has not taken all of it.
        """
        if self.relay is not None:
            self.relay.finish()
            self.relay = None

    def failed(self, error: BaseException) -> None:
        """Backward has ended with an error, which it may have been that it was refused."""
        if not self.begun:
            return
        if self.relay is not None:
            self.relay.stop()
            self.relay = None
        self.options = None
        if self.updated:
            error.add_note(self.torn.tear(self.updated, list(self.parameters)))

    def states_nbytes(self) -> int:
        """Bytes of the states that are there."""
        return resident_bytes(state_tensors(self.optimizer))

    def step(self, *args: Any, **kwargs: Any) -> Any:
        """What `optimizer.step` does now: update what has a gradient, which is nothing that backward has updated.

        Raises:
            FusedError: what backward has done is not what the plain step would do.
        """
        if any(map(callable, (*args, *kwargs.values()))):
            raise FusedError(f"a closure would run backward, which updates by itself, within the update; {INSTEAD}")
        self.torn.check()
        before, self.options = self.options, None
        if before is not None:
            if any(parameter.grad is not None for parameter in self.parameters.values()):
                raise FusedError(
                    "a parameter has a gradient from outside of the model, or from elsewhere than its own backward, "
                    f"and was updated without it: load an earlier state into model and optimizer, and {INSTEAD}"
                )
            if before != _options(self.optimizer):
                raise FusedError(
                    "options of the optimizer have been changed since backward, which has updated with the old ones: "
                    f"change them before backward or after step(), or {INSTEAD}"
                )
        return self.plain(*args, **kwargs)

    def _obstacle(
        self, takers: Mapping[str, Tensor | None], tangents: Sequence[Tensor | None], again: bool
    ) -> str | None:
        """What stands against updating in this backward, in words."""
        if self.options is not None:
            return (
                "backward has updated the parameters already, and optimizer.step() was not called since: "
                "gradients can't accumulate"
            )
        if again:
            return "backward can't go through this step again once its parameters are updated: retain_graph=True"
        if any(tangent is None or tangent.item() != 1 for tangent in tangents):
            return (
                "the update takes gradients as they are, so each loss must be differentiated as the model returns it, "
                "not scaled, as by GradScaler, nor divided, nor left out"
            )
        for name, taker in takers.items():
            if taker is None:
                return (
                    f"the gradient of {name} is wanted elsewhere: by torch.autograd.grad, backward(inputs=...), a hook,"
                    " a data-parallel wrapper, or another call that is under way"
                )
            if taker not in self.groups:
                return f"{name} is no longer a parameter of the optimizer, which has another: compile anew"
            if taker.grad is not None:
                return f"{name} has a gradient already, to which nothing can be added: call optimizer.zero_grad() first"
            if is_nondeterministic(self.optimizer, self.groups[taker], taker.dtype) and self._is_far(taker):
                return f"SGD with fused=True does not give the same twice in {taker.dtype}: set fused=False"
        if self.optimizer._optimizer_step_pre_hooks:
            return "a hook before the optimizer's step would see no gradients"
        return None

    def _loaded(self, optimizer: optim.Optimizer) -> None:
        """What was loaded is a fresh start: no update waits for its `step`."""
        self.options = None
        self.torn.loaded("optimizer")

    def _alone(self, *parameters: Tensor) -> optim.Optimizer:
        """The optimizer, with its options and states, as one of these parameters alone."""
        mine = set(parameters)
        groups = [
            {**group, "params": kept}
            for group in self.optimizer.param_groups
            if (kept := [parameter for parameter in group["params"] if parameter in mine])
        ]
        return clone_optimizer(self.optimizer, groups)

    def _is_far(self, parameter: Tensor) -> bool:
        held = (parameter, *self.optimizer.state.get(parameter, {}).values())
        return parameter in self.far.far_states or any(isinstance(x, Tensor) and buffer_slice_of(x) for x in held)


def _options(optimizer: optim.Optimizer) -> list[dict[str, Any]]:
    """The options of all groups as they are now."""
    kept = [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
    return [{key: value.item() if isinstance(value, Tensor) else value for key, value in row.items()} for row in kept]


def refuse_fused(optimizer: optim.Optimizer) -> None:
    """Raise what is in the way of this optimizer's updates in backward, as far as it is known beforehand.

    Raises:
        FusedError: it is none of those that are known to change each parameter by itself, or an option is against it;
            or it is the caller's own, and changes something else as well.
        UpdateError: it is the caller's own, and its step fails.
    """
    if not is_elementwise(optimizer):
        known = ", ".join(one.__name__ for one in ELEMENTWISE)
        raise FusedError(
            f"{type(optimizer).__name__} as it is can't update one parameter after the other in backward; use one of "
            f"{known} itself, without differentiable=True and capturable=True, or {INSTEAD}"
        )
    if why := clone_obstacle(optimizer):
        raise FusedError(f"{why}, and an update in backward is made of many; {APART}, or {INSTEAD}")
