"""Rows as Markdown: an architecture a line, its budgets side by side, and a summary.

markdown(rows, about)   ->   "# The zoo ... | gpt2 | whole | 0.9 s | ok | ok | needs 41 % |"
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from .row import Row

CLIPPED = 240  # characters of a reason


def markdown(rows: Sequence[Row], about: Mapping[str, Any]) -> str:
    """Return the page."""
    shares = sorted({row.share for row in rows}, reverse=True)
    by_name: dict[str, list[Row]] = {}
    for row in rows:
        by_name.setdefault(row.name, []).append(row)
    versions = ", ".join(f"{name} {about[name]}" for name in about["packages"])
    head = [
        "architecture",
        "library",
        "captured",
        "ops",
        "first call s",
        "CPU s",
        *(f"{share:.0%}" for share in shares),
    ]
    lines = [
        "# Stock architectures under budgets",
        "",
        f"`{about['command']}`, {about['date']}; {about['machine']}, one thread; {versions}.",
        "Shares are of eager's peak above parameters, buffers and batch. `ok`: bits as eager's over three steps, and "
        "counted <= forecast <= budget by a second meter; behind it counted MB. `needs`: the smallest budget that the "
        "error named, as a share, was given instead, and all of this held.",
        "",
        *summary(rows),
        *(
            ["", f"Rows are of {len(about['codes'])} states of the code; zoo.json names each."]
            if len(about["codes"]) > 1
            else []
        ),
        "",
        f"| {' | '.join(head)} |",
        f"|{'---|' * len(head)}",
        *(_line(group, shares) for group in by_name.values()),
        "",
        *_reasons(by_name),
    ]
    return "\n".join(lines) + "\n"


def summary(rows: Sequence[Row]) -> list[str]:
    """Return the figures of all."""
    names = {row.name for row in rows}
    lost = {row.name for row in rows if not row.is_captured}
    opaque = {row.name for row in rows if row.state == "opaque"}
    verdicts = [row.verdict for row in rows]
    slow = max(rows, key=lambda row: row.seconds)
    slow_cpu = max(rows, key=lambda row: row.cpu_seconds)
    captured, plain = len(names - lost), len(names - lost - opaque)
    return [
        f"**{len(names)} architectures: {captured / len(names):.1%} captured ({captured}), "
        f"{plain / len(names):.1%} without opaque parts; {verdicts.count('wrong')} wrong and {verdicts.count('over')} "
        f"over budget or forecast of {len(rows)} trainings; {verdicts.count('needs')} needed another budget; slowest "
        f"first call {slow.seconds:.1f} s ({slow.name}), {slow_cpu.cpu_seconds:.1f} s of CPU ({slow_cpu.name})**"
    ]


def _line(group: Sequence[Row], shares: Sequence[float]) -> str:
    first, by_share = group[0], {row.share: row for row in group}
    found = next((row for row in group if row.is_captured), first)
    state = found.state
    if found.guards or found.opaque:
        state += f" ({found.guards} guards" + (f", {found.opaque} opaque)" if found.opaque else ")")
    seconds, cpu = (f"{getattr(found, name):.1f}" for name in ("seconds", "cpu_seconds"))
    cells = [_cell(by_share[share]) if share in by_share else "" for share in shares]
    return f"| {' | '.join([first.name, first.library, state, str(found.ops), seconds, cpu, *cells])} |"


def _cell(row: Row) -> str:
    if not row.is_captured:
        return row.verdict
    if row.verdict == "needs":
        return f"needs {row.needs / 1e6:.2f} MB"
    return f"{row.verdict} {row.counted / 1e6:.2f}"


def _reasons(by_name: Mapping[str, Sequence[Row]]) -> list[str]:
    lines = []
    for name, group in by_name.items():
        texts = {_reason(row) for row in group if row.verdict not in ("ok", "needs")}
        lines += [f"- {name}: {text}" for text in sorted(texts)]
    return lines


def _reason(row: Row) -> str:
    if row.verdict == "wrong":
        return f"at {row.share:.0%} not eager's: {', '.join(row.different[:4])} ({len(row.different)} in all)"
    if row.verdict == "over":
        return f"at {row.share:.0%} counted {row.counted}, forecast {row.forecast}, budget {row.budget}; {row.reason}"
    return row.reason[:CLIPPED]
