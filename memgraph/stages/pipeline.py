"""`memgraph.pipeline`: a model in stages, one on each rank, each within its budget.

pipe = memgraph.pipeline(model, budget="8GB", chunks=8)    the same call on each rank
loss = pipe.step(input_ids=ids, labels=ids)                gradients of the rank's stage are in `.grad`
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from os import PathLike
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor, nn, optim

from ..errors import MemgraphError
from ..guards.module_proxy import WithLoss
from ..oss.checkpoint.training_folder import TrainingFolder, own_state_dict
from .arguments import Budgets, GivenArguments, PipelineArguments, default_stages_per_rank
from .chunks import call_lines, mode_lines
from .first_cut import FirstCut
from .mini_batch import kept_tensors, measured, run_mini_batch
from .mini_batch_plan import KeptPlans, MiniBatchPlan
from .pipeline_report import PipelineReport
from .ranks.stage_group import PLANNING, StageGroup
from .stage_plans import StagePlans
from .stage_runs import ActionTimes, StageRuns
from .state.clip_norm import clip_stages
from .state.deferred_batch_norm import begin_mini_batch, defer_batch_norm
from .state.stage_checkpoint import stage_folder
from .state.stage_state_dict import full_state_dict, load_files, load_own
from .state.stage_tensors import all_tensors, as_in_training, give_memory, release_others, warn_unwritten
from .state.stage_updates import MakeOptimizer, StageUpdates, end_together, kept_states

MEASURED = 2  # runs of each plan
Target = str | PathLike[str]


def pipeline(
    model: nn.Module, budget: Budgets = None, chunks: int = 8,
    group: dist.ProcessGroup | None = None, schedule: str = "1f1b", loss: Callable[..., Any] | None = None,
    balance: Sequence[int] | None = None, optimizer: MakeOptimizer | None = None,
    checkpoint: str = "auto", stages_per_rank: int | None = None, deferred_batch_norm: bool = False,
    replicated: Sequence[str | int] = (), offload: str | None = "auto", spill_dir: str | PathLike[str] | None = None,
    time_limit: float | None = None,
) -> Pipeline:  # fmt: skip
    """Return a pipeline that trains `model` in stages, one on each rank of the group.

        pipe = memgraph.pipeline(model, budget="8GB", chunks=8, optimizer=torch.optim.AdamW)
        for ids in batches:
            loss = pipe.step(input_ids=ids, labels=ids)  # None but on the last rank
            pipe.optimizer.step()
            pipe.optimizer.zero_grad()
        state = pipe.full_state_dict()  # on rank 0

    Every rank makes the same call with the same model and gives each step the same mini-batch. The first step captures
    the model for one micro-batch, cuts it between any two ops so that the slowest stage is as fast as can be, and plans
    each stage within its budget. Then a rank keeps the parameters and buffers of its own stage, and the others are
    moved to the meta device. A mini-batch of another kind (other shapes, `model.eval()`, `torch.no_grad()`) is captured
    once as well, and runs in the stages that have its parameters.

    Args:
        model: a module on the CPU, or on the meta device; then `load_state_dict` gives each rank its values.
        budget: bytes of each rank for its stage's parameters, the mini-batch, gradients, activations, messages and the
            optimizer's states; one for all, or a list of one for each rank. None is what is free on a rank, so give
            numbers where several ranks are on one device.
        chunks: the most micro-batches of a mini-batch, which is divided as `torch.chunk` does.
        group: the ranks; None for the default group, or for this process alone if there is none.
        schedule: "1f1b"; "gpipe", which holds all micro-batches at once; "interleaved", with several stages on a rank;
            or "zero_bubble", which computes the gradients of parameters where the rank would wait. "auto" takes the
            one with the least forecast time.
        loss: becomes part of the step: it is called with the model's result, and with `target=` if a step has one.
        balance: where each stage begins, as the number of an op, instead of the best cut.
        optimizer: makes an optimizer from a list of parameters, as `torch.optim.AdamW` or a `functools.partial` of it
            does. It is called with all parameters, to measure its states, and then with those of the rank. A partial of
            `memgraph.OSS` shards them over its group, of pipelines beside each other, which get the same stages.
        checkpoint: "auto" recomputes or offloads what the budget asks for. "always" recomputes all of a stage,
            "except_last" all but for the last micro-batch, and "never" nothing.
        stages_per_rank: of "interleaved", 2 by default. They share the rank's budget.
        deferred_batch_norm: update running statistics once a mini-batch, by the mean and variance of all its rows.
            The model's BatchNorms get a subclass with further buffers, which are not in state dicts.
        replicated: names, or positions, of arguments that each micro-batch gets whole, as a table that all rows read.
        offload: "disk" lets a plan keep activations on disk between forward and backward, and "auto" is the same on a
            CPU. None keeps them in memory.
        spill_dir: the folder of the nameless files that "disk" uses; by default the temporary folder.
        time_limit: seconds of the call after which planning takes the best cut and the best plans so far; math.inf has
            no limit. Once they are over, as with 0, the quick, greedy passes run for the stages of each rank only. By
            default capture and planning take 40 s, and planning at least 10. The cut has half of what capture leaves.

    Raises:
        TypeError, ValueError: an argument can't be used.
        AgreementError: another rank was given something else.
    """
    stages = StageGroup(group)
    if stages_per_rank is None:
        stages_per_rank = default_stages_per_rank(schedule)
    arguments = GivenArguments(
        budget, chunks, schedule, balance, stages_per_rank, checkpoint, deferred_batch_norm, replicated, offload,
        spill_dir, time_limit,
        {"loss": loss, "optimizer": optimizer},
    )  # fmt: skip
    given = arguments.checked(stages, model)
    if deferred_batch_norm:
        defer_batch_norm(model)
    return Pipeline(model if loss is None else WithLoss(model, loss), stages, given, optimizer)


class Pipeline:
    """A model in stages. Each rank runs one of them, and has its parameters and their gradients.

    Attributes:
        timeline: when this rank began and ended each action of the latest step.
    """

    def __init__(
        self, module: nn.Module, group: StageGroup, given: PipelineArguments, make: MakeOptimizer | None
    ) -> None:
        self.module, self.group, self.given = module, group, given
        self._make = make
        self._optimizer: optim.Optimizer | None = None
        self._versions: dict[str, int] = {}  # of tensors that were on the meta device
        self._first: FirstCut | None = None
        self._plans = KeptPlans(module)
        self._loss_scale = 1.0
        self._measured: WeakKeyDictionary[MiniBatchPlan, list[int | None]] = WeakKeyDictionary()
        self.timeline: list[ActionTimes] = []

    def prepare(self, *args: Any, **kwargs: Any) -> None:
        """Capture, cut and plan for mini-batches like this one, without a step; raises as `step`."""
        with self.group.ending_together():
            self._prepare(args, kwargs)

    def step(self, *args: Any, **kwargs: Any) -> Tensor | None:
        """Run forward and backward of a mini-batch, and add to the gradients of this rank's stage.

        Gradients are those of the mean loss of the micro-batches, each counted by its rows. Under `torch.no_grad()`
        forward runs alone, in the memory of inference.

        Returns:
            The mean loss on the rank that computes it, which is the last one; None on the others.

        Raises:
            ValueError: the mini-batch can't be divided, or differs too much from the first to run in the same stages.
            AgreementError: another rank was given another mini-batch, or can't go on.
            StagesBudgetError: no plan keeps the budgets; on all ranks, before the step.
            CaptureError: the model can't be captured, or can't be cut.
            CollectiveError: another rank has ended or stopped.
            MemgraphError: an earlier step has failed.
            Exception: what another rank has raised, whatever its class is.
        """
        with self.group.ending_together():
            self._prepare(args, kwargs)
            begin_mini_batch(self.module)
            if self._versions:
                warn_unwritten(self.module, self._kept, self._versions)
                self._versions = {}
            runs = self._run(args, kwargs)
        self.timeline = runs.times
        return runs.loss

    __call__ = step

    @property
    def optimizer(self) -> optim.Optimizer | None:
        """The optimizer of the stage's parameters; None if none was asked for.

        Where a stage trains no parameter it has an empty one, so that all ranks make the same calls.
        """
        return self._optimizer if self._make is None or self._cut else None

    @property
    def peak(self) -> int:
        """The forecast bytes of this rank, for the latest mini-batch."""
        return self._latest.peak

    @property
    def report(self) -> PipelineReport:
        """The plan for the latest mini-batch, with its forecast for all ranks; `print` it."""
        plan, budgets = self._latest, self.given.budgets
        nbytes = max((each for each in self._measured.get(plan, ()) if each is not None), default=None)
        return PipelineReport(plan.schedule, plan.cut, plan.times, budgets, plan.peaks, self.group.rank, nbytes)

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield the parameters that this rank's stage makes gradients of."""
        known = dict(self.module.named_parameters())
        yield from ((name, known[name]) for name in self._gradients)

    def parameters(self) -> Iterator[nn.Parameter]:
        """Yield the parameters that this rank's stage makes gradients of."""
        yield from (parameter for _, parameter in self.named_parameters())

    def state_dict(self) -> dict[str, Any]:
        """Return the entries of the model's state dict that this rank has: before the first step, all of them."""
        return own_state_dict(self._trained_module)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Copy what this rank has out of a state dict of the whole model, which may be read lazily.

        Raises:
            StateError: an entry is missing or has another shape; nothing was changed.
        """
        load_own(self._module_with_values, state)

    def load_safetensors(self, paths: Target | Sequence[Target]) -> None:
        """Copy what this rank has out of a safetensors file of the whole model, or out of several.

        Raises:
            StateError: a file can't be read, or an entry is missing or has another shape; nothing was changed.
        """
        load_files(self._module_with_values, [paths] if isinstance(paths, str | PathLike) else paths)

    def full_state_dict(self) -> dict[str, Any]:
        """Return the state dict of the whole model on rank 0, and an empty one on others; all ranks call it.

        Raises:
            CollectiveError: another rank has ended or stopped.
        """
        with self.group.ending_together():
            owned = [frozenset(all_tensors(self.module))] if self._first is None else self._first.owned
            return full_state_dict(self._module_with_values, self.group, owned)

    def save_sharded(self, folder: Target) -> None:
        """Write parameters, buffers, the optimizer's states and random generators; each rank writes its own.

        Raises:
            StateError: it can't be written; says on which rank, and why. An old folder is as it was.
            AgreementError: ranks give different folders.
            CollectiveError: a rank is gone.
        """
        with self.group.ending_together():
            self._training(folder, "saving of").save()

    def load_sharded(self, folder: Target) -> None:
        """Load what `save_sharded` wrote, with any number of stages. Call `prepare` or `step` before.

        A rank that the saved training did not have keeps its random numbers.

        Raises:
            StateError: it can't be read, or is of another model or optimizer. Nothing was changed, unless it says so.
            AgreementError: ranks give different folders.
            CollectiveError: a rank is gone.
        """
        with self.group.ending_together():
            self._training(folder, "loading of").load()

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False) -> Tensor:
        """Scale the gradients of all stages as `torch.nn.utils.clip_grad_norm_` does; return their norm, on all ranks.

        Raises:
            AgreementError: ranks give other arguments.
            RuntimeError: the norm is not finite, with error_if_nonfinite=True.
        """
        order = [name for name, _ in self.module.named_parameters()]
        limit = max_norm, norm_type, error_if_nonfinite
        with self.group.ending_together():
            return clip_stages(self.group, dict(self.named_parameters()), order, *limit)

    def scale_loss(self, scaler: torch.amp.GradScaler) -> None:
        """Scale the gradients of later steps as the scaler scales a loss; the loss that a step returns is not scaled.

        Use a `memgraph.GradScaler(device, group=group)` with the group of the pipeline, `dist.group.WORLD` if it was
        given none: an infinity in one stage counts in all of them.

        Raises:
            ValueError: the scaler has no group with these ranks, so that some stages would skip a step alone.
        """
        self.group.check_scaler(scaler)
        self._loss_scale = float(scaler.scale(torch.ones(())))

    def _training(self, folder: Target, what: str) -> TrainingFolder:
        named = dict(self.named_parameters())
        return stage_folder(Path(folder).absolute(), what, self.group, self._trained_module, named, self.optimizer)

    @property
    def _trained_module(self) -> nn.Module:
        """The module as the caller gave it, without a loss around it."""
        return self.module._module if isinstance(self.module, WithLoss) else self.module

    @property
    def _module_with_values(self) -> nn.Module:
        """The same, if this rank's tensors have memory: one on the meta device gets it when it is cut."""
        if any(each.is_meta for each in all_tensors(self.module).values()):
            assert self._cut
        return self._trained_module

    @property
    def _cut(self) -> FirstCut:
        if self._first is None:
            raise MemgraphError("the stages are cut in the first step; call prepare() with a mini-batch before")
        return self._first

    @property
    def _gradients(self) -> dict[str, None]:
        """The names of the parameters that this rank makes gradients of."""
        cut = self._cut.cut
        traces = cut.traces[self.group.rank :: self.group.ranks]
        return dict.fromkeys(name for trace in traces for name in cut.gradient_names(trace))

    @property
    def _kept(self) -> frozenset[str]:
        """The names of the parameters and buffers of this rank."""
        return self._cut.kept(self.group.rank, self.group.ranks)

    @property
    def _latest(self) -> MiniBatchPlan:
        assert self._cut
        return self._plans.latest

    def _agree(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Check that this step can run, on all ranks."""
        with self.group.together(PLANNING) as lines:
            kind, values = call_lines(args, kwargs)
            known = self._plans.has(args, kwargs)
            self.given.divided(args, kwargs)
            modes = [*mode_lines(self.module), f"a plan for this mini-batch: {'there' if known else 'none yet'}"]
            lines += [*kind, *modes, *values]

    def _prepare(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        begin = time.monotonic()
        self._agree(args, kwargs)
        plan = self._plans.take(args, kwargs)
        if plan is None:
            grad = torch.is_grad_enabled()
            with torch.inference_mode(False), torch.set_grad_enabled(grad):  # what is made here is trained later
                plan = self._planned(args, kwargs, begin)
        self._plans.keep(args, kwargs, plan)  # parameters are on other devices since the first plan

    def _planned(self, args: tuple[Any, ...], kwargs: dict[str, Any], begin: float) -> MiniBatchPlan:
        """Return the plan of this rank, once all ranks have one. It keeps the tensors of its own stage."""
        plans, planned = StagePlans(self.module, self.group, self.given, begin), None
        if self._first is None:
            planned = self._cut_first(plans, args, kwargs)
        if planned is None:
            give_memory(self.module)
            try:
                planned = plans.later(args, kwargs, self._cut)
            finally:
                release_others(self.module, self._kept)
        return planned

    def _cut_first(self, plans: StagePlans, args: tuple[Any, ...], kwargs: dict[str, Any]) -> MiniBatchPlan | None:
        """Cut the step; return its plan too, if it is one of training. The rank keeps the tensors of its own stage."""
        versions = give_memory(self.module)
        try:
            if torch.is_grad_enabled():
                self._first, planned = plans.first(args, kwargs, StageUpdates(self.module, self._make))
            else:
                with as_in_training(self.module):
                    self._first, planned = plans.cut(args, kwargs, StageUpdates(self.module, self._make)), None
        except BaseException:
            release_others(self.module, all_tensors(self.module).keys() - versions.keys())  # it is as it was
            raise
        self._versions |= versions
        release_others(self.module, self._kept)
        self.group.beside = self._first.replicas
        if self._first.replicas is not None:
            gc.collect()  # a sharded optimizer of all parameters has views of them, and refers to itself
        self._optimizer = StageUpdates(self.module, self._make).optimizer(self._gradients)
        if self._optimizer is not None:
            end_together(self._optimizer, self.group)
        return planned

    def _run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> StageRuns:
        """Run a mini-batch. The first runs of each plan are measured, without and with states of the optimizer."""
        plan = self._latest
        self.group.stages = plan.schedule.stages
        run = partial(run_mini_batch, self.group, self.module, plan, args, kwargs, self.given.divided, self._loss_scale)
        earlier = self._measured.setdefault(plan, [])
        if len(earlier) == MEASURED:
            return run()
        runs, nbytes = measured(run, [*kept_tensors(self.module, args, kwargs), *kept_states(self._optimizer)])
        earlier.append(nbytes)
        return runs
