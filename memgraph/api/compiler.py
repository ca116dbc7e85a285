"""`memgraph.compile` and `memgraph.plan`.

    model = memgraph.compile(model, budget="8GB")     # trains like the given model, within the budget
    print(memgraph.plan(model, batch, budget="8GB"))  # the report of what it would do, without a step

Both take the same options; `compile` documents them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from os import PathLike
from typing import Any, Unpack

import torch
from torch import nn

from ..errors import ShardError
from ..guards.module_proxy import WithLoss
from ..microbatch.microbatches import MicroBatches
from ..optim.fused_update import check_fusable
from ..options.argument_rules import check_argument
from ..options.compile_options import Budget, CompileArguments, CompileOptions, PlanArguments, parse_options
from ..oss import OSS
from ..planning.planner import Planner
from ..report.report import Report
from ..report.saved_plan import PlanRecord
from .compiled_module import CompiledModule
from .refuse_wrapped import refuse_wrapped, warn_of_steps


def compile(
    model: nn.Module, budget: Budget = None, *, optimizer: torch.optim.Optimizer | None = None,
    loss: Callable[..., Any] | None = None, offload: str | None = "auto", spill_dir: str | PathLike[str] | None = None,
    plan: PlanRecord | Sequence[PlanRecord] | None = None, time_limit: float | None = None,
    wire_dtype: torch.dtype | None = None, microbatches: int = 1, reduction: str | None = None,
    accumulate: bool | None = None, forwards: int = 1, fuse_update: bool = False, host_update: bool = False,
    lower: str | None = "auto", strict: bool = False, pinned: Budget = None, cuda_graphs: bool | str = False,
) -> CompiledModule:  # fmt: skip
    """Return a module that trains like `model`, with a step that stays within `budget`.

        optimizer = torch.optim.AdamW(model.parameters())
        model = memgraph.compile(model, budget="8GB", optimizer=optimizer)  # returns at once
        for x, y in batches:
            loss_fn(model(x), y).backward()  # the first call is captured, priced and planned; then it runs
            optimizer.step()
            optimizer.zero_grad()
        print(model.plan)

    Gradients are bit-equal to eager's, except as `wire_dtype`, `microbatches`, `host_update` and `lower` say.  Each new
    kind of call (shapes, dtypes, `training`, autocast, ...) is captured and planned before it runs; the logger
    "memgraph" says so at level INFO.

    Args:
        model: any module on one device.  It is not changed, and shares parameters, buffers and `state_dict()`.
        budget: bytes of the device for the whole step: parameters, buffers, inputs, gradients, activations, workspace
            and copies; with `optimizer` also its states and its update.  "8GB", "8GiB", an int, a float in (0, 1] of
            the device's memory, or None for what is free now.  Not counted are the interpreter, the libraries, and
            what the caller's code allocates between forward and backward; `loss` counts that of a loss.
        optimizer: an optimizer of `model`'s parameters, which is counted; it becomes `model.optimizer`.  A copy or a
            pickle of the compiled module has none, since it would update the old parameters.
        loss: becomes part of the step.  A call then returns `loss(model(*args, **kwargs), target)` if it has a keyword
            `target`, otherwise `loss(model(*args, **kwargs))`.
        offload: where activations may be offloaded: "disk" (from a CPU), "host" (from a GPU), "auto" for the one that
            the device has, or None.
        spill_dir: the folder of the nameless file that "disk" uses; by default the temporary folder.
        plan: a saved plan, its JSON text, the path of a file with it, or a list of them, one for each kind of call.
            No plan is searched for then, and a call that none of them fits is refused.  A step that fits without a
            plan runs without one.
        time_limit: seconds after capture after which planning takes the best plan so far; 0 runs the quick, greedy
            pass only.  If the limit is reached, the plan depends on the speed of the machine.
        wire_dtype: torch.bfloat16 allows rounding float32 activations while they are offloaded, where that pays: half
            the bytes to copy, and gradients that are no longer bit-equal.  The plan chooses the values, the report
            names them, and the same saved plan gives the same gradients.  With None nothing is rounded.
        microbatches: the number of parts in which `model` takes its batch.  Arguments with as many rows (dimension 0)
            as the first tensor among them are split, outputs with a row for each row are concatenated, and `loss` is
            computed on the whole.  Gradients are those of the whole batch up to rounding, and bit-equal to a loop over
            the parts.  A batch of fewer rows has as many parts.  A model whose rows depend on each other (batch norm in
            training, a mean over the batch), or that changes buffers, is refused.  Random numbers are drawn in another
            order than for the whole batch.
        reduction: "mean" or "sum", for scalars that `model` returns: how those of the parts combine.  With it, `loss`
            is computed in parts as well.  A mean is over rows, or of one of torch's cross entropies, returned as it
            is, over the targets that count.
        accumulate: whether backward may find gradients to add to, as in a loop that accumulates them or zeroes them
            with `set_to_none=False`.  True plans each step for that from the first call on, and refuses a budget
            without room for it.  None plans the first call without, checks whether one with gradients fits as well, and
            warns with the bytes if it does not.  False does not check; such a call is planned when it comes.
        forwards: the number of forwards that are open at once, before the backward of the first: 2 for a siamese loss,
            for chosen and rejected answers, for real and generated pictures.  Each is planned for its share, so that
            together they keep the budget.  Not with `fuse_update`, `cuda_graphs=True`, `plan` or OSS.
        fuse_update: update each parameter of `optimizer` in backward, as soon as its gradient is complete, so that a
            full set of gradients never exists.  `optimizer.step()` is called as usual, and finds nothing to do.  The
            loss has to be what the module returns, and is differentiated unscaled.  Whatever else needs gradients,
            as `clip_grad_norm_` of the compiled module, GradScaler or accumulation, raises a FusedError; torch's own
            `clip_grad_norm_` and `clip_grad_value_` see no gradients, and silently clip nothing.  After an error in
            mid backward only some parameters are updated, and calls are refused until an earlier state is loaded into
            model and optimizer.
        host_update: behind a GPU, update optimizer states that are offloaded to the host there, with their parameters
            and gradients, where the plan finds that faster than reloading them: by the optimizer's own step on host
            tensors, with its fused CPU kernel if it has one and neither `fused` nor `foreach` was chosen.  CPU kernels
            round differently from the GPU's, so parameters are no longer bit-equal to those of the plain optimizer.
            On a CPU nothing changes.
        lower: "inductor" compiles the ops between matrix products and memory ops with Inductor, where that is faster
            and keeps the budget; gradients are then eager's up to rounding.  The first call of a kind takes seconds to
            minutes for it, and says so before.  None compiles nothing.  "auto" is None on a CPU; on a GPU it is
            "inductor", but segments that can't be compiled run op by op, after a warning.
        strict: on a GPU, let torch's allocator refuse this process more than the budget, so that anything beyond it,
            or a wrong forecast, is an OutOfMemoryError.
        pinned: on a GPU, the most bytes of host memory that may be pinned in all, by any model, when a step of this one
            pins some: written as a budget, a float being a share of the host's memory.  A plan offloads no more than
            that.  None takes the variable MEMGRAPH_PINNED, or half of the host's memory.
        cuda_graphs: on a GPU, True records each step from its third run on, forward and backward as one CUDA graph
            each, so that ops are not launched one by one.  The recording's memory stays between steps, is planned for,
            and is freed when a step of another kind runs.  A step that no graph can hold is refused.  "auto" records a
            step if that is possible and fits beside a plan made without it; otherwise the report says why not.  While a
            gradient of the last step is held, or several runs are open, the step runs op by op.

    Returns:
        A module that shares everything with `model` but its forward.  `.plan` is the Report of the latest call,
        `.optimizer` the given optimizer, and `.clip_grad_norm_` clips gradients in whatever tier they are.

    Raises:
        TypeError: `model` is no module, or a part of it is of `memgraph.compile`, torch.jit, DistributedDataParallel or
            FSDP; or an argument has a wrong type.
        ValueError: `budget` or `pinned` can't be read or is more than exists; the model is on several devices; the
            optimizer is of another model; the time limit is negative; `wire_dtype` is another type; `strict` or
            `cuda_graphs` on a CPU.
        PlanError: the saved plan can't be read; at a call: it is for another model, shape, optimizer, torch or device,
            or over the budget.
        SpillError: `spill_dir` is no folder.
        PinnedError: at a call: open runs, or the state of several models, need more than `pinned`.
        BudgetError: at a call: no plan fits, with the smallest budget that does.
        CaptureError: at a call: the model can't be captured, with the source line.
        FusedError: `fuse_update` with an optimizer whose update can't run parameter by parameter; later: something
            needs gradients that are gone.
        RecordingError: at a call, with `cuda_graphs=True`: the step can't be recorded; in any recorded step:
            `backward(retain_graph=True)`.
        LoweringError: at a call, with `lower="inductor"`: Inductor can't compile a part of the step.
        UpdateError: the optimizer's step needs a closure, or fails on a dense gradient; or its states can't be
            offloaded, and with parameters and buffers exceed the budget.
    """
    planner = make_planner(
        model, budget, optimizer=optimizer, loss=loss, offload=offload, spill_dir=spill_dir, plan=plan,
        time_limit=time_limit, wire_dtype=wire_dtype, microbatches=microbatches, reduction=reduction,
        accumulate=accumulate, forwards=forwards, fuse_update=fuse_update, host_update=host_update, lower=lower,
        strict=strict, pinned=pinned, cuda_graphs=cuda_graphs,
    )  # fmt: skip
    planner.refuse_optimizer()
    warn_of_steps(model)
    return CompiledModule(planner)


def plan(
    model: nn.Module, *args: Any, budget: Budget = None, optimizer: torch.optim.Optimizer | None = None,
    loss: Callable[..., Any] | None = None, offload: str | None = "auto", spill_dir: str | PathLike[str] | None = None,
    plan: PlanRecord | Sequence[PlanRecord] | None = None, time_limit: float | None = None,
    wire_dtype: torch.dtype | None = None, microbatches: int = 1, reduction: str | None = None,
    accumulate: bool | None = None, forwards: int = 1, fuse_update: bool = False, host_update: bool = False,
    lower: str | None = "auto", pinned: Budget = None, cuda_graphs: bool | str = False, **kwargs: Any,
) -> Report:  # fmt: skip
    """Return the plan for the call `model(*args, **kwargs)`, without running a step.

    Arguments and errors are those of `compile`.
    """
    planner = make_planner(
        model, budget, optimizer=optimizer, loss=loss, offload=offload, spill_dir=spill_dir, plan=plan,
        time_limit=time_limit, wire_dtype=wire_dtype, microbatches=microbatches, reduction=reduction,
        accumulate=accumulate, forwards=forwards, fuse_update=fuse_update, host_update=host_update, lower=lower,
        pinned=pinned, cuda_graphs=cuda_graphs,
    )  # fmt: skip
    return planner.step(args, kwargs, planner.options.outputs).report


def make_planner(model: nn.Module, budget: Budget, **given: Unpack[CompileArguments]) -> Planner:
    """Return the planner of a model with these options; raises as `compile`."""
    loss, count, reduction = given.pop("loss", None), given.pop("microbatches", 1), given.pop("reduction", None)
    rest: PlanArguments = given
    options = parse_options(budget, **rest)
    prepared = _prepared(model, loss, count, reduction)
    _refuse_optimizer(prepared, options)
    return Planner(prepared, options)


def _prepared(model: nn.Module, loss: Callable[..., Any] | None, count: int, reduction: str | None) -> nn.Module:
    """Return `model` with its loss, run in micro-batches."""
    model, loss = check_argument("model", model), check_argument("loss", loss)
    count, reduction = check_argument("microbatches", count), check_argument("reduction", reduction)
    _refuse_parts(model)
    if reduction is not None and loss is not None:
        return MicroBatches(WithLoss(model, loss), count, reduction)
    split = model if count == 1 else MicroBatches(model, count, reduction)
    return split if loss is None else WithLoss(split, loss)


def _refuse_optimizer(model: nn.Module, options: CompileOptions) -> None:
    """Refuse an optimizer of another model, or one that an option is not built for."""
    optimizer = options.optimizer
    if optimizer is None:
        return
    owned = set(model.parameters())
    if not any(parameter in owned for group in optimizer.param_groups for parameter in group["params"]):
        raise ValueError("none of the optimizer's parameters is the model's; make it of model.parameters()")
    if isinstance(optimizer, OSS) and options.lower == "inductor" and not optimizer.comm.is_alone:
        raise ShardError('lower="inductor" is not built for steps that ranks plan together; leave it out')
    if isinstance(optimizer, OSS) and options.forwards > 1:
        raise ShardError("forwards= of more than 1 is not built for a sharded optimizer; leave it out")
    if isinstance(optimizer, OSS) and options.host_update:
        raise ShardError("host_update=True is not built for a sharded optimizer; leave it out")
    if options.fuse_update:
        check_fusable(optimizer)


def _refuse_parts(model: nn.Module) -> None:
    """Refuse modules that are compiled, scripted or wrapped: they can't be captured."""
    if isinstance(model, CompiledModule):
        raise TypeError("model is compiled already; give the module that it was made of")
    for path, part in model.named_modules():
        name = f"model.{path}" if path else "model"
        refuse_wrapped(name, part)
        if isinstance(part, CompiledModule):
            raise TypeError(f"{name} is compiled already; compile the whole, with the plain module in that place")
        if isinstance(part, torch.jit.ScriptModule):
            raise TypeError(
                f"{name} is a {type(part).__name__} of torch.jit, which can't be captured; give the module that it was "
                "made of"
            )
