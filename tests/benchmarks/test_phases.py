"""The functions whose time benchmarks measure are where they look for them."""

from __future__ import annotations

from pkgutil import resolve_name

import pytest

from benchmarks import second_process


@pytest.mark.parametrize("place", second_process.PHASES, ids=".".join)
def test_the_phases_of_a_second_process_are_functions(place: tuple[str, str]) -> None:
    owner, name = place
    assert callable(getattr(resolve_name(owner), name))


def test_the_phases_of_a_first_call_are_functions() -> None:
    first_call = pytest.importorskip("benchmarks.first_call")  # imports transformers
    assert all(callable(getattr(owner, name)) for _, owner, name in first_call.PHASES)
