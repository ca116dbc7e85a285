"""The module that `memgraph.compile` returns: the given one, whose step stays under the budget.

    model(x)    ->  a plan for calls like this, made now or found; then its forward.  Backward follows by autograd.

Steps are kept by signature, and the one that was used longest ago goes first; what was decided of it stays, in
`plan_cache`.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Hashable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, Self

import torch
from torch import Tensor, nn

from ..capture.leaf_inputs import refuse_leaf_writes, rewrite_leaf_inputs
from ..errors import FusedError, NoPlanError
from ..graph.captured import Captured
from ..guards.module_attributes import AttributeGuard
from ..guards.module_proxy import ModuleProxy
from ..guards.signature import has_gradients, signature
from ..options.compile_options import CompileOptions
from ..planning.call_kinds import CallKinds
from ..planning.capture_cache import CaptureCache, EarlierCapture
from ..planning.float_keys import FloatKeys
from ..planning.planner import Planner
from ..report.report import Report
from ..report.tables import mb
from ..runtime.autograd_function import UnplannedGradient
from ..runtime.eager_fallback import eager_gradients
from ..runtime.step import Step
from ..system.locks import PLANNING_LOCK, read_when_not_capturing
from ..system.user_warning import warn_user
from ..tensors.loss_outputs import OutputSelector, select_all, select_scalars
from ..tensors.pytree import Spec, flatten, tensors_of
from .transforms import refuse_duals, refuse_transforms

PLANS = 8  # steps that are kept in any case; the one that was used longest ago goes first
NODES = 10_000  # of their graphs: more steps are kept as long as they have no more, at about 5 kB each
LEAST = 50  # nodes that each step counts for besides its own
LOG = logging.getLogger(__name__)

Key = tuple[Hashable, bool, OutputSelector]  # the guard, whether gradients are there, and what backward starts from
ONCE = "this one step runs the plain module again, outside of the budget, and later steps are planned for"
MORE = f"a loss was made of outputs for which no backward was planned; {ONCE} all"
LESS = f"no loss was made of outputs for which backward was planned beside the scalar ones; {ONCE} the scalar"


class CompiledModule(ModuleProxy):
    """A module that trains like the one it was made of.  `plan` is the report of the latest call's step."""

    def __new__(cls, planner: Planner) -> Self:
        return super().__new__(cls, planner.module)

    def __init__(self, planner: Planner) -> None:
        super().__init__(planner.module)
        self.__dict__ |= {"_planner": planner, "_steps": OrderedDict(), "_latest": None}
        self.__dict__["_wanted"] = planner.options.outputs
        self.__dict__ |= {"_attributes": AttributeGuard(planner.module), "_kinds": CallKinds(planner.module)}
        self.__dict__["_captures"] = CaptureCache()
        self.__dict__["_floats"] = FloatKeys(self._attributes, self._captures)

    def __reduce__(self) -> Any:
        """A copy is the copied module, compiled anew; without the optimizer, which is one of the old parameters."""
        self._refuse_awaited("a copy")
        options = replace(self._planner.options, optimizer=None, fuse_update=False, host_update=False)
        return _again, (self._planner.module, options)

    @property
    def plan(self) -> Report:
        """What the step of the latest call does, what it was forecast to take, and what it took.

        Raises:
            NoPlanError: the module has not been called yet; it is an AttributeError, for whoever looks around.
        """
        if self._latest is None:
            raise NoPlanError(
                "there is no plan before the first call; "
                "memgraph.plan(model, *args, budget=...) makes one without a step"
            )
        return self._latest.current_report

    @property
    def plans(self) -> tuple[Report, ...]:
        """The reports of all kinds of calls whose plans are kept, the one that was used longest ago first.

        A call that adds to gradients is another kind than one that makes them, and so is one of another shape, or
        without gradients.  There are none before the first call.
        """
        return tuple(step.report for step in list(self._steps.values()))

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The optimizer that was given to `memgraph.compile`."""
        if self._planner.options.optimizer is None:
            raise AttributeError("no optimizer was given to memgraph.compile, or this is a copy, which has none")
        return self._planner.options.optimizer

    def clip_grad_norm_(
        self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False, foreach: bool | None = None
    ) -> Tensor:
        """Scale all gradients so that their norm is at most `max_norm`; the norm before, as torch's own function
        gives it, wherever the gradients live.  With a sharded optimizer it is that of the means over all ranks.

        Raises:
            FusedError: with `fuse_update` there are none.
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
        self._refuse_awaited("state_dict()")
        return read_when_not_capturing(self._module, lambda: self._module.state_dict(*args, **kwargs))

    @torch.compiler.disable(reason="a compiled module of memgraph runs a graph of its own")  # type: ignore[untyped-decorator]
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        refuse_transforms()
        self.refuse_torn()
        leaves, spec = flatten((args, kwargs))
        tensors, key = read_when_not_capturing(self._module, lambda: self._read(spec, leaves))
        refuse_duals(tensors)
        step, floats = self._step(args, kwargs, key)
        refuse_leaf_writes(tensors, step.parts.captured.rewritten)
        if self._latest is not None and self._latest is not step:
            self._latest.release_recording()
        self.__dict__["_latest"] = step
        outputs = step(tensors, lambda: self._unforeseen(step.parts.captured, args, kwargs), floats)
        return step.parts.captured.result(rewrite_leaf_inputs(outputs, tensors, step.parts.captured.rewritten), tensors)

    def refuse_torn(self) -> None:
        """
        Raises:
            FusedError: a backward that updates has failed half way, and no earlier state was loaded since.
        """
        if self._planner.state.fused_update is not None:
            self._planner.state.fused_update.torn.check()

    def _refuse_awaited(self, what: str) -> None:
        """
        Raises:
            ShardError: what other ranks have updated of the parameters has not been gathered since.
        """
        if self._planner.state.sharded is not None:
            self._planner.state.sharded.awaited.refuse(self._module.parameters(), what)

    def _read(self, spec: Spec, leaves: Sequence[object]) -> tuple[list[Tensor], Key]:
        """All tensors that a call reads, and the key of its plan."""
        parameters, buffers = list(self._module.parameters()), list(self._module.buffers())
        owned = [*parameters, *buffers]
        guard = signature(self._module, owned, spec, leaves, self._attributes)
        tensors = [*owned, *tensors_of(leaves)]
        adds = bool(self._planner.options.accumulate) or has_gradients(parameters)
        return tensors, ((guard, self._planner.state.key()), adds, self._wanted)

    def _step(self, args: tuple[Any, ...], kwargs: dict[str, Any], call: Key) -> tuple[Step, list[float]]:
        """Return the planned step for a call, kept or made now, and the floats that it takes."""
        key, floats = self._floats.lookup(call, self._steps)
        step: Step | None = self._steps.get(key)
        if step is None or step.needs_replan:
            return self._planned(args, kwargs, call)
        return self._used(key, step), floats

    def _planned(self, args: tuple[Any, ...], kwargs: dict[str, Any], call: Key) -> tuple[Step, list[float]]:
        steps: OrderedDict[Key, Step] = self._steps
        with PLANNING_LOCK:
            key, floats = self._floats.lookup(call, steps)
            if key not in steps:  # another thread may have planned it by now
                key, floats = self._floats.add(call, key, self._made(args, kwargs, key), steps)
            if steps[key].needs_replan and steps[key].report.plan:
                LOG.info("a plan is looked for once more, with the times that the step's own ops took")
            step = steps[key] = steps[key].replanned()
            steps.move_to_end(key)  # or it could be the one to go: a better plan may hold more
            while len(steps) > PLANS and sum(map(_weight, steps.values())) > NODES:
                (guard, _, wanted), dropped = steps.popitem(last=False)
                if self._planner.keeps_captures:
                    self._captures.add((guard, wanted), dropped.parts.captured)
            return step, floats

    def _made(self, args: tuple[Any, ...], kwargs: dict[str, Any], key: Key) -> Step:
        """A new step; who wonders what takes so long, or why it is done again, sees it in the log."""
        LOG.info("a call unlike the %d before: it is captured, priced and planned", self._kinds.number)
        guard, adds, wanted = key
        similar = self._steps.get((guard, not adds, wanted))
        earlier = EarlierCapture.of(similar) if similar is not None else self._captures.take((guard, wanted))
        can_open = earlier is None and self._planner.keeps_captures
        capture = self._floats.capture_for(key, self._steps) if can_open else None
        if capture is None:
            self._count_kind(args, kwargs)
        step: Step = self._planner.step(args, kwargs, wanted, earlier, capture)
        if capture is not None and step.parts.captured.float_values:
            self._kinds.forget(args, kwargs)
        elif capture is not None:
            self._count_kind(args, kwargs)
            self._floats.note_failure(key, capture)
            LOG.info("floats stay constants of the graph: %s", capture.reason or "this time they differ by more")
        seconds, peak, overhead = step.report.planned_us / 1e6, mb(step.report.peak), 100 * step.report.overhead
        LOG.info("planned in %.1f s: %s, step %+.1f %%", seconds, peak, overhead)
        return step

    def _count_kind(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Count one more kind of calls, and warn if their number seems to have no end."""
        if warning := self._kinds.warning(args, kwargs):
            warn_user(warning)

    def _used(self, key: Key, step: Step) -> Step:
        with suppress(KeyError):  # another thread may have let it go by now
            self._steps.move_to_end(key)
        return step

    def _unforeseen(self, captured: Captured, args: tuple[Any, ...], kwargs: dict[str, Any]) -> UnplannedGradient:
        """What to do if a gradient comes for an output that no loss was expected to be made of, or the other way
        round."""
        if len(captured.differentiable) == len(captured.tangents) and not captured.hoped:
            return lambda tangents: []
        if self._planner.state.fused_update is not None:
            return _refuse_unforeseen
        again = eager_gradients(self._module, captured, args, kwargs)

        def run(tangents: Sequence[Tensor | None]) -> Sequence[Tensor | None]:
            if any(tangent is not None and i not in captured.tangents for i, tangent in enumerate(tangents)):
                what, self.__dict__["_wanted"] = MORE, select_all
            else:
                what, self.__dict__["_wanted"] = LESS, select_scalars
            warn_user(f"{what} outputs")
            return again(tangents)

        return run


def _weight(step: Step) -> int:
    """What a step counts for: its nodes; more, if it holds room elsewhere."""
    halves = step.parts.halves.forward, step.parts.halves.backward
    nodes = sum(len(half.graph.nodes) for half in halves if half is not None)
    holds = step.parts.tier or step.parts.state_slots or step.cuda_graphs
    return max(LEAST + nodes, NODES // PLANS) if holds else LEAST + nodes


def _refuse_unforeseen(tangents: Sequence[Tensor | None]) -> Sequence[Tensor | None]:
    raise FusedError(
        "a loss was made of outputs other than the scalar ones, from which alone backward updates: let the model "
        "return its loss, give loss=, or compile without fuse_update"
    )


def _again(module: nn.Module, options: CompileOptions) -> CompiledModule:
    return CompiledModule(Planner(module, options))
