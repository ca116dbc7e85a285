"""A captured graph as JSON, and back: the same nodes, names and arguments, and fake values in the same storages.

%add = aten.add.Tensor(%x, 2.0)   ->   ["call_function", "add", "aten::add.Tensor", [{"node": 0}, 2.0], {}, ...]

Real tensors are not written.  A graph reads them by the position in which the call's ops first read them.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch._ops import OpOverload
from torch._subclasses import FakeTensor, FakeTensorMode

from ...tensors.layout import has_storage

JSON = Any
FORMS: dict[str, Callable[[Any], Any]] = {  # of what is no container
    "device": torch.device, "complex": lambda parts: complex(*parts), "slice": lambda parts: slice(*parts),
}  # fmt: skip
KEPT_META = ("kind", "phase", "where", "part")
GETITEM = "getitem"
SAME = (type(None), bool, int, float, str)  # as JSON has them
NAMED = (torch.dtype, torch.layout, torch.memory_format)  # torch.float32, torch.strided, torch.preserve_format


class NotRecordedError(ValueError):
    """A graph has something that has no form in JSON."""


def graph_record(module: fx.GraphModule, constants: Sequence[Tensor]) -> JSON:
    """Return the JSON of a graph.

    Raises:
        NotRecordedError: it has something without a form in JSON.
    """
    writer = _Writer(module, constants)
    nodes = [writer.node(node) for node in module.graph.nodes]
    return {"nodes": nodes, "storages": writer.storages, "constants": writer.targets}


def recorded_graph(record: JSON, constants: Sequence[Tensor], mode: FakeTensorMode) -> fx.GraphModule:
    """Return the graph of a record, with fake values of `mode` and these real tensors.

    Raises:
        LookupError, TypeError, ValueError, AttributeError, RuntimeError: it is no such record.
    """
    reader = _Reader(record["storages"], mode)
    for fields in record["nodes"]:
        reader.add(*fields)
    reader.graph.lint()
    targets = {target: constants[place] for target, place in record["constants"].items()}
    return fx.GraphModule(targets, reader.graph)


class _Writer:
    def __init__(self, module: fx.GraphModule, constants: Sequence[Tensor]) -> None:
        self.module = module
        self.places = {id(tensor): place for place, tensor in enumerate(constants)}
        self.targets: dict[str, int] = {}
        self.storages: list[list[JSON]] = []
        self._storages: dict[int, int] = {}
        self._numbers: dict[fx.Node, int] = {}

    def node(self, node: fx.Node) -> JSON:
        self._numbers[node] = len(self._numbers)
        target, args = self._target(node), [self._value(argument) for argument in node.args]
        kwargs = {name: self._value(argument) for name, argument in node.kwargs.items()}
        if node.op == "output":
            return [node.op, node.name, target, args, kwargs, {"kinds": list(node.meta["kinds"])}, []]
        meta = {name: node.meta[name] for name in KEPT_META if name in node.meta}
        if rest := node.meta.keys() - {*KEPT_META, "val"}:
            raise NotRecordedError(f"{node.name} has notes of its own: {', '.join(sorted(rest))}")
        values = [self._value(node.meta["val"])] if "val" in node.meta else []
        return [node.op, node.name, target, args, kwargs, meta, values]

    def _target(self, node: fx.Node) -> str:
        if node.op == "call_function" and node.target is operator.getitem:
            return GETITEM
        if node.op == "call_function" and isinstance(node.target, OpOverload):
            return f"{node.target._schema.name}.{node.target._overloadname}"
        if node.op == "get_attr":
            place = self.places.get(id(getattr(self.module, str(node.target))))
            if place is None:
                raise NotRecordedError(f"no op of the call reads {node.target}")
            self.targets[str(node.target)] = place
        elif node.op not in ("placeholder", "output"):
            raise NotRecordedError(f"{node.name} calls {node.target}")
        return str(node.target)

    def _value(self, thing: Any) -> JSON:
        kind = type(thing)
        if kind in SAME:
            return thing
        if kind in NAMED:
            return {"torch": str(thing).removeprefix("torch.")}
        if isinstance(thing, fx.Node):
            return {"node": self._numbers[thing]}
        if isinstance(thing, FakeTensor):
            return {"fake": self._fake(thing)}
        if isinstance(thing, list):
            return [self._value(item) for item in thing]
        if isinstance(thing, tuple):
            return {"tuple": [self._value(item) for item in thing]}
        if kind is torch.device:
            return {"device": str(thing)}
        if kind is complex:
            return {"complex": [thing.real, thing.imag]}
        if kind is slice:
            return {"slice": [self._value(part) for part in (thing.start, thing.stop, thing.step)]}
        raise NotRecordedError(f"{kind.__name__} has no form in JSON")

    def _fake(self, fake: FakeTensor) -> JSON:
        if not has_storage(fake) or fake.is_conj() or fake.is_neg() or fake.grad_fn is not None:
            raise NotRecordedError("a fake tensor has more than a layout")
        storage = fake.untyped_storage()
        if storage._cdata not in self._storages:
            self._storages[storage._cdata] = len(self.storages)
            self.storages.append([storage.nbytes(), str(fake.fake_device)])
        where = self._storages[storage._cdata], fake.storage_offset()
        return [str(fake.dtype).removeprefix("torch."), list(fake.shape), list(fake.stride()), *where]


class _Reader:
    def __init__(self, storages: JSON, mode: FakeTensorMode) -> None:
        self.graph, self.mode = fx.Graph(), mode
        self.storages = [(torch.UntypedStorage(nbytes, device="meta"), torch.device(at)) for nbytes, at in storages]
        self._nodes: list[fx.Node] = []

    def add(self, op: str, name: str, target: str, args: JSON, kwargs: JSON, meta: JSON, values: JSON) -> None:
        called: Any = _called(target) if op == "call_function" else target
        given = {key: self._value(argument) for key, argument in kwargs.items()}
        node = self.graph.create_node(op, called, tuple(map(self._value, args)), given, name=name)
        if node.name != name:
            raise ValueError(f"two nodes have the name {name}")
        node.meta = {"kinds": tuple(meta["kinds"])} if op == "output" else dict(meta)
        if values:
            node.meta["val"] = self._value(values[0])
        self._nodes.append(node)

    def _value(self, thing: JSON) -> Any:
        kind = type(thing)
        if kind in SAME:
            return thing
        if kind is list:
            return [self._value(item) for item in thing]
        ((form, content),) = thing.items()
        if form == "node":
            return self._nodes[content]
        if form == "fake":
            return self._fake(*content)
        if form == "tuple":
            return tuple(map(self._value, content))
        if form == "torch":
            return _named(content)
        return FORMS[form](content)

    def _fake(self, dtype: str, shape: list[int], strides: list[int], storage: int, offset: int) -> FakeTensor:
        content, device = self.storages[storage]
        meta = torch.empty(0, dtype=_named(dtype), device="meta").set_(content, offset, shape, strides)
        return FakeTensor(self.mode, meta, device)


def _called(target: str) -> Any:
    if target == GETITEM:
        return operator.getitem
    namespace, _, name = target.partition("::")
    packet, _, overload = name.partition(".")
    op = getattr(getattr(getattr(torch.ops, namespace), packet), overload)
    if not isinstance(op, OpOverload):
        raise ValueError(f"{target} is no op")
    return op


def _named(name: str) -> Any:
    value = getattr(torch, name)
    if type(value) not in NAMED:
        raise ValueError(f"torch.{name} is no type, layout or memory format")
    return value
