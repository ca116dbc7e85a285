"""The kinds of tensors that a step can read: dense ones of torch's own class.

buffer adjacency, torch.sparse_coo   ->   CaptureError: give its indices and values as dense tensors
"""

from __future__ import annotations

from typing import Any
from weakref import ProxyTypes

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ...errors import CaptureError
from ...guards.packages import is_installed
from ...tensors.layout import has_storage
from ...tensors.pytree import flatten, tensors_of

SPARSE = {torch.sparse_coo, torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc}


def require_strided(tensor: Tensor, label: str) -> None:
    """
    Args:
        label: names the tensor in the error.

    Raises:
        CaptureError: it is sparse, nested, quantized, of another library's layout, or of a class of its own.
    """
    if has_storage(tensor) and not tensor.is_quantized and not is_traceable_wrapper_subclass(tensor):
        if not is_installed(kind := type(tensor)):
            raise CaptureError(
                f"{label} is of the class {kind.__qualname__}, but a plain tensor stands for it while a step is "
                "captured, and forward would find neither the class nor its methods: make it a plain tensor or "
                "parameter, and mark it by an attribute, which forward does find"
            )
        return
    raise CaptureError(
        f"{label} is a {_kind(tensor)}; only dense tensors of torch's own class are captured: {_advice(tensor)}"
    )


def require_strided_module(module: nn.Module) -> None:
    """Check the parameters and buffers of a module; raises as `require_strided`, and if it is a part of itself."""
    _refuse_cycles(module, "", ())
    for kind, tensors in (("parameter", module.named_parameters()), ("buffer", module.named_buffers())):
        for name, tensor in tensors:
            require_strided(tensor, f"{kind} {name}")


def _refuse_cycles(module: nn.Module, path: str, around: tuple[nn.Module, ...]) -> None:
    for name, child in module._modules.items():
        # A method that a proxy finds is bound to what it stands for.
        part = child.__init__.__self__ if type(child) in ProxyTypes else child  # type: ignore[misc]
        where = f"{path}.{name}".lstrip(".")
        if part is module or any(part is each for each in around):
            raise CaptureError(
                f"submodule {where} is a module that it is inside of, which torch's functions for parameters do not "
                "take: keep a parent in a list, or as a weakref.ref"
            )
        if part is not None:
            _refuse_cycles(part, where, (*around, module))


def require_strided_arguments(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Check the arguments of a call; raises as `require_strided`."""
    for i, tensor in enumerate(tensors_of(flatten((args, kwargs))[0])):
        require_strided(tensor, f"input {i}")


def _kind(tensor: Tensor) -> str:
    if tensor.is_quantized or tensor.is_nested:
        return "quantized tensor" if tensor.is_quantized else "nested tensor"
    return f"{tensor.layout} {type(tensor).__name__}"


def _advice(tensor: Tensor) -> str:
    if tensor.layout in SPARSE:
        return (
            "give its indices and values as tensors of their own, and multiply with index_select and index_add "
            "(or scatter_reduce, segment_reduce); or do this outside of the module"
        )
    if tensor.is_nested:
        return "pad the rows, and mask what follows their ends"
    if tensor.is_quantized:
        return "call .dequantize() on it"
    if tensor.is_mkldnn:
        return "call .to_dense() on it"
    return (
        "give the plain tensors that it is made of; parameters that fully_shard, parallelize_module or "
        "distribute_module have sharded can't be captured, but a compiled module may be inside fully_shard"
    )
