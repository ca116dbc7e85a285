"""Compile segments of a graph with Inductor.

    compile_segment(part)(x, r)           ->  (y, n)
    compile_segment(part).boxed([x, r])   ->  (y, n), and x and r are freed at their last read

Equal segments are compiled once in a process, and Inductor's cache on disk keeps them for the next one. The first
compilation of a process is logged, since it may take minutes.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, fx
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._pytree import tree_map

from ..errors import LoweringError
from ..system.user_warning import warn_user

CompiledFunction = Callable[..., Any]


class Segment:
    """A compiled segment, called from a graph like an op."""

    __module__ = __name__
    __name__ = __qualname__ = "segment"

    def __init__(self, digest: str, run: CompiledFunction, part: fx.Graph | None = None) -> None:
        """`run` takes a list and empties it; `part` are the ops."""
        self.digest, self.run, self.part = digest, run, part

    def __call__(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        return self.boxed([*tensors])

    def boxed(self, tensors: list[Tensor]) -> tuple[Tensor, ...]:
        """Run on a list of tensors; each is released at its last read."""
        return tuple(self.run(tensors))

    def __str__(self) -> str:
        return f"segment {self.digest}"

    @property
    def description(self) -> str:
        """Describe it by its ops."""
        ops = [str(node.target) for node in self.part.nodes if node.op == "call_function"] if self.part else []
        return f"a segment of {len(ops)} ops from {ops[0]} to {ops[-1]}" if ops else str(self)


_segments: dict[str, Segment] = {}
_refused: set[str] = set()  # digests that Inductor could not compile
_log = logging.getLogger(__name__)


def compile_segments(parts: Mapping[str, fx.Graph], required: bool) -> dict[str, Segment]:
    """Return the compiled segments by name. If not `required`, leave out what can't be compiled, and warn once.

    Raises:
        LoweringError: a required segment can't be compiled.
    """
    digests = {name: digest_of(part) for name, part in parts.items()}
    _announce(len(set(digests.values()) - _segments.keys()))
    segments = {}
    for name, part in parts.items():
        if required or digests[name] not in _refused:
            try:
                segments[name] = compile_segment(part)
            except LoweringError as error:
                if required:
                    raise
                _refuse(digests[name], error)
    return segments


def compile_segment(part: fx.Graph) -> Segment:
    """Compile a graph of fake values, whose placeholders are all that it reads.

    Raises:
        LoweringError: Inductor can't compile it.
    """
    key = digest_of(part)
    if key not in _segments:
        _segments[key] = Segment(key, _compile(part), part)
    return _segments[key]


def expand_segments(graph: fx.Graph) -> None:
    """Replace each segment of a graph by its ops."""
    for node in graph.nodes:
        if isinstance(node.target, Segment) and node.target.part is not None:
            env = dict(zip(node.target.part.find_nodes(op="placeholder"), node.args, strict=True))
            with graph.inserting_before(node):
                results = graph.graph_copy(node.target.part, env)
            for item in [*node.users]:
                place: Any = item.args[1]
                item.replace_all_uses_with(results[place])  # type: ignore[index]
                graph.erase_node(item)
            graph.erase_node(node)


def _compile(part: fx.Graph) -> CompiledFunction:
    """Compile a part of a graph to a function that takes its inputs in a list and empties that."""
    from torch._inductor.compile_fx import compile_fx_inner  # slow to import
    from torch._inductor.decomposition import select_decomp_table

    try:
        with torch.no_grad(), FakeTensorMode():
            given = [_fake(node.meta["val"]) for node in part.find_nodes(op="placeholder")]
            run = fx.Interpreter(fx.GraphModule({}, part)).run
            lowered = make_fx(run, decomposition_table=select_decomp_table())(*given)
        results: Any = lowered.graph.output_node().args[0]
        lowered.graph.output_node().meta["user_visible_output_idxs"] = [
            *range(len(results))
        ]  # these keep their strides
        with torch.no_grad():
            return compile_fx_inner(lowered, given, is_inference=True)
    except Exception as error:
        count = sum(node.op == "call_function" for node in part.nodes)
        where = next((node.meta.get("where") for node in part.nodes if node.meta.get("where")), "the model")
        raise LoweringError(
            f"Inductor can't compile {count} ops at {where}: {type(error).__name__}: {error}\n"
            "it needs a C++ compiler for a CPU and Triton for a GPU; give lower=None to run without it"
        ) from error


def _fake(value: Tensor) -> Tensor:
    """Return a value of the same layout under the current fake mode."""
    if value.is_conj() or value.is_neg():
        raise ValueError("an input is lazily conjugated or negated")
    flat = torch.empty(value.untyped_storage().nbytes() // value.itemsize, dtype=value.dtype, device=value.device)
    return flat.as_strided(value.shape, value.stride(), value.storage_offset())


def _announce(count: int) -> None:
    if count and not _segments:
        _log.warning(
            "memgraph compiles up to %d kernels with Inductor for this step, and then all ops between two memory ops, "
            "which may take minutes the first time; lower=None avoids it",
            count,
        )


def _refuse(digest: str, error: LoweringError) -> None:
    if not _refused:
        warn_user(f"what can't be compiled runs op by op: {error}")
    _refused.add(digest)


def digest_of(part: fx.Graph) -> str:
    """Return a digest that is equal for parts that do the same to values of the same layout."""
    place: dict[fx.Node, str] = {}
    lines = [f"{torch.__version__} {torch.get_num_threads()}"]
    for node in part.nodes:
        args = tree_map(lambda leaf: place.get(leaf, leaf), (node.args, dict(node.kwargs)), is_leaf=_is_node)
        place[node] = f"%{len(place)}"
        value = node.meta.get("val") if node.op == "placeholder" else None
        target = node.target if node.op == "call_function" else ""
        lines.append(f"{node.op} {target} {args!r} {tree_map(_layout, value)!r}")
    return hashlib.blake2b("\n".join(lines).encode(), digest_size=16).hexdigest()


def _is_node(leaf: object) -> bool:
    return isinstance(leaf, fx.Node)


def _layout(value: object) -> object:
    if not isinstance(value, Tensor):
        return value
    return str(value.dtype), tuple(value.shape), value.stride(), int(value.storage_offset()), str(value.device)
