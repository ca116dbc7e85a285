"""Make torch's special cases behave in a trace as in eager.

    torch.utils.checkpoint in the model      ->   calls its function: memgraph decides what to recompute
    TransformerEncoderLayer, eval, no_grad   ->   one aten._transformer_encoder_layer_fwd, as in eager
    torch.linalg.svdvals(x), no gradient     ->   aten._linalg_svd(x, compute_uv=False), as in eager
    self.router.to(torch.float32)            ->   nothing, if it is float32, as in eager

A traced checkpoint would draw new dropout masks when it recomputes: wrong gradients without an error. Fused layers and
decompositions without vectors give other bits; torch avoids them in a trace, which might need their gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
import torch.utils.checkpoint as torch_checkpoint
from torch import Tensor, nn
from torch._subclasses import FakeTensor
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.modules import activation

from ..errors import CaptureError
from .python_state.refuse_reseeding import allow_reseeding
from .python_state.refused_draws import allow_python_random
from .scripted_functions import scripted
from .values.host_lengths import lengths_as_in_eager
from .values.tensor_reads import reading_as_in_eager

# `checkpoint` calls the second one up to torch 2.13, and the first one since.
GENERATORS = ("_checkpoint_without_reentrant_generator_impl", "_checkpoint_without_reentrant_generator")
EAGER = {
    name: getattr(torch_checkpoint, name)
    for name in ("CheckpointFunction", *GENERATORS)
    if hasattr(torch_checkpoint, name)
}

ENTER_SAVED_HOOKS = saved_tensors_hooks.__enter__


@contextmanager
def without_checkpoint() -> Iterator[None]:
    """Let both modes of checkpoint only call the function.

    The functions behind `checkpoint` are replaced, not that name: others hold partials of it.
    """
    generators = [name for name in GENERATORS if hasattr(torch_checkpoint, name)]
    if not generators or not hasattr(torch_checkpoint, "CheckpointFunction"):
        raise CaptureError(
            f"torch.utils.checkpoint of torch {torch.__version__} is not laid out as memgraph knows it; "
            "a checkpoint in the model would give wrong gradients"
        )
    replaced: dict[str, Any] = {"CheckpointFunction": _PlainCall} | dict.fromkeys(generators, _run_plainly)
    with mock.patch.multiple(torch_checkpoint, **replaced):
        yield


@contextmanager
def eager_checkpoint() -> Iterator[None]:
    """Let checkpoint do what it does in eager, inside of `without_checkpoint`."""
    with mock.patch.multiple(torch_checkpoint, **EAGER):
        yield


@contextmanager
def as_in_eager() -> Iterator[None]:
    """Lift what capture forbids and replaces: a submodule that runs as it is may do all that it does in eager."""
    with (
        allow_reseeding(), allow_python_random(), eager_checkpoint(), reading_as_in_eager(), lengths_as_in_eager(),
        scripted(), mock.patch.object(saved_tensors_hooks, "__enter__", ENTER_SAVED_HOOKS),
    ):  # fmt: skip
        yield


def _run_plainly(*args: Any, **kwargs: Any) -> Iterator[None]:
    """Replaces the generator that runs around a checkpointed function."""
    yield


class _PlainCall:
    """Replaces the autograd Function of the reentrant mode."""

    @staticmethod
    def apply(function: Callable[..., Any], preserve_rng_state: bool, *args: Any) -> Any:
        # In the reentrant mode nothing inside gets a gradient unless one of the arguments asks for one.
        requires_grad = any(isinstance(arg, torch.Tensor) and arg.requires_grad for arg in args)
        with torch.set_grad_enabled(requires_grad and torch.is_grad_enabled()):
            return function(*args)


@contextmanager
def eager_fast_paths() -> Iterator[None]:
    """Let attention and encoder layers choose their fused kernels as outside of a trace."""
    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(torch.overrides, "has_torch_function", _is_overridden))
        if hasattr(activation, "_is_make_fx_tracing"):
            stack.enter_context(mock.patch.object(activation, "_is_make_fx_tracing", lambda: False))
        yield


def _is_overridden(tensors: Iterable[object]) -> bool:
    """Return True if a class overrides torch's functions; the mode of the trace does not count."""
    kinds = {type(tensor) for tensor in tensors} - {Tensor}
    off = torch._C._disabled_torch_function_impl
    return any(getattr(kind, "__torch_function__", off) is not off for kind in kinds)


@contextmanager
def eager_value_decompositions() -> Iterator[None]:
    """Compute singular values and eigenvalues without vectors where eager does, which gives other bits."""
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


@contextmanager
def eager_casts(parts: Iterable[nn.Module]) -> Iterator[None]:
    """Let `module.to(dtype)` in forward be nothing where all tensors have the type, and refuse it elsewhere.

    A module that is not one of the model's `parts` is made in each forward. Without parameters it is cast in each.
    """
    plain: Callable[..., nn.Module] = nn.Module._apply
    lasting = {id(part) for part in parts}

    def apply(module: nn.Module, convert: Callable[[Tensor], Tensor], *args: Any, **kwargs: Any) -> nn.Module:
        tensors = [*module.parameters(), *module.buffers()]
        is_new = lasting.isdisjoint(map(id, module.modules())) and next(module.parameters(), None) is None
        if is_new or not any(isinstance(tensor, FakeTensor) for tensor in tensors):
            return plain(module, convert, *args, **kwargs)
        with torch.no_grad():
            if all(convert(tensor) is tensor for tensor in tensors):
                return module
        raise CaptureError(
            f"forward casts or moves the parameters of a {type(module).__name__}, which would happen once: do it "
            "before the module is compiled, or run the plain module once before"
        )

    with mock.patch.object(nn.Module, "_apply", apply):
        yield


def _needs_vectors(matrix: object) -> bool:
    """Return True if a gradient needs them, or if the matrix is a real one, of another thread."""
    return not isinstance(matrix, FakeTensor) or (matrix.requires_grad and torch.is_grad_enabled())
