"""Captures that many lengths share, where sizes are equal by chance or Python reads positions."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

import memgraph
from memgraph.capture.joint import trace_joint
from memgraph.tensors.traced_size import SizeTrace, always_equal
from tests.support.lengths import Branch, Traces, check, ids_of


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

    def traced(*call: Any, mode: Any, **rest: Any) -> Any:
        with_symbols.append(mode.sizes is not None)
        return plain(*call, mode=mode, **rest)

    with_symbols: list[bool] = []
    plain = trace_joint._traced
    monkeypatch.setattr(trace_joint, "_traced", traced)
    check(Remembers(lambda linear, x: linear(x).relu()), [(torch.randn(n, 6),) for n in (9, 7, 5)])
    assert with_symbols == [False, True]


def test_what_python_reads_of_positions_holds_for_lengths_at_which_it_is_the_same(traces: Traces) -> None:
    def near_or_far(linear: Any, x: Tensor) -> Tensor:
        return linear(x).sin() if torch.arange(x.shape[0]).sum() > 20 else linear(x).cos()

    check(Branch(near_or_far), [(torch.randn(n, 6),) for n in (9, 8, 12, 7)])
    assert (traces.plain, traces.general) == (1, 1)
    check(Branch(near_or_far), [(torch.randn(n, 6),) for n in (9, 8, 4, 7, 3, 5, 12, 6, 2)])


@pytest.mark.long
def test_a_language_model_without_a_mask_shares_a_capture(traces: Traces) -> None:
    sizes: dict[str, Any] = {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=50, hidden_size=16, intermediate_size=32, **sizes))
    plain = copy.deepcopy(model)
    compiled = memgraph.compile(model, accumulate=False)
    for length in (12, 9, 17, 5):  # it asks of positions that it has made whether they begin again
        losses = [each(input_ids=ids_of(length), labels=ids_of(length)).loss for each in (plain, compiled)]
        for loss in losses:
            loss.backward()
        assert torch.equal(*losses)
        pairs = zip(plain.parameters(), model.parameters(), strict=True)
        assert all(a.grad is not None and b.grad is not None and torch.equal(a.grad, b.grad) for a, b in pairs)
        plain.zero_grad()
        model.zero_grad()
    assert (traces.plain, traces.general) == (1, 1)
