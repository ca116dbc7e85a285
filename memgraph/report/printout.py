"""Print a report: whether the step fits, the tensors at its peak, the decisions and the reason for each.

fits: forecast 118.2 MB, measured 118.2 MB, budget 120.0 MB
time: forecast 31.0 ms, +4.2%; as it is, the step takes 29.7 ms and needs 191.4 MB

bytes               at the peak, aten.mm.default h.7.mlp     decided
kind  at the peak   kind  bytes  what  type  where           what  op  where  bytes  time  why
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from passes import KINDS, Forecast, Offload, Op, Recompute, Stream
from passes.ir.ops import FREE, GATHERED, NARROW, REDUCED, WAIT, WIDEN, sent_nbytes, value_of
from passes.lp.solver import INSTALL, MISSING
from passes.slices.whole_weight import reason_lines

from ..system.disturbance import disturbed_text
from .compiled_lines import compiled_lines, has_regions
from .remedies import remedies
from .repeatability import repeatability
from .report_data import ReportData
from .step_times import is_off, is_slower
from .tables import layer_path, mb, ms, stacked, table, unstyled
from .tier_lines import tier_lines

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

TOP = 10  # rows of the table of the peak
ASSUMPTIONS = 5  # that are printed
DISPROVED = (
    "proven: no bound, since the step took less than the prices of its ops allow: they are of a slower machine, or "
    "of one with other work"
)
NUMBERS = ("bytes", "time", "at the peak", "at its own peak")


def printout(report: ReportData) -> RenderableType:
    """Return the lines and tables of a report."""
    forecast, blank = report.forecast, unstyled("")
    tables = _kinds(forecast), blank, peak_table(forecast), blank, decisions_table(report)
    return stacked(unstyled("\n".join([verdict(report), *_simulated(report)])), blank, *tables, *_helped(report))


def peak_printout(report: ReportData) -> RenderableType:
    """Return the lines and tables of a step as it is, without a budget."""
    plain = report.choice.captured
    lines = [
        f"as it is, the step takes {ms(report.as_it_is_us)} and needs {mb(plain.peak)}",
        *repeatability(report),
    ]
    return stacked(unstyled("\n".join(lines)), unstyled(""), _kinds(plain), unstyled(""), peak_table(plain))


def verdict(report: ReportData) -> str:
    """Return the lines that say whether the step fits, what it takes, and what is proven."""
    plain = report.choice.captured
    lines = [
        _bytes(report),
        *_held(report),
        *tier_lines(report),
        *_several(report),
        *_adding(report),
        *_scalars_only(report),
        *_assumed(report),
        *_opaque(report),
        f"time: forecast {ms(report.predicted_us)}, {report.longer:+.1%}; "
        f"as it is, the step takes {ms(report.as_it_is_us)} and needs {mb(report.whole or plain.peak)}",
        *_disturbed(report),
        *repeatability(report),
        *_sliced(report),
        *_in_blocks(report),
        *_exchanged(report),
        *compiled_lines(report),
        *([report.recorded] if report.recorded else []),
        *_taken(report),
        *_proven(report),
        *_greedy(report),
        *(["planning was interrupted: this is the best plan until then"] if report.choice.interrupted else []),
        *_rounded(report),
    ]
    if not report.counted:
        lines.append("no optimizer was given: its states and its update are not counted; give optimizer=")
    return "\n".join(lines)


def _bytes(report: ReportData) -> str:
    """Compare forecast, measured and budget, to the byte if two of them would print alike."""
    sizes = [report.peak, report.budget, *([] if report.measured is None else [report.measured])]
    alike = len(set(map(mb, sizes))) < len(set(sizes))
    forecast, budget, *measured = [f"{nbytes} B" if alike else mb(nbytes) for nbytes in sizes]
    said = f"forecast {forecast}, measured {(*measured, _unmeasured(report))[0]}, budget {budget}"
    if report.measured is None or report.measured <= min(report.peak, report.budget):
        return f"fits: {said}"
    verdict = "over the budget" if report.measured > report.budget else "over the forecast"
    return f"{verdict}: {said}; {report.beyond or 'which should not be: please report it'}"


def _unmeasured(report: ReportData) -> str:
    return f"not yet ({report.unmeasured})" if report.unmeasured else "not yet"


def _held(report: ReportData) -> list[str]:
    """Show the bytes that torch's CUDA allocator held; before a step, the bytes left for it."""
    if not report.held:
        room = f"{mb(report.budget - report.peak)} of the budget are left for what torch's allocator holds beyond that"
        return [room] if report.machine.device.startswith("cuda") else []
    over = ", over the budget" if report.held > report.budget else ""
    said = f"torch's allocator gave out {mb(report.blocks)} for these, and held {mb(report.held)} of the device{over}"
    return [said, *([report.arena] if report.arena else [])]


def _simulated(report: ReportData) -> list[str]:
    """Show what torch's allocator would hold for what the step allocates; nothing once it was measured."""
    if report.held or not report.machine.device.startswith("cuda"):
        return []
    usual, expandable = (report.allocator(expandable=each) for each in (False, True))
    return [
        f"of the {mb(usual.live)} that the step allocates at once, torch's allocator would give out {mb(usual.given)} "
        f"and hold {mb(usual.reserved)}, by simulation; with expandable segments {mb(expandable.given)} and "
        f"{mb(expandable.reserved)}"
    ]


def _several(report: ReportData) -> list[str]:
    if report.forwards < 2:
        return []
    over = f", over the budget; forwards={report.forwards} plans for them" * (report.together > report.budget)
    return [f"{report.forwards} forwards were open at once: forecast {mb(report.together)} together{over}"]


def _assumed(report: ReportData) -> list[str]:
    """Show the values on which the step rests, those that failed most often first."""
    values = [each for each in report.assumptions if each.kind == "value"]
    if not values:
        return []
    count = len(values)
    often = sorted(values, key=lambda assumption: -assumption.failures)[:ASSUMPTIONS]
    lines = [f"  {each.where}: {each.text}; failed in {each.failures} runs" for each in often]
    more = [f"  and {count - ASSUMPTIONS} more"] if count > ASSUMPTIONS else []
    found = f"found by one plain forward, which allocated {mb(report.value_run)}"
    return [f"rests on {count} value{'s' * (count > 1)} of tensors, {found}:", *lines, *more]


def _opaque(report: ReportData) -> list[str]:
    """Show the submodules that run as they are."""
    rows = [
        f"  {row.path} ({row.kind}): workspace {mb(row.nbytes)}; failed in {row.failures} runs; {row.reason}"
        for row in report.opaque
    ]
    return ["runs as it is, each call as one op, which is run again in backward:", *rows] if rows else []


def _sliced(report: ReportData) -> list[str]:
    """Show the chains that run in parts, and what is rounded otherwise than on the whole."""
    if not report.slices:
        return []
    trace = report.choice.captured.trace
    lines = []
    for cut in report.slices:
        count = len(cut.part_rows)
        places = (
            trace.op[f"{name}__{letter}1"].where
            for name in cut.rule
            for letter in "pr"
            if f"{name}__{letter}1" in trace.op
        )
        modules = dict.fromkeys(where.partition(" ")[0] for where in places if where)
        sums = sum(rule.makes is None for rule in cut.rule.values())
        adds = f"; {sums} sum{'s' * (sums > 1)} over rows round differently" if sums else ""
        again = "; forward ops of it run again in backward" if cut.reruns else ""
        lines.append(f"  {cut.rows} rows in {count} parts: {len(cut.rules)} ops of {', '.join(modules)}{adds}{again}")
    needs = mb(report.choice.captured.peak)
    return [f"in slices, with which the step needs {needs} without a plan:", *lines]


def _in_blocks(report: ReportData) -> list[str]:
    """Show the weights that come in blocks of rows, and why others don't."""
    lines = [
        f"  {row.weight}: {row.blocks} blocks of {row.rows} rows" + "; sums over them round differently" * row.rounds
        for row in report.row_blocks
    ]
    whole = reason_lines(report.whole_weights)
    return [
        *(["weights that come, and whose gradients go, in blocks of rows:", *lines] if lines else []),
        *(["large weights that stay whole:", *whole] if whole else []),
    ]


def _adding(report: ReportData) -> list[str]:
    """Warn that a call which adds to gradients does not fit."""
    if report.adding <= report.budget:
        return []
    return [f"no plan within the budget was found for a call that adds to gradients; one needs {report.adding} B"]


def _disturbed(report: ReportData) -> list[str]:
    """Warn that the plan rests on prices that were taken on a busy machine."""
    return [f"prices: {disturbed_text(report.disturbed)}"] if report.disturbed else []


def _scalars_only(report: ReportData) -> list[str]:
    """Warn that gradients of outputs that are no scalars are refused."""
    if not report.all_outputs:
        return []
    return [f"backward starts from the scalar outputs alone; from all of them it needs {report.all_outputs} B"]


def _exchanged(report: ReportData) -> list[str]:
    """Show the collectives, and how much of their time compute hides."""
    net = [copy for copy in report.forecast.copies if copy.queue == "net"]
    if not net:
        return []
    us, waited = sum(copy.end - copy.begin for copy in net), sum(_spent(report.forecast, REDUCED, GATHERED).values())
    hidden = us * (1 - min(report.machine.network.interference, 1.0)) - waited
    trace = report.forecast.trace
    nbytes = sum(sent_nbytes(trace, trace.op[copy.value]) for copy in net)
    said = f"network: {len(net)} exchange{'s' * (len(net) > 1)} of {mb(nbytes)}, {ms(us)}"
    return [f"{said}; compute hides {ms(max(hidden, 0.0))} of it"]


def _taken(report: ReportData) -> list[str]:
    """Compare measured times with forecasts: the first timed step, and the median of recent ones."""
    lines = []
    if report.no_pool:
        lines.append(f"freed memory goes back to the system, and new pages take time: {report.no_pool}")
    if report.measured_us is not None:
        repriced = report.repriced_us
        own = "" if repriced is None else f"; forecast with the times of its own ops {ms(repriced)}"
        lines.append(f"took {ms(report.measured_us)}{own}")
    if report.recent_us is not None and is_off(report.recent_us, report.expected_us):
        off = f"{report.recent_us / report.expected_us - 1:+.0%} on the forecast of {ms(report.expected_us)}"
        lines.append(f"the latest steps took {ms(report.recent_us)} at the median, {off}{_reason(report.slower)}")
    return lines


def _reason(slower: float | None) -> str:
    """Say why steps are off their forecast, as far as a reference op shows it."""
    if slower is None:
        return ""
    then = "than when ops were priced"
    if is_slower(slower):
        return f": a reference op takes {abs(slower):.0%} {'longer' if slower > 0 else 'less'} {then}"
    return f": a reference op takes no other time {then}, so ops take another time in the step than alone"


def _proven(report: ReportData) -> list[str]:
    """State the proven bound, and the class of plans that it holds for; none that the step itself has disproved.

    In a region ops take less than the prices that the bound was proven at.
    """
    is_alone = report.choice.others is None
    if not report.plan and is_alone:
        return []
    taken_us = report.recent_us or report.measured_us
    if taken_us is not None and taken_us < report.lower_bound:
        return [DISPROVED]
    single = report.choice.is_single
    adds = report.choice.bound_us if single else report.choice.any_us
    of = _class_cuts(report)
    said = "proven" + ", before all ops between two memory ops are compiled as one" * has_regions(report)
    if not adds and is_alone:
        return [f"{said}: only that no plan{of} is faster than the step as it is; this one is {report.gap:.1%} above"]
    each = "in which each value is recomputed and reloaded at most once"
    which = each if single else "that recomputes in backward only, however often,"
    return [f"{said}: no plan{of} {which} takes less than {ms(report.lower_bound)}; this one is {report.gap:.1%} above"]


def _class_cuts(report: ReportData) -> str:
    """Name what plans of the bound's class have in common with this one: other slices and blocks are not in it."""
    cuts = ["slices"] * bool(report.slices) + ["blocks of rows"] * bool(report.row_blocks)
    if report.choice.others is not None:
        return ", with these slices or none," if cuts else ", without slices or with those it was chosen over,"
    return f" with these {' and '.join(cuts)}" if cuts else ""


def _greedy(report: ReportData) -> list[str]:
    said = f"{MISSING}: the greedy planner made this plan, and proves no bound; {INSTALL}"
    return [said] if report.choice.greedy else []


def _rounded(report: ReportData) -> list[str]:
    cast = [decision for decision in report.plan if isinstance(decision, Offload) and decision.wire]
    if not cast:
        return []
    nbytes = mb(sum(_held_nbytes(report, decision.value) for decision in cast))
    return [f"lossy: {len(cast)} values of {nbytes} are rounded to {cast[0].wire} while offloaded"]


def _held_nbytes(report: ReportData, value: str) -> int:
    trace = report.choice.captured.trace
    return trace.nbytes[trace.op[value].holds[0]]


def decisions_table(report: ReportData) -> RenderableType:
    if not report.plan:
        return unstyled("decided: nothing; the step fits as it is")
    lines = table("decided", "what", "op", "where", "bytes", "time", "why", right=NUMBERS)
    for row in sorted(_folded(row for _, row in decided(report)), key=lambda row: -row.nbytes):
        why = row.why if row.count == 1 else f"{row.count} x, {row.why}"
        lines.add_row(row.verb, row.fn, row.where, mb(row.nbytes), ms(row.us), why)
    return lines


def decided(report: ReportData) -> Iterator[tuple[str, Row]]:
    """Yield each decided value with its row, in the order of the plan."""
    stalls, casts = _spent(report.forecast, FREE, WAIT), _spent(report.forecast, NARROW, WIDEN)
    for decision in report.plan:
        op = report.choice.captured.trace.op[decision.value]
        if isinstance(decision, Offload):
            verb = f"offload as {decision.wire}" if decision.wire else "offload"
            nbytes = _held_nbytes(report, op.name)
            why = "hides behind compute" if stalls[op.name] < 1 else "compute waits for it"
            why += f", to {decision.to or report.machine.tier}" * bool(report.machine.behind)
            yield op.name, Row(verb, op.fn, op.where, nbytes, stalls[op.name] + casts[op.name], why)
        elif isinstance(decision, Stream):
            verb, updated = ("update there", ", and is updated there") if decision.on else ("stream", "")
            why = f"offloaded to {decision.to or report.machine.tier}{updated}"
            yield op.name, Row(verb, op.fn, op.where, op.nbytes, stalls[op.name], why)
        elif isinstance(decision, Recompute) and op.makes:
            yield op.name, Row("recompute", op.fn, op.where, op.nbytes, op.us, _why_recomputed(report, op))


def _why_recomputed(report: ReportData, op: Op) -> str:
    if not report.machine.link.works:
        return "no tier to offload to"
    copies_us = op.nbytes / report.machine.link.out + op.nbytes / report.machine.link.back
    return f"offloading would take {ms(copies_us)}" if copies_us > op.us else "the best that was found"


@dataclass(frozen=True, slots=True)
class Row:
    """A line of a table, which stands for `count` equal layers."""

    verb: str
    fn: str
    where: str
    nbytes: int
    us: float = 0.0
    why: str = ""
    count: int = 1


def _folded(rows: Iterable[Row]) -> list[Row]:
    """Fold rows that differ only in the numbers of their module paths.

    Equal layers stay two rows if copies hide behind compute in some and not in others.
    """
    folded: dict[tuple[str, str, str, str], Row] = {}
    for row in rows:
        where = layer_path(row.where)
        key = (row.verb, row.fn, where, row.why)
        total = folded.get(key, Row(row.verb, row.fn, row.where, 0, 0.0, row.why, 0))
        path = where if total.count else row.where
        folded[key] = Row(
            row.verb, row.fn, path, total.nbytes + row.nbytes, total.us + row.us, row.why, total.count + 1
        )
    return list(folded.values())


def _kinds(forecast: Forecast) -> Table:
    lines = table("bytes", "kind", "at the peak", "at its own peak", right=NUMBERS)
    for kind in KINDS:
        if (most := int(forecast.by_kind[kind].max(initial=0))) > 0:
            lines.add_row(kind, mb(int(forecast.by_kind[kind][forecast.peak_index])), mb(most))
    lines.add_row("all", mb(forecast.peak), "")
    return lines


def peak_table(forecast: Forecast) -> Table:
    op = forecast.trace.ops[forecast.peak_index]
    lines = table(f"at the peak, {op.fn} {op.where}", "kind", "bytes", "what", "type", "where", right=NUMBERS)
    makers = [(life, forecast.trace.op[life.producer]) for life in forecast.live_at(forecast.peak_index)]
    rows = _folded(Row(life.kind, f"{maker.fn} {maker.type}", maker.where, life.nbytes) for life, maker in makers)
    for row in sorted(rows, key=lambda row: -row.nbytes)[:TOP]:
        fn, _, type = row.fn.partition(" ")
        lines.add_row(row.verb, mb(row.nbytes), fn if row.count == 1 else f"{row.count} x {fn}", type, row.where)
    return lines


def _helped(report: ReportData) -> list[RenderableType]:
    lines = [f"  {line}" for line in remedies(report)]
    return [unstyled("\n".join(["", "what would help, by forecast", *lines]))] if lines else []


def _spent(forecast: Forecast, *fns: str) -> Counter[str]:
    """Return the microseconds that compute spends on such ops for the copies of each value."""
    ops, begins = forecast.trace.ops, (*forecast.begins, forecast.us)
    spent: Counter[str] = Counter()
    for i, op in enumerate(ops):
        if op.fn in fns:
            value = value_of(op.name)
            spent[value] += begins[i + 1] - begins[i]  # type: ignore[assignment]
    return spent
