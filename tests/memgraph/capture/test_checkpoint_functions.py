"""Checkpoints written as an autograd function, whose backward runs the block again, train as in eager, bit for bit."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import memgraph
from tests.support.compare import ROOM, same_gradients

SIZE = 8
X = torch.linspace(-2, 2, 6 * SIZE).sin().view(6, SIZE)


def detached(tensor: Tensor) -> Tensor:
    return tensor.detach().requires_grad_(tensor.requires_grad)


class Inner(torch.autograd.Function):
    """Calls `backward()`, and draws other numbers when it runs again."""

    @staticmethod
    def forward(ctx: Any, run: Any, x: Tensor) -> Any:
        ctx.run = run
        ctx.save_for_backward(x)
        with torch.no_grad():
            return run(x)

    @staticmethod
    def backward(ctx: Any, *tangents: Tensor) -> Any:
        x = detached(ctx.saved_tensors[0])
        with torch.enable_grad():
            y = ctx.run(x)
        torch.autograd.backward(y, tangents)
        return None, x.grad


class Megatron(Inner):
    """Sets the state of the generator, and refuses to run in `autograd.grad`."""

    @staticmethod
    def forward(ctx: Any, run: Any, x: Tensor) -> Any:
        ctx.state = torch.get_rng_state()
        return Inner.forward(ctx, run, x)

    @staticmethod
    def backward(ctx: Any, *tangents: Tensor) -> Any:
        assert torch.autograd._is_checkpoint_valid()
        before = torch.get_rng_state()
        torch.set_rng_state(ctx.state)
        x = detached(ctx.saved_tensors[0])
        with torch.enable_grad():
            y = ctx.run(x)
        torch.set_rng_state(before)
        torch.autograd.backward(y, tangents)
        return None, x.grad


class DeepSpeed(Megatron):
    """Keeps its input as an attribute of the context."""

    @staticmethod
    def forward(ctx: Any, run: Any, x: Tensor) -> Any:
        ctx.run, ctx.kept, ctx.state = run, x, torch.get_rng_state()
        with torch.no_grad():
            return run(x)

    @staticmethod
    def backward(ctx: Any, *tangents: Tensor) -> Any:
        x = detached(ctx.kept)
        with torch.random.fork_rng(devices=()), torch.enable_grad():
            torch.set_rng_state(ctx.state)
            y = ctx.run(x)
        torch.autograd.backward(y, tangents)
        return None, x.grad


class FairScale(torch.autograd.Function):
    """Is given a tensor that requires a gradient, so that the parameters get theirs in the first layer too."""

    @staticmethod
    def forward(ctx: Any, run: Any, dummy: Tensor, x: Tensor) -> Any:
        return Megatron.forward(ctx, run, x)

    @staticmethod
    def backward(ctx: Any, *tangents: Tensor) -> Any:
        return None, *Megatron.backward(ctx, *tangents)


class GuidedDiffusion(torch.autograd.Function):
    """Takes the parameters as arguments, and returns their gradients."""

    @staticmethod
    def forward(ctx: Any, run: Any, x: Tensor, *parameters: Tensor) -> Any:
        ctx.run, ctx.tensors = run, (x, *parameters)
        with torch.no_grad():
            return run(x)

    @staticmethod
    def backward(ctx: Any, *tangents: Tensor) -> Any:
        x, *parameters = ctx.tensors
        x = x.detach().requires_grad_()
        with torch.enable_grad():
            y = ctx.run(x.view_as(x))
        return None, *torch.autograd.grad(y, [x, *parameters], tangents, allow_unused=True)


KINDS: list[Any] = [Inner, Megatron, DeepSpeed, FairScale, GuidedDiffusion]


def checkpointed(kind: Any, run: Any, x: Tensor, *blocks: nn.Module) -> Tensor:
    more: list[Tensor] = []
    if issubclass(kind, GuidedDiffusion):
        more = [parameter for block in blocks for parameter in block.parameters()]
    apply: Any = kind.apply
    made: Tensor = apply(run, torch.empty(0, requires_grad=True), x) if kind is FairScale else apply(run, x, *more)
    return made


def block(rate: float = 0.0) -> nn.Module:
    return nn.Sequential(nn.Linear(SIZE, SIZE), nn.Tanh(), nn.Dropout(rate))


class Stack(nn.Module):
    """One block in two checkpoints and outside of them, so that its gradient arrives in parts."""

    def __init__(self, kind: Any) -> None:
        super().__init__()
        self.kind, self.first, self.shared, self.last = kind, nn.Linear(SIZE, SIZE), block(0.2), block(0.2)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        h = self.shared(h) + h
        for each in (self.shared, self.last, self.shared):
            h = checkpointed(self.kind, each, h, each)
        return self.shared(h).square().mean()


class Nested(Stack):
    """A checkpoint in a checkpoint of two blocks. One of these is frozen."""

    def __init__(self, kind: Any) -> None:
        super().__init__(kind)
        if kind is not GuidedDiffusion:  # which eager refuses
            self.last.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        def both(h: Tensor) -> Tensor:
            return self.shared(checkpointed(self.kind, self.last, h, self.last)) + h

        return checkpointed(self.kind, both, self.first(x), self.shared, self.last).square().mean()


class Part(nn.Module):
    def __init__(self, kind: Any, inner: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.kind, self.block = kind, inner()

    def forward(self, h: Tensor) -> Tensor:
        return checkpointed(self.kind, self.block, h, self.block)


class Whole(nn.Module):
    """A checkpoint in a submodule."""

    def __init__(self, kind: Any, inner: Callable[[], nn.Module] = block) -> None:
        super().__init__()
        self.first, self.part = nn.Linear(SIZE, SIZE), Part(kind, inner)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.part(self.first(x)).square().mean()
        return y


def trains_as_eager(make: Callable[[], nn.Module], budget: int | str = ROOM, steps: int = 3, **options: Any) -> None:
    """Train beside eager, the second step without new gradients before it."""
    torch.manual_seed(0)
    model = make()
    twin = copy.deepcopy(model)
    optimizers = [torch.optim.SGD([p for p in each.parameters() if p.requires_grad], 0.1) for each in (model, twin)]
    if options.get("fuse_update"):
        options["optimizer"] = optimizers[0]
    compiled = memgraph.compile(model, budget, offload=None, time_limit=1, **options)
    for step in range(steps):
        found = []
        for each, called in ((model, compiled), (twin, twin)):
            torch.manual_seed(step)
            loss = called(X + step)
            loss.backward()
            gradients = [] if options else [parameter.grad for parameter in each.parameters()]
            found.append([loss, torch.rand(2), *gradients, *each.parameters()])
            found[-1] = [None if fact is None else fact.detach().clone() for fact in found[-1]]
        for ours, theirs in zip(*found, strict=True):
            assert type(ours) is type(theirs) and (
                ours is None or options.get("fuse_update") or torch.equal(ours, theirs)
            )
        if step != 1 or options:
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
    assert all(map(torch.equal, model.parameters(), twin.parameters()))


def test_a_function_that_runs_its_block_again_trains_as_in_eager() -> None:
    trains_as_eager(lambda: Nested(Megatron))


@pytest.mark.long
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("make", [Stack, Nested])
def test_so_does_each_kind_of_them_where_gradients_arrive_in_parts(make: Any, kind: Any) -> None:
    trains_as_eager(lambda: make(kind))


@pytest.mark.long
@pytest.mark.parametrize("kind", [Inner, Megatron, GuidedDiffusion])
def test_it_does_under_the_smallest_budget(kind: Any) -> None:
    with pytest.raises(memgraph.BudgetError) as refused:
        trains_as_eager(lambda: Stack(kind), 1)
    trains_as_eager(lambda: Stack(kind), refused.value.smallest)


@pytest.mark.long
@pytest.mark.parametrize("kind", KINDS)
def test_backward_may_update_what_such_a_function_trains(kind: Any) -> None:
    trains_as_eager(lambda: Stack(kind), fuse_update=True)


@pytest.mark.parametrize("kind", [Inner, GuidedDiffusion])
def test_each_micro_batch_has_its_gradients(kind: Any) -> None:
    model = Whole(kind)
    twin = copy.deepcopy(model)
    memgraph.compile(model, ROOM, microbatches=2, reduction="mean")(X).backward()
    for rows in X.chunk(2):
        (twin(rows) / 2).backward()
    assert same_gradients(model, twin)


class Silent(GuidedDiffusion):
    """Runs its block again, and returns no gradient of the parameters that it is given."""

    @staticmethod
    def backward(ctx: Any, *tangents: Tensor) -> Any:
        first, gradient, *rest = GuidedDiffusion.backward(ctx, *tangents)
        return first, gradient, *(None for _ in rest)


def test_a_block_that_runs_again_and_gets_no_gradient_is_refused() -> None:
    with pytest.raises(memgraph.CaptureError, match=r"runs a block again that reads parameter part\.block\.0\.weight"):
        memgraph.compile(Whole(Silent), ROOM)(X)


@pytest.mark.parametrize("kind", [Inner, Megatron, GuidedDiffusion])
def test_a_submodule_with_such_a_function_may_run_as_it_is(kind: Any) -> None:
    trains_as_eager(lambda: Whole(kind), opaque=["part"])


class Asking(nn.Module):
    """A block that asks for a value, as a router does."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(SIZE, SIZE)

    def forward(self, h: Tensor) -> Tensor:
        y: Tensor = self.linear(h)
        return y * 2 if y.sum() > 0 else y


class Counting(Asking):
    """A block that counts its calls: two in each step."""

    calls = 0

    def forward(self, h: Tensor) -> Tensor:
        self.calls = self.calls + 1
        y: Tensor = self.linear(h) * self.calls
        return y


@pytest.mark.long
@pytest.mark.parametrize("kind", [Inner, Megatron, GuidedDiffusion])
def test_a_block_that_asks_for_values_runs_as_it_is_with_its_function(kind: Any) -> None:
    trains_as_eager(lambda: Whole(kind, Asking))


@pytest.mark.parametrize("options", [{}, {"opaque": ["part"]}])
def test_an_attribute_that_backward_changes_is_refused(options: Any) -> None:
    model = Whole(Inner, Counting)
    with pytest.raises(memgraph.CaptureError):
        memgraph.compile(model, ROOM, **options)(X).backward()
    assert model.part.block.calls == 0


class ByHand(Inner):
    """Puts gradients into `.grad` itself."""

    @staticmethod
    def backward(ctx: Any, *tangents: Tensor) -> Any:
        x, parameters = detached(ctx.saved_tensors[0]), list(ctx.run.parameters())
        with torch.enable_grad():
            y = ctx.run(x)
        gradient, *gradients = torch.autograd.grad(y, [x, *parameters], tangents)
        for parameter, new in zip(parameters, gradients, strict=True):
            parameter.grad = new
        return None, gradient


class Hidden(nn.Module):
    """Has its block in a list that is no ModuleList."""

    def __init__(self, kind: Any) -> None:
        super().__init__()
        self.kind, self.first, self.hidden = kind, nn.Linear(SIZE, SIZE), [{"block": block()}]

    def forward(self, x: Tensor) -> Tensor:
        inner = self.hidden[0]["block"]
        return checkpointed(self.kind, inner, self.first(x), inner).square().mean()


class TestTime(Whole):
    """Calls `backward()` in forward."""

    __test__ = False

    def forward(self, x: Tensor) -> Tensor:
        self.first(x).square().mean().backward()
        return super().forward(x)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: Whole(ByHand), r"a function's backward sets the \.grad of parameter part\.block\.0\.weight"),
        (lambda: Hidden(Inner), r"a tensor of shape \(8, 8\) requires a gradient but is no parameter"),
        (lambda: Hidden(GuidedDiffusion), r"a tensor of shape \(8, 8\) requires a gradient but is no parameter"),
        (lambda: TestTime(Inner), r"forward sets the \.grad of parameter first\.weight"),
        (lambda: TestTime(Inner, Asking), r"forward sets the \.grad of parameter first\.weight"),
    ],
)
def test_gradients_that_no_step_can_give_are_refused_and_leave_nothing_behind(
    make: Callable[[], nn.Module], said: str
) -> None:
    model = make()
    with pytest.raises(memgraph.CaptureError, match=said):
        memgraph.compile(model, ROOM)(X)
    hidden = model.hidden[0]["block"].parameters() if isinstance(model, Hidden) else ()
    assert all(parameter.grad is None for parameter in (*model.parameters(), *hidden))
    model(X).backward()


def test_a_hook_that_eager_calls_for_each_part_of_a_gradient_is_refused() -> None:
    model = Stack(Inner)
    model.shared.get_parameter("0.weight").register_hook(lambda gradient: gradient.clamp(-1, 1))
    with pytest.raises(memgraph.CaptureError, match=r"shared\.0\.weight has a hook.* arrives in 3 parts"):
        memgraph.compile(model, ROOM)(X)


class Descending(nn.Linear):
    """A step of gradient descent in forward, and a branch on a value."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            z = x.detach().requires_grad_()
            (slope,) = torch.autograd.grad(super().forward(z).square().sum(), z)
        y = super().forward(x - 0.01 * slope)
        return y * 2 if y.sum() > 0 else y


def test_a_forward_that_differentiates_may_branch_on_a_value() -> None:
    model = Descending(SIZE, SIZE)
    twin = copy.deepcopy(model)
    compiled = memgraph.compile(model, ROOM)
    for x in (X, -X):
        for each in (compiled, twin):
            each(x).square().sum().backward()
    assert same_gradients(model, twin)
