"""The reference of memgraph's public names: their signatures and docstrings, as a page.

def plan(model: nn.Module, *args: Any, budget: Budget = None) -> Report    ->    ### plan
    \"\"\"Return the plan for the call ...                                           Return the plan for the call ...

    python -m tests.support.api_reference    # writes docs/api.md

Sources are read and not imported, so that classes are listed whose libraries are not installed.
"""

from __future__ import annotations

import ast
import re
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGE, PAGE = ROOT / "memgraph", ROOT / "docs/api.md"
HEAD = """# The API

Made of the docstrings in the sources by `python -m tests.support.api_reference`. [options.md](options.md) says more about each
option, and [errors.md](errors.md) what to do about an error.
"""
SECTIONS = re.compile(r"^(Args|Attributes|Returns|Raises):\n", re.MULTILINE)
ENTRY = re.compile(r"([^\s:][^:]*): (.*)", re.DOTALL)
WIDTH = 110
Definition = ast.FunctionDef | ast.ClassDef


@dataclass(frozen=True)
class Source:
    """A function or a class, and the file that defines it."""

    node: Definition
    file: Path


def reference() -> str:
    """Return the page: functions first, then classes, then errors."""
    parts: dict[str, list[str]] = {"Functions": [], "Classes": [], "Errors": []}
    for name in public_names():
        source = definition(name, PACKAGE / "__init__.py")
        if source is None:
            raise LookupError(f"memgraph.{name} is neither a function nor a class of its sources")
        kind = "Functions" if isinstance(source.node, ast.FunctionDef) else "Errors" if "Error" in name else "Classes"
        parts[kind].append("\n".join([f"### {name}\n", *_described(source)]))
    return "\n".join([HEAD, *(f"## {kind}\n\n" + "\n".join(each) for kind, each in parts.items())])


def public_names() -> list[str]:
    """Return the names that the package imports when they are asked for."""
    (by_module,) = (
        ast.literal_eval(node.value)
        for node in _tree(PACKAGE / "__init__.py").body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "NAMES"
    )
    return sorted((name for names in by_module.values() for name in names), key=lambda name: (name.lower(), name))


def definition(name: str, file: Path) -> Source | None:
    """Return the function or class that a name stands for in a file; None if no file of memgraph's defines it."""
    for node in ast.walk(_tree(file)):
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name == name and node in _tree(file).body:
            return Source(node, file)
        if isinstance(node, ast.ImportFrom) and node.level:
            for alias in node.names:
                if (alias.asname or alias.name) == name:
                    return definition(alias.name, _module(file, node))
    return None


def _module(file: Path, node: ast.ImportFrom) -> Path:
    """Return the file that a relative import reads."""
    path = file.parents[node.level - 1].joinpath(*(node.module or "").split("."))
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


@cache
def _tree(file: Path) -> ast.Module:
    return ast.parse(file.read_text())


def _described(source: Source) -> Iterator[str]:
    """Yield the paragraphs of a function, or of a class and its members."""
    node, text = source.node, ast.get_docstring(source.node) or ""
    if isinstance(node, ast.FunctionDef):
        yield _signature(node.name, node) + "\n"
        yield markdown(text)
        return
    members, bases = list(_members(source)), list(_bases(source))
    made = next((each for each in members if each.name == "__init__"), None)
    if made is not None and "\nArgs:\n" in text:
        yield _signature(node.name, made) + "\n"
    yield markdown(text)
    for base in bases:  # whose fields it has
        _, found, listed = (ast.get_docstring(base.node) or "").partition("Attributes:\n")
        if found:
            yield markdown(found + listed)
    for each in members:
        said = ast.get_docstring(each)
        if said and not each.name.startswith("_"):
            is_property = any("property" in ast.unparse(decorator) for decorator in each.decorator_list)
            yield f"#### {node.name}.{each.name}\n"
            if not is_property:
                yield _signature(each.name, each) + "\n"
            yield markdown(said)


def _members(source: Source) -> Iterator[ast.FunctionDef]:
    """Yield the methods and properties of a class, then those of its bases that it does not define itself."""
    found = {each.name: each for each in source.node.body if isinstance(each, ast.FunctionDef)}
    yield from found.values()
    for base in _bases(source):
        yield from (each for each in _members(base) if each.name not in found)


def _bases(source: Source) -> Iterator[Source]:
    """Yield the bases of a class that are memgraph's."""
    assert isinstance(source.node, ast.ClassDef)
    for base in source.node.bases:
        found = definition(ast.unparse(base), source.file)
        if found is not None and isinstance(found.node, ast.ClassDef):
            yield found


def _signature(name: str, node: ast.FunctionDef) -> str:
    """Return the call in a block of code, in as many lines as it needs."""
    arguments = [each for each in _arguments(node.args) if each not in ("self", "cls")]
    returns = f" -> {ast.unparse(node.returns)}" if node.returns and node.name != "__init__" else ""
    call = f"{name}({', '.join(arguments)}){returns}"
    if len(call) > WIDTH:
        call = "\n".join([f"{name}(", *(f"    {each}," for each in arguments), f"){returns}"])
    return f"```python\n{call}\n```"


def _arguments(given: ast.arguments) -> Iterator[str]:
    """Yield each argument as it is written, and the marks between kinds of arguments."""
    plain = [*given.posonlyargs, *given.args]
    defaults = [None] * (len(plain) - len(given.defaults)) + [*given.defaults]
    for place, (each, default) in enumerate(zip(plain, defaults, strict=True), 1):
        yield _argument(each, default)
        if place == len(given.posonlyargs):
            yield "/"
    if given.vararg is not None:
        yield f"*{_argument(given.vararg)}"
    elif given.kwonlyargs:
        yield "*"
    yield from map(_argument, given.kwonlyargs, given.kw_defaults)
    if given.kwarg is not None:
        yield f"**{_argument(given.kwarg)}"


def _argument(argument: ast.arg, default: ast.expr | None = None) -> str:
    typed = f"{argument.arg}: {ast.unparse(argument.annotation)}" if argument.annotation else argument.arg
    return typed if default is None else f"{typed}{' = ' if argument.annotation else '='}{ast.unparse(default)}"


def markdown(docstring: str) -> str:
    """Return a docstring as Markdown: indented lines as code, and sections of names as lists."""
    text, *sections = SECTIONS.split(docstring)
    parts = [_prose(text)]
    for title, body in zip(sections[::2], sections[1::2], strict=True):
        listed, _, rest = textwrap.dedent(body).partition("\n\n")
        shown = _prose(listed) if title == "Returns" else "\n".join(_items(listed)) + "\n"
        parts += [f"{title}:\n\n{shown}", _prose(rest)]
    return "\n".join(part for part in parts if part)


def _prose(text: str) -> str:
    """Return paragraphs; those that are indented as blocks of code."""
    parts = [part.strip("\n") for part in re.split(r"\n\s*\n", text) if part.strip()]
    shown = [f"```python\n{textwrap.dedent(part)}\n```" if part.startswith("    ") else part for part in parts]
    return "\n\n".join(shown) + "\n" if shown else ""


def _items(listed: str) -> Iterator[str]:
    """Yield a line for each entry of a section, `name: text`, whose further lines are indented."""
    for entry in re.split(r"\n(?=\S)", listed):
        said = " ".join(entry.split())
        match = ENTRY.fullmatch(said)
        yield f"- `{match[1]}`: {match[2]}" if match else f"- {said}"


if __name__ == "__main__":
    PAGE.write_text(reference())
