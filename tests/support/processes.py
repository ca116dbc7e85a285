"""Plan the same steps in two processes whose sets iterate in different orders.

    printed(code, steps)    # the output of both

Both must be equal, because no plan may depend on the order of a set.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

from passes import Trace

ROOT = Path(__file__).parents[2]


def printed(code: str, steps: Iterable[Trace]) -> str:
    """Run `code` in both; its standard input is the steps, with ===== between them."""
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
