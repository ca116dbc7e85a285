"""A memory snapshot of torch is read without running code, and its peak explained by the lines that allocated it.

The snapshots here are written by hand, by the structure that `torch.cuda.memory._snapshot` documents.
"""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import pytest
from expecttest import assert_expected_inline
from hypothesis import given
from hypothesis import strategies as st

import memgraph
from memgraph.command.app import main
from memgraph.report.snapshot_peak import UNKNOWN, SnapshotPeak, snapshot_peaks
from memgraph.report.tables import printed
from memgraph.report.torch_snapshot import read_snapshot, user_frame

MB = 1_000_000
INSIDE = [
    {"filename": "??", "line": 0, "name": "at::native::mm(at::Tensor const&)"},
    {"filename": "/x/site-packages/torch/nn/functional.py", "line": 9, "name": "linear"},
]


def frames(line: int) -> list[dict[str, Any]]:
    """Return a stack, the innermost frame first: torch's, the model's, the script's."""
    own = [{"filename": "net.py", "line": line, "name": "forward"}, {"filename": "train.py", "line": 1, "name": "main"}]
    return [*INSIDE, *own]


def event(action: str, addr: int, size: int, line: int = 0) -> dict[str, Any]:
    return {"action": action, "addr": addr, "size": size, "stream": 0, "frames": frames(line) if line else []}


def block(
    address: int, size: int, state: str = "active_allocated", requested: int = 0, line: int = 0
) -> dict[str, Any]:
    known = {"frames": frames(line)} if line else {}
    return {"address": address, "size": size, "requested_size": requested or size, "state": state, **known}


def segment(*blocks: dict[str, Any], device: int = 0) -> dict[str, Any]:
    return {
        "device": device, "address": blocks[0]["address"], "total_size": sum(each["size"] for each in blocks), "stream": 0,
        "segment_type": "large", "blocks": list(blocks),
    }  # fmt: skip


def snapshot(segments: list[Any], *traces: list[Any]) -> bytes:
    return pickle.dumps({"segments": segments, "device_traces": list(traces), "allocator_settings": {"x": True}})


STEP = snapshot(
    [
        segment(block(0, 10 * MB, requested=9 * MB, line=3), block(10 * MB, 30 * MB, "inactive")),
        segment(block(90 * MB, 20 * MB, "inactive")),
    ],
    [
        event("segment_alloc", 90 * MB, 20 * MB),
        event("alloc", 10 * MB, 8 * MB, 7),
        event("alloc", 18 * MB, 8 * MB, 7),
        event("alloc", 90 * MB, 20 * MB, 8),
        event("free_requested", 90 * MB, 20 * MB),
        event("free_completed", 90 * MB, 20 * MB),
        {"action": "oom", "size": 70 * MB, "stream": 0, "device_free": 5 * MB, "frames": frames(9)},
        event("free_completed", 10 * MB, 8 * MB, 11),
        event("free_completed", 18 * MB, 8 * MB, 11),
        event("free_completed", 30 * MB, 4 * MB, 11),
    ],
)


def peak_of(pickled: bytes) -> SnapshotPeak:
    (peak,) = snapshot_peaks(read_snapshot(pickled)).peaks
    return peak


def test_the_peak_is_explained_by_the_lines_that_allocated_it() -> None:
    assert_expected_inline(
        printed(snapshot_peaks(read_snapshot(STEP))) + "\n",
        """\
device 0: at most 49.0 MB in use, of 60.0 MB held by torch's allocator; behind event 4 of 10
at the end 9.0 MB in use, of 60.0 MB held: 1.0 MB are rounding, 30.0 MB lie between buffers, in blocks of 30.0 MB at
most, 20.0 MB can be given back
refused: 70.0 MB at net.py:9 forward; the device had 5.0 MB left

at the peak
  bytes  buffers  where
20.0 MB        1  net.py:8 forward
16.0 MB        2  net.py:7 forward
 9.0 MB        1  net.py:3 forward
 4.0 MB        1  allocated before the trace began, or without a stack
""",
    )


def test_a_buffer_of_before_the_trace_is_in_use_from_its_begin() -> None:
    peak = peak_of(snapshot([segment(block(0, MB))], [event("free_completed", MB, 5 * MB)]))
    assert (peak.peak, peak.at) == (6 * MB, 0)
    assert [(place.where, place.nbytes, place.count) for place in peak.places] == [(UNKNOWN, 6 * MB, 2)]


def test_a_buffer_is_in_use_until_its_free_is_completed() -> None:
    waits = [event("alloc", 0, MB, 1), event("free_requested", 0, MB), event("alloc", MB, MB, 2)]
    assert peak_of(snapshot([segment(block(0, MB, "active_awaiting_free"), block(MB, MB))], waits)).peak == 2 * MB


def test_without_a_trace_the_peak_is_what_is_in_use() -> None:
    peak = peak_of(snapshot([segment(block(0, 3 * MB, line=4), block(3 * MB, MB, "inactive"))]))
    assert (peak.peak, peak.held, peak.events) == (3 * MB, 4 * MB, 0)
    assert peak.places[0].where == "net.py:4 forward"


def test_each_device_has_its_own_peak() -> None:
    both = [segment(block(0, MB)), segment(block(0, 2 * MB), device=1)]
    peaks = snapshot_peaks(read_snapshot(snapshot(both, [], [event("alloc", 0, 2 * MB, 5)], []))).peaks
    assert [(peak.device, peak.peak) for peak in peaks] == [(0, MB), (1, 2 * MB)]


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 5), st.integers(1, 9)), max_size=30))
def test_the_peak_is_the_most_that_was_live_whenever_the_trace_began(steps: list[tuple[bool, int, int]]) -> None:
    live: dict[int, int] = {}
    events, totals = [], [0]
    for allocates, address, size in steps:
        if allocates and address not in live:
            live[address] = size
            events.append(event("alloc", address, size, 1))
        elif not allocates and address in live:
            events.append(event("free_completed", address, live.pop(address)))
        totals.append(sum(live.values()))
    left = [segment(block(address, size)) for address, size in live.items()]
    for begin in range(len(events) + 1):
        found = snapshot_peaks(read_snapshot(snapshot(left, events[begin:]))).peaks
        known = max(_totals(events)[begin:])
        assert sum(peak.peak for peak in found) == known
        assert sum(place.nbytes for peak in found for place in peak.places) == known


def _totals(events: list[dict[str, Any]]) -> list[int]:
    totals = [0]
    for each in events:
        totals.append(totals[-1] + (each["size"] if each["action"] == "alloc" else -each["size"]))
    return totals


def test_the_innermost_frame_of_the_user_is_taken() -> None:
    assert user_frame(frames(7)) == "net.py:7 forward"
    assert user_frame(INSIDE) == "/x/site-packages/torch/nn/functional.py:9 linear"
    assert user_frame(INSIDE[:1]) == user_frame([]) == ""


class Calls:
    """A value whose pickle calls a function when it is read."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> Any:
        return Path.touch, (self.file,)


def test_a_pickle_that_calls_a_function_is_refused_and_the_function_not_called(tmp_path: Path) -> None:
    file = tmp_path / "touched"
    with pytest.raises(memgraph.SnapshotError, match="which no snapshot needs: it was not run"):
        read_snapshot(pickle.dumps({"segments": [Calls(file)], "device_traces": []}))
    assert not file.exists()


@pytest.mark.parametrize(
    ("pickled", "said"),
    [
        (b"", "can't be read: EOFError"),
        (b"{}", "can't be read"),
        (STEP[: len(STEP) // 2], "can't be read"),
        (pickle.dumps([1]), "this is a list without segments"),
        (pickle.dumps({"segments": []}), "this is a dict without segments and device_traces"),
        (pickle.dumps({"segments": 3, "device_traces": []}), "has another form"),
        (pickle.dumps({"segments": [{"blocks": []}], "device_traces": []}), "has another form: KeyError: 'total_size'"),
        (snapshot([segment(block(0, 1))], [{"action": "alloc", "addr": 0, "size": "x"}]), "'x' is no whole number"),
        (snapshot([segment(block(0, 1) | {"frames": 3})], []), "has another form"),
    ],
)
def test_what_is_no_snapshot_is_a_typed_error(pickled: bytes, said: str) -> None:
    with pytest.raises(memgraph.SnapshotError, match=said) as error:
        read_snapshot(pickled)
    assert "_dump_snapshot" in str(error.value)


def test_the_command_explains_a_snapshot(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (file := tmp_path / "snapshot.pickle").write_bytes(STEP)
    assert main(["explain", str(file)]) == 0
    assert "at most 49.0 MB in use" in capsys.readouterr().out
    assert main(["explain", str(file), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)[0]["peak"] == 49 * MB
    file.write_bytes(b"no pickle")
    assert main(["explain", str(file)]) == 1
    assert "SnapshotError" in capsys.readouterr().err
