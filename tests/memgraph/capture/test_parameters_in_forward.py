"""Forward finds parameters, lists of tensors become a tensor, and numbers between two are drawn, as in eager."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

import memgraph
from memgraph.capture.capture import capture
from tests.support.compare import ROOM, same_gradients

X = torch.linspace(-1, 1, 8).view(2, 4)


class Adapted(nn.Module):
    """Adds an adapter to a frozen parameter in each forward, and takes it off again."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear, self.adapter = nn.Linear(4, 4).requires_grad_(False), nn.Linear(4, 4, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        adapter = self.adapter

        class Added(nn.Module):
            def forward(self, weight: Tensor) -> Tensor:
                return weight + adapter.weight

        parametrize.register_parametrization(self.linear, "weight", Added())
        y: Tensor = self.linear(x)
        parametrize.remove_parametrizations(self.linear, "weight", leave_parametrized=False)
        return y


class Asking(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return y if isinstance(self.weight, nn.Parameter) and not isinstance(self.weight.detach(), nn.Parameter) else -y


@pytest.mark.parametrize("make", [Adapted, lambda: Asking(4, 4)])
def test_forward_finds_parameters(make: Any) -> None:
    model = make()
    twin = copy.deepcopy(model)
    compiled = memgraph.compile(model, ROOM)
    for each in (compiled, twin):
        each(X).square().sum().backward()
    theirs = dict(twin.named_parameters())  # in another order, once a parametrization was removed
    for name, parameter in model.named_parameters():
        assert type(parameter) is nn.Parameter and type(parameter.grad) is type(theirs[name].grad)
        assert parameter.grad is None or torch.equal(parameter.grad, theirs[name].grad)


def test_peft_adapts_parameters_that_are_no_layers() -> None:
    peft = pytest.importorskip("peft")
    if "target_parameters" not in peft.LoraConfig.__dataclass_fields__:
        pytest.skip("this peft adapts layers alone")

    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weights = nn.Parameter(torch.randn(3, 4, 4))

        def forward(self, x: Tensor) -> Tensor:
            return torch.einsum("bi,eij->bj", x, self.weights).square().mean()

    torch.manual_seed(0)
    config = peft.LoraConfig(r=2, target_modules=[], target_parameters=["0.weights"], init_lora_weights=False)
    model = peft.get_peft_model(nn.Sequential(Experts()), config)
    twin = copy.deepcopy(model)
    compiled = memgraph.compile(model, ROOM)
    for each in (compiled, twin):
        each(X).backward()
    trained = [[p for p in each.parameters() if p.requires_grad] for each in (model, twin)]
    assert trained[0] and all(torch.equal(p.grad, q.grad) for p, q in zip(*trained, strict=True))


class Made(nn.Linear):
    def __init__(self, make: Any) -> None:
        super().__init__(4, 4)
        self.make = make

    def forward(self, x: Tensor) -> Tensor:
        h = super().forward(x)
        made: Tensor = self.make(h, x)
        return h * made.sum() + made.dtype.itemsize


@pytest.mark.parametrize(
    "make",
    [
        lambda h, x: torch.tensor([row.max() for row in x]),
        lambda h, x: torch.tensor([[h.max(), 3], [1.5, True]], dtype=torch.float64),
        lambda h, x: torch.tensor((x.argmax(), x.argmin())),
        lambda h, x: torch.as_tensor([x.argmax(), 2]),
        lambda h, x: h.new_tensor([x.argmax(), 2]),
        lambda h, x: x.argmax().new_tensor([h.argmax(), 2], dtype=torch.int16),  # which needs the value
    ],
)
def test_a_list_with_tensors_in_it_becomes_a_tensor(make: Any) -> None:
    model = Made(make)
    twin = copy.deepcopy(model)
    compiled = memgraph.compile(model, ROOM)
    for x in (X, X.flip(0), X.sin()):
        assert torch.equal(compiled(x), twin(x))
        for each in (compiled, twin):
            each(x).sum().backward()
    assert same_gradients(model, twin)


def test_the_values_of_such_a_list_are_no_guards() -> None:
    assert not capture(Made(lambda h, x: torch.tensor([row.max() for row in x])), (X,), {}).guards


@pytest.mark.filterwarnings("ignore:to - 1 is out of bounds")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.uint8])
@pytest.mark.parametrize(("low", "high"), [(0, 3), (5, 12), (-4, 9), (0, 2**33)])
def test_numbers_between_two_are_drawn_as_in_eager(dtype: torch.dtype, low: int, high: int) -> None:
    largest = 2**40 if dtype.is_floating_point else torch.iinfo(dtype).max
    if (low < 0 and dtype is torch.uint8) or high > largest:
        pytest.skip("eager refuses it")
    made: list[Any] = []
    module = Made(lambda h, x: torch.empty(16, dtype=dtype).random_(low, high).double())
    for model in (module, memgraph.compile(module, ROOM)):
        torch.manual_seed(3)
        made.append((model(X), torch.rand(2)))
    assert all(map(torch.equal, *made))


def test_a_draw_that_no_code_can_name_is_refused_with_what_helps() -> None:
    with pytest.raises(memgraph.CaptureError, match=r"random_\.from.*\n.*randint"):
        capture(Made(lambda h, x: torch.empty(16).random_(3, None)), (X,), {})
