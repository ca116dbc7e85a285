"""What holds of every trace, captured or rewritten.

- A value is defined once, and before it is read; so is a storage.
- Forward ops stand before backward ops.
- A value holds only what its op makes, or what the values that it reads hold.
- What is handed out has been defined.
- A value is not read between `free` and `wait`: what was offloaded is read again only as what came back, be it cast for
  its way or not.
- What an exchange between ranks brings is read by nobody until it has been waited for.
- A parameter of which others have updated ranges is read by nobody until all of them have been gathered.
- Only `reload` and the update read what is far.  Only states are updated there.
- What an update has read is read by no other op: it has been changed.
- An op that may run once is not run again, and one that draws random numbers is run again between two `swap_rng`.
"""

from __future__ import annotations

from .ops import FREE, GATHER, GATHER_ROOM, GATHERED, NARROW, REDUCE_SCATTER, REDUCED, RELOAD, SWAP_RNG, gathered_by
from .trace import INPUTS, Op, Trace


class BrokenTrace(AssertionError):
    """A trace breaks an invariant: a defect of the pass that made it."""


def check(trace: Trace) -> None:
    """Every invariant of this file.

    Raises:
        BrokenTrace: with the op and the invariant it breaks.
    """
    holds: dict[str, tuple[str, ...]] = {}
    made: set[str] = set()
    gone: set[str] = set()
    updated: set[str] = set()
    under_way: set[str] = set()
    gathers = gathered_by(trace)
    backward = False
    for index, op in enumerate(trace.ops):
        backward = _phases(op, backward)
        _names(op, holds, made)
        if gone and (left := gone.intersection(held for read in op.reads for held in holds[read])):
            raise BrokenTrace(f"{op.name} reads {left.pop()}, whose bytes have left the device")
        if op.fn == FREE:
            sent = trace.op[op.reads[1]]
            gone.update(*(holds[name] for name in (sent.name, *sent.reads * (sent.fn == NARROW))))
        _exchanged(op, holds, under_way)
        _gathered(op, holds, gathers)
        if op.phase == "update":
            updated.update(held for read in op.reads for held in holds[read])
        elif updated and (late := updated.intersection(held for read in op.reads for held in holds[read])):
            raise BrokenTrace(f"{op.name} reads {late.pop()}, which an update has changed")
        _far(op, trace)
        _again(trace, index)
        holds[op.name] = op.holds
        made.update(storage.name for storage in op.makes)
    for kind, value in trace.outputs:
        if value not in holds:
            raise BrokenTrace(f"the step hands out {kind} {value}, which no op defines")


def _phases(op: Op, backward: bool) -> bool:
    if backward and op.phase == "forward" and op.fn not in INPUTS:
        raise BrokenTrace(f"{op.name} is a forward op and stands behind a backward op")
    return backward or op.phase == "backward"


def _names(op: Op, holds: dict[str, tuple[str, ...]], made: set[str]) -> None:
    if op.name in holds:
        raise BrokenTrace(f"{op.name} is defined twice")
    if op.makes and (twice := made.intersection(storage.name for storage in op.makes)):
        raise BrokenTrace(f"{op.name} makes {twice.pop()}, which is there already")
    for read in op.reads:
        if read not in holds:
            raise BrokenTrace(f"{op.name} reads {read} before it is defined")
    can = {storage.name for storage in op.makes} | {held for read in op.reads for held in holds[read]}
    if strange := set(op.holds) - can:
        raise BrokenTrace(f"{op.name} holds {strange.pop()}, which neither it nor what it reads has made")


def _exchanged(op: Op, holds: dict[str, tuple[str, ...]], under_way: set[str]) -> None:
    """`under_way` are the storages that exchanges between ranks fill."""
    if under_way:
        read = {held for name in op.reads for held in holds[name]}
        if op.fn == REDUCED:
            under_way -= read
        elif late := under_way & read:
            raise BrokenTrace(f"{op.name} reads {min(late)}, which is still under way between ranks")
    if op.fn == REDUCE_SCATTER:
        under_way.update(op.holds)


def _gathered(op: Op, holds: dict[str, tuple[str, ...]], gathers: dict[str, set[str]]) -> None:
    """`gathers` are those yet to end, with the storages that they fill."""
    if op.fn == GATHERED:
        del gathers[op.name]
    elif gathers and op.fn not in (GATHER, GATHER_ROOM):
        read = {held for name in op.reads for held in holds[name]}
        if early := [name for name, storages in gathers.items() if storages & read]:
            raise BrokenTrace(f"{op.name} reads what {early[0]} has yet to wait for")


def _far(op: Op, trace: Trace) -> None:
    for read in op.reads:
        if trace.op[read].offloaded and op.fn != RELOAD and op.phase != "update":
            raise BrokenTrace(f"{op.name} reads {read}, which is far: it has to be reloaded before")
    if op.offloaded and (op.nbytes or not op.is_input):
        raise BrokenTrace(f"{op.name} is far, and no input or of {op.nbytes} bytes here")
    if op.on_host and not (op.offloaded and op.fn == "state"):
        raise BrokenTrace(f"{op.name} is updated on the host, and is no state that lives there")


def _again(trace: Trace, index: int) -> None:
    op = trace.ops[index]
    if not op.recomputes:
        return
    first = trace.op[op.recomputes]
    if first.once:
        raise BrokenTrace(f"{op.name} runs {first.name} again, which may run once")
    around = [trace.ops[i].fn for i in (index - 1, index + 1) if 0 <= i < len(trace.ops)]
    if first.draws and around != [SWAP_RNG] * 2:
        raise BrokenTrace(f"{op.name} draws random numbers again without the state with which they were first drawn")
