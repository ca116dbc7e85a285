"""The arrow runs one way: memgraph imports passes, and passes know no torch.

memgraph (torch, triton) -> passes (stdlib, networkx, numpy, highspy)
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
ALLOWED = sys.stdlib_module_names | {"networkx", "numpy", "highspy"}

IMPORT_ALL_OF_PASSES = """
import importlib, pkgutil, sys
import passes
for module in pkgutil.walk_packages(passes.__path__, "passes."):
    importlib.import_module(module.name)
print(sorted({"torch", "triton", "memgraph"} & set(sys.modules)))
"""

TRAIN_WITHOUT = """
import sys
sys.modules |= dict.fromkeys(("rich", "typer", "safetensors"))  # whoever imports them fails
import torch, memgraph
model = memgraph.compile(torch.nn.Linear(8, 1), "1GB")
model(torch.randn(4, 8)).sum().backward()
print(model.plan.peak > 0)
"""


def test_importing_passes_brings_in_no_torch() -> None:
    run = subprocess.run([sys.executable, "-c", IMPORT_ALL_OF_PASSES], cwd=ROOT, capture_output=True, text=True)
    assert (run.stdout, run.returncode) == ("[]\n", 0), run.stderr


@pytest.mark.long
def test_training_imports_no_library_that_only_prints_or_reads_files() -> None:
    run = subprocess.run([sys.executable, "-c", TRAIN_WITHOUT], cwd=ROOT, capture_output=True, text=True)
    assert run.stdout == "True\n", run.stderr


def test_passes_import_only_pure_packages_and_each_other_relatively() -> None:
    files = sorted((ROOT / "passes").rglob("*.py"))
    assert files
    assert [line for file in files for line in forbidden_imports(file.relative_to(ROOT), file.read_text())] == []


def test_every_way_of_writing_a_forbidden_import_is_seen() -> None:
    text = """
import torch.fx
from memgraph.report.report import Report
from passes.ir.trace import Trace
from ..memgraph import compile
if TYPE_CHECKING:
    import triton
def late():
    from torch import Tensor

import numpy as np
from . import trace
from .trace import Trace
"""
    assert list(forbidden_imports(Path("passes/offload.py"), text)) == [
        "passes/offload.py:2: torch.fx",
        "passes/offload.py:3: memgraph.report.report",
        "passes/offload.py:4: passes.ir.trace",
        "passes/offload.py:5: ..memgraph",
        "passes/offload.py:7: triton",
        "passes/offload.py:9: torch",
    ]


def forbidden_imports(file: Path, text: str) -> Iterator[str]:
    """`file:line: what` of each import that leaves the room, wherever in the file it stands."""
    imports = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Import | ast.ImportFrom)]
    for node in sorted(imports, key=lambda node: node.lineno):
        for dots, name in imported(node):
            # One dot is the file's own package; as many dots as the path has folders is still inside passes.
            inside = 0 < dots < len(file.parts)
            if not inside and (dots or name.split(".")[0] not in ALLOWED):
                yield f"{file}:{node.lineno}: {'.' * dots}{name}"


def imported(node: ast.Import | ast.ImportFrom) -> list[tuple[int, str]]:
    """Leading dots and dotted name of each module that the statement imports."""
    if isinstance(node, ast.Import):
        return [(0, alias.name) for alias in node.names]
    return [(node.level, node.module or "")]
