"""Run an optimizer's update inside backward, parameter by parameter.

loss.backward()       each parameter is updated as soon as its gradient is complete; the gradient is freed at once
optimizer.step()      has nothing left to update, but schedulers and hooks count it as a step

The optimizer's own step runs on each parameter, with its options of that moment. A backward that would need all
gradients, or the same one twice, is refused before anything has changed. If a backward fails halfway, model, backward
and step() raise until an earlier state has been loaded into both model and optimizer, as `memgraph.load_state` does.
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
from ..tensors.parameter_groups import parameter_groups, state_tensors
from .elementwise import ELEMENTWISE, is_elementwise, is_nondeterministic, replace_step
from .offloaded_update import OffloadedUpdate
from .step_on import groups_with, step_on
from .update_unit import STATE_ADVICE, shared_change
from .windowed_update import WindowedUpdate

WITHOUT = "compile without fuse_update for this"
LOAD = "load an earlier state: memgraph.load_state(path, model, optimizer), or load_state_dict() of model and optimizer"


class FusedUpdate:
    """The updates of one optimizer in the backward of one module."""

    def __init__(self, module: nn.Module, optimizer: optim.Optimizer, offloaded: OffloadedUpdate) -> None:
        self.optimizer, self.offloaded = optimizer, offloaded
        self.guard = PartialUpdateGuard(module)
        self.groups: dict[Tensor, int] = {}
        self.parameters: dict[str, Tensor] = {}  # of the backward that runs, or ran last
        self.stream: WindowedUpdate | None = None  # updates offloaded parameters, from the first of them on
        self.waited_us: dict[str, float] = {}  # for the tier, by the parameter's name
        self.updated = 0
        self.accepted = False  # the latest backward was not refused
        self.options: list[dict[str, Any]] | None = None  # in a backward that `step` has not followed yet
        self.plain = optimizer.step
        optimizer.step = replace_step(optimizer, self.step)  # type: ignore[method-assign]
        optimizer.register_load_state_dict_post_hook(self._loaded)

    def begin(
        self, grad_sinks: Mapping[str, Tensor | None], tangents: Sequence[Tensor | None], retain_graph: bool
    ) -> Callable[[str, Tensor], None]:
        """Return what updates a parameter, by name and gradient, in the backward that begins now.

        `grad_sinks` are the tensors whose `.grad` would be set, in the order in which they will be updated.

        Raises:
            FusedError: they can't be updated in this backward. Nothing has changed.
        """
        self.accepted = False
        self.guard.check()
        self.groups = parameter_groups(self.optimizer)
        if reason := self._refusal(grad_sinks, tangents, retain_graph):
            raise FusedError(f"{reason}; {WITHOUT}")
        self.parameters = {name: sink for name, sink in grad_sinks.items() if sink is not None}
        self.updated, self.options, self.accepted = 0, _options(self.optimizer), True
        self.waited_us = {}
        return self._update

    def _update(self, name: str, gradient: Tensor) -> None:
        """Step on one parameter, unless it was frozen since forward."""
        if name not in self.parameters:
            return
        parameter = self.parameters[name]
        is_offloaded = self._is_offloaded(parameter)
        if is_offloaded and self.stream is None:
            streamed = list(filter(self._is_offloaded, self.parameters.values()))
            self.stream = self.offloaded.stream(self.optimizer, {each: self.groups[each] for each in streamed})
        self.updated += 1
        if is_offloaded and self.stream is not None:
            before = self.stream.waited_s
            self.stream.update(parameter, gradient)
            self.waited_us[name] = (self.stream.waited_s - before) * 1e6
            return
        parameter.grad = gradient
        try:
            step_on(self.optimizer, groups_with(self.optimizer.param_groups, {parameter: self.groups[parameter]}))
        finally:
            parameter.grad = None

    def finish(self) -> None:
        """Wait until all updates have been written.

        Raises:
            SpillError: the disk has not taken all of it.
        """
        if self.stream is not None:
            self.stream.finish()
            self.stream = None

    def abort(self, error: BaseException) -> None:
        """Stop after an error in backward, and refuse to continue if some parameters were updated."""
        if not self.accepted:
            return
        if self.stream is not None:
            self.stream.stop()
            self.stream = None
        self.options = None
        if self.updated:
            error.add_note(self.guard.mark(self.updated, list(self.parameters)))

    def states_nbytes(self) -> int:
        """Return the bytes of the states that exist."""
        return resident_bytes(state_tensors(self.optimizer))

    def step(self, *args: Any, **kwargs: Any) -> Any:
        """Replace `optimizer.step`: update the parameters that still have a gradient.

        Raises:
            FusedError: backward has not done what the plain step would do.
        """
        if any(map(callable, (*args, *kwargs.values()))):
            raise FusedError(f"a closure would run backward, which updates too, within the update; {WITHOUT}")
        self.guard.check()
        before, self.options = self.options, None
        if before is not None:
            if any(parameter.grad is not None for parameter in self.parameters.values()):
                raise FusedError(
                    "a parameter has a gradient from outside of the model, or from elsewhere than its own backward, "
                    f"and was updated without it: load an earlier state into model and optimizer, and {WITHOUT}"
                )
            if before != _options(self.optimizer):
                raise FusedError(
                    "options of the optimizer have been changed since backward, which has updated with the old ones: "
                    f"change them before backward or after step(), or {WITHOUT}"
                )
        return self.plain(*args, **kwargs)

    def _refusal(
        self, grad_sinks: Mapping[str, Tensor | None], tangents: Sequence[Tensor | None], retain_graph: bool
    ) -> str | None:
        """Why this backward can't update, as text."""
        if self.options is not None:
            return (
                "backward has updated the parameters already, and optimizer.step() was not called since: "
                "gradients can't accumulate"
            )
        if retain_graph:
            return "backward can't run through this step again once its parameters are updated: retain_graph=True"
        if any(tangent is None or tangent.item() != 1 for tangent in tangents):
            return (
                "the update takes gradients as they are, so each loss must be differentiated as the model returns it, "
                "not scaled, as by GradScaler, nor divided, nor left out"
            )
        reasons = (self._parameter_refusal(name, sink) for name, sink in grad_sinks.items())
        if reason := next(filter(None, reasons), None):
            return reason
        if self.optimizer._optimizer_step_pre_hooks:
            return "a hook before the optimizer's step would see no gradients"
        return None

    def _parameter_refusal(self, name: str, sink: Tensor | None) -> str | None:
        if sink is None:
            return (
                f"the gradient of {name} is wanted elsewhere: by torch.autograd.grad, backward(inputs=...), a hook,"
                " a data-parallel wrapper, or another call that is running"
            )
        if sink not in self.groups:
            return f"{name} is no longer a parameter of the optimizer, which has another: compile again"
        if sink.grad is not None:
            return f"{name} has a gradient already, to which nothing can be added: call optimizer.zero_grad() first"
        if is_nondeterministic(self.optimizer, self.groups[sink], sink.dtype) and self._is_offloaded(sink):
            return f"SGD with fused=True is not deterministic in {sink.dtype}: set fused=False"
        return None

    def _loaded(self, optimizer: optim.Optimizer) -> None:
        """A loaded state is a fresh start: no update waits for its `step`."""
        self.options = None
        self.guard.mark_loaded("optimizer")

    def _is_offloaded(self, parameter: Tensor) -> bool:
        tensors = (parameter, *self.optimizer.state.get(parameter, {}).values())
        return parameter in self.offloaded.offloaded_owners or any(
            isinstance(tensor, Tensor) and buffer_slice_of(tensor) for tensor in tensors
        )


class PartialUpdateGuard:
    """Refuses to use a module and its optimizer after a backward that has updated only some parameters."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.message = ""
        self.pending_loads: set[str] = set()  # "model", "optimizer"
        self.names: Collection[str] = ()
        self.handles: list[RemovableHandle] = []
        self.errors: Sequence[str] = ()  # of the load_state_dict that runs
        self.errors_before = 0  # of them, when it came to this module

    def mark(self, updated: int, names: Collection[str]) -> str:
        """Refuse everything until a state is loaded; return what happened and what to do. `names`: all parameters."""
        self.message = f"{updated} of {len(names)} parameters have been updated, the others have not: {LOAD}"
        self.names, self.pending_loads = names, {"model", "optimizer"}
        if not self.handles:  # not earlier: a module without failures stays as it was given
            module = unwrapped(self.module)
            self.handles = [
                module.register_load_state_dict_pre_hook(_UncopiedHook(self._before_load)),
                module.register_load_state_dict_post_hook(_UncopiedHook(self._after_load)),
            ]
        return self.message

    def check(self) -> None:
        """
        Raises:
            FusedError: a backward has failed, and no state was loaded since.
        """
        if self.pending_loads:
            raise FusedError(f"an earlier backward did not end, and {self.message}")

    def mark_loaded(self, what: str) -> None:
        """Note that the model or the optimizer has an earlier state."""
        self.pending_loads.discard(what)
        if not self.pending_loads:
            for handle in self.handles:
                handle.remove()
            self.handles = []

    def _before_load(self, *args: Any) -> None:
        self.errors = args[-1]  # the very list that load_state_dict fills, and raises at its end
        self.errors_before = len(self.errors)

    def _after_load(self, module: nn.Module, keys: Any) -> None:
        failed, self.errors = len(self.errors) > self.errors_before, ()
        if not failed and not any(key == n or key.endswith(f".{n}") for key in keys.missing_keys for n in self.names):
            self.mark_loaded("model")


class _UncopiedHook:
    """A hook that does nothing in a copy of its module."""

    def __init__(self, call: Callable[..., None]) -> None:
        self.call = call

    def __call__(self, *args: Any) -> None:
        self.call(*args)

    def __reduce__(self) -> Any:
        return _UncopiedHook, (_do_nothing,)


def _do_nothing(*args: Any) -> None: ...


def _options(optimizer: optim.Optimizer) -> list[dict[str, Any]]:
    """The present options of all groups."""
    groups = [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
    return [
        {key: value.item() if isinstance(value, Tensor) else value for key, value in group.items()} for group in groups
    ]


def check_fusable(optimizer: optim.Optimizer) -> None:
    """Check before the first backward, as far as possible, whether an optimizer can update in backward.

    Raises:
        FusedError: its class or an option does not allow it, or it is a class of the user and changes something that
            parameters share.
        UpdateError: it is a class of the user, and its step fails.
    """
    if not is_elementwise(optimizer):
        supported = ", ".join(kind.__name__ for kind in ELEMENTWISE)
        raise FusedError(
            f"{type(optimizer).__name__} as it is can't update one parameter after the other in backward; use one of "
            f"{supported} itself, without differentiable=True and capturable=True, or {WITHOUT}"
        )
    if why := shared_change(optimizer):
        raise FusedError(f"{why}, and an update in backward is made of many; {STATE_ADVICE}, or {WITHOUT}")
