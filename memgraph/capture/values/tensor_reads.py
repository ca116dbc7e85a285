"""Let a mode answer what Python reads of tensors without an op.

x.tolist()      ->   mode.values(x)
bool(x.any())   ->   mode.number(x.any())
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from threading import get_ident
from typing import Any, TypeVar
from unittest import mock

import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes

from ...graph.guard_ops import TOLIST
from .questions import ValueMode

ONE_HOT = nn.functional.one_hot
ITEM, IS_NONZERO = torch.Tensor.item, torch.Tensor.__bool__
Mode = TypeVar("Mode", bound=ValueMode)


@contextmanager
def answering(mode: Mode) -> Iterator[Mode]:
    """Enter a mode, and let it answer `Tensor.tolist`, which reads memory without an op, and the size of `one_hot`.

    It answers `Tensor.item` and `bool` too: torch would put a plain number in the place of a stand-in. What `print`
    shows of a tensor is no question.
    """
    thread = get_ident()
    text: Callable[..., str] = torch.Tensor.__repr__

    def item(self: Tensor) -> Any:
        return mode.number(self) if get_ident() == thread and self.numel() == 1 else ITEM(self)

    def is_nonzero(self: Tensor) -> bool:
        return bool(mode.number(self)) if get_ident() == thread and self.numel() == 1 else IS_NONZERO(self)

    def tolist(self: Tensor) -> Any:
        return _nested(list(mode.values(self)), self.shape) if get_ident() == thread else TOLIST(self)

    def shown(self: Tensor, **kwargs: Any) -> str:
        if get_ident() != thread or isinstance(self, FakeTensor):
            return text(self, **kwargs)
        with _disable_current_modes(), reading_as_in_eager():
            return text(self, **kwargs)

    with (
        mock.patch.object(torch.Tensor, "item", item),
        mock.patch.object(torch.Tensor, "__bool__", is_nonzero),
        mock.patch.object(torch.Tensor, "tolist", tolist),
        mock.patch.object(FakeTensor, "tolist", tolist),
        mock.patch.object(torch.Tensor, "__repr__", shown),
        mock.patch.object(nn.functional, "one_hot", _one_hot),
        mode,
    ):
        yield mode


@contextmanager
def reading_as_in_eager() -> Iterator[None]:
    """Let torch answer in a block inside of `answering`."""
    with (
        mock.patch.object(torch.Tensor, "item", ITEM),
        mock.patch.object(torch.Tensor, "__bool__", IS_NONZERO),
        mock.patch.object(torch.Tensor, "tolist", TOLIST),
        mock.patch.object(nn.functional, "one_hot", ONE_HOT),
    ):
        yield


def _one_hot(tensor: Tensor, num_classes: int = -1) -> Tensor:
    """Return what torch's own makes, which looks at other values where tensors are fake."""
    classes = int(tensor.max().item()) + 1 if num_classes == -1 else num_classes
    return ONE_HOT(tensor, classes)


def _nested(values: list[Any], shape: Sequence[int]) -> Any:
    """Return numbers as nested lists of this shape."""
    if not shape:
        return values[0]
    size = len(values) // shape[0] if shape[0] else 0
    return [_nested(values[i * size : (i + 1) * size], shape[1:]) for i in range(shape[0])]
