"""torch's list of ops with sample inputs, as modules: `modules_of("cdist")` yields its first samples."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn
from torch.testing._internal.common_methods_invocations import op_db
from torch.utils._pytree import tree_flatten, tree_unflatten

LARGEST = 100_000  # elements of a sample


class Sampled(nn.Module):
    """An op with the arguments of a sample, to be called with its tensors."""

    def __init__(self, op: Callable[..., Any], leaves: list[Any], spec: Any) -> None:
        super().__init__()
        self.op, self.spec = op, spec
        self.leaves = [None if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        self.places = tuple(i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor))

    def forward(self, *tensors: Tensor) -> Any:
        leaves = list(self.leaves)
        for place, tensor in zip(self.places, tensors, strict=True):
            leaves[place] = tensor
        args, kwargs = tree_unflatten(leaves, self.spec)
        return self.op(*args, **kwargs)


@cache
def ops() -> dict[str, Any]:
    """Return the ops that take float32 by name and variant."""
    names = {f"{op.name} {op.variant_test_name}".strip(): op for op in op_db}
    return {name: op for name, op in names.items() if torch.float32 in op.dtypes}


def modules_of(name: str, count: int) -> Iterator[tuple[nn.Module, list[Tensor]]]:
    """Yield an op on its first samples, with gradients where it has any."""
    op, seed = ops()[name], 0
    torch.manual_seed(seed)
    samples = op.sample_inputs("cpu", torch.float32, requires_grad=op.supports_autograd)
    for sample in islice(samples, count):
        leaves, spec = tree_flatten(((sample.input, *sample.args), dict(sample.kwargs)))
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        if all(tensor.layout == torch.strided for tensor in tensors) and sum(t.numel() for t in tensors) < LARGEST:
            inputs = [tensor.detach().clone().requires_grad_(tensor.requires_grad) for tensor in tensors]
            yield Sampled(op.op, leaves, spec), inputs
