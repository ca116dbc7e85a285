"""Read torch's memory snapshot, a pickle, without running any code in it.

    torch.cuda.memory._record_memory_history(); ...; torch.cuda.memory._dump_snapshot("snapshot.pickle")
    read_snapshot(bytes)   ->   (DeviceHistory(0, segments=(...), events=(alloc 16777216 bytes at net.py:7, ...)), ...)

A pickle may call any function.  This reader admits containers, numbers and strings, as torch writes them.
The structure is documented at `torch.cuda.memory._snapshot`.
"""

from __future__ import annotations

import io
import pickle
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from ..errors import SnapshotError

WRITTEN = 'give a file that torch.cuda.memory._dump_snapshot("snapshot.pickle") wrote'
TORCH = ("/torch/", "/memgraph/", "/triton/", "/passes/")  # folders whose frames are not the user's


@dataclass(frozen=True, slots=True)
class Block:
    """A piece of a segment.

    Attributes:
        size: bytes that it takes. requested: bytes that were asked for.
        is_active: it is allocated, or waits for another stream to finish.
        where: source line of the user that allocated it; empty if that was not recorded.
    """

    address: int
    size: int
    requested: int
    is_active: bool
    where: str


@dataclass(frozen=True, slots=True)
class Segment:
    """Memory that the allocator holds of the device, in blocks."""

    size: int
    blocks: tuple[Block, ...]


@dataclass(frozen=True, slots=True)
class Event:
    """An action of the allocator: "alloc", "free_requested", "free_completed", "segment_alloc", "oom", ...

    Attributes:
        free: bytes that the device had left, if the action is "oom".
    """

    action: str
    address: int
    size: int
    where: str
    free: int = 0


@dataclass(frozen=True, slots=True)
class DeviceHistory:
    """The memory of one device when the snapshot was taken, and the allocator's actions before, the oldest first."""

    device: int
    segments: tuple[Segment, ...]
    events: tuple[Event, ...]


def read_snapshot(pickled: bytes) -> tuple[DeviceHistory, ...]:
    """Return the history of each device that the snapshot says anything about.

    Raises:
        SnapshotError: it is no snapshot, or holds anything but containers, numbers and strings.
    """
    try:
        found = _PlainUnpickler(io.BytesIO(pickled)).load()
    except SnapshotError:
        raise
    except Exception as error:  # a damaged pickle may raise any
        raise SnapshotError(f"the snapshot can't be read: {type(error).__name__}: {error}; {WRITTEN}") from error
    if not isinstance(found, dict) or not {"segments", "device_traces"} <= found.keys():
        raise SnapshotError(f"this is a {type(found).__name__} without segments and device_traces; {WRITTEN}")
    try:
        return _histories(found)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise SnapshotError(f"the snapshot has another form: {type(error).__name__}: {error}; {WRITTEN}") from error


class _PlainUnpickler(pickle.Unpickler):
    """Reads containers, numbers and strings; refuses whatever names a class or a function."""

    def find_class(self, module: str, name: str) -> Any:
        raise SnapshotError(f"the file asks for {module}.{name}, which no snapshot needs: it was not run; {WRITTEN}")


def _histories(found: dict[str, Any]) -> tuple[DeviceHistory, ...]:
    segments: defaultdict[int, list[Segment]] = defaultdict(list)
    for each in found["segments"]:
        segments[each.get("device", 0)].append(Segment(_number(each["total_size"]), _blocks(each["blocks"])))
    events = {device: tuple(map(_event, trace)) for device, trace in enumerate(found["device_traces"])}
    devices = sorted({*segments, *(device for device, trace in events.items() if trace)})
    return tuple(DeviceHistory(each, tuple(segments[each]), events.get(each, ())) for each in devices)


def _blocks(blocks: Iterable[dict[str, Any]]) -> tuple[Block, ...]:
    return tuple(
        Block(
            _number(block["address"]),
            _number(block["size"]),
            _number(block.get("requested_size", block["size"])),
            block["state"].startswith("active"),
            user_frame(block.get("frames", ())),
        )
        for block in blocks
    )


def _event(event: dict[str, Any]) -> Event:
    sizes = _number(event["size"]), user_frame(event.get("frames", ())), _number(event.get("device_free", 0))
    return Event(str(event["action"]), _number(event.get("addr", 0)), *sizes)


def _number(given: object) -> int:
    if type(given) is not int:
        raise TypeError(f"{given!r:.60} is no whole number")
    return given


def user_frame(frames: Iterable[dict[str, Any]]) -> str:
    """Return file, line and function of the innermost frame of the user's code, or else of Python code.

    Frames stand with the innermost first.
    """
    python = [frame for frame in frames if str(frame["filename"]).endswith(".py")]
    own = [frame for frame in python if not any(folder in frame["filename"] for folder in TORCH)]
    return next((f"{frame['filename']}:{frame['line']} {frame['name']}" for frame in [*own, *python]), "")
