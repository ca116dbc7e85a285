"""`memgraph.pipeline`: a model in stages, one on each rank, each within its budget.

pipe = memgraph.pipeline(model, budget="8GB", chunks=8)    the same call on each rank
loss = pipe.step(input_ids=ids, labels=ids)                gradients of the rank's stage are in `.grad`
"""

from __future__ import annotations

import json
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn, optim

from ..capture.capture import operands
from ..errors import MemgraphError
from ..guards.module_attributes import AttributeGuard
from ..guards.module_proxy import WithLoss
from ..guards.signature import signature
from ..oss.comm.agreement import report_errors
from ..tensors.pytree import flatten
from .arguments import Budgets, PipelineArguments, checked
from .chunks import Arguments, batch_nbytes, call_lines, chunked, mode_lines
from .cutter import Cutter
from .planned_stage import PlannedStage, input_names
from .shared_parameters import SharedGradients, make_gradients
from .stage_cut import StageCut
from .stage_group import ADVICE, StageGroup
from .stage_runs import Named, StageRuns
from .stage_state_dict import full_state_dict, load_own, own_state_dict
from .stage_tensors import all_tensors, give_memory, release_others, warn_unwritten
from .stage_updates import MakeOptimizer, StageUpdates
from .whole_step import whole_step

PLANNING = "the planning of the stages"


def pipeline(
    model: nn.Module, budget: Budgets = None, chunks: int = 8,
    group: dist.ProcessGroup | None = None, schedule: str = "1f1b", loss: Callable[..., Any] | None = None,
    balance: Sequence[int] | None = None, optimizer: MakeOptimizer | None = None,
) -> Pipeline:  # fmt: skip
    """Return a pipeline that trains `model` in as many stages as the group has ranks.

        pipe = memgraph.pipeline(model, budget="8GB", chunks=8, optimizer=torch.optim.AdamW)
        for ids in batches:
            loss = pipe.step(input_ids=ids, labels=ids)  # None but on the last rank
            pipe.optimizer.step()
            pipe.optimizer.zero_grad()
        state = pipe.full_state_dict()  # on rank 0

    Every rank makes the same call with the same model and gives each step the same mini-batch. The first step captures
    the model for one micro-batch, cuts it between any two ops so that the slowest stage is as fast as can be, and plans
    each stage within its budget. Then a rank keeps the parameters and buffers of its own stage, and the others are
    moved to the meta device.

    Args:
        model: a module on the CPU, or on the meta device; then `load_state_dict` gives each rank its values.
        budget: bytes of each rank for its stage's parameters, the mini-batch, gradients, activations, messages and the
            optimizer's states; one for all, or a list of one for each rank. None is what is free on a rank, so give
            numbers where several ranks are on one device.
        chunks: the number of micro-batches; the rows of a mini-batch are a multiple of it.
        group: the ranks; None for the default group, or for this process alone if there is none.
        schedule: "1f1b" or "gpipe".
        loss: becomes part of the step: it is called with the model's result, and with `target=` if a step has one.
        balance: where each stage begins, as the number of an op, instead of the best cut.
        optimizer: makes an optimizer from a list of parameters, as `torch.optim.AdamW` or a `functools.partial` of it
            does. It is called with all parameters, to measure its states, and then with those of the stage.

    Raises:
        TypeError, ValueError: an argument can't be used.
        AgreementError: another rank was given something else.
    """
    stages = StageGroup(group)
    given = checked(stages, model, budget, chunks, schedule, balance)
    return Pipeline(model if loss is None else WithLoss(model, loss), stages, given, optimizer)


class Pipeline:
    """A model in stages. Each rank runs one of them, and has its parameters and their gradients.

    Attributes:
        optimizer: of the stage's parameters, once the stages are cut; None if none was asked for, or there are none.
    """

    optimizer: optim.Optimizer | None = None

    def __init__(
        self, module: nn.Module, group: StageGroup, given: PipelineArguments, make: MakeOptimizer | None
    ) -> None:
        self.module, self.group, self.given = module, group, given
        self._make = make
        self._owned: tuple[frozenset[str], ...] = ()  # names of the tensors of each stage
        self._versions: dict[str, int] = {}  # of tensors that were on the meta device
        self._stage: PlannedStage | None = None
        self._key: Hashable = None  # of the calls that the stage is planned for
        self._attributes = AttributeGuard(module)
        self._failed = False

    def prepare(self, *args: Any, **kwargs: Any) -> None:
        """Capture, cut and plan for mini-batches like this one, without a step; raises as `step`."""
        self._agree(args, kwargs)
        if self._stage is None:
            stage = self._planned(args, kwargs)
            self._owned = stage.cut.owned(all_tensors(self.module))
            release_others(self.module, self._owned[self.group.rank])
            self.optimizer = StageUpdates(self.module, self._make).optimizer(dict.fromkeys(stage.gradients))
            self._stage, self._key = stage, self._call_key(args, kwargs)

    def step(self, *args: Any, **kwargs: Any) -> Tensor | None:
        """Run forward and backward of a mini-batch, and add to the gradients of this rank's stage.

        Gradients are those of the mean loss of the micro-batches.

        Returns:
            The mean loss on the rank that computes it, which is the last one; None on the others.

        Raises:
            ValueError: the mini-batch can't be divided, or differs in kind from the first one.
            AgreementError: another rank was given another mini-batch, or can't go on.
            BudgetError: no plan fits the budget of some stage; on all ranks, before the first step.
            CaptureError: the model can't be captured, or can't be cut.
            CollectiveError: another rank has ended or stopped.
            MemgraphError: an earlier step has failed.
        """
        self.prepare(*args, **kwargs)
        assert self._stage is not None
        if self._versions:
            warn_unwritten(self.module, self._owned[self.group.rank], self._versions)
            self._versions = {}
        try:
            with self.group.ending_together():
                return self._run(self._stage, args, kwargs)
        except BaseException:
            self._failed = True
            raise

    __call__ = step

    @property
    def peak(self) -> int:
        """The forecast bytes of this rank."""
        return self._prepared.peak

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield the parameters that this rank's stage makes gradients of."""
        known = dict(self.module.named_parameters())
        yield from ((name, known[name]) for name in dict.fromkeys(self._prepared.gradients))

    def parameters(self) -> Iterator[nn.Parameter]:
        """Yield the parameters that this rank's stage makes gradients of."""
        yield from (parameter for _, parameter in self.named_parameters())

    def state_dict(self) -> dict[str, Any]:
        """Return the entries of the model's state dict that this rank has."""
        return own_state_dict(self._trained_module)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Copy what this rank has out of a state dict of the whole model, which may be read lazily.

        Raises:
            StateError: an entry is missing or has another shape; nothing was changed.
        """
        load_own(self._trained_module, state)

    def full_state_dict(self) -> dict[str, Any]:
        """Return the state dict of the whole model on rank 0, and an empty one on others; all ranks call it.

        Raises:
            CollectiveError: another rank has ended or stopped.
        """
        with self.group.ending_together():
            return full_state_dict(self._trained_module, self.group, self._owned)

    @property
    def _trained_module(self) -> nn.Module:
        """The module as the caller gave it, without a loss around it."""
        assert self._prepared
        return self.module._module if isinstance(self.module, WithLoss) else self.module

    @property
    def _prepared(self) -> PlannedStage:
        if self._stage is None:
            raise MemgraphError("the stages are cut in the first step; call prepare() with a mini-batch before")
        return self._stage

    def _agree(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Check that this step can run, on all ranks."""
        if self._failed:
            raise MemgraphError("an earlier step of this pipeline has failed; start again with a new process group")
        with self._reporting():
            kind, values = self._described(args, kwargs)
            if not torch.is_grad_enabled():
                raise ValueError("a step of a pipeline trains, and gradients are disabled here")
            if self._stage is not None and self._call_key(args, kwargs) != self._key:
                raise ValueError(
                    "a step of a pipeline is like the first one: this one has other shapes, types or strides in the "
                    "mini-batch, or the model has other modes or attributes; make a new pipeline"
                )
            chunked(args, kwargs, self.given.chunks)
        self.group.check_agreement([f"{PLANNING}: none failed", *kind, *values])

    def _call_key(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Hashable:
        leaves, spec = flatten((args, kwargs))
        owned = [*self.module.parameters(), *self.module.buffers()]
        return signature(self.module, owned, spec, leaves, self._attributes)

    def _described(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[str], list[str]]:
        kind, values = call_lines(args, kwargs)
        return [*kind, *mode_lines(self.module)], values

    def _planned(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> PlannedStage:
        """Return the stage of this rank, once all ranks have one."""
        first = chunked(args, kwargs, self.given.chunks)[0]
        with self._reporting():
            self._versions |= give_memory(self.module)
            updates = StageUpdates(self.module, self._make)
            step = whole_step(self.module, *first)
            lines = [*step.ops, *updates.lines()]
        self.group.check_agreement([f"{PLANNING}: none failed", *lines])
        times = self.group.share(json.dumps([op.us for op in step.trace.ops]).encode(), "exchange of times")
        step = step.with_times(json.loads(times[0]))
        cutter = Cutter(self.module, step, self.group, self.given, batch_nbytes(args, kwargs), updates)
        with self._reporting():
            found = cutter.begins() if self.group.rank == 0 else ()
        self.group.check_agreement([f"{PLANNING}: none failed"])
        own = json.dumps([isinstance(found, tuple), found]).encode()
        fits, numbers = json.loads(self.group.share(own, "exchange of the cut")[0])
        if not fits:
            raise cutter.budget_error(numbers)
        return cutter.planned(StageCut(step, tuple(numbers)))

    @contextmanager
    def _reporting(self) -> Iterator[None]:
        """Raise this rank's error, and an AgreementError on the others."""
        if self.group.watchdog is None:
            yield
            return
        with report_errors(self.group.watchdog, PLANNING, ADVICE):
            yield

    def _run(self, stage: PlannedStage, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | None:
        parameters: Named = dict(self.module.named_parameters())
        shared = SharedGradients(self.group, parameters, stage.cut.owners)
        shared.begin()
        make_gradients(parameters, stage.gradients)
        names = input_names(stage.cut.step.captured)
        chunks = [self._named(names, each) for each in chunked(args, kwargs, self.given.chunks)]
        runs = StageRuns(self.group, stage, parameters, chunks)
        runs.run()
        shared.finish()
        return torch.stack(runs.losses).mean() if runs.losses else None

    def _named(self, names: Sequence[str], chunk: Arguments) -> Named:
        return dict(zip(names, (each.detach() for each in operands(self.module, *chunk)), strict=False))
