"""Measure a compiled region alone: its time, and the bytes at its peak beyond all that is live before it.

    before it: x, w of 12 MB; while it runs, at most 14 MB; its results have 4 MB  ->  workspace of -2 MB

It frees what it reads for the last time, as in the step: so the peak may be below what it reads and makes together.
Tensors are generated, with the layouts and the shared storages of the step. Parameters and buffers are the module's
own, so a measurement needs about the memory that the step needs at this place. Its ops are timed in the same way, one
after the other: alone, and with empty caches, each takes longer than in a step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, fx

from ..graph.halves.direct_calls import DirectCode
from ..graph.inductor import Segment
from ..graph.result_layout import ResultLayout, layout, layout_in_storage
from ..system.device import block_nbytes, release_cached
from ..system.profiler_thread import run_unprofiled
from ..system.timer import ENOUGH_US, REPEATS, flush_caches, timed_us
from .generated_arguments import randomize, tensor_in_storage
from .memory_meter import measure_peak, resident_bytes


@dataclass(frozen=True)
class RegionCost:
    """Microseconds compiled and op by op, bytes at the peak beyond results and what was live before, and layouts of the
    results."""

    us: float
    apart_us: float
    workspace: int
    layouts: tuple[ResultLayout, ...]


_known: dict[object, RegionCost | str] = {}  # of this process, whose kernels they are


@dataclass(frozen=True, eq=False)
class RegionProfiler:
    """Prices compiled regions; equal ones once.

    Attributes:
        own: tensors of the module, which regions read in place of generated ones.
        limit: most bytes of generated tensors and results.
    """

    own: Sequence[Tensor]
    limit: int

    def __call__(self, run: Segment, reads: Sequence[Tensor], freed: Sequence[bool]) -> RegionCost | str:
        """Return the cost of a region, or why it has none; `freed` tells which of its fake `reads` it frees."""
        key = run.digest, tuple(freed), _shared(reads)
        if key not in _known:
            _known[key] = run_unprofiled(partial(self._price, run, reads, freed))
        return _known[key]

    def _price(self, run: Segment, reads: Sequence[Tensor], freed: Sequence[bool]) -> RegionCost | str:
        device = next((value.device for value in reads), torch.device("cpu"))
        if (nbytes := resident_bytes(reads)) > self.limit + resident_bytes(self.own):
            return f"to be measured, it needs {nbytes} bytes of tensors"
        drawing = torch.random.fork_rng([device] if device.type == "cuda" else [])
        with torch.no_grad(), drawing, torch._C._DisableAutocast(), torch._C._AutoDispatchBelowAutograd():
            try:
                run.boxed(self._inputs(reads, freed, True))  # the first run of a process tunes kernels
                masks = (False, True) if any(value.dtype == torch.bool for value in reads) else (True,)
                found = [self._measured(run, reads, freed, device, truth) for truth in masks]
                costs = [cost for cost in found if isinstance(cost, RegionCost)]
                if len(costs) < len(found):
                    return next(reason for reason in found if isinstance(reason, str))
                _apart(run)(self._inputs(reads, freed, True))
                us, apart_us = self._times(run, reads, freed, device)
            except Exception as error:  # of Inductor's, Triton's or torch's; the ops run in segments
                release_cached(device)
                return f"{type(error).__name__}: {error}".splitlines()[0]
        return RegionCost(us, apart_us, max(cost.workspace for cost in costs), costs[0].layouts)

    def _times(
        self, run: Segment, reads: Sequence[Tensor], freed: Sequence[bool], device: torch.device
    ) -> tuple[float, float]:
        """Return the least times of a few runs, compiled and op by op in turn; none holds what it frees."""
        least, spent, flush = [math.inf, math.inf], 0.0, flush_caches(device)
        ways: list[Callable[[list[Tensor]], object]] = [run.boxed, _apart(run)]
        for _ in range(REPEATS):
            for i, way in enumerate(ways):
                given = self._inputs(reads, freed, True)
                flush()
                least[i] = min(least[i], us := timed_us(partial(way, given), device)[1])
                spent += us
            if spent >= 2 * ENOUGH_US:
                break
        return least[0], least[1]

    def _measured(
        self, run: Segment, reads: Sequence[Tensor], freed: Sequence[bool], device: torch.device, truth: bool
    ) -> RegionCost | str:
        """Return the cost without a time."""

        def work() -> tuple[int, list[Tensor], tuple[Tensor, ...]]:
            given = self._inputs(reads, freed, truth)
            before = resident_bytes(value for value in given if not self._is_own(value))
            kept = [value for value, is_freed in zip(given, freed, strict=True) if not is_freed]
            return before, kept, run.boxed(given)

        (before, kept, results), allocated = measure_peak(work, device)
        if allocated is None:
            return "a profiler was started meanwhile"
        storages = [value.untyped_storage()._cdata for value in results]
        if len({*storages} - {value.untyped_storage()._cdata for value in kept}) < len(results):
            return "results share memory"
        workspace = allocated.peak - before - resident_bytes(results)
        return RegionCost(0.0, 0.0, block_nbytes(workspace, device), tuple(map(layout_in_storage, results)))

    def _inputs(self, reads: Sequence[Tensor], freed: Sequence[bool], truth: bool) -> list[Tensor]:
        """Return real tensors for fake ones."""
        own = {layout(value): value for value in self.own}
        storages: dict[int, torch.UntypedStorage] = {}
        given, generated = list[Tensor](), list[Tensor]()
        for fake, is_freed in zip(reads, freed, strict=True):
            real = None if is_freed else own.get(layout(fake))
            if real is None or real.device != fake.device or fake.storage_offset() or real.storage_offset():
                real = _generated(fake, storages, truth)
                generated.append(real)
            given.append(real)
        if generated and generated[0].device.type != "cpu":
            randomize(generated, generated[0].device)
        return given

    def _is_own(self, value: Tensor) -> bool:
        return any(value is each for each in self.own)


def _apart(run: Segment) -> Callable[[list[Tensor]], object]:
    """Return a function that does the same op by op, as the step would."""
    if run.part is None:
        return run.boxed
    graph = fx.Graph()
    graph.set_codegen(DirectCode())
    graph.output(graph.graph_copy(run.part, {}))
    function: Callable[[list[Tensor]], object] = fx.GraphModule({}, graph).forward
    return function


def _generated(fake: Tensor, storages: dict[int, torch.UntypedStorage], truth: bool) -> Tensor:
    """Return a real tensor in a storage that is shared as the fake one's is."""
    real = tensor_in_storage(fake, storages)
    if real.dtype == torch.bool:
        return real.fill_(truth)
    return real.fill_(0.5 if real.is_floating_point() or real.is_complex() else 0)


def _shared(reads: Sequence[Tensor]) -> tuple[int, ...]:
    """Return a number for each value, equal for those in the same storage."""
    numbers: dict[int, int] = {}
    return tuple(numbers.setdefault(value.untyped_storage()._cdata, len(numbers)) for value in reads)
