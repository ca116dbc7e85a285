"""The lines of a report about what Inductor compiles.

compiled: 3 segments: 74.1 ms with them, 85.3 ms with their ops one by one
1 of them is all ops between two memory ops; backward as a whole
"""

from __future__ import annotations

from passes import Trace
from passes.ir.ops import SEGMENT, is_region

from .report_data import ReportData
from .tables import ms


def has_regions(report: ReportData) -> bool:
    """Return True if all ops between some two memory ops are compiled as one."""
    return report.lowered is not None and any(map(is_region, report.lowered.trace.ops))


def compiled_lines(report: ReportData) -> list[str]:
    """Say how many parts of the step are compiled, and what that gains."""
    if report.lowered is None:
        return []
    count = sum(op.fn == SEGMENT for op in report.lowered.trace.ops)
    failed = f"; {report.uncompiled} can't be" if report.uncompiled else ""
    if not count:
        return [f"nothing is compiled, as no segment is faster than its ops and within the budget{failed}"]
    said = (
        f"compiled: {count} segment{'s' * (count > 1)}: {ms(report.lowered.us)} with {'them' if count > 1 else 'it'}, "
        f"{ms(report.apart_us)} with their ops one by one{failed}"
    )
    return [said, *_regions(report.lowered.trace, report.split)]


def _regions(trace: Trace, split: str) -> list[str]:
    """Show which segments are all ops from one memory op to the next, and why others are not."""
    count = sum(map(is_region, trace.ops))
    halves = [phase for phase in ("forward", "backward") if _is_whole(trace, phase)]
    whole = f"; {' and '.join(halves)} as a whole" if halves else ""
    said = [f"{count} of them {'are' if count > 1 else 'is'} all ops between two memory ops{whole}"] * bool(count)
    return said + [f"other ops between two memory ops are not compiled as one: {split}"] * bool(split)


def _is_whole(trace: Trace, phase: str) -> bool:
    """Return True if all that a half computes is one region."""
    computing = [op for op in trace.ops if op.phase == phase and op.makes and not op.is_input]
    return len(computing) == 1 and is_region(computing[0])
