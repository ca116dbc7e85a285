"""A module, as it was: capture runs its forward on fake tensors, and nothing that this leaves behind may stay.

Attributes are put back, and what forward put into lists, dicts and sets on the module is taken out again.  A fake
tensor that was left behind is an error: the module hands something out beside its outputs (an auxiliary loss, a cache),
which the graph would not make. So is a number that forward counts on.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch._subclasses import FakeTensor

from ..errors import CaptureError
from ..guards.attribute_snapshot import AttributeSnapshot, weights_set_by_hooks
from ..guards.module_proxy import all_submodules
from .side_effects import stored_tensor_error

CONTAINERS = (dict, OrderedDict, list)
RESTORED = (*CONTAINERS, set, deque)
COUNTERS = (bool, int, float, str)


class ModuleSnapshot:
    """The attributes of all submodules, and the containers in them."""

    def __init__(self, module: nn.Module, given: Sequence[Tensor]) -> None:
        self.modules = all_submodules(module)
        self.attributes = [dict(vars(child)) for _, child in self.modules]
        self.before = AttributeSnapshot(module, given)
        direct = [value for held in self.attributes for value in held.values() if type(value) in CONTAINERS]
        self.contents = [(container, container.copy()) for container in direct]
        deep = {id(held): held for held in self.before.containers if type(held) in RESTORED}
        self.deep = [(container, container.copy()) for container in deep.values()]

    def restore(self) -> None:
        """Put everything back that changed."""
        for (_, module), before in zip(self.modules, self.attributes, strict=True):
            if not _same(vars(module), before):
                vars(module).clear()
                vars(module).update(before)
        for container, before in (*self.contents, *self.deep):
            if not _same(container, before):
                container.clear()
                container.extend(before) if isinstance(container, list | deque) else container.update(before)

    def refuse_leaks(self, inputs: set[int]) -> None:
        """Raise if forward left a fake tensor on the module that is none of the inputs, given by `id`, or changed a
        number there."""
        self._refuse_counters()
        for path, module in self.modules:
            for name, tensor in attached_values(module):
                if isinstance(tensor, FakeTensor) and id(tensor) not in inputs:
                    raise stored_tensor_error(".".join(filter(None, (path, name))))

    def _refuse_counters(self) -> None:
        """A number that forward changes would be the same in every step, and what depends on it as well."""
        names = {id(container): "" for container, _ in self.contents}
        for (path, module), before in zip(self.modules, self.attributes, strict=True):
            prefix = f"{path}." if path else ""
            _refuse_changed(vars(module), before, prefix + "{}")
            names |= {id(value): prefix + name for name, value in before.items()}
        for container, before in self.contents:
            _refuse_changed(_by_key(container), _by_key(before), names[id(container)] + "[{!r}]")


def _refuse_changed(now: dict[Any, Any], before: dict[Any, Any], label: str) -> None:
    for key, old in before.items():
        new = now.get(key)
        if type(old) in COUNTERS and type(new) in COUNTERS and repr(old) != repr(new):
            raise CaptureError(
                f"forward changes {label.format(key)} from {old!r} to {new!r}, but a captured step runs no Python: "
                "make it a buffer (register_buffer, a tensor), or change it outside of forward"
            )


def _by_key(container: Any) -> dict[Any, Any]:
    return dict(_items(container))


@contextmanager
def restore_module(module: nn.Module, given: Sequence[Tensor] = ()) -> Iterator[ModuleSnapshot]:
    """Whatever happens inside, the module is afterwards as it was; `given` are the tensors that its call reads."""
    before = ModuleSnapshot(module, given)
    try:
        yield before
    finally:
        before.restore()


def attached_values(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """What hangs on a module, with its name."""
    unread = weights_set_by_hooks(module)
    for name, value in vars(module).items():
        if type(value) in CONTAINERS:
            for key, item in _items(value):
                yield (str(key) if name in ("_buffers", "_parameters") else name), item
        elif name not in unread:
            yield name, value


def _items(container: Any) -> list[tuple[Any, Any]]:
    return list(container.items()) if isinstance(container, dict) else list(enumerate(container))


def _same(now: Any, before: Any) -> bool:
    """Whether two containers hold the same things, in the sense of `is`."""
    pairs = zip(_items(now), _items(before), strict=False)
    return len(now) == len(before) and all((a[0] is b[0] or a[0] == b[0]) and a[1] is b[1] for a, b in pairs)
