"""docs/api.md is what the sources say; `EXPECTTEST_ACCEPT=1` writes it again."""

from __future__ import annotations

import inspect
import os
import re
from pathlib import Path

import memgraph
from tests.support.api_reference import PAGE, definition, markdown, public_names, reference


def test_the_page_is_what_the_sources_say() -> None:
    if os.environ.get("EXPECTTEST_ACCEPT"):
        PAGE.write_text(reference())
    assert PAGE.read_text() == reference(), "python -m tests.support.api_reference writes it again"


def test_every_public_name_is_listed_with_the_arguments_that_it_has() -> None:
    page = reference()
    assert {*memgraph.__all__, "LightningBudget", "ActivationSolver"} == set(public_names())
    for name in public_names():
        section = page.partition(f"\n### {name}\n")[2].partition("\n### ")[0]
        assert section.strip(), name
        found = getattr(memgraph, name) if name in memgraph.__all__ else None
        if inspect.isfunction(found):
            call = section.partition("```python\n")[2].partition("\n```")[0]
            assert set(inspect.signature(found).parameters) <= set(re.findall(r"\w+", call))


def test_a_class_has_what_it_inherits(tmp_path: Path) -> None:
    report = reference().partition("\n### Report\n")[2].partition("\n### ")[0]
    assert all(f"#### Report.{name}\n" in report for name in ("to_html", "peak", "gap"))
    assert "- `measured`: peak bytes" in report
    (tmp_path / "one.py").write_text("def f(a, /, *, b=1): ...")
    (tmp_path / "two.py").write_text("from .one import f as g\nfrom os import path")
    found = definition("g", tmp_path / "two.py")
    assert found is not None and (found.node.name, found.file.name) == ("f", "one.py")
    assert definition("path", tmp_path / "two.py") is None


def test_a_docstring_becomes_markdown() -> None:
    text = (
        "Do it.\n\n    f(1)\n\nThen more.\n\nArgs:\n    x: a number\n        of them: one.\n\nReturns:\n    It: all.\n"
    )
    said = "Do it.\n\n```python\nf(1)\n```\n\nThen more.\n\nArgs:\n\n- `x`: a number of them: one.\n\nReturns:\n\nIt: all.\n"
    assert markdown(text) == said
