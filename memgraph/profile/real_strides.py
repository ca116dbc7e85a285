"""The strides that a kernel really gives to its results.

native_group_norm of channels_last:   the fake result is contiguous, the CPU kernel's is channels_last

torch describes most ops for tensors that are contiguous. For others, and where a size of one leaves the memory format
open, an op of torch runs once on zeros, and later traces of this process know the strides. Not yet run on a GPU.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch._subclasses import FakeTensor, FakeTensorMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes

from ..graph.nodes import aten
from ..system.trial_room import trial_room
from ..tensors.layout import has_storage

Form = tuple[Sequence[int], Sequence[int]]  # shape and strides
Strides = tuple[Form | None, ...]  # of each tensor of a result
# Besides elementwise ops: those that run on any values, and whose descriptions are known to be wrong somewhere. Kernels
# that take the workspace of another op, as those of recurrent layers, would read beyond it.
RUN = frozenset({
    "native_group_norm", "native_group_norm_backward", "native_batch_norm", "native_batch_norm_backward",
    "_native_batch_norm_legit", "_native_batch_norm_legit_functional", "native_layer_norm",
    "native_layer_norm_backward",
    "roll", "flip", "sort", "index", "cat", "clone", "empty_like", "zeros_like", "ones_like", "rand_like", "randn_like",
    "constant_pad_nd", "reflection_pad2d", "reflection_pad2d_backward", "replication_pad2d",
    "replication_pad2d_backward", "channel_shuffle", "native_channel_shuffle", "pixel_shuffle", "pixel_unshuffle",
    "im2col", "col2im", "glu", "glu_backward", "elu_backward", "silu_backward", "mish_backward", "gelu_backward",
    "hardswish_backward", "hardsigmoid_backward", "rrelu_with_noise", "rrelu_with_noise_functional",
    "rrelu_with_noise_backward", "_prelu_kernel", "_prelu_kernel_backward", "_softmax", "_softmax_backward_data",
    "_log_softmax", "_log_softmax_backward_data", "avg_pool2d", "avg_pool2d_backward", "_adaptive_avg_pool2d",
    "_adaptive_avg_pool2d_backward", "upsample_nearest2d", "upsample_bilinear2d", "upsample_bicubic2d",
})  # fmt: skip
COPIES = 2  # of all arguments and results that an op may make while it runs
LOG = logging.getLogger(__name__)
_known: dict[Any, Strides | None] = {}


def with_real_strides(
    func: Any, args: Sequence[Any], kwargs: dict[str, Any], result: Any, mode: FakeTensorMode
) -> Any:  # fmt: skip
    """Return a fake result with the strides of the kernel, which runs for them if torch may not know them."""
    if not isinstance(func, OpOverload) or func.namespace != "aten" or mode.shape_env is not None:
        return result
    leaves, form = pytree.tree_flatten((args, kwargs))
    given = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    draws = any(isinstance(leaf, torch.Generator) for leaf in leaves)
    if draws or not all(map(has_storage, given)) or not any(map(_is_open, given)):
        return result
    if func.is_view:
        return _real_view(result, args, mode) if func is aten.view.default else result
    if _returns_arguments(func) or not (torch.Tag.pointwise in func.tags or func._opname in RUN):
        return result
    results, result_form = pytree.tree_flatten(result)
    strides = _strides(func, leaves, form, given, results)
    if strides is None or len(strides) != len(results):
        return result
    pairs = zip(results, strides, strict=True)
    return pytree.tree_unflatten([_restrided(leaf, found, mode) for leaf, found in pairs], result_form)


def _returns_arguments(func: OpOverload) -> bool:
    return any(each.alias_info is not None for each in func._schema.returns)


def _is_open(tensor: Tensor) -> bool:
    """Return True if a tensor is not contiguous, or has a stride for a dimension of one that no contiguous one has."""
    expected = 1
    for size, stride in zip(reversed(tensor.shape), reversed(tensor.stride()), strict=True):
        if stride != expected:
            return True
        expected *= size
    return False


def _real_view(result: Tensor, args: Sequence[Any], mode: FakeTensorMode) -> Tensor:
    source: Tensor = args[0]
    if 1 not in source.shape and 1 not in result.shape:
        return result
    with _disable_current_modes():
        strides = torch.empty_strided(source.shape, source.stride(), device="meta").view(result.shape).stride()
    if strides == result.stride():
        return result
    with mode:
        return source.as_strided(result.shape, strides, source.storage_offset())


def _strides(
    func: OpOverload, leaves: Sequence[Any], form: Any, tensors: Sequence[Tensor], results: Sequence[Any]
) -> Strides | None:  # fmt: skip
    """Return the strides of an op's results; None if they are unknown. `tensors` are those among the `leaves`."""
    others = tuple(repr(leaf) for leaf in leaves if not isinstance(leaf, Tensor))
    key = func, str(form), others, tuple((t.shape, t.stride(), t.dtype, t.device) for t in tensors)
    if key not in _known:
        made = (each for each in results if isinstance(each, Tensor) and has_storage(each))
        nbytes = sum(each.untyped_storage().nbytes() for each in (*tensors, *made))
        if COPIES * nbytes > trial_room():
            LOG.info(
                "%s is taken to give its results the strides that torch describes: there is no room to run it", func
            )
            return None
        _known[key] = _run(func, leaves, form)
    return _known[key]


def _run(func: OpOverload, leaves: Sequence[Any], form: Any) -> Strides | None:
    devices = {leaf.device.index for leaf in leaves if isinstance(leaf, Tensor) and leaf.device.type == "cuda"}
    try:
        with _disable_current_modes(), torch.no_grad(), torch.random.fork_rng(devices):
            real = [_real(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
            args, kwargs = pytree.tree_unflatten(real, form)
            results = pytree.tree_leaves(func(*args, **kwargs))
            return tuple((result.shape, result.stride()) if isinstance(result, Tensor) else None for result in results)
    except Exception as error:  # also where the device of a trace is not there
        LOG.info("%s can't be run for the strides of its results: %s", func, error)
        return None


def _real(like: Tensor) -> Tensor:
    return torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=like.device).zero_()


def _restrided(fake: Any, real: Form | None, mode: FakeTensorMode) -> Any:
    if not isinstance(fake, FakeTensor) or real is None or real[0] != fake.shape or real[1] == fake.stride():
        return fake
    with mode:
        return torch.empty_strided(*real, dtype=fake.dtype, device=fake.device)
