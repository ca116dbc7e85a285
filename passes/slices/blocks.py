"""The blocks in which a chain runs in parts.

a chain of one phase                            ->   one block, in that phase
a chain of both, linear in a scalar's tangent   ->   one block in forward; backward scales what it makes (`hoist.py`)
a chain of both, otherwise                      ->   a block in forward, and one in backward that begins with what of
                                                     forward has to run again, since no large value is kept
"""

from __future__ import annotations

from collections.abc import Iterable, Set
from dataclasses import dataclass

from ..ir.trace import Trace
from .hoist import Hoisted, hoisted
from .slice import Slice


@dataclass(frozen=True)
class Block:
    """Ops that run part by part.

    Attributes:
        phase: "forward" or "backward".
        names: captured ops, in their order.
        returned: of them those whose results ops outside of the block read, or the step returns.
        early: what runs in forward, with a tangent of 1; None if nothing does.
        letter: of the names of parts.
    """

    phase: str
    names: tuple[str, ...]
    returned: frozenset[str]
    early: Hoisted | None = None
    letter: str = "p"


def blocks_of(trace: Trace, cut: Slice) -> tuple[Block, ...]:
    """Return the blocks of a slice, in their order.

    Raises:
        ValueError: the chain can't run in forward, or an op that would have to run again may not.
    """
    names = tuple(cut.rule)
    forward = tuple(name for name in names if trace.op[name].phase == "forward")
    backward = tuple(name for name in names if trace.op[name].phase != "forward")
    if not forward or not backward:
        return (Block("forward" if forward else "backward", names, returned_values(trace, names)),)
    if not cut.reruns:
        return (Block("forward", names, returned_values(trace, names), hoisted(trace, names)),)
    again = rerun_names(trace, forward, backward, cut.reruns)
    if stuck := [name for name in again if trace.op[name].once or trace.op[name].draws]:
        raise ValueError(f"{stuck[0]} may not run again")
    kept = returned_values(trace, forward, beside=names) | _read(trace, (*again, *backward), forward) - set(again)
    return (
        Block("forward", forward, frozenset(kept)),
        Block("backward", (*again, *backward), returned_values(trace, backward), letter="r"),
    )


def rerun_names(trace: Trace, forward: Iterable[str], backward: Iterable[str], large: int) -> tuple[str, ...]:
    """Return the forward ops that run again: those that backward needs the results of, which have so many bytes."""
    own = set(forward)
    again, waiting = set[str](), list(backward)
    while waiting:
        for read in trace.op[waiting.pop()].reads:
            held = max((trace.nbytes[storage] for storage in trace.op[read].holds), default=0)
            if read in own and read not in again and held >= large:
                again.add(read)
                waiting.append(read)
    return tuple(name for name in trace.op if name in again)


def returned_values(trace: Trace, names: Iterable[str], beside: Iterable[str] = ()) -> frozenset[str]:
    """Return those of these values that ops other than they and those `beside` them read, or the step returns."""
    own = set(names)
    rest = own | set(beside)
    read = {read for op in trace.ops if op.name not in rest for read in op.reads}
    return frozenset(own & (read | {value for _, value in trace.outputs}))


def _read(trace: Trace, names: Iterable[str], of: Iterable[str]) -> Set[str]:
    """Return those of the values `of` that ops read."""
    return {read for name in names for read in trace.op[name].reads} & set(of)
