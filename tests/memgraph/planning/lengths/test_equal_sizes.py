"""Sizes that are equal at one length only: they are no reason to capture that length for itself."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from memgraph.capture.joint import trace_joint
from memgraph.tensors.traced_size import SizeTrace, always_equal
from tests.support.lengths import Branch, Traces, check


class Classes(nn.Module):
    """Two classes, and a batch of any size: the gradient of two rows has the shape of its transpose."""

    def __init__(self) -> None:
        super().__init__()
        self.inside, self.head = nn.Linear(6, 6), nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.inside(x).relu())


def test_a_batch_of_as_many_rows_as_there_are_classes_shares_the_capture_of_others(traces: Traces) -> None:
    check(Classes(), [(torch.randn(n, 6),) for n in (7, 2, 6, 9, 2)])
    assert (traces.plain, traces.general) == (1, 1)


def test_a_size_that_is_the_length_after_division_is_known_to_be(traces: Traces) -> None:
    def squares(linear: Any, x: Tensor) -> Tensor:
        return (linear(x) @ linear(x).T).flatten().view(x.shape[0], -1).sin()

    check(Branch(squares), [(torch.randn(n, 6),) for n in (9, 7, 5)])
    assert (traces.plain, traces.general) == (1, 1)


def test_to_compare_sizes_limits_no_trace() -> None:
    trace = SizeTrace([2, 9])
    s, t = trace.sizes
    assert always_equal([s, 3 * t], [s, t * 3]) and always_equal([s * t // t], [s]) and always_equal([4], [4])
    assert not always_equal([s], [2]) and not always_equal([s], [t]) and not always_equal([s], [s, s])
    assert not trace.env.guards and trace.holds([5, 7])


def test_a_forward_that_sets_an_attribute_is_traced_with_symbols_once(monkeypatch: pytest.MonkeyPatch) -> None:
    class Remembers(Branch):
        kind = ""

        def forward(self, x: Tensor) -> Tensor:
            self.kind = "rows"
            return super().forward(x)

    def traced(call: Any, mode: Any, *rest: Any) -> Any:
        with_symbols.append(mode.sizes is not None)
        return trace_joint._traced(call, mode, *rest)

    with_symbols: list[bool] = []
    monkeypatch.setattr(trace_joint, "partial", lambda _, *given: partial(traced, *given))
    check(Remembers(lambda linear, x: linear(x).relu()), [(torch.randn(n, 6),) for n in (9, 7, 5)])
    assert with_symbols == [False, False, True]  # with the attribute before it is set, and after
