"""The op that scales, in backward, what forward made with a tangent of 1.

y = memgraph_slices::scale_(x, factor)      x is multiplied in place; it is left as it is if the factor is 1
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..graph.define_op import define_op

_library = torch.library.Library("memgraph_slices", "DEF")


def _scale(x: Tensor, factor: Tensor) -> Tensor:
    # On a GPU the host would wait for the factor.
    return x if factor.device.type == "cpu" and factor.item() == 1.0 else x.mul_(factor)


def _first(x: Tensor, factor: Tensor) -> Tensor:
    return x


SCALE = define_op(_library, "scale_(Tensor(a!) x, Tensor factor) -> Tensor(a!)", _scale, _first)
