"""Run an optimizer's update inside of backward, parameter by parameter.

loss.backward()       each parameter is updated as soon as its gradient is whole; the gradient goes at once
optimizer.step()      finds nothing to do, which schedulers and hooks take for a step

The optimizer's own step runs on each parameter, with the options that it has then. What would need all gradients, or
the same one twice, is refused before anything has changed.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from torch import Tensor, nn, optim
from torch.utils.hooks import RemovableHandle

from ..errors import FusedError
from ..guards.module_proxy import unwrapped
from ..profile.memory_meter import resident_bytes
from ..storage.mapped_storage import buffer_slice_of
from .elementwise import ELEMENTWISE, is_elementwise, is_nondeterministic, replace_step, unhooked_step
from .offloaded_update import OffloadedUpdate
from .optimizer_clone import STATE_ADVICE, clone_optimizer, unclonable_reason
from .optimizer_profiler import state_tensors
from .streamed_update import StreamedUpdate

INSTEAD = "compile without fuse_update for this"


class FusedUpdate:
    """The updates of one optimizer, in the backward of one module."""

    def __init__(self, module: nn.Module, optimizer: optim.Optimizer, offloaded: OffloadedUpdate) -> None:
        self.optimizer, self.offloaded = optimizer, offloaded
        self.guard = PartialUpdateGuard(module)
        self.groups: dict[Tensor, int] = {}
        self.parameters: dict[str, Tensor] = {}  # of the backward that runs, or ran last
        self.stream: StreamedUpdate | None = None  # updates what is far, once the first of it was updated
        self.waited_us: dict[str, float] = {}  # microseconds of each update, by the parameter's name, for the far tier
        self.updated = 0
        self.begun = False  # the latest backward was not refused
        self.options: list[dict[str, Any]] | None = None  # as they were in a backward that `step` does not know of
        self.plain = optimizer.step
        optimizer.step = replace_step(optimizer, self.step)  # type: ignore[method-assign]
        optimizer.register_load_state_dict_post_hook(self._loaded)

    def begin(
        self, grad_sinks: Mapping[str, Tensor | None], tangents: Sequence[Tensor | None], retain_graph: bool
    ) -> Callable[[str, Tensor], None]:
        """Return what updates a parameter in the backward that begins now.

        `grad_sinks` are the tensors whose `.grad` would be set, in the order in which they will be updated.

        Raises:
            FusedError: they can't be updated in this backward. Nothing has changed.
        """
        self.begun = False
        self.guard.check()
        self.groups = {p: i for i, group in enumerate(self.optimizer.param_groups) for p in group["params"]}
        if found := self._obstacle(grad_sinks, tangents, retain_graph):
            raise FusedError(f"{found}; {INSTEAD}")
        self.parameters = {name: sink for name, sink in grad_sinks.items() if sink is not None}
        self.updated, self.options, self.begun = 0, _options(self.optimizer), True
        self.waited_us = {}
        return self._update

    def _update(self, name: str, gradient: Tensor) -> None:
        """Step on one parameter, unless it was frozen since forward."""
        if name not in self.parameters:
            return
        parameter = self.parameters[name]
        far = self._is_far(parameter)
        if far and self.stream is None:
            ours = list(filter(self._is_far, self.parameters.values()))
            self.stream = self.offloaded.stream(self._alone(*ours), ours)
        self.updated += 1
        if far and self.stream is not None:
            before = self.stream.waited_s
            self.stream.update(parameter, gradient)
            self.waited_us[name] = (self.stream.waited_s - before) * 1e6
            return
        one = self._alone(parameter)
        parameter.grad = gradient
        try:
            unhooked_step(type(one))(one)
        finally:
            parameter.grad = None

    def finish(self) -> None:
        """All is updated.

        Raises:
            SpillError: the disk has not taken all of it.
        """
        if self.stream is not None:
            self.stream.finish()
            self.stream = None

    def abort(self, error: BaseException) -> None:
        """Backward has ended with an error, which it may have been that it was refused."""
        if not self.begun:
            return
        if self.stream is not None:
            self.stream.stop()
            self.stream = None
        self.options = None
        if self.updated:
            error.add_note(self.guard.mark(self.updated, list(self.parameters)))

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
        self.guard.check()
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
        self, grad_sinks: Mapping[str, Tensor | None], tangents: Sequence[Tensor | None], retain_graph: bool
    ) -> str | None:
        """What stands against updating in this backward, in words."""
        if self.options is not None:
            return (
                "backward has updated the parameters already, and optimizer.step() was not called since: "
                "gradients can't accumulate"
            )
        if retain_graph:
            return "backward can't go through this step again once its parameters are updated: retain_graph=True"
        if any(tangent is None or tangent.item() != 1 for tangent in tangents):
            return (
                "the update takes gradients as they are, so each loss must be differentiated as the model returns it, "
                "not scaled, as by GradScaler, nor divided, nor left out"
            )
        for name, sink in grad_sinks.items():
            if sink is None:
                return (
                    f"the gradient of {name} is wanted elsewhere: by torch.autograd.grad, backward(inputs=...), a hook,"
                    " a data-parallel wrapper, or another call that is under way"
                )
            if sink not in self.groups:
                return f"{name} is no longer a parameter of the optimizer, which has another: compile anew"
            if sink.grad is not None:
                return f"{name} has a gradient already, to which nothing can be added: call optimizer.zero_grad() first"
            if is_nondeterministic(self.optimizer, self.groups[sink], sink.dtype) and self._is_far(sink):
                return f"SGD with fused=True does not give the same twice in {sink.dtype}: set fused=False"
        if self.optimizer._optimizer_step_pre_hooks:
            return "a hook before the optimizer's step would see no gradients"
        return None

    def _loaded(self, optimizer: optim.Optimizer) -> None:
        """What was loaded is a fresh start: no update waits for its `step`."""
        self.options = None
        self.guard.mark_loaded("optimizer")

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
        return parameter in self.offloaded.offloaded_owners or any(
            isinstance(x, Tensor) and buffer_slice_of(x) for x in held
        )


def _options(optimizer: optim.Optimizer) -> list[dict[str, Any]]:
    """The options of all groups as they are now."""
    kept = [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
    return [{key: value.item() if isinstance(value, Tensor) else value for key, value in row.items()} for row in kept]


def check_fusable(optimizer: optim.Optimizer) -> None:
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
    if why := unclonable_reason(optimizer):
        raise FusedError(f"{why}, and an update in backward is made of many; {STATE_ADVICE}, or {INSTEAD}")


LOAD = "load an earlier state: memgraph.load_state(path, model, optimizer), or load_state_dict() of model and optimizer"


class PartialUpdateGuard:
    """What a backward that failed has left of a module and its optimizer."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.message = ""
        self.pending_loads: set[str] = set()  # what has to be loaded yet
        self.names: Collection[str] = ()
        self.handles: list[RemovableHandle] = []
        self.errors: Sequence[str] = ()  # of the load that runs: what did not go into its place
        self.before = 0  # of them, when it came to this module

    def mark(self, updated: int, names: Collection[str]) -> str:
        """From now on nothing goes on; what has happened, and what to do, in words.  `names` are all parameters."""
        self.message = f"{updated} of {len(names)} parameters have been updated, the others have not: {LOAD}"
        self.names, self.pending_loads = names, {"model", "optimizer"}
        if not self.handles:  # only now: a module that is whole stays as it was given
            module = unwrapped(self.module)
            self.handles = [
                module.register_load_state_dict_pre_hook(_Hook(self._model_loads)),
                module.register_load_state_dict_post_hook(_Hook(self._model_loaded)),
            ]
        return self.message

    def check(self) -> None:
        """
        Raises:
            FusedError: a backward has failed, and nothing was loaded since.
        """
        if self.pending_loads:
            raise FusedError(f"an earlier backward did not end, and {self.message}")

    def mark_loaded(self, what: str) -> None:
        """The model or the optimizer has an earlier state again."""
        self.pending_loads.discard(what)
        if not self.pending_loads:
            for handle in self.handles:
                handle.remove()
            self.handles = []

    def _model_loads(self, *given: Any) -> None:
        self.errors = given[-1]  # the very list that the load fills, and raises at its end
        self.before = len(self.errors)

    def _model_loaded(self, module: nn.Module, keys: Any) -> None:
        failed, self.errors = len(self.errors) > self.before, ()
        if not failed and not any(key == n or key.endswith(f".{n}") for key in keys.missing_keys for n in self.names):
            self.mark_loaded("model")


class _Hook:
    """A hook that a copy of the module does not take along."""

    def __init__(self, told: Callable[..., None]) -> None:
        self.told = told

    def __call__(self, *given: Any) -> None:
        self.told(*given)

    def __reduce__(self) -> Any:
        return _Hook, (_nobody,)


def _nobody(*given: Any) -> None:
    """Whom the hook of a copy tells."""
