"""Generate arguments that say how an op's work is divided, so that it is priced with all of its work.

    _grouped_mm(f32[100, 8], f32[3, 8, 8], offs)   ->   offs = [100, 100, 100]: all rows are of the first group

With offsets of zero there would be nothing to compute, and no workspace to measure. One large group needs the most.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from ..graph.recurrent.layer_ops import BACKWARD, FORWARD

Arguments = Mapping[str, Any]


def fill_divisions(op: object, args: Sequence[Any], kwargs: Arguments) -> None:
    """Change the arguments of an op in place, so that it does all its work."""
    if isinstance(op, OpOverload) and str(op) in FILLERS:
        names = (argument.name for argument in op._schema.arguments)
        FILLERS[str(op)](dict(zip(names, args, strict=False)) | dict(kwargs))


def _groups(given: Arguments) -> None:
    """The rows that are divided are those of the first matrix, what is summed, or the columns of the second."""
    a, b = given["self"], given["mat2"]
    rows = b.shape[1] if a.dim() == 3 else a.shape[0 if b.dim() == 3 else 1]
    if given.get("offs") is not None:
        given["offs"].fill_(rows)


def _segments(given: Arguments) -> None:
    size = given["data"].shape[given.get("axis", 0)]
    if given.get("lengths") is not None:
        given["lengths"].zero_()[..., :1] = size
    if given.get("offsets") is not None:
        given["offsets"].zero_()[..., 1:] = size


def _repeats(given: Arguments) -> None:
    if given.get("output_size") is not None:
        given["repeats"].zero_()[:1] = given["output_size"]


def _holds(given: Arguments) -> None:
    """A GPU stops the process at an assertion that fails."""
    given["self"].fill_(1)


def _source_is_enough(given: Arguments) -> None:
    """Let no more places of a mask be true than the source has numbers: a GPU stops the process there too."""
    x, mask, source = given["self"], given["mask"], given["source"]
    if bool(mask.any()):
        count = source.numel() * mask.numel() // max(x.numel(), 1)
        mask.copy_((torch.arange(mask.numel()) < count).view(mask.shape))


def _positive_definite(given: Arguments) -> None:
    matrix: Tensor = given["self"]
    matrix.copy_(torch.eye(matrix.shape[-1], dtype=matrix.dtype, device=matrix.device))


def _saved_by_forward(given: Arguments) -> None:
    """Let a recurrent layer's backward read what its forward saves, in the place of the generated tensors."""
    for tensor in given["saved"]:
        tensor.set_()  # both need not exist at once
    layer = [given[argument.name] for argument in FORWARD._schema.arguments]
    results: list[Tensor] = FORWARD(*layer)
    ticket = results.pop()
    for tensor, value in zip(given["saved"], results[len(results) - len(given["saved"]) :], strict=True):
        tensor.set_(value.untyped_storage(), 0, value.shape, value.stride())
    given["ticket"].__dict__.update(vars(ticket))


# By name, since torch has dropped some of them: `cholesky` in 2.15.
FILLERS: Mapping[str, Callable[[Arguments], None]] = {
    "aten._grouped_mm.default": _groups,
    "aten.segment_reduce.default": _segments,
    "aten._segment_reduce_backward.default": _segments,
    "aten.repeat_interleave.Tensor": _repeats,
    "aten.cholesky.default": _positive_definite,
    "aten._assert_async.default": _holds,
    "aten._assert_async.msg": _holds,
    "aten.masked_scatter.default": _source_is_enough,
    "aten.masked_scatter_.default": _source_is_enough,
    str(BACKWARD): _saved_by_forward,
}
