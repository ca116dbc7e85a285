"""Changes of torch's generators or of `.data` in forward would run only once, so they are refused with their line."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.random import fork_rng
from torch.torch_version import TorchVersion

import memgraph
from memgraph.capture.capture import capture
from tests.support.captured_calls import agrees

X = torch.linspace(-1, 1, 16).view(4, 4)
Then = Callable[[Any, Tensor], Tensor]


class Noisy(nn.Module):
    def __init__(self, then: Then) -> None:
        super().__init__()
        self.layer, self.then = nn.Linear(4, 4), then
        self.generator = torch.Generator().manual_seed(3)

    def forward(self, x: Tensor) -> Tensor:
        return self.then(self, self.layer(x))


def seeded(module: Noisy, y: Tensor) -> Tensor:
    torch.manual_seed(3)
    return y * torch.rand(4, 4)


def forked(module: Noisy, y: Tensor) -> Tensor:
    with fork_rng():
        return y * torch.rand(4, 4)


def put_back(module: Noisy, y: Tensor) -> Tensor:
    state = torch.get_rng_state()
    y = y * torch.rand(4, 4)
    torch.set_rng_state(state)
    return y


def made(module: Noisy, y: Tensor) -> Tensor:
    return y * torch.rand(4, 4, generator=torch.Generator().manual_seed(5))


def asked(module: Noisy, y: Tensor) -> Tensor:
    return y * (torch.initial_seed() % 7)


def reseeded(module: Noisy, y: Tensor) -> Tensor:
    torch.seed()
    return y * torch.rand(4, 4)


def on_gpu(module: Noisy, y: Tensor) -> Tensor:
    torch.cuda.manual_seed_all(3)
    return y


traced = pytest.mark.skipif(
    TorchVersion(torch.__version__) < "2.13", reason="torch 2.12 and earlier can't trace a generator"
)


def default(module: Noisy, y: Tensor) -> Tensor:
    torch.default_generator.manual_seed(3)
    return y * torch.rand(4, 4)


def its_own(module: Noisy, y: Tensor) -> Tensor:
    module.generator.manual_seed(4)
    return y * torch.rand(4, 4)


@pytest.mark.parametrize("then", [seeded, made, asked, reseeded, on_gpu])
def test_what_would_be_done_once_is_refused_at_its_line(then: Then) -> None:
    module, before = Noisy(then), torch.get_rng_state()
    line = rf"forward asks or seeds .* at {re.escape(__file__)}:\d+ in {then.__name__}, .*seed outside of the module"
    with pytest.raises(memgraph.CaptureError, match=line):
        capture(module, (X,), {})
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(
    ("then", "name"),
    [
        (seeded, "torch.manual_seed"),
        (reseeded, "torch.seed"),
        (on_gpu, "torch.cuda.manual_seed_all"),
    ],
)
def test_what_forward_calls_is_named_and_not_what_that_calls(then: Then, name: str) -> None:
    with pytest.raises(memgraph.CaptureError, match=f"forward asks or seeds {name} at "):
        capture(Noisy(then), (X,), {})


def put_back_and_asked(module: Noisy, y: Tensor) -> Tensor:
    y = put_back(module, y)
    return y if y.sum() > 0 else y * 2


@pytest.mark.parametrize("then", [forked, put_back, put_back_and_asked])
def test_the_state_of_the_generator_is_read_and_set_in_each_step(then: Then) -> None:
    module, made = Noisy(then), list[list[Tensor]]()
    for model in (module, memgraph.compile(module, 10**8)):
        torch.manual_seed(1)
        made.append([fact for x in (X, X, X) for fact in (model(x), torch.rand(2))])
    assert all(map(torch.equal, *made))


@pytest.mark.parametrize(("then", "name"), [(default, "torch.default_generator"), (its_own, "generator")])
def test_a_generator_that_was_seeded_is_named(then: Then, name: str) -> None:
    module = Noisy(then)
    before = module.generator.get_state()
    with pytest.raises(memgraph.CaptureError, match=f"forward seeds {name}, which would happen only once"):
        capture(module, (X,), {})
    assert torch.equal(module.generator.get_state(), before)


@traced
def test_a_generator_of_the_modules_own_is_drawn_from_in_every_step() -> None:
    captured = capture(Noisy(lambda m, y: y * torch.rand(4, 4, generator=m.generator)), (X,), {})
    assert any(node.op == "get_attr" for node in captured.graph.graph.nodes)


@traced
def test_the_default_generator_may_be_named() -> None:
    module = Noisy(lambda m, y: y * torch.rand(4, 4, generator=torch.default_generator))
    made = []
    for model in (module, memgraph.compile(module, 10**8)):
        torch.manual_seed(1)
        made.append(model(X))
    assert torch.equal(*made)


def replaced(module: Noisy, y: Tensor) -> Tensor:
    y.data = y.detach() * 3
    return y * y


def replaced_weight(module: Noisy, y: Tensor) -> Tensor:
    module.layer.weight.data = module.layer.weight.data * 0.5
    return y


@pytest.mark.parametrize("then", [replaced, replaced_weight])
def test_data_that_is_set_is_refused_at_its_line(then: Then) -> None:
    line = (
        rf"forward sets \.data of a tensor at {re.escape(__file__)}:\d+ in {then.__name__}, .* change this one in place"
    )
    with pytest.raises(memgraph.CaptureError, match=line):
        capture(Noisy(then), (X,), {})


def changed(module: Noisy, y: Tensor) -> Tensor:
    y.data.mul_(2)
    return y * y


def test_data_may_be_changed_in_place() -> None:
    module = Noisy(changed)
    del module.generator
    agrees(module, X)


PRODUCTS: dict[str, Callable[[Tensor], Tensor]] = {
    "all": lambda x: x.prod(),
    "rows": lambda x: x.prod(1),
    "columns, kept": lambda x: torch.prod(x, dim=0, keepdim=True),
    "another type": lambda x: torch.prod(x, -1, dtype=torch.float64),
}


@pytest.mark.parametrize("zeros", [0, 1, 3])
@pytest.mark.parametrize("name", PRODUCTS)
def test_the_gradient_of_a_product_is_eagers_whatever_the_values(name: str, zeros: int) -> None:
    x = torch.linspace(-1.3, 1.7, 20).view(4, 5).clone()
    x.view(-1)[3 : 3 + 4 * zeros : 4] = 0
    module = nn.Identity()
    module.forward = PRODUCTS[name]  # type: ignore[method-assign, assignment]
    captured = capture(module, (x.requires_grad_(),), {})
    result = PRODUCTS[name](x)
    tangent = torch.linspace(0.3, 0.9, result.numel(), dtype=result.dtype).view(result.shape)
    result.backward(tangent)
    with torch.no_grad():
        found = captured.graph(x.detach(), tangent)
    assert torch.equal(found[0], result)
    assert x.grad is not None and torch.equal(found[1], x.grad)


VIEWS: dict[str, Callable[[Tensor], Any]] = {
    "slice": lambda x: (x, x[:2]),
    "before": lambda x: (x.t(), x),
    "twice": lambda x: (x, x[0], x),
}


@pytest.mark.parametrize("name", VIEWS)
def test_an_input_may_be_returned_as_it_is_and_in_part(name: str) -> None:
    torch.manual_seed(0)
    layer, x = nn.Linear(4, 4), torch.randn(4, 4)
    module = nn.Sequential(layer)
    module.forward = lambda x: (layer(x).sum(), *VIEWS[name](x))  # type: ignore[method-assign]
    gradients = []
    for model in (module, memgraph.compile(module, 10**8)):
        leaf = x.clone().requires_grad_()
        first, *rest = model(leaf)
        (first + sum((i + 2) * tensor.square().sum() for i, tensor in enumerate(rest))).backward()
        gradients.append(leaf.grad)
    assert torch.equal(*gradients)  # type: ignore[arg-type]
