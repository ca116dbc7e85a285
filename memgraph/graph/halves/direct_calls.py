"""Call the ops of a graph by what runs them, without what Python adds to each call.

    mm = torch.ops.aten.mm.default(x, w)             ->   mm = torch.mm(x, w)
    g = torch.ops.aten.tanh_backward.default(d, y)   ->   g = torch.ops.aten.tanh_backward.default._op(d, y)
    f = torch.ops.memgraph.free.default(t, x, 0)     ->   f = ops.RUN["free"](t, x, 0)
    s = segment(x, w);  x = None                     ->   s = [x, w];  x = None;  s = segment.boxed(s)

torch's own functions parse their arguments faster than the object of an op does. A function takes an op's place only if
it is seen to call this very op with these very arguments: it runs once for each kind of arguments, on fake tensors,
under a mode that notes the op and computes nothing.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import BuiltinFunctionType, MethodDescriptorType
from typing import Any

import torch
from torch import Tensor, fx
from torch._ops import OpOverload
from torch.fx.graph import PythonCode, _BoxedCodeGen
from torch.fx.node import map_arg
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from ...tensors.traced_size import SizeArgument
from ..inductor import Segment
from ..ops import RUN

LINE = re.compile(r"^(    (\w+) = )torch\.ops\.\w+\.\w+\.\w+\(", re.MULTILINE)
SEGMENT = re.compile(r"^    (\w+) = (\w+)\(([\w, ]*)\)(;  .* = None)?(.*)$", re.MULTILINE)
# Of torch's functions, by the name of the op.
PLACES = (torch._VF, torch.Tensor, torch._C._nn)  # pyright: ignore[reportAttributeAccessIssue] # not in its stub
COMPILED = (BuiltinFunctionType, MethodDescriptorType)
PLAIN = (bool, int, float, str, type(None), torch.dtype, torch.layout, torch.memory_format, torch.device)

_found: dict[Any, Callable[..., Any]] = {}  # by op and kind of arguments


class DirectCode(_BoxedCodeGen):
    """The code of a half: it takes a list, empties it, and calls ops directly."""

    def _gen_python_code(self, nodes: Any, *args: Any, **kwargs: Any) -> PythonCode:
        code = super()._gen_python_code(nodes, *args, **kwargs)
        ops = {node.name: node for node in nodes if isinstance(node.target, OpOverload)}
        direct: dict[str, Any] = {}
        names: dict[Any, str] = {}

        def call(match: re.Match[str]) -> str:
            begin, name = match.groups()
            target, function = ops[name].target, direct_call(ops[name])
            base = f"op_{target._schema.name.replace('::', '_')}_{target._overloadname}"
            called = names.setdefault(function, base if base not in direct else f"{base}_{len(names)}")
            direct[called] = function
            return f"{begin}{called}("

        segments = {node.name for node in nodes if isinstance(node.target, Segment)}

        def boxed(match: re.Match[str]) -> str:
            name, function, given, released, rest = match.groups(default="")
            if name not in segments:
                return match[0]
            return f"    {name} = [{given}]{released};  {name} = {function}.boxed({name}){rest}"

        src = LINE.sub(call, code.src)
        return replace(code, src=SEGMENT.sub(boxed, src) if segments else src, globals=code.globals | direct)


def direct_call(node: fx.Node) -> Callable[..., Any]:
    """Return the fastest function that does what the node's op does with its arguments."""
    target: Any = node.target
    if target.namespace == "memgraph":
        return RUN[target._opname]
    key = target, _kind(node.args), tuple((name, _kind(value)) for name, value in node.kwargs.items())
    if key not in _found:
        _found[key] = next(_functions(node), target._op)
    return _found[key]


def _functions(node: fx.Node) -> Iterator[Callable[..., Any]]:
    """Yield torch's functions that call the node's op with its arguments."""
    op: Any = node.target
    given = map_arg((node.args, node.kwargs), lambda read: read.meta.get("val"))
    args, kwargs = tree_map_only(SizeArgument, int, given)
    leaves = tree_leaves((args, kwargs))
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    # A tensor without dimensions may be taken for a number, and a default device changes what makes tensors of none.
    if op.namespace != "aten" or not tensors or not all(x.dim() for x in tensors):
        return
    if not all(isinstance(leaf, (Tensor, *PLAIN)) for leaf in leaves):
        return
    for function in (getattr(place, op._opname, None) for place in PLACES):
        if isinstance(function, COMPILED) and _calls(function, op, args, kwargs, node.meta.get("val")):
            yield function


def _calls(function: Callable[..., Any], op: OpOverload, args: Any, kwargs: Any, result: Any) -> bool:
    """Return True if a function calls the op, once, with these arguments."""
    with (
        _Noting(result) as noted, warnings.catch_warnings(), torch.no_grad(), torch._C._DisableAutocast(),
        torch._C._AutoDispatchBelowAutograd(),
    ):  # fmt: skip
        warnings.simplefilter("ignore")  # of deprecated arguments; as errors they would reach other threads
        try:
            function(*args, **kwargs)
        except (TypeError, RuntimeError):  # it takes other arguments, or calls other ops
            return False
    return len(noted.calls) == 1 and noted.calls[0][0] is op and _is_same(noted.calls[0][1:], (args, kwargs))


class _Noting(TorchDispatchMode):
    """Notes the ops of torch that are called, and returns `result` instead of running them."""

    def __init__(self, result: Any) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.result, self.calls = result, list[tuple[Any, ...]]()

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if op.namespace == "prim":  # as a fake tensor is asked for its device
            return op(*args, **(kwargs or {}))
        self.calls.append((op, args, kwargs or {}))
        return self.result


def _is_same(one: Any, other: Any) -> bool:
    """Return True for equal arguments: the same tensors, and numbers of the same types."""
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(_is_same, one, other))
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_is_same(value, other[name]) for name, value in one.items())
    return one is other or (type(one) is type(other) and isinstance(one, PLAIN) and one == other)


def _kind(argument: Any) -> object:
    """Return what torch's functions look at when they choose the op."""
    if isinstance(argument, list | tuple):
        return tuple(map(_kind, argument))
    if isinstance(argument, fx.Node):
        value = argument.meta.get("val")
        return ("tensor", bool(value.dim())) if isinstance(value, Tensor) else ("number", type(value))
    return int if isinstance(argument, SizeArgument) else type(argument)
