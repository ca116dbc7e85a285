"""A part whose results or bytes change breaks a guard: the run is undone, and the call is captured for what it is now."""

from __future__ import annotations

import copy
from queue import SimpleQueue
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import memgraph
from tests.memgraph.opaque.test_opaque_parts import ROOM, WIDTH, Asking, Net, asked, batch, beside_eager


class Experts(nn.Module):
    """An expert that gets no token has no gradient, in eager and here."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.router = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        weights = self.router(x).softmax(-1)
        chosen = weights.detach().numpy().argmax(-1)
        out = torch.zeros_like(x)
        for i, expert in enumerate(self.experts):
            rows = torch.from_numpy(np.nonzero(chosen == i)[0])
            if len(rows):
                out = out.index_add(0, rows, expert(x[rows]) * weights[rows, i : i + 1])
        return out


class Growing(Asking):
    """Takes more and more memory, and counts its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        asked(x)
        self.calls += 1
        for _ in range(self.calls):
            x = torch.tanh(self.linear(x))
        return x


@pytest.mark.long
def test_experts_without_tokens_get_no_gradient() -> None:
    compiled, _, _ = beside_eager(lambda: Net(Experts()), steps=6)
    assert compiled.plans[0].opaque


@pytest.mark.long
def test_a_part_that_takes_more_memory_is_measured_again_before_it_exceeds_the_forecast() -> None:
    compiled, ours, theirs = beside_eager(lambda: Net(Growing()), steps=8)
    assert ours.part.calls == theirs.part.calls == 9
    rows = [row for report in compiled.plans for row in report.opaque]
    assert max(row.nbytes for row in rows) > 2 * min(row.nbytes for row in rows)


def test_a_later_guard_that_fails_undoes_what_a_part_has_changed() -> None:
    class Branching(Net):
        def forward(self, x: Tensor) -> Tensor:
            loss = super().forward(x)
            return loss * 2 if (x[0, 0] > 0).item() else loss

    class Counting(Asking):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("total", torch.zeros(()))
            self.total: Tensor
            self.calls, self.seen = 0, list[int]()

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            self.seen.append(self.calls)
            self.total += self.calls
            return super().forward(x) * (1 + self.calls % 2) + torch.rand(())

    signs = {bool(batch(step)[0, 0] > 0) for step in range(6)}
    assert len(signs) == 2
    _, ours, theirs = beside_eager(lambda: Branching(Counting()), steps=5)
    assert ours.part.seen == theirs.part.seen == [1, 2, 3, 4, 5, 6]


def test_a_part_that_is_not_the_same_when_it_runs_again_is_refused_when_it_is_captured() -> None:
    calls = SimpleQueue[int]()  # its state does not show
    for number in range(20):
        calls.put(number)

    class Changing(Asking):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * calls.get()

    with pytest.raises(memgraph.CaptureError, match="numpy") as caught:
        memgraph.compile(Net(Changing()), ROOM)(batch(0))
    assert "other numbers when it runs again" in caught.value.__notes__[0]


def test_backward_refuses_a_part_that_gives_other_numbers() -> None:
    factor = SimpleQueue[int]()  # its state does not show

    class Outside(Asking):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * (1 + factor.qsize())

    torch.manual_seed(0)
    compiled = memgraph.compile(Net(Outside()), ROOM)
    compiled(batch(0)).backward()
    loss = compiled(batch(1))
    factor.put(1)
    with pytest.raises(memgraph.OpaqueError, match=r"part \(Outside\) runs as it is.*other numbers"):
        loss.backward()
    compiled.zero_grad()
    theirs = copy.deepcopy(compiled._module)
    for model in (compiled, theirs):
        torch.manual_seed(1)
        model(batch(2)).backward()
    assert all(torch.equal(p.grad, q.grad) for p, q in pairs(compiled, theirs))


def test_an_error_of_a_part_in_mid_training_is_its_own_and_the_next_step_is_right() -> None:
    class Checking(Asking):
        def __init__(self) -> None:
            super().__init__()
            self.calls = 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            if not np.isfinite(x.detach().numpy()).all():
                raise ValueError("not finite")
            return super().forward(x) * self.calls

    torch.manual_seed(0)
    plain: Any = Net(Checking())
    theirs: Any = copy.deepcopy(plain)
    compiled = memgraph.compile(plain, ROOM)
    for step in range(3):
        for model in (compiled, theirs):
            torch.manual_seed(step)
            x = batch(step)
            if step == 1:
                with pytest.raises(ValueError, match=r"^not finite$"):
                    model(x * float("nan"))
            model(x).backward()
        assert all(torch.equal(p.grad, q.grad) for p, q in pairs(plain, theirs))
    assert plain.part.calls == theirs.part.calls == 4


@pytest.mark.parametrize("fuse_update", [False, True])
def test_an_optimizer_updates_the_parameters_of_a_part(fuse_update: bool) -> None:
    torch.manual_seed(0)
    plain = Net(Asking())
    theirs: Any = copy.deepcopy(plain)
    optimizers = [torch.optim.AdamW(model.parameters(), lr=0.1) for model in (plain, theirs)]
    compiled = memgraph.compile(plain, ROOM, optimizer=optimizers[0], fuse_update=fuse_update)
    for step in range(3):
        for model, optimizer in zip((compiled, theirs), optimizers, strict=True):
            torch.manual_seed(step)
            model(batch(step)).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert all(torch.equal(p, q) for p, q in pairs(plain, theirs))


def pairs(one: Any, other: Any) -> zip[tuple[Any, Any]]:
    return zip(one.parameters(), other.parameters(), strict=True)
