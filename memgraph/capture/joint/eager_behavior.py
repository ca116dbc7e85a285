"""Let ops and libraries do in a trace what they do in eager.

random.random(), torch.prod(x), checkpoint(f, x), ...   ->   what they do on real tensors

Each has its own file; here they are entered together.

The gradient of a product, which torch computes in one of two ways, depending on the values.

    no zeros:   grad * result / x            bit-equal to eager, where it divides
    a zero:     grad * all the others        bit-equal to eager, where it does not

A trace has no values, and torch takes the second way there. The graph computes both, and selects one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensor

from ...guards.attribute_snapshot import AttributeSnapshot
from ...guards.module_proxy import all_submodules
from ...guards.what_ran import WhatRan
from ...system.entered_code import unwatched_ops
from ..call.call import Call
from ..constant_fake_mode import ConstantFakeMode, constant_transformers_checks
from ..python_state.draw_in_graph import drawing_in_trace
from ..python_state.function_caches import empty_function_caches
from ..user_checkpoint import eager_casts, eager_fast_paths, eager_value_decompositions, without_checkpoint
from ..values.host_lengths import readable_lengths


@contextmanager
def eager_behavior(call: Call, mode: ConstantFakeMode) -> Iterator[AttributeSnapshot]:
    """Let ops and libraries do what they do in eager, and restore the module afterwards.

    What forward writes outside of it stays, but for what symbols and stand-ins for floats may be in.
    """
    parts = all_submodules(call.module)
    snapshot = AttributeSnapshot(call.module, call.tensors, WhatRan(parts, call.tensors))
    with (
        snapshot.restored() if mode.sizes is not None or mode.has_floats else snapshot.restored_attributes() as before,
        unwatched_ops(),
        drawing_in_trace(),
        without_checkpoint(),
        eager_fast_paths(),
        eager_prod_gradient(),
        eager_value_decompositions(),
        eager_casts([part for _, part in parts]),
        readable_lengths(),
        constant_transformers_checks(mode, call.tensors),
        module_methods_as_replaced(),
    ):
        try:
            yield before
        finally:
            empty_function_caches(before)


@contextmanager
def module_methods_as_replaced() -> Iterator[None]:
    """Let a trace run what someone has put in the place of nn.Module's own methods, as torch's tracer does not."""
    call, get = torch.fx._symbolic_trace._orig_module_call, torch.fx._symbolic_trace._orig_module_getattr
    torch.fx._symbolic_trace._orig_module_call = nn.Module.__call__
    torch.fx._symbolic_trace._orig_module_getattr = nn.Module.__getattr__
    try:
        yield
    finally:
        torch.fx._symbolic_trace._orig_module_call = call
        torch.fx._symbolic_trace._orig_module_getattr = get


@contextmanager
def eager_prod_gradient() -> Iterator[None]:
    """Give `torch.prod` and `Tensor.prod` gradients that choose as in eager."""
    method: Callable[..., Tensor] = torch.Tensor.prod

    def prod(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if not _depends_on_values(x, kwargs):
            return method(x, *args, **kwargs)
        dim, keepdim = _dim_and_keepdim(args, kwargs)
        x = x if kwargs.get("dtype") is None else x.to(kwargs["dtype"])
        result: Tensor = _ProdGradient.apply(x, dim, keepdim)  # type: ignore[no-untyped-call]
        return result

    def function(input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return prod(input, *args, **kwargs)

    with mock.patch.object(torch, "prod", function), mock.patch.object(torch.Tensor, "prod", prod):
        yield


def _depends_on_values(x: Tensor, kwargs: dict[str, Any]) -> bool:
    """Return True if the way depends on values. Only fake tensors: other threads have real ones."""
    if not isinstance(x, FakeTensor) or kwargs.get("out") is not None or isinstance(kwargs.get("dim"), str):
        return False
    return x.requires_grad and torch.is_grad_enabled() and x.dim() > 0 and (x.is_floating_point() or x.is_complex())


def _dim_and_keepdim(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[int | None, bool]:
    dim = args[0] if args else kwargs.get("dim")
    return dim, bool(args[1] if len(args) > 1 else kwargs.get("keepdim", False))


class _ProdGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int | None, keepdim: bool) -> Tensor:
        result = torch.ops.aten.prod.default(x) if dim is None else torch.ops.aten.prod.dim_int(x, dim, keepdim)
        ctx.save_for_backward(x, result)
        ctx.dim, ctx.keepdim = dim, keepdim
        return result

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (x, result), (grad,) = ctx.saved_tensors, grads
        zeros = (x == 0).sum()
        general = _product_of_others(x, grad, ctx.dim, ctx.keepdim)
        if ctx.dim is None:
            general = torch.where(zeros > 1, torch.zeros_like(x), general)
        elif not ctx.keepdim:
            grad, result = grad.unsqueeze(ctx.dim), result.unsqueeze(ctx.dim)
        return torch.where(zeros == 0, grad * (result / x).conj(), general), None, None


def _product_of_others(x: Tensor, grad: Tensor, dim: int | None, keepdim: bool) -> Tensor:
    """Compute the gradient as torch does in a trace."""
    with torch.enable_grad():
        leaf = x.detach().requires_grad_()
        product = torch.ops.aten.prod.default(leaf) if dim is None else torch.ops.aten.prod.dim_int(leaf, dim, keepdim)
    return torch.autograd.grad(product, leaf, grad)[0]
