"""Kernels run under Triton's interpreter or on a GPU, in a process that was started for it: `test_kernels.py` does so.

Whether Triton interprets is settled when a kernel is decorated, for all of a process.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

HERE = Path(__file__).parent
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"

collect_ignore_glob = [] if INTERPRETED or torch.cuda.is_available() else ["test_*.py"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """On a GPU, they are tests of that."""
    if not INTERPRETED:
        for item in items:
            if HERE in item.path.parents:
                item.add_marker(pytest.mark.gpu)
