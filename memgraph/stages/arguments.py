"""The arguments of a pipeline, checked on each rank and compared between ranks.

chunks=0 on rank 1    ->    ValueError on rank 1, AgreementError on the others
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from passes.stages.pipeline_schedule import SCHEDULES, PipelineSchedule

from ..guards.module_proxy import ModuleProxy
from ..options.argument_rules import check_argument
from ..oss.comm.agreement import describe, report_errors
from ..storage.spill_file import Folder, require_writable
from ..storage.tiers import tier_names
from ..system.byte_sizes import budget_nbytes
from ..system.device import device_of
from .chunks import MicroBatch, chunked
from .ranks.stage_group import ADVICE, StageGroup
from .state.deferred_batch_norm import refuse_others
from .state.stage_tensors import all_tensors

SUBJECT = "the arguments of the pipeline"
AUTO = "auto"
CHECKPOINTS = ("auto", "always", "except_last", "never")
FUNCTIONS = {
    "loss": "a function of the model's result, and of target= if a step has one",
    "optimizer": "a function that makes one from parameters, as torch.optim.AdamW or a functools.partial of it",
}
Budget = str | int | float | None
Budgets = Budget | Sequence[Budget]


@dataclass(frozen=True)
class PipelineArguments:
    """Arguments that fit the group.

    Attributes:
        budgets: the bytes of each rank.
        balance: where each stage begins.
        replicated: names or positions of arguments that are not divided.
        offload: the tier that values may go to; None if they stay.
        spill_dir: its folder.
        time_limit: seconds of planning; None for the default.
        delay: of zero_bubble, at most.
        runs_ahead: a rank goes on while its newest message waits.
    """

    budgets: tuple[int, ...]
    chunks: int
    schedule: str
    balance: tuple[int, ...] | None
    stages_per_rank: int = 1
    checkpoint: str = "auto"
    replicated: tuple[str | int, ...] = ()
    offload: str | None = None
    spill_dir: Folder = None
    time_limit: float | None = None
    delay: int = 0
    runs_ahead: bool = True

    @property
    def candidates(self) -> tuple[tuple[PipelineArguments, ...], ...]:
        """Return the arguments for each schedule that may be chosen, those that need less memory later."""
        if self.schedule == AUTO:
            several = self.balance is None and len(self.budgets) > 1
            names = ("1f1b", "zero_bubble", *(("interleaved",) if several else ()))
            chosen = (self.choosing(name, default_stages_per_rank(name)) for name in names)
            return tuple(chain for each in chosen for chain in each.candidates)
        if self.schedule == "zero_bubble":
            most = min(len(self.budgets), self.chunks) - 1
            return (tuple(replace(self, delay=delay) for delay in range(most, -1, -1)),)
        return ((self,),)

    def choosing(self, schedule: str, stages_per_rank: int, delay: int = 0) -> PipelineArguments:
        return replace(self, schedule=schedule, stages_per_rank=stages_per_rank, delay=delay)

    @property
    def smallest(self) -> PipelineArguments:
        """Return the arguments with which the schedule takes the fewest bytes."""
        return replace(self, delay=0, runs_ahead=False)

    @property
    def stages(self) -> int:
        return len(self.budgets) * self.stages_per_rank

    def stage_budgets(self, share: float = 1.0) -> list[int]:
        """Return the bytes of each stage, if it may take this share of its rank's budget."""
        return [int(share * each) for each in self.budgets] * self.stages_per_rank

    def divided(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[MicroBatch]:
        """Return the micro-batches of a mini-batch.

        Raises:
            ValueError: its tensors can't be divided.
        """
        return chunked(args, kwargs, self.chunks, self.replicated)

    def order(self, chunks: int) -> PipelineSchedule:
        """Return the order in which the ranks run so many micro-batches."""
        ranks = len(self.budgets)
        return PipelineSchedule(self.schedule, ranks, chunks, self.stages_per_rank, self.delay, self.runs_ahead)


@dataclass(frozen=True)
class GivenArguments:
    """The arguments of a pipeline as they were given; `functions` are those that it calls, or None."""

    budget: Budgets
    chunks: int
    schedule: str
    balance: Sequence[int] | None
    stages_per_rank: int
    checkpoint: str
    deferred_batch_norm: bool
    replicated: Sequence[str | int]
    offload: str | None
    spill_dir: Folder = field(repr=False)  # each rank may have its own
    time_limit: float | None
    functions: Mapping[str, object] = field(repr=False)

    def checked(self, group: StageGroup, model: nn.Module) -> PipelineArguments:
        """Return the arguments, which are the same on all ranks.

        Raises:
            TypeError, ValueError: an argument can't be used.
            AgreementError: another rank was given something else, or can't use its arguments.
        """
        if group.watchdog is None:
            return self._parsed(group, model)
        with report_errors(group.watchdog, SUBJECT, ADVICE):
            parsed = self._parsed(group, model)
        described = [f"the class of the model: {type(model).__qualname__}"]
        described += [f"parameter {name} of the model: {describe(each)}" for name, each in model.named_parameters()]
        described += [f"buffer {name} of the model: {describe(each)}" for name, each in model.named_buffers()]
        # A share of the memory, or what is free of it, is another number of bytes on each rank.
        given = zip(_of_each(self.budget, group.ranks), parsed.budgets, strict=True)
        fixed = [nbytes if isinstance(each, str | int) else each for each, nbytes in given]
        group.check_agreement([f"{SUBJECT}: {replace(self, budget=None)}, budgets {fixed}", *described])
        texts = group.share(json.dumps(parsed.budgets).encode(), "exchange of budgets")
        return replace(parsed, budgets=tuple(json.loads(text)[rank] for rank, text in enumerate(texts)))

    def _parsed(self, group: StageGroup, model: nn.Module) -> PipelineArguments:
        if not isinstance(model, nn.Module):
            raise TypeError(f"model is a {type(model).__name__}; give a torch.nn.Module")
        _refuse_modules(model, self.functions["loss"])
        for name, function in self.functions.items():
            if function is not None and not callable(function):
                raise TypeError(f"{name} is a {type(function).__name__}; give {FUNCTIONS[name]}")
        for name, number in (("chunks", self.chunks), ("stages_per_rank", self.stages_per_rank)):
            if isinstance(number, bool) or not isinstance(number, int) or number < 1:
                raise ValueError(f"{name}={number!r}; give an integer of at least 1")
        schedules = (*SCHEDULES, AUTO)
        for name, word, words in (("schedule", self.schedule, schedules), ("checkpoint", self.checkpoint, CHECKPOINTS)):
            if word not in words:
                raise ValueError(f"{name}={word!r}; give one of {', '.join(map(repr, words))}")
        if self.stages_per_rank > 1 and self.schedule != "interleaved":
            raise ValueError(
                f"stages_per_rank={self.stages_per_rank} with schedule={self.schedule!r}; several stages on a rank "
                "take schedule='interleaved'"
            )
        offload, spill_dir = (
            check_argument(name, value) for name, value in (("offload", self.offload), ("spill_dir", self.spill_dir))
        )
        time_limit = check_argument("time_limit", self.time_limit)
        if spill_dir is not None:
            require_writable(spill_dir)
        meta = sum(tensor.is_meta for tensor in all_tensors(model).values())
        if 0 < meta < len(all_tensors(model)):
            raise ValueError(
                f"{meta} of {len(all_tensors(model))} parameters and buffers of the model are on the meta device, as "
                "in a model that is in stages already; make a new one"
            )
        if self.deferred_batch_norm:
            refuse_others(model)
        device = device_of_model(model)
        if device.type != "cpu":
            raise ValueError(f"the model is on {device}, and pipelines are built for the CPU so far")
        budgets = _of_each(self.budget, group.ranks)
        if len(budgets) != group.ranks:
            raise ValueError(
                f"{len(budgets)} budgets are given for {group.ranks} ranks; give one for each rank, or one for all"
            )
        begins = self._begins(group.ranks * self.stages_per_rank)
        nbytes = tuple(budget_nbytes(each, device) for each in budgets)
        return PipelineArguments(
            nbytes,
            self.chunks,
            self.schedule,
            begins,
            self.stages_per_rank,
            self.checkpoint,
            self._replicated(model),
            next(iter(tier_names(offload, device)), None),
            spill_dir,
            time_limit,
        )

    def _begins(self, stages: int) -> tuple[int, ...] | None:
        """
        Raises:
            TypeError, ValueError: `balance` is not one number for each stage.
        """
        balance: object = self.balance
        if balance is None:
            return None
        if not isinstance(balance, list | tuple) or any(type(each) is not int for each in balance):
            raise TypeError(f"balance={balance!r}; give a list of integers, the op at which each stage begins")
        if len(balance) != stages:
            raise ValueError(f"balance has {len(balance)} entries for {stages} stages; give where each of them begins")
        return tuple(balance)

    def _replicated(self, model: nn.Module) -> tuple[str | int, ...]:
        """
        Raises:
            TypeError, ValueError: it names no argument of the model.
        """
        replicated = (self.replicated,) if isinstance(self.replicated, str | int) else tuple(self.replicated)
        if wrong := [each for each in replicated if not isinstance(each, str | int)]:
            raise TypeError(f"replicated has {wrong[0]!r}; give names or positions of arguments")
        known = inspect.signature(model.forward).parameters
        if not any(each.kind is each.VAR_KEYWORD for each in known.values()):
            names = [*known, *(("target",) if self.functions["loss"] is not None else ())]
            if unknown := [each for each in replicated if isinstance(each, str) and each not in names]:
                raise ValueError(
                    f"replicated has {unknown[0]!r}, and forward of {type(model).__qualname__} takes "
                    f"{', '.join(names)}; give names of these"
                )
        return replicated


def _refuse_modules(model: nn.Module, loss: object) -> None:
    """
    Raises:
        TypeError, ValueError: a compiled module is given, or a loss that has to be trained.
    """
    compiled = [name for name, each in model.named_modules() if issubclass(type(each), ModuleProxy)]
    if compiled:
        name = f"model.{compiled[0]}" if compiled[0] else "model"
        raise TypeError(f"{name} is compiled already; a pipeline takes the plain module that it was made of")
    if isinstance(loss, nn.Module) and (names := [name for name, _ in loss.named_parameters()]):
        raise ValueError(
            f"loss has parameters, as {names[0]}, which no stage would train; give a module that has both the "
            "model and the loss, and returns the loss"
        )


def default_stages_per_rank(schedule: str) -> int:
    return 2 if schedule == "interleaved" else 1


def _of_each(budget: Budgets, stages: int) -> list[Budget]:
    if budget is None or isinstance(budget, str | int | float):
        return [budget] * stages
    return [*budget]


def device_of_model(model: nn.Module) -> torch.device:
    """Return the device of what is not on the meta device."""
    return device_of(tensor for tensor in (*model.parameters(), *model.buffers()) if not tensor.is_meta)
