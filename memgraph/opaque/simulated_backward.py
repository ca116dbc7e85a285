"""The peak of a part's backward, found in forward: autograd runs on fake tensors, which take no memory.

    forward of experts that got 90, 6 tokens   ->   123,904 bytes; 98,304 where they get 48 and 48

The sum of the bytes that ops make is the same in both cases. Ops may take workspace besides what they return; where a
part was recorded, that was measured.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.function import BackwardCFunction
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ..graph.result_layout import Layout, empty
from ..tensors.loss_outputs import reachable_nodes
from .eager_state import Modes, eager_modes
from .live_bytes import LiveBytes, SavedTensors
from .observed_ops import is_dense


def backward_peak(
    outputs: Sequence[Tensor], trained: Sequence[Tensor], tangents: Sequence[Layout | None], modes: Modes,
    live: LiveBytes, saved: SavedTensors, *, is_last: bool = True,
) -> float | None:  # fmt: skip
    """Return the peak of bytes, forward's included, that a backward takes for tangents of these layouts.

    `live` has counted forward, and `saved` what autograd would have saved. Return None if backward can't run on fake
    tensors: Python code of an autograd function may do anything.
    """
    if any(isinstance(node, BackwardCFunction) for node in reachable_nodes([output.grad_fn for output in outputs])):
        return None
    roots = [(output, form) for output, form in zip(outputs, tangents, strict=True) if form is not None]
    mode = FakeTensorMode(allow_non_fake_inputs=True, allow_fallback_kernels=False)
    with mode:
        given = [empty(form, output.device) for output, form in roots if form is not None]
    for tensor in given:
        live.add(tensor, 0)
    try:
        with eager_modes(modes.without_autocast()), saved.fake(mode), mode, _Counted(live):
            torch.autograd.grad(
                [output for output, _ in roots], list(trained), given, allow_unused=True, retain_graph=not is_last
            )
    except Exception:  # an op that has no fake results, or a hook that asks for numbers
        return None
    return live.peak


class _Counted(TorchDispatchMode):
    """Counts what ops return."""

    def __init__(self, live: LiveBytes) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._live = live

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if not func.is_view:
            for leaf in filter(is_dense, tree_leaves(result)):
                self._live.add(leaf)
        return result
