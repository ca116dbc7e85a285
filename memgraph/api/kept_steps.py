"""The steps of a module's calls, found by signature or planned.

    a call   ->   its signature   ->   the step that is kept for it, also for other floats or values, or a new one

The least recently used step is dropped first. Its plan stays in `planning/plan_cache.py`.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn

from ..capture.floats.float_capture import FloatCapture
from ..capture.sizes.size_capture import SizeCapture
from ..graph.captured import Captured
from ..graph.guard_ops import GuardFailed, ValueGuard
from ..guards.attribute_guard import AttributeGuard
from ..guards.owned_tensors import owned_tensors
from ..guards.signature import has_gradients, signature, with_attributes, with_more_variables
from ..planning.call_kinds import CallKinds
from ..planning.capture_cache import CaptureCache, EarlierCapture, with_guard
from ..planning.counter_keys import CounterKeys
from ..planning.float_keys import FloatKeys
from ..planning.lengths.size_keys import SizeKeys
from ..planning.planner import Planner
from ..planning.value_variants import MANY, Answers, ValueVariants, is_new, refuse_unstable
from ..runtime.step import Step
from ..system.locks import PLANNING_LOCK
from ..system.user_warning import warn_user
from ..tensors.loss_outputs import OutputSelector
from ..tensors.pytree import Spec, tensors_of
from .pending_writes import PendingWrites

PLANS = 8  # steps that are always kept
NODES = 10_000  # in their graphs: more steps are kept while they have fewer; a node takes about 5 kB
LEAST = 50  # nodes that each step counts for besides its own
LOG = logging.getLogger(__name__)

Key = tuple[Hashable, bool, OutputSelector]  # the guard, whether gradients exist, the outputs that backward starts from
T = TypeVar("T")


class KeptSteps:
    """The steps of one module.

    Attributes:
        steps: by key, the least recently used one first.
        captures: of dropped steps.
        sizes: captures with symbols for lengths.
        variants: the values of tensors that steps of one signature rest on.
        writes: what eager would have written to attributes.
    """

    def __init__(self, planner: Planner) -> None:
        self.planner = planner
        self.steps: OrderedDict[Key, Step] = OrderedDict()
        self.captures, self.sizes, self.variants = CaptureCache(), SizeKeys(), ValueVariants()
        self._attributes, self._kinds = AttributeGuard(planner.module), CallKinds(planner.module)
        self._floats, self._counters = FloatKeys(self._attributes, self.captures), CounterKeys(self._attributes)
        self.writes = PendingWrites()
        self._parameters = tuple[int, ...]()  # those of the latest call, by their ids

    def read(self, spec: Spec, leaves: Sequence[object], outputs: OutputSelector) -> tuple[list[Tensor], Key]:
        """Return all tensors that a call reads, and the key of its step."""
        parameters, buffers = owned_tensors(self.planner.module)
        self._drop_replaced(parameters)
        owned = [*parameters, *buffers]
        guard = signature(self.planner.module, owned, spec, leaves, self._attributes)
        tensors = [*owned, *tensors_of(leaves)]
        adds = bool(self.planner.options.accumulate) or has_gradients(parameters)
        guard = self._counters.general(guard)
        return tensors, ((guard, (self.planner.state.key(), ())), adds, outputs)

    def until_guards_hold(self, call: Key, run: Callable[[Key], T]) -> T:
        """Run a call with one step after the other, until the guards of one hold."""
        call, tried = self.variants.latest(call), list[Sequence[ValueGuard]]()
        while True:
            try:
                return run(call)
            except GuardFailed as failure:
                refuse_unstable(call, failure)
                tried.append(failure.guards)
                call = self.variants.others(call, tried, failure, self._answers_alike(call))

    def step(self, args: tuple[Any, ...], kwargs: dict[str, Any], call: Key) -> tuple[Step, list[float], Key]:
        """Return the step of a call, kept or planned now, the floats that it takes, and the key that it has then."""
        key, floats = self._floats.lookup(call, self.steps)
        step = self.steps.get(key)
        if step is None or step.needs_replan:
            return self._planned(args, kwargs, call)
        self._check_writes(args, kwargs, step, call)
        with suppress(KeyError):  # another thread may have dropped it by now
            self.steps.move_to_end(key)
        return step, floats, call

    def _planned(self, args: tuple[Any, ...], kwargs: dict[str, Any], call: Key) -> tuple[Step, list[float], Key]:
        with PLANNING_LOCK:
            key, floats = self._floats.lookup(call, self.steps)
            if key not in self.steps:  # another thread may have planned it by now
                with self.writes.in_place():
                    new = self._new_step(args, kwargs, key)
                captured = new.parts.captured
                call, key = self._grown(captured, call, key)
                call, key = (self._counters.add(known, captured.counters, self.planner.module) for known in (call, key))
                call, key = self._without_what_changes(captured, call, key)
                call, key = (self.variants.add(known, new.parts.captured.guards) for known in (call, key))
                key, floats = self._floats.add(call, key, new, self.steps)
                if warning := self.variants.warning(key, [part.path for part in captured.opaque]):
                    warn_user(warning)
            steps = self.steps
            if steps[key].needs_replan and steps[key].report.plan:
                LOG.info("a better plan is searched for, with the times that the step's own ops took")
            step = steps[key] = steps[key].replanned()
            self._check_writes(args, kwargs, step, call)
            steps.move_to_end(key)  # or it could be dropped below: a better plan may count for more
            while len(steps) > PLANS and sum(map(_weight, steps.values())) > NODES:
                self._drop(next(iter(steps)))
            return step, floats, call

    def _grown(self, captured: Captured, *keys: Key) -> tuple[Key, ...]:
        """Add the variables that a new capture rests on to all keys, and return some of them as they are then.

        What other captures rest on is as it was: they have not read these variables.
        """
        if not (tokens := self._attributes.grow(captured.reads)):
            return keys
        grown = partial(with_more_variables, tokens=tokens)
        self.steps = OrderedDict((with_guard(key, grown), step) for key, step in self.steps.items())
        for known in (self.captures, self.sizes, self.variants, self._counters):
            known.rekey(grown)
        return tuple(with_guard(key, grown) for key in keys)

    def _drop(self, key: Key) -> None:
        """Drop a step, and keep its capture."""
        (guard, _, outputs), dropped = key, self.steps.pop(key)
        if self.planner.keeps_captures and not dropped.report.all_outputs:
            self.captures.add((guard, outputs), dropped.parts.captured.unsliced)

    def _drop_replaced(self, parameters: Sequence[Tensor]) -> None:
        """Drop steps that hold parameters which neither the module nor the optimizer has: their bytes are in no plan.

        Tensors that are no parameters are in their place for one call, as in `torch.func.functional_call`.

        Raises:
            UpdateError: gradients are wanted, and all of these are new to the optimizer.
        """
        ids = tuple(map(id, parameters))
        if ids == self._parameters or not all(isinstance(each, nn.Parameter) for each in parameters):
            return
        updated = self.planner.state.updated_ids
        if torch.is_grad_enabled():
            self.planner.state.refuse_parameters(parameters)
        with PLANNING_LOCK:
            trained = {key: {*map(id, step.parts.trained)}.difference(ids) for key, step in self.steps.items()}
            for key in [key for key, others in trained.items() if not others <= updated]:
                self._drop(key)
            self.planner.state.update.forget_removed()
            if not any(others & updated for others in trained.values()):
                self._parameters = ids

    def _without_what_changes(self, captured: Captured, call: Key, key: Key) -> tuple[Key, Key]:
        """Return the keys of a call and its step without what its capture, or opaque parts in every step, change."""
        changed = [attribute for part in captured.opaque for attribute in part.changed_attributes]
        variables = self._attributes.ignore_changed_variables()
        if key != call or not (self._attributes.ignore(changed) or variables):
            return call, key
        (guard, state), adds, outputs = cast("tuple[Any, bool, OutputSelector]", call)
        call = (with_attributes(guard, self._attributes), state), adds, outputs
        return call, call

    def _new_step(self, args: tuple[Any, ...], kwargs: dict[str, Any], key: Key) -> Step:
        """Plan a step, and log why that happens and how long it took."""
        which = f"a call unlike the {number} before it" if (number := self._kinds.number) else "the first call"
        LOG.info("%s is captured, priced and planned", which)
        guard, adds, outputs = key
        similar = self.steps.get((guard, not adds, outputs))
        earlier = EarlierCapture.of(similar) if similar is not None else self.captures.take((guard, outputs))
        traces = earlier is None and self.planner.keeps_captures
        known = self.sizes.captured((guard, outputs), self._kept_steps()) if traces else None
        capture = self._general_capture(key) if traces and known is None else None
        if traces and (preferred := self._preferred_step(args, kwargs, key)) is not None:
            return preferred
        step = self.planner.step(args, kwargs, outputs, earlier, known or capture)
        if capture is not None and self._is_general(key, capture, step):
            self._kinds.forget(args, kwargs)
        elif capture is not None or (known is None and not is_new(key)):
            self._warn_of_kinds(args, kwargs)
        seconds, megabytes, overhead = step.report.planned_us / 1e6, step.report.peak / 1e6, 100 * step.report.longer
        LOG.info("planned in %.1f s: %.1f MB, step %+.1f %%", seconds, megabytes, overhead)
        return step

    def _check_writes(self, args: tuple[Any, ...], kwargs: dict[str, Any], step: Step, call: Key) -> None:
        """Make sure that a step has the graph of its capture, whatever other calls have written since."""
        self.writes.check(step.parts.captured.writes, partial(self.planner.captured, args, kwargs, call[2]))

    def _preferred_step(self, args: tuple[Any, ...], kwargs: dict[str, Any], key: Key) -> Step | None:
        """Return a step in which the submodules that ask for many values run as they are, if there is such a plan."""
        preferred = self.variants.preferred(key) if self.planner.options.opaque is True else ()
        if not preferred:
            return None
        step = self.planner.preferred_step(args, kwargs, key[2], preferred)
        if step is None:
            self.variants.trace_all(key)
            return None
        LOG.info("%s run as they are from now on: %d sets of values differed", ", ".join(preferred), MANY)
        return step

    def _general_capture(self, key: Key) -> FloatCapture | SizeCapture | None:
        """Return a capture that may serve other calls too, if one of these is known."""
        floats = self._floats.capture_for(key, self.steps)
        if floats is not None:
            return floats
        return self.sizes.capture_for((key[0], key[2]), self._known_captures())

    def _answers_alike(self, call: Key) -> Iterator[Answers]:
        """Yield the answers of calls that differ in lengths alone; they are looked for once one is asked for."""
        yield from self.sizes.answers((call[0], call[2]), self._known_captures())

    def _known_captures(self) -> list[tuple[Any, Captured]]:
        kept = [(key, step.parts.captured.unsliced) for key, step in self._kept_steps()]
        return [*kept, *self.captures.items()]

    def _kept_steps(self) -> list[tuple[Any, Step]]:
        """Return the steps with what their captures depend on, the latest first.

        A capture with a backward from scalars alone is of no use to other calls, for which all outputs may fit.
        """
        steps = reversed(self.steps.items())
        return [((guard, outputs), step) for (guard, _, outputs), step in steps if not step.report.all_outputs]

    def _is_general(self, key: Key, capture: FloatCapture | SizeCapture, step: Step) -> bool:
        if isinstance(capture, SizeCapture):
            return self.sizes.note((key[0], key[2]), capture)
        return self._floats.are_inputs(key, capture, step)

    def _warn_of_kinds(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Count one more kind of calls, and warn if there are ever more."""
        if warning := self._kinds.warning(args, kwargs, self._attributes.changed_variables):
            warn_user(warning)


def _weight(step: Step) -> int:
    """Return the nodes that a step counts for; more, if it holds memory or slots in a tier."""
    nodes = LEAST + len(step.report.forecast.trace.ops)
    resources = step.parts.tier, step.parts.state_slots, step.cuda_graphs
    return nodes if all(resource is None for resource in resources) else max(nodes, NODES // PLANS)
