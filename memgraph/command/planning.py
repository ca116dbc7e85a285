"""Commands that plan: one budget, many budgets, or none.

memgraph plan train.py:setup --budget 8GB --html plan.html
memgraph sweep train.py:setup
memgraph explain train.py:setup
memgraph explain plan.json layers.3.mlp

The report of a step without a plan, whatever it needs.

print(unplanned(model, x))   ->   what is on the device at the peak of eager's step, by kind, module and source line
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import networkx as nx
import torch
import typer
from rich.console import RenderableType
from torch import nn

from passes import PlanResult, predict

from ..api.budget_sweep import sweep as plan_for_each
from ..api.compiler import make_planner
from ..api.compiler import plan as plan_call
from ..api.shapes_only import on_device
from ..fit.described_model import ModelCall
from ..report.printout import peak_printout
from ..report.report import Report
from ..system.byte_sizes import share_or_text
from .budget_option import budget_within
from .factory import load_call
from .files import read_plan
from .output import NewPage, NewPlan, new_file, save, say, stdout_for_data, write
from .time_limit_option import Limit

Target = Annotated[
    str, typer.Argument(metavar="FILE:FACTORY", help="a function that returns a model and its arguments")
]
Json = Annotated[bool, typer.Option("--json", help="print JSON")]


class Offload(StrEnum):
    """Where tensors may be offloaded."""

    AUTO = "auto"
    DISK = "disk"
    HOST = "host"
    NONE = "none"


Tier = Annotated[Offload, typer.Option(help="where tensors may be offloaded")]

Slices = Annotated[bool, typer.Option(help="run chains of ops in parts of their rows where that is needed")]


def plan(
    target: Target,
    budget: Annotated[
        str | None,
        typer.Option(help='bytes, as "8GB" or "8GiB", or a share of the memory, as 0.5; by default what is free'),
    ] = None,
    output: NewPlan = None,
    html: NewPage = None,
    trace: Annotated[
        Path | None, typer.Option(help="write the timeline to this file, for Perfetto", callback=new_file)
    ] = None,
    graphml: Annotated[
        Path | None, typer.Option(help="write the graph of the planned step to this file", callback=new_file)
    ] = None,
    time_limit: Limit = None,
    offload: Tier = Offload.AUTO,
    slices: Slices = False,
    as_json: Json = False,
) -> int:
    """Plan a training step under a budget, without running it.

    \b
        memgraph plan train.py:setup --budget 8GB
        memgraph plan train.py:setup --budget 8GB -o plan.json --html plan.html
        memgraph plan train.py:setup --budget 8GB --json | jq .peak

    \b
    Exit codes: 0 it fits, 3 it does not, 1 an error, 2 wrong usage, 130 interrupted.
    """
    wanted = None if budget is None else _number(budget)
    options = _options(time_limit, offload, slices="auto" if slices else None)
    with stdout_for_data():
        call = _loaded(target)
        report = plan_call(call.model, *call.args, budget=wanted, **options, **call.options)
    save(report, output, html)
    _save_for_programs(report, trace, graphml)
    write(report, as_json)
    return 0


def sweep(
    target: Target,
    budgets: Annotated[list[str] | None, typer.Option("--budget", help="a budget to plan for; may be repeated")] = None,
    time_limit: Limit = None,
    offload: Tier = Offload.AUTO,
    as_json: Json = False,
) -> int:
    """Show the time of a step for every budget, down to the smallest that works.

    \b
        memgraph sweep train.py:setup
        memgraph sweep train.py:setup --budget 8GB --budget 6GB --json
    """
    wanted = [_number(budget) for budget in budgets] if budgets else None
    options = _options(time_limit, offload)
    with stdout_for_data():
        call = _loaded(target)
        found = plan_for_each(call.model, *call.args, budgets=wanted, **options, **call.options)
    write(found, as_json)
    return 0 if any(point.fits for point in found.points) else 3


def explain(
    target: Annotated[
        str,
        typer.Argument(
            metavar="FILE:FACTORY|PLAN.json", help="a function that returns a model and its arguments, or a plan"
        ),
    ],
    value: Annotated[
        str | None, typer.Argument(help="of a plan: a value by its name, or the path of a submodule or parameter")
    ] = None,
    choice: Annotated[
        str | None, typer.Option(help='"keep", "recompute", "offload" or "cast and offload"; by default all')
    ] = None,
    as_json: Json = False,
) -> int:
    """Show what is on the device at the peak of a step as it is; or why a plan treats a value as it does.

    \b
        memgraph explain train.py:setup
        memgraph explain plan.json layers.3.mlp
        memgraph explain plan.json layers.3.mlp --choice offload
    """
    if target.endswith(".json"):
        return _explain_choice(Path(target), value, choice, as_json)
    if value is not None or choice is not None:
        raise typer.BadParameter("a value is explained of a plan: give the file of `memgraph plan -o`, as plan.json")
    with stdout_for_data():
        call = _loaded(target)
        report = unplanned(call.model, *call.args, **call.options)
    write(report if as_json else _Peak(report), as_json)
    return 0


def _explain_choice(file: Path, value: str | None, choice: str | None, as_json: bool) -> int:
    if value is None:
        raise typer.BadParameter("name a value of the plan, or a submodule: `memgraph explain plan.json layers.3.mlp`")
    report = read_plan(file)
    try:
        write(report.explain(value, choice), as_json)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    return 0


@dataclass(frozen=True)
class _Peak:
    """A step as it is, with a report to print."""

    report: Report

    def __rich__(self) -> RenderableType:
        return peak_printout(self.report)

    def to_json(self) -> str:
        return self.report.to_json()


def _loaded(target: str) -> ModelCall:
    say(f"loading {target}")
    call = load_call(target)
    say("capturing the step")
    return call


def _options(time_limit: float | None, offload: Offload, **more: Any) -> dict[str, Any]:
    return {"time_limit": time_limit, "offload": None if offload is Offload.NONE else str(offload), **more}


def _number(budget: str) -> str | float:
    """Return a budget as `memgraph.plan` takes it: a share of the device's memory, as 0.5, is a float.

    Raises:
        typer.BadParameter: it can't be read.
    """
    budget_within(budget, 1 << 62, "any device")
    return share_or_text(budget)


def _save_for_programs(report: Report, trace: Path | None, graphml: Path | None) -> None:
    if trace is not None:
        trace.write_text(report.to_chrome_trace())
        say(f"wrote {trace}; open it at ui.perfetto.dev or chrome://tracing")
    if graphml is not None:
        nx.write_graphml(report.to_networkx(), graphml)
        say(f"wrote {graphml}")


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
