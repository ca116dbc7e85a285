"""The states of a stage's optimizer in a checkpoint folder, by the names of parameters.

StagePart(parameters, optimizer).saved()
    ->   {"state": {"head.weight": {"exp_avg": ...}}, "options": {"head.weight": {"lr": ...}}}

Any number of stages loads them: each reads the entries of its own parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn, optim
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from ...errors import StateError
from ...optim.validate_state import class_name
from ...oss import OSS
from ...oss.checkpoint.checkpoint_folder import CheckpointFolder
from ...oss.checkpoint.training_folder import ELSEWHERE, TrainingFolder
from ..ranks.stage_group import StageGroup

Named = Mapping[str, nn.Parameter]


def stage_folder(
    path: Path, what: str, group: StageGroup, module: nn.Module, parameters: Named, optimizer: optim.Optimizer | None
) -> TrainingFolder:
    """Return the training of this rank, once all ranks have given the same folder.

    Raises:
        StateError: the optimizer is sharded.
        AgreementError: ranks give different folders.
    """
    group.check_agreement([f"the folder: {path}"])
    folder = CheckpointFolder(path, f"{what} {path}", group.watchdog)
    return TrainingFolder(folder, module, StagePart(parameters, optimizer if parameters else None))


class StagePart:
    """The states of the parameters of one rank; `parameters` are those of its optimizer, None if it has none."""

    needed, converts = "model.", False

    def __init__(self, parameters: Named, optimizer: optim.Optimizer | None) -> None:
        if isinstance(optimizer, OSS):
            raise StateError(
                "a pipeline's checkpoint does not hold the states of a sharded optimizer: save pipe.full_state_dict(), "
                "and pipe.optimizer.state_dict() of each stage, after pipe.optimizer.consolidate_state_dict()"
            )
        self.parameters, self.optimizer = parameters, optimizer
        self.kind = "" if optimizer is None else class_name(type(optimizer))

    def saved(self) -> dict[str, Any]:
        assert self.optimizer is not None
        names = {id(parameter): name for name, parameter in self.parameters.items()}
        states = {names[id(parameter)]: dict(state) for parameter, state in self.optimizer.state.items()}
        options = {
            names[id(parameter)]: {key: value for key, value in group.items() if key != "params"}
            for group in self.optimizer.param_groups
            for parameter in group["params"]
        }
        return {"state": states, "options": options}

    def room(self, path: Sequence[Any], entry: object) -> object:
        if self.optimizer is None or path[1] not in self.parameters:
            return ELSEWHERE
        if not isinstance(entry, TensorStorageMetadata):
            return None
        return torch.empty(entry.size, dtype=entry.properties.dtype)

    def checked(self, loaded: Mapping[str, Any], folder: CheckpointFolder) -> Callable[[], None]:
        given = folder.on_all_ranks(lambda: self._given(loaded))

        def install() -> None:
            if self.optimizer is not None:
                self.optimizer.load_state_dict(given)

        return install

    def _given(self, loaded: Mapping[str, Any]) -> dict[str, Any]:
        """Return a state dict for this rank's optimizer.

        Raises:
            StateError: the saved optimizer had other parameters, or other groups of them.
        """
        options_of, states_of = loaded.get("options", {}), loaded.get("state", {})
        names = {id(parameter): name for name, parameter in self.parameters.items()}
        states: dict[int, Any] = {}
        groups = []
        for group in self.optimizer.param_groups if self.optimizer else ():
            each = [names[id(parameter)] for parameter in group["params"]]
            if missing := [name for name in each if name not in options_of]:
                raise StateError(f"{missing[0]!r} was not trained there; nothing was changed")
            options = options_of[each[0]]
            if other := [name for name in each if options_of[name] != options]:
                raise StateError(f"{each[0]!r} and {other[0]!r} have other options there; nothing was changed")
            numbers = range(len(states), len(states) + len(each))
            states |= {i: states_of.get(name, {}) for i, name in zip(numbers, each, strict=True)}
            groups.append({**options, "params": list(numbers)})
        return {"state": {i: state for i, state in states.items() if state}, "param_groups": groups}
