"""Training with parameters, gradients and states on disk is bit-equal with eager, and keeps to the budget."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import memgraph
from memgraph.storage.io_threads import STAGING
from tests.support.streamed_state import (
    OPTIMIZERS,
    TINY,
    Twins,
    assert_kept,
    batch,
    chain,
    far,
    least,
    loss,
    same,
    streamed,
    streams,
    tightest,
)  # fmt: skip

pytestmark = pytest.mark.usefixtures("small_windows")


@pytest.mark.long
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_training_equals_eager(kind: str) -> None:
    Twins(kind=kind).train()


@pytest.mark.long
@pytest.mark.parametrize("share", [1.25, 1.6])
def test_training_equals_eager_under_wider_budgets(share: float) -> None:
    Twins(budget=int(share * tightest())).train()


@pytest.mark.long
@pytest.mark.parametrize("kind", ["adamw", "momentum", "sgd"])
@pytest.mark.parametrize("after", [False, True])
def test_the_optimizer_may_be_the_callers_own_affair(kind: str, after: bool) -> None:
    budget = STAGING + sum(parameter.nbytes for parameter in chain().parameters())  # no room for all gradients
    twins = Twins(kind=kind, given=False, after=after, budget=budget)
    twins.train()
    assert far(twins.module, twins.ours) == {"parameter", "gradient"}


@pytest.mark.long
def test_an_optimizer_of_the_compiled_modules_parameters_steps_on_the_given_ones() -> None:
    twins = Twins(given=False, after=True)
    twins.train(2)
    for ours, theirs in zip(twins.model.parameters(), twins.module.parameters(), strict=True):
        assert ours is theirs


@pytest.mark.long
def test_groups_and_schedulers() -> None:
    def grouped(model: nn.Module) -> Any:
        weights = [p for p in model.parameters() if p.dim() > 1]
        biases = [p for p in model.parameters() if p.dim() == 1]
        groups: list[dict[str, Any]] = [
            {"params": weights[:2], "lr": 1e-3},
            {"params": weights[2:]},
            {"params": biases, "weight_decay": 0.0},
        ]
        return torch.optim.AdamW(groups, lr=1e-2)

    twins = Twins(optimizer=grouped, budget=tightest())
    schedulers = {id(o): torch.optim.lr_scheduler.StepLR(o, 2, 0.5) for o in (twins.theirs, twins.ours)}

    def step(model: nn.Module, optimizer: Any, run: Any) -> Tensor:
        made = once(model, optimizer, run)
        schedulers[id(optimizer)].step()
        return made

    twins.train(do=step)
    assert twins.ours.param_groups[0]["lr"] == twins.theirs.param_groups[0]["lr"] < 1e-3


def once(model: nn.Module, optimizer: Any, run: Any, x: Tensor | None = None) -> Tensor:
    """A step whose gradients go in the end."""
    made = run(model, batch() if x is None else x)
    made.backward()
    optimizer.step()
    optimizer.zero_grad()
    return made.detach()


@pytest.mark.long
@pytest.mark.parametrize("to_none", [True, False])
@pytest.mark.parametrize("given", [True, False])
def test_gradients_accumulate(to_none: bool, given: bool) -> None:
    def step(model: nn.Module, optimizer: Any, run: Any) -> Tensor:
        optimizer.zero_grad(set_to_none=to_none)
        made = []
        for seed in range(3):
            made.append(run(model, batch(seed)))
            made[-1].backward()
        optimizer.step()
        return torch.stack(made).detach()

    Twins(given=given).train(4, step)


@pytest.mark.long
def test_gradients_are_clipped() -> None:
    def step(model: nn.Module, optimizer: Any, run: Any) -> Tensor:
        optimizer.zero_grad()
        run(model, batch()).backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
        optimizer.step()
        return norm

    Twins().train(do=step)


@pytest.mark.long
def test_a_scaled_loss() -> None:
    scalers: dict[int, Any] = {}

    def step(model: nn.Module, optimizer: Any, run: Any) -> Tensor:
        scaler = scalers.setdefault(id(optimizer), torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=2))
        optimizer.zero_grad()
        made = run(model, batch() * (float("inf") if len(seen) in (4, 5) else 1.0))  # the third step is left out
        seen.append(made)
        scaler.scale(made).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        return torch.tensor(scaler.get_scale())

    seen: list[Tensor] = []
    twins = Twins()
    for _ in range(5):
        theirs, ours = twins.each(step)
        assert torch.equal(theirs, ours)
        for a, b in zip(twins.module.parameters(), twins.plain.parameters(), strict=True):
            assert torch.equal(a, b)
    assert streams(twins.model)


@pytest.mark.long
@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_two_forwards_before_their_backwards(order: tuple[int, int]) -> None:
    def step(model: nn.Module, optimizer: Any, run: Any) -> Tensor:
        optimizer.zero_grad()
        made = [run(model, batch(seed)) for seed in range(2)]
        for i in order:
            made[i].backward()
        optimizer.step()
        return torch.stack(made).detach()

    wishes: dict[str, Any] = {"forwards": 2, "accumulate": False}
    Twins(budget=least(**wishes), **wishes).train(4, step)


@pytest.mark.long
def test_going_through_a_step_twice() -> None:
    def step(model: nn.Module, optimizer: Any, run: Any) -> Tensor:
        optimizer.zero_grad()
        made = run(model, batch())
        made.backward(retain_graph=True)
        made.backward()
        optimizer.step()
        return made.detach()

    Twins().turns(step, 4)


@pytest.mark.long
def test_gradients_that_are_asked_for() -> None:
    def step(model: nn.Module, optimizer: Any, run: Any) -> Tensor:
        made = run(model, batch())
        grads = torch.autograd.grad(made, list(model.parameters()))
        assert all(p.grad is None for p in model.parameters())
        again = torch.autograd.grad(run(model, batch(2)), list(model.parameters()))
        for parameter, first, second in zip(model.parameters(), grads, again, strict=True):
            parameter.grad = first + second
        optimizer.step()
        optimizer.zero_grad()
        return torch.cat([grad.flatten() for grad in (*grads, *again)])

    Twins().turns(step, 4)


@pytest.mark.long
def test_gradients_that_the_caller_puts_there() -> None:
    def step(model: nn.Module, optimizer: Any, run: Any) -> Tensor:
        optimizer.zero_grad()
        for i, parameter in enumerate(model.parameters()):
            if i % 3 or parameter.dim() == 1:
                parameter.grad = torch.full_like(parameter, 0.01)
            elif parameter.dim() > 1:
                parameter.grad = torch.full(parameter.shape[::-1], 0.02).t()
        made = run(model, batch())
        made.backward()
        optimizer.step()
        return made.detach()

    Twins().train(4, step)


@pytest.mark.long
def test_gradients_that_the_caller_puts_there_between_forward_and_backward() -> None:
    def step(model: nn.Module, optimizer: Any, run: Any) -> Tensor:
        optimizer.zero_grad()
        made = run(model, batch())
        for parameter in model.parameters():
            parameter.grad = torch.full_like(parameter, 0.01)
        made.backward()
        optimizer.step()
        return made.detach()

    Twins().train(4, step)


@pytest.mark.long
def test_gradients_that_are_asked_for_beside_those_that_are_there() -> None:
    def step(model: nn.Module, optimizer: Any, run: Any) -> Tensor:
        optimizer.zero_grad()
        run(model, batch()).backward()
        asked = torch.autograd.grad(run(model, batch(2)), list(model.parameters()))
        run(model, batch(3)).backward()
        optimizer.step()
        return torch.cat([grad.flatten() for grad in asked])

    Twins().turns(step, 4)


@pytest.mark.long
@pytest.mark.parametrize("first", [0, 1])
def test_some_gradients_are_there_and_some_are_not(first: int) -> None:
    def step(model: nn.Module, optimizer: Any, run: Any) -> Tensor:
        optimizer.zero_grad()
        run(model, batch()).backward()
        for parameter in list(model.parameters())[2 * first :: 4]:
            parameter.grad = None
        made = run(model, batch(2))
        made.backward()
        optimizer.step()
        return made.detach()

    Twins().turns(step, 4)


@pytest.mark.long
def test_gradients_of_inputs_stay() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.chain = chain(8)

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            out: Tensor = self.chain(2 * x) + self.chain(3 * y)
            return out

    def step(model: nn.Module, run: Any) -> list[Tensor | None]:
        x, y = (torch.cat([batch(seed)] * 16).requires_grad_() for seed in range(2))
        made = run(model, x, y)
        made.backward()
        return [made.detach(), x.grad, y.grad, *(parameter.grad for parameter in model.parameters())]

    model = Two()
    with pytest.raises(memgraph.BudgetError) as caught:
        step(streamed(model, TINY), lambda model, *args: model(*args))
    compiled = streamed(model, caught.value.smallest)
    ours = step(compiled, lambda model, *args: model(*args))
    assert_kept(compiled, caught.value.smallest)
    assert streams(compiled)
    assert same(ours, step(Two(), lambda model, *args: loss(model(*args))))


@pytest.mark.long
@pytest.mark.parametrize("accumulates", [False, True])
def test_gradients_that_the_caller_keeps_are_his(accumulates: bool) -> None:
    """As when gradients of several losses are compared: what was `.grad` stays what it is."""

    def step(model: nn.Module, optimizer: Any, run: Any) -> Tensor:
        kept = []
        for seed in range(3):
            optimizer.zero_grad()
            run(model, batch(seed)).backward()
            kept += [parameter.grad for parameter in model.parameters()]
            if accumulates:
                run(model, batch(seed + 3)).backward()
        optimizer.step()
        return torch.cat([grad.flatten() for grad in kept if grad is not None])

    Twins().turns(step, 3)


@pytest.mark.long
def test_a_gradient_that_the_caller_puts_there_is_added_to_in_place() -> None:
    def step(model: nn.Module, optimizer: Any, run: Any) -> Tensor:
        optimizer.zero_grad()
        given = [torch.full_like(parameter, 0.01) for parameter in model.parameters()]
        for parameter, gradient in zip(model.parameters(), given, strict=True):
            parameter.grad = gradient
        run(model, batch()).backward()
        assert all(p.grad is gradient for p, gradient in zip(model.parameters(), given, strict=True))
        optimizer.step()
        return torch.cat([gradient.flatten() for gradient in given])

    Twins().turns(step, 3)
