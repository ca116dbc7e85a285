"""Stand-ins for the numbers that Python reads from traced tensors.

    s = loss.item(); x * (1 - s)    ->   number(loss), computed([number], "1 - v0"): the graph reads it at each run
    index.max().item() >= 7         ->   holds([number], "v0 >= 7", False): a guard on the comparison alone
    x.view(count.item(), -1)        ->   equal(count, [5]): a guard on the number

A graph has one guard for each distinct question, after the op that reads the number, which is in forward.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx
from torch._ops import OpOverload
from torch.fx.experimental.proxy_tensor import get_proxy_slot
from torch.utils import _pytree as pytree

from ..tensors.expressions import Operation, Part, Variable, evaluate, renamed, text_of, variables
from ..tensors.traced_number import NumberNode, NumberTrace, ValueNeededError, is_traced, stand_in
from .float_arguments import takes_any_value
from .guard_ops import EQUAL
from .number_ops import COMPUTED, HOLDS, NUMBER
from .provenance import PROVENANCE

KINDS = (float, int)


@dataclass
class TensorNumbers(NumberTrace):
    """The numbers that one trace has read.

    Attributes:
        tracer: of the trace.
        next_guard: returns the number of a new guard.
    """

    tracer: Any = None
    next_guard: Callable[[], int] = int
    _reads: list[tuple[fx.Proxy, Any]] = field(default_factory=list)  # by variable: node and value
    _computed: dict[str, fx.Proxy] = field(default_factory=dict)
    _asked: set[str] = field(default_factory=set)
    _last: dict[int, fx.Node] = field(default_factory=dict)  # by variable: its latest guard

    def read(self, tensor: Tensor, value: Any) -> Any:
        """Return a stand-in for the number of a tensor, which has this value; None if none can stand for it."""
        proxy = get_proxy_slot(tensor, self.tracer, None, lambda slot: slot.proxy)
        if type(value) not in KINDS or proxy is None:
            return None
        self._reads.append((self._created("number", NUMBER, (proxy,), value), value))
        return stand_in(NumberNode(Variable(len(self._reads) - 1), value, self))

    def value(self, node: NumberNode, reason: str) -> Any:
        if isinstance(node.value, float):
            for key in dict.fromkeys(variables(node.part)):
                self._guard_equal(key)
        else:
            self.truth(Operation("eq", (node.part, node.value)))
        return node.value

    def truth(self, predicate: Operation) -> bool:
        answer = bool(evaluate(predicate, {i: value for i, (_, value) in enumerate(self._reads)}))
        keys = list(dict.fromkeys(variables(predicate)))
        if self._is_new(text_of(predicate)):
            numbers = [self._reads[key][0] for key in keys]
            self._guard(max(keys), HOLDS, (numbers, _text(predicate, keys), answer))
        return answer

    def differs(self, node: NumberNode, number: float) -> None:
        if self.truth(Operation("eq", (node.part, number))):
            raise ValueNeededError("a formula of autograd differs for this value")

    def argument(self, node: NumberNode) -> Any:
        keys = list(dict.fromkeys(variables(node.part)))
        if not keys:
            return node.value
        if isinstance(node.part, Variable):
            return self._reads[keys[0]][0]
        text = text_of(node.part)
        if text not in self._computed:
            numbers = [self._reads[key][0] for key in keys]
            args = (numbers, _text(node.part, keys))
            self._computed[text] = self._created("computed", COMPUTED, args, node.value)
        return self._computed[text]

    def check_types(self, name: str, operands: tuple[Any, ...]) -> None:
        """Ask what decides the type of a result, or that it exists."""
        last = operands[-1]
        if name == "pow" and type(last) is not int:
            for operand in filter(is_traced, operands):
                self.value(operand.node, "the type of a power depends on it")
        elif name in ("truediv", "floordiv", "mod") and is_traced(last):
            bool(last != 0)
        elif name == "pow" and last < 0:
            bool(operands[0] != 0)

    def in_arguments(self, func: OpOverload, args: Any, kwargs: Any) -> Any:
        """Return the arguments of an op with values in place of the numbers on which its result may depend."""
        leaves, spec = pytree.tree_flatten((args, kwargs))
        numbers = [leaf for leaf in leaves if isinstance(leaf, torch.SymFloat | torch.SymInt)]
        if not any(getattr(number.node, "trace", None) is self for number in numbers) or takes_any_value(func):
            return args, kwargs
        return pytree.tree_unflatten([self._plain(leaf) for leaf in leaves], spec)

    def _plain(self, leaf: Any) -> Any:
        if not isinstance(leaf, torch.SymFloat | torch.SymInt) or getattr(leaf.node, "trace", None) is not self:
            return leaf
        return self.value(leaf.node, "an op takes the number itself")

    def _created(self, name: str, op: OpOverload, args: tuple[Any, ...], value: Any) -> fx.Proxy:
        proxy: fx.Proxy = self.tracer.create_proxy("call_function", op, args, {}, name=name)
        proxy.node.meta["val"] = value
        return proxy

    def _guard_equal(self, key: int) -> None:
        proxy, value = self._reads[key]
        if self._is_new(f"v{key}"):
            self._guard(key, EQUAL, (proxy.node.args[0], [value]))

    def _is_new(self, question: str) -> bool:
        new = question not in self._asked
        self._asked.add(question)
        return new

    def _guard(self, key: int, op: OpOverload, args: tuple[Any, ...]) -> None:
        """Insert a guard after the op that reads a number."""
        after = self._last.get(key, self._reads[key][0].node)
        with after.graph.inserting_after(after):
            guard = self.tracer.create_proxy("call_function", op, args, {"guard": self.next_guard()}).node
        self._last[key] = guard
        guard.meta |= {"val": None, PROVENANCE: {**guard.meta.get(PROVENANCE, {}), "phase": "forward"}}


class CopiedNumbers(NumberTrace):
    """The numbers of a graph that is traced again."""

    def copy(self, node: fx.Node, args: Any, tracer: Any) -> Any:
        """Return a stand-in for the number of a node, whose arguments are fake tensors or stand-ins here."""
        proxies = pytree.tree_map(lambda leaf: _proxy(leaf, tracer), args)
        proxy = tracer.create_proxy("call_function", node.target, proxies, {}, name=node.name)
        proxy.node.meta["val"] = node.meta["val"]
        return stand_in(NumberNode(Variable(proxy), node.meta["val"], self))

    def argument(self, node: NumberNode) -> Any:
        assert isinstance(node.part, Variable)
        return node.part.key


def as_tensor(number: Any) -> Tensor:
    """Return the tensor that holds a number exactly."""
    return torch.scalar_tensor(number, dtype=torch.float64 if number.node.is_float() else torch.int64, device="cpu")


def _proxy(leaf: Any, tracer: Any) -> Any:
    if isinstance(leaf, Tensor):
        return get_proxy_slot(leaf, tracer).proxy
    return leaf.node.constant if is_traced(leaf) else leaf


def _text(part: Part, keys: list[int]) -> str:
    """Return the text of an expression whose variables are numbered in the order of these keys."""
    return text_of(renamed(part, {key: i for i, key in enumerate(keys)}))
