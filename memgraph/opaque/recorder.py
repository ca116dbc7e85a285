"""Turn calls of submodules in a real run of the whole module into parts, and measure them.

    with recorder.recording(): model(x)            ->   recorder.calls, each with a part and the cost of its forward
    recorder.measure_backward(recorded, tangents)  ->   layouts of the gradients, and the cost of backward

Each forward runs twice. The second run begins where the first one began, and must give the same bits: that is what
backward relies on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from ..errors import CaptureError
from ..graph.guard_ops import GuardFailed
from ..graph.opaque_ops import MeasuredCost, register_part
from ..graph.recurrent.autograd_modes import saved_tensor_hooks
from ..graph.result_layout import Layout, layout
from ..guards.attribute_snapshot import AttributeSnapshot, attached_values
from ..guards.refused_collectives import RefusedCollectiveError
from ..guards.what_ran import WhatRan
from ..profile.memory_meter import measure_peak, resident_bytes
from ..system.profiler_thread import run_unprofiled
from ..system.timer import timed_us
from .eager_state import Modes, PythonState, eager_modes
from .entropy_seeds import entropy_seeds
from .inputs import Inputs, as_leaves, inputs_of
from .live_bytes import SavedTensors
from .module_calls import taken_calls
from .observed_ops import ObservedOps, WriteError
from .part import HEADROOM, Backward, OpaquePart, has_varied, nbytes_of, tangents_key
from .refused_dropout import RefusedDropoutError, refuse_hidden_dropout
from .run import Ran, run

Around = Callable[[], AbstractContextManager[object]]


class NotOpaqueError(CaptureError):
    """A submodule can't run as it is inside of a captured step.

    Attributes:
        module: the submodule.
        reason: in one sentence.
    """

    def __init__(self, path: str, module: nn.Module, reason: object) -> None:
        super().__init__(f"{path} ({type(module).__name__}) can't run as it is inside of a captured step: {reason}")
        self.module, self.reason = module, str(reason)


@dataclass(eq=False)
class Recorded:
    """A part, the number by which ops find it, and what its forward read when it was recorded, with its ticket."""

    part: OpaquePart
    number: int
    tensors: tuple[Tensor, ...]
    ticket: Tensor


class Recorder:
    """Records the calls of some submodules.

    Args:
        reasons: for each submodule, its path and why it is opaque.
        as_in_eager: lets code in a block do all that it does in eager.
    """

    def __init__(self, reasons: Mapping[nn.Module, tuple[str, str]], as_in_eager: Around = nullcontext) -> None:
        self.reasons, self.as_in_eager = reasons, as_in_eager
        self.calls: list[Recorded] = []
        self._backward_nbytes = 0  # the most that measuring a backward takes beside what calls have read

    def backward_nbytes(self, others: Iterable[Tensor]) -> int:
        """Return the most that measuring backward has taken beside other tensors; 0 if none was measured.

        What all calls have read is held meanwhile.
        """
        if not self._backward_nbytes:
            return 0
        known = {tensor.untyped_storage()._cdata for tensor in others}
        read = (tensor for recorded in self.calls for tensor in recorded.tensors)
        held = resident_bytes(tensor for tensor in read if tensor.untyped_storage()._cdata not in known)
        generators = 2 * torch.get_rng_state().nbytes  # as they were before, and as they are while forward runs again
        return held + self._backward_nbytes + generators

    def close(self) -> None:
        """Free what calls have read: the graph of the trace may live on."""
        for recorded in self.calls:
            recorded.tensors, recorded.ticket = (), torch.empty(0)

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Record what is called in this block."""
        self.calls.clear()
        with taken_calls(self.reasons, self._call):
            yield

    def measure_backward(self, recorded: Recorded, tangents: Sequence[Tensor | None]) -> Backward:
        """Return the backward of a part for tangents of these layouts, measured."""
        part, device, key = recorded.part, recorded.tensors[0].device, tangents_key(tangents)
        if key in part.backwards:
            return part.backwards[key]
        with _disable_current_modes(), saved_tensor_hooks(are_off=False), self.as_in_eager():
            real = [None if tangent is None else _ones(layout(tangent), device) for tangent in tangents]
            run = partial(part.gradients_of, recorded.tensors, real, recorded.ticket)
            before = PythonState.of(part.module, recorded.tensors, part.ran)
            try:
                found, us = timed_us(run, device)
                _refuse_sparse(part, found)
                places, layouts = tuple(found), tuple(map(layout, found.values()))
                del found
                part.backwards[key] = Backward(places, layouts, MeasuredCost(us, 0))
                gradients, workspace = _measured(lambda: part.backward(recorded.tensors, real, recorded.ticket), device)
                nbytes = workspace + resident_bytes([*gradients, *(each for each in real if each is not None)])
                self._backward_nbytes = max(self._backward_nbytes, nbytes)
                del gradients
                before.restore()
                peak = part.backward_peak(recorded.tensors, key, recorded.ticket)
            except CaptureError as error:
                raise NotOpaqueError(part.path, part.module, error) from error
            finally:
                before.restore()
        headroom = HEADROOM if part.varies else 1.0
        most = None if peak is None else _with_headroom(peak, nbytes_of(layouts), headroom)
        cost = MeasuredCost(us, int(headroom * workspace))
        part.backwards[key] = Backward(places, layouts, cost, most, (most or 0) - (peak or 0))
        return part.backwards[key]

    def _call(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        path, reason = self.reasons[module]
        try:
            return self._recorded(module, path, reason, args, kwargs)
        except (RefusedCollectiveError, RefusedDropoutError):
            raise
        except (CaptureError, GuardFailed) as error:
            raise NotOpaqueError(path, module, error) from error

    def _recorded(
        self, module: nn.Module, path: str, reason: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:  # fmt: skip
        inputs, tensors = inputs_of(module, args, kwargs)
        refuse_hidden_dropout(path, module, {tensor.device.type for tensor in tensors})
        ran = WhatRan(module.named_modules())
        before, attached = PythonState.of(module, tensors, ran), _attached(module)
        modes = Modes.now(tensors[0].device)
        with _disable_current_modes(), self.as_in_eager():
            with entropy_seeds() as seeds, before.attributes.outer.watching():
                first, observed, us = _first_run(module, inputs, tensors, modes)
            written, varies = tuple(sorted(first.written)), observed.asks or has_varied(module)
            headroom = HEADROOM if varies else 1.0
            results_nbytes = nbytes_of(first.results.layouts)
            part = OpaquePart(
                path, module, reason, replace(inputs, written=written), first.results, modes, tuple(observed.made),
                _with_headroom(observed.live.peak, results_nbytes, headroom), varies,
                tuple(layout(first.written[place]) for place in written), ran=ran,
            )  # fmt: skip
            before.restore()
            kept = tuple(x.clone() if place in written else x.detach() for place, x in enumerate(tensors))
            results, workspace = _measured(lambda: part.forward(kept, seeds), tensors[0].device)
            if varies and not modes.grad:  # an op that makes too much is noticed once it has
                workspace += max((nbytes for _, nbytes in observed.made), default=0)
            _refuse_other(results, [*first.outputs, *(first.written[place] for place in written)])
            before.restore_generators(drawn=[torch.default_generator])  # so that what follows draws as in eager
        if stored := [name for name, number in _attached(module).items() if attached.get(name) != number]:
            raise CaptureError(f"forward stores a tensor in its attribute {stored[0]}")
        after = AttributeSnapshot(module, ran=ran)
        outer = before.attributes.outer.changes(after.outer)
        if kept_elsewhere := [variable.title for variable in outer if after.outer.holds(variable, Tensor)]:
            raise CaptureError(f"forward stores a tensor in {kept_elsewhere[0]}")
        part = replace(
            part, forward_cost=MeasuredCost(us, int(headroom * workspace)), changes=before.attributes.changes(after),
            outer=outer,
        )  # fmt: skip
        self.calls.append(Recorded(part, register_part(part), kept, results[-1]))
        with torch.no_grad():
            for place, value in first.written.items():
                tensors[place].copy_(value)
        return part.expected.filled(first.outputs, tensors)


def _first_run(
    module: nn.Module, inputs: Inputs, tensors: Sequence[Tensor], modes: Modes
) -> tuple[Ran, ObservedOps, float]:
    """Run a call on copies of its buffers, and return what it made and wrote, its ops and its microseconds."""
    buffers = {inputs.names[name] for name, _ in module.named_buffers(remove_duplicate=False)}
    leaves = as_leaves(replace(inputs, written=tuple(sorted(buffers))), tensors)
    observed = ObservedOps(leaves, buffers)
    try:
        with eager_modes(modes), SavedTensors(observed.kept).replaced():
            ran, us = timed_us(partial(run, module, inputs, leaves, observed), tensors[0].device)
    except WriteError as error:
        raise CaptureError(f"forward changes {inputs.label(error.place)} in place") from error
    written = {place: leaves[place].detach() for place in observed.written} | ran.written
    return ran._replace(written=written), observed, us


def _with_headroom(peak: float, results: int, headroom: float) -> float:
    """Return a peak with headroom on what is no result."""
    return peak + (headroom - 1) * max(0, peak - results)


def _measured(work: Callable[[], list[Tensor]], device: torch.device) -> tuple[list[Tensor], int]:
    """Return results, and the bytes that were allocated beyond them."""
    results, allocated = run_unprofiled(partial(measure_peak, work, device))
    if allocated is None:  # a profiler was started meanwhile
        return _measured(work, device)
    # Less than the results is left if older tensors were freed meanwhile: autograd's thread for a device may hold the
    # gradients of its last task for a moment longer. The peak is that much too low then.
    return results, max(0, allocated.peak - min(allocated.net, resident_bytes(results)))


def _refuse_other(results: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
    """Raise if two runs from the same state gave different bits."""
    for result, before in zip(results, expected, strict=False):
        if not torch.equal(_bits(result), _bits(before)):
            raise CaptureError(
                "forward gives other numbers when it runs again with the same arguments, parameters, buffers, "
                "attributes and generators, and backward runs it again"
            )


def _refuse_sparse(part: OpaquePart, gradients: Mapping[int, Tensor]) -> None:
    for place, gradient in gradients.items():
        if gradient.layout != torch.strided:
            reason = f"the gradient of {part.inputs.label(place)} is {gradient.layout}: use sparse=False"
            raise NotOpaqueError(part.path, part.module, reason)


def _bits(tensor: Tensor) -> Tensor:
    return torch.nan_to_num(tensor.detach().resolve_conj().resolve_neg())


def _ones(form: Layout, device: torch.device) -> Tensor:
    """Return ones in this layout, which may repeat elements."""
    dtype, shape, strides = form
    last = sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
    return torch.ones(last + 1, dtype=dtype, device=device).as_strided(shape, strides)


def _attached(module: nn.Module) -> dict[str, int]:
    """Return the tensors in attributes besides parameters and buffers, by name."""
    return {
        f"{path}.{name}" if path else name: id(value)
        for path, child in module.named_modules()
        for name, value in attached_values(child)
        if isinstance(value, Tensor) and name not in child._parameters and name not in child._buffers
    }
