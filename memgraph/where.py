"""Notes on each node of a graph while it is traced: its phase, and the place in the user's code that it comes from.

    transformer.h.0.mlp modeling_gpt2.py:312

That is the innermost submodule that was running and the innermost line outside torch.  An op of backward has the place of the op of
forward that it belongs to: autograd gives both the same sequence number.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from traceback import walk_tb
from types import FrameType, TracebackType
from typing import Any

import torch
from torch import fx, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

# `custom` is a field of a node's meta that a second trace copies.
NOTES = "custom"
TORCH = str(Path(torch.__file__).parent)
MEMGRAPH = str(Path(__file__).parent)


class Notes:
    """Writes `phase` and `where` into `node.meta[NOTES]` of every node that the tracer makes."""

    def __init__(self, module: nn.Module) -> None:
        self.paths = {id(child): path for path, child in module.named_modules()}
        self.running: list[str] = [""]
        self.phase = "forward"
        self.places: dict[int, str] = {}  # by autograd's sequence number
        self.place = ""  # of the autograd node that runs

    @contextmanager
    def following(self) -> Iterator[None]:
        """Know which submodule is running."""
        with ExitStack() as stack:
            stack.callback(register_module_forward_pre_hook(self._enter).remove)
            stack.callback(register_module_forward_hook(self._leave).remove)
            yield

    def attach(self, tracer: Any) -> None:
        """Take notes on what this tracer makes from now on."""
        create_node = tracer.create_node

        def noting(*args: Any, **kwargs: Any) -> fx.Node:
            node = create_node(*args, **kwargs)
            self._note(node)
            return node

        tracer.create_node = noting

    def turn(self, roots: Iterable[torch.autograd.graph.Node | None]) -> None:
        """What follows is the backward of these autograd nodes."""
        self.phase = "backward"
        for node in _graph_of(roots):
            number = node._sequence_nr()  # type: ignore[attr-defined]
            node.register_prehook(lambda _, number=number: self._go_to(number))

    def _enter(self, module: nn.Module, args: Any) -> None:
        self.running.append(self.paths.get(id(module), self.running[-1]))

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        self.running.pop()

    def _go_to(self, number: int) -> None:
        self.place = self.places.get(number, self.place)

    def _note(self, node: fx.Node) -> None:
        if self.phase == "forward":
            self.place = f"{self.running[-1]} {_line(sys._getframe())}".strip()
            self.places.setdefault(node.meta.get("seq_nr", -1), self.place)
        node.meta[NOTES] = {**node.meta.get(NOTES, {}), "phase": self.phase, "where": self.place}


def source_line(traceback: TracebackType | None) -> str:
    """Where in the user's code an exception arose, or else in torch's own modules, as `path:line in function`."""
    inside = [
        (frame.f_code, line) for frame, line in walk_tb(traceback) if not frame.f_code.co_filename.startswith("<")
    ]
    users = [place for place in inside if not place[0].co_filename.startswith((TORCH, MEMGRAPH))]
    modules = [place for place in inside if "nn/modules" in place[0].co_filename and place[0].co_name == "forward"]
    for code, line in reversed(users or modules):
        return f"{code.co_filename}:{line} in {code.co_name}"
    return "an unknown line"


def _line(frame: FrameType | None) -> str:
    """`file.py:line` of the innermost frame that is the user's; empty if torch's own modules run by themselves."""
    while frame is not None:
        file = frame.f_code.co_filename
        if not file.startswith((TORCH, "<")):
            if not file.startswith(MEMGRAPH):
                return f"{file[file.rfind('/') + 1 :]}:{frame.f_lineno}"
            if file != __file__:
                return ""  # the call of the module itself
        frame = frame.f_back
    return ""


def _graph_of(roots: Iterable[torch.autograd.graph.Node | None]) -> Iterator[torch.autograd.graph.Node]:
    """All autograd nodes that the roots lead to."""
    waiting = [root for root in roots if root is not None]
    seen = set(waiting)
    while waiting:
        node = waiting.pop()
        yield node
        found = {following for following, _ in node.next_functions if following is not None} - seen
        seen |= found
        waiting.extend(found)
