"""Fake tensors that have a value where no input affects it.

    positions = torch.arange(n);  if (positions.diff() != 1).any(): ...

In eager, Python may look at such values. Here, the few ops behind them run on real tensors. Values that depend on an
input are unknown, and it is an error to ask for them.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import cache, partial, wraps
from typing import Any
from unittest import mock

import torch
from torch import Tensor, fx
from torch._dispatch.python import enable_python_dispatcher
from torch._ops import OpOverload
from torch._subclasses import FakeTensor, FakeTensorMode
from torch.fx.experimental.proxy_tensor import get_proxy_slot
from torch.fx.node import map_arg
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes

from ..graph.aten_shims import COPY_STORAGES
from ..graph.float_arguments import float_arguments
from ..graph.nodes import all_storages, aten, changes_inputs, is_random, storages, written_inputs
from ..graph.op_descriptions import describe
from ..guards.refused_collectives import refuse_collective
from ..profile.real_strides import with_real_strides
from ..system.frames import is_running
from ..tensors.traced_number import ValueNeededError
from ..tensors.traced_size import Number, SizeArgument
from .floats.float_inputs import with_values
from .sizes.size_inputs import SizeInputs
from .values.questions import Answer, ValuesNeeded

MAX_ELEMENTS = 1 << 24  # what may be computed to answer one question
TRANSFORMERS_CHECKS = "transformers.utils.import_utils"
EAGER_MASK = "eager_mask"  # its function that makes the mask of "eager" attention
TRANSFORMERS_ATTENTION = "transformers.integrations.sdpa_attention"
# Functions of it whose results have other bits without a mask, with the position of the mask: keys that several heads
# share are repeated for a mask, and a bias of positions is combined with it.
MASKED_WAYS = {"use_gqa_in_sdpa": 0, "create_position_bias_mask": 1}


@dataclass(frozen=True)
class FailedOp:
    """An op that failed on fake tensors."""

    error: Exception
    op: Any
    args: Any
    kwargs: Any

    def runs(self) -> bool:
        """Return True if it runs on zeros of the same shapes, unless these are large."""
        leaves, form = pytree.tree_flatten((self.args, self.kwargs))
        fakes = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        if not isinstance(self.op, OpOverload) or sum(fake.numel() for fake in fakes) > MAX_ELEMENTS:
            return False
        with _disable_current_modes(), torch.no_grad():
            try:
                real = [_zeros(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
                args, kwargs = pytree.tree_unflatten(real, form)
                self.op(*args, **kwargs)
            except Exception:
                return False
        return True


def _zeros(like: Tensor) -> Tensor:
    return torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=like.device).zero_()


@cache
def _start_autograd() -> None:
    """Have autograd start threads for the devices that are here, before a fake mode has torch believe in more.

    The first fake mode gives a CUDA build of torch without a GPU a device that does nothing. Autograd asks for devices
    once, and after it has started a thread for one, no child of `fork` can call backward.
    """
    with (
        _disable_current_modes(), torch._C.DisableTorchFunction(), torch.inference_mode(False), torch.enable_grad(),
        suppress(RuntimeError),  # in such a child: a backward of its own will say so
    ):  # fmt: skip
        torch.zeros(0, device="cpu", requires_grad=True).backward(torch.zeros(0, device="cpu"))


_measured: set[Any] = set()  # ops that ran uncached at least once in this process
_large: set[Any] = set(COPY_STORAGES)  # ops whose results have storages larger than they cover


class ConstantFakeMode(FakeTensorMode):
    """Fake tensors with constant values; without a ShapeEnv, so that any other question is an error at once."""

    tracer: Any = None  # of the current trace
    failed: FailedOp | None = None  # most recently

    def __init__(
        self, has_floats: bool = False, answers: Sequence[Answer] | None = None, has_numbers: bool = False,
        sizes: SizeInputs | None = None,
    ) -> None:  # fmt: skip
        """`answers` are the values that Python asks for; with `sizes`, tensors may have symbolic ones.

        Stand-ins may be arguments of ops: with `has_floats` for floats, with `has_numbers` for numbers of tensors.
        """
        _start_autograd()
        super().__init__(allow_non_fake_inputs=True, shape_env=sizes.trace.env if sizes is not None else None)
        self.has_floats, self.answers, self.has_numbers, self.sizes = has_floats, answers, has_numbers, sizes
        self.traced = list[Iterable[Tensor]]()  # the tensors of each trace, held weakly

    @contextmanager
    def tracing(self) -> Iterator[None]:
        """Drop the trace at the end of the block."""
        try:
            yield
        finally:
            self.tracer = None

    def dispatch(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is aten._local_scalar_dense.default and (value := self.value(args[0])) is not None:
            return value.item()
        refuse_collective(func)
        kwargs = kwargs or {}
        if self.has_floats or self.has_numbers:
            args, kwargs = with_values(func, args, kwargs)
        caches = self.cache_enabled

        def run() -> Any:
            # torch would cache storages that are no larger than the results, and the bytes of a step would depend on
            # earlier traces of the process.
            self.cache_enabled = caches and func in _measured and func not in _large
            try:
                result = super(ConstantFakeMode, self).dispatch(func, types, args, kwargs)
            finally:
                self.cache_enabled = caches
            if self.shape_env is None:  # numbers compare faster than symbols
                _record_storages(func, result)
            return result

        try:
            # Descriptions in Python take symbols; those in C++ would ask for their values.
            with enable_python_dispatcher() if self.shape_env is not None else nullcontext():
                result = describe(func, args, kwargs, self, run)
            return with_real_strides(func, args, kwargs, result, self)
        except Exception as error:
            if self.tracer is not None:
                self.failed = FailedOp(error, func, args, kwargs)
            raise

    def value(self, tensor: Tensor) -> Tensor | None:
        """Return the real value of a traced tensor if no input affects it; at other lengths it has to be the same."""
        compute = self._constant(tensor)
        if compute is None:
            return None
        value = compute(int)
        if self.sizes is not None:
            self.sizes.trace.require(lambda number: torch.equal(compute(number), value))
        return value

    def has_value(self, tensor: Tensor) -> bool:
        """Return True if no input affects a traced tensor."""
        return self._constant(tensor) is not None

    def _constant(self, tensor: Tensor) -> Callable[[Number], Tensor] | None:
        """Return a function that computes the real value of a traced tensor; None if an input affects it."""
        node = self.tracer and get_proxy_slot(tensor, self.tracer, None, lambda slot: slot.proxy.node)
        needed = _dependencies(node) if node is not None else []
        if not needed or _too_large(needed) or _changed_in_place(needed):
            return None
        if any(map(float_arguments, needed)):
            raise ValueNeededError("forward looks at a tensor that is made of it")
        copies = dict[fx.Node, fx.Node]()  # as later passes change the nodes of the trace
        graph = fx.Graph()
        for each in needed:
            copies[each] = graph.node_copy(each, copies.__getitem__)
        names = [str(each.target) for each in needed if each.op == "get_attr"]
        constants = {name: getattr(self.tracer.root, name) for name in names}
        return partial(_run, list(graph.nodes), constants)


def _record_storages(func: Any, result: Any) -> None:
    """Record ops whose results cover only part of their storages, as the window of `hann_window` does."""
    _measured.add(func)
    if func in _large or not isinstance(func, OpOverload) or func.is_view or func._schema.is_mutable:
        return
    if any(_has_large_storage(leaf) for leaf in pytree.tree_leaves(result) if isinstance(leaf, Tensor)):
        _large.add(func)


def _has_large_storage(tensor: Tensor) -> bool:
    if tensor.layout != torch.strided:
        return False
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    covered = (last + 1) * tensor.itemsize if tensor.numel() else 0
    return bool(tensor.storage_offset()) or tensor.untyped_storage().nbytes() != covered


@contextmanager
def constant_transformers_checks(mode: ConstantFakeMode, tensors: Sequence[Tensor]) -> Iterator[None]:
    """Let transformers treat tensors with a constant value as real ones. `tensors` are those of the call.

    For a fake tensor it builds a mask, also where eager drops one that is all true. Most kernels give the same bits
    with such a mask; where another way is taken without one, the values of the call are needed. So they are for the
    mask of "eager" attention under autocast, whose float32 makes float32 of the scores.
    """
    checks, attention = sys.modules.get(TRANSFORMERS_CHECKS), sys.modules.get(TRANSFORMERS_ATTENTION)
    has_values = not any(isinstance(tensor, FakeTensor) for tensor in tensors)
    is_unknown = False

    def is_fake_tensor(thing: Any) -> bool:
        nonlocal is_unknown
        if not isinstance(thing, FakeTensor) or mode.answers is not None or mode.has_value(thing):
            return False
        if has_values and _is_autocast_enabled() and is_running(EAGER_MASK):
            raise ValuesNeeded("scores are of another type without a mask that is all true")
        is_unknown = True
        return True

    def asking(function: Any, place: int) -> Any:
        @wraps(function)
        def asked(*args: Any, **kwargs: Any) -> Any:
            mask = args[place] if len(args) > place else kwargs.get("attention_mask")
            if is_unknown and has_values and mask is not None:
                raise ValuesNeeded("attention without a mask that is all true takes another way")
            return function(*args, **kwargs)

        return asked

    with ExitStack() as stack:
        if hasattr(checks, "is_fake_tensor"):
            stack.enter_context(mock.patch.object(checks, "is_fake_tensor", is_fake_tensor))
        for name, place in MASKED_WAYS.items():
            if hasattr(attention, name):
                stack.enter_context(mock.patch.object(attention, name, asking(getattr(attention, name), place)))
        yield


def _is_autocast_enabled() -> bool:
    return any(map(torch.is_autocast_enabled, ("cpu", "cuda")))


def _dependencies(node: fx.Node) -> list[fx.Node]:
    """Return a node and all nodes that it is computed from, in order; nothing if they can't run outside of the step."""
    needed, waiting = {node}, [node]
    while waiting:
        current = waiting.pop()
        if not _is_computable(current):
            return []
        new = set(current.all_input_nodes) - needed
        needed |= new
        waiting.extend(new)
    return [candidate for candidate in node.graph.nodes if candidate in needed]


def _is_computable(node: fx.Node) -> bool:
    if node.op == "get_attr":  # `torch.tensor([1, 2])` in forward, but not an attribute, which may change between steps
        return all(user.target is aten.lift_fresh_copy.default for user in node.users)
    if node.op != "call_function" or is_random(node) or changes_inputs(node):
        return False
    return not (isinstance(node.target, OpOverload) and "empty" in node.target._schema.name)


def _too_large(nodes: list[fx.Node]) -> bool:
    values = pytree.tree_leaves([node.meta.get("val") for node in nodes])
    return sum(value.numel() for value in values if isinstance(value, Tensor)) > MAX_ELEMENTS


def _changed_in_place(nodes: list[fx.Node]) -> bool:
    """Return True if an op of the graph has written to the storages of these nodes."""
    constant = all_storages(nodes)
    return any(storages(written) & constant for node in nodes[0].graph.nodes for written in written_inputs(node))


def _run(nodes: list[fx.Node], constants: Mapping[str, Any], number: Number) -> Any:
    """Compute the value of the last node; `number` says what the sizes of the trace are."""
    values: dict[fx.Node, Any] = {}
    with _disable_current_modes(), torch.no_grad():
        for node in nodes:
            if node.op == "get_attr":
                values[node] = constants[str(node.target)]
            else:
                args, kwargs = map_arg((node.args, node.kwargs), values.__getitem__)
                args, kwargs = pytree.tree_map_only(SizeArgument, number, (args, kwargs))
                values[node] = node.target(*args, **kwargs)  # type: ignore[operator]
    return values[nodes[-1]]
