"""Rows of the linear program for offloaded state: where it is on the device, what is copied, how long updates take.

w, 2 MB, offloaded, read by ops 5 and 90   ->   -2.0 offload[w] at all positions but 5 and 90, +2.0 stay[w, 1] at 6-89
s, 4 MB, updated on the host               ->   the links copy no s, but copy w's gradient if that is on the device
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

from ..analysis.host_update import device_us, host_us
from ..simulate.forecast import staged_share
from .columns import MIB, Columns, Terms, update_groups
from .linear_program import INFINITY, LinearProgram


def device_mib(columns: Columns, position: int) -> Terms:
    """Return the MiB at a position beyond those of the captured step."""
    problem, state, terms = columns.problem, columns.state, Terms()
    for r, each in enumerate(problem.states):
        for gap in each.gaps(problem.size):
            if gap.first <= position < gap.last and not each.is_gradient:
                terms[state.offload[r]] = -each.nbytes / MIB
                if gap.next_use is not None:
                    terms[state.stay[r, gap.next_use]] = each.nbytes / MIB
    before = max((update for update in state.staged if update < position), default=-1)
    if before >= 0 and position not in state.windowed:
        terms[state.staged[before]] = problem.machine.streaming.update_staging / MIB
    if position in state.windowed:
        workspace = problem.gaps.trace.ops[position].workspace
        terms[state.windowed[position]] = (problem.machine.streaming.window - workspace) / MIB
    return terms


def reloaded_mib(columns: Columns, when: Callable[[int], bool]) -> Terms:
    """Return the MiB that are reloaded for uses whose first position satisfies `when`."""
    state, terms = columns.state, Terms()
    for r, each in enumerate(columns.problem.states):
        for k, (first, _) in enumerate(each.uses if not each.is_gradient else ()):
            if when(first):
                terms[state.offload[r]] = terms.get(state.offload[r], 0.0) + each.nbytes / MIB
                if k:
                    terms[state.stay[r, k]] = -each.nbytes / MIB
    return terms


def gradient_mib(columns: Columns, position: int) -> Terms:
    """Return the MiB of the offloaded gradients that are complete before a position."""
    return {
        columns.state.offload[r]: each.nbytes / MIB
        for r, each in enumerate(columns.problem.states)
        if each.is_gradient and each.uses[-1][1] < position
    }


def compute_us(columns: Columns) -> tuple[Terms, Terms]:
    """Return the microseconds that offloaded state adds to compute in forward, and in backward."""
    problem, state = columns.problem, columns.state
    forward = Terms()
    backward = {extra: 1.0 for position, extra in state.extra_us.items() if position < problem.copies_end}
    for r, each in enumerate(problem.states):
        us = problem.machine.link.overhead_us(each.nbytes)
        for k, (first, _) in enumerate(each.uses):
            phase = forward if first < problem.boundary else backward
            phase[state.offload[r]] = phase.get(state.offload[r], 0.0) + us
            if k:
                phase[state.stay[r, k]] = -us
    return forward, backward


def update_us(columns: Columns) -> Terms:
    """Return the microseconds that updates within backward take on the links."""
    problem, terms = columns.problem, Terms()
    backward = range(problem.boundary, problem.copies_end)
    updates = [problem.gaps.trace.ops[position] for position in columns.state.windowed if position in backward]
    read = {value for op in updates for value in op.reads}
    for offload, each in zip(columns.state.offload, problem.states, strict=True):
        if each.value in read:
            terms[offload] = each.update_us(problem.machine)
    return terms


def add_offload_rows(lp: LinearProgram, columns: Columns) -> None:
    """Only offloaded state stays between two uses; its copies take staging."""
    state = columns.state
    for (r, _), stay in state.stay.items():
        lp.add_row(0.0, INFINITY, {state.offload[r]: 1.0, stay: -1.0})
    for r, each in enumerate(columns.problem.states):
        if each.is_copied and columns.staging is not None:
            lp.add_row(0.0, INFINITY, {columns.staging: 1.0, state.offload[r]: -1.0})


def add_update_rows(lp: LinearProgram, columns: Columns) -> None:
    """An update takes as long as its copies; it runs in windows if it reads offloaded state."""
    problem, state = columns.problem, columns.state
    for position, windowed in state.windowed.items():
        op, us = problem.gaps.trace.ops[position], Terms()
        share = 1.0 - staged_share(problem.gaps.trace, op, problem.machine)
        for offload, each in zip(state.offload, problem.states, strict=True):
            if each.value in op.reads:
                us[offload] = -share * each.update_us(problem.machine)
                lp.add_row(0.0, INFINITY, {windowed: 1.0, offload: -1.0})
        lp.add_row(-INFINITY, 0.0, {windowed: 1.0, **dict.fromkeys(us, -1.0)})
        host = _add_host_rows(lp, columns, position, us)
        lp.add_row(-op.us, INFINITY, {state.extra_us[position]: 1.0, **us})
        if host:
            lp.add_row(-op.us, INFINITY, {state.extra_us[position]: 1.0, **host})
    for before, position in pairwise([-1, *state.staged]):
        lp.add_row(0.0, INFINITY, {state.staged[position]: 1.0, state.windowed[position]: -1.0})
        if before >= 0:
            lp.add_row(0.0, INFINITY, {state.staged[position]: 1.0, state.staged[before]: -1.0})


def add_reload_rows(lp: LinearProgram, columns: Columns) -> list[int]:
    """Add rows by which a recomputation that reads offloaded state costs a reload; return their indices.

    A reload serves all recomputations between two uses of the state.  Plans may share the reload of a use instead, so
    these rows are no part of a proof.
    """
    problem, rows, reloads = columns.problem, list[int](), dict[tuple[int, int], int]()
    states = {state.storage: r for r, state in enumerate(problem.states)}
    trace = problem.gaps.trace
    for o, producer in enumerate(problem.producers):
        read = trace.held_by(trace.op[producer.value].reads)
        for r in sorted(states[storage] for storage in read & states.keys()):
            state = problem.states[r]
            gap = sum(first <= problem.first_reruns[o] for first, _ in state.uses)
            if (r, gap) not in reloads:
                reloads[r, gap] = lp.add_column(state.nbytes / problem.machine.link.back)
            terms = {columns.recompute[o]: 1.0, columns.state.offload[r]: 1.0, reloads[r, gap]: -1.0}
            rows.append(lp.add_row(-INFINITY, 1.0, terms))
    return rows


def _add_host_rows(lp: LinearProgram, columns: Columns, position: int, link_us: Terms) -> Terms:
    """Take from `link_us` what the links are spared where the host updates states; return the time of the host.

    The links take two bounds on the copies of the parameter and gradient of such a state.  On the device, they copy
    what is offloaded.  On the host, they copy what is not.
    """
    problem, state, host_terms = columns.problem, columns.state, Terms()
    offload = {each.storage: column for column, each in zip(state.offload, problem.states, strict=True)}
    for group in update_groups(problem, position):
        if group.states.name not in state.host_update:
            continue
        on_host, copies_us = state.host_update[group.states.name]
        device_terms, kept_terms = Terms(), {on_host: 0.0}
        for op in group.owned:
            kept_terms[on_host] -= host_us(op, problem.machine)
            for column in (offload[storage] for storage in op.holds if storage in offload):
                device_terms[column] = link_us.pop(column, 0.0)
                kept_terms[column] = host_us(op, problem.machine)
        lp.add_row(0.0, INFINITY, {copies_us: 1.0, on_host: -sum(device_terms.values()), **device_terms})
        lp.add_row(0.0, INFINITY, {copies_us: 1.0, **kept_terms})
        lp.add_row(0.0, INFINITY, {offload[group.states.holds[0]]: 1.0, on_host: -1.0})
        link_us[on_host], link_us[copies_us] = device_us(group.states, problem.machine), -1.0
        host_terms[on_host] = -group.host_us(problem.machine)
    return host_terms
