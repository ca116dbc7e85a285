"""The caller's optimizer class, which steps on this rank's shards."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, optim

from ...optim.elementwise import is_elementwise
from ...optim.step_on import step_on
from ...optim.update_unit import shared_change
from .layout import ShardLayout
from .param_groups import Group, options, template


class ShardOptimizer:
    """An optimizer of the caller's class. `splits`: it updates each element alone, so parameters may be cut anywhere;
    `needs_closure`: it evaluates its closure several times in a step (LBFGS)."""

    def __init__(self, kind: type[optim.Optimizer], kwargs: dict[str, Any], groups: Sequence[Group]) -> None:
        self.kind, self.kwargs = kind, kwargs
        plain = template(kind, groups, kwargs)
        self.defaults = dict(plain.defaults)
        # A step that changes more than the states of its parameters has to run once for all of them.
        self.splits = is_elementwise(plain) and not shared_change(plain)
        self.needs_closure = issubclass(kind, optim.LBFGS)
        self.optimizer: Any = None

    @property
    def name(self) -> str:
        return self.kind.__name__

    @property
    def is_fresh(self) -> bool:
        """Return True before the first step, even if the class has created states already."""
        states = [state for state in self.optimizer.state.values() if state]
        return all("step" in state and float(state["step"]) == 0 for state in states)

    def try_groups(self, groups: Sequence[Group]) -> None:
        """Raise the errors that the class raises for these groups."""
        template(self.kind, groups, self.kwargs)

    def create(self, layout: ShardLayout, groups: Sequence[Group]) -> None:
        inner = [{**options(group), "params": layout.group_views(i)} for i, group in enumerate(groups)]
        self.optimizer = self.kind(inner, **self.kwargs)

    def add_group(self, layout: ShardLayout, index: int, group: Group) -> None:
        inner = {**options(group), "params": layout.group_views(index)}
        self.optimizer.add_param_group(dict(inner))
        # Adagrad creates states in its constructor only.
        self.optimizer.state.update(self.kind([inner], **self.kwargs).state)

    def replace_views(self, layout: ShardLayout, renewed: Sequence[tuple[Tensor, Tensor]]) -> None:
        state = self.optimizer.state
        for old, new in renewed:
            if old in state:
                state[new] = state.pop(old)
        if renewed:
            for i, group in enumerate(self.optimizer.param_groups):
                group["params"][:] = layout.group_views(i)  # in place: LBFGS keeps this list

    def step(self, groups: list[Group], kwargs: Group) -> None:
        step_on(self.optimizer, groups, **kwargs)
