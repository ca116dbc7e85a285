"""A training in stages is saved, and goes on with another number of stages, bit for bit."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import memgraph
from memgraph import StateError
from memgraph.stages.pipeline import Pipeline
from tests.support.ranks import on_ranks
from tests.support.staged_models import made

ADAMW = functools.partial(torch.optim.AdamW, lr=1e-2)


def _pipe(name: str, optimizer: Any = ADAMW, **given: Any) -> tuple[Pipeline, dict[str, Any]]:
    model, batch = made(name, 4)
    pipe = memgraph.pipeline(model, "1GB", 2, optimizer=optimizer, **given)
    pipe.prepare(**batch)
    return pipe, batch


def _train(pipe: Pipeline, batch: dict[str, Any], steps: int) -> None:
    for _ in range(steps):
        pipe.step(**batch)
        pipe.clip_grad_norm_(0.5)
        assert pipe.optimizer is not None
        pipe.optimizer.step()
        pipe.optimizer.zero_grad()


def _bytes(pipe: Pipeline) -> dict[str, bytes]:
    """Return the whole state on rank 0."""
    return {key: value.numpy().tobytes() for key, value in pipe.full_state_dict().items()}


def _saved(rank: int, name: str, folder: Path) -> dict[str, bytes]:
    """Save after two steps; return the whole state after four."""
    pipe, batch = _pipe(name)
    _train(pipe, batch, 1)
    pipe.save_sharded(folder)  # is replaced
    _train(pipe, batch, 1)
    assert pipe.optimizer is not None
    pipe.optimizer.param_groups[0]["lr"] = 5e-3
    pipe.save_sharded(folder)
    _train(pipe, batch, 2)
    return _bytes(pipe)


def _continued(rank: int, name: str, folder: Path, schedule: str) -> dict[str, bytes]:
    pipe, batch = _pipe(name, schedule=schedule)
    with torch.no_grad():
        for parameter in pipe.parameters():
            parameter.zero_()
    pipe.load_sharded(folder)
    _train(pipe, batch, 2)
    return _bytes(pipe)


@pytest.mark.long
@pytest.mark.parametrize("name", ["gpt2", "batch norm"])
def test_another_number_of_stages_goes_on_bit_for_bit(name: str, tmp_path: Path) -> None:
    wanted = on_ranks(2, _saved, name, tmp_path / "saved")[0]
    for ranks, schedule in ((1, "1f1b"), (3, "1f1b"), (2, "interleaved")):
        found = on_ranks(ranks, _continued, name, tmp_path / "saved", schedule)[0]
        assert [key for key, value in wanted.items() if value != found[key]] == []


def _states(pipe: Pipeline) -> dict[str, bytes]:
    """Return what the optimizer keeps for the parameters of this rank."""
    assert pipe.optimizer is not None
    kept = {name: pipe.optimizer.state[parameter] for name, parameter in pipe.named_parameters()}
    return {f"{name}.{key}": each.numpy().tobytes() for name, state in kept.items() for key, each in state.items()}


def _kept(rank: int, folder: Path, schedule: str, stages: int | None) -> tuple[dict[str, bytes], dict[str, bytes]]:
    """Return parameters and states when the training is saved after two steps."""
    pipe, batch = _pipe("gpt2", schedule=schedule, stages_per_rank=stages)
    _train(pipe, batch, 2)
    pipe.save_sharded(folder)
    return _bytes(pipe), _states(pipe)


def _loaded(rank: int, folder: Path, schedule: str, stages: int | None) -> tuple[dict[str, bytes], dict[str, bytes]]:
    pipe, _ = _pipe("gpt2", schedule=schedule, stages_per_rank=stages)
    with torch.no_grad():
        for parameter in pipe.parameters():
            parameter.zero_()
    pipe.load_sharded(folder)
    return _bytes(pipe), _states(pipe)


@pytest.mark.long
@pytest.mark.parametrize(
    "saved, loaded",
    [
        (("interleaved", 2), ("1f1b", None)),
        (("1f1b", None), ("interleaved", 3)),
        pytest.param(("interleaved", 3), ("interleaved", 2), marks=pytest.mark.slow),
        pytest.param(("zero_bubble", None), ("interleaved", 2), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_another_schedule_loads_parameters_and_states_bit_for_bit(
    saved: tuple[str, int | None], loaded: tuple[str, int | None], tmp_path: Path
) -> None:
    wanted = on_ranks(2, _kept, tmp_path / "saved", *saved)
    found = on_ranks(2, _loaded, tmp_path / "saved", *loaded)
    assert found[0][0] == wanted[0][0]
    before, after = ({**first, **second} for (_, first), (_, second) in (wanted, found))
    assert len(before) > 0 and after == before


def _refused(rank: int, folder: Path) -> list[str]:
    """Return the errors for a folder that does not fit; nothing has changed."""
    pipe, _ = _pipe("skips")
    pipe.save_sharded(folder)
    errors = []
    others = [_pipe("batch norm")[0], _pipe("skips", torch.optim.SGD)[0], pipe]
    for each, where in zip(others, (folder, folder, folder.with_name("none")), strict=True):
        before = {key: value.clone() for key, value in each.state_dict().items()}
        with pytest.raises(StateError) as caught:
            each.load_sharded(where)
        errors.append(str(caught.value))
        assert all(torch.equal(value, before[key]) for key, value in each.state_dict().items())
    return errors


@pytest.mark.long
def test_what_does_not_fit_is_refused(tmp_path: Path) -> None:
    for model, optimizer, missing in on_ranks(2, _refused, tmp_path / "saved"):
        assert "another model" in model
        assert "AdamW" in optimizer and "SGD" in optimizer
        assert "no checkpoint in" in missing


def _clipped(rank: int, norm_type: float) -> tuple[list[str], bool]:
    """Return the parameters whose gradients are clipped otherwise than in eager."""
    model, batch = made("gpt2", 4)
    pipe = memgraph.pipeline(model, "1GB", 1)
    pipe.step(**batch)
    plain, _ = made("gpt2", 4)
    plain(**batch).loss.backward()
    wanted = nn.utils.clip_grad_norm_(plain.parameters(), 0.25, norm_type)
    found = pipe.clip_grad_norm_(0.25, norm_type)
    known = dict(plain.named_parameters())
    wrong = [name for name, each in pipe.named_parameters() if not torch.equal(each.grad, known[name].grad)]  # type: ignore[arg-type]
    return wrong, torch.equal(found, wanted)


@pytest.mark.long
@pytest.mark.parametrize("norm_type", [2.0, 1.0, float("inf")])
def test_gradients_are_clipped_as_in_eager(norm_type: float) -> None:
    assert on_ranks(2, _clipped, norm_type) == [([], True)] * 2


def _infinite(rank: int) -> str:
    model, batch = made("skips", 4)
    pipe = memgraph.pipeline(model, "1GB", 1)
    pipe.step(**batch)
    if rank == 1:
        next(pipe.parameters()).grad.fill_(float("inf"))  # type: ignore[union-attr]
    with pytest.raises(RuntimeError, match="can't be clipped"):
        pipe.clip_grad_norm_(1.0, error_if_nonfinite=True)
    with pytest.raises(memgraph.AgreementError):
        pipe.clip_grad_norm_(1.0 + rank)
    return str(pipe.clip_grad_norm_(1.0).item())


def test_a_norm_that_is_not_finite_is_an_error_on_all_ranks() -> None:
    assert on_ranks(2, _infinite) == ["inf"] * 2
