"""The facts of a planned step: its plan, its forecast, and its measurements.

report.peak        649216392     bytes, forecast
report.measured    649216392     bytes, once a step has run
report.overhead    0.032         of the time of the step without decisions
"""

from __future__ import annotations

from dataclasses import dataclass

from passes import Forecast, Machine, Plan, PlanResult
from passes.ir.ops import is_region
from passes.simulate.caching_allocator import Held, held
from passes.slices.slice import Slice
from passes.slices.whole_weight import WholeWeight


@dataclass(frozen=True)
class Assumption:
    """Something on which a captured graph rests; a call that has something else is captured again.

    Attributes:
        text: what it is, as `float32 8 x 128 on cpu`, `0.1` or `any float`.
        where: argument, parameter, mode of torch, attribute or variable; for a value of a tensor, the submodule and
            source line that reads it.
        failures: number of runs that met another value of a tensor.
        kind: "argument", "tensor" (a parameter or buffer), "mode", "attribute", "variable", or "value" of a tensor.
    """

    text: str
    where: str
    failures: int
    kind: str = "value"


@dataclass(frozen=True)
class OpaqueRow:
    """A submodule that runs as it is.

    Attributes:
        nbytes: workspace of its forward or its backward, whichever is larger.
        failures: number of runs in which its results had another form, or its ops made more bytes.
    """

    path: str
    kind: str
    nbytes: int
    reason: str
    failures: int


@dataclass(frozen=True)
class RowBlocks:
    """A weight that comes, and whose gradient goes, in blocks of rows.

    Attributes:
        rows: of a block; the last one has the rest.
        rounds: sums over blocks round otherwise than sums over the whole.
    """

    weight: str
    rows: int
    blocks: int
    rounds: bool


@dataclass(frozen=True, eq=False)
class ReportData:
    """The plan of one call signature, its forecast, and its measurements.

    Attributes:
        machine: the budget and the links that the plan was made for.
        choice: the decisions, and the forecasts with and without them.
        measured: peak bytes on the device while the first step ran; None before, or while a profiler was active.
        measured_us: microseconds of the first step that ran without the memory meter; None before.
        repriced_us: forecast in microseconds from the times of that step's own ops; None before.
        recent_us: median microseconds of the latest steps, at most twenty, from the begin of forward to the end of
            backward without the time between the two; None while there are fewer than three.
        expected_us: forecast of those steps in microseconds; set together with `recent_us`.
        slower: share by which a reference op took longer beside these steps than when ops were priced; None if they
            are as forecast, or on a GPU.
        planned_us: microseconds of capture, pricing and planning.
        counted: True if an optimizer was given, so that its states are part of the forecast.
        beyond: reason why the measured step exceeded its forecast, if it did.
        lowered: forecast of the step as it runs with parts compiled by Inductor; None if nothing is compiled.
        apart_us: microseconds of the same plan with nothing compiled.
        uncompiled: number of segments that Inductor could not compile, and that run op by op.
        op_by_op: peak bytes of a step whose loss is of only some outputs, as its backward runs compiled ops one by one;
            0 if there is one output, or nothing is compiled.
        split: why ops between memory ops are not compiled as one, where they are not.
        recorded: what to print about CUDA graphs; empty if they were not asked for.
        blocks: on a GPU, peak bytes that torch's allocator had given out in the measured step.
        held: on a GPU, peak bytes that it held of the device in that step, free blocks included.
        arena: on a GPU, whether its values have addresses of the plan; empty if the budget has room for what torch's
            allocator holds. If they have, `blocks` and `held` are of the first such step.
        adding: bytes that the call needs if it adds to gradients; 0 if that was not asked.
        all_outputs: bytes that backward from all outputs needs, if they are too many and it starts from scalars alone;
            otherwise 0.
        forwards: largest number of forwards that were open at once.
        together: bytes forecast for these together; 0 if there was never more than one.
        assumptions: what the step rests on; values of tensors last, in the order in which it checks them. A saved plan
            has these alone.
        opaque: submodules that run as they are, each call as one op.
        slices: chains of ops that run in parts of their rows.
        whole: peak bytes of the step as captured, without slices; 0 if there are none.
        row_blocks: weights that come in blocks of rows.
        whole_weights: large weights that stay whole, where blocks of rows were looked for.
        value_run: bytes that the plain forward allocated, once, to find them.
        no_pool: on a CPU, why the process has no pool of pages for this plan; empty if it has one, or needs none.
        disturbed: share of the ops' time whose prices other work of the machine has disturbed.
        unmeasured: reason why the last step that should have been measured was not; empty otherwise.
    """

    machine: Machine
    choice: PlanResult
    measured: int | None = None
    measured_us: float | None = None
    repriced_us: float | None = None
    recent_us: float | None = None
    expected_us: float = 0.0
    slower: float | None = None
    planned_us: float = 0.0
    counted: bool = True
    beyond: str = ""
    lowered: Forecast | None = None
    apart_us: float = 0.0
    uncompiled: int = 0
    op_by_op: int = 0
    split: str = ""
    recorded: str = ""
    blocks: int = 0
    held: int = 0
    arena: str = ""
    adding: int = 0
    all_outputs: int = 0
    forwards: int = 1
    together: int = 0
    assumptions: tuple[Assumption, ...] = ()
    opaque: tuple[OpaqueRow, ...] = ()
    slices: tuple[Slice, ...] = ()
    whole: int = 0
    row_blocks: tuple[RowBlocks, ...] = ()
    whole_weights: tuple[WholeWeight, ...] = ()
    value_run: int = 0
    no_pool: str = ""
    disturbed: float = 0.0
    unmeasured: str = ""

    @property
    def is_over_by_regions(self) -> bool:
        """True if ops that are compiled as one took more bytes in the measured step than when they ran alone."""
        compiled = self.lowered is not None and any(map(is_region, self.lowered.trace.ops))
        return compiled and not self.beyond and self.measured is not None and self.measured > self.peak

    @property
    def summary(self) -> dict[str, str | int | float | None]:
        """The facts of a plan in a line: device; bytes of budget, peak and of the step as it is; microseconds."""
        return {
            "device": self.machine.device, "budget": self.budget, "peak": self.peak, "measured": self.measured,
            "as_it_is": self.whole or self.choice.captured.peak, "us": round(self.predicted_us, 1),
            "longer": round(self.longer, 5), "gap": round(self.gap, 5), "decisions": len(self.plan),
            "planned_us": round(self.planned_us),
        }  # fmt: skip

    @property
    def predicted_us(self) -> float:
        """Forecast of a step in microseconds, before any step has run."""
        return self.forecast.us

    @property
    def as_it_is_us(self) -> float:
        """Microseconds of eager's step, without a plan, by the prices of the forecast."""
        return self.choice.captured.us

    @property
    def longer(self) -> float:
        """Forecast of the time added to eager's step: 0.1 is 10 %."""
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
        """Forecast of the step as it runs, with compiled parts if there are any."""
        return self.choice.forecast if self.lowered is None else self.lowered

    @property
    def budget(self) -> int:
        """The budget in bytes."""
        return self.machine.budget

    @property
    def peak(self) -> int:
        """Peak bytes of the forecast."""
        return max(self.forecast.peak, self.op_by_op)

    def allocator(self, expandable: bool = False) -> Held:
        """Simulate torch's CUDA allocator: what it would hold for the step's allocations, inputs left out.

        Args:
            expandable: with `PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True`.
        """
        return held(self.forecast, expandable)

    @property
    def on_card(self) -> int:
        """Bytes of a GPU that torch's allocator would hold with the step's inputs, by that simulation."""
        usual = self.allocator()
        return self.peak + usual.reserved - usual.live

    @property
    def overhead(self) -> float:
        """Time that the plan adds, as a share of the step without decisions: 0.1 is 10 %."""
        return self.choice.overhead

    @property
    def lower_bound(self) -> float:
        """Proven lower bound in microseconds on the step time of any plan of this plan's class."""
        return self.choice.lower_bound

    @property
    def gap(self) -> float:
        """Distance of the plan's time from `lower_bound`, as a share of the bound."""
        return self.choice.gap

    @property
    def bound_us(self) -> float:
        """Proven microseconds that every plan adds in which each value is recomputed and reloaded at most once."""
        return self.choice.bound_us
