"""A training step as straight-line text.

    forward:
    w = parameter()  # f32[512, 1024] | makes w:2097152 | at layers.0.weight
    a = aten.mm.default(x, w)  # f32[8, 1024] | makes a:32768 | 10 us | at layers.0 model.py:12
    v = aten.view.default(a)  # f32[8192] | holds a
    backward:
    ...
    return output v, gradient g

A line defines a value.  An op makes storages.  Its value holds storages: its own, or (a view) those of what it reads.
Memory is counted per storage, so views cost nothing.  `parse(str(trace)) == trace`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

PHASES = ("forward", "backward", "update")
INPUTS = ("parameter", "buffer", "input", "gradient", "state", "tangent")
OTHER_FORWARDS = "other_forwards"  # an input that stands for the memory of other open forwards
_INPUTS = frozenset(INPUTS)  # looked up for every op
FLAGS = ("once", "offloaded", "on_host")
NOTES = ("makes", "holds", "workspace", "draws", "tier", "microbatch", "section", "recomputes")
ITEMSIZE = {
    "f64": 8,
    "f32": 4,
    "f16": 2,
    "bf16": 2,
    "f8": 1,
    "i64": 8,
    "i32": 4,
    "i16": 2,
    "i8": 1,
    "u8": 1,
    "b8": 1,
    "c64": 8,
    "c128": 16,
}


@dataclass(frozen=True, slots=True)
class Storage:
    """Bytes that an op makes; `nbytes` as the device's allocator counts them."""

    name: str
    nbytes: int

    def __str__(self) -> str:
        return f"{self.name}:{self.nbytes}"


@dataclass(frozen=True, slots=True)
class Op:
    """One line of a trace, and the value that it defines."""

    name: str
    fn: str
    reads: tuple[str, ...] = ()
    makes: tuple[Storage, ...] = ()
    holds: tuple[str, ...] = ()
    phase: str = "forward"
    us: float = 0.0
    workspace: int = 0  # bytes that the op allocates and frees while it runs
    draws: int = 0  # bytes of the generator's state, for an op that draws random numbers
    once: bool = False  # may not run a second time
    offloaded: bool = False  # an input on the tier
    on_host: bool = False  # states on the tier that the host updates, with their parameters
    tier: str = ""  # that an input is on, or a copy out goes to, if it is not the nearest one
    recomputes: str = ""  # the op that this one runs again
    microbatch: int = 0  # the micro-batch that it works on, from 1
    section: int = 0  # the section that it belongs to, from 1
    type: str = ""
    where: str = ""

    @property
    def is_input(self) -> bool:
        return self.fn in _INPUTS

    @property
    def nbytes(self) -> int:
        return sum(storage.nbytes for storage in self.makes)

    def rewritten(
        self, name: str, reads: tuple[str, ...], makes: tuple[Storage, ...], holds: tuple[str, ...], phase: str,
        recomputes: str,
    ) -> Op:  # fmt: skip
        """Do what `dataclasses.replace` does, in a fraction of its time."""
        return Op(
            name, self.fn, reads, makes, holds, phase, self.us, self.workspace, self.draws, self.once, self.offloaded,
            self.on_host, self.tier, recomputes, self.microbatch, self.section, self.type, self.where,
        )  # fmt: skip

    def priced(self, makes: tuple[Storage, ...], type: str, us: float, workspace: int) -> Op:
        """Return the op with other sizes and prices; as `rewritten`, for time."""
        return Op(
            self.name, self.fn, self.reads, makes, self.holds, self.phase, us, workspace, self.draws, self.once,
            self.offloaded, self.on_host, self.tier, self.recomputes, self.microbatch, self.section, type, self.where,
        )  # fmt: skip

    def __str__(self) -> str:
        notes = [self.type]
        if self.makes:
            notes.append("makes " + ", ".join(map(str, self.makes)))
        if self.holds != tuple(storage.name for storage in self.makes):
            notes.append(f"holds {', '.join(self.holds)}")
        notes += [f"{self.us!r} us"] * bool(self.us) + [f"workspace {self.workspace}"] * bool(self.workspace)
        notes += [f"draws {self.draws}"] * bool(self.draws) + ["once"] * self.once + ["offloaded"] * self.offloaded
        notes += ["on_host"] * self.on_host + [f"tier {self.tier}"] * bool(self.tier)
        notes += [f"microbatch {self.microbatch}"] * bool(self.microbatch)
        notes += [f"section {self.section}"] * bool(self.section)
        notes += [f"recomputes {self.recomputes}"] * bool(self.recomputes) + [f"at {self.where}"] * bool(self.where)
        text = " | ".join(note for note in notes if note)
        return f"{self.name} = {self.fn}({', '.join(self.reads)})" + (f"  # {text}" if text else "")


@dataclass(frozen=True)
class Trace:
    """A step: its ops in the order in which they run, and its outputs as (kind, value)."""

    ops: tuple[Op, ...]
    outputs: tuple[tuple[str, str], ...] = ()

    @cached_property
    def op(self) -> dict[str, Op]:
        return {op.name: op for op in self.ops}

    @cached_property
    def index(self) -> dict[str, int]:
        """Map each op to its place in the order."""
        return {op.name: i for i, op in enumerate(self.ops)}

    @cached_property
    def nbytes(self) -> dict[str, int]:
        """Map each storage to its bytes."""
        return {storage.name: storage.nbytes for op in self.ops for storage in op.makes}

    def held_by(self, values: Iterable[str]) -> set[str]:
        """Return the storages that these values hold."""
        return {storage for value in values for storage in self.op[value].holds}

    @cached_property
    def boundary(self) -> int:
        """Return the index of the first backward op, or the number of ops."""
        return next((i for i, op in enumerate(self.ops) if op.phase == "backward"), len(self.ops))

    @cached_property
    def other_nbytes(self) -> int:
        """Return the bytes that are counted for other open forwards."""
        return self.op[OTHER_FORWARDS].nbytes if OTHER_FORWARDS in self.op else 0

    @cached_property
    def saved(self) -> dict[str, int]:
        """Map each storage that forward makes and backward reads to its bytes."""
        forward, later = self.ops[: self.boundary], self.ops[self.boundary :]
        read = self.held_by(name for op in later for name in op.reads)
        return {made.name: made.nbytes for op in forward if not op.is_input for made in op.makes if made.name in read}

    def __repr__(self) -> str:
        return f"<Trace: {len(self.ops)} ops>"  # its text is `str`, of a line for each

    def __str__(self) -> str:
        lines, phase = [], ""
        for op in self.ops:
            if op.phase != phase:
                phase = op.phase
                lines.append(f"{phase}:")
            lines.append(str(op))
        return "\n".join([*lines, "return " + ", ".join(f"{kind} {value}" for kind, value in self.outputs)]) + "\n"


def type_nbytes(type: str) -> int:
    """Return the bytes of a dense tensor that is printed as `type`; -1 if it is not one tensor."""
    dtype, _, shape = type.removesuffix("]").partition("[")
    if dtype not in ITEMSIZE or not type.endswith("]") or "[" in shape:
        return -1
    return ITEMSIZE[dtype] * math.prod(int(size) for size in shape.split(",") if size.strip())


LINE = re.compile(r"(?P<name>\S+) = (?P<fn>[^\s(]+)\((?P<reads>[^)]*)\)(?:  # (?P<notes>.*))?")


def parse(text: str) -> Trace:
    """Return the trace that `text` prints.

    Raises:
        ValueError: a line is not a line of a trace; the message shows it beside a right one.
    """
    ops: list[Op] = []
    outputs: tuple[tuple[str, str], ...] = ()
    phase = "forward"
    for line in filter(None, map(str.strip, text.split("\n"))):  # a source line may hold other ends of lines
        if line.endswith(":") and line[:-1] in PHASES:
            phase = line[:-1]
        elif line == "return" or line.startswith("return "):
            pairs = [pair.split() for pair in _names(line.removeprefix("return"))]
            outputs = tuple((kind, value) for kind, value in pairs)
        else:
            ops.append(_read_op(line, phase))
    return Trace(tuple(ops), outputs)


def _read_op(line: str, phase: str) -> Op:
    try:
        return _parse_op(line, phase)
    except ValueError:
        right = "a = aten.mm.default(x, w)  # f32[8, 16] | makes a:512 | 10.0 us"
        raise ValueError(f"not a line of a trace: {line!r}\nwrite e.g.: {right}") from None


def _parse_op(line: str, phase: str) -> Op:
    match = LINE.fullmatch(line)
    if not match:
        raise ValueError("no name = fn(reads)")
    notes, where = _cut(match["notes"] or "", "at ")
    facts = _parse_notes(notes)
    makes = tuple(Storage(name, int(nbytes)) for name, nbytes in (s.rsplit(":", 1) for s in _names(facts["makes"])))
    holds = tuple(_names(facts["holds"])) if facts["holds"] else tuple(storage.name for storage in makes)
    return Op(
        name=match["name"], fn=match["fn"], reads=tuple(_names(match["reads"])), makes=makes, holds=holds, phase=phase,
        us=float(facts["us"] or 0.0), workspace=int(facts["workspace"] or 0), draws=int(facts["draws"] or 0),
        once=bool(facts["once"]), offloaded=bool(facts["offloaded"]), on_host=bool(facts["on_host"]),
        tier=facts["tier"], recomputes=facts["recomputes"], microbatch=int(facts["microbatch"] or 0),
        section=int(facts["section"] or 0), type=facts["type"], where=where,
    )  # fmt: skip


def _cut(notes: str, mark: str) -> tuple[str, str]:
    """Split off the last note if it begins with `mark`: a source line may hold any text."""
    if notes.startswith(mark):
        return "", notes.removeprefix(mark)
    before, separator, after = notes.partition(f" | {mark}")
    return before, after if separator else ""


def _parse_notes(notes: str) -> dict[str, str]:
    facts: dict[str, str] = dict.fromkeys(("type", "us", *FLAGS, *NOTES), "")
    for note in filter(None, notes.split(" | ")):
        word, _, rest = note.partition(" ")
        if note in FLAGS:
            facts[note] = note
        elif word in NOTES:
            facts[word] = rest
        elif rest == "us":
            facts["us"] = word
        else:
            facts["type"] = note
    return facts


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]
