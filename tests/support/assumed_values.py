"""The values of tensors on which a step rests."""

from __future__ import annotations

from memgraph.report.report import Report
from memgraph.report.report_data import Assumption


def assumed_values(report: Report) -> list[Assumption]:
    return [each for each in report.assumptions if each.kind == "value"]
