"""A training state as a safetensors file, which anybody can read who has that library.

    {"model": {"fc.weight": w}, "optimizer": {"state": {0: {"exp_avg": m}}, ...}, "random": r}      ->

    fc.weight                             w     under its own name: model.load_state_dict(load_file(path), strict=False)
    memgraph.optimizer.state.0.exp_avg    m     beside the model's, behind "memgraph."
    memgraph.random                       r
    __metadata__: memgraph                the rest as JSON: what is nested where, options, numbers
                  memgraph.api.checksums        a checksum of each tensor, and of that JSON

A tensor with two names (tied weights) is written once, under the first. What lies on disk passes through the page
cache, and so does a copy of what is not contiguous or not on the CPU. The library reads the file; it is written here,
because the library would write to a file with a name first, which a process that is killed leaves behind.
"""

from __future__ import annotations

import json
import os
import zlib
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from itertools import accumulate
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from ..errors import StateError
from ..storage.mapped_storage import MappedBuffer, TensorSpec, tensor_spec_of
from ..storage.spill_file import spill_folder
from ..tensors.layout import is_dense
from .checksums import checksum, numbers

PREFIX, MODEL = "memgraph", "model"
DIGESTS = f"{PREFIX}.digests"
DTYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8",
    torch.uint64: "U64", torch.uint32: "U32", torch.uint16: "U16", torch.uint8: "U8",
    torch.bool: "BOOL", torch.complex64: "C64", torch.float8_e8m0fnu: "F8_E8M0",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e4m3fnuz: "F8_E4M3FNUZ",
    torch.float8_e5m2: "F8_E5M2", torch.float8_e5m2fnuz: "F8_E5M2FNUZ",
}  # fmt: skip
Target = str | os.PathLike[str]
Path = tuple[object, ...]  # of keys and places, from the whole state to a part of it


def write(state: Mapping[str, Any], path: Target, folder: Target, check: Callable[[], None] = lambda: None) -> None:
    """Write `state` to `path`; copies of what can't be written as it is go through a nameless file in `folder`.

    Args:
        check: is called between tensors, and may raise.

    Raises:
        OSError: the disk does not take it.
        SpillError: nor the copies.
        TypeError, ValueError: there is something in it that neither is a tensor nor can be written as JSON.
    """
    book = _Book()
    text = json.dumps(book.written(state, ()))
    tensors = dict(sorted(_plain(book.tensors, folder).items(), key=lambda each: -each[1].dtype.itemsize))  # aligned
    digests = {name: checksum(tensor) for name, tensor in tensors.items()} | {"": zlib.crc32(text.encode())}
    with open(path, "wb") as file:
        file.write(_header(tensors, {"format": "pt", PREFIX: text, DIGESTS: json.dumps(digests)}))
        for tensor in tensors.values():
            check()
            file.write(numbers(tensor))


def read(path: Target) -> Any:
    """What was written, its tensors mapped from the file.

    Raises:
        SafetensorError, OSError: it is no whole safetensors file, or can't be read.
        LookupError, TypeError, ValueError: it is one that was not written here.
        StateError: something in it was damaged since it was written.
    """
    with safe_open(path, framework="pt") as file:
        metadata = file.metadata() or {}
        tensor = cache(file.get_tensor)
        _refuse_damaged(json.loads(metadata.get(DIGESTS, "{}")), metadata[PREFIX], tensor)
        return _state(json.loads(metadata[PREFIX]), tensor)


def _header(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> bytes:
    """What stands before the tensors: the bytes that follow as a number, and JSON that ends 8 bytes further."""
    ends = list(accumulate((tensor.nbytes for tensor in tensors.values()), initial=0))
    entries = {
        name: {"dtype": DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": ends[i : i + 2]}
        for i, (name, tensor) in enumerate(tensors.items())
    }
    text = json.dumps({"__metadata__": metadata, **entries}).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _refuse_damaged(digests: Mapping[str, int], text: str, tensor: Callable[[str], Tensor]) -> None:
    """Compare with what was noted when the file was written; an older one has no digests.

    Raises:
        StateError: something is another; says what.
    """
    if digests and digests.get("") != zlib.crc32(text.encode()):
        raise StateError("its outline was damaged since it was written")
    for name, digest in digests.items():
        if name and checksum(tensor(name)) != digest:
            raise StateError(f"{name!r} was damaged since it was written")


class _Book:
    """The tensors of a state by their names in the file, each once."""

    def __init__(self) -> None:
        self.tensors: dict[str, Tensor] = {}
        self.names: dict[object, str] = {}

    def written(self, value: Any, path: Path) -> Any:
        """A part of a state in JSON's words: an object there says what it stands for, and all else is itself."""
        if isinstance(value, Tensor):
            found = {"tensor": self._name(value, path)}
            return found if value.is_contiguous() or not is_dense(value) else {**found, "strides": value.stride()}
        if isinstance(value, Mapping):
            items = [[_key(key), self.written(part, (*path, key))] for key, part in value.items()]
            versions = getattr(value, "_metadata", None)  # of the modules, for which torch asks when it loads
            return {"items": items} if versions is None else {"items": items, "versions": self.written(versions, path)}
        if isinstance(value, list | tuple):
            parts = [self.written(part, (*path, i)) for i, part in enumerate(value)]
            return parts if isinstance(value, list) else {"tuple": parts}
        return value

    def _name(self, tensor: Tensor, path: Path) -> str:
        if tensor.layout != torch.strided:
            raise ValueError(f"{'.'.join(map(str, path))} is {tensor.layout}")
        if tensor.dtype not in DTYPES:
            raise ValueError(f"{'.'.join(map(str, path))} is {tensor.dtype}")
        same = (tensor.device, tensor.data_ptr(), tensor_spec_of(tensor)) if tensor.nbytes else path
        if same not in self.names:
            name = ".".join(map(str, path[1:] if path[0] == MODEL else (PREFIX, *path)))
            while name in self.tensors:
                name += "_"
            self.names[same], self.tensors[name] = name, tensor.detach()
        return self.names[same]


def _key(key: object) -> object:
    if not isinstance(key, str | int):
        raise TypeError(f"the key {key!r} is a {type(key).__name__}")
    return key


def _plain(tensors: Mapping[str, Tensor], folder: Target) -> dict[str, Tensor]:
    """The same values, each contiguous, on the CPU, and in a storage of its own."""
    owners = dict[int, str]()
    strange = []
    for name, tensor in tensors.items():
        alone = owners.setdefault(tensor.untyped_storage()._cdata, name) == name
        plain = tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()
        if not (alone and plain and tensor.device.type == "cpu"):
            strange.append(tensor)
    wanted = [torch.empty_like(tensor, device="meta", memory_format=torch.contiguous_format) for tensor in strange]
    copies = iter(_copies(strange, list(map(tensor_spec_of, wanted)), folder))
    remaining = set(map(id, strange))
    return {name: next(copies) if id(tensor) in remaining else tensor for name, tensor in tensors.items()}


def _copies(tensors: Sequence[Tensor], forms: Sequence[TensorSpec], folder: Target) -> list[Tensor]:
    """Copies that lie as the forms say, in a nameless file."""
    home = MappedBuffer(forms, folder) if forms else None
    return [home.tensor(i).copy_(tensor) for i, tensor in enumerate(tensors)] if home else []


def _state(found: Any, named: Callable[[str], Tensor]) -> Any:
    """What was written in JSON's words."""
    if isinstance(found, list):
        return [_state(part, named) for part in found]
    if not isinstance(found, dict):
        return found
    if "tensor" in found:
        return _laid(named(found["tensor"]), found.get("strides"))
    if "tuple" in found:
        return tuple(_state(found["tuple"], named))
    items = {key: _state(part, named) for key, part in found["items"]}
    if "versions" not in found:
        return items
    state = OrderedDict(items)
    state._metadata = _state(found["versions"], named)  # type: ignore[attr-defined]
    return state


def _laid(tensor: Tensor, strides: Sequence[int] | None) -> Tensor:
    """As it lay in memory, which the file does not show."""
    if strides is None:
        return tensor
    return _copies([tensor], [TensorSpec(tuple(tensor.shape), tuple(strides), tensor.dtype)], spill_folder())[0]
