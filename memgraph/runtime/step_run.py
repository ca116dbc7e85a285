"""One run of a step, from the start of its forward to the end of its backward.

It holds what is between the two halves: the saved tensors, the lease on the tier, and the meter or clock of a run that
is measured.

Find the op of backward that makes a NaN, in torch's anomaly mode.

    with torch.autograd.detect_anomaly():
        loss.backward()    ->   RuntimeError: aten.div.Tensor, of blocks.3.mlp model.py:71, returned nan values

The half runs as usual, and each gradient in it is checked.  Results of forward's ops are not checked, nor gradients
that the next op masks: torch sees neither.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Protocol

import torch
from torch import Tensor, fx

from ..errors import MemgraphError, RecordingError
from ..graph.guard_ops import GuardFailed
from ..graph.halves.edited_code import run_edited
from ..graph.halves.partition import Partition
from ..graph.nodes import aten
from ..graph.ops import Exchange, UpdateRunner, accumulate, op_context
from ..oss.pending_gathers import ForwardGather
from ..profile.memory_meter import Allocation, Meter, OutsideMeter, resident_bytes
from ..profile.step_timer import Clock, StepTimes, WallTimes, timing_ops
from ..storage.mapped_storage import BufferSlice
from ..storage.tiers import Lease, Tier
from ..tensors.layout import without_base
from ..tensors.versions import refuse_modified, version_of
from .released_outputs import BorrowedOutputs, ReleaseWatcher

MASKS = (aten.where.self, aten.masked_fill.Scalar, aten.masked_fill.Tensor)


class RecordedStep(Protocol):
    """Both halves of a step, recorded; see `cuda_graphs.py`."""

    def forward(self, tensors: Sequence[Tensor]) -> list[Tensor]: ...
    def backward(self, tangents: Sequence[Tensor]) -> list[Tensor]: ...
    def give_back(self) -> None: ...


class PlacedRun(Protocol):
    """The halves of a step in its arena, or noted for one; see `arena.py`."""

    is_ordinary: bool  # its times are those of any run

    def run(self, half: fx.GraphModule, values: list[Any]) -> Iterable[Any]: ...
    def end(self) -> None: ...


class StepRun:
    """Runs the two halves of a step once."""

    # Defaults on the class: `close` reads them even if the tier had no lease left.
    lease: Lease | None = None
    recording: RecordedStep | None = None  # replayed instead of running op by op
    placed: PlacedRun | None = None  # runs the halves where values have their places
    meter: Meter | None = None
    outside: OutsideMeter | None = None  # of what the caller computes before backward
    held_nbytes = 0  # on the device when that began
    note_outside: Callable[[], object] = staticmethod(int)  # called once a warning has said it
    clock: Clock | None = None
    wall: AbstractContextManager[None] = nullcontext()  # times each half as a whole
    ended = False
    update: UpdateRunner | None = None  # updates parameters during backward
    exchange: Exchange | None = None  # averages gradients over ranks during backward
    gather: ForwardGather | None = None  # gathers parameters that other ranks updated
    rank_check: Callable[[], None] | None = None  # waits for all ranks, and compares their steps
    compare_guards: Callable[[str], None] = staticmethod(lambda failure: None)  # with those of other ranks
    release_watcher: ReleaseWatcher | None = None  # tells the meter when tangents are freed
    borrowed: BorrowedOutputs | None = None  # the outputs; the caller may free them before backward
    caller_inputs: Sequence[int] = ()  # positions of the caller's tensors among the inputs
    states_nbytes: int | None = None  # optimizer state that existed when this run began
    floats: Sequence[float] = ()  # of the call; both halves read them
    in_blocks: Callable[[Sequence[Tensor]], list[Tensor]] = staticmethod(
        lambda tensors: [*tensors]
    )  # what the graph reads of its inputs
    explain_errors: Callable[[], AbstractContextManager[None]] = nullcontext  # words for an allocator's error

    def __init__(self, halves: Partition, tier: Tier | None, recording: RecordedStep | None = None) -> None:
        self.halves, self.recording = halves, recording
        self.lease = tier.lease() if tier is not None and recording is None else None
        self.slot_layouts: dict[int, Tensor] = {}  # meta tensors: the layout of what each slot holds
        self.saved: list[Any] | None = None
        self.saved_versions: list[tuple[Tensor, int]] = []
        self.unplanned = ""  # why it takes more than forecast, if it does
        self.absent_nbytes = 0  # forecast to exist before the run, but does not
        self.replaced_nbytes = 0  # new in the place of older blocks, which the meter does not see freed
        self.others_nbytes = 0  # the most that other open runs held at the same time
        self._caller_tensors: list[weakref.ref[Tensor]] = []
        self.is_concurrent = False  # other runs are open, so autograd must sum the gradients

    def measured(self, tangents: Sequence[Tensor | None]) -> AbstractContextManager[None]:
        """Measure what backward allocates, if this run is measured.

        Tangents that backward reads as given count as present; outputs that the caller has freed do not.
        """
        if self.meter is None:
            return nullcontext()
        freed = self.borrowed.gone_nbytes() if self.borrowed is not None else 0
        return self.meter.window(resident_bytes(self._unchanged(tangents)) - freed)

    def _unchanged(self, tangents: Sequence[Tensor | None]) -> list[Tensor]:
        """Return the tangents that backward reads without a copy."""
        pairs = zip(self.halves.tangents, tangents, strict=True)
        return [tangent for fake, tangent in pairs if tangent is not None and _has_strides(fake, tangent)]

    def time(self, device: torch.device) -> None:
        """Time each op of this run, and each copy."""
        self.clock = Clock(device)
        if self.lease is not None:
            self.lease.time_copies()

    def check_ranks(self) -> None:
        """Wait until all ranks are about to run the same step.

        Raises:
            ShardError: they are not.
        """
        if self.rank_check is not None:
            self.rank_check()
            self.rank_check = None

    def bind(self, slots: Mapping[int, BufferSlice]) -> None:
        """Put some slots of this run elsewhere."""
        if self.lease is not None and slots:
            self.lease.bind(slots)

    def forward(self, tensors: Sequence[Tensor], outputs: int) -> list[Tensor]:
        """Run forward and return its outputs; what backward needs is saved here."""
        given = self.in_blocks(tensors)
        try:
            with self.wall:
                values = self._forward(given)
        except BaseException as error:
            if self.gather is not None:
                self.gather.close()
            if isinstance(error, GuardFailed):
                self.compare_guards(str(error))
                self.check_ranks()
            raise
        if any(isinstance(value, Tensor) and value._is_view() for value in values[:outputs]):
            values[:outputs] = without_base(values[:outputs], [x for x in given if isinstance(x, Tensor)])
        # What the caller has is saved detached: its `.data` may be replaced before backward, which needs the old bytes.
        # An output leads to the autograd node that holds this run: a reference cycle, which would also hide that the
        # caller has freed it.
        callers = {*map(id, given), *map(id, values[:outputs])}
        self.saved = [x.detach() if id(x) in callers and isinstance(x, Tensor) else x for x in values[outputs:]]
        del values[outputs:]
        self.ended = self.halves.backward is None
        of_caller = (*(tensors[i] for i in self.caller_inputs), *values)
        self._caller_tensors = [weakref.ref(tensor) for tensor in of_caller if tensor is not None]
        known = [*given, *values]
        read = [known[i] if i < len(given) else known[i].detach() for i in self.halves.caller_values]
        self.saved_versions = [(tensor, version_of(tensor)) for tensor in read]
        return values

    def saved_tensors(self) -> list[Tensor]:
        """Return every tensor that this run holds for backward."""
        saved = [value for value in self.saved or () if isinstance(value, Tensor)]  # numbers are saved too
        return [*saved, *(tensor for tensor, _ in self.saved_versions)]

    def caller_tensors(self) -> list[Tensor]:
        """Return the caller's inputs and outputs that still exist."""
        return [tensor for ref in self._caller_tensors if (tensor := ref()) is not None]

    def _forward(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        if self.recording is not None:
            return self.recording.forward(tensors)  # which saves for backward itself
        with self._running():
            return list(self._run(self.halves.forward, [*tensors, *self.floats]))

    def backward(self, tangents: list[Tensor | None], gradients: Sequence[Tensor | None], keep: bool) -> list[Tensor]:
        """Run backward and return the gradients.

        Empties `tangents`, and frees the saved tensors unless `keep`.

        Raises:
            MemgraphError: the saved tensors were freed by an earlier backward.
            RuntimeError: a saved tensor was changed in place.
            RecordingError: `keep`, and the step is recorded: its backward overwrites the saved tensors.
        """
        if self.saved is None:
            raise differentiated_before()
        if keep and self.recording is not None:
            raise RecordingError(
                "backward(retain_graph=True) reads the saved tensors twice, and a recorded step keeps them for one "
                "backward only; compile without cuda_graphs= for this"
            )
        refuse_modified(self.saved_versions)
        assert self.halves.backward is not None
        saved = self._copied() if keep else self.saved
        if keep:
            self.unplanned = "retain_graph=True kept what backward frees"
            self.clock = None  # it expects one backward
        else:
            self.saved, self.saved_versions = None, []
        as_captured = [_as_captured(fake, x) for fake, x in zip(self.halves.tangents, tangents, strict=True)]
        if self.meter is not None:
            self.release_watcher = ReleaseWatcher(self._unchanged(tangents), self.meter.freed)
        tangents.clear()
        saved += [*self.floats, *as_captured, *gradients]
        with self.wall:
            if self.recording is not None:
                results = self.recording.backward(as_captured)
            else:
                del as_captured
                with self._running():
                    results = list(self._run_backward(self.halves.backward, saved))
        self.ended = True
        return results

    def _copied(self) -> list[Any]:
        """Return the saved values for one of several backwards: each writes to copies of its own."""
        assert self.saved is not None
        return [x.clone() if i in self.halves.written else x for i, x in enumerate(self.saved)]

    def take_saved(self) -> list[Any]:
        """Return the saved tensors, for a backward that runs in parts."""
        assert self.saved is not None
        refuse_modified(self.saved_versions)
        saved, self.saved, self.saved_versions = self.saved, None, []
        return saved

    def run_part(self, part: fx.GraphModule, values: list[Any]) -> list[Any]:
        """Run a part of backward."""
        with self._running():
            return list(self._run_backward(part, values))

    def _agree(self) -> None:
        self.compare_guards("")

    def times(self) -> StepTimes | None:
        """Return the times of the ops, if they were measured to the end."""
        if self.clock is None or not self.ended:
            return None
        moved = (self.lease.copies,) if self.lease is not None else ()
        return StepTimes(self.clock.ops, self.clock.us, moved)

    @property
    def wall_times(self) -> WallTimes | None:
        """Return the times of the halves, if the run was an ordinary one: not measured, not timed by op, and alone."""
        is_ordinary = self.meter is None and self.clock is None and not self.is_concurrent and not self.unplanned
        return self.wall if self.ended and is_ordinary and isinstance(self.wall, WallTimes) else None

    def close(self) -> Allocation | None:
        """Wait for copies, release lease and recording, and return what was allocated if it was measured to the end."""
        self.saved = None
        lease, self.lease = self.lease, None
        if lease is not None:
            lease.release()
        recording, self.recording = self.recording, None
        if recording is not None:
            recording.give_back()
        placed, self.placed = self.placed, None
        if placed is not None:
            placed.end()
        meter, self.meter = self.meter, None
        return meter.allocated() if meter is not None and self.ended else None

    def __del__(self) -> None:
        self.close()

    def _run(self, half: fx.GraphModule, values: list[Any]) -> Iterable[Tensor]:
        if self.clock is not None:
            return self.clock.run(half, values)
        if self.release_watcher is not None:
            return timing_ops(half, self.release_watcher)(half, values)
        if self.placed is not None:
            return self.placed.run(half, values)
        return half.forward(values)

    def _run_backward(self, half: fx.GraphModule, values: list[Any]) -> Iterable[Tensor]:
        if not finds_nan():
            return self._run(half, values)
        self.unplanned, self.clock = "torch's anomaly mode checked each gradient", None
        return run_checked(half, values, self.halves.tangent_names)

    @contextmanager
    def _running(self) -> Iterator[None]:
        """Run a half without autocast and autograd: the graph already contains their ops."""
        with (
            op_context(self.lease, self.slot_layouts, self.update, self.exchange, self.gather, self._agree),
            torch.no_grad(),
            torch._C._DisableAutocast(),
            torch._C._AutoDispatchBelowAutograd(),
            self.explain_errors(),
        ):
            yield


def differentiated_before() -> MemgraphError:
    return MemgraphError(
        "this step was differentiated before, and its saved tensors are freed; "
        "call backward(retain_graph=True) the first time to run backward twice"
    )


def _as_captured(fake: Tensor, tangent: Tensor | None) -> Tensor:
    """Return a tangent with the strides that the graph was captured with; zeros for None."""
    if tangent is not None and _has_strides(fake, tangent):
        return tangent
    shaped = torch.empty_strided(fake.shape, fake.stride(), dtype=fake.dtype, device=fake.device)
    return shaped.zero_() if tangent is None else shaped.copy_(tangent)


def _has_strides(fake: Tensor, tangent: Tensor) -> bool:
    return tangent.stride() == fake.stride()


def finds_nan() -> bool:
    """Return True if torch is asked to look for NaN in backward."""
    return torch.is_anomaly_enabled() and torch.is_anomaly_check_nan_enabled()


def run_checked(half: fx.GraphModule, values: list[Tensor], tangents: Collection[str]) -> Any:
    """Run a backward half on `values`; `tangents` names the gradients among its inputs.

    Raises:
        RuntimeError: an op made a NaN; names it, with its module and line.
    """
    gradients = _gradients(half.graph, tangents)

    def check(name: str, value: object) -> None:
        if name in gradients and has_nan(value):
            raise RuntimeError(_message(gradients[name]))

    checked = run_edited(half, lambda name, line: f"{line};  memgraph_check('{name}', {name})", memgraph_check=check)
    return checked(half, values)


def has_nan(value: object) -> bool:
    """Return True if a tensor, or one of several, contains a NaN."""
    if isinstance(value, tuple | list):
        return any(map(has_nan, value))
    if not isinstance(value, Tensor) or value.is_meta or not (value.is_floating_point() or value.is_complex()):
        return False
    return bool(value.isnan().any())


def _gradients(graph: fx.Graph, tangents: Collection[str]) -> dict[str, fx.Node]:
    """Return the nodes computed from tangents that other ops than masks read, by name."""
    reached = {node for node in graph.find_nodes(op="placeholder") if node.target in tangents}
    for node in graph.nodes:
        if node.op == "call_function" and not reached.isdisjoint(node.all_input_nodes) and _computes(node):
            reached.add(node)
    checked = (node for node in reached if not all(user.target in MASKS for user in node.users))
    return {node.name: node for node in checked if node.op == "call_function"}


def _computes(node: fx.Node) -> bool:
    """Return True unless the op copies bytes, whose result may not have arrived yet."""
    return node.target is accumulate or not str(node.target).startswith("memgraph.")


def _message(node: fx.Node) -> str:
    where = node.meta.get("where", "")
    return f"{node.target}{f', of {where},' * bool(where)} returned nan values in backward"
