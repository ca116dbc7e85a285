"""The bytes that an update in windows allocates are forecast, nearly exactly."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from memgraph.optim.window_memory import window_bytes
from memgraph.profile.memory_meter import measure_peak, resident_bytes
from tests.support.windowed_training import (
    OPTIMIZERS,
    SIDES,
    STEPS,
    near_states,
    training,
)


@pytest.mark.long
@pytest.mark.parametrize("side", ["all", "states", "parameters and states"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_bytes_of_an_update_are_known_before_and_nearly_exact(tmp_path: Path, name: str, side: str) -> None:
    far, one = SIDES[side], training(tmp_path, OPTIMIZERS[name], SIDES[side], nbytes=400_000)
    trained = one.parameters[:-1]
    foreseen = window_bytes(one.optimizer, 400_000, far, trained)
    seen = []
    for i in range(STEPS):
        one.gradients()
        for parameter in trained:
            if parameter.grad is None:
                parameter.grad = one.at_home(torch.zeros_like(parameter), far.gradients(parameter))
        before = resident_bytes(near_states(one))
        _, allocated = measure_peak(one.optimizer.step)
        assert allocated is not None
        seen.append(allocated.peak - max(0, resident_bytes(near_states(one)) - before))
        assert seen[-1] <= foreseen[i > 0].total
    assert max(seen[1:]) >= 0.95 * foreseen[1].total - 200
    if "RAdam" not in name and "ASGD" not in name:  # whose first updates take less than their later ones
        assert seen[0] >= 0.9 * foreseen[0].total - 200
