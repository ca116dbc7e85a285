"""Save a pipeline's training to a folder, and load it with any number of stages.

pipe.save_sharded("run/1000")    # on all ranks: each writes its part
pipe.load_sharded("run/1000")    # on any number of ranks; training goes on bit for bit

model.head.weight, optimizer.state.head.weight.exp_avg, optimizer.options.head.weight    # names in the checkpoint
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn, optim
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from ...errors import StateError
from ...optim.validate_state import class_name
from ...oss import OSS
from ...oss.checkpoint.checkpoint_folder import CheckpointFolder
from ...oss.sharded_checkpoint import CLASS, Target, put, random_state, refuse_other_model, set_random_state
from ..ranks.stage_group import StageGroup
from .stage_state_dict import own_state_dict

Named = Mapping[str, nn.Parameter]


@dataclass(frozen=True, eq=False)
class StageCheckpoint:
    """The part of a training that one rank has.

    Attributes:
        parameters: those of its optimizer.
    """

    group: StageGroup
    module: nn.Module
    parameters: Named
    optimizer: optim.Optimizer | None

    def __post_init__(self) -> None:
        if isinstance(self.optimizer, OSS):
            raise StateError(
                "a pipeline's checkpoint does not hold the states of a sharded optimizer: save pipe.full_state_dict(), "
                "and pipe.optimizer.state_dict() of each stage, after pipe.optimizer.consolidate_state_dict()"
            )

    def save(self, folder: Target) -> None:
        """Write this rank's part.

        Raises:
            StateError: it can't be written; says on which rank, and why. The old folder is as it was.
            AgreementError: ranks give different folders.
            CollectiveError: a rank is gone.
        """
        saved = self._folder(folder, "saving of")
        state: dict[str, Any] = {"model": own_state_dict(self.module), "random": {str(self.group.rank): random_state()}}
        if self.optimizer is not None:
            state |= {"optimizer": self._optimizer_state(), CLASS: class_name(type(self.optimizer))}
        saved.save(state)

    def load(self, folder: Target) -> None:
        """Load this rank's part. A rank that the saved training did not have keeps its random numbers.

        Raises:
            StateError: it can't be read, or is of another model or optimizer. Nothing was changed, unless it says so.
            AgreementError: ranks give different folders.
            CollectiveError: a rank is gone.
        """
        saved = self._folder(folder, "loading of")
        metadata = saved.metadata("model.")
        model = own_state_dict(self.module)
        saved.on_all_ranks(lambda: refuse_other_model(metadata, self.module.state_dict()))
        state = saved.on_all_ranks(lambda: self._allocated(metadata))
        saved.read(state)
        given = saved.on_all_ranks(lambda: self._given(state))
        saved.read({"model": model}, late=True)
        if self.optimizer is not None and given is not None:
            self.optimizer.load_state_dict(given)
        if "random" in state:
            set_random_state(state["random"][str(self.group.rank)])

    def _folder(self, folder: Target, what: str) -> CheckpointFolder:
        path = Path(folder).absolute()
        self.group.check_agreement([f"the folder: {path}"])
        return CheckpointFolder(path, f"{what} {path}", self.group.watchdog)

    def _optimizer_state(self) -> dict[str, Any]:
        """Return states and options by the names of parameters."""
        assert self.optimizer is not None
        names = {id(parameter): name for name, parameter in self.parameters.items()}
        states = {names[id(parameter)]: dict(state) for parameter, state in self.optimizer.state.items()}
        options = {
            names[id(parameter)]: {key: value for key, value in group.items() if key != "params"}
            for group in self.optimizer.param_groups
            for parameter in group["params"]
        }
        return {"state": states, "options": options}

    def _allocated(self, metadata: Metadata) -> dict[str, Any]:
        """Return the entries that this rank reads, but for the model's."""
        tree: dict[Any, Any] = {}
        for name, entry in metadata.state_dict_metadata.items():
            top, *path = metadata.planner_data[name]
            is_own = top == "optimizer" and self.optimizer is not None and path[1] in self.parameters
            if is_own or name == CLASS:
                put(tree, (top, *path), _empty(entry) if isinstance(entry, TensorStorageMetadata) else None)
        if any(key.startswith(f"random.{self.group.rank}.") for key in metadata.state_dict_metadata):
            tree["random"] = {str(self.group.rank): random_state()}
        return tree

    def _given(self, loaded: Mapping[str, Any]) -> dict[str, Any] | None:
        """Return a state dict for this rank's optimizer.

        Raises:
            StateError: the saved optimizer was of another class, had other parameters, or other groups of them.
        """
        if self.optimizer is None:
            return None
        own, saved = class_name(type(self.optimizer)), loaded.get(CLASS)
        if saved != own:
            raise StateError(f"it is of {saved or 'no optimizer'}, and the pipeline has {own}; nothing was changed")
        known, names = loaded["optimizer"], {id(parameter): name for name, parameter in self.parameters.items()}
        states: dict[int, Any] = {}
        groups = []
        for group in self.optimizer.param_groups:
            each = [names[id(parameter)] for parameter in group["params"]]
            if missing := [name for name in each if name not in known["options"]]:
                raise StateError(f"{missing[0]!r} was not trained there; nothing was changed")
            options = known["options"][each[0]]
            if other := [name for name in each if known["options"][name] != options]:
                raise StateError(f"{each[0]!r} and {other[0]!r} have other options there; nothing was changed")
            numbers = range(len(states), len(states) + len(each))
            states |= {i: known.get("state", {}).get(name, {}) for i, name in zip(numbers, each, strict=True)}
            groups.append({**options, "params": list(numbers)})
        return {"state": {i: state for i, state in states.items() if state}, "param_groups": groups}


def _empty(entry: TensorStorageMetadata) -> Tensor:
    return torch.empty(entry.size, dtype=entry.properties.dtype)
