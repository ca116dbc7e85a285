"""`memgraph.compile`, `memgraph.plan` and, in a room of its own, `memgraph.sweep`: the ways in.

    model = memgraph.compile(model, budget="8GB")     # trains like the model it was given, and keeps to the budget
    print(memgraph.plan(model, batch, budget="8GB"))  # what it would do, without a step

All take the same wishes; what they ask for is written down with `compile`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from os import PathLike
from typing import Any

import torch
from torch import nn

from ..errors import ShardError
from ..guards.module_proxy import WithLoss
from ..microbatch.microbatches import MicroBatches
from ..optim.fused_update import check_fusable
from ..options.argument_rules import check_arguments
from ..options.compile_options import Budget, CompileOptions, parse_options
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
    """A module that trains like `model`, and whose step stays under `budget`.

        optimizer = torch.optim.AdamW(model.parameters())
        model = memgraph.compile(model, budget="8GB", optimizer=optimizer)  # at once: nothing has been looked at yet
        for x, y in batches:
            loss_fn(model(x), y).backward()  # the first call captures, prices and plans; then it runs
            optimizer.step()
            optimizer.zero_grad()
        print(model.plan)

    Gradients are bit-equal to eager's but for what `wire_dtype`, `microbatches`, `host_update` and `lower` say.  Each
    new kind of call (shapes, dtypes, `training`, autocast, ...) is captured and planned before it runs; the logger
    "memgraph" says so at level INFO.

    Args:
        model: any module on one device.  It is not changed; parameters, buffers and `state_dict()` are shared with it.
        budget: bytes of the device for the whole step: parameters, buffers, inputs, gradients, activations, workspace
            and copies, and with `optimizer` its states and its update.  "8GB", "8GiB", an int, a float in (0, 1] of
            the device's memory, or None for what is free now.  The interpreter and the libraries are not counted, nor
            is what the caller's own code allocates between forward and backward: for that, give `loss`.
        optimizer: an optimizer of `model`'s parameters, to be counted; it is `model.optimizer` then.  A copy of the
            compiled module, or a pickle of it, has none: it would go on with the old parameters.
        loss: makes the loss part of the step.  The result of a call is `loss(model(*args, **kwargs), target)` if the
            call has a keyword `target`, otherwise `loss(model(*args, **kwargs))`.
        offload: where activations may go: "disk" (from a CPU), "host" (from a GPU), "auto" for the one that the device
            has, or None.
        spill_dir: the folder of the nameless file that "disk" uses; by default the temporary folder.
        plan: a saved plan, its JSON text, the path of a file with it, or a list of such, one for each kind of call.
            Nothing is searched for then, and a call that none of them is good for is refused.  A step that fits as it
            is runs as it is.
        time_limit: seconds after capture after which planning takes what it has; with 0 it asks the quick, greedy pass
            alone.  With a limit that is reached, the plan depends on how fast the machine is.
        wire_dtype: torch.bfloat16 lets float32 activations be rounded to it for their way to `offload` and back, where
            that pays: half the bytes to copy, and gradients that are no longer bit-equal.  Which values are cast is the
            plan's choice, and the report names them; the same saved plan gives the same gradients.  None, the default,
            means that nothing is ever rounded.
        microbatches: the parts in which `model` takes its batch.  Arguments with as many rows (dimension 0) as the
            first tensor among them are cut, outputs with a row for each row are put together again, and `loss` is that
            of them all.  Gradients are those of the whole batch but for rounding, and bit-equal with those of a loop
            over the parts.  A batch of fewer rows has as many parts.  Refused is what makes rows depend on each other
            (batch norm in training, a mean over the batch) or changes buffers.  Random numbers are drawn in another
            order than for the whole batch.
        reduction: "mean" or "sum", for scalars that `model` returns: what they are of those of the parts.  With it
            `loss` is computed in parts as well.  A mean is one over rows, or of a cross entropy of torch's that is
            returned as it is over the targets that count.
        accumulate: whether backward may find gradients to add to, as in a loop that accumulates them, or zeroes them
            with `set_to_none=False`.  True plans each step for that from the first call on, so that a budget without
            room for it is refused then.  None plans the first call without them, looks whether one with them fits as
            well, and warns if it does not, with the bytes.  False does not look: such a call is planned when it comes.
        forwards: the number of forwards that are open at once, before the backward of the first: 2 for a siamese loss,
            for chosen and rejected answers, for real and generated pictures.  Each is planned for its share, so that
            all of them together keep the budget.  Not with `fuse_update`, `cuda_graphs=True`, `plan` or OSS.
        fuse_update: let backward update each parameter of `optimizer` as soon as its gradient is whole, so that there
            is never a full set of gradients.  `optimizer.step()` is called as ever, and finds nothing to do.  The loss
            has to be what the module returns, and is differentiated as it is.  `clip_grad_norm_` of the compiled
            module, GradScaler, accumulation and whatever else wants gradients raise a FusedError; but torch's own
            `clip_grad_norm_` and `clip_grad_value_` see no gradients, and silently clip nothing.  After an error in
            mid backward some parameters are updated and others are not, and nothing goes on until an earlier state
            is loaded into model and optimizer.
        host_update: behind a GPU, let the host update states that live there, with the parameters and gradients whose
            they are, where the plan finds that faster than to bring them to the GPU: by the optimizer's own step on
            tensors of the host, with its fused kernel for processors if it has one and neither `fused` nor `foreach`
            was chosen.  Its kernels round otherwise than the GPU's, so parameters are no longer equal to the bit to
            those of the plain optimizer.  Behind a CPU the device is the host, and nothing is different.
        lower: "inductor" lets Inductor compile what lies between matrix products and memory ops, where that is faster
            and keeps the budget; gradients are then eager's within rounding, not to the bit.  The first call of a kind
            takes seconds to minutes for it, and says so beforehand.  None does without; "auto" is None on a CPU; on a
            GPU it is "inductor" but for what can't be compiled: that runs op by op, after a warning.
        strict: on a GPU, have torch's allocator refuse this process more than the budget, so that whatever else it
            does there, or a forecast that is wrong, is an OutOfMemoryError and never more memory.
        pinned: on a GPU, the most bytes of the host's memory that may be pinned in all, by whatever model, when a step
            of this one asks for some: written as a budget, a float being a share of the host's memory.  A plan sends no
            more there.  None is what the variable MEMGRAPH_PINNED names, or half of the host's memory.
        cuda_graphs: on a GPU, True has each step recorded from its third run on, forward and backward as one CUDA graph
            each: its ops are not launched one by one.  Its memory stays between steps, which is planned for, and goes
            when a step of another kind runs.  What no graph does is refused.  "auto" records what can be and fits
            beside a plan that was made without; the report says why another is not.  While somebody has a gradient of
            the last step, or several steps are in flight, op by op is what runs.

    Returns:
        A module that shares everything with `model` but its forward.  `.plan` is the Report of the latest call,
        `.optimizer` what was given, and `.clip_grad_norm_` clips wherever gradients live.

    Raises:
        TypeError: `model` is no module, or a part of it is of `memgraph.compile`, torch.jit, DistributedDataParallel or
            FSDP; or an argument has a wrong type.
        ValueError: `budget` or `pinned` can't be read or is more than there is; the model lies on several devices; the
            optimizer is of another model; the time limit is negative; `wire_dtype` is another type; `strict` or
            `cuda_graphs` on a CPU.
        PlanError: the saved plan can't be read; at a call: it is for another model, shape, optimizer, torch or device,
            or over the budget.
        SpillError: `spill_dir` is no folder.
        PinnedError: at a call: steps in flight, or the state of several models, want more than `pinned`.
        BudgetError: at a call: no plan fits, with the smallest budget that does.
        CaptureError: at a call: the model can't be captured, with the source line.
        FusedError: `fuse_update` with an optimizer whose update can't be run parameter by parameter; later: something
            wants gradients that are gone.
        RecordingError: at a call, with `cuda_graphs=True`: the step can't be recorded; in any recorded step:
            `backward(retain_graph=True)`.
        LoweringError: at a call, with `lower="inductor"`: Inductor can't compile a part of the step.
        UpdateError: the optimizer's step wants a closure, or fails on a dense gradient; or its states can't live far,
            and with parameters and buffers they are more than the budget.
    """
    asked = parse_options(
        budget, optimizer=optimizer, offload=offload, spill_dir=spill_dir, plan=plan, time_limit=time_limit,
        wire_dtype=wire_dtype, accumulate=accumulate, forwards=forwards, fuse_update=fuse_update,
        host_update=host_update, lower=lower, strict=strict, pinned=pinned, cuda_graphs=cuda_graphs,
    )  # fmt: skip
    planner = make_planner(in_microbatches(model, loss, microbatches, reduction), asked)
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
    """The plan for the call `model(*args, **kwargs)`, without running a step; arguments and errors as in `compile`."""
    asked = parse_options(
        budget, optimizer=optimizer, offload=offload, spill_dir=spill_dir, plan=plan, time_limit=time_limit,
        wire_dtype=wire_dtype, accumulate=accumulate, forwards=forwards, fuse_update=fuse_update,
        host_update=host_update, lower=lower, pinned=pinned, cuda_graphs=cuda_graphs,
    )  # fmt: skip
    return (
        make_planner(in_microbatches(model, loss, microbatches, reduction), asked)
        .step(args, kwargs, asked.wanted)
        .report
    )


def in_microbatches(model: nn.Module, loss: Callable[..., Any] | None, count: int, reduction: str | None) -> nn.Module:
    """`model` with its loss, run on micro-batches; errors as in `compile`."""
    model, loss = check_arguments("model", model), check_arguments("loss", loss)
    count, reduction = check_arguments("microbatches", count), check_arguments("reduction", reduction)
    _refuse_parts(model)
    if reduction is not None and loss is not None:
        return MicroBatches(WithLoss(model, loss), count, reduction)
    cut = model if count == 1 else MicroBatches(model, count, reduction)
    return cut if loss is None else WithLoss(cut, loss)


def make_planner(model: nn.Module, asked: CompileOptions) -> Planner:
    """What plans the steps of `model`, if its optimizer is one that can be planned; errors as in `compile`."""
    optimizer = asked.optimizer
    if optimizer is not None:
        owned = set(model.parameters())
        if not any(parameter in owned for group in optimizer.param_groups for parameter in group["params"]):
            raise ValueError("none of the optimizer's parameters is the model's; make it of model.parameters()")
        if isinstance(optimizer, OSS) and asked.lower == "inductor" and not optimizer.exchange.is_alone:
            raise ShardError('lower="inductor" is not built for steps that ranks plan together; leave it out')
        if isinstance(optimizer, OSS) and asked.forwards > 1:
            raise ShardError("forwards= of more than 1 is not built for a sharded optimizer; leave it out")
        if isinstance(optimizer, OSS) and asked.host_update:
            raise ShardError("host_update=True is not built for a sharded optimizer; leave it out")
        if asked.fuse_update:
            check_fusable(optimizer)
    return Planner(model, asked)


def _refuse_parts(model: nn.Module) -> None:
    """What is compiled or scripted is run by somebody else, and can't be captured."""
    if isinstance(model, CompiledModule):
        raise TypeError("model is compiled already; give the module that it was made of")
    for path, part in model.named_modules():
        what = f"model.{path}" if path else "model"
        refuse_wrapped(what, part)
        if isinstance(part, CompiledModule):
            raise TypeError(f"{what} is compiled already; compile the whole, with the plain module in that place")
        if isinstance(part, torch.jit.ScriptModule):
            raise TypeError(
                f"{what} is a {type(part).__name__} of torch.jit, which can't be captured; give the module that it was "
                "made of"
            )
