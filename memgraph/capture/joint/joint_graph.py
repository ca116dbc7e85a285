"""The graph of a first trace, and the roles of what it takes and returns."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import fx

from ...graph.captured import Input, Output
from ...guards.attribute_writes import AttributeWrites
from ...guards.variable_scope import Reads
from ...tensors.pytree import Spec
from ..constant_fake_mode import ConstantFakeMode


@dataclass(frozen=True, eq=False)
class JointGraph:
    """The result of the first trace.

    After `outputs`, the graph returns the new values of the placeholders `assigned`. See `Captured` for the rest.
    """

    graph: fx.GraphModule
    mode: ConstantFakeMode
    inputs: tuple[Input, ...]
    outputs: tuple[Output, ...]
    assigned: tuple[int, ...]
    leaves: tuple[Any, ...]
    spec: Spec
    differentiable: tuple[int, ...]
    sources: Mapping[Output, frozenset[int]]
    has_custom_functions: bool
    rewritten: Mapping[int, int]
    writes: AttributeWrites = field(default_factory=AttributeWrites)
    reads: Reads = field(default_factory=Reads)
