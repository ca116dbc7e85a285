"""Packed sequences and what else reads lengths on the host: eager's bits, under the forecast, whatever the lengths."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pack_sequence, pad_packed_sequence

import memgraph
from memgraph.capture.capture import capture
from memgraph.capture.values.host_lengths import READERS, lengths_as_in_eager, readable_lengths
from tests.support.captured_calls import agrees

BATCH, STEPS, WIDTH = 3, 5, 4


class Reading(nn.Module):
    """Packs, runs a recurrent layer, and pads again."""

    def __init__(
        self, kind: Callable[..., nn.RNNBase], sorted_before: bool = False, total: int | None = None, **options: Any
    ) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = kind(WIDTH, 6, **options)
        self.sorted_before, self.total = sorted_before, total

    def forward(self, x: Tensor, lengths: Any) -> tuple[Tensor, Tensor]:
        first = self.layer.batch_first
        packed = pack_padded_sequence(x, lengths, first, enforce_sorted=self.sorted_before)
        padded, ends = pad_packed_sequence(self.layer(packed)[0], first, padding_value=0.5, total_length=self.total)
        return padded, ends * 2


def rows(batch_first: bool = False) -> Tensor:
    shape = (BATCH, STEPS, WIDTH) if batch_first else (STEPS, BATCH, WIDTH)
    return torch.randn(shape, requires_grad=True)


@pytest.mark.long
@pytest.mark.parametrize("kind", [nn.GRU, nn.LSTM, nn.RNN])
@pytest.mark.parametrize("options", [{}, {"batch_first": True, "bidirectional": True}])
def test_packed_sequences(kind: Callable[..., nn.RNNBase], options: dict[str, Any]) -> None:
    agrees(Reading(kind, **options), rows("batch_first" in options), torch.tensor([2, 5, 1]))


@pytest.mark.long
def test_other_ways_to_pack() -> None:
    agrees(Reading(nn.GRU, sorted_before=True, total=7), rows(), torch.tensor([4, 4, 1]))
    agrees(Reading(nn.LSTM, proj_size=3), rows(), torch.tensor([4, 4, 1]))
    agrees(Reading(nn.RNN, num_layers=2, dropout=0.3), rows(), torch.tensor([2, 2, 1]))
    agrees(Reading(nn.GRU), rows(), [2, 5, 1])


class Flat(nn.Module):
    """Calls the functions of torch beneath those of `nn.utils.rnn`."""

    def forward(self, x: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        data, sizes = torch._pack_padded_sequence(x * 2, lengths, False)
        return data, torch._pad_packed_sequence(data.tanh(), sizes, False, 0.5, 6)[0]


def test_packing_by_torchs_own_functions() -> None:
    agrees(Flat(), rows(), torch.tensor([4, 4, 1]))


class Packed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.GRU(WIDTH, 6)

    def forward(self, data: Tensor, batch_sizes: Tensor) -> Tensor:
        y: Tensor = self.layer(PackedSequence(data, batch_sizes))[0].data
        return y


@pytest.mark.long
def test_a_packed_sequence_that_is_given() -> None:
    agrees(Packed(), torch.randn(7, WIDTH, requires_grad=True), torch.tensor([3, 2, 1, 1]))


class Sequences(nn.Module):
    def forward(self, *parts: Tensor) -> Tensor:
        return pack_sequence(list(parts), enforce_sorted=False).data * 2


def test_lengths_that_follow_from_shapes_are_no_guards() -> None:
    captured = agrees(Sequences(), torch.randn(2, 3, requires_grad=True), torch.randn(4, 3, requires_grad=True))
    assert not captured.guards


@pytest.mark.long
def test_lengths_that_change_while_it_trains() -> None:
    plain = Reading(nn.GRU, batch_first=True)
    model = copy.deepcopy(plain)
    compiled = memgraph.compile(model, "1GB", time_limit=0)
    for lengths in ([3, 2, 3], [3, 2, 3], [1, 1, 2], [3, 3, 2]):
        x = torch.randn(BATCH, STEPS, WIDTH)
        for run, owner in ((compiled, model), (plain, plain)):
            owner.zero_grad()
            run(x, torch.tensor(lengths))[0].square().mean().backward()
        assert all(torch.equal(p.grad, q.grad) for p, q in zip(model.parameters(), plain.parameters(), strict=True))  # type: ignore[arg-type]
        assert compiled.plan.measured is None or compiled.plan.measured <= compiled.plan.peak


@pytest.mark.parametrize(
    "lengths, says", [([1, 2, 3], "decreasing order"), ([3, 2, 0], "greater than 0"), ([3, 2], "batch_size")]
)
def test_wrong_lengths_are_eagers_error(lengths: list[int], says: str) -> None:
    model = Reading(nn.GRU, sorted_before=True)
    for run in (model, memgraph.compile(model, "1GB", time_limit=0)):
        with pytest.raises(RuntimeError, match=says):
            run(rows().detach(), torch.tensor(lengths))


class Spelling(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.layer, self.options = nn.Linear(WIDTH, 6), options

    def forward(self, x: Tensor, targets: Tensor, lengths: Tensor, ends: Tensor) -> Tensor:
        return F.ctc_loss(self.layer(x).log_softmax(-1), targets, lengths, ends, **self.options)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_ctc_loss_of_targets_in_a_row(reduction: str) -> None:
    targets, ends = torch.tensor([1, 2, 3, 4, 5, 1]), torch.tensor([2, 1, 3])
    captured = agrees(Spelling(reduction=reduction), rows(), targets, torch.tensor([5, 4, 5]), ends)
    assert [guard.expected for guard in captured.guards] == [(3,)]


def test_ctc_loss_of_targets_in_rows_has_no_guard() -> None:
    captured = agrees(Spelling(), rows(), torch.ones(3, 4).long(), torch.tensor([5, 5, 5]), torch.tensor([2, 1, 3]))
    assert not captured.guards


def test_parts_whose_ends_are_in_a_tensor() -> None:
    class Split(nn.Module):
        def forward(self, x: Tensor, ends: Tensor) -> list[Tensor]:
            return [part * 2 for part in x.tensor_split(ends) + torch.tensor_split(x, ends, dim=1)]

    agrees(Split(), torch.randn(5, 5, requires_grad=True), torch.tensor([1, 3]))


class Named(nn.Module):
    """Chooses a layer by a name with a number from a tensor, as Switch Transformers do."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({f"layer_{i}": nn.Linear(WIDTH, WIDTH) for i in range(3)})

    def forward(self, x: Tensor, chosen: Tensor) -> Tensor:
        y: Tensor = self.layers[f"layer_{chosen[0]}"](x)
        return y


def test_a_name_with_a_number_from_a_tensor_is_a_guard() -> None:
    captured = agrees(Named(), torch.randn(2, WIDTH), torch.tensor([1, 0]))
    assert [guard.expected for guard in captured.guards] == [(1,)]


@pytest.mark.long
def test_functions_are_as_before_after_a_capture() -> None:
    before = torch.ctc_loss, torch.tensor_split, torch._VF.lstm, torch._VF._pack_padded_sequence
    capture(Reading(nn.LSTM), (rows(), torch.tensor([2, 5, 1])), {})
    assert before == (torch.ctc_loss, torch.tensor_split, torch._VF.lstm, torch._VF._pack_padded_sequence)


@pytest.mark.parametrize("reader", READERS, ids=lambda reader: f"{reader.owner.__name__}.{reader.name}")
def test_what_is_replaced_is_torchs_own_in_a_part_that_runs_as_it_is(reader: Any) -> None:
    with readable_lengths():
        assert getattr(reader.owner, reader.name) != reader.plain
        with lengths_as_in_eager():
            assert getattr(reader.owner, reader.name) == reader.plain
        assert getattr(reader.owner, reader.name) != reader.plain
    assert getattr(reader.owner, reader.name) == reader.plain
