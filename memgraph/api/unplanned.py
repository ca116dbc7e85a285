"""The report of a step without a plan, whatever it needs.

print(unplanned(model, x))   ->   what is on the device at the peak of eager's step, by kind, module and source line
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from passes import PlanResult, predict

from ..report.report import Report
from .compiler import make_planner
from .shapes_only import on_device


def unplanned(
    model: nn.Module, *args: Any, optimizer: torch.optim.Optimizer | None = None,
    loss: Callable[..., Any] | None = None, **kwargs: Any,
) -> Report:  # fmt: skip
    """Return the report of the call `model(*args, **kwargs)` as it is; its budget is what the step needs.

    Raises:
        TypeError, ValueError, CaptureError: as `memgraph.plan`.
    """
    planner = make_planner(model, 1.0, optimizer=optimizer, loss=loss, offload=None, lower=None)
    args, kwargs = on_device(planner.module, args, kwargs, 1)
    step = planner.price(args, kwargs, planner.options.outputs, for_any_budget=True)
    forecast = predict(step.trace, step.machine)
    needed = replace(step.machine, budget=forecast.peak)
    return Report(needed, PlanResult((), forecast, forecast), counted=optimizer is not None)
