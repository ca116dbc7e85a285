"""A step that reads values in the host's memory is not recorded: a replay would read those of its recording."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from memgraph.capture.constant_fake_mode import ConstantFakeMode
from memgraph.runtime import cuda_graph_checks


def scaled(x: Tensor, factor: Tensor) -> Tensor:
    return x * factor


def graph_of(x: str, factor: str) -> fx.Graph:
    with ConstantFakeMode(), torch.no_grad():
        traced = make_fx(scaled)(torch.empty(8, device=x), torch.empty((), device=factor))
    for node in traced.graph.find_nodes(op="placeholder"):
        node.meta["kind"] = "input"
    return traced.graph


def test_a_number_on_the_host_that_scales_a_gpus_values_is_named() -> None:
    assert cuda_graph_checks._on_host(graph_of("cuda:0", "cpu")) == "the input factor_1 lies in the host's memory"


@pytest.mark.parametrize("device", ["cpu", "cuda:0"])
def test_values_of_one_device_are_recorded(device: str) -> None:
    assert cuda_graph_checks._on_host(graph_of(device, device)) == ""
