"""Plan the step of a model without bytes for a device that is not here.

fitted = capture_fit(ModelCall(model, args, kwargs, optimizer), read_profile("h200"), budget)
fitted.plan(seconds=10)   ->   Report: fits: forecast 23.9 GB, budget 24.0 GB ...
fitted.smallest_plan()    ->   the same from the quick passes, for a search over sizes

Bytes are those of fake tensors, as in any forecast. Times come from the profile.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import nn

from passes import Machine, PlanResult, Streaming, Trace, make_plan
from passes.pipeline import FITTING

from ..optim.offloaded_update import OffloadedUpdate
from ..optim.update_cost import add_update_op, parameter_values
from ..options.compile_options import parse_options
from ..planning.capture_step import capture_step
from ..planning.optimizers import optimizer_state
from ..planning.step_graph import Call, StepGraph
from ..planning.target import Target
from ..profile.library_workspaces import with_libraries
from ..report.report import Report
from ..system.device import CPU
from ..system.planning_process import planning
from .described_model import ModelCall
from .device_profile import DeviceProfile
from .fake_update import FakeUpdate, fake_update
from .profile_prices import ProfilePrices, in_blocks


@dataclass(frozen=True)
class FittedStep:
    """A step, priced for a device that is not here."""

    trace: Trace
    machine: Machine
    counted: bool

    def plan(self, seconds: float) -> Report:
        """Return the plan of all passes, made in about so many seconds.

        Raises:
            BudgetError: none fits.
        """
        return self._report(make_plan(self.trace, self.machine, seconds=seconds))

    def smallest_plan(self) -> Report:
        """Return the plan of the quick passes; errors as in `plan`."""
        return self._report(make_plan(self.trace, self.machine, FITTING))

    def _report(self, result: PlanResult) -> Report:
        return Report(self.machine, result, counted=self.counted)


def capture_fit(call: ModelCall, profile: DeviceProfile, budget: int) -> FittedStep:
    """Capture and price the step of a call for a budget of a device; real parameters are not read either.

    Raises:
        CaptureError: the model can't be captured.
        UpdateError: the optimizer can't step on tensors without values.
    """
    model, optimizer = call.model, call.optimizer
    options = parse_options(budget, optimizer=optimizer, accumulate=False, opaque=False, lower=None)
    with planning(CPU):
        state = optimizer_state(model, options, CPU)
        target = Target(CPU, budget, None, None, None, lowers=False)
        step = Call(model, call.args, dict(call.kwargs), options.outputs)
        graph = capture_step(step, lambda: target, state, options, None)
        prices = ProfilePrices(profile)
        trace = with_libraries(in_blocks(graph.summarize(prices), profile.block), profile.libraries)
        machine = profile.machine(budget)
        if optimizer is None:
            streamed = Streaming(enabled=machine.link.works)
            return FittedStep(trace, replace(machine, streaming=streamed), counted=False)
        update = fake_update(optimizer, profile.kind, profile.block)
        trace = _with_update(trace, graph, model, update, prices)
        return FittedStep(trace, _with_windows(machine, update), counted=True)


def _with_update(
    trace: Trace, graph: StepGraph, model: nn.Module, update: FakeUpdate, prices: ProfilePrices
) -> Trace:
    """Return the trace with the optimizer's states and its update, which reads and writes each of them once."""
    trained = graph.trained
    assert trained.captured is not None
    values = parameter_values(graph.graph, trained.captured, dict(model.named_parameters()))
    parts = [[value for p in part.parameters for value in values.get(p, ())] for part in trained.parts]
    sizes = [part.nbytes for part in trained.parts]
    name = type(update.optimizer).__name__
    trace = add_update_op(trace, name, update.states, update.workspace, sizes, parts)
    nbytes = 2 * update.states + 3 * sum(p.nbytes for p in trained.parameters)  # gradients are only read
    return replace(trace, ops=(*trace.ops[:-1], replace(trace.ops[-1], us=prices.copied_us(nbytes))))


def _with_windows(machine: Machine, update: FakeUpdate) -> Machine:
    """Return the machine with room for an update in windows, if the optimizer can run in such."""
    windowed = OffloadedUpdate(update.optimizer)
    if not machine.link.works or not windowed.can_stream:
        return machine
    trained = [fake for fake in update.fakes.values() if fake.requires_grad]
    return replace(machine, streaming=Streaming(True, window=windowed.peak_nbytes(trained)))
