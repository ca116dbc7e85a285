"""Host memory as a tier before the disk: equal bits, no more in any place than is allowed, and what is refused."""

from __future__ import annotations

import copy
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import memgraph
from memgraph.errors import PlanError
from memgraph.storage.file_space import FileSpace
from memgraph.storage.file_tier import FileTier
from memgraph.storage.spill_file import SpillError
from passes import Offload, Stream
from passes.schedule.tier_choice import tier_nbytes
from tests.support.smallest_budget import smallest_of

WIDTH, LAYERS = 160, 6


def module() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(each for _ in range(LAYERS) for each in (nn.Linear(WIDTH, WIDTH), nn.Tanh())))


COUNT = sum(parameter.numel() for parameter in module().parameters())
BUDGET, HOST = 6 * COUNT + (1 << 20), 4 * COUNT  # of bytes; the disk's copies are staged in 1 MiB


class Pair:
    """A model that is trained within a budget beside a plain one."""

    def __init__(self, budget: int = BUDGET, **options: Any) -> None:
        self.plain, self.ours = module(), module()
        self.theirs, self.optimizer = (
            torch.optim.AdamW(each.parameters(), lr=0.01) for each in (self.plain, self.ours)
        )
        self.model: Any = memgraph.compile(self.ours, budget, optimizer=self.optimizer, time_limit=0.0, **options)

    def step(self, rows: int = 8) -> None:
        x = torch.randn(rows, WIDTH)
        for called, optimizer in ((self.plain, self.theirs), (self.model, self.optimizer)):
            optimizer.zero_grad()
            called(x).square().mean().backward()
            optimizer.step()

    def assert_same(self) -> None:
        assert all(map(torch.equal, self.ours.parameters(), self.plain.parameters()))
        ours, plain = (self._states(*each) for each in ((self.optimizer, self.ours), (self.theirs, self.plain)))
        assert all(map(torch.equal, ours, plain))

    @staticmethod
    def _states(optimizer: torch.optim.Optimizer, of: nn.Module) -> Iterator[Tensor]:
        return (value for parameter in of.parameters() for value in optimizer.state[parameter].values())

    @property
    def tiers(self) -> set[str]:
        """The tiers of what the plan offloads; the nearest is empty."""
        return {each.to for each in self.model.plan.plan if isinstance(each, Offload | Stream)}


def memory_nbytes() -> int:
    """Return the bytes of this process's files in memory, as the kernel counts them."""
    found: dict[int, int] = {}
    for entry in Path("/proc/self/fd").iterdir():
        try:
            if os.readlink(entry).startswith("/memfd:memgraph"):
                found[entry.stat().st_ino] = entry.stat().st_blocks * 512
        except OSError:  # the descriptor of the folder itself
            continue
    return sum(found.values())


def test_a_step_keeps_to_all_its_budgets_and_trains_as_the_plain_one() -> None:
    pair = Pair(host=HOST)
    before = memory_nbytes()
    for _ in range(4):
        pair.step()
    pair.assert_same()
    report = pair.model.plan
    assert pair.tiers == {"", "disk"}
    assert report.measured <= report.peak <= BUDGET
    needed = tier_nbytes(report.plan, report.choice.captured.trace)
    assert 0 < memory_nbytes() - before <= needed[""] <= HOST
    assert "offloads" in str(report) and " to host, of " in str(report) and " to disk" in str(report)


def test_with_room_for_all_nothing_goes_to_the_disk() -> None:
    pair = Pair(host=1 << 30)
    for _ in range(2):
        pair.step()
    pair.assert_same()
    assert pair.tiers == {""}


def test_other_shapes_share_the_room() -> None:
    pair = Pair(host=HOST)
    before = memory_nbytes()
    for rows in (8, 64, 8, 200, 64, 8):
        pair.step(rows)
        assert memory_nbytes() - before <= HOST
    pair.assert_same()


def test_gradients_add_up_on_their_tiers() -> None:
    pair = Pair(host=HOST)
    for _ in range(2):
        for called, optimizer in ((pair.plain, pair.theirs), (pair.model, pair.optimizer)):
            optimizer.zero_grad()
            for seed in (1, 2):
                called(torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(seed))).square().mean().backward()
            optimizer.step()
    pair.assert_same()


def test_a_loaded_state_and_a_copy_train_on() -> None:
    pair = Pair(host=HOST)
    pair.step()
    saved = copy.deepcopy(pair.optimizer.state_dict()), copy.deepcopy(pair.ours.state_dict())
    pair.step()
    for optimizer, of in ((pair.optimizer, pair.ours), (pair.theirs, pair.plain)):
        optimizer.load_state_dict(copy.deepcopy(saved[0]))
        of.load_state_dict(saved[1])
    pair.step()
    pair.assert_same()


def test_only_host_memory() -> None:
    pair = Pair(offload="host", host=1 << 30)
    pair.step()
    pair.assert_same()
    assert pair.tiers == {""} and pair.model.plan.machine.tier == "host" and not pair.model.plan.machine.behind


def test_a_saved_plan_has_its_tiers() -> None:
    pair = Pair(host=HOST)
    pair.step()
    text = pair.model.plan.to_json()
    again = Pair(host=HOST, plan=text)
    again.step()
    again.assert_same()
    assert again.model.plan.plan == pair.model.plan.plan
    with pytest.raises(PlanError, match="offloads to disk behind host, which needs host="):
        Pair(plan=text).step()


def test_a_plan_is_read_from_the_cache() -> None:
    pair, again = Pair(host=HOST), Pair(host=HOST)
    pair.step()
    again.step()
    assert again.model.plan.plan == pair.model.plan.plan
    again.assert_same()


@pytest.mark.long
def test_runs_in_flight_go_to_the_disk_when_host_memory_is_full() -> None:
    x = torch.randn(200, WIDTH)
    smallest = smallest_of(lambda: Pair(BUDGET, host=HOST, forwards=8).model(x))
    pair, before = Pair(smallest, host=HOST, forwards=8), memory_nbytes()
    loss = sum(pair.model(x).square().mean() for _ in range(8))
    assert memory_nbytes() - before <= HOST
    loss.backward()
    sum(pair.plain(x).square().mean() for _ in range(8)).backward()
    for ours, theirs in zip(pair.ours.parameters(), pair.plain.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad)


def test_without_a_disk_what_host_memory_has_no_room_for_is_refused_by_name() -> None:
    tier = FileTier([1 << 16], FileSpace(None, cap=3 << 15))
    lease = tier.lease()
    with pytest.raises(SpillError, match=r"host memory, where 65536 of 98304 are taken: allow more with"):
        tier.lease()
    lease.release()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"offload": "host"}, "can go to 'disk' only; give 'auto', 'disk' or None; on a CPU host= says how much"),
        ({"offload": "disk", "host": "1GB"}, "host= gives bytes of a tier, and offload='disk' offloads nothing there"),
        ({"offload": None, "host": "1GB"}, "host= gives bytes of a tier, and offload=None offloads nothing there"),
        ({"offload": None, "disk": "1GB"}, "disk= gives bytes of a tier, and offload=None offloads nothing there"),
        ({"host": 0}, "host=0 is 0 bytes, which is not positive"),
        ({"host": "999TB"}, "but cpu has"),
        ({"disk": -1}, "disk=-1 is -1 bytes, which is not positive"),
        ({"disk": 1.5}, "disk=1.5 is a float, which means a share of the disk's free bytes in"),
    ],
)
def test_what_makes_no_sense_is_refused_before_a_step(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError) as refused:
        memgraph.compile(module(), BUDGET, **options)
    assert said in str(refused.value)


def test_a_disk_of_few_bytes_is_kept_to() -> None:
    pair = Pair(host=HOST, disk="1GB")
    pair.step()
    pair.assert_same()
    assert pair.model.plan.machine.behind[0].link.capacity <= 10**9
