"""Run a call on fake tensors for its digest alone, in the time of its ops: no graph is built, and no node.

rehearsed:   forward, backward   ->   OpLog.digest()               0.8 s for GPT2-124M
captured:    forward, backward   ->   the graph, and its digest    2.0 s

Both are the same code in the same modes of torch, so that what forward asks about its tensors has the same answers.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch._subclasses import FakeTensor
from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing
from torch.utils._python_dispatch import _disable_current_modes

from ...graph.nodes import DEVICE_OF, aten
from ..constant_fake_mode import MAX_ELEMENTS, ConstantFakeMode
from .op_log import OpLog, storage_of, tensors_in


@dataclass(frozen=True, eq=False)
class KnownValue:
    """A result of an op that no input affects; its value is computed when Python asks for it.

    It holds no traced tensor: torch copies a tensor instead of changing it if there are other references to it.

    Attributes:
        number: values are made in this order.
        tensor: a weak reference to the traced one.
        args, kwargs: with known values in the place of traced tensors.
        place: among the op's results; None for a single one.
    """

    number: int
    tensor: Callable[[], Tensor | None]
    storage: int
    numel: int
    func: OpOverload
    args: Any
    kwargs: Any
    place: int | None


class Rehearsal(OpLog):
    """An `OpLog` whose ops go around the proxies, so that no graph is built."""

    is_rehearsal = True

    def __init__(self) -> None:
        super().__init__()
        self._known: dict[int, KnownValue] = {}
        self._numbers = itertools.count()
        self._written: set[int] = set()  # storages

    def again(self) -> Rehearsal:
        log = Rehearsal()
        # For the mode, which asks this one.
        log._known, log._numbers, log._written = self._known, self._numbers, self._written
        return log

    def run(self, func: Any, args: Any, kwargs: Any) -> Any:
        if func is DEVICE_OF and isinstance(args[0], FakeTensor):
            return args[0].fake_device
        with disable_proxy_modes_tracing():
            result = func(*args, **kwargs)
        if isinstance(func, OpOverload):
            self._note(func, args, kwargs, result)
        return result

    def value(self, tensor: Tensor) -> Tensor | None:
        """Return the real value of a traced tensor if no input affects it."""
        needed = _needed(self._known_value(tensor))
        is_changed = not self._written.isdisjoint(known.storage for known in needed)
        if not needed or is_changed or sum(known.numel for known in needed) > MAX_ELEMENTS:
            return None
        with _disable_current_modes(), torch.no_grad():
            values: dict[KnownValue, Any] = {}
            for known in needed:
                args, kwargs = _replaced(known.args, values.__getitem__), _replaced(known.kwargs, values.__getitem__)
                result = known.func(*args, **kwargs)
                values[known] = result if known.place is None else result[known.place]
            return values[needed[-1]]

    def _note(self, func: OpOverload, args: Any, kwargs: Any, result: Any) -> None:
        """Note the results if they are known, or the storages that the op may have changed."""
        read = tensors_in((args, kwargs))
        if func._schema.is_mutable:
            self._written |= {storage_of(tensor) for tensor in read if isinstance(tensor, FakeTensor)}
        elif _is_computable(func) and all(self._is_known(func, tensor) for tensor in read):
            known_args, known_kwargs = (_replaced(given, self._known_value, FakeTensor) for given in (args, kwargs))
            several = list(enumerate(result)) if isinstance(result, list | tuple) else [(None, result)]
            for place, made in several:
                if isinstance(made, FakeTensor):
                    what = next(self._numbers), weakref.ref(made), storage_of(made), made.numel()
                    self._known[id(made)] = KnownValue(*what, func, known_args, known_kwargs, place)

    def _is_known(self, func: OpOverload, tensor: Tensor) -> bool:
        if isinstance(tensor, FakeTensor):
            return self._known_value(tensor) is not None
        return func is aten.lift_fresh_copy.default  # not an attribute, which may change between steps

    def _known_value(self, tensor: Tensor) -> KnownValue | None:
        known = self._known.get(id(tensor))
        return known if known is not None and known.tensor() is tensor else None


def _needed(last: KnownValue | None) -> list[KnownValue]:
    """Return all that a value is computed from, in order, and the value itself."""
    needed: dict[int, KnownValue] = {}
    waiting = [last] if last is not None else []
    while waiting:
        known = waiting.pop()
        if known.number not in needed:
            needed[known.number] = known
            _replaced((known.args, known.kwargs), waiting.append)
    return [needed[number] for number in sorted(needed)]


def _replaced(thing: Any, replace: Callable[[Any], Any], kind: type[Any] = KnownValue) -> Any:
    """Return an op's arguments with all things of this kind replaced."""
    if isinstance(thing, kind):
        return replace(thing)
    if isinstance(thing, dict):
        return {key: _replaced(value, replace, kind) for key, value in thing.items()}
    if isinstance(thing, list | tuple):
        return [_replaced(item, replace, kind) for item in thing]
    return thing


class RehearsalMode(ConstantFakeMode):
    """Fake tensors of a rehearsal, which knows the values that no input affects."""

    def __init__(self, rehearsal: Rehearsal) -> None:
        super().__init__()
        self.rehearsal = rehearsal

    def value(self, tensor: Tensor) -> Tensor | None:
        return self.rehearsal.value(tensor) if self.tracer is not None else None


def _is_computable(func: OpOverload) -> bool:
    name = func._schema.name
    return not (torch.Tag.nondeterministic_seeded in func.tags or "empty" in name or name.endswith("batch_norm"))
