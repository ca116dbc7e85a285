"""Record phase, micro-batch and source line of each node while a graph is traced.

    transformer.h.0.mlp modeling_gpt2.py:312

This is the innermost running submodule and the innermost line outside torch. An op of backward takes those of its op of
forward: autograd gives both the same sequence number.
"""

from __future__ import annotations

import os
import sys
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from types import FrameType
from typing import Any

import torch
import torch._dynamo
from torch import Tensor, fx, nn
from torch.autograd.graph import Node
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils._pytree import tree_leaves

from ..system.frames import is_users_code

# `custom` is a field of a node's meta that a second trace copies.
PROVENANCE = "custom"
PATH = "memgraph_path"  # attribute of an exception
# These call the module; what runs in them is memgraph's own.
CALLERS = os.path.join("capture", "call", "call.py"), os.path.join("capture", "joint", "traced_step.py")
_part: ContextVar[int] = ContextVar("part", default=0)
_counted: ContextVar[Callable[[], object]] = ContextVar("counted", default=int)


@contextmanager
def running_microbatch(number: int) -> Iterator[None]:
    """Assign ops of forward in this block to one micro-batch."""
    token = _part.set(number)
    try:
        yield
    finally:
        _part.reset(token)


@contextmanager
def counting_nodes(counted: Callable[[], object]) -> Iterator[None]:
    """Call `counted` for each node that is traced in this block."""
    token = _counted.set(counted)
    try:
        yield
    finally:
        _counted.reset(token)


def is_backward(node: fx.Node) -> bool:
    """Return True for an op of backward in a graph that capture has not finished."""
    return node.op == "call_function" and node.meta[PROVENANCE]["phase"] == "backward"


class ProvenanceTracer:
    """Writes `phase`, `part` and `where` into `node.meta[PROVENANCE]` of every traced node."""

    def __init__(self, module: nn.Module) -> None:
        self.paths = {id(child): path for path, child in module.named_modules()}
        self.has_compiled = any(isinstance(child, torch._dynamo.OptimizedModule) for child in module.modules())
        self.running: list[str] = [""]
        self.thread = threading.get_ident()  # hooks run for all modules of the process
        self.phase = "forward"
        self.places: dict[int, tuple[str, int]] = {}  # and micro-batch, by autograd's sequence number
        self.place, self.part = "", 0  # of the running autograd node

    @contextmanager
    def tracking(self) -> Iterator[None]:
        """Track which submodule is running."""
        with ExitStack() as stack:
            stack.callback(register_module_forward_pre_hook(self._enter).remove)
            stack.callback(register_module_forward_hook(self._leave).remove)
            if self.has_compiled:  # it warns about these hooks
                stack.enter_context(warnings.catch_warnings())
                warnings.filterwarnings("ignore", "Using `torch.compile", UserWarning)
            yield

    def attach(self, tracer: Any) -> None:
        """Record the nodes that this tracer creates from now on."""
        create_node, counted = tracer.create_node, _counted.get()

        def create_and_record(*args: Any, **kwargs: Any) -> fx.Node:
            node = create_node(*args, **kwargs)
            self._record(node)
            counted()
            return node

        tracer.create_node = create_and_record

    def begin_backward(self, nodes: Iterable[Node]) -> None:
        """Record what follows as the backward of these autograd nodes."""
        self.phase = "backward"
        for node in nodes:
            number = node._sequence_nr()
            node.register_prehook(lambda _, number=number: self._set_place(number))

    @contextmanager
    def naming_errors(self) -> Iterator[None]:
        """Give an exception of backward the path of the submodule whose op was differentiated."""
        try:
            yield
        except Exception as error:
            error.__dict__[PATH] = self.place.partition(" ")[0]
            raise

    def _place(self) -> str:
        return f"{self.running[-1]} {user_line(sys._getframe())}".strip() if self.phase == "forward" else ""

    def _enter(self, module: nn.Module, args: Any) -> None:
        if threading.get_ident() == self.thread:
            self.running.append(self.paths.get(id(module), self.running[-1]))

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        if threading.get_ident() != self.thread:
            return
        for result in tree_leaves(output):  # a Function of the user's may have recorded no op of its own
            if isinstance(result, Tensor) and result.grad_fn is not None:
                self.places.setdefault(result.grad_fn._sequence_nr(), (self._place(), _part.get()))
        self.running.pop()

    def _set_place(self, number: int) -> None:
        self.place, self.part = self.places.get(number, (self.place, self.part))

    def _record(self, node: fx.Node) -> None:
        if self.phase == "forward":
            self.place, self.part = self._place(), _part.get()
            self.places.setdefault(node.meta.get("seq_nr", -1), (self.place, self.part))
        notes = {"phase": self.phase, "where": self.place, "part": self.part}
        node.meta[PROVENANCE] = {**node.meta.get(PROVENANCE, {}), **notes}


def user_line(frame: FrameType | None) -> str:
    """Return `file.py:line` of the innermost frame of user code; empty if there is none."""
    while frame is not None:
        file = frame.f_code.co_filename
        if file.endswith(CALLERS):
            return ""
        if is_users_code(frame.f_code):
            return f"{file.rpartition(os.sep)[2]}:{frame.f_lineno}"
        frame = frame.f_back
    return ""
