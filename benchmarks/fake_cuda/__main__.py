"""A row for each model: captured as CUDA would dispatch it, priced by roofline, planned, rewritten, checked.

    python -m benchmarks.fake_cuda [--only NAME ...] [--device h200]

    model           ops  peak MB  planned MB  decisions  law  mixed  writes  s
    gpt2            354      6.1         4.4         57  yes      0       0  1.7
    ...

No kernel runs, so there is neither a time nor a value of a GPU in it. What it can't capture without values of tensors
is listed with the reason. It ends with the ops that only CUDA has, those that only the CPU has, what lies on the host,
and what has a workspace that no profile names. The status is 1 if a check fails.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
import warnings
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from tempfile import TemporaryDirectory

import torch

from benchmarks.fake_cuda import op_checks
from benchmarks.fake_cuda.described_device import NoDescribedDeviceError, environment, is_described
from benchmarks.fake_cuda.models import Subject, left_out_libraries, subjects
from benchmarks.fake_cuda.planned_step import PlannedStep, captured, planned_step
from memgraph.errors import MemgraphError
from memgraph.fit.device_profile import DeviceProfile, read_profile
from memgraph.system.device import CPU
from passes import predict

COLUMNS = ("model", "ops", "peak MB", "planned MB", "decisions", "law", "mixed", "writes", "s")


@dataclass
class Found:
    """The findings of all rows; ops with the number of models that have them."""

    seen: int = 0
    refused: list[str] = field(default_factory=list)
    broken: list[str] = field(default_factory=list)
    gpu_only: Counter[str] = field(default_factory=Counter)
    cpu_only: Counter[str] = field(default_factory=Counter)
    host: Counter[str] = field(default_factory=Counter)
    writes: Counter[str] = field(default_factory=Counter)
    workspaces: Counter[str] = field(default_factory=Counter)

    def add(self, planned: PlannedStep) -> None:
        """Count what the step of one model has."""
        title, graph = planned.subject.title, planned.step.graph
        self.host.update(op_checks.host_results(graph).keys())
        self.writes.update(op_checks.writes(graph).keys())
        self.workspaces.update(op_checks.unknown_workspaces(graph, planned.prices).keys())
        if not planned.law_holds:
            self.broken.append(f"{title}: the rewritten graph is not what the applied text says")
        wrong = op_checks.mixed_devices(planned.graph) + op_checks.repeated_writes(planned.trace, planned.graph)
        self.broken += [f"{title}: {each}" for each in dict.fromkeys(wrong)]

    def compare(self, subject: Subject, planned: PlannedStep) -> None:
        """Count the ops in which the step differs from the same step on a CPU."""
        ours = op_checks.op_names(planned.step.graph)
        theirs = op_checks.op_names(captured(subject, CPU).graph)
        self.gpu_only.update(ours.keys() - theirs.keys())
        self.cpu_only.update(theirs.keys() - ours.keys())


def main() -> int:
    """Print the table; return the exit status."""
    arguments = _arguments()
    if not is_described():
        try:
            os.execve(sys.executable, [sys.executable, "-m", "benchmarks.fake_cuda", *sys.argv[1:]],
                      environment(arguments.device))  # fmt: skip
        except NoDescribedDeviceError as error:
            print(error)
            return 1
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    with TemporaryDirectory() as folder:
        os.environ["MEMGRAPH_CACHE"] = folder
        found = _rows(read_profile(arguments.device), lambda name: not arguments.only or name in arguments.only)
    _print_found(found)
    if arguments.only and not found.seen:
        print(f"there is no model named {' or '.join(arguments.only)}")
    return bool(found.broken) or not found.seen


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", nargs="*", default=(), help="models, as 'gpt2' or 'gpt2 bf16'")
    parser.add_argument("--device", default="h200", help="a profile of `memgraph fit`")
    return parser.parse_args()


def _rows(profile: DeviceProfile, wanted: object) -> Found:
    found = Found()
    print(f"torch {torch.__version__}, {torch.cuda.get_device_name()} as described; nothing ran on a GPU")
    if left_out := left_out_libraries():
        print("not installed, and left out with their architectures: " + ", ".join(left_out))
    print("".join(f"{name:>{_width(name)}}" for name in COLUMNS))
    for subject in subjects(wanted):  # type: ignore[arg-type]
        began = time.perf_counter()
        found.seen += 1
        try:
            planned = planned_step(subject, profile)
            found.add(planned)
            found.compare(subject, planned)
        except (MemgraphError, ImportError, torch.AcceleratorError) as error:  # the last: an op would run for its value
            found.refused.append(f"{subject.title}: {_line(error)}")
        except Exception as error:
            found.broken.append(f"{subject.title}: {_line(error)}")
        else:
            _print_row(planned, profile, time.perf_counter() - began)
    return found


def _print_row(planned: PlannedStep, profile: DeviceProfile, seconds: float) -> None:
    peak = predict(planned.trace, profile.machine(1 << 60)).peak
    cells = (
        planned.subject.title, len(planned.trace.ops), f"{peak / 1e6:.2f}",
        f"{planned.result.forecast.peak / 1e6:.2f}", len(planned.result.plan), "yes" if planned.law_holds else "NO",
        len(op_checks.mixed_devices(planned.graph)), sum(op_checks.writes(planned.step.graph).values()),
        f"{seconds:.1f}",
    )  # fmt: skip
    print("".join(f"{cell:>{_width(name)}}" for name, cell in zip(COLUMNS, cells, strict=True)), flush=True)


def _print_found(found: Found) -> None:
    _print_list("checks that fail", found.broken)
    _print_list("not captured, most of them for want of values of tensors", found.refused)
    for title, counts in (
        ("ops on CUDA alone, with the number of models", found.gpu_only),
        ("ops on the CPU alone", found.cpu_only),
        ("results on the host", found.host),
        ("ops that write to their inputs", found.writes),
        ("ops whose kernel allocates, with no workspace in the profile", found.workspaces),
    ):
        _print_list(title, [f"{count:4} {name}" for name, count in counts.most_common()])


def _print_list(title: str, lines: Iterable[str]) -> None:
    print(f"\n{title}:")
    for line in lines:
        print(f"  {line}")


def _width(name: str) -> int:
    return 30 if name == "model" else max(8, len(name) + 2)


def _line(error: BaseException) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:200]


if __name__ == "__main__":
    raise SystemExit(main())
