"""A step as CUDA would dispatch it: captured, priced by roofline, planned and rewritten, on a device that is not here.

    planned_step(subject, read_profile("h200"))   ->   PlannedStep: graph, trace, plan, the rewritten graph, the law

No kernel runs: parameters have addresses on the described device, and everything else is fake tensors.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils._pytree import tree_map_only

from benchmarks.zoo.training import Training
from memgraph.fit.captured_graph import captured_graph
from memgraph.fit.described_model import ModelCall
from memgraph.fit.device_profile import DeviceProfile
from memgraph.fit.profile_prices import ProfilePrices
from memgraph.graph.rewrite import rewrite
from memgraph.graph.summarize import summarize
from memgraph.planning.step_graph import StepGraph
from memgraph.system.device import CPU
from passes import BudgetError, PlanResult, Trace, make_plan, predict

from .described_device import packing_without_cudnn
from .models import FLOAT, Subject

SEED = 0
SHARE = 0.7  # of the peak above what is there before the step: the budget that is planned for
SECONDS = 2.0  # of planning
ANY = 1 << 60  # bytes


@dataclass(frozen=True, eq=False)
class PlannedStep:
    """A subject and its step on a device."""

    subject: Subject
    step: StepGraph
    trace: Trace
    result: PlanResult
    prices: ProfilePrices

    @cached_property
    def graph(self) -> fx.Graph:
        """The rewritten graph."""
        return rewrite(self.step.graph, self.result.forecast.trace)

    @property
    def law_holds(self) -> bool:
        """The rewritten graph is what the applied text says."""
        return summarize(self.graph, self.prices) == self.result.forecast.trace


def planned_step(subject: Subject, profile: DeviceProfile) -> PlannedStep:
    """Capture, price, plan and rewrite the step of a subject on the profile's device.

    Raises:
        CaptureError: the step can't be captured without values of tensors.
        BudgetError: no plan fits the share.
    """
    step = captured(subject, torch.device(profile.kind, 0) if profile.kind == "cuda" else CPU)
    prices = ProfilePrices(profile)
    trace = step.summarize(prices)
    machine = profile.machine(ANY)
    peak = predict(trace, machine).peak
    held = sum(storage.nbytes for op in trace.ops if op.is_input for storage in op.makes)
    machine = replace(machine, budget=held + int(SHARE * (peak - held)))
    try:
        result = make_plan(trace, machine, seconds=SECONDS)
    except BudgetError as error:
        result = make_plan(trace, replace(machine, budget=error.smallest), seconds=SECONDS)
    return PlannedStep(subject, step, trace, result, prices)


def captured(subject: Subject, device: torch.device) -> StepGraph:
    """Return the graph of a subject's step on a device, in which no op has run."""
    torch.manual_seed(SEED)
    training = subject.make()
    with packing_without_cudnn() if device.type == "cuda" else nullcontext():
        model = training.model.to(device)
    with torch.autocast(device.type, dtype=subject.dtype, enabled=subject.dtype != FLOAT):
        return captured_graph(ModelCall(model, *_without_values(training)), ANY, device)


def _without_values(training: Training) -> tuple[tuple[Any, ...], dict[str, Any]]:
    def empty(value: Tensor) -> Tensor:
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")

    args, kwargs = tree_map_only(Tensor, empty, (training.args, dict(training.kwargs)))
    return args, kwargs
