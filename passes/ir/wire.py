"""What may be cast for its way to the far tier and back, and to what.

    narrowed("f32[8, 4]", "bf16")  ->  "bf16[8, 4]"          narrowed("i64[8, 4]", "bf16")  ->  ""

Only a type of the same range stands for another: what is rounded loses digits, and never becomes infinite.
"""

from __future__ import annotations

WIDE = {"bf16": "f32"}  # what each type may stand for
WORKSPACE = 16384  # bytes that the cast out may allocate and free again


def narrowed(type: str, wire: str) -> str:
    """The type of a value once it is cast to `wire`; empty, if it may not be."""
    dtype, _, shape = type.partition("[")
    # A value of several tensors has several brackets.
    return f"{wire}[{shape}" if WIDE.get(wire) == dtype and "[" not in shape else ""
