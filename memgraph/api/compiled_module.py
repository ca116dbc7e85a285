"""The module that `memgraph.compile` returns: the given one, with a step that stays within the budget.

    model(x)    ->  the step for calls like this, planned now or kept; its forward runs, and autograd runs its backward

Steps are kept by signature; the least recently used one is dropped first.  Its plan stays in `planning/plan_cache.py`.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Hashable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, Self, cast

import torch
from torch import Tensor, nn
from torch._C._functorch import peek_interpreter_stack
from torch.autograd import forward_ad

from ..capture.floats.float_capture import FloatCapture
from ..capture.joint.leaf_inputs import refuse_leaf_writes, rewrite_leaf_inputs
from ..capture.sizes.size_capture import SizeCapture
from ..errors import FusedError, MemgraphError, NoPlanError
from ..graph.captured import Captured
from ..graph.counters import advance
from ..graph.guard_ops import GuardFailed, ValueGuard
from ..guards.module_attributes import AttributeGuard
from ..guards.module_proxy import ModuleProxy
from ..guards.signature import has_gradients, signature, with_attributes
from ..options.compile_options import CompileOptions
from ..planning.call_kinds import CallKinds
from ..planning.capture_cache import CaptureCache, EarlierCapture
from ..planning.counter_keys import CounterKeys
from ..planning.float_keys import FloatKeys
from ..planning.planner import Planner
from ..planning.size_keys import SizeKeys
from ..planning.value_variants import ValueVariants, is_new, refuse_unstable
from ..report.report import Report
from ..report.tables import mb
from ..runtime.autograd_function import UnplannedGradient
from ..runtime.eager_fallback import eager_gradients
from ..runtime.step import Step
from ..system.locks import PLANNING_LOCK, read_when_not_capturing
from ..system.user_warning import warn_user
from ..tensors.loss_outputs import OutputSelector, select_all, select_scalars
from ..tensors.pytree import Spec, flatten, tensors_of

PLANS = 8  # steps that are always kept
NODES = 10_000  # in their graphs: more steps are kept while they have fewer; a node takes about 5 kB
LEAST = 50  # nodes that each step counts for besides its own
LOG = logging.getLogger(__name__)

Key = tuple[Hashable, bool, OutputSelector]  # the guard, whether gradients exist, the outputs that backward starts from
ONCE = "this one step runs the plain module, outside of the budget, and later steps are planned for"
MORE = f"a loss was made of outputs for which no backward was planned; {ONCE} all"
LESS = f"no loss was made of outputs for which backward was planned beside the scalar ones; {ONCE} the scalar"


class CompiledModule(ModuleProxy):
    """A module that trains like the one it was made of.  `plan` is the report of the latest call's step."""

    def __new__(cls, planner: Planner) -> Self:
        return super().__new__(cls, planner.module)

    def __init__(self, planner: Planner) -> None:
        super().__init__(planner.module)
        self.__dict__ |= {"_planner": planner, "_steps": OrderedDict(), "_latest": None}
        self.__dict__["_outputs"] = planner.options.outputs
        self.__dict__ |= {"_attributes": AttributeGuard(planner.module), "_kinds": CallKinds(planner.module)}
        self.__dict__["_captures"] = CaptureCache()
        self.__dict__ |= {"_floats": FloatKeys(self._attributes, self._captures), "_sizes": SizeKeys()}
        self.__dict__["_variants"] = ValueVariants()
        self.__dict__["_counters"] = CounterKeys(self._attributes)

    def __reduce__(self) -> Any:
        """Copy or pickle as a newly compiled module, without the optimizer: that updates the old parameters."""
        self._refuse_incomplete_parameters("a copy")
        options = replace(self._planner.options, optimizer=None, fuse_update=False, host_update=False)
        return _compiled, (self._planner.module, options)

    @property
    def plan(self) -> Report:
        """The report of the latest call's step: its plan, its forecast, and what was measured.

        Raises:
            NoPlanError: the module was not called yet.  It is an AttributeError, for `hasattr`.
        """
        if self._latest is None:
            raise NoPlanError(
                "there is no plan before the first call; "
                "memgraph.plan(model, *args, budget=...) makes one without a step"
            )
        return self._latest.current_report

    @property
    def plans(self) -> tuple[Report, ...]:
        """The reports of all kinds of calls whose steps are kept, the least recently used one first.

        Calls differ in kind if they differ in shapes, if they add to gradients or make them, or if they make none.
        """
        return tuple(step.current_report for step in list(self._steps.values()))

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
        refuse_transforms()
        self.refuse_partial_update()
        leaves, spec = flatten((args, kwargs))
        tensors, key = read_when_not_capturing(self._module, lambda: self._read(spec, leaves))
        refuse_duals(tensors)
        key, tried = self._variants.latest(key), list[Sequence[ValueGuard]]()
        while True:
            try:
                return self._run(args, kwargs, tensors, key)
            except GuardFailed as failure:
                refuse_unstable(key, failure)
                tried.append(failure.guards)
                key = self._variants.others(key, tried, failure)

    def _run(self, args: tuple[Any, ...], kwargs: dict[str, Any], tensors: list[Tensor], call: Key) -> Any:
        """Run the step of a call.

        Raises:
            GuardFailed: it was captured for other values. Nothing has changed.
        """
        step, floats = self._step(args, kwargs, call)
        captured = step.parts.captured
        refuse_leaf_writes(tensors, captured.rewritten)
        if self._latest is not None and self._latest is not step:
            self._latest.release_recording()
        self.__dict__["_latest"] = step
        outputs = step(tensors, lambda: self._unplanned(captured, args, kwargs), floats)
        self._variants.note_use(call, captured.guards)
        advance(self._module, captured.counters)
        return captured.result(rewrite_leaf_inputs(outputs, tensors, captured.rewritten), tensors)

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

    def _read(self, spec: Spec, leaves: Sequence[object]) -> tuple[list[Tensor], Key]:
        """Return all tensors that a call reads, and the key of its step."""
        parameters, buffers = list(self._module.parameters()), list(self._module.buffers())
        owned = [*parameters, *buffers]
        guard = signature(self._module, owned, spec, leaves, self._attributes)
        tensors = [*owned, *tensors_of(leaves)]
        adds = bool(self._planner.options.accumulate) or has_gradients(parameters)
        guard = self._counters.general(guard)
        return tensors, ((guard, (self._planner.state.key(), ())), adds, self._outputs)

    def _step(self, args: tuple[Any, ...], kwargs: dict[str, Any], call: Key) -> tuple[Step, list[float]]:
        """Return the step of a call, kept or planned now, and the floats that it takes."""
        key, floats = self._floats.lookup(call, self._steps)
        step: Step | None = self._steps.get(key)
        if step is None or step.needs_replan:
            return self._planned(args, kwargs, call)
        with suppress(KeyError):  # another thread may have dropped it by now
            self._steps.move_to_end(key)
        return step, floats

    def _planned(self, args: tuple[Any, ...], kwargs: dict[str, Any], call: Key) -> tuple[Step, list[float]]:
        steps: OrderedDict[Key, Step] = self._steps
        with PLANNING_LOCK:
            key, floats = self._floats.lookup(call, steps)
            if key not in steps:  # another thread may have planned it by now
                new = self._new_step(args, kwargs, key)
                captured = new.parts.captured
                call, key = (self._counters.add(known, captured.counters, self._module) for known in (call, key))
                call, key = self._without_changed_attributes(captured, call, key)
                call, key = (self._variants.add(known, new.parts.captured.guards) for known in (call, key))
                key, floats = self._floats.add(call, key, new, steps)
                if warning := self._variants.warning(key, new.parts.captured.guards):
                    warn_user(warning)
            if steps[key].needs_replan and steps[key].report.plan:
                LOG.info("a better plan is searched for, with the times that the step's own ops took")
            step = steps[key] = steps[key].replanned()
            steps.move_to_end(key)  # or it could be dropped below: a better plan may count for more
            while len(steps) > PLANS and sum(map(_weight, steps.values())) > NODES:
                (guard, _, outputs), dropped = steps.popitem(last=False)
                if self._planner.keeps_captures:
                    self._captures.add((guard, outputs), dropped.parts.captured)
            return step, floats

    def _without_changed_attributes(self, captured: Captured, call: Key, key: Key) -> tuple[Key, Key]:
        """Return the keys of a call and its step without the attributes that opaque parts change in every step."""
        changed = [attribute for part in captured.opaque for attribute in part.changed_attributes]
        if key != call or not self._attributes.ignore(changed):
            return call, key
        (guard, state), adds, outputs = cast("tuple[Any, bool, OutputSelector]", call)
        call = (with_attributes(guard, self._attributes), state), adds, outputs
        return call, call

    def _new_step(self, args: tuple[Any, ...], kwargs: dict[str, Any], key: Key) -> Step:
        """Plan a step, and log why that happens and how long it took."""
        LOG.info("a call unlike the %d before: it is captured, priced and planned", self._kinds.number)
        guard, adds, outputs = key
        similar = self._steps.get((guard, not adds, outputs))
        earlier = EarlierCapture.of(similar) if similar is not None else self._captures.take((guard, outputs))
        traces = earlier is None and self._planner.keeps_captures
        known = self._sizes.captured((guard, outputs), self._kept_steps()) if traces else None
        capture = self._general_capture(key) if traces and known is None else None
        if capture is None and known is None and not is_new(key):
            self._warn_of_kinds(args, kwargs)
        step = self._planner.step(args, kwargs, outputs, earlier, known or capture)
        if capture is not None and self._is_general(key, capture, step):
            self._kinds.forget(args, kwargs)
        elif capture is not None:
            self._warn_of_kinds(args, kwargs)
        seconds, peak, overhead = step.report.planned_us / 1e6, mb(step.report.peak), 100 * step.report.longer
        LOG.info("planned in %.1f s: %s, step %+.1f %%", seconds, peak, overhead)
        return step

    def _general_capture(self, key: Key) -> FloatCapture | SizeCapture | None:
        """Return a capture that may serve other calls too, if one of these is known."""
        floats = self._floats.capture_for(key, self._steps)
        if floats is not None:
            return floats
        kept = [(key, step.parts.captured) for key, step in self._kept_steps()]
        return self._sizes.capture_for((key[0], key[2]), [*kept, *self._captures.items()])

    def _kept_steps(self) -> list[tuple[Any, Step]]:
        """Return the steps with what their captures depend on, the latest first."""
        return [((guard, outputs), step) for (guard, _, outputs), step in reversed(self._steps.items())]

    def _is_general(self, key: Key, capture: FloatCapture | SizeCapture, step: Step) -> bool:
        if isinstance(capture, SizeCapture):
            return self._sizes.note((key[0], key[2]), capture)
        return self._floats.are_inputs(key, capture, step)

    def _warn_of_kinds(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Count one more kind of calls, and warn if there are ever more."""
        if warning := self._kinds.warning(args, kwargs):
            warn_user(warning)

    def _unplanned(self, captured: Captured, args: tuple[Any, ...], kwargs: dict[str, Any]) -> UnplannedGradient:
        """Return what to do when gradients arrive for other outputs than planned."""
        if len(captured.differentiable) == len(captured.tangents) and not captured.speculative_outputs:
            return lambda tangents: []
        if self._planner.state.fused_update is not None:
            return _refuse_unplanned
        differentiate = eager_gradients(self._module, captured, args, kwargs)

        def run(tangents: Sequence[Tensor | None]) -> Sequence[Tensor | None]:
            if any(tangent is not None and i not in captured.tangents for i, tangent in enumerate(tangents)):
                what, self.__dict__["_outputs"] = MORE, select_all
            else:
                what, self.__dict__["_outputs"] = LESS, select_scalars
            warn_user(f"{what} outputs")
            return differentiate(tangents)

        return run


def _weight(step: Step) -> int:
    """Return the nodes that a step counts for; more, if it holds memory or slots in a tier."""
    halves = step.parts.halves.forward, step.parts.halves.backward
    nodes = LEAST + sum(len(half.graph.nodes) for half in halves if half is not None)
    resources = step.parts.tier, step.parts.state_slots, step.cuda_graphs
    return nodes if all(resource is None for resource in resources) else max(nodes, NODES // PLANS)


def _refuse_unplanned(tangents: Sequence[Tensor | None]) -> Sequence[Tensor | None]:
    raise FusedError(
        "a loss was made of outputs other than the scalar ones, and backward updates from those alone: let the model "
        "return its loss, give loss=, or compile without fuse_update"
    )


def _compiled(module: nn.Module, options: CompileOptions) -> CompiledModule:
    return CompiledModule(Planner(module, options))


def refuse_transforms() -> None:
    """
    Raises:
        MemgraphError: vmap, grad, vjp, jvp or another transform of torch.func is running.
    """
    if peek_interpreter_stack() is not None:
        raise MemgraphError(
            "torch.func (vmap, grad, vjp, jvp, ...) can't transform a compiled module, which runs a step as it was "
            "captured: transform the plain module, or compile a module whose forward calls torch.func"
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
