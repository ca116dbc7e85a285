"""A training in a folder of torch.distributed.checkpoint: one way for one process, for shards and for stages.

    TrainingFolder(folder, module, part).save()    ->   model.*, optimizer.*, optimizer_class, random.<rank>.*
    TrainingFolder(folder, module, part).load()    ->   the same training, bit for bit, on any number of ranks

What differs is how a rank has its part of an optimizer's state: an `OptimizerPart`.  Everything is checked on all ranks
before anything is changed.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from ...errors import StateError
from .checkpoint_folder import CheckpointFolder

CLASS = "optimizer_class"  # key of its name; older folders have none
PLAIN = (bool, int, float, str, type(None))
ELSEWHERE = object()  # an entry that only other ranks read


class OptimizerPart(Protocol):
    """The states of an optimizer that this rank saves and loads.

    Attributes:
        kind: the name of its class; empty if this rank has no optimizer, and others have.
        converts: True if it has hooks that may convert the state of another class.
        needed: the beginning of entries that a folder of such a training has.
    """

    @property
    def kind(self) -> str: ...

    @property
    def converts(self) -> bool: ...

    @property
    def needed(self) -> str: ...

    def saved(self) -> dict[str, Any]:
        """Return what this rank writes; all ranks call it."""
        ...

    def room(self, path: Sequence[Any], entry: object) -> object:
        """Return a tensor to read an entry into, None for what is no tensor, or ELSEWHERE."""
        ...

    def checked(self, loaded: Mapping[str, Any], folder: CheckpointFolder) -> Callable[[], None]:
        """Return how to install what was read.

        Raises:
            StateError: it is of another optimizer, on all ranks.
        """
        ...


@dataclass(frozen=True, eq=False)
class TrainingFolder:
    """The training of this rank, and the folder that has it."""

    folder: CheckpointFolder
    module: nn.Module
    optimizer: OptimizerPart | None

    def save(self) -> None:
        """Write this rank's part.

        Raises:
            StateError: it can't be written; says on which rank, and why. The old folder is as it was.
        """
        state: dict[str, Any] = {"model": self.folder.on_all_ranks(lambda: _plain_entries(own_state_dict(self.module)))}
        if self.optimizer is not None and self.optimizer.kind:
            optimizer = self.optimizer.saved()
            self.folder.on_all_ranks(lambda: _refuse_changing(optimizer))
            state |= {"optimizer": optimizer, CLASS: self.optimizer.kind}
        self.folder.save(state | {"random": {str(self.folder.rank): _random_state()}})

    def load(self) -> None:
        """Load this rank's part. A rank that the saved training did not have keeps its random numbers.

        Raises:
            StateError: it can't be read, or is of another model or optimizer. Nothing was changed, unless it says so.
        """
        folder, random = self.folder, str(self.folder.rank)
        metadata = folder.metadata("model." if self.optimizer is None else self.optimizer.needed)
        model = folder.on_all_ranks(lambda: own_state_dict(self.module))
        folder.on_all_ranks(lambda: _refuse_other_model(metadata, self.module.state_dict()))
        state = folder.on_all_ranks(lambda: self._rooms(metadata))
        folder.read(state)
        install = None
        if self.optimizer is not None:
            folder.on_all_ranks(lambda: self._refuse_other_class(state.get(CLASS)))
            install = self.optimizer.checked(state["optimizer"], folder)
        folder.read({"model": model}, late=True)
        if install is not None:
            folder.on_all_ranks(install, late=True)
        is_whole = len(model) == len(self.module.state_dict())
        folder.on_all_ranks(lambda: self.module.load_state_dict(model, **({} if is_whole else {"strict": False})), True)
        if "random" in state:
            _set_random_state(state["random"][random])

    def _rooms(self, metadata: Metadata) -> dict[str, Any]:
        """Return where this rank's entries are read to, but for the model's."""
        tree: dict[Any, Any] = {"optimizer": {}}
        for name, entry in metadata.state_dict_metadata.items():
            top, *path = metadata.planner_data[name]
            if name == CLASS and self.optimizer is not None:
                tree[CLASS] = None
            elif top == "optimizer" and self.optimizer is not None:
                value = self.optimizer.room(path, entry)
                if value is not ELSEWHERE:
                    _put(tree, (top, *path), value)
        if any(key.startswith(f"random.{self.folder.rank}.") for key in metadata.state_dict_metadata):
            tree["random"] = {str(self.folder.rank): _random_state()}
        return {name: _with_lists(each) for name, each in tree.items()}

    def _refuse_other_class(self, saved: str | None) -> None:
        own = "" if self.optimizer is None or self.optimizer.converts else self.optimizer.kind
        if own and saved not in (None, own):
            raise StateError(f"it is {saved}'s, and {own} was given; make the same optimizer; nothing was changed")


def own_state_dict(module: nn.Module) -> dict[str, Any]:
    """Return the entries of the module's state dict that this rank has: the others are on the meta device."""
    state = module.state_dict()
    return {key: value for key, value in state.items() if not (isinstance(value, Tensor) and value.is_meta)}


def _plain_entries(model: dict[str, Any]) -> dict[str, Any]:
    """Refuse entries that a folder would give back otherwise: it takes containers apart, and keys become texts."""
    for name, value in model.items():
        if not isinstance(value, Tensor | bool | int | float | str | None):
            raise StateError(f"{name!r} is a {type(value).__name__}, and a folder has tensors, numbers and texts")
    return model


def _refuse_changing(optimizer: dict[str, Any]) -> None:
    """Refuse a state that would be read otherwise than it is: keys become texts, and empty containers go."""
    flat, paths = flatten_state_dict(optimizer)
    tree: dict[Any, Any] = {}
    for name, path in paths.items():
        _put(tree, path, flat[name])
    read = _with_lists(tree)
    for part in optimizer.keys() & {"state", "options"}:  # by numbers or names of parameters; some have no state
        own = {str(key): value for key, value in optimizer[part].items() if value}
        _refuse_difference(own, read.pop(part, {}), (part,))
    rest = {key: value for key, value in optimizer.items() if key not in ("state", "options")}
    _refuse_difference(rest, read, ())


def _refuse_difference(own: Any, read: Any, path: tuple[Any, ...]) -> None:
    if isinstance(own, Tensor) or (type(own) in PLAIN and type(own) is type(read)):
        return
    if type(own) is dict and isinstance(read, dict) and all(type(key) is str for key in own):
        for key, value in own.items():
            _refuse_difference(value, read.get(key), (*path, key))
    elif type(own) is list and type(read) is list and len(own) == len(read):
        for index, value in enumerate(own):
            _refuse_difference(value, read[index], (*path, index))
    elif isinstance(own, dict | list) or not _can_be_read(own):
        found = f"of {type(own).__name__}" + (f" with the keys {[*own]}" if isinstance(own, dict) else "")
        raise StateError(
            f"{'.'.join(map(str, path))} of the optimizer is an object {found}, which a folder would not give back as "
            "it is: it has tensors, numbers, texts, and lists, tuples and dicts of them whose keys are texts; "
            "memgraph.save_state writes a file with others; nothing was changed"
        )


def _can_be_read(value: object) -> bool:
    """Return True for an entry that is the same when it is read, as nothing is that torch takes for unsafe."""
    written = io.BytesIO()
    try:
        torch.save(value, written)
        written.seek(0)
        return type(torch.load(written, weights_only=True)) is type(value)
    except Exception:  # of any pickle
        return False


def by_number(loaded: Mapping[str, Any]) -> dict[str, Any]:
    """Return a state dict with its states by the numbers of parameters, which are texts in a folder."""
    return {**loaded, "state": {int(number): each for number, each in loaded.get("state", {}).items()}}


def _refuse_other_model(metadata: Metadata, model: Mapping[str, Any]) -> None:
    entries = {name: each for name, each in metadata.state_dict_metadata.items() if name.startswith("model.")}
    saved = {name[6:]: each for name, each in entries.items() if isinstance(each, TensorStorageMetadata)}
    wanted = {name: value for name, value in model.items() if isinstance(value, Tensor)}
    if strange := sorted(set(saved) ^ set(wanted)):
        raise StateError(f"it is of another model: {strange[0]!r} is only in one of them; nothing was changed")
    for name, tensor in wanted.items():
        if torch._debug_has_internal_overlap(tensor) == 1:
            raise StateError(f"{name!r} has elements that share memory, so none can be loaded; nothing was changed")
        size, dtype = saved[name].size, saved[name].properties.dtype
        if (size, dtype) != (tensor.shape, tensor.dtype):
            kinds = f"{dtype}{list(size)} in it and {tensor.dtype}{list(tensor.shape)} in the model"
            raise StateError(f"it is of another model: {name!r} is {kinds}; nothing was changed")


def _put(tree: dict[Any, Any], path: Sequence[Any], value: object) -> None:
    *keys, last = path
    for key in keys:
        tree = tree.setdefault(key, {})
    tree[last] = value


def _with_lists(tree: Any) -> Any:
    if not isinstance(tree, dict):
        return tree
    if tree and all(isinstance(name, int) for name in tree):
        return [_with_lists(tree[name]) for name in sorted(tree)]
    return {name: _with_lists(each) for name, each in tree.items()}


def _random_state() -> dict[str, Tensor]:
    cuda = {"cuda": torch.cuda.get_rng_state()} if torch.cuda.is_available() else {}
    return {"cpu": torch.get_rng_state(), **cuda}


def _set_random_state(state: Mapping[str, Tensor]) -> None:
    torch.set_rng_state(state["cpu"])
    if "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"])
