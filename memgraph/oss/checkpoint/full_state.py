"""The state that the plain optimizer would have, on the ranks that ask for it.

    rank 0: exp_avg of w[0:6]     rank 1: exp_avg of w[6:7], of b, of v
    ->  {0: {"step": 1.0, "exp_avg": f32[7]}, 1: ..., 2: ...} on rank 0, in host memory

Tensor after tensor goes to the recipient, from whoever has it; what else there is goes before, as text.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from passes.shards import Piece

from ...errors import StateError
from ...tensors.layout import flat
from ..comm.texts import texts
from ..shards.shard_views import in_order_of
from .courier import TensorSender
from .reshard import Key, key
from .state_outline import Kind, Outline, fill_outline, kinds, outline, tensors

if TYPE_CHECKING:
    from .state_dict import StateDictMixin

Entries = Mapping[str, Any]  # the state of a parameter, or of a piece of one


def gather_state(oss: StateDictMixin, to: int | None) -> dict[int, Entries] | None:
    """The state of each parameter that has one, by its place; a collective.

    Returns:
        copies, on the rank `to`, or on all if that is None; None on the others

    Raises:
        StateError: something in the state can't be sent.
    """
    held = own_entries(oss)
    told = outlines(oss, held)
    courier = TensorSender(oss.watchdog, to)
    state: dict[int, Entries] = {}
    for item, pieces in enumerate(places(oss)):
        if any(key(piece) in told for piece in pieces):
            state[item] = _Gathering(oss, courier, held, told, item, pieces).entries()
    return state if courier.is_recipient else None


def cut_state(oss: StateDictMixin, state: Mapping[int, Entries]) -> dict[Key, Entries]:
    """What this rank's pieces have of the state of whole parameters: copies."""
    found: dict[Key, Entries] = {}
    for item, pieces in enumerate(places(oss)):
        for piece in pieces:
            if item in state and piece.rank == oss.watchdog.group.rank():
                parameter = oss.layout.parameters[item]
                alone = len(pieces) == 1
                entries = {
                    name: _strided(value) if oss.splits_parameters else value for name, value in state[item].items()
                }
                found[key(piece)] = {
                    name: copied(value) if alone else _part(value, parameter, piece) for name, value in entries.items()
                }
    return found


def _strided(value: Any) -> Any:
    """What sparse gradients have left, as it is where they are made dense."""
    return value.to_dense() if isinstance(value, Tensor) and value.is_sparse else value


def own_entries(oss: StateDictMixin) -> dict[Key, Entries]:
    """The state of each of this rank's pieces that has one."""
    state = oss.inner.state
    return {key(piece): state[view] for laid in oss.layout.buckets for piece, view in laid.own if view in state}


def outlines(oss: StateDictMixin, held: Mapping[Key, Entries]) -> dict[Key, Outline]:
    """What all ranks hold of which pieces; a collective.

    Raises:
        StateError: the state of some rank is half of a step, or can't be sent; on all ranks.
    """
    words = json.dumps(_own_outlines(oss, held)).encode()
    found = list(map(json.loads, texts(oss.watchdog, words, "exchange of what there is of the state")))
    for rank, (trouble, _) in zip(oss.watchdog.members, found, strict=True):
        if trouble:
            raise StateError(f"rank {rank} has no state to save: {trouble}")
    return {(item, begin): given for _, entries in found for item, begin, given in entries}


def _own_outlines(oss: StateDictMixin, held: Mapping[Key, Entries]) -> tuple[str, list[Any]]:
    """What is in the way, and what this rank holds."""
    if oss.sharded_step.is_half_updated or oss.sharded_step.is_half_done:
        return "a step has failed when some parameters were updated; start again from the last checkpoint", []
    try:
        return "", [[*at, outline(entries, f"parameter {at[0]}")] for at, entries in held.items()]
    except StateError as error:
        return str(error), []


def places(oss: StateDictMixin) -> list[list[Piece]]:
    """The pieces of each parameter, in order."""
    found: list[list[Piece]] = [[] for _ in oss.layout.parameters]
    for laid in oss.layout.buckets:
        for piece in laid.bucket.pieces:
            found[piece.item].append(piece)
    return [sorted(pieces, key=lambda piece: piece.begin) for pieces in found]


def is_elementwise(given: Outline, piece: Piece) -> bool:
    """Whether an entry of a piece that is not the whole parameter has an element for each of its own."""
    return any(kind.shape == (piece.count,) for kind in kinds(given)) and "tensor" in given


class _Gathering:
    """The state of one parameter on its way."""

    def __init__(
        self,
        oss: StateDictMixin,
        courier: TensorSender,
        held: Mapping[Key, Entries],
        told: Mapping[Key, Outline],
        item: int,
        pieces: Sequence[Piece],
    ) -> None:
        self.courier, self.held, self.told, self.pieces = courier, held, told, pieces
        self.parameter = oss.layout.parameters[item]
        self.name = f"gathering of the state of parameter {item}"

    def entries(self) -> Entries:
        """A copy of it on a recipient; elsewhere nothing of use."""
        given = self.told.get(key(self.pieces[0]))
        if given is None or any(key(piece) not in self.told for piece in self.pieces):
            raise StateError(f"the {self.name} failed: some of its elements have a state and some have none")
        return {name: self._entry(name, each) for name, each in given["dict"]}

    def _entry(self, name: str, given: Outline) -> Any:
        if len(self.pieces) > 1 and is_elementwise(given, self.pieces[0]):
            return self._joined(name, next(kinds(given)))
        first = self.pieces[0]
        mine = list(tensors(self.held[key(first)][name])) if key(first) in self.held else []
        found: list[Tensor] = []
        for place, kind in enumerate(kinds(given)):
            target = kind.empty() if self.courier.is_recipient else None
            self.courier.bring(first.rank, mine[place] if mine else None, target, self.name)
            found.append(torch.empty(0) if target is None else target)
        return fill_outline(given, iter(found))

    def _joined(self, name: str, kind: Kind) -> Tensor:
        whole = None
        if self.courier.is_recipient:
            whole = torch.empty_like(self.parameter, dtype=kind.dtype, device="cpu", requires_grad=False)
        for piece in self.pieces:
            source = self.held[key(piece)][name] if key(piece) in self.held else None
            target = None if whole is None else flat(whole)[piece.begin : piece.end]
            self.courier.bring(piece.rank, source, target, self.name)
        return torch.empty(0) if whole is None else whole


def _part(value: Any, parameter: Tensor, piece: Piece) -> Any:
    """What a piece has of an entry of its parameter."""
    if isinstance(value, Tensor) and value.shape == parameter.shape:
        return in_order_of(value, parameter)[piece.begin : piece.end].clone()
    return copied(value)


def copied(value: Any) -> Any:
    """A value with copies of the tensors in it."""
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        return {name: copied(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(copied(each) for each in value)
    return value
