"""Let traced code find the types that tensors have in eager mode, where fakes stand for them.

type(x) is torch.Tensor              ->   True
type(p) is nn.Parameter              ->   True of a parameter
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from torch import Tensor, nn
from torch._subclasses import FakeTensor

from ...system.entered_code import watching_entries


@contextmanager
def eager_types() -> Iterator[None]:
    """While a block runs, the name `type` stands for `TypeOf` in files whose code is entered."""
    shown: list[dict[str, Any]] = []

    def enter(frame: FrameType) -> None:
        if "type" in frame.f_code.co_names and "type" not in frame.f_globals:
            frame.f_globals["type"] = TypeOf
            shown.append(frame.f_globals)

    try:
        with watching_entries(enter):
            yield
    finally:
        for content in shown:
            content.pop("type", None)


def eager_type(thing: Any) -> type:
    """Return the type of a thing; of a fake that of the tensor for which it stands."""
    kind = type(thing)
    if not issubclass(kind, FakeTensor):
        return kind
    return nn.Parameter if getattr(thing, "_is_param", False) else Tensor


class _Meta(type):
    """Lets `TypeOf` pass for `type`."""

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        if len(args) != 1 or kwargs:
            return type(*args, **kwargs)
        found = eager_type(args[0])
        return cls if found is type else found

    def __getitem__(cls, item: Any) -> Any:
        return type[item]

    def __instancecheck__(cls, thing: Any) -> bool:
        return isinstance(thing, type)

    def __subclasscheck__(cls, kind: type) -> bool:
        return issubclass(kind, type)

    def __eq__(cls, other: object) -> bool:
        return other is type or other is cls

    def __hash__(cls) -> int:
        return hash(type)


class TypeOf(type, metaclass=_Meta):
    """Python's `type`, but for fake tensors."""


TypeOf.__name__ = TypeOf.__qualname__ = "type"
TypeOf.__module__ = "builtins"
