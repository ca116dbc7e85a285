"""The report of a planned step, as `model.plan` returns it.

print(report)          fits: forecast 649.2 MB, measured 649.2 MB, budget 649.3 MB ...    (see `printout.py`)
report.overhead        0.032
report.to_json()       the plan as text, for `memgraph.compile(..., plan=text)` and `Report.from_json(text)`
report.to_networkx()   the planned step as a graph, for drawing or analysis
report.explain("layers.3.mlp")   why a value is kept, recomputed or offloaded, and what else would cost
report.to_html("plan.html")   the planned step as a page for a browser

The file of a report: its saved plan, with what was measured.

write_report(report)   ->   SavedPlan(..., facts={"measured": 649216392, "measured_us": 7090512.0, ...})
read_report(saved)     ->   the fields of a Report with the same plan, forecast and measurements

The difference of two plans: bytes, time, and the values that they treat differently.

before.diff(after)   ->   peak 31.5 -> 24.1 MB; step 564.2 -> 590.0 ms
                          recompute -> offload   6 x aten.gelu.default   *.1   25.2 MB
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, astuple, dataclass, fields, replace
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

from passes import BrokenTrace, Forecast, Plan, Trace, parse, predict
from passes.analysis.step_graph import RETURN, critical_path, step_graph
from passes.simulate.plan_result import LeastTimes
from passes.slices.whole_weight import WholeWeight

from ..errors import PlanError
from .budget_curve import Sweep
from .chrome_trace import chrome_trace
from .explanation import Explanation, explain
from .given_reports import require_report, written_file
from .notebook import notebook_html
from .page.page import page
from .printout import printout, verdict
from .report_data import Assumption, OpaqueRow, ReportData, RowBlocks
from .saved_plan import REPLAN, TYPES, SavedPlan, carried_out, record_plan, typed, without_prices
from .tables import Printed, layer_path, mb, ms, stacked, table, unstyled

if TYPE_CHECKING:
    import networkx as nx
    from rich.console import RenderableType

ARENA = "in an arena: one block of the device, with addresses of the plan"
ROWS: dict[str, Callable[..., Any]] = {
    "assumptions": Assumption, "opaque": OpaqueRow, "row_blocks": RowBlocks, "whole_weights": WholeWeight
}  # fmt: skip
SEARCHED = ("greedy", "interrupted")  # facts of the search
KEPT = "keep"
ABSENT = "absent"


@dataclass(frozen=True, eq=False)
class Report(ReportData, Printed):
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

    def explain(self, value: str, choice: str | None = None) -> Explanation:
        """Return why the plan does with a value what it does: what each choice costs at least, or what forbids it.

            print(report.explain("layers.3.mlp"))  # the largest value that this submodule makes
            report.explain("gelu_3", "offload").choices  # of a value by its name in the plan

        Args:
            value: a value of the step by name, or the path of a submodule or parameter.
            choice: "keep", "recompute", "offload" or "cast and offload"; all of them by default.

        Raises:
            ValueError: there is no such value or choice, or nothing is decided of it, with the reason.
            PlanError: HiGHS, which proves what a choice costs, is not installed.
        """
        return explain(self.choice, self.machine, value, choice)

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

    def _repr_html_(self) -> str:
        return notebook_html(self)

    def __rich__(self) -> RenderableType:
        return printout(self)


def write_report(report: ReportData) -> SavedPlan:
    """Return the plan with its measurements, in the form that is saved."""
    facts = {
        field.name: getattr(report, field.name)
        for field in fields(ReportData)
        if str(field.type) in TYPES and getattr(report, field.name) != field.default
    }
    facts |= {name: list(map(asdict, rows)) for name in ROWS if (rows := getattr(report, name))}
    if values := [each for each in facts.pop("assumptions", ()) if each["kind"] == "value"]:
        facts["assumptions"] = values
    if report.lowered is not None:
        facts["lowered"] = str(report.lowered.trace).split("\n")
    facts |= {name: True for name in SEARCHED if getattr(report.choice, name)}
    if report.choice.others is not None:
        facts["others"] = list(map(str, astuple(report.choice.others)))  # as text, since a bound may be infinite
    return record_plan(report.choice, report.machine, report.slices, facts)


def read_report(saved: SavedPlan) -> dict[str, Any]:
    """Return the fields of the report that was saved; forecasts are computed from the step and the plan.

    Raises:
        PlanError: the plan can't be carried out on its step, or a fact is not of its field's type.
    """
    try:
        facts, machine = dict(saved.facts), saved.machine
        lowered = facts.pop("lowered", None)
        searched = {name: facts.pop(name, False) is True for name in SEARCHED}
        others = LeastTimes(*map(float, facts.pop("others"))) if "others" in facts else None
        choice = replace(
            carried_out(saved), greedy=searched["greedy"], interrupted=searched["interrupted"], others=others
        )
        rows = {name: tuple(make(**row) for row in facts.pop(name)) for name, make in ROWS.items() if name in facts}
        compiled: Forecast | None = lowered and predict(parse("\n".join(lowered)), machine)
        known = {"machine": machine, "choice": choice, "slices": saved.slices, "lowered": compiled}
        return {**known, **rows, **typed(ReportData, facts)}
    except (AttributeError, BrokenTrace, KeyError, TypeError, ValueError) as error:
        raise PlanError(f"the saved plan can't be shown: {type(error).__name__}: {error}; {REPLAN}") from error


@dataclass(frozen=True, slots=True)
class Change:
    """Values that one plan treats as `before` and the other as `after`, folded over equal layers.

    Attributes:
        before, after: "keep", "recompute", "offload", "stream", or several; "absent" if the step has no such value.
        nbytes: of all `count` values.
    """

    before: str
    after: str
    fn: str
    where: str
    nbytes: int
    count: int = 1


@dataclass(frozen=True, slots=True, repr=False)
class PlanDiff(Printed):
    """The decisions in which two plans differ, the largest values first.

    Attributes:
        budgets, peaks: bytes of both. us: microseconds of both, by forecast.
        same_step: True if both are plans of the same ops.
    """

    budgets: tuple[int, int]
    peaks: tuple[int, int]
    us: tuple[float, float]
    same_step: bool
    changes: tuple[Change, ...]

    def to_json(self) -> str:
        """Return the difference as JSON; the fields are those of this class."""
        return json.dumps(asdict(self), indent=1)

    def __repr__(self) -> str:
        peak, step = _pair(self.peaks), f"{ms(self.us[0])} -> {ms(self.us[1])}"
        return f"<PlanDiff: peak {peak}, step {step}, {len(self.changes)} changes>"

    def __rich__(self) -> RenderableType:
        more = self.peaks[1] - self.peaks[0]
        lines = [
            f"budget   {_pair(self.budgets)}",
            f"forecast {_pair(self.peaks)}, {'+' * (more > 0)}{mb(more)}",
            f"step     {ms(self.us[0])} -> {ms(self.us[1])}" + (_share(*self.us)),
        ]
        if not self.same_step:
            lines.append("the steps differ: values are compared by name")
        head = unstyled("\n".join(lines))
        if not self.changes:
            return stacked(head, unstyled("both decide the same"))
        rows = table("decided differently", "before", "after", "op", "where", "bytes", right=("bytes",))
        for change in self.changes:
            fn = change.fn if change.count == 1 else f"{change.count} x {change.fn}"
            rows.add_row(change.before, change.after, fn, change.where, mb(change.nbytes))
        return stacked(head, unstyled(""), rows)


def changes(before: tuple[Trace, Plan], after: tuple[Trace, Plan]) -> tuple[Change, ...]:
    """Return what is decided differently of two steps, each given with its plan."""
    folded: dict[tuple[str, str, str, str], Change] = {}
    for change in _each_change(before, after):
        key = (change.before, change.after, change.fn, layer_path(change.where))
        if key in folded:
            total = folded[key]
            change = Change(*key, total.nbytes + change.nbytes, total.count + 1)
        folded[key] = change
    return tuple(sorted(folded.values(), key=lambda change: -change.nbytes))


def _each_change(before: tuple[Trace, Plan], after: tuple[Trace, Plan]) -> Iterator[Change]:
    """Yield each value that is decided differently; views are left out, for nothing is moved or made of them."""
    old, new = _verbs(before[1]), _verbs(after[1])
    for name in dict.fromkeys([*old, *new]):
        was, now = (_verb(name, trace, verbs) for (trace, _), verbs in ((before, old), (after, new)))
        trace = after[0] if name in after[0].op else before[0]
        op, is_copied = trace.op[name], "offload" in f"{was} {now}"
        nbytes = trace.nbytes[op.holds[0]] if is_copied else op.nbytes
        if was != now and nbytes:
            yield Change(was, now, op.fn, op.where, nbytes)


def _verbs(plan: Plan) -> dict[str, str]:
    """Map each value to what is decided of it, but for reloads, which follow from the rest."""
    verbs: dict[str, dict[str, None]] = {}
    for decision in plan:
        verb = type(decision).__name__.lower()
        if verb != "reload":
            verbs.setdefault(decision.value, {})[verb] = None
    return {value: " and ".join(found) for value, found in verbs.items()}


def _verb(name: str, trace: Trace, verbs: dict[str, str]) -> str:
    return verbs.get(name, KEPT) if name in trace.op else ABSENT


def _pair(sizes: tuple[int, int]) -> str:
    return f"{mb(sizes[0])} -> {mb(sizes[1])}"


def _share(before_us: float, after_us: float) -> str:
    return f", {after_us / before_us - 1:+.1%}" if before_us else ""
