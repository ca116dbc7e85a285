"""Forward draws with `random` and numpy: steps, gradients and generators are eager's."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from transformers import HubertConfig, HubertModel, Wav2Vec2Config, Wav2Vec2Model

import memgraph
from tests.support.assumed_values import assumed_values
from tests.support.compare import ROOM

STEPS = 6
X = torch.linspace(-1, 1, 32).view(4, 8)
SPEECH: dict[str, Any] = {
    "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16, "conv_dim": (8, 8),
    "conv_stride": (5, 2), "conv_kernel": (10, 3), "num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2,
    "num_feat_extract_layers": 2, "mask_time_length": 2, "mask_time_prob": 0.3, "mask_feature_prob": 0.2,
    "mask_feature_length": 2, "layerdrop": 0.0,
}  # fmt: skip


class Drawing(nn.Module):
    def __init__(self, then: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.then = then

    def forward(self, x: Tensor) -> Tensor:
        return self.then(self, x).square().mean()


def coin(part: Any, x: Tensor) -> Tensor:
    x = part.first(x)
    return part.second(x) if random.random() < 0.5 else x


def numpy_coin(part: Any, x: Tensor) -> Tensor:
    x = torch.dropout(part.first(x), 0.5, True)
    return part.second(x) if np.random.rand() > 0.5 else x


def coin_beneath_dropout(part: Any, x: Tensor) -> Tensor:
    x = torch.dropout(part.first(x), 0.5, True)
    return part.second(x) if torch.rand([]) < 0.5 else x


def noise(part: Any, x: Tensor) -> Tensor:
    return part.second(part.first(x) + torch.tensor(np.random.normal(size=(4, 8)), dtype=torch.float32))


def scale(part: Any, x: Tensor) -> Tensor:
    return part.first(x) * torch.tensor(random.uniform(1, 2)) + torch.from_numpy(np.random.rand(8)).float()


def choice(part: Any, x: Tensor) -> Tensor:
    return (part.first, part.second)[random.randint(0, 1)](x) * (1 + int(random.random() * 2))


def arithmetic(part: Any, x: Tensor) -> Tensor:
    return part.second(part.first(x)) if 1 - 2 * np.random.uniform(0, 1) > 0.25 else part.first(x)


def facts(model: nn.Module, owner: nn.Module, inputs: Callable[[], Any]) -> list[Any]:
    random.seed(1)
    np.random.seed(1)
    torch.manual_seed(1)
    optimizer = torch.optim.SGD(owner.parameters(), 0.01)
    found = []
    for _ in range(STEPS):
        result = model(inputs())
        loss = result if isinstance(result, Tensor) else result[0].square().mean()
        loss.backward()
        gradients = [None if p.grad is None else p.grad.clone() for p in owner.parameters()]
        states = random.getstate(), repr(np.random.get_state()), torch.get_rng_state()
        found.append((loss.detach().clone(), *gradients, *states))
        optimizer.step()
        optimizer.zero_grad()
    return found


def refuse_differences(model: nn.Module, inputs: Callable[[], Any]) -> memgraph.CompiledModule:
    twin = copy.deepcopy(model)
    expected = facts(twin, twin, inputs)
    compiled = memgraph.compile(model, ROOM, offload=None)
    for ours, theirs in zip(facts(compiled, model, inputs), expected, strict=True):
        for one, other in zip(ours, theirs, strict=True):
            assert torch.equal(one, other) if isinstance(one, Tensor) and isinstance(other, Tensor) else one == other
    for report in compiled.plans:
        assert (report.measured or 0) <= report.peak <= report.budget
    return compiled


@pytest.mark.long
@pytest.mark.parametrize(
    ("then", "plans"),
    [(coin, 2), (numpy_coin, 2), (coin_beneath_dropout, 2), (noise, 1), (scale, 1), (choice, 4), (arithmetic, 2)],
)
@pytest.mark.filterwarnings("ignore:.* calls with arguments of equal sizes")
def test_steps_draw_again_with_python_as_eager_does(then: Any, plans: int) -> None:
    torch.manual_seed(0)
    compiled = refuse_differences(Drawing(then), lambda: X)
    assert len(compiled.plans) <= plans


@pytest.mark.long
@pytest.mark.parametrize(("model", "config"), [(Wav2Vec2Model, Wav2Vec2Config), (HubertModel, HubertConfig)])
def test_speech_models_mask_other_frames_in_each_step_of_one_plan(model: Any, config: Any) -> None:
    """Without the op for the rows under a mask, each number of masked frames would be a plan."""
    torch.manual_seed(0)
    compiled = refuse_differences(model(config(**SPEECH)).train(), lambda: torch.randn(2, 400))
    assert len(compiled.plans) == 1
    assert not assumed_values(compiled.plan)


def test_coins_that_no_input_affects_are_drawn_before_the_first_op() -> None:
    compiled = memgraph.compile(Drawing(coin), ROOM, offload=None)
    compiled(X).backward()
    graph = compiled._latest.parts.captured.graph.graph
    names = [str(node.target) for node in graph.nodes if node.op == "call_function"]
    assert names.index("memgraph_guards.equal.default") < min(i for i, name in enumerate(names) if "addmm" in name)


def float_of(part: Any, x: Tensor) -> Tensor:
    return part.first(x) * float(random.random())


def multiplied(part: Any, x: Tensor) -> Tensor:
    return part.first(x) * random.random()


def array(part: Any, x: Tensor) -> Tensor:
    return part.first(x) * torch.tensor(np.sort(np.random.rand(8)), dtype=torch.float32)


def shuffled(part: Any, x: Tensor) -> Tensor:
    order = [0, 1]
    random.shuffle(order)
    return (part.first, part.second)[order[0]](x)


def stored(part: Any, x: Tensor) -> Tensor:
    part.latest = random.random()
    return part.first(x)


@pytest.mark.parametrize("then", [float_of, multiplied, array, shuffled, stored])
def test_what_would_be_the_same_in_every_step_is_refused_and_nothing_is_drawn(then: Any) -> None:
    model = Drawing(then)
    before = random.getstate(), repr(np.random.get_state())
    with pytest.raises(memgraph.CaptureError, match=r"random|drawn|draws|stores"):
        memgraph.compile(model, ROOM)(X)
    assert (random.getstate(), repr(np.random.get_state())) == before
    assert not hasattr(model, "latest")


def failing(part: Any, x: Tensor) -> Tensor:
    if random.random() < 2:
        raise ValueError("a check of the model's own")
    return x


def test_an_error_of_the_models_own_leaves_the_generators_as_before_the_call() -> None:
    before = random.getstate()
    with pytest.raises(ValueError, match="of the model's own"):
        memgraph.compile(Drawing(failing), ROOM)(X)
    assert random.getstate() == before
