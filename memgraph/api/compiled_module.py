"""The module that `memgraph.compile` returns: the given one, with a step that stays within the budget.

model(x)    ->  the step for calls like this, planned now or kept; its forward runs, and autograd runs its backward
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from copy import copy
from dataclasses import replace
from functools import partial
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch._C._functorch import peek_interpreter_stack
from torch.autograd import forward_ad
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext

from ..capture.joint.leaf_inputs import rewrite_leaf_inputs
from ..errors import BudgetError, FusedError, MemgraphError, NoPlanError
from ..guards.module_attributes import HOOKS
from ..guards.module_proxy import ModuleProxy
from ..options.compile_options import CompileOptions
from ..planning.planner import Planner
from ..planning.variants import CallFacts
from ..report.report import Report
from ..runtime.autograd_function import OtherOutputs
from ..runtime.eager_fallback import eager_gradients
from ..runtime.step import Step
from ..system.locks import read_when_not_capturing
from ..system.user_warning import warn_user
from ..tensors.loss_outputs import OutputSelector, select_all, select_scalars
from .kept_steps import KeptSteps

LOG = logging.getLogger(__name__)
MORE = (
    "a loss was made of outputs for which no backward was planned; this one step runs the plain module, outside of the "
    "budget, and later steps are planned for all outputs"
)
FEWER = "no loss was made of outputs for which backward was planned; later steps are planned for the scalar ones alone"


class CompiledModule(ModuleProxy):
    """A module that trains like the one it was made of.  `plan` is the report of the latest training step."""

    def __new__(cls, planner: Planner) -> Self:
        return super().__new__(cls, planner.module)

    def __init__(self, planner: Planner) -> None:
        super().__init__(planner.module)
        self.__dict__ |= {"_planner": planner, "_kept": KeptSteps(planner), "_latest": None, "_calls": 0}
        self.__dict__ |= {"_outputs": planner.options.outputs, "_trained": lambda: None}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """
        Raises:
            MemgraphError: this object's `forward` was replaced by one that does not call the planned one.
        """
        calls = self._calls
        # Hooks of all modules run in the step, on the module itself.
        call = super().__call__ if any(map(vars(self).get, HOOKS)) else self.forward
        result = call(*args, **kwargs)
        if calls == self._calls and torch.is_grad_enabled():
            raise MemgraphError(
                f"forward of this compiled {self._get_name()} was replaced, and the new one runs no planned step, so "
                "no budget holds: call the forward that was there in it, or compile a module that has it"
            )
        return result

    def __repr__(self) -> str:
        return f"CompiledModule({self._module!r}, budget={self._planner.options.budget!r})"

    def __reduce__(self) -> Any:
        """Copy or pickle as a newly compiled module, without the optimizer: that updates the old parameters."""
        self._refuse_incomplete_parameters("a copy")
        options = replace(self._planner.options, optimizer=None, fuse_update=False, host_update=False)
        return _compiled, (self._planner.module, options)

    def __copy__(self) -> CompiledModule:
        """Share parameters, buffers and submodules, and no attributes, as a shallow copy of a plain module does."""
        compiled, (module, options) = self.__reduce__()
        copied: CompiledModule = compiled(copy(module), options)
        return copied

    @property
    def plan(self) -> Report:
        """The report of the latest training step: its plan, its forecast, and what was measured.

        That is a call with a backward; an evaluation under `no_grad` does not change it. If no such step is kept, it
        is that of the latest call.

        Raises:
            NoPlanError: the module was not called yet.  It is an AttributeError, for `hasattr`.
        """
        step = self._trained() or self._latest
        if step is None:
            raise NoPlanError(
                "there is no plan before the first call; "
                "memgraph.plan(model, *args, budget=...) makes one without a step"
            )
        report: Report = step.current_report
        return report

    @property
    def plans(self) -> tuple[Report, ...]:
        """The reports of all kinds of calls whose steps are kept, the least recently used one first.

        Calls differ in kind if they differ in shapes, if they add to gradients or make them, or if they make none.
        """
        return tuple(step.current_report for step in self._kept.steps)

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The optimizer that was given to `memgraph.compile`."""
        if self._planner.options.optimizer is None:
            raise AttributeError("no optimizer was given to memgraph.compile, or this is a copy, which has none")
        return self._planner.options.optimizer

    def clip_grad_norm_(
        self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False, foreach: bool | None = None
    ) -> Tensor:
        """Scale all gradients so that their norm is at most `max_norm`, and return the norm before.

        Gradients may be offloaded.  With a sharded optimizer the norm is that of the means over all ranks.

        Raises:
            FusedError: with `fuse_update` there are no gradients.
        """
        if self._planner.state.sharded is not None:
            return self._planner.state.sharded.clip_grad_norm_(max_norm, norm_type, error_if_nonfinite)
        if self._planner.state.fused_update is not None:
            raise FusedError(
                "backward has updated the parameters, and no gradient is left to clip; compile without "
                "fuse_update for this"
            )
        return nn.utils.clip_grad_norm_(self.parameters(), max_norm, norm_type, error_if_nonfinite, foreach)

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        return iter(read_when_not_capturing(self._module, lambda: list(self._module.named_parameters(*args, **kwargs))))

    def named_buffers(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, Tensor]]:
        return iter(read_when_not_capturing(self._module, lambda: list(self._module.named_buffers(*args, **kwargs))))

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        self._refuse_incomplete_parameters("state_dict()")
        return read_when_not_capturing(self._module, lambda: self._module.state_dict(*args, **kwargs))

    @torch.compiler.disable(reason="a compiled module of memgraph runs a graph of its own")  # type: ignore[untyped-decorator]
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self.__dict__["_calls"] += 1
        refuse_transforms()
        self.refuse_partial_update()
        call = read_when_not_capturing(self._module, lambda: self._kept.read(args, kwargs, self._outputs))
        refuse_duals(call.tensors)
        return self._kept.run(args, kwargs, call, partial(self._run, args, kwargs))

    def _run(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], step: Step, call: CallFacts, floats: list[float]
    ) -> Any:
        """Run the step of a call.

        Raises:
            GuardFailed: it was captured for other values. Nothing has changed.
        """
        captured, tensors = step.parts.captured, call.tensors
        if self._latest is not None and self._latest is not step:
            self._latest.release_memory()
        self.__dict__["_latest"] = step
        if step.parts.halves.backward is not None:
            self.__dict__["_trained"] = weakref.ref(step)  # a step that is dropped frees its bytes
        after = [call]  # as forward leaves it

        def changes() -> str:
            return self._kept.changes(args, kwargs, after[0])

        outputs = step(tensors, lambda: self._other_outputs(step, args, kwargs, changes), floats)
        fill = captured.fill(rewrite_leaf_inputs(outputs, tensors, captured.rewritten), tensors, floats)
        captured.writes.apply(fill)
        if captured.writes.items and len(captured.differentiable) > len(captured.tangents):
            after[0] = call.read()
        return captured.result(fill)

    def _plan_outputs(self, outputs: OutputSelector) -> None:
        """Plan later calls for a loss of these outputs."""
        self.__dict__["_outputs"] = outputs

    def refuse_partial_update(self) -> None:
        """
        Raises:
            FusedError: a backward that updates failed half way, and no earlier state was loaded since.
        """
        if self._planner.state.fused_update is not None:
            self._planner.state.fused_update.guard.check()

    def _refuse_incomplete_parameters(self, what: str) -> None:
        """
        Raises:
            ShardError: parameters that other ranks have updated were not gathered yet.
        """
        if self._planner.state.sharded is not None:
            self._planner.state.sharded.pending_gathers.refuse_reads(self._module.parameters(), what)

    def _other_outputs(
        self, step: Step, args: tuple[Any, ...], kwargs: dict[str, Any], changes: Callable[[], str]
    ) -> OtherOutputs:
        """Return what to do when gradients arrive for other outputs than planned."""
        captured, report = step.parts.captured, step.report

        def fewer() -> None:
            LOG.info(FEWER)
            self._plan_outputs(select_scalars)

        if self._planner.state.fused_update is not None or len(captured.differentiable) == len(captured.tangents):
            return OtherOutputs(_refuse_unplanned, fewer)
        if report.all_outputs:
            return OtherOutputs(partial(_refuse_unaffordable, report.budget, report.all_outputs), fewer)
        differentiate = eager_gradients(self._module, captured, args, kwargs, changes)

        def more(tangents: Sequence[Tensor | None]) -> Sequence[Tensor | None]:
            self._plan_outputs(select_all)
            warn_user(MORE)
            return differentiate(tangents)

        return OtherOutputs(more, fewer)


def _refuse_unplanned(tangents: Sequence[Tensor | None]) -> Sequence[Tensor | None]:
    raise FusedError(
        "a loss was made of outputs other than the scalar ones, and backward updates from those alone: let the model "
        "return its loss, give loss=, or compile without fuse_update"
    )


def _refuse_unaffordable(budget: int, needed_nbytes: int, tangents: Sequence[Tensor | None]) -> Sequence[Tensor | None]:
    raise BudgetError(
        f"a loss was made of outputs other than the scalar ones, and backward from all outputs needs {needed_nbytes} "
        f"bytes, where {budget} are allowed; forward changes buffers that it reads, or has opaque parts, and can't run "
        f"again for such gradients: give budget={needed_nbytes}, or loss=, which makes the loss part of the step",
        budget, needed_nbytes,
    )  # fmt: skip


def _compiled(module: nn.Module, options: CompileOptions) -> CompiledModule:
    return CompiledModule(Planner(module, options))


def refuse_transforms() -> None:
    """
    Raises:
        MemgraphError: torch.jit.trace, torch.export, a transform of torch.func (vmap, grad, vjp, ...) is running, or
            a TorchFunctionMode of the caller's, or a block of parametrize.cached().
    """
    if torch.jit.is_tracing() or torch.compiler.is_exporting():  # type: ignore[attr-defined, no-untyped-call]
        raise MemgraphError(
            "torch.jit.trace and torch.export can't follow a compiled module, which runs a graph of its own: give them "
            "the plain module"
        )
    if peek_interpreter_stack() is not None:
        raise MemgraphError(
            "torch.func (vmap, grad, vjp, jvp, ...) can't transform a compiled module, which runs a step as it was "
            "captured: transform the plain module, or compile a module whose forward calls torch.func"
        )
    if torch.nn.utils.parametrize._cache_enabled:
        raise MemgraphError(
            "torch.nn.utils.parametrize.cached() keeps what a parametrization returns from one call to the next, and a "
            "captured step makes its own: enter it in forward"
        )
    for mode in _get_current_function_mode_stack():
        if type(mode) is not DeviceContext:
            raise MemgraphError(
                f"{type(mode).__name__} is a TorchFunctionMode and changes the functions of torch, but a captured step "
                "does not call these: let forward enter it"
            )


def refuse_duals(tensors: Iterable[Tensor]) -> None:
    """
    Raises:
        MemgraphError: a tensor has a forward-mode tangent, which the step would drop.
    """
    if forward_ad._current_level >= 0 and any(forward_ad.unpack_dual(t).tangent is not None for t in tensors):
        raise MemgraphError(
            "a compiled module can't be differentiated forward (torch.autograd.forward_ad): use the plain module"
        )
