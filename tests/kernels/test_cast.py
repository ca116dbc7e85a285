"""The cast kernel gives the bits of the casts on a CPU."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from memgraph.kernels import cast
from memgraph.kernels.cast import cast_by, cast_copy
from memgraph.storage.wire_cast import narrow, widen
from tests.support.numbers import CONFIG, hard, same


@pytest.mark.parametrize(
    ("of", "into", "fallback"),
    [(torch.float32, torch.bfloat16, narrow), (torch.bfloat16, torch.float32, widen)],
    ids=["narrow", "widen"],
)
def test_a_kernel_casts_as_its_fallback(
    of: torch.dtype, into: torch.dtype, fallback: Callable[[Tensor], Tensor]
) -> None:
    for count in (0, 1, 7, 1024, 1500, 5000):
        x = hard(count, of)
        assert same(cast_by(CONFIG, x, into).cpu(), fallback(x.cpu()))


def test_to_the_nearest_is_what_torch_does_but_for_infinities() -> None:
    x = hard(4000)
    ours, theirs = cast_by(CONFIG, x, torch.bfloat16).cpu(), x.cpu().to(torch.bfloat16)
    x = x.cpu()
    within = x.abs() <= torch.finfo(torch.bfloat16).max
    assert same(ours[within], theirs[within]) and int(within.sum()) > 2000
    beyond = x.isfinite() & ~within
    assert torch.equal(ours.float()[beyond], torch.finfo(torch.bfloat16).max * x[beyond].sign())
    assert torch.equal(ours.float()[x.isinf()], x[x.isinf()])
    assert bool(ours.float()[x.isnan()].isnan().all())


@pytest.mark.parametrize("shift", [1, 2, 3])
def test_a_tensor_may_begin_anywhere(shift: int) -> None:
    x = hard(2100)[shift:]
    assert same(cast_by(CONFIG, x, torch.bfloat16).cpu(), narrow(x.cpu()))


@pytest.fixture(name="tuned")
def _tuned(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel was measured to be faster."""
    monkeypatch.setattr(cast, "best_config", lambda *_: CONFIG)


@pytest.mark.usefixtures("tuned")
def test_a_copy_has_the_strides_of_its_tensor() -> None:
    for x in (hard(1200).view(4, 3, 100), hard(600).view(20, 30).t(), hard(1).view(()), hard(0).view(0, 3)):
        thin = cast_copy(x, torch.bfloat16)
        assert thin is not None and thin.stride() == x.stride() and same(thin.cpu(), narrow(x.cpu()))
        wide = cast_copy(thin, torch.float32)
        assert wide is not None and wide.stride() == x.stride() and same(wide.cpu(), widen(thin.cpu()))


def test_what_was_not_measured_is_left_to_the_fallback() -> None:
    assert cast_copy(hard(100), torch.bfloat16) is None


@pytest.mark.usefixtures("tuned")
def test_a_tensor_with_gaps_is_refused() -> None:
    with pytest.raises(ValueError, match="gaps or overlaps"):
        cast_copy(hard(100).view(10, 10)[:, ::2], torch.bfloat16)
