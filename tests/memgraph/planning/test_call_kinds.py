"""Calls of ever new kinds are warned of once, with what differs and what to do."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import memgraph
from memgraph.guards.assumptions import Facts
from memgraph.guards.attribute_guard import AttributeGuard
from memgraph.guards.signature import signature
from memgraph.planning.call_kinds import argument_names, kinds_warning
from memgraph.tensors.pytree import flatten


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor, scale: float = 1.0, *, options: Any = None) -> Tensor:
        found: Tensor = self.linear(x) * scale
        return found


MODULE = Scaled()


def said(*calls: Callable[[int], tuple[Facts, list[str]]]) -> list[str]:
    texts, earlier = list[str](), list[Facts]()
    for number, call in enumerate(calls):
        facts, names = call(number)
        texts.append(kinds_warning(facts, earlier, names))
        earlier.insert(0, facts)
    return texts


def given(*args: Any, mode: int | None = 0, **kwargs: Any) -> Callable[[int], tuple[Facts, list[str]]]:
    """Return the facts of a call and its arguments' names; without a mode it has the number of the call."""

    def call(number: int) -> tuple[Facts, list[str]]:
        leaves, spec = flatten((args, kwargs))
        facts = signature(spec, leaves, AttributeGuard(MODULE), (number if mode is None else mode,))
        return facts, argument_names(MODULE, args, kwargs)

    return call


def test_the_third_length_is_said_with_its_dimension() -> None:
    texts = said(*(given(torch.ones(n, 4)) for n in (9, 8, 7)))
    assert texts[:2] == ["", ""]
    assert "x, dimension 0 (9, 8, 7) differs" in texts[2]
    assert "pad it" in texts[2] and "time_limit=" in texts[2] and "plan=" in texts[2]
    assert "tensor instead" not in texts[2] and "drop_last=True" in texts[2]
    assert "drop_last" not in said(*(given(torch.ones(4, n)) for n in (9, 8, 7)))[2]


def test_the_third_number_is_said_by_its_name() -> None:
    x = torch.ones(2, 4)
    texts = said(*(given(x, value) for value in (0.1, 0.2, 0.3)))
    assert texts[:2] == ["", ""]
    assert "scale (0.1, 0.2, 0.3) differs" in texts[2] and "give a tensor instead of the number" in texts[2]
    inside = said(*(given(x, options={"steps": [value]}) for value in (1, 2, 3)))
    assert "options['steps'][0] (1, 2, 3) differs" in inside[2]


def test_the_third_text_is_said_by_its_name() -> None:
    texts = said(*(given({"x": torch.ones(2, 4), "file": f"{n}.png"}) for n in range(3)))
    assert texts[:2] == ["", ""]
    assert "x['file'] (0.png, 1.png, 2.png) differs" in texts[2] and "leave it out of the arguments" in texts[2]


def test_calls_of_several_sorts_that_come_again_are_not_said() -> None:
    x = torch.ones(2, 4)
    ways = (given(x), given(x, 0.5), given(x, 1), given(x.double()), given(x[0]), given(x[:1]))
    assert said(*ways) == [""] * len(ways)
    assert said(*[given(x, mode=None)] * 4) == [""] * 4  # training, eval, with gradients there


def test_what_is_no_argument_is_said_as_well() -> None:
    assert not any(said(*[given(torch.ones(2, 4))] * 9))  # of one kind
    texts = said(*[given(torch.ones(2, 4), mode=None)] * 6)
    assert texts[:5] == [""] * 5 and "an attribute of the module" in texts[5]


class DividedByRows(nn.Module):
    """Needs the number of rows, so that each is captured."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.linear(x) / int(x.shape[0])
        return result


def test_a_number_that_the_first_call_alone_reads_hides_no_length() -> None:
    """Torchvision's detectors find scales in their first call."""

    class Lazy(nn.Linear):
        scale: int | None = None
        level = 4

        def forward(self, x: Tensor) -> Tensor:
            self.scale = self.level if self.scale is None else self.scale
            found: Tensor = super().forward(x[x[:, 0] > 0]).square().mean() * self.scale
            return found

    module = memgraph.compile(Lazy(4, 4), 1 << 30)
    with pytest.warns(RuntimeWarning, match=r"x, dimension 0 \(.*\) differs from call to call"):
        for rows in range(40, 46):
            module(torch.linspace(-1, 1, 4 * rows).view(rows, 4)).backward()


def test_the_warning_stands_at_the_callers_line() -> None:
    compiled = memgraph.compile(DividedByRows(), "1GB")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for n in (2, 3, 4, 5, 2, 3):
            compiled(torch.ones(n, 4))
    assert [str(one.message)[:25] for one in caught] == ["x, dimension 0 (2, 3, 4) "[:25]]
    assert caught[0].filename == __file__


@pytest.mark.long
def test_a_warning_that_is_an_error_leaves_a_module_that_works() -> None:
    compiled = memgraph.compile(DividedByRows(), "1GB")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        compiled(torch.ones(2, 4))
        compiled(torch.ones(3, 4))
        with pytest.raises(RuntimeWarning, match="dimension 0"):
            compiled(torch.ones(4, 4))
        assert compiled(torch.ones(4, 4)).shape == (4, 4)


def test_calls_that_no_plan_fits_are_not_counted() -> None:
    compiled, x = memgraph.compile(nn.Sequential(nn.Linear(8, 64), nn.GELU(), nn.Linear(64, 8)), 8000), torch.ones(9, 8)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(7):
            with pytest.raises(memgraph.BudgetError):
                compiled(x)
