"""One stretch of a graph -> one function that Inductor has compiled.

    compiled(part)(x, r)  ->  (y, n)

Stretches that are alike, wherever they stand, are compiled once in a process, and Inductor's own cache on disk keeps
them for the next one.  Before the first of a process a word is logged, since it may take minutes.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils._pytree import tree_map

from ..errors import LoweringError
from ..system.user_warning import warn_user

CompiledFunction = Callable[..., Any]


class Segment:
    """A compiled stretch, to be called from a graph as an op is."""

    __module__ = __name__
    __name__ = __qualname__ = "segment"

    def __init__(self, digest: str, run: CompiledFunction) -> None:
        self.digest, self.run = digest, run

    def __call__(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        return tuple(self.run(*tensors))

    def __str__(self) -> str:
        return f"segment {self.digest}"


_known: dict[str, Segment] = {}
_refused: set[str] = set()  # what Inductor could not compile, and nobody insisted on
_log = logging.getLogger(__name__)


def compile_segments(parts: Mapping[str, fx.Graph], required: bool) -> dict[str, Segment]:
    """What runs each part, by its name.  What can't be compiled is left out if `required` is false; the first time in a
    process there is a warning then.

    Raises:
        LoweringError: Inductor can't compile one of them, and all must be.
    """
    digests = {name: _digest(part) for name, part in parts.items()}
    _announce(len(set(digests.values()) - _known.keys()))
    found = {}
    for name, part in parts.items():
        if required or digests[name] not in _refused:
            try:
                found[name] = compile_segment(part)
            except LoweringError as error:
                if required:
                    raise
                _leave(digests[name], error)
    return found


def compile_segment(part: fx.Graph) -> Segment:
    """What runs `part`, a graph of fake values whose placeholders are all that it reads.

    Raises:
        LoweringError: Inductor can't compile it.
    """
    key = _digest(part)
    if key not in _known:
        _known[key] = Segment(key, _compile(part))
    return _known[key]


def _compile(part: fx.Graph) -> CompiledFunction:
    from torch._inductor import standalone_compile  # takes its time to be imported, which others need not wait for

    given = [node.meta["val"] for node in part.find_nodes(op="placeholder")]
    try:
        with torch.no_grad():
            return standalone_compile(fx.GraphModule({}, part), given, dynamic_shapes="from_example_inputs")
    except Exception as error:
        count = sum(node.op == "call_function" for node in part.nodes)
        where = next((node.meta.get("where") for node in part.nodes if node.meta.get("where")), "the model")
        raise LoweringError(
            f"Inductor can't compile {count} ops at {where}: {type(error).__name__}: {error}\n"
            "it wants a C++ compiler for a CPU and Triton for a GPU; give lower=None to do without it"
        ) from error


def _announce(count: int) -> None:
    """Say, once, what will be waited for."""
    if count and not _known:
        _log.warning(
            "memgraph has Inductor compile up to %d kernels for this step, which may take minutes the first time; "
            "lower=None does without",
            count,
        )


def _leave(digest: str, error: LoweringError) -> None:
    if not _refused:
        warn_user(f"what can't be compiled runs op by op: {error}")
    _refused.add(digest)


def _digest(part: fx.Graph) -> str:
    """Two parts with the same digest do the same to values of the same layout."""
    place: dict[fx.Node, str] = {}
    lines = [f"{torch.__version__} {torch.get_num_threads()}"]
    for node in part.nodes:
        args = tree_map(lambda leaf: place.get(leaf, leaf), (node.args, dict(node.kwargs)), is_leaf=_is_node)
        place[node] = f"%{len(place)}"
        value = node.meta.get("val") if node.op == "placeholder" else None
        target = node.target if node.op == "call_function" else ""
        lines.append(f"{node.op} {target} {args!r} {tree_map(_described, value)!r}")
    return hashlib.blake2b("\n".join(lines).encode(), digest_size=16).hexdigest()


def _is_node(leaf: object) -> bool:
    return isinstance(leaf, fx.Node)


def _described(value: object) -> object:
    if not isinstance(value, Tensor):
        return value
    return str(value.dtype), tuple(value.shape), value.stride(), int(value.storage_offset()), str(value.device)
