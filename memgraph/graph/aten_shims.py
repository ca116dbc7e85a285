"""Ops that aten lacks, so that a functional graph runs the kernels that eager runs.

    x.add_(y), x with gaps in its memory      ->  laid(add(x, y), x's strides)
    mkldnn_rnn_layer(x, ...), grad mode on    ->  rnn_layer(x, ...)
    _ctc_loss(x, targets, lengths in tensors) ->  ctc_loss(x, ...)
    select_scatter(x, y), x an input          ->  select_scatter(laid(x, x's strides), y)
    sum(index(x, [mask]), [0])                ->  sum_rows(x, mask, [0])

Kernels look at strides: the last bits of a sigmoid depend on the length of a row. oneDNN's recurrent layer makes the
workspace of its backward only in grad mode. What ctc_loss keeps for backward is as wide as the longest target of a
batch; here it is as wide as targets may be, so that no size depends on values. A scatter copies the whole storage of
its argument; if that is a slice of the caller's data set, the storage is the data set. How many rows a mask selects is
a size that only their sum hides.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch._subclasses import FakeTensorMode

from .define_op import define_op
from .nodes import all_storages, allocates_nothing, aten, fake_result, storages

LAYER = aten.mkldnn_rnn_layer.default
CTC = aten._ctc_loss.Tensor
# Functional writes into a view. They copy the whole storage of the view, not only what it covers.
COPY_STORAGES = (
    aten.copy.default,
    aten.slice_scatter.default,
    aten.select_scatter.default,
    aten.diagonal_scatter.default,
    aten.as_strided_scatter.default,
)

_library = torch.library.Library("memgraph_surrogates", "DEF")


def copy_with_strides(x: Tensor, stride: Sequence[int]) -> Tensor:
    """Return a copy of `x` with these strides."""
    return torch.empty_strided(x.shape, stride, dtype=x.dtype, device=x.device).copy_(x)


def use_surrogates(graph: fx.Graph) -> None:
    """Let recurrent layers that were traced in grad mode run in grad mode, and fix the sizes of results."""
    for node in graph.find_nodes(op="call_function", target=LAYER):
        if node.meta["val"][3].numel():
            node.target = RNN_LAYER
    for node in graph.find_nodes(op="call_function", target=CTC):
        node.target = CTC_LOSS


def longest_target(targets: Tensor) -> int:
    """Return the length that no target of ctc_loss exceeds, which is known without the lengths."""
    return targets.shape[1] if targets.dim() == 2 else targets.numel()


def copy_only_inputs(graph: fx.Graph, mode: FakeTensorMode) -> None:
    """Let ops that copy a storage copy only the input, since the size of its storage is unknown."""
    inputs = all_storages(graph.find_nodes(op="placeholder"))
    views = {node for node in graph.nodes if node.op == "call_function" and allocates_nothing(node)}
    changed = set[fx.Node]()
    for node in graph.nodes:
        if node.target in COPY_STORAGES and not inputs.isdisjoint(storages(node.args[0])):
            value: Tensor = node.args[0].meta["val"]
            if node.meta["val"].stride() != value.stride():  # its elements overlap, and they alone are copied
                continue
            with graph.inserting_before(node):
                copy = graph.call_function(COPY_WITH_STRIDES, (node.args[0], list(value.stride())))
            copy.meta = {**node.meta, "val": fake_result(copy, mode)}
            node.args = (copy, *node.args[1:])
        elif node not in views or changed.isdisjoint(node.all_input_nodes):
            continue
        node.meta["val"] = fake_result(node, mode)
        changed.add(node)


def _rnn_layer(*args: Any) -> Any:
    with torch.enable_grad(), torch._C._AutoDispatchBelowAutograd():
        return LAYER(*args)


def _fake_rnn_layer(*args: Any) -> Any:
    output, hy, cy, workspace = LAYER(*args)
    return output, hy, cy, workspace.new_empty(1)


def _sum_rows(x: Tensor, mask: Tensor, dims: list[int], keepdim: bool) -> Tensor:
    """Return the sum of the rows that a mask selects."""
    return x[mask].sum(dims, keepdim)


def _fake_sum_rows(x: Tensor, mask: Tensor, dims: list[int], keepdim: bool) -> Tensor:
    return x.new_empty((mask.numel(), *x.shape[mask.dim() :])).sum(dims, keepdim)


def _ctc_loss(log_probs: Tensor, targets: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    """Run the op, and return what it keeps in a tensor of fixed width; its backward reads the part that is filled."""
    steps, batch = log_probs.shape[0], log_probs.shape[1] if log_probs.dim() == 3 else 1
    width = 2 * longest_target(targets) + 1
    loss, kept = CTC(log_probs, targets, *rest)
    missing = width - kept.shape[-1]
    if not missing:
        return loss, kept
    # Lengths of zero, by which it is priced, need less than others: with this, all need the same.
    reserved = log_probs.new_empty(batch, steps, missing)
    wide = log_probs.new_empty(batch, steps, width)
    del reserved
    wide[..., : kept.shape[-1]] = kept
    return loss, wide


def _fake_ctc_loss(*args: Any) -> Any:
    return CTC(*args)  # described in `op_descriptions`


COPY_WITH_STRIDES = define_op(
    _library, "laid(Tensor x, SymInt[] stride) -> Tensor", copy_with_strides, copy_with_strides
)
SUM_ROWS = define_op(
    _library, "sum_rows(Tensor x, Tensor mask, int[] dims, bool keepdim) -> Tensor", _sum_rows, _fake_sum_rows
)
RNN_LAYER = define_op(
    _library, str(LAYER._schema).replace("aten::mkldnn_rnn_layer", "rnn_layer"), _rnn_layer, _fake_rnn_layer
)
CTC_LOSS = define_op(
    _library, str(CTC._schema).replace("aten::_ctc_loss.Tensor", "ctc_loss"), _ctc_loss, _fake_ctc_loss
)
