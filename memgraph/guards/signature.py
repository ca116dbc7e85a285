"""The facts of a call: calls with equal ones may share a graph.

    model(x, mask=None)  ->  ((x's shape, strides, dtype, ...), None), (tensors), (modes), (attributes), (variables)

They are the call's structure and constants; shape, strides, dtype, device and requires_grad of every tensor; attributes
and hooks of every submodule; torch's modes that change which kernels run; and the variables that captures have read.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as modules

from ..tensors.gradients import existing_gradients
from ..tensors.layout import has_storage
from .assumptions import Facts, TensorFact
from .attribute_guard import AttributeGuard
from .contents import IdentityKey, constant_key
from .owned_tensors import has_hooks, layout_of

GLOBAL_HOOKS = (
    modules._global_forward_hooks, modules._global_forward_pre_hooks,
    modules._global_backward_hooks, modules._global_backward_pre_hooks,
)  # fmt: skip
PRECISIONS = (("cuda", "matmul"), ("cuda", "conv"), ("cuda", "rnn"), ("mkldnn", "matmul"), ("mkldnn", "conv"))
OTHER_MODES: tuple[Callable[[], Hashable], ...] = (  # that select no kernel of torch's, but forward may ask for them
    torch.is_warn_always_enabled,
    partial(torch.get_autocast_dtype, "cpu"), partial(torch.get_autocast_dtype, "cuda"),
    torch._C._get_mkldnn_deterministic, torch._C._get_cublas_allow_fp16_reduced_precision_reduction,
    torch._C._get_cublas_allow_bf16_reduced_precision_reduction,
    partial(getattr, torch.utils.deterministic, "fill_uninitialized_memory"),
    torch.__future__.get_swap_module_params_on_conversion, torch.__future__.get_overwrite_module_params_on_conversion,
)  # fmt: skip


def signature(
    spec: Hashable, leaves: Sequence[object], attributes: AttributeGuard, settings: Sequence[Hashable] = ()
) -> Facts:
    """Return the facts of a call. Arguments that are no tensors are in it by type and value.

    Args:
        attributes: of the module, from the previous call if there was one.
        settings: what else its step depends on.
    """
    groups = attributes.groups
    modes = in_process_group(), *_modes(), *settings
    return (*_arguments(leaves), spec), attributes.tensors, modes, *groups


def has_gradients(parameters: Iterable[Tensor]) -> bool:
    """Return True if a parameter has a gradient, to which backward will add."""
    return next(existing_gradients(parameters), None) is not None


def parameters_with_grad_hooks(module: nn.Module) -> set[str]:
    """Return the names of parameters whose gradient autograd must accumulate, since hooks read it."""
    return {name for name, parameter in module.named_parameters() if has_hooks(parameter)}


def forward_hooks(module: nn.Module) -> Iterator[tuple[str, Callable[..., Any]]]:
    """Yield each forward hook of a part with the part's path, but for torch's own (spectral_norm, prune)."""
    for path, part in module.named_modules():
        for hook in (*part._forward_pre_hooks.values(), *part._forward_hooks.values()):
            if not (getattr(hook, "__module__", None) or type(hook).__module__).startswith("torch."):
                yield path, hook


def parameters_read_after_backward(module: nn.Module) -> set[str]:
    """Return the names of parameters whose gradient may be read before the update, so it stays on the device."""
    return {name for name, _ in module.named_parameters()} if in_process_group() else parameters_with_grad_hooks(module)


# The settings that `kernel_modes` returns, in this order.
KERNEL_MODES = (
    "torch.set_num_threads", "torch.use_deterministic_algorithms", "torch.use_deterministic_algorithms (warn_only)",
    "torch.backends.mkldnn", "torch.backends.nnpack", "a precision of float32 (torch.backends.*.fp32_precision)",
    "a kernel of attention (torch.backends.cuda.enable_*_sdp)", "torch.backends.cuda (math_sdp)",
    "the order of attention's kernels", "torch.backends.cudnn", "torch.backends.mha",
)  # fmt: skip


def kernel_modes() -> tuple[Hashable, ...]:
    """Return torch's settings that select kernels."""
    backends, cuda = torch.backends, torch.backends.cuda
    return (
        torch.get_num_threads(),
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        torch._C._get_mkldnn_enabled(),
        torch._C._get_nnpack_enabled(),
        tuple(torch._C._get_fp32_precision_getter(*place) for place in PRECISIONS),
        (cuda.flash_sdp_enabled(), cuda.math_sdp_enabled(), cuda.mem_efficient_sdp_enabled(), cuda.cudnn_sdp_enabled()),
        torch._C._get_math_sdp_allow_fp16_bf16_reduction(),
        tuple(torch._C._get_sdp_priority_order()),
        backends.cudnn.enabled and (backends.cudnn.benchmark, backends.cudnn.deterministic),
        backends.mha.get_fastpath_enabled(),
    )


def in_process_group() -> bool:
    """Return True if a data-parallel wrapper may read gradients: its hooks on accumulation can't be seen."""
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def _arguments(leaves: Sequence[object]) -> tuple[Hashable, ...]:
    """Return a key for each leaf. A tensor that is passed twice, or shares a storage, counts by its first position."""
    first: dict[tuple[str, int], int] = {}
    keys: list[Hashable] = []
    for place, leaf in enumerate(leaves):
        if not isinstance(leaf, Tensor):
            keys.append(constant_key(leaf))
            continue
        if not has_storage(leaf) or leaf.is_conj() or leaf.is_neg():  # no such call is captured
            keys.append((leaf.layout, leaf.is_conj(), leaf.is_neg()))
            continue
        same = first.setdefault(("tensor", id(leaf)), place)
        storage = first.setdefault(("storage", leaf.untyped_storage()._cdata), place)
        keys.append(TensorFact(same, storage, type(leaf), leaf.is_leaf, layout_of(leaf)))
    return tuple(keys)


def _modes() -> tuple[Hashable, ...]:
    kinds = [kind for kind in ("cpu", "cuda") if torch.is_autocast_enabled(kind)]
    return (
        tuple((kind, torch.get_autocast_dtype(kind)) for kind in kinds),
        torch.is_autocast_cache_enabled(),
        torch.is_grad_enabled(),
        torch.get_default_dtype(),
        torch.get_default_device(),
        tuple(IdentityKey(hook) for hooks in GLOBAL_HOOKS for hook in hooks.values()),
        kernel_modes(),
        other_modes(),
    )


def other_modes() -> tuple[Hashable, ...]:
    """Return settings of torch that select no kernel."""
    return tuple(mode() for mode in OTHER_MODES)
