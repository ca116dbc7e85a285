"""Notes on each node of a graph while it is traced: its phase, its micro-batch, and its place in the user's code.

    transformer.h.0.mlp modeling_gpt2.py:312

That is the innermost submodule that was running and the innermost line outside torch.  An op of backward has the place
of the op of forward that it belongs to: autograd gives both the same sequence number.
"""

from __future__ import annotations

import os
import sys
import threading
import warnings
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from pathlib import Path
from traceback import walk_tb
from types import CodeType, FrameType, TracebackType
from typing import Any

import torch
import torch._dynamo
from torch import fx, nn
from torch.autograd.graph import Node
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

# `custom` is a field of a node's meta that a second trace copies.
NOTES = "custom"
TORCH = str(Path(torch.__file__).parent) + os.sep
MEMGRAPH = str(Path(__file__).parent) + os.sep
_part: ContextVar[int] = ContextVar("part", default=0)


@contextmanager
def part_running(number: int) -> Iterator[None]:
    """What forward does meanwhile it does for one micro-batch."""
    token = _part.set(number)
    try:
        yield
    finally:
        _part.reset(token)


class Notes:
    """Writes `phase`, `part` and `where` into `node.meta[NOTES]` of every node that the tracer makes."""

    def __init__(self, module: nn.Module) -> None:
        self.paths = {id(child): path for path, child in module.named_modules()}
        self.has_compiled = any(isinstance(child, torch._dynamo.OptimizedModule) for child in module.modules())
        self.running: list[str] = [""]
        self.thread = threading.get_ident()  # the hooks hear of all modules of the process
        self.phase = "forward"
        self.places: dict[int, tuple[str, int]] = {}  # and micro-batches, by autograd's sequence number
        self.place, self.part = "", 0  # of the autograd node that runs

    @contextmanager
    def following(self) -> Iterator[None]:
        """Know which submodule is running."""
        with ExitStack() as stack:
            stack.callback(register_module_forward_pre_hook(self._enter).remove)
            stack.callback(register_module_forward_hook(self._leave).remove)
            if self.has_compiled:  # it warns of these very hooks
                stack.enter_context(warnings.catch_warnings())
                warnings.filterwarnings("ignore", "Using `torch.compile", UserWarning)
            yield

    def attach(self, tracer: Any) -> None:
        """Take notes on what this tracer makes from now on."""
        create_node = tracer.create_node

        def noting(*args: Any, **kwargs: Any) -> fx.Node:
            node = create_node(*args, **kwargs)
            self._note(node)
            return node

        tracer.create_node = noting

    def turn(self, nodes: Iterable[Node]) -> None:
        """What follows is the backward of these autograd nodes."""
        self.phase = "backward"
        for node in nodes:
            number = node._sequence_nr()
            node.register_prehook(lambda _, number=number: self._go_to(number))

    def _enter(self, module: nn.Module, args: Any) -> None:
        if threading.get_ident() == self.thread:
            self.running.append(self.paths.get(id(module), self.running[-1]))

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        if threading.get_ident() == self.thread:
            self.running.pop()

    def _go_to(self, number: int) -> None:
        self.place, self.part = self.places.get(number, (self.place, self.part))

    def _note(self, node: fx.Node) -> None:
        if self.phase == "forward":
            self.place, self.part = f"{self.running[-1]} {_line(sys._getframe())}".strip(), _part.get()
            self.places.setdefault(node.meta.get("seq_nr", -1), (self.place, self.part))
        notes = {"phase": self.phase, "where": self.place, "part": self.part}
        node.meta[NOTES] = {**node.meta.get(NOTES, {}), **notes}


def source_line(traceback: TracebackType | None) -> str:
    """Where in the user's code an exception arose, or else in torch's own modules, as `path:line in function`."""
    places = [(frame.f_code, line) for frame, line in walk_tb(traceback)]
    users = [place for place in places if _is_users(place[0])]
    modules = [place for place in places if place[0].co_name == "forward"]
    for code, line in reversed(users or modules):
        return f"{code.co_filename}:{line} in {code.co_name}"
    return "an unknown line"


def module_running(traceback: TracebackType | None, whole: nn.Module) -> tuple[str, nn.Module] | None:
    """The innermost submodule in whose forward an exception arose, with its path; None if it was in none of them."""
    paths = {id(part): path for path, part in whole.named_modules()}
    owners = [frame.f_locals.get("self") for frame, _ in walk_tb(traceback) if frame.f_code.co_name == "forward"]
    for owner in reversed(owners):
        if isinstance(owner, nn.Module) and id(owner) in paths:
            return paths[id(owner)] or "the model", owner
    return None


def is_torchs(traceback: TracebackType | None) -> bool:
    """Whether an exception was raised by torch's own code."""
    frames = [frame for frame, _ in walk_tb(traceback)]
    return bool(frames) and frames[-1].f_code.co_filename.startswith(TORCH)


def is_users(traceback: TracebackType | None) -> bool:
    """Whether code of the user's had any part in an exception."""
    return any(_is_users(frame.f_code) for frame, _ in walk_tb(traceback))


def _is_users(code: CodeType) -> bool:
    return not code.co_filename.startswith((TORCH, MEMGRAPH, "<"))


def _line(frame: FrameType | None) -> str:
    """`file.py:line` of the innermost frame that is the user's; empty if torch's own modules run by themselves."""
    while frame is not None:
        file = frame.f_code.co_filename
        if file.startswith(MEMGRAPH) and file != __file__:
            return ""  # the call of the module itself
        if not file.startswith((TORCH, MEMGRAPH, "<")):
            return f"{file.rpartition(os.sep)[2]}:{frame.f_lineno}"
        frame = frame.f_back
    return ""
