"""The code and its pages use the words of docs/glossary.md, and plain English."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FILES = [file for top in ("memgraph", "passes") for file in sorted((ROOT / top).rglob("*.py"))]
ZOO = ROOT / "benchmarks/zoo"  # its digest, which results are cached by, is of the sources
PROSE = [  # docstrings and comments of these are checked, but not their identifiers
    file
    for top in ("benchmarks", "tests")
    for file in sorted((ROOT / top).rglob("*.py"))
    if ZOO not in file.parents and file != Path(__file__)
]
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]
BANNED = set(
    re.findall(
        r"\w+",
        "far home homes fate fates toll tolls trip trips flight flights journey twin twins strand strands desk ghost ghosts "
        "laid begun torn wishes lever levers obstacle obstacles belongings residence courier parcel parcels dearer anew",
    )
)
FIRST = {"What", "Whether", "Who", "Whose", "Whom", "Of", "Which", "That", "Those", "How"}  # words that begin a riddle
PHRASES = re.compile(
    r"\b(anew|nobody|somebody|of which|whose they are|what is of|none of|lives? far|made again|brought? home|is had|dearer)\b"
)


def test_the_glossary_bans_what_this_test_looks_for() -> None:
    table = (ROOT / "docs/glossary.md").read_text().partition("## Words that are not used")[2]
    listed = {word for row in re.findall(r"^\| (.+?) \|", table, re.MULTILINE) for word in re.findall(r"\w+", row)}
    assert BANNED - listed == set()


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(ROOT)))
def test_a_file_uses_the_words_of_the_glossary(file: Path) -> None:
    tree = ast.parse(file.read_text())
    named = [name for name in {file.stem, *identifiers(tree)} if BANNED & set(words(name))]
    assert (sorted(named), riddles(tree), phrases(file.read_text())) == ([], [], [])


@pytest.mark.parametrize("file", PROSE, ids=lambda file: str(file.relative_to(ROOT)))
def test_benchmarks_and_tests_are_written_in_plain_english(file: Path) -> None:
    text = file.read_text()
    assert (riddles(ast.parse(text)), phrases(text)) == ([], [])


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_a_page_is_written_in_plain_english(page: Path) -> None:
    assert phrases(page.read_text().partition("## Words that are not used")[0]) == []


def identifiers(tree: ast.AST) -> Iterator[str]:
    """Yield the names that a file defines: functions, classes, arguments, variables and attributes."""
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name) | ast.arg(arg=name):
                yield name
            case ast.Name(id=name, ctx=ast.Store()) | ast.Attribute(attr=name, ctx=ast.Store()):
                yield name


def words(name: str) -> list[str]:
    """Split an identifier: `far_update` and `FarUpdate` are both `far`, `update`."""
    return re.findall(r"[a-z]+", re.sub(r"([A-Z]+)", r"_\1", name).lower())


def riddles(tree: ast.AST) -> list[str]:
    """Return the docstrings that begin with a word of FIRST."""
    return [f"{line}: {text[:60]}" for line, text in docstrings(tree) if text.split(None, 1)[0] in FIRST]


def docstrings(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield each docstring with its line."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and (text := ast.get_docstring(node)):
            yield getattr(node, "lineno", 1), text


def phrases(text: str) -> list[str]:
    """Return the lines in which one of PHRASES stands."""
    return [f"{i}: {line.strip()}" for i, line in enumerate(text.splitlines(), 1) if PHRASES.search(line)]
