"""An argument of save_sharded or load_sharded that is wrong on one rank is told on the others, which do not wait."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import nn, optim

import memgraph
from memgraph import AgreementError, ShardError, StateError
from tests.memgraph.oss.checkpoint.test_full_state import refusal
from tests.support.ranks import on_ranks

WRONG: list[tuple[type[Exception], dict[str, Any], str]] = [
    (TypeError, {"folder": 5}, "folder is an int, 5; give the path of a folder"),
    (ValueError, {"folder": ""}, "folder=''; give the path of a folder"),
    (ValueError, {"folder": "a\0b"}, "give the path of a folder"),
    (TypeError, {"model": "m"}, "model is a str, 'm'; give the torch.nn.Module"),
    (ShardError, {"optimizer": None}, "the optimizer is None; give a memgraph.OSS"),
    (ShardError, {"optimizer": optim.SGD([torch.ones(1)])}, "the optimizer is a SGD; give a memgraph.OSS"),
]
SECONDS = 40  # of the group; a rank that waits for one that has raised does so to their end


class Stateless(nn.Linear):
    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        raise KeyError("no state today")


def _wrong(rank: int, folder: str) -> None:
    torch.manual_seed(0)
    model = nn.Linear(8, 8)
    right: dict[str, Any] = {"folder": folder, "model": model, "optimizer": memgraph.OSS(model.parameters())}
    memgraph.save_sharded(**right)
    for call in (memgraph.save_sharded, memgraph.load_sharded):
        for kind, wrong, words in WRONG:
            for who in (0, 1):
                given = {**right, **wrong} if rank == who else right
                messages = refusal(
                    kind if rank == who else AgreementError, lambda given=given, call=call: call(**given)
                )
                assert words in messages
                assert rank == who or f" on rank {who}" in messages
        given = {**right, "model": Stateless(8, 8) if rank else model}
        assert "has failed on rank 1: KeyError: 'no state today'" in refusal(
            StateError, lambda given=given, call=call: call(**given)
        )
    memgraph.load_sharded(**right)


def test_a_wrong_argument_on_one_rank_is_an_error_on_all() -> None:
    with tempfile.TemporaryDirectory() as folder:
        on_ranks(2, _wrong, str(Path(folder) / "run"), seconds=SECONDS)
