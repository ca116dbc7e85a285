"""Call functions that are compiled by TorchScript as Python.

    @torch.jit.script
    def scale(x): ...            ->   with unscripted(): scale(x)   runs the Python that it was compiled from

On a GPU, TorchScript fuses ops into kernels of its own once a function has run twice. Such a kernel is no op: it would
read the memory of fake tensors, which have none.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch

ScriptFunction = torch._C.ScriptFunction
SCRIPTED = ScriptFunction.__call__


@contextmanager
def unscripted() -> Iterator[None]:
    """Call the Python of scripted functions in a block; one that was loaded from a file has none."""
    with mock.patch.object(ScriptFunction, "__call__", _call):
        yield


@contextmanager
def scripted() -> Iterator[None]:
    """Call scripted functions as in eager in a block inside of `unscripted`."""
    with mock.patch.object(ScriptFunction, "__call__", SCRIPTED):
        yield


def _call(function: Any, *args: Any, **kwargs: Any) -> Any:
    plain = getattr(function, "_torchdynamo_inline", None)
    return SCRIPTED(function, *args, **kwargs) if plain is None else plain(*args, **kwargs)
