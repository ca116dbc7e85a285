"""Values that are known while a step is traced, because no input goes into them.

    positions = torch.arange(n);  if (positions.diff() != 1).any(): ...

Python looks at such values freely in eager, and so it may here: the few ops that lead there are run on real tensors.
Everything that depends on an input stays unknown, and asking for it is an error.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch import Tensor, fx, nn
from torch._ops import OpOverload
from torch._subclasses import FakeTensor, FakeTensorMode
from torch.fx.experimental.proxy_tensor import get_proxy_slot
from torch.fx.node import map_arg
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes

from ..graph.aten_shims import COPY_STORAGES, copy_as_laid_out
from ..graph.float_arguments import float_arguments
from ..graph.nodes import all_storages, aten, changes_inputs, is_random, storages, written_inputs
from ..tensors.traced_float import ValueNeededError
from .float_inputs import with_values

ELEMENTS = 1 << 24  # what may be computed to answer one question
ASKED_BY_TRANSFORMERS = "transformers.utils.import_utils"


@dataclass(frozen=True)
class Failed:
    """An op that failed on fake tensors."""

    error: Exception
    op: Any
    args: Any
    kwargs: Any

    def runs(self) -> bool:
        """Whether it does on real ones: zeros of the same shapes, if these are not much."""
        given, form = pytree.tree_flatten((self.args, self.kwargs))
        fakes = [thing for thing in given if isinstance(thing, Tensor)]
        if not isinstance(self.op, OpOverload) or sum(fake.numel() for fake in fakes) > ELEMENTS:
            return False
        with _disable_current_modes(), torch.no_grad():
            real = [_zeros(thing) if isinstance(thing, Tensor) else thing for thing in given]
            args, kwargs = pytree.tree_unflatten(real, form)
            try:
                self.op(*args, **kwargs)
            except Exception:
                return False
        return True


def _zeros(like: Tensor) -> Tensor:
    return torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=like.device).zero_()


_noted: set[Any] = set()  # ops that this process has seen a result of which torch did not remember
_roomy: set[Any] = set(COPY_STORAGES)  # those of them whose results lie in larger storages than they cover


class ConstantFakeMode(FakeTensorMode):
    """Fake tensors that have a value where it is known; without a ShapeEnv, for all else is an error at once."""

    tracer: Any = None  # of the trace that is going on
    failed: Failed | None = None  # the latest

    def __init__(self, has_floats: bool = False) -> None:
        """With `has_floats`, ops may read traced floats."""
        super().__init__(allow_non_fake_inputs=True)
        self.has_floats = has_floats

    @contextmanager
    def knowing(self) -> Iterator[None]:
        """Forget the trace at the end, with all that it holds."""
        try:
            yield
        finally:
            self.tracer = None

    def dispatch(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is aten._local_scalar_dense.default and (value := self.value(args[0])) is not None:
            return value.item()
        kwargs = kwargs or {}
        if self.has_floats:
            args, kwargs = with_values(func, args, kwargs)
        try:
            with self._remembering(func):
                made = super().dispatch(func, types, args, kwargs)
        except Exception as error:
            if self.tracer is not None:
                self.failed = Failed(error, func, args, kwargs)
            raise
        _note(func, made)
        return copy_as_laid_out(func, args, made, self)

    @contextmanager
    def _remembering(self, func: Any) -> Iterator[None]:
        """Let torch give a result that it remembers, but not of an op that makes storages larger than results cover.

        It gives no more than they cover, so the bytes of a step would depend on what the process has traced before.
        """
        before = self.cache_enabled
        self.cache_enabled = before and func in _noted and func not in _roomy
        try:
            yield
        finally:
            self.cache_enabled = before

    def value(self, tensor: Tensor) -> Tensor | None:
        """The real value of a traced tensor, if no input goes into it."""
        node = self.tracer and get_proxy_slot(tensor, self.tracer, None, lambda slot: slot.proxy.node)
        needed = _leading_to(node) if node is not None else []
        if not needed or _too_large(needed) or _changed_in_place(needed):
            return None
        if any(map(float_arguments, needed)):
            raise ValueNeededError("forward looks at a tensor that is made of it")
        with _disable_current_modes(), torch.no_grad():
            return _run(needed, self.tracer.root)


def _note(func: Any, made: Any) -> None:
    """Remember of an op whether what it makes lies in more bytes than it covers, as a window of `hann_window` does."""
    _noted.add(func)
    if func in _roomy or not isinstance(func, OpOverload) or func.is_view or func._schema.is_mutable:
        return
    if any(_is_roomy(leaf) for leaf in pytree.tree_leaves(made) if isinstance(leaf, Tensor)):
        _roomy.add(func)


def _is_roomy(tensor: Tensor) -> bool:
    if tensor.layout != torch.strided:
        return False
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    covered = (last + 1) * tensor.itemsize if tensor.numel() else 0
    return bool(tensor.storage_offset()) or tensor.untyped_storage().nbytes() != covered


def constant_transformers_checks(mode: ConstantFakeMode) -> AbstractContextManager[Any]:
    """Let the library's models treat what is known like a real tensor.

    Where they see a fake one they build a mask that eager does without, and the gradients differ in their last bits.
    """
    module = sys.modules.get(ASKED_BY_TRANSFORMERS)
    if not hasattr(module, "is_fake_tensor"):
        return nullcontext()

    def is_fake_tensor(thing: Any) -> bool:
        return isinstance(thing, FakeTensor) and mode.value(thing) is None

    return mock.patch.object(module, "is_fake_tensor", is_fake_tensor)


def _leading_to(node: fx.Node) -> list[fx.Node]:
    """The node and all that it is computed from, in order; nothing if that can't be run by itself."""
    found, waiting = {node}, [node]
    while waiting:
        now = waiting.pop()
        if not _is_computable(now):
            return []
        new = set(now.all_input_nodes) - found
        found |= new
        waiting.extend(new)
    return [candidate for candidate in node.graph.nodes if candidate in found]


def _is_computable(node: fx.Node) -> bool:
    if node.op == "get_attr":  # `torch.tensor([1, 2])` in forward, but not an attribute, which may change between steps
        return all(user.target is aten.lift_fresh_copy.default for user in node.users)
    if node.op != "call_function" or is_random(node) or changes_inputs(node):
        return False
    return not (isinstance(node.target, OpOverload) and "empty" in node.target._schema.name)


def _too_large(nodes: list[fx.Node]) -> bool:
    values = pytree.tree_leaves([node.meta.get("val") for node in nodes])
    return sum(value.numel() for value in values if isinstance(value, Tensor)) > ELEMENTS


def _changed_in_place(nodes: list[fx.Node]) -> bool:
    """Whether any op so far has written to what these nodes hold."""
    held = all_storages(nodes)
    return any(storages(written) & held for node in nodes[0].graph.nodes for written in written_inputs(node))


def _run(nodes: list[fx.Node], root: nn.Module) -> Any:
    values: dict[fx.Node, Any] = {}
    for node in nodes:
        if node.op == "get_attr":
            values[node] = getattr(root, str(node.target))
        else:
            args, kwargs = map_arg((node.args, node.kwargs), values.__getitem__)
            values[node] = node.target(*args, **kwargs)  # type: ignore[operator]
    return values[nodes[-1]]
