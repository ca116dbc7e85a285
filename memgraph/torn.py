"""Refuse to go on with a training of which only some parameters were updated.

backward fails at the 4th of 12 updates  ->  model(x), backward and step() raise, until an earlier state is loaded

Loaded is what came through `load_state_dict` of both model and optimizer, as in `memgraph.load_state`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

from torch import nn
from torch.utils.hooks import RemovableHandle

from .errors import FusedError

LOAD = "load an earlier state: memgraph.load_state(path, model, optimizer), or load_state_dict() of model and optimizer"


class Torn:
    """What a backward that failed has left of a module and its optimizer."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.words = ""
        self.awaited: set[str] = set()  # what has to be loaded yet
        self.names: Collection[str] = ()
        self.handle: RemovableHandle | None = None

    def tear(self, updated: int, names: Collection[str]) -> str:
        """From now on nothing goes on; what has happened, and what to do, in words.  `names` are all parameters."""
        self.words = f"{updated} of {len(names)} parameters have been updated, the others have not: {LOAD}"
        self.names, self.awaited = names, {"model", "optimizer"}
        if self.handle is None:  # only now: a module that is whole stays as it was given
            self.handle = self.module.register_load_state_dict_post_hook(_Watch(self._model_loaded))
        return self.words

    def check(self) -> None:
        """
        Raises:
            FusedError: a backward has failed, and nothing was loaded since.
        """
        if self.awaited:
            raise FusedError(f"an earlier backward did not end, and {self.words}")

    def loaded(self, what: str) -> None:
        """The model or the optimizer has an earlier state again."""
        self.awaited.discard(what)
        if not self.awaited and self.handle is not None:
            self.handle.remove()
            self.handle = None

    def _model_loaded(self, missing: Collection[str]) -> None:
        if not any(key == name or key.endswith(f".{name}") for key in missing for name in self.names):
            self.loaded("model")


class _Watch:
    """A hook that a copy of the module does not take along."""

    def __init__(self, told: Callable[[Collection[str]], None]) -> None:
        self.told = told

    def __call__(self, module: nn.Module, keys: Any) -> None:
        self.told(keys.missing_keys)

    def __reduce__(self) -> Any:
        return _Watch, (_nobody,)


def _nobody(missing: Collection[str]) -> None:
    """Whom the watch of a copy tells."""
