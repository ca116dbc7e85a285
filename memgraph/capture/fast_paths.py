"""What eager takes without gradients, and leaves out in a trace, though it differs in the last bits.

    TransformerEncoderLayer, eval, no_grad   ->   one aten._transformer_encoder_layer_fwd, as in eager
    torch.linalg.svdvals(x), no gradient     ->   aten._linalg_svd(x, compute_uv=False), as in eager

Where torch sees that it is traced it leaves them out, because a trace may want to differentiate what is in them.  Here
nobody does: with gradients, torch does not take them in eager either.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch._subclasses import FakeTensor
from torch.nn.modules import activation


@contextmanager
def eager_fast_paths() -> Iterator[None]:
    """Let attention and encoder layers choose as they do when nobody traces."""
    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(torch.overrides, "has_torch_function", _is_overridden))
        if hasattr(activation, "_is_make_fx_tracing"):
            stack.enter_context(mock.patch.object(activation, "_is_make_fx_tracing", lambda: False))
        yield


def _is_overridden(tensors: Iterable[object]) -> bool:
    """Whether a class of one of these overrides torch's functions; the mode of the trace does not count."""
    kinds = {type(tensor) for tensor in tensors} - {Tensor}
    off = torch._C._disabled_torch_function_impl
    return any(getattr(kind, "__torch_function__", off) is not off for kind in kinds)


@contextmanager
def eager_value_decompositions() -> Iterator[None]:
    """Let singular values and eigenvalues be computed without vectors where eager would, which gives other bits."""
    svdvals, eigvalsh = torch.linalg.svdvals, torch.linalg.eigvalsh

    def singular(A: Tensor, *, driver: str | None = None, **kwargs: Any) -> Tensor:
        if kwargs or _needs_vectors(A):
            return svdvals(A, driver=driver, **kwargs)
        return torch.ops.aten._linalg_svd(A, False, False, driver=driver)[1]

    def eigen(A: Tensor, UPLO: str = "L", **kwargs: Any) -> Tensor:
        if kwargs or _needs_vectors(A):
            return eigvalsh(A, UPLO, **kwargs)
        return torch.ops.aten._linalg_eigh(A, UPLO, False)[0]

    with mock.patch.object(torch.linalg, "svdvals", singular), mock.patch.object(torch.linalg, "eigvalsh", eigen):
        yield


def _needs_vectors(matrix: object) -> bool:
    """Whether a gradient would need them; other threads have real matrices, of which torch knows that itself."""
    return not isinstance(matrix, FakeTensor) or (matrix.requires_grad and torch.is_grad_enabled())
