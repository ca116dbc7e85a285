"""Let forward convert a module to the dtype and device that it has.

self.head = self.head.to(x.dtype)     ->   the same module, while it is traced; torch can't swap traced parameters
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import get_ident
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn


@contextmanager
def unchanged_conversions() -> Iterator[None]:
    """Let conversions that change no tensor return the module as it is."""
    convert: Callable[..., Any] = nn.Module._apply
    thread = get_ident()

    def apply(self: nn.Module, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        if get_ident() == thread and _changes_nothing(self, fn, recurse):
            return self
        return convert(self, fn, recurse)

    with mock.patch.object(nn.Module, "_apply", apply):
        yield


def _changes_nothing(module: nn.Module, fn: Callable[[Tensor], Tensor], recurse: bool) -> bool:
    with torch.no_grad():
        return all(fn(tensor) is tensor for tensor in [*module.parameters(recurse), *module.buffers(recurse)])
