"""Take the calls of some submodules, and let something else answer them.

with taken_calls({layer: answer}): model(x)     ->   answer(layer, args, kwargs) where the model calls the layer
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from torch import nn

Answer = Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], Any]


@contextmanager
def taken_calls(modules: Iterable[nn.Module], answer: Answer) -> Iterator[None]:
    """Let `answer` take calls of these modules from this thread. Calls inside of `answer` go to the modules."""
    plain: Any = nn.Module.__call__
    taken, thread, answering = {id(module): module for module in modules}, threading.get_ident(), False

    def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        nonlocal answering
        if answering or id(module) not in taken or threading.get_ident() != thread:
            return plain(module, *args, **kwargs)
        answering = True
        try:
            return answer(module, args, kwargs)
        finally:
            answering = False

    with mock.patch.object(nn.Module, "__call__", call):
        yield
