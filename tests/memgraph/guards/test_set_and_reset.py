"""A value that is set for a call and reset behind it is seen in each, though the next one may lie at its address."""

from __future__ import annotations

import collections
import contextvars
import dataclasses
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import memgraph

CONTEXT: contextvars.ContextVar[float] = contextvars.ContextVar("CONTEXT", default=1.0)
LOCAL, TABLE, QUEUE, SHARED = threading.local(), {"scale": 1.0}, collections.deque([1.0]), [1.0]


@dataclasses.dataclass(slots=True)
class Config:
    """Has its value in a slot."""

    scale: float = 1.0


CONFIG = Config()


def in_context(value: float) -> Callable[[], None]:
    token = CONTEXT.set(value)
    return lambda: CONTEXT.reset(token)


def item(holder: Any, key: Any, value: float) -> Callable[[], None]:
    before = holder[key]
    holder[key] = value
    return lambda: holder.__setitem__(key, before)


def attribute(holder: Any, value: float) -> Callable[[], None]:
    before = getattr(holder, "scale", 1.0)
    holder.scale = value
    return lambda: setattr(holder, "scale", before)


WAYS: dict[str, tuple[Callable[[], float], Callable[[float], Callable[[], None]]]] = {
    "a context variable": (CONTEXT.get, in_context),
    "a slot": (lambda: CONFIG.scale, partial(attribute, CONFIG)),
    "a local of the thread": (lambda: getattr(LOCAL, "scale", 1.0), partial(attribute, LOCAL)),
    "a dict": (lambda: TABLE["scale"], partial(item, TABLE, "scale")),
    "a deque": (lambda: QUEUE[0], partial(item, QUEUE, 0)),
    "a list": (lambda: SHARED[0], partial(item, SHARED, 0)),
}


class Scaled(nn.Linear):
    """Scales its result by what a function returns, which an attribute may hold too."""

    def __init__(self, read: Callable[[], float], held: Any) -> None:
        super().__init__(4, 4)
        self.read, self.held = read, held

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scale = self.held.scale if isinstance(self.held, Config) else self.read()
        return super().forward(x) * scale


@pytest.mark.long
@pytest.mark.parametrize("name", WAYS)
@pytest.mark.parametrize("held", [None, CONFIG], ids=["", "held"])
def test_a_value_that_is_set_for_each_call_alone_is_seen(name: str, held: Config | None) -> None:
    read, put = WAYS["a slot"] if held is not None else WAYS[name]
    module, x = Scaled(read, held), torch.ones(2, 4)
    compiled = memgraph.compile(module, "1GB", time_limit=0)
    for step in range(6):
        reset = put(2.0 + step)
        assert torch.equal(compiled(x), module(x))
        reset()
        if step % 2:
            assert torch.equal(compiled(x), module(x))


@pytest.mark.long
def test_a_global_hook_in_the_place_of_another_is_seen() -> None:
    module, x = nn.Linear(4, 4), torch.ones(2, 4)
    compiled = memgraph.compile(module, "1GB", time_limit=0)
    for step in range(5):

        def scale(part: nn.Module, args: Any, output: torch.Tensor, by: float = 2.0 + step) -> Any:
            return output * by if isinstance(part, nn.Linear) else None

        handle = nn.modules.module.register_module_forward_hook(scale)
        assert torch.equal(compiled(x), module(x))
        handle.remove()
        del scale, handle
