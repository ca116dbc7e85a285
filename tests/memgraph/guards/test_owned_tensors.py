"""One walk finds what torch's two find, and a key is hashed once."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from memgraph.guards.assumptions import ATTRIBUTES, TENSORS
from memgraph.guards.attribute_guard import AttributeGuard
from memgraph.guards.owned_tensors import owned_tensors
from memgraph.guards.signature import signature
from tests.support.zoo import CASES, Case, fresh


def same(found: tuple[list[Tensor], list[Tensor]], module: nn.Module) -> bool:
    wanted = list(module.parameters()), list(module.buffers())
    return [list(map(id, tensors)) for tensors in found] == [list(map(id, tensors)) for tensors in wanted]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_tensors_are_those_of_torch_in_its_order(case: Case) -> None:
    model, _ = fresh(case)
    assert same(owned_tensors(model), model)


def test_shared_modules_tensors_and_none_count_once_or_not() -> None:
    first, second = nn.Linear(2, 2, bias=False), nn.Linear(2, 2)
    second.weight = first.weight
    first.register_buffer("absent", None)
    buffer = torch.ones(1)
    first.register_buffer("kept", buffer, persistent=False)
    second.register_buffer("same", buffer)
    both, other = nn.Sequential(first, second), nn.Sequential(second)
    both.register_module("empty", None)
    other.append(both)  # a module that is shared, not a circle
    module = nn.ModuleDict({"a": both, "b": first, "c": other})
    assert same(owned_tensors(module), module)
    assert [len(tensors) for tensors in owned_tensors(module)] == [2, 1]


def test_a_module_with_lists_of_its_own_is_asked() -> None:
    class Hides(nn.Linear):
        def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
            return (pair for pair in super().named_parameters(*args, **kwargs) if pair[0] != "bias")

    module = Hides(2, 2)
    assert [id(parameter) for parameter in owned_tensors(module)[0]] == [id(module.weight)]


def test_the_tensors_of_a_key_are_the_same_object_until_they_differ() -> None:
    module = nn.Linear(2, 2)
    attributes = AttributeGuard(module)

    def key() -> Any:
        return signature(None, [], attributes)

    before, again = key(), key()
    assert before == again and before[TENSORS] is again[TENSORS] and before[ATTRIBUTES] is again[ATTRIBUTES]
    module.weight.requires_grad_(False)
    fresh_key: Any = signature(None, [], AttributeGuard(module))
    assert key() != before and key()[TENSORS] == fresh_key[TENSORS]
