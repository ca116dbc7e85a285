"""The rates of a device are measured within the memory limit."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from memgraph.profile import op_profiler, roofline
from memgraph.profile.memory_meter import measure_peak
from memgraph.profile.op_profiler import OpProfiler

CPU = torch.device("cpu")


def test_rates_are_measured_in_two_copies_worth_of_bytes() -> None:
    rates, seen = measure_peak(partial(roofline._measure, CPU, torch.float64), CPU)
    assert rates.flops > 0 and rates.nbytes > 0
    assert seen is not None and seen.peak <= 2 * roofline.COPIED


@pytest.mark.parametrize("room, is_measured", [(1 << 20, False), (1 << 30, True)])
def test_rates_are_guessed_where_the_budget_has_no_room(
    monkeypatch: pytest.MonkeyPatch, room: int, is_measured: bool
) -> None:
    def measured(*_: object) -> roofline.Rates:
        asked.append(True)
        return roofline.Rates()

    asked: list[bool] = []
    monkeypatch.setattr(roofline, "measured_rates", measured)
    monkeypatch.setattr(op_profiler, "_measure_with_retry", lambda *_: None)  # the op can't be run
    traced = make_fx(lambda x: x @ x)(torch.randn(33, 33))
    product = next(node for node in traced.graph.nodes if node.op == "call_function")
    for node in traced.graph.nodes:
        node.meta["val"] = torch.empty(33, 33)
    OpProfiler(1 << 40, room)(product)
    assert bool(asked) is is_measured
