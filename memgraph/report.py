"""A plan as a person reads it: does it fit, what lies where at the peak, what was decided and why.

fits: forecast 118.2 MB, measured 118.2 MB, budget 120.0 MB (left as it is, the step needs 191.4 MB)
at the peak: parameter 40.1, activation 61.0, ...
recompute  8 x  gelu  transformer.h.*.mlp   33.6 MB   2.1 ms   cheaper to run again than to send away
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from passes import KINDS, Choice, Forecast, Machine, Offload, Op, Plan, Recompute, Stream
from passes.exchanges import sent_nbytes
from passes.linear import INSTALL, MISSING

from .saved import saved
from .tables import mb, ms, printed, table

TOP = 10
NUMBERS = ("bytes", "time", "at the peak", "at its own peak")


@dataclass(frozen=True, eq=False)
class Report:
    """The plan of one signature, what it was forecast to take, and what it took.

    Attributes:
        machine: the budget and the links that the plan was made for.
        choice: the decisions, and the forecasts with and without them.
        measured: the most bytes that were on the device while the first step ran; None before, or where a profiler of
            the caller's was in the way.
        measured_us: what the first step took that ran without the meter of bytes, in microseconds; None before.
        repriced_us: the forecast of a step with what its own ops took in that one, in microseconds; None before.
        pages_us: what the forecast leaves out: how much longer the step takes because its values lie in pages that the
            system has yet to give, in microseconds.
        planned_us: what capture, pricing and planning took, in microseconds.
        counted: whether an optimizer was given, so that its states are in the forecast.
        retained: whether the step that was measured went through a backward that kept its graph.
        lowered: the forecast of the step with parts of it compiled, which is what runs then.
        apart_us: microseconds of the same plan with nothing compiled.
        recorded: what is said of the step as CUDA graphs; empty if nobody asked for them.
        uncompiled: segments that Inductor could not compile, and that run op by op.
    """

    machine: Machine
    choice: Choice
    measured: int | None = None
    measured_us: float | None = None
    repriced_us: float | None = None
    pages_us: float = 0.0
    planned_us: float = 0.0
    counted: bool = True
    retained: bool = False
    lowered: Forecast | None = None
    apart_us: float = 0.0
    uncompiled: int = 0
    recorded: str = ""

    @property
    def predicted_us(self) -> float:
        """Microseconds that a step of this plan was foretold to take, before any had run."""
        return self.forecast.us + self.pages_us

    @property
    def plan(self) -> Plan:
        return self.choice.plan

    @property
    def decisions(self) -> Plan:
        return self.choice.plan

    @property
    def forecast(self) -> Forecast:
        return self.choice.forecast if self.lowered is None else self.lowered

    @property
    def budget(self) -> int:
        return self.machine.budget

    @property
    def peak(self) -> int:
        """The forecast's peak, in bytes."""
        return self.forecast.peak

    def with_measured(self, allocated: int, absent: int = 0, states: int | None = None) -> Report:
        """The report of a step that allocated so many bytes besides what was there already: all that the forecast
        finds there, but for `absent` bytes; `states`: those that were there, if it has made others."""
        inputs = [op for op in self.forecast.trace.ops if op.is_input and op.fn != "tangent"]
        there = sum(op.nbytes for op in inputs if states is None or op.fn != "state") + (states or 0) - absent
        return replace(self, measured=there + allocated + int(self.forecast.by_kind["staging"].max(initial=0)))

    def with_update(self, nbytes: int) -> Report:
        """The report once the optimizer has stepped, with so many bytes in gradients, states and its workspace."""
        there = sum(op.nbytes for op in self.forecast.trace.ops if op.fn in ("parameter", "buffer", "input"))
        return replace(self, measured=max(self.measured or 0, there + nbytes))

    @property
    def overhead(self) -> float:
        """The time that the plan adds to the step, as a share of it: 0.1 is 10 %."""
        return self.choice.overhead

    @property
    def lower_bound(self) -> float:
        """Microseconds of the step, less than which no plan of this plan's class takes; it is proven."""
        return self.choice.lower_bound

    @property
    def gap(self) -> float:
        """How far the plan's time is above the bound's, as a share of that: at most so much could be won."""
        return self.choice.gap

    @property
    def bound_us(self) -> float:
        """Microseconds that every plan adds in which a value runs again and comes back at most once; it is proven."""
        return self.choice.bound_us

    def to_json(self) -> str:
        """The plan, to be used again: `memgraph.compile(model, budget, plan=text)`.  See `SavedPlan`."""
        return saved(self.choice, self.machine).to_json()

    def __str__(self) -> str:
        return printed(self)

    def __rich__(self) -> RenderableType:
        return Group(
            Text(self._verdict()),
            Text(""),
            _kinds(self.forecast),
            Text(""),
            _peak(self.forecast),
            Text(""),
            self._decided(),
        )

    def _verdict(self) -> str:
        plain = self.choice.captured
        lines = [
            self._bytes(),
            f"time: forecast {ms(self.forecast.us)}, {self.overhead:+.1%}; "
            f"as it is, the step takes {ms(plain.us)} and needs {mb(plain.peak)}",
            *self._exchanged(),
            *self._compiled(),
            *([self.recorded] if self.recorded else []),
            *self._taken(),
            *self._proven(),
            *self._greedy(),
            *self._rounded(),
        ]
        if not self.counted:
            lines.append("no optimizer was given: its states and its update are not counted; give optimizer=")
        return "\n".join(lines)

    def _exchanged(self) -> list[str]:
        """What ranks exchange, and how much of it takes no time."""
        net = [copy for copy in self.forecast.copies if copy.queue == "net"]
        if not net:
            return []
        us = sum(copy.end - copy.begin for copy in net)
        hidden = us * (1 - min(self.machine.strain, 1.0)) - sum(_spent(self.forecast, "reduced", "gathered").values())
        trace = self.forecast.trace
        nbytes = sum(sent_nbytes(trace, trace.op[copy.value]) for copy in net)
        said = f"network: {len(net)} exchanges of {mb(nbytes)} take {ms(us)}"
        return [f"{said}, of which compute hides {ms(max(hidden, 0.0))}"]

    def _compiled(self) -> list[str]:
        """What Inductor has compiled of the step, beside the plan as it was made."""
        if self.lowered is None:
            return []
        count = sum(op.fn == "memgraph.segment" for op in self.lowered.trace.ops)
        failed = f"; {self.uncompiled} can't be" if self.uncompiled else ""
        if not count:
            return [f"nothing is compiled, as no segment is faster than its ops and within the budget{failed}"]
        return [f"compiled: {count} segment{'s' * (count > 1)}; with their ops one by one {ms(self.apart_us)}{failed}"]

    def _taken(self) -> list[str]:
        """What the step took, beside what was foretold, before and with what its own ops took."""
        lines = [f"predicted {ms(self.predicted_us)}, with {ms(self.pages_us)} for new pages"] if self.pages_us else []
        if self.measured_us is None:
            return lines
        again = "" if self.repriced_us is None else f"; forecast with the times of its own ops {ms(self.repriced_us)}"
        return [*lines, f"took {ms(self.measured_us)}{again}"]

    def _proven(self) -> list[str]:
        """What no plan does better, and of which plans that is true."""
        if not self.plan:
            return []
        single = self.choice.is_single
        adds = self.choice.bound_us if single else self.choice.any_us
        if not adds:
            return [f"proven: only that no plan is faster than the step as it is; this one is {self.gap:.1%} above"]
        each = "in which each value runs again and comes back at most once"
        which = each if single else "that runs values again in backward only, however often,"
        return [f"proven: no plan {which} takes less than {ms(self.lower_bound)}; this one is {self.gap:.1%} above"]

    def _greedy(self) -> list[str]:
        """Why no more is proven, and what to do."""
        if not self.choice.greedy:
            return []
        return [f"{MISSING}: the greedy planner made this plan, and nothing more is proven of it; {INSTALL}"]

    def _rounded(self) -> list[str]:
        """What is lossy, because `wire_dtype` asked for it."""
        cast = [decision for decision in self.plan if isinstance(decision, Offload) and decision.wire]
        if not cast:
            return []
        nbytes = sum(self.choice.captured.trace.nbytes[self._holds(decision.value)] for decision in cast)
        return [f"lossy: {len(cast)} values of {mb(nbytes)} are rounded to {cast[0].wire} on their way"]

    def _holds(self, value: str) -> str:
        """The storage of a value that is sent away."""
        return self.choice.captured.trace.op[value].holds[0]

    def _bytes(self) -> str:
        """The three that the promise is about, to the byte where they would look alike."""
        found = [self.peak, self.budget, *([] if self.measured is None else [self.measured])]
        alike = len(set(map(mb, found))) < len(set(found))
        forecast, budget, *measured = [f"{nbytes} B" if alike else mb(nbytes) for nbytes in found]
        said = f"forecast {forecast}, measured {(*measured, 'not yet')[0]}, budget {budget}"
        if self.measured is None or self.measured <= min(self.peak, self.budget):
            return f"fits: {said}"
        verdict = "over the budget" if self.measured > self.budget else "over the forecast"
        why = (
            "retain_graph=True kept what backward lets go" if self.retained else "which should not be: please report it"
        )
        return f"{verdict}: {said}; {why}"

    def _decided(self) -> RenderableType:
        if not self.plan:
            return Text("decided: nothing; the step fits as it is")
        lines = table("decided", "what", "op", "where", "bytes", "time", "why", right=NUMBERS)
        for row in sorted(_folded(self._rows()), key=lambda row: -row.nbytes):
            why = row.why if row.count == 1 else f"{row.count} x, {row.why}"
            lines.add_row(row.verb, row.fn, row.where, mb(row.nbytes), ms(row.us), why)
        return lines

    def _rows(self) -> Iterator[Row]:
        stalls, casts = _spent(self.forecast, "free", "wait"), _spent(self.forecast, "narrow", "widen")
        for decision in self.plan:
            op = self.choice.captured.trace.op[decision.value]
            if isinstance(decision, Offload):
                verb = f"offload as {decision.wire}" if decision.wire else "offload"
                nbytes = self.choice.captured.trace.nbytes[self._holds(op.name)]
                why = "hides behind compute" if stalls[op.name] < 1 else "compute waits for it"
                yield Row(verb, op.fn, op.where, nbytes, stalls[op.name] + casts[op.name], why)
            elif isinstance(decision, Stream):
                verb, stays = ("update there", ", and is updated there") if decision.on else ("stream", "")
                why = f"lives on {self.machine.tier}{stays}"
                yield Row(verb, op.fn, op.where, op.nbytes, stalls[op.name], why)
            elif isinstance(decision, Recompute) and op.makes:
                yield Row("recompute", op.fn, op.where, op.nbytes, op.us, self._why_again(op))

    def _why_again(self, op: Op) -> str:
        if not (self.machine.out and self.machine.back):
            return "no far tier"
        trip = op.nbytes / self.machine.out + op.nbytes / self.machine.back
        return f"a trip would take {ms(trip)}"


@dataclass(frozen=True, slots=True)
class Row:
    """A line of a table; `count` identical layers make one."""

    verb: str
    fn: str
    where: str
    nbytes: int
    us: float = 0.0
    why: str = ""
    count: int = 1


def _folded(rows: Iterable[Row]) -> list[Row]:
    """Rows that differ only in the numbers of their module paths, as one."""
    found: dict[tuple[str, str, str], Row] = {}
    for row in rows:
        where = re.sub(r"(?<=\.)\d+(?=[.\s]|$)", "*", row.where)
        key = (row.verb, row.fn, where)
        same = found.get(key, Row(row.verb, row.fn, row.where, 0, 0.0, row.why, 0))
        path = where if same.count else row.where
        found[key] = Row(row.verb, row.fn, path, same.nbytes + row.nbytes, same.us + row.us, row.why, same.count + 1)
    return list(found.values())


def _kinds(forecast: Forecast) -> Table:
    lines = table("bytes", "kind", "at the peak", "at its own peak", right=NUMBERS)
    for kind in KINDS:
        if (most := int(forecast.by_kind[kind].max(initial=0))) > 0:
            lines.add_row(kind, mb(int(forecast.by_kind[kind][forecast.at])), mb(most))
    lines.add_row("all", mb(forecast.peak), "")
    return lines


def _peak(forecast: Forecast) -> Table:
    op = forecast.trace.ops[forecast.at]
    lines = table(f"at the peak, {op.fn} {op.where}", "kind", "bytes", "what", "type", "where", right=NUMBERS)
    makers = [(life, forecast.trace.op[life.maker]) for life in forecast.alive(forecast.at)]
    rows = _folded(Row(life.kind, f"{maker.fn} {maker.type}", maker.where, life.nbytes) for life, maker in makers)
    for row in sorted(rows, key=lambda row: -row.nbytes)[:TOP]:
        fn, _, type = row.fn.partition(" ")
        lines.add_row(row.verb, mb(row.nbytes), fn if row.count == 1 else f"{row.count} x {fn}", type, row.where)
    return lines


def _spent(forecast: Forecast, *verbs: str) -> Counter[str]:
    """How long compute is with such ops for the trip of each value, in microseconds."""
    ops, begins = forecast.trace.ops, (*forecast.begins, forecast.us)
    fns = {f"memgraph.{verb}.default" for verb in verbs}
    spent: Counter[str] = Counter()
    for i, op in enumerate(ops):
        if op.fn in fns:
            value = re.sub(r"__(free|wire|back_\d+|wide_\d+)$", "", op.name)
            spent[value] += begins[i + 1] - begins[i]  # type: ignore[assignment]
    return spent
