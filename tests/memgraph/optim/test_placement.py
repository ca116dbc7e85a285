"""A parameter is moved only if no other tensor holds its memory: what others write there is seen."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

import memgraph
from memgraph.optim.placement import PARAMETER, StatePlacement
from memgraph.profile.memory_meter import resident_bytes
from memgraph.storage.mapped_storage import is_offloaded
from tests.support.smallest_budget import smallest_of
from tests.support.streamed_state import assert_kept, batch, chain, loss, same, streamed, streams, tightest

Change = Callable[[nn.Module], object]


def trained(net: nn.Module, model: Any, change: Change, steps: int = 3) -> list[Tensor | None]:
    """Losses, gradients and parameters of some steps, with a change after each."""
    found: list[Tensor | None] = []
    for step in range(steps):
        out = model(batch(step))
        (out if isinstance(model, memgraph.CompiledModule) else loss(out)).backward()
        found += [p.grad.clone() for p in net.parameters() if p.grad is not None]
        with torch.no_grad():
            for parameter in net.parameters():
                parameter -= 0.1 * parameter.grad  # type: ignore[operator, misc]
        net.zero_grad()
        change(net)
    return [*found, *(p.detach().clone() for p in net.parameters())]


def halve(held: list[Tensor]) -> Change:
    return lambda net: [tensor.mul_(0.5) for tensor in held]


@pytest.mark.long
def test_a_parameter_whose_memory_others_hold_stays_where_they_see_it_and_others_are_streamed() -> None:
    results = []
    for compiled in (False, True):
        net: Any = chain()
        held = [net[0].weight.detach(), net[4].weight.detach()]
        model: Any = net
        if compiled:
            needed = smallest_of(lambda: memgraph.plan(net, batch(), budget=1, loss=loss, time_limit=0))  # noqa: B023
            model = streamed(net, needed)
        results.append(trained(net, model, halve(held)))
    assert same(*results)
    assert_kept(model, needed)
    assert streams(model) and not streams(model) & {"weight", "0_weight", "4_weight"}
    assert held[0].data_ptr() == net[0].weight.data_ptr() and held[1].data_ptr() == net[4].weight.data_ptr()


def test_parameters_that_are_views_of_one_vector_leave_it_where_some_of_them_are_streamed() -> None:
    net = chain()
    plain, vector = copy.deepcopy(net), parameters_to_vector(net.parameters()).detach().clone()
    vector_to_parameters(vector, net.parameters())
    del vector
    needed = smallest_of(lambda: memgraph.plan(net, batch(), budget=1, loss=loss, time_limit=0))
    model = streamed(net, needed)
    assert same(trained(plain, plain, halve([])), trained(net, model, halve([])))
    assert_kept(model, needed)
    assert streams(model)
    here = [parameter for parameter in net.parameters() if not is_offloaded(parameter)]
    assert here and resident_bytes(here) == sum(parameter.nbytes for parameter in here)


def test_a_refusal_names_the_parameters_whose_memory_others_hold() -> None:
    net: Any = chain()
    kept = net.state_dict()
    with pytest.raises(memgraph.BudgetError, match=r"0\.weight.*: a tensor outside of the module, as of fully_shard"):
        streamed(net, 1 << 20)(batch())
    assert kept


def test_memory_that_others_hold_later_is_refused_before_the_step_and_taken_once_they_release_it() -> None:
    net: Any = chain()
    model = streamed(net, tightest(kind=None))
    model(batch()).backward()
    net.zero_grad()
    flat = torch.randn(256 * 256)
    net[0].weight.data = flat.view(256, 256)
    before = [p.detach().clone() for p in net.parameters()]
    with pytest.raises(memgraph.UpdateError, match=r"outside of the module holds the memory of 0\.weight too"):
        model(batch())
    assert all(map(torch.equal, before, net.parameters()))
    del flat
    plain = copy.deepcopy(net)
    model(batch()).backward()
    loss(plain(batch())).backward()
    assert all(torch.equal(p.grad, q.grad) for p, q in zip(net.parameters(), plain.parameters(), strict=True))


def test_a_parameter_without_memory_is_refused() -> None:
    net: Any = chain()
    net[0].weight.untyped_storage().resize_(0)
    with pytest.raises(memgraph.UpdateError, match=r"0\.weight has no memory"):
        StatePlacement(net).place({(PARAMETER, "0.weight"): torch.empty(256, 256, device="meta")})


def test_a_parameter_that_others_see_in_the_tier_is_not_moved_away_from_them() -> None:
    net: Any = chain()
    placement = StatePlacement(net)
    names = ["0.weight", "2.weight"]
    placement.place({(PARAMETER, name): torch.empty(256, 256, device="meta") for name in names})
    seen, old = net[0].weight.detach(), net[2].weight.data_ptr()
    placement.move_to_device(names, ())
    assert seen.data_ptr() == net[0].weight.data_ptr()
    assert net[2].weight.data_ptr() != old


def new() -> Tensor:
    return torch.randn(256, 256, generator=torch.Generator().manual_seed(9))


def rebound(net: Any) -> None:
    net[0].weight.data = new()


def reset(net: Any) -> None:
    with torch.no_grad():
        net[0].weight.set_(new())


def replaced(net: Any) -> None:
    net[0]._parameters["weight"] = nn.Parameter(new())


def merged(net: Any) -> None:
    net[0].weight.data = net[0].weight.data + 0.1


def assigned(net: Any) -> None:
    net.load_state_dict({name: 0.9 * value for name, value in net.state_dict().items()}, assign=True)


def exchanged(net: Any) -> None:
    torch.utils.swap_tensors(net[0].weight, nn.Parameter(new()))


def ordered(net: Any) -> None:
    net[0].weight.data = new().t()


@pytest.mark.long
@pytest.mark.parametrize("change", [rebound, reset, replaced, merged, assigned, exchanged, ordered])
def test_values_that_take_the_place_of_a_streamed_parameters_between_steps_are_trained(change: Change) -> None:
    plain, net = chain(), chain()
    model = streamed(net, tightest(kind=None))
    assert same(trained(plain, plain, change), trained(net, model, change))
    assert streams(model)
