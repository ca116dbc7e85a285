"""Have a GPU do a step again without being told each op: forward and backward are noted down, as a CUDA graph each.

Before:                                  After:
    a kernel is launched for each op         the inputs are copied to where the recording reads them
                                             one launch for forward, one for backward

Parameters and buffers are read and written where they are; outputs are copied out of the recording's memory, and live
on.  Gradients are handed out where they lie: while somebody has one, the step runs op by op.  Both halves share a pool
of memory, in which backward takes the bytes that forward has left, as in a step that is not recorded; so only one
flight at a time flies with a recording.  Two steps have run op by op before, and kernels are loaded: a third one that
only warms up would change buffers once too often.  Not yet run on a GPU.
"""

from __future__ import annotations

import gc
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from ..errors import RecordingError
from ..graph.partition import Partition
from ..storage.pinned_tier import PinnedLease
from ..storage.tiers import Tier
from ..tensors.layout import is_dense
from .step_run import StepRun

T = TypeVar("T")
MOST = 8  # recordings in a row of which none has flown twice: then the step runs op by op
OURS = 2  # who refers to a gradient's storage if nobody has it: the tensor here, and the object by which it is asked


class Recorder(Protocol):
    """Who notes down what a device is asked to do."""

    def record(self, run: Callable[[], T]) -> tuple[T, Callable[[], None]]:
        """What `run` returns, in memory that stays, and what does the same again there.  Nothing of it is done yet."""
        ...

    def mark(self) -> None:
        """A half has been asked for."""
        ...

    def follow(self) -> None:
        """Let what comes now, on whatever stream, come behind the last mark."""
        ...

    def settle(self) -> None:
        """Wait until all that was asked for is done."""
        ...


class CudaRecorder:
    """CUDA graphs over one pool of memory.  Not yet run on a GPU.

    The graph is taken on a stream of its own; streams of copies join it by the events that they wait for.
    """

    def __init__(self, device: torch.device) -> None:
        self.device, self.stream = device, torch.cuda.Stream(device)
        self.pool = torch.cuda.graph_pool_handle()
        self.last = torch.cuda.Event()

    def record(self, run: Callable[[], T]) -> tuple[T, Callable[[], None]]:
        graph = torch.cuda.CUDAGraph()
        # Other threads may go on with what they ask of the device.
        taking = torch.cuda.graph(graph, pool=self.pool, stream=self.stream, capture_error_mode="thread_local")
        with _without_collector(), taking:
            result = run()
        return result, graph.replay

    def mark(self) -> None:
        self.last.record(torch.cuda.current_stream(self.device))

    def follow(self) -> None:
        torch.cuda.current_stream(self.device).wait_event(self.last)

    def settle(self) -> None:
        torch.cuda.synchronize(self.device)


def recorder_of(device: torch.device) -> Callable[[], Recorder]:
    """What makes a recorder for a recording on a device.

    Raises:
        ValueError: it is no GPU.
    """
    if device.type != "cuda":
        raise ValueError(f"cuda_graphs= is for steps on a GPU, and the model lies on {device}; leave it out")
    return partial(CudaRecorder, device)


class CudaGraphPair:
    """Both halves of a step, noted down with their memory."""

    def __init__(
        self, halves: Partition, tier: Tier | None, tensors: Sequence[Tensor], varying: Sequence[int], outputs: int,
        recorder: Recorder,
    ) -> None:  # fmt: skip
        """`varying` are the places of what the caller gives, which lies elsewhere each time."""
        for place in varying:
            if not is_dense(tensors[place]):
                raise RecordingError(f"an input of shape {tuple(tensors[place].shape)} has gaps or overlaps")
        self.recorder, self.varying = recorder, tuple(varying)
        self.given = [x.detach() for x in tensors]
        for place in varying:
            self.given[place] = torch.empty_like(tensors[place], requires_grad=False)
        self.fixed = self._addresses(tensors)
        self.busy = self.stale = False
        self.flights = 0
        flight = self.flight = StepRun(halves, tier)
        self.outputs, self.again = recorder.record(lambda: _joined(flight, lambda: flight.forward(self.given, outputs)))
        if halves.backward is not None:
            self.tangents = [
                torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device) for x in halves.tangents
            ]
            self.gradients, self.back = recorder.record(
                lambda: _joined(flight, lambda: flight.backward([*self.tangents], [], keep=False))
            )

    def forward(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """The outputs, given the inputs."""
        self.flights += 1
        self.recorder.follow()
        with torch.no_grad():
            for place in self.varying:
                self.given[place].copy_(tensors[place])
            self.again()
            found = [torch.empty_like(x).copy_(x) for x in self.outputs]
        self.recorder.mark()
        return found

    def backward(self, tangents: Sequence[Tensor]) -> list[Tensor]:
        """The gradients, given the tangents."""
        with torch.no_grad():
            for into, tangent in zip(self.tangents, tangents, strict=True):
                into.copy_(tangent)
            self.back()
        self.recorder.mark()
        return [gradient.detach() for gradient in self.gradients]

    def is_of(self, tensors: Sequence[Tensor]) -> bool:
        """Whether parameters and buffers are where they were."""
        return self.fixed == self._addresses(tensors)

    @property
    def is_held(self) -> bool:
        """Whether somebody has a gradient of the last flight."""
        return any(map(_is_held, getattr(self, "gradients", ())))

    def give_back(self) -> None:
        """The flight that had it has ended."""
        self.busy = False
        if self.stale:
            self.close()

    def close(self) -> None:
        """Let memory go, once nothing is done with it; when the flight has ended, if one has it."""
        self.stale = True
        if not self.busy:
            self.recorder.settle()
            self.again = self.back = _gone
            self.outputs, self.gradients, self.given = [], [], []
            self.flight.close()

    def __del__(self) -> None:
        if not sys.is_finalizing() and hasattr(self, "flight"):
            self.busy = False
            self.close()

    def _addresses(self, tensors: Sequence[Tensor]) -> list[int]:
        return [x.data_ptr() for i, x in enumerate(tensors) if i not in self.varying]


MakeGraphs = Callable[[Sequence[Tensor], Recorder], CudaGraphPair]


class CudaGraphCache:
    """The recording of one step: made when it is first wanted, and anew when the state has moved."""

    def __init__(self, recorder: Callable[[], Recorder]) -> None:
        self.recorder = recorder
        self.recording: CudaGraphPair | None = None
        self.wasted = 0
        self.lock = threading.Lock()

    def ready(self, tensors: Sequence[Tensor], make: MakeGraphs) -> CudaGraphPair | None:
        """What the next flight flies with; None if it has to go op by op.

        Raises:
            RecordingError: the step can't be recorded.
        """
        with self.lock:
            if self.recording is not None and self.recording.busy:
                return None  # whose memory is in use until the backward of that flight
            held = self.recording is not None and self.recording.is_held
            if self.recording is not None and (held or not self.recording.is_of(tensors)):
                self._end()
            if held or (self.recording is None and self.wasted == MOST):
                return None
            self.recording = recording = self.recording or self._made(tensors, make)
            recording.busy = True
            return recording

    def end(self) -> None:
        """Let the memory of the recording go: another step wants the device."""
        with self.lock:
            self._end()

    def _end(self) -> None:
        recording, self.recording = self.recording, None
        if recording is not None:
            self.wasted = self.wasted + 1 if recording.flights < 2 else 0
            recording.close()

    def _made(self, tensors: Sequence[Tensor], make: MakeGraphs) -> CudaGraphPair:
        try:
            return make(tensors, self.recorder())
        except RuntimeError as error:
            raise RecordingError(f"the device can't record this step: {error}; leave cuda_graphs= out") from error


def _is_held(gradient: Tensor) -> bool:
    ours = OURS + gradient._is_view()  # which refers to what it is a view of
    return torch._C._storage_Use_Count(gradient.untyped_storage()._cdata) > ours


def _joined(flight: StepRun, run: Callable[[], T]) -> T:
    """Run a half, at whose end the stream of the recording has waited for the others."""
    try:
        return run()
    finally:
        if isinstance(flight.lease, PinnedLease):
            flight.lease.join()


@contextmanager
def _without_collector() -> Iterator[None]:
    """What the collector lets go might ask the device for what is forbidden while it notes down."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


def _gone() -> Any:
    raise RecordingError("this recording has been given up")
