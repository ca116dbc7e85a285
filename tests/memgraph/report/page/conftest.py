"""Chromium, once for the tests of a file, and a page that is opened in it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from memgraph.report.report import Report
from tests.support.chromium import Opened, browser

Open = Callable[..., Opened]


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    with browser() as started:
        yield started


@pytest.fixture
def opened(chromium: Any, tmp_path: Path) -> Iterator[Open]:
    """Return a function that opens the page of a report."""
    pages: list[Opened] = []

    def open_page(report: Report, scheme: str = "light", **facts: Any) -> Opened:
        pages.append(Opened(chromium, report.to_html(tmp_path / "plan.html", **facts), scheme))  # type: ignore[arg-type]
        return pages[-1]

    yield open_page
    for page in pages:
        page.close()
