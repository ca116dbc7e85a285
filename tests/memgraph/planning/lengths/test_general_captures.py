"""Calls whose lengths differ share one capture with symbols; each step is eager's to the bit, within its budget."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import LlamaConfig, LlamaForCausalLM

import memgraph
from memgraph.capture.capture import capture
from memgraph.capture.sizes.same_capture import is_same_capture
from memgraph.capture.sizes.size_capture import SizeCapture
from memgraph.capture.sizes.size_inputs import SizeInputs
from memgraph.planning import capture_step
from memgraph.tensors.loss_outputs import select_all
from tests.support.lengths import Branch, Encoder, Traces, check, ids_of, trained

Module = Callable[[Tensor], Tensor]


@pytest.mark.long
def test_every_length_after_the_second_is_planned_without_a_trace(traces: Traces) -> None:
    calls = [(ids_of(n), ids_of(n)) for n in (20, 17, 13, 23, 20, 9, 17)]
    check(Encoder(), calls)
    assert (traces.plain, traces.general) == (1, 1)


@pytest.mark.long
def test_lengths_under_a_budget_that_needs_a_plan_are_equal_to_eagers_and_keep_it(traces: Traces) -> None:
    calls = [(ids_of(n, 32), ids_of(n, 32)) for n in (47, 45, 46, 39, 43, 45)]
    plain = memgraph.plan(Encoder(), *calls[0], budget="1GB")
    compiled = check(Encoder(), calls, int(0.85 * plain.peak))
    assert sum(bool(report.plan) for report in compiled.plans) > 3
    assert (traces.plain, traces.general) == (2, 1)  # one for its peak


@pytest.mark.long
def test_a_returned_length_is_that_of_the_call(traces: Traces) -> None:
    check(Encoder(), [(ids_of(n),) for n in (20, 17, 13)])
    assert (traces.plain, traces.general) == (1, 1)


def test_a_batch_and_a_length_may_both_vary(traces: Traces) -> None:
    layers = nn.Sequential(nn.Conv1d(4, 6, 3), nn.ReLU(), nn.Conv1d(6, 8, 3))
    check(layers, [(torch.randn(rows, 4, n),) for rows, n in ((9, 30), (7, 26), (11, 17), (5, 39))])
    assert (traces.plain, traces.general) == (1, 1)


def test_inputs_whose_lengths_were_equal_by_chance_are_captured_for_others() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(4, 8), nn.Linear(4, 8)

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return self.first(x).mean(0) + self.second(y).sum(0)

    lengths = ((9, 9), (7, 7), (6, 6), (5, 8), (3, 4), (7, 3))
    check(Two(), [(torch.randn(a, 4), torch.randn(b, 4)) for a, b in lengths])


def long_or_short(linear: Any, x: Tensor) -> Tensor:
    return linear(x).relu() if x.shape[0] > 10 else linear(x).tanh()


def odd_or_even(linear: Any, x: Tensor) -> Tensor:
    return linear(x[: x.shape[0] // 2]) if x.shape[0] % 2 == 0 else linear(x).exp()


def once_each_eight(linear: Any, x: Tensor) -> Tensor:
    for _ in range(1 + x.shape[0] // 8):
        x = linear(x).sin()
    return x


def number_of_the_length(linear: Any, x: Tensor) -> Tensor:
    return linear(x) * x.shape[0] ** -0.5 + float(x.shape[0])


def table_of_lengths(linear: Any, x: Tensor) -> Tensor:
    return linear(x) * {9: 2.0, 7: 3.0}.get(x.shape[0], 4.0)


def kind_of_the_length(linear: Any, x: Tensor) -> Tensor:
    return linear(x).sin() if type(x.shape[0]) is int else linear(x).cos()


def sum_of_positions(linear: Any, x: Tensor) -> Tensor:
    return linear(x) * (2.0 if torch.arange(x.shape[0]).sum() > 30 else 3.0)


def tensor_of_the_length(linear: Any, x: Tensor) -> Tensor:
    return linear(x) / torch.tensor(x.shape[0])


def first_eight(linear: Any, x: Tensor) -> Tensor:
    return linear(x[:8]).cos()


def squares(linear: Any, x: Tensor) -> Tensor:
    return (linear(x) @ linear(x).T).flatten().view(x.shape[0], -1)[:, : x.shape[0] - 1].sin()


@pytest.mark.long
@pytest.mark.parametrize(
    "forward",
    [
        long_or_short, odd_or_even, once_each_eight, number_of_the_length, table_of_lengths, kind_of_the_length,
        sum_of_positions, tensor_of_the_length, first_eight, squares,
    ],
)  # fmt: skip
def test_what_python_does_with_a_length_is_eagers(forward: Callable[[Any, Tensor], Tensor]) -> None:
    check(Branch(forward), [(torch.randn(n, 6),) for n in (9, 7, 6, 12, 11, 8, 16, 17, 24, 4, 2, 9)])


def test_a_branch_on_the_length_is_captured_once_for_each_side(traces: Traces) -> None:
    check(Branch(long_or_short), [(torch.randn(n, 6),) for n in (9, 7, 5, 12, 11, 13, 14, 8)])
    assert traces.plain + traces.general <= 6


def largest_is_positive(linear: Any, x: Tensor) -> Tensor:
    return linear(x).sin() if x.max() > 1.5 else linear(x).cos()


def times_a_number(linear: Any, x: Tensor) -> Tensor:
    return linear(x) * x.abs().max().item()


def rows_above_zero(linear: Any, x: Tensor) -> Tensor:
    return linear(x[x[:, 0] > 0]).sin()


def values_of_long_ones(linear: Any, x: Tensor) -> Tensor:
    return linear(x) * 2 if x.shape[0] < 10 or x.max() > 1.5 else linear(x) * 3


@pytest.mark.long
@pytest.mark.parametrize("forward", [times_a_number, rows_above_zero])
def test_lengths_stay_constants_where_the_graph_depends_on_values(
    forward: Callable[[Any, Tensor], Tensor], traces: Traces
) -> None:
    torch.manual_seed(0)
    compiled = check(Branch(forward), [(torch.randn(n, 6),) for n in (9, 7, 6, 9, 8)])
    assert traces.general == 0 and not compiled._kept.general.of_lengths


@pytest.mark.long
def test_conditions_on_values_are_checked_at_every_length(traces: Traces) -> None:
    def rows(length: int, largest: float) -> Tensor:
        return torch.rand(length, 6) * largest

    below, above = (tuple((rows(n, most),) for n in (9, 7, 8, 11)) for most in (1.0, 8.0))
    check(Branch(largest_is_positive), below)
    assert traces.general == 2  # of the second length, traced twice; the others have the same answer
    before = traces.plain
    check(Branch(largest_is_positive), [*below, *above, *below])
    assert traces.general == 6  # and of the second length with the other answer
    assert traces.plain - before == 4  # the first length with each answer, for what it asks and with it


@pytest.mark.long
def test_padding_masks_of_every_length_share_a_capture(traces: Traces) -> None:
    sizes: dict[str, Any] = {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1}
    config = LlamaConfig(vocab_size=50, hidden_size=16, intermediate_size=32, **sizes)

    def call(length: int, padded: int) -> dict[str, Tensor]:
        ids, mask = ids_of(length), torch.ones(3, length, dtype=torch.long)
        mask[1:, length - padded :] = 0
        return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}

    def model() -> LlamaForCausalLM:
        torch.manual_seed(0)
        return LlamaForCausalLM(config)

    plain, trained = model(), model()
    compiled = memgraph.compile(trained, accumulate=False)
    for length, padded, traced in (
        (20, 3, 2), (17, 4, 4), (13, 2, 4), (23, 7, 4), (19, 0, 6), (15, 1, 6), (14, 0, 8), (22, 0, 8), (12, 2, 8),
        (16, 0, 8), (23, 0, 8), (23, 7, 8),
    ):  # fmt: skip
        plain.zero_grad()
        trained.zero_grad()
        losses = [each(**call(length, padded)).loss for each in (plain, compiled)]
        for loss in losses:
            loss.backward()
        assert torch.equal(*losses)
        assert all(map(torch.equal, gradients(plain), gradients(trained)))
        assert compiled.plan.measured is not None and compiled.plan.measured <= compiled.plan.peak
        assert traces.plain + traces.general == traced  # twice for each capture: for what it asks, and with the answers


def gradients(module: nn.Module) -> list[Tensor]:
    return [p.grad for p in module.parameters() if p.grad is not None]


@pytest.mark.long
def test_a_length_at_which_values_are_needed_is_captured_for_itself(
    traces: Traces, caplog: pytest.LogCaptureFixture
) -> None:
    torch.manual_seed(0)
    with caplog.at_level(logging.INFO):
        check(Branch(values_of_long_ones), [(torch.randn(n, 6),) for n in (9, 12, 14, 8, 7, 12)])
    assert "lengths stay constants of the graph: an earlier length takes another branch" in caplog.text


def test_lengths_stay_constants_beside_an_opaque_part(traces: Traces) -> None:
    class Opaque(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)

        def forward(self, x: Tensor) -> Tensor:
            return self.second(self.first(x)).sin()

    module = Opaque()
    plain = copy.deepcopy(module)
    compiled = memgraph.compile(module, opaque=["first"])
    calls = [(torch.randn(n, 6),) for n in (9, 7, 6)]
    assert all(map(torch.equal, trained(module, calls, compiled), trained(plain, calls)))
    assert traces.general == 0


def patches(linear: Any, x: Tensor) -> Tensor:
    return F.fold(F.unfold(linear(x)[None, None], 3), x.shape, 3).sin()


def test_a_result_in_a_larger_storage_has_a_constant_length(traces: Traces, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        check(Branch(patches), [(torch.randn(n, 6),) for n in (9, 8, 11)])
    assert "lengths stay constants of the graph: a result lies in a larger storage" in caplog.text


def test_slices_of_a_wider_tensor_keep_their_strides(traces: Traces) -> None:
    data = torch.randn(5, 40)

    class Rows(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(5, 1))

        def forward(self, x: Tensor) -> Tensor:
            return (x * self.scale).sigmoid()

    check(Rows(), [(data[:, :n],) for n in (30, 21, 40, 17)] + [(data[:, :n].contiguous(),) for n in (30, 21, 17)])


@pytest.mark.long
def test_without_gradients_too(traces: Traces) -> None:
    module = Encoder().eval()
    compiled = memgraph.compile(module)
    with torch.no_grad():
        for n in (20, 17, 13):
            assert torch.equal(compiled(ids_of(n))[0], module(ids_of(n))[0])
    assert (traces.plain, traces.general) == (1, 1)


@pytest.mark.long
def test_a_model_that_changes_its_buffers_in_place_is_compared_with_the_first_graph(traces: Traces) -> None:
    norm = nn.Sequential(nn.Conv1d(4, 6, 3), nn.BatchNorm1d(6), nn.ReLU(inplace=True), nn.AvgPool1d(2))
    check(norm, [(torch.randn(3, 4, n),) for n in (20, 16, 13, 24)])


@pytest.mark.long
def test_a_capture_at_another_length_is_that_of_a_trace() -> None:
    module = Encoder()
    first = capture(module, (ids_of(20), ids_of(20)), {})
    inputs = SizeInputs({(0, 1): 0, (1, 1): 0}, [17], [0, 1])
    symbolic = SizeCapture(inputs, first, [20])
    assert symbolic(module, (ids_of(17), ids_of(17)), {}, True, select_all, lambda run: 0) is not None
    assert symbolic.general is not None
    for length in (5, 13, 41):
        found = symbolic.general.at([length])
        traced = capture(module, (ids_of(length), ids_of(length)), {})
        assert is_same_capture(found, traced)
    assert not symbolic.general.trace.holds([1])


@pytest.mark.long
def test_gradients_with_hooks_stay_autograds_at_every_length() -> None:
    def hooked() -> tuple[Encoder, list[float]]:
        seen: list[float] = []
        torch.manual_seed(0)
        module = Encoder()
        module.out.weight.register_post_accumulate_grad_hook(lambda p: seen.append(float(grad_of(p).sum())))
        return module, seen

    (ours, found), (theirs, expected) = hooked(), hooked()
    compiled = memgraph.compile(ours, accumulate=False)
    for length in (20, 17, 13, 9):
        for module in (compiled, theirs):
            torch.manual_seed(length)
            module(ids_of(length), ids_of(length)).backward()
            module.zero_grad()
    assert len(found) == 4 and found == expected
    for step in compiled._kept.steps:
        graph = step.parts.captured.graph.graph
        assert "watched" in graph.output_node().meta["kinds"]


def grad_of(parameter: Tensor) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad


def test_rows_of_micro_batches_are_checked_at_every_length() -> None:
    class Rows(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(x)

    check_rows = []
    compiled = memgraph.compile(Rows(), microbatches=2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(capture_step, "require_row_independence", lambda *call: check_rows.append(call))
        for length in (10, 8, 6):
            compiled(torch.randn(4, length, 4)).sum().backward()
            compiled.zero_grad()
    assert len(check_rows) == 3
