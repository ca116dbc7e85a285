"""The private names of torch that memgraph uses are listed in one file, and a missing one is an error at import."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from memgraph import TorchVersionError
from memgraph.system import private_names
from memgraph.system.private_names import ATTRIBUTES, CUDA_NAMES, DISTRIBUTED, LATE_NAMES, NAMES, check, missing
from tests.test_torch_names import mentioned

FOLDER = Path(private_names.__file__).parents[1]
PAGE = Path(private_names.__file__)
FILES = [path for path in sorted(FOLDER.rglob("*.py")) if path != PAGE]
TREES = [ast.parse(path.read_text()) for path in FILES]
OTHERS = {
    "_getframe",
    "_at_fork_reinit",
    "_SimpleCData",
    "_model_mapping",
}  # of Python's own, and of transformers' auto classes


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def used() -> set[str]:
    """Return torch's dotted names with a private part, without prefixes of longer ones."""
    names = {name for path in FILES for name in mentioned(path) if any(map(is_private, name.split(".")))}
    attributes = (node for tree in TREES for node in ast.walk(tree) if isinstance(node, ast.Attribute))
    names |= {f"torch.ops.aten.{one.attr}" for one in attributes if ast.unparse(one).startswith("aten._")
              and ast.unparse(one.value) == "aten"}  # fmt: skip
    return {name for name in names if name not in ("torch._C", "torch._ops") and "memgraph" not in name}


def defined() -> Iterator[str]:
    """Return the private names that memgraph itself defines."""
    for node in (node for tree in TREES for node in ast.walk(tree)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                parts = list(ast.walk(target))
                yield from (part.id for part in parts if isinstance(part, ast.Name))
                yield from (part.attr for part in parts if isinstance(part, ast.Attribute))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value  # as of `object.__setattr__`


def read() -> set[str]:
    """Return the private attributes that memgraph reads."""
    nodes = (node for tree in TREES for node in ast.walk(tree))
    return {node.attr for node in nodes if isinstance(node, ast.Attribute) and is_private(node.attr)}


@pytest.mark.long
def test_every_private_name_of_the_sources_is_on_the_page_and_no_other() -> None:
    listed = {*NAMES, *CUDA_NAMES, *LATE_NAMES}
    assert used() - listed == set()
    assert listed - used() - {"torch._ops", "torch._dynamo.config.error_on_nested_fx_trace"} == set()


@pytest.mark.long
def test_every_private_attribute_that_is_not_memgraphs_is_on_the_page() -> None:
    attributes = {name for owners in (ATTRIBUTES, DISTRIBUTED) for names in owners.values() for name in names}
    parts = {part for name in used() for part in name.split(".")}
    assert read() - set(defined()) - attributes - parts - OTHERS <= {"_C", "_ops"}
    sources = "\n".join(path.read_text() for path in FILES)
    assert {name for name in attributes if name not in sources} == set()


def test_this_torch_has_them_all() -> None:
    assert missing() == ""


def test_a_name_that_is_gone_is_named_with_its_reason_and_the_versions_that_work(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delattr(torch._C, "_storage_Use_Count")
    monkeypatch.delattr(torch.amp.GradScaler, "_unscale_grads_")
    with pytest.raises(TorchVersionError) as error:
        check()
    first, *lines = str(error.value).splitlines()
    assert first == f"torch {torch.__version__.partition('+')[0]} lacks what memgraph uses:"
    assert lines[0] == "  torch._C._storage_Use_Count (gradients with other references are not overwritten)"
    assert lines[1] == "  torch.amp.GradScaler._unscale_grads_ (ranks agree on which gradients are infinite)"
    assert lines[2].startswith("It is known to work with torch 2.11, ") and len(lines) == 3


def test_a_function_that_takes_other_arguments_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def reparametrized(module: object, parameters_and_buffers: object, again: int) -> None: ...

    monkeypatch.setattr(torch.nn.utils.stateless, "_reparametrize_module", reparametrized)
    assert "_reparametrize_module that takes (module, parameters_and_buffers, tie_weights)" in missing()


def test_a_torch_that_was_never_tested_is_one_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", "3.1.4+cpu")
    with pytest.warns(RuntimeWarning, match=r"never tested with torch 3\.1\.4") as warned:
        check()
    assert len(warned) == 1


@pytest.mark.long
def test_the_first_use_of_a_torch_without_such_a_name_is_one_error() -> None:
    script = "import torch, torch._subclasses as s\ndel torch._C._DisableAutocast\nimport memgraph\nmemgraph.compile"
    found = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert found.returncode == 1
    assert "TorchVersionError: torch " in found.stderr and "_DisableAutocast (casts stand in the graph" in found.stderr
    assert "During handling" not in found.stderr
