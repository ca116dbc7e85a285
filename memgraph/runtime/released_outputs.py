"""Count on a caller who lets go of a step's outputs before backward, where no plan fits otherwise.

    loss = model(x).square().mean()    # nobody has what model(x) returned any more
    loss.backward()                    # so its bytes are gone, and what comes to backward goes when it was read

A plan counts outputs to the end of the step, for most loops keep them.  One that does not count them is asked for only
if there is none that does; then backward looks whether they are gone, before it takes any memory.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

import passes
from passes import Machine, PlanResult, Trace, predict
from passes.ir.liveness import RELEASED, released

from ..errors import BudgetError
from ..report.report import Report

# Autograd hands gradients over, and keeps none; older versions of torch keep them until backward has ended.
HANDS_OVER = hasattr(torch.autograd.Function, "boxed_grads_call")
ALONE = 2  # who refers to a tensor in a list that nobody else has: the list, and the call that asks
ASKING = 1  # the object by which a storage is asked refers to it too


def search_with_released(search: Callable[[Trace, Machine], PlanResult], trace: Trace, machine: Machine) -> PlanResult:
    """What `search` finds for a step, or else for the same step of a caller who lets go of its outputs.

    Raises:
        passes.BudgetError: it finds nothing for either.
    """
    try:
        return search(trace, machine)
    except passes.BudgetError as error:
        lent = most_released(trace)
        if lent == trace:
            raise
        try:
            return search(lent, machine)
        except passes.BudgetError as other:
            text = f"In a loop that lets go of the model's outputs before backward, budget={other.smallest} does."
            raise passes.BudgetError(f"{error}\n{text}", error.budget, error.smallest) from None


def most_released(trace: Trace) -> Trace:
    """Return the step that takes least of those that `fitting` searches."""
    return released(trace) if HANDS_OVER else trace


def releases_outputs(report: Report) -> bool:
    """Whether a plan counts on its caller to let go of outputs."""
    return any(kind == RELEASED for kind, _ in report.forecast.trace.outputs)


class BorrowedOutputs:
    """Tensors of more than one number, looked at without being held."""

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        found = {tensor.untyped_storage()._cdata: tensor.untyped_storage() for tensor in tensors if tensor.dim()}
        self._storages = [(StorageWeakRef(storage), storage.nbytes()) for storage in found.values()]

    def gone_nbytes(self) -> int:
        """The bytes of those that nobody has any more."""
        return sum(nbytes for ref, nbytes in self._storages if ref.expired())

    def kept_nbytes(self, but: Iterable[Tensor]) -> int:
        """The bytes of those that somebody has beside these tensors."""
        ours = Counter[int]()
        for tensor in {id(tensor): tensor for tensor in but}.values():
            ours[tensor.untyped_storage()._cdata] += 1 + tensor._is_view()  # which refers to what it is a view of
        return sum(nbytes for ref, nbytes in self._storages if _holders(ref) > ours[ref.cdata])


def refuse_kept(
    outputs: BorrowedOutputs, tangents: Sequence[Tensor | None], saved: Iterable[Tensor], report: Report
) -> str:
    """Look whether outputs, and what has come to backward, are gone, or will be once they were read; what is still
    there, in words.  `saved` are the tensors by which the step holds what backward reads.

    Raises:
        BudgetError: so much of it is there that the step would take more than its budget.
    """
    kept = outputs.kept_nbytes(saved) + sum(_kept_nbytes(tangents))
    needed = report.peak + kept
    if needed > report.budget and (needed := min(needed, _peak_with_all(report))) > report.budget:
        text = (
            f"the budget of {report.budget} bytes is enough only if the model's outputs are gone when backward "
            f"begins, and {kept} bytes of them, or of their gradients, are still held: let go of them before "
            f"backward (del outputs), or give budget={needed}"
        )
        raise BudgetError(text, report.budget, needed)
    return f"{kept} bytes of outputs, or of their gradients, were held through backward" if kept else ""


def _peak_with_all(report: Report) -> int:
    """The peak of the same plan if outputs, and what comes to backward, are held to the end."""
    trace = report.forecast.trace
    held = (("output" if kind == RELEASED else kind, value) for kind, value in trace.outputs)
    return predict(replace(trace, outputs=tuple(held)), report.machine).peak


def _holders(ref: StorageWeakRef) -> int:
    """How many tensors hold a storage."""
    return 0 if ref.expired() else torch._C._storage_Use_Count(ref.cdata) - ASKING


class ReleaseWatcher:
    """Tells a meter, which does not see it, when tensors go that came before its window: asked behind each op."""

    def __init__(self, tensors: Iterable[Tensor], gone: Callable[[int], None]) -> None:
        self._lent, self._gone, self._told = BorrowedOutputs(tensors), gone, 0

    def __call__(self, op: str) -> None:
        nbytes = self._lent.gone_nbytes()
        if nbytes > self._told:
            self._gone(nbytes - self._told)
            self._told = nbytes


def _kept_nbytes(tangents: Sequence[Tensor | None]) -> Iterable[int]:
    """The bytes of each tangent that somebody beside this list has."""
    for i in range(len(tangents)):
        tangent = tangents[i]
        if tangent is not None and tangent.dim():
            others = sys.getrefcount(tangent) - 1 > ALONE or tangent._use_count() > 1  # type: ignore[attr-defined]
            yield tangent.untyped_storage().nbytes() * others
