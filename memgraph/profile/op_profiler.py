"""What each op takes, by running it: microseconds, the workspace that no graph shows, and the layout of what it makes.

    convolution_backward f32[16, 64, 32, 32] ...  ->  Cost(us=5210.0, workspace=2097152), made f32[16, 64, 32, 32] ...

Each distinct op (target, shapes, strides, dtypes, constants, device) runs on made-up values: once for its workspace,
and then for its time: as often as that takes, or once where the time decides nothing, or none is left.  What was found
is remembered, by the process and on disk.  One op at a time, so never more memory than the step itself needs; an op
that would not fit does not run, and is priced by its flops and bytes.  An op whose own tensors are more than the budget
leaves beside the model runs all the same, because its workspace has to be known, and the log says so: what was found
elsewhere and kept (MEMGRAPH_CACHE) needs no run.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.fx.node import map_arg
from torch.utils._pytree import tree_leaves, tree_map

from passes import Trace

from ..graph.aten_shims import COPY_STORAGES
from ..graph.inductor import Segment
from ..graph.nodes import allocates_nothing, tensors, written_inputs
from ..graph.result_layout import ResultLayout, layout_in_storage
from ..graph.summarize import Cost, summarize
from ..guards.signature import kernel_modes
from ..report.tables import mb
from ..system.device import keeping_freed_memory, release_cached, returns_freed_memory
from ..system.measurement_cache import read_cached, write_cached
from ..system.profiler_thread import run_unprofiled
from ..system.setting import environment_key
from ..system.timer import flush_caches, shortest_us, timed_us
from ..system.user_warning import warn_user
from .memory_meter import measure_peak, resident_bytes
from .roofline import roofline

LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class OpCost:
    """What an op took, and how its results lie in memory; None if it could not be run."""

    cost: Cost
    made: tuple[ResultLayout, ...] | None
    is_timed: bool = True  # by more than one run


KNOWN = 8192  # ops that a process remembers, about 1 kB each; that which was asked for longest ago goes first
_known: dict[str, OpCost] = {}

# Arguments that say how much there is of something: a kernel that finds nothing to do takes no workspace.
COUNTS = ("bag_size",)


class OpProfiler:
    """Runs ops whose own tensors do not exceed `limit` bytes; others are priced by their flops and bytes.

    `room` are the bytes that the budget leaves for them, if there is one: the first op that takes more is logged.  From
    `until` on, as `time.monotonic` has it, and without `times`, an op is timed by one run alone: its bytes have to be
    known in any case.  `counted` is called for each op that is priced.
    """

    def __init__(
        self, limit: int, room: int | None = None, until: float = math.inf, *, times: bool = True,
        counted: Callable[[], object] = int,
    ) -> None:  # fmt: skip
        self.limit, self.until, self.times, self.counted = limit, until, times, counted
        self.room = room
        self._told = False
        self._cold: dict[torch.device, Callable[[], object]] = {}

    def __call__(self, node: fx.Node) -> Cost:
        """The price of an op."""
        return Cost() if is_view(node) else self._probed(node).cost

    def made(self, node: fx.Node) -> tuple[ResultLayout, ...] | None:
        """How an op's results lie in memory, where that is known."""
        return None if is_view(node) else self._probed(node).made

    def timed(self, trace: Trace, graph: fx.Graph) -> Trace:
        """The trace with well measured times for those ops that have a time of one run."""
        before = {op.name: op.us for op in summarize(graph, self).ops}
        self.times = True
        after = {op.name: op.us for op in summarize(graph, self).ops}
        ops = (replace(op, us=after[op.name]) if op.us == before.get(op.name) else op for op in trace.ops)
        return replace(trace, ops=tuple(ops))

    def _probed(self, node: fx.Node) -> OpCost:
        self.counted()
        key, times = _key(node), self.times and time.monotonic() < self.until
        if key in _known and (_known[key].is_timed or not times):
            return _remembered(key, _known[key])
        lasting = f"ran {key} {environment_key(_device(node))}"
        # A segment is tuned in its first run of a process, which shall not be one in a step: so each has one here.
        lasts = not isinstance(node.target, Segment) and " at 0x" not in lasting  # whose address means something here
        found = _read(read_cached(lasting)) if lasts else None
        if (found is None or (times and not found.is_timed)) and _touched(node) <= self.limit:
            self._tell(node)
            ran = run_unprofiled(partial(_probed_with_room, node, self._cool(_device(node)) if times else None))
            if ran is not None and lasts:
                write_cached(lasting, _written(ran))
            found = ran or found
        if found is None:
            return OpCost(Cost(roofline(node, _touched(node), self.limit), _spare(node)), None)
        return _remembered(key, found)

    def _tell(self, node: fx.Node) -> None:
        """Log that pricing goes beyond the budget, once."""
        if self._told or self.room is None or _touched(node) <= self.room:
            return
        self._told = True
        LOG.warning(
            "planning goes beyond the budget: %s, which is run to be priced, has %s of tensors, and the budget leaves "
            "%s beside what lies there; to keep within it, call memgraph.plan with the same model and budget in a "
            "process that may take more, with the same MEMGRAPH_CACHE, and prices are read from there",
            node.target,
            mb(_touched(node)),
            mb(max(self.room, 0)),
        )

    def _cool(self, device: torch.device) -> Callable[[], object]:
        if device not in self._cold:
            self._cold[device] = flush_caches(device)
        return self._cold[device]


def room_nbytes(graph: fx.Graph, module: nn.Module, budget: int) -> int:
    """The bytes that a budget leaves beside the module and what else the step is given."""
    given = [node for node in graph.find_nodes(op="placeholder") if node.meta["kind"] not in ("parameter", "buffer")]
    rest = resident_bytes(value for node in given for value in tensors(node))
    return budget - rest - resident_bytes([*module.parameters(), *module.buffers()])


def _remembered(key: str, found: OpCost) -> OpCost:
    """What was found, as the latest of what is known."""
    _known.pop(key, None)
    _known[key] = found
    while len(_known) > KNOWN:
        del _known[next(iter(_known))]
    return found


def is_view(node: fx.Node) -> bool:
    """Whether the node computes nothing: a view, a part of a tuple, a memory op."""
    if isinstance(node.target, Segment):
        return False
    if not isinstance(node.target, torch._ops.OpOverload) or node.target.namespace == "memgraph":
        return True
    return allocates_nothing(node) and not written_inputs(node)


def _key(node: fx.Node) -> str:
    """Two nodes with the same key run the same kernels on the same sizes."""

    describe_tensor = _describe_storage if node.target in COPY_STORAGES else _describe_tensor

    def describe(leaf: object) -> object:
        if isinstance(leaf, fx.Node):
            return tree_map(describe_tensor, leaf.meta.get("val", "a generator"))
        return leaf

    args, kwargs = tree_map(describe, (node.args, dict(node.kwargs)), is_leaf=lambda leaf: isinstance(leaf, fx.Node))
    modes = f"{kernel_modes()}{torch.get_default_dtype()}{returns_freed_memory()}"
    return f"{node.target}{args!r}{kwargs!r}{modes}"


def _describe_tensor(value: object) -> object:
    if not isinstance(value, Tensor):
        return value
    form = (str(value.dtype), tuple(value.shape), value.stride(), str(value.device))
    return (*form, value.is_conj(), value.is_neg()) if value.is_conj() or value.is_neg() else form


def _describe_storage(value: object) -> object:
    if not isinstance(value, Tensor):
        return value
    return (_describe_tensor(value), value.storage_offset(), value.untyped_storage().nbytes())


def _touched(node: fx.Node) -> int:
    return resident_bytes(value for source in (*node.all_input_nodes, node) for value in tensors(source))


def _device(node: fx.Node) -> torch.device:
    return next((value.device for value in tensors(node)), torch.device("cpu"))


def _written(found: OpCost) -> dict[str, Any]:
    made = [(str(one.layout[0]).removeprefix("torch."), *one.layout[1:], *one[1:]) for one in found.made or ()]
    once = {} if found.is_timed else {"once": True}
    return {"us": found.cost.us, "workspace": found.cost.workspace, "made": made, **once}


def _read(written: Any) -> OpCost | None:
    """What was kept of an op, in this process's types."""
    if written is None:
        return None
    made = (
        ResultLayout((getattr(torch, dtype), tuple(shape), tuple(strides)), offset, nbytes)
        for dtype, shape, strides, offset, nbytes in written["made"]
    )
    return OpCost(Cost(written["us"], written["workspace"]), tuple(made), is_timed="once" not in written)


def _probed_with_room(node: fx.Node, before: Callable[[], object] | None) -> OpCost | None:
    """What running the op shows; once more if memory was short, without what the ops before it have left behind."""
    for _ in range(2):
        try:
            return _probe(node, before)
        except torch.OutOfMemoryError:
            release_cached(_device(node))
    warn_user(f"no memory is left to run {node.target} by itself, so that its workspace is guessed")
    return None


def _spare(node: fx.Node) -> int:
    """The workspace of an op that could not be run, guessed: on a GPU a copy of its largest tensor, as kernels make one
    that want another layout.  Not yet run on a GPU."""
    if _device(node).type != "cuda":
        return 0
    near = [value for source in (*node.all_input_nodes, node) for value in tensors(source)]
    return max(value.untyped_storage().nbytes() for value in near)


def _probe(node: fx.Node, before: Callable[[], object] | None) -> OpCost | None:
    """What the op of `node` takes on the made-up values that need most; None if it runs on none.

    Zeros are indices wherever there is something, but no pivots; of a mask, what is set may be looked up first.

    Raises:
        OutOfMemoryError: the device has not the memory.
    """
    zeros = _run_on(node, before, 0, False)
    masked = any(value.dtype == torch.bool for source in node.all_input_nodes for value in tensors(source))
    if zeros is not None and not masked:
        return zeros
    ones = _run_on(node, before, 0 if zeros is not None else 1, True)
    found = [one for one in (zeros, ones) if one is not None]
    return max(found, key=lambda one: (one.cost.workspace, one.cost.us), default=None)


def _run_on(node: fx.Node, before: Callable[[], object] | None, number: int, truth: bool) -> OpCost | None:
    """Run the op of `node`, as a step would, on integers and truth values of one kind; None if that was to no avail.
    Each run that is timed comes after `before`; without it one is."""
    device = _device(node)
    drawing = torch.random.fork_rng([device] if device.type == "cuda" else [])  # of all GPUs there would be a warning
    with torch.no_grad(), drawing, torch._C._DisableAutocast(), torch._C._AutoDispatchBelowAutograd():
        try:
            args, kwargs = _made_up(node, device, number, truth)
            run: Callable[[], object] = partial(node.target, *args, **kwargs)  # type: ignore[operator, misc, arg-type]
            if isinstance(node.target, Segment):
                run()  # with what tuning takes, which later ones do without
            result, allocated = measure_peak(run, device)
        except torch.OutOfMemoryError:
            raise
        except (RuntimeError, IndexError, ValueError, NotImplementedError):
            return None  # values matter to this op, and made-up ones do not do
        if allocated is None:  # a profiler has been started meanwhile
            return run_unprofiled(partial(_run_on, node, before, number, truth))
        results = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)] if not written_inputs(node) else []
        made, nbytes = tuple(map(layout_in_storage, results)), resident_bytes(results)
        del result, results
        with keeping_freed_memory():
            us = shortest_us(run, device, before) if before else round(timed_us(run, device)[1], 1)
        return OpCost(Cost(us, max(0, allocated.peak - nbytes)), made, is_timed=before is not None)


def _made_up(node: fx.Node, device: torch.device, number: int, truth: bool) -> Any:
    """The op's arguments, with tensors for what it reads."""
    fill = _fill_storage if node.target in COPY_STORAGES else _fill
    counts = _counts(node)

    def make(read: fx.Node) -> Any:
        if "val" not in read.meta:  # a generator of the module's own, which shall not be drawn from
            return torch.Generator(device)
        integer = 1 if read in counts else number
        make_one = partial(_made_up_one, fill=fill, number=integer, truth=truth)
        return tree_map(lambda value: make_one(value) if isinstance(value, Tensor) else value, read.meta["val"])

    return map_arg((node.args, dict(node.kwargs)), make)


def _counts(node: fx.Node) -> set[object]:
    """What the op reads as counts."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return set()
    given = zip(node.target._schema.arguments, node.args, strict=False)
    return {read for argument, read in given if argument.name in COUNTS and isinstance(read, fx.Node)}


def _made_up_one(fake: Tensor, fill: Callable[[Tensor, float], Tensor], number: int, truth: bool) -> Tensor:
    """A real tensor like `fake`, of numbers that are valid as indices where they may be indices."""
    integer = float(truth if fake.dtype == torch.bool else number)
    return fill(fake, 0.5 if fake.is_floating_point() else integer)


def _fill(fake: Tensor, number: float) -> Tensor:
    """A real tensor like `fake`, full of one number."""
    value = torch.empty_strided(fake.shape, fake.stride(), dtype=fake.dtype, device=fake.device)
    return _lazy(value.fill_(number), fake)


def _lazy(value: Tensor, fake: Tensor) -> Tensor:
    """The value, as yet to be conjugated or negated where `fake` is: most ops make a copy first, for which they do."""
    value = value.conj() if fake.is_conj() else value
    return torch._neg_view(value) if fake.is_neg() else value


def _fill_storage(fake: Tensor, number: float) -> Tensor:
    """The same in a storage as large as that of `fake`, and at its place there."""
    value = torch.zeros(fake.untyped_storage().nbytes(), dtype=torch.uint8, device=fake.device)
    numbers = torch.empty(0, dtype=fake.dtype, device=fake.device)
    numbers.set_(value.untyped_storage(), fake.storage_offset(), fake.shape, fake.stride())
    return _lazy(numbers.fill_(number), fake)
