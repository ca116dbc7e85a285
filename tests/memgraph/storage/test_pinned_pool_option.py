"""`host=` bounds what a model's steps pin: in the plan, in blocks, and for state."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import memgraph
from memgraph.errors import MemgraphError
from memgraph.profile import machine_profile
from memgraph.profile.link_bandwidth import Link
from memgraph.storage import pinned_pool
from memgraph.storage.mapped_storage import MappedBuffer, TensorSpec
from memgraph.storage.pinned_pool import PinnedError, PinnedPool, host_nbytes
from memgraph.storage.pinned_storage import PinnedBufferAllocator
from memgraph.storage.pinned_tier import PinnedTier
from memgraph.storage.spill_file import PAGE
from passes import Machine
from tests.support.late_device import Late, Pinned

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


def test_it_is_read_as_a_budget_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("memgraph.system.byte_sizes.memory_nbytes", lambda device: 64 * 10**9)
    found = [host_nbytes(pinned) for pinned in ("16GB", "1GiB", 5000, 0.25, None)]
    assert found == [16 * 10**9, 1 << 30, 5000, 16 * 10**9, None]


@pytest.mark.parametrize(
    ("pinned", "kind", "said"),
    [
        ("16 apples", ValueError, "host='16 apples' can't be read; write e.g."),
        ("16G", ValueError, 'host=\'16G\' can\'t be read: the unit is "GB" or "GiB"'),
        (0, ValueError, "host=0 is 0 bytes, which is not positive"),
        (1.5, ValueError, "host=1.5 is a float, which means a share of the host's memory in"),
        ("999TB", ValueError, "host='999TB' is 999000000000000 bytes, but cpu has"),
        ([], TypeError, "host is a list"),
    ],
)
def test_what_makes_no_sense_is_refused_by_its_own_name(pinned: Any, kind: type[Exception], said: str) -> None:
    for way in (memgraph.compile, lambda model, **wishes: memgraph.plan(model, torch.ones(1), budget="1GB", **wishes)):
        with pytest.raises(kind) as error:
            way(nn.Linear(1, 1), host=pinned)
        assert str(error.value).startswith(said)


def test_a_plan_sends_no_more_than_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(pinned_pool.VARIABLE, "64MB")
    link = Link(((1000, 1.0),))
    monkeypatch.setattr(machine_profile, "measure_host", lambda device, room: (link, link))
    machine = machine_profile.measure_links(Machine(1, "cuda:0"), "host", GPU, None, pinned=10**6)
    assert 0.99 * 10**6 < machine.link.capacity < 10**6


def test_the_callers_cap_takes_the_place_of_the_processs_for_all_that_is_pinned() -> None:
    pool = PinnedPool(lambda: PAGE, Pinned())
    tier = PinnedTier([3 * PAGE], CPU, Late(0), pool, cap=8 * PAGE)
    host = PinnedBufferAllocator(CPU, Late(0), pool, cap=8 * PAGE)
    home = MappedBuffer([TensorSpec((PAGE,), (1,), torch.uint8)], host)
    leases = [tier.lease(), tier.lease()]
    assert pool.nbytes == 7 * PAGE
    with pytest.raises(PinnedError, match=r"12288 bytes .* 28672 are taken \(by 2 .*\) and 32768 allowed; .*host="):
        tier.lease()
    with pytest.raises(PinnedError, match="and 4096 allowed"):
        pool.claim(PAGE)
    with pytest.raises(PinnedError, match="and 32768 allowed"):
        MappedBuffer([TensorSpec((2 * PAGE,), (1,), torch.uint8)], host)
    assert issubclass(PinnedError, MemgraphError)
    del home, leases
