"""Reads and writes of the state of torch's own generator, as ops of a step.

    state = torch.get_rng_state()    ->   memgraph_host::generator_state(device)
    torch.set_rng_state(state)       ->   memgraph_host::set_generator(state, device)

Each run of a step does both where its Python does.  Alone, where it is priced, an op sets nothing.
"""

from __future__ import annotations

import torch
from torch import Tensor, fx

from ..define_op import define_op
from ..ops import get_state, is_in_step, set_state, state_nbytes


def device_of_state(node: fx.Node) -> str:
    """Return the device of the generator whose state a node reads or sets; empty for other nodes."""
    return str(node.args[-1]) if node.target in (GENERATOR_STATE, SET_GENERATOR) else ""


def _set(state: Tensor, device: torch.device) -> Tensor:
    if is_in_step():
        set_state(state, device)
    return state.new_empty(0)


def _fake_state(device: torch.device) -> Tensor:
    return torch.empty(state_nbytes(device), dtype=torch.uint8)


def _fake_set(state: Tensor, device: torch.device) -> Tensor:
    return state.new_empty(0)


# As if they drew: they keep their places among the draws.
_TAGS = (torch.Tag.nondeterministic_seeded,)
_library = torch.library.Library("memgraph_host", "FRAGMENT")
GENERATOR_STATE = define_op(_library, "generator_state(Device device) -> Tensor", get_state, _fake_state, _TAGS)
SET_GENERATOR = define_op(_library, "set_generator(Tensor state, Device device) -> Tensor", _set, _fake_set, _TAGS)
