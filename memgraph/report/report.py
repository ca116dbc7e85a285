"""The report of a planned step, as `model.plan` returns it.

print(report)          fits: forecast 649.2 MB, measured 649.2 MB, budget 649.3 MB ...    (see `printout.py`)
report.overhead        0.032
report.to_json()       the plan as text, for `memgraph.compile(..., plan=text)` and `Report.from_json(text)`
report.to_networkx()   the planned step as a graph, for drawing or analysis
report.to_html("plan.html")   the planned step as a page for a browser
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING

from passes.analysis.step_graph import RETURN, critical_path, step_graph

from .budget_curve import Sweep
from .chrome_trace import chrome_trace
from .given_reports import require_report, written_file
from .page.page import page
from .plan_diff import PlanDiff, changes
from .printout import printout, verdict
from .report_data import ReportData
from .report_file import read_report, write_report
from .saved_plan import SavedPlan, without_prices
from .tables import printed

if TYPE_CHECKING:
    import networkx as nx
    from rich.console import RenderableType


ARENA = "in an arena: one block of the device, with addresses of the plan"


@dataclass(frozen=True, eq=False)
class Report(ReportData):
    """The plan of one call signature, its forecast and its measurements; see `ReportData` for the attributes."""

    def with_measured(self, allocated: int, absent: int = 0, states: int | None = None) -> Report:
        """Return the report with the peak of a measured step.

        Args:
            allocated: peak bytes that the step allocated beside what existed before it.
            absent: bytes of the forecast's inputs that did not exist before the step.
            states: bytes of optimizer states that existed before, if they differ from the forecast's.
        """
        staging = int(self.forecast.by_kind["staging"].max(initial=0))
        return replace(self, unmeasured="", measured=self.resident_nbytes(absent, states) + allocated + staging)

    def resident_nbytes(self, absent: int = 0, states: int | None = None) -> int:
        """Return the bytes of the step's inputs, with the same arguments."""
        inputs = [op for op in self.forecast.trace.ops if op.is_input and op.fn != "tangent"]
        resident = sum(op.nbytes for op in inputs if states is None or op.fn != "state") + (states or 0) - absent
        return resident - self.forecast.trace.other_nbytes  # other open forwards are measured if they exist

    def after(self, first: Report) -> Report:
        """Return the report of a plan that replaces the one of `first`, with what stays true of the step."""
        return replace(self, adding=first.adding, all_outputs=first.all_outputs, assumptions=first.assumptions)

    def with_update(self, nbytes: int) -> Report:
        """Return the report after the optimizer's step, which used `nbytes` for gradients, states and workspace."""
        resident = sum(op.nbytes for op in self.forecast.trace.ops if op.fn in ("parameter", "buffer", "input"))
        resident -= self.forecast.trace.other_nbytes
        return replace(self, measured=max(self.measured or 0, resident + nbytes))

    def in_arena(self, why_not: str, taken: tuple[int, int] | None) -> Report:
        """Return the report of a step in an arena, where blocks had so many bytes and the allocator held so many."""
        if why_not:
            return replace(self, arena=f"not in an arena: {why_not}")
        return replace(self, arena=ARENA, blocks=taken[0], held=taken[1]) if taken is not None else self

    def to_json(self) -> str:
        """Return plan and measurements as JSON text, for `memgraph.compile(model, budget, plan=text)` and `from_json`.

        docs/plans.md describes each field.
        """
        return write_report(self).to_json()

    @classmethod
    def from_json(cls, text: str) -> Report:
        """Return the report that `to_json` wrote; no model is needed.

        Raises:
            PlanError: the text is not a plan, is damaged, or has another format.
            TypeError: it is no text.
        """
        return cls(**read_report(SavedPlan.from_json(text)))

    def to_chrome_trace(self) -> str:
        """Return the planned step as JSON for Perfetto and chrome://tracing: queues, and bytes by kind."""
        return json.dumps(chrome_trace(self.forecast))

    def diff(self, other: Report) -> PlanDiff:
        """Return what the plan of `other` decides differently from this one.

        Raises:
            TypeError: `other` is no report.
        """
        require_report("other", other)
        before, after = self.choice, other.choice
        same = without_prices(before.captured.trace) == without_prices(after.captured.trace)
        decided = changes((before.captured.trace, before.plan), (after.captured.trace, after.plan))
        times = self.predicted_us, other.predicted_us
        return PlanDiff((self.budget, other.budget), (self.peak, other.peak), times, same, decided)

    def to_networkx(self) -> nx.DiGraph:
        """Return the planned step as a graph; `networkx.write_graphml(report.to_networkx(), "step.graphml")` draws it.

        Nodes are the ops that run, recomputations and copies among them, and `return`. They have `fn`, `phase`, `us`,
        `nbytes` (made), `workspace`, `type`, `where`, `begin_us`, `live_nbytes` (on the device while the op runs) and
        `critical` (True on the longest chain). Edges lead from an op to those that read its value, of `nbytes`.
        """
        forecast, graph = self.forecast, step_graph(self.forecast.trace)
        longest = set(critical_path(graph))
        graph.nodes[RETURN].update(begin_us=forecast.us, critical=False)
        for op, begin_us, nbytes in zip(forecast.trace.ops, forecast.begins, forecast.total, strict=False):
            graph.nodes[op.name].update(begin_us=begin_us, live_nbytes=int(nbytes), critical=op.name in longest)
        return graph

    def to_html(
        self, path: str | PathLike[str], *, sweep: Sweep | Sequence[ReportData] | None = None,
        beside: ReportData | None = None,
    ) -> Path:  # fmt: skip
        """Write the planned step as one HTML file, which opens without a network, and return its path.

        It shows memory over the step by kind, the queues, the life of each buffer, and the decisions.

        Args:
            sweep: what `memgraph.sweep` returned, or the reports of other budgets; the page gets a slider over them.
            beside: another plan of the same step, to compare with.

        Raises:
            TypeError, ValueError: an argument is of another type, or `path` is a folder.
            OSError: the file can't be written.
        """
        written = written_file(path)
        written.write_text(page(self, sweep, beside), encoding="utf-8", newline="\n")
        return written

    def __repr__(self) -> str:
        return f"<Report: {verdict(self).splitlines()[0]}; {len(self.plan)} decisions>"

    def __str__(self) -> str:
        return printed(self)

    def __rich__(self) -> RenderableType:
        return printout(self)
