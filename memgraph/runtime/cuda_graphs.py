"""Record both halves of a step as CUDA graphs, and replay them.

Before:                                  After:
    a kernel is launched for each op         the inputs are copied to where the recording reads them
                                             one launch for forward, one for backward

Parameters and buffers are read and written in place.  Outputs are copied out of the recording's memory.  Gradients are
not: while the caller holds one, the step runs op by op.  Both halves share one pool of memory, so that backward reuses
the bytes that forward frees, as in a step that is not recorded.  So only one run at a time uses a recording.  Two steps
run op by op before, which loads the kernels; a third one as warm-up would change buffers once too often.  Backward is
recorded in autograd's thread, because libraries keep what they have loaded for each thread.

Run a function in the thread in which autograd runs backward on a device.

    run_in_backward(lambda: recorder.record(half), cuda)     ->   recorded where backward will run, and has run before

cuBLAS and cuDNN keep handles and plans for each thread, and make them at the first use. A CUDA graph can't be recorded
while they do. On a CPU that thread is the caller's.
"""

from __future__ import annotations

import sys
import threading
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, ClassVar, Protocol, TypeVar

import torch
from torch import Tensor

from ..errors import RecordingError
from ..graph.halves.partition import Partition
from ..storage.pinned_tier import PinnedLease
from ..storage.tiers import Tier
from ..system.device import CPU
from ..system.garbage import paused_collector
from ..system.user_warning import warn_user
from ..tensors.layout import is_dense
from .step_run import StepRun

T = TypeVar("T")
MOST = 8  # recordings in a row that were replayed less than twice: then the step runs op by op
OWN_REFERENCES = 2  # to a gradient's storage: the tensor here, and the object that asks for the count


def run_in_backward(run: Callable[[], T], device: torch.device) -> T:
    """Call a function in the thread of a device's backward, and return its result."""
    results: list[T] = []
    with torch.inference_mode(False), torch.enable_grad():
        leaf = torch.empty(0, device=device, requires_grad=True)
        output = _Call.apply(leaf, lambda: results.append(run()))  # type: ignore[no-untyped-call]
        torch.autograd.backward(output, torch.empty_like(output, requires_grad=False))
    return results[0]


class _Call(torch.autograd.Function):
    """The identity, whose backward calls a function."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, call: Callable[[], object]) -> Tensor:
        ctx.call = call
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        ctx.call()
        return gradients[0], None


class Recorder(Protocol):
    """Records what a device is asked to do."""

    def record(self, run: Callable[[], T]) -> tuple[T, Callable[[], None]]:
        """Return the result of `run`, in memory that stays, and a function that replays it; nothing has run yet."""
        ...

    def mark(self) -> None:
        """Mark the end of a half on the current stream."""
        ...

    def follow(self) -> None:
        """Let the current stream wait for the last mark."""
        ...

    def wait(self) -> None:
        """Wait until the device is idle."""
        ...


class CudaRecorder:
    """CUDA graphs over one pool of memory.

    The graph is captured on a stream of its own; copy streams join it by the events that they wait for. Once a capture
    has failed, the process records no more: torch may be left in a state in which later ones record wrongly.

    cuBLAS has a workspace for each stream. torch 2.11 never frees it; later versions do with each graph that was
    captured on the stream, though others use it. So recordings that exist at once have a stream each, and later ones
    take it over.
    """

    failures: ClassVar[list[str]] = []
    failed: ClassVar[list[Any]] = []  # graphs, which torch's allocator of pinned memory asks whether they are captured
    idle: ClassVar[defaultdict[torch.device, list[Any]]] = defaultdict(list)  # streams of recordings that are gone

    def __init__(self, device: torch.device) -> None:
        """
        Raises:
            RecordingError: an earlier recording of this process has failed.
        """
        if self.failures:
            raise RecordingError(
                f"an earlier recording of this process has failed ({self.failures[0]}), and none is tried again; "
                "leave cuda_graphs= out"
            )
        self.device = device
        self.stream = self.idle[device].pop() if self.idle[device] else torch.cuda.Stream(device)
        self.pool = torch.cuda.graph_pool_handle()
        self.last = torch.cuda.Event()

    def __del__(self) -> None:
        if hasattr(self, "stream") and not sys.is_finalizing():
            self.idle[self.device].append(self.stream)

    def record(self, run: Callable[[], T]) -> tuple[T, Callable[[], None]]:
        graph = torch.cuda.CUDAGraph()
        try:
            with self._capture(graph, self.pool):
                result = run()
        except BaseException as error:
            self._give_up(graph, error)
            raise
        return result, graph.replay

    @contextmanager
    def _capture(self, graph: Any, pool: Any) -> Iterator[None]:
        """Capture a graph. Other threads may still use the device, and freeing an object may call what CUDA forbids."""
        capture = torch.cuda.graph(graph, pool=pool, stream=self.stream, capture_error_mode="thread_local")
        # torch leaves the stream of a capture the current one where CUDA ends the capture with an error.
        with torch.cuda.stream(torch.cuda.current_stream(self.device)), paused_collector(), capture:
            yield

    def _give_up(self, graph: Any, error: BaseException) -> None:
        """Let torch leave the capture where CUDA has ended it with an error. Not yet run on a GPU."""
        self.failures.append(f"{type(error).__name__}: {error}".splitlines()[0])
        self._leave(graph, self.pool)
        empty, pool = torch.cuda.CUDAGraph(), torch.cuda.graph_pool_handle()
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # torch says that this graph is empty
                with self._capture(empty, pool):  # before torch 2.13 its end lets the generator draw again
                    pass
        except RuntimeError:
            self._leave(empty, pool)
        warn_user(
            f"a step could not be recorded as CUDA graphs ({self.failures[-1]}): this process records no more, and "
            "runs its steps op by op"
        )

    def _leave(self, graph: Any, pool: Any) -> None:
        """Let torch's allocators leave the pool of a graph.

        From torch 2.14 on a graph does so when it is reset or freed, and ends the process if that was done before.
        """
        self.failed.append(graph)
        with suppress(RuntimeError):
            graph.reset()
        with suppress(RuntimeError):  # it has left the pool
            torch._C._cuda_endAllocateToPool(self.device.index or 0, pool)

    def mark(self) -> None:
        self.last.record(torch.cuda.current_stream(self.device))

    def follow(self) -> None:
        torch.cuda.current_stream(self.device).wait_event(self.last)

    def wait(self) -> None:
        torch.cuda.synchronize(self.device)


def recorder_of(device: torch.device) -> Callable[[], Recorder]:
    """Return the constructor of recorders for a device.

    Raises:
        ValueError: it is no GPU.
    """
    if device.type != "cuda":
        raise ValueError(f"cuda_graphs= is for steps on a GPU, and the model is on {device}; leave it out")
    return partial(CudaRecorder, device)


class CudaGraphPair:
    """Both halves of a step, recorded with their memory."""

    def __init__(
        self, halves: Partition, tier: Tier | None, tensors: Sequence[Tensor], varying: Sequence[int], outputs: int,
        recorder: Recorder,
    ) -> None:  # fmt: skip
        """`varying` are the positions of the caller's tensors, whose addresses differ from call to call."""
        for i in varying:
            if not is_dense(tensors[i]):
                raise RecordingError(f"an input of shape {tuple(tensors[i].shape)} has gaps or overlaps")
        self.recorder, self.varying = recorder, tuple(varying)
        self.inputs = [x.detach() for x in tensors]
        for i in varying:
            self.inputs[i] = torch.empty_like(tensors[i], requires_grad=False)
        self.fixed = self._addresses(tensors)
        self.busy = self.stale = False
        self.replays = 0
        run = self.run = StepRun(halves, tier)
        self.outputs, self.replay_forward = recorder.record(
            lambda: _joined(run, lambda: run.forward(self.inputs, outputs))
        )
        if halves.backward is not None:
            self.tangents = [
                torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device) for x in halves.tangents
            ]
            half = partial(_joined, run, lambda: run.backward([*self.tangents], [], keep=False))
            device = next((x.device for x in tensors), CPU)
            self.gradients, self.replay_backward = run_in_backward(partial(recorder.record, half), device)

    def forward(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Replay forward and return its outputs."""
        self.replays += 1
        self.recorder.follow()
        with torch.no_grad():
            for i in self.varying:
                self.inputs[i].copy_(tensors[i])
            self.replay_forward()
            outputs = [torch.empty_like(x).copy_(x) for x in self.outputs]
        self.recorder.mark()
        return outputs

    def backward(self, tangents: Sequence[Tensor]) -> list[Tensor]:
        """Replay backward and return the gradients."""
        with torch.no_grad():
            for into, tangent in zip(self.tangents, tangents, strict=True):
                into.copy_(tangent)
            self.replay_backward()
        self.recorder.mark()
        return [gradient.detach() for gradient in self.gradients]

    def reads(self, tensors: Sequence[Tensor]) -> bool:
        """Return True if parameters and buffers still have the recorded addresses."""
        return self.fixed == self._addresses(tensors)

    @property
    def is_held(self) -> bool:
        """Return True if the caller holds a gradient of the last run."""
        return any(map(_is_held, getattr(self, "gradients", ())))

    def give_back(self) -> None:
        """End the run that uses this recording."""
        self.busy = False
        if self.stale:
            self.close()

    def close(self) -> None:
        """Free the memory once the device is idle, and once the run that uses it has ended."""
        self.stale = True
        if not self.busy:
            self.recorder.wait()
            self.replay_forward = self.replay_backward = _closed
            self.outputs, self.gradients, self.inputs = [], [], []
            self.run.close()

    def __del__(self) -> None:
        if not sys.is_finalizing() and hasattr(self, "run"):
            self.busy = False
            self.close()

    def _addresses(self, tensors: Sequence[Tensor]) -> list[int]:
        return [x.data_ptr() for i, x in enumerate(tensors) if i not in self.varying]


MakeGraphs = Callable[[Sequence[Tensor], Recorder], CudaGraphPair]


class CudaGraphCache:
    """The recording of one step: made when it is first needed, and replaced when parameters or buffers have moved."""

    def __init__(self, recorder: Callable[[], Recorder]) -> None:
        self.recorder = recorder
        self.recording: CudaGraphPair | None = None
        self.wasted = 0
        self.lock = threading.Lock()

    def ready(self, tensors: Sequence[Tensor], make: MakeGraphs) -> CudaGraphPair | None:
        """Return the recording for the next run; None if it has to run op by op.

        Raises:
            RecordingError: the step can't be recorded.
        """
        with self.lock:
            if self.recording is not None and self.recording.busy:
                return None  # its memory is in use until the backward of that run
            is_held = self.recording is not None and self.recording.is_held
            if self.recording is not None and (is_held or not self.recording.reads(tensors)):
                self._end()
            if is_held or (self.recording is None and self.wasted == MOST):
                return None
            self.recording = recording = self.recording or self._record(tensors, make)
            recording.busy = True
            return recording

    def end(self) -> None:
        """Free the recording's memory, which another step needs."""
        with self.lock:
            self._end()

    def _end(self) -> None:
        recording, self.recording = self.recording, None
        if recording is not None:
            self.wasted = self.wasted + 1 if recording.replays < 2 else 0
            recording.close()

    def _record(self, tensors: Sequence[Tensor], make: MakeGraphs) -> CudaGraphPair:
        try:
            return make(tensors, self.recorder())
        except RuntimeError as error:
            raise RecordingError(f"the device can't record this step: {error}; leave cuda_graphs= out") from error


def _is_held(gradient: Tensor) -> bool:
    own = OWN_REFERENCES + gradient._is_view()  # a view also refers to its base
    return torch._C._storage_Use_Count(gradient.untyped_storage()._cdata) > own


def _joined(run: StepRun, half: Callable[[], T]) -> T:
    """Run a half, and let the recording's stream wait for the copy streams at its end."""
    try:
        return half()
    finally:
        if isinstance(run.lease, PinnedLease):
            run.lease.join()


def _closed() -> Any:
    raise RecordingError("this recording is closed")
