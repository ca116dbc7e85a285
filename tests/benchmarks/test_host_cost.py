"""The rows of the benchmark of the host's cost."""

from __future__ import annotations

import pytest

from benchmarks import host_cost


def test_each_plan_has_a_row_and_offloads_what_it_says(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(host_cost, "SIZES", host_cost.SIZES | {"n_layer": 1})
    host_cost.main(rounds=1)
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    ops = {row[0]: (int(row[1]), int(row[2])) for row in rows if row and row[0] in host_cost.PLANS}
    assert list(ops) == [*host_cost.PLANS]
    assert ops["recompute"][0] > ops["plain"][0] and ops["offload"][1] > 10 + ops["plain"][1], ops
