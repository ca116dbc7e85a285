"""What is known of a planned step: its plan, what it was forecast to take, and what it took.

print(report)          fits: forecast 649.2 MB, measured 649.2 MB, budget 649.3 MB ...    (see `printout.py`)
report.overhead        0.032
report.to_json()       the plan, to be used again
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from rich.console import RenderableType

from passes import Choice, Forecast, Machine, Plan

from .printout import printout
from .saved import saved
from .tables import printed


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
        recent_us: the median of the latest twenty steps, each from the begin of forward to the end of backward without
            what lies between the two, in microseconds; None while there are fewer.
        flight_us: what those were foretold to take, in microseconds; known with `recent_us`.
        pages_us: what the forecast leaves out: how much longer the step takes because its values lie in pages that the
            system has yet to give, in microseconds.
        plain_us: what the step takes as it is, by the prices that ops had before any step had run, in microseconds: so
            new pages, which only a plan brings, are not in it; 0 where the choice has those prices itself.
        planned_us: what capture, pricing and planning took, in microseconds.
        counted: whether an optimizer was given, so that its states are in the forecast.
        beyond: why the step that was measured takes more than its forecast, if it does: what its caller did that no
            plan counts.
        lowered: the forecast of the step with parts of it compiled, which is what runs then.
        apart_us: microseconds of the same plan with nothing compiled.
        recorded: what is said of the step as CUDA graphs; empty if nobody asked for them.
        uncompiled: segments that Inductor could not compile, and that run op by op.
        blocks: on a GPU, the most bytes that torch's allocator had given out while `measured` was found.
        forwards: how many forwards were open at once, at most.
        together: bytes that they were forecast to take with what the others really held; 0 if there was ever but one.
        adding: bytes that the same call needs when there are gradients to add to; 0 if it was not asked for.
        held: the most that it had of the device then, with what was free between.
        unmeasured: why the last step that should have been measured was not; empty once one was, and before.
    """

    machine: Machine
    choice: Choice
    measured: int | None = None
    measured_us: float | None = None
    repriced_us: float | None = None
    recent_us: float | None = None
    flight_us: float = 0.0
    pages_us: float = 0.0
    plain_us: float = 0.0
    planned_us: float = 0.0
    counted: bool = True
    beyond: str = ""
    lowered: Forecast | None = None
    apart_us: float = 0.0
    uncompiled: int = 0
    recorded: str = ""
    blocks: int = 0
    held: int = 0
    adding: int = 0
    forwards: int = 1
    together: int = 0
    unmeasured: str = ""

    @property
    def predicted_us(self) -> float:
        """Microseconds that a step of this plan was foretold to take, before any had run."""
        return self.forecast.us + self.pages_us

    @property
    def as_it_is_us(self) -> float:
        """Microseconds of the step without a plan, in a process whose freed memory stays: of eager's step."""
        return self.plain_us or self.choice.captured.us

    @property
    def longer(self) -> float:
        """By how much a step was foretold to be longer than eager's, new pages included: 0.1 is 10 %."""
        return self.predicted_us / self.as_it_is_us - 1 if self.as_it_is_us else 0.0

    @property
    def plan(self) -> Plan:
        """The decisions, in the order in which they were made."""
        return self.choice.plan

    @property
    def decisions(self) -> Plan:
        """The same, for `model.plan.decisions`."""
        return self.choice.plan

    @property
    def forecast(self) -> Forecast:
        """What the step takes as it runs: with parts of it compiled, if they are."""
        return self.choice.forecast if self.lowered is None else self.lowered

    @property
    def budget(self) -> int:
        """In bytes."""
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
        there -= self.forecast.trace.others  # which are there only if they are open, and are measured then
        return replace(
            self, unmeasured="", measured=there + allocated + int(self.forecast.by_kind["staging"].max(initial=0))
        )

    def after(self, first: Report) -> Report:
        """The report of a plan that takes the place of another, with what stays true of the step."""
        return replace(self, adding=first.adding, plain_us=first.as_it_is_us)

    def with_update(self, nbytes: int) -> Report:
        """The report once the optimizer has stepped, with so many bytes in gradients, states and its workspace."""
        there = sum(op.nbytes for op in self.forecast.trace.ops if op.fn in ("parameter", "buffer", "input"))
        there -= self.forecast.trace.others
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
        return printout(self)
