"""The names of torch that the sources use exist, also those that only a GPU needs."""

from __future__ import annotations

import ast
import importlib
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[1]
FILES = [path for folder in ("memgraph", "benchmarks", "tests/gpu") for path in sorted((ROOT / folder).rglob("*.py"))]
STUBS = (Path(torch.__file__).parent / "_C" / "__init__.pyi").read_text()


def mentioned(path: Path) -> Iterator[str]:
    """Dotted names that begin with torch, and what is imported from there."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "torch":
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.partition(".")[0] == "torch")
        elif isinstance(node, ast.Attribute):
            parts = ast.unparse(node).split(".")
            if parts[0] == "torch" and all(map(str.isidentifier, parts)):
                yield ".".join(parts)


def is_there(name: str) -> bool:
    parts = name.split(".")
    if parts[:2] == ["torch", "ops"]:
        return True  # looked up by schema, when it is called
    found: object = torch
    for i, part in enumerate(parts[1:], 1):
        try:
            found = getattr(found, part) if hasattr(found, part) else importlib.import_module(".".join(parts[: i + 1]))
        except ImportError:
            # A build for CPUs lacks what is written in C++ for GPUs, but says that there is such a thing.
            return parts[1] == "_C" and f"def {part}(" in STUBS
    return True


@pytest.mark.long
def test_every_name_of_torchs_is_there() -> None:
    names = {name: str(path.relative_to(ROOT)) for path in FILES for name in mentioned(path)}
    assert len(names) > 200
    assert {name: path for name, path in names.items() if not is_there(name)} == {}


def test_a_name_that_is_not_there_is_found() -> None:
    assert is_there("torch._C._cuda_endAllocateToPool") and is_there("torch.cuda.graph_pool_handle")
    assert not is_there("torch._C._cuda_getDriverVersion") and not is_there("torch.cuda.driver")
