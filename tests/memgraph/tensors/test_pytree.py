"""`unflatten` inverts `flatten`."""

from __future__ import annotations

import enum
import threading
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.modeling_outputs import CausalLMOutputWithPast

from memgraph.errors import CaptureError
from memgraph.tensors.pytree import flatten, unflatten


class Color(enum.Enum):
    RED = 1


@dataclass
class Opaque:
    """Not registered with pytree."""

    x: Tensor
    pair: tuple[Tensor, str]
    same: Any = None


def cache(length: int) -> DynamicCache:
    found = DynamicCache()
    found.update(torch.ones(1, 2, length, 4), torch.zeros(1, 2, length, 4), 0)
    return found


def test_containers_are_opened_and_constants_are_leaves() -> None:
    x = torch.ones(2)
    leaves, spec = flatten(((x, None), {"a": [3, x], "b": Color.RED, "c": torch.float32, "d": len}))
    assert [type(leaf) for leaf in leaves] == [Tensor, type(None), int, Tensor, Color, torch.dtype, type(len)]
    assert unflatten(leaves, spec) == ((x, None), {"a": [3, x], "b": Color.RED, "c": torch.float32, "d": len})


def test_an_object_is_taken_apart_and_gets_other_tensors() -> None:
    x, y = torch.ones(2), torch.zeros(3)
    leaves, spec = flatten([Opaque(x, (y, "text"), same=x)])
    assert leaves == [x, y] or [id(leaf) for leaf in leaves] == [id(x), id(y), id(x)]
    (back,) = unflatten([y, x, y], spec)
    assert isinstance(back, Opaque) and back.x is y and back.pair[0] is x and back.pair[1] == "text" and back.same is y


def test_a_class_that_no_import_finds_is_no_obstacle() -> None:
    @dataclass
    class Local:
        x: Tensor

    leaves, spec = flatten(Local(torch.ones(1)))
    assert type(unflatten(leaves, spec)) is Local


def test_equal_forms_have_equal_and_hashable_specs() -> None:
    one, other = (
        flatten([Opaque(torch.ones(2), (torch.ones(1), "a")), 3]),
        flatten([Opaque(torch.ones(5), (torch.ones(1), "a")), 4]),
    )
    assert one[1] == other[1] and hash(one[1]) == hash(other[1])
    assert one[1] != flatten([Opaque(torch.ones(2), (torch.ones(1), "b")), 3])[1]


def test_a_key_value_cache_among_the_outputs_of_a_model() -> None:
    output = CausalLMOutputWithPast(loss=torch.ones(()), past_key_values=cache(3))
    leaves, spec = flatten(output)
    assert [tuple(leaf.shape) for leaf in leaves] == [(), (1, 2, 3, 4), (1, 2, 3, 4)]
    back = unflatten([leaf + 1 for leaf in leaves], spec)
    assert isinstance(back, CausalLMOutputWithPast) and isinstance(back.past_key_values, DynamicCache)
    assert back.past_key_values.get_seq_length() == 3
    layer: Any = back.past_key_values.layers[0]
    assert torch.equal(layer.keys, torch.full((1, 2, 3, 4), 2.0))


def test_what_can_not_be_taken_apart_is_named() -> None:
    with pytest.raises(CaptureError, match=r"_thread\.lock"):
        flatten({"a": threading.Lock()})


def test_a_shape_stays_one() -> None:
    tree = {"shapes": [torch.Size([1, 2]), (3, None)], "other": torch.Size([])}
    back = unflatten(*flatten(tree))
    assert back == tree and type(back["shapes"][0]) is type(back["other"]) is torch.Size


def test_the_number_of_leaves_must_fit() -> None:
    _, spec = flatten([1, 2])
    with pytest.raises(ValueError, match="2 leaves belong to this tree, 1 were given"):
        unflatten([1], spec)
