"""Undo a run whose guard has failed.

    state of the generators -> forward -> GuardFailed -> the same state

Nothing else has changed: a graph writes to buffers after its last guard, and backward has not begun.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import fx

from ..errors import AgreementError
from ..graph.guard_ops import GuardFailed
from ..system.python_random import PythonRandom


def drawn_generators(graph: fx.GraphModule, device: torch.device) -> tuple[torch.Generator, ...]:
    """Return the generators from which ops of a graph may draw."""
    constants = (getattr(graph, str(node.target)) for node in graph.graph.find_nodes(op="get_attr"))
    own = [constant for constant in constants if isinstance(constant, torch.Generator)]
    default = [torch.cuda.default_generators[device.index or 0]] if device.type == "cuda" else []
    return (torch.default_generator, *default, *own)


@contextmanager
def restoring_generators(generators: Sequence[torch.Generator], in_python: bool) -> Iterator[None]:
    """Restore the generators if a guard fails in the block, on this rank or another.

    With `in_python`, also those of `random` and numpy.
    """
    python = PythonRandom() if in_python else None
    states = [(generator, generator.clone_state()) for generator in generators]  # counts as no tensor memory
    try:
        yield
    except (GuardFailed, AgreementError):
        for generator, state in states:
            generator.set_state(state.get_state())
        if python is not None:
            python.restore()
        raise
