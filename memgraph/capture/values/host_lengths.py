"""Let functions that read tensors on the host ask for values as Python does, so that they are guards of the graph.

    pack_padded_sequence(x, lengths)           ->   lengths.tolist();  memgraph_packed::pack(x, [3, 3, 1])
    lstm(data, batch_sizes, ...)               ->   batch_sizes.tolist(); one op a layer; on a GPU an error
    ctc_loss(x, targets[7], ..., lengths)      ->   lengths.max().item();  ctc_loss(x, targets[3, 3], ...)
    tensor_split(x, indices)                   ->   tensor_split(x, indices.tolist())
    tensor([x.max(), 3])                       ->   stack([x.max(), tensor(3)]), for which no value is needed
    f"expert_{index}", an integer in a tensor  ->   index.item()

torch reads their memory in C++, and fake tensors have none.

Ops that pack rows of several lengths and pad them again, with sizes that are known before they run.

    pack(x[T, B, ...], batch_sizes=[3, 3, 1])       ->   data[7, ...]
    pad(data[7, ...], batch_sizes=[3, 3, 1])        ->   x[3, 3, ...], zeros where a row has ended

`batch_sizes` says how many rows are longer than 0, 1, ... steps. Each op is the other's backward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial, reduce
from threading import get_ident
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch._subclasses import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map_only

from ...graph.define_op import define_op
from ...graph.nodes import aten
from ...graph.recurrent.saved_graph import PLAIN
from .recurrent_layers import run_layers

PACKED_WEIGHTS = "cuDNN runs a recurrent layer on packed weights"


@contextmanager
def readable_lengths() -> Iterator[None]:
    """Replace the functions of READERS in this thread."""
    thread = get_ident()
    with ExitStack() as stack:
        for reader in READERS:
            plain = getattr(reader.owner, reader.name)
            here = _in_thread(thread, partial(reader.ask, plain), plain)
            stack.enter_context(mock.patch.object(reader.owner, reader.name, here))
        yield


@contextmanager
def lengths_as_in_eager() -> Iterator[None]:
    """Let torch's own functions read the host's memory in a block inside of `readable_lengths`."""
    with ExitStack() as stack:
        for reader in READERS:
            stack.enter_context(mock.patch.object(reader.owner, reader.name, reader.plain))
        yield


def _in_thread(thread: int, function: Callable[..., Any], plain: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that other threads call as it was."""

    def call(*args: Any, **kwargs: Any) -> Any:
        return (function if get_ident() == thread else plain)(*args, **kwargs)

    return call


def _pack(_: object, input: Tensor, lengths: Tensor, batch_first: bool) -> tuple[Tensor, Tensor]:
    values: list[int] = lengths.tolist()
    _refuse_lengths(values, input.shape[0 if batch_first else 1])
    sizes = batch_sizes_of(values)
    return PACK(input, sizes, batch_first), torch.tensor(sizes)


def _refuse_lengths(lengths: Sequence[int], rows: int) -> None:
    """Raise what torch raises for them."""
    if len(lengths) != rows:
        raise RuntimeError(f"Expected `len(lengths)` to be equal to batch_size, but got {len(lengths)} ({rows=})")
    if min(lengths, default=0) <= 0:
        raise RuntimeError("Length of all samples has to be greater than 0, but found an element in 'lengths' <= 0")
    if sorted(lengths, reverse=True) != list(lengths):
        raise RuntimeError(
            "`lengths` array must be sorted in decreasing order when `enforce_sorted` is True; "
            "pass `enforce_sorted=False` to pack_padded_sequence"
        )


def _pad(
    _: object, data: Tensor, batch_sizes: Tensor, batch_first: bool, value: float, total_length: int
) -> tuple[Tensor, Tensor]:
    sizes: list[int] = batch_sizes.tolist()
    return PAD(data, sizes, batch_first, value, total_length), torch.tensor(lengths_of(sizes))


def _recurrent(kind: str, plain: Callable[..., Any], x: Tensor, *args: Any) -> Any:
    """Run a recurrent layer with batch sizes that lie in memory.

    Raises:
        NotImplementedError: cuDNN would run it, on weights that are packed into one storage, which no trace can show,
            and with a state of dropout that torch keeps for the process.
    """
    if isinstance(x, FakeTensor) and _is_cudnns(x):
        raise NotImplementedError(PACKED_WEIGHTS)
    is_packed = isinstance(args[3], bool) and not isinstance(args[2], bool)
    sizes: list[int] = args[0].tolist() if is_packed else []
    if isinstance(x, FakeTensor) and (results := run_layers(kind, x, sizes, *args[is_packed:])) is not None:
        return results
    if is_packed:
        with _disable_current_modes():
            args = (torch.tensor(sizes), *args[1:])
    return plain(x, *args)


def _is_cudnns(x: Tensor) -> bool:
    return x.device.type == "cuda" and _cudnn_is_enabled()


def _cudnn_is_enabled() -> bool:
    return bool(torch.backends.cudnn.enabled)


def _ctc_loss(
    plain: Callable[..., Tensor], log_probs: Tensor, targets: Tensor, input_lengths: Any, target_lengths: Any,
    *args: Any, **kwargs: Any,
) -> Tensor:  # fmt: skip
    """Call ctc_loss with lengths in tensors and targets in rows, so that only the longest of these is needed."""
    input_lengths, target_lengths = map(_as_tensor, (input_lengths, target_lengths))
    if targets.dim() == 1 and log_probs.dim() == 3 and targets.numel() and log_probs.device.type == "cpu":
        starts = target_lengths.cumsum(0) - target_lengths
        steps = torch.arange(int(target_lengths.max()), device=starts.device)
        targets = targets[(starts[:, None] + steps).clamp(max=targets.numel() - 1).to(targets.device)]
    return plain(log_probs, targets, input_lengths, target_lengths, *args, **kwargs)


def _as_tensor(lengths: Any) -> Tensor:
    return lengths if isinstance(lengths, Tensor) else torch.tensor(lengths)


def _tensor_split(plain: Callable[..., Any], x: Tensor, parts: Any = None, dim: int = 0, **kwargs: Any) -> Any:
    parts = kwargs.get("tensor_indices_or_sections", kwargs.get("indices", kwargs.get("sections", parts)))
    return plain(x, parts.tolist() if isinstance(parts, Tensor) else parts, dim)


def _tensor(plain: Callable[..., Tensor], data: Any, *args: Any, **kwargs: Any) -> Tensor:
    """Make a tensor of a list with tensors in it."""
    leaves = tree_leaves(data) if isinstance(data, list | tuple) else []
    inferred = _type_of(leaves)
    if inferred is None or args:
        return plain(data, *args, **kwargs)
    dtype = kwargs.get("dtype") or inferred
    if not all(_is_stored_as(leaf, dtype) for leaf in leaves):
        return plain(tree_map_only(Tensor, Tensor.tolist, data), **kwargs)
    device = kwargs.get("device")
    made = _stacked(plain, data, dtype, torch.get_default_device() if device is None else device)
    return made.requires_grad_(kwargs.get("requires_grad", False))


def _new_tensor(plain: Callable[..., Tensor], like: Tensor, data: Any, **kwargs: Any) -> Tensor:
    given = {"dtype": like.dtype, "device": like.device} | {k: v for k, v in kwargs.items() if v is not None}
    return _tensor(lambda data, **kwargs: plain(like, data, **kwargs), data, **given)


def _type_of(leaves: Sequence[Any]) -> torch.dtype | None:
    """Return the type that torch gives a list; None if there is no tensor in it."""
    plain = {bool: torch.bool, int: torch.int64, float: torch.get_default_dtype()}
    types = [leaf.dtype if isinstance(leaf, Tensor) else plain.get(type(leaf)) for leaf in leaves]
    if None in types or not any(isinstance(leaf, Tensor) for leaf in leaves):
        return None
    return reduce(torch.promote_types, types)  # type: ignore[arg-type]


def _is_stored_as(leaf: Any, dtype: torch.dtype) -> bool:
    """Return True if a cast gives the bits that torch stores for a number of Python's."""
    if not isinstance(leaf, Tensor):
        return type(leaf) in (bool, int, float)
    to_float = dtype.is_floating_point and not leaf.is_complex()
    return to_float or torch.promote_types(leaf.dtype, dtype) == dtype


def _stacked(plain: Callable[..., Tensor], data: Any, dtype: torch.dtype, device: Any) -> Tensor:
    if isinstance(data, list | tuple):
        return torch.stack([_stacked(plain, item, dtype, device) for item in data])
    if not isinstance(data, Tensor):
        return plain(data, dtype=dtype, device=device)
    is_rounded_once = dtype.is_floating_point and not data.is_floating_point()  # from Python's float
    value = data.detach().to(torch.float64) if is_rounded_once else data.detach()
    return value.to(device=device, dtype=dtype)


def _formatted(_: object, x: Tensor, spec: str) -> str:
    """Write an integer by its value, as eager does; a number that is only logged is not asked for."""
    is_name = x.dim() == 0 and not x.is_floating_point() and not x.is_complex()
    return format(x.item(), spec) if is_name else object.__format__(repr(x), spec)


@dataclass(frozen=True)
class Reader:
    """A function of torch's that reads the host's memory, and what is called in its place: `ask(plain, *args)`."""

    owner: Any
    name: str
    ask: Callable[..., Any]
    plain: Callable[..., Any]


_READS: tuple[tuple[Callable[..., Any], tuple[Any, ...], tuple[str, ...]], ...] = (
    (_pack, (torch, torch._VF), ("_pack_padded_sequence",)),
    (_pad, (torch, torch._VF), ("_pad_packed_sequence",)),
    *((partial(_recurrent, kind), (torch._VF,), (kind,)) for kind in PLAIN),
    (_ctc_loss, (torch,), ("ctc_loss",)),
    (_tensor_split, (torch, Tensor), ("tensor_split",)),
    (_tensor, (torch,), ("tensor", "as_tensor")),
    (_new_tensor, (Tensor,), ("new_tensor",)),
    (_formatted, (FakeTensor,), ("__format__",)),
)
READERS = tuple(
    Reader(owner, name, ask, getattr(owner, name))
    for ask, owners, names in _READS
    for owner in owners
    for name in names
)


def batch_sizes_of(lengths: Sequence[int]) -> list[int]:
    """Return how many rows are longer than 0, 1, ... steps."""
    return [sum(length > step for length in lengths) for step in range(max(lengths, default=0))]


def lengths_of(batch_sizes: Sequence[int]) -> list[int]:
    """Return the lengths of rows, the longest first."""
    return [sum(size > row for size in batch_sizes) for row in range(batch_sizes[0])]


def _packed(input: Tensor, batch_sizes: list[int], batch_first: bool) -> Tensor:
    return aten._pack_padded_sequence.default(input, torch.tensor(lengths_of(batch_sizes)), batch_first)[0]


def _fake_pack(input: Tensor, batch_sizes: list[int], batch_first: bool) -> Tensor:
    return input.new_empty(sum(batch_sizes), *input.shape[2:])


def _padded(data: Tensor, batch_sizes: list[int], batch_first: bool, value: float, total_length: int) -> Tensor:
    sizes = torch.tensor(batch_sizes)
    padded: Tensor = aten._pad_packed_sequence.default(data, sizes, batch_first, value, total_length)[0]
    return padded


def _fake_pad(data: Tensor, batch_sizes: list[int], batch_first: bool, value: float, total_length: int) -> Tensor:
    padded = data.new_empty(max(total_length, len(batch_sizes)), batch_sizes[0], *data.shape[1:])
    return padded.transpose(0, 1) if batch_first else padded


def _save_pack(ctx: Any, inputs: Any, output: Tensor) -> None:
    input, ctx.batch_sizes, ctx.batch_first = inputs
    ctx.total_length = input.shape[1 if ctx.batch_first else 0]


def _pack_backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
    return PAD(gradient, ctx.batch_sizes, ctx.batch_first, 0.0, ctx.total_length), None, None


def _save_pad(ctx: Any, inputs: Any, output: Tensor) -> None:
    _, ctx.batch_sizes, ctx.batch_first, _, _ = inputs


def _pad_backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None, None]:
    return PACK(gradient, ctx.batch_sizes, ctx.batch_first), None, None, None, None


_library = torch.library.Library("memgraph_packed", "DEF")
PACK = define_op(_library, "pack(Tensor input, int[] batch_sizes, bool batch_first) -> Tensor", _packed, _fake_pack)
PAD = define_op(
    _library, "pad(Tensor data, int[] batch_sizes, bool batch_first, Scalar value, int total_length) -> Tensor",
    _padded, _fake_pad,
)  # fmt: skip
torch.library.register_autograd("memgraph_packed::pack", _pack_backward, setup_context=_save_pack, lib=_library)
torch.library.register_autograd("memgraph_packed::pad", _pad_backward, setup_context=_save_pad, lib=_library)
