"""CUDA graphs of a described device: what is captured is kept as calls, which run when the graph is launched.

y = mm(x, w)     while a graph is captured   ->   y is allocated, and has no values
graph.replay()                               ->   the host computes the product of what x and w have now, into y
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from .host_tensors import allocated_like, on_host

Workspaces = dict[tuple[int, int], Tensor]  # of cuBLAS, by thread and stream


class HostGraphs:
    """The calls of captured graphs.

    Attributes:
        workspaces: of the graph that is being captured, from its pool.
    """

    def __init__(self) -> None:
        self.workspaces: Workspaces = {}
        self._calls: list[Callable[[], None]] = []
        self._graphs: dict[int, tuple[list[Callable[[], None]], Workspaces]] = {}

    def install(self) -> None:
        """Be told by the described device when a graph is captured, launched or destroyed."""
        self._hook = ctypes.CFUNCTYPE(None, ctypes.c_ulong, ctypes.c_char)(self._changed)
        address = ctypes.cast(self._hook, ctypes.c_void_p).value
        ctypes.c_void_p.in_dll(ctypes.CDLL(None), "described_graph").value = address

    def record(self, compute: Callable[..., Any], args: Any, kwargs: Any, tensors: list[tuple[Tensor, Tensor]]) -> Any:
        """Record an op on tensors of the host, and return its results on the device, which have no values yet.

        `tensors` are those of the host among the arguments, each with the caller's.
        """
        copies = {id(there): there.clone() for there, _ in tensors}
        given = {id(copies[id(there)]): value for there, value in tensors}
        tried_args, tried_kwargs = tree_map(lambda each: copies.get(id(each), each), (args, kwargs))
        made: list[Tensor | None] = []

        def allocated(value: Any) -> Any:
            is_new = isinstance(value, Tensor) and id(value) not in given
            there = allocated_like(value) if is_new else given.get(id(value), value)
            made.append(on_host(there) if is_new else None)
            return there

        def run() -> None:
            for into, value in zip(made, tree_leaves(compute(*args, **kwargs)), strict=True):
                if into is not None:
                    into.copy_(value)

        results = tree_map(allocated, compute(*tried_args, **tried_kwargs))
        self._calls.append(run)
        return results

    def _changed(self, graph: int, how: bytes) -> None:
        if how == b"c":
            self._graphs[graph] = self._calls, self.workspaces
            self._calls, self.workspaces = [], {}
        elif how == b"l":
            for call in self._graphs[graph][0]:
                call()
        else:
            self._graphs.pop(graph, None)
