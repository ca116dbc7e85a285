"""Kernels run under Triton's interpreter or on a GPU, in a process that was started for it: `test_kernels.py` does so.

Whether Triton interprets is settled when a kernel is decorated, for all of a process.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import triton

HERE = Path(__file__).parent
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"

collect_ignore_glob = [] if INTERPRETED or torch.cuda.is_available() else ["test_*.py"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """On a GPU, they are tests of that."""
    if not INTERPRETED:
        for item in items:
            if HERE in item.path.parents:
                item.add_marker(pytest.mark.gpu)


def _let_loops_begin_at_a_tensor() -> None:
    """Do in Triton's interpreter what Triton 3.7 does: up to 3.6 `range(tl.program_id(0), n)` asks numpy for the integer
    of an array of one number, which numpy refuses from 2.4 on.  No GPU is concerned."""
    from triton.runtime import interpreter

    theirs = interpreter._patch_lang_tensor

    def patch(tensor: Any, scope: Any) -> None:
        theirs(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.squeeze()))

    interpreter._patch_lang_tensor = patch


if INTERPRETED and triton.__version__.startswith("3.6."):
    _let_loops_begin_at_a_tensor()
