"""Submodules that can't be opaque parts either are refused, with the reason."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import memgraph
from tests.memgraph.opaque.test_opaque_parts import ROOM, WIDTH, Asking, Net, asked, batch

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
