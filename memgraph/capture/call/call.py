"""A module's call, taken apart into the tensors that it reads and the rest.

model(x, labels=y)   ->   parameter w, buffer mean, input 0, input 1  +  a form that `run` fills with other tensors

Refuse forward hooks that keep tensors: hooks run when a step is captured, and not in its runs.

    features = {}
    layer.register_forward_hook(lambda module, args, out: features.update(h=out))
        ->    CaptureError: a forward hook of layers.1 keeps a tensor

What a hook refers to is read off its closure, its globals, and the attributes of its object. If it changes something
else there, as a hook that logs numbers does, there is a warning.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import FunctionType, MethodType, ModuleType, TracebackType
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from ...errors import CaptureError
from ...graph.captured import Input
from ...guards.containers import RESTORED, has_same_items, restore_container
from ...guards.signature import forward_hooks
from ...guards.written_attributes import Attribute, call_leaves, written_attributes
from ...system.own_attributes import attributes_of
from ...system.user_warning import warn_user
from ...tensors.pytree import Spec, tensors_of, unflatten
from .changed_arguments import ArgumentSnapshot

CLOSED = (Tensor, nn.Module, type, ModuleType, str, bytes)  # a module's own attributes are compared elsewhere
DEPTH, MANY = 4, 2_000  # how far a hook's references are followed


@dataclass(frozen=True, eq=False)
class Call:
    """A module, and the real tensors that its call reads, in the order of the placeholders."""

    module: nn.Module
    leaves: list[Any]
    spec: Spec
    inputs: tuple[Input, ...]
    tensors: tuple[Tensor, ...]
    held: tuple[Attribute, ...] = ()

    @classmethod
    def of(cls, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
        held = tuple(written_attributes(module).held)
        leaves, spec = call_leaves(args, kwargs, held)
        parameters, buffers = dict(module.named_parameters()), dict(module.named_buffers())
        given = tensors_of(leaves)
        inputs = (
            *(Input("parameter", name) for name in parameters),
            *(Input("buffer", name) for name in buffers),
            *_arguments(given),
        )
        return cls(module, leaves, spec, inputs, (*parameters.values(), *buffers.values(), *given), held)

    def holding(self, attributes: Iterable[Attribute]) -> Call:
        """Return the call with the present tensors of more attributes among its arguments."""
        args, kwargs, *_ = unflatten(self.leaves, self.spec)
        held = tuple(dict.fromkeys((*self.held, *attributes)))
        leaves, spec = call_leaves(args, kwargs, held)
        given = tensors_of(leaves)
        inputs = *(role for role in self.inputs if role.kind != "input"), *_arguments(given)
        owned = self.tensors[: len(inputs) - len(given)]
        return replace(self, leaves=leaves, spec=spec, inputs=inputs, tensors=(*owned, *given), held=held)

    def state(self, values: Sequence[Tensor]) -> dict[str, Tensor]:
        """Map names of parameters and buffers to their `values`, which has a tensor for each input."""
        return {role.name: value for role, value in zip(self.inputs, values, strict=True) if role.kind != "input"}

    def run(self, values: Sequence[Tensor]) -> Any:
        """Return the result for other inputs. Parameters and buffers are the module's own.

        Raises:
            CaptureError: forward puts something into an argument, or a hook keeps a tensor.
        """
        args, kwargs, *_ = self._filled(values)
        arguments, hooks = ArgumentSnapshot(self.module, args, kwargs), HookSnapshot(self.module)
        with hooks:
            result = self.module(*args, **kwargs)
        arguments.refuse_changes()
        return result

    def fill_held(self, values: Sequence[Tensor]) -> None:
        """Put other tensors into the attributes that are held."""
        _, _, *held = self._filled(values)
        for attribute, value in zip(self.held, held, strict=True):
            attribute.fill(value)

    def _filled(self, values: Sequence[Tensor]) -> Any:
        pairs = zip(self.tensors, self.inputs, values, strict=True)
        given = {id(tensor): value for tensor, role, value in pairs if role.kind == "input"}
        return unflatten([given[id(leaf)] if isinstance(leaf, Tensor) else leaf for leaf in self.leaves], self.spec)


def _arguments(given: Sequence[Tensor]) -> tuple[Input, ...]:
    return tuple(Input("input", index=i) for i in range(len(given)))


class HookSnapshot:
    """The containers that the forward hooks of a module refer to, and what is in them before a call.

    with HookSnapshot(module): module(x)    # raises if a hook has put a tensor there, and takes it out again

    It warns if a hook has changed something else. A call that fails leaves nothing there.
    """

    def __init__(self, module: nn.Module) -> None:
        self.containers = {
            id(container): (path or "the module", container, container.copy())
            for path, hook in forward_hooks(module)
            for container in _containers(hook)
        }

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None:
            self._restore()
            return
        changed = [
            (path, _new(container, before))
            for path, container, before in self.containers.values()
            if not has_same_items(container, before)
        ]
        for path, new in changed:
            if any(isinstance(leaf, Tensor) for leaf in tree_leaves(new)):
                self._restore()
                raise CaptureError(
                    f"a forward hook of {path} keeps a tensor, but hooks run only when a step is captured: return the "
                    "tensor from forward instead, or remove the hook"
                ).about(path)
        if changed:
            warn_user(
                f"a forward hook of {changed[0][0]} changes what it refers to: hooks run when a step is "
                "captured, and not in its later runs"
            )

    def _restore(self) -> None:
        for _, container, before in self.containers.values():
            restore_container(container, before)


def _containers(hook: Any) -> Iterator[Any]:
    """Yield the containers that a hook refers to."""
    seen = set[int]()
    waiting = deque([(hook, 0)])
    while waiting and len(seen) < MANY:
        thing, depth = waiting.popleft()
        if id(thing) in seen or isinstance(thing, CLOSED):
            continue
        seen.add(id(thing))
        if type(thing) in RESTORED:
            yield thing
        if depth < DEPTH:
            waiting.extend((inner, depth + 1) for inner in _inside(thing))


def _inside(thing: Any) -> Iterable[Any]:
    if isinstance(thing, partial):
        return (thing.func, *thing.args, *thing.keywords.values())
    if isinstance(thing, MethodType):
        return thing.__func__, thing.__self__
    if isinstance(thing, FunctionType):
        cells = (cell.cell_contents for cell in thing.__closure__ or () if _is_filled(cell))
        named = (thing.__globals__[name] for name in thing.__code__.co_names if name in thing.__globals__)
        return (*cells, *(thing.__defaults__ or ()), *(thing.__kwdefaults__ or {}).values(), *named)
    if isinstance(thing, dict):
        return tuple(thing.values())
    if isinstance(thing, list | tuple | set | deque):
        return tuple(thing)
    return () if (inside := attributes_of(thing)) is None else (inside,)


def _is_filled(cell: Any) -> bool:
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return False
    return True


def _items(container: Any) -> list[Any]:
    return list(container.values()) if isinstance(container, dict) else list(container)


def _new(container: Any, before: Any) -> list[Any]:
    """Return what is in a container and was not there before."""
    old = set(map(id, _items(before)))
    return [item for item in _items(container) if id(item) not in old]
