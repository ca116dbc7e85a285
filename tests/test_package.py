"""The distribution: it is built, holds all that runs, and its metadata say what the pages say."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
from pathlib import Path

import pytest
import yaml

import memgraph
from benchmarks.versions import PYTHONS, VERSIONS

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
SCRIPT = """
import sys, torch, memgraph
from torch import nn
model = nn.Sequential(*[nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(8)], nn.Linear(64, 1))
x = torch.randn(512, 64)
report = memgraph.plan(model, x, target=torch.zeros(512, 1), loss=nn.functional.mse_loss)
report.to_html(sys.argv[1])
compiled = memgraph.compile(model, int(0.8 * report.peak), loss=nn.functional.mse_loss)
compiled(x, target=torch.zeros(512, 1)).backward()
print(memgraph.__file__, compiled.plan.no_pool)
"""


def run(*words: str | Path, **variables: str) -> str:
    done = subprocess.run(
        list(map(str, words)), capture_output=True, text=True, timeout=300, env={**os.environ, **variables}
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.long
def test_what_is_built_of_the_sources_runs_where_they_are_not(tmp_path: Path) -> None:
    sources = tmp_path / "clone"
    for name in run("git", "-C", ROOT, "ls-files").splitlines():
        if (ROOT / name).is_file():
            (sources / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, sources / name)
    make = f"import os; os.chdir({str(sources)!r}); from setuptools.build_meta import build_sdist as b; b({str(tmp_path)!r})"
    run(sys.executable, "-c", make)
    (archive,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(archive) as files:
        names = {name.partition("/")[2] for name in files.getnames()}
    assert {"README.md", "LICENSE", "memgraph/py.typed", "passes/py.typed", "memgraph/system/page_pool.c"} <= names
    pip = sys.executable, "-m", "pip", "-q", "--disable-pip-version-check"
    run(*pip, "wheel", "--no-deps", "--no-build-isolation", "-w", tmp_path, archive)
    (wheel,) = tmp_path.glob("*.whl")
    assert wheel.name == f"memgraph_torch-{PROJECT['version']}-py3-none-any.whl"
    installed = tmp_path / "installed"
    run(*pip, "install", "--no-deps", "--no-index", "--target", installed, wheel)
    page, here = tmp_path / "plan.html", str(installed)
    found = run(sys.executable, "-P", "-c", SCRIPT, page, PYTHONPATH=here).split(maxsplit=1)
    assert found == [str(installed / "memgraph/__init__.py")]  # and a pool of pages, which was compiled
    assert "<script" in page.read_text()
    said = run(installed / "bin/memgraph", "--version", PYTHONPATH=here)
    assert said.startswith(f"memgraph {PROJECT['version']}, torch ")


def test_versions_and_licences_are_the_same_everywhere() -> None:
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert cited["version"] == PROJECT["version"] == memgraph.__version__
    assert cited["license"] == PROJECT["license"] == "BSD-3-Clause"
    assert cited["cff-version"] == "1.2.0" and {"title", "message", "authors"} <= cited.keys()
    changes = re.findall(r"^## (.+)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert changes[0] == "Unreleased" and changes[1] == PROJECT["version"]


def test_pythons_are_those_that_are_supported() -> None:
    named = [each.rpartition(" ")[2] for each in PROJECT["classifiers"] if re.search(r":: 3\.\d+$", each)]
    assert PROJECT["requires-python"] == f">={named[0]}"
    assert f"Python >= {named[0]}" in (ROOT / "README.md").read_text()


def test_the_workflow_runs_what_there_is() -> None:
    jobs = yaml.safe_load((ROOT / ".github/workflows/checks.yml").read_text())["jobs"]
    steps = [step["run"] for job in jobs.values() for step in job["steps"] if "run" in step]
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert {name for step in steps for name in re.findall(r"make ([\w-]+)", step)} <= targets
    matrix = jobs["versions"]["strategy"]["matrix"]
    assert set(matrix["torch"]) - {"newest", "nightly"} <= set(VERSIONS)
    assert set(matrix["python"]) <= set(PYTHONS)
    assert jobs["publish"]["needs"] == "package" and jobs["package"]["needs"] == ["tests", "lint-and-docs"]
