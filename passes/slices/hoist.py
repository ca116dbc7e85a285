"""Run the backward ops of a chain in forward, with a tangent of 1.

    l = loss(b)                                      l = loss(b)
    backward:                                        d = loss_backward(one, b)    # one = 1
    d = loss_backward(t, b)                 ->       s__parts = mm(d, x)
    s = mm(d, x)                                     backward:
                                                     s = scale_(s__parts, t)      # in place; nothing for a tangent of 1

This is right if every op between the tangent and what the chain returns is linear in what depends on the tangent. With
another tangent than a power of two, results round differently.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, replace

from ..ir.trace import Op, Storage, Trace
from .row_rule import RowFacts

SCALE, ONE = "memgraph_slices.scale_.default", "aten.ones.default"
SMALL_RANGE = "f16"  # may underflow without the scale that a tangent brings


@dataclass(frozen=True)
class Hoisted:
    """Backward ops that run in forward.

    Attributes:
        tangent: what they are linear in.
        before: backward ops outside of the chain that it depends on; they are copied.
        dependent: the ops of both that depend on the tangent.
        scales: values of the chain among these that other ops read.
        dropped: backward ops that nothing reads any more.
        mark: behind the names of what is computed with a tangent of 1; another slice has its own.
    """

    tangent: Op
    before: tuple[str, ...]
    dependent: frozenset[str]
    scales: frozenset[str]
    dropped: frozenset[str]
    mark: str = "__one"

    def source(self, value: str) -> str:
        """Return the name of a value when it is computed in forward."""
        return f"{value}{self.mark}" if value in self.before or value == self.tangent.name else value

    def prologue(self, trace: Trace) -> Iterable[Op]:
        """Yield the tangent of 1, and the copies of ops outside of the chain."""
        one = self.source(self.tangent.name)
        made = Storage(one, self.tangent.makes[0].nbytes)
        yield Op(one, ONE, (), (made,), (one,), "forward", type=self.tangent.type)
        renamed = {self.tangent.makes[0].name: one}
        for op in map(trace.op.__getitem__, self.before):
            name = self.source(op.name)
            makes = tuple(Storage(name + made.name.removeprefix(op.name), made.nbytes) for made in op.makes)
            renamed |= {old.name: new.name for old, new in zip(op.makes, makes, strict=True)}
            holds = tuple(renamed.get(held, held) for held in op.holds)
            yield replace(
                op, name=name, reads=tuple(map(self.source, op.reads)), makes=makes, holds=holds, phase="forward"
            )

    def scaled(self, op: Op) -> Op:
        """Return the op that scales a result in backward."""
        parts = f"{op.name}__parts"
        reads, where = (parts, self.tangent.name), op.where
        return Op(op.name, SCALE, reads, (), (parts,), "backward", once=True, type=op.type, where=where)


def hoisted(trace: Trace, chain: Collection[str]) -> Hoisted | None:
    """Return what runs in forward; None if the chain is in one phase.

    Raises:
        ValueError: the chain depends on several tangents, on none, or on one that is not a scalar; or what it needs of
            backward can't run in forward as well.
    """
    phases = {trace.op[name].phase for name in chain}
    if phases != {"forward", "backward"}:
        return None
    before = _backward_ancestors(trace, chain)
    tangents = [op for op in before if op.fn == "tangent"]
    if len(tangents) != 1 or not tangents[0].type.endswith("[]"):
        raise ValueError(f"the chain depends on {len(tangents)} tangents; it can run in forward with one, of a scalar")
    outside = tuple(op.name for op in before if not op.is_input)
    if repeats := [name for name in outside if trace.op[name].once or trace.op[name].draws]:
        raise ValueError(f"the chain depends on {repeats[0]}, which may run once, and in backward")
    dependent = _dependents(trace, tangents[0].name, {*outside, *chain})
    read = {read for op in trace.ops if op.name not in chain for read in op.reads} | {v for _, v in trace.outputs}
    scales = frozenset(name for name in chain if name in dependent and name in read)
    number = sum(op.fn == ONE for op in trace.ops)  # slices that have their own
    mark = f"__one{number + 1}" if number else "__one"
    return Hoisted(tangents[0], outside, dependent, scales, _dropped(trace, chain, outside, scales), mark)


def can_hoist(trace: Trace, chain: Collection[str], facts: Callable[[str], RowFacts]) -> bool:
    """Return True if the chain may run in forward, or is in one phase."""
    try:
        early = hoisted(trace, chain)
    except ValueError:
        return False
    if early is None:
        return True
    for op in map(trace.op.__getitem__, early.dependent):
        reads = {i for i, read in enumerate(op.reads) if read in early.dependent or read == early.tangent.name}
        if not facts(op.name).is_linear(reads) or op.type.startswith(SMALL_RANGE):
            return False
    own = {*early.before, *chain}
    made_late = {op.name for op in trace.ops if op.phase == "backward" or op.fn in ("gradient", "tangent")}
    outside = {read for name in own for read in trace.op[name].reads} - own - {early.tangent.name}
    return outside.isdisjoint(made_late)


def _backward_ancestors(trace: Trace, chain: Collection[str]) -> list[Op]:
    """Return the tangents and the backward ops outside of a chain that it depends on."""
    needed = {read for name in chain for read in trace.op[name].reads}
    found = []
    for op in reversed(trace.ops):
        if op.name in needed and op.name not in chain and (op.phase == "backward" or op.fn == "tangent"):
            found.append(op)
            needed.update(op.reads)
    return found[::-1]


def _dependents(trace: Trace, tangent: str, own: Collection[str]) -> frozenset[str]:
    """Return those of `own` that depend on the tangent."""
    dependent = {tangent}
    for op in trace.ops:
        if op.name in own and not dependent.isdisjoint(op.reads):
            dependent.add(op.name)
    return frozenset(dependent - {tangent})


def _dropped(trace: Trace, chain: Collection[str], outside: Collection[str], scales: Collection[str]) -> frozenset[str]:
    """Return the backward ops of the chain, and those before it that nothing else reads."""
    dropped = {name for name in chain if trace.op[name].phase == "backward" and name not in scales}
    returned = {value for _, value in trace.outputs}
    users: dict[str, set[str]] = {}
    for op in trace.ops:
        for read in op.reads:
            users.setdefault(read, set()).add(op.name)
    for name in reversed(tuple(outside)):
        if name not in returned and users.get(name, set()) <= dropped | set(scales):
            dropped.add(name)
    return frozenset(dropped)
