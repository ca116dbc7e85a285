"""An argument that is no report, text or file is refused: the error says what was given and what to give."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import memgraph
from memgraph.report.saved_plan import _seal, saved_plan
from tests.memgraph.report.test_report_file import planned


@pytest.mark.parametrize("given", ["yesterday.json", 3, b"x", [], memgraph.Report, memgraph.Sweep((), 0, 0, 0.0)])
def test_a_plan_beside_that_is_no_report_is_refused(given: Any, tmp_path: Path) -> None:
    file = tmp_path / "plan.html"
    with pytest.raises(TypeError, match=r"beside is a \w+.*; give a memgraph\.Report"):
        planned().to_html(file, beside=given)
    assert not file.exists()


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("x", "sweep is a str"), (3, "sweep is a int"), ([planned(), "x"], "sweep is a list with a str"),
        ((None,), "sweep is a tuple with a NoneType"), ({"a": 1}, "sweep is a dict with a str"),
    ],
)  # fmt: skip
def test_a_sweep_that_is_none_is_refused(given: Any, said: str, tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=f"{said}; give what memgraph.sweep returned, or a list of reports"):
        planned().to_html(tmp_path / "plan.html", sweep=given)


@pytest.mark.parametrize("given", [3, None, 1.5, ["plan.html"]])
def test_a_page_is_written_to_the_path_of_a_file(given: Any) -> None:
    with pytest.raises(TypeError, match=r"path is .*; give the path of a file"):
        planned().to_html(given)


def test_a_page_is_not_written_to_a_folder_or_where_there_is_none(tmp_path: Path) -> None:
    for folder in (tmp_path, "", "."):
        with pytest.raises(ValueError, match="is a folder; give the path of a file"):
            planned().to_html(folder)
    with pytest.raises(FileNotFoundError, match=r"there is no folder '.*absent'; make it"):
        planned().to_html(tmp_path / "absent" / "plan.html")


@pytest.mark.parametrize("given", ["yesterday.json", None, 3, planned().to_json()])
def test_a_plan_is_compared_with_a_report_only(given: Any) -> None:
    with pytest.raises(TypeError, match=r"other is .*; give a memgraph\.Report"):
        planned().diff(given)


@pytest.mark.parametrize("given", [None, 3, b"{}", Path("plan.json"), {}])
def test_a_saved_plan_is_read_from_its_text(given: Any) -> None:
    for read in (memgraph.Report.from_json, memgraph.SavedPlan.from_json):
        with pytest.raises(TypeError, match=r"the saved plan is .*; give the text that Report.to_json\(\) returned"):
            read(given)


def test_a_plan_for_reuse_is_a_text_or_a_path() -> None:
    with pytest.raises(TypeError, match="the saved plan is a int, 3"):
        saved_plan(3)  # type: ignore[arg-type]


@pytest.mark.parametrize("value", [10**400, -(10**400), 2**63])
def test_a_number_that_no_step_has_is_refused(value: int) -> None:
    facts = json.loads(planned().to_json())
    for part, name in (("machine", "budget"), ("facts", "measured"), ("facts", "measured_us")):
        changed = {**facts, part: {**facts[part], name: value}}
        with pytest.raises(memgraph.PlanError):
            memgraph.Report.from_json(_sealed(changed))


def _sealed(facts: dict[str, Any]) -> str:
    """Return the text of a plan with the digest of what it holds."""
    bare = {name: fact for name, fact in facts.items() if name != "digest"}
    return json.dumps({**bare, "digest": _seal(bare)})
