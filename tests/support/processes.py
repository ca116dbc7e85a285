"""The same steps planned in two processes, in which sets of names iterate in other orders.

    printed(code, steps)    # what both print

It must be the same: no plan depends on the order of a set.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

from passes import Trace

ROOT = Path(__file__).parents[2]


def printed(code: str, steps: Iterable[Trace]) -> str:
    """`code` gets the steps by standard input, with ===== between them."""
    here, there = (
        subprocess.run(
            [sys.executable, "-c", code],
            input="=====\n".join(map(str, steps)),
            cwd=ROOT,
            env={"PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    )
    assert here == there
    return here
