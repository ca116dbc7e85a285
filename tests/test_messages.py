"""Every text that a user may read is in `messages.txt`, so that a person can read them all, one after another.

Texts are those of four words or more in the sources: errors, warnings, progress, lines of reports, heads of tables.
`EXPECTTEST_ACCEPT=1` writes the file; read what has changed.
"""

from __future__ import annotations

import ast
import os
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
GOLDEN = ROOT / "tests/messages.txt"
WORDS = 4
CODE = re.compile(r"-> (\(\)|Tensor|Scalar)|int\[\]")  # schemas of ops
OWN = ("kernels", "system/private_names.py")  # what compilers and torch read


def messages() -> str:
    found: list[str] = []
    for top in ("memgraph", "passes"):
        for file in sorted((ROOT / top).rglob("*.py")):
            texts = list(dict.fromkeys(texts_of(ast.parse(file.read_text()))))
            if texts and not str(file.relative_to(ROOT / top)).startswith(OWN):
                found += [str(file.relative_to(ROOT)), *(f"    {text}" for text in texts), ""]
    return "\n".join(found)


def texts_of(tree: ast.AST) -> Iterator[str]:
    """Yield the texts of a file in their order, with `{}` around what is filled in; no docstrings."""
    documented = {
        id(node.body[0].value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        and node.body
        and isinstance(node.body[0], ast.Expr)
    }
    yield from _texts(tree, documented)


def _texts(node: ast.AST, documented: set[int]) -> Iterator[str]:
    if id(node) in documented:
        return
    if isinstance(node, ast.Constant | ast.JoinedStr):
        text = _text(node)
        plain = re.sub(r"\{[^}]*\}", "_", text)
        if len(re.findall(r"(?<!\S)[\w'=().,;:-]{2,}(?!\S)", plain)) >= WORDS and not CODE.search(plain):
            yield text.replace("\n", "\n      ")
        if isinstance(node, ast.Constant):
            return
    inside = [each for each in getattr(node, "values", ()) if isinstance(each, ast.FormattedValue)]
    for child in inside if isinstance(node, ast.JoinedStr) else ast.iter_child_nodes(node):
        yield from _texts(child, documented)


def _text(node: ast.expr) -> str:
    if isinstance(node, ast.JoinedStr):
        return "".join(map(_text, node.values))
    if isinstance(node, ast.FormattedValue):
        return "{" + ast.unparse(node.value) + "}"
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""


def test_the_texts_are_those_that_were_read() -> None:
    found = messages()
    if os.environ.get("EXPECTTEST_ACCEPT"):
        GOLDEN.write_text(found)
    assert GOLDEN.read_text() == found, "read the new texts, then EXPECTTEST_ACCEPT=1 pytest tests/test_messages.py"


def test_no_text_has_what_a_reader_stumbles_over() -> None:
    """No text ends in a colon or a comma with nothing behind it, has two spaces in a sentence, or `a`s that are `an`s."""
    wrong = [
        line
        for line in GOLDEN.read_text().splitlines()
        if re.search(
            r"\b[Aa] (?=[aeio]\w)(?!one|once|uni|us|eu)|\w  \w.*\.$|\b(\w+) \1\b(?<!that that)(?<!had had)",
            line.strip(),
        )
    ]
    assert wrong == []
