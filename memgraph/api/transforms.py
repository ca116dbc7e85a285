"""Transformations of torch that a captured step can't take part in: torch.func, and forward-mode differentiation.

torch.func.vmap(compiled)(x)    ->   a MemgraphError that says so, in the place of whatever torch would find
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor
from torch._C._functorch import peek_interpreter_stack
from torch.autograd import forward_ad

from ..errors import MemgraphError


def refuse_transforms() -> None:
    """Raise inside of torch.func's vmap, grad, vjp, jvp and what is made of them.

    Raises:
        MemgraphError: one of them is running.
    """
    if peek_interpreter_stack() is not None:
        raise MemgraphError(
            "torch.func (vmap, grad, vjp, jvp, ...) can't transform a compiled module, which runs a step as it was "
            "captured: transform the plain module, or compile a module whose forward calls torch.func"
        )


def refuse_duals(tensors: Iterable[Tensor]) -> None:
    """Raise if a tensor has a tangent of forward-mode differentiation, which the step would drop.

    Raises:
        MemgraphError: one has.
    """
    if forward_ad._current_level >= 0 and any(forward_ad.unpack_dual(t).tangent is not None for t in tensors):
        raise MemgraphError(
            "a compiled module can't be differentiated forward (torch.autograd.forward_ad): use the plain module"
        )
