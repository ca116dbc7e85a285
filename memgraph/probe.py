"""What each op takes, by running it: microseconds, and the workspace that no graph shows.

    convolution_backward f32[16, 64, 32, 32] ...  ->  Cost(us=5210.0, workspace=2097152)

Each distinct op (target, shapes, strides, dtypes, constants, device) runs once for its workspace, and if it is short a
few times more for its time, on made-up values, and is remembered as long as the process lives.  One op at a time, so
never more memory than the step needs.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils._pytree import tree_leaves, tree_map

from .peak import measured, resident_bytes
from .summarize import Cost, Price, tensors

ENOUGH_US = 2000.0  # an op is run again until this much time has gone into it,
REPEATS = 5  # but not more often
MEMORY_RATE = 5000.0  # bytes per microsecond: the price of an op that could not be run
_known: dict[str, Cost] = {}


def prober(limit: int) -> Price:
    """Prices nodes by running them; an op whose own tensors exceed `limit` bytes is not run, but priced by its
    bytes."""

    def price(node: fx.Node) -> Cost:
        if _is_view(node):
            return Cost()
        key = _key(node)
        if key not in _known:
            _known[key] = _probe(node) if _touched(node) <= limit else _guess(node)
        return _known[key]

    return price


def _is_view(node: fx.Node) -> bool:
    """Whether the node computes nothing: a view, a part of a tuple, a memory op."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return True
    read = {t.untyped_storage()._cdata for source in node.all_input_nodes for t in tensors(source)}
    return node.target.namespace == "memgraph" or all(t.untyped_storage()._cdata in read for t in tensors(node))


def _key(node: fx.Node) -> str:
    """Two nodes with the same key run the same kernels on the same sizes."""

    def describe(leaf: object) -> object:
        if isinstance(leaf, fx.Node):
            return tree_map(_describe_tensor, leaf.meta.get("val"))
        return leaf

    args, kwargs = tree_map(describe, (node.args, dict(node.kwargs)), is_leaf=lambda leaf: isinstance(leaf, fx.Node))
    return f"{node.target}{args!r}{kwargs!r}{torch.get_num_threads()}"


def _describe_tensor(value: object) -> object:
    if not isinstance(value, Tensor):
        return value
    return (str(value.dtype), tuple(value.shape), value.stride(), str(value.device))


def _touched(node: fx.Node) -> int:
    values = [value for source in (*node.all_input_nodes, node) for value in tensors(source)]
    return sum({v.untyped_storage()._cdata: v.untyped_storage().nbytes() for v in values}.values())


def _guess(node: fx.Node) -> Cost:
    return Cost(_touched(node) / MEMORY_RATE, 0)


def _probe(node: fx.Node) -> Cost:
    """Run the op of `node` on made-up values."""
    device = next((value.device for value in tensors(node)), torch.device("cpu"))
    with torch.no_grad(), torch.random.fork_rng():
        try:
            args, kwargs = _made_up(node)
            run: Callable[[], object] = partial(node.target, *args, **kwargs)  # type: ignore[operator, misc, arg-type]
            (result, us), allocated = measured(lambda: _timed(run, device), device)
        except (RuntimeError, IndexError, ValueError, NotImplementedError):
            return _guess(node)  # values matter to this op, and made-up ones do not do
        made = resident_bytes(leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor))
        del result
        return Cost(_shortest(run, device, us), max(0, allocated.peak - made) if allocated else 0)


def _made_up(node: fx.Node) -> Any:
    """The op's arguments, with tensors for what it reads."""

    def make(read: fx.Node) -> Any:
        return tree_map(lambda value: _fill(value) if isinstance(value, Tensor) else value, read.meta["val"])

    return fx.node.map_arg((node.args, dict(node.kwargs)), make)


def _fill(fake: Tensor) -> Tensor:
    """A real tensor like `fake`, of numbers that are valid as indices where they may be indices."""
    value = torch.empty_strided(fake.shape, fake.stride(), dtype=fake.dtype, device=fake.device)
    return value.fill_(0.5 if fake.is_floating_point() else 0)


def _shortest(run: Callable[[], object], device: torch.device, us: float) -> float:
    """The least time of some more runs, where one took so little that chance decided."""
    spent, runs = us, 1
    while runs < REPEATS and spent < ENOUGH_US:
        _, again = _timed(run, device)
        us, spent, runs = min(us, again), spent + again, runs + 1
    return round(us, 1)


def _timed(run: Callable[[], object], device: torch.device) -> tuple[object, float]:
    """A result, and the microseconds that it took."""
    synchronize = torch.get_device_module(device).synchronize if device.type != "cpu" else lambda: None
    synchronize()
    begin = time.perf_counter()
    result = run()
    synchronize()
    return result, (time.perf_counter() - begin) * 1e6
