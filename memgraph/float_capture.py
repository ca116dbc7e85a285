"""A capture in which floats are inputs, believed only if one in which they were constants is the same.

captured with 0.1, a constant; now the call has 0.2   ->   captured with an input, which at 0.1 gives the first graph

What the first capture shows of the value, however it came there (`type(scale) is float`, a C++ formula that treats 1.0
as a special case), would stand in one graph and not in the other.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import fx, nn
from torch.fx.node import map_arg
from torch.utils import _pytree as pytree

from .capture import Captured, Ref, Wanted, capture
from .effects import holds_same
from .errors import CaptureError
from .float_inputs import FloatMark, Floats, Place, TracedFloat, ValueNeededError, Values
from .frames import source_line
from .type_checks import TypeChecks


@dataclass
class FloatTrial:
    """The `floats` of a call that differ from those with which `like` was captured, at `values` then.

    `needed` says what has asked for the value of one of them, if anything has.
    """

    floats: Floats
    like: Captured
    values: Mapping[Place, float]
    needed: str = ""

    def capture(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], grad: bool, wanted: Wanted
    ) -> Captured | None:
        """The call with these floats as inputs; None if one of them has to be a constant."""
        checks = TypeChecks(TracedFloat, [str(name) for _, name in self.floats.held.values()])
        try:
            with checks.watching():
                captured = capture(module, args, kwargs, grad=grad, wanted=wanted, floats=self.floats)
            if self.floats.notes.kept() or checks.found:
                self.needed = f"type() may be asked at {checks.found}" if checks.found else "forward keeps it elsewhere"
            elif self._is_like(captured):
                return replace(captured, opened=dict(self.floats.values))
        except ValueNeededError as error:
            self.needed = f"{error}, at {source_line(error.__traceback__)}"
        except Exception as error:
            # The call itself may fail, which it will say without floats as inputs; else one of them is behind it.
            cause = error.__cause__ if isinstance(error, CaptureError) else None
            self.needed = str(cause) if isinstance(cause, ValueNeededError) else ""
        self.floats.notes.kept()
        return None

    def _is_like(self, captured: Captured) -> bool:
        """Whether it was a constant that alone made the other capture another one."""
        if any(node.compute(self.values) == number for node, number in captured.special):
            return False
        if _facts(captured, self.values) == _facts(self.like, {}) and _same_constants(captured, self.like):
            return True
        self.needed = "the graph is another one with another float"
        return False


def _facts(captured: Captured, values: Values) -> list[object]:
    """All that makes a capture, with these values for floats that are inputs."""
    leaves = [leaf if isinstance(leaf, Ref) else (type(leaf), repr(leaf)) for leaf in captured.leaves]
    roles = captured.inputs, captured.outputs, captured.spec, captured.differentiable, captured.tangents
    rest = captured.hoped, dict(captured.sources), captured.custom, dict(captured.rewritten)
    return [leaves, *roles, *rest, *_ops(captured.graph.graph, values)]


def _ops(graph: fx.Graph, values: Values) -> list[object]:
    place = {node: f"%{i}" for i, node in enumerate(graph.nodes)}

    def written(mark: FloatMark) -> float:
        return float(mark.node.compute(values)) if values else float(mark)

    found: list[object] = []
    for node in graph.nodes:
        target = "" if node.op in ("get_attr", "output") else node.target
        args = pytree.tree_map_only(FloatMark, written, map_arg((node.args, dict(node.kwargs)), place.__getitem__))
        found.append((node.op, target, repr(args)))
    return found


def _same_constants(one: Captured, other: Captured) -> bool:
    pairs = zip(one.graph.graph.find_nodes(op="get_attr"), other.graph.graph.find_nodes(op="get_attr"), strict=True)
    return all(holds_same(getattr(one.graph, str(a.target)), getattr(other.graph, str(b.target))) for a, b in pairs)
