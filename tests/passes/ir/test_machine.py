"""A machine says what a step may use."""

from __future__ import annotations

import pickle

from passes import BudgetError, Cast, Link, Machine


def test_a_machine_with_links_prints_their_speeds() -> None:
    assert str(Machine(1000, link=Link(out=2500.0, back=900.4))) == "cpu 1000 bytes, disk 2500/900 MB/s"
    assert (
        str(Machine(8, device="cuda:0", tier="host", link=Link(out=1.0, back=1.0))) == "cuda:0 8 bytes, host 1/1 MB/s"
    )


def test_a_machine_that_may_cast_says_so() -> None:
    machine = Machine(8, link=Link(out=5.0, back=5.0), cast=Cast(dtype="bf16", out=4000.0, back=8000.0))
    assert str(machine) == "cpu 8 bytes, disk 5/5 MB/s, cast to bf16 at 4000/8000 MB/s"
    assert machine.cast.us(16_000) == 4.0 + 2.0


def test_a_link_of_one_direction_is_no_tier() -> None:
    assert str(Machine(1000)) == "cpu 1000 bytes, no tier"
    assert (
        str(Machine(1000, link=Link(out=5.0))) == str(Machine(1000, link=Link(back=5.0))) == "cpu 1000 bytes, no tier"
    )


def test_a_budget_error_travels_between_processes() -> None:
    error = pickle.loads(pickle.dumps(BudgetError("too little", 5, 7)))
    assert (str(error), error.budget, error.smallest) == ("too little", 5, 7)
    assert isinstance(error, RuntimeError)
