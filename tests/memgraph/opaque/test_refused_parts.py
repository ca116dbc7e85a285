"""Submodules that can't be opaque parts either are refused, with the reason."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

import memgraph
from memgraph.opaque import chosen_parts
from memgraph.opaque.part import Backward
from memgraph.opaque.recorder import Recorded, Recorder
from memgraph.profile.memory_meter import measure_peak, resident_bytes
from tests.memgraph.opaque.test_opaque_parts import ROOM, WIDTH, Asking, Net, asked, batch
from tests.support.smallest_budget import smallest_of

STRAY = nn.Linear(WIDTH, WIDTH)


class Writing(Asking):
    def forward(self, x: Tensor) -> Tensor:
        x.detach().mul_(asked(x))
        return super().forward(x)


class Aliasing(Asking):
    def forward(self, x: Tensor) -> Tensor:
        return x.view(x.shape) if asked(x) >= 0 else x


class Halves(Asking):
    def forward(self, x: Tensor) -> Tensor:
        return tuple(super().forward(x).chunk(2, 1))  # type: ignore[return-value]


class Straying(Asking):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(STRAY(x))


class Storing(Asking):
    def forward(self, x: Tensor) -> Tensor:
        self.last = super().forward(x)
        return self.last * 1


class Differentiating(Asking):
    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        (gradient,) = torch.autograd.grad(y.square().sum(), self.linear.weight)
        return y + gradient.sum()


class Meta(Asking):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).to("meta")


class Sparse(Asking):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).to_sparse()


class TwoUses(Asking):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * x


class Filling(Asking):
    def forward(self, x: Tensor, into: list[int]) -> Tensor:  # type: ignore[override]
        into.append(1)
        return super().forward(x)


class ReadingCounter(Asking):
    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x)


def refused(part: nn.Module, after: Callable[[Net, Tensor], Tensor], match: str) -> None:
    class Whole(Net):
        def forward(self, x: Tensor) -> Tensor:
            return after(self, self.first(x).relu())

    with pytest.raises(memgraph.CaptureError) as caught:
        memgraph.compile(Whole(part), ROOM)(batch(0))
    told = "\n".join([str(caught.value), *caught.value.__notes__])
    assert f"part ({type(part).__name__}) can't run as it is inside of a captured step: {match}" in told


def test_a_part_that_is_named_and_can_not_be_opaque_says_why() -> None:
    with pytest.raises(
        memgraph.CaptureError, match=r"opaque= has 'part', but part .* can't run as it is .* in its attr"
    ):
        memgraph.compile(Net(Storing()), ROOM, opaque=["part"])(batch(0))


def test_a_part_whose_attributes_are_set_before_it_runs_is_refused() -> None:
    class Setting(Net):
        def forward(self, x: Tensor) -> Tensor:
            vars(self.part)["scale"] = len(x) + 1
            return super().forward(x)

    with pytest.raises(memgraph.CaptureError, match=r"forward sets its attribute scale before it runs"):
        memgraph.compile(Setting(Asking()), ROOM, opaque=["part"])(batch(0))


@pytest.mark.parametrize(
    ("part", "reason"),
    [
        (Writing, "forward changes an argument in place"),
        (Aliasing, "a result is a view of an argument"),
        (Halves, "a result is a view of an argument, a parameter or another result"),
        (Straying, "a gradient reaches a parameter that is neither its own"),
        (Storing, "forward stores a tensor in its attribute last"),
        (Differentiating, "forward computes gradients itself"),
        (Meta, "it reads tensors on cpu, and returns one on meta"),
        (Sparse, "it returns a torch.sparse_coo Tensor"),
    ],
)
def test_a_part_that_is_no_op_is_refused(part: type[nn.Module], reason: str) -> None:
    refused(part(), lambda net, h: net.part(h).square().mean(), reason)


def test_an_input_that_is_used_again_may_be_used_once_inside() -> None:
    refused(TwoUses(), lambda net, h: (net.part(h) + h).square().mean(), "it uses an argument more than once")


def test_an_argument_that_is_filled_is_refused() -> None:
    refused(Filling(), lambda net, h: net.part(h, []).square().mean(), "forward changes one of its arguments")


def test_an_attribute_that_is_read_outside_is_refused() -> None:
    reason = "forward changes its attribute calls, which is read outside of it as well"
    refused(ReadingCounter(), lambda net, h: net.part(h).square().mean() * net.part.calls, reason)


def test_the_whole_model_is_never_opaque() -> None:
    with pytest.raises(memgraph.CaptureError, match="numpy"):
        memgraph.compile(Asking(), ROOM)(batch(0))


def test_an_error_of_the_model_is_its_own() -> None:
    class Checking(Asking):
        def forward(self, x: Tensor) -> Tensor:
            if asked(x) >= 0:
                raise ValueError("too large")
            return x

    with pytest.raises(ValueError, match="too large"):
        memgraph.compile(Net(Checking()), ROOM)(batch(0))


def test_a_run_above_the_budget_is_said_to_be_for_the_opaque_parts() -> None:
    class Inference(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(16, 16), nn.Linear(16, 512)

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.second(self.first(x)).exp().sum(1).mean()
            return y

    x = torch.randn(512, 16)
    with pytest.raises(memgraph.BudgetError, match="to measure first, which run as they are") as caught:
        memgraph.compile(Inference(), 300_000, opaque=["first"])(x)
    memgraph.compile(Inference(), caught.value.smallest, opaque=["first"])(x).backward()


class Deep(nn.Module):
    """A part whose backward needs much."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(4 + int(float(x.detach().numpy()[0, 0]) > 1e6)):
            x = torch.tanh(self.linear(x))
        return x


@pytest.mark.long
def test_measuring_a_backward_beside_what_all_parts_have_read_takes_no_more_than_the_budget() -> None:
    def made() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.GELU(), Deep()) for _ in range(8)))

    x, most = torch.randn(1024, 64), list[int]()

    class Watched(Recorder):
        def measure_backward(self, recorded: Recorded, tangents: Sequence[Tensor | None]) -> Backward:
            read = [tensor for each in self.calls for tensor in each.tensors]
            result, allocated = measure_peak(partial(super().measure_backward, recorded, tangents))
            assert allocated is not None
            most.append(resident_bytes([x, *read]) + allocated.peak)
            return result

    def plan(budget: int) -> memgraph.Report:
        return memgraph.plan(made(), x, budget=budget, loss=lambda y: y.square().mean(), time_limit=1)

    with mock.patch.object(chosen_parts, "Recorder", Watched):
        smallest = smallest_of(partial(plan, 1))
        most.clear()
        assert plan(smallest).peak <= smallest
    assert 0 < max(most) <= smallest
    with pytest.raises(memgraph.BudgetError, match="and backward of each part, to measure"):
        plan(smallest - 1)
