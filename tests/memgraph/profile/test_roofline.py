"""The rates of a device are measured within the memory limit."""

from __future__ import annotations

from functools import partial

import torch

from memgraph.profile import roofline
from memgraph.profile.memory_meter import measure_peak

CPU = torch.device("cpu")


def test_rates_are_measured_in_two_copies_worth_of_bytes() -> None:
    rates, seen = measure_peak(partial(roofline._measure, CPU, torch.float64), CPU)
    assert rates.flops > 0 and rates.nbytes > 0
    assert seen is not None and seen.peak <= 2 * roofline.COPIED
