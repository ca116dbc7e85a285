"""The numbers of a product are drawn on a GPU, where equal ones take less time."""

from __future__ import annotations

import torch

from memgraph.profile.generated_arguments import randomize

CPU = torch.device("cpu")


def test_numbers_are_drawn_and_indices_are_not() -> None:
    numbers, expanded = torch.full((8, 8), 0.5), torch.full((1, 8), 0.5, dtype=torch.bfloat16).expand(4, 8)
    index, state = torch.zeros(8, dtype=torch.int64), torch.get_rng_state()
    randomize(((numbers, [expanded]), {"index": index}), CPU)
    assert len(set(numbers.flatten().tolist())) == 64 and len(set(expanded.flatten().tolist())) > 4
    assert not index.any() and torch.equal(torch.get_rng_state(), state)


def test_they_are_the_same_each_time() -> None:
    one, two = torch.zeros(16), torch.zeros(16)
    randomize(one, CPU)
    randomize(two, CPU)
    assert torch.equal(one, two)
