"""Forecast what would make a plan cheaper, from its report alone.

+32.0 %, 120 MB offloaded to a disk   ->   budget=942.1 MB: needs no plan, 1873.3 ms
                                           spill_dir= on a disk twice as fast: 1920.4 ms, +2.5%
                                           wire_dtype=torch.bfloat16: 1911.0 ms at best, +2.0%

The same plan is forecast with other rates or with casts, so each figure is one of a plan that exists.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace

from passes import BrokenTrace, Cast, Forecast, Offload, Plan, apply, check, predict
from passes.ir.machine import cast_type

from .report_data import ReportData
from .tables import mb_above, ms

MUCH = 0.05  # share of the step that a plan adds, from which on advice is given
WORTH = 0.01  # share of the step that advice has to gain
FASTER = 2  # times


def remedies(report: ReportData) -> list[str]:
    """Return a line for each option that would make the step shorter, with its forecast; none if it costs little."""
    if not report.plan or report.longer < MUCH or report.lowered is not None:
        return []
    needs = report.whole or report.choice.captured.peak
    larger = [f"budget={mb_above(needs)}: needs no plan, {ms(report.as_it_is_us)}"] if needs > report.budget else []
    return [*larger, *_of_copies(report)]


def _of_copies(report: ReportData) -> Iterator[str]:
    machine, link = report.machine, report.machine.link
    if not report.choice.offloads or not link.works:
        return
    if machine.tier == "disk":
        faster = replace(machine, link=replace(link, out=FASTER * link.out, back=FASTER * link.back))
        yield from _gained(report, predict(report.forecast.trace, faster), "spill_dir= on a disk twice as fast")
    if not machine.cast.dtype:
        casting = replace(machine, cast=Cast("bf16", math.inf, math.inf))
        with suppress(BrokenTrace, KeyError, ValueError):
            applied = apply(report.choice.captured.trace, _cast(report))
            check(applied)
            forecast = predict(applied, casting)
            if forecast.peak <= machine.budget:
                yield from _gained(report, forecast, "wire_dtype=torch.bfloat16, without the time of its casts")


def _cast(report: ReportData) -> Plan:
    """Return the plan in which all values that may be rounded are offloaded as bf16."""
    ops = report.choice.captured.trace.op
    return tuple(
        replace(each, wire="bf16") if isinstance(each, Offload) and cast_type(ops[each.value].type, "bf16") else each
        for each in report.plan
    )


def _gained(report: ReportData, forecast: Forecast, option: str) -> Iterator[str]:
    us, plain_us = forecast.us, report.as_it_is_us
    if us < report.predicted_us - WORTH * plain_us:
        yield f"{option}: {ms(us)}, {us / plain_us - 1:+.1%}"
