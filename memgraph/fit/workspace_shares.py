"""Measure the workspace of convolutions on this CPU, as a share of the bytes that they read and write.

aten.convolution_backward.default   ->   1.13 of its tensors' bytes: the largest share of some usual forms

Their library copies tensors into layouts of its own, which no shape tells. A share is an estimate, not a limit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from ..profile.memory_meter import measure_peak, resident_bytes

aten = torch.ops.aten
# Batch, channels in and out, side, kernel, stride, groups: of residual nets, depthwise ones, and of patches.
FORMS = (
    (4, 32, 64, 32, 3, 1, 1), (4, 64, 64, 16, 1, 1, 1), (4, 64, 64, 16, 7, 1, 64), (4, 3, 64, 64, 8, 8, 1),
    (8, 64, 128, 8, 3, 2, 1),
)  # fmt: skip


def convolution_shares() -> dict[str, float]:
    """Return the largest share of each op over `FORMS`."""
    shares = {str(aten.convolution.default): 0.0, str(aten.convolution_backward.default): 0.0}
    with torch.no_grad():
        for rows, channels, filters, side, kernel, stride, groups in FORMS:
            x, w = torch.ones(rows, channels, side, side), torch.ones(filters, channels // groups, kernel, kernel)
            rest = [stride, stride], [kernel // 2] * 2, [1, 1], False, [0, 0], groups
            forward = partial(aten.convolution.default, x, w, None, *rest)
            y = forward()
            backward = partial(aten.convolution_backward.default, y, x, w, None, *rest, [True, True, False])
            for op, run, reads in (
                (aten.convolution.default, forward, (x, w)), (aten.convolution_backward.default, backward, (x, w, y))
            ):  # fmt: skip
                shares[str(op)] = max(shares[str(op)], _share(run, reads))
    return {name: round(share, 3) for name, share in shares.items()}


def _share(run: Callable[[], Any], reads: Sequence[Tensor]) -> float:
    result, allocated = measure_peak(run)
    made = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
    if allocated is None:  # a profiler runs
        return 0.0
    return max(0, allocated.peak - resident_bytes(made)) / resident_bytes([*made, *reads])
