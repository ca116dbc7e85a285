"""The notebooks run from their first cell to their last, in a kernel of their own, and show what they say."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
SHOWN = {  # in what the cells print or show
    "out_of_memory": ("allocate memory", "equal to eager's to the bit: True", "<svg role="),
    "larger_than_memory": ("134 MB", "<svg role=", "True"),
    "lora": ("trainable params", "as it is, the step needs", "<svg role=", "no plan takes less than"),
}


@pytest.mark.long
@pytest.mark.parametrize("name", SHOWN)
def test_a_notebook_runs(name: str) -> None:
    nbclient = pytest.importorskip("nbclient", reason="make docs installs it")
    nbformat: Any = pytest.importorskip("nbformat")
    notebook = nbformat.read(EXAMPLES / f"{name}.ipynb", as_version=4)
    nbclient.NotebookClient(notebook, timeout=300, kernel_name="python3").execute()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", ())]
    text = "".join(output.get("text", "") + "".join(map(str, output.get("data", {}).values())) for output in outputs)
    assert [each for each in SHOWN[name] if each not in text] == []


def test_there_is_no_notebook_that_is_not_run_and_none_with_results() -> None:
    nbformat: Any = pytest.importorskip("nbformat", reason="make docs installs it")
    assert {file.stem for file in EXAMPLES.glob("*.ipynb")} == set(SHOWN)
    for file in EXAMPLES.glob("*.ipynb"):
        cells = nbformat.read(file, as_version=4).cells
        assert not any(cell.get("outputs") or cell.get("execution_count") for cell in cells)
