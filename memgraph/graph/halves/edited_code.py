"""The code of a half with other calls around its ops.

    run_edited(half, lambda name, line: f"{line};  memgraph_note('{name}')", memgraph_note=note)

    mm = op_aten_mm_default(x, w);  x = None    ->    mm = op_aten_mm_default(x, w);  x = None;  memgraph_note('mm')

The rest is the half's own, so values have the same lifetimes.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from torch import fx

LINE = re.compile(r"^    (\w+) = .*$", re.MULTILINE)  # an op, and the names that are dead behind it


def run_edited(half: fx.GraphModule, edit: Callable[[str, str], str], **names: Any) -> Any:
    """Return the compiled code of a half, in which each op's line is edited; `names` are what edits use."""
    scope = {**half.forward.__globals__, **names}
    exec(LINE.sub(lambda line: edit(line[1], line[0]), half.code), scope)
    return scope["forward"]
