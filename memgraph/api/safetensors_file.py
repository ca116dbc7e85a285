"""A training state as a safetensors file, which the safetensors library can read.

    {"model": {"fc.weight": w}, "optimizer": {"state": {0: {"exp_avg": m}}, ...}, "random": r}      ->

    fc.weight                             w     under its own name: model.load_state_dict(load_file(path), strict=False)
    memgraph.optimizer.state.0.exp_avg    m     everything else has the prefix "memgraph."
    memgraph.random                       r
    __metadata__: memgraph                the rest as JSON: the nesting, options, numbers
                  memgraph.digests        a checksum of each tensor, and of that JSON

A tensor with two names (tied weights) is written once, under the first.  Mapped tensors pass through the page cache,
and so do copies of tensors that are not contiguous or not on the CPU.  The library reads the file.  It is written here,
because the library writes to a named file first, which stays behind if the process is killed.
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
Path = tuple[object, ...]  # of keys and indices, from the whole state to a part of it


def write(state: Mapping[str, Any], path: Target, folder: Target, check: Callable[[], None] = lambda: None) -> None:
    """Write `state` to `path`; tensors that can't be written as they are get copied to a nameless file in `folder`.

    Args:
        check: is called between tensors, and may raise.

    Raises:
        OSError: the file can't be written.
        SpillError: the disk has no room for the copies.
        TypeError, ValueError: a value is neither a tensor nor can be written as JSON.
    """
    outline = _Outline()
    text = json.dumps(outline.encode(state, ()))
    plain = _plain(outline.tensors, folder)
    tensors = dict(sorted(plain.items(), key=lambda each: -each[1].dtype.itemsize))  # so that all are aligned
    digests = {name: checksum(tensor) for name, tensor in tensors.items()} | {"": zlib.crc32(text.encode())}
    with open(path, "wb") as file:
        file.write(_header(tensors, {"format": "pt", PREFIX: text, DIGESTS: json.dumps(digests)}))
        for tensor in tensors.values():
            check()
            file.write(numbers(tensor))


def read(path: Target) -> Any:
    """Read a state, with its tensors mapped from the file.

    Raises:
        SafetensorError, OSError: it is no complete safetensors file, or can't be read.
        LookupError, TypeError, ValueError: it was not written by `write`.
        StateError: a part of it was damaged since it was written.
    """
    from safetensors import safe_open

    with safe_open(path, framework="pt") as file:
        metadata = file.metadata() or {}
        tensor = cache(file.get_tensor)
        _refuse_damaged(json.loads(metadata.get(DIGESTS, "{}")), metadata[PREFIX], tensor)
        return _state(json.loads(metadata[PREFIX]), tensor)


def _header(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> bytes:
    """Return the bytes before the tensors: the length of the JSON as 8 bytes, and the JSON padded to 8 bytes."""
    ends = list(accumulate((tensor.nbytes for tensor in tensors.values()), initial=0))
    entries = {
        name: {"dtype": DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": ends[i : i + 2]}
        for i, (name, tensor) in enumerate(tensors.items())
    }
    text = json.dumps({"__metadata__": metadata, **entries}).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _refuse_damaged(digests: Mapping[str, int], text: str, tensor: Callable[[str], Tensor]) -> None:
    """Compare a file with its digests; an old file has none.

    Raises:
        StateError: a part differs; names it.
    """
    if digests and digests.get("") != zlib.crc32(text.encode()):
        raise StateError("its outline was damaged since it was written")
    for name, digest in digests.items():
        if name and checksum(tensor(name)) != digest:
            raise StateError(f"{name!r} was damaged since it was written")


class _Outline:
    """A state without its tensors, and the tensors by their names in the file, each once."""

    def __init__(self) -> None:
        self.tensors: dict[str, Tensor] = {}
        self.names: dict[object, str] = {}

    def encode(self, value: Any, path: Path) -> Any:
        """Return a part of a state as JSON: an object stands for a tensor, mapping or tuple, all else for itself."""
        if isinstance(value, Tensor):
            entry = {"tensor": self._name(value, path)}
            return entry if value.is_contiguous() or not is_dense(value) else {**entry, "strides": value.stride()}
        if isinstance(value, Mapping):
            items = [[_key(key), self.encode(part, (*path, key))] for key, part in value.items()]
            versions = getattr(value, "_metadata", None)  # of the modules, which torch reads when it loads
            return {"items": items} if versions is None else {"items": items, "versions": self.encode(versions, path)}
        if isinstance(value, list | tuple):
            parts = [self.encode(part, (*path, i)) for i, part in enumerate(value)]
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
    """Return the same values, each contiguous, on the CPU, and in a storage of its own."""
    owners = dict[int, str]()
    copied = []
    for name, tensor in tensors.items():
        alone = owners.setdefault(tensor.untyped_storage()._cdata, name) == name
        plain = tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()
        if not (alone and plain and tensor.device.type == "cpu"):
            copied.append(tensor)
    metas = [torch.empty_like(tensor, device="meta", memory_format=torch.contiguous_format) for tensor in copied]
    copies = iter(_copies(copied, list(map(tensor_spec_of, metas)), folder))
    ids = set(map(id, copied))
    return {name: next(copies) if id(tensor) in ids else tensor for name, tensor in tensors.items()}


def _copies(tensors: Sequence[Tensor], specs: Sequence[TensorSpec], folder: Target) -> list[Tensor]:
    """Return copies with these layouts, in a nameless file."""
    buffer = MappedBuffer(specs, folder) if specs else None
    return [buffer.tensor(i).copy_(tensor) for i, tensor in enumerate(tensors)] if buffer else []


def _state(encoded: Any, tensor: Callable[[str], Tensor]) -> Any:
    """Return the state behind the JSON of an outline; `tensor` returns one by its name."""
    if isinstance(encoded, list):
        return [_state(part, tensor) for part in encoded]
    if not isinstance(encoded, dict):
        return encoded
    if "tensor" in encoded:
        return _with_strides(tensor(encoded["tensor"]), encoded.get("strides"))
    if "tuple" in encoded:
        return tuple(_state(encoded["tuple"], tensor))
    items = {key: _state(part, tensor) for key, part in encoded["items"]}
    if "versions" not in encoded:
        return items
    state = OrderedDict(items)
    state._metadata = _state(encoded["versions"], tensor)  # type: ignore[attr-defined]
    return state


def _with_strides(tensor: Tensor, strides: Sequence[int] | None) -> Tensor:
    """Return a tensor with the strides that it had in memory, which the file does not keep."""
    if strides is None:
        return tensor
    return _copies([tensor], [TensorSpec(tuple(tensor.shape), tuple(strides), tensor.dtype)], spill_folder())[0]
