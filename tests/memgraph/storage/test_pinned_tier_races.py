"""Whatever streams are late, gradients through pinned memory are eager's to the bit; and no wait is there for nothing.

The device is RAM, whose streams are `tests/support/late_device.py`; the tier is the one that a GPU has.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import memgraph
from memgraph.planning import assembly, replan, search
from memgraph.storage.pinned_pool import PinnedPool
from memgraph.storage.pinned_tier import PinnedTier
from passes.schedule.schedule import Placement
from tests.support.forced_plans import all_given_up, given_up
from tests.support.late_device import Late, Pinned

CPU = torch.device("cpu")
SEEDS = range(16)
WAITS = {
    "what is copied out has not been computed": ("out", "compute"),
    "what is freed has not left": ("compute", "out"),
    "what is copied back goes where something else is read": ("back", "compute"),
    "what is read has not come back": ("compute", "back"),
}


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(48, 48), nn.LayerNorm(48), nn.GELU()) for _ in range(5))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x.square().mean()


@pytest.fixture(autouse=True)
def _planned_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replan, "replanned", lambda *_: None)


def tier(cuda: Any, pool: PinnedPool, device: torch.device, slots: Sequence[int], *_: Any) -> PinnedTier | None:
    return PinnedTier(slots, device, cuda, pool) if slots else None


def gradients(model: nn.Module, called: Any, x: Tensor) -> list[Tensor]:
    model.zero_grad(set_to_none=True)
    loss = called(x)
    loss.backward()
    return [loss, *(p.grad for p in model.parameters() if p.grad is not None)]


def batch(turn: int) -> Tensor:
    return torch.randn(300, 48, generator=torch.Generator().manual_seed(turn))


@pytest.fixture(params=[given_up(Placement.OFFLOAD_BLOCKING), all_given_up], ids=["offload", "mixed"], name="planned")
def _planned(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(search, "make_plan", request.param)


def right(monkeypatch: pytest.MonkeyPatch, late: Late) -> bool:
    """Return True if all gradients of late steps are eager's, for all seeds."""
    pool = PinnedPool(lambda: 1 << 30, Pinned())
    monkeypatch.setattr(assembly, "open_tier", partial(tier, late, pool))
    plain, model = Layers(), Layers()
    ours = memgraph.compile(model, "1GB")
    gradients(model, ours, batch(0))  # plans, and is measured
    gradients(model, ours, batch(0))  # is timed
    assert sum(op.fn == "memgraph.offload.default" for op in ours.plan.forecast.trace.ops) >= 5
    equal = True
    for seed in SEEDS:
        late.seed(seed)
        with late.noting():
            found = gradients(model, ours, batch(seed))
        expected = gradients(plain, plain, batch(seed))
        equal &= len(found) == len(expected) and all(map(torch.equal, found, expected))
        assert len(pool.free) == 1 and not pool.in_use
    return equal


@pytest.mark.long
@pytest.mark.usefixtures("planned")
def test_gradients_are_eagers_however_late_the_streams_are(monkeypatch: pytest.MonkeyPatch) -> None:
    assert right(monkeypatch, Late(0))


@pytest.mark.long
@pytest.mark.parametrize("missing", WAITS)
def test_without_any_one_of_the_waits_they_are_not(missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(search, "make_plan", given_up(Placement.OFFLOAD_BLOCKING))
    assert not right(monkeypatch, Late(0, frozenset({WAITS[missing]})))


# --- where the graph gives no order


@pytest.mark.parametrize("deaf", [frozenset(), frozenset({("back", "out")})], ids=["waits", "deaf"])
def test_what_comes_back_has_left_before(deaf: frozenset[tuple[str, str]]) -> None:
    equal = True
    for seed in SEEDS:
        late = Late(seed, deaf)
        lease = PinnedTier([40_000], CPU, late, PinnedPool(lambda: 1 << 30, Pinned())).lease()
        with late.noting():
            x = torch.ones(10_000) * seed
            back = torch.empty(10_000)
            lease.offload(0, x)
            lease.reload(0, back)  # x was not freed
            lease.wait(0)
            found = back * 1
        equal &= torch.equal(found, torch.full((10_000,), float(seed)))
    assert equal == (not deaf)


@pytest.mark.parametrize("deaf", [frozenset(), frozenset({("other", "back")})], ids=["waits", "deaf"])
def test_a_step_on_another_stream_uses_the_block_only_when_the_last_one_has_read_it(
    deaf: frozenset[tuple[str, str]],
) -> None:
    equal = True
    for seed in SEEDS:
        late = Late(seed, deaf)
        tier = PinnedTier([40_000], CPU, late, PinnedPool(lambda: 1 << 30, Pinned()))
        with late.noting():
            first = tier.lease()
            sent, back = torch.ones(10_000) * 3, torch.empty(10_000)
            first.offload(0, sent)
            first.free(0)
            first.reload(0, back)
            first.wait(0)
            first.release()
            with late.stream(late.Stream(CPU)):
                second = tier.lease()
                second.offload(0, torch.zeros(10_000))
                second.free(0)
                second.release()
        equal &= torch.equal(back, torch.full((10_000,), 3.0))
    assert equal == (not deaf)


def test_a_step_that_is_left_in_the_middle_ends_its_copies_before_their_bytes_are_reused() -> None:
    for seed in SEEDS:
        late = Late(seed)
        tier = PinnedTier([40_000], CPU, late, PinnedPool(lambda: 1 << 30, Pinned()))
        with late.noting():
            lease = tier.lease()
            sent, back = torch.ones(10_000) * 3, torch.empty(10_000)
            lease.offload(0, sent)
            lease.reload(0, back)
            del sent, back
            others = [torch.ones(10_000) * 5 for _ in range(3)]
            lease.release()
            lease.release()
            others += [torch.ones(10_000) * 5 for _ in range(3)]
        assert all(bool((other == 5).all()) for other in others)
        with pytest.raises(ValueError, match="this lease is released"):
            lease.offload(0, torch.zeros(4))
