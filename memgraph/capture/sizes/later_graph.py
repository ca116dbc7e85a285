"""A graph module whose graph is made when it is first read.

LaterGraph(like, make)   ->   its constants now; its graph, made by `make`, once anything asks for it

The steps of most lengths never look at a graph of their own: they share text and code.
"""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType
from typing import Any

from torch import fx


class LaterGraph(fx.GraphModule):
    """Holds the constants of another module; with `sizes` it also runs the code of that module.

    Its own graph is for reading: no code is made of it.
    """

    _make: Callable[[], fx.Graph] | None = None
    _shared: fx.GraphModule | None = None

    def __init__(self, like: fx.GraphModule, make: Callable[[], fx.Graph], sizes: dict[str, int] | None = None) -> None:
        """
        Args:
            sizes: what the code of `like` reads as global names.
        """
        constants = fx.Graph()
        for target in dict.fromkeys(str(node.target) for node in like.graph.find_nodes(op="get_attr")):
            constants.create_node("get_attr", target)
        constants.output(())
        super().__init__(like, constants)
        self._make = make
        if sizes is not None:
            forward: Any = type(like).forward
            code, scope = forward.__code__, {**forward.__globals__, **sizes}
            type(self).forward = FunctionType(code, scope, "forward")  # fx makes a class for each module
            object.__setattr__(self, "_shared", like)  # no submodule

    @property
    def is_made(self) -> bool:
        return self._make is None

    @property
    def graph(self) -> fx.Graph:
        if self._make is not None:
            self._graph, self._make = self._make(), None
            self._graph.owning_module = self
        return self._graph

    @graph.setter
    def graph(self, g: fx.Graph) -> None:
        self._make = None
        fx.GraphModule.graph.fset(self, g)  # type: ignore[attr-defined]

    @property
    def code(self) -> str:
        """The code that runs, in which sizes may be names."""
        return self._shared.code if self._shared is not None else super().code
