"""Decisions of a plan, and the trace that results from them.

    Recompute("a", before="g"):      Offload("a", out="a", free="b"), Reload("a", back="f", use="g"):
        a = relu(x)                      a = relu(x)
        b = mm(a, w)                     a__out = offload(a)            # the copy out begins
        ...                              b = mm(a, w)
        a__1 = relu(x)                   a__free = free(a__out, a)      # it has ended: a is freed
        g = relu_backward(d, a__1)       ...
                                         a__in_1 = reload(a__out)       # the copy back begins
                                         f = ...
                                         a__back_1 = wait(a__in_1)      # it has ended
                                         g = relu_backward(d, a__back_1)

With `wire`, a value is cast before its copy out:

    Offload("a", out="a", free="b", wire="bf16"), Reload("a", back="f", use="g"):
        a = relu(x)
        a__wire = narrow(a)              # half the bytes; a is freed at once
        a__out = offload(a__wire)
        ...                              # and so on, until
        a__back_1 = wait(a__in_1)
        a__wide_1 = widen(a__back_1)     # as wide as before, but rounded
        g = relu_backward(d, a__wide_1)

A decision redefines a value: every later read reads its newest definition.  So bytes are allocated and freed at places
in the trace, and never depend on time.

    Stream("w"), Reload("w", back="f", use="b"):
        w = parameter()                  w = parameter()  # offloaded: no bytes here
        ...                              w__in_1 = reload(w)
        b = mm(x, w)                     f = ...
                                         w__back_1 = wait(w__in_1)
                                         b = mm(x, w__back_1)

The update reads offloaded values from the tier: a streamed input by its own name, a gradient by its `__out`.
Stream("s", on="host") makes the host update the states, and their parameters with them.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from . import ops
from .machine import CAST_WORKSPACE, cast_type
from .trace import Op, Storage, Trace, type_nbytes

EXTRAS = ("wire", "on", "to")  # fields that are printed only if they are set


def _print(self: Any) -> str:
    pairs = asdict(self)
    value = pairs.pop("value")
    facts = ", ".join(f"{name} {fact}" for name, fact in pairs.items() if fact or name not in EXTRAS)
    return f"{type(self).__name__.lower()} {value}" + (f": {facts}" if facts else "")


@dataclass(frozen=True, slots=True)
class Recompute:
    """Run the op of `value` again just before op `before`.  A plan may do so several times."""

    value: str
    before: str

    __str__ = _print


@dataclass(frozen=True, slots=True)
class Offload:
    """Begin to copy `value` to the tier after op `out`, and free it on the device after op `free`.

    With `wire` it is cast to that type for the copy, and so rounded.  It goes `to` another tier than the nearest.
    """

    value: str
    out: str
    free: str
    wire: str = ""
    to: str = ""

    __str__ = _print


@dataclass(frozen=True, slots=True)
class Reload:
    """Begin to copy `value` from the tier before op `back`, and wait for it before op `use`.

    A plan may do so several times.
    """

    value: str
    back: str
    use: str

    __str__ = _print


@dataclass(frozen=True, slots=True)
class Stream:
    """Leave `value`, an input, on the tier between its reloads, or on the one that `to` names.

    States may be updated `on` the host, without a reload.
    """

    value: str
    on: str = ""
    to: str = ""

    __str__ = _print


Decision = Recompute | Offload | Reload | Stream
KINDS = {"recompute": Recompute, "offload": Offload, "reload": Reload, "stream": Stream}
PLACES = {kind: tuple(field.name for field in fields(kind) if field.name not in EXTRAS) for kind in KINDS.values()}
HOST = "host"
Plan = tuple[Decision, ...]
Line = Callable[[Op, str], object]


def parse_plan(text: str) -> Plan:
    """Return the plan that `text` prints, one decision a line.

    Raises:
        ValueError: a line is not a decision.
    """
    return tuple(_parse_decision(line.strip()) for line in text.splitlines() if line.strip())


def _parse_decision(line: str) -> Decision:
    match = re.fullmatch(r"(\w+) ([^\s:]+)(?:: (.*))?", line)
    if match and (kind := KINDS.get(match[1])):
        facts = dict(fact.split(" ", 1) for fact in (match[3] or "").split(", ") if " " in fact)
        names = [field.name for field in fields(kind)][1:]
        if list(facts) == [name for name in names if name in facts or name not in EXTRAS]:
            decision = kind(match[2], **facts)
            if str(decision) == line:
                return decision
    raise ValueError(f"not a decision: {line!r}\nwrite e.g.: recompute relu_1: before mm_4")


def apply(trace: Trace, plan: Plan) -> Trace:
    """Return the trace that runs when `plan` is carried out on `trace`.

    Raises:
        ValueError: a decision names an op that the trace does not have, or a cast of what may not be cast.
    """
    for decision in plan:
        if isinstance(decision, Stream) and decision.on not in ("", HOST):
            raise ValueError(f"{decision}: states are updated on the device or on {HOST!r}")
        for name in PLACES[type(decision)]:
            if (place := getattr(decision, name)) not in trace.op:
                raise ValueError(f"{decision}: the trace has no op {place!r}")
    return _Writer(trace, plan).write()


class _Writer:
    """Writes the new trace line by line."""

    def __init__(self, trace: Trace, plan: Plan) -> None:
        self.trace = trace
        self.redefined: dict[str, Op] = {}  # the newest definition of each value that was redefined
        self.on_tier: dict[str, Op] = {}  # the op that stands for each value on the tier
        self.streamed = {decision.value: decision for decision in plan if isinstance(decision, Stream)}
        self.tier = {decision.value: decision.to for decision in plan if isinstance(decision, Offload)}
        self.recomputed: dict[str, int] = {}
        self.reloaded: dict[str, int] = {}
        self.wires: dict[str, str] = {}  # the type of the copy of each value that is cast
        self.lines: list[Op] = []
        self.before: dict[str, list[tuple[Line, str]]] = {}
        self.after: dict[str, list[tuple[Line, str]]] = {}
        for decision in plan:
            self._place(decision)

    def write(self) -> Trace:
        for op in self.trace.ops:
            if op.name in self.before:
                self._lines(self.before[op.name], op)
            if op.phase != "update" and op.name not in self.streamed and self.redefined.keys().isdisjoint(op.reads):
                self.lines.append(op)  # most ops
            else:
                self._define(op)
            if op.name in self.after:
                self._lines(self.after[op.name], op)
        outputs = tuple(
            (kind, self.on_tier[value].name if self._is_on_tier(value) else value) for kind, value in self.trace.outputs
        )
        return Trace(tuple(self.lines), outputs)

    def _lines(self, lines: list[tuple[Line, str]], op: Op) -> None:
        """Write the lines that decisions add at an op."""
        phase = "backward" if op.phase == "update" else op.phase  # updates may run in backward
        for line, value in lines:
            line(self.trace.op[value], phase)

    def _is_on_tier(self, value: str) -> bool:
        """Return True if the newest definition of `value` is on the tier."""
        return value in self.streamed or (value in self.on_tier and value not in self.reloaded)

    def _define(self, op: Op) -> None:
        new = self._rewritten(op)
        if op.name in self.streamed:
            makes = tuple(Storage(made.name, 0) for made in op.makes)
            stream = self.streamed[op.name]
            new = replace(new, makes=makes, offloaded=True, on_host=stream.on == HOST, tier=stream.to)
            self.on_tier[op.name] = new
        self.lines.append(new)
        if new is not op:
            self.redefined[op.name] = new

    def _place(self, decision: Decision) -> None:
        """Note the lines that a decision adds, by op."""
        value = decision.value
        match decision:
            case Recompute():
                if self.trace.op[value].draws and value not in self.recomputed:
                    self.recomputed[value] = 0
                    self.before.setdefault(value, []).append((self._note_state, value))
                self.before.setdefault(decision.before, []).append((self._recompute, value))
            case Offload():
                if decision.wire:
                    self.wires[value] = cast_type(type := self.trace.op[value].type, decision.wire)
                    if not self.wires[value]:
                        raise ValueError(f"{decision}: {type or 'the value'} can't be cast to {decision.wire!r}")
                self.after.setdefault(decision.out, []).append((self._offload, value))
                self.after.setdefault(decision.free, []).append((self._free, value))
            case Reload():
                self.before.setdefault(decision.back, []).append((self._reload, value))
                self.before.setdefault(decision.use, []).append((self._wait, value))

    def _note_state(self, op: Op, phase: str) -> None:
        self._runtime(ops.rng_name(op.name), ops.RNG_STATE, (), phase, op.draws, type=f"u8[{op.draws}]")

    def _recompute(self, op: Op, phase: str) -> None:
        self.recomputed[op.name] = number = self.recomputed.get(op.name, 0) + 1
        name = ops.recompute_name(op.name, number)
        swap, swap_back = ops.swap_names(name)
        if op.draws:
            self._runtime(swap, ops.SWAP_RNG, (ops.rng_name(op.name),), phase, op.draws, type=f"u8[{op.draws}]")
        makes = tuple(Storage(name + made.name.removeprefix(op.name), made.nbytes) for made in op.makes)
        own = {old.name: new.name for old, new in zip(op.makes, makes, strict=True)}
        reads, holds = self._read(op)
        holds = tuple([own.get(held, held) for held in holds])
        self.redefined[op.name] = self._add(op.rewritten(name, reads, makes, holds, phase, op.name))
        if op.draws:
            self._runtime(swap_back, ops.SWAP_RNG, (swap,), phase, op.draws, type=f"u8[{op.draws}]")

    def _offload(self, op: Op, phase: str) -> None:
        sent, type = self._newest(op.name).name, op.type
        if wire := self.wires.get(op.name):
            reads, sent, type = (sent,), ops.narrow_name(op.name), wire
            nbytes = type_nbytes(wire)
            self._runtime(sent, ops.NARROW, reads, phase, nbytes, type=wire, where=op.where, workspace=CAST_WORKSPACE)
        empty = type.partition("[")[0] + "[0]"
        self.on_tier[op.name] = self._runtime(
            ops.offload_name(op.name), ops.OFFLOAD, (sent,), phase, 0, type=empty, tier=self.tier[op.name]
        )

    def _free(self, op: Op, phase: str) -> None:
        sent = ops.narrow_name(op.name) if op.name in self.wires else self._newest(op.name).name
        self._runtime(ops.free_name(op.name), ops.FREE, (ops.offload_name(op.name), sent), phase)

    def _reload(self, op: Op, phase: str) -> None:
        self.reloaded[op.name] = number = self.reloaded.get(op.name, 0) + 1
        wire = self.wires.get(op.name)
        nbytes, type = (type_nbytes(wire), wire) if wire else (self.trace.nbytes[op.holds[0]], op.type)
        reads = (op.name if op.name in self.streamed else ops.offload_name(op.name),)
        self._runtime(ops.reload_name(op.name, number), ops.RELOAD, reads, phase, nbytes, type=type, where=op.where)

    def _wait(self, op: Op, phase: str) -> None:
        number = self.reloaded[op.name]
        holds = (ops.reload_name(op.name, number),)
        back, type = ops.wait_name(op.name, number), self.wires.get(op.name, op.type)
        self.redefined[op.name] = self._runtime(back, ops.WAIT, holds, phase, holds=holds, type=type, where=op.where)
        if op.name in self.wires:
            wide, nbytes = ops.widen_name(op.name, number), self.trace.nbytes[op.holds[0]]
            self.redefined[op.name] = self._runtime(
                wide, ops.WIDEN, (back,), phase, nbytes, type=op.type, where=op.where
            )

    def _runtime(
        self, name: str, fn: str, reads: tuple[str, ...], phase: str, nbytes: int | None = None,
        holds: tuple[str, ...] = (), type: str = "", where: str = "", workspace: int = 0, tier: str = "",
    ) -> Op:  # fmt: skip
        makes = () if nbytes is None else (Storage(name, nbytes),)
        holds = holds or tuple(storage.name for storage in makes)
        return self._add(
            Op(name, fn, reads, makes, holds, phase, workspace=workspace, tier=tier, type=type, where=where)
        )

    def _add(self, op: Op) -> Op:
        self.lines.append(op)
        return op

    def _newest(self, value: str) -> Op:
        return self.redefined.get(value) or self.trace.op[value]

    def _rewritten(self, op: Op) -> Op:
        """Return `op` with reads of the newest definitions."""
        reads, holds = self._read(op)
        if (reads, holds) == (op.reads, op.holds):
            return op
        return op.rewritten(op.name, reads, op.makes, holds, op.phase, op.recomputes)

    def _read(self, op: Op) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Return the newest definitions of what an op reads, and the storages that it holds then."""
        update = op.phase == "update"
        if not update and self.redefined.keys().isdisjoint(op.reads):
            return op.reads, op.holds
        newest = [self.on_tier[name] if update and self._is_on_tier(name) else self._newest(name) for name in op.reads]
        is_view = op.holds != tuple([made.name for made in op.makes])
        return tuple([new.name for new in newest]), self._viewed(op, newest) if is_view else op.holds

    def _viewed(self, op: Op, newest: list[Op]) -> tuple[str, ...]:
        """Return the storages of a view that reads the newest definitions."""
        moved = {
            old: new
            for name, definition in zip(op.reads, newest, strict=True)
            for old, new in zip(self.trace.op[name].holds, definition.holds, strict=True)
        }
        return tuple(moved.get(held, held) for held in op.holds)
