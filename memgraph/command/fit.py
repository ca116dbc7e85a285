"""Plan a step for a device that is not here, for a model that has no weights.

memgraph fit llama --device h200 --budget 24GB --dtype bfloat16
memgraph fit train.py:setup --device l4 --max batch
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable
from dataclasses import replace
from enum import StrEnum
from functools import partial
from typing import Annotated, Any

import torch
import typer

from ..fit.described_model import DescribedModel, ModelCall, config_model
from ..fit.device_profile import DeviceProfile, profile_names, read_profile
from ..fit.fit_result import FitResult
from ..fit.fitted_step import FittedStep, Fitting
from ..fit.heads import TEXT
from ..fit.largest import Largest, largest
from ..fit.other_sizes import guessed_trace
from ..report.report import Report
from ..system.device import HEADROOM
from .budget_option import budget_within
from .factory import load_factory, made_call
from .output import NewPlan, save, say, write
from .time_limit_option import Limit

SIZES = ("batch", "seq")


class Dtype(StrEnum):
    """The dtype of a configuration's parameters."""

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"


class Sought(StrEnum):
    """The size that is to be as large as fits."""

    BATCH = "batch"
    SEQ = "seq"


def fit(
    target: Annotated[str, typer.Argument(metavar="NAME_OR_FACTORY", help="a configuration, or FILE:FACTORY")],
    device: Annotated[str, typer.Option(help=f"{', '.join(profile_names())}, or a file of `doctor --profile`")],
    budget: Annotated[str | None, typer.Option(help='bytes, as "24GB"; by default what the device has')] = None,
    most: Annotated[Sought | None, typer.Option("--max", help="find the largest that fits")] = None,
    batch: Annotated[int | None, typer.Option(min=1, help="samples; 1 by default")] = None,
    seq: Annotated[
        int | None, typer.Option(min=2, help="tokens of a sample, 512 by default; of sound 160,000 samples")
    ] = None,
    step: Annotated[int | None, typer.Option(min=1, help="of --max: 1 of batch, 64 of seq")] = None,
    dtype: Annotated[Dtype, typer.Option(help="of a configuration's parameters")] = Dtype.FLOAT32,
    optimizer: Annotated[
        str, typer.Option(help="of a configuration's parameters: none, or a class of torch.optim")
    ] = "adamw",
    attention: Annotated[
        str | None, typer.Option(help="of a configuration of transformers: as eager or sdpa; by default its own")
    ] = None,
    lora: Annotated[int | None, typer.Option(min=1, help="the rank of adapters, which alone are trained")] = None,
    accumulate: Annotated[bool, typer.Option("--accumulate", help="the step adds to gradients")] = False,
    output: NewPlan = None,
    time_limit: Limit = None,
    as_json: Annotated[bool, typer.Option("--json", help="print JSON")] = False,
) -> int:
    """Plan a training step for a device that is not here, before anything is rented or downloaded.

    \b
        memgraph fit llama --device h200 --budget 24GB --dtype bfloat16
        memgraph fit my/config.json --device l4 --batch 4 --max seq
        memgraph fit train.py:setup --device rtx4090 --max batch

    A factory is called on the device "meta", with `batch` and `seq` if it has such parameters.

    \b
    Exit codes: 0 it fits, 3 it does not, 1 an error, 2 wrong usage, 130 interrupted.
    """
    if step is not None and most is None:
        raise typer.BadParameter("--step is the step of --max: give --max batch or --max seq as well")
    profile = _profile(device)
    allowed = _budget(budget, profile)
    say(f"loading {target}")
    given = {name: size for name, size in {"batch": batch, "seq": seq}.items() if size is not None}
    described = _described(target, partial(config_model, target, getattr(torch, dtype), optimizer, lora, attention))
    _refuse_unread(described, target, given, most)
    sized = _Sized(described, Fitting(profile, allowed, accumulate), {**described.sizes, **given})
    result = sized.planned(time_limit) if most is None else sized.largest(str(most), step)
    save(result.report, output)
    write(result, as_json)
    return 0


def _profile(device: str) -> DeviceProfile:
    try:
        return read_profile(device)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error


def _budget(given: str | None, profile: DeviceProfile) -> int:
    """Return the bytes of a budget; by default all that the device has but the headroom of a GPU."""
    if given is None:
        return profile.memory - (max(HEADROOM, profile.memory * 3 // 100) if profile.kind == "cuda" else 0)
    return budget_within(given, profile.memory, profile.title or profile.name)


def _described(target: str, of_config: Callable[[], DescribedModel]) -> DescribedModel:
    if re.fullmatch(r".+:\w+", target):
        factory = load_factory(target)
        takes = {name: TEXT[name] for name in SIZES if name in inspect.signature(factory).parameters}
        return DescribedModel(partial(_made, factory, [*takes], target), target, sizes=takes)
    try:
        return of_config()
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error


def _refuse_unread(described: DescribedModel, target: str, given: Iterable[str], most: Sought | None) -> None:
    """Refuse sizes on which the step does not depend."""
    asked = {name: f"--{name}" for name in given} | ({} if most is None else {str(most): f"--max {most}"})
    if unread := [option for name, option in asked.items() if name not in described.sizes]:
        of_factory = "the factory takes no such argument: add it to it"
        of_config = f"the sizes of {described.title} are those of its configuration"
        why = of_factory if described.title == target else of_config
        raise typer.BadParameter(f"{' and '.join(unread)} would change nothing, since {why}")


def _made(factory: Callable[..., Any], takes: list[str], target: str, batch: int, seq: int) -> ModelCall:
    given = {"batch": batch, "seq": seq}
    with torch.device("meta"):
        return made_call(factory(**{name: given[name] for name in takes}), target)


class _Sized:
    """Steps of one model by size."""

    def __init__(self, described: DescribedModel, fitting: Fitting, given: dict[str, int]) -> None:
        self.described, self.fitting, self.given = described, fitting, given
        self.known: dict[int, FittedStep] = {}

    def planned(self, seconds: float | None) -> FitResult:
        """Return the answer for the given sizes."""
        return self._result(self._captured(self.given).plan(seconds))

    def largest(self, sought: str, step: int | None) -> FitResult:
        """Return the answer for the largest batch or number of tokens that fits."""
        first, by = self.given[sought], step or (1 if sought == "batch" else 64)
        limit = self.described.longest if sought == "seq" else None

        def tried(size: int) -> Report:
            self.known[size] = self._captured({**self.given, sought: size})
            return self.known[size].smallest_plan()

        def likely(size: int) -> bool:
            say(f"guessing whether {sought} {size} fits")
            return self._is_likely(size)

        found = largest(tried, likely, first, by, limit)
        self.given = {**self.given, sought: found.size}
        return self._result(found.report, sought, found)

    def _is_likely(self, size: int) -> bool:
        """Guess whether a size fits; without a guess, where a step is not known, it does not."""
        steps = self.known
        while steps:
            trace = guessed_trace({known: step.trace for known, step in steps.items()}, size)
            if trace is not None and replace(next(iter(steps.values())), trace=trace).is_likely_to_fit():
                return True
            steps = {known: step.finer.known for known, step in steps.items() if step.finer and step.finer.known}
        return False

    def _call(self, sizes: dict[str, int]) -> ModelCall:
        return self.described.call(sizes.get("batch", 1), sizes.get("seq", 1))

    def _captured(self, sizes: dict[str, int]) -> FittedStep:
        say(f"capturing {', '.join(f'{name} {size}' for name, size in sizes.items())}")
        return self.fitting(self._call(sizes))

    def _result(self, report: Report, sought: str = "", found: Largest | None = None) -> FitResult:
        count = sum(parameter.numel() for parameter in self._call(self.given).model.parameters())
        sizes = {name: size for name, size in self.given.items() if name in self.described.sizes}
        given = (self.described.title, count, sizes, self.fitting.profile, self.fitting.budget)
        return FitResult(report, *given, sought, found)
