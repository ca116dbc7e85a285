"""Which tensors lie in each other's memory: to move one of them would part the two.

head.weight.data = embedding.weight.data        ->  "embedding.weight and head.weight share ..."
register_buffer("seen", weight.detach()[:3])    ->  "seen and weight share ..."
"""

from __future__ import annotations

from collections.abc import Collection, Container, Mapping

from torch import Tensor, nn, optim

from .layout import has_storage, is_dense


def describe_shared_memory(
    module: nn.Module, optimizer: optim.Optimizer | None, changed: Container[str] | None = None
) -> str:
    """Why no parameter may be moved, or why these may not be `changed`: one lies in the memory of another, or of a
    buffer."""
    named = dict(module.named_parameters())
    owned = set(named.values())
    groups = optimizer.param_groups if optimizer is not None else ()
    others = [parameter for group in groups for parameter in group["params"] if parameter not in owned]
    beside = {f"parameter {i} of the optimizer that is not the module's": other for i, other in enumerate(others)}
    some = [name for name in named if changed is None or name in changed]
    moved = [name for name in some if has_storage(named[name]) and is_dense(named[name])]
    return describe_overlap(named | dict(module.named_buffers()) | beside, moved)


def describe_overlap(named: Mapping[str, Tensor], moved: Collection[str]) -> str:
    """Which of those that are to be `moved` lies in the memory of another, and what to do; empty if none does."""
    spans = sorted(
        (*address_range(tensor), name) for name, tensor in named.items() if has_storage(tensor) and tensor.numel()
    )
    until, last = 0, ""
    for begin, end, name in spans:
        if begin < until and (last in moved or name in moved):
            return f"{last} and {name} share their memory: let one Parameter stand for both"
        if end > until:
            until, last = end, name
    return ""


def address_range(tensor: Tensor) -> tuple[int, int]:
    """The addresses from its first byte to behind its last."""
    begin = tensor.data_ptr()
    extent = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)) + 1
    return begin, begin + extent * tensor.itemsize
