"""An op that draws in Python: each run of a step calls the function that forward calls.

    random.random()   ->   memgraph_host::draw([], "random", "random", "((), {})", sizes=[], dtype=float64)

So the numbers are eager's, and so are the generators of `random` and numpy afterwards.  Alone, where it is priced, the
op leaves them as they were.
"""

from __future__ import annotations

import ast
import math
from collections.abc import Callable, Iterator, Sequence
from importlib import import_module
from typing import Any
from unittest import mock

import torch
from torch import Tensor, fx

from ...errors import MemgraphError
from ...system.python_random import restoring_python_random
from ..define_op import define_op
from ..guard_ops import TOLIST
from ..ops import is_in_step

CONSTANTS = (bool, int, float, str, type(None))


def written(arguments: Any, tensors: list[Tensor]) -> str:
    """Return arguments as a literal, with `...` in place of each tensor, which is appended to `tensors`.

    Raises:
        TypeError: one has no literal.
    """
    kind = type(arguments)
    if isinstance(arguments, Tensor):
        tensors.append(arguments)
        return "..."
    if kind in (tuple, torch.Size):
        return f"({''.join(f'{written(item, tensors)}, ' for item in arguments)})"
    if kind is list:
        return f"[{', '.join(written(item, tensors) for item in arguments)}]"
    if kind is dict:
        return f"{{{', '.join(f'{name!r}: {written(item, tensors)}' for name, item in arguments.items())}}}"
    if kind not in CONSTANTS or (kind is float and not math.isfinite(arguments)):
        raise TypeError(f"a {kind.__name__} has no literal")
    return repr(arguments)


def call(function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Call a function that draws; what it reads of tensors is no question of forward."""
    with mock.patch.object(Tensor, "tolist", TOLIST):
        return function(*args, **kwargs)


def draws_on_host(graph: fx.Graph) -> bool:
    """Return True if a graph draws from the generators of `random` or numpy."""
    return bool(graph.find_nodes(op="call_function", target=DRAW))


def _called(module: str, function: str, arguments: str, tensors: Sequence[Tensor]) -> Any:
    args, kwargs = _filled(ast.literal_eval(arguments), iter(tensors))
    return call(getattr(import_module(module), function), args, kwargs)


def _filled(arguments: Any, tensors: Iterator[Tensor]) -> Any:
    if arguments is ...:
        return next(tensors)
    if isinstance(arguments, dict):
        return {name: _filled(item, tensors) for name, item in arguments.items()}
    if isinstance(arguments, list | tuple):
        return type(arguments)(_filled(item, tensors) for item in arguments)
    return arguments


def _draw(
    tensors: Sequence[Tensor], module: str, function: str, arguments: str, *, sizes: list[int], dtype: torch.dtype
) -> Tensor:
    if is_in_step():
        drawn = _called(module, function, arguments, tensors)
    else:
        with restoring_python_random():
            drawn = _called(module, function, arguments, tensors)
    result = torch.tensor(drawn, dtype=dtype, device="cpu")
    if list(result.shape) != sizes:
        raise MemgraphError(
            f"{module}.{function} has made an array of {tuple(result.shape)}, and of {tuple(sizes)} when the step was "
            "captured: its shape must follow from its arguments"
        )
    return result


def _fake(
    tensors: Sequence[Tensor], module: str, function: str, arguments: str, *, sizes: list[int], dtype: torch.dtype
) -> Tensor:
    return torch.empty(sizes, dtype=dtype, device="cpu")


_library = torch.library.Library("memgraph_host", "DEF")
DRAW = define_op(
    _library,
    "draw(Tensor[] tensors, str module, str function, str arguments, *, int[] sizes, ScalarType dtype) -> Tensor",
    _draw, _fake, (torch.Tag.nondeterministic_seeded,),
)  # fmt: skip
