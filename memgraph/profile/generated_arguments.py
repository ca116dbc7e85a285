"""Generate the arguments of an op, to run it alone.

mm(f32[64, 32], f32[32, 8])          ->   numbers: 0.5, or drawn ones for products on a GPU
index(f32[64, 32], i64[8])           ->   and integers that are valid as indices

Generate inputs on which an op whose sizes depend on values makes results of given sizes.

memgraph_guards::nonzero(f32[100], sizes=[2, 7, 1])   ->   seven ones, and zeros
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx
from torch._ops import OpOverload
from torch.fx.node import map_arg
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.flop_counter import flop_registry

from ..graph.aten_shims import COPY_STORAGES
from ..graph.guard_ops import SIZED
from ..graph.nodes import aten
from .divided_arguments import fill_divisions

DRAWN = (torch.float64, torch.float32, torch.float16, torch.bfloat16)

# Arguments that are counts: a count of zero would give a workspace of zero.
COUNTS = ("bag_size",)


def generated_arguments(node: fx.Node, device: torch.device, number: int, truth: bool) -> Any:
    """Return the op's arguments, with generated tensors."""
    fill = _fill_storage if node.target in COPY_STORAGES else _fill
    counts = _counts(node)

    def make(read: fx.Node) -> Any:
        if "val" not in read.meta:  # replaces a generator of the module, whose state must not change
            return torch.Generator(device)
        integer = 1 if read in counts else number
        generate = partial(_generated_tensor, fill=fill, number=integer, truth=truth)
        return tree_map(lambda value: generate(value) if isinstance(value, Tensor) else value, read.meta["val"])

    args, kwargs = map_arg((node.args, dict(node.kwargs)), make)
    fill_for_sizes(node.target, args, kwargs)
    fill_divisions(node.target, args, kwargs)
    if device.type != "cpu" and getattr(node.target, "overloadpacket", None) in flop_registry:
        randomize((args, kwargs), device)
    return args, kwargs


def randomize(arguments: Any, device: torch.device) -> None:
    """Draw the numbers of a product: on equal ones a GPU takes less power, and so less time."""
    for value in tree_leaves(arguments):
        if isinstance(value, Tensor) and value.dtype in DRAWN and value.device == device:
            whole = torch.empty(0, dtype=value.dtype, device=device).set_(value.untyped_storage())
            whole.normal_(generator=torch.Generator(device).manual_seed(0))  # of an expanded one, too


def tensor_in_storage(fake: Tensor, storages: dict[int, torch.UntypedStorage]) -> Tensor:
    """Return a tensor at the offset of `fake`, in a storage of zeros of the same size, or the one that it has in
    `storages`."""
    key, nbytes = fake.untyped_storage()._cdata, fake.untyped_storage().nbytes()
    if key not in storages:
        storages[key] = torch.zeros(nbytes, dtype=torch.uint8, device=fake.device).untyped_storage()
    value = torch.empty(0, dtype=fake.dtype, device=fake.device)
    return value.set_(storages[key], fake.storage_offset(), fake.shape, fake.stride())


def _counts(node: fx.Node) -> set[object]:
    if not isinstance(node.target, torch._ops.OpOverload):
        return set()
    arguments = zip(node.target._schema.arguments, node.args, strict=False)
    return {read for argument, read in arguments if argument.name in COUNTS and isinstance(read, fx.Node)}


def _generated_tensor(fake: Tensor, fill: Callable[[Tensor, float], Tensor], number: int, truth: bool) -> Tensor:
    """Return a real tensor like `fake`, with integers that are valid as indices."""
    integer = float(truth if fake.dtype == torch.bool else number)
    return fill(fake, 0.5 if fake.is_floating_point() else integer)


def _fill(fake: Tensor, number: float) -> Tensor:
    value = torch.empty_strided(fake.shape, fake.stride(), dtype=fake.dtype, device=fake.device)
    return _lazy(value.fill_(number), fake)


def _lazy(value: Tensor, fake: Tensor) -> Tensor:
    """Make the value lazily conjugated or negated like `fake`, because most ops then copy it first."""
    value = value.conj() if fake.is_conj() else value
    return torch._neg_view(value) if fake.is_neg() else value


def _fill_storage(fake: Tensor, number: float) -> Tensor:
    return _lazy(tensor_in_storage(fake, {}).fill_(number), fake)


def fill_for_sizes(op: object, args: Any, kwargs: Mapping[str, Any]) -> None:
    """Change the arguments of an op in place, so that its results have the sizes in `kwargs`."""
    fill = FILLERS.get(op)
    if fill is not None:
        fill(kwargs["sizes"], *args)


def _nonzero(sizes: list[int], x: Tensor) -> None:
    x.copy_(_first(x.numel(), sizes[1]).view(x.shape))


def _masked_select(sizes: list[int], x: Tensor, mask: Tensor) -> None:
    repeats = torch.broadcast_shapes(x.shape, mask.shape).numel() // max(mask.numel(), 1)
    mask.copy_(_first(mask.numel(), sizes[1] // max(repeats, 1)).view(mask.shape))


def _unique(sizes: list[int], x: Tensor, *rest: object) -> None:
    x.copy_((torch.arange(x.numel()) % max(sizes[1], 1)).view(x.shape))


def _unique_dim(sizes: list[int], x: Tensor, dim: int, *rest: object) -> None:
    count = sizes[1 + dim % x.dim()]
    x.copy_(_along(torch.arange(x.shape[dim]) * count // max(x.shape[dim], 1), x, dim))


def _unique_consecutive(
    sizes: list[int], x: Tensor, inverse: bool = False, counts: bool = False, dim: int | None = None
) -> None:
    length = x.numel() if dim is None else x.shape[dim]
    runs = torch.arange(length) * sizes[1 if dim is None else 1 + dim % x.dim()] // max(length, 1)
    x.copy_(runs.view(x.shape) if dim is None else _along(runs, x, dim))


def _largest_first(sizes: list[int], x: Tensor, *rest: object) -> None:
    """Let the first number be the size."""
    x.zero_()
    x[:1] = sizes[1]


def _bincount(sizes: list[int], x: Tensor, *rest: object) -> None:
    x.zero_()
    x[:1] = max(sizes[1] - 1, 0)


def _first(length: int, count: int) -> Tensor:
    return torch.arange(length) < count


def _along(values: Tensor, like: Tensor, dim: int) -> Tensor:
    return values.view([-1 if i == dim % like.dim() else 1 for i in range(like.dim())]).expand(like.shape)


_FILLERS: tuple[tuple[OpOverload, Callable[..., None]], ...] = (
    (aten.nonzero.default, _nonzero),
    (aten.masked_select.default, _masked_select),
    (aten._unique.default, _unique),
    (aten._unique2.default, _unique),
    (aten.unique_dim_consecutive.default, _unique_dim),
    (aten.unique_dim.default, _unique_dim),
    (aten.unique_consecutive.default, _unique_consecutive),
    (aten.repeat_interleave.Tensor, _largest_first),
    (aten.bincount.default, _bincount),
)
FILLERS: Mapping[object, Callable[..., None]] = {SIZED[op]: fill for op, fill in _FILLERS}
