"""The ways of three arguments in docs/design/packages.md are those that a call takes, are short, and never lead up."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import memgraph
from memgraph.planning import search
from passes import make_plan
from tests.test_layers import MEMGRAPH, box

ROOT = Path(__file__).parents[2]
STOPS = 9
USES = {"budget": "passes/pipeline.py", "model": "capture/call/call.py", "optimizer": "optim/optimizer_profiler.py"}


@pytest.fixture(scope="module")
def callers() -> dict[str, list[str]]:
    """The files that are open, the planner's first, when each argument is used the first time that a call is planned."""
    files: dict[str, list[str]] = {}

    def note(argument: str) -> None:
        opened = open_files()
        if "planning/planner.py" in opened:
            files.setdefault(argument, opened[opened.index("planning/planner.py") :])

    class Noting(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            note("model")
            return super().forward(input).sum()

    class NotingAdam(torch.optim.Adam):
        def step(self, closure: Any = None) -> Any:
            note("optimizer")
            return super().step(closure)

    def noted(*args: Any, **kwargs: Any) -> Any:
        note("budget")
        return make_plan(*args, **kwargs)

    model = Noting(8, 8)
    compiled = memgraph.compile(model, budget="1GB", optimizer=NotingAdam(model.parameters()))
    files.clear()  # of the check whether the optimizer can be planned for at all
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(search, "make_plan", noted)
        compiled(torch.ones(2, 8)).backward()
    return files


def open_files() -> list[str]:
    """The files of memgraph whose functions are running, the outermost first."""
    frame, files = sys._getframe(), list[str]()
    while frame := frame.f_back:  # type: ignore[assignment]
        path = Path(frame.f_code.co_filename)
        if ROOT / "memgraph" in path.parents:
            files.append(str(path.relative_to(ROOT / "memgraph")))
    return list(dict.fromkeys(reversed(files)))


def documented(argument: str) -> list[str]:
    page = (ROOT / "docs/design/packages.md").read_text()
    row = re.search(rf"^\| `{argument}` \|(.+?)\|", page, re.MULTILINE)
    return re.findall(r"`([\w/]+\.py)`", row[1]) if row else []


@pytest.mark.parametrize("argument", USES)
def test_an_argument_takes_the_way_of_the_page(argument: str, callers: dict[str, list[str]]) -> None:
    stops = documented(argument)
    assert 0 < len(stops) <= STOPS
    assert stops[-1] == USES[argument]
    way = callers[argument]
    way = way[: way.index(stops[-1]) + 1] if stops[-1] in way else way
    assert [stop for stop in stops if stop in way] == way  # what has returned by then is a stop as well


@pytest.mark.parametrize("argument", USES)
def test_no_function_on_the_way_calls_one_of_a_higher_layer(argument: str, callers: dict[str, list[str]]) -> None:
    row = {name: depth for depth, names in enumerate(MEMGRAPH) for name in names}
    way = [file for file in callers[argument] if file in documented(argument)]
    depths = [row[box("memgraph." + file.removesuffix(".py").replace("/", "."), 2)] for file in way]
    assert depths == sorted(depths)
