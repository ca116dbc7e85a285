"""`schedule="auto"` takes the schedule with the least forecast time, within the budgets."""

from __future__ import annotations

import pytest
import torch

import memgraph
from passes import Network
from tests.support.ranks import on_ranks
from tests.support.staged_models import in_turn, wide

NETWORKS = {"fast": Network(1e6, 1.0), "slow": Network(1e6, 1e5)}


def _forecasts(rank: int, network: str) -> tuple[dict[str, float], str, list[str]]:
    """Return the forecasts of all schedules, the one that was taken, and the parameters with other gradients."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("memgraph.stages.step_capture.measure_network", lambda group: NETWORKS[network])
        us = {}
        for schedule in ("1f1b", "zero_bubble", "interleaved", "auto"):
            model, batch = wide(8)
            pipe = memgraph.pipeline(model, "1GB", 4, schedule=schedule)
            pipe.prepare(**batch)
            plan = pipe._latest
            us[schedule] = plan.schedule.timeline(plan.times).us
    plain, _ = in_turn(wide(8)[0], batch, 4)
    pipe.step(**batch)
    wanted = dict(plain.named_parameters())
    wrong = [key for key, value in pipe.named_parameters() if not torch.equal(value.grad, wanted[key].grad)]  # type: ignore[arg-type]
    return us, plan.schedule.name, wrong


@pytest.mark.long
@pytest.mark.parametrize("network", NETWORKS)
def test_auto_takes_the_fastest(network: str) -> None:
    results = on_ranks(2, _forecasts, network)
    for us, taken, wrong in results:
        auto = us.pop("auto")
        assert auto == min(us.values()) == us[taken]
        assert wrong == []
        assert network == "fast" or taken != "interleaved"  # which sends most


def _tight(rank: int) -> tuple[str, bool]:
    """Return the schedule that is taken where interleaved does not fit, and whether the forecast does."""
    model, batch = wide(4)
    with pytest.raises(memgraph.StagesBudgetError) as caught:
        memgraph.pipeline(model, "300KB", 4, schedule="auto").step(**batch)
    budget = int(1.05 * max(caught.value.smallest))
    with pytest.raises(memgraph.BudgetError):
        memgraph.pipeline(wide(4)[0], budget, 4, schedule="interleaved").step(**batch)
    pipe = memgraph.pipeline(wide(4)[0], budget, 4, schedule="auto")
    pipe.step(**batch)
    return pipe._latest.schedule.name, pipe.peak <= budget


@pytest.mark.long
def test_auto_takes_one_that_fits() -> None:
    for name, fits in on_ranks(2, _tight):
        assert (name != "interleaved", fits) == (True, True)
