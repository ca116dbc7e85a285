"""A pipeline makes the gradients of the plain model, to the bit, for each schedule, and any number of micro-batches."""

from __future__ import annotations

import pytest
import torch

import memgraph
from passes.stages.pipeline_schedule import SCHEDULES
from tests.support.ranks import on_ranks
from tests.support.staged_models import in_turn, made

CHUNKS = (1, 2, 3, 7)
CASES = [(name, schedule) for name in ("gpt2", "batch norm") for schedule in SCHEDULES]


def _gradients(rank: int, name: str, schedule: str, chunks: int) -> tuple[list[str], list[str], float | None, float]:
    """Return the rank's parameters and averages, those that differ, and the loss beside that of the plain model."""
    model, batch = made(name, 3 * chunks)
    plain, expected = in_turn(model, batch, chunks, steps=2)
    pipe = memgraph.pipeline(model, "1GB", chunks, schedule=schedule)
    for _ in range(2):  # the second adds to the gradients of the first
        loss = pipe.step(**batch)
    wanted = dict(plain.named_parameters())
    names = [key for key, _ in pipe.named_parameters()]
    wrong = [key for key, value in pipe.named_parameters() if not same(value.grad, wanted[key].grad, name)]
    known = dict(plain.named_buffers())
    averages = {key: value for key, value in model.named_buffers() if "norm" in key and not value.is_meta}
    wrong += [key for key, value in averages.items() if not torch.equal(value, known[key])]
    return [*names, *averages], wrong, None if loss is None else loss.item(), expected


def _all(rank: int, name: str, schedule: str) -> list[tuple[list[str], list[str], float | None, float]]:
    return [_gradients(rank, name, schedule, chunks) for chunks in CHUNKS]


def same(found: torch.Tensor | None, wanted: torch.Tensor | None, name: str) -> bool:
    if found is None or wanted is None:
        return found is wanted
    return torch.allclose(found, wanted, atol=1e-6) if name == "tied" else torch.equal(found, wanted)


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("name, schedule", [*CASES, ("tied", "1f1b"), ("frozen", "1f1b")])
def test_gradients_are_those_of_the_plain_model(name: str, schedule: str, ranks: int) -> None:
    results = on_ranks(ranks, _all, name, schedule)
    for each in zip(*results, strict=True):
        trained = {key for names, *_ in each for key in names}
        model, _ = made(name, 1)
        averages = {key for key, _ in model.named_buffers() if "norm" in key}
        assert trained == averages | {key for key, value in model.named_parameters() if value.requires_grad}
        assert [wrong for _, wrong, *_ in each] == [[]] * ranks
        assert [loss is None for *_, loss, _ in each] == [True] * (ranks - 1) + [False]
        assert each[-1][2] == pytest.approx(each[-1][3], rel=1e-6)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_skips_over_stages_block_no_rank(schedule: str) -> None:
    for names, wrong, *_ in on_ranks(4, _gradients, "skips", schedule, 6):
        assert (len(names) > 0, wrong) == (True, [])


def test_a_process_without_a_group_is_one_stage() -> None:
    names, wrong, loss, expected = _gradients(0, "gpt2", "1f1b", 3)
    assert (len(names) > 30, wrong) == (True, [])
    assert loss == pytest.approx(expected, rel=1e-6)
