"""Attributes of a trainer that forward reads: a step depends on these, and not on all that changes in a trainer.

reads = TrainerReads(trainer)
module._trainer = reads;  module.forward(x)   # which reads self.current_epoch
reads.refreshed()   ->   {"current_epoch": 3}
"""

from __future__ import annotations

from typing import Any


class TrainerReads:
    """Stands for a trainer in a module that is captured.

    It has no attributes but its slots. A captured step depends on the values that were read, and on no private slot.
    """

    __slots__ = ("__names", "__trainer", "_read_values")

    def __init__(self, trainer: Any) -> None:
        self.__trainer = trainer
        self.__names: dict[str, None] = {}
        self._read_values: dict[str, Any] = {}

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # of whoever looks at this object, as the guards do
            raise AttributeError(name)
        if name in self._read_values:
            return self._read_values[name]
        value = getattr(self.__trainer, name)
        self.__names[name] = None
        return value

    def refreshed(self) -> dict[str, Any]:
        """Return the attributes that were read until now, as they are now; later reads get these."""
        self._read_values.clear()
        self._read_values.update((name, getattr(self.__trainer, name)) for name in self.__names)
        return self._read_values
