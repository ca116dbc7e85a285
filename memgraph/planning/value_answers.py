"""Calls of one kind that are captured for many sets of values: a warning, and submodules that run as they are.

9 sets of values of a mask    ->    the submodules that ask for them run as they are, and a warning
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from ..errors import CaptureError
from ..graph.guard_ops import GuardFailed, ValueGuard, same_values
from .variants import Variant

MANY = 8  # sets of values of one kind of call


def preferred_parts(variants: Sequence[Variant]) -> tuple[str, ...]:
    """Return the submodules that had better run as they are in a new capture; none while there are few variants."""
    traced = [variant for variant in variants if not variant.preferred]
    return paths_of(differing_guards(traced)) if len(traced) >= MANY else ()


def many_values_warning(variants: Sequence[Variant], opaque: Collection[str]) -> str:
    """Return a warning if variants of one kind of call, the latest first, are many; empty otherwise.

    The submodules `opaque` run as they are now.
    """
    if len(variants) <= MANY:
        return ""
    differing = differing_guards([variant for variant in variants if not variant.preferred])
    lines = "; ".join(f"{guard.where}: {guard.assumption}" for guard in differing[:3])
    begin = f"{len(variants)} graphs were captured of calls that differ in values only, on which forward branches: "
    begin, again = f"{begin}{lines}", "each new value is captured and planned"
    advice = "compute with torch.where or a mask instead, or do this outside of the module"
    paths = paths_of(differing)
    if not paths:
        return f"{begin}; {again}: {advice}"
    if set(paths) <= set(opaque):
        return f"{begin}; from now on {_listed(paths)} in one op, as opaque={list(paths)} asks for at once"
    return f"{begin}; {again}: with opaque={list(paths)} {_listed(paths)} in one op; or {advice}"


def differing_guards(variants: Sequence[Variant]) -> list[ValueGuard]:
    """Return the guards of the latest variant whose values differ between variants; the last one if none does."""
    if not variants:
        return []
    guards, *others = (variant.guards for variant in variants)
    differing = [guard for guard, *like in zip(guards, *others, strict=False) if _differ(guard, like)]
    return differing or list(guards[-1:])


def paths_of(guards: Collection[ValueGuard]) -> tuple[str, ...]:
    """Return the submodules that ask for the values of these guards; those alone that are inside of no other."""
    paths = dict.fromkeys(guard.path for guard in guards if guard.path)
    return tuple(path for path in paths if not any(path.startswith(f"{other}.") for other in paths))


def refuse_unstable(failure: GuardFailed) -> None:
    """Refuse a call that has other values than the graph that was captured with them.

    Raises:
        CaptureError: always.
    """
    guard = failure.guards[failure.guard]
    if guard.op == "opaque":
        raise CaptureError(
            f"{guard.where} runs as it is, and gives results of another structure, shape or size when the same "
            "call runs twice: make them depend on tensors, attributes and generators only"
        )
    raise CaptureError(
        f"forward branches at {guard.where} on a value that is not the same when the same call runs twice: the "
        f"capture found {guard.expected}, and the step {failure.actual}; make it depend on tensors and torch's "
        "generators only, or compute it outside of the module"
    )


def _listed(paths: Sequence[str]) -> str:
    return f"{paths[0]} runs as it is," if len(paths) == 1 else f"{', '.join(paths)} run as they are, each"


def _differ(guard: ValueGuard, others: Sequence[ValueGuard]) -> bool:
    return any(guard.question != other.question or not same_values(guard.expected, other.expected) for other in others)
