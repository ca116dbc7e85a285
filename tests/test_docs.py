"""The docs are true: the script of docs/start.md runs, and options, defaults, errors and links exist."""

from __future__ import annotations

import inspect
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from torch import distributed, nn

import memgraph

ROOT = Path(__file__).parents[1]
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]
FENCED = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
CALLS: dict[str, Callable[..., Any]] = {"compile": memgraph.compile, "plan": memgraph.plan, "sweep": memgraph.sweep}


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[None]:
    distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/group", rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


def read(path: str) -> str:
    return (ROOT / path).read_text()


def blocks(path: str) -> list[str]:
    return [text for language, text in FENCED.findall(read(path)) if language == "python"]


def defaults(call: str) -> dict[str, object]:
    parameters = inspect.signature(CALLS[call]).parameters.values()
    return {p.name: p.default for p in parameters if p.default is not p.empty}


@pytest.mark.long
def test_the_script_of_the_first_ten_minutes_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    seen: dict[str, object] = {}
    for block in blocks("docs/start.md"):
        exec(compile(block, "start.md", "exec"), seen)
    report, compiled, error = seen["report"], seen["compiled"], capsys.readouterr().out
    assert isinstance(report, memgraph.Report) and not report.plan
    assert isinstance(compiled, memgraph.CompiledModule) and isinstance(compiled, nn.Module)
    assert compiled.plan.plan and compiled.plan.measured is not None
    assert compiled.plan.measured <= compiled.plan.peak <= compiled.plan.budget
    assert "2000000 bytes are allowed" in error
    assert (tmp_path / "run.pt").is_file()


@pytest.mark.usefixtures("alone")
def test_the_snippets_of_the_readme_run_one_after_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run").mkdir()
    x, y = torch.randn(4, 8), torch.randn(4, 1)
    seen: dict[str, Any] = {
        "net": nn.Linear(8, 1),
        "loss_fn": nn.functional.mse_loss,
        "batches": [(x, y)],
        "x": x,
        "y": y,
    }
    run = [block for block in blocks("README.md") if "..." not in re.sub("#.*", "", block)]  # a list of calls is none
    for block in run:
        exec(compile(block.replace("8GB", "1GB"), "README.md", "exec"), seen)
    assert len(run) == 3
    assert (tmp_path / "run.pt").is_file() and (tmp_path / "plan.html").is_file()
    assert seen["report"].peak > 0 and isinstance(seen["model"], memgraph.CompiledModule)


@pytest.mark.long
def test_the_site_is_built_without_a_warning(tmp_path: Path) -> None:
    pytest.importorskip("mkdocs", reason="make docs installs it")
    command = sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", tmp_path / "site"
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    )
    assert done.returncode == 0 and "WARNING" not in done.stderr, done.stderr
    first = (tmp_path / "site/index.html").read_text()
    assert 'href="limits/"' in first and 'href="docs/' not in first
    assert "memgraph.compile" in (tmp_path / "site/api/index.html").read_text()


@pytest.mark.long
@pytest.mark.parametrize("page", ["choosing", "coming-from"])
def test_the_snippets_of_a_page_run_one_after_another(
    page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(12)))
    seen: dict[str, Any] = {
        "memgraph": memgraph, "torch": torch, "nn": nn, "checkpoint": torch.utils.checkpoint.checkpoint, "model": model,
        "optimizer": torch.optim.Adam(model.parameters()), "loss_fn": nn.functional.mse_loss,
        "x": torch.randn(512, 64), "y": torch.randn(512, 64),
    }  # fmt: skip
    for block in blocks(f"docs/{page}.md"):
        exec(compile(block, f"{page}.md", "exec"), seen)
    assert seen["compiled"].plan.measured <= seen["compiled"].plan.budget


def test_the_version_is_that_of_the_installed_package() -> None:
    assert re.search(r'^version = "(.+)"$', read("pyproject.toml"), re.MULTILINE)[1] == memgraph.__version__  # type: ignore[index]


def test_every_option_is_told_with_its_default() -> None:
    said = eval(f"dict({blocks('docs/options.md')[0].partition('*, ')[2].partition(')')[0]})")
    assert {"budget": None, **said} == defaults("compile")
    told = re.findall(r"`(\w+)`", " ".join(re.findall(r"^## (.+)$", read("docs/options.md"), re.MULTILINE)))
    assert told == list(defaults("compile"))
    table = read("README.md").partition("| argument | meaning |")[2].partition("\n\n")[0]
    assert re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE) == list(defaults("compile"))


def test_plan_and_sweep_take_what_is_said() -> None:
    assert defaults("plan") == {name: value for name, value in defaults("compile").items() if name != "strict"}
    others = {name: value for name, value in defaults("plan").items() if name not in ("plan", "budget")}
    assert defaults("sweep") == {"budgets": None, **others}


def test_every_error_has_a_row_and_every_row_an_error() -> None:
    public = {name for name in memgraph.__all__ if name.endswith("Error")}
    rows = re.findall(r"^\| `(\w+)`", read("docs/errors.md"), re.MULTILINE)
    assert len(rows) == len(set(rows)) and set(rows) == public
    assert all(issubclass(getattr(memgraph, name), memgraph.MemgraphError) for name in public)


def test_every_public_name_and_every_argument_is_documented() -> None:
    own = {name: getattr(memgraph, name) for name in memgraph.__all__}
    assert [name for name, value in own.items() if not (value.__doc__ or "").strip()] == []
    documented = set(re.findall(r"^ {4}(\w+): ", inspect.getdoc(memgraph.compile) or "", re.MULTILINE))
    assert documented >= {"model", *defaults("compile")}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_leads_somewhere(page: Path) -> None:
    assert [link for link in links(page) if not leads(page, link)] == []


def links(page: Path) -> Iterator[str]:
    for link in re.findall(r"\]\(([^)\s]+)\)", FENCED.sub("", page.read_text())):
        if "://" not in link:
            yield link


def leads(page: Path, link: str) -> bool:
    name, _, place = link.partition("#")
    target = page.parent / name if name else page
    headings = re.findall(r"^#+ (.+)$", target.read_text(), re.MULTILINE) if target.suffix == ".md" else []
    anchors = {re.sub(r"[^\w\- ]", "", heading).strip().lower().replace(" ", "-") for heading in headings}
    return target.exists() and (not place or place in anchors)
