"""Packages import downwards only."""

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import networkx as nx

ROOT = Path(__file__).parents[1]
MEMGRAPH = (
    {"memgraph.command", "memgraph.integrations"},
    {"memgraph.fit"},
    {"memgraph.api"},
    {"memgraph.stages"},
    {"memgraph.planning"},
    {"memgraph.runtime"},
    {"memgraph.oss"},
    {"memgraph.optim", "memgraph.microbatch", "memgraph.slices"},
    {"memgraph.capture"},
    {"memgraph.opaque"},
    {"memgraph.profile"},
    {"memgraph.graph", "memgraph.options"},
    {"memgraph.storage"},
    {"memgraph.kernels", "memgraph.guards"},
    {"memgraph.report", "memgraph.tensors"},
    {"memgraph.system"},
    {"memgraph.errors"},
)
OSS = (
    {"memgraph.oss.compiled"},
    {"memgraph.oss"},
    {"memgraph.oss.checkpoint"},
    {"memgraph.oss.comm"},
    {"memgraph.oss.shards"},
)
STAGES = (
    {"memgraph.stages"},
    {"memgraph.stages.state"},
    {"memgraph.stages.ranks"},
)
PASSES = (
    {"passes"},
    {"passes.search", "passes.deep", "passes.stages", "passes.slices"},
    {"passes.lp"},
    {"passes.schedule", "passes.order"},
    {"passes.analysis", "passes.simulate"},
    {"passes.ir"},
)
ENTRIES = 25  # of a folder
IMPORTS = 20  # of a file


def test_packages_import_what_stands_below_them_only() -> None:
    assert upward_imports() == []


def test_no_files_import_each_other_in_a_circle() -> None:
    files = {module: path for module, path in modules().items() if path.name != "__init__.py"}
    graph = nx.DiGraph((module, target) for module, path in files.items() for target in imports(module, path))
    assert [sorted(each) for each in nx.strongly_connected_components(graph) if len(each) > 1] == []


def test_no_folder_has_more_entries_than_one_reads_at_once() -> None:
    folders = [folder for top in ("memgraph", "passes") for folder in [ROOT / top, *(ROOT / top).rglob("*/")]]
    full = [folder for folder in folders if len(entries(folder)) > ENTRIES]
    assert full == []


def test_no_file_imports_more_modules_of_ours_than_one_keeps_in_mind() -> None:
    counts = {module: len(set(imports(module, path))) for module, path in modules().items()}
    assert {module: count for module, count in counts.items() if count > IMPORTS} == {}


def test_the_docstring_of_a_package_lists_its_files() -> None:
    missing = [
        str(file.relative_to(ROOT))
        for package in ("memgraph", "passes")
        for init in (ROOT / package).glob("*/**/__init__.py")
        for file in init.parent.glob("*.py")
        if file != init and not re.search(rf"^ *{file.stem}\b|[(,] ?`?{file.stem}\b", _docstring(init), re.MULTILINE)
    ]
    assert missing == []


def _docstring(path: Path) -> str:
    return ast.get_docstring(ast.parse(path.read_text())) or ""


def upward_imports() -> list[str]:
    return [
        f"{module} imports {target}"
        for module, path in modules().items()
        if path.name != "__init__.py"
        for target in sorted(set(imports(module, path)))
        for layers, depth in ((MEMGRAPH, 2), (OSS, 3), (STAGES, 3), (PASSES, 2))
        if points_up(box(module, depth), box(target, depth), layers)
    ]


def points_up(source: str, target: str, layers: tuple[set[str], ...]) -> bool:
    """Return True if both are in the table, and the target is not below the source."""
    row = {name: i for i, names in enumerate(layers) for name in names}
    return source in row and target in row and source != target and row[source] >= row[target]


def box(module: str, depth: int) -> str:
    """The package of a module, at this depth; a module of a package that has subpackages is that package's own."""
    parts = module.split(".")[:depth]
    name = ".".join(parts)
    return name if (ROOT / Path(*parts)).is_dir() or name == "memgraph.errors" else ".".join(parts[:-1])


@cache
def modules() -> dict[str, Path]:
    """Every module of the product by its dotted name."""
    files = [file for top in ("memgraph", "passes") for file in (ROOT / top).rglob("*.py")]
    return {".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): file for file in files}


def imports(module: str, path: Path) -> Iterator[str]:
    """The modules that a module imports, for type checking too."""
    known = modules()
    package = module.split(".") if path.name == "__init__.py" else module.split(".")[:-1]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            head = ".".join([*base, *(node.module.split(".") if node.module else [])])
            for alias in node.names:
                inner = f"{head}.{alias.name}"
                if inner in known or head in known:
                    yield inner if inner in known else head


def entries(folder: Path) -> list[Path]:
    return [
        entry
        for entry in folder.iterdir()
        if (entry.suffix == ".py" and entry.name != "__init__.py") or (entry.is_dir() and any(entry.rglob("*.py")))
    ]
