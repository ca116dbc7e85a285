"""The simulated allocator gives out blocks as torch's does: the smallest that fits, split, and joined when freed."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from passes import Machine, parse, predict
from passes.simulate.arena import Slot
from passes.simulate.caching_allocator import Held, Pool, held, simulated

MB = 1 << 20


def slots(*lives: tuple[int, int, int]) -> list[Slot]:
    return [Slot(f"s{i}", nbytes, first, last) for i, (nbytes, first, last) in enumerate(lives)]


@pytest.mark.parametrize(
    ("lives", "expandable", "expected"),
    [
        ([(512, 0, 1)], False, Held(512, 512, 2 * MB)),
        ([(3 * MB, 0, 1)], False, Held(3 * MB, 3 * MB, 20 * MB)),
        ([(11 * MB, 0, 1)], False, Held(11 * MB, 12 * MB, 12 * MB)),  # a rest of up to 1 MiB goes with it
        ([(11 * MB, 0, 1)], True, Held(11 * MB, 11 * MB, 20 * MB)),
        ([(30 * MB, 0, 0), (31 * MB, 1, 1)], False, Held(31 * MB, 32 * MB, 62 * MB)),  # the first is too small
        ([(30 * MB, 0, 0), (31 * MB, 1, 1)], True, Held(31 * MB, 31 * MB, 40 * MB)),  # it grows
        ([(30 * MB, 0, 0), (8 * MB, 1, 2), (22 * MB, 1, 1)], False, Held(30 * MB, 30 * MB, 30 * MB)),  # split
        ([(30 * MB, 0, 3), (20 * MB, 0, 0), (20 * MB, 0, 0), (40 * MB, 1, 1)], True, Held(70 * MB, 70 * MB, 80 * MB)),
    ],
)
def test_what_is_held(lives: list[tuple[int, int, int]], expandable: bool, expected: Held) -> None:
    assert simulated(slots(*lives), expandable) == expected


LIVES = st.lists(
    st.tuples(st.integers(1, 1 << 16), st.integers(0, 20), st.integers(0, 8)).map(
        lambda life: (512 * life[0], life[1], life[1] + life[2])
    ),
    max_size=40,
)


@given(LIVES, st.booleans())
def test_no_more_is_given_out_than_is_held_and_no_less_than_is_live(
    lives: list[tuple[int, int, int]], expandable: bool
) -> None:
    found = simulated(slots(*lives), expandable)
    assert found.live <= found.given <= found.reserved
    if expandable:
        assert found.given == found.live


@given(st.lists(st.integers(1, 1 << 16), max_size=30), st.booleans(), st.randoms(use_true_random=False))
def test_all_free_blocks_of_a_segment_join(sizes: list[int], expandable: bool, draw: object) -> None:
    pool = Pool(False, expandable)
    blocks = [pool.take(512 * size) for size in sizes]
    draw.shuffle(blocks)  # type: ignore[attr-defined]
    for block in blocks:
        pool.release(block)
    assert sorted(nbytes for nbytes, _ in pool.free) == sorted(pool.segments)


def test_inputs_are_not_the_allocators() -> None:
    trace = parse("x = input()  # makes x:4194304\na = aten.relu.default(x)  # makes a:4194304 | 1 us\nreturn output a")
    assert held(predict(trace, Machine(1 << 40))) == Held(4 * MB, 4 * MB, 20 * MB)
