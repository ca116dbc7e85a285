"""Measure each op of a step by running it: time, workspace, and layout of its results.

    convolution_backward f32[16, 64, 32, 32] ...  ->  Cost(us=5210.0, workspace=2097152), layout f32[16, 64, 32, 32] ...

Each distinct op (target, shapes, strides, dtypes, constants, device) runs on generated values: once for its workspace,
and several times for its time, with cold operands. It is timed by a single run if the time is not needed, or the time
limit is reached, and by the run for its workspace if that is long. Results are cached in the process and on disk
(MEMGRAPH_CACHE); what other work of the machine has disturbed is timed again by the next process. Ops run one by one,
so they need no more memory than the step does. An op that would not fit on the
device does not run, and is priced by its flops and bytes. An op that exceeds the budget runs all the same, because its
workspace has to be known, and the log says so.

Time an op of a GPU whose operands are in memory, and not in the L2 cache.

    run, run, run, ...                ->   7 us for relu bf16[4, 1024, 1600]: 26 MB, which the cache holds
    flush, run, flush, run, ...       ->   the time of reading and writing 26 MB

An op that runs many times on the same tensors finds them in the cache. In a step other ops have run since most of them
were written. So a buffer of twice the cache is written before each run. Events around the run leave that out, and it
takes longer than to launch the run, so that the device does not wait for the host. The buffer exists after the op's
workspace was measured, takes only what the budget has left beside the op, and is freed at once.
"""

from __future__ import annotations

import logging
import math
import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from resource import RUSAGE_SELF, getrusage, struct_rusage
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils._pytree import tree_leaves

from passes import Trace

from ..graph.inductor import Segment
from ..graph.nodes import allocates_nothing, tensors, written_inputs
from ..graph.opaque_ops import is_opaque, opaque_cost
from ..graph.result_layout import ResultLayout, layout_in_storage
from ..graph.summarize import Cost, Price
from ..report.tables import mb
from ..system.device import block_nbytes, release_cached
from ..system.disturbance import Watch
from ..system.measurement_cache import Kept, read_all_cached, read_cached, write_all_cached, write_cached
from ..system.profiler_thread import run_unprofiled
from ..system.timer import ENOUGH_US, REPEATS, flush_caches, shortest_us, timed_us
from ..system.user_warning import warn_user
from .generated_arguments import generated_arguments
from .memory_meter import measure_peak, resident_bytes
from .op_cost import OpCost, cache_key, kernel_modes_text, op_key, read, written
from .roofline import Rates, roofline, roofline_us
from .step_timer import between_us, now

LOG = logging.getLogger(__name__)
# Of a run, its workspace and the microseconds of its first run, or 0 if a step's run can't take as long; returns
# microseconds.
Timer = Callable[[Callable[[], object], int, float], float]


# A first run on a CPU that takes as long is not repeated, as setting up kernels takes milliseconds; a shorter one is
# one of the two that have to agree.  Its threads must work as long: one that waits for other work of the machine is no
# measure.  Nor is one that the kernel works for, since that is new pages, and later runs get those of the first.
LONG_US = 200_000.0
KERNEL_SHARE = 0.05
KNOWN = 8192  # ops that a process caches, about 1 kB each; the least recently used is dropped
_known: dict[str, OpCost] = {}
RUNS = 9
FLUSHED = 2  # bytes that are written, over those of the cache
LARGE = 4  # bytes of an op's tensors, over those of the cache, from which on hardly any are left of the run before


class OpProfiler:
    """Prices ops by running them, or by their flops and bytes.

    Args:
        limit: most bytes of tensors that an op may have to be run.
        room: bytes that the budget leaves for an op; the first op that exceeds it is logged. None for no budget.
        until: value of `time.monotonic` from which on an op is timed by a single run.
        times: False to time each op by a single run.
        counted: called for each op that is priced.
        fixed_modes: True if the settings that select kernels stay while the profiler is used; otherwise each op reads
            them.
    """

    def __init__(
        self, limit: int, room: int | None = None, until: float = math.inf, *, times: bool = True,
        counted: Callable[[], object] = int, fixed_modes: bool = False,
    ) -> None:  # fmt: skip
        self.limit, self.until, self.times, self.counted = limit, until, times, counted
        self.room, self.modes = room, kernel_modes_text() if fixed_modes else ""
        self._most = limit if room is None else min(limit, room)
        self._is_logged = False
        self._used = dict[int, OpCost]()
        self._flushes: dict[torch.device, Callable[[], object]] = {}
        self._on_disk: dict[str, Any] = {}  # what was read at once; None for what is not there
        self._unwritten: dict[str, Any] | None = None

    def __call__(self, node: fx.Node) -> Cost:
        return Cost() if is_view(node) else self._op_cost(node).cost

    def layouts(self, node: fx.Node) -> tuple[ResultLayout, ...] | None:
        """Return the layouts of an op's results; None if they are unknown."""
        return None if is_view(node) else self._op_cost(node).layouts

    @contextmanager
    def together(self, nodes: Iterable[fx.Node]) -> Iterator[None]:
        """Read the costs of these ops from disk at once, and write new ones at once: each access takes a while."""
        ops = [node for node in nodes if node.op == "call_function" and not is_view(node) and not is_opaque(node)]
        keys = {key: _device(node) for node in ops if (key := op_key(node, self.modes)) not in _known}
        self._on_disk = read_all_cached([cache_key(key, device) for key, device in keys.items()])
        self._unwritten = {}
        try:
            yield
        finally:
            write_all_cached(self._unwritten)
            self._on_disk, self._unwritten = {}, None

    def timed(self, trace: Trace, summarized: Callable[[Price], Trace]) -> Trace:
        """Time the ops again that were timed by a single run, and return the trace with these times."""
        before = {op.name: op.us for op in summarized(self).ops}
        self.times = True
        self._used.clear()
        after = {op.name: op.us for op in summarized(self).ops}
        ops = (replace(op, us=after[op.name]) if op.us == before.get(op.name) else op for op in trace.ops)
        return replace(trace, ops=tuple(ops))

    @property
    def doubt(self) -> float:
        """The share of all time here whose prices other work of the machine has disturbed."""
        total = sum(each.cost.us for each in self._used.values())
        return sum(each.cost.us for each in self._used.values() if each.disturbed) / total if total else 0.0

    def _op_cost(self, node: fx.Node) -> OpCost:
        self.counted()
        op_cost = self._found(node)
        self._used[id(op_cost)] = op_cost
        return op_cost

    def _found(self, node: fx.Node) -> OpCost:
        if is_opaque(node):  # it was measured while it was captured, on the tensors of the call
            return OpCost(Cost(*opaque_cost(node)), None)
        key, times = op_key(node, self.modes), self.times and time.monotonic() < self.until
        if key in _known and (_known[key].is_timed or not times):
            return _remember(key, _known[key])
        on_disk = cache_key(key, _device(node))
        # Each process must run a segment here, because the first run tunes it and must not be in a step.
        is_cached = not isinstance(node.target, Segment) and " at 0x" not in on_disk  # addresses are of this process
        kept = Kept.read(self._cached(on_disk), read) if is_cached else None
        op_cost = None if kept is None else kept.value
        if (op_cost is None or (times and not op_cost.is_timed)) and _nbytes(node) <= self.limit:
            self._log_excess(node)
            with Watch() as watch:
                ran = run_unprofiled(partial(_measure_with_retry, node, self._timer(node) if times else None))
            if ran is not None:
                self._log_excess(node, ran.cost.workspace)
                ran = replace(ran, disturbed=watch.disturbed if times else 0.0).beside(op_cost)
            if ran is not None and is_cached:
                self._cache(on_disk, written(ran))
            op_cost = ran or op_cost
        if op_cost is None:
            us = roofline(node, _nbytes(node), self._most)  # which measures the device's rates, if there is room
            return OpCost(Cost(us, _guessed_workspace(node)), None)
        return _remember(key, op_cost)

    def _cached(self, key: str) -> Any:
        return self._on_disk[key] if key in self._on_disk else read_cached(key)

    def _cache(self, key: str, value: Any) -> None:
        if self._unwritten is None:
            write_cached(key, value)
        else:
            self._on_disk[key] = self._unwritten[key] = value

    def _log_excess(self, node: fx.Node, workspace: int = 0) -> None:
        """Log once that pricing exceeds the budget, or has exceeded it if the workspace is known."""
        nbytes = _nbytes(node) + workspace
        if self._is_logged or self.room is None or nbytes <= self.room:
            return
        self._is_logged = True
        LOG.warning(
            "planning goes beyond the budget: %s, which is run to be priced, takes %s, and the budget leaves %s for "
            "it; to stay within it, call memgraph.plan with the same model, budget and MEMGRAPH_CACHE in a process "
            "that may use more memory, and prices are read from that cache",
            node.target.description if isinstance(node.target, Segment) else node.target,
            mb(nbytes),
            mb(max(self.room, 0)),
        )

    def _timer(self, node: fx.Node) -> Timer:
        device = _device(node)
        if device not in self._flushes:
            self._flushes[device] = flush_caches(device)
        shortest = partial(shortest_us, device=device, before=self._flushes[device], most=self._most_runs(node))
        if device.type != "cuda":
            return lambda run, _, first_us: shortest(run, first_us=first_us)
        nbytes = _nbytes(node)
        return lambda run, workspace, _: cold_us(run, shortest(run), device, nbytes, self._most - nbytes - workspace)

    def _most_runs(self, node: fx.Node) -> int:
        """Return the runs for whose results there is room: glibc may place each of them beside the freed ones."""
        results = resident_bytes(tensors(node))
        if self.room is None or not results or _device(node).type != "cpu":
            return REPEATS
        return max(1, min(REPEATS, (self.room - _nbytes(node)) // results))


def _remember(key: str, op_cost: OpCost) -> OpCost:
    """Cache a cost as the most recently used one."""
    _known.pop(key, None)
    _known[key] = op_cost
    while len(_known) > KNOWN:
        del _known[next(iter(_known))]
    return op_cost


def nominal_us(node: fx.Node) -> float:
    """Return the microseconds of an op at guessed rates: the same in each process."""
    return 0.0 if is_view(node) else roofline_us(node, _nbytes(node), Rates())


def is_view(node: fx.Node) -> bool:
    """Return True if the node computes nothing: a view, an item of a tuple, or a memory op."""
    if isinstance(node.target, Segment):
        return False
    if not isinstance(node.target, torch._ops.OpOverload) or node.target.namespace == "memgraph":
        return True
    return allocates_nothing(node) and not written_inputs(node)


def _nbytes(node: fx.Node) -> int:
    return resident_bytes(value for source in (*node.all_input_nodes, node) for value in tensors(source))


def _device(node: fx.Node) -> torch.device:
    return next((value.device for value in tensors(node)), torch.device("cpu"))


def _measure_with_retry(node: fx.Node, timer: Timer | None) -> OpCost | None:
    """Measure the op; free cached memory and repeat it if memory ran out."""
    for _ in range(2):
        try:
            return _measure(node, timer)
        except torch.OutOfMemoryError:
            release_cached(_device(node))
    warn_user(f"not enough memory is left to run {node.target} alone, so its workspace is guessed")
    return None


def _guessed_workspace(node: fx.Node) -> int:
    """Guess the workspace of an op that could not be run: on a GPU, a copy of its largest tensor in another layout.

    Not yet run on a GPU.
    """
    if _device(node).type != "cuda":
        return 0
    values = [value for source in (*node.all_input_nodes, node) for value in tensors(source)]
    return max(value.untyped_storage().nbytes() for value in values)


def _measure(node: fx.Node, timer: Timer | None) -> OpCost | None:
    """Measure the op on the generated values that need the most workspace; None if it fails on all of them.

    Zeros are valid as indices, but not as pivots. Masks are tried both ways, because their count may matter.

    Raises:
        OutOfMemoryError: the device has too little memory.
    """
    zeros = _run_on(node, timer, 0, False)
    masked = any(value.dtype == torch.bool for source in node.all_input_nodes for value in tensors(source))
    if zeros is not None and not masked:
        return zeros
    ones = _run_on(node, timer, 0 if zeros is not None else 1, True)
    costs = [op_cost for op_cost in (zeros, ones) if op_cost is not None]
    return max(costs, key=lambda op_cost: (op_cost.cost.workspace, op_cost.cost.us), default=None)


@contextmanager
def _keeping_random_numbers(device: torch.device) -> Iterator[None]:
    """Restore the generators of the host and a device."""
    before = torch.default_generator.clone_state()  # counts as no tensor memory, which the bytes of a state would
    with torch.random.fork_rng([device]) if device.type == "cuda" else nullcontext():  # forking all GPUs would warn
        try:
            yield
        finally:
            torch.default_generator.set_state(before.get_state())


def _run_on(node: fx.Node, timer: Timer | None, number: int, truth: bool) -> OpCost | None:
    """Run the op as a step would, on integers `number` and booleans `truth`; None if it fails.

    Without `timer`, a single run is timed.
    """
    device = _device(node)
    with (
        torch.no_grad(),
        _keeping_random_numbers(device),
        torch._C._DisableAutocast(),
        torch._C._AutoDispatchBelowAutograd(),
    ):
        try:
            args, kwargs = generated_arguments(node, device, number, truth)
            run: Callable[[], object] = partial(node.target, *args, **kwargs)  # type: ignore[operator, misc, arg-type]
            if isinstance(node.target, Segment):
                run()  # the first run also needs the memory of tuning
            began = getrusage(RUSAGE_SELF)
            (result, first_us), allocated = measure_peak(partial(timed_us, run, device), device)
            is_measure = device.type == "cpu" and _has_computed(began, first_us)
        except torch.OutOfMemoryError:
            raise
        except (RuntimeError, IndexError, ValueError, NotImplementedError):
            return None  # this op does not accept generated values
        if allocated is None:  # a profiler was started meanwhile
            return run_unprofiled(partial(_run_on, node, timer, number, truth))
        results = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)] if not written_inputs(node) else []
        layouts, nbytes = tuple(map(layout_in_storage, results)), resident_bytes(results)
        workspace = block_nbytes(max(0, allocated.peak - nbytes), device)
        del result, results
        is_long = is_measure and first_us >= LONG_US
        if is_long or timer is None:
            us = first_us if is_long else timed_us(run, device)[1]
        else:
            us = timer(run, workspace, first_us if is_measure else 0.0)
        return OpCost(Cost(round(us, 1), workspace), layouts, is_timed=is_long or timer is not None)


def _has_computed(since: struct_rusage, us: float) -> bool:
    """Return True if this process has computed for so long, and the kernel hardly worked for it."""
    used = getrusage(RUSAGE_SELF)
    kernel, computed = used.ru_stime - since.ru_stime, used.ru_utime - since.ru_utime
    return 1e6 * (computed + kernel) >= min(us, LONG_US) and kernel <= KERNEL_SHARE * computed


def cold_us(run: Callable[[], object], warm_us: float, device: torch.device, nbytes: int, room: int) -> float:
    """Return the median time of a run with cold operands, at least `warm_us`, the time of one behind the other.

    It is `warm_us` where the op's tensors are much larger than the cache, the run takes long, or there is no room.

    Args:
        nbytes: of the operands and results.
        room: bytes that the buffer may take; a cache that can't be overwritten whole is not flushed.
    """
    cache = int(torch.cuda.get_device_properties(device).L2_cache_size)
    runs = int(min(RUNS, ENOUGH_US / max(warm_us, 1.0)))
    if not runs or not cache or nbytes >= LARGE * cache or room < cache:
        return warm_us
    try:
        buffer = torch.empty(min(FLUSHED * cache, room), dtype=torch.uint8, device=device)
        marks = [_marks(run, buffer, device) for _ in range(runs)]
    except torch.OutOfMemoryError:  # the allocator has no such block, or the op's workspace does not fit beside it
        return warm_us
    return max(warm_us, round(statistics.median(between_us(*each) for each in marks), 1))


def _marks(run: Callable[[], object], buffer: Tensor, device: torch.device) -> tuple[object, object]:
    """Queue a flush and a run, and return the events around the run."""
    buffer.zero_()
    begin = now(device)
    run()
    return begin, now(device)
