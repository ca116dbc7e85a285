"""Facts of a call in words: for `plan.assumptions`, and for why a call is captured again.

(ARGUMENTS, 0)       ->   x: float32 8 x 128 on cpu
(ATTRIBUTES, 914)    ->   layers.0.dropout.p: 0.1
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, TypeGuard

import torch
from torch import Tensor, nn

from .assumptions import ANY, ARGUMENTS, ATTRIBUTES, MODES, TENSORS, Assumptions, Facts, Layout, Place, TensorFact
from .attribute_guard import AttributeGuard
from .module_attributes import CONSTANTS

KINDS = ("argument", "tensor", "mode", "attribute", "variable")
MODE_NAMES = (
    "a process group is initialized", "autocast", "the cache of autocast", "grad mode", "the default dtype",
    "the default device", "global module hooks", "settings of kernels", "other settings of torch",
    "what the optimizer's step depends on", "the outputs that backward starts from",
)  # fmt: skip


class FactText(NamedTuple):
    """One fact: whether it is of an argument, a tensor, ...; what has it, and what it is."""

    kind: str
    where: str
    text: str


@dataclass(frozen=True, eq=False)
class FactTexts:
    """The words for the facts of one module's latest call, whose arguments have these names."""

    module: nn.Module
    attributes: AttributeGuard
    arguments: Sequence[str]

    @cached_property
    def _owned(self) -> list[str]:
        """Return the names of parameters, then of buffers, in the order of their facts."""
        return [name for name, _ in (*self.module.named_parameters(), *self.module.named_buffers())]

    def assumed(self, assumptions: Assumptions) -> Iterator[FactText]:
        """Yield what a capture assumes, but for objects: their attributes are told of."""
        for group, tokens in enumerate(assumptions.facts):
            for index, token in enumerate(tokens):
                if group in (ARGUMENTS, TENSORS, MODES) or _is_constant(token):
                    text = token_text(token)
                    if text and not (group == TENSORS and token is False) and (where := self.label((group, index))):
                        yield FactText(KINDS[min(group, len(KINDS) - 1)], where, text)

    def differences(self, assumptions: Assumptions, facts: Facts) -> dict[str, str]:
        """Return in what a call differs from what a capture assumes: a text for each thing."""
        texts: dict[str, str] = {}
        for group, index in assumptions.differing(facts):
            if index < 0 and group >= ATTRIBUTES:  # behind the first that differs there are more, or fewer
                pairs = enumerate(zip(facts[group], assumptions.facts[group], strict=False))
                index = next((i for i, (now, then) in pairs if now is not then and now != then), -1)
            now, then = (token_text(each[group][index]) if index >= 0 else "" for each in (facts, assumptions.facts))
            where = self.label((group, index))
            if where not in texts:
                texts[where] = f"{where} is {now}, and was {then}" if now and then else f"{where} has changed"
        return {where: text for where, text in texts.items() if where}

    def label(self, place: Place) -> str:
        """Return what has a fact."""
        group, index = place
        if group == ARGUMENTS:
            return self.arguments[index] if 0 <= index < len(self.arguments) else "the structure of the arguments"
        if group == TENSORS:
            names = self._owned
            return names[index % len(names)] if names and index >= 0 else "the number of parameters and buffers"
        if group == MODES:
            return MODE_NAMES[index] if 0 <= index < len(MODE_NAMES) else "a mode of torch"
        return self.attributes.label(place) if index >= 0 else KINDS[min(group - ATTRIBUTES, 1) + 3]


def token_text(token: Hashable) -> str:
    """Return a fact's value; empty for what has none that can be read, as an object that counts by identity."""
    if isinstance(token, Layout | TensorFact):
        layout = token if isinstance(token, Layout) else token.layout
        text = f"{str(layout.dtype).removeprefix('torch.')} {' x '.join(map(str, layout.shape)) or 'scalar'}"
        text += f" on {layout.device}{', requires grad' if layout.requires_grad else ''}"
        if isinstance(token, TensorFact):
            text += (
                f"{'' if token.is_leaf else ', no leaf'}{'' if token.kind is Tensor else f', {token.kind.__name__}'}"
            )
        return text
    if _is_constant(token):
        kind, value = token
        if value == ANY and kind in (int, float):
            return f"any {kind.__name__}"
        return str(value) if kind in (float, complex) else repr(value)
    return str(token) if isinstance(token, bool | torch.dtype | torch.device) else ""


def _is_constant(token: Hashable) -> TypeGuard[tuple[type, Any]]:
    return isinstance(token, tuple) and len(token) == 2 and isinstance(token[0], type) and token[0] in CONSTANTS
