"""Plans that recompute everything, or nothing, as FairScale's checkpoint="always" and "never".

"always"    forward keeps what the stage has received; backward runs all of it again
"never"     no decisions
"""

from __future__ import annotations

from ..analysis.reuse_gaps import ReuseGaps
from ..ir.decisions import Plan
from ..ir.machine import Machine
from ..ir.trace import Trace
from ..schedule.schedule import Placement, schedule


def recompute_all(trace: Trace, machine: Machine) -> Plan:
    """Return the plan that recomputes what backward reads, except for ops that may not run twice."""
    gaps = ReuseGaps(trace)
    again = [storage for storage in gaps.uses if not trace.op[gaps.producer[storage]].once]
    return schedule(gaps, dict.fromkeys(again, Placement.RECOMPUTE), machine)
