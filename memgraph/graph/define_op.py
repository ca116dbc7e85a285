"""Define an op of torch whose code is the same on every device.

define_op(library, "twice(Tensor x) -> Tensor", run, fake)   ->   torch.ops.<namespace of the library>.twice.default
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._ops import OpOverload


def define_op(
    library: torch.library.Library, schema: str, run: Callable[..., Any], fake: Callable[..., Any],
    tags: Sequence[torch.Tag] = (),
) -> OpOverload:  # fmt: skip
    """Return a new op that calls `run`, and `fake` for fake tensors."""
    name = schema.partition("(")[0]
    library.define(schema, tags=tuple(tags))
    library.impl(name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"{library.ns}::{name}", fake, lib=library)
    op: OpOverload = getattr(getattr(torch.ops, library.ns), name).default
    return op
