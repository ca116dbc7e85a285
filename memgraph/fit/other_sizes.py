"""The step of a size that was not captured, from those that were.

batch 1: relu f32[1, 8] 32 bytes; batch 2: relu 64 bytes   ->   batch 5: relu 160 bytes

Bytes of each storage are a polynomial of the batch, and of the tokens: of degree 1, or 2 for attention's scores. It is
drawn through up to three known sizes. Where the ops differ there is no answer. It is a guess, and the size that it
finds is captured.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from passes import Op, Storage, Trace

POINTS = 3


def guessed_trace(known: Mapping[int, Trace], size: int) -> Trace | None:
    """Return the trace of another size; None if fewer than two are known that have the same ops."""
    nearest = sorted(known, key=lambda each: abs(each - size))
    alike = [each for each in nearest if _form(known[each]) == _form(known[nearest[0]])][:POINTS]
    traces = [known[each] for each in alike]
    if len(traces) < 2:
        return None
    weights = _weights(alike, size)
    return replace(traces[0], ops=tuple(_between(ops, weights) for ops in zip(*[t.ops for t in traces], strict=True)))


def _form(trace: Trace) -> tuple[tuple[str, int], ...]:
    return tuple((op.name, len(op.makes)) for op in trace.ops)


def _weights(sizes: list[int], size: int) -> list[float]:
    """Return Lagrange's weights of the values at `sizes` for the value at `size`."""
    weights = [1.0] * len(sizes)
    for i, own in enumerate(sizes):
        for other in sizes:
            if other != own:
                weights[i] *= (size - other) / (own - other)
    return weights


def _between(ops: tuple[Op, ...], weights: list[float]) -> Op:
    def mixed(numbers: list[float]) -> float:
        if numbers.count(numbers[0]) == len(numbers):
            return numbers[0]
        return max(0.0, sum(weight * number for weight, number in zip(weights, numbers, strict=True)))

    first = ops[0]
    makes = tuple(
        Storage(made.name, round(mixed([op.makes[i].nbytes for op in ops]))) for i, made in enumerate(first.makes)
    )
    return replace(first, makes=makes, us=mixed([op.us for op in ops]))
