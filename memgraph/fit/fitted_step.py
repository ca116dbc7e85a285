"""Plan the step of a model without bytes for a device that is not here.

fitted = Fitting(read_profile("h200"), budget)(ModelCall(model, args, kwargs, optimizer))
fitted.plan(seconds=10)   ->   Report: fits: forecast 23.9 GB, budget 24.0 GB ...
fitted.smallest_plan()    ->   the same from the quick passes, for a search over sizes

Bytes are those of fake tensors, as in any forecast. Times come from the profile.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import nn

from passes import BudgetError, Machine, PlanResult, Streaming, Trace, make_plan
from passes.lp.problem import proven_nbytes
from passes.pipeline import FITTING
from passes.slices.row_blocks import LEVELS

from ..graph.captured import Captured
from ..optim.update_cost import add_update_op, parameter_values, with_windows
from ..planning.search import FITTING_S
from ..planning.step_graph import StepGraph
from ..profile.library_workspaces import with_libraries
from ..report.report import Report
from ..report.report_data import RowBlocks
from ..system.device import CPU
from ..system.planning_process import planning
from .captured_graph import captured_graph
from .described_model import ModelCall
from .device_profile import DeviceProfile
from .fake_update import FakeUpdate, fake_update
from .profile_prices import ProfilePrices, in_blocks

USUAL_S = 4.0  # of planning
LOWERED = 5  # budgets that are tried, each lower by what the allocator would hold too much


@dataclass(frozen=True)
class FittedStep:
    """A step, priced for a device that is not here.

    Attributes:
        memory: bytes of a GPU that torch's allocator may hold; 0 where it does not matter.
        blocks: weights that come in blocks of rows.
        finer: the same step with more weights in blocks, and in smaller ones, if it can be made.
    """

    trace: Trace
    machine: Machine
    counted: bool
    memory: int = 0
    blocks: tuple[RowBlocks, ...] = ()
    finer: Finer | None = None

    def plan(self, seconds: float | None = None) -> Report:
        """Return the plan of all passes, made in about so many seconds, with weights in blocks where it takes these.

        By default these are few, and more while nothing fits that could.  The budget is lowered until torch's allocator
        would hold no more than the device has.

        Raises:
            BudgetError: none fits.
        """
        return self._or_finer(partial(FittedStep._whole_plan, seconds=seconds))

    def smallest_plan(self) -> Report:
        """Return the plan of the quick passes; weights and errors as in `plan`."""
        return self._or_finer(lambda step: step._report(make_plan(step.trace, step.machine, FITTING)))

    def is_likely_to_fit(self) -> bool:
        """Return whether the quick passes find a plan, blocks of weights left out."""
        if proven_nbytes(self.trace, self.machine) > self.machine.budget:
            return False
        try:
            return bool(self._held(lambda step: step._report(make_plan(step.trace, step.machine, FITTING))).peak)
        except BudgetError:
            return False

    def _held(self, planned: Callable[[FittedStep], Report]) -> Report:
        """Return a plan that torch's allocator holds within the memory of the device."""
        budget, held = self.machine.budget, 0
        for _ in range(LOWERED):
            try:
                report = planned(replace(self, machine=replace(self.machine, budget=budget)))
            except BudgetError as error:
                if not held:
                    raise
                raise BudgetError(_beyond(held, self.memory, str(error)), self.machine.budget, held) from None
            held = report.on_card if self.memory else 0
            if held <= self.memory:
                return report
            budget = report.peak - (held - self.memory)
        raise BudgetError(_beyond(held, self.memory), self.machine.budget, held)

    def _or_finer(self, planned: Callable[[FittedStep], Report]) -> Report:
        try:
            return self._held(planned)
        except BudgetError as error:
            finer = self.finer and self.finer.step
            if not finer:
                raise
            try:
                return finer._or_finer(planned)
            except BudgetError as other:
                raise min(error, other, key=lambda each: each.smallest) from None

    def _whole_plan(self, seconds: float | None) -> Report:
        try:
            return self._planned(USUAL_S if seconds is None else seconds)
        except BudgetError as error:
            least = proven_nbytes(self.trace, self.machine)
            if seconds is not None or not error.timed_out or least > self.machine.budget:
                raise
            return self._planned(FITTING_S)

    def _planned(self, seconds: float) -> Report:
        return self._report(make_plan(self.trace, self.machine, seconds=seconds, interruptible=True))

    def _report(self, result: PlanResult) -> Report:
        return Report(self.machine, result, counted=self.counted, row_blocks=self.blocks)


def _beyond(held: int, memory: int, refused: str = "") -> str:
    said = (
        f"torch's allocator would hold {held} bytes, by simulation, and the device has {memory} for it: take a smaller "
        "batch, or expandable segments and a budget that leaves room (PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True)"
    )
    return f"{said}.\nWith a budget so much smaller nothing fits: {refused}" if refused else said


class Finer:
    """A step that is made when it is asked for."""

    def __init__(self, make: Callable[[], FittedStep | None]) -> None:
        self._make: Callable[[], FittedStep | None] | None = make
        self.known: FittedStep | None = None

    @property
    def step(self) -> FittedStep | None:
        """The step; None if there is none."""
        if self._make is not None:
            self.known, self._make = self._make(), None
        return self.known


class Fitting:
    """Captures and prices steps of one optimizer or none for a budget of a device."""

    def __init__(self, profile: DeviceProfile, budget: int, accumulate: bool = False) -> None:
        """Begin; steps add to gradients that exist if they `accumulate`."""
        self.profile, self.budget, self.prices = profile, budget, ProfilePrices(profile)
        self.fused, self.accumulate = profile.kind == "cuda", accumulate
        self._known: tuple[torch.optim.Optimizer, FakeUpdate] | None = None

    def __call__(self, call: ModelCall) -> FittedStep:
        """Return the step of a call; real parameters are not read either.

        Raises:
            CaptureError: the model can't be captured.
            UpdateError: the optimizer can't step on tensors without values.
        """
        with planning(CPU):
            return self._priced(call, self._graph(call), 0)

    def _priced(self, call: ModelCall, graph: StepGraph, level: int) -> FittedStep:
        model, optimizer, profile = call.module, call.optimizer, self.profile
        trace = in_blocks(graph.summarize(self.prices), profile.block)
        trace, machine = with_libraries(trace, profile.libraries), profile.machine(self.budget)
        finer = Finer(partial(self._in_blocks, call, graph.captured, level + 1)) if level < LEVELS else None
        rows = graph.captured.row_blocks
        if optimizer is None:
            machine = replace(machine, streaming=Streaming(machine.link.works))
            return FittedStep(trace, machine, False, profile.held, rows, finer if machine.link.works else None)
        update = self._update(optimizer)
        trace = _with_update(trace, graph, model, update, self.prices)
        if not machine.link.works or update.window is None:
            return FittedStep(trace, machine, True, profile.held)
        machine = replace(machine, streaming=Streaming(True, window=update.window))
        return FittedStep(
            with_windows(trace, update.window) if rows else trace, machine, True, profile.held, rows, finer
        )

    def _in_blocks(self, call: ModelCall, known: Captured, level: int) -> FittedStep | None:
        """Return the step with weights in blocks; None if none can be cut further."""
        with planning(CPU):
            graph = self._graph(call, known.unsliced, level)
            if graph.captured.blocks in ({}, known.blocks):
                return None
            return self._priced(call, graph, level)

    def _graph(self, call: ModelCall, known: Captured | None = None, level: int = 0) -> StepGraph:
        return captured_graph(call, self.budget, known=known, level=level, fused=self.fused, accumulate=self.accumulate)

    def _update(self, optimizer: torch.optim.Optimizer) -> FakeUpdate:
        if self._known is None or self._known[0] is not optimizer:
            self._known = optimizer, fake_update(optimizer, self.profile.kind, self.profile.block)
        return self._known[1]


def _with_update(trace: Trace, graph: StepGraph, model: nn.Module, update: FakeUpdate, prices: ProfilePrices) -> Trace:
    """Return the trace with the optimizer's states and its update, which reads and writes each of them once."""
    trained = graph.trained
    assert trained.captured is not None
    values = parameter_values(graph.graph, trained.captured, dict(model.named_parameters()))
    own, sizes = [values.get(owner, ()) for owner in trained.states], [*trained.states.values()]
    name = type(update.optimizer).__name__
    trace = add_update_op(trace, name, update.states, update.workspace, sizes, own)
    nbytes = 2 * update.states + 3 * sum(p.nbytes for p in trained.parameters)  # gradients are only read
    return replace(trace, ops=(*trace.ops[:-1], replace(trace.ops[-1], us=prices.copied_us(nbytes))))
