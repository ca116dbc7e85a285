"""A pipeline makes the gradients of the plain model, to the bit, for each schedule, and any number of micro-batches."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

import memgraph
from passes.stages.pipeline_schedule import SCHEDULES
from tests.support.ranks import on_ranks
from tests.support.staged_models import in_turn, made

Result = tuple[list[str], list[str], float | None, float]
CHUNKS = (1, 2, 3, 7)
SHARED = ("tied", "t5")  # whose stages add up gradients of one table
CASES = [
    *((name, schedule, 3) for name in ("gpt2", "batch norm") for schedule in SCHEDULES),
    *((name, "1f1b", ranks) for name, ranks in (("gpt2", 2), ("tied", 2), ("frozen", 3))),
]
FURTHER = [
    *((name, schedule, 2) for name in ("gpt2", "batch norm") for schedule in SCHEDULES[1:]),
    *((name, schedule, 4) for name in ("gpt2", "skips") for schedule in SCHEDULES),
    *(
        (name, "1f1b", ranks)
        for name, ranks in (("batch norm", 2), ("tied", 3), ("frozen", 2), ("t5", 3), ("u-net", 3))
    ),
]
SLOW = [pytest.param(*case, marks=pytest.mark.slow) for case in FURTHER]


def _gradients(rank: int, name: str, schedule: str, chunks: int) -> Result:
    """Return the rank's parameters and averages, those that differ, and the loss beside that of the plain model."""
    model, batch = made(name, 3 * chunks)
    plain, expected = in_turn(model, batch, chunks, steps=2)
    pipe = memgraph.pipeline(model, "1GB", chunks, schedule=schedule)
    loss = None
    for _ in range(2):  # the second adds to the gradients of the first
        loss = pipe.step(**batch)
    wanted = dict(plain.named_parameters())
    names = [key for key, _ in pipe.named_parameters()]
    wrong = [key for key, value in pipe.named_parameters() if not same(value.grad, wanted[key].grad, name)]
    known = dict(plain.named_buffers())
    averages = {key: value for key, value in model.named_buffers() if "norm" in key and not value.is_meta}
    wrong += [key for key, value in averages.items() if not torch.equal(value, known[key])]
    return [*names, *averages], wrong, None if loss is None else loss.item(), expected


def _all(rank: int, name: str, schedule: str, each: Sequence[int]) -> list[Result]:
    return [_gradients(rank, name, schedule, chunks) for chunks in each]


def same(found: torch.Tensor | None, wanted: torch.Tensor | None, name: str) -> bool:
    if found is None or wanted is None:
        return found is wanted
    return torch.allclose(found, wanted, atol=1e-6) if name in SHARED else torch.equal(found, wanted)


@pytest.mark.long
@pytest.mark.parametrize("name, schedule, ranks", [*CASES, *SLOW])
def test_gradients_are_those_of_the_plain_model(name: str, schedule: str, ranks: int) -> None:
    results = on_ranks(ranks, _all, name, schedule, (10,) if ranks == 4 else CHUNKS)
    for each in zip(*results, strict=True):
        trained = {key for names, *_ in each for key in names}
        model, _ = made(name, 1)
        averages = {key for key, _ in model.named_buffers() if "norm" in key}
        assert trained == averages | {key for key, value in model.named_parameters() if value.requires_grad}
        assert [wrong for _, wrong, *_ in each] == [[]] * ranks
        assert [loss is None for *_, loss, _ in each] == [True] * (ranks - 1) + [False]
        assert each[-1][2] == pytest.approx(each[-1][3], rel=1e-6)


def _doubled(rank: int) -> list[str]:
    """Return the parameters of 64 bits whose gradients differ."""
    model, batch = made("skips", 7)
    model, batch = model.double(), {key: value.double() for key, value in batch.items()}
    plain, _ = in_turn(model, batch, 3)
    pipe = memgraph.pipeline(model, "1GB", 3)
    pipe.step(**batch)
    wanted = dict(plain.named_parameters())
    return [key for key, value in pipe.named_parameters() if not same(value.grad, wanted[key].grad, "skips")]


@pytest.mark.long
def test_the_share_of_the_rows_has_the_bits_of_the_loss() -> None:
    assert on_ranks(2, _doubled) == [[]] * 2


@pytest.mark.long
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_skips_over_stages_block_no_rank(schedule: str) -> None:
    for names, wrong, *_ in on_ranks(4, _gradients, "skips", schedule, 6):
        assert (len(names) > 0, wrong) == (True, [])


@pytest.mark.long
def test_a_process_without_a_group_is_one_stage() -> None:
    names, wrong, loss, expected = _gradients(0, "gpt2", "1f1b", 3)
    assert (len(names) > 30, wrong) == (True, [])
    assert loss == pytest.approx(expected, rel=1e-6)
