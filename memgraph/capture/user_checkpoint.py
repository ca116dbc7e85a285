"""A user's `torch.utils.checkpoint`, made to do nothing while a step is captured.

Traced as it is, its recomputation would be written into the graph, where it draws fresh dropout masks: wrong gradients
without an error.  memgraph decides itself what to recompute.  The functions behind `checkpoint` are replaced, not that
name: others hold partials of it.


MERGED:What eager takes without gradients, and leaves out in a trace, though it differs in the last bits.

    TransformerEncoderLayer, eval, no_grad   ->   one aten._transformer_encoder_layer_fwd, as in eager
    torch.linalg.svdvals(x), no gradient     ->   aten._linalg_svd(x, compute_uv=False), as in eager

Where torch sees that it is traced it leaves them out, because a trace may want to differentiate what is in them.  Here
nobody does: with gradients, torch does not take them in eager either.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
import torch.utils.checkpoint as theirs
from torch import Tensor
from torch._subclasses import FakeTensor
from torch.nn.modules import activation

from ..errors import CaptureError

# `checkpoint` calls the second one up to torch 2.13, and the first one since.
GENERATORS = ("_checkpoint_without_reentrant_generator_impl", "_checkpoint_without_reentrant_generator")


@contextmanager
def without_checkpoint() -> Iterator[None]:
    """Both of checkpoint's modes only call the function."""
    there = [name for name in GENERATORS if hasattr(theirs, name)]
    if not there or not hasattr(theirs, "CheckpointFunction"):
        raise CaptureError(
            f"torch.utils.checkpoint of torch {torch.__version__} is not laid out as memgraph knows it; "
            "a checkpoint in the model would give wrong gradients"
        )
    replaced: dict[str, Any] = {"CheckpointFunction": _Plain} | dict.fromkeys(there, _nothing)
    with mock.patch.multiple(theirs, **replaced):
        yield


def _nothing(*args: Any, **kwargs: Any) -> Iterator[None]:
    """A generator in the place of the one that runs around a checkpointed function."""
    yield


class _Plain:
    """In the place of the autograd Function of the reentrant mode."""

    @staticmethod
    def apply(function: Callable[..., Any], preserve_rng_state: bool, *args: Any) -> Any:
        # In the reentrant mode nothing inside gets a gradient unless one of the arguments asks for one.
        asked = any(isinstance(arg, torch.Tensor) and arg.requires_grad for arg in args)
        with torch.set_grad_enabled(asked and torch.is_grad_enabled()):
            return function(*args)


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
