"""`memgraph.compile` and `memgraph.plan`.

    model = memgraph.compile(model, budget="8GB")     # trains like the given model, within the budget
    print(memgraph.plan(model, batch, budget="8GB"))  # the report of what it would do, without a step

Both take the same options; `compile` documents them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from os import PathLike
from typing import Any, Unpack

import torch
from torch import nn

from ..errors import ShardError
from ..guards.module_proxy import WithLoss
from ..guards.wrappers import refuse_wrapped
from ..microbatch.microbatches import MicroBatches
from ..optim.fused_update import check_fusable
from ..options.argument_rules import check_argument
from ..options.compile_options import Budget, CompileArguments, CompileOptions, PlanArguments, parse_options
from ..oss import OSS
from ..planning.planner import Planner
from ..report.report import Report
from ..report.saved_plan import PlanRecord
from ..system.user_warning import warn_user
from ..tensors.parameter_groups import parameter_groups
from .compiled_module import CompiledModule
from .shapes_only import on_device


def compile(
    model: nn.Module, budget: Budget = None, *, optimizer: torch.optim.Optimizer | None = None,
    loss: Callable[..., Any] | None = None, offload: str | None = "auto", spill_dir: str | PathLike[str] | None = None,
    plan: PlanRecord | Sequence[PlanRecord] | None = None, time_limit: float | None = None,
    wire_dtype: torch.dtype | None = None, microbatches: int = 1, reduction: str | None = None,
    accumulate: bool | None = None, forwards: int = 1, fuse_update: bool = False, host_update: bool = False,
    lower: str | None = None, strict: bool = False, host: Budget = None, disk: Budget = None,
    cuda_graphs: bool | str = False, opaque: bool | Sequence[str] = True,
    slices: str | Mapping[str, int] | None = None,
) -> CompiledModule:  # fmt: skip
    """Return a module that trains like `model`, with a step that stays within `budget`.

        optimizer = torch.optim.AdamW(model.parameters())
        model = memgraph.compile(model, budget="8GB", optimizer=optimizer)  # returns at once
        for x, y in batches:
            loss_fn(model(x), y).backward()  # the first call is captured, priced and planned; then it runs
            optimizer.step()
            optimizer.zero_grad()
        print(model.plan)

    Gradients are bit-equal to eager's, except as `wire_dtype`, `microbatches`, `slices`, `host_update` and `lower` say.
    Each new kind of call (shapes, dtypes, `training`, autocast, ...) is captured and planned before it runs; the logger
    "memgraph" says so at level INFO.

    `docs/options.md` says more about each option.

    Args:
        model: any module on one device.  It is not changed, and shares parameters, buffers and `state_dict()`.
        budget: bytes of the device for the whole step: parameters, buffers, inputs, gradients, activations, workspace
            and copies; with `optimizer` also its states and its update.  "8GB", "8GiB", an int, a float in (0, 1] of
            the device's memory, or None for what is free now.  The interpreter, the libraries and memory that the
            caller allocates between forward and backward are not counted.
        optimizer: an optimizer of `model`'s parameters, which is counted.
        loss: becomes part of the step.  A call then returns `loss(model(*args, **kwargs), target)` if it has a keyword
            `target`, otherwise `loss(model(*args, **kwargs))`.
        offload: where values may be offloaded: "disk" (from a CPU), "host" (from a GPU, or from a CPU with `host=`),
            "auto" for all that the device has, or None.
        spill_dir: the folder of the nameless file that "disk" uses; by default the temporary folder.
        plan: a saved plan, its JSON text, the path of a file with it, or a list of them, one for each kind of call.
            No plan is searched for then, and a call that fits no given plan is refused.
        time_limit: seconds after capture after which planning takes the best plan so far; 0 runs the quick, greedy
            pass only, math.inf has no limit.  By default capture and planning take 40 s, and planning at least 10.
        wire_dtype: torch.bfloat16 allows rounding float32 activations while they are offloaded, where that pays;
            gradients are then no longer bit-equal.  With None nothing is rounded.
        microbatches: the number of parts in which `model` takes its batch.  Gradients are those of the whole batch up
            to rounding, and bit-equal to a loop over the parts.
        reduction: "mean" or "sum", for scalars that `model` returns: how those of the parts combine.
        accumulate: whether backward may find gradients to add to.  True plans each step for that; None checks whether
            such a step fits as well, and warns if it does not; False plans such a call when it comes.
        forwards: the number of forwards that are open at once, before the backward of the first.
        fuse_update: update each parameter of `optimizer` in backward, as soon as its gradient is complete.  Whatever
            else needs gradients raises a FusedError; torch's own `clip_grad_norm_` silently clips nothing.
        host_update: behind a GPU, update optimizer states on the host where that is faster than reloading them; CPU
            kernels round differently.
        lower: "inductor" compiles ops between matrix products with Inductor, where that is faster and keeps the budget;
            gradients are then eager's up to rounding.  None compiles nothing; "auto" is None on a CPU.
        strict: on a GPU, let torch's allocator refuse this process more than the budget.
        host: the most bytes of host memory for what is offloaded, written as a budget.  Behind a GPU it is pinned; None
            takes the variable MEMGRAPH_PINNED, or half of the host's memory.  Behind a CPU it is a tier before the
            disk, for what is copied most often; None is no such tier.
        disk: the most bytes of the disk for what is offloaded, written as a budget; None takes what is free.
        cuda_graphs: on a GPU, True records each step from its third run on as CUDA graphs, and refuses one that can't
            be recorded; "auto" runs such a step op by op.
        opaque: submodules that run as they are, each as one op: True for those that can't be traced, or a list of
            paths for these as well.  False refuses what can't be traced.
        slices: "auto" runs chains of ops that work row by row, as a head and its loss, in parts of the rows where the
            step does not fit; {"lm_head": 16} does so for a submodule in any case.  Sums over rows round differently.

    Returns:
        A module that shares everything with `model` but its forward.  `.plan` is the Report of the latest call,
        `.optimizer` the given optimizer, and `.clip_grad_norm_` clips gradients in whatever tier they are.

    Raises:
        TypeError: `model` is no module, or a part of it is of `memgraph.compile`, torch.jit, DistributedDataParallel or
            FSDP; or an argument has a wrong type.
        ValueError: `budget` or `host` can't be read or is more than exists; the model is on several devices; the
            optimizer is of another model; `opaque` names no submodule; the time limit is negative; `wire_dtype` is
            another type; `strict` or `cuda_graphs` on a CPU; `slices` names no submodule, or fewer than 2 parts.  At a
            call: a submodule of `slices` has no ops that can run in parts.
        PlanError: the saved plan can't be read; at a call: it is for another model, shape, optimizer, torch or device,
            or over the budget.
        SpillError: `spill_dir` is no folder, or takes no files.
        PinnedError: at a call: open runs, or the state of several models, need more than `host`.
        BudgetError: at a call: no plan fits, with the smallest budget that does.
        CaptureError: at a call: the model can't be captured, with the source line.
        OpaqueError: in backward: a submodule that runs as it is gives other numbers when it runs again.
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
        strict=strict, host=host, disk=disk, cuda_graphs=cuda_graphs, opaque=opaque, slices=slices,
    )  # fmt: skip
    planner.refuse_optimizer()
    _warn_of_steps(model)
    return CompiledModule(planner)


def plan(
    model: nn.Module, *args: Any, budget: Budget = None, optimizer: torch.optim.Optimizer | None = None,
    loss: Callable[..., Any] | None = None, offload: str | None = "auto", spill_dir: str | PathLike[str] | None = None,
    plan: PlanRecord | Sequence[PlanRecord] | None = None, time_limit: float | None = None,
    wire_dtype: torch.dtype | None = None, microbatches: int = 1, reduction: str | None = None,
    accumulate: bool | None = None, forwards: int = 1, fuse_update: bool = False, host_update: bool = False,
    lower: str | None = None, host: Budget = None, disk: Budget = None, cuda_graphs: bool | str = False,
    opaque: bool | Sequence[str] = True, slices: str | Mapping[str, int] | None = None, **kwargs: Any,
) -> Report:  # fmt: skip
    """Return the plan for the call `model(*args, **kwargs)`, without running a step.

        worst = torch.empty(64, 4096, dtype=torch.long, device="meta")  # a shape without bytes
        print(memgraph.plan(model, worst, budget="8GB"))

    Tensors of device "meta" stand for tensors of their shapes on the model's device.  Arguments and errors are those of
    `compile`.
    """
    given: CompileArguments = {
        "optimizer": optimizer, "loss": loss, "offload": offload, "spill_dir": spill_dir, "plan": plan,
        "time_limit": time_limit, "wire_dtype": wire_dtype, "microbatches": microbatches, "reduction": reduction,
        "accumulate": accumulate, "forwards": forwards, "fuse_update": fuse_update, "host_update": host_update,
        "lower": lower, "host": host, "disk": disk, "cuda_graphs": cuda_graphs, "opaque": opaque, "slices": slices,
    }  # fmt: skip
    planner = make_planner(model, budget, **given)
    real = on_device(planner.module, args, kwargs, microbatches)
    return planner.step(*real, planner.options.outputs).current_report


def make_planner(model: nn.Module, budget: Budget, **given: Unpack[CompileArguments]) -> Planner:
    """Return the planner of a model with these options; raises as `compile`."""
    loss, count, reduction = given.pop("loss", None), given.pop("microbatches", 1), given.pop("reduction", None)
    rest: PlanArguments = given
    options = parse_options(budget, **rest)
    prepared = _prepared(model, loss, count, reduction)
    _refuse_optimizer(prepared, options)
    _refuse_unknown(model, options)
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
    if parameter_groups(optimizer).keys().isdisjoint(model.parameters()):
        raise ValueError("the optimizer has no parameter of the model; make it of model.parameters()")
    if isinstance(optimizer, OSS) and options.lower == "inductor" and not optimizer.comm.is_alone:
        raise ShardError('lower="inductor" is not built for steps that ranks plan together; leave it out')
    if isinstance(optimizer, OSS) and options.forwards > 1:
        raise ShardError("forwards= of more than 1 is not built for a sharded optimizer; leave it out")
    if isinstance(optimizer, OSS) and options.host_update:
        raise ShardError("host_update=True is not built for a sharded optimizer; leave it out")
    if options.fuse_update:
        check_fusable(optimizer)


def _refuse_unknown(model: nn.Module, options: CompileOptions) -> None:
    """Refuse paths that name no submodule."""
    paths = {path for path, _ in model.named_modules() if path}
    opaque = () if isinstance(options.opaque, bool) else options.opaque
    slices = options.slices if isinstance(options.slices, Mapping) else ()
    for option, names in (("opaque", opaque), ("slices", slices)):
        for name in names:
            if name not in paths:
                raise ValueError(
                    f"{option} has {name!r}, which is no submodule; give paths as model.named_modules() does"
                )


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


def _warn_of_steps(model: nn.Module) -> None:
    """Warn if a training loop will not call the model itself: only such calls are planned."""
    if callable(getattr(model, "training_step", None)):
        warn_user(
            f"only calls of the compiled module are planned; {type(model).__name__}.training_step runs the plain "
            "one, outside of the budget: compile its network, as self.net = memgraph.compile(net, budget)"
        )
