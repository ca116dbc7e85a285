"""The invariants of every trace, captured or rewritten.

- A value and a storage are defined once, and before they are read.
- Forward ops come before backward ops.
- A value holds only storages that its op makes, or that the values it reads hold; an input also those of earlier ones.
- Outputs have been defined.
- An offloaded value is not read between `free` and `wait`; after that, only its reloaded copy is.
- The result of a collective is not read before it has been waited for.
- A parameter that other ranks update is not read before it has been gathered.
- Only `reload` and the update read a value on the tier.  Only states are updated there.
- No other op reads what an update has changed.
- An op that may run once is not recomputed.  One that draws random numbers is recomputed between two `swap_rng`.
"""

from __future__ import annotations

from .ops import FREE, GATHER, GATHER_ROOM, GATHERED, NARROW, REDUCE_SCATTER, REDUCED, RELOAD, SWAP_RNG, gathered_by
from .trace import INPUTS, Op, Trace


class BrokenTrace(AssertionError):
    """A trace breaks an invariant: a defect of the pass that made it."""


def check(trace: Trace) -> None:
    """Check every invariant of this file.

    Raises:
        BrokenTrace: names the op and the invariant that it breaks.
    """
    holds: dict[str, tuple[str, ...]] = {}
    made: set[str] = set()
    freed: set[str] = set()
    updated: set[str] = set()
    pending: set[str] = set()
    gathers = gathered_by(trace)
    backward = False
    for index, op in enumerate(trace.ops):
        backward = _check_phases(op, backward)
        _check_names(op, holds, made)
        if freed and (early := freed.intersection(held for read in op.reads for held in holds[read])):
            raise BrokenTrace(f"{op.name} reads {early.pop()}, which has been freed on the device")
        if op.fn == FREE:
            sent = trace.op[op.reads[1]]
            freed.update(*(holds[name] for name in (sent.name, *sent.reads * (sent.fn == NARROW))))
        _check_collectives(op, holds, pending)
        _check_gathers(op, holds, gathers)
        if op.phase == "update":
            updated.update(held for read in op.reads for held in holds[read])
        elif updated and (late := updated.intersection(held for read in op.reads for held in holds[read])):
            raise BrokenTrace(f"{op.name} reads {late.pop()}, which an update has changed")
        _check_tier(op, trace)
        _check_recompute(trace, index)
        holds[op.name] = op.holds
        made.update(storage.name for storage in op.makes)
    for kind, value in trace.outputs:
        if value not in holds:
            raise BrokenTrace(f"the step returns {kind} {value}, which no op defines")


def _check_phases(op: Op, backward: bool) -> bool:
    if backward and op.phase == "forward" and op.fn not in INPUTS:
        raise BrokenTrace(f"{op.name} is a forward op behind a backward op")
    return backward or op.phase == "backward"


def _check_names(op: Op, holds: dict[str, tuple[str, ...]], made: set[str]) -> None:
    if op.name in holds:
        raise BrokenTrace(f"{op.name} is defined twice")
    if op.makes and (twice := made.intersection(storage.name for storage in op.makes)):
        raise BrokenTrace(f"{op.name} makes {twice.pop()}, which has been made before")
    for read in op.reads:
        if read not in holds:
            raise BrokenTrace(f"{op.name} reads {read} before it is defined")
    can = {storage.name for storage in op.makes} | {held for read in op.reads for held in holds[read]}
    if strange := set(op.holds) - (can | made if op.is_input else can):
        raise BrokenTrace(f"{op.name} holds {strange.pop()}, which neither it nor what it reads makes")


def _check_collectives(op: Op, holds: dict[str, tuple[str, ...]], pending: set[str]) -> None:
    """Check that no op reads the `pending` storages, which collectives fill."""
    if pending:
        read = {held for name in op.reads for held in holds[name]}
        if op.fn == REDUCED:
            pending -= read
        elif late := pending & read:
            raise BrokenTrace(f"{op.name} reads {min(late)}, which a collective has yet to fill")
    if op.fn == REDUCE_SCATTER:
        pending.update(op.holds)


def _check_gathers(op: Op, holds: dict[str, tuple[str, ...]], gathers: dict[str, set[str]]) -> None:
    """Check that no op reads what the pending `gathers` fill."""
    if op.fn == GATHERED:
        del gathers[op.name]
    elif gathers and op.fn not in (GATHER, GATHER_ROOM):
        read = {held for name in op.reads for held in holds[name]}
        if early := [name for name, storages in gathers.items() if storages & read]:
            raise BrokenTrace(f"{op.name} reads what {early[0]} has yet to wait for")


def _check_tier(op: Op, trace: Trace) -> None:
    for read in op.reads:
        if trace.op[read].offloaded and op.fn != RELOAD and op.phase != "update":
            raise BrokenTrace(f"{op.name} reads {read}, which is offloaded: it has to be reloaded before")
    if op.offloaded and (op.nbytes or not op.is_input):
        raise BrokenTrace(f"{op.name} is offloaded, but no input, or has {op.nbytes} bytes on the device")
    if op.on_host and not (op.offloaded and op.fn == "state"):
        raise BrokenTrace(f"{op.name} is updated on the host, but is no offloaded state")


def _check_recompute(trace: Trace, index: int) -> None:
    op = trace.ops[index]
    if not op.recomputes:
        return
    first = trace.op[op.recomputes]
    if first.once:
        raise BrokenTrace(f"{op.name} recomputes {first.name}, which may run once")
    around = [trace.ops[i].fn for i in (index - 1, index + 1) if 0 <= i < len(trace.ops)]
    if first.draws and around != [SWAP_RNG] * 2:
        raise BrokenTrace(f"{op.name} draws random numbers without the generator state of its first run")
