"""A submodule's call as two ops: its forward, and its backward by autograd.

    forward:   [w, running, x]                ->   [y, new value of running, ticket]
    backward:  [w, running, x], [dy], ticket  ->   [dw, dx]

Forward keeps nothing for backward, which runs it again from the same state: random numbers, buffers and attributes.
Parameters and buffers of the submodule are inputs, so that they can be offloaded; its own are not read.

The peak of a part's backward, found in forward: autograd runs on fake tensors, which take no memory.

    forward of experts that got 90, 6 tokens   ->   123,904 bytes; 98,304 where they get 48 and 48

The sum of the bytes that ops make is the same in both cases. Ops may take workspace besides what they return; where a
part was recorded, that was measured.
"""

from __future__ import annotations

import math
import threading
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.function import BackwardCFunction
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ..errors import CaptureError, OpaqueError
from ..graph.guard_ops import GuardFailed, ValueGuard
from ..graph.opaque_ops import FORWARD, MeasuredCost, note_undo
from ..graph.result_layout import Layout, empty, layout
from ..guards.attribute_snapshot import AttributeSnapshot
from ..guards.variable_scope import OuterVariable
from ..guards.what_ran import WhatRan
from ..tensors.loss_outputs import custom_functions, reachable_nodes
from .eager_state import Modes, PythonState, eager_modes
from .entropy_seeds import entropy_seeds
from .inputs import Inputs, as_leaves
from .live_bytes import LiveBytes, SavedTensors
from .observed_ops import Made, ObservedOps, TooManyBytesError, WriteError, is_dense
from .results import Results
from .run import Ran, accumulated_once, on_tensors, run

TangentsKey = tuple[Layout | None, ...]
NOT_MEASURED = MeasuredCost(0.0, 0)
_running = threading.RLock()  # a submodule's parameters are replaced while it runs
HEADROOM = 1.25  # of the workspace of a part that asks for values, or has once taken more than before
_varied: weakref.WeakSet[nn.Module] = weakref.WeakSet()


@dataclass(frozen=True, eq=False)
class _Run:
    """The state that backward needs of its forward besides tensors."""

    before: PythonState
    seeds: tuple[int, ...]
    sums: tuple[float, ...]

    @contextmanager
    def drawing_again(self, module: nn.Module, tensors: Sequence[Tensor]) -> Iterator[None]:
        """Draw in a block as forward has."""
        with self.before.generators_in_place(module, tensors), entropy_seeds(self.seeds):
            yield


class Backward(NamedTuple):
    """One kind of backward: the positions of the inputs that get a gradient, its layouts, and the cost.

    `most` bytes that ops return may be alive at once, gradients included; None if that can't be known before. Of these,
    `headroom` were not alive when it was recorded.
    """

    places: tuple[int, ...]
    layouts: tuple[Layout, ...]
    cost: MeasuredCost
    most: float | None = None
    headroom: float = 0.0


@dataclass(eq=False)
class OpaquePart:
    """A call of a submodule that runs as it is.

    `made` is what each op of the recorded forward made, and `most_live` how many bytes may be alive at once, results
    included. `varies` if the bytes depend on values. `changes` are the attributes that it changes. `backwards` are by
    `tangents_key`. `outer` are the variables outside of its attributes that it changes, of those that what `ran` names.
    Inputs at the positions `single` get another gradient before this part's, so that only one may be
    added to it. `guard` is the number of the guard that a call breaks which differs from the recorded one.
    """

    path: str
    module: nn.Module
    reason: str
    inputs: Inputs
    expected: Results
    modes: Modes
    made: tuple[Made, ...]
    most_live: float
    varies: bool
    written_layouts: tuple[Layout, ...]
    forward_cost: MeasuredCost = NOT_MEASURED
    changes: tuple[str, ...] = ()
    outer: tuple[OuterVariable, ...] = ()
    ran: WhatRan = field(default_factory=WhatRan)
    guard: int = 0
    single: set[int] = field(default_factory=set)
    backwards: dict[TangentsKey, Backward] = field(default_factory=dict)

    @property
    def results(self) -> tuple[Layout, ...]:
        return (*self.expected.layouts, *self.written_layouts)

    @property
    def assumed(self) -> ValueGuard:
        return ValueGuard(self.guard, (self.expected.form,), "opaque", self.path)

    @property
    def nbytes(self) -> int:
        costs = [self.forward_cost, *(backward.cost for backward in self.backwards.values())]
        return max(cost.workspace for cost in costs)

    @property
    def changed_attributes(self) -> list[tuple[nn.Module, str]]:
        """The attributes that forward changes, with the submodules that have them."""
        places = (name.rpartition(".") for name in self.changes)
        return [(self.module.get_submodule(path), name) for path, _, name in places]

    @property
    def title(self) -> str:
        """Path and type, for messages."""
        return f"{self.path} ({type(self.module).__name__})"

    def cost(self, target: OpOverload) -> MeasuredCost:
        if target is FORWARD:
            return MeasuredCost(self.forward_cost.us, self.nbytes if self.varies else self.forward_cost.workspace)
        costs = [backward.cost for backward in self.backwards.values()]
        return MeasuredCost(max(cost.us for cost in costs), max(cost.workspace for cost in costs))

    def gradients(self, tangents: Sequence[Tensor | None]) -> tuple[Layout, ...]:
        return self.backwards[tangents_key(tangents)].layouts

    def forward(self, tensors: Sequence[Tensor], seeds: Sequence[int] = ()) -> list[Tensor]:
        """Run forward; `seeds` are those that an earlier run took from the system's entropy."""
        with _running:
            before = PythonState.of(self.module, tensors, self.ran)
            try:
                results = self._forward(tensors, before, seeds)
            except GuardFailed:
                before.restore()
                raise
            note_undo(before.restore)
            return results

    def _forward(self, tensors: Sequence[Tensor], before: PythonState, known: Sequence[int]) -> list[Tensor]:
        leaves = as_leaves(self.inputs, tensors)
        observed = ObservedOps(leaves, self.inputs.written, self._limits)
        saved = SavedTensors(observed.kept)
        try:
            with (
                eager_modes(self.modes), saved.replaced(), entropy_seeds(known) as seeds,
                before.attributes.outer.watching(),
            ):  # fmt: skip
                ran = run(self.module, self.inputs, leaves, observed)
            if ran.results.form != self.expected.form or self._is_used_again(ran.results):
                raise self._changed(ran.results.form)
            self._refuse_larger_backward(ran, leaves, observed, saved)
        except TooManyBytesError as error:
            _varied.add(self.module)
            raise self._changed() from error
        except WriteError as error:
            raise self._changed() from error
        outputs = [strided(x, form) for x, form in zip(ran.outputs, self.expected.layouts, strict=True)]
        ticket = tensors[0].new_empty(0)
        ticket.memgraph_run = _Run(  # type: ignore[attr-defined]
            before, tuple(seeds), _sums(outputs) if self.modes.grad else ()
        )
        new = zip(self.inputs.written, self.written_layouts, strict=True)
        return [*outputs, *(strided(ran.written[place], form) for place, form in new), ticket]

    @property
    def _limits(self) -> tuple[float, float]:
        """Bytes that may be alive in forward, results included, and in backward, if that is known."""
        live, known = self.most_live, [x for x in self.backwards.values() if x.most is not None]
        if self.varies and known:  # planned for the larger of both
            beyond_gradients = max((x.most or 0) - nbytes_of(x.layouts) for x in known)
            live = max(live, nbytes_of(self.expected.layouts) + beyond_gradients)
        return live, min((x.most or 0 for x in known), default=math.inf)

    def _refuse_larger_backward(
        self, ran: Ran, leaves: Sequence[Tensor], observed: ObservedOps, saved: SavedTensors
    ) -> None:
        """
        Raises:
            TooManyBytesError: backward would take more than was planned, or that can't be known.
        """
        excess = observed.excess(self.made)
        if not excess:
            return
        if not self.varies:  # so it has no headroom for what kernels take
            raise TooManyBytesError
        # In backward there is a gradient of each tensor at most, beside what is kept of it.
        if all(known.most is not None and 2 * excess <= known.headroom for known in self.backwards.values()):
            return
        kinds = sorted(self.backwards.items(), key=lambda item: item[1].most or 0)
        for number, (kind, known) in enumerate(kinds, 1):
            is_last = number == len(kinds)
            peak = self._backward_peak(ran, leaves, kind, observed, saved, is_last) if known.most is not None else None
            if peak is None or known.most is None or peak > known.most:
                raise TooManyBytesError

    def backward_peak(self, tensors: Sequence[Tensor], kind: TangentsKey, ticket: Tensor) -> float | None:
        """Run forward again, and return the peak of a backward on fake tensors; None if that can't be known."""
        state: _Run = ticket.memgraph_run  # type: ignore[attr-defined]
        leaves = as_leaves(self.inputs, tensors)
        observed = ObservedOps(leaves, self.inputs.written)
        saved = SavedTensors(observed.kept)
        with _running, eager_modes(self.modes), state.before.attributes_in_place(self.module):
            with state.drawing_again(self.module, tensors), saved.replaced():
                ran = run(self.module, self.inputs, leaves, observed)
            return self._backward_peak(ran, leaves, kind, observed, saved)

    def _backward_peak(
        self, ran: Ran, leaves: Sequence[Tensor], kind: TangentsKey, observed: ObservedOps, saved: SavedTensors,
        is_last: bool = True,
    ) -> float | None:  # fmt: skip
        trained = [leaves[place] for place in sorted(self.inputs.trained)]
        after = PythonState.of(self.module, leaves, self.ran)  # a hook may run
        try:
            return backward_peak(ran.outputs, trained, kind, self.modes, observed.kept, saved, is_last=is_last)
        finally:
            after.restore()

    def _is_used_again(self, results: Results) -> bool:
        return any(results.counts.get(place, 0) > 1 for place in self.single)

    def backward(self, tensors: Sequence[Tensor], tangents: Sequence[Tensor | None], ticket: Tensor) -> list[Tensor]:
        gradients = self.gradients_of(tensors, tangents, ticket)
        known = self.backwards[tangents_key(tangents)]
        if tuple(gradients) != known.places:
            raise OpaqueError(
                f"{self.title} runs as it is, and gives gradients to other parameters or arguments than when it was "
                "captured: decide by values of tensors in forward alone"
            )
        return [strided(gradients[place], form) for place, form in zip(known.places, known.layouts, strict=True)]

    def gradients_of(
        self, tensors: Sequence[Tensor], tangents: Sequence[Tensor | None], ticket: Tensor
    ) -> dict[int, Tensor]:
        """Run forward again, and return the gradients by position of the input.

        Generators change as in eager's backward: the second forward leaves them as they are.
        """
        state: _Run = ticket.memgraph_run  # type: ignore[attr-defined]
        leaves = as_leaves(self.inputs, tensors)
        with _running, eager_modes(self.modes), state.before.attributes_in_place(self.module):
            with state.drawing_again(self.module, tensors):
                ran = run(self.module, self.inputs, leaves)
            if not _same_numbers(state.sums, _sums([output.detach() for output in ran.outputs])):
                raise OpaqueError(
                    f"{self.title} runs as it is, once in forward and again in backward, and has given other numbers "
                    "the second time: let it depend on nothing but its arguments, parameters, buffers, attributes, "
                    "and the generators of torch, numpy and random"
                )
            return self._differentiated(leaves, ran.outputs, tangents)

    def _differentiated(
        self, leaves: Sequence[Tensor], outputs: Sequence[Tensor], tangents: Sequence[Tensor | None]
    ) -> dict[int, Tensor]:
        pairs = [(x, tangent) for x, tangent in zip(outputs, tangents, strict=True) if tangent is not None]
        roots, given = [x for x, _ in pairs], [tangent for _, tangent in pairs]
        trained = {place: leaves[place] for place in sorted(self.inputs.trained)}
        runs_python = bool(custom_functions(root.grad_fn for root in roots))
        is_new = runs_python and tangents_key(tangents) not in self.backwards
        before = AttributeSnapshot(self.module) if is_new else None
        with (
            eager_modes(self.modes.without_autocast()),
            on_tensors(self.module, self.inputs, leaves),
            accumulated_once(trained.values()),
        ):
            if runs_python:  # it may ask whether it runs in `backward()`, and call that itself
                torch.autograd.backward(roots, given)
                found: Sequence[Tensor | None] = [leaf.grad for leaf in trained.values()]
            else:
                found = torch.autograd.grad(roots, list(trained.values()), given, allow_unused=True)
        if before is not None and (changed := before.changed(AttributeSnapshot(self.module))) is not None:
            raise CaptureError(f"its backward changes {changed}, which changes its next call")
        return {place: gradient for place, gradient in zip(trained, found, strict=True) if gradient is not None}

    def _changed(self, form: int = 0) -> GuardFailed:
        """Return the error for a call that differs from the recorded one; `form` is that of its results, if known."""
        return GuardFailed(self.guard, (form,))


def has_varied(module: nn.Module) -> bool:
    """Return True if a submodule has once taken more than was planned."""
    return module in _varied


def nbytes_of(layouts: Sequence[Layout]) -> int:
    """Return the bytes of dense tensors."""
    return sum(math.prod(shape) * dtype.itemsize for dtype, shape, _ in layouts)


def tangents_key(tangents: Sequence[Tensor | None]) -> TangentsKey:
    """Return what the layouts of gradients depend on: which results get a tangent, and its strides."""
    return tuple(layout(tangent) if tangent is not None else None for tangent in tangents)


def strided(tensor: Tensor, form: Layout) -> Tensor:
    """Return a tensor in this layout, in a storage that it fills."""
    tensor = tensor.resolve_conj().resolve_neg().detach()
    covered = tensor.numel() and 1 + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    if layout(tensor) == form and tensor.untyped_storage().nbytes() == covered * tensor.itemsize:
        return tensor
    return empty(form, tensor.device).copy_(tensor)


def _sums(outputs: Sequence[Tensor]) -> tuple[float, ...]:
    """Return a number for each result; equal results have equal numbers."""
    sums = [output.detach().sum() for output in outputs]
    return tuple(float(x.real) + float(x.imag) if x.is_complex() else float(x) for x in sums)


def _same_numbers(first: Sequence[float], second: Sequence[float]) -> bool:
    return list(map(repr, first)) == list(map(repr, second))


def backward_peak(
    outputs: Sequence[Tensor], trained: Sequence[Tensor], tangents: Sequence[Layout | None], modes: Modes,
    live: LiveBytes, saved: SavedTensors, *, is_last: bool = True,
) -> float | None:  # fmt: skip
    """Return the peak of bytes, forward's included, that a backward takes for tangents of these layouts.

    `live` has counted forward, and `saved` what autograd would have saved. Return None if backward can't run on fake
    tensors: Python code of an autograd function may do anything.
    """
    if any(isinstance(node, BackwardCFunction) for node in reachable_nodes([output.grad_fn for output in outputs])):
        return None
    roots = [(output, form) for output, form in zip(outputs, tangents, strict=True) if form is not None]
    mode = FakeTensorMode(allow_non_fake_inputs=True, allow_fallback_kernels=False)
    with mode:
        given = [empty(form, output.device) for output, form in roots if form is not None]
    for tensor in given:
        live.add(tensor, 0)
    try:
        with eager_modes(modes.without_autocast()), saved.fake(mode), mode, _Counted(live):
            torch.autograd.grad(
                [output for output, _ in roots], list(trained), given, allow_unused=True, retain_graph=not is_last
            )
    except Exception:  # an op that has no fake results, or a hook that asks for numbers
        return None
    return live.peak


class _Counted(TorchDispatchMode):
    """Counts what ops return."""

    def __init__(self, live: LiveBytes) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._live = live

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if not func.is_view:
            for leaf in filter(is_dense, tree_leaves(result)):
                self._live.add(leaf)
        return result
