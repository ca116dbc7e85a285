"""Compare torch's own ways to save memory with memgraph at the peak of each.

    rows("gpt2-xl", shape, laps, 10, left)   ->   Row("eager", 31.0 ms, 9.1 GB), ..., Row("memgraph", ...)

A way that fails has a row with the error, and a way that is skipped for lack of time has a row that says so.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn

import memgraph
from benchmarks.blocks import Shape, stack
from benchmarks.clock import step_of
from benchmarks.laps import Laps, Overtime, Taken, within
from benchmarks.nets import Through, checkpointed, plainly
from passes import Stream
from passes.ir.ops import OFFLOAD

SHARES = (0.8, 0.5, 0.2)  # for torch's activation_memory_budget
OURS = (0.5, 0.25)  # of the compiled step's activations
GRAPHED = "50%"  # beside which it is also run as CUDA graphs
PLAIN = ("checkpoint", "save_on_cpu")  # which run op by op
SEARCH = 15.0  # seconds for a plan
WARM = 4  # steps before any is timed, in which torch compiles
SETTLED, MOST = 10, 50  # steps in a row with one plan before memgraph is timed, and the most that are waited for
NO_TIME = "no time left"
Context = Callable[[], AbstractContextManager[Any]]


@dataclass(frozen=True)
class Way:
    """A way to run a stack: how blocks are called, a compiler if any, and a context."""

    name: str
    through: Through = plainly
    compiled: bool = False
    share: float = 1.0
    saved: Context = nullcontext

    def ready(self, model: nn.Module) -> Callable[..., Any]:
        if not self.compiled:
            return model
        compiled = torch.compile(model, dynamic=False)

        def called(*args: Any, **kwargs: Any) -> Any:
            with torch._functorch.config.patch(activation_memory_budget=self.share):
                return compiled(*args, **kwargs)

        return called


@dataclass(frozen=True)
class Row:
    """A way, or memgraph at the peak of the way `beside`; if `taken` is None, `why` says why it did not run.

    For a language model: `tokens` a second, and the `share` of the device's best flop rate.
    """

    model: str
    name: str
    taken: Taken | None = None
    why: str = ""
    beside: str = ""
    budget: int = 0
    tokens: float = 0.0
    share: float = 0.0

    @property
    def is_late(self) -> bool:
        """True if it did not run, or not to its end, because the time of all rows was over."""
        return self.taken is None and (self.why == NO_TIME or self.why.startswith(Overtime.__name__))

    @property
    def has_failed(self) -> bool:
        return self.taken is None and not self.is_late


def ways(device: torch.device) -> list[Way]:
    """Return the ways for this device, most important first. Compiling for a CPU would take too long."""
    on_cpu = partial(torch.autograd.graph.save_on_cpu, pin_memory=device.type == "cuda")
    compiled = [
        Way("compile", compiled=True),
        *(Way(f"autoac {share}", compiled=True, share=share) for share in SHARES),
    ]
    compiled.append(Way("compile, checkpoint", checkpointed, compiled=True))
    return [
        Way("eager"), *(compiled if device.type == "cuda" else []),
        Way("checkpoint", checkpointed), Way("save_on_cpu", saved=on_cpu),
    ]  # fmt: skip


def rows(name: str, shape: Shape, laps: Laps, count: int, left: Callable[[], float]) -> Iterator[Row]:
    """Yield each row when it is measured, until no seconds are `left`.

    Memgraph's row follows the way that it is compared with, so that there are pairs whenever time runs out.
    """
    found: dict[str, Taken] = {}
    done: set[str] = set()
    for way in ways(laps.device):
        row = tried(partial(_run, name, way, shape, laps, count), Row(name, way.name), left)
        if row.taken is not None:
            found[way.name] = row.taken
        yield row
        if way.name == "eager" and laps.device.type == "cuda":
            continue  # the compiled step comes next, and shares are of its activations
        for beside, budget in budgets(found, stack_nbytes(shape)):
            if beside not in done:
                done.add(beside)
                # Memgraph compiles ops only if the way that it is compared with does.
                lower = None if beside in PLAIN else "auto"
                ours = Row(name, "memgraph" if lower else "memgraph, lower=None", beside=beside, budget=budget)
                yield tried(partial(_ours, ours, shape, laps, count, lower=lower), ours, left)
    budget = dict(budgets(found, stack_nbytes(shape))).get(GRAPHED, 0)
    if budget and laps.device.type == "cuda":  # the last, for the workspace of its stream stays
        graphed = Row(name, "memgraph, CUDA graphs", beside=GRAPHED, budget=budget)
        yield tried(partial(_ours, graphed, shape, laps, count, lower="auto", cuda_graphs=True), graphed, left)


def tried(run: Callable[[], Row], row: Row, left: Callable[[], float]) -> Row:
    """Return the result of `run`, or the reason why it failed."""
    seconds = left()
    if seconds <= 0:
        return replace(row, why=NO_TIME)
    try:
        with within(seconds):
            return run()
    except (Exception, Overtime) as error:  # a way that fails must not end the others
        why = f"{type(error).__name__}: {error}".strip().partition("\n")[0][:200]
        return replace(row, why=why)


def budgets(found: dict[str, Taken], parameters: int) -> list[tuple[str, int]]:
    """Return memgraph's budgets: the peaks of ways that save memory, and shares of the compiled step's activations."""
    plain = found.get("compile") or found.get("eager")
    if plain is None:
        return []
    shares = [(f"{share:.0%}", parameters + int(share * (plain.peak - parameters))) for share in OURS]
    return shares + [(name, taken.peak) for name, taken in found.items() if taken.peak < plain.peak]


def stack_nbytes(shape: Shape) -> int:
    """Return the bytes of parameters, their gradients, and the input."""
    model, x = stack(shape, torch.device("meta"))
    return 2 * sum(p.nbytes for p in model.parameters()) + sum(b.nbytes for b in model.buffers()) + x.nbytes


def _run(name: str, way: Way, shape: Shape, laps: Laps, count: int) -> Row:
    laps.clear()
    model, x = stack(shape, laps.device, way.through)
    called = way.ready(model)

    def loss() -> torch.Tensor:
        with way.saved():
            return called(x)

    return Row(name, way.name, _taken(model, x, loss, laps, count))


def _ours(row: Row, shape: Shape, laps: Laps, count: int, **options: Any) -> Row:
    laps.clear()
    model, x = stack(shape, laps.device)
    ours = memgraph.compile(model, row.budget, time_limit=SEARCH, **options)
    settle(ours, step_of(model, lambda: ours(x)))
    taken = _taken(model, x, lambda: ours(x), laps, count)
    return replace(row, taken=taken, why=plan_of(ours.plan))


def settle(ours: memgraph.CompiledModule, step: Callable[[], object]) -> None:
    """Run steps until the plan, which is looked at again with measured times, has stayed the same for a while."""
    same, before = 0, None
    for _ in range(MOST):
        step()
        now = ours.plan.plan, ours.plan.measured_us, ours.plan.arena
        same, before = (same + 1 if now == before else 0), now
        if same == SETTLED:
            return


def plan_of(report: memgraph.Report) -> str:
    """Summarize a plan in one line."""
    fns = [op.fn for op in report.forecast.trace.ops]
    again = sum(bool(op.recomputes) for op in report.forecast.trace.ops)
    far = sum(isinstance(decision, Stream) for decision in report.plan)
    moved = f"{fns.count(OFFLOAD)} away" + (f", {far} at home there" if far else "")
    apart = f", {report.arena}" if report.arena.startswith("not") else ""
    return f"{again} again, {moved}, forecast {report.predicted_us / 1e3:.1f} ms{apart}"


def _taken(model: nn.Module, x: torch.Tensor, loss: Callable[[], torch.Tensor], laps: Laps, count: int) -> Taken:
    step = step_of(model, loss)
    for _ in range(WARM):
        step()
    model.zero_grad(set_to_none=True)
    return laps.of(step, count, [*model.parameters(), *model.buffers(), x])
