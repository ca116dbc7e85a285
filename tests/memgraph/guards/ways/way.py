"""A way in which a forward reads state of Python that a caller changes between two steps.

    @of("globals")
    def _(): return lambda m, x: x * NUMBER, changing("NUMBER", 3)

A way returns a forward, `then(module, x)`, and a function that changes what it reads. The same module runs compiled and
as it is, before and after the change: the step is right, is refused by name, or is wrong in silence.
"""

from __future__ import annotations

import sys
import types
import warnings
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

import memgraph

Then = Callable[[Any, Tensor], Tensor]
Way = Callable[[], tuple[Then, Callable[..., Any]]]
WAYS: dict[str, dict[str, Way]] = {}
X = torch.linspace(-1, 1, 32).view(4, 8)


class Host(nn.Module):
    """Runs the forward of a way."""

    scale = 2
    factors: ClassVar[dict[str, int]] = {"a": 2}

    def __init__(self, then: Then) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.then, self.is_off = then, False

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x)
        return x if self.is_off else self.then(self, x)


def of(group: str) -> Callable[[Way], Way]:
    """Add a way to a group, under the first line of its docstring."""

    def add(way: Way) -> Way:
        WAYS.setdefault(group, {})[str(way.__doc__)] = way
        return way

    return add


def outcome(way: Way, is_late: bool = False) -> str:
    """Return "right", the name of an error, or "WRONG: ...", as for a call as the one before that is captured again.

    Args:
        is_late: the first capture reads nothing of it; another one is the first to do so.
    """
    torch.manual_seed(0)
    then, change = way()
    module = Host(then)
    if (prepare := getattr(then, "prepare", None)) is not None:
        prepare(module)
    compiled = memgraph.compile(module, "1GB")
    undo: Any = None
    steps: list[Any] = []
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for module.is_off in (True,) * is_late:
                _is_right(module, compiled)
            module.is_off = False
            for step in range(6):
                if step == 3:
                    undo = change() if not getattr(change, "takes_module", False) else change(module)
                if not _is_right(module, compiled):
                    return f"WRONG: step {step}"
                before, steps = steps, compiled.__dict__["_kept"].steps
                if step == 2 and steps != before:  # the first may fill caches that forward reads
                    return "WRONG: captured again"
    except memgraph.MemgraphError as error:
        return type(error).__name__
    finally:
        if callable(undo):
            undo()
    return "right"


def _is_right(module: nn.Module, compiled: Any) -> bool:
    found, before = [], dict(vars(module))
    for each in (compiled, module):
        vars(module).update(before)  # what forward writes
        module.zero_grad()
        loss = each(X).square().sum()
        loss.backward()
        found.append([loss.detach(), *(parameter.grad for parameter in module.parameters())])
    pairs = list(zip(*found, strict=True))
    return all(ours is theirs or (ours is not None and torch.equal(ours, theirs)) for ours, theirs in pairs)


def setting(owner: Any, name: str, value: Any) -> Callable[[], Callable[[], None]]:
    """Return a change of an attribute, which returns what takes it back."""

    def change() -> Callable[[], None]:
        before = getattr(owner, name)
        setattr(owner, name, value)
        return lambda: setattr(owner, name, before)

    return change


def on_module(change: Callable[[Any], Any]) -> Callable[[], Any]:
    """Return a change that is given the module."""
    change.takes_module = True  # type: ignore[attr-defined]
    return change  # type: ignore[return-value]


def prepared(then: Then, prepare: Callable[[Any], Any]) -> Then:
    """Return a forward whose module is prepared first."""
    then.prepare = prepare  # type: ignore[attr-defined]
    return then


def changing(name: str, value: Any) -> Callable[[], Any]:
    """Return a change of a global of the file that calls this."""
    return setting(sys.modules[sys._getframe(1).f_globals["__name__"]], name, value)


class Settings:
    """An object with an attribute."""

    scale: int = 2

    def __init__(self, scale: int = 2) -> None:
        self.scale = scale

    def doubled(self) -> int:
        return 2 * self.scale

    def quadrupled(self) -> int:
        return 4 * self.scale

    @property
    def tripled(self) -> int:
        return 3 * self.scale


class Slotted:
    """An object with a slot."""

    __slots__ = ("scale",)

    def __init__(self) -> None:
        self.scale = 2


class Called:
    """An object that is called, and an attribute of its class."""

    scale = 2

    def __call__(self, x: Tensor) -> Tensor:
        return x * self.scale


def a_file(**content: Any) -> Any:
    """Return a module of Python that code can import as `a_file_of_a_way`."""
    file = types.ModuleType("a_file_of_a_way")
    vars(file).update(content)
    sys.modules[file.__name__] = file
    return file
