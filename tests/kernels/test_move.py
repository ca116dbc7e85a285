"""What is moved arrives to the bit as the twin brings it: every pair of formats, length and place."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from memgraph.kernels.copy_runs import CHUNK, UNIT, lines, move, move_by, move_twin, ready
from memgraph.kernels.formats import FORMATS, rounded
from tests.support.numbers import DEVICE, FLOATS, WAY, hard, picked, same

LENGTHS = (0, 1, 7, 1024, 2060)


def both(tensors: list[Tensor], dtype: torch.dtype, seed: int | None = None) -> tuple[Tensor, Tensor]:
    """What a kernel and its twin make of the same; where nothing arrives there are sevens."""
    counts = [x.numel() for x in tensors]
    results = [torch.full((sum(counts),), 7, device=DEVICE).to(dtype) for _ in range(2)]
    move_by(WAY, list(zip(tensors, results[0].split(counts), strict=True)), seed)
    move_twin(list(zip(tensors, results[1].split(counts), strict=True)), seed)
    return results[0], results[1]


@pytest.mark.parametrize("seed", [None, 11])
@pytest.mark.parametrize("into", FLOATS, ids=str)
@pytest.mark.parametrize("of", FLOATS, ids=str)
def test_a_kernel_rounds_as_its_twin(of: torch.dtype, into: torch.dtype, seed: int | None) -> None:
    ours, theirs = both([hard(count, of) for count in LENGTHS], into, seed)
    assert same(ours, theirs)


@pytest.mark.parametrize("into", [torch.bfloat16, torch.float16, torch.float8_e4m3fn], ids=str)
def test_to_the_nearest_is_what_torch_does_but_for_infinities(into: torch.dtype) -> None:
    x = hard(4000)
    ours, _ = both([x], into)
    theirs = x.to(into)
    within = x.abs() <= torch.finfo(into).max
    assert same(picked(ours, within), picked(theirs, within)) and int(within.sum()) > 2000
    beyond = x.isfinite() & ~within
    assert torch.equal(ours.float()[beyond], torch.finfo(into).max * x[beyond].sign())
    if into is not torch.float8_e4m3fn:  # which has no infinity
        assert torch.equal(ours.float()[x.isinf()], x[x.isinf()])
    assert bool(ours.float()[x.isnan()].isnan().all())


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.int64, torch.float64, torch.float32], ids=str)
def test_what_is_not_cast_keeps_every_bit(dtype: torch.dtype) -> None:
    x = hard(5000).view(torch.uint8)[: 1000 * dtype.itemsize].view(dtype)
    ours, theirs = both([x[:3], x[3:]], dtype)
    assert torch.equal(ours.view(torch.uint8), x.view(torch.uint8))
    assert torch.equal(theirs.view(torch.uint8), x.view(torch.uint8))


@pytest.mark.parametrize("shift", [0, 1, 2, 3])
def test_runs_may_begin_anywhere_and_touch_nothing_beside_them(shift: int) -> None:
    of, into = hard(2100), torch.zeros(2100, dtype=torch.bfloat16, device=DEVICE)
    move_by(WAY, [(of[shift : shift + 2051], into[5 : 5 + 2051])])
    assert same(into[5:2056], rounded(of[shift : shift + 2051], torch.bfloat16))
    assert not into[:5].any() and not into[2056:].any()


def test_many_formats_go_in_one_move() -> None:
    pairs = [(hard(1500, of), torch.zeros(1500, dtype=into, device=DEVICE)) for of in FLOATS for into in FLOATS[:3]] + [
        (hard(900), torch.zeros(900, device=DEVICE))
    ]
    again = [(of, torch.zeros_like(into)) for of, into in pairs]
    move_by(WAY, pairs, 5)
    move_twin(again, 5)
    assert all(same(into, other) for (_, into), (_, other) in zip(pairs, again, strict=True))


def test_a_long_run_takes_several_lines() -> None:
    runs, growth = [(0, 1000, 5000, 0), (2 * CHUNK + 3, 1000, 5000, 40)], (4 * UNIT, 2 * UNIT, UNIT)
    assert lines(runs, growth, torch.device("cpu")).tolist() == [
        [CHUNK, 1000, 5000, 40],
        [CHUNK, 1000 + 4 * CHUNK, 5000 + 2 * CHUNK, 40 + CHUNK],
        [3, 1000 + 8 * CHUNK, 5000 + 4 * CHUNK, 40 + 2 * CHUNK],
    ]
    ours, theirs = both([hard(2 * CHUNK + 3)], torch.bfloat16, 1)
    assert same(ours, theirs)


def test_what_is_ready_is_moved_as_often_as_wanted() -> None:
    x, into = hard(3000), torch.zeros(3000, dtype=torch.bfloat16, device=DEVICE)
    for way in (WAY, None):
        run = ready(way, [(x[:1100], into[:1100]), (x[1100:], into[1100:])])
        for turn in range(2):
            x.copy_(hard(3000).roll(turn))
            run()
            assert same(into, rounded(x, torch.bfloat16))


def test_few_programs_do_the_work_of_many() -> None:
    x, into = hard(3 * CHUNK + 1), torch.zeros(3 * CHUNK + 1, dtype=torch.float16, device=DEVICE)
    move_by(type(WAY)(1024, programs=2), [(x, into)])
    assert same(into, rounded(x, torch.float16))


def test_chance_rounds_to_a_neighbour_and_on_average_to_the_number() -> None:
    for dtype, x in ((torch.bfloat16, 1.003), (torch.float16, 4.2e-6), (torch.float8_e4m3fn, -0.0003)):
        wide = torch.full((20_000,), x, device=DEVICE)
        ours, _ = both([wide], dtype, 9)
        step = 2.0 ** (max(torch.tensor(x).abs().log2().floor().item(), FORMATS[dtype].least) - FORMATS[dtype].digits)
        off = (ours.double() - wide.double()) / step
        assert ours.float().unique().numel() == 2 and bool((off.abs() < 1).all())
        assert abs(off.mean().item()) < 0.5 / 20_000**0.5 * 5


def test_what_needs_no_rounding_is_not_rounded_by_chance() -> None:
    for dtype in FLOATS[1:]:
        x = hard(3000).to(dtype)
        x = picked(x, x.float().isfinite())
        assert same(both([x.float()], dtype, 3)[0], x)


def test_another_seed_rounds_otherwise_and_not_the_same_shifted() -> None:
    x = torch.full((5000,), 1.003, device=DEVICE)
    first, second = both([x], torch.bfloat16, 1)[0], both([x], torch.bfloat16, 2)[0]
    for shift in (-2, -1, 0, 1, 2):
        alike = (first.roll(shift) == second).double().mean().item()
        assert 0.4 < alike < 0.8  # two coins of which 77 % of the sides are up agree in 65 %


def test_what_cannot_be_moved_is_refused() -> None:
    x = torch.zeros(8, device=DEVICE)
    for of, into, why in (
        (x, x[:4], "one length"),
        (x[::2], x[:4], r"flat tensors of one length, not \(4,\) with strides \(2,\)"),
        (x, x.long(), "can't be cast"),
        (x.to(torch.complex128), x.to(torch.complex128), "takes 16 bytes"),
        (x.double(), x, "torch.float64 can't be cast to torch.float32"),
    ):
        with pytest.raises(ValueError, match=why):
            move([(of, into)])
    with pytest.raises(ValueError, match="seed=-1"):
        move([(x, x.bfloat16())], seed=-1)
    move([])
