"""Refuse to go on with a training of which only some parameters were updated.

backward fails at the 4th of 12 updates  ->  model(x), backward and step() raise, until an earlier state is loaded

Loaded is what came through `load_state_dict` of both model and optimizer, as in `memgraph.load_state`: every parameter,
and each in its shape.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

from torch import nn
from torch.utils.hooks import RemovableHandle

from ..errors import FusedError
from ..guards.module_proxy import unwrapped

LOAD = "load an earlier state: memgraph.load_state(path, model, optimizer), or load_state_dict() of model and optimizer"


class PartialUpdateGuard:
    """What a backward that failed has left of a module and its optimizer."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.words = ""
        self.awaited: set[str] = set()  # what has to be loaded yet
        self.names: Collection[str] = ()
        self.handles: list[RemovableHandle] = []
        self.errors: Sequence[str] = ()  # of the load that runs: what did not go into its place
        self.before = 0  # of them, when it came to this module

    def tear(self, updated: int, names: Collection[str]) -> str:
        """From now on nothing goes on; what has happened, and what to do, in words.  `names` are all parameters."""
        self.words = f"{updated} of {len(names)} parameters have been updated, the others have not: {LOAD}"
        self.names, self.awaited = names, {"model", "optimizer"}
        if not self.handles:  # only now: a module that is whole stays as it was given
            module = unwrapped(self.module)
            self.handles = [
                module.register_load_state_dict_pre_hook(_Hook(self._model_loads)),
                module.register_load_state_dict_post_hook(_Hook(self._model_loaded)),
            ]
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
        if not self.awaited:
            for handle in self.handles:
                handle.remove()
            self.handles = []

    def _model_loads(self, *given: Any) -> None:
        self.errors = given[-1]  # the very list that the load fills, and raises at its end
        self.before = len(self.errors)

    def _model_loaded(self, module: nn.Module, keys: Any) -> None:
        failed, self.errors = len(self.errors) > self.before, ()
        if not failed and not any(key == n or key.endswith(f".{n}") for key in keys.missing_keys for n in self.names):
            self.loaded("model")


class _Hook:
    """A hook that a copy of the module does not take along."""

    def __init__(self, told: Callable[..., None]) -> None:
        self.told = told

    def __call__(self, *given: Any) -> None:
        self.told(*given)

    def __reduce__(self) -> Any:
        return _Hook, (_nobody,)


def _nobody(*given: Any) -> None:
    """Whom the hook of a copy tells."""
