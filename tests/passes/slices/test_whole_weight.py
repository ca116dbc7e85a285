"""The lines that say why weights stay whole."""

from __future__ import annotations

from dataclasses import asdict

import pytest

from passes.slices.whole_weight import TEXTS, Reason, WholeWeight, reason_lines


def test_each_reason_has_a_line_with_its_largest_weights() -> None:
    weights = [WholeWeight(f"layers.{i}.weight", 10 + i, Reason.CAST, "aten._to_copy.default") for i in range(5)]
    assert reason_lines([WholeWeight("head.weight", 12, Reason.WATCHED), *weights]) == [
        "  layers.4.weight, layers.3.weight, layers.2.weight and 2 more: cast by aten._to_copy.default, as under autocast",
        "  head.weight: autograd adds up its gradient, as for a hook, or in a process group",
    ]


def test_every_reason_has_words() -> None:
    assert set(TEXTS) == set(Reason)


def test_a_saved_weight_is_read_back() -> None:
    weight = WholeWeight("head.weight", 12, Reason.READ, "aten.mul.Tensor")
    assert WholeWeight(**{**asdict(weight), "reason": str(weight.reason)}) == weight
    with pytest.raises(ValueError, match="other"):
        WholeWeight("head.weight", 12, "other")  # type: ignore[arg-type]
