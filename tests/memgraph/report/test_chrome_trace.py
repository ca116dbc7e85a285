"""The timeline that Perfetto shows has the forecast's times and bytes."""

from __future__ import annotations

import json
from collections import defaultdict
from itertools import pairwise
from typing import Any

from tests.memgraph.report.test_plan_diff import report

PLAN = "offload h: out b, free b\nreload h: back g, use dv"


def events(kind: str) -> list[dict[str, Any]]:
    return [each for each in json.loads(report(PLAN).to_chrome_trace())["traceEvents"] if each["ph"] == kind]


def test_each_op_and_copy_is_on_its_queue_and_none_overlap_there() -> None:
    forecast = report(PLAN).forecast
    queues = defaultdict(list)
    for each in events("X"):
        queues[each["tid"]].append((each["ts"], each["ts"] + each["dur"]))
    assert sum(map(len, queues.values())) == sum(not op.is_input for op in forecast.trace.ops) + len(forecast.copies)
    assert len(queues) == 3  # compute, out and back
    for spans in queues.values():
        spans.sort()
        assert all(end <= begin + 1e-9 for (_, end), (begin, _) in pairwise(spans))
    assert max(end for spans in queues.values() for _, end in spans) <= forecast.us + 1e-9


def test_the_memory_counter_reaches_the_peak_and_nothing_above_it() -> None:
    totals = [sum(each["args"].values()) for each in events("C")]
    assert max(totals) == report(PLAN).peak
    assert totals == report(PLAN).forecast.total.tolist()


def test_an_op_tells_its_module_and_source_line() -> None:
    gelu = next(each for each in events("X") if each["name"] == "aten.gelu.default")
    assert gelu["args"]["where"] == "layers.0 net.py:7"
