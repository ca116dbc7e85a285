"""A page is one file that holds everything it needs, and no text of a user can become a part of it."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

from memgraph.report.page.page import FOLDER, Strings, packed, page
from tests.support.long_steps import long_report

EVIL = "</script><script>document.title='ran'</script><img src=x onerror=alert(1)>&amp;\u2028{}"


def data_of(text: str) -> dict[str, Any]:
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.DOTALL)
    assert found
    return dict(json.loads(found[1]))


def test_a_page_is_written_where_it_is_wanted(tmp_path: Path) -> None:
    report, path = long_report(3), tmp_path / "plan.html"
    assert report.to_html(str(path)) == path
    assert path.read_text(encoding="utf-8") == page(report)


def test_the_page_names_no_other_file() -> None:
    text = page(long_report(3))
    assert re.findall(r"""(?:src|href|action)\s*=\s*["'][^"']*["']|@import|url\(""", text) == []


def test_the_policy_allows_the_script_and_the_style_that_are_there_and_nothing_else() -> None:
    text = page(long_report(3))
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', text)
    script = re.findall(r"<script>(.*?)</script>", text, re.DOTALL)
    style = re.findall(r"<style>(.*?)</style>", text, re.DOTALL)
    assert policy and len(script) == len(style) == 1
    first, second = (
        f"'sha256-{base64.b64encode(hashlib.sha256(each[0].encode()).digest()).decode()}'" for each in (script, style)
    )
    assert policy[1].split("; ") == [
        "default-src 'none'", f"script-src {first}", f"style-src {second}", "base-uri 'none'", "form-action 'none'",
    ]  # fmt: skip


def test_no_name_of_a_module_ends_the_data() -> None:
    text = page(long_report(3, EVIL))
    assert text.count("<script") == text.count("</script") == 2
    assert "<img" not in text
    assert f"{EVIL.format(1)}.0 model.py:71" in data_of(text)["strings"]


def test_uplot_is_the_released_file_with_its_licence() -> None:
    lines = [line.split() for line in (FOLDER / "uplot/SHA256SUMS").read_text().splitlines()]
    assert [name for _, name in lines] == ["uPlot.iife.min.js", "uPlot.min.css", "LICENSE"]
    for digest, name in lines:
        assert hashlib.sha256((FOLDER / "uplot" / name).read_bytes()).hexdigest() == digest
    text = page(long_report(3))
    assert "uPlot (v1.6.32)" in text and "The MIT License (MIT)" in text and "Copyright (c) 2022 Leon Sorokin" in text


def test_every_file_of_the_page_is_installed() -> None:
    root = FOLDER.parents[2]
    packaged = tomllib.loads((root / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]["memgraph"]
    installed = {path for pattern in packaged for path in (root / "memgraph").glob(pattern)}
    there = {path for path in FOLDER.rglob("*") if path.is_file() and path.suffix not in (".py", ".pyc")}
    assert there - installed == set()


@pytest.mark.parametrize(
    ("column", "form"),
    [
        ([], ["", []]),
        ([7, 7, 7, 9], ["", [7, 7, 7, 9]]),
        ([7] * 40 + [9], ["r", [7, 40, 9, 1]]),
        (list(range(0, 400, 5)), ["sr", [0, 1, 5, 79]]),
        ([123456, 5] * 9, ["t", [123456, 5], [0, 1] * 9]),
    ],
)
def test_a_column_takes_its_shortest_form(column: list[int], form: list[Any]) -> None:
    assert packed(column) == form


def test_a_string_stands_in_the_table_once() -> None:
    strings = Strings()
    assert strings.column(["a", "", "b", "a"]) == ["", [1, 0, 2, 1]]
    assert strings.table == ["", "a", "b"]


def test_a_sweep_that_is_none_is_refused() -> None:
    with pytest.raises(TypeError, match=r"sweep is a list with a str; give what memgraph\.sweep returned"):
        page(long_report(3), sweep=["8GB"])  # type: ignore[list-item]


def test_no_colour_stands_for_two_things() -> None:
    style = (FOLDER / "page.css").read_text()
    work = {"forward", "backward", "again", "wait", "update", "copy", "out", "back", "net"}
    for scheme in style.split("@media (prefers-color-scheme: dark)"):
        colours = dict(re.findall(r"--([a-z-]+): (#[0-9a-f]{6})", scheme))
        of_work = {colours[name] for name in work}
        assert len(of_work) == len(work)
        assert of_work.isdisjoint(colour for name, colour in colours.items() if name not in work)
