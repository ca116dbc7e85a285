"""An optimizer on tensors without bytes has the states and the workspace that it has on real ones."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn, optim

from memgraph.errors import UpdateError
from memgraph.fit.fake_update import fake_update
from memgraph.optim import optimizer_profiler
from memgraph.optim.optimizer_profiler import update_nbytes

SCALARS = 64  # bytes of scalars that a step makes and that are not followed here


def _model(device: str) -> nn.Module:
    with torch.device(device):
        return nn.Sequential(nn.Linear(300, 1000), nn.Linear(1000, 500), nn.LayerNorm(500))


@pytest.mark.long
@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (optim.AdamW, {}),
        (optim.Adam, {"amsgrad": True}),
        (optim.SGD, {"lr": 0.1}),
        (optim.SGD, {"lr": 0.1, "momentum": 0.9}),
        (optim.RMSprop, {}),
        (optim.RAdam, {}),
        (optim.Adafactor, {}),
    ],
)
def test_states_and_workspace_are_those_of_a_real_step(
    monkeypatch: pytest.MonkeyPatch, kind: Any, options: dict[str, Any]
) -> None:
    monkeypatch.setattr(optimizer_profiler, "LARGE", 1 << 60)  # so that real parameters are stepped on
    states, workspace = update_nbytes(kind(_model("cpu").parameters(), **options))
    update = fake_update(kind(_model("meta").parameters(), **options), "cpu", 1)
    assert update.states == states
    assert workspace - SCALARS <= update.workspace <= workspace


def test_a_gpu_updates_all_parameters_at_once_in_blocks() -> None:
    parameters = list(_model("meta").parameters())
    alone = fake_update(optim.AdamW(parameters), "cpu", 1)
    together = fake_update(optim.AdamW(parameters), "cuda", 512)
    assert together.states % 512 == 0
    assert together.workspace >= sum(p.nbytes for p in parameters) - SCALARS
    assert fake_update(optim.AdamW(parameters, foreach=False), "cuda", 512).workspace < alone.workspace + 8 * 512


def test_an_optimizer_that_copies_values_to_the_host_is_refused() -> None:
    class Halving(optim.SGD):
        def step(self, closure: object = None) -> None:  # type: ignore[override]
            for p in self.param_groups[0]["params"]:
                p.data.copy_(torch.from_numpy(p.detach().numpy() / 2))

    with pytest.raises(UpdateError, match="Halving can't step on tensors without values"):
        fake_update(Halving(_model("meta").parameters(), lr=0.1), "cpu", 1)
