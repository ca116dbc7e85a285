"""A flat range is cast as its twin casts it."""

from __future__ import annotations

from itertools import product

import pytest
import torch

from memgraph.kernels import cast as room
from memgraph.kernels.cast import cast, cast_by, copied
from memgraph.storage.wire_cast import narrow, widen
from tests.support.numbers import DEVICE, FLOATS, WAY, hard, same


@pytest.mark.parametrize("seed", [None, 8])
@pytest.mark.parametrize(("of", "into"), [*product(FLOATS[:1], FLOATS[1:]), *product(FLOATS[1:], FLOATS[:1])], ids=str)
def test_a_kernel_casts_as_its_twin(of: torch.dtype, into: torch.dtype, seed: int | None) -> None:
    for count in (0, 1, 1024, 1500):
        x = hard(count, of)
        ours, theirs = (torch.full((count,), 7, device=DEVICE).to(into) for _ in range(2))
        cast_by(WAY, x, ours, seed)
        cast_by(None, x, theirs, seed)
        assert same(ours, theirs)


@pytest.fixture(name="chosen")
def _chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel was measured to be faster."""
    monkeypatch.setattr(room, "way_of", lambda *_: WAY)


@pytest.mark.usefixtures("chosen")
def test_a_value_goes_its_way_and_back_as_on_a_cpu() -> None:
    for x in (hard(1200).view(4, 3, 100), hard(600).view(20, 30).t(), hard(1).view(()), hard(0).view(0, 3)):
        thin = copied(x, torch.bfloat16)
        assert thin is not None and thin.stride() == x.stride() and same(thin, narrow(x))
        wide = copied(thin, torch.float32)
        assert wide is not None and wide.stride() == x.stride() and same(wide, widen(thin))


def test_what_was_not_measured_is_left_to_the_twins() -> None:
    assert copied(hard(100), torch.bfloat16) is None


@pytest.mark.usefixtures("chosen")
def test_what_is_not_flat_is_refused() -> None:
    with pytest.raises(ValueError, match="gaps or overlaps"):
        copied(hard(100).view(10, 10)[:, ::2], torch.bfloat16)
    with pytest.raises(ValueError, match="one length"):
        cast(hard(3), hard(4))
