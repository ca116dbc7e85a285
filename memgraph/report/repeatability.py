"""Say whether gradients have eager's bits: ops that differ from run to run, and options that round.

aten.index_add.default, aten.mm.default   ->   "gradients are eager's to the bit where eager gives the same twice; with
                                               these ops it need not, unless ...: index_add"
microbatches=2, lower="inductor"          ->   "gradients round differently from eager's: lower= compiles 3 segments,
                                               microbatches= adds up those of 2 parts"

The kernels of these ops add in the order in which threads come, or write to one place from several. With
`torch.use_deterministic_algorithms(True)` torch takes others, or raises an error where it has none.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from functools import partial

from passes import Offload, Op, Stream, Trace
from passes.ir.decisions import HOST
from passes.ir.ops import SEGMENT

from .report_data import ReportData

PUTS = ("index_put", "_unsafe_index_put", "_index_put_impl")
# What torch's documentation of `use_deterministic_algorithms` names, and the ops that a captured step has for it, with
# an overload where others of that name are repeatable.
NAMED: dict[str, tuple[str, ...]] = {
    # It takes other kernels for these.
    **{f"torch.nn.Conv{n}d": ("convolution", "convolution_backward") for n in (1, 2, 3)},
    **{f"torch.nn.ConvTranspose{n}d": ("convolution", "convolution_backward") for n in (1, 2, 3)},
    **{f"torch.nn.ReplicationPad{n}d": (f"replication_pad{n}d_backward",) for n in (1, 2, 3)},
    "torch.nn.Embedding": ("embedding_dense_backward",),
    "torch.nn.MaxPool3d": ("max_pool3d_with_indices_backward",),
    "torch.Tensor.index_put": PUTS,
    "torch.Tensor.index_copy": ("index_copy",),
    "torch.Tensor.scatter": ("scatter.src", "scatter.reduce"),
    "torch.Tensor.scatter_add_": ("scatter_add",),
    "torch.Tensor.scatter_reduce": ("scatter_reduce",),
    "torch.index_add": ("index_add",),
    # It does so for the gradients of these.
    "torch.Tensor.__getitem__": PUTS,  # on a CPU
    "torch.gather": ("scatter_add",),
    "torch.index_select": ("index_add",),
    "torch.repeat_interleave": ("index_add",),
    # It raises an error for these.
    "torch.nn.AvgPool3d": ("avg_pool3d_backward",),
    "torch.nn.AdaptiveAvgPool2d": ("_adaptive_avg_pool2d_backward",),
    "torch.nn.AdaptiveAvgPool3d": ("_adaptive_avg_pool3d_backward",),
    "torch.nn.AdaptiveMaxPool2d": ("adaptive_max_pool2d_backward",),
    "torch.nn.FractionalMaxPool2d": ("fractional_max_pool2d_backward",),
    "torch.nn.FractionalMaxPool3d": ("fractional_max_pool3d_backward",),
    "torch.nn.MaxUnpool1d": ("max_unpool2d",),
    "torch.nn.MaxUnpool2d": ("max_unpool2d",),
    "torch.nn.MaxUnpool3d": ("max_unpool3d",),
    "torch.nn.functional.interpolate": (
        "upsample_linear1d_backward", "upsample_bilinear2d_backward", "upsample_bicubic2d_backward",
        "upsample_trilinear3d_backward", "_upsample_bilinear2d_aa_backward", "_upsample_bicubic2d_aa_backward",
    ),
    **{f"torch.nn.ReflectionPad{n}d": (f"reflection_pad{n}d_backward",) for n in (1, 2, 3)},
    "torch.nn.NLLLoss": ("nll_loss2d_forward", "nll_loss2d_backward"),  # of images; others have one sum in one block
    "torch.nn.CTCLoss": ("_ctc_loss_backward", "_cudnn_ctc_loss"),
    "torch.nn.EmbeddingBag": (
        "_embedding_bag_backward", "_embedding_bag_dense_backward", "_embedding_bag_per_sample_weights_backward",
    ),
    "torch.Tensor.put_": ("put",),
    "torch.histc": ("histc",),
    "torch.bincount": ("bincount",),
    "torch.median": ("median.dim", "nanmedian.dim"),
    "torch.nn.functional.grid_sample": (
        "grid_sampler_2d_backward", "grid_sampler_3d_backward", "cudnn_grid_sampler_backward",
    ),
    "torch.cumsum": ("cumsum",),
}  # fmt: skip
# What torch's sources say of others.
UNNAMED = (
    "_scaled_dot_product_flash_attention_backward", "_scaled_dot_product_efficient_attention_backward",
    "_scaled_dot_product_cudnn_attention_backward", "_flash_attention_backward", "_efficient_attention_backward",
    "_cudnn_attention_backward", "adaptive_max_pool3d_backward", "index_reduce",
)  # fmt: skip
UNREPEATABLE = frozenset((*UNNAMED, *(name for names in NAMED.values() for name in names)))
ON_CPU = frozenset((*PUTS, "index_copy", "put"))  # as the same documentation says
THREADED = 1 << 15  # numbers from which on several threads of a CPU write them
SCANNING = ("cumsum",)  # of floating point numbers alone
FLOATS = ("f", "bf", "c")
OPTIMIZERS = frozenset((  # of torch.optim, which is not imported to read a plan
    "ASGD", "Adadelta", "Adafactor", "Adagrad", "Adam", "AdamW", "Adamax", "LBFGS", "Muon", "NAdam", "RAdam", "RMSprop",
    "Rprop", "SGD", "SparseAdam",
))  # fmt: skip
SIZED = "memgraph_guards."  # an op of torch's whose result's sizes are checked
OPAQUE = "memgraph_opaque."
LOOKED_AT = ("aten.", "prims.", "memgraph", "getitem", "<")  # the last are Python's own functions of sizes


def unrepeatable_ops(trace: Trace, device: str = "cuda", is_compiled: bool = False) -> Counter[str]:
    """Return how often each op of a step is one that need not give the same twice.

    `is_compiled` if Inductor has compiled some of them.
    """
    differs = partial(_differs_on_gpu, is_compiled=is_compiled) if device.startswith("cuda") else _differs_on_cpu
    named = ((_unrepeatable(op), op) for op in trace.ops)
    return Counter(name for name, op in named if name and differs(name, op, trace))


def _unrepeatable(op: Op) -> str:
    """Return the name of an op that need not give the same twice; "" for others."""
    space, _, rest = op.fn.partition(".")
    name, _, overload = rest.partition(".")
    name = name.removesuffix("_")  # which an op has that writes to its argument
    if f"{space}." not in ("aten.", SIZED) or (name in SCANNING and not op.type.startswith(FLOATS)):
        return ""
    return next((known for known in (name, f"{name}.{overload}") if known in UNREPEATABLE), "")


def _differs_on_gpu(name: str, op: Op, trace: Trace, is_compiled: bool) -> bool:
    """Return False for an assignment of one number, and for the gradient of `x[indices]`.

    That is added to zeros of its own, for which a GPU's kernel sorts the indices. Inductor's does not.
    """
    if name not in PUTS or is_compiled:
        return True
    is_gradient = op.phase == "backward" and trace.op[op.reads[0]].fn.startswith("aten.new_zeros")
    return _written(op, trace) > 1 and not is_gradient


def _differs_on_cpu(name: str, op: Op, trace: Trace) -> bool:
    return name in ON_CPU and _written(op, trace) >= THREADED


def _written(op: Op, trace: Trace) -> int:
    """Return how many numbers such an op writes: those of what it reads last."""
    sizes = re.findall(r"\d+", trace.op[op.reads[-1]].type.partition("[")[2])
    return math.prod(map(int, sizes))


def repeatability(report: ReportData) -> list[str]:
    """Return lines that say what rounds otherwise than in eager, and what eager need not give twice."""
    rounding, hosts = _rounding(report), sum(isinstance(each, Stream) and each.on == HOST for each in report.plan)
    lines = [f"gradients round differently from eager's: {', '.join(rounding)}"] * bool(rounding)
    if hosts:
        lines.append(f"parameters round differently from eager's: host_update= updates {_many(hosts, 'state')} there")
    device = report.machine.device
    found = unrepeatable_ops(report.choice.captured.trace, device, is_compiled=_segments(report) > 0)
    if found:
        names = ", ".join(name if count == 1 else f"{count} x {name}" for name, count in found.most_common())
        exact = "gradients are eager's to the bit where eager gives the same twice; with these ops it need not"
        begin = "eager need not give the same twice with these ops" if rounding else exact
        other = "with which torch takes other kernels or raises an error"
        lines.append(f"{begin}, unless torch.use_deterministic_algorithms(True) is set, {other}: {names}")
    unknown = _not_looked_at(report) if device.startswith("cuda") else ""
    return [*lines, *([f"not looked at for ops that need not give the same twice: {unknown}"] if unknown else [])]


def _rounding(report: ReportData) -> list[str]:
    """Return what options that round make of the step."""
    trace = report.choice.captured.trace
    parts = max((op.microbatch for op in trace.ops), default=0)
    cut, blocks = len(report.slices), sum(row.rounds for row in report.row_blocks)
    casts = sum(isinstance(decision, Offload) and bool(decision.wire) for decision in report.plan)
    said = {
        f"lower= compiles {_many(_segments(report), 'segment')}": _segments(report),
        f"microbatches= adds up those of {parts} parts": parts,
        f"slices= runs {_many(cut, 'chain')} in parts": cut,
        f"slices= cuts {_many(blocks, 'weight')} into blocks": blocks,
        f"wire_dtype= rounds {_many(casts, 'offloaded value')}": casts,
    }
    return [line for line, count in said.items() if count]


def _segments(report: ReportData) -> int:
    return 0 if report.lowered is None else sum(op.fn == SEGMENT for op in report.lowered.trace.ops)


def _many(count: int, what: str) -> str:
    return f"{count} {what}{'s' * (count > 1)}"


def _not_looked_at(report: ReportData) -> str:
    """Name the submodules whose ops a trace does not have, and the ops of other libraries than torch."""
    ops = [op for op in report.choice.captured.trace.ops if not op.is_input]
    opaque = [row.path for row in report.opaque] or ["submodules"] * any(op.fn.startswith(OPAQUE) for op in ops)
    others = dict.fromkeys(op.fn for op in ops if not op.fn.startswith(LOOKED_AT) and not _is_update_of_torch(op))
    named = [(dict.fromkeys(opaque), "that run as they are"), (others, "of other libraries")]
    return "; ".join(f"{', '.join(names)}, {which}" for names, which in named if names)


def _is_update_of_torch(op: Op) -> bool:
    return op.phase == "update" and op.fn.removesuffix(".step") in OPTIMIZERS
