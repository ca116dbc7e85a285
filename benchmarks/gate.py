"""A gate for the planner that needs no clock: kept steps, kept figures, and what a change of the code does to them.

    python -m benchmarks.gate              # compare; exit code 1 if a plan became worse or a forecast changed
    python -m benchmarks.gate --rewrite    # the same, and keep the new figures
    python -m benchmarks.gate --capture    # capture the steps again as well, as after a change of capture

Steps are in golden/*.txt, priced by a roofline; figures and plans in golden/figures.json. Two things are compared:

- the forecast of each kept plan: bytes, microseconds, bytes moved, microseconds recomputed. It may not change at all.
- a new plan for the same budget. It may be slower by at most SLACK of the step, and its bound may not fall by more.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from passes import Link, Machine, Offload, Plan, Recompute, Stream, Trace, apply, make_plan, parse, parse_plan, predict

FOLDER = Path(__file__).parent / "golden"
FIGURES = FOLDER / "figures.json"
STEPS = ("gpt", "llama", "unet", "resnet")
SHARES = (0.8, 0.55)  # of what the step needs as it is
LINKS = {"none": Link(), "host": Link(out=20_000.0, back=20_000.0, staging=4 << 20)}  # bytes per microsecond
SLACK = 0.001  # of the step: searches on other processors may round otherwise
console = Console(width=150)


@dataclass(frozen=True)
class Figures:
    """A plan and its forecast.

    Attributes:
        moved: bytes that are offloaded. recomputed_us: microseconds of the ops that run again.
        bound_us: proven microseconds of any plan of the class.
    """

    budget: int
    peak: int
    us: float
    moved: int
    recomputed_us: float
    bound_us: float
    gap: float
    decisions: list[str]


def main(
    rewrite: Annotated[bool, typer.Option("--rewrite", help="keep the new figures")] = False,
    capture: Annotated[bool, typer.Option("--capture", help="capture the steps again, and keep them")] = False,
) -> None:
    """Compare the planner with its kept figures."""
    if capture:
        _capture()
    kept = {} if capture else read()
    found = {case: planned(case) for case in cases()}
    console.print(table(kept, found))
    worse = [line for case in found if case in kept for line in complaints(case, kept[case], found[case])]
    console.print("\n".join(worse) or "nothing is worse")
    if rewrite or capture:
        FIGURES.write_text(json.dumps({case: asdict(each) for case, each in found.items()}, indent=1) + "\n")
        console.print(f"kept in {FIGURES}")
    raise typer.Exit(int(bool(worse) and not rewrite))


def cases() -> list[str]:
    """Return the names of all cases: a step, a share of its bytes, and a link."""
    return [f"{step} {share} {link}" for step in STEPS for share in SHARES for link in LINKS]


def read() -> dict[str, Figures]:
    """Return the kept figures by case."""
    return {case: Figures(**facts) for case, facts in json.loads(FIGURES.read_text()).items()}


def planned(case: str) -> Figures:
    """Plan a case without a time limit, and return its figures."""
    trace, machine = problem(case)
    result = make_plan(trace, machine)
    return _figures(trace, machine, result.plan, result.lower_bound, result.gap)


def forecast_again(case: str, kept: Figures) -> Figures:
    """Return the figures of the kept plan, as the present code forecasts it."""
    trace, machine = problem(case)
    return _figures(trace, machine, parse_plan("\n".join(kept.decisions)), kept.bound_us, kept.gap)


def problem(case: str) -> tuple[Trace, Machine]:
    """Return the step of a case, and the machine with its budget."""
    step, share, link = case.split()
    trace = parse((FOLDER / f"{step}.txt").read_text())
    machine = Machine(1 << 62, device="cuda", tier="host", link=LINKS[link])
    return trace, Machine(
        int(float(share) * predict(trace, machine).peak), device="cuda", tier="host", link=LINKS[link]
    )


def complaints(case: str, kept: Figures, found: Figures) -> Iterator[str]:
    """Yield a line for each figure that is worse than the kept one, or changed though it may not."""
    again = forecast_again(case, kept)
    for name in ("peak", "us", "moved", "recomputed_us"):
        old, new = getattr(kept, name), getattr(again, name)
        if old != new:
            yield f"{case}: the kept plan was forecast with {name} {old}, and is with {new}"
    if found.peak > found.budget:
        yield f"{case}: the plan needs {found.peak} of {found.budget} bytes"
    if found.us > kept.us * (1 + SLACK):
        yield f"{case}: the plan takes {found.us:.1f} us, {found.us / kept.us - 1:+.2%} on the kept {kept.us:.1f}"
    if found.bound_us < kept.bound_us * (1 - SLACK):
        yield f"{case}: {found.bound_us:.1f} us are proven, and {kept.bound_us:.1f} were"


def table(kept: dict[str, Figures], found: dict[str, Figures]) -> Table:
    """Return figures before and now, where both are equal once."""
    names = ("peak", "us", "moved", "recomputed_us", "bound_us", "gap", "decisions")
    rows = Table("case", *names, title="before -> now, bytes and microseconds", title_justify="left", box=None)
    for case, new in found.items():
        old = kept.get(case, new)
        rows.add_row(case, *(_change(name, getattr(old, name), getattr(new, name)) for name in names))
    return rows


def _change(name: str, old: Any, new: Any) -> str:
    shown = [
        f"{len(each)}" if name == "decisions" else f"{each:.4f}" if name == "gap" else f"{each:.0f}"
        for each in (old, new)
    ]
    return shown[0] if shown[0] == shown[1] else " -> ".join(shown)


def _figures(trace: Trace, machine: Machine, plan: Plan, bound_us: float, gap: float) -> Figures:
    forecast = predict(apply(trace, plan), machine)
    moved = sum(trace.op[each.value].nbytes for each in plan if isinstance(each, Offload | Stream))
    again = sum(trace.op[each.value].us for each in plan if isinstance(each, Recompute))
    return Figures(machine.budget, forecast.peak, forecast.us, moved, again, bound_us, gap, list(map(str, plan)))


def _capture() -> None:
    """Write the steps again."""
    import torch  # here, because planning needs none

    from benchmarks import graphs, nets

    image = partial(torch.empty, 16, 3, 128, 128, dtype=torch.bfloat16)
    tokens, classes = (partial(torch.zeros, *shape, dtype=torch.long) for shape in ((4, 512), (16,)))
    made = {
        "gpt": graphs.Graph(partial(nets.GPT, nets.Size(4, 512, 8, context=512)), lambda: (tokens(), tokens())),
        "llama": graphs.Graph(
            partial(nets.GPT, nets.Size(3, 512, 8, context=512, gated=True)), lambda: (tokens(), tokens())
        ),
        "unet": graphs.Graph(nets.UNet, lambda: (image(), image())),
        "resnet": graphs.Graph(nets.ResNet, lambda: (image(), classes())),
    }
    for name, graph in made.items():
        graphs.GRAPHS[name] = graph
        (FOLDER / f"{name}.txt").write_text(str(graphs.trace_of(name)))


if __name__ == "__main__":
    typer.run(main)
