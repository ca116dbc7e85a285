"""Outputs that the caller frees before backward, and the check that they are freed if a plan counts on it.

    loss = model(x).square().mean()    # the result of model(x) is freed here
    loss.backward()                    # so its bytes are free, and each tangent is freed once it was read

Most loops keep the outputs, and a plan counts them to the end of the step.  A plan that does not count them is searched
for only if there is no other.  Its backward checks that they are freed before it allocates memory.
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
from passes import Trace, make_plan, predict
from passes.ir.liveness import RELEASED, released
from passes.pipeline import FITTING

from ..errors import BudgetError
from ..report.report import Report

# Whether autograd gives up its references to tangents; older versions of torch keep them until backward ends.
FREES_TANGENTS = hasattr(torch.autograd.Function, "boxed_grads_call")
ALONE = 2  # references to a tensor that is only in a list: from the list, and from the call that counts
COUNTING = 1  # the object that counts a storage's references holds one


def most_released(trace: Trace) -> Trace:
    """Return the step of a caller that frees all outputs."""
    return released(trace) if FREES_TANGENTS else trace


def releases_outputs(report: Report) -> bool:
    """Return True if the plan relies on the caller to free outputs."""
    return any(kind == RELEASED for kind, _ in report.forecast.trace.outputs)


class BorrowedOutputs:
    """Tensors that are observed without being kept alive; scalars are not."""

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        storages = {tensor.untyped_storage()._cdata: tensor.untyped_storage() for tensor in tensors if tensor.dim()}
        self._storages = [(StorageWeakRef(storage), storage.nbytes()) for storage in storages.values()]

    def gone_nbytes(self) -> int:
        """Return the bytes that are freed."""
        return sum(nbytes for ref, nbytes in self._storages if ref.expired())

    def kept_nbytes(self, but: Iterable[Tensor]) -> int:
        """Return the bytes that are kept alive by others than these tensors."""
        own = Counter[int]()
        for tensor in {id(tensor): tensor for tensor in but}.values():
            own[tensor.untyped_storage()._cdata] += 1 + tensor._is_view()  # a view also refers to its base
        return sum(nbytes for ref, nbytes in self._storages if _references(ref) > own[ref.cdata])


def refuse_kept(
    outputs: BorrowedOutputs, tangents: Sequence[Tensor | None], saved: Iterable[Tensor], report: Report
) -> str:
    """Check that outputs and tangents are freed, or will be when they have been read.

    Args:
        saved: the tensors that the step itself keeps for backward.

    Returns:
        a note of what is still held, empty if nothing is.

    Raises:
        BudgetError: so much is held that the step would exceed its budget.
    """
    kept = outputs.kept_nbytes(saved) + sum(_kept_nbytes(tangents))
    if report.peak + kept > report.budget and _peak_with_all(report) > report.budget:
        needed = _smallest_with_all(report)
        text = (
            f"the budget of {report.budget} bytes is enough only if the model's outputs are freed when backward "
            f"begins, and {kept} bytes of them, or of their gradients, are still held: free them before backward "
            f"(del outputs; what forward stores in attributes is held as well), or give budget={needed}"
        )
        raise BudgetError(text, report.budget, needed)
    return f"{kept} bytes of outputs, or of their gradients, were held through backward" if kept else ""


def _peak_with_all(report: Report) -> int:
    """Return the peak of the same plan if outputs and tangents are held to the end."""
    return predict(_with_all(report.forecast.trace), report.machine).peak


def _smallest_with_all(report: Report) -> int:
    """Return a budget for which the quick passes find a plan that holds them to the end: so will a new process."""
    try:
        make_plan(_with_all(report.choice.captured.trace), replace(report.machine, budget=0), FITTING)
    except passes.BudgetError as error:
        return error.smallest
    return 0


def _with_all(trace: Trace) -> Trace:
    kept = (("output" if kind == RELEASED else kind, value) for kind, value in trace.outputs)
    return replace(trace, outputs=tuple(kept))


def _references(ref: StorageWeakRef) -> int:
    return 0 if ref.expired() else torch._C._storage_Use_Count(ref.cdata) - COUNTING


class ReleaseWatcher:
    """Tells a meter when tensors are freed that it did not see allocated; called after each op."""

    def __init__(self, tensors: Iterable[Tensor], gone: Callable[[int], None]) -> None:
        self._tensors, self._gone, self._told = BorrowedOutputs(tensors), gone, 0

    def __call__(self, op: str) -> None:
        nbytes = self._tensors.gone_nbytes()
        if nbytes > self._told:
            self._gone(nbytes - self._told)
            self._told = nbytes


def _kept_nbytes(tangents: Sequence[Tensor | None]) -> Iterable[int]:
    """Yield the bytes of each tangent that is held outside of this list."""
    for i in range(len(tangents)):
        tangent = tangents[i]
        if tangent is not None and tangent.dim():
            others = sys.getrefcount(tangent) - 1 > ALONE or tangent._use_count() > 1  # type: ignore[attr-defined]
            yield tangent.untyped_storage().nbytes() * others
