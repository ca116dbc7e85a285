"""Chromium without a screen, which opens a page from a file and notes what it does.

with browser() as chromium:
    opened = Opened(chromium, path)      opened.page: the page; opened.errors, opened.requests: what must be empty, and one
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, NoReturn

NAMES = ("chromium", "chromium-browser", "google-chrome")
ARGUMENTS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--no-first-run"]


def executable() -> str | None:
    """Return the path of Chromium; None if it is not installed."""
    return next(filter(None, map(shutil.which, NAMES)), None)


@contextmanager
def browser() -> Iterator[Any]:
    """Run Chromium; a test is skipped where there is none."""
    try:
        from playwright.sync_api import sync_playwright
    except ModuleNotFoundError:
        _skip("playwright is not installed")
    path = executable()
    if path is None:
        _skip("Chromium is not installed: no page can be opened")
    with sync_playwright() as started:
        chromium = started.chromium.launch(executable_path=path, args=ARGUMENTS)
        yield chromium
        chromium.close()


def _skip(why: str) -> NoReturn:
    import pytest  # a benchmark opens pages, too, and pytest need not be installed for it

    pytest.skip(why)


class Opened:
    """A page that was opened from a file, offline, 1280 pixels wide."""

    def __init__(self, chromium: Any, path: Path, scheme: Literal["light", "dark"] = "light") -> None:
        self.errors: list[str] = []
        self.requests: list[str] = []
        self.context = chromium.new_context(
            viewport={"width": 1280, "height": 900}, color_scheme=scheme, offline=True, device_scale_factor=1
        )
        self.page = self.context.new_page()
        self.page.on("console", lambda said: self.errors.append(said.text) if said.type == "error" else None)
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.goto(path.as_uri())
        self.page.wait_for_selector("#table tbody")
        self.page.wait_for_function("document.getElementById('which').options.length > 0")

    def text(self, selector: str) -> str:
        return str(self.page.locator(selector).inner_text())

    def texts(self, selector: str) -> list[str]:
        return list(self.page.locator(selector).all_inner_texts())

    def close(self) -> None:
        self.context.close()
