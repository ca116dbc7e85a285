"""Equal layers are one row of a report, unless their reasons differ."""

from __future__ import annotations

from memgraph.report.printout import Row, _folded

HIDES, WAITS = "hides behind compute", "compute waits for it"


def test_equal_layers_are_one_row() -> None:
    rows = [Row("offload", "aten.mm.default", f"h.{i}.mlp gpt.py:71", 4, 0.5, HIDES) for i in range(3)]
    assert _folded(rows) == [Row("offload", "aten.mm.default", "h.*.mlp gpt.py:71", 12, 1.5, HIDES, 3)]


def test_a_layer_that_waits_is_not_said_to_hide() -> None:
    first = Row("offload", "aten.mm.default", "h.0.mlp", 4, 0.0, HIDES)
    other = Row("offload", "aten.mm.default", "h.1.mlp", 4, 9.0, WAITS)
    assert [(row.us, row.why) for row in _folded([first, other])] == [(0.0, HIDES), (9.0, WAITS)]
