"""Random steps and random valid plans for them, for hypothesis.

    @given(traces())     inputs, 1-25 forward ops, and a backward that walks them the other way and reads what they made
    @given(planned())    a step and a plan for it: of random placements, or of random decisions

A step is decoded from bytes, ten for each op: they are drawn fast, and shrink to zeros, which decode to a plain chain.
A failing example is printed as text as well.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from hypothesis import note
from hypothesis import strategies as st

from passes import Cast, Link, Machine, Offload, Op, Plan, Recompute, Reload, Storage, Streaming, Trace, check
from passes.analysis.reuse_gaps import ReuseGaps
from passes.ir.decisions import Decision
from passes.schedule.schedule import CAST, OFFLOADED, STATE_OFFLOADED, Placement, schedule

FORWARD = ("plain", "plain", "view", "several", "random", "dropout", "split", "once", "slice", "empty")
BACKWARD = ("plain", "plain", "skip", "view", "several", "random")
LINKS = (0.0, 0.5, 3.0, 100.0, 1e6)  # bytes per microsecond
CASTS = (1.0, 50.0, 1e5)
STATE = 16  # bytes of the generator's state


@dataclass(frozen=True, slots=True)
class Gene:
    """The properties of one op; `reads` counts back from the newest value."""

    kind: str
    reads: tuple[int, ...]
    nbytes: int
    us: float
    workspace: int
    hands: bool

    @classmethod
    def of(cls, code: bytes, kinds: Sequence[str]) -> Gene:
        """Decode a gene."""
        kind, count, near, middle, far, hands, hasty, busy, high, low = code
        reads = (near % 4, middle % 8, far)[: 1 + count % 3]
        nbytes = (high * 256 + low) % 10_001
        workspace = max(0, busy - 100) * 30
        return cls(
            kinds[kind % len(kinds)], reads, nbytes, hasty / 4, workspace, hands > 128
        )  # sums of quarters are exact


@st.composite
def traces(draw: st.DrawFn, max_forward: int = 25) -> Trace:
    """Draw a step like those of `summarize`; every invariant holds."""
    count = draw(st.integers(1, max_forward))
    code = st.binary(min_size=10, max_size=10)
    codes = draw(st.lists(st.tuples(code, code), min_size=count, max_size=count))
    trace = decoded(codes, late=draw(st.booleans()), updated=draw(st.booleans()))
    note(str(trace))
    check(trace)
    return trace


def decoded(codes: Sequence[tuple[bytes, bytes]], late: bool = False, updated: bool = False) -> Trace:
    """Decode the forward and backward ops of a step.

    With `late`, tangents are at the head of backward; with `updated`, the optimizer's update is the last op.
    """
    forward = [Gene.of(code, FORWARD) for code, _ in codes]
    backward = [Gene.of(code, BACKWARD) for _, code in codes]
    return _Writer().write(forward, backward, late, updated)


def machines(links: Sequence[float] = LINKS, wires: Sequence[str] = ("",)) -> st.SearchStrategy[Machine]:
    """Draw a machine without a tier, or with slow or fast links; the test sets the budget."""
    rate, cast = st.sampled_from(links), st.sampled_from(CASTS)
    return st.builds(
        Machine, st.just(0),
        link=st.builds(
            Link, rate, rate, st.sampled_from((0, 100, 3_000)), st.sampled_from((0.0, 4.0)),
            st.sampled_from((0.0, 0.02)), st.booleans(),
        ),
        cast=st.builds(Cast, st.sampled_from(wires), cast, cast),
        streaming=st.builds(
            Streaming, window=st.sampled_from((0, 700)), update_staging=st.sampled_from((0, 500)),
        ),
    )  # fmt: skip


@st.composite
def legal_fates(draw: st.DrawFn, gaps: ReuseGaps, wire: str = "", homes: bool = True) -> dict[str, Placement]:
    """Draw a legal placement for each movable storage; with `homes` also for some inputs and gradients."""
    numbers = draw(st.lists(st.integers(0, 8), min_size=len(gaps.producer), max_size=len(gaps.producer)))
    found = {}
    for storage, number in zip(gaps.producer, numbers, strict=True):
        again = () if gaps.trace.op[gaps.producer[storage]].once else (Placement.RECOMPUTE, Placement.RECOMPUTE_PER_USE)
        may = (Placement.KEEP, *again, *ways(gaps, storage, wire))
        found[storage] = may[number % len(may)]
    if not homes:
        return found
    return found | draw(
        st.dictionaries(st.sampled_from(sorted(gaps.streamable.values)), st.sampled_from(STATE_OFFLOADED))
    )


def ways(gaps: ReuseGaps, storage: str, wire: str = "") -> tuple[Placement, ...]:
    """Return the placements that offload a storage."""
    if storage not in gaps.whole_value:
        return ()
    return tuple(way for way in OFFLOADED if way not in CAST or gaps.wire_nbytes(storage, wire))


@st.composite
def plans(draw: st.DrawFn, trace: Trace) -> Plan:
    """Draw a valid plan for `trace`."""
    way = draw(st.sampled_from((scheduled, recomputes, trips)))
    plan = draw(way(trace))
    note("\n".join(map(str, plan)))
    return plan


@st.composite
def planned(draw: st.DrawFn) -> tuple[Trace, Plan]:
    trace = draw(traces())
    return trace, draw(plans(trace))


@st.composite
def scheduled(draw: st.DrawFn, trace: Trace) -> Plan:
    """Draw the plan of random placements."""
    gaps = ReuseGaps(trace)
    machine = draw(machines(LINKS[1:], ("", "bf16")))
    return schedule(gaps, draw(legal_fates(gaps, machine.cast.dtype)), machine)


@st.composite
def recomputes(draw: st.DrawFn, trace: Trace) -> Plan:
    """Draw recomputation of some values, some of them several times, anywhere after they were made."""
    last = len(trace.ops) - 1
    again = [i for i, op in enumerate(trace.ops[:-1]) if not op.is_input and not op.once]
    if not again:
        return ()
    pairs = draw(st.lists(st.tuples(st.sampled_from(again), st.integers(0, last)), max_size=8))
    return tuple(Recompute(trace.ops[i].name, trace.ops[min(i + 1 + far, last)].name) for i, far in pairs)


@st.composite
def trips(draw: st.DrawFn, trace: Trace) -> Plan:
    """Draw values to offload between two of their reads, with recomputation of their views; some are reloaded twice."""
    gaps = ReuseGaps(trace)
    plan: list[Decision] = []
    for storage in draw(st.lists(st.sampled_from(sorted(gaps.whole_value) or [""]), unique=True, max_size=3)):
        if storage:
            places = draw(st.lists(st.integers(0, 100), min_size=7, max_size=7))
            plan += _trip(gaps, storage, places)
    return tuple(plan)


def _trip(gaps: ReuseGaps, storage: str, places: Sequence[int]) -> Plan:
    """Offload and reload between two neighbouring reads of `storage`, cast or not; empty if that is impossible."""
    trace, root = gaps.trace, gaps.whole_value[storage]
    first = gaps.trace.index[root]
    reads = [i for i, op in enumerate(trace.ops) if any(storage in trace.op[name].holds for name in op.reads)]
    stops = [first, *(i for i in reads if i > first)]
    gap = places[0] % len(stops)
    last = stops[gap + 1] if gap + 1 < len(stops) else len(trace.ops) - 1
    if last <= stops[gap]:
        return ()
    free = _between(stops[gap], last - 1, places[1])
    out = _between(first, free, places[2])
    use = _between(free + 1, last, places[3])
    back = _between(free + 1, use, places[4])
    views = _views_read_from(gaps, storage, use)
    if views is None:
        return ()
    name = [op.name for op in trace.ops]
    wire = "bf16" if places[5] % 2 and gaps.wire_nbytes(storage, "bf16") else ""
    trip = Offload(root, name[out], name[free], wire), Reload(root, name[back], name[use])
    later = _between(use, len(name) - 1, places[5])
    latest = _between(later, len(name) - 1, places[6])
    second = [Reload(root, name[later], name[latest])] * (places[6] % 2)
    return (*trip, *(Recompute(view, name[use]) for view in views), *second)


def _views_read_from(gaps: ReuseGaps, storage: str, use: int) -> list[str] | None:
    """Return the views of the root that are made before op `use` and read later; None if another value is read."""
    trace, root = gaps.trace, gaps.whole_value[storage]
    read = {name for op in trace.ops[use:] for name in op.reads}
    holders = [op.name for op in trace.ops[:use] if storage in op.holds and op.name != root]
    wanted: list[str] = []
    for name in reversed(holders):
        if name in read:
            if trace.op[name].makes or gaps.trace.index[name] < gaps.trace.index[root]:
                return None
            wanted.append(name)
            read.update(trace.op[name].reads)
    return wanted[::-1]


def _between(least: int, most: int, number: int) -> int:
    return least + number % (most - least + 1)


class _Writer:
    """Decodes genes; forward reads `values`, backward reads `gradients`, and the step returns `hands`."""

    def __init__(self) -> None:
        self.ops: list[Op] = []
        self.holds: dict[str, tuple[str, ...]] = {}
        self.nbytes: dict[str, int] = {}
        self.values: list[str] = []
        self.gradients: list[str] = []
        self.hands: list[tuple[str, str]] = []

    def write(self, forward: Sequence[Gene], backward: Sequence[Gene], late: bool, updated: bool) -> Trace:
        self.values += [self._input(kind, 100) for kind in ("buffer", "parameter", "input")]
        inputs = set(self.values)
        if updated:
            self._input("state", 300)
        if not late:
            self.gradients.append(self._input("tangent", 70))
        for i, gene in enumerate(forward):
            self._forward(f"f{i}", gene, inputs)
        if late:
            self.gradients.append(self._input("tangent", 70, phase="backward"))
        for i, gene in enumerate(backward):
            self._backward(f"b{i}", gene)
        if updated:
            reads = ("state", *(value for kind, value in self.hands if kind == "gradient"))
            self._add(Op("update", "AdamW.step", reads, phase="update", us=5.0, workspace=900))
        return Trace(tuple(self.ops), tuple(self.hands))

    def _input(self, kind: str, nbytes: int, phase: str = "forward") -> str:
        made = (Storage(kind, nbytes),)
        self.nbytes[kind] = nbytes
        return self._add(
            Op(kind, kind, makes=made, holds=(kind,), phase=phase, type=f"u8[{nbytes}]", where=f"at {kind}")
        )

    def _forward(self, name: str, gene: Gene, inputs: set[str]) -> None:
        reads = tuple(dict.fromkeys(_back(self.values, back) for back in gene.reads))
        made = self._op(name, gene, reads, "forward")
        self.values += made
        if gene.hands and len(self.hands) < 2 and inputs.isdisjoint(self.holds[made[-1]]):
            self.hands.append(("output", made[-1]))

    def _backward(self, name: str, gene: Gene) -> None:
        if gene.kind == "skip":
            return
        # The k-th backward op reads the k-th value from the end; `reads` counts back from there.
        opposite = self.values[: max(1, len(self.values) - int(name[1:]))]
        reads = (_back(self.gradients, gene.reads[0] // 3), *(_back(opposite, back) for back in gene.reads))
        if gene.kind == "view" and gene.hands:
            self.values.append(self._op(name, gene, reads[1:], "backward")[0])  # a view of a value of forward
            return
        made = self._op(name, gene, tuple(dict.fromkeys(reads)), "backward")
        self.gradients += made
        if gene.hands and gene.kind != "view":
            self.hands.append(("gradient", made[-1]))

    def _op(self, name: str, gene: Gene, reads: tuple[str, ...], phase: str) -> list[str]:
        """Write the op, and a getitem for each of several results; return the values that can be read."""
        made = tuple(Storage(part, nbytes) for part, nbytes in _made(name, gene))
        holds = tuple(storage.name for storage in made)
        if not made:
            reads, holds = reads[:1], self.holds[reads[0]]
        self.nbytes |= {storage.name: storage.nbytes for storage in made}
        # A view shows all of its storage or a part of it.
        piece = gene.kind in ("slice", "split") or (gene.kind == "view" and gene.us % 1)
        types = ["u8[7]" if piece else _type(self.nbytes[held]) for held in holds]
        op = Op(
            name, f"aten.{gene.kind}.default", reads, made, holds, phase, gene.us * bool(made), gene.workspace * bool(made),
            STATE * (gene.kind in ("random", "dropout")), gene.kind == "once", type=", ".join(types), where=f"model.py:{len(self.ops)}",
        )  # fmt: skip
        if gene.kind == "split":
            self._add(replace(op, type="u8[7], u8[7]"))
            return [self._part(name, i, holds, "u8[7]", phase) for i in range(2)]
        self._add(op)
        if len(made) < 2:
            return [name]
        taken = range(len(made) - (gene.workspace > 0))  # sometimes the last result has no user
        return [self._part(name, i, holds[i : i + 1], types[i], phase) for i in taken]

    def _part(self, name: str, i: int, holds: tuple[str, ...], type: str, phase: str) -> str:
        return self._add(Op(f"{name}_{i}", "getitem", (name,), holds=holds, phase=phase, type=type))

    def _add(self, op: Op) -> str:
        self.ops.append(op)
        self.holds[op.name] = op.holds
        return op.name


def _type(nbytes: int) -> str:
    return f"u8[{nbytes}]" if nbytes % 4 else f"f32[{nbytes // 4}]"


def _made(name: str, gene: Gene) -> list[tuple[str, int]]:
    """Return the storages that an op makes, each with its bytes; a view makes none."""
    match gene.kind:
        case "view" | "split":
            return []
        case "several" | "dropout":
            return [(f"{name}.{i}", gene.nbytes // (i + 1)) for i in range(3 if gene.us % 1 else 2)]
        case "empty":
            return [(name, 0)]
    return [(name, gene.nbytes)]


def _back(values: Sequence[str], back: int) -> str:
    return values[-1 - back % len(values)]
