"""A state dict in safetensors files, read entry by entry.

model-00001-of-00002.safetensors, model-00002-of-00002.safetensors    ->    {"embed.weight": ..., ...}, read one by one
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from os import PathLike
from typing import Any

from torch import Tensor

from ...errors import StateError


class SafetensorsState(Mapping[str, Tensor]):
    """The tensors of some files by name, while the context is open."""

    def __init__(self, paths: Sequence[str | PathLike[str]]) -> None:
        self._paths = paths
        self._files: dict[str, Any] = {}
        self._open = ExitStack()

    def __enter__(self) -> SafetensorsState:
        """
        Raises:
            StateError: a file can't be read, or two have a tensor of the same name.
        """
        from safetensors import SafetensorError, safe_open

        for path in self._paths:
            try:
                file = self._open.enter_context(safe_open(str(path), "pt"))
            except (OSError, SafetensorError) as error:
                raise StateError(f"{path} can't be read as a safetensors file: {error}; nothing was loaded") from error
            names = list(file.keys())
            if twice := [name for name in names if name in self._files]:
                raise StateError(f"{twice[0]!r} is in {path} and in a file before it; nothing was loaded")
            self._files |= dict.fromkeys(names, file)
        return self

    def __exit__(self, *error: object) -> None:
        self._open.close()

    def __getitem__(self, name: str) -> Tensor:
        tensor: Tensor = self._files[name].get_tensor(name)
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._files)

    def __len__(self) -> int:
        return len(self._files)
