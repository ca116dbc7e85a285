"""The steps of a module's calls, found by what they assume or planned.

a call   ->   its facts   ->   the step of the first variant that serves it, or a new one
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from ..capture.python_state.refuse_effects import InputRequiresGradError
from ..graph.captured import Captured
from ..graph.guard_ops import GuardFailed
from ..guards.assumptions import ARGUMENTS, Assumptions, Place
from ..guards.attribute_guard import AttributeGuard
from ..guards.attribute_snapshot import AttributeSnapshot
from ..guards.fact_texts import FactTexts
from ..guards.signature import has_gradients, signature
from ..guards.written_attributes import call_leaves, written_attributes
from ..planning.call_kinds import argument_names, kinds_warning
from ..planning.general_captures import GeneralCaptures
from ..planning.planner import Planner
from ..planning.value_answers import MANY, many_values_warning, preferred_parts, refuse_unstable
from ..planning.variants import CallFacts, Found, Variant, Variants
from ..report.report_data import Assumption
from ..runtime.step import Step
from ..system.locks import PLANNING_LOCK
from ..system.user_warning import warn_user
from ..tensors.loss_outputs import OutputSelector
from ..tensors.pytree import flatten, tensors_of

LOG = logging.getLogger(__name__)
SHOWN = 3  # differences that are named when a call is captured again

T = TypeVar("T")


class KeptSteps:
    """The steps of one module.

    Attributes:
        variants: its captures, with what they assume and their steps.
        general: captures with symbols for lengths.
    """

    def __init__(self, planner: Planner) -> None:
        self.planner = planner
        self.variants, self.general = Variants(), GeneralCaptures()
        self._attributes = AttributeGuard(planner.module)
        self._traced = set[Hashable]()  # kinds of calls whose submodules are all traced, as no plan fits otherwise
        self._written = written_attributes(planner.module)
        self._grad_places = dict[Hashable, tuple[int, ...]]()  # arguments on which forward calls `requires_grad_()`
        self._has_warned = False
        self._has_warned_of_kinds = False
        self._captures = 0
        self._parameters = tuple[int, ...]()  # those of the latest call, by their ids
        self._owned_by: object = None  # the latest call, if it was with these

    @property
    def steps(self) -> list[Step]:
        """All steps, the least recently used first."""
        return self.variants.steps

    def read(self, args: tuple[Any, ...], kwargs: dict[str, Any], outputs: OutputSelector) -> CallFacts:
        """Return all tensors that a call reads, and what decides which step runs it."""
        leaves, spec = call_leaves(args, kwargs, self._written.held)
        facts = signature(spec, leaves, self._attributes, (self.planner.state.key(), outputs))
        parameters, buffers = self._attributes.taken()
        self._drop_replaced(parameters)
        adds = bool(self.planner.options.accumulate) or has_gradients(parameters)
        tensors, read = [*parameters, *buffers, *tensors_of(leaves)], partial(self.read, args, kwargs, outputs)
        return CallFacts(facts, tensors, adds, outputs, read, self._attributes.asked)

    def run(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], call: CallFacts,
        run: Callable[[Step, CallFacts, list[float]], T],
    ) -> T:  # fmt: skip
        """Run a call with one step after the other, until the guards of one hold."""
        while True:
            call = self._with_grads(args, kwargs, call)
            found, is_traced = self.variants.find(call), False
            step = None if found is None else found.step
            if found is None or step is None or step.needs_replan:
                try:
                    with PLANNING_LOCK:
                        found, step, is_traced = self._planned(args, kwargs, call)
                except InputRequiresGradError as error:
                    self._grad_places[call.facts] = error.places
                    continue
                call = replace(call.read(), rejected=call.rejected, found=call.found)  # it may have more arguments now
            captured = step.parts.captured
            before = AttributeSnapshot(self.planner.module) if is_traced and captured.writes.repeats else None
            try:
                result = run(step, call, found.floats)
            except GuardFailed as failure:
                if is_traced and call.rejected:
                    refuse_unstable(failure)
                call = call.after(failure)
                continue
            self.variants.note_use(found.variant, call.adds)
            if before is not None and found.variant.assumptions.holds(call.facts):
                self._share(found.variant, captured, before, call)
            return result

    def changes(self, args: tuple[Any, ...], kwargs: dict[str, Any], call: CallFacts) -> str:
        """Return in what a call would differ now from what it was; empty if its forward can run again."""
        assumptions, now = Assumptions.of(call.facts), call.read().facts
        if assumptions.holds(now):
            return ""
        return _shown([*self._texts(args, kwargs, call).differences(assumptions, now).values()])

    def _with_grads(self, args: tuple[Any, ...], kwargs: dict[str, Any], call: CallFacts) -> CallFacts:
        """Let arguments require gradients on which forward of such a call turns that on: they get gradients then."""
        if not (places := self._grad_places.get(call.facts) if self._grad_places else None):
            return call
        leaves, _ = call_leaves(args, kwargs, self._written.held)
        for place in places:
            leaves[place].requires_grad_(True)
        return replace(call.read(), rejected=call.rejected, found=call.found)

    def _share(self, variant: Variant, captured: Captured, before: AttributeSnapshot, call: CallFacts) -> None:
        """Let a variant serve the calls that find its writes in place, if nothing else has changed meanwhile."""
        changed = {*before.changes(AttributeSnapshot(self.planner.module))}
        if changed <= {write.where for write in captured.writes.items} and not captured.float_values:
            assumptions = Assumptions.of(call.read().facts, self._any_numbers(captured))
            self.variants.add(replace(variant, assumptions=assumptions))

    def _planned(self, args: tuple[Any, ...], kwargs: dict[str, Any], call: CallFacts) -> tuple[Found, Step, bool]:
        """Return what serves a call, planned now, its step, and whether the call was traced for it."""
        found, is_traced = self.variants.find(call), False  # another thread may have planned it by now
        step = None if found is None else found.step
        if found is None and self._hold_replaced(call):
            call = replace(call.read(), rejected=call.rejected, found=call.found)
        if found is None or step is None:
            step, preferred, is_traced = self._new_step(args, kwargs, call, found and found.variant)
            if found is None or not self.planner.keeps_captures:
                found = self._added(call, step, preferred)
            texts = self._texts(args, kwargs, call).assumed(found.variant.assumptions)
            step.note_assumptions(Assumption(text, where, 0, kind) for kind, where, text in texts)
        variant = found.variant
        if step.needs_replan and step.report.plan:
            LOG.info("a better plan is searched for, with the times that the step's own ops took")
        variant.steps[call.adds] = step = step.replanned()
        self.variants.note_use(variant, call.adds)  # or it could be dropped: a better plan may count for more
        self.variants.trim(self.planner.keeps_captures)
        return found, step, is_traced

    def _hold_replaced(self, call: CallFacts) -> bool:
        """Let tensors of attributes that the caller replaces be arguments; return True if there are any."""
        for variant in self.variants:
            if replaced := self._attributes.replaced_tensors(variant.assumptions, call.facts):
                return self._written.note(replaced, ())
        return False

    def _new_step(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], call: CallFacts, known: Variant | None
    ) -> tuple[Step, tuple[str, ...], bool]:
        """Return a new step, the submodules preferred in it, and whether its call was traced with the values it has.

        Args:
            known: serves the call, but has no step for one that adds to gradients, or does not.
        """
        self._log_reason(args, kwargs, call, known)
        traces = known is None and self.planner.keeps_captures
        numbers = self._attributes.numbers
        general = self.general.capture_for(call, self.variants, numbers()) if traces else None
        is_traced = (known is None or not traces) and general is None
        if traces and is_traced and (preferred := self._preferred(call)):
            step = self.planner.preferred_step(args, kwargs, call.outputs, preferred)
            if step is not None:
                LOG.info("%s run as they are from now on: %d sets of values differed", ", ".join(preferred), MANY)
                return step, preferred, is_traced
            self._traced.add(call.facts)
        earlier = None if known is None else known.earlier
        step = self.planner.step(args, kwargs, call.outputs, earlier, general)
        self._captures += 1
        is_general = general is not None and self.general.note(call, general, step.parts.captured)
        if not is_general and not (is_traced and call.rejected):
            self._warn_of_kinds(args, kwargs, call)
        report = step.report
        seconds, megabytes, overhead = report.planned_us / 1e6, report.peak / 1e6, 100 * report.longer
        LOG.info("planned in %.1f s: %.1f MB, step %+.1f %%", seconds, megabytes, overhead)
        return step, (), is_traced

    def _added(self, call: CallFacts, step: Step, preferred: tuple[str, ...]) -> Found:
        """Add the variant of a new step, and return it with the floats that it takes of the call."""
        captured = step.parts.captured
        is_less = self._attributes.grow(captured.reads, call.walks)
        if not captured.float_values:  # their places would be others
            changed = [each for part in captured.opaque for each in part.changed_attributes]
            is_less = self._attributes.ignore(changed) or is_less
            is_less = self._attributes.ignore_changed_variables(call.walks) or is_less
        facts = call.read().facts
        if not is_less:  # another thread may have changed something since the call began
            facts = (*call.facts, *facts[len(call.facts) :])
        places = [*captured.float_values, *self._any_numbers(captured)]
        assumptions = Assumptions.of(facts, places)
        variant = Variant(assumptions, captured.unsliced, captured.guards, preferred, {call.adds: step})
        self.variants.add(variant)
        kind = [] if self._has_warned or not captured.guards else self.variants.of_kind(call)
        kind = kind if variant in kind else [variant, *kind]  # it may take more facts than the call has
        if warning := many_values_warning(kind, [part.path for part in captured.opaque]):
            self._has_warned = True
            warn_user(warning)
        return Found(variant, step, variant.floats(facts) or [])

    def _any_numbers(self, captured: Captured) -> list[Place]:
        """Return the places of the numbers that forward counts with, or has not read."""
        counts = [write.attribute for write in captured.writes.items if write.counts]
        wanted = {(id(vars(each.part())), each.name) for each in counts}
        numbers = self._attributes.numbers().items() if wanted else ()
        counted = [place for place, (container, name) in numbers if (id(container), name) in wanted]
        return [*dict.fromkeys((*counted, *self._attributes.unread_numbers(captured.reads)))]

    def _preferred(self, call: CallFacts) -> tuple[str, ...]:
        """Return the submodules that had better run as they are in a new capture: those that ask for many values."""
        if self.planner.options.opaque is not True or not call.rejected or call.facts in self._traced:
            return ()
        return preferred_parts(self.variants.of_kind(call))

    def _drop_replaced(self, parameters: Sequence[Tensor]) -> None:
        """Drop steps that hold parameters which neither the module nor the optimizer has: their bytes are in no plan.

        Tensors that are no parameters are in their place for one call, as in `torch.func.functional_call`.

        Raises:
            UpdateError: gradients are wanted, and all of these are new to the optimizer.
        """
        if self._attributes.owned_by is self._owned_by:
            return
        ids = tuple(map(id, parameters))
        if ids == self._parameters:
            self._owned_by = self._attributes.owned_by
            return
        if not all(isinstance(each, nn.Parameter) for each in parameters):
            return
        updated = self.planner.state.updated_ids
        if torch.is_grad_enabled():
            self.planner.state.refuse_parameters(parameters)
        with PLANNING_LOCK:
            trained = {
                variant: {id(one) for step in list(variant.steps.values()) for one in step.parts.trained} - {*ids}
                for variant in self.variants
            }
            for variant in [variant for variant, others in trained.items() if not others <= updated]:
                self.variants.drop(variant, self.planner.keeps_captures)
            self.planner.state.update.forget_removed()
            if not any(others & updated for others in trained.values()):
                self._parameters, self._owned_by = ids, self._attributes.owned_by

    def _log_reason(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], call: CallFacts, known: Variant | None
    ) -> None:  # fmt: skip
        """Log why a call is captured: it is the first, or in what it differs from the most similar one."""
        if not (number := self._captures):
            LOG.info("the first call is captured, priced and planned")
            return
        if known is not None:
            why = ["gradients exist" if call.adds else "no gradients exist"]
        elif call.rejected:
            why = [f"forward finds other values of tensors than {len(call.rejected)} captures assume"]
        else:
            texts = self._texts(args, kwargs, call)
            found = [texts.differences(each.assumptions, call.facts) for each in self.variants]
            why = [*min(filter(None, found), key=len, default={"": "the captures like it are not kept"}).values()]
        LOG.info(
            "this call is captured, priced and planned, as no earlier one was like it (capture %d): %s",
            number + 1,
            _shown(why),
        )

    def _texts(self, args: tuple[Any, ...], kwargs: dict[str, Any], call: CallFacts) -> FactTexts:
        return FactTexts(self.planner.module, self._attributes, self._names(args, kwargs, call))

    def _names(self, args: tuple[Any, ...], kwargs: dict[str, Any], call: CallFacts) -> list[str]:
        names, count = argument_names(self.planner.module, args, kwargs), len(call.facts[ARGUMENTS]) - 1
        names += [each.name for each in self._written.held for _ in flatten(each.value)[0]]
        if len(names) != count:  # objects that have several tensors
            names = [f"tensor or constant {i} of the arguments" for i in range(count)]
        return names

    def _warn_of_kinds(self, args: tuple[Any, ...], kwargs: dict[str, Any], call: CallFacts) -> None:
        """Warn, once, if there are ever more kinds of calls."""
        if self._has_warned_of_kinds:
            return
        earlier = [each.assumptions for each in self.variants if not each.is_made_of_another]
        texts = self._texts(args, kwargs, call)
        found = filter(None, (texts.differences(each, call.facts) for each in earlier))
        changed = min(found, key=len, default=dict[str, str]())
        names = texts.arguments
        if warning := kinds_warning(call.facts, [each.facts for each in earlier], names, [*changed][:SHOWN]):
            self._has_warned_of_kinds = True
            warn_user(warning)


def _shown(differences: Sequence[str]) -> str:
    more = "; ..." if len(differences) > SHOWN else ""
    return ("; ".join(differences[:SHOWN]) or "what forward reads has changed") + more
