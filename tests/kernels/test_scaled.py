"""A byte a number and one for each group come out as the twin makes them, and lose what is stated."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from memgraph.kernels.autotune import Way
from memgraph.kernels.copy_runs import CHUNK
from memgraph.kernels.scaled import GROUP, WIDE, groups, narrow_scaled, narrow_scaled_by, widen_scaled_by
from tests.support.numbers import DEVICE, WAY, hard, same

COUNTS = (0, 1, 127, 128, 129, 1025, 3000)


def sent(way: Way | None, tensors: list[Tensor], seed: int | None = None) -> tuple[Tensor, Tensor]:
    codes = torch.full((sum(x.numel() for x in tensors),), 99, dtype=torch.uint8, device=DEVICE)
    scales = torch.full((groups(tensors),), 99, dtype=torch.uint8, device=DEVICE)
    narrow_scaled_by(way, tensors, codes, scales, seed)
    return codes, scales


def returned(way: Way | None, codes: Tensor, scales: Tensor, like: list[Tensor]) -> list[Tensor]:
    results = [torch.full_like(x, 7.0) for x in like]
    widen_scaled_by(way, codes, scales, results)
    return results


@pytest.mark.parametrize("seed", [None, 4])
@pytest.mark.parametrize("dtype", WIDE, ids=str)
def test_a_kernel_scales_as_its_twin(dtype: torch.dtype, seed: int | None) -> None:
    tensors = [hard(count, dtype) for count in COUNTS]
    ours, theirs = sent(WAY, tensors, seed), sent(None, tensors, seed)
    assert torch.equal(ours[1], theirs[1])
    assert same(ours[0].view(torch.float8_e4m3fn), theirs[0].view(torch.float8_e4m3fn))
    for back, again in zip(returned(WAY, *theirs, tensors), returned(None, *theirs, tensors), strict=True):
        assert same(back, again)


def test_every_code_and_every_scale_come_back_as_the_twin_brings_them() -> None:
    scales = torch.arange(1, 255, dtype=torch.uint8, device=DEVICE)
    codes = torch.arange(256, device=DEVICE).to(torch.uint8).repeat(127)
    like = [torch.zeros(len(codes), device=DEVICE)]
    assert same(returned(WAY, codes, scales, like)[0], returned(None, codes, scales, like)[0])


def test_a_tensor_longer_than_a_line_and_several_formats_go_at_once() -> None:
    tensors = [hard(CHUNK + 130), hard(300, torch.bfloat16), hard(200)]
    assert all(map(torch.equal, sent(WAY, tensors, 1), sent(None, tensors, 1)))


def test_the_largest_of_a_group_uses_the_range_and_nothing_overflows() -> None:
    for exponent in (-100, -20, 0, 30, 120):
        x = torch.randn(64 * GROUP, device=DEVICE) * 2.0**exponent
        codes, scales = sent(WAY, [x])
        most = codes.view(torch.float8_e4m3fn).float().abs().view(-1, GROUP).amax(1)
        assert bool((most >= 224).all()) and bool((most <= 448).all())
        back = returned(WAY, codes, scales, [x])[0]
        largest = x.abs().view(-1, GROUP).amax(1).repeat_interleave(GROUP)
        assert bool(((back - x).abs() <= torch.maximum(x.abs() / 16, largest * 2.0**-17)).all())


def test_zeros_keep_their_sign_and_what_is_infinite_comes_back_as_no_number() -> None:
    x = torch.tensor([0.0, -0.0, torch.inf, -torch.inf, torch.nan, 3.0, -3.0], device=DEVICE)
    back = returned(WAY, *sent(WAY, [x]), [x])[0]
    assert same(back, torch.tensor([0.0, -0.0, torch.nan, torch.nan, torch.nan, 3.0, -3.0], device=DEVICE))
    assert not returned(WAY, *sent(WAY, [x[:2]]), [x[:2]])[0].any()


def test_chance_keeps_the_mean() -> None:
    x = torch.full((100 * GROUP,), 1.03, device=DEVICE)
    x[::GROUP] = 1.75
    back = returned(WAY, *sent(WAY, [x], 5), [x])[0]
    numbers = back[torch.arange(len(x), device=DEVICE) % GROUP != 0]
    assert numbers.unique().numel() == 2 and abs(numbers.mean().item() - 1.03) < 0.003


def test_bytes_of_another_number_are_refused() -> None:
    x = torch.zeros(200, device=DEVICE)
    byte = torch.zeros(200, dtype=torch.uint8, device=DEVICE)
    with pytest.raises(ValueError, match="200 and 2 bytes are wanted"):
        narrow_scaled([x], byte, byte[:3])
    with pytest.raises(ValueError, match="these can be scaled"):
        narrow_scaled([x.long()], byte, byte[:2])
