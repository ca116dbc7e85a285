"""The arguments of a pipeline, checked on each rank and compared between ranks.

chunks=0 on rank 1    ->    ValueError on rank 1, AgreementError on the others
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn

from ..oss.comm.agreement import parameter_lines, report_errors
from ..system.byte_sizes import budget_nbytes
from ..system.device import device_of
from .action_order import SCHEDULES, StageOrder
from .stage_group import ADVICE, StageGroup
from .stage_tensors import all_tensors

SUBJECT = "the arguments of the pipeline"
Budget = str | int | float | None
Budgets = Budget | list[Budget] | tuple[Budget, ...]


@dataclass(frozen=True)
class PipelineArguments:
    """Arguments that fit the group; `budgets` has the bytes of each stage."""

    budgets: tuple[int, ...]
    chunks: int
    schedule: str
    balance: tuple[int, ...] | None

    def order(self, stage: int) -> StageOrder:
        """Return the order in which a stage runs as many micro-batches as are asked for."""
        return StageOrder(self.schedule, stage, len(self.budgets), self.chunks)


def checked(
    group: StageGroup, model: nn.Module, budget: Budgets, chunks: int, schedule: str,
    balance: Sequence[int] | None,
) -> PipelineArguments:  # fmt: skip
    """Return the arguments, which are the same on all ranks.

    Raises:
        TypeError, ValueError: an argument can't be used.
        AgreementError: another rank was given something else, or can't use its arguments.
    """
    if group.watchdog is None:
        return _parsed(group, model, budget, chunks, schedule, balance)
    with report_errors(group.watchdog, SUBJECT, ADVICE):
        parsed = _parsed(group, model, budget, chunks, schedule, balance)
    owned = [*model.parameters(), *model.buffers()]
    described = parameter_lines(type(model).__qualname__, [{"params": owned}])
    # A share of the memory, or what is free of it, is another number of bytes on each rank.
    given = zip(_of_each(budget, group.stages), parsed.budgets, strict=True)
    fixed = [nbytes if isinstance(each, str | int) else each for each, nbytes in given]
    others = f"chunks={chunks}, schedule={schedule!r}, balance={parsed.balance}"
    group.check_agreement([f"{SUBJECT}: budget={fixed}, {others}", *described])
    texts = group.share(json.dumps(parsed.budgets).encode(), "exchange of budgets")
    return replace(parsed, budgets=tuple(json.loads(text)[rank] for rank, text in enumerate(texts)))


def _parsed(
    group: StageGroup, model: nn.Module, budget: Budgets, chunks: int, schedule: str,
    balance: Sequence[int] | None,
) -> PipelineArguments:  # fmt: skip
    if not isinstance(model, nn.Module):
        raise TypeError(f"model is a {type(model).__name__}; give a torch.nn.Module")
    if isinstance(chunks, bool) or not isinstance(chunks, int) or chunks < 1:
        raise ValueError(f"chunks={chunks!r}; give the number of micro-batches, 1 for the whole mini-batch")
    if schedule not in SCHEDULES:
        raise ValueError(f"schedule={schedule!r}; give one of {', '.join(map(repr, SCHEDULES))}")
    meta = sum(tensor.is_meta for tensor in all_tensors(model).values())
    if 0 < meta < len(all_tensors(model)):
        raise ValueError(
            f"{meta} of {len(all_tensors(model))} parameters and buffers of the model are on the meta device, as in a "
            "model that is in stages already; make a new one"
        )
    device = device_of_model(model)
    if device.type != "cpu":
        raise ValueError(f"the model is on {device}, and pipelines are built for the CPU so far")
    budgets = _of_each(budget, group.stages)
    if len(budgets) != group.stages:
        raise ValueError(
            f"{len(budgets)} budgets are given for {group.stages} stages; give one for each rank, or one for all"
        )
    if balance is not None and len(balance) != group.stages:
        raise ValueError(
            f"balance has {len(balance)} entries for {group.stages} stages; give where each of them begins"
        )
    nbytes = tuple(budget_nbytes(each, device) for each in budgets)
    return PipelineArguments(nbytes, chunks, schedule, None if balance is None else tuple(balance))


def _of_each(budget: Budgets, stages: int) -> list[Budget]:
    return [*budget] if isinstance(budget, list | tuple) else [budget] * stages


def device_of_model(model: nn.Module) -> torch.device:
    """Return the device of what is not on the meta device."""
    return device_of(tensor for tensor in (*model.parameters(), *model.buffers()) if not tensor.is_meta)
