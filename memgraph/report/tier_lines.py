"""Say what a plan takes of each tier, where there are several.

offloads 16.8 MB to host, of 16.8 MB, and 25.2 MB to disk
"""

from __future__ import annotations

from passes.schedule.tier_choice import tier_nbytes

from .report_data import ReportData
from .tables import mb

UNLIMITED = 1 << 40  # bytes of a tier that are not worth a word


def tier_lines(report: ReportData) -> list[str]:
    """Return a line with the bytes of each tier that the plan needs, and those that it has."""
    if not report.machine.behind or not report.plan:
        return []
    needed = tier_nbytes(report.plan, report.choice.captured.trace)
    parts = []
    for i, tier in enumerate(report.machine.tiers):
        room = f", of {mb(tier.link.capacity)}" if tier.link.capacity < UNLIMITED else ""
        parts.append(f"{mb(needed.get(tier.name if i else '', 0))} to {tier.name}{room}")
    return [f"offloads {', and '.join(parts)}"]
