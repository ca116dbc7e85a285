"""The pages as a site: README.md is its first page, and links to files that are no pages are names.

mkdocs calls `on_files` and `on_page_markdown`; `mkdocs.yml` names this file.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
# Pages beside docs/, by their names on the site.
OUTSIDE = {"README.md": "index.md", "CHANGELOG.md": "changelog.md", "ARCHITECTURE.md": "architecture.md",
           "CONTRIBUTING.md": "contributing.md", "SECURITY.md": "security.md"}  # fmt: skip
LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)\s]+)\)")


def on_files(files: Files, config: Any) -> Files:
    """Add the pages of the first level."""
    for name, place in OUTSIDE.items():
        files.append(File.generated(config, place, content=(ROOT / name).read_text()))
    return files


def on_page_markdown(markdown: str, page: Page, config: Any, files: Files) -> str:
    """Lead links to where pages are on the site."""
    there = {place: name for name, place in OUTSIDE.items()}
    source = there.get(page.file.src_uri, f"docs/{page.file.src_uri}")

    def led(found: re.Match[str]) -> str:
        mark, text, link = found.groups()
        if "://" in link or link.startswith("#"):
            return found[0]
        path, hash_, place = link.partition("#")
        target = posixpath.normpath(posixpath.join(posixpath.dirname(source), path))
        on_site = OUTSIDE.get(target, target.removeprefix("docs/") if target.startswith("docs/") else "")
        if not on_site or files.get_file_from_path(on_site) is None:
            return text
        near = posixpath.relpath(on_site, posixpath.dirname(page.file.src_uri) or ".")
        return f"{mark}[{text}]({near}{hash_}{place})"

    return LINK.sub(led, markdown)
